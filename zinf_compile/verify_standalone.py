"""Judges a plan that has been read from a file, where its program is not at hand."""

from __future__ import annotations

from dataclasses import replace

from .program import Buffer, Op, Program
from .schedule import Plan
from .verify import refuse, verify_plan


def verify_standalone(plan: Plan) -> None:
    """Everything that a plan says about itself: 2, 4 to 9, 11 and 12. What ops touch isn't in a plan, so each op is taken to
    touch the buffers that begin or end with it; `verify_plan` with the program is the full check.

    Raises PlanMismatch as `verify_plan` does.
    """
    at: dict[int, list[str]] = {}
    spaces: dict[int, int] = {}
    for p in plan.placements:
        if p.buffer.startswith("workspace:"):
            spaces[p.birth] = p.nbytes
        elif p.tier == "device" and not p.buffer.startswith("staging:"):
            at.setdefault(p.birth, []).append(p.buffer)
            fetched = 0 <= p.birth < len(plan.events) and plan.events[p.birth].op == "prefetch"
            if fetched or plan.homes.get(p.buffer) != "nvme":  # else a write may hold the bytes after their last use
                at.setdefault(p.death, []).append(p.buffer)
    handed: dict[int, list[str]] = {}
    for e in plan.events:
        if e.op == "reduce_grad":
            handed.setdefault(e.step, []).append(e.buffers[0])
    ops = []
    for e in plan.events:
        if e.op in ("compute", "update"):
            if e.step >= len(plan.labels):
                refuse(2, f"event {e.id} runs op {e.step}, but the plan has {len(plan.labels)}")
            name, block = plan.labels[e.step]
            phase = "update" if e.op == "update" else "user" if e.graph == "user" else "forward"
            reads = e.buffers if e.op == "update" else tuple(at.get(e.id, ()))
            writes = tuple(handed.get(e.step, ()))
            ops.append(Op(e.graph, name, "", phase, e.seconds, spaces.get(e.id, 0), reads, writes, (), block))
    buffers = {
        name: Buffer(name, plan.kinds[name], nbytes, "", (), plan.homes.get(name) == "nvme")
        for name, nbytes in plan.sizes.items()
        if not name.startswith(("workspace:", "staging:"))
    }
    program = Program(tuple(ops), buffers)
    verify_plan(replace(plan, fingerprint=program.fingerprint()), program)
