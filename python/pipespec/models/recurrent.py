"""Where the weights of recurrent layers are in transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipespec.models.quantized import JoinedLinear
from pipespec_kernels.formats import QuantizedMatrix
from pipespec_kernels.recurrent import Recurrent
from pipespec_kernels.rows import OrderedRows, in_order

Matrix = torch.Tensor | QuantizedMatrix

CLASSES = ("GatedDeltaNet", "RMSNormGated", "ShortConv")
"""Ends of the names of the classes."""

NUMBERS = ("activation",)
"""Attributes of the modules that count."""


def recurrent_of(layer: Any, matrix: Callable[[Any], Any]) -> Recurrent | None:
    """What a layer has in place of its attention; None if it has attention. ``matrix``: of a linear module."""
    if hasattr(layer, "conv"):
        return _short_convolution(layer.conv, matrix)
    own = getattr(layer, "linear_attn", None)
    if own is None:
        return None
    key_heads, heads, key_dim, value_dim = own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim
    group = heads // key_heads
    if isinstance(getattr(own, "in_proj_qkvz", None), JoinedLinear):
        # Their outputs go head by head in the model, and not in these matrices.
        inputs, gates = map(matrix, own.in_proj_qkvz.parts)
        rest = matrix(own.in_proj_ba)
        beta, decay = (_rows(rest, order) for order in _by_head(rest, (group, group)))
    elif hasattr(own, "in_proj_qkvz"):
        # Head by head: query, key, the values and gates of its group; the betas and decays of that.
        whole, rest = matrix(own.in_proj_qkvz), matrix(own.in_proj_ba)
        *mixed, z = _by_head(whole, (key_dim, key_dim, group * value_dim, group * value_dim))
        inputs, gates = _rows(whole, torch.cat(mixed)), _rows(whole, z)
        beta, decay = (_rows(rest, order) for order in _by_head(rest, (group, group)))
    else:
        inputs, gates, beta, decay = (matrix(getattr(own, f"in_proj_{name}")) for name in ("qkv", "z", "b", "a"))
    bias, is_tiled = own.conv1d.bias, isinstance(own.out_proj, JoinedLinear)
    return Recurrent(
        inputs,
        matrix(own.out_proj.parts[0] if is_tiled else own.out_proj),
        own.conv1d.weight.detach()[:, 0],
        (key_heads, heads, key_dim, value_dim),
        gates,
        beta,
        decay,
        own.A_log.detach(),
        own.dt_bias.detach(),
        own.norm.weight.detach(),
        kernel_bias=None if bias is None else bias.detach(),
        is_tiled=is_tiled,
    )


def _short_convolution(own: Any, matrix: Callable[[Any], Any]) -> Recurrent:
    inputs, out, kernel = (
        None if part.bias is None else part.bias.detach() for part in (own.in_proj, own.out_proj, own.conv)
    )
    return Recurrent(
        matrix(own.in_proj),
        matrix(own.out_proj),
        own.conv.weight.detach()[:, 0],
        inputs_bias=inputs,
        out_bias=out,
        kernel_bias=kernel,
    )


def halves_of_heads(whole: Matrix, head_dim: int) -> list[Matrix | OrderedRows]:
    """Of the rows of queries and their gates, ``2 * head_dim`` in each head, the ones and the others."""
    return [_rows(whole, order) for order in _by_head(whole, (head_dim, head_dim))]


def _by_head(whole: Matrix, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The numbers of the rows of each part of a matrix, where ``sizes`` rows of the parts follow one another in each head."""
    return [part.flatten() for part in torch.arange(whole.shape[0], device="cpu").view(-1, sum(sizes)).split(sizes, 1)]


def _rows(whole: Matrix, order: torch.Tensor) -> Matrix | OrderedRows:
    return in_order(whole, order) if isinstance(whole, torch.Tensor) else whole.rows(order)
