"""insert_prefetch: one call where a transfer starts, for a master or an offloaded activation; nobody reads it."""

from __future__ import annotations

import pytest

from zinf_compile.passes.insert_gather import insert_gather
from zinf_compile.passes.insert_prefetch import insert_prefetch

from .hand_made import Sketch, aten, code, keeps_the_rest, plan, zinf_ops


def backward_like():
    s = Sketch()
    a, b, act = s.place("a", 4, 4), s.place("b", 4, 4), s.place("act", 4, 4)
    first = s.op(aten.mm.default, act, b)
    second = s.op(aten.mul.Tensor, first, act)
    third = s.op(aten.mm.default, second, a)
    return s.done("bw0", (third,), masters={"a": [a], "b": [b]}, saved_inputs={"fw0/act": [act]})


SCRIPT = (
    ("prefetch", 0, "b"), ("prefetch", 0, "fw0/act"), ("gather", 0, "b"), ("compute", 0, ""),
    ("prefetch", 1, "a"), ("compute", 1, ""), ("gather", 2, "a"), ("compute", 2, ""),
)  # fmt: skip


def test_transfers_start_in_the_plans_issue_order(golden):
    gm = backward_like()
    insert_gather(gm, plan(*SCRIPT, graph="bw0"))
    with keeps_the_rest(gm):
        insert_prefetch(gm, plan(*SCRIPT, graph="bw0"))
    assert zinf_ops(gm) == ["prefetch", "prefetch", "gather", "prefetch", "gather"]
    assert code(gm) == golden


def test_it_reads_the_source_and_changes_no_reader():
    gm = backward_like()
    sources = {n.name: len(n.users) for n in gm.graph.find_nodes(op="placeholder")}
    insert_prefetch(gm, plan(*SCRIPT, graph="bw0"))
    added = [n for n in gm.graph.nodes if "prefetch" in str(n.target)]
    assert [n.args[0].name for n in added] == ["b", "act", "a"] and not any(n.users for n in added)
    assert {n.name: len(n.users) - 1 for n in gm.graph.find_nodes(op="placeholder")} == sources


def test_a_transfer_behind_the_last_op_stands_in_front_of_the_output():
    """The plan may start reading for the next graph at the end of this one."""
    gm = backward_like()
    insert_prefetch(gm, plan(("compute", 2, ""), ("prefetch", 3, "a"), graph="bw0"))
    assert "prefetch" in str(gm.graph.output_node().prev.target)


def test_a_source_that_the_graph_does_not_have_is_no_silent_success():
    with pytest.raises(KeyError, match="stranger"):
        insert_prefetch(backward_like(), plan(("prefetch", 0, "stranger"), graph="bw0"))
