"""insert_release: the latest copy in front of the event, directly behind the op that the plan names."""

from __future__ import annotations

from zinf_compile.passes.insert_gather import insert_gather
from zinf_compile.passes.insert_release import insert_release

from .hand_made import Sketch, aten, code, keeps_the_rest, plan, zinf_ops


def three_readers():
    s = Sketch()
    w, x = s.place("w", 4, 4), s.place("x", 4, 4)
    y = x
    for _ in range(3):
        y = s.op(aten.mm.default, y, w)
    return s.done("fw0", (y,), masters={"w": [w]})


GATHERED_TWICE = (
    ("gather", 0, "w"), ("compute", 0, ""), ("compute", 1, ""), ("release", 1, "w"),
    ("gather", 2, "w"), ("compute", 2, ""), ("release", 2, "w"),
)  # fmt: skip


def test_each_copy_is_released_behind_its_last_reader(golden):
    gm = three_readers()
    insert_gather(gm, plan(*GATHERED_TWICE))
    with keeps_the_rest(gm):
        insert_release(gm, plan(*GATHERED_TWICE))
    assert code(gm) == golden


def test_a_release_without_a_copy_in_this_graph_inserts_nothing():
    """A copy that an earlier graph left is the engine's to drop."""
    gm = three_readers()
    script = plan(("release", 0, "w"), ("gather", 1, "w"), ("release", 2, "other"))
    insert_gather(gm, script)
    before = code(gm)
    with keeps_the_rest(gm):
        insert_release(gm, script)
    assert code(gm) == before and zinf_ops(gm) == ["gather"]


def test_a_copy_that_the_plan_keeps_is_not_released():
    gm = three_readers()
    script = plan(*GATHERED_TWICE[:-1])
    insert_gather(gm, script)
    insert_release(gm, script)
    assert zinf_ops(gm) == ["gather", "release", "gather"]


def test_copies_of_two_buffers_are_told_apart():
    s = Sketch()
    a, b, x = s.place("a", 4, 4), s.place("b", 4, 4), s.place("x", 4, 4)
    y = s.op(aten.mm.default, s.op(aten.mm.default, x, a), b)
    gm = s.done("fw0", (y,), masters={"a": [a], "b": [b]})
    script = plan(("gather", 0, "a"), ("gather", 0, "b"), ("compute", 0, ""), ("compute", 1, ""), ("release", 1, "a"), ("release", 1, "b"))
    insert_gather(gm, script)
    with keeps_the_rest(gm):
        insert_release(gm, script)
    released = [n.args[0].args[0].name for n in gm.graph.nodes if "release" in str(n.target)]
    assert released == ["a", "b"]
