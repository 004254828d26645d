"""Profiles: measured through the engine, stored, and measured again if the file cannot be read."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.config import SpeculationConfig
from pipespec.drivers import GenerationRequest, WorkersDriver
from pipespec.drivers.graphed.stage import GraphedStage
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.stage import StageInputs
from pipespec.errors import NotCapturable
from pipespec.planning import agreement, measure, profile_store
from pipespec.planning.profile import Profile, StageProfile, StepTimes, without_outliers
from pipespec.planning.profile_store import ProfileWarning, StoredProfile
from tests.conftest import VOCABULARY, always_right, always_wrong, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Faulty


def stage(name="draft 0", step=1e-3, **more) -> StageProfile:
    times = StepTimes(1, 1, 64, (1, 2, 4), (step, 1.5 * step, 2 * step), **{"prefill_s": 1e-4, **more})
    return StageProfile(name, 1000, (times,), 0.5, 0.25, 1e-4)


def a_profile(key="some") -> Profile:
    return Profile((stage(), stage("target", 4e-3)), 2, key)


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(profile_store, "_warned", set())


def test_between_the_measured_widths_it_is_interpolated():
    times = StepTimes(1, 1, 64, (1, 2, 4), (1.0, 2.0, 3.0))
    assert list(times.at((1, 1.5, 2, 3, 4))) == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert times.at([8]) == [5.0]  # extrapolated from the last two widths
    assert StepTimes(1, 1, 64, (1, 4), (2.0, 1.0)).at([9]) == [1.0]  # a wider step is never faster
    assert StepTimes(1, 1, 64, (1,), (2.0,)).at([9]) == [2.0]


def test_what_else_runs_only_adds_to_a_time():
    busy = (4.9, 5.3, 1.6, 5.3, 9.0, 4.7, 11.0)
    found = without_outliers((1, 2, 5, 6, 8, 12, 17), busy)
    assert found[:3] == (1.6, 1.6, 1.6)  # no more than the wider step took
    assert found[3] == pytest.approx(1.1 * 2 * 1.6)  # no more than two steps of the half take
    assert found[5] == 4.7
    assert list(found) == sorted(found)
    assert without_outliers((1, 2, 5, 6, 8, 12, 17), found) == pytest.approx(found)
    plausible = (1.0, 1.0, 1.4, 1.6, 2.4, 2.9, 4.0)
    assert without_outliers((1, 2, 4, 6, 8, 9, 17), plausible) == plausible


def test_steps_of_a_call_correct_the_times():
    short, far = (
        StepTimes(2, 1, 64, (1, 2, 4), (1.0, 1.2, 1.4), 0.1),
        StepTimes(2, 1, 256, (1, 2, 4), (2.0, 2.2, 2.4), 0.1),
    )
    alone = StepTimes(1, 1, 64, (1, 2, 4), (3.0, 3.0, 3.0), 0.1)
    stage = StageProfile("target", 1, (short, far, alone))
    how = {"threads": 2, "rows": 1}
    found = stage.refined({1: 3.0, 4: 2.8}, context=64, prefill_s=0.5, **how)
    assert found.seconds(1, context=64, **how) == pytest.approx(2.8)  # a wider step took no longer
    assert found.seconds(4, context=64, **how) == pytest.approx(2.8)
    assert found.seconds(4, context=256, **how) == pytest.approx(4.8)  # as many times as long
    assert found.prompt_s(10, **how) == pytest.approx(5.0)
    assert found.times[2] == alone
    half = stage.refined({1: 4.0}, context=64, weight=0.5, known=1, **how)
    assert half.seconds(1, context=64, **how) == pytest.approx(2.0)
    assert half.prompt_s(10, **how) == pytest.approx(1.0)
    wide = stage.refined({1: 1.0, 4: 2.8}, context=64, prefill_s=0.3, weight=0.5, known=1, **how)
    assert wide.seconds(4, context=64, **how) == pytest.approx(2.8)  # the first step so wide counts in full
    assert wide.prompt_s(10, **how) == pytest.approx(2.0)
    assert stage.refined({1: 4.0}, context=64, threads=4, rows=1) is stage  # nothing was measured with four


def test_steps_of_a_call_correct_contexts_near_theirs():
    """Texts of 500 and of 4000 tokens in turn: neither says what steps of the other take."""
    how, widths = {"threads": 1, "rows": 1}, (1, 4)
    stage = StageProfile(
        "target", 1, (StepTimes(1, 1, 64, widths, (1.0, 1.0)), StepTimes(1, 1, 1024, widths, (2.0, 2.0)))
    )

    def at(stage, *contexts):
        return [stage.seconds(1, context=c, **how) for c in contexts]

    near = stage.refined({1: 3.0}, context=700, known=1, **how)
    assert at(near, 64) == [1.0]
    assert at(near, 1024)[0] > 2.0
    # Far from all measured ones, the first time, and again.
    far = stage.refined({1: 30.0, 4: 30.0}, context=4000, **how)
    assert at(far, 64, 1024, 4000) == pytest.approx([1.0, 2.0, 30.0])
    assert at(far, 2512) == pytest.approx([16.0])
    for _ in range(8):
        far = far.refined({1: 0.5}, context=260, weight=0.5, known=4, **how)
        far = far.refined({1: 20.0}, context=4100, weight=0.5, known=4, **how)
    assert at(far, 64, 260, 1024, 4100) == pytest.approx([1.0, 0.5, 2.0, 20.0], rel=0.02)
    assert [t.context for t in far.times] == [64, 1024, 4000, 260]
    # A busy moment: all contexts.
    assert at(stage.refined({1: 0.5}, context=64, **how), 64, 1024) == pytest.approx([0.5, 1.0])
    assert stage.refined({1: 0.5}, context=64, **how).cold_s == 0.0
    cold = replace(stage, cold_s=0.4)
    assert cold.refined({1: 0.5}, context=64, **how).cold_s == pytest.approx(0.2)


def test_context_threads_and_rows():
    short, long = StepTimes(2, 1, 64, (1,), (1.0,)), StepTimes(2, 1, 256, (1,), (3.0,))
    other, batch = StepTimes(1, 1, 64, (1,), (9.0,)), StepTimes(2, 8, 64, (1,), (7.0,))
    s = StageProfile("target", 1, (short, long, other, batch))
    assert s.seconds(1, threads=2, context=64) == 1.0
    assert s.seconds(1, threads=2, context=160) == 2.0
    assert s.seconds(1, threads=2, context=448) == 5.0
    assert s.seconds(1, threads=2, context=1) == pytest.approx(1.0 - 63 / 96, abs=0.7)  # never negative
    assert s.seconds(1, threads=1) == 9.0
    assert s.seconds(1, threads=2, rows=6) == 7.0
    assert s.has(8)
    prompts = StepTimes(2, 1, 64, (1,), (1.0,), 0.1), StepTimes(2, 1, 256, (1,), (1.0,), 0.2)
    s = StageProfile("target", 1, (*prompts, StepTimes(1, 4, 64, (1,), (1.0,), 0.8)))
    assert s.prompt_s(10, threads=2) == pytest.approx(1.0)
    assert s.prompt_s(1000, threads=2) == pytest.approx(200.0)
    assert s.prompt_s(10, threads=1, rows=3) == pytest.approx(6.0)  # as measured with 4
    assert not s.has(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepTimes(1, 1, 64, (1,), (0.0,)),
        lambda: StepTimes(1, 1, 64, (1,), (float("nan"),)),
        lambda: StepTimes(1, 1, 64, (1,), (float("inf"),)),
        lambda: StepTimes(1, 1, 64, (2, 1), (1.0, 1.0)),
        lambda: StepTimes(1, 1, 64, (), ()),
        lambda: StepTimes(1, 1, 64, (1, 2), (1.0,)),
        lambda: StepTimes(0, 1, 64, (1,), (1.0,)),
        lambda: stage(prefill_s=-1.0),
        lambda: StageProfile("s", 1, ()),
        lambda: Profile((), 1),
        lambda: Profile((stage(),), 0),
        lambda: StageProfile("s", 1, stage().times, -0.5),
        lambda: StageProfile("s", 1, stage().times, 0.0, float("nan")),
        lambda: StageProfile("s", 1, stage().times, 0.0, 0.0, -1e-3),
    ],
)
def test_invalid_profiles_are_refused(make):
    with pytest.raises(ValueError, match=r"."):
        make()


def test_measured_steps_feed_what_they_say():
    model = random_llama(3)
    bench = measure._StepTimer(model, rows=2, context=8, steps=16, native=True)
    for again in (False, True):
        assert bench.begin(reuse=again) > 0
        assert [bench._block.length(1, row) for row in range(2)] == [8, 8]
        for width in (1, 4, 2, 8, 33, 1):
            before = [bench._block.counters(1, row)["fed"] for row in range(2)]
            assert bench.step(width) > 0
            assert [bench._block.counters(1, row)["fed"] - b for row, b in enumerate(before)] >= [width] * 2
            if width > 1:
                assert bench._stage.port.num_draft_tokens[:2].tolist() == [width - 1] * 2


def test_all_stages_with_every_number_of_threads():
    models = [random_llama(1, layers=1), random_llama(0)]
    found = measure.measure_stages(models, ["a", "b"], budget_s=0.5)
    assert [s.name for s in found.stages] == ["a", "b"]
    for s in found.stages:
        assert {t.threads for t in s.times} == set(measure.thread_counts(2))
        assert len({t.context for t in s.times}) == 2
        assert min(t.prefill_s for t in s.times) > 0
    assert all(s.contention == s.burden == 0.0 for s in found.stages)  # not measured


def test_a_hurried_profile_has_fewer_widths():
    found = measure.measure_stages([random_llama(0)], ["a"], budget_s=0.0)
    assert 1 < len(found.stages[0].times[0].widths) < len(measure.WIDTHS)


@pytest.mark.parametrize("rows", [1, 2])
def test_captured_steps_have_the_width_they_are_measured_for(monkeypatch, rows):
    """Measured through the driver's own steps, with the prompts in the cache."""
    models = [random_llama(1, layers=1), random_llama(0)]
    fed = []
    body = GraphedStage.body
    monkeypatch.setattr(
        GraphedStage, "body", lambda s, tokens, *more: fed.append(tuple(tokens.shape)) or body(s, tokens, *more)
    )
    found = measure.measure_captured(models, ["a", "b"], rows=rows, widths=(1, 4))
    assert set(fed) == {(rows, 1), (rows, 4)}
    for times in found:
        short, long = times
        assert short.context < long.context
        for t in times:
            assert (t.rows, t.widths, t.captured) == (rows, (1, 4), True)
            assert min(t.seconds) > 0
            assert t.prefill_s > 0
    assert all(m.config._attn_implementation == "sdpa" for m in models)
    profile = measure.measure_stages(models, ["a", "b"], rows=rows, budget_s=0.0)
    assert not profile.target.has(rows, captured=True)
    both = profile.adding(found)
    assert both.target.has(rows, captured=True)
    assert both.target.seconds(4, threads=1, rows=rows, captured=True) == pytest.approx(found[1][0].at([4])[0])
    eager = {"threads": 1, "rows": rows}
    assert both.target.seconds(4, **eager) == profile.target.seconds(4, **eager)
    assert Profile.from_json(json.loads(json.dumps(both.to_json()))) == both


def test_what_cannot_be_captured_is_named_as_in_the_chain(monkeypatch):
    models = [random_llama(1, layers=1), random_llama(0)]
    monkeypatch.setattr(models[0], "set_attn_implementation", lambda name: None)
    with pytest.raises(NotCapturable, match="small cannot be captured"):
        measure.measure_captured(models, ["small", "big"])
    with torch.autocast("cpu"), pytest.raises(NotCapturable, match=r"big cannot be captured .* autocast"):
        measure.measure_captured(models[1:], ["big"])
    assert models[1].config._attn_implementation == "sdpa"


def test_a_file_from_before_there_were_captured_steps(tmp_path):
    stored = StoredProfile(a_profile(), {})
    profile_store.store(stored, tmp_path)
    file = tmp_path / "some.json"
    data = json.loads(file.read_text())
    for s in data["profile"]["stages"]:
        del s["device"]
        for t in s["times"]:
            del t["captured"]
    file.write_text(json.dumps(data))
    assert profile_store.load("some", 2, tmp_path).profile == stored.profile


class Scripted:
    """Replaces the measured models: a step takes ``seconds(stage, threads, width)``, times ``pace[n]`` in the n-th round."""

    def __init__(self, monkeypatch, seconds, pace):
        self.round = -1
        monkeypatch.setattr(measure._StepTimer, "begin", lambda bench, reuse=False: 64e-4 * self.pace())
        monkeypatch.setattr(measure._StepTimer, "step", lambda bench, width: seconds(width) * self.pace())
        self._pace = pace

    def pace(self):
        return self._pace[max(self.round, 0)]


def test_a_slow_moment_does_not_change_step_times(monkeypatch):
    """A quarter of the rounds is twice as slow. The step times are those of the other rounds."""
    script = Scripted(monkeypatch, lambda width: 1e-3 * (1 + 0.1 * width), [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    profiler = measure.Profiler([random_llama(1, layers=1), random_llama(0)], ["a", "b"])
    for script.round in range(8):
        profiler.round()
    found = profiler.profile()
    for s in found.stages:
        for t in s.times:
            assert t.widths == measure.WIDTHS
            assert t.seconds == pytest.approx([1e-3 * (1 + 0.1 * w) for w in t.widths])
            assert t.prefill_s == pytest.approx(1e-4)


class AtWork(WorkersDriver):
    """Waits in each query until the draft has more tokens than before: on a busy machine it may have taken no step in between."""

    @contextmanager
    def drafting(self, request, draft):
        last = -1

        with super().drafting(request, draft) as drafted:

            def more(at_least: int) -> int:
                nonlocal last
                last = drafted(max(at_least, last + 1))
                return last

            yield more


def test_a_draft_at_work_beside_the_target(target):
    draft = Faulty.like(random_llama(4, layers=1))
    profiler = measure.Profiler([draft, target], ["draft", "target"], widths=(1, 2))
    driver = AtWork([draft, target], SpeculationConfig(lookahead=(4,)))
    draft.set(delay=-0.1)  # long enough that the draft does not reach its end
    try:
        for _ in range(3):
            profiler.beside(driver)
        assert driver.config == SpeculationConfig(lookahead=(4,))
        prompt = random_prompts(1, seed=3)[0].numpy().astype(np.int32)
        driver.run(
            GenerationRequest(StageInputs([prompt], [len(prompt) + 8], SamplingParams(), VOCABULARY), [])
        )  # and it can be used
        assert driver.block.length(1, 0) == len(prompt) + 8
        driver._workers[0].process.kill()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profiler.beside(driver)  # the draft starts again; otherwise nothing is measured
    finally:
        driver.close()
        draft.set()
    profiler.round()
    found = profiler.profile()
    assert [len(seen) for seen in profiler._beside.values()] in ([3], [4])
    assert found.stages[0].contention >= 0.0
    assert found.stages[1].burden == 0.0


# --- agreement -------------------------------------------------------------------------------------------------------


def test_the_table_names_equal_mistakes_alike():
    truth = np.array([5, 6, 7, 8])
    table = agreement.agreement(truth, [np.array([5, 1, 2, 3]), np.array([5, 6, 2, 4])])
    assert table.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2]]
    with pytest.raises(ValueError, match="draft 0 has"):
        agreement.agreement(truth, [truth[:2]])


@pytest.mark.parametrize("sample", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}])
def test_a_stage_asked_afterwards_says_what_it_said(target, sample):
    prompt = random_prompts(1, seed=5, shortest=7, longest=7)[0]
    with Pipeline(target, schedule="plain") as plain:
        arguments = {"do_sample": True, "seed": 9, "top_k": 0} | sample if sample else {"do_sample": False}
        text = plain.generate(prompt[None], max_new_tokens=90, **arguments)[0].numpy()
        seeds = plain.report.seeds
    sampling_params = SamplingParams(seeds=seeds, **sample)
    said = agreement.choices(target, text, 7, sampling_params, VOCABULARY)
    assert np.mean(said == text[7:]) > 0.98  # except near-ties in wider forwards
    models = [always_wrong(target), noisy(target, 0.02), always_right(target), target]
    table = agreement.agreement_on(models, text, 7, own_text=True, sampling_params=sampling_params)
    right = (table == 0).mean(axis=0)
    assert right[0] < 0.05 < right[1] <= right[2]
    assert right[2] > 0.98


def test_agreement_on_a_text_that_is_not_the_targets(target):
    text = torch.cat(random_prompts(4, seed=2, shortest=24)).numpy()
    table = agreement.agreement_on([always_right(target), target], text, 12, own_text=False)
    assert len(table) == len(text) - 12
    assert not table.any()


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_a_profile_round_trip(tmp_path):
    stored = StoredProfile(a_profile(), {"greedy": np.array([[0], [1]], dtype=np.uint8)})
    assert profile_store.store(stored, tmp_path / "new")
    back = profile_store.load("some", 2, tmp_path / "new")
    assert back.profile == stored.profile
    assert np.array_equal(back.tables["greedy"], stored.tables["greedy"])
    assert profile_store.load("other", 2, tmp_path / "new") is None
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["some.json"]


def _damaged(data: dict, **changes) -> str:
    return json.dumps(data | changes)


@pytest.mark.parametrize(
    "kind", ["noise", "binary", "cut", "format", "foreign", "zero", "table", "list", "empty", "huge", "deep"]
)
def test_a_corrupt_file_gives_one_warning(tmp_path, kind):
    profile_store.store(StoredProfile(a_profile(), {"greedy": np.array([[0], [1]], dtype=np.uint8)}), tmp_path)
    file = tmp_path / "some.json"
    good = json.loads(file.read_text())
    zero = json.loads(file.read_text())
    zero["profile"]["stages"][0]["times"][0]["seconds"][0] = 0
    foreign = json.loads(file.read_text())
    foreign["profile"]["key"] = "another"
    huge = json.loads(file.read_text())
    huge["tables"]["greedy"] = [[0], [300]]
    text = {
        "noise": "{]",
        "cut": file.read_text()[:100],
        "format": _damaged(good, format=99),
        "foreign": json.dumps(foreign),
        "zero": json.dumps(zero),
        "table": _damaged(good, tables={"greedy": [[0, 1, 2]]}),
        "list": "[1, 2]",
        "empty": "",
        "huge": json.dumps(huge),
        "deep": "[" * 100_000,
    }.get(kind)
    if text is None:
        file.write_bytes(b"\xff\xfe\x00\x81")
    else:
        file.write_text(text)
    with pytest.warns(ProfileWarning, match=r"some\.json.*measured again"):
        assert profile_store.load("some", 2, tmp_path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profile_store.load("some", 2, tmp_path) is None  # one warning
    assert profile_store.store(StoredProfile(a_profile(), {}), tmp_path)
    assert profile_store.load("some", 2, tmp_path) is not None


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(ProfileWarning, match="cannot be kept"):
        assert not profile_store.store(StoredProfile(a_profile(), {}), tmp_path / "file")


def test_the_folder_of_profiles(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    assert profile_store.cache_folder() == tmp_path
    monkeypatch.delenv("PIPESPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_store.cache_folder() == tmp_path / "pipespec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_store.cache_folder().parts[-2:] == (".cache", "pipespec")


def test_a_user_without_a_home(monkeypatch):
    """A number in a container. Profiles are measured, and not kept."""
    for name in ("PIPESPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def lacks() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", lacks)
    monkeypatch.setattr(profile_store, "_warned", set())
    assert profile_store.load("0" * 32, 2) is None
    with pytest.warns(ProfileWarning, match="no home folder: set PIPESPEC_CACHE to a folder"):
        assert not profile_store.store(StoredProfile(a_profile(), {}))


def test_the_key_is_of_everything_that_matters(monkeypatch):
    a, same, other = random_llama(1), random_llama(1), random_llama(2)
    key = profile_store.digest([a], threads=1)
    assert key == profile_store.digest([same], threads=1)
    assert key != profile_store.digest([other], threads=1)  # same shape, other weights
    assert key != profile_store.digest([a], threads=2)
    assert key != profile_store.digest([a, same], threads=1)
    assert key != profile_store.digest([random_llama(1).bfloat16()], threads=1)
    monkeypatch.setattr(profile_store, "__version__", "9.9")
    assert key != profile_store.digest([a], threads=1)
