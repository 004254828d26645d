"""Line charts and bars as plain SVG, in a few lines: enough for the figures of docs/, no dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_COLOURS = ("#2a78b8", "#d1603d", "#4c9a5b", "#8a5ba6", "#888888", "#b8912a")
OURS, OTHERS = "#2a78b8", "#c9c9c9"  # of bars
_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 40, 420, 260


@dataclass(frozen=True)
class Series:
    """``marks``: dots instead of a line (what was simulated or measured, beside the curve that predicts it)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    marks: bool = False
    dashed: bool = False


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series], note: str = "") -> str:
    """The picture. The y axis begins at 0, so that heights compare. Raises ``ValueError`` for series without finite points."""
    points = [(x, y) for s in series for x, y in zip(s.x, s.y, strict=True)]
    if not points or not all(math.isfinite(v) for p in points for v in p):
        raise ValueError(f"{title}: every series needs finite points")
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    y_high = 1.05 * max(p[1] for p in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1.0)
        return _LEFT + _WIDTH * across, _TOP + _HEIGHT * (1 - y / y_high)

    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + 230}" height="{bottom + 60}" font-family="sans-serif" font-size="12">',
        f'<rect width="{right + 230}" height="{bottom + 60}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-weight="bold">{escape(title)}</text>',
    ]
    for value in _ticks(0.0, y_high):
        y = place(x_low, value)[1]
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(x_low, x_high):
        x = place(value, 0.0)[0]
        parts.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#555555"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<line x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#555555"/>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="16" y="{_TOP + _HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {_TOP + _HEIGHT / 2})">'
        f"{escape(y_label)}</text>"
    )
    for i, s in enumerate(series):
        colour, y = _COLOURS[s.colour % len(_COLOURS)], _TOP + 12 + 20 * i
        placed = [place(a, b) for a, b in zip(s.x, s.y, strict=True)]
        if s.marks:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in placed]
            parts.append(f'<circle cx="{right + 24}" cy="{y - 4}" r="3" fill="{colour}"/>')
        else:
            style = f'stroke="{colour}" stroke-width="2"' + (' stroke-dasharray="6 4"' if s.dashed else "")
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
            parts.append(f'<polyline points="{path}" fill="none" {style}/>')
            parts.append(f'<line x1="{right + 12}" y1="{y - 4}" x2="{right + 36}" y2="{y - 4}" {style}/>')
        parts.append(f'<text x="{right + 42}" y="{y}">{escape(s.name)}</text>')
    if note:
        parts.append(f'<text x="{_LEFT}" y="{bottom + 54}" font-size="10" fill="#555555">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within [low, high], about six."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(f for f in (1, 2, 5, 10) if span / (step * f) <= 7)
    return [round(k * step, 10) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Bar:
    """``text`` stands behind the bar. ``value`` 0: no bar, only the text."""

    label: str
    value: float
    text: str
    colour: str = OTHERS


def bars(title: str, rows: Sequence[Bar], caption: str = "") -> str:
    """The picture: one bar below the other, all from 0. Raises ``ValueError`` where none has a length."""
    bar, left, longest = 24, 250, max((row.value for row in rows), default=0.0)
    if not longest > 0:
        raise ValueError(f"{title}: nothing to draw")
    height = bar * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="760" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-weight="bold">{escape(title)}</text>',
    ]
    for i, row in enumerate(rows):
        y, width = 36 + i * bar, row.value * 330 / longest
        parts += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="{bar - 6}" fill="{row.colour}"/>',
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{escape(row.text)}</text>',
        ]
    parts.append(f'<text x="10" y="{height - 8}" font-size="10" fill="#555555">{escape(caption)}</text></svg>')
    return "\n".join(parts) + "\n"
