"""What a call records of the target's logits: in lists that grow with the text, or at fixed addresses, where captured steps write."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipespec.engine.sampling import LogitsProcess
from pipespec_kernels import ops

_numbers = itertools.count(1)

_SERIAL = 32_767  # elements that an operation of torch works on in the caller's thread alone


def float32_copy(logits: Tensor) -> Tensor:
    """A copy of ``[B, Q, V]`` in float32.

    On a CPU the caller makes it alone: libgomp's threads poll for some 20 ms after their work, on cores that the next forward needs.
    """
    if logits.is_cpu and logits.dtype is torch.float32:
        return torch.from_numpy(logits.detach().numpy().copy())
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if not out.is_cpu:
        return out.copy_(logits)
    for to, row in zip(out.flatten(0, 1), logits.flatten(0, 1), strict=True):
        for part, source in zip(to.split(_SERIAL), row.split(_SERIAL), strict=True):
            part.copy_(source)
    return out


class Step(NamedTuple):
    """What a stage feeds in a step, and where it chooses tokens. On the host, or on the stage's device.

    Attributes:
        tokens: int ``[rows, width]``, the tokens of the columns.
        kv: int32 ``[rows]``, the position of each row's first column, which chooses the token after it.
        query_lens: int32 ``[rows]``, columns of each row; 0: the row selects nothing.
        num_draft_tokens: int32 ``[rows]``, how many of them, at the end, are draft tokens.
    """

    tokens: Tensor
    kv: Tensor
    query_lens: Tensor
    num_draft_tokens: Tensor


class ScoreRecord:
    """What a call keeps of the target's logits, per row and committed token, on their device.

    Args:
        rows: of the batch.
        scores: whether to keep the scores for ``output_scores``.
        logits: whether to keep the logits for ``output_logits``.
        top_logprobs: how many of the likeliest tokens, in addition to the committed one, to keep log-probabilities of; None: of no token.
        warpers: transformers' warpers of the call. The scores are what they make of the processed logits.

    Attributes:
        counts: per row, tokens that are recorded.
        scores: per row and token, float32 ``[V]``; None: not requested. Likewise ``logits``.
        logprobs: per row and token, float32 ``[1 + top_logprobs]``: of the token, then of the likeliest; None: not requested.
        top_ids: per row and token, int32 ``[top_logprobs]``; -1 stands for no token.
        top_logprobs: as given.
    """

    def __init__(
        self,
        rows: int,
        *,
        scores: bool = False,
        logits: bool = False,
        top_logprobs: int | None = None,
        warpers: Sequence[LogitsProcess] = (),
    ) -> None:
        def lists(wanted: bool) -> list[list[Tensor]] | None:
            return [[] for _ in range(rows)] if wanted else None

        self.counts = [0] * rows
        self.scores, self.logits, self.top_logprobs = lists(scores), lists(logits), top_logprobs
        self.logprobs, self.top_ids = lists(top_logprobs is not None), lists(top_logprobs is not None)
        self._warpers = tuple(warpers)

    def write(
        self,
        raw: Tensor,
        processed: Tensor,
        selected: Tensor,
        step: Step,
        inverse_temperature: Tensor | None,
        cutoff: Tensor | None,
        first_row: int = 0,
    ) -> None:
        """Append what a step has selected, see :meth:`StaticRecord.write`. Row 0 of the step is ``first_row`` of the batch."""
        own: list[Tensor | None] = [None, None]
        if self.top_logprobs is not None:
            own = list(_logprobs_of(processed, selected, step, inverse_temperature, cutoff, self.top_logprobs))
        counts = (selected >= 0).sum(1).tolist()
        for row, (fed, draft_tokens) in enumerate(
            zip(step.query_lens.tolist(), step.num_draft_tokens.tolist(), strict=True)
        ):
            if fed:
                columns, entries = slice(fed - 1 - draft_tokens, fed - 1 - draft_tokens + counts[row]), counts[row]
                logprobs, top_ids = (None if x is None else x[row, :entries] for x in own)
                self.add(first_row + row, entries, raw[row, columns], processed[row, columns], logprobs, top_ids)

    def add(
        self,
        row: int,
        count: int,
        logits: Tensor | None,
        processed: Tensor | None,
        logprobs: Tensor | None,
        top_ids: Tensor | None,
    ) -> None:
        """Append copies for ``count`` tokens of a row. What is not requested may be None.

        ``logits`` and ``processed``, after all processors, are ``[count, V]``, ``logprobs`` and ``top_ids`` as in the attributes.
        """
        self.counts[row] += count
        if self.logits is not None and logits is not None:
            self.logits[row].extend(float32_copy(logits[None])[0].unbind(0))
        if self.scores is not None and processed is not None:
            # Some processors enable gradients, which inference tensors do not allow.
            with torch.inference_mode(False), torch.no_grad():
                scores = float32_copy(processed[None])[0]
                # Warpers do not read the ids.
                ids = torch.empty((count, 0), dtype=torch.int64, device=scores.device)
                for warp in self._warpers:
                    scores = warp(ids, scores)
                self.scores[row].extend(scores.detach().unbind(0))
        if self.logprobs is not None and self.top_ids is not None and logprobs is not None and top_ids is not None:
            self.logprobs[row].extend(logprobs.clone().unbind(0))
            self.top_ids[row].extend(top_ids.clone().unbind(0))


class StaticRecord:
    """What a call records of the target's logits, at fixed addresses: entry ``i`` of a row belongs to its ``i``-th new token.

    A step writes the entries of the tokens that it selects. One more entry takes what selects nothing.

    Args:
        record: What to record.
        rows: Rows of the batch.
        tokens: New tokens per row that there is room for.
        vocabulary: Entries of a row of logits.
        device: The stage's device.

    Attributes:
        number: Differs between any two instances.
    """

    def __init__(self, record: ScoreRecord, rows: int, tokens: int, vocabulary: int, device: torch.device) -> None:
        self.number = next(_numbers)
        self._tokens, self._rows = tokens, rows
        self._wanted = self._of(record)
        scores, logits, self._top_n = self._wanted

        def room(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((rows, tokens + 1, size), dtype=dtype, device=device)

        self._processed = room(vocabulary) if scores else None
        self._logits = room(vocabulary) if logits else None
        self._logprobs = None if self._top_n is None else room(1 + self._top_n)
        self._top_ids = None if self._top_n is None else room(self._top_n, torch.int32)
        self._starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._row = torch.arange(rows, device=device)[:, None]

    @staticmethod
    def _of(record: ScoreRecord) -> tuple[bool, bool, int | None]:
        return record.scores is not None, record.logits is not None, record.top_logprobs

    def fits(self, record: ScoreRecord, tokens: int) -> bool:
        """Whether this is what a call records, with room for its tokens."""
        return self._wanted == self._of(record) and tokens <= self._tokens

    def start(self, starts: Sequence[int]) -> None:
        """Start a call whose rows begin with prompts of these lengths."""
        self._starts.copy_(torch.tensor(starts, dtype=torch.int32))

    def write(
        self,
        raw: Tensor,
        processed: Tensor,
        selected: Tensor,
        step: Step,
        inverse_temperature: Tensor | None,
        cutoff: Tensor | None,
        first_row: int = 0,
    ) -> None:
        """Write what a step has selected.

        Args:
            raw: The model's logits of the step, ``[rows, width, V]``.
            processed: The same after all processors.
            selected: The tokens, int32 ``[rows, width]``.
            step: What was fed.
            inverse_temperature: Float32 ``[rows]``. None: greedy.
            cutoff: Float32 ``[rows, width]``: what top-k, top-p and min-p leave. None: everything.
            first_row: 0, as a captured step has all rows.
        """
        width = selected.shape[1]
        column = (step.query_lens - 1 - step.num_draft_tokens)[:, None] + torch.arange(width, device=selected.device)
        entry = step.kv[:, None] + 1 + column - self._starts[:, None]
        # A block may go on after the end of its row.
        entry = torch.where((selected >= 0) & (entry < self._tokens), entry, self._tokens).long()
        column = column.clamp(0, width - 1).long()
        for own, logits in ((self._logits, raw), (self._processed, processed)):
            if own is not None:
                own[self._row, entry] = logits[self._row, column].float()
        if self._logprobs is not None and self._top_ids is not None and self._top_n is not None:
            logprobs, top_ids = _logprobs_of(processed, selected, step, inverse_temperature, cutoff, self._top_n)
            self._logprobs[self._row, entry] = logprobs
            self._top_ids[self._row, entry] = top_ids

    def read(self, record: ScoreRecord, lengths: Sequence[int]) -> None:
        """Add to ``record`` what it lacks of each row's first ``lengths[r]`` new tokens, which are committed."""
        for row, end in enumerate(lengths):
            begin = record.counts[row]
            if end > begin:
                own = (self._logits, self._processed, self._logprobs, self._top_ids)
                record.add(row, end - begin, *(None if x is None else x[row, begin:end] for x in own))


def _logprobs_of(
    logits: Tensor,
    selected: Tensor,
    step: Step,
    inverse_temperature: Tensor | None,
    cutoff: Tensor | None,
    top_n: int,
) -> tuple[Tensor, Tensor]:
    """As :func:`pipespec_kernels.ops.logprobs`, with the selected token's before those of the likeliest: float32 ``[B, Q, 1 + n]``, int32 ``[B, Q, n]``."""
    chosen, top_ids, top = ops.logprobs(
        logits,
        selected,
        step.query_lens,
        step.num_draft_tokens,
        inv_temperature=inverse_temperature,
        cutoff=cutoff,
        top_n=top_n,
    )
    return torch.cat([chosen[:, :, None], top], -1), top_ids
