"""Tokens as bytes, and the ids of a text that grows and is cut: always those of the text encoded from its beginning."""

import json
import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pipespec.engine.translation import LONGEST, SHORTEST, TranslatedRow, encoded, special
from pipespec.models.tokenizers import ByteTokenizer, backend_of
from tests.pipespec.vocabularies import KINDS, TEXT, as_bytes
from tests.trials import trials

WORDS = st.sampled_from(
    [" the", " quick", "jumps", " over", "isn't", " ", "\n", "    ", "def ", "caf\u00e9", " \u65e5\u672c", "\U0001f600",
     "\U0001f468\u200d\U0001f469", "<|end|>", "</s>", "x" * 50, " zz", "\u00e9"]
)  # fmt: skip
TEXTS = st.lists(WORDS, max_size=25).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=trials(15, 500))
def test_tokens_are_bytes(kind, text):
    """The ids of a text are the tokenizer's own, and their bytes are the text."""
    made, own = as_bytes(kind), KINDS[kind]()
    ids = made.encode(text.encode(), first=True)
    assert not set(ids) & made.special
    assert made.text(ids, first=True).decode() == text
    if not any(token in text for token in made.special_ids):  # these are text here
        assert ids == own.encode(text, add_special_tokens=False).ids


def test_a_special_token_in_a_text_is_text():
    made = as_bytes("byte-level")
    ids = made.encode(b"a<|end|>")
    assert made.special_ids["<|end|>"] not in ids
    assert made.text(ids) == b"a<|end|>"
    assert made.prefix == [made.special_ids["<s>"]]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_by_their_text(kind):
    made = as_bytes(kind)
    for start in (b" ", b" th", b"\xf0\x9f", b"e", b"\xff", b"\x00"):
        longer = {i for i, piece in enumerate(made.pieces) if piece.startswith(start)}
        assert set(made.beginning_with(start).tolist()) == longer
        shorter = {piece for piece in made.pieces if piece and start.startswith(piece)}
        found = made.consistent_with(start).tolist()
        assert {made.pieces[i] for i in found} == shorter | {made.pieces[i] for i in longer}
    assert pickle.loads(pickle.dumps(made)).pieces == made.pieces


def test_other_tokenizers_are_refused():
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match=r"its decoder \(none\) is neither byte-level"):
        ByteTokenizer(made.to_str())
    made.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"its decoder \(WordPiece\)"):
        ByteTokenizer(made.to_str())
    with pytest.raises(TypeError, match="a dict cannot be translated: use a fast tokenizer"):
        backend_of({})


# ---- a text that grows and is cut


def pieces(text: str) -> list[str]:
    """The rule of the encoder, character by character."""
    found, begin = [], 0
    while begin < len(text):
        for end in range(begin + SHORTEST, begin + LONGEST + 1):
            if end + 1 >= len(text):
                return [*found, text[begin:]]
            if (
                text[end] == " " and not text[end - 1].isspace() and not text[end + 1].isspace()
            ) or end == begin + LONGEST:
                found.append(text[begin:end])
                begin = end
                break
    return found


def from_scratch(made: ByteTokenizer, text: bytes, at: list[tuple[int, int | None]]) -> list[int]:
    """The ids of ``text`` with special tokens ``at`` these offsets, without anything incremental."""
    ids: list[int] = []
    offsets = [0, *(offset for offset, _ in at), len(text)]
    for number, (begin, end) in enumerate(pairwise(offsets)):
        part = text[begin:end]
        if number == len(at):
            # An incomplete character at the end waits.
            part = part[: len(part) - max([n for n in (1, 2, 3) if n <= len(part) and _may_grow(part[-n:])], default=0)]
        for i, piece in enumerate(pieces(part.decode(errors="surrogateescape"))):
            ids += made.encode(piece.encode(errors="surrogateescape"), first=number == 0 and i == 0)
        if number < len(at) and at[number][1] is not None:
            ids.append(at[number][1])
    return ids


def _may_grow(tail: bytes) -> bool:
    """Whether the bytes begin a character and are not complete."""
    for first in (b"\x80", b"\x90", b"\xa0"):
        for more in (0, 1, 2):
            try:
                if len((tail + first + b"\x80" * more).decode()) == 1 and tail:
                    return True
            except UnicodeDecodeError:
                pass
    return False


STEPS = st.one_of(
    WORDS.map(str.encode),
    st.sampled_from([b"\xf0\x9f", b"\x98\x80", b"\xe6\x97", b"\xff", b"\xc3", b"\x80", b" word next"]),
    st.sampled_from([None, 7]),  # a special token
    (st.integers(1, 3) | st.integers(1, 60)).map(lambda n: -n),  # a rollback
)


def piece_lengths(piece: str, first: bool) -> list[int]:
    """In place of a tokenizer: a piece is one id, its length. So the ids show every cut."""
    size = len(piece.encode(errors="surrogateescape"))
    return [2 * size + first] if piece else []


def by_bytes(made: ByteTokenizer):
    return lambda piece, first: made.encode(piece.encode(errors="surrogateescape"), first=first)


class PieceLengths:
    def encode(self, text, *, first=False):
        return [2 * len(text) + first] if text else []


@pytest.mark.parametrize("kind", ["bundled", "sentencepiece", "lengths"])
@given(steps=st.lists(STEPS, max_size=30))
@settings(max_examples=trials(60, 3000))
def test_the_ids_are_those_of_the_text_from_its_beginning(kind, steps):
    made = PieceLengths() if kind == "lengths" else as_bytes(kind)
    encode, text, at = piece_lengths if kind == "lengths" else by_bytes(made), b"", []
    for step in steps:
        if isinstance(step, bytes):
            text += step
        elif step is None or step > 0:
            at.append((len(text), step))
        else:
            length = max(0, len(text) + step)
            text, at = text[:length], [mark for mark in at if mark[0] <= length]
        ids, covered = encoded(encode, text, at)
        assert ids == from_scratch(made, text, at)
        assert len(text) - 3 <= covered <= len(text)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole_text(kind):
    made, text = as_bytes(kind), " ".join(line.replace("\n", " ") for line in TEXT)
    ids, _ = encoded(by_bytes(made), text.encode())
    assert ids == KINDS[kind]().encode(text, add_special_tokens=False).ids
    assert len(ids) > 100


@pytest.mark.parametrize("word", ["word{} ", "wordword"])  # and where nothing shows the end of a word
def test_an_update_encodes_the_last_piece_only(word):
    made, count = as_bytes("bundled"), 0

    class Counting:
        prefix, special, pieces = made.prefix, made.special, made.pieces

        def encode(self, text, *, first=False):
            nonlocal count
            count += len(text)
            return list(text)

    row = TranslatedRow(made, Counting(), [])
    for i in range(300):
        row.write(len(row._ids), made.encode(word.format(i).encode()))
        row._align()
    assert count < 300 * 2 * LONGEST


# ---- rows

PAIRS = [("bundled", "sentencepiece"), ("byte-level", "unigram"), ("sentencepiece", "byte-level"), ("unigram", "bundled")]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@given(data=st.data())
@settings(max_examples=trials(25, 2000))
def test_a_row_under_random_drafts_and_rollbacks(pair, data):
    """What the queue proposes continues the text as the draft does; the draft's tokens are those of the text; cached tokens stay."""
    target, draft = map(as_bytes, pair)
    ids = target.prefix + target.encode(data.draw(TEXTS).encode(), first=True)[:30]
    row, fed = TranslatedRow(target, draft, ids), []
    token = st.integers(0, len(target.pieces) + 2)
    for _ in range(data.draw(st.integers(1, 12))):
        proposed = row.next()
        assert fed[: row.cached] == row.sequence[: row.cached]
        assert row.cached <= len(fed)
        queue = list(row._queue)
        assert not any(i in target.special for i in queue[:-1])
        mapped = {special(i, draft, target) for i in draft.special} - {None}
        assert not queue or queue[-1] not in target.special or queue[-1] in mapped
        said = row._own[len(row._text) - row._base[0] :]
        assert said.startswith(
            target.text([i for i in queue if i not in target.special], first=row._begins_at(len(ids)))
        )
        fed = list(row.sequence)
        row.cached = len(fed)
        if proposed is not None and data.draw(st.booleans()):
            row.write(len(ids), [proposed])
            ids.append(proposed)
        elif not row.is_stuck and data.draw(st.booleans()):
            # As the draft would choose: at random, but with the character that the text has begun.
            awaited = row.awaited
            among = draft.consistent_with(awaited).tolist() if awaited else range(len(draft.pieces))
            if among:
                row.add(data.draw(st.sampled_from(among)))
            else:
                row.is_stuck = True
        else:
            at = data.draw(st.integers(max(0, len(ids) - 6), len(ids)))
            ids = ids[:at] + data.draw(st.lists(token, max_size=3))
            row.write(at, ids[at:])
        assert row._ids == ids
    row._align()
    assert row.sequence == TranslatedRow(target, draft, ids)._aligned()[0]


def test_special_tokens():
    """Only those of equal text are translated, in both directions."""
    target, draft = as_bytes("byte-level"), as_bytes("sentencepiece")
    end, user = target.special_ids["<|end|>"], target.special_ids["<|user|>"]
    ids = [*target.prefix, user, *target.encode(b"the dog"), end, *target.encode(b"the")]
    row = TranslatedRow(target, draft, ids)
    assert row._aligned()[0] == [
        *draft.prefix, *draft.encode(b"the dog"), draft.special_ids["<|end|>"], *draft.encode(b"the")
    ]  # fmt: skip
    assert row.next() is None
    row.add(draft.encode(b" dog")[0])
    row.add(draft.special_ids["<|end|>"])
    assert row._queue[-1] == end
    assert target.text(row._queue) == draft.text(draft.encode(b" dog")[:1])
    assert (row.generated, row.lost, row.is_stuck) == (2, 0, True)
    row.write(len(ids), target.encode(b" fox"))
    assert row.next() is None
    row.add(draft.special_ids["</s>"])  # the target has none
    assert row.next() is None
    assert (row.generated, row.lost, row.is_stuck) == (3, 1, True)


def test_a_character_in_two_tokens():
    """The draft waits for, and completes, a character that the target has begun. The target's tokens continue it."""
    target, draft = as_bytes("byte-level"), as_bytes("sentencepiece")
    face = "\U0001f600".encode()
    ids = target.prefix + target.encode(b"the ") + target.encode(face)
    assert len(target.encode(face)) > 2
    row = TranslatedRow(target, draft, ids[:-2])
    assert row.next() is None
    assert row.awaited == face[: len(row.awaited)] != b""
    for token in [*draft.encode(face), *draft.encode(b" dog")]:
        assert not row.awaited or token in draft.consistent_with(row.awaited)
        row.add(token)
    assert row.awaited == b""
    assert row._queue[:2] == ids[-2:]


def test_a_word_that_the_text_has_begun():
    """The last token may become a longer one, unless the target would have encoded that in another way."""
    draft = as_bytes("bundled")
    longer = draft.of_text[b" return"]
    begun = next(b" return"[:n] for n in range(6, 1, -1) if b" return"[:n] in draft.of_text)
    assert draft.encode(begun) == [draft.of_text[begun]]
    seen = set()
    for kind in KINDS:
        target = as_bytes(kind)
        ids = target.encode(begun)
        expected = target.encode(b" return")[: len(ids)] == ids
        seen.add(expected)
        row = TranslatedRow(target, draft, target.prefix + target.encode(b"x", first=True) + ids)
        row.next()
        last, among = row.healed()
        assert last == row.sequence[-1] == draft.of_text[begun]
        assert longer in among
        assert row.heal(longer) is expected
        assert row.sequence[-1] == (longer if expected else last)
        assert row._own == (b" return"[len(begun) :] if expected else b"")
    assert seen == {True, False}


def test_what_the_target_cannot_say_is_lost():
    content = json.loads(KINDS["unigram"]().to_str())
    content["model"]["byte_fallback"] = False
    target, draft = ByteTokenizer(json.dumps(content)), as_bytes("byte-level")
    row = TranslatedRow(target, draft, target.prefix + target.encode(b"the fox", first=True))
    row.next()
    for token in draft.encode("\U0001f600".encode()):
        row.add(token)
    assert row.next() is None
    assert row.is_stuck
    assert row.lost == row.generated == len(draft.encode("\U0001f600".encode()))


def test_a_rollback_over_the_end_of_a_word():
    """A piece ends where a space is between two words. Without the second word it has not ended."""
    assert encoded(piece_lengths, b"w" * SHORTEST + b" x")[0] == [2 * SHORTEST + 1, 4]
    assert encoded(piece_lengths, b"w" * SHORTEST + b" ")[0] == [2 * SHORTEST + 3]
