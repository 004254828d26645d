"""Rejection sampling over whole texts keeps the target's distribution of texts, whatever the draft."""

from __future__ import annotations

import math

import torch

from pipespec_kernels import ops
from pipespec_kernels.noise import DRAFT, Noise
from tests.trials import trials

IDS, LENGTH, DRAFTED = 4, 3, 3
TEXTS = trials(ci=15_000, nightly=1_000_000)
GENERATOR = torch.Generator().manual_seed(2)
TARGET = torch.randn(IDS, IDS, generator=GENERATOR)  # logits behind each token
DRAFT_TABLE = 0.6 * TARGET + 0.9 * torch.randn(IDS, IDS, generator=GENERATOR)


def texts(rows: int, *, drawn_with: int = DRAFT, scale: float = 1.0) -> torch.Tensor:
    """The texts of many rows, int64 ``[rows, LENGTH]``. ``scale``: of the draft's logits, as the rule sees them."""
    seeds, ones = torch.arange(rows) * 0x9E3779B97F4A7C15 + 1, torch.ones(rows)
    text = torch.zeros(rows, LENGTH + DRAFTED + 2, dtype=torch.int64)
    length = torch.ones(rows, dtype=torch.int64)
    every = torch.arange(rows)
    for _ in range(LENGTH):
        going = (length <= LENGTH).int()
        if not going.any():
            break
        fed = [text[every, length - 1]]
        for i in range(DRAFTED):
            noise = Noise(seeds, length + i, ones, stream=drawn_with)
            fed.append(ops.sample(DRAFT_TABLE[fed[-1]][:, None], noise)[:, 0].long())
        tokens = torch.stack(fed, 1)
        query_lens = going * (DRAFTED + 1)
        selected, accepted = ops.rejection_sample(
            TARGET[tokens], tokens, query_lens, going * DRAFTED, DRAFT_TABLE[tokens] * scale, Noise(seeds, length, ones)
        )
        for j in range(DRAFTED + 1):
            places = (length + j).clamp(max=text.shape[1] - 1)
            takes = selected[:, j] >= 0
            text[every[takes], places[takes]] = selected[takes, j].long()
        length += (accepted + 1) * going
    return text[:, 1 : LENGTH + 1]


def chi_square(found: torch.Tensor) -> float:
    """Of whole texts."""
    p = TARGET.double().softmax(-1)
    expected = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten() * len(found)
    code = (found[:, 0] * IDS + found[:, 1]) * IDS + found[:, 2]
    counts = torch.bincount(code, minlength=IDS**LENGTH).double()
    return float(((counts - expected) ** 2 / expected).sum())


BIGGEST = IDS**LENGTH - 1 + 10 * math.sqrt(2 * (IDS**LENGTH - 1))  # ten standard deviations


def test_texts_have_the_targets_distribution() -> None:
    assert chi_square(texts(TEXTS)) < BIGGEST
