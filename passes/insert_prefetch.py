"""Insert `prefetch(source)` where the plan starts reading a master or an offloaded activation ahead of its use."""

from __future__ import annotations

import torch
from torch import fx

from ..schedule import Plan
from .binding import binding_of, events_of, insert_event


def insert_prefetch(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    binding = binding_of(gm)
    for event in list(events_of(gm, plan, "prefetch")):
        for name in event.buffers:
            sources = binding.masters.get(name) or binding.saved_inputs[name]
            insert_event(gm, event, torch.ops.zinf.prefetch.default, (sources[0],))
    return gm
