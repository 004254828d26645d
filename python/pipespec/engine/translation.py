"""A draft with another tokenizer: the target's tokens become the draft's by way of the text, and the draft's become the target's."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from pipespec.config import WIDTH
from pipespec.engine.chain import StageInputs
from pipespec.engine.sampling import SamplingParams, ScoreRecord, common_length
from pipespec.engine.stage import ModelDraft, Stage
from pipespec.models.properties import embedding_size
from pipespec.models.tokenizers import ByteTokenizer
from pipespec_kernels.state import Action

SHORTEST, LONGEST = 32, 128
"""Characters of a piece of text that is encoded by itself: at least, and at most."""

_PIECE = re.compile(rf"(?s).{{{SHORTEST - 1},{LONGEST - 1}}}?\S(?= \S)|.{{{LONGEST}}}(?=..)")
# Tokenizers begin a token at a space between two words, so that pieces cut there have the tokens of the whole.

_MAX_HELD = 16
"""Draft tokens whose translation may still change. With more, the translation counts as it is."""

_CONTEXT = 8
"""Maximum number of the target's tokens before the new text that are encoded together with it."""


def special(token: int, source: ByteTokenizer, other: ByteTokenizer) -> int | None:
    """The special token of the ``other`` tokenizer with the text of a special token of the ``source``; None if there is none."""
    text = next((text for text, i in source.special_ids.items() if i == token), None)
    return None if text is None else other.special_ids.get(text)


def encoded(
    encode: Callable[[str, bool], Sequence[int]], text: bytes, marks: Sequence[tuple[int, int | None]] = ()
) -> tuple[list[int], int]:
    """The ids of a text, and how many of its bytes they cover: those at the end that are not a whole character wait for the next ones.

    The text is encoded in pieces: a piece ends at the first space between two words after :data:`SHORTEST` characters, after :data:`LONGEST`
    characters, or at a special token. Where it ends depends on the text alone, and a longer text has the same pieces but the last one. So an
    ``encode`` that keeps its results encodes the last piece only.

    Args:
        encode: The ids of a piece, whose undecodable bytes are as in ``surrogateescape``; True: the text begins with it.
        text: In UTF-8.
        marks: Special tokens: the bytes before each, and its id or None for one that the tokenizer does not have.
    """
    ids: list[int] = []
    begin, part = 0, ""
    for number, (end, token) in enumerate([*marks, (len(text), None)]):
        part, _ = codecs.utf_8_decode(text[begin:end], "surrogateescape", number < len(marks))
        at = 0
        for piece in _PIECE.finditer(part):
            ids += encode(piece[0], number == at == 0)
            at = piece.end()
        ids += encode(part[at:], number == at == 0)
        if token is not None:
            ids.append(token)
        if number < len(marks):
            begin = end
    return ids, begin + len(part.encode(errors="surrogateescape"))


class TranslatedRow:
    """One row of a draft with another tokenizer: the target's tokens, the draft's tokens of the same text, and what the draft has added.

    The draft's tokens are the encoding of the text (:func:`encoded`), then those that the draft has generated. They stay as long as the
    text continues with theirs. Where it differs, they become the encoding of the text again, and the common prefix keeps its keys and values.

    Args:
        target: The target's tokenizer.
        draft: The draft's.
        prompt: Tokens of the target.

    Attributes:
        sequence: The draft's tokens, its own included.
        cached: How many of them have keys and values, at most.
        generated: Tokens that the draft has generated.
        lost: How many of them could not become tokens of the target.
        is_stuck: Whether the draft has nothing to add until the text changes.
    """

    def __init__(self, target: ByteTokenizer, draft: ByteTokenizer, prompt: Sequence[int]) -> None:
        self._target, self._draft = target, draft
        self._encode = lru_cache(maxsize=None)(
            lambda piece, first: draft.encode(piece.encode(errors="surrogateescape"), first=first)
        )
        self._text = bytearray()
        self._marks: list[tuple[int, int | None]] = []  # special tokens: bytes before each, the draft's id
        self._ids: list[int] = []
        self._ends: list[tuple[int, int]] = []  # per token of the target, bytes and special tokens up to its end
        self.sequence: list[int] = list(self._draft.prefix)
        self.cached = 0
        self.generated = self.lost = 0
        self._queue: list[int] = []
        self._unsettled: list[int] = []  # after those of the queue
        self._has_changed = True
        self._forget()
        self.write(0, prompt)

    def _forget(self) -> None:
        """Drop what the draft has added."""
        self._base = (0, 0)  # bytes and special tokens of the text before `_own`
        self._own = b""
        self._own_ends: list[int] = []  # in `_own`, per token
        self._end: int | None = None  # special token of the target after `_own`
        self.is_stuck = self._is_cut = False
        self.is_fresh = True

    # ---- the target's tokens

    def write(self, at: int, tokens: Sequence[int]) -> None:
        """Set the row's tokens from position ``at`` on, which end with ``tokens``."""
        same = 0
        while same < len(tokens) and at + same < len(self._ids) and self._ids[at + same] == tokens[same]:
            same += 1
        length = at + same
        if length < len(self._ids):
            self._drop_queue()
            del self._ids[length:], self._ends[length:]
            end = self._ends[-1] if length else (0, 0)
            del self._text[end[0] :], self._marks[end[1] :]
            self._is_cut |= end < self._base
        for token in tokens[same:]:
            if self._queue and self._queue[0] == token:
                self._queue.pop(0)
            else:
                self._drop_queue()
            self._append(token)

    def _drop_queue(self) -> None:
        self._queue, self._unsettled = [], []
        self._has_changed = True

    def _append(self, token: int) -> None:
        at = len(self._ids)
        self._ids.append(token)
        prefix = self._target.prefix
        if token in self._target.special or token >= len(self._target.pieces):
            # The draft's tokenizer has its own prefix.
            if at >= len(prefix) or self._ids != prefix[: at + 1]:
                self._marks.append((len(self._text), special(token, self._target, self._draft)))
        else:
            self._text += self._target.text([token], first=self._begins_at(at))
        self._ends.append((len(self._text), len(self._marks)))

    def _begins_at(self, at: int) -> bool:
        """Whether the text begins with the token at ``at``: only the target's prefix is before it."""
        prefix = self._target.prefix
        return at <= len(prefix) and self._ids[:at] == prefix[:at]

    # ---- the draft's tokens

    def next(self, *, is_last: bool = False) -> int | None:
        """The token of the target that the draft proposes after the row's tokens; None if it has to generate first.

        Args:
            is_last: Nothing may follow this token yet, so that one that the draft's next token may change is proposed, too.
        """
        if self._has_changed:
            self._follow()
        if is_last and not self._queue:
            self._queue, self._unsettled = self._unsettled[:1], []
        return self._queue[0] if self._queue else None

    def _follow(self) -> None:
        """Continue from a text that others have changed."""
        self._has_changed = False
        base, marks = self._base
        said = bytes(self._text[base:])
        if self._is_cut or len(self._marks) != marks or not self._own.startswith(said):
            self._align()
        self._translate()

    def _align(self) -> None:
        """Make ``sequence`` the encoding of the text, with the draft's prefix before it."""
        before = self.sequence
        self.sequence, covered = self._aligned()
        self.cached = min(self.cached, common_length(before, self.sequence))
        self._forget()
        self._base = (covered, len(self._marks))
        self.is_stuck = not self.sequence

    def _aligned(self) -> tuple[list[int], int]:
        """The draft's tokens of the text, its prefix before them, and the bytes that they cover."""
        ids, covered = encoded(self._encode, bytes(self._text), self._marks)
        return [*self._draft.prefix, *ids], covered

    @property
    def awaited(self) -> bytes:
        """Bytes of the text that ``sequence`` does not reach: the beginning of a character."""
        return bytes(self._text[self._base[0] + len(self._own) :])

    def healed(self) -> tuple[int, np.ndarray] | None:
        """The last token and the ids whose text begins with its text, where the draft may continue a word that the text has begun."""
        after_mark = len(self._text) == (self._marks[-1][0] if self._marks else 0)
        if not self.is_fresh or self.awaited or after_mark or len(self.sequence) < 2:
            return None
        last = self.sequence[-1]
        text = self._draft.pieces[last]
        return (last, self._draft.beginning_with(text)) if text else None

    def heal(self, token: int) -> bool:
        """Replace the last token by a longer one, unless the target's tokenizer would have encoded the text of both in another way."""
        more = self._draft.pieces[token][len(self._draft.pieces[self.sequence[-1]]) :]
        if not more or not self._encoded(more)[1]:
            return False
        self.sequence.pop()
        self.cached = min(self.cached, len(self.sequence))
        self._add(token, more)
        return True

    def add(self, token: int) -> None:
        """Append a token that the draft has generated, and translate."""
        if token in self._draft.special or token >= len(self._draft.pieces) or not self._draft.pieces[token]:
            self.generated += 1
            self._end = special(token, self._draft, self._target)
            self.lost += self._end is None
            self.is_stuck = True
            self._translate()
            return
        self._add(token, self._draft.text([token], first=self._base == (0, 0) and not self._own))

    def _add(self, token: int, text: bytes) -> None:
        self.is_fresh = False
        self.generated += 1
        self.sequence.append(token)
        self._own += text
        self._own_ends.append(len(self._own))
        self._translate()

    # ---- the draft's tokens as the target's

    def _translate(self) -> None:
        """Queue the target's tokens of what the draft has added.

        The last ones wait for the draft's next token, which may change them: " hel" and "lo" may be one token of the target.
        """
        self._queue, self._unsettled = [], []
        said = bytes(self._text[self._base[0] :])
        if not self._own.startswith(said):
            # The draft has not yet completed the character that the text has begun.
            return
        self._base = (self._base[0] + len(said), self._base[1])
        self._own = self._own[len(said) :]
        self._own_ends = [end - len(said) for end in self._own_ends if end > len(said)]
        ids, whole, reached = self._translated(self._own)
        if reached < (len(self._own) if self.is_stuck else whole):
            # The target's tokenizer cannot express the tokens beyond.
            kept = sum(end <= reached for end in self._own_ends)
            self.lost += len(self._own_ends) - kept + (self._end is not None)
            self._own, self._own_ends, self._end = self._own[:reached], self._own_ends[:kept], None
            self.is_stuck = True
        if not self.is_stuck and len(self._own_ends) <= _MAX_HELD:
            before = self._translated(self._own[: self._own_ends[-2]])[0] if len(self._own_ends) > 1 else []
            settled = common_length(ids, before)
            ids, self._unsettled = ids[:settled], ids[settled:]
        elif self._end is not None:
            ids.append(self._end)
        self._queue = ids

    def _translated(self, text: bytes) -> tuple[list[int], int, int]:
        """The target's tokens of ``text`` after the row's, the length of its whole characters, and the length that the tokens reach."""
        whole = codecs.utf_8_decode(text, "surrogateescape", False)[1]
        found: list[int] = []
        reached = 0
        for token in self._encoded(text[:whole])[0]:
            is_first = not found and self._begins_at(len(self._ids))
            piece = self._target.text([token], first=is_first)
            # A tokenizer may change a text, or have special tokens in its vocabulary.
            if token in self._target.special or not text.startswith(piece, reached):
                break
            found.append(token)
            reached += len(piece)
        return found, whole, reached

    def _encoded(self, text: bytes) -> tuple[list[int], bool]:
        """The target's tokens of ``text``, and whether they are those of the word that the row's last tokens begin."""
        begin, target = len(self._ids), self._target
        while begin > max(0, len(self._ids) - _CONTEXT):
            token = self._ids[begin - 1]
            if token >= len(target.pieces) or not target.pieces[token]:
                break
            begin -= 1
            if target.pieces[token][:1] in (b" ", b"\n"):
                break
        start = self._ends[begin - 1] if begin else (0, 0)
        context = self._ids[begin:]
        ids = target.encode(bytes(self._text[start[0] :]) + text, first=self._begins_at(begin))
        if ids[: len(context)] == context:
            return ids[len(context) :], True
        # The rest of a character whose beginning the row ends with.
        inside = len(text) - len(text.lstrip(_CONTINUATION))
        bytes_of = [target.of_text[text[i : i + 1]] for i in range(inside) if text[i : i + 1] in target.of_text]
        is_first = self._begins_at(len(self._ids))
        return [*bytes_of, *target.encode(text[inside:], first=is_first)], False


_CONTINUATION = bytes(range(0x80, 0xC0))


class TranslatedStage(Stage):
    """Stage 0 of a chain whose first draft has another tokenizer than the target.

    Its sequence in the state block has the target's tokens, as every stage's. Its model and its cache have its own: a row of both is a
    :class:`TranslatedRow`. A step generates one token of the draft per row and publishes those of the target that follow from it, which
    may be none or several. The draft decodes greedily. Noise belongs to token ids, so that a draft with other ids cannot share the target's, and the
    most likely token agrees with a sampled one more often than a token of an independent sample does.

    Args:
        spec: Has the two tokenizers.
        others: See :class:`Stage`.
    """

    may_defer = False  # it has no prompt of the target's to read

    def __init__(self, *place: Any, spec: TranslatedDraft, **options: Any) -> None:
        super().__init__(*place, **options)
        self._spec = spec
        self._translated: list[TranslatedRow] = []

    @property
    def translated(self) -> tuple[int, int]:
        return sum(row.generated for row in self._translated), sum(row.lost for row in self._translated)

    def prefill(self, inputs: StageInputs, record: ScoreRecord | None = None) -> None:
        spec = self._spec
        self._translated = [TranslatedRow(spec.target, spec.own, prompt.tolist()) for prompt in inputs.prompts]
        for row in self._translated:
            row.next()
        sequences = [np.array(row.sequence or [0], dtype=np.int32) for row in self._translated]
        new = [limit - len(prompt) for limit, prompt in zip(inputs.limits, inputs.prompts, strict=True)]
        own = replace(
            inputs,
            prompts=sequences,
            limits=[len(tokens) + n for tokens, n in zip(sequences, new, strict=True)],
            sampling_params=SamplingParams(),
            vocabulary=embedding_size(self.model),
            grammar=None,
        )
        super().prefill(own)
        for row, held in zip(self._translated, self._held, strict=True):
            row.cached = min(held, len(row.sequence))
        self._selected = np.zeros((len(sequences), 1), dtype=np.int32)

    @torch.inference_mode()
    def step(self, lookahead: int, max_draft_tokens: int) -> Action:
        """Generate one token of the draft for each row that has none to publish, and publish what the draft tokens translate to.

        Args:
            lookahead: How many of the target's tokens this stage may be ahead of the next one.
            max_draft_tokens: No effect: there is no stage upstream.

        Returns:
            See :meth:`Stage.step`; ``IDLE`` also if the draft has nothing to say until the text changes.
        """
        action, count, waiting = self._publish(lookahead)
        if waiting:
            self._generate(waiting)
            count += self._publish(lookahead)[1]
        if not count and not waiting:
            return Action.IDLE if action == Action.STEP else action
        return Action.STEP

    def _publish(self, lookahead: int) -> tuple[Action, int, list[int]]:
        """Publish what is translated. Returns the last plan's action, the number of tokens, and the rows whose draft has to generate."""
        port, count = self.port, 0
        while (action := port.plan(lookahead, 0, 0)) == Action.STEP:
            waiting: list[int] = []
            commits = False
            for r, row in enumerate(self._translated):
                if (n := int(self._query_lens[r])) == 0:
                    continue
                row.write(int(self._kv[r]), port.tokens[r, :n].tolist())
                if self._n_select[r] > 0:
                    token = row.next(is_last=self._room(r, lookahead) == 1)
                    if token is None:
                        # The row commits nothing, and the next plan gives its tokens once more.
                        self._query_lens[r] = 0
                        if not row.is_stuck:
                            waiting.append(r)
                        continue
                    self._selected[r, 0] = token
                    count += 1
                commits = True
            if not commits:
                return action, count, waiting
            port.commit(self._selected.ctypes.data, 1)
        return action, count, []

    def _room(self, row: int, lookahead: int) -> int:
        """Tokens that the row may publish until its downstream neighbour advances."""
        block = self.block
        reached = max(block.length(self.index + 1, row), block.length(block.target, row))
        return reached + lookahead - block.length(self.index, row)

    def _generate(self, waiting: list[int]) -> None:
        """One forward of the draft, which adds a token to each of the rows ``waiting``."""
        cache, rows = self._cache, self._translated
        assert cache is not None
        held = [row.cached for row in rows]
        begin, healing = list(held), {}
        for r in waiting:
            row = rows[r]
            # The last token's logits choose the next one, and those before it whether the last one begins a longer one.
            if (found := row.healed()) is not None:
                healing[r] = found
            begin[r] = min(held[r], len(row.sequence) - 1 - (r in healing))
        longest = max(len(rows[r].sequence) for r in waiting)
        # A draft may need more tokens than the target.
        if (need := longest + WIDTH) > self._text.shape[1]:
            self._text = np.pad(self._text, ((0, 0), (0, 2 * need - self._text.shape[1])))
        self._grow(cache, need)
        for r in waiting:
            self._text[r, begin[r] : len(rows[r].sequence)] = rows[r].sequence[begin[r] :]
        self._held = begin
        self._roll_back(cache, begin)
        until = [max(b, len(rows[r].sequence) - WIDTH) if r in waiting else b for r, b in enumerate(begin)]
        if until != begin:
            self._fill(cache, begin, until)
            begin = until
        counts = [len(rows[r].sequence) - b if r in waiting else 0 for r, b in enumerate(begin)]
        columns = np.zeros((len(rows), max(counts)), dtype=np.int32)
        for r in waiting:
            columns[r, : counts[r]] = rows[r].sequence[begin[r] :]
        first = min(counts[r] - 1 - (r in healing) for r in waiting)
        logits = self._forward(torch.from_numpy(columns).to(self._device), cache, keep=max(counts) - first)
        self._held = [b + n for b, n in zip(begin, counts, strict=True)]
        cache.truncate(self._held)
        for r in waiting:
            rows[r].cached = self._held[r]
            self._choose_token(rows[r], logits[r, : counts[r] - first], healing.get(r))

    def _choose_token(self, row: TranslatedRow, logits: torch.Tensor, healing: tuple[int, np.ndarray] | None) -> None:
        """Add the draft's choice. ``logits``: ``[1 or 2 or more, V]``, those after the last token and before it at the end."""
        if healing is not None:
            last, longer = healing
            token = _best(logits[-2], longer)
            if token is not None and token != last and row.heal(token):
                return
        awaited = row.awaited
        token = _best(logits[-1], self._spec.own.consistent_with(awaited) if awaited else None)
        if token is None:
            row.is_stuck = True  # until the text changes
        else:
            row.add(token)


def _best(logits: torch.Tensor, among: np.ndarray | None) -> int | None:
    """The most likely token, of the ids ``among`` if they are given; None if there are none."""
    if among is None:
        return int(logits.argmax())
    ids = torch.from_numpy(among[among < logits.shape[0]])
    return int(ids[int(logits[ids.to(logits.device)].argmax())]) if len(ids) else None


@dataclass(frozen=True, eq=False, kw_only=True)
class TranslatedDraft(ModelDraft):
    """A model with another tokenizer than the target's.

    Args:
        target: The target's tokenizer.
        own: The draft's.
    """

    label = "a draft with another tokenizer"
    verifies = False  # it has no ids for the tokens of a stage upstream
    draws = False
    translates = True
    runs_at_once = False  # its tokenizers are shared

    target: ByteTokenizer
    own: ByteTokenizer

    @classmethod
    def recognise(cls, given: Any) -> None:
        """None: the tokenizers of models tell, see :func:`pipespec.checks.tokenizers.with_translations`."""

    def make_stage(self, *place: Any, native: bool = True, **options: Any) -> TranslatedStage:
        return TranslatedStage(*place, native=native, spec=self)
