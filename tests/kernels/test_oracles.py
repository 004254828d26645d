"""The references against transformers' modules, torch's functions and published numbers, which share no code with them."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pipespec_kernels import ops, reference

from .cases import EPS, Draw
from .selection import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_oracle_is_transformers(dtype: torch.dtype) -> None:
    """Bit for bit, with the roundings of its modules."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    phi = pytest.importorskip("transformers.models.phi3.modeling_phi3")
    activations = pytest.importorskip("transformers.activations").ACT2FN

    draw = Draw(0, dtype)
    x, residual, weight = (draw.normal(*shape) for shape in [(2, 3, 48), (2, 3, 48), (48,)])
    for module, one_plus in ((llama.LlamaRMSNorm(48, EPS), False), (gemma.Gemma2RMSNorm(48, EPS), True)):
        module.weight = torch.nn.Parameter(weight)
        with torch.no_grad():
            normed, total = reference.add_rms_norm(x, residual, weight, EPS, one_plus)
            assert torch.equal(total, residual + x)
            assert torch.equal(normed, module(total))
    for name, theirs in (("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")):
        assert torch.equal(reference.silu_mul(x, name), activations[theirs](x[..., :24]) * x[..., 24:])

    for rotary in (16, 12):
        case = dict(zip(("q", "keys", "values"), draw.normal(3, 8, 5, 16).split([4, 2, 2], 1), strict=True))
        case |= {name: draw.normal(3, 2, 9, 16) for name in ("k_cache", "v_cache")}
        case |= {name: draw.normal(12, rotary) for name in ("cos", "sin")}
        case |= {"n_new": torch.full((3,), 5), "lengths": torch.tensor([4, 0, 2])}
        at = case["lengths"][:, None] + torch.arange(5)
        q, keys = phi.apply_rotary_pos_emb(case["q"], case["keys"], case["cos"][at], case["sin"][at])
        assert torch.equal(reference.rope_append(**case), q)
        for row, n in enumerate(case["lengths"].tolist()):
            assert torch.equal(case["k_cache"][row, :, n : n + 5], keys[row])
            assert torch.equal(case["v_cache"][row, :, n : n + 5], case["values"][row])


def test_the_oracle_of_products_is_transformers() -> None:
    """A layer of Qwen2 without its attention, one row of one column, in float64: every number as its modules compute it."""
    qwen = pytest.importorskip("transformers.models.qwen2.modeling_qwen2")
    config = qwen.Qwen2Config(hidden_size=48, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer, rotary = qwen.Qwen2DecoderLayer(config, 0).double().eval(), qwen.Qwen2RotaryEmbedding(config)
    hidden = torch.randn(1, 1, 48, dtype=torch.float64)
    cos, sin = (table[0].double() for table in rotary(hidden, torch.arange(9)[None]))
    attn, mlp, storage = layer.self_attn, layer.mlp, torch.zeros(2, 1, 2, 9, 12, dtype=torch.float64)
    with torch.no_grad():
        layer.input_layernorm.weight.normal_()
        normed = layer.input_layernorm(hidden)
        shape = (1, 1, -1, 12)
        q, keys, values = (p(normed).view(shape).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, keys = qwen.apply_rotary_pos_emb(q, keys, cos[None, 5:6], sin[None, 5:6])
        three = [(p.weight, p.bias) for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
        weight, bias = (torch.cat(parts) for parts in zip(*three, strict=True))
        norm: dict = {"norm": layer.input_layernorm.weight, "eps": config.rms_norm_eps}
        got = ops.qkv_append(hidden, weight, bias, cos, sin, *storage, torch.tensor([5]), **norm)
        for ours, theirs in ((got, q), (storage[0, :, :, 5:6], keys), (storage[1, :, :, 5:6], values)):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # transformers' norm is in float32
        x, gate_up = hidden[0], torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        middle = ops.linear_small(x, gate_up, activation="silu")
        torch.testing.assert_close(ops.linear_small(middle, mlp.down_proj.weight, residual=x), x + mlp(x))


def test_the_oracle_is_attention_with_a_causal_mask() -> None:
    """Compares with torch's attention, an independent implementation, in two cases of equal meaning: a whole prompt, and one column."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 16, generator=generator, dtype=torch.float64) for h in (6, 2, 2))
    zeros = torch.zeros(2, dtype=torch.int32)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(reference.verify_attention(q, k, v, zeros), whole)
    last = reference.verify_attention(q[:, :, 8:], k, v, zeros + 8)
    torch.testing.assert_close(last, whole[:, :, 8:])
    at = torch.arange(9)
    near = (at <= at[:, None]) & (at[:, None] - at < 3)
    windowed = F.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)
    torch.testing.assert_close(reference.verify_attention(q, k, v, zeros, window=3), windowed)
    halved = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.125)
    torch.testing.assert_close(reference.verify_attention(q, k, v, zeros, scale=0.125), halved)


# ---- filters and log-probabilities

SETTINGS = list(itertools.product((0, 1, 5, 50, 700), (1.0, 0.9, 0.3, 0.0), (0.0, 0.05, 1.0), (0.6, 1.7)))


def kept_by_huggingface(logits: Tensor, top_k: int, top_p: float, min_p: float, temperature: float) -> Tensor:
    scores = logits.flatten(0, 1).float()
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    for warper in warpers:
        scores = warper(None, scores)
    return (scores > -math.inf).view(logits.shape)


@pytest.mark.parametrize("vocab", [1, 2, 7, 100, 1000, 20000])
def test_keeps_what_huggingface_keeps(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for k, p, min_p, temperature in SETTINGS:
        logits = torch.randn(2, 2, vocab, generator=generator) * 4
        cutoff = ops.cutoff(logits, inv_temperature=1 / temperature, top_k=k, top_p=p, min_p=min_p)
        kept = kept_by_huggingface(logits, k, p, min_p, temperature)
        assert torch.equal(logits >= cutoff[..., None], kept), (k, p, min_p, temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_with_ties_keeps_the_equals_of_the_last(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for k, p, min_p, temperature in SETTINGS:
        logits = (torch.randn(2, 2, 3000, generator=generator) * 4).to(dtype)
        cutoff = ops.cutoff(logits, inv_temperature=1 / temperature, top_k=k, top_p=p, min_p=min_p)[..., None]
        kept = kept_by_huggingface(logits, k, p, min_p, temperature)
        ours = logits >= cutoff
        # HuggingFace's top-p may drop some equals of the last kept logit, which changes the probabilities for min-p. Nothing else may differ.
        assert (ours | ~kept).all(), (k, p, min_p, temperature)
        assert torch.equal(ours & (logits != cutoff), kept & (logits != cutoff)), (k, p, min_p, temperature)


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
