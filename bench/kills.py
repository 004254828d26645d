"""Does a call survive whatever happens to its processes? ``python -m bench.kills [--json FILE] [--docs FILE] [--seconds S] [--strikes N] [--seed N]``

The bundled models generate one text after the other under each schedule that has processes: greedy and sampled, single prompts and batches of ragged
rows. Processes are signalled at random moments: in the middle of a step, between two calls, while they start. SIGKILL, SIGTERM, SIGSEGV and a real-time
signal end a process, SIGSTOP stops it. Each text is compared with that of the target alone.

* ``workers``, ``auto``, ``spd-workers`` (a target in stages with its drafts in processes): one worker or all are struck, and now and then the template
  that starts workers.
* ``ranks``, ``spd-ranks``: see :mod:`bench.kills_ranks`.

A call that takes longer than ``LIMIT_S`` is a hang: the program prints the stacks of all threads and ends with status 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from bench.figures import Figures
from bench.hang import _fields, with_descendants
from bench.harness import markdown_table, replace_table
from bench.kills_ranks import measure_chain, measure_stages
from bench.strikes import LIMIT_S, Amount, Call, Gaps, Tally, draw_signal, strike
from pipespec import Pipeline
from pipespec.bench.machine import provenance
from pipespec.demo import FAMILY, family_path, prompts
from pipespec.drivers.base import SpeedWarning
from pipespec.spd import SpeculativePipeline

NEW_TOKENS = 32
PROMPTS = 6
CALLS = 20
"""Of a pipeline, before the next one is made."""

SHARES = {"ranks": 0.2, "spd-ranks": 0.1, "workers": 0.5, "spd-workers": 0.2}
"""Of the strikes, by schedule. The ranks are forks of this process, so they come before whatever leaves threads in it."""

_TEMPLATE = 0.02
"""Share of the strikes that hit the template that starts workers."""

_WHILE_STARTING = 0.1
"""Share of the strikes at a pipeline that starts which are carried out."""

_PAUSE_S = 0.1
"""After a start that failed."""


class Strikes(threading.Thread):
    """Signals descendants of this process at random moments until :meth:`stop`.

    Args:
        tally: Counts the strikes.
        random_numbers: For moments, victims and signals.
        gap: Longest time between two strikes in seconds.
    """

    def __init__(self, tally: Tally, random_numbers: random.Random, gap: float) -> None:
        super().__init__(name="strikes", daemon=True)
        self.has_started = False
        """Whether the pipeline serves. While it starts, strikes are rare, since most starts would fail."""
        self._tally, self._random, self._gap, self._over = tally, random_numbers, gap, threading.Event()

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
        number = draw_signal(self._random)
        if not self.has_started and self._random.random() > _WHILE_STARTING:
            return
        if templates and self._random.random() < _TEMPLATE:
            strike(self._tally, "template", self._random.choice(templates), number)
        else:
            for pid in workers if self._random.random() < 0.3 else [self._random.choice(workers)]:
                strike(self._tally, "worker", pid, number)


Maker = Callable[[int], tuple[Any, bool]]
"""Makes pipeline number n. Returns it, and whether its sampled texts are the target's."""


def makers(models: Sequence[PreTrainedModel]) -> dict[str, Maker]:
    """By schedule of which this process is the caller."""
    *drafts, target = models

    return {
        "workers": lambda number: (Pipeline(target, drafts, schedule="workers"), True),
        "spd-workers": lambda number: (
            SpeculativePipeline(target, drafts, stages=2, draft_schedule="workers", dtype=torch.float32),
            True,
        ),
    }


def measure_workers(tally: Tally, amount: Amount, make: Maker, calls: Sequence[Call], seed: int) -> None:
    """Strike worker processes of this process."""
    strikes = Strikes(tally, random.Random(seed), gap=0.2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpeedWarning)
        strikes.start()
        try:
            _measure_struck(tally, amount, make, calls, strikes, caught)
        finally:
            strikes.stop()


def _measure_struck(
    tally: Tally,
    amount: Amount,
    make: Maker,
    calls: Sequence[Call],
    strikes: Strikes,
    caught: list[warnings.WarningMessage],
) -> None:
    # A draft that ended is started again after a pause that grows, so a new pipeline has more processes to strike.
    made = 0
    while not amount.is_over():
        made += 1
        try:
            started, is_coupled = make(made - 1)
        except RuntimeError as error:  # a worker was struck before it was ready
            if "could not start" not in str(error):
                raise
            tally.unstarted += 1
            time.sleep(_PAUSE_S)
            continue
        tally.starts += 1
        strikes.has_started = True
        with started as pipe:
            for _ in range(CALLS):
                ids, options, text = calls[tally.calls % len(calls)]
                gaps, began = Gaps() if len(ids) == 1 else None, time.monotonic()
                faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                same = True
                try:
                    out = pipe.generate(ids, streamer=gaps, **options)
                    same = torch.equal(out, text) or (options["do_sample"] and not is_coupled)
                except Exception as error:
                    tally.error(f"{type(error).__name__}: {error}")
                faulthandler.cancel_dump_traceback_later()
                tally.call(same, time.monotonic() - began, gaps.longest if gaps else 0.0)
                if amount.is_over():
                    break
            strikes.has_started = False
        tally.warnings += len(caught)
        caught.clear()


def calls_of(target: PreTrainedModel) -> list[Call]:
    """Single prompts and a batch of ragged rows, greedy and sampled, with the target's own text."""
    tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    encoded = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts(PROMPTS)]
    longest, pad = max(ids.shape[1] for ids in encoded), tokenizer.eos_token_id or 0
    columns = [longest - ids.shape[1] for ids in encoded[:3]]
    batch = torch.cat(
        [torch.nn.functional.pad(ids, (n, 0), value=pad) for ids, n in zip(encoded, columns, strict=False)]
    )
    mask = torch.stack([(torch.arange(longest) >= n).long() for n in columns])
    inputs = [(ids, {}) for ids in encoded]
    inputs.insert(2, (batch, {"attention_mask": mask, "pad_token_id": pad}))
    found = []
    with Pipeline(target, schedule="plain") as plain:
        for number, (ids, extra) in enumerate(inputs):
            for sampling in ({"do_sample": False}, {"do_sample": True, "seed": number, "temperature": 0.8}):
                options = {"max_new_tokens": NEW_TOKENS, **sampling, **extra}
                text = plain.generate(ids, **options)
                if not sampling["do_sample"]:
                    assert torch.equal(text, target.generate(ids, **options)), (
                        "plain decoding differs from transformers"
                    )
                found.append(Call(ids, options, text))
    return found


_HEADER = (
    "schedule", "strikes", "of them stops", "starts", "calls", "wrong texts", "errors", "longest pause s", "longest call s", "longest end s",
)  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """Of all schedules of a record."""

    def seconds(name: str, key: str) -> str:
        value = figures["figures"][f"kills.{name}.{key}"]
        return f"{value:.1f}" if value else "-"

    rows = []
    for name, details in figures["details"].items():
        count = {
            key: str(figures["figures"][f"kills.{name}.{key}"])
            for key in ("strikes", "starts", "calls", "wrong", "errors")
        }
        stops = sum(number for kind, number in details["strikes"].items() if kind.endswith("SIGSTOP"))
        longest = [seconds(name, f"longest_{what}_s") for what in ("pause", "call", "end")]
        rows.append(
            (
                name,
                count["strikes"],
                str(stops),
                *(count[key] for key in ("starts", "calls", "wrong", "errors")),
                *longest,
            )
        )
    return markdown_table(_HEADER, rows)


def main() -> int:
    options = argparse.ArgumentParser(description="Texts of calls whose processes are killed and stopped.")
    options.add_argument("--json", type=Path, help="write the figures here, after each schedule")
    options.add_argument("--docs", type=Path, help="write the table into this page, between its marks")
    options.add_argument("--seconds", type=float, default=300.0, help="for all schedules together, evenly")
    options.add_argument(
        "--strikes", type=int, help="for all schedules together; each ends earlier if its seconds are over"
    )
    options.add_argument("--seed", type=int, default=0, help="of moments, victims and signals")
    options.add_argument("--schedules", nargs="+", choices=SHARES, default=list(SHARES))
    given = options.parse_args()
    torch.set_num_threads(1)
    # Its own lock is one for all forks: a rank that is killed while it loads would keep it for ever.
    logging.tqdm.set_lock(threading.RLock())
    # In 32 bits: in 16 bits, two tokens may be equally likely, and schedules may choose differently.
    models = [
        AutoModelForCausalLM.from_pretrained(family_path(name), dtype=torch.float32).eval() for name in reversed(FAMILY)
    ]
    calls = calls_of(models[-1])
    figures = Figures(given.json)
    figures.record["machine"] = provenance()
    made = makers(models)
    shares = {name: share for name, share in SHARES.items() if name in given.schedules}
    for name, share in shares.items():
        strikes = None if given.strikes is None else math.ceil(given.strikes * share / sum(shares.values()))

        def measure(figures: Figures, name: str = name, strikes: int | None = strikes) -> None:
            tally = Tally()
            try:
                with Amount(name, tally, given.seconds / len(shares), strikes) as amount:
                    if name in made:
                        measure_workers(tally, amount, made[name], calls, given.seed)
                    else:
                        {"ranks": measure_chain, "spd-ranks": measure_stages}[name](tally, amount, calls, given.seed)
            finally:
                tally.note(figures, name)

        figures.section(name, measure)
    print(shown := table(figures.record))
    if given.docs:
        replace_table(given.docs, shown, "kills")
    return figures.finish()


if __name__ == "__main__":
    sys.exit(main())
