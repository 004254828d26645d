"""The published schedules as baselines: the target's text with any drafts and timing, and drafts that continue from the right cache."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import published
from bench.published import Asynchronous, BaselineStage, Lockstep, StageFailed, end_of
from tests.conftest import always_right, always_wrong, noisy, random_llama, random_prompts

NEW = 32


def thread(*arguments: object) -> threading.Thread:
    return threading.Thread(target=published.serve, args=arguments, daemon=True)


@contextmanager
def closing(chain: Asynchronous) -> Iterator[Asynchronous]:
    try:
        yield chain
    finally:
        chain.close()


def plain(model: LlamaForCausalLM, prompt: Sequence[int], new: int = NEW) -> list[int]:
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def expected(target: LlamaForCausalLM) -> list[list[int]]:
    """The target's texts after ``PROMPTS``."""
    return [plain(target, prompt) for prompt in PROMPTS]


def chains(target: LlamaForCausalLM) -> list[list[LlamaForCausalLM]]:
    close, far = noisy(target, 0.03, 1), noisy(target, 0.1, 2)
    return [
        [always_right(target), target],
        [always_wrong(target), target],
        [far, close, target],
        [always_wrong(target), far, close, target],
    ]


PROMPTS = [p.tolist() for p in random_prompts(2, seed=4)]


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose steps take a random time, often none."""
    generator, step = random.Random(0), BaselineStage.step

    def slow(self: BaselineStage, drafts: Sequence[int] = ()) -> None:
        time.sleep(generator.choice((0.0, 0.0, 0.001, 0.004)))
        step(self, drafts)

    monkeypatch.setattr(BaselineStage, "step", slow)


@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_lockstep_writes_the_targets_text(target: LlamaForCausalLM, expected: list[list[int]], lookahead: int) -> None:
    for models in chains(target):
        chain = Lockstep(models, lookahead)
        for prompt, text in zip(PROMPTS, expected, strict=True):
            assert chain.generate(prompt, NEW) == text


def test_lockstep_accepts_what_is_right(target: LlamaForCausalLM) -> None:
    chain = Lockstep([always_right(target), target], 5)
    chain.generate(PROMPTS[0], NEW)
    _, (rounds, drafted, accepted) = chain.counts()
    assert drafted == accepted > 0
    assert rounds <= NEW / 4  # four drafts and a token of its own, most of the time


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.usefixtures("restless")
def test_asynchronous_writes_the_targets_text(
    target: LlamaForCausalLM, expected: list[list[int]], lookahead: int
) -> None:
    for models in chains(target):
        with closing(Asynchronous(models, lookahead, start=thread)) as chain:
            for prompt, text in zip(PROMPTS, expected, strict=True):
                assert chain.generate(prompt, NEW) == text
            counts = chain.counts()
            assert all(steps > 0 for steps, _, _ in counts)
            if len(models) == 2:
                accepted, drafted = counts[-1][2], counts[-1][1]
                assert accepted == (drafted if models[0].lm_head.weight.equal(target.lm_head.weight) else 0)


def test_asynchronous_in_processes(target: LlamaForCausalLM, expected: list[list[int]]) -> None:
    with closing(Asynchronous([noisy(target, 0.05), target], 3, threads=1)) as chain:
        for prompt, text in zip(PROMPTS, expected, strict=True):
            assert chain.generate(prompt, NEW) == text
        chain._drafts[0].kill()
        with pytest.raises(StageFailed, match="stage 0"):
            chain.generate(PROMPTS[0], NEW)
    assert not chain._drafts[0].is_alive()


def test_the_end(target: LlamaForCausalLM, expected: list[list[int]]) -> None:
    """The text ends at the first end token, at any place, and at every length limit."""
    assert end_of([5, 7, 5], 9, ()) is None
    assert end_of([5, 7, 5], 9, (7, 5)) == 1
    assert end_of([5, 7, 5], 3, (9,)) == 3
    assert end_of([5, 7, 9], 2, (9,)) == 2
    prompt, text = PROMPTS[0], expected[0]
    lockstep = Lockstep([noisy(target, 0.05), target], 4)
    with closing(Asynchronous([noisy(target, 0.05), target], 2, start=thread)) as chain:
        generators: list[Callable[..., list[int]]] = [lockstep.generate, chain.generate]
        for generate in generators:
            for token in dict.fromkeys(text[:6]):
                assert generate(prompt, NEW, [token]) == text[: text.index(token) + 1]
            for limit in (1, 2, 5):
                assert generate(prompt, limit) == text[:limit]


def wrong_feed(self: BaselineStage, drafts: Sequence[int] = ()) -> None:
    """The published fault: after a rollback only the last token is fed."""
    self._held = max(self._held, len(self.prompt) + len(self.out) - 1)
    right_step(self, drafts)


right_step = BaselineStage.step


@pytest.mark.parametrize("step", [right_step, wrong_feed], ids=["ours", "fault"])
def test_a_rolled_back_stage_drafts_from_the_right_text(
    target: LlamaForCausalLM, step: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a rollback to every place, the next draft token is the model's choice after the corrected text. The published fault is detected."""
    monkeypatch.setattr(BaselineStage, "step", step)
    draft, prompt = random_llama(5), PROMPTS[1]
    right = plain(target, prompt, 12)
    good = []
    for shared in range(10):
        stage = BaselineStage(draft)
        stage.begin(prompt)
        stage.out = right[:shared] + [(t + 1) % 320 for t in right[shared:11]]
        stage.step()  # the cache holds the wrong text now
        stage.roll_back(right)
        assert stage.out == right
        for _ in range(3):
            stage.step()
        good.append(stage.out[12:] == plain(draft, prompt + right, 3))
        assert stage._held == len(prompt) + len(stage.out) - 1 == stage._cache.get_seq_length() or step is wrong_feed
    assert all(good) if step is right_step else not all(good)


def test_refusals(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Lockstep([target], 0)
    with pytest.raises(ValueError, match="negative"):
        Asynchronous([target], -1)
