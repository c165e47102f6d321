"""One case in one process: `python -m tests.cases.child '<json of a Job>'`, answering on stdout with torch.save bytes.

The parent (harness.py) starts one child for plain PyTorch, which never imports zinf_compile, and others for zinf_compile.
The contract of a case file is in README.md. The answer is a dict:
  runs: list of {budget, tries, result | error, moved, spilled, io, graphs, breaks, warnings}, one for each budget of the job
  peak: bytes (plain child only): the highest "Total Allocated" that torch's own profiler reports for CPU memory over
        building and training the case, a count of tensor bytes that owes nothing to zinf_compile
The answer goes through a pipe, not a file, since some cases forbid the process to write files.
"""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

NUM_BATCHES = 6
MAX_TRIES = 8  # a second model, or a longer batch, may raise the minimum again
TINY = 4096  # bytes: a budget that nothing fits in
MINIMUM = "<minimum reported by the first error>"


@dataclass
class Job:
    """What a child is to do. budgets: "min", "half" (needs `peak`), or a number of bytes; ignored with a scenario."""

    path: str
    engine: str  # "plain" | "zinf"
    store: str = ""
    budgets: list[Any] = field(default_factory=list)
    scenario: int | None = None
    peak: int = 0
    adopt: bool = False
    minimum: int = 0  # the smallest budget, where it is known already

    def encode(self) -> str:
        return json.dumps(asdict(self))


def load(path: str | Path) -> ModuleType:
    path = Path(path)
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def feed(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def default_loop(case: ModuleType, model: nn.Module, factory: Callable, batches) -> dict[str, Any]:
    optimizer, losses = factory([p for p in model.parameters() if p.requires_grad]), []
    for batch in batches:
        optimizer.zero_grad()
        loss = case.loss_fn(feed(model, batch[0]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}


def new_optimizer(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train(case: ModuleType, wrap: Callable, factory: Callable = new_optimizer, after_build: Callable | None = None) -> dict[str, Any]:
    """Build, wrap and train; the values to compare: what the loop returned, the state dict, the gradients left."""
    if hasattr(case, "WRAP"):
        case.WRAP = wrap
    model = case.build()
    if after_build:
        after_build()
    model = wrap(model)
    torch.manual_seed(777)
    batches = case.batches(NUM_BATCHES)
    loop = case.train_loop(model, factory, batches) if hasattr(case, "train_loop") else default_loop(case, model, factory, batches)
    # Copies: what a closed engine leaves of a mapped tensor is not this harness's question.
    return {
        "loop": loop,
        "state": {k: v.clone() if torch.is_tensor(v) else v for k, v in model.state_dict().items()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
    }


def profiled_peak(case: ModuleType) -> int:
    """Bytes; see the module docstring."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(case, lambda m: m)
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(trace)
        events = json.loads(Path(trace).read_text())["traceEvents"]
    totals = [e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0]
    return max(totals, default=0)


def process_io() -> tuple[int, int]:
    """Bytes that the kernel read from and wrote to disks for this process so far (cached file pages don't count)."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


class Session:
    """The zinf_compile side of one run: wraps models under one budget and one store, and adds up what they did."""

    def __init__(self, budget: Any, store: str, adopt: bool) -> None:
        self.budget, self.store, self.adopt = budget, store, adopt
        self.models: list[nn.Module] = []
        self.adopted: dict[tuple[int, ...], torch.optim.Optimizer] = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        from zinf_compile import zinf_compile

        options: dict[str, Any] = {}
        params = [p for p in model.parameters() if p.requires_grad]
        if self.adopt and not any(isinstance(p, nn.parameter.UninitializedParameter) for p in params):
            options["optimizer"] = self.adopted[tuple(map(id, params))] = new_optimizer(params)
        wrapped = zinf_compile(model, self.budget, store_dir=self.store or None, **options)
        self.models.append(wrapped)
        return wrapped

    def factory(self, params) -> torch.optim.Optimizer:
        """The adopted optimizer where the loop asks for one over exactly its parameters, else a stock one."""
        params = list(params)
        return self.adopted.pop(tuple(map(id, params)), None) or new_optimizer(params)

    def bytes_moved(self) -> int:
        """By any of the models: the engine counts for the process, from the compilation of each model on."""
        return max(s["bytes_read"] + s["bytes_written"] for s in (m.zinf.stats() for m in self.models))

    def bytes_spilled(self) -> int:
        """The most bytes of user code's tensors (a stock optimizer's states) that the allocator had on disk at once."""
        return max(m.zinf.stats()["spilled_peak"] for m in self.models)

    def close(self) -> None:
        for model in self.models:
            model.zinf.close()
        self.models.clear()
        self.adopted.clear()


def run_zinf(case: ModuleType, budget: Any, job: Job, after_build: Callable | None = None) -> dict[str, Any]:
    """One budget; "min" starts from an absurd one and takes the minimum that the refusal names, on a fresh model."""
    from torch._dynamo.utils import counters

    from zinf_compile import BudgetTooSmall

    searching = budget in ("min", MINIMUM)
    run: dict[str, Any] = {"budget": TINY if searching else budget, "tries": 0}
    while True:
        torch._dynamo.reset()
        counters.clear()
        session = Session(run["budget"], job.store, job.adopt)
        run["tries"] += 1
        started, before = time.monotonic(), process_io()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run["result"] = train(case, session.wrap, session.factory, after_build)
            run["moved"], run["spilled"] = session.bytes_moved(), session.bytes_spilled()
        except BudgetTooSmall as error:
            if searching and run["tries"] < MAX_TRIES:
                run["budget"] = max(error.minimum, run["budget"] + 1)
                error.__traceback__ = None  # its frames hold the model
                session.close()
                gc.collect()
                continue
            run["error"] = describe(error, session)
        except BaseException as error:
            run["error"] = describe(error, session)
        run.setdefault("moved", 0)
        run.setdefault("spilled", 0)
        run["seconds"] = round(time.monotonic() - started, 2)
        run["io"] = [b - a for a, b in zip(before, process_io())]
        run["graphs"] = counters["stats"].get("unique_graphs", 0)
        run["breaks"] = sum(counters["graph_break"].values())
        run["warnings"] = sorted({str(w.message)[:200] for w in caught if "zinf" in str(w.message) or "memlock" in str(w.message).lower()})
        run["files_in_use"] = sorted(os.listdir(job.store)) if job.store else []
        session.close()
        return run


def describe(error: BaseException, session: Session) -> dict[str, Any]:
    """The error as plain data, and whether the weights can still be saved after it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    saved = None
    for model in session.models:
        try:
            state = model.state_dict()
            with open(os.devnull, "wb") as sink:
                torch.save(state, sink)
            saved = all(bool(torch.isfinite(v).all()) for v in state.values() if torch.is_tensor(v) and v.is_floating_point())
        except (RuntimeError, OSError, MemoryError):
            saved = False
    return {
        "type": type(error).__name__,
        "bases": [c.__name__ for c in type(error).__mro__],
        "message": str(error),
        "where": where,
        "state_saved": saved,
        "traceback": "".join(traceback.format_exception(error))[-4000:],
    }


def warm_up() -> None:
    """Train a two-layer model once, so that limits set afterwards meet the case and not the compiler's first use."""
    from zinf_compile import zinf_compile

    with tempfile.TemporaryDirectory() as folder:
        model = zinf_compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), "64MiB", store_dir=folder)
        optimizer = new_optimizer(model.parameters())
        nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        model.zinf.close()


def run_scenario(case: ModuleType, job: Job) -> dict[str, Any]:
    """Apply one entry of the case's `scenario()` in this process."""
    assert job.scenario is not None
    scenario = case.scenario(job.store)[job.scenario]
    present = sorted(os.listdir(job.store))
    if scenario.get("setup") or scenario.get("setup_after_build"):
        warm_up()
    if scenario.get("setup"):
        scenario["setup"]()
    run = run_zinf(case, scenario["mem_budget"], job, scenario.get("setup_after_build"))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_DATA):  # so that the answer can be composed and sent
        resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
    return {**run, "files_before": present}


def freeze(run: dict[str, Any]) -> dict[str, Any]:
    """The run with its tensors as bytes: kept as tensors they would count as the next run's own memory."""
    if "result" in run:
        buffer = io.BytesIO()
        torch.save(run["result"], buffer)
        run["result"] = buffer.getvalue()
    gc.collect()
    return run


def thaw(run: dict[str, Any]) -> dict[str, Any]:
    if isinstance(run.get("result"), bytes):
        run["result"] = torch.load(io.BytesIO(run["result"]), weights_only=False)
    return run


def wrap_from_env(model: nn.Module) -> nn.Module:
    """For cases that start processes of their own and wrap with the callable named in CASE_WRAP."""
    return Session(int(os.environ["CASE_BUDGET"]), os.environ["CASE_STORE"], False).wrap(model)


def main(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    case = load(job.path)
    if job.engine == "plain":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"runs": [{"budget": None, "result": train(case, lambda m: m)}], "peak": profiled_peak(case)}
    if job.scenario is not None:
        return {"runs": [run_scenario(case, job)]}
    root = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ.update(PYTHONPATH=path, CASE_WRAP="tests.cases.child:wrap_from_env", CASE_STORE=job.store, CASE_BUDGET=str(job.peak * 3 // 4))
    runs: list[dict[str, Any]] = []
    for budget in job.budgets:
        if budget == "half":
            minimum = job.minimum or run_zinf(case, "min", job)["budget"]
            budget = max(minimum, (minimum + job.peak) // 2)
        runs.append(freeze(run_zinf(case, budget, job)))
    return {"runs": runs}


if __name__ == "__main__":
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # whatever the case prints goes to stderr
    answer = io.BytesIO()
    torch.save(main(Job(**json.loads(sys.argv[1]))), answer)
    with os.fdopen(answer_fd, "wb") as pipe:
        pipe.write(answer.getvalue())
