"""Adopted optimizers give torch's bits for every option, dtype and layout, wherever the tensors live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from zinf_compile.runtime.optimizer import AdoptedOptimizer
from zinf_compile.runtime.optimizer_native import ADAM, CANDIDATES, FMA, SEPARATE, SGD

from .optimizer_twins import (
    Disk,
    Session,
    assert_equal,
    parameters,
    set_gradients,
    twins,
)

SHAPES = [(7,), (0,), (33, 65), (1,), (3, 5, 7), (5000,)]


@st.composite
def adam_options(draw: Any) -> tuple[type, dict[str, Any]]:
    kind = draw(st.sampled_from([torch.optim.AdamW, torch.optim.Adam]))
    lr = draw(st.sampled_from([1e-3, 0.1]))
    options = {
        "lr": draw(st.sampled_from([lr, torch.tensor(lr), torch.tensor([lr]), torch.tensor(lr, dtype=torch.float64)])),
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.3, 0.99), (torch.tensor(0.9), torch.tensor(0.99))])),
        "eps": draw(st.sampled_from([1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0, 0.01, 0.3])),
        "amsgrad": draw(st.booleans()),
        "maximize": draw(st.booleans()),
    }
    if kind is torch.optim.Adam:
        options["decoupled_weight_decay"] = draw(st.booleans())
    return kind, options


@st.composite
def sgd_options(draw: Any) -> tuple[type, dict[str, Any]]:
    momentum = draw(st.sampled_from([0, 0.9, 0.5]))
    nesterov = draw(st.booleans()) and momentum > 0
    options = {
        "lr": draw(st.sampled_from([0.1, 1e-3, torch.tensor(0.03)])),
        "momentum": momentum,
        "dampening": 0 if nesterov else draw(st.sampled_from([0, 0.1])),
        "nesterov": nesterov,
        "weight_decay": draw(st.sampled_from([0, 0.01])),
        "maximize": draw(st.booleans()),
    }
    return torch.optim.SGD, options


@pytest.mark.parametrize("fused", [False, True])
@given(choice=st.one_of(adam_options(), sgd_options()), on_disk=st.booleans(), tile=st.sampled_from([4096, 16384]), depth=st.integers(1, 5))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_every_option_gives_equal_bits(module_disk: Disk, fused: bool, choice: Any, on_disk: bool, tile: int, depth: int) -> None:
    kind, options = choice
    disk = module_disk if on_disk else None
    plain, ours = twins(SHAPES, disk)
    theirs = kind(plain, foreach=False, **options) if not fused else kind(plain, fused=True, **options)
    adopted = kind(ours, fused=fused, **options)
    session = Session(module_disk, on_disk, tile, depth)
    handle = AdoptedOptimizer(adopted, session)
    for step in range(5):
        # torch's fused SGD fails when only some parameters have a momentum buffer
        skip = -1 if fused and kind is torch.optim.SGD else step % 4
        set_gradients(plain, ours, seed=step, disk=disk, skip=skip)
        theirs.step()
        adopted.step()
    assert_equal(theirs, adopted)
    assert handle.last_step.native == len(SHAPES) - (skip >= 0) and handle.last_step.torch == 0
    assert session.staging == 0 and (session.most_staging > 0) == on_disk
    assert session.most_staging <= 5 * tile * depth


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind, options", [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})])
def test_large_odd_tensor_with_threads(disk: Disk, fused: bool, kind: type, options: dict) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        plain, ours = twins([(1_000_003,), (250_001,)], disk)
        theirs, adopted = kind(plain, fused=fused, **options), kind(ours, fused=fused, **options)
        handle = AdoptedOptimizer(adopted, Session(disk, tile=1 << 20))
        for step in range(2):
            set_gradients(plain, ours, seed=step)
            theirs.step()
            adopted.step()
        assert handle.last_step.native == 2
        assert_equal(theirs, adopted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind, options", [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.SGD, {})])
@pytest.mark.parametrize("on_disk", [False, True])
def test_other_dtypes_run_tiled_with_equal_bits(disk: Disk, dtype: torch.dtype, kind: type, options: dict, on_disk: bool) -> None:
    shapes = [(9000,), (7,), (0,)]
    plain, ours = twins(shapes, disk if on_disk else None, dtype)
    theirs, adopted = kind(plain, foreach=False, **options), kind(ours, **options)
    handle = AdoptedOptimizer(adopted, Session(disk, on_disk))
    for step in range(3):
        set_gradients(plain, ours, seed=step)
        theirs.step()
        adopted.step()
    assert_equal(theirs, adopted)
    assert (handle.last_step.native, handle.last_step.tiled, handle.last_step.torch) == (0, 3, 0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind, options", [(torch.optim.Adam, {"weight_decay": 0.1}), (torch.optim.SGD, {"momentum": 0.9})])
def test_tiled_where_rounding_is_unknown(disk: Disk, monkeypatch: pytest.MonkeyPatch, fused: bool, kind: type, options: dict) -> None:
    plain, ours = twins([(20_000,), (11,)], disk)
    theirs, adopted = kind(plain, fused=fused, **options), kind(ours, fused=fused, **options)
    handle = AdoptedOptimizer(adopted, Session(disk))
    monkeypatch.setattr(handle.native, "rounding", lambda kind, fused: None)
    for step in range(3):
        set_gradients(plain, ours, seed=step)
        theirs.step()
        adopted.step()
    assert handle.last_step.tiled == 2
    assert_equal(theirs, adopted)


def test_self_check_refuses_wrong_rounding(disk: Disk) -> None:
    """A way of rounding that differs from torch's is found out: at least one candidate of each list is refused."""
    handle = AdoptedOptimizer(torch.optim.SGD(parameters([(1,)]), lr=0.1), Session(disk))
    for kind in (ADAM, SGD):
        chosen = handle.native.rounding(kind, False)
        assert chosen is not None
        wrong = next(c for c in CANDIDATES[False] if c.code == (SEPARATE if chosen.code == FMA else FMA))
        assert handle.native.equals_torch(kind, False, chosen) and not handle.native.equals_torch(kind, False, wrong)


def test_layouts(disk: Disk) -> None:
    """channels_last runs natively where the gradient agrees; transposed and disagreeing ones are left to torch, all right."""

    def build() -> list[nn.Parameter]:
        a, b, c = parameters([(4, 6, 5, 5), (30, 20), (64, 64)])
        return [nn.Parameter(a.detach().to(memory_format=torch.channels_last)), nn.Parameter(b.detach().t()), nn.Parameter(c.detach()[::2, ::2])]

    plain, ours = build(), build()
    theirs, adopted = torch.optim.AdamW(plain, foreach=False), torch.optim.AdamW(ours)
    handle = AdoptedOptimizer(adopted, Session(disk))
    for step in range(3):
        set_gradients(plain, ours, seed=step)
        for p in (plain[0], ours[0]):
            assert p.grad is not None
            p.grad = p.grad.to(memory_format=torch.channels_last)
        theirs.step()
        adopted.step()
    assert_equal(theirs, adopted)
    assert handle.last_step.native == 1 and handle.last_step.torch == 2
    assert adopted.state[ours[0]]["exp_avg"].stride() == ours[0].stride()
