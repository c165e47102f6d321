"""The pipeline: order, instruments, failures by name; and on a captured model, that a plan changes no value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from zinf_compile.errors import PlanMismatch
from zinf_compile.passes import pipeline
from zinf_compile.passes.pipeline import PIPELINE, History, Pass, check_order

from .captured import Planned, planned_at_minimum
from .hand_made import Careless, Sketch, aten, code, keeps_the_rest, plan, zinf_ops

SCRIPT = (
    ("prefetch", 0, "w"), ("gather", 0, "w"), ("compute", 0, ""), ("release", 0, "w"), ("compute", 1, ""),
    ("offload", 1, "fw0/tanh"), ("prefetch", 2, "v"), ("gather", 2, "v"), ("compute", 2, ""),
)  # fmt: skip


def forward():
    s = Sketch()
    w, v, x = s.place("w", 4, 4), s.place("v", 4, 4), s.place("x", 4, 4)
    y = s.op(aten.mm.default, x, w)
    act = s.op(aten.tanh.default, y)
    out = s.op(aten.mm.default, act, v)
    gm = s.done("fw0", (out, act), masters={"w": [w], "v": [v]}, saved_outputs={"fw0/tanh": [1]})
    return gm, gm.meta.pop("zinf")


def test_all_passes_together(golden):
    gm, binding = forward()
    with keeps_the_rest(gm):
        pipeline.run(gm, binding, plan(*SCRIPT))
    assert zinf_ops(gm) == ["prefetch", "gather", "release", "offload", "prefetch", "gather"]
    assert code(gm) == golden


def test_an_empty_plan_changes_nothing():
    gm, binding = forward()
    before = code(gm)
    pipeline.run(gm, binding, plan())
    assert code(gm) == before


@pytest.mark.parametrize("name", ["insert_release", "insert_prefetch"])
def test_a_pass_in_front_of_what_it_needs_is_refused_by_name(name):
    late = next(p for p in PIPELINE if p.name == name)
    gm, binding = forward()
    before = code(gm)
    with pytest.raises(PlanMismatch, match=f"pass {name} needs copies, but only nothing ran before it"):
        pipeline.run(gm, binding, plan(*SCRIPT), passes=(late, *PIPELINE[:2]))
    assert code(gm) == before  # refused before anything ran


def test_the_message_lists_what_ran():
    first = Pass("first", lambda gm, plan: gm, provides=frozenset({"a"}))
    last = Pass("last", lambda gm, plan: gm, requires=frozenset({"a", "b", "c"}))
    with pytest.raises(PlanMismatch, match="pass last needs b, c, but only first ran before it"):
        check_order((first, last))
    check_order((first, replace(last, requires=frozenset({"a"}))))
    check_order(PIPELINE)


def test_history_keeps_the_graph_after_each_pass():
    gm, binding = forward()
    history = History()
    pipeline.run(gm, binding, plan(*SCRIPT), instruments=(history,))
    assert [name for name, _ in history.graphs] == [p.name for p in PIPELINE]
    texts = dict(history.graphs)
    assert texts["insert_gather"].count("zinf.gather") == 2 and "offload" not in texts["insert_gather"]
    assert "zinf.offload" in texts["insert_offload"] and "release" not in texts["insert_reduce_grad"]
    assert texts["insert_release"].count("zinf.release") == 1 and "prefetch" not in texts["insert_release"]
    assert texts["insert_prefetch"].count("zinf.prefetch") == 2


def test_a_pass_that_breaks_the_graph_is_named():
    def careless(gm, plan):
        producer = next(n for n in gm.graph.nodes if n.name == "mm")
        gm.graph.output_node().prepend(producer)  # behind its readers
        return gm

    gm, binding = forward()
    with pytest.raises(PlanMismatch, match="pass careless broke graph fw0"):
        pipeline.run(gm, binding, plan(*SCRIPT), passes=(*PIPELINE, Pass("careless", careless)))


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, Planned]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])
    return model, planned_at_minimum(model, torch.randn(128, 64))


def test_a_captured_step_has_every_kind_of_op(planned):
    kinds = {op for label in ("fw0", "bw0") for op in zinf_ops(planned[1].rewritten(label)[0])}
    assert kinds == {"prefetch", "gather", "release", "offload", "reload", "reduce_grad"}


@pytest.mark.parametrize("label", ["fw0", "bw0"])
def test_a_plan_changes_no_value(planned, label):
    """Even where whatever the plan lets go of is overwritten at once."""
    model, step = planned
    gm, _ = step.copy(label)
    rewritten, _ = step.rewritten(label)
    generator = torch.Generator().manual_seed(1)
    arguments = [torch.randn(n.meta["val"].shape, generator=generator) for n in gm.graph.find_nodes(op="placeholder")]
    expected = torch.fx.Interpreter(gm).run(*[a.clone() for a in arguments])
    got = Careless(rewritten).run(*[a.clone() for a in arguments])
    assert len(got) == len(expected)
    for ours, plain in zip(got, expected):
        assert (ours is None and plain is None) or torch.equal(ours, plain)


@pytest.mark.parametrize("label", ["fw0", "bw0"])
def test_the_captured_graph_stays_as_it_was(planned, label):
    facts = planned[1].facts[label]
    before = code(facts.side.gm)
    planned[1].rewritten(label)
    assert code(facts.side.gm) == before and "zinf" not in before
