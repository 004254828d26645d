"""Checks of numbers, with the same messages in the formulas and the perf model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def probability(value: float, name: str) -> float:
    """Return ``value`` if it lies in [0, 1], else raise ``ValueError``."""
    if not 0.0 <= value <= 1.0:  # also refuses NaN
        raise ValueError(f"{name} is a probability, 0 to 1, not {value}")
    return float(value)


def positive(value: float, name: str) -> float:
    """Return ``value`` if it is finite and above zero, else raise ``ValueError``."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, not {value}")
    return float(value)


def all_positive(values: Sequence[float] | np.ndarray, name: str) -> list[float]:
    """:func:`positive` of each value."""
    return [positive(value, name) for value in np.asarray(values, dtype=np.float64).tolist()]


def non_negative(value: float, name: str) -> float:
    """Return ``value`` if it is finite and at least zero, else raise ``ValueError``."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must not be negative, and finite, not {value}")
    return float(value)


def same_length(name: str, values: Sequence[object], count: int, per: str) -> None:
    """Raise ``ValueError`` unless there are ``count`` values."""
    if len(values) != count:
        raise ValueError(f"{name}: one per {per} is needed, {count}, not {len(values)}")
