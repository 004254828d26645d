"""Prompt lookup: drafts the token that followed the latest earlier occurrence of the newest tokens. It has no weights."""

from __future__ import annotations

from collections.abc import Sequence

from pipespec.spd.drafting import Drafter, SampleTokens
from pipespec.spd.machine import DraftRequest


class NgramDrafter(Drafter):
    """Drafts the token after the latest earlier occurrence of the longest suffix of the text.

    Without an earlier occurrence it drafts the newest token again, since an empty place in the pipeline saves nothing. This is prompt lookup
    decoding (Saxena 2023), one token at a time, with the tokens in flight as part of the text.

    Args:
        longest: Most tokens of the suffix.

    Raises:
        ValueError: ``longest`` is below 1.
    """

    def __init__(self, longest: int = 3) -> None:
        if longest < 1:
            raise ValueError(f"the longest suffix to look up must have at least one token, not {longest}")
        self.longest = longest
        self._rows: list[_Index] = []

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        self._rows = [_Index(self.longest) for _ in prompts]
        for index, prompt in zip(self._rows, prompts, strict=True):
            index.extend(prompt)

    def draft(self, requests: list[DraftRequest]) -> list[int]:
        out = []
        for row, tokens, _ in requests:
            index = self._rows[row]
            index.extend(tokens)
            found = index.follower()
            out.append(tokens[-1] if found is None else found)
        return out

    def truncate(self, row: int, length: int) -> None:
        self._rows[row].truncate(length)

    def finish(self) -> None:
        self._rows = []


class _Index:
    """The tokens of a row, and the positions at which each of its n-grams ends."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def _grams(self, end: int) -> list[tuple[int, ...]]:
        """The n-grams whose last token is at ``end``, longest first."""
        return [tuple(self._tokens[end + 1 - n : end + 1]) for n in range(min(self._longest, end + 1), 0, -1)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the rest of ``tokens``, which begins with the tokens held."""
        for end in range(len(self._tokens), len(tokens)):
            self._tokens.append(tokens[end])
            for gram in self._grams(end):
                self._ends.setdefault(gram, []).append(end)

    def truncate(self, length: int) -> None:
        for end in range(len(self._tokens) - 1, length - 1, -1):
            for gram in self._grams(end):
                self._ends[gram].pop()
                if not self._ends[gram]:
                    del self._ends[gram]
            self._tokens.pop()

    def follower(self) -> int | None:
        """The token after the latest earlier occurrence of the longest suffix that has one."""
        for gram in self._grams(len(self._tokens) - 1):
            ends = self._ends[gram]
            if len(ends) > 1:
                return self._tokens[ends[-2] + 1]
        return None
