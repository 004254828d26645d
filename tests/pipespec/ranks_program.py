"""Ranks of schedule ``ranks`` as forks of one process: ``python -m tests.pipespec.ranks_program DRAFT DRAFT TARGET``. One line of JSON per part."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from pipespec import Pipeline
from pipespec.process import ranks as transport
from tests.conftest import left_pad, random_llama, random_prompts
from tests.pipespec.test_remote import CALLS, NEW
from tests.support.processes import everywhere
from tests.support.streamers import Recorder
from tests.waiting import until


def chain(paths: list[str]) -> Pipeline:
    return Pipeline(paths[-1], paths[:-1], schedule="ranks", dtype=torch.float32)


def texts(paths: list[str]) -> None:
    """Several calls."""

    def work(rank: int) -> object:
        with chain(paths) as pipe:
            if not pipe.has_target:
                return pipe.serve()
            ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
            return [
                pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options).tolist()
                for options in CALLS.values()
            ]

    everywhere(work)


def killed(paths: list[str], folder: str) -> None:
    """Rank 2 is killed in the middle of a call."""
    victim = Path(folder, "pid")

    def work(rank: int) -> object:
        with chain(paths) as pipe:
            if not pipe.has_target:
                if rank == 2:
                    victim.write_text(str(os.getpid()))
                return pipe.serve()

            def kill() -> None:
                os.kill(int(victim.read_text()), signal.SIGKILL)
                until(lambda: pipe._driver._party.links[2].cause is not None, "the loss is noticed")

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                options = {"max_new_tokens": 60, "do_sample": False}
                ids = torch.tensor([[5, 6, 7]])
                found = [pipe.generate(ids, streamer=Recorder(9, kill), **options).tolist()]
                found.append(pipe.generate(ids, **options).tolist())
            return {"texts": found, "warnings": [str(warning.message) for warning in caught]}

    everywhere(work)


def target_dies(paths: list[str]) -> None:
    """Rank 0 is killed in the middle of a call. The drafts end by themselves."""

    def work(rank: int) -> object:
        with chain(paths) as pipe:
            if not pipe.has_target:
                return pipe.serve()

            def die() -> None:
                party = pipe._driver._party

                def take_part() -> bool:
                    return all(party._theirs.get(draft) == pipe._driver._generation for draft in (1, 2))

                until(take_part, "both drafts take part in the call")
                os.kill(os.getpid(), signal.SIGKILL)

            return pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=60, streamer=Recorder(9, die))

    everywhere(work)


def refused(paths: list[str], folder: str) -> None:
    """Draft 0 has another vocabulary. All ranks say so."""
    random_llama(3, vocabulary=100).save_pretrained(folder)

    def work(rank: int) -> str:
        try:
            chain([folder, *paths[1:]]).close()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "it was accepted"

    everywhere(work)


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

    everywhere(work)


def main(paths: list[str]) -> None:
    transport.SILENCE_S = 1e9
    with tempfile.TemporaryDirectory() as folder:
        texts(paths)
        killed(paths, folder)
        target_dies(paths)
        refused(paths, f"{folder}/other")
        wrong(paths)


if __name__ == "__main__":
    main(sys.argv[1:])
