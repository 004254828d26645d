"""Errors that several layers of the package raise."""

from __future__ import annotations


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
