"""The decode machine of speculative pipeline decoding: tokens and lengths only, no tensors. Every runtime drives this one.

One token of a row is in flight per stage. In each cycle every token in flight goes through one stage while the token behind the newest
one is drafted. The oldest one leaves the last stage: its logits are the target's own word on the next position, whose draft is in flight
behind it. If they agree the drafted token enters; if not, everything younger than the one that left is flushed and the target's token
enters an empty pipe. (SPD, arXiv 2605.30852, decoding; rows of a batch are machines of their own with common cycles.)

A cycle, in this order: ``requests()``, drafts for them; ``entries()``, each stage runs its own; ``exits()``, the target's choice for each;
``commit(drafts, chosen)``.

Counting. N tokens of a row (the prefill's included) take K cycles. Every cycle after a filling emits exactly one token, and a filling takes
n - 1 cycles: one at the start, one after each flush that does not end the row. So K = (N - 1) + (n - 1)(1 + flushes that were followed by more).
With independent acceptance a, (N - 1)/K tends to the law 1/(n(1 - a) + a) (``closed_form.spd_tokens_per_cycle``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Wanted(NamedTuple):
    """A draft that is wanted: of the position after the last of ``tokens`` (positions 0 .. t, the newest ``fill`` of them in flight).

    ``tokens`` is the machine's own list: to be read until ``commit``, and not to be changed.
    """

    row: int
    tokens: Sequence[int]
    fill: int


class Entry(NamedTuple):
    """What a stage runs for a row in this cycle; its keys and values belong at ``position``."""

    row: int
    position: int
    token: int


class Flush(NamedTuple):
    """Positions >= ``length`` of ``row`` never were: every stage's cache and every memory of the drafter end there."""

    row: int
    length: int


@dataclass
class Counters:
    """Of one row. ``tokens``: emitted, the prefill's included; ``checked``: drafts that the target has judged; ``accepted`` of them;
    ``flushes``: how often tokens in flight were thrown away, ``wasted``: how many; ``fed``: tokens through stages."""

    cycles: int = 0
    tokens: int = 0
    checked: int = 0
    accepted: int = 0
    flushes: int = 0
    wasted: int = 0
    fed: int = 0


class _InFlight:
    """A token on its way; ``stage`` runs it in the next cycle."""

    __slots__ = ("position", "stage")

    def __init__(self, position: int) -> None:
        self.position, self.stage = position, 0


class _Row:
    def __init__(self, prompt: Sequence[int], limit: int, stages: int) -> None:
        self.start, self.limit = len(prompt), limit
        self.tokens = list(prompt)  # verified ones, then those in flight
        self.verified = len(prompt)
        self.flying: list[_InFlight] = []  # oldest first
        self.held = [len(prompt)] * stages  # per stage, positions whose keys and values it has
        self.ended = False
        self.counters = Counters()


class Machine:
    """The rows of a batch, from the end of their prefill to the end of their text. ``ValueError`` unless ``stages`` (n) is at least 1."""

    def __init__(self, stages: int) -> None:
        if stages < 1:
            raise ValueError(f"a target has at least one stage, not {stages}")
        self.stages = stages
        self._eos: frozenset[int] = frozenset()
        self._rows: list[_Row] = []

    def reset(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], eos: Collection[int]) -> None:
        """New rows, with their prompts and nothing else; :meth:`begin` starts them.

        ``prompts``: token ids of each row, at least one; every stage will hold the keys and values of all of them. ``limits``: length at which
        a row ends, beyond its prompt. ``eos``: ids that end a row where they are verified. ``ValueError`` for sizes that make no sense.
        """
        if not prompts or len(prompts) != len(limits):
            raise ValueError(f"{len(prompts)} prompts and {len(limits)} limits")
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if not prompt:
                raise ValueError(f"the prompt of row {row} is empty")
            if limit <= len(prompt):
                raise ValueError(f"row {row} may grow to {limit} tokens, its prompt has {len(prompt)} already")
        self._eos = frozenset(eos)
        self._rows = [_Row(p, limit, self.stages) for p, limit in zip(prompts, limits, strict=True)]

    def begin(self, first: Sequence[int]) -> None:
        """The prefill is over; ``first[r]``: the target's token after the prompt of row r."""
        for row, token in zip(self._rows, first, strict=True):
            self._push(row, token)
            self._verify(row, token)

    # ---- a cycle

    @property
    def running(self) -> bool:
        """Whether some row is not over."""
        return any(not row.ended for row in self._rows)

    def requests(self) -> list[Wanted]:
        """The drafts wanted in this cycle. None where no token could follow: at the limit, and behind an end that is in flight."""
        return [
            Wanted(i, row.tokens, len(row.flying))
            for i, row in enumerate(self._rows)
            if not row.ended
            and len(row.tokens) < row.limit
            and not any(row.tokens[entry.position] in self._eos for entry in row.flying)
        ]

    def entries(self) -> list[list[Entry]]:
        """Per stage what it runs, at most one entry per row."""
        out: list[list[Entry]] = [[] for _ in range(self.stages)]
        for i, row in enumerate(self._rows):
            for entry in row.flying:
                out[entry.stage].append(Entry(i, entry.position, row.tokens[entry.position]))
        return out

    def exits(self) -> list[Entry]:
        """What leaves the last stage in this cycle. The target's choice for the position behind each is what ``commit`` wants."""
        return self.entries()[-1]

    def commit(self, drafts: Mapping[int, int], chosen: Mapping[int, int]) -> list[Flush]:
        """All stages have run. ``drafts``: by row, for (some of) the requests; ``chosen``: by row, for exactly the exits.

        A row without its draft goes on all the same: with nothing in flight behind it, the target's choice enters as it is. (So does n = 1,
        where the draft of this very cycle is what is checked: plain decoding.)
        """
        wanted = {request.row for request in self.requests()}
        if not drafts.keys() <= wanted:
            raise ValueError(f"drafts for rows {sorted(drafts.keys() - wanted)}, which wanted none")
        if chosen.keys() != (leaving := {entry.row for entry in self.exits()}):
            raise ValueError(f"choices for rows {sorted(chosen)}, {sorted(leaving)} left the last stage")
        flushes = []
        for i, row in enumerate(self._rows):
            if row.ended:
                continue
            row.counters.cycles += 1
            row.counters.fed += len(row.flying)
            for entry in row.flying:
                assert row.held[entry.stage] == entry.position, "stages see the positions of a row in order"
                row.held[entry.stage] += 1
                entry.stage += 1
            draft = drafts.get(i)
            if i not in chosen:
                self._push(row, draft)
                continue
            token, place = chosen[i], row.flying.pop(0).position + 1
            follows = place < len(row.tokens)  # else the pipe is empty now
            proposed = row.tokens[place] if follows else draft
            if proposed is not None:
                row.counters.checked += 1
                row.counters.accepted += proposed == token
            if follows and proposed != token:
                row.counters.flushes += 1
                row.counters.wasted += len(row.tokens) - place
                del row.tokens[place:]
                row.flying.clear()
                row.held = [min(n, place) for n in row.held]
            if proposed is not None and proposed != token:
                flushes.append(Flush(i, place))
            if follows and proposed == token:
                self._verify(row, token)
                self._push(row, draft)
            else:  # what was drafted in this cycle followed another token, or is this one
                self._push(row, token)
                self._verify(row, token)
        return flushes

    def _push(self, row: _Row, token: int | None) -> None:
        if token is not None and not row.ended:
            row.tokens.append(token)
            row.flying.append(_InFlight(len(row.tokens) - 1))

    def _verify(self, row: _Row, token: int) -> None:
        row.verified += 1
        row.counters.tokens += 1
        if token in self._eos or row.verified >= row.limit:
            self._end(row)

    def _end(self, row: _Row) -> None:
        row.ended = True
        row.flying.clear()

    # ---- what it holds

    def held(self, stage: int) -> list[int]:
        """Per row the positions whose keys and values ``stage`` holds."""
        return [row.held[stage] for row in self._rows]

    def all_tokens(self, row: int) -> list[int]:
        """Prompt, verified tokens, tokens in flight."""
        return list(self._rows[row].tokens)

    def newest(self, row: int) -> tuple[int, int]:
        """Position and id of the last of all tokens."""
        tokens = self._rows[row].tokens
        return len(tokens) - 1, tokens[-1]

    def count(self, row: int) -> Counters:
        return self._rows[row].counters

    # ---- the verified text, under the names of a state block (see ``pipespec.drivers.base.Text``)

    @property
    def target(self) -> int:
        return 0

    def length(self, stage: int, row: int) -> int:
        """Verified tokens of ``row``, prompt included."""
        return self._rows[row].verified

    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]:
        """Verified ids at positions ``begin .. end - 1``."""
        return self._rows[row].tokens[begin : min(end, self._rows[row].verified)]

    def end_row(self, row: int) -> None:
        """End ``row`` where it stands; what is in flight is forgotten."""
        self._end(self._rows[row])

    def counters(self, stage: int, row: int) -> dict:
        """The row's counts under the names of a state block: a cycle in which a token was verified is a step of one token."""
        c = self._rows[row].counters
        return {
            "steps": c.tokens,
            "fed": c.fed,
            "drafted": c.checked,
            "accepted": c.accepted,
            "produced": c.tokens,
            "adopted": 0,
            "rollbacks": c.flushes,
            "truncated": c.wasted,
            "histogram": [c.tokens - c.accepted, c.accepted],
        }
