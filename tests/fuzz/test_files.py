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
from pipespec.bench.results import DatasetSettings, ResultsFolder, Sample, Settings, StepCounts, SystemSettings
from pipespec.bench.summary import summarise
from pipespec.spd.training import recipe
from tests.fuzz.mutations import check_names

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


def a_run(folder: Path) -> ResultsFolder:
    run = ResultsFolder(folder)
    systems = [SystemSettings(key=key, kind=key, label=key) for key in ("hf", "plain")]
    data = DatasetSettings(name="d", format="jsonl", samples=["0", "1"], new_tokens=4)
    settings = Settings(
        target="T", systems=systems, datasets=[data], machine={"cpu": "c"}, drafts={"a": "A"}, parameters={"target": 5}
    )
    run.write("settings.json", settings)
    for system in systems:
        for name in data.samples:
            counts = [StepCounts("a", 3), StepCounts("target", 2, 4, 3, 2, histogram=(1, 1))]
            run.add(
                Sample(dataset="d", system=system.key, sample=name, tokens=[1, 2, 3, 4], seconds=0.5, commits=[(0.1, 1), (0.5, 4)],
                       seconds_to_first_token=0.1, stages=counts, identical=True)
            )  # fmt: skip
    run.write("summary.json", summarise(run, settings))
    return run


@pytest.fixture(scope="module")
def run_files(tmp_path_factory) -> tuple[ResultsFolder, dict[str, bytes]]:
    run = a_run(tmp_path_factory.mktemp("run"))
    files = {name: (run.path / name).read_bytes() for name in ("settings.json", "samples.jsonl", "summary.json")}
    files["samples.jsonl"] = files["samples.jsonl"].splitlines()[0]
    return run, files


def refuses(run: ResultsFolder, name: str, content: bytes) -> bool:
    """Do what `pipespec bench` and its report do with a folder, one of whose files has another content. Whether it is refused."""
    file = run.path / name
    before = file.read_bytes()
    try:
        file.write_bytes(content + b"\n")
        changed = ResultsFolder(run.path)
        settings = changed.settings()
        summarise(changed, settings)
        changed.summary()
    except ValueError as error:
        check_names(error, file)
        return True
    finally:
        file.write_bytes(before)
    return False


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("samples.jsonl", {"seconds": "fast"}),
        ("samples.jsonl", {"seconds": None}),
        ("samples.jsonl", {"tokens": 5}),
        ("samples.jsonl", {"tokens": "abcd"}),
        ("samples.jsonl", {"tokens": ["a"]}),
        ("samples.jsonl", {"commits": [[0.1]]}),
        ("samples.jsonl", {"stages": [{"name": "a", "steps": "x"}]}),
        ("samples.jsonl", {"identical": "yes"}),
        ("settings.json", {"systems": [{"key": 5, "kind": "hf", "label": "x"}]}),
        ("settings.json", {"threads": None}),
        ("settings.json", {"baselines": [[]]}),
        ("summary.json", {"complete": 2}),
    ],
)
def test_results_of_other_types_are_refused(run_files, name, change) -> None:
    run, files = run_files
    assert refuses(run, name, json.dumps(json.loads(files[name]) | change).encode())


def test_cycles_of_stages_that_are_not_known(run_files) -> None:
    run, files = run_files
    name = "samples.jsonl"
    assert not refuses(run, name, json.dumps(json.loads(files[name]) | {"cycles": 1}).encode())


@pytest.mark.parametrize("name", ["settings.json", "samples.jsonl", "summary.json"])
@pytest.mark.parametrize("content", [DEEP, DIGITS, b"", b"\xff", b"[]", b"null", b'{"version": 99}'], ids=range(7))
def test_results_that_are_something_else_are_refused(run_files, name, content) -> None:
    run, _ = run_files
    assert refuses(run, name, content)
