"""Writes a schedule down: the issue order of a whole step, who waits for whom, and when each piece of memory is taken.

Order between two ops: what the op before gave up (gradients, offloads, releases), then the launches due here, then the
waits of the next op (gathers, reloads). Waiting for writes is done by whoever issues: a write that would pass the window, or
the end of a graph, holds up everything issued after it. That is written as `after` on the next event of each other stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import Cluster
from ..schedule import Event
from .addresses import rounded
from .memory import Model
from .timing import Schedule, read_seconds, streaming, update_compute, update_seconds, write_seconds


@dataclass(frozen=True)
class Issued:
    events: tuple[Event, ...]
    device: tuple[tuple[str, int, int, int], ...]  # (buffer, bytes, birth event, death event)
    nvme: tuple[tuple[str, int, int], ...]  # (buffer, birth event, death event)


@dataclass(frozen=True)
class _Positions:
    """Event ids: of each op, its first event and its own; of each read, read-ahead and write; of the last event at which a write may
    still hold its bytes; of releases by (buffer, op). count: all events."""

    first: list[int]
    compute: list[int]
    read: list[int]
    ahead: list[int]
    write: list[int]
    retired: list[int]
    release: dict[tuple[str, int], int]
    count: int


class _Writer:
    """Appends events, filling in ids, launch points and the waits that are pending."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.last_compute = -1
        self.owed: dict[str, int] = {}  # stream -> write that its next event must wait for

    def add(
        self, op: str, graph: str, step: int, stream: str, buffers: tuple[str, ...], nbytes: int = 0,
        after: tuple[int, ...] = (), seconds: float = 0.0,
    ) -> int:
        i = len(self.events)
        if stream in self.owed:
            after = tuple(sorted({*after, self.owed.pop(stream)}))
        if stream == "compute":
            self.owed.pop("read", None)  # a later read is launched after this event, which waits
        self.events.append(Event(i, op, graph, step, stream, buffers, nbytes, after, self.last_compute, seconds))
        if stream == "compute":
            self.last_compute = i
        return i

    def wait_for(self, write: int) -> None:
        for stream in ("compute", "read"):
            self.owed[stream] = max(write, self.owed.get(stream, -1))


def issue(model: Model, cluster: Cluster, plan: Schedule) -> Issued:
    """The events of a step, and the lifetimes of device and disk memory in event ids."""
    program, choice = model.program, plan.choice
    everything_fits = not plan.reads and not plan.writes and len(choice.device) == len(model.movable)
    launches: dict[int, list[int]] = {}
    waits: dict[int, list[int]] = {}
    for k, read in enumerate(plan.reads):
        launches.setdefault(read.launch, []).append(k)
        waits.setdefault(read.need, []).append(k)
    launched_ahead: dict[int, list[int]] = {}
    for k, early in enumerate(plan.ahead):
        launched_ahead.setdefault(early.launch, []).append(k)
    written_after: dict[int, list[int]] = {}
    for k, write in enumerate(plan.writes):
        written_after.setdefault(write.op, []).append(k)
    ready: dict[int, list[str]] = {}  # gradients that stay on the device, by the op that completes them
    if not everything_fits:
        away = {w.name for w in plan.writes}
        for name, (_, done) in model.born.items():
            if name not in away and model.phases[done] in ("forward", "backward"):
                ready.setdefault(done, []).append(name)
    released: dict[int, list[str]] = {}
    again: dict[int, list[str]] = {}  # held copies that another graph picks up: a gather that moves nothing
    for name in model.uses:
        if name not in choice.device:
            for a, b in model.segments(name, choice):
                released.setdefault(b, []).append(name)
                inside = [i for i in model.uses[name] if a <= i <= b]
                for u, v in zip(inside, inside[1:]):
                    if model.first[u] != model.first[v]:
                        again.setdefault(v, []).append(name)

    out = _Writer()
    read_event = [0] * len(plan.reads)
    ahead_event = [0] * len(plan.ahead)
    write_event = [0] * len(plan.writes)
    retired = [0] * len(plan.writes)  # last event at which a write may still hold its bytes
    release_event: dict[tuple[str, int], int] = {}
    compute_event = [0] * model.n
    first_event = [0] * model.n  # of what precedes each op and belongs to it
    flying: list[int] = []
    streamed = dict(model.streamed(choice))
    for i, op in enumerate(program.ops):
        graph = op.graph
        slow = plan.slow.get(model.first[i], 1.0)
        first_event[i] = len(out.events)
        for k in launches.get(i, ()):
            name = plan.reads[k].name
            nbytes = program.buffers[name].nbytes
            seconds = slow * read_seconds(cluster, nbytes)
            read_event[k] = out.add("prefetch", graph, i, "read", (name,), nbytes, seconds=seconds)
        for k in launched_ahead.get(i, ()):
            names = plan.ahead[k].names
            nbytes = sum(program.buffers[n].nbytes for n in names)
            ahead_event[k] = out.add("read_ahead", graph, i, "read", names, nbytes, seconds=slow * read_seconds(cluster, nbytes))
        for k in waits.get(i, ()):
            name = plan.reads[k].name
            verb = "reload" if name in model.saved else "gather"
            out.add(verb, graph, i, "compute", (name,), after=(read_event[k],))
        for name in again.get(i, ()):
            out.add("gather", graph, i, "compute", (name,))
        early_reads = tuple(ahead_event[k] for k, early in enumerate(plan.ahead) if early.update == i)
        compute_event[i] = _add_op(out, model, cluster, plan, i, streamed.get(i, ()), early_reads)
        for name in ready.get(i, ()):
            out.add("reduce_grad", graph, i, "compute", (name,))
        for k in written_after.get(i, ()):
            name = plan.writes[k].name
            nbytes = program.buffers[name].nbytes
            verb = "offload" if name in model.saved else "reduce_grad"
            seconds = slow * write_seconds(cluster, nbytes)
            write_event[k] = out.add(verb, graph, i, "write", (name,), nbytes, seconds=seconds)
            flying.append(k)
            for w in [w for w in flying if plan.writes[w].waiter == k]:
                out.wait_for(write_event[w])
                retired[w] = write_event[k]
                flying.remove(w)
        for name in released.get(i, ()):
            release_event[name, i] = out.add("release", graph, i, "compute", (name,))
        if i == model.last[i] and flying:
            out.wait_for(max(write_event[w] for w in flying))
            for w in flying:
                retired[w] = len(out.events) - 1
            flying = []
    at = _Positions(first_event, compute_event, read_event, ahead_event, write_event, retired, release_event, len(out.events))
    return Issued(tuple(out.events), _on_device(model, plan, at), _on_nvme(model, plan, at))


def _add_op(
    out: _Writer, model: Model, cluster: Cluster, plan: Schedule, i: int, streamed: tuple[str, ...], early_reads: tuple[int, ...]
) -> int:
    op = model.program.ops[i]
    if op.phase != "update":
        return out.add("compute", op.graph, i, "compute", (), seconds=op.seconds)
    names = tuple(dict.fromkeys((*op.reads, *op.writes)))
    seconds, nbytes = update_compute(model, cluster, i), 0
    if streamed:
        work = streaming(model, cluster, i, streamed, tuple(n for a in early_reads for n in out.events[a].buffers))
        seconds = update_seconds(cluster, work, plan.tile, plan.depth)
        nbytes = sum(read + written for _, read, written in work.tensors)
    return out.add("update", op.graph, i, "compute", names, nbytes, after=early_reads, seconds=seconds)


def _on_device(model: Model, plan: Schedule, at: _Positions) -> tuple[tuple[str, int, int, int], ...]:
    size, choice = model.size, plan.choice
    found: list[tuple[str, int, int, int]] = []
    for name, a, b in model.fixed:
        if (a, b) == (0, model.n - 1) and model.program.buffers[name].kind != "activation":
            found.append((name, size[name], -1, at.count))
        else:  # what a graph is handed is there before its first event, what an op makes from that op on
            made = model.writes[name] and model.writes[name][0] == a
            found.append((name, size[name], at.compute[a] if made else at.first[a], at.compute[b]))
    found.extend((name, size[name], -1, at.count) for name in model.movable if name in choice.device)
    for k, r in enumerate(plan.reads):
        death = at.compute[r.last] if r.name in model.saved else at.release[r.name, r.last]
        found.append((r.name, size[r.name], at.read[k], death))
    for k, early in enumerate(plan.ahead):
        found.extend((n, size[n], at.ahead[k], at.compute[early.last]) for n in early.names)
    for k, w in enumerate(plan.writes):
        birth = model.saved[w.name].birth if w.name in model.saved else model.born[w.name][0]
        found.append((w.name, size[w.name], at.compute[birth], at.retired[k]))
    for name, s in model.saved.items():
        if name in choice.kept:
            found.append((name, size[name], at.compute[s.birth], at.compute[s.death]))
    for i, op in enumerate(model.program.ops):
        found.append((f"workspace:{i}", rounded(op.workspace), at.compute[i], at.compute[i]))
    for nbytes, a, b in model.staging(choice, plan.tile, plan.depth):
        found.append((f"staging:{a}", nbytes, at.compute[a], at.compute[b]))
    return tuple(f for f in found if f[1] > 0)


def _on_nvme(model: Model, plan: Schedule, at: _Positions) -> tuple[tuple[str, int, int], ...]:
    found = [(name, -1, at.count) for name in model.movable if name not in plan.choice.device]
    back = {r.name: at.read[k] for k, r in enumerate(plan.reads)}
    found.extend((w.name, at.write[k], back[w.name]) for k, w in enumerate(plan.writes) if w.name in model.saved)
    return tuple(found)
