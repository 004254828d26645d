"""Checksums of weights, for changes that go past torch's version counters: through ``.data``, numpy or DLPack."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

_BLOCK = 1 << 17
"""Bytes of a block, which has one checksum."""

SHARE = 0.005
"""The part of the time of all forwards that the checks may take."""

ALWAYS = 1 << 19
"""Bytes that each check reads in any case. A model of this size is checked as a whole before every call."""


class Checksums:
    """Sums of all values of some tensors, block by block.

    A check reads some blocks in turn, and the next check goes on behind them, so that every change is seen after some calls. How many depends on the
    size of the model and on the length of the calls. It reads all small tensors (norms, biases, frequencies of RoPE).

    Args:
        tensors: on the CPU. Others are left out.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        views = [_words(tensor) for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
        self._small = [view for view in views if view.nbytes <= 4096]
        self._copies = [view.tobytes() for view in self._small]
        self._blocks = [
            view[at : at + _BLOCK // view.itemsize]
            for view in views
            if view.nbytes > 4096
            for at in range(0, len(view), _BLOCK // view.itemsize)
        ]
        began = time.perf_counter()
        self._sums = [_sum(block) for block in self._blocks]
        self._seconds_per_byte = (time.perf_counter() - began) / max(1, sum(block.nbytes for block in self._blocks))
        self._next, self._credit = 0, 0.0

    def spend(self, seconds: float) -> None:
        """Note the time of a forward."""
        self._credit += SHARE * seconds

    def agree(self) -> bool:
        """Whether the tensors have the values that they had, as far as this check reads them."""
        if [view.tobytes() for view in self._small] != self._copies:
            return False
        left = max(ALWAYS, self._credit / self._seconds_per_byte if self._blocks else 0)
        self._credit = 0.0
        for _ in self._blocks:
            if left <= 0:
                break
            at, self._next = self._next, (self._next + 1) % len(self._blocks)
            left -= self._blocks[at].nbytes
            if _sum(self._blocks[at]) != self._sums[at]:
                return False
        return True


def _words(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor as integers, 8 bytes each where they divide evenly. A view, if the tensor is contiguous."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(torch.uint8).numpy()
    return bits.view(np.int64) if bits.nbytes % 8 == 0 and bits.ctypes.data % 8 == 0 else bits


def _sum(block: np.ndarray) -> int:
    return int(np.add.reduce(block, dtype=np.int64))
