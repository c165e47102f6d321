"""The planning domain: everything of this process that one memory budget covers, planned as one step.

A budget is a promise about the bytes that the process holds, so there is one domain a process however many models there
are. It owns what is process-wide by nature (torch's CPU allocator, the loaded engine, the timeline), turns what has been
captured into a Program, asks the planner, lets the judges accept or refuse, and puts the plan into effect: masters move to
their homes and every graph gets a variant rewritten for the plan.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx, nn

from .budget import format_budget
from .capture import GraphSide
from .cluster import Cluster
from .cost import Rates
from .errors import BudgetTooSmall
from .liveness import GraphFacts, ParamInfo, Run, analyse, build_program
from .measure import Gauge, planned_saved
from .passes import pipeline
from .placement import AddressPlanner
from .planner import make_plan
from .program import Program
from .rewrite import rewritten
from .runtime.arena import Arena
from .runtime.executor import Executor, Runner, Variant, compile_boxed
from .runtime.gradients import Gradients
from .runtime.native import io_stats, load
from .schedule import Plan
from .timeline import RunKey, Timeline
from .verify import verify_plan

if TYPE_CHECKING:
    from .session import Session

logger = logging.getLogger("zinf_compile")

# Lengths are planned in buckets of an eighth of a power of two, so that a loop with many lengths needs few plans.
BUCKETS_PER_OCTAVE = 4


# States read ahead in vain before that is given up (a GradScaler skips a few steps at first).
AHEAD_MISSES = 8


# Bytes of user code are planned in grains, so that a plan does not depend on a few tensors more or less.
HELD_GRAIN = 16 << 10


# The smallest block that is spilled: a file mapping of its own is not worth it for less, unless the budget is tiny.
SPILL_LEAST, SPILL_MOST = 64 << 10, 1 << 20


def with_margin(error: BudgetTooSmall, margin: int, num_models: int) -> BudgetTooSmall:
    """The same error, asking for `margin` bytes more, and naming what the budget covers."""
    minimum = error.minimum + margin
    message = str(error).replace(str(error.minimum), str(minimum)).replace(format_budget(error.minimum), format_budget(minimum))
    if num_models > 1:
        message += (
            f" The budget is the process's: the smallest of those given for its {num_models} compiled models "
            "(model.zinf.close() takes one out)."
        )
    return BudgetTooSmall(message, minimum, error.culprit)


@dataclass
class Piece:
    """One captured graph, or pair of graphs. sizes: the largest symbolic sizes it is planned for."""

    id: int
    session: weakref.ref[Session]
    forward: GraphFacts
    backward: GraphFacts | None
    num_masters: int  # not they themselves: Dynamo may keep a graph for longer than its module lives
    inference: bool
    sizes: dict[sympy.Symbol, int] = field(default_factory=dict)

    def facts(self, phase: str) -> GraphFacts:
        return self.backward if phase == "backward" and self.backward is not None else self.forward


class Domain:
    """See the module docstring. Not thread-safe beyond what autograd needs: one training thread."""

    def __init__(self) -> None:
        self.native = load()
        self.arena = Arena()
        self.executor = Executor(self.native)
        self.gradients = Gradients(self.master_of, self._grad_store, self.native)
        self.timeline = Timeline()
        self.gauge = Gauge(self.arena, self.io)
        self.addresses = AddressPlanner(self.arena)
        self.sessions: list[weakref.ref[Session]] = []
        self.pieces: dict[int, Piece] = {}
        self.owners: dict[int, tuple[weakref.ref[Session], str]] = {}  # id(parameter) -> its session, its planned name
        self.plan: Plan | None = None
        self.program: Program | None = None
        self.plans: list[Plan] = []
        self._stale = True  # something changed that the plan does not know
        self._variants: dict[RunKey, Variant] = {}
        self._labels: dict[RunKey, str] = {}
        self._names: dict[str, list[str]] = {}
        self._firsts: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._instances = 0
        self._piece_count = 0
        self._session_count = 0
        self._ahead_labels: set[str] = set()  # runs in which states are read ahead
        self._ahead_tried = self._ahead_missed = 0
        self.planned_held = 0  # bytes of user code when the plan was made

    def io(self) -> dict[str, float]:
        return io_stats(self.native)

    # ---- membership ---------------------------------------------------------------------------------------------------

    def live_sessions(self) -> list[Session]:
        return [s for ref in self.sessions if (s := ref()) is not None and not s.closed]

    def join(self, session: Session) -> int:
        """Add a model. Returns its number, which tells its parameters from those of other models."""
        if not self.live_sessions():
            self.arena.acquire()
        self.sessions = [ref for ref in self.sessions if (s := ref()) is not None and not s.closed]
        self.sessions.append(weakref.ref(session))
        self._session_count += 1
        self._stale = True
        self.limit_changed()
        return self._session_count

    def leave(self, session: Session) -> None:
        for piece in [p for p in self.pieces.values() if p.session() is session]:
            self.timeline.forget_piece(piece.id)
            del self.pieces[piece.id]
        for key in [k for k, (ref, _) in self.owners.items() if ref() is session or ref() is None]:
            del self.owners[key]
        self.sessions = [ref for ref in self.sessions if ref() is not session and ref() is not None]
        self._variants = {k: v for k, v in self._variants.items() if k.piece in self.pieces}
        self._stale = True
        self.native.zinf_ahead_forget()
        if self.sessions:
            self.limit_changed()
        else:
            self.native.zinf_trimmer(-1)
            self.arena.release()

    @property
    def budget(self) -> int:
        """The promise that covers all models: the smallest one that was given."""
        return min((s.budget for s in self.live_sessions()), default=0)

    def limit_changed(self) -> None:
        """Tell the allocator the budget that covers the models now alive."""
        sessions = self.live_sessions()
        strict = any(s.strict for s in sessions)
        spill = next((s.spill_dir for s in sessions if s.spill_dir), None)
        threshold = max(SPILL_LEAST, min(SPILL_MOST, self.budget // 64))
        self.arena.set_limit(self.budget, strict, spill, threshold)

    def limit_begins(self) -> None:
        """A first model has joined and made room: what it was built with, before it was ours, is not held against it."""
        if len(self.live_sessions()) == 1:
            self.gauge.forget_peaks()

    def own(self, session: Session, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """(Re-)register a model's parameters under their planned names."""
        for key in [k for k, (ref, _) in self.owners.items() if ref() is session or ref() is None]:
            del self.owners[key]
        for name, param in params:
            self.owners[id(param)] = (weakref.ref(session), name)

    def invalidate(self) -> None:
        self._stale = True

    @property
    def stale(self) -> bool:
        return self._stale

    def replan_if_known(self) -> None:
        """Plan again between graph runs, if any graph is known; a budget that is too small is the next forward's to report."""
        if self.timeline.episodes and not self.timeline.open_forwards:
            try:
                self._replan()
            except BudgetTooSmall:
                self._stale = True

    # ---- capture ------------------------------------------------------------------------------------------------------

    def add_piece(self, session: Session, forward: GraphSide, backward: GraphSide | None, masters: list[nn.Parameter]) -> Piece:
        self._piece_count += 1
        piece = Piece(
            self._piece_count,
            weakref.ref(session),
            analyse(forward),
            analyse(backward) if backward is not None else None,
            len(masters),
            backward is None,
        )
        self.pieces[piece.id] = piece
        return piece

    def runner(self, piece: Piece, side: GraphSide) -> Callable[[list[Any]], Any]:
        # AOTAutograd hands the graph it compiles a second time, possibly as a copy: run that one.
        facts = piece.facts(side.phase)
        facts.side.gm = side.gm
        return Runner(self.run, piece, side.phase).boxed()

    # ---- running ------------------------------------------------------------------------------------------------------

    def run(self, runner: Runner, args: list[Any]) -> Any:
        """One graph run, from AOTAutograd. Plans first if this run has no plan yet."""
        piece: Piece = runner.piece
        session = piece.session()
        facts = piece.facts(runner.phase)
        if session is None or session.closed or piece.id not in self.pieces:
            return compile_boxed(facts.side.gm)(args)  # closed: an ordinary compiled model
        names = tuple(self._name_of(args[i], session) for i in facts.side.masters)
        order = tuple(n for _, n in sorted(zip(facts.side.masters.values(), names)))
        key = self.timeline.key(piece.id, runner.phase, self._master_names(piece, facts, order, runner.phase))
        self._grow_sizes(piece, facts.symbol_values(args))
        if self._stale or key not in self._labels or self._crowded_out():
            self._expect(piece, key)
            self._replan()
        variant = self._variant(key, piece)
        if session.planning_only:
            raise session.planned_only()
        session.graph_runs += 1
        self.native.zinf_ahead_allow(int(self._reads_ahead(key)))
        self.gauge.before(key, self._accounted)
        outs, seconds = self.executor.run(variant, args, session.store_handle)
        self.gauge.after(key, seconds, self._saved.get(self._labels[key], 0))
        self.timeline.record(key)
        return outs

    def _reads_ahead(self, key: RunKey) -> bool:
        """Whether this run may read states for the update that follows. A loop in which none follows soon loses the right."""
        if self._ahead_labels or self.native.zinf_ahead_bytes():  # a graph run where an update was to come needs the memory
            self._ahead_missed += int(self.native.zinf_ahead_count() > 0)
            self.native.zinf_ahead_forget()
        if self._labels[key] not in self._ahead_labels or not self.timeline.last_of_step(key):
            return False
        if self._ahead_missed > AHEAD_MISSES and 4 * self._ahead_missed > self._ahead_tried:
            return False
        self._ahead_tried += 1
        for session in self.live_sessions():
            session.tell_states()
        return True

    def _master_names(self, piece: Piece, facts: GraphFacts, order: tuple[str, ...], phase: str) -> tuple[str, ...]:
        """Names of all the piece's masters: a backward may receive fewer than the forward, and takes the forward's."""
        if phase != "backward":
            known = dict(zip(sorted(facts.side.masters.values()), order))
            return tuple(known.get(k, "") for k in range(piece.num_masters))
        mine = dict(zip(sorted(facts.side.masters.values()), order))
        for forward in self.timeline.open_keys():
            if forward.piece == piece.id and all(forward.masters[k] == n for k, n in mine.items()):
                return forward.masters
        for run in self._labels:  # its forward is no longer open: retain_graph=True, or too many runs ago
            if run.piece == piece.id and all(run.masters[k] == n for k, n in mine.items()):
                return run.masters
        return tuple(mine.get(k, "") for k in range(piece.num_masters))

    def _name_of(self, param: Any, session: Session) -> str:
        master = self.master_of(param)
        if master is None:
            session.refresh()
            master = self.master_of(param)
        return self.owners[id(master)][1] if master is not None else session.stranger(param)

    def master_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The registered parameter that a graph argument is, or aliases (saved-tensor hooks hand back another object)."""
        if id(tensor) in self.owners:
            return tensor
        if tensor.layout != torch.strided or not tensor.numel():
            return None
        address = tensor.data_ptr()
        for session in self.live_sessions():
            for param in session.parameters():
                if param.data_ptr() == address and param.shape == tensor.shape:
                    return param
        return None

    def _grow_sizes(self, piece: Piece, values: dict[sympy.Symbol, int]) -> None:
        for symbol, value in values.items():
            if value > piece.sizes.get(symbol, 0):
                if symbol in piece.sizes:
                    value = _bucket(value)
                piece.sizes[symbol] = value
                self._stale = True

    def _expect(self, piece: Piece, key: RunKey) -> None:
        if piece.inference:
            self.timeline.expect((key,))
        else:
            self.timeline.expect(
                (
                    RunKey(piece.id, "forward", key.masters, key.occurrence),
                    RunKey(piece.id, "backward", key.masters, key.occurrence),
                )
            )

    def step_done(self) -> None:
        """The optimizer has stepped: the step's runs are known, and so is what they measured."""
        self.gauge.step_done()
        self.timeline.step_done()
        if not self.timeline.open_forwards:
            self.gauge.forget_open()
        if self.timeline.changed or self.gauge.news:
            self.timeline.changed = False
            self._stale = True
        elif not self._stale and self.plan is not None and not self.plan.nothing_to_offload:
            self.addresses.step_done()

    # ---- planning -----------------------------------------------------------------------------------------------------

    def held(self) -> int:
        """Bytes under the budget that no plan accounts for: user tensors, another library's states, spilled leftovers aside."""
        return -(-max(0, self.arena.live - self._accounted()) // HELD_GRAIN) * HELD_GRAIN

    def _crowded_out(self) -> bool:
        """User code holds more than was planned for, and it no longer fits: what can leave should, before tensors are spilled.
        By quarters, so that memory that grows step by step is planned for a few times only."""
        return self.gauge.crowded() and self.held() > self.planned_held + max(HELD_GRAIN, self.planned_held // 4)

    def _accounted(self) -> int:
        """Bytes in RAM that the plan's own buffers take right now: masters, gradients, states, saved activations, copies."""
        total = self.native.zinf_held_bytes() + self.native.zinf_ahead_bytes() + self.gauge.saved_bytes
        for session in self.live_sessions():
            total += session.resident_bytes()
        return total

    def _runs(self) -> list[Run]:
        """The planned step: every known episode, runs labelled in order."""
        runs: list[Run] = []
        self._labels, counts, pairs = {}, {"forward": 0, "backward": 0, "inference": 0}, 0
        short = {"forward": "fw", "backward": "bw", "inference": "inf"}
        for episode in self.timeline.episodes:
            open_pairs: dict[tuple[int, tuple[str, ...], int], int] = {}
            for key in episode:
                piece = self.pieces[key.piece]
                label = f"{short[key.phase]}{counts[key.phase]}"
                counts[key.phase] += 1
                identity = (key.piece, key.masters, key.occurrence)
                if key.phase == "forward":
                    pairs += 1
                    open_pairs[identity] = pairs
                pair = open_pairs.get(identity, -1) if key.phase != "inference" else -1
                runs.append(Run(label, piece.facts(key.phase), key.masters, tuple(piece.sizes.items()), pair))
                self._labels[key] = label
        return runs

    def _params(self) -> dict[str, ParamInfo]:
        params: dict[str, ParamInfo] = {}
        for session in self.live_sessions():
            params.update(session.param_infos())
        return params

    def _replan(self, collected: bool = False) -> None:
        """Make, judge and apply a plan for everything known. Raises BudgetTooSmall with nothing computed or lost."""
        start = time.perf_counter()
        sessions = self.live_sessions()
        for session in sessions:
            session.refresh()
        params = self._params()
        self.timeline.keep_only(params.keys(), self.pieces.keys())
        planned = dict(self._labels)
        runs = self._runs()
        measured = self.gauge.measured(self._labels, self.plan, planned)
        program, names = build_program(runs, params, self._rates(), measured)
        held = self.held()
        try:
            plan = make_plan(program, self._cluster(), self.budget, held=held)
        except BudgetTooSmall as error:
            if not collected and gc.collect() and (self.held() < held or any(s.closed for s in sessions)):
                self._replan(collected=True)  # garbage is no reason to refuse
                return
            begun = any(s.graph_runs for s in sessions)
            strict = any(s.strict for s in sessions)
            if (error.minimum - held > self.budget or strict) and not begun:
                self._stale = True
                # What user code holds differs by a little from run to run: ask for a grain more than was needed here.
                raise with_margin(error, HELD_GRAIN, len(sessions)) from None
            # The step alone would fit, but something outside the plan has taken the room (a stock optimizer's states, the
            # user's own tensors): go on with the leanest plan; the allocator spills what would pass the budget, and the
            # report says so.
            plan = make_plan(program, self._cluster(), error.minimum, held=held)
        verify_plan(plan, program)
        self.plan, self.program, self._names, self.planned_held = plan, program, names, held
        self.plans.append(plan)
        del self.plans[:-8]
        self._saved = planned_saved(plan)
        self._firsts = {label: first for label, first, _ in program.graphs}
        self._variants = {}
        self._ahead_labels = {e.graph for e in plan.events if e.op == "read_ahead"}
        self.addresses.restart()
        self._stale = False
        for session in sessions:
            if not session.closed:  # its module may have been collected meanwhile
                session.apply(plan)
        self.limit_changed()
        self.native.zinf_trimmer(-1 if plan.nothing_to_offload else self.mapped_allowance)
        seconds = time.perf_counter() - start
        if seconds > 1:
            logger.info("zinf_compile: planned %d ops in %.1f s", len(program.ops), seconds)

    @property
    def mapped_allowance(self) -> int:
        """Pages of store mappings that user code may leave in this process before they are dropped."""
        return max(1 << 20, min(16 << 20, self.budget // 64))

    def _cluster(self) -> Cluster:
        return self.gauge.cluster()

    def _rates(self) -> Rates:
        return Rates()

    def _grad_store(self, master: torch.Tensor) -> int:
        """Store handle for the gradient of this master when it is homed on disk, else 0."""
        owner = self.owners.get(id(master))
        if owner is None or self.plan is None:
            return 0
        session = owner[0]()
        if session is None or self.plan.homes.get(f"grad:{owner[1]}") != "nvme":
            return 0
        return session.store_handle

    def predicted_step(self) -> tuple[int, int]:
        """Bytes read and written by a step as the last one ran: episodes count as often as they were repeated."""
        if self.plan is None:
            return 0, 0
        times: dict[str, int] = {}
        for key, label in self._labels.items():
            times[label] = max(1, self.timeline.last_step.get(key, 0)) if key.phase != "inference" else self.timeline.last_step.get(key, 0)
        read = written = 0
        for event in self.plan.events:
            n = times.get(event.graph, 1)
            if event.op in ("prefetch",):
                read += n * event.nbytes
            elif event.op == "offload":
                written += n * event.nbytes
            elif event.op == "reduce_grad":
                written += n * event.nbytes
                read += (n - 1) * event.nbytes  # each further micro-batch adds to what is there
        reads, writes = self.plan.predicted.bytes_read, self.plan.predicted.bytes_written
        once_read = sum(e.nbytes for e in self.plan.events if e.op == "prefetch")
        once_written = sum(e.nbytes for e in self.plan.events if e.op in ("offload", "reduce_grad"))
        return read + reads - once_read, written + writes - once_written

    # ---- variants -----------------------------------------------------------------------------------------------------

    def _variant(self, key: RunKey, piece: Piece) -> Variant:
        if key not in self._variants:
            facts = piece.facts(key.phase)
            gm = self.rewrite(key, facts)
            self._instances += 1
            moves = any(n.op == "call_function" and getattr(n.target, "namespace", "") == "zinf" for n in gm.graph.nodes)
            self._variants[key] = Variant(compile_boxed(gm), self._instances, moves, gm)
        return self._variants[key]

    def rewrite(self, key: RunKey, facts: GraphFacts, instruments: tuple[pipeline.Instrument, ...] = ()) -> fx.GraphModule:
        """A copy of a captured graph with the plan written into it, checked."""
        assert self.plan is not None
        label = self._labels[key]
        return rewritten(self.plan, label, self._firsts.get(label, 0), facts, self._names[label], key.masters, instruments)

    def histories(self) -> dict[str, list[tuple[str, str]]]:
        """For each planned run, its printed graph after each pass."""
        found = {}
        for key, label in self._labels.items():
            history = pipeline.History()
            self.rewrite(key, self.pieces[key.piece].facts(key.phase), (history,))
            found[label] = history.graphs
        return found


def _bucket(value: int) -> int:
    """The next size at which a plan is made: a quarter of a power of two, so at most a quarter more than asked."""
    step = max(1, (1 << max(0, value.bit_length() - 1)) // BUCKETS_PER_OCTAVE)
    return -(-value // step) * step
