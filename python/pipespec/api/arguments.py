"""Arguments of ``generate()``: one table of all of them, and the checks before any work is done.

Nothing is ignored silently: an argument is honoured, has no effect in transformers either, or is refused by name.
"""

from __future__ import annotations

import copy
import enum
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from pipespec.errors import Unsupported, UnsupportedInput
from pipespec.models.properties import embedding_size, input_device
from pipespec_kernels.state import MAX_EOS


class How(enum.Enum):
    """How an argument is treated."""

    HONOURED = "honoured"
    FUSED = "fused"  # for all positions of a step at once, in the sampler
    STEPWISE = "position by position"  # transformers' own processor, with the prefix of each token
    NO_EFFECT = "no effect"  # transformers does not use it here, or it cannot change the text
    REFUSED = "refused"


class Argument(NamedTuple):
    """An argument: how it is treated, a note for the documentation, and values that are never refused."""

    how: How
    note: str
    neutral: tuple[Any, ...] = ()  # in addition to None, False and transformers' default


_BEAMS = "beam search keeps several texts per row; detach() the model, or call transformers' generate()"
_ASSISTED = "another way to speculate; the pipeline's drafts do that"
_CACHE = "the pipeline has caches of its own"
_FEATURES = "call the model once over the finished text, or call transformers' generate()"
_FILE = "describes the file the configuration came from"

ARGUMENTS: dict[str, Argument] = {
    # of generate() itself
    "inputs": Argument(How.HONOURED, "the same as `input_ids`"),
    "input_ids": Argument(How.HONOURED, "LongTensor `[B, S]`, or lists; a batch is padded on the left"),
    "attention_mask": Argument(How.HONOURED, "2-D, of 0 and 1; padding may be anywhere but at the end of a row, with the same effect as in transformers; columns before `input_ids` stand for cached tokens"),
    "generation_config": Argument(How.HONOURED, "merged as in transformers: keywords, this, the model's, defaults"),
    "logits_processor": Argument(How.STEPWISE, "called once per generated token; in a batch, transformers' own loop gives your own all rows at once; drafts do not run it"),
    "stopping_criteria": Argument(How.HONOURED, "called token by token, also inside an accepted block, with the ids of the whole batch, as in transformers"),
    "prefix_allowed_tokens_fn": Argument(How.STEPWISE, "gets the row's index in the batch and its ids; drafts do not run it, and transformers' own loop decodes batches"),
    "streamer": Argument(How.HONOURED, "tokens in order, once, as soon as the target has committed them"),
    "seed": Argument(How.HONOURED, "pipespec's own: one integer, or one per row; default: drawn from torch's generator"),
    "presence_penalty": Argument(How.FUSED, "pipespec's own, as in vLLM: subtracted from the scores of generated tokens", (0, 0.0)),
    "frequency_penalty": Argument(How.FUSED, "pipespec's own, as in vLLM: subtracted once per occurrence in the generated text", (0, 0.0)),
    "logit_bias": Argument(How.FUSED, "pipespec's own: `{token id: number}`, added to the scores before all penalties; like `sequence_bias` of single tokens"),
    "grammar": Argument(How.FUSED, "pipespec's own: a matcher with the methods of `xgrammar.GrammarMatcher`, or one per row; in worker processes and other ranks drafts run without it"),
    "logprobs": Argument(How.HONOURED, "pipespec's own: 0 for the log-probabilities of the generated tokens, n for those of the n likeliest, too; needs `return_dict_in_generate=True`"),
    "tokenizer": Argument(How.HONOURED, "needed by `stop_strings`"),
    "past_key_values": Argument(How.HONOURED, "a DynamicCache in any state that transformers accepts, which grows in place; `input_ids` is the whole text, or the new tokens with the mask of the whole text; transformers decodes calls with other caches"),
    "custom_generate": Argument(How.REFUSED, "a pipeline is one itself: `model.generate(..., custom_generate=pipe)`"),
    "synced_gpus": Argument(How.REFUSED, "one process decides about the end; give each rank its own pipeline"),
    "assistant_model": Argument(How.REFUSED, "pass it to Pipeline(target, drafts=[...])"),
    "assistant_tokenizer": Argument(How.REFUSED, "pass draft_tokenizers=... to Pipeline"),
    "negative_prompt_ids": Argument(How.REFUSED, "classifier-free guidance needs a second forward per token"),
    "negative_prompt_attention_mask": Argument(How.REFUSED, "classifier-free guidance needs a second forward per token"),
    "inputs_embeds": Argument(How.REFUSED, "drafts cannot read the target's embeddings; pass input_ids"),
    "position_ids": Argument(How.REFUSED, "other than those derived from attention_mask, as transformers does"),
    "cache_position": Argument(How.REFUSED, "derived from the cache, as transformers does"),
    "logits_to_keep": Argument(How.NO_EFFECT, "transformers reads the last logits only"),
    "trust_remote_code": Argument(How.NO_EFFECT, "used by custom_generate only"),
    # length and end
    "max_length": Argument(How.HONOURED, "counts padding, as in transformers"),
    "max_new_tokens": Argument(How.HONOURED, ""),
    "min_length": Argument(How.STEPWISE, "", (0,)),
    "min_new_tokens": Argument(How.STEPWISE, "", (0,)),
    "max_time": Argument(How.HONOURED, "checked after each committed token"),
    "stop_strings": Argument(How.HONOURED, "token by token; needs `tokenizer`"),
    "eos_token_id": Argument(How.HONOURED, f"up to {MAX_EOS} ids"),
    "pad_token_id": Argument(How.HONOURED, ""),
    "bos_token_id": Argument(How.HONOURED, ""),
    # how a token is chosen
    "do_sample": Argument(How.HONOURED, "coupled sampling: the text is a function of target, prompt and seed"),
    "temperature": Argument(How.FUSED, ""),
    "top_k": Argument(How.FUSED, ""),
    "top_p": Argument(How.FUSED, "tokens that tie with the last one kept are all kept"),
    "min_p": Argument(How.FUSED, ""),
    "repetition_penalty": Argument(How.FUSED, "padding is not penalised; position by position if any other processor is set", (1.0,)),
    "top_h": Argument(How.STEPWISE, ""),
    "typical_p": Argument(How.STEPWISE, "", (1.0,)),
    "epsilon_cutoff": Argument(How.STEPWISE, "", (0.0,)),
    "eta_cutoff": Argument(How.STEPWISE, "", (0.0,)),
    "renormalize_logits": Argument(How.FUSED, "shifts all scores of a token by one number: changes `scores`, not the text"),
    "no_repeat_ngram_size": Argument(How.STEPWISE, "", (0,)),
    "encoder_repetition_penalty": Argument(How.STEPWISE, "", (1.0,)),
    "encoder_no_repeat_ngram_size": Argument(How.STEPWISE, "", (0,)),
    "bad_words_ids": Argument(How.STEPWISE, ""),
    "sequence_bias": Argument(How.FUSED, "single tokens; position by position with longer sequences, or if any other processor is set"),
    "suppress_tokens": Argument(How.STEPWISE, ""),
    "begin_suppress_tokens": Argument(How.STEPWISE, ""),
    "forced_bos_token_id": Argument(How.STEPWISE, ""),
    "forced_eos_token_id": Argument(How.STEPWISE, ""),
    "exponential_decay_length_penalty": Argument(How.STEPWISE, ""),
    "remove_invalid_values": Argument(How.STEPWISE, ""),
    "watermarking_config": Argument(How.STEPWISE, "drafts do not run it"),
    "guidance_scale": Argument(How.REFUSED, "classifier-free guidance needs a second forward per token", (1, 1.0)),
    # what comes back
    "num_return_sequences": Argument(How.HONOURED, "each with its own noise key"),
    "return_dict_in_generate": Argument(How.HONOURED, "transformers' own class; the report of the call is `pipe.report`"),
    "output_scores": Argument(How.HONOURED, "processed, float32, per generated token; finished rows hold zeros"),
    "output_logits": Argument(How.HONOURED, "raw, float32, per generated token; finished rows hold zeros"),
    "output_attentions": Argument(How.REFUSED, _FEATURES),
    "output_hidden_states": Argument(How.REFUSED, _FEATURES),
    # how it is computed
    "use_cache": Argument(How.HONOURED, "False: no cache is returned; the text is the same", (True,)),
    "prefill_chunk_size": Argument(How.HONOURED, "tokens per forward of the prefill, in every stage"),
    "cache_implementation": Argument(How.REFUSED, f"{_CACHE}; a static or hybrid one in the target's `generation_config` has no effect", ("dynamic", "dynamic_full")),
    "cache_config": Argument(How.REFUSED, _CACHE),
    "max_cache_len": Argument(How.REFUSED, _CACHE),
    "compile_config": Argument(How.NO_EFFECT, "nothing is compiled"),
    "disable_compile": Argument(How.NO_EFFECT, "nothing is compiled"),
    "continuous_batching_config": Argument(How.NO_EFFECT, "read by generate_batch() only"),
    "low_memory": Argument(How.REFUSED, _BEAMS),
    "token_healing": Argument(How.REFUSED, "heal the prompt first: model.heal_tokens(input_ids, tokenizer)"),
    # beams and other searches
    "num_beams": Argument(How.REFUSED, _BEAMS, (1,)),
    "num_beam_groups": Argument(How.REFUSED, _BEAMS, (1,)),
    "diversity_penalty": Argument(How.REFUSED, _BEAMS, (0.0,)),
    "length_penalty": Argument(How.NO_EFFECT, "used by beam search only"),
    "early_stopping": Argument(How.NO_EFFECT, "used by beam search only"),
    "constraints": Argument(How.REFUSED, _BEAMS),
    "force_words_ids": Argument(How.REFUSED, _BEAMS),
    "penalty_alpha": Argument(How.REFUSED, "contrastive search compares several continuations per token"),
    "dola_layers": Argument(How.REFUSED, "DoLa reads hidden states of inner layers"),
    # other ways to speculate
    "prompt_lookup_num_tokens": Argument(How.REFUSED, "pass it to Pipeline(target, drafts='ngram')"),
    "assistant_early_exit": Argument(How.REFUSED, "name a draft in Pipeline(target, drafts=...); in the target's `generation_config` it is accepted and has no effect"),
    "use_mtp": Argument(How.REFUSED, "pass it to Pipeline(target, drafts='mtp')"),
    "speculation_type": Argument(How.REFUSED, _ASSISTED),
    "assistant_ensemble_weight": Argument(How.REFUSED, _ASSISTED),
    "is_assistant": Argument(How.REFUSED, _ASSISTED),
    "num_assistant_tokens": Argument(How.NO_EFFECT, _ASSISTED),
    "num_assistant_tokens_schedule": Argument(How.NO_EFFECT, _ASSISTED),
    "assistant_confidence_threshold": Argument(How.NO_EFFECT, _ASSISTED),
    "assistant_lookbehind": Argument(How.NO_EFFECT, _ASSISTED),
    "target_lookbehind": Argument(How.NO_EFFECT, _ASSISTED),
    "max_matching_ngram_size": Argument(How.NO_EFFECT, _ASSISTED),
    # of encoder-decoder models, and of files
    "decoder_start_token_id": Argument(How.NO_EFFECT, "used by encoder-decoder models only"),
    "transformers_version": Argument(How.NO_EFFECT, _FILE),
}  # fmt: skip
"""Every argument of ``generate()`` and field of ``GenerationConfig``; ``docs/generate.md`` has the same table."""

OWN = ("seed", "presence_penalty", "frequency_penalty", "logit_bias", "grammar", "logprobs")
"""Arguments of a pipeline's ``generate()`` that transformers does not have."""

MAX_TOKENS = 2**30  # positions are 32-bit numbers

_SAME_TEXT = ("static", "sliding_window", "hybrid", "hybrid_chunked")
"""Caches that a checkpoint may ask for, and whose texts are those of a dynamic one."""

PREPARED = {"position_ids", "cache_position", "logits_to_keep", "output_hidden_states", "output_attentions"}
"""Arguments of ``forward()`` that transformers adds, and that a call does not refuse for it."""

_LARGEST = torch.finfo(torch.float32).max
_SEE = "docs/generate.md lists what is supported"


def table() -> str:
    """Return ``ARGUMENTS`` as a Markdown table."""
    lines = ["| argument | treatment | |", "|---|---|---|"]
    lines += [f"| `{name}` | {a.how.value} | {a.note} |" for name, a in ARGUMENTS.items()]
    return "\n".join(lines) + "\n"


def check_arguments(
    model: PreTrainedModel,
    input_ids: Any,
    attention_mask: Any,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    has_cache: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, GenerationConfig]:
    """Check a call of ``generate()``, with arguments as the caller gave them, before any work is done.

    Args:
        kwargs: All other keywords of the call.
        has_cache: Whether the caller gave ``past_key_values``.

    Returns:
        The token ids (int64 ``[B, S]``), the mask (int64 ``[B, S]`` or more columns; None if none was given), and a copy of the merged
        configuration.

    Raises:
        ValueError: A value cannot work; the message names the argument.
        TypeError: A value has the wrong type.
        NotImplementedError: An argument of transformers is not supported.
    """
    config = effective_config(model, generation_config, kwargs)
    check_options(config, model.generation_config)
    ids = _check_input_ids(input_ids, model, config)
    mask = None if attention_mask is None else _check_mask(attention_mask, ids, has_cache)
    if kwargs.get("position_ids") is not None:
        check_positions(kwargs["position_ids"], torch.ones_like(ids) if mask is None else mask, ids.shape[1])
    return ids, mask, config


def passed_on(
    config: GenerationConfig, kwargs: Mapping[str, Any], stopping_criteria: Any, tokenizer: Any
) -> dict[str, Any]:
    """What transformers prepares of a call with the merged ``config``: options and criteria. ``ValueError`` for stop strings without a tokenizer."""
    # transformers ignores a tensor of an option without effect that is not a number for the computation either: NaN as an identifier.
    passed: dict[str, Any] = {
        name: value if name in ARGUMENTS and ARGUMENTS[name].how is How.NO_EFFECT else plain_number(value)
        for name, value in kwargs.items()
        if hasattr(config, name)
    }
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if config.stop_strings is not None:
        if tokenizer is None:
            raise ValueError(
                "stop_strings needs the tokenizer: pass generate(..., stop_strings=..., tokenizer=tokenizer)"
            )
        # transformers drops the tokenizer before it calls a custom_generate.
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
        passed["stop_strings"] = None
    if config.cache_implementation is not None:
        # The target's own entry. The pipeline's cache takes its place.
        passed["cache_implementation"] = "dynamic"
    return passed | {"stopping_criteria": criteria}


def check_penalties(
    presence_penalty: Any = None, frequency_penalty: Any = None, logit_bias: Any = None
) -> dict[str, Any]:
    """Check pipespec's own penalties and biases.

    Returns:
        The arguments of :func:`pipespec.engine.sampling.with_penalties`.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A number is not finite in float32, the type of the scores, or a bias is NaN or +inf.
    """
    numbers = {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    found: dict[str, Any] = {name: None if n is None else _as_float(name, n) for name, n in numbers.items()}
    found["logit_bias"] = None
    if logit_bias is not None:
        if not isinstance(logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a dict of token ids and numbers, not {type(logit_bias).__name__}")
        found["logit_bias"] = biases = {}
        for given, bias in logit_bias.items():
            token = plain_number(given)
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise TypeError(f"logit_bias: {given!r} is not a token id")
            forbids = plain_number(bias) == -math.inf
            biases[token] = -math.inf if forbids else _as_float(f"logit_bias: the bias of token {token}", bias)
    return found


def _as_float(name: str, value: Any) -> float:
    """A number that the scores can hold."""
    number = plain_number(value)
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{name} must be a finite number of float32, not {value!r}")
    return float(number)


def check_logprobs(logprobs: Any, config: GenerationConfig, vocabulary: int) -> int | None:
    """Check the argument ``logprobs`` of a call with this configuration and vocabulary.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative, or larger than the vocabulary, or the call returns nothing that could hold the numbers.
    """
    if logprobs is None:
        return None
    if isinstance(logprobs, bool):
        raise TypeError(
            "logprobs must be an integer: 0 for the generated tokens only, n for the n likeliest tokens, too"
        )
    number = _as_int("logprobs", logprobs)
    if not 0 <= number <= vocabulary:
        raise ValueError(f"logprobs must be 0 .. {vocabulary}, the size of the vocabulary, not {number}")
    if not config.return_dict_in_generate:
        raise ValueError("logprobs needs return_dict_in_generate=True: the result then has them as .logprobs")
    return number


def check_options(config: GenerationConfig, own: GenerationConfig) -> None:
    """Check the options of a merged configuration. ``own`` is the target's, whose ``assistant_early_exit`` is a property of the checkpoint.

    Raises:
        TypeError: A value has a type that no processor of transformers takes.
        NotImplementedError: For the first option that is refused or unknown.
    """
    defaults = GenerationConfig()
    for name, value in config.__dict__.items():
        if name.startswith("_"):
            continue
        _check_kind(name, value)
        argument = ARGUMENTS.get(name)
        if argument is not None and argument.how is not How.REFUSED:
            continue
        if value is None or value is False or value == getattr(defaults, name, None):
            continue
        if name == "cache_implementation" and value == own.cache_implementation and value in _SAME_TEXT:
            continue
        if name == "assistant_early_exit" and value == getattr(own, name, None):
            continue
        if isinstance(value, (dict, list, tuple)) and not value:
            continue
        if argument is None:
            if name not in defaults.__dict__:
                continue  # the user's own entry, which transformers does not read
            raise Unsupported(name, f"generate(): {name}={value!r} is unknown; {_SEE}")
        if value not in argument.neutral:
            raise refusal(name, value)
    # transformers refuses numbers that leave nothing to do. It does not read max_length where max_new_tokens is given.
    name = "max_length" if config.max_new_tokens is None else "max_new_tokens"
    value = getattr(config, name)
    number = plain_number(value)  # as transformers, which only compares with it, this takes 7.0 for 7
    is_whole = isinstance(number, float) and number.is_integer()
    if value is not None and (int(number) if is_whole else _as_int(name, value)) > MAX_TOKENS:
        raise ValueError(f"{name}={value} is more than any row can have ({MAX_TOKENS})")


def _check_kind(name: str, value: Any) -> None:
    """Refuse by name what transformers refuses with an error of torch or Python, or only after the work has begun."""
    if value is None or name not in ARGUMENTS:
        return
    if name == "prefill_chunk_size" and _as_int(name, value) < 1:
        raise ValueError(f"prefill_chunk_size must be at least 1, not {value}")
    if name in ("suppress_tokens", "begin_suppress_tokens") and isinstance(plain_number(value), (int, float)):
        raise TypeError(f"{name} must be a list of token ids, not {value!r}")
    if name.endswith(("suppress_tokens", "eos_token_id", "pad_token_id", "forced_bos_token_id")):
        as_ids(name, value)


def check_callables(logits_processor: Any = None, stopping_criteria: Any = None, streamer: Any = None) -> None:
    """Refuse by name what could not be called once tokens are there.

    Raises:
        TypeError: A processor or criterion is no function, or the streamer has no ``put()`` and ``end()``.
    """
    for name, given in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
        if given is not None and not (isinstance(given, (list, tuple)) and all(map(callable, given))):
            raise TypeError(f"{name} must be a list of functions of ids and scores, not {given!r:.80}")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"streamer must have put() and end(), as those of transformers; {type(streamer).__name__} has not"
        )


def refusal(name: str, value: Any) -> Unsupported:
    """Build the error for an argument that is refused."""
    shown = repr(value)
    shown = shown if len(shown) < 60 else type(value).__name__
    return Unsupported(name, f"generate(): {name}={shown} is not supported: {ARGUMENTS[name].note}")


def effective_config(
    model: PreTrainedModel, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> GenerationConfig:
    """Merge as transformers does: keywords, the caller's configuration, the model's."""
    config = copy.deepcopy(model.generation_config)
    if given is not None:
        if not isinstance(given, GenerationConfig):
            raise TypeError(f"generation_config must be a GenerationConfig, not {type(given).__name__}")
        for name, value in given.__dict__.items():
            if value is not None:
                setattr(config, name, copy.deepcopy(value))
    known, others = config.__dict__.keys() | GenerationConfig().__dict__.keys(), {}
    for name, value in kwargs.items():
        if name in known:
            setattr(config, name, value)
        elif name not in (
            "logits_to_keep",
            "trust_remote_code",
            "position_ids",
        ):  # the last is compared with the mask's
            others[name] = value
    unknown = {name: value for name, value in others.items() if value is not None and not _is_of_generate(name)}
    model._validate_model_kwargs(unknown)  # raises transformers' error for unknown names
    check_others(others)
    return config


def _is_of_generate(name: str) -> bool:
    """Whether ``generate()`` itself has an argument. A later GenerationConfig may have fields that the installed one does not have."""
    return name in ARGUMENTS and ARGUMENTS[name].how is not How.NO_EFFECT


def check_others(values: Mapping[str, Any]) -> None:
    """Refuse arguments that are no options: those that are refused, and those of the model's ``forward()``."""
    for name, value in values.items():
        if value is None or (_is_of_generate(name) and (value is False or ARGUMENTS[name].how is not How.REFUSED)):
            continue
        if _is_of_generate(name):
            raise refusal(name, value)
        raise Unsupported(name, f"generate(): {name} would be passed to the model's forward(), which drafts do not see")


def plain_number(value: Any) -> Any:
    """Convert a numpy number, or a tensor of one number, to a Python number. Other values do not change."""
    is_number = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0)
    return value.item() if is_number else value


def _check_input_ids(input_ids: Any, model: PreTrainedModel, config: GenerationConfig) -> torch.Tensor:
    if input_ids is None:
        begin = as_ids("bos_token_id", config.bos_token_id)
        if not begin:
            raise ValueError(
                "generate() needs input_ids: a LongTensor of shape [batch, length] (there is no bos_token_id to begin with)"
            )
        input_ids = torch.tensor([begin[:1]], device=input_device(model))
    if isinstance(input_ids, (list, tuple)):
        rows = input_ids if input_ids and isinstance(input_ids[0], (list, tuple)) else [input_ids]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"input_ids: rows of unequal lengths {[len(row) for row in rows]}; pad them on the left to one length and pass "
                "attention_mask (tokenizer(..., padding=True, padding_side='left'))"
            )
        try:
            input_ids = torch.tensor(rows)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"input_ids must hold integers: {error}") from error
        if input_ids.numel() == 0:  # fields without a declared type
            input_ids = input_ids.long()
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids must be a tensor of shape [batch, length], not {type(input_ids).__name__}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids must hold integers (torch.long), not {input_ids.dtype}")
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must have shape [batch, length], not {list(input_ids.shape)}")
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}: the prompt is empty; give at least one token (for example bos)"
        )
    vocabulary = embedding_size(model)
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"input_ids holds token id {low if low < 0 else high}, outside the model's vocabulary of {vocabulary}: was it made "
            "with another tokenizer?"
        )
    return input_ids.long()


def _check_mask(mask: Any, ids: torch.Tensor, has_cache: bool) -> torch.Tensor:
    """int64 ``[B, S]``, or with a cache ``[B, more]``."""
    if not isinstance(mask, torch.Tensor):
        try:
            mask = torch.as_tensor(mask)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"attention_mask must be a tensor of shape [batch, length]: {error}") from error
    fits = mask.ndim == 2 and mask.shape[0] == ids.shape[0]
    if not fits or not (mask.shape[1] == ids.shape[1] or (has_cache and mask.shape[1] > ids.shape[1])):
        raise UnsupportedInput(
            "attention_mask",
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}; they must be equal, or with past_key_values the mask "
            "may have columns for the cached tokens before those of input_ids",
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UnsupportedInput(
            "attention_mask", "attention_mask must hold 0 and 1 (0 for padding), it is not added to attention scores"
        )
    return mask.to(ids.device).long()


def check_positions(given: Any, mask: torch.Tensor, width: int) -> None:
    """Check that the positions ``given [1 or B, S]`` of tokens that are no padding are those that follow from the mask.

    Args:
        mask: It may have more columns before those of ``input_ids``, whose number is ``width``.

    Raises:
        NotImplementedError: The positions differ.
    """
    if not isinstance(given, torch.Tensor) or given.ndim != 2 or given.shape[1] not in (width, mask.shape[1]):
        raise refusal("position_ids", given)
    own, tokens = (x[:, -given.shape[1] :] for x in (mask.long().cumsum(dim=1) - 1, mask.bool()))
    if given.shape[0] not in (1, mask.shape[0]) or bool(((given.to(mask.device) != own) & tokens).any()):
        raise refusal("position_ids", given)


def _as_int(name: str, value: Any) -> int:
    try:
        return operator.index(plain_number(value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def as_ids(name: str, value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    values = list(value) if isinstance(value, (list, tuple, set)) else [value]
    if not all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values):
        raise TypeError(f"{name} must be a token id or a list of token ids, not {value!r}")
    return [int(v) for v in values]
