"""Measure training steps of a random-init GPT-2: time, memory and disk bytes as the kernel counts them, beside the plan.

    python tests/bench/train_gpt2.py --engine eager --steps 5
    python tests/bench/train_gpt2.py --engine zinf --mem-budget 600MiB --size 350M --json out.json

engines: eager (plain PyTorch), aot (torch.compile(backend="aot_eager"): the same capture and no offloading), zinf. AdamW,
float32, loss outside the model. With --serve the process trains on demand, for pairs.py.

`--mem-budget min`: the smallest that is accepted.

Memory in bytes: `rss_planned` (zinf) the base: resident after capture and planning, less what the allocator has
live and what it keeps of freed blocks (both are under the budget);
`rss_imported` after importing torch, `rss_built` with the model, `peak_first_step` the high-water mark up to
the end of the first step (which captures and plans), `peak_later` that of the later steps (the mark is reset in between),
`rss_base` (eager and aot) what is resident after a step less weights, gradients and AdamW states: interpreter, torch, traces.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from tests.bench.gpt2 import GPT2, SIZES, batch  # noqa: E402  (the script runs by its path)


def status(field: str) -> int:
    """A field of /proc/self/status in bytes, e.g. VmRSS, VmHWM."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024


def reset_peak() -> bool:
    """Set VmHWM back to VmRSS; False where the kernel doesn't allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def disk_bytes() -> tuple[int, int]:
    """(read from, written to disks) by this process so far, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


class Trainer:
    """One model and its optimizer under one engine; `step()` trains once and records what it cost."""

    def __init__(self, options: argparse.Namespace, store: str) -> None:
        self.options = options
        self.rss_imported = status("VmRSS")
        torch.manual_seed(0)
        layers, hidden = SIZES[options.size]
        self.model = GPT2(options.layers or layers, hidden, options.seq)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=options.fused or None)
        self.run = self.model
        if options.engine == "aot":
            self.run = torch.compile(self.model, backend="aot_eager")
        elif options.engine == "zinf":
            self._compile(options, options.store_dir or store)
        self.num_params = sum(p.numel() for p in self.model.parameters())
        self.rss_built = status("VmRSS")
        self.losses: list[float] = []
        self.rows: list[dict[str, Any]] = []

    def _compile(self, options: argparse.Namespace, store: str) -> None:
        """Capture and plan before the first step, so that the base can be read: what is resident then less what is live."""
        from zinf_compile import BudgetTooSmall, zinf_compile

        adopted = None if options.stock_optimizer else self.optimizer
        ids = batch(0, options.batch, options.seq)[:, :-1]
        self.budget: int | str = options.mem_budget
        if self.budget == "min":
            try:
                zinf_compile(self.model, 1 << 20, optimizer=adopted, store_dir=store, example_inputs=(ids,))
            except BudgetTooSmall as error:
                self.budget = error.minimum
        self.run = zinf_compile(self.model, self.budget, optimizer=adopted, store_dir=store, example_inputs=(ids,))
        self.budget = int(self.model.zinf.stats()["budget"])
        arena = self.model.zinf.domain.arena.stats()
        self.rss_planned = status("VmRSS") - arena["live"] - arena["retained"]

    def step(self) -> float:
        """Seconds."""
        ids = batch(len(self.losses), self.options.batch, self.options.seq)
        before, began, cpu = disk_bytes(), time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        seconds = time.perf_counter() - began
        read, written = (b - a for a, b in zip(before, disk_bytes()))
        self.rows.append({"seconds": seconds, "cpu_seconds": time.process_time() - cpu, "read": read, "written": written, "rss": status("VmRSS")})
        return seconds

    def summary(self, peak_first: int, peak_later: int | None) -> dict[str, Any]:
        later = self.rows[self.options.warm :] or self.rows
        report: dict[str, Any] = {
            "engine": self.options.engine,
            "size": self.options.size,
            "mem_budget": self.options.mem_budget if self.options.engine == "zinf" else None,
            "million_params": round(self.num_params / 1e6, 1),
            "threads": torch.get_num_threads(),
            "step_seconds": round(statistics.median(r["seconds"] for r in later), 4),
            "cpu_seconds": round(statistics.median(r["cpu_seconds"] for r in later), 4),
            "read_per_step": int(statistics.median(r["read"] for r in later)),
            "written_per_step": int(statistics.median(r["written"] for r in later)),
            "rss_imported": self.rss_imported,
            "rss_built": self.rss_built,
            "peak_first_step": peak_first,
            "peak_later": peak_later,
            "losses": self.losses,
            "steps": self.rows,
        }
        if self.options.engine == "zinf":
            zinf = self.model.zinf
            report["stats"] = {k: v for k, v in zinf.stats().items() if isinstance(v, (int, float, str, bool, type(None)))}
            report["predicted"] = dataclasses.asdict(zinf.plan.predicted)
            report["rss_planned"], report["budget"] = self.rss_planned, self.budget
        else:
            report["rss_base"] = later[-1]["rss"] - 16 * self.num_params  # weights, gradients, two states of 4 bytes each
        return report


def show(report: dict[str, Any]) -> None:
    mib = 2**20
    print(f"{report['engine']} {report['size']}, {report['million_params']} M parameters, {report['threads']} threads, budget {report['mem_budget']}")
    for i, row in enumerate(report["steps"]):
        print(
            f"  step {i}: {row['seconds']:7.3f} s, cpu {row['cpu_seconds']:7.3f} s, read {row['read'] / mib:8.1f} MiB, "
            f"written {row['written'] / mib:8.1f} MiB, resident {row['rss'] / mib:7.0f} MiB, loss {report['losses'][i]:.6f}"
        )
    for key in ("rss_imported", "rss_built", "rss_planned", "rss_base", "peak_first_step", "peak_later"):
        if report.get(key) is not None:
            print(f"  {key:16s} {report[key] / mib:8.1f} MiB")
    if "predicted" in report:
        predicted = report["predicted"]
        for name, plan, measured in (
            ("seconds", predicted["seconds"], report["step_seconds"]),
            ("MiB read", predicted["bytes_read"] / mib, report["read_per_step"] / mib),
            ("MiB written", predicted["bytes_written"] / mib, report["written_per_step"] / mib),
        ):
            print(f"  {name:16s} plan {plan:9.2f}  measured {measured:9.2f}  ({measured / plan - 1:+.1%})" if plan else f"  {name:16s} plan 0  measured {measured:.2f}")
        stats = report["stats"]
        peak = (predicted["peak_device"] + stats["planned_held"]) / mib
        print(f"  {'tensor peak MiB':16s} plan {peak:9.2f}  measured {stats['step_peak'] / mib:9.2f}  ({peak / (stats['step_peak'] / mib) - 1:+.1%} predicted)")
        above = (report["peak_first_step"] - report["rss_planned"]) / mib
        print(f"  {'VmHWM - base MiB':16s} budget {report['budget'] / mib:7.2f}  measured {above:9.2f}  (budget {above - report['budget'] / mib:+.1f})")
        for key, value in sorted(report["stats"].items()):
            print(f"  stats.{key:28s} {value}")


def serve(trainer: Trainer) -> None:
    """One line on stdin: train that many steps, answer with their seconds as JSON. End of input: stop."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps([trainer.step() for _ in range(int(line))]), flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--engine", choices=["eager", "aot", "zinf"], default="zinf")
    p.add_argument("--size", choices=list(SIZES), default="124M")
    p.add_argument("--layers", type=int, default=0, help="other than the size's own")
    p.add_argument("--mem-budget", default="600MiB")
    p.add_argument("--store-dir", default="")
    p.add_argument("--stock-optimizer", action="store_true", help="don't hand the optimizer to zinf_compile")
    p.add_argument("--fused", action="store_true", help="torch's fused AdamW")
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--warm", type=int, default=2, help="first steps left out of the medians")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--json", type=Path)
    p.add_argument("--serve", action="store_true")
    return p


def main() -> None:
    options = parser().parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.engine != "eager":
        importlib.import_module("torch._dynamo")  # so that it counts as an import and not as the first step
    with tempfile.TemporaryDirectory() as store:
        trainer = Trainer(options, store)
        trainer.step()
        if options.serve:
            for _ in range(options.warm - 1):
                trainer.step()
            serve(trainer)
        else:
            peak_first = status("VmHWM")
            can_reset = reset_peak()
            for _ in range(options.warm + options.steps - 1):
                trainer.step()
            report = trainer.summary(peak_first, status("VmHWM") if can_reset else None)
            show(report)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1))
        if options.engine == "zinf":
            trainer.model.zinf.close()


if __name__ == "__main__":
    main()
