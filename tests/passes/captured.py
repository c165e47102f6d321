"""Captures a model without planning it: a stand-in for the Session that runs each captured graph as it is, in plain torch.

No native code is loaded: what comes out of here is what the passes, the planner and the verifier start from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zinf_compile import capture
from zinf_compile.capture import GraphSide
from zinf_compile.cluster import Cluster
from zinf_compile.cost import Rates
from zinf_compile.errors import BudgetTooSmall
from zinf_compile.liveness import GraphFacts, ParamInfo, Run, analyse, build_program
from zinf_compile.passes import pipeline
from zinf_compile.passes.binding import Binding
from zinf_compile.planner import make_plan
from zinf_compile.program import Program
from zinf_compile.rewrite import bind
from zinf_compile.runtime.executor import compile_boxed
from zinf_compile.schedule import Plan

MACHINE = Cluster.this_machine()  # fixed rates: a plan made with them is the same on every machine


@dataclass
class Piece:
    """What was captured at once. backward: None for an inference graph."""

    forward: GraphSide
    backward: GraphSide | None
    masters: list[nn.Parameter]


class Capture:
    """Implements `capture.Session`. `pieces` in the order of capture; `runs`: phases of the graphs that ran."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.runs: list[str] = []
        self.retraces = 0

    def captured_training(self, forward: GraphSide, backward: GraphSide, masters: list[nn.Parameter]) -> Piece:
        self.pieces.append(Piece(forward, backward, masters))
        return self.pieces[-1]

    def captured_inference(self, graph: GraphSide, masters: list[nn.Parameter]) -> Piece:
        self.pieces.append(Piece(graph, None, masters))
        return self.pieces[-1]

    def runner(self, piece: Piece, side: GraphSide) -> Callable[[list[Any]], Any]:
        function = compile_boxed(side.gm)

        def call(args: list[Any]) -> Any:
            self.runs.append(side.phase)
            return function(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def note_retrace(self) -> None:
        self.retraces += 1


def captured(model: nn.Module) -> Capture:
    """Route `model(...)` through capture and plain execution."""
    torch._dynamo.reset()
    session = Capture()
    capture.install(model, session, lambda: None, lambda: None)
    return session


@dataclass
class Planned:
    """A captured training step and its plan. names: for each label, the Program's name of each local buffer."""

    program: Program
    plan: Plan
    facts: dict[str, GraphFacts]
    names: dict[str, list[str]]
    masters: tuple[str, ...]

    def copy(self, label: str) -> tuple[fx.GraphModule, Binding]:
        """A copy of the captured graph and its binding, nothing inserted yet."""
        facts = self.facts[label]
        graph, nodes = fx.Graph(), {}
        graph.output(graph.graph_copy(facts.side.gm.graph, nodes))
        gm = fx.GraphModule(facts.side.gm, graph)
        first = next(start for name, start, _ in self.program.graphs if name == label)
        return gm, bind(label, first, facts, self.names[label], nodes, gm, self.masters)

    def rewritten(self, label: str) -> tuple[fx.GraphModule, Binding]:
        gm, binding = self.copy(label)
        return pipeline.run(gm, binding, self.plan), binding


def step_of(model: nn.Module, x: torch.Tensor) -> tuple[Program, dict[str, GraphFacts], dict[str, list[str]], tuple[str, ...]]:
    """Capture one forward and backward of `model(x).sum()`: the Program of the step, facts and names of "fw0" and "bw0"."""
    session = captured(model)
    model(x).sum().backward()
    (piece,) = session.pieces
    assert piece.backward is not None
    name_of = {id(p): n for n, p in model.named_parameters()}
    masters = tuple(name_of[id(p)] for p in piece.masters)
    facts = {"fw0": analyse(piece.forward), "bw0": analyse(piece.backward)}
    runs = [Run("fw0", facts["fw0"], masters, pair=1), Run("bw0", facts["bw0"], masters, pair=1)]
    params = {
        n: ParamInfo(p.numel() * p.element_size(), str(p.dtype).removeprefix("torch."), tuple(p.shape), True, p.requires_grad)
        for n, p in model.named_parameters()
    }
    program, names = build_program(runs, params, Rates())
    return program, facts, names, masters


def planned_at_minimum(model: nn.Module, x: torch.Tensor) -> Planned:
    """The plan of a training step under the smallest budget that is accepted."""
    program, facts, names, masters = step_of(model, x)
    try:
        plan = make_plan(program, MACHINE, 1)
    except BudgetTooSmall as error:
        plan = make_plan(program, MACHINE, error.minimum)
    return Planned(program, plan, facts, names, masters)
