"""Experts, gated delta nets and gated attention in the native decoder: what transformers' modules compute, with the same bits at every width."""

from __future__ import annotations

import pytest
import torch
import transformers

from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.engine.native import native_form
from pipespec.models import families
from tests.kernels.implementations import VARIANTS, simd
from tests.pipespec.tiny_models import TINY_MODELS, VOCABULARY, make, model_of

IS_5_0 = transformers.__version__.startswith("5.0.")
OTHER_IN_5_0 = ("phimoe, window", "granitemoe", "dots1, mixed") if IS_5_0 else ()
"""Models whose modules are others in transformers 5.0, so that they have no native form there."""

RECURRENT = [name for name in TINY_MODELS if "recurrent" in name]
NAMES = RECURRENT + [
    name
    for name, (kind, _) in TINY_MODELS.items()
    if name not in (*RECURRENT, *OTHER_IN_5_0)
    and families.FAMILIES[kind].routing is not None
    and families.FAMILIES[kind].prefix
]
WIDTHS = (1, 1, 3, 16, 1, 18)


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(5))


def read(form, model, ids: torch.Tensor, widths) -> torch.Tensor:
    """Logits of all columns, fed in parts."""
    cache = RowCache.for_model(model, len(ids), ids.shape[1])
    return torch.cat([form(part, cache, part.shape[1]) for part in ids.split(list(widths), 1)], 1)


def column_by_column(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits by the model's own modules: those of a recurrent layer round otherwise where they read several columns at once."""
    cache = RowCache.for_model(model, len(ids), ids.shape[1])
    return torch.cat([forward(model, part, cache, keep=1, native=False) for part in ids.split(1, 1)], 1)


def check(model, ids: torch.Tensor, widths=WIDTHS) -> None:
    with torch.inference_mode():
        form = native_form(model)
        whole = read(form, model, ids, [ids.shape[1]])
        if model.dtype == torch.float32:
            own = column_by_column(model, ids)
            error, largest = (whole - own).abs(), own.abs().amax()
            # A recurrent state remembers what was rounded.
            assert error.mean() <= 1e-5 * largest
            assert error.amax() <= (1e-4 if ids.shape[1] < 100 else 1e-3) * largest
        assert torch.equal(whole, read(form, model, ids, widths))
        # One row of the batch, alone.
        assert torch.equal(whole[1:], read(form, model, ids[1:], widths))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_modules(name, variant):
    with simd(variant):
        check(model_of(name), tokens(3, sum(WIDTHS)))


@pytest.mark.parametrize("name", [*RECURRENT, "mixtral, window", "gpt_oss, mixed, sinks"])
def test_bits_in_bfloat16(name):
    """The inputs of a convolution are kept in the model's dtype, and so they are read."""
    if name in TINY_MODELS:
        check(make(name).bfloat16(), tokens(2, sum(WIDTHS)))


@pytest.mark.parametrize("name", [*RECURRENT[:1], "mixtral, window"])
def test_long_texts_are_read_in_pieces(name):
    """The states at the end of a piece are kept, though no column of it asks for them."""
    if name in TINY_MODELS:
        model, ids = make(name, max_position_embeddings=1024), tokens(2, 640)
        check(model, ids, widths=(600, 1, 39))


@pytest.mark.skipif(IS_5_0, reason="dots1 has other modules in transformers 5.0")
@pytest.mark.parametrize("options", [
    {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.7},
    {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 0.6},
])  # fmt: skip
def test_groups_and_a_bias_of_the_choice(options):
    name = "dots1, mixed"
    model = make(name, n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=0, **options)
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(8, generator=generator))
    check(model, tokens(3, sum(WIDTHS)))
