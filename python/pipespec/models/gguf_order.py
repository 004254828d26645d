"""Weights that lie in GGUF files in another order than in transformers, or in several parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipespec.models.gguf_architectures import Architecture


def rows_of(row: Architecture, config: Any, module: str, leaf: str) -> Tensor | None:
    """The numbers of a weight's rows in the file, in the order of the model.

    Args:
        row: of the architecture.
        config: of the model.
        module: name of the module, after that of its layer.
        leaf: of the weight in it.

    Returns:
        int64 ``[rows]``, or None: they lie in the model's order, or pair by pair of a rotation (:class:`pipespec.models.quantized.Blocks`).
    """
    part = module.rpartition(".")[2]
    if not row.tiled or not module.startswith("linear_attn"):
        return None
    size = config.linear_value_head_dim
    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return torch.cat([torch.arange(first), first + _by_group(config, size)])
    if part == "in_proj_z":
        return _by_group(config, size)
    return _by_group(config, 1) if part in ("in_proj_a", "in_proj_b") or leaf in ("A_log", "dt_bias") else None


def columns_of(row: Architecture, config: Any, module: str) -> Tensor | None:
    """:func:`rows_of`, of columns."""
    is_output = row.tiled and module == "linear_attn.out_proj"
    return _by_group(config, config.linear_value_head_dim) if is_output else None


def _by_group(config: Any, size: int) -> Tensor:
    """Of ``size`` numbers per head of values, which lie by their place in a group first. A group has one head of keys."""
    count, keys = config.linear_num_value_heads, config.linear_num_key_heads
    return torch.arange(count * size).view(count // keys, keys, size).transpose(0, 1).reshape(-1)


def rows_by_head(config: Any) -> Tensor:
    """:func:`rows_of` of Qwen3-Next's ``in_proj_qkvz``: queries, keys, values and gates of all heads follow one another in files, and those of each head of keys in
    the model."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    numbers = torch.arange(2 * heads * size + 2 * values)
    parts = numbers.split([heads * size, heads * size, values, values])
    return torch.cat([part.view(heads, -1) for part in parts], 1).reshape(-1)
