"""The Program: one training step as plain data, which is all that the planner, the verifier and the simulator ever see.

A step is a list of `Op`s in the order in which they run: the nodes of every forward graph, what user code does between
graphs (`user` ops, e.g. a loss outside the model), the nodes of every backward graph, and one `update` op a parameter.
Byte counts belong to `Buffer`s, one for each distinct storage: views share their base's buffer.

Which buffers an op needs on the device:
  param        any op that lists it in `reads` computes with it; the op may read a working copy
  activation   written by one op, dead after the op that lists it in `frees`; `saved` when it crosses from a forward graph
               into a backward graph (its last forward reader and its first backward reader are the gap a transfer can use)
  grad         written by the op that completes it, consumed by the `update` op of its parameter
  optim_state  read and written by the `update` op of its parameter, and by nothing else
  input        held by the caller for the whole graph; output: born in a graph, then held by the caller
  foreign      what user code holds while graphs run (e.g. the log-probabilities a loss keeps): a fixed amount
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property

KINDS = ("param", "grad", "optim_state", "activation", "input", "output", "foreign")
PHASES = ("forward", "user", "backward", "update")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One storage. `nbytes` in bytes; `movable`: it may live on disk and be read back into a buffer of its own."""

    name: str
    kind: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    movable: bool = False
    of: str = ""  # the parameter, for a grad or an optim_state


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the program.

    seconds: predicted (or measured) duration; workspace: bytes that the op takes and gives back while it runs;
    reads/writes/frees: names of buffers. A buffer in `frees` is dead once this op is done.
    """

    graph: str  # "fw0", "bw0", "user", "update": instances in the order of a step
    name: str
    target: str
    phase: str
    seconds: float
    workspace: int = 0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    block: str = ""  # the module that the op belongs to, e.g. "h.3.attn"


@dataclass(frozen=True)
class Program:
    """A whole step. `buffers` by name; every name that an op mentions is in it."""

    ops: tuple[Op, ...]
    buffers: dict[str, Buffer] = field(default_factory=dict)

    @cached_property
    def graphs(self) -> tuple[tuple[str, int, int], ...]:
        """(graph, first op, one past its last op), in order of the step."""
        spans: list[tuple[str, int, int]] = []
        for i, op in enumerate(self.ops):
            if spans and spans[-1][0] == op.graph:
                spans[-1] = (op.graph, spans[-1][1], i + 1)
            else:
                spans.append((op.graph, i, i + 1))
        return tuple(spans)

    @cached_property
    def uses(self) -> dict[str, tuple[int, ...]]:
        """For each buffer, the ops that read it, in order."""
        found: dict[str, list[int]] = {name: [] for name in self.buffers}
        for i, op in enumerate(self.ops):
            for name in op.reads:
                if not found[name] or found[name][-1] != i:
                    found[name].append(i)
        return {name: tuple(at) for name, at in found.items()}

    def nbytes_of_kind(self, kind: str) -> int:
        return sum(b.nbytes for b in self.buffers.values() if b.kind == kind)

    def fingerprint(self) -> str:
        """Hash of structure and sizes; durations are left out, so a re-measured program keeps its plan."""
        h = hashlib.sha256()
        for op in self.ops:
            h.update(repr((op.graph, op.name, op.target, op.workspace, op.reads, op.writes, op.frees)).encode())
        for name in sorted(self.buffers):
            h.update(repr(tuple(asdict(self.buffers[name]).items())).encode())
        return h.hexdigest()[:16]
