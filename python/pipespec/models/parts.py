"""Parts of a LLaMA-like model that run one after the other, and what layers read beside hidden states: inputs of their own, and the keys of others (Gemma 4)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel


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


class ModelParts(NamedTuple):
    """Parts of a model; None for a part that is elsewhere.

    Attributes:
        config: of the whole model.
        layers: decoder layers.
        first: index of ``layers[0]`` in the whole model.
        rotary: rotary embedding.
        embed: token embedding.
        norm: last norm.
        head: language-model head.
        per_layer: what makes inputs of each layer; None: there are none.
    """

    config: Any
    layers: Sequence[Any] = ()
    first: int = 0
    rotary: Any = None
    embed: Any = None
    norm: Any = None
    head: Any = None
    per_layer: PerLayer | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelParts:
        """All of a model with LLaMA's parts."""
        base: Any = model.model
        layers = list(base.layers[: model.config.num_hidden_layers])
        # In LFM2 the last norm has the embedding's name, and that with experts has another one for the rotation.
        norm = base.norm if hasattr(base, "norm") else base.embedding_norm
        rotary = base.rotary_emb if hasattr(base, "rotary_emb") else base.pos_emb
        return cls(model.config, layers, 0, rotary, base.embed_tokens, norm, model.lm_head, PerLayer.of(base))

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module under its name in the whole model."""
        named = {f"model.layers.{i}": layer for i, layer in enumerate(self.layers, self.first)}
        named |= {"model.embed_tokens": self.embed, "model.rotary_emb": self.rotary}
        if self.per_layer is not None:
            named |= {f"model.{name}": module for name, module in self.per_layer.modules().items()}
        for name, part in (named | {"model.norm": self.norm, "lm_head": self.head}).items():
            if part is not None:
                yield from part.named_modules(prefix=name)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter. A tied one comes twice."""
        for _, module in self.named_modules():
            yield from (parameter for parameter in module._parameters.values() if parameter is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.parameters()).device

    def cache_config(self) -> Any:
        """The configuration of a ``RowCache`` for these layers alone."""
        config = copy.copy(self.config)
        config.num_hidden_layers = len(self.layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[self.first : self.first + len(self.layers)]
        if shared := getattr(config, "num_kv_shared_layers", 0):
            # The last layers of the model read keys of others. Such a model is not cut, but its first layers are compared alone.
            config.num_kv_shared_layers = max(0, shared - (self.config.num_hidden_layers - len(self.layers)))
        return config


def _called(module: Any, x: torch.Tensor) -> Any:
    return module(x)


def inputs_of(
    parts: ModelParts,
    tokens: torch.Tensor | None,
    embedded: torch.Tensor,
    call: Callable[[Any, torch.Tensor], Any] = _called,
) -> list[dict[str, Any]]:
    """By layer, the arguments of its call beside those that all layers of LLaMA have.

    Args:
        parts: with the first layer of the model, if its layers have any.
        tokens: int64 ``[rows, q]``; None where no layer has inputs of its own.
        embedded: what the first layer reads of them, ``[rows, q, H]``.
        call: how modules are called.
    """
    more: list[dict[str, Any]] = [{} for _ in parts.layers]
    if any(hasattr(getattr(layer, "self_attn", None), "store_full_length_kv") for layer in parts.layers):
        shared: dict[str, Any] = {}  # layers put their keys and values there, and later ones read them
        more = [{"shared_kv_states": shared} for _ in parts.layers]
    if (per_layer := parts.per_layer) is not None:
        projected = call(per_layer.projection, embedded) * per_layer.in_scale
        projected = call(per_layer.norm, projected.unflatten(-1, (-1, per_layer.size)))
        own = per_layer.embed(tokens).to(embedded.dtype).unflatten(-1, (-1, per_layer.size))
        made = (projected + own) * per_layer.sum_scale
        for i, each in enumerate(more):
            each["per_layer_input"] = made[:, :, i]
    return more
