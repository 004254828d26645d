"""Inputs beside the prompt and outputs beside the text: caches, configurations, outputs, custom_generate."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StaticCache, StoppingCriteriaList

import pipespec.api.prepare
import pipespec.engine.cached_text
from pipespec import Pipeline
from pipespec.engine.attention import MaskKind
from pipespec.engine.cache import RowCache
from pipespec.schedules.base import SpeedWarning
from tests.conftest import left_pad, noisy, random_llama, random_prompts

NEW = 12


@pytest.fixture(scope="module")
def pipes(model):
    with Pipeline(model, noisy(model, 0.02), schedule="workers") as workers:
        yield {"lockstep": Pipeline(model, noisy(model, 0.02), lookahead=3, schedule="lockstep"), "workers": workers}


@pytest.fixture
def pipe(pipes):
    return pipes["lockstep"]


@pytest.fixture
def prefilled(model, monkeypatch):
    """Columns that the target was fed in prefills, but for the last token, one entry per forward."""
    columns: list[int] = []
    inner = pipespec.engine.cached_text.forward

    def counting(which, tokens, cache, *, keep, **options):
        if which is model and keep < tokens.shape[1]:
            columns.append(tokens.shape[1] - keep)
        return inner(which, tokens, cache, keep=keep, **options)

    monkeypatch.setattr(pipespec.engine.cached_text, "forward", counting)
    return columns


def prompt(seed: int, length: int = 8) -> torch.Tensor:
    return random_prompts(1, seed=seed, shortest=length, longest=length)[0][None]


def plain(model, ids, **kwargs):
    return model.generate(ids, do_sample=False, **kwargs)


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


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_a_chat_of_three_ragged_rows(pipes, model, prefilled, schedule):
    """Rows begin and end at different places. Each turn pads them again, and the cache holds no padding."""
    pipe, cache = pipes[schedule], None
    rows = random_prompts(3, seed=2, shortest=3, longest=14)
    for turn in range(3):
        ids, mask = left_pad(rows)
        texts = plain(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
        ends = {"eos_token_id": [int(texts[0, 3]), int(texts[1, 7])], "pad_token_id": 0}
        kwargs = {"attention_mask": mask, "max_new_tokens": NEW} | ends
        held_before = cache.lengths if cache is not None else (0, 0, 0)
        prefilled.clear()
        out = pipe.generate(ids, past_key_values=cache, return_dict_in_generate=True, **kwargs)
        assert torch.equal(out.sequences, plain(model, ids, **kwargs))
        assert sum(prefilled) == max(len(row) - 1 - n for row, n in zip(rows, held_before, strict=True))
        cache = out.past_key_values
        new = [torch.tensor([t for t in row if t != 0]) for row in out.sequences[:, ids.shape[1] :].tolist()]
        said = [torch.cat(pair) for pair in zip(rows, new, strict=True)]
        assert cache.lengths == tuple(len(s) - 1 for s in said)
        assert len(set(cache.lengths)) > 1
        rows = [torch.cat([s, prompt(20 + turn, 2 + row)[0]]) for row, s in enumerate(said)]
    assert turn == 2


def test_a_cache_given_is_a_cache_grown_also_without_a_dict(pipe, model):
    cache = RowCache.for_model(model, 1, 4)  # too small: it grows
    out = pipe.generate(prompt(3), max_new_tokens=NEW, past_key_values=cache)
    assert torch.equal(out, plain(model, prompt(3), max_new_tokens=NEW))
    assert cache.lengths == (out.shape[1] - 1,)
    longer = torch.cat([out, prompt(4, 3)], dim=1)
    assert torch.equal(
        pipe.generate(longer, max_new_tokens=NEW, past_key_values=cache), plain(model, longer, max_new_tokens=NEW)
    )


def test_the_same_prompt_again(pipe, model, prefilled):
    """A cache that holds all of the text, or all but its last token."""
    text = prompt(5)
    cache = pipe.generate(text, max_new_tokens=NEW, return_dict_in_generate=True).past_key_values
    cache.truncate([text.shape[1]])
    for _ in range(2):
        prefilled.clear()
        out = pipe.generate(text, max_new_tokens=NEW, past_key_values=cache)
        assert torch.equal(out, plain(model, text, max_new_tokens=NEW))
        assert prefilled == []
        cache.crop(-NEW)


def test_one_cache_for_several_continuations(pipe, model, prefilled):
    """HuggingFace's recipe: a deep copy of the cache of their common prefix."""
    common = prompt(6, 20)
    cache = pipe.generate(common, max_new_tokens=1, return_dict_in_generate=True).past_key_values
    assert cache.lengths == (20,)
    before = held(cache)
    for seed in (7, 8):
        text = torch.cat([common, prompt(seed, 4)], dim=1)
        prefilled.clear()
        out = pipe.generate(text, max_new_tokens=NEW, past_key_values=copy.deepcopy(cache))
        assert torch.equal(out, plain(model, text, max_new_tokens=NEW))
        assert sum(prefilled) == 3
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
    assert torch.equal(theirs, plain(model, text, max_new_tokens=9))
    assert cache.lengths == (theirs.shape[1] - 1,)
    # The pipeline continues after transformers, whose new tokens the cache does not know.
    text = torch.cat([theirs, prompt(16, 3)], dim=1)
    assert torch.equal(
        pipe.generate(text, max_new_tokens=9, past_key_values=cache), plain(model, text, max_new_tokens=9)
    )


@pytest.mark.parametrize("how", ["empty", "filled"])
@pytest.mark.parametrize("name", ["lockstep", "workers"])
def test_a_dynamic_cache_of_several_rows(pipes, model, prefilled, name, how):
    """Its columns are those of the batch, padding included. Turn by turn, the pipeline and transformers alternate."""
    pipe = pipes[name]
    ids, mask = left_pad(random_prompts(3, seed=51, shortest=3, longest=9))
    assert (mask == 0).any()
    cache = DynamicCache()
    if how == "filled":
        # All but the last three columns; the longest row's padding is in them, too.
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :-3]
            model(ids[:, :-3], attention_mask=mask[:, :-3], position_ids=positions, past_key_values=cache)
    for turn, generate in enumerate((pipe.generate, model.generate, pipe.generate)):
        already = cache.get_seq_length()
        prefilled.clear()
        out = generate(ids, attention_mask=mask, max_new_tokens=NEW, past_key_values=cache, do_sample=False)
        assert torch.equal(out, plain(model, ids, attention_mask=mask, max_new_tokens=NEW)), f"turn {turn}"
        assert cache.get_seq_length() == out.shape[1] - 1
        if generate == pipe.generate:
            assert sum(prefilled) == ids.shape[1] - 1 - already
        more = torch.stack([prompt(52 + row, 4)[0] for row in range(3)])
        ids = torch.cat([out, more], dim=1)
        mask = torch.cat([mask, torch.ones((3, ids.shape[1] - mask.shape[1]), dtype=mask.dtype)], dim=1)


def test_a_dynamic_cache_of_rows_that_end_early(pipe, model):
    ids, mask = left_pad(random_prompts(3, seed=51, shortest=3, longest=9))
    text = plain(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": [int(text[0, 2])], "pad_token_id": 0}
    ours, theirs = DynamicCache(), DynamicCache()
    out = pipe.generate(ids, past_key_values=ours, **kwargs)
    assert torch.equal(out, plain(model, ids, past_key_values=theirs, **kwargs))
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
    wanted = plain(model, text, max_new_tokens=7)
    assert torch.equal(pipe.generate(text, max_new_tokens=number(7)), wanted)
    assert torch.equal(pipe.generate(text, GenerationConfig(max_new_tokens=number(7), do_sample=False)), wanted)
    assert torch.equal(pipe.generate(text, max_length=number(15)), wanted)
    sampled = {"do_sample": True, "seed": 3, "max_new_tokens": 7}
    wanted = pipe.generate(text, top_k=5, temperature=0.5, **sampled)
    assert torch.equal(pipe.generate(text, top_k=number(5), temperature=torch.tensor(0.5), **sampled), wanted)


@pytest.mark.parametrize("lengths", [[20], [11, 20], [9], [8], [3]])
def test_the_callers_maximum_length_is_the_maximum(pipe, model, lengths):
    """It replaces transformers' own MaxLengthCriteria, and at least one token is generated."""
    text = prompt(61)

    def call(generate):
        criteria = StoppingCriteriaList([MaxLengthCriteria(n) for n in lengths])
        return generate(text, max_length=12, do_sample=False, stopping_criteria=criteria)

    wanted = call(model.generate)
    assert torch.equal(call(pipe.generate), wanted)
    assert wanted.shape[1] == max(9, min(lengths))
    if max(lengths) > 12:
        with pytest.raises(ValueError, match="more than any row"):
            pipe.generate(text, max_length=12, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(2**40)]))


def test_a_maximum_length_that_does_not_count(pipe, model):
    """``max_new_tokens`` takes its place; a tokenizer without a limit has 10**30."""
    text, limit = prompt(63), {"max_length": 10**30}
    wanted = plain(model, text, max_new_tokens=5)
    assert torch.equal(pipe.generate(text, max_new_tokens=5, **limit), wanted)
    assert torch.equal(pipe.generate(text, GenerationConfig(**limit), max_new_tokens=5), wanted)
    for limit in ({"max_length": 10**30}, {"max_new_tokens": 10**30}):
        with pytest.raises(ValueError, match="more than any row"):
            pipe.generate(text, **limit)


def test_arguments_that_ask_for_nothing(pipe, model):
    text = prompt(62)
    wanted = plain(model, text, max_new_tokens=5)
    nothing = dict.fromkeys(
        ["token_type_ids", "cache_position", "labels", "position_ids", "encoder_outputs", "max_new_token"]
    )
    for kwargs in (nothing, {"logits_to_keep": 1}, {"trust_remote_code": True}, {"trust_remote_code": None}):
        assert torch.equal(pipe.generate(text, max_new_tokens=5, **kwargs), wanted)
        kwargs = {
            name: value for name, value in kwargs.items() if name != "token_type_ids"
        }  # fails in transformers 5.0
        assert torch.equal(plain(model, text, max_new_tokens=5, **kwargs), wanted)


def test_positions_that_follow_from_the_mask(pipe, model):
    ids, mask = left_pad(random_prompts(3, seed=63, shortest=3, longest=9))
    wanted = plain(model, ids, attention_mask=mask, max_new_tokens=5)
    positions = mask.cumsum(1) - 1
    for padding in (0, 1, -1):
        given = positions.masked_fill(mask == 0, padding)
        assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=5, position_ids=given), wanted)
    text = prompt(64)
    given = torch.arange(8)[None]
    assert torch.equal(pipe.generate(text, max_new_tokens=5, position_ids=given), plain(model, text, max_new_tokens=5))
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
    filled = DynamicCache()
    with torch.no_grad():
        model(longer, past_key_values=filled)
    of_two = DynamicCache()
    with torch.no_grad():
        model(longer.expand(2, -1), past_key_values=of_two)
    before, before_filled = held(cache), held(filled)
    small = random_llama(4, kv_heads=1)
    of_another = pipe_of_another(small, text).past_key_values
    theirs = DynamicCache()
    plain(small, text, max_new_tokens=2, past_key_values=theirs)
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
        assert torch.equal(out, plain(model, longer, max_new_tokens=9))


def test_a_cache_is_not_read_in_calls_that_transformers_decodes(pipe, model, monkeypatch):
    monkeypatch.setattr(pipespec.api.prepare, "mask_kind", lambda _: MaskKind.NONE)
    ids, mask = left_pad(random_prompts(2, seed=64))
    cache = StaticCache(config=model.config, max_cache_len=99)
    with pytest.warns(SpeedWarning, match="takes no masks"):
        out = pipe.generate(ids, attention_mask=mask, max_new_tokens=5, past_key_values=cache)
    assert torch.equal(out, plain(model, ids, attention_mask=mask, max_new_tokens=5))


def pipe_of_another(model, text):
    return Pipeline(model).generate(text, max_new_tokens=2, return_dict_in_generate=True)


def test_what_a_cache_remembers_of_its_text(pipe, model):
    """Only the text that it still holds: after a rollback other tokens may follow."""
    text = prompt(19, 12)
    cache = pipe.generate(text, max_new_tokens=NEW, return_dict_in_generate=True).past_key_values
    assert [t.tolist() for t in cache.text] == [
        cache_text[:23] for cache_text in plain(model, text, max_new_tokens=NEW).tolist()
    ]
    cache.truncate([6])
    other = torch.cat([text[:, :6], prompt(20, 9)], dim=1)
    with torch.no_grad():
        model(other[:, 6:12], past_key_values=cache)  # another call continues with it
    assert cache.lengths == (12,)
    assert [t.tolist() for t in cache.text] == text[:, :6].tolist()
    out = pipe.generate(other, max_new_tokens=NEW, past_key_values=cache)
    assert torch.equal(out, plain(model, other, max_new_tokens=NEW))


class Failing:
    """A processor that raises at its n-th call."""

    def __init__(self, at: int):
        self.left = at

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left == 0:
            raise LookupError("made to fail")
        return scores


@pytest.mark.parametrize("kind", ["ours", "dynamic"])
@pytest.mark.parametrize("at", [1, 5])
def test_a_call_that_fails_midway_leaves_the_cache_as_it_was(pipe, model, prefilled, kind, at):
    text = prompt(21)
    cache = DynamicCache() if kind == "dynamic" else None
    first = pipe.generate(text, max_new_tokens=NEW, past_key_values=cache, return_dict_in_generate=True)
    cache, longer = first.past_key_values, torch.cat([first.sequences, prompt(22, 4)], dim=1)
    before = held(cache)
    with pytest.raises(LookupError, match="made to fail"):
        pipe.generate(longer, max_new_tokens=NEW, past_key_values=cache, logits_processor=[Failing(at)])
    assert untouched(cache, before)
    wanted = plain(model, longer, max_new_tokens=NEW)
    committed = pipe.partial.shape[1] - longer.shape[1]
    assert 0 <= committed < at  # whole steps; the failed one left nothing
    assert committed > 0 or at == 1
    assert torch.equal(pipe.partial, wanted[:, : pipe.partial.shape[1]])
    prefilled.clear()
    assert torch.equal(pipe.generate(longer, max_new_tokens=NEW, past_key_values=cache), wanted)
    assert sum(prefilled) == 4  # nothing is fed twice


# ---- how the prompt is fed


# ---- what comes back


@pytest.mark.parametrize("rows", [1, 3])
def test_the_fields_of_the_output(pipes, model, rows):
    ids, mask = left_pad(random_prompts(rows, seed=29, shortest=4))
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True}
    for pipe in pipes.values():
        for wants in (
            {},
            {"output_scores": True},
            {"output_logits": True},
            {"output_scores": True, "output_logits": True},
        ):
            got = pipe.generate(ids, **kwargs, **wants, no_repeat_ngram_size=1)
            wanted = plain(model, ids, **kwargs, **wants, no_repeat_ngram_size=1)
            assert torch.equal(got.sequences, wanted.sequences)
            assert got.speculation is pipe.report
            assert got.speculation.tokens == rows * NEW
            assert set(wanted.keys()) <= set(got.keys()) == set(wanted.keys()) | {"speculation"}
            for name in ("scores", "logits"):
                ours, theirs = getattr(got, name), getattr(wanted, name)
                if theirs is None:
                    assert ours is None
                    continue
                assert len(ours) == len(theirs) == NEW
                assert all(t.dtype == torch.float32 and t.shape == (rows, 320) for t in ours)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert got.past_key_values.lengths == tuple(int(n) + NEW - 1 for n in mask.sum(dim=1))


def test_a_failure_after_the_text_leaves_the_text(pipe, model, monkeypatch):
    monkeypatch.setattr("pipespec.api.output.PipelineOutput", raise_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.generate(prompt(50), max_new_tokens=NEW, return_dict_in_generate=True)
    text = plain(model, prompt(50), max_new_tokens=NEW)
    assert torch.equal(pipe.partial, text)
    assert torch.equal(caught.value.partial, text)


def raise_out_of_memory(*arguments, **options):
    raise torch.OutOfMemoryError


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
    ids, mask = left_pad(random_prompts(3, seed=35))
    words = plain(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
    for kwargs in (
        {"inputs": ids, "attention_mask": mask},
        {"inputs": prompt(36)},
        {"input_ids": prompt(36), "eos_token_id": int(words[0, 4]), "pad_token_id": 2},
        {"inputs": ids, "attention_mask": mask, "eos_token_id": words[:, 4].tolist(), "pad_token_id": 2},
        {"inputs": ids, "attention_mask": mask, "suppress_tokens": words[:, 2].tolist()},
        {"inputs": prompt(36), "streamer": None, "assistant_model": None},
        {},
    ):
        kwargs |= {"max_new_tokens": NEW, "do_sample": False}
        pipe.report = None
        assert torch.equal(model.generate(custom_generate=pipe, **kwargs), model.generate(**kwargs))
        assert pipe.report is not None


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
