"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import pytest
import torch

from .support import Runner


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def zinf(tmp_path):
    """A Runner over a store of its own; Dynamo forgets this test's graphs afterwards."""
    runner = Runner(tmp_path)
    yield runner
    runner.close()
    torch._dynamo.reset()
