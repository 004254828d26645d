"""A draft of some of the target's own layers, for the baselines: Draft&Verify (Zhang et al. 2024), PPSD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pipespec.models.properties import text_config
from pipespec.models.quantizing import sharing


def kept_layers(layers: int, kept: int) -> list[int]:
    """The layers of a draft: ``kept`` of ``layers``, the first and the last one among them, evenly spaced."""
    if not 1 <= kept <= layers:
        raise ValueError(f"a draft of {kept} layers of a target with {layers}")
    return [round(i * (layers - 1) / max(1, kept - 1)) for i in range(kept)]


def with_layers(target: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model of some of the target's layers, with its embedding, norm and head. It shares the target's parameters.

    Args:
        target: a model whose layers are all alike, such as LLaMA.
        kept: indices of layers, ascending.
    """
    draft = sharing(target)
    decoder: Any = getattr(draft, draft.base_model_prefix)
    total = len(decoder.layers)
    decoder.layers = nn.ModuleList(decoder.layers[i] for i in kept)
    for place, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # where its keys and values lie in the cache
                module.layer_idx = place
    # Often one object.
    for config in (draft.config, text_config(draft.config), decoder.config):
        types = getattr(config, "layer_types", None)
        if types is not None and len(types) == total:
            config.layer_types = [types[i] for i in kept]
        config.num_hidden_layers = len(kept)
    return draft
