"""insert_gather: readers behind a gather use the working copy; views that a graph returns and writes go to the master."""

from __future__ import annotations

from zinf_compile.passes.insert_gather import insert_gather

from .hand_made import Sketch, aten, code, keeps_the_rest, plan, zinf_ops


def two_readers():
    """[4, 4] weight `w` read by ops 0 and 2; `b` read by op 1."""
    s = Sketch()
    w, b, x = s.place("w", 4, 4), s.place("b", 4), s.place("x", 4, 4)
    first = s.op(aten.mm.default, x, w)
    second = s.op(aten.add.Tensor, first, b)
    third = s.op(aten.mm.default, second, w)
    return s.done("fw0", (third, w), masters={"w": [w], "b": [b]})


def test_one_copy_serves_the_readers_behind_it(golden):
    gm = two_readers()
    with keeps_the_rest(gm):
        insert_gather(gm, plan(("gather", 0, "w"), ("compute", 0, ""), ("compute", 1, ""), ("compute", 2, "")))
    assert code(gm) == golden


def test_each_reader_has_the_latest_copy(golden):
    """And a reader in front of the first gather keeps the master; so does what the graph returns."""
    s = Sketch()
    w, x = s.place("w", 4, 4), s.place("x", 4, 4)
    values = [x]
    for _ in range(4):
        values.append(s.op(aten.mm.default, values[-1], w))
    gm = s.done("fw0", (values[-1], w), masters={"w": [w]})
    with keeps_the_rest(gm):
        insert_gather(gm, plan(("compute", 0, ""), ("gather", 1, "w"), ("compute", 1, ""), ("compute", 2, ""), ("gather", 3, "w")))
    assert code(gm) == golden


def test_two_placeholders_of_one_master_share_its_copy(golden):
    s = Sketch()
    w, again, x = s.place("w", 4, 4), s.place("again", 4, 4), s.place("x", 4, 4)
    y = s.op(aten.mm.default, s.op(aten.mm.default, x, w), again)
    gm = s.done("fw0", (y,), masters={"w": [w, again]})
    with keeps_the_rest(gm):
        insert_gather(gm, plan(("gather", 0, "w"), ("compute", 0, ""), ("compute", 1, "")))
    assert code(gm) == golden


def test_writes_and_returned_views_stay_with_the_master(golden):
    s = Sketch()
    w, x = s.place("w", 4, 4), s.place("x", 4, 4)
    y = s.op(aten.mm.default, x, w)
    view = s.op(aten.t.default, w)
    view.meta["zinf_returned_view"] = True
    s.op(aten.copy_.default, w, y)
    gm = s.done("fw0", (y, view), masters={"w": [w]})
    with keeps_the_rest(gm):
        insert_gather(gm, plan(("gather", 0, "w"), ("compute", 0, ""), ("compute", 1, ""), ("compute", 2, "")))
    assert code(gm) == golden


def test_steps_count_from_the_graphs_first_op():
    gm = two_readers()
    gm.meta["zinf"].first = 40
    insert_gather(gm, plan(("compute", 1, ""), ("gather", 2, "w"), ("compute", 2, ""), first=40))
    lines = [line.strip() for line in code(gm).splitlines()]
    at = next(i for i, line in enumerate(lines) if "zinf.gather" in line)
    assert lines[at + 1].startswith("mm_1 = ") and "gather_default" in lines[at + 1]


def test_events_of_other_graphs_and_other_kinds_are_left_alone():
    gm = two_readers()
    before = code(gm)
    with keeps_the_rest(gm):
        insert_gather(gm, plan(("gather", 0, "w"), graph="fw1"))
        insert_gather(gm, plan(("prefetch", 0, "w"), ("release", 0, "w"), ("reload", 0, "w")))
    assert code(gm) == before and zinf_ops(gm) == []


def test_the_copy_knows_its_buffer_event_and_value():
    gm = two_readers()
    insert_gather(gm, plan(("prefetch", 0, "b"), ("gather", 0, "w")))
    (copy,) = [n for n in gm.graph.nodes if "gather" in str(n.target)]
    assert copy.meta["zinf"] == 1 and copy.args[1] == 1 and copy.meta["zinf_buffer"] == "w"
    assert copy.meta["val"].shape == (4, 4)
