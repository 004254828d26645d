"""A model of csrc/protocol/ in Python lists, for tests: the text of every stage, and the tokens that a step feeds.

It has none of the state with which the protocol saves comparisons (committed lengths, agreement, epochs). It always compares whole texts.
"""

from dataclasses import dataclass, field

IDLE, STEP, CATCH_UP, WAIT, FINISHED = range(5)


@dataclass
class Fed:
    """A row's part of a step."""

    action: int
    kv: int
    tokens: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0


@dataclass
class Text:
    """One stage's text of one row. The prompt is a ``None`` per token except for its last token."""

    tokens: list[int | None]
    kv: int
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("steps", "fed", "drafted", "accepted", "produced", "adopted", "truncated", "rollbacks"), 0
        )
    )

    def obey(self, other: list[int | None]) -> None:
        """Roll back from the first difference on, then adopt the other's further tokens."""
        same = agreement(self.tokens, other)
        if same < min(len(self.tokens), len(other)):
            self.counts["rollbacks"] += 1
            self.counts["truncated"] += len(self.tokens) - same
            del self.tokens[same:]
            self.kv = min(self.kv, same)
        new = other[len(self.tokens) :]
        self.counts["adopted"] += len(new)
        self.tokens += new


def agreement(a: list[int | None], b: list[int | None]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Row:
    def __init__(self, stages: int, start: int, limit: int, last: int, eos: set[int]) -> None:
        self.start, self.limit, self.eos = start, limit, eos
        self.texts = [Text([None] * (start - 1) + [last], start - 1) for _ in range(stages)]

    def _ended(self, text: list[int | None]) -> bool:
        return len(text) >= self.limit or (len(text) > self.start and text[-1] in self.eos)

    def plan(
        self, stage: int, lookahead: int, max_draft_tokens: int, min_draft_tokens: int, width: int, upstream_alive: bool
    ) -> Fed:
        me, truth = self.texts[stage], self.texts[-1].tokens
        is_target = stage == len(self.texts) - 1
        bound = self.limit
        if not is_target:
            me.obey(truth)
            reached = len(truth)
            if stage + 2 < len(self.texts):
                neighbour = self.texts[stage + 1].tokens[: self.limit]
                reached = max(reached, len(neighbour))
                # The stage ignores a neighbour that is behind the target or on another text.
                if neighbour[: len(truth)] == truth:
                    me.obey(neighbour)
            bound = min(self.limit, reached + lookahead) if reached < self.limit else self.limit
        text = me.tokens
        if self._ended(text):
            return Fed(FINISHED if is_target else IDLE, me.kv)
        if len(text) >= bound:
            return Fed(IDLE, me.kv)
        me.kv = min(me.kv, len(text) - 1)
        own: list[int] = text[me.kv :]  # type: ignore[assignment]
        if len(own) > width:
            return Fed(CATCH_UP, me.kv, own[:width])
        draft_tokens: list[int] = []
        if stage > 0:
            upstream = self.texts[stage - 1].tokens
            agrees = upstream[: len(text)] == text
            room = min(max_draft_tokens, width - len(own), bound - len(text) - 1)
            if agrees:
                draft_tokens = upstream[len(text) :][:room]  # type: ignore[assignment]
            if (
                len(draft_tokens) < min(min_draft_tokens, room)
                and upstream_alive
                and not (agrees and self._ended(upstream))
            ):
                return Fed(WAIT, me.kv)
        return Fed(STEP, me.kv, own + draft_tokens, len(draft_tokens))

    def commit(self, stage: int, fed: Fed, selected: list[int]) -> None:
        me = self.texts[stage]
        if not fed.tokens:
            return
        me.counts["fed"] += len(fed.tokens)
        if fed.action == CATCH_UP:
            me.kv = fed.kv + len(fed.tokens)
            return
        draft_tokens = fed.tokens[len(fed.tokens) - fed.num_draft_tokens :]
        before, accepted = len(me.tokens), 0
        for j, token in enumerate(selected[: fed.num_draft_tokens + 1]):
            if len(me.tokens) >= self.limit or (j > 0 and selected[j - 1] in self.eos):
                break
            me.tokens.append(token)
            if j == fed.num_draft_tokens or token != draft_tokens[j]:
                break
            accepted += 1
        me.kv = len(me.tokens) - 1
        me.counts["steps"] += 1
        me.counts["drafted"] += fed.num_draft_tokens
        me.counts["accepted"] += accepted
        me.counts["produced"] += len(me.tokens) - before
