"""Every logits processor of transformers and of users: the text is that of transformers' own loop. The models have 40 tokens, so that every processor has
an effect."""

import copy

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from pipespec import Pipeline
from pipespec.engine.sampling import FusedPenalties, OutputPenaltyLogitsProcessor, SamplingParams
from tests.conftest import left_pad, noisy, random_llama
from tests.support.reference import transformers_text

VOCABULARY, EOS, NEW = 40, 3, 18


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (2 + 3 * i % longest,), generator=generator) for i in range(count)]


@pytest.fixture(scope="module")
def target():
    return random_llama(21, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def chain(target):
    return Pipeline(target, [noisy(target, 0.1), noisy(target, 0.02)], lookahead=[3, 4], schedule="lockstep")


CASES = {
    "min_length": {"min_length": 20, "eos_token_id": list(range(3, 30))},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": list(range(10, 40))},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2, "suppress_tokens": list(range(10, 40))},
    "bad_words_ids": {"bad_words_ids": [[5], [7], [8, 9], *([i, i + 1] for i in range(10, 38))]},
    "sequence_bias": {"sequence_bias": {(5,): -9.0, (11,): 2.5, (11, 12): 8.0, (12, 13): 8.0}},
    "suppress_tokens": {"suppress_tokens": list(range(20, 40))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(4, 35))},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": EOS},
    "repetition_penalty with another": {"repetition_penalty": 1.8, "suppress_tokens": [7, 8]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)},
    "watermarking lefthash": {"watermarking_config": WatermarkingConfig(bias=4.0, greenlist_ratio=0.3)},
    "watermarking SynthID": {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123, 340, 443, 597])
    },
    "several": {
        "min_new_tokens": 9,
        "eos_token_id": list(range(3, 20)),
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[21], [22, 23]],
        "repetition_penalty": 1.3,
        "suppress_tokens": [30, 31],
    },
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.2},
    "top_h": {"top_h": 0.4},
    "top_h before top_k": {"top_h": 0.6, "top_k": 4, "top_p": 0.9},
    "typical_p after top_k": {"top_k": 12, "typical_p": 0.7},
}


SAMPLED = {"do_sample": True, "top_k": 0, "seed": 17}


def compared(chain, ids, mask, **kwargs) -> torch.Tensor:
    """The new tokens of the chain, after a comparison with transformers' own text."""
    kwargs = {"max_new_tokens": NEW, "pad_token_id": 0} | kwargs
    wanted = transformers_text(chain.target, ids, mask, **copy.deepcopy(kwargs))  # processors may keep a state
    got = chain.generate(ids, attention_mask=mask, **kwargs)
    assert torch.equal(got, wanted), f"wanted {wanted.tolist()}, got {got.tolist()}"
    return got[:, ids.shape[1] :]


@pytest.mark.parametrize("case", CASES)
def test_built_in(chain, case):
    """Sampled. The greedy texts, where filters have no effect: test_conformance.py."""
    eos = {name: CASES[case][name] for name in ("eos_token_id",) if name in CASES[case]}
    changed = accepted = 0
    for count in (1, 3):
        ids, mask = left_pad(prompts(count, seed=count))
        text = compared(chain, ids, mask, **SAMPLED | CASES[case])
        accepted += chain.report.stages[-1].accepted
        plain = compared(chain, ids, mask, **SAMPLED, **eos)
        changed += text.shape != plain.shape or not torch.equal(text, plain)
    # The processor had an effect, and the drafts still agree.
    assert changed > 0
    assert accepted > 0


def test_returned_sequences_of_processors_that_know_rows(chain):
    """With num_return_sequences a row's index is not its prompt's."""
    ids, mask = left_pad(prompts(3, seed=5))
    for kwargs in (
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 0.5},
        {"prefix_allowed_tokens_fn": lambda row, _: range(4 + row, 40, 3)},
    ):
        compared(chain, ids, mask, **SAMPLED, num_return_sequences=2, **kwargs)


# ---- a user's own


RETURNED = {
    "1-D": lambda scores: scores[0],
    "3-D": lambda scores: scores[None],
    "two rows": lambda scores: torch.cat([scores, scores]),
    "0-D": lambda scores: scores.max(),
    "fewer": lambda scores: scores[:, :20],
    "none": lambda scores: scores[:, :0],
    "strided": lambda scores: torch.stack([scores, -scores], -1)[..., 0],
    "integers": lambda scores: (scores * 1000).long(),
    "float64": lambda scores: scores.double(),
    "bfloat16": lambda scores: scores.bfloat16(),
    "None": lambda scores: None,
    "numpy": lambda scores: scores.numpy(),
    "a list": lambda scores: scores.tolist(),
}


@pytest.mark.parametrize("form", RETURNED)
@pytest.mark.parametrize("eos", [None, 39])
@pytest.mark.parametrize("at", [6, 9])
def test_what_a_processor_returns(chain, form, eos, at):
    """From the first token on, and later: texts and errors are transformers'."""

    def processor(ids, scores):
        return RETURNED[form](scores) if ids.shape[1] >= at else scores

    ids = torch.arange(5, 11)[None]
    given = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    found = []
    for generate in (chain.target.generate, chain.generate):
        try:
            found.append(generate(ids, **given, logits_processor=[processor]).tolist())
        except Exception as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1]


# ---- penalties and biases: texts are in tests/same_text


def test_the_processor_is_the_formula_of_vllm() -> None:
    ids = torch.tensor([[1, 2, 3, 3, 1, 3], [5, 5, 5, 0, 1, 2]])
    scores = torch.randn(2, 6)
    got = OutputPenaltyLogitsProcessor(2, 0.7, 0.3)(ids, scores)
    for row in range(2):
        for token in range(6):
            n = ids[row, 2:].tolist().count(token)
            wanted = float(scores[row, token]) - 0.3 * n - 0.7 * (n > 0)
            assert float(got[row, token]) == pytest.approx(wanted, abs=1e-6)


PENALTIES = {"presence_penalty": 0.9, "frequency_penalty": 0.35}
BIASES = {"sequence_bias": {(5,): -9.0, (11,): 1.5}, "logit_bias": {7: 2.0, 9: float("-inf")}}


def test_captured_buffers_are_those_of_the_call(target) -> None:
    """Prompts, numbers and the number of biases change from call to call over the same buffers."""
    one = {"repetition_penalty": 1.3, "sequence_bias": {(5,): -9.0}, "logit_bias": {7: 2.0}} | PENALTIES
    negative = {"presence_penalty": -0.5, "frequency_penalty": -0.2}
    cases = [{"repetition_penalty": 1.8}, PENALTIES, negative, BIASES, one]
    with Pipeline(target, [noisy(target, 0.02)], lookahead=3, schedule="lockstep", graphs=True) as chain:
        for i, case in enumerate([*cases, {}, *cases]):
            ids, mask = left_pad(prompts(1 + i % 2))
            compared(chain, ids, mask, do_sample=False, **case)


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
