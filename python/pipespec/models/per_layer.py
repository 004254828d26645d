"""What layers read beside hidden states: inputs of their own, made of the tokens, and the keys and values of earlier layers (Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

NUMBERS = (
    "is_kv_shared_layer", "store_full_length_kv", "layer_type", "use_alternative_attention", "with_scale", "hidden_size_per_layer_input",
    "per_layer_input_scale", "per_layer_model_projection_scale",
)  # fmt: skip
"""Attributes of modules that a forward reads."""


class PerLayer(NamedTuple):
    """The modules of a model that make inputs of each layer, ``P`` per column.

    Attributes:
        embed: of tokens, for all layers of the model side by side.
        projection: of the embeddings that the first layer reads, likewise.
        norm: of what the projection gives for one layer.
        in_scale: factor in front of the norm.
        sum_scale: factor of the sum of both.
    """

    embed: Any
    projection: Any
    norm: Any
    in_scale: float
    sum_scale: float

    @classmethod
    def of(cls, base: Any) -> PerLayer | None:
        """Those of a decoder; None: it has none."""
        if not getattr(base, "hidden_size_per_layer_input", None):
            return None
        return cls(
            base.embed_tokens_per_layer,
            base.per_layer_model_projection,
            base.per_layer_projection_norm,
            base.per_layer_model_projection_scale,
            base.per_layer_input_scale,
        )

    @property
    def size(self) -> int:
        """``P``."""
        return int(self.norm.weight.shape[0])

    def modules(self) -> dict[str, nn.Module]:
        """The modules by their names in a decoder."""
        return {
            "embed_tokens_per_layer": self.embed,
            "per_layer_model_projection": self.projection,
            "per_layer_projection_norm": self.norm,
        }


def keys_of(attentions: Sequence[Any]) -> list[int | None]:
    """By layer, the index of the layer whose keys and values it reads; None: it has its own. ``attentions``: of the first layers of a model."""
    stored: dict[Any, int] = {}
    found: list[int | None] = []
    for i, attention in enumerate(attentions):
        if getattr(attention, "store_full_length_kv", False):
            stored[attention.layer_type] = i
        found.append(stored[attention.layer_type] if getattr(attention, "is_kv_shared_layer", False) else None)
    return found
