"""Rows of a matrix in another order, as the native decoder reads them: where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OrderedRows", "in_order"]

_PANEL = 16
"""Outputs that a product computes at a time."""


@dataclass(frozen=True)
class OrderedRows:
    """Some rows of a matrix, which share its memory. See :func:`in_order`.

    Attributes:
        matrix: ``[stored, inputs]``.
        order: int64 ``[rows]`` on the CPU: their numbers in ``matrix``. From each multiple of 16 on, up to 16 are neighbours.
    """

    matrix: Tensor
    order: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.order.numel(), self.matrix.shape[1]


def in_order(whole: Tensor, order: Tensor) -> Tensor | OrderedRows:
    """The rows ``order`` of a tensor: of a matrix where they lie, if products can read them there, else copies."""
    at = torch.arange(order.numel(), device="cpu")
    are_neighbours = torch.equal(order, order[at // _PANEL * _PANEL] + at % _PANEL)
    return OrderedRows(whole, order) if whole.ndim == 2 and are_neighbours else whole[order]
