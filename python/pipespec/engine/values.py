"""Digests of weights, for changes that go past torch's version counters: through ``.data``, numpy or DLPack."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipespec_kernels._native import MemoryWatch

SHARE = 0.004
"""Largest share of the forwards' time for checksums. All checks of a call together may take 0.5 %."""

LONGEST = 0.02
"""Seconds that one check may take, so that it does not delay the first token."""


class Checksums:
    """Digests of all values of some tensors.

    Each check reads all small tensors (norms, biases, frequencies of RoPE), a few values of the others, and more of them in turn: samples, of which every
    row of a matrix has one, and blocks with all their values. How many depends on the length of the calls. A change of a whole matrix shows at once, one
    of a row or a single value after some calls. Models of up to 512 KiB are read as a whole.

    Args:
        tensors: on the CPU. Others are left out.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # They keep the memory.
        self._tensors = [tensor.detach() for tensor in tensors if tensor.device.type == "cpu" and tensor.numel()]
        self._watch, self._credit = MemoryWatch(), 0.0
        for tensor in self._tensors:
            size = tensor.element_size()
            span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            # One sample per row of a contiguous matrix, along a diagonal that wraps around.
            step = tensor.shape[-1] + 1 if tensor.ndim > 1 else 16
            self._watch.add(tensor.data_ptr(), span * size, step * size)
        self._watch.remember()

    def spend(self, seconds: float) -> None:
        """Note the time of a forward."""
        self._credit += SHARE * seconds

    def agree(self) -> bool:
        """Whether the tensors have the values that they had, as far as this check reads them."""
        seconds, self._credit = min(self._credit, LONGEST), 0.0
        return bool(self._watch.agree(seconds))
