"""SPD with all stages in one process, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.cached_text import prompt_chunks
from pipespec.engine.chain import PREFILL_CHUNK
from pipespec.engine.known import FUSED
from pipespec.schedules.base import Decoder
from pipespec_spd.decoding import PromptChunk, SpeculativeDriver, Streams
from pipespec_spd.drafting import Drafter
from pipespec_spd.machine import Entry
from pipespec_spd.partition import LayerStage, Partition, Verifier
from pipespec_spd.sections import ModelSection, open_sections


class LocalDriver(SpeculativeDriver):
    """All stages run in this process, one after the other."""

    def __init__(self, model: PreTrainedModel, partition: Partition, drafter: Drafter, native: bool = True) -> None:
        super().__init__(partition, Verifier.of(model, captured=True), drafter, native)
        self.model = model
        self.stages = [LayerStage.of(model, partition, s, captured=True) for s in range(partition.stages)]
        self._adopted: RowCache | None = None

    @property
    def target(self) -> LocalDriver:
        return self

    @property
    def static_caches(self) -> bool:  # type: ignore[override]
        """Whether the next call may run in captured steps."""
        sections = self._sections
        return self.native and all(s.own_form == FUSED and s.unsupported_reason() is None for s in sections)

    @property
    def _sections(self) -> list[ModelSection]:
        return [*(stage.section for stage in self.stages), self.verifier.section]

    def for_fork(self) -> Decoder:
        # A call of another thread may have been under way in the caches.
        return LocalDriver(self.model, self.partition, self.drafter.for_fork(), self.native)

    def forget_stale(self) -> bool:
        stale = [section.forget_stale() for section in self._sections]  # each of them
        return any(stale)

    def release(self) -> None:
        super().release()
        for stage in self.stages:
            stage.close()

    # ---- keys and values from outside, and for outside

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        """Start the next call with the keys and values of ``cache``, whose rows hold ``text``."""
        self._adopted = cache

    def forget(self) -> None:
        """Drop what :meth:`adopt` has taken. Each call reads its whole prompts."""
        self._adopted = None

    @torch.inference_mode()
    def complete(self, texts: Sequence[np.ndarray], lengths: Sequence[int]) -> RowCache:
        """A copy of the stages' keys and values, made to hold exactly ``texts``. Arguments: :meth:`pipespec.engine.cached_text.CachedText.complete`."""
        ends = [len(text) for text in texts]
        held = zip(*(stage.cache.lengths for stage in self.stages), strict=True)
        begin = [min(n, end, *row) for n, end, row in zip(lengths, ends, held, strict=True)]
        # Recurrent layers may have fewer states than their rows have positions. Those of all stages must agree.
        while (there := self._restorable(begin)) != begin:
            begin = there
        for row, text in enumerate(texts):
            self._text[row, : len(text)] = text
        # Rows that are complete are fed padding, for which a static cache has so much room.
        chunk = WIDTH if self._form == FUSED else PREFILL_CHUNK
        for columns, at, real in prompt_chunks(self._text, begin, ends, False, lambda: chunk):
            self._feed(columns, at, real)
        for stage in self.stages:
            stage.cache.truncate(ends)
        cache = RowCache.for_model(self.model, len(ends), max(ends))
        cache.load([pair for stage in self.stages for pair in stage.cache.states()], ends)
        return cache

    def _begin(self, end: list[int]) -> list[int]:
        """The lengths of an adopted cache, or 0."""
        cache = self._adopted
        if cache is None:
            return super()._begin(end)
        begin = cache.restorable([min(pair) for pair in zip(cache.lengths, end, strict=True)])
        if self._form == FUSED:
            begin = [min(begin)] * len(begin)  # no row's padding then goes beyond the longest prompt
        if any(begin):
            states = cache.states(begin)
            for stage in self.stages:
                stage.cache.reserve(cache.get_seq_length())
                stage.cache.load(states[stage.first : stage.first + len(stage.layers)], begin)
        return begin

    def _restorable(self, lengths: list[int]) -> list[int]:
        """Per row the largest length up to that of ``lengths`` that a stage can truncate its cache to, in the stage with the least."""
        found = [stage.cache.restorable(lengths) for stage in self.stages]
        return [min(row) for row in zip(*found, strict=True)]

    # ---- the stages

    def _open(self, rows: int, longest: int, max_positions: int) -> None:
        self._inbox: list[torch.Tensor | None] = [None] * self.partition.stages
        self._renew()
        forms = {section.own_form for section in self._sections}
        # The fused form decides on the caches, and a native one has to know what they take.
        if FUSED in forms:
            self._form = open_sections(self._sections, native=self.native and len(forms) == 1)
        for stage in self.stages:
            stage.open(rows, longest, max_positions)
        if FUSED not in forms:
            reserved = sum(stage.cache.nbytes for stage in self.stages)
            self._form = open_sections(self._sections, native=self.native, reserved=reserved)

    def _renew(self) -> None:
        """Replace stages whose modules are no longer the model's, as after ``resize_token_embeddings()``."""
        self.partition.check(self.model.config.num_hidden_layers)
        stages = [LayerStage.of(self.model, self.partition, s, captured=True) for s in range(self.partition.stages)]
        verifier = Verifier.of(self.model, captured=True)
        self.stages = [
            old if old.section.parts == new.section.parts else new for old, new in zip(self.stages, stages, strict=True)
        ]
        if verifier.section.parts != self.verifier.section.parts:
            self.verifier = verifier

    def _feed(self, columns: np.ndarray, begin: Sequence[int], real: Sequence[int]) -> list[PromptChunk]:
        until = [b + n for b, n in zip(begin, real, strict=True)]
        return [PromptChunk(self._run(columns, begin, until)[1], begin, real)]

    def _answer(self, columns: np.ndarray, begin: Sequence[int]) -> tuple[torch.Tensor, list[PromptChunk]]:
        hidden, streams = self._run(columns, begin, [b + 1 for b in begin])
        return hidden, [PromptChunk(streams, begin, [1] * len(columns))]

    def _run(self, columns: np.ndarray, begin: Sequence[int], until: Sequence[int]) -> tuple[torch.Tensor, Streams]:
        """Run columns through all stages, and return the output of the last one."""
        streams: Streams = {}
        hidden = torch.from_numpy(columns)
        for stage in self.stages:
            hidden, more = stage.step(hidden, begin, self.features, until)
            streams |= more
        return hidden, streams

    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, Streams, list[float]]:
        streams: Streams = {}
        took = [0.0] * self.partition.stages
        outbox: list[torch.Tensor | None] = [None] * self.partition.stages
        for s, (stage, entries) in enumerate(zip(self.stages, work, strict=True)):
            if not entries:
                continue
            began = time.perf_counter()
            arrived = self._inbox[s - 1]
            if s == 0:
                arrived = torch.zeros((stage.cache.rows, 1), dtype=torch.int64, device="cpu")
                for entry in entries:
                    arrived[entry.row, 0] = entry.token
            assert arrived is not None, "an entry comes from the stage before"
            outbox[s], more = stage.step(arrived, self.machine.held(s), self.features)
            streams |= more
            took[s] = time.perf_counter() - began
        self._inbox = outbox
        return outbox[-1], streams, took
