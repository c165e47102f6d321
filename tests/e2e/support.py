"""Run one piece of training code on a model under zinf_compile and on its plain twin, and compare what it returns.

`run_both(make, pattern)` calls `pattern(model)` for both. The budget is the smallest that zinf_compile accepts for that
pattern: an absurd one is asked for first, and the `minimum` of the refusal is tried on a fresh model, so that every master
that can live on disk does.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zinf_compile import BudgetTooSmall, zinf_compile

WIDTH = 128  # features: a weight is 64 KiB, so that offloading one pays
MAX_TRIES = 8  # a later graph of the same pattern may need more than the first


def inputs(seed: int = 0, rows: int = 4, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def tower(layers: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Layers that make a model several times larger than what one of its operations needs."""
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())])


class MLP(nn.Module):
    """Linear layers `a`, `b`, a tower and `c`, and a scalar output: float32 [rows, width] -> []."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b, self.tower, self.c = nn.Linear(width, width), nn.Linear(width, width), tower(), nn.Linear(width, 1)

    def forward(self, x):
        return self.c(self.tower(torch.tanh(self.b(torch.relu(self.a(x)))))).sum()


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(ours: Any, plain: Any, path: str = "result") -> None:
    """Nested dicts, lists, tuples and tensors are equal, tensors bit for bit and in the same layout."""
    if torch.is_tensor(plain):
        assert torch.is_tensor(ours), f"{path}: {ours!r} is not a tensor"
        assert ours.layout == plain.layout and ours.dtype == plain.dtype and ours.shape == plain.shape, path
        x, y = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (ours, plain))
        assert torch.equal(x, y), f"{path}: largest difference {(x.double() - y.double()).abs().max().item():.3g}"
    elif isinstance(plain, dict):
        assert isinstance(ours, dict) and list(ours) == list(plain), f"{path}: keys {list(ours)} vs {list(plain)}"
        for key in plain:
            assert_equal(ours[key], plain[key], f"{path}[{key!r}]")
    elif isinstance(plain, (list, tuple)):
        assert type(ours) is type(plain) and len(ours) == len(plain), f"{path}: {ours!r} vs {plain!r}"
        for i, (x, y) in enumerate(zip(ours, plain)):
            assert_equal(x, y, f"{path}[{i}]")
    else:
        assert ours == plain, f"{path}: {ours!r} vs {plain!r}"


@dataclass
class Both:
    """What a pattern returned for either model, and the model under zinf_compile with the budget it ran under (bytes)."""

    ours: Any
    plain: Any
    model: nn.Module
    budget: int

    @property
    def bytes_moved(self) -> int:
        stats = self.model.zinf.stats()
        return stats["bytes_read"] + stats["bytes_written"]


class Runner:
    """Owns the models of one test; `close` releases their stores."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.models: list[nn.Module] = []

    def compiled(self, model: nn.Module, budget: int, **options: Any) -> nn.Module:
        wrapped = zinf_compile(model, budget, store_dir=str(self.store), **options)
        self.models.append(wrapped)
        return wrapped

    def at_minimum(self, make: Callable[[], nn.Module], pattern: Callable[[nn.Module], Any]) -> tuple[Any, nn.Module, int]:
        """(what `pattern` returned, the model, budget): under the smallest budget accepted throughout the pattern."""
        budget = 4096
        for _ in range(MAX_TRIES):
            torch._dynamo.reset()
            gc.collect()  # what earlier models left counts as memory of the process, and would raise the minimum
            try:
                model = self.compiled(build(make), budget)
                return call(pattern, model), model, budget
            except BudgetTooSmall as error:
                assert error.minimum > budget, f"minimum {error.minimum} isn't more than the {budget} that was refused"
                budget = error.minimum
            self.close()
        raise AssertionError(f"{MAX_TRIES} budgets, each the minimum named by the refusal before, were refused")

    def run_both(self, make: Callable[[], nn.Module], pattern: Callable[[nn.Module], Any], moves: bool = True) -> Both:
        """Compare bit for bit. moves: at least one byte must have crossed between memory and disk."""
        plain = call(pattern, build(make))
        ours, model, budget = self.at_minimum(make, pattern)
        both = Both(ours, plain, model, budget)
        assert_equal(ours, plain)
        if moves:
            assert both.bytes_moved > 0, f"nothing was moved under {budget} bytes"
        return both

    def close(self) -> None:
        for model in self.models:
            model.zinf.close()
        self.models.clear()
        gc.collect()


def call(pattern: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """Seeded the same for both, whatever building or compiling the model drew."""
    torch.manual_seed(1)
    result = pattern(model)
    assert not inspect.isgenerator(result)
    return result
