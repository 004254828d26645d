"""A model's own modules: called as a whole, or layer by layer."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel

from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.form import Form, PartsForm
from pipespec.engine.recurrent import with_states
from pipespec.engine.states import LayerStates
from pipespec.models.layout import takes_mask_per_type
from pipespec.models.parts import ModelParts


class WholeModel(Form):
    """``model(...)``, for any model. The explicit mask replaces transformers', which assumes one length for all rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Weak, because the choices must not keep models alive.
        self.model = weakref.ref(model)

    def __call__(self, tokens: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        model = self.model()
        assert model is not None
        q = tokens.shape[1]
        # With equal lengths, attentions without a 4-D mask (flash) are right without one.
        mask: Any = None
        if cache.ragged or mask_kind(model.config) is not MaskKind.NONE:
            windows = set(cache.windows)
            if windows == {None} or cache.uses_device_lengths:
                mask = cache.mask(q)
            elif takes_mask_per_type(getattr(model, model.base_model_prefix, model)):
                mask = cache.masks_by_type(q)
            else:
                mask = cache.mask(q, window=cache.windows[0])
        # logits_to_keep=0 would compute all of them.
        features, lengths = cache.features, cache.first_positions
        found = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=cache.positions(q),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(keep, 1),
            **({} if features is None else {"output_hidden_states": True}),
        )
        if features is not None:
            features.record(lengths, dict(enumerate(found.hidden_states or ())))
        logits: torch.Tensor = found.logits
        return logits[:, logits.shape[1] - keep :]


class _OffsetCache:
    """A cache of some layers, addressed by their indices in the whole model."""

    def __init__(self, cache: RowCache, first: int) -> None:
        self._cache, self._first = cache, first

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(keys, values, layer - self._first)

    def recurrent(self, layer: int, q: int) -> AbstractContextManager[LayerStates]:
        return self._cache.recurrent(layer - self._first, q)


class LayerLoop(PartsForm):
    """The layer modules, called one after the other: for parts of a model, and for recurrent layers, which keep their states per column."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts, parts.dtype)
        self._layers = [with_states(layer) for layer in parts.layers]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.parts.embed(tokens)
        return hidden

    def run_layers(
        self, hidden: torch.Tensor, cache: RowCache, features: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        q, first = hidden.shape[1], self.parts.first
        streams: dict[int, torch.Tensor] = {}
        masks, positions = cache.masks(q), cache.positions(q)
        ropes = self._ropes(hidden, positions)
        own = _OffsetCache(cache, first) if first else cache
        for i, (layer, mask, rope) in enumerate(zip(self._layers, masks, ropes, strict=True), first + 1):
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_embeddings=rope,
                position_ids=positions,
                past_key_values=own,
                use_cache=True,
            )
            if i in features:
                streams[i] = hidden
        return hidden, streams

    def _ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer cosines and sines, each ``[1 or rows, q, head_dim]``. Some models have one rotary embedding per type of layer."""
        parts = self.parts
        if not hasattr(parts.rotary, "layer_types"):
            return [parts.rotary(hidden, position_ids=positions)] * len(parts.layers)
        types = parts.config.layer_types[parts.first : parts.first + len(parts.layers)]
        made = {kind: parts.rotary(hidden, positions, kind) for kind in dict.fromkeys(types)}
        return [made[kind] for kind in types]

    def logits(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        logits: torch.Tensor = self.parts.head(self.parts.norm(hidden)[:, hidden.shape[1] - keep :])
        return logits
