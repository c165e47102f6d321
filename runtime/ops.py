"""Schemas and fakes of the zinf:: ops. Kernels are in csrc/ops.cpp and appear with `ensure_native()`.

Importing this module needs no compiler: graphs with zinf:: ops can be built, planned and verified without one.

  prefetch(master)          starts to read a block into a working copy; nothing for a tensor in RAM
  read_ahead(master)        starts to read the states of a parameter, for the update that follows this backward
  gather(master, site)      the working copy, complete; a tensor in RAM is returned itself
  release(copy)             the working copy's bytes may go
  offload(x)                a block with the contents of x, written asynchronously; reload(saved, site) brings it back
  reduce_grad(grad, master) hands a complete gradient over; its kernel belongs to the executor
  block_tensor, store_copy  CPU tensors over a new block of a store; contents unspecified / those of x
  accumulate(home, grad)    home += grad, through the disk if home is a block

`site` makes every call unique: equal calls would be merged by common-subexpression elimination.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from . import native

SCHEMAS = (
    "prefetch(Tensor master) -> ()",
    "read_ahead(Tensor master) -> ()",
    "gather(Tensor master, int site) -> Tensor",
    "release(Tensor copy) -> ()",
    "offload(Tensor x) -> Tensor",
    "reload(Tensor saved, int site) -> Tensor",
    "reduce_grad(Tensor grad, Tensor master) -> Tensor?",
    "block_tensor(int store, SymInt[] size, ScalarType dtype) -> Tensor",
    "store_copy(Tensor x, int store) -> Tensor",
    "accumulate(Tensor(a!) home, Tensor grad) -> ()",
)

library = torch.library.Library("zinf", "DEF")
for _schema in SCHEMAS:
    library.define(_schema)


def _same(x: Tensor, *_: object) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _dense_copy(x: Tensor, store: int) -> Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))  # elements from first to last
    return _same(x) if span == x.numel() else torch.empty_like(x, memory_format=torch.contiguous_format)


def _nothing(*_: object) -> None:
    return None


def _block(store: int, size: list, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


_FAKES: dict[str, Callable[..., Any]] = {
    "prefetch": _nothing,
    "read_ahead": _nothing,
    "gather": _same,
    "release": _nothing,
    "offload": _same,
    "reload": _same,
    "reduce_grad": _same,
    "block_tensor": _block,
    "store_copy": _dense_copy,
    "accumulate": _nothing,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"zinf::{_name}", _fake, lib=library)
    # Dead-code elimination must keep every one: what they do is not in their results.
    has_side_effect(getattr(torch.ops.zinf, _name).default)


def ensure_native() -> None:
    """Loads the engine (building it if need be), so that the ops run on CPU tensors."""
    native.load()
