"""Drafts in int8, made out of a model. Texts: ``tests/same_text``."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward
from pipespec.models.quantized import Int8Linear
from pipespec.models.quantizing import quantized
from tests.conftest import random_llama, random_prompts


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama(3, layers=4)


def logits_of(model, ids, **kwargs) -> torch.Tensor:
    with torch.inference_mode():
        cache = RowCache.for_model(model, len(ids), 64)
        return forward(model, ids, cache, keep=ids.shape[1], **kwargs).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(model, dtype):
    target = copy.deepcopy(model).to(dtype)
    draft = quantized(target, "int8")
    linears = [module for module in draft.modules() if isinstance(module, Int8Linear)]
    assert len(linears) == 4 * 7 + 1
    assert all(module.weight.dtype == torch.int8 for module in linears)
    original = target.model.layers[0].mlp.up_proj.weight.float()
    copied = draft.model.layers[0].mlp.up_proj
    error = (copied.weight * copied.scale[:, None] - original).abs()
    assert (error <= 0.51 * original.abs().amax(1, keepdim=True) / 127).all()
    fed = torch.stack(random_prompts(2, seed=1, shortest=9, longest=9))
    own = draft(fed, use_cache=False).logits.float()
    assert torch.allclose(logits_of(draft, fed).float(), own, atol=1e-4 if dtype == torch.float32 else 0.5)
    assert described(draft, RowCache.for_model(draft, 2, 32)) == "native"
    assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
    with pytest.raises(ValueError, match="quantised already"):
        quantized(draft, "int8")


def test_a_derived_draft_that_no_checkpoint_describes_is_not_saved(model, tmp_path):
    draft = quantized(model, "int8")
    for one in (draft, copy.deepcopy(draft)):
        with pytest.raises(NotImplementedError, match="save_pretrained: no checkpoint of transformers describes int8"):
            one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)
