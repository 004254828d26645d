"""The oracles of :mod:`pipespec_kernels.ops`: slow, obvious, plain torch, any device. Results are int32 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """Id of the largest logit in every row of ``logits[B, Q, V]``; the first of equals, the first NaN if any."""
    return torch.argmax(logits, dim=-1).to(device="cpu", dtype=torch.int32)


def verify(logits: Tensor, tokens: Tensor, n_fed: Tensor, n_hint: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy verification, one row and one position after the other; see :func:`pipespec_kernels.ops.verify`."""
    batch, width, _ = logits.shape
    selected = torch.full((batch, width), -1, dtype=torch.int32, device="cpu")
    accepted = torch.zeros(batch, dtype=torch.int32, device="cpu")
    for row in range(batch):
        fed, hints = int(n_fed[row]), int(n_hint[row])
        if fed == 0:
            continue
        column = fed - 1 - hints  # its logits decide about the first hint
        for j in range(hints + 1):
            choice = int(torch.argmax(logits[row, column + j]))
            selected[row, j] = choice
            if j == hints or choice != int(tokens[row, column + 1 + j]):
                accepted[row] = j
                break
    return selected, accepted
