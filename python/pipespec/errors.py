"""Errors that several layers of the package raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class DoesNotFit(ValueError):
    """The stages do not fit the memory.

    The message has several lines: what does not fit, a table of the numbers in GiB, and what helps.
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
    """A call that runs other people's code where a pipeline would run its own: transformers decodes it, token by token, also for a ``Pipeline``."""


class CallState:
    """What a call had done when it failed.

    Attributes:
        is_final: whether the error must reach the caller: code of the caller raised it, or the first token was committed before it.
        has_streamed: whether the streamer has the prompt.
        generator: state of torch's generator before the call drew from it; None: it has not.
    """

    def __init__(self) -> None:
        self.is_final = self.has_streamed = False
        self.generator: Any = None

    @classmethod
    def of(cls, error: BaseException) -> CallState:
        """The state that belongs to an error."""
        found = getattr(error, "_pipespec_state", None)
        if not isinstance(found, cls):
            found = cls()
            with suppress(Exception):
                error._pipespec_state = found  # type: ignore[attr-defined]
        return found


@contextmanager
def run_user_code() -> Iterator[None]:
    """Around a function of the caller: its errors come out as they are."""
    try:
        yield
    except Exception as error:
        CallState.of(error).is_final |= not isinstance(error, Unsupported)
        raise
