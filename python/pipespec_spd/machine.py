"""The decode machine of speculative pipeline decoding: tokens and lengths only, no tensors. Every runtime drives this machine.

One token of a row is in flight per stage. In each cycle every token in flight passes one stage, while the token after the newest one is
drafted. The oldest token leaves the last stage. Its logits give the target's token of the next position, whose draft is in flight
behind it. If the two agree, the newly drafted token enters. If not, everything younger than the token that left is flushed, and the
target's token enters an empty pipeline (SPD, arXiv 2605.30852). The rows of a batch are independent machines with common cycles.

Order of a cycle: ``requests()`` and drafts for them, ``entries()`` and the forwards of the stages, ``exits()`` and the target's tokens for
them, ``commit(drafts, chosen)``.

Counting: N tokens of a row, the prefill's included, take K cycles. Every cycle after the pipeline has filled emits one token, and filling
takes n - 1 cycles: once at the start, and once after each flush that does not end the row. So K = (N - 1) + (n - 1)(1 + F), where F
counts the flushes that more tokens follow. With independent acceptance a, (N - 1)/K tends to 1/(n(1 - a) + a), see
:func:`pipespec_spd.law.spd_tokens_per_cycle`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class DraftRequest(NamedTuple):
    """Request for the draft of one row's next position.

    Attributes:
        row: Row of the batch.
        tokens: The row's tokens at positions 0 to t. The machine owns the list: read it before ``commit`` and do not change it.
        fill: Number of tokens in flight, at positions t - fill + 1 to t. Older ones have left the last stage.
    """

    row: int
    tokens: Sequence[int]
    fill: int


class Entry(NamedTuple):
    """A token that a stage runs for a row in this cycle. Its keys and values belong at ``position``."""

    row: int
    position: int
    token: int


class Flush(NamedTuple):
    """Rollback of ``row`` to ``length`` positions, in the cache of every stage and in the drafter."""

    row: int
    length: int


@dataclass
class RowCounters:
    """Counters of one row.

    Attributes:
        cycles: Cycles in which the row ran.
        tokens: Tokens emitted, the prefill's included.
        checked: Draft tokens that the target has verified.
        accepted: Accepted ones among them.
        flushes: Rejections that discarded tokens in flight.
        wasted: Tokens in flight that were discarded.
        fed: Tokens through stages, one per stage.
    """

    cycles: int = 0
    tokens: int = 0
    checked: int = 0
    accepted: int = 0
    flushes: int = 0
    wasted: int = 0
    fed: int = 0


class _InFlight:
    """A token in flight. ``stage`` runs it in the next cycle."""

    __slots__ = ("position", "stage")

    def __init__(self, position: int) -> None:
        self.position, self.stage = position, 0


class _Row:
    def __init__(self, prompt: Sequence[int], limit: int, stages: int) -> None:
        self.start, self.limit = len(prompt), limit
        self.tokens = list(prompt)  # verified ones, then those in flight
        self.verified = len(prompt)
        self.flying: list[_InFlight] = []  # oldest first
        self.held = [len(prompt)] * stages  # for each stage, positions whose keys and values it holds
        self.ended = False
        self.counters = RowCounters()


class Machine:
    """The rows of a batch, from the end of their prefill to the end of their text.

    Args:
        stages: Number of stages, n.

    Raises:
        ValueError: ``stages`` is below 1.
    """

    def __init__(self, stages: int) -> None:
        if stages < 1:
            raise ValueError(f"a target has at least one stage, not {stages}")
        self.stages = stages
        self._eos: frozenset[int] = frozenset()
        self._rows: list[_Row] = []

    def reset(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], eos: Collection[int]) -> None:
        """Set the rows to their prompts. :meth:`begin` starts them after the prefill.

        Args:
            prompts: Token ids of each row, at least one. The prefill gives every stage the keys and values of all of them.
            limits: Length at which each row ends, longer than its prompt.
            eos: Token ids that end a row when the target emits them.

        Raises:
            ValueError: The numbers of prompts and limits differ, or a prompt is empty or already at its limit.
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
        """Start the rows after the prefill. ``first[r]`` is the target's token after the prompt of row r."""
        for row, token in zip(self._rows, first, strict=True):
            self._push(row, token)
            self._verify(row, token)

    # ---- a cycle

    @property
    def running(self) -> bool:
        """Whether a row has not ended."""
        return any(not row.ended for row in self._rows)

    def requests(self) -> list[DraftRequest]:
        """The drafts of this cycle. A row gets none if no token can follow: at its limit, or with an end token in flight."""
        return [
            DraftRequest(i, row.tokens, len(row.flying))
            for i, row in enumerate(self._rows)
            if not row.ended
            and len(row.tokens) < row.limit
            and not any(row.tokens[entry.position] in self._eos for entry in row.flying)
        ]

    def entries(self) -> list[list[Entry]]:
        """The entries of each stage, at most one per row."""
        out: list[list[Entry]] = [[] for _ in range(self.stages)]
        for i, row in enumerate(self._rows):
            for entry in row.flying:
                out[entry.stage].append(Entry(i, entry.position, row.tokens[entry.position]))
        return out

    def exits(self) -> list[Entry]:
        """The entries that leave the last stage in this cycle. ``commit`` takes the target's token after each."""
        return self.entries()[-1]

    def commit(self, drafts: Mapping[int, int], chosen: Mapping[int, int]) -> list[Flush]:
        """End the cycle after all stages have run.

        A row without a draft continues: nothing is in flight behind its oldest token, so the target's token enters directly. With n = 1 the
        target's token always enters directly, and the draft of the same cycle is the one that is checked.

        Args:
            drafts: Draft token by row, for any of the requests.
            chosen: The target's token by row, for exactly the exits.

        Returns:
            The rollbacks that the drafter must follow. The stages' lengths are in :meth:`held`.

        Raises:
            ValueError: ``drafts`` or ``chosen`` has other rows.
        """
        wanted = {request.row for request in self.requests()}
        if not drafts.keys() <= wanted:
            raise ValueError(f"drafts for rows {sorted(drafts.keys() - wanted)}, which requested none")
        if chosen.keys() != (leaving := {entry.row for entry in self.exits()}):
            raise ValueError(f"choices for rows {sorted(chosen)}, but rows {sorted(leaving)} left the last stage")
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
            follows = place < len(row.tokens)  # else the pipeline is empty now
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
            else:  # the draft of this cycle followed another token, or is this token
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

    # ---- state

    def held(self, stage: int) -> list[int]:
        """For each row, the number of positions whose keys and values ``stage`` holds."""
        return [row.held[stage] for row in self._rows]

    def all_tokens(self, row: int) -> list[int]:
        """Prompt, verified tokens, tokens in flight."""
        return list(self._rows[row].tokens)

    def newest(self, row: int) -> tuple[int, int]:
        """Position and id of the row's last token."""
        tokens = self._rows[row].tokens
        return len(tokens) - 1, tokens[-1]

    def count(self, row: int) -> RowCounters:
        return self._rows[row].counters

    # ---- the verified text, under the names of a state block (see ``pipespec.schedules.base.TextSource``)

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
        """End ``row`` at its verified length and drop its tokens in flight."""
        self._end(self._rows[row])

    def counters(self, stage: int, row: int) -> dict:
        """The row's counters under the names of a state block. A cycle that verified a token counts as a step of one token."""
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
