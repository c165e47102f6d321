"""Accepts or refuses a plan before anything runs. Shares no code with the planner.

1   the plan belongs to the program: fingerprint, labels, sizes and kinds of buffers, tiers that a buffer may live on
2   events are well formed: ids in order, known ops on their streams, causes earlier, `launch_at` the compute-stream event
    before; every op of the program exactly once, in order, with its graph's events around it
3   a buffer that an op touches is placed on the device for the whole op, and on its home tier for the whole step; an update
    has staging for what it streams
4   a transfer's source holds the bytes when it starts, its destination is placed from its start on, and both are in the
    graph that uses it
5   a consumer comes after what brings its data: gather after prefetch, use after gather and before release, use after reload
6   two placements whose bytes overlap are ordered: all that touches the earlier one happens before the birth of the later
    one, at any timing
7   every placement lies in its tier: offset + nbytes <= budget - held on the device
8   offsets are aligned: pages for buffers of a page or more, 64 bytes below
9   every gathered copy is released, every prefetch waited for, every offload comes back before use; states that are read
    ahead stay in place from there to their update, which waits for them
10  every gradient that a graph completes is handed over by one reduce_grad right after that op, on its home's stream, before
    its update
11  predicted seconds, peaks and traffic equal the simulator's
12  a wait for a write is one that the runtime does: the write window, or the end of a graph, forces it

Happens-before is the order of a stream, `after`, and `launch_at`. It is followed with vector clocks: for each event, the last
event of each stream that is complete before it starts. Invariant 6 needs only the latest owner of each byte, because a
placement's birth counts among what touches it, so the order is transitive.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from .errors import PlanMismatch
from .program import Op, Program
from .schedule import EVENT_OPS, STREAMS, TIERS, Event, Placement, Plan
from .simulate import simulate

PAGE, LINE = 4096, 64
_STREAM_OF = {
    "compute": ("compute",),
    "update": ("compute",),
    "gather": ("compute",),
    "reload": ("compute",),
    "release": ("compute",),
    "prefetch": ("read",),
    "read_ahead": ("read",),
    "offload": ("write",),
    "reduce_grad": ("compute", "write"),
}
_HOMED = ("param", "grad", "optim_state")


def verify_plan(plan: Plan, program: Program) -> None:
    """Raises PlanMismatch("invariant N: ...") at the first invariant that `plan` breaks for `program`."""
    _belongs(plan, program)
    _well_formed(plan, program)
    check = _Checker(plan, program)
    check.placed()
    check.flow()
    check.gradients()
    check.addresses()
    check.waits()
    _predictions(plan)


def refuse(number: int, message: str) -> None:
    raise PlanMismatch(f"invariant {number}: {message}")


def _belongs(plan: Plan, program: Program) -> None:
    for name, b in program.buffers.items():
        if plan.sizes.get(name) != b.nbytes:
            refuse(1, f"buffer {name!r} has {b.nbytes} bytes in the program, {plan.sizes.get(name)} in the plan")
        if plan.kinds.get(name) != b.kind:
            refuse(1, f"buffer {name!r} is a {b.kind} in the program, {plan.kinds.get(name)} in the plan")
        if b.kind in _HOMED and name not in plan.homes:
            refuse(1, f"{b.kind} {name!r} has no home")
    if plan.fingerprint != program.fingerprint():
        refuse(1, f"the plan was made for program {plan.fingerprint}, this one is {program.fingerprint()}")
    if plan.labels != tuple((op.name, op.block) for op in program.ops):
        refuse(1, "labels are not the program's ops")
    for name, tier in plan.homes.items():
        if name not in program.buffers or tier not in ("device", "nvme"):
            refuse(1, f"home of {name!r} is {tier!r}")
        if tier == "nvme" and not program.buffers[name].movable:
            refuse(1, f"{name!r} cannot live on nvme")


def _well_formed(plan: Plan, program: Program) -> None:
    last_compute, done = -1, 0
    for position, e in enumerate(plan.events):
        if e.id != position:
            refuse(2, f"event at position {position} has id {e.id}")
        if e.op not in EVENT_OPS or e.stream not in STREAMS or e.stream not in _STREAM_OF[e.op]:
            refuse(2, f"event {e.id}: {e.op} on stream {e.stream}")
        if any(not 0 <= a < e.id for a in e.after) or e.launch_at != last_compute:
            refuse(2, f"event {e.id} ({e.op}): after {e.after}, launch_at {e.launch_at}; the event before is {last_compute}")
        if not (math.isfinite(e.seconds) and e.seconds >= 0 and e.nbytes >= 0):
            refuse(2, f"event {e.id} ({e.op}): {e.seconds} seconds, {e.nbytes} bytes")
        if e.op in ("compute", "update"):
            if e.step != done or done >= len(program.ops):
                refuse(2, f"event {e.id} runs op {e.step}, the next one is {done}")
            op = program.ops[done]
            if e.graph != op.graph or (e.op == "update") != (op.phase == "update"):
                refuse(2, f"event {e.id} runs op {op.name!r} of {op.graph} as {e.op} of {e.graph}")
            done += 1
        else:
            follows = e.op in ("offload", "release", "reduce_grad")
            if e.step != (done - 1 if follows else done) or not 0 <= e.step < len(program.ops):
                refuse(2, f"event {e.id} ({e.op}) names op {e.step}, but stands between ops {done - 1} and {done}")
            if e.graph != program.ops[e.step].graph or program.ops[e.step].phase not in ("forward", "backward"):
                refuse(2, f"event {e.id} ({e.op}) of {e.graph} is outside that graph")
            if not e.buffers or (len(e.buffers) > 1 and e.op != "read_ahead") or any(n not in program.buffers for n in e.buffers):
                refuse(2, f"event {e.id} ({e.op}) moves {e.buffers}")
        if e.stream == "compute":
            last_compute = e.id
    if done != len(program.ops):
        refuse(2, f"op {done} ({program.ops[done].name!r}) never runs")


class _Checker:
    """What the invariants about memory and order share: clocks, placements by buffer, events by op."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program = plan, program
        self.clock = self._clocks()
        self.on_device: dict[str, list[Placement]] = {}
        self.on_nvme: dict[str, list[Placement]] = {}
        for p in sorted(plan.placements, key=lambda p: (p.birth, p.death)):
            if p.tier not in TIERS or p.nbytes < plan.sizes.get(p.buffer, math.inf) or p.death < p.birth:
                refuse(3, f"placement of {p.buffer!r}: {p.nbytes} bytes on {p.tier}, events {p.birth} to {p.death}")
            (self.on_nvme if p.tier == "nvme" else self.on_device).setdefault(p.buffer, []).append(p)
        self.staging = [p for name, held in self.on_device.items() if name.startswith("staging:") for p in held]
        self.event_of = {e.step: e for e in plan.events if e.op in ("compute", "update")}

    def _clocks(self) -> list[tuple[int, ...]]:
        """For each event, the last event of each stream that is complete when it starts."""
        index = {s: k for k, s in enumerate(STREAMS)}
        of = [index[e.stream] for e in self.plan.events]
        clocks: list[tuple[int, ...]] = []
        last = [-1] * len(STREAMS)
        for e in self.plan.events:
            clock = [-1] * len(STREAMS)
            for cause in (last[of[e.id]], e.launch_at, *e.after):
                if cause >= 0:
                    clock = [max(a, b) for a, b in zip(clock, clocks[cause])]
                    clock[of[cause]] = max(clock[of[cause]], cause)
            last[of[e.id]] = e.id
            clocks.append(tuple(clock))
        self.stream_index = of
        return clocks

    def before(self, a: int, b: int) -> bool:
        """Event `a` is complete when event `b` starts, at any timing."""
        return self.clock[b][self.stream_index[a]] >= a

    def cover(self, name: str, event: int) -> Placement | None:
        """The device placement of a buffer that holds it during an event."""
        found = [p for p in self.on_device.get(name, ()) if p.birth <= event <= p.death]
        return found[-1] if found else None

    def moved(self, name: str) -> bool:
        return self.plan.homes.get(name) == "nvme"

    # ---- 3 ----------------------------------------------------------------------------------------------------------

    def placed(self) -> None:
        count, plan = len(self.plan.events), self.plan
        for name, tier in plan.homes.items():
            b = self.program.buffers[name]
            if b.kind in _HOMED and b.nbytes:
                held = (self.on_device if tier == "device" else self.on_nvme).get(name, ())
                if not any(p.birth == -1 and p.death >= count for p in held):
                    refuse(3, f"{b.kind} {name!r} is not placed on its home, {tier}, for the whole step")
        for i, op in enumerate(self.program.ops):
            event = self.event_of[i]
            for name in dict.fromkeys((*op.reads, *op.writes)):
                if self._needs_device(op, name) and self.cover(name, event.id) is None:
                    refuse(3, f"op {i} ({op.name!r}) touches {name!r}, which is not on the device then")
            if op.workspace:
                space = self.cover(f"workspace:{i}", event.id)
                if space is None or space.nbytes < op.workspace:
                    refuse(3, f"op {i} ({op.name!r}) has no room for its workspace of {op.workspace} bytes")
            if op.phase == "update":
                self._staged(i, op, event)
        for name, b in self.program.buffers.items():
            if b.kind == "foreign" and b.nbytes and not any(p.birth == -1 for p in self.on_device.get(name, ())):
                refuse(3, f"foreign {name!r} is not reserved for the whole step")
            last = self.event_of[len(self.program.ops) - 1].id
            if b.kind == "output" and any(p.death < last for p in self.on_device.get(name, ())):
                refuse(3, f"output {name!r} is given up before the step ends")

    def _needs_device(self, op: Op, name: str) -> bool:
        b = self.program.buffers[name]
        if b.nbytes == 0:
            return False
        if self.moved(name) and b.kind in _HOMED:
            # an update streams it; user code touches the master through its mapping
            return op.phase != "update" and not (op.phase == "user" and b.kind == "param")
        return True

    def _staged(self, i: int, op: Op, event: Event) -> None:
        streamed = [n for n in dict.fromkeys((*op.reads, *op.writes)) if self.moved(n)]
        if not streamed:
            return
        need = self.plan.options["update_tile"] * self.plan.options["update_depth"] * len(streamed)
        room = max((p.nbytes for p in self.staging if p.birth <= event.id <= p.death), default=0)
        if room < need:
            refuse(3, f"op {i} ({op.name!r}) streams {len(streamed)} tensors through {room} bytes, needs {need}")

    # ---- 4, 5, 9 ----------------------------------------------------------------------------------------------------

    def flow(self) -> None:
        """Follows each moved buffer through the issue order: away -> coming -> here -> away."""
        state = {name: "away" for name, tier in self.plan.homes.items() if tier == "nvme"}
        for name in state:
            if self.program.buffers[name].kind not in ("param", "grad", "optim_state"):
                state[name] = "here"
        last: dict[str, Event] = {}  # the event that brought each buffer into its state
        touched: dict[str, int] = {}  # compute event that last touched it
        run_of = self._runs()
        for e in self.plan.events:
            if e.op in ("compute", "update"):
                op = self.program.ops[e.step]
                for name in dict.fromkeys((*op.reads, *op.writes)):
                    kind = self.program.buffers[name].kind
                    if name in state and kind not in ("grad", "optim_state") and self._needs_device(op, name):
                        if state[name] != "here":
                            refuse(5, f"op {e.step} ({op.name!r}) uses {name!r}, which is {state[name]}")
                    touched[name] = e.id
                    if e.op == "update" and state.get(name) == "coming" and kind == "optim_state":
                        if not self.before(last[name].id, e.id):
                            refuse(9, f"the update of {name!r} doesn't wait for its read_ahead, event {last[name].id}")
                        if not any(p.birth == last[name].id and p.death >= e.id for p in self.on_device.get(name, ())):
                            refuse(9, f"{name!r}, read ahead by event {last[name].id}, is gone before its update")
                        state[name] = "away"
                continue
            if e.op == "read_ahead":
                self._read_ahead(e, state, last)
                continue
            name = e.buffers[0]
            kind = self.program.buffers[name].kind
            if e.op == "reduce_grad":
                continue  # invariant 10
            if name not in state or kind not in ("param", "activation"):
                refuse(4, f"event {e.id}: {e.op} of {kind} {name!r}, which lives on the device")
            if e.op == "prefetch":
                self._prefetch(e, name, state, last)
            elif e.op in ("gather", "reload"):
                if (e.op == "gather") != (kind == "param"):
                    refuse(5, f"event {e.id}: {e.op} of {kind} {name!r}")
                if state[name] == "here" and e.op == "gather" and run_of[e.id] != run_of[last[name].id]:
                    last[name] = e  # a held copy, picked up by another graph
                    continue
                if state[name] != "coming":
                    refuse(5, f"event {e.id}: {e.op} of {name!r}, which is {state[name]}: no prefetch brings it")
                if not self.before(last[name].id, e.id):
                    refuse(5, f"event {e.id}: {e.op} of {name!r} doesn't wait for its prefetch, event {last[name].id}")
                if run_of[e.id] != run_of[last[name].id]:
                    refuse(4, f"event {e.id}: {name!r} is prefetched in another graph than the one that uses it")
                state[name], last[name] = "here", e
            elif e.op == "release":
                if kind != "param" or state[name] != "here":
                    refuse(9, f"event {e.id}: release of {name!r}, which is {state[name]}")
                if run_of[e.id] != run_of[last[name].id]:
                    refuse(9, f"event {e.id}: release of {name!r} in a graph that didn't gather it")
                state[name], last[name] = "away", e
            elif e.op == "offload":
                if kind != "activation" or state[name] != "here" or name not in touched:
                    refuse(4, f"event {e.id}: offload of {name!r}, which is {state[name]} or not written yet")
                if not self.before(touched[name], e.id) or self.cover(name, e.id) is None:
                    refuse(4, f"event {e.id}: offload of {name!r} before its bytes are complete, or after they are gone")
                if e.nbytes != self.plan.sizes[name]:
                    refuse(4, f"event {e.id}: offload of {e.nbytes} bytes of {name!r}")
                state[name], last[name] = "away", e
        for name, where in state.items():
            if self.program.buffers[name].kind == "param" and where != "away":
                refuse(9, f"the copy of {name!r} is never released")
            if where == "coming" or (self.program.buffers[name].kind == "activation" and where == "away"):
                refuse(9, f"{name!r} is {where} at the end of the step: an offload must come back, a prefetch be waited for")
        self._same_bytes()

    def _prefetch(self, e: Event, name: str, state: dict[str, str], last: dict[str, Event]) -> None:
        if state[name] != "away":
            refuse(4, f"event {e.id}: prefetch of {name!r}, which is {state[name]}")
        if e.nbytes != self.plan.sizes[name]:
            refuse(4, f"event {e.id}: prefetch of {e.nbytes} bytes of {name!r}")
        if not any(p.birth <= e.id <= p.death for p in self.on_nvme.get(name, ())):
            refuse(4, f"event {e.id}: prefetch of {name!r}, which is not on nvme then")
        if self.program.buffers[name].kind == "activation" and not self.before(last[name].id, e.id):
            refuse(4, f"event {e.id}: prefetch of {name!r} may start before its offload, event {last[name].id}, is done")
        if not any(p.birth == e.id for p in self.on_device.get(name, ())):
            refuse(4, f"event {e.id}: prefetch of {name!r} has no placement that starts with it")
        last[name] = e
        state[name] = "coming"

    def _read_ahead(self, e: Event, state: dict[str, str], last: dict[str, Event]) -> None:
        of = {self.program.buffers[name].of for name in e.buffers}
        if len(of) != 1:
            refuse(4, f"event {e.id}: read_ahead of the states of {sorted(of)}")
        if e.nbytes != sum(self.plan.sizes[name] for name in e.buffers):
            refuse(4, f"event {e.id}: read_ahead of {e.nbytes} bytes of {e.buffers}")
        for name in e.buffers:
            if self.program.buffers[name].kind != "optim_state" or state.get(name) != "away":
                refuse(4, f"event {e.id}: read_ahead of {name!r}, which is {state.get(name, 'on the device')}")
            if not any(p.birth == e.id for p in self.on_device.get(name, ())):
                refuse(4, f"event {e.id}: read_ahead of {name!r} has no placement that starts with it")
            state[name], last[name] = "coming", e

    def _runs(self) -> list[int]:
        """Number of the graph run that each event is in."""
        run, before, found = -1, None, []
        for e in self.plan.events:
            if e.graph != before:
                run, before = run + 1, e.graph
            found.append(run)
        return found

    def _same_bytes(self) -> None:
        """Between two touches, a buffer keeps its placement unless a transfer filled the second one."""
        prefetched = {(name, e.id) for e in self.plan.events if e.op in ("prefetch", "read_ahead") for name in e.buffers}
        where: dict[str, Placement] = {}
        for e in self.plan.events:
            names = e.buffers
            if e.op in ("compute", "update"):
                op = self.program.ops[e.step]
                names = tuple(n for n in dict.fromkeys((*op.reads, *op.writes)) if self._needs_device(op, n))
            elif e.op == "reduce_grad" and not self.moved(names[0]):
                continue
            for name in names:
                if self.program.buffers[name].nbytes == 0:
                    continue
                held = self.cover(name, e.id)
                if held is None:
                    refuse(3, f"event {e.id} ({e.op}) touches {name!r}, which is not on the device then")
                    return
                before = where.get(name)
                if before is not None and before != held and (name, held.birth) not in prefetched:
                    refuse(3, f"event {e.id} ({e.op}) finds {name!r} in another place than its last writer left it")
                where[name] = held

    # ---- 10 ---------------------------------------------------------------------------------------------------------

    def gradients(self) -> None:
        handed: dict[str, list[Event]] = {}
        for e in self.plan.events:
            if e.op == "reduce_grad":
                handed.setdefault(e.buffers[0], []).append(e)
        completed: dict[str, int] = {}
        updated: dict[str, int] = {}
        for i, op in enumerate(self.program.ops):
            for name in op.writes:
                if self.program.buffers[name].kind == "grad" and op.phase != "update":
                    completed[name] = i
            if op.phase == "update":
                for name in op.reads:
                    if self.program.buffers[name].kind == "grad":
                        updated.setdefault(name, i)
        for name, i in completed.items():
            events = handed.pop(name, [])
            if self.plan.nothing_to_offload or self.program.ops[i].phase == "user":
                if events:
                    refuse(10, f"reduce_grad of {name!r} where nothing has to be handed over")
                continue
            if len(events) != 1 or events[0].step != i:
                at = [e.step for e in events]
                refuse(10, f"gradient {name!r} is complete after op {i}, but reduce_grad follows ops {at}")
            e = events[0]
            if e.stream != ("write" if self.moved(name) else "compute"):
                refuse(10, f"reduce_grad of {name!r}, homed on {self.plan.homes[name]}, is on stream {e.stream}")
            if e.stream == "write" and (e.nbytes != self.plan.sizes[name] or self.cover(name, e.id) is None):
                refuse(10, f"reduce_grad of {name!r} writes {e.nbytes} bytes, or after they are gone")
            if name in updated and not self.before(e.id, self.event_of[updated[name]].id):
                refuse(10, f"the update of {name!r} may start before its reduce_grad, event {e.id}, is done")
        if handed:
            refuse(10, f"reduce_grad of {sorted(handed)[0]!r}, which no graph writes")

    # ---- 6, 7, 8 ----------------------------------------------------------------------------------------------------

    def addresses(self) -> None:
        room = self.plan.budget - self.plan.options.get("held", 0)
        for p in self.plan.placements:
            if p.offset < 0 or (p.tier == "device" and p.offset + p.nbytes > room):
                refuse(7, f"{p.buffer!r} ends at byte {p.offset + p.nbytes} of {p.tier}, which has {room}")
            if p.offset % (PAGE if p.nbytes >= PAGE else LINE):
                refuse(8, f"{p.buffer!r} of {p.nbytes} bytes is at offset {p.offset}")
        touches = self._touches()
        for tier in TIERS:
            starts: list[int] = []  # disjoint ranges in order, each with its latest owner
            ranges: list[tuple[int, int, Placement]] = []
            for q in sorted((p for p in self.plan.placements if p.tier == tier), key=lambda p: (p.birth, p.offset)):
                self._take(q, starts, ranges, touches)

    def _take(
        self, q: Placement, starts: list[int], ranges: list[tuple[int, int, Placement]], touches: dict[Placement, list[int]]
    ) -> None:
        end = q.offset + q.nbytes
        first = bisect_right(starts, q.offset) - 1
        if first < 0 or ranges[first][1] <= q.offset:
            first += 1
        last = bisect_left(starts, end)
        rest = []
        for a, b, p in ranges[first:last]:
            if p.death >= q.birth:
                refuse(6, f"{p.buffer!r} and {q.buffer!r} share bytes of {q.tier} at event {q.birth}")
            late = [t for t in touches[p] if t >= 0 and not self.before(t, q.birth)]
            if late:
                refuse(6, f"{q.buffer!r} takes bytes at event {q.birth} while event {late[0]} may still use {p.buffer!r} there")
            if a < q.offset:
                rest.append((a, q.offset, p))
            if b > end:
                rest.append((end, b, p))
        ranges[first:last] = sorted([*rest, (q.offset, end, q)], key=lambda r: r[0])
        starts[first:last] = [r[0] for r in ranges[first : first + len(rest) + 1]]

    def _touches(self) -> dict[Placement, list[int]]:
        """For each placement, the last event of each stream that touches it (-1: none). Its birth counts as a touch, unless
        that is a transfer of something else (a tangent is there from the start of its graph, which may begin with a prefetch)."""
        found = {p: [-1] * len(STREAMS) for p in self.plan.placements}
        for p in self.plan.placements:
            if 0 <= p.birth < len(self.plan.events) and (
                self.plan.events[p.birth].stream == "compute" or p.buffer in self.plan.events[p.birth].buffers
            ):
                found[p][self.stream_index[p.birth]] = p.birth
        by_name: dict[str, list[Placement]] = {}
        for p in self.plan.placements:
            by_name.setdefault(p.buffer, []).append(p)
        for e in self.plan.events:
            names = list(e.buffers)
            if e.op in ("compute", "update"):
                op = self.program.ops[e.step]
                names += [*op.reads, *op.writes, f"workspace:{e.step}"]
            held = [p for name in dict.fromkeys(names) for p in by_name.get(name, ())]
            for p in held + (self.staging if e.op == "update" else []):
                if p.birth <= e.id <= p.death:
                    k = self.stream_index[e.id]
                    found[p][k] = max(found[p][k], e.id)
        return found

    # ---- 12 ---------------------------------------------------------------------------------------------------------

    def waits(self) -> None:
        window = self.plan.options["write_window"]
        flying: list[Event] = []
        finished: set[int] = set()
        run_of = self._runs()
        for e in self.plan.events:
            if flying and run_of[flying[-1].id] != run_of[e.id]:
                finished.update(w.id for w in flying)
                flying = []
            for cause in e.after:
                if self.plan.events[cause].stream == "write" and cause not in finished:
                    refuse(12, f"event {e.id} waits for write {cause}, which a window of {window} bytes lets fly on")
            if e.stream == "write":
                flying.append(e)
                while flying and sum(w.nbytes for w in flying) > window:
                    finished.add(flying.pop(0).id)


def _predictions(plan: Plan) -> None:
    got, said = simulate(plan), plan.predicted
    if not math.isclose(got.seconds, said.seconds, rel_tol=1e-9, abs_tol=1e-12):
        refuse(11, f"the plan predicts a step of {said.seconds} s, the simulator finds {got.seconds} s")
    for what in ("peak_device", "peak_nvme", "bytes_read", "bytes_written"):
        if getattr(got, what) != getattr(said, what):
            refuse(11, f"the plan predicts {what} {getattr(said, what)}, the simulator finds {getattr(got, what)}")
