"""The timeline against what it promises: keys that pair, episodes that fold, growth that is bounded, and no news twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_compile.timeline import MAX_EPISODES, MAX_OPEN_RUNS, RunKey, Timeline

pieces = st.integers(0, 3)
relaxed = settings(deadline=None, max_examples=60)


def run(timeline: Timeline, piece: int, phase: str, masters: tuple[str, ...] = ()) -> RunKey:
    key = timeline.key(piece, phase, masters or (f"w{piece}",))
    timeline.record(key)
    return key


@st.composite
def nestings(draw) -> list[tuple[str, int]]:
    """A closed episode: forwards and backwards of the same pieces, a backward always of a forward that waits."""
    script: list[tuple[str, int]] = []
    waiting: list[int] = []
    for _ in range(draw(st.integers(1, 12))):
        if waiting and draw(st.booleans()):
            script.append(("backward", waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
        else:
            piece = draw(pieces)
            script.append(("forward", piece))
            waiting.append(piece)
    while waiting:
        script.append(("backward", waiting.pop()))
    return script


def play(timeline: Timeline, script: list[tuple[str, int]]) -> list[RunKey]:
    return [run(timeline, piece, phase) for phase, piece in script]


def closed_parts(script: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Where nothing waits for a backward, an episode ends."""
    parts, open_count = [[]], 0
    for phase, piece in script:
        parts[-1].append((phase, piece))
        open_count += 1 if phase == "forward" else -1
        if open_count == 0:
            parts.append([])
    return parts[:-1]


@relaxed
@given(nestings())
def test_keys_pair_and_tell_what_is_open_at_once_apart(script):
    timeline = Timeline()
    for part in closed_parts(script):
        keys = []
        for phase, piece in part:
            keys.append(run(timeline, piece, phase))
            waiting = timeline.open_keys()
            assert len(set(waiting)) == len(waiting)
        forwards = {(k.piece, k.masters, k.occurrence) for k in keys if k.phase == "forward"}
        backwards = {(k.piece, k.masters, k.occurrence) for k in keys if k.phase == "backward"}
        assert forwards == backwards
        assert timeline.open_forwards == 0 and timeline.open_keys() == []


@relaxed
@given(nestings())
def test_a_backward_belongs_to_the_latest_forward_that_waits(script):
    timeline = Timeline()
    waiting: list[RunKey] = []
    for phase, piece in script:
        if phase == "forward":
            waiting.append(run(timeline, piece, phase))
            continue
        twin = next(k for k in reversed(waiting) if k.piece == piece)
        assert timeline.key(piece, phase, (f"w{piece}",)).occurrence == twin.occurrence
        run(timeline, piece, phase)
        waiting.remove(twin)
        assert timeline.open_keys() == waiting[::-1]


@relaxed
@given(nestings(), st.integers(2, 6))
def test_micro_batches_fold_into_the_episodes_of_one(script, times):
    once, often = Timeline(), Timeline()
    play(once, script)
    for _ in range(times):
        play(often, script)
    assert list(often.episodes) == list(once.episodes)
    once.step_done(), often.step_done()
    assert often.last_step == {key: times * count for key, count in once.last_step.items()}


@relaxed
@given(nestings())
def test_an_episode_that_nothing_known_covers_is_news(script):
    (first, *_) = closed_parts(script)
    timeline = Timeline()
    play(timeline, first)
    assert timeline.changed and len(timeline.episodes) == 1


@relaxed
@given(nestings(), st.integers(1, 3))
def test_a_step_seen_before_is_no_news(script, times):
    timeline = Timeline()
    play(timeline, script)
    known = list(timeline.episodes)
    timeline.changed = False
    for _ in range(times):
        play(timeline, script)
    assert not timeline.changed and list(timeline.episodes) == known


@relaxed
@given(st.lists(nestings(), min_size=1, max_size=4))
def test_every_run_of_the_latest_step_is_planned(scripts):
    """Whatever came before, the episodes known at the end serve each key of the last script that was played."""
    timeline = Timeline()
    for script in scripts:
        keys = play(timeline, script)
    if sum(len(closed_parts(s)) for s in scripts) <= MAX_EPISODES:
        known = {key for episode in timeline.episodes for key in episode}
        assert set(keys) <= known


@relaxed
@given(nestings())
def test_the_larger_episode_replaces_its_parts(script):
    """A part of something planned is served by it, and planning the whole makes a plan of the part needless."""
    (first, *_) = closed_parts(script)
    timeline = Timeline()
    play(timeline, [("forward", first[0][1]), ("backward", first[0][1])])
    play(timeline, first)
    (episode,) = timeline.episodes
    assert len(episode) == len(first)
    timeline.changed = False
    play(timeline, [("forward", first[0][1]), ("backward", first[0][1])])
    assert list(timeline.episodes) == [episode] and not timeline.changed


actions = st.lists(st.tuples(st.sampled_from(["forward", "backward", "inference"]), st.integers(0, 40)), max_size=400)


@relaxed
@given(actions)
def test_whatever_user_code_does_growth_is_bounded(script):
    """Forwards without a backward, backwards without a forward (a graph that is kept), in any order."""
    timeline = Timeline()
    for phase, piece in script:
        run(timeline, piece, phase)
        assert timeline.open_forwards <= MAX_OPEN_RUNS
        assert len(timeline.episodes) <= MAX_EPISODES
        assert all(len(e) <= MAX_OPEN_RUNS + 1 for e in timeline.episodes)


def test_forwards_that_are_dropped_do_not_stay_open():
    """A loop that never calls backward: its runs end up in episodes, and a proper step afterwards is its own."""
    timeline = Timeline()
    for _ in range(10 * MAX_OPEN_RUNS):
        run(timeline, 0, "forward")
    assert timeline.open_forwards <= MAX_OPEN_RUNS and len(timeline.episodes) <= 2
    timeline.close()
    assert timeline.open_forwards == 0
    assert run(timeline, 1, "forward").occurrence == 0
    run(timeline, 1, "backward")
    assert (RunKey(1, "forward", ("w1",)), RunKey(1, "backward", ("w1",))) in timeline.episodes


def test_training_goes_on_after_forwards_that_were_dropped():
    """Two evaluations with gradients enabled, then ordinary steps: each forward's backward finds it, at any time."""
    timeline = Timeline()
    for _ in range(2):
        timeline.record(timeline.key(1, "forward", ("w", "frozen")))
    for _ in range(3 * MAX_OPEN_RUNS):
        forward = timeline.key(1, "forward", ("w", "frozen"))
        timeline.record(forward)
        assert forward in timeline.open_keys()
        timeline.record(timeline.key(1, "backward", forward.masters))
        timeline.step_done()
    assert not timeline.open_forwards
    assert timeline.last_step[RunKey(1, "backward", ("w", "frozen"), 0)] == 1


def test_a_forgotten_piece_leaves_nothing_open():
    timeline = Timeline()
    timeline.record(timeline.key(1, "forward", ("a",)))
    timeline.forget_piece(1)
    for _ in range(2 * MAX_OPEN_RUNS):
        timeline.record(timeline.key(2, "forward", ("b",)))
        timeline.record(timeline.key(2, "backward", ("b",)))
    assert {run.piece for episode in timeline.episodes for run in episode} == {2} and not timeline.open_forwards


def test_more_episodes_than_are_kept_forget_the_oldest():
    timeline = Timeline()
    for piece in range(MAX_EPISODES + 3):
        run(timeline, piece, "inference")
    assert [episode[0].piece for episode in timeline.episodes] == list(range(3, MAX_EPISODES + 3))
    timeline.changed = False
    run(timeline, 0, "inference")  # a forgotten one is new again
    assert timeline.changed


def test_equal_graphs_with_other_masters_are_other_runs():
    """Blocks of one class share a graph: what tells their runs apart is what they compute with."""
    timeline = Timeline()
    first, second = run(timeline, 0, "forward", ("a",)), run(timeline, 0, "forward", ("b",))
    again = run(timeline, 0, "forward", ("a",))
    assert (first.occurrence, second.occurrence, again.occurrence) == (0, 0, 1)
    assert [run(timeline, 0, "backward", (m,)).occurrence for m in ("a", "b", "a")] == [1, 0, 0]
    assert len(timeline.episodes) == 1


@pytest.mark.parametrize("phase", ["forward", "inference"])
def test_expecting_is_not_having_seen(phase):
    """A graph is planned for before it has run; that alone is no reason to plan again."""
    timeline = Timeline()
    key = timeline.key(0, phase, ("w",))
    timeline.expect((key,))
    assert list(timeline.episodes) == [(key,)] and not timeline.changed
    timeline.expect((key,))
    assert len(timeline.episodes) == 1


def test_a_forgotten_piece_takes_its_episodes_along():
    timeline = Timeline()
    for piece in (0, 1):
        run(timeline, piece, "forward"), run(timeline, piece, "backward")
    run(timeline, 2, "forward"), run(timeline, 1, "forward"), run(timeline, 1, "backward"), run(timeline, 2, "backward")
    timeline.forget_piece(1)
    assert [{k.piece for k in e} for e in timeline.episodes] == [{0}]


def test_counts_are_of_the_latest_whole_step():
    timeline = Timeline()
    for _ in range(3):
        run(timeline, 0, "forward"), run(timeline, 0, "backward")
    timeline.step_done()
    assert set(timeline.last_step.values()) == {3}
    run(timeline, 0, "forward"), run(timeline, 0, "backward")
    assert set(timeline.last_step.values()) == {3}
    timeline.step_done()
    assert set(timeline.last_step.values()) == {1}


def test_a_part_of_something_planned_does_not_take_back_the_news():
    """A step of two nested graphs (new), then one of them alone: the nested order is still to be planned."""
    timeline = Timeline()
    for piece, phase in ((0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")):
        run(timeline, piece, phase)
    assert timeline.changed
    run(timeline, 0, "forward"), run(timeline, 0, "backward")
    assert timeline.changed
