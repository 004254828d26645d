"""The text of a call while it is generated: what is committed, checked by stopping criteria, streamed and timed; and a streamer that decodes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pipespec.engine.callers import call_with_ids
from pipespec.engine.native import packing_seconds
from pipespec.engine.sampling import ScoreRecord
from pipespec.errors import run_user_code
from pipespec.process.threads import raise_program_end
from pipespec.schedules.base import TextSource


class CommittedText:
    """The committed text, as far as the criteria have checked it: ``lengths[row]`` positions, the prompt included."""

    def __init__(
        self, input_ids: torch.Tensor, prompts: Sequence[np.ndarray], limits: Sequence[int], eos: list[int], pad: int
    ) -> None:
        self.input_ids, self.pad = input_ids, pad
        self.starts = [len(p) for p in prompts]
        self.lengths = list(self.starts)
        self.limits, self._eos = limits, eos
        self.stopped = [False] * len(prompts)  # by a criterion
        self.source: TextSource | None = None

    def tokens(self, row: int, begin: int, end: int) -> list[int]:
        if self.source is None:
            return []
        return self.source.tokens(self.source.target, row, begin, end)

    def counts(self) -> list[int]:
        """New tokens per row."""
        return [n - start for n, start in zip(self.lengths, self.starts, strict=True)]

    def generated(self) -> list[list[int]]:
        """The new tokens per row."""
        return [
            self.tokens(row, start, n) for row, (start, n) in enumerate(zip(self.starts, self.lengths, strict=True))
        ]

    def sequences(self) -> torch.Tensor:
        """The committed text: int64 ``[B, S + longest]``, the prompt included. Finished rows are filled with the pad token."""
        generated = self.generated()
        new = torch.full((len(generated), max(map(len, generated))), self.pad, dtype=torch.long, device="cpu")
        for row, tokens in enumerate(generated):
            new[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long, device="cpu")
        return torch.cat([self.input_ids.long(), new.to(self.input_ids.device)], dim=1)

    def has_ended(self, row: int) -> bool:
        n = self.lengths[row]
        if self.stopped[row] or n >= self.limits[row]:
            return True
        return n > self.starts[row] and self.tokens(row, n - 1, n)[0] in self._eos

    def stop(self, row: int) -> None:
        """End ``row`` at its present length."""
        assert self.source is not None
        self.stopped[row] = True
        self.source.end_row(row)

    def column(self, rows: list[list[torch.Tensor]], i: int) -> torch.Tensor:
        """The recorded scores of the ``i``-th new token of every row, ``[B, V]``; zeros for rows that have ended."""
        nothing = torch.zeros_like(rows[0][0])
        return torch.stack([row[i] if i < n else nothing for row, n in zip(rows, self.counts(), strict=True)])


class Criteria:
    """Stopping criteria, called as transformers calls them: one token of each row at a time, ended rows padded.

    A row that is ahead of the slowest row is cut where it should have ended. Verdicts of any type and shape have the effect, and the error, that they have in
    transformers' loop, whose operations on them are repeated here.
    """

    def __init__(
        self,
        text: CommittedText,
        criteria: Sequence[Any],
        pads: bool,
        record: ScoreRecord | None,
        check_model: Callable[[], None],
    ) -> None:
        self._text, self._criteria, self._pads, self._record = text, criteria, pads, record
        self._check_model = check_model
        rows, self._width = text.input_ids.shape
        longest = max(limit - start for limit, start in zip(text.limits, text.starts, strict=True))
        # Input of the criteria: ids [B, S + n], and scores per column.
        with torch.inference_mode(False):
            self._ids = text.input_ids.new_full((rows, self._width + longest), text.pad)
            self._ids[:, : self._width] = text.input_ids
        self._scores: list[torch.Tensor] = []
        self._num_checked = 0
        # As in transformers' loop: 1 for a row that goes on. A verdict of another shape than [rows] gives it that shape.
        self._unfinished = torch.ones(rows, dtype=torch.long, device=self._ids.device)

    def check(self, committed: list[int]) -> None:
        """Call the criteria for each new column that all open rows have reached."""
        text = self._text
        while True:
            open_ = [row for row in range(len(committed)) if not text.has_ended(row)]
            if not open_ or any(committed[row] == text.lengths[row] for row in open_):
                return
            self._check_model()
            at = self._width + self._num_checked
            self._num_checked += 1
            for row in open_:
                text.lengths[row] += 1
                self._ids[row, at] = text.tokens(row, text.lengths[row] - 1, text.lengths[row])[0]
            if self._record is not None and self._record.scores is not None:
                self._scores.append(text.column(self._record.scores, self._num_checked - 1))
            scores = tuple(self._scores) if self._scores else None
            ended = [text.has_ended(row) for row in range(len(committed))]
            is_done = torch.tensor(ended, device=self._ids.device)
            for criterion in self._criteria:
                is_done = is_done | call_with_ids("stopping_criteria", criterion, self._ids[:, : at + 1], scores)
            self._unfinished = self._unfinished & ~is_done
            goes_on = self._go_on(at)
            for row in open_:
                if not goes_on[row]:
                    text.stop(row)

    def _go_on(self, at: int) -> list[bool]:
        """Per row, whether it continues after column ``at``. Raises transformers' error where it cannot append the next column."""
        unfinished = self._unfinished
        if unfinished.max() == 0:
            return [False] * len(self._text.starts)
        if not self._pads:  # transformers then continues each row until all rows are over
            return [True] * len(self._text.starts)
        following = self._ids[:, at] * unfinished
        torch.cat([self._ids[:, : at + 1], following[:, None]], dim=-1)
        return [bool(goes_on) for goes_on in unfinished.tolist()]


class Progress:
    """The progress of a call's text, from step to step of the target.

    Args:
        criteria: None: the call has none but its lengths and end tokens.
        streamer: The caller's; None: there is none.
        max_length: transformers' criterion, which warns of texts beyond the model's length.
        check_model: Raises if the caller's code has changed the model.

    Attributes:
        seconds_to_first: Until the first step of the target; 0 before it.
        packing_seconds: Of these, the time in which weights were read and packed, also by calls of the caller's code within this one.
        seconds: Of the call; 0 until it is finished.
        has_prompt: Whether the streamer has got the prompt, or an error of its own for it.
    """

    def __init__(
        self,
        text: CommittedText,
        criteria: Criteria | None,
        streamer: Any,
        record: ScoreRecord | None,
        max_length: Any,
        check_model: Callable[[], None],
    ) -> None:
        self.text, self._check_model, self._max_length = text, check_model, max_length
        self._criteria, self._streamer, self._record = criteria, streamer, record
        self._began = time.perf_counter()
        self._streamed = 0  # new tokens per row
        self.seconds_to_first = self.packing_seconds = self.seconds = 0.0
        self._packed_before = packing_seconds.get()
        self.has_prompt = False

    def stream_prompt(self) -> None:
        """Pass the prompt to the streamer, as transformers does before it decodes."""
        if self._streamer is None:
            return
        prompt = self.text.input_ids.cpu()
        with run_user_code():
            # First: whatever fails from here on, the prompt is not passed again.
            self.has_prompt = True
            self._streamer.put(prompt)

    def on_commit(self, source: TextSource) -> None:
        """Check the new tokens of a step against the criteria, then stream them."""
        raise_program_end()
        if not self.seconds_to_first:
            self.seconds_to_first = time.perf_counter() - self._began
            self.packing_seconds = packing_seconds.get() - self._packed_before
        self._check_model()
        text = self.text
        text.source = source
        committed = [source.length(source.target, row) for row in range(len(text.starts))]
        if self._record is not None:
            # Captured steps go on meanwhile: their tokens count as soon as the record has them, too.
            recorded = zip(committed, text.starts, self._record.counts, strict=True)
            committed = [min(length, start + count) for length, start, count in recorded]
        if self._criteria is not None:
            self._criteria.check(committed)
        else:
            text.lengths = committed
        self._stream(final=False)

    def _stream(self, final: bool) -> None:
        """Pass the new tokens to the streamer, each one once and in order, as transformers does."""
        text, counts, begin = self.text, self.text.counts(), self._streamed
        if self._streamer is None:
            return
        if len(counts) == 1:
            self._streamed = counts[0]
            tokens = text.tokens(0, text.starts[0] + begin, text.lengths[0])
            # One by one, as transformers does outside of assisted decoding, unless the streamer takes blocks.
            takes_blocks = getattr(self._streamer, "takes_blocks", False)
            blocks = [tokens] if tokens and takes_blocks else [[token] for token in tokens]
        else:
            # As transformers streams a batch: one token of each row at a time, so the slowest row sets the pace.
            open_ = [n for row, n in enumerate(counts) if not text.has_ended(row)]
            self._streamed = end = max(begin, max(counts) if final else min(open_, default=0))
            new = [
                text.tokens(row, start + min(n, begin), start + min(n, end))
                for row, (start, n) in enumerate(zip(text.starts, counts, strict=True))
            ]
            blocks = [[row[i] if i < len(row) else text.pad for row in new] for i in range(end - begin)]
        for i, block in enumerate(blocks):
            if i:
                self._check_model()
            self._streamer.put(torch.tensor(block, device="cpu"))

    def follow(self) -> None:
        """Take the text as it comes, without criteria and record."""
        self._criteria = self._record = None

    def finish(self) -> None:
        """Stream the remaining tokens, and stop the clock. After the decoder has run."""
        # transformers' warning of texts beyond the model's length, at the last length from which it would continue.
        reached = min(self.text.input_ids.shape[1] + max(self.text.counts()), int(self._max_length.max_length) - 1)
        self._max_length(self.text.input_ids.new_empty((1, reached)), None)
        self._stream(final=True)
        if self._streamer is not None:
            self._streamer.end()
        self.seconds = time.perf_counter() - self._began


class TextStream:
    """A streamer for ``generate()`` that decodes step by step.

    It gets the tokens of each step as one block, so that it can tell accepted draft tokens from the target's own token.

    A token may end inside a character, and its text may depend on the token before it. So each token is decoded together with the one
    before, and its text is held back until its last character is complete.

    Args:
        decode: Token ids to text.
        write: Called with each new piece of text, and whether its token was an accepted draft token.
    """

    takes_blocks = True

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str, bool], None]) -> None:
        self._decode = decode
        self._write = write
        self._tokens: list[int] = []
        self._context = 0  # tokens[context:done] are shown, and decoded again with the next ones
        self._done = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """Take the prompt, which is not shown, then the tokens of each step: accepted draft tokens and the target's own token."""
        if self._prompt:
            self._prompt = False
            return
        tokens = value.flatten().tolist()
        for i, token in enumerate(tokens):
            self._tokens.append(token)
            self._show(i < len(tokens) - 1, final=False)

    def end(self) -> None:
        """Show the text that is held back. Repeated calls show nothing twice."""
        self._show(False, final=True)

    def _show(self, drafted: bool, final: bool) -> None:
        shown = self._decode(self._tokens[self._context : self._done])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(shown) or (text.endswith("\ufffd") and not final):
            return
        self._context, self._done = self._done, len(self._tokens)
        self._write(text[len(shown) :], drafted)
