"""A streamer for tests: it keeps what it gets, and does something when it has a number of new tokens."""

import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.waiting import SECONDS


class Recorder:
    """Keeps each ``put()``, the prompt's first.

    Args:
        at: New tokens of all rows, after which ``do`` is called, once. 0: with the prompt.
        do: What it raises comes out of ``put()``.
    """

    def __init__(self, at: float = math.inf, do: Callable[[], object] = lambda: None) -> None:
        self.values: list[torch.Tensor] = []
        self.ends = 0
        self.at, self.do = at, do

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0, "a token after the end"
        assert value.device.type == "cpu"
        self.values.append(value.clone())
        if len(self.new) >= self.at:
            self.at = math.inf
            self.do()

    def end(self) -> None:
        self.ends += 1

    @property
    def new(self) -> list[int]:
        """The new tokens, in their order; of a batch step by step."""
        return [token for value in self.values[1:] for token in value.flatten().tolist()]

    @property
    def record(self) -> Any:
        """All that was streamed: of one row the tokens, of a batch each ``put()``."""
        is_batch = len(self.values[0]) > 1
        return self.values[0].tolist(), [v.tolist() for v in self.values[1:]] if is_batch else self.new, self.ends


def failing(at: float, error: type[BaseException] = ZeroDivisionError, says: str = "now") -> Recorder:
    """A recorder that raises."""

    def fail() -> None:
        raise error(says)

    return Recorder(at, fail)


class Held(Recorder):
    """Holds its call at a number of new tokens until the test sets ``go_on``, then does something."""

    def __init__(self, at: float, do: Callable[[], object] = lambda: None) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

        def hold() -> None:
            self.inside.set()
            assert self.go_on.wait(SECONDS)
            do()

        super().__init__(at, hold)
