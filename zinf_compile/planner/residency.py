"""What stays on the device: spends memory on whatever saves the most seconds for a byte.

A decision starts from the frugal choice (everything away), which is the least that a step can run in. Each item below may
then be bought with memory; buying one adds its bytes to the load over the positions where it wasn't there before:

  param        homed on the device: its reads of forward and backward, and the update's read and write, all vanish
  grad, state  homed on the device: a write and a read vanish
  activation   not offloaded: a write and a read vanish; costs bytes only between its last forward and first backward use
  hold         a working copy stays between two uses: one read vanishes

A saved second of the update is worth a second: nothing hides its transfers. One of forward or backward may be hidden behind
compute, how much so isn't known before timing; `hidden` scales those (make_plan tries several and times each).
At equal value small buffers go first, so that tiny tensors end up resident, and activations with a short gap before those
with a long one: the innermost layers are kept, the outermost, whose transfers have the most time, leave.
"""

from __future__ import annotations

import numpy as np

from ..cluster import Cluster
from .memory import Choice, Model

Item = tuple[float, int, int, int, str, str, int]  # -value, bytes, positions, order, what, name, gap (hold only)


def items(model: Model, cluster: Cluster, hidden: float) -> list[Item]:
    """What can be bought, best first."""
    updated = {name for _, names in model.updates for name in names}
    read = _per_transfer(cluster.nvme_read, cluster.nvme_latency)
    write = _per_transfer(cluster.nvme_write, cluster.nvme_latency)
    found: list[Item] = []
    frugal = model.frugal()
    for name in model.movable:
        if model.pinned(name):
            continue
        nbytes = model.size[name]
        seconds = 0.0
        if name in updated:
            seconds += read(nbytes) + (0.0 if name in model.born else write(nbytes))
        if name in model.born:
            seconds += hidden * write(nbytes)
        if name in model.uses:
            seconds += hidden * read(nbytes) * len(model.segments(name, frugal))
        found.append((-seconds / nbytes, nbytes, model.n, len(found), "device", name, -1))
    for name, s in model.saved.items():
        if not model.pinned(name):
            nbytes = model.size[name]
            value = hidden * (read(nbytes) + write(nbytes)) / nbytes
            found.append((-value, nbytes, s.back - s.leave, len(found), "keep", name, -1))
    for name, uses in model.uses.items():
        nbytes = model.size[name]
        for a, b in zip(uses, uses[1:]):
            if b > a + 1 and model.may_hold(a, b):
                found.append((-hidden * read(nbytes) / nbytes, nbytes, b - a, len(found), "hold", name, a))
    # values are rounded so that equal rates compare equal whatever the size; a hold costs bytes only over its gap
    return sorted((round(v, 15), *rest) for v, *rest in found)  # type: ignore[misc]


def _per_transfer(rate: float, latency: float):
    return lambda nbytes: latency + nbytes / rate


def choose(model: Model, ranked: list[Item], limit: int) -> tuple[Choice, np.ndarray]:
    """Buys items in order while the load stays under `limit` wherever they add to it. Returns the choice and its load."""
    choice = model.frugal()
    load = model.load(choice)
    for nbytes, a, b in model.staging(choice, model.least_tile(), 1):
        load[a : b + 1] += nbytes
    next_use = {(name, a): b for name, uses in model.uses.items() for a, b in zip(uses, uses[1:])}
    for _, nbytes, _, _, what, name, gap in ranked:
        if what == "device":
            _try_home(model, choice, load, limit, name)
        elif what == "keep":
            s = model.saved[name]
            if _try_add(load, limit, nbytes, s.leave + 1, s.back):
                choice.kept.add(name)
        elif name not in choice.device and _try_add(load, limit, nbytes, gap + 1, next_use[name, gap]):
            choice.held.add((name, gap))
    return choice, load


def _try_add(load: np.ndarray, limit: int, nbytes: int, first: int, end: int) -> bool:
    if int(load[first:end].max(initial=0)) + nbytes > limit:
        return False
    load[first:end] += nbytes
    return True


def _try_home(model: Model, choice: Choice, load: np.ndarray, limit: int, name: str) -> bool:
    """A resident is there everywhere; where its copies were, nothing is added."""
    nbytes = model.size[name]
    spans = model.segments(name, choice) if name in model.uses else [model.born[name]] if name in model.born else []
    for a, b in spans:
        load[a : b + 1] -= nbytes
    if int(load.max()) + nbytes > limit:
        for a, b in spans:
            load[a : b + 1] += nbytes
        return False
    load += nbytes
    choice.device.add(name)
    return True
