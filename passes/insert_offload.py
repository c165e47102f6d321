"""Insert `offload(activation)` behind its last forward reader and `reload(saved, site)` before its backward readers.

The forward returns the offloaded tensor (a real tensor over the store) in the activation's place, so autograd saves that.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from ..schedule import Plan
from .binding import binding_of, events_of, insert_event, reads_data


def insert_offload(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    binding = binding_of(gm)
    out = gm.graph.output_node()
    outs = list(cast("tuple[Any, ...]", out.args[0]))
    for event in list(events_of(gm, plan, "offload")):
        for name in event.buffers:
            positions = binding.saved_outputs[name]
            value = outs[positions[0]]
            moved = insert_event(gm, event, torch.ops.zinf.offload.default, (value,))
            moved.meta["val"] = value.meta.get("val")
            for position in positions:
                outs[position] = moved
    out.args = (tuple(outs),)
    for event in reversed(list(events_of(gm, plan, "reload"))):
        start = event.step - binding.first
        for name in event.buffers:
            places = binding.saved_inputs[name]
            copy = insert_event(gm, event, torch.ops.zinf.reload.default, (places[0], event.id))
            copy.meta["val"] = places[0].meta.get("val")
            copy.meta["zinf_buffer"] = name
            for place in places:
                for reader in [u for u in place.users if binding.position(u) >= start and reads_data(u, place)]:
                    reader.replace_input_with(place, copy)
    return gm
