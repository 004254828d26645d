"""Multi-head latent attention (DeepSeek-V2, section 2.1), as the native decoder takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipespec_kernels.formats import QuantizedMatrix

__all__ = ["Latent"]


@dataclass(frozen=True)
class Latent:
    """What an attention has in place of its matrices of queries, keys and values. Matrices are those of :class:`pipespec_kernels.decoder.LayerWeights`.

    There are ``heads`` heads. A query has ``plain`` elements, and ``rotary_dim`` that are rotated. A cache holds one latent of ``rank`` elements for the keys and
    values of all heads, after its norm, and the rotated part of the keys, which they share.

    Attributes:
        queries: ``[heads * (plain + rotary_dim), H]``, or with latents of queries ``[.., query_rank]``.
        latents: ``[rank + rotary_dim, H]``.
        keys: float32 or bfloat16 ``[heads * rank, plain]``: of each head the transposed matrix that makes keys of latents.
        values: float32 or bfloat16 ``[heads * value_dim, rank]``: of each head the matrix that makes values of latents.
        norm: ``[rank]``.
        eps: Of the norms of latents.
        query_latents: ``[query_rank, H]``; None: queries have no latents.
        query_norm: ``[query_rank]``.
        latents_bias: ``[rank + rotary_dim]``.
        query_latents_bias: ``[query_rank]``.
    """

    queries: Tensor | QuantizedMatrix
    latents: Tensor | QuantizedMatrix
    keys: Tensor
    values: Tensor
    norm: Tensor
    eps: float
    query_latents: Tensor | QuantizedMatrix | None = None
    query_norm: Tensor | None = None
    latents_bias: Tensor | None = None
    query_latents_bias: Tensor | None = None

    def outputs(self) -> int:
        """The number of elements that the attention gives."""
        return self.values.shape[0]

    def native(
        self, name: str, sizes: tuple[int, int, int, int], at: Callable[..., tuple[int, ...]]
    ) -> tuple[Any, ...]:
        """What the native code takes.

        Args:
            name: of the layer's attention.
            sizes: hidden size, heads, elements of the latent, elements that are rotated.
            at: the address of a weight, by its name and the shape that it must have.
        """
        hidden, heads, rank, rotated = sizes
        plain, query_rank = self.keys.shape[1], 0 if self.query_latents is None else self.query_latents.shape[0]
        if not rank or not plain or self.outputs() % heads or (self.query_norm is None) != (query_rank == 0):
            raise ValueError(
                f"{name}: a latent attention has latents, parts of queries that are not rotated, {heads} heads of values, and a norm of latents of queries"
            )
        weights = (
            ("query_latents", self.query_latents, (query_rank, hidden)),
            ("queries", self.queries, (heads * (plain + rotated), query_rank or hidden)),
            ("latents", self.latents, (rank + rotated, hidden)),
            ("keys", self.keys, (heads * rank, plain)),
            ("values", self.values, (self.outputs(), rank)),
            ("norm", self.norm, (rank,)),
            ("query_norm", self.query_norm, (query_rank,)),
            ("latents_bias", self.latents_bias, (rank + rotated,)),
            ("query_latents_bias", self.query_latents_bias, (query_rank,)),
        )
        described = [at(f"{name}.{part}", weight, size) for part, weight, size in weights]
        return described, (plain, self.outputs() // heads, query_rank), self.eps
