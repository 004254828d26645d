"""The ``generate()`` contract: a caller's arguments become a checked request, a finished request becomes a LongTensor.

Nothing is ignored silently: an argument is honoured, has no effect on greedy decoding in transformers either, or is refused by
name.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from pipespec_kernels.state import MAX_EOS

_HONOURED = {
    "max_length",
    "max_new_tokens",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "do_sample",
}

# transformers itself does not look at these in greedy decoding, or they describe the file the configuration came from.
_WITHOUT_EFFECT = {
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits",
    "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "remove_invalid_values",
    "decoder_start_token_id", "transformers_version", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "disable_compile", "compile_config",
    "max_matching_ngram_size",
}  # fmt: skip

# Values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1, 1.0),
}

_MOST_TOKENS = 2**30  # positions are 32-bit numbers

_SUPPORTED = (
    "supported: input_ids, attention_mask, generation_config, max_new_tokens, max_length, eos_token_id, pad_token_id, "
    "do_sample=False, streamer"
)


@dataclass(frozen=True)
class Prepared:
    """A checked call.

    ``input_ids``: LongTensor ``[B, S]`` as given; ``prompts``: per row its real tokens, int32 ``[P_r]``; ``max_new_tokens``: most
    tokens any row may get; ``eos``: ids that end a row; ``pad``: id that fills the finished rows of the result.
    """

    input_ids: torch.Tensor
    prompts: list[np.ndarray]
    max_new_tokens: int
    eos: list[int]
    pad: int

    @property
    def limits(self) -> list[int]:
        return [len(p) + self.max_new_tokens for p in self.prompts]

    def assemble(self, generated: list[list[int]]) -> torch.Tensor:
        """The result as ``model.generate()`` gives it: LongTensor ``[B, S + longest]``, finished rows filled with ``pad``."""
        longest = max(len(row) for row in generated)
        new = torch.full((len(generated), longest), self.pad, dtype=torch.long)
        for row, tokens in enumerate(generated):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        return torch.cat([self.input_ids, new.to(self.input_ids.device)], dim=1)


def prepare(
    model: PreTrainedModel,
    input_ids: Any,
    attention_mask: Any = None,
    generation_config: GenerationConfig | None = None,
    **kwargs: Any,
) -> Prepared:
    """Check the arguments of a call of ``generate()`` for ``model`` before any work is done.

    Raises ``ValueError`` for values that cannot work, ``TypeError`` for things of the wrong kind, ``NotImplementedError`` for an
    option of transformers that exists but is not supported here; each names the argument.
    """
    config = _effective_config(model, generation_config, kwargs)
    ids = _check_input_ids(input_ids, model)
    # Negative ids never occur: transformers takes them for "never stop".
    eos = [token for token in _as_ids("eos_token_id", config.eos_token_id) if token >= 0]
    if len(eos) > MAX_EOS:
        raise ValueError(f"eos_token_id: at most {MAX_EOS} ids, got {len(eos)}")
    pads = _as_ids("pad_token_id", config.pad_token_id)
    mask = _check_mask(attention_mask, ids, pads, eos)
    lengths = [int(n) for n in mask.sum(dim=1)]
    cpu_ids = ids.to("cpu", torch.int32)
    prompts = [cpu_ids[row, ids.shape[1] - n :].numpy().copy() for row, n in enumerate(lengths)]
    maximum = _positions(model)
    if maximum is not None and ids.shape[1] > maximum:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens, but the model's limit (max_position_embeddings) is {maximum}; shorten it"
        )
    return Prepared(ids, prompts, _new_tokens(config, ids.shape[1], maximum), eos, pads[0] if pads else (eos or [0])[0])


def _effective_config(
    model: PreTrainedModel, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> GenerationConfig:
    """The caller's keywords over the caller's configuration over the model's, as transformers merges them."""
    config = copy.deepcopy(model.generation_config)
    if given is not None:
        if not isinstance(given, GenerationConfig):
            raise TypeError(f"generation_config must be a GenerationConfig, not {type(given).__name__}")
        for name, value in given.to_dict().items():
            if value is not None:
                setattr(config, name, value)
    known = config.to_dict().keys() | GenerationConfig().__dict__.keys()
    for name, value in kwargs.items():
        if name not in known:
            raise TypeError(f"generate() got an unsupported argument '{name}'; {_SUPPORTED}")
        setattr(config, name, value)

    if config.do_sample:
        raise NotImplementedError(
            "sampling is not supported yet: pass do_sample=False for greedy decoding"
            + ("" if "do_sample" in kwargs else " (do_sample=True comes from the generation configuration)")
        )
    defaults = GenerationConfig()
    for name, value in config.__dict__.items():
        if name.startswith("_") or name in _HONOURED or name in _WITHOUT_EFFECT:
            continue
        if value is None or value is False or value == getattr(defaults, name, None) or value in _NEUTRAL.get(name, ()):
            continue
        if isinstance(value, (dict, list, tuple)) and not value:
            continue
        raise NotImplementedError(f"generate(): {name}={value!r} is not supported; {_SUPPORTED}")
    return config


def _check_input_ids(input_ids: Any, model: PreTrainedModel) -> torch.Tensor:
    if input_ids is None:
        raise ValueError("generate() needs input_ids: a LongTensor of shape [batch, length]")
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
    vocabulary = model.get_input_embeddings().weight.shape[0]
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


def _new_tokens(config: GenerationConfig, width: int, maximum: int | None) -> int:
    if config.max_new_tokens is not None:
        new = _as_int("max_new_tokens", config.max_new_tokens)
        if new <= 0:
            raise ValueError(f"max_new_tokens must be at least 1, not {new}")
        if new > _MOST_TOKENS:
            raise ValueError(f"max_new_tokens={new} is more than any row can have ({_MOST_TOKENS})")
        return new
    if config.max_length is None or config.max_length == GenerationConfig().max_length:
        new = config.max_length or 20  # transformers' default counts new tokens
        return new if maximum is None else max(1, min(new, maximum - width))
    length = _as_int("max_length", config.max_length)
    if length <= width:
        raise ValueError(f"max_length={length} leaves no room after a prompt of {width} tokens; use max_new_tokens")
    return length - width


def _positions(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)


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
