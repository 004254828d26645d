"""Reading published runs, tested on synthetic runs with known parameters, and the command that prints them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import published_runs
from bench.harness import replace_table
from bench.perf_model import Answers, StageModel, simulate

ONE, WIDE, SMALL, MIDDLE, MIDDLE_WIDE, START = 0.120, 0.420, 0.011, 0.022, 0.026, 0.5
LOOKAHEAD, USED = 8, 5
SAMPLES, TOKENS = 6, 200


def lockstep_log(
    bits: np.ndarray, lookahead: int = LOOKAHEAD, one: float = ONE, wide: float = WIDE
) -> tuple[list[int], list[float], int]:
    """The published lockstep of two models: tokens and seconds of each step of the target, number of the draft's steps."""
    appended, seconds, position, bonus_open, drafted = [], [], 1, True, 0
    while position < len(bits):
        # After a full lookahead the draft also makes the bonus token.
        drafted += lookahead - 1 + (bonus_open and position > 1)
        if bonus_open and not bits[position - 1]:
            count, took, bonus_open = 1, one, False  # the draft missed the bonus token: nothing to verify
        else:
            verified = bits[position : position + lookahead - 1]
            right = int(np.argmin(np.append(verified, False)))
            bonus_open = right == lookahead - 1
            count, took = right + 1, wide
        appended.append(count)
        seconds.append(took)
        position += count
    return appended, seconds, drafted


def save(
    folder: Path,
    name: str,
    strategy: str,
    models: list[str],
    samples: list[dict[str, Any]],
    lookahead: int | None = None,
) -> None:
    if lookahead is None:
        lookahead = LOOKAHEAD if strategy == "chain" else 0
    about = {"strategy": strategy, "lookahead": lookahead, "model_configs": [{"path": f"some/model-{m}-Instruct"} for m in models]}  # fmt: skip
    data = {"metadata": about, "results": [{"metrics": metrics} for metrics in samples]}
    (folder / f"{name}.json").write_text(json.dumps(data))


def sample(seconds: float, tokens: int, steps: list[list[float]], appended: list[list[int]]) -> dict[str, Any]:
    return {"total_time": seconds, "tokens_generated": tokens, "model_times": steps, "accepted_tokens": appended}


@pytest.fixture(scope="module")
def truth() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {m: rng.random((SAMPLES, TOKENS)) < a for m, a in (("1B", 0.9), ("8B", 0.95))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, truth) -> Path:
    """Plain and lockstep runs, and pipelines of 1B, 8B and 70B. The pipelines ran with a lookahead that they do not record."""
    out = tmp_path_factory.mktemp("runs")
    plain = [{"total_time": START + ONE * TOKENS, "tokens_generated": TOKENS, "token_times": [ONE] * TOKENS}] * 3
    save(out, "greedy_70B", "greedy", ["70B"], plain)
    drafts = {"1B": StageModel(SMALL), "8B": StageModel([MIDDLE, MIDDLE_WIDE])}
    for names in (["1B"], ["8B"], ["1B", "8B"]):
        lock, pipeline = [], []
        for i in range(SAMPLES):
            appended, seconds, drafted = lockstep_log(truth[names[-1]][i])
            steps = [[MIDDLE if names == ["8B"] else SMALL] * drafted]
            counts = [appended]
            if len(names) == 2:
                steps.append([MIDDLE_WIDE] * len(appended))
                counts.insert(0, [LOOKAHEAD] * len(appended))
            steps.append(seconds)
            lock.append(sample(START + sum(map(sum, steps)), TOKENS, steps, counts))
            run = simulate(
                "reference",
                [*(drafts[n] for n in names), StageModel([ONE, WIDE], start_s=START)],
                Answers.from_bits(*(truth[n][i] for n in names)),
                TOKENS,
                lookahead=USED,
                seed=100 + i,
            )
            logs = [np.repeat(np.arange(len(s.histogram)), s.histogram).tolist() for s in run.stages[1:]]
            times = [[SMALL] * 10, *([WIDE] * len(log) for log in logs)]
            pipeline.append(sample(run.seconds, TOKENS, times, logs))
        save(out, "chain_" + "-".join(names), "chain", [*names, "70B"], lock)
        save(out, "async_" + "-".join(names), "async-chain", [*names, "70B"], pipeline)
    return out


def test_agreement_is_read_back_from_the_logs(folder, truth):
    runs = published_runs.load(folder)
    for draft in ("1B", "8B"):
        evidence = published_runs.gather(runs, (draft, "70B"))
        for bits, right in zip(evidence.bits[0], truth[draft], strict=True):
            known = bits >= 0
            assert len(bits) == TOKENS
            assert (bits[known] == right[known]).all()
            assert known.mean() > 0.9
        plain, wide = evidence.stages[-1].times()
        assert (plain, wide) == (pytest.approx(ONE), pytest.approx(WIDE))
        assert evidence.start_s == pytest.approx([START] * SAMPLES)
        assert evidence.rates[0] == pytest.approx(truth[draft].mean(), abs=0.02)


def test_pipelines_are_predicted_and_their_lookahead_is_found(folder):
    pipelines = published_runs.report(published_runs.load(folder))["pipelines"]
    assert len(pipelines) == 3
    for found in pipelines:
        assert found["lookahead_recorded"] == 0
        assert found["lookahead_used"] == USED, found["run"]
        assert abs(found["error"]) < 0.04, found["run"]
        distances = [tried["histogram_distance"] for tried in found["by_lookahead"].values()]
        assert sorted(distances)[1] > 1.5 * min(distances)


def test_lockstep_runs_are_reproduced(folder):
    report = published_runs.report(published_runs.load(folder))
    two = [row for row in report["lockstep"] if row["run"].count("/") == 1]
    assert len(two) == 2
    for row in two:
        assert abs(row["error"]) < 0.01, row


def test_the_table_compares_equal_samples(folder):
    rows = {row["name"]: row for row in published_runs.table(published_runs.load(folder))}
    chains, kinds = ("1B/70B", "8B/70B", "1B/8B/70B"), {"lockstep": LOOKAHEAD, "pipeline": 0}
    assert set(rows) == {"plain 70B", *(f"{kind} {models} L={n}" for kind, n in kinds.items() for models in chains)}
    assert rows["plain 70B"]["speedup"] == rows["plain 70B"]["fair"] == 1.0
    runs = {run.label: run for run in published_runs.load(folder)}
    for name, row in rows.items():
        low, high = row["interval"]
        assert low <= row["fair"] <= high
        first = runs[name].samples[:3]
        ms = 1e3 * sum(s.seconds for s in first) / sum(s.tokens for s in first)
        assert row["fair"] == pytest.approx(rows["plain 70B"]["ms_per_token"] / ms)


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_tables_are_printed(folder, capsys):
    assert published_runs.main([str(folder)]) == 0
    text = capsys.readouterr().out
    for expected in ("published table", "predicted", "lookahead used", "decoding meanwhile", "pipeline 1B/8B/70B"):
        assert expected in text
    assert published_runs.main([str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [p["lookahead_used"] for p in data["pipelines"]] == [USED] * 3


def test_a_folder_with_plain_runs_only(folder, tmp_path, capsys):
    (tmp_path / "greedy.json").write_text((folder / "greedy_70B.json").read_text())
    assert published_runs.main([str(tmp_path)]) == 0
    assert "plain 70B" in capsys.readouterr().out


def copy_with(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Copy the runs, the lockstep run of 8B and 70B with a change."""
    for file in folder.glob("*.json"):
        data = json.loads(file.read_text())
        if file.stem == "chain_8B":
            change(data)
        (to / file.name).write_text(json.dumps(data))


def metrics(data: dict[str, Any]) -> dict[str, Any]:
    """Those of the second sample."""
    return data["results"][1]["metrics"]


def test_a_missing_folder(tmp_path, capsys):
    assert published_runs.main([str(tmp_path / "nowhere")]) == 2
    assert "no published runs there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(results=[]), "no samples"),
        (lambda d: d["metadata"].update(model_configs=[]), "no models"),
        (lambda d: d["metadata"].update(strategy="beam"), "unknown strategy"),
        (lambda d: d["metadata"].pop("lookahead"), "'lookahead' is missing"),
        (lambda d: d.pop("results"), "'results' is missing"),
        (lambda d: metrics(d).pop("tokens_generated"), "'tokens_generated' is missing"),
        (lambda d: metrics(d).update(total_time=0.0), "sample 1"),
        (lambda d: metrics(d).update(total_time=-1.0), "sample 1"),
        (lambda d: metrics(d).update(tokens_generated=0), "0 tokens"),
        (lambda d: metrics(d)["model_times"][1].__setitem__(0, 0.0), "step times must be positive"),
        (lambda d: metrics(d).update(model_times=[[], []]), "step times must be positive"),
        (lambda d: metrics(d).update(model_times=[[1.0]]), "not those of 2 stages"),
        (lambda d: metrics(d)["accepted_tokens"][0].pop(), "steps of the target"),
        (lambda d: metrics(d)["accepted_tokens"][0].__setitem__(0, 0), "between one and 100 tokens"),
        (lambda d: d.update(results=7), "not a published run"),
    ],
)
def test_broken_files_are_refused(folder, tmp_path, capsys, change, says):
    copy_with(folder, tmp_path, change)
    assert published_runs.main([str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: metrics(d)["accepted_tokens"][0].__setitem__(0, 99), "more than its lookahead"),
        (lambda d: d.update(results=d["results"][:2]), "different numbers of samples"),
        (lambda d: [s["metrics"].update(total_time=0.1) for s in d["results"]], "longer than the whole"),
    ],
)
def test_a_run_that_cannot_be_used(folder, tmp_path, capsys, change, says):
    """What needs it has no prediction, and a reason. Everything else has its prediction."""
    copy_with(folder, tmp_path, change)
    report = published_runs.report(published_runs.load(tmp_path))
    assert any(says in entry["reason"] for entry in report["failed"])
    assert all("8B" in entry["run"] for entry in report["failed"])
    found = {entry["run"] for entry in (*report["lockstep"], *report["pipelines"])}
    assert {"lockstep 1B/70B L=8", "pipeline 1B/70B L=0"} <= found
    assert len(found) + len(report["failed"]) == 6
    assert published_runs.main([str(tmp_path)]) == 0
    assert says in capsys.readouterr().out


# --- power, and a sweep of lookahead values --------------------------------------------------------------------------


def test_the_power_of_the_gpus_is_read(folder, tmp_path):
    for file in folder.glob("*.json"):
        data = json.loads(file.read_text())
        for result in data["results"]:
            result["gpustats"] = [{"gpu_powers": [100.0, 50.0]}, {"gpu_powers": [200.0, 50.0]}]
        (tmp_path / file.name).write_text(json.dumps(data))
    for run in published_runs.load(tmp_path):
        assert run.joules_per_token() == pytest.approx(200.0 * run.ms_per_token() / 1e3)
    assert {run.joules_per_token() for run in published_runs.load(folder)} == {None}


@pytest.mark.parametrize("ratio", [1.02, 1.1, 3.0])
def test_a_sweep_of_lookahead_values(tmp_path, ratio):
    """Also where a verification takes as long as a step without draft tokens. No lockstep run is predicted from itself."""
    one, wide = 0.0214, 0.0214 * ratio
    rng = np.random.default_rng(7)
    texts = [rng.random(2 * TOKENS) < 0.8 for _ in range(SAMPLES)]

    def noisy(seconds: float, count: int) -> list[float]:
        return (seconds * rng.uniform(0.97, 1.03, count)).tolist()

    plain = [
        {"total_time": START + one * len(t), "tokens_generated": len(t), "token_times": noisy(one, len(t))}
        for t in texts
    ]
    save(tmp_path, "plain", "greedy", ["8B"], plain)
    for lookahead in (2, 4, 8, 16, 20):
        samples = []
        for text in texts:
            appended, seconds, drafted = lockstep_log(text, lookahead, one, wide)
            steps = [noisy(SMALL, drafted), [t * rng.uniform(0.97, 1.03) for t in seconds]]
            samples.append(sample(START + sum(map(sum, steps)), len(text), steps, [appended]))
        save(tmp_path, f"chain_{lookahead}", "chain", ["1B", "8B"], samples, lookahead)
    for lookahead in (1, 4, 12, 20):
        samples = []
        for i, text in enumerate(texts):
            stages = [StageModel(SMALL), StageModel([one, wide], start_s=START)]
            run = simulate("reference", stages, Answers.from_bits(text), len(text), lookahead=lookahead, seed=50 + i)
            counts = run.stages[-1].histogram
            log = np.repeat(np.arange(len(counts)), counts).tolist()
            samples.append(sample(run.seconds, len(text), [[SMALL] * 10, [wide] * len(log)], [log]))
        save(tmp_path, f"async_{lookahead}", "async-chain", ["1B", "8B"], samples, lookahead)
    runs = published_runs.load(tmp_path)
    for text, bits in zip(texts, published_runs.gather(runs, ("1B", "8B")).bits[0], strict=True):
        known = bits >= 0
        assert (bits[known] == text[: len(bits)][known]).all()
        assert known.mean() > 0.8
    report = published_runs.report(runs)
    assert report["failed"] == []
    errors = {kind: [abs(entry["error"]) for entry in report[kind]] for kind in ("lockstep", "pipelines")}
    assert (len(errors["lockstep"]), len(errors["pipelines"])) == (5, 4)
    assert np.mean(errors["lockstep"]) < 0.03
    assert np.mean(errors["pipelines"]) < 0.02


# --- the page of formulas ------------------------------------------------------------------------------------------


def test_blocks_of_the_page_are_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n<!-- y:begin -->\n<!-- y:end -->\n")
    for name, text in (("x", "1 \\1\n2"), ("y", "3")):
        replace_table(page, text, name)
    assert page.read_text() == "a\n<!-- x:begin -->\n1 \\1\n2\n<!-- x:end -->\nb\n<!-- y:begin -->\n3\n<!-- y:end -->\n"
    with pytest.raises(ValueError, match="z:begin"):
        replace_table(page, "", "z")


def test_the_page_has_every_block_and_figure():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "theory.md").read_text()
    for name in ("errors", "published", "chains", "crossover", "break-even", "published-runs"):
        inside = page.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
        assert len(inside) > 100, name
    for name in ("speedup.svg", "expensive_verification.svg", "spd.svg"):
        assert f"(theory/{name})" in page
        assert (docs / "theory" / name).read_text().rstrip().endswith("</svg>")
