"""`model.zinf.report()`: what the plan promised beside what was measured, and everything that went another way."""

from __future__ import annotations

from collections.abc import Mapping

from .budget import format_bytes
from .schedule import Plan


def render_report(plan: Plan | None, stats: Mapping[str, int | float], runs: list[tuple[str, int, float]]) -> str:
    """runs: (what, times, seconds of the latest)."""
    lines = ["# zinf_compile report"]
    budget = format_bytes(int(stats["budget"]))
    if plan is None:
        lines.append("no plan yet: it is made in the first forward")
    else:
        p = plan.predicted
        lines += [
            f"{'':24}{'predicted':>14}{'measured':>14}   budget {budget}",
            f"{'tensor peak':24}{format_bytes(p.peak_device + int(stats['planned_held'])):>14}{format_bytes(int(stats['step_peak'])):>14}",
            f"{'read a step':24}{format_bytes(int(stats['predicted_bytes_read'])):>14}{format_bytes(int(stats['step_bytes_read'])):>14}",
            f"{'written a step':24}{format_bytes(int(stats['predicted_bytes_written'])):>14}{format_bytes(int(stats['step_bytes_written'])):>14}",
            f"{'seconds a step':24}{p.seconds:>14.3f}{float(stats['step_seconds']):>14.3f}",
        ]
    lines.append(
        f"calls {stats['calls']:.0f}, graph runs {stats['graph_runs']:.0f}, traces {stats['retraces']:.0f}, "
        f"waited for the disk {float(stats['wait_seconds']):.2f} s in all"
    )
    if stats["plain_calls"]:
        lines.append(
            f"{stats['plain_calls']:.0f} calls ran no planned graph: what Dynamo cannot trace runs in eager on the masters, "
            "right but slower; the budget is kept by dropping mapped pages and by spilling"
        )
    if stats["spills"]:
        lines.append(
            f"spilled {stats['spills']:.0f} allocations to disk, {format_bytes(int(stats['spilled_peak']))} at most: bytes that no plan "
            "accounts for (a stock optimizer's states, large temporaries of user code) would have passed the budget"
        )
    if stats["over_limit_peak"]:
        lines.append(f"passed the budget by {format_bytes(int(stats['over_limit_peak']))} in blocks too small to spill")
    lines.append(f"foreign bytes (held by user code, outside the plan) now: {format_bytes(int(stats['foreign']))}")
    for what, times, seconds in runs:
        lines.append(f"  {what:40} x{times:<6} {seconds * 1e3:10.1f} ms")
    return "\n".join(lines)
