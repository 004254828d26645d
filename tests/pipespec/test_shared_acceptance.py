"""Rejection sampling with a draft that runs at the same time: the target's distribution whatever the timing, in worker processes and step by step."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.config import WIDTH, SpeculationConfig
from pipespec.drivers.base import StageFailure
from pipespec.engine import stage as stages
from pipespec.engine.acceptance import SharedAcceptance
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.stage import Stage, StageInputs
from pipespec_kernels import ops
from pipespec_kernels.state import Action, SharedMemory, StateBlock
from tests.conftest import left_pad, noisy, random_llama
from tests.pipespec.test_acceptance import IDS, PENALTIES, PROMPT, RULES, chi_square, exact
from tests.trials import trials
from tests.waiting import SECONDS, drafts_keep_up, until

NEW, LENGTH, LOOKAHEAD, ROWS = 4, 3, 3, 500
TEXTS = trials(ci=1_500, nightly=100_000)  # behind each prompt
OTHER = torch.tensor([[2, 4, 0, 3]])  # a longer prompt beside PROMPT: PROMPT's rows are padded


@pytest.fixture(scope="module")
def target():
    return random_llama(8, vocabulary=IDS, hidden=16, layers=1)


@pytest.fixture(scope="module")
def draft(target):
    return noisy(target, 0.25)


@pytest.fixture(scope="module")
def pipes(target, draft):
    found = {rule: Pipeline(target, draft, schedule="workers", lookahead=LOOKAHEAD, acceptance=rule) for rule in RULES}
    yield found
    for pipe in found.values():
        pipe.close()


def generated(pipe: Pipeline, count: int, **given) -> tuple[list[torch.Tensor], int]:
    """New tokens ``[count, NEW]`` behind each of the two prompts, in batches of both; and the number of accepted draft tokens."""
    found: list[list[torch.Tensor]] = [[], []]
    accepted = 0
    ids, mask = left_pad([PROMPT[0], OTHER[0]])
    ids, mask = ids.repeat(ROWS // 2, 1), mask.repeat(ROWS // 2, 1)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | given
    for i in range(0, 2 * count, ROWS):
        out = pipe.generate(ids, attention_mask=mask, seed=list(range(i, i + ROWS)), **options)
        accepted += pipe.report.stages[-1].accepted
        for which, rows in enumerate(found):
            rows.append(out[which::2, ids.shape[1] :])
    return [torch.cat(rows) for rows in found], accepted


LIMITS = [prompt.shape[1] + NEW for prompt in (PROMPT, OTHER)] * (ROWS // 2)


@pytest.mark.parametrize(("rule", "given"), [("rejection", {}), ("block", {}), ("block", PENALTIES)])
def test_texts_have_the_targets_distribution(target, pipes, rule, given) -> None:
    pipe = pipes[rule]
    with drafts_keep_up(pipe, LIMITS):
        texts, accepted = generated(pipe, TEXTS, **given)
    assert pipe.report.schedule == "workers"
    assert "depends on the draft and on timing" in str(pipe.report)
    assert accepted > TEXTS  # of 2 * NEW * TEXTS tokens
    for prompt, its in zip((PROMPT, OTHER), texts, strict=True):
        statistic, threshold = chi_square(its, exact(target, LENGTH, given, prompt))
        assert statistic < threshold


def test_rows_that_end_early(target, pipes) -> None:
    """The draft stops behind an end token, and a row ends at it."""
    end, pad = 2, 0
    with drafts_keep_up(pipes["block"], LIMITS, eos=[end]):
        texts, accepted = generated(pipes["block"], TEXTS, eos_token_id=end)
    assert accepted > TEXTS / 2
    for prompt, its in zip((PROMPT, OTHER), texts, strict=True):
        p = exact(target, LENGTH, {}, prompt).view(*[IDS] * LENGTH)
        ended = p[end].sum(), p[:, end].sum(-1)
        p[:, end] = 0
        p[:, end, pad] = ended[1]
        p[end] = 0
        p[end, pad, pad] = ended[0]
        statistic, threshold = chi_square(its, p.flatten())
        assert statistic < threshold


@pytest.mark.parametrize("options", [{}, {"min_draft_tokens": 2}], ids=["at once", "waits"])
def test_drafts_that_are_late(target, draft, options) -> None:
    """The target takes what there is, or decodes meanwhile."""
    with Pipeline(target, draft, schedule="workers", lookahead=LOOKAHEAD, acceptance="block", **options) as pipe:
        texts, _ = generated(pipe, TEXTS)
    for prompt, its in zip((PROMPT, OTHER), texts, strict=True):
        statistic, threshold = chi_square(its, exact(target, LENGTH, {}, prompt))
        assert statistic < threshold


@pytest.mark.parametrize("rule", RULES)
def test_distributions_of_another_position_are_caught(target, pipes, rule, monkeypatch) -> None:
    real = SharedAcceptance.accept

    def accept(self, *args):
        mine = self._logits
        self._logits = mine.roll(1, 1)
        try:
            return real(self, *args)
        finally:
            self._logits = mine

    monkeypatch.setattr(SharedAcceptance, "accept", accept)
    with drafts_keep_up(pipes[rule], LIMITS):
        (texts, _), _ = generated(pipes[rule], 1_500)
    statistic, threshold = chi_square(texts, exact(target, LENGTH, {}))
    assert statistic > threshold


def test_greedy_calls_are_those_of_the_target(pipes) -> None:
    """Between sampled ones, with the same processes. They allocate no distributions."""
    target, ids = pipes["block"].target, OTHER
    for rule, pipe in pipes.items():
        size = pipe._driver._shared[2].size
        out = pipe.generate(ids, do_sample=False, max_new_tokens=40)
        assert torch.equal(out, target.generate(ids, do_sample=False, max_new_tokens=40))
        assert pipe.report.decisions is None, rule
        assert pipe._driver._shared[2].size == size


# ---- drafts that end


def test_a_draft_that_is_killed(target, draft) -> None:
    """The text goes on, with one warning, and has the target's distribution. The next call has a draft again."""
    kills = []

    class Kill:
        """A streamer of row 0; the other rows are those of ``num_return_sequences``."""

        def __init__(self) -> None:
            self.calls = 0

        def put(self, value: torch.Tensor) -> None:
            self.calls += 1
            if self.calls == 3:  # behind the first new token
                process = pipe._driver._workers[0].process
                os.kill(process.pid, signal.SIGKILL)
                process.wait(SECONDS)
                kills.append(process.pid)

        def end(self) -> None:
            pass

    ids, options = PROMPT, {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    with Pipeline(target, draft, schedule="workers", lookahead=LOOKAHEAD, acceptance="rejection") as pipe:
        with drafts_keep_up(pipe, [ids.shape[1] + 40]), pytest.warns(StageFailure, match="killed by SIGKILL") as caught:
            out = pipe.generate(ids, seed=3, max_new_tokens=40, streamer=Kill(), **options)
        assert len(kills) == len(caught) == 1
        assert out.shape == (1, ids.shape[1] + 40)
        assert int(out.min()) >= 0
        assert int(out.max()) < IDS
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe.generate(ids, seed=4, max_new_tokens=2, **options)
        with drafts_keep_up(pipe, LIMITS):
            (texts, _), accepted = generated(pipe, 1_000)
    assert accepted > 1_000
    statistic, threshold = chi_square(texts, exact(target, LENGTH, {}))
    assert statistic < threshold


# ---- step by step, both stages in this process


class Held:
    """The draw of a draft, which takes longer for some tokens: until ``release`` is set."""

    def __init__(self, slow: set[int]) -> None:
        self.slow, self.held, self.release = slow, threading.Event(), threading.Event()
        self._verify = ops.verify

    def __call__(self, *args, **kwargs):
        drawn = self._verify(*args, **kwargs)
        if int(drawn[0][0, 0]) in self.slow:
            self.held.set()
            assert self.release.wait(SECONDS)
        return drawn


class Watched:
    """A port that tells when the target has looked whether its draft tokens are drawn."""

    def __init__(self, port, looked) -> None:
        self._port, self._looked = port, looked

    @property
    def is_drawn(self):
        found = self._port.is_drawn
        self._looked()
        return found

    def __getattr__(self, name):
        return getattr(self._port, name)


class Pair:
    """A draft and a target over one block."""

    def __init__(self, target, draft, rule: str) -> None:
        self.block = StateBlock.create(2, 1, 64)
        memory = SharedMemory.create([1])
        self.shared = SharedAcceptance(rule, LOOKAHEAD, memory)
        self.draft = Stage(draft, self.block, 0, acceptance=self.shared)
        self.target = Stage(target, self.block, 1, acceptance=SharedAcceptance(rule, LOOKAHEAD, memory))
        for stage in (0, 1):
            self.block.set_alive(stage, True)

    def begin(self, seed: int, new: int = NEW) -> None:
        prompt = PROMPT[0].numpy().astype(np.int32)
        limits = [len(prompt) + new]
        self.block.reset([len(prompt)], limits, [int(prompt[-1])], [])
        inputs = StageInputs([prompt], limits, SamplingParams(seeds=(seed,)), IDS)
        self.draft.prefill(inputs)
        self.target.prefill(inputs)
        self.start = len(prompt)

    def drafts(self) -> Action:
        return self.draft.step(LOOKAHEAD, 0)

    def verifies(self, **given) -> Action:
        return self.target.step(0, LOOKAHEAD, **given)

    @property
    def new(self) -> list[int]:
        return self.block.tokens(1, 0, self.start, self.block.length(1, 0))


FIRST_TOKENS = trials(ci=250, nightly=4000)


@pytest.mark.parametrize(("rule", "announced"), [("rejection", True), ("block", True), ("rejection", False)])
def test_draws_that_take_long_for_some_tokens(target, rule, announced, monkeypatch) -> None:
    """The draft publishes some tokens at once, and the others, which are as likely, only when the target has looked for them.

    With the target's own weights each draft token is accepted. A target that takes what is published has too many of the former.
    """
    if not announced:
        monkeypatch.setattr(Stage, "_decide", lambda self, most: most)
    p = exact(target, 1, {})
    pair = Pair(target, target, rule)
    some = itertools.chain(*(itertools.combinations(range(IDS), n) for n in range(1, IDS)))
    draw = Held(set(min(some, key=lambda ids: abs(float(p[list(ids)].sum()) - 0.5))))
    monkeypatch.setattr(ops, "verify", draw)
    counts = torch.zeros(IDS)
    for seed in range(FIRST_TOKENS):
        draw.held.clear()
        draw.release.clear()
        pair.begin(seed, new=1 + LOOKAHEAD)
        pair.target.port = Watched(pair.target.port, draw.release.set)
        thread = threading.Thread(target=pair.drafts)
        thread.start()
        until(lambda: draw.held.is_set() or pair.block.length(0, 0) > pair.start, "the draft has drawn")
        assert pair.verifies() == Action.STEP
        draw.release.set()
        thread.join(SECONDS)
        counts[pair.new[0]] += 1
    expected = p * FIRST_TOKENS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert (statistic < IDS - 1 + 10 * math.sqrt(2 * (IDS - 1))) == announced


def test_what_a_step_verifies(target) -> None:
    """The draws that were announced when it decided, and no others: neither later ones nor those of a text that was rolled back."""
    pair = Pair(target, noisy(target, 1.0), "rejection")
    pair.begin(0, new=20)
    draft, verifier = pair.draft.port, pair.target.port
    verifier.decide()
    assert verifier.is_drawn
    assert pair.drafts() == Action.STEP
    assert verifier.plan(0, LOOKAHEAD, 0) == Action.STEP
    assert verifier.num_draft_tokens.tolist() == [0]  # it is published, and came too late
    assert verifier.query_lens.tolist() == verifier.n_select.tolist() == [1]
    assert verifier.columns == 1
    assert verifier.tokens[0, 1] == 0
    assert verifier.plan(0, LOOKAHEAD, 1) == Action.WAIT  # one is missing, and one has come
    assert verifier.park(1)  # it does not wait for another publication
    verifier.decide()
    assert not verifier.park(1)
    assert pair.drafts() == Action.STEP
    assert verifier.plan(0, LOOKAHEAD, 1) == Action.STEP
    assert verifier.num_draft_tokens.tolist() == [1]
    verifier.decide()
    assert verifier.plan(0, LOOKAHEAD, 0) == Action.STEP
    assert verifier.num_draft_tokens.tolist() == [2]

    assert draft.plan(LOOKAHEAD, 0, 0) == Action.STEP
    draft.announce()
    verifier.decide()
    assert not verifier.is_drawn
    draft.commit(torch.zeros(1, 1, dtype=torch.int32).data_ptr(), 1)
    assert verifier.is_drawn
    assert verifier.plan(0, LOOKAHEAD, 0) == Action.STEP
    assert verifier.num_draft_tokens.tolist() == [3]

    # The target takes another token than the draft's first.
    verifier.plan(0, 0, 0)
    other = (pair.block.tokens(0, 0, pair.start, pair.start + 1)[0] + 1) % IDS
    verifier.commit(torch.tensor([[other]], dtype=torch.int32).data_ptr(), 1)
    verifier.decide()  # the draft's text is the old one
    assert verifier.is_drawn
    for _ in range(LOOKAHEAD):
        assert pair.drafts() == Action.STEP  # rolls back, and draws again
    assert verifier.plan(0, LOOKAHEAD, 0) == Action.STEP
    assert verifier.num_draft_tokens.tolist() == [0]
    verifier.decide()
    assert verifier.plan(0, LOOKAHEAD, 0) == Action.STEP
    assert verifier.num_draft_tokens.tolist() == [LOOKAHEAD]
    # A row that the caller has ended gets nothing of what is announced.
    draft.plan(2 * LOOKAHEAD, 0, 0)
    draft.announce()
    verifier.decide()
    assert not verifier.is_drawn
    pair.block.end_row(0)
    assert verifier.is_drawn
    with pytest.raises(RuntimeError, match="no draft tokens"):
        draft.decide()


class History:
    """A draft and a target without models: each draws one of two tokens."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.lookahead, self.limit, self.start = rng, rng.randint(1, 6), rng.randint(20, 40), 2
        self.block = StateBlock.create(2, 1, 64)
        self.block.reset([self.start], [self.limit], [7], [])
        self.draft, self.target = self.block.port(0, 16), self.block.port(1, 16)
        self.announced = False

    def text(self, stage: int) -> list[int]:
        return self.block.tokens(stage, 0, self.start, self.block.length(stage, 0))

    def commit(self, port, tokens: list[int]) -> None:
        port.commit(torch.tensor([tokens], dtype=torch.int32).data_ptr(), len(tokens))

    def draws(self, *, halfway: bool = False) -> None:
        """A step of the draft, or the half of one."""
        if not self.announced:
            if self.draft.plan(self.lookahead, 0, 0) != Action.STEP:
                return
            self.draft.announce()
            self.announced = True
            if halfway:
                return
        self.commit(self.draft, [self.rng.randint(0, 1)])
        self.announced = False

    def draws_some(self, most: int) -> None:
        for _ in range(self.rng.randint(0, most)):
            self.draws(halfway=self.rng.random() < 0.3)

    def verifies(self) -> tuple[int, bool]:
        """A step of the target: the draft tokens that it verifies, and whether the draft's text continued the target's."""
        self.target.decide()
        if self.announced:
            assert not self.target.is_drawn
            self.draws()
        taken, mine = self.text(0), self.text(1)
        assert self.target.is_drawn
        self.draws_some(3)
        continues = taken[: len(mine)] == mine
        room = min(self.lookahead, self.limit - self.start - len(mine) - 1)
        wanted = taken[len(mine) :][:room] if continues else []
        assert self.target.plan(0, self.lookahead, 0) == Action.STEP
        assert self.target.num_draft_tokens[0] == len(wanted)
        n = self.target.query_lens[0]
        assert self.target.tokens[0, n - len(wanted) : n].tolist() == wanted
        self.draws_some(2)  # during the forward
        kept = self.rng.randint(0, len(wanted))
        own = 1 - wanted[kept] if kept < len(wanted) else self.rng.randint(0, 1)
        self.commit(self.target, [*wanted[:kept], own])
        return len(wanted), continues


def test_random_histories() -> None:
    """A step verifies the draft's text as it was announced when the step decided, if that continues the target's, whatever the draft does meanwhile."""
    rng, steps = random.Random(0), []
    for _ in range(trials(ci=150, nightly=3000)):
        history = History(rng)
        while history.block.length(1, 0) < history.limit:
            history.draws_some(history.lookahead + 1)
            steps.append(history.verifies())
    assert sum(verified for verified, _ in steps) > 1000
    assert sum(not continues for _, continues in steps) > 100


def test_each_draw_has_its_own_noise(target) -> None:
    """Also at a position that the draft draws again: block verification has decided by the first token there."""
    pair = Pair(target, target, "block")
    drawn: list[tuple[int, list[int]]] = []
    real = pair.shared._at_round
    pair.shared._at_round = lambda noise, stream: (
        drawn.append(real(noise, stream).positions.tolist()) or real(noise, stream)
    )
    pair.begin(0, new=20)
    for _ in range(4):
        while pair.drafts() == Action.STEP:
            pass
        pair.target.port.plan(0, 0, 0)
        wrong = (pair.block.tokens(0, 0, pair.start, pair.block.length(0, 0))[len(pair.new)] + 1) % IDS
        pair.target.port.commit(torch.tensor([[wrong]], dtype=torch.int32).data_ptr(), 1)
    assert len(drawn) >= 4 * LOOKAHEAD
    assert len({tuple(positions) for positions in drawn}) == len(drawn)


def test_a_draft_that_ends_between_announcement_and_publication(target, monkeypatch) -> None:
    """The target waits for it once, and verifies no draft token until the draft goes on: what depends on when it comes has another distribution."""
    pair = Pair(target, target, "rejection")
    pair.begin(0, new=20)
    pair.drafts()
    pair.draft.port.plan(LOOKAHEAD, 0, 0)
    pair.draft.port.announce()
    waits = []
    monkeypatch.setattr(stages, "_DRAW_TIMEOUT_NS", 300_000_000)  # not over before the first look

    class Port(Watched):
        def park(self, left):
            waits.append(left)
            return self._port.park(left)

    pair.target.port = Port(pair.target.port, lambda: None)
    assert pair.verifies() == Action.STEP
    assert waits
    waits.clear()
    for _ in range(3):
        assert pair.verifies() == Action.STEP
    assert not waits
    for drafted in (0, 1):  # the draft goes on; it is believed from the second step on
        pair.drafts()
        assert pair.verifies() == Action.STEP
        assert pair.block.counters(1, 0)["drafted"] == drafted
    pair.begin(1, new=20)  # the next call waits again; not for a draft that is known to be dead
    pair.draft.port.plan(LOOKAHEAD, 0, 0)
    pair.draft.port.announce()
    pair.block.set_alive(0, False)
    pair.target.port = Port(pair.target.port, lambda: None)
    assert pair.verifies() == Action.STEP
    assert not waits


def test_a_fork_verifies_none(target, monkeypatch) -> None:
    """The memory of the distributions is its parent's."""
    pair = Pair(target, target, "rejection")
    pair.begin(0, new=20)
    pair.drafts()
    here = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)
        assert pair.verifies() == Action.STEP
    assert pair.block.counters(1, 0)["drafted"] == 0


@pytest.mark.parametrize("rule", RULES)
def test_damaged_distributions(target, rule) -> None:
    """Any words in the draft's memory leave a text of the target's tokens."""
    pair, rng = Pair(target, target, rule), np.random.default_rng(0)
    for seed in range(20):
        pair.begin(seed, new=20)
        for step in range(4):
            while pair.drafts() == Action.STEP:
                pass
            words = pair.shared._logits.numpy() if seed % 2 else pair.shared._memory.array
            words.view(np.uint8).reshape(-1)[:] = np.frombuffer(rng.bytes(words.nbytes), dtype=np.uint8)
            assert pair.verifies() == Action.STEP
            assert len(pair.new) > step
            assert all(0 <= token < IDS for token in pair.new)


def test_the_ring_is_no_larger_than_the_lookahead_needs(target) -> None:
    """A draft with a larger lookahead stops in front of what the target reads."""
    pair = Pair(target, target, "rejection")
    pair.begin(0, new=40)
    while pair.draft.step(WIDTH, 0) == Action.STEP:
        pass
    assert pair.block.length(0, 0) == pair.start + LOOKAHEAD
    assert set(range(pair.start, pair.start + LOOKAHEAD)) < set(pair.shared._positions[0].tolist())
    assert pair.shared._memory.size == pair.shared.nbytes(1, IDS) == (LOOKAHEAD + 1) * (4 * IDS + 12)
    assert pair.verifies() == Action.STEP
    assert pair.block.counters(1, 0)["accepted"] == LOOKAHEAD  # the target's own weights


def test_memory_of_the_distributions_is_counted(pipes, monkeypatch) -> None:
    counted = []
    monkeypatch.setattr("pipespec.api.base.check_memory", lambda *_, distributions, **__: counted.append(distributions))
    pipe, ids = pipes["block"], PROMPT.repeat(7, 1)
    pipe.generate(ids, do_sample=True, max_new_tokens=2, pad_token_id=0)
    pipe.generate(ids, do_sample=False, max_new_tokens=2, pad_token_id=0)
    assert counted == [{"cpu": pipe._driver._acceptance.nbytes(7, IDS)}, {}]


def test_what_is_not_supported() -> None:
    def of(num_drafts: int, **given) -> SpeculationConfig:
        return SpeculationConfig.of(num_drafts, schedule="workers", acceptance="rejection", **given)

    assert of(1).acceptance == "rejection"
    for num_drafts, given in ((2, {}), (1, {"ngram": object()})):
        with pytest.raises(ValueError, match=r"for one draft model|does not go with an n-gram"):
            of(num_drafts, **given)
    with pytest.raises(ValueError, match="does not go with confidence=True"):
        of(1, confidence=True)
    with pytest.raises(ValueError, match="not for 'ranks'"):
        SpeculationConfig.of(1, schedule="ranks", acceptance="rejection")


def test_what_runs_position_by_position_is_named():
    """A penalty that float32 holds only in steps is no longer fused."""
    target = random_llama(3)
    with Pipeline(target, noisy(target, 0.02), acceptance="rejection", schedule="lockstep") as pipe:
        call = partial(pipe.generate, PROMPT, max_new_tokens=4, do_sample=True, seed=3)
        call(repetition_penalty=1.2)
        with pytest.raises(ValueError, match=r"RepetitionPenaltyLogitsProcessor: runs position by position, which acc"):
            call(repetition_penalty=1e38)
