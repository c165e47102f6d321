"""The Plan: the single hand-over between planner, passes and runtime. Frozen plain data, no torch objects inside.

`events` is the issue order of a whole step; events of one stream run in that order, `after` is the only other ordering.
  compute      one op of the Program; `step` is its index in Program.ops
  prefetch     starts reading a parameter's master, or an offloaded activation, into a buffer of its own ("read" stream)
  read_ahead   starts reading the states of one parameter, late in the backward, for its update     ("read" stream)
  gather       waits until a parameter's working copy is there; reload: the same for an activation   ("compute" stream, 0 s)
  release      the bytes of a working copy may be reused                                             ("compute" stream, 0 s)
  offload      writes an activation to disk ("write" stream); its bytes are free at the next event that waits for it
  reduce_grad  hands a complete gradient over: to disk ("write" stream) or, homed on the device, at no cost ("compute")
  update       the optimizer on one parameter, streaming what is on disk through staging buffers ("compute" stream)
Positions: events between two compute events of a graph belong before the second; `step` names the op they precede, or for
release, offload and reduce_grad the op they follow.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

VERSION = 1
EVENT_OPS = ("compute", "prefetch", "read_ahead", "gather", "release", "offload", "reload", "reduce_grad", "update")
STREAMS = ("compute", "read", "write")
TIERS = ("device", "host", "nvme")


def owner_of(name: str) -> str:
    """The parameter of a gradient or an optimizer state ("grad:h.0.weight")."""
    return name.split(":", 1)[1]


@dataclass(frozen=True, slots=True)
class Event:
    """nbytes: bytes that cross a link (0: none). after: ids of events of other streams that are complete before it starts.
    launch_at: id of the compute-stream event before it in issue order (-1: none). seconds: predicted duration."""

    id: int
    op: str
    graph: str
    step: int
    stream: str
    buffers: tuple[str, ...]
    nbytes: int = 0
    after: tuple[int, ...] = ()
    launch_at: int = -1
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Bytes [offset, offset + nbytes) of a tier belong to `buffer` from the start of event `birth` to the end of event
    `death`. A placement that is alive over the turn of the step (a resident) has birth -1 and death len(events)."""

    buffer: str
    tier: str
    offset: int
    nbytes: int
    birth: int
    death: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the plan promises. Bytes and seconds of one step."""

    seconds: float
    peak_device: int
    peak_nvme: int
    bytes_read: int
    bytes_written: int
    busy: dict[str, float] = field(default_factory=dict)  # stream -> share of the step


@dataclass(frozen=True, slots=True)
class Plan:
    """homes: buffer -> "device" | "nvme" for every param, grad, optim_state, and every offloaded activation ("nvme").
    labels: op index -> (op name, block), for printing. options: the numbers that the runtime obeys (all in bytes or counts):
    write_window (bytes of writes in flight), update_tile (bytes of one staging buffer), update_depth (staging sets)."""

    version: int
    fingerprint: str
    cluster: str
    budget: int
    homes: dict[str, str]
    events: tuple[Event, ...]
    placements: tuple[Placement, ...]
    predicted: Predicted
    bounds: dict[str, float]
    options: dict[str, int]
    sizes: dict[str, int]  # nbytes of every buffer named above
    kinds: dict[str, str]  # kind of every buffer named above
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def nothing_to_offload(self) -> bool:
        return all(tier == "device" for tier in self.homes.values())

    def to_json(self) -> str:
        """Canonical: sorted keys, integers, one line a record so that two plans can be compared line by line."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        raw = json.loads(text)
        events = tuple(
            Event(**{**e, "buffers": tuple(e["buffers"]), "after": tuple(e["after"])}) for e in raw.pop("events")
        )
        placements = tuple(Placement(**p) for p in raw.pop("placements"))
        predicted = Predicted(**raw.pop("predicted"))
        labels = tuple((a, b) for a, b in raw.pop("labels"))
        return Plan(events=events, placements=placements, predicted=predicted, labels=labels, **raw)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        return Plan.from_json(Path(path).read_text())

    def __str__(self) -> str:
        from .report import render_plan

        return render_plan(self)
