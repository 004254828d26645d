"""How the stages of a call choose tokens, and what it records: SamplingParams from GenerationConfig and processors. :mod:`pipespec.engine.sampler` applies them.

Sampling is coupled (Daliri, Musco, Suresh 2024): a token is the argmax of the processed logits plus Gumbel noise keyed by (seed, position,
token id), the same noise in every stage. So the text of a row is a function of the target, the prompt and the seed; drafts do not change it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from pipespec_kernels import ops
from pipespec_kernels.penalties import Penalties

LogitsProcess = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class OutputPenaltyLogitsProcessor(hf.LogitsProcessor):
    """Presence and frequency penalty of OpenAI's API and vLLM, as a logits processor of transformers.

    From the score of each token that occurs ``n > 0`` times in the generated text it subtracts ``n * frequency_penalty``, then ``presence_penalty``. The
    prompt does not count.

    Args:
        prompt_length: columns of ``input_ids`` that are the prompt.
        presence_penalty: any finite number; above 0: fewer repetitions.
        frequency_penalty: likewise.
    """

    def __init__(self, prompt_length: int, presence_penalty: float = 0.0, frequency_penalty: float = 0.0) -> None:
        self.prompt_length = prompt_length
        self.presence_penalty, self.frequency_penalty = presence_penalty, frequency_penalty

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generated = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return (scores - self.frequency_penalty * counts) - self.presence_penalty * (counts > 0)


# Processors without a state, which drafts run, too. All others run in the target only, where each sees every token once and in order.
STATELESS = {
    hf.EncoderNoRepeatNGramLogitsProcessor, hf.EncoderRepetitionPenaltyLogitsProcessor, hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper, hf.ExponentialDecayLengthPenalty, hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization, hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor, hf.MinPLogitsWarper, hf.NoBadWordsLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor, hf.SuppressTokensLogitsProcessor, hf.TemperatureLogitsWarper,
    hf.TopHLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.TypicalLogitsWarper, OutputPenaltyLogitsProcessor,
}  # fmt: skip

_MIN_FACTOR = 1e-37
"""Below this the inverse of a temperature or a repetition penalty is near the end of float32; above 1 / this, too."""

_FUSED: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (hf.TemperatureLogitsWarper, "temperature", float),
    (hf.TopKLogitsWarper, "top_k", lambda k: min(int(k), 2**31 - 1)),
    (hf.TopPLogitsWarper, "top_p", float),
    (hf.MinPLogitsWarper, "min_p", float),
)
"""Warpers in the order in which the fused form applies them, and their parameter."""


def with_penalties(
    processors: Sequence[LogitsProcess],
    prompt_length: int,
    *,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
) -> list[LogitsProcess]:
    """Add processors for pipespec's own arguments, where vLLM applies them.

    The bias goes after transformers' ``sequence_bias``, or to the beginning. The penalties go after the repetition penalty, or after the biases.

    Args:
        processors: those that transformers has prepared.
        prompt_length: columns of the prompt.
        presence_penalty: see :class:`OutputPenaltyLogitsProcessor`.
        frequency_penalty: likewise.
        logit_bias: is added to the scores of these ids.
    """
    found = list(processors)
    at = 0
    while at < len(found) and type(found[at]) is hf.SequenceBiasLogitsProcessor:
        at += 1
    if logit_bias:
        found.insert(at, hf.SequenceBiasLogitsProcessor({(int(i),): float(b) for i, b in logit_bias.items()}))
        at += 1
    if presence_penalty or frequency_penalty:
        at = next((i + 1 for i, p in enumerate(found) if type(p) is hf.RepetitionPenaltyLogitsProcessor), at)
        own = OutputPenaltyLogitsProcessor(prompt_length, float(presence_penalty or 0), float(frequency_penalty or 0))
        found.insert(at, own)
    return found


class FusedPenalties(NamedTuple):
    """Penalties and biases that :func:`pipespec_kernels.ops.penalize` applies to all positions of a step at once.

    Attributes:
        repetition: 1.0: off.
        presence: 0.0: off.
        frequency: 0.0: off.
        bias: pairs of a token id and what is added to its logit.
        prompt_length: ids that processors see of a prompt, padding included.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    prompt_length: int = 0

    @classmethod
    def of(cls, processors: Sequence[LogitsProcess]) -> FusedPenalties | None:
        """The penalties of a list of processors; None if it is empty, has another processor, or an order that the fused operation cannot apply."""
        bias: dict[int, float] = {}
        fused: dict[str, Any] = {}
        place = 0
        for processor in processors:
            given: Any = processor
            kind = type(given)
            if kind is hf.SequenceBiasLogitsProcessor and place == 0:
                single = {ids[0]: float(value) for ids, value in given.sequence_bias.items() if len(ids) == 1}
                if len(single) < len(given.sequence_bias) or bias.keys() & single.keys():
                    return None
                bias |= single
            # An int is the user's own number of ignored tokens. transformers sets a tensor to leave out the padding.
            elif (
                kind is hf.RepetitionPenaltyLogitsProcessor
                and place < 1
                and not isinstance(ignored_prefix(processor), int)
            ):
                if not _MIN_FACTOR < given.penalty < 1 / _MIN_FACTOR:
                    return None
                place, fused["repetition"] = 1, float(given.penalty)
            elif kind is OutputPenaltyLogitsProcessor and place < 2:
                place = 2
                fused |= {"presence": given.presence_penalty, "frequency": given.frequency_penalty}
                fused["prompt_length"] = given.prompt_length
            else:
                return None
        return cls(bias=tuple(bias.items()), **fused) if processors else None

    def tensors(self, ignored: Sequence[int], device: torch.device | str) -> Penalties:
        """The numbers of each row; ``ignored``: per row, ids at the beginning of its prompt that count for nothing."""
        rows = len(ignored)

        def each(value: float) -> torch.Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        ids = torch.tensor([i for i, _ in self.bias], dtype=torch.int32, device=device)
        bias = torch.tensor([b for _, b in self.bias], dtype=torch.float32, device=device)
        prompts = torch.tensor([self.prompt_length - n for n in ignored], dtype=torch.int32, device=device)
        return Penalties(
            each(self.repetition),
            each(self.presence),
            each(self.frequency),
            prompts,
            ids.repeat(rows, 1) if self.bias else None,
            bias.repeat(rows, 1) if self.bias else None,
        )


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
        processors: transformers' and the user's, run position by position before the warpers. Penalties and biases alone are fused, too, see
            :class:`FusedPenalties`.
        warpers: transformers' objects for the fused part; only ``output_scores`` needs them.
        prompts: per row, what processors see of its prompt; empty: the text as it is.
        ends: ids that end a row. Positions after one are not sampled.
    """

    seeds: tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: tuple[LogitsProcess, ...] = ()
    warpers: tuple[LogitsProcess, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    ends: frozenset[int] = frozenset()

    @property
    def penalties(self) -> FusedPenalties | None:
        """Penalties and biases, if they are the only processors, so that they are fused; else None."""
        return FusedPenalties.of(self.processors)

    @property
    def stepwise(self) -> bool:
        """Whether processors must run position by position."""
        return bool(self.processors) and self.penalties is None

    def ignored_ids(self, row: int) -> int:
        """Ids at the beginning of a row's prompt that a repetition penalty leaves out: those that transformers' does, else the padding."""
        penalty = next((p for p in self.processors if type(p) is hf.RepetitionPenaltyLogitsProcessor), None)
        if penalty is None:
            return 0
        ignored = ignored_prefix(penalty)
        if isinstance(ignored, torch.Tensor):
            return int(ignored[row])
        return self.prompts[row].ignored if self.prompts else 0

    def check_ids(self, vocabulary: int) -> None:
        """Check the ids of fused biases, as transformers does at the first token.

        Raises:
            ValueError: An id lies outside of the vocabulary.
        """
        wrong = [i for i, _ in self.penalties.bias if not 0 <= i < vocabulary] if self.penalties else []
        if wrong:
            raise ValueError(
                f"sequence_bias, logit_bias: the target has {vocabulary} tokens, but these ids are biased: {wrong}"
            )

    def for_drafts(self) -> bytes:
        """Pickled parameters for the drafts: without what only the target may run.

        Bytes, because torch would send the tensors inside through files of its own.
        """
        kept = tuple(p for p in self.processors if type(p) in STATELESS)
        return pickle.dumps(replace(self, processors=kept, warpers=()))

    @classmethod
    def of(
        cls,
        processors: Sequence[LogitsProcess],
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
        warpers: list[LogitsProcess] = []
        last = [rest.pop()] if rest and type(rest[-1]) is hf.LogitNormalization else []
        fused: dict[str, Any] = {}
        for kind, name, convert in reversed(_FUSED):
            if rest and type(rest[-1]) is kind and _is_fusable(rest[-1]):
                fused[name] = convert(getattr(rest[-1], name))
                warpers.insert(0, rest.pop())
        # The normalization shifts all scores of a position alike, so no choice depends on it, unless a processor has made an infinite one:
        # then all become NaN, and the first token is chosen.
        (rest if rest and seeds is None else warpers).extend(last)
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
    if type(warper) is hf.TemperatureLogitsWarper and not _MIN_FACTOR < warper.temperature < 1 / _MIN_FACTOR:
        return False
    return getattr(warper, "filter_value", -np.inf) == -np.inf and getattr(warper, "min_tokens_to_keep", 1) == 1


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


def ignored_prefix(penalty: Any) -> Any:
    # transformers 5.0 does not have it.
    return getattr(penalty, "prompt_ignore_length", None)


_SERIAL = 32_767  # elements that an operation of torch works on in the caller's thread alone


def float32_copy(logits: Tensor) -> Tensor:
    """A copy of ``[B, Q, V]`` in float32.

    On a CPU the caller makes it alone: libgomp's threads poll for some 20 ms after their work, on cores that the next forward needs.
    """
    if logits.is_cpu and logits.dtype is torch.float32:
        return torch.from_numpy(logits.detach().numpy().copy())
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if not out.is_cpu:
        return out.copy_(logits)
    for to, row in zip(out.flatten(0, 1), logits.flatten(0, 1), strict=True):
        for part, source in zip(to.split(_SERIAL), row.split(_SERIAL), strict=True):
            part.copy_(source)
    return out


class Step(NamedTuple):
    """What a stage feeds in a step, and where it chooses tokens. On the host, or on the stage's device.

    Attributes:
        tokens: int ``[rows, width]``, the tokens of the columns.
        kv: int32 ``[rows]``, the position of each row's first column, which chooses the token after it.
        query_lens: int32 ``[rows]``, columns of each row; 0: the row selects nothing.
        num_draft_tokens: int32 ``[rows]``, how many of them, at the end, are draft tokens.
    """

    tokens: Tensor
    kv: Tensor
    query_lens: Tensor
    num_draft_tokens: Tensor


class SamplerOutput(NamedTuple):
    """What a step has selected, and from what.

    Attributes:
        raw: The model's logits of the step, ``[rows, width, V]``.
        processed: The same after all processors.
        selected: The tokens, int32 ``[rows, width]``.
        step: What was fed.
        inverse_temperature: Float32 ``[rows]``. None: greedy.
        cutoff: Float32 ``[rows, width]``: what top-k, top-p and min-p leave. None: everything.
    """

    raw: Tensor
    processed: Tensor
    selected: Tensor
    step: Step
    inverse_temperature: Tensor | None
    cutoff: Tensor | None

    def logprobs(self, top_n: int) -> tuple[Tensor, Tensor]:
        """As :func:`pipespec_kernels.ops.logprobs`, with the selected token's before those of the likeliest: float32 ``[B, Q, 1 + n]``, int32 ``[B, Q, n]``."""
        chosen, top_ids, top = ops.logprobs(
            self.processed,
            self.selected,
            self.step.query_lens,
            self.step.num_draft_tokens,
            inv_temperature=self.inverse_temperature,
            cutoff=self.cutoff,
            top_n=top_n,
        )
        return torch.cat([chosen[:, :, None], top], -1), top_ids


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
        def lists(wanted: bool) -> list[list[Tensor]] | None:
            return [[] for _ in range(rows)] if wanted else None

        self.counts = [0] * rows
        self.scores, self.logits, self.top_logprobs = lists(scores), lists(logits), top_logprobs
        self.logprobs, self.top_ids = lists(top_logprobs is not None), lists(top_logprobs is not None)
        self._warpers = tuple(warpers)

    def write(self, found: SamplerOutput, first_row: int = 0) -> None:
        """Append what a step has selected. ``first_row``: row of the batch that is row 0 of the step."""
        own: list[Tensor | None] = [None, None]
        if self.top_logprobs is not None:
            own = list(found.logprobs(self.top_logprobs))
        counts, step = (found.selected >= 0).sum(1).tolist(), found.step
        for row, (fed, draft_tokens) in enumerate(
            zip(step.query_lens.tolist(), step.num_draft_tokens.tolist(), strict=True)
        ):
            if fed:
                columns, entries = slice(fed - 1 - draft_tokens, fed - 1 - draft_tokens + counts[row]), counts[row]
                logprobs, top_ids = (None if x is None else x[row, :entries] for x in own)
                self.add(
                    first_row + row, entries, found.raw[row, columns], found.processed[row, columns], logprobs, top_ids
                )

    def add(
        self,
        row: int,
        count: int,
        logits: Tensor | None,
        processed: Tensor | None,
        logprobs: Tensor | None,
        top_ids: Tensor | None,
    ) -> None:
        """Append copies for ``count`` tokens of a row. What is not requested may be None.

        ``logits`` and ``processed``, after all processors, are ``[count, V]``, ``logprobs`` and ``top_ids`` as in the attributes.
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


def common_length(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if len(differ) else n
