"""The models of test_capture_patterns.py: each has one construct that a graph capture can trip over. At module level, so that
they can be pickled. Inputs are float32 [rows, WIDTH] unless a class says otherwise; outputs are scalars unless it does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from .support import MLP, WIDTH, tower


class Prints(MLP):
    """A call that can't be traced, between two parameters' uses."""

    def forward(self, x):
        h = torch.relu(self.a(x))
        print("bytes of b.weight:", self.b.weight.untyped_storage().nbytes())
        return self.c(self.tower(torch.tanh(self.b(h)))).sum()


class ReadsAfterBreak(MLP):
    """User code between two graphs computes with a parameter's values."""

    def forward(self, x):
        h = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        norm = float(self.b.weight.detach().norm())
        return self.c(self.tower(torch.tanh(self.b(h)))).sum() * norm


class DisabledMethod(MLP):
    @torch._dynamo.disable
    def inner(self, h):
        return self.b(h)

    def forward(self, x):
        return self.c(self.tower(torch.tanh(self.inner(torch.relu(self.a(x)))))).sum()


class Flagged(MLP):
    """Each value of `flag` is guarded on and so is another graph."""

    flag = 0

    def forward(self, x):
        return super().forward(x) * (self.flag + 1.0)


class Dropout(MLP):
    def forward(self, x):
        return self.c(self.tower(F.dropout(torch.relu(self.a(x)), 0.5, self.training))).sum()


class Tied(nn.Module):
    """int64 [n] -> []."""

    def __init__(self):
        super().__init__()
        self.emb, self.tower, self.head = nn.Embedding(200, WIDTH), tower(), nn.Linear(WIDTH, 200, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.tower(self.emb(ids))).logsumexp(-1).sum()


class ReadsMetadata(MLP):
    """The model looks at its parameters' device, dtype, shape, strides and class."""

    def forward(self, x):
        w = self.a.weight
        factor = w.numel() * (1 if w.is_contiguous() else 2) * (2 if w.is_leaf else 1) * (3 if isinstance(w, nn.Parameter) else 1)
        return super().forward(x.to(w.device, w.dtype).view(-1, w.shape[1])) * factor


class IteratesParameters(MLP):
    def forward(self, x):
        return super().forward(x) + sum(p.square().sum() for p in self.parameters())


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.bn, self.tower = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), tower()

    def forward(self, x):
        return self.tower(self.bn(self.l(x))).square().sum()


class Encoder(nn.Module):
    """float32 [batch, length, WIDTH] -> the same; eval under no_grad takes torch's fused fast path."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0) for _ in range(2)])

    def forward(self, x):
        return self.layers(x)


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.tower = weight_norm(nn.Linear(WIDTH, WIDTH)), spectral_norm(nn.Linear(WIDTH, WIDTH)), tower()

    def forward(self, x):
        return self.tower(self.b(torch.relu(self.a(x)))).sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.l(x))


class BreakingBlock(Block):
    def forward(self, x):
        h = self.l(x)
        torch._dynamo.graph_break()
        return torch.tanh(h)


class BorrowsParameter(nn.Module):
    """A parameter of a submodule is used by its parent too."""

    def __init__(self):
        super().__init__()
        self.m = MLP()

    @property
    def w(self):
        return self.m.a.weight

    def forward(self, x):
        return self.m(x) + F.linear(x, self.w).sum()


class Structured(MLP):
    """-> {"loss": [], "h": [rows, WIDTH], "t": plain values}."""

    def forward(self, x, scale=1.0, *, flag=None):
        return {"loss": super().forward(x) * scale, "h": self.a(x), "t": (x.shape, 3, flag)}


class ReturnsParameter(MLP):
    """-> ([], the parameter itself, a view of it)."""

    def forward(self, x):
        return super().forward(x), self.b.weight, self.b.weight.t()


class EditsParameter(MLP):
    """A weight is edited inside forward, as weight clipping does."""

    def forward(self, x):
        with torch.no_grad():
            self.b.weight.mul_(1.01)
        return super().forward(x)


class Checkpointed(MLP):
    def forward(self, x):
        h = checkpoint(lambda t: torch.relu(self.a(t)), x, use_reentrant=False)
        return self.c(self.tower(torch.tanh(checkpoint(self.b, h, use_reentrant=False)))).sum()


class ReentrantCheckpointed(MLP):
    def forward(self, x):
        h = checkpoint(lambda t: torch.relu(self.a(t)), x, use_reentrant=True)
        return self.c(self.tower(torch.tanh(self.b(h)))).sum()


class AutocastInside(MLP):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class SparseGradient(nn.Module):
    """int64 [n] -> []; the embedding's gradient is a COO tensor."""

    def __init__(self):
        super().__init__()
        self.emb, self.l = nn.Embedding(500, WIDTH, sparse=True), nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.l(self.emb(ids)).sum()
