"""GraphedHead: the stage of a draft head, whose steps are captured as those of a model."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pipespec.engine.attention import ATTENTION
from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.chain import StageInputs
from pipespec.engine.fused_head import FusedHead, fused_head
from pipespec.engine.head import HeadStage
from pipespec.engine.known import FUSED
from pipespec.models.families import NotReadable, state_of
from pipespec.schedules.graphs.buffers import GraphKey
from pipespec.schedules.graphs.stage import GraphedStage
from pipespec_kernels.products import MAX_ROWS


class HeadCache(RowCache):
    """The static cache of a head, and what else its steps read and write at fixed addresses.

    Attributes:
        tokens: The text, int64 ``[rows, capacity]``.
        outputs: The output of each row's newest slot, ``[rows, H]``.
        skipped: The position of each row's first slot, int32 ``[rows]``.
    """

    def __init__(self, config: Any, rows: int, capacity: int, **options: Any) -> None:
        super().__init__(config, rows, capacity, static=True, **options)
        self.tokens = torch.zeros((rows, capacity), dtype=torch.int64, device=self.device)
        self.outputs = torch.zeros((rows, config.hidden_size), dtype=self.dtype, device=self.device)
        self.skipped = torch.zeros(rows, dtype=torch.int32, device=self.device)


class GraphedHead(GraphedStage, HeadStage):
    """A head over static buffers. It reads the features that the target's steps have left in theirs.

    The target verifies n draft tokens per round and commits at most n + 1 tokens, so the first step of a round has n + 1 columns. It runs the last n + 1
    slots that have features, some of them a second time. Each further step has one column and runs the next slot, which reads the
    output of the one before. So the host counts no slots. The prompt is read before the first step, see :meth:`HeadStage._run_to`.
    """

    _forward = HeadStage._forward  # no graph reads a prompt
    _source: GraphedStage
    _attention = ATTENTION  # no other one reads the lengths of a static cache
    _fused: FusedHead | None = None
    _fused_state = 0
    """Hash of the weights that :attr:`_fused` was chosen for."""

    @property
    def own(self) -> HeadCache:
        """The cache of the present call, since :meth:`prepare`."""
        cache = self.buffers.cache
        assert isinstance(cache, HeadCache)
        return cache

    def _features(self) -> Features:
        features = self._source.buffers.cache.features
        assert isinstance(features, Features)
        return features

    def key(self, width: int) -> GraphKey:
        own, source = self.buffers, self._source.buffers
        return super().key(width)._replace(versions=(own.version, source.version))

    def by_modules_reason(self) -> None:
        """None: the report says why it has no fused form."""

    def keep_prefixes(self, budget: int | None) -> None:
        """Nothing: it runs the slots of a kept prefix again, from the features that the target has kept."""
        super().keep_prefixes(0)

    def pack(self) -> None:
        """Nothing: :meth:`prepare` chooses the form."""

    def _state(self) -> int:
        modules = itertools.chain(self.model.modules(), self.model.get_input_embeddings().modules())
        return hash(tuple(itertools.chain.from_iterable(map(state_of, modules))))

    def _choose_form(self) -> tuple[FusedHead | None, int]:
        self._set_attention()
        state = self._state()
        if self._native and state != self._fused_state:
            try:
                self._fused, self.form = fused_head(self.model), FUSED
            except NotReadable as error:
                self._fused, self.form = None, f"{HeadStage.form}: {error}"
            state = self._fused_state = self._state()  # of the merged weights
        return self._fused, hash((self._fused and self._fused.number, state))

    def _make_cache(self, rows: int, capacity: int) -> RowCache:
        return HeadCache(self.model.block, rows, capacity, dtype=self.model.dtype, device=self.model.device)

    def _can_use(self, cache: RowCache, rows: int, capacity: int) -> bool:
        return cache.fits(rows, capacity) and (cache.dtype, cache.device) == (self.model.dtype, self.model.device)

    def _read(self, inputs: StageInputs, cache: RowCache, held: list[int], *, selects: bool) -> tuple[int, int]:
        """Run the slots of the prompts. The target has read them."""
        self._begin_late()
        before = list(self._known)
        ends = [max(0, len(prompt) - 1 - at) for prompt, at in zip(inputs.prompts, self._skipped, strict=True)]
        cache.truncate(before)
        self._run_to(cache, ends, ends)
        self.own.tokens[:, : self._text.shape[1]] = torch.from_numpy(self._text)
        self.own.skipped.copy_(torch.tensor(self._skipped))
        new = [end - n for end, n in zip(ends, before, strict=True)]
        return max(new), sum(new)

    def sync_lengths(self) -> None:
        """The slots of the prompts count. The next call runs those after them once more."""
        if self.is_prefilled:
            self.cache.set_lengths(self._known)

    def _score_columns(self, tokens: Tensor, kv: Tensor, n_select: Tensor) -> Tensor:
        head, cache = self.model, self.own
        rows, width = tokens.shape
        row, column = (torch.arange(n, device=tokens.device) for n in (rows, width))
        # What padding columns write is overwritten before a slot reads it.
        cache.tokens.scatter_(1, kv[:, None] + column, tokens.long())
        selects, end = n_select > 0, kv + n_select - 1 - cache.skipped
        # A row that selects nothing runs columns at the end of the cache, where there are no slots, or none.
        begin = torch.where(selects, (end - width).clamp(min=0), cache.capacity - width)
        at = (begin[:, None] + cache.skipped[:, None] + column).clamp(max=cache.capacity - 2)
        form = self._fused if rows * width <= MAX_ROWS else None
        new = None if form is None else torch.where(selects, width, 0).int()
        states = cache.outputs[:, None]
        if width > 1:
            # The target's buffers may be smaller than these; a row without slots must not read past their end.
            stored = self._features().stored
            features = stored[row[:, None], at.clamp(max=stored.shape[1] - 1)]
            states = head.fuse(features) if form is None else form.fuse(features, new)
        cache.follow(begin, new)
        embeds = head.embed(cache.tokens.gather(1, at + 1))
        if form is None:
            found = head(embeds, states, cache.positions(width), cache.masks(width), cache)
        else:
            found = form.run(embeds, states, cache)
        newest = found[row, (end - 1 - begin).clamp(0, width - 1)]
        cache.outputs.copy_(torch.where(selects[:, None], newest, cache.outputs))
        logits = head.logits(newest) if form is None else form.logits(newest, new)
        return self._widened(logits, n_select - 1, width)
