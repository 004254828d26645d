"""Inputs next to the prompt and outputs next to the text: caches, configurations, outputs, custom_generate."""

import copy
import io
import logging
from contextlib import ExitStack
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

import pipespec.api.prepare
from pipespec import Pipeline
from pipespec.engine.attention import MaskKind
from pipespec.schedules.base import SpeedWarning
from tests.conftest import left_pad, noisy, random_prompts
from tests.support.caches import content
from tests.support.streamers import failing
from tests.support.texts import one_prompt as prompt
from tests.support.texts import own_text, same_text
from tests.trials import trials

NEW = 12
SCHEDULES = ("lockstep", *trials(ci=(), nightly=("workers",)))
"""Outputs and caches with processes, too: ``tests/same_text``."""


@pytest.fixture(scope="module")
def pipes(model):
    draft = noisy(model, 0.02)
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Pipeline(model, draft, lookahead=3, schedule=name, trace=64))
            for name in SCHEDULES
        }


@pytest.fixture
def pipe(pipes):
    return pipes["lockstep"]


def read(pipe) -> int:
    """Tokens of the prompts that the target has read in the last call, but for each row's last one."""
    return int(pipe.report.trace["target"]["prefill"].sum())


def untouched(cache, before) -> bool:
    """Whether a cache is as it was when :func:`content` was called."""
    columns, tensors = content(cache)
    return columns == before[0] and all(torch.equal(a, b) for a, b in zip(tensors, before[1], strict=True))


# ---- arguments in the forms that transformers takes


NUMBERS = [int, np.int64, np.uint8, torch.tensor]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.__name__)
def test_numbers_of_numpy_and_torch(pipe, model, number):
    text = prompt(60)
    wanted = own_text(model, text, max_new_tokens=7)
    config = GenerationConfig(max_new_tokens=number(7), do_sample=False)
    for given in ({"max_new_tokens": number(7)}, {"generation_config": config}, {"max_length": number(15)}):
        assert torch.equal(pipe.generate(text, **given), wanted)
    sampled = {"do_sample": True, "seed": 3, "max_new_tokens": 7}
    wanted = pipe.generate(text, top_k=5, temperature=0.5, **sampled)
    assert torch.equal(pipe.generate(text, top_k=number(5), temperature=torch.tensor(0.5), **sampled), wanted)


@pytest.mark.parametrize("lengths", [[20], [11, 20], [9], [8], [3]])
def test_the_callers_maximum_length_is_the_maximum(pipe, model, lengths):
    """It replaces transformers' own MaxLengthCriteria, and at least one token is generated."""
    text = prompt(61)

    criteria = StoppingCriteriaList([MaxLengthCriteria(n) for n in lengths])
    out = same_text(pipe, text, max_length=12, stopping_criteria=criteria)
    assert out.shape[1] == max(9, min(lengths))
    if max(lengths) > 12:
        with pytest.raises(ValueError, match="more than any row"):
            pipe.generate(text, max_length=12, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(2**40)]))


def test_a_maximum_length_that_does_not_count(pipe, model):
    """``max_new_tokens`` takes its place; a tokenizer without a limit has 10**30."""
    text, limit = prompt(63), {"max_length": 10**30}
    wanted = own_text(model, text, max_new_tokens=5)
    assert torch.equal(pipe.generate(text, max_new_tokens=5, **limit), wanted)
    assert torch.equal(pipe.generate(text, GenerationConfig(**limit), max_new_tokens=5), wanted)
    for limit in ({"max_length": 10**30}, {"max_new_tokens": 10**30}):
        with pytest.raises(ValueError, match="more than any row"):
            pipe.generate(text, **limit)


def test_arguments_that_ask_for_nothing(pipe, model):
    text = prompt(62)
    wanted = own_text(model, text, max_new_tokens=5)
    nothing = dict.fromkeys(
        ["token_type_ids", "cache_position", "labels", "position_ids", "encoder_outputs", "max_new_token"]
    )
    for kwargs in (nothing, {"logits_to_keep": 1}, {"trust_remote_code": True}, {"trust_remote_code": None}):
        assert torch.equal(pipe.generate(text, max_new_tokens=5, **kwargs), wanted)
        kwargs.pop("token_type_ids", None)  # fails in transformers 5.0
        assert torch.equal(own_text(model, text, max_new_tokens=5, **kwargs), wanted)


def test_positions_that_follow_from_the_mask(pipe, model):
    ids, mask = left_pad(random_prompts(3, seed=63, shortest=3, longest=9))
    wanted = own_text(model, ids, attention_mask=mask, max_new_tokens=5)
    positions = mask.cumsum(1) - 1
    for padding in (0, 1, -1):
        given = positions.masked_fill(mask == 0, padding)
        assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=5, position_ids=given), wanted)
    text = prompt(64)
    given = torch.arange(8)[None]
    assert torch.equal(
        pipe.generate(text, max_new_tokens=5, position_ids=given), own_text(model, text, max_new_tokens=5)
    )
    for bad in (given + 1, given.flip(1), given[:, 1:], given[0], given.repeat(2, 1)):
        with pytest.raises(NotImplementedError, match="position_ids"):
            pipe.generate(text, max_new_tokens=5, position_ids=bad)


@pytest.mark.parametrize("length", [505, 511, 512, 513, 600])
@pytest.mark.parametrize("name", SCHEDULES)
def test_texts_beyond_the_models_length(pipes, model, caplog, name, length):
    """transformers warns and continues."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    text = prompt(65, length)

    def warned(generate):
        transformers.utils.logging.get_logger(logger.name).warning_once.__func__.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=logger.name):
            logger.addHandler(caplog.handler)
            try:
                out = generate(text, max_new_tokens=9, do_sample=False)
            finally:
                logger.removeHandler(caplog.handler)
        return out, any("maximum length" in record.message for record in caplog.records)

    wanted, theirs = warned(model.generate)
    got, ours = warned(pipes[name].generate)
    assert torch.equal(got, wanted)
    assert ours == theirs == (length + 9 > 512)


# ---- caches that are not continued


def test_a_cache_is_not_read_in_calls_that_transformers_decodes(pipe, model, monkeypatch):
    monkeypatch.setattr(pipespec.api.prepare, "mask_kind", lambda _: MaskKind.NONE)
    ids, mask = left_pad(random_prompts(2, seed=64))
    cache = DynamicCache()
    with pytest.warns(SpeedWarning, match="takes no masks"):
        out = pipe.generate(ids, attention_mask=mask, max_new_tokens=5, past_key_values=cache)
    assert torch.equal(out, own_text(model, ids, attention_mask=mask, max_new_tokens=5))
    assert cache.get_seq_length() == out.shape[1] - 1


@pytest.mark.parametrize("kind", ["ours", "dynamic"])
@pytest.mark.parametrize("at", [1, 5])
def test_a_call_that_fails_midway_leaves_the_cache_as_it_was(pipe, model, kind, at):
    text = prompt(21)
    cache = DynamicCache() if kind == "dynamic" else None
    first = pipe.generate(text, max_new_tokens=NEW, past_key_values=cache, return_dict_in_generate=True)
    cache, longer = first.past_key_values, torch.cat([first.sequences, prompt(22, 4)], dim=1)
    before = content(cache)
    stops = failing(at, LookupError, "made to fail")
    with pytest.raises(LookupError, match="made to fail"):
        pipe.generate(longer, max_new_tokens=NEW, past_key_values=cache, streamer=stops)
    assert untouched(cache, before)
    wanted = own_text(model, longer, max_new_tokens=NEW)
    committed = pipe.partial.shape[1] - longer.shape[1]
    assert at <= committed < NEW
    assert torch.equal(pipe.partial, wanted[:, : pipe.partial.shape[1]])
    assert torch.equal(pipe.generate(longer, max_new_tokens=NEW, past_key_values=cache), wanted)
    assert read(pipe) == 4  # nothing is fed twice


# ---- what comes back


@pytest.mark.parametrize("rows", [1, 3])
def test_the_fields_of_the_output(pipes, model, rows):
    ids, mask = left_pad(random_prompts(rows, seed=29, shortest=4))
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True}
    for pipe in pipes.values():
        for wants in ({}, {"output_scores": True}, {"output_logits": True}):
            got = pipe.generate(ids, **kwargs, **wants, no_repeat_ngram_size=1)
            wanted = model.generate(ids, **kwargs, **wants, do_sample=False, no_repeat_ngram_size=1)
            assert torch.equal(got.sequences, wanted.sequences)
            assert pipe.report.tokens == rows * NEW
            assert type(got) is type(wanted)
            assert list(got) == list(wanted)
            for ours in (got[name] for name in ("scores", "logits") if name in got):  # values: tests/same_text
                assert len(ours) == NEW
                assert all(t.dtype == torch.float32 and t.shape == (rows, 320) for t in ours)
            assert got.past_key_values.get_seq_length() == ids.shape[1] + NEW - 1


def test_an_output_can_be_taken_apart_and_saved(pipes, model):
    """It has transformers' fields, and tensors alone in them."""
    ids, kwargs = prompt(23), {"max_new_tokens": 4, "return_dict_in_generate": True, "use_cache": False}
    for pipe in (*pipes.values(), Pipeline(model, schedule="plain")):
        (sequences,) = pipe.generate(ids, **kwargs).to_tuple()
        out = pipe.generate(ids, **kwargs, output_scores=True)
        assert torch.equal(out[0], sequences)
        assert [leaf.shape for leaf in tree_leaves(out)] == [sequences.shape, *((1, 320),) * 4]
        file = io.BytesIO()
        torch.save(dict(out), file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True)["sequences"], sequences)
        assert copy.deepcopy(out).keys() == out.keys()


def test_a_failure_after_the_text_leaves_the_text(pipe, model, monkeypatch):
    monkeypatch.setattr("pipespec.api.output.GenerateDecoderOnlyOutput", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.generate(prompt(50), max_new_tokens=NEW, return_dict_in_generate=True)
    text = own_text(model, prompt(50), max_new_tokens=NEW)
    assert torch.equal(pipe.partial, text)
    assert torch.equal(caught.value.partial, text)


def test_the_returned_cache_is_the_callers(pipe, model):
    """The next call does not write into it."""
    out = pipe.generate(prompt(32), max_new_tokens=NEW, return_dict_in_generate=True)
    before = content(out.past_key_values)
    pipe.generate(prompt(33), max_new_tokens=NEW)
    other = pipe.generate(prompt(34), max_new_tokens=NEW, return_dict_in_generate=True)
    assert other.past_key_values is not out.past_key_values
    assert untouched(out.past_key_values, before)


# ---- model.generate(..., custom_generate=pipe)


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 15),
    reason="transformers does not tell whose cache it passes",
)
def test_custom_generate_fills_the_callers_cache(pipe, model):
    """And no other: transformers makes one for each call."""
    ids, cache = prompt(37), DynamicCache(config=model.config)
    options = {"max_new_tokens": 3, "do_sample": False, "custom_generate": pipe}
    text = model.generate(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == text.shape[1] - 1
    out = model.generate(ids, return_dict_in_generate=True, **options)
    assert type(out.past_key_values) is DynamicCache
    assert out.past_key_values.get_seq_length() == text.shape[1] - 1


def test_custom_generate_of_another_model(pipe, model):
    with pytest.raises(ValueError, match="custom_generate: this pipeline generates the text of its own target"):
        copy.deepcopy(model).generate(prompt(39), max_new_tokens=3, do_sample=False, custom_generate=pipe)
