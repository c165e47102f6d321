"""Insert `read_ahead(master)` where the plan starts reading a parameter's optimizer states for the coming update."""

from __future__ import annotations

import torch
from torch import fx

from ..schedule import Plan, owner_of
from .binding import binding_of, events_of, insert_event


def insert_read_ahead(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    masters = binding_of(gm).masters
    for event in list(events_of(gm, plan, "read_ahead")):
        insert_event(gm, event, torch.ops.zinf.read_ahead.default, (masters[owner_of(event.buffers[0])][0],))
    return gm
