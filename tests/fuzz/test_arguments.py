"""Arguments of `Pipeline`, `SpeculationConfig` and `generate()`: each is refused by its name before any work, or the text is the target's."""

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.api.arguments import OWN
from pipespec.config import SpeculationConfig
from tests.conftest import noisy, random_llama

PROMPT = torch.tensor([[5, 6, 7, 8]])
REFUSALS = (ValueError, TypeError, NotImplementedError)


@pytest.fixture(scope="module")
def target():
    return random_llama(3, hidden=16)


@pytest.fixture(scope="module")
def pipeline(target):
    return Pipeline(target, noisy(target, 0.02), schedule="lockstep")


# ---- generate()


def same(a: Any, b: Any) -> bool:
    a, b = (out if isinstance(out, torch.Tensor) else out.sequences for out in (a, b))
    return torch.equal(a, b)


def call(pipeline: Pipeline, given_: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pipeline.generate(PROMPT, **{"max_new_tokens": 4} | given_)


@pytest.mark.parametrize(
    ("name", "value", "sampled"),
    [
        ("repetition_penalty", "x", False),
        ("top_k", "x", True),
        ("temperature", "x", True),
        ("suppress_tokens", [10**30], False),
        ("attention_mask", torch.zeros(0), False),
        ("prefix_allowed_tokens_fn", 5, False),
        ("seed", 10**30, True),
        ("past_key_values", 5, False),
        ("generation_config", 5, False),
        ("prefill_chunk_size", 0, False),
        ("watermarking_config", {"a": 1}, False),
        ("bad_words_ids", [[10**30]], False),
        ("position_ids", "x", False),
        ("eos_token_id", 2**31, False),
        ("pad_token_id", [1, 2], False),
        ("frequency_penalty", 1e300, False),
        ("repetition_penalty", 1e300, False),
        ("repetition_penalty", 1e-300, False),
        ("decoder_start_token_id", torch.tensor(float("nan")), False),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("streamer", 5), ("streamer", "x"), ("logits_processor", [5]), ("logits_processor", "x"), ("stopping_criteria", 5), ("stopping_criteria", [5]),
        ("prefill_chunk_size", "x"), ("prefill_chunk_size", -1), ("prefill_chunk_size", 0.5), ("position_ids", "x"), ("position_ids", object()),
        ("suppress_tokens", [None]), ("suppress_tokens", 5), ("begin_suppress_tokens", np.int32(0)), ("forced_eos_token_id", {"a": 1}), ("forced_eos_token_id", True),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_values_that_are_refused_by_name(pipeline, monkeypatch, name, value) -> None:
    """Before any work."""
    monkeypatch.setattr(pipeline, "_decode", lambda *args, **kwargs: pytest.fail("the work has begun"))
    with pytest.raises(REFUSALS, match=name):
        call(pipeline, {name: value})


# ---- SpeculationConfig and Pipeline


@pytest.mark.parametrize("name", ["graphs", "native", "exact"])
def test_options_that_are_true_or_false(name) -> None:
    with pytest.raises(TypeError, match=name):
        SpeculationConfig.of([], **{name: "no"})


@pytest.mark.parametrize("name", ["device", "weights"])
def test_arguments_of_a_pipeline(target, name) -> None:
    with pytest.raises(REFUSALS, match=name.rstrip("s")):
        Pipeline(target, drafts=noisy(target, 0.02), schedule="lockstep", **{name: 5})
