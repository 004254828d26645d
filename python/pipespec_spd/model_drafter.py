"""Drafts with a smaller model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.models.properties import embedding_size, input_device
from pipespec_spd.drafting import CHUNK, Drafter, SampleTokens
from pipespec_spd.machine import DraftRequest


class ModelDrafter(Drafter):
    """Drafts the continuation of each row's text, tokens in flight included, with a model that has the target's tokenizer.

    Its cache keeps all positions that the model has read. A flush truncates it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._cache: RowCache | None = None
        self._select: SampleTokens | None = None

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        rows, room = len(prompts), capacity + CHUNK
        if self._cache is None or not self._cache.matches(self.model) or not self._cache.fits(rows, room):
            self._cache = None  # before the new one is allocated
            self._cache = RowCache.for_model(self.model, rows, room)
        self._cache.reset()
        self._select = select
        # Its embedding may be padded less than the target's.
        self._last_id = embedding_size(self.model) - 1

    @property
    def cache(self) -> RowCache:
        assert self._cache is not None, "start() comes first"
        return self._cache

    @torch.inference_mode()
    def draft(self, requests: list[DraftRequest]) -> list[int]:
        tokens = {request.row: request.tokens for request in requests}
        end = [len(tokens[row]) if row in tokens else held for row, held in enumerate(self.cache.lengths)]
        until: list[int] = []
        while until != end:
            begin = self.cache.lengths
            until = [min(e, b + CHUNK) for e, b in zip(end, begin, strict=True)]
            if until != end:  # the last column of each row comes with the last feed
                until = [min(u, max(b, e - 1)) for u, b, e in zip(until, begin, end, strict=True)]
            logits = self._feed(tokens, until, selects=until == end)
        rows = [request.row for request in requests]
        last = [end[row] - begin[row] - 1 for row in rows]
        assert self._select is not None
        return self._select(logits[rows, last].float(), rows, [end[row] for row in rows])

    def _feed(self, tokens: dict[int, Sequence[int]], end: list[int], selects: bool) -> torch.Tensor:
        """Read each row's tokens up to position ``end[r]``. Returns the logits of all columns if it ``selects``, else none."""
        cache, begin = self.cache, self.cache.lengths
        q = max(e - b for e, b in zip(end, begin, strict=True))
        columns = torch.zeros((len(end), q), dtype=torch.int64, device="cpu")
        for row, (b, e) in enumerate(zip(begin, end, strict=True)):
            if b < e:
                columns[row, : e - b] = torch.tensor(tokens[row][b:e])
        cache.aim(end)
        fed = columns.clamp(max=self._last_id).to(input_device(self.model))
        logits = forward(self.model, fed, cache, keep=q * selects)
        cache.truncate(end)
        return logits

    def truncate(self, row: int, length: int) -> None:
        lengths = [min(held, length) if i == row else held for i, held in enumerate(self.cache.lengths)]
        there = self.cache.restorable(lengths)
        if there != lengths:  # recurrent states that are not kept so long; the tokens after them are read again
            self.cache.reserve_states()
        self.cache.truncate(there)

    def finish(self) -> None:
        self._select = None

    def release(self) -> None:
        self._cache = None

    def for_fork(self) -> ModelDrafter:
        return ModelDrafter(self.model)  # a call of another thread may have been under way in the cache
