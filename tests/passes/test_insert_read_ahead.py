"""insert_read_ahead: one call a parameter, given the parameter; which states it has is for the engine to know."""

from __future__ import annotations

import pytest

from zinf_compile.passes.insert_prefetch import insert_prefetch
from zinf_compile.passes.insert_read_ahead import insert_read_ahead

from .hand_made import Sketch, aten, code, keeps_the_rest, plan, zinf_ops


def backward_like():
    s = Sketch()
    a, b, tangent = s.place("a", 4, 4), s.place("b", 4, 4), s.place("tangent", 4, 4)
    first = s.op(aten.mm.default, tangent, b)
    second = s.op(aten.mm.default, first, a)
    return s.done("bw0", (second,), masters={"a": [a], "b": [b]})


SCRIPT = (
    ("prefetch", 0, "a"), ("compute", 0, ""), ("read_ahead", 1, "exp_avg:b"), ("read_ahead", 1, "exp_avg:a"), ("compute", 1, ""),
)  # fmt: skip


def test_each_parameter_is_given_where_the_plan_has_it(golden):
    gm = backward_like()
    with keeps_the_rest(gm):
        insert_prefetch(gm, plan(*SCRIPT, graph="bw0"))
        insert_read_ahead(gm, plan(*SCRIPT, graph="bw0"))
    assert zinf_ops(gm) == ["prefetch", "read_ahead", "read_ahead"]
    added = [n for n in gm.graph.nodes if "read_ahead" in str(n.target)]
    assert [n.args[0].name for n in added] == ["b", "a"] and not any(n.users for n in added)
    assert code(gm) == golden


def test_a_parameter_that_the_graph_does_not_have_is_no_silent_success():
    with pytest.raises(KeyError, match="stranger"):
        insert_read_ahead(backward_like(), plan(("read_ahead", 0, "exp_avg:stranger"), graph="bw0"))
