"""Runs of systems over prompts: what is measured is kept, compared and continued; tables are views of the samples. No time is asserted."""

import copy
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import baselines, planted, plot, run, runner, systems, tables
from bench.baselines import EarlyExitSystem, OwnLayersSystem, kept_layers
from bench.config import BenchConfig, load_config, with_prompts
from bench.machine import provenance
from bench.runner import Dataset, Runner
from bench.samples import ResultsFolder, Sample, StepCounts
from bench.systems import KINDS, Family, HFSystem, PipelineSystem, System, TunedSetting, Workload, systems_of
from pipespec.demo import draft_module_path, family_path
from pipespec_spd.draft_module import CONFIG_FILE, anchors_for, types_for
from tests.conftest import noisy

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "bench" / "configs").glob("*.toml"))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    yield
    torch.set_num_threads(1)


class Scripted(System):
    """Writes a text, and fails or is interrupted at given prompts."""

    def __init__(self, key: str, calls: list[tuple[str, int]], faults: dict[int, BaseException], **about: Any) -> None:
        super().__init__(key, key, "hf" if key == "hf" else "ours", has_drafts=key != "hf", kind="scripted", **about)
        self.calls, self.faults, self.is_heavy = calls, faults, True

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

    def pause(self) -> None:
        self.calls.append((f"{self.key} paused", 0))


KEYS = ("hf", "right", "wrong")
WARM_UP = 99
"""The first token of calibration prompts."""


class Trial:
    """Starts a run over three prompts in one folder, as often as asked."""

    def __init__(self, folder: Path, target: LlamaForCausalLM) -> None:
        self.folder, self.target = ResultsFolder(folder), target
        self.calls: list[tuple[str, int]] = []
        self.faults: dict[str, dict[int, BaseException]] = {}
        self.settings: Sequence[int] = ()

    def start(
        self, keys: Sequence[str] = KEYS, samples: int = 3, seed: int = 0, repeats: int = 1, **options: Any
    ) -> Runner:
        self.calls.clear()
        found = [Scripted(key, self.calls, self.faults.setdefault(key, {})) for key in keys]
        for system in found:
            system.settings = self.settings
        prompts = {str(i): torch.tensor([[i, 1]]) for i in range(samples)}
        data = Dataset("set", "planted", prompts, [torch.tensor([[WARM_UP]])])
        about = {"family": {"name": "test"}, "machine": provenance(1)}
        about["run"] = {"seed": seed, "dtype": "float32", "sampling": {"do_sample": False}, "new_tokens": 3, "repeats": repeats}  # fmt: skip
        return Runner(self.folder, Workload(Family("test", self.target, {}), 3, 2, 1), found, [data], about, **options)

    def measured(self) -> list[tuple[str, int]]:
        return [call for call in self.calls if call[1] != WARM_UP and not call[0].endswith("paused")]


@pytest.fixture
def trial(tmp_path: Path, target: LlamaForCausalLM) -> Trial:
    return Trial(tmp_path / "results", target)


def rows(summary: dict[str, Any]) -> dict[str, tables.Row]:
    return {row.key: row for row in tables.rows_of(summary)}


def test_systems_take_turns_and_every_text_is_compared(trial: Trial) -> None:
    summary = trial.start(repeats=2).run()
    a, b, c = KEYS
    assert trial.measured()[:9] == [(a, 0), (b, 0), (c, 0), (b, 1), (c, 1), (a, 1), (c, 2), (a, 2), (b, 2)]
    assert len(trial.measured()) == 18
    assert summary["complete"]
    found = rows(summary)
    assert [(found[key].identical, found[key].runs) for key in KEYS] == [(6, 6), (6, 6), (0, 6)]
    assert trial.folder.samples["set", "wrong", "1", 1].differs_at == found["wrong"].differs_at == 1
    assert found["right"].accepted_length == {"target": 1.5}
    assert found["right"].acceptance_rate == {"target": 0.5}
    assert found["right"].histogram == [6, 0, 6]
    assert json.loads((trial.folder.path / "summary.json").read_text())["rows"] == json.loads(
        json.dumps(summary["rows"])
    )
    assert trial.folder.settings()["run"]["finished"] is not None
    assert tables.status(summary) == 1  # in float32 a different text is an error


def test_a_second_start_does_nothing_and_more_samples_are_added(trial: Trial) -> None:
    first = trial.start().run()
    kept = (trial.folder.path / "samples.jsonl").read_bytes()
    assert trial.start().run()["rows"] == first["rows"]
    assert trial.measured() == []
    assert trial.start(samples=4, keys=(*KEYS, "late")).run()["complete"]
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
    assert again.run()["complete"]
    assert trial.measured() == [("wrong", 1), ("hf", 1), ("wrong", 2), ("hf", 2), ("right", 2)]
    # Compared later with a reference that came after it.
    assert trial.folder.samples["set", "right", "1", 0].identical is True


def test_a_failure_is_a_sample_with_an_error_that_a_second_start_measures(trial: Trial) -> None:
    trial.faults = {"right": {1: RuntimeError("out of memory\nand more")}}
    summary = trial.start().run()
    assert trial.folder.samples["set", "right", "1", 0].error == "RuntimeError: out of memory"
    row = rows(summary)["right"]
    assert (row.samples, row.errors, row.identical) == (2, 1, 2)
    assert not summary["complete"]
    assert trial.start().run()["complete"]
    assert trial.measured() == [("right", 1)]


def test_a_system_that_fails_again_and_again_is_left_alone(trial: Trial) -> None:
    trial.faults = {"right": {i: ValueError("never") for i in range(3)}}
    found = rows(trial.start().run())
    assert [call for call in trial.measured() if call[0] == "right"] == [("right", 0), ("right", 1)]
    assert found["right"].reason == "ValueError: never"
    assert found["hf"].samples == 3
    assert "Not measured: right (ValueError: never)." in tables.not_measured(list(found.values()))


def test_systems_that_cannot_start_or_hang_have_a_reason(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MIN_TURN_S", 2.0)  # the other systems have to end in this time

    def start(self: Scripted, workload: Workload) -> None:
        if self.key == "wrong":
            raise NotImplementedError("no such schedule")
        if self.key == "right":
            time.sleep(60)
        System.start(self, workload)

    monkeypatch.setattr(Scripted, "start", start)
    found = rows(trial.start(samples=1, limit=1.0).run())
    assert found["wrong"].reason == "no such schedule"
    assert found["right"].reason.startswith("TimeoutError: not over after")
    assert found["hf"].samples == 1
    assert trial.start(samples=1).missing() == 2  # another start tries both again


def test_a_gpu_that_is_lost_ends_the_run(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the system that broke the GPU has failed. The others keep their samples."""
    trial.faults = {"right": {0: RuntimeError("an illegal memory access")}}
    bench = trial.start()

    class OnGpu:
        device = torch.device("cuda")
        config = trial.target.config

    def synchronize() -> None:
        if trial.calls and trial.calls[-1] == ("right", 0):
            raise RuntimeError("CUDA error")

    bench.workload = Workload(Family("test", OnGpu(), {}), 3, 2, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    with pytest.raises(RuntimeError, match="could not be used any more after right had failed"):
        bench.run()
    assert [s.system for s in trial.folder.samples.values()] == ["hf"]


def test_systems_beyond_the_number_that_may_be_open_are_paused_and_warmed_up(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OPEN", 2)
    assert trial.start().run()["complete"]
    held: list[str] = []
    for key, first in trial.calls:
        name = key.removesuffix(" paused")
        if key.endswith(" paused"):
            held.remove(name)
        elif first == WARM_UP:
            held.append(name)
        else:
            assert name in held
        assert len(held) <= 3
    assert len(trial.measured()) == 9
    assert sum(key.endswith(" paused") for key, _ in trial.calls) >= 1


def test_other_settings_are_refused(trial: Trial) -> None:
    trial.start().run()
    with pytest.raises(ValueError, match=r"seed is 0 there and 1 here\. Give another --out"):
        trial.start(seed=1)


def test_tuning_takes_the_best_and_a_second_start_uses_it(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, int]] = []

    def call(self: Runner, system: System, ids: torch.Tensor, new_tokens: int, number: int = 0) -> Sample:
        asked.append((system.setting, new_tokens))
        return Sample(tokens=[1, 2], seconds=1 / system.setting)

    monkeypatch.setattr(Runner, "call", call)
    trial.settings = (2, 5, 4)
    trial.start(keys=("hf",), samples=1, tuning_tokens=2).run()
    # The start; the first call of tuning, which does not count, and a text per setting; one measured text.
    assert asked == [(2, 3), (2, 2), (2, 2), (5, 2), (4, 2), (5, 3)]
    (record,) = trial.folder.settings()["systems"]
    assert record["setting"] == "5"
    assert [t["setting"] for t in record["tuning"]] == ["2", "5", "4"]
    assert [t["tokens_per_second"] for t in record["tuning"]] == pytest.approx([4.0, 10.0, 8.0])
    asked.clear()
    trial.start(keys=("hf",), samples=2).run()
    assert asked == [(2, 3), (5, 3)]


def test_the_time_limit(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round begins only if it can be expected to end in time, but one always runs. Slow systems start early or not at all."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(Runner, "elapsed", property(lambda self: next(clock)))
    bench = trial.start(keys=("hf", "slow"), limit=25.0)
    bench.systems["slow"].slow = True
    summary = bench.run()
    assert {s.sample for s in trial.folder.samples.values()} == {"0"}
    assert rows(summary)["slow"].reason == "not started: the time was over"


# ---- the folder


def test_the_folder_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"settings\.json does not exist: is .* a folder that"):
        folder.settings()
    (tmp_path / "settings.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="version 99 of the format"):
        folder.settings()
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
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
    assert list(ResultsFolder(tmp_path).samples) == [("d", "s", "1", 0), ("d", "s", "2", 0)]


# ---- figures


def summary_of(seconds: dict[str, tuple[float, ...]], **stages: list[StepCounts]) -> dict[str, Any]:
    """The summary of systems that took these seconds for four tokens after each of two prompts, prompt by prompt and then again."""
    groups = {"hf": "hf", "lookup": "hf"}
    known = [
        {"key": key, "label": f"row {key}", "group": groups.get(key, "ours"), "has_drafts": key not in ("hf", "plain")}
        for key in seconds
    ]
    samples = [
        Sample(
            dataset="d", system=key, sample=str(i % 2), repeat=i // 2, tokens=[1] * 4, seconds=s, commits=[(s / 4, 1), (s, 4)],
            stages=stages.get(key, [StepCounts("target", 4, 4)]), identical=key != "wrong", differs_at=2 if key == "wrong" else None,
        )
        for key, times in seconds.items()
        for i, s in enumerate(times)
    ]  # fmt: skip
    settings = {"systems": known, "datasets": [{"name": "d", "prompt_tokens": {"0": 3, "1": 2}}]}
    settings |= {
        "run": {"repeats": 2, "dtype": "float32"},
        "family": {"bytes_per_step": {"target": 10, "small": 4}},
        "bytes_per_second": 100.0,
    }
    return tables.summarise(settings, samples)


def test_figures() -> None:
    staged = [StepCounts("small", 4), StepCounts("target", 2, 4, 3, 2)]
    seconds = {"hf": (4.0, 8.0, 5.0, 8.0), "plain": (2.0, 6.0), "lookup": (2.0, 5.0), "wrong": (1.0, 2.0)}
    found = rows(summary_of(seconds, wrong=staged))
    assert found["hf"].tokens_per_second == 8 / 12.5  # the median of each prompt
    assert found["hf"].vs_plain == found["plain"].speedup == found["lookup"].vs_best_hf == 1
    own = found["wrong"]
    assert (own.vs_plain, own.worst, own.vs_best_hf, own.speedup) == pytest.approx((12.5 / 3, 4, 7 / 3, 8 / 3))
    assert (own.identical, own.runs, own.differs_at) == (0, 2, 2)
    assert own.accepted_length == {"target": 2.0}
    assert own.acceptance_rate == {"target": pytest.approx(2 / 3)}
    assert own.weights_of_copy == pytest.approx(2 * (4 * 4 + 2 * 10) / 3 / 100)
    assert own.of_floor == pytest.approx(8 / 3 / 10)
    assert own.seconds_to_first_token == pytest.approx(0.375)
    assert own.decode_tokens_per_second == pytest.approx(6 / 2.25)
    heads, *lines = tables.lines_of(list(found.values()))
    shown = dict(zip(heads, lines[-1], strict=True))
    assert (shown[""], shown["tokens/s"], shown["same text"], shown["acceptance"]) == (
        "row wrong",
        "2.7",
        "0/2, differs at 2",
        "0.67",
    )
    words = "\n".join(tables.verdict(list(found.values())))
    assert "Ours at its best: row wrong, 2.33 times the best of the others (row lookup)" in words
    assert "Not always the same text: row wrong" in words


def test_slower_rows_are_named() -> None:
    found = tables.rows_of(summary_of({"hf": (1.0, 1.0), "a": (1.25, 1.25), "b": (1.1, 1.1)}))
    lines = tables.verdict(found)
    assert lines[0] == "WE LOSE, even at our best: row b, 0.91 times the best of the others (row hf)."
    assert "row a 0.80x" in lines[1]
    assert lines[2] == "Slower than plain decoding: row a; row b."
    assert tables.verdict(found[:1]) == ["Nothing to compare: none of ours ran."]


def test_a_committed_summary_of_earlier_versions_is_read(tmp_path: Path) -> None:
    record = json.loads((ROOT / "bench/results/generate_cpu.json").read_text())
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generate:begin -->\nan earlier table\n<!-- generate:end -->\nafter\n")
    assert tables.main([str(ROOT / "bench/results/generate_cpu.json"), "--docs", str(page)]) == 0
    written = page.read_text()
    assert written.startswith("before\n")
    assert "an earlier table" not in written
    assert all(f"| {row['label']} |" in written for row in record["rows"] if row["reason"] is None)


# ---- systems


def test_a_sweep_has_one_system_per_point() -> None:
    config = BenchConfig(
        systems=("lockstep", "workers", "published-asynchronous", "ngram", "ppsd", "eagle3"),
        lookahead=(0, 2, 5),
        chains="whole",
    )
    found = systems_of(config, ["a", "b"])
    keys = [s.key for s in found]
    assert keys[0] == "hf"
    assert {"lockstep-a+b-L2", "workers-a+b-L5", "published-asynchronous-a+b-L0", "ngram-L5"} <= set(keys)
    assert "lockstep-a+b-L0" not in keys  # a draft needs a lookahead of 1
    assert len(keys) == len(set(keys)) == 1 + 2 + 2 + 3 + 2 + 1 + 1
    by_key = {s.key: s for s in found}
    assert by_key["workers-a+b-L5"].record()["axes"] == {"lookahead": 5}
    assert by_key["workers-a+b-L5"].record()["options"] == {"lookahead": [5, 5]}
    assert by_key["eagle3"].reason


def test_defaults_chains_and_further_axes() -> None:
    found = systems_of(BenchConfig(systems=("lockstep", "workers")), ["a", "b"])
    keys = [s.key for s in found]
    assert keys[1] == "lockstep-a"
    assert len(keys) == 1 + 2 * 3
    spd = systems_of(BenchConfig(systems=("spd",), stages=(2, 4), drafters=("module", "ngram")), [])
    assert [s.key for s in spd] == ["hf", "spd-module-n2", "spd-ngram-n2", "spd-module-n4", "spd-ngram-n4"]
    assert "--module" in spd[1].reason
    sampled = systems_of(BenchConfig(systems=("lookup",), temperature=1.0), [])
    assert [s.key for s in sampled] == ["hf", "plain", "lookup"]


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


def test_systems_do_not_see_each_others_attention(target: LlamaForCausalLM, trial: Trial) -> None:
    trial.target = copy.deepcopy(target)
    bench, config = trial.start(), trial.target.config
    first = config._attn_implementation
    a, b, _ = bench.systems.values()
    with bench.turn(a):
        config._attn_implementation = "eager"
    assert config._attn_implementation == first
    with bench.turn(b):
        assert config._attn_implementation == first
    with bench.turn(a):
        assert config._attn_implementation == "eager"


def test_systems_leave_shared_models_as_they_were(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems with processes get private copies of the drafts, whose weights they move into shared memory."""
    given: list[Sequence[LlamaForCausalLM]] = []

    def asynchronous(models: Sequence[LlamaForCausalLM], *_: object) -> baselines.Lockstep:
        given.append(models)
        return baselines.Lockstep(models, 3)

    class Workers(systems.Pipeline):
        def __init__(self, model: LlamaForCausalLM, drafts: Sequence[LlamaForCausalLM], schedule: str, **_: object):
            given.append((*drafts, model))
            super().__init__(model, drafts, schedule="lockstep")

    monkeypatch.setattr(baselines, "Asynchronous", asynchronous)
    monkeypatch.setattr(systems, "Pipeline", Workers)
    draft = noisy(target, 0.05)
    family = Family("test", copy.deepcopy(target), {"small": draft})
    config = BenchConfig(systems=("workers", "published-asynchronous"))
    for system in systems_of(config, ["small"])[1:]:
        system.start(Workload(family, 6, 3, 1))
        assert system.run(torch.tensor([[5, 6, 7]]), 6, 0).tokens
        system.close()
    assert len(given) == 2
    for models in given:
        assert models[0] is not draft
        assert models[-1] is family.target  # stays in this process


def test_rows_in_one_process_are_tuned_over_threads(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    plain, workload = HFSystem("hf", "HF generate()"), Workload(Family("test", target, {}), 4, 3, 3)
    plain.start(workload)
    assert plain.settings == [TunedSetting(3), TunedSetting(1), TunedSetting(2)]
    plain.use(plain.settings[1])
    assert (str(plain.setting), plain.threads) == ("1 thread", 1)
    ours = PipelineSystem("plain", "target alone", "plain")
    ours.start(workload)
    assert ours.settings == plain.settings
    ours.close()
    lookup = HFSystem("lookup", "HF prompt lookup")
    lookup.start(Workload(Family("test", target, {}), 4, 3, 1))
    assert [str(s) for s in lookup.settings][:2] == ["3 draft tokens, 1 thread", "3 draft tokens, 2 threads"]


# ---- baselines of own layers


def test_draft_verify_keeps_the_ends_and_evenly_spaced_layers() -> None:
    assert kept_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    with pytest.raises(ValueError, match="a draft of 0 layers"):
        kept_layers(4, 0)


@pytest.mark.parametrize("kind", ["hf", "plain", "published-lockstep"])
def test_end_tokens_can_be_ignored(target: LlamaForCausalLM, kind: str) -> None:
    """A text goes on after the token that would end it."""
    ids = torch.tensor([[5, 6, 7, 8]])
    given = copy.deepcopy(target)
    first = HFSystem("hf", "plain")
    first.start(Workload(Family("test", given, {}), 12, 4, 1))
    expected = first.run(ids, 12, 0).tokens
    given.generation_config.eos_token_id = expected[3]
    family = Family("test", given, {"small": given})
    for ignore in (False, True):
        config = BenchConfig(systems=(kind,), ignore_eos=ignore)
        contender = systems_of(config, ["small"])[-1]
        contender.start(Workload(family, 12, 4, 1, config.sampling))
        tokens = contender.run(ids, 12, 0).tokens
        assert tokens == (expected if ignore else expected[: expected.index(expected[3]) + 1])
        contender.close()


def test_ppsd_drafts_with_the_first_stage_and_writes_the_target_s_text(target: LlamaForCausalLM) -> None:
    """The layers of the first stage draft through the target's own norm and head, and nothing is trained."""
    workload = Workload(Family("test", target, {}), 12, 4, 1)
    plain, own = systems_of(BenchConfig(systems=("ppsd",), stages=(2,)), [])
    ids = torch.tensor([[5, 6, 7, 8]])
    for contender in (plain, own):
        contender.start(workload)
    drafting = own.pipe.drafter.model
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
    assert [s.record()["axes"]["anchors"] for s in found[1:3]] == [[0, 3, 6, 9, 11], [0, 11]]
    twin = tmp_path / "other" / "all"
    shutil.copytree(folders[0], twin)
    found = systems_of(BenchConfig(systems=("spd",), module=(*folders, str(twin)), drafters=("module",)), [])
    assert [s.key for s in found[1:]] == ["spd-all-0-n4", "spd-ends-n4", "spd-all-2-n4"]
    with pytest.raises(FileNotFoundError, match="holds no draft module"):
        systems_of(BenchConfig(systems=("spd",), module=(str(tmp_path / "none"),)), [])


@pytest.mark.parametrize("make", [OwnLayersSystem, EarlyExitSystem])
def test_self_speculation_writes_the_target_s_text(
    target: LlamaForCausalLM, make: Callable[[str, str], HFSystem]
) -> None:
    workload = Workload(Family("test", target, {}), 12, 4, 1)
    plain, own = HFSystem("hf", "plain"), make("own", "own layers")
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
    shapes, (width, _) = planted.fitted(["1B", "70B"], 1e9, 5e8, 4, min_layers=16)
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
    monkeypatch.setattr(run, "read_bytes_per_second", lambda threads: 1e10)
    monkeypatch.setattr(run, "POSITIONS", 96)
    kinds = ["hf", "plain", "assisted", "layerskip", "draft-verify", "lockstep", "published-lockstep", "spd", "ppsd", "eagle3"]  # fmt: skip
    arguments = ["--planted", "tiny-small", "tiny-target", "--agreement", "0.8", "--samples", "2", "--new-tokens", "12", "--threads", "1",
                 "--systems", *kinds, "--stages", "2", "--tuning", "0", "--out", str(tmp_path / "r")]  # fmt: skip
    assert run.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "PPSD, 2 stages" in shown
    assert "Not measured: eagle3 (its draft head has to be trained" in shown
    assert "times the best of the others" in shown
    assert "Agreement with the target measured over 96 positions" in shown
    folder = ResultsFolder(tmp_path / "r")
    summary = json.loads((folder.path / "summary.json").read_text())
    assert (summary["complete"], "target" in summary["family"]) == (True, False)
    found = rows(summary)
    assert len(found) == 11
    assert all(r.identical == r.runs == r.samples == 2 for r in found.values() if r.key != "eagle3")
    assert found["hf"].accepted_length == {"target": 1.0}
    assert 1 < found["assisted-tiny-small"].accepted_length["target"] <= 12
    assert 1 < found["published-lockstep-tiny-small"].accepted_length["target"] <= 12
    assert found["hf"].weights_of_copy > 0
    assert summary["family"]["planted"]["requested"]
    assert {"commit", "date", "cpu", "cores", "threads", "torch", "transformers"} <= set(summary["machine"])
    ours = folder.samples["planted", "lockstep-tiny-small", "0", 0]
    assert len(ours.tokens) == 12 == ours.commits[-1][1]
    assert sum(ours.stages[-1].histogram) == ours.stages[-1].steps
    assert folder.samples["planted", "spd-ngram-n2", "0", 0].phases["stages"] > 0
    assert found["spd-ngram-n2"].equivalent_accepted_length >= 1
    assert folder.samples["planted", "published-lockstep-tiny-small", "0", 0].commits[-1][1] == 12
    before = (folder.path / "samples.jsonl").read_bytes()
    assert run.main(arguments) == 0
    assert (folder.path / "samples.jsonl").read_bytes() == before
    pytest.importorskip("matplotlib")
    assert plot.main([str(folder.path)]) == 0
    page = (folder.path / "report.html").read_text()
    assert f"{found['lockstep-tiny-small'].tokens_per_second:.3f}" in page
    drawn = {path.stem.split("-")[0] for path in folder.path.glob("*.svg")}
    assert drawn == {"speedup", "sweep", "accepted", "spd"}
    assert plot.main([str(folder.path / "summary.json")]) == 0
    assert "<svg" in (folder.path / "summary.svg").read_text()


def test_a_sampled_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "read_bytes_per_second", lambda threads: 1e10)
    arguments = ["--planted", "tiny-small", "tiny-target", "--no-calibrated", "--temperature", "0.9", "--seed", "3", "--samples", "1", "--tuning", "0",
                 "--new-tokens", "8", "--threads", "1", "--systems", "lockstep", "published-lockstep", "--out", str(tmp_path / "r")]  # fmt: skip
    assert run.main(arguments) == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["family"]["planted"]["measured"] is None
    found = rows(summary)
    assert found["lockstep-tiny-small"].identical == found["plain"].identical == 1
    assert found["hf"].identical is None  # other random numbers
    assert found["hf"].tokens_per_second
    assert "greedy only" in found["published-lockstep-tiny-small"].reason


def test_prompts_that_do_not_fit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "read_bytes_per_second", lambda threads: 1e10)
    file = tmp_path / "talk.jsonl"
    records = [{"question_id": 1, "turns": ["def a():", "def b():"]}, {"question_id": 2, "turns": ["x " * 700]}]
    file.write_text("\n".join(map(json.dumps, records)))
    config = BenchConfig(
        target=str(family_path("target")), dtype="float32", systems=("plain",), new_tokens=4, threads=1, tuning=0
    )
    said: list[str] = []
    monkeypatch.setattr(run, "say", said.append)
    bench = run.prepare(with_prompts(config, [str(file)]), ResultsFolder(tmp_path / "out"))
    assert list(bench.datasets[0].prompts) == ["1"]
    assert "1 prompts are left out" in said[0]
    summary = bench.run()
    assert summary["complete"]
    assert rows(summary)["plain"].identical == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--target", "t", "--out", "{tmp}/x"], ValueError, "no prompts: give --prompts FILE"),
        (["--prompts", "{tmp}/none.jsonl", "--out", "{tmp}/x"], FileNotFoundError, "there is no file"),
        (["--drafts", "d", "--prompts", "a.jsonl", "--out", "{tmp}/x"], ValueError, "--drafts needs a --target"),
        (["--prompts", "a.jsonl"], SystemExit, "give --out DIR"),
        (["--prompts", "a.jsonl", "--out", "{tmp}"], SystemExit, "holds other files"),
        (["--planted", "--out", "{tmp}/x"], SystemExit, "name the shapes"),
    ],
)
def test_errors_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], error: type[BaseException], message: str
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "read_bytes_per_second", lambda threads: 1e10)
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(error) as raised:
        run.main([a.format(tmp=tmp_path) for a in arguments])
    assert message in str(raised.value) + capsys.readouterr().err


def test_the_list_names_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in KINDS)
    assert not [line for line in shown.splitlines() if line != line.rstrip()]
