"""Every private torch symbol that the project uses, in one place, with a self-check.

torch >= 2.11. A symbol that moved is reported by name (`self_check`), so that a new torch fails with one clear line instead
of in the middle of a compilation.
"""

from __future__ import annotations

import importlib
import inspect
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


def self_check() -> list[str]:
    """Names of the private symbols in use; raises ImportError naming what is missing."""
    return sorted(_load())
