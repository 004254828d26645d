"""Traces of single steps: as JSON for Perfetto (https://ui.perfetto.dev) and chrome://tracing, and as a summary in text.

Format: Chrome's "Trace Event Format", the JSON object form with complete events (``ph: X``), instant events (``i``) and metadata (``M``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_SUMS = ("fed", "draft_tokens", "accepted", "rollbacks", "rolled_back")
_NUMBERS = ("step", "width", "fed", "draft_tokens", "accepted", "rolled_back", "in_flight", "rollbacks", "prefill")


def chrome_trace(stages: Mapping[str, np.ndarray], title: str = "pipespec") -> dict[str, Any]:
    """Convert a trace to Chrome's format, with one track per stage. Times count from the first event.

    Args:
        stages: By stage, its steps, see :meth:`pipespec_kernels.trace.TraceMemory.read`.
        title: Name of the process.

    Returns:
        The JSON object. ``otherData`` has the number of steps that were not kept.
    """
    origin = min((int(steps["launched_ns"].min()) for steps in stages.values() if len(steps)), default=0)
    events: list[dict[str, Any]] = [_metadata("process_name", 0, title)]
    for track, (name, steps) in enumerate(stages.items()):
        events.append(_metadata("thread_name", track, name))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": track, "args": {"sort_index": track}})
        for step in steps:
            start, end = int(step["start_ns"]), int(step["end_ns"])
            numbers: dict[str, Any] = {key: int(step[key]) for key in _NUMBERS}
            numbers["launch_to_start_us"] = (start - int(step["launched_ns"])) / 1e3
            at = {"pid": 0, "tid": track, "ts": (start - origin) / 1e3}
            events.append({"ph": "X", "name": _label(numbers), **at, "dur": (end - start) / 1e3, "args": numbers})
            if numbers["rolled_back"]:
                events.append({"ph": "i", "s": "t", "name": f"rollback {numbers['rolled_back']}", **at})
    lost = {f"{name}: steps not kept": n for name, steps in stages.items() if (n := not_kept(steps))}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": lost}


def not_kept(steps: np.ndarray) -> int:
    """Number of entries that were overwritten before the first of ``steps``."""
    return int(steps["step"][0]) if len(steps) else 0


def summary(stages: Mapping[str, np.ndarray]) -> str:
    """Summarise a trace as a table.

    For each stage: the share of time in which it ran, counts of its steps, and the mean time of a step by its width, grouped by powers of
    two. The column ``wasted`` counts tokens that the stage rolled back.

    Raises:
        ValueError: The trace is empty.
    """
    if not any(map(len, stages.values())):
        raise ValueError("the trace is empty: no stage took a step")
    begin = min(int(steps["start_ns"].min()) for steps in stages.values() if len(steps))
    span = max(int(steps["end_ns"].max()) for steps in stages.values() if len(steps)) - begin
    columns = ("busy", "prefill", "steps", "fed", "draft_tokens", "accepted", "rollbacks", "wasted", "not kept")
    lines = [f"{'':<10}" + "".join(f"{column:>13}" for column in columns)]
    for name, steps in stages.items():
        took = steps["end_ns"] - steps["start_ns"]
        ran, sums = steps["fed"] > 0, {key: int(steps[key].sum()) for key in _SUMS}
        prefill = f"{took[steps['prefill'] > 0].sum() / 1e6:.1f} ms"
        busy = f"{took.sum() / span:.0%}" if span else "-"
        figures = (busy, prefill, int(ran.sum()), *sums.values(), not_kept(steps))
        lines.append(f"{name:<10}" + "".join(f"{figure:>13}" for figure in figures))
    lines.append("mean step in ms by width (number of steps):")
    for name, steps in stages.items():
        steps = steps[steps["fed"] > 0]
        took, widths = (steps["end_ns"] - steps["start_ns"]) / 1e6, steps["width"].astype(np.int64)
        parts, low = [], 1
        while len(widths) and low <= widths.max():
            high = 1 << (low - 1).bit_length()
            within = (widths >= low) & (widths <= high)
            if within.any():
                label = str(low) if low == high else f"{low}-{high}"
                parts.append(f"{label}: {took[within].mean():.2f} ({within.sum()})")
            low = high + 1
        lines.append(f"{name:<10}" + "   ".join(parts))
    return "\n".join(lines)


def _metadata(name: str, track: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": track, "args": {"name": value}}


def _label(numbers: Mapping[str, Any]) -> str:
    if numbers["prefill"]:
        return f"prefill {numbers['prefill']}"
    if not numbers["fed"]:
        return "rollback" if numbers["rolled_back"] else "idle"
    if not numbers["draft_tokens"]:
        return f"feed {numbers['fed']}"
    return f"verify {numbers['accepted']}/{numbers['draft_tokens']}"
