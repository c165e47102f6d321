"""Stores, sessions and equal parameters for the tests of adopted optimizers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zinf_compile.runtime import native


class Disk:
    """Mapped tensors of one store, by the engine's C interface."""

    def __init__(self, directory: str) -> None:
        self.library, self.directory = native.load(), directory
        self.handle = self.library.zinf_store_open(directory.encode(), 512 << 20)
        assert self.handle > 0, self.library.zinf_last_error()
        self.blocks: list[int] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.zeros(shape, dtype=dtype)
        nbytes = numel * dtype.itemsize
        address = self.library.zinf_block_new(self.handle, nbytes)
        assert address, self.library.zinf_last_error()
        self.blocks.append(address)
        flat = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)
        return flat.zero_().view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        return self.zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())

    def close(self) -> None:
        for address in self.blocks:
            self.library.zinf_block_free(address)
        self.library.zinf_store_close(self.handle)
        Path(self.directory, "data.bin").unlink()


class Session:
    """States of the parameters in `on_disk` go to disk; counts what the optimizer reports."""

    def __init__(self, disk: Disk, on_disk: bool = True, tile: int = 8192, depth: int = 3) -> None:
        self.disk, self.on_disk, self.update_tile, self.update_depth = disk, on_disk, tile, depth
        self.staging = self.most_staging = 0
        self.updated: list[list[Tensor]] = []
        self.before = 0

    def home_of_state(self, param: Tensor, name: str) -> str:
        return "nvme" if self.on_disk else "device"

    def new_state(self, param: Tensor, like: Tensor, home: str) -> Tensor:
        return self.disk.zeros(tuple(like.shape), like.dtype) if home == "nvme" else torch.zeros_like(like)

    def before_update(self) -> None:
        self.before += 1

    def after_update(self, params: list[Tensor]) -> None:
        self.updated.append(list(params))

    def account(self, nbytes: int) -> None:
        self.staging += nbytes
        self.most_staging = max(self.most_staging, self.staging)


@pytest.fixture
def disk(tmp_path: Any) -> Iterator[Disk]:
    d = Disk(str(tmp_path))
    yield d
    d.close()


@pytest.fixture(scope="module")
def module_disk(tmp_path_factory: Any) -> Iterator[Disk]:
    d = Disk(str(tmp_path_factory.mktemp("store")))
    yield d
    d.close()


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def twins(shapes: list[tuple[int, ...]], disk: Disk | None, dtype: torch.dtype = torch.float32) -> tuple[list, list]:
    """Equal parameters twice: plain ones, and ones that live on disk (every other one where disk is given)."""
    plain, ours = parameters(shapes, dtype), parameters(shapes, dtype)
    if disk is not None:
        ours = [nn.Parameter(disk.copy(p)) if i % 2 == 0 else p for i, p in enumerate(ours)]
    return plain, ours


def set_gradients(*lists: list[nn.Parameter], seed: int, disk: Disk | None = None, skip: int = -1) -> None:
    """Equal random gradients; the last list's go to disk where `disk` is given. skip: this parameter has none."""
    generator = torch.Generator().manual_seed(seed)
    for i, params in enumerate(zip(*lists)):
        grad = torch.randn(params[0].shape, generator=generator, dtype=torch.float64).to(params[0].dtype) * 10 ** (i % 3 - 1)
        for p in params:
            p.grad = None if i == skip else grad.clone()
        if disk is not None and i != skip:
            params[-1].grad = disk.copy(grad)


def bits(t: Tensor) -> Tensor:
    return torch.nan_to_num(t.detach()).clone()


def assert_equal(theirs: torch.optim.Optimizer, ours: torch.optim.Optimizer) -> None:
    """Parameters, and every state under the same keys in the same order, have equal bits."""
    for a, b in zip(theirs.param_groups, ours.param_groups, strict=True):
        for p, q in zip(a["params"], b["params"], strict=True):
            assert torch.equal(bits(p), bits(q)), (bits(p) - bits(q)).abs().max()
            s, t = theirs.state.get(p, {}), ours.state.get(q, {})
            assert list(s) == list(t)
            for key in s:
                assert s[key].dtype == t[key].dtype and torch.equal(bits(s[key]), bits(t[key])), key


def pair(disk: Disk, kind: type = torch.optim.AdamW, **options: Any) -> tuple[Any, ...]:
    plain, ours = twins([(300,), (20, 30), (5,)], disk)
    return plain, ours, kind(plain, **options), kind(ours, **options)


def train(plain: list, ours: list, theirs: Any, adopted: Any, steps: int, seed: int = 0, after: tuple = ()) -> None:
    for step in range(steps):
        set_gradients(plain, ours, seed=seed + step)
        theirs.step()
        adopted.step()
        for scheduler in after:
            scheduler.step()
