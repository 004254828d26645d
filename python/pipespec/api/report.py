"""Report: the figures of one call of ``generate()``, per stage and as a whole."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
        packing_seconds: Time until the first token in which the native form read and packed weights, which only a first call does.
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
        """How many times faster than plain decoding the text of one row was decoded, prompt apart, as estimated from ``plain_step_seconds``; NaN where that is not known."""
        if self.plain_step_seconds is None or self.rows != 1:
            return float("nan")
        return self.decoding_tokens_per_second * self.plain_step_seconds

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
                f"{s.name:<12}{s.steps:>8}{verifies[0]:>10}{verifies[1]:>10}{verifies[2]:>7}{s.accepted_length:>8.2f}"
                f"{s.rollbacks:>11}{s.wasted:>8}"
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
