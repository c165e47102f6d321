"""Insert `reduce_grad(gradient, master)` where each gradient is complete; the graph returns what it returns.

At the end of the graph all gradients would be alive at once (+64 against +8 MiB for 64 MiB of weights).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from ..schedule import Plan
from .binding import binding_of, events_of, insert_event


def insert_reduce_grad(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    binding = binding_of(gm)
    out = gm.graph.output_node()
    outs = list(cast("tuple[Any, ...]", out.args[0]))
    for event in list(events_of(gm, plan, "reduce_grad")):
        for name in event.buffers:
            if name not in binding.gradients:
                continue
            positions, master = binding.gradients[name]
            value = outs[positions[0]]
            done = insert_event(
                gm, event, torch.ops.zinf.reduce_grad.default, (value, binding.masters[master][0]), not_before=value
            )
            done.meta["val"] = value.meta.get("val")
            for position in positions:
                outs[position] = done
    out.args = (tuple(outs),)
    return gm
