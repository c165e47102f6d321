"""What users do with autograd, on a model under zinf_compile at its smallest budget and on a plain twin: bit-equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .support import MLP, grads, inputs, values

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

    for p in params(model):
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(X).backward()
    return [values(model), grads(model)]


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
    torch.autograd.graph.register_multi_grad_hook(params(model), lambda gs: seen.append([None if g is None else g.clone() for g in gs]))
    model(X).backward()
    return seen


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


def test_double_backward_is_a_clear_error(zinf):
    """Second-order gradients aren't there: they must be refused by name, never be silently first-order."""

    def penalty(model):
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        gradient.square().sum().backward()
        return grads(model)

    with pytest.raises(RuntimeError, match="double backward|create_graph"):
        zinf.at_minimum(MLP, penalty)
