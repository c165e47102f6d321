"""Mutation testing of the judge of graphs: a rewritten graph is broken in one way, and must be refused by that number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from zinf_compile._torch import storage_key
from zinf_compile.errors import PlanMismatch
from zinf_compile.verify_graph import verify_graph

from ..passes.captured import Planned, planned_at_minimum
from ..passes.hand_made import zinf_ops

zinf = torch.ops.zinf


@pytest.fixture(scope="module")
def step() -> Planned:
    torch.manual_seed(0)
    return planned_at_minimum(nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]), torch.randn(128, 64))


class Judged:
    """One rewritten graph, and whether the verifier still accepts it."""

    def __init__(self, step: Planned, label: str) -> None:
        self.plan = step.plan
        self.gm, self.binding = step.rewritten(label)
        self.graph = self.gm.graph

    def find(self, name: str) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.target is getattr(zinf, name).default]

    def outputs(self) -> list[object]:
        return list(self.graph.output_node().args[0])

    def returns(self, outputs: list[object]) -> None:
        self.graph.output_node().args = (tuple(outputs),)

    def readers(self, copy: fx.Node) -> list[fx.Node]:
        """What computes with a working copy: its readers, and those of its views, in order."""
        found = [u for u in copy.users if u.target is not zinf.release.default]
        for user in list(found):
            if storage_key(user.meta["val"]) == storage_key(copy.meta["val"]):
                found += self.readers(user)
        return sorted(set(found))

    def check(self) -> None:
        verify_graph(self.gm, self.plan, self.binding)

    def refused(self, number: int, naming: str = "") -> str:
        with pytest.raises(PlanMismatch, match=f"^invariant {number}: graph {self.binding.label}") as error:
            self.check()
        assert naming in str(error.value)
        return str(error.value)


@pytest.fixture(params=["fw0", "bw0"])
def either(step, request) -> Iterator[Judged]:
    yield Judged(step, request.param)


@pytest.fixture
def fw(step) -> Judged:
    return Judged(step, "fw0")


@pytest.fixture
def bw(step) -> Judged:
    return Judged(step, "bw0")


def test_what_the_passes_write_is_accepted(fw, bw):
    fw.check()
    bw.check()
    assert {"prefetch", "gather", "release", "offload"} == set(zinf_ops(fw.gm))
    assert {"prefetch", "gather", "release", "reload", "reduce_grad"} == set(zinf_ops(bw.gm))


@pytest.mark.parametrize(
    "label, name",
    [("fw0", "prefetch"), ("fw0", "gather"), ("fw0", "release"), ("fw0", "offload"), ("bw0", "gather"), ("bw0", "reload"), ("bw0", "reduce_grad")],
)
def test_1_a_missing_op(step, label, name):
    """Each of them, with its readers put back on what it was given."""
    for i in range(len(Judged(step, label).find(name))):
        judged = Judged(step, label)
        node = judged.find(name)[i]
        event = next(e for e in judged.plan.events if e.id == node.meta["zinf"])
        node.replace_all_uses_with(node.all_input_nodes[0])
        judged.graph.erase_node(node)
        with pytest.raises(PlanMismatch, match=f"^invariant 1: graph {label}") as error:
            judged.check()
        assert f"event {event.id} ({name} {', '.join(event.buffers)}) has no op" in str(error.value)


def test_1_an_op_twice(either):
    for name in set(zinf_ops(either.gm)):
        node = either.find(name)[0]
        with either.graph.inserting_before(node.next):
            twin = either.graph.node_copy(node)
        either.refused(1, "stands in the graph twice")
        either.graph.erase_node(twin)
        either.check()


def test_1_an_op_without_an_event_or_with_one_of_another_kind(either):
    node = either.find("gather")[0]
    own = node.meta.pop("zinf")
    either.refused(1, "it is no gather event of the plan")
    node.meta["zinf"] = either.find("release")[0].meta["zinf"]
    either.refused(1, "it is no gather event of the plan")
    node.meta["zinf"] = own
    either.check()


def test_1_an_event_of_another_graph(fw, bw):
    fw.find("gather")[0].meta["zinf"] = bw.find("gather")[0].meta["zinf"]
    fw.refused(1)


def test_2_two_ops_swapped(either):
    """Each neighbouring pair of different kinds, where the swap leaves a valid graph."""
    nodes = [n for n in either.graph.nodes if getattr(n.target, "namespace", "") == "zinf" and n.target is not zinf.reduce_grad.default]
    swapped = 0
    for first, second in zip(nodes, nodes[1:]):
        if first in second.all_input_nodes or any(a > first for a in second.all_input_nodes):
            continue
        behind = first.prev
        first.prepend(second)
        either.graph.lint()
        either.refused(2, f"event {first.meta['zinf']} stands behind event {second.meta['zinf']}")
        behind.append(first)
        first.append(second)
        swapped += 1
    assert swapped >= 3


def test_3_a_reader_of_the_master(either):
    for copy in either.find("gather"):
        with either.graph.inserting_before(copy.next):
            late = either.graph.call_function(torch.ops.aten.exp.default, (copy.args[0],))
        late.meta["val"] = torch.empty_like(copy.meta["val"])
        either.refused(3, f"node {late.name}: it computes with {copy.args[0].name}, which is on disk, without a gather or a reload")
        either.graph.erase_node(late)
        for reader in [u for u in copy.users if u.target is not zinf.release.default]:
            reader.replace_input_with(copy, copy.args[0])
            either.refused(3, "which is on disk, without a gather or a reload")
            reader.replace_input_with(copy.args[0], copy)
        either.check()


def test_4_a_release_in_front_of_its_last_reader(either):
    for release in either.find("release"):
        last = either.readers(release.args[0])[-1]
        front = last.prev
        release.append(last)
        either.graph.lint()
        either.refused(4, f"node {last.name}: it reads ")
        front.append(last)
        either.check()


def test_4_a_new_reader_behind_the_release(fw):
    release = fw.find("release")[0]
    with fw.graph.inserting_before(fw.graph.output_node()):
        late = fw.graph.call_function(torch.ops.aten.relu.default, (release.args[0],))
    fw.refused(4, f"node {late.name}: it reads {release.args[0].name}, whose working copy was released before")


def test_5_a_working_copy_is_returned(either):
    copies = either.find("gather") + either.find("reload")
    for copy in copies:
        before = either.outputs()
        either.returns([*before, copy])
        either.refused(5, f"it returns {copy.name}, a working copy")
        either.returns(before)
    either.check()


def test_5_a_view_of_a_working_copy_is_returned(bw):
    (copy, *_) = bw.find("gather")
    view = next(u for u in copy.users if u.target is torch.ops.aten.t.default)
    bw.returns([*bw.outputs()[1:], view])
    bw.refused(5, f"it returns {view.name}, a working copy")


def test_6_the_raw_gradient_is_returned_beside_its_hand_over(bw):
    given = bw.find("reduce_grad")
    before = bw.outputs()
    for node in given:
        bw.returns([node.args[0] if o is node else o for o in before])
        bw.refused(6, "a gradient is returned beside its reduce_grad")
    bw.returns(before)
    bw.check()


@pytest.mark.parametrize("constant", [12345, "0.weight", 3.5])
def test_7_a_constant_is_baked_in(either, constant):
    node = either.find("gather")[0]
    node.args = (node.args[0], constant)
    either.refused(7, f"argument {constant!r} is neither a graph value nor the op's site")
    node.args = (node.args[0], node.meta["zinf"])
    either.check()
    transfer = either.find("prefetch")[0]
    transfer.args = (constant,)
    either.refused(7)


def test_the_message_shows_the_node_among_its_neighbours(fw):
    release = fw.find("release")[0]
    last = fw.readers(release.args[0])[-1]
    last.prepend(release)
    lines = fw.refused(4).splitlines()[1:]
    assert len(lines) == 11 and f"> %{last.name} " in lines[5] and f"%{release.name} " in lines[4]


def test_a_graph_of_another_plan_is_refused(step, fw):
    """The same graph against a plan that keeps everything in memory: its ops have no events."""
    fw.plan = replace(step.plan, events=tuple(e for e in step.plan.events if e.op in ("compute", "update")))
    fw.refused(1)
