"""Dynamic RoPE: up to the length at which it changes, the text is that of generate(); calls that may go beyond are refused, or left to transformers."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from pipespec import Pipeline, attach
from pipespec.config import WIDTH
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
