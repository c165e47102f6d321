"""zinf:: ops against plain torch: values, strides, aliasing, working copies, fakes, dead-code elimination."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from zinf_compile.runtime import native, ops
from zinf_compile.runtime.nvme_store import NvmeStore

zinf = torch.ops.zinf
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@pytest.fixture(scope="module")
def lib():
    ops.ensure_native()
    return native.load()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with NvmeStore(tmp_path_factory.mktemp("ops"), 64 << 20) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(lib):
    yield
    lib.zinf_held_forget_all()
    lib.zinf_fault_inject(0, 0)
    lib.zinf_set_current_store(0)


def on_disk(store, values):
    return store.new_tensor(values.shape, values.dtype).copy_(values)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (513, 1031)])
def test_gather_returns_the_values(lib, store, dtype, shape):
    values = (torch.rand(shape) * 100).to(dtype)
    master = on_disk(store, values)
    got = zinf.gather(master, 0)
    assert got.dtype == dtype and got.stride() == master.stride() and torch.equal(got, values)
    assert got.data_ptr() != master.data_ptr()
    assert zinf.gather(master, 1).data_ptr() == got.data_ptr() and lib.zinf_held_count() == 1  # held until released
    zinf.release(got)
    assert lib.zinf_held_count() == 0 and torch.equal(got, values)


def test_tensors_in_ram_are_computed_with_in_place(lib, store):
    for x in (torch.randn(5, 5), torch.empty(0, 3), on_disk(store, torch.randn(9))[1:]):
        assert zinf.gather(x, 0).data_ptr() == x.data_ptr()
        zinf.prefetch(x)
        zinf.release(x)
    assert lib.zinf_held_count() == 0 and lib.zinf_prefetch_count() == 0


def test_prefetch_is_used_once(lib, store):
    master = on_disk(store, torch.randn(1 << 20))
    before = native.io_stats(lib)["bytes_read"]
    for _ in range(3):
        zinf.prefetch(master)
    assert lib.zinf_prefetch_count() == 1 and lib.zinf_held_bytes() == 4 << 20
    got = zinf.gather(master, 0)
    assert torch.equal(got, master) and lib.zinf_prefetch_count() == 0
    zinf.prefetch(master)  # held: nothing to do
    assert native.io_stats(lib)["bytes_read"] - before == 4 << 20
    lib.zinf_held_forget_all()
    assert lib.zinf_held_count() == 0


def test_cancelled_prefetches_leave_nothing(lib, store):
    masters = [on_disk(store, torch.randn(1 << 18)) for _ in range(8)]
    for m in masters:
        zinf.prefetch(m)
    lib.zinf_prefetch_cancel_all()
    assert lib.zinf_prefetch_count() == 0 and lib.zinf_held_bytes() == 0
    masters[3].fill_(5)
    assert (zinf.gather(masters[3], 0) == 5).all()


def test_a_view_of_a_block_has_its_own_geometry(lib, store):
    master = on_disk(store, torch.randn(40, 60))
    got = zinf.gather(master.t(), 0)
    assert torch.equal(got, master.t()) and got.stride() == (1, 60)
    assert torch.equal(zinf.gather(master, 0), master)
    assert torch.equal(zinf.gather(master[:7], 0), master[:7])


def test_an_armed_copy_is_good_until_somebody_writes(lib, store):
    master, other = on_disk(store, torch.ones(5000)), on_disk(store, torch.ones(5000))
    first, kept = zinf.gather(master, 0), zinf.gather(other, 0)
    assert lib.zinf_held_arm() == 0
    assert zinf.gather(master, 0).data_ptr() == first.data_ptr()
    master.data.numpy()[17] = 9
    again = zinf.gather(master, 0)
    assert again[17] == 9 and first[17] == 1 and torch.equal(again, master)
    assert zinf.gather(other, 0).data_ptr() == kept.data_ptr()


def test_an_invalidated_copy_is_read_again(lib, store):
    master = on_disk(store, torch.ones(5000))
    zinf.gather(master, 0)
    master.fill_(2)
    lib.zinf_block_invalidate(master.data_ptr())
    assert (zinf.gather(master, 0) == 2).all()


def test_a_freed_block_takes_its_copy_along(lib, store):
    """Its address may be that of the next block: a copy found there would be another tensor's."""
    for i in range(30):
        master = on_disk(store, torch.full((5000,), float(i)))
        assert (zinf.gather(master, 0) == i).all()
        if i % 2:
            zinf.prefetch(master)
        del master
    assert lib.zinf_held_count() == 0


def test_offload_and_reload(lib, store):
    lib.zinf_set_current_store(store.handle)
    inputs = [
        torch.randn(300, 77),
        torch.randn(64, 33).t(),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ]
    saved = [zinf.offload(x) for x in inputs]
    want = [x.clone() for x in inputs]
    strides = [x.stride() for x in inputs]
    del inputs  # the engine keeps what it still has to write
    for s, w, stride in zip(saved, want, strides):
        got = zinf.reload(s, 0)
        assert torch.equal(got, w) and got.stride() == stride
    for untouched in (torch.empty(0, 4), torch.randn(9, 9)[:, ::2], torch.randn(3, 1).expand(3, 5)):
        assert zinf.offload(untouched).data_ptr() == untouched.data_ptr()
    lib.zinf_set_current_store(0)
    with pytest.raises(RuntimeError, match="zinf: offload: no store"):
        zinf.offload(torch.ones(3))


def test_store_copy_keeps_its_source_until_it_is_written(lib, store):
    source = torch.randn(1 << 20)
    want, address = source.clone(), source.data_ptr()
    lib.zinf_fault_inject(5, 50)  # slow
    saved = zinf.store_copy(source, store.handle)
    del source
    assert all(torch.empty(1 << 20).data_ptr() != address for _ in range(3))  # its memory is not given to others
    store.drain()
    assert torch.equal(saved, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 1000, (3 << 20) + 11])
def test_accumulate_equals_add(lib, store, dtype, numel):
    torch.manual_seed(numel)
    a, b = torch.randn(numel).to(dtype), (torch.randn(numel) * 3).to(dtype)
    home, ram = on_disk(store, a), a.clone()
    zinf.gather(home, 0)
    zinf.accumulate(home, b)
    zinf.accumulate(ram, b)
    store.drain()
    want = a.clone().add_(b)
    assert torch.equal(home, want) and torch.equal(ram, want) and torch.equal(zinf.gather(home, 0), want)


def test_accumulate_of_another_layout_or_dtype(lib, store):
    a, b = torch.randn(30, 50), torch.randn(50, 30).t()
    home = on_disk(store, a)
    zinf.accumulate(home, b)
    zinf.accumulate(home, b.to(torch.float64))
    store.drain()
    assert torch.equal(home, a + b + b)
    with pytest.raises(RuntimeError, match="zinf: accumulate"):
        zinf.accumulate(home, torch.ones(3))
    with pytest.raises(RuntimeError, match="floating-point"):
        zinf.accumulate(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))


def test_a_failed_read_is_an_error_and_leaves_no_copy(lib, store):
    master = on_disk(store, torch.randn(1 << 20))
    lib.zinf_fault_inject(2, 1)
    with pytest.raises(RuntimeError, match=r"^zinf: cannot read .*store.*Input/output error"):
        zinf.gather(master, 0)
    assert lib.zinf_held_count() == 0 and lib.zinf_prefetch_count() == 0
    assert torch.equal(zinf.gather(master, 0), master)


def test_ctrl_c_during_a_gather(lib, store):
    import os
    import signal
    import threading

    master = on_disk(store, torch.randn(1 << 18))
    lib.zinf_fault_inject(5, 1000)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RuntimeError, match="zinf: interrupted"):
        zinf.gather(master, 0)
    assert isinstance(lib.interrupts.take(), KeyboardInterrupt)
    lib.zinf_fault_inject(0, 0)
    lib.zinf_held_forget_all()
    assert torch.equal(zinf.gather(master, 0), master)


def test_blocks_of_a_closed_store_go_on_working(lib, tmp_path):
    """Their file is closed, so that every transfer is a copy through the mapping; only new blocks are refused."""
    with NvmeStore(tmp_path, 32 << 20) as store:
        values = torch.randn(1 << 20)
        master, home = on_disk(store, values), on_disk(store, torch.ones(1 << 20))
        zinf.prefetch(home)  # in flight when the store is closed
    direct = native.io_stats(lib)["direct_bytes"]
    copy = zinf.gather(master, 0)
    assert torch.equal(copy, values) and copy.data_ptr() != master.data_ptr() and (zinf.gather(home, 0) == 1).all()
    zinf.accumulate(home, copy)
    assert torch.equal(home, values + 1)
    master.mul_(2)
    zinf.release(copy)
    zinf.prefetch(master)
    assert torch.equal(zinf.gather(master, 1), values * 2)
    assert native.io_stats(lib)["direct_bytes"] == direct
    with pytest.raises(RuntimeError, match="is not open"):
        zinf.store_copy(values, 10_000)


def test_gather_from_two_threads(lib, store):
    import threading

    masters = [on_disk(store, torch.full((1 << 16,), float(i))) for i in range(16)]
    wrong = []

    def work():
        for i, m in enumerate(masters):
            wrong.append(not (zinf.gather(m, 0) == i).all())

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(wrong) == 48 and not any(wrong)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("pgrwai"), st.integers(0, 4)), max_size=30))
def test_any_sequence_of_ops_reads_what_was_written(tmp_path_factory, lib, store, actions):
    """Prefetch, gather, release, write, arm, invalidate in any order, under the rule that a writer invalidates, or that the
    copy is armed: a gather always returns the block's current contents."""
    masters = [on_disk(store, torch.full((3001,), float(i))) for i in range(5)]
    copies: dict[int, torch.Tensor] = {}
    for step, (action, i) in enumerate(actions):
        if action == "p":
            zinf.prefetch(masters[i])
        elif action == "g":
            copies[i] = zinf.gather(masters[i], step)
            assert torch.equal(copies[i], masters[i])
        elif action == "r" and i in copies:
            zinf.release(copies.pop(i))
        elif action == "w":
            lib.zinf_prefetch_cancel_all()
            lib.zinf_held_arm()
            masters[i].fill_(100.0 + step)
        elif action == "a":
            zinf.accumulate(masters[i], torch.ones(3001))
            store.drain()
        elif action == "i":
            lib.zinf_block_invalidate(masters[i].data_ptr())
    lib.zinf_held_forget_all()


def test_fakes_agree_with_kernels(lib, store):
    lib.zinf_set_current_store(store.handle)
    real = {
        "gather": (on_disk(store, torch.randn(6, 5)).t(), 0),
        "reload": (on_disk(store, torch.randn(4)), 0),
        "offload": (torch.randn(8, 3).t(),),
        "store_copy": (torch.randn(8, 6)[:, ::2], store.handle),
        "block_tensor": (store.handle, [2, 0, 3], torch.float64),
    }
    for name, args in real.items():
        out = getattr(zinf, name)(*args)
        before = lib.zinf_block_count()
        with FakeTensorMode() as mode:
            fake = getattr(zinf, name)(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
        assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype), name
        assert lib.zinf_block_count() == before  # nothing ran for real


def test_opcheck(lib, store):
    # Not gather: opcheck copies arguments into RAM, where gather returns its input itself, on purpose and not in the schema.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(zinf.store_copy.default, (torch.randn(6, 5), store.handle), test_utils=tests)
    torch.library.opcheck(
        zinf.block_tensor.default, (store.handle, [3, 4], torch.float32), test_utils="test_faketensor"
    )
    torch.library.opcheck(zinf.accumulate.default, (torch.randn(6), torch.randn(6)), test_utils=tests)


def test_dead_code_elimination_keeps_every_op():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for name, args in [
        ("prefetch", (x,)),
        ("gather", (x, 0)),
        ("release", (x,)),
        ("offload", (x,)),
        ("reload", (x, 1)),
    ]:
        graph.call_function(getattr(zinf, name).default, args)
    graph.call_function(zinf.reduce_grad.default, (x, x))
    graph.call_function(zinf.accumulate.default, (x, x))
    graph.output(x)
    count = len(graph.nodes)
    graph.eliminate_dead_code()
    assert len(graph.nodes) == count
