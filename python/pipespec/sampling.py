"""Selection: how every stage of one call chooses its tokens. GenerationConfig and processors in, token ids out.

Sampling is coupled: a token is the argmax of the processed logits plus Gumbel noise keyed by (seed, position, token id), the
same in every stage. Whatever the drafts did, a row's text is the one that its seed gives with the target alone.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as hf

from pipespec_kernels import ops
from pipespec_kernels.noise import Noise

_Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# What a draft may run, too: processors without a memory of their own. All others see each token of the target's once,
# in order, which is what their authors expect.
_STATELESS = {
    hf.EncoderNoRepeatNGramLogitsProcessor, hf.EncoderRepetitionPenaltyLogitsProcessor, hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper, hf.ExponentialDecayLengthPenalty, hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization, hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor, hf.MinPLogitsWarper, hf.NoBadWordsLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor, hf.SuppressTokensLogitsProcessor, hf.TemperatureLogitsWarper,
    hf.TopHLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.TypicalLogitsWarper,
}  # fmt: skip

_FUSED_ORDER = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)


@dataclass(frozen=True)
class Selection:
    """How the tokens of a call are chosen; the same in all stages.

    ``seeds``: per row the 64-bit key of its noise; None: greedy. ``temperature`` to ``min_p``: what transformers' warpers of these names
    do, in this order, after everything else, fused into one threshold and one factor. ``processors``: transformers' and the user's, run before
    them, position by position (a repetition penalty alone is fused, too). ``warpers``: transformers' objects for what is fused at the end,
    needed for ``scores`` only. ``padding``: per row what stands before its text in the ids that processors see, int64. ``ends``: ids
    that end a row: nobody is asked what follows them.
    """

    seeds: tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: tuple[_Processor, ...] = ()
    warpers: tuple[_Processor, ...] = ()
    padding: tuple[np.ndarray, ...] = field(default_factory=tuple)
    ends: frozenset[int] = frozenset()

    @property
    def cuts(self) -> bool:
        """Whether some tokens are excluded by their logits."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalty(self) -> float:
        """The repetition penalty, where nothing else stands beside it; 1.0: none."""
        only: Any = self.processors[0] if len(self.processors) == 1 else None
        # A number of ignored tokens is a user's own; a tensor is transformers' way to leave out the padding.
        if type(only) is hf.RepetitionPenaltyLogitsProcessor and not isinstance(_ignored(only), int):
            return float(only.penalty)
        return 1.0

    @property
    def stepwise(self) -> bool:
        """Whether the processors must be run position by position."""
        return bool(self.processors) and self.penalty == 1.0

    def for_drafts(self) -> bytes:
        """The same without what only the target may run, ready to be sent to another process.

        Bytes, since torch would send the tensors inside through files of its own.
        """
        kept = tuple(p for p in self.processors if type(p) in _STATELESS)
        return pickle.dumps(replace(self, processors=kept, warpers=()))

    @classmethod
    def of(
        cls,
        processors: Sequence[_Processor],
        *,
        seeds: Sequence[int] | None,
        padding: Sequence[np.ndarray],
        ends: Iterable[int] = (),
    ) -> Selection:
        """From the processors that transformers has prepared, in its order."""
        rest = list(processors)
        warpers: list[_Processor] = []
        if rest and type(rest[-1]) is hf.LogitNormalization:
            warpers.insert(0, rest.pop())  # shifts a token's scores alike: no choice depends on it
        fused: dict[str, Any] = {}
        place = len(_FUSED_ORDER)
        while rest and type(rest[-1]) in _FUSED_ORDER[:place] and _is_usual(rest[-1]):
            place = _FUSED_ORDER.index(type(rest[-1]))
            fused |= _parameters(rest[-1])
            warpers.insert(0, rest.pop())
        return cls(
            seeds=None if seeds is None else tuple(seeds),
            processors=tuple(rest),
            warpers=tuple(warpers),
            padding=tuple(padding),
            ends=frozenset(ends),
            **fused,
        )


def _is_usual(warper: Any) -> bool:
    """Whether a user's own instance does what the fused form does."""
    return getattr(warper, "filter_value", -np.inf) == -np.inf and getattr(warper, "min_tokens_to_keep", 1) == 1


def _parameters(warper: Any) -> dict[str, Any]:
    kind = type(warper)
    if kind is hf.TemperatureLogitsWarper:
        return {"temperature": float(warper.temperature)}
    if kind is hf.TopKLogitsWarper:
        return {"top_k": int(warper.top_k)}
    if kind is hf.TopPLogitsWarper:
        return {"top_p": float(warper.top_p)}
    return {"min_p": float(warper.min_p)}


def row_seeds(seed: Any, rows: int) -> list[int]:
    """The key of each row's noise: 64-bit integers.

    None draws a seed from torch's generator, so ``torch.manual_seed`` governs it. An integer is the key of row 0; the others' are derived
    from it. A sequence gives the keys themselves: a row generates the same text alone, with its key, as in any batch.

    Raises ``TypeError`` or ``ValueError`` for anything else, keys of more than 64 bits included.
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
class Record:
    """What ``output_scores`` and ``output_logits`` ask for: per row, per token in its order, float32 ``[V]``."""

    scores: list[list[torch.Tensor]] | None
    logits: list[list[torch.Tensor]] | None


class Selector:
    """Chooses the tokens of one stage for one generation.

    Parameters
    ----------
    selection: what all stages share.
    text: per row and position the token whose keys and values the stage has or is about to have, int32 ``[rows, capacity]``; the stage
        keeps it up to date.
    record: where the target notes scores and logits.
    vocabulary: the target's; logits of a draft's padding beyond it are left out.
    judges: whether this is the target, whose logits must allow a choice; what a draft makes of odd ones is only a hint.
    """

    def __init__(
        self,
        selection: Selection,
        text: np.ndarray,
        record: Record | None = None,
        vocabulary: int | None = None,
        judges: bool = True,
    ) -> None:
        self._selection = selection
        self._text = text
        self._record = record
        self._vocabulary = vocabulary
        self._judges = judges
        rows = text.shape[0]
        self._processors = [[_for_row(p, row, rows, selection) for p in selection.processors] for row in range(rows)]
        self._stepwise = selection.stepwise or (record is not None and record.scores is not None)
        self._penalty = selection.penalty
        if selection.seeds is not None:
            self._keys = torch.from_numpy(np.array(selection.seeds, dtype=np.uint64).view(np.int64))
            inverse = torch.full((rows,), 1 / selection.temperature, dtype=torch.float32, device="cpu")
            self._inverse_temperature = inverse

    def __call__(
        self, logits: torch.Tensor, fed: torch.Tensor, n_fed: np.ndarray, n_hint: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """``selected``, int32 ``[B, Q]``, as :func:`pipespec_kernels.ops.verify` gives it.

        ``logits [B, Q, V]``, ``fed [B, Q]``: columns of a step; ``n_fed``, ``n_hint [B]``: as there; ``positions``, int64 ``[B]``:
        absolute position of the token that column 0 chooses.
        """
        if self._vocabulary is not None and logits.shape[2] > self._vocabulary:
            logits = logits[:, :, : self._vocabulary]
        if self._stepwise:
            return self._walk(logits, fed, n_fed, n_hint, positions)
        raw, selection = logits, self._selection
        if self._penalty != 1.0:
            logits = self._penalised(logits, n_fed, n_hint, positions)
        noise = None
        if selection.seeds is not None:
            cutoff = None
            if selection.cuts:
                cutoff = self._cutoff(logits, self._inverse_temperature, n_fed=n_fed, n_hint=n_hint)
            noise = Noise(self._keys, positions, self._inverse_temperature, cutoff)
        selected, accepted = ops.verify(logits, fed, n_fed, n_hint, noise=noise)
        if self._judges and noise is not None:
            self._check_drawn(logits, selected.numpy(), accepted.numpy(), n_fed, n_hint, positions)
        if self._record is not None and self._record.logits is not None:
            for row, kept in enumerate(accepted.tolist()):
                if n_fed[row] > 0:
                    first = int(n_fed[row]) - 1 - int(n_hint[row])
                    self._record.logits[row].extend(raw[row, first : first + kept + 1].float().clone().unbind(0))
        return selected

    def _check_drawn(
        self,
        logits: torch.Tensor,
        selected: np.ndarray,
        accepted: np.ndarray,
        n_fed: np.ndarray,
        n_hint: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """``ValueError`` where a token was drawn from logits that are no distribution."""
        rows, steps = np.nonzero(selected >= 0)
        columns = (n_fed - 1 - n_hint)[rows] + steps
        best = logits[rows, columns, selected[rows, steps]].float()
        if not bool(torch.isfinite(best).all()):
            at = int((~torch.isfinite(best)).nonzero()[0])
            raise nothing_to_draw(int(rows[at]), int(positions[rows[at]] + columns[at]))

    def _cutoff(self, logits: torch.Tensor, inverse_temperature: torch.Tensor, **counts: Any) -> torch.Tensor:
        s = self._selection
        return ops.cutoff(
            logits, inv_temperature=inverse_temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, **counts
        )

    def _penalised(
        self, logits: torch.Tensor, n_fed: np.ndarray, n_hint: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """A float32 copy in which tokens that a position's prefix holds are penalised (CTRL, Keskar et al. 2019, section 4.1)."""
        penalty, vocabulary = self._penalty, logits.shape[2]
        out = logits.to(torch.float32, copy=True)
        for row in range(logits.shape[0]):
            if n_fed[row] == 0:
                continue
            hints = int(n_hint[row])
            first = int(n_fed[row]) - 1 - hints
            known = int(positions[row]) + first  # length of the first needed column's prefix
            block = out[row, first : first + hints + 1]
            # For each token the first column whose prefix holds it: 0, or the one behind the hint.
            said, where = np.unique(self._text[row, : known + hints], return_index=True)
            inside = said < vocabulary
            said, since = said[inside].astype(np.int64), np.maximum(where[inside] - known + 1, 0)
            ids = torch.from_numpy(said).to(out.device)
            applies = torch.from_numpy(since[None] <= np.arange(hints + 1)[:, None]).to(out.device)
            scores = block[:, ids]
            changed = torch.where(scores < 0, scores * penalty, scores / penalty)
            block[:, ids] = torch.where(applies, changed, scores)
        return out

    def _walk(
        self, logits: torch.Tensor, fed: torch.Tensor, n_fed: np.ndarray, n_hint: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """One row and one position after the other, with the exact prefix of each."""
        selected = torch.full(fed.shape, -1, dtype=torch.int32, device="cpu")
        for row in range(logits.shape[0]):
            if n_fed[row] == 0:
                continue
            hints = int(n_hint[row])
            first = int(n_fed[row]) - 1 - hints
            for j in range(hints + 1):
                token = self._step(row, int(positions[row]) + first + j, logits[row : row + 1, first + j])
                selected[row, j] = token
                if j == hints or token != int(fed[row, first + 1 + j]) or token in self._selection.ends:
                    break
        return selected

    def _step(self, row: int, position: int, logits: torch.Tensor) -> int:
        """The token at ``position`` of ``row``, from its raw ``logits [1, V]``."""
        record, selection = self._record, self._selection
        prefix = np.concatenate([selection.padding[row], self._text[row, :position].astype(np.int64)])
        ids = torch.from_numpy(prefix)[None].to(logits.device)
        # Processors are used to plain tensors: some enable gradients for themselves.
        with torch.inference_mode(False), torch.no_grad():
            scores = logits.to(torch.float32, copy=True)
            if record is not None and record.logits is not None:
                record.logits[row].append(scores[0].clone())
            for process in self._processors[row]:
                scores = process(ids, scores)
            scores = scores.detach()
        if selection.seeds is None:
            token = int(ops.argmax(scores[None])[0, 0])
        else:
            if self._judges and not bool(torch.isfinite(scores.max())):
                raise nothing_to_draw(row, position)
            inverse = self._inverse_temperature[row : row + 1]
            cutoff = self._cutoff(scores[None], inverse) if selection.cuts else None
            noise = Noise(self._keys[row : row + 1], np.array([position]), inverse, cutoff)
            token = int(ops.sample(scores[None], noise)[0, 0])
        if record is not None and record.scores is not None:
            with torch.inference_mode(False), torch.no_grad():
                for warp in selection.warpers:
                    scores = warp(ids, scores)
            record.scores[row].append(scores[0])
        return token


def nothing_to_draw(row: int, position: int) -> ValueError:
    return ValueError(
        f"no token can be drawn at position {position} of row {row}: its scores are NaN, infinite, or all -inf. Does a logits processor "
        "forbid every token there, or has the model overflown?"
    )


def _ignored(penalty: Any) -> Any:
    return getattr(penalty, "prompt_ignore_length", None)  # not in transformers 5.0


def _for_row(processor: Any, row: int, rows: int, selection: Selection) -> _Processor:
    """A processor that is called with one row of the batch at a time; some know rows by their index."""
    kind = type(processor)
    if kind is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    if kind is hf.RepetitionPenaltyLogitsProcessor and not isinstance(_ignored(processor), int):
        alone = hf.RepetitionPenaltyLogitsProcessor(processor.penalty)
        padding = len(selection.padding[row])  # not a word of the text
        return lambda ids, scores: alone(ids[:, padding:], scores)
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
        processor = copy.deepcopy(processor)  # remembers the text it has seen
    return processor
