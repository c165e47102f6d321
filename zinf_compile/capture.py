"""Capture: Dynamo and AOTAutograd turn a module's step into forward and backward FX graphs whose inputs are the masters.

The compiled callable calls `module._call_impl`, never `module(...)`: the module's own call is what we replaced. Dynamo lifts
the parameters to graph inputs and guards on them, so nothing is baked in, and what it cannot trace runs in eager on the real
masters. The joint graph is only visible in the partition hook; there every gradient of a master is tied to its master, so
that the backward graph can hand it over where it is born, and saved views are replaced by what they are views of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn

from . import _torch
from .errors import Unsupported
from .reinplace import reuse_dead_operands

logger = logging.getLogger("zinf_compile")


# Marks views of inputs that a graph returns: they look at the input, whatever its readers compute with.
RETURNED_VIEW = "zinf_returned_view"


@dataclass
class GraphSide:
    """One FX graph of a captured piece, normalised: masters known, chains of views next to their readers.

    masters: placeholder position -> index of the master in the piece's master list
    saved: forward only, output position -> placeholder position in the backward graph that receives it
    grads: backward only, output position -> index of the master whose gradient it is
    num_outputs: outputs that the caller sees (forward, inference)
    """

    phase: str  # "forward", "backward", "inference"
    gm: fx.GraphModule
    masters: dict[int, int]
    saved: dict[int, int] = field(default_factory=dict)
    grads: dict[int, int] = field(default_factory=dict)
    num_outputs: int = 0


class Session(Protocol):
    """What capture needs of its owner."""

    def captured_training(self, forward: GraphSide, backward: GraphSide, masters: list[nn.Parameter]) -> Any: ...

    def captured_inference(self, graph: GraphSide, masters: list[nn.Parameter]) -> Any: ...

    def runner(self, piece: Any, side: GraphSide) -> Callable[[list[Any]], Any]: ...

    def note_retrace(self) -> None: ...


def make_backend(session: Session) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A torch.compile backend that hands every captured piece to `session`."""

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        session.note_retrace()
        masters = {i: t for i, t in enumerate(example_inputs) if isinstance(t, nn.Parameter)}
        order = {i: k for k, i in enumerate(masters)}
        piece: list[Any] = []

        def master_placeholders(graph: fx.Graph) -> dict[int, fx.Node]:
            """index of the Dynamo input -> placeholder, for masters; told by descriptor, never by name"""
            found = {}
            for node in graph.find_nodes(op="placeholder"):
                desc = node.meta.get("desc")
                if isinstance(desc, _torch.PlainAOTInput) and desc.idx in masters:
                    found[desc.idx] = node
            return found

        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            tie_gradients(joint, master_placeholders(joint.graph))
            forward, backward = _torch.partition_min_cut(joint, joint_inputs, **kwargs)
            sides = split_sides(forward, backward, kwargs["num_fwd_outputs"], master_placeholders, order)
            piece[:] = [session.captured_training(*sides, list(masters.values())), *sides]
            return forward, backward

        def compile_forward(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            owner, side, _backward = piece
            side.gm = graph
            return session.runner(owner, side)

        def compile_backward(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            owner, _forward, side = piece
            side.gm = graph
            return session.runner(owner, side)

        def compile_inference(graph: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
            sink_views(graph, set(master_placeholders(graph.graph).values()))
            reuse_dead_operands(graph)
            placeholders = graph.graph.find_nodes(op="placeholder")
            known = {node: order[idx] for idx, node in master_placeholders(graph.graph).items()}
            side = GraphSide(
                "inference",
                graph,
                {i: known[n] for i, n in enumerate(placeholders) if n in known},
                num_outputs=len(outputs_of(graph.graph)),
            )
            return session.runner(session.captured_inference(side, list(masters.values())), side)

        compile_graph = _torch.aot_autograd(
            fw_compiler=compile_forward,
            bw_compiler=compile_backward,
            inference_compiler=compile_inference,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        trainable = sum(p.requires_grad for p in masters.values())
        with _torch.backward_again(no_double_backward, trainable):
            compiled = compile_graph(gm, example_inputs)
        masters.clear()  # Dynamo may keep the closures above for longer than the module lives
        return compiled

    return backend


def no_double_backward() -> Unsupported:
    """The error for differentiating a compiled model's gradient: AOTAutograd makes a backward graph, none of that graph."""
    return Unsupported(
        "double backward: create_graph=True asks for gradients that can be differentiated again, and a compiled model has "
        "first-order gradients only. Leave it out where you don't differentiate them. Compute what you differentiate twice, e.g. a gradient penalty, with "
        "model.forward(...) instead of model(...): plain PyTorch on the same parameters, whose memory is not planned. Or call "
        "model.zinf.close() to train this model uncompiled"
    )


def outputs_of(graph: fx.Graph) -> list[Any]:
    """What a graph returns, one entry an output."""
    outs: Any = graph.output_node().args[0]
    return list(outs) if isinstance(outs, (tuple, list)) else [outs]


def _copy_chain(graph: fx.Graph, chain: list[fx.Node], root: fx.Node, source: fx.Node, before: fx.Node) -> fx.Node:
    """Copy a chain of views of `root` in front of `before`, as views of `source`; returns the last."""
    copies: dict[fx.Node, fx.Node] = {root: source}

    def renamed(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    with graph.inserting_before(before):
        for step in chain:
            copies[step] = graph.node_copy(step, renamed)
    return copies[chain[-1]]


def tie_gradients(joint: fx.GraphModule, masters: dict[int, fx.Node]) -> None:
    """Replace each gradient of a master in the joint graph's outputs by reduce_grad(gradient, master).

    Placed behind the gradient's producer; the extra argument makes the partitioner pass the master on to the backward graph."""
    graph = joint.graph
    out = graph.output_node()
    outs = outputs_of(graph)
    for i, (node, desc) in enumerate(zip(outs, out.meta["desc"])):
        if isinstance(desc, _torch.GradAOTOutput) and isinstance(node, fx.Node):
            master = masters.get(getattr(desc.grad_of, "idx", -1))
            if master is None or node.meta["val"].layout != torch.strided:
                continue  # a sparse gradient goes to autograd as it is
            with graph.inserting_before(out):
                tied = graph.call_function(torch.ops.zinf.reduce_grad.default, (node, master))
            tied.meta.update(val=master.meta["val"], partitioner_tag="is_backward", desc=desc)
            outs[i] = tied
    out.args = (tuple(outs),)
    joint.recompile()


def split_sides(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    master_placeholders: Callable[[fx.Graph], dict[int, fx.Node]],
    order: dict[int, int],
) -> tuple[GraphSide, GraphSide]:
    """Normalise both graphs and describe them. Gradient ties are taken out again: a pass writes them in where the plan says."""
    fw_masters = master_placeholders(forward.graph)
    bw_masters = master_placeholders(backward.graph)
    grads: dict[int, int] = {}
    by_node = {node: order[idx] for idx, node in bw_masters.items()}
    bw_out = backward.graph.output_node()
    bw_outs = outputs_of(backward.graph)
    for i, node in enumerate(bw_outs):
        if isinstance(node, fx.Node) and node.target is torch.ops.zinf.reduce_grad.default:
            gradient, master = node.all_input_nodes
            grads[i] = by_node[master]
            bw_outs[i] = gradient
    bw_out.args = (tuple(bw_outs),)
    for node in backward.graph.find_nodes(op="call_function", target=torch.ops.zinf.reduce_grad.default):
        backward.graph.erase_node(node)
    position = {n.name: i for i, n in enumerate(backward.graph.find_nodes(op="placeholder"))}
    fw_outs = outputs_of(forward.graph)
    saved = {i: position[fw_outs[i].name] for i in range(num_outputs, len(fw_outs)) if fw_outs[i].name in position}
    save_bases_not_views(forward, backward, num_outputs, set(fw_masters.values()))
    sink_views(forward, set(fw_masters.values()))
    bw_known = dict(by_node)
    key_of = {_key(node): order[idx] for idx, node in fw_masters.items()}
    for node in backward.graph.find_nodes(op="placeholder"):
        # A saved view that became its master keeps the descriptor of the saved value: tell it by storage.
        if node not in bw_known and _key(node) is not None and node.meta.get("zinf_master"):
            bw_known[node] = key_of[_key(node)]
    sink_views(backward, {n for n in backward.graph.find_nodes(op="placeholder") if _key(n) is not None})
    hoist_gradient_views(backward, [bw_outs[i] for i in grads])
    reuse_dead_operands(forward)
    reuse_dead_operands(backward)
    fw_places = forward.graph.find_nodes(op="placeholder")
    bw_places = backward.graph.find_nodes(op="placeholder")
    fw_known = {node: order[idx] for idx, node in fw_masters.items()}
    return (
        GraphSide(
            "forward",
            forward,
            {i: fw_known[n] for i, n in enumerate(fw_places) if n in fw_known},
            saved=saved,
            num_outputs=num_outputs,
        ),
        GraphSide(
            "backward",
            backward,
            {i: bw_known[n] for i, n in enumerate(bw_places) if n in bw_known},
            grads=grads,
        ),
    )


def _key(node: fx.Node) -> int | None:
    """The one storage that a node's value lives in (a `split` of a tensor counts), None for anything else."""
    val = node.meta.get("val")
    keys = {_torch.storage_key(v) for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)}
    return keys.pop() if len(keys) == 1 else None


def _view_chain(node: fx.Node, roots: set[fx.Node]) -> list[fx.Node] | None:
    """The ops that make `node` out of a root without touching its data, or None when it is no view of a root."""
    chain: list[fx.Node] = []
    while node not in roots:
        parents = [a for a in node.all_input_nodes if _key(a) is not None]
        if node.op != "call_function" or not parents or _key(node) is None or _key(node) != _key(parents[0]):
            return None
        target = node.target
        if isinstance(target, _torch.OpOverload) and target._schema.is_mutable:
            return None
        chain.append(node)
        node = parents[0]
    return chain[::-1]


def fills_storage(val: Any) -> bool:
    """One contiguous tensor at offset 0 that is exactly as large as its storage."""
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided or not val.is_contiguous():
        return False
    return bool(val.storage_offset() == 0 and val.numel() * val.element_size() == val.untyped_storage().nbytes())


def save_bases_not_views(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, masters: set[fx.Node]
) -> None:
    """Save the storage's owner instead of views of it, and replay the views in the backward.

    A saved view of a master (`t(weight)`) would keep a working copy alive over the turn; several saved views of one
    activation (q, k, v of one projection) could not be moved to disk as one piece."""
    out = forward.graph.output_node()
    outs = outputs_of(forward.graph)
    places = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    first = next(n for n in backward.graph.nodes if n.op != "placeholder")
    owners: dict[int, fx.Node] = {}
    for node in forward.graph.nodes:
        if node.op == "call_function" and (key := _key(node)) is not None and fills_storage(node.meta.get("val")):
            owners.setdefault(key, node)
    inputs = {key for n in forward.graph.find_nodes(op="placeholder") if (key := _key(n)) is not None}
    roots = masters | {node for key, node in owners.items() if key not in inputs}
    filler = min(masters, key=lambda n: n.meta["val"].numel(), default=None)  # the caller holds it anyway
    base_place: dict[fx.Node, fx.Node] = {}  # owner -> the backward placeholder that receives it
    for i in range(num_outputs, len(outs)):
        node = outs[i]
        if isinstance(node, fx.Node) and node in roots and node.name in places:
            base_place[node] = places[node.name]
    for i in range(num_outputs, len(outs)):
        node = outs[i]
        if not isinstance(node, fx.Node) or node in roots or node.name not in places:
            continue
        chain = _view_chain(node, roots)
        if not chain or any(len(step.all_input_nodes) != 1 for step in chain):
            continue
        base = chain[0].all_input_nodes[0]
        place = places[node.name]
        source = base_place.setdefault(base, place)
        readers = list(place.users)
        if source is not place and filler is None:
            continue
        view = _copy_chain(backward.graph, chain, base, source, first)
        for reader in readers:
            reader.replace_input_with(place, view)
        if source is place:
            place.meta["val"] = base.meta["val"]
            if base in masters:
                place.meta["zinf_master"] = True
            outs[i] = base
        elif filler is not None:
            # Saved once is enough: a second reference would keep the base alive to the end of the backward.
            place.meta["val"] = filler.meta["val"]
            outs[i] = filler
    out.args = (tuple(outs),)
    forward.graph.eliminate_dead_code()
    forward.recompile()
    backward.recompile()


def sink_views(gm: fx.GraphModule, masters: set[fx.Node]) -> None:
    """Give every reader of a view of a master (or of a saved value) a chain of its own directly in front of it.

    A working copy then lives from just before one reader to just after it, and any two readers can use different copies."""
    graph = gm.graph
    views = {n: c for n in graph.nodes if n.op == "call_function" and (c := _view_chain(n, masters))}
    for node, chain in views.items():
        for reader in [u for u in node.users if u not in views and u.op != "output"]:
            root = next(a for a in chain[0].all_input_nodes if a in masters)
            reader.replace_input_with(node, _copy_chain(graph, chain, root, root, reader))
    for node in reversed(list(views)):
        if not node.users:
            graph.erase_node(node)
        else:
            node.meta[RETURNED_VIEW] = True  # it is an output: a view of the master itself, never of a working copy
    graph.lint()
    gm.recompile()


def hoist_gradient_views(backward: fx.GraphModule, gradients: list[fx.Node]) -> None:
    """Put the views that finish a gradient directly behind its producer, so that it can be handed over where it is born."""
    for node in gradients:
        steps: list[fx.Node] = []
        while node.op == "call_function":
            parent = next(iter(node.all_input_nodes), None)
            if len(node.all_input_nodes) != 1 or parent is None or _key(parent) != _key(node) or _key(node) is None:
                break
            steps.append(node)
            node = parent
        for step in steps:  # innermost view last: each lands directly behind the producer, in front of the one before
            node.append(step)
    backward.graph.lint()
    backward.recompile()


def install(
    module: nn.Module, session: Session, before_call: Callable[[], None], after_call: Callable[[], None]
) -> Callable[..., Any]:
    """Route `module(...)` through the compiled callable; returns it. The two hooks bracket every outermost call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    compiled = torch.compile(call, backend=make_backend(session), **_torch.compile_options())

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Traced as a part of something bigger (the user's own torch.compile): be the plain module there.
            return module._call_impl(*args, **kwargs)
        before_call()
        with _torch.dynamo_config.patch(skip_nnmodule_hook_guards=False):
            outs = compiled(*args, **kwargs)
        after_call()
        return outs

    module._compiled_call_impl = run
    return run
