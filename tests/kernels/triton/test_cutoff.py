"""The thresholds of top-k, top-p and min-p against the oracle, which sorts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pipespec_kernels import reference
from pipespec_kernels.noise import Noise
from pipespec_kernels.triton import cutoff, verify

from ..selection import DTYPES, make_logits, strided
from .conftest import some

AWKWARD = ["few values", "minus inf", "zeros", "nans", "any bits", "negative"]


def per_row(values: list[float], batch: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([values[r % len(values)] for r in range(batch)], dtype=dtype)


def check_equal(logits, device, *, scale=1.0, k=0, p=1.0, least=0.0, counts=(None, None), layout="plain"):
    """Kernel and oracle, each filter given as a number or as one value per row."""
    batch = logits.shape[0]
    rows = [
        per_row(value if isinstance(value, list) else [value], batch, dtype)
        for value, dtype in ((scale, torch.float32), (k, torch.int32), (p, torch.float32), (least, torch.float32))
    ]
    expected = reference.cutoff(logits, *rows, *counts)
    given = [
        row.to(device) if isinstance(value, list) else value
        for row, value in zip(rows, (scale, k, p, least), strict=True)
    ]
    query_lens, num_draft_tokens = (c if c is None else c.to(device) for c in counts)
    options = dict(zip(("inv_temperature", "top_k", "top_p", "min_p"), given, strict=True))
    got = cutoff(
        strided(logits.to(device), layout), **options, query_lens=query_lens, num_draft_tokens=num_draft_tokens
    ).cpu()
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    return got


@pytest.mark.parametrize(("vocab", "dtype"), some(list(itertools.product([1, 7, 1000, 4097], DTYPES)), 1, 5), ids=str)
def test_equals_the_oracle(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = make_logits("normal", (4, 1, vocab), dtype, generator) * 4
    scale = [0.7, 1.0, 2.0]
    check_equal(logits, device, scale=scale, k=[1, 5, 50, 0])
    check_equal(logits, device, scale=scale, p=[0.9, 0.3, 1.0, 0.0])
    check_equal(logits, device, scale=scale, least=[0.02, 0.5, 0.0, 1.0])
    check_equal(logits, device, scale=scale, k=[20, 0, 3, 100], p=[0.8, 0.95, 0.5], least=[0.0, 0.1, 0.01])


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_rows(kind: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in some(DTYPES, AWKWARD.index(kind) % 3, 3):
        logits = make_logits(kind, (2, 1, 40), dtype, generator)
        if kind == "any bits":  # a NaN in every row would hide the rest
            logits = torch.where(logits.isnan(), torch.zeros_like(logits), logits)
        check_equal(logits, device, k=[3, 30])
        check_equal(logits, device, p=[0.5, 0.9])


def test_columns_layouts_and_numbers(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = make_logits("normal", (3, 4, 33), torch.bfloat16, generator)
    counts = torch.tensor([4, 0, 3], dtype=torch.int32), torch.tensor([1, 0, 0], dtype=torch.int32)
    got = check_equal(logits, device, k=2, counts=counts)
    assert torch.isfinite(got).tolist() == [[False, False, True, True], [False] * 4, [False, False, True, False]]
    few = logits[:2, :2].contiguous()
    for layout in ("transposed", "gaps", "offset"):
        check_equal(few, device, k=5, layout=layout)
    assert (check_equal(few, device) == -math.inf).all()


def test_a_real_vocabulary(device: torch.device) -> None:
    logits = make_logits("normal", (1, 1, 128256), torch.bfloat16, torch.Generator().manual_seed(3)) * 3
    bar = check_equal(logits, device, k=50, p=0.9)
    # The last kept logit, with its equals, takes the sum over the goal.
    top = logits[0, 0].float().topk(50).values.double()
    weights = torch.softmax(top, -1)
    assert weights[top >= bar.item()].sum() >= 0.9 > weights[top > bar.item()].sum()


def test_what_is_cut_is_never_chosen(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = make_logits("normal", (8, 1, 100), torch.float32, generator).to(device)
    bars = cutoff(logits, top_k=2)
    zeros = torch.zeros(8, dtype=torch.int64, device=device)
    one = torch.ones(8, dtype=torch.int32, device=device)
    noise = Noise(zeros + torch.arange(8, device=device), zeros, torch.full((8,), 0.01, device=device), bars)
    selected, _ = verify(logits, zeros[:, None], one, one - 1, noise=noise)
    best = logits[:, 0].topk(2).indices
    assert (selected == best).any(-1).all()
    assert (selected[:, 0] != best[:, 0]).any()  # a temperature high enough to draw the second token


def test_bad_arguments_touch_nothing(device: torch.device) -> None:
    logits = torch.zeros(2, 3, 5, device=device)
    n = torch.full((2,), 2, dtype=torch.int32, device=device)
    out = torch.full((2, 3), -9.0, device=device)
    for error, message, changed in (
        (TypeError, "top_k", {"top_k": 1.5}),
        (TypeError, "top_k", {"top_k": torch.zeros(2, device=device)}),
        (ValueError, "top_k", {"top_k": -1}),
        (ValueError, "top_p", {"top_p": 1.5}),
        (ValueError, "min_p", {"min_p": -0.5}),
        (ValueError, "inv_temperature", {"inv_temperature": 0.0}),
        (ValueError, "inv_temperature", {"inv_temperature": torch.ones(3, device=device)}),
        (ValueError, "go together", {"query_lens": n}),
        (TypeError, "logits", {"logits": logits.long()}),
        (ValueError, "must be on", {"min_p": torch.zeros(2, device="meta")}),
    ):
        with pytest.raises(error, match=message):
            cutoff(**({"logits": logits, "out": out} | changed))
        assert (out == -9).all()
    assert cutoff(logits, top_k=1, out=out) is out
    assert (out == 0).all()
