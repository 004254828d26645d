"""What a captured step reads and writes at fixed addresses, and the key of a captured graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipespec.engine.cache import RowCache
from pipespec.engine.sampler import ScoreRecord, check_drawn, logprobs_of
from pipespec.engine.sampling import FusedPenalties, SamplingParams
from pipespec_kernels import dispatch, ops
from pipespec_kernels.noise import ALL_DRAWN, Noise

_numbers = itertools.count(1)


class SamplingKind(NamedTuple):
    """The part of the sampling parameters that decides which kernels run. Their numbers lie in memory and may change between launches.

    Attributes:
        sampled: False: greedy.
        top_k: Whether a top-k filter runs; likewise ``top_p`` and ``min_p``.
        penalties: Number of the :class:`StaticPenalties` that apply; 0: none.
        record: Number of the :class:`StaticRecord` that is written; 0: none.
    """

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: int = 0
    record: int = 0

    @classmethod
    def of(cls, sampling_params: SamplingParams, penalties: int = 0) -> SamplingKind:
        if sampling_params.seeds is None:
            return cls(penalties=penalties)
        s = sampling_params
        return cls(True, s.top_k > 0, s.top_p < 1.0, s.min_p > 0.0, penalties)


class StaticPenalties:
    """The text that penalties see, and their numbers, at fixed addresses.

    Args:
        rows: Rows of the batch.
        capacity: Tokens of a row's history.
        biases: Biases per row that there is room for.
        device: The stage's device.

    Attributes:
        number: Differs between any two instances.
    """

    def __init__(self, rows: int, capacity: int, biases: int, device: torch.device) -> None:
        self.number = next(_numbers)
        self._capacity, self._room = capacity, biases
        self._history = torch.zeros((rows, capacity), dtype=torch.int32, device=device)
        # Position in the history of the text's first token.
        self._offsets = torch.zeros(rows, dtype=torch.int32, device=device)
        self._penalties = self._padded(FusedPenalties()).tensors([0] * rows, device)
        self._workspaces: dict[int, Tensor] = {}  # by width

    def fits(self, capacity: int, biases: int) -> bool:
        """Whether there is room for this many tokens and biases. Without biases none are applied."""
        return capacity <= self._capacity and biases <= self._room and (biases > 0) == (self._room > 0)

    def _padded(self, fused: FusedPenalties) -> FusedPenalties:
        """With a bias for each place there is. Id -1 has no effect."""
        return fused._replace(bias=(*fused.bias, *[(-1, 0.0)] * (self._room - len(fused.bias))))

    def set(self, fused: FusedPenalties, sampling_params: SamplingParams, prompts: Sequence[np.ndarray]) -> None:
        """Start a call with these prompts, int32 ``[P_r]``."""
        ignored = [sampling_params.ignored_ids(row) for row in range(len(prompts))]
        new = self._padded(fused).tensors(ignored, self._history.device)
        for name in ("repetition", "presence", "frequency", "prompt_lengths", "bias_ids", "bias"):
            if (own := getattr(self._penalties, name)) is not None:
                own.copy_(getattr(new, name))
        offsets = [0] * len(prompts)
        for row, prompt in enumerate(prompts):
            shown = prompt
            if sampling_params.prompts:
                shown = sampling_params.prompts[row].ids[ignored[row] :]
                offsets[row] = len(shown) - sampling_params.prompts[row].length
            self._history[row, : len(shown)].copy_(torch.from_numpy(np.ascontiguousarray(shown)))
        self._offsets.copy_(torch.tensor(offsets, dtype=torch.int32))

    def __call__(
        self, logits: Tensor, tokens: Tensor, kv: Tensor, n_select: Tensor, num_draft_tokens: Tensor
    ) -> Tensor:
        """The penalised logits, float32; see :meth:`StaticSampler.__call__`. Appends the tokens to the text."""
        if logits.dtype is not torch.float32:
            logits = logits.float()
        rows, width, vocab = logits.shape
        if logits.is_cuda and width not in self._workspaces:
            self._workspaces[width] = torch.zeros(rows * width * vocab, dtype=torch.int32, device=logits.device)
        ops.penalize(
            logits,
            tokens,
            self._history,
            kv + self._offsets,
            self._penalties,
            query_lens=n_select,
            num_draft_tokens=num_draft_tokens,
            workspace=self._workspaces.get(width),
        )
        return logits


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

    @property
    def keeps_logits(self) -> bool:
        """Whether logits as the model returns them are recorded."""
        return self._logits is not None

    def start(self, starts: Sequence[int]) -> None:
        """Start a call whose rows begin with prompts of these lengths."""
        self._starts.copy_(torch.tensor(starts, dtype=torch.int32))

    def __call__(
        self,
        raw: Tensor,
        processed: Tensor,
        selected: Tensor,
        kv: Tensor,
        n_select: Tensor,
        num_draft_tokens: Tensor,
        inverse_temperature: Tensor | None,
        cutoff: Tensor | None,
    ) -> None:
        """Write what a step has selected, see :meth:`StaticSampler.__call__`; ``raw``: the logits before penalties."""
        width = selected.shape[1]
        step = torch.arange(width, device=selected.device)
        column = (n_select - 1 - num_draft_tokens)[:, None] + step
        entry = kv[:, None] + 1 + column - self._starts[:, None]
        # A block may go on behind the end of its row.
        entry = torch.where((selected >= 0) & (entry < self._tokens), entry, self._tokens).long()
        column = column.clamp(0, width - 1).long()
        for own, logits in ((self._logits, raw), (self._processed, processed)):
            if own is not None:
                own[self._row, entry] = logits[self._row, column].float()
        if self._logprobs is not None and self._top_ids is not None and self._top_n is not None:
            logprobs, top_ids = logprobs_of(
                processed, selected, n_select, num_draft_tokens, inverse_temperature, cutoff, self._top_n
            )
            self._logprobs[self._row, entry] = logprobs
            self._top_ids[self._row, entry] = top_ids

    def read(self, record: ScoreRecord, lengths: Sequence[int]) -> None:
        """Add to ``record`` what it lacks of each row's first ``lengths[r]`` new tokens, which are committed."""
        for row, end in enumerate(lengths):
            begin = record.counts[row]
            if end > begin:
                own = (self._logits, self._processed, self._logprobs, self._top_ids)
                record.add(row, end - begin, *(None if x is None else x[row, begin:end] for x in own))


class StaticSampler:
    """Chooses the tokens of one stage on its device: :class:`pipespec.engine.sampler.Sampler` with its numbers at fixed addresses.

    Args:
        rows: Rows of the batch.
        device: The stage's device.
        is_target: Whether logits without a distribution are an error. A draft without one only drafts badly.

    Attributes:
        kind: The kind of sampling of the present call.
    """

    def __init__(self, rows: int, device: torch.device, is_target: bool) -> None:
        self.kind, self._is_target = SamplingKind(), is_target
        self._rows, self._device = rows, device
        self._penalties: StaticPenalties | None = None
        self._record: StaticRecord | None = None
        # By width, since graphs keep the addresses.
        self._workspaces: dict[int, Any] = {}
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._inverse_temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self._min_p = torch.zeros(rows, dtype=torch.float64, device=device)
        # Per row the first position without a distribution, where the host reads it. Kernels write it over the bus, in this case only.
        undrawn = torch.full((rows,), ALL_DRAWN, dtype=torch.int64, device="cpu")
        self._undrawn = undrawn if device.type == "cpu" else undrawn.pin_memory()

    def set(self, sampling_params: SamplingParams, prompts: Sequence[np.ndarray], most: int) -> None:
        """Use these parameters from the next step on. The numbers overwrite the old ones in place.

        Args:
            sampling_params: Of the call.
            prompts: Per row, int32 ids ``[P_r]``.
            most: Positions that a row may come to use.
        """
        self.kind = SamplingKind.of(sampling_params, self._set_penalties(sampling_params, prompts, most))
        if sampling_params.seeds is None:
            return
        self._seeds.copy_(torch.from_numpy(np.array(sampling_params.seeds, dtype=np.uint64).view(np.int64)))
        self._inverse_temperature.fill_(1 / sampling_params.temperature)
        self._top_k.fill_(sampling_params.top_k)
        self._top_p.fill_(sampling_params.top_p)
        self._min_p.fill_(sampling_params.min_p)
        self._undrawn.fill_(ALL_DRAWN)

    def keep(self, record: ScoreRecord, starts: Sequence[int], tokens: int, vocabulary: int) -> None:
        """Record the logits of the present call, after :meth:`set`.

        Args:
            record: What to record.
            starts: Lengths of the prompts.
            tokens: Maximum number of new tokens of a row.
            vocabulary: Entries of a row of logits.

        Raises:
            torch.OutOfMemoryError: There is no room for them.
        """
        if self._record is None or not self._record.fits(record, tokens):
            self._record = None
            self._record = StaticRecord(record, self._rows, tokens, vocabulary, self._device)
        self._record.start(starts)
        self.kind = self.kind._replace(record=self._record.number)

    def read(self, record: ScoreRecord, lengths: Sequence[int]) -> None:
        """Take over what the steps have recorded, see :meth:`StaticRecord.read`."""
        assert self._record is not None
        self._record.read(record, lengths)

    def _set_penalties(self, sampling_params: SamplingParams, prompts: Sequence[np.ndarray], most: int) -> int:
        """Returns the number of the penalties that apply."""
        fused = sampling_params.penalties
        if fused is None:
            return 0
        # Ids that processors see may be more than those of the text: padding within a prompt.
        capacity = most + max([0, *(len(p.ids) - p.length for p in sampling_params.prompts)])
        if self._penalties is None or not self._penalties.fits(capacity, len(fused.bias)):
            room = 1 << (len(fused.bias) - 1).bit_length() if fused.bias else 0
            self._penalties = StaticPenalties(self._rows, 1 << (capacity - 1).bit_length(), room, self._device)
        self._penalties.set(fused, sampling_params, prompts)
        return self._penalties.number

    def __call__(
        self, logits: Tensor, tokens: Tensor, kv: Tensor, n_select: Tensor, num_draft_tokens: Tensor
    ) -> Tensor:
        """Choose tokens for all columns of a step, see :func:`pipespec_kernels.ops.verify`.

        Args:
            logits: ``[rows, width, vocabulary]``.
            tokens: The tokens fed, int32 ``[rows, width]``.
            kv: Position of each row's first token, int32 ``[rows]``.
            n_select: Columns of each row that need a choice, int32 ``[rows]``.
            num_draft_tokens: How many of them hold draft tokens, int32 ``[rows]``.

        Returns:
            ``selected``, int32 ``[rows, width]``.
        """
        kind, noise, undrawn, cutoff, raw = self.kind, None, None, None, logits
        if kind.penalties:
            assert self._penalties is not None
            if kind.record and self._record is not None and self._record.keeps_logits:
                raw = logits.clone()  # penalties change float32 in place
            logits = self._penalties(logits, tokens, kv, n_select, num_draft_tokens)
        if kind.sampled:
            if kind.top_k or kind.top_p or kind.min_p:
                # Which filters run is fixed in a graph, so a filter that is off is left out here.
                cutoff = ops.cutoff(
                    logits,
                    inv_temperature=self._inverse_temperature,
                    top_k=self._top_k if kind.top_k else 0,
                    top_p=self._top_p if kind.top_p else 1.0,
                    min_p=self._min_p if kind.min_p else 0.0,
                    query_lens=n_select,
                    num_draft_tokens=num_draft_tokens,
                )
            # Column 0 chooses the token behind the first one that is fed.
            noise = Noise(self._seeds, kv, self._inverse_temperature, cutoff, offset=1)
            undrawn = self._undrawn if self._is_target else None
        workspace = self._workspace(logits)
        selected = ops.verify(
            logits, tokens, n_select, num_draft_tokens, noise=noise, workspace=workspace, undrawn=undrawn
        )[0]
        if kind.record:
            assert self._record is not None
            inverse = self._inverse_temperature if kind.sampled else None
            self._record(raw, logits, selected, kv, n_select, num_draft_tokens, inverse, cutoff)
        return selected

    def _workspace(self, logits: Tensor) -> Any:
        """The work space of verification on a GPU, which each launch leaves zero; None on a CPU."""
        rows, width, _ = logits.shape
        if width not in self._workspaces:
            kernels = dispatch.kernels(logits)
            self._workspaces[width] = None if kernels is None else kernels.Workspace(rows, width, logits.device)
        return self._workspaces[width]

    def check_drawn(self) -> None:
        """Check the steps that have ended.

        Raises:
            ValueError: A token was drawn from logits that are no distribution.
        """
        if self.kind.sampled:
            check_drawn(self._undrawn)


class StaticBuffers(NamedTuple):
    """What a stage keeps at fixed addresses for one number of rows.

    Attributes:
        cache: Keys and values.
        sampler: Its numbers lie at fixed addresses, too.
        version: Differs between any two allocations, and from one set of weights to the next.
        weights: Hash of the addresses of the model's weights.
        graphs: The :class:`CapturedGraph` of each key that the stage is launched with. They end with the buffers.
        prompt_graphs: The :class:`CapturedPrompt` of each number of columns.
    """

    cache: RowCache
    sampler: StaticSampler
    version: int
    weights: int
    graphs: dict[GraphKey, Any]
    prompt_graphs: dict[int, Any]


class StageStep(NamedTuple):
    """One step within a graph or a round.

    Attributes:
        stage: Index of the stage.
        width: Columns of the step.
    """

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
        cls, steps: Sequence[StageStep], buffers: Sequence[StaticBuffers], lookahead: tuple[int, ...] = ()
    ) -> GraphKey:
        """Build the key of a graph from its steps and the static buffers of all stages of the chain."""
        used = [buffers[stage] for stage in sorted({step.stage for step in steps})]
        return cls(tuple(steps), lookahead, tuple(b.version for b in used), tuple(b.sampler.kind for b in used))

    @property
    def launched(self) -> StageStep:
        """The step whose stage and width the scheduler launches the graph for."""
        return self.steps[-1]
