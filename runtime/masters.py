"""Masters: the user's own parameters, whose bytes are moved between RAM and the store behind their back.

A master is always a real, readable, writable tensor with a storage of its own at offset 0. On disk it is a shared mapping
of a block of the store file. Moving one re-points `param.data`: the Parameter object, its hooks, its place in optimizers
and its version counter stay.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from .._torch import storage_users
from .arena import Arena
from .nvme_store import NvmeStore


def is_movable(param: torch.Tensor) -> bool:
    """Whether its bytes can live in a block: a plain, dense, contiguous CPU tensor that shares its storage with nobody."""
    return bool(
        type(param) in (nn.Parameter, torch.Tensor)
        and param.layout == torch.strided
        and param.device.type == "cpu"
        and param.numel() > 0
        and param.is_contiguous()
        and param.storage_offset() == 0
        and param.untyped_storage().nbytes() == param.numel() * param.element_size()
    )


def _address(param: torch.Tensor) -> int:
    return param.data_ptr() if param.layout == torch.strided else 0


class Masters:
    """Where the parameters of one model live. Thread-unsafe: used between graph runs only."""

    def __init__(self, arena: Arena, native: ctypes.CDLL) -> None:
        self.arena = arena
        self.native = native
        self._external: dict[int, int] = {}  # id(param) -> bytes that our allocator did not hand out
        self._address: dict[int, int] = {}  # id(param) -> address when last seen

    def on_disk(self, param: torch.Tensor) -> bool:
        return param.layout == torch.strided and param.numel() > 0 and self.native.zinf_block_bytes(ctypes.c_void_p(param.data_ptr())) >= 0

    def watch(self, param: torch.Tensor) -> None:
        """Count a RAM master's bytes under the budget, if torch's stock allocator handed them out before ours was installed."""
        self.forget(param)
        self._address[id(param)] = _address(param)
        nbytes = param.untyped_storage().nbytes() if param.layout == torch.strided else 0
        if nbytes and not self.on_disk(param) and self.native.zinf_alloc_place(ctypes.c_void_p(param.data_ptr())) == -3:
            self._external[id(param)] = nbytes
            self.arena.external(nbytes)

    def forget(self, param: torch.Tensor) -> None:
        self._address.pop(id(param), None)
        nbytes = self._external.pop(id(param), 0)
        if nbytes:
            self.arena.external(-nbytes)

    def moved(self, param: torch.Tensor) -> bool:
        """Whether user code has replaced its storage since we last looked (`p.data = new`, `.half()`, `assign=True`)."""
        return self._address.get(id(param)) != _address(param)

    def ram_bytes(self, param: torch.Tensor) -> int:
        return 0 if param.layout != torch.strided or self.on_disk(param) else param.untyped_storage().nbytes()

    def to_disk(self, param: torch.Tensor, store: NvmeStore) -> bool:
        """Move a RAM master into the store; False when it cannot be (it shares its storage, or is already there)."""
        if self.on_disk(param) or not is_movable(param) or storage_users(param) > 1:
            return False
        with torch.inference_mode(False), torch.no_grad():  # a master made in inference mode could never be trained
            home = torch.ops.zinf.store_copy(param.detach(), store.handle)
            store.drain()
            param.data = home
        self.watch(param)
        return True

    def to_ram(self, param: torch.Tensor) -> bool:
        """Bring a master back into RAM; False when it is there already."""
        if not self.on_disk(param):
            return False
        with torch.inference_mode(False), torch.no_grad():  # a master made in inference mode could never be trained
            copy = torch.empty_like(param)
            copy.copy_(torch.ops.zinf.gather(param.detach(), -1))
            self.native.zinf_block_invalidate(ctypes.c_void_p(param.data_ptr()))
            param.data = copy
        self.watch(param)
        return True


def give_back_free_memory() -> None:
    """Return the C library's free memory to the kernel: what the parameters occupied before they moved to disk."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
