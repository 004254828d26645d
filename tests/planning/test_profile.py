"""Profiles: what is measured goes through the engine, what is kept can be read, and what cannot be read is made anew."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.drivers import Request, WorkersDriver
from pipespec.drivers.base import Policy
from pipespec.drivers.step import FixedStage
from pipespec.placement import NotCapturable
from pipespec.planning import profile as profiles
from pipespec.planning.profile import Profile, ProfileWarning, StageProfile, StepTimes, Stored
from pipespec.sampling import Selection
from pipespec.stage import Start
from tests.conftest import VOCABULARY, always_right, always_wrong, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Faulty


def stage(name="draft 0", step=1e-3, **more) -> StageProfile:
    times = StepTimes(1, 1, 64, (1, 2, 4), (step, 1.5 * step, 2 * step), **{"prefill_s": 1e-4, **more})
    return StageProfile(name, 1000, (times,), 0.5, 0.25, 1e-4)


def a_profile(key="some") -> Profile:
    return Profile((stage(), stage("target", 4e-3)), 2, 1.1, key)


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(profiles, "_told", set())


def test_between_the_measured_widths_it_is_interpolated():
    times = StepTimes(1, 1, 64, (1, 2, 4), (1.0, 2.0, 3.0))
    assert [times.at(w) for w in (1, 1.5, 2, 3, 4)] == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert times.at(8) == 5.0  # as the last two widths say
    assert StepTimes(1, 1, 64, (1, 4), (2.0, 1.0)).at(9) == 1.0  # never less with more
    assert StepTimes(1, 1, 64, (1,), (2.0,)).at(9) == 2.0


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
        lambda: Profile((stage(),), 1, 0.0),
        lambda: Profile((stage(),), 1, float("inf")),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ValueError, match=r"."):
        make()


def test_measured_steps_feed_what_they_say():
    model = random_llama(3)
    bench = profiles._Bench(model, rows=2, context=8, steps=16)
    for again in (False, True):
        assert bench.begin(reuse=again) > 0
        assert [bench._block.length(1, row) for row in range(2)] == [8, 8]
        for width in (1, 4, 2, 8, 33, 1):
            before = [bench._block.counters(1, row)["fed"] for row in range(2)]
            assert bench.step(width) > 0
            assert [bench._block.counters(1, row)["fed"] - b for row, b in enumerate(before)] >= [width] * 2
            if width > 1:
                assert bench._stage.port.n_hint[:2].tolist() == [width - 1] * 2


def test_all_stages_with_every_number_of_threads():
    models = [random_llama(1, layers=1), random_llama(0)]
    found = profiles.measure_stages(models, ["a", "b"], budget_s=0.5)
    assert [s.name for s in found.stages] == ["a", "b"]
    for s in found.stages:
        assert {t.threads for t in s.times} == set(profiles.thread_counts(2))
        assert len({t.context for t in s.times}) == 2
        assert min(t.prefill_s for t in s.times) > 0
    assert all(s.contention == s.burden == 0.0 for s in found.stages)  # nobody asked


def test_a_hurried_profile_has_fewer_widths():
    found = profiles.measure_stages([random_llama(0)], ["a"], budget_s=0.0)
    assert 1 < len(found.stages[0].times[0].widths) < len(profiles.WIDTHS)


@pytest.mark.parametrize("rows", [1, 2])
def test_captured_steps_have_the_width_they_are_measured_for(monkeypatch, rows):
    """Through the driver's own steps, and with the prompts beside them."""
    models = [random_llama(1, layers=1), random_llama(0)]
    fed = []
    body = FixedStage.body
    monkeypatch.setattr(
        FixedStage, "body", lambda s, tokens, *more: fed.append(tuple(tokens.shape)) or body(s, tokens, *more)
    )
    found = profiles.measure_captured(models, ["a", "b"], rows=rows, widths=(1, 4))
    assert set(fed) == {(rows, 1), (rows, 4)}
    for times in found:
        short, long = times
        assert short.context < long.context
        for t in times:
            assert (t.rows, t.widths, t.captured) == (rows, (1, 4), True)
            assert min(t.seconds) > 0
            assert t.prefill_s > 0
    assert all(m.config._attn_implementation == "sdpa" for m in models)
    profile = profiles.measure_stages(models, ["a", "b"], rows=rows, budget_s=0.0)
    assert not profile.target.has(rows, captured=True)
    both = profile.adding(found)
    assert both.target.has(rows, captured=True)
    assert both.target.seconds(4, threads=1, rows=rows, captured=True) == pytest.approx(found[1][0].at(4))
    eager = {"threads": 1, "rows": rows}
    assert both.target.seconds(4, **eager) == profile.target.seconds(4, **eager)
    assert Profile.from_json(json.loads(json.dumps(both.to_json()))) == both


def test_what_cannot_be_captured_is_named_as_in_the_chain(monkeypatch):
    models = [random_llama(1, layers=1), random_llama(0)]
    monkeypatch.setattr(models[0], "set_attn_implementation", lambda name: None)
    with pytest.raises(NotCapturable, match="small cannot be captured"):
        profiles.measure_captured(models, ["small", "big"])
    with torch.autocast("cpu"), pytest.raises(NotCapturable, match=r"big cannot be captured .* autocast"):
        profiles.measure_captured(models[1:], ["big"])
    assert models[1].config._attn_implementation == "sdpa"


def test_a_file_from_before_there_were_captured_steps(tmp_path):
    stored = Stored(a_profile(), {})
    profiles.store(stored, tmp_path)
    file = tmp_path / "some.json"
    data = json.loads(file.read_text())
    for s in data["profile"]["stages"]:
        del s["device"]
        for t in s["times"]:
            del t["captured"]
    file.write_text(json.dumps(data))
    assert profiles.load("some", 2, tmp_path).profile == stored.profile


class Scripted:
    """Instead of a model at work: a step takes ``seconds(stage, threads, width)`` and the n-th round ``pace[n]`` times as long."""

    def __init__(self, monkeypatch, seconds, pace):
        self.round = -1
        monkeypatch.setattr(profiles._Bench, "begin", lambda bench, reuse=False: 64e-4 * self.pace())
        monkeypatch.setattr(profiles._Bench, "step", lambda bench, width: seconds(width) * self.pace())
        self._pace = pace

    def pace(self):
        return self._pace[max(self.round, 0)]


def test_a_bad_moment_is_the_machines_and_not_the_steps(monkeypatch):
    """A quarter of the rounds is twice as slow: the step times are those of the others, and slowness tells of it."""
    script = Scripted(monkeypatch, lambda width: 1e-3 * (1 + 0.1 * width), [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    profiler = profiles.Profiler([random_llama(1, layers=1), random_llama(0)], ["a", "b"])
    for script.round in range(8):
        profiler.round()
    found = profiler.profile()
    assert found.slowness == pytest.approx(1.25)
    for s in found.stages:
        for t in s.times:
            assert t.widths == profiles.WIDTHS
            assert t.seconds == pytest.approx([1e-3 * (1 + 0.1 * w) for w in t.widths])
            assert t.prefill_s == pytest.approx(1e-4)


class AtWork(WorkersDriver):
    """Says how many tokens a draft has when it has more than the last time: on a busy machine it may have taken no step in between."""

    @contextmanager
    def drafting(self, request, draft):
        last = -1

        with super().drafting(request, draft) as drafted:

            def more(at_least: int) -> int:
                nonlocal last
                last = drafted(max(at_least, last + 1))
                return last

            yield more


@pytest.mark.slow
def test_a_draft_at_work_beside_the_target(target):
    draft = Faulty.like(random_llama(4, layers=1))
    profiler = profiles.Profiler([draft, target], ["draft", "target"], widths=(1, 2))
    driver = AtWork([draft, target], Policy((4,)))
    draft.set(delay=-0.1)  # it does not come to its end meanwhile
    try:
        for _ in range(3):
            profiler.beside(driver)
        assert driver.policy == Policy((4,))
        prompt = random_prompts(1, seed=3)[0].numpy().astype(np.int32)
        driver.run(Request(Start([prompt], [len(prompt) + 8], Selection(), VOCABULARY), []))  # and it can be used
        assert driver.block.length(1, 0) == len(prompt) + 8
        driver._workers[0].process.kill()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profiler.beside(driver)  # started anew, or nothing is learnt
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
    table = profiles.agreement(truth, [np.array([5, 1, 2, 3]), np.array([5, 6, 2, 4])])
    assert table.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2]]
    with pytest.raises(ValueError, match="answered"):
        profiles.agreement(truth, [truth[:2]])


@pytest.mark.parametrize("sample", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}])
def test_a_stage_asked_afterwards_says_what_it_said(target, sample):
    prompt = random_prompts(1, seed=5, shortest=7, longest=7)[0]
    with Pipeline(target, schedule="plain") as plain:
        arguments = {"do_sample": True, "seed": 9, "top_k": 0} | sample if sample else {"do_sample": False}
        text = plain.generate(prompt[None], max_new_tokens=90, **arguments)[0].numpy()
        seeds = plain.report.seeds
    selection = Selection(seeds=seeds, **sample)
    said = profiles.choices(target, text, 7, selection, VOCABULARY)
    assert np.mean(said == text[7:]) > 0.98  # but for near-ties of wider forwards
    models = [always_wrong(target), noisy(target, 0.02), always_right(target), target]
    table = profiles.agreement_on(models, text, 7, own_text=True, selection=selection)
    right = (table == 0).mean(axis=0)
    assert right[0] < 0.05 < right[1] <= right[2]
    assert right[2] > 0.98


def test_agreement_on_a_text_that_is_not_the_targets(target):
    text = torch.cat(random_prompts(4, seed=2, shortest=24)).numpy()
    table = profiles.agreement_on([always_right(target), target], text, 12, own_text=False)
    assert len(table) == len(text) - 12
    assert not table.any()


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_it_comes_back_as_it_was(tmp_path):
    stored = Stored(a_profile(), {"greedy": np.array([[0], [1]], dtype=np.uint8)})
    assert profiles.store(stored, tmp_path / "new")
    back = profiles.load("some", 2, tmp_path / "new")
    assert back.profile == stored.profile
    assert np.array_equal(back.tables["greedy"], stored.tables["greedy"])
    assert profiles.load("other", 2, tmp_path / "new") is None
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["some.json"]


def _damaged(data: dict, **changes) -> str:
    return json.dumps(data | changes)


@pytest.mark.parametrize(
    "kind", ["noise", "binary", "cut", "format", "foreign", "zero", "table", "list", "empty", "huge", "deep"]
)
def test_a_corrupt_file_is_told_once_and_made_anew(tmp_path, kind):
    profiles.store(Stored(a_profile(), {"greedy": np.array([[0], [1]], dtype=np.uint8)}), tmp_path)
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
    with pytest.warns(ProfileWarning, match=r"some\.json.*made anew"):
        assert profiles.load("some", 2, tmp_path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiles.load("some", 2, tmp_path) is None  # told once
    assert profiles.store(Stored(a_profile(), {}), tmp_path)
    assert profiles.load("some", 2, tmp_path) is not None


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(ProfileWarning, match="cannot be kept"):
        assert not profiles.store(Stored(a_profile(), {}), tmp_path / "file")


def test_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    assert profiles.cache_folder() == tmp_path
    monkeypatch.delenv("PIPESPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profiles.cache_folder() == tmp_path / "pipespec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profiles.cache_folder().parts[-2:] == (".cache", "pipespec")


def test_the_key_is_of_everything_that_matters(monkeypatch):
    a, same, other = random_llama(1), random_llama(1), random_llama(2)
    key = profiles.digest([a], threads=1)
    assert key == profiles.digest([same], threads=1)
    assert key != profiles.digest([other], threads=1)  # same shape, other weights
    assert key != profiles.digest([a], threads=2)
    assert key != profiles.digest([a, same], threads=1)
    assert key != profiles.digest([random_llama(1).bfloat16()], threads=1)
    monkeypatch.setattr(profiles, "__version__", "9.9")
    assert key != profiles.digest([a], threads=1)
