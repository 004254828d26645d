"""Traces of whole calls under every schedule, which add up to their reports; as JSON for Perfetto, as text and as a figure."""

import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.api.trace import chrome_trace, not_kept, summary
from pipespec.schedules.base import StageFailure
from pipespec_spd import SpeculativePipeline
from tests.conftest import always_right, always_wrong, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Faulty
from tests.waiting import drafts_keep_up

COUNTS = ["width", "fed", "draft_tokens", "accepted", "rolled_back", "in_flight", "rollbacks", "prefill"]
TIMES = ["launched_ns", "start_ns", "end_ns"]
FULL = np.dtype([("step", np.uint64), *((n, np.int64) for n in TIMES), *((n, np.uint32) for n in COUNTS)])


def steps_of(*steps: tuple[int, ...]) -> np.ndarray:
    return np.array(list(steps), FULL)


DRAFT = steps_of(
    (0, 1_000_500, 1_002_000, 1_005_000, 1, 1, 0, 0, 0, 0, 0, 0),
    (1, 1_005_000, 1_006_000, 1_009_500, 2, 2, 0, 0, 3, 0, 1, 0),
)
TARGET = steps_of(
    (0, 1_001_000, 1_004_000, 1_020_000, 8, 5, 4, 2, 0, 0, 0, 0),
    (1, 1_021_000, 1_022_000, 1_022_250, 8, 0, 0, 0, 0, 0, 0, 0),
)


def test_every_step_is_a_slice_of_its_track() -> None:
    trace = json.loads(json.dumps(chrome_trace({"draft": DRAFT, "target": TARGET}, title="a run")))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "i"}
    names = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert names == {(0, "draft"), (1, "target")}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a run"]

    slices = [e for e in events if e["ph"] == "X"]
    # Microseconds since the first launch.
    assert [(e["ts"], e["dur"]) for e in slices] == [(1.5, 3.0), (5.5, 3.5), (3.5, 16.0), (21.5, 0.25)]
    assert [e["tid"] for e in slices] == [0, 0, 1, 1]
    assert [e["name"] for e in slices] == ["feed 1", "feed 2", "verify 2/4", "idle"]
    counts = dict(zip(COUNTS, (8, 5, 4, 2, 0, 0, 0, 0), strict=True))
    assert slices[2]["args"] == {"step": 0, "launch_to_start_us": 3.0} | counts
    (rollback,) = [e for e in events if e["ph"] == "i"]
    assert rollback == {"ph": "i", "s": "t", "name": "rollback 3", "pid": 0, "tid": 0, "ts": 5.5}


def test_what_did_not_run_or_was_not_kept() -> None:
    assert all(e["ph"] == "M" for e in chrome_trace({"draft": DRAFT[:0]})["traceEvents"])
    late = DRAFT.copy()
    late["step"] += 40
    assert not_kept(late) == 40
    trace = chrome_trace({"draft": late, "target": TARGET})
    assert trace["otherData"] == {"draft: steps not kept": 40}


# --- whole calls -----------------------------------------------------------------------------------------------------


def check_against_report(pipe: Pipeline, prompt_tokens: int, began_ns: int, exact: bool = True) -> None:
    """Entries add up to the report's figures and lie within the call, one after the other."""
    report = pipe.report
    assert report is not None
    traces = report.trace
    assert traces is not None
    assert list(traces) == [stage.name for stage in report.stages]
    for stage in report.stages:
        steps = traces[stage.name]
        assert steps["fed"].sum() == stage.fed
        assert steps["draft_tokens"].sum() == stage.drafted
        assert steps["accepted"].sum() == stage.accepted
        assert steps["rolled_back"].sum() == stage.wasted
        assert steps["rollbacks"].sum() == stage.rollbacks
        assert steps["step"].tolist() == list(range(len(steps)))
        if not len(steps):  # a worker that was not scheduled before the text was complete
            assert report.schedule == "workers"
            assert stage is not report.stages[-1]
            continue
        assert (steps["launched_ns"] <= steps["start_ns"]).all()
        assert (steps["start_ns"] <= steps["end_ns"]).all()
        assert (steps["launched_ns"][1:] >= steps["end_ns"][:-1]).all()
        assert steps["launched_ns"].min() >= began_ns
        assert steps["end_ns"].max() <= time.perf_counter_ns()
        # The prompt comes first. The first step feeds each row's last token.
        assert steps["prefill"][0] == prompt_tokens
        assert (steps["prefill"][1:] == 0).all()
        fed = steps[steps["fed"] > 0]
        assert (fed["fed"] <= fed["width"] * report.rows).all()
        if exact:  # otherwise a step may have spare columns
            assert (fed["fed"] >= fed["width"]).all()


SCHEDULES = {
    "plain": (0, {}),
    "plain, captured": (0, {"graphs": True}),
    "lockstep": (1, {"lookahead": 4}),
    "lockstep, captured": (1, {"graphs": True}),
    "lockstep, three": (2, {"lookahead": [3, 5]}),
    "streams": (1, {}),
    "workers, three": (2, {"lookahead": 4}),
}
"""By name, which begins with the schedule: drafts and options."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_adds_up_to_the_report(target, tmp_path: Path, name: str) -> None:
    drafts, options = SCHEDULES[name]
    models = [noisy(target, 0.1, seed=i) for i in range(drafts)]
    options, exact = options | {"schedule": name.split(",")[0]}, name != "streams"
    ids, mask = left_pad(random_prompts(3, seed=8, shortest=2))
    expected = target.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    with Pipeline(target, models, trace=5000, **options) as pipe:
        for _ in range(2):  # each call has a trace of its own
            began = time.perf_counter_ns()
            out = pipe.generate(ids, attention_mask=mask, max_new_tokens=30)
            assert torch.equal(out, expected)
            check_against_report(pipe, int(mask.sum()) - len(ids), began, exact)
        began = time.perf_counter_ns()
        pipe.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=30)
        check_against_report(pipe, int(mask[0].sum()) - 1, began, exact)
    report = pipe.report
    report.save_trace(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert trace["otherData"] == {}
    names = [(e["tid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == list(enumerate([*(f"draft {i}" for i in range(drafts)), "target"]))
    for track, stage in enumerate(report.stages):
        slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == track]
        if not slices:  # as in check_against_report()
            assert report.schedule == "workers"
            assert stage is not report.stages[-1]
            assert stage.fed == stage.rollbacks == 0
            continue
        assert sum(e["args"]["accepted"] for e in slices) == stage.accepted
        assert sum(e["args"]["fed"] for e in slices) == stage.fed
        assert slices[0]["name"] == f"prefill {int(mask[0].sum()) - 1}"
        assert min(e["ts"] for e in slices) >= 0
        marks = [e for e in trace["traceEvents"] if e["ph"] == "i" and e["tid"] == track]
        if drafts == 1:  # with one row, and the target as the only stage to follow, a plan rolls back at most once
            assert len(marks) == stage.rollbacks
    if drafts:
        assert any(e["ph"] == "i" for e in trace["traceEvents"]) == any(s.rollbacks for s in report.stages)
    json.dumps(report.to_dict())  # without the trace


def test_rollbacks_and_verdicts_show(target) -> None:
    for draft, verdict, rolls_back in ((always_wrong, "verify 0/3", True), (always_right, "verify 3/3", False)):
        with Pipeline(target, draft(target), trace=1000, lookahead=3, schedule="lockstep") as pipe:
            pipe.generate(random_prompts(1, seed=9)[0][None], max_new_tokens=12)
        names = {e["name"] for e in chrome_trace(pipe.report.trace)["traceEvents"]}
        assert verdict in names
        assert any(name.startswith("rollback") for name in names) == rolls_back
        assert not rolls_back or "rollback 3" in names


@pytest.mark.parametrize("schedule", ["lockstep", "streams"])
def test_the_oldest_steps_are_overwritten(target, schedule) -> None:
    ids = random_prompts(1, seed=10, shortest=3)[0][None]
    with Pipeline(target, [noisy(target, 0.1)], schedule=schedule, lookahead=4, trace=4) as pipe:
        # The draft must have more than four steps, too.
        keep_up = drafts_keep_up(pipe, [ids.shape[1] + 40]) if schedule == "streams" else contextlib.nullcontext()
        with keep_up:
            pipe.generate(ids, max_new_tokens=40)
    report = pipe.report
    for name, steps in report.trace.items():
        assert len(steps) == 4
        assert not_kept(steps) > 0
        assert steps["step"].tolist() == list(range(not_kept(steps), not_kept(steps) + 4))
        assert f"{name}: steps not kept" in chrome_trace(report.trace)["otherData"]
    assert summary(report.trace).splitlines()[2].split()[-1] == str(not_kept(report.trace["target"]))


def test_chunks_of_a_prompt_and_a_cache_that_comes_back(target) -> None:
    prompt = random_prompts(1, seed=11, shortest=20)[0][None]
    with Pipeline(target, trace=1000) as pipe:
        out = pipe.generate(prompt, max_new_tokens=5, prefill_chunk_size=4, return_dict_in_generate=True)
        prefill = pipe.report.trace["target"][0]
        assert (prefill["prefill"], prefill["width"]) == (prompt.shape[1] - 1, 4)
        pipe.generate(out.sequences, max_new_tokens=5, past_key_values=out.past_key_values)
        assert (pipe.report.trace["target"]["prefill"] == 0).all()  # the cache held all of it


def test_a_draft_that_fails_has_a_trace_until_then() -> None:
    plain = random_llama(3)
    draft = Faulty.like(noisy(plain, 0.03))
    with Pipeline(plain, [draft], trace=1000, schedule="lockstep", lookahead=4) as pipe:
        draft.set(fail_at=9)
        with pytest.warns(StageFailure):
            pipe.generate(random_prompts(1, seed=12, shortest=3)[0][None], max_new_tokens=30)
        for stage in pipe.report.stages:
            assert pipe.report.trace[stage.name]["fed"].sum() == stage.fed
        # Nine calls: the prefill, seven steps, and the failed one.
        assert (pipe.report.trace["draft 0"]["fed"] > 0).sum() == 7


def test_without_a_trace(target, tmp_path: Path) -> None:
    with Pipeline(target, [noisy(target, 0.1)], schedule="lockstep") as pipe:
        pipe.generate(random_prompts(1)[0][None], max_new_tokens=5)
    assert pipe.report.trace is None
    with pytest.raises(ValueError, match=r"not traced: make the pipeline with Pipeline\(\.\.\., trace="):
        pipe.report.save_trace(tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()
    staged = SpeculativePipeline(target, stages=2)
    staged.generate(random_prompts(1)[0][None], max_new_tokens=5)
    with pytest.raises(NotImplementedError, match="no trace of single steps"):
        staged.report.save_trace(tmp_path / "run.json")


# --- words and picture -----------------------------------------------------------------------------------------------

RUN = {
    # 20 us in all: the draft runs for 2 + 3 + 5, the target for 4 + 8 + 4 of them.
    "draft 0": steps_of(
        (0, 0, 1_000, 3_000, 4, 0, 0, 0, 0, 0, 0, 6),
        (1, 3_000, 5_000, 8_000, 1, 1, 0, 0, 0, 0, 0, 0),
        (2, 8_000, 9_000, 14_000, 1, 1, 0, 0, 2, 0, 1, 0),
        (3, 14_000, 15_000, 15_000, 0, 0, 0, 0, 1, 0, 1, 0),
    ),
    "target": steps_of(
        (7, 0, 1_000, 5_000, 3, 3, 2, 1, 0, 0, 0, 0),
        (8, 5_000, 9_000, 17_000, 4, 4, 3, 3, 0, 0, 0, 0),
        (9, 17_000, 17_000, 21_000, 1, 1, 0, 0, 0, 0, 0, 0),
    ),
}


def test_the_summary_says_what_can_be_counted_by_hand() -> None:
    head, draft, target, _, draft_steps, _ = summary(RUN).splitlines()
    columns = ["busy", "prefill", "steps", "fed", "draft_tokens", "accepted", "rollbacks", "wasted", "not", "kept"]
    assert head.split() == columns
    assert draft.split() == ["draft", "0", "50%", "0.0", "ms", "2", "2", "0", "0", "2", "3", "0"]
    assert target.split() == ["target", "80%", "0.0", "ms", "3", "8", "5", "4", "0", "0", "7"]
    assert draft_steps.split() == ["draft", "0", "1:", "0.00", "(2)"]
    slow = {name: steps.copy() for name, steps in RUN.items()}
    for steps in slow.values():
        for field in ("launched_ns", "start_ns", "end_ns"):
            steps[field] *= 1000
    assert summary(slow).splitlines()[4:] == ["draft 0   1: 4.00 (2)", "target    1: 4.00 (1)   3-4: 6.00 (2)"]
    with pytest.raises(ValueError, match="trace is empty"):
        summary({"target": RUN["target"][:0]})
