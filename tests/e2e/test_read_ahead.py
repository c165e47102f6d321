"""Optimizer states that are read during the backward: used where nothing has changed, never where something has."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from zinf_compile.api import _domain
from zinf_compile.cluster import Cluster
from zinf_compile.measure import Gauge

from .support import build, inputs

WIDTH, LAYERS, STEPS = 256, 6, 5
BUDGET = 2 << 20
X = inputs(2, rows=64, width=WIDTH)


def tower() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def plain_step(model, optimizer, i):
    optimizer.zero_grad()
    model(X).square().mean().backward()
    return model


def two_micro_batches(model, optimizer, i):
    optimizer.zero_grad()
    for part in (X, 2 * X):
        model(part).square().mean().backward()
    return model


def clipped(model, optimizer, i):
    plain_step(model, optimizer, i)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def evaluated_in_between(model, optimizer, i):
    plain_step(model, optimizer, i)
    with torch.no_grad():
        model(X)


def states_edited(model, optimizer, i):
    plain_step(model, optimizer, i)
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def states_loaded(model, optimizer, i):
    plain_step(model, optimizer, i)
    if i:
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["exp_avg_sq"] += 1e-4
        optimizer.load_state_dict(saved)


def step_skipped(model, optimizer, i):
    if i in (1, 2):
        plain_step(model, optimizer, i)
    plain_step(model, optimizer, i)


def accumulated_longer_once(model, optimizer, i):
    plain_step(model, optimizer, i)
    if i == 3:
        model(X).square().mean().backward()


# whether the last step's update finds something read
PATTERNS = {
    plain_step: True,
    two_micro_batches: True,
    clipped: True,
    evaluated_in_between: False,  # the plan knows of the graph between, and doesn't try
    states_edited: True,  # exp_avg_sq is valid still
    states_loaded: False,
    step_skipped: True,
    accumulated_longer_once: False,  # the step before had two backwards, so the first of this one isn't known to be the last
}


def train(model, optimizer, pattern):
    taken = []
    for i in range(STEPS):
        before = model.zinf.stats()["bytes_read_ahead"] if hasattr(model, "zinf") else 0
        pattern(model, optimizer, i)
        optimizer.step()
        taken.append(model.zinf.stats()["bytes_read_ahead"] - before if hasattr(model, "zinf") else 0)
    states = [s[k].clone() for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return [p.detach().clone() for p in model.parameters()] + states, taken


def left_by_other_tests() -> int:
    """Bytes: hooks that refer to their own parameter are never collected."""
    gc.collect()
    return _domain().held()


@pytest.fixture
def fixed_rates(monkeypatch):
    """Plans are made for rates at which reading ahead pays, whatever this machine measures while other jobs run."""
    measured = Gauge.measured
    monkeypatch.setattr(Gauge, "cluster", lambda self: Cluster.this_machine())

    def slow_compute(self, labels, *plans):
        return replace(measured(self, labels, *plans), speed=dict.fromkeys(labels.values(), 100.0))

    monkeypatch.setattr(Gauge, "measured", slow_compute)
    monkeypatch.setattr(Gauge, "update_ends", lambda self, estimated: None)


@pytest.mark.usefixtures("fixed_rates")
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda f: f.__name__)
def test_values_are_plain_pytorchs(zinf, pattern):
    plain = build(tower)
    reference, _ = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False), pattern)
    model = build(tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    model = zinf.compiled(model, BUDGET + left_by_other_tests(), optimizer=optimizer)
    got, taken = train(model, optimizer, pattern)
    planned = any(e.op == "read_ahead" for e in model.zinf.plan.events)
    assert planned == (pattern is not evaluated_in_between)
    assert all(map(torch.equal, got, reference))
    assert taken[0] == 0 and (taken[-1] > 0) == PATTERNS[pattern], taken
    assert zinf.models[0].zinf.domain.native.zinf_ahead_bytes() == 0


def test_an_optimizer_outlives_its_model(zinf):
    """The parameters are the user's: their mappings stay valid without the module."""
    plain, model = build(tower), build(tower)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    model = zinf.compiled(model, BUDGET, optimizer=optimizer)
    params, others = list(model.parameters()), list(plain.parameters())
    plain_step(plain, reference, 0)
    plain_step(model, optimizer, 0)
    zinf.models.clear()
    del model
    gc.collect()
    reference.step()
    optimizer.step()
    assert all(map(torch.equal, params, others))
