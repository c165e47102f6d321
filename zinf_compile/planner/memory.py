"""What a Program needs on the device at each op, and which parts of that a planner can decide about.

Position i stands for op i together with the transfers issued just before it; bytes at i are what may be alive then, at any
timing. Nothing between two ops needs more than the op before or the op after (transfers after an op only give bytes back,
transfers before an op only take some), so the load at the ops is the whole truth. Sizes are as they take room in the arena
(`rounded`). Intervals of positions include both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..program import Buffer, Program
from .addresses import rounded

HOMED = ("param", "grad", "optim_state")
TILE_MIN, TILE_MAX = 64 * 2**10, 16 * 2**20


@dataclass(frozen=True)
class Saved:
    """An activation that can leave between its last forward use and its first backward use."""

    name: str
    birth: int
    leave: int  # last forward use
    back: int  # first backward use
    death: int


@dataclass
class Choice:
    """The decisions: which movable params/grads/states are homed on the device, which movable saved activations stay,
    and over which gaps (parameter, position of the use before the gap) a working copy is held."""

    device: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    held: set[tuple[str, int]] = field(default_factory=set)

    def copy(self) -> Choice:
        return Choice(set(self.device), set(self.kept), set(self.held))


class Model:
    """A Program prepared for planning: positions instead of names, and the load that no decision changes."""

    def __init__(self, program: Program, pins: dict[str, str], min_offload: int) -> None:
        self.program = program
        self.n = len(program.ops)
        self.min_offload = min_offload
        self.pins = dict(pins)
        self.size = {name: rounded(b.nbytes) for name, b in program.buffers.items()}
        self.first: list[int] = []  # of each op: the first and the last op of its graph
        self.last: list[int] = []
        for _, a, b in program.graphs:
            self.first += [a] * (b - a)
            self.last += [b - 1] * (b - a)
        self._scan()
        self._classify()

    def _scan(self) -> None:
        """Who touches what, in order."""
        buffers = self.program.buffers
        self.touches: dict[str, list[int]] = {name: [] for name in buffers}
        self.writes: dict[str, list[int]] = {name: [] for name in buffers}
        self.freed: dict[str, int] = {}
        self.updates: list[tuple[int, tuple[str, ...]]] = []  # update op, the homed buffers that it touches
        for i, op in enumerate(self.program.ops):
            for name in dict.fromkeys((*op.reads, *op.writes)):
                self.touches[name].append(i)
            for name in dict.fromkeys(op.writes):
                self.writes[name].append(i)
            for name in op.frees:
                self.freed[name] = i
            if op.phase == "update":
                homed = [n for n in dict.fromkeys((*op.reads, *op.writes)) if buffers[n].kind in HOMED]
                self.updates.append((i, tuple(homed)))
        self.phases = [op.phase for op in self.program.ops]

    def _classify(self) -> None:
        """Splits buffers into what is fixed and what can be decided; sums the fixed load."""
        self.uses: dict[str, list[int]] = {}  # movable param -> the graph ops that compute with it
        self.born: dict[str, tuple[int, int]] = {}  # written grad -> its first writer, its completing writer
        self.movable: list[str] = []  # params, grads and states that may live on disk
        self.saved: dict[str, Saved] = {}
        self.fixed: list[tuple[str, int, int]] = []  # (buffer, first, last position); the whole step for residents
        for buffer in self.program.buffers.values():
            self._check_pin(buffer)
            if buffer.kind in HOMED:
                self._classify_homed(buffer)
            else:
                self._classify_transient(buffer)
        stray = sorted(set(self.pins) - set(self.program.buffers))
        if stray:
            raise ValueError(f"pins name {stray[0]!r}, which is no buffer of this program.")
        load = np.zeros(self.n + 1, dtype=np.int64)
        for name, a, b in self.fixed:
            load[a] += self.size[name]
            load[b + 1] -= self.size[name]
        self.base = np.cumsum(load)[: self.n] + np.array([rounded(op.workspace) for op in self.program.ops], np.int64)

    def _check_pin(self, buffer: Buffer) -> None:
        tier = self.pins.get(buffer.name, "device")
        if tier not in ("device", "nvme"):
            raise ValueError(f"pins[{buffer.name!r}]={tier!r}: a pin is 'device' or 'nvme'.")
        if tier == "nvme" and not buffer.movable:
            raise ValueError(f"pins[{buffer.name!r}]='nvme', but this {buffer.kind} cannot be moved to disk.")

    def _can_move(self, buffer: Buffer) -> bool:
        pinned = self.pins.get(buffer.name)
        if not buffer.movable or buffer.nbytes == 0 or pinned == "device":
            return False
        return buffer.nbytes >= self.min_offload or pinned == "nvme"

    def _classify_homed(self, buffer: Buffer) -> None:
        name = buffer.name
        in_graphs = [i for i in self.touches[name] if self.phases[i] in ("forward", "backward")]
        movable = self._can_move(buffer)
        if buffer.kind == "grad":
            writers = [i for i in self.writes[name] if self.phases[i] != "update"]
            if writers:
                self.born[name] = (writers[0], writers[-1])
                # read again after its last write, or written by user code: no graph op could hand it over
                others = [i for i in self.touches[name] if self.phases[i] != "update"]
                if others[-1] > writers[-1] or any(self.phases[i] == "user" for i in others):
                    movable = False
        elif buffer.kind == "param":
            movable = movable and not any(self.phases[i] in ("forward", "backward") for i in self.writes[name])
        else:
            movable = movable and not in_graphs
        if not movable:
            if self.pins.get(name) == "nvme":
                raise ValueError(f"pins[{name!r}]='nvme', but an op of a graph changes it in place: it stays on the device.")
            self.fixed.append((name, 0, self.n - 1))
            return
        self.movable.append(name)
        if buffer.kind == "param":
            self.uses[name] = in_graphs

    def _classify_transient(self, buffer: Buffer) -> None:
        name, at = buffer.name, self.touches[buffer.name]
        if buffer.kind == "foreign":
            self.fixed.append((name, 0, self.n - 1))
            return
        if not at:
            return  # named by no op: takes no room in this step
        written = self.writes[name]
        birth = self.first[at[0]] if not written or written[0] > at[0] else written[0]
        if buffer.kind == "output":
            death = self.n - 1
        elif buffer.kind == "input":
            death = self.last[at[-1]]
        else:
            death = max(self.freed.get(name, self.n - 1), at[-1])
        backward = [i for i in at if self.phases[i] == "backward"]
        inside = all(self.phases[i] in ("forward", "backward") for i in at)
        if buffer.kind == "activation" and inside and backward and at[0] < backward[0] and self._can_move(buffer):
            leave = max(i for i in at if i < backward[0])
            if backward[0] - leave > 1:  # else there is no op in between at which its bytes would be free
                self.saved[name] = Saved(name, birth, leave, backward[0], death)
                return
        if self.pins.get(name) == "nvme":
            raise ValueError(f"pins[{name!r}]='nvme', but it has no gap between forward and backward to be away in.")
        self.fixed.append((name, birth, death))

    def pinned(self, name: str) -> bool:
        return self.pins.get(name) == "nvme"

    # ---- the two ends of the range of decisions ---------------------------------------------------------------------

    def frugal(self) -> Choice:
        """Everything away, except over gaps where it would be back at the very next op."""
        choice = Choice()
        for name, uses in self.uses.items():
            for a, b in zip(uses, uses[1:]):
                if b == a + 1 and self.may_hold(a, b):
                    choice.held.add((name, a))
        return choice

    def generous(self) -> Choice:
        """Everything stays, except what the user pinned to disk."""
        choice = self.frugal()
        choice.device = {name for name in self.movable if not self.pinned(name)}
        choice.kept = {name for name in self.saved if not self.pinned(name)}
        return choice

    def may_hold(self, a: int, b: int) -> bool:
        """A copy may be held between two uses in one graph, or over the turn from a forward to a backward graph (where
        user code may run: the runtime write-protects the master meanwhile)."""
        if self.first[a] == self.first[b]:
            return True
        return self.phases[a] == "forward" and self.phases[b] == "backward"

    # ---- intervals under a choice -----------------------------------------------------------------------------------

    def segments(self, name: str, choice: Choice) -> list[tuple[int, int]]:
        """(first use, last use) of each working copy of a parameter that lives on disk."""
        found: list[tuple[int, int]] = []
        for i in self.uses[name]:
            if found and (name, found[-1][1]) in choice.held:
                found[-1] = (found[-1][0], i)
            else:
                found.append((i, i))
        return found

    def streamed(self, choice: Choice) -> list[tuple[int, tuple[str, ...]]]:
        """Update ops that stream something, with the buffers that they stream."""
        moving = set(self.movable) - choice.device
        return [(i, away) for i, names in self.updates if (away := tuple(n for n in names if n in moving))]

    def staging(self, choice: Choice, tile: int, depth: int) -> list[tuple[int, int, int]]:
        """(bytes, first, last position) of the staging buffers: `depth` tiles for each streamed tensor of the update that
        streams the most, allocated for each run of streaming updates."""
        runs: dict[int, list[tuple[int, int]]] = {}
        for i, names in self.streamed(choice):
            runs.setdefault(self.first[i], []).append((i, len(names)))
        return [(tile * depth * max(k for _, k in run), run[0][0], run[-1][0]) for run in runs.values()]

    def least_tile(self) -> int:
        """No staging buffer needs to be longer than the longest tensor."""
        longest = max((self.size[name] for _, names in self.updates for name in names), default=0)
        return min(TILE_MIN, max(4096, -(-longest // 4096) * 4096))

    def load(self, choice: Choice) -> np.ndarray:
        """int64[n]: bytes alive at each op, without prefetches, writes in flight or staging."""
        change = np.zeros(self.n + 1, dtype=np.int64)
        for nbytes, a, b in self.intervals(choice):
            change[a] += nbytes
            change[b + 1] -= nbytes
        return self.base + np.cumsum(change)[: self.n]

    def intervals(self, choice: Choice) -> list[tuple[int, int, int]]:
        """(bytes, first, last position) of everything that a choice is about."""
        found = []
        for name in self.movable:
            size = self.size[name]
            if name in choice.device:
                found.append((size, 0, self.n - 1))
            elif name in self.uses:
                found.extend((size, a, b) for a, b in self.segments(name, choice))
            elif name in self.born:
                found.append((size, *self.born[name]))
        for name, s in self.saved.items():
            if name in choice.kept:
                found.append((self.size[name], s.birth, s.death))
            else:
                found.extend([(self.size[name], s.birth, s.leave), (self.size[name], s.back, s.death)])
        return found
