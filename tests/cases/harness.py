"""Run user cases under zinf_compile and compare them with plain PyTorch, each in a process of its own.

    python -m tests.cases.harness                       every case, at its smallest budget and halfway to plain's peak
    python -m tests.cases.harness 03 49 --budget min    some cases; --budget min | half | both | BYTES
    python -m tests.cases.harness --scenarios           the fault set-ups and budgets that cases describe themselves
    python -m tests.cases.harness --adopt               hand the optimizer to zinf_compile (where the loop asks for one
                                                        over exactly the model's parameters)
    python -m tests.cases.harness --json out.json --markdown out.md

At most two processes run at a time. What a case must satisfy is in `judge` and `judge_scenario`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .child import Job, load, thaw
from .compare import CLOSE, SAME, compare

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT = 300  # seconds for one process
CASES = {p.name.split("_")[0]: p for p in sorted(HERE.glob("[0-9]*_*.py"), key=lambda p: int(p.name.split("_")[0]))}

# Cases that must hold in every change; the others run with `make test-slow`.
MUST_HOLD = frozenset(
    "01 03 04 07 08 10 11 16 26 27 29 30 34 36 40 42 43 45 46 49 50 52 53 55 56 58 59 60 62 63 64 67 74 78 81 83 84 87 90 91 105".split()
)
# Cases where README.md allows a refusal that says so, instead of plain PyTorch's values.
MAY_REFUSE = frozenset("21 25 32 47 72 77 81 82 97".split())
# Cases that train in processes of their own: nothing moves in the one that is looked at.
TRAINS_ELSEWHERE = frozenset(["86"])


@dataclass
class Row:
    """One run of a case. status: same | close | refused | wrong; note: why it is wrong, or what the refusal said."""

    case: str
    run: str  # "min", "half", "<bytes>", "scenario 0", ...
    status: str
    budget: Any = None
    minimum: int | None = None
    plain_peak: int = 0
    moved: int = 0  # by the engine, as planned
    spilled: int = 0  # by the allocator: the most at once
    read: int = 0
    written: int = 0
    graphs: int = 0
    breaks: int = 0
    tries: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def good(self) -> bool:
        return self.status in (SAME, CLOSE)


class ChildFailed(RuntimeError):
    """A child died or answered nothing; the message ends with its stderr."""


def run_child(job: Job) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CASE_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.cases.child", job.encode()]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ChildFailed(f"no answer after {TIMEOUT} s: {(error.stderr or b'').decode(errors='replace')[-1500:]}") from None
    if done.returncode != 0 or not done.stdout:
        raise ChildFailed(f"exit status {done.returncode}: {done.stderr.decode(errors='replace')[-3000:]}")
    answer = torch.load(io.BytesIO(done.stdout), weights_only=False)
    answer["runs"] = [thaw(run) for run in answer["runs"]]
    return answer


def judge(name: str, run: dict[str, Any], reference: Any, peak: int, tol: float) -> Row:
    """Equal values; bytes moved to or from the disk wherever the budget is under what plain PyTorch used; an error only where one is allowed."""
    row = Row(name, "", "wrong", run["budget"], plain_peak=peak)
    for key in ("moved", "spilled", "graphs", "breaks", "tries", "seconds"):
        setattr(row, key, run[key])
    row.read, row.written = run["io"]
    if "error" in run:
        error = run["error"]
        row.note = f"{error['type']}: {error['message'][:300]} @{error['where']}"
        if "ZinfError" in error["bases"] and name in MAY_REFUSE:
            row.status = "refused"
        return row
    status, where = compare(reference, run["result"], tol=tol)
    if status not in (SAME, CLOSE):
        row.note = where
    elif run["moved"] + run["spilled"] <= 0 and isinstance(run["budget"], int) and run["budget"] < peak and name not in TRAINS_ELSEWHERE:
        row.note = f"nothing was moved under {run['budget']} bytes, though plain PyTorch used {peak}"
    else:
        row.status, row.note = status, where
    return row


def judge_scenario(scenario: dict[str, Any], run: dict[str, Any], reference: Any, peak: int, tol: float, store: Path) -> tuple[str, str]:
    """(status, note) by the scenario's own `expect`, `mentions` and `after`."""
    expect = scenario["expect"]
    if "error" in run:
        error = run["error"]
        said = f"{error['type']}: {error['message'][:300]}"
        if expect == "same":
            return "wrong", f"{said} @{error['where']}"
        if not {"ZinfError", "ValueError", "TypeError"} & set(error["bases"]):
            return "wrong", f"not an error of ours: {said} @{error['where']}"
        missing = [m for m in scenario.get("mentions", ()) if not re.search(m, error["message"], re.IGNORECASE)]
        if missing:
            return "wrong", f"the message lacks {missing}: {said}"
        if error["state_saved"] is False:
            return "wrong", f"after the error the state dict can't be saved, or holds NaN or Inf: {said}"
        return SAME, f"raised as expected: {said[:120]}"
    if expect == "raises":
        return "wrong", "no error was raised"
    status, where = compare(reference, run["result"], tol=tol)
    if status not in (SAME, CLOSE):
        return "wrong", where
    after = scenario.get("after")
    if after == "store_dir is empty":
        if run["files_in_use"]:
            return "wrong", f"files in the store directory: {run['files_in_use']}"
        if run["moved"]:
            return "wrong", f"{run['moved']} bytes were moved though everything fits"
    elif after == "notes.txt still exists":
        if not (store / "notes.txt").exists():
            return "wrong", "notes.txt was deleted"
    elif after:
        return "wrong", f"the harness doesn't know the check {after!r}"
    if "at most one warning" in scenario.get("note", "") and len(run["warnings"]) > 1:
        return "wrong", f"warnings: {run['warnings']}"
    return status, where


class CaseRunner:
    """Everything about one case: the plain reference (once), then runs and scenarios."""

    def __init__(self, name: str, adopt: bool = False) -> None:
        self.name, self.path, self.adopt = name, CASES[name], adopt
        self._plain: dict[str, Any] | None = None

    def plain(self) -> tuple[Any, int]:
        if self._plain is None:
            self._plain = run_child(Job(str(self.path), "plain"))
        return self._plain["runs"][0]["result"], self._plain["peak"]

    def runs(self, budgets: Sequence[Any]) -> list[Row]:
        """One row a budget, each in a child process of its own: what one run leaves behind is no other run's memory."""
        rows: list[Row] = []
        minimum = 0
        for budget in budgets:
            try:
                reference, peak = self.plain()
                tol = getattr(load(self.path), "TOL", 1e-5)
                with tempfile.TemporaryDirectory() as store:
                    job = Job(str(self.path), "zinf", store, [budget], peak=peak, adopt=self.adopt, minimum=minimum)
                    run = run_child(job)["runs"][0]
                    left = sorted(os.listdir(store))
            except ChildFailed as error:
                rows.append(Row(self.name, str(budget), "wrong", note=str(error)))
                continue
            minimum = run["budget"] if budget == "min" else minimum
            row = judge(self.name, run, reference, peak, tol)
            row.run, row.minimum = str(budget), minimum or None
            if left and row.status != "wrong":
                row.status, row.note = "wrong", f"left in the store directory after exit: {left}"
            rows.append(row)
        return rows

    def num_scenarios(self) -> int:
        case = load(self.path)
        with tempfile.TemporaryDirectory() as folder:
            return len(case.scenario(folder)) if hasattr(case, "scenario") else 0

    def scenario(self, index: int) -> Row:
        label = f"scenario {index}"
        try:
            reference, peak = self.plain()
            case = load(self.path)
            with tempfile.TemporaryDirectory() as probe:
                scenario = case.scenario(probe)[index]
            with tempfile.TemporaryDirectory() as store:
                run = run_child(Job(str(self.path), "zinf", store, scenario=index, adopt=self.adopt))["runs"][0]
                status, note = judge_scenario(scenario, run, reference, peak, getattr(case, "TOL", 1e-5), Path(store))
                left = sorted(set(os.listdir(store)) - set(run["files_before"]))
        except ChildFailed as error:
            return Row(self.name, label, "wrong", note=str(error))
        if left and status != "wrong":
            status, note = "wrong", f"left in the store directory after exit: {left}"
        row = Row(self.name, label, status, scenario["mem_budget"], plain_peak=peak, note=note)
        row.moved, row.spilled, row.graphs, row.breaks, row.tries, row.seconds = (run[k] for k in ("moved", "spilled", "graphs", "breaks", "tries", "seconds"))
        row.read, row.written = run["io"]
        return row


HEADER = f"{'case':5s}{'run':12s}{'status':9s}{'budget':>12s}{'plain peak':>12s}{'moved':>12s}{'spilled':>10s}{'graphs':>8s}{'breaks':>8s}{'tries':>7s}{'s':>7s}  note"


def line(row: Row) -> str:
    return (
        f"{row.case:5s}{row.run:12s}{row.status:9s}{str(row.budget)[:11]:>12s}{row.plain_peak:>12d}{row.moved:>12d}{row.spilled:>10d}"
        f"{row.graphs:>8d}{row.breaks:>8d}{row.tries:>7d}{row.seconds:>7.1f}  {row.note.splitlines()[0][:150] if row.note else ''}"
    )


def markdown(rows: Iterable[Row]) -> str:
    out = ["| case | run | result | budget | smallest budget | plain peak | moved | spilled | graphs | note |", "|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        note = r.note.splitlines()[0][:120].replace("|", "\\|") if r.note else ""
        out.append(f"| {r.case} | {r.run} | {r.status} | {r.budget} | {r.minimum or ''} | {r.plain_peak} | {r.moved} | {r.spilled} | {r.graphs} | {note} |")
    return "\n".join(out) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cases.harness", description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="case numbers, e.g. 03 49 (default: all)")
    parser.add_argument("--budget", default="both", help="min | half | both | bytes")
    parser.add_argument("--must-hold", action="store_true", help="only the cases that must hold in every change")
    parser.add_argument("--scenarios", action="store_true", help="run the cases' own scenarios instead")
    parser.add_argument("--adopt", action="store_true", help="hand the optimizer to zinf_compile")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    names = [n.zfill(2) for n in options.ids] or [n for n in CASES if not options.must_hold or n in MUST_HOLD]
    unknown = [n for n in names if n not in CASES]
    if unknown:
        parser.error(f"no such case: {unknown}; there are {', '.join(CASES)}")
    budgets = {"both": ["min", "half"]}.get(options.budget) or [options.budget if options.budget in ("min", "half") else int(options.budget)]

    def work(name: str) -> list[Row]:
        runner = CaseRunner(name, options.adopt)
        rows = [runner.scenario(i) for i in range(runner.num_scenarios())] if options.scenarios else runner.runs(budgets)
        for row in rows:
            print(line(row), flush=True)
        return rows

    print(HEADER)
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [row for some in pool.map(work, names) for row in some]
    counts = {status: sum(r.status == status for r in rows) for status in (SAME, CLOSE, "refused", "wrong")}
    print(", ".join(f"{n} {status}" for status, n in counts.items()))
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
