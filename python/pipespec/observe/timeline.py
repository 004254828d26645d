"""A picture of a trace as SVG: who ran when, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

import numpy as np

_PREFILL, _OWN, _ACCEPTED, _REJECTED, _ROLLBACK = "#9a9a9a", "#2a78b8", "#4c9a5b", "#e0a08c", "#c0261c"
_LEFT, _TOP, _WIDTH, _TRACK, _BAR = 80, 62, 1100, 40, 26
_TICKS = 10


def timeline(stages: Mapping[str, np.ndarray], title: str = "pipespec") -> str:
    """One row per stage, one bar per step. A step that verified is green up to the share of its hints that held.

    ``stages``: as ``pipespec_kernels.trace.TraceMemory.read`` has them. Raises ``ValueError`` where nothing was traced.
    """
    if not any(map(len, stages.values())):
        raise ValueError("nothing to draw: no stage took a step")
    begin = min(int(steps["start_ns"].min()) for steps in stages.values() if len(steps))
    span = max(max(int(steps["end_ns"].max()) for steps in stages.values() if len(steps)) - begin, 1)
    width, bottom = _LEFT + _WIDTH + 30, _TOP + _TRACK * len(stages)
    height = bottom + 50

    def across(time_ns: int) -> float:
        return _LEFT + _WIDTH * (time_ns - begin) / span

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-weight="bold" font-size="13">{escape(title)}</text>',
    ]
    legend = {
        "prefill": _PREFILL,
        "tokens of its own": _OWN,
        "accepted": _ACCEPTED,
        "rejected": _REJECTED,
        "rollback": _ROLLBACK,
    }
    for i, (label, colour) in enumerate(legend.items()):
        place = _LEFT + 150 * i
        out.append(f'<rect x="{place}" y="34" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{place + 18}" y="44">{label}</text>')
    for i in range(_TICKS + 1):
        x = _LEFT + _WIDTH * i / _TICKS
        out.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{span * i / _TICKS / 1e6:.1f}</text>')
    out.append(f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">ms</text>')
    for track, (name, steps) in enumerate(stages.items()):
        y = _TOP + _TRACK * track + (_TRACK - _BAR) / 2
        out.append(f'<text x="{_LEFT - 8}" y="{y + _BAR / 2 + 4}" text-anchor="end">{escape(name)}</text>')
        for step in steps:
            x, end = across(int(step["start_ns"])), across(int(step["end_ns"]))
            hints = int(step["hints"])
            bars = [(1.0, _PREFILL if step["prefill"] else _OWN)]
            if hints:
                share = int(step["accepted"]) / hints
                bars = [(1.0 - share, _REJECTED), (share, _ACCEPTED)]
            top = y
            for share, colour in bars if step["prefill"] or step["fed"] else []:
                if share:
                    out.append(
                        f'<rect x="{x:.2f}" y="{top:.1f}" width="{end - x:.2f}" height="{_BAR * share:.1f}" fill="{colour}" '
                        'stroke="white" stroke-width="0.3"/>'
                    )
                top += _BAR * share
            if step["rollbacks"]:
                out.append(
                    f'<line x1="{x:.2f}" y1="{y - 4}" x2="{x:.2f}" y2="{y + _BAR + 4}" stroke="{_ROLLBACK}" stroke-width="1"/>'
                )
    return "\n".join([*out, "</svg>"]) + "\n"
