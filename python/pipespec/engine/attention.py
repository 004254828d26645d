"""``attn_implementation="pipespec"``: attention by row lengths instead of masks, for any decoder of transformers.

A step over a cache needs no mask if the lengths of the rows are known. :class:`pipespec.engine.cache.RowCache` attaches them to the keys it
returns, as a tensor on the device; with equal lengths and no padding they follow from the shapes. Such a step goes to
:func:`pipespec_kernels.ops.verify_attention`. Everything else goes to ``"sdpa"``, mask included: padding, a whole prompt at once, attention
that is not causal, training, and on the CPU the cases in which torch's own attention needs no mask.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTION = "pipespec"

_WIDEST = 32
"""Columns up to which a step is narrow. Torch's kernels for whole prompts are better for wider ones."""


class MaskKind(enum.Enum):
    """The 4-D masks that an attention implementation takes."""

    SDPA = enum.auto()
    """Boolean and additive ones; None means causal."""
    EAGER = enum.auto()
    """Additive ones only: a boolean mask would be added as 0 and 1, without an error. None means no mask at all."""
    NONE = enum.auto()
    """None."""


def mask_kind(config: Any) -> MaskKind:
    """The kind for the attention implementation that a configuration names now."""
    name = config._attn_implementation
    if name in ("sdpa", ATTENTION):
        return MaskKind.SDPA
    return MaskKind.EAGER if name == "eager" else MaskKind.NONE


def attach_lengths(keys: torch.Tensor, lengths: torch.Tensor, window: int | None = None) -> None:
    """Attach row lengths to the keys that a cache returns to the model.

    Args:
        keys: ``[rows, kv_heads, S, head_dim]``.
        lengths: int32 ``[rows]`` on their device, the tokens that each row held before the columns of this forward.
        window: of the layer; None: its columns see all keys.
    """
    keys._pipespec_lengths = lengths  # type: ignore[attr-defined]
    keys._pipespec_window = window  # type: ignore[attr-defined]


def lengths_only(rows: int, q: int, device: torch.device) -> torch.Tensor:
    """A mask of no keys, ``[rows, 1, q, 0]``: the attached lengths replace it. It is 4-D, so that transformers derives no mask of its own."""
    import torch

    return torch.empty((rows, 1, q, 0), dtype=torch.bool, device=device)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' ``AttentionInterface``.

    Args:
        module: the model's attention module.
        query: ``[rows, heads, q, head_dim]``.
        key: ``[rows, kv_heads, S, head_dim]``, with lengths attached if it comes from a RowCache.
        value: as ``key``.
        attention_mask: 4-D, or None, or the mask of :func:`lengths_only`.
        dropout: as in sdpa.
        scaling: of the scores.
        is_causal: None: as the module says.
        **kwargs: what else the model passes.

    Returns:
        ``[rows, q, heads, head_dim]``, and None for the weights.

    Raises:
        RuntimeError: lengths replace the mask, and the model needs what attention by lengths does not support.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from pipespec_kernels import ops

    lengths, window = getattr(key, "_pipespec_lengths", None), getattr(key, "_pipespec_window", None)
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        if lengths is None:
            raise RuntimeError("the mask of a RowCache was passed to a model without that cache")
        attention_mask = None
    elif attention_mask is not None and lengths is not None:
        # A static cache returns all of its storage.
        seen = attention_mask.shape[-1]
        key, value = key[:, :, :seen], value[:, :, :seen]

    cannot = {
        "dropout": dropout > 0,
        "gradients": torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)),
        "attention that is not causal": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
        **{name: kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux")},
        "output_attentions": bool(kwargs.get("output_attentions")),
    }
    q, keys, on_gpu = query.shape[2], key.shape[2], query.is_cuda
    # Here torch's attention needs no mask.
    is_fast = (q == keys and (q > _WIDEST or not on_gpu)) or (q == 1 and not on_gpu)
    if attention_mask is None and lengths is not None:
        if any(cannot.values()):
            asked = ", ".join(name for name, is_asked in cannot.items() if is_asked)
            raise RuntimeError(f"a RowCache without a mask does not work with {asked}")
    elif attention_mask is not None or any(cannot.values()) or is_fast:
        # Storage may have a dtype of its own.
        key, value = key.to(query.dtype), value.to(query.dtype)
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return result
    else:
        lengths = torch.full((query.shape[0],), keys - q, dtype=torch.int32, device=query.device)
    return ops.verify_attention(query, key, value, lengths, scale=scaling, window=window).transpose(1, 2), None


def attention_mask(**kwargs: Any) -> torch.Tensor | None:
    """The mask function of transformers' ``AttentionMaskInterface``.

    Returns:
        None if the last column sees all keys, and each column before it one key less; else sdpa's mask.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    from pipespec.models.compat import mask_columns

    q, offset = mask_columns(kwargs)
    keys = kwargs["kv_length"]
    if (
        offset is not None
        and keys == offset + q
        and kwargs.get("kv_offset", 0) == 0
        and kwargs.get("attention_mask") is None
        and kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        and kwargs.get("allow_is_causal_skip", True)
    ):
        return None
    if q != 1 and keys != q:
        # sdpa's None would mean that the first column sees one key (the prefill of a static cache).
        kwargs["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(**kwargs)
    return mask


def register_attention() -> None:
    """Register ``attn_implementation="pipespec"`` with transformers. The import of both packages does so, too."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attention_forward)
    # Without a mask function of that name, transformers would pass None always, padding or not.
    AttentionMaskInterface.register(ATTENTION, attention_mask)


def register_when_imported() -> None:
    """Call :func:`register_attention` now if transformers is loaded, else when it is. Its import takes seconds, so this does not import it."""
    if _MODELS in sys.modules:
        register_attention()
    else:
        sys.meta_path.insert(0, _Watch())


_MODELS = "transformers.modeling_utils"


class _Watch(importlib.abc.MetaPathFinder):
    """A finder that registers the attention after the import of :data:`_MODELS`, and removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register_attention()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
