"""The lengths of captured rounds: those that pay are chosen, and no choice changes a text."""

import random

import pytest
import torch

from pipespec import NgramDraft, Pipeline
from pipespec.schedules.graphs.rounds import LENGTHS, RoundLengths
from tests.conftest import noisy, random_llama, random_prompts
from tests.support.ways import driver_of


def play(lengths: RoundLengths, rate: float, each: float, rounds: int = 160) -> list[int]:
    """The lengths of the rounds of a call whose draft tokens are accepted at a rate, and take a part of a plain step each. Rounds of one row."""
    numbers, played = random.Random(0), []
    lengths.begin()
    for _ in range(rounds):
        length = lengths.length
        accepted = next((i for i in range(length) if numbers.random() > rate), length)
        lengths.note(length, length, accepted, 1, 0.005 * (1 + each * length))
        played.append(length)
    return played


@pytest.mark.parametrize(("rate", "each", "wanted"), [(0.97, 0.1, 6), (0.6, 0.2, 2), (0.3, 0.25, 0)])
def test_the_length_that_pays_is_taken(rate: float, each: float, wanted: int) -> None:
    lengths = RoundLengths()
    first = play(lengths, rate, each)
    assert set(LENGTHS) <= set(first[:8])
    assert first[-1] == wanted
    assert lengths.is_resting == (wanted == 0)
    # Later calls begin with it. A rest is tried less and less often.
    for _ in range(8):
        later = play(lengths, rate, each)
    assert later[:4] == [wanted] * 4


def test_a_call_that_rests_rests_to_its_end() -> None:
    """The draft has not read what was decoded without it."""
    played = play(RoundLengths(), 0.2, 0.3)
    rests = max(i for i, length in enumerate(played) if length) + 1
    assert rests < 40
    assert played[rests:] == [0] * (len(played) - rests)


def test_an_index_that_rests_is_tried_again_in_the_same_call() -> None:
    """It has nothing to read. A round in which it finds nothing costs as much as one whose first token is rejected."""
    lengths = RoundLengths(may_resume=True)
    lengths.begin()
    played = []
    for i in range(160):
        length, finds = lengths.length, i > 90
        lengths.note(length, length * finds, length * finds, 1, 0.005 * (1 + 0.05 * length))
        played.append(length)
    assert played[24:64] == [0] * 40
    assert played[-8:] == [6] * 8


def test_a_draft_that_has_become_better_is_tried_again() -> None:
    lengths = RoundLengths()
    play(lengths, 0.2, 0.3)
    assert any(play(lengths, 0.97, 0.1)[-1] for _ in range(40))


@pytest.mark.parametrize("rows", [1, 3])
def test_no_length_changes_a_text(rows: int) -> None:
    """Rounds of all lengths follow one another, also with a draft that is behind."""
    target = random_llama(3)
    prompts = random_prompts(rows, seed=4, shortest=9, longest=9)
    ids = torch.stack(prompts)
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None}
    with Pipeline(target, schedule="plain", graphs=True) as plain:
        wanted = plain.generate(ids, **options).tolist()
    with Pipeline(target, [noisy(target, 0.05)], schedule="lockstep", graphs=True) as pipe:
        seen, accepted = set(), 0
        note = driver_of(pipe).lengths.note

        def noted(length: int, *given: object) -> None:
            seen.add(length)
            note(length, *given)

        driver_of(pipe).lengths.note = noted
        for _ in range(2):
            assert pipe.generate(ids, **options).tolist() == wanted
            accepted += pipe.report.stages[-1].accepted
        # The first rounds try each of them, whatever takes how long.
        assert seen == set(LENGTHS)
        assert accepted > 0


@pytest.mark.parametrize("finds", [True, False])
def test_an_index_behind_a_model_costs_no_draft_tokens(finds: bool) -> None:
    """It drafts or passes on all that the target may verify. A model drafts in each of its steps, though the index has gone ahead of it."""
    target = random_llama(7)
    ids = random_prompts(1, seed=5, shortest=6)[0][None]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    text = type(target).generate(target, ids, **options)
    index = NgramDraft(corpus=text[0].tolist(), min_match=3) if finds else NgramDraft(min_match=32, max_match=32)
    drafts = [random_llama(8) if finds else noisy(target, 0.0), index]
    with Pipeline(target, drafts, schedule="lockstep", graphs=True, lookahead=4) as pipe:
        assert torch.equal(pipe.generate(ids, **options), text)
        draft, _, last = pipe.report.stages
    assert last.acceptance_rate == 1
    assert last.drafted >= 4 * (last.steps - 2)  # the first token has none before it, and the last ones need fewer
    assert draft.steps == 4 * (last.steps - 1)
