"""SPD over processes: each stage on a rank of its own (torchrun), with the keys and values of its own layers only.

Rank 0 holds embedding, final norm, LM head and drafter, and runs the decode machine. With n stages there are n + 1 ranks, or n with the
first stage on rank 0, too. The ranks form a ring: rank 0 sends a token to the first stage, each stage its output to the next one, and the last stage
to rank 0. The message has all that a stage needs to know: the position of the token in each row is also the number of positions that stay in the
caches. So in a cycle each link carries one message, and nothing waits for a command. Stages send the residual streams that the drafter reads to rank 0.

After a flush, the columns that are under way go round to the end, and rank 0 drops them. They do not delay the column after them. The prompt passes the
stages in chunks, each stage one chunk after the stage before it.

Usage: the same script on all ranks (``torchrun --nproc-per-node 3 script.py``)::

    with RanksPipeline("path/of/target", "ngram", stages=2) as pipe:
        if pipe.has_target:
            out = pipe.generate(input_ids, max_new_tokens=100)
        else:
            pipe.serve()

or, as a program: ``torchrun --nproc-per-node 3 -m pipespec generate --system spd --target PATH --draft ngram --stages 2 --prompt TEXT``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.api.base import BasePipeline
from pipespec.api.prepare import CallOptions, PreparedCall
from pipespec.checks.devices import rank_device
from pipespec.engine.cache import RowCache
from pipespec.engine.known import NATIVE
from pipespec.models.families import embedded
from pipespec.models.parts import ModelParts
from pipespec.process.ranks import START_S, RankError, rank_and_world
from pipespec.process.threads import delayed, handlers_watched
from pipespec.registry import RANKS
from pipespec.schedules.base import Decoder, GenerationRequest
from pipespec_spd.decoding import PromptChunk, SpeculativeDriver, Streams
from pipespec_spd.drafting import Drafter
from pipespec_spd.link import TIMEOUT_S, Link, Receiver, Sender
from pipespec_spd.machine import Entry
from pipespec_spd.partition import Partition, Verifier, cut, load_ends, load_skeleton, load_stage
from pipespec_spd.pipeline import module_config, resolve_drafter, speculative_report
from pipespec_spd.report import SpeculativeReport
from pipespec_spd.ring import BULK, CHUNK, CLOSE, CONTROL, END, HEAD, OPEN, RUN, STREAMS, Head, Ring, StageServer
from pipespec_spd.sections import open_sections, stream_dtype


class RanksDriver(SpeculativeDriver):
    """Rank 0: lets tokens enter, and takes what comes out. ``local`` is the first stage if it shares this rank, else None."""

    def __init__(
        self,
        model: PreTrainedModel,
        partition: Partition,
        drafter: Drafter,
        link: Link,
        ring: Ring,
        local: StageServer | None,
        native: bool,
    ) -> None:
        super().__init__(partition, Verifier.of(model), drafter, native)
        open_sections([self.verifier.section], native=native)
        self._link, self._ring, self._local = link, ring, local
        self._ends = ModelParts.of(model)
        self._dtype, self._hidden_size = stream_dtype(model.dtype, model.device), model.config.hidden_size
        self._rank_of = ranks_of(partition.stages, link.world)
        self.starts_ahead = local is None  # else a start includes the time of the first stage
        self._number = 0  # of the last message
        self._seen: dict[Receiver, int] = {}  # by line: number of the last message received
        self._streams: dict[int, Receiver] = {}
        self._running = False
        self._remote = range(1 if local is not None else 0, partition.stages)
        # Chunks of the prompt under way: number, columns, and what is here.
        self._chunks: deque[tuple[int, int, PromptChunk]] = deque()

    ran_as = RANKS.name

    @property
    def target(self) -> RanksDriver:
        return self

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        raise NotImplementedError(
            "generate(): past_key_values is not supported with ranks: each stage keeps the keys and values of its own layers"
        )

    def complete(self, texts: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
        return None

    def forget(self) -> None:
        """Nothing was adopted."""

    def for_fork(self) -> Decoder:
        raise RuntimeError("a forked process cannot talk to the ranks: generate in the process that torchrun started")

    def _generate(self, request: GenerationRequest) -> None:
        if self._link.broken:
            raise RankError("this process group broke in an earlier call; start all ranks again")
        was_running = self._running  # an interruption between two instructions can leave a call that was not ended
        if was_running:
            raise self._link.failed("the last call was not ended")
        with handlers_watched(delayable=True):
            try:
                super()._generate(request)
            finally:
                with delayed:
                    if self._running and not self._link.broken:
                        with self._whole("ended"):
                            self._end()

    @contextmanager
    def _whole(self, done: str) -> Iterator[None]:
        """Do this completely, or mark the group as broken: the other ranks do not know how far it came."""
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            failed = self._link.failed(f"the call could not be {done} ({type(error).__name__}: {error})")
            if isinstance(error, Exception):
                raise failed from error
            raise

    @delayed
    def _open(self, rows: int, longest: int, max_positions: int) -> None:
        self._rows = rows
        # By stage: the number of the column that entered so many cycles ago; None: there was none.
        self._entered: deque[int | None] = deque([None] * self.partition.stages, maxlen=self.partition.stages)
        self._last_column = -1
        self._chunks.clear()
        self._form = open_sections([self.verifier.section], native=self.native)
        control = torch.tensor([OPEN, rows, longest, max_positions], dtype=torch.int64)
        with self._whole("opened"):
            self._running = True
            for s in self._remote:
                self._link.send(control, self._rank_of[s], CONTROL)
            if self._remote:
                self._ring.open(rows)
                self._leaving = self._ring.line_after(self._remote.start - 1, Sender)
                self._arriving = self._ring.line_after(self.partition.stages - 1, Receiver)
                self._streams = {s: line for s in self._remote if (line := self._ring.streams(s, Receiver)) is not None}
        if self._local is not None:
            self._local.open(rows, longest, max_positions)
            self._form = self._form if self._form != NATIVE else self._local.form

    @delayed
    def _end(self) -> None:
        """Receive every message under way, so that the next call starts without any."""
        if self._local is not None:
            self.clock.stage_seconds[0] = self._local.busy
        if not self._remote:
            self._running = False
            return
        self._collect_chunks(0)
        self._number += 1
        self._leaving.send(self._ring.words(Head(END, self._number, 0, 0)))
        words, _ = self._await(self._arriving, self._number)
        for line in self._streams.values():
            if self._last_column > self._seen.get(line, -1):
                self._await(line, self._last_column, at=0)
        for s in self._remote:
            busy, native = words[HEAD + 2 * s : HEAD + 2 * s + 2]
            self.clock.stage_seconds[s] = busy / 1e9
            if self._form == NATIVE and not native:
                self._form = f"transformers: the stage of rank {self._rank_of[s]} is not native"
        self._running = False

    def _await(self, line: Receiver, number: int, at: int = 1) -> tuple[list[int], Sequence[torch.Tensor]]:
        """Receive message ``number`` of a line. Columns before it were flushed on their way. ``at``: the word with the number."""
        while True:
            words, tensors = line.receive()
            self._seen[line] = words[at]
            if words[at] == number:
                return words, tensors
            if words[at] > number:
                raise self._link.failed(f"rank {line.peer} sent message {words[at]} in place of {number}")

    def _enter(
        self, head: Head, positions: Sequence[int], payload: Sequence[int], columns: torch.Tensor | None = None
    ) -> Streams:
        """Let columns enter, and return the residual streams that are known now.

        Args:
            head: Of their message, but for its number.
            positions: Of each row's first column.
            payload: Per row the token of a column, or of a chunk the number of ``real`` columns.
            columns: Tokens ``[B, q]``; None: one column, ``payload``.
        """
        self._number += 1
        head = head._replace(number=self._number)
        words = self._ring.words(head, [*positions, *payload]) if self._remote else []
        if self._local is None:
            self._leaving.send(words)  # first, since the first stage waits for it
            if columns is not None:
                self._link.send(columns, self._rank_of[0], BULK)
        streams: Streams = {}
        if self._local is not None or 0 in self.features:
            with torch.inference_mode():
                tokens = torch.tensor(payload, device="cpu")[:, None] if columns is None else columns
                if 0 in self.features:
                    streams[0] = embedded(self._ends, tokens.to(self._ends.embed.weight.device))
                if self._local is not None:
                    is_chunk = head.kind == CHUNK
                    self._own, more = self._local.run(head, positions, tokens, payload if is_chunk else None)
                    streams |= more
                    if self._remote:
                        self._leaving.send(words, [] if is_chunk else [self._own])
                        if is_chunk:
                            self._link.send(self._own, self._rank_of[1], BULK)
        if head.kind == RUN:
            self._last_column = self._number
        return streams

    def _gather(self, numbers: Mapping[int, int]) -> tuple[torch.Tensor | None, Streams]:
        """Receive columns, by stage: the residual streams, and from the last stage its output."""
        hidden: torch.Tensor | None = None
        streams: Streams = {}
        for s, number in numbers.items():
            if s in self._streams:
                values = self._await(self._streams[s], number, at=0)[1]
                streams |= dict(zip(self._ring.features[s], values, strict=True))
            elif s + 1 == self.partition.stages:
                hidden, *values = self._await(self._arriving, number)[1]
                streams |= dict(zip(self._ring.features[s], values, strict=True))
        return hidden, streams

    @delayed
    def _feed(self, columns: np.ndarray, begin: Sequence[int], real: Sequence[int]) -> list[PromptChunk]:
        tokens = torch.from_numpy(columns).long()
        arrived = self._collect_chunks(self.partition.stages - 1)
        streams = self._enter(Head(CHUNK, 0, tokens.shape[1], 0), begin, real, tokens)
        if not self._remote:
            return [*arrived, PromptChunk(streams, begin, real)]
        self._chunks.append((self._number, tokens.shape[1], PromptChunk(streams, begin, real)))
        return arrived

    def _collect_chunks(self, allowed: int) -> list[PromptChunk]:
        """Wait until at most ``allowed`` chunks of the prompt are under way. Return what came of the others."""
        out = []
        while len(self._chunks) > allowed:
            number, columns, chunk = self._chunks[0]
            self._await(self._arriving, number)
            streams = dict(chunk.streams)
            for s in self._remote:
                wanted = self._ring.features[s]
                if wanted:
                    shape = (len(wanted), self._rows, columns, self._hidden_size)
                    values = self._link.receive(shape, self._dtype, self._rank_of[s], STREAMS)
                    streams |= dict(zip(wanted, values, strict=True))
            self._chunks.popleft()
            out.append(chunk._replace(streams=streams))
        return out

    @delayed
    def _answer(self, columns: np.ndarray, begin: Sequence[int]) -> tuple[torch.Tensor, list[PromptChunk]]:
        arrived = self._collect_chunks(0)
        streams = self._enter(Head(RUN, 0, 1, 0), begin, columns[:, 0].tolist())
        hidden, more = self._gather(dict.fromkeys(self._remote, self._number))
        arrived.append(PromptChunk(streams | more, begin, [1] * self._rows))
        return self._own if hidden is None else hidden, arrived

    @delayed
    def _launch(self, work: list[list[Entry]]) -> None:
        self._now: Streams = {}
        self._entered.appendleft(None)
        if work[0]:
            positions, tokens = [-1] * self._rows, [0] * self._rows
            for entry in work[0]:
                positions[entry.row], tokens[entry.row] = entry.position, entry.token
            self._now = self._enter(Head(RUN, 0, 1, 1), positions, tokens)
            self._entered[0] = self._number

    @delayed
    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, Streams, list[float]]:
        numbers = {s: number for s in self._remote if work[s] and (number := self._entered[s]) is not None}
        hidden, streams = self._gather(numbers)
        if not self._remote:
            hidden = self._own
        return hidden, self._now | streams, [0.0] * self.partition.stages


def ranks_of(stages: int, world: int) -> list[int]:
    """The rank of each stage. Raises ``ValueError`` unless there are as many ranks as stages, or one more."""
    if world not in (stages, stages + 1):
        raise ValueError(
            f"{stages} stages need {stages + 1} ranks, or {stages} with the first stage on the rank of the drafter; there are {world}: start with "
            f"torchrun --nproc-per-node {stages + 1}"
        )
    return [s + world - stages for s in range(stages)]


class RanksPipeline(BasePipeline):
    """A partitioned target over the ranks that torchrun has started: ``generate()`` on rank 0, ``serve()`` on the others.

    The text is that of :class:`pipespec_spd.SpeculativePipeline`. Ranks do not support ``past_key_values``, ``output_hidden_states`` and
    ``output_attentions``.

    Args:
        target: Path of a LLaMA-family model. Each rank reads its own part of the safetensors.
        drafter: As for ``SpeculativePipeline``, the same on all ranks. Only rank 0 runs it; the others read its ``features``.
        stages: As for ``SpeculativePipeline``, the same on all ranks.
        timeout_s: Longest time of a rank for its part of a cycle or of a chunk of the prompt, with rank 0's streamers and processors. If a
            rank takes longer, dies or stops, the call ends on all ranks with :class:`RankError`, or the process ends.
        start_s: Longest time until all ranks are there, and again until all have loaded their weights.
        dtype: Dtype of the weights. None keeps the model's.
        device: Device of each rank: ``"cpu"``; ``"cuda"``, the GPU of number LOCAL_RANK; or one for all, such as ``"cuda:0"``.
        native: As for ``SpeculativePipeline``, the same on all ranks. Each rank checks and packs its own stage.

    Raises:
        ValueError, TypeError, FileNotFoundError: As ``SpeculativePipeline``, on all ranks and before any weight is read.
        RankError: A rank is missing, cannot load its part, or was started with other stages, features or dtype. Raised on all ranks.
    """

    report: SpeculativeReport | None

    def __init__(
        self,
        target: str | Path,
        drafter: Any = "ngram",
        *,
        stages: int | Sequence[int] | Partition,
        timeout_s: float = TIMEOUT_S,
        start_s: float = START_S,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        native: bool = True,
    ) -> None:
        rank, world = rank_and_world()
        if not isinstance(target, (str, Path)):
            raise TypeError(f"target must be a path, of which each rank reads its part, not {type(target).__name__}")
        device = torch.device(rank_device(device))
        skeleton = load_skeleton(target).config
        self.partition = cut(skeleton.num_hidden_layers, stages)
        rank_of = ranks_of(self.partition.stages, world)
        config = module_config(drafter)
        if config is not None:
            config.require(target, self.partition.ranges)
        features = tuple(getattr(drafter, "features", ())) if config is None else config.anchors[1:]
        for index in features:
            self.partition.owner(index)
        terms = {
            "stages": self.partition.counts,
            "features": features,
            "dtype": str(dtype or "of the model"),
            "native": native,
        }
        self._link = Link.open(terms, timeout_s, start_s)
        self.has_target = rank == 0
        self._server: StageServer | None = None
        number = rank_of.index(rank) if rank in rank_of else None
        error = None
        models: list[PreTrainedModel] = []
        try:
            owned = [
                [k for k in features if k > 0 and self.partition.owner(k) == s] for s in range(self.partition.stages)
            ]
            between = stream_dtype(dtype or skeleton.dtype or torch.float32, device)
            ring = Ring(self._link, rank_of, owned, skeleton.hidden_size, between)
            if number is not None:
                stage = load_stage(target, self.partition, number, dtype=dtype, device=device)
                self._server = StageServer(stage, number, rank_of, ring, self._link, native)
            if self.has_target:
                ends = load_ends(target, dtype=dtype, device=device)
                found, drafts = resolve_drafter(
                    drafter, ends, target, self.partition, dtype=dtype or "auto", device=device
                )
                models = [*drafts, ends]
                self._driver: RanksDriver = RanksDriver(
                    ends, self.partition, found, self._link, ring, self._server, native
                )
        except Exception as failure:
            error = failure
        except BaseException as failure:
            self._link.failed(f"{type(failure).__name__} while loading its weights")
            raise
        self._link.agree(error)
        super().__init__(models)

    def _caching(self) -> Sequence[PreTrainedModel]:
        return self.models[:-1]  # the target's caches are on other ranks

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`pipespec.Pipeline.generate`. Raises ``RuntimeError`` except on rank 0, and ``RankError`` if a rank is lost."""
        if not self.has_target:
            raise RuntimeError(f"rank {self._link.rank} runs a stage: call serve() there, and generate() on rank 0")
        return super().generate(*args, **kwargs)

    def _report(self, generation: PreparedCall) -> SpeculativeReport:
        return speculative_report(generation, self._driver)

    def _must_run(self, options: CallOptions) -> bool:
        return True  # the target's layers are on other ranks

    def serve(self) -> None:
        """Run this rank's stage until rank 0 closes. Raises ``RuntimeError`` on rank 0, and ``RankError`` if a rank is lost."""
        if self.has_target or self._server is None:
            raise RuntimeError("rank 0 runs no stage loop: call generate() there")
        try:
            self._server.serve()
        except RankError:
            raise
        except Exception as error:
            raise self._link.failed(f"its stage failed ({type(error).__name__}: {error})") from error
        except BaseException as error:
            self._link.failed(f"{type(error).__name__} while serving its stage")
            raise

    def close(self) -> None:
        """End all ranks. A ``with`` block does so at its end. It waits for a call in another thread, as :meth:`pipespec.Pipeline.close` does."""
        with self._turn("close()", "raise an error there to end the call, and close the pipeline when it has returned"):
            if self._is_forked:
                return  # in a fork, the ranks are the parent's
            try:
                if self.has_target and not self._link.broken:
                    for rank in range(1, self._link.world):
                        with suppress(RankError):  # it has ended already
                            self._link.send(torch.tensor([CLOSE, 0, 0, 0], dtype=torch.int64), rank, CONTROL)
                if self.has_target:
                    self._driver.close()
            finally:
                self._link.close()
