"""torch's own optimizer arithmetic on tiles: for dtypes the native kernels don't have, and where the self-check refuses them.

An elementwise update may be cut anywhere, so torch's functional `adam` and `sgd` run on slices of flattened tensors. Tensors
in memory are sliced in place; tensors in blocks are read into staging buffers, two sets in turn, and written back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from .optimizer_native import NativeUpdates

PAGE = 4096


def torch_update(
    kind: str, group: dict[str, Any], step: Tensor | None, grad_scale: Tensor | None
) -> Callable[[list[Tensor], bool], None]:
    """The update of one tile: called with [param, grad, *states] and whether the momentum buffer is new."""

    def update(tile: list[Tensor], first: bool) -> None:
        param, grad, *states = tile
        amp: dict[str, Any] = {}
        if grad_scale is not None and group["fused"]:
            amp = {"grad_scale": grad_scale, "found_inf": torch.zeros(1)}
            grad = grad.clone()  # the fused kernels write the unscaled gradient back
        elif grad_scale is not None:
            grad = grad / grad_scale
        options = {name: group[name] for name in ("lr", "weight_decay", "maximize")} | {"foreach": False, "fused": bool(group["fused"])} | amp
        if kind == "adam":
            assert step is not None
            options |= {name: group[name] for name in ("amsgrad", "eps", "decoupled_weight_decay")}
            beta1, beta2 = group["betas"]
            adam([param], [grad], states[:1], states[1:2], states[2:], [step.clone()], beta1=beta1, beta2=beta2, has_complex=param.is_complex(), **options)
            return
        options |= {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        buffers: list[Tensor | None] = [None if first or not states else states[0]]
        sgd([param], [grad], buffers, **options)
        if first and states:
            assert buffers[0] is not None
            states[0].copy_(buffers[0])

    return update


def run_tiled(
    native: NativeUpdates,
    tensors: list[Tensor],
    update: Callable[[list[Tensor], bool], None],
    first: bool,
    tile_bytes: int,
    account: Callable[[int], None],
) -> int:
    """Apply `update` to tiles of [param, grad, *states], which are dense with equal strides. Returns the staging bytes.

    tile_bytes: of one staging buffer. first: the states are created by this update, their contents are not read.
    Raises: RuntimeError with the engine's message when a transfer fails.
    """
    numel = tensors[0].numel()
    flat = [t.as_strided((numel,), (1,)) for t in tensors]
    staged = [i for i, t in enumerate(tensors) if numel and native.is_block(t)]
    # Whole pages of every dtype, and a multiple of every vector length: torch's loops see the same remainders.
    count = max(tile_bytes // max(t.element_size() for t in tensors) // PAGE * PAGE, PAGE)
    count = max(min(count, -(-numel // PAGE) * PAGE), 1)
    sizes = [count * tensors[i].element_size() for i in staged]
    staging = 2 * sum(sizes)
    account(staging)
    try:
        slots = [_Slot(native, {i: _aligned(size, tensors[i].dtype) for i, size in zip(staged, sizes)}, flat) for _ in range(2)]
        try:
            starts = range(0, numel, count)
            for turn, start in enumerate(starts):
                slot, other = slots[turn % 2], slots[1 - turn % 2]
                if turn == 0:
                    slot.read(start, count, first)
                if turn + 1 < len(starts):
                    other.read(starts[turn + 1], count, first)
                slot.finish()
                update([slot.buffers[i][: len(t)] if i in slot.buffers else t for i, t in enumerate(slot.window(start, count))], first)
                slot.write(start, count)
        finally:
            for slot in slots:
                slot.finish(quiet=True)
        for slot in slots:
            slot.raise_error()
    finally:
        account(-staging)
    return staging


class _Slot:
    """One set of staging buffers and the transfers in flight on it."""

    def __init__(self, native: NativeUpdates, buffers: dict[int, Tensor], flat: list[Tensor]) -> None:
        self.buffers = buffers
        self._library, self._flat = native.library, flat
        self._library.zinf_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        self._library.zinf_write.argtypes = [*self._library.zinf_read.argtypes, ctypes.c_void_p, ctypes.c_void_p]
        self._library.zinf_read.restype = self._library.zinf_write.restype = ctypes.c_int64
        self._library.zinf_wait_quiet.argtypes = [ctypes.c_int64]
        self._tickets: list[int] = []
        self._error = ""

    def window(self, start: int, count: int) -> list[Tensor]:
        return [t[start : start + count] for t in self._flat]

    def read(self, start: int, count: int, first: bool) -> None:
        self.finish()
        for i, buffer in self.buffers.items():
            if not (first and i >= 2):
                self._start(self._library.zinf_read, i, start, count, buffer)

    def write(self, start: int, count: int) -> None:
        for i, buffer in self.buffers.items():
            if i != 1:
                self._start(self._library.zinf_write, i, start, count, buffer, None, None)

    def _start(self, call: Any, i: int, start: int, count: int, buffer: Tensor, *callback: None) -> None:
        size = buffer.element_size()
        nbytes = (min(start + count, len(self._flat[i])) - start) * size
        ticket = -1
        while ticket < 0:
            ticket = call(self._flat[i].data_ptr(), start * size, buffer.data_ptr(), nbytes, *callback)
            if ticket < 0 and self._library.zinf_last_error() != b"interrupted":  # half a step helps nobody: go on
                self._note()
                self.raise_error()
        self._tickets.append(ticket)

    def finish(self, quiet: bool = False) -> None:
        for ticket in self._tickets:
            if ticket > 0 and self._library.zinf_wait_quiet(ticket) != 0:
                self._note()
        self._tickets = []
        if not quiet:
            self.raise_error()

    def _note(self) -> None:
        self._error = self._error or self._library.zinf_last_error().decode()

    def raise_error(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


def _aligned(nbytes: int, dtype: torch.dtype) -> Tensor:
    """Page-aligned memory, as direct I/O wants it."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + nbytes].view(dtype)
