"""SPD over processes: each stage on a rank of its own (torchrun, gloo), with the keys and values of its own layers only.

Rank 0 holds embedding, final norm, LM head and drafter, and runs the decode machine. With n stages there are n + 1 ranks, or n with the
first stage on rank 0, too. Sender and receiver compute the size of every message, and no cycle has a barrier. Rank 0 sends each stage its command
with the token ids, and drafts while the stages run. Stage s sends its output to stage s + 1, which receives it with its next command. The
last stage sends its output to rank 0. The prompt passes the stages in chunks, each stage one chunk behind the stage before it.

Usage: the same script on all ranks (``torchrun --nproc-per-node 3 script.py``)::

    with RanksPipeline("path/of/target", "ngram", stages=2) as pipe:
        if pipe.is_controller:
            out = pipe.generate(input_ids, max_new_tokens=100)
        else:
            pipe.serve()

or, as a program: ``torchrun --nproc-per-node 3 -m pipespec.spd.ranks --target PATH --stages 2 --prompt-ids 5,6,7``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.drivers import GenerationRequest
from pipespec.drivers.base import Decoder
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import open_sections, stream_dtype
from pipespec.engine.native import NATIVE
from pipespec.generation import Generation
from pipespec.pipeline import BasePipeline
from pipespec.process.ranks import START_S, RankError, own_device, rank_and_world
from pipespec.spd.decoding import SpeculativeDriver, Streams
from pipespec.spd.drafting import Drafter
from pipespec.spd.link import TIMEOUT_S, Link, uninterrupted
from pipespec.spd.machine import Entry
from pipespec.spd.partition import LayerStage, Partition, Verifier, cut, load_ends, load_skeleton, load_stage
from pipespec.spd.pipeline import module_config, resolve_drafter, speculative_report
from pipespec.spd.report import SpeculativeReport

_CONTROL, _TOKENS, _HIDDEN, _STREAMS, _BUSY, _DONE = range(6)
"""Tags of messages."""

_CLOSE, _OPEN, _RUN, _END = range(4)
"""First word of a control message."""

_HEAD = 6
"""Words of a control message before those of the rows."""


class Control(NamedTuple):
    """Command to a stage, sent as int64 ``[_HEAD + 3 B]``. Between calls only the first ``_HEAD`` words are sent (``_OPEN``: B, longest, most).

    Attributes:
        word: ``_RUN`` or ``_END``.
        q: Columns to run.
        arrives: Columns of the message to receive first from the stage before, or 0.
        runs: Whether there are columns to run.
        passes: Whether the output goes to the next rank.
        cycle: Whether the command belongs to a cycle. In the prefill, the last stage confirms each chunk (``_DONE``), which bounds the
            number of chunks under way.
        held: Positions of each row that stay in the cache, as for ``LayerStage.step``.
        until: Those that stay after the command, likewise.
        tokens: Token of each row. With q > 1, stage 0 receives its tokens ``[B, q]`` in a separate message.
    """

    word: int
    q: int
    arrives: int
    runs: bool
    passes: bool
    cycle: bool
    held: Sequence[int]
    until: Sequence[int]
    tokens: Sequence[int]

    def encoded(self) -> torch.Tensor:
        return torch.tensor([*self[:_HEAD], *self.held, *self.until, *self.tokens], dtype=torch.int64)

    @classmethod
    def decoded(cls, words: torch.Tensor) -> Control:
        head, rows = words[:_HEAD].tolist(), words[_HEAD:].tolist()
        n = len(rows) // 3
        return cls._make([*head, rows[:n], rows[n : 2 * n], rows[2 * n :]])


class _Server:
    """A stage on its rank."""

    def __init__(
        self,
        stage: LayerStage,
        number: int,
        rank_of: Sequence[int],
        features: Sequence[int],
        link: Link,
        native: bool,
    ) -> None:
        self.stage, self._number, self._rank_of, self._link, self._native = stage, number, rank_of, link, native
        # Packs the weights now, since the other ranks do not wait that long in a call.
        self.form = open_sections([stage.section], native=native)
        first, last = stage.first, stage.first + len(stage.layers)
        # Rank 0 computes stream 0 itself.
        self.features = [k for k in features if first < k <= last]
        self._hidden_size: int = stage.config.hidden_size
        self.busy = 0.0

    def open(self, rows: int, longest: int, most: int) -> None:
        self.stage.open(rows, longest, most)
        self.form = open_sections([self.stage.section], native=self._native, beside=self.stage.cache.nbytes)
        self.busy = 0.0
        self._arrived: torch.Tensor | None = None

    def handle(self, control: Control, tokens: torch.Tensor | None = None) -> tuple[torch.Tensor | None, Streams]:
        """Run a command, and send the output if it goes to another stage.

        Args:
            control: The command.
            tokens: ``[B, q]`` token ids, for stage 0.

        Returns:
            The output of the stage, or None, and the residual streams that the drafter reads.
        """
        rows = self.stage.cache.rows
        # A chunk of the prompt passes all earlier stages first.
        self._link.patience = 1 if control.cycle else len(self._rank_of)
        if control.arrives:
            shape = (rows, control.arrives, self._hidden_size)
            self._arrived = self._link.receive(
                shape, self.stage.section.stream_dtype, self._rank_of[self._number - 1], _HIDDEN
            )
        if not control.runs:
            return None, {}
        began = time.perf_counter()
        fed = tokens if self._number == 0 else self._arrived
        assert fed is not None
        hidden, streams = self.stage.step(fed, control.held, self.features, control.until)
        if control.cycle:
            self.busy += time.perf_counter() - began
        if control.passes and self._number + 1 < len(self._rank_of):
            self._link.send(hidden, self._rank_of[self._number + 1], _HIDDEN)
        return hidden, streams

    @torch.inference_mode()
    def serve(self) -> None:
        """Run the commands of rank 0 until it closes. Raises ``RankError`` if another rank has ended."""
        link, last = self._link, self._number + 1 == len(self._rank_of)
        while True:
            head = link.receive((_HEAD,), torch.int64, 0, _CONTROL, idle=True).tolist()
            if head[0] == _CLOSE:
                return
            _, rows, longest, most, *_ = head
            self.open(rows, longest, most)
            while True:
                control = Control.decoded(link.receive((_HEAD + 3 * rows,), torch.int64, 0, _CONTROL))
                tokens = None
                if self._number == 0 and control.runs:
                    tokens = torch.tensor(control.tokens)[:, None]
                    if control.q > 1:
                        tokens = link.receive((rows, control.q), torch.int64, 0, _TOKENS)
                hidden, streams = self.handle(control, tokens)
                if streams:
                    link.send(torch.stack(list(streams.values())), 0, _STREAMS)
                if hidden is not None and last and control.passes:
                    link.send(hidden, 0, _HIDDEN)
                elif hidden is not None and last:
                    link.send(torch.zeros(1, dtype=torch.uint8), 0, _DONE)
                if control.word == _END:
                    ended = torch.tensor([self.busy, self.form == NATIVE], dtype=torch.float64)
                    link.send(ended, 0, _BUSY)
                    break


class _Remote:
    """Keys and values in other processes."""

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        raise NotImplementedError(
            "generate(): past_key_values is not supported with ranks: each stage keeps the keys and values of its own layers"
        )

    def return_cache(self, lengths: Sequence[int]) -> None:
        return None


class RanksDriver(SpeculativeDriver):
    """Rank 0: sends the commands. ``local`` is the first stage if it shares this rank, else None."""

    holds_target = False

    def __init__(
        self,
        model: PreTrainedModel,
        partition: Partition,
        drafter: Drafter,
        link: Link,
        local: _Server | None,
        native: bool,
    ) -> None:
        super().__init__(partition, Verifier.of(model), drafter, native)
        open_sections([self.verifier.section], native=native)
        self._link, self._local = link, local
        self._embed = model.get_input_embeddings()
        self._dtype, self._hidden_size = stream_dtype(model.dtype, model.device), model.config.hidden_size
        self._rank_of = ranks_of(partition.stages, link.world)
        self._due: list[tuple[int, int, tuple[int, ...]]] = []  # expected messages: source, tag, shape
        self._running = False
        self._chunks = 0  # chunks of the prompt under way
        self._own: torch.Tensor | None = None  # output of the local stage

    ran_as = "ranks"

    @property
    def target(self) -> _Remote:
        return _Remote()

    def for_fork(self) -> Decoder:
        raise RuntimeError("a forked process cannot talk to the ranks: generate in the process that torchrun started")

    def _generate(self, request: GenerationRequest) -> None:
        if self._link.broken:
            raise RankError("this process group broke in an earlier call; start all ranks again")
        try:
            super()._generate(request)
        finally:
            if self._running and not self._link.broken:
                try:
                    self._end()
                except RankError:
                    raise
                except Exception as error:
                    raise self._link.failed(f"the call could not be ended ({type(error).__name__}: {error})") from error

    @uninterrupted()
    def _open(self, rows: int, longest: int, most: int) -> None:
        self._rows = rows
        self._sent = [0] * self.partition.stages  # columns under way from stage s to the next one
        self._due.clear()
        self._chunks = 0
        self._link.patience = self.partition.stages
        self._running = True
        self._form = open_sections([self.verifier.section], native=self.native)
        for s, rank in enumerate(self._rank_of):
            if s == 0 and self._local is not None:
                self._local.open(rows, longest, most)
                self._form = self._form if self._form != NATIVE else self._local.form
            else:
                head = torch.zeros(_HEAD, dtype=torch.int64)
                head[:4] = torch.tensor([_OPEN, rows, longest, most])
                self._link.send(head, rank, _CONTROL)

    @uninterrupted()
    def _end(self) -> None:
        """Receive every message under way, so that the next call starts without any."""
        self._running = False
        nothing = [0] * self._rows
        for s, rank in enumerate(self._rank_of):
            arrives = self._sent[s - 1] if s else 0
            control = Control(_END, 0, arrives, False, False, False, nothing, nothing, nothing)
            if s == 0 and self._local is not None:
                self.clock.stage_seconds[0] = self._local.busy
            else:
                self._link.send(control.encoded(), rank, _CONTROL)
        self._link.patience = self.partition.stages
        self._await_chunks(0)
        for source, tag, shape in self._due:
            self._link.receive(shape, self._dtype, source, tag)
        self._due.clear()
        for s, rank in enumerate(self._rank_of):
            if s or self._local is None:
                busy, native = self._link.receive((2,), torch.float64, rank, _BUSY).tolist()
                self.clock.stage_seconds[s] = busy
                if self._form == NATIVE and not native:
                    self._form = f"transformers: the stage of rank {rank} is not native"

    def _await_chunks(self, most: int) -> None:
        """Wait until at most ``most`` chunks of the prompt are under way."""
        while self._chunks > most:
            self._link.receive((1,), torch.uint8, self._rank_of[-1], _DONE)
            self._chunks -= 1

    def _tell_stage(self, s: int, control: Control, tokens: torch.Tensor | None) -> Streams:
        """Send a command to stage ``s``, or run it if the stage is local. Return the residual streams of a local stage."""
        rank, last = self._rank_of[s], s + 1 == self.partition.stages
        streams: Streams = {}
        if s == 0 and self._local is not None:
            hidden, streams = self._local.handle(control, tokens)
            self._own = hidden
        else:
            self._link.send(control.encoded(), rank, _CONTROL)
            if tokens is not None and control.q > 1:
                self._link.send(tokens, rank, _TOKENS)
            wanted = self._features_of(s)
            if control.runs and wanted:
                self._due.append((rank, _STREAMS, (len(wanted), self._rows, control.q, self._hidden_size)))
            if control.passes and last:
                self._due.append((rank, _HIDDEN, (self._rows, control.q, self._hidden_size)))
        self._sent[s] = control.q if control.passes and not last else 0
        return streams

    def _features_of(self, s: int) -> list[int]:
        return [k for k in self.features if k > 0 and self.partition.owner(k) == s]

    def _gather(self) -> tuple[torch.Tensor | None, Streams]:
        """Receive all messages to come. Return the output of the last stage, or None, and the residual streams."""
        hidden: torch.Tensor | None = None
        streams: Streams = {}
        while self._due:
            source, tag, shape = self._due[0]
            message = self._link.receive(shape, self._dtype, source, tag)
            self._due.pop(0)
            if tag == _HIDDEN:
                hidden = message
            else:
                indices = self._features_of(self._rank_of.index(source))
                streams |= dict(zip(indices, message, strict=True))
        return hidden, streams

    def _embedded(self, tokens: torch.Tensor) -> Streams:
        return {0: self._embed(tokens.to(self._embed.weight.device))} if 0 in self.features else {}

    @uninterrupted()
    def _feed(
        self, columns: np.ndarray, begin: Sequence[int], until: Sequence[int], answer: bool
    ) -> tuple[torch.Tensor | None, Streams]:
        tokens = torch.from_numpy(columns).long()
        q, stages = columns.shape[1], self.partition.stages
        streams = self._embedded(tokens)
        self._link.patience = stages
        self._await_chunks(0 if answer else stages - 1)
        if not answer and (stages > 1 or self._local is None):
            self._chunks += 1
        for s in range(stages):
            passes = answer or s + 1 < stages
            control = Control(_RUN, q, q if s else 0, True, passes, False, begin, until, columns[:, 0].tolist())
            streams |= self._tell_stage(s, control, tokens if s == 0 else None)
            self._sent[s] = 0  # the next stage receives it with the same command
        hidden, others = self._gather()
        if stages == 1 and self._local is not None:
            hidden = self._own
        return hidden, streams | others

    @uninterrupted()
    def _launch(self, work: list[list[Entry]]) -> None:
        self._now: Streams = {}
        self._mine: tuple[Control, torch.Tensor] | None = None
        self._link.patience = 1
        sent = list(self._sent)
        for s, entries in enumerate(work):
            arrives = sent[s - 1] if s else 0
            if not entries and not arrives:
                self._sent[s] = 0
                continue
            tokens = torch.zeros(self._rows, dtype=torch.int64)
            for entry in entries:
                tokens[entry.row] = entry.token
            runs = bool(entries)
            held = self.machine.held(s)
            until = [n + 1 for n in held]
            control = Control(_RUN, 1, arrives, runs, runs, True, held, until, tokens.tolist())
            if s == 0:
                if entries:
                    self._now |= self._embedded(tokens[:, None])
                if self._local is not None:  # runs after the other commands are sent and after the draft
                    self._mine, self._sent[0] = (control, tokens[:, None]), 0
                    continue
            self._tell_stage(s, control, None)

    @uninterrupted()
    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, Streams, list[float]]:
        streams = self._now
        if self._mine is not None:
            streams = streams | self._tell_stage(0, *self._mine)
        hidden, others = self._gather()
        if self.partition.stages == 1 and self._local is not None:
            hidden = self._own
        return hidden, streams | others, [0.0] * self.partition.stages


def ranks_of(stages: int, world: int) -> list[int]:
    """The rank of each stage. Raises ``ValueError`` unless there are as many ranks as stages, or one more."""
    if world not in (stages, stages + 1):
        raise ValueError(
            f"{stages} stages need {stages + 1} ranks, or {stages} with the first stage beside the drafter; there are {world}: start with "
            f"torchrun --nproc-per-node {stages + 1}"
        )
    return [s + world - stages for s in range(stages)]


class RanksPipeline(BasePipeline):
    """A partitioned target over the ranks that torchrun has started: ``generate()`` on rank 0, ``serve()`` on the others.

    The text is that of :class:`pipespec.spd.SpeculativePipeline`. Ranks do not support ``past_key_values``, ``output_hidden_states``,
    ``output_attentions`` and ``stages="balanced:n"``.

    Args:
        target: Path of a LLaMA-family model. Each rank reads its own part of the safetensors.
        drafter: As for ``SpeculativePipeline``, the same on all ranks. Only rank 0 runs it; the others read its ``features``.
        stages: As for ``SpeculativePipeline``, the same on all ranks.
        timeout_s: Longest time of a rank for its part of a cycle or of a chunk of the prompt, with rank 0's streamers and processors. If a
            rank takes longer, dies or stops, the call ends on all ranks with :class:`RankError`, or the process ends.
        start_s: Longest time until all ranks are there, and again until all have loaded their weights.
        dtype: Dtype of the weights. None keeps the model's.
        device: Device of each rank: ``"cpu"``; ``"cuda"``, the GPU of number LOCAL_RANK; or one for all, such as ``"cuda:0"``. Messages go
            through host memory (gloo).
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
        if isinstance(stages, str):
            raise ValueError(
                f"stages={stages!r}: no rank has all layers to measure; give a number, or layers per stage"
            )
        if not isinstance(target, (str, Path)):
            raise TypeError(f"target must be a path, of which each rank reads its part, not {type(target).__name__}")
        device = own_device(device, int(os.environ.get("LOCAL_RANK", rank)))
        self.partition = cut(load_skeleton(target).config.num_hidden_layers, stages, list)
        rank_of = ranks_of(self.partition.stages, world)
        config = module_config(drafter)
        if config is not None:
            config.require(target, self.partition.ranges)
        features = tuple(getattr(drafter, "features", ())) if config is None else config.anchors[1:]
        for index in features:
            self.partition.owner(index)
        terms = f"{list(self.partition.counts)} layers per stage, features {list(features)}, dtype {dtype or 'of the model'}, native {native}"
        self._link = Link(terms, timeout_s, start_s)
        self.is_controller = rank == 0
        self._server: _Server | None = None
        error = None
        models: list[PreTrainedModel] = []
        try:
            if rank in rank_of:
                number = rank_of.index(rank)
                stage = load_stage(target, self.partition, number, dtype=dtype, device=device)
                self._server = _Server(stage, number, rank_of, features, self._link, native)
            if self.is_controller:
                ends = load_ends(target, dtype=dtype, device=device)
                found, drafts = resolve_drafter(
                    drafter, ends, target, self.partition, dtype=dtype or "auto", device=device
                )
                models = [*drafts, ends]
                self._driver: RanksDriver = RanksDriver(ends, self.partition, found, self._link, self._server, native)
        except Exception as failure:
            error = failure
        except BaseException as failure:
            self._interrupted("loading its weights", failure)
            raise
        self._link.agree(error)
        super().__init__(models)

    def _caching(self) -> Sequence[PreTrainedModel]:
        return self.models[:-1]  # the target's caches are on other ranks

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`pipespec.Pipeline.generate`. Raises ``RuntimeError`` except on rank 0, and ``RankError`` if a rank is lost."""
        if not self.is_controller:
            raise RuntimeError(f"rank {self._link.rank} runs a stage: call serve() there, and generate() on rank 0")
        return super().generate(*args, **kwargs)

    def _report(self, generation: Generation) -> SpeculativeReport:
        return speculative_report(generation, self._driver)

    def serve(self) -> None:
        """Run this rank's stage until rank 0 closes. Raises ``RuntimeError`` on rank 0, and ``RankError`` if a rank is lost."""
        if self.is_controller or self._server is None:
            raise RuntimeError("rank 0 runs no stage loop: call generate() there")
        try:
            self._server.serve()
        except RankError:
            raise
        except Exception as error:
            raise self._link.failed(f"its stage failed ({type(error).__name__}: {error})") from error
        except BaseException as error:
            self._interrupted("serving its stage", error)
            raise

    def _interrupted(self, doing: str, error: BaseException) -> None:
        """Publish ``error`` to the other ranks."""
        self._link.failed(f"{type(error).__name__} while {doing}")

    def close(self) -> None:
        """End all ranks. A ``with`` block does so at its end. It waits for a call in another thread, as :meth:`pipespec.Pipeline.close` does."""
        with self._turn("close()", "raise there to end the call, and close the pipeline behind it"):
            if self._is_forked:
                return  # in a fork, the ranks are the parent's
            if self.is_controller and not self._link.broken:
                for rank in range(1, self._link.world):
                    self._link.send(torch.full((_HEAD,), _CLOSE, dtype=torch.int64), rank, _CONTROL)
            self._link.close()

    def __enter__(self) -> RanksPipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate one text. Rank 0 prints its token ids."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m pipespec.spd.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of the model")
    parser.add_argument("--drafter", default="ngram", help="ngram, or the folder of a draft module or model")
    parser.add_argument("--stages", required=True, help="n, or layers per stage: 4,4,4")
    parser.add_argument("--prompt-ids", required=True, help="token ids: 5,6,7")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, help="sample with this seed; without, greedy")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="seconds that a rank may take for its part of a cycle"
    )
    parser.add_argument("--device", default="cpu", help="cpu; cuda, a GPU per rank; or cuda:0, one for all")
    args = parser.parse_args(arguments)
    counts = [int(c) for c in args.stages.split(",")]
    stages = counts if len(counts) > 1 else counts[0]
    with RanksPipeline(args.target, args.drafter, stages=stages, timeout_s=args.timeout, device=args.device) as pipe:
        if not pipe.is_controller:
            pipe.serve()
            return
        ids = torch.tensor([[int(i) for i in args.prompt_ids.split(",")]])
        sampling = {} if args.seed is None else {"do_sample": True, "seed": args.seed}
        out = pipe.generate(ids, max_new_tokens=args.max_new_tokens, **{"do_sample": False, **sampling})
        print(",".join(map(str, out[0, ids.shape[1] :].tolist())), flush=True)
        print(pipe.report, flush=True)


if __name__ == "__main__":
    main()
