"""Programs to plan: a small transformer-like one, and random ones with everything a captured step may contain."""

from __future__ import annotations

import random
from dataclasses import replace

from zinf_compile.cluster import Cluster
from zinf_compile.program import Buffer, Op, Program

CLUSTER = Cluster.this_machine()


class Builder:
    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []

    def buffer(self, name: str, kind: str, nbytes: int, *, movable: bool = False, of: str = "") -> str:
        self.buffers[name] = Buffer(name, kind, nbytes, "float32", (nbytes // 4,), movable, of)
        return name

    def param(self, name: str, nbytes: int, *, states: int = 2, trained: bool = True, movable: bool = True) -> str:
        self.buffer(name, "param", nbytes, movable=movable)
        if trained:
            self.buffer(f"grad:{name}", "grad", nbytes, movable=movable, of=name)
            for k in range(states):
                self.buffer(f"state{k}:{name}", "optim_state", nbytes, movable=movable, of=name)
        return name

    def op(self, graph: str, name: str, phase: str, seconds: float, **rest) -> None:
        self.ops.append(Op(graph, name, name.split("_")[0], phase, seconds, **rest))

    def update(self, name: str) -> None:
        states = tuple(b for b in self.buffers if b.startswith("state") and b.endswith(f":{name}"))
        self.op(
            "update", f"adam_{name}", "update", 0.0, reads=(name, f"grad:{name}", *states), writes=(name, *states)
        )

    def program(self) -> Program:
        return Program(tuple(self.ops), dict(self.buffers))


def transformer(layers: int = 3, width: int = 256, tokens: int = 256, seconds: float = 2e-3) -> Program:
    """Blocks of two linears each, a tied table at both ends, a loss; Adam."""
    b = Builder()
    square = 4 * width * width
    table = b.param("wte", 4 * square)
    b.buffer("tokens", "input", tokens * 8)
    h = b.buffer("a.embed", "activation", tokens * width * 4, movable=True)
    b.op("fw0", "embed", "forward", seconds, reads=(table, "tokens"), writes=(h,), block="wte")
    saved = []
    for k in range(layers):
        for role, scale in (("up", 4), ("down", 4)):
            w, bias = b.param(f"h.{k}.{role}.weight", scale * square), b.param(f"h.{k}.{role}.bias", 4 * width)
            out = b.buffer(
                f"a.{k}.{role}", "activation", tokens * width * 4 * (4 if role == "up" else 1), movable=True
            )
            b.op(
                "fw0", f"mm_{k}_{role}", "forward", seconds, reads=(h, w, bias), writes=(out,), workspace=65536,
                block=f"h.{k}.{role}",
            )  # fmt: skip
            saved.append((h, w, bias, out))
            h = out
    b.buffer("loss", "output", 4)
    b.op("fw0", "loss", "forward", seconds, reads=(h, table), writes=("loss",), block="head")
    d = b.buffer("d.head", "activation", tokens * width * 4)
    part = b.buffer("d.table", "activation", 4 * square)
    b.op("bw0", "loss_backward", "backward", seconds, reads=(h, table), writes=(d, part), frees=(h,), block="head")
    for at, (inner, w, bias, _) in enumerate(reversed(saved)):
        e = b.buffer(f"d.{at}", "activation", b.buffers[inner].nbytes)
        block = w.rsplit(".", 1)[0]
        b.op(
            "bw0", f"mm_backward_{w}", "backward", 2 * seconds, reads=(inner, w, d),
            writes=(e, f"grad:{w}", f"grad:{bias}"), frees=(d, inner), workspace=65536, block=block,
        )  # fmt: skip
        d = e
    b.op(
        "bw0", "embed_backward", "backward", seconds, reads=(d, "tokens", part), writes=("grad:wte",), frees=(d, part),
        block="wte",
    )  # fmt: skip
    for name in [n for n, x in b.buffers.items() if x.kind == "param"]:
        b.update(name)
    return b.program()


def random_program(seed: int) -> Program:
    """Chains with skips, ties, frozen and immovable parameters, sizes from zero up, up to two forward graphs before their
    backward graphs, user code in between that holds foreign bytes, in-place writes, two runs of one parameter in a graph."""
    r = random.Random(seed)
    b = Builder()

    def size() -> int:
        return r.choice([0, 4, 60, 4096, 5000, 20_000, r.randrange(1, 40) * 4096, r.randrange(1, 400) * 1000])

    def seconds() -> float:
        return r.choice([0.0, 1e-5, 1e-4, 1e-3])

    params = [
        b.param(f"p{k}", size(), states=r.choice([0, 1, 2]), trained=r.random() < 0.8, movable=r.random() < 0.9)
        for k in range(r.randrange(1, 9))
    ]
    if r.random() < 0.5:
        b.buffer("kept by the loss", "foreign", size())
    forwards, completed = [], {}
    for g in range(r.choice([1, 1, 1, 2])):
        alive = [b.buffer(f"x{g}", "input", size())]
        steps = []
        for k in range(r.randrange(1, 9)):
            out = b.buffer(f"a{g}.{k}", "activation", size(), movable=r.random() < 0.85)
            reads = tuple(dict.fromkeys(r.choices(alive[-3:], k=2)))
            used = tuple(r.sample(params, k=min(len(params), r.choice([0, 1, 1, 2]))))
            work = r.choice([0, 0, 700, 30_000])
            again = (alive[-1],) if len(alive) > 1 and r.random() < 0.1 else ()
            b.op(
                f"fw{g}", f"f{g}.{k}", "forward", seconds(), reads=(*reads, *used), writes=(out, *again),
                workspace=work, block=f"h.{k}",
            )  # fmt: skip
            alive.append(out)
            steps.append((reads, used, out))
        out = b.buffer(f"y{g}", "output", size())
        b.op(f"fw{g}", f"out{g}", "forward", seconds(), reads=(alive[-1],), writes=(out,))
        forwards.append((g, steps))
        if r.random() < 0.5:
            b.op("user", f"loss{g}", "user", seconds(), reads=(out, r.choice(params)))
    for g, steps in reversed(forwards):
        start = len(b.ops)
        d = b.buffer(f"d{g}", "activation", size())
        b.op(f"bw{g}", f"start{g}", "backward", seconds(), reads=(f"y{g}",), writes=(d,))
        for k in range(len(steps) - 1, -1, -1):
            reads, used, out = steps[k]
            e = b.buffer(f"d{g}.{k}", "activation", size())
            mine = tuple(f"grad:{p}" for p in used if f"grad:{p}" in b.buffers)
            b.op(
                f"bw{g}", f"b{g}.{k}", "backward", seconds(),
                reads=tuple(dict.fromkeys((*reads, *used, *((out,) if r.random() < 0.7 else ()), d))),
                writes=(e, *mine), frees=(d,), workspace=r.choice([0, 0, 5000]), block=f"h.{k}",
            )  # fmt: skip
            completed.update({name: len(b.ops) - 1 for name in mine})
            d = e
        b.op(f"bw{g}", f"end{g}", "backward", seconds(), reads=(d,), frees=(d,))
        _free_after_last_use(b, g, start)
    if r.random() < 0.85:
        for name in params:
            if f"grad:{name}" in completed:
                b.update(name)
    return b.program()


def _free_after_last_use(b: Builder, g: int, start: int) -> None:
    """Each saved activation of graph g dies in its last backward reader, or with the graph when nothing there reads it."""
    last = {name: len(b.ops) - 1 for name in b.buffers if name.startswith(f"a{g}.")}
    for i in range(start, len(b.ops)):
        last.update({name: i for name in b.ops[i].reads if name in last})
    for name, i in last.items():
        b.ops[i] = replace(b.ops[i], frees=(*b.ops[i].frees, name))
