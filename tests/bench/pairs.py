"""Compare the step times of two ways to train, alternating between them so that a busy machine disturbs both alike.

    python tests/bench/pairs.py --rounds 10 --a "--engine aot" --b "--engine zinf --mem-budget 600MiB"

Both are train_gpt2.py processes that were warmed up and wait; in every round A trains, then B (in odd rounds B first). Printed:
seconds of each round, the ratio B/A, its median and quartiles, and the machine's load average before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

WARM = 2  # steps beside the one with which a worker starts: a plan is made again after the first and the second
SCRIPT = Path(__file__).resolve().parent / "train_gpt2.py"


class Worker:
    """A train_gpt2.py that trains when asked."""

    def __init__(self, arguments: str) -> None:
        command = [sys.executable, str(SCRIPT), "--serve", *shlex.split(arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self):
        """The next line that is JSON; other output of the process is passed on."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)
        raise SystemExit(f"a worker ended with status {self.process.wait()}")

    def seconds(self, steps: int) -> float:
        """Mean seconds of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return statistics.fmean(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--a", required=True, help="arguments of train_gpt2.py")
    parser.add_argument("--b", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1, help="steps a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()
    a, b = Worker(options.a), Worker(options.b)
    for worker in (a, b):
        worker.seconds(WARM)
    pairs = []
    for i in range(options.rounds):
        if i % 2:
            second, first = b.seconds(options.steps), a.seconds(options.steps)
        else:
            first, second = a.seconds(options.steps), b.seconds(options.steps)
        pairs.append((first, second))
        print(f"round {i:2d}: A {first:8.3f} s   B {second:8.3f} s   B/A {second / first:6.3f}", flush=True)
    a.close()
    b.close()
    ratios = sorted(y / x for x, y in pairs)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    print(
        f"A: {options.a}\nB: {options.b}\nmedian A {statistics.median(x for x, _ in pairs):.3f} s, median B {statistics.median(y for _, y in pairs):.3f} s, "
        f"median B/A {statistics.median(ratios):.3f} (quartiles {quartiles[0]:.3f}, {quartiles[2]:.3f})\n"
        f"load average {load_before[0]:.2f} before, {os.getloadavg()[0]:.2f} after, {os.cpu_count()} cores"
    )
    if options.json:
        options.json.write_text(json.dumps({"a": options.a, "b": options.b, "pairs": pairs, "load": [load_before, os.getloadavg()]}))


if __name__ == "__main__":
    main()
