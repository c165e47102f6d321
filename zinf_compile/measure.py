"""What steps really took: bytes beside and inside each graph run, and seconds; fed back into the next plan.

Everything comes from the allocator's counters around runs, so it covers what no graph shows: a loss outside the model, the
temporaries inside kernels, what user code keeps. "Foreign" is what is live beyond what the plan accounts for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .cluster import Cluster
from .liveness import Measured
from .runtime.arena import Arena
from .schedule import Plan
from .timeline import RunKey

# Runs of a graph after which it is worth planning again: the first shows its memory, the second a warm duration.
NEWSWORTHY = (1, 2)
# From this many runs on a graph's measurements are only kept for the report.
SETTLED = 3
# Below this many bytes a measured disk rate says nothing.
ENOUGH_BYTES = 64 << 20


@dataclass
class Record:
    runs: int = 0
    foreign: int = 0  # bytes of user code alive when the run began, beyond what was alive when the step began
    gap: int = 0  # highest bytes of user code between the previous run and this one
    level: int = 0  # highest bytes alive inside the run, less those of user code when the step began
    seconds: float = 0.0  # of the latest run, less what it waited for the disk


@dataclass(frozen=True, slots=True)
class Step:
    """One whole step as measured. peak: bytes live in the allocator, user tensors included."""

    peak: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0


class Gauge:
    """Measures around graph runs. `news`: something was learned that the current plan does not know."""

    def __init__(self, arena: Arena, io: Callable[[], dict[str, float]]) -> None:
        self._arena = arena
        self._io = io
        self.records: dict[RunKey, Record] = {}
        self._kept: dict[RunKey, int] = {}  # planned bytes that an open forward left alive in RAM: saved activations
        self._quiet = 0
        self._extra: dict[RunKey, int] = {}  # bytes inside a run that the program did not know
        self._pace: dict[RunKey, float] = {}  # measured seconds / estimated seconds
        self.news = False
        self._peak = 0  # since the last step
        self.spilled_peak = 0
        self.over_limit_peak = 0
        self._waited = 0.0
        self._update_start = 0.0
        self.update_pace = 1.0  # measured seconds of an update / estimated seconds of its arithmetic
        self._step_start = (time.perf_counter(), io())
        self.step = Step()

    @property
    def saved_bytes(self) -> int:
        return sum(self._kept.values())

    def crowded(self) -> bool:
        """Whether the allocator has spilled, or passed the budget, since the last graph run."""
        stats = self._arena.stats()
        return stats["spilled_peak"] > 0 or stats["over_limit_peak"] > 0

    def before(self, key: RunKey, accounted: Callable[[], int]) -> None:
        """accounted: bytes in RAM that the plan's own buffers take right now; asked for while there is something to learn."""
        record = self.records.setdefault(key, Record())
        if record.runs >= SETTLED:
            self._reset()
            return
        known = accounted()
        foreign = max(0, self._arena.live - known)
        if not self._kept:
            self._quiet = foreign
        else:
            record.foreign = max(record.foreign, foreign - self._quiet)
            record.gap = max(record.gap, self._arena.peak - known - self._quiet)
        self._reset()
        self._waited = self._io()["wait_seconds"]

    def update_begins(self) -> None:
        self._update_start, self._waited = time.perf_counter(), self._io()["wait_seconds"]

    def update_ends(self, estimated: float) -> None:
        """estimated: seconds of arithmetic that the program has for this update, at pace 1."""
        if self._update_start and estimated > 0:
            busy = time.perf_counter() - self._update_start - (self._io()["wait_seconds"] - self._waited)
            self.update_pace = max(busy, 0.1 * estimated) / estimated
        self._update_start = 0.0

    def _reset(self) -> None:
        stats = self._arena.stats()
        self._peak = max(self._peak, stats["peak"])
        self.spilled_peak = max(self.spilled_peak, stats["spilled_peak"])
        self.over_limit_peak = max(self.over_limit_peak, stats["over_limit_peak"])
        self._arena.reset_peak()

    def step_done(self) -> None:
        """The optimizer has stepped: close the books of one step."""
        self._reset()
        now, io = time.perf_counter(), self._io()
        start, before = self._step_start
        self.step = Step(
            self._peak,
            int(io["bytes_read"] - before["bytes_read"]),
            int(io["bytes_written"] - before["bytes_written"]),
            now - start,
        )
        self._step_start, self._peak = (now, io), 0

    def summary(self) -> list[tuple[str, int, float]]:
        """(what ran, how often, seconds of the latest run)."""
        return [(f"{k.phase} of graph {k.piece}" + (f" #{k.occurrence}" if k.occurrence else ""), r.runs, r.seconds) for k, r in self.records.items()]

    def after(self, key: RunKey, seconds: float, saved: int) -> None:
        """saved: bytes of activations that the plan keeps in RAM for this forward's backward."""
        record = self.records[key]
        # `peak` was reset when the run began.
        if record.runs < SETTLED:
            record.level = max(record.level, self._arena.peak - self._quiet)
            record.seconds = max(0.0, seconds - (self._io()["wait_seconds"] - self._waited))
        record.runs += 1
        if record.runs in NEWSWORTHY:
            self.news = True
        if key.phase == "forward":
            self._kept[key] = saved
        elif key.phase == "backward":
            self._kept.pop(RunKey(key.piece, "forward", key.masters, key.occurrence), None)
        self._reset()

    def forget_peaks(self) -> None:
        """A first model joins: what was spilled or passed before is not its doing."""
        self._arena.reset_peak()
        self.spilled_peak = self.over_limit_peak = 0

    def forget_open(self) -> None:
        """Forwards whose backward never came no longer hold anything."""
        self._kept.clear()

    def measured(self, labels: Mapping[RunKey, str], plan: Plan | None, planned: Mapping[RunKey, str]) -> Measured:
        """What the next program should know. labels: of the next plan; planned: of the plan that was in effect."""
        self.news = False
        levels = planned_levels(plan) if plan is not None else {}
        seconds = planned_seconds(plan) if plan is not None else {}
        workspace, gap, foreign, speed = {}, {}, {}, {}
        for key, label in labels.items():
            record = self.records.get(key)
            if record is None or not record.runs:
                continue
            foreign[label], gap[label] = record.foreign, record.gap
            before = planned.get(key, "")
            if before in levels and record.level:
                known = self._extra.get(key, 0)
                self._extra[key] = max(0, known + record.level - levels[before])
            workspace[label] = self._extra.get(key, 0)
            if record.runs >= 2 and record.seconds and seconds.get(before, 0.0) > 0:
                self._pace[key] = self._pace.get(key, 1.0) * record.seconds / seconds[before]
            if key in self._pace:
                speed[label] = self._pace[key]
            record.level, record.seconds = 0, 0.0  # of the plan that is being replaced
        return Measured(workspace, gap, foreign, speed)

    def cluster(self) -> Cluster:
        """This machine, with the disk's rates as measured once enough has been moved."""
        base = Cluster.this_machine()
        io = self._io()
        if io["bytes_read"] > ENOUGH_BYTES and io["read_seconds"] > 0:
            base = replace(base, nvme_read=io["bytes_read"] / io["read_seconds"])
        if io["bytes_written"] > ENOUGH_BYTES and io["write_seconds"] > 0:
            base = replace(base, nvme_write=io["bytes_written"] / io["write_seconds"])
        return base


def planned_levels(plan: Plan) -> dict[str, int]:
    """For each run, the most device bytes that the plan has alive inside it."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for event in plan.events:
        first.setdefault(event.graph, event.id)
        last[event.graph] = event.id
    size = len(plan.events) + 2
    change = [0] * (size + 1)
    for p in plan.placements:
        if p.tier == "device":
            change[max(p.birth, 0)] += p.nbytes
            change[min(p.death, size - 1) + 1] -= p.nbytes
    level, total = [], 0
    for delta in change:
        total += delta
        level.append(total)
    return {g: max(level[first[g] : last[g] + 1]) for g in first}


def planned_saved(plan: Plan) -> dict[str, int]:
    """For each run, the bytes in RAM of activations that it leaves behind for a later run."""
    last: dict[str, int] = {}
    graph_at: dict[int, str] = {}
    for event in plan.events:
        last[event.graph] = event.id
        graph_at[event.id] = event.graph
    saved: dict[str, int] = {}
    for p in plan.placements:
        graph = graph_at.get(p.birth)
        if p.tier == "device" and graph is not None and plan.kinds.get(p.buffer) == "activation" and p.death > last[graph]:
            saved[graph] = saved.get(graph, 0) + p.nbytes
    return saved


def planned_seconds(plan: Plan) -> dict[str, float]:
    """For each run, the seconds of its compute events."""
    seconds: dict[str, float] = {}
    for event in plan.events:
        if event.op == "compute":
            seconds[event.graph] = seconds.get(event.graph, 0.0) + event.seconds
    return seconds
