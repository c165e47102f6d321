"""Planned addresses of what no graph shows: the blocks that a steady step really allocates, kernels' temporaries included.

The sequence of a graph run's allocations repeats exactly from step to step. One settled step is recorded, its blocks are
placed offline (`planner.addresses`), and from then on the k-th allocation of a run gets its planned address: no search, no
fragmentation, no page faults. The allocator checks size and that the slot is free, and falls back to its heap otherwise (a
second live run of the same graph, `retain_graph`, an output that the user keeps).
"""

from __future__ import annotations

from .planner.addresses import assign
from .runtime.arena import HEAP, Arena


class AddressPlanner:
    """Records one step, then plans; `restart` whenever the graphs are rewritten. Call `step_done` at the end of each step."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._recording = False
        self._instances: list[int] = []
        self.nbytes = 0  # of the planned region
        self.done = False

    def restart(self) -> None:
        """Graphs have changed: forget the addresses and record again."""
        for instance in self._instances:
            self._arena.raw["plan_clear"](instance)  # gone already where the allocator was uninstalled meanwhile
        if self._recording:
            self._arena.raw["record"](0)
        self._instances, self._recording, self.done = [], False, False

    def step_done(self) -> None:
        if self.done:
            return
        if not self._recording:
            self._arena.raw["log_clear"]()
            self._arena.raw["record"](1)
            self._recording = True
            return
        self._arena.raw["record"](0)
        self._recording = False
        self._plan()
        self._arena.raw["log_clear"]()
        self.done = True

    def _plan(self) -> None:
        latest = {mark.instance: mark for mark in self._arena.marks() if mark.instance >= 0}
        # Of an accumulation's equal runs the last one speaks for all.
        mine = [
            r
            for r in self._arena.log()
            if r.instance in latest and latest[r.instance].begin <= r.birth <= latest[r.instance].end
        ]
        placed = [r for r in mine if r.death >= 0]  # what outlives the step (a gradient kept in RAM) stays on the heap
        self.nbytes, offsets = assign([(r.nbytes, r.birth, r.death) for r in placed], self._arena.page)
        at = {(r.instance, r.k): offset for r, offset in zip(placed, offsets)}
        for instance in latest:
            records = sorted((r for r in mine if r.instance == instance), key=lambda r: r.k)
            sizes = [r.nbytes for r in records]
            if records and [r.k for r in records] == list(range(len(records))):
                self._arena.set_plan(instance, sizes, [at.get((instance, r.k), HEAP) for r in records])
                self._instances.append(instance)
