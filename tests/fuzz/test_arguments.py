"""Arguments of `Pipeline`, `SpeculationConfig` and `generate()`: each is refused by its name before any work, or the text is the target's."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pipespec import Pipeline
from pipespec.api.arguments import ARGUMENTS, OWN
from pipespec.config import SpeculationConfig
from tests.conftest import noisy, random_llama
from tests.fuzz.mutations import ODD_NUMBERS, ODD_TEXTS, VALUES, examples

PROMPT = torch.tensor([[5, 6, 7, 8]])
REFUSALS = (ValueError, TypeError, NotImplementedError)

ODD = st.one_of(
    VALUES,
    ODD_NUMBERS.map(np.float64),
    st.integers(-3, 9).map(np.int32),
    st.integers(-3, 9).map(torch.tensor),
    st.sampled_from([torch.zeros(0), torch.ones((2, 2)), torch.tensor([[1, 2]]), torch.tensor(float("nan")), b"x", object(), len, {1}, range(3), (1, 2), 1j]),
    st.lists(st.integers(-2, 330), max_size=4),
    st.lists(st.lists(st.integers(-2, 330), max_size=3), max_size=3),
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return random_llama(3, hidden=16)


@pytest.fixture(scope="module")
def pipeline(target):
    return Pipeline(target, noisy(target, 0.02), schedule="lockstep")


# ---- generate()

_LARGE = {
    "max_new_tokens",
    "max_length",
    "num_return_sequences",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
}
NAMES = sorted(set(ARGUMENTS) - {"custom_generate", "trust_remote_code", "max_time"} - _LARGE)
"""`max_time` depends on the clock, `custom_generate` calls what it is given, and large values of some others are long work in transformers, too."""


def same(a: Any, b: Any) -> bool:
    a, b = (out if isinstance(out, torch.Tensor) else out.sequences for out in (a, b))
    return torch.equal(a, b)


def call(pipeline: Pipeline, given_: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipeline.generate(PROMPT, **{"max_new_tokens": 4} | given_)


@examples(15, 3000)
@given(name=st.sampled_from(NAMES), value=ODD, sampled=st.booleans())
@example(name="repetition_penalty", value="x", sampled=False)
@example(name="top_k", value="x", sampled=True)
@example(name="temperature", value="x", sampled=True)
@example(name="suppress_tokens", value=[10**30], sampled=False)
@example(name="attention_mask", value=torch.zeros(0), sampled=False)
@example(name="stopping_criteria", value=[5], sampled=False)
@example(name="logits_processor", value=[5], sampled=False)
@example(name="prefix_allowed_tokens_fn", value=5, sampled=False)
@example(name="streamer", value=5, sampled=False)
@example(name="seed", value=10**30, sampled=True)
@example(name="past_key_values", value=5, sampled=False)
@example(name="generation_config", value=5, sampled=False)
@example(name="prefill_chunk_size", value="x", sampled=False)
@example(name="prefill_chunk_size", value=0, sampled=False)
@example(name="watermarking_config", value={"a": 1}, sampled=False)
@example(name="bad_words_ids", value=[[10**30]], sampled=False)
@example(name="position_ids", value="x", sampled=False)
@example(name="eos_token_id", value=2**31, sampled=False)
@example(name="pad_token_id", value=[1, 2], sampled=False)
@example(name="frequency_penalty", value=1e300, sampled=False)
@example(name="repetition_penalty", value=1e300, sampled=False)
@example(name="repetition_penalty", value=1e-300, sampled=False)
@example(name="decoder_start_token_id", value=torch.tensor(float("nan")), sampled=False)
def test_one_argument_of_generate(pipeline, target, name, value, sampled) -> None:
    given_ = {name: value} | ({"do_sample": True, "seed": 7} if sampled and name not in ("do_sample", "seed") else {})
    try:
        call(pipeline, given_)
    except Exception as error:
        check_refusal(error, name, given_, target)
    # Whatever it was, the next call is fine.
    assert same(call(pipeline, {}), target.generate(PROMPT, max_new_tokens=4, do_sample=False))


def check_refusal(error: Exception, name: str, given_: dict[str, Any], target: Any) -> None:
    """The message has the argument's name, or it is that of transformers' `generate()` for the same call."""
    words = {name, name.replace("_", " ")}
    if name in ("inputs", "input_ids"):
        words |= {"prompt", "input_ids"}
    words.add("no token can be drawn")  # scores that a huge penalty has made infinite, found when they are there
    if any(word.lower() in str(error).lower() for word in words):
        return
    theirs = {k: v for k, v in given_.items() if k not in OWN}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:  # noqa: PT011  whatever transformers raises
            target.generate(PROMPT, **{"max_new_tokens": 4} | theirs)
    # A number of numpy reads differently in the two.
    assert re.split(r"tensor|-?\d", str(caught.value))[0] == re.split(r"tensor|-?\d", str(error))[0], (
        f"{type(error).__name__}: {error}"
    )


def test_a_normalization_of_infinite_scores(pipeline, target) -> None:
    """All of them become NaN, and the first token wins, even one that is suppressed."""
    given_ = {
        "exponential_decay_length_penalty": (1, 2.0),
        "eos_token_id": 1,
        "suppress_tokens": [0],
        "forced_eos_token_id": 2,
    }
    given_ |= {
        "do_sample": False,
        "pad_token_id": 0,
        "renormalize_logits": True,
        "remove_invalid_values": True,
        "max_new_tokens": 4,
    }
    wanted = target.generate(PROMPT, **given_)
    assert wanted[0, -1] == 0
    assert same(call(pipeline, given_), wanted)


@examples(6, 1500)
@given(data=st.data())
def test_greedy_texts_are_the_targets(pipeline, target, data) -> None:
    """Plausible values of several arguments: the same text as transformers', or a refusal of both or of ours."""
    numbers = st.one_of(st.floats(0.1, 3), st.integers(1, 5))
    tokens = st.lists(st.integers(0, 319), min_size=1, max_size=3)
    given_ = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "repetition_penalty": numbers, "no_repeat_ngram_size": st.integers(0, 3), "min_new_tokens": st.integers(0, 5),
                "bad_words_ids": st.lists(tokens, min_size=1, max_size=2), "suppress_tokens": tokens, "begin_suppress_tokens": tokens,
                "eos_token_id": st.one_of(st.integers(0, 319), tokens), "forced_eos_token_id": st.integers(0, 319),
                "max_new_tokens": st.integers(1, 8), "temperature": numbers, "renormalize_logits": st.booleans(),
                "remove_invalid_values": st.booleans(), "encoder_repetition_penalty": numbers, "pad_token_id": st.integers(0, 319),
                "exponential_decay_length_penalty": st.tuples(st.integers(1, 4), st.floats(1, 2)),
            },
        )
    )  # fmt: skip
    given_ = {"do_sample": False, "pad_token_id": 0} | given_
    try:
        wanted = target.generate(PROMPT, **{"max_new_tokens": 4} | given_)
    except (ValueError, RuntimeError) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            call(pipeline, given_)
        return
    assert same(call(pipeline, given_), wanted)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("streamer", 5), ("streamer", "x"), ("logits_processor", [5]), ("logits_processor", "x"), ("stopping_criteria", 5), ("stopping_criteria", [5]),
        ("prefill_chunk_size", "x"), ("prefill_chunk_size", -1), ("prefill_chunk_size", True), ("prefill_chunk_size", 0.5), ("position_ids", "x"), ("position_ids", object()),
        ("watermarking_config", 5), ("watermarking_config", []), ("exponential_decay_length_penalty", []), ("exponential_decay_length_penalty", "x"),
        ("suppress_tokens", [None]), ("suppress_tokens", 5), ("begin_suppress_tokens", np.int32(0)), ("forced_eos_token_id", {"a": 1}), ("forced_eos_token_id", True),
        ("num_beams", torch.ones((2, 2))), ("do_sample", torch.zeros(0)), ("top_k", torch.ones((2, 2))),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_values_that_are_refused_by_name(pipeline, monkeypatch, name, value) -> None:
    """Before any work."""
    monkeypatch.setattr(pipeline, "_decode", lambda *args, **kwargs: pytest.fail("the work has begun"))
    with pytest.raises((ValueError, TypeError), match=name):
        call(pipeline, {name: value})


# ---- SpeculationConfig and Pipeline


def check_one_of(error: Exception, *names: str) -> None:
    assert any(name in str(error) for name in names), f"{type(error).__name__}: {error}"


OPTIONS = [
    "schedule",
    "lookahead",
    "graphs",
    "trace",
    "native",
    "exact",
    "acceptance",
    "confidence",
]
_LIKELY = {
    "schedule": st.sampled_from(["plain", "lockstep", "workers", "streams", "ranks"]),
    "lookahead": st.one_of(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3)),
    "trace": st.integers(-1, 9),
    "acceptance": st.sampled_from(["coupled", "rejection"]),
}


@examples(100, 10_000)
@given(data=st.data(), drafts=st.integers(0, 3))
@example(data=None, drafts=1)
def test_speculation_configs(data, drafts) -> None:
    if data is None:
        for name in ("graphs", "native", "exact", "confidence"):
            with pytest.raises(TypeError, match=name):
                SpeculationConfig.of(1, **{name: "no"})
        return
    names = data.draw(st.lists(st.sampled_from(OPTIONS), max_size=4, unique=True))
    given_ = {name: data.draw(st.one_of(_LIKELY.get(name, st.booleans()), ODD)) for name in names}
    try:
        config = SpeculationConfig.of(drafts, **given_)
    except (ValueError, TypeError) as error:
        check_one_of(error, *names, "lookahead", "schedule")
        return
    assert len(config.lookahead) in (0, drafts)
    assert all(type(n) is int and n >= 1 for n in config.lookahead)
    assert all(type(getattr(config, name)) is bool for name in ("graphs", "native", "exact", "confidence"))
    assert type(config.trace) is int
    assert config.max_draft_tokens(drafts) >= 0


@examples(10, 1000)
@given(
    name=st.sampled_from([*OPTIONS[1:], "weights", "device"]),
    value=st.one_of(ODD, ODD_TEXTS),
)
@example(name="device", value=5)
@example(name="weights", value=5)
def test_one_argument_of_a_pipeline(target, name, value) -> None:
    given_: dict[str, Any] = {"drafts": noisy(target, 0.02), "schedule": "lockstep"} | {name: value}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = Pipeline(target, **given_)
    except (*REFUSALS, OSError) as error:
        check_one_of(
            error,
            name.split("_")[-1].rstrip("s"),
            "graphs",
            *([repr(error.filename)] if isinstance(error, OSError) else []),
        )
        return
    got = pipe.generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, target.generate(PROMPT, max_new_tokens=4, do_sample=False))
