"""``logprobs`` on the CPU: against ``torch.log_softmax`` and transformers' ``compute_transition_scores``, and its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationMixin

from pipespec_kernels import ops, reference
from tests.trials import trials

from .logprobs import case, check_close, oracle
from .selection import DTYPES, make_logits

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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"selected": torch.zeros(5, 4)}, TypeError, "selected must be a tensor of int32, got torch.float32"),
        ({"selected": torch.zeros(5, 3, dtype=torch.int32)}, ValueError, r"selected is \(5, 3\), but logits"),
        ({"top_n": 71}, ValueError, "top_n must be 0 .. 70"),
        ({"top_n": -1}, ValueError, "top_n must be 0 .. 70"),
        ({"query_lens": torch.full((5,), 9, dtype=torch.int32)}, ValueError, "row 0: need .*query_lens=9"),
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


def test_the_reference() -> None:
    """It has float64, and other devices."""
    for seed in range(2):
        given = case(seed, dtype=torch.float64)
        check_close(ops.logprobs(**given), oracle(given))
        given = case(seed, kind="few values")
        counts = given["query_lens"], given["num_draft_tokens"]
        numbers = given["inv_temperature"], given["cutoff"], given["top_n"]
        check_close(reference.logprobs(given["logits"], given["selected"], *counts, *numbers), oracle(given))


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(before)


LENGTHS = [1, 31, 33, 257, 1027, 70_001]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("three_threads")
def test_lengths_and_threads(dtype: torch.dtype) -> None:
    """Ends of vectors and of blocks, rows in parts, and equal logits in several parts."""
    generator = torch.Generator().manual_seed(11)
    one = torch.ones(2, dtype=torch.int32)
    for vocab in LENGTHS:
        for kind in ("normal", "few values") if vocab < 70_001 else ("few values",):
            logits = make_logits(kind, (2, 1, vocab + 3), dtype, generator)[..., 3:] * 4
            given = {"logits": logits, "selected": torch.tensor([[0], [vocab - 1]], dtype=torch.int32)}
            given |= {"query_lens": one, "num_draft_tokens": one * 0, "top_n": min(vocab, 9), "cutoff": None}
            given["inv_temperature"] = torch.tensor([0.7, 3.0])
            check_close(ops.logprobs(**given), oracle(given))
        # The last vector holds the largest logit, and the only NaN.
        logits[0, 0, -1], logits[1, 0, -1] = 50.0, torch.nan
        check_close(ops.logprobs(**given), oracle(given))


def test_sorted_rows_and_all_of_the_vocabulary() -> None:
    """Each logit of a row that ascends is among the largest so far; with ``top_n = V`` nothing is left out."""
    rows = torch.linspace(-5, 5, 3001)[None].repeat(2, 1)
    rows[1] = rows[1].flip(0).round()
    given = case(0, batch=2, width=1) | {"logits": rows[:, None], "top_n": 40, "cutoff": torch.tensor([[-4.0], [1.0]])}
    given["selected"] = torch.tensor([[3000], [0]], dtype=torch.int32)
    given["query_lens"], given["num_draft_tokens"] = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for n in (1, 40, 3001):
        check_close(ops.logprobs(**given | {"top_n": n}), oracle(given | {"top_n": n}))


def test_far_apart_scores_keep_their_precision() -> None:
    """Against sums in float64: many small terms behind a large one, large ones behind small ones, and scores far from 0."""
    generator = torch.Generator().manual_seed(1)
    vocab = 50_000
    rows = torch.randn(4, 1, vocab, generator=generator)
    rows[0, 0, 0] = 9.0
    rows[1, 0, -1] = 60.0
    rows[2] += 3000.0
    rows[3] = torch.linspace(-90, 90, vocab)
    one = torch.ones(4, dtype=torch.int32)
    ids = torch.tensor([[0], [vocab - 1], [5], [vocab - 1]], dtype=torch.int32)
    chosen, _, top = ops.logprobs(rows, ids, one, one * 0, top_n=3)
    wanted = rows.double().log_softmax(-1)
    torch.testing.assert_close(chosen[:, 0].double(), wanted[:, 0].gather(1, ids.long())[:, 0], atol=5e-7, rtol=2e-7)
    torch.testing.assert_close(top[:, 0].double(), wanted[:, 0].topk(3).values, atol=5e-7, rtol=2e-7)


def test_any_strides_and_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    for dtype in DTYPES:
        given = case(3, batch=4, width=3, dtype=dtype)
        wide = make_logits("normal", (3, 4, 90), dtype, generator).transpose(0, 1)[..., 7:77]
        wide[0, 0, :5] = make_logits("any bits", (5,), dtype, generator)
        for logits in (wide, wide[:, :1].expand(-1, 3, -1)):
            given["logits"] = logits
            check_close(ops.logprobs(**given), oracle(given))
