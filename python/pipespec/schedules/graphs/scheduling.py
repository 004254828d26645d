"""Calls under the native scheduler: the state block as the host sees it, pinned memory for it, and the scheduler's failures as Python's exceptions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from pipespec_kernels.scheduler import Launcher, Scheduler, TargetFailed
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

    ``tensor``, ``array`` and ``address`` are the same memory, in uint8.
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


class ScheduledChain:
    """The scheduler of one chain. It stays from call to call while its launcher fits, and keeps the last ``trace`` steps of each stage for :meth:`trace`.

    ``lookahead`` in its methods: per draft, see :class:`pipespec_kernels.scheduler.Scheduler`.

    Attributes:
        scheduler: The present scheduler; None before :meth:`use` and after :meth:`drop`.
        errors: By stage, the exception of a step that ran in Python. Steps on host threads write it; :meth:`run` empties it.
    """

    def __init__(self, block: HostShadow, trace: int) -> None:
        self._block, self._trace = block, trace
        self.scheduler: Scheduler | None = None
        self._key: Hashable = None
        self.errors: dict[int, BaseException] = {}

    def use(
        self, key: Hashable, make_launcher: Callable[[], Launcher], lookahead: Sequence[int], *, ahead: int
    ) -> None:
        """Keep the present scheduler if it was made for ``key``, which is what the launcher depends on; otherwise make one.

        ``ahead``: steps that may be launched and not ended, see :class:`pipespec_kernels.scheduler.Scheduler`.
        """
        if self.scheduler is not None and self._key == key:
            return
        # The threads of the old one end before the new ones start.
        self.scheduler = None
        self.scheduler = Scheduler(make_launcher(), lookahead=lookahead, ahead=ahead, trace=self._trace)
        self._key = key

    def settle(self) -> None:
        """Wait for a step that the last call has left behind."""
        if self.scheduler is not None:
            self.scheduler.settle()

    def steer(self, lookahead: Sequence[int]) -> None:
        """Use these numbers from the next step on, while :meth:`run` runs."""
        if self.scheduler is not None:
            self.scheduler.steer(lookahead)

    def steps_since(self, stage: int, number: int) -> np.ndarray:
        """The steps of ``stage`` from ``number`` on that have ended in the present call, of those that are kept."""
        assert self.scheduler is not None
        steps = self.scheduler.trace(stage)
        return steps[steps["step"] >= number]

    def drop(self) -> None:
        """End the scheduler's threads and let go of what its launcher keeps alive."""
        self.scheduler = None

    def run(
        self, lookahead: Sequence[int], on_commit: Callable[[], None], on_failure: Callable[[int, Exception], None]
    ) -> None:
        """Run the stages until the target's rows are complete.

        ``on_commit`` is called after steps of the target, ``on_failure`` once for each draft that failed, with its index and error. Raises
        ``TargetFailed``, whose cause is the error of the target's step.
        """
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.steer(lookahead)
        reported = 0

        def report_failures() -> None:
            nonlocal reported
            for stage, cause in scheduler.failures[reported:]:
                reported += 1
                if stage != self._block.target:
                    error = self.errors.get(stage)
                    on_failure(stage, error if isinstance(error, Exception) else RuntimeError(cause))

        def committed() -> None:
            report_failures()
            on_commit()

        self._block.scheduler = scheduler
        try:
            scheduler.run(committed)
            self._block.scheduler = None
            report_failures()
        except TargetFailed as failed:
            target, cause = self._block.target, str(failed).split("failed: ", 1)[-1]
            error = self.errors.get(target)
            # KeyboardInterrupt and SystemExit pass unchanged.
            if error is not None and not isinstance(error, Exception):
                raise error from None
            if error is not None:
                cause = f"{type(error).__name__}: {error}"
            raise TargetFailed(f"the target (stage {target}) failed: {cause}") from error
        finally:
            self._block.scheduler = None
            # Their tracebacks keep tensors alive.
            self.errors.clear()

    def trace(self, stage: int, prefill: np.ndarray) -> np.ndarray:
        """The last steps of ``stage`` in the last call, after those of its ``prefill``, which the scheduler does not run."""
        if self.scheduler is None:
            return prefill
        steps = self.scheduler.trace(stage)
        steps["step"] += len(prefill)
        return np.concatenate([prefill, steps])[-self._trace :]
