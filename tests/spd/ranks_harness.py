"""Ranks without torchrun's start-up: one process that has imported everything forks them. ``python -m tests.spd.ranks_harness ...``

``FOLDER texts WORLD:STAGES:DRAFTER ...``: calls of several kinds; rank 0 prints what came out. ``FOLDER kill TIMES [SEED]``: three ranks, one of
them killed (every fifth time stopped) at a random cycle; prints how the others ended, and when. ``FOLDER fail``: three ranks, of
which some cannot load; prints what each says. ``FOLDER late``: the same for one that hangs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from pipespec.spd.chain import ChainDrafter
from pipespec.spd.ranks import RanksPipeline
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.spd.drafters import Blind

LAYERS = 3
NEW = 12


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
            # The standard error alone: what a rank says about its end.
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


def wait_all(pids: list[int], seconds: float) -> dict[int, tuple[int, float]]:
    """Per rank its exit status (negative: the signal) and when it ended. Ranks that have not are killed, and missing."""
    ended: dict[int, tuple[int, float]] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.01)
    for rank, pid in enumerate(pids):
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return ended


class Reader(Blind):
    """Reads streams of all stages, so that they are sent."""

    features = (0, 1, 3)

    def start(self, prompts, capacity, select):
        self.sums: dict[tuple[int, int, int], float] = {}
        self.draw = random.Random(1)  # every call is one of its own

    def observe(self, index, rows, positions, values):
        for row, position, value in zip(rows, positions, values, strict=True):
            self.sums[index, row, position] = float(value.double().sum())


class Fails:
    """A streamer that raises when it gets its n-th value."""

    def __init__(self, at: int) -> None:
        self.left = at

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError

    def end(self):
        pass


def calls():
    """Arguments of several calls."""
    ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
    one = random_prompts(1, seed=6, shortest=1, longest=1)[0][None]
    yield ids, {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    yield one, {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": list(range(2, 300, 9)), "pad_token_id": 0}
    yield ids, {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "seed": 5, "prefill_chunk_size": 2}
    yield one, {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}


def made(kind: str, rank: int = 0):
    if kind == "reader":
        return Reader(320)
    return ChainDrafter([noisy(random_llama(3, layers=LAYERS), 0.02)]) if kind == "model" and rank == 0 else "ngram"


def texts(folder: str, world: int, stages: int, kind: str) -> None:
    def work(rank: int) -> None:
        with RanksPipeline(folder, made(kind, rank), stages=stages, timeout_s=60) as pipe:
            if not pipe.is_controller:
                pipe.serve()
                return
            out = []
            for ids, options in calls():
                for fails_at in (1, 2, 6):  # and the ranks are ready for the next call
                    try:
                        pipe.generate(
                            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, streamer=Fails(fails_at)
                        )
                    except ZeroDivisionError:
                        pass
                got = pipe.generate(ids, **options)
                text = got if isinstance(got, torch.Tensor) else got.sequences
                report = pipe.report
                sums = sorted(getattr(pipe._driver.drafter, "sums", {}).items())
                out.append([text.tolist(), report.cycles, report.accepted, sums, len(report.stage_seconds)])
            print(json.dumps(out), flush=True)

    with tempfile.TemporaryDirectory() as logs:
        pids = fork_ranks(world, work, logs)
        ended = wait_all(pids, 100)
        for rank in range(world):
            if ended.get(rank, (None,))[0] != 0:
                print(f"rank {rank}: {ended.get(rank)}\n{Path(logs, str(rank)).read_text()}", file=sys.stderr)
        if any(ended.get(rank, (1,))[0] for rank in range(world)):
            sys.exit(1)


def kill(folder: str, times: int, seed: int = 0) -> None:
    """One line of JSON per trial: who was killed and how, and per other rank [status, seconds after, last words]."""
    draw = random.Random(seed)
    for trial in range(times):
        victim, how = draw.randrange(3), signal.SIGSTOP if trial % 5 == 4 else signal.SIGKILL
        cycle = draw.randrange(1, 60)
        with tempfile.TemporaryDirectory() as logs:
            mark = f"{logs}/mark"

            def work(rank: int, cycle=cycle, mark=mark) -> None:
                with RanksPipeline(folder, "ngram", stages=2) as pipe:
                    if not pipe.is_controller:
                        pipe.serve()
                        return

                    class Marks:
                        seen = 0

                        def put(self, value):
                            self.seen += 1
                            if self.seen == cycle:
                                Path(mark).touch()

                        def end(self):
                            pass

                    pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=500, do_sample=False, streamer=Marks())

            pids = fork_ranks(3, work, logs)
            deadline = time.monotonic() + 60
            while not os.path.exists(mark) and time.monotonic() < deadline:
                time.sleep(0.0005)
            os.kill(pids[victim], how)
            began = time.monotonic()
            others = [pid for rank, pid in enumerate(pids) if rank != victim]
            ended = wait_all(others, 30)
            if how == signal.SIGSTOP:
                os.kill(pids[victim], signal.SIGKILL)
            os.waitpid(pids[victim], 0)
            found = {}
            for i, rank in enumerate(r for r in range(3) if r != victim):
                status, at = ended.get(i, (None, began + 99))
                found[rank] = [status, round(at - began, 2), last_words(logs, rank)]
            print(json.dumps({"victim": victim, "how": how.name, "cycle": cycle, "others": found}), flush=True)


def last_words(logs: str, rank: int) -> str:
    """What a rank said about its end."""
    lines = Path(logs, str(rank)).read_text().splitlines()
    return next((line for line in reversed(lines) if "RankError: " in line or line.startswith("pipespec: ")), "")


def late(folder: str) -> None:
    """The last stage sleeps in its tenth step, though its process lives."""

    def work(rank: int) -> None:
        with RanksPipeline(folder, "ngram", stages=2, timeout_s=1) as pipe:
            if pipe.is_controller:
                pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=100, do_sample=False)
            if rank == 2:
                steps, real = [], pipe._server.stage.step

                def step(*arguments):
                    steps.append(0)
                    time.sleep(60 if len(steps) == 10 else 0)
                    return real(*arguments)

                pipe._server.stage.step = step
            pipe.serve()

    with tempfile.TemporaryDirectory() as logs:
        ended = wait_all(fork_ranks(3, work, logs), 60)
        print(json.dumps([[ended.get(rank, (None,))[0], last_words(logs, rank)] for rank in range(3)]))


def fail(folder: str) -> None:
    def work(rank: int) -> None:
        with RanksPipeline(folder, "ngram", stages=2) as pipe:
            pipe.serve()

    with tempfile.TemporaryDirectory() as logs:
        ended = wait_all(fork_ranks(3, work, logs), 60)
        print(json.dumps([[ended.get(rank, (None,))[0], last_words(logs, rank)] for rank in range(3)]))


def main() -> None:
    """Commands are separated by ``--``."""
    for part in " ".join(sys.argv[1:]).split(" -- "):
        folder, command, *rest = part.split()
        if command == "texts":
            for case in rest:
                world, stages, kind = case.split(":")
                texts(folder, int(world), int(stages), kind)
        elif command == "kill":
            kill(folder, int(rest[0]), int(rest[1]) if rest[1:] else 0)
        else:
            {"late": late, "fail": fail}[command](folder)


if __name__ == "__main__":
    main()
