"""Discrete-event simulation of a plan: when each event runs, what waits for what, how much memory is taken.

Shares no code with the planner. An event starts when the event before it on its stream is done, when the compute-stream event
that it is issued after (`launch_at`) is done, and when every event of `after` is done. Memory is counted in issue order: a
placement holds its bytes from its birth event to its death event, whatever the clock says, so the peak holds at any timing.
"""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import Plan


@dataclass(frozen=True)
class Simulation:
    """seconds: of the step. peak_device, peak_nvme: bytes. busy: stream -> share of the step in which it works.
    stalls: compute-stream event -> seconds that it waited for a transfer. start, end: seconds, by event id."""

    seconds: float
    peak_device: int
    peak_nvme: int
    bytes_read: int
    bytes_written: int
    busy: dict[str, float]
    stalls: dict[int, float]
    start: tuple[float, ...]
    end: tuple[float, ...]


def simulate(plan: Plan) -> Simulation:
    """Runs the plan's step once, from an idle machine. ValueError where an event waits for one that comes later."""
    start: list[float] = []
    end: list[float] = []
    stalls: dict[int, float] = {}
    work: dict[str, float] = {}
    stream_free: dict[str, float] = {}
    for position, event in enumerate(plan.events):
        causes = (*event.after, event.launch_at) if event.launch_at >= 0 else event.after
        if event.id != position or any(not 0 <= c < position for c in causes):
            raise ValueError(f"event {position} ({event.op}) waits for an event that is issued later: {causes}")
        ready = stream_free.get(event.stream, 0.0)
        begin = max([ready, *(end[c] for c in causes)])
        if event.stream == "compute" and begin > ready:
            stalls[event.id] = begin - ready
        start.append(begin)
        end.append(begin + event.seconds)
        stream_free[event.stream] = begin + event.seconds
        work[event.stream] = work.get(event.stream, 0.0) + event.seconds
    seconds = max(end, default=0.0)
    read, written = _traffic(plan)
    return Simulation(
        seconds=seconds,
        peak_device=_peak(plan, "device"),
        peak_nvme=max((p.offset + p.nbytes for p in plan.placements if p.tier == "nvme"), default=0),
        bytes_read=read,
        bytes_written=written,
        busy={s: work.get(s, 0.0) / seconds if seconds else 0.0 for s in ("compute", "read", "write")},
        stalls=stalls,
        start=tuple(start),
        end=tuple(end),
    )


def _peak(plan: Plan, tier: str) -> int:
    changes = []
    for p in plan.placements:
        if p.tier == tier:
            changes += [(p.birth, 1, p.nbytes), (p.death, 2, -p.nbytes)]
    taken = most = 0
    for _, _, nbytes in sorted(changes):  # at one event, births come before deaths: both are held during it
        taken += nbytes
        most = max(most, taken)
    return most


def _traffic(plan: Plan) -> tuple[int, int]:
    """Bytes that a step reads and writes. An update streams what is homed on disk and was not read ahead, and
    writes back all but gradients."""
    read = written = 0
    ahead: set[str] = set()
    for event in plan.events:
        if event.op == "read_ahead":
            ahead.update(event.buffers)
        if event.stream == "read":
            read += event.nbytes
        elif event.stream == "write":
            written += event.nbytes
        elif event.op == "update":
            for name in event.buffers:
                if plan.homes.get(name) == "nvme":
                    read += 0 if name in ahead else plan.sizes[name]
                    written += plan.sizes[name] if plan.kinds[name] != "grad" else 0
                    ahead.discard(name)
    return read, written
