"""Sampling: the fields of OpenAI's API, vLLM's and llama.cpp's that say how a text is chosen and where it ends, as arguments of ``generate()``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import GenerationConfig

from pipespec.api.server.fields import Fields, RequestError, is_number, wrong
from pipespec_kernels.state import MAX_EOS

DEFAULT_TOKENS = 1024
"""Tokens of an answer whose request gives no limit."""

MOST_CHOICES = 64

MOST_LOGPROBS = 20

MOST_STOPS = 128

_LARGEST_BIAS = 1e30
"""Divided by the lowest temperature it is still a float32."""

_LOWEST_TEMPERATURE = 1e-5
"""Below it the likeliest token is drawn, as vLLM does."""

_RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_UNSUPPORTED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "this model writes text only",
    "input_image": "this model reads text only",
}
_NOT_FOR_REQUESTS = {
    *(
        "custom_generate",
        "trust_remote_code",
        "eos_token_id",  # stop_token_ids and ignore_eos
        "max_length",
        "num_return_sequences",
        "stop_strings",
        "prefill_chunk_size",
    ),
    # They would keep memory, and no answer shows them.
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
}


@dataclass(frozen=True)
class Sampling:
    """How the texts of a request are chosen.

    Attributes:
        options: Arguments of ``generate()``; without lengths.
        most: Tokens of each text.
        stops: Strings before which a text ends.
        ends: Tokens that end a text.
        choices: Texts per prompt.
        seed: Of the first one; None: a new one each time.
        source: The field with options that ``generate()`` may refuse; None: there are none.
    """

    options: dict[str, Any] = field(default_factory=dict)
    most: int = DEFAULT_TOKENS
    stops: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    choices: int = 1
    seed: int | None = None
    source: str | None = None

    def of_choice(self, choice: int) -> dict[str, Any]:
        """The options of the text of this number, each of which has a seed of its own."""
        if self.seed is None or self.options.get("do_sample") is False:
            return self.options
        return self.options | {"seed": (self.seed + choice) % 2**64}


def sampling_of(body: Fields, ends: list[int], vocabulary: int, fewest: int = 1) -> Sampling:
    """Read the fields.

    Args:
        ends: Tokens that end the model's texts by themselves.
        vocabulary: Tokens that it knows.
        fewest: Tokens that a text must be allowed to have.

    Raises:
        RequestError: A value is out of its range, has another type, or asks for what there is not.
    """
    for name, instead in _UNSUPPORTED.items():
        if name in body:
            raise RequestError(f"{name} is not supported: {instead}", name)
    choices = body.integer("n", 1, MOST_CHOICES) or 1
    if (best := body.integer("best_of", 1)) is not None and best > choices:
        raise RequestError(
            f"best_of={best} is not supported: texts are not ranked; leave best_of out, or use n", "best_of"
        )
    further = _further(body)
    options = {name: value for name, value in further.items() if name != "max_new_tokens"} | _choosing(body)
    biases = _biases(body, vocabulary)
    if body.flag("ignore_eos", False):
        biases |= dict.fromkeys(ends, -math.inf)
    if biases:
        options["logit_bias"] = biases
    if (least := body.integer("min_tokens", 0)) is not None:
        options["min_new_tokens"] = least
    stop_tokens = [_token(token, f"stop_token_ids[{place}]", vocabulary) for place, token in enumerate(body.items("stop_token_ids"))]  # fmt: skip
    if ends := sorted({*ends, *stop_tokens}):
        options["eos_token_id"] = ends
    if len(ends) > MAX_EOS:
        raise RequestError(f"stop_token_ids: a text ends at {MAX_EOS} tokens at most, with those of the model, not {len(ends)}", "stop_token_ids")  # fmt: skip
    seed = body.integer("seed", -(2**63), 2**64 - 1)
    limits = [body.integer(name, fewest) for name in ("max_tokens", "max_completion_tokens", "n_predict")]
    stops = tuple(body.strings("stop"))
    if len(stops) > MOST_STOPS:
        raise RequestError(f"stop has {len(stops)} strings: give {MOST_STOPS} at most", "stop")
    limits.append(Fields(further, "generation_config").integer("max_new_tokens", fewest))
    most = min([limit for limit in limits if limit is not None], default=DEFAULT_TOKENS)
    if least is not None and least > most:
        raise RequestError(f"min_tokens={least} must be at most {most}, the limit of the text (max_tokens)", "min_tokens")  # fmt: skip
    source = "generation_config" if further else None
    return Sampling(options, most, stops, tuple(ends), choices, seed, source)


def _choosing(body: Fields) -> dict[str, Any]:
    """Temperature, filters and penalties."""
    found: dict[str, Any] = {name: body.number(name, low, high) for name, (low, high) in _RANGES.items()}
    found["top_k"] = body.integer("top_k", -1)
    repetition = body.number("repetition_penalty", 1e-3), body.number("repeat_penalty", 1e-3)
    found["repetition_penalty"] = repetition[0] or repetition[1]
    options = {name: value for name, value in found.items() if value is not None}
    if options.get("top_k") == -1:  # vLLM: all tokens
        options["top_k"] = 0
    if options.get("top_p") == 0:
        options["top_p"] = 1e-9  # the likeliest token
    if (temperature := options.get("temperature")) is not None:
        options["do_sample"] = is_sampled = temperature >= _LOWEST_TEMPERATURE
        if not is_sampled:
            for name in ("temperature", "top_p", "top_k", "min_p"):
                options.pop(name, None)
    return options


def _token(given: Any, name: str, vocabulary: int) -> int:
    try:
        token = int(given) if not isinstance(given, (bool, float)) else None
    except (ValueError, TypeError):
        token = None
    if token is None:
        raise wrong(name, "a token id", given)
    if not 0 <= token < vocabulary:
        raise RequestError(f"{name}: the vocabulary of {vocabulary} tokens has no token {token}", name)
    return token


def _biases(body: Fields, vocabulary: int) -> dict[int, float]:
    """OpenAI's object, or llama.cpp's list of pairs."""
    given = body.any("logit_bias")
    pairs = list(given.items()) if isinstance(given, dict) else given if given is not None else []
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise wrong("logit_bias", "an object of token ids and numbers", given)
    found = {}
    for token, bias in pairs:
        if bias is False:  # llama.cpp: never
            bias = -math.inf
        elif not is_number(bias) or abs(bias) > _LARGEST_BIAS:
            raise wrong("logit_bias", f"numbers up to {_LARGEST_BIAS:g} by token id", bias)
        found[_token(token, "logit_bias", vocabulary)] = float(bias)
    return found


def _further(body: Fields) -> dict[str, Any]:
    """Any other fields of a ``GenerationConfig``, as JSON in ``generation_config``: an object, or its text."""
    given = body.any("generation_config")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"generation_config is no JSON: {error}", "generation_config") from error
    if given is not None and not isinstance(given, dict):
        raise wrong("generation_config", "a JSON object", given)
    Fields(given or {}, "generation_config").number("temperature", _LOWEST_TEMPERATURE)
    known = vars(GenerationConfig())
    for name in given or ():
        if name not in known or name in _NOT_FOR_REQUESTS:
            raise RequestError(f"generation_config.{name} is no option of a request", f"generation_config.{name}")
    return dict(given or {})


def logprobs_of(body: Fields, *, is_chat: bool) -> int | None:
    """How many of the likeliest tokens a request wants to see at each position, besides the one chosen; None: no log-probabilities."""
    if not is_chat:
        if body.any("logprobs") is False:
            return None
        return body.integer("logprobs", 0, MOST_LOGPROBS)
    wants, top = body.flag("logprobs", False), body.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top and not wants:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wants else None


def shortened(sampling: Sampling, room: int | None) -> Sampling:
    """The same, for a text of ``room`` tokens at most. None: the model has no limit."""
    if room is None or room >= sampling.most:
        return sampling
    least = {name: min(value, room) for name, value in sampling.options.items() if name == "min_new_tokens"}
    return replace(sampling, most=room, options=sampling.options | least)
