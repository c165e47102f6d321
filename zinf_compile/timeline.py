"""Which graphs run in a step, in what order: recorded, so that a step of several graphs is planned as one.

An *episode* is a closed stretch of runs: it begins when no forward waits for its backward and ends when none does again.
Micro-batches of an accumulation are the same episode several times; an evaluation between steps is an episode of its own.
The planned step is the sequence of distinct episodes seen; an order never seen is served by what is known of its graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

# More distinct episodes than this and the oldest is forgotten: a loop that never repeats must not grow the plan.
MAX_EPISODES = 8
# A forward whose backward never comes would keep its episode open for good.
MAX_OPEN_RUNS = 128


@dataclass(frozen=True, slots=True)
class RunKey:
    """One run of a graph in an episode. occurrence: how many runs of the same graph and masters were open before it."""

    piece: int
    phase: str  # "forward", "backward", "inference"
    masters: tuple[str, ...]
    occurrence: int = 0


class Timeline:
    """Records runs and keeps the distinct episodes, oldest first."""

    def __init__(self) -> None:
        self.episodes: OrderedDict[tuple[RunKey, ...], int] = OrderedDict()
        self._runs: list[RunKey] = []
        self._open: list[RunKey] = []
        self.changed = False
        self.last_step: dict[RunKey, int] = {}  # how often each run took place in the latest whole step
        self._this_step: dict[RunKey, int] = {}

    @property
    def open_forwards(self) -> int:
        return len(self._open)

    def open_keys(self) -> list[RunKey]:
        """Forwards whose backward has not run, latest first."""
        return self._open[::-1]

    def key(self, piece: int, phase: str, masters: tuple[str, ...]) -> RunKey:
        """The key that the next run of this graph has."""
        if phase == "forward":
            return RunKey(piece, phase, masters, sum(1 for k in self._open if k.piece == piece and k.masters == masters))
        if phase == "backward":
            for forward in reversed(self._open):
                if forward.piece == piece and forward.masters == masters:
                    return RunKey(piece, phase, masters, forward.occurrence)
        return RunKey(piece, phase, masters, 0)

    def last_of_step(self, key: RunKey) -> bool:
        """Whether the run that comes is the last of its kind before the optimizer steps, if this step is like the one before."""
        return self._this_step.get(key, 0) + 1 == self.last_step.get(key, 0)

    def step_done(self) -> None:
        self.last_step, self._this_step = self._this_step, {}

    def record(self, key: RunKey) -> None:
        self._this_step[key] = self._this_step.get(key, 0) + 1
        self._runs.append(key)
        if key.phase == "forward":
            self._open.append(key)
        elif key.phase == "backward":
            twin = RunKey(key.piece, "forward", key.masters, key.occurrence)
            if twin in self._open:
                self._open.remove(twin)
        if len(self._runs) > MAX_OPEN_RUNS:
            self._drop_abandoned()
        elif not self._open:
            self.close()

    def _drop_abandoned(self) -> None:
        """Forwards that have been open for half of all these runs never had a backward: go on as if they had not been."""
        recent = list(self._runs[-(MAX_OPEN_RUNS // 2) :])
        abandoned = list(self._open)
        for run in recent:
            if run in abandoned:
                abandoned.remove(run)
        runs = list(self._runs)
        for run in abandoned or self._open[:-1]:  # one stretch of so many runs, none of them old: all but the latest are given up
            runs.remove(run)
        self._runs, self._open, counted = [], [], dict(self._this_step)
        for run in runs[-MAX_OPEN_RUNS:]:
            self.record(run)
        self._this_step = counted

    def close(self) -> None:
        """End the current episode; forwards still open have been dropped by user code."""
        if self._runs:
            episode = tuple(self._runs)
            # A part of something planned is no news: its variants serve it.
            if not any(set(known) >= set(episode) for known in self.episodes):
                self.changed = True
                for known in [k for k in self.episodes if set(k) <= set(episode)]:
                    del self.episodes[known]
                self.episodes[episode] = 0
            if episode in self.episodes:
                self.episodes[episode] += 1
            while len(self.episodes) > MAX_EPISODES:
                self.episodes.popitem(last=False)
                self.changed = True
        self._runs, self._open = [], []

    def expect(self, episode: tuple[RunKey, ...]) -> None:
        """Plan for an episode before it has run: what a graph that was just captured will most likely do."""
        if not any(set(known) >= set(episode) for known in self.episodes):
            self.episodes[episode] = 0

    def keep_only(self, masters: Collection[str], pieces: Collection[int]) -> None:
        """Forget episodes of graphs or parameters that no longer exist (a layer was removed)."""
        for known in list(self.episodes):
            if any(run.piece not in pieces or any(m and m not in masters for m in run.masters) for run in known):
                del self.episodes[known]

    def forget_piece(self, piece: int) -> None:
        self._runs = [run for run in self._runs if run.piece != piece]
        self._open = [run for run in self._open if run.piece != piece]
        for known in [k for k in self.episodes if any(run.piece == piece for run in k)]:
            del self.episodes[known]
