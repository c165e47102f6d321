"""Runs rewritten graphs. Brackets every run for the allocator and the engine, and cleans up whatever way a run ends.

What a graph may leave behind: the tensors that it returns, and working copies that the plan keeps over the turn, which are
write-protected here, and optimizer states read ahead for the update. Prefetches never outlive a run, and every write is on disk before user code goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from .._torch import BoxedCodeGen
from ..errors import StoreError
from .native import Library


@dataclass
class Variant:
    """A graph rewritten for one plan. moves: it has zinf ops, or runs under planned addresses."""

    function: Callable[[list[Any]], Any]
    instance: int
    moves: bool
    gm: fx.GraphModule


def compile_boxed(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Straight-line Python in captured order that drops each value at its last use, its own arguments included."""
    gm.graph.set_codegen(BoxedCodeGen())
    gm.recompile()
    return gm.forward


@dataclass
class Runner:
    """Which graph a call from AOTAutograd is about. `run(runner, args)` empties the list of arguments."""

    run: Callable[[Runner, list[Any]], Any]
    piece: Any
    phase: str

    def boxed(self) -> Callable[[list[Any]], Any]:
        """The callable for AOTAutograd; a function, since wrappers copy a function's attributes only."""

        def call(args: list[Any]) -> Any:
            return self.run(self, args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


class Executor:
    """The process's native state around graph runs. `native` is the loaded library."""

    def __init__(self, native: Library) -> None:
        self.native = native

    def run(self, variant: Variant, args: list[Any], store: int) -> tuple[Any, float]:
        """Run one graph; returns its outputs and the seconds it took. `store`: handle for what the graph offloads, 0: none."""
        native = self.native
        start = time.perf_counter()
        if not variant.moves:
            native.zinf_alloc_begin(variant.instance)
            try:
                return variant.function(args), time.perf_counter() - start
            finally:
                native.zinf_alloc_end()
        native.zinf_set_current_store(store)
        native.zinf_alloc_begin(variant.instance)
        try:
            outs = variant.function(args)
            self._settle(store)
            return outs, time.perf_counter() - start
        except BaseException as error:
            native.zinf_held_forget_all()
            native.zinf_ahead_forget()
            if store:
                native.zinf_store_drain(store)
            translated = self._translate(error)
            if translated is error:
                raise
            raise translated from None
        finally:
            native.zinf_alloc_end()

    def _translate(self, error: BaseException) -> BaseException:
        """The engine's errors come out of torch ops as RuntimeError: give them their own class."""
        if isinstance(error, RuntimeError):
            text = str(error)
            raised = self.native.interrupts.take()
            if raised is not None:
                return raised
            if text.startswith("zinf: ") and "store" in text.lower():
                return StoreError(text.removeprefix("zinf: "))
        return error

    def _settle(self, store: int) -> None:
        native = self.native
        native.zinf_prefetch_cancel_all()
        if store and native.zinf_store_drain(store) < 0:
            raise StoreError(_last_error(native))
        native.zinf_held_arm()


def _last_error(native: Library) -> str:
    text = native.zinf_last_error()
    return text.decode() if text else "the engine gave no reason"
