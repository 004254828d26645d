"""Dynamic RoPE: rotary embeddings that depend on the length of the text, with the values of ``generate()`` for any number of fed tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.models.properties import text_config
from pipespec.process.forks import Lock

_one_at_a_time = Lock()
"""Pipelines in other threads may share the model, and so its rotary modules."""


def rope_type(model: PreTrainedModel) -> str:
    """The ``rope_type`` of a model, as transformers names it; empty if it has several, or none."""
    rope = getattr(text_config(model.config), "rope_parameters", None) or {}
    return str(rope.get("rope_type", ""))


def is_dynamic(rope_type: object) -> bool:
    """Whether RoPE of this type depends on the longest position of a forward."""
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def rope_changes_at(model: PreTrainedModel) -> int | None:
    """Positions beyond which a model's RoPE depends on the longest position of a forward; None: it never does."""
    config, kind = text_config(model.config), rope_type(model)
    if not is_dynamic(kind):
        return None
    if kind == "longrope":
        return int(config.rope_parameters.get("original_max_position_embeddings", 0))
    return int(config.max_position_embeddings)


class DynamicRope:
    """The RoPE of a model with ``rope_type`` dynamic or longrope (transformers' ``dynamic_rope_update``).

    Up to ``limit`` tokens its frequencies are constant. Beyond the limit, all positions of a forward get the frequencies of its longest one,
    so keys in a cache depend on the forward that made them. With a dynamic type, transformers also keeps the frequencies after the text that
    they were computed for. Here each forward gets the frequencies of a given length, and none are kept.

    Args:
        model: with such a ``rope_type``.
        limit: see :func:`rope_changes_at`.

    Attributes:
        recomputes: whether ``generate()`` recomputes the whole text when it passes the limit, as Phi-3 and its relatives do.
    """

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        self.limit = limit
        self.recomputes = rope_type(model) == "longrope" and model.config.model_type in ("phi3", "phimoe")
        prepare = inspect.unwrap(type(model).prepare_inputs_for_generation)
        self._feeds_all = "next_sequence_length" in prepare.__code__.co_consts
        self._rotaries: list[Any] = [m for m in model.modules() if is_dynamic(getattr(m, "rope_type", None))]

    @classmethod
    def of(cls, model: PreTrainedModel) -> DynamicRope | None:
        """The dynamic RoPE of a model; None if its RoPE is constant, or computed by code outside of transformers."""
        limit = rope_changes_at(model)
        found = None if limit is None else cls(model, limit)
        return found if found is not None and found._rotaries else None

    @contextmanager
    def at_length(self, length: int, most: int) -> Iterator[None]:
        """Within, forwards have the RoPE of a text of ``length`` tokens.

        Args:
            length: of the text.
            most: positions of the forward, padding columns beyond ``length`` included.
        """
        with _one_at_a_time:
            # Nothing to do; and other threads may be in the model's own generate().
            if most <= self.limit:
                yield
                return
            before = [rotary.__dict__.get("forward") for rotary in self._rotaries]
            self.reset()
            for rotary in self._rotaries:
                rotary.__dict__["forward"] = _RotaryAtLength(rotary, length)
            try:
                yield
            finally:
                for rotary, own in zip(self._rotaries, before, strict=True):
                    del rotary.__dict__["forward"]
                    if own is not None:
                        rotary.__dict__["forward"] = own
                self.reset()

    def is_reproducible(self, *, in_chunks: bool, padded: bool) -> bool:
        """Whether the RoPE of a call can be that of ``generate()``.

        It can, unless ``generate()`` recomputes the text. With ``padded`` it then does so at another length, with chunks in each of them,
        and some versions (5.0) feed the newest token alone, to an empty cache.

        Args:
            in_chunks: whether ``generate()``'s prefill is in chunks.
            padded: whether every row has padding.
        """
        return not self.recomputes or (self._feeds_all and not in_chunks and not padded)

    def reset(self) -> None:
        """Restore the frequencies of a new model. transformers does so for short texts only, and 5.0 never."""
        for rotary in self._rotaries:
            if "dynamic" in rotary.rope_type:
                rotary.max_seq_len_cached = rotary.original_max_seq_len
                original = rotary.original_inv_freq.to(rotary.inv_freq.device)
                rotary.register_buffer("inv_freq", original, persistent=False)


class _RotaryAtLength:
    """A rotary embedding's forward with one more column, at the last position of a given length; its result is dropped."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        self._own, self._last = rotary.forward, length - 1
        # engine.forward takes the class's own function for an unpatched module.
        self.__func__ = getattr(rotary.forward, "__func__", None)

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = position_ids.new_full((position_ids.shape[0], 1), self._last)
        cos, sin = self._own(x, position_ids=torch.cat([position_ids.clamp(max=self._last), last], dim=-1))
        return cos[:, :-1], sin[:, :-1]
