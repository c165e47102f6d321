"""An adopted optimizer's memory, bytes moved, disk faults and interrupts."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from zinf_compile.errors import StoreError
from zinf_compile.runtime import native
from zinf_compile.runtime.optimizer import AdoptedOptimizer

from .optimizer_twins import (
    Disk,
    Session,
    assert_equal,
    parameters,
    set_gradients,
    train,
    twins,
)

EIO, SLOW = 2, 5  # zinf_fault_inject


def anonymous_bytes() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))


def mapped_bytes() -> int:
    with open("/proc/self/status") as f:
        return sum(int(line.split()[1]) * 1024 for line in f if line.startswith(("RssFile", "RssShmem")))


class PeakAnonymous:
    """The most anonymous memory this process holds while the block runs, looked at every millisecond."""

    def __enter__(self) -> PeakAnonymous:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()


def on_disk_adamw(disk: Disk, count: int, numel: int, **session: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer, AdoptedOptimizer]:
    params = [nn.Parameter(disk.zeros((numel,))) for _ in range(count)]
    for p in params:
        p.grad = disk.zeros((numel,))
        p.grad.fill_(1.0)
    optimizer = torch.optim.AdamW(params)
    handle = AdoptedOptimizer(optimizer, Session(disk, **session))
    optimizer.step()
    return params, optimizer, handle


def drop(disk: Disk) -> None:
    for address in disk.blocks:
        disk.library.zinf_block_drop(address)


def test_memory_stays_at_the_staging_buffers(disk: Disk) -> None:
    tile, depth, slack = 1 << 20, 3, 6 << 20
    _, optimizer, handle = on_disk_adamw(disk, 4, 2 << 20, tile=tile, depth=depth)  # 128 MiB of tensors
    drop(disk)
    anonymous, mapped = anonymous_bytes(), mapped_bytes()
    with PeakAnonymous() as measured:
        optimizer.step()
    staging = handle.session.most_staging  # type: ignore[attr-defined]
    assert staging == handle.last_step.staging_bytes == 4 * tile * depth
    assert staging / 2 < measured.peak - anonymous < staging + slack
    assert anonymous_bytes() - anonymous < slack  # the staging memory is given back
    assert mapped_bytes() - mapped < slack  # no page of a block has been touched through its mapping


def test_bytes_moved_are_four_reads_and_three_writes(disk: Disk) -> None:
    count, numel = 3, 100_000
    _, optimizer, _ = on_disk_adamw(disk, count, numel, tile=1 << 16)
    before = native.io_stats(disk.library)
    optimizer.step()
    after = native.io_stats(disk.library)
    assert after["bytes_read"] - before["bytes_read"] == 4 * 4 * count * numel
    assert after["bytes_written"] - before["bytes_written"] == 3 * 4 * count * numel


@pytest.mark.parametrize("nth", [1, 6, 9, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_disk_fault_is_raised_and_names_the_parameter(disk: Disk, nth: int, dtype: torch.dtype) -> None:
    ours = [nn.Parameter(disk.copy(p)) for p in parameters([(10_000,), (10_000,)], dtype)]
    optimizer = torch.optim.AdamW([("first", ours[0]), ("second", ours[1])])
    session = Session(disk)
    AdoptedOptimizer(optimizer, session)
    set_gradients(ours, seed=0)
    optimizer.step()
    disk.library.zinf_fault_inject(EIO, nth)
    try:
        with pytest.raises(StoreError, match="stopped at parameter '(first|second)'.*param_groups.0.*(read|write).*last checkpoint"):
            optimizer.step()
    finally:
        disk.library.zinf_fault_inject(0, 0)
    assert session.staging == 0 and len(session.updated) == 2
    optimizer.step()  # the disk works again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_interrupt_waits_for_the_step(disk: Disk, dtype: torch.dtype) -> None:
    plain, ours = twins([(20_000,), (20_000,)], disk, dtype)
    theirs, adopted = torch.optim.AdamW(plain, foreach=False), torch.optim.AdamW(ours)
    AdoptedOptimizer(adopted, Session(disk))
    train(plain, ours, theirs, adopted, 1)
    set_gradients(plain, ours, seed=3)
    theirs.step()
    disk.library.zinf_fault_inject(SLOW, 5)  # every system call takes 5 ms more: the step lasts 100 ms or so
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            adopted.step()
    finally:
        disk.library.zinf_fault_inject(0, 0)
        timer.join()
    assert_equal(theirs, adopted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
