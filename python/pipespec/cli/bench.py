"""``pipespec bench``: measure systems over datasets into a folder of results. ``python -m bench.run`` is the same with the papers' baselines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipespec.cli.options import DTYPES, Subparsers, check_output_folder, flag, option
from pipespec.process.progress import quiet_transformers, say, working
from pipespec.process.table import aligned

if TYPE_CHECKING:
    from pipespec.bench.config import BenchConfig
    from pipespec.bench.results import ResultsFolder, Settings, Summary
    from pipespec.bench.runner import PreparedRun


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("bench", help="measure systems over datasets", description=run.__doc__)
    parser.set_defaults(command=run)
    add_options(parser)
    return [parser]


# fmt: off
def add_options(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    option(models, "target", "PATH", str, "model that defines the text (default: the bundled family)")
    option(models, "draft", "PATH", str, "draft model; several: smallest first", action="append", dest="drafts")
    option(models, "device", "D", str, "one for all models or one per model, drafts first; auto; default: cpu", nargs="+")
    option(models, "dtype", None, str, "default: as stored; float32 for the bundled family", choices=DTYPES)
    flag(models, "trust-remote-code", "allow a model's own Python code to run")
    systems = parser.add_argument_group("systems")
    option(systems, "systems", "LIST", str, "names with commas between; --list shows all")
    option(systems, "chains", None, str, "drafts alone, all in one chain, or both (default)", choices=("each", "whole", "both"))
    option(systems, "lookahead", "N", int, "sweep these values", nargs="+")
    option(systems, "tuning", "N", int, "settings tried of each tuned system (4); 0: its default")
    option(systems, "threads", "N", int, "CPU threads (default: all cores)")
    text = parser.add_argument_group("texts")
    option(text, "prompts", "[NAME=]FILE", str, "jsonl, json, csv or parquet, also .gz; the format follows from NAME or the fields", nargs="+", default=[])
    option(text, "samples", "N", int, "most prompts of each dataset (default: all)")
    option(text, "new-tokens", "N", int, "most new tokens per prompt (128)")
    flag(text, "chat", "apply the target's chat template", default=None, dest="chat_template")
    flag(text, "ignore-eos", "write --new-tokens tokens, past end-of-text tokens", default=None)
    option(text, "temperature", "T", float, "sample (default: greedy)")
    option(text, "top-k", "K", int, "with --temperature")
    option(text, "top-p", "P", float, "with --temperature")
    option(text, "seed", "S", int, "of sampling (0)")
    option(parser, "out", "DIR", Path, "folder of results; one that exists is continued")
    flag(parser, "json", "the summary as JSON")
    flag(parser, "list", "list systems and formats of prompts")
# fmt: on


def run(args: argparse.Namespace) -> int:
    """Measure how fast systems generate the same texts: pipespec's schedules and transformers' own. Systems take turns
    prompt by prompt, and every text is compared with that of generate(). Each text is a JSON line in --out. A second start with the same options does
    what is missing. Exit code 1 if texts differ in float32."""
    with working("importing torch and transformers"):
        from pipespec.bench.config import BenchConfig
        from pipespec.bench.runner import prepare

    def load(config: BenchConfig) -> PreparedRun:
        return prepare(config, trust_remote_code=args.trust_remote_code)

    return _list() if args.list else measure(args, with_bundled(configured(args, BenchConfig())), load)


def measure(args: argparse.Namespace, config: BenchConfig, prepare: Callable[[BenchConfig], PreparedRun]) -> int:
    """Measure what is missing in the folder ``args.out``, and print the table; returns the exit code."""
    from pipespec.bench.results import ResultsFolder
    from pipespec.bench.runner import Runner

    if args.out is None:
        raise ValueError("no folder for the results: give --out DIR")
    check_output_folder(args.out)
    folder = ResultsFolder(args.out)
    if args.out.is_dir() and any(args.out.iterdir()) and not folder.exists:
        raise ValueError(f"{args.out} holds other files: give a new folder, or one that pipespec bench wrote")
    with quiet_transformers():
        with working("loading the models and the prompts"):
            prepared = prepare(config)
        runner = Runner(prepared, folder, tuning=config.tuning)
        try:
            summary = runner.run()
        except KeyboardInterrupt:
            say(f"interrupted: {folder.path} keeps the complete samples, and the same command continues")
            raise
    settings = runner.settings
    print(json.dumps(asdict(summary), indent=1) if args.json else table(summary, settings))
    return _verdict(summary, settings, folder)


def configured(args: argparse.Namespace, config: BenchConfig) -> BenchConfig:
    """A configuration with the options over it that have the names of its fields."""
    from pipespec.bench.config import with_prompts
    from pipespec.bench.systems import check_kinds

    known = {f.name for f in fields(config)}
    given = {name: value for name, value in vars(args).items() if name in known and value not in (None, [])}
    if args.systems is not None:
        given["systems"] = [name.strip() for name in args.systems.split(",") if name.strip()]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    config = with_prompts(replace(config, **given), args.prompts)
    check_kinds(config.systems)
    return config


def with_bundled(config: BenchConfig) -> BenchConfig:
    """The configuration with the bundled family where it names no model."""
    if config.target is None:
        if config.drafts:
            raise ValueError("--draft needs a --target: the bundled family has its own drafts")
        from pipespec.demo import family_path

        say("no --target: using the bundled demo family, target + small + medium")
        config = replace(
            config,
            target=str(family_path("target")),
            drafts=tuple(str(family_path(name)) for name in ("small", "medium")),
            dtype=config.dtype or "float32",
        )
    return config


def _list() -> int:
    from pipespec.bench.datasets import FIELDS, FORMATS
    from pipespec.bench.systems import KINDS

    formats = [(name, ", ".join(f.fields) or FIELDS) for name, f in FORMATS.items()]
    print(aligned([("system", ""), *((name, kind.about) for name, kind in KINDS.items())], left=2))
    print()
    print(aligned([("format", "fields"), *formats], left=2))
    return 0


def table(summary: Summary, settings: Settings) -> str:
    """The summary as text: one table per dataset."""
    parts = []
    for dataset in settings.datasets:
        rows = [
            ("", "tokens/s", "speed-up", "same text", "accepted length", "acceptance", "first token, ms", "samples")
        ]
        left = []
        for system in settings.systems:
            row = summary.row(dataset.name, system.key)
            if row is None or row.tokens_per_second is None:
                left.append(f"{system.label}: not measured ({(row.not_measured if row else None) or 'no sample yet'})")
                continue
            lengths = " / ".join(f"{v:.2f}" for v in row.accepted_length.values())
            if row.equivalent_accepted_length is not None:
                lengths = f"{row.equivalent_accepted_length:.2f} equivalent"
            rows.append(
                (
                    system.label,
                    f"{row.tokens_per_second:.1f}",
                    "-" if row.speedup is None else f"{row.speedup:.2f}x",
                    "-" if row.identical is None else f"{row.identical:.0%}",
                    lengths or "-",
                    " / ".join(f"{v:.2f}" for v in row.acceptance_rate.values()) or "-",
                    "-" if row.seconds_to_first_token is None else f"{1e3 * row.seconds_to_first_token:.0f}",
                    str(row.samples) + (f", {row.errors} failed" if row.errors else ""),
                )
            )
        base = summary.baseline.get(dataset.name)
        against = f"speed-up against {settings.system(base).label}" if base else "no baseline"
        parts.append("\n".join([f"{dataset.name} ({dataset.format}), {against}", aligned(rows), *left]))
    return "\n\n".join(parts)


def _verdict(summary: Summary, settings: Settings, folder: ResultsFolder) -> int:
    """Say what is missing and what differs; returns the exit code."""
    labels = {system.key: system.label for system in settings.systems}
    differ = sorted({labels[r.system] for r in summary.rows if r.identical is not None and r.identical < 1})
    if not summary.complete:
        say(
            f"some samples are missing or failed: start the same command again to measure them; {folder.path} keeps the others"
        )
    if differ:
        why = (
            ""
            if settings.dtype in ("float32", "float64")
            else f" (in {settings.dtype}, forwards of different widths round differently)"
        )
        say(f"not always the text of generate(): {'; '.join(differ)}{why}")
    say(f"{folder.path} has the results")
    return 1 if differ and settings.dtype in ("float32", "float64") else 0
