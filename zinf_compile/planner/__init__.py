"""The planner: Program x Cluster x budget -> Plan. Decides where every byte lives and when it moves; touches no tensor.

How it decides is told in README.md beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..budget import format_budget, format_bytes
from ..cluster import Cluster
from ..errors import BudgetTooSmall
from ..program import Program
from ..schedule import VERSION, Event, Placement, Plan, Predicted
from .addresses import PAGE, pack
from .bounds import lower_bounds
from .events import Issued, issue
from .memory import HOMED, Choice, Model
from .residency import choose, items
from .timing import Schedule, frugal_schedule, schedule

# What is tried for each memory limit: (how much a forward/backward second is worth against one of the update, share of the
# spendable memory that is left free for prefetches, writes in flight and tiles). Each is timed; the quickest is taken.
TRIED = ((1.0, 0.0), (1.0, 0.1), (1.0, 0.3), (0.2, 0.1), (0.2, 0.3), (0.2, 0.6), (1.0, 1.0))
TRIED_LARGE = ((1.0, 0.1), (0.2, 0.3))
# Limits tried, as shares of the way from the frugal plan's peak to the given one: a plan for less is a plan for this too.
LOWER = (1.0, 0.8, 0.5)
LOWER_SMALL = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
# Limits for when holes between buffers lift every draft over the budget.
SHRINK = (1.0, 0.93, 0.85, 0.7, 0.5, 0.25, 0.0)
SMALL, LARGE = 300, 4000  # ops; the fewer, the more is tried


@dataclass(frozen=True)
class _Draft:
    plan: Schedule
    issued: Issued
    seconds: float
    limit: int  # of the load that it was made for


def make_plan(
    program: Program,
    cluster: Cluster,
    budget: int,
    *,
    held: int = 0,
    pins: dict[str, str] | None = None,
    min_offload: int = 4096,
) -> Plan:
    """The quickest step found that keeps `budget` bytes of device memory at any timing.

    held: bytes of the budget that are taken by others (the caller's own tensors, other models).
    pins: buffer -> "device" (stays) or "nvme" (leaves). min_offload: smaller buffers stay, in bytes.
    Raises BudgetTooSmall with the exact minimum; ValueError for pins that cannot be followed.
    """
    if not program.ops:
        raise ValueError("the program has no ops: there is nothing to plan.")
    model = Model(program, pins or {}, min_offload)
    limit = budget - held
    generous = model.generous()
    if int(model.load(generous).max()) <= limit:
        draft = _draft(model, cluster, schedule(model, cluster, generous, limit, 0), limit)
        plan = _finish(model, cluster, draft, budget, held)
        if plan is not None:
            return plan
    least = frugal_schedule(model, cluster, model.frugal())
    frugal = _draft(model, cluster, least, int(least.load.max()))
    last_resort = None
    if limit < 2 * int(least.load.max()):  # beyond, packing cannot fail for want of a few holes
        last_resort = _finish(model, cluster, frugal, budget, held)
        if last_resort is None:
            raise _too_small(model, cluster, _leanest(model, cluster, frugal), budget, held)
    for draft in _drafts(model, cluster, limit, frugal):
        plan = _finish(model, cluster, draft, budget, held)
        if plan is not None:
            return plan
    last_resort = last_resort or _finish(model, cluster, frugal, budget, held)
    if last_resort is None:
        raise _too_small(model, cluster, _leanest(model, cluster, frugal), budget, held)
    return last_resort


def _leanest(model: Model, cluster: Cluster, frugal: _Draft) -> _Draft:
    """Whatever needs less: everything away, or (a tiny model, where staging would cost more than it saves) nothing away."""
    generous = model.generous()
    peak = int(model.load(generous).max())
    whole = _draft(model, cluster, schedule(model, cluster, generous, peak, 0), peak)
    return min((frugal, whole), key=lambda draft: _packed(draft)[0])


def _draft(model: Model, cluster: Cluster, plan: Schedule, limit: int) -> _Draft:
    issued = issue(model, cluster, plan)
    return _Draft(plan, issued, _replay(issued.events)[0], limit)


def _drafts(model: Model, cluster: Cluster, limit: int, frugal: _Draft):
    """Drafts in the order in which they should be packed: the quickest first; when none packs, made for less memory."""
    least = frugal.limit
    packings = 3 if model.n > LARGE else 12
    shares = LOWER_SMALL if model.n <= SMALL else LOWER if model.n <= LARGE else (1.0,)
    tried = TRIED if model.n <= LARGE else TRIED_LARGE
    ranked = {hidden: items(model, cluster, hidden) for hidden in sorted({h for h, _ in TRIED})}
    seen: set[tuple] = set()
    for shrink in SHRINK:
        found: list[_Draft] = []
        for share in shares if shrink == 1.0 else (1.0,):
            load_limit = least + int((limit - least) * shrink * share)
            if load_limit < least:
                continue
            for hidden, spared in tried if share == 1.0 or model.n <= SMALL else TRIED_LARGE:
                spare = int((load_limit - least) * spared)
                choice, _ = choose(model, ranked[hidden], load_limit - spare)
                found.append(_draft(model, cluster, schedule(model, cluster, choice, load_limit, spare), load_limit))
        found.sort(key=lambda d: d.seconds)  # stable: ties keep the order in which they were tried
        for draft in found[:packings]:
            if draft.seconds <= frugal.seconds and draft.issued.device not in seen:
                seen.add(draft.issued.device)
                yield draft


def _replay(events: tuple[Event, ...]) -> tuple[float, dict[str, float]]:
    """(seconds of the step, busy seconds of each stream): each stream in order, `after` and launch points obeyed."""
    end = [0.0] * len(events)
    free: dict[str, float] = {}
    busy: dict[str, float] = {}
    for e in events:
        start = free.get(e.stream, 0.0)
        if e.launch_at >= 0 and end[e.launch_at] > start:
            start = end[e.launch_at]
        for a in e.after:
            if end[a] > start:
                start = end[a]
        end[e.id] = free[e.stream] = start + e.seconds
        busy[e.stream] = busy.get(e.stream, 0.0) + e.seconds
    return max(end, default=0.0), busy


def _packed(draft: _Draft, limit: int = 0) -> tuple[int, list[int]]:
    whole = (-1, len(draft.issued.events))
    return pack([(nbytes, born, dead) for _, nbytes, born, dead in draft.issued.device], whole, limit)


def _finish(model: Model, cluster: Cluster, draft: _Draft, budget: int, held: int) -> Plan | None:
    """The Plan of a draft, None where fragmentation lifts it over the budget."""
    top, offsets = _packed(draft, budget - held)
    if top > budget - held:
        return None
    program, choice, events = model.program, draft.plan.choice, draft.issued.events
    placements = [
        Placement(name, "device", offset, nbytes, born, dead)
        for (name, nbytes, born, dead), offset in zip(draft.issued.device, offsets)
    ]
    at = 0
    for name, born, dead in draft.issued.nvme:
        nbytes = -(-program.buffers[name].nbytes // PAGE) * PAGE
        placements.append(Placement(name, "nvme", at, nbytes, born, dead))
        at += nbytes
    homes = {n: "device" for n, b in program.buffers.items() if b.kind in HOMED}
    homes.update((name, "nvme") for name, _, _ in draft.issued.nvme)
    kinds = {n: b.kind for n, b in program.buffers.items()}
    sizes = {n: b.nbytes for n, b in program.buffers.items()}
    for name, nbytes, _, _ in draft.issued.device:
        if name not in kinds:
            kinds[name], sizes[name] = name.split(":")[0], nbytes
    seconds, busy = _replay(events)
    read, written = _traffic(model, choice, events)
    predicted = Predicted(
        seconds=seconds,
        peak_device=_peak(draft.issued),
        peak_nvme=at,
        bytes_read=read,
        bytes_written=written,
        busy={s: round(busy.get(s, 0.0) / seconds, 6) if seconds else 0.0 for s in ("compute", "read", "write")},
    )
    return Plan(
        version=VERSION,
        fingerprint=program.fingerprint(),
        cluster=cluster.name,
        budget=budget,
        homes=homes,
        events=events,
        placements=tuple(placements),
        predicted=predicted,
        bounds=lower_bounds(model, cluster, budget - held),
        options={
            "held": held,
            "arena": top,
            "write_window": draft.plan.window,
            "update_tile": draft.plan.tile,
            "update_depth": draft.plan.depth,
        },
        sizes=sizes,
        kinds=kinds,
        labels=tuple((op.name, op.block) for op in program.ops),
    )


def _peak(issued: Issued) -> int:
    """The most bytes alive at once, in issue order."""
    change = np.zeros(len(issued.events) + 3, dtype=np.int64)
    for _, nbytes, born, dead in issued.device:
        change[born + 1] += nbytes
        change[dead + 2] -= nbytes
    return int(np.cumsum(change).max(initial=0))


def _traffic(model: Model, choice: Choice, events: tuple[Event, ...]) -> tuple[int, int]:
    read = sum(e.nbytes for e in events if e.stream == "read")
    written = sum(e.nbytes for e in events if e.stream == "write")
    ahead = {name for e in events if e.op == "read_ahead" for name in e.buffers}
    for _, names in model.streamed(choice):
        for name in names:
            nbytes = model.program.buffers[name].nbytes
            read += 0 if name in ahead else nbytes
            written += 0 if model.program.buffers[name].kind == "grad" else nbytes
    return read, written


def _too_small(model: Model, cluster: Cluster, frugal: _Draft, budget: int, held: int) -> BudgetTooSmall:
    """Names the op at which the frugal plan is fullest, what is alive there, and what to change."""
    top, _ = _packed(frugal)
    minimum = top + held
    events = frugal.issued.events
    i = int(np.argmax(frugal.plan.load))
    op = model.program.ops[i]
    here = next(e.id for e in events if e.step == i and e.op in ("compute", "update"))
    alive = [(n, name) for name, n, born, dead in frugal.issued.device if born <= here <= dead]
    alive.sort(key=lambda a: (-a[0], a[1]))
    total: dict[str, int] = {}
    for nbytes, name in alive:
        kind = model.program.buffers[name].kind if name in model.program.buffers else name.split(":")[0]
        total[kind] = total.get(kind, 0) + nbytes
    named = ", ".join(f"{_shown(name)} {format_bytes(nbytes)}" for nbytes, name in alive[:6])
    if len(alive) > 6:
        named += f" and {len(alive) - 6} more ({format_bytes(sum(n for n, _ in alive[6:]))})"
    where = f" in block {op.block!r}" if op.block else ""
    culprit = f"op {op.name!r} of {op.graph}{where}: {named}"
    advice = [f"Raise mem_budget to at least {minimum} bytes ({format_budget(minimum)})"]
    largest = max(sorted(total), key=lambda kind: total[kind], default="")
    advice += {
        "activation": ["use a smaller batch or a shorter sequence"],
        "workspace": ["use a smaller batch or a shorter sequence"],
        "input": ["use a smaller batch"],
        "output": ["return less from the model, e.g. only the loss"],
        "foreign": ["compute the loss inside the model, so that it is planned too"],
        "param": ["split the largest parameter into several"],
        "grad": ["split the largest parameter into several"],
    }.get(largest, [])
    if held > minimum // 4:
        advice.append(f"free tensors of your own: {format_bytes(held)} of the budget are held outside this model")
    message = (
        f"mem_budget is {format_bytes(budget)}{f', of which {format_bytes(held)} are held by other tensors' if held else ''}, "
        f"but {culprit} are needed at once, {format_bytes(minimum)} in all. {', or '.join(advice)}."
    )
    return BudgetTooSmall(message, minimum, culprit)


def _shown(name: str) -> str:
    return {"workspace": "the op's own workspace", "staging": "update staging"}.get(name.split(":")[0], repr(name))
