"""The choice of tokens in a step: what a row's sampling parameters make of the logits, and what is recorded of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers.generation import logits_process as hf

from pipespec.engine.acceptance import RejectionAcceptance
from pipespec.engine.callers import run_processors
from pipespec.engine.sampling import FusedPenalties, LogitsProcess, SamplingParams, ignored_prefix
from pipespec.errors import run_user_code
from pipespec_kernels import ops
from pipespec_kernels.noise import ALL_DRAWN, Noise

if TYPE_CHECKING:
    from pipespec.engine.grammar import Grammar

_SERIAL = 32_767
"""Elements that an operation of torch works on in the caller's thread alone."""


def float32_copy(logits: torch.Tensor) -> torch.Tensor:
    """A copy of ``[B, Q, V]`` in float32.

    On a CPU the caller makes it alone: libgomp's threads poll for some 20 ms after their work, on cores that the next forward needs.
    """
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if not out.is_cpu:
        return out.copy_(logits)
    for to, row in zip(out.flatten(0, 1), logits.flatten(0, 1), strict=True):
        for part, source in zip(to.split(_SERIAL), row.split(_SERIAL), strict=True):
            part.copy_(source)
    return out


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
        def lists(wanted: bool) -> list[list[torch.Tensor]] | None:
            return [[] for _ in range(rows)] if wanted else None

        self.counts = [0] * rows
        self.scores, self.logits, self.top_logprobs = lists(scores), lists(logits), top_logprobs
        self.logprobs, self.top_ids = lists(top_logprobs is not None), lists(top_logprobs is not None)
        self._warpers = tuple(warpers)

    def add(
        self,
        row: int,
        count: int,
        logits: torch.Tensor | None,
        processed: torch.Tensor | None,
        logprobs: torch.Tensor | None,
        top_ids: torch.Tensor | None,
    ) -> None:
        """Append copies for ``count`` tokens of a row. What is not requested may be None.

        ``logits`` and ``processed``, behind all processors, are ``[count, V]``, ``logprobs`` and ``top_ids`` as in the attributes.
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


class _Step(NamedTuple):
    """The columns of a step, see :meth:`Sampler.__call__`."""

    fed: torch.Tensor
    query_lens: np.ndarray
    num_draft_tokens: np.ndarray
    positions: np.ndarray


class Sampler:
    """Chooses the tokens of one stage in one call.

    Args:
        sampling_params: of the call.
        text: int32 ``[rows, positions]``, the tokens that the stage has fed or is about to feed. The stage keeps it up to date.
        record: what the caller asks for of the target's logits; None: nothing.
        vocabulary: tokens of the target's vocabulary. Logits beyond it, of a draft's padding, are ignored.
        is_target: whether unusable logits are an error. In a draft they only cost a draft token.
        acceptance: of draft tokens by rejection sampling; None: coupled.
        grammar: what constrains the tokens of each row; None: nothing.
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
        self._grammar = grammar
        self._sampling_params = sampling_params
        self._text = text
        self._record = record
        self._vocabulary = vocabulary
        self._is_target = is_target
        self._acceptance = acceptance
        rows = text.shape[0]
        self._processors = [
            [_for_row(p, row, rows, sampling_params) for p in sampling_params.processors] for row in range(rows)
        ]
        self._stepwise = sampling_params.stepwise
        self._penalties = sampling_params.penalties
        self._ignored = [sampling_params.ignored_ids(row) for row in range(rows)]
        self._is_argmax = (
            sampling_params.seeds is None and not sampling_params.processors and record is None and grammar is None
        )
        if sampling_params.seeds is not None:
            self._keys = torch.from_numpy(np.array(sampling_params.seeds, dtype=np.uint64).view(np.int64))
            inverse = torch.full((rows,), 1 / sampling_params.temperature, dtype=torch.float32, device="cpu")
            self._inverse_temperature = inverse

    def argmax(self, logits: torch.Tensor) -> torch.Tensor | None:
        """What a call without draft tokens chooses in each column: int32 ``[B, Q]``. None if more than the argmax is to be done."""
        if not self._is_argmax:
            return None
        if self._vocabulary is not None and logits.shape[2] > self._vocabulary:
            logits = logits[:, :, : self._vocabulary]
        return ops.argmax(logits)

    def __call__(
        self,
        logits: torch.Tensor,
        fed: torch.Tensor,
        query_lens: np.ndarray,
        num_draft_tokens: np.ndarray,
        positions: np.ndarray,
    ) -> torch.Tensor:
        """Choose the tokens of one step.

        Args:
            logits: ``[B, Q, V]``, of the columns of the step, in the model's dtype.
            fed: int ``[B, Q]``, the tokens of these columns.
            query_lens: ``[B]``, columns of each row; 0: the row selects nothing.
            num_draft_tokens: ``[B]``, how many of them, at the end, are draft tokens.
            positions: int64 ``[B]``, absolute position of the token that column 0 chooses.

        Returns:
            int32 ``[B, Q]`` on the CPU: per row the accepted draft tokens and one more, then -1; see :func:`pipespec_kernels.ops.verify`.

        Raises:
            ValueError: the target's logits of a position are no distribution.
        """
        if self._vocabulary is not None and logits.shape[2] > self._vocabulary:
            logits = logits[:, :, : self._vocabulary]
        step = _Step(fed, query_lens, num_draft_tokens, positions)
        bitmask = self._bitmask(logits, step)
        if self._stepwise:
            return self._by_position(logits, step, bitmask)
        processed = logits
        if self._penalties is not None:
            processed = self._penalised(self._penalties, logits, step, bitmask)
        elif bitmask is not None:
            processed = float32_copy(logits)
            apply_bitmask(processed, bitmask, query_lens=query_lens, num_draft_tokens=num_draft_tokens)
        return self._choose(logits, processed, step, acceptance=self._acceptance)

    def _choose(
        self,
        raw: torch.Tensor,
        processed: torch.Tensor,
        step: _Step,
        *,
        row: int | None = None,
        acceptance: RejectionAcceptance | None = None,
    ) -> torch.Tensor:
        """Choose the tokens of a step from its ``processed`` logits, and record them. ``row``: the only row of the batch that it has; None: all."""
        params, counts = self._sampling_params, (step.query_lens, step.num_draft_tokens)
        noise = cutoff = inverse = undrawn = None
        if params.seeds is not None:
            rows = slice(None) if row is None else slice(row, row + 1)
            inverse = self._inverse_temperature[rows]
            if params.cuts:
                cutoff = ops.cutoff(
                    processed,
                    inv_temperature=inverse,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    query_lens=step.query_lens,
                    num_draft_tokens=step.num_draft_tokens,
                )
            noise = Noise(self._keys[rows], step.positions, inverse, cutoff)
            if self._is_target:
                undrawn = torch.full(step.query_lens.shape, ALL_DRAWN, dtype=torch.int64, device=processed.device)
        if acceptance is None or noise is None:
            selected, _ = ops.verify(processed, step.fed, *counts, noise=noise, undrawn=undrawn)
        elif self._is_target:
            selected, _ = acceptance.accept(processed, step.fed, *counts, noise, undrawn)
        else:
            selected, _ = acceptance.draw(processed, step.fed, *counts, noise)
        if undrawn is not None:
            check_drawn(undrawn, row or 0)
        record = self._record
        if record is None:
            return selected
        logprobs = top_ids = None
        if record.top_logprobs is not None:
            logprobs, top_ids = logprobs_of(processed, selected, *counts, inverse, cutoff, record.top_logprobs)
        for at in np.flatnonzero(step.query_lens).tolist():
            first, count = int(step.query_lens[at] - 1 - step.num_draft_tokens[at]), int((selected[at] >= 0).sum())
            record.add(
                at + (row or 0),
                count,
                raw[at, first : first + count],
                processed[at, first : first + count],
                None if logprobs is None else logprobs[at, :count],
                None if top_ids is None else top_ids[at, :count],
            )
        return selected

    def _bitmask(self, logits: torch.Tensor, step: _Step) -> torch.Tensor | None:
        """The grammar's bitmask of each column; None without a grammar."""
        if self._grammar is None:
            return None
        # A draft may have fewer tokens than the grammar, which is made for the target's.
        mine = logits.shape[2]
        whole = self._grammar.bitmask(self._text, *step, self._vocabulary or mine, is_target=self._is_target)
        return whole[:, :, : -(-mine // 32)].contiguous()

    def _penalised(
        self, penalties: FusedPenalties, logits: torch.Tensor, step: _Step, bitmask: torch.Tensor | None
    ) -> torch.Tensor:
        """A float32 copy with penalties and biases, each column with its own prefix, see :func:`pipespec_kernels.ops.penalize`."""
        out = float32_copy(logits)
        rows, width, _ = out.shape
        lengths, tokens = np.zeros(rows, dtype=np.int32), np.full((rows, width), -1, dtype=np.int32)
        seen = [np.zeros(0, dtype=np.int32)] * rows
        for row in np.flatnonzero(step.query_lens).tolist():
            fed = int(step.query_lens[row])
            prefix = self._prefix(row, int(step.positions[row]) + fed - 1)[self._ignored[row] :]
            # Columns before the first one that matters may lie in a part of the text that processors do not see.
            known = max(0, len(prefix) - fed)
            tokens[row, fed - (len(prefix) - known) : fed] = prefix[known:]
            seen[row], lengths[row] = prefix[:known], known
        history = np.zeros((rows, int(lengths.max()) + width), dtype=np.int32)
        for row, ids in enumerate(seen):
            history[row, : len(ids)] = ids
        ops.penalize(
            out,
            torch.from_numpy(tokens).to(out.device),
            torch.from_numpy(history).to(out.device),
            torch.from_numpy(lengths).to(out.device),
            penalties.tensors(self._ignored, out.device),
            query_lens=step.query_lens,
            num_draft_tokens=step.num_draft_tokens,
            bitmask=None if bitmask is None else bitmask.to(out.device),
        )
        return out

    def _prefix(self, row: int, end: int) -> np.ndarray:
        """int32 ids that processors see before position ``end`` of a row."""
        if not self._sampling_params.prompts:
            return self._text[row, :end]
        prompt = self._sampling_params.prompts[row]
        return np.concatenate([prompt.ids, self._text[row, prompt.length : end]])

    def _by_position(self, logits: torch.Tensor, step: _Step, bitmask: torch.Tensor | None) -> torch.Tensor:
        """Choose one position after the other, each with its exact prefix: for processors that need it."""
        selected = torch.full(step.fed.shape, -1, dtype=torch.int32, device="cpu")
        one, none = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
        for row in np.flatnonzero(step.query_lens).tolist():
            draft_tokens = int(step.num_draft_tokens[row])
            first = int(step.query_lens[row]) - 1 - draft_tokens
            for j in range(draft_tokens + 1):
                at, position = first + j, int(step.positions[row]) + first + j
                raw = logits[row : row + 1, at : at + 1]
                scores = self._processed(row, position, raw[0])[None]
                if bitmask is not None:
                    apply_bitmask(scores, bitmask[row : row + 1, at : at + 1])
                alone = _Step(step.fed[row : row + 1, at : at + 1], one, none, np.array([position]))
                token = int(self._choose(raw, scores, alone, row=row)[0, 0])
                selected[row, j] = token
                if j == draft_tokens or token != int(step.fed[row, at + 1]) or token in self._sampling_params.ends:
                    break
        return selected

    def _processed(self, row: int, position: int, logits: torch.Tensor) -> torch.Tensor:
        """What the processors make of the ``logits [1, V]`` of a position."""
        # Some processors enable gradients, which inference tensors do not allow.
        with torch.inference_mode(False), torch.no_grad():
            ids = torch.from_numpy(self._prefix(row, position).astype(np.int64))[None].to(logits.device)
            with run_user_code():
                scores = run_processors(self._processors[row], ids, float32_copy(logits[None])[0])
            return scores if self._grammar is None else scores.clone()


def logprobs_of(
    logits: torch.Tensor,
    selected: torch.Tensor,
    query_lens: Any,
    num_draft_tokens: Any,
    inverse_temperature: torch.Tensor | None,
    cutoff: torch.Tensor | None,
    top_n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`pipespec_kernels.ops.logprobs`, with the selected token's before those of the likeliest: float32 ``[B, Q, 1 + n]``, int32 ``[B, Q, n]``."""
    chosen, top_ids, top = ops.logprobs(
        logits,
        selected,
        query_lens,
        num_draft_tokens,
        inv_temperature=inverse_temperature,
        cutoff=cutoff,
        top_n=top_n,
    )
    return torch.cat([chosen[:, :, None], top], -1), top_ids


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, **counts: Any) -> None:
    """Forbid tokens in float32 logits ``[B, Q, V]``, in place; see :func:`pipespec_kernels.ops.penalize`."""
    rows, width, _ = logits.shape
    nothing = torch.full((rows, width), -1, dtype=torch.int32, device=logits.device)
    none = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    ops.penalize(logits, nothing, nothing.clone(), none, bitmask=bitmask.to(logits.device), **counts)


def check_drawn(undrawn: torch.Tensor, first: int = 0) -> None:
    """Raise ``ValueError`` for the first row, counted from ``first``, with an entry in ``undrawn`` of :func:`pipespec_kernels.ops.verify`."""
    for row, position in enumerate(undrawn.tolist(), first):
        if position < ALL_DRAWN:
            raise nothing_to_draw(row, position)


def nothing_to_draw(row: int, position: int) -> ValueError:
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
