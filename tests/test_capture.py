"""Capture: what graphs look like once they are normalised, and that running them as they are is plain PyTorch, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from zinf_compile._torch import storage_key
from zinf_compile.capture import RETURNED_VIEW, GraphSide, fills_storage, outputs_of, sink_views

from .passes.captured import Capture, captured

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def both(model: nn.Module, *inputs: torch.Tensor) -> Capture:
    """One step of the model captured and of a copy in plain PyTorch: outputs, gradients and buffers are equal."""
    plain = copy.deepcopy(model)
    session = captured(model)
    ours, theirs = model(*inputs), plain(*inputs)
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        assert torch.equal(a, b)
    for outs in (ours, theirs):
        sum(o.sum() for o in flat(outs) if o.requires_grad).backward()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
    for (name, p), (_, q) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(p, q), name
    assert session.runs == ["forward", "backward"] * len(session.pieces)
    return session


def flat(outs) -> list[torch.Tensor]:
    return list(outs) if isinstance(outs, (tuple, list)) else [outs]


def places(side: GraphSide) -> list[fx.Node]:
    return side.gm.graph.find_nodes(op="placeholder")


def masters_of(side: GraphSide) -> set[fx.Node]:
    return {places(side)[i] for i in side.masters}


def saved(side: GraphSide) -> list[fx.Node]:
    """What a forward saves for its backward."""
    return outputs_of(side.gm.graph)[side.num_outputs :]


def is_view_of(node: fx.Node, roots: set[fx.Node]) -> bool:
    val = node.meta.get("val")
    keys = {storage_key(r.meta["val"]) for r in roots}
    return node.op == "call_function" and isinstance(val, torch.Tensor) and node not in roots and storage_key(val) in keys


def seed(make):
    torch.manual_seed(0)
    return make()


class Attention(nn.Module):
    """q, k and v are three views of one projection, and all of them are needed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.project(x).split(16, dim=-1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


# ---- what is saved -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, Attention])
def test_masters_are_saved_themselves_and_never_a_view_of_one(make):
    """`t(weight)` in a saved position would keep a working copy alive over the turn."""
    (piece,) = both(seed(make), X).pieces
    masters = masters_of(piece.forward)
    assert len(masters) == len(piece.masters)
    assert not [n for n in saved(piece.forward) if is_view_of(n, masters)]
    # Each placeholder that receives a saved master is known as that master on the other side.
    for out, place in piece.forward.saved.items():
        node = outputs_of(piece.forward.gm.graph)[out]
        if node in masters and places(piece.backward)[place].users:
            position = places(piece.forward).index(node)
            assert piece.backward.masters[place] == piece.forward.masters[position]


def test_views_of_an_activation_are_saved_as_the_whole_of_it_once():
    (piece,) = both(seed(Attention), X).pieces
    projection = next(n for n in piece.forward.gm.graph.nodes if n.target is aten.addmm.default)
    key = storage_key(projection.meta["val"])
    kept = [n for n in saved(piece.forward) if isinstance(n, fx.Node) and storage_key(n.meta["val"]) == key]
    assert kept == [projection] and fills_storage(projection.meta["val"])
    # In the backward, the one placeholder feeds all three parts.
    (place,) = [
        places(piece.backward)[piece.forward.saved[i]]
        for i, n in enumerate(outputs_of(piece.forward.gm.graph))
        if n is projection and i in piece.forward.saved
    ]
    starts = {n.meta["val"].storage_offset() for n in piece.backward.gm.graph.nodes if is_view_of(n, {place})}
    assert starts >= {0, 16, 32}


def test_saved_positions_meet_their_placeholders():
    (piece,) = both(seed(mlp), X).pieces
    outs = outputs_of(piece.forward.gm.graph)
    assert piece.forward.num_outputs == 1 and sorted(piece.forward.saved) == list(range(1, len(outs)))
    for out, place in piece.forward.saved.items():
        ours, theirs = outs[out].meta["val"], places(piece.backward)[place].meta["val"]
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


# ---- where views stand ---------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Two far-apart readers of one transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        t = self.w.t()
        return torch.tanh(torch.tanh(torch.tanh(x @ t).exp()) @ t)


@pytest.mark.parametrize("make", [Shared, mlp, Attention])
def test_views_of_masters_stand_right_in_front_of_their_only_reader(make):
    (piece,) = both(seed(make), X).pieces
    for side in (piece.forward, piece.backward):
        masters = masters_of(side)
        views = [n for n in side.gm.graph.nodes if is_view_of(n, masters)]
        assert views
        for view in views:
            (reader,) = view.users
            between, node = [], view.next
            while node is not reader:
                between.append(node)
                node = node.next
            assert all(is_view_of(n, masters) and reader in chain_ends(n) for n in between)


def chain_ends(node: fx.Node) -> set[fx.Node]:
    """The readers that a chain of views leads to."""
    return set(node.users) | {end for user in node.users for end in chain_ends(user) if is_view_of(user, {node})}


def test_two_readers_have_a_view_each():
    (piece,) = both(seed(Shared), X).pieces
    (place,) = masters_of(piece.forward)
    views = [n for n in place.users if n.target is aten.t.default]
    assert len(views) == 2 and all(len(v.users) == 1 for v in views)


def test_a_view_that_is_returned_stays_and_is_marked():
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    w.meta["val"], x.meta["val"] = torch.empty(4, 4), torch.empty(4, 4)
    view = graph.call_function(aten.t.default, (w,))
    view.meta["val"] = w.meta["val"].t()
    other = graph.call_function(aten.mm.default, (x, x))
    product = graph.call_function(aten.mm.default, (other, view))
    other.meta["val"] = product.meta["val"] = torch.empty(4, 4)
    product.meta["val"] = torch.empty(4, 4)
    graph.output((product, view))
    gm = fx.GraphModule({}, graph)
    sink_views(gm, {w})
    copies = [n for n in graph.nodes if n.target is aten.t.default]
    assert len(copies) == 2 and copies[0] is view and view.meta[RETURNED_VIEW]
    assert copies[1].next is product and product.args[1] is copies[1] and RETURNED_VIEW not in copies[1].meta
    assert outputs_of(graph)[1] is view


def test_gradients_are_finished_right_behind_their_producer():
    (piece,) = both(seed(mlp), X).pieces
    outs = outputs_of(piece.backward.gm.graph)
    assert set(piece.backward.grads.values()) == set(range(len(piece.masters)))
    for position, k in piece.backward.grads.items():
        node = outs[position]
        assert tuple(node.meta["val"].shape) == tuple(piece.masters[k].shape)
        while is_view_of(node, {node.all_input_nodes[0]}) and len(node.all_input_nodes) == 1:
            assert node.prev is node.all_input_nodes[0]
            node = node.prev
        assert node.op == "call_function"


def test_no_tie_of_a_gradient_is_left_in_the_graphs():
    (piece,) = both(seed(Attention), X).pieces
    for side in (piece.forward, piece.backward):
        assert not [n for n in side.gm.graph.nodes if getattr(n.target, "namespace", "") == "zinf"]
    # Every master with a gradient is an input of the backward, so that the gradient can be handed to it.
    assert set(piece.backward.grads.values()) <= set(piece.backward.masters.values())


# ---- models --------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        return self.head(torch.tanh(self.embed(i)))


def test_tied_weights_are_one_master_with_one_gradient():
    (piece,) = both(seed(Tied), torch.arange(10)).pieces
    assert len(piece.masters) == 1 and len(piece.forward.masters) == 1
    assert list(piece.backward.grads.values()) == [0]


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return x @ self.w, self.w


def test_a_returned_parameter_is_the_parameter():
    model = seed(ReturnsParameter)
    session = captured(model)
    y, w = model(X)
    assert w is model.w and torch.equal(y, X @ model.w)
    (y.sum() + w.sum()).backward()
    expected = torch.autograd.grad((X @ model.w).sum() + model.w.sum(), model.w)[0]
    assert torch.equal(model.w.grad, expected) and session.runs == ["forward", "backward"]


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return x @ self.w, self.w.t()


def test_a_returned_view_of_a_parameter_looks_at_the_parameter():
    model = seed(ReturnsView)
    captured(model)
    _, view = model(X)
    assert view.untyped_storage().data_ptr() == model.w.untyped_storage().data_ptr()
    assert torch.equal(view, model.w.t())


class Chunked(nn.Module):
    """One parameter holds four layers, as fused projections do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 64) / 4)

    def forward(self, x):
        for part in self.w.chunk(4, dim=1):
            x = torch.tanh(x @ part)
        return x


def test_a_chunked_parameter_is_one_master_and_its_parts_are_no_outputs():
    (piece,) = both(seed(Chunked), X).pieces
    masters = masters_of(piece.forward)
    assert len(masters) == 1 and not [n for n in saved(piece.forward) if isinstance(n, fx.Node) and is_view_of(n, masters)]
    assert list(piece.backward.grads.values()) == [0]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3)))


def test_buffers_that_a_forward_updates():
    both(seed(Conv), torch.randn(2, 2, 8, 8))


def test_residual_sums_reuse_an_operand_and_change_no_value():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            x = torch.tanh(x)
            for layer in self.layers:
                x = x + layer(x)
            return x

    (piece,) = both(seed(Residual), X).pieces
    assert [n for side in (piece.forward, piece.backward) for n in side.gm.graph.nodes if n.target is aten.add_.Tensor]


def test_a_frozen_parameter_is_a_master_without_a_gradient():
    model = seed(mlp)
    model[0].weight.requires_grad_(False)
    (piece,) = both(model, X).pieces
    frozen = next(k for k, p in enumerate(piece.masters) if p is model[0].weight)
    assert frozen in piece.forward.masters.values() and frozen not in piece.backward.grads.values()


def test_a_changed_batch_size_is_one_more_symbolic_graph_for_all():
    model = seed(mlp)
    plain = copy.deepcopy(model)
    session = captured(model)
    for rows in (8, 12, 5, 31):
        x = torch.randn(rows, 16)
        model.zero_grad(), plain.zero_grad()
        ours, theirs = model(x), plain(x)
        ours.sum().backward(), theirs.sum().backward()
        assert torch.equal(ours, theirs)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
    assert len(session.pieces) == 2 and session.retraces == 2
    first, second = session.pieces
    assert not any(isinstance(d, torch.SymInt) for n in places(first.forward) for d in getattr(n.meta["val"], "shape", ()))
    assert any(isinstance(d, torch.SymInt) for n in places(second.forward) for d in getattr(n.meta["val"], "shape", ()))
    # Numbers travel beside tensors; masters are still told by what they are.
    assert [second.masters[k] for k in second.forward.masters.values()] == list(model.parameters())


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_an_inference_graph(guard):
    model = seed(Attention)
    plain = copy.deepcopy(model)
    session = captured(model)
    with guard():
        assert torch.equal(model(X), plain(X))
    (piece,) = session.pieces
    assert piece.backward is None and session.runs == ["inference"]
    assert piece.forward.phase == "inference" and piece.forward.num_outputs == 1
    assert sorted(piece.forward.masters.values()) == list(range(4))
    for view in [n for n in piece.forward.gm.graph.nodes if is_view_of(n, masters_of(piece.forward))]:
        assert len(view.users) == 1


def test_a_graph_break_makes_two_pieces():
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            x = torch.tanh(self.a(x))
            torch._dynamo.graph_break()
            return self.b(x)

    model = seed(Breaks)
    plain = copy.deepcopy(model)
    session = captured(model)
    ours, theirs = model(X), plain(X)
    ours.sum().backward(), theirs.sum().backward()
    assert torch.equal(ours, theirs) and all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
    assert [{id(p) for p in piece.masters} for piece in session.pieces] == [
        {id(model.a.weight), id(model.a.bias)}, {id(model.b.weight), id(model.b.bias)},
    ]  # fmt: skip
    assert session.runs == ["forward", "forward", "backward", "backward"]


def test_masters_are_inputs_and_never_baked_in():
    """A changed value and a changed storage are seen by the graph that is there."""
    model = seed(mlp)
    session = captured(model)
    model(X)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[2].weight.data = torch.randn(16, 32)
    plain = copy.deepcopy(model)
    plain._compiled_call_impl = None
    assert torch.equal(model(X), plain(X)) and len(session.pieces) == 1
    for side in (session.pieces[0].forward, session.pieces[0].backward):
        assert not list(side.gm.parameters()) and not side.gm.graph.find_nodes(op="get_attr")
