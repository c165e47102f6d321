"""`model.zinf`: one model under a budget. Knows its parameters and where they live; the domain plans, this puts into effect."""

from __future__ import annotations

import ctypes
import gc
import logging
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._torch import storage_key, storage_users
from .budget import format_bytes
from .capture import GraphSide
from .errors import StoreError, Unsupported, ZinfError
from .liveness import ParamInfo
from .run_report import render_report
from .runtime.masters import Masters, give_back_free_memory, is_movable
from .runtime.nvme_store import NvmeStore, default_store_dir
from .runtime.optimizer_states import existing_states, planned_states
from .schedule import Plan, owner_of

if TYPE_CHECKING:
    from .domain import Domain, Piece
    from .runtime.optimizer import AdoptedOptimizer

logger = logging.getLogger("zinf_compile")

# A store is reserved in full when it is made; what comes later (a larger batch, a second forward) grows it.
RESERVE_SLACK = 1.05
# Seconds of an adopted optimizer's arithmetic for one element, before one has been measured.
UPDATE_SECONDS = 1e-9
# An update stages at most a parameter, its gradient and three states.
STAGED_TENSORS = 5
# A parameter of less than a page is not worth a block.
MIN_MOVE = 4096


class PlannedOnly(Exception):
    """Ends a call that was made for its plan."""


class Session:
    """One compiled model. Public: plan, plans, report(), history(), stats(), close()."""

    def __init__(self, domain: Domain, module: nn.Module, budget: int, store_dir: str | None, strict: bool) -> None:
        self.domain = domain
        self.budget = budget
        self.strict = strict
        self.closed = False
        self.retraces = 0
        self.calls = 0
        self.plain_calls = 0
        self.graph_runs = 0
        self.planning_only = False
        self._runs_before = 0
        self._reserved = 0
        self._module = weakref.ref(module)
        self._store_dir = checked_folder(store_dir) if store_dir is not None else None
        self._store: NvmeStore | None = None
        self._params: dict[str, nn.Parameter] = {}
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter, bool]] = []
        self._strangers: dict[int, str] = {}
        self._adopted: AdoptedOptimizer | None = None
        self._io_start, self._ahead_start = domain.io(), domain.native.zinf_ahead_taken()
        self._arena_start = domain.arena.stats()
        self.masters = Masters(domain.arena, domain.native)
        others = domain.live_sessions()
        number = domain.join(self)
        self._prefix = f"model{number}:" if others else ""
        self.refresh()
        self._finalizer = weakref.finalize(module, _abandon, weakref.ref(self))

    # ---- what users read ----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in effect. Before the first forward there is none: ZinfError."""
        if self.domain.plan is None:
            raise ZinfError("there is no plan before the first forward: call the model once, or pass example_inputs=")
        return self.domain.plan

    @property
    def plans(self) -> list[Plan]:
        """The latest plans, oldest first."""
        return list(self.domain.plans)

    def history(self) -> dict[str, list[tuple[str, str]]]:
        """For each planned graph run, the printed graph after each pass."""
        return self.domain.histories()

    def stats(self) -> dict[str, int | float]:
        """Counters: bytes moved by the engine since this model was compiled, allocator peaks, runs and fall-backs."""
        io, arena = self.domain.io(), self.domain.arena.stats()
        return {
            "bytes_read": io["bytes_read"] - self._io_start["bytes_read"],
            "bytes_written": io["bytes_written"] - self._io_start["bytes_written"],
            "wait_seconds": io["wait_seconds"] - self._io_start["wait_seconds"],
            "bytes_read_ahead": self.domain.native.zinf_ahead_taken() - self._ahead_start,
            "calls": self.calls,
            "graph_runs": self.graph_runs,
            "plain_calls": self.plain_calls,
            "retraces": self.retraces,
            "budget": self.budget,
            "live": arena["live"],
            "peak": arena["peak"],
            "spilled": arena["spilled"],
            "spilled_peak": self.domain.gauge.spilled_peak,
            "spills": arena["spills"] - self._arena_start["spills"],
            "over_limit_peak": self.domain.gauge.over_limit_peak,
            "step_peak": self.domain.gauge.step.peak,
            "step_bytes_read": self.domain.gauge.step.bytes_read,
            "step_bytes_written": self.domain.gauge.step.bytes_written,
            "step_seconds": self.domain.gauge.step.seconds,
            "predicted_bytes_read": self.domain.predicted_step()[0],
            "predicted_bytes_written": self.domain.predicted_step()[1],
            "planned_addresses": self.domain.addresses.nbytes,
            "planned_held": self.domain.planned_held,
            "foreign": self.domain.held(),
            "planned_blocks": arena["planned"] - self._arena_start["planned"],
            "missed_blocks": sum(arena[k] - self._arena_start[k] for k in ("missed_size", "missed_busy")),
        }

    def report(self) -> str:
        """Predicted beside measured, and everything that did not go as planned."""
        return render_report(self.domain.plan, self.stats(), self.domain.gauge.summary())

    def close(self) -> None:
        """Give the model back as an ordinary module: parameters in RAM, no store, no planning."""
        if self.closed:
            return
        module = self._module()
        if module is not None:
            module.__dict__.pop("zinf", None)
            module._compiled_call_impl = None
        self.closed = True
        self.domain.limit_changed()  # what comes back to RAM now is no longer under this model's budget
        if self._adopted is not None:
            self._adopted.release()
            for _, _, state in self._states():
                self.masters.to_ram(state)
        for param in self._params.values():
            self.masters.to_ram(param)
            if param.grad is not None:
                self.masters.to_ram(param.grad)
            self.masters.forget(param)
        self.domain.leave(self)
        if self._store is not None:
            self._store.close()
            self._store = None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # A pickled or copied module is an ordinary one: no files, threads or plans inside.
        return _nothing, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    # ---- capture's owner ----------------------------------------------------------------------------------------------

    def captured_training(self, forward: GraphSide, backward: GraphSide, masters: list[nn.Parameter]) -> Piece:
        return self.domain.add_piece(self, forward, backward, masters)

    def captured_inference(self, graph: GraphSide, masters: list[nn.Parameter]) -> Piece:
        return self.domain.add_piece(self, graph, None, masters)

    def runner(self, piece: Piece, side: GraphSide) -> Callable[[list[Any]], Any]:
        return self.domain.runner(piece, side)

    def note_retrace(self) -> None:
        self.retraces += 1
        self.refresh()

    # ---- parameters ---------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: AdoptedOptimizer) -> None:
        self._adopted = optimizer
        self.domain.invalidate()

    def refresh(self) -> None:
        """Look at the module again: parameters may have been added, replaced, frozen, or given other storages."""
        module = self._module()
        if module is None:
            return
        lazy = nn.parameter.UninitializedParameter
        params = {n: p for n, p in module.named_parameters() if not isinstance(p, lazy)}
        for name, old in self._params.items():
            if params.get(name) is not old:
                self.masters.forget(old)
        changed = params.keys() != self._params.keys()
        for name, param in params.items():
            if self._params.get(name) is not param or self.masters.moved(param):
                self.masters.watch(param)
                changed = True
        slots = [
            (m._parameters, key, p, p.requires_grad)
            for m in module.modules()
            for key, p in m._parameters.items()
            if p is not None and not isinstance(p, lazy)
        ]
        changed = changed or [s[3] for s in slots] != [s[3] for s in self._slots]
        self._params, self._slots = params, slots
        if changed:
            self._strangers.clear()
            self.domain.own(self, ((self._prefix + n, p) for n, p in params.items()))
            self.domain.invalidate()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those with a storage of their own."""
        return (p for p in self._params.values() if p.layout == torch.strided and p.numel())

    def stranger(self, param: Any) -> str:
        """A planned name for a master that is not this module's (`functional_call` with other parameters)."""
        return self._strangers.setdefault(id(param), f"{self._prefix}stranger{len(self._strangers)}")

    def before_call(self) -> None:
        """Ahead of every outermost call: adopt storages and objects that user code has replaced since the last one."""
        self.calls += 1
        self._runs_before = self.graph_runs
        plan = self.domain.plan
        if plan is not None and plan.nothing_to_offload and not self.domain.stale:
            return  # nothing of ours would be out of date; what changes a graph is traced again and looked at then
        moved = self.masters.moved
        for store, key, param, trainable in self._slots:
            if store.get(key) is not param or param.requires_grad is not trainable or moved(param):
                self.refresh()
                return

    def after_call(self) -> None:
        """Behind every outermost call. Raises: Unsupported, if strict, where it ran no planned graph."""
        if self.graph_runs == self._runs_before:
            self.plain_calls += 1
            if self.strict:
                module = self._module()
                raise Unsupported(
                    f"strict=True: a call of {type(module).__name__} ran no planned graph, because Dynamo could not trace it "
                    "(TORCH_LOGS=graph_breaks says why) or was told not to (torch.compiler.disable, set_stance): it ran in eager, "
                    f"where nothing plans its memory for {format_bytes(self.budget)}. Remove what stops the trace, compile only "
                    "the part that traces, or leave strict out: then such calls keep the budget by spilling to disk"
                )
            if self.plain_calls == 1:
                logger.warning(
                    "zinf_compile: a call ran no planned graph, because Dynamo could not trace it (TORCH_LOGS=graph_breaks says "
                    "why): it ran in eager on the masters. Values are right; the budget is kept by dropping mapped pages and by "
                    "spilling, which is slower"
                )

    def make_room(self) -> None:
        """Move masters to disk ahead of any plan when the parameters, their gradients and states cannot all stay: what no
        graph captures then starts from there, and the first plan brings back what it wants in RAM."""
        trainable = {id(p) for p in self._params.values() if p.requires_grad}
        needed = 0
        for param in self._params.values():
            nbytes = param.numel() * param.element_size()
            states = self._planned_states(param)
            extra = nbytes + (sum(n for _, n in states) if states else 2 * nbytes)
            needed += nbytes + (extra if id(param) in trainable else 0)
        if needed <= self.budget:
            return
        infos = self.param_infos()
        movable = [p for n, p in self._params.items() if infos[self._prefix + n].movable and infos[self._prefix + n].nbytes >= MIN_MOVE]
        if movable:
            self._ensure_store(sum(-(-p.numel() * p.element_size() // 4096) * 4096 for p in movable))
            assert self._store is not None
            for param in movable:
                self.masters.to_disk(param, self._store)
            give_back_free_memory()
            self.domain.native.zinf_trimmer(self.domain.mapped_allowance)

    def param_infos(self) -> dict[str, ParamInfo]:
        """Every parameter under its planned name."""
        sharing: dict[int, int] = {}
        for param in self._params.values():
            if param.layout == torch.strided and param.numel():
                sharing[storage_key(param)] = sharing.get(storage_key(param), 0) + 1
        infos = {}
        for name, param in self._params.items():
            nbytes = param.numel() * param.element_size()
            movable = is_movable(param) and sharing[storage_key(param)] == 1
            if movable and not self.masters.on_disk(param):
                movable = storage_users(param) == 1
            states = self._planned_states(param)
            seconds = param.numel() * UPDATE_SECONDS * self.domain.gauge.update_pace if states else 0.0
            infos[self._prefix + name] = ParamInfo(
                nbytes, str(param.dtype).removeprefix("torch."), tuple(param.shape), movable, param.requires_grad, states, seconds
            )
        for name in self._strangers.values():
            infos[name] = ParamInfo(0, "float32", (), False, False)
        return infos

    def resident_bytes(self) -> int:
        """Bytes in RAM of masters, their gradients and adopted states."""
        total = 0
        for param in self._params.values():
            total += self.masters.ram_bytes(param)
            if param.grad is not None:
                total += self.masters.ram_bytes(param.grad)
        return total + sum(self.masters.ram_bytes(t) for _, _, t in self._states())

    def _states(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """(parameter, name, state) of the adopted optimizer, nothing once user code has dropped it."""
        optimizer = self._adopted.alive() if self._adopted is not None else None
        return existing_states(optimizer) if optimizer is not None else iter(())

    def _planned_states(self, param: torch.Tensor) -> tuple[tuple[str, int], ...]:
        optimizer = self._adopted.alive() if self._adopted is not None else None
        return planned_states(optimizer, param) if optimizer is not None else ()

    # ---- homes --------------------------------------------------------------------------------------------------------

    @property
    def store_handle(self) -> int:
        return self._store.handle if self._store is not None else 0

    @property
    def spill_dir(self) -> str | None:
        """Where the allocator may put what would pass the budget unplanned: files that are unlinked at once."""
        base = self._store_dir or default_store_dir(0)
        Path(base).mkdir(parents=True, exist_ok=True)
        return str(base)

    # What an adopted optimizer asks of its session.

    def home_of_state(self, param: torch.Tensor, name: str) -> str:
        return self.home_of(name, param)

    def new_state(self, param: torch.Tensor, like: torch.Tensor, home: str) -> torch.Tensor:
        """Zeros with the shape and dtype of `like`, in RAM or over a block of the store."""
        if home == "nvme" and self._store is not None and like.numel():
            state = self._store.new_tensor(tuple(like.shape), like.dtype)
            state.zero_()
            self.domain.native.zinf_block_drop(ctypes.c_void_p(state.data_ptr()))
            return state
        return torch.zeros_like(like)

    @property
    def update_tile(self) -> int:
        return self.domain.plan.options.get("update_tile", 1 << 20) if self.domain.plan is not None else 1 << 20

    @property
    def update_depth(self) -> int:
        return self.domain.plan.options.get("update_depth", 2) if self.domain.plan is not None else 2

    def before_update(self) -> None:
        """Ahead of a native update."""
        if self.domain.stale:
            self.domain.replan_if_known()
        if self._store is not None:
            # The update's writes come out of its staging buffers, whose number bounds them already.
            self._store.write_window(STAGED_TENSORS * self.update_tile * self.update_depth)
        self.domain.gauge.update_begins()

    def account(self, nbytes: int) -> None:
        """Staging memory of an update that is taken (> 0) or returned (< 0)."""
        self.domain.arena.external(nbytes)

    def after_update(self, params: Sequence[torch.Tensor]) -> None:
        """Working copies of what was updated are of the past."""
        if self._store is not None and self.domain.plan is not None:
            self._store.write_window(self.domain.plan.options.get("write_window", 0))
        self.domain.gauge.update_ends(sum(p.numel() for p in params) * UPDATE_SECONDS)
        stale = [param for param in params if self.masters.on_disk(param)]
        if self.domain.native.zinf_ahead_count():  # of states that torch's own kernels have updated
            stale += [state for _, _, state in self._states()]
        for tensor in stale:
            self.domain.native.zinf_block_invalidate(ctypes.c_void_p(tensor.data_ptr()))

    def tell_states(self) -> None:
        """Tell the engine which blocks hold each parameter's states, for the plan's read_ahead."""
        blocks: dict[int, list[int]] = {}
        for param, _, state in self._states():
            if self.masters.on_disk(state):
                blocks.setdefault(param.data_ptr(), []).append(state.data_ptr())
        for address, found in blocks.items():
            self.domain.native.zinf_ahead_states(ctypes.c_void_p(address), len(found), (ctypes.c_void_p * len(found))(*found))

    def planned_only(self) -> PlannedOnly:
        return PlannedOnly()

    def plan_with(self, example_inputs: tuple[Any, ...] | dict[str, Any]) -> None:
        """Capture and plan without computing anything: the first graph run stops once its plan is in effect."""
        module = self._module()
        assert module is not None
        self.planning_only = True
        try:
            if isinstance(example_inputs, dict):
                module(**example_inputs)
            elif isinstance(example_inputs, torch.Tensor):
                module(example_inputs)
            else:
                module(*example_inputs)
        except PlannedOnly:
            pass
        finally:
            self.planning_only = False

    def home_of(self, kind: str, param: torch.Tensor) -> str:
        """"device" or "nvme" for a buffer of one of our parameters: kind "" (the parameter), "grad", or a state's name."""
        owner = self.domain.owners.get(id(param))
        if owner is None or self.domain.plan is None:
            return "device"
        name = f"{kind}:{owner[1]}" if kind else owner[1]
        return self.domain.plan.homes.get(name, "device")

    def apply(self, plan: Plan) -> None:
        """Move masters and states to their homes; what goes to disk first, so that RAM is free for what comes back."""
        needed = self._nvme_bytes(plan)
        if needed:
            self._ensure_store(needed)
        if self._store is not None:
            self._store.write_window(plan.options.get("write_window", 0))
        placed = list(self._planned_tensors())
        moved = 0
        for tensor, home in placed:
            if home == "nvme" and self._store is not None and self.masters.to_disk(tensor, self._store):
                moved += tensor.numel() * tensor.element_size()
        if moved:
            give_back_free_memory()
        for tensor, home in placed:
            if home == "device" and self.masters.on_disk(tensor) and storage_users(tensor) == 1:
                self.masters.to_ram(tensor)
        if moved > 1 << 30:
            logger.info("zinf_compile: moved %s to %s", format_bytes(moved), self._store and self._store.path)

    def _planned_tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        for param in self._params.values():
            yield param, self.home_of("", param)
        for owner, name, state in self._states():
            yield state, self.home_of(name, owner)

    def _nvme_bytes(self, plan: Plan) -> int:
        """Disk space that this model's share of a plan takes, in whole pages."""
        total = 0
        names = {self._prefix + n for n in self._params}
        for name, home in plan.homes.items():
            owner = owner_of(name) if plan.kinds[name] in ("grad", "optim_state") else name
            mine = owner in names or plan.kinds[name] == "activation"
            if home == "nvme" and mine:
                total += -(-plan.sizes[name] // 4096) * 4096
        return total

    def _ensure_store(self, needed: int) -> None:
        reserve = int(needed * RESERVE_SLACK) + (1 << 16)
        if self._store is None:
            base = self._store_dir or default_store_dir(reserve)
            self._store = NvmeStore(base, reserve)
            self._reserved = reserve
        elif reserve > self._reserved:
            self._store.grow(reserve - self._reserved)
            self._reserved = reserve


def checked_folder(store_dir: str) -> str:
    """`store_dir` made if need be; StoreError naming it when nothing can be written there."""
    folder = Path(store_dir)
    try:
        if not store_dir:
            raise OSError("the path is empty")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(f"store_dir={store_dir!r} cannot hold a store: {error}. Name a folder on a disk that this process may write to") from error
    return store_dir


def _nothing() -> None:
    return None


def _abandon(ref: weakref.ref[Session]) -> None:
    """The module is gone: so are its masters; free the store and forget its graphs."""
    session = ref()
    if session is None:
        return
    params, session._params, session._slots = session._params, {}, []  # Dynamo may keep the session for longer
    if session.closed:
        return
    session.closed = True
    for param in params.values():
        session.masters.forget(param)
    session.domain.leave(session)
    if session._store is not None:
        session._store.close()  # mappings stay valid: an adopted optimizer may still step over them
        session._store = None
    gc.collect()
