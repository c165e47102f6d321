"""The pipeline: an ordered tuple of passes, checked before it runs and after each pass.

A pass takes a graph and a plan, inserts one kind of op, and returns the graph: no choice, no device access, no printing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from ..errors import PlanMismatch
from ..schedule import Plan
from .binding import EVENT_KEY, Binding
from .insert_gather import insert_gather
from .insert_offload import insert_offload
from .insert_prefetch import insert_prefetch
from .insert_read_ahead import insert_read_ahead
from .insert_reduce_grad import insert_reduce_grad
from .insert_release import insert_release


@dataclass(frozen=True)
class Pass:
    """requires / provides: capability tags, checked against the order of the pipeline before anything runs."""

    name: str
    run: Callable[[fx.GraphModule, Plan], fx.GraphModule]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()


PIPELINE: tuple[Pass, ...] = (
    Pass("insert_gather", insert_gather, provides=frozenset({"copies"})),
    Pass("insert_offload", insert_offload, provides=frozenset({"copies", "offloaded"})),
    Pass("insert_reduce_grad", insert_reduce_grad, provides=frozenset({"gradients"})),
    Pass("insert_release", insert_release, requires=frozenset({"copies"})),
    Pass("insert_prefetch", insert_prefetch, requires=frozenset({"copies"})),
    Pass("insert_read_ahead", insert_read_ahead),
)


class Instrument(Protocol):
    """Sees every graph before and after every pass: timing, printing and history live here, never in passes."""

    def after(self, name: str, gm: fx.GraphModule) -> None: ...


class History:
    """Keeps the printed graph after each pass."""

    def __init__(self) -> None:
        self.graphs: list[tuple[str, str]] = []

    def after(self, name: str, gm: fx.GraphModule) -> None:
        self.graphs.append((name, gm.print_readable(print_output=False)))


def check_order(passes: Sequence[Pass]) -> None:
    """Refuse a pipeline in which a pass lacks what it needs, naming the pass, what is missing and what ran before it."""
    have: set[str] = set()
    for k, p in enumerate(passes):
        missing = p.requires - have
        if missing:
            ran = ", ".join(q.name for q in passes[:k]) or "nothing"
            raise PlanMismatch(f"pass {p.name} needs {', '.join(sorted(missing))}, but only {ran} ran before it")
        have |= p.provides


def run(
    gm: fx.GraphModule,
    binding: Binding,
    plan: Plan,
    passes: Sequence[Pass] = PIPELINE,
    instruments: Sequence[Instrument] = (),
) -> fx.GraphModule:
    """Write a plan into a graph (in place). Raises PlanMismatch naming the pass and the node when a pass breaks the graph."""
    check_order(passes)
    gm.meta[EVENT_KEY] = binding
    for p in passes:
        gm = p.run(gm, plan)
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise PlanMismatch(f"pass {p.name} broke graph {binding.label}: {error}") from error
        for instrument in instruments:
            instrument.after(p.name, gm)
    gm.recompile()
    return gm
