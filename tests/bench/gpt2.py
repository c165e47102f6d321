"""GPT-2 in torch, random init: 124M (12 x 768) or 350M (24 x 1024) parameters, dropout 0, tied head; int64 [b, s] -> logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SIZES = {"tiny": (2, 128), "124M": (12, 768), "350M": (24, 1024)}  # name -> layers, hidden
VOCABULARY = 50257


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // 64
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, 64)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers: int, hidden: int, positions: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, hidden), nn.Embedding(positions, hidden)
        self.h = nn.ModuleList([Block(hidden) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def batch(index: int, size: int, seq: int) -> torch.Tensor:
    """The index-th batch: 64 distinct tokens, so that the loss moves within a few steps; the same for every engine."""
    return torch.randint(0, 64, (size, seq + 1), generator=torch.Generator().manual_seed(1234 + index))
