"""Survey: one chain run with many settings, predicted against measured, and the picture of it.

The settings take turns prompt by prompt, so that a noisy machine disturbs all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.drivers.base import Policy
from pipespec.pipeline import Pipeline
from pipespec.planning import planner
from pipespec.planning.planner import Call, Candidate
from pipespec.planning.profile import Profile, agreement_on, threads_set
from pipespec.planning.simulator import Answers

Told = Callable[[str, int, int], None]


@dataclass
class Point:
    """A setting. ``measured``: tokens per second, one per repeat; ``identical``: whether its text was always the target's."""

    candidate: Candidate
    measured: list[float] = field(default_factory=list)
    identical: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.candidate.rate / self.median - 1

    def to_dict(self) -> dict[str, Any]:
        c = self.candidate
        return {
            "schedule": c.schedule,
            "captured": c.captured,
            "drafts": list(c.drafts),
            "windows": list(c.windows),
            "wait": c.wait,
            "decode_meanwhile": c.decode_meanwhile,
            "threads": c.threads,
            "predicted": c.rate,
            "ideal": c.ideal,
            "tokens_per_step": c.tokens_per_step,
            "measured": self.measured,
            "median": self.median,
            "identical": self.identical,
        }


def settings(
    profile: Profile, *, windows: Sequence[int] = (1, 2, 4, 8, 16), waits: Sequence[int] = (0,)
) -> list[Candidate]:
    """Plain decoding, and every subset of the drafts with every window in both schedules."""
    found = [Candidate("plain", (), (), 0, profile.threads, 0.0)]
    for drafts in planner.subsets(profile):
        for window in windows:
            all_windows = (min(window, 4),) * (len(drafts) - 1) + (window,)
            if window <= 8:
                found.append(Candidate("lockstep", drafts, all_windows, 0, profile.threads, 0.0))
            threads = max(1, profile.threads - len(drafts))
            found += [Candidate("workers", drafts, all_windows, w, threads, 0.0) for w in waits if w <= window]
    return found


def calibrate(models: Sequence[PreTrainedModel], prompts: Sequence[torch.Tensor], new_tokens: int) -> Answers:
    """Agreement on what the target says to ``prompts`` (each LongTensor ``[1, S]``)."""
    tables = []
    with Pipeline(models[-1], schedule="plain") as plain:
        for ids in prompts:
            text = plain.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0].cpu().numpy()
            if len(text) > ids.shape[1]:
                tables.append(agreement_on(models, text, ids.shape[1], own_text=True))
    if not tables:
        raise ValueError("nothing to calibrate with: the target says nothing to these prompts")
    return Answers(table=np.concatenate(tables))


def call_of(prompts: Sequence[torch.Tensor], new_tokens: int) -> Call:
    return Call(1, round(statistics.mean(ids.shape[1] for ids in prompts)), new_tokens)


class Runner:
    """Runs settings of one chain; pipelines are made once per schedule and subset."""

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        self.models = list(models)
        self._pipes: dict[tuple[str, tuple[int, ...]], Pipeline] = {}

    def pipe(self, c: Candidate) -> Pipeline:
        at = (c.way, c.drafts)
        if at not in self._pipes:
            drafts = [self.models[i] for i in c.drafts]
            self._pipes[at] = Pipeline(self.models[-1], drafts, schedule=c.schedule, graphs=c.captured)
        return self._pipes[at]

    def run(self, c: Candidate, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, int, float]:
        """Text, new tokens, seconds."""
        pipe = self.pipe(c)
        driver = pipe._driver
        assert driver is not None
        driver.steer(Policy(c.windows, c.wait, c.decode_meanwhile))
        # Workers share out what there is; the others have the number they are told.
        with threads_set(c.threads + (len(c.drafts) if c.schedule == "workers" else 0)):
            text = pipe.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        assert pipe.report is not None
        return text, pipe.report.tokens, pipe.report.seconds

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()


def survey(
    models: Sequence[PreTrainedModel],
    profile: Profile,
    answers: Answers,
    candidates: Sequence[Candidate],
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    repeats: int,
    told: Told = lambda what, done, total: None,
    between: Callable[[], None] = lambda: None,
    cores: int | None = None,
) -> list[Point]:
    """Predict and measure every candidate over ``prompts``. ``between``: called before each prompt's turn, for instance to measure
    the machine; ``cores``: see :func:`planner.predict`."""
    call = call_of(prompts, new_tokens)
    points = [Point(planner.predict(profile, answers, c, call, cores=cores)) for c in candidates]
    runner = Runner(models)
    try:
        for done, point in enumerate(points):
            told("warming up", done, len(points))
            runner.run(point.candidate, prompts[0], new_tokens)
        total, done = repeats * len(prompts) * len(points), 0
        texts: dict[int, torch.Tensor] = {}
        for _ in range(repeats):
            tokens, seconds = [0] * len(points), [0.0] * len(points)
            for number, ids in enumerate(prompts):
                between()
                for i, point in enumerate(points):
                    told("measuring", done, total)
                    text, n, s = runner.run(point.candidate, ids, new_tokens)
                    tokens[i] += n
                    seconds[i] += s
                    done += 1
                    point.identical &= torch.equal(texts.setdefault(number, text), text)
            for point, n, s in zip(points, tokens, seconds, strict=True):
                point.measured.append(n / s)
    finally:
        runner.close()
    return points


def table(points: Sequence[Point], names: Sequence[str]) -> str:
    """Predicted and measured, line by line."""
    lines = [f"{'schedule':<18}{'stages':<28}{'windows':>9}{'wait':>6}{'predicted':>11}{'measured':>10}{'error':>8}"]
    for p in points:
        c = p.candidate
        stages = " > ".join([*(names[i] for i in c.drafts), names[-1]])
        windows = "/".join(map(str, c.windows)) or "-"
        lines.append(
            f"{c.way:<18}{stages:<28}{windows:>9}{c.wait:>6}{c.rate:>11.1f}{p.median:>10.1f}{100 * p.error:>7.1f}%"
        )
    return "\n".join(lines)


_COLOURS = ("#2a78b8", "#c2571a", "#3a8f3a", "#8a4fb0", "#555555", "#b0306a")


def picture(points: Sequence[Point], names: Sequence[str], caption: str) -> str:
    """Throughput over the window, one panel per number of stages and schedule: lines predicted, dots measured. SVG by hand."""
    groups: dict[tuple[str, int], dict[tuple[int, ...], list[Point]]] = {}
    plain: Point | None = None
    for p in points:
        c = p.candidate
        if c.schedule == "plain":
            plain = p
            continue
        if c.wait == 0:
            groups.setdefault((c.way, len(c.drafts) + 1), {}).setdefault(c.drafts, []).append(p)
    if not groups:
        raise ValueError("nothing to draw: no setting has a draft")
    top = max(max(p.candidate.rate, max(p.measured, default=0.0)) for p in points) * 1.08
    windows = sorted({p.candidate.windows[-1] for p in points if p.candidate.windows})
    wide, high, left, above = 250, 190, 56, 56
    keys = sorted(groups, key=lambda g: (g[1], g[0]))
    width, height = left + (wide + 30) * len(keys) + 10, above + high + 90
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-weight="bold" font-size="13">tokens/s over the last draft\'s window: lines predicted, dots measured</text>',
    ]

    def at(window: int, rate: float, x0: float) -> tuple[float, float]:
        step = wide / max(1, len(windows) - 1)
        return x0 + windows.index(window) * step, above + high * (1 - rate / top)

    for panel, key in enumerate(keys):
        x0 = left + panel * (wide + 30)
        out.append(f'<text x="{x0}" y="{above - 10}">{key[1]} stages, {escape(key[0])}</text>')
        out.append(f'<rect x="{x0}" y="{above}" width="{wide}" height="{high}" fill="none" stroke="#bbbbbb"/>')
        for window in windows:
            x, _ = at(window, 0, x0)
            out.append(f'<text x="{x:.1f}" y="{above + high + 16}" text-anchor="middle">{window}</text>')
        if panel == 0:
            for rate in np.linspace(0, top, 5):
                _, y = at(windows[0], float(rate), x0)
                out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{rate:.0f}</text>')
        if plain is not None:
            _, y = at(windows[0], plain.candidate.rate, x0)
            out.append(
                f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + wide}" y2="{y:.1f}" stroke="#888888" stroke-dasharray="4 3"/>'
            )
            if plain.measured:
                _, y = at(windows[0], plain.median, x0)
                out.append(f'<circle cx="{x0}" cy="{y:.1f}" r="3.5" fill="#888888"/>')
        for i, (drafts, members) in enumerate(groups[key].items()):
            colour = _COLOURS[i % len(_COLOURS)]
            members.sort(key=lambda p: p.candidate.windows[-1])
            line = " ".join("{:.1f},{:.1f}".format(*at(p.candidate.windows[-1], p.candidate.rate, x0)) for p in members)
            out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
            for p in members:
                if p.measured:
                    x, y = at(p.candidate.windows[-1], p.median, x0)
                    out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            stages = escape(" > ".join([*(names[j] for j in drafts), names[-1]]))
            y = above + high + 34 + 14 * i
            out.append(f'<text x="{x0}" y="{y}" fill="{colour}">{stages}</text>')
    out.append(
        f'<text x="10" y="{height - 8}" font-size="10" fill="#555555">{escape(caption)} Dashed: the target alone.</text></svg>'
    )
    return "\n".join(out) + "\n"
