"""What a captured step reads and writes at fixed addresses, and the key of a captured graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.cache import RowCache
from pipespec.engine.chain import StageInputs
from pipespec.engine.sampler import Sampler, SamplingKind
from pipespec.engine.sampling import FusedPenalties, SamplerOutput, SamplingParams, ScoreRecord, Step
from pipespec_kernels import ops

_numbers = itertools.count(1)

versions = itertools.count()
"""Of :class:`StaticBuffers` and :class:`TextBuffers`."""


class StaticPenalties:
    """The text that penalties see, and their numbers, at fixed addresses, with room for ``capacity`` tokens and ``biases`` per row.

    Attributes:
        number: Differs between any two instances.
        history: int32 ``[rows, capacity]``. Each step appends the tokens that it feeds.
        offsets: int32 ``[rows]``, the position in the history of the text's first token.
        numbers: Those of :func:`pipespec_kernels.ops.penalize`.
    """

    def __init__(self, rows: int, capacity: int, biases: int, device: torch.device) -> None:
        self.number = next(_numbers)
        self._capacity, self._room = capacity, biases
        self.history = torch.zeros((rows, capacity), dtype=torch.int32, device=device)
        self.offsets = torch.zeros(rows, dtype=torch.int32, device=device)
        self.numbers = self._padded(FusedPenalties()).tensors([0] * rows, device)
        self._workspaces: dict[int, Tensor] = {}  # by width, since graphs keep the addresses

    def fits(self, capacity: int, biases: int) -> bool:
        """Whether there is room for this many tokens and biases. Without biases none are applied."""
        return capacity <= self._capacity and biases <= self._room and (biases > 0) == (self._room > 0)

    def _padded(self, fused: FusedPenalties) -> FusedPenalties:
        """With a bias for each place there is. Id -1 has no effect."""
        return fused._replace(bias=(*fused.bias, *[(-1, 0.0)] * (self._room - len(fused.bias))))

    def set(self, fused: FusedPenalties, sampling_params: SamplingParams, prompts: Sequence[np.ndarray]) -> None:
        """Start a call with these prompts, int32 ``[P_r]``."""
        ignored = [sampling_params.ignored_ids(row) for row in range(len(prompts))]
        new = self._padded(fused).tensors(ignored, self.history.device)
        for name in ("repetition", "presence", "frequency", "prompt_lengths", "bias_ids", "bias"):
            if (own := getattr(self.numbers, name)) is not None:
                own.copy_(getattr(new, name))
        offsets = [0] * len(prompts)
        for row, prompt in enumerate(prompts):
            shown = prompt
            if sampling_params.prompts:
                shown = sampling_params.prompts[row].ids[ignored[row] :]
                offsets[row] = len(shown) - sampling_params.prompts[row].length
            self.history[row, : len(shown)].copy_(torch.from_numpy(np.ascontiguousarray(shown)))
        self.offsets.copy_(torch.tensor(offsets, dtype=torch.int32))

    def workspace(self, logits: Tensor) -> Tensor | None:
        """That of :func:`pipespec_kernels.ops.penalize` on a GPU; None on a CPU."""
        width = logits.shape[1]
        if logits.is_cuda and width not in self._workspaces:
            self._workspaces[width] = torch.zeros(logits.numel(), dtype=torch.int32, device=logits.device)
        return self._workspaces.get(width)


class StaticRecord:
    """What a call records of the target's logits, at fixed addresses: entry ``i`` of a row belongs to its ``i``-th new token.

    A step writes the entries of the tokens that it selects. One more entry takes what selects nothing. There is room for ``tokens`` new tokens per row.

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

    def write(self, found: SamplerOutput, first_row: int = 0) -> None:
        """See :meth:`pipespec.engine.sampling.ScoreRecord.write`."""
        selected, step = found.selected, found.step
        width = selected.shape[1]
        column = (step.query_lens - 1 - step.num_draft_tokens)[:, None] + torch.arange(width, device=selected.device)
        entry = step.kv[:, None] + 1 + column - self._starts[:, None]
        # A block may go on after the end of its row.
        entry = torch.where((selected >= 0) & (entry < self._tokens), entry, self._tokens).long()
        column = column.clamp(0, width - 1).long()
        for own, logits in ((self._logits, found.raw), (self._processed, found.processed)):
            if own is not None:
                own[self._row, entry] = logits[self._row, column].float()
        if self._logprobs is not None and self._top_ids is not None and self._top_n is not None:
            logprobs, top_ids = found.logprobs(self._top_n)
            self._logprobs[self._row, entry] = logprobs
            self._top_ids[self._row, entry] = top_ids

    def read(self, record: ScoreRecord, lengths: Sequence[int]) -> None:
        """Add to ``record`` what it lacks of each row's first ``lengths[r]`` new tokens, which are committed."""
        for row, end in enumerate(lengths):
            begin = record.counts[row]
            if end > begin:
                own = (self._logits, self._processed, self._logprobs, self._top_ids)
                record.add(row, end - begin, *(None if x is None else x[row, begin:end] for x in own))


class StaticSampler(Sampler):
    """Chooses the tokens of a step that can be captured: penalties and records, too, lie at fixed addresses."""

    def __init__(self, rows: int, device: torch.device, is_target: bool) -> None:
        super().__init__(rows, device, is_target)
        self._penalties: StaticPenalties | None = None
        self._kept: StaticRecord | None = None

    def start(self, inputs: StageInputs) -> None:
        """Use the parameters of a call from the next step on. The numbers overwrite the old ones in place."""
        sampling_params = inputs.sampling_params
        self._set_numbers(sampling_params)
        fused = sampling_params.penalties
        if fused is None:
            return
        # Ids that processors see may be more than those of the text: padding within a prompt.
        capacity = inputs.most + max([0, *(len(p.ids) - p.length for p in sampling_params.prompts)])
        if self._penalties is None or not self._penalties.fits(capacity, len(fused.bias)):
            room = 1 << (len(fused.bias) - 1).bit_length() if fused.bias else 0
            self._penalties = StaticPenalties(self._rows, 1 << (capacity - 1).bit_length(), room, self._device)
        self._penalties.set(fused, sampling_params, inputs.prompts)
        self.kind = self.kind._replace(penalties=self._penalties.number)

    def keep(self, record: ScoreRecord, inputs: StageInputs) -> None:
        """Record the logits of the present call, after :meth:`start`. Raises ``torch.OutOfMemoryError`` if there is no room for them."""
        starts = [len(prompt) for prompt in inputs.prompts]
        tokens = max(limit - start for limit, start in zip(inputs.limits, starts, strict=True))
        if self._kept is None or not self._kept.fits(record, tokens):
            self._kept = None
            self._kept = StaticRecord(record, self._rows, tokens, inputs.vocabulary, self._device)
        self._kept.start(starts)
        self._record, self.kind = self._kept, self.kind._replace(record=self._kept.number)

    def read(self, record: ScoreRecord, lengths: Sequence[int]) -> None:
        """Take over what the steps have recorded, see :meth:`StaticRecord.read`."""
        assert self._kept is not None
        self._kept.read(record, lengths)

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """As :meth:`pipespec.engine.sampler.HostSampler.__call__`, without a wait for the device: the step and the result are on that of the logits."""
        processed = logits
        if self.kind.penalties:
            own = self._penalties
            assert own is not None
            processed = logits.to(torch.float32, copy=True)
            ops.penalize(
                processed,
                step.tokens,
                own.history,
                step.kv + own.offsets,
                own.numbers,
                query_lens=step.query_lens,
                num_draft_tokens=step.num_draft_tokens,
                workspace=own.workspace(logits),
            )
        return self._choose(logits, processed, step)


class StaticBuffers(NamedTuple):
    """What a stage keeps at fixed addresses for one number of rows.

    Attributes:
        cache: Keys and values.
        sampler: Its numbers lie at fixed addresses, too.
        version: Differs between any two allocations, and from one set of weights to the next.
        weights: Hash of the addresses of the model's weights.
        graphs: The :class:`CapturedGraph` of each key that the stage is launched with. They end with the buffers.
        prompt_graphs: The :class:`CapturedPrompt` of each number of columns, without and with logits.
    """

    cache: RowCache
    sampler: StaticSampler
    version: int
    weights: int
    graphs: dict[GraphKey, Any]
    prompt_graphs: dict[tuple[int, bool], Any]

    @property
    def rows(self) -> int:
        return self.cache.rows

    @property
    def capacity(self) -> int:
        """Positions of each row."""
        return self.cache.capacity

    @property
    def kind(self) -> SamplingKind:
        return self.sampler.kind


class TextBuffers(NamedTuple):
    """What a stage without a model keeps at fixed addresses for one number of rows.

    Attributes:
        history: The texts, int32 ``[rows, capacity]``.
        workspace: Of :func:`pipespec_kernels.ops.prompt_lookup`.
        version: As that of :class:`StaticBuffers`, like the others.
    """

    history: Tensor
    workspace: Tensor
    version: int
    graphs: dict[GraphKey, Any]
    prompt_graphs: dict[tuple[int, bool], Any]

    @property
    def rows(self) -> int:
        return self.history.shape[0]

    @property
    def capacity(self) -> int:
        return self.history.shape[1]

    @property
    def kind(self) -> SamplingKind:
        return SamplingKind()


class StageStep(NamedTuple):
    """One step within a graph or a round: the index of its stage, and its columns."""

    stage: int
    width: int


class GraphKey(NamedTuple):
    """What a captured graph depends on: calls with equal keys launch the same graph.

    Attributes:
        steps: The steps in the graph, in order. The stage of the last one is launched.
        lookahead: The chain's lookahead where the graph contains it; empty where the launcher writes it before each launch.
        versions: :attr:`StaticBuffers.version` of each stage that takes a step.
        kinds: The kind of sampling of each of these stages.
    """

    steps: tuple[StageStep, ...]
    lookahead: tuple[int, ...]
    versions: tuple[int, ...]
    kinds: tuple[SamplingKind, ...]

    @classmethod
    def of(
        cls, steps: Sequence[StageStep], buffers: Sequence[StaticBuffers | TextBuffers], lookahead: tuple[int, ...] = ()
    ) -> GraphKey:
        """Build the key of a graph from its steps and the static buffers of all stages of the chain."""
        used = [buffers[stage] for stage in sorted({step.stage for step in steps})]
        return cls(tuple(steps), lookahead, tuple(b.version for b in used), tuple(b.kind for b in used))

    @property
    def launched(self) -> StageStep:
        """The step whose stage and width the scheduler launches the graph for."""
        return self.steps[-1]
