"""Where the weights of multi-head latent attention are in transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipespec_kernels.formats import QuantizedMatrix, dequantize
from pipespec_kernels.latent import Latent

Matrix = torch.Tensor | QuantizedMatrix

NUMBERS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Attributes of the modules that count."""


def is_latent(attention: Any) -> bool:
    """Whether an attention keeps latents of keys and values."""
    return hasattr(attention, "kv_a_proj_with_mqa")


def latent_of(own: Any, matrix: Callable[[Any], Any], *, in_pairs: bool) -> Latent:
    """What the native decoder takes of an attention.

    Args:
        own: the module.
        matrix: of a linear module.
        in_pairs: the model rotates neighbours, and keeps the halves of what is rotated one after the other. The rows are brought into that order.
    """
    heads, rank, plain, rotated = own.num_heads, own.kv_lora_rank, own.qk_nope_head_dim, own.qk_rope_head_dim
    of_queries = own.q_proj if own.q_lora_rank is None else own.q_b_proj
    queries, latents, bias = (
        matrix(of_queries),
        matrix(own.kv_a_proj_with_mqa),
        _detached(own.kv_a_proj_with_mqa, "bias"),
    )
    if in_pairs:
        halves = torch.arange(rotated).view(-1, 2).T.reshape(-1)
        head = torch.cat([torch.arange(plain), plain + halves])
        queries = _rows(queries, (torch.arange(heads)[:, None] * (plain + rotated) + head).flatten())
        order = torch.cat([torch.arange(rank), rank + halves])
        latents, bias = _rows(latents, order), None if bias is None else bias[order]
    both = _floats(matrix(own.kv_b_proj)).view(heads, plain + own.v_head_dim, rank)
    more: dict[str, Any] = {}
    if own.q_lora_rank is not None:
        more = {
            "query_latents": matrix(own.q_a_proj),
            "query_norm": own.q_a_layernorm.weight.detach(),
            "query_latents_bias": _detached(own.q_a_proj, "bias"),
        }
    return Latent(
        queries,
        latents,
        both[:, :plain].transpose(1, 2).reshape(heads * rank, plain),
        both[:, plain:].reshape(-1, rank),
        own.kv_a_layernorm.weight.detach(),
        float(own.kv_a_layernorm.variance_epsilon),
        latents_bias=bias,
        **more,
    )


def _floats(matrix: Matrix) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else dequantize(matrix)


def _rows(matrix: Matrix, order: torch.Tensor) -> Matrix:
    return matrix[order] if isinstance(matrix, torch.Tensor) else matrix.rows(order)


def _detached(module: Any, name: str) -> torch.Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.detach()
