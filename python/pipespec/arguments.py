"""What a caller may hand to ``generate()``: one table of every argument, and the checks before any work is done.

Nothing is ignored silently: an argument is honoured, has no effect in transformers either, or is refused by name.
"""

from __future__ import annotations

import copy
import enum
import operator
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from pipespec.angles import rope_type
from pipespec.compat import embedding_size
from pipespec_kernels.state import MAX_EOS


class How(enum.Enum):
    """What becomes of an argument."""

    HONOURED = "honoured"
    FUSED = "fused"  # all positions of a step at once, in the selection itself
    STEPWISE = "position by position"  # transformers' own processor, with the exact prefix of each token
    NO_EFFECT = "no effect"  # transformers does not look at it here, or it cannot change the text
    REFUSED = "refused"


class Argument(NamedTuple):
    how: How
    note: str
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, beside None, False and transformers' default


_BEAMS = "beam search keeps several texts per row; detach() the model, or call transformers' generate()"
_ASSISTED = "another way to speculate; the pipeline's drafts do that"
_CACHE = "the pipeline has a cache of its own (RowCache)"
_FILE = "describes the file the configuration came from"

ARGUMENTS: dict[str, Argument] = {
    # generate()'s own
    "inputs": Argument(How.HONOURED, "the same as `input_ids`"),
    "input_ids": Argument(How.HONOURED, "LongTensor `[B, S]`, or lists; a batch is padded on the left"),
    "attention_mask": Argument(How.HONOURED, "2-D, padding on the left only; otherwise refused by row"),
    "generation_config": Argument(How.HONOURED, "merged as transformers does: keywords, this, the model's, defaults"),
    "logits_processor": Argument(How.STEPWISE, "called once per generated token and row, with ids and scores of that row; drafts go without them"),
    "stopping_criteria": Argument(How.HONOURED, "called token by token, also inside of an accepted block, with the ids of the whole batch, as transformers does"),
    "prefix_allowed_tokens_fn": Argument(How.STEPWISE, "gets the row's index in the batch and its ids; drafts go without it"),
    "streamer": Argument(How.HONOURED, "tokens in order, once, as soon as the target has committed them"),
    "seed": Argument(How.HONOURED, "ours: one integer, or one per row; default: drawn from torch's generator"),
    "tokenizer": Argument(How.HONOURED, "needed by `stop_strings`"),
    "past_key_values": Argument(How.HONOURED, "a cache that a call of ours returned, or (one row) a DynamicCache; `input_ids` is the whole text"),
    "custom_generate": Argument(How.REFUSED, "the pipeline is one: `model.generate(..., custom_generate=pipe)`"),
    "synced_gpus": Argument(How.REFUSED, "one process decides when it ends; give each rank its own pipeline"),
    "assistant_model": Argument(How.REFUSED, "pass it to Pipeline(target, drafts=[...])"),
    "assistant_tokenizer": Argument(How.REFUSED, "drafts must share the target's tokenizer"),
    "negative_prompt_ids": Argument(How.REFUSED, "classifier-free guidance needs a second forward per token"),
    "negative_prompt_attention_mask": Argument(How.REFUSED, "classifier-free guidance needs a second forward per token"),
    "inputs_embeds": Argument(How.REFUSED, "drafts cannot read the target's embeddings; pass input_ids"),
    "position_ids": Argument(How.REFUSED, "derived from attention_mask, as transformers does"),
    # length and end
    "max_length": Argument(How.HONOURED, "counts padding, as in transformers"),
    "max_new_tokens": Argument(How.HONOURED, ""),
    "min_length": Argument(How.STEPWISE, "", (0,)),
    "min_new_tokens": Argument(How.STEPWISE, "", (0,)),
    "max_time": Argument(How.HONOURED, "looked at after each committed token"),
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
    "repetition_penalty": Argument(How.FUSED, "padding never counts as said; fused unless another processor stands beside it", (1.0,)),
    "top_h": Argument(How.STEPWISE, ""),
    "typical_p": Argument(How.STEPWISE, "", (1.0,)),
    "epsilon_cutoff": Argument(How.STEPWISE, "", (0.0,)),
    "eta_cutoff": Argument(How.STEPWISE, "", (0.0,)),
    "renormalize_logits": Argument(How.FUSED, "shifts all scores of a token alike: seen in `scores`, not in the text"),
    "no_repeat_ngram_size": Argument(How.STEPWISE, "", (0,)),
    "encoder_repetition_penalty": Argument(How.STEPWISE, "", (1.0,)),
    "encoder_no_repeat_ngram_size": Argument(How.STEPWISE, "", (0,)),
    "bad_words_ids": Argument(How.STEPWISE, ""),
    "sequence_bias": Argument(How.STEPWISE, ""),
    "suppress_tokens": Argument(How.STEPWISE, ""),
    "begin_suppress_tokens": Argument(How.STEPWISE, ""),
    "forced_bos_token_id": Argument(How.STEPWISE, ""),
    "forced_eos_token_id": Argument(How.STEPWISE, ""),
    "exponential_decay_length_penalty": Argument(How.STEPWISE, ""),
    "remove_invalid_values": Argument(How.STEPWISE, ""),
    "watermarking_config": Argument(How.STEPWISE, "drafts go without it"),
    "guidance_scale": Argument(How.REFUSED, "classifier-free guidance needs a second forward per token", (1, 1.0)),
    # what comes back
    "num_return_sequences": Argument(How.HONOURED, "each with a noise stream of its own"),
    "return_dict_in_generate": Argument(How.HONOURED, "adds `speculation`, the report of the call"),
    "output_scores": Argument(How.HONOURED, "processed, float32, per generated token; finished rows hold zeros"),
    "output_logits": Argument(How.HONOURED, "raw, float32, per generated token; finished rows hold zeros"),
    "output_attentions": Argument(How.REFUSED, "a verified block has no attention per token; run the model on the finished text"),
    "output_hidden_states": Argument(How.REFUSED, "a verified block has no hidden states per token; run the model on the finished text"),
    # how it is computed
    "use_cache": Argument(How.HONOURED, "False: no cache is returned; the text is the same", (True,)),
    "prefill_chunk_size": Argument(How.HONOURED, "tokens per forward of the prefill, in every stage"),
    "cache_implementation": Argument(How.REFUSED, _CACHE, ("dynamic",)),
    "cache_config": Argument(How.REFUSED, _CACHE),
    "max_cache_len": Argument(How.REFUSED, _CACHE),
    "compile_config": Argument(How.NO_EFFECT, "transformers compiles no step around such a cache"),
    "disable_compile": Argument(How.NO_EFFECT, "nothing is compiled"),
    "continuous_batching_config": Argument(How.NO_EFFECT, "read by generate_batch() only"),
    "low_memory": Argument(How.REFUSED, _BEAMS),
    "token_healing": Argument(How.REFUSED, "heal the prompt first: model.heal_tokens(input_ids, tokenizer)"),
    # beams and other searches
    "num_beams": Argument(How.REFUSED, _BEAMS, (1,)),
    "num_beam_groups": Argument(How.REFUSED, _BEAMS, (1,)),
    "diversity_penalty": Argument(How.REFUSED, _BEAMS, (0.0,)),
    "length_penalty": Argument(How.NO_EFFECT, "of beam search"),
    "early_stopping": Argument(How.NO_EFFECT, "of beam search"),
    "constraints": Argument(How.REFUSED, _BEAMS),
    "force_words_ids": Argument(How.REFUSED, _BEAMS),
    "penalty_alpha": Argument(How.REFUSED, "contrastive search is no decoding of one next token"),
    "dola_layers": Argument(How.REFUSED, "DoLa reads hidden states of inner layers"),
    # other ways to speculate
    "prompt_lookup_num_tokens": Argument(How.REFUSED, _ASSISTED),
    "assistant_early_exit": Argument(How.REFUSED, _ASSISTED),
    "use_mtp": Argument(How.REFUSED, _ASSISTED),
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
    "decoder_start_token_id": Argument(How.NO_EFFECT, "of encoder-decoder models"),
    "transformers_version": Argument(How.NO_EFFECT, _FILE),
}  # fmt: skip
"""Every argument of ``generate()`` and field of ``GenerationConfig``. ``docs/generate.md`` shows it; a test compares the two."""

_MOST_TOKENS = 2**30  # positions are 32-bit numbers

_SEE = "docs/generate.md lists what is supported"


def table() -> str:
    """``ARGUMENTS`` in Markdown."""
    lines = ["| argument | what becomes of it | |", "|---|---|---|"]
    lines += [f"| `{name}` | {a.how.value} | {a.note} |" for name, a in ARGUMENTS.items()]
    return "\n".join(lines) + "\n"


def check_arguments(
    model: PreTrainedModel,
    input_ids: Any,
    attention_mask: Any,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, GenerationConfig]:
    """Check a call of ``generate()`` for ``model`` before any work is done.

    Returns the token ids (int64 ``[B, S]``), the mask (bool ``[B, S]``, ones on the right) and the configuration that
    is in force, merged as transformers merges it (a copy).

    Raises ``ValueError`` for values that cannot work, ``TypeError`` for things of the wrong kind, ``NotImplementedError`` for an
    argument of transformers that exists but is not supported here; each names the argument.
    """
    config = _effective_config(model, generation_config, kwargs)
    check_options(config)
    ids = _check_input_ids(input_ids, model, config)
    eos = _as_ids("eos_token_id", config.eos_token_id)
    if len(eos) > MAX_EOS:
        raise ValueError(f"eos_token_id: at most {MAX_EOS} ids, got {len(eos)}")
    pads = _as_ids("pad_token_id", config.pad_token_id)
    mask = _check_mask(attention_mask, ids, pads, eos)
    maximum = getattr(model.config, "max_position_embeddings", None)
    grows = "dynamic" in rope_type(model)  # the angles are made for longer texts: that is where they change
    if maximum is not None and ids.shape[1] > maximum and not grows:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens, but the model's limit (max_position_embeddings) is {maximum}; shorten it"
        )
    _check_length(config, ids.shape[1])
    return ids, mask, config


def check_options(config: GenerationConfig) -> None:
    """``NotImplementedError`` for the first option of a merged configuration that is refused, or that nobody knows."""
    defaults = GenerationConfig()
    for name, value in config.__dict__.items():
        if name.startswith("_"):
            continue
        argument = ARGUMENTS.get(name)
        if argument is not None and argument.how is not How.REFUSED:
            continue
        if value is None or value is False or value == getattr(defaults, name, None):
            continue
        if isinstance(value, (dict, list, tuple)) and not value:
            continue
        if argument is None:
            if name not in defaults.__dict__:
                continue  # an entry of the user's own, which transformers carries along and nothing reads
            raise NotImplementedError(f"generate(): {name}={value!r} is not known here; {_SEE}")
        if value not in argument.neutral:
            raise refusal(name, value)


def refusal(name: str, value: Any) -> NotImplementedError:
    """The error for an argument that is refused."""
    shown = repr(value)
    shown = shown if len(shown) < 60 else type(value).__name__
    return NotImplementedError(f"generate(): {name}={shown} is not supported: {ARGUMENTS[name].note}")


def _effective_config(
    model: PreTrainedModel, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> GenerationConfig:
    """The caller's keywords over the caller's configuration over the model's, as transformers merges them."""
    config = copy.deepcopy(model.generation_config)
    if given is not None:
        if not isinstance(given, GenerationConfig):
            raise TypeError(f"generation_config must be a GenerationConfig, not {type(given).__name__}")
        for name, value in given.__dict__.items():
            if value is not None:
                setattr(config, name, copy.deepcopy(value))
    known = config.__dict__.keys() | GenerationConfig().__dict__.keys()
    for name, value in kwargs.items():
        if name in known:
            setattr(config, name, value)
        elif name not in ARGUMENTS:
            raise TypeError(f"generate() got an unsupported argument '{name}'; {_SEE}")
        elif ARGUMENTS[name].how is How.REFUSED and value is not None and value is not False:
            raise refusal(name, value)
    return config


def _check_input_ids(input_ids: Any, model: PreTrainedModel, config: GenerationConfig) -> torch.Tensor:
    if input_ids is None:
        begin = _as_ids("bos_token_id", config.bos_token_id)
        if not begin:
            raise ValueError(
                "generate() needs input_ids: a LongTensor of shape [batch, length] (there is no bos_token_id to begin with)"
            )
        input_ids = torch.tensor([begin[:1]], device=model.device)
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
        if input_ids.numel() == 0:  # of no particular type
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


def _check_mask(mask: Any, ids: torch.Tensor, pads: list[int], eos: list[int]) -> torch.Tensor:
    """Bool ``[B, S]``, ones on the right."""
    if mask is None:
        if not pads or not bool((ids == pads[0]).any()):
            return torch.ones_like(ids, dtype=torch.bool)
        is_pad = ids == pads[0]
        if pads[0] not in eos:  # transformers infers the mask in this case, and only in this one
            mask = ~is_pad
            if bool((mask.long().diff(dim=1) < 0).any()):
                raise ValueError(
                    f"input_ids: pad_token_id {pads[0]} occurs behind other tokens, so it is not clear what is padding; pass "
                    "attention_mask (a batch is padded on the left)"
                )
        else:
            leading = is_pad.long().cumprod(dim=1).sum(dim=1)
            if int(leading.min()) != int(leading.max()):
                raise ValueError(
                    f"input_ids: some rows begin with pad_token_id {pads[0]}, which is also an eos_token_id, so it is not clear what "
                    "is padding; pass attention_mask"
                )
            return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor):
        try:
            mask = torch.as_tensor(mask)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"attention_mask must be a tensor of shape [batch, length]: {error}") from error
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}; they must be equal"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must hold 0 and 1 (0 for padding), it is not added to attention scores")
    mask = mask.to(ids.device).bool()
    for row in range(ids.shape[0]):
        count = int(mask[row].sum())
        if count == 0:
            raise ValueError(f"attention_mask: row {row} is all padding; the prompt is empty")
        if not bool(mask[row, ids.shape[1] - count :].all()):
            raise ValueError(
                f"attention_mask: row {row} is not padded on the left only; a decoder continues its last column, so pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
    return mask


def _check_length(config: GenerationConfig, width: int) -> None:
    if config.max_new_tokens is not None:
        new = _as_int("max_new_tokens", config.max_new_tokens)
        if new <= 0:
            raise ValueError(f"max_new_tokens must be at least 1, not {new}")
        if new > _MOST_TOKENS:
            raise ValueError(f"max_new_tokens={new} is more than any row can have ({_MOST_TOKENS})")
    elif config.max_length is not None and config.max_length != GenerationConfig().max_length:
        length = _as_int("max_length", config.max_length)
        if length <= width and length != 20:  # the default, which counts new tokens
            raise ValueError(f"max_length={length} leaves no room after a prompt of {width} tokens; use max_new_tokens")


def _as_int(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def _as_ids(name: str, value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.flatten().tolist()
    values = list(value) if isinstance(value, (list, tuple, set)) else [value]
    if not all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values):
        raise TypeError(f"{name} must be a token id or a list of token ids, not {value!r}")
    return [int(v) for v in values]


def _main() -> None:
    """``python -m pipespec.arguments FILE`` writes the table into FILE, between its marks."""
    file = Path(sys.argv[1])
    head, begin, rest = file.read_text(encoding="utf-8").partition("<!-- arguments:begin -->\n")
    tail = rest.partition("<!-- arguments:end -->")[2]
    file.write_text(head + begin + table() + "<!-- arguments:end -->" + tail, encoding="utf-8")


if __name__ == "__main__":
    _main()
