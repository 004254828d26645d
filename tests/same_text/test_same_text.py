"""The text is the target's: each way to run a chain, each kind of draft, each feature of a call, against transformers' own ``generate()``."""

import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import pipespec
import pipespec.schedules.asynchronous.local  # here, so that its time limits are long in the fixtures, too
from pipespec import Pipeline, SpeedWarning
from pipespec.engine.chain import as_draft
from pipespec_spd import SpeculativePipeline
from tests.conftest import DEVICE, always_wrong, left_pad, noisy, random_llama, random_prompts
from tests.same_text.table import (
    CALLS,
    CHAINS,
    NEW,
    TOP,
    VOCABULARY,
    WAYS,
    WORD,
    Call,
    Chain,
    Way,
    calls_of,
    is_captured,
)
from tests.support.chains import in_process
from tests.support.reference import transformers_text
from tests.support.streamers import failing
from tests.trials import PROFILE, trials
from tests.waiting import drafts_keep_up

PENALISES_PADDING = "Tensor" not in inspect.getsource(RepetitionPenaltyLogitsProcessor.__init__)
"""Before 5.23 transformers' repetition penalty counts the padding of a prompt as tokens of its text. Ours never does."""

PIPELINES = [(way, chain) for way in WAYS for chain in CHAINS if WAYS[way].takes(CHAINS[chain])]
if PROFILE == "ci":
    # A process imports for seconds. Each kind of draft of these chains runs in processes in a longer chain, too.
    SHORT = ("wrong", "index and one", "index and wrong", "index after one", "other tokenizer", "own")
    PIPELINES = [(way, chain) for way, chain in PIPELINES if not WAYS[way].row.has_processes or chain not in SHORT]
CELLS = [((way, chain), call) for way, chain in PIPELINES for call in calls_of(WAYS[way], CHAINS[chain])]


@pytest.fixture(scope="module")
def target() -> Any:
    return random_llama(21, layers=3, vocabulary=VOCABULARY)


def text_of(out: Any) -> torch.Tensor:
    """On the CPU, where transformers' texts are made whatever the device of ours."""
    return (out if isinstance(out, torch.Tensor) else out.sequences).cpu()


def prompts_of(call: Call, device: str) -> Iterator[torch.Tensor]:
    """The ids and mask of a call, ``[B, S]``."""
    return (x.to(device) for x in call.prompts())


class Expected:
    """What transformers gives for a call, made once."""

    def __init__(self, target: Any) -> None:
        self.target, self.made = copy.deepcopy(target).cpu(), {}

    def base(self, call: Call) -> list[list[int]]:
        """The new tokens of the call without what it is about."""
        ids, mask = prompts_of(call, "cpu")
        options = call.arguments([[WORD] * NEW] * call.rows)
        plain = {name: options[name] for name in SAMPLING if name in options}
        out = transformers_text(self.target, ids, mask, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None, **plain)
        return text_of(out)[:, ids.shape[1] :].tolist()

    def of(self, name: str) -> tuple[list[list[int]], list[tuple[Any, dict[str, Any]]]]:
        """The new tokens without what the call is about, and per turn the result with the arguments that led to it."""
        if name not in self.made:
            call = CALLS[name]
            base, turns = self.base(call), []
            ids, mask = prompts_of(call, "cpu")
            while len(turns) < call.turns:
                if turns:
                    ids, mask = continued(text_of(turns[-1][0]), mask)
                given = call.arguments(base)
                turns.append((transformers_text(self.target, ids, mask, **given), given))
            self.made[name] = base, turns
        return self.made[name]


SAMPLING = ("do_sample", "seed", "temperature", "top_k", "top_p", "min_p")


def continued(text: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts of the next turn."""
    ids = torch.cat([text, text[:, -3:]], 1)
    return ids, torch.cat([mask, torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)


@pytest.fixture(scope="module")
def expected(target: Any) -> Expected:
    return Expected(target)


@contextmanager
def ranks(chain: Chain, target: Any) -> Iterator[Pipeline]:
    """A chain whose ranks share this process."""
    drafts = [as_draft(draft) for draft in chain.drafts(target)]
    models = [draft.given for draft in drafts if not draft.inline]
    with pytest.MonkeyPatch.context() as patch:
        with in_process(patch, [*models, target], drafts=drafts) as (pipe, ranked):
            yield pipe
        assert not ranked.errors


class Opened:
    """A pipeline, and how a program calls it."""

    def __init__(self, way: Way, chain: Chain, target: Any, stack: ExitStack) -> None:
        self.way, self.chain = way, chain
        drafts, options = chain.drafts(target), dict(chain.options)
        lookahead = {"lookahead": 4} if way.fixed and way.row.has_drafts else {}
        if way.door == "spd":
            self.pipe = stack.enter_context(SpeculativePipeline(target, drafts[-1], stages=3))
            self.generate = self.pipe.generate
            return
        if way.row.needs_ranks:
            self.pipe = stack.enter_context(ranks(chain, target))
            self.generate = self.pipe.generate
            return
        options |= {"schedule": way.row.name, **lookahead} | (
            {"graphs": True} if way.captured and not way.row.is_captured else {}
        )
        if way.door == "attach":
            self.pipe = pipespec.attach(target, drafts, **options)
            stack.callback(pipespec.detach, target)
            self.generate = target.generate
            return
        self.pipe = stack.enter_context(Pipeline(target, drafts, **options))
        self.generate = self.pipe.generate
        if way.door == "custom_generate":
            self.generate = functools.partial(by_hook, self.pipe, target)


def by_hook(pipe: Pipeline, target: Any, ids: torch.Tensor, streamer: Any = None, **given: Any) -> Any:
    if streamer is not None:  # transformers does not pass it on
        return pipe.generate(ids, streamer=streamer, **given)
    return target.generate(ids, custom_generate=pipe, **given)


@pytest.fixture(scope="module")
def pipelines(target: Any) -> Iterator[Callable[[tuple[str, str]], Opened]]:
    """Opens the pipeline of a way and a chain, and keeps it for as long as tests ask for it one after the other."""
    with ExitStack() as stack:

        @functools.lru_cache(maxsize=1)
        def opened(way: str, chain: str) -> Opened:
            stack.close()
            return Opened(WAYS[way], CHAINS[chain], copy.deepcopy(target), stack)

        yield lambda pair: opened(*pair)


@pytest.fixture
def opened(request: pytest.FixtureRequest, pipelines: Callable[[tuple[str, str]], Opened]) -> Opened:
    return pipelines(request.param)


@pytest.mark.parametrize(
    ("opened", "name"), CELLS, ids=lambda part: part if isinstance(part, str) else "-".join(part), indirect=["opened"]
)
def test_same_text(opened: Opened, expected: Expected, name: str) -> None:
    call = CALLS[name]
    base, turns = expected.of(name)
    ids, mask = prompts_of(call, DEVICE)
    # Captured steps leave a call to others that needs the host at each position. Nothing else is slower than it could be.
    leaves = opened.way.captured and call.by_position
    got: Any = None
    for wanted, theirs in turns:
        given = call.arguments(base)
        if call.turns > 1:
            given["return_dict_in_generate"] = True
        if got is not None:
            ids, mask = (x.to(DEVICE) for x in continued(text_of(got), mask.cpu()))
            given["past_key_values"] = got.past_key_values
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if leaves else "error", SpeedWarning)
            with keep_up(opened, name, mask):
                got = opened.generate(ids, attention_mask=mask, **given)
        assert torch.equal(text_of(got), text_of(wanted)), (
            f"wanted {text_of(wanted).tolist()}, got {text_of(got).tolist()}"
        )
        for ours, its in zip(objects(given), objects(theirs), strict=True):
            assert ours.record == its.record
        if given.get("output_scores") and not ("repetition_penalty" in given and PENALISES_PADDING):
            check_scores(expected.target, ids.cpu(), got, wanted, given)
    check_report(opened, name, leaves)


INTERRUPTED = [pipeline for pipeline in PIPELINES if pipeline[1] in ("alone", "two", "index", "index and one")]


ERRORS = (LookupError, KeyboardInterrupt, SystemExit)


@pytest.mark.parametrize(
    ("opened", "at", "error"),
    [
        (pipeline, (0, 1, 7)[(i + k) % 3], ERRORS[(i + k + i // 3) % 3])
        for i, pipeline in enumerate(INTERRUPTED)
        for k in range(trials(ci=1, nightly=3))
    ],
    ids=lambda part: "-".join(part) if isinstance(part, tuple) else getattr(part, "__name__", str(part)),
    indirect=["opened"],
)
def test_a_call_after_an_interrupted_one(
    opened: Opened, expected: Expected, at: int, error: type[BaseException]
) -> None:
    """What was committed is at hand, the streamer's ``end()`` is not called, as in transformers, and the next call is complete."""
    call, (_, [(wanted, _)]) = CALLS["one row"], expected.of("one row")
    ids, mask = prompts_of(call, DEVICE)
    given, recorder = call.arguments([]), failing(at, error, "enough")
    with pytest.raises(error, match="enough") as caught:
        opened.generate(ids, attention_mask=mask, streamer=recorder, **given)
    assert recorder.ends == 0
    if at > 0:
        assert any("partial" in note for note in caught.value.__notes__)
        partial = opened.pipe.partial.cpu()
        assert ids.shape[1] + at <= partial.shape[1]
        assert torch.equal(partial, wanted[:, : partial.shape[1]])
        # A streamer gets one token at a time. The target may have committed more.
        assert recorder.new == partial[0, ids.shape[1] :].tolist()[: len(recorder.new)]
        assert len(recorder.new) >= at
    assert torch.equal(text_of(opened.generate(ids, attention_mask=mask, **given)), wanted)
    assert opened.pipe.partial is None


def objects(given: dict[str, Any]) -> list[Any]:
    """Those of a call that keep a record."""
    found = [*given.get("logits_processor", []), *given.get("stopping_criteria", []), given.get("streamer")]
    return [one for one in found if hasattr(one, "record")]


def check_report(opened: Opened, name: str, leaves: bool) -> None:
    """The schedule was the one that was asked for, and the drafts have taken part."""
    report, way = opened.pipe.report, opened.way
    if way.door == "spd":
        assert report.accepted <= report.checked
        assert opened.chain.agrees is None or name != "greedy" or (report.accepted > 0) == opened.chain.agrees
        return
    assert report.decisions if leaves else report.schedule == way.row.name, report
    if not way.row.has_drafts:
        assert [stage.name for stage in report.stages] == ["target"]
        return
    last = report.stages[-1]
    if not way.fixed or (way.is_asynchronous and not waits(opened, name)):
        return
    agrees = opened.chain.agrees
    # After each step a draft that is always wrong must first give its tokens up. Stages that run at once may plan the next step before that.
    assert last.drafted > 0 or (agrees is False and way.is_asynchronous)
    if type(agrees) is float:
        assert last.acceptance_rate == agrees
    # With penalties the least likely token is now and then the best.
    elif agrees or (agrees is False and name == "greedy"):
        assert (last.accepted > 0) == agrees


def waits(opened: Opened, name: str) -> bool:
    """Whether the target waits for its drafts in this call, so that their number does not depend on the machine."""
    # The wait is a hook, which an exact target does not take, and which a graph does not replay.
    can_wait = not opened.chain.uses and not opened.chain.kinds and "exact" not in opened.chain.options
    can_wait = can_wait and (DEVICE == "cpu" or not opened.way.captured)
    return name == "greedy" and can_wait and opened.way.is_asynchronous and not opened.way.row.needs_ranks


def keep_up(opened: Opened, name: str, mask: torch.Tensor) -> Any:
    if not waits(opened, name):
        return nullcontext()
    return drafts_keep_up(opened.pipe, [int(n) + NEW for n in mask.sum(1)])


def check_scores(target: Any, ids: torch.Tensor, got: Any, wanted: Any, given: dict[str, Any]) -> None:
    """Scores, logits and log-probabilities up to the end of each row, and nothing after it."""
    steps, end = text_of(got).shape[1] - ids.shape[1], given["eos_token_id"] or []
    assert len(got.scores) == len(got.logits) == len(wanted.scores) == steps
    chosen, top_ids, top = (x.cpu() for x in got.logprobs)
    theirs = target.compute_transition_scores(wanted.sequences, wanted.scores, normalize_logits=True)
    processed = torch.log_softmax(torch.stack(wanted.scores, 1).float(), -1)
    for row, text in enumerate(text_of(got)[:, ids.shape[1] :].tolist()):
        n = next((i + 1 for i, token in enumerate(text) if token in end), steps)
        for name in ("scores", "logits"):
            ours, its = (torch.stack([step[row] for step in getattr(out, name)]).cpu() for out in (got, wanted))
            torch.testing.assert_close(ours[:n], its[:n], atol=2e-5, rtol=2e-5)
            assert not ours[n:].any()
        torch.testing.assert_close(chosen[row, :n], theirs[row, :n], atol=2e-5, rtol=2e-5)
        best = processed[row, :n].topk(TOP)
        torch.testing.assert_close(top[row, :n], best.values, atol=2e-5, rtol=2e-5)
        there = best.values > -torch.inf
        assert torch.equal(top_ids[row, :n] >= 0, there)
        at = processed[row, :n].gather(1, top_ids[row, :n].clamp(min=0))
        torch.testing.assert_close(at[there], top[row, :n][there], atol=2e-5, rtol=2e-5)
        assert not chosen[row, n:].any()
        assert (top_ids[row, n:] == -1).all()
        assert (top[row, n:] == -torch.inf).all()


@pytest.mark.parametrize("name", CALLS)
def test_every_call_shows_something(expected: Expected, name: str) -> None:
    """Its arguments change the text, or what is recorded next to it: without them the comparison above would show nothing."""
    base, [(out, given), *_] = expected.of(name)
    text = text_of(out)[:, CALLS[name].prompts()[0].shape[1] :].tolist()
    changes = name not in ("greedy", "one row", "cache", "cache, sampled", "prompt in parts", "sampled")
    if objects(given) or "output_scores" in given or not changes or "sampled" in name or given["do_sample"]:
        return
    assert text != base


def refused_by(way: Way, chain: Chain) -> bool:
    """Whether the schedule does not take the chain."""
    return bool(chain.uses - way.row.options) or not all(map(way.row.takes, chain.kinds))


EXCLUDED = [
    (name, chain)
    for name, way in WAYS.items()
    for chain in CHAINS
    if way.row.has_drafts and way.door == "generate" and way.fixed
    if refused_by(way, CHAINS[chain]) or (way.captured and not is_captured(CHAINS[chain]))
]


@pytest.mark.parametrize(("way", "chain"), EXCLUDED, ids="-".join)
def test_what_a_schedule_does_not_take_is_refused(target: Any, way: str, chain: str) -> None:
    """By the name of the option, with the schedules that take it."""
    row, given = WAYS[way].row, CHAINS[chain]
    takers = [other.row.name for other in WAYS.values() if other.row.has_drafts and not refused_by(other, given)]
    says = (
        rf"is for schedule=.*'{takers[0]}'.*, not for '{row.name}'"
        if refused_by(WAYS[way], given)
        else "graphs=True does not support"
    )
    with pytest.raises(ValueError, match=says):
        Pipeline(target, given.drafts(target), schedule=row.name, graphs=WAYS[way].captured or None, **given.options)


# ---- random prompts through chains of drafts of every quality, in every place


KINDS = {"right": 0.0, "good": 0.02, "bad": 0.2, "wrong": None}
"""By name: the noise on the target's weights; None: :func:`always_wrong`."""
ENDS = [17, 101, 230]
PROMPTS = trials(ci=24, nightly=200)
NEAR_TIE = 1e-6
"""Two logits this close (relative to the largest) may change places with the shape of the matrix product that made them."""


@pytest.fixture(scope="module")
def random_texts() -> tuple[Any, dict[str, Any], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """A target, models that become its drafts, and batches of 1, 3 and 8 rows, some of which end early: ids, mask and text."""
    target, batches = random_llama(7), []
    kinds = {
        kind: always_wrong(target) if noise is None else noisy(target, noise, seed=1) for kind, noise in KINDS.items()
    }
    prompts = random_prompts(PROMPTS, seed=11, longest=20)
    for rows in (1, 3, 8):
        for begin in range(0, PROMPTS, rows):
            ids, mask = left_pad(prompts[begin : begin + rows])
            call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ENDS, "pad_token_id": 0}
            batches.append((ids, mask, target.generate(ids, attention_mask=mask, **call)))
    return target, kinds, batches


def margin(target: Any, mask: torch.Tensor, wanted: torch.Tensor, got: torch.Tensor) -> float:
    """The target's relative margin between its two best tokens where two texts of a row differ first."""
    at = next(i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b)
    with torch.inference_mode():
        logits = target(wanted[int((mask == 0).sum()) : at][None]).logits[0, -1].double()
    best = logits.topk(2).values
    return float((best[0] - best[1]) / logits.abs().max())


@pytest.mark.skipif(DEVICE != "cpu", reason="the texts of transformers are those of a CPU")
@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
@pytest.mark.parametrize("models", [1, 2, 3])
def test_random_prompts(random_texts: Any, models: int, schedule: str) -> None:
    target, kinds, batches = random_texts
    drafts = [copy.deepcopy(target) for _ in range(models)]
    chains = list(itertools.product(KINDS, repeat=models))
    # This step visits all chains in mixed order.
    step = next(s for s in range(len(chains) // 3 + 1, len(chains)) if len(chains) % s and s % 2)
    counts = {kind: [0, 0] for kind in KINDS}
    with Pipeline(target, drafts, schedule=schedule, lookahead=[4, 3, 3][:models]) as pipe:
        for number, (ids, mask, wanted) in enumerate(batches):
            chain = chains[number * step % len(chains)]
            with torch.no_grad():  # in place, in the process where the draft runs
                for draft, kind in zip(drafts, chain, strict=True):
                    for mine, theirs in zip(draft.parameters(), kinds[kind].parameters(), strict=True):
                        mine.copy_(theirs)
            # In every fifth call the target waits for its drafts.
            keeps_up = schedule == "workers" and number % 5 == 0
            limits = (mask.sum(1) + NEW).tolist()
            with drafts_keep_up(pipe, limits, ENDS) if keeps_up else nullcontext():
                call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ENDS, "pad_token_id": 0}
                got = pipe.generate(ids, attention_mask=mask, **call)
            for row in range(len(ids)):
                if got.shape != wanted.shape or not torch.equal(got[row], wanted[row]):
                    assert margin(target, mask[row], wanted[row], got[row]) < NEAR_TIE, (chain, number, row)
            if keeps_up or schedule == "lockstep":
                last = pipe.report.stages[-1]
                counts[chain[-1]][0] += last.accepted
                counts[chain[-1]][1] += last.drafted - last.accepted
    # Without draft tokens of the intended acceptance the test would show nothing.
    # (A wrong middle stage passes no right token on, and a stage may verify at a row's last place.)
    assert counts["right"][0] > 50 * counts["right"][1]
    assert counts["wrong"][0] == 0 < counts["wrong"][1]
    if schedule == "lockstep":  # "workers" has too few calls in which the target waits
        assert counts["good"][0] > counts["good"][1] > 0
        assert counts["bad"][1] > counts["bad"][0]
        assert counts["wrong"][1] > trials(ci=20, nightly=100)
