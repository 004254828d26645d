"""The other ranks of schedule ``ranks``: a draft each, which takes part in the calls of rank 0."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.chain import make_upstream
from pipespec.engine.inputs import StageInputs
from pipespec.engine.stage import Stage
from pipespec.process.ranks import RankError, Ranks, break_group
from pipespec.process.signals import draft_errors, handlers_watched
from pipespec.registry import RANKS
from pipespec.schedules.asynchronous import drafting
from pipespec.schedules.base import Decoder
from pipespec.schedules.ranks.call import decode_call
from pipespec.schedules.ranks.party import Link, Party
from pipespec.schedules.request import CacheOwner, GenerationRequest
from pipespec_kernels.state import StateBlock

SILENT_S = 300.0
"""A rank 0 that is connected and silent for so long has ended: a fork of it, or a machine without power, closes no connection."""

_SLEEP_NS = 500_000_000
"""Longest sleep of a draft that has nothing to do."""


class _DraftParty(Party):
    """A draft's share: it receives the calls."""

    def __init__(self, *arguments: Any) -> None:
        self._calls = SimpleQueue[tuple[int, StageInputs, list[int]] | None]()
        self._heard = self._ended = 0
        self.is_over = False
        super().__init__(*arguments)

    def say(self, text: str) -> None:
        """Tell the target how the forward runs in this generation (``form ...``), or why it has failed (``failed ...``)."""
        self.ranks.put(f"said/{self.rank}/{self._said}", self.generation, text)
        self._said += 1
        self.links[0].wake()

    def next_call(self) -> tuple[int, StageInputs, list[int]] | None:
        """Wait for a call, for a short time. Return its generation, its inputs, and the tokens that end a row."""
        try:
            return self._calls.get(timeout=_SLEEP_NS / 1e9)
        except Empty:
            return None

    def enter(self, generation: int, lay_out: Callable[[], None]) -> bool:
        """Take part in a generation. Return False if it has ended already."""
        with self.lock:
            if generation != self._heard or generation == self._ended or self.is_over:
                return False
            self.forget()
            self.generation = generation
            lay_out()
            self.block.start(generation)
            self.begin(generation)
            return True

    def _hear(self, peer: int, generation: int, runs: bool, said: int) -> None:
        if peer != 0:
            return
        if runs and generation != self._heard:
            self._heard = generation
            if (text := self.ranks.fetch("call", generation)) is not None:
                self._stop()
                self._calls.put((generation, *decode_call(text)))
        elif not runs:
            with self.lock:
                self._ended = generation
            if generation == self.generation:
                self._stop()

    def _stop(self) -> None:
        with self.lock:
            self.running = False
            self.block.start(0)

    def closed_by(self, link: Link) -> None:
        if link.peer != 0:
            return
        self.is_over = True
        self._stop()
        self._calls.put(None)
        break_group(self.group)  # rank 0 waits for that


class DraftRank(Decoder):
    """A rank that runs a draft. It has no calls of its own: :meth:`serve` takes part in those of rank 0.

    Args:
        model: The draft.
        config: Numbers of the whole chain.
        ranks: All ranks, one per model of the chain.
    """

    ran_as = RANKS.name
    serves = True

    def __init__(self, model: PreTrainedModel, config: SpeculationConfig, ranks: Ranks) -> None:
        super().__init__()
        rank = ranks.rank
        index = config.model_stages[rank - 1]
        first = config.stages_of(index)[0]
        self.block: StateBlock = StateBlock.create(len(config.drafts) + 1, 1, 64)
        upstream = make_upstream(config.drafts[first:index], self.block, first)
        self._stage: Stage = config.drafts[index].make_stage(
            model, self.block, index, native=config.native, upstream=upstream
        )
        self._party = _DraftParty(ranks, config, self.block)
        self.rank = rank
        weakref.finalize(self, self._party.close)

    @property
    def target(self) -> CacheOwner:
        raise self.refusal()

    def run(self, request: GenerationRequest) -> None:
        raise self.refusal()

    def refusal(self) -> RuntimeError:
        """The error of a call of ``generate()`` on this rank."""
        return RuntimeError(
            f"rank {self.rank} runs draft {self.rank - 1}: call serve() there, and generate() on rank 0, which has the target"
        )

    def for_fork(self) -> Decoder:
        raise RuntimeError("a forked process cannot talk to the ranks: serve in the process that was started as a rank")

    def serve(self) -> None:
        """Take part in the calls of rank 0 until it closes.

        Raises:
            RankError: Rank 0 has ended, or has been silent for ``SILENT_S``.
        """
        party = self._party
        with handlers_watched():
            while not party.is_over and not party.closed:
                if (call := party.next_call()) is not None:
                    self._take_part(*call)
                else:
                    self._require_target()

    def _require_target(self) -> None:
        """Raises ``RankError`` if rank 0 has ended."""
        party = self._party
        if party.is_over:
            return
        if (cause := party.links[0].cause) is not None:
            raise RankError(f"rank {self.rank}: rank 0, the target, is gone ({cause})")
        if party.ranks.cause is not None:
            raise RankError(f"rank {self.rank}: {party.ranks.cause}")
        if party.ranks.silence(0) > SILENT_S:
            raise RankError(f"rank {self.rank}: rank 0, the target, has given no sign of life for {SILENT_S:g} s")

    def _take_part(self, generation: int, inputs: StageInputs, eos: list[int]) -> None:
        party, starts = self._party, [len(prompt) for prompt in inputs.prompts]
        new = [limit - start for limit, start in zip(inputs.limits, starts, strict=True)]

        def lay_out() -> None:
            self.block.ensure(len(starts), max(new) + 2)
            self.block.reset(starts, inputs.limits, [int(prompt[-1]) for prompt in inputs.prompts], eos)

        def failed(error: Exception) -> None:
            if isinstance(error, RankError):
                raise error
            party.say(f"failed {type(error).__name__}: {error}")

        with draft_errors(failed):
            if not party.enter(generation, lay_out):
                return
            party.publish()
            self._stage.prefill(inputs)
            form = ""
            for _ in drafting(self._stage, generation, _SLEEP_NS):
                self._require_target()  # one that dies within a call does not end the generation
                party.publish()
                if not form and (form := self._stage.form):
                    party.say(f"form {form}")

    def close(self) -> None:
        """Leave the chain. The target goes on without this draft."""
        self._party.close()
