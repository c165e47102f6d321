"""Mutation testing of the judge of graphs, continued: invariants 8 to 10, and activations on disk.

Goes to tests/verify/ together with verify_graph.patch."""

from __future__ import annotations

import pytest
import torch

from .test_verify_graph import bw, fw, step  # noqa: F401

aten, zinf = torch.ops.aten, torch.ops.zinf


def returned(judged, node, instead):
    judged.returns([instead if o is node else o for o in judged.outputs()])


def test_3_a_backward_that_reads_the_saved_block(bw):  # noqa: F811
    copy = bw.find("reload")[0]
    for reader in list(copy.users):
        reader.replace_input_with(copy, copy.args[0])
    bw.refused(3, f"it computes with {copy.args[0].name}, which is on disk")


@pytest.mark.parametrize("name", ["gather", "prefetch", "release"])
def test_8_two_ops_with_their_arguments_swapped(fw, name):  # noqa: F811
    first, second = fw.find(name)[:2]
    first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])
    fw.refused(8 if name != "release" else 4)


def test_8_one_copy_released_twice(fw):  # noqa: F811
    first, second = fw.find("release")[:2]
    second.args = first.args
    fw.refused(8, "which is no copy of")


def test_8_the_activation_is_saved_beside_its_offload(fw):  # noqa: F811
    node = fw.find("offload")[0]
    returned(fw, node, node.args[0])
    fw.refused(8, "the graph returns something else for fw0/")


def test_8_a_gradient_is_dropped_or_given_to_another_master(bw):  # noqa: F811
    first, second = bw.find("reduce_grad")[0], bw.find("reduce_grad")[2]
    returned(bw, first, None)
    bw.refused(8, "the graph returns something else for grad:")
    returned(bw, None, first)
    first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])
    bw.refused(8, "it hands the gradient to")


def test_9_a_hand_over_at_the_end_of_the_graph(bw):  # noqa: F811
    """All gradients would be alive at once."""
    bw.graph.output_node().prepend(bw.find("reduce_grad")[0])
    bw.refused(9, "ops stand in front of it, not")


def test_9_a_transfer_that_starts_too_early(bw):  # noqa: F811
    """Its bytes would be taken before the plan has room for them."""
    node = bw.find("prefetch")[-1]
    bw.check()
    node.prev.prepend(node)
    bw.refused(9, f"node {node.name}")


def test_10_an_op_is_gone_or_added(fw):  # noqa: F811
    node = fw.graph.find_nodes(op="call_function", target=aten.tanh.default)[0]
    with fw.graph.inserting_after(node):
        extra = fw.graph.call_function(aten.exp.default, (node,))
    fw.refused(10, f"node {extra.name}")
    fw.graph.erase_node(extra)
    node.replace_all_uses_with(node.args[0])
    fw.graph.erase_node(node)
    fw.refused(10)
