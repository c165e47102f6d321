"""`zinf`, `python -m zinf_compile`: look at plans. show, diff, verify, simulate."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .budget import format_bytes
from .errors import PlanMismatch, ZinfError
from .report import diff_plans, render_plan
from .schedule import VERSION, Plan
from .simulate import simulate
from .verify_standalone import verify_standalone

A_PLAN = "A plan is the JSON file that model.zinf.plan.save(path) writes once the model has run, or has had example_inputs="


class NoPlan(PlanMismatch):
    """The file given holds no plan that can be read."""


def _load(path: str) -> Plan:
    """A plan from a file; NoPlan names the file where it isn't one."""
    try:
        text = Path(path).read_text()
    except OSError as e:
        raise NoPlan(f"{path}: cannot be read: {e.strerror}. {A_PLAN}") from e
    except UnicodeDecodeError as e:
        raise NoPlan(f"{path} is not a plan: it is binary. {A_PLAN}") from e
    try:
        plan = Plan.from_json(text)
    except json.JSONDecodeError as e:
        raise NoPlan(f"{path} is not a plan: it is not JSON: {e}. {A_PLAN}") from e
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise NoPlan(f"{path} is not a plan: it is JSON of something else ({type(e).__name__}: {e}). {A_PLAN}") from e
    if plan.version != VERSION:
        raise NoPlan(f"{path} is a plan of version {plan.version}, this program reads version {VERSION}: plan again")
    return plan


def _simulation(plan: Plan) -> str:
    ran = simulate(plan)
    lines = [
        f"step {ran.seconds * 1e3:.3f} ms, peak device {format_bytes(ran.peak_device)}, nvme {format_bytes(ran.peak_nvme)}",
        f"reads {format_bytes(ran.bytes_read)}, writes {format_bytes(ran.bytes_written)}",
        "busy " + "  ".join(f"{stream} {100 * share:.1f}%" for stream, share in ran.busy.items()),
        f"stalls {sum(ran.stalls.values()) * 1e3:.3f} ms in {len(ran.stalls)} events; the longest:",
    ]
    for event, seconds in sorted(ran.stalls.items(), key=lambda s: (-s[1], s[0]))[:10]:
        e = plan.events[event]
        op, block = plan.labels[e.step]
        lines.append(f"  {seconds * 1e3:9.3f} ms  {e.op:<8} {', '.join(e.buffers) or op}  ({e.graph} {block})")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0: done, 1: the plan is refused, 2: wrong usage, a file that is no plan among it."""
    parser = argparse.ArgumentParser(prog="zinf", description="Look at plans of zinf_compile.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (
        ("show", "print a plan"),
        ("verify", "check what can be checked without the program: order, overlaps, budget, predictions"),
        ("simulate", "run a plan's step in the simulator: busy shares and the longest stalls"),
    ):
        commands.add_parser(name, help=what).add_argument("plan", help="a plan's JSON file")
    diff = commands.add_parser("diff", help="what moved between two plans")
    diff.add_argument("a")
    diff.add_argument("b")
    given = parser.parse_args(argv)
    try:
        if given.command == "show":
            print(render_plan(_load(given.plan)))
        elif given.command == "diff":
            print(diff_plans(_load(given.a), _load(given.b)))
        elif given.command == "simulate":
            print(_simulation(_load(given.plan)))
        else:
            plan = _load(given.plan)
            verify_standalone(plan)
            print(f"{given.plan}: {len(plan.events)} events, {len(plan.placements)} placements: safe at any timing")
    except NoPlan as e:
        print(f"zinf: {e}", file=sys.stderr)
        return 2
    except (ZinfError, ValueError) as e:
        print(f"zinf: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # e.g. `zinf show plan.json | head`
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
