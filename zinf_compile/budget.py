"""How many bytes a model may take: reading what the user wrote, and finding what this process may still take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
ACCEPTED = 'an int of bytes, or a number with a unit: "4GiB", "600MiB", "192KiB", "1.5TiB", "4GB"'
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")
MARGIN = 0.10  # of what is available, left to whatever else the machine does


def parse_budget(given: object, name: str = "mem_budget") -> int:
    """Bytes of `given`; ValueError naming the argument, what was given and what is accepted."""
    found: int | None = None
    if isinstance(given, int) and not isinstance(given, bool):
        found = given
    elif isinstance(given, str):
        match = _TEXT.fullmatch(given)
        if match and match[2].upper() in UNITS:
            found = int(_exact(match[1], UNITS[match[2].upper()]))
    if found is None or found <= 0:
        why = "it must be more than zero" if found is not None else f"{type(given).__name__} is not a size"
        raise ValueError(f"{name}={given!r}: {why}. Accepted: {ACCEPTED}.")
    return found


def _exact(digits: str, unit: int) -> int:
    """Whole bytes of a decimal number times a unit, without passing through a float."""
    whole, _, fraction = digits.partition(".")
    return int(whole) * unit + (int(fraction or "0") * unit) // 10 ** len(fraction)


@dataclass(frozen=True)
class MemBudget:
    """A budget for each tier. Bytes or text on construction, bytes afterwards; None: not limited by the user."""

    device: int | str | None = None
    host: int | str | None = None
    nvme: int | str | None = None

    def __post_init__(self) -> None:
        for tier in ("device", "host", "nvme"):
            given = getattr(self, tier)
            if given is not None:
                object.__setattr__(self, tier, parse_budget(given, f"mem_budget: {tier}"))


def format_bytes(nbytes: float) -> str:
    """"12.0 MiB"; whole bytes below one KiB."""
    size = abs(nbytes)
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{int(nbytes)} B"


def format_budget(nbytes: int) -> str:
    """Text that `parse_budget` reads back to at least `nbytes`, rounded up to a hundredth of the unit: for advice to users."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            hundredths = math.ceil(nbytes * 100 / unit)
            while _exact(f"{hundredths // 100}.{hundredths % 100:02d}", unit) < nbytes:
                hundredths += 1
            return f"{hundredths // 100}.{hundredths % 100:02d}{name}"
    return f"{nbytes}B"


def default_budget(root: Path = Path("/"), rlimits: Callable[[], list[int]] | None = None) -> int:
    """What this process may still take, less a tenth: the least of free memory, cgroup room and rlimit room. Bytes.

    root: where /proc and /sys are looked for; rlimits: bytes still free under each limit (both are parameters for tests).
    """
    rooms = [_mem_available(root), *_cgroup_rooms(root), *(rlimits or _rlimit_rooms)()]
    known = [room for room in rooms if room is not None]
    if not known:
        raise ValueError(f"mem_budget was not given and this system does not tell how much memory is free. Give {ACCEPTED}.")
    return max(1, int(min(known) * (1 - MARGIN)))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # absent on this system, or the word "max": no limit there
        return None


def _fields(path: Path) -> dict[str, int]:
    """Lines of "Name: 123 kB" (meminfo, status) or "name 123" (memory.stat); kB become bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return found


def _mem_available(root: Path) -> int | None:
    return _fields(root / "proc/meminfo").get("MemAvailable")


def _cgroup_rooms(root: Path) -> list[int]:
    """Room under every cgroup that this process is in, and under their parents. Reclaimable file cache doesn't count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            most, used = _number(folder / limit), _number(folder / usage)
            # v1 says "no limit" with a number near 2**63
            if most is not None and used is not None and most < 2**60:
                rooms.append(max(0, most - used + _fields(folder / "memory.stat").get(cache, 0)))
            if folder == base:
                break
    return rooms


def _rlimit_rooms() -> list[int]:
    import resource  # absent on Windows, where nothing here can be asked anyway

    status = _fields(Path("/proc/self/status"))
    rooms = []
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            rooms.append(max(0, soft - status.get(used, 0)))
    return rooms
