"""Rotary angles that depend on the length of the text: those of ``generate()``, whatever is fed at once."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.compat import text_config

_one_at_a_time = threading.RLock()
"""The modules are the model's, which pipelines in other threads may have, too."""


def rope_type(model: PreTrainedModel) -> str:
    """The kind of a model's rotary angles, as transformers names it; empty where there are several, or none."""
    rope = getattr(text_config(model.config), "rope_parameters", None) or {}
    return str(rope.get("rope_type", ""))


def depend_on_length(kind: object) -> bool:
    """Whether angles of this type depend on the longest position of a forward."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def angles_change_at(model: PreTrainedModel) -> int | None:
    """Beyond how many positions a model's rotary angles depend on the longest position of a forward; None: never."""
    config, kind = text_config(model.config), rope_type(model)
    if not depend_on_length(kind):
        return None
    if kind == "longrope":
        return int(config.rope_parameters.get("original_max_position_embeddings", 0))
    return int(config.max_position_embeddings)


class LengthAngles:
    """The rotary angles of a model with ``rope_type`` dynamic or longrope (transformers' ``dynamic_rope_update``).

    Up to ``limit`` tokens they never change. Beyond it, all positions of a forward get the angles that belong to its longest one, so the
    keys in a cache depend on which forward made them; of a dynamic type, transformers also lets them outlast the text for which they were
    computed. Here each forward is told which length it is to see, and nothing outlasts it.
    """

    def __init__(self, model: PreTrainedModel, limit: int) -> None:
        self.limit = limit
        # generate() then computes the whole text anew, in Phi-3 and its relatives.
        self.recomputes = rope_type(model) == "longrope" and model.config.model_type in ("phi3", "phimoe")
        prepare = inspect.unwrap(type(model).prepare_inputs_for_generation)
        self._feeds_all = "next_sequence_length" in prepare.__code__.co_consts
        self._rotaries: list[Any] = [m for m in model.modules() if depend_on_length(getattr(m, "rope_type", None))]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LengthAngles | None:
        """None where the angles are always the same, or are computed by code that transformers does not have."""
        limit = angles_change_at(model)
        found = None if limit is None else cls(model, limit)
        return found if found is not None and found._rotaries else None

    @contextmanager
    def seeing(self, length: int, most: int) -> Iterator[None]:
        """Within, forwards have the angles of one whose longest position is ``length - 1``. Columns beyond that, up to ``most``, are padding."""
        with _one_at_a_time:
            if most <= self.limit:  # nothing to see to; and other threads may be in the model's own generate()
                yield
                return
            before = [rotary.__dict__.get("forward") for rotary in self._rotaries]
            self.reset()
            for rotary in self._rotaries:
                rotary.__dict__["forward"] = _Seeing(rotary, length)
            try:
                yield
            finally:
                for rotary, own in zip(self._rotaries, before, strict=True):
                    del rotary.__dict__["forward"]
                    if own is not None:
                        rotary.__dict__["forward"] = own
                self.reset()

    def are_followed(self, *, in_chunks: bool, padded: bool) -> bool:
        """Whether a call's angles can be ``generate()``'s. ``in_chunks``: its prefill is; ``padded``: every row has padding.

        Where it computes the text anew: with ``padded`` not where the angles change, with chunks in each of them, and in some versions
        (5.0) it then feeds the newest token alone, to an empty cache.
        """
        return not self.recomputes or (self._feeds_all and not in_chunks and not padded)

    def reset(self) -> None:
        """As in a new model. transformers does that for short texts only, and in 5.0 never."""
        for rotary in self._rotaries:
            if "dynamic" in rotary.rope_type:
                rotary.max_seq_len_cached = rotary.original_max_seq_len
                original = rotary.original_inv_freq.to(rotary.inv_freq.device)
                rotary.register_buffer("inv_freq", original, persistent=False)


class _Seeing:
    """A rotary embedding's forward, asked for one more column: at the last position of the length that it is to see."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        self._own, self._last = rotary.forward, length - 1
        self.__func__ = getattr(rotary.forward, "__func__", None)  # what runs is the class's own

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = position_ids.new_full((position_ids.shape[0], 1), self._last)
        cos, sin = self._own(x, position_ids=torch.cat([position_ids.clamp(max=self._last), last], dim=-1))
        return cos[:, :-1], sin[:, :-1]
