"""Drawings as plain SVG, without a dependency: line charts, bars, and the timeline of a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

import numpy as np

COLOURS = ("#2a78b8", "#d1603d", "#4c9a5b", "#8a5ba6", "#888888", "#b8912a", "#008b8b", "#b0306a", "#8b4513")
OURS, OTHERS = "#2a78b8", "#c9c9c9"
"""Colours of bars."""


class Drawing:
    """A white canvas of some pixels with a title in its upper left corner. Attributes are SVG's, with ``_`` for ``-``."""

    def __init__(self, title: str, width: float, height: float) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12">'
        ]
        self.rect(0, 0, width, height, "white")
        self.text(10, 20, title, font_weight="bold", font_size=13)

    def _add(self, name: str, content: str = "", /, **attributes: object) -> None:
        shown = {key: f"{value:.2f}" if isinstance(value, float) else str(value) for key, value in attributes.items()}
        written = " ".join(f"{key.replace('_', '-')}={quoteattr(value)}" for key, value in shown.items())
        self._parts.append(f"<{name} {written}>{content}</{name}>")

    def text(self, x: float, y: float, text: str, **attributes: object) -> None:
        self._add("text", escape(text), x=float(x), y=float(y), **attributes)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **attributes: object) -> None:
        self._add("rect", x=float(x), y=float(y), width=float(width), height=float(height), fill=fill, **attributes)

    def line(self, begin: tuple[float, float], end: tuple[float, float], stroke: str, **attributes: object) -> None:
        (x1, y1), (x2, y2) = begin, end
        self._add("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=stroke, **attributes)

    def curve(self, points: Sequence[tuple[float, float]], stroke: str, **attributes: object) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polyline", points=path, fill="none", stroke=stroke, **attributes)

    def dot(self, x: float, y: float, fill: str) -> None:
        self._add("circle", cx=float(x), cy=float(y), r=3, fill=fill)

    def svg(self) -> str:
        """The picture."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Series:
    """A curve, or dots (``marks``) for what was simulated or measured."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes with their curves. Without ``categories`` the x axis is numeric; with them, x values are indices into these labels."""

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    categories: Sequence[str] = ()
    y_high: float | None = None


_LEFT, _TOP, _ROW = 60, 52, 18


def chart(title: str, panels: Sequence[Panel], note: str = "", size: tuple[int, int] = (420, 260)) -> str:
    """Draw panels side by side. Each y axis begins at 0, so that heights compare.

    Args:
        title: Above the panels.
        panels: The axes; the key of the curves stands below each.
        note: Small text below.
        size: Width and height of the axes.

    Raises:
        ValueError: A panel has no points, or some that are not finite.
    """
    wide, high = size
    lowest = _TOP + high + 48 + _ROW * max((len(panel.series) for panel in panels), default=0)
    drawing = Drawing(title, (_LEFT + wide) * max(len(panels), 1) + 30, lowest + (20 if note else 0))
    for number, panel in enumerate(panels):
        _draw(drawing, panel, _LEFT + number * (_LEFT + wide), wide, high, title)
    if note:
        drawing.text(10, lowest + 10, note, font_size=10, fill="#555555")
    return drawing.svg()


def _draw(drawing: Drawing, panel: Panel, left: float, wide: float, high: float, title: str) -> None:
    points = [(x, y) for s in panel.series for x, y in zip(s.x, s.y, strict=True)]
    if not points or not all(math.isfinite(v) for p in points for v in p):
        raise ValueError(f"{title}: every series needs finite points")
    x_low, x_high = (0.0, len(panel.categories) - 1.0) if panel.categories else (min(points)[0], max(points)[0])
    y_high = panel.y_high or 1.05 * max(y for _, y in points) or 1.0
    bottom, right = _TOP + high, left + wide

    def place(x: float, y: float) -> tuple[float, float]:
        return left + wide * (x - x_low) / ((x_high - x_low) or 1.0), bottom - high * y / y_high

    drawing.text(left, _TOP - 8, panel.title)
    for value in _ticks(0.0, y_high):
        y = place(x_low, value)[1]
        drawing.line((left, y), (right, y), "#dddddd")
        drawing.text(left - 6, y + 4, f"{value:g}", text_anchor="end")
    labels: dict[float, str] = dict(enumerate(panel.categories)) or {
        value: f"{value:g}" for value in _ticks(x_low, x_high)
    }
    for value, label in labels.items():
        x = place(value, 0.0)[0]
        drawing.line((x, bottom), (x, bottom + 4), "#555555")
        drawing.text(x, bottom + 17, label, text_anchor="middle")
    drawing.line((left, bottom), (right, bottom), "#555555")
    drawing.text((left + right) / 2, bottom + 33, panel.x_label, text_anchor="middle")
    middle = _TOP + high / 2
    drawing.text(left - 42, middle, panel.y_label, text_anchor="middle", transform=f"rotate(-90 {left - 42} {middle})")
    for i, s in enumerate(panel.series):
        colour, y = COLOURS[s.colour % len(COLOURS)], bottom + 52 + _ROW * i
        placed = [place(a, b) for a, b in zip(s.x, s.y, strict=True)]
        style: dict[str, object] = {"stroke_width": 2} | ({"stroke_dasharray": "6 4"} if s.dashed else {})
        if s.marks:
            for x, at in placed:
                drawing.dot(x, at, colour)
            drawing.dot(left + 12, y - 4, colour)
        else:
            drawing.curve(placed, colour, **style)
            drawing.line((left, y - 4), (left + 24, y - 4), colour, **style)
        drawing.text(left + 30, y, s.name)


def _ticks(low: float, high: float) -> list[float]:
    """About six round numbers within [low, high]."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(f for f in (1, 2, 5, 10) if span / (step * f) <= 7)
    return [round(k * step, 10) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Bar:
    """A bar with ``text`` behind it."""

    label: str
    value: float
    text: str
    colour: str = OTHERS


def bars(title: str, rows: Sequence[Bar], caption: str = "") -> str:
    """Draw horizontal bars from 0, one below the other.

    Raises:
        ValueError: No bar has a length.
    """
    bar, left, longest = 24, 250, max((row.value for row in rows), default=0.0)
    if not longest > 0:
        raise ValueError(f"{title}: nothing to draw")
    height = bar * len(rows) + 60
    drawing = Drawing(title, 760, height)
    for i, row in enumerate(rows):
        y, width = 36 + i * bar, row.value * 330 / longest
        drawing.text(left - 8, y + 15, row.label, text_anchor="end")
        drawing.rect(left, y + 2, width, bar - 6, row.colour)
        drawing.text(left + width + 6, y + 15, row.text)
    drawing.text(10, height - 8, caption, font_size=10, fill="#555555")
    return drawing.svg()


STEP_COLOURS = {
    "prefill": "#9a9a9a",
    "own token": "#2a78b8",
    "accepted": "#4c9a5b",
    "rejected": "#e0a08c",
    "rollback": "#c0261c",
}


def timeline(stages: Mapping[str, np.ndarray], title: str = "pipespec") -> str:
    """Draw one track per stage with one bar per step. The green share of a verification's bar is the share of accepted draft tokens.

    Args:
        stages: Steps by stage, as ``pipespec_kernels.trace.TraceMemory.read`` returns them.
        title: Above the tracks.

    Raises:
        ValueError: No stage took a step.
    """
    if not any(map(len, stages.values())):
        raise ValueError("nothing to draw: no stage took a step")
    left, top, wide, track, bar, ticks = 80, 62, 1100, 40, 26, 10
    begin = min(int(steps["start_ns"].min()) for steps in stages.values() if len(steps))
    span = max(max(int(steps["end_ns"].max()) for steps in stages.values() if len(steps)) - begin, 1)
    bottom = top + track * len(stages)
    drawing = Drawing(title, left + wide + 30, bottom + 50)
    for i, (label, colour) in enumerate(STEP_COLOURS.items()):
        drawing.rect(left + 150 * i, 34, 12, 12, colour)
        drawing.text(left + 150 * i + 18, 44, label)
    for i in range(ticks + 1):
        x = left + wide * i / ticks
        drawing.line((x, top), (x, bottom), "#eeeeee")
        drawing.text(x, bottom + 18, f"{span * i / ticks / 1e6:.1f}", text_anchor="middle")
    drawing.text(left + wide / 2, bottom + 38, "ms", text_anchor="middle")
    for number, (name, steps) in enumerate(stages.items()):
        y = top + track * number + (track - bar) / 2
        drawing.text(left - 8, y + bar / 2 + 4, name, text_anchor="end")
        for step in steps:
            x, end = (left + wide * (int(step[key]) - begin) / span for key in ("start_ns", "end_ns"))
            shares = {"prefill" if step["prefill"] else "own token": 1.0}
            if step["draft_tokens"]:
                accepted = int(step["accepted"]) / int(step["draft_tokens"])
                shares = {"rejected": 1.0 - accepted, "accepted": accepted}
            at = y
            for kind, share in shares.items() if step["prefill"] or step["fed"] else ():
                if share:
                    drawing.rect(x, at, end - x, bar * share, STEP_COLOURS[kind], stroke="white", stroke_width=0.3)
                at += bar * share
            if step["rollbacks"]:
                drawing.line((x, y - 4), (x, y + bar + 4), STEP_COLOURS["rollback"])
    return drawing.svg()
