"""The choice of tokens in a step: what a row's sampling parameters make of the logits.

:class:`Sampler` is what every stage runs. Its numbers lie at fixed addresses, so a captured step can be launched again with those of another call
(:class:`pipespec.schedules.graphs.buffers.StaticSampler`). :class:`HostSampler` adds what only the host can do: a grammar, the user's processors, position by position, and rejection sampling.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from pipespec.engine.acceptance import RejectionAcceptance
from pipespec.engine.callers import run_processors
from pipespec.engine.sampling import (
    LogitsProcess,
    SamplerOutput,
    SamplingParams,
    ScoreRecord,
    Step,
    float32_copy,
    ignored_prefix,
)
from pipespec.errors import run_user_code, user_stacklevel
from pipespec_kernels import dispatch, ops
from pipespec_kernels.noise import ALL_VALID, Noise
from pipespec_kernels.penalties import Penalties

if TYPE_CHECKING:
    from pipespec.engine.grammar import Grammar


_CPU = torch.device("cpu")


class SamplingKind(NamedTuple):
    """The part of the sampling parameters that decides which kernels run. Their numbers lie in memory and may change between launches.

    Attributes:
        sampled: False: greedy.
        top_k: Whether a top-k filter runs; likewise ``top_p`` and ``min_p``.
        penalties: Number of the :class:`pipespec.schedules.graphs.buffers.StaticPenalties` that apply; 0: none.
        record: Number of the record that is written; 0: none.
    """

    sampled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: int = 0
    record: int = 0


class Sampler:
    """Chooses the tokens of one stage, with numbers at fixed addresses. A call of a subclass applies what precedes the choice.

    Args:
        rows: Rows of the batch.
        device: Where the numbers lie: for a captured step the stage's device.
        is_target: Whether logits without a distribution are an error. A draft without one only drafts badly.

    Attributes:
        kind: The kind of sampling of the present call.
    """

    def __init__(self, rows: int, device: torch.device, is_target: bool) -> None:
        self.kind, self._is_target = SamplingKind(), is_target
        self._rows, self._device = rows, device
        self._record: Any = None  # with the method of ScoreRecord.write()
        self._workspaces: dict[int, Any] = {}  # by width, since graphs keep the addresses
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._inverse_temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self._min_p = torch.zeros(rows, dtype=torch.float64, device=device)
        # Per row the first position without a distribution, where the host reads it. Kernels write it over the bus, in this case only.
        invalid = torch.full((rows,), ALL_VALID, dtype=torch.int64, device="cpu")
        self._invalid_positions = invalid if device.type == "cpu" else invalid.pin_memory()

    def _set_numbers(self, sampling_params: SamplingParams) -> None:
        """Set the numbers of draws. Nothing is penalised or recorded."""
        self.kind, self._record = SamplingKind(), None
        if sampling_params.seeds is None:
            return
        top_k, top_p, min_p = sampling_params.top_k, sampling_params.top_p, sampling_params.min_p
        self.kind = SamplingKind(True, top_k > 0, top_p < 1.0, min_p > 0.0)
        self._seeds.copy_(torch.from_numpy(np.array(sampling_params.seeds, dtype=np.uint64).view(np.int64)))
        self._inverse_temperature.fill_(1 / sampling_params.temperature)
        self._top_k.fill_(top_k)
        self._top_p.fill_(top_p)
        self._min_p.fill_(min_p)
        self._invalid_positions.fill_(ALL_VALID)

    def check_distributions(self, first_row: int = 0) -> None:
        """Check the steps that have ended. Row 0 of the step is ``first_row`` of the batch.

        Raises:
            ValueError: A token was drawn from logits that are no distribution.
        """
        if self.kind.sampled and self._is_target:
            for row, position in enumerate(self._invalid_positions.tolist(), first_row):
                if position < ALL_VALID:
                    raise no_distribution_error(row, position)

    def _choose(self, raw: Tensor, processed: Tensor, step: Step, row: int | None = None) -> Tensor:
        """Choose the tokens of a step from its ``processed`` logits, and record them. ``row``: the only row of the batch that it has; None: all."""
        kind, rows = self.kind, slice(None) if row is None else slice(row, row + 1)
        noise = cutoff = inverse = None
        if kind.sampled:
            inverse = self._inverse_temperature[rows]
            if kind.top_k or kind.top_p or kind.min_p:
                # Which filters run is fixed in a graph, so a filter that is off is left out here.
                cutoff = ops.cutoff(
                    processed,
                    inv_temperature=inverse,
                    top_k=self._top_k[rows] if kind.top_k else 0,
                    top_p=self._top_p[rows] if kind.top_p else 1.0,
                    min_p=self._min_p[rows] if kind.min_p else 0.0,
                    query_lens=step.query_lens,
                    num_draft_tokens=step.num_draft_tokens,
                )
            # Column 0 chooses the token after the first one that is fed.
            noise = Noise(self._seeds[rows], step.kv, inverse, cutoff, offset=1)
        selected = self._verify(processed, step, noise)
        if self._record is not None:
            self._record.write(SamplerOutput(raw, processed, selected, step, inverse, cutoff), row or 0)
        return selected

    def _verify(self, logits: Tensor, step: Step, noise: Noise | None) -> Tensor:
        rows, width, _ = logits.shape
        if width not in self._workspaces:
            # The work space of verification on a GPU, which each launch leaves zero.
            kernels = dispatch.kernels(logits)
            self._workspaces[width] = None if kernels is None else kernels.Workspace(rows, width, logits.device)
        return ops.verify(
            logits,
            step.tokens,
            step.query_lens,
            step.num_draft_tokens,
            noise=noise,
            workspace=self._workspaces[width],
            invalid_positions=None if noise is None or not self._is_target else self._invalid_positions,
        )[0]


class HostSampler(Sampler):
    """Chooses the tokens of a stage whose steps the host plans.

    Args:
        sampling_params: Of the call.
        text: int32 ``[rows, positions]``, the tokens that the stage has fed or is about to feed. The stage keeps it up to date.
        record: What the caller asks for of the target's logits; None: nothing.
        vocabulary: Tokens of the target's vocabulary. Logits beyond it, of a draft's padding, are ignored.
        is_target: Whether unusable logits are an error. In a draft they only cost a draft token.
        acceptance: Of draft tokens by rejection sampling; None: coupled.
        grammar: What constrains the tokens of each row; None: nothing.
    """

    def __init__(
        self,
        sampling_params: SamplingParams,
        text: np.ndarray,
        record: ScoreRecord | None = None,
        vocabulary: int | None = None,
        is_target: bool = True,
        acceptance: RejectionAcceptance | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        rows = text.shape[0]
        super().__init__(rows, _CPU, is_target)
        self._set_numbers(sampling_params)
        self._record, self._vocabulary, self._grammar = record, vocabulary, grammar
        self._sampling_params, self._text = sampling_params, text
        self._warned = self.kind.sampled  # a draw without a distribution is an error
        self._acceptance = None if sampling_params.stepwise else acceptance
        self._fused = sampling_params.penalties
        self._numbers: Penalties | None = None
        self._ignored = [sampling_params.ignored_ids(row) for row in range(rows)]
        self._processors: list[list[LogitsProcess]] = []
        if sampling_params.stepwise:
            self._processors = [
                [_for_row(p, row, rows, sampling_params) for p in sampling_params.processors] for row in range(rows)
            ]
        self.is_argmax = not (self.kind.sampled or self._processors or self._fused or grammar)
        """Whether each choice is the largest logit: nothing is drawn, and nothing changes the logits."""

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Choose the tokens of one step.

        Args:
            logits: ``[rows, width, V]``, of the columns of the step, in the model's dtype.
            step: The tokens on the device of the logits, the rest on the CPU.

        Returns:
            int32 ``[rows, width]`` on the CPU: per row the accepted draft tokens and one more, then -1; see :func:`pipespec_kernels.ops.verify`.

        Raises:
            ValueError: The target's logits of a position are no distribution.
        """
        if self._vocabulary is not None and logits.shape[2] > self._vocabulary:
            logits = logits[:, :, : self._vocabulary]
        if self._is_target and not self._warned and bool(logits[0, 0, 0].isnan()) and bool(logits[0, 0].isnan().all()):
            self._warned = True
            warnings.warn(
                "all logits of the target are NaN, so its greedy text means nothing: a weight is NaN or damaged, or numbers overflow (float16?)",
                stacklevel=user_stacklevel(),
            )
        bitmask = None
        if self._grammar is not None:
            # A draft may have fewer tokens than the grammar, which is made for the target's.
            own = logits.shape[2]
            whole = self._grammar.bitmask(self._text, step, self._vocabulary or own, is_target=self._is_target)
            bitmask = whole[:, :, : -(-own // 32)].contiguous().to(logits.device)
        if self._processors:
            return self._by_position(logits, step, bitmask)
        processed = logits if self._fused is None and bitmask is None else self._penalised(logits, step, bitmask)
        return self._choose(logits, processed, step)

    def _choose(self, raw: Tensor, processed: Tensor, step: Step, row: int | None = None) -> Tensor:
        if self.kind.sampled and self._is_target:
            # A split model may have its head on any device.
            self._invalid_positions = torch.full(step.kv.shape, ALL_VALID, dtype=torch.int64, device=processed.device)
        selected = super()._choose(raw, processed, step, row)
        self.check_distributions(row or 0)
        return selected

    def _verify(self, logits: Tensor, step: Step, noise: Noise | None) -> Tensor:
        if noise is None or self._acceptance is None:
            return super()._verify(logits, step, noise)
        noise = replace(noise, positions=step.kv.numpy().astype(np.int64) + 1, offset=0)
        if self._is_target:
            return self._acceptance.accept(logits, step, noise, self._invalid_positions)
        return self._acceptance.draw(logits, step, noise)

    def _penalised(self, logits: Tensor, step: Step, bitmask: Tensor | None) -> Tensor:
        """A float32 copy with fused penalties and biases, each column with its own prefix, and with the bitmask."""
        rows, width, _ = logits.shape
        lengths, tokens = np.zeros(rows, dtype=np.int32), np.full((rows, width), -1, dtype=np.int32)
        seen: list[np.ndarray] = [tokens[row, :0] for row in range(rows)]
        if self._fused is not None:
            for row, (kv, fed) in enumerate(zip(step.kv.tolist(), step.query_lens.tolist(), strict=True)):
                prefix = self._prefix(row, kv + fed)[self._ignored[row] :] if fed else seen[row]
                # Columns before the first one that matters may lie in a part of the text that processors do not see.
                lengths[row] = before = max(0, len(prefix) - fed)
                tokens[row, fed - (len(prefix) - before) : fed] = prefix[before:]
                seen[row] = prefix[:before]
            self._numbers = self._numbers or self._fused.tensors(self._ignored, logits.device)
        history = np.zeros((rows, max(map(len, seen)) + width), dtype=np.int32)
        for row, ids in enumerate(seen):
            history[row, : len(ids)] = ids
        out = float32_copy(logits)
        fed_tokens, seen_tokens, counts = (torch.from_numpy(x).to(out.device) for x in (tokens, history, lengths))
        ops.penalize(
            out,
            fed_tokens,
            seen_tokens,
            counts,
            self._numbers,
            query_lens=step.query_lens,
            num_draft_tokens=step.num_draft_tokens,
            bitmask=bitmask,
        )
        return out

    def _prefix(self, row: int, end: int) -> np.ndarray:
        """int32 ids that processors see before position ``end`` of a row."""
        if not self._sampling_params.prompts:
            return self._text[row, :end]
        prompt = self._sampling_params.prompts[row]
        return np.concatenate([prompt.ids, self._text[row, prompt.length : end]])

    def _by_position(self, logits: Tensor, step: Step, bitmask: Tensor | None) -> Tensor:
        """Choose one position after the other, each with its exact prefix: for processors that need it."""
        selected = torch.full(step.tokens.shape, -1, dtype=torch.int32, device="cpu")
        one, none = torch.ones(1, dtype=torch.int32, device="cpu"), torch.zeros(1, dtype=torch.int32, device="cpu")
        for row in np.flatnonzero(step.query_lens).tolist():
            draft_tokens = int(step.num_draft_tokens[row])
            first = int(step.query_lens[row]) - 1 - draft_tokens
            for j in range(draft_tokens + 1):
                at = slice(first + j, first + j + 1)
                alone = Step(step.tokens[row : row + 1, at], step.kv[row : row + 1] + at.start, one, none)
                raw = logits[row : row + 1, at]
                # Some processors enable gradients, which inference tensors do not allow.
                with torch.inference_mode(False), torch.no_grad(), run_user_code():
                    ids = torch.from_numpy(self._prefix(row, int(alone.kv) + 1).astype(np.int64))[None]
                    copied = float32_copy(raw[0][None])[0]
                    scores = run_processors(
                        self._processors[row],
                        ids.to(logits.device),
                        copied,
                        is_sampled=self.kind.sampled,
                        has_ends=bool(self._sampling_params.ends),
                    )[None]
                if bitmask is not None:
                    scores = self._penalised(scores, alone, bitmask[row : row + 1, at])
                token = int(self._choose(raw, scores, alone, row)[0, 0])
                selected[row, j] = token
                if j == draft_tokens or token != int(step.tokens[row, at.stop]) or token in self._sampling_params.ends:
                    break
        return selected


def no_distribution_error(row: int, position: int) -> ValueError:
    """The error for a position of a row whose scores are no distribution."""
    return ValueError(
        f"no token can be drawn at position {position} of row {row}: its scores are NaN, infinite, or all -inf. Does a logits processor "
        "forbid every token there, is the temperature too small, is a penalty or bias too large, or has the model overflowed?"
    )


def _for_row(processor: Any, row: int, rows: int, sampling_params: SamplingParams) -> LogitsProcess:
    """The processor for one row of the batch. Those that keep something per row are cut to it."""
    kind = type(processor)
    if kind is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    if kind is hf.RepetitionPenaltyLogitsProcessor and not isinstance(ignored_prefix(processor), int):
        alone = hf.RepetitionPenaltyLogitsProcessor(processor.penalty)
        ignored = sampling_params.ignored_ids(row)
        return lambda ids, scores: alone(ids[:, ignored:], scores)
    if kind is hf.EncoderRepetitionPenaltyLogitsProcessor:
        prompts = processor.encoder_input_ids
        processor = copy.copy(processor)
        # num_return_sequences repeats each prompt.
        processor.encoder_input_ids = prompts[row * len(prompts) // rows][None]
    elif kind is hf.EncoderNoRepeatNGramLogitsProcessor:
        ngrams = processor.generated_ngrams
        processor = copy.copy(processor)
        processor.generated_ngrams, processor.batch_size = [ngrams[row * len(ngrams) // rows]], 1
    elif kind is hf.SynthIDTextWatermarkLogitsProcessor and rows > 1:
        # Such a processor keeps a state per text.
        processor = copy.deepcopy(processor)
    elif kind.__module__ == "xgrammar.contrib.hf":
        # It makes one matcher for each row of the first call.
        grammars = processor.compiled_grammars
        if len(grammars) not in (1, rows):
            raise ValueError(f"xgrammar's LogitsProcessor has {len(grammars)} grammars for {rows} rows")
        processor = kind(grammars[row % len(grammars)])
    return processor
