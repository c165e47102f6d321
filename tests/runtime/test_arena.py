"""The CPU allocator: what it counts is what the kernel counts, and the limit holds. Planned addresses: test_arena_plans.py;
what the limit sends to disk: test_spill.py.

Process state (limits, resident memory, forks) is tested in subprocesses; the properties run here, on a fresh handle.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_compile.runtime.arena import Arena

from .arena_support import block, run

# ---- accounting and the limit -----------------------------------------------------------------------------------------


def test_counts_equal_the_high_water_mark_of_a_training_step():
    run("""
    arena = Arena().acquire()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(1024, 512)
    def step():
        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    def growth():
        arena.trim(); arena.reset_peak()
        open("/proc/self/clear_refs", "w").write("5")    # VmHWM becomes the present resident size
        resident, before = status("VmRSS"), arena.stats()
        step(); step()
        after = arena.stats()
        return status("VmHWM") - resident, after["committed_peak"] - before["committed"], after["peak"] - before["live"]
    step(); step()
    kernel, committed, live = growth()
    assert live > 40 * MIB, live
    assert abs(kernel - committed) <= MIB, (kernel, committed)
    # A limit of exactly the live peak is enough: retained pages make room, nothing is spilled or over.
    arena.set_limit(arena.live + live)
    kernel, committed, again = growth()
    stats = arena.stats()
    assert again == live and stats["spills"] == 0 and stats["over_limit_peak"] == 0, stats
    assert committed <= live and kernel <= live + MIB, (kernel, committed, live)
    """)


def test_strict_limit_raises_and_the_process_recovers(arena):
    arena.set_limit(arena.live + (8 << 20), strict=True)
    model, x = torch.nn.Linear(512, 512), torch.randn(256, 512)
    with pytest.raises(RuntimeError, match=r"strict budget .* asks for 16\.0 MiB .* Raise mem_budget by at least"):
        block(16 << 20)
    y = model(x)
    arena.set_limit(arena.live + (256 << 10), strict=True)
    live = arena.live
    with pytest.raises(RuntimeError, match="zinf: strict budget"):
        y.sum().backward()
    assert arena.live <= live
    torch.ones(3)  # small blocks are granted, so that reporting the error works
    arena.set_limit(0)
    model(x).sum().backward()
    assert model.weight.grad.shape == (512, 512)


def test_without_a_spill_directory_large_blocks_raise_and_smaller_ones_are_counted(arena):
    arena.reset_peak()
    arena.set_limit(arena.live + (64 << 10))
    with pytest.raises(RuntimeError, match="no spill directory"):
        block(1 << 20)
    kept = block(512 << 10)
    assert arena.stats()["over_limit"] == (512 << 10) - (64 << 10)
    del kept
    assert arena.stats()["over_limit"] == 0 and arena.stats()["over_limit_peak"] == 448 << 10


def test_retained_pages_are_given_back_at_the_limit(arena):
    arena.trim()
    base, spills = arena.live, arena.stats()["spills"]
    arena.set_limit(base + (10 << 20))
    parts = [block(2 << 20) for _ in range(4)]
    keep = parts.pop(1)
    del parts
    assert arena.stats()["retained"] == 6 << 20
    big = block(8 << 20)  # needs new pages: 2 live + 6 retained + 8 new would be 16 of 10 MiB
    stats = arena.stats()
    assert stats["live"] - base == 10 << 20 and stats["committed"] <= stats["limit"] and stats["spills"] == spills
    del big, keep
    assert arena.trim() == arena.stats()["committed_peak"] - base or arena.stats()["retained"] == 0
    arena.set_limit(0)


def test_external_bytes_are_part_of_the_limit(arena):
    base = arena.live
    arena.set_limit(base + (8 << 20), strict=True)
    assert arena.external(6 << 20) == 6 << 20
    with pytest.raises(RuntimeError):
        block(4 << 20)
    assert arena.external(-(6 << 20)) == 0
    block(4 << 20)
    with pytest.raises(RuntimeError, match="negative"):
        arena.external(-1)


def test_works_under_address_space_and_data_limits():
    run("""
    import resource
    mapped = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 600 * MIB,) * 2)
    arena = Arena().acquire()
    blocks = [byte_block(50 * MIB) for _ in range(5)]
    del blocks
    byte_block(400 * MIB)            # fits only once the empty reservation has been handed back
    before = status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (before + 64 * MIB,) * 2)
    arena.trim()
    assert status("VmData") < before - 300 * MIB    # what is given back no longer counts as data
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + 64 * MIB,) * 2)
    for nbytes in (40, 60, 30):
        byte_block(nbytes * MIB).fill_(1); arena.trim()
    kept = byte_block(16 * MIB)
    try:
        byte_block(550 * MIB)
    except RuntimeError as error:
        assert "the system refuses 550.0 MiB" in str(error), error
    else:
        raise AssertionError("no error")
    assert arena.stats()["live"] == 16 * MIB
    byte_block(16 * MIB).fill_(1)
    """)


def test_the_last_release_forgets_external_bytes():
    run("""
    first, second = Arena().acquire(), Arena().acquire()
    first.external(3 * MIB)
    first.release()
    assert second.stats()["external"] == 3 * MIB       # still somebody's
    second.release()
    assert second.stats()["external"] == 0
    with first:
        assert first.stats()["external"] == 0 and first.live < MIB
        first.set_limit(2 * MIB, strict=True)
        byte_block(MIB)
    """)


# ---- processes and threads ------------------------------------------------------------------------------------------------


def test_install_is_counted_and_uninstall_is_safe_with_live_blocks():
    run("""
    before = torch.ones(100_000)                      # of torch's own allocator
    first, second = Arena().acquire(), Arena().acquire()
    del before
    a, small = torch.ones(100_000), torch.ones(10)
    first.release(); first.release()                  # the second is without effect
    b = torch.ones(100_000)
    assert second.place(b.data_ptr()) == HEAP
    second.set_plan(0, [1 << 20], [0])
    with second.instance(0):
        planned = byte_block(1 << 20).fill_(3)
    second.release()
    c = torch.ones(100_000)
    assert second.place(c.data_ptr()) == UNKNOWN
    assert a.sum() == 100_000 and small.sum() == 10 and planned.min() == 3
    a.resize_(200_000)                                # a storage keeps the allocator it came from
    assert a[:100_000].sum() == 100_000
    del a, b, c, small, planned
    stats = second.stats()
    assert stats["live"] == 0 and stats["blocks"] == 0, stats
    with first:
        d = torch.ones(100_000)
        assert second.place(d.data_ptr()) == HEAP
    """)


def test_threads_hammer_under_a_limit(tmp_path):
    run(
        """
        import random
        arena = Arena().acquire()
        arena.set_limit(arena.live + 24 * MIB, spill_dir=sys.argv[1])
        arena.set_plan(0, [64 << 10] * 4, [0, 64 << 10, 128 << 10, 192 << 10])
        handed, lock, errors = [], threading.Lock(), []
        def work(seed):
            rng, mine = random.Random(seed), []
            try:
                for i in range(1500):
                    with arena.instance(0):
                        for _ in range(2):
                            t = byte_block(rng.choice([100, 20_000, 64 << 10, 300_000, 2 * MIB]))
                            value = rng.randrange(256)
                            t[0] = t[-1] = value
                            mine.append((t, value))
                    if i % 3 == 0:
                        with lock:
                            handed.append(mine.pop())        # freed by another thread
                            if len(handed) > 4:
                                handed.pop(0)
                    while len(mine) > 6:
                        t, value = mine.pop(rng.randrange(len(mine)))
                        assert t[0] == value and t[-1] == value
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not errors, errors
        handed.clear(); del threads
        stats = arena.stats()
        assert stats["blocks"] == 0 and stats["live"] == 0 and stats["spilled"] == 0, stats
        assert stats["planned"] > 0 and stats["spills"] > 0
        """,
        tmp_path,
    )


def test_a_fork_keeps_allocating_without_its_parents_limit(tmp_path):
    run(
        """
        arena = Arena().acquire()
        arena.set_limit(arena.live + MIB, spill_dir=sys.argv[1])
        heap, spilled = byte_block(512 << 10).fill_(1), byte_block(4 * MIB).fill_(2)
        stop = threading.Event()
        def busy():
            while not stop.is_set():
                byte_block(100_000)
        thread = threading.Thread(target=busy); thread.start()
        children = []
        for _ in range(5):
            child = os.fork()
            if child == 0:
                ok = bool(spilled.min() == 2 and heap.min() == 1)
                spilled.fill_(9); heap.fill_(9)                  # private to the child
                a = byte_block(8 * MIB).fill_(5)
                ok = ok and arena.place(a.data_ptr()) == HEAP and arena.stats()["limit"] == 0
                del spilled                                      # leaves the parent's file alone
                os._exit(0 if ok else 1)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
        stop.set(); thread.join()
        assert spilled.min() == 2 and spilled.max() == 2 and heap.max() == 1
        assert arena.stats()["limit"] > 0
        """,
        tmp_path,
    )


# ---- properties -----------------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, 200_000)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("run"), st.integers(0, 1)),
        st.tuples(st.just("limit"), st.integers(0, 1_000_000)),
        st.tuples(st.just("trim"), st.integers(0, 500_000)),
    ),
    max_size=60,
)
PLANS = {0: ([70_000, 30_000, 50_000], [0, 1, 0]), 1: ([40_000, 70_000], [1, 2])}  # offsets in units of 64 KiB


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_blocks_never_overlap_keep_their_bytes_and_add_up(actions):
    with Arena() as arena:
        page, base, spills = arena.page, arena.live, arena.stats()["spills"]
        for instance, (sizes, slots) in PLANS.items():
            arena.set_plan(instance, sizes, [slot << 16 for slot in slots])

        def rounded(n: int) -> int:
            return -(-n // 64) * 64 if n < 16 << 10 else -(-n // page) * page

        held: list[tuple[torch.Tensor, int]] = []

        def new(nbytes: int) -> torch.Tensor:
            tensor = block(nbytes)
            value = len(held) % 251
            held.append((tensor.fill_(value), value))
            return tensor

        for action, value in actions:
            if action == "new":
                new(value)
            elif action == "free" and held:
                tensor, expected = held.pop(value % len(held))
                assert tensor.min() == expected and tensor.max() == expected
                del tensor
            elif action == "run":
                with arena.instance(value):
                    for nbytes, slot in zip(*PLANS[value]):
                        at = arena.region_base + (slot << 16)
                        free = all(
                            t.data_ptr() + rounded(t.numel()) <= at or at + rounded(nbytes) <= t.data_ptr() for t, _ in held
                        )
                        assert (new(nbytes).data_ptr() == at) == free
            elif action == "limit":
                arena.set_limit(0 if value < 1000 else arena.live + value)
            elif action == "trim":
                arena.trim(value)
                assert arena.stats()["retained"] <= value
            spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t, _ in held)
            assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
            now = arena.stats()
            assert now["live"] - base == sum(rounded(t.numel()) for t, _ in held)
            assert now["committed"] == now["live"] + now["retained"] <= max(now["live"], now["limit"] or now["committed"])
        assert arena.stats()["spills"] == spills
        held.clear()
        arena.set_limit(0)


FRAGMENTS = """
from hypothesis import HealthCheck, given, settings, strategies as st
arena, LIMIT = Arena().acquire(), 12 * MIB
sizes = st.one_of(st.integers(1, 60_000), st.integers(60_000, 1_000_000), st.integers(1 * MIB, 9 * MIB))
steps = st.lists(st.tuples(sizes, st.lists(st.integers(0, 1000), max_size=1)), min_size=15, max_size=60)
worst, spills = 0, 0

@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps)
def stress(steps):
    global worst, spills
    arena.set_limit(0); arena.trim()
    base = status("RssAnon")
    arena.set_limit(LIMIT, spill_dir=sys.argv[1], spill_threshold=16 << 10)    # smaller blocks are granted over it
    held, before = [], arena.stats()["spills"]
    for nbytes, freed in steps:
        held.append(byte_block(nbytes).fill_(len(held) % 251))
        for i in freed:
            if held: held.pop(i % len(held))
        worst = max(worst, status("RssAnon") - base)
    spills += arena.stats()["spills"] - before

stress()                     # code, hypothesis and malloc take what they need
worst = spills = 0
stress()
assert spills > 20, spills
assert LIMIT // 2 < worst <= LIMIT + 2 * MIB, worst / MIB
"""


def test_fragmentation_never_costs_more_than_the_limit(tmp_path):
    """Whatever the order of sizes and frees, the kernel sees at most the limit: holes are given back."""
    run(FRAGMENTS, tmp_path)


def test_speed_is_shown():
    """Not asserted: microseconds for allocating and freeing a block, through torch.empty."""
    print(
        run("""
    import time
    def pair(nbytes):
        [byte_block(nbytes) for _ in range(1)]
        start = time.perf_counter()
        for _ in range(5000):
            torch.empty(nbytes, dtype=torch.uint8)
        return (time.perf_counter() - start) / 5000 * 1e6
    stock = [pair(n) for n in (100, 1 << 15, 1 << 20)]
    with Arena():
        ours = [pair(n) for n in (100, 1 << 15, 1 << 20)]
    print("stock", stock, "ours", ours)
    """)
    )
