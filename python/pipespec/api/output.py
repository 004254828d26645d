"""The result of a call, which is what transformers would have returned, and its report: the figures per stage and as a whole."""

from __future__ import annotations

import html
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from pipespec.api.prepare import Columns, PreparedCall, remember_texts
from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.sampling import ScoreRecord
from pipespec.errors import user_stacklevel
from pipespec.models.compat import new_cache
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import input_device
from pipespec.schedules.base import CacheOwner, Decoder, SpeedWarning

if TYPE_CHECKING:
    from pipespec.schedules.base import TextSource


@dataclass(frozen=True)
class StageReport:
    """The counters of one stage, summed over the rows of the batch.

    Attributes:
        name: Name of the stage.
        steps: Steps of single rows in which the stage sampled a token.
        fed: Tokens that the stage ran.
        drafted: Draft tokens of the stage upstream that it verified.
        accepted: Draft tokens that it accepted.
        produced: Tokens that it appended, accepted draft tokens and its own.
        adopted: Tokens that it adopted from downstream.
        rollbacks: Number of rollbacks.
        wasted: Tokens that it rolled back.
        histogram: Entry j: steps that accepted j draft tokens. The last entry counts those with more, too.
        forward: How its model was called: ``"native"``, ``"fused"``, or ``"transformers: "`` and why; ``"n-gram index"`` without a model. Empty where
            that is not known.
        translated: For a draft with another tokenizer than the target's: tokens that its model generated; otherwise None.
        lost: How many of these could not become tokens of the target.
    """

    name: str
    steps: int
    fed: int
    drafted: int
    accepted: int
    produced: int
    adopted: int
    rollbacks: int
    wasted: int
    histogram: tuple[int, ...]
    forward: str = ""
    translated: int | None = None
    lost: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; NaN for a stage that verified nothing, such as the first one."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def accepted_length(self) -> float:
        """Mean tokens per step, the stage's own token included."""
        return self.produced / self.steps if self.steps else float("nan")


@dataclass(frozen=True)
class Report:
    """The figures of one call of ``generate()``.

    ``mean_acceptance_length``, ``draft_acceptance_rate`` and ``acceptance_histogram`` are the target's figures under the names of
    engine-neutral benchmarks.

    Attributes:
        schedule: Schedule that ran the call.
        rows: Rows of the batch.
        tokens: Generated tokens of all rows, without padding.
        seconds: Wall-clock time of the call.
        seconds_to_first_token: Wall-clock time until the first token.
        stages: Counters of each stage, the target last.
        seeds: Keys of the rows' noise; None: greedy. ``generate(prompt, seed=[key])`` gives a row's text again.
        decisions: Reasons for the schedule of the call, and for changes during the call: where the call differs from the arguments.
        prompt_tokens: Tokens of the prompts of all rows, without padding.
        plain_step_seconds: Time of a step of the target without draft tokens, as the controller has measured it; None where it has not.
        prompt_tokens_reused: Tokens of the prompts that the target did not read, since it had their keys and values: from earlier calls, or from the caller.
        packing_seconds: Time until the first token in which the native form read and packed weights: in a first call, and after weights have changed.
        trace: Steps by name of the stage (``Pipeline(..., trace=N)``), see :meth:`pipespec_kernels.trace.TraceMemory.read`.
    """

    schedule: str
    rows: int
    tokens: int
    seconds: float
    seconds_to_first_token: float
    stages: tuple[StageReport, ...]
    seeds: tuple[int, ...] | None = None
    decisions: tuple[str, ...] | None = None
    prompt_tokens: int = 0
    plain_step_seconds: float | None = None
    prompt_tokens_reused: int = 0
    packing_seconds: float = 0.0
    trace: Mapping[str, np.ndarray] | None = field(default=None, repr=False, compare=False)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification, the target's own token included."""
        return self.stages[-1].accepted_length

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens at the target; NaN where nothing was drafted."""
        return self.stages[-1].acceptance_rate

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Entry j: verifications that accepted j draft tokens. The last entry counts those with more, too."""
        return self.stages[-1].histogram

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")

    @property
    def decoding_seconds(self) -> float:
        """Wall-clock time after the first token."""
        return self.seconds - self.seconds_to_first_token

    @property
    def decoding_tokens_per_second(self) -> float:
        """Tokens after the first of each row, by the time after it; NaN where there are none."""
        later, seconds = self.tokens - self.rows, self.decoding_seconds
        return later / seconds if later > 0 and seconds > 0 else float("nan")

    @property
    def gain(self) -> float:
        """How many times faster than plain decoding the text of one row was decoded, prompt apart, as estimated from ``plain_step_seconds``. At most the
        tokens per step: other programs may have slowed the plain steps. NaN where it is not known."""
        if self.plain_step_seconds is None or self.rows != 1:
            return float("nan")
        most = (self.tokens - 1) / max(1, self.stages[-1].steps - 1)
        return min(self.decoding_tokens_per_second * self.plain_step_seconds, most)

    def to_dict(self) -> dict:
        """All figures but the trace, derived ones included, ready for JSON: those that are not known (NaN) are None."""
        out = {**asdict(replace(self, trace=None)), **self._derived()}
        del out["trace"]
        for entry, stage in zip(out["stages"], self.stages, strict=True):
            entry |= {"acceptance_rate": stage.acceptance_rate, "accepted_length": stage.accepted_length}
        return _without_nan(out)

    def _derived(self) -> dict[str, Any]:
        """The figures of :meth:`to_dict` that are properties."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "decoding_tokens_per_second": self.decoding_tokens_per_second,
            "gain": self.gain,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram,
        }

    def save_trace(self, path: Path | str) -> None:
        """Write the steps of all stages as JSON for https://ui.perfetto.dev. Raises ``ValueError`` without a trace."""
        from pipespec.api.trace import chrome_trace
        from pipespec.process.files import replace as replace_file

        replace_file(Path(path), json.dumps(chrome_trace(self.traced(), title=f"pipespec {self.schedule}")))

    def traced(self) -> Mapping[str, np.ndarray]:
        """Return :attr:`trace`. Raises ``ValueError`` if there is none."""
        if self.trace is None:
            raise ValueError(
                "this call was not traced: make the pipeline with Pipeline(..., trace=N), N being the number of steps recorded per stage"
            )
        return self.trace

    def summary(self) -> str:
        """One line: what the whole call, its prompt, and its decoding took."""
        kept = f" ({self.prompt_tokens_reused} kept from earlier calls)" if self.prompt_tokens_reused else ""
        words = [f"{self.schedule}: {self.tokens} tokens in {self.seconds:.3f} s"]
        if self.packing_seconds >= 0.01:
            words.append(f"weights packed in {self.packing_seconds:.1f} s, once")
        reading = (self.seconds_to_first_token - self.packing_seconds) * 1e3
        words.append(f"prompt of {self.prompt_tokens} tokens{kept} in {reading:.0f} ms")
        if self.tokens > self.rows:
            words.append(f"then {self.decoding_tokens_per_second:.1f} tokens/s")
        if not math.isnan(self.gain):
            words.append(f"about {self.gain:.2f} times plain decoding")
        return ", ".join(words)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [
            self.summary(),
            f"{'stage':<12}{'steps':>8}{'verified':>10}{'accepted':>10}{'rate':>7}{'length':>8}{'rollbacks':>11}{'wasted':>8}",
        ]
        notes = []
        for s in self.stages:
            verifies = (s.drafted, s.accepted, f"{s.acceptance_rate:.3f}") if s.drafted else ("-", "-", "-")
            lines.append(
                f"{s.name:<12}{s.steps:>8}{verifies[0]:>10}{verifies[1]:>10}{verifies[2]:>7}"
                f"{f'{s.accepted_length:.2f}' if s.steps else '-':>8}{s.rollbacks:>11}{s.wasted:>8}"
            )
            if s.translated is not None:
                notes.append(
                    f"{s.name} has another tokenizer: {s.translated} of its tokens became {s.produced} draft tokens, {s.lost} could not be translated"
                )
        return "\n".join([*lines, *notes, *(self.decisions or ())])


def stage_report(
    name: str, block: TextSource, stage: int, rows: int, forward: str = "", translated: tuple[int, int] | None = None
) -> StageReport:
    """Sum a stage's counters over the rows of the last generation."""
    counts = [block.counters(stage, row) for row in range(rows)]
    total = {key: sum(c[key] for c in counts) for key in counts[0] if key != "histogram"}
    histogram = [sum(column) for column in zip(*(c["histogram"] for c in counts), strict=True)]
    while len(histogram) > 1 and histogram[-1] == 0:
        histogram.pop()
    names = ("steps", "fed", "drafted", "accepted", "produced", "adopted", "rollbacks")
    return StageReport(
        name,
        **{key: total[key] for key in names},
        wasted=total["truncated"],
        histogram=tuple(histogram),
        forward=forward,
        translated=None if translated is None else translated[0],
        lost=0 if translated is None else translated[1],
    )


def _without_nan(figures: Any) -> Any:
    """The same, with None for NaN, which JSON does not have."""
    if isinstance(figures, dict):
        return {name: _without_nan(value) for name, value in figures.items()}
    if isinstance(figures, (list, tuple)):
        return type(figures)(map(_without_nan, figures))
    return None if isinstance(figures, float) and math.isnan(figures) else figures


own_report: ContextVar[Report | None] = ContextVar("own_report", default=None)
"""Of the call that has ended last in this context: calls of other threads do not change it."""


class Logprobs(NamedTuple):
    """Log-probabilities of the new tokens, by the target's processed scores: what ``compute_transition_scores(normalize_logits=True)`` of transformers computes
    from ``scores``, and vLLM with ``logprobs_mode="processed_logprobs"``.

    Attributes:
        chosen: Float32 ``[B, new]``, of the generated tokens; 0 after the end of a row, so that the sum of a row is that of its text.
        top_ids: Int64 ``[B, new, n]``, the likeliest tokens, likeliest first; -1 where processors and filters leave fewer, and after the end of a row.
        top: Float32 ``[B, new, n]``, theirs; -inf where ``top_ids`` is -1.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass
class LogprobsOutput(GenerateDecoderOnlyOutput):
    """What a call with ``logprobs=`` returns: transformers' fields, and ``logprobs`` as the last one. All other calls return transformers' own class."""

    logprobs: Logprobs | None = None


def report_of(call: PreparedCall, decoder: Decoder) -> Report:
    """The report of a call that ``decoder`` has run."""
    progress, rows, names, traces = call.progress, len(call.request.inputs.prompts), decoder.names, decoder.traces()
    translated = decoder.translated
    return Report(
        schedule=decoder.ran_as,
        rows=rows,
        tokens=sum(progress.text.counts()),
        seconds=progress.seconds,
        seconds_to_first_token=progress.seconds_to_first,
        stages=tuple(
            stage_report(name, decoder.block, i, rows, form, translated.get(i))
            for i, (name, form) in enumerate(zip(names, decoder.forms, strict=True))
        ),
        seeds=None if call.seeds is None else tuple(call.seeds),
        decisions=decoder.remarks or None,
        prompt_tokens=sum(map(len, call.request.inputs.prompts)),
        plain_step_seconds=decoder.plain_step_seconds,
        prompt_tokens_reused=decoder.prompt_tokens_reused,
        packing_seconds=progress.packing_seconds,
        trace=traces or None,
    )


def warn_of_room(decoder: Decoder) -> None:
    """Warn of stages whose native form had no room. Nothing else says that a call ran much slower, and rounded otherwise."""
    for name, form in zip(decoder.names, decoder.forms, strict=True):
        if "there is no room for a packed copy" in form:
            warnings.warn(
                f"{name}: there is no room for a packed copy of its weights, so its own modules run, which is slower, and they round otherwise; free "
                "memory, or give it smaller weights (weights='q8_0')",
                SpeedWarning,
                stacklevel=user_stacklevel(),
            )


def output_of(call: PreparedCall, completed: RowCache | None) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The result of a call that has run. ``completed``: what :func:`complete` has returned."""
    text = call.progress.text
    sequences = text.sequences()
    cache = None if completed is None else _returned(call, completed)
    if not call.config.return_dict_in_generate:
        return sequences
    steps = sequences.shape[1] - text.input_ids.shape[1]
    scores = logits = logprobs = None
    if (record := call.request.record) is not None:
        scores, logits = _per_token(call, record.scores, steps), _per_token(call, record.logits, steps)
        logprobs = _logprobs(call, record, steps)
    if call.options.logprobs is None:
        return GenerateDecoderOnlyOutput(sequences, scores, logits, past_key_values=cache)
    # Ranks that follow have the class, too, and no scores.
    return LogprobsOutput(sequences, scores, logits, past_key_values=cache, logprobs=logprobs)


def _logprobs(call: PreparedCall, record: ScoreRecord, steps: int) -> Logprobs | None:
    both, ids = _per_token(call, record.logprobs, steps), _per_token(call, record.top_ids, steps)
    if both is None or ids is None:
        return None
    stacked, top_ids = torch.stack(both, 1), torch.stack(ids, 1).long()
    counts = torch.tensor(call.progress.text.counts(), device=stacked.device)
    over = (torch.arange(steps, device=stacked.device) >= counts[:, None])[:, :, None]
    return Logprobs(stacked[:, :, 0], top_ids.masked_fill(over, -1), stacked[:, :, 1:].masked_fill(over, -torch.inf))


def _per_token(
    call: PreparedCall, rows: list[list[torch.Tensor]] | None, steps: int
) -> tuple[torch.Tensor, ...] | None:
    """Per generated token ``[B, V]``."""
    return None if rows is None else tuple(call.progress.text.column(rows, i) for i in range(steps))


# ---- the cache of the result, see :mod:`pipespec.api.prepare`


def complete(call: PreparedCall, owner: CacheOwner) -> RowCache | None:
    """Let ``owner`` hold what transformers would hold after the call: all columns but the last, those after the end of a row included.

    Returns:
        None where the caller gets no cache.
    """
    if not call.request.returns_cache:
        return None
    return owner.complete(_texts_after(call), [n - 1 for n in call.progress.text.lengths])


def _texts_after(call: PreparedCall) -> list[np.ndarray]:
    text = call.progress.text
    new = text.sequences()[:, text.input_ids.shape[1] : -1].to("cpu", torch.int32).numpy()
    return [np.concatenate(pair) for pair in zip(call.request.inputs.prompts, new, strict=True)]


def _returned(call: PreparedCall, own: RowCache) -> Cache:
    """The caller's cache, with the columns of the call appended; a new one if the caller gave none. One copy of them."""
    columns, cache, text = call.columns, call.options.cache, call.progress.text
    width = text.sequences().shape[1] - 1 + columns.cached - columns.held
    begins = columns.tokens(columns.held)
    # Not inference tensors, whose gradients could not be computed.
    with torch.inference_mode(False), torch.no_grad():
        padding = _padding(call) if len(columns.hidden) else None
        cache = new_cache(call.target) if cache is None else cache
        for i, pair in enumerate(own.states()):
            if pair is None:
                continue  # the layer reads what another one has stored
            if i not in own.layout.attention:
                cache.update_conv_state(pair[0], i)
                cache.update_recurrent_state(pair[1], i)
                continue
            if padding is None and len(set(begins)) == 1:
                new = [x[:, :, begins[0] :].to(own.compute_dtype) for x in pair]
            else:
                new = [_placed(x, columns, begins, width).to(own.compute_dtype) for x in pair]
            if padding is not None:
                rows, at = columns.hidden.T
                for placed, states in zip(new, padding[i], strict=True):
                    placed[torch.from_numpy(rows), :, torch.from_numpy(at - columns.held)] = states.to(placed)
            cache.update(*new, i)
    if call.is_text_known:
        remember_texts(cache, _texts_after(call))
    return cache


def _placed(states: torch.Tensor, columns: Columns, begins: Sequence[int], width: int) -> torch.Tensor:
    """The tokens of each row from ``begins[row]`` on, in ``width`` columns after those that the caller's cache held. Padding is zero."""
    placed = states.new_zeros((*states.shape[:2], width, states.shape[3]))
    for row, (begin, places) in enumerate(zip(begins, columns.places, strict=True)):
        read = columns.count - columns.held
        at = torch.from_numpy(places[begin:] - columns.held).to(states.device)
        placed[row][:, at] = states[row, :, begin : len(places)]
        placed[row, :, read:] = states[row, :, len(places) : len(places) + width - read]
    return placed


def _padding(call: PreparedCall) -> list[list[torch.Tensor]]:
    """What transformers leaves in the ``n`` columns of :attr:`Columns.hidden`, which a later mask may show: a forward of the target's own says it.

    Returns:
        Per layer, keys and values ``[n, kv_heads, head_dim]``; nothing of recurrent layers.
    """
    columns, target, device = call.columns, call.target, input_device(call.target)
    first = columns.held
    new = [x[:, first - columns.count :].cpu() for x in (call.progress.text.input_ids, call.position_ids)]
    rows, at = (torch.from_numpy(x) for x in (columns.hidden - [0, first]).T)
    is_recurrent = CacheLayout.of(target.config).states is not None
    begins = np.array([places[0] for places in columns.places])
    sees_nothing = bool((columns.hidden[:, 1] < begins[columns.hidden[:, 0]]).all())
    if sees_nothing and not is_recurrent and mask_kind(target.config) is MaskKind.SDPA:
        # Such a column depends on its token and its position only.
        different, which = torch.stack([x[rows, at] for x in new], 1).unique(dim=0, return_inverse=True)
        new, mask, seen = list(different[:, :, None].transpose(0, 1)), torch.zeros(len(different), 1), DynamicCache()
        rows, at = which, torch.zeros_like(which)
    else:
        mask, seen = call.mask, new_cache(target) if is_recurrent else DynamicCache()
        for i, layer in enumerate(call.options.cache.layers if call.options.cache is not None and first else ()):
            if layer.keys is not None:
                seen.update(layer.keys, layer.values, i)
        at = at + first
    target(
        input_ids=new[0].to(device),
        attention_mask=mask.to(device, torch.long),
        position_ids=new[1].to(device),
        past_key_values=seen,
        use_cache=True,
        logits_to_keep=1,
    )
    pairs = ((layer.keys, layer.values) if isinstance(layer, DynamicLayer) else () for layer in seen.layers)
    return [[x[rows, :, at] for x in pair] for pair in pairs]
