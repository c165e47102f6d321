"""Static addresses: pack intervals of bytes so that what is alive together never overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PAGE = 4096
LINE = 64  # what vector loads want; smaller buffers needn't waste a page
MAX_TRIES, TRIES_WORK = 40, 4_000_000  # of packing anew; the work of one grows with the square of the items


def rounded(nbytes: int) -> int:
    """Bytes that a buffer takes in the arena: whole pages from one page on (direct I/O), whole cache lines below."""
    unit = PAGE if nbytes >= PAGE else LINE
    return -(-nbytes // unit) * unit


def assign(items: Sequence[tuple[int, int, int]], align: int = 1) -> tuple[int, list[int]]:
    """Offsets for `items` = (nbytes, birth, death), alive from birth to death, both included. Returns (top, offsets).

    Greedy by size, first fit: the largest item first, each at the lowest offset that is free among the placed items alive
    at the same time. align: every offset is a multiple of it (nbytes are rounded up to it). 5,000 items take about 0.2 s.
    """
    sizes = [-(-n // align) * align for n, _, _ in items]
    return first_fit(items, sizes, sorted(range(len(items)), key=lambda i: (-sizes[i], items[i][1], i)))


def first_fit(
    items: Sequence[tuple[int, int, int]], sizes: Sequence[int], order: Sequence[int]
) -> tuple[int, list[int]]:
    """Places items in the given order, each at the lowest offset that is free while it lives. Items of no bytes get 0.

    Safe: by induction over the items in the order of placing. When item x is placed, `over` holds *every* placed item
    whose interval meets x's, in order of offset; `reach` is the highest end among those before each of them. x goes to the
    first hole [reach, next offset) that is at least as long as x, or above all of them. All earlier items of `over` end at
    or below the hole's start, and all later ones begin at or above its end, since offsets are sorted; so x overlaps none of
    them in bytes. Items whose interval doesn't meet x's may share its bytes. Later items are checked against x in turn.
    """
    offsets = [0] * len(items)
    order = [i for i in order if sizes[i] > 0]
    # columns of what is placed
    start = np.empty(len(order), dtype=np.int64)
    end = np.empty(len(order), dtype=np.int64)
    birth = np.empty(len(order), dtype=np.int64)
    death = np.empty(len(order), dtype=np.int64)
    top = 0
    for placed, i in enumerate(order):
        size, (_, born, dead) = sizes[i], items[i]
        over = np.flatnonzero((birth[:placed] <= dead) & (death[:placed] >= born))
        offset = 0
        if len(over):
            over = over[np.argsort(start[over], kind="stable")]
            reach = np.empty(len(over) + 1, dtype=np.int64)
            reach[0] = 0
            np.maximum.accumulate(end[over], out=reach[1:])
            holes = np.flatnonzero(start[over] - reach[:-1] >= size)
            offset = int(reach[holes[0]]) if len(holes) else int(reach[-1])
        start[placed], end[placed], birth[placed], death[placed] = offset, offset + size, born, dead
        offsets[i] = offset
        top = max(top, offset + size)
    return top, offsets


def load(items: Sequence[tuple[int, int, int]]) -> int:
    """The most bytes alive at once: no packing can be lower."""
    if not items:
        return 0
    first = min(b for _, b, _ in items)
    change = np.zeros(max(d for _, _, d in items) - first + 2, dtype=np.int64)
    for nbytes, born, dead in items:
        change[born - first] += nbytes
        change[dead - first + 1] -= nbytes
    return int(np.cumsum(change).max())


def pack(items: Sequence[tuple[int, int, int]], whole: tuple[int, int], limit: int = 0) -> tuple[int, list[int]]:
    """Offsets in an arena for sizes as `rounded` gives them: pages on pages, small ones on cache lines.

    Items of whole pages that live for the `whole` interval lie at the bottom, where they cause no holes. The rest is placed
    by size; while that passes both the load and `limit`, the item that reached the top is placed earlier and all is tried
    again, for about as long as a second. Tries come in a fixed order, so a smaller limit never ends with less. Page-multiples
    are always placed before smaller items, which is what keeps them on page-multiples.
    """
    offsets = [0] * len(items)
    floor = 0
    rest = []
    for i, (nbytes, born, dead) in enumerate(items):
        if (born, dead) == whole and nbytes % PAGE == 0:
            offsets[i] = floor
            floor += nbytes
        else:
            rest.append(i)
    moving = [items[i] for i in rest]
    sizes = [n for n, _, _ in moving]
    order = sorted(range(len(moving)), key=lambda i: (sizes[i] % PAGE != 0, -sizes[i], moving[i][1], i))
    enough = max(load(moving), limit - floor)
    best = first_fit(moving, sizes, order)
    top, found = best
    for _ in range(min(MAX_TRIES, TRIES_WORK // max(1, len(moving)) ** 2)):
        if best[0] <= enough:
            break
        highest = max(order, key=lambda i: (found[i] + sizes[i], -i))
        at = order.index(highest)
        small = sizes[highest] % PAGE != 0
        first = next(k for k, i in enumerate(order) if (sizes[i] % PAGE != 0) == small)
        order.insert(first + (at - first) // 2, order.pop(at))
        top, found = first_fit(moving, sizes, order)
        if top < best[0]:
            best = top, found
    for i, offset in zip(rest, best[1]):
        offsets[i] = floor + offset
    return floor + best[0], offsets
