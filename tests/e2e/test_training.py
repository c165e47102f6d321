"""Ten AdamW steps of a tied GPT equal plain PyTorch's of another process, bit for bit, at every kind of budget."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def run(*arguments: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.gpt_worker", str(out), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(out, weights_only=True)


def assert_equal(result: dict, reference: dict) -> None:
    assert result["losses"] == reference["losses"]
    assert result["norms"] == reference["norms"]
    for what in ("grads", "weights"):
        different = [n for n, t in reference[what].items() if not torch.equal(t, result[what][n])]
        assert not different, f"{what} differ: {different}"


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("budget", ["min", "half", "ample"])
def test_equal_to_eager_bit_for_bit(budget, threads):
    result = run("--engine", "zinf", "--budget", budget, "--threads", threads)
    assert_equal(result, run("--engine", "eager", "--threads", threads))
    moved = result["stats"]["bytes_read"] + result["stats"]["bytes_written"]
    assert (moved > 0) == (budget != "ample")
    assert result["stats"]["spilled_peak"] == 0 and result["stats"]["over_limit_peak"] == 0


def test_equal_to_aot_eager():
    assert_equal(run("--engine", "zinf", "--budget", "min", "--threads", "1"), run("--engine", "aot", "--threads", "1"))


@pytest.mark.parametrize("budget", ["min", "half"])
def test_clipping_and_accumulation_over_four_micro_batches(budget):
    extra = ("--clip", "--micro", "4", "--threads", "2", "--steps", "4")
    assert_equal(run("--engine", "zinf", "--budget", budget, *extra), run("--engine", "eager", *extra))


@pytest.mark.parametrize("budget", ["min", "half"])
def test_dropout_draws_what_eager_draws(budget):
    extra = ("--dropout", "0.1", "--threads", "2")
    result, reference = run("--engine", "zinf", "--budget", budget, *extra), run("--engine", "eager", *extra)
    assert_equal(result, reference)


@pytest.mark.parametrize("budget", ["min", "half"])
def test_a_stock_optimizer_works_on_the_masters(budget):
    result = run("--engine", "zinf", "--budget", budget, "--stock", "--clip", "--threads", "1", "--steps", "4")
    assert_equal(result, run("--engine", "eager", "--clip", "--threads", "1", "--steps", "4"))
