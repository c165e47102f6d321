"""States that are read ahead of their update, through the engine's C interface."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from zinf_compile.errors import StoreError
from zinf_compile.runtime.optimizer import AdoptedOptimizer

from .optimizer_twins import Disk, Session, assert_equal, set_gradients, train, twins

EIO, SLOW = 2, 5  # zinf_fault_inject
SHAPES = [(10_001,), (300, 7), (64,)]
STATE_BYTES = 2 * 4 * (10_001 + 2100 + 64)


class Case:
    """A plain and an adopted optimizer after one step, with gradients for the next; `read` starts to read all states."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.library = disk, disk.library
        self.plain, self.ours = twins(SHAPES, disk)
        self.theirs = torch.optim.AdamW(self.plain, foreach=False)
        self.adopted = torch.optim.AdamW(self.ours)
        AdoptedOptimizer(self.adopted, Session(disk))
        train(self.plain, self.ours, self.theirs, self.adopted, 1)
        set_gradients(self.plain, self.ours, seed=7)

    def states(self, i: int) -> list[torch.Tensor]:
        return [self.adopted.state[self.ours[i]][k] for k in ("exp_avg", "exp_avg_sq")]

    def read(self, allowed: bool = True) -> None:
        self.library.zinf_ahead_allow(int(allowed))
        for i, p in enumerate(self.ours):
            blocks = [s.data_ptr() for s in self.states(i)]
            self.library.zinf_ahead_states(p.data_ptr(), len(blocks), (ctypes.c_void_p * len(blocks))(*blocks))
            self.library.zinf_ahead_start(p.data_ptr())

    def step(self) -> int:
        """Bytes that the update found read ahead."""
        before = self.library.zinf_ahead_taken()
        self.theirs.step()
        self.adopted.step()
        return self.library.zinf_ahead_taken() - before


@pytest.fixture
def case(disk: Disk):
    found = Case(disk)
    yield found
    found.library.zinf_fault_inject(0, 0)
    found.library.zinf_ahead_forget()


def test_the_update_takes_what_was_read_and_reads_the_rest(case):
    case.read()
    assert case.library.zinf_ahead_count() == 6 and case.library.zinf_ahead_bytes() >= STATE_BYTES
    read = case.disk.library.zinf_ahead_taken
    assert case.step() == STATE_BYTES and read() >= STATE_BYTES
    assert_equal(case.theirs, case.adopted)
    assert case.library.zinf_ahead_count() == 0 and case.library.zinf_ahead_bytes() == 0
    set_gradients(case.plain, case.ours, seed=8)
    assert case.step() == 0  # what was read once is not valid twice
    assert_equal(case.theirs, case.adopted)


def test_nothing_is_read_unless_allowed(case):
    case.read(allowed=False)
    assert case.library.zinf_ahead_count() == 0 and case.step() == 0


def test_a_state_that_was_written_meanwhile_is_read_again(case):
    case.read()
    case.states(0)[0].mul_(2)
    case.theirs.state[case.plain[0]]["exp_avg"].mul_(2)
    assert case.step() == STATE_BYTES - 4 * 10_001
    assert_equal(case.theirs, case.adopted)


def test_a_slow_read_is_waited_for(case):
    case.library.zinf_fault_inject(SLOW, 20)
    case.read()
    assert case.step() == STATE_BYTES
    assert_equal(case.theirs, case.adopted)


def test_a_failed_read_stops_the_update_by_name(case):
    case.library.zinf_fault_inject(EIO, 1)
    case.read()
    with pytest.raises(StoreError, match="stopped at parameter .*read.*last checkpoint"):
        case.step()
    assert case.library.zinf_ahead_bytes() == 0


def test_a_freed_block_takes_its_copy_along_and_the_memory_waits_for_the_disk(case):
    case.library.zinf_fault_inject(SLOW, 100)
    case.read()
    count = case.library.zinf_ahead_count()
    gone = case.states(2)[0].data_ptr()
    case.library.zinf_block_free(gone)
    case.disk.blocks.remove(gone)
    assert case.library.zinf_ahead_count() == count - 1
    case.library.zinf_ahead_forget()
    assert case.library.zinf_ahead_count() == 0
    for _ in range(100):
        if not case.library.zinf_ahead_bytes():
            break
        case.library.zinf_ahead_forget()
        ctypes.CDLL(None).usleep(20_000)
    assert case.library.zinf_ahead_bytes() == 0


def test_a_child_process_has_none(case):
    case.library.zinf_fault_inject(SLOW, 50)
    case.read()
    child = os.fork()
    if child == 0:
        os._exit(0 if case.library.zinf_ahead_count() == 0 and case.library.zinf_ahead_bytes() == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert case.step() == STATE_BYTES
    assert_equal(case.theirs, case.adopted)
