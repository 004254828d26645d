"""HeadStage: the stage of a draft head, which drafts a chain of tokens from the hidden states that the target has published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.chain import DraftSpec
from pipespec.engine.head import DraftHead, HeadConfig, is_head
from pipespec.engine.inputs import StageInputs
from pipespec.engine.known import NATIVE
from pipespec.engine.native import NativeForm
from pipespec.engine.prefixes import Origin, Source
from pipespec.engine.sampling import float32_copy
from pipespec.engine.stage import Stage
from pipespec.engine.target_reader import ReaderConfig
from pipespec.models.devices import tensor_parallel_size
from pipespec.models.families import NotReadable
from pipespec_kernels.decoder import NativeDecoder
from pipespec_kernels.state import Action


class HeadStage(Stage):
    """The first stage of a chain, if that is a head, see :mod:`pipespec.engine.head`. It runs in turn with the target, in its process.

    Its cache holds a slot for each position that has features, and after them the slots of the tokens that it has drafted in this round. The next
    round begins by lowering the lengths to the former, and reads the features of what the target has committed since. A head that rests reads
    nothing.

    Args:
        model: the head.
        others: see :class:`Stage`.
    """

    model: Any

    form = "draft head"
    may_defer = True
    _decoder: NativeForm | None = None
    _product: NativeDecoder | None = None
    """The head's ``fc``, with its native form."""
    _packed = False
    _source: Stage
    _attention: str | None = None
    """The attention of its layers in transformers' registry; None: the one that they were made with."""
    _known: list[int]
    """Per row, slots with features of the target."""

    def read_from(self, target: Stage) -> None:
        """Let the target publish the features that the head reads."""
        depth = target.model.config.get_text_config(decoder=True).num_hidden_layers
        target.published = self.model.config.layers_of(depth), self.model.dtype
        self._source = target

    def pack(self) -> None:
        """Choose the form: the native one on a CPU, where it has all that the head has; else torch's operations."""
        if self._packed:
            return
        self._packed = True
        if self._native and self.model.device.type == "cpu":
            try:
                self._decoder, self._product = NativeForm(self.model.parts(), 0), self.model.native_product()
                self.form = NATIVE
            except NotReadable as error:
                self.form = f"{HeadStage.form}: {error}"

    @property
    def is_deferred(self) -> bool:
        return not self._began

    # ---- the prompt: it is read by the first step

    def _set_attention(self) -> None:
        # Captured and eager stages share a head, and a pipeline may use both in turn.
        self.model.block._attn_implementation = self._attention or self.model.attention

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        self._set_attention()
        rows = len(inputs.prompts)
        self._device, self._chunk, self._began = self.model.device, inputs.chunk, False
        self._fit_vocabulary(inputs.vocabulary)
        cache, held = self._resume(inputs)
        self._known = known = self._in_cache(held)
        self.pack()
        dtype = self.model.dtype if self._decoder is None else torch.float32
        self._states = torch.zeros((rows, self.model.block.hidden_size), dtype=dtype, device=self._device)
        return cache, known

    def _fit_vocabulary(self, target_vocabulary: int) -> None:
        self._clamp, self._ids = None, target_vocabulary

    def _in_cache(self, positions: Sequence[int]) -> list[int]:
        # Slot s has read the tokens up to s + 1. The last slot runs, for its output.
        return [max(0, n - 1 - skipped) for n, skipped in zip(positions, self._skipped, strict=True)]

    def _read_by(self, cache: RowCache) -> list[int]:
        return [n + skipped + 1 if n else 0 for n, skipped in zip(self._known, self._skipped, strict=True)]

    def _new_cache(self, rows: int, capacity: int) -> RowCache:
        return RowCache(self.model.block, rows, capacity, dtype=self.model.dtype, device=self.model.device)

    def _matches(self, cache: RowCache) -> bool:
        return (cache.dtype, cache.device) == (self.model.dtype, self.model.device)

    def _find(self, inputs: StageInputs) -> tuple[Origin | None, list[Source | None]]:
        # No text depends on its bits.
        made, store = Origin(None, (self.model.dtype, self.model.device)), self._store
        store.retain(lambda kept: kept.origin == made)
        return made, [store.find(prompt, store.texts) for prompt in inputs.prompts]

    def _read(self, inputs: StageInputs, cache: RowCache, held: list[int], *, selects: bool) -> tuple[int, int]:
        return 0, 0

    def _read_until(self) -> list[int]:
        return [n + skipped for n, skipped in zip(self._known, self._skipped, strict=True)]

    # ---- a step

    def _plan(self, lookahead: int, max_draft_tokens: int) -> Action:
        action = super()._plan(lookahead, 0)
        if action == Action.STEP and not self._began:
            self._begin_late()
            if any(self.block.length(self.block.target, row) - 1 <= at for row, at in enumerate(self._skipped)):
                return Action.IDLE  # nothing was published yet; the next plan gives the tokens once more
            self._began = True
        return action

    def _begin_late(self) -> None:
        """Begin at each row's first position with features."""
        for row, at in enumerate(self._features().begin):
            if at != self._skipped[row]:
                self._known[row], self._skipped[row] = 0, at

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
        """Run the slots of the rows that select up to their newest token, and keep the last outputs."""
        block = self.block
        selects = [int(n) > 0 for n in self._n_select]
        # Slots with features, and all slots.
        known = [block.length(block.target, row) - 1 - skipped for row, skipped in enumerate(self._skipped)]
        ends = [int(a + b) - 1 - s for a, b, s in zip(self._kv, self._query_lens, self._skipped, strict=True)]
        # A slot reads the token after it, which a stage downstream may have replaced.
        valid = [max(0, int(kv) - 1 - s) for kv, s in zip(self._kv, self._skipped, strict=True)]
        keeps = [chosen and self._known[row] >= known[row] for row, chosen in enumerate(selects)]
        kept = [min(n, ends[row]) if keeps[row] else self._known[row] for row, n in enumerate(valid)]
        cache.truncate([min(pair) for pair in zip(cache.lengths, kept, strict=True)])
        self._run_to(cache, known, [end if chosen else 0 for end, chosen in zip(ends, selects, strict=True)])
        logits = self._logits()
        first = self._first_selecting()
        column = torch.from_numpy(self._n_select - (1 + first)).to(logits.device)
        return self._widened(logits, column, fed.shape[1] - first), first

    def _widened(self, logits: torch.Tensor, column: torch.Tensor, width: int) -> torch.Tensor:
        """Logits ``[rows, width, vocabulary]``: those of ``logits [rows, draft_vocabulary]`` in one column of each row, -inf elsewhere. ``column < 0`` is the first one."""
        rows, size = len(logits), self._ids
        is_native = self._decoder is not None
        if is_native and width == 1 and logits.shape[1] == size and self.model.drafts_all:
            return logits[:, None]
        at = column.clamp(min=0)[:, None] * size + self.model.ids
        if is_native:
            # torch's fill wakes its threads, which then poll where those of the native forms are to run.
            filled = np.full((rows, width * size), -np.inf, np.float32)
            np.put_along_axis(filled, at.numpy(), float32_copy(logits[None])[0].numpy(), 1)
            return torch.from_numpy(filled).view(rows, width, size)
        wide = logits.new_full((rows, width * size), -torch.inf).scatter_(1, at, logits)
        return wide.view(rows, width, size)

    def _run_to(self, cache: RowCache, known: Sequence[int], ends: Sequence[int]) -> None:
        """Run the slots of each row up to ``ends[r]``, of which ``known[r]`` have features."""
        features = self._features()
        while True:
            begin = cache.lengths
            counts = [
                min(known[row], ends[row]) - n if n < known[row] else min(1, ends[row] - n)
                for row, n in enumerate(begin)
            ]
            if max(counts) <= 0:
                return
            self._grow(cache, max(begin) + 1)
            q = min(self._chunk, max(counts), cache.capacity - max(begin))
            self._run_columns(cache, features, known, [max(0, min(n, q)) for n in counts])

    def _run_columns(self, cache: RowCache, features: Features, known: Sequence[int], counts: Sequence[int]) -> None:
        """One forward of the head over the next ``counts[r]`` slots of each row: all with features, or one without."""
        head, q, begin = self.model, max(counts), cache.lengths
        tokens = torch.zeros((cache.rows, q), dtype=torch.int64)
        spans = [(at + skipped, n) for at, n, skipped in zip(begin, counts, self._skipped, strict=True)]
        for row, (slot, n) in enumerate(spans):
            tokens[row, :n] = torch.from_numpy(self._text[row, slot + 1 : slot + 1 + n])
        states = self._states[:, None]
        if given := [row for row, n in enumerate(counts) if n and begin[row] < known[row]]:
            read = [features.read(row, spans[row][0], sum(spans[row])) for row in given]
            fused = head.fuse(torch.cat(read).to(self._device), self._product)
            states = states.repeat(1, q, 1)
            for row, part in zip(given, fused.split([counts[row] for row in given]), strict=True):
                states[row, : counts[row]] = part
        embeds = head.embed(tokens.to(self._device))
        if self._decoder is not None:
            outputs = self._decoder.run_layers(states, cache, side=embeds.float())[0]
        else:
            outputs = head(embeds, states, cache.positions(q), cache.masks(q), cache)
        cache.truncate([at + n for at, n in zip(begin, counts, strict=True)])
        for row, n in enumerate(counts):
            if n:
                self._states[row] = outputs[row, n - 1]
        for row in given:
            self._known[row] = begin[row] + counts[row]

    def _logits(self) -> torch.Tensor:
        """The logits ``[rows, draft_vocabulary]`` of the last outputs."""
        if self._decoder is not None:
            return self._decoder.logits(self._states[:, None], 1)[:, 0]
        return self.model.logits(self._states)


@dataclass(frozen=True, eq=False)
class HeadDraft(DraftSpec):
    """A draft head.

    Args:
        folder: Its folder, or its name on the hub.
    """

    label = "a draft head"
    stage_class = HeadStage
    reads_target = True
    verifies = False  # it runs its slots one after the other, so that drafting costs as much
    source = "model"
    config_class: ClassVar[type[ReaderConfig]] = HeadConfig
    model_class: ClassVar[Any] = DraftHead

    folder: str | Path

    @classmethod
    def recognise(cls, given: Any) -> HeadDraft | None:
        return cls(given) if is_head(given) else None

    def check(self, target: PretrainedConfig) -> None:
        self.config_class.load(self.folder).require(target)

    def load(self, target: PreTrainedModel, dtype: torch.dtype | str) -> Any:
        if tensor_parallel_size(target) > 1:
            raise ValueError(
                f"{self.folder} is {self.label}, and the target is sharded over processes (tp_plan): leave one out"
            )
        return self.model_class.load(self.folder, target, dtype)

    def fit(self, model: Any, target: PreTrainedModel, weights: str | None) -> tuple[Any, str | None]:
        model.borrow(target)
        return model, None if weights is None else model.quantize(weights)

    def step_bytes(self, model: Any) -> int:
        found: int = model.step_bytes
        return found
