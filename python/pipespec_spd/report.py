"""SpeculativeReport: the figures of one call on a partitioned target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipespec.api.output import Report
from pipespec_spd.law import spd_accepted_length

PHASES = ("prefill", "draft", "stages", "verify", "other")


@dataclass(frozen=True, kw_only=True)
class SpeculativeReport(Report):
    """One call of ``SpeculativePipeline.generate()``. Counts are sums over the rows.

    Attributes:
        partition: Layers per stage.
        drafter: Class name of the drafter.
        verified: N, tokens that the target has emitted, the prefill's included. It exceeds ``tokens`` if a stopping criterion ended a
            row that had run ahead in its batch.
        cycles: K, the sum of each row's cycles.
        rounds: Cycles of the batch.
        checked: Draft tokens that the target verified.
        accepted: Draft tokens that the target accepted.
        flushes: Rejections that emptied the pipeline.
        phases: Seconds of each phase. Their sum is the call's ``seconds``.
        stage_seconds: Seconds that each stage was busy in cycles.
        parallel_seconds: Estimate of ``seconds`` with drafter and stages at the same time, where each cycle takes as long as its slowest
            part. It is a sum of measured times, without transfers.
    """

    partition: tuple[int, ...]
    drafter: str
    verified: int
    cycles: int
    rounds: int
    checked: int
    accepted: int
    flushes: int
    phases: dict[str, float]
    stage_seconds: tuple[float, ...]
    parallel_seconds: float

    @property
    def acceptance_rate(self) -> float:
        """Accepted / checked drafts; NaN where none was checked."""
        return self.accepted / self.checked if self.checked else float("nan")

    @property
    def tokens_per_cycle(self) -> float:
        """N / K; NaN if all tokens came from the prefill."""
        return self.verified / self.cycles if self.cycles else float("nan")

    @property
    def equivalent_accepted_length(self) -> float:
        """n N / K: the speed-up over plain decoding if a cycle takes 1/n of a plain step."""
        return len(self.partition) * self.tokens_per_cycle

    @property
    def predicted_accepted_length(self) -> float:
        """n / (n - (n - 1) a) at the measured acceptance rate, the equivalent accepted length of an endless text."""
        return spd_accepted_length(self.acceptance_rate, len(self.partition)) if self.checked else float("nan")

    @property
    def mean_acceptance_length(self) -> float:
        """The equivalent accepted length, which compares with the figure of this name in other engines."""
        return self.equivalent_accepted_length

    def traced(self) -> Mapping[str, np.ndarray]:
        raise NotImplementedError("SPD keeps no trace of single steps; see phases and stage_seconds")

    def _derived(self) -> dict[str, Any]:
        return super()._derived() | {
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_cycle": self.tokens_per_cycle,
            "equivalent_accepted_length": self.equivalent_accepted_length,
            "predicted_accepted_length": self.predicted_accepted_length,
        }

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        return "\n".join(
            [
                self.summary(),
                f"stages of {', '.join(map(str, self.partition))} layers, drafts by {self.drafter}: {self.cycles} cycles, "
                f"{self.accepted} of {self.checked} drafts accepted ({self.acceptance_rate:.3f}), {self.flushes} flushes",
                f"equivalent accepted length {self.equivalent_accepted_length:.2f} "
                f"(the law at this acceptance: {self.predicted_accepted_length:.2f})",
                f"seconds: {phases}; with drafter and stages at once {self.parallel_seconds:.3f} in all",
            ]
        )
