"""Insert `release(copy)` where the plan has a release event: the engine lets go of that working copy."""

from __future__ import annotations

import torch
from torch import fx

from ..schedule import Plan
from .binding import EVENT_KEY, events_of, insert_event

COPIES = (torch.ops.zinf.gather.default, torch.ops.zinf.reload.default)


def insert_release(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    copies: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.target in COPIES:
            copies.setdefault(node.meta["zinf_buffer"], []).append(node)
    for event in list(events_of(gm, plan, "release")):
        for name in event.buffers:
            current = [n for n in copies.get(name, ()) if n.meta[EVENT_KEY] < event.id]
            if current:
                insert_event(gm, event, torch.ops.zinf.release.default, (current[-1],))
    return gm
