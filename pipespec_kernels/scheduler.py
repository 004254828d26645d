"""Python's handle on the scheduler (``csrc/runtime/scheduler.hpp``): stages that run without Python, and the caller who follows them.

A *launcher* runs the steps: :class:`HostLauncher` with a thread and a Python function per stage, ``_cuda.CudaLauncher`` with captured graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock

TargetFailed = _native.TargetFailed
"""The target's step failed; the message has the cause. A ``RuntimeError``."""

_SCHEDULES = {"streams": _native.Schedule.STREAMS, "lockstep": _native.Schedule.LOCKSTEP}

_LOOK_NS = 50_000_000
"""How often the caller comes back to Python while nothing happens: the most that Ctrl-C has to wait."""


def widths(most: int) -> list[int]:
    """Columns of the steps that a stage is launched with: 1, 2, 4, ... and ``most``."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


class Rectangle(Protocol):
    """What a model is asked, for one step; int32 views that are good while it runs.

    Row r feeds ``tokens[r, : n_fed[r]]`` at positions ``kv[r]`` and up, the last ``n_hint[r]`` of them hints. Where ``n_select[r] > 0`` it
    writes into ``selected[r, j]`` what it chooses after j accepted hints, at least up to the first hint that it contradicts.
    """

    tokens: np.ndarray
    """``[rows, width]``"""
    selected: np.ndarray
    """``[rows, width]``, to be written"""
    kv: np.ndarray
    """``[rows]``"""
    n_fed: np.ndarray
    """``[rows]``"""
    n_hint: np.ndarray
    """``[rows]``"""
    n_select: np.ndarray
    """``[rows]``; ``n_fed`` or 0"""


class HostLauncher:
    """Steps on the host: one thread per stage, ``models[s]`` called with its :class:`Rectangle`; what it raises is the stage's failure.

    ``widths``: those that a step may have, ascending, for all stages or one list for each (an empty one: the stage has no steps of its own, its
    model is never called, it rides in another's); ``mirrored``: the scheduler sees a copy of the block that is as late as a GPU's.
    Raises ``ValueError``.
    """

    def __init__(
        self,
        block: StateBlock,
        models: Sequence[Callable[[Rectangle], None]],
        widths: Sequence[int] | Sequence[Sequence[int]],
        *,
        mirrored: bool = False,
    ) -> None:
        each = [[w] if isinstance(w, int) else list(w) for w in widths]
        if all(isinstance(w, int) for w in widths):
            each = [[w for (w,) in each]] * len(models)
        self.native = _native.HostLauncher(block.memory.array, list(models), each, mirrored)


class Launcher(Protocol):
    """Whatever holds a native launcher."""

    native: _native.Launcher


@dataclass(frozen=True)
class Steering:
    """The numbers that steer a chain; they may change between any two steps, and the text does not depend on them.

    ``windows[i]``: how many tokens draft i may be ahead of the stage downstream of it, 0: it rests; ``wait``: drafts that the target awaits
    when it has fewer, a bet with a deadline; ``decode_meanwhile``: it awaits them with steps of one token instead of asleep.
    """

    windows: tuple[int, ...]
    wait: int = 0
    decode_meanwhile: bool = False

    def _native(self) -> _native.Steering:
        return _native.Steering(list(self.windows), self.wait, self.decode_meanwhile)


class Scheduler:
    """Runs the stages of one chain over a launcher, one generation after the other.

    Parameters
    ----------
    schedule: ``"streams"``: a thread per stage; ``"lockstep"``: one thread, the windows are filled, then the target verifies.
    ahead: steps of a draft that may be launched and not ended.
    patience: deadline of a wait: this times ``wait`` times the mean step of the target's upstream.
    trace: entries per stage that :meth:`trace` keeps; 0: none are written.

    Raises ``ValueError`` on settings that make no sense.
    """

    def __init__(
        self,
        launcher: Launcher,
        steering: Steering,
        *,
        schedule: str = "streams",
        ahead: int = 1,
        patience: float = 1.5,
        trace: int = 0,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(map(repr, _SCHEDULES))}, not {schedule!r}")
        self._launcher = launcher  # and with it what its steps refer to
        options = _native.Options(_SCHEDULES[schedule], ahead, patience, trace)
        self._native = _native.Scheduler(launcher.native, options, steering._native())

    def run(self, on_commit: Callable[[], None] | None = None) -> None:
        """Run the generation that the block was reset for, until the target's rows are complete.

        ``on_commit``: called after steps of the target have ended (after several at once, if they end faster than it returns). Whatever it
        raises, and Ctrl-C, stops the stages first: no step is under way and no thread is left when this returns or raises. Raises
        :exc:`TargetFailed`; failures of drafts are in :attr:`failures`.
        """
        native = self._native
        native.start()
        try:
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

    def request_stop(self) -> None:
        """No step is launched any more; ``run`` returns soon. From any thread."""
        self._native.request_stop()

    def steer(self, steering: Steering) -> None:
        """Use these numbers from the next decision on. From any thread. Raises ``ValueError``."""
        self._native.steer(steering._native())

    def end_row(self, row: int) -> None:
        """End ``row`` where the target stands. While a generation runs. Raises ``ValueError``."""
        self._native.end_row(row)

    @property
    def failures(self) -> list[tuple[int, str]]:
        """Stages that failed in the present or last generation, and why."""
        return self._native.failures()

    def trace(self, stage: int) -> np.ndarray:
        """Steps of ``stage`` in the present or last generation, oldest first; the oldest are lost when there were more than are kept.

        A structured array; times are those of ``time.perf_counter_ns()``: ``step`` (its number), ``launched_ns``, ``start_ns``, ``end_ns``, ``width`` (of
        the rectangle), ``fed``, ``hints``, ``accepted``, ``taken_back`` (tokens, all rows together), ``in_flight`` (steps launched
        before it that had not ended), ``rollbacks`` (how often tokens were taken back) and ``prefill`` (0: a scheduler knows of none).
        """
        return self._native.trace(stage)
