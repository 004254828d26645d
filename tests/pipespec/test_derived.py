"""Drafts in int8, made out of a model. The text is the target's."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from pipespec import Pipeline
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward
from pipespec.models.derived import Int8Linear, in_int8
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.waiting import drafts_keep_up

NEW = 24
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.8, "top_k": 20}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama(3, layers=4)


def plain(target, ids, mask, **kwargs):
    """The text of the target alone: transformers' for greedy decoding, and the pipeline's of the seed."""
    if kwargs.get("do_sample"):
        return Pipeline(target, schedule="plain").generate(ids, attention_mask=mask, **kwargs)
    return target.generate(ids, attention_mask=mask, **kwargs)


def logits_of(model, ids, **kwargs) -> torch.Tensor:
    with torch.inference_mode():
        cache = RowCache.for_model(model, len(ids), 64)
        return forward(model, ids, cache, keep=ids.shape[1], **kwargs).clone()


@pytest.mark.parametrize("kwargs", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_targets(model, kwargs):
    ids, mask = left_pad(random_prompts(3, seed=8))
    wants = {"max_new_tokens": NEW, "pad_token_id": 0, **kwargs}
    wanted = plain(model, ids, mask, **wants)
    with Pipeline(model, noisy(model, 0.02), schedule="lockstep", lookahead=4, weights={"drafts": "int8"}) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.generate(ids, attention_mask=mask, **wants), wanted)
        stages = pipe.report.stages
    assert all(stage.forward == "native" for stage in stages)
    assert stages[-1].drafted > 0


def test_in_worker_processes(model):
    target = copy.deepcopy(model)
    ids, mask = left_pad(random_prompts(2, seed=6))
    wanted = plain(target, ids, mask, max_new_tokens=NEW, do_sample=False)
    with Pipeline(target, copy.deepcopy(model), schedule="workers", lookahead=3, weights={"drafts": "int8"}) as pipe:
        with drafts_keep_up(pipe, [len(p) + NEW for p in random_prompts(2, seed=6)]):
            assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False), wanted)
        report = pipe.report
    assert report.stages[0].forward == "native"
    assert report.stages[-1].accepted > 0.2 * report.stages[-1].drafted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(model, dtype):
    target = copy.deepcopy(model).to(dtype)
    draft = in_int8(target)
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
        in_int8(draft)


def test_a_derived_draft_that_no_checkpoint_describes_is_not_saved(model, tmp_path):
    draft = in_int8(model)
    for one in (draft, copy.deepcopy(draft)):
        with pytest.raises(NotImplementedError, match="save_pretrained: no checkpoint of transformers describes int8"):
            one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)


def test_ranks_load_their_own_models(model):
    with pytest.raises(ValueError, match=r"weights is not for .* as its folder or GGUF file has it: leave it out"):
        Pipeline(model, noisy(model, 0.02), schedule="ranks", weights={"drafts": "int8"})
