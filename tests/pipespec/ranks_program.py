"""Ranks of schedule ``ranks`` as forks of one process: ``python -m tests.pipespec.ranks_program DRAFT DRAFT TARGET``. One line of JSON per part."""

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from pipespec import Pipeline
from pipespec.process import ranks as transport
from tests.conftest import left_pad, random_llama, random_prompts
from tests.pipespec.test_remote import CALLS, NEW
from tests.support.processes import everywhere, peers_of
from tests.support.streamers import Recorder
from tests.support.ways import driver_of
from tests.waiting import until


def chain(paths: list[str]) -> Pipeline:
    return Pipeline(paths[-1], paths[:-1], schedule="ranks", dtype=torch.float32)


def call(
    paths: list[str], work: Callable[[Pipeline], object], note: Callable[[int], object] = lambda rank: None
) -> None:
    """Rank 0 does its work, and the drafts serve."""

    def run(rank: int) -> object:
        with chain(paths) as pipe:
            note(rank)
            return work(pipe) if pipe.has_target else pipe.serve()

    everywhere(run)


def texts(paths: list[str]) -> None:
    """Several calls."""
    ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
    options = {"attention_mask": mask, "max_new_tokens": NEW}
    call(paths, lambda pipe: [pipe.generate(ids, **options, **more).tolist() for more in CALLS.values()])


def killed(paths: list[str], folder: str) -> None:
    """Rank 2 is killed in the middle of a call."""
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 60, "do_sample": False}

    def work(pipe: Pipeline) -> object:
        def kill() -> None:
            os.kill(int(Path(folder, "2").read_text()), signal.SIGKILL)
            until(lambda: peers_of(pipe)[1].failure() is not None, "the loss is noticed")

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [pipe.generate(ids, streamer=Recorder(9, kill), **options).tolist()]
            found.append(pipe.generate(ids, **options).tolist())
        return {"texts": found, "warnings": [str(warning.message) for warning in caught]}

    call(paths, work, lambda rank: Path(folder, str(rank)).write_text(str(os.getpid())))


def target_dies(paths: list[str]) -> None:
    """Rank 0 is killed in the middle of a call. The drafts end by themselves."""

    def work(pipe: Pipeline) -> object:
        def die() -> None:
            until(lambda: "" not in driver_of(pipe).forms, "both drafts take part in the call")
            os.kill(os.getpid(), signal.SIGKILL)

        return pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=60, streamer=Recorder(9, die))

    call(paths, work)


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
