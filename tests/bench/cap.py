"""Run a command under a hard memory limit that the kernel enforces: a cgroup (v1 memory controller), page cache included.

    python tests/bench/cap.py 1500MiB -- python tests/bench/train_gpt2.py --engine zinf --mem-budget 600MiB

Needs root and a writable /sys/fs/cgroup/memory. Without swap, a process that goes past the limit is killed (exit status 137);
clean page cache is reclaimed first. Prints the peak, how often the limit was hit and whether a process was killed. The exit
status is the command's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]iB|B|)", text)
    if not match:
        raise SystemExit(f"{text!r} is not a size; write e.g. 1500MiB")
    return int(float(match[1]) * UNITS[match[2]])


def own_group() -> Path:
    """The folder of the memory cgroup that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
    raise SystemExit("no version 1 memory controller here; use `systemd-run --scope -p MemoryMax=...` instead")


class Group:
    """A cgroup inside ours, removed on exit."""

    def __init__(self, limit: int) -> None:
        self.path = own_group() / f"cap-{os.getpid()}"
        self.path.mkdir()
        (self.path / "memory.limit_in_bytes").write_text(str(limit))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):  # the kernel keeps the group busy for a moment after its last process
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        print(f"could not remove {self.path}", file=sys.stderr)

    def enter(self) -> None:
        """Move the calling process into the group."""
        (self.path / "cgroup.procs").write_text("0")

    def number(self, name: str) -> int:
        return int((self.path / name).read_text())

    def kills(self) -> int:
        fields = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return int(fields.get("oom_kill", 0))


def main() -> int:
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        raise SystemExit(__doc__)
    limit = parse(sys.argv[1])
    with Group(limit) as group:
        began = time.monotonic()
        status = subprocess.run(sys.argv[3:], preexec_fn=group.enter).returncode
        print(
            json.dumps(
                {
                    "limit": limit,
                    "peak": group.number("memory.max_usage_in_bytes"),
                    "times_at_limit": group.number("memory.failcnt"),
                    "killed": group.kills(),
                    "seconds": round(time.monotonic() - began, 2),
                    "status": status,
                }
            ),
            file=sys.stderr,
        )
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
