"""What a gauge learns from the allocator's counters, on a made-up allocator and plans made by hand."""

from __future__ import annotations

from zinf_compile import measure
from zinf_compile.measure import ENOUGH_BYTES, SETTLED, Gauge, planned_levels, planned_saved, planned_seconds
from zinf_compile.schedule import Event, Placement
from zinf_compile.timeline import RunKey

from .passes.hand_made import plan_of

FW, BW = RunKey(0, "forward", ("w",)), RunKey(0, "backward", ("w",))
LABELS = {FW: "fw0", BW: "bw0"}


def events(*graphs: str, seconds: float = 1.0) -> tuple[Event, ...]:
    return tuple(Event(i, "compute", graph, i, "compute", (), seconds=seconds) for i, graph in enumerate(graphs))


def device(buffer: str, nbytes: int, birth: int, death: int) -> Placement:
    return Placement(buffer, "device", 0, nbytes, birth, death)


class FakeArena:
    """Bytes as the test says. `during` runs as if between two calls of the gauge."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def set(self, live: int, peak: int = 0) -> None:
        self.live = live
        self.peak = max(self.peak, live, peak)

    def reset_peak(self) -> None:
        self.peak = self.live

    def stats(self) -> dict[str, int]:
        return {"live": self.live, "peak": self.peak, "spilled_peak": 0, "over_limit_peak": 0}


class Bench:
    """A gauge with everything around it."""

    def __init__(self) -> None:
        self.arena = FakeArena()
        self.io_now = dict.fromkeys(("bytes_read", "bytes_written", "wait_seconds", "read_seconds", "write_seconds"), 0.0)
        self.gauge = Gauge(self.arena, lambda: dict(self.io_now))

    def run(self, key: RunKey, inside: int, seconds: float = 1.0, saved: int = 0, accounted: int = 0) -> None:
        """One run that reaches `inside` bytes and ends with what was alive before."""
        self.gauge.before(key, lambda: accounted)
        live = self.arena.live
        self.arena.set(live, inside)
        self.gauge.after(key, seconds, saved)


# ---- what a plan says of its runs ----------------------------------------------------------------------------------------


def test_planned_level_is_the_highest_sum_inside_a_run():
    plan = plan_of(
        events("fw0", "fw0", "fw0", "bw0", "bw0"),
        (
            device("resident", 100, -1, 5),
            device("act", 10, 0, 3),
            device("temporary", 7, 1, 1),
            device("copy", 50, 2, 2),
            device("grad", 20, 4, 4),
            Placement("elsewhere", "nvme", 0, 10**9, -1, 5),
        ),
    )
    assert planned_levels(plan) == {"fw0": 160, "bw0": 120}  # bw0: max(100 + 10, 100 + 20)


def test_planned_level_counts_birth_and_death_events_themselves():
    plan = plan_of(events("fw0", "bw0"), (device("a", 5, 0, 0), device("b", 3, 1, 1), device("c", 2, 0, 1)))
    assert planned_levels(plan) == {"fw0": 7, "bw0": 5}


def test_planned_level_of_a_run_without_buffers_is_zero():
    assert planned_levels(plan_of(events("inf0"))) == {"inf0": 0}


def test_planned_saved_is_what_outlives_its_run_in_memory():
    plan = plan_of(
        events("fw0", "fw0", "bw0", "bw0"),
        (
            device("kept", 8, 0, 2),
            device("also kept", 4, 1, 3),
            device("inner", 1, 0, 1),
            device("weight", 99, 0, 3),
            Placement("offloaded", "nvme", 0, 64, 1, 2),
        ),
        kinds={"kept": "activation", "also kept": "activation", "inner": "activation", "offloaded": "activation", "weight": "param"},
    )
    assert planned_saved(plan) == {"fw0": 12}


def test_planned_seconds_are_of_compute_events_only():
    transfers = (Event(2, "prefetch", "fw0", 2, "read", ("w",), seconds=9.0), Event(3, "gather", "fw0", 2, "compute", ("w",), seconds=9.0))
    plan = plan_of((*events("fw0", "bw0", seconds=0.25), *transfers, Event(4, "compute", "fw0", 2, "compute", (), seconds=0.5)))
    assert planned_seconds(plan) == {"fw0": 0.75, "bw0": 0.25}


# ---- what a gauge learns -------------------------------------------------------------------------------------------------


def test_bytes_beyond_the_plan_are_added_once():
    """Predicted 100, measured 130: 30 more for the next plan, which predicts 130; then nothing more is added."""
    bench = Bench()
    plan = plan_of(events("fw0", "bw0"), (device("a", 100, 0, 1),))
    bench.run(FW, 130)
    assert bench.gauge.measured(LABELS, plan, LABELS).workspace == {"fw0": 30}
    better = plan_of(events("fw0", "bw0"), (device("a", 130, 0, 1),))
    bench.run(FW, 130)
    assert bench.gauge.measured(LABELS, better, LABELS).workspace == {"fw0": 30}


def test_a_correction_shrinks_when_less_is_measured_and_never_below_zero():
    bench = Bench()
    bench.run(FW, 130)
    bench.gauge.measured(LABELS, plan_of(events("fw0"), (device("a", 100, 0, 0),)), LABELS)
    bench.run(FW, 110)
    assert bench.gauge.measured(LABELS, plan_of(events("fw0"), (device("a", 130, 0, 0),)), LABELS).workspace == {"fw0": 10}
    bench.run(FW, 20)
    assert bench.gauge.measured(LABELS, plan_of(events("fw0"), (device("a", 110, 0, 0),)), LABELS).workspace == {"fw0": 0}


def test_what_was_alive_when_the_step_began_is_not_the_runs():
    bench = Bench()
    bench.arena.set(1000)
    bench.run(FW, 1130)
    assert bench.gauge.measured(LABELS, plan_of(events("fw0"), (device("a", 100, 0, 0),)), LABELS).workspace == {"fw0": 30}


def test_user_code_between_forward_and_backward():
    """A loss that peaks at 500 and leaves 40 alive, beside 60 of saved activations that the plan knows."""
    bench = Bench()
    bench.arena.set(1000)
    bench.run(FW, 1060, saved=60)
    assert bench.gauge.saved_bytes == 60
    bench.arena.set(1060 + 40, peak=1060 + 500)
    bench.run(BW, 1100, accounted=60)
    found = bench.gauge.measured(LABELS, None, {})
    assert found.gap["bw0"] == 500 and found.foreign["bw0"] == 40
    assert found.gap["fw0"] == 0 and found.foreign["fw0"] == 0
    assert bench.gauge.saved_bytes == 0


def test_dropped_forwards_hold_nothing_once_forgotten():
    bench = Bench()
    bench.run(FW, 10, saved=60)
    bench.gauge.forget_open()
    assert bench.gauge.saved_bytes == 0


def test_the_pace_is_of_a_warm_run_without_its_waiting():
    bench = Bench()
    plan = plan_of(events("fw0", "bw0", seconds=2.0))
    bench.run(FW, 0, seconds=30.0)  # the first run is cold
    assert bench.gauge.measured(LABELS, plan, LABELS).speed == {}
    bench.gauge.before(FW, lambda: 0)
    bench.io_now["wait_seconds"] += 4.0
    bench.gauge.after(FW, 7.0, 0)
    assert bench.gauge.measured(LABELS, plan, LABELS).speed == {"fw0": 1.5}  # (7 - 4) / 2
    # The next plan predicts 3 s and the run takes 3 s: the pace stays.
    bench.run(FW, 0, seconds=3.0)
    assert bench.gauge.measured(LABELS, plan_of(events("fw0", "bw0", seconds=3.0)), LABELS).speed == {"fw0": 1.5}


def test_news_comes_with_the_first_two_runs_only():
    bench = Bench()
    told = []
    for _ in range(SETTLED + 2):
        bench.run(FW, 10)
        told.append(bench.gauge.news)
        bench.gauge.measured(LABELS, None, {})
    assert told == [True, True, False, False, False]


def test_a_settled_graph_is_no_longer_asked_about():
    """`accounted` walks every parameter: not in a steady step."""
    bench, asked = Bench(), []
    for _ in range(SETTLED + 3):
        bench.gauge.before(FW, lambda: asked.append(1) or 0)
        bench.gauge.after(FW, 1.0, 0)
    assert len(asked) == SETTLED and bench.gauge.records[FW].runs == SETTLED + 3


def test_the_books_of_a_step():
    bench = Bench()
    bench.run(FW, 700)
    bench.arena.set(0, peak=900)  # user code
    bench.run(BW, 300)
    bench.io_now.update(bytes_read=11.0, bytes_written=7.0)
    bench.gauge.step_done()
    assert (bench.gauge.step.peak, bench.gauge.step.bytes_read, bench.gauge.step.bytes_written) == (900, 11, 7)
    assert bench.gauge.step.seconds > 0
    bench.run(FW, 100)
    bench.gauge.step_done()
    assert (bench.gauge.step.peak, bench.gauge.step.bytes_read) == (100, 0)


def test_the_pace_of_an_update_leaves_out_its_waiting(monkeypatch):
    bench = Bench()
    clock = iter((10.0, 16.0))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    bench.gauge.update_begins()
    bench.io_now["wait_seconds"] += 4.0
    bench.gauge.update_ends(0.5)
    assert bench.gauge.update_pace == 4.0  # (16 - 10 - 4) / 0.5
    bench.gauge.update_ends(0.5)  # an end without a beginning says nothing
    assert bench.gauge.update_pace == 4.0


def test_disk_rates_are_believed_once_enough_was_moved():
    bench = Bench()
    before = bench.gauge.cluster()
    bench.io_now.update(bytes_read=ENOUGH_BYTES, read_seconds=1.0, bytes_written=2.0 * ENOUGH_BYTES, write_seconds=4.0)
    after = bench.gauge.cluster()
    assert after.nvme_read == before.nvme_read and after.nvme_write == ENOUGH_BYTES / 2
    bench.io_now["bytes_read"] += 1
    assert bench.gauge.cluster().nvme_read == ENOUGH_BYTES + 1


def test_summary_names_what_ran():
    bench = Bench()
    bench.run(FW, 1, seconds=0.5)
    bench.run(RunKey(0, "forward", ("w",), 2), 1, seconds=0.25)
    assert bench.gauge.summary() == [("forward of graph 0", 1, 0.5), ("forward of graph 0 #2", 1, 0.25)]
