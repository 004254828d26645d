"""The driver of a chain whose stages run at once: the target in this process, each draft in another one, which it sees as a :class:`Peer`.

The target waits for no draft. One that dies, hangs or fails costs speed and never changes the text.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.stage import Stage
from pipespec.process.threads import lowered_threads
from pipespec.schedules.asynchronous.messages import Call, Status
from pipespec.schedules.base import Driver, GenerationRequest
from pipespec_kernels.state import Action

_MAX_GENERATION = 2**31 - 1


class Peer(ABC):
    """A draft in another process.

    Attributes:
        returns: When it takes part again after a loss, for messages.
    """

    returns: ClassVar[str]

    @property
    @abstractmethod
    def status(self) -> Status | None:
        """The last one that has arrived; None if there is none."""

    @abstractmethod
    def failure(self) -> str | None:
        """Why it takes no part in the present generation; None if it does. Returns at once."""

    def begin(self, call: Call) -> None:
        """Let it take part in a call, whose rows lie in the block."""

    def await_end(self) -> None:
        """Wait until it has ended the last generation, if this process reads its trace."""


class AsynchronousDriver(Driver):
    """Runs the target; the drafts run in other processes.

    Attributes:
        peers: The drafts, by stage.
    """

    peers: Mapping[int, Peer]

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        super().__init__(models, config)
        self._target = self._make_stage(self.block.target)
        self.block.set_alive(self.block.target, True)
        self._target_threads: int | None = None
        self._generation = 0
        self._call: Call | None = None  # the present one
        self._absent: dict[int, tuple[float, str]] = {}  # by stage: since when, and why
        self._warned_of: set[tuple[int, str]] = set()  # in the present call
        self._events: list[str] = []

    @property
    def target(self) -> Stage:
        return self._target

    @property
    def remarks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._events)

    # ---- a call

    def _generate(self, request: GenerationRequest) -> None:
        try:
            self._begin(request)
            threads = self._target_threads
            with nullcontext() if threads is None else lowered_threads(threads):
                self._target.prefill(request.inputs, request.record)
                max_drafts = self.config.max_draft_tokens(self._target.index)
                while self._target.step(0, max_drafts) != Action.FINISHED:
                    self._publish()
                    self.tend()
                    request.committed(self.block)
        finally:
            self._call = None
            self._end()
        if self._trace_memory is not None or any(draft.translates for draft in self.config.drafts):
            # The steps under way belong to the call, so that its trace and its counters agree.
            for peer in self.peers.values():
                peer.await_end()

    def _begin(self, request: GenerationRequest) -> None:
        self._events.clear()
        self._warned_of.clear()
        self._prepare_peers()
        self._generation = self._generation % _MAX_GENERATION + 1
        params = pickle.loads(request.draft_sampling_params)
        inputs = replace(request.inputs, sampling_params=params, grammar=None)
        call = Call(self._generation, inputs, request.eos)
        self._lay_out(request, call)
        self._call = call
        for i, peer in self.peers.items():
            if i not in self._absent:
                peer.begin(call)
        self.tend()

    def _lay_out(self, request: GenerationRequest, call: Call) -> None:
        """Start the generation in the block. While no stage runs."""
        self._prepare(request)
        for i, lookahead in enumerate(self.config.lookahead):
            self.block.set_lookahead(i, lookahead)
        self.block.start(call.generation)

    def _prepare_peers(self) -> None:
        """Before a call: each peer has ended the last one, or is lost."""

    def _publish(self) -> None:
        """The target took a step."""

    def _end(self) -> None:
        """End the generation."""
        self.block.start(0)

    def tend(self) -> None:
        """Continue without the drafts that are lost, and with those that have returned. Each loss is warned of once per call."""
        for i, peer in self.peers.items():
            cause = peer.failure()
            since, before = self._absent.get(i, (time.monotonic(), None))
            if cause == before:
                continue
            name = self._draft_name(i)
            if cause is not None:
                self._absent[i] = since, cause
                self.block.set_alive(i, False)
                self._events.append(f"{name} was lost: {cause}")
                if (i, cause) not in self._warned_of:
                    self._warned_of.add((i, cause))
                    self._lost(i, f"is lost ({cause}); calls go on without it until {peer.returns}")
            else:
                del self._absent[i]
                self._events.append(f"{name} is back after {time.monotonic() - since:.1f} s")
                self.block.set_alive(i, True)
                if self._call is not None:
                    peer.begin(self._call)

    # ---- afterwards

    @property
    def forms(self) -> Sequence[str]:
        forms = {i: status.form for i, status in self._statuses().items()}
        return self._forms(forms | {self.block.target: self._target.form})

    @property
    def translated(self) -> Mapping[int, tuple[int, int]]:
        ended = {i: s for i, s in self._statuses().items() if s.ended == self._generation}
        return {i: s.translated for i, s in ended.items() if s.translated is not None}

    def _statuses(self) -> dict[int, Status]:
        return {i: status for i, peer in self.peers.items() if (status := peer.status) is not None}
