"""The kernel of `reduce_grad(gradient, master) -> Tensor?`: hand a complete gradient over, and let autograd deliver it.

What it returns goes to the master's AccumulateGrad node, so hooks, `autograd.grad`, `inputs=` and optimizers in the
backward behave as in eager. None: this backward does not want the gradient, or it was added to an existing `.grad` that
nobody observes. The engine keeps no reference to what it returns: AccumulateGrad would clone it into RAM.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from .._torch import creating_graph, grad_observed, grad_wanted


class Gradients:
    """Registers the kernel once a process. `master_of(tensor)`: the parameter that a graph argument stands for, None for a
    stranger's; `home_of(master)`: the store handle for a gradient that is homed on disk, else 0."""

    def __init__(
        self,
        master_of: Callable[[torch.Tensor], torch.Tensor | None],
        home_of: Callable[[torch.Tensor], int],
        native: ctypes.CDLL,
    ) -> None:
        self._master_of = master_of
        self._home_of = home_of
        self._native = native
        self._library = torch.library.Library("zinf", "IMPL")
        self._library.impl("reduce_grad", self.reduce, "CPU")

    def reduce(self, grad: torch.Tensor, argument: torch.Tensor) -> torch.Tensor | None:
        """grad: any layout and stride, shape of the master. Returns a tensor of the gradient's values, or None."""
        master = self._master_of(argument)
        if master is None or not master.is_leaf or not master.requires_grad:
            return grad  # not ours to hand over: autograd takes it as it is
        wanted = grad_wanted(master)
        if wanted is False:
            return None
        current = master.grad
        if (
            wanted is True
            and current is not None
            and not grad_observed(master)
            and not creating_graph()  # adding in place would lose where the sum comes from: the user may differentiate it
            and current.layout == grad.layout == torch.strided
            and current.dtype == grad.dtype
            and current.shape == grad.shape
        ):
            if self._on_disk(current):
                torch.ops.zinf.accumulate(current, grad)
            else:
                current.add_(grad)
            return None
        store = self._home_of(master)
        if not store or grad.layout != torch.strided or grad.numel() == 0:
            return grad
        return torch.ops.zinf.store_copy(grad.contiguous(), store)

    def _on_disk(self, tensor: torch.Tensor) -> bool:
        return self._native.zinf_block_bytes(ctypes.c_void_p(tensor.data_ptr())) >= 0
