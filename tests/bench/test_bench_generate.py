"""The end-to-end benchmark: its figures from scripted runs, failures as rows, and everybody once for real. No time is asserted."""

from __future__ import annotations

import copy
import json
import math
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import bench_generate, contenders
from bench.bench_generate import Bench, Result, Run, cells, footnotes, main, markdown, verdict
from bench.contenders import Attention, Contender, Field, Outcome
from bench.planted import bytes_per_step
from pipespec.demo.comparison import Family
from tests.conftest import noisy

TEXTS = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])]


class Scripted(Contender):
    """Generates what it is told to, in as long as it is told."""

    def __init__(self, key: str, group: str, speed: float, text: Sequence[int] = (1, 2, 3, 4), **options: Any) -> None:
        super().__init__(key, f"row {key}", group, options.get("drafts", ()))
        self.speed, self.text = speed, list(text)
        self.settings = options.get("settings", ())
        self.fails_at: int | None = options.get("fails_at")
        self.refuses: str | None = options.get("refuses")
        self.forwards = options.get("forwards", {"target": 3})
        self.calls = self.closed = self.rested = 0

    def start(self, field: Field) -> None:
        if self.refuses:
            raise NotImplementedError(self.refuses)
        super().start(field)

    def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Outcome:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("out of luck\nand more")
        return Outcome(self.text, self.forwards, 2, len(self.text))

    def seconds(self) -> float:
        return len(self.text) / (self.speed * (self.setting or 1))

    def rest(self) -> None:
        self.rested += 1

    def close(self) -> None:
        self.closed += 1


class ScriptedBench(Bench):
    """Every call takes the time that its contender says."""

    clock = 0.0

    def run(self, contender: Contender, ids: torch.Tensor, new_tokens: int | None = None) -> Run | None:
        run = super().run(contender, ids, new_tokens)
        assert isinstance(contender, Scripted)
        self.clock += contender.seconds()
        return run and Run(run.outcome, contender.seconds())

    @property
    def past(self) -> float:
        return self.clock


@pytest.fixture
def make(target: LlamaForCausalLM) -> Callable[..., ScriptedBench]:
    def made(*everybody: Contender, limit: float = math.inf, rate: float = 1e9) -> ScriptedBench:
        family = Family("test", target, {"small": noisy(target, 0.05)}, None)
        bench = ScriptedBench(Field(family, 4, 3, None, 1), everybody, rate, limit)
        bench.start(TEXTS[0])
        return bench

    return made


def by_key(bench: Bench) -> dict[str, Result]:
    return {result.key: result for result in bench.results()}


def test_figures(make: Callable[..., ScriptedBench], target: LlamaForCausalLM) -> None:
    rate = 1e6
    ours = Scripted("ours", "ours", 30.0, [1, 2, 9, 4], forwards={"small": 4, "target": 2})
    bench = make(Scripted("plain", "hf", 10.0), Scripted("lookup", "hf", 20.0), ours, rate=rate)
    bench.measure(TEXTS, 3)
    found = by_key(bench)
    assert found["ours"].repeats == pytest.approx((30.0,) * 3)
    assert found["ours"].vs_plain == pytest.approx(3.0)
    assert found["ours"].vs_best_hf == pytest.approx(1.5)
    assert found["lookup"].vs_best_hf == pytest.approx(1.0)
    assert (found["ours"].identical, found["ours"].runs, found["ours"].parts_at) == (0, 6, 2)
    assert (found["plain"].identical, found["plain"].parts_at) == (6, None)
    assert found["ours"].accepted_length == 2.0
    of_target = bytes_per_step(target)
    assert of_target == bench.bytes["target"] == bench.bytes["small"]
    assert found["ours"].weights_of_copy == pytest.approx(6 * of_target / (4 / 30.0) / rate)
    assert found["ours"].of_floor == pytest.approx(30.0 / (rate / of_target))
    assert cells(found["ours"])[:6] == ("row ours", "30.0", "3.00x", "1.50x", "0/6, 2", "2.00")
    assert cells(found["ours"])[-2:] == ("-", "-")
    words = "\n".join(verdict(bench.results()))
    assert "Ours at its best: row ours, 1.50 times the best of the others (row lookup)" in words
    assert "Not always the same text: row ours" in words


def test_who_loses_is_told(make: Callable[..., ScriptedBench]) -> None:
    bench = make(Scripted("plain", "hf", 10.0), Scripted("a", "ours", 8.0), Scripted("b", "ours", 9.0))
    bench.measure(TEXTS, 1)
    lines = verdict(bench.results())
    assert lines[0] == "WE LOSE, even at our best: row b, 0.90 times the best of the others (row plain)."
    assert "row a 0.80x" in lines[1]
    assert lines[2] == "Slower than plain generate(): row a; row b."
    assert verdict(bench.results()[:1]) == ["Nothing to compare: none of ours ran."]


def test_failures_are_rows(make: Callable[..., ScriptedBench]) -> None:
    late = Scripted("late", "ours", 5.0, fails_at=4)  # the warm-up, a round, and then
    refusing = [Scripted(key, "ours", 5.0, refuses="no such schedule") for key in ("x", "y")]
    bench = make(
        Scripted("plain", "hf", 10.0), late, *refusing, Scripted("tuned", "hf", 9.0, settings=(1, 2), fails_at=3)
    )
    bench.tune(TEXTS, None)
    bench.measure(TEXTS, 2)
    found = by_key(bench)
    assert found["plain"].tokens_per_second == pytest.approx(10.0)
    assert late.calls == 4
    assert found["late"].reason == found["tuned"].reason == "RuntimeError: out of luck"
    assert found["x"].reason == "NotImplementedError: no such schedule"
    assert found["late"].tokens_per_second is None
    assert late.closed == refusing[0].closed == 1
    assert "Not measured: row x; row y (NotImplementedError: no such schedule)." in footnotes(bench.results())
    assert cells(found["late"])[1] == "-"
    text = markdown(bench.results())
    assert "| row plain |" in text
    assert "| row late" not in text
    assert "syncs" not in text
    bench.close()
    assert late.closed == 1


def test_a_gpu_that_is_lost(make: Callable[..., ScriptedBench], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who broke it has failed; what the others had measured stays, and nothing more is run."""
    breaks = Scripted("breaks", "ours", 5.0, fails_at=3)  # the warm-up, a round, and then, before the others
    bench = make(Scripted("plain", "hf", 10.0), breaks, Scripted("after", "ours", 9.0))
    bench.device = types.SimpleNamespace(type="cuda")  # type: ignore[assignment]

    def synchronize() -> None:
        if breaks.calls == breaks.fails_at:
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    rounds: list[float] = []
    bench.measure(TEXTS, 3, lambda: rounds.append(bench.past))
    bench.count(TEXTS[0])
    found = by_key(bench)
    assert found["breaks"].reason == "RuntimeError: out of luck"
    assert [found[key].tokens_per_second for key in ("plain", "after")] == pytest.approx([10.0, 9.0])
    assert len(rounds) == 2
    assert len(bench.runs["after"]) == len(bench.runs["plain"]) == 1
    late = Bench(bench.field, [Scripted("late", "ours", 1.0)], 1e9, math.inf)
    late.lost = "the GPU could not be used any more"
    late.start(TEXTS[0])
    assert by_key(late)["late"].reason == late.lost


def test_who_hangs_fails(make: Callable[..., ScriptedBench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_generate, "LEAST_TURN", 0.2)

    class Hanging(Scripted):
        def run(self, ids: torch.Tensor, new_tokens: int, seed: int) -> Outcome:
            time.sleep(60)
            raise AssertionError("nobody has ended this")

    bench = make(Hanging("hangs", "ours", 10.0), Scripted("plain", "hf", 10.0), limit=1.0)
    assert bench.reasons["hangs"].startswith("TimeoutError: not over after")
    assert "plain" not in bench.reasons


def test_everybody_rests_after_each_turn(make: Callable[..., ScriptedBench]) -> None:
    contender = Scripted("a", "ours", 10.0)
    make(contender).measure(TEXTS, 2)
    assert contender.rested == contender.calls == 5


def test_nobody_changes_what_others_run_on(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a turn of each: attention, the draft's memory and the threads of this process are what they were."""
    given: list[Sequence[LlamaForCausalLM]] = []

    def asynchronous(models: Sequence[LlamaForCausalLM], *_: object) -> contenders.Lockstep:
        given.append(models)  # whose weights it would move, to send them to its processes
        return contenders.Lockstep(models, 3)

    class Workers(contenders.Pipeline):
        def __init__(self, model: LlamaForCausalLM, drafts: Sequence[LlamaForCausalLM], schedule: str, **options: Any):
            if schedule == "workers":
                given.append((*drafts, model))
            super().__init__(model, drafts, schedule="lockstep" if schedule == "workers" else schedule, **options)

    monkeypatch.setattr(contenders, "Asynchronous", asynchronous)
    monkeypatch.setattr(contenders, "Pipeline", Workers)
    draft = noisy(target, 0.05)
    family = Family("test", copy.deepcopy(target), {"small": draft}, None)
    field = Field(family, 6, 3, None, 1)
    changing = ("streams", "lockstep-graphs", "workers", "reference-asynchronous")
    everybody = [c for c in contenders.everybody(["small"]) if c.key.startswith(changing)]
    assert len(everybody) == len(changing)

    def state() -> object:
        attention = [model.config._attn_implementation for model in field.models.values()]
        weights = [p.data_ptr() for model in field.models.values() for p in model.parameters()]
        return attention, weights, torch.get_num_threads()

    before = state()
    bench = Bench(field, everybody, 1e9, math.inf)
    try:
        bench.start(TEXTS[0])
        assert not bench.reasons
        assert state() == before
        assert len(given) == 2
        for models in given:
            assert models[0] is not draft
            assert models[-1] is family.target  # stays in this process
        streams = next(c for c in everybody if c.key.startswith("streams"))
        bench.run(streams, TEXTS[1])
        assert state() == before
        rested = {thread.name for thread in Path("/proc/self/task").iterdir()}
        streams.close()  # finds no thread to end
        assert rested <= {thread.name for thread in Path("/proc/self/task").iterdir()}
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


def test_time_is_kept(make: Callable[..., ScriptedBench]) -> None:
    """0.4 s each: begun is what fits, a round at the least; a repeat that is not whole does not count beside one that is."""
    slow = Scripted("slow", "ours", 10.0)
    slow.slow = True
    bench = make(Scripted("plain", "hf", 10.0), slow, limit=1.0)
    assert bench.reasons == {"slow": "not started: the time was over"}
    bench = make(Scripted("plain", "hf", 10.0), Scripted("b", "ours", 10.0), limit=3.5)
    bench.measure(TEXTS, 9)  # 0.8 s are gone; three rounds of 0.8 s fit
    assert sorted(bench.runs["b"]) == [(0, 0), (0, 1), (1, 0)]
    assert len(by_key(bench)["b"].repeats) == 1
    bench = make(Scripted("plain", "hf", 10.0), limit=0.5)
    bench.measure(TEXTS, 2)
    assert list(bench.runs["plain"]) == [(0, 0)]


class Counting(ScriptedBench):
    """Says that it is on a GPU; a call makes 7 launches and 2 waits, and 3 and a half a one per token."""

    def run(self, contender: Contender, ids: torch.Tensor, new_tokens: int | None = None) -> Run | None:
        tokens = new_tokens or 4
        calls = {
            "cudaLaunchKernel": 7 + 2 * tokens,
            "cudaGraphLaunch": tokens,
            "cudaEventSynchronize": 2 + tokens // 2,
            "aten::add": 99,
        }
        self.events = [types.SimpleNamespace(key=key, count=count) for key, count in calls.items()]
        return Run(Outcome([0] * tokens, {"target": tokens}, tokens, tokens), 1.0)


def test_launches_and_waits_are_counted(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., ScriptedBench], target: LlamaForCausalLM
) -> None:
    everybody = [Scripted("plain", "hf", 10.0), Scripted("workers", "ours", 10.0)]
    everybody[1].visible = False
    bench = Counting(Field(Family("test", target, {}, None), 4, 3, None, 1), everybody, 1e9, math.inf)

    @contextmanager
    def profile(activities: object) -> Iterator[types.SimpleNamespace]:
        yield types.SimpleNamespace(key_averages=lambda: bench.events)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    bench.count(TEXTS[0])
    assert bench.counted == {}  # not on a CPU
    bench.device = types.SimpleNamespace(type="cuda")  # type: ignore[assignment]
    bench.count(TEXTS[0])
    assert bench.counted == {"plain": (0.5, 3.0)}


def test_contenders_do_not_see_each_others_attention(target: LlamaForCausalLM) -> None:
    model = copy.deepcopy(target)
    first = model.config._attn_implementation
    attention = Attention([model])
    with attention.of("a"):
        model.config._attn_implementation = "eager"
    assert model.config._attn_implementation == first
    with attention.of("b"):
        assert model.config._attn_implementation == first
    with attention.of("a"):
        assert model.config._attn_implementation == "eager"


def test_everybody() -> None:
    keys = [c.key for c in contenders.everybody(["1B", "3B"])]
    assert len(set(keys)) == len(keys)
    for chain in ("1B", "3B", "1B+3B"):
        for kind in (
            "reference-asynchronous",
            "reference-lock-step",
            "lockstep",
            "lockstep-graphs",
            "workers",
            "streams",
        ):
            assert f"{kind}-{chain}" in keys
    assert {"plain", "static", "lookup", "assisted-1B", "assisted-3B", "ours-plain", "ours-plain-graphs"} < set(keys)


ARGUMENTS = ["--planted", "tiny-small", "tiny-target", "--prompts", "1", "--repeats", "1", "--new-tokens", "12"]
ARGUMENTS += [
    "--prompt-tokens",
    "8",
    "--settings",
    "1",
    "--threads",
    "1",
    "--only",
    "assisted",
    "lock",
    "lookup",
    "ours",
    "streams",
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    yield
    torch.set_num_threads(1)


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_generate, "read_bytes_per_second", lambda threads: 1e10)
    monkeypatch.setattr(bench_generate, "POSITIONS", 96)
    page, file = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text("before\n<!-- generate:begin -->\nan earlier table\n<!-- generate:end -->\nafter\n")
    assert main([*ARGUMENTS, "--json", str(file), "--docs", str(page)]) == 0
    record = json.loads(file.read_text())
    rows = {row["key"]: Result(**row) for row in record["rows"]}
    for key in (
        "plain",
        "assisted-tiny-small",
        "lookup",
        "reference-lock-step-tiny-small",
        "ours-plain",
        "lockstep-tiny-small",
    ):
        row = rows[key]
        assert row.reason is None, row.reason
        assert row.identical == row.runs == 1, key
    assert rows["plain"].accepted_length == 1.0
    for key in ("assisted-tiny-small", "reference-lock-step-tiny-small", "lockstep-tiny-small"):
        length = rows[key].accepted_length
        assert length is not None
        assert 1 < length <= 12
    assert {"cpu", "threads", "torch", "transformers"} <= set(record["machine"])
    assert record["tuning"]["lookup"][0]["setting"] == "3 tokens"
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
    assert main(["--from", str(file)]) == 1  # float32: a text that differs is an error


def test_a_sampled_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_generate, "read_bytes_per_second", lambda threads: 1e10)
    monkeypatch.setattr(bench_generate, "POSITIONS", 48)
    file = tmp_path / "out.json"
    assert main([*ARGUMENTS, "--temperature", "0.9", "--seed", "3", "--json", str(file)]) == 0
    rows = {row["key"]: Result(**row) for row in json.loads(file.read_text())["rows"]}
    assert rows["lockstep-tiny-small"].identical == rows["ours-plain"].identical == 1
    assert rows["plain"].identical is None  # other random numbers
    assert rows["plain"].tokens_per_second
    assert rows["reference-lock-step-tiny-small"].reason == "ValueError: the published system is greedy only"
