"""SpeculativeReport: what one call on a partitioned target did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipespec.observe import Report
from pipespec.planning.closed_form import spd_accepted_length

PHASES = ("prefill", "draft", "stages", "verify", "other")


@dataclass(frozen=True, kw_only=True)
class SpeculativeReport(Report):
    """One call of ``SpeculativePipeline.generate()``; counts are summed over the rows.

    ``partition``: layers per stage. ``verified``: N, tokens the target has decided on, the prefill's included (more than ``tokens`` where a
    criterion ended a row that had run ahead in its batch). ``cycles``: K, of each row while it ran; ``rounds``: cycles of all rows together.
    ``checked``, ``accepted``: drafts. ``flushes``: rejections that emptied a pipe. ``phases``: seconds, together the call's ``seconds``;
    ``stage_seconds``: how long each stage was busy in cycles.
    ``parallel_seconds``: the same call had drafter and stages run at once, each cycle lasting as long as the slowest of them; measured
    times put together, nothing for transfers.
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
        """N / K; NaN where the prefill's tokens were all."""
        return self.verified / self.cycles if self.cycles else float("nan")

    @property
    def equivalent_accepted_length(self) -> float:
        """n N / K: the speed-up over plain decoding if a cycle took 1/n of its step."""
        return len(self.partition) * self.tokens_per_cycle

    @property
    def predicted_accepted_length(self) -> float:
        """What the law n / (n - (n - 1) a) makes of the measured acceptance rate, for an endless text."""
        return spd_accepted_length(self.acceptance_rate, len(self.partition)) if self.checked else float("nan")

    @property
    def mean_acceptance_length(self) -> float:
        """The equivalent accepted length, which is what compares with other engines' figure of this name."""
        return self.equivalent_accepted_length

    def traced(self) -> Mapping[str, np.ndarray]:
        raise NotImplementedError("a target in stages keeps no trace of single steps; see phases and stage_seconds")

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_cycle": self.tokens_per_cycle,
            "equivalent_accepted_length": self.equivalent_accepted_length,
            "predicted_accepted_length": self.predicted_accepted_length,
        }

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        return "\n".join(
            [
                f"{self.schedule}: {self.tokens} tokens in {self.seconds:.3f} s = {self.tokens_per_second:.1f} tokens/s, "
                f"first after {self.seconds_to_first_token * 1e3:.0f} ms",
                f"stages of {', '.join(map(str, self.partition))} layers, drafts by {self.drafter}: {self.cycles} cycles, "
                f"{self.accepted} of {self.checked} drafts accepted ({self.acceptance_rate:.3f}), {self.flushes} flushes",
                f"equivalent accepted length {self.equivalent_accepted_length:.2f} "
                f"(the law at this acceptance: {self.predicted_accepted_length:.2f})",
                f"seconds: {phases}; with drafter and stages at once {self.parallel_seconds:.3f} in all",
            ]
        )
