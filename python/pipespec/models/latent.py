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


def _of_queries(own: Any) -> Any:
    return own.q_proj if own.q_lora_rank is None else own.q_b_proj


def _is_in_pairs(own: Any) -> bool:
    """Whether the model rotates neighbours, and keeps the halves of what is rotated one after the other."""
    return bool(getattr(own.config, "rope_interleave", False))


def copied_bytes(module: Any) -> int:
    """Bytes of the matrices of an attention that :func:`latent_of` copies, at most."""
    if not is_latent(module):
        return 0
    both, rows = module.kv_b_proj, [_of_queries(module), module.kv_a_proj_with_mqa] if _is_in_pairs(module) else []
    size = torch.float32.itemsize if getattr(both, "weight", None) is None else both.weight.itemsize
    return both.out_features * both.in_features * size + sum(
        each.weight.nbytes for each in rows if hasattr(each, "weight")
    )


def latent_of(own: Any, matrix: Callable[[Any], Any]) -> Latent:
    """What the native decoder takes of an attention. Where the model rotates neighbours, the rows are brought into the order of halves.

    Args:
        own: the module.
        matrix: of a linear module.
    """
    heads, rank, plain, rotated = own.num_heads, own.kv_lora_rank, own.qk_nope_head_dim, own.qk_rope_head_dim
    queries, latents, bias = (
        matrix(_of_queries(own)),
        matrix(own.kv_a_proj_with_mqa),
        _detached(own.kv_a_proj_with_mqa, "bias"),
    )
    if _is_in_pairs(own):
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
