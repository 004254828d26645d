"""Report: what one call of ``generate()`` did, per stage and as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipespec.observe import trace as traces

if TYPE_CHECKING:
    from pipespec.drivers.base import Text


@dataclass(frozen=True)
class StageReport:
    """One stage, summed over the rows of the batch.

    ``steps``: row-steps in which it selected a token; ``drafted``: hints of its upstream that it verified; ``accepted``: those
    that held; ``produced``: tokens it appended (accepted hints and its own); ``adopted``: tokens taken over from downstream;
    ``rollbacks``/``wasted``: how often, and how many tokens, it took back; ``histogram[j]``: steps that accepted j hints (the last bin: or more).
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

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; NaN for a stage that verified nothing (the first, or plain decoding)."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def accepted_length(self) -> float:
        """Mean tokens per step, the stage's own token included."""
        return self.produced / self.steps if self.steps else float("nan")


@dataclass(frozen=True)
class Report:
    """One call of ``generate()``.

    ``tokens`` counts generated tokens of all rows, padding not; times are wall-clock seconds; ``seeds`` are the keys of the rows' noise (None:
    greedy): ``generate(row's prompt, seed=[key])`` gives a row's text again. ``decisions`` (``schedule="auto"``, and calls that
    were run otherwise than asked for): why the call was run as it was, and what was changed while it ran. ``trace``
    (``Pipeline(..., trace=N)``): the steps by name of the stage, as
    :meth:`pipespec_kernels.trace.TraceMemory.read` has them. ``mean_acceptance_length``, ``draft_acceptance_rate`` and
    ``acceptance_histogram`` are the target's figures under the names that engine-neutral benchmarks use.
    """

    schedule: str
    rows: int
    tokens: int
    seconds: float
    seconds_to_first_token: float
    stages: tuple[StageReport, ...]
    seeds: tuple[int, ...] | None = None
    decisions: tuple[str, ...] | None = None
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
        """Entry j: verifications that accepted j drafts (the last: or more)."""
        return self.stages[-1].histogram

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")

    def to_dict(self) -> dict:
        """Everything but the trace, the derived figures included, ready for JSON."""
        out = asdict(replace(self, trace=None)) | {
            "tokens_per_second": self.tokens_per_second,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram,
        }
        del out["trace"]
        for entry, stage in zip(out["stages"], self.stages, strict=True):
            entry |= {"acceptance_rate": stage.acceptance_rate, "accepted_length": stage.accepted_length}
        return out

    def save_trace(self, path: Path | str) -> None:
        """Write every stage's steps as JSON that https://ui.perfetto.dev opens. Raises ``ValueError`` where none were kept."""
        traces.save_trace(path, self.traced(), title=f"pipespec {self.schedule}")

    def traced(self) -> Mapping[str, np.ndarray]:
        """:attr:`trace`; raises ``ValueError`` where there is none."""
        if self.trace is None:
            raise ValueError(
                "this call was not traced: make the pipeline with Pipeline(..., trace=10_000), the number of steps that each stage keeps"
            )
        return self.trace

    def __str__(self) -> str:
        lines = [
            f"{self.schedule}: {self.tokens} tokens in {self.seconds:.3f} s = {self.tokens_per_second:.1f} tokens/s, "
            f"first after {self.seconds_to_first_token * 1e3:.0f} ms",
            f"{'stage':<12}{'steps':>8}{'drafted':>9}{'accepted':>10}{'rate':>7}{'length':>8}{'rollbacks':>11}{'wasted':>8}",
        ]
        for s in self.stages:
            rate = f"{s.acceptance_rate:.3f}" if s.drafted else "-"
            lines.append(
                f"{s.name:<12}{s.steps:>8}{s.drafted:>9}{s.accepted:>10}{rate:>7}{s.accepted_length:>8.2f}"
                f"{s.rollbacks:>11}{s.wasted:>8}"
            )
        return "\n".join([*lines, *(self.decisions or ())])


def stage_report(name: str, block: Text, stage: int, rows: int) -> StageReport:
    """Sum a stage's counters over the rows of the last generation."""
    counts = [block.counters(stage, row) for row in range(rows)]
    total = {key: sum(c[key] for c in counts) for key in counts[0] if key != "histogram"}
    histogram = [sum(column) for column in zip(*(c["histogram"] for c in counts), strict=True)]
    while len(histogram) > 1 and histogram[-1] == 0:
        histogram.pop()
    return StageReport(
        name=name,
        steps=total["steps"],
        fed=total["fed"],
        drafted=total["drafted"],
        accepted=total["accepted"],
        produced=total["produced"],
        adopted=total["adopted"],
        rollbacks=total["rollbacks"],
        wasted=total["truncated"],
        histogram=tuple(histogram),
    )
