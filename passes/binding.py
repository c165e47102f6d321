"""Ties one FX graph to its part of a Plan: which node is which op of the Program, which node is which buffer.

The binding travels in `gm.meta["zinf"]`; inserted nodes carry their event's id in `node.meta["zinf"]`. Nothing is ever
recognised by a node's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from ..schedule import Event, Plan

EVENT_KEY = "zinf"


@dataclass
class Binding:
    """label: the run in the plan; first: index of its first op in the Program; ops: its nodes, in the Program's order.

    masters: parameter -> placeholders; saved_outputs: saved activation -> output positions (forward);
    saved_inputs: saved activation -> placeholders (backward); gradients: grad buffer -> (output positions, parameter)."""

    label: str
    first: int
    ops: list[fx.Node]
    masters: dict[str, list[fx.Node]] = field(default_factory=dict)
    saved_outputs: dict[str, list[int]] = field(default_factory=dict)
    saved_inputs: dict[str, list[fx.Node]] = field(default_factory=dict)
    gradients: dict[str, tuple[list[int], str]] = field(default_factory=dict)

    def position(self, node: fx.Node) -> int:
        """Index of an op node in `ops`; -1 for anything else."""
        if not self._at:
            self._at.update({n: i for i, n in enumerate(self.ops)})
        return self._at.get(node, -1)

    _at: dict[fx.Node, int] = field(default_factory=dict)


def binding_of(gm: fx.GraphModule) -> Binding:
    return gm.meta[EVENT_KEY]


def events_of(gm: fx.GraphModule, plan: Plan, *ops: str) -> Iterator[Event]:
    """The events of this graph with one of these ops, in issue order."""
    label = binding_of(gm).label
    return (e for e in plan.events if e.graph == label and e.op in ops)


AFTER = ("release", "offload", "reduce_grad")


def insert_event(gm: fx.GraphModule, event: Event, target: object, args: tuple, not_before: fx.Node | None = None) -> fx.Node:
    """Insert a call for an event where the plan's issue order has it among the nodes that are already there."""
    binding = binding_of(gm)
    step = event.step - binding.first + (1 if event.op in AFTER else 0)  # the op that it comes before
    end = binding.ops[step] if step < len(binding.ops) else gm.graph.output_node()
    anchor = end
    node = end.prev
    while EVENT_KEY in node.meta and node.meta[EVENT_KEY] > event.id:
        anchor, node = node, node.prev
    if not_before is not None:
        # The value is finished by views a few nodes further on: they cost nothing, so the plan's memory still holds.
        at, last = anchor, not_before.next
        while at is not gm.graph._root and at.op != "output" and _before(at, last):
            at = at.next
        anchor = at
    with gm.graph.inserting_before(anchor):
        inserted = gm.graph.call_function(target, args)  # type: ignore[arg-type]
    inserted.meta[EVENT_KEY] = event.id
    return inserted


def _before(a: fx.Node, b: fx.Node) -> bool:
    return a < b


def reads_data(node: fx.Node, place: fx.Node) -> bool:
    """Whether `node` computes with the master's values (and does not write into the master itself)."""
    if node.op != "call_function" or EVENT_KEY in node.meta or node.meta.get("zinf_returned_view"):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        for argument, value in zip(schema.arguments, node.args):
            if value is place and argument.alias_info is not None and argument.alias_info.is_write:
                return False
    return True


def insert_copies(gm: fx.GraphModule, plan: Plan, op: str, target: object, sources: dict[str, list[fx.Node]]) -> None:
    """Insert `target(source, site)` for each event of this kind; readers of the source from there on use the copy."""
    binding = binding_of(gm)
    # From the last event to the first: what an earlier one still finds reading the source is its own.
    for event in reversed(list(events_of(gm, plan, op))):
        start = event.step - binding.first
        for name in event.buffers:
            places = sources[name]
            copy = insert_event(gm, event, target, (places[0], event.id))
            copy.meta["val"] = places[0].meta.get("val")
            copy.meta["zinf_buffer"] = name
            for place in places:
                for reader in [u for u in place.users if binding.position(u) >= start and reads_data(u, place)]:
                    reader.replace_input_with(place, copy)
