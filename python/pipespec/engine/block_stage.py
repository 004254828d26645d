"""BlockStage: the stage of a block drafter, whose one forward per round gives the logits of all tokens that it drafts in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipespec.engine.block import BlockConfig, BlockDrafter, kind_of_block
from pipespec.engine.cache import RowCache
from pipespec.engine.head_stage import HeadDraft, HeadStage
from pipespec.engine.inputs import StageInputs
from pipespec.models.families import NotReadable
from pipespec_kernels.state import Action


class BlockStage(HeadStage):
    """The first stage of a chain, if that is a block drafter, see :mod:`pipespec.engine.block`. It runs in turn with the target, in its process.

    Its cache holds the keys and values of the positions that have features. In the first step of a round it reads those that the target has committed since, and
    runs a block behind them. Each further step takes the logits of the next column. Past the block's last column it drafts nothing.

    Args:
        model: the drafter.
        others: see :class:`pipespec.engine.stage.Stage`.
    """

    model: BlockDrafter

    form = "block drafter"
    _wanted = 1
    """Draft tokens of the round, for which the logits are computed together."""
    _blocks: list[tuple[int, int]]
    """Per row, the length of the target's text and its newest token when its block ran."""
    _hidden: torch.Tensor
    """The blocks' outputs ``[rows, size, H]``."""
    _bases: torch.Tensor
    """The logits of their first columns that draft, ``[rows, columns, draft_vocabulary]``."""

    def pack(self) -> None:
        """Use native products on a CPU. The rest of a layer runs in torch's operations, since the native form has no attention over columns behind one's own."""
        if self._packed:
            return
        self._packed = True
        if self._native and self.model.device.type == "cpu":
            try:
                with torch.inference_mode():
                    self.model.pack()
                self.form = f"{BlockStage.form}, native products"
            except NotReadable as error:
                self.form = f"{BlockStage.form}: {error}"

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        cache, known = super()._open(inputs)
        self._blocks = [(0, -1)] * cache.rows
        return cache, known

    def _plan(self, lookahead: int, max_draft_tokens: int) -> Action:
        self._wanted = min(lookahead, self.model.config.drafted)
        action = super()._plan(lookahead, max_draft_tokens)
        if action == Action.STEP and (self._n_select > 0).any():
            # A row whose newest token no column drafts commits nothing, and the next plan gives its tokens once more.
            outside = [not 0 <= n < self.model.config.drafted for n in self._columns()]
            self._query_lens[(self._n_select > 0) & np.array(outside)] = 0
            if not self._query_lens.any():
                return Action.IDLE
        return action

    def _columns(self) -> list[int]:
        """Per row, how many tokens are between the target's text and what the step drafts."""
        ends = (self._kv + self._query_lens).tolist()
        return [end - self.block.length(self.block.target, row) for row, end in enumerate(ends)]

    def _score(self, fed: torch.Tensor, cache: RowCache) -> tuple[torch.Tensor, int]:
        """Take the logits of the next column of each row that selects, after a new block where the target has committed tokens."""
        selects = ((self._n_select > 0) & (self._query_lens > 0)).tolist()
        columns = [n if chosen else 0 for n, chosen in zip(self._columns(), selects, strict=True)]
        lengths = [self.block.length(self.block.target, row) for row in range(cache.rows)]
        blocks = [(n, int(self._text[row, n - 1])) for row, n in enumerate(lengths)]
        if any(chosen and self._blocks[row] != blocks[row] for row, chosen in enumerate(selects)):
            self._read_features(cache, [n - 1 - skipped for n, skipped in zip(lengths, self._skipped, strict=True)])
            self._grow(cache, max(cache.lengths) + self.model.config.size)
            anchors = torch.tensor([token for _, token in blocks], device=self._device)
            self._hidden, self._blocks = self.model(anchors, cache), blocks
            self._bases = self._logits_of(max(self._wanted, max(columns) + 1))
        elif max(columns) >= self._bases.shape[1]:
            self._bases = self._logits_of(self.model.config.drafted)
        logits = self._bases[torch.arange(cache.rows), columns]
        if self.model.markov_head is not None:
            logits = logits + self._bias(lengths, columns)
        first = self._first_selecting()
        column = torch.from_numpy(self._n_select - (1 + first)).to(logits.device)
        return self._widened(logits, column, fed.shape[1] - first), first

    def _logits_of(self, count: int) -> torch.Tensor:
        """The logits of the first ``count`` columns that draft."""
        first = self.model.config.size - self.model.config.drafted
        return self.model.logits(self._hidden[:, first : first + count])

    def _bias(self, lengths: Sequence[int], columns: Sequence[int]) -> torch.Tensor:
        """What the tokens before the next columns add to their logits, ``[rows, draft_vocabulary]``."""
        head, first = self.model.markov_head, self.model.config.size - self.model.config.drafted
        assert head is not None
        biases = []
        for row, (n, column) in enumerate(zip(lengths, columns, strict=True)):
            # An anchor's column that drafts nothing has the anchor itself before it.
            before = [self._text[row, n - 1]] * first + self._text[row, n - 1 : n + column].tolist()
            tokens = torch.tensor(before, dtype=torch.int64, device=self._device)
            biases.append(head(tokens, self._hidden[row, : len(tokens)]))
        return torch.stack(biases)

    def _read_features(self, cache: RowCache, known: Sequence[int]) -> None:
        """Read the positions of each row up to ``known[r]``."""
        features = self._features()
        # A row whose features begin later than those of the kept text that it goes on from begins again.
        cache.truncate([min(pair) for pair in zip(cache.lengths, self._known, strict=True)])
        while counts := [n - at for n, at in zip(known, cache.lengths, strict=True)]:
            if max(counts) <= 0:
                break
            begin, q = cache.lengths, min(self._chunk, max(counts))
            self._grow(cache, max(begin) + q)
            spans = [(at, max(0, min(n, q))) for at, n in zip(begin, counts, strict=True)]
            columns = torch.nn.utils.rnn.pad_sequence(
                [
                    features.read(row, at + skipped, at + skipped + n)
                    for row, ((at, n), skipped) in enumerate(zip(spans, self._skipped, strict=True))
                ],
                batch_first=True,
            )
            self.model.read(columns.to(self._device), cache)
            cache.truncate([at + n for at, n in spans])
        self._known = list(cache.lengths)


@dataclass(frozen=True, eq=False)
class BlockDraft(HeadDraft):
    """A block drafter, DFlash or DSpark.

    Args:
        folder: Its folder, or its name on the hub.
    """

    label = "a block drafter"
    stage_class = BlockStage
    config_class = BlockConfig
    model_class = BlockDrafter
    drafts_at_once = True

    @classmethod
    def recognise(cls, given: Any) -> BlockDraft | None:
        return None if kind_of_block(given) is None else cls(given)
