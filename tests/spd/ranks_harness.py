"""Ranks without torchrun's start-up: one process that has imported everything forks them. ``python -m tests.spd.ranks_harness ...``

``FOLDER texts WORLD:STAGES:DRAFTER:DTYPE ...``: calls of several kinds; rank 0 prints what came out. ``FOLDER kill TIMES [SEED]``: three ranks, one of
them killed (the last time, and every fifth before it, stopped) at a random cycle; prints how the others ended. ``FOLDER fail``: three ranks, of which
some cannot load; prints the error of each. ``FOLDER late``: the same for one that hangs. ``FOLDER phases PHASE:HOW:VICTIM ...``: the same for one
that is killed, raises or is interrupted at a given place. ``FOLDER slow``: a long prompt on slow stages. ``FOLDER twice``: one pipeline after another
in the same processes. ``FOLDER differ``: ranks that were started with different arguments. ``FOLDER behind``: a rank that comes late, and one that
does not come. ``FOLDER interrupted``: Ctrl-C at every message.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteriaList

from pipespec.process import ranks as transport
from pipespec_spd import link, ranks, ring
from pipespec_spd.chain import ChainDrafter
from pipespec_spd.ranks import RanksPipeline
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.spd.drafters import Blind
from tests.support.streamers import failing
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_ranks(world: int, work: Callable[[int], None], logs: str) -> list[int]:
    """Processes, by rank. Each runs ``work(rank)`` with torchrun's environment and its stderr in a file."""
    port, pids = free_port(), []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        status = 1
        try:
            # Only standard error, to which a rank reports its end.
            os.dup2(os.open(f"{logs}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            work(rank)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pids


def wait_all(pids: list[int]) -> dict[int, int]:
    """Per rank its exit status (negative: the signal). Ranks that do not end are killed and left out."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for rank, pid in enumerate(pids):
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return ended


def last_error(logs: str, rank: int) -> str:
    """The last error of a rank."""
    lines = Path(logs, str(rank)).read_text().splitlines()
    return next((line for line in reversed(lines) if "RankError: " in line or line.startswith("pipespec: ")), "")


def everywhere(work: Callable[[int], object], world: int = 3) -> None:
    """One line of JSON: per rank its exit status, and the result of ``work`` or the last error. The output of ranks that fail goes to stderr."""
    with tempfile.TemporaryDirectory() as logs:

        def run(rank: int) -> None:
            Path(logs, f"{rank}.json").write_text(json.dumps(work(rank)))

        ended = wait_all(fork_ranks(world, run, logs))
        out = []
        for rank in range(world):
            said = Path(logs, f"{rank}.json")
            words = json.loads(said.read_text()) if said.is_file() else last_error(logs, rank)
            out.append([ended.get(rank), words])
            if ended.get(rank) != 0:
                print(f"rank {rank}: {ended.get(rank)}\n{Path(logs, str(rank)).read_text()}", file=sys.stderr)
        print(json.dumps(out), flush=True)


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
    yield (
        ids,
        {
            "attention_mask": mask,
            "max_new_tokens": NEW,
            "do_sample": False,
            "stopping_criteria": stops,
            "pad_token_id": 0,
        },
    )


def made(kind: str, rank: int = 0):
    if kind == "reader":
        return Reader(320)
    if os.sep in kind:  # a draft module's folder
        return kind
    return ChainDrafter([noisy(random_llama(3, layers=LAYERS), 0.02)]) if kind == "model" and rank == 0 else "ngram"


def texts(folder: str, world: int, stages: int, kind: str, dtype: torch.dtype) -> None:
    def work(rank: int) -> object:
        with patient(folder, made(kind, rank), stages=stages, dtype=dtype) as pipe:
            if not pipe.has_target:
                return pipe.serve()
            out, driver, most = [], pipe._driver, [0]
            collect = driver._collect_chunks

            def counted(left):
                most[0] = max(most[0], len(driver._chunks))
                return collect(left)

            driver._collect_chunks = counted
            for number, (ids, options) in enumerate(calls()):
                places = (1, 2, 6)
                # The ranks are ready for the next call.
                for fails_at in places if PROFILE == "nightly" else (places[number % 3],):
                    with suppress(ZeroDivisionError):
                        pipe.generate(
                            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, streamer=failing(fails_at - 1)
                        )
                got = pipe.generate(ids, **options)
                text = got if isinstance(got, torch.Tensor) else got.sequences
                report = pipe.report
                sums = sorted(getattr(pipe._driver.drafter, "sums", {}).items())
                form = report.stages[0].forward
                out.append(
                    [text.tolist(), report.cycles, report.accepted, sums, len(report.stage_seconds), form, most[0]]
                )
            return out

    everywhere(work, world)


def kill(folder: str, times: int, seed: int = 0) -> None:
    """One line of JSON per trial: which rank was killed and how, and for each other rank [exit status, last error]."""
    draw = random.Random(seed)
    for trial in range(times):
        victim, how = draw.randrange(3), signal.SIGKILL if (times - trial) % 5 != 1 else signal.SIGSTOP
        cycle = draw.randrange(1, 60)
        with tempfile.TemporaryDirectory() as logs:
            mark = f"{logs}/mark"

            def work(rank: int, cycle=cycle, mark=mark) -> None:
                with RanksPipeline(folder, "ngram", stages=2) as pipe:
                    if not pipe.has_target:
                        pipe.serve()
                        return

                    class Marks:
                        seen = 0

                        def put(self, value):
                            self.seen += 1
                            if self.seen == cycle:
                                Path(mark).touch()
                            if self.seen == 400:  # the text stays incomplete until the signal, however late it comes
                                time.sleep(10 * PATIENCE_S)

                        def end(self):
                            pass

                    pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=500, do_sample=False, streamer=Marks())

            pids = fork_ranks(3, work, logs)
            deadline = time.monotonic() + PATIENCE_S
            while not os.path.exists(mark) and time.monotonic() < deadline:
                time.sleep(0.0005)
            os.kill(pids[victim], how)
            others = [pid for rank, pid in enumerate(pids) if rank != victim]
            ended = wait_all(others)
            if how == signal.SIGSTOP:
                os.kill(pids[victim], signal.SIGKILL)
            os.waitpid(pids[victim], 0)
            found = {}
            for i, rank in enumerate(r for r in range(3) if r != victim):
                found[rank] = [ended.get(i), last_error(logs, rank)]
            print(json.dumps({"victim": victim, "how": how.name, "cycle": cycle, "others": found}), flush=True)


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
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if self.how == "interrupt" else ArithmeticError("made to fail")


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
    elif phase == "cycle":
        before(ring.StageServer, "run", trap, lambda server, head, positions, *rest: positions == [9])
        before(ranks.RanksDriver, "_collect", trap, lambda driver, work: driver.rounds == 9)
    elif phase == "end":
        before(link.Sender, "send", trap, lambda line, words, *rest: words[0] == ring.END)
        before(ranks.RanksDriver, "_end", trap)
    else:
        assert phase == "second"
        for kind, name in ((ring.StageServer, "open"), (ranks.RanksDriver, "_open")):
            before(kind, name, trap, lambda *_: opened.append(0) or len(opened) == 2)


def phases(folder: str, cases: Sequence[str]) -> None:
    """One line of JSON per case: how each rank ended, and its last error."""
    for case in cases:
        phase, how, victim = case.split(":")

        def work(rank: int, phase=phase, how=how, victim=int(victim)) -> None:
            if rank == victim:
                lay_trap(phase, how)
            elif how == "raise":
                transport.BEAT_S = 0.7  # a slow machine: the broken connection is found before the cause is read,
                before(transport.Ranks, "failed", lambda: time.sleep(1))  # and not at once
            # Only the silence of a rank that is killed before all are connected shows its end. All others leave a broken connection or a last error,
            # however long a busy machine takes.
            missed = how == "kill" and phase in ("connect", "load")
            with (RanksPipeline if missed else patient)(folder, "ngram", stages=2) as pipe:
                if not pipe.has_target:
                    pipe.serve()
                    return
                for _ in range(2):
                    pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=30, do_sample=False)

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
        for stages in (2, [2, 1], "balanced:2"):
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
    def work(rank: int) -> object:
        return patient(folder, "ngram", stages=[2, 1] if rank == 2 else [1, 2])

    everywhere(work)


def fail(folder: str) -> None:
    def work(rank: int) -> None:
        with patient(folder, "ngram", stages=2) as pipe:
            pipe.serve()

    everywhere(work)


def main() -> None:
    """Commands are separated by ``--``."""
    for part in " ".join(sys.argv[1:]).split(" -- "):
        folder, command, *rest = part.split()
        if command == "texts":
            for case in rest:
                world, stages, kind, dtype = case.split(":")
                texts(folder, int(world), int(stages), kind, getattr(torch, dtype))
        elif command == "kill":
            kill(folder, int(rest[0]), int(rest[1]) if rest[1:] else 0)
        elif command == "phases":
            phases(folder, rest)
        else:
            {
                "late": late,
                "fail": fail,
                "slow": slow,
                "twice": twice,
                "interrupted": interrupted,
                "behind": behind,
                "differ": differ,
            }[command](folder)


if __name__ == "__main__":
    main()
