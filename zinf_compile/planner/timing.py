"""When transfers start: prefetch launch points, the write window, the update's tiles; and how long the result takes.

Reads are served in order of need on one link. The latest start that still hides a read follows from the compute times after
it, last read first; a launch point is the op that runs at that moment, then moved later where memory is short. Reads needed
sooner are served with memory first, which is also the order in which the link serves them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from .memory import TILE_MAX, Choice, Model

REQUEST_SECONDS = 20e-6  # what it costs the CPU to issue one transfer and take note of its end


@dataclass(frozen=True)
class Read:
    """One transfer towards the device: needed by op `need`, launched before op `launch`, its bytes free again after `last`."""

    name: str
    need: int
    last: int
    launch: int


@dataclass(frozen=True)
class Write:
    """One transfer away, issued after op `op`. `waiter`: index of the write whose issue waits for it (itself: synchronous),
    -1: the end of the graph does."""

    name: str
    op: int
    waiter: int


@dataclass(frozen=True)
class Ahead:
    """States of one parameter that are read before op `launch` of the last backward, for update op `update`; their bytes are
    free again after op `last`, the last update."""

    update: int
    names: tuple[str, ...]
    launch: int
    last: int


@dataclass(frozen=True)
class Schedule:
    """A choice with its timing. slow: factor on transfer times of each graph (first op -> factor) where reads and writes
    share the disk."""

    choice: Choice
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    window: int
    tile: int
    depth: int
    load: np.ndarray
    slow: dict[int, float]
    ahead: tuple[Ahead, ...] = ()


# ---- reads ------------------------------------------------------------------------------------------------------------


def needed_reads(model: Model, choice: Choice) -> list[tuple[int, str, int, int]]:
    """(op that needs it, buffer, earliest launch, last position), in order of need."""
    found = []
    for name in model.uses:
        if name not in choice.device:
            before = -1
            for a, b in model.segments(name, choice):
                found.append((a, name, max(model.first[a], before + 1), b))
                before = b
    for name, s in model.saved.items():
        if name not in choice.kept:
            found.append((s.back, name, model.first[s.back], s.death))
    return sorted(found)


def place_reads(
    model: Model, cluster: Cluster, choice: Choice, load: np.ndarray, limit: int, slow: dict[int, float]
) -> tuple[Read, ...]:
    """Launch points that hide the reads where the memory under `limit` allows; adds what they take to `load` in place."""
    needed = needed_reads(model, choice)
    begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in model.program.ops])])
    wished = [0] * len(needed)
    latest, graph = np.inf, -1
    for k in range(len(needed) - 1, -1, -1):
        need, name, floor, _ = needed[k]
        first = model.first[need]
        if first != graph:
            latest, graph = np.inf, first
        nbytes = model.program.buffers[name].nbytes
        latest = min(latest, begins[need]) - slow.get(first, 1.0) * read_seconds(cluster, nbytes)
        op = int(np.searchsorted(begins, latest + 1e-12, side="right")) - 1
        wished[k] = min(need, max(floor, op))
    reads, before, graph = [], 0, -1
    for k, (need, name, floor, last) in enumerate(needed):
        first = model.first[need]
        if first != graph:
            before, graph = first, first
        launch = max(wished[k], before, floor)
        nbytes = model.size[name]
        tight = np.flatnonzero(load[launch:need] + nbytes > limit)
        if len(tight):
            launch += int(tight[-1]) + 1
        load[launch:need] += nbytes
        before = launch
        reads.append(Read(name, need, last, launch))
    return tuple(reads)


def place_ahead(
    model: Model, cluster: Cluster, choice: Choice, load: np.ndarray, limit: int, slow: dict[int, float], reads: tuple[Read, ...]
) -> tuple[Ahead, ...]:
    """Which states the disk can bring while the last backward still computes, behind that graph's own reads, into memory that
    is free until the updates are done; adds them to `load` in place. They are the states of the parameters that are updated
    first, among those whose gradient this graph makes: only they are known to it."""
    streamed = model.streamed(choice)
    backward = [i for i in range(streamed[0][0]) if model.phases[i] == "backward"] if streamed else []
    if not backward:
        return ()
    end, turn = backward[-1], model.first[streamed[0][0]]
    if any(model.phases[i] != "user" for i in range(end + 1, turn)):
        return ()
    first, last = model.first[end], model.last[turn]
    begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in model.program.ops[first : end + 1]])])
    floor = max((r.need for r in reads if model.first[r.need] == first), default=first)
    link, launch = begins[floor - first], floor
    buffers = model.program.buffers
    known = {buffers[grad].of for grad, (_, done) in model.born.items() if first <= done <= end}
    ahead: list[Ahead] = []
    for update, names in streamed:
        states = tuple(n for n in names if buffers[n].kind == "optim_state")
        if model.first[update] != turn or not states or not all(buffers[n].of in known for n in states):
            continue
        nbytes = sum(model.size[n] for n in states)
        tight = np.flatnonzero(load[launch : last + 1] + nbytes > limit)
        at = launch + (int(tight[-1]) + 1 if len(tight) else 0)
        if at > end:
            continue
        done = max(link, begins[at - first]) + slow.get(first, 1.0) * read_seconds(cluster, nbytes)
        if done > begins[-1]:
            break
        link, launch = done, at
        load[at : last + 1] += nbytes
        ahead.append(Ahead(update, states, at, last))
    return tuple(ahead)


def merge_reads(model: Model, choice: Choice, reads: tuple[Read, ...]) -> bool:
    """A copy read again right after its release might as well be held; says whether any was. Changes `choice`."""
    last: dict[str, Read] = {}
    merged = False
    for read in reads:
        before = last.get(read.name)
        if before is not None and read.launch == before.last + 1 and model.may_hold(before.last, read.need):
            choice.held.add((read.name, before.last))
            merged = True
        last[read.name] = read
    return merged


def read_seconds(cluster: Cluster, nbytes: int) -> float:
    return cluster.nvme_latency + nbytes / cluster.nvme_read


def write_seconds(cluster: Cluster, nbytes: int) -> float:
    return cluster.nvme_latency + nbytes / cluster.nvme_write


# ---- writes -----------------------------------------------------------------------------------------------------------


def needed_writes(model: Model, choice: Choice) -> list[tuple[int, int, str]]:
    """(op, order after that op, buffer) of gradients homed on disk and of offloaded activations, in order of issue."""
    grads = [(model.born[n][1], 0, n) for n in model.movable if n in model.born and n not in choice.device]
    return sorted(grads + [(s.leave, 1, n) for n, s in model.saved.items() if n not in choice.kept])


def retire(model: Model, needed: list[tuple[int, int, str]], window: int) -> list[int]:
    """Who waits for each write: the index of the first one whose issue would pass the window (its own: it is synchronous),
    or -1, the end of its graph."""
    buffers = model.program.buffers
    sizes = [buffers[name].nbytes for _, _, name in needed]
    waiter = [-1] * len(needed)
    oldest, total, graph = 0, 0, -1
    for k, (op, _, _) in enumerate(needed):
        first = model.first[op]
        if first != graph:  # everything is drained at the end of each graph
            oldest, total, graph = k, 0, first
        total += sizes[k]
        while oldest <= k and total > window:
            waiter[oldest] = k
            total -= sizes[oldest]
            oldest += 1
    return waiter


def in_flight(model: Model, needed: list[tuple[int, int, str]], waiter: list[int]) -> np.ndarray:
    """int64[n]: bytes that writes still hold after the op that issued them."""
    change = [0] * (model.n + 1)
    for (op, _, name), w in zip(needed, waiter):
        change[op + 1] += model.size[name]
        change[(needed[w][0] if w >= 0 else model.last[op]) + 1] -= model.size[name]
    return np.cumsum(np.array(change, dtype=np.int64))[: model.n]


def as_writes(needed: list[tuple[int, int, str]], waiter: list[int]) -> tuple[Write, ...]:
    return tuple(Write(name, op, w) for (op, _, name), w in zip(needed, waiter))


def widest_window(model: Model, choice: Choice, load: np.ndarray, limit: int) -> tuple[int, tuple[Write, ...]]:
    """The largest window found whose writes in flight keep the load under `limit`; adds them to `load` in place."""
    needed = needed_writes(model, choice)
    sizes = [model.program.buffers[name].nbytes for _, _, name in needed]
    total, longest = sum(sizes), max(sizes, default=0)
    steps = sorted({0, total, longest, 2 * longest} | {2**k for k in range(16, 40) if 2**k < total})
    fits: tuple[int, list[int], np.ndarray | int] = (0, retire(model, needed, 0), 0)
    low, high = 0, len(steps)  # steps[low] fits, steps[high] and beyond don't
    while high - low > 1:
        middle = (low + high) // 2 if high < len(steps) or low else len(steps) - 1  # the widest is tried first
        waiter = retire(model, needed, steps[middle])
        extra = in_flight(model, needed, waiter)
        if np.any((extra > 0) & (load + extra > limit)):
            high = middle
        else:
            low, fits = middle, (steps[middle], waiter, extra)
    window, waiter, flying = fits
    load += flying
    return window, as_writes(needed, waiter)


# ---- update -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streaming:
    """What one update streams: compute seconds with everything in RAM; bytes of each tensor, and which of them it reads (those
    that were read ahead aren't) and writes back (gradients aren't)."""

    compute: float
    tensors: tuple[tuple[int, int, int], ...]


def streaming(model: Model, cluster: Cluster, op: int, names: tuple[str, ...], ahead: tuple[str, ...] = ()) -> Streaming:
    buffers = model.program.buffers
    tensors = tuple(
        (buffers[n].nbytes, 0 if n in ahead else buffers[n].nbytes, 0 if buffers[n].kind == "grad" else buffers[n].nbytes)
        for n in names
    )
    return Streaming(update_compute(model, cluster, op), tensors)


def update_compute(model: Model, cluster: Cluster, op: int) -> float:
    """Seconds of an update with everything in RAM: measured, else from the bytes that it passes over."""
    step = model.program.ops[op]
    if step.seconds > 0:
        return step.seconds
    touched = dict.fromkeys((*step.reads, *step.writes))
    return sum(model.program.buffers[n].nbytes for n in touched) / cluster.update_rate


def update_seconds(cluster: Cluster, work: Streaming, tile: int, depth: int) -> float:
    """One update that streams: in turn with one set of staging buffers, overlapped with more."""
    read = sum(r for _, r, _ in work.tensors)
    written = sum(w for _, _, w in work.tensors)
    longest = max(n for n, _, _ in work.tensors)
    requests = sum(-(-r // tile) + -(-w // tile) for _, r, w in work.tensors)
    compute = work.compute + requests * REQUEST_SECONDS
    waits = (2 if written else 1) * -(-longest // tile) * cluster.nvme_latency
    if depth == 1:
        return compute + read / cluster.nvme_read + written / cluster.nvme_write + waits
    share = min(1.0, tile / longest)  # the first tile in and the last one out overlap with nothing
    ends = cluster.nvme_latency + share * max(read / cluster.nvme_read, written / cluster.nvme_write)
    flow = max(read / cluster.nvme_read, written / cluster.nvme_write, (read + written) / cluster.nvme_mixed)
    return max(compute, flow, waits / (depth - 1)) + ends


def choose_tile(model: Model, cluster: Cluster, choice: Choice, load: np.ndarray, limit: int) -> tuple[int, int]:
    """(tile, depth) with the quickest update whose staging keeps the load under `limit`; adds the staging to `load`."""
    streamed = model.streamed(choice)
    least = model.least_tile()
    if not streamed:
        return least, 1
    # layers are alike: each distinct update is timed once
    work = Counter(streaming(model, cluster, i, names) for i, names in streamed)
    longest = max(n for w in work for n, _, _ in w.tensors)
    tiles = [least]
    while tiles[-1] < min(TILE_MAX, longest):
        tiles.append(tiles[-1] * 2)
    room = [(limit - int(load[a : b + 1].max()), count) for count, a, b in model.staging(choice, 1, 1)]
    timed = []
    for tile in tiles:
        for depth in (1, 2, 3):
            # the least is always allowed: the frugal plan has counted it
            if (tile, depth) != (least, 1) and any(tile * depth * count > free for free, count in room):
                continue
            seconds = sum(count * update_seconds(cluster, w, tile, depth) for w, count in work.items())
            timed.append((seconds, -tile, depth))
    # among nearly equal ones the longest tile: fewer requests are kinder to disks than this model knows
    enough = min(seconds for seconds, _, _ in timed) * 1.03
    negative, depth = min((tile, depth) for seconds, tile, depth in timed if seconds <= enough)
    tile = -negative
    for nbytes, a, b in model.staging(choice, tile, depth):
        load[a : b + 1] += nbytes
    return tile, depth


# ---- all together -----------------------------------------------------------------------------------------------------


def shared_disk(model: Model, cluster: Cluster, choice: Choice) -> dict[int, float]:
    """Per graph (its first op): how much longer transfers take because reads and writes share the disk."""
    moved: dict[int, list[int]] = {}
    for need, name, _, _ in needed_reads(model, choice):
        moved.setdefault(model.first[need], [0, 0])[0] += model.program.buffers[name].nbytes
    for op, _, name in needed_writes(model, choice):
        moved.setdefault(model.first[op], [0, 0])[1] += model.program.buffers[name].nbytes
    slow = {}
    for first, (read, written) in moved.items():
        alone = max(read / cluster.nvme_read, written / cluster.nvme_write)
        slow[first] = max(1.0, (read + written) / cluster.nvme_mixed / alone) if read and written else 1.0
    return slow


def schedule(model: Model, cluster: Cluster, choice: Choice, limit: int, spare: int) -> Schedule:
    """Timing for a choice. `spare` bytes were left free for it under `limit`: half of them at most go to writes in flight, half
    of them at most to the update's tiles, so that states can be read ahead."""
    choice = choice.copy()
    while True:  # a merge only removes reads, so this ends
        load = model.load(choice)
        tile, depth = choose_tile(model, cluster, choice, load, limit - spare // 2)
        window, writes = widest_window(model, choice, load, limit - spare // 2)
        slow = shared_disk(model, cluster, choice)
        reads = place_reads(model, cluster, choice, load, limit, slow)
        if not merge_reads(model, choice, reads):
            ahead = place_ahead(model, cluster, choice, load, limit, slow, reads)
            return Schedule(choice, reads, writes, window, tile, depth, load, slow, ahead)


def frugal_schedule(model: Model, cluster: Cluster, choice: Choice) -> Schedule:
    """The least memory: reads at use, writes in turn, one small set of staging buffers."""
    load = model.load(choice)
    tile = model.least_tile()
    for nbytes, a, b in model.staging(choice, tile, 1):
        load[a : b + 1] += nbytes
    reads = tuple(Read(name, need, last, need) for need, name, _, last in needed_reads(model, choice))
    needed = needed_writes(model, choice)
    writes = as_writes(needed, retire(model, needed, 0))
    return Schedule(choice, reads, writes, 0, tile, 1, load, shared_disk(model, cluster, choice))
