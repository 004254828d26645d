"""Does a call survive whatever happens to its worker processes? ``python -m bench.kills [--json FILE] [--seconds S] [--seed N]``

The bundled models generate one text after the other under each schedule that has processes. A thread signals them at random moments: in the middle of a
step, between two calls, while they start. SIGKILL, SIGTERM, SIGSEGV and a real-time signal end a process, SIGSTOP stops it for ever. One process or all
are struck, and now and then the template that starts workers. Each text is compared with that of the target alone.

A call that takes longer than ``LIMIT_S`` is a hang: the program prints the stacks of all threads and ends with status 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.figures import Figures
from bench.hang import _fields, with_descendants
from pipespec import Pipeline
from pipespec.demo import FAMILY, family_path, prompts
from pipespec.drivers.base import SpeedWarning

LIMIT_S = 300
NEW_TOKENS = 32
PROMPTS = 6
CALLS = 20
"""Of a pipeline, before the next one is made."""
SCHEDULES = ("workers", "auto")

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGRTMIN + 5) * 3 + (signal.SIGSTOP,)
"""SIGSTOP is rarer: the next call waits seconds for the stopped worker before it gives it up."""

_TEMPLATE = 0.02
"""Share of the strikes that hit the template that starts workers."""


class Strikes(threading.Thread):
    """Signals descendants of this process at random moments until :meth:`stop`.

    Args:
        random_numbers: For moments, victims and signals.
        gap: Longest time between two strikes in seconds.
    """

    def __init__(self, random_numbers: random.Random, gap: float) -> None:
        super().__init__(name="strikes", daemon=True)
        self.counts: Counter[str] = Counter()
        self.stops = False
        """Whether SIGSTOP is sent, too: a start waits minutes for a worker that stops before it is ready."""
        self._random, self._gap, self._over = random_numbers, gap, threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._random.uniform(0, self._gap)):
            self._strike()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _strike(self) -> None:
        own = os.getpid()
        parents = {pid: int(fields[1]) for pid in with_descendants(own)[1:] if (fields := _fields(pid))}
        templates = [pid for pid, parent in parents.items() if parent == own]
        # A worker that was stopped before lives on until the next call.
        workers = [pid for pid, parent in parents.items() if parent != own and _fields(pid)[:1] != ["T"]]
        if not workers:
            return
        number = self._random.choice(_SIGNALS)
        if number == signal.SIGSTOP and not self.stops:
            return
        if templates and self._random.random() < _TEMPLATE:
            self._signal("template", self._random.choice(templates), number)
        else:
            for pid in workers if self._random.random() < 0.3 else [self._random.choice(workers)]:
                self._signal("worker", pid, number)

    def _signal(self, what: str, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            self.counts[f"{what} {signal.Signals(number).name if number < signal.SIGRTMIN else 'real-time'}"] += 1


class Gaps:
    """A streamer that measures the longest time without a token."""

    def __init__(self) -> None:
        self.longest, self._last = 0.0, time.monotonic()

    def put(self, tokens: torch.Tensor) -> None:
        now = time.monotonic()
        self.longest, self._last = max(self.longest, now - self._last), now

    def end(self) -> None:
        self.put(torch.empty(0))


def measure(
    figures: Figures, schedule: str, models: list[PreTrainedModel], texts: list, seconds: float, seed: int
) -> None:
    numbers = random.Random(seed)
    pipelines = unstarted = calls = wrong = warned = 0
    errors: Counter[str] = Counter()
    longest_call = longest_gap = 0.0
    *drafts, target = models
    strikes = Strikes(numbers, gap=0.2)
    end = time.monotonic() + seconds
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpeedWarning)
        strikes.start()
        # A draft that ended is started again after a pause that grows, so a new pipeline has more processes to strike.
        while time.monotonic() < end:
            try:
                started = Pipeline(target, drafts, schedule=schedule)
            except RuntimeError as error:  # a worker was struck before it was ready
                if "could not start" not in str(error):
                    raise
                unstarted += 1
                continue
            strikes.stops = True
            with started as pipe:
                for _ in range(CALLS):
                    ids, text = texts[calls % len(texts)]
                    gaps, began = Gaps(), time.monotonic()
                    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                    try:
                        wrong += not torch.equal(
                            pipe.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=gaps), text
                        )
                    except Exception as error:
                        errors[f"{type(error).__name__}: {error}"[:200]] += 1
                    faulthandler.cancel_dump_traceback_later()
                    calls += 1
                    longest_call = max(longest_call, time.monotonic() - began)
                    longest_gap = max(longest_gap, gaps.longest)
                strikes.stops = False
            pipelines += 1
            warned += len(caught)
            caught.clear()
        strikes.stop()
    figures.add(f"kills.{schedule}.strikes", strikes.counts.total())
    figures.add(f"kills.{schedule}.pipelines", pipelines)
    figures.add(f"kills.{schedule}.unstarted", unstarted)
    figures.add(f"kills.{schedule}.calls", calls)
    figures.add(f"kills.{schedule}.wrong", wrong)
    figures.add(f"kills.{schedule}.errors", errors.total())
    figures.add(f"kills.{schedule}.longest_call_s", longest_call)
    figures.add(f"kills.{schedule}.longest_pause_s", longest_gap)
    figures.detail(schedule, {"strikes": dict(strikes.counts), "errors": dict(errors), "warnings": warned})
    print(dict(strikes.counts), dict(errors), f"{warned} warnings", flush=True)
    if wrong or errors:
        raise AssertionError(f"{wrong} wrong texts, {errors.total()} errors")


def main() -> int:
    options = argparse.ArgumentParser(description="Texts of calls whose worker processes are killed and stopped.")
    options.add_argument("--json", type=Path, help="write the figures here, after each schedule")
    options.add_argument("--seconds", type=float, default=300.0, help="for all schedules together")
    options.add_argument("--seed", type=int, default=0, help="of moments, victims and signals")
    options.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    given = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    # In 32 bits: in 16 bits, two tokens may be equally likely, and schedules may choose differently.
    models = [
        AutoModelForCausalLM.from_pretrained(family_path(name), dtype=torch.float32).eval() for name in reversed(FAMILY)
    ]
    texts = []
    for prompt in prompts(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        texts.append((ids, models[-1].generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)))
    figures = Figures(given.json)
    each = given.seconds / len(given.schedules)
    for schedule in given.schedules:
        figures.section(
            schedule, lambda figures, schedule=schedule: measure(figures, schedule, models, texts, each, given.seed)
        )
    return figures.finish()


if __name__ == "__main__":
    sys.exit(main())
