"""Scores, logits and log-probabilities in every schedule, without leaving it: what transformers computes from the same text."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers.generation import StoppingCriteria

from pipespec import Pipeline, SpeedWarning
from pipespec.engine import sampling
from pipespec.engine.sampling import ScoreRecord
from pipespec.schedules.graphs import buffers
from tests.conftest import ByPosition, left_pad, noisy, random_llama

VOCABULARY, NEW, TOP = 40, 20, 5
HOW = {
    "plain": {"schedule": "plain"},
    "lockstep": {"schedule": "lockstep"},
    "workers": {"schedule": "workers"},
    "rounds": {"schedule": "lockstep", "graphs": True},
    "plain, captured": {"schedule": "plain", "graphs": True},
    "streams": {"schedule": "streams"},
}
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
GREEDY = {"do_sample": False, "repetition_penalty": 1.3}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.95, "seed": 3, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def target():
    return random_llama(21, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def call(target):
    """Padded prompts, of which one ends early."""
    generator = torch.Generator().manual_seed(2)
    ids, mask = left_pad([torch.randint(4, VOCABULARY, (n,), generator=generator) for n in (3, 9, 5)])
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    text = target.generate(ids, **options, **GREEDY, eos_token_id=None)
    return ids, options | {"eos_token_id": int(text[1, ids.shape[1] + 6])}


def check_logprobs(target, ids, out, end: int) -> None:
    """The numbers of transformers' ``compute_transition_scores``, and of the largest of its scores."""
    steps = out.sequences.shape[1] - ids.shape[1]
    theirs = target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    processed = torch.log_softmax(torch.stack(out.scores, 1), -1)
    chosen, top_ids, top = out.logprobs
    assert chosen.shape == (len(ids), steps)
    assert top_ids.shape == top.shape == (len(ids), steps, TOP)
    for row, text in enumerate(out.sequences[:, ids.shape[1] :].tolist()):
        n = text.index(end) + 1 if end in text else steps
        torch.testing.assert_close(chosen[row, :n], theirs[row, :n], atol=2e-5, rtol=2e-5)
        wanted = processed[row, :n].topk(TOP)
        torch.testing.assert_close(top[row, :n], wanted.values, atol=2e-5, rtol=2e-5)
        there = wanted.values > -torch.inf
        assert torch.equal(top_ids[row, :n] >= 0, there)
        at = processed[row, :n].gather(1, top_ids[row, :n].clamp(min=0))
        torch.testing.assert_close(at[there], top[row, :n][there], atol=2e-5, rtol=2e-5)
        # Behind the end of a row.
        assert not chosen[row, n:].any()
        assert (top_ids[row, n:] == -1).all()
        assert (top[row, n:] == -torch.inf).all()


@pytest.mark.parametrize("how", HOW)
def test_in_every_schedule(target, call, how) -> None:
    ids, options = call
    end = options["eos_token_id"]
    wanted = target.generate(ids, **options, **GREEDY, **OUTPUTS)
    counts = [(row.index(end) + 1 if end in row else NEW) for row in wanted.sequences[:, ids.shape[1] :].tolist()]
    assert min(counts) < max(counts) == NEW
    drafts = [noisy(target, 0.02)] if how in ("workers", "rounds") else [noisy(target, 0.1), noisy(target, 0.02)]
    with Pipeline(target, drafts, lookahead=4, **HOW[how]) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        got = pipe.generate(ids, **options, **GREEDY, **OUTPUTS, logprobs=TOP)
        assert pipe.report.schedule == HOW[how]["schedule"]
        assert pipe.report.decisions is None
        assert torch.equal(got.sequences, wanted.sequences)
        for name in ("scores", "logits"):
            mine, theirs = getattr(got, name), getattr(wanted, name)
            assert len(mine) == len(theirs) == NEW
            for row, n in enumerate(counts):
                for i in range(NEW):
                    if i < n:
                        torch.testing.assert_close(mine[i][row], theirs[i][row], atol=2e-5, rtol=2e-5)
                    else:
                        assert not mine[i][row].any()
        check_logprobs(target, ids, got, end)

        sampled = pipe.generate(ids, **options, **SAMPLED, **OUTPUTS, logprobs=TOP)
        check_logprobs(target, ids, sampled, end)
        assert any((s == -torch.inf).any() for s in sampled.scores)  # filters
        # Other requests over the same buffers, and none.
        assert torch.equal(pipe.generate(ids, **options, **SAMPLED), sampled.sequences)
        alone = pipe.generate(ids, **options, **SAMPLED, return_dict_in_generate=True, logprobs=0)
        assert alone.scores is alone.logits is None
        assert alone.logprobs.top.shape == (3, sampled.logprobs.chosen.shape[1], 0)
        torch.testing.assert_close(alone.logprobs.chosen, sampled.logprobs.chosen)
        assert pipe.generate(ids, **options, **GREEDY, return_dict_in_generate=True).logprobs is None


def test_position_by_position(target, call) -> None:
    """With processors that are not fused."""
    ids, options = call
    with Pipeline(target, [noisy(target, 0.02)], lookahead=4, schedule="lockstep") as pipe:
        for how in (GREEDY, SAMPLED):
            fused = pipe.generate(ids, **options, **how, **OUTPUTS, logprobs=TOP)
            walked = pipe.generate(ids, **options, **how, **OUTPUTS, logprobs=TOP, logits_processor=[ByPosition()])
            assert torch.equal(fused.sequences, walked.sequences)
            for a, b in zip(fused.logprobs, walked.logprobs, strict=True):
                torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        more = {"no_repeat_ngram_size": 2}
        got = pipe.generate(ids, **options, **SAMPLED, **more, **OUTPUTS, logprobs=TOP)
        check_logprobs(target, ids, got, options["eos_token_id"])


@pytest.mark.parametrize("how", ["lockstep", "rounds", "streams"])
def test_with_stopping_criteria(target, call, how) -> None:
    """Criteria get the scores of the tokens so far, and the numbers end with the text."""
    ids, options = call
    seen = []

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append((input_ids.shape[1] - ids.shape[1], len(scores)))
            return torch.full((len(input_ids),), input_ids.shape[1] >= ids.shape[1] + 7)

    with Pipeline(target, [noisy(target, 0.02)], lookahead=4, **HOW[how]) as pipe:
        out = pipe.generate(ids, **options, **GREEDY, **OUTPUTS, logprobs=TOP, stopping_criteria=[After()])
    assert seen == [(i, i) for i in range(1, 8)]
    assert len(out.scores) == len(out.logits) == out.logprobs.chosen.shape[1] == 7
    check_logprobs(target, ids, out, options["eos_token_id"])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
    ids=["GPU", "CPU"],
)
def test_no_room_at_fixed_addresses(target, call, monkeypatch, error) -> None:
    """Then the call runs step by step, where the room grows with the text."""
    ids, options = call

    def full(*args):
        raise error

    monkeypatch.setattr(buffers.StaticRecord, "__init__", full)
    with Pipeline(target, [noisy(target, 0.02)], schedule="lockstep", graphs=True) as pipe:
        with pytest.warns(SpeedWarning, match="no room to record the logits of all tokens at fixed addresses"):
            out = pipe.generate(ids, **options, **GREEDY, **OUTPUTS)
        assert torch.equal(out.sequences, target.generate(ids, **options, **GREEDY))
        assert "no room to record" in str(pipe.report)


def test_captured_steps_wait_for_nothing(monkeypatch) -> None:
    """Without data, an operation whose host reads values raises."""

    def without_data(logits, selected, *_):
        return logits.new_empty(rows, width, 1 + TOP), selected.new_empty(rows, width, TOP)

    monkeypatch.setattr(buffers, "logprobs_of", without_data)
    rows, width = 3, 4
    record = ScoreRecord(rows, scores=True, logits=True, top_logprobs=TOP)
    with FakeTensorMode():
        device = torch.device("cpu")
        static = buffers.StaticRecord(record, rows, NEW, VOCABULARY, device)
        logits = torch.empty(rows, width, VOCABULARY, dtype=torch.bfloat16)
        selected = torch.empty(rows, width, dtype=torch.int32)
        counts = [torch.empty(rows, dtype=torch.int32) for _ in range(3)]
        static(logits, logits.float(), selected, *counts, torch.empty(rows), torch.empty(rows, width))
        with pytest.raises(DataDependentOutputException):
            int(selected[0, 0])


@pytest.mark.parametrize("how", ["lockstep", "streams"])
def test_a_mutation_is_caught(target, call, monkeypatch, how) -> None:
    """Numbers of the next column are not those of the text."""
    ids, options = call
    module = sampling if how == "lockstep" else buffers
    real = module.logprobs_of

    def shifted(logits, *rest):
        return real(logits.roll(1, 1), *rest)

    with Pipeline(target, [noisy(target, 0.02)], lookahead=4, **HOW[how]) as pipe:
        monkeypatch.setattr(module, "logprobs_of", shifted)
        out = pipe.generate(ids, **options, **GREEDY, **OUTPUTS, logprobs=TOP)
        with pytest.raises(AssertionError):
            check_logprobs(target, ids, out, options["eos_token_id"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"logprobs": 3}, ValueError, "needs return_dict_in_generate=True"),
        ({"logprobs": -1, "return_dict_in_generate": True}, ValueError, r"0 \.\. 40, the size of the vocabulary"),
        ({"logprobs": 41, "return_dict_in_generate": True}, ValueError, "not 41"),
        ({"logprobs": True, "return_dict_in_generate": True}, TypeError, "must be an integer"),
        ({"logprobs": 1.5, "return_dict_in_generate": True}, TypeError, "must be an integer"),
    ],
)
def test_wrong_values(target, given, error, message) -> None:
    with pytest.raises(error, match=message):
        Pipeline(target).generate(torch.tensor([[5, 6]]), max_new_tokens=2, **given)
