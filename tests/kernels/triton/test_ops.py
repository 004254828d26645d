"""``pipespec_kernels.ops`` with the kernels behind it: on a GPU by itself, in the interpreter by PIPESPEC_OPS=triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import dispatch, ops, reference
from pipespec_kernels.noise import DRAFT, Noise, Streams
from pipespec_kernels.triton import Workspace
from tests.trials import trials

from ..selection import (
    DTYPES,
    KINDS,
    LAYOUTS,
    any_strides,
    drafted_tokens,
    far_apart,
    make_logits,
    ragged_counts,
    strided,
)
from .test_verify import make_noise, on_device


def noise_of(logits: torch.Tensor, filtered: bool, generator: torch.Generator) -> Noise:
    noise = make_noise("cutoff" if filtered else "coupled", logits, generator, DRAFT if filtered else 0)
    assert noise is not None
    return noise


def same(got: Any, expected: Any) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


SHAPES = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 2, 7, 33, 100]))
LOGITS = {
    "shape": SHAPES,
    "dtype": st.sampled_from(DTYPES),
    "layout": st.sampled_from([*LAYOUTS, "expanded", (7, 0), (3, 41), (90, 200)]),
    "seed": st.integers(0, 2**31),
}
EXAMPLES = settings(max_examples=trials(ci=8, nightly=25))
# Fixed examples: the kernels add up in float32 and the oracle in float64, so random ones could fall between the two.
FIXED = settings(EXAMPLES, derandomize=True)


def placed(
    logits: torch.Tensor, layout: str | tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits for the oracle, and the same values in this layout on the device."""
    assert dispatch.kernels(logits.to(device)) is not None
    if isinstance(layout, tuple):
        view = any_strides(logits, layout)
        return view, any_strides(logits.to(device), layout)
    if layout != "expanded":
        return logits, strided(logits.to(device), layout)
    if logits.shape[0] == 0:
        return logits, logits.to(device)
    return logits[:1].expand(logits.shape), logits[:1].to(device).expand(logits.shape)


@EXAMPLES
@given(kind=st.sampled_from(KINDS), filtered=st.booleans(), on_host=st.booleans(), **LOGITS)
def test_argmax_and_sample(shape, dtype, layout, seed, kind, filtered, on_host, device) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, there = placed(make_logits(kind, shape, dtype, generator), layout, device)
    noise = noise_of(logits, filtered, generator)
    got = ops.argmax(there), ops.sample(there, noise if on_host else on_device(noise, device))
    assert {t.device for t in got} == {device}
    same(got, (reference.argmax(logits), reference.sample(logits, noise)))


@EXAMPLES
@given(kind=st.sampled_from(KINDS), sampled=st.booleans(), on_host=st.booleans(), **LOGITS)
def test_verify(shape, dtype, layout, seed, kind, sampled, on_host, device) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, there = placed(make_logits(kind, shape, dtype, generator), layout, device)
    noise = noise_of(logits, True, generator) if sampled else None
    tokens = drafted_tokens(logits, 0.8, generator, torch.int64)
    query_lens, num_draft_tokens = ragged_counts(shape[0], shape[1], generator)
    counts = (
        (query_lens.numpy(), num_draft_tokens.numpy())
        if on_host
        else (query_lens.to(device), num_draft_tokens.to(device))
    )
    got = ops.verify(
        there, tokens.to(device), *counts, noise=noise if on_host or noise is None else on_device(noise, device)
    )
    # The results are where the counts are.
    assert {t.device.type for t in got} == {"cpu" if on_host else device.type}
    same(got, reference.verify(logits, tokens, query_lens, num_draft_tokens, noise))


@FIXED
@given(certain=st.booleans(), filtered=st.booleans(), on_host=st.booleans(), **LOGITS)
def test_rejection_sample(shape, dtype, layout, seed, certain, filtered, on_host, device) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, there = placed(make_logits("normal", shape, dtype, generator), layout, device)
    draft = (logits.float() + torch.randn(shape, generator=generator)).to(DTYPES[seed % 3])
    noise = noise_of(logits, filtered, generator)
    tokens = drafted_tokens(draft, 0.8, generator, torch.int64)
    query_lens, num_draft_tokens = ragged_counts(shape[0], shape[1], generator)
    options = {"streams": Streams(5, 6, 7)}
    if filtered and not certain:
        options |= {"draft_inv_temperature": noise.inv_temperature * 0.75, "draft_cutoff": draft.float().amax(-1) - 3}  # type: ignore[dict-item]
    counts = (
        (query_lens.numpy(), num_draft_tokens.numpy())
        if on_host
        else (query_lens.to(device), num_draft_tokens.to(device))
    )
    got = ops.rejection_sample(
        there,
        tokens.to(device),
        *counts,
        None if certain else draft.to(device),
        noise if on_host else on_device(noise, device),
        **options,  # type: ignore[arg-type]
    )
    assert {t.device.type for t in got} == {"cpu" if on_host else device.type}
    drafts = None if certain else draft
    same(got, reference.rejection_sample(logits, tokens, query_lens, num_draft_tokens, drafts, noise, **options))  # type: ignore[arg-type]


@FIXED
@given(
    kind=st.sampled_from(["normal", "few values", "minus inf", "nans"]),
    top_k=st.sampled_from([0, 1, 5, 10**6]),
    top_p=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    form=st.sampled_from(["numbers", "host", "there"]),
    ragged=st.booleans(),
    **LOGITS,
)
def test_cutoff(shape, dtype, layout, seed, kind, top_k, top_p, min_p, form, ragged, device) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, there = placed(make_logits(kind, shape, dtype, generator), layout, device)
    batch = shape[0]
    n = torch.ones(batch, dtype=torch.float64)
    filters = n.float() * 0.5, n.long() * top_k, n * top_p, n * min_p
    counts = ragged_counts(batch, shape[1], generator) if ragged else (None, None)
    given_: Any = dict(zip(("inv_temperature", "top_k", "top_p", "min_p"), filters, strict=True))
    if form == "there":
        given_ = {name: value.to(device) for name, value in given_.items()}
    elif form == "numbers":
        given_ = {"inv_temperature": 0.5, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    got = ops.cutoff(there, query_lens=counts[0], num_draft_tokens=counts[1], **given_)
    assert got.device == device
    same([got], [reference.cutoff(logits, *filters, *counts)])


def test_rows_further_apart_than_32_bits_count(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("test_verify.py has such logits on a GPU")
    for shape, strides in (((3, 2, 50), (2**30 + 64, 64)), ((1, 3, 50), (64, 2**30 + 64))):
        n, one = torch.full(shape[:1], shape[1], dtype=torch.int32), torch.ones(shape[0])
        logits = far_apart(shape, strides, torch.Generator().manual_seed(7))
        tokens = reference.argmax(logits).long().roll(1, 1)  # right draft tokens: every column is read
        noise = noise_of(logits, True, torch.Generator().manual_seed(8))
        same(ops.verify(logits, tokens, n, n - 1), reference.verify(logits, tokens, n, n - 1))
        same([ops.sample(logits, noise)], [reference.sample(logits, noise)])
        same([ops.cutoff(logits, top_k=3)], [reference.cutoff(logits, one, one.long() * 3, one, one * 0)])
        same(
            ops.rejection_sample(logits, tokens, n, n - 1, logits, noise),
            reference.rejection_sample(logits, tokens, n, n - 1, logits, noise),
        )


def test_counts_on_the_device_are_not_read_by_the_host(device: torch.device) -> None:
    """Bad counts affect only their own row. On the host they are an error."""
    logits = torch.zeros(3, 2, 5, device=device)
    tokens = torch.zeros(3, 2, dtype=torch.int64, device=device)
    query_lens, num_draft_tokens = (
        torch.tensor([2, 3, 0], dtype=torch.int32),
        torch.tensor([1, 1, 8], dtype=torch.int32),
    )
    out = torch.full((3, 2), -9, dtype=torch.int32), torch.full((3,), -9, dtype=torch.int32)
    with pytest.raises(ValueError, match="row 1: need 0 <= num_draft_tokens < query_lens"):
        ops.verify(logits, tokens, query_lens, num_draft_tokens, out=out)
    assert all((t == -9).all() for t in out)
    if device.type != "cpu":
        _, accepted = ops.verify(logits, tokens, query_lens.to(device), num_draft_tokens.to(device))
        assert accepted.tolist() == [1, -1, 0]


def test_float64_goes_to_the_reference(device: torch.device) -> None:
    logits = torch.randn(2, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = ops.argmax(logits.to(device))
    assert got.device == device
    same([got], [reference.argmax(logits)])


def test_a_work_space_of_the_callers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch clears it: it is zero after each verification."""
    generator = torch.Generator().manual_seed(3)
    logits = make_logits("few values", (3, 4, 33), torch.float32, generator)
    query_lens, num_draft_tokens = ragged_counts(3, 4, generator)
    host = logits, drafted_tokens(logits, 0.7, generator, torch.int64), query_lens, num_draft_tokens
    given = tuple(x.to(device) for x in host)
    workspace, small = Workspace(3, 5, device), Workspace(2, 4, device)
    monkeypatch.setattr(Workspace, "__init__", None)
    for _ in range(2):
        same(ops.verify(*given, workspace=workspace), reference.verify(*host))
        assert not workspace.words.any()
    with pytest.raises(ValueError, match="the workspace is for 2 x 4 at most"):
        ops.verify(*given, workspace=small)
