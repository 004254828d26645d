"""Masks with zeros anywhere, and calls with the new tokens only, have the meaning that they have in transformers' generate()."""

import copy
from contextlib import ExitStack

import pytest
import torch
from transformers import DynamicCache, GenerationMixin

from pipespec import Pipeline, attach
from pipespec.schedules.base import SpeedWarning
from pipespec_spd import SpeculativePipeline
from tests.conftest import left_pad, noisy, random_prompts
from tests.pipespec.faulty import Faulty
from tests.support.texts import chunk, own_text, same_text
from tests.support.texts import one_prompt as prompt
from tests.trials import trials

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


SCHEDULES = ("plain", "lockstep", *trials(ci=(), nightly=("workers",)))
"""Batches and turns with processes, too: ``tests/same_text``."""


@pytest.fixture(scope="module")
def pipes(model):
    draft, found = noisy(model, 0.02), {}
    with ExitStack() as stack:
        for name in SCHEDULES:
            pipe = Pipeline(model, draft, schedule=name, lookahead=None if name == "plain" else 3, trace=64)
            found[name] = stack.enter_context(pipe)
        yield found


@pytest.fixture
def pipe(pipes):
    return pipes["lockstep"]


def masked(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask. Masked columns hold ordinary ids, which must have no effect."""
    mask = torch.tensor(MASKS[name])
    rows = random_prompts(len(mask), seed=4, shortest=mask.shape[1], longest=mask.shape[1])
    return torch.stack(rows), mask


def plain(model, ids, **kwargs):
    return own_text(model, ids, **{"max_new_tokens": NEW} | kwargs)


def prompts(first: int, length: int, rows: int) -> torch.Tensor:
    return torch.cat([prompt(first + row, length) for row in range(rows)])


# ---- masks


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_masks_of_all_kinds(pipes, model, schedule, name):
    ids, mask = masked(name)
    pipe, kwargs = pipes[schedule], {"attention_mask": mask, "max_new_tokens": NEW}
    wanted = same_text(pipe, ids, **kwargs)
    if schedule == "lockstep":
        assert torch.equal(model.generate(ids, custom_generate=pipe, do_sample=False, **kwargs), wanted)
        assert pipe.report.stages[-1].accepted > 0 or name == "one token"
    # The next call, of another kind, has its own positions.
    same_text(pipe, ids, max_new_tokens=NEW)


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
        same_text(pipe, ids, max_new_tokens=NEW, **kwargs)
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


# ---- chats


CHATS = [(name, kind, "whole", "left of three") for name in SCHEDULES[1:] for kind in ("dynamic", "theirs")]
CHATS += [("lockstep", kind, "whole", "holes on the left") for kind in ("ours", "dynamic")]
CHATS += [
    (name, kind, "new", mask)
    for name in SCHEDULES
    for kind in ("ours", "dynamic", "theirs")
    for mask in ("one row", "left of three")
]


@pytest.mark.parametrize(("schedule", "kind", "given", "mask"), CHATS, ids=str)
def test_a_chat(pipes, model, schedule, kind, given, mask):
    """Three turns, each with the whole text or the new tokens. ``theirs``: transformers filled the cache, so its text is not known here."""
    pipe = pipes[schedule]
    if mask in MASKS:
        text, mask = masked(mask)
    else:
        text, mask = left_pad(random_prompts(1 if mask == "one row" else 3, seed=8, shortest=3, longest=9))
    rows, cache = len(text), None if kind == "ours" else DynamicCache()
    for turn in range(3):
        # The cache holds all but the last token.
        fed = text[:, -5:] if turn and given == "new" else text
        call, wanted = {"attention_mask": mask, "do_sample": False}, plain(model, text, attention_mask=mask)
        if turn and kind != "ours" and (given == "whole" or TAKES_NEW_TOKENS_ONLY):
            theirs = plain(model, fed, attention_mask=mask, past_key_values=copy.deepcopy(cache))
            assert torch.equal(theirs[:, -NEW:], wanted[:, -NEW:])
        by_transformers = turn == (0 if kind == "theirs" else 1) and kind != "ours" and given == "whole"
        generate = model.generate if by_transformers or (kind == "theirs" and turn == 0) else pipe.generate
        out = generate(fed, **call, max_new_tokens=NEW, past_key_values=cache, return_dict_in_generate=True)
        assert torch.equal(out.sequences, torch.cat([fed, wanted[:, -NEW:]], dim=1))
        cache = out.past_key_values
        assert cache.get_seq_length() == wanted.shape[1] - 1
        if generate == pipe.generate and turn:
            assert pipe.report.trace["target"]["prefill"].sum() == 4 * rows  # nothing is read twice
            # The drafts know the cached text, so they are right as often as with the whole text.
            if schedule == "lockstep" and kind != "theirs" and given == "new":
                assert pipe.report.stages[-1].accepted >= NEW // 2 * rows
        text, mask = chunk(wanted, mask, prompts(20 + 3 * turn, 4, rows))


@pytest.mark.skipif(not TAKES_NEW_TOKENS_ONLY, reason="transformers 5.0 does not take the new tokens only")
def test_processors_and_criteria_see_the_new_tokens_only(pipe, model):
    ids, mask = left_pad(random_prompts(2, seed=9, shortest=3, longest=9))
    cache = DynamicCache()
    text = plain(model, ids, attention_mask=mask, past_key_values=cache)
    text, mask = chunk(text, mask, prompts(30, 2, 2))
    new = text[:, -3:]
    words = plain(model, new, attention_mask=mask, past_key_values=copy.deepcopy(cache))
    for given in (
        {"repetition_penalty": 1.9},
        {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1},
        {"max_length": 9, "max_new_tokens": None},
        {"stopping_criteria": [lambda ids, scores: torch.full((2,), ids.shape[1] == 8)]},
        {"eos_token_id": [int(words[0, 6])], "pad_token_id": 0},
    ):
        kwargs = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False} | given
        same_text(pipe, new, **kwargs, fresh=lambda: {"past_key_values": copy.deepcopy(cache)})


def test_draws_do_not_depend_on_how_the_text_is_given(pipe, model):
    first = pipe.generate(prompt(10), max_new_tokens=NEW, return_dict_in_generate=True)
    whole = torch.cat([first.sequences, prompt(11, 3)], dim=1)
    sampled = {"do_sample": True, "top_k": 0, "seed": 5, "max_new_tokens": NEW}
    wanted = pipe.generate(whole, past_key_values=copy.deepcopy(first.past_key_values), **sampled)
    cache, new = first.past_key_values, whole[:, -4:]
    got = pipe.generate(new, attention_mask=torch.ones_like(whole), past_key_values=cache, **sampled)
    assert torch.equal(got[:, 4:], wanted[:, whole.shape[1] :])
    assert cache.get_seq_length() == wanted.shape[1] - 1


def test_new_tokens_that_do_not_fit_the_cache(pipe, model):
    """What transformers then does is its own affair, an error included."""
    first = pipe.generate(prompt(12), max_new_tokens=NEW, return_dict_in_generate=True)
    cache, new = first.past_key_values, prompt(13, 3)
    for mask in ({"attention_mask": torch.ones(1, 21, dtype=torch.long)}, {}):
        given = {"max_new_tokens": NEW, "do_sample": False, **mask}
        found = []
        for generate in (model.generate, pipe.generate):
            try:
                found.append(generate(new, **given, past_key_values=copy.deepcopy(cache)).tolist())
            except (RuntimeError, ValueError, IndexError) as error:
                found.append(type(error))
        assert found[0] == found[1]
    with pytest.raises(ValueError, match="attention_mask has shape"):
        pipe.generate(new, attention_mask=torch.ones(1, 21), max_new_tokens=2)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_call_with_new_tokens_that_fails_leaves_the_cache_as_it_was(model, is_known):
    """Zeros that stood for unknown tokens do not become a part of its text."""
    target = Faulty.like(model)
    pipe = Pipeline(target, noisy(model, 0.02), lookahead=3, schedule="lockstep")
    first = pipe.generate(prompt(14), max_new_tokens=NEW, return_dict_in_generate=True)
    cache, whole = first.past_key_values, torch.cat([first.sequences, prompt(15, 3)], dim=1)
    if not is_known:
        cache = copy.deepcopy(cache)
    given = {"attention_mask": torch.ones_like(whole), "past_key_values": cache, "max_new_tokens": NEW}
    target.set(fail_at=2)
    with pytest.raises(ArithmeticError):
        pipe.generate(whole[:, -4:], **given)
    target.set()
    assert cache.get_seq_length() == 19
    got = pipe.generate(whole[:, -4:], **given)
    assert torch.equal(got[:, 4:], plain(model, whole)[:, whole.shape[1] :])
    longer = torch.cat([whole[:, :-4], got, prompt(16, 2)], dim=1)
    assert torch.equal(pipe.generate(longer, past_key_values=cache, max_new_tokens=NEW), plain(model, longer))
