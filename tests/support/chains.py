"""Chains of schedule ``ranks`` for tests, in one process, with a thread per draft."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pipespec import Pipeline
from pipespec.config import SpeculationConfig
from pipespec.engine.chain import as_draft
from pipespec.process import ranks
from pipespec.process.ranks import Ranks, break_group
from pipespec.schedules.asynchronous.remote import DraftRank, RemoteDriver
from tests.waiting import SECONDS, until


class InProcess:
    """A chain whose ranks share this process. ``drafts[i]`` is on rank ``i + 1``."""

    def __init__(self, models: Sequence[Any], **options: Any) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        drafts = options.pop("drafts", None) or [as_draft(model) for model in models[:-1]]
        self.config = SpeculationConfig.of(drafts, schedule="ranks", **options)
        self.models, self.world = list(models), len(models)
        self.drafts: dict[int, DraftRank] = {}
        self.threads: dict[int, threading.Thread] = {}
        self.errors: list[BaseException] = []
        for rank in range(1, self.world):
            self._start(rank)
        self.driver = RemoteDriver(models[-1], self.config, self._rank_of(0))
        until(lambda: len(self.drafts) == self.world - 1, "all drafts are connected")

    def _rank_of(self, rank: int) -> Ranks:
        return Ranks(dist.PrefixStore("test", self.store), rank, self.world, SECONDS)

    def _start(self, rank: int) -> None:
        own = self._rank_of(rank)

        def serve() -> None:
            try:
                self.drafts[rank] = DraftRank(self.models[rank - 1], self.config, own)
                self.drafts[rank].serve()
            except BaseException as error:
                self.errors.append(error)

        self.threads[rank] = threading.Thread(target=serve)
        self.threads[rank].start()

    def cut(self, rank: int) -> None:
        """Break all connections of a draft's rank, which ends."""
        break_group(self.drafts[rank]._party.group)
        self.threads[rank].join(SECONDS)

    def close(self) -> None:
        self.driver.close()
        for rank, thread in self.threads.items():
            thread.join(SECONDS)
            assert not thread.is_alive(), f"rank {rank} serves on"
            self.drafts[rank].close()
        self.store = None  # its thread ends


def plain(target: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The text of the target alone."""
    with Pipeline(target, schedule="plain") as pipe:
        return pipe.generate(ids, **options)


@contextmanager
def in_process(monkeypatch: Any, models: Sequence[Any], **options: Any) -> Iterator[tuple[Pipeline, InProcess]]:
    """A pipeline over a chain in this process. A busy machine must not make a rank count as lost."""
    monkeypatch.setattr(ranks, "SILENCE_S", 1e9)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # gloo must not look up the machine's name
    chain = InProcess(models, **options)
    monkeypatch.setattr(
        "pipespec.schedules.asynchronous.membership.join", lambda given, config, **_: (given[-1], chain.driver)
    )
    try:
        yield Pipeline(models[-1], models[:-1], schedule="ranks"), chain
    finally:
        chain.close()
