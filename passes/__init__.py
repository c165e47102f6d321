"""FX to FX rewriting: each pass writes one kind of event of a Plan into a graph, and decides nothing."""

from ..runtime import ops as ops  # the zinf:: schemas; no compiler needed
