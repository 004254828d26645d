"""The curves of a training run as SVG: losses, agreement and acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipespec.observe.plot import Panel, Series, chart

_LOSSES = ("loss", "held_out_loss")
_OTHERS = {"step", "tokens", "seconds", "rate", *_LOSSES}


def picture(history: Sequence[dict[str, Any]]) -> str:
    """Draw panels over the steps: losses in nats, every figure between 0 and 1 (agreement, acceptance), and the learning rate.

    Args:
        history: One record per validation, with ``step`` and figures by name. Values that are not finite are left out.

    Raises:
        ValueError: The history is empty.
    """
    if not history:
        raise ValueError("nothing to draw: no validation has been recorded")
    names = list(dict.fromkeys(name for figures in history for name in figures))
    rates = [name for name in names if name not in _OTHERS and all(0 <= f[name] <= 1 for f in history if name in f)]

    def series(shown: Sequence[str]) -> list[Series]:
        found: list[Series] = []
        for name in shown:
            points = [(f["step"], f[name]) for f in history if math.isfinite(f.get(name, math.nan))]
            if points:
                steps, values = zip(*points, strict=True)
                found.append(Series(f"{name.replace('_', ' ')}: {values[-1]:.3g}", steps, values, len(found)))
        return found

    panels = [
        Panel(series(_LOSSES), "loss, nats per token", "steps"),
        Panel(series(rates), "share of draft tokens that are right", "steps", y_high=1.0),
        Panel(series(["rate"]), "learning rate", "steps"),
    ]
    return chart("Training of the draft module", [p for p in panels if p.series], size=(360, 220))
