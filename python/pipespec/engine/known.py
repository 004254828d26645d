"""Known models: what a form that bypasses a model's own code depends on, and why there is none. All of these reasons are here and in
:func:`pipespec.models.families.identity`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from pipespec.engine.attention import ATTENTION, MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.recurrent import recurrent_signature
from pipespec.models import families
from pipespec.models.families import NotReadable
from pipespec.models.layout import CacheLayout
from pipespec.models.parts import ModelParts

NATIVE, FUSED, EXACT, OWN = "native", "fused", "exact", "own"
"""The forms of a model: the native decoder's, the fused operations over static caches, these with row-independent products, and its own modules."""

AUTOCAST = "autocast"
NOT_ASKED_FOR = "native=False"


class Identity(NamedTuple):
    """What the form of a model, or of parts of one, depends on, so that a change is noticed.

    Attributes:
        reason: why there is only the form of its own modules; None where there may be another one.
        seen: addresses and versions of the weights, and numbers in the modules; of recurrent layers what their states depend on.
    """

    reason: str | None
    seen: tuple[Any, ...] | None


def identify(model: PreTrainedModel | ModelParts, form: str) -> Identity:
    """The identity of a form now. It costs a fraction of a millisecond for 12 layers: once per sequence."""
    reason = NOT_ASKED_FOR
    if form != OWN:
        try:
            return Identity(None, _native(model) if form == NATIVE else _fused(model))
        except NotReadable as error:
            reason = str(error)
    return Identity(reason, _own(model))


def refusal_of_cache(cache: RowCache) -> str | None:
    """Why a forward over a cache calls the model as a whole, whatever the model is: autocast changes what modules do, and only modules read lengths on
    the device."""
    if cache.is_recurrent:
        # Its form calls the modules of the layers in any case.
        return None
    if torch.is_autocast_enabled(cache.device.type):
        return AUTOCAST
    return "the lengths are on the device" if cache.uses_device_lengths else None


def _native(model: PreTrainedModel | ModelParts) -> tuple[Any, ...]:
    if mask_kind(model.config) is MaskKind.NONE:
        raise NotReadable(f"its attention is {model.config._attn_implementation!r}")
    return (*families.identity(model), model.config._attn_implementation)


def _fused(model: PreTrainedModel | ModelParts) -> tuple[Any, ...]:
    if model.config._attn_implementation != ATTENTION:
        raise NotReadable(f"its attention is {model.config._attn_implementation!r}")
    return families.identity(model, packed=False)


def _own(model: PreTrainedModel | ModelParts) -> tuple[Any, ...] | None:
    if isinstance(model, ModelParts):
        return recurrent_signature(model)
    return recurrent_signature(ModelParts.of(model)) if CacheLayout.of(model.config).states is not None else None
