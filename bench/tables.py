"""The tables of a run: views of its samples, and of the summaries in ``bench/results``.

    python -m bench.tables DIR/summary.json                          print the tables
    python -m bench.tables DIR/summary.json --docs docs/speed.md     rewrite the table between its comments there

A row is one system on one dataset. Columns: *tokens/s*, tokens of all prompts over the sum of each prompt's median seconds, prompt included; the ratios to
plain ``generate()`` (with ``--reference plain``: to our plain decoding) and to transformers' fastest row; *speed-up*, the ratio to the fastest system without drafts; *same text*, texts equal to the reference
(``generate()``'s; sampled: our plain decoding's with the same seed) and the median position of the first difference; *accepted length*, tokens per step of each
verifying model; *acceptance*, accepted per verified draft token; *weights/s*, bytes of weights that all forwards read per second, relative to a plain copy (GPU) or
read (CPU); *of floor*, speed relative to plain decoding that only reads the target's weights at that rate; *first token*, milliseconds until it is there; *decoding*,
tokens/s after it. Exit status 1 if a float32 text of pipespec or transformers differs from the reference, otherwise 0; slower rows do not change it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import markdown_table, replace_table
from bench.samples import Sample, StepCounts
from pipespec.process.progress import aligned


@dataclass(kw_only=True)
class Row:
    """One system on one dataset; the module says how figures are made. None: not measured, or it does not apply.

    Attributes:
        reason: Why there are no figures.
        note: Remarks of the system.
        worst: The smallest ratio of a prompt to plain decoding.
        identical: Texts equal to the reference, of ``runs``.
        accepted_length: By verifying model.
        acceptance_rate: By verifying model, where it is known.
        histogram: The target's steps by accepted draft tokens.
        equivalent_accepted_length: SPD: stages times tokens per cycle.
        samples: Complete texts; ``errors``: those that failed.
    """

    key: str
    label: str
    group: str
    dataset: str = ""
    setting: str | None = None
    reason: str | None = None
    note: str = ""
    forward: str | None = None
    tokens_per_second: float | None = None
    vs_plain: float | None = None
    worst: float | None = None
    vs_best_hf: float | None = None
    speedup: float | None = None
    identical: int | None = None
    runs: int = 0
    differs_at: float | None = None
    accepted_length: dict[str, float] = field(default_factory=dict)
    acceptance_rate: dict[str, float] = field(default_factory=dict)
    histogram: list[int] = field(default_factory=list)
    equivalent_accepted_length: float | None = None
    weights_of_copy: float | None = None
    of_floor: float | None = None
    seconds_to_first_token: float | None = None
    decode_tokens_per_second: float | None = None
    samples: int = 0
    errors: int = 0

    @property
    def is_identical(self) -> bool:
        """No text differs from the reference."""
        return self.identical is None or self.identical == self.runs


def accepted_by_model(texts: Iterable[Sequence[StepCounts]]) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens per step, and accepted per verified draft token, of each verifying model over all texts, by its name, where they are known.

    ``texts``: counts of each text's models, the target last. The first of several models verifies nothing and is left out.
    """
    total: dict[str, StepCounts] = {}
    for stages in texts:
        for stage in stages[1:] or stages:
            t = total.setdefault(stage.name, StepCounts(stage.name, 0))
            t.steps, t.produced = t.steps + stage.steps, t.produced + stage.produced
            t.drafted, t.accepted = t.drafted + stage.drafted, t.accepted + stage.accepted
    lengths = {t.name: t.produced / t.steps for t in total.values() if t.steps and t.produced}
    return lengths, {t.name: t.accepted / t.drafted for t in total.values() if t.drafted}


class _Speeds:
    """Tokens and median seconds of each prompt of one system on one dataset."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        by_prompt: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.tokens:
                by_prompt.setdefault(sample.sample, []).append(sample)
        self.seconds = {name: median(s.seconds for s in found) for name, found in by_prompt.items()}
        self.tokens = {name: len(found[0].tokens) for name, found in by_prompt.items()}
        firsts = {
            name: [s.first_token for s in found if s.first_token is not None] for name, found in by_prompt.items()
        }
        self.first = {name: median(found) for name, found in firsts.items() if found}

    def rate(self, names: Iterable[str] | None = None) -> float | None:
        names = list(self.seconds if names is None else names)
        return sum(self.tokens[n] for n in names) / sum(self.seconds[n] for n in names) if names else None

    def over(self, other: _Speeds | None) -> float | None:
        """The ratio of both rates, on the prompts that both have."""
        common = self.seconds.keys() & other.seconds.keys() if other else ()
        return self.rate(common) / other.rate(common) if other and common else None  # type: ignore[operator]

    def worst_over(self, other: _Speeds | None) -> float | None:
        common = self.seconds.keys() & other.seconds.keys() if other else ()
        return min((self.rate([n]) / other.rate([n]) for n in common), default=None) if other else None  # type: ignore[operator]


def summarise(settings: dict[str, Any], samples: Iterable[Sample]) -> dict[str, Any]:
    """The settings with ``rows``, and whether no sample is missing (``complete``), without the folders of the models. Nothing is written."""
    by_place: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        by_place.setdefault((sample.dataset, sample.system), []).append(sample)
    rows: list[Row] = []
    complete, measured = True, 0
    for dataset in settings["datasets"]:
        places = {s["key"]: by_place.get((dataset["name"], s["key"]), []) for s in settings["systems"]}
        good = {key: [s for s in found if s.error is None] for key, found in places.items()}
        speeds = {key: _Speeds(found) for key, found in good.items()}
        groups = {s["key"]: s.get("group") for s in settings["systems"]}
        plain = speeds.get(settings.get("ratio_to", "hf"))
        best = _fastest({key: s for key, s in speeds.items() if groups[key] == "hf"})
        base = _fastest({s["key"]: speeds[s["key"]] for s in settings["systems"] if not s.get("has_drafts", True)})
        wanted = len(dataset["prompt_tokens"]) * settings["run"]["repeats"]
        measured += max((len(s.seconds) for s in speeds.values()), default=0)
        for system in settings["systems"]:
            key, own = system["key"], speeds[system["key"]]
            row = _row(settings, system, places[key], good[key], own)
            row.dataset, row.speedup = dataset["name"], own.over(base)
            row.vs_plain, row.vs_best_hf, row.worst = own.over(plain), own.over(best), own.worst_over(plain)
            rows.append(row)
            complete = complete and (len(good[key]) >= wanted or "not_measured" in system)
    run = settings["run"] | {"prompts": measured}
    family = {name: given for name, given in settings["family"].items() if name not in ("target", "drafts")}
    return settings | {"run": run, "family": family, "rows": [asdict(row) for row in rows], "complete": complete}


def _fastest(speeds: Mapping[str, _Speeds]) -> _Speeds | None:
    """The fastest system, over the prompts that all of them have."""
    found = {key: s for key, s in speeds.items() if s.seconds}
    common = set.intersection(*(set(s.seconds) for s in found.values())) if found else set()
    return max(found.values(), key=lambda s: s.rate(common or None) or 0.0, default=None)


def _row(
    settings: dict[str, Any], system: dict[str, Any], samples: Sequence[Sample], good: Sequence[Sample], speeds: _Speeds
) -> Row:
    """The figures of a row that need no other one."""
    row = Row(
        key=system["key"], label=system["label"], group=system.get("group", "ours"), setting=system.get("setting")
    )
    row.samples, row.errors = len(good), len(samples) - len(good)
    row.tokens_per_second = speeds.rate()
    if row.tokens_per_second is None:
        failed = next((s.error for s in reversed(samples) if s.error is not None), None)
        row.reason = system.get("not_measured") or failed or "not measured: the time was over"
        return row
    row.note = "; ".join(dict.fromkeys("; ".join(text.notes) for text in good if text.notes))
    row.forward = good[-1].forward
    compared = [s for s in good if s.identical is not None]
    if compared:
        row.identical, row.runs = sum(bool(s.identical) for s in compared), len(compared)
        different = [s.differs_at for s in compared if s.differs_at is not None]
        row.differs_at = median(different) if different else None
    row.accepted_length, row.acceptance_rate = accepted_by_model([s.stages for s in good])
    histograms = [s.stages[-1].histogram for s in good if s.stages]
    length = max(map(len, histograms), default=0)
    row.histogram = [sum(h[i] for h in histograms if i < len(h)) for i in range(length)]
    cycles, stages = sum(s.cycles or 0 for s in good), max(len(s.stage_seconds or ()) for s in good)
    if cycles and stages:
        row.equivalent_accepted_length = stages * sum(s.verified or 0 for s in good) / cycles
    if speeds.first:
        row.seconds_to_first_token = median(speeds.first.values())
        rest = [(speeds.tokens[n] - 1, speeds.seconds[n] - first) for n, first in speeds.first.items()]
        tokens, seconds = (sum(column) for column in zip(*rest, strict=True))
        row.decode_tokens_per_second = tokens / seconds if tokens > 0 and seconds > 0 else None
    weights = settings["family"].get("bytes_per_step", {})
    if (rate := settings.get("bytes_per_second")) and "target" in weights:
        # An n-gram index has no weights. No bytes: the row does not report its forwards.
        read = sum(weights.get(stage.name, 0) * stage.steps for s in good for stage in s.stages)
        row.weights_of_copy = read / sum(s.seconds for s in good) / rate if read else None
        row.of_floor = row.tokens_per_second / (rate / weights["target"])
    return row


# ---- text


def shown(value: float | None, form: str, absent: str = "-") -> str:
    """``value`` in a format, or ``absent`` for None."""
    return absent if value is None else form.format(value)


def _same(row: Row) -> str:
    at = shown(row.differs_at, ", differs at {:.0f}", "")
    return "-" if row.identical is None else f"{row.identical}/{row.runs}{at}"


def _lengths(row: Row) -> str:
    several = " / ".join(f"{length:.2f}" for length in row.accepted_length.values())
    return shown(row.equivalent_accepted_length, "{:.2f} equivalent", several or "-")


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens/s": lambda r: shown(r.tokens_per_second, "{:.1f}"),
    "vs plain": lambda r: shown(r.vs_plain, "{:.2f}x"),
    "vs best HF": lambda r: shown(r.vs_best_hf, "{:.2f}x"),
    "speed-up": lambda r: shown(r.speedup, "{:.2f}x"),
    "same text": _same,
    "accepted length": _lengths,
    "acceptance": lambda r: " / ".join(f"{rate:.2f}" for rate in r.acceptance_rate.values()) or "-",
    "weights/s": lambda r: shown(r.weights_of_copy, "{:.2f}"),
    "of floor": lambda r: shown(r.of_floor, "{:.2f}"),
    "first token, ms": lambda r: shown(r.seconds_to_first_token and 1e3 * r.seconds_to_first_token, "{:.1f}"),
    "decoding": lambda r: shown(r.decode_tokens_per_second, "{:.1f}"),
}


def rows_of(record: dict[str, Any]) -> list[Row]:
    """The rows of a summary, also of one that an earlier version wrote."""
    known = {f.name for f in fields(Row)}
    return [Row(**{name: v for name, v in row.items() if name in known}) for row in record["rows"]]


def lines_of(rows: Sequence[Row]) -> list[list[str]]:
    """Heading and rows that have figures, without the columns that no row has."""
    cells = {name: [of(row) for row in rows if row.reason is None] for name, of in COLUMNS.items()}
    cells = {name: column for name, column in cells.items() if any(cell != "-" for cell in column)}
    labels = [row.label for row in rows if row.reason is None]
    return [["", *cells], *([label, *(c[i] for c in cells.values())] for i, label in enumerate(labels))]


def remarks(rows: Sequence[Row]) -> list[str]:
    """The settings that won, and what rows say of their calls."""
    lines = []
    tuned = [f"{r.label}: {r.setting}" for r in rows if r.setting and r.reason is None]
    if tuned:
        lines.append(f"Best settings found: {'; '.join(tuned)}.")
    return lines + [f"{r.label}: {r.note}." for r in rows if r.note]


def not_measured(rows: Sequence[Row]) -> list[str]:
    """The rows without figures, by reason."""
    missing: dict[str, list[str]] = {}
    for r in rows:
        if r.reason:
            missing.setdefault(r.reason, []).append(r.label)
    return [f"Not measured: {'; '.join(labels)} ({reason})." for reason, labels in missing.items()]


def verdict(rows: Sequence[Row]) -> list[str]:
    """Our fastest row against the fastest of the others, and every row of ours that is slower or differs."""
    speed = {r.label: r.tokens_per_second for r in rows if r.tokens_per_second}
    ours = [r.label for r in rows if r.group == "ours" and r.label in speed]
    others = [r.label for r in rows if r.group != "ours" and r.label in speed]
    if not ours or not others:
        return ["Nothing to compare: " + ("none of ours ran." if not ours else "no other row ran.")]
    rival, best = max(others, key=speed.__getitem__), max(ours, key=speed.__getitem__)
    factor = speed[best] / speed[rival]
    lines = [
        f"{'Ours at its best' if factor >= 1 else 'WE LOSE, even at our best'}: {best}, {factor:.2f} times the best of the others ({rival})."
    ]
    slow = [label for label in ours if label != best and speed[label] < speed[rival]]
    if slow:
        shares = "; ".join(f"{label} {speed[label] / speed[rival]:.2f}x" for label in slow)
        lines.append(f"Where we lose against {rival}: {shares}.")
    slower = [r.label for r in rows if r.group == "ours" and r.vs_plain is not None and r.vs_plain < 1]
    if slower:
        lines.append(f"Slower than plain decoding: {'; '.join(slower)}.")
    differ = [r.label for r in rows if r.group == "ours" and not r.is_identical]
    if differ:
        lines.append(f"Not always the same text: {'; '.join(differ)}.")
    return lines


def caption(record: dict[str, Any]) -> str:
    """The measured workload, and the machine."""
    info, run, family = record["machine"], record["run"], record["family"]
    on_gpu = str(run.get("device")).startswith("cuda")
    where = info["gpus"][0]["name"] if on_gpu else f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads"
    sampled = run["sampling"]
    is_greedy = sampled is None or not sampled.get("do_sample", True)
    how = "greedy" if is_greedy else f"temperature {sampled['temperature']:g}, top-p {sampled['top_p']:g}"
    rate, floor = record.get("bytes_per_second"), ""
    if rate and "target" in family["bytes_per_step"]:
        floor = (
            f" Plain {'copy' if on_gpu else 'read'}: {rate / 1e9:.1f} GB/s; floor of plain decoding: "
            f"{rate / family['bytes_per_step']['target']:.1f} tokens/s."
        )
    return (
        f"{family['name']}, {run['dtype']}, {how}; medians, repeats: {run['repeats']}, prompts: {run['prompts']}, up to {run['new_tokens']} tokens "
        f"each.{floor} {where}, torch {info['torch']}, transformers {info['transformers']}, commit {(info['commit'] or 'unknown')[:10]}. "
        f"Measured {info['date'][:10]}."
    )


def text(record: dict[str, Any]) -> str:
    """All tables of a summary, a dataset each, with what is below them."""
    rows, parts = rows_of(record), []
    for name in dict.fromkeys(row.dataset for row in rows):
        some = [row for row in rows if row.dataset == name]
        parts.append(
            "\n".join(
                filter(None, [name, aligned(lines_of(some)), *verdict(some), *remarks(some), *not_measured(some)])
            )
        )
    parts.append(caption(record))
    measured = (record["family"].get("planted") or {}).get("measured")
    if measured:
        rates = ", ".join(f"{row[-1]:.3f}" for row in measured["agreement"][:-1])
        parts.append(
            f"Agreement with the target measured over {measured['positions']} positions: {rates}; rounding alone changes the target's own "
            f"choice at {100 * measured['flips']:.2f} % of them"
        )
    return "\n\n".join(parts)


def markdown(record: dict[str, Any]) -> str:
    """The whole table for the documentation, and the lines below it. The remarks of rows, a part for each text, stay in the summary."""
    rows = rows_of(record)
    heads, *lines = lines_of(rows)
    return "\n".join([markdown_table(heads, lines), "", *verdict(rows), *not_measured(rows), caption(record)])


def status(record: dict[str, Any]) -> int:
    """The exit status: 1 where a text that has to be exact differs."""
    return int(record["run"]["dtype"] == "float32" and not all(row.is_identical for row in rows_of(record)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.tables", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("summary", type=Path, help="summary.json of a run")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="rewrite the table between its comments there")
    parser.add_argument("--mark", default="generate", help="name in the comments (%(default)s)")
    args = parser.parse_args(arguments)
    record = json.loads(args.summary.read_text(encoding="utf-8"))
    print(text(record))
    if args.docs:
        replace_table(args.docs, markdown(record), args.mark)
    return status(record)


if __name__ == "__main__":
    sys.exit(main())
