"""verify_graph: the judge of rewritten graphs. Shares no code with the passes: it reads the graph and the plan, and refuses.

Invariants
  1 every zinf op carries the id of an event of this graph, of its own kind; every such event has its op, once
  2 zinf ops stand in the plan's issue order (a reduce_grad may stand a few views later)
  3 an op that computes with a master homed on disk, or with an activation that the plan reloads, reads a working copy
  4 nothing reads a working copy (or a view of it) behind its release
  5 no output is a working copy or a view of one
  6 what a graph returns for a gradient that is handed over is what reduce_grad returned
  7 a zinf op's arguments are graph values and its site: no key, name or address is baked in
  8 a zinf op is given what its event names, and what it returns for an output stands in all positions of that output
  9 a zinf op stands between the ops that its event stands between (a reduce_grad may stand behind views of its gradient)
 10 the graph's own ops are all there, in the order in which they were captured
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import _torch
from .errors import PlanMismatch
from .passes.binding import EVENT_KEY, Binding
from .schedule import Event, Plan, owner_of

zinf = torch.ops.zinf
KINDS = {
    zinf.prefetch.default: "prefetch",
    zinf.read_ahead.default: "read_ahead",
    zinf.gather.default: "gather",
    zinf.release.default: "release",
    zinf.offload.default: "offload",
    zinf.reload.default: "reload",
    zinf.reduce_grad.default: "reduce_grad",
}


def verify_graph(gm: fx.GraphModule, plan: Plan, binding: Binding) -> None:
    """Raise PlanMismatch("invariant N: ...") with the node and its neighbours when the graph does not do what the plan says."""
    nodes = list(gm.graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    events = {e.id: e for e in plan.events if e.graph == binding.label and e.op in KINDS.values()}
    mine = [n for n in nodes if n.op == "call_function" and n.target in KINDS]

    def refuse(number: int, node: fx.Node, reason: str) -> None:
        i = at[node]
        window = "\n".join(f"  {'>' if n is node else ' '} {n.format_node()}" for n in nodes[max(0, i - 5) : i + 6])
        raise PlanMismatch(f"invariant {number}: graph {binding.label}, node {node.name}: {reason}\n{window}")

    seen: set[int] = set()
    for node in mine:
        event = events.get(node.meta.get(EVENT_KEY, -1))
        if event is None or event.op != KINDS[node.target]:
            refuse(1, node, f"it is no {KINDS[node.target]} event of the plan")
        elif event.id in seen:
            refuse(1, node, f"event {event.id} stands in the graph twice")
        else:
            seen.add(event.id)
        for argument in node.args:
            if not isinstance(argument, fx.Node) and argument != node.meta.get(EVENT_KEY):
                refuse(7, node, f"argument {argument!r} is neither a graph value nor the op's site")
    for event in events.values():
        if event.id not in seen:
            raise PlanMismatch(
                f"invariant 1: graph {binding.label}: the plan's event {event.id} ({event.op} {', '.join(event.buffers)}) has no op"
            )
    seen_nodes = set(mine)
    previous = -1
    for node in mine:
        if node.target is zinf.reduce_grad.default:
            continue
        if node.meta[EVENT_KEY] < previous:
            refuse(2, node, f"event {node.meta[EVENT_KEY]} stands behind event {previous}")
        previous = node.meta[EVENT_KEY]

    released: dict[fx.Node, int] = {n.args[0]: at[n] for n in mine if n.target is zinf.release.default}
    on_disk = {p for name, places in binding.masters.items() if plan.homes.get(name) == "nvme" for p in places}
    on_disk |= {p for e in events.values() if e.op == "reload" for name in e.buffers for p in binding.saved_inputs.get(name, ())}
    for node in nodes:
        if node.op != "call_function" or node.target in KINDS:
            continue
        for argument in node.all_input_nodes:
            root = _root(argument)
            if root in released and at[node] > released[root]:
                refuse(4, node, f"it reads {argument.name}, whose working copy was released before")
            if root in on_disk and _key(node) != _key(argument) and not _writes(node, argument):
                refuse(3, node, f"it computes with {argument.name}, which is on disk, without a gather or a reload")
    out = gm.graph.output_node()
    for argument in out.all_input_nodes:
        root = _root(argument)
        if root.target in (zinf.gather.default, zinf.reload.default):
            refuse(5, out, f"it returns {argument.name}, a working copy")
    outs: list[Any] = list(out.args[0]) if isinstance(out.args[0], (tuple, list)) else [out.args[0]]
    handed = {n.args[0]: n for n in mine if n.target is zinf.reduce_grad.default}
    for positions, _master in binding.gradients.values():
        for position in positions:
            if outs[position] in handed:
                refuse(6, outs[position], "a gradient is returned beside its reduce_grad")
    for node in mine:
        wrong = _misplaced(node, events[node.meta[EVENT_KEY]], events, binding, outs)
        if wrong:
            refuse(8, node, wrong)

    order = {n: i for i, n in enumerate(binding.ops)}
    own = [n for n in nodes if n.op not in ("placeholder", "output") and n.target not in KINDS]
    for i, node in enumerate(own):
        if order.get(node) != i:
            refuse(10, node, "it is not the op that was captured in this place")
    if len(own) != len(binding.ops):
        raise PlanMismatch(f"invariant 10: graph {binding.label}: {len(binding.ops) - len(own)} ops at the end are missing")
    passed = 0
    for node in nodes:
        if node in order:
            passed += 1
        if node not in seen_nodes:
            continue
        event = events[node.meta[EVENT_KEY]]
        due = event.step - binding.first + (event.op in ("release", "offload", "reduce_grad"))
        late = own[due:passed] if event.op == "reduce_grad" else []
        if passed != due and (not late or any(_key(n) != _key(node.all_input_nodes[0]) for n in late)):
            refuse(9, node, f"{passed} ops stand in front of it, not {due}")


def _misplaced(node: fx.Node, event: Event, events: dict[int, Event], binding: Binding, outs: list[Any]) -> str:
    """What is wrong with the argument of a zinf op, or with the outputs that it is for; "" when all is right."""
    source, name = node.args[0], event.buffers[0]
    if event.op == "read_ahead":
        master = owner_of(name)
        return "" if source in binding.masters.get(master, ()) else f"it is given {source}, not {master}"
    if event.op in ("gather", "prefetch", "reload"):
        places = [*binding.saved_inputs.get(name, ()), *(binding.masters.get(name, ()) if event.op != "reload" else ())]
        return "" if source in places else f"it is given {source}, not {name}"
    if event.op == "release":
        made = events.get(source.meta.get(EVENT_KEY, -1)) if isinstance(source, fx.Node) else None
        right = made is not None and made.op in ("gather", "reload") and made.buffers == event.buffers and made.id < event.id
        return "" if right else f"it is given {source}, which is no copy of {name}"
    if event.op == "offload":
        positions = binding.saved_outputs.get(name, [])
    else:
        positions, master = binding.gradients.get(name, ([], ""))
        if node.args[1] not in binding.masters.get(master, ()):
            return f"it hands the gradient to {node.args[1]}, not to {master}"
    return "" if all(outs[i] is node for i in positions) else f"the graph returns something else for {name}"


def _key(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    keys = {_torch.storage_key(v) for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)}
    return keys.pop() if len(keys) == 1 else None


def _root(node: fx.Node) -> fx.Node:
    """What a chain of views starts from."""
    while node.op == "call_function" and node.target not in KINDS:
        parents = [a for a in node.all_input_nodes if _key(a) is not None and _key(a) == _key(node)]
        if not parents:
            break
        node = parents[0]
    return node


def _writes(node: fx.Node, argument: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(node.args) and node.args[0] is argument
