"""Masks with zeros anywhere, and calls with the new tokens only, have the meaning that they have in transformers' generate()."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, GenerationMixin

from pipespec import Pipeline, attach
from pipespec.engine.cache import RowCache
from pipespec.schedules.base import SpeedWarning
from pipespec_spd import SpeculativePipeline
from tests.conftest import left_pad, noisy, random_prompts
from tests.pipespec.faulty import Faulty

NEW = 12

# transformers 5.0 cannot.
TAKES_NEW_TOKENS_ONLY = hasattr(GenerationMixin, "_prepare_position_ids_for_generation")

# In older versions a repetition penalty applies to padding, too.
LEAVES_OUT_PADDING = "padding_lengths" in GenerationMixin._get_logits_processor.__code__.co_varnames

MASKS = {
    "left": [[0, 0, 1, 1, 1, 1, 1]],
    "one token": [[0, 0, 0, 0, 0, 0, 1]],
    "holes": [[1, 0, 1, 1, 0, 0, 1]],
    "all kinds": [[1, 1, 1, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1, 1]],
    "triangle": [[0, 0, 1], [0, 1, 1], [1, 1, 1]],
    "holes on the left": [[0, 0, 1, 0, 1, 1], [1, 0, 0, 1, 1, 1]],
}


@pytest.fixture(scope="module")
def pipes(model):
    drafts = [noisy(model, 0.02)]
    with Pipeline(model, drafts, schedule="workers") as workers:
        yield {
            "plain": Pipeline(model, drafts, schedule="plain"),
            "lockstep": Pipeline(model, [noisy(model, 0.02)], lookahead=3, schedule="lockstep"),
            "workers": workers,
        }


@pytest.fixture
def pipe(pipes):
    return pipes["lockstep"]


def masked(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask. Masked columns hold ordinary ids, which must have no effect."""
    mask = torch.tensor(MASKS[name])
    rows = random_prompts(len(mask), seed=4, shortest=mask.shape[1], longest=mask.shape[1])
    return torch.stack(rows), mask


def prompt(seed: int, length: int = 8) -> torch.Tensor:
    return random_prompts(1, seed=seed, shortest=length, longest=length)[0][None]


def plain(model, ids, **kwargs):
    return model.generate(ids, do_sample=False, **{"max_new_tokens": NEW} | kwargs)


# ---- masks


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("schedule", ["plain", "lockstep", "workers"])
def test_masks_of_all_kinds(pipes, model, schedule, name):
    ids, mask = masked(name)
    pipe, kwargs = pipes[schedule], {"attention_mask": mask, "max_new_tokens": NEW}
    wanted = plain(model, ids, **kwargs)
    assert torch.equal(pipe.generate(ids, **kwargs), wanted)
    if schedule == "lockstep":
        assert torch.equal(model.generate(ids, custom_generate=pipe, do_sample=False, **kwargs), wanted)
        assert pipe.report.stages[-1].accepted > 0 or name == "one token"
    # The next call, of another kind, has its own positions.
    assert torch.equal(pipe.generate(ids, max_new_tokens=NEW), plain(model, ids))


@pytest.mark.parametrize("name", ["all kinds", "left"])
def test_scores_processors_and_ends_with_such_masks(pipe, model, name):
    """Processors get all columns, padding included."""
    ids, mask = masked(name)
    kwargs = {"attention_mask": mask, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    words = plain(model, ids, attention_mask=mask)[:, ids.shape[1] :]
    for given in (
        {"no_repeat_ngram_size": 1},
        {"repetition_penalty": 1.7, "output_scores": False},
        {"repetition_penalty": 1.7, "suppress_tokens": [int(words[0, 1])]},
        {"eos_token_id": [int(row[3]) for row in words], "pad_token_id": 0},
    ):
        got, wanted = (generate(ids, max_new_tokens=NEW, do_sample=False, **kwargs | given) for generate in (pipe.generate, model.generate))  # fmt: skip
        if "repetition_penalty" in given and not LEAVES_OUT_PADDING:
            continue
        assert torch.equal(got.sequences, wanted.sequences), given
        for row, text in enumerate(wanted.sequences[:, ids.shape[1] :].tolist()):
            ends = [i for i, token in enumerate(text) if token in given.get("eos_token_id", [])]
            for ours, theirs in zip(got.logits[: (ends or [NEW])[0]], wanted.logits, strict=False):
                torch.testing.assert_close(ours[row], theirs[row], rtol=1e-4, atol=1e-4)


def test_the_pad_token_stands_for_a_mask(pipe, model):
    """Without a mask transformers infers one, unless the pad token may end a text."""
    ids, mask = masked("all kinds")
    ids = ids.masked_fill(mask == 0, 0)
    for kwargs in ({}, {"eos_token_id": [0, 3]}):
        assert torch.equal(pipe.generate(ids, max_new_tokens=NEW, **kwargs), plain(model, ids, **kwargs))
    assert not torch.equal(plain(model, ids), plain(model, ids, attention_mask=torch.ones_like(ids)))


def test_rows_that_end_with_padding(pipes, model):
    """A pipeline refuses them. An attached model leaves them to transformers, which continues from the padding."""
    ids = masked("left")[0]
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    stages = SpeculativePipeline(model, "ngram", stages=2)
    for pipe in (*pipes.values(), stages):
        with pytest.raises(NotImplementedError, match=r"attention_mask: row 0 ends with padding; pad on the left"):
            pipe.generate(ids, **kwargs)
    target = copy.deepcopy(model)
    with attach(target, noisy(model, 0.02), schedule="lockstep") as pipe:
        with pytest.warns(SpeedWarning, match="ends with padding"):
            assert torch.equal(target.generate(ids, **kwargs), plain(model, ids, attention_mask=mask))
        assert pipe.report is None


@pytest.mark.parametrize("kind", ["ours", "dynamic"])
def test_a_cache_of_a_text_with_holes_goes_on(pipe, model, kind):
    ids, mask = masked("holes on the left")
    cache = DynamicCache() if kind == "dynamic" else None
    out = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, past_key_values=cache, return_dict_in_generate=True)  # fmt: skip
    assert torch.equal(out.sequences, plain(model, ids, attention_mask=mask))
    longer = torch.cat([out.sequences, torch.cat([prompt(5, 3), prompt(6, 3)])], dim=1)
    mask = torch.cat([mask, torch.ones(2, NEW + 3, dtype=mask.dtype)], dim=1)
    wanted = plain(model, longer, attention_mask=mask)
    if kind == "dynamic":
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        theirs = copy.deepcopy(cache)
        assert torch.equal(plain(model, longer, attention_mask=mask, past_key_values=theirs), wanted)
    got = pipe.generate(longer, attention_mask=mask, max_new_tokens=NEW, past_key_values=out.past_key_values)
    assert torch.equal(got, wanted)


# ---- new tokens only


@pytest.mark.parametrize("schedule", ["plain", "lockstep", "workers"])
@pytest.mark.parametrize("kind", ["ours", "dynamic", "theirs"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_chat_with_the_new_tokens_only(pipes, model, schedule, kind, rows):
    """``theirs``: transformers filled the cache, so its text is not known here."""
    pipe = pipes[schedule]
    ids, mask = left_pad(random_prompts(rows, seed=8, shortest=3, longest=9))
    cache = None
    if kind != "ours":
        cache = DynamicCache()
    if kind == "theirs":
        text = plain(model, ids, attention_mask=mask, past_key_values=cache)
    else:
        given = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True}
        out = pipe.generate(ids, past_key_values=cache, **given)
        text, cache = out.sequences, out.past_key_values
    for turn in range(2):
        # The cache holds all but the last token.
        new = torch.cat([text[:, -1:], torch.cat([prompt(20 + 3 * turn + row, 4) for row in range(rows)])], dim=1)
        text = torch.cat([text[:, :-1], new], dim=1)
        mask = torch.cat([mask, mask.new_ones((rows, text.shape[1] - mask.shape[1]))], dim=1)
        wanted = plain(model, text, attention_mask=mask)
        if TAKES_NEW_TOKENS_ONLY and kind != "ours":
            theirs = plain(model, new, attention_mask=mask, past_key_values=copy.deepcopy(cache))
            assert torch.equal(theirs[:, -NEW:], wanted[:, -NEW:])
        got = pipe.generate(new, attention_mask=mask, max_new_tokens=NEW, past_key_values=cache)
        assert torch.equal(got, torch.cat([new, wanted[:, -NEW:]], dim=1))
        if schedule == "lockstep" and kind != "theirs":
            # The drafts know the cached text, so they are right as often as with the whole text.
            assert pipe.report.stages[-1].accepted >= NEW // 2 * rows
        text = wanted
        assert cache.get_seq_length() == text.shape[1] - 1 - (int((mask == 0).sum(dim=1).min()) if kind == "ours" else 0)  # fmt: skip


@pytest.mark.skipif(not TAKES_NEW_TOKENS_ONLY, reason="transformers 5.0 does not take the new tokens only")
def test_processors_and_criteria_see_the_new_tokens_only(pipe, model):
    ids, mask = left_pad(random_prompts(2, seed=9, shortest=3, longest=9))
    cache = DynamicCache()
    text = plain(model, ids, attention_mask=mask, past_key_values=cache)
    new = torch.cat([text[:, -1:], torch.cat([prompt(30, 2), prompt(31, 2)])], dim=1)
    mask = torch.cat([mask, mask.new_ones((2, NEW + 2))], dim=1)
    words = plain(model, new, attention_mask=mask, past_key_values=copy.deepcopy(cache))
    for given in (
        {"repetition_penalty": 1.9},
        {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1},
        {"max_length": 9, "max_new_tokens": None},
        {"stopping_criteria": [lambda ids, scores: torch.full((2,), ids.shape[1] == 8)]},
        {"eos_token_id": [int(words[0, 6])], "pad_token_id": 0},
    ):
        kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False} | given
        got, wanted = (
            generate(new, past_key_values=copy.deepcopy(cache), **kwargs)
            for generate in (pipe.generate, model.generate)
        )
        assert torch.equal(got, wanted), given


def test_draws_do_not_depend_on_how_the_text_is_given(pipe, model):
    first = pipe.generate(prompt(10), max_new_tokens=NEW, return_dict_in_generate=True)
    whole = torch.cat([first.sequences, prompt(11, 3)], dim=1)
    sampled = {"do_sample": True, "top_k": 0, "seed": 5, "max_new_tokens": NEW}
    wanted = pipe.generate(whole, past_key_values=copy.deepcopy(first.past_key_values), **sampled)
    cache, new = first.past_key_values, whole[:, -4:]
    got = pipe.generate(new, attention_mask=torch.ones_like(whole), past_key_values=cache, **sampled)
    assert torch.equal(got[:, 4:], wanted[:, whole.shape[1] :])
    assert [t.tolist() for t in cache.text] == [wanted[0, :-1].tolist()]


def test_new_tokens_that_do_not_fit_the_cache(pipe, model):
    first = pipe.generate(prompt(12), max_new_tokens=NEW, return_dict_in_generate=True)
    ours, theirs = first.past_key_values, DynamicCache()
    plain(model, prompt(12), past_key_values=theirs)
    new = prompt(13, 3)
    for cache, match in ((ours, "holds 19 tokens of row 0, and attention_mask has 18"), (theirs, "holds 19 columns, and attention_mask has 18")):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            pipe.generate(new, attention_mask=torch.ones(1, 21), past_key_values=cache, max_new_tokens=2)
        with pytest.raises(
            ValueError, match=r"holds 19 tokens of row 0, input_ids only 3.*attention_mask of the whole"
        ):
            pipe.generate(new, past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == 19
    with pytest.raises(ValueError, match="attention_mask has shape"):
        pipe.generate(new, attention_mask=torch.ones(1, 21), max_new_tokens=2)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_call_with_new_tokens_that_fails_leaves_the_cache_as_it_was(model, is_known):
    """Its text stays known, and zeros that stood for unknown tokens do not become a part of it."""
    target = Faulty.like(model)
    pipe = Pipeline(target, noisy(model, 0.02), lookahead=3, schedule="lockstep")
    first = pipe.generate(prompt(14), max_new_tokens=NEW, return_dict_in_generate=True)
    cache, whole = first.past_key_values, torch.cat([first.sequences, prompt(15, 3)], dim=1)
    if not is_known:
        cache.text = None
    given = {"attention_mask": torch.ones_like(whole), "past_key_values": cache, "max_new_tokens": NEW}
    target.set(fail_at=2)
    with pytest.raises(ArithmeticError):
        pipe.generate(whole[:, -4:], **given)
    target.set()
    assert cache.lengths == (19,)
    assert (cache.text is not None) == is_known
    got = pipe.generate(whole[:, -4:], **given)
    assert torch.equal(got[:, 4:], plain(model, whole)[:, whole.shape[1] :])
    assert (cache.text is not None) == is_known
    longer = torch.cat([whole[:, :-4], got, prompt(16, 2)], dim=1)
    assert torch.equal(pipe.generate(longer, past_key_values=cache, max_new_tokens=NEW), plain(model, longer))
    assert isinstance(cache, RowCache)
