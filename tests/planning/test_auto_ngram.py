"""schedule="auto" with an n-gram index: exact replays, fixed numbers, choices that follow the texts, and a text that no choice changes."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipespec import NgramDraft, Pipeline
from pipespec.cli.main import main
from pipespec.planning import agreement, measure, planner, profile_store
from pipespec.planning import auto as autos
from pipespec.planning.auto import AutoDriver
from pipespec.planning.planner import CallShape, Candidate, plan, predict
from pipespec.planning.profile import Profile
from pipespec.planning.simulator import NOTHING, Answers, SimulatedPolicy, StageModel, simulate
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.pipespec.test_ngram import search, verified
from tests.planning.test_planner import captured, chain, stage

INDEX = replace(stage("ngram", 1e-7), ngram=True)
SAMPLED = {"do_sample": True, "seed": 3, "temperature": 0.8}
ALONE = [StageModel(1e-6, ngram=True), StageModel(1e-3)]


def with_index(*steps: float) -> Profile:
    """A chain behind an n-gram index."""
    profile = chain(*steps)
    return replace(profile, stages=(INDEX, *profile.stages))


def runs(*lengths: int, positions: int = 512) -> np.ndarray:
    """Answers of an index that is right for one length, wrong once, and finds nothing for the other, again and again. uint8 [positions]."""
    right, nothing = lengths
    piece = [0] * right + [1] + [NOTHING] * nothing
    return np.resize(np.array(piece, np.uint8), positions)


def joined(*columns: np.ndarray) -> Answers:
    return Answers(table=np.stack(columns, 1))


def drafts_right(share: float, code: int = 2, positions: int = 512) -> np.ndarray:
    return np.where(np.random.default_rng(1).random(positions) < share, 0, code).astype(np.uint8)


# --- replay and simulation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draft", [NgramDraft(), NgramDraft(min_match=1, corpus=np.array([4, 5, 6, 4, 7], np.int32))], ids=["2-8", "corpus"]
)
def test_a_replay_is_what_the_index_drafts(draft):
    text = np.random.default_rng(4).integers(3, 8, 80).astype(np.int32)
    wanted = [search(text[:at].tolist(), draft) for at in range(5, 80)]
    assert draft.followers(text, 5).tolist() == [-1 if token is None else token for token in wanted]
    found = agreement.lookups(draft, text, 5)[:, 0]
    pairs = zip(wanted, text[5:], strict=True)
    assert found.tolist() == [NOTHING if token is None else int(token != true) for token, true in pairs]
    with pytest.raises(ValueError, match="1 <= first"):
        draft.followers(text, 0)


@pytest.mark.parametrize("lookahead", [1, 4, 16])
def test_the_simulation_makes_the_steps_of_the_engine(lookahead):
    """Not only on the mean: every step, draft token and accepted token."""
    text = np.random.default_rng(5).integers(3, 6, 120).astype(np.int32)
    table = agreement.lookups(NgramDraft(), text, 20)
    policy = SimulatedPolicy(lookahead=lookahead)
    *_, last = simulate("lockstep", ALONE, Answers(table=table), 100, policy=policy).stages
    assert (last.steps, last.drafted, last.accepted) == verified(text.tolist(), 20, NgramDraft(), lookahead)


def test_its_time_is_that_of_the_next_stage():
    table = Answers(table=np.zeros((64, 1), np.uint8))
    policy = SimulatedPolicy(lookahead=4)
    free, slow = (
        simulate("lockstep", [replace(ALONE[0], step_s=s), ALONE[1]], table, 64, policy=policy) for s in (1e-9, 1e-4)
    )
    assert slow.seconds - free.seconds == pytest.approx(slow.stages[0].steps * 1e-4, rel=1e-3)
    assert free.tokens_per_step > 4
    under = [ALONE[0], StageModel(5e-4), StageModel(1e-3)]
    both = joined(runs(20, 4), drafts_right(0.8))
    for schedule in ("lockstep", "workers"):
        found = simulate(schedule, under, both, 400, policy=SimulatedPolicy(lookahead=(8, 4)))
        without = simulate(
            schedule, under[1:], Answers(table=both.table[:, 1:].copy()), 400, policy=SimulatedPolicy(lookahead=4)
        )
        assert found.stages[1].accepted > 0
        assert found.stages[1].steps < without.stages[0].steps
        assert found.seconds < without.seconds


def test_where_nothing_is_drafted_it_is_plain_decoding():
    nothing = Answers(table=np.full((64, 1), NOTHING, np.uint8))
    found = simulate(
        "lockstep",
        [replace(ALONE[0], step_s=1e-12), ALONE[1]],
        nothing,
        64,
        policy=SimulatedPolicy(lookahead=8),
        rows=2,
    )
    assert found.stages[-1].drafted == 0
    assert found.seconds == pytest.approx(64e-3)


@pytest.mark.parametrize(
    ("schedule", "stages", "table", "says"),
    [
        ("lockstep", [StageModel(1.0), StageModel(1.0)], [[NOTHING]], "is for an n-gram index"),
        ("lockstep", [StageModel(1.0), StageModel(1.0, ngram=True)], [[0]], "first draft"),
        ("workers", [ALONE[0], StageModel(1.0), StageModel(1.0)], [[0, NOTHING]], "is for an n-gram index"),
        ("reference", ALONE, [[0]], "no n-gram index"),
    ],
)
def test_other_stages_always_draft(schedule, stages, table, says):
    with pytest.raises(ValueError, match=says):
        simulate(schedule, stages, Answers(table=np.array(table, np.uint8)), 10)


# --- plans -------------------------------------------------------------------------------------------------------------


def test_a_text_that_repeats_is_left_to_the_index():
    found = plan(with_index(1e-3, 1e-2), joined(runs(30, 2), drafts_right(0.7)))
    assert found.chosen.drafts == (0,)
    assert found.chosen.schedule == "lockstep"
    assert found.chosen.lookahead[0] >= 12
    assert "with ngram > target" in found.why
    # The four ways: plain, the index, the draft, both.
    assert {c.drafts for c in found.candidates if c.schedule != "workers"} == {(), (0,), (1,), (0, 1)}
    assert (0,) not in {c.drafts for c in found.candidates if c.schedule == "workers"}


def test_a_text_without_repetitions_is_not():
    found = plan(with_index(1e-3, 1e-2), joined(runs(0, 4), drafts_right(0.9)))
    assert found.chosen.drafts == (1,) or found.chosen.drafts == (0, 1)
    assert not plan(with_index(1e-2), Answers(table=runs(0, 4)[:, None].copy())).speculates


def test_a_cheap_draft_is_better_over_the_index():
    """The index finds some pieces, and the draft all others: together they are better than each alone."""
    found = plan(with_index(3e-3, 1e-2), joined(runs(4, 12), drafts_right(0.9)), schedules=("lockstep",))
    rates = {c.drafts: c.rate for c in found.candidates}
    assert rates[0, 1] > 1.05 * max(rates[0,], rates[1,])
    assert found.chosen.drafts == (0, 1)
    assert len(found.chosen.lookahead) == 2


def test_long_pieces_and_scattered_tokens_are_told_apart():
    """Equal shares of right tokens. Where those without a match lie together, each of them costs a step, so that independent positions
    promise too much."""
    scattered = np.random.default_rng(0).permutation(runs(30, 9))
    rates = [
        plan(with_index(1e-2), Answers(table=t[:, None].copy())).candidates[0].rate for t in (runs(30, 9), scattered)
    ]
    assert rates[1] > 1.04 * rates[0]


def test_no_captured_step_follows_it():
    models = captured(chain(1e-3, 1e-2), 1e-3, 5e-3)
    profile = replace(models, stages=(INDEX, *models.stages))
    found = plan(profile, joined(runs(30, 2), drafts_right(0.7)), captured=("plain", "lockstep", "streams"))
    assert all(not c.captured for c in found.candidates if 0 in c.drafts)
    assert any(c.captured and c.drafts == (1,) for c in found.candidates)


def test_it_has_no_thread_and_slows_nothing_down():
    profile = with_index(1e-3, 1e-2)
    slowed = replace(profile, stages=(INDEX, replace(profile.stages[1], burden=1.0), profile.target))
    answers = joined(runs(3, 3), drafts_right(0.8))
    rates = [
        predict(slowed, answers, Candidate("workers", d, (8,) * len(d), 0, 1, 0.0), CallShape()) for d in ((1,), (0, 1))
    ]
    assert rates[0].step_s <= 1.05 * rates[1].step_s
    every = plan(profile, answers)
    assert {c.threads for c in every.candidates if c.schedule == "workers"} == {1}


def test_a_plan_follows_what_the_index_finds():
    profile = with_index(1e-3, 1e-2)
    first = plan(profile, joined(runs(0, 4), drafts_right(0.7)))
    assert first.chosen.drafts != (0,)
    now = planner.decide(planner.following(profile, runs(40, 1)[:, None].copy(), first), {})
    assert now.chosen.drafts == (0,)
    assert planner.decide(planner.following(profile, runs(0, 4)[:, None].copy(), now), {}).chosen.drafts != (0,)
    assert planner.following(chain(1e-2), runs(0, 4)[:, None].copy(), plan(chain(1e-2), Answers())).candidates


def test_a_profile_of_an_index(tmp_path):
    index = measure.measure_ngram(NgramDraft())
    assert 0 < index.seconds(1, threads=1) < 1e-2
    profile = replace(chain(1e-3, 1e-2), stages=(index, *chain(1e-3, 1e-2).stages), key="k")
    assert profile.models((0, 1, 2)) == (1, 2)
    more = profile.adding([stage.times[:1] for stage in profile.stages[1:]])
    assert len(more.stages[0].times) == 1
    table = joined(runs(3, 3), drafts_right(0.5)).table
    assert profile_store.store(profile_store.StoredProfile(profile, {"greedy": table}), tmp_path)
    again = profile_store.load("k", 3, tmp_path)
    assert again.profile == profile
    with pytest.raises(ValueError, match="first stage"):
        replace(profile, stages=profile.stages[1:] + profile.stages[:1])
    model = random_llama(0, layers=1)
    keys = {profile_store.digest([model], threads=1, ngram=n) for n in (None, NgramDraft(), NgramDraft(corpus=[1, 2]))}
    assert len(keys) == 3


# --- the pipeline ------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0})


@pytest.fixture(scope="module")
def model():
    return random_llama(7)


REPEATS = {"sequence_bias": {(5,): 30.0, (6,): 30.0}}
"""Texts of two tokens."""


def pipeline(monkeypatch, models, tables, *, drafts=None, **more) -> Pipeline:
    """With step times that are as predicted, so that only the texts decide."""
    monkeypatch.setattr(AutoDriver, "_record_rate", lambda *a: None)
    monkeypatch.setattr(AutoDriver, "_steering_of", lambda *a: None)
    monkeypatch.setattr(AutoDriver, "_lacks", lambda *a, **b: False)
    profile = with_index(*(1e-3 for _ in models[:-1]), 1e-2)
    made = functools.partial(
        AutoDriver, profile=profile, tables={"greedy": tables} if tables is not None else {}, **more
    )
    monkeypatch.setattr("pipespec.pipeline.AutoDriver", made)
    return Pipeline(models[-1], models[:-1] if drafts is None else drafts, schedule="auto")


def nothing(drafts: int = 1) -> np.ndarray:
    """Of an index that finds nothing, and of useless drafts."""
    return np.stack([np.full(200, NOTHING, np.uint8), *(np.full(200, 2, np.uint8) for _ in range(drafts - 1))], 1)


@pytest.mark.parametrize("given", [True, False], ids=["given", "by itself"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_it_is_chosen_where_texts_repeat(monkeypatch, model, one_core, given, sampling):
    """The plan begins without it. The texts of the calls show what it finds."""
    draft = noisy(model, 5.0)
    drafts = ["ngram", draft] if given else [draft]
    with (
        pipeline(monkeypatch, [draft, model], nothing(2), drafts=drafts) as pipe,
        Pipeline(model, schedule="plain") as plain,
    ):
        assert not pipe.plan.speculates
        for prompt in random_prompts(4, seed=31):
            ids = prompt[None]
            got = pipe.generate(ids, max_new_tokens=32, **sampling, **REPEATS)
            assert torch.equal(got, plain.generate(ids, max_new_tokens=32, **sampling, **REPEATS))
        assert pipe.report.stages[0].name == "ngram"
        assert pipe.report.schedule == "lockstep"
        assert any("ngram > " in decision for decision in pipe.report.decisions)
        assert pipe.report.stages[-1].accepted > 0


def test_it_is_not_where_texts_do_not_repeat(monkeypatch, model, one_core):
    lucky = runs(40, 1, positions=200)[:, None].copy()
    with pipeline(monkeypatch, [model], lucky) as pipe:
        assert pipe.plan.chosen.drafts == (0,)
        for prompt in random_prompts(4, seed=2, shortest=3, longest=12):
            pipe.generate(prompt[None], max_new_tokens=32, do_sample=True, seed=1, temperature=3.0)
        pipe.generate(prompt[None], max_new_tokens=32, do_sample=True, seed=2, temperature=3.0)
        assert pipe.report.schedule == "plain"
        assert len(pipe.report.stages) == 1


def test_the_choice_follows_the_newest_texts(monkeypatch, model, one_core):
    monkeypatch.setattr(autos, "_RECENT", 64)
    monkeypatch.setattr(autos, "_LEARNT_CALLS", 100)
    with pipeline(monkeypatch, [model], nothing()) as pipe:
        seen = []
        for more in (REPEATS, {"temperature": 3.0}) * 2:
            for prompt in random_prompts(4, seed=31):
                pipe.generate(prompt[None], max_new_tokens=32, **SAMPLED | more)
            seen.append(pipe.report.schedule)
        assert seen == ["lockstep", "plain", "lockstep", "plain"]


def test_batches(monkeypatch, model, one_core):
    with pipeline(monkeypatch, [model], runs(40, 1, positions=200)[:, None].copy()) as pipe:
        ids, mask = left_pad(random_prompts(3, seed=31))
        for rows in (slice(0, 3), slice(0, 2)):
            how = {"attention_mask": mask[rows], "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **REPEATS}
            assert torch.equal(pipe.generate(ids[rows], **how), model.generate(ids[rows], **how))
            assert pipe.report.stages[0].name == "ngram"


def test_measured_and_run_for_real(monkeypatch, model, tmp_path, measured_briefly):
    """Without drafts and made-up parts: the index alone is compared with plain decoding, and kept on disk."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    with Pipeline(model, schedule="auto") as pipe:
        assert {c.drafts for c in pipe.plan.candidates} == {(), (0,)}
        for prompt in random_prompts(2, seed=31):
            got = pipe.generate(prompt[None], max_new_tokens=24, do_sample=False, **REPEATS)
            wanted = model.generate(prompt[None], max_new_tokens=24, do_sample=False, **REPEATS)
            assert torch.equal(got, wanted)
    monkeypatch.setattr(measure, "measure_stages", None)
    with Pipeline(model, NgramDraft(), schedule="auto") as again:
        assert again.plan.names == ("ngram", "target")
    # A corpus is another index.
    monkeypatch.setattr(AutoDriver, "_measure", lambda self: replace(with_index(1e-2), key=self._key))
    with Pipeline(model, NgramDraft(corpus=[1, 2, 3]), schedule="auto") as other:
        assert other._driver.ngram.corpus is not None
        assert len(list(tmp_path.iterdir())) == 2


def test_beside_worker_processes(monkeypatch, model, tmp_path, measured_briefly):
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0, 1})
    draft = noisy(model, 0.02)
    with Pipeline(model, ["ngram", draft], schedule="auto") as pipe:
        ways = {(c.schedule, c.drafts) for c in pipe.plan.candidates}
        assert ("workers", (0, 1)) in ways
        assert ("workers", (0,)) not in ways
        chosen = next(c for c in pipe.plan.candidates if (c.schedule, c.drafts) == ("workers", (0, 1)))
        monkeypatch.setattr(AutoDriver, "_choose", lambda *a: chosen)
        monkeypatch.setattr(planner, "MARGIN", 0.0)
        prompt = random_prompts(1, seed=31)[0][None]
        wanted = model.generate(prompt, max_new_tokens=24, do_sample=False)
        assert torch.equal(pipe.generate(prompt, max_new_tokens=24, do_sample=False), wanted)
        assert pipe.report.schedule == "workers"
        assert [s.name for s in pipe.report.stages] == ["ngram", "draft 0", "target"]


def test_the_command(tmp_path, monkeypatch, model, measured_briefly, capsys, one_core):
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path / "cache"))
    model.save_pretrained(tmp_path / "target")
    noisy(model, 0.02).save_pretrained(tmp_path / "draft")
    given = ["--target", str(tmp_path / "target"), "--new-tokens", "16"]
    assert (
        main(
            [
                "plan",
                *given,
                "--draft",
                "ngram",
                "--draft",
                str(tmp_path / "draft"),
                "--svg",
                str(tmp_path / "plan.svg"),
                "--repeats",
                "1",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for label in ("ngram > target", "ngram > draft > target", "  draft > target"):
        assert label in out
    assert main(["plan", *given]) == 0
    assert "ngram > target" in capsys.readouterr().out


def test_a_trial_of_wide_steps_is_predicted_as_its_plan(monkeypatch):
    """From the newest texts. The table, of a text in which the index finds nothing, would give no gain."""
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0})
    profile = replace(with_index(1e-2), threads=1)
    nothing = np.full((64, 1), NOTHING, np.uint8)
    auto = AutoDriver([random_llama(0)], profile=profile, tables={"greedy": nothing}, ngram=NgramDraft())
    auto._agreement["greedy"].recent = runs(5, 2)[:, None]
    record = auto.record(1, "greedy")
    planned = auto._planned(CallShape(), "greedy")
    short = next(replace(c, lookahead=(2,)) for c in planned.candidates if c.drafts == (0,))
    record.rate(short.key).add(1.0)
    auto._widest[1, short.threads, 1] = 3
    wide = auto._choose(replace(planned, chosen=short), record)
    assert wide.lookahead == (autos._WIDE,)
    alone = planner.predict_alone(profile, runs(5, 2)[:, None], wide, planned.call)
    assert wide.tokens_per_step == alone.tokens_per_step > 2
    auto.close()
