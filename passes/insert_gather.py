"""Insert `gather(master, site)` where the plan has a gather event; readers from there on use the working copy."""

from __future__ import annotations

import torch
from torch import fx

from ..schedule import Plan
from .binding import binding_of, events_of, insert_event, reads_data


def insert_gather(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    binding = binding_of(gm)
    # From the last gather to the first: what an earlier one still finds reading the master is its own.
    for event in reversed(list(events_of(gm, plan, "gather"))):
        start = event.step - binding.first
        for name in event.buffers:
            places = binding.masters[name]
            copy = insert_event(gm, event, torch.ops.zinf.gather.default, (places[0], event.id))
            copy.meta["val"] = places[0].meta.get("val")
            copy.meta["zinf_buffer"] = name
            for place in places:
                for reader in [u for u in place.users if binding.position(u) >= start and reads_data(u, place)]:
                    reader.replace_input_with(place, copy)
    return gm
