"""The native engine through its C interface: transfers, ordering, faults, signals, fork, write barrier, trimmer."""

import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from zinf_compile.errors import StoreError
from zinf_compile.runtime import native
from zinf_compile.runtime.nvme_store import NvmeStore

SHORT, EIO, EINTR, ENOSPC, SLOW, EOF, EAGAIN = range(1, 8)


@pytest.fixture(scope="module")
def lib():
    return native.load()


@pytest.fixture
def store(tmp_path):
    with NvmeStore(tmp_path, 64 << 20) as made:
        yield made


@pytest.fixture(autouse=True)
def no_faults(lib):
    yield
    lib.zinf_fault_inject(0, 0)


def view(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def random_bytes(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


class Block:
    """A block and its mapping, as a test sees it."""

    def __init__(self, lib, store, nbytes):
        self.lib, self.nbytes = lib, nbytes
        self.address = native.check(lib, lib.zinf_block_new(store.handle, nbytes))
        self.bytes = view(self.address, nbytes)

    def write(self, data: np.ndarray, offset: int = 0) -> int:
        return native.check(
            self.lib, self.lib.zinf_write(self.address, offset, data.ctypes.data, data.nbytes, None, None)
        )

    def read(self, into: np.ndarray, offset: int = 0) -> int:
        return native.check(self.lib, self.lib.zinf_read(self.address, offset, into.ctypes.data, into.nbytes))

    def wait(self, ticket: int) -> None:
        native.check(self.lib, self.lib.zinf_wait(ticket))


@pytest.mark.parametrize("nbytes", [1, 63, 4095, 4096, 4097, 100_003, (4 << 20) + 17, (9 << 20) - 1])
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_round_trip_at_any_size_and_alignment(lib, store, nbytes, shift):
    block = Block(lib, store, nbytes)
    source = random_bytes(nbytes + 4096 + shift, nbytes)
    start = -source.ctypes.data % 4096 + shift  # `shift` bytes past a page boundary
    data = source[start : start + nbytes] if shift + start + nbytes <= source.size else source[shift : shift + nbytes]
    block.wait(block.write(data))
    assert np.array_equal(block.bytes, data)  # the mapping sees what the engine wrote
    guard = np.full(nbytes + 2 * 4096, 7, np.uint8)
    into = guard[4096 + shift : 4096 + shift + nbytes]
    block.wait(block.read(into))
    assert np.array_equal(into, data)
    assert (guard[: 4096 + shift] == 7).all() and (guard[4096 + shift + nbytes :] == 7).all()
    assert lib.zinf_block_free(block.address) == 0


def test_parts_of_a_block_at_odd_offsets(lib, store):
    block = Block(lib, store, 5_000_001)
    want = random_bytes(block.nbytes)
    block.wait(block.write(want))
    for i, (offset, nbytes) in enumerate([(1, 1), (4000, 200), (4096, 10_000), (12_345, 4_500_000), (4_999_990, 11)]):
        piece = random_bytes(nbytes, 100 + i)
        block.wait(block.write(piece, offset))
        want[offset : offset + nbytes] = piece
        got = np.zeros(nbytes + 30, np.uint8)[7 : 7 + nbytes]
        block.wait(block.read(got, offset))
        assert np.array_equal(got, piece)
    whole = np.empty(block.nbytes, np.uint8)
    block.wait(block.read(whole))
    assert np.array_equal(whole, want) and np.array_equal(block.bytes, want)


def test_write_through_the_mapping_is_read_by_the_engine(lib, store):
    block = Block(lib, store, 3 << 20)
    for seed in range(4):
        block.bytes[:] = random_bytes(block.nbytes, seed)
        got = np.empty(block.nbytes, np.uint8)
        block.wait(block.read(got))
        assert np.array_equal(got, random_bytes(block.nbytes, seed))


def test_the_rest_of_the_last_page_is_zero(lib, store):
    old = Block(lib, store, 8192)
    old.bytes[:] = 255
    lib.zinf_block_free(old.address)
    new = Block(lib, store, 5000)
    assert not view(new.address, 8192)[5000:].any()


def test_transfers_of_one_block_keep_their_order(lib, store):
    """Write, read, write, read ... submitted without waiting: each read sees exactly the write before it."""
    block = Block(lib, store, 1 << 20)
    sources = [np.full(block.nbytes, i, np.uint8) for i in range(24)]
    reads = []
    for source in sources:
        block.write(source)
        into = np.empty(block.nbytes, np.uint8)
        reads.append((block.read(into), into))
    for i, (ticket, into) in enumerate(reads):
        block.wait(ticket)
        assert (into == i).all()
    store.drain()


def test_many_threads_many_blocks(lib, store):
    wrong = []

    def work(seed):
        for i in range(6):
            block = Block(lib, store, 700_001 + seed)
            data = random_bytes(block.nbytes, seed * 100 + i)
            into = np.empty(block.nbytes, np.uint8)
            block.write(data)
            block.wait(block.read(into))
            wrong.append(not np.array_equal(into, data))
            lib.zinf_block_free(block.address)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(wrong) == 24 and not any(wrong)
    assert store.free_bytes == 64 << 20


def test_extents_are_reused_and_merged(lib, store):
    blocks = [Block(lib, store, 4 << 20) for _ in range(16)]
    assert store.free_bytes == 0
    for block in blocks[::2] + blocks[1::2]:
        lib.zinf_block_free(block.address)
    big = Block(lib, store, 64 << 20)  # only fits if the neighbours were merged
    assert store.free_bytes == 0
    lib.zinf_block_free(big.address)


def test_a_block_freed_during_its_transfers(lib, store):
    for _ in range(20):
        block = Block(lib, store, 6 << 20)
        data = np.full(block.nbytes, 3, np.uint8)
        ticket = block.write(data)
        assert lib.zinf_block_free(block.address) == 0
        block.wait(ticket)
    store.drain()
    assert store.free_bytes == 64 << 20


def test_an_unknown_block_or_range_is_an_error(lib, store):
    block = Block(lib, store, 100)
    buffer = np.empty(200, np.uint8)
    with pytest.raises(StoreError, match="outside of a block of 100 bytes"):
        block.read(buffer)
    with pytest.raises(StoreError, match="no block"):
        native.check(lib, lib.zinf_read(buffer.ctypes.data, 0, buffer.ctypes.data, 10))
    with pytest.raises(StoreError, match="ticket"):
        native.check(lib, lib.zinf_wait(1 << 40))


@pytest.mark.parametrize("kind", [SHORT, EINTR, EAGAIN])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_short_and_interrupted_calls_are_continued(lib, store, kind, nth):
    block = Block(lib, store, (10 << 20) + 5)
    data = random_bytes(block.nbytes)
    lib.zinf_fault_inject(kind, nth)
    block.wait(block.write(data))
    lib.zinf_fault_inject(kind, nth)
    got = np.empty(block.nbytes, np.uint8)
    block.wait(block.read(got))
    assert np.array_equal(got, data) and np.array_equal(block.bytes, data)


@pytest.mark.parametrize("kind, words", [(EIO, "Input/output error"), (ENOSPC, "No space left"), (EOF, "file ends")])
def test_a_failure_reaches_the_waiter_with_path_and_offset(lib, store, kind, words):
    block = Block(lib, store, 10 << 20)
    buffer = np.zeros(block.nbytes, np.uint8)
    for submit, verb in ((block.write, "cannot write"), (block.read, "cannot read")):
        lib.zinf_fault_inject(kind, 2)
        ticket = submit(buffer)
        with pytest.raises(StoreError, match=f"{verb} .* bytes at offset .*{store.path.name}.*{words}"):
            block.wait(ticket)
        with pytest.raises(StoreError, match=words):  # whoever waits later learns it too
            block.wait(ticket)
    with pytest.raises(StoreError, match="cannot write"):
        store.drain()
    store.drain()  # reported once
    block.wait(block.write(buffer))  # and the engine goes on


def test_done_runs_once_even_for_a_failed_write(lib, store):
    calls = []
    callback = native.DONE(lambda context: calls.append(context))
    block = Block(lib, store, 9 << 20)
    data = np.zeros(block.nbytes, np.uint8)
    for kind in (0, EIO):
        lib.zinf_fault_inject(kind, 1)
        args = (block.address, 0, data.ctypes.data, data.nbytes, ctypes.cast(callback, ctypes.c_void_p), 42 + kind)
        lib.zinf_wait(native.check(lib, lib.zinf_write(*args)))
    assert calls == [42, 42 + EIO]
    with pytest.raises(StoreError):
        store.drain()


def test_the_write_window_bounds_what_is_in_flight(lib, store):
    store.write_window(2 << 20)
    lib.zinf_fault_inject(SLOW, 30)
    block = Block(lib, store, 8 << 20)
    data = np.zeros(1 << 20, np.uint8)
    start = time.monotonic()
    tickets = [block.write(data, i << 20) for i in range(8)]
    assert time.monotonic() - start > 0.06  # six of them had to wait for room
    assert sum(lib.zinf_poll(t) for t in tickets) >= 6
    store.write_window(0)
    assert lib.zinf_poll(block.write(data)) == 1  # synchronous


def test_a_signal_interrupts_a_wait(lib, store):
    block = Block(lib, store, 1 << 20)
    into = np.empty(block.nbytes, np.uint8)
    lib.zinf_fault_inject(SLOW, 1500)
    ticket = block.read(into)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        block.wait(ticket)
    assert time.monotonic() - start < 1.0
    lib.zinf_fault_inject(0, 0)
    assert lib.zinf_wait(ticket) == 0  # the transfer itself went on, and the next wait is not disturbed


def test_bytes_arrive_while_someone_holds_the_gil(lib, store):
    blocks = [Block(lib, store, 4 << 20) for _ in range(12)]
    buffers = [np.empty(b.nbytes, np.uint8) for b in blocks]
    tickets = [b.read(i) for b, i in zip(blocks, buffers)]
    before = native.io_stats(lib)["reads"]
    libc = ctypes.PyDLL(None)  # keeps the GIL during the call
    libc.usleep(300_000)
    pending = [t for t in tickets if not lib.zinf_poll(t)]
    assert len(pending) < len(tickets) and native.io_stats(lib)["reads"] >= before
    for t in tickets:
        assert lib.zinf_wait(t) == 0


def test_fork_while_transfers_are_in_flight(lib, store):
    """The child reads blocks through their mappings, leaves the parent's files alone, and exits; the parent goes on."""
    blocks = [Block(lib, store, 5 << 20) for _ in range(6)]
    data = [random_bytes(b.nbytes, i) for i, b in enumerate(blocks)]
    tickets = [b.write(d) for b, d in zip(blocks, data)]
    blocks[0].wait(tickets[0])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            got = np.empty(blocks[0].nbytes, np.uint8)
            lib.zinf_wait(lib.zinf_read(blocks[0].address, 0, got.ctypes.data, got.nbytes))
            refused = lib.zinf_write(blocks[0].address, 0, got.ctypes.data, got.nbytes, None, None) < 0
            ok = np.array_equal(got, data[0]) and refused and lib.zinf_store_drain(store.handle) == 0
            lib.zinf_block_free(blocks[1].address)
            store.close()
            code = 0 if ok else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    done, status = os.waitpid(child, os.WNOHANG)
    while done == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    if done == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == child and os.waitstatus_to_exitcode(status) == 0
    for block, want, ticket in zip(blocks, data, tickets):
        block.wait(ticket)
        assert np.array_equal(block.bytes, want)
    assert store.path.is_dir()


def fused_adamw(t):
    p = torch.nn.Parameter(t)
    p.grad = torch.ones_like(t)
    torch.optim.AdamW([p], lr=0.1, fused=True).step()


WRITERS = {
    "in place": lambda t: t.mul_(2),
    ".data": lambda t: torch.nn.Parameter(t).data.add_(1),
    "numpy": lambda t: t.numpy().__setitem__(5, 3.0),
    "dlpack": lambda t: torch.from_dlpack(t).fill_(4),
    "memmove": lambda t: ctypes.memmove(t.data_ptr() + 4000, b"abcd", 4),
    "fused AdamW": fused_adamw,
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_the_barrier_sees_every_way_to_write(lib, store, writer):
    tensor, other = store.new_tensor((3000,)).fill_(1), store.new_tensor((3000,)).fill_(1)
    free = tensor.clone()
    assert lib.zinf_block_dirty(tensor.data_ptr()) == 1  # never protected
    for t in (tensor, other):
        assert lib.zinf_block_protect(t.data_ptr()) == 0
    assert tensor.sum().item() == 3000 and lib.zinf_block_dirty(tensor.data_ptr()) == 0  # reading is free
    writer(tensor)
    writer(free)
    assert lib.zinf_block_dirty(tensor.data_ptr()) == 1 and lib.zinf_block_dirty(other.data_ptr()) == 0
    assert torch.equal(tensor, free)
    assert lib.zinf_block_protect(tensor.data_ptr()) == 0 and lib.zinf_block_dirty(tensor.data_ptr()) == 0


def test_thousands_of_protected_blocks_written_by_two_threads(lib, store):
    tensors = [store.new_tensor((16,)) for _ in range(3000)]
    for t in tensors:
        assert lib.zinf_block_protect(t.data_ptr()) == 0
    halves = [threading.Thread(target=lambda part: [t.fill_(1) for t in part], args=(tensors[i::2],)) for i in (0, 1)]
    [h.start() for h in halves]
    [h.join() for h in halves]
    assert all(lib.zinf_block_dirty(t.data_ptr()) == 1 for t in tensors)
    assert all((t == 1).all() for t in tensors)


def resident_at(address: int) -> int:
    """Resident bytes of the mapping that starts at `address`, as the kernel counts them."""
    with open("/proc/self/smaps") as file:
        for line in file:
            if line.startswith(f"{address:x}-"):
                return next(int(found.split()[1]) << 10 for found in file if found.startswith("Rss:"))
    raise AssertionError(f"no mapping starts at {address:#x}")


def resident_file_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssFile"))


def test_the_trimmer_bounds_resident_pages(lib, store):
    nbytes = 2 << 20
    tensors = [store.new_tensor((nbytes // 4,)) for _ in range(28)]
    lib.zinf_trimmer(8 << 20)
    try:
        time.sleep(0.25)
        base = resident_file_bytes()
        for i, t in enumerate(tensors):  # 56 MiB in all
            t.fill_(i)
            give_up = time.monotonic() + 20  # a busy machine may keep the thread waiting; it must come in the end
            while resident_file_bytes() - base > 12 << 20 and time.monotonic() < give_up:
                time.sleep(0.002)
            assert resident_file_bytes() - base <= 12 << 20
        assert lib.zinf_trimmer_drops() > 0
        assert all((t == i).all() for i, t in enumerate(tensors))
    finally:
        lib.zinf_trimmer(-1)


def test_dropping_a_block_keeps_its_contents(lib, store):
    tensor = store.new_tensor((1 << 20,)).fill_(2.5)
    for _ in range(100):  # the kernel may take pages back where memory is short: those were then none that a drop has to find
        assert tensor.sum() == 2.5 * (1 << 20)
        if resident_at(tensor.data_ptr()) > 0:
            break
    else:
        pytest.fail("reading a block leaves none of its pages in this process: there is nothing to drop")
    assert lib.zinf_block_drop(tensor.data_ptr()) == 0
    assert resident_at(tensor.data_ptr()) == 0
    assert (tensor == 2.5).all()
