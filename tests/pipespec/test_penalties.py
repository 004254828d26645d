"""Penalties and biases: what is fused, the formula, the buffers of captured steps, wrong values. Texts: ``tests/same_text``."""

import pytest
import torch

from pipespec import Pipeline
from pipespec.engine.sampling import FusedPenalties, OutputPenaltyLogitsProcessor, SamplingParams
from tests.conftest import left_pad, noisy, random_llama
from tests.support.reference import transformers_text

VOCABULARY, NEW = 40, 24
OWN = {"presence_penalty": 0.9, "frequency_penalty": 0.35}
CASES = {
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": OWN,
    "negative": {"presence_penalty": -0.5, "frequency_penalty": -0.2},
    "biases": {"sequence_bias": {(5,): -9.0, (11,): 1.5}, "logit_bias": {7: 2.0, 9: float("-inf")}},
    "all": {"repetition_penalty": 1.3, "sequence_bias": {(5,): -9.0}, "logit_bias": {7: 2.0}} | OWN,
}


@pytest.fixture(scope="module")
def target():
    return random_llama(21, vocabulary=VOCABULARY)


def prompts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(4, VOCABULARY, (2 + 3 * i % 12,), generator=generator) for i in range(count)]


def test_the_processor_is_the_formula_of_vllm() -> None:
    ids = torch.tensor([[1, 2, 3, 3, 1, 3], [5, 5, 5, 0, 1, 2]])
    scores = torch.randn(2, 6)
    got = OutputPenaltyLogitsProcessor(2, 0.7, 0.3)(ids, scores)
    for row in range(2):
        for token in range(6):
            n = ids[row, 2:].tolist().count(token)
            wanted = float(scores[row, token]) - 0.3 * n - 0.7 * (n > 0)
            assert float(got[row, token]) == pytest.approx(wanted, abs=1e-6)


def test_captured_buffers_are_those_of_the_call(target) -> None:
    """Prompts, numbers and the number of biases change from call to call over the same buffers."""
    with Pipeline(target, [noisy(target, 0.02)], lookahead=3, schedule="lockstep", graphs=True) as chain:
        for i, case in enumerate([*CASES.values(), {}, *CASES.values()]):
            ids, mask = left_pad(prompts(1 + i % 2))
            given = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False} | case
            got = chain.generate(ids, attention_mask=mask, **given)
            assert torch.equal(got, transformers_text(target, ids, mask, **given)), case


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"presence_penalty": "a"}, TypeError, "presence_penalty must be a number, not 'a'"),
        ({"frequency_penalty": float("nan")}, ValueError, "frequency_penalty must be a finite number of float32"),
        ({"logit_bias": [1]}, TypeError, "logit_bias must be a dict of token ids and numbers, not list"),
        ({"logit_bias": {"a": 1.0}}, TypeError, "logit_bias: 'a' is not a token id"),
        ({"logit_bias": {3: None}}, TypeError, "the bias of token 3 must be a number, not None"),
        ({"logit_bias": {3: float("inf")}}, ValueError, "the bias of token 3 must be a finite number"),
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
