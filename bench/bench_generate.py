"""Who generates the target's text, and how fast, from prompt to last token? All ways in one run, on one device.

On a CPU, with the bundled family, or on a GPU, with models of LLaMA's sizes whose agreement is planted (``bench/planted.py``)::

    python -m bench.bench_generate --device cpu --family bundled --json bench/results/generate_cpu.json
    python -m bench.bench_generate --device cuda --planted 1B 8B --agreement 0.8 --json generate.json

Everybody generates the same prompts, one text at a time, taking turns prompt by prompt. transformers' assisted generation, its prompt lookup and the
published schedules (``bench/baselines.py``) are tuned first, on prompts that are not measured; ours run with their defaults. Who fails, or is not
there, is a row with the reason. With ``--json`` a picture is written beside it (``.svg``). Exit status 0, also where we lose; 1: a
text differs that may not (float32).

The columns: *tokens/s*, the median of the repeats; its ratio to transformers' plain ``generate()`` and to transformers' best; *same text*, the
share of texts equal to the reference (``generate()``'s; sampled: our plain decoding's under the same seed; transformers draws other
numbers), and where not, the new token at which they part (the median); *length*, tokens per step of the target; *weights/s*, bytes of weights that all
stages' forwards read per second, over what a plain copy (GPU) or read (CPU) moves; *of floor*, speed over that of plain
decoding if it did nothing but read the target's weights at that rate, which only speculation exceeds; *syncs* and *launches* of the host
per token (GPU, of this process: kernels and graphs launched; waits for the device).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import contenders, gpu
from bench.bench_cpu import replace_table
from bench.contenders import Attention, Contender, Field, Outcome, Sampling
from bench.harness import last_level_cache_bytes, machine, replace, seconds
from bench.planted import SHAPES, bytes_per_step, plant, random_prompts
from bench.plot import OTHERS, OURS, Bar, bars
from pipespec.demo import prompts
from pipespec.demo.comparison import Family, aligned
from pipespec.progress import quiet_transformers, say, working
from pipespec_kernels import _native

CALIBRATION = 2
PATIENCE_S = 5.0  # between two lines of progress
SLOW_START_SHARE, TUNING_SHARE = 0.3, 0.5  # of --seconds: who takes long starts before, and tuning ends
TURN_SHARE, LEAST_TURN = (
    0.3,
    10.0,
)  # of --seconds, and seconds: a start or a text that takes longer than both has failed
POSITIONS = (
    1024  # at least, by which the agreement of planted models is calibrated, and as many by which it is measured
)
PROFILED = (8, 24)  # new tokens of the two runs whose difference is counted

SYNCS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D"}
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"}
LAUNCHES |= {"cudaLaunchCooperativeKernel", "cuGraphLaunch"}


@dataclass
class Result:
    """One row. ``reason``: why it has no figures; everything else is None then, or empty."""

    key: str
    label: str
    group: str
    setting: str | None = None
    reason: str | None = None
    note: str = ""
    tokens_per_second: float | None = None
    repeats: tuple[float, ...] = ()
    vs_plain: float | None = None
    vs_best_hf: float | None = None
    identical: int | None = None
    runs: int = 0
    parts_at: float | None = None
    accepted_length: float | None = None
    weights_of_copy: float | None = None
    of_floor: float | None = None
    syncs_per_token: float | None = None
    launches_per_token: float | None = None


@dataclass(frozen=True)
class Run:
    """An outcome and its wall-clock seconds."""

    outcome: Outcome
    seconds: float


class Bench:
    """Contenders that take turns. ``rate``: bytes per second of a plain copy or read, the yardstick; ``limit``: seconds after
    which nothing new is begun but what a table needs."""

    def __init__(self, field: Field, everybody: Sequence[Contender], rate: float, limit: float, seed: int = 0) -> None:
        self.field, self.rate, self.limit, self.seed = field, rate, limit, seed
        self.device = field.family.target.device
        self.contenders = list(everybody)
        self.reasons: dict[str, str] = {}
        self.tuning: dict[str, list[dict[str, Any]]] = {}
        self.runs: dict[str, dict[tuple[int, int], Run]] = {c.key: {} for c in everybody}
        self.counted: dict[str, tuple[float, float]] = {}
        self.bytes = {name: bytes_per_step(model) for name, model in field.models.items()}
        self.lost: str | None = None
        """Why nothing can be run any more: an error on a GPU can be the end of its context. What was measured before stays."""
        self._attention = Attention(list(field.models.values()))
        self._began, self._said = time.monotonic(), 0.0

    @property
    def past(self) -> float:
        return time.monotonic() - self._began

    @property
    def active(self) -> list[Contender]:
        return [] if self.lost else [c for c in self.contenders if c.key not in self.reasons]

    def _say(self, what: str) -> None:
        if time.monotonic() - self._said > PATIENCE_S:
            say(f"{what} ({self.past:.0f} s)")
            self._said = time.monotonic()

    def _fails(self, contender: Contender, error: BaseException) -> None:
        text = str(error).strip() or "no reason given"
        self.reasons[contender.key] = f"{type(error).__name__}: {text.splitlines()[0]}"
        say(f"{contender.label}: {self.reasons[contender.key]}")
        try:
            contender.close()
        except Exception as further:
            say(f"{contender.label}, closing: {type(further).__name__}: {further}")
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception as further:
                self.lost = f"the GPU could not be used any more after {contender.label} had failed"
                say(f"{self.lost}: {str(further).splitlines()[0]}")

    def run(self, contender: Contender, ids: torch.Tensor, new_tokens: int | None = None) -> Run | None:
        """Generates once; None if the contender failed, which ends its part."""
        try:
            with self._attention.of(contender.key), within(max(LEAST_TURN, TURN_SHARE * self.limit)):
                ids = ids.to(self.device)
                self._synchronize()
                began = time.perf_counter()
                outcome = contender.run(ids, new_tokens or self.field.new_tokens, self.seed)
                self._synchronize()
                run = Run(outcome, time.perf_counter() - began)
                contender.rest()
                return run
        except Exception as error:
            self._fails(contender, error)
            return None

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def start(self, ids: torch.Tensor) -> None:
        """Makes everybody ready and lets each generate once, unmeasured."""
        for contender in sorted(self.contenders, key=lambda c: c.slow):
            self._say(f"starting: {contender.label}")
            if self.lost:
                continue
            if self.past > self.limit * (SLOW_START_SHARE if contender.slow else 1):
                self.reasons[contender.key] = "not started: the time was over"
                continue
            try:
                with self._attention.of(contender.key), within(max(LEAST_TURN, TURN_SHARE * self.limit)):
                    contender.start(self.field)
            except Exception as error:
                self._fails(contender, error)
            else:
                self.run(contender, ids)

    def tune(self, calibration: Sequence[torch.Tensor], settings: int | None) -> None:
        """Finds the best of each contender's first ``settings`` (None: all), as far as the time reaches."""
        for contender in self.active:
            found: list[dict[str, Any]] = []
            for setting in contender.settings[:settings]:
                if self.past > self.limit * TUNING_SHARE:
                    break
                self._say(f"tuning: {contender.label}, {setting}")
                contender.use(setting)
                runs = [run for ids in calibration if (run := self.run(contender, ids))]
                if contender.key in self.reasons:
                    break
                found.append({"setting": str(setting), "tokens_per_second": _speed(runs)})
            if found and contender.key not in self.reasons:
                best = max(range(len(found)), key=lambda i: found[i]["tokens_per_second"])
                contender.use(contender.settings[best])
                self.tuning[contender.key] = found
            elif contender.settings and contender.key not in self.reasons:
                contender.use(contender.settings[0])

    def measure(
        self, texts: Sequence[torch.Tensor], repeats: int, after_round: Callable[[], None] = lambda: None
    ) -> None:
        """Everybody generates each of ``texts``, ``repeats`` times; ends early when time is up (whole rounds only)."""
        longest_round = 0.0
        for repeat in range(repeats):
            for prompt, ids in enumerate(texts):
                began = self.past
                if (repeat or prompt) and began + longest_round > self.limit:
                    say(
                        f"the time is over: {repeat} of {repeats} repeats, {prompt} of {len(texts)} prompts of the next"
                    )
                    return
                self._say(f"measuring, repeat {repeat + 1} of {repeats}, prompt {prompt + 1} of {len(texts)}")
                order = self.active
                turn = (repeat * len(texts) + prompt) % max(len(order), 1)
                for contender in (*order[turn:], *order[:turn]):
                    run = None if self.lost else self.run(contender, ids)
                    if run is not None:
                        self.runs[contender.key][repeat, prompt] = run
                longest_round = max(longest_round, self.past - began)
                after_round()
                if self.lost:
                    return

    def count(self, ids: torch.Tensor) -> None:
        """Syncs and launches per token, on a GPU, from the difference of two runs: what a call costs by itself falls out."""
        if self.device.type != "cuda":
            return
        for contender in self.active:
            if self.past > self.limit:
                return
            if not contender.visible:
                continue
            self._say(f"counting launches: {contender.label}")
            try:
                few, more = (self._profile(contender, ids, n) for n in PROFILED)
            except Exception as error:  # of the profiler
                say(f"counting launches: {type(error).__name__}: {error}")
                return
            if few is None or more is None or more[2] <= few[2]:
                continue
            tokens = more[2] - few[2]
            self.counted[contender.key] = ((more[0] - few[0]) / tokens, (more[1] - few[1]) / tokens)

    def _profile(self, contender: Contender, ids: torch.Tensor, new_tokens: int) -> tuple[int, int, int] | None:
        if self.run(contender, ids, new_tokens) is None:  # what is made on the first call of a size is made now
            return None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            run = self.run(contender, ids, new_tokens)
        if run is None:
            return None
        calls = {event.key: event.count for event in profile.key_averages()}
        return _total(calls, SYNCS), _total(calls, LAUNCHES), len(run.outcome.text)

    def results(self) -> list[Result]:
        """One per contender, in their order."""
        speeds = {c.key: self._speeds(c) for c in self.contenders}
        running = [c for c in self.contenders if speeds[c.key]]
        hf = [c for c in running if c.group == "hf"]
        best = max(hf, key=lambda c: statistics.median(speeds[c.key])) if hf else None
        return [self._result(c, speeds, best) for c in self.contenders]

    def _speeds(self, contender: Contender) -> list[float]:
        """Tokens per second by repeat; the last one only if it is whole, or the only one."""
        if contender.key in self.reasons:
            return []
        runs = self.runs[contender.key]
        by_repeat = {i: [run for (repeat, _), run in runs.items() if repeat == i] for i, _ in runs}
        whole = max((len(r) for r in by_repeat.values()), default=0)
        return [_speed(r) for _, r in sorted(by_repeat.items()) if len(r) == whole]

    def _reference(self) -> str | None:
        exact = [c.key for c in self.contenders if c.exact and self.runs[c.key] and c.key not in self.reasons]
        wanted = "plain" if self.field.sampling is None else "ours-plain"
        return wanted if wanted in exact else next(iter(exact), None)

    def _result(self, contender: Contender, speeds: dict[str, list[float]], best: Contender | None) -> Result:
        key = contender.key
        result = Result(key, contender.label, contender.group, reason=self.reasons.get(key))
        runs = self.runs[key]
        if contender.setting is not None:
            result.setting = str(contender.setting)
        if not speeds[key]:
            result.reason = result.reason or self.lost or "not measured: the time was over"
            return result
        result.note = "; ".join(dict.fromkeys(run.outcome.note for run in runs.values() if run.outcome.note))
        result.repeats = tuple(speeds[key])
        result.tokens_per_second = speed = statistics.median(speeds[key])
        result.vs_plain = _ratio(speeds[key], speeds.get("plain"))
        result.vs_best_hf = _ratio(speeds[key], speeds[best.key]) if best else None
        reference = self._reference()
        result.runs = len(runs)
        if reference is not None and contender.exact:
            texts: dict[int, list[int]] = {}
            for (_, prompt), run in sorted(self.runs[reference].items()):
                texts.setdefault(prompt, run.outcome.text)
            parts = [_parts_at(run.outcome.text, texts[prompt]) for (_, prompt), run in runs.items() if prompt in texts]
            different = [at for at in parts if at is not None]
            result.identical, result.runs = len(parts) - len(different), len(parts)
            result.parts_at = statistics.median(different) if different else None
        verifications = sum(run.outcome.verifications for run in runs.values())
        result.accepted_length = sum(run.outcome.produced for run in runs.values()) / max(verifications, 1)
        read = sum(self.bytes[name] * n for run in runs.values() for name, n in run.outcome.forwards.items())
        result.weights_of_copy = read / sum(run.seconds for run in runs.values()) / self.rate
        result.of_floor = speed / self.floor
        if key in self.counted:
            result.syncs_per_token, result.launches_per_token = self.counted[key]
        return result

    @property
    def floor(self) -> float:
        """Tokens per second of plain decoding that does nothing but read the target's weights."""
        return self.rate / self.bytes["target"]

    def close(self) -> None:
        for contender in self.active:
            contender.close()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """``TimeoutError`` in what takes longer, as far as Python gets to say so; only in the main thread, and nothing for infinity."""
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


def _total(calls: dict[str, int], names: set[str]) -> int:
    return sum(count for name, count in calls.items() if name in names)


def _speed(runs: Sequence[Run]) -> float:
    return sum(len(run.outcome.text) for run in runs) / sum(run.seconds for run in runs)


def _ratio(speeds: Sequence[float], others: Sequence[float] | None) -> float | None:
    pairs = list(zip(speeds, others or (), strict=False))
    return statistics.median(a / b for a, b in pairs) if pairs else None


def _parts_at(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first place where they differ (the shorter one's length, if it is the other's beginning); None: they are equal."""
    for i, (a, b) in enumerate(zip(text, reference, strict=False)):
        if a != b:
            return i
    return None if len(text) == len(reference) else min(len(text), len(reference))


def read_bytes_per_second(threads: int) -> float:
    """Of a plain read of memory that no cache holds, on the CPU: the median of nine."""
    size = max(256 << 20, 4 * last_level_cache_bytes())
    buffer = torch.ones(size, dtype=torch.uint8)
    times = [seconds(_native.read_bandwidth_probe, buffer.data_ptr(), size, threads) for _ in range(10)]
    return size / statistics.median(times[1:])


HEADER = (
    "",
    "tokens/s",
    "vs generate()",
    "vs best HF",
    "same text",
    "length",
    "weights/s",
    "of floor",
    "syncs",
    "launches",
)


def cells(result: Result) -> tuple[str, ...]:
    """A result under :data:`HEADER`."""
    if result.reason is not None:
        return (result.label, "-", *[""] * (len(HEADER) - 2))

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    same = "-"
    if result.identical is not None:
        same = f"{result.identical}/{result.runs}" + shown(result.parts_at, ", {:.0f}") * (result.parts_at is not None)
    return (
        result.label,
        shown(result.tokens_per_second, "{:.1f}"),
        shown(result.vs_plain, "{:.2f}x"),
        shown(result.vs_best_hf, "{:.2f}x"),
        same,
        shown(result.accepted_length, "{:.2f}"),
        shown(result.weights_of_copy, "{:.2f}"),
        shown(result.of_floor, "{:.2f}"),
        shown(result.syncs_per_token, "{:.2f}"),
        shown(result.launches_per_token, "{:.1f}"),
    )


def verdict(results: Sequence[Result]) -> list[str]:
    """In words: what our best is worth, and against whom each of ours loses."""
    running = [r for r in results if r.tokens_per_second]
    ours = [r for r in running if r.group == "ours"]
    others = [r for r in running if r.group != "ours"]
    if not ours or not others:
        return ["Nothing to compare: " + ("none of ours ran." if not ours else "nobody else ran.")]
    rival = max(others, key=_tokens_per_second)
    best = max(ours, key=_tokens_per_second)
    factor = _tokens_per_second(best) / _tokens_per_second(rival)
    lines = [
        f"{'Ours at its best' if factor >= 1 else 'WE LOSE, even at our best'}: {best.label}, {factor:.2f} times the best of the others "
        f"({rival.label})."
    ]
    behind = [r for r in ours if r is not best and _tokens_per_second(r) < _tokens_per_second(rival)]
    if behind:
        share = "; ".join(f"{r.label} {_tokens_per_second(r) / _tokens_per_second(rival):.2f}x" for r in behind)
        lines.append(f"Where we lose against {rival.label}: {share}.")
    plain = next((r for r in running if r.key == "plain"), None)
    slower = [r.label for r in ours if plain and _tokens_per_second(r) < _tokens_per_second(plain)]
    if slower:
        lines.append(f"Slower than plain generate(): {'; '.join(slower)}.")
    differ = [r.label for r in ours if r.identical is not None and r.identical < r.runs]
    if differ:
        lines.append(f"Not always the same text: {'; '.join(differ)}.")
    return lines


def _tokens_per_second(result: Result) -> float:
    assert result.tokens_per_second is not None
    return result.tokens_per_second


def footnotes(results: Sequence[Result]) -> list[str]:
    """Settings that won, what rows have to say, and who is missing and why."""
    lines = []
    tuned = [f"{r.label}: {r.setting}" for r in results if r.setting and r.reason is None]
    if tuned:
        lines.append(f"Best settings found: {'; '.join(tuned)}.")
    lines += [f"{r.label}: {r.note}." for r in results if r.note]
    missing: dict[str, list[str]] = {}
    for r in results:
        if r.reason:
            missing.setdefault(r.reason, []).append(r.label)
    lines += [f"Not measured: {'; '.join(labels)} ({reason})." for reason, labels in missing.items()]
    return lines


def summary(record: dict[str, Any]) -> str:
    """What was measured, and on what."""
    info, run = record["machine"], record["run"]
    where = info.get("gpu") or f"{info['cpu']}, {info['threads']} threads"
    sampled = run["sampling"]
    how = "greedy" if sampled is None else f"temperature {sampled['temperature']:g}, top-p {sampled['top_p']:g}"
    return (
        f"{record['family']['name']}, {run['dtype']}, {how}; medians, repeats: {run['repeats']}, prompts: {run['prompts']}, up to "
        f"{run['new_tokens']} tokens each. Plain {'copy' if info.get('gpu') else 'read'}: "
        f"{record['bytes_per_second'] / 1e9:.1f} GB/s; floor of plain decoding: {record['floor_tokens_per_second']:.1f} tokens/s. "
        f"{where}, torch {info['torch']}, transformers {info['transformers']}. Measured {record['when'][:10]}."
    )


def markdown(results: Sequence[Result]) -> str:
    """The table and what belongs below it."""
    shown = [r for r in results if r.reason is None]
    columns = [
        i for i, _ in enumerate(HEADER) if i < 2 or any(cells(r)[i] != "-" for r in shown)
    ]  # not those that nobody has
    lines = ["| " + " | ".join(row[i] for i in columns) + " |" for row in (HEADER, *map(cells, shown))]
    lines.insert(1, "|---" + "|---:" * (len(columns) - 1) + "|")
    return "\n".join([*lines, "", *verdict(results), *footnotes(results)])


def picture(results: Sequence[Result], caption: str) -> str:
    """The rows that ran, as bars."""
    rows = []
    for r in results:
        if r.tokens_per_second is not None:
            ratio = f"  ({r.vs_plain:.2f}x)" if r.vs_plain else ""
            colour = {"ours": OURS, "reference": "#d1603d"}.get(r.group, "#888888" if r.key == "plain" else OTHERS)
            rows.append(Bar(r.label, r.tokens_per_second, f"{r.tokens_per_second:.1f}{ratio}", colour))
    return bars("tokens/s, from prompt to last token", rows, caption)


def report(record: dict[str, Any]) -> int:
    """Prints the table and the verdict; the exit status."""
    results = [Result(**row) for row in record["rows"]]
    print(aligned([HEADER, *map(cells, results)]))
    for line in (*verdict(results), *footnotes(results), summary(record)):
        print(line)
    measured = record["family"].get("planted", {}).get("measured")
    if measured:
        rates = ", ".join(f"{row[-1]:.3f}" for row in measured["agreement"][:-1])
        print(
            f"Agreement with the target measured over {measured['positions']} positions: {rates}; rounding alone changes the target's own "
            f"choice at {100 * measured['flips']:.2f} % of them"
        )
    different = [r for r in results if r.identical is not None and r.identical < r.runs]
    return 1 if different and record["run"]["dtype"] == "float32" else 0


def write(path: Path | None, record: dict[str, Any]) -> None:
    """JSON, and a picture beside it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps(record, indent=1) + "\n")
    results = [Result(**row) for row in record["rows"]]
    if any(r.tokens_per_second for r in results):
        path.with_suffix(".svg").write_text(picture(results, summary(record)), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.earlier:
        record = json.loads(args.earlier.read_text(encoding="utf-8"))
        write(args.json, record)
    else:
        if args.device == "cuda":
            gpu.refuse_without_gpu("bench.bench_generate")
        if args.quick:
            args.prompts, args.repeats, args.new_tokens = (
                min(args.prompts, 2),
                min(args.repeats, 2),
                min(args.new_tokens, 48),
            )
        with quiet_transformers():
            record = measure(args)
    status = report(record)
    if args.docs:
        results = [Result(**row) for row in record["rows"]]
        replace_table(args.docs, f"{markdown(results)}\n{summary(record)}", "generate")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench_generate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--family", default="bundled", metavar="NAME", help="bundled, or a folder of such models (%(default)s)"
    )
    models.add_argument(
        "--planted", nargs="+", choices=list(SHAPES), metavar="SHAPE", help=f"smallest first: {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--agreement", type=float, nargs="+", default=[0.8], metavar="A", help="of planted drafts with the target (0.8)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="%(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="P", help="of planted models' (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="T", help="most per prompt (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="R", help="%(default)s")
    parser.add_argument(
        "--threads", type=int, default=contenders.cores(), metavar="N", help="all together (%(default)s)"
    )
    parser.add_argument("--settings", type=int, metavar="N", help="tried of each rival's, at most (all)")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="rows whose key has one of these in it, and generate()"
    )
    parser.add_argument("--temperature", type=float, help="sample (greedy without)")
    parser.add_argument("--top-p", type=float, default=1.0, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of planted weights and of sampling (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so many")
    parser.add_argument("--quick", action="store_true", help="two prompts of 48 tokens, twice")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the measurement there, and a picture beside it"
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="rewrite the table between its comments there")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="do not measure: show this")
    return parser


def _models(args: argparse.Namespace) -> tuple[Family, list[torch.Tensor], dict[str, Any]]:
    """The family, prompts ``[1, P]`` (the last ones for tuning), and what there is to say about the models."""
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
            texts=max(8, -(-POSITIONS // args.new_tokens)),
            progress=say,
        )
        *drafts, target = chain.models
        family = Family(
            "planted " + " -> ".join(args.planted), target, dict(zip(args.planted, drafts, strict=False)), None
        )
        texts = random_prompts(target.config.vocab_size, count, args.prompt_tokens, args.seed + 3)
        return family, list(texts[:, None]), {"planted": chain.record()}
    with working("loading the models"):
        family = Family.load(None if args.family == "bundled" else Path(args.family))
        for model in (family.target, *family.drafts.values()):
            model.to(device=args.device, dtype=dtype)
    return family, [family.encode(text) for text in prompts(count)], {}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A new measurement. With ``--json`` it is written after each round, so that one that is stopped leaves what it has."""
    import transformers

    began = time.monotonic()
    threads = args.threads
    torch.set_num_threads(threads)
    info: dict[str, Any] = gpu.gpu_machine() if args.device == "cuda" else machine()
    info |= {"threads": threads, "transformers": transformers.__version__}
    family, texts, about = _models(args)
    measured, calibration = texts[: args.prompts], texts[args.prompts :]
    sampling = None if args.temperature is None else Sampling(args.temperature, args.top_p)
    field = Field(family, args.new_tokens, max(ids.shape[1] for ids in texts), sampling, threads)
    rate = gpu.copy_gb_per_s() * 1e9 if args.device == "cuda" else read_bytes_per_second(threads)
    if args.device == "cuda":
        torch.cuda.empty_cache()  # the copy's two gigabytes
    everybody = [
        c
        for c in contenders.everybody(list(family.drafts))
        if not args.only or c.key == "plain" or any(text in c.key for text in args.only)
    ]
    bench = Bench(field, everybody, rate, args.seconds - (time.monotonic() - began), args.seed)

    def record() -> dict[str, Any]:
        results = bench.results()
        return {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": info,
            "family": {"name": family.name, "bytes_per_step": bench.bytes, **about},
            "run": {
                "dtype": str(family.target.dtype).removeprefix("torch."),
                "prompts": len({prompt for runs in bench.runs.values() for _, prompt in runs}),
                "prompt_tokens": [ids.shape[1] for ids in measured],
                "new_tokens": args.new_tokens,
                "repeats": max((len(r.repeats) for r in results), default=0),
                "sampling": None if sampling is None else asdict(sampling),
                "seed": args.seed,
                "seconds": round(time.monotonic() - began, 1),
            },
            "bytes_per_second": rate,
            "floor_tokens_per_second": bench.floor,
            "tuning": bench.tuning,
            "rows": [asdict(result) for result in results],
        }

    try:
        bench.start(calibration[0])
        write(args.json, record())
        bench.tune(calibration, args.settings)
        bench.measure(measured, args.repeats, lambda: write(args.json, record()))
        bench.count(calibration[0])
        found = record()
        write(args.json, found)
        return found
    finally:
        bench.close()


if __name__ == "__main__":
    sys.exit(main())
