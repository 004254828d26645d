"""Sampled tokens have exactly the softmax's distribution, also with drafts that propose the target's least likely tokens.

The test is chi-square with the threshold df + 10 sqrt(2 df): ten standard deviations, so a right engine does not fail. Everything is seeded.
Vocabularies are small, because the test needs many draws per bin.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.engine.cached_text import CachedText
from pipespec.engine.sampler import Sampler
from pipespec.engine.sampling import SamplingParams
from tests.conftest import always_wrong, noisy, random_llama
from tests.trials import trials

IDS = 16


@dataclass(frozen=True)
class Sampling:
    """The filters, under ``generate()``'s names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None


DRAWS = trials(ci=50_000, nightly=200_000)


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """The statistic and its threshold; bins with an expectation below five are merged into one."""
    n = counts.sum()
    assert counts[p == 0].sum() == 0, "a token that cannot be drawn was drawn"
    small = n * p < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = n * np.append(p[~small], p[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()), df + 10 * math.sqrt(2 * df)


def check_fits(counts: np.ndarray, p: np.ndarray, what: str) -> None:
    statistic, threshold = chi_square(np.asarray(counts, dtype=np.float64), np.asarray(p, dtype=np.float64))
    assert statistic < threshold, f"{what}: chi-square {statistic:.0f}, threshold {threshold:.0f}"


def test_the_statistic():
    """It accepts matching counts and rejects a bias of one part in twenty."""
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(IDS))
    check_fits(generator.multinomial(200_000, p), p, "right")
    wrong = p.copy()
    wrong[np.argsort(p)[-2:]] *= (0.95, 1.05)
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(generator.multinomial(200_000, wrong / wrong.sum()), p, "wrong")
    with pytest.raises(AssertionError, match="cannot be drawn"):
        check_fits(np.ones(4), np.array([0.5, 0.5, 0.0, 0.0]), "outside")


# ---- the selection alone

RARE = -12.0  # of 200 000 draws about one


def logits_of(columns: int) -> torch.Tensor:
    """``[columns, IDS]``: a distribution with many likely tokens per column, and one token that is almost never drawn."""
    x = 0.9 * torch.randn(columns, IDS, generator=torch.Generator().manual_seed(5))
    x[:, 3] = RARE
    return x


def filtered(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """The exact distribution, float64 (without a penalty: there is no text)."""
    y = logits.double() / sampling.temperature
    if sampling.top_k:
        y[y < y.topk(sampling.top_k).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        p, order = y.softmax(-1).sort(descending=True)
        y[order[p.cumsum(0) - p >= sampling.top_p]] = -torch.inf
    if sampling.min_p:
        y[y < y.max() + math.log(sampling.min_p)] = -torch.inf
    return y.softmax(-1).numpy()


def walk(sampling: Sampling, draws: int, *, batch: int = 500, columns: int = 4, keys: str = "seeds"):
    """Verify coupled draft tokens of a draft that prefers the target's least likely tokens, except the one that is almost never drawn.

    Returns the counts of the target's draws per column that it reached, and of the pairs drawn in columns 0 and 1. ``keys``: whether the draws differ
    by their seeds or by their positions.
    """
    logits = logits_of(columns)
    perverse = (-logits).masked_fill(logits == RARE, RARE)
    single = np.zeros((columns, IDS))
    pairs = np.zeros((IDS, IDS))
    reached = accepted = 0
    fields = {name: value for name, value in vars(sampling).items() if value}
    text = np.zeros((batch, 4), dtype=np.int32)
    query_lens = np.full(batch, columns, dtype=np.int32)
    for call in range(draws // batch):
        if keys == "seeds":
            seeds = tuple(range(call * batch, (call + 1) * batch))
            positions = np.full(batch, 7, dtype=np.int64)
        else:
            seeds = (99,) * batch
            positions = (call * batch + np.arange(batch, dtype=np.int64)) * columns
        select = Sampler(SamplingParams(seeds=seeds, **fields), text)
        block, opposite = logits.expand(batch, -1, -1), perverse.expand(batch, -1, -1)
        # The draft's tokens: its own choice in each column, which the target gets as draft tokens one column later.
        fed = torch.zeros((batch, columns), dtype=torch.int64)
        for column in range(columns - 1):
            own = select(
                opposite[:, column : column + 1], fed[:, :1], query_lens * 0 + 1, query_lens * 0, positions + column
            )
            fed[:, column + 1] = own[:, 0]
        chosen = select(block, fed, query_lens, query_lens - 1, positions).numpy()
        for column in range(columns):
            there = chosen[:, column][chosen[:, column] >= 0]
            single[column] += np.bincount(there, minlength=IDS)
        reached += int((chosen >= 0).sum())
        accepted += int((chosen[:, 1:] >= 0).sum())
        # Pairs need every draw, not only those behind an accepted draft token.
        free = select(block, fed, query_lens * 0 + 1, query_lens * 0, positions).numpy()[:, 0]
        second = select(block[:, 1:2], fed[:, :1], query_lens * 0 + 1, query_lens * 0, positions + 1).numpy()[:, 0]
        np.add.at(pairs, (free, second), 1)
    return logits, single, pairs, accepted / max(1, reached - single[-1].sum())


def check_selection(sampling: Sampling, draws: int = DRAWS, **kwargs) -> None:
    logits, single, pairs, _ = walk(sampling, draws, **kwargs)
    exact = [filtered(row, sampling) for row in logits]
    assert single[0].sum() == draws
    for column, (counts, p) in enumerate(zip(single, exact, strict=True)):
        if counts.sum() > 200:
            check_fits(counts, p, f"column {column} of {sampling}")
    check_fits(pairs.ravel(), np.outer(exact[0], exact[1]).ravel(), f"two positions of {sampling}")


@pytest.mark.parametrize(
    ("sampling", "keys", "draws"),
    [
        (Sampling(), "seeds", DRAWS),
        (Sampling(), "positions", DRAWS),
        (Sampling(temperature=0.6), "seeds", DRAWS),
        (Sampling(temperature=1.7, top_k=9), "positions", DRAWS // 10),
        (Sampling(min_p=0.1), "seeds", DRAWS),
        # Fewer: a top-p row costs a hundred microseconds, however narrow the vocabulary.
        (Sampling(top_p=0.85), "seeds", DRAWS // 50),
        (Sampling(temperature=1.3, top_k=12, top_p=0.95, min_p=0.03), "positions", DRAWS // 50),
    ],
    ids=str,
)
def test_adversarial_draft_tokens(sampling, keys, draws):
    check_selection(sampling, draws, keys=keys)


def test_the_draft_tokens_are_adversarial():
    """Most are rejected and some accepted, so both branches of the walk draw tokens."""
    _, single, _, rate = walk(Sampling(), 20_000)
    assert 0.01 < rate < 0.4
    assert single[1].sum() > 100


# ---- end to end


NARROW = random_llama(31, vocabulary=IDS, hidden=32)
with torch.no_grad():
    NARROW.lm_head.weight.mul_(1.5)  # not too flat, or a draft that is always wrong would often agree
PROMPT = torch.tensor([[5, 9, 2, 14, 7, 11]])


def exact_pairs(sampling: Sampling) -> np.ndarray:
    """The distribution of the next two tokens, ``[IDS, IDS]``."""
    model = copy.deepcopy(NARROW).double()
    with torch.no_grad():
        first = filtered(model(PROMPT).logits[0, -1], sampling)
        longer = torch.cat([PROMPT.expand(IDS, -1), torch.arange(IDS)[:, None]], dim=1)
        second = np.stack([filtered(row, sampling) for row in model(longer).logits[:, -1]])
    return first[:, None] * second


def check_end_to_end(sampling: Sampling, pipeline: Pipeline, calls: int, rows: int = 500) -> None:
    counts = np.zeros((IDS, IDS))
    for seed in range(calls):
        out = pipeline.generate(
            PROMPT,
            max_new_tokens=2,
            num_return_sequences=rows,
            seed=seed,
            do_sample=True,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            temperature=sampling.temperature,
        )
        new = out[:, PROMPT.shape[1] :].numpy()
        np.add.at(counts, (new[:, 0], new[:, 1]), 1)
    p = exact_pairs(sampling)
    check_fits(counts.ravel(), p.ravel(), f"pairs, {sampling}")
    check_fits(counts.sum(1), p.sum(1), f"first token, {sampling}")


@pytest.mark.parametrize(
    ("sampling", "drafts"),
    [
        (Sampling(), "wrong"),
        (Sampling(), "both"),
        (Sampling(temperature=0.8, top_k=11), "wrong"),
        (Sampling(temperature=0.8, top_p=0.95), "good"),
    ],
    ids=str,
)
def test_end_to_end(sampling, drafts, monkeypatch):
    """Thousands of pairs of tokens through a whole pipeline."""
    monkeypatch.setattr(CachedText, "reads_last", False)  # else drafts have no part in the first token
    models = {"wrong": [always_wrong(NARROW)], "good": [noisy(NARROW, 0.05)]}
    models["both"] = models["wrong"] + models["good"]
    pipeline = Pipeline(NARROW, models[drafts], lookahead=2, schedule="lockstep")
    check_end_to_end(sampling, pipeline, trials(ci=6, nightly=12))
    rate = pipeline.report.stages[-1].acceptance_rate
    assert rate < 0.4 if drafts == "wrong" else rate > 0.6, rate
