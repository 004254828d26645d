"""``attn_implementation="pipespec"``: attention by row lengths instead of masks, for any decoder of transformers.

Where the cache says how long each row is (:class:`pipespec.cache.RowCache` puts that on the keys it hands over, as a tensor
on the device), or all rows are equally long and without padding, a step over the cache needs no mask: it goes to
:func:`pipespec_kernels.ops.verify_attention`. Everything else is what ``"sdpa"`` does, mask included: padding, a whole prompt
at once, attention that is not causal, training, and on the CPU whatever torch's own attention can do without a mask.
"""

from __future__ import annotations

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
"""Columns up to which a step over the cache is narrow: beyond, torch's kernels for whole prompts are made for it."""


def attach_lengths(keys: torch.Tensor, lengths: torch.Tensor) -> None:
    """Say of keys ``[rows, kv_heads, S, head_dim]`` that row ``r`` held ``lengths[r]`` before the columns of this forward."""
    keys._pipespec_lengths = lengths  # type: ignore[attr-defined]


def lengths_only(rows: int, q: int, device: torch.device) -> torch.Tensor:
    """What is passed as the mask where the lengths say it all: 4-D, so that transformers derives none, and of no keys."""
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
    """The attention that transformers calls. ``query [rows, heads, q, head_dim]`` to ``[rows, q, heads, head_dim]``.

    RuntimeError where there are lengths in place of a mask, and something is asked for that attention by lengths cannot do.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from pipespec_kernels import ops

    lengths = getattr(key, "_pipespec_lengths", None)
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        if lengths is None:
            raise RuntimeError("the mask of a RowCache was passed to a model without that cache")
        attention_mask = None
    elif attention_mask is not None and lengths is not None:
        seen = attention_mask.shape[-1]  # the cache may have handed over all its storage
        key, value = key[:, :, :seen], value[:, :, :seen]

    cannot = {
        "dropout": dropout > 0,
        "gradients": torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)),
        "attention that is not causal": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
        **{name: kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux")},
        "output_attentions": bool(kwargs.get("output_attentions")),
    }
    q, keys = query.shape[2], key.shape[2]
    if attention_mask is None and lengths is not None:
        if any(cannot.values()):
            asked = ", ".join(name for name, is_asked in cannot.items() if is_asked)
            raise RuntimeError(f"a RowCache without a mask does not work with {asked}")
    elif attention_mask is not None or any(cannot.values()) or _torchs_own(q, keys, query.is_cuda):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return result
    else:
        lengths = torch.full((query.shape[0],), keys - q, dtype=torch.int32, device=query.device)
    return ops.verify_attention(query, key, value, lengths, scale=scaling).transpose(1, 2), None


def _torchs_own(q: int, keys: int, on_gpu: bool) -> bool:
    """Whether torch's attention does without a mask here, and does it well."""
    return (q == keys and (q > _WIDEST or not on_gpu)) or (q == 1 and not on_gpu)


def attention_mask(**kwargs: Any) -> torch.Tensor | None:
    """The mask that transformers asks for: None where the last column sees all keys and the others one less each; else sdpa's."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    from pipespec.compat import mask_columns

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
    """Make ``attn_implementation="pipespec"`` known to transformers. Done by itself when both packages are imported."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attention_forward)
    # Without a mask function of that name, transformers would pass None always, padding or not.
    AttentionMaskInterface.register(ATTENTION, attention_mask)


def register_when_imported() -> None:
    """:func:`register_attention` now, if transformers is loaded, or as soon as it is: importing it takes seconds."""
    if _MODELS in sys.modules:
        register_attention()
    else:
        sys.meta_path.insert(0, _Watch())


_MODELS = "transformers.modeling_utils"


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the module of transformers without which there is no model; then it is gone."""

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
