"""What the tests of the CPU allocator share: scripts in a fresh interpreter, a handle, blocks."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zinf_compile.runtime.arena import Arena

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import os, sys, threading
import torch
import torch.nn as nn
from zinf_compile.runtime.arena import HEAP, SPILLED, UNKNOWN, Arena, lifetimes
torch.set_num_threads(1)
MIB = 1 << 20
def status(field):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(field + ":"))
def byte_block(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)
"""


def run(script: str, *arguments: object) -> str:
    """Run a script after PRELUDE in a fresh interpreter; its standard output. A failing script fails the test."""
    source = PRELUDE + textwrap.dedent(script)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena() as arena:
        yield arena


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)
