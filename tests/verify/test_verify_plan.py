"""One bad plan for each invariant: a good plan is changed, and the verifier must refuse it by that number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zinf_compile.errors import BudgetTooSmall, PlanMismatch
from zinf_compile.planner import make_plan
from zinf_compile.program import Program
from zinf_compile.schedule import Event, Plan
from zinf_compile.simulate import simulate
from zinf_compile.verify import verify_plan
from zinf_compile.verify_standalone import verify_standalone

from ..planner.programs import CLUSTER, random_program, transformer

PROGRAM = transformer(layers=5)
PLAN = make_plan(PROGRAM, CLUSTER, 9 * 2**20)


def refused(plan: Plan, number: int, program: Program = PROGRAM, *, predict: bool = True) -> str:
    if predict:  # so that a change of the order isn't refused merely for its prediction
        try:
            ran = simulate(plan)
            said = replace(
                plan.predicted, seconds=ran.seconds, peak_device=ran.peak_device, peak_nvme=ran.peak_nvme,
                bytes_read=ran.bytes_read, bytes_written=ran.bytes_written,
            )  # fmt: skip
            plan = replace(plan, predicted=said)
        except ValueError:
            pass
    with pytest.raises(PlanMismatch, match=f"^invariant {number}: ") as error:
        verify_plan(plan, program)
    return str(error.value)


def with_event(plan: Plan, at: int, **changes) -> Plan:
    return replace(plan, events=tuple(replace(e, **changes) if e.id == at else e for e in plan.events))


def with_placement(plan: Plan, at: int, **changes) -> Plan:
    return replace(plan, placements=tuple(replace(p, **changes) if k == at else p for k, p in enumerate(plan.placements)))


def without(plan: Plan, gone: int) -> Plan:
    """The plan with one event taken out, and everything renumbered as if it had never been there."""

    def new(i: int) -> int:
        return i - 1 if i > gone else i

    kept = [e for e in plan.events if e.id != gone]
    events, last = [], -1
    for e in kept:
        after = tuple(new(a) for a in e.after if a != gone)
        events.append(replace(e, id=new(e.id), after=after, launch_at=last))
        if e.stream == "compute":
            last = new(e.id)
    placements = tuple(
        replace(p, birth=new(p.birth), death=new(p.death) if p.death != gone else gone) for p in plan.placements
    )
    return replace(plan, events=tuple(events), placements=placements)


def relinked(plan: Plan) -> Plan:
    """Launch points as the order of events makes them."""
    events, last = [], -1
    for e in plan.events:
        events.append(replace(e, launch_at=last))
        last = e.id if e.stream == "compute" else last
    return replace(plan, events=tuple(events))


def find(op: str, stream: str = "", graph: str = "") -> Event:
    return next(e for e in PLAN.events if e.op == op and stream in ("", e.stream) and graph in ("", e.graph))


def test_the_plan_itself_is_accepted_and_has_all_there_is_to_break() -> None:
    verify_plan(PLAN, PROGRAM)
    verify_standalone(PLAN)
    assert {e.op for e in PLAN.events} == {
        "compute", "prefetch", "read_ahead", "gather", "release", "offload", "reload", "reduce_grad", "update"
    }  # fmt: skip
    assert PLAN.options["write_window"] > 0


def test_1_another_program() -> None:
    refused(PLAN, 1, transformer(layers=6))
    first = PROGRAM.ops[0]
    refused(PLAN, 1, Program((replace(first, workspace=8), *PROGRAM.ops[1:]), PROGRAM.buffers))
    wte = replace(PROGRAM.buffers["wte"], nbytes=8)
    assert "'wte' has 8 bytes" in refused(PLAN, 1, Program(PROGRAM.ops, {**PROGRAM.buffers, "wte": wte}))
    refused(replace(PLAN, homes={**PLAN.homes, "tokens": "nvme"}), 1)


def test_2_order_and_form() -> None:
    a, b = [e for e in PLAN.events if e.op == "compute"][:2]
    swapped = with_event(with_event(PLAN, a.id, step=b.step), b.id, step=a.step)
    refused(swapped, 2)
    refused(without(PLAN, a.id), 2)
    refused(with_event(PLAN, b.id, launch_at=-1), 2)
    refused(with_event(PLAN, find("prefetch").id, stream="write"), 2)
    refused(with_event(PLAN, a.id, after=(b.id,)), 2)
    refused(with_event(PLAN, a.id, seconds=float("nan")), 2, predict=False)


def test_3_every_buffer_is_there_while_used() -> None:
    for k, p in enumerate(PLAN.placements):
        if p.tier == "device" and p.birth >= 0 and p.death > p.birth:
            refused(with_placement(PLAN, k, nbytes=0), 3)
            break
    kept = next(
        k for k, p in enumerate(PLAN.placements) if p.tier == "device" and PLAN.kinds[p.buffer] == "activation"
        and p.buffer not in PLAN.homes
    )  # fmt: skip
    refused(with_placement(PLAN, kept, death=PLAN.placements[kept].birth), 3)
    staging = next(k for k, p in enumerate(PLAN.placements) if p.buffer.startswith("staging:"))
    assert "streams" in refused(with_placement(PLAN, staging, birth=PLAN.placements[staging].death), 3)
    home = next(k for k, p in enumerate(PLAN.placements) if p.tier == "nvme" and p.birth == -1)
    assert "home" in refused(with_placement(PLAN, home, birth=0), 3)


def test_4_a_transfer_has_its_source_and_destination() -> None:
    away = find("prefetch", graph="bw0")
    refused(with_event(PLAN, away.id, nbytes=away.nbytes - 4), 4)
    offload = find("offload")
    source = next(k for k, p in enumerate(PLAN.placements) if p.tier == "nvme" and p.buffer == offload.buffers[0])
    refused(with_placement(PLAN, source, birth=len(PLAN.events) - 1, death=len(PLAN.events) - 1), 4)


def test_5_consumers_wait() -> None:
    gather = find("gather")
    assert "doesn't wait" in refused(with_event(PLAN, gather.id, after=()), 5)
    reload = find("reload")
    refused(with_event(PLAN, reload.id, after=()), 5)
    assert "uses" in refused(without(PLAN, gather.id), 5)


def test_6_bytes_are_shared_by_nobody_at_once() -> None:
    large = [k for k, p in enumerate(PLAN.placements) if p.tier == "device" and p.nbytes >= 4096 and p.birth >= 0]
    a, b = next(
        (a, b) for a in large for b in large
        if PLAN.placements[a].birth < PLAN.placements[b].birth <= PLAN.placements[a].death
    )  # fmt: skip
    assert "share bytes" in refused(with_placement(PLAN, b, offset=PLAN.placements[a].offset), 6)


def test_6_no_wait_may_be_dropped_before_its_bytes_are_taken() -> None:
    """Without the waits for writes, what takes an offloaded activation's bytes may start too early."""
    writes = {e.id for e in PLAN.events if e.stream == "write"}
    found = 0
    for e in PLAN.events:
        kept = tuple(a for a in e.after if a not in writes)
        if kept != e.after:
            try:
                verify_plan(with_event(PLAN, e.id, after=kept), PROGRAM)
            except PlanMismatch as error:
                found += str(error).startswith("invariant 6: ") and "may still use" in str(error)
    assert found >= 2


def test_7_the_budget() -> None:
    assert "device, which has" in refused(replace(PLAN, budget=PLAN.options["arena"] - 4096), 7)
    refused(replace(PLAN, options={**PLAN.options, "held": PLAN.budget - PLAN.options["arena"] + 4096}), 7)


def test_8_alignment() -> None:
    big = next(k for k, p in enumerate(PLAN.placements) if p.tier == "device" and p.nbytes >= 4096 and p.offset > 0)
    refused(with_placement(PLAN, big, offset=PLAN.placements[big].offset - 64), 8)


def test_9_what_is_fetched_is_given_back() -> None:
    last = [e for e in PLAN.events if e.op == "release"][-1]
    assert "never released" in refused(without(PLAN, last.id), 9)


def test_9_states_read_ahead_are_there_until_their_update() -> None:
    early = find("read_ahead")
    update = next(e for e in PLAN.events if e.op == "update" and set(early.buffers) <= set(e.buffers))
    assert "doesn't wait" in refused(with_event(PLAN, update.id, after=()), 9)
    for k, p in enumerate(PLAN.placements):
        if p.birth == early.id:
            assert "gone before" in refused(with_placement(PLAN, k, death=update.id - 1), 9)
    assert "read_ahead of" in refused(with_event(PLAN, early.id, nbytes=early.nbytes - 4), 4)
    assert "has no placement" in refused(
        replace(PLAN, placements=tuple(p for p in PLAN.placements if p.birth != early.id)), 4
    )
    assert "of the states of" in refused(with_event(PLAN, early.id, buffers=(*early.buffers, "wte")), 4)
    assert "'wte', which is" in refused(with_event(PLAN, early.id, buffers=("wte",), nbytes=PLAN.sizes["wte"]), 4)


def test_10_gradients_are_handed_over_where_they_are_born() -> None:
    grad = find("reduce_grad", "write")
    assert "is complete after op" in refused(without(PLAN, grad.id), 10)
    assert "is on stream compute" in refused(relinked(with_event(PLAN, grad.id, stream="compute")), 10)


def test_11_predictions() -> None:
    said = PLAN.predicted
    for what in ("seconds", "peak_device", "peak_nvme", "bytes_read", "bytes_written"):
        refused(replace(PLAN, predicted=replace(said, **{what: getattr(said, what) * 2})), 11, predict=False)


def test_12_no_wait_that_the_runtime_does_not_do() -> None:
    flying = next(e for e in PLAN.events if e.stream == "write")
    after = next(e for e in PLAN.events[flying.id + 1 :] if e.stream == "compute" and e.op == "compute")
    wide = replace(PLAN, options={**PLAN.options, "write_window": 2**40})
    refused(with_event(wide, after.id, after=(*after.after, flying.id)), 12)


@pytest.mark.parametrize("seed", range(40))
def test_every_dropped_wait_of_a_copy_is_seen(seed: int) -> None:
    """On random plans: any gather or reload without its wait, and any release taken out, is refused."""
    program = random_program(seed)
    full = sum(b.nbytes + 4096 for b in program.buffers.values())
    with pytest.raises(BudgetTooSmall) as tight:
        make_plan(program, CLUSTER, 1)
    plan = make_plan(program, CLUSTER, tight.value.minimum + (full - tight.value.minimum) // 8)
    verify_plan(plan, program)
    verify_standalone(plan)
    for e in plan.events:
        if e.op in ("gather", "reload") and e.after:
            with pytest.raises(PlanMismatch):
                verify_plan(with_event(plan, e.id, after=()), program)
        if e.op in ("release", "offload", "prefetch", "reload"):
            with pytest.raises(PlanMismatch):
                verify_plan(without(plan, e.id), program)
