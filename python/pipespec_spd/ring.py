"""The messages between SPD's ranks, which form a ring, and a stage on its rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pipespec.engine.known import NATIVE
from pipespec_spd.decoding import Streams
from pipespec_spd.link import Link, Receiver, Sender
from pipespec_spd.partition import LayerStage
from pipespec_spd.sections import open_sections

CONTROL, BULK, STREAMS, LINES = range(4)
"""Tags of messages. Those of the lines come last, one for each size of a line."""

CLOSE, OPEN = range(2)
"""First word of a control message. With ``OPEN`` follow the number of rows, the longest prompt and the maximum number of positions."""

RUN, CHUNK, END = range(3)
"""Kinds of messages that go round. See :class:`Head`."""

CONTROL_WORDS = 4


class Head(NamedTuple):
    """First words of a message that goes from rank 0 through all stages and back. For each row follow the position of its first column (-1: the row has
    none), and its token; of a chunk, how many of its columns belong to the row's prompt.

    Attributes:
        kind: ``RUN``: a column of tokens, and after the first stage its hidden states. ``CHUNK``: columns of the prompt; each stage sends them
            separately after this message, and the last one only confirms. ``END``: the call ends; after the head follow, for each stage, the
            nanoseconds that it was busy and whether it is native.
        number: Messages have ascending numbers.
        columns: Columns to run.
        counts: Whether the stages' time counts as that of a cycle.
    """

    kind: int
    number: int
    columns: int
    counts: int


HEAD = len(Head._fields)


class Ring:
    """The lines of a rank. Each has the size of the largest batch so far, in powers of two.

    ``rank_of`` has the rank of each stage, ``features`` the residual streams that it sends to rank 0. ``dtype`` is that of hidden states between stages.
    """

    def __init__(
        self,
        link: Link,
        rank_of: Sequence[int],
        features: Sequence[Sequence[int]],
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._link, self._rank_of, self.features = link, rank_of, features
        self._hidden_size, self._dtype = hidden_size, dtype
        self._made: dict[tuple[bool, int, int], Sender | Receiver] = {}

    def open(self, rows: int) -> None:
        """Lay out the lines for a call with ``rows`` rows."""
        self._rows = rows
        self._words = HEAD + 2 * max(rows, len(self._rank_of))

    def words(self, head: Head, payload: Sequence[int] = ()) -> list[int]:
        return [*head, *payload, *[0] * (self._words - HEAD - len(payload))]

    def _line(self, made: Any, peer: int, words: int, tensors: int, back: bool) -> Any:
        kind = (self._rows - 1).bit_length()
        key = made is Sender, peer, 2 * kind + back
        if key not in self._made:
            size = 8 * (3 + HEAD + 2 * max(1 << kind, len(self._rank_of)))
            size += tensors * (1 << kind) * self._hidden_size * self._dtype.itemsize
            self._made[key] = made(self._link, peer, LINES + key[2], size, len(self._rank_of) + 2)
        self._made[key].fit(words, (tensors, self._rows, 1, self._hidden_size), self._dtype)
        return self._made[key]

    def line_after(self, stage: int, made: type[Sender] | type[Receiver]) -> Any:
        """An end of the line from ``stage`` (-1: from rank 0) to the next stage, or from the last one to rank 0."""
        is_last = stage + 1 == len(self._rank_of)
        peers = 0 if stage < 0 else self._rank_of[stage], 0 if is_last else self._rank_of[stage + 1]
        tensors = 0 if stage < 0 else 1 + (len(self.features[stage]) if is_last else 0)
        return self._line(made, peers[made is Sender], self._words, tensors, is_last)

    def streams(self, stage: int, made: type[Sender] | type[Receiver]) -> Any:
        """An end of the line of the residual streams of ``stage`` to rank 0; None where they go with the hidden states, or there are none."""
        found = len(self.features[stage])
        if not found or stage + 1 == len(self._rank_of):
            return None
        return self._line(made, 0 if made is Sender else self._rank_of[stage], 1, found, True)


class StageServer:
    def __init__(
        self, stage: LayerStage, number: int, rank_of: Sequence[int], ring: Ring, link: Link, native: bool
    ) -> None:
        self.stage, self._number, self._rank_of, self._link, self._native = stage, number, rank_of, link, native
        self._ring, self._is_last = ring, number + 1 == len(rank_of)
        # Packs the weights now, since the other ranks do not wait that long in a call.
        self.form = open_sections([stage.section], native=native)
        self._hidden_size: int = stage.config.hidden_size
        self.busy = 0.0

    def open(self, rows: int, longest: int, max_positions: int) -> None:
        self.stage.open(rows, longest, max_positions)
        self.form = open_sections([self.stage.section], native=self._native, reserved=self.stage.cache.nbytes)
        self.busy = 0.0
        self._held = [0] * rows

    def run(
        self, head: Head, positions: Sequence[int], fed: torch.Tensor, real: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Streams]:
        """Run columns, and return the output of the stage and the residual streams that the drafter reads.

        Args:
            positions: Of each row's first column. Cached positions from there on are dropped first. -1: the row has no columns; what it is fed is dropped
                in its next step.
            fed: Tokens ``[B, q]`` for stage 0, else the output of the stage before.
            real: Of a chunk of the prompt: columns of each row that belong to it. None: each column may be rolled back to.
        """
        held = [known if at < 0 else at for at, known in zip(positions, self._held, strict=True)]
        until = None if real is None else [at + n for at, n in zip(held, real, strict=True)]
        began = time.perf_counter()
        with self._link.own_part():
            hidden, streams = self.stage.step(fed, held, self._ring.features[self._number], until)
        if head.counts:
            self.busy += time.perf_counter() - began
        q = head.columns
        self._held = [n if at < 0 else n + q for at, n in zip(positions, held, strict=True)]
        return hidden, streams

    @torch.inference_mode()
    def serve(self) -> None:
        """Run the commands of rank 0 until it closes. Raises ``RankError`` if another rank has ended."""
        while True:
            control = self._link.receive((CONTROL_WORDS,), torch.int64, 0, CONTROL, idle=True).tolist()
            if control[0] == CLOSE:
                return
            _, rows, longest, max_positions = control
            self._ring.open(rows)
            self._arriving = self._ring.line_after(self._number - 1, Receiver)
            self._leaving = self._ring.line_after(self._number, Sender)
            self._streams = self._ring.streams(self._number, Sender)
            self.open(rows, longest, max_positions)
            while self._handle():
                pass

    def _handle(self) -> bool:
        """Run the next message. Return whether the call goes on."""
        words, tensors = self._arriving.receive()
        head, rows = Head._make(words[:HEAD]), self.stage.cache.rows
        if head.kind == END:
            at = HEAD + 2 * self._number
            words[at : at + 2] = int(1e9 * self.busy), int(self.form == NATIVE)
            self._leaving.send(words)
            return False
        positions, tokens = words[HEAD : HEAD + rows], words[HEAD + rows : HEAD + 2 * rows]
        if head.kind == CHUNK and self._number == 0:
            fed = self._link.receive((rows, head.columns), torch.int64, 0, BULK)
        elif head.kind == CHUNK:
            shape = rows, head.columns, self._hidden_size
            fed = self._link.receive(shape, self.stage.section.stream_dtype, self._rank_of[self._number - 1], BULK)
        elif self._number == 0:
            fed = torch.tensor(tokens, device="cpu")[:, None]
        else:
            fed = tensors[0]
        hidden, streams = self.run(head, positions, fed, tokens if head.kind == CHUNK else None)
        values = list(streams.values())
        if head.kind == CHUNK:
            self._leaving.send(words)
            if not self._is_last:
                self._link.send(hidden, self._rank_of[self._number + 1], BULK)
            if values:
                self._link.send(torch.stack(values), 0, STREAMS)
        elif self._is_last:
            self._leaving.send(words, [hidden, *values])
        else:
            self._leaving.send(words, [hidden])
            if self._streams is not None:
                self._streams.send([head.number], values)
        return True
