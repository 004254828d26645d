"""confidence=True: the text is the target's whatever the confidence says, drafts stop and targets choose by it, and the report shows what was learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.config import SpeculationConfig
from pipespec.engine.sampler import Sampler
from tests.conftest import always_wrong, left_pad, noisy, random_llama, random_prompts

NEW = 32
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.8, "top_k": 20}


@pytest.fixture(scope="module")
def chain():
    target = random_llama(13)
    return target, [noisy(target, 0.12, seed=1), noisy(target, 0.05, seed=2)]


@pytest.fixture(scope="module")
def batch():
    return left_pad(random_prompts(3, seed=3, shortest=4))


def text_of(target, ids, mask, **how) -> torch.Tensor:
    if how.get("do_sample"):
        return Pipeline(target, schedule="plain").generate(ids, attention_mask=mask, max_new_tokens=NEW, **how)
    return target.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


def test_what_was_learned_is_reported(chain, batch) -> None:
    target, (_, medium) = chain
    ids, mask = batch
    with Pipeline(target, ["ngram", medium], schedule="lockstep", confidence=True) as pipe:
        pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        learned = pipe.report.stages[-1].calibration
        assert learned.outcomes > 0
        assert sum(n for _, _, n in learned.curve) >= learned.outcomes
        assert 0 <= learned.brier <= 1
        assert "Brier score" in str(pipe.report)


def garbage(kind: str):
    numbers = np.random.default_rng(7)

    def confidence(self, logits, query_lens, num_draft_tokens, selected):
        shape = tuple(selected.shape)
        if kind == "random":
            return torch.from_numpy(numbers.integers(0, 256, shape, dtype=np.uint8))
        return torch.full(shape, {"never": 1, "always": 255, "unknown": 0}[kind], dtype=torch.uint8)

    return confidence


@pytest.mark.parametrize("kind", ["random", "never", "always", "unknown"])
def test_garbage_costs_speed_and_never_text(chain, batch, kind, monkeypatch) -> None:
    target, (small, medium) = chain
    monkeypatch.setattr(Sampler, "confidence", garbage(kind))
    ids, mask = batch
    for drafts in ([small, medium], [always_wrong(target)]):
        with Pipeline(target, drafts, schedule="lockstep", confidence=True) as pipe:
            for how in ({"do_sample": False}, SAMPLED):
                got = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, **how)
                assert torch.equal(got, text_of(target, ids, mask, **how))


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_damaged_numbers_cost_speed_and_never_text(chain, batch, schedule) -> None:
    """Whatever a calibration says, which a worker writes, and whatever the drafts are told."""
    target, drafts = chain
    ids, mask = batch
    wanted = text_of(target, ids, mask)
    with Pipeline(target, drafts, schedule=schedule, confidence=True) as pipe:
        block = pipe._driver.block
        for seen, kept in ((0, 2**32 - 1), (2**32 - 1, 0), (1000, 2**31)):
            for stage in range(block.stages):
                block.set_calibration(stage, [seen] * 32, [kept] * 32)
            assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False), wanted)


def test_a_draft_stops_at_what_it_doubts(chain, monkeypatch) -> None:
    """A draft that states and has a low chance makes one token at a time; one that is always right makes many."""
    target, _ = chain
    prompt = random_prompts(1, seed=9, shortest=8)[0][None]

    def drafted(draft, kind: str) -> float:
        monkeypatch.setattr(Sampler, "confidence", garbage(kind))
        with Pipeline(target, draft, schedule="lockstep", confidence=True) as pipe:
            for _ in range(3):
                pipe.generate(prompt, max_new_tokens=64, do_sample=False)
            return pipe.report.stages[0].produced / max(1, pipe.report.stages[-1].steps)

    unsure = drafted(always_wrong(target), "never")
    sure = drafted(noisy(target, 0.0), "always")
    assert unsure <= 1.0 < 4.0 < sure


def test_without_it_nothing_is_published(chain) -> None:
    target, (small, _) = chain
    prompt = random_prompts(1, seed=9, shortest=8)[0][None]
    with Pipeline(target, small, schedule="lockstep", lookahead=4) as pipe:
        pipe.generate(prompt, max_new_tokens=16, do_sample=False)
        assert set(pipe._driver.block.confidence(0, 0)) == {0}
        assert pipe.report.stages[-1].calibration is None
    with Pipeline(target, small, schedule="lockstep", lookahead=4, confidence=True) as pipe:
        pipe.generate(prompt, max_new_tokens=16, do_sample=False)
        assert any(pipe._driver.block.confidence(0, 0))
        assert set(pipe._driver.block.confidence(1, 0)) == {0}, "no stage reads that of the target"


def test_rejection_sampling_excludes_it() -> None:
    with pytest.raises(ValueError, match="does not go with confidence=True"):
        SpeculationConfig.of(1, confidence=True, acceptance="rejection")


def test_the_setting() -> None:
    assert SpeculationConfig.of(2, schedule="lockstep", confidence=True).lookahead == (16, 16)
    assert SpeculationConfig.of(2, schedule="workers", confidence=True, lookahead=5).lookahead == (5, 5)
    assert not SpeculationConfig.of(2, schedule="plain", confidence=True).confidence
    assert not SpeculationConfig.of(0, schedule="lockstep", confidence=True).confidence
    with pytest.raises(TypeError, match=r"confidence must be True or False, not 0\.4"):
        SpeculationConfig.of(1, schedule="lockstep", confidence=0.4)
