"""Insert `gather(master, site)` where the plan has a gather event; readers from there on use the working copy."""

from __future__ import annotations

import torch
from torch import fx

from ..schedule import Plan
from .binding import binding_of, insert_copies


def insert_gather(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    insert_copies(gm, plan, "gather", torch.ops.zinf.gather.default, binding_of(gm).masters)
    return gm
