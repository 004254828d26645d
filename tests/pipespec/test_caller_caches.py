"""Caches of callers: what a call returns is transformers' cache, and any state that transformers accepts goes on as it would there."""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, StaticCache

import pipespec
from pipespec import Pipeline, SpeedWarning
from pipespec.api.fallback import TRANSFORMERS
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.pipespec.hostile import CALLS, SURGERY, Turn
from tests.pipespec.tiny_models import TINY_MODELS, WINDOW, make
from tests.support.caches import content, same_content
from tests.support.texts import one_prompt as prompt
from tests.support.texts import own_text
from tests.support.ways import opened
from tests.trials import trials

NEW = 8
WINDOWED = "mistral, window"
WAYS = ["plain", "lockstep", "plain, captured", "lockstep, captured", "streams", "workers", "spd"]
DICT = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return random_llama(6)


def batch(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return left_pad(random_prompts(3, seed=seed, shortest=3, longest=11))


def plain(target: Any, *args: Any, **kwargs: Any) -> Any:
    return GenerationMixin.generate(target, *args, **kwargs)


def ends_of(model: Any) -> list[int]:
    """Tokens at which rows of :func:`batch` end early, and at different times."""
    ids, mask = batch()
    ids = ids.clamp(max=model.config.vocab_size - 1)
    text = own_text(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
    return [int(text[0, 2]), int(text[2, 4])]


def text_is_by(pipe: Any) -> str:
    return TRANSFORMERS if pipe.report.schedule == TRANSFORMERS else "us"


# ---- what goes out


@pytest.mark.parametrize(
    ("how", "kind", "attention"),
    [(how, "llama", "pipespec" if "captured" in how or how == "streams" else "sdpa") for how in WAYS]
    + [("plain", kind, attention) for kind in ("llama", WINDOWED) for attention in ("sdpa", "eager")],
)
def test_what_is_returned_is_what_transformers_returns(model, how, kind, attention):
    """Columns of padding, of rows that have ended, and windows included."""
    target = copy.deepcopy(model) if kind == "llama" else make(kind)
    draft = noisy(target, 0.02)
    target.set_attn_implementation(attention)
    ids, mask = batch()
    ids = ids.clamp(max=target.config.vocab_size - 1)
    for ends in (None, ends_of(target)):
        given = {"attention_mask": mask, "eos_token_id": ends, "max_new_tokens": NEW, **DICT}
        with opened(target, draft, how) as pipe:
            ours, again = pipe.generate(ids, **given), pipe.generate(ids, **given)
        theirs = plain(target, ids, **given)
        assert torch.equal(ours.sequences, theirs.sequences)
        same_content(ours.past_key_values, theirs.past_key_values)
        same_content(again.past_key_values, theirs.past_key_values)


def test_a_returned_cache_is_used_as_any_other(model):
    """Beyond the length that the call foresaw, in a loop of the caller's; with gradients; by rows; and the pipeline is not affected."""
    pipe = Pipeline(model, noisy(model, 0.02), schedule="lockstep")
    out, theirs = (call(prompt(1), max_new_tokens=NEW, **DICT) for call in (pipe.generate, model.generate))
    caches = out.past_key_values, theirs.past_key_values
    assert type(caches[0]) is DynamicCache
    assert not any(x.is_inference() for x in content(caches[0])[1])
    texts: list[list[int]] = [[], []]
    for cache, text in zip(map(copy.deepcopy, caches), texts, strict=True):
        token = out.sequences[:, -1:]
        with torch.no_grad():
            for _ in range(150):
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                text.append(int(token))
    assert texts[0] == texts[1]
    more = prompt(2)
    losses = [model(more, past_key_values=cache, labels=more).loss for cache in caches]
    grads = [torch.autograd.grad(loss, model.lm_head.weight)[0] for loss in losses]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert torch.equal(pipe.generate(out.sequences, max_new_tokens=5), own_text(model, out.sequences, max_new_tokens=5))


# ---- turns of a batch


@pytest.mark.parametrize("given", ["none", "a DynamicCache"])
@pytest.mark.parametrize("how", WAYS)
def test_turns_of_rows_that_end_at_different_times(model, how, given):
    """The mask is of ones over what stands after the end of a row, as a program without care makes it, or of zeros."""
    ends = ends_of(model)
    with opened(model, noisy(model, 0.02), how) as pipe:
        for shows in (1, 0):
            ids, mask = batch()
            caches: list[Any] = [None, None] if given == "none" else [DynamicCache(), DynamicCache()]
            for turn in range(3):
                call = {"attention_mask": mask, "eos_token_id": ends, "max_new_tokens": NEW, **DICT}
                ours, theirs = (
                    generate(ids, past_key_values=cache, **call)
                    for generate, cache in zip((pipe.generate, model.generate), caches, strict=True)
                )
                assert torch.equal(ours.sequences, theirs.sequences)
                caches = [ours.past_key_values, theirs.past_key_values]
                same_content(*caches)
                assert text_is_by(pipe) == "us"
                new = ours.sequences[:, ids.shape[1] :]
                told, said = left_pad(random_prompts(3, seed=20 + turn, shortest=2, longest=4))
                made = torch.ones_like(new) if shows else (new != 0).long()
                ids, mask = torch.cat([ours.sequences, told], 1), torch.cat([mask, made, said], 1)


def test_what_an_edited_cache_holds_is_of_its_own_calls_only(model):
    """Its keys are not those of its text. A later call with that text, and without the cache, has the text's."""
    pipe = Pipeline(model, noisy(model, 0.02), schedule="lockstep")
    first = pipe.generate(prompt(3), max_new_tokens=NEW, **DICT)
    longer = torch.cat([first.sequences, prompt(4)], 1)
    for layer in first.past_key_values.layers:
        layer.values.data.mul_(-1)
    wanted = plain(model, longer, max_new_tokens=NEW, past_key_values=copy.deepcopy(first.past_key_values), **DICT)
    true = own_text(model, longer, max_new_tokens=NEW)
    assert not torch.equal(wanted.sequences, true)
    got = pipe.generate(longer, max_new_tokens=NEW, past_key_values=first.past_key_values, **DICT)
    assert torch.equal(got.sequences, wanted.sequences)
    assert text_is_by(pipe) == "us"
    same_content(got.past_key_values, wanted.past_key_values)
    for cache in (None, DynamicCache()):
        assert torch.equal(pipe.generate(longer, max_new_tokens=NEW, past_key_values=cache), true)


# ---- which states are continued here


def test_windows_that_hold_their_last_columns_only():
    target = make(WINDOWED)
    pipe = Pipeline(target, noisy(target, 0.02), schedule="lockstep", trace=64)
    ids = prompt(5, WINDOW + 5).clamp(max=target.config.vocab_size - 1)
    first = plain(target, ids, max_new_tokens=NEW, **DICT)
    assert first.past_key_values.layers[0].keys.shape[2] == WINDOW - 1
    longer = torch.cat([first.sequences, ids[:, :3]], 1)
    got = pipe.generate(longer, max_new_tokens=NEW, past_key_values=first.past_key_values)
    assert torch.equal(got, own_text(target, longer, max_new_tokens=NEW))
    assert text_is_by(pipe) == "us"
    assert pipe.report.trace["target"]["prefill"].sum() == 3
    # A text that is shorter than what the windows have, of which the pipeline may have kept a part.
    shorter = longer[:, : WINDOW + 3]
    assert torch.equal(pipe.generate(shorter, max_new_tokens=NEW), own_text(target, shorter, max_new_tokens=NEW))


SHARED = "gemma4, mixed, shared keys"


@pytest.mark.skipif(SHARED not in TINY_MODELS, reason="this version of transformers has no such layers")
@pytest.mark.parametrize("has_all_layers", [True, False])
def test_layers_that_read_the_keys_of_others_keep_nothing(has_all_layers):
    """Their layers in a cache of the configuration are empty, and a cache without one has none for the last of them."""
    target = make(SHARED)
    pipe = Pipeline(target, noisy(target, 0.02), schedule="lockstep", trace=64)
    ids = prompt(5, WINDOW + 5).clamp(max=target.config.vocab_size - 1)
    cache = DynamicCache(config=target.config) if has_all_layers else DynamicCache()
    first = plain(target, ids, max_new_tokens=NEW, past_key_values=cache, **DICT)
    assert len(first.past_key_values.layers) == (4 if has_all_layers else 2)
    longer = torch.cat([first.sequences, ids[:, :3]], 1)
    given = {"attention_mask": torch.ones_like(longer), "max_new_tokens": NEW}  # its text may hold the id of padding
    got = pipe.generate(longer, past_key_values=first.past_key_values, **given)
    assert torch.equal(got, own_text(target, longer, **given))
    assert text_is_by(pipe) == "us"
    assert pipe.report.trace["target"]["prefill"].sum() == 3


def _cropped_window(target: Any, ids: torch.Tensor) -> Any:
    cache = plain(target, ids, max_new_tokens=2, **DICT).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]
    return cache


LEFT: dict[str, tuple[str, str, Any]] = {
    "static": ("llama", "is a StaticCache", lambda target, ids: StaticCache(config=target.config, max_cache_len=60)),
    "own class": ("llama", "is a Rounded", lambda target, ids: CALLS["cache of a subclass"]()["past_key_values"]),
    "own layers": ("llama", "methods or layers of its own", lambda target, ids: CALLS["cache with layers"]()["past_key_values"]),
    "own update": ("llama", "methods or layers of its own", lambda target, ids: CALLS["cache with an update"]()["past_key_values"]),
    "unequal": ("llama", "other columns in some layers", lambda target, ids: _shorter_in_one_layer(target, ids)),
    "dtype": ("llama", "is not of torch.float32", lambda target, ids: _in_double(target, ids)),
    "window": (WINDOWED, "other columns in some layers", _cropped_window),
}  # fmt: skip


def _shorter_in_one_layer(target: Any, ids: torch.Tensor) -> Any:
    cache = plain(target, ids, max_new_tokens=2, **DICT).past_key_values
    last = cache.layers[-1]
    last.keys, last.values = last.keys[:, :, :0], last.values[:, :, :0]
    return cache


def _in_double(target: Any, ids: torch.Tensor) -> Any:
    cache = plain(target, ids, max_new_tokens=2, **DICT).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    return cache


@pytest.mark.parametrize("through", ["Pipeline", "attach"])
@pytest.mark.parametrize("name", LEFT)
def test_other_states_are_left_to_transformers(name, through):
    """With one line that says why. An error is transformers' own."""
    kind, why, make_cache = LEFT[name]
    target = random_llama(6) if kind == "llama" else make(kind)
    ids = prompt(6, WINDOW + 5).clamp(max=target.config.vocab_size - 1)
    cache, theirs = make_cache(target, ids), make_cache(target, ids)
    longer = torch.cat([ids, ids[:, :4]], 1)
    try:
        wanted: Any = plain(target, longer, max_new_tokens=4, do_sample=False, past_key_values=theirs)
    except RuntimeError as error:
        wanted = error
    pipe = Pipeline(target, schedule="plain") if through == "Pipeline" else pipespec.attach(target, schedule="plain")
    generate = pipe.generate if through == "Pipeline" else target.generate
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if isinstance(wanted, Exception):
            with pytest.raises(type(wanted)):
                generate(longer, max_new_tokens=4, do_sample=False, past_key_values=cache)
        else:
            assert torch.equal(generate(longer, max_new_tokens=4, do_sample=False, past_key_values=cache), wanted)
    lines = [str(w.message) for w in said if issubclass(w.category, SpeedWarning)]
    assert len(lines) == 1
    assert why in lines[0]


# ---- any of these, drawn at random


KINDS = [
    name
    for name in ("llama", WINDOWED, "qwen3, mixed", "qwen3_next, recurrent", "gemma4, mixed, shared keys")
    if name in TINY_MODELS
]


class Conversation:
    """Two to four turns of a drawn model, with a drawn change between them. ``seed`` decides everything."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.kind, self.attention = draw.choice(KINDS), draw.choice(("sdpa", "eager"))
        self.schedule = draw.choice(("plain", "lockstep"))
        self.rows, self.length = draw.choice((1, 2, 3)), draw.randint(3, 2 * WINDOW)
        self.pads = draw.choice((False, True))
        self.begins = draw.choice(("none", "dynamic", "config"))
        self.ends = [draw.randrange(3, 90) for _ in range(draw.choice((0, 0, 20)))] or None
        self.turns = [
            (
                draw.choice(list(SURGERY)),
                draw.choice(("ones", "real")),
                draw.choice(("whole", "new")),
                draw.randint(1, 6),
            )
            for _ in range(draw.randint(2, 4))
        ]
        self.seed = seed

    def said_by(self, model: Any) -> list[Any]:
        """The texts, and what the caches hold, as a program sees them."""
        noise = torch.Generator().manual_seed(self.seed)

        def told(columns: int) -> torch.Tensor:
            return torch.randint(3, 90, (self.rows, columns), generator=noise)

        text = told(self.length)
        mask = torch.ones_like(text)
        for row in range(self.rows if self.pads else 0):
            mask[row, : (row * 3 + self.seed) % self.length] = 0
        cache: Any = {"none": None, "dynamic": DynamicCache(), "config": DynamicCache(config=model.config)}[self.begins]
        found: list[Any] = []
        for surgery, marks, how, new in self.turns:
            held = 0 if cache is None else int(cache.get_seq_length())
            skipped = held if how == "new" and 0 < held < text.shape[1] else 0
            out = model.generate(
                text[:, skipped:], attention_mask=mask, past_key_values=cache, max_new_tokens=new,
                eos_token_id=self.ends, **DICT,
            )  # fmt: skip
            made = out.sequences[:, text.shape[1] - skipped :]
            more = torch.randint(3, 90, (len(text), 1 + new % 3), generator=noise)
            shown = torch.ones_like(made) if marks == "ones" else (made != 0).long()
            turn = Turn(
                out.past_key_values,
                torch.cat([text, made, more], 1),
                torch.cat([mask, shown, torch.ones_like(more)], 1),
            )
            found += [out.sequences, *content(turn.cache)[1]]
            SURGERY[surgery](turn)
            cache, text, mask = turn.cache, turn.text, turn.mask
        found.append(model.generate(text, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0))
        return found


@pytest.mark.parametrize("seed", range(trials(ci=40, nightly=3000)))
def test_any_conversation(seed):
    drawn = Conversation(seed)
    bare, model = (make(drawn.kind, seed % 5) for _ in range(2))
    for each in (bare, model):
        each.set_attn_implementation(drawn.attention)
    try:
        wanted = drawn.said_by(bare)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        pytest.skip("transformers does not go on there")
    draft = noisy(model, 0.02) if drawn.schedule == "lockstep" else None
    with warnings.catch_warnings(), pipespec.attach(model, draft, schedule=drawn.schedule):
        warnings.simplefilter("ignore", SpeedWarning)
        got = drawn.said_by(model)
    for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, msg=lambda text, i=i: f"{i}: {text}")
