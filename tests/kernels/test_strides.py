"""Every operation on the CPU gives the same result for any strides in the first two dimensions as for a contiguous copy."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import Noise
from tests.trials import trials

from .selection import DTYPES, KINDS, any_strides, far_apart, make_logits, ragged_counts, simd, simd_variants

PAIR = st.tuples(st.integers(0, 80), st.integers(0, 80))


@settings(max_examples=trials(ci=50, nightly=200))
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([1, 2, 7, 31, 64, 70])),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    kind=st.sampled_from(KINDS[:-1]),
    of_logits=PAIR,
    of_draft=PAIR,
    of_tokens=PAIR,
    of_cutoff=PAIR,
    variant=st.sampled_from(simd_variants()),
    seed=st.integers(0, 2**31),
)
def test_any_strides(shape, dtype, kind, of_logits, of_draft, of_tokens, of_cutoff, variant, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, width, vocab = shape
    logits = any_strides(make_logits(kind, shape, torch.float32, generator).to(dtype), of_logits)
    draft = any_strides(torch.randn(shape, generator=generator), of_draft)
    tokens = any_strides(torch.randint(0, vocab, (batch, width), generator=generator), of_tokens, False)
    bars = any_strides(torch.randn((batch, width), generator=generator) - 1, of_cutoff, False)
    query_lens, num_draft_tokens = ragged_counts(batch, width, generator)
    pairs = torch.stack([query_lens, num_draft_tokens], 1)  # the counts as columns
    seeds, positions = torch.randint(0, 2**40, (batch, 2), generator=generator).unbind(1)
    scales = torch.rand((), generator=generator).add(0.5).expand(batch)

    def call(plain: bool) -> list[torch.Tensor]:
        def place(x: torch.Tensor) -> torch.Tensor:
            return x.clone(memory_format=torch.contiguous_format) if plain else x

        x, fed, draft_tokens = place(logits), place(pairs[:, 0]), place(pairs[:, 1])
        noise = Noise(place(seeds), place(positions), place(scales), place(bars))
        return [
            ops.argmax(x),
            ops.sample(x, noise),
            *ops.verify(x, place(tokens), fed, draft_tokens),
            *ops.verify(x, place(tokens), fed, draft_tokens, noise=noise),
            *ops.rejection_sample(x, place(tokens), fed, draft_tokens, place(draft), noise, draft_cutoff=place(bars)),
            ops.cutoff(
                x, inv_temperature=place(scales), top_k=3, top_p=0.8, query_lens=fed, num_draft_tokens=draft_tokens
            ),
        ]

    with simd(variant):
        for got, expected in zip(call(False), call(True), strict=True):
            assert torch.equal(got, expected)


def test_rows_further_apart_than_32_bits_count() -> None:
    """The stride fits 32 bits, and its product with the row index does not."""
    for strides in ((2**30 + 64, 64), (64, 2**30 + 64)):
        logits = far_apart((3, 3, 50), strides, torch.Generator().manual_seed(7))
        tokens, n = torch.full((3, 3), 3), torch.full((3,), 3, dtype=torch.int32)
        noise = Noise(torch.tensor([1, 2, 3]), torch.tensor([3, 4, 5]), torch.ones(3))
        for got, expected in zip(
            (ops.argmax(logits), ops.sample(logits, noise), *ops.verify(logits, tokens, n, n - 1, noise=noise)),
            (
                reference.argmax(logits),
                reference.sample(logits, noise),
                *reference.verify(logits, tokens, n, n - 1, noise),
            ),
            strict=True,
        ):
            assert torch.equal(got, expected)
        one = torch.ones(3)
        expected = reference.cutoff(logits, one, n.long(), one, one * 0)
        assert torch.equal(ops.cutoff(logits, top_k=3), expected)
