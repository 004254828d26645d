"""Keys and values in 8 bits: a dtype of storage alone."""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = torch.float8_e4m3fn
"""New keys and values, of another dtype, are rounded to it, and those beyond 448 become 448."""


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as storage of a dtype keeps them: those beyond its range as its largest one."""
    if dtype is not KEPT:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)
