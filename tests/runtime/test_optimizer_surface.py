"""An adopted optimizer keeps torch's surface: schedulers, groups, hooks, closures, checkpoints, copies, AMP."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zinf_compile.errors import Unsupported
from zinf_compile.runtime.optimizer import AdoptedOptimizer

from .optimizer_twins import (
    Disk,
    Session,
    assert_equal,
    bits,
    pair,
    parameters,
    set_gradients,
    train,
    twins,
)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("schedule", ["lambda", "onecycle"])
@pytest.mark.filterwarnings("error")
def test_schedulers_before_and_after_adoption(disk: Disk, early: bool, schedule: str) -> None:
    plain, ours, theirs, adopted = pair(disk, lr=0.01)

    def make(optimizer: Any) -> Any:
        if schedule == "lambda":
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.8**e)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)

    schedulers = [make(theirs)]
    if early:
        schedulers.append(make(adopted))
    handle = AdoptedOptimizer(adopted, Session(disk))
    if not early:
        schedulers.append(make(adopted))
    train(plain, ours, theirs, adopted, 6, after=tuple(schedulers))
    assert handle.last_step.native == 3
    assert_equal(theirs, adopted)
    assert theirs.param_groups[0]["lr"] == adopted.param_groups[0]["lr"] != 0.01


def test_live_edits_and_added_groups(disk: Disk) -> None:
    plain, ours = twins([(300,), (20, 30), (5,), (9,)], disk)
    theirs, adopted = (torch.optim.SGD([{"params": p[:1]}, {"params": p[1:3], "weight_decay": 0.1}], lr=0.1, momentum=0.9) for p in (plain, ours))
    AdoptedOptimizer(adopted, Session(disk))
    train(plain, ours, theirs, adopted, 2)
    for optimizer, params in ((theirs, plain), (adopted, ours)):
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.param_groups[1]["momentum"] = 0.5
        optimizer.add_param_group({"params": params[3:], "nesterov": True})
    train(plain, ours, theirs, adopted, 2, seed=7)
    assert_equal(theirs, adopted)


def test_closure_hooks_and_profiler(disk: Disk) -> None:
    plain, ours, theirs, adopted = pair(disk)
    session = Session(disk)
    AdoptedOptimizer(adopted, session)
    calls: list[str] = []
    adopted.register_step_pre_hook(lambda o, a, k: calls.append("pre"))
    adopted.register_step_post_hook(lambda o, a, k: calls.append(f"post {o.state[ours[0]]['step'].item():.0f}"))
    for optimizer, params in ((theirs, plain), (adopted, ours)):

        def closure(optimizer: Any = optimizer, params: Any = params) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = sum((p**3).sum() for p in params)
            loss.backward()
            return loss

        with torch.profiler.profile() as profile:
            losses = [optimizer.step(closure).item() for _ in range(3)]
        assert "Optimizer.step#AdamW.step" in {e.key for e in profile.key_averages()}
        assert losses[0] != losses[2]
    assert calls == ["pre", "post 1", "pre", "post 2", "pre", "post 3"]
    assert_equal(theirs, adopted)
    assert session.before == 3 and [len(u) for u in session.updated] == [3, 3, 3]


@pytest.mark.parametrize("kind, options", [(torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})])
def test_state_dict_both_ways(disk: Disk, kind: type, options: dict) -> None:
    plain, ours, theirs, adopted = pair(disk, kind, **options)
    handle = AdoptedOptimizer(adopted, Session(disk))
    train(plain, ours, theirs, adopted, 2)
    saved = copy.deepcopy(adopted.state_dict())
    fresh_params = [nn.Parameter(p.detach().clone()) for p in ours]
    fresh = kind(fresh_params, **options)  # ours into plain torch
    fresh.load_state_dict(saved)
    assert_equal(theirs, fresh)
    train(plain, ours, theirs, adopted, 1, seed=11)
    adopted.load_state_dict(copy.deepcopy(theirs.state_dict()))  # plain torch's into ours
    key = "exp_avg" if kind is torch.optim.AdamW else "momentum_buffer"
    assert all(handle.native.is_block(adopted.state[p][key]) for p in ours)
    train(plain, ours, theirs, adopted, 2, seed=20)
    assert_equal(theirs, adopted)


def test_adopting_a_started_optimizer_and_release(disk: Disk) -> None:
    plain, ours, theirs, adopted = pair(disk)
    train(plain, ours, theirs, adopted, 2)
    handle = AdoptedOptimizer(adopted, Session(disk))
    assert all(handle.native.is_block(adopted.state[p]["exp_avg_sq"]) for p in ours)
    train(plain, ours, theirs, adopted, 1, seed=5)
    with pytest.raises(Unsupported, match="adopted by another model"):
        AdoptedOptimizer(adopted, Session(disk))
    handle.release()
    train(plain, ours, theirs, adopted, 1, seed=6)  # torch's own step on mapped states
    assert_equal(theirs, adopted)
    AdoptedOptimizer(adopted, Session(disk))


def test_same_object_and_plain_copies(disk: Disk) -> None:
    plain, ours, theirs, adopted = pair(disk)
    AdoptedOptimizer(adopted, Session(disk))
    train(plain, ours, theirs, adopted, 1)
    assert type(adopted) is torch.optim.AdamW
    for twin in (copy.deepcopy(adopted), pickle.loads(pickle.dumps(adopted))):
        assert type(twin) is torch.optim.AdamW and "_init_group" not in vars(twin)
        params = twin.param_groups[0]["params"]
        set_gradients(plain, params, seed=9)
        before = [bits(p) for p in params]
        twin.step()
        assert all(not torch.equal(b, bits(p)) for b, p in zip(before, params))
    set_gradients(plain, ours, seed=9)
    theirs.step()
    adopted.step()
    assert_equal(theirs, adopted)


def test_amp_scaling(disk: Disk) -> None:
    """GradScaler's protocol for fused optimizers: grad_scale divides, found_inf skips the step."""
    plain, ours, theirs, adopted = pair(disk, fused=True)
    AdoptedOptimizer(adopted, Session(disk))
    for step, found in enumerate([0.0, 0.0, 1.0, 0.0]):
        set_gradients(plain, ours, seed=step)
        for optimizer in (theirs, adopted):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(found)
            optimizer.step()
    assert_equal(theirs, adopted)
    assert adopted.state[ours[0]]["step"].item() == 3


def test_grad_scaler(disk: Disk) -> None:
    for fused in (False, True):
        plain, ours, theirs, adopted = pair(disk, torch.optim.SGD, lr=0.1, momentum=0.9, fused=fused)
        AdoptedOptimizer(adopted, Session(disk))
        for optimizer, params in ((theirs, plain), (adopted, ours)):
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            for step in range(4):
                optimizer.zero_grad()
                loss = sum((p**2).sum() for p in params) * (float("inf") if step == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert_equal(theirs, adopted)


def test_sparse_and_differentiable_are_torchs(disk: Disk) -> None:
    plain, ours = ([nn.Parameter(torch.ones(10, 4)), nn.Parameter(torch.ones(3))] for _ in range(2))
    theirs, adopted = torch.optim.SGD(plain, lr=0.1), torch.optim.SGD(ours, lr=0.1)
    handle = AdoptedOptimizer(adopted, Session(disk))
    for optimizer, (table, bias) in ((theirs, plain), (adopted, ours)):
        (nn.functional.embedding(torch.tensor([1, 3, 3]), table, sparse=True).sum() + bias.sum()).backward()
        optimizer.step()
    assert_equal(theirs, adopted)
    assert handle.last_step.torch == 1 and handle.last_step.native == 1
    table = nn.Parameter(torch.ones(10, 4))
    adam = torch.optim.AdamW([table])
    AdoptedOptimizer(adam, Session(disk))
    nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        adam.step()


def test_what_cannot_be_adopted(disk: Disk) -> None:
    class MyAdam(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Renamed(torch.optim.AdamW):
        pass

    params = parameters([(3,)])
    for optimizer in (torch.optim.LBFGS(params), torch.optim.SparseAdam(params), torch.optim.RMSprop(params), MyAdam(params)):
        with pytest.raises(Unsupported, match=f"{type(optimizer).__name__}.*don't pass it as optimizer="):
            AdoptedOptimizer(optimizer, Session(disk))
    AdoptedOptimizer(Renamed(params), Session(disk))


def test_autograd_notices_the_update(disk: Disk) -> None:
    _, ours, _, adopted = pair(disk)
    AdoptedOptimizer(adopted, Session(disk))
    loss = sum((p * p).sum() for p in ours)
    loss.backward(retain_graph=True)
    adopted.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
