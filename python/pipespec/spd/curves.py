"""The curves of a training run as SVG: losses, and how often drafts are the target's choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = ("#1f6fb4", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#008b8b", "#8b4513", "#555555", "#c71585")
_LOSSES = ("loss", "held_out_loss")
_APART = {"step", "tokens", "seconds", *_LOSSES}


def picture(history: Sequence[dict[str, Any]]) -> str:
    """Two panels over the steps: the losses in nats, and every other figure between 0 and 1 (agreement, acceptance). SVG by hand.

    ``history``: one record per validation, with ``step`` and figures by name. ValueError where it is empty.
    """
    if not history:
        raise ValueError("nothing to draw: no validation has been recorded")
    names = list(dict.fromkeys(name for figures in history for name in figures))
    rates = [name for name in names if name not in _APART and all(0 <= f[name] <= 1 for f in history if name in f)]
    losses = [name for name in _LOSSES if name in names]
    wide, high, left, above = 360, 220, 56, 56
    width, height = 2 * (left + wide) + 30, above + high + 50 + 14 * max(len(rates), len(losses))
    last = max(f["step"] for f in history)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-weight="bold" font-size="13">Training of the draft module, over the steps</text>',
    ]
    top = max((f[name] for f in history for name in losses if math.isfinite(f.get(name, math.nan))), default=1.0) or 1.0
    panels = (("loss, nats per token", losses, top * 1.05), ("share of drafts that are right", rates, 1.0))
    for panel, (title, shown, most) in enumerate(panels):
        x0 = left + panel * (left + wide)
        out.append(f'<text x="{x0}" y="{above - 10}">{title}</text>')
        out.append(f'<rect x="{x0}" y="{above}" width="{wide}" height="{high}" fill="none" stroke="#bbbbbb"/>')
        for i in range(5):
            y = above + high * (1 - i / 4)
            out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{most * i / 4:.2f}</text>')
            out.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + wide}" y2="{y:.1f}" stroke="#eeeeee"/>')
            x = x0 + wide * i / 4
            out.append(f'<text x="{x:.1f}" y="{above + high + 16}" text-anchor="middle">{last * i / 4:.0f}</text>')
        for i, name in enumerate(shown):
            colour = _COLOURS[i % len(_COLOURS)]
            points = [(f["step"], f[name]) for f in history if math.isfinite(f.get(name, math.nan))]
            line = " ".join(
                f"{x0 + wide * step / last:.1f},{above + high * (1 - value / most):.1f}" for step, value in points
            )
            out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
            label = escape(f"{name.replace('_', ' ')}: {points[-1][1]:.3f}") if points else escape(name)
            out.append(f'<text x="{x0}" y="{above + high + 36 + 14 * i}" fill="{colour}">{label}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
