"""The CPU allocator: recorded lifetimes, and planned blocks lie where planned."""

import pytest

from zinf_compile.runtime.arena import HEAP, Record, lifetimes

from .arena_support import block, run


def stack(log: list[Record]) -> tuple[list[int], list[int]]:
    """An independent, wasteful plan: sizes and offsets with every block at its own address."""
    sizes = [r.nbytes for r in log]
    return sizes, [sum(sizes[:i]) for i in range(len(sizes))]


def test_recording_gives_order_lifetimes_and_marks(arena):
    live = arena.live
    with arena.recording() as recording:
        outside = block(20 << 10)
        with arena.instance(5):
            a, b = block(16 << 10), block(100_000)
            block(100)  # under 16 KiB: no index
            del a
            with arena.instance(6):
                inner = block(1 << 20)
            del b
        del inner
    del outside
    page = arena.page
    assert [(r.instance, r.k, r.nbytes, r.place) for r in recording.records] == [
        (-1, 0, 20 << 10, HEAP),
        (5, 0, 16 << 10, HEAP),
        (5, 1, -(-100_000 // page) * page, HEAP),
        (6, 0, 1 << 20, HEAP),
    ]
    births_deaths = [(r.birth - recording.records[0].birth, r.death) for r in recording.records]
    assert [b for b, _ in births_deaths] == [0, 2, 3, 6] and births_deaths[0][1] == -1
    first = recording.records[0].birth
    assert [r.death - first for r in recording.records[1:]] == [4, 8, 10]
    inner_mark, outer_mark = recording.marks
    assert (inner_mark.instance, outer_mark.instance) == (6, 5) and outer_mark.begin < inner_mark.begin < inner_mark.end
    assert outer_mark.allocations == 2 and outer_mark.live_begin - live == 20 << 10
    assert outer_mark.peak - outer_mark.live_begin == recording.records[2].nbytes + (1 << 20)
    assert lifetimes(recording.records)[0] == (-1, 0, 20 << 10, first, first + 11)
    assert arena.log()[0].death > first  # its death was noted after recording ended


def test_a_repeated_step_lands_on_its_planned_addresses():
    run("""
    arena = Arena().acquire()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)])
    x = torch.randn(256, 128)
    def step():
        with arena.instance(0):
            model(x).square().mean().backward()
        model.zero_grad()
    step()
    with arena.recording() as recording:
        step()
    log = [r for r in recording.records if r.instance == 0]
    assert len(log) > 20
    # First fit over the recorded lifetimes, written here so that the addresses don't come from the code under test.
    placed = []
    for _, k, nbytes, birth, death in sorted(lifetimes(log), key=lambda r: -r[2]):
        busy = sorted((o, o + n) for o, n, b, d, _ in placed if b < death and birth < d)
        at = 0
        for start, end in busy:
            if at + nbytes <= start:
                break
            at = max(at, end)
        placed.append((at, nbytes, birth, death, k))
    offsets = [o for o, *_, k in sorted(placed, key=lambda p: p[-1])]
    extent = max(o + n for o, n, *_ in placed)
    assert extent < sum(r.nbytes for r in log) / 2      # addresses are used again within the step
    arena.set_plan(0, [r.nbytes for r in log], offsets)
    for _ in range(2):
        with arena.recording() as planned:
            step()
        assert [r.place for r in planned.records if r.instance == 0] == offsets
    assert arena.plan_counts(0) == (2 * len(log), 0)
    assert arena.stats()["region_committed"] <= extent
    grads = [p.grad for p in model.parameters()]
    assert grads == [None] * len(grads)
    """)


def test_two_live_instances_and_kept_outputs_fall_back_to_the_heap(arena):
    size = 64 << 10
    arena.set_plan(1, [size, size], [0, size])

    def graph():
        with arena.instance(1):
            return block(size), block(size)

    a, b = graph()
    c, d = graph()  # a second live run of the same instance
    assert [arena.place(t.data_ptr()) for t in (a, b, c, d)] == [0, size, HEAP, HEAP]
    assert a.data_ptr() == arena.region_base and arena.plan_counts(1) == (2, 2)
    del a, c, d
    e, f = graph()  # b is still kept by the user: only its slot is missed
    assert [arena.place(t.data_ptr()) for t in (e, f)] == [0, HEAP]
    assert arena.stats()["missed_busy"] >= 3


def test_a_block_of_another_size_or_index_misses_its_plan(arena):
    arena.set_plan(1, [64 << 10, 64 << 10], [0, -1])
    with arena.instance(1):
        a, b, c = block(80 << 10), block(64 << 10), block(64 << 10)
    assert [arena.place(t.data_ptr()) for t in (a, b, c)] == [HEAP] * 3
    assert arena.plan_counts(1) == (0, 2)  # wrong size; meant for the heap; not in the plan


def test_plans_change_and_regions_grow_under_live_blocks(arena):
    size = 32 << 10
    arena.set_plan(1, [size], [0])
    with arena.instance(1):
        a = block(size).fill_(1)
    old_base = arena.region_base
    arena.set_plan(2, [size], [1 << 30])  # a larger region replaces the first one
    assert arena.region_base != old_base and arena.place(a.data_ptr()) == 0
    with arena.instance(1):
        b = block(size).fill_(2)
    assert b.data_ptr() == arena.region_base and a.min() == 1 and a.max() == 1
    arena.clear_plan(1)
    arena.clear_plan(1)  # a plan that is gone, or never was, is as good as cleared
    with pytest.raises(RuntimeError, match="instance 1 has no plan"):
        arena.plan_counts(1)
    arena.reserve_region(0)
    assert b.min() == 2 and arena.region_base == 0
    live = arena.live
    del a, b
    assert live - arena.live == 2 * size


def test_bad_plans_are_refused(arena):
    with pytest.raises(RuntimeError, match="not page-aligned inside the region"):
        arena.set_plan(1, [arena.page], [1])
    with pytest.raises(ValueError, match="one offset a size"):
        arena.set_plan(1, [1, 2], [0])
    with pytest.raises(ValueError, match="negative"), arena.instance(-1):
        pass


def test_planned_holes_are_trimmed_too_and_the_limit_covers_the_region(arena):
    arena.trim()
    size = 4 << 20
    arena.set_plan(1, [size], [0])
    with arena.instance(1):
        block(size).fill_(1)
    assert arena.stats()["region_committed"] == size
    arena.set_limit(arena.live + size)
    other = block(size)  # from the heap; the region's retained pages make room
    stats = arena.stats()
    assert stats["region_committed"] == 0 and stats["committed"] <= stats["limit"]
    del other
