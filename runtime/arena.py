"""The CPU allocator's Python side: install it, set its limit, read its counters, record a step, plan addresses.

The allocator itself (csrc/cpu_allocator.cpp) is one per process, since torch has one CPU allocator; `Arena` objects are
handles to it. Installation is counted: the allocator leaves when the last handle that acquired it has released it, and
blocks that are still alive then stay valid. The limit, counters and plans are likewise the process's; instances are told
apart by the numbers the executor gives them. All sizes and offsets are bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_I64 = ctypes.c_int64
_P64 = ctypes.POINTER(_I64)

HEAP = -1  # `place` of a block in the heap; a planned block's place is its offset in the region
SPILLED = -2
UNKNOWN = -3

PAGE_BLOCK = 16 << 10  # blocks from this size on are whole pages, are recorded, and can be planned


class Record(NamedTuple):
    """One allocation of at least 16 KiB. `instance` -1: made outside any graph run, `k` then counts those."""

    instance: int
    k: int
    nbytes: int  # rounded up to whole pages
    birth: int  # event clock
    death: int  # event clock, -1: still alive
    place: int  # offset in the planned region, HEAP or SPILLED


class Mark(NamedTuple):
    """One finished run of an instance: when, and what the process held."""

    instance: int
    begin: int  # event clock
    end: int
    live_begin: int
    live_end: int
    peak: int  # highest live bytes of the process between begin and end
    allocations: int  # of at least 16 KiB


class _RecordStruct(ctypes.Structure):
    _fields_ = [(name, _I64) for name in Record._fields]


class _MarkStruct(ctypes.Structure):
    _fields_ = [(name, _I64) for name in Mark._fields]


# Order and names of struct zinf_alloc_stats in csrc/cpu_allocator.h.
_STATS = (
    "limit", "strict", "live", "peak", "external", "small", "retained", "committed", "committed_peak", "spilled",
    "spilled_peak", "spills", "over_limit", "over_limit_peak", "calls", "blocks", "trimmed", "region",
    "region_committed", "planned", "missed_size", "missed_busy",
)  # fmt: skip


class _StatsStruct(ctypes.Structure):
    _fields_ = [(name, _I64) for name in _STATS]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "last_error": (ctypes.c_char_p, []),
    "install": (_I64, []),
    "uninstall": (_I64, []),
    "page": (_I64, []),
    "set_limit": (ctypes.c_int, [_I64, ctypes.c_int, ctypes.c_char_p, _I64]),
    "external": (_I64, [_I64]),
    "trim": (_I64, [_I64]),
    "spill_drop": (_I64, []),
    "stats_get": (None, [ctypes.POINTER(_StatsStruct)]),
    "reset_peak": (None, []),
    "begin": (ctypes.c_int, [_I64]),
    "end": (ctypes.c_int, []),
    "region": (ctypes.c_int, [_I64]),
    "region_base": (ctypes.c_void_p, []),
    "plan": (ctypes.c_int, [_I64, _I64, _P64, _P64]),
    "plan_clear": (ctypes.c_int, [_I64]),
    "plan_counts": (ctypes.c_int, [_I64, _P64, _P64]),
    "place": (_I64, [ctypes.c_void_p]),
    "record": (None, [ctypes.c_int]),
    "log_size": (_I64, []),
    "log_get": (_I64, [ctypes.POINTER(_RecordStruct), _I64]),
    "marks_size": (_I64, []),
    "marks_get": (_I64, [ctypes.POINTER(_MarkStruct), _I64]),
    "log_clear": (None, []),
}


@dataclass
class Recording:
    """What `Arena.recording` saw; filled when its block ends. Blocks alive then have death -1."""

    records: list[Record] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


class _Instance:
    """`with arena.instance(i):` without a generator's cost; the executor enters one for each graph run."""

    __slots__ = ("_begin", "_end", "_instance")

    def __init__(self, begin: Callable[[int], int], end: Callable[[], int], instance: int) -> None:
        self._begin, self._end, self._instance = begin, end, instance

    def __enter__(self) -> None:
        if self._begin(self._instance) < 0:
            raise ValueError(f"instance {self._instance}: negative, or more than 64 nested graph runs on this thread")

    def __exit__(self, *exc: object) -> None:
        self._end()


class Arena:
    """A handle to the process's CPU allocator.

    `lib` is the loaded native library (`native.load()` when None). `raw` maps the names of csrc/cpu_allocator.h without
    their `zinf_alloc_` prefix to ctypes functions. Failures of the native side raise RuntimeError with its message.
    """

    def __init__(self, lib: ctypes.CDLL | None = None) -> None:
        if lib is None:
            from .native import load

            lib = load()
        self.raw: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = lib["zinf_alloc_" + name]  # indexing gives a fresh object: no other user's argtypes are touched
            function.restype, function.argtypes = result, arguments
            self.raw[name] = function
        self.begin: Callable[[int], int] = self.raw["begin"]
        self.end: Callable[[], int] = self.raw["end"]
        self.page: int = self.raw["page"]()
        self._acquired = 0

    def _call(self, name: str, *arguments: Any) -> int:
        result = self.raw[name](*arguments)
        if result < 0:
            raise RuntimeError(self.raw["last_error"]().decode())
        return result

    # ---- installation ----------------------------------------------------------------------------------------------
    def acquire(self) -> Arena:
        """Install the allocator, or count one more user of it. Blocks made before by another allocator are not seen."""
        self.raw["install"]()
        self._acquired += 1
        return self

    def release(self) -> None:
        """Undo one `acquire`; the process's last one restores torch's allocator, drops limit, plans and region, and sets
        `external` to 0: bytes that were counted by hand are not carried over to the next user."""
        if self._acquired:
            self._acquired -= 1
            self.raw["uninstall"]()

    def __enter__(self) -> Arena:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    # ---- limit and counters ----------------------------------------------------------------------------------------
    def set_limit(
        self,
        nbytes: int,
        strict: bool = False,
        spill_dir: str | os.PathLike[str] | None = None,
        spill_threshold: int = 1 << 20,
    ) -> None:
        """Keep live + retained + external bytes under `nbytes` (0: no limit); the process's, so the last call counts.

        A block that would pass it raises RuntimeError at its op if `strict` (blocks under 16 KiB are granted and counted
        in `over_limit`). Otherwise blocks of at least `spill_threshold` bytes go to an unlinked file in `spill_dir`
        (RuntimeError without one, or when that disk is full) and smaller ones are granted and counted.
        """
        directory = None if spill_dir is None else os.fsencode(spill_dir)
        self._call("set_limit", nbytes, int(strict), directory, spill_threshold)

    @property
    def live(self) -> int:
        """Bytes held now: tensors and external bytes; spilled ones are not in it."""
        return self.stats()["live"]

    @property
    def peak(self) -> int:
        """The highest `live` since `reset_peak`."""
        return self.stats()["peak"]

    def reset_peak(self) -> None:
        """Make every peak (live, committed, spilled, over_limit) its present value."""
        self.raw["reset_peak"]()

    def stats(self) -> dict[str, int]:
        """All counters by name, bytes or counts, as documented in csrc/cpu_allocator.h."""
        out = _StatsStruct()
        self.raw["stats_get"](ctypes.byref(out))
        return {name: getattr(out, name) for name in _STATS}

    def external(self, delta: int) -> int:
        """Count `delta` more (or fewer) bytes held outside the allocator under the limit; returns their sum."""
        return self._call("external", delta)

    def trim(self, keep: int = 0) -> int:
        """Give pages of freed blocks back to the system until at most `keep` bytes of them are left; bytes given back."""
        return self.raw["trim"](keep)

    def drop_spilled(self) -> int:
        """Take the pages of spilled blocks out of this process; their contents stay. Returns the bytes covered."""
        return self.raw["spill_drop"]()

    # ---- instances and planned addresses ---------------------------------------------------------------------------
    def instance(self, instance: int) -> _Instance:
        """Bracket one graph run on the calling thread; inside, its k-th allocation of at least 16 KiB has index k."""
        return _Instance(self.begin, self.end, instance)

    def reserve_region(self, nbytes: int) -> None:
        """Reserve at least `nbytes` of address space for planned blocks; it only grows, and 0 drops it."""
        self._call("region", nbytes)

    @property
    def region_base(self) -> int:
        """Address of the planned region, 0 if there is none."""
        return self.raw["region_base"]() or 0

    def set_plan(self, instance: int, sizes: Sequence[int], offsets: Sequence[int]) -> None:
        """Give the k-th block of `instance`, if it has sizes[k] bytes (rounded up to a page), the address region +
        offsets[k]; -1 leaves it to the heap. Grows the region as needed. A block of another size, or whose slot is still
        in use, comes from the heap and is counted by `plan_counts`. Offsets are multiples of `page`."""
        if len(sizes) != len(offsets):
            raise ValueError(f"a plan needs one offset a size, not {len(offsets)} offsets for {len(sizes)} sizes")
        need = max((o + -(-s // self.page) * self.page for s, o in zip(sizes, offsets) if o >= 0), default=0)
        if need:
            self.reserve_region(need)
        table = _I64 * len(sizes)
        self._call("plan", instance, len(sizes), table(*sizes), table(*offsets))

    def clear_plan(self, instance: int) -> None:
        """Forget the plan of `instance`, if it has one; blocks it has placed stay where they are."""
        self.raw["plan_clear"](instance)  # -1: it had none

    def plan_counts(self, instance: int) -> tuple[int, int]:
        """(blocks handed their planned address, blocks that missed it) since the plan of `instance` was set."""
        planned, missed = _I64(), _I64()
        self._call("plan_counts", instance, ctypes.byref(planned), ctypes.byref(missed))
        return planned.value, missed.value

    def place(self, address: int) -> int:
        """Where the block that starts at `address` (a storage's data_ptr) lies: region offset, HEAP, SPILLED or UNKNOWN."""
        return self.raw["place"](address)

    # ---- recording -------------------------------------------------------------------------------------------------
    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Log allocations of at least 16 KiB and instance runs on one event clock, for the whole process; not nestable."""
        recording = Recording()
        self.raw["log_clear"]()
        self.raw["record"](1)
        try:
            yield recording
        finally:
            self.raw["record"](0)
            recording.records, recording.marks = self.log(), self.marks()

    def log(self) -> list[Record]:
        """The log so far, oldest first. Deaths are noted until the next recording starts, even when it is off."""
        out = (_RecordStruct * self.raw["log_size"]())()
        count = self.raw["log_get"](out, len(out))
        return [Record(*(getattr(r, name) for name in Record._fields)) for r in out[:count]]

    def marks(self) -> list[Mark]:
        """The finished instance runs of the log, in the order in which they ended."""
        out = (_MarkStruct * self.raw["marks_size"]())()
        count = self.raw["marks_get"](out, len(out))
        return [Mark(*(getattr(m, name) for name in Mark._fields)) for m in out[:count]]


def lifetimes(log: Sequence[Record]) -> list[tuple[int, int, int, int, int]]:
    """The log as (instance, k, nbytes, birth, death), with the death of a block still alive after every event of the log."""
    horizon = 1 + max((max(r.birth, r.death) for r in log), default=0)
    return [(r.instance, r.k, r.nbytes, r.birth, horizon if r.death < 0 else r.death) for r in log]
