"""Acceptance of a draft module, from tables of its correct drafts instead of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec_spd.draft_module import DraftModule
from pipespec_train.students import full_ids, simulate
from pipespec_train.teacher import teacher_forward


class Acceptance(NamedTuple):
    """Counts of a decoding run: draft tokens verified and accepted, cycles, and tokens emitted in the cycles."""

    verified: int
    accepted: int
    cycles: int
    tokens: int

    @property
    def rate(self) -> float:
        """Accepted draft tokens / verified draft tokens."""
        return self.accepted / max(1, self.verified)

    def length(self, n: int) -> float:
        """Equivalent accepted length, n tokens / cycles."""
        return n * self.tokens / max(1, self.cycles)

    def __add__(self, other: Any) -> Acceptance:
        return Acceptance(*(a + b for a, b in zip(self, other, strict=True)))


def replay(right: np.ndarray, first: int) -> Acceptance:
    """Counts of greedy decoding, computed from a table of the correct drafts.

    The target never verifies a draft after a wrong one, so decoding depends only on drafts that follow the right text. After k accepted
    drafts and a wrong one, a pipeline of n stages has run n + k cycles and starts again with one token (SPD, section 2.4).

    Args:
        right: Bool ``[n, S]``. Entry ``[fill - 1, t]`` is whether the draft of position t + 1 with ``fill`` tokens in flight is correct.
        first: Position of the first token in flight.
    """
    n, length = right.shape
    start, verified, accepted, cycles = first, 0, 0, 0
    for t in range(first, length):
        verified += 1
        if right[min(n, t - start + 1) - 1, t]:
            accepted += 1
        else:
            cycles += n + t - start
            start = t + 1
    if start < length:
        cycles += n - 1 + length - start
    return Acceptance(verified, accepted, cycles, verified)


@torch.no_grad()
def drafts_right(target: PreTrainedModel, module: DraftModule, texts: torch.Tensor) -> np.ndarray:
    """Whether each draft of ``texts [B, S]`` is correct, for 1 to n tokens in flight: bool ``[B, n, S - 1]``, the tables of :func:`replay`.

    All drafts come from one forward of the target.
    """
    ids, following = texts[:, :-1].to(module.head.weight.device), texts[:, 1:].cpu()
    anchors = teacher_forward(target, ids, module.config.anchors).anchors
    full = full_ids(module)
    right = [
        (full[simulate(module, anchors, fill).argmax(-1).cpu()] == following).numpy()
        for fill in range(1, module.config.n + 1)
    ]
    return np.stack(right, axis=1)


def acceptance_along(
    target: PreTrainedModel, module: DraftModule, texts: torch.Tensor, first: Sequence[int], ends: Sequence[int]
) -> Acceptance:
    """Counts of decoding ``texts [B, S]``, where ``target`` generated row r greedily from position ``first[r]`` to ``ends[r] - 1``."""
    table = drafts_right(target, module, texts)
    counts = Acceptance(0, 0, 0, 0)
    for row, (begin, end) in enumerate(zip(first, ends, strict=True)):
        counts += replay(table[row, :, : end - 1], begin)
    return counts
