"""Runs of ``pipespec bench``: what is measured is kept, compared and continued. No time is asserted."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import baselines, planted, plot
from bench import run as papers
from bench.baselines import EarlyExitContender, OwnLayersContender, kept_layers
from bench.configuration import load_config
from pipespec.bench import runner
from pipespec.bench.config import BenchConfig, with_prompts
from pipespec.bench.contenders import Contender, Family, HFContender, Workload
from pipespec.bench.machine import provenance
from pipespec.bench.results import DatasetSettings, ResultsFolder, Sample, Settings, StepCounts, SystemSettings
from pipespec.bench.runner import PreparedDataset, PreparedRun, Runner, prepare
from pipespec.bench.summary import summarise
from pipespec.bench.systems import KINDS, contender_of, systems_of
from pipespec.cli.main import main
from pipespec.demo import draft_module_path, family_path
from pipespec_spd.draft_module import CONFIG_FILE, anchors_for, types_for

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "bench" / "configs").glob("*.toml"))


@pytest.fixture(autouse=True)
def _baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, row in baselines.BASELINES.items():
        monkeypatch.setitem(KINDS, kind, row)


class Scripted(Contender):
    """Writes a text, and fails or is interrupted at given calls."""

    def __init__(self, system: SystemSettings, calls: list[tuple[str, int]], faults: dict[int, BaseException]) -> None:
        super().__init__(system.key, system.label, "ours")
        self.calls, self.faults, self.settings = calls, faults, ()

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        first = int(ids[0, 0])
        self.calls.append((self.key, first))
        if (fault := self.faults.pop(first, None)) is not None:
            raise fault
        tokens = [first, 2, 3]
        if self.key == "wrong":
            tokens[1] = 9
        stages = [StepCounts("small", 4), StepCounts("target", 2, 3, 4, 2, histogram=(1, 0, 1))]
        return Sample(tokens=tokens, stages=stages, commits=[(0.1, 1), (0.2, 3)], schedule="lockstep")


KEYS = ("hf", "right", "wrong")
WARM_UP = 99
"""The first token of calibration prompts."""


class Trial:
    """Starts a run over three prompts in one folder, as often as asked."""

    def __init__(self, folder: Path, target: LlamaForCausalLM) -> None:
        self.folder, self.target = ResultsFolder(folder), target
        self.calls: list[tuple[str, int]] = []
        self.faults: dict[str, dict[int, BaseException]] = {}

    def prepared(self, keys: Sequence[str] = KEYS, samples: int = 3, **changes: Any) -> PreparedRun:
        names = [str(i) for i in range(samples)]
        data = DatasetSettings(name="set", format="planted", samples=names, new_tokens=3)
        prompts = {n: torch.tensor([[i, 1]]) for i, n in enumerate(names)}
        settings = Settings(
            target="t",
            systems=[SystemSettings(key=key, kind="lockstep", label=key) for key in keys],
            datasets=[data],
            devices={"target": "cpu"},
            machine=provenance(1),
            started="2026-01-01",
            **changes,
        )
        family = Family("test", self.target, {}, None)
        return PreparedRun(settings, family, [PreparedDataset(data, prompts, [torch.tensor([[WARM_UP]])])])

    def start(self, **options: Any) -> Runner:
        self.calls.clear()

        def make(system: SystemSettings) -> Contender:
            return Scripted(system, self.calls, self.faults.setdefault(system.key, {}))

        return Runner(self.prepared(**options), self.folder, make=make)

    def measured(self) -> list[tuple[str, int]]:
        return [call for call in self.calls if call[1] != WARM_UP]


@pytest.fixture
def trial(tmp_path: Path, target: LlamaForCausalLM) -> Trial:
    return Trial(tmp_path / "results", target)


def test_systems_take_turns_and_every_text_is_compared(trial: Trial) -> None:
    summary = trial.start().run()
    a, b, c = KEYS
    assert trial.measured() == [(a, 0), (b, 0), (c, 0), (b, 1), (c, 1), (a, 1), (c, 2), (a, 2), (b, 2)]
    assert summary.complete
    assert [summary.row("set", key).identical for key in KEYS] == [1.0, 1.0, 0.0]
    assert trial.folder.samples["set", "wrong", "1"].differs_at == 1
    row = summary.row("set", "right")
    assert row.accepted_length == {"target": 1.5}
    assert row.acceptance_rate == {"target": 0.5}
    assert summary.baseline == {"set": "hf"}
    assert summarise(trial.folder) == summary
    assert trial.folder.settings().finished is not None


def test_a_second_start_does_nothing_and_more_samples_are_added(trial: Trial) -> None:
    first = trial.start().run()
    kept = (trial.folder.path / "samples.jsonl").read_bytes()
    assert trial.start().run() == first
    assert trial.measured() == []
    assert trial.start(samples=4, keys=(*KEYS, "late")).run().complete
    assert sorted(trial.measured()) == sorted([*((key, 3) for key in KEYS), *(("late", i) for i in range(4))])
    assert (trial.folder.path / "samples.jsonl").read_bytes().startswith(kept)


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interruption_loses_the_sample_in_progress_only(trial: Trial, fault: BaseException) -> None:
    trial.faults = {"wrong": {1: fault}}
    with pytest.raises(type(fault)):
        trial.start().run()
    done = {(s.system, s.sample) for s in trial.folder.samples.values()}
    assert done == {("hf", "0"), ("right", "0"), ("wrong", "0"), ("right", "1")}
    assert not json.loads((trial.folder.path / "summary.json").read_text())["complete"]
    assert not list(trial.folder.path.rglob("*.half"))
    again = trial.start()
    assert again.missing() == 5
    assert again.run().complete
    assert trial.measured() == [("wrong", 1), ("hf", 1), ("wrong", 2), ("hf", 2), ("right", 2)]
    # Compared later with a reference that came after it.
    assert trial.folder.samples["set", "right", "1"].identical is True


def test_a_failure_is_a_sample_with_an_error_that_a_second_start_measures(trial: Trial) -> None:
    trial.faults = {"right": {1: RuntimeError("out of memory\nand more")}}
    summary = trial.start().run()
    assert trial.folder.samples["set", "right", "1"].error == "RuntimeError: out of memory"
    row = summary.row("set", "right")
    assert (row.samples, row.errors, row.identical) == (2, 1, 1.0)
    assert not summary.complete
    assert trial.start().run().complete
    assert trial.measured() == [("right", 1)]


def test_a_system_that_fails_again_and_again_is_left_alone(trial: Trial) -> None:
    trial.faults = {"right": {i: ValueError("never") for i in range(3)}}
    summary = trial.start().run()
    assert [call for call in trial.measured() if call[0] == "right"] == [("right", 0), ("right", 1)]
    assert summary.row("set", "right").not_measured == "ValueError: never"
    assert summary.row("set", "hf").samples == 3


def test_systems_beyond_the_number_that_may_be_open_are_paused_and_warmed_up(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OPEN", 2)
    monkeypatch.setattr(Scripted, "pause", lambda self: trial.calls.append((f"{self.key} paused", 0)))
    assert trial.start().run().complete
    held: list[str] = []
    measured = []
    for key, first in trial.calls:
        name = key.removesuffix(" paused")
        if key.endswith(" paused"):
            held.remove(name)
        elif first == WARM_UP:
            held.append(name)
        else:
            assert name in held
            measured.append(name)
        assert len(held) <= 3
    assert len(measured) == 9
    assert sum(key.endswith(" paused") for key, _ in trial.calls) >= 1


def test_other_settings_are_refused(trial: Trial) -> None:
    trial.start().run()
    with pytest.raises(ValueError, match=r"seed is 0 there and 1 here\. Give another --out"):
        trial.start(seed=1)


def test_the_folder_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"settings\.json does not exist: is .* a folder that"):
        folder.settings()
    (tmp_path / "settings.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="version 99 of the format"):
        folder.settings()
    (tmp_path / "settings.json").write_text('{"target": "t", "colour": 1}')
    with pytest.raises(ValueError, match="unknown fields: colour"):
        folder.settings()


def test_a_sample_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    sample = Sample(
        dataset="mt/bench", system="workers-a+b-L5", sample="HumanEval/0", tokens=[1, 2], commits=[(0.1, 1), (0.2, 2)], seconds=0.2,
        stages=[StepCounts("target", 2, histogram=(1, 1))], phases={"draft": 0.1},
    )  # fmt: skip
    folder.add(sample)
    assert ResultsFolder(tmp_path).samples == {sample.key: sample}
    with pytest.raises(ValueError, match="Out of range"):  # JSON has no NaN
        folder.add(Sample(dataset="a", system="b", sample="c", seconds=float("nan")))


def test_the_last_line_counts_and_half_a_line_does_not(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    for error in ("first", None):
        folder.add(Sample(dataset="d", system="s", sample="1", error=error))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"dataset": "d", "sys')
    folder = ResultsFolder(tmp_path)
    assert [s.error for s in folder.samples.values()] == [None]
    folder.add(Sample(dataset="d", system="s", sample="2"))
    assert list(ResultsFolder(tmp_path).samples) == [("d", "s", "1"), ("d", "s", "2")]


def test_speed_up_is_against_the_strongest_baseline_prompt_by_prompt(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    keys = ("hf", "plain", "ours")
    settings = Settings(
        target="t",
        systems=[SystemSettings(key=key, kind=key, label=key) for key in keys],
        datasets=[DatasetSettings(name="d", format="jsonl", samples=["0", "1"])],
    )
    seconds = {"hf": (4.0, 8.0), "plain": (2.0, 6.0), "ours": (1.0, 2.0)}
    for key, times in seconds.items():
        for i, s in enumerate(times):
            text = Sample(
                dataset="d", system=key, sample=str(i), tokens=[1] * 5, seconds=s, seconds_to_first_token=s / 5
            )
            folder.add(text)
    summary = summarise(folder, settings)
    row = summary.row("d", "ours")
    assert summary.baseline == {"d": "plain"}
    assert row.speedup == 2.5
    assert row.tokens_per_second == 3.75
    assert row.decode_ms_per_token == pytest.approx(300)
    assert summary.row("d", "plain").speedup == 1.0


# ---- systems


def test_a_sweep_has_one_system_per_point() -> None:
    config = BenchConfig(
        systems=("lockstep", "workers", "published-asynchronous", "ngram", "ppsd", "eagle3"),
        lookahead=(0, 2, 5),
        chains="whole",
    )
    systems = systems_of(config, ["a", "b"])
    keys = [s.key for s in systems]
    assert keys[0] == "hf"
    assert {"lockstep-a+b-L2", "workers-a+b-L5", "published-asynchronous-a+b-L0", "ngram-L5"} <= set(keys)
    assert "lockstep-a+b-L0" not in keys  # a draft needs a lookahead of 1
    assert len(keys) == len(set(keys)) == 1 + 2 + 2 + 3 + 2 + 1 + 1
    by_key = {s.key: s for s in systems}
    assert by_key["workers-a+b-L5"].axes == {"lookahead": 5}
    assert by_key["workers-a+b-L5"].lookahead == [5, 5]
    assert by_key["eagle3"].not_measured


def test_defaults_chains_and_further_axes() -> None:
    systems = systems_of(BenchConfig(systems=("lockstep", "workers")), ["a", "b"])
    keys = [s.key for s in systems]
    assert keys[1] == "lockstep-a"
    assert len(keys) == 1 + 2 * 3
    assert {s.lookahead[0] for s in systems if s.kind == "lockstep"} == {4}
    spd = systems_of(BenchConfig(systems=("spd",), stages=(2, 4), drafters=("module", "ngram")), [])
    assert [s.key for s in spd] == ["hf", "spd-module-n2", "spd-ngram-n2", "spd-module-n4", "spd-ngram-n4"]
    assert "--module" in spd[1].not_measured
    sampled = systems_of(BenchConfig(systems=("lookup",), temperature=1.0), [])
    assert [s.key for s in sampled] == ["hf", "plain", "lookup"]


@pytest.mark.parametrize("kind", sorted({*KINDS, *baselines.BASELINES} - {"eagle3"}))
def test_every_kind_has_a_contender(kind: str) -> None:
    systems = systems_of(BenchConfig(systems=(kind,), chains="whole", drafters=("ngram",)), ["small"])
    contender = contender_of(systems[-1])
    assert (contender.key, contender.label) == (systems[-1].key, systems[-1].label)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"systems": ("vllm",)}, "no system 'vllm': there are hf"),
        ({"systems": ("lockstep",)}, "'lockstep' needs a draft"),
        ({"systems": ("spd",), "drafters": ("magic",)}, "no drafter 'magic'"),
    ],
)
def test_systems_that_cannot_be(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        systems_of(BenchConfig(**config), [])


# ---- baselines of own layers


def test_draft_verify_keeps_the_ends_and_evenly_spaced_layers() -> None:
    assert kept_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    with pytest.raises(ValueError, match="a draft of 0 layers"):
        kept_layers(4, 0)


@pytest.mark.parametrize("kind", ["hf", "plain", "published-lockstep"])
def test_end_tokens_can_be_ignored(target: LlamaForCausalLM, kind: str) -> None:
    """A text goes on behind the token that would end it."""
    ids = torch.tensor([[5, 6, 7, 8]])
    given = copy.deepcopy(target)
    first = HFContender("hf", "plain")
    first.start(Workload(Family("test", given, {}, None), 12, 4, 1))
    expected = first.run(ids, 12, 0).tokens
    given.generation_config.eos_token_id = expected[3]
    family = Family("test", given, {"small": given}, None)
    for ignore in (False, True):
        config = BenchConfig(systems=(kind,), ignore_eos=ignore)
        contender = contender_of(systems_of(config, ["small"])[-1])
        contender.start(Workload(family, 12, 4, 1, config.sampling))
        tokens = contender.run(ids, 12, 0).tokens
        assert tokens == (expected if ignore else expected[: expected.index(expected[3]) + 1])
        contender.close()


def test_ppsd_drafts_with_the_first_stage_and_writes_the_target_s_text(target: LlamaForCausalLM) -> None:
    """The layers of the first stage draft through the target's own norm and head, and nothing is trained."""
    workload = Workload(Family("test", target, {}, None), 12, 4, 1, times_commits=True)
    (system,) = [s for s in systems_of(BenchConfig(systems=("ppsd",), stages=(2,)), []) if s.kind == "ppsd"]
    plain, own = HFContender("hf", "plain"), contender_of(system)
    ids = torch.tensor([[5, 6, 7, 8]])
    for contender in (plain, own):
        contender.start(workload)
    drafting = own.pipe.drafter.models[0]
    depth = target.config.num_hidden_layers
    assert drafting.config.num_hidden_layers == depth - depth // 2
    assert drafting.model.layers[0].mlp.up_proj.weight is target.model.layers[0].mlp.up_proj.weight
    text = own.run(ids, 12, 0)
    assert text.tokens == plain.run(ids, 12, 0).tokens
    assert text.cycles > 0
    assert text.stages[-1].drafted > 0
    assert target.config.num_hidden_layers == depth


def test_several_modules_are_rows_that_name_their_anchors(tmp_path: Path) -> None:
    """A module runs in the stages that it was trained for, whatever --stages says."""
    folders = []
    for name, types in (("all", None), ("ends", 2)):
        folder = tmp_path / name
        shutil.copytree(draft_module_path(), folder)
        record = json.loads((folder / CONFIG_FILE).read_text())
        stages = tuple(map(tuple, record["stages"]))
        anchors = anchors_for(stages, types)
        record |= {"anchors": anchors, "types": types_for(stages, anchors)}
        (folder / CONFIG_FILE).write_text(json.dumps(record))
        folders.append(str(folder))
    found = systems_of(
        BenchConfig(systems=("spd",), stages=(2, 3), module=tuple(folders), drafters=("module", "ngram")), []
    )
    assert [s.key for s in found[1:]] == ["spd-all-n4", "spd-ends-n4", "spd-ngram-n2", "spd-ngram-n3"]
    assert [s.axes["anchors"] for s in found[1:3]] == [[0, 3, 6, 9, 11], [0, 11]]
    assert all(s.not_measured is None for s in found)
    twin = tmp_path / "other" / "all"
    shutil.copytree(folders[0], twin)
    found = systems_of(BenchConfig(systems=("spd",), module=(*folders, str(twin)), drafters=("module",)), [])
    assert [s.key for s in found[1:]] == ["spd-all-0-n4", "spd-ends-n4", "spd-all-2-n4"]
    with pytest.raises(FileNotFoundError, match="holds no draft module"):
        systems_of(BenchConfig(systems=("spd",), module=(str(tmp_path / "none"),)), [])


@pytest.mark.parametrize("make", [OwnLayersContender, EarlyExitContender])
def test_self_speculation_writes_the_target_s_text(target: LlamaForCausalLM, make: Callable[[], HFContender]) -> None:
    workload = Workload(Family("test", target, {}, None), 12, 4, 1, times_commits=True)
    plain, own = HFContender("hf", "plain"), make()
    depth, before = target.config.num_hidden_layers, target.generation_config.to_dict()
    ids = torch.tensor([[5, 6, 7, 8]])
    for contender in (plain, own):
        contender.start(workload)
    expected = plain.run(ids, 12, 0).tokens
    for setting in own.settings:
        own.use(setting)
        found = own.run(ids, 12, 0)
        assert found.tokens == expected
        assert found.commits[-1][1] == len(expected)
        assert [s.name for s in found.stages] == ["own layers", "target"]
        assert all(s.steps for s in found.stages)
    own.close()
    assert target.config.num_hidden_layers == depth
    assert target.generation_config.to_dict() == before


# ---- configurations


def test_every_configuration_has_its_systems() -> None:
    for file in CONFIGS:
        config = load_config(file)
        drafts = [f"draft {i}" for i in range(len(config.drafts))]
        assert len(systems_of(config, drafts)) > len(config.systems) / 2
    assert len([f for f in CONFIGS if f.stem.startswith("pipespec")]) >= 3
    assert len([f for f in CONFIGS if f.stem.startswith("spd")]) >= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = 3", "target must be of type str"),
        ("samples = true", "samples must be of type int"),
        ("colour = 1", "unknown fields: colour"),
        ("= 1", "is not TOML"),
        ("[[dataset]]\nformat = 'humaneval'", "dataset lacks the fields name"),
        ("[[dataset]]\nname = 'a'\nformat = 'b'", "no format 'b'"),
        ("new_tokens = 0", "new_tokens must be at least 1"),
        ("temperature = 0.0", "temperature must be above 0"),
        ("drafts = ['ngram']", "add ngram to the systems"),
    ],
)
def test_a_configuration_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(file)


def test_files_of_prompts_find_their_datasets(tmp_path: Path) -> None:
    config = load_config(ROOT / "bench" / "configs" / "pipespec_llama2.toml")
    found = with_prompts(config, ["xsum=x.csv", "mine=a.jsonl", "other/file.jsonl.gz"]).dataset
    assert [(d.name, d.format, str(d.file)) for d in found] == [
        ("xsum", "xsum", "x.csv"),
        ("mine", None, "a.jsonl"),
        ("file", None, "other/file.jsonl.gz"),
    ]
    single = load_config(ROOT / "bench" / "configs" / "pipespec_lookahead.toml")
    assert with_prompts(single, ["questions.jsonl"]).dataset[0].name == "humaneval"
    with pytest.raises(ValueError, match="two files of prompts have the name 'a'"):
        with_prompts(BenchConfig(), ["a.jsonl", "other/a.csv"])


def test_planted_shapes_are_divided_until_they_fit() -> None:
    shapes, divisors = planted.fitted(["1B", "70B"], 1e15, 1e15, 2)
    assert divisors == (1, 1)
    assert shapes["70B"] == planted.SHAPES["70B"]
    shapes, (width, _) = planted.fitted(["1B", "70B"], 1e9, 5e8, 4, least_layers=16)
    assert width > 1
    assert shapes["1B"].vocab_size == shapes["70B"].vocab_size
    assert shapes["70B"].num_hidden_layers >= 16
    layers, embedding = planted.weights_of(shapes["70B"])
    assert 4 * (layers + embedding) <= 5e8
    with pytest.raises(ValueError, match="do not fit"):
        planted.fitted(["1B", "70B"], 1e5, 1e5, 4)


# ---- whole runs


def test_a_planted_run_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(papers, "read_bytes_per_second", lambda threads: 1e10)
    arguments = ["--planted", "tiny-small", "tiny-target", "--agreement", "0.8", "--samples", "2", "--new-tokens", "8", "--threads", "1",
                 "--systems", "hf,plain,assisted,layerskip,draft-verify,lockstep,published-lockstep,spd,ppsd", "--stages", "2", "--tuning", "0",
                 "--out", str(tmp_path / "r")]  # fmt: skip
    assert papers.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "PPSD, 2 stages" in shown
    folder = ResultsFolder(tmp_path / "r")
    summary, settings = summarise(folder), folder.settings()
    assert summary.complete
    measured = [r for r in summary.rows if r.not_measured is None]
    assert len(measured) == 10
    assert all(r.identical == 1.0 and r.samples == 2 for r in measured)
    assert settings.planted["requested"]
    ours = folder.samples["planted", "lockstep-tiny-small", "0"]
    assert len(ours.tokens) == 8 == ours.commits[-1][1]
    assert sum(ours.stages[-1].histogram) == ours.stages[-1].steps
    staged = folder.samples["planted", "spd-ngram-n2", "0"]
    assert staged.phases["stages"] > 0
    assert summary.row("planted", "spd-ngram-n2").equivalent_accepted_length >= 1
    published = folder.samples["planted", "published-lockstep-tiny-small", "0"]
    assert published.commits[-1][1] == 8
    before = (folder.path / "samples.jsonl").read_bytes()
    assert papers.main(arguments) == 0
    assert (folder.path / "samples.jsonl").read_bytes() == before
    pytest.importorskip("matplotlib")
    assert plot.main([str(folder.path)]) == 0
    page = (folder.path / "report.html").read_text()
    assert f"{summary.row('planted', 'lockstep-tiny-small').tokens_per_second:.3f}" in page
    drawn = {path.stem.split("-")[0] for path in folder.path.glob("*.svg")}
    assert drawn == {"speedup", "sweep", "accepted", "time", "spd"}


def test_prompts_that_do_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.jsonl"
    records = [{"question_id": 1, "turns": ["def a():", "def b():"]}, {"question_id": 2, "turns": ["x " * 700]}]
    file.write_text("\n".join(map(json.dumps, records)))
    options = {"target": str(family_path("target")), "dtype": "float32", "systems": ("plain",), "new_tokens": 4}
    config = BenchConfig(threads=1, tuning=0, **options)
    said: list[str] = []
    monkeypatch.setattr(runner, "say", said.append)
    prepared = prepare(with_prompts(config, [str(file)]))
    assert prepared.datasets[0].settings.samples == ["1"]
    assert "1 prompts are left out" in said[0]
    summary = Runner(prepared, ResultsFolder(tmp_path / "out"), tuning=0).run()
    assert summary.complete
    assert summary.row("talk", "plain").identical == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{tmp}/x"], "no prompts: give --prompts FILE"),
        (["--prompts", "{tmp}/none.jsonl", "--out", "{tmp}/x"], "there is no file"),
        (["--prompts", "a.jsonl"], "give --out DIR"),
        (["--draft", "d", "--prompts", "a.jsonl", "--out", "{tmp}/x"], "--draft needs a --target"),
        (["--prompts", "a.jsonl", "--out", "{tmp}"], "holds other files"),
    ],
)
def test_errors_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "note.txt").write_text("mine")
    assert main(["bench", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_the_list_names_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in KINDS)
    assert not [line for line in shown.splitlines() if line != line.rstrip()]


@pytest.fixture
def command(tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that measures the systems of ``trial``."""
    monkeypatch.setattr(runner, "prepare", lambda *a, **k: trial.prepared())
    monkeypatch.setattr(
        runner.Runner.__init__, "__kwdefaults__",
        runner.Runner.__init__.__kwdefaults__ | {"make": lambda s: Scripted(s, trial.calls, trial.faults.get(s.key, {}))},
    )  # fmt: skip
    return ["bench", "--out", str(tmp_path / "results"), "--prompts", "a.jsonl"]


def test_the_command_continues_and_a_wrong_text_in_float32_is_exit_code_1(
    trial: Trial, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trial.faults = {"hf": {1: KeyboardInterrupt()}}
    assert main(command) == 130
    assert "results keeps the complete samples, and the same command continues" in capsys.readouterr().err
    assert main(command) == 1
    assert f"{trial.folder.path} has the results" in capsys.readouterr().err
    assert [first for key, first in trial.measured() if key == "hf"] == [0, 1, 1, 2]
