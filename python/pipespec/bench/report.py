"""The report of a run: its questions, each with a figure, the numbers behind it, or what would produce them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from statistics import fmean
from textwrap import shorten
from typing import Any

from pipespec.bench import predictions
from pipespec.bench.machine import describe
from pipespec.bench.page import Cell, Column, Page, Section, Table
from pipespec.bench.predictions import Prediction
from pipespec.bench.results import ResultsFolder, Sample, Settings, Summary, SystemSettings
from pipespec.bench.summary import summarise
from pipespec.bench.systems import EARLY_EXIT, STAGED
from pipespec.observe.plot import LOSS, OTHERS, OURS, Bar, Panel, Series, bars, chart, stacked
from pipespec.planning.steps import Profile
from pipespec.spd.law import spd_acceptance, spd_accepted_length, spd_tokens_per_cycle

_CHAINS = ("lockstep", "lockstep-graphs", "workers", "streams", "published-lockstep", "published-asynchronous")
_MOST_CURVES = 8
"""Systems in one panel; more colours cannot be told apart."""


_SPREAD = 6.0
"""Ratio of the longest to the shortest text in time, above which the axis of time is logarithmic."""


@dataclass
class Run:
    """Everything that a run has measured."""

    settings: Settings
    summary: Summary
    samples: list[Sample]
    profile: Profile | None

    @classmethod
    def load(cls, folder: ResultsFolder) -> Run:
        """Read a run's folder. Raises ``FileNotFoundError`` and ``ValueError`` as :meth:`ResultsFolder.settings` does."""
        settings = folder.settings()
        return cls(settings, summarise(folder, settings), list(folder.samples(settings)), folder.profile())

    @cached_property
    def predictions(self) -> list[Prediction]:
        """What formulas and perf model say about each system."""
        return predictions.predict(self.settings, self.samples, self.profile)

    def texts(self, dataset: str, system: str) -> list[Sample]:
        """The samples of a system on a dataset that did not fail."""
        return [s for s in self.samples if (s.dataset, s.system) == (dataset, system) and not s.error and s.tokens]

    @cached_property
    def chosen(self) -> set[tuple[str, str]]:
        """Dataset and key of the systems in figures that have one entry per kind and drafts: of a sweep the fastest on that dataset."""
        best: dict[tuple[Any, ...], tuple[float, str]] = {}
        for dataset in self.settings.datasets:
            for system in self.settings.systems:
                row = self.summary.row(dataset.name, system.key)
                rate = (row.speedup or row.tokens_per_second if row is not None else None) or 0.0
                fixed = (str(value) for name, value in sorted(system.axes.items()) if name not in self.axes)
                group = (dataset.name, system.kind, *system.drafts, *(fixed if system.kind in STAGED else ()))
                if group not in best or rate > best[group][0]:
                    best[group] = rate, system.key
        return {(group[0], key) for group, (_, key) in best.items()}

    @cached_property
    def axes(self) -> list[str]:
        """Numeric settings that differ between systems of one kind and drafts. SPD's stages are not one of them: each number is another system."""
        values: dict[tuple[str, ...], set[str]] = {}
        for system in self.settings.systems:
            for name, value in system.axes.items():
                if system.kind not in STAGED and _is_number(value):
                    values.setdefault((name, system.kind, *system.drafts), set()).add(_shown(value))
        return sorted({name for (name, *_), found in values.items() if len(found) > 1})

    def label(self, key: str) -> str:
        """Name of a system in tables and figures."""
        return self.settings.system(key).label

    @property
    def cells(self) -> Iterable[tuple[str, SystemSettings, list[Sample]]]:
        """Dataset, system, and its texts, wherever there are some."""
        for dataset in self.settings.datasets:
            for system in self.settings.systems:
                if texts := self.texts(dataset.name, system.key):
                    yield dataset.name, system, texts


def page(run: Run) -> Page:
    """Build the page of a run."""
    s = run.settings
    drafts = ", ".join(s.drafts) or "none"
    lead = [
        f"Target {s.target} ({s.dtype}), drafts: {drafts}. "
        + ("Greedy." if not s.sampling.get("do_sample") else f"Sampled: {s.sampling}, seed {s.seed}."),
        *([describe(s.machine)] if s.machine else []),
        f"Started {s.started or 'at an unknown time'}, "
        + (f"finished {s.finished}." if s.finished else "not finished: the figures are of the samples so far."),
        *(
            ["Planted models: the agreement of the drafts was chosen, so speeds mean something and texts do not."]
            if s.planted
            else []
        ),
    ]
    found = Page("pipespec bench", lead)
    found.sections = [build(run) for build in SECTIONS]
    return found


# ---- what was measured


def overview(run: Run) -> Section:
    s = run.settings
    models = Table(
        "models",
        [
            Column("model"),
            Column("path"),
            Column("parameters", ",", "parameters"),
            Column("layers", "", "layers"),
            Column("device"),
        ],
        [
            (name, path, s.parameters.get(name), s.layers.get(name), s.devices.get(name))
            for name, path in {**s.drafts, "target": s.target}.items()
        ],
    )
    datasets = Table(
        "datasets",
        [Column("dataset"), Column("format"), Column("samples", "", "samples"), Column("new tokens, at most", "", "new_tokens"),
         Column("chat template"), Column("baseline of its speed-ups")],
        [
            (d.name, d.format, len(d.samples), d.new_tokens, d.chat_template, run.summary.baseline.get(d.name))
            for d in s.datasets
        ],
    )  # fmt: skip
    failed = [(t.dataset, run.label(t.system), t.sample, t.error) for t in run.samples if t.error]
    wrong = [(t.dataset, run.label(t.system), t.sample, t.differs_at) for t in run.samples if t.identical is False]
    tables = [models, datasets]
    if failed:
        tables.append(Table("errors", [Column("dataset"), Column("system"), Column("sample"), Column("error")], failed))
    if wrong:
        columns = [
            Column("dataset"),
            Column("system"),
            Column("sample"),
            Column("first token that differs", "", "differs_at"),
        ]
        tables.append(Table("differences", columns, wrong))
    text = (
        f"{len(run.samples)} texts, {len(failed)} of them failed, {len(wrong)} differ from those of {run.label(s.reference)}. "
        "Speed-ups refer to the fastest system without drafts."
    )
    return Section(
        "measured",
        "What was measured",
        text,
        tables=tables,
        missing="" if run.summary.complete else "Samples are missing: run the same command again, it continues.",
    )


# ---- speed


_SUMMARY = (
    Column("dataset"), Column("system"), Column("samples", "", "samples"), Column("failed", "", "errors"),
    Column("speed-up", ".2f", "speedup"), Column("tokens/s", ".1f", "tokens_per_second"),
    Column("first token, s", ".3f", "seconds_to_first_token"), Column("ms/token behind it", ".2f", "decode_ms_per_token"),
    Column("accepted length", ".2f", "accepted_length.target"), Column("acceptance", ".3f", "acceptance_rate.target"),
    Column("identical texts", ".0%", "identical"), Column("J/token", ".2f", "joules_per_token"),
)  # fmt: skip


def speed(run: Run) -> Section:
    rows: list[tuple[Cell, ...]] = []
    reasons: list[tuple[Cell, ...]] = []
    figures = []
    for dataset in run.settings.datasets:
        drawn = []
        for system in run.settings.systems:
            row = run.summary.row(dataset.name, system.key)
            if row is None:
                continue
            why = row.not_measured or system.not_measured
            if why is not None:
                reasons.append((dataset.name, system.label, why))
            rows.append(
                (dataset.name, system.label, row.samples, row.errors, row.speedup, row.tokens_per_second, row.seconds_to_first_token,
                 row.decode_ms_per_token, row.accepted_length.get("target"), row.acceptance_rate.get("target"), row.identical,
                 row.joules_per_token)
            )  # fmt: skip
            if (dataset.name, system.key) not in run.chosen:
                continue
            if row.speedup is None:
                drawn.append(Bar(system.label, None, f"not measured: {shorten(why or 'no complete sample', 60)}"))
                continue
            base = run.summary.baseline.get(dataset.name) == system.key
            colour = OTHERS if base else OURS if row.speedup >= 1 else LOSS
            text = f"{row.speedup:.2f}x" + (" (baseline)" if base else "" if row.speedup >= 1 else " (slower)")
            drawn.append(Bar(system.label, row.speedup, text, colour))
        if any(bar.value for bar in drawn):
            title = f"Speed-up on {dataset.name}: median over {len(dataset.samples)} samples"
            figures.append(
                (title, bars(title, drawn, "Dashed: the fastest system without drafts. Orange: slower than that.", 1.0))
            )
    return Section(
        "speedup",
        "Speed-up per dataset and system",
        "How many times as fast as the fastest system without drafts, on the same prompt and from the call to the last token. "
        "Of systems that differ in a swept setting the figure shows the fastest, the table all.",
        figures,
        [
            Table("summary", _SUMMARY, rows),
            *(
                [Table("not-measured", [Column("dataset"), Column("system"), Column("not measured")], reasons)]
                if reasons
                else []
            ),
        ],
        "" if figures else "No system has a speed-up: --systems needs plain or hf, and another one.",
    )


def sweep(run: Run) -> Section:
    """Speed-up over every setting that a sweep varied; the perf model's values as curves."""
    axes = run.axes
    simulated = {(p.dataset, p.system): p for p in run.predictions}
    figures, rows = [], []
    for dataset in run.settings.datasets:
        base = run.summary.baseline.get(dataset.name)
        baseline = run.texts(dataset.name, base) if base else []
        rate = sum(len(s.tokens) for s in baseline) / sum(s.seconds for s in baseline) if baseline else None
        panels = []
        for axis, kind in product(axes, dict.fromkeys(s.kind for s in run.settings.systems)):
            groups: dict[str, list[tuple[float, float, float | None, float | None]]] = {}
            for system in run.settings.systems:
                row = run.summary.row(dataset.name, system.key)
                if system.kind != kind or axis not in system.axes or row is None or row.speedup is None:
                    continue
                at = _number(system.axes[axis])
                others = [f"{name} {_shown(v)}" for name, v in system.axes.items() if name != axis and name in axes]
                group = ", ".join([" > ".join([*system.drafts, "target"]), *others])
                p = simulated.get((dataset.name, system.key))
                guess, closed = (
                    None if p is None or value is None or not rate else value / rate
                    for value in ((p.simulated, p.closed_form) if p else (None, None))
                )
                groups.setdefault(group, []).append((at, row.speedup, guess, closed))
                rows.append((dataset.name, system.label, axis, _shown(system.axes[axis]), row.speedup, guess, closed))
            chosen = {name: sorted(points) for name, points in groups.items() if len({x for x, *_ in points}) > 1}
            for first in range(0, len(chosen), _MOST_CURVES):
                series = []
                for i, (name, points) in enumerate(list(chosen.items())[first : first + _MOST_CURVES]):
                    x = [p[0] for p in points]
                    series.append(Series(name, x, [p[1] for p in points], i + (i > 3), marks=True, joined=True))
                    for which in (2, 3):
                        guessed = [(p[0], value) for p in points if (value := p[which]) is not None]
                        if guessed:
                            gx, gy = zip(*guessed, strict=True)
                            series.append(Series("", gx, gy, i + (i > 3), dashed=which == 2, dotted=which == 3))
                ends = [min(s.x[0] for s in series), max(s.x[-1] for s in series)]
                series.append(Series("fastest without drafts", ends, [1.0, 1.0], 4))
                panels.append(Panel(series, f"{kind}: {axis.replace('_', ' ')}", axis.replace("_", " "), "speed-up"))
        if panels:
            figures.append(
                (
                    f"Sweep on {dataset.name}",
                    chart(
                        f"Sweep on {dataset.name}",
                        panels,
                        "Dots: measured." + (" Dashed: simulated. Dotted: closed form." if simulated else ""),
                        columns=2,
                    ),
                )
            )
    columns = [
        Column("dataset"),
        Column("system"),
        Column("setting"),
        Column("value"),
        Column("speed-up", ".2f", "speedup"),
        Column("simulated", ".2f"),
        Column("closed form", ".2f"),
    ]
    return Section(
        "sweep",
        "Lookahead and other settings",
        "Dots with a line: measured speed-ups, medians over the samples. Dashed: the perf model over the run's own step times and acceptance. "
        "Dotted: the closed form over the same.",
        figures,
        [Table("sweep", columns, rows)] if rows else [],
        ""
        if figures
        else "No setting was varied: give several values, for example --lookahead 2 4 8 16 and --min-draft-tokens 0 2 4.",
    )


def _number(value: Any) -> float:
    """A setting on an axis: of one value per draft that of the last draft."""
    return float(value[-1] if isinstance(value, (list, tuple)) else value)


def _is_number(value: Any) -> bool:
    last = value[-1] if isinstance(value, (list, tuple)) and value else value
    return isinstance(last, (int, float)) and not isinstance(last, bool)


def _shown(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def depth(run: Run) -> Section:
    """The best speed-up over the number of models."""
    rows: list[tuple[Cell, ...]] = []
    figures = []
    panels = []
    for dataset in run.settings.datasets:
        best: dict[str, dict[int, tuple[float, str]]] = {}
        for system in run.settings.systems:
            row = run.summary.row(dataset.name, system.key)
            if row is None or row.speedup is None or system.kind not in _CHAINS:
                continue
            by_models, models = best.setdefault(system.kind, {}), len(system.drafts) + 1
            by_models[models] = max(by_models.get(models, (0.0, "")), (row.speedup, system.key))
        for kind, found in best.items():
            rows += [
                (dataset.name, kind, models, speedup, run.label(key))
                for models, (speedup, key) in sorted(found.items())
            ]
        if any(len(found) > 1 for found in best.values()):
            most = max(m for found in best.values() for m in found)
            series = [
                Series(kind, sorted(found), [found[m][0] for m in sorted(found)], i, marks=True, joined=True)
                for i, (kind, found) in enumerate(best.items())
            ]
            series.append(Series("fastest without drafts", [1, most], [1.0, 1.0], 4, dashed=True))
            panels.append(Panel(series, dataset.name, "models in the chain, target included", "best speed-up"))
    if panels:
        figures.append(("Depth against gain", chart("Depth against gain", panels, columns=2, size=(380, 220))))
    columns = [
        Column("dataset"),
        Column("schedule"),
        Column("models", "", "drafts"),
        Column("best speed-up", ".2f", "speedup"),
        Column("system"),
    ]
    return Section(
        "depth",
        "Depth of the chain against its gain",
        "The best system of each schedule and number of models.",
        figures,
        [Table("depth", columns, rows)] if rows else [],
        "" if figures else "All chains have the same number of models: give --draft more than once.",
    )


# ---- time


def over_time(run: Run) -> Section:
    """New tokens of one sample over time, with rollbacks."""
    figures, rows = [], []
    for dataset in run.settings.datasets:
        chosen = _one_sample(run, dataset.name)
        if not chosen:
            continue
        curves: list[Series] = []
        removed: list[Series] = []
        # Systems without drafts, and then those whose rollbacks are known.
        drawn = sorted(chosen, key=lambda s: (s.system not in run.settings.baselines, not s.steps))[:_MOST_CURVES]
        ends = [s.commits[-1][0] for s in drawn]
        log = max(ends) > _SPREAD * min(ends)
        for i, s in enumerate(drawn):
            colour = i + (i > 3)
            x, y = zip(*(s.commits if log else [(0.0, 0), *s.commits]), strict=True)
            # Between two commits the text does not grow.
            stairs = [
                (x[0], y[0]),
                *(
                    point
                    for (_, had), (at, has) in pairwise(zip(x, y, strict=True))
                    for point in ((at, had), (at, has))
                ),
            ]
            curves.append(Series(run.label(s.system), [at for at, _ in stairs], [n for _, n in stairs], colour))
            back = sorted(
                (step.start, step.rolled_back)
                for steps in (s.steps or {}).values()
                for step in steps
                if step.rolled_back
            )
            # Rollbacks before the first commit belong to the prompt's drafts; they are in the table only.
            marks = [
                (at, max((n for t, n in s.commits if t <= at), default=0)) for at, _ in back if s.commits[0][0] <= at
            ]
            if marks:
                mx, my = zip(*marks, strict=True)
                curves.append(Series("", mx, my, colour, marks=True))
            if back:
                bx = [at for at, _ in back]
                removed.append(
                    Series(
                        run.label(s.system), bx, list(accumulate(n for _, n in back)), colour, marks=True, joined=True
                    )
                )
            for name, steps in (s.steps or {}).items():
                counts = [step.rolled_back for step in steps if step.rolled_back]
                rows.append((dataset.name, run.label(s.system), s.sample, name, len(counts), sum(counts)))
        panels = [Panel(curves, "tokens of the text", "s", "new tokens", x_low=None if log else 0.0, x_log=log)]
        if removed:
            panels.append(Panel(removed, "draft tokens removed so far", "s", "tokens removed", x_low=0.0))
        title = f"{dataset.name}, sample {chosen[0].sample}: tokens over time"
        figures.append((title, chart(title, panels, "Dots on a curve: rollbacks of a draft.", columns=2)))
    columns = [
        Column("dataset"),
        Column("system"),
        Column("sample"),
        Column("stage"),
        Column("rollbacks"),
        Column("tokens removed"),
    ]
    missing = "No text has times of its commits."
    if figures:
        missing = (
            ""
            if rows
            else "No sample was traced, so rollbacks are not shown: --traced 1 keeps the steps of one sample per system."
        )
    return Section(
        "time",
        "Tokens over time",
        "When the target committed the tokens of one sample, and when a draft removed tokens that a correction had made wrong.",
        figures,
        [Table("rollbacks", columns, rows)] if rows else [],
        missing,
    )


def _one_sample(run: Run, dataset: str) -> list[Sample]:
    """The texts of one sample, of each system that is no step of a sweep: the sample that most systems have traced, then written."""
    texts = [
        s
        for name, system, found in run.cells
        if name == dataset and (name, system.key) in run.chosen
        for s in found
        if len(s.commits) > 1  # one commit is no curve
    ]
    count = Counter(s.sample for s in texts)
    traced = Counter(s.sample for s in texts if s.steps)
    if not texts:
        return []
    best = max(count, key=lambda name: (traced[name], count[name]))
    return [s for s in texts if s.sample == best]


def token_times(run: Run) -> Section:
    """The distribution of the time per token."""
    rows: list[tuple[Cell, ...]] = []
    panels = []
    for dataset in run.settings.datasets:
        series: list[Series] = []
        for name, system, texts in run.cells:
            if name != dataset.name:
                continue
            times = sorted(ms for text in texts for ms in _milliseconds(text))
            if not times:
                continue
            rows.append(
                (
                    name,
                    system.label,
                    len(times),
                    fmean(times),
                    *(_quantile(times, q) for q in (0.1, 0.5, 0.9, 0.99)),
                    times[-1],
                )
            )
            if (name, system.key) in run.chosen and len(series) < _MOST_CURVES and times[0] > 0:
                shares = [i / 100 for i in range(101)]
                colour = len(series) + (len(series) > 3)
                series.append(Series(system.label, [_quantile(times, q) for q in shares], shares, colour))
        if series:
            panels.append(Panel(series, dataset.name, "ms per token", "share of the tokens", y_high=1.0, x_log=True))
    names = ("10 %", "median", "90 %", "99 %", "longest")
    columns = [
        Column("dataset"),
        Column("system"),
        Column("tokens"),
        Column("mean, ms", ".2f"),
        *(Column(f"{n}, ms", ".2f") for n in names),
    ]
    return Section(
        "times",
        "Distribution of the time per token",
        "The time between two commits of the target, divided by the tokens of the second. A curve further left is faster; a flat end means pauses.",
        [("Time per token", chart("Time per token: share of the tokens that took at most so long", panels, columns=2))]
        if panels
        else [],
        [Table("times", columns, rows)] if rows else [],
        "" if panels else "No text has times of its commits.",
    )


def _milliseconds(text: Sample) -> Iterable[float]:
    """Milliseconds of each token behind the first commit."""
    for (before, had), (after, has) in pairwise(text.commits):
        yield from [1e3 * (after - before) / (has - had)] * (has - had)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


# ---- acceptance


def accepted(run: Run) -> Section:
    """Histogram of the draft tokens that a step accepted, per verifying stage."""
    rows: list[tuple[Cell, ...]] = []
    figures = []
    for dataset in run.settings.datasets:
        panels = []
        for name, system, texts in run.cells:
            if name != dataset.name:
                continue
            series: list[Series] = []
            for place in range(1, len(texts[0].stages)):
                counts: Counter[int] = Counter()
                for text in texts:
                    counts.update(dict(enumerate(text.stages[place].histogram)))
                total = sum(counts.values())
                if not total or not any(counts[j] for j in counts if j):
                    continue
                stage = texts[0].stages[place].name
                most = max(j for j, c in counts.items() if c)
                rows += [(name, system.label, stage, j, counts[j], counts[j] / total) for j in range(most + 1)]
                lengths = sum((j + 1) * c for j, c in counts.items()) / total
                series.append(
                    Series(f"{stage}: {lengths:.2f} tokens per step", list(range(most + 1)), [counts[j] / total for j in range(most + 1)],
                           len(series), columns=True)
                )  # fmt: skip
            if series and (name, system.key) in run.chosen:
                panels.append(Panel(series, system.label, "accepted draft tokens in a step", "share of the steps"))
        if panels:
            title = f"Accepted draft tokens per step, {dataset.name}"
            figures.append((title, chart(title, panels, columns=3, size=(270, 170))))
    columns = [
        Column("dataset"),
        Column("system"),
        Column("stage"),
        Column("accepted draft tokens"),
        Column("steps", "", "histogram"),
        Column("share", ".3f"),
    ]
    return Section(
        "accepted",
        "Accepted lengths per stage",
        "How many draft tokens a stage accepted in one step; 0 are steps that decoded one token or rejected the first draft token. The last column counts those with more, too.",
        figures,
        [Table("accepted", columns, rows)] if rows else [],
        "" if figures else "No system counts its steps: --systems lockstep, workers or streams do.",
    )


# ---- devices


def devices(run: Run) -> Section:
    """Busy shares and energy."""
    rows: list[tuple[Cell, ...]] = []
    figures = []
    for dataset in run.settings.datasets:
        energy, busy_bars = [], []
        for name, system, texts in run.cells:
            if name != dataset.name:
                continue
            seconds = sum(t.seconds for t in texts)
            names = sorted({d for t in texts for d in (*(t.utilization or {}), *(t.energy_joules or {}))})
            for device in names:
                busy = [(t.seconds, t.utilization[device]) for t in texts if t.utilization and device in t.utilization]
                share = sum(s * u for s, u in busy) / sum(s for s, _ in busy) if busy else None
                metered = [t for t in texts if t.energy_joules and device in t.energy_joules]
                joules = sum((t.energy_joules or {})[device] for t in metered)
                tokens = sum(len(t.tokens) for t in metered)
                rows.append((name, system.label, device, share, joules / tokens if metered else None, seconds))
                if share is not None and (name, system.key) in run.chosen:
                    busy_bars.append(Bar(f"{system.label}: {device}", share, f"{share:.0%}"))
            row = run.summary.row(name, system.key)
            if row is not None and row.joules_per_token is not None and (name, system.key) in run.chosen:
                energy.append(Bar(system.label, row.joules_per_token, f"{row.joules_per_token:.2f} J"))
        if energy:
            title = f"Energy per token on {dataset.name}, all metered devices"
            figures.append((title, bars(title, energy)))
        if any(bar.value for bar in busy_bars):
            title = f"Busy share of the devices on {dataset.name}"
            figures.append((title, bars(title, busy_bars)))
    reasons = run.settings.machine.get("not_readable", {})
    table = Table(
        "not-readable", [Column("not readable"), Column("why")], [(what, why) for what, why in reasons.items()]
    )
    columns = [
        Column("dataset"),
        Column("system"),
        Column("device"),
        Column("busy", ".0%", "utilization"),
        Column("J/token", ".3f", "energy_joules"),
        Column("seconds", ".2f", "seconds"),
    ]
    return Section(
        "devices",
        "Utilisation and energy",
        "Busy share of the devices and energy per token while the texts were generated. They include what other programs used at the same time.",
        figures,
        [*([Table("devices", columns, rows)] if rows else []), *([table] if reasons else [])],
        "" if rows else "No device has a meter that could be read" + (": the table says why." if reasons else "."),
    )


# ---- SPD


def spd(run: Run) -> Section:
    """Cycles, accepted lengths and drafters of SPD."""
    figures: list[tuple[str, str]] = []
    rows: list[tuple[Cell, ...]] = []
    features: list[tuple[Cell, ...]] = []
    parts: list[str] = []
    for dataset in run.settings.datasets:
        cycles, lengths = [], []
        by_drafter: dict[str, list[tuple[int, float]]] = {}
        law: dict[str, list[tuple[int, float]]] = {}
        for name, system, texts in run.cells:
            if name != dataset.name or not all(t.cycles and t.phases and t.stage_seconds for t in texts):
                continue
            n, count = len(texts[0].stage_seconds or ()), sum(t.cycles or 0 for t in texts)
            names = [p for p in texts[0].phases or {} if p != "prefill"]
            parts = parts or names
            ms = [1e3 * sum((t.phases or {})[p] for t in texts) / count for p in names]
            checked, kept = (
                sum(getattr(t.stages[-1], what) for t in texts) if texts[0].stages else 0
                for what in ("drafted", "accepted")
            )
            row = run.summary.row(name, system.key)
            length = row.equivalent_accepted_length if row is not None else None
            predicted = spd_accepted_length(kept / checked, n) if checked else None
            drafter = _drafter(system)
            rows.append(
                (name, system.label, drafter, n, count, *ms, sum(ms), length, predicted, row.speedup if row else None)
            )
            if "anchors" in system.axes:
                features.append((name, system.label, _shown(system.axes["anchors"]), n, *_features(texts, n, count)))
            cycles.append((f"{system.label}", ms))
            if length is not None:
                lengths.append(Bar(f"{drafter}, n = {n}", length, f"{length:.2f}", OURS))
                by_drafter.setdefault(drafter, []).append((n, length))
                if predicted is not None:
                    law.setdefault(drafter, []).append((n, predicted))
        if cycles:
            title = f"A cycle of SPD on {dataset.name}"
            figures.append((title, stacked(title, cycles, parts, "ms", "Mean over all cycles, prompts not included.")))
        if lengths:
            title = f"Equivalent accepted length by drafter on {dataset.name}"
            figures.append(
                (title, bars(title, lengths, "Dashed: plain decoding. The bound is the number of stages n.", 1.0))
            )
        if any(len({n for n, _ in points}) > 1 for points in by_drafter.values()):
            series = []
            for i, (drafter, points) in enumerate(by_drafter.items()):
                x, y = zip(*sorted(points), strict=True)
                series.append(Series(f"{drafter}: measured", x, y, i, marks=True, joined=True))
                if drafter in law:
                    x, y = zip(*sorted(law[drafter]), strict=True)
                    series.append(Series(f"{drafter}: law at its acceptance", x, y, i, dashed=True))
            title = f"Accepted length against stages on {dataset.name}"
            panel = Panel(series, "", "stages n", "equivalent accepted length")
            figures.append((title, chart(title, [panel], size=(460, 260))))
    columns = [
        Column("dataset"), Column("system"), Column("drafter"), Column("stages"), Column("cycles", "", "cycles"),
        *(Column(f"{p}, ms/cycle", ".3f", f"phases.{p}") for p in parts), Column("cycle, ms", ".3f"),
        Column("equivalent accepted length", ".2f", "equivalent_accepted_length"), Column("by the law", ".2f"), Column("speed-up", ".2f", "speedup"),
    ]  # fmt: skip
    return Section(
        "spd",
        "SPD: cycles, stages and drafters",
        "One target in n layer stages. The equivalent accepted length is n times tokens per cycle: the speed-up if a cycle took 1/n of a plain step. "
        "In one process the stages take turns, so that a cycle is no shorter than a plain step. "
        "Anchors are the hidden states that feed a draft module, numbered as transformers does: 0 is the embedding, k the output of layer k - 1. "
        "Modules of other anchors show what the features of a stage are worth. Modules draft from the states before a step, beside the stages; the last "
        "column is the acceptance that states behind the step, for which drafting has to wait, would need for the same speed.",
        figures,
        [
            *([Table("spd", columns, rows)] if rows else []),
            *([Table("features", _FEATURES, features)] if features else []),
        ],
        "" if rows else "SPD was not run: --systems spd, with --stages for several numbers of stages.",
    )


def _drafter(system: SystemSettings) -> str:
    """What drafts, in words."""
    if system.drafts:
        return " + ".join(system.drafts)
    drafter = str(system.axes.get("drafter") or system.label)
    if drafter == EARLY_EXIT:
        return "first stage (PPSD)"
    return f"{drafter}, anchors {_shown(system.axes['anchors'])}" if "anchors" in system.axes else drafter


_FEATURES = (
    Column("dataset"), Column("system"), Column("anchors of the module"), Column("stages"), Column("acceptance", ".3f"),
    Column("draft, ms/cycle", ".3f", "phases.draft"), Column("slowest stage, ms/cycle", ".3f"), Column("acceptance that features behind the step need", ".3f"),
)  # fmt: skip


def _features(texts: Sequence[Sample], n: int, cycles: int) -> tuple[Cell, ...]:
    """Acceptance of a module's features, its time beside that of the slowest stage, and what later features would have to reach.

    Features of the states *behind* a step make drafting wait for the step. Such a cycle takes draft and stage one after the other instead of the
    longer of the two, so its tokens per cycle have to rise by the same factor (:func:`pipespec.spd.law.spd_tokens_per_cycle`). None: no acceptance
    suffices.
    """
    checked, accepted = (sum(getattr(t.stages[-1], name) for t in texts) for name in ("drafted", "accepted"))
    draft, *fixed = (
        1e3 * sum((t.phases or {}).get(name, 0.0) for t in texts) / cycles for name in ("draft", "verify", "other")
    )
    slowest = 1e3 * max(sum((t.stage_seconds or ())[s] for t in texts) for s in range(n)) / cycles
    if not checked or n < 2:
        return None, draft, slowest, None
    a = accepted / checked
    factor = (draft + slowest + sum(fixed)) / (max(draft, slowest) + sum(fixed))
    length = n * spd_tokens_per_cycle(a, n) * factor
    return a, draft, slowest, spd_acceptance(length, n) if length <= n else None


# ---- theory


def theory(run: Run) -> Section:
    """Closed forms and perf model against each measured point."""
    rows: list[tuple[Cell, ...]] = []
    closed, simulated = [], []
    for p in run.predictions:
        rows.append(
            (p.dataset, run.label(p.system), "/".join(f"{a:.3f}" for a in p.acceptance) or None, p.measured, p.closed_form,
             predictions.error(p.closed_form, p.measured), p.simulated, predictions.error(p.simulated, p.measured), p.reason)
        )  # fmt: skip
        if p.closed_form is not None:
            closed.append((p.measured, p.closed_form))
        if p.simulated is not None:
            simulated.append((p.measured, p.simulated))
    figures = []
    if closed or simulated:
        most = max(max(point) for point in (*closed, *simulated))
        series = [Series("prediction = measurement", [0.0, most], [0.0, most], 4, dashed=True)]
        for i, (name, points) in enumerate((("perf model", simulated), ("closed form", closed))):
            if points:
                x, y = zip(*points, strict=True)
                series.append(Series(name, x, y, i, marks=True, dashed=bool(i)))
        panel = Panel(series, "", "measured tokens/s", "predicted tokens/s", x_low=0.0)
        figures.append(
            (
                "Predicted against measured",
                chart("Predicted against measured, every system and dataset", [panel], size=(460, 340)),
            )
        )
    columns = [
        Column("dataset"), Column("system"), Column("acceptance, pair by pair"), Column("measured tokens/s", ".1f"), Column("closed form", ".1f"),
        Column("error", "+.1%"), Column("simulated", ".1f"), Column("error", "+.1%"), Column("not predicted"),
    ]  # fmt: skip
    return Section(
        "theory",
        "Formulas and perf model against each measured point",
        "Chains: step times of the run's profile and the acceptance of the run's texts. SPD: the measured time of a cycle, so that only its law is tested. "
        "Rates are all tokens over all seconds, prompts included. A point above the line was predicted too fast.",
        figures,
        [Table("theory", columns, rows)] if rows else [],
        ""
        if figures
        else "Nothing could be predicted: chains need the profile of step times, which --no-profile leaves out.",
    )


SECTIONS: tuple[Callable[[Run], Section], ...] = (
    overview,
    speed,
    sweep,
    depth,
    accepted,
    over_time,
    token_times,
    devices,
    spd,
    theory,
)
"""The sections, in order."""
