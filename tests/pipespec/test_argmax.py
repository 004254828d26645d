"""``Sampler.argmax``: the choice of a call without draft tokens, where it is the argmax and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from pipespec.engine.sampler import Sampler, ScoreRecord
from pipespec.engine.sampling import SamplingParams

ROWS, VOCABULARY = 3, 20
TEXT = np.zeros((ROWS, 8), dtype=np.int32)


def test_it_is_what_the_call_chooses() -> None:
    """The logits of a padded vocabulary lie behind the target's."""
    sampler = Sampler(SamplingParams(), TEXT, vocabulary=VOCABULARY)
    logits = torch.randn((ROWS, 1, VOCABULARY + 4), generator=torch.Generator().manual_seed(0))
    logits[0, 0, VOCABULARY + 1] = 100.0
    logits[1, 0, [3, 9]] = 50.0  # the lower id
    ones, fed = np.ones(ROWS, dtype=np.int32), torch.zeros((ROWS, 1), dtype=torch.int32)
    chosen = sampler(logits, fed, ones, 0 * ones, np.full(ROWS, 5, dtype=np.int64))
    found = sampler.argmax(logits)
    assert found is not None
    assert found.dtype == torch.int32
    assert found.tolist() == chosen.tolist()
    assert found[1].tolist() == [3]
    assert int(found.max()) < VOCABULARY


@pytest.mark.parametrize(
    ("params", "record"),
    [
        (SamplingParams(seeds=(1, 2, 3)), False),
        (SamplingParams(processors=(hf.RepetitionPenaltyLogitsProcessor(1.5),)), False),
        (SamplingParams(processors=(hf.MinLengthLogitsProcessor(4, 0, device="cpu"),)), False),
        (SamplingParams(), True),
    ],
)
def test_what_needs_more(params: SamplingParams, record: bool) -> None:
    sampler = Sampler(params, TEXT, ScoreRecord(ROWS, scores=True, logits=False) if record else None)
    assert sampler.argmax(torch.randn((ROWS, 1, VOCABULARY))) is None


def test_a_grammar_needs_more() -> None:
    sampler = Sampler(SamplingParams(), TEXT, grammar=object())  # type: ignore[arg-type]
    assert sampler.argmax(torch.randn((ROWS, 1, VOCABULARY))) is None
