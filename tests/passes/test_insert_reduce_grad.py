"""insert_reduce_grad: a gradient is handed over where it is complete, and the graph returns what the hand-over returned."""

from __future__ import annotations

from zinf_compile.passes.insert_reduce_grad import insert_reduce_grad

from .hand_made import Sketch, aten, code, keeps_the_rest, plan, zinf_ops


def backward():
    """Gradients of `a` (finished by a view) and `b`, then the gradient of an input, which is nobody's to hand over."""
    s = Sketch()
    a, b, x, tangent = (s.place(name, 4, 4) for name in ("a", "b", "x", "tangent"))
    raw = s.op(aten.mm.default, tangent, x)
    grad_a = s.op(aten.t.default, raw)
    hidden = s.op(aten.mm.default, tangent, b)
    grad_b = s.op(aten.mm.default, hidden, x)
    grad_x = s.op(aten.mul.Tensor, hidden, a)
    gradients = {"grad:a": ([0], "a"), "grad:b": ([2, 3], "b")}
    return s.done("bw0", (grad_a, None, grad_b, grad_b, grad_x), masters={"a": [a], "b": [b]}, gradients=gradients)


SCRIPT = (
    ("compute", 0, ""), ("reduce_grad", 0, "grad:a"), ("compute", 1, ""), ("compute", 2, ""), ("compute", 3, ""),
    ("reduce_grad", 3, "grad:b"), ("compute", 4, ""),
)  # fmt: skip


def test_gradients_leave_where_they_are_complete(golden):
    gm = backward()
    with keeps_the_rest(gm):
        insert_reduce_grad(gm, plan(*SCRIPT, graph="bw0"))
    assert code(gm) == golden


def test_it_waits_for_the_view_that_finishes_a_gradient():
    """The plan's event follows the op that made the bytes; the view behind it is not in the plan's account."""
    gm = backward()
    insert_reduce_grad(gm, plan(*SCRIPT, graph="bw0"))
    order = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    assert order.index("reduce_grad_default") == order.index("t") + 1


def test_outputs_are_replaced_at_every_position_of_a_gradient_and_nowhere_else():
    gm = backward()
    before = gm.graph.output_node().args[0]
    insert_reduce_grad(gm, plan(*SCRIPT, graph="bw0"))
    outs = gm.graph.output_node().args[0]
    assert outs[2] is outs[3] and [str(outs[i].target).split(".")[1] for i in (0, 2)] == ["reduce_grad", "reduce_grad"]
    assert outs[1] is None and outs[4] is before[4]
    assert [(n.args[0].name, n.args[1].name) for n in (outs[0], outs[2])] == [("t", "a"), ("mm_2", "b")]


def test_a_gradient_of_another_graph_is_left_alone():
    gm = backward()
    before = code(gm)
    insert_reduce_grad(gm, plan(("reduce_grad", 0, "grad:elsewhere"), graph="bw0"))
    insert_reduce_grad(gm, plan(*SCRIPT, graph="bw1"))
    assert code(gm) == before and zinf_ops(gm) == []
