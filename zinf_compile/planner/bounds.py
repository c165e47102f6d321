"""Lower bounds on a step: no plan for this program, cluster and budget can be quicker than any of them.

compute   every op takes its time, one after another.
read      `excess` bytes do not fit at the fullest op, so they are away at that moment: each of them lives on disk and is read
          back at least once a step (a parameter by the graphs or the update, a gradient or state by the update, an activation
          by its reload). Reads of graphs and of updates never overlap: a graph gathers all that it launched.
write     the same bytes less those that are only ever read: parameters without an update, and what no op writes.
"""

from __future__ import annotations

from ..cluster import Cluster
from .memory import Model
from .timing import update_compute


def lower_bounds(model: Model, cluster: Cluster, limit: int) -> dict[str, float]:
    """Seconds of each bound, and "step", the largest. limit: bytes of the device that the plan may use."""
    buffers = model.program.buffers
    updates = {i for i, _ in model.updates}
    compute = sum(
        update_compute(model, cluster, i) if i in updates else op.seconds for i, op in enumerate(model.program.ops)
    )
    updated = {name for _, names in model.updates for name in names}
    excess = _excess(model, limit)
    never_read = sum(
        buffers[n].nbytes for n in model.movable if n not in updated and not model.uses.get(n)
    )
    never_written = sum(buffers[n].nbytes for n in model.movable if n not in updated and n not in model.born)
    found = {
        "compute": compute,
        "read": max(0, excess - never_read) / cluster.nvme_read,
        "write": max(0, excess - never_read - never_written) / cluster.nvme_write,
    }
    found["step"] = max(found.values())
    return found


def _excess(model: Model, limit: int) -> int:
    """Bytes by which the fullest op passes `limit` when everything stays; true sizes, not rounded ones."""
    buffers = model.program.buffers
    change = [0] * (model.n + 1)
    for name, a, b in model.fixed:
        change[a] += buffers[name].nbytes
        change[b + 1] -= buffers[name].nbytes
    for s in model.saved.values():
        change[s.birth] += buffers[s.name].nbytes
        change[s.death + 1] -= buffers[s.name].nbytes
    homed = sum(buffers[n].nbytes for n in model.movable)
    most, alive = 0, 0
    for i, op in enumerate(model.program.ops):
        alive += change[i]
        most = max(most, alive + homed + op.workspace)
    return max(0, most - limit)
