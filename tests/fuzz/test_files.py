"""Files that a user or an earlier process wrote: prompts, configurations, recipes, results, profiles. Damaged ones are refused by ValueError with the
file's name, or what is in them works."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import bench.datasets  # noqa: F401  adds the published formats
from bench import published_runs
from bench.configuration import load_config
from pipespec.bench import datasets
from pipespec.bench.config import BenchConfig
from pipespec.bench.results import DatasetSettings, ResultsFolder, Sample, Settings, StepCounts, SystemSettings
from pipespec.bench.summary import summarise
from pipespec.spd.training import recipe
from tests.fuzz.mutations import check_names, examples, mutated_bytes, mutated_json

DEEP = b"[" * 100_000
DIGITS = b"[" + b"9" * 5000 + b"]"


# ---- prompts

PROMPTS = {
    "lines.jsonl": b'{"prompt": "def f():", "id": 3}\n{"text": "a"}\n{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n',
    "HumanEval.jsonl": b'{"task_id": "HumanEval/0", "prompt": "def f():"}\n{"task_id": "HumanEval/1", "prompt": "x"}\n',
    "gsm8k.jsonl": b'{"question": "How many?", "answer": "4"}\n',
    "question.jsonl": b'{"question_id": 81, "turns": ["first", "second"]}\n',
    "rows.json": b'{"rows": [{"row_idx": 0, "row": {"question": "q", "answer": "4"}}]}',
    "list.json": b'[{"article": "long", "highlights": "short", "id": "x"}, {"article": "b", "highlights": "c"}]',
    "mmlu.csv": b'What?,1,2,3,4,B\n"Who, then?",a,b,c,d,A\n',
    "xsum.csv": b"document,summary,id\nlong,short,1\n",
    "mmlu.json": b'[{"question": "q", "choices": ["a", "b", "c", "d"], "answer": 1, "subject": "us_law"}]',
}


def read_prompts(file: Path) -> None:
    try:
        form, found = datasets.read(file)
    except ValueError as error:
        check_names(error, file)
        return
    assert form in datasets.FORMATS
    assert len({c.name for c in found}) == len(found) > 0
    for conversation in found:
        assert conversation.turns
        assert all(isinstance(turn, str) and turn.strip() for turn in conversation.turns)
        assert conversation.system is None or isinstance(conversation.system, str)
        assert datasets.messages(conversation)


@examples(60, 4000)
@given(data=st.data(), name=st.sampled_from(sorted(PROMPTS)), packed=st.booleans())
def test_prompts(tmp_path: Path, data, name, packed) -> None:
    content = PROMPTS[name]
    if name.endswith(".json"):
        content = data.draw(mutated_json(json.loads(content)))
    elif name.endswith(".jsonl") and data.draw(st.booleans()):
        content = b"\n".join(
            data.draw(mutated_json(json.loads(line))).replace(b"\n", b" ") for line in content.splitlines()
        )
    else:
        content = data.draw(mutated_bytes(content))
    if packed:
        name, content = f"{name}.gz", gzip.compress(content, 1, mtime=0)
        if data.draw(st.booleans()):
            content = data.draw(mutated_bytes(content))
    file = tmp_path / name
    file.write_bytes(content)
    read_prompts(file)


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

TOML = b"""title = "t"
target = "T"
drafts = ["a", "b"]
lookahead = [2, 4]
temperature = 0.5
seed = 1
planted = ["68m", "7b"]
agreement = 0.8

[pipeline]
graphs = [true, false]

[[dataset]]
name = "gsm8k"
format = "gsm8k"
prompt_tokens = 60
"""
RECIPE = b"""[options]
steps = 100
rate = 0.001

[target]
num_hidden_layers = 32

[data]
examples = 10
mean_tokens = 12.5
"""
_TOML_VALUES = st.sampled_from(
    [
        b"0",
        b"-1",
        b"1.5",
        b"nan",
        b"inf",
        b"true",
        b'""',
        b'"x"',
        b"[]",
        b"[[]]",
        b"[1, 'a']",
        b"{}",
        b"{a = 1}",
        b"1979-05-27",
        b"9" * 5000,
        b"[" * 5000,
    ]
)


@st.composite
def mutated_toml(draw: st.DrawFn, text: bytes) -> bytes:
    """Other values for some keys, or other bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(mutated_bytes(text))
    lines = text.split(b"\n")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from([i for i, line in enumerate(lines) if b" = " in line]))
        lines[at] = lines[at].split(b" = ")[0] + b" = " + draw(_TOML_VALUES)
    return b"\n".join(lines)


@examples(60, 4000)
@given(content=mutated_toml(TOML))
@example(content=b"pipeline = 5")
@example(content=b"dataset = [5]")
@example(content=b"drafts = [1]")
@example(content=b"lookahead = ['a']")
@example(content=b"device = [5]")
@example(content=b"a = " + b"[" * 100_000)
@example(content=b"[[dataset]]\nname = 5\n")
@example(content=b"[[dataset]]\nname = 'a'\nfile = 5\n")
@example(content=b"[[dataset]]\nname = 'a'\nprompt_tokens = 'x'\n")
@example(content=b"temperature = nan")
def test_configurations(tmp_path: Path, content) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    try:
        config = load_config(file)
    except ValueError as error:
        check_names(error, file)
        return
    assert isinstance(config, BenchConfig)
    assert all(
        isinstance(name, str)
        for name in (*config.drafts, *config.systems, *config.device, *config.planted, *config.module)
    )
    assert all(isinstance(n, int) for n in (*config.lookahead, *config.stages))
    assert all(0 <= a <= 1 for a in config.agreement)
    assert config.sampling
    assert all(isinstance(d.name, str) and d.typical_tokens >= 1 for d in config.dataset)


@examples(30, 4000)
@given(content=mutated_toml(RECIPE))
@example(content=b"options = 5")
@example(content=b"data = 5")
@example(content=b"target = [1]")
@example(content=b"a = " + b"[" * 100_000)
@example(content=b"data = {examples = 'many'}")
def test_recipes(tmp_path: Path, content) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(content)
    try:
        found = recipe.load(file)
    except ValueError as error:
        check_names(error, file)
        return
    assert all(n is None or (n > 0) for n in (found.examples, found.mean_tokens))


# ---- traces of published runs

_CHAIN = ("small-1B", "large-8B", "target-70B")
PUBLISHED = {
    "plain": {
        "strategy": "greedy", "lookahead_recorded": 0, "models": [{"path": "m/target-70B"}],
        "samples": [{"total_time_s": 1.0, "tokens": 3, "token_times_ms": [120.0, 121.0, 119.0], "watts": 300.0}] * 2,
    },
    "converted": {
        "strategy": "chain", "lookahead_recorded": 8, "models": [{"path": name} for name in _CHAIN],
        "samples": [{"total_time_s": 2.0, "tokens": 6, "stage_step_ms": [[11.0] * 8, [22.0] * 4, [120.0, 420.0]],
                     "accepted_per_verification": [[2, 2, 1, 1], [1, 5]]}] * 2,
    },
    "raw": {
        "metadata": {"strategy": "async-chain", "lookahead": 0, "model_configs": [{"path": name} for name in _CHAIN]},
        "results": [{"metrics": {"total_time": 2.0, "tokens_generated": 6, "model_times": [[0.011] * 8, [0.022] * 4, [0.12, 0.42]],
                                 "accepted_tokens": [[2, 2, 1, 1], [1, 5]]}, "gpustats": [{"gpu_powers": [100.0, 50.0]}]}],
    },
}  # fmt: skip


def read_published(file: Path) -> None:
    try:
        (run,) = published_runs.load(file.parent)
    except ValueError as error:
        check_names(error, file)
        return
    assert run.name
    assert run.label
    assert run.ms_per_token() > 0
    joules = run.joules_per_token()
    assert joules is None or isinstance(joules, float)
    assert all(s.seconds > 0 and s.tokens > 0 for s in run.samples)
    assert all((steps > 0).all() for s in run.samples for steps in s.steps_s)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert published_runs.as_text(published_runs.report([run]))


@examples(60, 4000)
@given(data=st.data(), name=st.sampled_from(sorted(PUBLISHED)))
def test_published_runs(tmp_path: Path, data, name) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(data.draw(mutated_json(PUBLISHED[name])))
    read_published(file)


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


@examples(60, 4000)
@given(data=st.data())
def test_folders_of_results(run_files, data) -> None:
    run, files = run_files
    name = data.draw(st.sampled_from(sorted(files)))
    refuses(run, name, data.draw(mutated_json(json.loads(files[name]))))


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
