"""Drafts that are made out of a model: a head over some of its tokens, weights in int8. The text is the target's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import LlamaForCausalLM

import pipespec
from pipespec import Pipeline
from pipespec.drivers.workers.weights import share
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward
from pipespec.models.derived import Int8Linear, TrimmedHead, in_int8, with_vocabulary
from pipespec.models.properties import head_size
from pipespec.models.vocabulary import common_tokens, draft_vocabulary
from pipespec.preflight.support import check_shareable
from tests.conftest import VOCABULARY, always_right, left_pad, noisy, random_llama, random_prompts
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
@pytest.mark.parametrize(
    "options",
    [
        {"draft_dtype": "int8", "draft_vocabulary": 200},
        {"draft_dtype": "int8"},
        {"draft_vocabulary": range(100, 300)},
    ],
    ids=["both", "int8", "vocabulary"],
)
def test_the_text_is_the_targets(model, options, kwargs):
    ids, mask = left_pad(random_prompts(3, seed=8))
    wants = {"max_new_tokens": NEW, "pad_token_id": 0, **kwargs}
    wanted = plain(model, ids, mask, **wants)
    with Pipeline(model, noisy(model, 0.02), schedule="lockstep", lookahead=4, **options) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.generate(ids, attention_mask=mask, **wants), wanted)
        stages = pipe.report.stages
    assert all(stage.forward == "native" for stage in stages)
    assert stages[-1].drafted > 0


def test_in_worker_processes(model):
    target = copy.deepcopy(model)
    options = {"draft_dtype": "int8", "draft_vocabulary": 310}
    ids, mask = left_pad(random_prompts(2, seed=6))
    wanted = plain(target, ids, mask, max_new_tokens=NEW, do_sample=False)
    with Pipeline(target, copy.deepcopy(model), schedule="workers", lookahead=3, **options) as pipe:
        with drafts_keep_up(pipe, [len(p) + NEW for p in random_prompts(2, seed=6)]):
            assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False), wanted)
        report = pipe.report
    assert report.stages[0].forward == "native"
    assert report.stages[-1].accepted > 0.2 * report.stages[-1].drafted > 0


# ---- tokens


def test_a_trimmed_head(model):
    ids = [3, 40, 41, 200, VOCABULARY - 1]
    draft = with_vocabulary(model, ids)
    fed = torch.stack(random_prompts(2, seed=1, shortest=9, longest=9))
    whole, trimmed = model(fed, use_cache=False).logits, logits_of(draft, fed)
    rest = [i for i in range(VOCABULARY) if i not in ids]
    assert torch.allclose(trimmed[..., ids], whole[..., ids], atol=1e-4)
    assert trimmed[..., rest].eq(-math.inf).all()
    assert described(draft, RowCache.for_model(draft, 2, 32)) == "native"
    assert head_size(draft) == VOCABULARY
    assert draft.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert isinstance(draft.lm_head, TrimmedHead)
    assert isinstance(model.lm_head, torch.nn.Linear)
    with pytest.raises(ValueError, match="head of a draft is a TrimmedHead"):
        with_vocabulary(draft, [1])


@pytest.mark.parametrize("native", [True, False])
def test_noise_belongs_to_the_targets_tokens(model, native):
    """A draft with the target's weights and all tokens of the text is always right, also when tokens are drawn."""
    prompt = random_prompts(1, seed=3, shortest=6)[0][None]
    wants = {"max_new_tokens": NEW, "do_sample": True, "seed": 9, "temperature": 1.0}
    wanted = plain(model, prompt, torch.ones_like(prompt), **wants)
    ids = sorted(set(wanted[0].tolist()))
    with Pipeline(
        model, always_right(model), schedule="lockstep", lookahead=4, draft_vocabulary=ids, native=native
    ) as pipe:
        assert torch.equal(pipe.generate(prompt, **wants), wanted)
        assert pipe.report.draft_acceptance_rate == 1.0
        assert pipe.report.decisions[0] == f"draft 0: drafts {len(ids)} of {VOCABULARY} tokens"
    without = [i for i in ids if i != int(wanted[0, -3])]
    with Pipeline(
        model, always_right(model), schedule="lockstep", lookahead=4, draft_vocabulary=without, native=native
    ) as pipe:
        assert torch.equal(pipe.generate(prompt, **wants), wanted)
        assert 0 < pipe.report.draft_acceptance_rate < 1.0


def test_a_tied_head_is_trimmed_and_shared_in_a_worker():
    torch.manual_seed(0)
    config = copy.deepcopy(random_llama(0).config)
    config.tie_word_embeddings = True
    target = LlamaForCausalLM(config).eval()
    draft = with_vocabulary(target, range(50))
    assert draft.model.embed_tokens.weight is target.lm_head.weight
    check_shareable([draft, target])
    weights, memory = share(draft)
    other = weights.build(memory)
    fed = torch.arange(12).view(2, 6)
    assert torch.equal(other(fed, use_cache=False).logits, draft(fed, use_cache=False).logits)
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_which_tokens(model, tmp_path):
    target = copy.deepcopy(model)
    assert draft_vocabulary(5, target, target) == [0, 1, 2, 3, 4]
    target.generation_config.eos_token_id = [300, 7]
    assert draft_vocabulary(5, target, target) == [0, 1, 2, 7, 300]
    assert draft_vocabulary([9, 4, 4], target, target) == [4, 7, 9, 300]
    assert draft_vocabulary(torch.tensor([8]), target, target) == [7, 8, 300]
    from tests.pipespec.test_cli import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text").write_text("aaabbc")
    a, b, c = byte_tokenizer()("abc").input_ids
    assert draft_vocabulary(tmp_path / "text", tmp_path, target) == sorted({a, b, c, 7, 300})
    assert draft_vocabulary((4, str(tmp_path / "text")), tmp_path, target) == sorted({a, b, 7, 300})
    assert draft_vocabulary((7, tmp_path / "text"), tmp_path, target) == sorted({0, 1, a, b, c, 7, 300})
    assert common_tokens([[5, 5, 3], [3, 9, 1]], 2) == [3, 5]
    assert pipespec.common_tokens(torch.tensor([5, 3, 5])) == [3, 5]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "vocabulary has 320 tokens, so give a number from 1 to 319"),
        (VOCABULARY, "from 1 to 319"),
        ([], "holds no token"),
        ([VOCABULARY], "ids from 320 to 320"),
        ([-1, 2], "ids from -1 to 2"),
        ([1.5], "must be integers"),
        (1.5, "must be a number of tokens"),
        ((True, "text"), "the number is True"),
        ("nowhere.txt", "nowhere.txt"),
    ],
)
def test_tokens_that_are_refused(model, given, message):
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        Pipeline(model, noisy(model, 0.1), schedule="lockstep", draft_vocabulary=given)


# ---- int8


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


def test_a_dtype_of_drafts_given_as_paths(model, tmp_path):
    for name, some in (("target", model), ("draft", noisy(model, 0.01))):
        some.save_pretrained(tmp_path / name)
    with Pipeline(
        tmp_path / "target", tmp_path / "draft", schedule="lockstep", dtype="float32", draft_dtype="bfloat16"
    ) as pipe:
        assert [m.dtype for m in pipe.models] == [torch.bfloat16, torch.float32]
    with pytest.raises(ValueError, match="'eight' is not a dtype"):
        Pipeline(tmp_path / "target", tmp_path / "draft", schedule="lockstep", draft_dtype="eight")


def test_a_derived_draft_that_no_checkpoint_describes_is_not_saved(model, tmp_path):
    for draft in (in_int8(model), with_vocabulary(model, range(40))):
        for one in (draft, copy.deepcopy(draft)):
            with pytest.raises(
                NotImplementedError, match="save_pretrained: no checkpoint of transformers describes int8"
            ):
                one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"draft_dtype": "int8"}, "draft_dtype is not for .* as its folder has it: leave it out"),
        ({"draft_vocabulary": 40}, "draft_vocabulary is not for .* as its folder has it: leave it out"),
        ({"draft_dtype": torch.float32}, "draft_dtype is not for .*: save such a draft and give its path"),
    ],
)
def test_ranks_load_their_own_models(model, options, instead):
    with pytest.raises(ValueError, match=instead):
        Pipeline(model, noisy(model, 0.02), schedule="ranks", **options)
