"""What differs between versions of transformers and torch, and what attentions make of a mask: the one place that knows."""

from __future__ import annotations

import enum
import inspect
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import DynamicLayer

from pipespec.attention import ATTENTION


def text_config(config: Any) -> Any:
    """The part of a model's config that describes its decoder."""
    return config.get_text_config(decoder=True)


def compute_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's hidden states, and so of its keys and values.

    transformers' ``model.dtype`` is that of the first floating parameter, which may be an 8-bit float that is only stored.
    """
    dtype: torch.dtype = model.dtype
    if dtype.itemsize >= 2:
        return dtype
    wide = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize >= 2)
    return next(wide, dtype)


def embedding_size(model: Any) -> int:
    """Tokens of a model's embedding, also where its weight is packed."""
    return _rows(model.get_input_embeddings(), "num_embeddings")


def head_size(model: Any) -> int:
    """Logits per position of a model's head, also where its weight is packed."""
    return _rows(model.get_output_embeddings(), "out_features")


def _rows(module: Any, declared: str) -> int:
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.shape[0]
    return int(getattr(module, declared))


def query_length(query: int | torch.Tensor) -> int:
    """Columns of a forward as ``Cache.get_mask_sizes`` is told: an int, or (in 5.0) the 1-D ``cache_position``."""
    return query if isinstance(query, int) else query.shape[0]


def mask_columns(kwargs: dict[str, Any]) -> tuple[int, int | None]:
    """Of what a mask function is given: columns of the forward, and how many tokens are before them, where that is on the host.

    5.0 passes both as ``cache_position``, a tensor that may be on a device.
    """
    if "q_length" not in kwargs:
        return query_length(kwargs["cache_position"]), None
    offset = kwargs.get("q_offset", 0)
    return kwargs["q_length"], offset if isinstance(offset, int) else None


def cropped_length(length: int, n: int) -> int:
    """What ``Cache.crop(n)`` leaves of ``length`` tokens in the installed transformers.

    Negative ``n`` removes ``-n`` tokens in every version. 0 empties the cache in 5.0 and does nothing in later ones.
    Positive ``n`` keeps the first ``n`` tokens up to 5.17 and raises ValueError in later ones. Rather than knowing
    which version does what, ask its own layer, with tensors that have a shape and no memory.
    """
    layer = DynamicLayer()
    layer.keys = layer.values = torch.empty((1, 1, length, 1), device="meta")
    layer.is_initialized = True
    layer.crop(n)
    return int(layer.keys.shape[2])


def lost_arguments() -> dict[str, Any]:
    """What the caller gave to ``model.generate(..., custom_generate=callable)`` and transformers does not hand on.

    It drops ``streamer``, ``assistant_model`` and others for a callable, silently (5.0 to 5.23), and an empty ``past_key_values`` cannot be
    told from the one that it makes itself (before 5.15). They are found where they still are: in the variables of the ``generate()``
    that is calling us. Empty if none is.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is inspect.unwrap(GenerationMixin.generate).__code__:
            names = (
                "streamer",
                "assistant_model",
                "synced_gpus",
                "negative_prompt_ids",
                "negative_prompt_attention_mask",
            )
            lost = {name: frame.f_locals.get(name) for name in names}
            return lost | {"past_key_values": frame.f_locals.get("kwargs", {}).get("past_key_values")}
        frame = frame.f_back
    return {}


class MaskKind(enum.Enum):
    """What a model's attention makes of a 4-D mask."""

    SDPA = enum.auto()  # takes bool and additive; None means causal by flag
    EAGER = enum.auto()  # takes additive only: a bool mask is added as 0 and 1, silently; None means no mask at all
    NONE = enum.auto()  # no such mask


def mask_kind(config: Any) -> MaskKind:
    """The kind of the attention that a model with this config uses at the moment."""
    name = config._attn_implementation
    if name in ("sdpa", ATTENTION):
        return MaskKind.SDPA
    return MaskKind.EAGER if name == "eager" else MaskKind.NONE


def graph_handle(graph: torch.cuda.CUDAGraph) -> int:
    """The ``cudaGraphExec_t`` of a captured graph, for whoever launches it without torch. RuntimeError where torch does not tell (before 2.9.1)."""
    tell = getattr(graph, "raw_cuda_graph_exec", None)
    if tell is None:
        raise RuntimeError(f"torch {torch.__version__} does not hand out its CUDA graphs: use torch 2.9.1 or newer")
    return int(tell())


def forget_capture(device: int, pool: Any) -> None:
    """What torch leaves undone where a capture cannot be ended: its allocator takes it to go on, and fails when memory is to be given back.

    Does nothing where torch has done it.
    """
    with suppress(RuntimeError):  # "not currently recording"
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
