"""The Program against the real thing: graphs run in plain torch while every storage is watched, op by op.

Watching knows nothing of the analysis: a dispatch mode sees the tensors that ops really take and make, and weak references
say which storages are still there. The Program must hold at least the bytes that are really alive at every op (or a budget
would be broken), and hardly more (or it would be wasted).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zinf_compile.capture import RETURNED_VIEW, GraphSide
from zinf_compile.cost import Rates
from zinf_compile.liveness import Measured, ParamInfo, Run, analyse, build_program, evaluate
from zinf_compile.program import Program
from zinf_compile.runtime.executor import compile_boxed

from .passes.captured import captured, step_of

aten = torch.ops.aten
SMALL = 64  # bytes: the end of a padded row, which real storages have and fake ones don't; a scalar or two


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(self.norm(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """Tied embeddings, fused attention, residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 32), nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        x = self.embed(i)
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(x), -1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 8)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms):
            x = F.max_pool2d(F.relu(norm(conv(x)), inplace=True), 2)
        return self.out(x.mean((2, 3)))


class InPlace(nn.Module):
    """Writes into its activations, into a part of one, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x.relu_()
            y = torch.zeros_like(x)
            y[:, :16] = x[:, 16:]
            y.t().add_(0.5)
            x = torch.sin(y).mul_(self.scale)
        return x


class Chunked(nn.Module):
    """One parameter whose parts are used far apart, and an output that is needed in the backward as well."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 128) / 6)

    def forward(self, x):
        for part in self.w.chunk(4, dim=1):
            x = torch.tanh(x @ part)
        return torch.exp(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "transformer": (Transformer, lambda: torch.randint(50, (2, 16))),
    "convolutions with batch norm": (Conv, lambda: torch.randn(2, 3, 16, 16)),
    "in place": (InPlace, lambda: torch.randn(24, 32)),
    "chunked": (Chunked, lambda: torch.randn(24, 32)),
}


@dataclass
class Watch(TorchDispatchMode):
    """At each op: what it is called, the bytes alive right behind it (masters apart), and the masters it was given."""

    masters: dict[int, str]  # storage -> name
    seen: dict[int, StorageWeakRef] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    ops: list[tuple[object, int, set[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def note(self, value: object) -> None:
        for t in tree_leaves(value):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.masters:
                storage = t.untyped_storage()
                known = self.seen.get(storage._cdata)
                if known is None or known.expired():
                    self.seen[storage._cdata] = StorageWeakRef(storage)
                self.nbytes[storage._cdata] = storage.nbytes()

    def alive(self) -> int:
        for key in [k for k, ref in self.seen.items() if ref.expired()]:
            del self.seen[key]
        return sum(self.nbytes[k] for k in self.seen)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = {self.masters[k] for t in tensors if (k := t.untyped_storage()._cdata) in self.masters}
        out = func(*args, **kwargs)
        self.note(out)
        self.ops.append((func, self.alive(), given))
        return out


def watched(side: GraphSide, watch: Watch, args: list[object]) -> list[object]:
    """Run a captured graph for real. `args` is emptied: what it held is the graph's to drop."""
    gm = fx.GraphModule(side.gm, fx.Graph())
    gm.graph.output(gm.graph.graph_copy(side.gm.graph, {}))
    function = compile_boxed(gm)
    watch.note(args)
    with watch, torch.no_grad():
        return list(function(args))


@dataclass
class Compared:
    """A real step beside its Program: for each op that dispatches, its index in the Program, bytes alive, masters given."""

    program: Program
    real: list[tuple[int, int, set[str]]]
    marked: set[int]  # ops that only make a view of a master for the caller

    def held(self) -> list[int]:
        """Bytes that the Program has alive during each op, from its plain lists: nothing else is asked."""
        buffers, uses = self.program.buffers, self.program.uses
        now: set[str] = set()
        totals = []
        for i, op in enumerate(self.program.ops):
            now |= {n for n in op.writes if buffers[n].kind not in ("param", "optim_state")}
            # What a caller hands over: inputs for the whole graph (and to a later one that reads them), tangents while read.
            given = {
                n for n, b in buffers.items()
                if (b.kind == "input" and n.startswith(f"{op.graph}/"))
                or (b.kind in ("input", "activation") and "/arg" in n and self.begun(n, op.graph) and uses[n] and uses[n][-1] >= i)
            }  # fmt: skip
            totals.append(sum(buffers[n].nbytes for n in now | given))
            now -= set(op.frees)
        return totals

    def begun(self, name: str, graph: str) -> bool:
        order = [label for label, _, _ in self.program.graphs]
        return order.index(name.split("/")[0]) <= order.index(graph)


def compare(make: Callable[[], nn.Module], example: Callable[[], torch.Tensor]) -> Compared:
    torch.manual_seed(0)
    model = make()
    program, facts, names, masters = step_of(model, example())
    params = dict(model.named_parameters())
    watch = Watch({p.untyped_storage()._cdata: n for n, p in params.items()})
    real: list[tuple[int, int, set[str]]] = []
    marked: set[int] = set()
    forward, backward = facts["fw0"].side, facts["bw0"].side
    first = {label: start for label, start, _ in program.graphs}

    def arguments(side: GraphSide, received: dict[int, object]) -> list[object]:
        """Masters as they are, what the forward saved, and random values for the rest."""
        made = []
        for i, node in enumerate(side.gm.graph.find_nodes(op="placeholder")):
            val = node.meta["val"]
            if i in side.masters:
                made.append(params[masters[side.masters[i]]])
            elif i in received:
                made.append(received.pop(i))
            elif val.dtype.is_floating_point:
                made.append(torch.rand(val.shape, dtype=val.dtype).add_(0.5))
            else:
                made.append(torch.zeros(val.shape, dtype=val.dtype))
        return made

    def align(side: GraphSide, label: str) -> None:
        """Ops that dispatch, in order, are the ops of the Program with the same target."""
        nodes = [n for n in side.gm.graph.nodes if n.op not in ("placeholder", "output")]
        seen, watch.ops = watch.ops, []
        at = 0
        for k, node in enumerate(nodes):
            if node.meta.get(RETURNED_VIEW):
                marked.add(first[label] + k)
            if isinstance(node.target, torch._ops.OpOverload):
                assert seen[at][0] is node.target
                real.append((first[label] + k, *seen[at][1:]))
                at += 1
        assert at == len(seen)

    caller = arguments(forward, {})  # the caller of a forward holds its inputs
    outs = watched(forward, watch, list(caller))
    align(forward, "fw0")
    received = {place: outs[i] for i, place in forward.saved.items()}
    outputs = outs[: forward.num_outputs]
    del outs, caller
    args = arguments(backward, received)
    del received
    results = watched(backward, watch, args)
    align(backward, "bw0")
    del outputs, results
    return Compared(program, real, marked)


@pytest.fixture(scope="module", params=MODELS)
def step(request) -> Compared:
    found = compare(*MODELS[request.param])
    torch._dynamo.reset()
    return found


def test_the_program_holds_at_least_what_is_alive_and_hardly_more(step):
    held = step.held()
    assert len(step.real) > 15
    for i, alive, _ in step.real:
        op = step.program.ops[i]
        assert alive <= held[i] + SMALL, f"op {i} {op.name} ({op.target}): {alive} bytes alive, {held[i]} in the program"
        if not op.workspace:
            assert held[i] <= 1.1 * alive + SMALL, f"op {i} {op.name} ({op.target}): {held[i]} in the program, {alive} alive"


def test_peaks_agree(step):
    """What sets the smallest budget is the highest op, so that one must be right."""
    held = step.held()
    for graph, begin, end in step.program.graphs:
        real = [alive for i, alive, _ in step.real if begin <= i < end]
        if real:
            assert max(real) - SMALL <= max(held[begin:end]) <= 1.02 * max(real) + SMALL, graph


def test_every_read_of_a_parameter_is_listed(step):
    for i, _, given in step.real:
        op = step.program.ops[i]
        if i not in step.marked:
            assert given <= set(op.reads) | set(op.writes), f"op {i} {op.name} was given {given}, and lists {op.reads}"
    read = {n for op in step.program.ops if op.phase in ("forward", "backward") for n in op.reads if step.program.buffers[n].kind == "param"}
    assert read == {name for _, _, given in step.real for name in given}


def test_nothing_is_touched_after_it_was_freed_and_everything_is_freed_once(step):
    freed: dict[str, int] = {}
    for i, op in enumerate(step.program.ops):
        for name in (*op.reads, *op.writes):
            assert name not in freed, f"op {i} {op.name} touches {name}, freed by op {freed[name]}"
        for name in op.frees:
            assert step.program.buffers[name].kind == "activation" and name not in freed
            assert name in op.reads or name in op.writes  # by the last op that touches it, not later
            freed[name] = i
    written = {n for op in step.program.ops for n in op.writes if step.program.buffers[n].kind == "activation"}
    assert written <= set(freed)


def test_each_gradient_is_written_before_its_update_and_by_one_graph(step):
    for name, buffer in step.program.buffers.items():
        if buffer.kind == "grad":
            writers = [i for i, op in enumerate(step.program.ops) if name in op.writes]
            (update,) = [i for i, op in enumerate(step.program.ops) if op.phase == "update" and name in op.reads]
            assert writers and max(writers) < update
            assert {step.program.ops[i].graph for i in writers} == {"bw0"}
            assert buffer.shape == step.program.buffers[buffer.of].shape or buffer.nbytes == step.program.buffers[buffer.of].nbytes


# ---- facts and laying out ------------------------------------------------------------------------------------------------


def test_tied_weights_are_one_parameter_with_one_gradient():
    program, *_ = step_of(Transformer(), torch.randint(50, (1, 8)))
    assert "embed.weight" in program.buffers and "head.weight" not in program.buffers
    assert [n for n in program.buffers if n.startswith("grad:embed")] == ["grad:embed.weight"]
    torch._dynamo.reset()


def test_symbolic_sizes_make_a_program_for_each_length_without_a_new_trace():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    session = captured(model)
    for rows in (4, 6):
        model(torch.randn(rows, 8)).sum().backward()
    piece = session.pieces[1]
    facts = analyse(piece.forward), analyse(piece.backward)
    names = tuple(n for n, _ in model.named_parameters())
    params = {n: ParamInfo(p.numel() * 4, "float32", tuple(p.shape), True, True) for n, p in model.named_parameters()}
    sizes = {}
    for rows in (3, 30):
        places = piece.forward.gm.graph.find_nodes(op="placeholder")
        values = [rows if isinstance(n.meta["val"], torch.SymInt) else torch.empty([evaluate(d, {}) if isinstance(d, int) else rows for d in n.meta["val"].shape]) for n in places]
        symbols = tuple(facts[0].symbol_values(values).items())
        assert [v for _, v in symbols] == [rows] * len(symbols) and symbols
        program, _ = build_program([Run("fw0", facts[0], names, symbols, 1), Run("bw0", facts[1], names, symbols, 1)], params, Rates())
        (out,) = [b for b in program.buffers.values() if b.kind == "output" and b.name.startswith("fw0/")]
        assert out.nbytes == rows * 4 * 4
        sizes[rows] = sum(b.nbytes for b in program.buffers.values() if b.kind == "activation")
    assert sizes[30] == 10 * sizes[3] and session.retraces == 2
    torch._dynamo.reset()


def pieces_of(rows: int = 16):
    """Facts of a two-layer model, and what build_program needs beside them."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    session = captured(model)
    model(torch.randn(rows, 8)).sum().backward()
    torch._dynamo.reset()
    facts = analyse(session.pieces[0].forward), analyse(session.pieces[0].backward)
    names = tuple(n for n, _ in model.named_parameters())
    return facts, names, {n: ParamInfo(p.numel() * 4, "float32", tuple(p.shape), True, True) for n, p in model.named_parameters()}


def test_two_forwards_that_wait_have_activations_of_their_own():
    (fw, bw), names, params = pieces_of()
    runs = [Run("fw0", fw, names, pair=1), Run("fw1", fw, names, pair=2), Run("bw0", bw, names, pair=2), Run("bw1", bw, names, pair=1)]
    program, named = build_program(runs, params, Rates())
    saved = {label: {n for n in named[label] if n.startswith("fw")} for label in ("bw0", "bw1")}
    assert saved["bw0"] and saved["bw1"] and not saved["bw0"] & saved["bw1"]
    assert all(n.startswith("fw1/") for n in saved["bw0"]) and all(n.startswith("fw0/") for n in saved["bw1"])
    updates = [op for op in program.ops if op.phase == "update"]
    assert len(updates) == len(params)  # one a parameter, however many backwards


def test_a_forward_whose_backward_does_not_run_keeps_nothing():
    (fw, _), names, params = pieces_of()
    program, _ = build_program([Run("fw0", fw, names, pair=1)], params, Rates())
    freed = {n for op in program.ops for n in op.frees}
    assert {n for n, b in program.buffers.items() if b.kind == "activation"} <= freed
    assert not [op for op in program.ops if op.phase == "update"]


def test_what_was_measured_is_added():
    (fw, bw), names, params = pieces_of()
    runs = [Run("fw0", fw, names, pair=1), Run("bw0", bw, names, pair=1)]
    before, _ = build_program(runs, params, Rates())
    after, _ = build_program(runs, params, Rates(), Measured({"fw0": 7, "bw0": 11}, {"bw0": 1000}, {}, {"fw0": 2.0}))
    extra = {"fw0": 7, "bw0": 11, "update": 0}
    for a, b in zip(before.ops, after.ops, strict=True):
        if b.phase == "user":
            assert b.workspace == 1000
        else:
            assert b.workspace - a.workspace == extra[b.graph]
            assert b.seconds == pytest.approx(a.seconds * (2.0 if b.graph == "fw0" else 1.0))


def test_states_belong_to_updates_and_small_buffers_do_not_move():
    (fw, bw), names, params = pieces_of()
    with_states = {n: ParamInfo(i.nbytes, i.dtype, i.shape, True, True, (("exp_avg", i.nbytes), ("step", 4))) for n, i in params.items()}
    runs = [Run("fw0", fw, names, pair=1), Run("bw0", bw, names, pair=1)]
    program, _ = build_program(runs, with_states, Rates(), min_move=256)
    for op in program.ops:
        states = [n for n in op.reads if program.buffers[n].kind == "optim_state"]
        assert bool(states) == (op.phase == "update")
    assert program.buffers["exp_avg:0.weight"].of == "0.weight" and program.buffers["exp_avg:0.weight"].movable
    assert not [b for b in program.buffers.values() if b.movable and b.nbytes < 256]
    assert [b.name for b in program.buffers.values() if b.kind == "param" and b.movable] == ["0.weight", "2.weight"]
