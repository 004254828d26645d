"""Penalties and biases in all schedules: fused, each position with its own prefix, and the text is transformers' with the same processors."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from transformers.generation import LogitsProcessorList

import pipespec
from pipespec import Pipeline, SpeedWarning
from pipespec.engine.sampling import FusedPenalties, OutputPenaltyLogitsProcessor, Sampler, SamplingParams
from tests.conftest import ByPosition, left_pad, noisy, random_llama

VOCABULARY, NEW = 40, 24
OWN = {"presence_penalty": 0.9, "frequency_penalty": 0.35}
CASES = {
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": OWN,
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.2},
    "biases": {"sequence_bias": {(5,): -9.0, (11,): 1.5}, "logit_bias": {7: 2.0, 9: float("-inf")}},
    "all": {"repetition_penalty": 1.3, "sequence_bias": {(5,): -9.0}, "logit_bias": {7: 2.0}} | OWN,
}
HOW = {
    "lockstep": {"schedule": "lockstep"},
    "rounds": {"schedule": "lockstep", "graphs": True},
    "workers": {"schedule": "workers"},
    "streams": {"schedule": "streams"},
}


@pytest.fixture(scope="module")
def target():
    return random_llama(21, vocabulary=VOCABULARY)


def prompts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(4, VOCABULARY, (2 + 3 * i % 12,), generator=generator) for i in range(count)]


def theirs(target, ids, mask, case, **more) -> torch.Tensor:
    """transformers' text with the same processors."""
    case = dict(case)
    own = OutputPenaltyLogitsProcessor(
        ids.shape[1], case.pop("presence_penalty", 0.0), case.pop("frequency_penalty", 0.0)
    )
    bias = {(i,): b for i, b in case.pop("logit_bias", {}).items()} | case.pop("sequence_bias", {})
    more |= {"sequence_bias": bias} if bias else {}
    processors = LogitsProcessorList([own])
    return target.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, logits_processor=processors, **case, **more
    )


SAMPLED = {"do_sample": True, "seed": 5, "top_k": 20, "temperature": 0.9}


@pytest.fixture(scope="module")
def expected(target):
    """Per case transformers' greedy text, and the sampled text of the target alone, position by position."""
    ids, mask = left_pad(prompts(3))
    alone, options = Pipeline(target), {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    plain = alone.generate(ids, **options, **SAMPLED)
    found = {}
    for name, case in CASES.items():
        out = alone.generate(ids, **options, **SAMPLED, **case, logits_processor=[ByPosition()])
        assert plain.shape != out.shape or not torch.equal(plain, out), name
        found[name] = theirs(target, ids, mask, case, do_sample=False), out
    return found


@pytest.mark.parametrize("how", HOW)
def test_text_of_transformers_in_every_schedule(target, expected, how) -> None:
    """Greedy and sampled, without leaving the schedule."""
    ids, mask = left_pad(prompts(3))
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    drafts = [noisy(target, 0.02)] if how == "workers" else [noisy(target, 0.1), noisy(target, 0.02)]
    cases = {name: CASES[name] for name in (CASES if how == "lockstep" else ["repetition", "all"])}
    with Pipeline(target, drafts, lookahead=4, **HOW[how]) as chain, warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        drafted = accepted = 0
        for name, case in cases.items():
            greedy, sampled = expected[name]
            assert torch.equal(chain.generate(ids, **options, do_sample=False, **case), greedy), name
            assert chain.report.schedule == HOW[how]["schedule"]
            accepted += chain.report.stages[-1].accepted
            drafted += chain.report.stages[-1].drafted
            assert torch.equal(chain.generate(ids, **options, **SAMPLED, **case), sampled), name
        if how in ("lockstep", "rounds"):
            assert accepted > 0.6 * drafted > 0


def test_drafts_apply_them(target) -> None:
    """Without the penalties a perfect draft would be wrong at every token that they change."""
    ids, mask = left_pad(prompts(2))
    with Pipeline(target, [noisy(target, 0.0)], lookahead=4, schedule="lockstep") as chain:
        chain.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, do_sample=False, **CASES["all"])
        assert chain.report.stages[-1].acceptance_rate == 1.0


def test_the_processor_is_the_formula_of_vllm() -> None:
    ids = torch.tensor([[1, 2, 3, 3, 1, 3], [5, 5, 5, 0, 1, 2]])
    scores = torch.randn(2, 6)
    got = OutputPenaltyLogitsProcessor(2, 0.7, 0.3)(ids, scores)
    for row in range(2):
        for token in range(6):
            n = ids[row, 2:].tolist().count(token)
            wanted = float(scores[row, token]) - 0.3 * n - 0.7 * (n > 0)
            assert float(got[row, token]) == pytest.approx(wanted, abs=1e-6)


def test_a_mutation_is_caught(target, monkeypatch) -> None:
    """A sampler whose penalties forget the generated text gives another text."""
    ids, mask = left_pad(prompts(1))
    wanted = theirs(target, ids, mask, CASES["all"], do_sample=False)
    real = Sampler._prefix
    monkeypatch.setattr(
        Sampler,
        "_prefix",
        lambda self, row, end: np.append(real(self, row, end)[:2], [-1] * (end - 2)).astype(np.int32),
    )
    with Pipeline(target, [noisy(target, 0.02)], lookahead=4, schedule="lockstep") as chain:
        got = chain.generate(ids, max_new_tokens=NEW, pad_token_id=0, do_sample=False, **CASES["all"])
    assert got.shape != wanted.shape or not torch.equal(got, wanted)


def test_captured_buffers_are_those_of_the_call(target) -> None:
    """Prompts, numbers and the number of biases change from call to call over the same buffers."""
    with Pipeline(target, [noisy(target, 0.02)], lookahead=3, schedule="lockstep", graphs=True) as chain:
        for i, case in enumerate([*CASES.values(), {}, *CASES.values()]):
            ids, mask = left_pad(prompts(1 + i % 2))
            got = chain.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, do_sample=False, **case)
            assert torch.equal(got, theirs(target, ids, mask, case, do_sample=False)), case


def test_other_processors_run_beside_them(target) -> None:
    """Position by position, in the same order."""
    ids, mask = left_pad(prompts(2))
    case = OWN | {"repetition_penalty": 1.2}
    with Pipeline(target, [noisy(target, 0.02)], lookahead=3, schedule="lockstep") as chain:
        for more in (
            {"min_new_tokens": 9, "eos_token_id": list(range(10, 40))},
            {"sequence_bias": {(4, 6): 2.0, (5,): -1.0}},
        ):
            options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
            got = chain.generate(ids, **options, **case, **more)
            assert torch.equal(got, theirs(target, ids, mask, case | more, do_sample=False))


def test_attached_and_custom_generate(target) -> None:
    ids, mask = left_pad(prompts(2))
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    wanted = theirs(target, ids, mask, CASES["all"], do_sample=False)
    with Pipeline(target, [noisy(target, 0.02)], schedule="lockstep") as pipe:
        assert torch.equal(target.generate(ids, custom_generate=pipe, **options, **CASES["all"]), wanted)
    pipespec.attach(target, [noisy(target, 0.02)], schedule="lockstep")
    try:
        assert torch.equal(target.generate(ids, **options, **CASES["all"]), wanted)
    finally:
        pipespec.detach(target)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"presence_penalty": "a"}, TypeError, "presence_penalty must be a number, not 'a'"),
        (
            {"frequency_penalty": float("nan")},
            ValueError,
            "frequency_penalty must be a finite number of float32, not nan",
        ),
        (
            {"presence_penalty": -1e300},
            ValueError,
            "presence_penalty must be a finite number of float32, not -1e[+]300",
        ),
        (
            {"logit_bias": {3: 1e300}},
            ValueError,
            "the bias of token 3 is 1e[+]300; it must be a finite number of float32",
        ),
        ({"logit_bias": [1]}, TypeError, "logit_bias must be a dict of token ids and numbers, not list"),
        ({"logit_bias": {"a": 1.0}}, TypeError, "logit_bias: 'a' is not a token id"),
        ({"logit_bias": {3: None}}, TypeError, "the bias of token 3 must be a number, not None"),
        (
            {"logit_bias": {3: float("inf")}},
            ValueError,
            "the bias of token 3 is inf; it must be a finite number of float32, or -inf",
        ),
        ({"logit_bias": {40: 1.0}}, ValueError, r"the target has 40 tokens, but these ids are biased: \[40\]"),
        ({"sequence_bias": {(99,): 1.0}}, ValueError, r"these ids are biased: \[99\]"),
    ],
)
def test_wrong_values(target, given, error, message) -> None:
    with pytest.raises(error, match=message):
        Pipeline(target).generate(torch.tensor([[5, 6]]), max_new_tokens=2, **given)


def test_what_is_fused() -> None:
    def params(**given) -> SamplingParams:
        from transformers.generation import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

        made = {
            "bias": lambda x: SequenceBiasLogitsProcessor(x),
            "repetition": lambda x: RepetitionPenaltyLogitsProcessor(x),
            "output": lambda x: OutputPenaltyLogitsProcessor(*x),
        }
        return SamplingParams.of([made[name.rstrip("0")](x) for name, x in given.items()], seeds=None)

    one = params(bias={(3,): 1.0}, bias0={(4,): 2.0}, repetition=1.5, output=(4, 0.5, 0.25)).penalties
    assert one == FusedPenalties(1.5, 0.5, 0.25, ((3, 1.0), (4, 2.0)), 4)
    # Another order, the same id twice, a sequence of two tokens, no processor at all.
    assert params(repetition=1.5, bias={(3,): 1.0}).stepwise
    assert params(output=(4, 0.5, 0.25), repetition=1.5).stepwise
    assert params(bias={(3,): 1.0}, bias0={(3,): 2.0}).stepwise
    assert params(bias={(3, 4): 1.0}).stepwise
    assert not params().stepwise
    assert params().penalties is None
