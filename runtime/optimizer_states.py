"""Which states an adopted optimizer keeps for a parameter: those that exist, and those that its first step will create."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import SGD, Adam, Optimizer


def existing_states(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """(parameter, name, state) for every state as large as its parameter; step counters are left out."""
    for param, states in optimizer.state.items():
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and name != "step" and value.shape == param.shape:
                yield param, name, value


def planned_states(optimizer: Optimizer, param: torch.Tensor) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the states that a step keeps for `param`; nothing for a parameter that is not the optimizer's."""
    nbytes = param.numel() * param.element_size()
    for group in optimizer.param_groups:
        if not any(p is param for p in group["params"]):
            continue
        if isinstance(optimizer, Adam):
            names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
        elif isinstance(optimizer, SGD) and group["momentum"]:
            names = ["momentum_buffer"]
        else:
            names = []
        return tuple((name, nbytes) for name in names)
    return ()
