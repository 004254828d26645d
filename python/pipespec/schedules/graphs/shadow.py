"""The state block as the host sees it while stages run on their own: the host shadow, and pinned memory for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipespec_kernels.scheduler import Scheduler
from pipespec_kernels.state import PrivateMemory, StateBlock


class HostShadow(StateBlock):
    """The host's block. While a scheduler runs the stages, the end of a row goes to the scheduler.

    Attributes:
        scheduler: The scheduler that runs at present; None between calls and in lockstep.
    """

    scheduler: Scheduler | None = None

    def end_row(self, row: int) -> None:
        if self.scheduler is None:
            super().end_row(row)
        else:
            self.scheduler.end_row(row)


class PinnedMemory:
    """Memory of the host that every GPU reads and writes at its own address, for a :class:`StateBlock`.

    Attributes:
        tensor: The memory, uint8.
        array: The same as an array.
        address: The same as an address.
    """

    alignment = PrivateMemory.alignment

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.remap([1])

    def remap(self, sizes: Sequence[int]) -> None:
        """Provide at least as many bytes of any content, at the same address if the memory is large enough."""
        size = sum(sizes)
        if size <= self.tensor.numel():
            return
        # Later calls write it outside of inference mode.
        with torch.inference_mode(False):
            self.tensor = torch.zeros(size, dtype=torch.uint8, device="cpu").pin_memory()
        self.array: np.ndarray = self.tensor.numpy()
        self.address = self.tensor.data_ptr()
