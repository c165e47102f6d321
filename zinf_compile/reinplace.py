"""Let additions write into an operand that dies there: one buffer less alive at exactly the ops that set the peak.

AOTAutograd's graphs are functional, so every residual sum and every sum of a tied weight's partial gradients has an output
of its own (147 MiB for GPT-2's embedding). `add_(x, y)` gives the same bits as `add(x, y)`, and as `add(y, x)`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from . import _torch

aten = torch.ops.aten


def reuse_dead_operands(gm: fx.GraphModule) -> int:
    """Rewrite `add` into `add_` where an operand is made in this graph, is read by nothing later (through no view either),
    is no output, and has the sum's shape, dtype and strides. Returns how many were rewritten."""
    graph = gm.graph
    nodes = list(graph.nodes)
    last: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            for key in _keys(used):
                last[key] = i
    borrowed = {key for node in graph.find_nodes(op="placeholder") for key in _keys(node)}
    count = 0
    for i, node in enumerate(nodes):
        if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
            continue
        for operand, other in (node.args, node.args[::-1]):
            if not _reusable(operand, other, node) or last[_keys(operand)[0]] != i or _keys(operand)[0] in borrowed:
                continue
            node.target, node.args, node.kwargs = aten.add_.Tensor, (operand, other), {}
            old, new = _keys(node)[0], _keys(operand)[0]
            # From here on the sum lives in the operand's storage; views of it do too.
            last[new] = max(last[new], last.pop(old))
            _move_storage(nodes[i:], old, operand.meta["val"])
            count += 1
            break
    if count:
        graph.lint()
        gm.recompile()
    return count


def _reusable(operand: object, other: object, node: fx.Node) -> bool:
    if not isinstance(operand, fx.Node) or operand.op != "call_function":
        return False
    mine, result = operand.meta.get("val"), node.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(result, torch.Tensor) or mine.layout != torch.strided:
        return False
    if isinstance(other, fx.Node) and set(_keys(other)) & set(_keys(operand)):
        return False
    return (
        mine.shape == result.shape
        and mine.dtype == result.dtype
        and mine.stride() == result.stride()
        and mine.storage_offset() == 0
        and mine.numel() * mine.element_size() == mine.untyped_storage().nbytes()
    )


def _keys(node: fx.Node) -> list[int]:
    val = node.meta.get("val")
    values: Iterable[object] = val if isinstance(val, (tuple, list)) else [val]
    return [_torch.storage_key(v) for v in values if isinstance(v, torch.Tensor)]


def _move_storage(nodes: list[fx.Node], old: int, home: torch.Tensor) -> None:
    """Give every value that lived in storage `old` an equal fake value over the storage of `home`."""
    for node in nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.layout == torch.strided and _torch.storage_key(val) == old:
            node.meta["val"] = home.as_strided(val.shape, val.stride(), val.storage_offset())
        elif isinstance(val, (tuple, list)):
            node.meta["val"] = type(val)(
                home.as_strided(v.shape, v.stride(), v.storage_offset())
                if isinstance(v, torch.Tensor) and v.layout == torch.strided and _torch.storage_key(v) == old
                else v
                for v in val
            )
