"""Arguments of `zinf_compile(...)` that are checked before anything is captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zinf_compile import MemBudget, Unsupported, api, zinf_compile


@pytest.fixture
def compiled(tmp_path):
    models = []

    def make(model, budget=64 << 20, **options):
        models.append(model)
        return zinf_compile(model, budget, store_dir=str(tmp_path), **options)

    yield make
    for model in models:
        if "zinf" in model.__dict__:
            model.zinf.close()


@pytest.mark.parametrize("given", [None, MemBudget(), MemBudget(nvme="1GiB")], ids=["None", "MemBudget()", "only nvme"])
def test_no_device_budget_means_what_the_process_may_still_take(given, monkeypatch, compiled):
    monkeypatch.setattr(api, "default_budget", lambda: 123 << 20)
    assert compiled(nn.Linear(4, 4), given).zinf.budget == 123 << 20


def test_the_default_of_a_real_machine_is_a_size(compiled):
    assert compiled(nn.Linear(4, 4), MemBudget()).zinf.budget > 0


def test_a_host_budget_is_still_refused():
    with pytest.raises(ValueError, match="host="):
        zinf_compile(nn.Linear(4, 4), MemBudget(host="1GiB"))


def test_an_optimizer_over_another_models_parameters_is_refused(compiled):
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    stranger = torch.optim.AdamW(other.parameters())
    with pytest.raises(Unsupported, match=r"optimizer=AdamW: none of its 2 parameters is one of Linear's 2.*parameters\(\)"):
        compiled(model, optimizer=stranger)
    assert "zinf" not in model.__dict__
    assert "_init_group" not in stranger.__dict__, "the optimizer is as it was"


def test_a_refused_optimizer_leaves_an_earlier_compilation_alone(compiled):
    model = compiled(nn.Linear(4, 4))
    session = model.zinf
    with pytest.raises(Unsupported, match="none of its"):
        compiled(model, optimizer=torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1))
    assert model.zinf is session and not session.closed


def test_an_optimizer_over_some_of_the_parameters_is_adopted(compiled):
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([model.weight, other.bias])
    compiled(model, optimizer=optimizer)
    assert "_init_group" in optimizer.__dict__


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_differentiable_optimizer_is_refused(compiled, kind):
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(Unsupported, match=rf"{kind.__name__}\(differentiable=True\).*without differentiable"):
        compiled(model, optimizer=optimizer)
    compiled(model)  # the way out: not handed over
    assert optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.parametrize("given", ["adam", 3, torch.optim.Adagrad([nn.Parameter(torch.ones(1))])], ids=["text", "number", "Adagrad"])
def test_what_is_no_adoptable_optimizer_is_refused(compiled, given):
    with pytest.raises(Unsupported, match="optimizer="):
        compiled(nn.Linear(4, 4), optimizer=given)
