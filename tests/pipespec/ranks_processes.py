"""Ranks of schedule ``ranks`` as forks of one process: ``python -m tests.pipespec.ranks_processes DRAFT DRAFT TARGET``. One line of JSON per part."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from pipespec import Pipeline, transport
from tests.conftest import left_pad, random_llama, random_prompts
from tests.pipespec.test_ranks_schedule import CALLS, NEW
from tests.spd.ranks_harness import fork_ranks, last_error, wait_all
from tests.support.streamers import Recorder
from tests.waiting import until


def chain(paths: list[str]) -> Pipeline:
    return Pipeline(paths[-1], paths[:-1], schedule="ranks", dtype=torch.float32)


def texts(paths: list[str], out: str) -> None:
    """Several calls; rank 0 writes what came out."""

    def work(rank: int) -> None:
        with chain(paths) as pipe:
            if not pipe.has_target:
                pipe.serve()
                return
            ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
            found = [
                pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options).tolist()
                for options in CALLS.values()
            ]
            Path(out).write_text(json.dumps(found))

    run(work)
    print(Path(out).read_text(), flush=True)


def killed(paths: list[str], out: str) -> None:
    """Rank 2 is killed in the middle of a call."""

    def work(rank: int) -> None:
        with chain(paths) as pipe:
            if not pipe.has_target:
                if rank == 2:
                    Path(out, "pid").write_text(str(os.getpid()))
                pipe.serve()
                return

            def kill() -> None:
                os.kill(int(Path(out, "pid").read_text()), signal.SIGKILL)
                until(lambda: pipe._driver._party.links[2].cause is not None, "the loss is noticed")

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                options = {"max_new_tokens": 60, "do_sample": False}
                ids = torch.tensor([[5, 6, 7]])
                found = [pipe.generate(ids, streamer=Recorder(9, kill), **options).tolist()]
                found.append(pipe.generate(ids, **options).tolist())
            said = {"texts": found, "warnings": len(caught), "first": str(caught[0].message)}
            Path(out, "said").write_text(json.dumps(said))

    ended = run(work)
    print(json.dumps(json.loads(Path(out, "said").read_text()) | {"ended": ended}), flush=True)


def target_dies(paths: list[str]) -> None:
    """Rank 0 is killed in the middle of a call. The drafts end by themselves."""

    def work(rank: int) -> None:
        with chain(paths) as pipe:
            if not pipe.has_target:
                pipe.serve()
                return

            def die() -> None:
                party = pipe._driver._party

                def take_part() -> bool:
                    return all(party._theirs.get(draft) == pipe._driver._generation for draft in (1, 2))

                until(take_part, "both drafts take part in the call")
                os.kill(os.getpid(), signal.SIGKILL)

            pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=60, do_sample=False, streamer=Recorder(9, die))

    with tempfile.TemporaryDirectory() as logs:
        ended = wait_all(fork_ranks(3, work, logs))
        print(json.dumps({"ended": ended, "errors": [last_error(logs, rank) for rank in (1, 2)]}), flush=True)


def run(work) -> dict[int, int]:
    with tempfile.TemporaryDirectory() as logs:
        ended = wait_all(fork_ranks(3, work, logs))
        for rank, status in ended.items():
            if status > 0:
                print(Path(logs, str(rank)).read_text(), file=sys.stderr)
        return ended


def refused(paths: list[str], folder: str) -> None:
    """Draft 0 has another vocabulary. All ranks say so."""
    random_llama(3, vocabulary=100).save_pretrained(folder)

    def work(rank: int) -> str:
        try:
            chain([folder, *paths[1:]]).close()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "it was accepted"

    everywhere_said(work)


def wrong(paths: list[str]) -> None:
    """The wrong method on rank 0 and on rank 1."""

    def work(rank: int) -> str:
        with chain(paths) as pipe:
            try:
                if rank == 0:
                    pipe.serve()
                else:
                    pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
            except RuntimeError as error:
                said = str(error)
            if not pipe.has_target:
                pipe.serve()
            return said

    everywhere_said(work)


def everywhere_said(work) -> None:
    with tempfile.TemporaryDirectory() as logs:

        def write(rank: int) -> None:
            Path(logs, f"said{rank}").write_text(work(rank))

        wait_all(fork_ranks(3, write, logs))
        print(json.dumps([Path(logs, f"said{rank}").read_text() for rank in range(3)]), flush=True)


def main(paths: list[str]) -> None:
    transport.SILENCE_S = 1e9
    with tempfile.TemporaryDirectory() as folder:
        texts(paths, f"{folder}/texts")
        killed(paths, folder)
        target_dies(paths)
        refused(paths, f"{folder}/other")
        wrong(paths)


if __name__ == "__main__":
    main(sys.argv[1:])
