"""Every private torch symbol that the project uses, in one place, with a self-check.

torch >= 2.11. A symbol that moved is reported by name (`self_check`), so that a new torch fails with one clear line instead
of in the middle of a compilation.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # the public name of the partitioner

NEEDED = (
    ("torch._dynamo.backends.common", "aot_autograd"),
    ("torch._dynamo", "config"),
    ("torch._functorch._aot_autograd.descriptors", "GradAOTOutput"),
    ("torch._functorch._aot_autograd.descriptors", "PlainAOTInput"),
    ("torch._functorch._aot_autograd.descriptors", "TangentAOTInput"),
    ("torch._functorch", "config"),
    ("torch._C", "_will_engine_execute_node"),
    ("torch._guards", "TracingContext"),
    ("torch.fx.graph", "_BoxedCodeGen"),
)


def _load() -> dict[str, Any]:
    found, missing = {}, []
    for module, name in NEEDED:
        try:
            found[f"{module}.{name}"] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{name}")
    if missing:
        raise ImportError(
            f"zinf_compile needs {', '.join(missing)}, which torch {torch.__version__} does not have; "
            "install a torch that this version supports (2.11 to 2.13)"
        )
    return found


_SYMBOLS = _load()
aot_autograd = _SYMBOLS["torch._dynamo.backends.common.aot_autograd"]
dynamo_config = _SYMBOLS["torch._dynamo.config"]
functorch_config = _SYMBOLS["torch._functorch.config"]
GradAOTOutput = _SYMBOLS["torch._functorch._aot_autograd.descriptors.GradAOTOutput"]
PlainAOTInput = _SYMBOLS["torch._functorch._aot_autograd.descriptors.PlainAOTInput"]
TangentAOTInput = _SYMBOLS["torch._functorch._aot_autograd.descriptors.TangentAOTInput"]
BoxedCodeGen = _SYMBOLS["torch.fx.graph._BoxedCodeGen"]
will_engine_execute_node = _SYMBOLS["torch._C._will_engine_execute_node"]
OpOverload = torch._ops.OpOverload
partition_min_cut = min_cut_rematerialization_partition


def compile_options() -> dict[str, Any]:
    """Arguments of torch.compile that keep one model's guards apart from another's, where this torch has them."""
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {}
    if "isolate_recompiles" in known:
        options["isolate_recompiles"] = True
    if "recompile_limit" in known:
        options["recompile_limit"] = 256
    return options


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a (fake) tensor's storage: equal for a base and all its views. A sparse tensor is on its own."""
    if tensor.layout != torch.strided:
        return -id(tensor)
    return tensor.untyped_storage()._cdata


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors share this tensor's storage (1: only this one)."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def grad_wanted(param: torch.Tensor) -> bool | str:
    """Whether the running backward delivers to this leaf: True, False, or "capture" when autograd.grad asked for it."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:
        return "capture"


def grad_observed(param: torch.Tensor) -> bool:
    """Whether user code sees this leaf's gradient on its way (tensor hooks, post-accumulate hooks, multi-grad hooks)."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))


# Whether this thread runs a compiled graph of a backward under create_graph=True: a fact about torch's call, as its grad mode
# is, which torch turns off around the graph. Not a ContextVar: torch runs the graph in a context of its own.
_running = threading.local()


def creating_graph() -> bool:
    """Whether the graph that is running belongs to a backward whose gradients the user may differentiate again."""
    return getattr(_running, "creates_graph", False)


@contextmanager
def backward_again(refusal: Callable[[], Exception], num_params: int) -> Iterator[None]:
    """Graphs that AOTAutograd compiles inside allow retain_graph=True, and raise `refusal()` where a gradient that they
    computed is differentiated again: when it is, or under create_graph=True at once where an input other than the `num_params`
    trainable parameters wants its gradient, since torch does not connect that gradient to the input and
    `autograd.grad(gradient, input, allow_unused=True)` would answer None, as if it did not depend on it.

    torch raises a RuntimeError of its own for the latter, out of the autograd engine, where none of our code is on the stack.
    The class that raises it is made anew in each backward under create_graph=True, by a method of the function's class."""
    before = set(torch.autograd.Function.__subclasses__())
    # Donated buffers would forbid retain_graph=True.
    with functorch_config.patch(donated_buffer=False):
        yield
    made: list[Any] = torch.autograd.Function.__subclasses__()
    for function in made:
        if function not in before and "_double_backward" in function.__dict__:
            function._double_backward = staticmethod(_refusing(function._double_backward, refusal, num_params))
            # Undecided (None) counts as donated when the first backward was an ordinary one and a later one retains.
            function.metadata.bw_donated_idxs = []


def _refusing(original: Callable[..., Any], refusal: Callable[[], Exception], num_params: int) -> Callable[..., Any]:
    """`_double_backward(ctx, impl_fn, all_args)`, with `refusal` in place of torch's error."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise refusal()

    def double_backward(ctx: Any, impl_fn: Callable[..., Any], all_args: list[Any]) -> Any:
        if sum(ctx.needs_input_grad) > num_params:
            raise refusal()

        def run(inner: Any) -> Any:
            type(inner)._forward_cls.backward = staticmethod(refuse)
            before, _running.creates_graph = creating_graph(), True
            try:
                return impl_fn(inner)
            finally:
                _running.creates_graph = before

        return original(ctx, run, all_args)

    return double_backward


def self_check() -> list[str]:
    """Names of the private symbols in use; raises ImportError naming what is missing."""
    return sorted(_load())
