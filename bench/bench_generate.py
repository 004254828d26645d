"""End-to-end speed of all ways to generate the target's text, in one run on one device.

On a CPU with the bundled family, or on a GPU with models of LLaMA's sizes and planted agreement (``bench/planted.py``)::

    python -m bench.bench_generate --json bench/results/generate_cpu.json --docs docs/speed.md
    python -m bench.bench_generate --device cuda --planted 1B 8B --agreement 0.8 --json generate.json

All rows generate the same prompts, one at a time, and take turns prompt by prompt (``python/pipespec/bench/comparison.py``). transformers' rows are tuned
first, on prompts that are not measured; the published schedules (``bench/published.py``) are tuned, too; ours run with their defaults. Every
row in one process also tries one and two CPU threads. A row that fails is listed with the reason. With ``--json`` and ``--docs`` a picture is written beside the file (``.svg``). Exit status 1
if a float32 text of pipespec or transformers differs from the reference, otherwise 0; slower rows do not change it.

Columns: *tokens/s*, the median of the repeats; the ratios to transformers' plain ``generate()`` and to its fastest row; *same text*, texts equal to
the reference (``generate()``'s; sampled: our plain decoding's with the same seed) and the median position of the first difference; *accepted
length*, tokens per step of each verifying model; *acceptance*, accepted per verified draft token; *weights/s*, bytes of weights that all forwards
read per second, relative to a plain copy (GPU) or read (CPU); *of floor*, speed relative to plain decoding that only reads the target's weights at
that rate; with ``--first-token``, *first token*, milliseconds of a call for one
token, and *decoding*, tokens/s of the tokens behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from bench import gpu
from bench.baselines import all_contenders
from bench.harness import markdown_table, replace_table, save
from bench.planted import SHAPES, bytes_per_step, plant, random_prompts
from bench.plot import OTHERS, OURS, Bar, bars
from bench.timing import copy_bytes_per_second, read_bytes_per_second
from pipespec.bench import comparison
from pipespec.bench.comparison import IsolatedComparison, Measurement, footnotes, shown
from pipespec.bench.contenders import GREEDY, Contender, Family, Workload
from pipespec.bench.machine import provenance
from pipespec.bench.results import Sample
from pipespec.cli.options import flag, option
from pipespec.demo import load_family, prompts
from pipespec.process.progress import quiet_transformers, say, working
from pipespec.process.table import aligned

CALIBRATION = 2
PROGRESS_EVERY_S = 5.0

TURN_SHARE, LEAST_TURN_S = 0.3, 10.0
"""A start or a text that takes longer than this share of ``--seconds`` and longer than these seconds has failed."""

POSITIONS = 1024
"""At least as many positions calibrate the agreement of planted models, and as many measure it."""


@dataclass
class DeviceMeasurement(Measurement):
    """A row with the figures that relate it to the device."""

    weights_of_copy: float | None = None
    of_floor: float | None = None
    seconds_to_first_token: float | None = None
    decode_tokens_per_second: float | None = None


class DeviceComparison(IsolatedComparison):
    """A comparison that isolates its contenders, limits the time of a turn, and relates the speeds to the device.

    Args:
        workload: See the base class, as for ``contenders`` and ``options``.
        rate: Bytes per second of a plain copy or read.
        tuning_tokens: New tokens of the runs that tune; None: the workload's.
    """

    def __init__(
        self,
        workload: Workload,
        contenders: Sequence[Contender],
        rate: float,
        *,
        tuning_tokens: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(workload, contenders, progress=self._show_progress, **options)
        self.rate, self.tuning_tokens = rate, tuning_tokens
        self._new_tokens: int | None = None
        self.first_token: dict[str, float] = {}
        self.bytes = {name: bytes_per_step(model) for name, model in workload.family.models.items()}
        self._shown = 0.0

    def _show_progress(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._shown > PROGRESS_EVERY_S:
            say(f"{what} ({done + 1} of {total}, {self.elapsed:.0f} s)")
            self._shown = time.monotonic()

    @contextmanager
    def turn(self, contender: Contender) -> Iterator[None]:
        with super().turn(contender), within(max(LEAST_TURN_S, TURN_SHARE * self.limit)):
            yield

    def run(self, contender: Contender, ids: torch.Tensor, new_tokens: int | None = None) -> Sample | None:
        return super().run(contender, ids, new_tokens or self._new_tokens)

    def tune(self, calibration: Sequence[torch.Tensor], settings: int | None = None) -> None:
        self._new_tokens = self.tuning_tokens
        try:
            super().tune(calibration, settings)
        finally:
            self._new_tokens = None

    def measure_first_token(self, texts: Sequence[torch.Tensor]) -> None:
        """Measure the seconds of a call for one token: the prompt's forward and the fixed costs of a call, median over ``texts``.

        The first call after each start does not count, because a call of another length may allocate.
        """
        for done, contender in enumerate(self.active):
            if self.elapsed > self.limit:
                return
            self.progress(f"first token: {contender.label}", done, len(self.contenders))
            runs = [text for ids in (texts[0], *texts) if (text := self.run(contender, ids, 1))]
            if len(runs) > 1:
                self.first_token[contender.key] = statistics.median(text.seconds for text in runs[1:])

    def device_results(self) -> list[DeviceMeasurement]:
        """The rows of :meth:`results` with the figures of the device."""
        found = []
        for result in (DeviceMeasurement(**asdict(r)) for r in self.results()):
            found.append(result)
            if result.tokens_per_second is None:
                continue
            texts = self.runs[result.key].values()
            # An n-gram index has no weights.
            read = sum(self.bytes.get(stage.name, 0) * stage.steps for text in texts for stage in text.stages)
            # No bytes: the row does not report its forwards.
            result.weights_of_copy = read / sum(text.seconds for text in texts) / self.rate if read else None
            result.of_floor = result.tokens_per_second / self.floor
            first = self.first_token.get(result.key)
            if first is not None:
                result.seconds_to_first_token = first
                # Seconds of each text without its first token, and the tokens behind that one.
                rest = sum(text.seconds - first for text in texts), sum(len(text.tokens) - 1 for text in texts)
                result.decode_tokens_per_second = rest[1] / rest[0] if min(rest) > 0 else None
        return found

    @property
    def floor(self) -> float:
        """Tokens per second of plain decoding that only reads the target's weights."""
        return self.rate / self.bytes["target"]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in a block that takes longer, where Python handles signals: only in the main thread."""
    if seconds == float("inf") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: object) -> None:
        raise TimeoutError(f"not over after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


HEADER = (*comparison.HEADER, "weights/s", "of floor", "first token, ms", "decoding")


def cells(result: DeviceMeasurement) -> tuple[str, ...]:
    """A row under :data:`HEADER`."""
    if result.reason is not None:
        return (*comparison.cells(result), *[""] * 4)
    return (
        *comparison.cells(result),
        shown(result.weights_of_copy, "{:.2f}"),
        shown(result.of_floor, "{:.2f}"),
        shown(result.seconds_to_first_token and 1e3 * result.seconds_to_first_token, "{:.1f}"),
        shown(result.decode_tokens_per_second, "{:.1f}"),
    )


def verdict(results: Sequence[Measurement]) -> list[str]:
    """Our fastest row against the fastest of the others, and every row of ours that is slower or differs."""
    speed = {r.label: r.tokens_per_second for r in results if r.tokens_per_second}
    ours = [r.label for r in results if r.group == "ours" and r.label in speed]
    others = [r.label for r in results if r.group != "ours" and r.label in speed]
    if not ours or not others:
        return ["Nothing to compare: " + ("none of ours ran." if not ours else "no other row ran.")]
    rival, best = max(others, key=speed.__getitem__), max(ours, key=speed.__getitem__)
    factor = speed[best] / speed[rival]
    lines = [
        f"{'Ours at its best' if factor >= 1 else 'WE LOSE, even at our best'}: {best}, {factor:.2f} times the best of the others ({rival})."
    ]
    behind = [label for label in ours if label != best and speed[label] < speed[rival]]
    if behind:
        shares = "; ".join(f"{label} {speed[label] / speed[rival]:.2f}x" for label in behind)
        lines.append(f"Where we lose against {rival}: {shares}.")
    plain = next((r.tokens_per_second for r in results if r.key == "plain"), None)
    slower = [label for label in ours if plain and speed[label] < plain]
    if slower:
        lines.append(f"Slower than plain generate(): {'; '.join(slower)}.")
    differ = [r.label for r in results if r.group == "ours" and not r.is_identical]
    if differ:
        lines.append(f"Not always the same text: {'; '.join(differ)}.")
    return lines


def summary(record: dict[str, Any]) -> str:
    """The measured workload, and the machine."""
    info, run = record["machine"], record["run"]
    on_gpu = run.get("device") == "cuda"
    where = info["gpus"][0]["name"] if on_gpu else f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads"
    sampled = run["sampling"]
    how = "greedy" if sampled is None else f"temperature {sampled['temperature']:g}, top-p {sampled['top_p']:g}"
    return (
        f"{record['family']['name']}, {run['dtype']}, {how}; medians, repeats: {run['repeats']}, prompts: {run['prompts']}, up to "
        f"{run['new_tokens']} tokens each. Plain {'copy' if on_gpu else 'read'}: "
        f"{record['bytes_per_second'] / 1e9:.1f} GB/s; floor of plain decoding: {record['floor_tokens_per_second']:.1f} tokens/s. "
        f"{where}, torch {info['torch']}, transformers {info['transformers']}, commit {(info['commit'] or 'unknown')[:10]}. "
        f"Measured {info['date'][:10]}."
    )


def markdown(results: Sequence[DeviceMeasurement]) -> str:
    """The whole table for the documentation, without columns that no row has, and the lines below it."""
    rows = [cells(r) for r in results if r.reason is None]
    columns = [i for i, _ in enumerate(HEADER) if i < 2 or any(row[i] != "-" for row in rows)]
    table = markdown_table([HEADER[i] for i in columns], [[row[i] for i in columns] for row in rows])
    return "\n".join([table, "", *verdict(results), *footnotes(results)])


COLOURS = {"ours": OURS, "reference": "#d1603d"}


def picture(results: Sequence[Measurement], caption: str) -> str:
    """The rows that ran, as bars."""
    rows = []
    for r in results:
        if r.tokens_per_second is not None:
            colour = COLOURS.get(r.group, "#888888" if r.key == "plain" else OTHERS)
            text = f"{r.tokens_per_second:.1f}{shown(r.vs_plain, '  ({:.2f}x)', '')}"
            rows.append(Bar(r.label, r.tokens_per_second, text, colour))
    return bars("tokens/s, from prompt to last token", rows, caption)


def results_of(record: dict[str, Any]) -> list[DeviceMeasurement]:
    """The rows of a results file."""
    known = {f.name for f in fields(DeviceMeasurement)}
    return [DeviceMeasurement(**{name: v for name, v in row.items() if name in known}) for row in record["rows"]]


def report(record: dict[str, Any]) -> int:
    """Print the table and the verdict; returns the exit status."""
    results = results_of(record)
    print(aligned([HEADER, *map(cells, results)]))
    for line in (*verdict(results), *footnotes(results), summary(record)):
        print(line)
    measured = (record["family"].get("planted") or {}).get("measured")
    if measured:
        rates = ", ".join(f"{row[-1]:.3f}" for row in measured["agreement"][:-1])
        print(
            f"Agreement with the target measured over {measured['positions']} positions: {rates}; rounding alone changes the target's own "
            f"choice at {100 * measured['flips']:.2f} % of them"
        )
    return 1 if record["run"]["dtype"] == "float32" and not all(r.is_identical for r in results) else 0


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.earlier:
        record = json.loads(args.earlier.read_text(encoding="utf-8"))
        save(args.json, record)
    else:
        if args.device == "cuda":
            gpu.refuse_without_gpu("bench.bench_generate")
        if args.quick:
            args.prompts, args.repeats, args.new_tokens = (
                min(args.prompts, 2),
                min(args.repeats, 2),
                # On a GPU the prompt's forward would be a large part of a short text's time.
                256 if args.device == "cuda" else min(args.new_tokens, 48),
            )
        with quiet_transformers():
            record = measure(args)
    status = report(record)
    if args.docs:
        if args.json:
            args.json.with_suffix(".svg").write_text(picture(results_of(record), summary(record)), encoding="utf-8")
        is_planted = record["family"]["name"].startswith("planted")
        mark = f"planted-{record['run']['dtype']}" if is_planted else "generate"
        replace_table(args.docs, f"{markdown(results_of(record))}\n{summary(record)}", mark)
    return status


# fmt: off
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench_generate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    option(parser, "device", None, str, "default: %(default)s", choices=("cpu", "cuda"), default="cpu")
    models = parser.add_mutually_exclusive_group()
    option(models, "family", "NAME", str, "bundled, or a folder with such a family (%(default)s)", default="bundled")
    option(models, "planted", "SHAPE", str, f"smallest first: {', '.join(SHAPES)}", nargs="+", choices=list(SHAPES))
    option(parser, "agreement", "A", float, "agreement of planted drafts with the target (0.8)", nargs="+", default=[0.8])
    option(parser, "dtype", None, str, "default: float32 on a CPU, bfloat16 on a GPU", choices=("float32", "bfloat16"))
    option(parser, "prompts", "N", int, "%(default)s", default=6)
    option(parser, "prompt-tokens", "P", int, "prompt length of planted models (%(default)s)", default=64)
    option(parser, "new-tokens", "T", int, "most per prompt (%(default)s)", default=128)
    option(parser, "repeats", "R", int, "%(default)s", default=3)
    cores = len(os.sched_getaffinity(0))
    option(parser, "threads", "N", int, "CPU threads of all processes of a row (%(default)s)", default=cores)
    flag(parser, "uncalibrated", "planted models without calibration, which all agree: for rows without drafts")
    flag(parser, "first-token", "measure the time to the first token apart")
    option(parser, "tuning-tokens", "T", int, "most per prompt while tuning (--new-tokens)")
    option(parser, "settings", "N", int, "candidates of tuning per row, at most (all)")
    option(parser, "rows", "ROWS", str, "all, or parts of keys: those rows and generate() (all)", nargs="+", default=["all"])
    option(parser, "temperature", None, float, "sample (greedy without)")
    option(parser, "top-p", None, float, "%(default)s", default=1.0)
    option(parser, "seed", None, int, "seed of planted weights and of sampling (%(default)s)", default=0)
    option(parser, "seconds", None, float, "time limit: no new round begins after it", default=float("inf"))
    flag(parser, "quick", "two prompts of 48 tokens (GPU: 256), twice")
    option(parser, "json", "FILE", Path, "write the measurement")
    option(parser, "docs", "PAGE", Path, "rewrite the whole table between its comments there")
    option(parser, "from", "FILE", Path, "do not measure: use this measurement", dest="earlier")
    return parser
# fmt: on


def _models(args: argparse.Namespace) -> tuple[Family, list[torch.Tensor], dict[str, Any]]:
    """The family, prompts ``[1, P]`` (the last ones for tuning), and the record of planted models."""
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    count = args.prompts + CALIBRATION
    if args.planted:
        rates = args.agreement[0] if len(args.agreement) == 1 else args.agreement
        chain = plant(
            args.planted,
            rates,
            seed=args.seed,
            device=args.device,
            dtype=dtype,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            texts=0 if args.uncalibrated else max(8, -(-POSITIONS // args.new_tokens)),
            progress=say,
        )
        *drafts, target = chain.models
        family = Family(
            "planted " + " -> ".join(args.planted), target, dict(zip(args.planted, drafts, strict=False)), None
        )
        texts = random_prompts(target.config.vocab_size, count, args.prompt_tokens, args.seed + 3)
        return family, list(texts[:, None]), {"planted": chain.record()}
    with working("loading the models"):
        family = load_family(None if args.family == "bundled" else Path(args.family))
        for model in (family.target, *family.drafts.values()):
            model.to(device=args.device, dtype=dtype)
    return family, [family.encode(text) for text in prompts(count)], {}


def rows_of(names: Sequence[str], drafts: Sequence[str]) -> list[Contender]:
    """The contenders that ``--rows`` names."""
    everything = all_contenders(drafts)
    if names == ["all"]:
        return everything
    return [c for c in everything if c.key == "plain" or any(name in c.key for name in names)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure. With ``--json`` the file is written after each round, so that an interrupted run keeps its figures."""
    began = time.monotonic()
    threads = args.threads
    torch.set_num_threads(threads)
    info: dict[str, Any] = provenance(threads)
    family, texts, about = _models(args)
    measured, calibration = texts[: args.prompts], texts[args.prompts :]
    sampled = None if args.temperature is None else {"temperature": args.temperature, "top_p": args.top_p}
    sampling = GREEDY if sampled is None else {"do_sample": True, "top_k": 0, **sampled}
    workload = Workload(family, args.new_tokens, max(ids.shape[1] for ids in texts), threads, sampling)
    rate = copy_bytes_per_second() if args.device == "cuda" else read_bytes_per_second(threads)
    if args.device == "cuda":
        torch.cuda.empty_cache()  # the two gigabytes of the copy
    contenders = rows_of(args.rows, list(family.drafts))
    limit = args.seconds - (time.monotonic() - began)

    options = {"limit": limit, "seed": args.seed, "tuning_tokens": args.tuning_tokens}
    with DeviceComparison(workload, contenders, rate, **options) as bench:

        def record() -> dict[str, Any]:
            results = bench.device_results()
            return {
                "machine": info,
                "family": {"name": family.name, "bytes_per_step": bench.bytes, **about},
                "run": {
                    "dtype": str(family.target.dtype).removeprefix("torch."),
                    "device": args.device,
                    "prompts": len({prompt for runs in bench.runs.values() for _, prompt in runs}),
                    "prompt_tokens": [ids.shape[1] for ids in measured],
                    "new_tokens": args.new_tokens,
                    "repeats": max((len(r.repeats) for r in results), default=0),
                    "sampling": sampled,
                    "seed": args.seed,
                    "seconds": round(time.monotonic() - began, 1),
                },
                "bytes_per_second": rate,
                "floor_tokens_per_second": bench.floor,
                "tuning": bench.tuning,
                "rows": [asdict(result) for result in results],
            }

        bench.start(calibration[0])
        save(args.json, record())
        bench.tune(calibration, args.settings)
        if args.first_token:
            bench.measure_first_token(measured)
        for _ in bench.measure(measured, args.repeats):
            save(args.json, record())
        found = record()
        save(args.json, found)
        return found


if __name__ == "__main__":
    sys.exit(main())
