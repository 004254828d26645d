"""``logprobs`` on the CPU: against ``torch.log_softmax`` and transformers' ``compute_transition_scores``, and its arguments."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationMixin

from pipespec_kernels import ops
from pipespec_kernels.noise import Noise
from tests.trials import trials

from .logprobs import case, check_close, oracle
from .selection import DTYPES

KINDS = ["normal", "few values", "minus inf", "zeros", "nans"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(trials(ci=3, nightly=40)))
def test_log_softmax(kind: str, seed: int) -> None:
    given = case(seed, kind=kind, dtype=[*DTYPES, torch.float64][seed % 4], width=1 + seed % 5)
    check_close(ops.logprobs(**given), oracle(given))
    for off in ({"cutoff": None}, {"inv_temperature": None}, {"cutoff": None, "inv_temperature": None, "top_n": 0}):
        check_close(ops.logprobs(**given | off), oracle(given | off))


def test_as_transition_scores_of_transformers() -> None:
    """``compute_transition_scores(normalize_logits=True)`` of the processed scores."""
    torch.manual_seed(3)
    scores = torch.randn(4, 1, 30)
    scores[:, :, ::3] = -torch.inf
    tokens = torch.randint(0, 10, (4, 1), dtype=torch.int32) * 3 + 1
    one = np.ones(4, dtype=np.int32)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=30)))
    theirs = GenerationMixin.compute_transition_scores(model, tokens.long(), (scores[:, 0],), normalize_logits=True)
    torch.testing.assert_close(ops.logprobs(scores, tokens, one, one * 0)[0], theirs)


def test_probabilities_of_draws() -> None:
    """Relative frequencies of draws with a temperature and a cutoff are the probabilities."""
    draws = trials(ci=20_000, nightly=400_000)
    logits, bar = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(5)), torch.tensor([[-0.2]])
    scale = torch.tensor([1.4])
    noise = Noise(
        torch.arange(draws),
        torch.full((draws,), 9),
        scale.expand(draws).contiguous(),
        bar.expand(draws, 1).contiguous(),
    )
    drawn = ops.sample(logits.expand(draws, -1, -1), noise)[:, 0]
    one = torch.ones(1, dtype=torch.int32)
    _, ids, top = ops.logprobs(logits, one[None], one, one * 0, inv_temperature=scale, cutoff=bar, top_n=12)
    kept = ids[0, 0] >= 0
    p = torch.zeros(12).index_copy_(0, ids[0, 0][kept].long(), top[0, 0][kept].exp()).double()
    counts = torch.bincount(drawn.long(), minlength=12).double()
    assert not counts[p == 0].any()
    inside = p > 0
    statistic = float(((counts - draws * p)[inside] ** 2 / (draws * p[inside])).sum())
    freedom = int(inside.sum()) - 1
    assert statistic < freedom + 10 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"selected": torch.zeros(5, 4)}, TypeError, "selected must be a tensor of int32, got torch.float32"),
        ({"selected": torch.zeros(5, 3, dtype=torch.int32)}, ValueError, r"selected is \(5, 3\), but logits"),
        ({"top_n": 71}, ValueError, "top_n must be 0 .. 70"),
        ({"top_n": -1}, ValueError, "top_n must be 0 .. 70"),
        ({"query_lens": torch.full((5,), 9, dtype=torch.int32)}, ValueError, "row 0: need"),
        ({"inv_temperature": torch.ones(4)}, ValueError, r"inv_temperature must be \[5\]"),
        ({"cutoff": torch.ones(5, 4, dtype=torch.float64)}, TypeError, "cutoff must be float32"),
    ],
)
def test_arguments_are_checked(change, error, message) -> None:
    with pytest.raises(error, match=message):
        ops.logprobs(**case(7) | change)


def test_a_score_that_overflows_keeps_its_id() -> None:
    """It reaches the cutoff: its log-probability is -inf, and its id is not -1."""
    logits = torch.full((1, 1, 3), torch.finfo(torch.float32).min)
    logits[0, 0, 2] = 0.0
    one = torch.ones(1, dtype=torch.int32)
    _, ids, top = ops.logprobs(logits, one[None], one, one * 0, inv_temperature=torch.tensor([2.0]), top_n=3)
    assert ids.tolist() == [[[2, 0, 1]]]
    assert top.tolist() == [[[0.0, -torch.inf, -torch.inf]]]


def test_another_default_device() -> None:
    given = case(1)
    with torch.device("meta"):
        found = ops.logprobs(**given)
    check_close(found, oracle(given))
