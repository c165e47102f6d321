"""insert_offload: a forward returns the offloaded tensor in the activation's place, a backward reads what it reloads."""

from __future__ import annotations

from zinf_compile.passes.insert_offload import insert_offload

from .hand_made import Sketch, aten, code, keeps_the_rest, plan, zinf_ops


def forward():
    """Saves `act` (twice) and `other`; the caller's output comes first."""
    s = Sketch()
    x = s.place("x", 4, 4)
    act = s.op(aten.tanh.default, x)
    other = s.op(aten.exp.default, act)
    y = s.op(aten.add.Tensor, act, other)
    return s.done("fw0", (y, act, other, act), saved_outputs={"fw0/tanh": [1, 3], "fw0/exp": [2]})


def backward():
    """`act` arrives at two placeholders; `other` at one."""
    s = Sketch()
    act, other, again, tangent = (s.place(name, 4, 4) for name in ("act", "other", "again", "tangent"))
    first = s.op(aten.mul.Tensor, tangent, other)
    second = s.op(aten.tanh_backward.default, first, act)
    third = s.op(aten.mul.Tensor, second, again)
    return s.done("bw0", (third,), saved_inputs={"fw0/tanh": [act, again], "fw0/exp": [other], "bw0/arg3": [tangent]})


def test_the_forward_saves_the_offloaded_tensor_at_every_position(golden):
    gm = forward()
    with keeps_the_rest(gm):
        insert_offload(gm, plan(("compute", 0, ""), ("compute", 1, ""), ("compute", 2, ""), ("offload", 2, "fw0/tanh")))
    outs = gm.graph.output_node().args[0]
    assert outs[1] is outs[3] and "offload" in str(outs[1].target) and outs[2].name == "exp"
    assert code(gm) == golden


def test_readers_of_the_forward_keep_the_activation_itself():
    gm = forward()
    insert_offload(gm, plan(("compute", 0, ""), ("compute", 1, ""), ("offload", 1, "fw0/exp"), ("compute", 2, "")))
    add = next(n for n in gm.graph.nodes if n.name == "add")
    assert [a.name for a in add.args] == ["tanh", "exp"]


def test_the_backward_reads_the_reloaded_tensor(golden):
    gm = backward()
    with keeps_the_rest(gm):
        insert_offload(gm, plan(("compute", 0, ""), ("reload", 1, "fw0/tanh"), ("compute", 1, ""), ("compute", 2, ""), graph="bw0"))
    assert code(gm) == golden


def test_a_second_reload_serves_the_readers_behind_it(golden):
    gm = backward()
    with keeps_the_rest(gm):
        script = plan(("compute", 0, ""), ("reload", 1, "fw0/tanh"), ("compute", 1, ""), ("reload", 2, "fw0/tanh"), graph="bw0")
        insert_offload(gm, script)
    assert code(gm) == golden


def test_what_the_plan_keeps_in_memory_is_not_touched():
    for gm, label in ((forward(), "fw0"), (backward(), "bw0")):
        before = code(gm)
        insert_offload(gm, plan(("compute", 0, ""), ("compute", 1, ""), graph=label))
        assert code(gm) == before and zinf_ops(gm) == []
