"""What users do with autograd, on a model under zinf_compile at its smallest budget and on a plain twin: bit-equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zinf_compile import Unsupported

from .support import MLP, assert_equal, build, grads, inputs, values

X, Z = inputs(1), inputs(2)


def params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def backward(model):
    model(X).backward()
    return grads(model)


def autograd_grad(model):
    return [*torch.autograd.grad(model(X), params(model)), grads(model)]


def autograd_grad_of_some(model):
    return [*torch.autograd.grad(model(X), [model.b.weight, model.c.bias]), grads(model)]


def backward_to_one_parameter(model):
    model(X).backward(inputs=[model.b.weight])
    return grads(model)


def backward_to_the_input(model):
    x = X.clone().requires_grad_()
    model(x).backward(inputs=[x])
    return [x.grad, grads(model)]


def autograd_grad_of_the_input(model):
    x = X.clone().requires_grad_()
    return [*torch.autograd.grad(model(x), x), grads(model)]


def accumulate(model):
    for x in (X, Z, X):
        model(x).backward()
    return grads(model)


def two_forwards_one_backward(model):
    (model(X) * 2 + model(Z)).backward()
    return grads(model)


def two_forwards_then_two_backwards(model):
    first, second = model(X), model(Z)
    first.backward()
    second.backward()
    return grads(model)


def two_forwards_backward_in_reverse(model):
    first, second = model(X), model(Z)
    second.backward()
    first.backward()
    return grads(model)


def retain_graph(model):
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


def retain_graph_after_an_ordinary_backward(model):
    """The backward graph is compiled by a backward that lets its saved tensors go; a later one keeps them."""
    model(Z).backward()
    loss = model(X)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


def frozen_layer_and_two_backwards(model):
    model.b.requires_grad_(False)
    return retain_graph_after_an_ordinary_backward(model)


def dropped_forwards_with_a_frozen_layer(model):
    model.b.requires_grad_(False)
    model(X), model(X)
    for _ in range(70):
        model.zero_grad()
        model(Z).backward()
    return grads(model)


def create_graph_without_a_second_derivative(model):
    model(Z).backward()
    loss = model(X)
    gradients = torch.autograd.grad(loss, params(model), create_graph=True)
    loss.backward()
    return [[g.detach() for g in gradients], grads(model)]


def penalty_uncompiled(model):
    """The way out that the refusal of a double backward names."""
    out = []
    for _ in range(2):
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model.forward(x), x, create_graph=True)
        (model(Z) + gradient.square().sum()).backward()
        out.append(grads(model))
        model.zero_grad()
    return out


def tensor_hook(model):
    model.b.weight.register_hook(lambda g: g * 10)
    model(X).backward()
    return grads(model)


def tensor_hook_with_accumulation(model):
    model.b.weight.register_hook(lambda g: g * 10)
    model(X).backward()
    model(Z).backward()
    return grads(model)


def post_accumulate_hook(model):
    seen: list[float] = []
    for p in params(model):
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().sum().item()))
    model(X).backward()
    model(Z).backward()
    return sorted(seen)


def optimizer_in_backward(model):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in params(model)}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in params(model)]
    try:
        for _ in range(3):
            model(X).backward()
        return [values(model), grads(model)]
    finally:  # a hook that refers to its own parameter is never collected
        [handle.remove() for handle in handles]


def freeze_and_unfreeze(model):
    model(X).backward()
    model.a.requires_grad_(False)
    model.zero_grad()
    model(X).backward()
    frozen = {k: None if g is None else g.clone() for k, g in grads(model).items()}
    model.a.requires_grad_(True)
    model(Z).backward()
    return [frozen, grads(model)]


def penalty_on_masters(model):
    (model(X) + 0.1 * sum(p.square().sum() for p in params(model))).backward()
    return grads(model)


def penalty_on_masters_by_grad(model):
    return list(torch.autograd.grad(model(X) + 0.1 * sum(p.square().sum() for p in params(model)), params(model)))


def gradient_set_by_the_user(model):
    for p in params(model):
        p.grad = torch.ones_like(p)
    mine = [p.grad for p in params(model)]
    model(X).backward()
    return [grads(model), [g is p.grad for g, p in zip(mine, params(model))], mine]


def zero_grad_in_place(model):
    model(X).backward()
    model.zero_grad(set_to_none=False)
    model(Z).backward()
    return grads(model)


def gradient_held_by_the_user(model):
    model(X).backward()
    held = grads(model)
    model.zero_grad()
    model(Z).backward()
    return [held, grads(model)]


def multi_grad_hook(model):
    seen: list[list[torch.Tensor | None]] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        params(model), lambda gs: seen.append([None if g is None else g.clone() for g in gs])
    )
    try:
        model(X).backward()
        return seen
    finally:  # it refers to the parameters that refer to it
        handle.remove()


def anomaly_mode(model):
    with pytest.warns(UserWarning), torch.autograd.detect_anomaly(check_nan=True):
        model(X).backward()
    return grads(model)


def checkpoint_around_the_model(model, reentrant=False):
    x = X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).backward()
    return [x.grad, grads(model)]


def reentrant_checkpoint_around_the_model(model):
    return checkpoint_around_the_model(model, reentrant=True)


def grad_scaler_and_clipping(model):
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(model(X)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return [values(model), norm, scaler.get_scale()]


PATTERNS = [
    backward,
    autograd_grad,
    autograd_grad_of_some,
    backward_to_one_parameter,
    backward_to_the_input,
    autograd_grad_of_the_input,
    accumulate,
    two_forwards_one_backward,
    two_forwards_then_two_backwards,
    two_forwards_backward_in_reverse,
    retain_graph,
    retain_graph_after_an_ordinary_backward,
    create_graph_without_a_second_derivative,
    frozen_layer_and_two_backwards,
    dropped_forwards_with_a_frozen_layer,
    penalty_uncompiled,
    tensor_hook,
    tensor_hook_with_accumulation,
    post_accumulate_hook,
    optimizer_in_backward,
    freeze_and_unfreeze,
    penalty_on_masters,
    penalty_on_masters_by_grad,
    gradient_set_by_the_user,
    zero_grad_in_place,
    gradient_held_by_the_user,
    multi_grad_hook,
    anomaly_mode,
    checkpoint_around_the_model,
    reentrant_checkpoint_around_the_model,
    grad_scaler_and_clipping,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_gradients_are_those_of_plain_pytorch(zinf, pattern):
    both = zinf.run_both(MLP, pattern)
    assert both.bytes_moved > 0


def test_a_second_backward_without_retain_graph_is_pytorchs_error(zinf):
    def twice(model):
        loss = model(X)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        return grads(model)

    assert zinf.run_both(MLP, twice).bytes_moved > 0


def test_editing_a_saved_parameter_before_backward_is_pytorchs_error(zinf):
    """In-place edits between forward and backward: the version check of autograd must still see them."""

    def edit(model):
        loss = model(X)
        with torch.no_grad():
            model.b.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()
        return values(model)

    zinf.run_both(MLP, edit)


def penalty_on_the_input_gradient(model):
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    (model(X) + gradient.square().sum()).backward()


def hessian_of_the_input(model):
    """Not strict: where torch finds no connection, it answers zeros."""
    torch.autograd.functional.hessian(model, X)


def penalty_on_parameter_gradients(model):
    gradients = torch.autograd.grad(model(X), params(model), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()


def penalty_on_accumulated_gradients(model):
    """The second backward adds to gradients that have no history: the sums must have one."""
    model(X).backward()
    model(X).backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in params(model))
    model.zero_grad()
    penalty.backward()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    "penalty",
    [penalty_on_the_input_gradient, hessian_of_the_input, penalty_on_parameter_gradients, penalty_on_accumulated_gradients],
    ids=lambda p: p.__name__,
)
def test_double_backward_is_refused_by_name(zinf, penalty):
    """Second-order gradients aren't there: they must never be silently first-order. Afterwards the model is as good as before."""

    def refused(model):
        with pytest.raises(Unsupported, match=r"double backward.*create_graph=True.*model\.forward"):
            penalty(model)
        model.zero_grad()
        model(Z).backward()
        return grads(model)

    ours, _, _ = zinf.at_minimum(MLP, refused)
    plain = build(MLP)
    plain(Z).backward()
    assert_equal(ours, grads(plain))
    assert isinstance(Unsupported("as torch's own"), RuntimeError)


def test_double_backward_of_a_plain_torch_compile_stays_torchs(zinf):
    """What the user compiles without us is not ours to name."""
    zinf.at_minimum(MLP, backward)
    x = X.clone().requires_grad_()
    plain = torch.compile(build(MLP), backend="aot_eager")
    (gradient,) = torch.autograd.grad(plain(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward") as caught:
        gradient.sum().backward()
    assert not isinstance(caught.value, Unsupported)
