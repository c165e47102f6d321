"""Train a byte-level GPT on the sources of Python's standard library, with less memory than the training states need.

    python examples/train_gpt.py                     # 3 minutes at most
    python examples/train_gpt.py --plain             # the same loop in plain PyTorch, to compare memory and loss
    python examples/train_gpt.py --mem-budget 1GiB --layers 12 --hidden 768

The only line that differs from plain PyTorch is the call of zinf_compile.
"""

import argparse
import os
import pathlib
import time

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Bytes [batch, seq] (int64) to logits [batch, seq, 256]; the head is tied to the embedding."""

    def __init__(self, layers: int, hidden: int, seq: int) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.Sequential(*[Block(hidden, max(1, hidden // 64)) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if name.endswith(("proj.weight", "down.weight")) else 0.02)
        self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.ln(self.blocks(self.tok(ids) + self.pos.weight[: ids.shape[1]])))


def corpus() -> torch.Tensor:
    """The standard library's own modules as one uint8 tensor: a few megabytes of text that every Python has."""
    folder = pathlib.Path(os.path.dirname(os.__file__))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def resident() -> float:
    """MiB of this process in memory, mapped files included."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mem-budget", default="160MiB", help="what training may hold above the interpreter and torch")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=3.0, help="stop after this time even if steps are left")
    parser.add_argument("--store-dir", default=None, help="folder on a disk for what doesn't fit (default: a temporary one)")
    parser.add_argument("--plain", action="store_true", help="don't use zinf_compile")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    data = corpus()
    model = GPT(options.layers, options.hidden, options.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20))
    if not options.plain:
        from zinf_compile import zinf_compile

        model = zinf_compile(model, mem_budget=options.mem_budget, optimizer=optimizer, store_dir=options.store_dir)

    num_params = sum(p.numel() for p in model.parameters())
    print(
        f"{num_params / 1e6:.1f} M parameters: {num_params * 16 / 2**20:.0f} MiB of weights, gradients and AdamW states, plus activations; "
        f"{'no budget' if options.plain else 'budget ' + options.mem_budget}; {len(data) / 1e6:.1f} MB of text"
    )
    started, losses = time.monotonic(), []
    bar = tqdm(range(options.steps), unit="step", dynamic_ncols=True)
    for _ in bar:
        begin = time.monotonic()
        starts = torch.randint(len(data) - options.seq - 1, (options.batch,))
        windows = torch.stack([data[i : i + options.seq + 1] for i in starts.tolist()]).long()
        optimizer.zero_grad()
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        rate = options.batch * options.seq / (time.monotonic() - begin)
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:.0f} tokens/s, {resident():.0f} MiB resident")
        if time.monotonic() - started > options.minutes * 60:
            break
    bar.close()
    if not options.plain:
        print(model.zinf.plan)
        print(model.zinf.report())
        model.zinf.close()
    last = losses[-5:]
    print(f"loss {losses[0]:.3f} -> {sum(last) / len(last):.3f} in {len(losses)} steps, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
