"""Rank 0 of schedule ``ranks``: the target, which returns the text."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.stage import Stage
from pipespec.process.ranks import Ranks
from pipespec.schedules.base import Decoder, Driver
from pipespec.schedules.ranks.call import encode_call
from pipespec.schedules.ranks.party import Party
from pipespec.schedules.request import GenerationRequest
from pipespec_kernels.state import Action


class _TargetParty(Party):
    """The target's share: it receives how the drafts run, and why one has failed."""

    def __init__(self, *arguments: Any) -> None:
        self.failures: dict[int, tuple[int, str]] = {}  # by rank: generation, cause
        self.forms: dict[int, str] = {}
        self._heard: dict[int, tuple[int, int]] = {}  # by rank: generation, texts
        super().__init__(*arguments)

    def _hear(self, peer: int, generation: int, runs: bool, said: int) -> None:
        before, known = self._heard.get(peer, (0, 0))
        self._heard[peer] = generation, said
        for number in range(known if before == generation else 0, said):
            what, _, text = (self.ranks.fetch(f"said/{peer}/{number}", generation) or "").partition(" ")
            if what == "form":
                self.forms[peer] = text
            elif what == "failed":
                self.failures[peer] = generation, text

    def trouble(self, peer: int) -> str | None:
        """Why a draft takes no part in the present generation; None if it does."""
        generation, cause = self.failures.get(peer, (0, ""))
        return f"it failed: {cause}" if generation == self.generation else self.links[peer].trouble()


class RanksDriver(Driver):
    """Runs the target; the drafts run on the other ranks, see :class:`pipespec.schedules.ranks.draft.DraftRank`.

    The target waits for no other rank. A draft that dies, stops or is cut off costs speed and never a token.

    Args:
        model: The target.
        config: Numbers of the whole chain.
        ranks: All ranks, one per model of the chain.
    """

    schedule = "ranks"

    def __init__(self, model: PreTrainedModel, config: SpeculationConfig, ranks: Ranks) -> None:
        super().__init__([model], config)
        at = self.block.target
        self._target = self._make_stage(at)
        self.block.set_alive(at, True)
        self._generation = 0
        self._lost_at: dict[int, float] = {}
        self._events: list[str] = []
        self._party = _TargetParty(ranks, config, self.block)
        weakref.finalize(self, self._party.close)

    def _model_of(self, i: int) -> PreTrainedModel:
        return self.models[0]  # those of other stages are on other ranks

    def _draft_name(self, i: int) -> str:
        return f"{super()._draft_name(i)} (rank {self._rank_of(i)})"

    def _rank_of(self, i: int) -> int:
        return self.config.model_stages.index(i) + 1

    @property
    def target(self) -> Stage:
        return self._target

    @property
    def remarks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._events)

    def for_fork(self) -> Decoder:
        raise RuntimeError(
            "a forked process cannot talk to the ranks: generate in the process that was started as rank 0"
        )

    # ---- a call

    def _begin(self, request: GenerationRequest) -> None:
        party = self._party
        if party.closed:
            raise RuntimeError("this pipeline is closed, and its other ranks have ended: start all ranks again")
        call = encode_call(request.inputs, request.eos)
        self._generation = self._generation % (2**31 - 1) + 1
        self._events.clear()
        party.ranks.put("call", self._generation, call)
        with party.lock:
            party.forget()
            self._prepare(request)
            self._open_lookahead()
            self.block.start(self._generation)
            party.begin(self._generation)
        party.publish()

    def _generate(self, request: GenerationRequest) -> None:
        try:
            self._begin(request)
            self._tend()
            self._target.prefill(request.inputs, request.record)
            most = self.config.max_draft_tokens(self._target.index)
            while self._target.step(0, most) != Action.FINISHED:
                self._party.publish()
                self._tend()
                request.committed(self.block)
        finally:
            with self._party.lock:
                self._party.running = False
                self.block.start(0)
            self._party.publish()

    def _tend(self) -> None:
        """Continue without the drafts that are gone, and take back those that have returned. The user is warned of each once per call."""
        now = time.monotonic()
        for rank in self._party.links:
            i = self.config.model_stages[rank - 1]
            cause, away = self._party.trouble(rank), i in self._lost_at
            if cause is not None and not away:
                self._lost_at[i] = now
                name = self._draft_name(i)
                if not any(event.startswith(f"{name} was lost") for event in self._events):
                    self._lost(i, f"is lost ({cause}); calls go on without it, and take it back when it returns")
                self._events.append(f"{name} was lost: {cause}")
                self.block.set_alive(i, False)
            elif cause is None:
                if away:
                    self._events.append(f"{self._draft_name(i)} is back after {now - self._lost_at.pop(i):.1f} s")
                if not self.block.is_alive(i):
                    self.block.set_alive(i, True)

    # ---- afterwards

    @property
    def forms(self) -> Sequence[str]:
        said = {self.config.model_stages[rank - 1]: form for rank, form in self._party.forms.items()}
        return self._forms(said | {self.block.target: self._target.form})

    def traces(self) -> dict[str, np.ndarray]:
        # The other ranks keep no trace.
        return {name: steps for name, steps in super().traces().items() if name == self.names[-1]}

    def close(self) -> None:
        """Say goodbye to the other ranks, which end. The pipeline cannot be used again."""
        self._party.close()
