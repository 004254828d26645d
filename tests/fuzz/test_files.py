"""Files that a user or an earlier process wrote: prompts, configurations, recipes, results, profiles. Damaged ones are refused by ValueError with the
file's name, or what is in them works."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import bench.datasets  # noqa: F401  adds the published formats
from bench import published_runs
from bench.configuration import load_config
from pipespec.bench import datasets
from pipespec.bench.results import ResultsFolder, Sample
from pipespec.spd.training import recipe

DEEP = b"[" * 100_000
DIGITS = b"[" + b"9" * 5000 + b"]"


# ---- prompts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", DEEP),
        ("a.jsonl", DEEP),
        ("a.json", DIGITS),
        ("a.jsonl", DIGITS),
        ("a.jsonl", b'{"turns": "one text, not several"}'),
        ("a.jsonl", b'{"question_id": 1, "turns": "one text, not several"}'),
        ("a.json", b'{"data": 5}'),
        ("a.json", b'{"data": {"a": 1}}'),
        ("a.json", b'{"rows": "text"}'),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "u"}, {"role": "system", "content": 5}]}'),
        ("a.jsonl", b'{"messages": [{"role": "system", "content": 5}, {"role": "user", "content": "u"}]}'),
        ("a.jsonl", b'{"prompt": "\\ud800"}'),
        ("a.json", b'[{"question": "q", "choices": "[[[[", "answer": 1}]'),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}', 1, mtime=0)[:11] + b"\xff" * 30),
    ],
)
def test_prompts_that_are_refused(tmp_path: Path, name, content) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        datasets.read(file)


# ---- configurations and recipes


@pytest.mark.parametrize(
    "content",
    [
        b"pipeline = 5",
        b"dataset = [5]",
        b"drafts = [1]",
        b"lookahead = ['a']",
        b"device = [5]",
        b"a = " + b"[" * 100_000,
        b"a = " + b"9" * 5000,
        b"[[dataset]]\nname = 5\n",
        b"[[dataset]]\nname = 'a'\nfile = 5\n",
        b"[[dataset]]\nname = 'a'\nprompt_tokens = 'x'\n",
        b"temperature = nan",
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, content) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        load_config(file)


@pytest.mark.parametrize("content", [b"options = 5", b"a = " + b"[" * 100_000])
def test_recipes_that_are_refused(tmp_path: Path, content) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        recipe.load(file)


# ---- traces of published runs


@pytest.mark.parametrize("content", [DEEP, DIGITS, b"", b"\xff", b"[]", b"null"], ids=range(6))
def test_published_runs_that_are_something_else_are_refused(tmp_path: Path, content) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        published_runs.load(tmp_path)


# ---- results


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "fast"},
        {"seconds": None},
        {"tokens": 5},
        {"tokens": "abcd"},
        {"tokens": ["a"]},
        {"commits": [[0.1]]},
        {"stages": [{"name": "a", "steps": "x"}]},
        {"identical": "yes"},
    ],
)
def test_samples_of_other_types_are_refused(tmp_path: Path, change) -> None:
    ResultsFolder(tmp_path).add(Sample(dataset="d", system="hf", sample="0", tokens=[1], seconds=0.5))
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | change) + "\n")
    with pytest.raises(ValueError, match=str(file)):
        _ = ResultsFolder(tmp_path).samples


@pytest.mark.parametrize(
    "content",
    [
        *(DEEP, DIGITS, b"", b"\xff", b"[]", b"null", b'{"version": 99}'),
        b'{"target": "T", "systems": [{"key": 5}]}',
        b'{"target": "T", "threads": null}',
        b'{"target": "T", "baselines": [[]]}',
    ],
    ids=range(10),
)
def test_settings_that_are_refused(tmp_path: Path, content) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=str(file)):
        ResultsFolder(tmp_path).settings()
