"""Training data: files, conversations with and without markers, and their errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from pipespec.demo import family_path
from pipespec_train import data

# Like LLaMA 3's template: no markers, and a header that add_generation_prompt leaves open.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}"
    "<|endoftext|>{% endgeneration %}{% else %}{{ m['content'] | trim }}<|endoftext|>{% endif %}{% endfor %}"
)
# The first of these ends only the last message with the end mark. The second one renders no assistant's message.
LAST_IS_OTHER = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if loop.last %}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}"
)
HIDES = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} and more of it {% endif %}{% endfor %}"

TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Say def twice."},
    {"role": "assistant", "content": "def def"},
    {"role": "user", "content": "def def"},
    {"role": "assistant", "content": " return self\n"},
]


@pytest.fixture(scope="module")
def tok():
    return AutoTokenizer.from_pretrained(family_path("target"))


@pytest.mark.parametrize(
    ("template", "messages", "spans"),
    [
        (LLAMA, TALK, ["def def<|endoftext|>", "return self<|endoftext|>"]),
        (MARKED, TALK, ["def def<|endoftext|>", "return self<|endoftext|>"]),
        (LAST_IS_OTHER, TALK, ["def def", " return self\n<|endoftext|>"]),
        (LLAMA, TALK[2:3], ["def def<|endoftext|>"]),
    ],
    ids=["without markers", "with markers", "the last message otherwise", "the first message is the assistant's"],
)
def test_spans_of_the_assistant(tok, template, messages, spans) -> None:
    tok.chat_template = template
    ids, mask = data.encode_conversation(tok, messages)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    assert [tok.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)] == spans


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def test_jsonl_of_both_kinds(tok, tmp_path: Path) -> None:
    tok.chat_template = LLAMA
    shared = [{"from": "human", "value": "Say def twice, please."}, {"from": "gpt", "value": "def def"}]
    file = write(tmp_path / "a.jsonl", {"messages": TALK}, {"conversations": shared}, {"text": "x = 1\n" * 40})
    found, lost = data.load_examples([file], tok, 64)
    assert lost == "none left out"
    assert len(found) >= 4  # the text makes several windows
    talk = found[0]
    # The wanted token at a position is the one after it.
    assert tok.decode(talk.ids[1:][talk.wanted[:-1]]) == "def def<|endoftext|>return self<|endoftext|>"
    assert not talk.wanted[-1]
    assert tok.decode(found[1].ids[1:][found[1].wanted[:-1]]) == "def def<|endoftext|>"
    for window in found[2:]:
        assert window.ids[0] == tok.bos_token_id
        assert window.wanted.all()
    text = np.concatenate([w.ids[1:] for w in found[2:]])
    assert tok.decode(text) == "x = 1\n" * 40 + tok.eos_token


def test_folders_and_text(tok, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "b.txt", "import os\n" * 20)
    write(tmp_path / "in" / "c.py", "not read from a folder")
    (tmp_path / "in" / "d.json").write_text(json.dumps([{"text": "import sys\n" * 20}]))
    found, _ = data.load_examples([tmp_path], tok, 512)
    assert len(found) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no"):
        data.load_examples([tmp_path / "empty"], tok, 512)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        data.load_examples([tmp_path / "nothing"], tok, 512)


def test_too_long_conversations(tok, tmp_path: Path) -> None:
    tok.chat_template = LLAMA
    long = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "x = 1\n" * 50}]
    file = write(tmp_path / "a.jsonl", {"messages": long}, {"messages": TALK})
    found, lost = data.load_examples([file], tok, 60)
    assert (len(found), lost) == (1, "1 longer than the limit")
    assert "1 longer than the limit" in str(lost)
    found, lost = data.load_examples([file], tok, 60, truncate=True)
    assert (len(found), lost, len(found[0].ids)) == (2, "none left out", 60)


def test_nothing_to_learn_is_an_error(tok, tmp_path: Path) -> None:
    tok.chat_template = LLAMA
    silent = {"messages": [{"role": "user", "content": "Is there anybody who would answer this?"}]}
    with pytest.raises(ValueError, match=r"nothing to learn.*1 without a message of the assistant"):
        data.load_examples([write(tmp_path / "a.jsonl", silent)], tok, 64)
    with pytest.raises(ValueError, match=r"nothing to learn.*1 shorter than 10 tokens"):
        data.load_examples([write(tmp_path / "a.txt", "x")], tok, 64)
    tok.chat_template = HIDES
    with pytest.raises(ValueError, match=r"nothing to learn.*1 (whose chat template does not show|without a message)"):
        data.load_examples([write(tmp_path / "b.jsonl", {"messages": TALK})], tok, 64)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": ', "cannot be read: line 1, column 10"),
        ("a.jsonl", "[1]", "not an object but list"),
        ("a.jsonl", '{"prompt": "x"}', "neither text nor messages nor conversations, but prompt"),
        ("a.jsonl", '{"messages": "x"}', "record 1: messages must be a list"),
        ("a.jsonl", '{"messages": ["x"]}', "a message is str"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [1]}]}', "role and content as text"),
        ("a.json", "{}", "neither text nor messages nor conversations, but nothing"),
        ("a.json", "[", "cannot be read: "),
    ],
)
def test_bad_files(tok, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        data.load_examples([tmp_path / name], tok, 64)


def test_other_bad_data(tok, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="not UTF-8"):
        data.load_examples([tmp_path / "a.txt"], tok, 64)
    with pytest.raises(ValueError, match="too short"):
        data.load_examples([tmp_path / "a.txt"], tok, 4)
    tok.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        data.load_examples([write(tmp_path / "a.jsonl", {"messages": TALK})], tok, 64)


def test_parquet(tok, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        file.write_bytes(b"PAR1")
        with pytest.raises(ImportError, match="needs pyarrow"):
            data.load_examples([file], tok, 64)
        return
    tok.chat_template = LLAMA
    parquet.write_table(pa.Table.from_pylist([{"messages": TALK}]), file)
    assert len(data.load_examples([file], tok, 64)[0]) == 1
    file.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="cannot be read"):
        data.load_examples([file], tok, 64)


def examples(lengths: list[int]) -> list[data.TrainingExample]:
    return [data.TrainingExample(np.full(n, i, dtype=np.int32), np.arange(n) % 2 == 0) for i, n in enumerate(lengths)]


def test_batches_depend_on_seed_and_number_alone() -> None:
    some = examples([3, 9, 4, 8, 5, 7, 6])
    a, b = data.Batches(some, 2, 1), data.Batches(some, 2, 1)
    later = [b[i].ids for i in range(5, 12)]
    assert all(x.equal(a[i].ids) for i, x in enumerate(later, 5))
    other = data.Batches(some, 2, 2)
    assert [x[:, 0].tolist() for x in later] != [other[i].ids[:, 0].tolist() for i in range(5, 12)]
    for turn in range(3):  # a pass shows no example twice
        shown = [int(row[0]) for i in range(turn * 3, turn * 3 + 3) for row in a[i].ids]
        assert len(set(shown)) == 6
    batch = data.collate([some[0], some[1]])
    assert batch.ids.tolist() == [[0] * 9, [1] * 9]
    assert batch.wanted.tolist() == [[True, False, True] + [False] * 6, [True, False] * 4 + [True]]


def test_validation_split() -> None:
    some = examples([5] * 20)
    train, held = data.split(some, 0.1, 0)
    assert (len(train), len(held)) == (18, 2)
    assert not {int(e.ids[0]) for e in train} & {int(e.ids[0]) for e in held}
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            data.split(some, share, 0)
    with pytest.raises(ValueError, match="too few"):
        data.split(some[:1], 0.5, 0)


def test_frequent_tokens() -> None:
    ids = np.array([9, 4, 4, 7, 7, 4, 2, 5], dtype=np.int32)
    example = data.TrainingExample(
        ids, np.array([1, 1, 1, 1, 1, 0, 0, 0], dtype=bool)
    )  # the 2 and the 5 are not to be trained
    assert data.frequent_tokens([example], 2) == [4, 7]
    assert data.frequent_tokens([example], 2, always=[1]) == [1, 4]
    # Tokens that do not occur follow, in the order of their ids.
    assert data.frequent_tokens([example], 3) == [0, 4, 7]
    assert data.frequent_tokens([example], 10) == list(range(10))
