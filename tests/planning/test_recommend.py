"""``pipespec recommend``: predictions from fixed numbers, measured step times and agreement, and a run on tiny models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.cli.main import main
from pipespec.cli.recommend import Candidate, best_lockstep, lookup_rate, lookups, predictions, table
from pipespec.planning.measure import agreement, step_times, written_by
from pipespec.planning.steps import StepTimes
from tests.conftest import VOCABULARY, always_right, always_wrong, random_llama, random_prompts

TARGET = StepTimes("target", 2, (1, 2, 4, 8), (10e-3, 11e-3, 12e-3, 16e-3), 1e-3)
SMALL = StepTimes("small", 2, (1,), (1e-3,))
LARGE = StepTimes("large", 2, (1, 8), (3e-3, 4e-3))


def test_between_the_measured_widths_it_is_interpolated() -> None:
    assert [TARGET.at(w) for w in (1, 3, 8, 12)] == pytest.approx([10e-3, 11.5e-3, 16e-3, 20e-3])
    assert StepTimes("t", 1, (1, 4), (2.0, 1.0)).at(9) == 1.0  # a wider step is never faster
    for wrong in (
        {"widths": (2, 1)},
        {"seconds": (0.0, 1.0)},
        {"seconds": (1.0,)},
        {"threads": 0},
        {"prefill_s": -1.0},
    ):
        with pytest.raises(ValueError, match="t"):
            StepTimes(**{"name": "t", "threads": 1, "widths": (1, 2), "seconds": (1.0, 1.0)} | wrong)


def test_predictions_of_all_kinds() -> None:
    index = [np.array([1] * 20 + [-1] * 20 + [0] * 2)]
    found = predictions(TARGET, {"small": (0.6, SMALL), "large": (0.9, LARGE)}, index)
    by_drafts = {c.drafts: c for c in found}
    assert set(by_drafts) == {
        (), ("ngram",), ("small",), ("large",), ("ngram", "small"), ("ngram", "large"), ("small", "large"),
    }  # fmt: skip
    assert by_drafts[()].predicted == pytest.approx(100.0)
    assert by_drafts["large",].predicted == best_lockstep(0.9, 3e-3, TARGET)[0]
    assert (
        by_drafts["ngram", "large"].predicted > by_drafts["large",].predicted
    )  # the index is better where it has a match
    assert [c.predicted for c in found] == sorted((c.predicted for c in found), reverse=True)


def test_an_index_is_replayed() -> None:
    assert lookup_rate([np.array([-1, -1])], TARGET, 0.5)[0] == pytest.approx(2.0)
    rate, ahead = lookup_rate([np.array([1, 1, 1])], StepTimes("t", 1, (1, 2), (1.0, 1.0)), 1.0)
    assert (rate, ahead) == (3.0, 16)
    text = np.array([5, 6, 7, 8, 9, 5, 6, 7, 8, 3], dtype=np.int32)
    (found,) = lookups([(text, 2)])
    assert set(found[:4]) == {-1}
    assert found[-1] == 0


def test_steps_are_measured_and_agreement_is_that_of_the_text() -> None:
    target = random_llama(0)
    times = step_times(target, "target", (1, 4), threads=1, budget_s=0.0)
    assert (times.threads, times.widths) == (1, (1, 4))
    assert min(*times.seconds, times.prefill_s) > 0
    prompts = random_prompts(2, seed=3, shortest=5)
    texts = written_by(target, prompts, 12)
    for prompt, (text, first) in zip(prompts, texts, strict=True):
        assert first == len(prompt)
        with Pipeline(target, schedule="plain") as pipe:
            assert text.tolist() == pipe.generate(prompt[None], max_new_tokens=12, do_sample=False)[0].tolist()
    assert agreement(target, texts).all()
    assert agreement(always_right(target), texts).all()
    assert not agreement(always_wrong(target), texts).any()


def test_a_run_on_the_bundled_family(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(torch.get_num_threads())
    assert main(["recommend", "--new-tokens", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    measured = [c for c in record["candidates"] if c["measured"] is not None]
    assert len(measured) == 4
    assert len(record["candidates"]) == 7
    assert record["code"].startswith("pipe = pipespec.Pipeline('")
    compile(record["code"], "code", "exec")


def test_the_table_and_the_code() -> None:
    plain = Candidate((), 100.0, measured=90.0)
    best = Candidate(("a/small", "b/large"), 150.0, (0.5, 0.9), 4, 180.0)
    shown = table([best, plain, Candidate(("ngram",), 90.0, (float("nan"),), 2)], plain, best).splitlines()
    assert shown[1].split() == ["->", "small", "+", "large", "0.50/0.90", "4", "150.0", "180.0", "2.00x"]
    assert shown[3].split()[-2:] == ["0.90x", "(predicted)"]
    assert shown[-1] == "drafting pays"
    assert table([plain], plain, plain).endswith("do not draft: no measured candidate reaches 1.05x of plain decoding")
    assert best.code("t", "float32") == (
        "pipe = pipespec.Pipeline('t', drafts=['a/small', 'b/large'], schedule='lockstep', dtype='float32')"
    )
    assert plain.code("t", "auto") == "pipe = pipespec.Pipeline('t', schedule='plain')"


def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["recommend", "--new-tokens", "0"]) == 2
    assert main(["recommend", "--draft", str(tmp_path / "none"), "--new-tokens", "2"]) == 2
    assert main(["recommend", "--new-tokens", "100000"]) == 2
    assert "pass the target's limit" in capsys.readouterr().err
    assert VOCABULARY > 0
