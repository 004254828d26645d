"""Prompt lookup as the first draft: the target's own text in every chain, and exactly the draft tokens that a plain search would find."""

import math

import numpy as np
import pytest
import torch

import pipespec
from pipespec import NgramDraft, Pipeline
from tests.conftest import noisy, random_llama, random_prompts
from tests.support.processes import await_drafts, kill_worker
from tests.waiting import drafts_keep_up

NEW = 40
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.7, "top_k": 3}


@pytest.fixture(scope="module")
def model():
    return random_llama(7)


@pytest.fixture(scope="module")
def repetitive(model):
    """Prompts that contain text of the target twice, of different lengths."""
    rows = []
    for prompt in random_prompts(3, seed=31, shortest=3, longest=12):
        text = model.generate(prompt[None], max_new_tokens=20, do_sample=False)[0]
        rows.append(torch.cat([text, text[: len(prompt) + 3]]))
    return rows


def plain(model, ids, mask, **kwargs):
    """The text of the target alone: transformers' for greedy decoding, and the pipeline's of the seed."""
    if kwargs.get("do_sample"):
        return Pipeline(model, schedule="plain").generate(ids, attention_mask=mask, **kwargs)
    return model.generate(ids, attention_mask=mask, **kwargs)


def search(text: list[int], draft: NgramDraft) -> int | None:
    """The token that the draft proposes after ``text``, by a plain search."""

    def followers(source: list[int], least: int) -> tuple[int, list[int]]:
        """The longest match, and what follows its occurrences."""
        for n in range(min(draft.max_match, len(text)), least - 1, -1):
            ends = range(n, len(source))
            if found := [source[end] for end in ends if source[end - n : end] == text[-n:]]:
                return n, found
        return 0, []

    length, own = followers(text, draft.min_match)
    certainty = min(0.95, 0.2 + 0.12 * length) if own else 0.2
    n, found = followers([] if draft.ids is None else draft.ids.tolist(), 1)
    if found:
        token = max(reversed(found), key=found.count)
        if found.count(token) / (len(found) + 3 / n) >= certainty:
            return token
    return own[-1] if own else None


def copied(text: list[int], draft: NgramDraft, count: int) -> list[int]:
    """The text with the tokens behind the place that a plain search finds, as captured rounds draft them."""
    corpus = [] if draft.ids is None else draft.ids.tolist()
    for n in range(min(draft.max_match, len(text)), draft.min_match - 1, -1):
        for source in (list(text), corpus):
            for end in range(len(source) - 1, n - 1, -1):
                if source[end - n : end] == text[-n:]:
                    found = (source[end:] * count)[:count] if source is not corpus else source[end : end + count]
                    return [*text, *found]
    return text


def verified(
    text: list[int], prompt: int, draft: NgramDraft, lookahead: int, *, captured: bool = False
) -> tuple[int, int, int]:
    """Steps, draft tokens and accepted ones with which a target arrives at ``text``. Its first step takes the logits of the prompt."""
    at, steps, drafted, accepted = prompt + 1, 1, 0, 0
    while at < len(text):
        tokens = copied(text[:at], draft, lookahead) if captured else text[:at]
        while (
            not captured
            and len(tokens) < min(at + lookahead, len(text))
            and (found := search(tokens, draft)) is not None
        ):
            tokens.append(found)
        # One position stays free for the target's own token.
        proposed = tokens[at : len(text) - 1]
        same = next((i for i, token in enumerate(proposed) if token != text[at + i]), len(proposed))
        steps, drafted, accepted = steps + 1, drafted + len(proposed), accepted + same
        at += same + 1
    return steps, drafted, accepted


@pytest.mark.parametrize("schedule", ["lockstep", "workers", "rounds"])
@pytest.mark.parametrize(
    "draft", [NgramDraft(), NgramDraft(min_match=1, max_match=3), NgramDraft(min_match=3)], ids=["2-8", "1-3", "3-8"]
)
@pytest.mark.parametrize("kwargs", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_verifies_what_a_search_finds(model, repetitive, schedule, draft, kwargs):
    total, captured = 0, schedule == "rounds"
    schedule, graphs = ("lockstep", True) if captured else (schedule, None)
    with Pipeline(model, draft, schedule=schedule, lookahead=6, graphs=graphs) as pipe:
        for prompt in repetitive:
            ids, mask = prompt[None], torch.ones_like(prompt[None])
            wanted = plain(model, ids, mask, max_new_tokens=NEW, **kwargs)
            got = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, **kwargs)
            assert torch.equal(wanted, got)
            stage = pipe.report.stages[-1]
            counts = verified(got[0].tolist(), len(prompt), draft, 6, captured=captured)
            assert (stage.steps, stage.drafted, stage.accepted) == counts
            assert pipe.report.schedule == schedule
            total += stage.accepted
    assert total > 0


def test_text_without_repetition_costs_no_draft_tokens(model):
    prompt = torch.arange(2, 30)[None]
    wants = {"max_new_tokens": NEW, "do_sample": False, "no_repeat_ngram_size": 2}
    with Pipeline(model, "ngram") as pipe:
        assert torch.equal(model.generate(prompt, **wants), pipe.generate(prompt, **wants))
        index, target = pipe.report.stages
        assert (index.steps, target.drafted, target.steps) == (0, 0, NEW)
        # The same index drafts as soon as something repeats.
        pipe.generate(torch.cat([prompt, prompt], 1), max_new_tokens=NEW, do_sample=False)
        assert pipe.report.stages[1].drafted > 0


@pytest.mark.parametrize("graphs", [False, True], ids=["step by step", "rounds"])
@pytest.mark.parametrize("kwargs", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_a_corpus(model, repetitive, kwargs, graphs):
    """With the target's own text as the corpus, every draft token is accepted, in steps of 8 tokens after the first one."""
    prompt = random_prompts(1, seed=8, shortest=6)[0]
    text = plain(model, prompt[None], None, max_new_tokens=NEW, **kwargs)
    draft = NgramDraft(corpus=text[0].tolist(), min_match=3, max_match=32)
    with Pipeline(model, draft, schedule="lockstep", lookahead=7, graphs=graphs) as pipe:
        assert torch.equal(text, pipe.generate(prompt[None], max_new_tokens=NEW, **kwargs))
        stage = pipe.report.stages[-1]
        steps = 1 + math.ceil((NEW - 1) / 8)
        assert (stage.steps, stage.drafted, stage.accepted) == (steps, NEW - steps, NEW - steps)
        # Another text of the same pipeline.
        wanted = plain(model, repetitive[0][None], None, max_new_tokens=NEW, **kwargs)
        assert torch.equal(wanted, pipe.generate(repetitive[0][None], max_new_tokens=NEW, **kwargs))
        stage = pipe.report.stages[-1]
        assert (stage.steps, stage.drafted, stage.accepted) == verified(
            wanted[0].tolist(), len(repetitive[0]), draft, 7, captured=graphs
        )


def test_a_corpus_from_a_file(tmp_path):
    from transformers import AutoTokenizer

    from pipespec.demo import family_path

    path = family_path("target")
    ids = AutoTokenizer.from_pretrained(path)("def mean(values):", return_tensors="pt").input_ids
    with Pipeline(path, schedule="plain", dtype="float32") as pipe:
        text = pipe.generate(ids, max_new_tokens=32, do_sample=False)
    file = tmp_path / "corpus.txt"
    file.write_text(AutoTokenizer.from_pretrained(path).decode(text[0], skip_special_tokens=True))
    for corpus in (file, str(file)):
        with Pipeline(path, NgramDraft(corpus=corpus), dtype="float32", lookahead=8) as pipe:
            assert torch.equal(text, pipe.generate(ids, max_new_tokens=32, do_sample=False))
            assert pipe.report.stages[-1].accepted > 16


def test_the_index_in_a_worker_drafts(model, repetitive):
    """In the process of the first model, whose draft tokens are the target's own."""
    prompt = repetitive[1]
    draft = noisy(model, 0.0)
    wanted = model.generate(prompt[None], max_new_tokens=NEW, do_sample=False)
    # Larger than the buffer of the socket to the worker.
    corpus = np.tile(wanted[0].numpy(), 5000)
    with Pipeline(model, [NgramDraft(corpus=corpus, max_match=32), draft], schedule="workers", trace=256) as pipe:
        for _ in range(2):
            with drafts_keep_up(pipe, [len(prompt) + NEW]):
                assert torch.equal(wanted, pipe.generate(prompt[None], max_new_tokens=NEW, do_sample=False))
            index, first, target = pipe.report.stages
            assert first.accepted == first.drafted > 0
            assert target.accepted == target.drafted > 0
            # The trace has the steps of every stage, the index included.
            entries = pipe.report.traced()
            assert list(entries) == ["ngram", "draft 0", "target"]
            assert len(entries["ngram"]) == index.steps > 0


def test_no_stage_waits_for_the_index(model):
    """What it can draft is there when the target plans, and nothing more comes."""
    prompt = torch.arange(2, 9)
    wanted = model.generate(prompt[None], max_new_tokens=NEW, do_sample=False)[0].tolist()
    draft = NgramDraft(corpus=wanted[5:9])  # the end of the prompt and two more tokens
    with Pipeline(model, draft, schedule="workers") as pipe:
        assert pipe.generate(prompt[None], max_new_tokens=NEW, do_sample=False)[0].tolist() == wanted
        stage = pipe.report.stages[-1]
    counts = verified(wanted, len(prompt), draft, 8)
    assert (stage.steps, stage.drafted, stage.accepted) == counts
    assert counts[1] > 0


def test_a_worker_that_dies_takes_the_index_with_it(model, repetitive):
    prompt = repetitive[0]
    wanted = model.generate(prompt[None], max_new_tokens=NEW, do_sample=False)
    with Pipeline(model, ["ngram", noisy(model, 0.05)], schedule="workers") as pipe:
        kill_worker(pipe, 1)
        with pytest.warns(pipespec.StageFailure, match=r"draft stage 0 is lost \(killed by SIGKILL\)"):
            assert torch.equal(wanted, pipe.generate(prompt[None], max_new_tokens=NEW, do_sample=False))
        await_drafts(pipe)
        with drafts_keep_up(pipe, [len(prompt) + NEW]):
            assert torch.equal(wanted, pipe.generate(prompt[None], max_new_tokens=NEW, do_sample=False))
        assert pipe.report.stages[0].steps > 0
