"""The end-to-end benchmark: its figures from scripted runs, failures as rows, and a real run of all rows. No time is asserted."""

from __future__ import annotations

import copy
import json
import math
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import baselines, bench_generate
from bench.baselines import all_contenders
from bench.bench_generate import (
    DeviceComparison,
    DeviceMeasurement,
    cells,
    main,
    markdown,
    results_of,
    rows_of,
    verdict,
)
from bench.planted import bytes_per_step
from pipespec.bench import contenders
from pipespec.bench.comparison import IsolatedComparison, footnotes
from pipespec.bench.contenders import (
    Contender,
    Family,
    HFContender,
    PipelineContender,
    TunedSetting,
    Workload,
)
from pipespec.bench.results import Sample, StepCounts
from tests.conftest import noisy

TEXTS = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])]


class Scripted(Contender):
    """Generates a given text in a given time."""

    def __init__(self, key: str, group: str, speed: float, text: Sequence[int] = (1, 2, 3, 4), **options: Any) -> None:
        super().__init__(key, f"row {key}", group, options.get("drafts", ()))
        self.speed, self.text = speed, list(text)
        self.settings = options.get("settings", ())
        self.fails_at: int | None = options.get("fails_at")
        self.refuses: str | None = options.get("refuses")
        self.stages = options.get("stages", (StepCounts("target", 2, len(self.text)),))
        self.calls = self.closed = 0

    def start(self, workload: Workload) -> None:
        if self.refuses:
            raise NotImplementedError(self.refuses)
        super().start(workload)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("out of luck\nand more")
        return Sample(tokens=self.text, stages=list(self.stages))

    def seconds(self) -> float:
        return len(self.text) / (self.speed * (self.setting or 1))

    def close(self) -> None:
        self.closed += 1


class ScriptedBench(DeviceComparison):
    """Every call takes the time of its contender's script."""

    clock = 0.0

    def run(self, contender: Contender, ids: torch.Tensor, new_tokens: int | None = None) -> Sample | None:
        text = super().run(contender, ids, new_tokens)
        assert isinstance(contender, Scripted)
        self.clock += contender.seconds()
        if text is not None:
            text.seconds = contender.seconds()
        return text

    @property
    def elapsed(self) -> float:
        return self.clock


@pytest.fixture
def make(target: LlamaForCausalLM) -> Callable[..., ScriptedBench]:
    def made(*contestants: Contender, limit: float = math.inf, rate: float = 1e9) -> ScriptedBench:
        family = Family("test", target, {"small": noisy(target, 0.05)}, None)
        bench = ScriptedBench(Workload(family, 4, 3, 1), contestants, rate, limit=limit)
        bench.start(TEXTS[0])
        return bench

    return made


def run_all(bench: DeviceComparison, repeats: int) -> None:
    for _ in bench.measure(TEXTS, repeats):
        pass


def by_key(bench: DeviceComparison) -> dict[str, DeviceMeasurement]:
    return {result.key: result for result in bench.device_results()}


def test_figures(make: Callable[..., ScriptedBench], target: LlamaForCausalLM) -> None:
    rate = 1e6
    ours = Scripted("ours", "ours", 30.0, [1, 2, 9, 4], stages=(StepCounts("small", 4), StepCounts("target", 2, 4)))
    bench = make(Scripted("plain", "hf", 10.0), Scripted("lookup", "hf", 20.0), ours, rate=rate)
    run_all(bench, 3)
    found = by_key(bench)
    assert found["ours"].repeats == pytest.approx((30.0,) * 3)
    assert found["ours"].vs_plain == pytest.approx(3.0)
    assert found["ours"].vs_best_hf == pytest.approx(1.5)
    assert found["lookup"].vs_best_hf == pytest.approx(1.0)
    assert (found["ours"].identical, found["ours"].runs, found["ours"].differs_at) == (0, 6, 2)
    assert (found["plain"].identical, found["plain"].differs_at) == (6, None)
    assert found["ours"].accepted_length == {"target": 2.0}
    of_target = bytes_per_step(target)
    assert of_target == bench.bytes["target"] == bench.bytes["small"]
    assert found["ours"].weights_of_copy == pytest.approx(6 * of_target / (4 / 30.0) / rate)
    assert found["ours"].of_floor == pytest.approx(30.0 / (rate / of_target))
    assert cells(found["ours"])[:6] == ("row ours", "30.0", "3.00x", "1.50x", "0/6, differs at 2", "2.00")
    assert cells(found["ours"])[-2:] == ("-", "-")
    words = "\n".join(verdict(bench.results()))
    assert "Ours at its best: row ours, 1.50 times the best of the others (row lookup)" in words
    assert "Not always the same text: row ours" in words


def test_slower_rows_are_named(make: Callable[..., ScriptedBench]) -> None:
    bench = make(Scripted("plain", "hf", 10.0), Scripted("a", "ours", 8.0), Scripted("b", "ours", 9.0))
    run_all(bench, 1)
    lines = verdict(bench.results())
    assert lines[0] == "WE LOSE, even at our best: row b, 0.90 times the best of the others (row plain)."
    assert "row a 0.80x" in lines[1]
    assert lines[2] == "Slower than plain generate(): row a; row b."
    assert verdict(bench.results()[:1]) == ["Nothing to compare: none of ours ran."]


def test_failures_are_rows(make: Callable[..., ScriptedBench]) -> None:
    late = Scripted("late", "ours", 5.0, fails_at=4)  # warm-up, one round, then the failure
    refusing = [Scripted(key, "ours", 5.0, refuses="no such schedule") for key in ("x", "y")]
    bench = make(
        Scripted("plain", "hf", 10.0), late, *refusing, Scripted("tuned", "hf", 9.0, settings=(1, 2), fails_at=3)
    )
    bench.tune(TEXTS, None)
    run_all(bench, 2)
    found = by_key(bench)
    assert found["plain"].tokens_per_second == pytest.approx(10.0)
    assert late.calls == 4
    assert found["late"].reason == found["tuned"].reason == "RuntimeError: out of luck"
    assert found["x"].reason == "NotImplementedError: no such schedule"
    assert found["late"].tokens_per_second is None
    assert late.closed == refusing[0].closed == 1
    assert "Not measured: row x; row y (NotImplementedError: no such schedule)." in footnotes(bench.results())
    assert cells(found["late"])[1] == "-"
    text = markdown(bench.device_results())
    assert "| row plain |" in text
    assert "| row late" not in text
    bench.close()
    assert late.closed == 1


def test_a_gpu_that_is_lost(make: Callable[..., ScriptedBench], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the contender that broke the GPU has failed. The others keep their measurements, and nothing more runs."""
    breaks = Scripted("breaks", "ours", 5.0, fails_at=3)  # warm-up, one round, then the failure, before the others
    bench = make(Scripted("plain", "hf", 10.0), breaks, Scripted("after", "ours", 9.0))
    bench.device = types.SimpleNamespace(type="cuda")  # type: ignore[assignment]

    def synchronize() -> None:
        if breaks.calls == breaks.fails_at:
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    rounds: list[float] = []
    for _ in bench.measure(TEXTS, 3):
        rounds.append(bench.elapsed)
    found = by_key(bench)
    assert found["breaks"].reason == "RuntimeError: out of luck"
    assert [found[key].tokens_per_second for key in ("plain", "after")] == pytest.approx([10.0, 9.0])
    assert len(rounds) == 2
    assert len(bench.runs["after"]) == len(bench.runs["plain"]) == 1
    late = DeviceComparison(bench.workload, [Scripted("late", "ours", 1.0)], 1e9)
    late.lost = "the GPU could not be used any more"
    late.start(TEXTS[0])
    assert by_key(late)["late"].reason == late.lost


def test_a_contender_that_hangs_fails(make: Callable[..., ScriptedBench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_generate, "LEAST_TURN_S", 2.0)  # the other contender has to end in this time

    class Hanging(Scripted):
        def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
            time.sleep(60)
            raise AssertionError("the time limit did not end this")

    bench = make(Hanging("hangs", "ours", 10.0), Scripted("plain", "hf", 10.0), limit=1.0)
    assert bench.reasons["hangs"].startswith("TimeoutError: not over after")
    assert "plain" not in bench.reasons


def test_contenders_leave_shared_state_as_it_was(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a turn of each contender, attention, the draft's memory and the threads of this process are as before."""
    given: list[Sequence[LlamaForCausalLM]] = []

    def asynchronous(models: Sequence[LlamaForCausalLM], *_: object) -> baselines.Lockstep:
        given.append(models)  # would move the weights to send them to its processes
        return baselines.Lockstep(models, 3)

    class Workers(contenders.Pipeline):
        def __init__(self, model: LlamaForCausalLM, drafts: Sequence[LlamaForCausalLM], schedule: str, **options: Any):
            if schedule == "workers":
                given.append((*drafts, model))
            super().__init__(model, drafts, schedule="lockstep" if schedule == "workers" else schedule, **options)

    monkeypatch.setattr(baselines, "Asynchronous", asynchronous)
    monkeypatch.setattr(contenders, "Pipeline", Workers)
    draft = noisy(target, 0.05)
    family = Family("test", copy.deepcopy(target), {"small": draft}, None)
    workload = Workload(family, 6, 3, 1)
    changing = ("workers", "reference-asynchronous")
    contestants = [c for c in all_contenders(["small"]) if c.key.startswith(changing)]
    assert len(contestants) == len(changing)

    def state() -> object:
        attention = [model.config._attn_implementation for model in family.models.values()]
        # Captured steps merge weights in place, which moves them within this process.
        weights = [p for model in family.models.values() for p in model.parameters()]
        places = [(p.is_shared(), p.is_contiguous(), p.sum().item()) for p in weights]
        return attention, places, torch.get_num_threads()

    before = state()
    bench = DeviceComparison(workload, contestants, 1e9)
    try:
        bench.start(TEXTS[0])
        assert not bench.reasons
        assert state() == before
        assert len(given) == 2
        for models in given:
            assert models[0] is not draft
            assert models[-1] is family.target  # stays in this process
        for contestant in contestants:
            bench.run(contestant, TEXTS[1])
        assert state() == before
    finally:
        bench.close()


def test_tuning_takes_the_best(make: Callable[..., ScriptedBench]) -> None:
    contender = Scripted("assisted", "hf", 3.0, settings=(2, 5, 4))
    bench = make(Scripted("plain", "hf", 10.0), contender)
    bench.tune(TEXTS, None)
    assert contender.setting == 5
    tried = bench.tuning["assisted"]
    assert [t["setting"] for t in tried] == ["2", "5", "4"]
    assert [t["tokens_per_second"] for t in tried] == pytest.approx([6.0, 15.0, 12.0])
    bench.tune(TEXTS, 1)
    assert contender.setting == 2


def test_the_time_limit(make: Callable[..., ScriptedBench]) -> None:
    """Each run takes 0.4 s. A round begins only if it fits, but one always runs. Beside a complete repeat, an incomplete one does not count."""
    slow = Scripted("slow", "ours", 10.0)
    slow.slow = True
    bench = make(Scripted("plain", "hf", 10.0), Scripted("b", "ours", 10.0), slow, limit=1.0)
    assert bench.reasons == {"slow": "not started: the time was over"}
    bench = make(Scripted("plain", "hf", 10.0), Scripted("b", "ours", 10.0), limit=3.5)
    run_all(bench, 9)  # 0.8 s have passed; three rounds of 0.8 s fit
    assert sorted(bench.runs["b"]) == [(0, 0), (0, 1), (1, 0)]
    assert len(by_key(bench)["b"].repeats) == 1
    bench = make(Scripted("plain", "hf", 10.0), limit=0.5)
    run_all(bench, 2)
    assert list(bench.runs["plain"]) == [(0, 0)]


def test_first_token_and_decoding_are_separate(make: Callable[..., ScriptedBench]) -> None:
    """A call takes a second and 0.1 s per token. The second counts in tokens/s and not in the decoding rate."""

    class Prefilling(Scripted):
        def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
            self.text = [7] * new_tokens
            return super().run(ids, new_tokens, seed)

        def seconds(self) -> float:
            return 0.9 + 0.1 * len(self.text)

    bench = make(Prefilling("plain", "hf", 1.0), Scripted("late", "ours", 1.0, fails_at=2))
    bench.measure_first_token(TEXTS)
    run_all(bench, 2)
    found = by_key(bench)
    assert found["plain"].seconds_to_first_token == pytest.approx(1.0)
    assert found["plain"].decode_tokens_per_second == pytest.approx(10.0)
    assert found["plain"].tokens_per_second == pytest.approx(4 / 1.3)
    assert cells(found["plain"])[-2:] == ("1000.0", "10.0")
    assert found["late"].seconds_to_first_token is None
    assert found["late"].reason


def test_tuning_may_generate_less(make: Callable[..., ScriptedBench]) -> None:
    asked: list[int] = []

    class Asked(Scripted):
        def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Sample:
            asked.append(new_tokens)
            return super().run(ids, new_tokens, seed)

    bench = make(Asked("plain", "hf", 1.0, settings=(1,)))
    bench.tuning_tokens = 2
    bench.tune(TEXTS)
    run_all(bench, 1)
    # The start; the first call of tuning, which does not count, and two texts; two measured texts.
    assert asked == [4, 2, 2, 2, 4, 4]


def test_contenders_do_not_see_each_others_attention(target: LlamaForCausalLM) -> None:
    model = copy.deepcopy(target)
    first = model.config._attn_implementation
    a, b = (HFContender(key, key) for key in "ab")
    compared = IsolatedComparison(Workload(Family("one", model, {}, None), 4, 4, 1), [a, b])
    with compared.turn(a):
        model.config._attn_implementation = "eager"
    assert model.config._attn_implementation == first
    with compared.turn(b):
        assert model.config._attn_implementation == first
    with compared.turn(a):
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("captured", [True, False])
def test_all_contenders(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    """Captured schedules are for GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: captured)
    keys = [c.key for c in all_contenders(["1B", "3B"])]
    assert len(set(keys)) == len(keys)
    for chain in ("1B", "3B", "1B+3B"):
        for kind in ("reference-asynchronous", "reference-lockstep", "lockstep", "workers"):
            assert f"{kind}-{chain}" in keys
        for kind in ("lockstep-graphs", "streams"):
            assert (f"{kind}-{chain}" in keys) == captured
    assert {"plain", "static", "lookup", "assisted-1B", "assisted-3B", "ours-plain"} < set(keys)
    assert ("ours-plain-graphs" in keys) == captured


def test_rows_are_chosen_by_parts_of_their_keys() -> None:
    assert [c.key for c in rows_of(["static"], ["a"])] == ["plain", "static"]
    assert {c.key for c in rows_of(["lockstep-a"], ["a"])} == {"plain", "lockstep-a", "reference-lockstep-a"}


def test_rows_in_one_process_are_tuned_over_threads(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    plain = HFContender("plain", "HF generate()")
    plain.start(Workload(Family("test", target, {}, None), 4, 3, 3))
    assert plain.settings == [TunedSetting(3), TunedSetting(1), TunedSetting(2)]
    assert str(plain.setting) == "3 threads"
    plain.use(plain.settings[1])
    assert plain.threads == 1
    ours = PipelineContender("ours-plain", "ours, target alone", "plain")
    ours.start(plain.workload)
    assert ours.settings == plain.settings
    ours.close()
    lookup = HFContender("lookup", "HF prompt lookup")
    lookup.start(Workload(Family("test", target, {}, None), 4, 3, 1))
    assert [str(s) for s in lookup.settings][:2] == ["3 draft tokens, 1 thread", "3 draft tokens, 2 threads"]


ARGUMENTS = ["--planted", "tiny-small", "tiny-target", "--prompts", "1", "--repeats", "1", "--new-tokens", "12"]
ARGUMENTS += ["--prompt-tokens", "8", "--settings", "1", "--threads", "1"]
ARGUMENTS += ["--rows", "assisted", "lock", "lookup", "ours", "streams"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    yield
    torch.set_num_threads(1)


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_generate, "read_bytes_per_second", lambda threads: 1e10)
    monkeypatch.setattr(bench_generate, "POSITIONS", 96)
    page, file = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text("before\n<!-- planted-float32:begin -->\nan earlier table\n<!-- planted-float32:end -->\nafter\n")
    assert main([*ARGUMENTS, "--json", str(file), "--docs", str(page)]) == 0
    record = json.loads(file.read_text())
    rows = {row.key: row for row in results_of(record)}
    for key in (
        "plain",
        "assisted-tiny-small",
        "lookup",
        "reference-lockstep-tiny-small",
        "ours-plain",
        "lockstep-ngram",
        "lockstep-tiny-small",
    ):
        row = rows[key]
        assert row.reason is None, row.reason
        assert row.identical == row.runs == 1, key
    assert rows["plain"].accepted_length == {"target": 1.0}
    assert rows["lockstep-tiny-small"].accepted_length["target"] >= 1  # the controller may let the draft rest
    for key in ("assisted-tiny-small", "reference-lockstep-tiny-small"):
        assert 1 < rows[key].accepted_length["target"] <= 12
    assert {"commit", "date", "cpu", "cores", "threads", "torch", "transformers"} <= set(record["machine"])
    assert record["tuning"]["lookup"][0]["setting"] == "3 draft tokens, 1 thread"
    assert record["family"]["planted"]["measured"]["positions"] == 96
    out = capsys.readouterr().out
    assert "times the best of the others" in out
    assert "Agreement with the target measured over 96 positions" in out
    written = page.read_text()
    assert written.startswith("before\n")
    assert "| HF generate() |" in written
    assert "an earlier table" not in written
    assert "<svg" in file.with_suffix(".svg").read_text()
    # An earlier measurement, shown again.
    assert main(["--from", str(file)]) == 0
    assert capsys.readouterr().out == out
    record["rows"][-1] = record["rows"][0] | {"identical": 0, "group": "ours"}
    file.write_text(json.dumps(record))
    assert main(["--from", str(file)]) == 1  # in float32 a different text is an error


def test_a_sampled_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_generate, "read_bytes_per_second", lambda threads: 1e10)
    file = tmp_path / "out.json"
    options = ["--uncalibrated", "--first-token", "--temperature", "0.9", "--seed", "3"]
    assert main([*ARGUMENTS, *options, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["family"]["planted"]["measured"] is None
    rows = {row.key: row for row in results_of(record)}
    assert rows["plain"].seconds_to_first_token > 0
    assert rows["lockstep-tiny-small"].identical == rows["ours-plain"].identical == 1
    assert rows["plain"].identical is None  # other random numbers
    assert rows["plain"].tokens_per_second
    assert rows["reference-lockstep-tiny-small"].reason == "ValueError: the published system is greedy only"
