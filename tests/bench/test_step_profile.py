"""bench.step_profile without a GPU, on traces that are made up: which launches are a step, and which steps count."""

import pytest

from bench import plot
from bench.step_profile import LAST, last_layer, spans_of, steps_of, summary, typical

LAYER = ["qkv_append_kernel", "attention_kernel", "linear_kernel", "linear_kernel", "linear_kernel"]
STEP = ["PlanKernel", *LAYER, *LAYER, *LAYER, "verify_kernel", "CommitKernel", f"{LAST}<0>"]


def trace(steps: list[tuple[list[str], float, float]]) -> dict:
    """A Chrome trace, last event first, of steps with their names, the time of each launch and the gap behind it."""
    events, at = [], 0.0
    for names, us, gap in steps:
        for name in names:
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": us})
            at += us + gap
    events += [
        {"ph": "X", "cat": "kernel", "name": "after the last step", "ts": at, "dur": 1.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": at},
        {"ph": "i", "cat": "kernel", "name": "a mark", "ts": 0.0},
    ]
    return {"traceEvents": events[::-1]}


def test_a_step_is_the_median_of_those_with_work() -> None:
    other = ["PlanKernel", "linear_kernel", LAST]
    steps = [(other, 9.0, 1.0), (STEP, 5.0, 1.0), (STEP, 6.0, 2.0), (STEP, 9.0, 3.0), (STEP, 0.5, 0.5)]
    spans = spans_of(trace(steps), ["kernel"])
    assert [len(step) for step in steps_of(spans)] == [3, *[len(STEP)] * 4]
    nodes = typical(steps_of(spans))
    assert [node.name for node in nodes] == STEP
    # The step without work and the one of another graph do not count.
    assert {node.us for node in nodes} == {6.0}
    assert [node.gap for node in nodes] == [0.0, *[2.0] * (len(STEP) - 1)]
    assert [node.name for node in last_layer(nodes)] == [*LAYER[2:], *LAYER[:2]]
    found = summary(nodes)
    assert (found["us"], found["busy"]) == (8.0 * len(STEP) - 2.0, 6.0 * len(STEP))
    assert found["layer"][0] == ("linear_kernel", 6.0, 2.0)
    assert "qkv_append_kernel" in plot.timeline("a layer", found["layer"])


def test_what_is_within_another_event_is_left_out() -> None:
    events = [("outer", 0.0, 10.0), ("inner", 2.0, 3.0), ("next", 10.0, 1.0)]
    given = [{"ph": "X", "cat": "cpu_op", "name": name, "ts": at, "dur": us} for name, at, us in events]
    assert [span.name for span in spans_of({"traceEvents": given}, ["cpu_op"])] == ["outer", "next"]


def test_steps_of_others() -> None:
    with pytest.raises(ValueError, match="no launch of the recorded call is named CloseStepKernel"):
        typical(steps_of(spans_of(trace([(["gemm"], 1.0, 1.0)]), ["kernel"])))
    assert last_layer(typical(steps_of(spans_of(trace([([*LAYER, LAST], 1.0, 0.0)]), ["kernel"])))) == []
