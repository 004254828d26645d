"""Who drafts for a partitioned target: one interface."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Request(NamedTuple):
    """What a drafter may know of a row: the token at the position after the last of `tokens` is wanted."""

    row: int
    tokens: Sequence[int]  # positions 0 .. t: verified ones, then those in flight
    fill: int  # positions t - fill + 1 .. t are in flight; older ones have left the last stage


# logits [R, V] over the target's vocabulary, row and absolute position of each -> token ids (greedy or coupled)
Select = Callable[[torch.Tensor, list[int], list[int]], list[int]]


class Drafter(abc.ABC):
    """Proposes position t + 1 of each row from what existed before the cycle (SPD, spec section 2.3 a)."""

    features: tuple[int, ...] = ()  # HF indices of the residual streams it reads; ascending

    def start(self, prompts: list[list[int]], capacity: int, select: Select) -> None:
        """A call begins. capacity: positions any row can reach."""

    def observe(self, index: int, rows: list[int], positions: list[int], values: torch.Tensor) -> None:
        """The residual stream `index` [len(rows), H] at these rows and positions has been computed (prompt positions included, during prefill)."""

    @abc.abstractmethod
    def draft(self, requests: list[Request]) -> list[int]:
        """One token per request. Called before the cycle's stages run: it sees only what earlier cycles observed."""

    def truncate(self, row: int, length: int) -> None:
        """Positions >= length of the row never were (a flush); observe() will bring them anew."""

    def finish(self) -> None:
        """The call is over: let go of what belongs to it."""

    def forget(self) -> None:
        """Give back what is kept between calls only to save time: caches. Between calls."""
