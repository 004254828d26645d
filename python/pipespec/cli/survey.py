"""Survey: predicted and measured rates of one chain with many settings, as a table and a figure.

The settings take turns prompt by prompt, so that a noisy machine affects all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.drivers import Driver
from pipespec.engine.ngram import NgramDraft
from pipespec.observe.plot import Panel, Series, chart
from pipespec.pipeline import Pipeline
from pipespec.planning import planner
from pipespec.planning.agreement import agreement_on
from pipespec.planning.planner import CallShape, Candidate
from pipespec.planning.profile import Profile
from pipespec.planning.simulator import Answers
from pipespec.process.table import aligned
from pipespec.process.threads import threads_set

Progress = Callable[[str, int, int], None]
"""Reports what runs, and how many of how many runs are done."""


@dataclass
class SurveyPoint:
    """One setting.

    Attributes:
        candidate: The setting, with its predicted rate.
        measured: Tokens per second, one value per repeat.
        identical: Whether all settings gave the same text.
    """

    candidate: Candidate
    measured: list[float] = field(default_factory=list)
    identical: bool = True

    @property
    def median(self) -> float:
        """Median of the measured rates."""
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return self.candidate.rate / self.median - 1

    def to_dict(self) -> dict[str, Any]:
        """Return the point as plain values."""
        return asdict(self.candidate) | {
            "predicted": self.candidate.rate,
            "measured": self.measured,
            "median": self.median,
            "identical": self.identical,
        }


def settings(
    profile: Profile, *, lookahead: Sequence[int] = (1, 2, 4, 8, 16), minima: Sequence[int] = (0,)
) -> list[Candidate]:
    """List plain decoding, and every subset of the drafts with every lookahead in ``lockstep`` and ``workers``.

    Args:
        profile: Of the chain.
        lookahead: Values for the last draft. The others have at most 4.
        minima: Values of ``min_draft_tokens`` in ``workers``.
    """
    found = [Candidate("plain", (), (), 0, profile.threads, 0.0)]
    for drafts in planner.subsets(profile):
        models = len(profile.models(drafts))
        for last in lookahead:
            all_lookaheads = (min(last, 4),) * (len(drafts) - 1) + (last,)
            if last <= 8:
                found.append(Candidate("lockstep", drafts, all_lookaheads, 0, profile.threads, 0.0))
            if models == 0:  # an n-gram index alone runs in the target's process
                continue
            threads = max(1, profile.threads - models)
            found += [Candidate("workers", drafts, all_lookaheads, w, threads, 0.0) for w in minima if w <= last]
    return found


def calibrate(
    models: Sequence[PreTrainedModel],
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    ngram: NgramDraft | None = None,
) -> Answers:
    """Measure the drafts' agreement with the target's texts.

    Args:
        models: Drafts, then the target.
        prompts: LongTensors [1, S].
        new_tokens: Per prompt.
        ngram: The first draft, before ``models``, if it is an n-gram index, with the ids of its corpus.

    Raises:
        ValueError: The target generates nothing.
    """
    tables = []
    with Pipeline(models[-1], schedule="plain") as plain:
        for ids in prompts:
            text = plain.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0].cpu().numpy()
            if len(text) > ids.shape[1]:
                tables.append(agreement_on(models, text, ids.shape[1], own_text=True, ngram=ngram))
    if not tables:
        raise ValueError("no agreement can be measured: the target ends these prompts at once")
    return Answers(table=np.concatenate(tables))


def call_of(prompts: Sequence[torch.Tensor], new_tokens: int) -> CallShape:
    """Shape of a call with a prompt of the mean length."""
    return CallShape(1, round(statistics.mean(ids.shape[1] for ids in prompts)), new_tokens)


class SettingRunner:
    """Runs settings of one chain, with one pipeline per schedule and subset of the drafts."""

    def __init__(self, models: Sequence[PreTrainedModel], ngram: NgramDraft | None = None) -> None:
        """``ngram``: as for :func:`calibrate`."""
        self._drafts = [*([] if ngram is None else [ngram]), *models[:-1]]
        self._target = models[-1]
        self._pipes: dict[tuple[str, tuple[int, ...]], Pipeline] = {}

    def pipe(self, c: Candidate) -> Pipeline:
        """The pipeline of a setting."""
        at = (c.way, c.drafts)
        if at not in self._pipes:
            drafts = [self._drafts[i] for i in c.drafts]
            self._pipes[at] = Pipeline(self._target, drafts, schedule=c.schedule, graphs=c.captured)
        return self._pipes[at]

    def run(self, c: Candidate, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, int, float]:
        """Generate greedily with a setting.

        Returns:
            The text, LongTensor [1, S + new], the number of new tokens, and the seconds.
        """
        pipe = self.pipe(c)
        driver = pipe._driver
        assert isinstance(driver, Driver)
        driver.steer(replace(driver.config, **c.steering))
        # A pipeline of workers divides the threads between the target and its drafts.
        workers = len(c.drafts) - (driver.config.ngram is not None) if c.schedule == "workers" else 0
        with threads_set(c.threads + workers):
            text = pipe.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        assert pipe.report is not None
        return text, pipe.report.tokens, pipe.report.seconds

    def close(self) -> None:
        """Close the pipelines."""
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
    progress: Progress = lambda what, done, total: None,
    between: Callable[[], None] = lambda: None,
    cores: int | None = None,
    ngram: NgramDraft | None = None,
) -> list[SurveyPoint]:
    """Predict and measure every candidate.

    Args:
        models: Drafts, then the target.
        profile: Of the chain.
        answers: Agreement of the drafts.
        candidates: Settings.
        prompts: LongTensors [1, S].
        new_tokens: Per prompt.
        repeats: Measurements per setting.
        progress: Called before each run.
        between: Called before each prompt's turn, for instance to profile the machine.
        cores: As for :func:`pipespec.planning.planner.predict`.
        ngram: As for :func:`calibrate`.
    """
    call = call_of(prompts, new_tokens)
    points = [SurveyPoint(planner.predict(profile, answers, c, call, cores=cores)) for c in candidates]
    runner = SettingRunner(models, ngram)
    try:
        for done, point in enumerate(points):
            progress("warming up", done, len(points))
            runner.run(point.candidate, prompts[0], new_tokens)
        total, done = repeats * len(prompts) * len(points), 0
        texts: dict[int, torch.Tensor] = {}
        for _ in range(repeats):
            tokens, seconds = [0] * len(points), [0.0] * len(points)
            for number, ids in enumerate(prompts):
                between()
                for i, point in enumerate(points):
                    progress("measuring", done, total)
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


def table(points: Sequence[SurveyPoint], names: Sequence[str]) -> str:
    """Format the points as a table."""
    lines = [["schedule", "stages", "lookahead", "min", "predicted", "measured", "error"]]
    for p in points:
        c = p.candidate
        stages = " > ".join([*(names[i] for i in c.drafts), names[-1]])
        lookahead = "/".join(map(str, c.lookahead)) or "-"
        rates = [f"{c.rate:.1f}", f"{p.median:.1f}", f"{100 * p.error:.1f}%"]
        lines.append([c.way, stages, lookahead, str(c.min_draft_tokens), *rates])
    return aligned(lines, left=2)


def picture(points: Sequence[SurveyPoint], names: Sequence[str], caption: str) -> str:
    """Draw throughput over the lookahead as SVG, one panel per number of stages and schedule: curves predicted, dots measured.

    Raises:
        ValueError: No point has a draft.
    """
    groups: dict[tuple[int, str], dict[tuple[int, ...], list[SurveyPoint]]] = {}
    for p in points:
        c = p.candidate
        if c.schedule != "plain" and c.min_draft_tokens == 0:
            groups.setdefault((len(c.drafts) + 1, c.way), {}).setdefault(c.drafts, []).append(p)
    if not groups:
        raise ValueError("nothing to draw: no setting has a draft")
    top = max(max(p.candidate.rate, *p.measured, 0.0) for p in points) * 1.08
    values = sorted({p.candidate.lookahead[-1] for p in points if p.candidate.lookahead})
    plain = next((p for p in points if p.candidate.schedule == "plain"), None)
    panels = []
    for (depth, way), chains in sorted(groups.items()):
        series = []
        for i, (drafts, members) in enumerate(chains.items()):
            members.sort(key=lambda p: p.candidate.lookahead[-1])
            x = [values.index(p.candidate.lookahead[-1]) for p in members]
            stages = " > ".join([*(names[j] for j in drafts), names[-1]])
            series.append(Series(stages, x, [p.candidate.rate for p in members], i))
            measured = {at: p.median for at, p in zip(x, members, strict=True) if p.measured}
            if measured:
                series.append(Series("measured", list(measured), list(measured.values()), i, marks=True))
        if plain is not None:
            across = [0, max(len(values) - 1, 0)]
            series.append(Series("target alone", across, [plain.candidate.rate] * 2, 4, dashed=True))
            if plain.measured:
                series.append(Series("target alone, measured", [0], [plain.median], 4, marks=True))
        labels = [str(value) for value in values]
        panels.append(Panel(series, f"{depth} stages, {way}", "lookahead of the last draft", "tokens/s", labels, top))
    return chart("Throughput over the lookahead: curves predicted, dots measured", panels, caption, (250, 190))
