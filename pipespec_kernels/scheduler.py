"""Python's handle on the scheduler (``csrc/runtime/scheduler.hpp``): it runs the stages without Python while the caller waits.

A *launcher* runs the steps: :class:`HostLauncher` with a thread and a Python function per stage, ``_cuda.CudaLauncher`` with captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock

TargetFailed = _native.TargetFailed
"""The target's step failed; the message has the cause. A ``RuntimeError``."""

_LOOK_NS = 50_000_000
"""The longest wait outside of Python, in nanoseconds: the latency of Ctrl-C."""


def widths(max_width: int) -> list[int]:
    """Columns of the steps that a stage is launched with: 1, 2, 4, ... and ``max_width``."""
    return [*(1 << i for i in range(max_width.bit_length()) if 1 << i < max_width), max_width]


class Rectangle(Protocol):
    """Input and output of one step of a model: int32 views that are valid while the step runs.

    Row r feeds ``tokens[r, : query_lens[r]]`` at positions ``kv[r]`` and up, the last ``num_draft_tokens[r]`` of them draft tokens. Where ``n_select[r] > 0`` it
    writes into ``selected[r, j]`` its choice after j accepted draft tokens, at least up to the first draft token that it contradicts.
    """

    tokens: np.ndarray
    """``[rows, width]``"""
    selected: np.ndarray
    """``[rows, width]``, to be written"""
    kv: np.ndarray
    """``[rows]``"""
    query_lens: np.ndarray
    """``[rows]``"""
    num_draft_tokens: np.ndarray
    """``[rows]``"""
    n_select: np.ndarray
    """``[rows]``; ``query_lens`` or 0"""


class HostLauncher:
    """Runs steps on the host: one thread per stage calls ``models[s]`` with its :class:`Rectangle`. An exception is the failure of the stage.

    ``widths``: the widths that a step may have, ascending, for all stages or one list for each. With an empty list the stage's steps are part of
    another stage's, and its model is not called. ``shadowed``: the scheduler sees a copy of the block that is as late as a GPU's. Raises
    ``ValueError``.
    """

    def __init__(
        self,
        block: StateBlock,
        models: Sequence[Callable[[Rectangle], None]],
        widths: Sequence[int] | Sequence[Sequence[int]],
        *,
        shadowed: bool = False,
    ) -> None:
        each = [[w] if isinstance(w, int) else list(w) for w in widths]
        if all(isinstance(w, int) for w in widths):
            each = [[w for (w,) in each]] * len(models)
        self.native = _native.HostLauncher(block.memory.array, list(models), each, shadowed)


class Launcher(Protocol):
    """An object that holds a native launcher."""

    native: _native.Launcher


class Scheduler:
    """Runs the stages of one chain over a launcher, one generation after the other.

    Args:
        launcher: runs the steps: a :class:`HostLauncher`, or a launcher of captured graphs.
        lookahead: per draft, how many tokens it may be ahead of the next stage; 0: it rests.
        ahead: largest number of steps of a draft in flight. It also holds for the target if no draft is launched: in plain decoding and in
        rounds, whose width is that of the last draft's lookahead. After an end-of-sequence token, up to ``ahead - 1`` of these steps find nothing to do: :meth:`run` leaves them.
        trace: entries per stage that :meth:`trace` keeps; 0: none.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(self, launcher: Launcher, *, lookahead: Sequence[int], ahead: int = 1, trace: int = 0) -> None:
        self._launcher = launcher  # the steps refer to the launcher
        options = _native.Options(ahead, trace)
        self._native = _native.Scheduler(launcher.native, options, list(lookahead))

    def run(self, on_commit: Callable[[], None] | None = None) -> None:
        """Run the generation that the block was reset for, until the target's rows are complete. See :meth:`settle` for a step that may still run then.

        An exception of ``on_commit``, and Ctrl-C, stops the stages first: no step runs and no thread is left when this returns or
        raises. Failures of drafts are in :attr:`failures`.

        Args:
            on_commit: called after steps of the target have ended; once for several steps that end while it runs.

        Raises:
            TargetFailed: the target's step failed.
            RuntimeError: a generation runs already, or ``on_commit`` returned in a fork of the process, too, and this is the fork.
        """
        native = self._native
        if native.started:
            raise RuntimeError("this scheduler runs a generation already")
        try:
            native.start()  # Ctrl-C can arrive as soon as the stages run
            steps, running = 0, True
            while running:
                ended, running = native.wait(steps, _LOOK_NS)
                if ended > steps and on_commit is not None:
                    on_commit()
                steps = ended
        except BaseException:
            native.stop()
            raise
        native.finish()

    def settle(self) -> None:
        """Wait until no step runs: the last generation may have left one of the target's that found nothing to do. While none runs, and before the block is
        reset, to which it writes as it ends. :meth:`trace` is complete then."""
        self._native.settle()

    def request_stop(self) -> None:
        """Launch no further step; ``run`` returns soon. Any thread may call it."""
        self._native.request_stop()

    def steer(self, lookahead: Sequence[int]) -> None:
        """Use these numbers from the next decision on. Any thread may call it. Raises ``ValueError``."""
        self._native.steer(list(lookahead))

    def end_row(self, row: int) -> None:
        """End ``row`` at the target's present length, while a generation runs. Raises ``ValueError``."""
        self._native.end_row(row)

    @property
    def failures(self) -> list[tuple[int, str]]:
        """Stages that failed in the present or last generation, and why."""
        failures: list[tuple[int, str]] = self._native.failures()
        return failures

    def trace(self, stage: int) -> np.ndarray:
        """Steps of ``stage`` in the present or last generation, oldest first; if there were more than are kept, the oldest are lost.

        Returns:
            A structured array; times are those of ``time.perf_counter_ns()``. Fields: ``step`` (its number), ``launched_ns``,
            ``start_ns``, ``end_ns``, ``width`` (of the rectangle), ``fed``, ``draft_tokens``, ``accepted``, ``rolled_back`` (tokens, all
            rows together), ``in_flight`` (steps launched before it that had not ended), ``rollbacks`` (their number) and ``prefill``
            (always 0: a scheduler runs no prefill).
        """
        entries: np.ndarray = self._native.trace(stage)
        return entries
