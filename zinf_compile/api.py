"""`zinf_compile(model, mem_budget=...)`: the one call."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn

from . import capture
from .budget import MemBudget, default_budget, format_bytes, parse_budget
from .domain import Domain
from .errors import Unsupported
from .runtime.optimizer import AdoptedOptimizer
from .session import Session

logger = logging.getLogger("zinf_compile")

# The budget is the process's, and so is torch's CPU allocator: one planning domain, made at the first call.
_process_domain: list[Domain] = []


def _domain() -> Domain:
    if not _process_domain:
        domain = Domain()
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: domain.step_done())
        _process_domain.append(domain)
    return _process_domain[0]


def compile_model(
    model: nn.Module,
    mem_budget: int | str | MemBudget | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    store_dir: str | None = None,
    example_inputs: tuple[Any, ...] | dict[str, Any] | None = None,
    strict: bool = False,
) -> nn.Module:
    """Make `model`'s training and inference keep a memory budget. Returns `model`: same object, class and state-dict keys.

    Args:
        mem_budget: bytes that the process may hold above its base (interpreter, torch, traces): an int, "4GiB", or
            MemBudget(device=...). None, also as the device: what the process may still take, less 10 %; printed.
        optimizer: an AdamW, Adam or SGD over the model's parameters; it stays the same object, and its step() runs natively
            and out of core. Any other optimizer works without being handed over, only slower.
        store_dir: where to put what does not fit; default: the first directory with enough space.
        example_inputs: plan in this call rather than in the first forward.
        strict: raise where an allocation would pass the budget unplanned, instead of putting it on disk; and Unsupported after
            a call that ran no planned graph because Dynamo could not trace it, instead of going on in eager.

    Raises:
        ValueError: the budget is malformed. BudgetTooSmall (at the first forward, or here with example_inputs): nothing
        keeps the step under it; `.minimum` would. StoreError: the store cannot be made. Unsupported: names the construct.
    """
    if not isinstance(model, nn.Module):
        raise Unsupported(f"zinf_compile takes an nn.Module, not {type(model).__name__}: pass the module itself")
    show_progress()
    budget = _budget(mem_budget)
    devices = {p.device.type for p in model.parameters()} - {"cpu", "meta"}
    if devices:
        raise Unsupported(f"parameters on {', '.join(sorted(devices))}: this version runs on CPU; call model.cpu() first")
    if any(p.is_meta for p in model.parameters()):
        raise Unsupported("parameters on the meta device have no values: call model.to_empty(device='cpu') and load them first")
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_optimizer(optimizer, model)
    previous = model.__dict__.get("zinf")
    if isinstance(previous, Session):
        previous.close()
    session = Session(_domain(), model, budget, str(store_dir) if store_dir is not None else None, strict)
    model.__dict__["zinf"] = session
    try:
        if optimizer is not None:
            session.adopt(AdoptedOptimizer(optimizer, session))
        session.make_room()
        session.domain.limit_begins()
        capture.install(model, session, session.before_call, session.after_call)
        if example_inputs is not None:
            session.plan_with(example_inputs)
    except BaseException:
        session.close()
        raise
    return model


def show_progress() -> None:
    """Let progress lines reach the terminal of a program that has not set up logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Unsupported for an optimizer that updates nothing of this model, or whose steps are to be differentiated."""
    kind = type(optimizer).__name__
    given = [p for group in optimizer.param_groups for p in group["params"]]
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for p in given):
        raise Unsupported(
            f"optimizer={kind}: none of its {len(given)} parameters is one of {type(model).__name__}'s {len(own)}: make it from "
            "this model's parameters(), after anything that replaces them, or don't pass it as optimizer="
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Unsupported(
            f"optimizer={kind}(differentiable=True) cannot be adopted: its step is to be differentiated, and the engine's update "
            "has no gradient. Create it without differentiable, or don't pass it as optimizer=: then step() is torch's own"
        )


def _budget(mem_budget: int | str | MemBudget | None) -> int:
    if isinstance(mem_budget, MemBudget):
        if mem_budget.host is not None:
            raise ValueError("mem_budget: host= has no meaning where the device is the CPU: RAM is the device tier; leave it out")
        mem_budget = mem_budget.device
    if mem_budget is None:
        budget = default_budget()
        logger.info("zinf_compile: mem_budget not given: using %s", format_bytes(budget))
        return budget
    return parse_budget(mem_budget)
