"""Ranks without torchrun's start-up: one process that has imported everything forks them. ``python -m tests.spd.ranks_harness COMMAND FOLDER ...``

A command is a function of this module whose parameters are words: the folder of a model first. It prints a line of JSON for each run.
"""

import itertools
import mmap
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import StoppingCriteriaList

from pipespec.process import ranks as transport
from pipespec_spd import link, ranks, ring
from pipespec_spd.model_drafter import ModelDrafter
from pipespec_spd.ranks import RanksPipeline
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.spd.drafters import Blind
from tests.support.processes import everywhere
from tests.support.streamers import failing
from tests.support.ways import driver_of
from tests.trials import PROFILE
from tests.waiting import SECONDS

LAYERS = 3
NEW = 12

PATIENCE_S = SECONDS
"""Long time limits, so that a busy machine does not make a rank count as lost or late in tests of other things."""


def patient(*arguments: Any, **options: Any) -> RanksPipeline:
    """A pipeline with long time limits."""
    transport.SILENCE_S = PATIENCE_S
    return RanksPipeline(*arguments, **{"timeout_s": PATIENCE_S} | options)


class PhaseClock:
    """The clock of a test's ranks. Only the ranks advance it, so that a busy machine has no effect."""

    def __init__(self, world: int) -> None:
        self._passed = memoryview(mmap.mmap(-1, 8 * world)).cast("d")  # one entry per rank that advances it

    def rules(self) -> None:
        """Use this clock in this process from here on."""
        transport.time = types.SimpleNamespace(monotonic=lambda: max(self._passed), sleep=time.sleep)  # type: ignore[assignment]

    def advance(self, rank: int, seconds: float) -> None:
        self._passed[rank] += seconds
        time.sleep(2 * transport.BEAT_S)  # the watchdogs read it


class Reader(Blind):
    """A drafter that reads streams of all stages, so that the ranks send them."""

    features = (0, 1, 3)

    def start(self, prompts, capacity, select):
        self.sums: dict[tuple[int, int, int], float] = {}
        self.draw = random.Random(1)  # each call draws the same numbers

    def observe(self, index, rows, positions, values):
        for row, position, value in zip(rows, positions, values, strict=True):
            self.sums[index, row, position] = float(value.double().sum())


def after(lengths: Sequence[int]) -> Callable:
    """A stopping criterion that ends each row at a length of its own, when the next cycle may have begun."""

    def ends(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= n for n in lengths])

    return ends


def calls():
    """Arguments of several calls."""
    ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
    one = random_prompts(1, seed=6, shortest=1, longest=1)[0][None]
    yield ids, {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    yield one, {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": list(range(2, 300, 9)), "pad_token_id": 0}
    yield ids, {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "seed": 5, "prefill_chunk_size": 2}
    yield one, {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    stops = StoppingCriteriaList([after([ids.shape[1] + n for n in (2, 7, 5)])])
    ended = {"stopping_criteria": stops, "pad_token_id": 0}
    yield ids, {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, **ended}


def made(kind: str, rank: int = 0):
    if kind == "reader":
        return Reader(320)
    if os.sep in kind:  # a draft module's folder
        return kind
    return ModelDrafter(noisy(random_llama(3, layers=LAYERS), 0.02)) if kind == "model" and rank == 0 else "ngram"


def texts(folder: str, *cases: str) -> None:
    """Calls of several kinds. ``cases``: ``WORLD:STAGES:DRAFTER:DTYPE``."""
    for case in cases:
        world, stages, kind, dtype = case.split(":")
        run_calls(folder, int(world), int(stages), kind, getattr(torch, dtype))


def run_calls(folder: str, world: int, stages: int, kind: str, dtype: torch.dtype) -> None:
    def work(rank: int) -> object:
        with patient(folder, made(kind, rank), stages=stages, dtype=dtype) as pipe:
            if not pipe.has_target:
                return pipe.serve()
            out, driver, highest = [], driver_of(pipe), [0]
            collect = driver._collect_chunks

            def counted(left):
                highest[0] = max(highest[0], len(driver._chunks))
                return collect(left)

            driver._collect_chunks = counted
            for number, (ids, options) in enumerate(calls()):
                places = (1, 2, 6)
                # The ranks are ready for the next call.
                for fails_at in places if PROFILE == "nightly" else (places[number % 3],):
                    with suppress(ZeroDivisionError):
                        every = torch.ones_like(ids)
                        pipe.generate(ids, attention_mask=every, max_new_tokens=30, streamer=failing(fails_at - 1))
                got = pipe.generate(ids, **options)
                text = got if isinstance(got, torch.Tensor) else got.sequences
                report = pipe.report
                sums = sorted(getattr(driver_of(pipe).drafter, "sums", {}).items())
                form = report.stages[0].forward
                out.append(
                    [text.tolist(), report.cycles, report.accepted, sums, len(report.stage_seconds), form, highest[0]]
                )
            return out

    everywhere(work, world)


def late(folder: str) -> None:
    """The last stage sleeps in its tenth step, while its process still sends heartbeats."""

    def work(rank: int) -> None:
        with patient(folder, "ngram", stages=2, timeout_s=5) as pipe:
            if pipe.has_target:
                pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=100, do_sample=False)
            if rank == 2:
                steps, real = [], pipe._server.stage.step

                def step(*arguments):
                    steps.append(0)
                    time.sleep(10 * PATIENCE_S if len(steps) == 10 else 0)
                    return real(*arguments)

                pipe._server.stage.step = step
            pipe.serve()

    everywhere(work)


class Nothing:
    """Ends a rank at a given place of the program."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, *args, **kwargs):
        if self.how == "raise":
            raise ArithmeticError("made to fail")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        kind, _, soon = self.how.partition("-")
        strike = os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL
        if soon:  # between any two instructions
            threading.Timer(random.random() / 50, os.kill, strike).start()
        else:
            os.kill(*strike)


def before(owner, name: str, what: Callable, when: Callable[..., bool] = lambda *a: True) -> None:
    """Make ``owner.name`` call ``what`` first if its arguments are ``when``."""
    real = getattr(owner, name)

    def first(*args, **kwargs):
        if when(*args):
            what()
        return real(*args, **kwargs)

    setattr(owner, name, first)


def lay_trap(phase: str, how: str) -> None:
    """Make this process end in ``phase``, whatever its rank."""
    trap, opened = Nothing(how), []
    if phase == "connect":
        before(transport.Ranks, "connect", trap)
    elif phase == "load":
        before(ranks, "load_stage", trap)
        before(ranks, "load_ends", trap)
    elif phase == "prefill":
        before(ring.StageServer, "run", trap, lambda server, head, *rest: head.kind == ring.CHUNK)
        before(ranks.RanksDriver, "_feed", trap)
    elif phase.startswith("cycle"):
        at = int(phase.removeprefix("cycle"))
        before(ring.StageServer, "run", trap, lambda server, head, positions, *rest: positions == [at])
        before(ranks.RanksDriver, "_collect", trap, lambda driver, work: driver.rounds == at)
    elif phase == "end":
        before(link.Sender, "send", trap, lambda line, words, *rest: words[0] == ring.END)
        before(ranks.RanksDriver, "_end", trap)
    else:
        assert phase == "second"
        for kind, name in ((ring.StageServer, "open"), (ranks.RanksDriver, "_open")):
            before(kind, name, trap, lambda *_: opened.append(0) or len(opened) == 2)


def phases(folder: str, *cases: str) -> None:
    """Three ranks, one of which is killed or stopped (at once or soon), raises or is interrupted. ``cases``: ``PHASE:HOW:VICTIM``."""
    for case in cases:
        phase, how, victim = case.split(":")

        def work(rank: int, phase=phase, how=how, victim=int(victim)) -> None:
            if rank == victim:
                lay_trap(phase, how)
            elif how == "raise":
                transport.BEAT_S = 0.7  # a slow machine: the broken connection is found before the cause is read,
                before(transport.Ranks, "failed", lambda: time.sleep(1))  # and not at once
            # Only its silence shows the end of a rank that is stopped, or killed before all are connected. All others leave a broken connection or a
            # last error, however long a busy machine takes.
            missed = how == "stop-soon" or (how == "kill" and phase in ("connect", "load"))
            with (RanksPipeline if missed else patient)(folder, "ngram", stages=2) as pipe:
                if not pipe.has_target:
                    pipe.serve()
                    return
                is_soon = how.endswith("-soon")  # then it comes within a long call
                for _ in itertools.count() if is_soon else range(2):
                    pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=500 if is_soon else 30, do_sample=False)

        everywhere(work)


def slow(folder: str) -> None:
    """Every chunk of the prompt takes a large part of a stage's time limit."""
    clock = PhaseClock(3)

    def work(rank: int) -> object:
        clock.rules()
        with patient(folder, "ngram", stages=2, timeout_s=1) as pipe:
            if pipe.has_target:
                ids = torch.tensor([list(range(2, 22))])
                return pipe.generate(ids, max_new_tokens=4, do_sample=False, prefill_chunk_size=2)[0].tolist()
            before(pipe._server, "run", lambda: clock.advance(rank, 0.3), lambda head, *rest: head.kind == ring.CHUNK)
            return pipe.serve()

    everywhere(work)


def twice(folder: str) -> None:
    def work(rank: int) -> object:
        out = []
        for stages in (2, [2, 1]):
            with patient(folder, "ngram", stages=stages) as pipe:
                if not pipe.has_target:
                    pipe.serve()
                else:
                    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
                    out.append(pipe.generate(torch.tensor([[5, 6]]), **options)[0].tolist())
        return out

    everywhere(work)


def interrupted(folder: str) -> None:
    """A signal at each send and each receive of rank 0, one call each: Ctrl-C, and one whose handler sets a limit to the call. Then a call that finds no
    memory when it begins. Each call after such a one has its whole text."""

    def is_late(number: int, frame: object) -> None:
        raise TimeoutError

    def work(rank: int) -> object:
        with patient(folder, Reader(320), stages=2) as pipe:
            if not pipe.has_target:
                return pipe.serve()
            options = {"max_new_tokens": 3, "do_sample": False, "prefill_chunk_size": 2}
            ids, count, at = torch.tensor([[5, 6, 7, 8, 9]]), [0], [0]

            def here() -> None:
                count[0] += 1
                if count[0] == at[0]:
                    signal.raise_signal(signal.SIGINT if at[0] % 2 else signal.SIGUSR1)

            real_send, real_finish = link.Link.post_send, link.Link.finish

            def send(*args, **kwargs):
                work = real_send(*args, **kwargs)
                here()
                return work

            def finish(*args, **kwargs):
                real_finish(*args, **kwargs)
                here()

            def lacks_memory(*args, **kwargs):
                raise MemoryError

            signal.signal(signal.SIGUSR1, is_late)
            link.Link.post_send, link.Link.finish = send, finish
            wanted, calls, stopped = pipe.generate(ids, **options).tolist(), count[0], 0
            for at[0] in range(1, calls + 1):
                count[0] = 0
                try:
                    pipe.generate(ids.flip(1), **options)
                except (KeyboardInterrupt, TimeoutError):
                    stopped += 1
                count[0] = 10**6
                assert pipe.generate(ids, **options).tolist() == wanted, at
            real, ranks.open_sections = ranks.open_sections, lacks_memory
            try:
                pipe.generate(ids, **options)
            except MemoryError:
                stopped += 1
            ranks.open_sections = real
            assert pipe.generate(ids, **options).tolist() == wanted
            return [wanted[0], calls, stopped]

    everywhere(work)


def behind(folder: str) -> None:
    """A rank that starts after the others have waited longer than the time limit of a silent rank, and one that never starts."""

    def work(rank: int) -> object:
        time.sleep(transport.SILENCE_S + 2 if rank == 2 else 0)
        with RanksPipeline(folder, "ngram", stages=2) as pipe:
            if not pipe.has_target:
                return pipe.serve()
            return pipe.generate(torch.tensor([[5, 6]]), max_new_tokens=5, do_sample=False)[0].tolist()

    everywhere(work)

    def missing(rank: int) -> object:
        return rank == 2 or RanksPipeline(folder, "ngram", stages=2, start_s=1)

    everywhere(missing)


def differ(folder: str) -> None:
    """Ranks that were started with different arguments."""
    everywhere(lambda rank: patient(folder, "ngram", stages=[2, 1] if rank == 2 else [1, 2]))


def fail(folder: str) -> None:
    """Some ranks cannot load."""
    everywhere(lambda rank: patient(folder, "ngram", stages=2))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
