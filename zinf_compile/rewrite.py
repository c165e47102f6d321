"""Writes a plan into a copy of a captured graph: ties the copy to the Program's names, runs the passes, lets the judge look."""

from __future__ import annotations

from torch import fx

from .liveness import GraphFacts
from .passes import pipeline
from .passes.binding import Binding
from .schedule import Plan
from .verify_graph import verify_graph


def rewritten(
    plan: Plan,
    label: str,
    first: int,
    facts: GraphFacts,
    names: list[str],
    masters: tuple[str, ...],
    instruments: tuple[pipeline.Instrument, ...] = (),
) -> fx.GraphModule:
    """The graph of run `label` as the plan has it. first: index of its first op in the Program; names: the Program's name of
    each of its buffers; masters: of each of its parameters. Raises PlanMismatch when the result does not do what the plan says."""
    gm, nodes = _copy(facts.side.gm)
    binding = bind(label, first, facts, names, nodes, gm, masters)
    if not plan.nothing_to_offload:
        pipeline.run(gm, binding, plan, instruments=instruments)
        verify_graph(gm, plan, binding)
    return gm


def _copy(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, nodes))
    return fx.GraphModule(gm, graph), nodes


def bind(
    label: str,
    first: int,
    facts: GraphFacts,
    names: list[str],
    nodes: dict[fx.Node, fx.Node],
    gm: fx.GraphModule,
    masters: tuple[str, ...],
) -> Binding:
    """Tie a copied graph to the Program's names."""
    side = facts.side
    places = gm.graph.find_nodes(op="placeholder")
    original = side.gm.graph
    ops = [nodes[n] for n in original.nodes if n.op not in ("placeholder", "output")]
    binding = Binding(label, first, ops)
    for position, k in side.masters.items():
        binding.masters.setdefault(masters[k], []).append(places[position])
    for buffer, name in zip(facts.buffers, names):
        kind, what = buffer.origin
        if side.phase == "backward" and kind == "input":
            binding.saved_inputs[name] = [places[i] for i in buffer.places]
        if side.phase == "forward" and buffer.saved_positions and buffer.saved_at >= 0:
            binding.saved_outputs[name] = list(buffer.saved_positions)
        for k in dict.fromkeys(buffer.grads):
            positions = [i for i, g in side.grads.items() if g == k]
            binding.gradients[f"grad:{masters[k]}"] = (positions, masters[k])
    return binding
