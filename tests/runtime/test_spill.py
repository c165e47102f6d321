"""What would pass the budget lands on disk: same bits, named failures, and its pages stay out of the process.

The trimmer, which takes them out, is tested on store blocks in test_engine.py.
"""


import pytest

from zinf_compile.runtime.arena import SPILLED

from .arena_support import block, run

SPILL = """
limit = int(sys.argv[1]) << 20
arena = Arena() if limit else None
if limit:
    arena.acquire()
tiny = nn.Linear(2, 2)                        # the first step of an optimizer imports some 70 MiB of code
tiny_optimizer = torch.optim.AdamW(tiny.parameters(), foreach=False)
tiny(torch.ones(1, 2)).sum().backward(); tiny_optimizer.step()
torch.manual_seed(0)
base = status("RssAnon")
if limit:
    arena.set_limit(limit, spill_dir=sys.argv[2])
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(24)])  # 24 MiB; 96 MiB with gradients and states
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
x = torch.randn(64, 512)
peak = 0
for _ in range(3):
    loss = model(x).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()
    peak = max(peak, status("RssAnon") - base)
    print(loss.item().hex())
if limit:
    stats = arena.stats()
    assert stats["spilled_peak"] > 30 * MIB and stats["peak"] <= limit, stats
    print(peak >> 20, file=sys.stderr)
    assert peak <= limit + 8 * MIB, (peak, limit)   # code's own data: oneDNN, Python
"""


def test_eager_adamw_at_half_its_need_spills_and_is_bit_equal(tmp_path):
    assert run(SPILL, 40, tmp_path) == run(SPILL, 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_spill_failure_is_named_and_recovered_from(tmp_path):
    run(
        """
        import resource
        arena = Arena().acquire()
        arena.set_limit(arena.live + MIB, spill_dir=sys.argv[1])
        a = byte_block(4 * MIB).fill_(7)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MIB, 6 * MIB))  # as a full disk would
        try:
            byte_block(4 * MIB)
        except RuntimeError as error:
            assert "cannot spill 4.0 MiB to" in str(error) and "free there" in str(error), error
        else:
            raise AssertionError("no error")
        assert arena.drop_spilled() == 4 * MIB and a.min() == 7 and a.max() == 7
        del a
        b = byte_block(4 * MIB)      # the extent is used again
        assert arena.place(b.data_ptr()) == SPILLED and arena.stats()["spilled"] == 4 * MIB
        del b
        assert arena.stats()["spilled"] == 0
        """,
        tmp_path,
    )


def test_a_spill_directory_that_cannot_be_written_is_refused(arena, tmp_path):
    with pytest.raises(RuntimeError, match="cannot make a spill file in .*missing"):
        arena.set_limit(1 << 30, spill_dir=tmp_path / "missing")


def test_spilled_blocks_are_recorded_as_such(arena, tmp_path):
    arena.set_limit(arena.live + (1 << 20), spill_dir=tmp_path)
    with arena.recording() as recording, arena.instance(0):
        kept = block(2 << 20)
    assert [r.place for r in recording.records] == [SPILLED]
    del kept
    arena.set_limit(0)


def test_the_trimmer_starts_with_the_first_spill_and_sleeps_after_the_last(tmp_path):
    run(
        """
        import time
        from zinf_compile.runtime import native
        def trimmers():
            tasks = [f"/proc/self/task/{t}/" for t in os.listdir("/proc/self/task")]
            return [t for t in tasks if open(t + "comm").read() == "zinf-trim\\n"]
        def mapped():
            return status("RssFile") + status("RssShmem")
        def switches(task):
            return sum(int(l.split()[1]) for l in open(task + "status") if "ctxt_switches" in l)
        lib, arena = native.load(), Arena().acquire()
        arena.set_limit(arena.live + 4 * MIB, spill_dir=sys.argv[1])      # allowance: 1 MiB
        lib.zinf_trimmer(8 * MIB); lib.zinf_trimmer(-1)                   # nothing to trim, so no thread either
        small = byte_block(2 * MIB).fill_(1)
        assert trimmers() == []
        first = byte_block(4 * MIB).fill_(0)
        assert len(trimmers()) == 1 and arena.place(first.data_ptr()) == SPILLED
        base, peak, blocks = mapped(), 0, [first]
        for i in range(1, 48):
            blocks.append(byte_block(2 * MIB).fill_(i))
            time.sleep(0.004)
            peak = max(peak, mapped() - base)
        assert lib.zinf_trimmer_drops() > 0 and peak < 24 * MIB, (peak / MIB, lib.zinf_trimmer_drops())   # of 98 touched
        assert all(b.min() == i and b.max() == i for i, b in enumerate(blocks))
        child = os.fork()
        if child == 0:
            for _ in range(3):
                arena.set_limit(arena.live + MIB, spill_dir=sys.argv[1])  # a file of the child's own
                a = byte_block(4 * MIB).fill_(3)
                assert arena.place(a.data_ptr()) == SPILLED
                del a
            os._exit(0 if trimmers() == [] and blocks[5].max() == 5 else 1)
        assert os.waitpid(child, 0)[1] == 0 and len(trimmers()) == 1
        lib.zinf_trimmer(32 * MIB)                                        # what a plan sets holds for both
        time.sleep(0.02); drops = lib.zinf_trimmer_drops()
        blocks[3].sum(); blocks[4].sum(); time.sleep(0.02)
        assert lib.zinf_trimmer_drops() == drops
        lib.zinf_trimmer(-1)
        blocks.clear(); first = b = None
        assert arena.stats()["spilled"] == 0
        time.sleep(0.05); before = switches(trimmers()[0])
        time.sleep(0.3)
        assert switches(trimmers()[0]) == before                          # asleep, not polling
        again = byte_block(8 * MIB).fill_(1)
        time.sleep(0.05)
        assert mapped() - base < 6 * MIB and again.max() == 1
        """,
        tmp_path,
    )


TRAIN = """
budget = int(sys.argv[1]) * MIB
def train(model, x, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)          # stock, eager, not handed over
    for _ in range(steps):
        loss = model(x).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()
        yield loss.item().hex()
toy = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
if budget:
    from zinf_compile import zinf_compile
    zinf_compile(toy, mem_budget="64MiB", store_dir=sys.argv[2])        # imports and capture belong to the base
list(train(toy, torch.ones(4, 8), 2))
torch.manual_seed(0)
base = status("VmHWM")
model = nn.Sequential(*[m for _ in range(24) for m in (nn.Linear(1024, 1024), nn.ReLU())])    # 96 MiB, 384 in training
if budget:
    zinf_compile(model, mem_budget=budget, store_dir=sys.argv[2])
for loss in train(model, torch.randn(32, 1024), 3):
    print(loss)
if budget:
    growth, stats = status("VmHWM") - base, Arena().stats()
    assert stats["spilled_peak"] > 100 * MIB and stats["over_limit_peak"] == 0, stats
    assert growth <= budget + 64 * MIB, (growth / MIB, stats)
"""


def test_stock_adamw_of_four_times_its_budget_keeps_it(tmp_path):
    """The plan knows nothing of a stock optimizer's 192 MiB of states: they are spilled, and stay out of the process."""
    plain = run(TRAIN, 0)
    assert run(TRAIN, 96, tmp_path) == plain and len(plain.split()) == 3
    assert run(TRAIN, 216, tmp_path) == plain  # masters and gradients fit


FORK_UNDER_WRITES = """
import time
from zinf_compile.runtime import native, ops
from zinf_compile.runtime.nvme_store import NvmeStore
ops.ensure_native(); lib = native.load()
with Arena() as arena, NvmeStore(sys.argv[1], 128 * MIB) as store:
    lib.zinf_fault_inject(5, 20)                                        # every system call takes 20 ms more
    for _ in range(4):
        sources = [torch.ones(1 << 20) for _ in range(8)]
        kept = [torch.ops.zinf.store_copy(x, store.handle) for x in sources]
        del sources                                                     # freed by an engine thread, by and by
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(0)
        seconds = time.monotonic() - start
        assert os.waitpid(child, 0)[1] == 0 and seconds < 2, seconds
        store.drain()
"""


def test_a_fork_does_not_wait_for_tensors_that_the_engine_frees(tmp_path):
    """Before a fork the engine's threads finish what they are at, which includes freeing tensors: the allocator's own fork
    handler must not have locked it by then."""
    run(FORK_UNDER_WRITES, tmp_path)
