"""Jobs for the native optimizer kernels (csrc/cpu_optimizer.cpp), and the self-check that decides whether they may be used.

A job is one parameter's update: pointers to float32 memory or blocks, and the scalars of the step, computed here with the same
Python expressions as torch.optim, so that they round alike. How ATen's kernels round depends on its build and on the CPU;
`NativeUpdates.rounding` therefore tries the known ways on random bits against torch's own functional optimizers, and
answers None when none gives equal bits: the caller then runs torch's kernels on tiles (optimizer_tiled.py).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

ADAM, SGD = 0, 1
AMSGRAD, L2, MOMENTUM, FIRST, NESTEROV, UNSCALE = 1, 2, 4, 8, 16, 32  # zinf_update_flags
SEPARATE, FMA = 0, 1  # zinf_rounding


class UpdateJob(ctypes.Structure):
    """`zinf_update_job` of csrc/optimizer_kernels.h, which explains the fields."""

    _fields_ = [
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("state", ctypes.c_void_p * 3),
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("kind", "flags", "rounding", "mkl_sqrt")),
        ("tail", ctypes.c_int64),
        *(
            (name, ctypes.c_float)
            for name in (
                "sign",
                "grad_scale",
                "weight_decay",
                "decay",
                "lerp_weight",
                "beta2",
                "one_minus_beta2",
                "correction",
                "eps",
                "step_size",
                "momentum",
                "one_minus_dampening",
            )
        ),
    ]


class Rounding(NamedTuple):
    """How a process's ATen rounds: `code` of zinf_rounding, MKL's sqrt or not, and the vector length (elements) whose
    remainder torch's fused kernels treat in a loop of their own (1: there is none)."""

    code: int
    mkl_sqrt: int
    vector: int


CANDIDATES = {
    False: (Rounding(FMA, 1, 1), Rounding(FMA, 0, 1), Rounding(SEPARATE, 1, 1), Rounding(SEPARATE, 0, 1)),
    True: (Rounding(FMA, 0, 16), Rounding(FMA, 0, 8), Rounding(FMA, 0, 4), Rounding(FMA, 0, 1), Rounding(SEPARATE, 0, 1)),
}


def adam_template(group: dict[str, Any], step: float, rounding: Rounding, grad_scale: float | None) -> UpdateJob:
    """The scalars of step number `step` (1: the first) for Adam and AdamW; pointers are left empty."""
    lr, (beta1, beta2), weight_decay = _scalar(group["lr"]), map(_scalar, group["betas"]), float(group["weight_decay"])
    if group["fused"]:  # the fused kernel takes doubles; the for-loop computes with the tensors it was given
        lr, beta1, beta2 = float(lr), float(beta1), float(beta2)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    step_size = lr / correction1
    decoupled = bool(group["decoupled_weight_decay"]) and weight_decay != 0
    job = _template(ADAM, group, rounding, grad_scale)
    job.flags |= (AMSGRAD if group["amsgrad"] else 0) | (L2 if weight_decay != 0 and not decoupled else 0)
    job.weight_decay = weight_decay
    job.decay = float(1 - lr * weight_decay) if decoupled else 1.0
    job.lerp_weight = float(1 - (beta1.float() if isinstance(beta1, Tensor) else beta1))
    job.beta2, job.one_minus_beta2 = float(beta2), float(1 - beta2)
    job.correction = math.sqrt(correction2) if group["fused"] else float(correction2**0.5)
    job.eps, job.step_size = float(group["eps"]), float(-step_size)
    return job


def sgd_template(group: dict[str, Any], first: bool, rounding: Rounding, grad_scale: float | None) -> UpdateJob:
    """The scalars of a step of SGD. first: the momentum buffer is created by this step."""
    momentum, weight_decay = float(group["momentum"]), float(group["weight_decay"])
    job = _template(SGD, group, rounding, grad_scale)
    job.flags |= L2 if weight_decay != 0 else 0
    if momentum != 0:
        job.flags |= MOMENTUM | (FIRST if first else 0) | (NESTEROV if group["nesterov"] else 0)
    job.weight_decay, job.step_size = weight_decay, float(-_scalar(group["lr"]))
    job.momentum, job.one_minus_dampening = momentum, 1 - float(group["dampening"])
    return job


def bind(template: UpdateJob, vector: int, param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> UpdateJob:
    """A copy of `template` for one parameter. All tensors: float32, dense, with equal strides."""
    job = UpdateJob.from_buffer_copy(template)
    job.param, job.grad, job.numel = param.data_ptr(), grad.data_ptr(), param.numel()
    job.state = (ctypes.c_void_p * 3)(*(s.data_ptr() for s in states))
    job.tail = job.numel % vector
    return job


def _template(kind: int, group: dict[str, Any], rounding: Rounding, grad_scale: float | None) -> UpdateJob:
    job = UpdateJob(kind=kind, rounding=rounding.code, mkl_sqrt=rounding.mkl_sqrt)
    job.sign = -1.0 if group["maximize"] else 1.0
    if grad_scale is not None:
        job.flags, job.grad_scale = UNSCALE, grad_scale
    return job


def _scalar(x: Any) -> Any:
    return x.squeeze() if isinstance(x, Tensor) else x


class NativeUpdates:
    """The native library's optimizer functions, and what the self-check found about them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        library.zinf_last_error.restype = ctypes.c_char_p
        library.zinf_block_bytes.argtypes, library.zinf_block_bytes.restype = [pointer], integer
        library.zinf_update_apply.argtypes = [pointer, pointer, pointer, pointer, integer, integer]
        library.zinf_update_apply.restype = None
        sizes: list[Any] = [pointer, integer, integer, ctypes.c_int32]
        library.zinf_update_staging_bytes.argtypes, library.zinf_update_staging_bytes.restype = sizes, integer
        library.zinf_update_run.argtypes = [*sizes, ctypes.c_int32, pointer, ctypes.POINTER(integer)]
        library.zinf_update_run.restype = ctypes.c_int
        library.zinf_update_set_mkl.argtypes, library.zinf_update_set_mkl.restype = [pointer, pointer], None
        self.has_mkl = self._find_mkl()
        self._roundings: dict[tuple[int, bool], Rounding | None] = {}

    def _find_mkl(self) -> bool:
        """Hand MKL's vmsSqrt, which ATen calls where torch contains MKL, to the kernels."""
        for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
            path = Path(torch.__file__).parent / "lib" / name
            if path.exists():
                torch_library = ctypes.CDLL(str(path))
                functions = [getattr(torch_library, f, None) for f in ("vmsSqrt", "MKL_Set_Num_Threads_Local")]
                self.library.zinf_update_set_mkl(*(f and ctypes.cast(f, ctypes.c_void_p) for f in functions))
                return functions[0] is not None
        return False

    def is_block(self, tensor: Tensor) -> bool:
        """Whether the tensor starts at the start of a block of a store."""
        return self.library.zinf_block_bytes(tensor.data_ptr()) >= 0

    def rounding(self, kind: int, fused: bool) -> Rounding | None:
        """The way of rounding with which the native kernels equal torch's bit for bit; None: there is none."""
        key = (kind, fused)
        if key not in self._roundings:
            candidates = [r for r in CANDIDATES[fused] if self.has_mkl or not r.mkl_sqrt]
            self._roundings[key] = next((r for r in candidates if self.equals_torch(kind, fused, r)), None)
        return self._roundings[key]

    def equals_torch(self, kind: int, fused: bool, rounding: Rounding) -> bool:
        """Compare one update with torch's for random values, random bits and odd sizes."""
        trials = _adam_trials(fused, rounding) if kind == ADAM else _sgd_trials(fused, rounding)
        for template, tensors, torch_update in trials:
            ours = [t.clone() for t in tensors]
            torch_update(tensors)
            job = bind(template, rounding.vector, ours[0], ours[1], ours[2:])
            self.library.zinf_update_apply(ctypes.byref(job), job.param, job.grad, job.state, 0, job.numel)
            if not all(map(_same_bits, ours[:1] + ours[2:], tensors[:1] + tensors[2:])):
                return False
        return True

    def run(self, jobs: list[UpdateJob], tile_bytes: int, depth: int, threads: int, account: Callable[[int], None]) -> int:
        """Run all jobs, tiled and overlapped with the disk. Uninterruptible. Returns the bytes of staging memory used.

        account: called with those bytes before the run and with their negative after it.
        Raises: UpdateError with the failed job's index.
        """
        array = (UpdateJob * len(jobs))(*jobs)
        staging = self.library.zinf_update_staging_bytes(array, len(jobs), tile_bytes, depth)
        failed = ctypes.c_int64(-1)
        account(staging)
        try:
            rc = self.library.zinf_update_run(array, len(jobs), tile_bytes, depth, threads, None, ctypes.byref(failed))
        finally:
            account(-staging)
        if rc != 0:
            raise UpdateError(self.library.zinf_last_error().decode(), failed.value)
        return staging


class UpdateError(Exception):
    """A transfer of the update failed; `job` is the index of the job it belongs to, -1 if none."""

    def __init__(self, message: str, job: int) -> None:
        super().__init__(message)
        self.job = job


Trial = tuple[UpdateJob, list[Tensor], Callable[[list[Tensor]], None]]


def _adam_trials(fused: bool, rounding: Rounding) -> Iterator[Trial]:
    # decoupled, weight_decay, amsgrad, maximize, beta1, lr is a tensor
    options = [
        (True, 0.01, False, False, 0.9, False),
        (False, 0.01, True, True, 0.9, True),
        (False, 0.0, False, True, 0.3, False),
        (True, 0.1, True, False, 0.95, False),
    ]
    for seed, (decoupled, weight_decay, amsgrad, maximize, beta1, tensor_lr) in enumerate(options):
        group = {
            "lr": torch.tensor(3e-3) if tensor_lr else 3e-3,
            "betas": (beta1, 0.999),
            "eps": 1e-8,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "fused": fused,
            "decoupled_weight_decay": decoupled,
        }

        def update(t: list[Tensor], group: dict[str, Any] = group) -> None:
            options = {k: v for k, v in group.items() if k != "betas"}
            beta1, beta2 = group["betas"]
            maxima = t[4:5]
            adam([t[0]], [t[1].clone()], [t[2]], [t[3]], maxima, [torch.tensor(6.0)], foreach=False, beta1=beta1, beta2=beta2, **options)

        for numel in (1, 7, 12, 31, 4107):
            tensors = _random(numel, 5 if amsgrad else 4, seed)
            for second_moment in tensors[3:]:
                second_moment.abs_()
            yield adam_template(group, 7.0, rounding, None), tensors, update


def _sgd_trials(fused: bool, rounding: Rounding) -> Iterator[Trial]:
    # momentum, dampening, nesterov, weight_decay, maximize
    options = [(0.0, 0.0, False, 0.0, False), (0.9, 0.1, False, 0.01, True), (0.9, 0.0, True, 0.01, False), (0.5, 0.0, False, 0.0, False)]
    for seed, (momentum, dampening, nesterov, weight_decay, maximize) in enumerate(options):
        group = {
            "lr": 0.1,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "fused": fused,
        }

        def update(t: list[Tensor], group: dict[str, Any] = group) -> None:
            sgd([t[0]], [t[1].clone()], list(t[2:]) or [None], foreach=False, **group)

        for numel in (1, 7, 12, 31, 4107):
            yield sgd_template(group, False, rounding, None), _random(numel, 3 if momentum else 2, seed), update


def _random(numel: int, count: int, seed: int) -> list[Tensor]:
    """Tensors of values over some magnitudes, every seventh of them random bits (infinities, NaN, denormals)."""
    generator = torch.Generator().manual_seed(seed)  # the user's random numbers stay untouched
    tensors = []
    for _ in range(count):
        values = torch.randn(numel, generator=generator) * torch.exp(2 * torch.randn(numel, generator=generator))
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
        values[::7] = bits[::7]
        tensors.append(values)
    return tensors


def _same_bits(a: Tensor, b: Tensor) -> bool:
    equal = a.view(torch.int32) == b.view(torch.int32)
    return bool((equal | (a.isnan() & b.isnan())).all())
