"""The thresholds of top-k, top-p and min-p against the oracle, which sorts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pipespec_kernels import reference
from pipespec_kernels.triton import cutoff

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


def zipf(vocab: int, exponent: float, dtype: torch.dtype, order: str, seed: int = 0) -> torch.Tensor:
    """A row like a language model's: probabilities fall as a power of the rank. ``order``: of the ids, random or by probability."""
    generator = torch.Generator().manual_seed(seed)
    x = 12 - exponent * torch.arange(1, vocab + 1).log() + 0.3 * torch.randn(vocab, generator=generator)
    x = x[torch.randperm(vocab, generator=generator)] if order == "random" else x.sort(descending=True).values
    return x.to(dtype)[None, None]


FILTERS = [{"k": 50}, {"p": 0.9}, {"k": 50, "p": 0.9}, {"p": 0.8, "least": 0.01}, {"least": 0.02}, {"p": 0.0}]


ROWS = list(
    itertools.product([1, 7, 1000, 4097, 32001], zip((1.2, 2.0, 4.0), DTYPES, strict=True), ["random", "sorted"])
)


@pytest.mark.parametrize(("vocab", "row", "order"), some(ROWS, 1, 4), ids=str)
def test_rows_of_language_models(vocab: int, row: tuple[float, torch.dtype], order: str, device: torch.device) -> None:
    """Sorted, the kept logits lie in the same groups, whose largest tells little of the others."""
    logits = zipf(vocab, *row, order)
    for filters in FILTERS:
        check_equal(logits, device, scale=[0.8], **filters)


@pytest.mark.parametrize("kind", ["random", "sorted", "flat", "two values", "a NaN", "minus inf", "infinite"])
def test_real_vocabularies(kind: str, device: torch.device) -> None:
    vocab = 128256
    logits = zipf(vocab, 2.0, torch.bfloat16, kind if kind == "sorted" else "random", seed=1)
    if kind == "flat":
        logits.fill_(1.5)
    elif kind == "two values":
        logits = (logits > logits.median()).bfloat16()
    elif kind == "a NaN":
        logits[..., -1] = math.nan
    elif kind == "minus inf":
        logits[..., : vocab - 20] = -math.inf
    elif kind == "infinite":
        logits[..., [5, 100_000]] = math.inf
    for filters in FILTERS[2:4]:
        check_equal(logits, device, scale=[0.8], **filters)


def passes(monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, **filters: float) -> float:
    """How often a call reads each logit, on average."""
    from triton.runtime.interpreter import InterpreterBuilder

    begin = logits.data_ptr()
    end = begin + logits.numel() * logits.element_size()
    load, read = InterpreterBuilder.create_masked_load, []

    def counted(builder, pointers, mask, *rest):
        at = pointers.data
        read.append(int(((at >= begin) & (at < end) & mask.data).sum()))
        return load(builder, pointers, mask, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(InterpreterBuilder, "create_masked_load", counted)
        cutoff(logits, **filters)
    return sum(read) / logits.numel()


def test_rows_are_read_once(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The search reads few groups of a language model's row. In a flat row it ends early."""
    if device.type != "cpu":
        pytest.skip("the interpreter counts")
    k, p, both = {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
    for dtype, most in ((torch.bfloat16, 1.3), (torch.float32, 1.7)):
        logits = zipf(128256, 2.0, dtype, "random")
        for filters in (k, p, both, {"min_p": 0.02}):
            assert 1 <= passes(monkeypatch, logits, **filters) < most, (dtype, filters)
    flat = torch.zeros(1, 1, 128256, dtype=torch.bfloat16)
    assert passes(monkeypatch, flat, **k) == 1
    assert passes(monkeypatch, flat, **p) == 2
    normal = torch.randn(1, 1, 128256, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    assert passes(monkeypatch, normal, **p) <= 10
