"""HeadStage: the stage of a draft head, which drafts a chain of tokens from the hidden states that the target has published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from pipespec.drafts.head import DraftHead
from pipespec.engine.cache import RowCache
from pipespec.engine.cached_text import common_length
from pipespec.engine.features import Features
from pipespec.engine.inputs import StageInputs
from pipespec.engine.stage import Stage
from pipespec.models.quantized import QuantizedLinear
from pipespec_kernels.state import Action


class HeadStage(Stage):
    """Stage 0 of a chain whose draft is a head, see :mod:`pipespec.drafts.head`. It runs in turn with the target, in its process.

    Its cache holds a slot for each position that has features, and behind them the slots of the tokens that it has drafted in this round. The next
    round begins by lowering the lengths to the former, and reads the features of what the target has committed since. A head that rests reads
    nothing.

    Args:
        model: the head.
        others: see :class:`Stage`.
    """

    model: DraftHead

    form = "draft head"
    may_defer = True
    _known: list[int]
    """Per row, slots with features of the target."""

    def read_from(self, target: Stage) -> None:
        """Let the target publish the features that the head reads."""
        depth = target.model.config.get_text_config(decoder=True).num_hidden_layers
        target.published = self.model.config.layers_of(depth), self.model.dtype
        self._source = target

    def pack(self) -> None:
        for module in self.model.modules():
            if isinstance(module, QuantizedLinear):
                module(torch.zeros(1, module.in_features))

    def reusable_bytes(self, inputs: StageInputs, given: RowCache | None) -> Counter[str]:
        return Counter()

    @property
    def is_deferred(self) -> bool:
        return not self._began

    # ---- the prompt: it is read by the first step

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        prompts, rows = inputs.prompts, len(inputs.prompts)
        self._device, self._clamp, self._ids = self.model.device, None, inputs.vocabulary
        self._chunk, self._began = inputs.chunk, False
        cache, known = self._cache, [0] * rows
        if cache is not None and inputs.reuse and cache.rows == rows and cache.device == self._device:
            for row, prompt in enumerate(prompts):
                # Slot s has read the tokens up to s + 1.
                read = self._skipped[row] + self._known[row] + 1
                same = common_length(self._text[row, :read], prompt[:-1])  # the last slot runs, for its output
                known[row] = max(0, same - 1 - self._skipped[row])
        else:
            self._skipped = [0] * rows
            self._cache = cache = RowCache(
                self.model.block, rows, inputs.capacity, dtype=self.model.dtype, device=self._device
            )
        self._known = known
        self._text = np.zeros((rows, inputs.most), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            self._text[row, : len(prompt)] = prompt
        self._states = torch.zeros((rows, self.model.block.hidden_size), dtype=self.model.dtype, device=self._device)
        return cache, known

    def _read(self, inputs: StageInputs, cache: RowCache, held: list[int], *, selects: bool) -> tuple[int, int]:
        return 0, 0

    def _read_until(self) -> list[int]:
        return [n + skipped for n, skipped in zip(self._known, self._skipped, strict=True)]

    # ---- a step

    def _plan(self, lookahead: int, max_draft_tokens: int, may_wait: bool) -> Action:
        action = super()._plan(lookahead, 0, False)
        if action == Action.STEP and not self._began:
            begin = self._features().begin
            for row, at in enumerate(begin):
                if at != self._skipped[row]:
                    self._known[row], self._skipped[row] = 0, at
            if any(self.block.length(self.block.target, row) - 1 <= at for row, at in enumerate(begin)):
                return Action.IDLE  # nothing was published yet; the next plan gives the tokens once more
            self._began = True
        return action

    def _features(self) -> Features:
        cache = self._source.cache
        assert cache is not None
        assert isinstance(cache.features, Features)
        return cache.features

    def _feed(self) -> tuple[RowCache, torch.Tensor]:
        assert self._cache is not None
        return self._cache, self._take_tokens(self.port.columns)

    def _forward(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        return fed  # rows that select nothing wait until they do

    def _score(self, fed: torch.Tensor, cache: RowCache) -> tuple[torch.Tensor, int]:
        self._run_slots(cache)
        logits = self.model.logits(self._states)
        first = self._first_selecting()
        wide = logits.new_full((self._rows, fed.shape[1] - first, self._ids), -torch.inf)
        at = torch.from_numpy(np.maximum(self._n_select.astype(np.int64) - 1 - first, 0)).to(logits.device)
        wide[torch.arange(self._rows, device=logits.device)[:, None], at[:, None], self.model.ids] = logits
        return wide, first

    def _run_slots(self, cache: RowCache) -> None:
        """Run the slots of the rows that select up to their newest token, and keep the last outputs."""
        block, features = self.block, self._features()
        selects = [int(n) > 0 for n in self._n_select]
        # Slots with features, and all slots.
        known = [block.length(block.target, row) - 1 - skipped for row, skipped in enumerate(self._skipped)]
        ends = [int(a + b) - 1 - s for a, b, s in zip(self._kv, self._query_lens, self._skipped, strict=True)]
        cache.truncate(
            [
                min(n, ends[row] if selects[row] and self._known[row] >= known[row] else self._known[row])
                for row, n in enumerate(cache.lengths)
            ]
        )
        while True:
            begin = cache.lengths
            counts = [
                0 if not selects[row] else known[row] - n if n < known[row] else min(1, ends[row] - n)
                for row, n in enumerate(begin)
            ]
            if (q := min(self._chunk, max(counts))) <= 0:
                return
            counts = [min(n, q) for n in counts]
            self._grow(cache, max(begin) + q)
            self._run_columns(cache, features, known, counts)

    def _run_columns(self, cache: RowCache, features: Features, known: Sequence[int], counts: Sequence[int]) -> None:
        """One forward of the head over the next ``counts[r]`` slots of each row: all with features, or one without."""
        head, q, begin = self.model, max(counts), cache.lengths
        tokens = torch.zeros((self._rows, q), dtype=torch.int64)
        states = self._states[:, None].repeat(1, q, 1)
        for row, (at, n, skipped) in enumerate(zip(begin, counts, self._skipped, strict=True)):
            slot = at + skipped
            tokens[row, :n] = torch.from_numpy(self._text[row, slot + 1 : slot + 1 + n].astype(np.int64))
            if at < known[row]:
                states[row, :n] = head.fuse(features.read(row, slot, slot + n).to(self._device))
        positions, masks = cache.positions(q), cache.masks(q)
        outputs = head(head.embed(tokens.to(self._device)), states, positions, masks, cache)
        cache.truncate([at + n for at, n in zip(begin, counts, strict=True)])
        for row, (at, n) in enumerate(zip(begin, counts, strict=True)):
            if n:
                self._states[row] = outputs[row, n - 1]
                if at < known[row]:
                    self._known[row] = at + n
