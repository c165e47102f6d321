"""No two intervals that are alive together share bytes; packing is tight on the lifetimes of a training step; it is quick."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_compile.planner.addresses import PAGE, assign, load, pack, rounded

ITEM = st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(0, 12)).map(lambda t: (t[0], t[1], t[1] + t[2]))


def check(items: list[tuple[int, int, int]], top: int, offsets: list[int], align: int) -> None:
    most = 0
    for i, ((n, b, d), o) in enumerate(zip(items, offsets)):
        assert o >= 0 and o % align == 0 and o + n <= top
        most = max(most, o + n)
        for (m, c, e), p in zip(items[:i], offsets[:i]):
            if n and m and b <= e and c <= d:
                assert o + n <= p or p + m <= o, "alive together, and sharing bytes"
    assert top >= most


@settings(max_examples=200, deadline=None)
@given(st.lists(ITEM, max_size=25), st.sampled_from([1, 8, 64]))
def test_alive_together_never_overlap(items, align) -> None:
    top, offsets = assign(items, align)
    check(items, top, offsets, align)
    assert top >= load(items)


@settings(max_examples=100, deadline=None)
@given(st.lists(ITEM, max_size=25), st.integers(0, 2000))
def test_arena_keeps_pages_on_pages(items, limit) -> None:
    sized = [(rounded(n * 173), b, d) for n, b, d in items]
    top, offsets = pack(sized, (0, 42), limit * 64)
    check(sized, top, offsets, 64)
    assert all(o % PAGE == 0 for (n, _, _), o in zip(sized, offsets) if n >= PAGE)
    assert top <= pack(sized, (0, 42), 2**40)[0]


def test_nested_lifetimes_pack_without_holes() -> None:
    items = [(1000 + 64 * (k % 3), k, 400 - k) for k in range(200)]
    top, _ = assign(items)
    assert top == load(items)


def test_five_thousand_items_in_two_seconds() -> None:
    r = random.Random(0)
    items = [(r.randrange(1, 2000) * 64, b := r.randrange(20_000), b + r.choice([1, 3, 50, 5000])) for _ in range(5000)]
    began = time.process_time()
    top, _ = assign(items)
    assert time.process_time() - began < 2
    assert top <= 1.2 * load(items)
