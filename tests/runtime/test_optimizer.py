"""Adopted optimizers against plain torch: equal bits for every option, wherever the tensors live, and torch's own surface."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zinf_compile.runtime import native
from zinf_compile.runtime.optimizer import AdoptedOptimizer

from zinf_compile.errors import StoreError, Unsupported

EIO, SLOW = 2, 5  # zinf_fault_inject


class Disk:
    """Mapped tensors of one store, by the engine's C interface."""

    def __init__(self, directory: str) -> None:
        self.library = native.load()
        self.handle = self.library.zinf_store_open(directory.encode(), 512 << 20)
        assert self.handle > 0, self.library.zinf_last_error()
        self.blocks: list[int] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.zeros(shape, dtype=dtype)
        nbytes = numel * dtype.itemsize
        address = self.library.zinf_block_new(self.handle, nbytes)
        assert address, self.library.zinf_last_error()
        self.blocks.append(address)
        flat = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)
        return flat.zero_().view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        return self.zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())

    def close(self) -> None:
        for address in self.blocks:
            self.library.zinf_block_free(address)
        self.library.zinf_store_close(self.handle)


class Session:
    """States of the parameters in `on_disk` go to disk; counts what the optimizer reports."""

    def __init__(self, disk: Disk, on_disk: bool = True, tile: int = 8192, depth: int = 3) -> None:
        self.disk, self.on_disk, self.update_tile, self.update_depth = disk, on_disk, tile, depth
        self.staging = self.most_staging = 0
        self.updated: list[list[Tensor]] = []
        self.before = 0

    def home_of_state(self, param: Tensor, name: str) -> str:
        return "nvme" if self.on_disk else "device"

    def new_state(self, param: Tensor, like: Tensor, home: str) -> Tensor:
        return self.disk.zeros(tuple(like.shape), like.dtype) if home == "nvme" else torch.zeros_like(like)

    def before_update(self) -> None:
        self.before += 1

    def after_update(self, params: list[Tensor]) -> None:
        self.updated.append(list(params))

    def account(self, nbytes: int) -> None:
        self.staging += nbytes
        self.most_staging = max(self.most_staging, self.staging)


@pytest.fixture
def disk(tmp_path: Any) -> Iterator[Disk]:
    d = Disk(str(tmp_path))
    yield d
    d.close()


@pytest.fixture(scope="module")
def module_disk(tmp_path_factory: Any) -> Iterator[Disk]:
    d = Disk(str(tmp_path_factory.mktemp("store")))
    yield d
    d.close()


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def twins(shapes: list[tuple[int, ...]], disk: Disk | None, dtype: torch.dtype = torch.float32) -> tuple[list, list]:
    """Equal parameters twice: plain ones, and ones that live on disk (every other one where disk is given)."""
    plain, ours = parameters(shapes, dtype), parameters(shapes, dtype)
    if disk is not None:
        ours = [nn.Parameter(disk.copy(p)) if i % 2 == 0 else p for i, p in enumerate(ours)]
    return plain, ours


def set_gradients(*lists: list[nn.Parameter], seed: int, disk: Disk | None = None, skip: int = -1) -> None:
    """Equal random gradients; the last list's go to disk where `disk` is given. skip: this parameter has none."""
    generator = torch.Generator().manual_seed(seed)
    for i, params in enumerate(zip(*lists)):
        grad = torch.randn(params[0].shape, generator=generator, dtype=torch.float64).to(params[0].dtype) * 10 ** (i % 3 - 1)
        for p in params:
            p.grad = None if i == skip else grad.clone()
        if disk is not None and i != skip:
            params[-1].grad = disk.copy(grad)


def bits(t: Tensor) -> Tensor:
    return torch.nan_to_num(t.detach()).clone()


def assert_equal(theirs: torch.optim.Optimizer, ours: torch.optim.Optimizer) -> None:
    """Parameters, and every state under the same keys in the same order, have equal bits."""
    for a, b in zip(theirs.param_groups, ours.param_groups, strict=True):
        for p, q in zip(a["params"], b["params"], strict=True):
            assert torch.equal(bits(p), bits(q)), (bits(p) - bits(q)).abs().max()
            s, t = theirs.state.get(p, {}), ours.state.get(q, {})
            assert list(s) == list(t)
            for key in s:
                assert s[key].dtype == t[key].dtype and torch.equal(bits(s[key]), bits(t[key])), key


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
    from zinf_compile.runtime.optimizer_native import ADAM, CANDIDATES, FMA, SEPARATE

    for kind in (ADAM, 1):
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


# ---- torch's surface --------------------------------------------------------------------------------------------------


def pair(disk: Disk, kind: type = torch.optim.AdamW, **options: Any) -> tuple[Any, ...]:
    plain, ours = twins([(300,), (20, 30), (5,)], disk)
    return plain, ours, kind(plain, **options), kind(ours, **options)


def train(plain: list, ours: list, theirs: Any, adopted: Any, steps: int, seed: int = 0, after: tuple = ()) -> None:
    for step in range(steps):
        set_gradients(plain, ours, seed=seed + step)
        theirs.step()
        adopted.step()
        for scheduler in after:
            scheduler.step()


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


# ---- out of core ------------------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))


def mapped_bytes() -> int:
    with open("/proc/self/status") as f:
        return sum(int(line.split()[1]) * 1024 for line in f if line.startswith(("RssFile", "RssShmem")))


class PeakAnonymous:
    """The most anonymous memory this process holds while the block runs, looked at every millisecond."""

    def __enter__(self) -> PeakAnonymous:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()


def on_disk_adamw(disk: Disk, count: int, numel: int, **session: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer, AdoptedOptimizer]:
    params = [nn.Parameter(disk.zeros((numel,))) for _ in range(count)]
    for p in params:
        p.grad = disk.zeros((numel,))
        p.grad.fill_(1.0)
    optimizer = torch.optim.AdamW(params)
    handle = AdoptedOptimizer(optimizer, Session(disk, **session))
    optimizer.step()
    return params, optimizer, handle


def drop(disk: Disk) -> None:
    for address in disk.blocks:
        disk.library.zinf_block_drop(address)


def test_memory_stays_at_the_staging_buffers(disk: Disk) -> None:
    tile, depth, slack = 1 << 20, 3, 6 << 20
    _, optimizer, handle = on_disk_adamw(disk, 4, 2 << 20, tile=tile, depth=depth)  # 128 MiB of tensors
    drop(disk)
    anonymous, mapped = anonymous_bytes(), mapped_bytes()
    with PeakAnonymous() as measured:
        optimizer.step()
    staging = handle.session.most_staging  # type: ignore[attr-defined]
    assert staging == handle.last_step.staging_bytes == 4 * tile * depth
    assert staging / 2 < measured.peak - anonymous < staging + slack
    assert anonymous_bytes() - anonymous < slack  # the staging memory is given back
    assert mapped_bytes() - mapped < slack  # no page of a block has been touched through its mapping


def test_bytes_moved_are_four_reads_and_three_writes(disk: Disk) -> None:
    count, numel = 3, 100_000
    _, optimizer, _ = on_disk_adamw(disk, count, numel, tile=1 << 16)
    before = native.io_stats(disk.library)
    optimizer.step()
    after = native.io_stats(disk.library)
    assert after["bytes_read"] - before["bytes_read"] == 4 * 4 * count * numel
    assert after["bytes_written"] - before["bytes_written"] == 3 * 4 * count * numel


@pytest.mark.parametrize("nth", [1, 6, 9, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_disk_fault_is_raised_and_names_the_parameter(disk: Disk, nth: int, dtype: torch.dtype) -> None:
    ours = [nn.Parameter(disk.copy(p)) for p in parameters([(10_000,), (10_000,)], dtype)]
    optimizer = torch.optim.AdamW([("first", ours[0]), ("second", ours[1])])
    session = Session(disk)
    AdoptedOptimizer(optimizer, session)
    set_gradients(ours, seed=0)
    optimizer.step()
    disk.library.zinf_fault_inject(EIO, nth)
    try:
        with pytest.raises(StoreError, match="stopped at parameter '(first|second)'.*param_groups.0.*(read|write).*last checkpoint"):
            optimizer.step()
    finally:
        disk.library.zinf_fault_inject(0, 0)
    assert session.staging == 0 and len(session.updated) == 2
    optimizer.step()  # the disk works again


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_interrupt_waits_for_the_step(disk: Disk, dtype: torch.dtype) -> None:
    plain, ours = twins([(20_000,), (20_000,)], disk, dtype)
    theirs, adopted = torch.optim.AdamW(plain, foreach=False), torch.optim.AdamW(ours)
    AdoptedOptimizer(adopted, Session(disk))
    train(plain, ours, theirs, adopted, 1)
    set_gradients(plain, ours, seed=3)
    theirs.step()
    disk.library.zinf_fault_inject(SLOW, 5)  # every system call takes 5 ms more: the step lasts 100 ms or so
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            adopted.step()
    finally:
        disk.library.zinf_fault_inject(0, 0)
        timer.join()
    assert_equal(theirs, adopted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
