"""Adoption of torch.optim optimizers: the same object, whose step() runs as fused kernels on tensors in memory or on disk.

torch's `Adam.step` and `SGD.step` collect a group's tensors in `self._init_group` and hand them to a functional optimizer.
Adoption puts an `_init_group` of its own on the *instance*: it takes the parameters it can update itself, leaves the lists
without them, and runs all of them in one pipeline when the last group comes. So everything around it stays torch's: the class,
hooks, closures, profiler ranges, LR schedulers made before or after, `state_dict`, `add_param_group`; a pickle or a deep copy
is the plain optimizer (torch pickles neither instance methods nor hooks).

Three ways for a parameter, chosen at each step:
  native  float32, dense: csrc/cpu_optimizer.cpp, equal bits to torch's for-loop (or to its fused kernel with fused=True)
  tiled   other dtypes, or a machine whose rounding isn't known: torch's functional optimizer on tiles, just as exact
  torch   sparse gradients, differentiable, capturable, tensor subclasses, gradients laid out unlike their parameter

`foreach=True` computes the for-loop's values on CPU. With GradScaler and fused=True the gradient is unscaled on the fly; unlike
torch's kernel, p.grad keeps its scaled values. An interrupt (Ctrl-C) during the update is delivered when the step is complete:
a step applied to half of the parameters could be neither continued nor repeated.
"""

from __future__ import annotations

import ctypes
import inspect
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from ..errors import StoreError, Unsupported
from . import optimizer_native as jobs
from .optimizer_native import NativeUpdates, UpdateError, UpdateJob
from .optimizer_tiled import run_tiled, torch_update


class Session(Protocol):
    """What an adopted optimizer asks of the session that owns the parameters."""

    @property
    def update_tile(self) -> int:
        """Bytes of one staging buffer."""

    @property
    def update_depth(self) -> int:
        """Sets of staging buffers in flight."""

    def home_of_state(self, param: Tensor, name: str) -> str:
        """"device" or "nvme" for a state such as exp_avg; "device" for parameters that aren't the session's."""

    def new_state(self, param: Tensor, like: Tensor, home: str) -> Tensor:
        """Zeros of like's shape and dtype: a RAM tensor, or a mapped block where home is "nvme"."""

    def before_update(self) -> None:
        """Called before the first byte is read: gradients must have reached their homes."""

    def after_update(self, params: Sequence[Tensor]) -> None:
        """Called once the update has ended, also when it failed: working copies of these parameters are stale."""

    def account(self, nbytes: int) -> None:
        """`nbytes` of staging memory outside of the allocator are taken (> 0) or returned (< 0)."""


@dataclass(frozen=True)
class StepCounts:
    """How many parameters the last step updated in which way, and the staging memory it used (bytes)."""

    native: int = 0
    tiled: int = 0
    torch: int = 0
    staging_bytes: int = 0


@dataclass
class _Entry:
    """One parameter of the step in progress."""

    param: Tensor
    grad: Tensor
    group: dict[str, Any]
    where: str
    states: list[Tensor]
    first: bool
    native: bool


class AdoptedOptimizer:
    """Keeps `optimizer` adopted until `release`. Holds the optimizer weakly; the optimizer holds this."""

    def __init__(self, optimizer: Optimizer, session: Session, library: ctypes.CDLL | None = None) -> None:
        """library: the loaded engine; None: runtime.native's.

        Raises: Unsupported for an optimizer that is not Adam, AdamW or SGD, and for one that is adopted already.
        """
        self.kind = _kind(optimizer)
        if library is None:
            from . import native  # compiles at first use, so not before it is needed

            library = native.load()
        self.session = session
        self.native = NativeUpdates(library)
        self.last_step = StepCounts()
        self._optimizer = weakref.ref(optimizer)
        self._entries: list[_Entry] = []
        self._left_to_torch: list[Tensor] = []
        optimizer.__dict__["_init_group"] = self._init_group
        self._load_hook = optimizer.register_load_state_dict_post_hook(lambda _: self.move_states_home())
        self.move_states_home()

    def release(self) -> None:
        """Give step() back to torch. States stay where they are."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.__dict__.pop("_init_group", None)
        self._load_hook.remove()

    def alive(self) -> Optimizer | None:
        """The optimizer, None once user code has dropped it."""
        return self._optimizer()

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("the adopted optimizer no longer exists")
        return optimizer

    def move_states_home(self) -> None:
        """Move states that exist already (a resumed optimizer, load_state_dict) to the homes that the session gives them."""
        for param, states in self.optimizer.state.items():
            if not _ours(param):
                continue
            for name, value in states.items():
                if not isinstance(value, Tensor) or name == "step" or value.shape != param.shape or value.numel() == 0:
                    continue
                home = self.session.home_of_state(param, name)
                if (home == "nvme") != self.native.is_block(value):
                    moved = self._new_state(param, value, home)
                    states[name] = moved.copy_(value.detach())

    def _new_state(self, param: Tensor, like: Tensor, home: str) -> Tensor:
        state = self.session.new_state(param, like, home)
        # As zeros_like(preserve_format): a dense layout such as channels_last is kept.
        return state.as_strided(like.shape, like.stride()) if state.stride() != like.stride() and _dense(like) else state

    # ---- the step -----------------------------------------------------------------------------------------------------

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Stand in for torch's `_init_group`: `lists` receive only the parameters left to torch."""
        optimizer = self.optimizer
        if group is optimizer.param_groups[0]:
            self._entries, self._left_to_torch = [], []
        left = []
        number = next(i for i, g in enumerate(optimizer.param_groups) if g is group)
        skip = self._found_inf()
        for i, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            entry = self._entry(param, group, f"parameter {_name(group, i)} of param_groups[{number}]")
            if entry is None:
                left.append(param)
            elif not skip:
                self._entries.append(entry)
        self._left_to_torch += left
        result = type(optimizer)._init_group(optimizer, {**group, "params": left}, *lists)  # type: ignore[attr-defined]
        if group is optimizer.param_groups[-1]:
            entries, self._entries = self._entries, []
            left_to_torch, self._left_to_torch = self._left_to_torch, []
            with _interrupts_deferred():
                self._update(entries, left_to_torch)
        return result

    def _entry(self, param: Tensor, group: dict[str, Any], where: str) -> _Entry | None:
        """The parameter's part of the step, its states created as torch creates them. None: it is left to torch."""
        grad = param.grad
        assert grad is not None
        lr = group["lr"]
        if (
            not _ours(param)
            or type(grad) is not Tensor
            or grad.layout is not torch.strided
            or group.get("differentiable")
            or group.get("capturable")
            or (isinstance(lr, Tensor) and (lr.requires_grad or lr.device.type != "cpu"))
            or isinstance(group["weight_decay"], Tensor)
            or not _dense(param)
            or not _same_layout(param, grad)
            or grad.dtype != param.dtype
            or not (param.is_floating_point() or param.is_complex())
            or (group["fused"] and param.is_complex())
        ):
            return None
        states, first = self._adam_states(param, group) if self.kind == "adam" else self._sgd_states(param, grad, group)
        if not all(s.dtype == param.dtype and _same_layout(param, s) for s in states):
            return None
        native = param.dtype == torch.float32 and self._rounding(group) is not None and not _lazy_bits(param, grad, *states)
        return _Entry(param, grad, group, where, states, first, native)

    def _rounding(self, group: dict[str, Any]) -> jobs.Rounding | None:
        return self.native.rounding(jobs.ADAM if self.kind == "adam" else jobs.SGD, bool(group["fused"]))

    def _adam_states(self, param: Tensor, group: dict[str, Any]) -> tuple[list[Tensor], bool]:
        state = self.optimizer.state[param]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
        if len(state) == 0:
            fresh = {"step": torch.tensor(0.0, dtype=_step_dtype(group))}
            for name in names:
                fresh[name] = self._new_state(param, param, self.session.home_of_state(param, name))
            state.update(fresh)  # at once: an interrupt leaves none of them or all
        return [state[name] for name in names], False

    def _sgd_states(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> tuple[list[Tensor], bool]:
        if group["momentum"] == 0:
            return [], False
        state = self.optimizer.state[param]
        first = state.get("momentum_buffer") is None
        if first:
            if self._found_inf():
                return [], False  # the step is skipped: torch creates the buffer from the first gradient that counts
            state["momentum_buffer"] = self._new_state(param, grad, self.session.home_of_state(param, "momentum_buffer"))
        return [state["momentum_buffer"]], first

    def _found_inf(self) -> bool:
        found = getattr(self.optimizer, "found_inf", None)
        return found is not None and bool(found)

    def _update(self, entries: list[_Entry], left_to_torch: list[Tensor]) -> None:
        """Update all entries; on return everything is in its home."""
        params = [e.param for e in entries]
        staging = 0
        self.session.before_update()
        try:
            native = [e for e in entries if e.native]
            if native:
                staging = self._update_native(native)
            for e in entries:
                if not e.native:
                    staging = max(staging, self._update_tiled(e))
        finally:
            written = [t for e in entries for t in (e.param, *e.states)]
            torch.autograd.graph.increment_version(written)  # autograd notices writes to what it has saved
            self.session.after_update(params + left_to_torch)
        self.last_step = StepCounts(len(native), len(entries) - len(native), len(left_to_torch), staging)

    def _update_native(self, entries: list[_Entry]) -> int:
        scale = getattr(self.optimizer, "grad_scale", None)
        grad_scale = None if scale is None else float(scale)
        steps = [self.optimizer.state[e.param]["step"] for e in entries] if self.kind == "adam" else []
        for step in steps:
            step += 1
        templates: dict[tuple[int, Any], UpdateJob] = {}
        batch = []
        for i, e in enumerate(entries):
            rounding = self._rounding(e.group)
            assert rounding is not None
            turn = steps[i].item() if steps else e.first
            template = templates.get((id(e.group), turn))
            if template is None:
                make = jobs.adam_template if self.kind == "adam" else jobs.sgd_template
                template = templates[id(e.group), turn] = make(e.group, turn, rounding, grad_scale)
            batch.append(jobs.bind(template, rounding.vector, e.param, e.grad, e.states))
        try:
            return self.native.run(
                batch, self.session.update_tile, self.session.update_depth, torch.get_num_threads(), self.session.account
            )
        except UpdateError as error:
            raise _failure(str(error), entries[error.job].where if error.job >= 0 else "the optimizer") from None

    def _update_tiled(self, e: _Entry) -> int:
        step = self.optimizer.state[e.param].get("step")
        update = torch_update(self.kind, e.group, step, getattr(self.optimizer, "grad_scale", None))
        try:
            staging = run_tiled(
                self.native, [e.param, e.grad, *e.states], update, e.first, self.session.update_tile, self.session.account
            )
        except RuntimeError as error:
            raise _failure(str(error), e.where) from error
        if step is not None:
            step += 1
        return staging


def _failure(message: str, where: str) -> StoreError:
    return StoreError(
        f"optimizer.step() stopped at {where}: {message}. Earlier parameters of this step are updated, later ones are not: "
        "free or replace the disk, then load the last checkpoint (model and optimizer)"
    )


def _kind(optimizer: Optimizer) -> str:
    """"adam" (Adam, AdamW) or "sgd". Raises Unsupported where step() might compute anything else."""
    name = type(optimizer).__name__
    for kind, base in (("adam", Adam), ("sgd", SGD)):
        if isinstance(optimizer, base):
            same = all(inspect.unwrap(getattr(type(optimizer), f)) is inspect.unwrap(getattr(base, f)) for f in ("step", "_init_group"))
            if not same:
                break
            if "_init_group" in optimizer.__dict__:
                raise Unsupported(f"this {name} is adopted by another model already: create one optimizer per compiled model, or call close() on the other")
            return kind
    raise Unsupported(
        f"optimizer={name} cannot be adopted: Adam, AdamW and SGD can, with their own step(). Create it as usual and don't pass "
        "it as optimizer=: it works on the model's parameters and gradients, wherever they are, only slower"
    )


def _name(group: dict[str, Any], i: int) -> str:
    names = group.get("param_names")
    return f"{names[i]!r}" if names else f"{i} (shape {tuple(group['params'][i].shape)})"


def _step_dtype(group: dict[str, Any]) -> torch.dtype:
    """As torch.optim: float64 steps only where the default dtype is float64 and the kernel isn't fused."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 and not group["fused"] else torch.float32


def _ours(param: Tensor) -> bool:
    """Plain CPU tensors; a subclass (DTensor, quantized weights) has arithmetic of its own."""
    return type(param) in (Tensor, torch.nn.Parameter) and param.device.type == "cpu" and param.layout is torch.strided


def _lazy_bits(*tensors: Tensor) -> bool:
    """Whether a tensor's memory isn't its value yet (lazy negation, conjugation)."""
    return any(t.is_neg() or t.is_conj() for t in tensors)


def _dense(t: Tensor) -> bool:
    """Whether the tensor's elements fill a gapless piece of memory, each once."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride()) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _same_layout(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    return all(size == 1 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride()))


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold back SIGINT's and SIGTERM's Python handlers until the block ends, then call them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers in the main thread only
        return
    arrived: list[tuple[int, Any]] = []
    handlers = {int(n): h for n in (signal.SIGINT, signal.SIGTERM) if callable(h := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, lambda n, frame: arrived.append((n, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)  # type: ignore[operator]
