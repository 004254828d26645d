"""All figures of the benchmarks, drawn by matplotlib; tables by pandas. ``pip install 'pipespec[bench]'``

    python -m bench.plot RESULTS                   figures and report.html of a run of ``bench.run``
    python -m bench.plot training.json             the curves of ``pipespec spd train``, as training.svg next to it
    python -m bench.plot bench/results/real.json   the table of real models, as real.svg next to it; the same for the summary.json of a run

Other benchmarks call :func:`bars` and :func:`chart`, which return SVG. The same input gives the same file.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import tables
from bench.machine import describe
from bench.samples import ResultsFolder, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b3c88", "#000000")
"""Colours of curves, by Okabe and Ito: readers with any form of colour blindness tell them apart."""
OURS, OTHERS, LOSS = "#0072b2", "#c9c9c9", "#d55e00"
"""Colours of bars."""

MODELS = {"q15": "Qwen2.5-Coder-1.5B-Instruct"}
"""Names of the models in files of :mod:`bench.real`."""

MAX_CURVES = len(COLOURS)
"""Systems in one panel."""


def _figure(title: str, width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "pipespec", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(11 * width)), x=0.01, ha="left", weight="bold", size=10)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def svg(figure: Figure, note: str = "") -> str:
    """A figure as SVG, with a small line of text below it."""
    if note:
        note = textwrap.fill(note, int(19 * figure.get_size_inches()[0]))
        figure.supxlabel(note, x=0.01, ha="left", size=7, color="#555555")
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


@dataclass(frozen=True)
class Series:
    """A curve, or dots (``marks``) for what was simulated or measured, with a line between them if ``joined``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    marks: bool = False
    dashed: bool = False
    joined: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes with their curves; ``y_high`` is the upper end of the y axis, whose lower end is 0."""

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    y_high: float | None = None


def chart(title: str, panels: Sequence[Panel], note: str = "") -> str:
    """Draw panels side by side, with the key of the curves below each.

    Raises:
        ValueError: A panel has no points, or some that are not finite.
    """
    curves = max((len(panel.series) for panel in panels), default=0)
    figure, axes = _figure(title, 5.4 * max(len(panels), 1), 3.4 + 0.17 * curves, max(len(panels), 1))
    for panel, ax in zip(panels, axes, strict=False):
        values = [v for s in panel.series for v in (*s.x, *s.y)]
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"{title}: every series needs finite points")
        for s in panel.series:
            line = "none" if s.marks and not s.joined else "--" if s.dashed else "-"
            marker = "o" if s.marks else ""
            ax.plot(s.x, s.y, ls=line, marker=marker, ms=4, color=COLOURS[s.colour % len(COLOURS)], label=s.name)
        ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, ylim=(0.0, panel.y_high))
        ax.grid(axis="y", color="#dddddd")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), frameon=False)
    return svg(figure, note)


@dataclass(frozen=True)
class Bar:
    """A bar with ``text`` after it. Without a value there is only the text."""

    label: str
    value: float | None
    text: str
    colour: str = OTHERS


def bars(title: str, rows: Sequence[Bar], note: str = "", reference: float | None = None) -> str:
    """Draw horizontal bars from 0, one below the other, and a dashed line at ``reference``.

    Raises:
        ValueError: No bar has a length.
    """
    if not any(row.value for row in rows):
        raise ValueError(f"{title}: nothing to draw")
    figure, (ax,) = _figure(title, 8.0, 0.9 + 0.25 * len(rows))
    places = range(len(rows))
    values = [row.value or 0.0 for row in rows]
    drawn = ax.barh(places, values, color=[row.colour for row in rows])
    ax.bar_label(drawn, [row.text for row in rows], padding=4)
    ax.set_yticks(places, [row.label for row in rows])
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.3 * max(values)), xticks=[])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    if reference is not None:
        ax.axvline(reference, color="#333333", ls="--", lw=1)
    return svg(figure, note)


def timeline(title: str, nodes: Sequence[tuple[str, float, float]]) -> str:
    """Draw launches one below the other over their time: of each the name, the time, and the gap behind the one before it, in microseconds."""
    figure, (ax,) = _figure(title, 8.0, 0.9 + 0.25 * len(nodes))
    at = 0.0
    for row, (_, us, gap) in enumerate(nodes):
        at += gap if row else 0.0
        ax.barh(row, us, left=at, color=OURS)
        ax.annotate(f"{us:.1f}", (at + us, row), (3, 0), textcoords="offset points", va="center")
        at += us
    ax.set_yticks(range(len(nodes)), [name[:48] for name, *_ in nodes])
    ax.invert_yaxis()
    ax.set(xlabel="microseconds", xlim=(0, 1.1 * at))
    ax.spines[["top", "right"]].set_visible(False)
    return svg(figure)


# ---- a run


Summary = dict[str, Any]


def placed(summary: Summary, dataset: str) -> list[tuple[dict[str, Any], tables.Row]]:
    """The record and the row of each system on a dataset."""
    systems = {system["key"]: system for system in summary["systems"]}
    return [(systems[row.key], row) for row in tables.rows_of(summary) if row.dataset == dataset]


def speedups(summary: Summary, dataset: str, samples: Sequence[Sample]) -> str:
    """The speed-up of each system against the fastest one without drafts."""
    rows = []
    for _, row in placed(summary, dataset):
        if row.speedup is None:
            rows.append(Bar(row.label, None, f"not measured: {(row.reason or 'no complete sample')[:60]}"))
        else:
            colour = OTHERS if row.speedup == 1 else OURS if row.speedup > 1 else LOSS
            rows.append(Bar(row.label, row.speedup, f"{row.speedup:.2f}x", colour))
    note = "Dashed: the fastest system without drafts. Orange: slower than that."
    return bars(f"Speed-up on {dataset}", rows, note, 1.0)


def sweeps(summary: Summary, dataset: str, samples: Sequence[Sample]) -> str:
    """Speed-up over each setting that a sweep varied, and over the number of models in the chain."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for system, row in placed(summary, dataset):
        if row.speedup is None:
            continue
        chain = " > ".join([system["kind"], *system["drafts"]])
        for axis, value in (system.get("axes") or {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.setdefault(axis, {}).setdefault(chain, []).append((value, row.speedup))
        if system["drafts"]:
            depth = found.setdefault("models in the chain", {}).setdefault(system["kind"], [])
            depth.append((len(system["drafts"]) + 1, row.speedup))
    panels = []
    for axis, groups in found.items():
        # Several systems at one point differ in another setting: the fastest one counts.
        best = {name: sorted(dict(sorted(points)).items()) for name, points in groups.items()}
        varied = {name: points for name, points in best.items() if len(points) > 1}
        series = [
            Series(name, *zip(*points, strict=True), i, marks=True, joined=True)  # type: ignore[misc]
            for i, (name, points) in enumerate(list(varied.items())[:MAX_CURVES])
        ]
        if series:
            panels.append(Panel(series, axis.replace("_", " "), axis.replace("_", " "), "speed-up"))
    return chart(f"Sweeps on {dataset}", panels)


def accepted(summary: Summary, dataset: str, samples: Sequence[Sample]) -> str:
    """The share of the target's steps by accepted draft tokens."""
    series = []
    for _, row in placed(summary, dataset):
        if any(row.histogram):
            shares = [count / sum(row.histogram) for count in row.histogram]
            series.append(Series(row.label, range(len(shares)), shares, len(series), marks=True, joined=True))
    panel = Panel(series[:MAX_CURVES], "", "accepted draft tokens of a step", "share of the target's steps")
    return chart(f"Accepted draft tokens on {dataset}", [panel])


PHASES = ("draft", "stages", "verify", "other")


def cycles(summary: Summary, dataset: str, samples: Sequence[Sample]) -> str:
    """SPD: the parts of a cycle."""
    import pandas

    rows: dict[str, list[Sample]] = {}
    for system, row in placed(summary, dataset):
        own = [s for s in samples if (s.dataset, s.system) == (dataset, system["key"]) and s.phases and s.cycles]
        if own:
            rows[row.label] = own
    if not rows:
        raise ValueError("no system has cycles")
    figure, (ax,) = _figure(f"SPD on {dataset}: parts of a cycle", 8.0, 1.2 + 0.3 * len(rows))
    totals = pandas.DataFrame(
        [pandas.DataFrame([t.phases for t in own], columns=PHASES).sum() for own in rows.values()]
    )
    cycles = [sum(t.cycles or 0 for t in own) / 1e3 for own in rows.values()]
    parts = totals.div(cycles, axis="index").set_axis(list(rows))
    parts.plot.barh(stacked=True, width=0.8, ax=ax, color=COLOURS, xlabel="ms")
    ax.invert_yaxis()
    ax.legend(ncols=len(PHASES), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    return svg(figure)


FIGURES = {"speedup": speedups, "sweep": sweeps, "accepted": accepted, "spd": cycles}


def report(folder: ResultsFolder, out: Path) -> list[Path]:
    """Write the figures of a run that its samples allow, and ``report.html`` with them and the tables; returns the files."""
    import pandas

    out.mkdir(parents=True, exist_ok=True)
    samples, files = list(folder.samples.values()), list[Path]()
    summary = tables.summarise(folder.settings(), samples)
    parts = [f"<p>{html.escape(tables.caption(summary))}</p>", f"<p>{html.escape(describe(summary['machine']))}</p>"]
    for dataset in (d["name"] for d in summary["datasets"]):
        parts.append(f"<h2>{html.escape(dataset)}</h2>")
        rows = [row for row in summary["rows"] if row["dataset"] == dataset]
        table = pandas.json_normalize(rows).drop(columns=["dataset", "histogram"]).dropna(axis="columns", how="all")
        parts.append(table.to_html(index=False, na_rep="-", float_format="{:.3f}".format, border=0))
        for name, draw in FIGURES.items():
            try:
                picture = draw(summary, dataset, samples)
            except ValueError:
                continue  # the samples have nothing for this figure
            files.append(out / f"{name}-{len(files)}.svg")
            files[-1].write_text(picture, encoding="utf-8")
            parts.append(picture[picture.index("<svg") :])
    page = out / "report.html"
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .6em;text-align:right}"
    body = "\n".join(parts)
    page.write_text(
        f"<!doctype html><meta charset=utf-8><title>bench.run</title><style>{style}</style>{body}\n",
        encoding="utf-8",
    )
    return [page, *files]


def training(history: Sequence[dict[str, Any]]) -> str:
    """The curves of a training run: losses in nats, shares between 0 and 1 (agreement, acceptance), and the learning rate.

    Args:
        history: One record per validation, with ``step`` and figures by name. Values that are not finite are left out.
    """
    names = list(dict.fromkeys(name for figures in history for name in figures))
    losses, others = ("loss", "held_out_loss"), {"step", "tokens", "seconds", "rate"}
    shares = [n for n in names if n not in {*losses, *others} and all(0 <= f[n] <= 1 for f in history if n in f)]

    def series(shown: Sequence[str]) -> list[Series]:
        found = []
        for name in shown:
            points = [(f["step"], f[name]) for f in history if math.isfinite(f.get(name, math.nan))]
            if points:
                steps, values = zip(*points, strict=True)
                found.append(Series(f"{name.replace('_', ' ')}: {values[-1]:.3g}", steps, values, len(found)))
        return found

    panels = [
        Panel(series(losses), "loss, nats per token", "steps"),
        Panel(series(shares), "share of draft tokens that are right", "steps", y_high=1.0),
        Panel(series(["rate"]), "learning rate", "steps"),
    ]
    return chart("Training of the draft module", [p for p in panels if p.series])


def real(record: dict[str, Any]) -> str:
    """Tokens/s of the rows of the table, from a file of ``bench.real``."""
    from bench.real import best_table

    heads, _, *table = ([cell.strip() for cell in line.split("|")[1:-1]] for line in best_table(record).splitlines())
    rows = []
    for i, kind in ((i, head.partition(":")[0]) for i, head in enumerate(heads) if head.endswith(": tokens/s")):
        rows += [Bar("", None, "")] if rows else []  # a gap
        for label, *cells in table:
            text, colour = f"{cells[i - 1]}  ({cells[i]})", OURS if label.startswith("pipespec") else OTHERS
            rows.append(Bar(f"{kind}: {label.replace('`', '')}", float(cells[i - 1]), text, colour))
    target, machine = record["settings"]["target"], record["machine"]
    note = f"{machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}, commit {machine['commit'][:10]}."
    title = f"{MODELS.get(target, target)}: tokens/s (of pipespec's target alone in the same run)"
    return bars(title, rows, note)


def generations(record: dict[str, Any]) -> str:
    """The rows of a summary that ran, as bars."""
    rows = []
    for r in tables.rows_of(record):
        if r.tokens_per_second is not None:
            colour = {"ours": OURS, "reference": "#d1603d"}.get(r.group, "#888888" if r.vs_plain == 1 else OTHERS)
            text = f"{r.tokens_per_second:.1f}{tables.shown(r.vs_plain, '  ({:.2f}x)', '')}"
            rows.append(Bar(r.label, r.tokens_per_second, text, colour))
    return bars("tokens/s, from prompt to last token", rows, tables.caption(record))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.plot", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of a run, training.json, real.json, or summary.json")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go (default: next to the results)")
    args = parser.parse_args(arguments)
    if args.results.is_file():
        record = json.loads(args.results.read_text(encoding="utf-8"))
        draw = real if record.get("benchmark") == "real" else generations
        picture = training(record["history"]) if "history" in record else draw(record)
        files = [(args.out or args.results.parent) / args.results.with_suffix(".svg").name]
        files[0].write_text(picture, encoding="utf-8")
    else:
        files = report(ResultsFolder(args.results), args.out or args.results)
    print(*files, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
