"""Prompt lookup: drafts the token that followed the latest earlier occurrence of the newest tokens. It has no weights."""

from __future__ import annotations

import numpy as np

from pipespec.spd.drafting import Drafter, SampleTokens
from pipespec.spd.machine import DraftRequest
from pipespec_kernels import _native

_LONGEST = 3
"""Most tokens of the suffix."""


class NgramDrafter(Drafter):
    """Drafts the token after the latest earlier occurrence of the longest suffix of the text.

    Without an earlier occurrence it drafts the newest token again, since an empty place in the pipeline saves nothing. This is prompt lookup
    decoding (Saxena 2023), one token at a time, with the tokens in flight as part of the text.
    """

    def __init__(self) -> None:
        self._rows: list[_native.NgramIndex] = []

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        self._rows = [_native.NgramIndex(1, _LONGEST) for _ in prompts]
        for index, prompt in zip(self._rows, prompts, strict=True):
            index.write(0, np.array(prompt, dtype=np.int32))

    def draft(self, requests: list[DraftRequest]) -> list[int]:
        out = []
        for row, tokens, _ in requests:
            index = self._rows[row]
            # The tokens begin with those that the index has.
            index.write(len(index), np.array(tokens[len(index) :], dtype=np.int32))
            found = index.follower()
            out.append(tokens[-1] if found < 0 else found)
        return out

    def truncate(self, row: int, length: int) -> None:
        self._rows[row].truncate(length)

    def finish(self) -> None:
        self._rows = []
