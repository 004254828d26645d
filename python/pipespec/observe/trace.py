"""Traces of single steps, as JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

Format: Chrome's "Trace Event Format", the JSON object form with complete events (``ph: X``), instant events (``i``) and metadata (``M``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_NUMBERS = ("step", "width", "fed", "hints", "accepted", "taken_back", "in_flight")


def chrome_trace(stages: Mapping[str, np.ndarray], title: str = "pipespec") -> dict[str, Any]:
    """One track per stage, in the order given; times count from the first event.

    ``stages[name]``: structured array, one record per step, with ``start_ns`` and ``end_ns`` on a clock that all stages share. Shown
    where there are such fields: ``launched_ns`` as the time from launch to start, ``taken_back`` > 0 as a rollback, and the numbers that
    ``pipespec_kernels.scheduler.Scheduler.trace`` has. Raises ``ValueError`` if a time is missing or a step ends before it starts.
    """
    origin = None
    for name, steps in stages.items():
        fields = steps.dtype.names or ()
        if missing := {"start_ns", "end_ns"} - set(fields):
            raise ValueError(f"stage {name!r}: a trace needs the fields {', '.join(sorted(missing))}")
        if (steps["end_ns"] < steps["start_ns"]).any():
            raise ValueError(f"stage {name!r}: a step ends before it starts")
        for field in {"launched_ns", "start_ns"} & set(fields):
            if len(steps):
                first = int(steps[field].min())
                origin = first if origin is None else min(origin, first)

    events: list[dict[str, Any]] = [_metadata("process_name", 0, title)]
    for track, (name, steps) in enumerate(stages.items()):
        events.append(_metadata("thread_name", track, name))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": track, "args": {"sort_index": track}})
        fields = steps.dtype.names or ()
        for step in steps:
            start, end = int(step["start_ns"]), int(step["end_ns"])
            numbers: dict[str, Any] = {key: int(step[key]) for key in _NUMBERS if key in fields}
            if "launched_ns" in fields:
                numbers["launch_to_start_us"] = (start - int(step["launched_ns"])) / 1e3
            at = {"pid": 0, "tid": track, "ts": (start - (origin or 0)) / 1e3}
            events.append({"ph": "X", "name": _label(numbers), **at, "dur": (end - start) / 1e3, "args": numbers})
            if numbers.get("taken_back", 0) > 0:
                events.append({"ph": "i", "s": "t", "name": f"rollback {numbers['taken_back']}", **at})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(path: Path | str, stages: Mapping[str, np.ndarray], title: str = "pipespec") -> None:
    """Write :func:`chrome_trace` to ``path``."""
    Path(path).write_text(json.dumps(chrome_trace(stages, title)), encoding="utf-8")


def _metadata(name: str, track: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": track, "args": {"name": value}}


def _label(numbers: Mapping[str, Any]) -> str:
    if "fed" not in numbers or "hints" not in numbers:
        return "step"
    if numbers["fed"] == 0:
        return "idle"
    if numbers["hints"] == 0:
        return f"feed {numbers['fed']}"
    return f"verify {numbers.get('accepted', '?')}/{numbers['hints']}"
