"""Inputs beside the prompt and outputs beside the text: caches, configurations, outputs, custom_generate."""

from __future__ import annotations

import copy
import logging
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StaticCache, StoppingCriteriaList

import pipespec.api.prepare
from pipespec import Pipeline
from pipespec.engine.attention import MaskKind
from pipespec.engine.cache import RowCache
from pipespec.schedules.base import SpeedWarning
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.streamers import failing
from tests.support.texts import one_prompt as prompt
from tests.support.texts import own_text, same_text
from tests.support.ways import opened

NEW = 12


@pytest.fixture(scope="module")
def pipes(model):
    draft = noisy(model, 0.02)
    with Pipeline(model, draft, schedule="workers", trace=64) as workers:
        yield {"lockstep": Pipeline(model, draft, lookahead=3, schedule="lockstep", trace=64), "workers": workers}


@pytest.fixture
def pipe(pipes):
    return pipes["lockstep"]


def read(pipe) -> int:
    """Tokens of the prompts that the target has read in the last call, but for each row's last one."""
    return int(pipe.report.trace["target"]["prefill"].sum())


def held(cache) -> tuple:
    """A copy of a cache's content, to check later that it has not changed."""
    if isinstance(cache, RowCache):
        return cache.lengths, [
            keys[row, :, :n].clone() for keys, _ in cache.states() for row, n in enumerate(cache.lengths)
        ]
    return cache.get_seq_length(), [layer.keys.clone() for layer in cache.layers]


def untouched(cache, before) -> bool:
    lengths, keys = held(cache)
    return lengths == before[0] and all(torch.equal(a, b) for a, b in zip(keys, before[1], strict=True))


# ---- continuing the cache of an earlier call


@pytest.mark.parametrize("how", ["lockstep", "lockstep, captured", "streams", "workers"])
def test_a_chat_of_three_ragged_rows(model, how, monkeypatch):
    """Rows begin and end at different places. Each turn pads them again, and the cache holds no padding. Only what is new is read."""
    monkeypatch.setattr("pipespec.engine.prefixes.SHORTEST", 1)
    cache, rows = None, random_prompts(3, seed=2, shortest=3, longest=14)
    with opened(model, noisy(model, 0.02), how, trace=64) as pipe:
        for turn in range(3):
            ids, mask = left_pad(rows)
            texts = own_text(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
            ends = {"eos_token_id": [int(texts[0, 3]), int(texts[1, 7])], "pad_token_id": 0}
            kwargs = {"attention_mask": mask, "max_new_tokens": NEW} | ends
            held_before = cache.lengths if cache is not None else (0, 0, 0)
            out = pipe.generate(ids, past_key_values=cache, return_dict_in_generate=True, **kwargs)
            assert torch.equal(out.sequences, own_text(model, ids, **kwargs))
            assert cache is None or out.past_key_values is cache
            assert read(pipe) == sum(len(row) - 1 - n for row, n in zip(rows, held_before, strict=True))
            if turn and how != "workers":  # the draft goes on with a cache of its own
                assert pipe.report.trace["draft 0"]["prefill"].sum() < sum(map(len, rows)) - 3
            cache = out.past_key_values
            new = [torch.tensor([t for t in row if t != 0]) for row in out.sequences[:, ids.shape[1] :].tolist()]
            said = [torch.cat(pair) for pair in zip(rows, new, strict=True)]
            assert cache.lengths == tuple(len(s) - 1 for s in said)
            assert len(set(cache.lengths)) > 1
            rows = [torch.cat([s, prompt(20 + turn, 2 + row)[0]]) for row, s in enumerate(said)]
        same_text(pipe, prompt(3), max_new_tokens=NEW, fresh=lambda: {"past_key_values": DynamicCache()})


def test_a_cache_given_is_a_cache_grown_also_without_a_dict(pipe, model):
    cache = RowCache.for_model(model, 1, 4)  # too small: it grows
    text = prompt(3)
    for more in (prompt(4, 3), prompt(5, 2)):
        out = pipe.generate(text, max_new_tokens=NEW, past_key_values=cache)
        assert torch.equal(out, own_text(model, text, max_new_tokens=NEW))
        assert cache.lengths == (out.shape[1] - 1,)
        text = torch.cat([out, more], dim=1)


def test_the_same_prompt_again(pipe, model):
    """A cache that holds all of the text, or all but its last token."""
    text = prompt(5)
    cache = pipe.generate(text, max_new_tokens=NEW, return_dict_in_generate=True).past_key_values
    cache.truncate([text.shape[1]])
    for _ in range(2):
        out = pipe.generate(text, max_new_tokens=NEW, past_key_values=cache)
        assert torch.equal(out, own_text(model, text, max_new_tokens=NEW))
        assert read(pipe) == 0
        cache.crop(-NEW)


def test_one_cache_for_several_continuations(pipe, model):
    """HuggingFace's recipe: a deep copy of the cache of their common prefix."""
    common = prompt(6, 20)
    cache = pipe.generate(common, max_new_tokens=1, return_dict_in_generate=True).past_key_values
    assert cache.lengths == (20,)
    before = held(cache)
    for seed in (7, 8):
        text = torch.cat([common, prompt(seed, 4)], dim=1)
        out = pipe.generate(text, max_new_tokens=NEW, past_key_values=copy.deepcopy(cache))
        assert torch.equal(out, own_text(model, text, max_new_tokens=NEW))
        assert read(pipe) == 3
    other = torch.cat([prompt(9, 20), prompt(8, 4)], dim=1)
    with pytest.raises(ValueError, match="past_key_values was made with another text than row 0"):
        pipe.generate(other, max_new_tokens=NEW, past_key_values=copy.deepcopy(cache))
    assert untouched(cache, before)


# ---- caches of transformers


def test_transformers_goes_on_with_a_cache_of_ours(pipe, model):
    out = pipe.generate(prompt(14), max_new_tokens=NEW, return_dict_in_generate=True)
    cache = out.past_key_values
    text = torch.cat([out.sequences, prompt(15, 3)], dim=1)
    theirs = model.generate(text, max_new_tokens=9, past_key_values=cache, do_sample=False)
    assert torch.equal(theirs, own_text(model, text, max_new_tokens=9))
    assert cache.lengths == (theirs.shape[1] - 1,)
    # The pipeline continues after transformers, whose new tokens the cache does not know.
    text = torch.cat([theirs, prompt(16, 3)], dim=1)
    assert torch.equal(
        pipe.generate(text, max_new_tokens=9, past_key_values=cache), own_text(model, text, max_new_tokens=9)
    )


def test_a_dynamic_cache_of_rows_that_end_early(pipe, model):
    ids, mask = left_pad(random_prompts(3, seed=51, shortest=3, longest=9))
    text = own_text(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": [int(text[0, 2])], "pad_token_id": 0}
    ours, theirs = DynamicCache(), DynamicCache()
    out = pipe.generate(ids, past_key_values=ours, **kwargs)
    assert torch.equal(out, own_text(model, ids, past_key_values=theirs, **kwargs))
    assert ours.get_seq_length() == theirs.get_seq_length()
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for row in range(3):
            ended = (out[row, ids.shape[1] :] == kwargs["eos_token_id"][0]).nonzero()
            end = ids.shape[1] + int(ended[0, 0]) if len(ended) else a.keys.shape[2]
            real = slice(int((mask[row] == 0).sum()), end)
            torch.testing.assert_close(a.keys[row, :, real], b.keys[row, :, real], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(a.values[row, :, real], b.values[row, :, real], rtol=1e-4, atol=1e-4)


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
@pytest.mark.parametrize("name", ["lockstep", "workers"])
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


# ---- caches that do not fit


def test_caches_that_do_not_fit_are_refused_and_not_harmed(pipe, model):
    text = prompt(17)
    out = pipe.generate(text, max_new_tokens=NEW, return_dict_in_generate=True)
    cache = out.past_key_values
    longer = torch.cat([out.sequences, prompt(18, 3)], dim=1)
    wrong = longer.clone()
    wrong[0, 5] = 2 + (wrong[0, 5] + 1) % 300
    filled, of_two = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(longer, past_key_values=filled)
        model(longer.expand(2, -1), past_key_values=of_two)
    before, before_filled = held(cache), held(filled)
    small = random_llama(4, kv_heads=1)
    of_another = Pipeline(small).generate(text, max_new_tokens=2, return_dict_in_generate=True).past_key_values
    theirs = DynamicCache()
    own_text(small, text, max_new_tokens=2, past_key_values=theirs)
    for error, match, ids, bad in [
        (ValueError, "another text than row 0", wrong, cache),
        (ValueError, "holds 19 tokens of row 0, input_ids only 8", text, cache),
        (ValueError, "holds 23 tokens of row 0, input_ids only 8", text, filled),
        (ValueError, "holds 1 rows, input_ids 2", longer.expand(2, -1), cache),
        (ValueError, "holds 2 rows, input_ids 1", longer, of_two),
        (ValueError, "does not fit the target", longer, of_another),
        (ValueError, "does not fit the target", longer, theirs),
        (NotImplementedError, "StaticCache", longer, StaticCache(config=model.config, max_cache_len=99)),
        (NotImplementedError, "tuple", longer, ((torch.zeros(1, 2, 3, 16),) * 2,) * 2),
    ]:
        with pytest.raises(error, match="past_key_values") as caught:
            pipe.generate(ids, max_new_tokens=3, past_key_values=bad)
        assert match in str(caught.value)
    assert untouched(cache, before)
    assert untouched(filled, before_filled)
    for fine in (cache, filled):
        out = pipe.generate(longer, max_new_tokens=9, past_key_values=fine)
        assert torch.equal(out, own_text(model, longer, max_new_tokens=9))


def test_a_cache_is_not_read_in_calls_that_transformers_decodes(pipe, model, monkeypatch):
    monkeypatch.setattr(pipespec.api.prepare, "mask_kind", lambda _: MaskKind.NONE)
    ids, mask = left_pad(random_prompts(2, seed=64))
    cache = StaticCache(config=model.config, max_cache_len=99)
    with pytest.warns(SpeedWarning, match="takes no masks"):
        out = pipe.generate(ids, attention_mask=mask, max_new_tokens=5, past_key_values=cache)
    assert torch.equal(out, own_text(model, ids, attention_mask=mask, max_new_tokens=5))


def test_what_a_cache_remembers_of_its_text(pipe, model):
    """Only the text that it still holds: after a rollback other tokens may follow."""
    text = prompt(19, 12)
    cache = pipe.generate(text, max_new_tokens=NEW, return_dict_in_generate=True).past_key_values
    assert [t.tolist() for t in cache.text] == [
        cache_text[:23] for cache_text in own_text(model, text, max_new_tokens=NEW).tolist()
    ]
    cache.truncate([6])
    other = torch.cat([text[:, :6], prompt(20, 9)], dim=1)
    with torch.no_grad():
        model(other[:, 6:12], past_key_values=cache)  # another call continues with it
    assert cache.lengths == (12,)
    assert [t.tolist() for t in cache.text] == text[:, :6].tolist()
    out = pipe.generate(other, max_new_tokens=NEW, past_key_values=cache)
    assert torch.equal(out, own_text(model, other, max_new_tokens=NEW))


@pytest.mark.parametrize("kind", ["ours", "dynamic"])
@pytest.mark.parametrize("at", [1, 5])
def test_a_call_that_fails_midway_leaves_the_cache_as_it_was(pipe, model, kind, at):
    text = prompt(21)
    cache = DynamicCache() if kind == "dynamic" else None
    first = pipe.generate(text, max_new_tokens=NEW, past_key_values=cache, return_dict_in_generate=True)
    cache, longer = first.past_key_values, torch.cat([first.sequences, prompt(22, 4)], dim=1)
    before = held(cache)
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
            assert got.speculation is pipe.report
            assert got.speculation.tokens == rows * NEW
            assert set(got.keys()) == set(wanted.keys()) | {"speculation"}
            for ours in (got[name] for name in ("scores", "logits") if name in got):  # values: tests/same_text
                assert len(ours) == NEW
                assert all(t.dtype == torch.float32 and t.shape == (rows, 320) for t in ours)
            assert got.past_key_values.lengths == tuple(int(n) + NEW - 1 for n in mask.sum(dim=1))


def test_a_failure_after_the_text_leaves_the_text(pipe, model, monkeypatch):
    monkeypatch.setattr("pipespec.api.output.PipelineOutput", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.generate(prompt(50), max_new_tokens=NEW, return_dict_in_generate=True)
    text = own_text(model, prompt(50), max_new_tokens=NEW)
    assert torch.equal(pipe.partial, text)
    assert torch.equal(caught.value.partial, text)


def test_the_returned_cache_is_the_callers(pipe, model):
    """The next call does not write into it."""
    out = pipe.generate(prompt(32), max_new_tokens=NEW, return_dict_in_generate=True)
    before = held(out.past_key_values)
    pipe.generate(prompt(33), max_new_tokens=NEW)
    other = pipe.generate(prompt(34), max_new_tokens=NEW, return_dict_in_generate=True)
    assert other.past_key_values is not out.past_key_values
    assert untouched(out.past_key_values, before)


# ---- model.generate(..., custom_generate=pipe)


def test_custom_generate(pipe, model):
    """Its other arguments: ``tests/same_text``."""
    for kwargs in (
        {"inputs": prompt(36), "streamer": None, "assistant_model": None},
        {},
    ):
        kwargs |= {"max_new_tokens": NEW, "do_sample": False}
        pipe.report = None
        assert torch.equal(model.generate(custom_generate=pipe, **kwargs), model.generate(**kwargs))
        assert pipe.report is not None


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
    assert isinstance(out.past_key_values, RowCache)


def test_custom_generate_of_another_model(pipe, model):
    with pytest.raises(ValueError, match="custom_generate: this pipeline generates the text of its own target"):
        copy.deepcopy(model).generate(prompt(39), max_new_tokens=3, do_sample=False, custom_generate=pipe)
