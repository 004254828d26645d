"""The controller: it takes the best draft and number of tokens, loses little where none pays, and never changes a text."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from pipespec import Pipeline, attach
from pipespec.engine.cache import RowCache
from pipespec.engine.controller import MAX_DRAFT_TOKENS, AcceptanceRates, Choice, Controller, Machine, StepTimes
from pipespec.engine.forward import described
from pipespec.models.properties import step_bytes, weight_bytes
from pipespec_kernels import _native
from tests.conftest import always_right, always_wrong, left_pad, noisy, random_llama, random_prompts
from tests.support.texts import one_prompt, same_text
from tests.support.ways import driver_of
from tests.trials import trials

NEW = 48


class World:
    """A target whose step over ``n`` columns takes ``1 + marginal * (n - 1)`` seconds, with drafts of known cost and acceptance rate.

    Args:
        cost: Of a step of the draft model; None: there is none.
        rate: Acceptance rate of its tokens.
        ngram: How often an n-gram matches, and the acceptance rate of its tokens.
        busy: How often a step takes 2.5 times as long.
        prompt: Tokens that the draft reads first.
        experts: Part of all experts that a column chooses, each by itself. They are all of the target's weights, so a step takes as long as reading
            those that its columns choose; None: it has none.
    """

    def __init__(
        self, *, cost=None, rate=0.0, ngram=(0.0, 0.0), marginal=0.1, busy=0.0, prompt=32, experts=None, seed=0
    ):
        self.cost, self.rate, self.ngram = cost, rate, ngram
        self.marginal, self.busy, self.prompt, self.experts = marginal, busy, prompt, experts
        self.slowness = 1.0
        self.random = random.Random(seed)
        self.draft_steps = 0

    def step(self, columns: int) -> float:
        slow = 2.5 if self.random.random() < self.busy else 1.0
        return (
            self.slowness
            * slow
            * (self.read(columns) + self.marginal * (columns - 1))
            * self.random.uniform(0.97, 1.03)
        )

    def read(self, columns: int) -> float:
        """Weights that a step reads, as a part of those of one column."""
        return 1.0 if self.experts is None else (1 - (1 - self.experts) ** columns) / self.experts

    def accepted(self, rate: float, tokens: int) -> int:
        return next((j for j in range(tokens) if self.random.random() >= rate), tokens)

    def call(self, tokens: int, choose: Callable[..., Choice], controller: Controller | None = None) -> float:
        """Seconds of a call that generates ``tokens`` tokens."""
        done, unread, seconds = 0, self.prompt, 0.0
        if controller is not None:
            controller.begin()
        while done < tokens:
            has_match = self.random.random() < self.ngram[0]
            match = (self.random.choice([3, 5, 9, 16]), self.random.choice([2, 3, 5, 9])) if has_match else (0, 0)
            choice = choose([match], -1 if self.cost is None else unread, tokens - done)
            drafted, rate = min(choice.tokens, tokens - done - 1), self.rate
            if choice.source == "ngram":
                drafted, rate = min(drafted, match[0]), self.ngram[1]
            for i in range(drafted if choice.source == "model" else 0):
                columns = 1 if i else 1 + unread
                took = self.cost * self.step(columns)
                seconds += took
                self.draft_steps += 1
                if controller is not None:
                    controller.note_draft(columns, took)
                    if i == 0 and (compared := min(unread, done)) >= 8:
                        agreed = sum(self.random.random() < self.rate for _ in range(compared))
                        controller.rates["model"].note_agreement(agreed, compared)
            accepted, took = self.accepted(rate, drafted), self.step(1 + drafted)
            seconds += took
            if controller is not None:
                controller.note_target(1 + drafted, took)
                if drafted:
                    controller.note_round(choice, [match], [(drafted, accepted)])
            done += accepted + 1
            unread = 0 if choice.source == "model" else unread + accepted + 1
        return seconds

    def controlled(self, calls: int, tokens: int = 96) -> list[float]:
        """Seconds per token of each call of one pipeline."""
        controller = Controller(self.cost, lambda columns: self.read(columns) - 1)
        return [self.call(tokens, controller.choose, controller) / tokens for _ in range(calls)]

    def fixed(self, choice: Choice, calls: int = 20, tokens: int = 96) -> float:
        """Seconds per token with the same choice in each round."""
        return sum(self.call(tokens, lambda *_: choice) for _ in range(calls)) / calls / tokens

    def best(self) -> float:
        fixed = [self.fixed(Choice("ngram", k)) for k in (0, 2, 4, 8, 12, 16)]
        if self.cost is not None:
            fixed += [self.fixed(Choice("model", k)) for k in (1, 2, 3, 4, 6, 8)]
        return min(fixed)


GOOD = {
    "model": {"cost": 0.25, "rate": 0.8},
    "cheap model": {"cost": 0.1, "rate": 0.8, "marginal": 0.03},
    "n-gram": {"ngram": (0.6, 0.8)},
    "both": {"cost": 0.25, "rate": 0.75, "ngram": (0.3, 0.7)},
    "draft head": {"cost": 0.07, "rate": 0.45},
    "draft head and n-gram": {"cost": 0.07, "rate": 0.45, "ngram": (0.2, 0.7)},
    "busy": {"cost": 0.15, "rate": 0.85, "busy": 0.2},
    "half of the experts": {"cost": 0.05, "rate": 0.85, "experts": 0.5, "marginal": 0.02},
}
BAD = {
    "useless model": {"cost": 0.25, "rate": 0.02},
    "useless cheap model": {"cost": 0.1, "rate": 0.02},
    "the target as its own draft": {"cost": 1.0, "rate": 1.0},
    "useless n-gram": {"ngram": (0.3, 0.05)},
    "n-gram without a match": {"ngram": (0.0, 0.0)},
    "good n-gram, but few of the experts": {"ngram": (0.5, 0.6), "experts": 0.06, "marginal": 0.05},
    "good model, but few of the experts": {"cost": 0.1, "rate": 0.7, "experts": 0.06, "marginal": 0.05},
    "two that are useless": {"cost": 0.2, "rate": 0.02, "ngram": (0.1, 0.05)},
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_draft_gains_what_the_best_fixed_number_gains(name):
    ratios = []
    for seed in range(trials(ci=6, nightly=60)):
        seconds = World(**GOOD[name], seed=seed).controlled(calls=8)
        ratios.append(World(**GOOD[name], seed=seed).best() / (sum(seconds) / len(seconds)))
    # The best of a dozen fixed numbers is partly the luckiest.
    assert sorted(ratios)[len(ratios) // 2] >= 0.92, ratios


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_pay_costs_little(name):
    first, later = [], []
    for seed in range(trials(ci=6, nightly=60)):
        seconds = World(**BAD[name], seed=seed).controlled(calls=10)
        first.append(1 / seconds[0])
        later.append(9 / sum(seconds[1:]))
    assert sum(first) / len(first) >= 0.96, first
    assert sum(later) / len(later) >= 0.975, later


def test_the_target_as_its_own_draft_is_never_tried():
    """Not even if each of its tokens were accepted would it pay, and that is known without a step of it."""
    world = World(cost=1.0, rate=1.0)
    world.controlled(calls=10)
    assert world.draft_steps == 0


def test_the_reading_of_a_prompt_is_no_step():
    """It takes longer than a dozen steps. Its time is the price of a draft that begins, and says nothing about the next steps."""
    controller = Controller(0.2)
    controller.note_reading(100.0)
    assert controller.draft.seconds(1) is None
    controller.note_draft(1, 0.2)
    assert controller.draft.seconds(1) == pytest.approx(0.2)


def drafted_in(controller: Controller, reading: float) -> bool:
    """Whether the draft model works in a call of 64 tokens, each of which it has right. It first reads 100 tokens in ``reading`` seconds."""
    controller.begin()
    done, reads = 0, True
    while done < 64:
        choice = controller.choose([], 100 + done if reads else 1, 64 - done)
        if choice.source:
            if reads:
                controller.note_reading(reading)
            controller.note_draft(1, 0.1)
            reads = False
        controller.note_target(1 + choice.tokens, 1.0 + 0.1 * choice.tokens)
        if choice.source:
            controller.note_round(choice, [], [(choice.tokens, choice.tokens)])
        done += 1 + choice.tokens
    return not reads


def test_the_first_reading_finds_cold_weights_and_is_no_price():
    controller = Controller(0.1, compares=False)
    assert [drafted_in(controller, reading) for reading in (1000.0, 1.0, 1.0)] == [True] * 3


def test_a_price_that_keeps_a_draft_from_its_trials_is_doubted():
    """A draft that rests for the price of its reading would measure no other one."""
    controller = Controller(0.1, compares=False)
    assert drafted_in(controller, 1.0)
    assert drafted_in(controller, 1000.0)
    later = [drafted_in(controller, 1.0) for _ in range(16)]
    assert not later[0]
    assert all(later[-4:])


def test_a_draft_that_cannot_compare_begins_earlier():
    """It learns nothing from the tokens that it waits for."""
    waited = []
    for compares in (True, False):
        controller = Controller(0.1, compares=compares)
        controller.begin()
        rounds = 0
        while not controller.choose([], 20, 64).source:
            controller.note_target(1, 1.0)
            rounds += 1
        waited.append(rounds)
    assert 6 <= waited[1] < 12 <= waited[0]


def test_gains_of_the_text_pay_for_no_trials_of_the_corpus():
    """The text repeats itself in each second round, and what the corpus has in the others is always wrong."""
    controller, in_corpus = Controller(None), _native.MAX_MATCH
    lost = []
    for _ in range(4):
        controller.begin()
        lost.append(0.0)
        for i in range(60):
            match = (8, 9) if i % 2 else (3, in_corpus + 1 + i // 2 % 3)
            choice = controller.choose([match], -1, 64)
            tokens = min(choice.tokens, match[0])
            controller.note_target(1 + tokens, 1 + 0.1 * tokens)
            if tokens:
                controller.note_round(choice, [match], [(tokens, tokens * (i % 2))])
                lost[-1] += 0.1 * tokens * (1 - i % 2)
    assert lost[0] < 1.0  # without a budget of its own 2.1
    assert max(lost[1:]) < 0.5


def test_a_draft_that_becomes_good_is_found_again():
    world = World(cost=0.1, rate=0.02)
    controller = Controller(world.cost)
    for _ in range(3):
        world.call(96, controller.choose, controller)
    world.rate = 0.9
    for _ in range(30):
        last = world.call(96, controller.choose, controller)
    assert last / 96 < 0.6


def test_a_change_of_speed_is_common_to_all_widths():
    """Where only wide steps run, they tell that a narrow one is slower, too."""
    times = StepTimes(Machine())
    for columns in [1, 5, 9] * 10:
        times.note(columns, 1 + 0.1 * (columns - 1))
    assert times.seconds(1) == pytest.approx(1.0, rel=0.05)
    assert times.seconds(3) == pytest.approx(1.2, rel=0.05)  # never measured
    for _ in range(40):
        times.note(5, 2.8)
    assert 1.5 < times.seconds(1) <= 2.1
    assert times.seconds(5) == pytest.approx(2.8, rel=0.1)


def test_a_column_that_reads_other_experts_is_dear_before_it_is_measured():
    """With a price of nearly a whole step per column, not even tokens that are all accepted pay for a draft."""
    assert Controller(0.1).may_draft
    further = [0.0, 0.9, 1.7].__getitem__
    assert not Controller(0.1, lambda columns: further(columns - 1)).may_draft
    times = StepTimes(Machine(), lambda columns: further(columns - 1))
    times.note(1, 1.0)
    assert times.seconds(3) == pytest.approx(1.0 + 2 * 0.1 + 1.7)
    times.note(3, 1.4)  # the columns of the text chose nearly the same ones
    assert times.seconds(2) == pytest.approx(1.0 + 0.4 * 1.0 / 1.9)


def test_the_bytes_of_a_step_are_those_of_the_experts_that_it_reads():
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    config = MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
    model = MixtralForCausalLM(config)
    experts = 2 * 4 * (3 * 8 * 16) * 4
    assert step_bytes(model) == weight_bytes(model) - experts / 2
    assert step_bytes(model, 2) == weight_bytes(model) - experts / 4
    assert step_bytes(random_llama(0), 2) == weight_bytes(random_llama(0))


def test_a_step_that_was_interrupted_changes_little():
    times = StepTimes(Machine())
    for _ in range(20):
        times.note(1, 1.0)
    times.note(1, 100.0)
    assert times.seconds(1) < 1.25


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_expected_tokens_are_those_of_the_closed_form(rate):
    rates, drawn = AcceptanceRates(0.5), random.Random(1)
    for _ in range(3000):
        accepted = next((j for j in range(8) if drawn.random() >= rate), 8)
        rates.note(8, accepted)
    expected = rates.expected()
    assert len(expected) == MAX_DRAFT_TOKENS + 1
    assert expected[0] == 1.0
    for k in (1, 2, 4):
        assert expected[k] == pytest.approx(sum(rate**i for i in range(k + 1)), rel=0.2, abs=0.05)


# --- in a pipeline ---


@pytest.fixture(scope="module")
def model():
    return random_llama(7)


class Careless(Controller):
    """Chooses at random."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.2)
        self.random = random.Random(seed)
        self.chosen: set[str] = set()

    def choose(self, matches, lag, remaining):
        self._rounds += 1
        self._plain_rate = 1.0
        sources = ["", *(["ngram"] if any(n for n, _ in matches) else []), *(["model"] if lag >= 0 else [])]
        source = self.random.choice(sources)
        self.chosen.add(source)
        return Choice(source, self.random.randint(1, MAX_DRAFT_TOKENS) if source else 0)


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "seed": 5, "temperature": 0.7, "top_k": 5}]
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("models", [0, 1, 2])
def test_the_text_does_not_depend_on_what_is_chosen(model, monkeypatch, models, rows, sampling):
    """Whatever draft rests, begins late or passes on, also where it reads the end of the prompt only, and in the next turns of a chat."""
    monkeypatch.setattr("pipespec.engine.stage.PROMPT_TAIL", 5)
    drafts = [noisy(model, 0.2, seed=1), noisy(model, 0.02, seed=2)][2 - models :]
    chosen: set[str] = set()
    drafted = accepted = 0
    for trial in range(trials(ci=4, nightly=60)):
        prompts = random_prompts(rows, seed=trial, shortest=3, longest=20)
        ids, mask = left_pad([torch.cat([prompt, prompt]) for prompt in prompts])
        wants = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None, **sampling}
        with Pipeline(model, schedule="plain") as plain, Pipeline(model, drafts) as pipe:
            driver_of(pipe).controller = careless = Careless(trial)
            for _ in range(2):
                wanted = plain.generate(ids, attention_mask=mask, **wants)
                got = pipe.generate(ids, attention_mask=mask, **wants)
                assert torch.equal(wanted, got)
                drafted += pipe.report.stages[-1].drafted
                accepted += pipe.report.stages[-1].accepted
                # The next turn continues the text.
                ids = torch.cat([got, got[:, -7:]], 1)
                mask = torch.cat([mask, torch.ones(rows, ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
            chosen |= careless.chosen
    assert chosen == {"", "ngram"} | ({"model"} if models else set())
    assert drafted > 20
    assert accepted > (20 if models else -1)  # a random model hardly repeats itself


def test_a_resting_draft_reads_nothing(model):
    """The target as its own draft cannot pay: no step, no token read."""
    prompt = one_prompt(3, 20, 24)
    with Pipeline(model, [always_right(model)], schedule="lockstep") as pipe:
        text = pipe.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        draft, target = pipe.report.stages
        assert (draft.fed, draft.steps, target.drafted) == (0, 0, 0)
        assert any("plain decoding" in decision for decision in pipe.report.decisions)
    assert torch.equal(text, model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None))


class Resting(Controller):
    """Never drafts."""

    def choose(self, matches, lag, remaining):
        return self._resting()


@pytest.mark.parametrize(("relative_cost", "form"), [(0.2, "native"), (1.0, "")])
def test_a_draft_that_may_pay_is_packed_before_the_text(model, relative_cost, form):
    """Packing takes longer than many steps: it is part of no round, and a draft that cannot pay is not packed."""
    draft = noisy(model, 0.02, seed=1)
    with Pipeline(model, [draft]) as pipe:
        driver_of(pipe).controller = Resting(relative_cost)
        pipe.generate(random_prompts(1, seed=3)[0][None], max_new_tokens=4, do_sample=False)
        assert pipe.report.stages[0].steps == 0
        assert described(draft, RowCache.for_model(draft, 1, 16)) == form


class Eager(Controller):
    """Drafts in each round with the model."""

    def choose(self, matches, lag, remaining):
        self._plain_rate = 1.0
        return Choice("model", 3) if lag >= 0 and self._generated >= 12 else self._resting()


def test_a_draft_that_catches_up_measures_its_agreement(model):
    prompt = one_prompt(3, 20, 24)
    means = {}
    for name, draft in {"right": always_right(model), "wrong": always_wrong(model)}.items():
        with Pipeline(model, [draft], schedule="lockstep") as pipe:
            driver_of(pipe).controller = control = Eager(0.2)
            noted = []
            control.rates["model"].note_agreement = lambda *counts, noted=noted: noted.append(counts)
            pipe.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert len(noted) == 1
        assert noted[0][1] >= 8
        means[name] = noted[0][0] / noted[0][1]
    assert means == {"right": 1.0, "wrong": 0.0}


def test_a_fixed_lookahead_is_kept(model):
    prompt = one_prompt(3, 20, 24)
    with Pipeline(model, [always_right(model)], schedule="lockstep", lookahead=3) as pipe:
        pipe.generate(prompt, max_new_tokens=17, do_sample=False, eos_token_id=None)
        assert pipe.report.stages[-1].histogram == (1, 0, 0, 4)


def test_the_default_has_an_ngram_index(model):
    ids = torch.cat([one_prompt(3, 20, 24)] * 2, 1)
    with Pipeline(model) as pipe:
        same_text(pipe, ids, max_new_tokens=8)
        assert [stage.name for stage in pipe.report.stages] == ["ngram", "target"]
    with attach(copy.deepcopy(model)) as pipe:
        same_text(pipe, ids, max_new_tokens=8)
        assert [stage.name for stage in pipe.report.stages] == ["ngram", "target"]
