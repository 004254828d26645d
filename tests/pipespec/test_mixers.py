"""Experts, gated delta nets and gated attention in the native decoder: what transformers' modules compute, with the same bits at every width."""

import random
from typing import Any

import pytest
import torch
import transformers

from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.engine.native import native_form
from pipespec.models import families
from pipespec.models.compat import caches_latents
from pipespec.models.families import NotReadable
from pipespec.models.quantized import QuantizedLinear
from pipespec.models.quantizing import quantized
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
LATENT = [name for name in TINY_MODELS if "latents" in name and caches_latents(TINY_MODELS[name][0])]
NAMES = [*NAMES, "minicpm3, latents"] if "minicpm3, latents" in LATENT else [n for n in NAMES if "latents" not in n]
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


def latent_options(seed: int) -> tuple[str, dict[str, Any]]:
    """A model with latents, and what its configuration has of its own: sizes that fill no vector, with and without latents of queries, groups of experts, YaRN."""
    draw = random.Random(seed)
    name = LATENT[seed % len(LATENT)]
    heads = draw.choice([1, 2, 4, 8])
    options: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": draw.choice([1, 5, 12, 16, 33, 64]),
        "q_lora_rank": draw.choice([None, 3, 16, 40]),
        "qk_nope_head_dim": draw.choice([1, 8, 13, 16, 24]),
        "qk_rope_head_dim": draw.choice([2, 6, 8, 16]),
        "v_head_dim": draw.choice([1, 8, 12, 17, 32]),
        "attention_bias": draw.random() < 0.3,
        "num_hidden_layers": draw.choice([1, 2, 3]),
    }
    if draw.random() < 0.5:
        options["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": draw.choice([1e3, 1e4]),
            "factor": draw.choice([2.0, 8.0]),
            "original_max_position_embeddings": 16,
            "mscale": draw.choice([0.7, 1.0]),
            "mscale_all_dim": draw.choice([0.7, 1.0]),
        }
    if "deepseek" in name:
        groups = draw.choice([1, 2, 4])
        chosen = draw.randint(1, groups)
        options |= {
            "n_routed_experts": 8,
            "n_group": groups,
            "topk_group": chosen,
            "num_experts_per_tok": draw.randint(1, chosen * 8 // groups),
            "n_shared_experts": draw.choice([1, 2]),
            "first_k_dense_replace": draw.choice([0, 1]),
            "norm_topk_prob": draw.random() < 0.5,
            "routed_scaling_factor": draw.choice([1.0, 2.5]),
        }
    if "v2" in name:
        options["topk_method"] = draw.choice(["greedy", "group_limited_greedy"])
        # Transformers' modules read pairs of numbers.
        options |= {key: options[key] // 2 * 2 + 2 for key in ("kv_lora_rank", "qk_nope_head_dim")}
    if "v3" in name:
        options["rope_interleave"] = draw.random() < 0.5
    return name, options


@pytest.mark.skipif(not LATENT, reason="this version of transformers keeps keys and values of latents")
@pytest.mark.parametrize("seed", range(36))
def test_latents_of_random_sizes(seed):
    name, options = latent_options(seed)
    model = make(name, seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    check(model, tokens(2, sum(WIDTHS)))


@pytest.mark.parametrize("name", LATENT)
def test_latents_in_bfloat16_and_of_long_texts(name):
    model = make(name, max_position_embeddings=1024)
    check(model, tokens(2, 640), widths=(600, 1, 39))
    check(model.bfloat16(), tokens(2, sum(WIDTHS)))


@pytest.mark.parametrize("name", LATENT)
def test_latents_of_a_model_in_blocks(name):
    """What makes keys and values of them stays floats, as the native form takes it apart."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
    model = quantized(make(name, **sizes), "q8_0")
    assert type(model.model.layers[0].self_attn.kv_b_proj) is torch.nn.Linear
    assert isinstance(model.model.layers[0].self_attn.kv_a_proj_with_mqa, QuantizedLinear)
    ids = tokens(2, sum(WIDTHS))
    with torch.inference_mode():
        form = native_form(model)
        assert torch.equal(read(form, model, ids, [ids.shape[1]]), read(form, model, ids, WIDTHS))


@pytest.mark.skipif(not LATENT, reason="this version of transformers keeps keys and values of latents")
def test_latents_that_a_cache_keeps_apart_are_refused():
    """The rotated parts of keys lie behind their latents."""
    with torch.inference_mode():
        form = native_form(model_of(LATENT[0]))
        (keys,), (values,), lengths = RowCache.for_model(model_of(LATENT[0]), 1, 8).open_storage(1)
        hidden, rope = torch.zeros(1, 1, form.decoder.shape.hidden), form._rope(8, 8)
        form.decoder.run_layers(hidden, keys, values, lengths, *rope)
        with pytest.raises(ValueError, match="must lie right behind their latents"):
            form.decoder.run_layers(hidden, keys.clone(), values.clone(), lengths, *rope)


@pytest.mark.skipif(not LATENT, reason="this version of transformers keeps keys and values of latents")
def test_older_versions_that_keep_keys_and_values_have_no_native_form(monkeypatch):
    monkeypatch.setattr("pipespec.models.compat.caches_latents", lambda model_type: False)
    with pytest.raises(NotReadable, match="keeps the keys and values of its latents; install a newer one"):
        native_form(make(LATENT[0]))
