"""Static addresses: pack intervals of bytes so that what is alive together never overlaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PAGE = 4096
LINE = 64  # what vector loads want; smaller buffers needn't waste a page


def rounded(nbytes: int) -> int:
    """Bytes that a buffer takes in the arena: whole pages from one page on (direct I/O), whole cache lines below."""
    unit = PAGE if nbytes >= PAGE else LINE
    return -(-nbytes // unit) * unit


def assign(items: Sequence[tuple[int, int, int]], align: int = 1) -> tuple[int, list[int]]:
    """Offsets for `items` = (nbytes, birth, death), alive from birth to death, both included. Returns (top, offsets).

    Greedy by size, first fit: the largest item first, each at the lowest offset that is free among the placed items alive
    at the same time. align: every offset is a multiple of it (nbytes are rounded up to it).

    Safe: by induction over the items in the order of placing. When item x is placed, `over` holds *every* placed item
    whose interval meets x's, in order of offset; `reach` is the highest end among those before each of them. x goes to the
    first hole [reach, next offset) that is at least as long as x, or above all of them. All earlier items of `over` end at
    or below the hole's start, and all later ones begin at or above its end, since offsets are sorted; so x overlaps none of
    them in bytes. Items whose interval doesn't meet x's may share its bytes. Later items are checked against x in turn.
    """
    count = len(items)
    offsets = [0] * count
    sizes = [-(-n // align) * align for n, _, _ in items]
    order = sorted((i for i in range(count) if sizes[i] > 0), key=lambda i: (-sizes[i], items[i][1], i))
    # columns of what is placed, kept sorted by offset
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
            reach = np.empty(len(over) + 1, dtype=np.int64)
            reach[0] = 0
            np.maximum.accumulate(end[over], out=reach[1:])
            holes = np.flatnonzero(start[over] - reach[:-1] >= size)
            offset = int(reach[holes[0]]) if len(holes) else int(reach[-1])
        at = int(np.searchsorted(start[:placed], offset))
        for column, value in ((start, offset), (end, offset + size), (birth, born), (death, dead)):
            column[at + 1 : placed + 1] = column[at:placed]
            column[at] = value
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


def pack(items: Sequence[tuple[int, int, int]], whole: tuple[int, int], align: int = 1) -> tuple[int, list[int]]:
    """`assign`, with items of whole pages that live for the `whole` interval at the bottom, where they cause no holes.

    Pages stay aligned without `align`: larger items are placed first, so every page-multiple is placed on page-multiples.

    Where the result is above the load, placing by birth within classes of size (powers of two) is tried too and the lower
    one is kept: it does better where many equal buffers make a ring.
    """
    offsets = [0] * len(items)
    floor = 0
    rest = []
    for i, (nbytes, born, dead) in enumerate(items):
        if (born, dead) == whole and nbytes % PAGE == 0:
            offsets[i] = floor
            floor += -(-nbytes // align) * align
        else:
            rest.append(i)
    moving = [items[i] for i in rest]
    top, found = assign(moving, align)
    if top > load(moving):
        # the same first fit on sizes padded to a class keeps rings of equal slots; offsets stay valid for the true sizes
        classes = [(1 << max(0, n - 1).bit_length(), born, dead) for n, born, dead in moving]
        _, other = assign(classes, align)
        other_top = max(o + n for o, (n, _, _) in zip(other, moving))
        if other_top < top:
            top, found = other_top, other
    for i, offset in zip(rest, found):
        offsets[i] = floor + offset
    return floor + top, offsets
