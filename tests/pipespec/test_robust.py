"""What users do to a pipeline between and during calls, and what models and processors may do to it."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch

from pipespec import Pipeline, generation
from pipespec import stage as stages
from pipespec.drivers.base import StageFailure
from tests.conftest import always_right, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Faulty

PROMPT = random_prompts(1, seed=5, shortest=6)[0][None]


@pytest.fixture
def model():
    return random_llama(3)


@pytest.fixture
def chain(model):
    return Pipeline(model, noisy(model, 0.02))


def greedy(model, ids=PROMPT, new: int = 20, **kwargs) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


# ---- memory


def test_nothing_of_a_call_waits_for_the_garbage_collector(chain, monkeypatch):
    made = []
    real = generation.Generation.__init__

    def watched(self, *args, **kwargs):
        made.append(weakref.ref(self))
        real(self, *args, **kwargs)

    monkeypatch.setattr(generation.Generation, "__init__", watched)
    gc.collect()
    gc.disable()
    try:
        chain.generate(PROMPT, max_new_tokens=5)
        chain.generate(PROMPT, max_new_tokens=5, return_dict_in_generate=True, output_logits=True)
        assert [ref() for ref in made] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_grows_with_the_text(model, chain, monkeypatch, rows):
    """Not with the limit, which is often the model's."""
    monkeypatch.setattr(stages, "FIRST_ROOM", 5)
    ids, mask = left_pad(random_prompts(rows, seed=8, shortest=4))
    got = chain.generate(ids, attention_mask=mask, max_new_tokens=300)
    assert torch.equal(got, greedy(model, ids, 300, attention_mask=mask))
    short = chain.generate(ids, attention_mask=mask, max_new_tokens=400, max_time=0.0)
    assert short.shape[1] == ids.shape[1] + 1
    chain.generate(ids[:, -4:].repeat(5, 1), max_new_tokens=400, max_time=0.0)
    assert chain._driver.target._cache.capacity < 100


# ---- models that change


def test_models_that_are_cast_between_calls(model, chain):
    wanted = chain.generate(PROMPT, max_new_tokens=9)
    model.to(torch.bfloat16)
    assert chain.generate(PROMPT, max_new_tokens=9).shape == wanted.shape
    model.to(torch.float32)
    chain.models[0].to(torch.float64)
    chain.generate(PROMPT, max_new_tokens=9)
    chain.models[0].half()
    with pytest.raises(ValueError, match="draft 0 is float16 on the CPU"):
        chain.generate(PROMPT, max_new_tokens=9)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("call", [1, 3], ids=["prefill", "step"])
def test_a_draft_that_fails_in_lockstep(model, stage, call):
    drafts = [Faulty.like(noisy(model, 0.02, seed=i)) for i in range(2)]
    pipeline = Pipeline(model, drafts)
    drafts[stage].set(fail_at=call)
    with pytest.warns(StageFailure, match=rf"draft stage {stage} failed \(ArithmeticError: made to fail\)") as caught:
        got = pipeline.generate(PROMPT, max_new_tokens=20)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(got, greedy(model))
    drafts[stage].set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(pipeline.generate(PROMPT, max_new_tokens=20), greedy(model))
    assert pipeline.report.stages[-1].accepted > 0


# ---- scores that allow no choice


def nothing(ids, scores):
    return torch.full_like(scores, -torch.inf)


def not_a_number(ids, scores):
    return torch.full_like(scores, torch.nan)


@pytest.mark.parametrize("processor", [nothing, not_a_number])
def test_nothing_to_draw(chain, processor):
    """An error, as in transformers; a forbidden token would be silent."""
    with pytest.raises(ValueError, match=rf"no token can be drawn at position {PROMPT.shape[1]} of row 0"):
        chain.generate(PROMPT, max_new_tokens=5, do_sample=True, logits_processor=[processor])
    assert torch.equal(chain.partial, PROMPT)
    assert chain.generate(PROMPT, max_new_tokens=5, do_sample=True).shape[1] == PROMPT.shape[1] + 5


@pytest.mark.parametrize("top_k", [0, 50])
def test_a_model_that_has_overflown(model, chain, top_k):
    weight = model.lm_head.weight.data.clone()
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(ValueError, match="no token can be drawn"):
        chain.generate(PROMPT, max_new_tokens=5, do_sample=True, top_k=top_k)
    model.lm_head.weight.data.copy_(weight)
    # A draft's odd logits are only bad hints.
    chain.models[0].lm_head.weight.data[5] = torch.nan
    alone = Pipeline(model).generate(PROMPT, max_new_tokens=9, do_sample=True, top_k=top_k, seed=3)
    assert torch.equal(chain.generate(PROMPT, max_new_tokens=9, do_sample=True, top_k=top_k, seed=3), alone)


# ---- torch's own switches


def test_a_processor_may_use_gradients(model, chain):
    def steered(ids, scores):
        with torch.enable_grad():
            x = scores.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((x * x).sum(), x)
        return scores + 0.01 * gradient

    assert torch.equal(
        chain.generate(PROMPT, max_new_tokens=9, logits_processor=[steered]),
        greedy(model, new=9, logits_processor=[steered]),
    )


@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True, "seed": 1}, {"no_repeat_ngram_size": 2}], ids=str)
def test_another_default_device(chain, kwargs):
    wanted = chain.generate(PROMPT, max_new_tokens=9, **kwargs)
    torch.set_default_device("meta")
    try:
        got = chain.generate(PROMPT, max_new_tokens=9, **kwargs)
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, wanted)


def test_entries_of_a_configuration_that_nobody_reads(model, chain):
    model.generation_config.chat_format = "chatml"
    assert torch.equal(chain.generate(PROMPT, max_new_tokens=9), greedy(model, new=9))


@pytest.mark.parametrize(("seed", "error"), [("abc", TypeError), (2**64, ValueError), (-(2**63) - 1, ValueError)])
@pytest.mark.parametrize("sample", [True, False])
def test_seeds_that_are_none(chain, seed, error, sample):
    with pytest.raises(error, match="seed"):
        chain.generate(PROMPT, max_new_tokens=2, do_sample=sample, seed=seed)


def test_the_partial_text_comes_with_the_error(model):
    pipeline = Pipeline(model, always_right(model), windows=3)

    def fails(ids, scores):
        if ids.shape[1] == PROMPT.shape[1] + 9:
            raise LookupError("no")
        return scores

    with pytest.raises(LookupError, match="no") as caught:
        pipeline.generate(PROMPT, max_new_tokens=20, logits_processor=[fails])
    assert torch.equal(caught.value.partial, pipeline.partial)
    text = greedy(model)
    assert PROMPT.shape[1] < pipeline.partial.shape[1] <= PROMPT.shape[1] + 9
    assert torch.equal(pipeline.partial, text[:, : pipeline.partial.shape[1]])
