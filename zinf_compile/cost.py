"""Seconds of an op: a roofline over its floating-point work and the bytes that it touches; temporaries of known kernels.

Ahead of the first step these are estimates; a recorded step then scales them graph by graph (`liveness.Measured`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from . import _torch

aten = torch.ops.aten

# Temporaries that CPU kernels allocate beside their outputs, as a multiple of the bytes of one argument (its position).
# Only kernels where it matters: everything else is learned from the first recorded step.
_WORKSPACE: dict[Any, tuple[int, float]] = {
    aten.convolution.default: (0, 1.1),
    aten.convolution_backward.default: (1, 2.3),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 0.3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 0.3),
}


@dataclass(frozen=True, slots=True)
class Work:
    """flops and nbytes (read + written) of one op; workspace in bytes. Numbers or sympy expressions of symbolic sizes."""

    flops: Any = 0
    nbytes: Any = 0
    workspace: Any = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does per second: `flops`, `bandwidth` (bytes), and `overhead` seconds an op."""

    flops: float = 60e9
    bandwidth: float = 12e9
    overhead: float = 6e-6

    def seconds(self, work: Work, symbols: Mapping[sympy.Symbol, int]) -> float:
        def number(x: Any) -> float:
            return float(x.subs(symbols)) if isinstance(x, sympy.Expr) else float(x)

        return max(number(work.flops) / self.flops, number(work.nbytes) / self.bandwidth) + self.overhead


def _plain(x: Any) -> Any:
    """A SymInt as its sympy expression, numbers as they are."""
    return x.node.expr if isinstance(x, torch.SymInt) else x


def _nbytes(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        return 0 if val.layout != torch.strided else _plain(val.numel()) * val.element_size()
    if isinstance(val, (tuple, list)):
        return sum((_nbytes(v) for v in val), 0)
    return 0


def work_of(node: fx.Node) -> Work:
    """The work of one FX node. Views cost nothing."""
    val = node.meta.get("val")
    inputs = [a.meta.get("val") for a in node.all_input_nodes]
    if is_view(node):
        return Work()
    nbytes = _nbytes(val) + sum((_nbytes(v) for v in inputs), 0)
    flops: Any = 0
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        try:
            flops = _plain(flop_registry[packet](*args, **kwargs, out_val=val))
        except (TypeError, ValueError, AssertionError, IndexError):
            flops = 0  # a shape the counter does not know: bytes alone decide
    workspace: Any = 0
    if node.target in _WORKSPACE:
        position, factor = _WORKSPACE[node.target]
        source = node.args[position] if position < len(node.args) else None
        if isinstance(source, fx.Node):
            workspace = _nbytes(source.meta.get("val")) * factor
    return Work(flops, nbytes, workspace)


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at bytes that exist already (and costs nothing)."""
    target = node.target
    if not isinstance(target, _torch.OpOverload):
        return True  # getitem and size arithmetic
    return bool(target._schema.returns) and any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)
