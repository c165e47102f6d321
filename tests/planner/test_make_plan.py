"""Properties of every plan, on random programs; and what is expected of a plan for a small transformer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_compile.errors import BudgetTooSmall
from zinf_compile.planner import make_plan
from zinf_compile.program import Program
from zinf_compile.schedule import Plan
from zinf_compile.simulate import simulate
from zinf_compile.verify import verify_plan

from .programs import CLUSTER, random_program, transformer

SEEDS = st.integers(0, 2**32)


def minimum(program: Program, **kwargs) -> int:
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(program, CLUSTER, kwargs.get("held", 0) + 1, **kwargs)
    return refused.value.minimum


def ample(program: Program) -> int:
    return sum(b.nbytes + 4096 for b in program.buffers.values()) + sum(op.workspace + 4096 for op in program.ops)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(0, 1.1))
def test_every_plan_verifies_and_keeps_its_promises(seed: int, share: float) -> None:
    program = random_program(seed)
    least = minimum(program)
    budget = least + int((ample(program) - least) * share)
    plan = make_plan(program, CLUSTER, budget)
    verify_plan(plan, program)
    ran = simulate(plan)
    assert ran.peak_device <= plan.options["arena"] <= budget
    assert ran.seconds == pytest.approx(plan.predicted.seconds)
    assert ran.seconds >= plan.bounds["step"] * (1 - 1e-9)
    assert Plan.from_json(plan.to_json()) == plan


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(0, 10**6))
def test_minimum_is_exact(seed: int, held: int) -> None:
    program = random_program(seed)
    least = minimum(program, held=held)
    verify_plan(make_plan(program, CLUSTER, least, held=held), program)
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(program, CLUSTER, least - 1, held=held)
    assert refused.value.minimum == least


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_more_budget_never_fails_and_is_hardly_ever_slower(seed: int, shares: list[float]) -> None:
    program = random_program(seed)
    least = minimum(program)
    seconds = [
        make_plan(program, CLUSTER, least + int((ample(program) - least) * share)).predicted.seconds
        for share in sorted(shares)
    ]
    for less, more in zip(seconds, seconds[1:]):
        assert more <= less * 1.05 + 1e-9


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_nothing_leaves_when_everything_fits(seed: int) -> None:
    program = random_program(seed)
    plan = make_plan(program, CLUSTER, ample(program))
    verify_plan(plan, program)
    assert plan.nothing_to_offload
    assert {e.op for e in plan.events} <= {"compute", "update"}
    assert plan.predicted.bytes_read == plan.predicted.bytes_written == plan.predicted.peak_nvme == 0


def test_plan_is_the_same_in_every_process() -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from tests.planner.programs import CLUSTER, transformer\n"
        "from zinf_compile.planner import make_plan\n"
        "print(make_plan(transformer(), CLUSTER, 8 * 2**20).to_json())"
    )
    here = make_plan(transformer(), CLUSTER, 8 * 2**20)
    assert not here.nothing_to_offload
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        there = subprocess.run(
            [sys.executable, "-c", script, *sys.path], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here.to_json()


def test_refusal_names_op_block_tensors_and_remedy() -> None:
    program = transformer()
    with pytest.raises(BudgetTooSmall) as refused:
        make_plan(program, CLUSTER, 3 * 2**20, held=2**20)
    message = str(refused.value)
    assert "mem_budget is 3.0 MiB, of which 1.0 MiB are held" in message
    assert refused.value.culprit in message
    assert "op 'mm_backward_h.2.down.weight' of bw0 in block 'h.2.down'" in message
    assert "'grad:h.2.down.weight' 1.0 MiB" in message and "'a.2.up' 1.0 MiB" in message
    assert f"Raise mem_budget to at least {refused.value.minimum} bytes" in message


def test_held_bytes_are_left_out_of_the_budget() -> None:
    program = transformer()
    alone = make_plan(program, CLUSTER, 8 * 2**20)
    beside = make_plan(program, CLUSTER, 11 * 2**20, held=3 * 2**20)
    assert beside.events == alone.events
    assert beside.options["arena"] <= 8 * 2**20


def test_pins_are_followed() -> None:
    program = transformer()
    pins = {"wte": "device", "state0:h.0.up.weight": "nvme", "a.0.up": "nvme", "h.1.up.bias": "nvme"}
    tight = make_plan(program, CLUSTER, 8 * 2**20, pins=pins)
    wide = make_plan(program, CLUSTER, 2**30, pins=pins)
    for plan in (tight, wide):
        verify_plan(plan, program)
        assert all(plan.homes[name] == tier for name, tier in pins.items())
    assert {n for n, tier in wide.homes.items() if tier == "nvme"} == {n for n, t in pins.items() if t == "nvme"}
    with pytest.raises(ValueError, match="'nowhere'"):
        make_plan(program, CLUSTER, 2**30, pins={"nowhere": "device"})
    with pytest.raises(ValueError, match="a pin is 'device' or 'nvme'"):
        make_plan(program, CLUSTER, 2**30, pins={"wte": "host"})
    with pytest.raises(ValueError, match="cannot be moved"):
        make_plan(program, CLUSTER, 2**30, pins={"tokens": "nvme"})


def test_small_tensors_stay_and_memory_goes_where_it_saves_most() -> None:
    program = transformer(layers=6)
    plan = make_plan(program, CLUSTER, 16 * 2**20)
    away = {name for name, tier in plan.homes.items() if tier == "nvme"}
    assert away and not any("bias" in name for name in away)
    assert plan.predicted.seconds < make_plan(program, CLUSTER, minimum(program)).predicted.seconds
    # activations leave outermost first: no layer stays while a deeper one of equal size leaves
    ups = [k for k in range(6) if f"a.{k}.up" in away]
    assert ups == list(range(len(ups)))


@pytest.mark.parametrize("mib", [7, 8, 9, 10, 12, 16, 20, 28])
def test_a_transformer_at_many_budgets(mib: int) -> None:
    program = transformer()
    plan = make_plan(program, CLUSTER, mib * 2**20)
    verify_plan(plan, program)
    assert plan.predicted.peak_device <= mib * 2**20 and not plan.nothing_to_offload


def test_prefetch_hides_reads_behind_compute() -> None:
    """One slow op before each use: with room for two copies, every read but the first of a graph is hidden."""
    program = transformer(layers=8, seconds=0.1)
    least = minimum(program)
    plan = make_plan(program, CLUSTER, least + 6 * 2**20)
    waited = simulate(plan).stalls
    gathers = [e for e in plan.events if e.op in ("gather", "reload")]
    first = {g: next(e.id for e in gathers if e.graph == g) for g in ("fw0", "bw0")}
    assert sum(s for e, s in waited.items() if e not in first.values()) < 0.01 * plan.predicted.seconds
