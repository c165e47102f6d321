"""Printed plans: golden text of a small transformer, and limits of a page for a larger one."""

from __future__ import annotations

from pathlib import Path

import pytest

from zinf_compile.__main__ import main
from zinf_compile.planner import make_plan
from zinf_compile.report import diff_plans, render_plan

from .programs import CLUSTER, transformer


def test_print_of_three_blocks(golden) -> None:
    plan = make_plan(transformer(), CLUSTER, 8 * 2**20)
    assert render_plan(plan) + "\n" == golden
    assert str(plan) == render_plan(plan)


def test_print_where_everything_fits(golden) -> None:
    text = render_plan(make_plan(transformer(), CLUSTER, 2**30, held=2**20))
    assert "nothing to offload" in text
    assert text + "\n" == golden


@pytest.mark.parametrize("share", [0.15, 0.3, 0.6])
def test_twelve_layers_fit_a_page(share: float) -> None:
    program = transformer(layers=12)
    plan = make_plan(program, CLUSTER, int(share * sum(b.nbytes for b in program.buffers.values())))
    lines = render_plan(plan).splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
    assert any(" x1" in line or "..." in line for line in lines), "repeated blocks are folded"


def test_diff_says_what_moved() -> None:
    program = transformer()
    tight, wide = make_plan(program, CLUSTER, 8 * 2**20), make_plan(program, CLUSTER, 12 * 2**20)
    text = diff_plans(tight, wide)
    assert "budget: 8388608 -> 12582912" in text and "nvme -> device" in text and "step ms" in text
    assert diff_plans(tight, tight) == "no difference"


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = transformer()
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    plan = make_plan(program, CLUSTER, 8 * 2**20)
    plan.save(a)
    make_plan(program, CLUSTER, 12 * 2**20).save(b)
    assert main(["show", str(a)]) == 0
    assert capsys.readouterr().out == render_plan(plan) + "\n"
    assert main(["diff", str(a), str(b)]) == 0
    assert "nvme -> device" in capsys.readouterr().out
    assert main(["verify", str(a)]) == 0
    assert "safe at any timing" in capsys.readouterr().out
    assert main(["simulate", str(a)]) == 0
    assert f"step {plan.predicted.seconds * 1e3:.3f} ms" in capsys.readouterr().out


def test_commands_refuse_what_is_no_safe_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    plan = make_plan(transformer(), CLUSTER, 8 * 2**20)
    bad.write_text(plan.to_json().replace(f'"budget": {plan.budget}', '"budget": 4096'))
    assert main(["verify", str(bad)]) == 1
    assert "invariant 7" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["show"], ["verify"], ["simulate"], ["diff"]], ids=lambda c: c[0])
@pytest.mark.parametrize("content", [b"PK\x03\x04\xd0\xff\x00model.pt", b"", b"weights", b"{}", b"[1]", b"7", b'{"events": 3}', None])
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], command, content) -> None:
    """None: there is no such file."""
    path = tmp_path / "model.pt"
    if content is not None:
        path.write_bytes(content)
    assert main(command + [str(path)] * (1 + (command == ["diff"]))) == 2
    said = capsys.readouterr().err
    assert str(path) in said and "plan.save(path)" in said and ("cannot be read" if content is None else "is not a plan") in said
