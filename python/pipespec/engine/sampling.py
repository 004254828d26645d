"""How the stages of a call choose tokens: SamplingParams from GenerationConfig and processors, and the Sampler that applies them.

Sampling is coupled (Daliri, Musco, Suresh 2024): a token is the argmax of the processed logits plus Gumbel noise keyed by (seed, position,
token id), the same noise in every stage. So the text of a row is a function of the target, the prompt and the seed; drafts do not change it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.generation import logits_process as hf

from pipespec_kernels import ops
from pipespec_kernels.noise import ALL_DRAWN, Noise

_Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Processors without a state, which drafts run, too. All others run in the target only, where each sees every token once and in order.
_STATELESS = {
    hf.EncoderNoRepeatNGramLogitsProcessor, hf.EncoderRepetitionPenaltyLogitsProcessor, hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper, hf.ExponentialDecayLengthPenalty, hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization, hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor, hf.MinPLogitsWarper, hf.NoBadWordsLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor, hf.SuppressTokensLogitsProcessor, hf.TemperatureLogitsWarper,
    hf.TopHLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.TypicalLogitsWarper,
}  # fmt: skip

_LEAST = 1e-37
"""Below this a temperature's inverse is near the end of float32; above 1 / this, too."""

_FUSED_ORDER = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)


class Prompt(NamedTuple):
    """A row's prompt as logits processors see it.

    Attributes:
        ids: int32 ids, padding included.
        length: tokens of the row's text that they stand for. The text may have more of them, in a cache, or fewer, without padding.
        ignored: how many ids at the beginning are padding, which a repetition penalty leaves out.
    """

    ids: np.ndarray
    length: int
    ignored: int = 0


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a call are chosen, in all stages.

    ``temperature``, ``top_k``, ``top_p`` and ``min_p`` do what transformers' warpers of these names do, in this order and after all
    processors, fused into one threshold and one factor.

    Attributes:
        seeds: per row, the 64-bit key of its noise; None: greedy.
        temperature: divides the logits.
        top_k: keep the k largest logits; 0: all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0: all.
        min_p: drop tokens below this fraction of the largest probability; 0.0: none.
        processors: transformers' and the user's, run position by position before the warpers. A repetition penalty alone is fused, too.
        warpers: transformers' objects for the fused part; only ``output_scores`` needs them.
        prompts: per row, what processors see of its prompt; empty: the text as it is.
        ends: ids that end a row. Positions after one are not sampled.
    """

    seeds: tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: tuple[_Processor, ...] = ()
    warpers: tuple[_Processor, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    ends: frozenset[int] = frozenset()

    @property
    def cuts(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalty(self) -> float:
        """The repetition penalty if it is the only processor, so that it is fused; else 1.0."""
        only: Any = self.processors[0] if len(self.processors) == 1 else None
        # An int is the user's own number of ignored tokens. transformers sets a tensor to leave out the padding.
        if type(only) is hf.RepetitionPenaltyLogitsProcessor and not isinstance(_ignored(only), int):
            return float(only.penalty)
        return 1.0

    @property
    def stepwise(self) -> bool:
        """Whether processors must run position by position."""
        return bool(self.processors) and self.penalty == 1.0

    def for_drafts(self) -> bytes:
        """Pickled parameters for the drafts: without what only the target may run.

        Bytes, because torch would send the tensors inside through files of its own.
        """
        kept = tuple(p for p in self.processors if type(p) in _STATELESS)
        return pickle.dumps(replace(self, processors=kept, warpers=()))

    @classmethod
    def of(
        cls,
        processors: Sequence[_Processor],
        *,
        seeds: Sequence[int] | None,
        prompts: Sequence[Prompt] = (),
        ends: Iterable[int] = (),
    ) -> SamplingParams:
        """From the processors that transformers has prepared, in its order.

        Args:
            processors: processors, then warpers.
            seeds: per row, the key of its noise; None: greedy.
            prompts: per row, what processors see of its prompt; empty: the text as it is.
            ends: ids that end a row.
        """
        rest = list(processors)
        warpers: list[_Processor] = []
        if rest and type(rest[-1]) is hf.LogitNormalization:
            # It shifts all scores of a position alike, so no choice depends on it.
            warpers.insert(0, rest.pop())
        fused: dict[str, Any] = {}
        place = len(_FUSED_ORDER)
        while rest and type(rest[-1]) in _FUSED_ORDER[:place] and _is_fusable(rest[-1]):
            place = _FUSED_ORDER.index(type(rest[-1]))
            fused |= _parameters(rest[-1])
            warpers.insert(0, rest.pop())
        return cls(
            seeds=None if seeds is None else tuple(seeds),
            processors=tuple(rest),
            warpers=tuple(warpers),
            prompts=tuple(prompts),
            ends=frozenset(ends),
            **fused,
        )


def _is_fusable(warper: Any) -> bool:
    """Whether the fused form does what this instance does."""
    # If the inverse exceeds float32, transformers' warper runs: all tokens become equally likely, or the scores overflow.
    if type(warper) is hf.TemperatureLogitsWarper and not _LEAST < warper.temperature < 1 / _LEAST:
        return False
    return getattr(warper, "filter_value", -np.inf) == -np.inf and getattr(warper, "min_tokens_to_keep", 1) == 1


def _parameters(warper: Any) -> dict[str, Any]:
    kind = type(warper)
    if kind is hf.TemperatureLogitsWarper:
        return {"temperature": float(warper.temperature)}
    if kind is hf.TopKLogitsWarper:
        return {"top_k": min(int(warper.top_k), 2**31 - 1)}
    if kind is hf.TopPLogitsWarper:
        return {"top_p": float(warper.top_p)}
    return {"min_p": float(warper.min_p)}


def row_seeds(seed: Any, rows: int) -> list[int]:
    """The key of each row's noise.

    A row generates the same text with the same key, alone and in any batch.

    Args:
        seed: None draws one from torch's generator, so ``torch.manual_seed`` governs it. An integer is the key of row 0, from which the
            other keys are derived. A sequence or tensor holds the keys themselves.
        rows: texts in the batch, ``num_return_sequences`` included.

    Returns:
        Per row, an integer of 64 bits.

    Raises:
        TypeError: a value is not an integer.
        ValueError: another number of keys than rows, or a key of more than 64 bits.
    """
    if seed is None:
        seed = int(torch.randint(0, 2**63 - 1, (), device="cpu"))
    if isinstance(seed, torch.Tensor):
        seed = seed.flatten().tolist() if seed.ndim else seed.item()
    one = isinstance(seed, (int, np.integer))
    if not one and (not isinstance(seed, Sequence) or isinstance(seed, (str, bytes))):
        raise TypeError(f"seed must be an integer, or one integer per row, not {seed!r}")
    keys = [seed] if one else list(seed)
    if not all(isinstance(s, (int, np.integer)) and not isinstance(s, bool) for s in keys):
        raise TypeError(f"seed must be an integer, or one integer per row, not {seed!r}")
    if not one and len(keys) != rows:
        raise ValueError(f"seed: {len(keys)} seeds for {rows} rows (num_return_sequences counts)")
    for key in keys:
        if not -(2**63) <= key < 2**64:
            raise ValueError(f"seed must have at most 64 bits, not {key}")
    return [_derived(int(seed), row) for row in range(rows)] if one else [int(key) % 2**64 for key in keys]


def _derived(seed: int, row: int) -> int:
    """Key of ``row``; row 0 has the seed itself. SplitMix64's finaliser (Steele, Lea, Flood 2014) spreads the others."""
    z = seed % 2**64
    if row == 0:
        return z
    z = (z + row * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@dataclass
class ScoreRecord:
    """Scores and logits for ``output_scores`` and ``output_logits``: per row and generated token, float32 ``[V]``; None: not requested."""

    scores: list[list[torch.Tensor]] | None
    logits: list[list[torch.Tensor]] | None


class Sampler:
    """Chooses the tokens of one stage in one call.

    Args:
        sampling_params: of the call.
        text: int32 ``[rows, positions]``, the tokens that the stage has fed or is about to feed. The stage keeps it up to date.
        record: where the target's scores and logits are stored; None: nowhere.
        vocabulary: tokens of the target's vocabulary. Logits beyond it, of a draft's padding, are ignored.
        is_target: whether unusable logits are an error. In a draft they only cost a draft token.
    """

    def __init__(
        self,
        sampling_params: SamplingParams,
        text: np.ndarray,
        record: ScoreRecord | None = None,
        vocabulary: int | None = None,
        is_target: bool = True,
    ) -> None:
        self._sampling_params = sampling_params
        self._text = text
        self._record = record
        self._vocabulary = vocabulary
        self._is_target = is_target
        rows = text.shape[0]
        self._processors = [
            [_for_row(p, row, rows, sampling_params) for p in sampling_params.processors] for row in range(rows)
        ]
        self._stepwise = sampling_params.stepwise or (record is not None and record.scores is not None)
        self._penalty = sampling_params.penalty
        if sampling_params.seeds is not None:
            self._keys = torch.from_numpy(np.array(sampling_params.seeds, dtype=np.uint64).view(np.int64))
            inverse = torch.full((rows,), 1 / sampling_params.temperature, dtype=torch.float32, device="cpu")
            self._inverse_temperature = inverse

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
        if self._stepwise:
            return self._by_position(logits, fed, query_lens, num_draft_tokens, positions)
        raw, sampling_params = logits, self._sampling_params
        if self._penalty != 1.0:
            logits = self._penalised(logits, query_lens, num_draft_tokens, positions)
        noise = undrawn = None
        if sampling_params.seeds is not None:
            cutoff = None
            if sampling_params.cuts:
                cutoff = self._cutoff(
                    logits, self._inverse_temperature, query_lens=query_lens, num_draft_tokens=num_draft_tokens
                )
            noise = Noise(self._keys, positions, self._inverse_temperature, cutoff)
            if self._is_target:
                undrawn = torch.full(query_lens.shape, ALL_DRAWN, dtype=torch.int64, device=logits.device)
        selected, accepted = ops.verify(logits, fed, query_lens, num_draft_tokens, noise=noise, undrawn=undrawn)
        if undrawn is not None:
            check_drawn(undrawn)
        if self._record is not None and self._record.logits is not None:
            for row, kept in enumerate(accepted.tolist()):
                if query_lens[row] > 0:
                    first = int(query_lens[row]) - 1 - int(num_draft_tokens[row])
                    self._record.logits[row].extend(raw[row, first : first + kept + 1].float().clone().unbind(0))
        return selected

    def _cutoff(self, logits: torch.Tensor, inverse_temperature: torch.Tensor, **counts: Any) -> torch.Tensor:
        s = self._sampling_params
        return ops.cutoff(
            logits, inv_temperature=inverse_temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, **counts
        )

    def _penalised(
        self, logits: torch.Tensor, query_lens: np.ndarray, num_draft_tokens: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """A float32 copy in which tokens that a position's prefix holds are penalised (CTRL, Keskar et al. 2019, section 4.1)."""
        penalty, vocabulary = self._penalty, logits.shape[2]
        out = logits.to(torch.float32, copy=True)
        for row in range(logits.shape[0]):
            if query_lens[row] == 0:
                continue
            draft_tokens = int(num_draft_tokens[row])
            first = int(query_lens[row]) - 1 - draft_tokens
            prefix = self._prefix(row, int(positions[row]) + first + draft_tokens)
            prefix = prefix[_ignored_ids(self._sampling_params, self._sampling_params.processors[0], row) :]
            known = len(prefix) - draft_tokens  # length of the first needed column's prefix
            block = out[row, first : first + draft_tokens + 1]
            # Per token, the first column whose prefix holds it: 0, or the column after the draft token.
            said, where = np.unique(prefix, return_index=True)
            inside = said < vocabulary
            said, since = said[inside].astype(np.int64), np.maximum(where[inside] - known + 1, 0)
            ids = torch.from_numpy(said).to(out.device)
            applies = torch.from_numpy(since[None] <= np.arange(draft_tokens + 1)[:, None]).to(out.device)
            scores = block[:, ids]
            changed = torch.where(scores < 0, scores * penalty, scores / penalty)
            block[:, ids] = torch.where(applies, changed, scores)
        return out

    def _prefix(self, row: int, end: int) -> np.ndarray:
        """int32 ids that processors see before position ``end`` of a row."""
        if not self._sampling_params.prompts:
            return self._text[row, :end]
        prompt = self._sampling_params.prompts[row]
        return np.concatenate([prompt.ids, self._text[row, prompt.length : end]])

    def _by_position(
        self,
        logits: torch.Tensor,
        fed: torch.Tensor,
        query_lens: np.ndarray,
        num_draft_tokens: np.ndarray,
        positions: np.ndarray,
    ) -> torch.Tensor:
        """Choose one position after the other, each with its exact prefix: for processors that need it."""
        selected = torch.full(fed.shape, -1, dtype=torch.int32, device="cpu")
        for row in range(logits.shape[0]):
            if query_lens[row] == 0:
                continue
            draft_tokens = int(num_draft_tokens[row])
            first = int(query_lens[row]) - 1 - draft_tokens
            for j in range(draft_tokens + 1):
                token = self._step(row, int(positions[row]) + first + j, logits[row : row + 1, first + j])
                selected[row, j] = token
                if j == draft_tokens or token != int(fed[row, first + 1 + j]) or token in self._sampling_params.ends:
                    break
        return selected

    def _step(self, row: int, position: int, logits: torch.Tensor) -> int:
        """The token at ``position`` of ``row``, from its raw ``logits [1, V]``."""
        record, sampling_params = self._record, self._sampling_params
        ids = torch.from_numpy(self._prefix(row, position).astype(np.int64))[None].to(logits.device)
        # Some processors enable gradients, which inference tensors do not allow.
        with torch.inference_mode(False), torch.no_grad():
            scores = logits.to(torch.float32, copy=True)
            if record is not None and record.logits is not None:
                record.logits[row].append(scores[0].clone())
            for process in self._processors[row]:
                scores = process(ids, scores)
            scores = scores.detach()
        if sampling_params.seeds is None:
            token = int(ops.argmax(scores[None])[0, 0])
        else:
            if self._is_target and not bool(torch.isfinite(scores.max())):
                raise nothing_to_draw(row, position)
            inverse = self._inverse_temperature[row : row + 1]
            cutoff = self._cutoff(scores[None], inverse) if sampling_params.cuts else None
            noise = Noise(self._keys[row : row + 1], np.array([position]), inverse, cutoff)
            token = int(ops.sample(scores[None], noise)[0, 0])
        if record is not None and record.scores is not None:
            with torch.inference_mode(False), torch.no_grad():
                for warp in sampling_params.warpers:
                    scores = warp(ids, scores)
            record.scores[row].append(scores[0])
        return token


def check_drawn(undrawn: torch.Tensor) -> None:
    """Raise ``ValueError`` for the first row with an entry in ``undrawn`` of :func:`pipespec_kernels.ops.verify`."""
    for row, position in enumerate(undrawn.tolist()):
        if position < ALL_DRAWN:
            raise nothing_to_draw(row, position)


def nothing_to_draw(row: int, position: int) -> ValueError:
    """The error for a position of a row whose scores are no distribution."""
    return ValueError(
        f"no token can be drawn at position {position} of row {row}: its scores are NaN, infinite, or all -inf. Does a logits processor "
        "forbid every token there, is the temperature too small, or has the model overflown?"
    )


def _ignored(penalty: Any) -> Any:
    # transformers 5.0 does not have it.
    return getattr(penalty, "prompt_ignore_length", None)


def _ignored_ids(sampling_params: SamplingParams, penalty: Any, row: int) -> int:
    """Ids at the beginning of a row that a repetition penalty leaves out: those that transformers' does, else the padding."""
    ignored = _ignored(penalty)
    if isinstance(ignored, torch.Tensor):
        return int(ignored[row])
    return sampling_params.prompts[row].ignored if sampling_params.prompts else 0


def _for_row(processor: Any, row: int, rows: int, sampling_params: SamplingParams) -> _Processor:
    """The processor for one row of the batch. Those that keep something per row are cut to it."""
    kind = type(processor)
    if kind is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    if kind is hf.RepetitionPenaltyLogitsProcessor and not isinstance(_ignored(processor), int):
        alone = hf.RepetitionPenaltyLogitsProcessor(processor.penalty)
        ignored = _ignored_ids(sampling_params, processor, row)
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
    return processor
