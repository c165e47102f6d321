"""Trains a small tied GPT in a process of its own and saves losses, gradients and weights; plain PyTorch never imports us.

    python -m tests.e2e.gpt_worker out.pt --engine eager|aot|zinf --budget min|half|ample [--dropout P] [--micro N] [--clip]
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, HIDDEN, LAYERS, LENGTH = 512, 128, 3, 48


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down, self.drop = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 4, HIDDEN // 4).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, HIDDEN)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN), nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--engine", choices=["eager", "aot", "zinf"], required=True)
    parser.add_argument("--budget", default="ample")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stock", action="store_true", help="do not hand the optimizer over")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = GPT(options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    sample = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(9))
    with tempfile.TemporaryDirectory() as store:
        if options.engine == "zinf":
            wrap(model, optimizer, options, sample, store)
        step = torch.compile(model, backend="aot_eager") if options.engine == "aot" else model
        result = train(model, step, optimizer, options)
        torch.save(result, options.out)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, sample: torch.Tensor, store: str) -> None:
    from zinf_compile import BudgetTooSmall, zinf_compile

    handed = None if options.stock else optimizer
    try:
        zinf_compile(model, 1 << 16, optimizer=handed, store_dir=store, example_inputs=(sample,))
        raise AssertionError("64 KiB cannot be enough")
    except BudgetTooSmall as error:
        minimum = error.minimum
    everything = 4 * sum(4 * p.numel() for p in model.parameters()) + (32 << 20)
    budget = {"min": minimum, "half": (minimum + everything - (32 << 20)) // 2, "ample": everything}[options.budget]
    zinf_compile(model, budget, optimizer=handed, store_dir=store)


def train(model: nn.Module, step: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> dict:
    data = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    losses, norms = [], []
    for _ in range(options.steps):
        optimizer.zero_grad()
        for _ in range(options.micro):
            ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=data)
            loss = F.cross_entropy(step(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / options.micro
            loss.backward()
            losses.append(loss.item())
        if options.clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    # Before the copies below: they are this script's own tensors, and spill where the budget is small.
    stats = model.zinf.stats() if options.engine == "zinf" else None
    return {
        "stats": stats,
        "losses": losses,
        "norms": norms,
        "grads": {n: p.grad.clone() for n, p in model.named_parameters()},
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


if __name__ == "__main__":
    main()
