"""Compare ways to generate the same text: contenders take turns prompt by prompt, texts are compared, medians over repeats.

``pipespec demo`` compares :func:`pipespec.bench.contenders.standard_contenders`; ``bench/bench_generate.py`` adds others. All contenders share the models, the
prompts and one process, and decode one prompt at a time. HuggingFace's rows are tuned first, on prompts that are not measured; ours run
with their defaults. The number of CPU threads is tuned for every row that runs in one process.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

import torch

from pipespec.bench.contenders import Contender, Workload
from pipespec.bench.results import Sample, accepted_by_model
from pipespec.process.progress import say

Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of parts that are done, and the number of parts."""

SLOW_START_SHARE, TUNING_SHARE = 0.3, 0.5
"""Shares of the time limit: slow contenders start before the first, and tuning ends at the second."""


@dataclass
class Measurement:
    """One row, measured. Ratios are medians over the repeats, each within one repeat.

    Attributes:
        reason: Why there are no figures; the other fields keep their defaults then.
        note: Remarks of the contender.
        repeats: Tokens per second of each repeat.
        identical: Runs with the reference text, of ``runs``; None: the texts are not comparable.
        differs_at: Median position of the first different new token.
        accepted_length: Tokens per step of each verifying model.
        acceptance_rate: Accepted per verified draft token of each verifying model, where it is known.
    """

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
    differs_at: float | None = None
    accepted_length: dict[str, float] = field(default_factory=dict)
    acceptance_rate: dict[str, float] = field(default_factory=dict)

    @property
    def is_identical(self) -> bool:
        """No text differs from the reference."""
        return self.identical is None or self.identical == self.runs


class IsolatedComparison:
    """Contenders that take turns, and do not see the attention implementations that others set. ``with`` it, or ``close()`` it: some contenders hold processes.

    Args:
        workload: What they generate.
        contenders: The rows; the one with the key ``"plain"`` is the reference.
        limit: Seconds after which no new round begins.
        seed: Of sampling.
        progress: Called before each part of the work.
    """

    def __init__(
        self,
        workload: Workload,
        contenders: Sequence[Contender],
        *,
        limit: float = math.inf,
        seed: int = 0,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        self.workload, self.limit, self.seed, self.progress = workload, limit, seed, progress
        self.device = workload.family.target.device
        self.contenders = list(contenders)
        self.reasons: dict[str, str] = {}
        """Why contenders have no figures, by key."""
        self.tuning: dict[str, list[dict[str, Any]]] = {}
        self.runs: dict[str, dict[tuple[int, int], Sample]] = {c.key: {} for c in contenders}
        """By contender: the texts by repeat and prompt."""
        self.lost: str | None = None
        """Why nothing can run any more: an error on a GPU can destroy its context."""
        self._attention: dict[str, list[str | None]] = {}
        """By contender: the attention implementation of each model that it used last."""
        self._began = time.monotonic()
        self._started: set[str] = set()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def active(self) -> list[Contender]:
        """Contenders that have not failed."""
        return [] if self.lost else [c for c in self.contenders if c.key not in self.reasons]

    def _fail(self, contender: Contender, error: BaseException) -> None:
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
            except Exception:
                self.lost = f"the GPU could not be used any more after {contender.label} had failed"

    def retry(self, contender: Contender) -> None:
        """Let a contender that failed take part again; :meth:`start` starts it."""
        self.reasons.pop(contender.key, None)
        self._started.discard(contender.key)

    @contextmanager
    def turn(self, contender: Contender) -> Iterator[None]:
        """A context around everything that a contender does: the attention that it sets on the shared models is its own."""
        configs = [model.config for model in self.workload.family.models.values()]
        first = [config._attn_implementation for config in configs]

        def use(wanted: list[str | None]) -> None:
            for config, implementation in zip(configs, wanted, strict=True):
                if config._attn_implementation != implementation:
                    config._attn_implementation = implementation

        use(self._attention.get(contender.key, first))
        try:
            yield
        finally:
            self._attention[contender.key] = [config._attn_implementation for config in configs]
            use(first)

    def run(self, contender: Contender, ids: torch.Tensor, new_tokens: int | None = None) -> Sample | None:
        """Let a contender generate once.

        Args:
            contender: One that has started.
            ids: Prompt, LongTensor ``[1, S]``.
            new_tokens: Default: the workload's.

        Returns:
            The text and its time, or None if the contender failed, which ends its part.
        """
        try:
            with self.turn(contender):
                ids = ids.to(self.device)
                torch.set_num_threads(contender.threads)
                self._synchronize()
                began = time.perf_counter()
                text = contender.run(ids, new_tokens or self.workload.new_tokens, self.seed)
                self._synchronize()
                text.seconds = time.perf_counter() - began
                return text
        except Exception as error:
            self._fail(contender, error)
            return None
        finally:
            torch.set_num_threads(self.workload.threads)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def start(self, ids: torch.Tensor, *keys: str) -> None:
        """Start the contenders (those with ``keys``, if given), and let each generate once after ``ids`` without measurement."""
        waiting = [c for c in self.contenders if c.key not in self._started and (not keys or c.key in keys)]
        for done, contender in enumerate(sorted(waiting, key=lambda c: c.slow)):
            self.progress(f"starting: {contender.label}", done, len(waiting))
            if self.lost:
                continue
            self._started.add(contender.key)
            if self.elapsed > self.limit * (SLOW_START_SHARE if contender.slow else 1):
                self.reasons[contender.key] = "not started: the time was over"
                continue
            try:
                with self.turn(contender):
                    contender.start(self.workload)
            except Exception as error:
                self._fail(contender, error)
            else:
                self.run(contender, ids)

    @property
    def started(self) -> set[str]:
        """Keys of the contenders that have started, or have failed to."""
        return set(self._started)

    def tune(
        self,
        calibration: Sequence[torch.Tensor],
        settings: int | None = None,
        contenders: Sequence[Contender] | None = None,
    ) -> None:
        """Find the fastest setting of each contender that has several.

        Args:
            calibration: Prompts that are not measured, each ``[1, S]``.
            settings: Try the first ones only (None: all).
            contenders: Only these (None: all that have not failed).
        """
        chosen = self.active if contenders is None else list(contenders)
        work = {c.key: c.settings[:settings] for c in chosen}
        total, done = sum(map(len, work.values())), 0
        for contender in chosen:
            found: list[dict[str, Any]] = []
            for i, setting in enumerate(work[contender.key]):
                self.progress(f"tuning: {contender.label}, {setting}", done, total)
                done += 1
                if self.elapsed > self.limit * TUNING_SHARE or contender.key in self.reasons:
                    continue
                contender.use(setting)
                # The start of another contender may change the storage of the weights, and the next call then packs them again. A
                # compiled contender compiles again for each number of threads. Neither belongs to the speed of a setting.
                if i == 0 or contender.slow:
                    self.run(contender, calibration[0])
                runs = [text for ids in calibration if (text := self.run(contender, ids))]
                if contender.key not in self.reasons:
                    found.append({"setting": str(setting), "tokens_per_second": _speed(runs)})
            if contender.settings and contender.key not in self.reasons:
                best = max(range(len(found)), key=lambda i: found[i]["tokens_per_second"], default=0)
                contender.use(contender.settings[best])
                self.tuning[contender.key] = found

    def measure(self, texts: Sequence[torch.Tensor], repeats: int) -> Iterator[None]:
        """Let every contender generate behind each of ``texts``, ``repeats`` times; yields after each round.

        A round is one prompt in all contenders. It begins only if it can be expected to end within the time limit.
        """
        longest_round, done, total = 0.0, 0, repeats * len(texts) * len(self.active)
        for repeat, prompt in itertools.product(range(repeats), range(len(texts))):
            began = self.elapsed
            if (repeat or prompt) and began + longest_round > self.limit:
                return
            order = self.active
            # The first contender changes from round to round, so that no contender always follows the same one.
            first = (repeat * len(texts) + prompt) % max(len(order), 1)
            for contender in (*order[first:], *order[:first]):
                self.progress(f"measuring, repeat {repeat + 1} of {repeats}: {contender.label}", done, total)
                done += 1
                text = None if self.lost else self.run(contender, texts[prompt])
                if text is not None:
                    self.runs[contender.key][repeat, prompt] = text
            longest_round = max(longest_round, self.elapsed - began)
            yield
            if self.lost:
                return

    def results(self) -> list[Measurement]:
        """The table so far: one row per contender, in their order."""
        speeds = {c.key: self._speeds(c) for c in self.contenders}
        hf = [c.key for c in self.contenders if c.group == "hf" and speeds[c.key]]
        best = max(hf, key=lambda key: median(speeds[key])) if hf else None
        return [self._result(c, speeds, best) for c in self.contenders]

    def _speeds(self, contender: Contender) -> list[float]:
        """Tokens per second by repeat. An incomplete repeat counts only where there is no complete one."""
        if contender.key in self.reasons:
            return []
        runs = self.runs[contender.key]
        by_repeat = {i: [text for (repeat, _), text in runs.items() if repeat == i] for i, _ in runs}
        complete = max((len(r) for r in by_repeat.values()), default=0)
        return [_speed(r) for _, r in sorted(by_repeat.items()) if len(r) == complete]

    def _reference(self) -> dict[int, list[int]]:
        """The texts that others are compared with, by prompt: ``generate()``'s; sampled, those of our plain decoding."""
        measured = [c for c in self.contenders if self.runs[c.key] and c.key not in self.reasons]
        exact = [c.key for c in measured if c.is_exact(self.workload)]
        wanted = "plain" if self.workload.is_greedy else "ours-plain"
        key = wanted if wanted in exact else next(iter(exact), None)
        texts: dict[int, list[int]] = {}
        for (_, prompt), text in sorted(self.runs[key].items()) if key else ():
            texts.setdefault(prompt, text.tokens)
        return texts

    def _result(self, contender: Contender, speeds: dict[str, list[float]], best: str | None) -> Measurement:
        key = contender.key
        result = Measurement(key, contender.label, contender.group, reason=self.reasons.get(key))
        runs = self.runs[key]
        if contender.setting is not None:
            result.setting = str(contender.setting)
        if not speeds[key]:
            result.reason = result.reason or self.lost or "not measured: the time was over"
            return result
        result.note = "; ".join(dict.fromkeys("; ".join(text.notes) for text in runs.values() if text.notes))
        result.repeats = tuple(speeds[key])
        result.tokens_per_second = median(speeds[key])
        result.vs_plain = _ratio(speeds[key], speeds.get("plain", ()))
        result.vs_best_hf = _ratio(speeds[key], speeds[best]) if best else None
        result.runs = len(runs)
        if contender.is_exact(self.workload) and (reference := self._reference()):
            positions = [
                differs_at(text.tokens, reference[prompt]) for (_, prompt), text in runs.items() if prompt in reference
            ]
            different = [at for at in positions if at is not None]
            result.identical, result.runs = len(positions) - len(different), len(positions)
            result.differs_at = median(different) if different else None
        result.accepted_length, result.acceptance_rate = accepted_by_model([text.stages for text in runs.values()])
        return result

    def close(self) -> None:
        """Close all contenders that started."""
        for contender in self.active:
            contender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _speed(runs: Sequence[Sample]) -> float:
    return sum(len(text.tokens) for text in runs) / sum(text.seconds for text in runs)


def _ratio(speeds: Sequence[float], others: Sequence[float]) -> float | None:
    pairs = list(zip(speeds, others, strict=False))
    return median(a / b for a, b in pairs) if pairs else None


def differs_at(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position at which two texts differ (the shorter length for a prefix); None if they are equal."""
    for i, (a, b) in enumerate(zip(text, reference, strict=False)):
        if a != b:
            return i
    return None if len(text) == len(reference) else min(len(text), len(reference))


HEADER = ("", "tokens/s", "vs generate()", "vs best HF", "same text", "accepted length", "acceptance")


def cells(result: Measurement) -> tuple[str, ...]:
    """A row under :data:`HEADER`. Values of several verifying stages stand in the order of the chain."""
    if result.reason is not None:
        return (result.label, "-", *[""] * (len(HEADER) - 2))
    same = "-"
    if result.identical is not None:
        same = f"{result.identical}/{result.runs}" + shown(result.differs_at, ", differs at {:.0f}", "")
    return (
        result.label,
        shown(result.tokens_per_second, "{:.1f}"),
        shown(result.vs_plain, "{:.2f}x"),
        shown(result.vs_best_hf, "{:.2f}x"),
        same,
        " / ".join(f"{length:.2f}" for length in result.accepted_length.values()) or "-",
        " / ".join(f"{rate:.2f}" for rate in result.acceptance_rate.values()) or "-",
    )


def shown(value: float | None, form: str, absent: str = "-") -> str:
    """``value`` in a format, or ``absent`` for None."""
    return absent if value is None else form.format(value)


def footnotes(results: Sequence[Measurement]) -> list[str]:
    """The settings that won, remarks of rows, and the rows without figures with their reasons."""
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
