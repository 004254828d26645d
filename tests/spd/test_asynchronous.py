"""Parts of SPD that run at the same time in one machine: a chain of drafts in processes of its own, and stages in threads of their own."""

from __future__ import annotations

import copy
import os
import signal
import threading

import pytest
import torch

from pipespec.drivers.base import StageFailure
from pipespec.spd import SpeculativePipeline
from pipespec.spd.chain import AsynchronousChain
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.spd.drafters import Blind, Failing

LAYERS = 4
NEW = 16


@pytest.fixture(scope="module")
def model():
    return random_llama(3, layers=LAYERS)


@pytest.fixture(scope="module")
def chained(model):
    """A target in three stages with two drafts in processes of their own. The last draft is equal to the target, so its tokens are accepted."""
    drafts = [noisy(model, 0.02), copy.deepcopy(model)]
    pipe = SpeculativePipeline(model, drafts, stages=3, draft_schedule="workers")
    yield pipe
    pipe.close()


def calls():
    ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
    one = random_prompts(1, seed=6, shortest=1, longest=1)[0][None]
    yield ids, {"attention_mask": mask, "do_sample": False}
    yield ids, {"attention_mask": mask, "do_sample": True, "seed": 5}
    yield one, {"do_sample": False, "eos_token_id": list(range(2, 300, 9)), "pad_token_id": 0}
    yield one, {"do_sample": True, "seed": 1, "repetition_penalty": 1.2}


def test_the_text_with_a_chain_that_runs_ahead(model, chained):
    assert isinstance(chained.drafter, AsynchronousChain)
    plain = SpeculativePipeline(model, stages=1)
    for ids, options in calls():
        out = chained.generate(ids, max_new_tokens=NEW, **options)
        assert out.tolist() == plain.generate(ids, max_new_tokens=NEW, **options).tolist()
    # A long text, so that the processes have published something however busy the machine is.
    ids, accepted = torch.tensor([[5, 6, 7]]), 0
    for _ in range(20):
        chained.generate(ids, max_new_tokens=200, do_sample=False)
        accepted = chained.report.accepted
        assert accepted == chained.report.checked
        if accepted:
            break
    assert accepted > 0


def test_a_chain_that_dies(model, chained):
    """A killed process costs drafts and no token. The next call starts it again."""
    ids = torch.tensor([[5, 6, 7]])
    wanted = model.generate(ids, max_new_tokens=60, do_sample=False)

    class Kills:
        seen = 0

        def put(self, value):
            self.seen += 1
            if self.seen == 3:
                process = chained.drafter._driver._workers[1].process
                os.kill(process.pid, signal.SIGKILL)
                process.wait()

        def end(self):
            pass

    chained.generate(ids, max_new_tokens=2, do_sample=False)
    with pytest.warns(StageFailure, match="draft stage 1 has ended.*SIGKILL"):
        out = chained.generate(ids, max_new_tokens=60, do_sample=False, streamer=Kills())
    assert torch.equal(out, wanted)
    assert torch.equal(chained.generate(ids, max_new_tokens=60, do_sample=False), wanted)
    assert chained.drafter._driver.block.is_alive(1)


@pytest.mark.parametrize("drafter", ["ngram", Blind(320)])
def test_only_models_run_ahead(model, drafter):
    with pytest.raises(ValueError, match="draft_schedule='workers' is for models that draft"):
        SpeculativePipeline(model, drafter, stages=2, draft_schedule="workers")
    with pytest.raises(ValueError, match="draft_schedule='streams': one of 'lockstep', 'workers'"):
        SpeculativePipeline(model, drafter, stages=2, draft_schedule="streams")


# ---- stages on devices of their own


@pytest.fixture(scope="module")
def spread(model):
    return SpeculativePipeline(model, [noisy(model, 0.02)], stages=[2, 1, 1], devices=["cpu"] * 3)


def test_the_text_of_stages_at_once(model, spread):
    """Text, cycles and acceptance are those of stages in turn."""
    turn = SpeculativePipeline(model, [noisy(model, 0.02)], stages=[2, 1, 1])
    for ids, options in calls():
        out = spread.generate(ids, max_new_tokens=NEW, **options)
        assert out.tolist() == turn.generate(ids, max_new_tokens=NEW, **options).tolist()
        assert (spread.report.cycles, spread.report.accepted) == (turn.report.cycles, turn.report.accepted)
        assert spread.report.cycles == 0 or min(spread.report.stage_seconds) > 0


def test_stages_run_at_the_same_time(model):
    """In a cycle with work for both stages, each waits within its step for the other one."""
    pipe = SpeculativePipeline(model, Blind(320), stages=2, devices=["cpu", "cpu"])
    driver = pipe._driver
    meeting, full, met = threading.Barrier(2, timeout=60), [False], []
    for stage in driver.stages:

        def step(*arguments, real=stage.step):
            if full[0]:
                met.append(meeting.wait())
            return real(*arguments)

        stage.step = step
    launch = driver._launch

    def launched(work):
        full[0] = all(work)
        launch(work)

    driver._launch = launched
    ids = torch.tensor([[5, 6]])
    out = pipe.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=6, do_sample=False))
    assert len(met) >= 2


def test_a_stage_that_fails_and_an_interrupted_call(model, spread):
    ids = torch.tensor([[5, 6, 7]])
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    stage = spread._driver.stages[1]
    real, seen = stage.step, []

    def fails(*arguments):
        seen.append(0)
        if len(seen) == 6:
            raise ArithmeticError("made to fail")
        return real(*arguments)

    stage.step = fails
    try:
        with pytest.raises(ArithmeticError, match="made to fail"):
            spread.generate(ids, max_new_tokens=NEW, do_sample=False)
    finally:
        stage.step = real
    assert torch.equal(spread.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)

    class Interrupts(Failing):
        def draft(self, requests):
            raise KeyboardInterrupt

    spread._driver.drafter, drafter = Interrupts("none"), spread._driver.drafter
    try:
        with pytest.raises(KeyboardInterrupt):
            spread.generate(ids, max_new_tokens=NEW, do_sample=False)
    finally:
        spread._driver.drafter = drafter
    assert torch.equal(spread.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)


def test_devices_that_do_not_fit(model):
    with pytest.raises(ValueError, match="2 devices for 3 stages"):
        SpeculativePipeline(model, stages=3, devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match="either device=, for all stages, or devices=, one per stage"):
        SpeculativePipeline(model, stages=2, devices=["cpu", "cpu"], device="cpu")
