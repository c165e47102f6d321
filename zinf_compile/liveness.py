"""FX graphs -> Program: which storages exist, which node touches which, and when each is dead.

Storages are told apart by the identity of the fake tensors' storage, never by an operator's schema (`aten._unsafe_view`
aliases without saying so). Sizes are integers, or sympy expressions where a dimension is symbolic: a changed length gives
a new Program without a new trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from . import _torch
from .capture import RETURNED_VIEW, GraphSide, fills_storage, outputs_of
from .cost import Work, is_view, work_of
from .program import Buffer, Op, Program

Size = int | sympy.Expr


def evaluate(size: Any, symbols: Mapping[sympy.Symbol, int]) -> int:
    """A size in bytes or elements as a number. Symbols without a value count with their traced hint."""
    if isinstance(size, (int, float)):
        return int(size)
    if isinstance(size, sympy.Expr):
        return int(size.subs(symbols))
    expr = size.node.expr
    if not all(s in symbols for s in expr.free_symbols):
        hint = size.node.hint
        return int(hint) if hint is not None else int(expr.subs(symbols))
    return int(expr.subs(symbols))


@dataclass(slots=True)
class LocalBuffer:
    """A storage inside one graph. origin: ("master", k), ("input", placeholder position) or ("made", node name)."""

    origin: tuple[str, Any]
    nbytes: Any
    dtype: str
    shape: tuple[Any, ...]
    dense: bool  # one contiguous tensor that fills its storage
    saved_at: int = -1  # forward: output position that saves the whole storage; -1: not saved, -2: saved through a view
    saved_places: list[int] = field(default_factory=list)  # backward placeholders that receive (a view of) it
    saved_positions: list[int] = field(default_factory=list)  # forward output positions of the same
    places: list[int] = field(default_factory=list)  # placeholders of this graph that hold it
    returned: bool = False  # (a view of) it is an output that the caller sees
    grads: list[int] = field(default_factory=list)  # backward: it becomes the gradient of these masters


@dataclass(slots=True)
class LocalOp:
    node: str
    target: str
    block: str
    work: Work
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]


@dataclass
class GraphFacts:
    """What a graph does to memory, independent of which masters and lengths it runs with."""

    side: GraphSide
    ops: list[LocalOp]
    buffers: list[LocalBuffer]
    symbols: list[tuple[sympy.Symbol, int, int]] = field(default_factory=list)  # symbol, placeholder, dim (-1: the int itself)

    def symbol_values(self, args: list[Any]) -> dict[sympy.Symbol, int]:
        """Values of the symbolic dimensions for one call's arguments (in placeholder order)."""
        return {s: int(args[i] if d < 0 else args[i].shape[d]) for s, i, d in self.symbols}


def analyse(side: GraphSide) -> GraphFacts:
    """Read a normalised graph once."""
    graph = side.gm.graph
    places = graph.find_nodes(op="placeholder")
    outs = outputs_of(graph)
    buffers: list[LocalBuffer] = []
    index: dict[int, int] = {}  # storage key -> position in buffers
    symbols: list[tuple[sympy.Symbol, int, int]] = []

    def add(val: torch.Tensor, origin: tuple[str, Any]) -> int:
        key = _torch.storage_key(val)
        if key not in index:
            index[key] = len(buffers)
            buffers.append(_describe(val, origin))
        return index[key]

    # Masters first: an input may alias one, but a master is what has a name.
    for i in sorted(range(len(places)), key=lambda i: i not in side.masters):
        val = places[i].meta.get("val")
        if isinstance(val, torch.Tensor):
            buffers[add(val, ("master", side.masters[i]) if i in side.masters else ("input", i))].places.append(i)
            symbols += [(_expression(d), i, k) for k, d in enumerate(val.shape) if _is_symbol(d)]
        elif isinstance(val, torch.SymInt) and _is_symbol(val):
            symbols.append((_expression(val), i, -1))

    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    touched: list[tuple[set[int], set[int]]] = []
    for node in nodes:
        reads = {index[_torch.storage_key(v)] for a in node.all_input_nodes for v in _tensors(a.meta.get("val")) if _torch.storage_key(v) in index}
        before = len(buffers)
        made = list(_tensors(node.meta.get("val")))
        written = {add(v, ("made", node.name if len(made) == 1 else f"{node.name}.{k}")) for k, v in enumerate(made)}
        changed = {index[_torch.storage_key(v)] for v in _mutated(node) if _torch.storage_key(v) in index}
        touched.append((reads, {w for w in written if w >= before} | changed))

    last = {b: -1 for b in range(len(buffers))}
    for i, (reads, writes) in enumerate(touched):
        for b in reads | writes:
            last[b] = i
    kept = set()
    for position, node in enumerate(outs):
        if not isinstance(node, fx.Node):
            continue
        for v in _tensors(node.meta.get("val")):
            if _torch.storage_key(v) not in index:
                continue
            b = index[_torch.storage_key(v)]
            kept.add(b)
            buffer = buffers[b]
            if position in side.saved:
                buffer.saved_places.append(side.saved[position])
                buffer.saved_positions.append(position)
                if buffer.saved_at != -2:
                    buffer.saved_at = position if fills_storage(v) else -2
            elif side.phase == "backward" and position in side.grads:
                buffer.grads.append(side.grads[position])
            else:
                buffer.returned = True
    for node, (reads, writes) in zip(nodes, touched):
        if node.meta.get(RETURNED_VIEW):
            reads -= {b for b in reads if buffers[b].origin[0] == "master"}
        finished = {b for b in reads if buffers[b].grads} if is_view(node) else set()
        reads -= finished  # the views that finish a gradient complete it: it is handed over behind them
        writes |= finished
    _extend_aliased_masters(nodes, touched, index, buffers, side)
    frees: dict[int, list[int]] = {}
    for b, at in last.items():
        owned = buffers[b].origin[0] == "made" or (side.phase == "backward" and buffers[b].origin[0] == "input")
        if at >= 0 and b not in kept and owned:
            frees.setdefault(at, []).append(b)
    ops = [
        LocalOp(
            node.name,
            _target_name(node),
            _block_name(node),
            work_of(node),
            tuple(sorted(touched[i][0])),
            tuple(sorted(touched[i][1])),
            tuple(sorted(frees.get(i, ()))),
        )
        for i, node in enumerate(nodes)
    ]
    return GraphFacts(side, ops, buffers, symbols)


def _extend_aliased_masters(nodes, touched, index, buffers, side) -> None:
    """A master's alias that could not be moved next to its reader (`split`) keeps the copy alive from creation to last use."""
    masters = {b for b, buffer in enumerate(buffers) if buffer.origin[0] == "master"}
    at = {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        mine = {index.get(_torch.storage_key(v)) for v in _tensors(node.meta.get("val"))} & masters
        if not mine:
            continue
        ends = [at[u] for u in node.users if u in at]
        if ends and max(ends) > i + 1:
            for j in range(i, max(ends) + 1):
                touched[j][0].update(mine)


def _expression(dim: Any) -> sympy.Symbol:
    return dim.node.expr


def _is_symbol(dim: Any) -> bool:
    return isinstance(dim, torch.SymInt) and isinstance(dim.node.expr, sympy.Symbol)


def _tensors(val: Any) -> Iterable[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (tuple, list)):
        for v in val:
            yield from _tensors(v)


def _mutated(node: fx.Node) -> Iterable[torch.Tensor]:
    """The values that an op writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, node.args):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            yield from _tensors(value.meta.get("val"))


def _describe(val: torch.Tensor, origin: tuple[str, Any]) -> LocalBuffer:
    if val.layout != torch.strided:
        return LocalBuffer(origin, 0, str(val.dtype), tuple(val.shape), False)
    return LocalBuffer(origin, val.untyped_storage().nbytes(), str(val.dtype).removeprefix("torch."), tuple(val.shape), fills_storage(val))


def _target_name(node: fx.Node) -> str:
    return str(node.target) if not callable(node.target) or isinstance(node.target, _torch.OpOverload) else getattr(node.target, "__name__", str(node.target))


def _block_name(node: fx.Node) -> str:
    """The innermost module that a node comes from ("h.3.attn"), "" when the trace does not say."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    for noise in ("L['module']", "L['self']", "._modules", "_modules"):
        path = path.replace(noise, "")
    return path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").strip(".").replace("..", ".")


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a graph inside a step. pair: runs of one forward and its backward share it."""

    label: str
    facts: GraphFacts
    masters: tuple[str, ...]
    symbols: tuple[tuple[sympy.Symbol, int], ...] = ()
    pair: int = -1


@dataclass(frozen=True, slots=True)
class Measured:
    """Corrections from a recorded step: extra bytes inside each run, foreign bytes in each gap and during each run."""

    workspace: Mapping[str, int] = field(default_factory=dict)  # label -> bytes to add to every op
    gap: Mapping[str, int] = field(default_factory=dict)  # label -> peak of foreign bytes in the gap before that run
    foreign: Mapping[str, int] = field(default_factory=dict)  # label -> foreign bytes held while that run executes
    speed: Mapping[str, float] = field(default_factory=dict)  # label -> measured seconds / predicted seconds


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A master and what an update of it needs. states: optimizer states by name, with their bytes."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    movable: bool
    trainable: bool
    states: tuple[tuple[str, int], ...] = ()
    update_seconds: float = 0.0


# A loss outside the graph holds about three times what it differentiates: its input's gradient, its own output and one
# temporary (measured for cross entropy); used until the first step has been recorded.
FOREIGN_FACTOR = 3


def build_program(
    runs: list[Run], params: Mapping[str, ParamInfo], rates: Any, measured: Measured | None = None, min_move: int = 4096
) -> tuple[Program, dict[str, list[str]]]:
    """Lay the runs of a step end to end, then one update op a trainable parameter.

    Returns the Program and, for each run's label, the buffer name of each of its local buffers. params: every parameter of the models, used by a run or not. rates: cost.Rates that turn work into seconds."""
    measured = measured or Measured()
    buffers: dict[str, Buffer] = {}
    ops: list[Op] = []
    for name, info in params.items():
        buffers[name] = Buffer(name, "param", info.nbytes, info.dtype, info.shape, info.movable and info.nbytes >= min_move)
    named: dict[str, list[str]] = {}
    carried: dict[tuple[int, int], str] = {}  # (pair, backward placeholder) -> buffer saved by the forward
    outputs: dict[int, int] = {}
    counted = {run.pair for run in runs if run.facts.side.phase == "backward" and run.label in measured.foreign}
    for run in runs:
        facts, side = run.facts, run.facts.side
        symbols = dict(run.symbols)
        names: list[str] = []
        twins: dict[str, list[str]] = {}
        dying: list[str] = []
        gap = measured.gap.get(run.label)
        if side.phase == "backward":
            if gap is None:
                gap = FOREIGN_FACTOR * outputs.get(run.pair, 0)
            ops.append(Op(f"user:{run.label}", "loss", "user code", "user", 0.0, workspace=gap))
        for local in facts.buffers:
            kind, what = local.origin
            nbytes = evaluate(local.nbytes, symbols)
            shape = tuple(evaluate(d, symbols) for d in local.shape)
            if kind == "master":
                names.append(run.masters[what])
                continue
            name, buffer_kind, of, movable = f"{run.label}/{what}", "activation", "", False
            if kind == "input":
                if (run.pair, what) in carried and side.phase == "backward":
                    names.append(carried[run.pair, what])
                    continue
                name, buffer_kind = f"{run.label}/arg{what}", "input"
                if side.phase == "backward":
                    buffer_kind = "activation"  # a tangent: autograd hands it over, it is dead after its last reader
            elif local.grads:
                of = run.masters[local.grads[0]]
                name, buffer_kind = f"grad:{of}", "grad"
                movable = params[of].movable and nbytes >= min_move
            elif local.returned and run.pair in counted:
                dying.append(name)  # what user code keeps of it is in what was measured around the backward
            elif local.returned:
                buffer_kind = "output"
            elif local.saved_places:
                movable = local.saved_at >= 0 and local.dense and nbytes >= min_move
            if side.phase == "forward" and local.returned:
                outputs[run.pair] = outputs.get(run.pair, 0) + nbytes
            names.append(name)
            buffers.setdefault(name, Buffer(name, buffer_kind, nbytes, local.dtype, shape, movable, of))
            for other in local.grads[1:]:
                # One tensor is the gradient of several masters: each gets a home of its own.
                twin = f"grad:{run.masters[other]}"
                twins.setdefault(name, []).append(twin)
                buffers.setdefault(twin, Buffer(twin, "grad", nbytes, local.dtype, shape, movable, run.masters[other]))
            for place in local.saved_places:
                carried[run.pair, place] = name
        named[run.label] = names
        extra = measured.workspace.get(run.label, 0)
        pace = measured.speed.get(run.label, 1.0)
        arguments = sum(b.nbytes for n, b in buffers.items() if n.startswith(f"{run.label}/arg"))
        foreign = max(0, measured.foreign.get(run.label, 0) - arguments)
        for i, op in enumerate(facts.ops):
            frees = tuple(names[b] for b in op.frees if buffers[names[b]].kind in ("activation",))
            if i == len(facts.ops) - 1:
                frees += tuple(dying)
            writes = tuple(n for b in op.writes for n in (names[b], *twins.get(names[b], ())))
            ops.append(
                Op(
                    run.label,
                    op.node,
                    op.target,
                    side.phase if side.phase != "inference" else "forward",
                    rates.seconds(op.work, symbols) * pace,
                    workspace=evaluate(op.work.workspace, symbols) + extra + foreign,
                    reads=tuple(dict.fromkeys(names[b] for b in op.reads)),
                    writes=writes,
                    frees=frees,
                    block=op.block,
                )
            )
    _free_unread_saved(ops, buffers)
    for name, info in params.items():
        if not info.trainable or f"grad:{name}" not in buffers:
            continue
        states = []
        for state, nbytes in info.states:
            buffers[f"{state}:{name}"] = Buffer(f"{state}:{name}", "optim_state", nbytes, info.dtype, info.shape, info.movable and nbytes >= min_move, name)
            states.append(f"{state}:{name}")
        touched = (name, f"grad:{name}", *states)
        ops.append(Op("update", f"update {name}", "update", "update", info.update_seconds, reads=touched, writes=(), block=name.rpartition(".")[0]))
    return Program(tuple(ops), buffers), named


def _free_unread_saved(ops: list[Op], buffers: Mapping[str, Buffer]) -> None:
    """A saved activation whose backward never ran in this step is dead after its last reader; give it an end."""
    freed = {n for op in ops for n in op.frees}
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        for n in (*op.reads, *op.writes):
            if n in buffers and buffers[n].kind == "activation" and n not in freed:
                last[n] = i
    by_op: dict[int, list[str]] = {}
    for n, i in last.items():
        by_op.setdefault(i, []).append(n)
    for i, names in by_op.items():
        ops[i] = replace(ops[i], frees=(*ops[i].frees, *names))
