"""Plans for people: a page of text that folds repeated blocks, and what differs between two plans."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .budget import format_bytes
from .schedule import Event, Plan

WIDTH, MOST_LINES = 120, 110
_ORDER = ("compute", "prefetch", "read_ahead", "gather", "reload", "release", "reduce_grad", "offload")


def render_plan(plan: Plan) -> str:
    """The plan in at most about 120 lines of 120 columns; equal plans give equal text."""
    lines = [*_header(plan), "", *_homes(plan)]
    if plan.nothing_to_offload:
        lines += ["", "nothing to offload: everything fits on the device (RAM)"]
    lines += ["", *_body(plan, MOST_LINES - len(lines))]
    return "\n".join(line[:WIDTH].rstrip() for line in lines)


def _header(plan: Plan) -> list[str]:
    p, bound, held = plan.predicted, plan.bounds.get("step", 0.0), plan.options.get("held", 0)
    over = f", +{100 * (p.seconds / bound - 1):.1f}%" if bound > 0 else ""
    which = max((k for k in sorted(plan.bounds) if k != "step"), key=lambda k: plan.bounds[k], default="none")
    peak = f"# peak device (RAM) {format_bytes(p.peak_device + held)} of {format_bytes(plan.budget)}"
    if held:
        peak += f", {format_bytes(held)} of it held by other tensors"
    busy = "  ".join(f"{stream} {100 * share:.0f}%" for stream, share in p.busy.items())
    o = plan.options
    return [
        f"# plan {plan.fingerprint} for {plan.cluster}, budget {format_bytes(plan.budget)}",
        f"# step {p.seconds * 1e3:.1f} ms (bound {bound * 1e3:.1f} ms by {which}{over})",
        f"{peak}; nvme {format_bytes(p.peak_nvme)}",
        f"# a step reads {format_bytes(p.bytes_read)} and writes {format_bytes(p.bytes_written)}; busy: {busy}",
        f"# write window {format_bytes(o.get('write_window', 0))}, update tile {format_bytes(o.get('update_tile', 0))}"
        f" x {o.get('update_depth', 0)}",
    ]


def _homes(plan: Plan) -> list[str]:
    lines = [f"{'homes':<14}{'device (RAM)':>26}{'nvme':>26}"]
    for kind in ("param", "grad", "optim_state", "activation"):
        cells = []
        for tier in ("device", "nvme"):
            # kept activations have no entry of their own in homes: they are no decision about a home
            names = [n for n, t in plan.homes.items() if t == tier and plan.kinds[n] == kind]
            if kind == "activation" and tier == "device":
                cells.append("")
                continue
            cells.append(f"{len(names)} x {format_bytes(sum(plan.sizes[n] for n in names)):>10}" if names else "-")
        label = "offloaded act." if kind == "activation" else kind
        lines.append(f"{label:<14}{cells[0]:>26}{cells[1]:>26}".rstrip())
    return lines


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass
class _Stretch:
    """Consecutive events of one repeated block of one graph. `rows`: (op, count, names, bytes), in the order of _ORDER."""

    graph: str
    title: str
    seconds: float
    rows: tuple[tuple[str, int, tuple[str, ...], int], ...]
    count: int = 1
    first: str = ""
    last: str = ""


def _body(plan: Plan, room: int) -> list[str]:
    folded: list[_Stretch] = []
    for stretch in _stretches(plan):
        before = folded[-1] if folded else None
        if before and (before.graph, before.title, before.rows) == (stretch.graph, stretch.title, stretch.rows):
            before.count += 1
            before.seconds += stretch.seconds
            before.last = stretch.last
        else:
            folded.append(stretch)
    chunks: list[list[str]] = []
    graph = ""
    for stretch in folded:
        lines = [f"{stretch.graph}"] if stretch.graph != graph else []
        graph = stretch.graph
        chunks.append(lines + _show(stretch))
    total = sum(map(len, chunks))
    if total <= room:
        return [line for chunk in chunks for line in chunk]
    # too varied to fold: the beginning and the end are shown whole
    head: list[str] = []
    tail: list[str] = []
    left = 0
    while chunks and len(head) + len(chunks[0]) <= (room - 1) * 3 // 4:
        head += chunks.pop(0)
    while chunks and len(head) + len(chunks[-1]) + len(tail) <= room - 1:
        tail = chunks.pop() + tail
    left = len(chunks)
    return [*head, f"  ... {left} more stretches, {sum(map(len, chunks))} lines: see the JSON", *tail]


def _stretches(plan: Plan) -> list[_Stretch]:
    """Cuts the events where the graph or the repeated block changes; ops of no block go with what is around them."""
    groups: list[tuple[str, str, list[Event]]] = []
    for e in plan.events:
        key = _block_of(plan.labels[e.step][1]) if plan.labels else ""
        if e.op == "update":
            key = ""  # one stretch: updates differ in size only
        if groups and groups[-1][0] == e.graph and key in ("", groups[-1][1]):
            groups[-1][2].append(e)
        elif groups and groups[-1][0] == e.graph and groups[-1][1] == "":
            groups[-1] = (e.graph, key, [*groups[-1][2], e])
        else:
            groups.append((e.graph, key, [e]))
    return [_stretch(plan, graph, key, events) for graph, key, events in groups]


def _block_of(block: str) -> str:
    """"model.h.3.attn.c" -> "model.h.3": up to the first number; whole, where there is none."""
    parts = block.split(".")
    for k, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: k + 1])
    return block


def _star(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _stretch(plan: Plan, graph: str, key: str, events: list[Event]) -> _Stretch:
    rows: list[tuple[str, int, tuple[str, ...], int]] = []
    for op in _ORDER:
        mine = [e for e in events if e.op == op]
        if op == "compute":
            # the same op may be named otherwise in another block: only the count is compared
            rows += [(op, len(mine), (), 0)] if mine else []
            continue
        if op == "reduce_grad":
            mine = [e for e in mine if e.stream == "write"]  # at no cost otherwise
        if mine:
            names = tuple(_star(e.buffers[0]) for e in mine)
            nbytes = sum(plan.sizes[e.buffers[0]] for e in mine)
            rows.append((op, len(mine), names, nbytes))
    updates = [e for e in events if e.op == "update"]
    if updates:
        streamed = [e for e in updates if e.nbytes]
        rows.append(("update", len(updates), (f"{len(streamed)} of them streamed",), sum(e.nbytes for e in streamed)))
    seconds = sum(e.seconds for e in events if e.stream == "compute")
    return _Stretch(graph, _star(key), seconds, tuple(rows), 1, key, key)


def _show(s: _Stretch) -> list[str]:
    if s.count > 1:
        title = f"{s.first} ... {s.last}  x{s.count}"
    else:
        title = s.first or "-"
    lines = [f"  {title}   {s.seconds / s.count * 1e3:.2f} ms{' each' if s.count > 1 else ''}"]
    for op, count, names, nbytes in s.rows:
        if op == "compute":
            lines[0] += f", {count} ops"
            continue
        text = f"    {op:<12}{count:>4} {format_bytes(nbytes):>11}  "
        lines.append(text + _fit(names, WIDTH - len(text)))
    return lines


def _fit(names: tuple[str, ...], room: int) -> str:
    """As many names as fit; equal ones once, with their number."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    shown = [name if n == 1 else f"{name} x{n}" for name, n in counts.items()]
    text = ", ".join(shown)
    keep = len(shown)
    while len(text) > room and keep > 1:
        keep -= 1
        text = ", ".join(shown[:keep]) + f", +{len(shown) - keep} more"
    return text[:room]


# ---- two plans --------------------------------------------------------------------------------------------------------


def diff_plans(a: Plan, b: Plan) -> str:
    """What moved from plan a to plan b, and what that does to the step."""
    lines = []
    for what in ("fingerprint", "cluster", "budget"):
        lines += _changed(what, getattr(a, what), getattr(b, what))
    p, q = a.predicted, b.predicted
    lines += _changed("step ms", round(p.seconds * 1e3, 3), round(q.seconds * 1e3, 3))
    for what in ("peak_device", "peak_nvme", "bytes_read", "bytes_written"):
        x, y = getattr(p, what), getattr(q, what)
        lines += _changed(what, format_bytes(x), format_bytes(y)) if x != y else []
    for key in sorted({*a.options, *b.options}):
        lines += _changed(f"options.{key}", a.options.get(key), b.options.get(key))
    for old, new in (("device", "nvme"), ("nvme", "device")):
        # an activation without a home stays on the device
        names = [
            n for n in sorted({*a.homes, *b.homes})
            if a.homes.get(n, "device") == old and b.homes.get(n, "device") == new
        ]  # fmt: skip
        if names:
            sizes = {**a.sizes, **b.sizes}
            text = f"{old} -> {new}: {len(names)} buffers, {format_bytes(sum(sizes[n] for n in names))}: "
            lines.append(text + _fit(tuple(names), max(20, WIDTH - len(text))))
    for op in sorted({e.op for e in (*a.events, *b.events)}):
        lines += _changed(f"{op} events", sum(e.op == op for e in a.events), sum(e.op == op for e in b.events))
    return "\n".join(lines) if lines else "no difference"


def _changed(what: str, x: object, y: object) -> list[str]:
    return [f"{what}: {x} -> {y}"] if x != y else []
