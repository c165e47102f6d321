"""Small graphs and plans, made by hand: what a pass starts from in the tests of one pass.

`Sketch` draws a graph node by node; `plan` takes the events of a step in issue order. Both are a few lines a test, so that
the golden text beside it can be checked by eye.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zinf_compile.passes.binding import EVENT_KEY, Binding
from zinf_compile.schedule import VERSION, Event, Placement, Plan, Predicted

aten = torch.ops.aten
zinf = torch.ops.zinf

WRITES = ("offload", "reduce_grad")
READS = ("prefetch", "read_ahead")
MOVES = (*READS, *WRITES)


class Sketch:
    """A graph in the making. Every value is a fake float32 tensor in `meta["val"]`, as capture leaves it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.ops: list[fx.Node] = []

    def place(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def op(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=target._schema.name.split("::")[1])
        with self.mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        self.ops.append(node)
        return node

    def done(self, label: str, outputs: tuple[Any, ...], first: int = 0, **binding: Any) -> fx.GraphModule:
        """The graph module, bound: `first` is the index of its first op in the step; `binding` as in Binding."""
        self.graph.output(outputs)
        gm = fx.GraphModule({}, self.graph)
        gm.meta[EVENT_KEY] = Binding(label, first, self.ops, **binding)
        return gm


def plan(*script: tuple[str, int, str], graph: str = "fw0", first: int = 0, on_disk: tuple[str, ...] = ()) -> Plan:
    """A Plan with the events of one graph. script: (op, which of the graph's ops it precedes or follows, buffer), in issue
    order; a compute event has "" for its buffer. on_disk: buffers homed on the disk."""
    events = []
    for i, (op, step, buffer) in enumerate(script):
        stream = "read" if op in READS else "write" if op in WRITES else "compute"
        nbytes = 4096 if op in MOVES else 0
        events.append(Event(i, op, graph, first + step, stream, (buffer,) if buffer else (), nbytes=nbytes))
    return plan_of(tuple(events), homes=dict.fromkeys(on_disk, "nvme"))


def plan_of(
    events: tuple[Event, ...],
    placements: tuple[Placement, ...] = (),
    homes: dict[str, str] | None = None,
    kinds: dict[str, str] | None = None,
) -> Plan:
    """A Plan around these events; what passes and gauges don't look at is left empty."""
    return Plan(
        version=VERSION, fingerprint="hand made", cluster="none", budget=0, homes=homes or {}, events=events,
        placements=placements, predicted=Predicted(0.0, 0, 0, 0, 0), bounds={}, options={}, sizes={}, kinds=kinds or {},
    )  # fmt: skip


def code(gm: fx.GraphModule) -> str:
    """The graph as Python, which also shows where each value dies."""
    gm.graph.lint()
    gm.recompile()
    return "\n".join(line.rstrip() for line in gm.code.strip().splitlines()) + "\n"


def own_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """Everything but zinf ops."""
    return [n for n in gm.graph.nodes if getattr(n.target, "namespace", "") != "zinf"]


def zinf_ops(gm: fx.GraphModule) -> list[str]:
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "zinf"]


@contextmanager
def keeps_the_rest(gm: fx.GraphModule) -> Iterator[None]:
    """What a pass must not touch: the graph's own ops, their order, targets, number of arguments and values, the number of
    its outputs; and all that a pass adds are zinf ops that carry their event."""
    before = [(n, n.op, n.target, len(n.args), n.meta.get("val")) for n in own_nodes(gm)]
    outputs = len(gm.graph.output_node().args[0])
    had = set(gm.graph.nodes)
    yield
    assert [(n, n.op, n.target, len(n.args), n.meta.get("val")) for n in own_nodes(gm)] == before
    assert len(gm.graph.output_node().args[0]) == outputs
    added = [n for n in gm.graph.nodes if n not in had]
    assert all(isinstance(n.meta[EVENT_KEY], int) for n in added)


class Careless(fx.Interpreter):
    """Runs a rewritten graph in plain torch with the worst behaviour that a Plan allows of zinf ops: a working copy is a
    copy, and its values are gone the moment it is released; an activation's are gone once it has been offloaded."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (zinf.gather.default, zinf.reload.default):
            return args[0].clone()
        if target is zinf.release.default:
            return args[0].fill_(float("nan"))
        if target in (zinf.prefetch.default, zinf.read_ahead.default):
            return None
        if target is zinf.offload.default:
            saved = args[0].clone()
            args[0].fill_(float("nan"))
            return saved
        if target is zinf.reduce_grad.default:
            given = args[0].clone()
            args[0].fill_(float("nan"))
            return given
        return super().call_function(target, args, kwargs)
