"""Calibration: what the confidence of draft tokens has said about their acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Calibration:
    """How often a stage keeps the draft tokens of the stage upstream, by the confidence that upstream stated.

    Attributes:
        curve: One entry per bin of the confidence in which draft tokens were seen, ascending: the probability that upstream stated; the chance that is
            calculated from it; and the number of draft tokens that it comes from, older ones counting less.
        outcomes: Draft tokens of the call that were kept or rejected. Those behind a rejected one do not count.
        brier: Mean of (chance - outcome)^2 over these, with the chance before and the outcome 1 or 0; NaN without outcomes. With a chance that is always
            the acceptance rate a, it would be a (1 - a).
    """

    curve: tuple[tuple[float, float, int], ...]
    outcomes: int
    brier: float

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Calibration:
        """Of what happened between two :meth:`pipespec_kernels.state.StateBlock.calibration`."""
        outcomes = after["outcomes"] - before["outcomes"]
        error = after["squared_error"] - before["squared_error"]
        bins = zip(after["stated"], after["chance"], after["seen"], strict=True)
        curve = tuple((float(s), float(c), int(n)) for s, c, n in bins if n > 0)
        return cls(curve, outcomes, error / outcomes if outcomes > 0 else float(np.nan))
