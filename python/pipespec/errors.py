"""Errors and warnings that several layers of the package raise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class DoesNotFit(ValueError):
    """The stages do not fit the memory.

    The message says what does not fit, and what helps. It may have several lines.
    """

    in_lines = True


class Unsupported(NotImplementedError):
    """A call of ``generate()`` that pipelines cannot run.

    Attributes:
        argument: The argument that they cannot honour.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(message)
        self.argument = argument


class UnsupportedInput(Unsupported, ValueError):
    """A call whose inputs have a form that pipelines do not accept. The same inputs in another form work."""


class NotCapturable(RuntimeError):
    """The step of a model cannot become a CUDA graph.

    Attributes:
        stage: name of the stage that holds the model.
        part: the module, by its name in the model; or what else of the step.
        cause: why it cannot be captured.
    """

    def __init__(self, stage: str, part: str, cause: str) -> None:
        super().__init__(f"{stage} cannot be captured in a CUDA graph: {part}: {cause}")
        self.stage, self.part, self.cause = stage, part, cause


class NotKnown(Unsupported):
    """A call that runs unknown code where a pipeline would run its own: transformers decodes it, token by token, also for a ``Pipeline``."""


class Busy(NotKnown):
    """A call that comes while a pipeline runs as many calls as it can."""

    def __init__(self, message: str) -> None:
        super().__init__("model", f"generate(): {message}")


def mark_final(error: BaseException) -> None:
    """Mark an error that must reach the caller: code of the caller raised it, or the first token was committed before it."""
    with suppress(Exception):
        error._pipespec_is_final = True  # type: ignore[attr-defined]


def is_final(error: BaseException) -> bool:
    """Whether the error must reach the caller, and transformers does not decode the call instead."""
    return getattr(error, "_pipespec_is_final", False) is True


@contextmanager
def run_user_code() -> Iterator[None]:
    """Around a function of the caller: its errors come out as they are."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Unsupported):
            mark_final(error)
        raise


_INSIDE = {"pipespec", "pipespec_kernels", "pipespec_spd", "pipespec_train", "transformers", "torch", "contextlib"}
"""Packages that may stand between the user's line and a warning."""


def user_stacklevel() -> int:
    """``stacklevel`` of a warning: the number of frames between the caller of this function and the first one outside of :data:`_INSIDE`."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    return level


class _Failure:
    """A queue entry for transformers' iterators. They compare each entry with their stop signal, and this comparison raises the error in their thread."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        raise RuntimeError(f"generate() failed ({type(self.error).__name__}: {self.error})") from self.error


@contextmanager
def notify_reader_of_failure(streamer: Any) -> Iterator[None]:
    """Raise the error of a failed call also in a thread that iterates over its streamer and would otherwise never end.

    The streamer's ``end()`` is not called: it means that the text is complete, and transformers does not call it either.
    """
    try:
        yield
    except BaseException as error:
        with suppress(Exception):  # the first error counts
            from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer

            if isinstance(streamer, TextIteratorStreamer):
                streamer.text_queue.put(_Failure(error))
            elif isinstance(streamer, AsyncTextIteratorStreamer):
                streamer.loop.call_soon_threadsafe(streamer.text_queue.put_nowait, _Failure(error))
        raise
