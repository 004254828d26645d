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
from tests.conftest import always_right, always_wrong, left_pad, noisy

LIMIT = 32 + WIDTH
NEW = 24
KINDS = ("dynamic", "longrope", "phi3")


@functools.cache
def model_of(kind: str):
    """An untrained model whose RoPE changes much beyond ``LIMIT``. Phi-3's generate() recomputes the text there."""
    common = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    scaled = {"short_factor": [1.0] * 8, "long_factor": [3.0 + i for i in range(8)]}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, **scaled}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    torch.manual_seed(0)
    if kind == "phi3":
        model = Phi3ForCausalLM(
            Phi3Config(
                **common,
                max_position_embeddings=4 * LIMIT,
                original_max_position_embeddings=LIMIT,
                rope_parameters=longrope,
            )
        )
    else:
        at = LIMIT if kind == "dynamic" else 4 * LIMIT
        rope = dynamic if kind == "dynamic" else longrope
        model = LlamaForCausalLM(LlamaConfig(**common, max_position_embeddings=at, rope_parameters=rope))
    model.eval().generation_config.eos_token_id = None
    return model


def prompt_of(length, seed=0):
    return torch.randint(8, 320, (1, length), generator=torch.Generator().manual_seed(100 * seed + length))


def wanted_of(model, ids, **options):
    return copy.deepcopy(model).generate(ids, **({"max_new_tokens": NEW, "do_sample": False} | options))


@functools.cache
def text_of(kind, length):
    return wanted_of(model_of(kind), prompt_of(length))


def check(pipe, kind, length):
    got = pipe.generate(prompt_of(length), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, text_of(kind, length)), length


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
@pytest.mark.parametrize("kind", KINDS)
def test_up_to_the_change(kind, schedule):
    target = model_of(kind)
    drafts = [always_wrong(target), noisy(target, 0.05)]
    with Pipeline(target, drafts, schedule=schedule) as pipe:
        for length in (5, 32 - NEW):
            check(pipe, kind, length)


def test_a_batch_up_to_the_change():
    target = model_of("dynamic")
    generator = torch.Generator().manual_seed(0)
    ids, mask = left_pad([torch.randint(8, 320, (n,), generator=generator) for n in (8, 2, 5)])
    pipe = Pipeline(target, noisy(target, 0.05), schedule="lockstep")
    got = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, wanted_of(target, ids, attention_mask=mask))


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
            assert torch.equal(got, text_of("dynamic", length))
            assert (pipe.report is not None) == (length != LIMIT + 20)
