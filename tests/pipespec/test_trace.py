"""Traces as JSON for Perfetto: what the format asks for, and that nothing is lost or made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipespec.observe.trace import chrome_trace, save_trace

FULL = np.dtype(
    [
        ("step", np.uint64),
        ("launched_ns", np.int64),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("width", np.uint32),
        ("fed", np.uint32),
        ("hints", np.uint32),
        ("accepted", np.uint32),
        ("taken_back", np.uint32),
    ]
)
DRAFT = np.array(
    [(0, 1_000_500, 1_002_000, 1_005_000, 1, 1, 0, 0, 0), (1, 1_005_000, 1_006_000, 1_009_500, 2, 2, 0, 0, 3)], FULL
)
TARGET = np.array(
    [(0, 1_001_000, 1_004_000, 1_020_000, 8, 5, 4, 2, 0), (1, 1_021_000, 1_022_000, 1_022_250, 8, 0, 0, 0, 0)], FULL
)


def test_every_step_is_a_slice_of_its_track(tmp_path: Path) -> None:
    save_trace(tmp_path / "run.json", {"draft": DRAFT, "target": TARGET}, title="a run")
    trace = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "i"}
    names = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert names == {(0, "draft"), (1, "target")}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a run"]

    slices = [e for e in events if e["ph"] == "X"]
    # Microseconds since the first launch.
    assert [(e["tid"], e["ts"], e["dur"]) for e in slices] == [
        (0, 1.5, 3.0),
        (0, 5.5, 3.5),
        (1, 3.5, 16.0),
        (1, 21.5, 0.25),
    ]
    assert [e["name"] for e in slices] == ["feed 1", "feed 2", "verify 2/4", "idle"]
    assert slices[2]["args"] == {
        "step": 0,
        "width": 8,
        "fed": 5,
        "hints": 4,
        "accepted": 2,
        "taken_back": 0,
        "launch_to_start_us": 3.0,
    }
    (rollback,) = [e for e in events if e["ph"] == "i"]
    assert rollback == {"ph": "i", "s": "t", "name": "rollback 3", "pid": 0, "tid": 0, "ts": 5.5}


def test_times_alone_are_enough() -> None:
    steps = np.array([(50, 70), (90, 90)], np.dtype([("start_ns", np.int64), ("end_ns", np.int64)]))
    slices = [e for e in chrome_trace({"any": steps})["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in slices] == [
        ("step", 0.0, 0.02, {}),
        ("step", 0.04, 0.0, {}),
    ]


def test_nothing_that_ran() -> None:
    events = chrome_trace({"draft": DRAFT[:0]})["traceEvents"]
    assert all(e["ph"] == "M" for e in events)


def test_records_that_are_no_trace_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 'x': a trace needs the fields end_ns, start_ns"):
        chrome_trace({"x": np.zeros(3)})
    backwards = TARGET.copy()
    backwards["end_ns"][0] = 0
    with pytest.raises(ValueError, match="ends before it starts"):
        chrome_trace({"draft": DRAFT, "x": backwards})
