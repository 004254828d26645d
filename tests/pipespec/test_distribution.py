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
