"""CachedText: a model, its cache, and the text whose keys and values the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward, forward_row, wide_columns
from pipespec.engine.inputs import StageInputs
from pipespec.engine.known import NATIVE
from pipespec.engine.native import NativeForm
from pipespec.engine.resumable import ResumableText
from pipespec.models.devices import input_device
from pipespec.models.properties import embedding_size

PROMPT_TAIL = 64
"""Tokens of a prompt that a draft reads if it begins late. The rest hardly helps it, and would delay the text."""

show_reading: Callable[[int, int], None] | None = None
"""Told how many tokens of the prompts of a call are read, of those that it reads: a command's display sets it."""


class CachedText(ResumableText):
    """A model, its cache, and the text that it has read.

    Args:
        model: in eval mode.
        native: whether the model may run in the native form.
    """

    reads_last = True
    """Whether a native forward that reads prompts also reads their last tokens, where they begin and end alike. The first step then verifies no
    draft tokens. So not with rejection sampling, whose text would depend on the other rows of the batch."""

    def __init__(self, model: PreTrainedModel, *, native: bool = True) -> None:
        super().__init__(model, native=native)
        self._clamp: int | None = None
        self._prompt_logits: torch.Tensor | None = None

    @torch.inference_mode()
    def complete(self, texts: Sequence[np.ndarray], lengths: Sequence[int]) -> RowCache:
        """Make the cache of the last call hold exactly ``texts``, and return it. It stays the stage's.

        Args:
            texts: per row, int32 ids, which go on from the call's text. What the cache lacks is fed.
            lengths: per row, the tokens of it that the call has fed. Columns of the cache after those may be of other tokens.
        """
        cache, ends = self._cache, [len(text) for text in texts]
        assert cache is not None
        # What the leader of a group has fed here is in the caches of its followers, too.
        is_fed = self._group is not None and not self._group.is_leader
        begin = ends if is_fed else [min(all_) for all_ in zip(lengths, ends, cache.lengths, strict=True)]
        # An interrupted call keeps what both texts have.
        self._held = [min(pair) for pair in zip(self._held, begin, strict=True)]
        self._set_text(texts, max(self._text.shape[1], *ends))
        self._roll_back(cache, begin)
        if begin != ends:
            self._fill(cache, begin, ends)
        self._held = ends
        return cache

    @property
    def form(self) -> str:
        """How the model's forward runs, see :func:`pipespec.engine.forward.described`."""
        if self._cache is None:
            return ""
        now = described(self.model, self._cache, native=self._native)
        return now or (NATIVE if self._begun is not None else "")

    @property
    def has_prompt_logits(self) -> bool:
        """Whether the forward that has read the prompt also gives the logits of the next step, which then feeds nothing and verifies no draft tokens."""
        return self._prompt_logits is not None

    @torch.inference_mode()
    def follow(self, inputs: StageInputs) -> list[np.ndarray]:
        """Run the forwards that the leader of the target's group announces, until it ends the call, which has the same ``inputs``.

        Returns:
            Per row, int32 ids of the text that the leader has generated, without the prompt.

        Raises:
            RuntimeError: the leader's call has failed.
        """
        cache, _ = self._open(inputs)
        assert self._group is not None
        while (announced := self._group.receive()).tokens is not None:
            tokens, lengths = announced.tokens, announced.lengths
            cache.truncate(lengths)
            self._grow(cache, max(lengths) + tokens.shape[1])
            self._forward(tokens.to(self._device), cache, announced.keep)
        for row, (prompt, new) in enumerate(zip(inputs.prompts, announced.text, strict=True)):
            self._text[row, len(prompt) : len(prompt) + len(new)] = new
        return list(announced.text)

    # ---- the prompt

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        """Prepare cache and text of a call. Returns the cache, and how many tokens of each row it holds."""
        self._device, self._chunk, self._prompt_logits = input_device(self.model), inputs.chunk, None
        self._fit_vocabulary(inputs.vocabulary)
        return self._resume(inputs)

    def _fit_vocabulary(self, target_vocabulary: int) -> None:
        # A draft whose vocabulary is padded less than the target's cannot embed each of its tokens.
        own = embedding_size(self.model)
        self._clamp = own - 1 if own < target_vocabulary else None
        self._ids = max(own, target_vocabulary)

    def _fill(self, cache: RowCache, begin: list[int], end: list[int], *, selects: bool = False) -> None:
        """Cache the tokens ``begin[r] .. end[r] - 1`` of each row.

        With ``selects``, forwards by the library also read the last token of a prompt, and native ones and captured ones do where all prompts begin and end alike.
        The first step takes their logits, and reads no weights.
        """
        if self._made is None:
            self._made = self._origin(cache, cache.rows)
        if not cache.is_static:
            # A cache that is full with the longest row has no columns for the others. A static one has them in any case.
            missing = max(e - b for b, e in zip(begin, end, strict=True))
            self._grow(cache, max(self._in_cache(end)) + min(WIDTH, missing))
        first, total = sum(begin), sum(end) - sum(begin)
        note = show_reading if selects and show_reading else lambda done, total: None
        note(0, total)
        logits: dict[int, torch.Tensor] = {}
        if self.reads_wide and self._group is None:
            begin = self._fill_by_library(cache, begin, end, logits if selects else None, note)
            end = [max(pair) for pair in zip(begin, end, strict=True)]
        # Whether a forward of several columns gives the logits after each prompt: a native one with the bits of a forward of its last token.
        reads_last = (
            selects
            and not logits
            and self.reads_last
            and self._group is None
            and len(set(begin)) == len(set(end)) == 1
            and begin[0] < end[0]
            and not cache.is_recurrent
            and self._gives_last_logits(cache)
        )
        end = [e + reads_last for e in end]
        # The states of a complete row do not survive further columns.
        level = len(set(self._in_cache(begin))) == 1 and not cache.is_recurrent
        chunks = prompt_chunks(
            self._text, begin, end, level, lambda: min(self._chunk, cache.capacity - max(cache.lengths))
        )
        for columns, at, real in chunks:
            until = [b + n for b, n in zip(at, real, strict=True)]
            cache.aim(self._in_cache(until))
            keep = int(reads_last and until == end)
            kept = self._forward(torch.from_numpy(columns).to(self._device), cache, keep)
            if keep:
                self._prompt_logits = kept
            if not level:
                # Padding columns of complete rows must not use up the capacity.
                cache.truncate(self._in_cache(until))
            note(min(sum(until) - first, total), total)
            for row, n in enumerate(until):
                if cache.is_recurrent and real[row] == self._chunk and n % self._chunk == 0:
                    cache.mark(row)
        cache.truncate(self._in_cache(end))
        if not logits:
            return
        # The last token of the other prompts, each for itself: a forward of all rows would compute the keys and values of the complete ones again.
        for row, last in enumerate(end):
            if row not in logits:
                with cache.row_alone(row, 1) as alone:
                    token = self._tokens_of(row, last, last + 1)
                    logits[row] = forward(self.model, token, alone, keep=1, form=self._form_of(alone))
        self._prompt_logits = torch.cat([logits[row] for row in range(len(end))])

    def _gives_last_logits(self, cache: RowCache) -> bool:
        """Whether a forward over prompts may also read their last tokens, and give the logits of the first step."""
        return isinstance(self._form_of(cache), NativeForm)

    def _fill_by_library(
        self,
        cache: RowCache,
        begin: list[int],
        end: list[int],
        logits: dict[int, torch.Tensor] | None,
        note: Callable[[int, int], None],
    ) -> list[int]:
        """Cache the tokens that belong to wide forwards, row by row, and add the logits after whole prompts. Returns where the rest begins."""
        first, total = sum(begin), sum(end) - sum(begin)
        last, begin = [e + (logits is not None) for e in end], list(begin)
        most = max(e - b for b, e in zip(begin, last, strict=True))
        wide = wide_columns(self.model, cache, most, lambda: self._form_of(cache))
        for row, to in enumerate(last):
            while wide is not None and (q := min(self._chunk, to - begin[row])) >= wide:
                tokens = self._tokens_of(row, begin[row], begin[row] + q)
                begin[row] += q
                keep = int(logits is not None and begin[row] == to)
                kept = forward_row(self.model, tokens, cache, row, keep)
                if logits is not None and keep:
                    logits[row] = kept
                note(min(sum(begin) - first, total), total)
        return begin

    def _tokens_of(self, row: int, begin: int, end: int) -> torch.Tensor:
        tokens = torch.from_numpy(self._text[row, begin:end])[None].to(self._device)
        return tokens if self._clamp is None else tokens.clamp(max=self._clamp)

    # ---- forwards

    def _forward(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        if self._clamp is not None:
            fed = fed.clamp(max=self._clamp)
        if self._group is not None and self._group.is_leader:
            self._group.announce(fed, cache.lengths, keep)
        try:
            return forward(self.model, fed, cache, keep=keep, form=self._form_of(cache))
        except BaseException:
            # Lengths grow when a forward is complete, so what an interrupted one has written does not count.
            self._held = [min(pair) for pair in zip(self._held, self._read_by(cache), strict=True)]
            raise

    def _roll_back(self, cache: RowCache, lengths: Sequence[int]) -> None:
        """Truncate to ``lengths``. Tokens after the last recurrent states that are left are fed again."""
        there = cache.restorable(lengths)
        cache.truncate(there)
        if there != list(lengths):
            cache.reserve_states()
            self._fill(cache, there, list(lengths))

    def _grow(self, cache: RowCache, need: int) -> None:
        """Room for ``need`` positions per row. A cache that becomes full doubles."""
        if need > cache.capacity:
            cache.reserve(max(need, min(2 * cache.capacity, self._text.shape[1])))


def prompt_chunks(
    text: np.ndarray, begin: Sequence[int], end: Sequence[int], level: bool, widest: Callable[[], int]
) -> Iterator[tuple[np.ndarray, list[int], list[int]]]:
    """The tokens ``begin[r] .. end[r] - 1`` of each row of ``text [rows, positions]``, in chunks of up to ``widest()`` columns.

    With ``level``, complete rows continue with padding columns, so that rows which begin together stay together and need no mask.

    Yields:
        int32 columns ``[rows, q]``, per row the position of the first one, and how many of them are tokens of the row.
    """
    begin = list(begin)
    while (missing := max(e - b for b, e in zip(begin, end, strict=True))) > 0:
        q = min(widest(), missing)
        real = [max(0, min(q, e - b)) for b, e in zip(begin, end, strict=True)]
        columns = np.zeros((len(end), q), dtype=np.int32)
        for row, (b, n) in enumerate(zip(begin, real, strict=True)):
            columns[row, :n] = text[row, b : b + n]
        yield columns, begin, real
        begin = [b + (q if level else n) for b, n in zip(begin, real, strict=True)]
