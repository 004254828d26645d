"""Dynamic RoPE: up to the length at which it changes, the text is that of generate(); calls that may go beyond are refused, or left to transformers."""

import copy
import functools
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from pipespec import Pipeline, attach
from pipespec.config import WIDTH
from pipespec.engine.native import native_form
from pipespec.schedules.base import SpeedWarning
from pipespec_spd import SpeculativePipeline
from tests.conftest import always_right, always_wrong, left_pad, noisy, random_llama
from tests.support.texts import own_text, same_text

LIMIT = 32 + WIDTH
NEW = 24
KINDS = ("dynamic", "longrope", "phi3")


@functools.cache
def model_of(kind: str):
    """An untrained model whose RoPE changes much beyond ``LIMIT``. Phi-3's generate() recomputes the text there."""
    sizes = random_llama(0).config.to_dict() | {"initializer_range": 0.3}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT}
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [3.0 + i for i in range(8)]}
    sizes["rope_parameters"] = (
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0} if kind == "dynamic" else longrope
    )
    sizes["max_position_embeddings"] = LIMIT if kind == "dynamic" else 4 * LIMIT
    torch.manual_seed(0)
    if kind == "phi3":
        model = Phi3ForCausalLM(
            Phi3Config(
                **{n: v for n, v in sizes.items() if n not in ("model_type", "head_dim", "architectures")}
                | {"original_max_position_embeddings": LIMIT}
            )
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.eval().generation_config.eos_token_id = None
    return model


def prompt_of(length, seed=0):
    return torch.randint(8, 320, (1, length), generator=torch.Generator().manual_seed(100 * seed + length))


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
@pytest.mark.parametrize("kind", KINDS)
def test_up_to_the_change(kind, schedule):
    target = model_of(kind)
    drafts = [always_wrong(target), noisy(target, 0.05)]
    with Pipeline(target, drafts, schedule=schedule) as pipe:
        for lengths in ([5], [32 - NEW], [32 - NEW, 2, 5]):
            ids, mask = left_pad([prompt_of(length)[0] for length in lengths])
            same_text(pipe, ids, attention_mask=mask, max_new_tokens=NEW)
        assert pipe.report.stages[-1].forward == "native"


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_change(kind):
    """Also by one token: the padding of the last step may need the rest."""
    target = model_of(kind)
    pipes = [Pipeline(target, always_right(target), schedule="lockstep"), SpeculativePipeline(target, stages=2)]
    for pipe in pipes:
        for length in (33 - NEW, LIMIT + 20):
            with pytest.raises(
                NotImplementedError,
                match=rf"max_new_tokens: .*beyond 32 tokens.*\({kind if kind != 'phi3' else 'longrope'}\)",
            ):
                pipe.generate(prompt_of(length), max_new_tokens=NEW, do_sample=False)


def test_an_attached_model_leaves_longer_texts_to_transformers():
    """They have no effect on the next text of the pipeline."""
    target = copy.deepcopy(model_of("dynamic"))
    with attach(target, always_right(target), schedule="lockstep") as pipe:
        for length in (LIMIT + 20, 8, LIMIT, 5):
            ids = prompt_of(length)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SpeedWarning)
                got = target.generate(ids, max_new_tokens=NEW, do_sample=False)
            # A model whose RoPE no longer text has changed.
            assert torch.equal(got, own_text(copy.deepcopy(model_of("dynamic")), ids, max_new_tokens=NEW))
            assert (pipe.report is not None) == (length != LIMIT + 20)


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_form_rotates_as_a_forward_does(kind):
    """Below the change the table is one, whatever forwards came between; beyond it, as a draft may be, it is that of the forward's longest position."""
    model, like = copy.deepcopy(model_of(kind)), torch.empty(0)
    with torch.inference_mode():
        form = native_form(model)
        for length in (5, LIMIT, LIMIT + 9, LIMIT, LIMIT + 30, 8):
            fresh = copy.deepcopy(model_of(kind)).model.rotary_emb
            cos, sin = fresh(like, position_ids=torch.arange(length)[None])
            table = form._rope(4 * LIMIT, length)
            assert torch.equal(table[0][0, :length], cos[0])
            assert torch.equal(table[1][0, :length], sin[0])
            # A long text of transformers.
            model(input_ids=prompt_of(LIMIT + 3))
            assert form.is_current()


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_beyond_its_change(kind):
    """The target's RoPE does not change there. Draft tokens may be anything."""
    target, draft = random_llama(0), model_of(kind)
    with Pipeline(target, draft, schedule="lockstep", lookahead=3) as pipe:
        same_text(pipe, prompt_of(LIMIT - 8), max_new_tokens=NEW)
        assert pipe.report.stages[0].forward == "native"


def test_frequencies_that_a_user_changes_count():
    model = copy.deepcopy(model_of("dynamic"))
    pipe = Pipeline(model, schedule="plain")
    before = pipe.generate(prompt_of(7), max_new_tokens=12, do_sample=False)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.25
    wanted = model.generate(prompt_of(7), max_new_tokens=12, do_sample=False)
    assert not torch.equal(before, wanted)
    assert torch.equal(pipe.generate(prompt_of(7), max_new_tokens=12, do_sample=False), wanted)
