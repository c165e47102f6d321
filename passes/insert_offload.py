"""Insert `offload(activation)` behind its last forward reader and `reload(saved, site)` before its backward readers.

The forward returns the offloaded tensor (a real tensor over the store) in the activation's place, so autograd saves that.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from ..schedule import Plan
from .binding import binding_of, events_of, insert_copies, insert_event


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
    insert_copies(gm, plan, "reload", torch.ops.zinf.reload.default, binding.saved_inputs)
    return gm
