"""What models and user code do that a graph capture can trip over, under zinf_compile at the smallest budget and on a plain
twin: bit-equal results, gradients and buffers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from zinf_compile import Unsupported

from . import capture_models as models
from .support import MLP, assert_equal, build, grads, inputs, values

X, Y3 = inputs(1), torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(3))


def step(model, x=X):
    """One forward and backward: loss and gradients."""
    loss = model(x)
    loss.sum().backward()
    return [loss.detach(), grads(model)]


def sequence(block):
    return lambda: nn.Sequential(*[block() for _ in range(5)])


PLAIN_STEP = {
    "mlp": (MLP, X),
    "graph break by a print": (models.Prints, X),
    "parameter read at a graph break": (models.ReadsAfterBreak, X),
    "method that dynamo skips": (models.DisabledMethod, X),
    "tied embedding": (models.Tied, torch.arange(5)),
    "reads its parameters' metadata": (models.ReadsMetadata, X),
    "iterates its parameters": (models.IteratesParameters, X),
    "transformer encoder layer": (models.Encoder, Y3),
    "sequential of equal blocks": (sequence(models.Block), X),
    "sequential with a break in each block": (sequence(models.BreakingBlock), X),
    "parameter used by another module": (models.BorrowsParameter, X),
    "autocast inside": (models.AutocastInside, X),
}


@pytest.mark.parametrize("name", PLAIN_STEP)
def test_one_step(zinf, name):
    make, x = PLAIN_STEP[name]
    assert zinf.run_both(make, lambda model: step(model, x)).bytes_moved > 0


def test_parametrizations_and_their_buffers_over_two_steps(zinf):
    """weight_norm recomputes its weight; spectral_norm updates a buffer once a forward."""

    def pattern(model):
        return [step(model), step(model), dict(model.named_buffers())]

    assert zinf.run_both(models.Parametrized, pattern).bytes_moved > 0


def test_batch_norm_updates_its_buffers_and_eval_uses_them(zinf):
    def pattern(model):
        trained = [step(model) for _ in range(3)]
        model.eval()
        return [trained, model(X), dict(model.named_buffers())]

    assert zinf.run_both(models.BatchNorm, pattern).bytes_moved > 0


def test_train_eval_train_with_dropout(zinf):
    def pattern(model):
        out = []
        for mode in (True, False, True):
            model.train(mode)
            torch.manual_seed(1)
            out.append(model(X).item())
        return out

    assert zinf.run_both(models.Dropout, pattern).bytes_moved > 0


def test_encoder_fast_path_and_inference_mode(zinf):
    """The fused kernel of eval may round differently from the traced ops, so within 1e-5."""

    def pattern(model):
        first = step(model, Y3)
        model.eval()
        with torch.no_grad():
            fast = model(Y3).clone()
        with torch.inference_mode():
            inference = model(Y3).clone()
        return first, fast, inference

    ours, _, _ = zinf.at_minimum(models.Encoder, pattern)
    plain = pattern(build(models.Encoder))
    assert_equal(ours[0], plain[0])
    for a, b in zip(ours[1:], plain[1:]):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_no_grad_inference_mode_then_training(zinf):
    def pattern(model):
        with torch.inference_mode():
            a = model(X)
        with torch.no_grad():
            b = model(X)
        return [a.is_inference(), a.clone(), b, step(model)]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


class Untraceable(MLP):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("when", ["first call", "example_inputs"])
def test_strict_refuses_a_call_that_ran_no_planned_graph(zinf, when):
    with pytest.raises(Unsupported, match=r"strict=True.*Untraceable.*leave strict out"):
        model = zinf.compiled(build(Untraceable), 64 << 20, strict=True, example_inputs=(X,) if when == "example_inputs" else None)
        model(X)


def test_strict_takes_what_is_traced_and_without_it_eager_goes_on(zinf):
    plain = build(MLP)
    strict = zinf.compiled(build(MLP), 64 << 20, strict=True)
    assert_equal([step(strict), step(strict)], [step(plain), step(plain)])
    with torch.no_grad():
        assert_equal(strict(X), plain(X))
    with torch.compiler.set_stance("force_eager"), pytest.raises(Unsupported, match="set_stance"):
        strict(X)
    assert_equal(zinf.compiled(build(Untraceable), 64 << 20)(X), plain(X))


def test_force_eager_stance_computes_on_real_parameters(zinf):
    def pattern(model):
        compiled = step(model)
        with torch.compiler.set_stance("force_eager"):
            return [compiled, model(X)]

    zinf.run_both(MLP, pattern)


def test_many_variants_of_one_model_all_compute_right(zinf):
    """More graphs than Dynamo's default recompile limit (8)."""

    def pattern(model):
        out = []
        for model.flag in range(10):
            out.append(model(X).item())
        return out

    assert zinf.run_both(models.Flagged, pattern).bytes_moved > 0


def test_many_models_of_one_class_do_not_compute_with_each_others_weights(zinf):
    """One graph may serve several models: nothing of a model may be baked into it."""
    _, first, budget = zinf.at_minimum(MLP, step)
    for i in range(10):
        torch.manual_seed(i)
        plain = MLP()
        ours = zinf.compiled(copy.deepcopy(plain), budget)
        assert_equal(step(ours), step(plain), f"model {i}")
    assert first.zinf.stats()["bytes_read"] > 0


def test_changing_batch_sizes(zinf):
    def pattern(model):
        out = []
        for rows in (4, 5, 6, 9):
            model.zero_grad()
            loss, g = step(model, inputs(rows, rows))
            out.append([loss, {k: v.clone() for k, v in g.items()}])
        return out

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


def test_inside_another_compiled_function(zinf):
    def pattern(model):
        outer = torch.compile(lambda x: model(x) * 2, backend="aot_eager")
        return [step(model), outer(X)]

    zinf.run_both(MLP, pattern)


def test_submodules_and_forward_called_directly(zinf):
    def pattern(model):
        compiled = step(model)
        model.zero_grad()
        direct = model.forward(X)
        direct.backward()
        return [compiled[0], model.a(X), direct, grads(model)]

    zinf.run_both(MLP, pattern)


def test_functional_call_uses_the_values_given(zinf):
    def pattern(model):
        compiled = step(model)
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
        return [compiled, functional_call(model, zeros, (X,)), functional_call(model, doubled, (X,)), model(X)]

    zinf.run_both(MLP, pattern)


def test_a_replaced_parameter_is_noticed(zinf):
    def pattern(model):
        before = model(X).item()
        model.a.weight = nn.Parameter(torch.full_like(model.a.weight, 0.01))
        return [before, step(model)]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


def test_a_changed_dtype_is_noticed(zinf):
    def pattern(model):
        before = model(X).item()
        model.double()
        return [before, step(model, X.double())]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


@pytest.mark.parametrize("where", ["top", "sub"])
@pytest.mark.parametrize("late", [False, True], ids=["before the first call", "after it"])
def test_forward_hooks_fire_and_change_the_output(zinf, where, late):
    def pattern(model):
        seen: list[str] = []
        target = model if where == "top" else model.a

        def register():
            target.register_forward_pre_hook(lambda m, args: (seen.append("pre"), (args[0] * 2,))[1])
            target.register_forward_hook(lambda m, args, out: (seen.append("post"), out * 3)[1])

        first = model(X).item() if late else None
        register()
        return [first, step(model), seen]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


def test_full_backward_hooks_fire(zinf):
    def pattern(model):
        seen: list[str] = []
        model.b.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append("b"))
        return [step(model), seen]

    zinf.run_both(MLP, pattern)


def test_structured_outputs(zinf):
    def pattern(model):
        out = model(X, 2.0, flag="a")
        (out["loss"] + out["h"].sum()).backward()
        return [out["loss"].detach(), out["h"].detach(), list(out["t"]), grads(model)]

    assert zinf.run_both(models.Structured, pattern).bytes_moved > 0


def test_a_model_that_returns_its_parameter(zinf):
    def pattern(model):
        loss, weight, view = model(X)
        same = [weight is model.b.weight, view.data_ptr() == model.b.weight.data_ptr()]
        (loss + weight.sum() + view.sum()).backward()
        return [same, grads(model)]

    zinf.run_both(models.ReturnsParameter, pattern)


def test_a_model_that_edits_its_parameter(zinf):
    def pattern(model):
        return [model(X).item(), model(X).item(), values(model)]

    assert zinf.run_both(models.EditsParameter, pattern).bytes_moved > 0


@pytest.mark.parametrize("make", [models.Checkpointed, models.ReentrantCheckpointed], ids=["non-reentrant", "reentrant"])
def test_checkpoint_inside_the_model(zinf, make):
    def pattern(model):
        x = X.clone().requires_grad_()
        model(x).backward()
        return [x.grad, grads(model)]

    zinf.run_both(make, pattern)


def test_autocast_around_a_call_then_without(zinf):
    def pattern(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X)
        loss.backward()
        low = {k: g.clone() for k, g in grads(model).items()}
        model.zero_grad()
        return [loss.detach(), low, step(model)]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


def test_all_parameters_frozen_and_the_gradient_of_the_input(zinf):
    def pattern(model):
        model.requires_grad_(False)
        x = X.clone().requires_grad_()
        model(x).backward()
        return [x.grad, grads(model)]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


def test_dynamo_reset_between_forward_and_backward(zinf):
    def pattern(model):
        loss = model(X)
        torch._dynamo.reset()
        loss.backward()
        first = {k: g.clone() for k, g in grads(model).items()}
        model.zero_grad()
        return [first, step(model)]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


def test_an_error_in_forward_leaves_the_model_usable(zinf):
    def pattern(model):
        before = model(X).item()
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 9))
        return [before, step(model)]

    assert zinf.run_both(MLP, pattern).bytes_moved > 0


def test_a_deep_copy_is_a_model_of_its_own(zinf):
    def pattern(model):
        before = model(X).item()
        twin = copy.deepcopy(model)
        twin.a.weight.data.zero_()
        return [before, twin(X).item(), model(X).item(), values(model)]

    zinf.run_both(MLP, pattern)


def test_a_pickled_model_comes_back_with_its_weights(zinf):
    def pattern(model):
        before = step(model)
        back = pickle.loads(pickle.dumps(model))
        return [before, values(back), values(model)]

    zinf.run_both(MLP, pattern)


def test_export_sees_the_whole_model(zinf):
    def pattern(model):
        before = step(model)
        return [before, torch.export.export(model, (X,)).module()(X)]

    zinf.run_both(MLP, pattern)


def test_func_grad_is_right_or_refused_by_name(zinf):
    """torch.func transforms over a compiled call: Dynamo itself may refuse them; a wrong value is what must not come out."""

    def pattern(model):
        return torch.func.grad(lambda x: model(x))(X)

    try:
        ours, _, _ = zinf.at_minimum(MLP, pattern)
    except RuntimeError as refusal:
        assert "func" in str(refusal) or isinstance(refusal, Unsupported)
    else:
        torch.testing.assert_close(ours, pattern(build(MLP)))


def test_sparse_gradient_is_right_or_refused_by_name(zinf):
    def pattern(model):
        return step(model, torch.tensor([1, 1, 3]))

    try:
        zinf.run_both(models.SparseGradient, pattern, moves=False)
    except Unsupported as refusal:
        assert "sparse" in str(refusal)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "not closed"])
def test_a_model_with_graph_breaks_is_freed_with_its_gradients(zinf, closed):
    """Dynamo keeps the functions in which it resumes after a break, and what was compiled for them."""
    model = zinf.compiled(build(models.Prints), 64 << 20)
    model(inputs()).backward()
    found = [weakref.ref(model.a.weight), weakref.ref(model.a.weight.grad)]
    zinf.models.clear()
    if closed:
        model.zinf.close()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in found] == [None, None]
