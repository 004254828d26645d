"""Drawings as plain SVG, without a dependency: charts, bars, stacked bars, and the timeline of a trace. PNG needs a rasteriser."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

import numpy as np

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#888888", "#e69f00", "#56b4e9", "#5b3c88", "#000000")
"""Colours of curves, by Okabe and Ito: readers with any form of colour blindness tell them apart. The fifth is grey, for references."""
OURS, OTHERS, LOSS = "#0072b2", "#c9c9c9", "#d55e00"
"""Colours of bars."""

FONTS = "Helvetica, Arial, 'DejaVu Sans', 'Liberation Sans', 'Noto Sans', sans-serif"
"""By name, because a rasteriser has no fonts behind the generic name that all systems have."""

RASTERISER = "resvg_py"


class Drawing:
    """A white canvas of some pixels with a title in its upper left corner. Attributes are SVG's, with ``_`` for ``-``."""

    def __init__(self, title: str, width: float, height: float) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'font-family="{FONTS}" font-size="12" role="img" aria-label={quoteattr(title)}>'
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

    def dot(self, x: float, y: float, colour: str, ring: bool = False) -> None:
        style = {"fill": "white", "stroke": colour, "stroke_width": 1.5} if ring else {"fill": colour}
        self._add("circle", cx=float(x), cy=float(y), r=3.5 if ring else 3, **style)

    def svg(self) -> str:
        """The picture."""
        return "\n".join([*self._parts, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Series:
    """A curve; without a name it is not in the key. Dots (``marks``; rings, if also ``dashed``) for what was simulated or measured, with a thin line between them if ``joined``;
    or ``columns`` from 0, side by side with those of other series, over whole x values."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    marks: bool = False
    dashed: bool = False
    dotted: bool = False
    joined: bool = False
    columns: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes with their curves. Without ``categories`` the x axis is numeric; with them, x values are indices into these labels.

    ``y_high`` is the upper end of the y axis. ``x_low`` is the lower end of a numeric x axis; None: the smallest value. ``x_log``: the x axis is
    logarithmic, for positive values.
    """

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    categories: Sequence[str] = ()
    y_high: float | None = None
    x_low: float | None = None
    x_log: bool = False


_LEFT, _TOP, _ROW, _CHARACTER, _GAP = 66, 52, 16, 6.3, 18
"""Pixels: left of the axes, above them, a line of the key, a character, between two panels."""


def chart(
    title: str,
    panels: Sequence[Panel],
    note: str = "",
    size: tuple[int, int] = (420, 260),
    columns: int | None = None,
) -> str:
    """Draw panels side by side. Each y axis begins at 0, so that heights compare.

    Args:
        title: Above the panels.
        panels: The axes; the key of the curves stands below each.
        note: Small text below.
        size: Width and height of the axes.
        columns: Panels in a row. None: all.

    Raises:
        ValueError: A panel has no points, or some that are not finite.
    """
    wide, high = size
    columns = min(columns or len(panels), max(len(panels), 1)) or 1
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)] or [()]
    keys = [[_lines(s.name, wide) for s in panel.series] for panel in panels]
    heights = [
        _TOP
        + high
        + 48
        + _ROW * max((sum(map(len, keys[number])) for number in range(at, min(at + columns, len(panels)))), default=0)
        for at in range(0, max(len(panels), 1), columns)
    ]
    lowest = sum(heights) + _GAP * (len(rows) - 1)
    across = max((_LEFT + wide + _GAP) * columns + 30 - _GAP, 30 + len(title) * 7.4, 20 + len(note) * 5.2)
    drawing = Drawing(title, across, lowest + (20 if note else 0))
    number, top = 0, 0.0
    for row, height in zip(rows, heights, strict=True):
        for at, panel in enumerate(row):
            _draw(drawing, panel, keys[number], _LEFT + at * (_LEFT + wide + _GAP), top + _TOP, wide, high, title)
            number += 1
        top += height + _GAP
    if note:
        drawing.text(10, lowest + 10, note, font_size=10, fill="#555555")
    return drawing.svg()


def _lines(name: str, wide: float) -> list[str]:
    """A name in the key, in lines that fit below the axes."""
    return textwrap.wrap(name, int((wide - 30) / _CHARACTER))


def _draw(
    drawing: Drawing,
    panel: Panel,
    key: Sequence[list[str]],
    left: float,
    top: float,
    wide: float,
    high: float,
    title: str,
) -> None:
    points = [(x, y) for s in panel.series for x, y in zip(s.x, s.y, strict=True)]
    if not points or not all(math.isfinite(v) for p in points for v in p):
        raise ValueError(f"{title}: every series needs finite points")
    beside = [s for s in panel.series if s.columns]
    x_low, x_high = (0.0, len(panel.categories) - 1.0) if panel.categories else (min(points)[0], max(points)[0])
    if panel.x_low is not None:
        x_low = min(panel.x_low, x_low)
    if beside:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    if panel.x_log and x_low <= 0:
        raise ValueError(f"{title}: a logarithmic axis needs positive values")
    y_high = panel.y_high or 1.05 * max(y for _, y in points) or 1.0
    bottom, right = top + high, left + wide

    def place(x: float, y: float) -> tuple[float, float]:
        if panel.x_log:
            share = math.log(x / x_low) / (math.log(x_high / x_low) or 1.0)
        else:
            share = (x - x_low) / ((x_high - x_low) or 1.0)
        return left + wide * share, bottom - high * y / y_high

    drawing.text(left, top - 8, panel.title)
    for value in _ticks(0.0, y_high):
        y = place(x_low, value)[1]
        drawing.line((left, y), (right, y), "#dddddd")
        drawing.text(left - 6, y + 4, f"{value:g}", text_anchor="end")
    if panel.categories:
        labels: dict[float, str] = dict(enumerate(panel.categories))
    else:
        values = _powers(x_low, x_high) if panel.x_log else _ticks(x_low, x_high)
        if all(x == round(x) for x, _ in points):  # numbers of something
            values = [value for value in values if value == round(value)]
        labels = {value: f"{value:g}" for value in values}
    for value, label in labels.items():
        x = place(value, 0.0)[0]
        drawing.line((x, bottom), (x, bottom + 4), "#555555")
        drawing.text(x, bottom + 17, label, text_anchor="middle")
    drawing.line((left, bottom), (right, bottom), "#555555")
    drawing.text((left + right) / 2, bottom + 33, panel.x_label, text_anchor="middle")
    middle = top + high / 2
    drawing.text(left - 52, middle, panel.y_label, text_anchor="middle", transform=f"rotate(-90 {left - 52} {middle})")
    at = bottom + 52
    for s, lines in zip(panel.series, key, strict=True):
        colour = COLOURS[s.colour % len(COLOURS)]
        placed = [place(a, b) for a, b in zip(s.x, s.y, strict=True)]
        style: dict[str, object] = {"stroke_width": 2} | (
            {"stroke_dasharray": "6 4"} if s.dashed else {"stroke_dasharray": "2 4"} if s.dotted else {}
        )
        if s.columns:
            pitch = wide / (x_high - x_low)
            bar = 0.8 * pitch / len(beside)
            offset = -0.4 * pitch + bar * beside.index(s)
            for x, y in placed:
                drawing.rect(x + offset, y, bar, bottom - y, colour)
            if lines:
                drawing.rect(left + 6, at - 10, 12, 10, colour)
        elif s.marks:
            if s.joined:
                drawing.curve(placed, colour, stroke_width=1)
            for x, y in placed:
                drawing.dot(x, y, colour, s.dashed)
            if lines:
                drawing.dot(left + 12, at - 4, colour, s.dashed)
        else:
            drawing.curve(placed, colour, **style)
            if lines:
                drawing.line((left, at - 4), (left + 24, at - 4), colour, **style)
        for line in lines:
            drawing.text(left + 30, at, line)
            at += _ROW


def _powers(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic axis: powers of ten, with 2 and 5 between them where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [f * 10.0**d for d in decades for f in steps if low <= f * 10.0**d <= high]
        if len(found) >= 3:
            break
    return [float(f"{value:.6g}") for value in found]


def _ticks(low: float, high: float) -> list[float]:
    """About six round numbers within [low, high]."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(f for f in (1, 2, 5, 10) if span / (step * f) <= 7)
    return [round(k * step, 10) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Bar:
    """A bar with ``text`` behind it. Without a value there is only the text."""

    label: str
    value: float | None
    text: str
    colour: str = OTHERS


def bars(title: str, rows: Sequence[Bar], caption: str = "", reference: float | None = None) -> str:
    """Draw horizontal bars from 0, one below the other, and a dashed line at ``reference``.

    Raises:
        ValueError: No bar has a length.
    """
    bar, longest = 24, max((row.value or 0.0 for row in rows), default=0.0)
    if not longest > 0:
        raise ValueError(f"{title}: nothing to draw")
    left, scale = (
        max(250.0, 20 + _CHARACTER * max(len(row.label) for row in rows)),
        330 / max(longest, reference or 0.0),
    )
    height = bar * len(rows) + 60
    ends = [left + (row.value or 0.0) * scale + 16 + _CHARACTER * len(row.text) for row in rows]
    drawing = Drawing(title, max(760.0, *ends, 30 + len(title) * 7.4, 20 + len(caption) * 5.2), height)
    if reference is not None:
        x = left + reference * scale
        drawing.line((x, 32), (x, 36 + bar * len(rows)), "#333333", stroke_dasharray="4 3")
    for i, row in enumerate(rows):
        y, width = 36 + i * bar, (row.value or 0.0) * scale
        drawing.text(left - 8, y + 15, row.label, text_anchor="end")
        if row.value is not None:
            drawing.rect(left, y + 2, width, bar - 6, row.colour)
        halo = {"stroke": "white", "stroke_width": 4, "paint_order": "stroke"}
        drawing.text(left + width + 6, y + 15, row.text, fill="black" if row.value is not None else "#555555", **halo)
    drawing.text(10, height - 8, caption, font_size=10, fill="#555555")
    return drawing.svg()


def stacked(
    title: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], unit: str, caption: str = ""
) -> str:
    """Draw horizontal bars of several parts, with the sum behind each and a key of the parts.

    Args:
        title: Above the bars.
        rows: Label, and one length per part.
        parts: Names of the parts.
        unit: Of the lengths.
        caption: Small text below.

    Raises:
        ValueError: No bar has a length.
    """
    bar, longest = 26, max((sum(values) for _, values in rows), default=0.0)
    if not longest > 0:
        raise ValueError(f"{title}: nothing to draw")
    left = max(160.0, 20 + _CHARACTER * max(len(label) for label, _ in rows))
    keys = [30 + _CHARACTER * len(part) for part in parts]
    height = 64 + bar * len(rows) + 28
    drawing = Drawing(title, max(left + 440.0, 20 + sum(keys), 20 + len(caption) * 5.2, 30 + len(title) * 7.4), height)
    x = 10.0
    for i, (part, across) in enumerate(zip(parts, keys, strict=True)):
        drawing.rect(x, 32, 12, 12, COLOURS[i % len(COLOURS)])
        drawing.text(x + 16, 42, part)
        x += across
    for i, (label, values) in enumerate(rows):
        y, x = 56 + i * bar, left
        drawing.text(left - 8, y + 16, label, text_anchor="end")
        for j, value in enumerate(values):
            drawing.rect(x, y + 2, 330 * value / longest, bar - 6, COLOURS[j % len(COLOURS)])
            x += 330 * value / longest
        drawing.text(x + 6, y + 16, f"{sum(values):.4g} {unit}")
    drawing.text(10, height - 8, caption, font_size=10, fill="#555555")
    return drawing.svg()


def png(svg: str, scale: float = 2.0) -> bytes:
    """A drawing as PNG, ``scale`` pixels per unit.

    Raises:
        ImportError: The rasteriser, an optional package, is not installed.
        RuntimeError: The system has no font, so the picture would have no text.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise ImportError(
            f"PNG needs the package {RASTERISER}: pip install 'pipespec[plots]'; the SVG needs nothing"
        ) from error
    # The rasteriser leaves text without a font out, and says nothing.
    frame = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    letter = f'<text x="2" y="16" font-family="{FONTS}">M</text>'
    blank, written = (bytes(resvg_py.svg_to_bytes(svg_string=frame.format(t))) for t in ("", letter))
    if blank == written:
        raise RuntimeError("PNG needs a font such as DejaVu Sans, and the system has none; the SVG needs nothing")
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=scale))


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
