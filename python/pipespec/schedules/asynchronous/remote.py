"""Schedule ``ranks``: each stage is a rank of ``torch.distributed``, on any machine, over a copy of the block.

A message has :data:`HEAD` words of 32 bits and at most :data:`BODY` more: the sender's generation, its state in it, and the number of words after
them, which are records of ``csrc/runtime/replica.hpp``. A thread sends, with at most one message under way: what happens meanwhile is in the next one.
Another thread receives. A connection that breaks affects no other one, and is not made again. A call, and the status of a draft, go through the ranks' store.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.stage import Stage
from pipespec.process import ranks as transport
from pipespec.process.ranks import FOREVER, RankError, Ranks, break_group, first_line
from pipespec.process.threads import handlers_watched
from pipespec.registry import RANKS
from pipespec.schedules.asynchronous.driver import AsynchronousDriver, Peer
from pipespec.schedules.asynchronous.messages import Call, Status
from pipespec.schedules.asynchronous.worker import Caller, make_draft, serve
from pipespec.schedules.base import CacheOwner, Decoder, GenerationRequest
from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock

HEAD = 3
BODY = 4096 - HEAD

_CLOSES = -1
"""In place of a generation: the sender closes."""

_WINDOW = 32
"""Receives that are posted at once. The sender needs no answer before so many messages."""

_MESSAGES = 0
"""Tag."""

_CLOSE_S = 2.0
"""Longest wait for the messages under way when a rank closes."""

SILENT_S = 300.0
"""A rank 0 that is connected and silent for so long has ended: a fork of it, or a machine without power, closes no connection."""


class Link:
    """This rank's end of the connection to rank ``peer``, over the gloo group of all ranks. ``party`` composes and uses the messages. It never blocks
    the stage of this rank.

    Attributes:
        cause: Why there is no connection any more; None while there is one.
    """

    def __init__(self, ranks: Ranks, group: Any, peer: int, party: Party) -> None:
        self.peer, self._ranks, self._group, self._party = peer, ranks, group, party
        self.cause: str | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), daemon=True, name=f"pipespec-{name}-{peer}")
            for loop, name in ((self._send, "to"), (self._receive, "from"))
        ]

    def start(self) -> None:
        """Start the threads. The party is ready for messages."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There may be something to send. Returns at once."""
        self._wake.set()

    def failure(self) -> str | None:
        """Why the other rank cannot be expected to send; None if it can."""
        is_silent = self._ranks.silence(self.peer) > transport.SILENCE_S
        return self.cause or (f"it has given no sign of life for {transport.SILENCE_S:.0f} s" if is_silent else None)

    def close_link(self) -> None:
        """Close after the message under way. Returns at once."""
        self._closing.set()
        self._wake.set()

    def await_end(self, seconds: float) -> None:
        """Wait until both ranks have closed."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds)
        if not any(thread.is_alive() for thread in self._threads):
            self._group = None  # gloo's threads end with the last reference to the group

    # ---- threads

    def _guarded(self, loop: Callable[[], str]) -> None:
        try:
            cause = loop()
        except RuntimeError as error:
            cause = f"its connection broke ({first_line(error)})"
        except Exception as error:
            cause = f"{type(error).__name__}: {first_line(error)}"
        if self.cause is None and not self._closing.is_set():
            self.cause = cause
        self._wake.set()

    def _send(self) -> str:
        message = torch.empty(HEAD + BODY, dtype=torch.int32)
        words = message.numpy()
        while self.cause is None:
            if closes := self._closing.is_set():
                words[:HEAD] = _CLOSES, 0, 0
            count = HEAD if closes else self._party.compose(self, words)
            if count == 0:
                self._wake.wait()
                self._wake.clear()
                continue
            self._group.send([message[:count]], self.peer, _MESSAGES).wait(FOREVER)
            if closes:
                break
        return self.cause or "it is closed"

    def _receive(self) -> str:
        messages = [torch.empty(HEAD + BODY, dtype=torch.int32) for _ in range(_WINDOW)]
        posted = deque((self._group.recv([m], self.peer, _MESSAGES), m) for m in messages)
        while True:
            work, message = posted.popleft()
            work.wait(FOREVER)
            words = message.numpy()
            generation, state, count = words[:HEAD].tolist()
            if generation == _CLOSES:
                self._party.on_close(self.peer)
                return "it has closed"
            self._party.receive(self, generation, state, words[HEAD : HEAD + count])
            posted.append((self._group.recv([message], self.peer, _MESSAGES), message))


def stages_of(rank: int, config: SpeculationConfig) -> range:
    """The stages that a rank runs: rank 0 the target, the others a draft each, and each the inline ones upstream of it."""
    return config.stages_of(config.model_stages[rank - 1])


class Party:
    """A rank's share in a chain. It keeps this rank's block equal to what the other ranks publish, and sends them what this one does.

    Each rank has the whole block. It writes its own stages, and a link's thread writes those of the link's peer. A generation has a number, given
    by the target's rank. A rank sends its state to those that have sent it that they are in the same generation. With each message it sends whether the
    generation runs, and the number of the last status that it has put into the ranks' store.

    Attributes:
        lock: Held while the block is laid out, and while a link reads or writes it.
        generation: The generation of this rank; 0: none.
        running: Whether it has not ended.
    """

    def __init__(self, ranks: Ranks, config: SpeculationConfig, block: StateBlock) -> None:
        self.ranks, self._config, self.block = ranks, config, block
        self.rank, self._world = rank, world = ranks.rank, ranks.world
        self.lock = threading.Lock()
        self.generation, self.running, self.closed = 0, False, False
        self._sent_statuses = 0
        self._boxes: dict[int, tuple[_native.Outbox, _native.Inbox]] = {}
        self._announced: dict[int, tuple[int, int]] = {}
        self._peer_generations: dict[int, int] = {}
        drafts = range(1, world)
        peers = drafts if rank == 0 else [0, *(peer for peer in (rank - 1, rank + 1) if peer in drafts)]
        self.group = ranks.connect()
        self.links = {peer: Link(ranks, self.group, peer, self) for peer in peers}
        for link in self.links.values():
            link.start()

    def begin(self, generation: int) -> None:
        """Take part in a generation, whose rows lie in the block. While the lock is held."""
        self.generation, self.running = generation, True
        for peer in self.links:
            own, peers_stages = (list(stages_of(rank, self._config)) for rank in (self.rank, peer))
            # All ranks read the target's sequences, and neighbours in the chain each other's.
            tokens = self.rank == 0 or peer != 0 or self.rank == self._world - 1
            outbox = self.block.outbox(own, tokens=tokens, counters=peer == 0, controls=self.rank == 0)
            self._boxes[peer] = outbox, self.block.inbox(peers_stages, controls=peer == 0)

    def forget(self) -> None:
        """Before the block is laid out again. While the lock is held."""
        self._boxes, self.generation, self.running = {}, 0, False

    def publish(self) -> None:
        """Send what this rank's stages have published. Returns at once."""
        for link in self.links.values():
            link.wake()

    def close(self) -> None:
        """Close the links. A later call does nothing."""
        if self.closed:
            return
        self.closed = True
        for link in self.links.values():
            link.close_link()
        # The other rank closes the connection when it has read that. A reset would overtake it.
        deadline = time.monotonic() + _CLOSE_S
        for link in self.links.values():
            link.await_end(max(0.0, deadline - time.monotonic()))
        break_group(self.group)
        for link in self.links.values():
            link.await_end(_CLOSE_S)
        self.group = None
        self.ranks.stop()

    # ---- called by the links' threads

    def compose(self, link: Link, words: np.ndarray) -> int:
        """Write the next message. Return its words, or 0 if there is nothing to send."""
        with self.lock:
            count, now = 0, (self.generation, int(self.running) + 2 * self._sent_statuses)
            if link.peer in self._boxes and self._peer_generations.get(link.peer) == self.generation:
                count = self._boxes[link.peer][0].fill(words[HEAD:].ctypes.data, BODY)
            if not count and self._announced.get(link.peer) == now:
                return 0
            self._announced[link.peer] = now
            words[:HEAD] = *now, count
            return HEAD + count

    def receive(self, link: Link, generation: int, state: int, body: np.ndarray) -> None:
        """Use a message. Raises ``ValueError`` for one that no rank of this chain sends."""
        self.on_state(link.peer, generation, bool(state & 1), state >> 1)
        with self.lock:
            if self._peer_generations.get(link.peer) != generation:
                self._peer_generations[link.peer] = generation
                link.wake()
            boxes = self._boxes.get(link.peer) if generation == self.generation else None
            if boxes is not None and len(body) and not boxes[1].apply(body.ctypes.data, len(body)):
                raise ValueError("it sent a state that does not fit the chain")

    @abstractmethod
    def on_state(self, peer: int, generation: int, runs: bool, statuses: int) -> None:
        """Another rank is in a generation, which runs or has ended, and has put so many statuses into the store."""

    def on_close(self, peer: int) -> None:
        """Another rank has closed."""


# ---- rank 0


class _TargetParty(Party):
    """The target's share: it receives the statuses of the drafts."""

    def __init__(self, *arguments: Any) -> None:
        self.statuses: dict[int, tuple[int, Status]] = {}  # by rank: number, status
        super().__init__(*arguments)

    def on_state(self, peer: int, generation: int, runs: bool, statuses: int) -> None:
        known, _ = self.statuses.get(peer, (0, None))
        text = self.ranks.fetch(f"status/{peer}", statuses) if statuses > known else None
        if text is not None:  # else a later one has taken its place, and another message follows
            self.statuses[peer] = statuses, Status.from_json(text)


class RemotePeer(Peer):
    """A draft on another rank."""

    returns = "it returns"

    def __init__(self, party: _TargetParty, rank: int) -> None:
        self._party, self._rank = party, rank

    @property
    def status(self) -> Status | None:
        return self._party.statuses.get(self._rank, (0, None))[1]

    def failure(self) -> str | None:
        status = self.status
        if status is not None and status.failure and status.ended == self._party.generation:
            return f"it failed: {status.failure}"
        return self._party.links[self._rank].failure()


class RemoteDriver(AsynchronousDriver):
    """The driver of schedule ``ranks``, on rank 0: that of the target. The drafts run on the other ranks, see :class:`DraftRank`."""

    schedule = "ranks"

    def __init__(self, model: PreTrainedModel, config: SpeculationConfig, ranks: Ranks) -> None:
        super().__init__([model], config)
        self._party = _TargetParty(ranks, config, self.block)
        self.peers = {i: RemotePeer(self._party, rank) for rank, i in enumerate(config.model_stages[:-1], 1)}
        for i in self.peers:
            self.block.set_alive(i, True)
        weakref.finalize(self, self._party.close)

    def _model_of(self, i: int) -> PreTrainedModel:
        return self.models[0]  # those of other stages are on other ranks

    def _draft_name(self, i: int) -> str:
        return f"{super()._draft_name(i)} (rank {self.config.model_stages.index(i) + 1})"

    def for_fork(self) -> Decoder:
        raise RuntimeError(
            "a forked process cannot talk to the ranks: generate in the process that was started as rank 0"
        )

    def _prepare_peers(self) -> None:
        if self._party.closed:
            raise RuntimeError("this pipeline is closed, and its other ranks have ended: start all ranks again")

    def _lay_out(self, request: GenerationRequest, call: Call) -> None:
        party = self._party
        party.ranks.put("call", call.generation, call.to_json())
        with party.lock:
            party.forget()
            super()._lay_out(request, call)
            party.begin(call.generation)
        party.publish()

    def _publish(self) -> None:
        self._party.publish()

    def _end(self) -> None:
        with self._party.lock:
            self._party.running = False
            super()._end()
        self._party.publish()

    def traces(self) -> dict[str, np.ndarray]:
        # The other ranks keep no trace.
        return {name: steps for name, steps in super().traces().items() if name == self.names[-1]}

    def close(self) -> None:
        """Close the links to the other ranks, which end. The pipeline cannot be used again."""
        self._party.close()


# ---- the other ranks


class _DraftParty(Party, Caller):
    """A draft's share: it receives the calls."""

    fatal = (RankError,)
    max_sleep_s = 0.5

    def __init__(self, ranks: Ranks, config: SpeculationConfig, stage: Stage) -> None:
        self._stage = stage
        self._calls = SimpleQueue[Call | None]()
        self._last_call = self._ended = 0  # generations
        self.is_over = False
        super().__init__(ranks, config, stage.block)

    def next_call(self) -> Call | None:
        while not self.is_over and not self.closed:
            try:
                return self._calls.get(timeout=self.max_sleep_s)
            except Empty:
                self.require_target()
        return None

    def enter(self, call: Call) -> Stage | None:
        starts, limits = [len(prompt) for prompt in call.inputs.prompts], call.inputs.limits
        capacity = max(limit - start for limit, start in zip(limits, starts, strict=True)) + 2
        with self.lock:
            if call.generation != self._last_call or call.generation == self._ended or self.is_over:
                return None
            self.forget()
            self.block.ensure(len(starts), capacity)
            self.block.reset(starts, limits, [int(prompt[-1]) for prompt in call.inputs.prompts], call.eos)
            self.block.start(call.generation)
            self.begin(call.generation)
        self.publish()
        return self._stage

    def stepped(self) -> None:
        self.require_target()  # one that dies within a call does not end the generation
        self.publish()

    def send(self, status: Status) -> None:
        self._sent_statuses += 1
        self.ranks.put(f"status/{self.rank}", self._sent_statuses, status.to_json())
        self.links[0].wake()

    def require_target(self) -> None:
        """Raises ``RankError`` if rank 0 has ended, or has been silent for ``SILENT_S``."""
        if self.is_over:
            return
        if (cause := self.links[0].cause) is not None:
            raise RankError(f"rank {self.rank}: rank 0, the target, is gone ({cause})")
        if self.ranks.cause is not None:
            raise RankError(f"rank {self.rank}: {self.ranks.cause}")
        if self.ranks.silence(0) > SILENT_S:
            raise RankError(f"rank {self.rank}: rank 0, the target, has given no sign of life for {SILENT_S:g} s")

    # ---- called by the links' threads

    def on_state(self, peer: int, generation: int, runs: bool, statuses: int) -> None:
        if peer != 0:
            return
        if runs and generation != self._last_call:
            self._last_call = generation
            if (text := self.ranks.fetch("call", generation)) is not None:
                self._stop()
                self._calls.put(Call.from_json(text, self._stage.model.device))
        elif not runs:
            with self.lock:
                self._ended = generation
            if generation == self.generation:
                self._stop()

    def on_close(self, peer: int) -> None:
        if peer != 0:
            return
        self.is_over = True
        self._stop()
        self._calls.put(None)
        break_group(self.group)  # rank 0 waits for that

    def _stop(self) -> None:
        with self.lock:
            self.running = False
            self.block.start(0)


class DraftRank(Decoder):
    """A rank that runs a draft. It has no calls of its own: :meth:`serve` takes part in those of rank 0. ``config``: of the whole chain."""

    ran_as = RANKS.name
    serves = True

    def __init__(self, model: PreTrainedModel, config: SpeculationConfig, ranks: Ranks) -> None:
        super().__init__()
        self.rank = ranks.rank
        self.block: StateBlock = StateBlock.create(len(config.drafts) + 1, 1, 64)
        own = stages_of(self.rank, config)
        drafts = config.drafts[own[0] : own[-1] + 1]
        stage = make_draft(drafts, model, self.block, own[-1], native=config.native, prefix_cache=config.prefix_cache)
        self._party = _DraftParty(ranks, config, stage)
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
        with handlers_watched():
            serve(self._party)

    def close(self) -> None:
        """Leave the chain. The target goes on without this draft."""
        self._party.close()
