"""Agreement of a draft that has rested with what the target has generated meanwhile: it tells whether the draft pays."""

from __future__ import annotations

import numpy as np
import torch

from pipespec.engine.sampler import Sampler

LONG_REST = 8
"""Tokens from which on a draft compares those that it has not read with its own choices. This costs their logits."""


def agreement(select: Sampler, logits: torch.Tensor, fed: torch.Tensor, known: int, position: int) -> tuple[int, int]:
    """Compare the draft's own choices with tokens of the target.

    Args:
        select: the draft's sampler.
        logits: ``[1, columns, V]``.
        fed: ``[1, columns]``, tokens of the target in the first ``known + 1`` of them.
        known: tokens to compare.
        position: of the first choice.

    Returns:
        How many agree, and how many were compared.
    """
    one, none = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    own = [
        int(
            select(logits[:, c : c + 1], fed[:, c : c + 1].to(logits.device), one, none, np.array([position + c]))[0, 0]
        )
        for c in range(known)
    ]
    return sum(a == b for a, b in zip(own, fed[0, 1 : known + 1].tolist(), strict=True)), known
