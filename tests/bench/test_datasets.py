"""Readers of prompts, on small files in the published formats."""

import csv
import gzip
import json
import sys
from pathlib import Path

import pytest

from bench.datasets import Conversation, guessed, messages, read

HUMAN_EVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": " 1", "test": "x"}  # fmt: skip
GSM8K = {"question": "How many?", "answer": "2 #### 2"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": []}
CNN = {"id": "f001", "article": "Long news.", "highlights": "News."}
XSUM = {"document": "Other news.", "summary": "News.", "id": "35232142"}
MMLU = {"question": "Which?", "subject": "college_physics", "choices": ["a", "b", "c", "d"], "answer": 1}


def lines(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("record", "form", "name", "part"),
    [
        (HUMAN_EVAL, "humaneval", "HumanEval/0", "def f():\n"),
        (GSM8K, "gsm8k", "0", "How many?"),
        (MT_BENCH, "mt-bench", "81", "Write."),
        (CNN, "cnn-dailymail", "f001", "Long news."),
        (XSUM, "xsum", "35232142", "Other news."),
        (MMLU, "mmlu", "0", "about college physics"),
        ({"prompt": "Say."}, "jsonl", "0", "Say."),
        ({"id": "a", "text": "Say."}, "jsonl", "a", "Say."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_format_is_found_by_its_fields(tmp_path: Path, record, form: str, name: str, part: str) -> None:
    found, prompts = read(lines(tmp_path / "data.jsonl.gz", record))
    assert found == form
    assert prompts[0].name == name
    assert part in prompts[0].turns[0]


def test_mmlu_as_published_has_no_header(tmp_path: Path) -> None:
    file = tmp_path / "astronomy_test.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows(
            [["What, is\nit?", "one", "two", "three", "four", "C"], ["Why?", "a", "b", "c", "d", "A"]]
        )
    form, prompts = read(file)
    assert (form, len(prompts)) == ("mmlu", 2)
    assert prompts[0].turns[0].endswith("What, is\nit?\nA. one\nB. two\nC. three\nD. four\nAnswer:")


def test_csv_with_a_header_and_a_long_article(tmp_path: Path) -> None:
    file = tmp_path / "test.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["id", "article", "highlights"])
        writer.writeheader()
        writer.writerow(CNN | {"article": "word " * 60_000})
    form, prompts = read(file)
    assert form == "cnn-dailymail"
    assert prompts[0].turns[0].count("word") == 60_000


def test_json_lists_and_rows_of_a_server(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps([GSM8K, GSM8K]))
    assert [c.name for c in read(file)[1]] == ["0", "1"]
    file.write_text(json.dumps({"features": [], "rows": [{"row_idx": 0, "row": XSUM}]}))
    assert read(file)[0] == "xsum"


def test_human_eval_in_the_format_of_mt_bench(tmp_path: Path) -> None:
    file = lines(tmp_path / "humaneval.jsonl", {"question_id": 7, "turns": ["Complete."]})
    assert read(file, "humaneval") == ("mt-bench", [Conversation("7", ("Complete.",))])


def test_equal_names_become_numbers(tmp_path: Path) -> None:
    prompts = read(lines(tmp_path / "a.jsonl", {"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}))[1]
    assert [c.name for c in prompts] == ["0", "1"]


def test_conversations_as_messages(tmp_path: Path) -> None:
    said = [("system", "Be."), ("user", "A?"), ("user", "B?")]
    record = {"messages": [{"role": role, "content": content} for role, content in said]}
    conversation = read(lines(tmp_path / "a.jsonl", record))[1][0]
    assert conversation.turns == ("A?", "B?")
    assert [(m["role"], m["content"]) for m in messages(conversation)] == said[:2]


def test_a_line_ends_only_at_a_line_feed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one\u2028two\u0085three"}\r\n\n{"prompt": "four"}\n', encoding="utf-8")
    assert [c.turns for c in read(file)[1]] == [("one\u2028two\u0085three",), ("four",)]


@pytest.mark.parametrize(
    ("name", "text", "form", "message"),
    [
        ("a.jsonl", "{", None, "cannot be read: line 1, column 2"),
        ("a.jsonl", "", None, "has no prompts"),
        ("a.jsonl", '{"question": "x"}', "humaneval", "entry 1 lacks the field 'task_id'; the format 'humaneval' has the fields task_id, prompt"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": " "}', None, "entry 2 cannot be read"),
        ("a.txt", "x", None, "datasets are .jsonl"),
        ("a.jsonl", "{}", "alpaca", "no format 'alpaca'"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(tmp_path: Path, name: str, text: str, form: str | None, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        read(tmp_path / name, form)


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match="needs pyarrow"):
        read(tmp_path / "a.parquet")


def test_the_format_with_the_most_fields_is_found() -> None:
    assert guessed(MMLU) == "mmlu"  # which also has gsm8k's fields
    assert guessed("text") == "jsonl"
