"""Calls of several threads on one pipeline or one attached model. The bare model runs them side by side, and so one may wait for another one in its own code.
Each has its own text, and none waits for the code of another one."""

import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import pipespec
from pipespec import Pipeline, SpeedWarning
from pipespec.api.base import MAX_SLOTS
from pipespec.api.output import own_report
from pipespec.engine.native import NativeForm
from tests.conftest import noisy, random_llama, random_prompts
from tests.support.grammars import Classes
from tests.support.streamers import Held, Recorder
from tests.support.texts import one_prompt, own_text
from tests.support.ways import driver_of, opened
from tests.trials import trials
from tests.waiting import SECONDS

NEW = 10
PROMPTS = [prompt[None] for prompt in random_prompts(6, seed=80, shortest=4)]
WAYS = ["lockstep", "plain", "workers", "lockstep, captured", "streams", "spd"]
WITH_SLOTS = {"lockstep", "plain"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_llama(31)


@pytest.fixture(scope="module")
def texts(model: PreTrainedModel) -> list[torch.Tensor]:
    return [own_text(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS]


@contextmanager
def caught() -> Iterator[list[str]]:
    """The speed warnings that calls give."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield told
    told += [str(warning.message) for warning in seen if issubclass(warning.category, SpeedWarning)]


def held_in(place: str) -> tuple[Held, dict[str, Any]]:
    """Arguments of a call that waits in code of the caller, until the test lets it go on."""
    held = Held(2)
    if place == "streamer":
        return held, {"streamer": held}

    def note(ids: torch.Tensor, scores: Any, result: Any) -> Any:
        held.put(ids[0, -1:])
        return result

    held.values.append(torch.empty(0))  # in place of the prompt
    if place == "criterion":
        return held, {"stopping_criteria": [lambda ids, scores: note(ids, scores, torch.zeros(len(ids)).bool())]}
    return held, {"logits_processor": [lambda ids, scores: note(ids, scores, scores)]}


@pytest.mark.parametrize(
    ("way", "place"), [*((way, "streamer") for way in WAYS), ("lockstep", "criterion"), ("spd", "processor")]
)
def test_calls_while_one_waits_in_code_of_the_caller(model, texts, way, place) -> None:
    """All others end first. One warning says where transformers decodes them."""
    held, given = held_in(place)
    with opened(model, noisy(model, 0.02), way) as pipe, ThreadPoolExecutor(1) as threads, caught() as told:
        first = threads.submit(pipe.generate, PROMPTS[0], max_new_tokens=NEW, **given)
        assert held.inside.wait(SECONDS)
        schedules = []
        for prompt, text in zip(PROMPTS[1:4], texts[1:4], strict=True):
            assert torch.equal(pipe.generate(prompt, max_new_tokens=NEW, do_sample=False), text)
            schedules.append(pipe.report.schedule)
        held.go_on.set()
        assert torch.equal(first.result(SECONDS), texts[0])
        assert torch.equal(pipe.generate(PROMPTS[1], max_new_tokens=NEW), texts[1])
    assert set(schedules) == ({way} if way in WITH_SLOTS else {"transformers"})
    assert sum("at the same time" in text for text in told) == (way not in WITH_SLOTS)


@pytest.mark.parametrize("schedule", ["lockstep", "streams"])
def test_calls_that_meet_at_each_token(model, schedule) -> None:
    """A debate: each of two calls takes the mean of both scores, so that both need the other one's next token."""

    def meeting() -> list[torch.Tensor]:
        gate, said = threading.Barrier(2, timeout=SECONDS), [torch.empty(0)] * 2

        def mean(k: int) -> Callable[..., torch.Tensor]:
            def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                said[k] = scores.clone()
                gate.wait()
                both = (said[0] + said[1]) / 2
                gate.wait()
                return both

            return process

        def run(k: int) -> torch.Tensor:
            try:
                return own_text(model, PROMPTS[k], max_new_tokens=NEW, logits_processor=[mean(k)])
            except BaseException:
                gate.abort()
                raise

        with ThreadPoolExecutor(2) as threads:
            return [call.result(SECONDS) for call in [threads.submit(run, k) for k in (0, 1)]]

    wanted = meeting()
    pipespec.attach(model, noisy(model, 0.02), schedule=schedule)
    try:
        with caught():
            found = meeting()
    finally:
        pipespec.detach(model)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_the_reader_of_a_bounded_queue_asks_the_model(model, texts, schedule) -> None:
    tokens: queue.Queue[int | None] = queue.Queue(maxsize=1)

    class Bounded(Recorder):
        def put(self, value: torch.Tensor) -> None:
            for token in value.flatten().tolist():
                tokens.put(token, timeout=SECONDS)

        def end(self) -> None:
            tokens.put(None, timeout=SECONDS)

    pipespec.attach(model, noisy(model, 0.02), schedule=schedule)
    try:
        with ThreadPoolExecutor(1) as threads, caught():
            call = threads.submit(model.generate, PROMPTS[0], max_new_tokens=NEW, do_sample=False, streamer=Bounded())
            read: list[int] = []
            while (token := tokens.get(timeout=SECONDS)) is not None:
                read.append(token)
                assert torch.equal(model.generate(PROMPTS[1], max_new_tokens=NEW, do_sample=False), texts[1])
            assert torch.equal(call.result(SECONDS), texts[0])
    finally:
        pipespec.detach(model)
    assert read == texts[0][0].tolist()


@pytest.mark.parametrize("way", ["lockstep", "lockstep, captured", "spd"])
def test_a_call_inside_of_a_call(model, texts, way) -> None:
    """It is one more call at the same time, also from the same thread."""
    inner: list[torch.Tensor] = []
    streamer = Recorder(2, lambda: inner.append(pipe.generate(PROMPTS[1], max_new_tokens=NEW)))
    with opened(model, noisy(model, 0.02), way) as pipe, caught():
        assert torch.equal(pipe.generate(PROMPTS[0], max_new_tokens=NEW, streamer=streamer), texts[0])
    assert torch.equal(inner[0], texts[1])


def test_random_calls_of_many_threads(model, texts) -> None:
    """More threads than slots; sampled calls have the text of their seed wherever they run."""
    sampled = {"max_new_tokens": NEW, "do_sample": True, "seed": 5}
    with Pipeline(model, noisy(model, 0.02)) as pipe:
        drawn = [pipe.generate(prompt, **sampled) for prompt in PROMPTS]

        def work(thread: int) -> None:
            for i in range(trials(ci=6, nightly=60)):
                k = (thread + i) % len(PROMPTS)
                assert torch.equal(pipe.generate(PROMPTS[k], max_new_tokens=NEW, do_sample=False), texts[k])
                assert torch.equal(pipe.generate(PROMPTS[k], **sampled), drawn[k])

        with ThreadPoolExecutor(MAX_SLOTS + 2) as threads, caught():
            for call in [threads.submit(work, thread) for thread in range(MAX_SLOTS + 2)]:
                call.result()


# ---- the slots


def test_slots_are_made_as_needed_and_freed_with_the_pipeline(model, texts) -> None:
    held = [Held(1) for _ in range(MAX_SLOTS + 1)]
    with Pipeline(model, noisy(model, 0.02), schedule="lockstep") as pipe, ThreadPoolExecutor(len(held)) as threads:
        assert torch.equal(pipe.generate(PROMPTS[0], max_new_tokens=NEW), texts[0])
        assert not pipe._others
        with caught() as told:
            calls = []
            for streamer in held:
                calls.append(threads.submit(pipe.generate, PROMPTS[0], max_new_tokens=NEW, streamer=streamer))
                assert streamer.inside.wait(SECONDS)
            for streamer in held:
                streamer.go_on.set()
            assert all(torch.equal(call.result(SECONDS), texts[0]) for call in calls)
        assert [f"{MAX_SLOTS} calls run in this pipeline" in text for text in told] == [True]
        assert len(pipe._others) == MAX_SLOTS - 1
        pipe.close()
        assert not pipe._others
        assert torch.equal(pipe.generate(PROMPTS[0], max_new_tokens=NEW), texts[0])


class Proposes:
    """A draft of the caller, which may have a state."""

    def propose(self, tokens: Any, count: int) -> list[int]:
        return [5] * count


def test_a_draft_of_the_caller_has_one_slot(model, texts) -> None:
    held = Held(1)
    with Pipeline(model, Proposes(), schedule="lockstep") as pipe, ThreadPoolExecutor(1) as threads, caught():
        call = threads.submit(pipe.generate, PROMPTS[0], max_new_tokens=NEW, streamer=held)
        assert held.inside.wait(SECONDS)
        assert torch.equal(pipe.generate(PROMPTS[1], max_new_tokens=NEW), texts[1])
        assert pipe.report.schedule == "transformers"
        held.go_on.set()
        assert torch.equal(call.result(SECONDS), texts[0])


def test_the_failure_of_a_call_is_that_of_its_slot(model, texts) -> None:
    """``partial`` and ``report`` are those of the call that has ended last, in any slot."""
    held = Held(1)

    def fails(ids: torch.Tensor, scores: Any) -> Any:
        if ids.shape[1] == PROMPTS[1].shape[1] + 3:
            raise LookupError
        return False

    with Pipeline(model, schedule="lockstep") as pipe, ThreadPoolExecutor(1) as threads:
        first = threads.submit(pipe.generate, PROMPTS[0], max_new_tokens=NEW, streamer=held)
        assert held.inside.wait(SECONDS)
        with pytest.raises(LookupError) as caught_error:
            pipe.generate(PROMPTS[1], max_new_tokens=NEW, stopping_criteria=[fails])
        assert torch.equal(pipe.partial, texts[1][:, : PROMPTS[1].shape[1] + 3])
        assert torch.equal(caught_error.value.partial, pipe.partial)
        held.go_on.set()
        assert torch.equal(first.result(SECONDS), texts[0])
        assert pipe.report.tokens == NEW


def test_first_calls_of_several_threads_pack_the_weights_once(monkeypatch) -> None:
    target, made = random_llama(33), []
    init = NativeForm.__init__

    def counted(form: NativeForm, *args: Any, **options: Any) -> None:
        if options.get("watches", True):  # not a copy of a few layers, for a comparison
            made.append(form)
        init(form, *args, **options)

    monkeypatch.setattr(NativeForm, "__init__", counted)
    text, start = own_text(target, PROMPTS[0], max_new_tokens=NEW), threading.Barrier(3, timeout=SECONDS)

    def first(pipe: Pipeline) -> torch.Tensor:
        start.wait()
        return pipe.generate(PROMPTS[0], max_new_tokens=NEW)

    with Pipeline(target, schedule="plain") as pipe, ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(first, pipe) for _ in range(3)]
        assert all(torch.equal(call.result(SECONDS), text) for call in calls)
    assert len(made) == 1


def test_idle_slots_give_their_caches_up_where_memory_is_short(model, texts, monkeypatch) -> None:
    with Pipeline(model, schedule="plain") as pipe:
        inner = Recorder(1, lambda: pipe.generate(PROMPTS[1], max_new_tokens=NEW))
        pipe.generate(PROMPTS[0], max_new_tokens=NEW, streamer=inner)
        (other,) = pipe._others
        assert driver_of(other).target._cache is not None
        monkeypatch.setattr("pipespec.api.base.check_memory", lambda *args, release, **given: release())
        driver_of(pipe).checked = (0, 0, 0)
        assert torch.equal(pipe.generate(PROMPTS[0], max_new_tokens=NEW), texts[0])
        assert driver_of(other).target._cache is None


def test_a_refused_call_of_a_further_slot_leaves_the_report(model, texts) -> None:
    """Another call ends meanwhile."""
    held, failing = Held(1), Held(2, lambda: 1 // 0)
    with Pipeline(model, schedule="lockstep") as pipe, ThreadPoolExecutor(2) as threads:
        pipe.generate(PROMPTS[0], max_new_tokens=3)
        first = threads.submit(pipe.generate, PROMPTS[0], max_new_tokens=NEW, streamer=held)
        assert held.inside.wait(SECONDS)
        second = threads.submit(pipe.generate, PROMPTS[1], max_new_tokens=NEW, streamer=failing)
        assert failing.inside.wait(SECONDS)
        held.go_on.set()
        assert torch.equal(first.result(SECONDS), texts[0])
        failing.go_on.set()
        with pytest.raises(ZeroDivisionError):
            second.result(SECONDS)
        assert pipe.report.tokens == NEW
        assert torch.equal(pipe.partial, texts[1][:, : PROMPTS[1].shape[1] + 2])


def test_each_thread_has_the_report_of_its_own_call(model) -> None:
    """The other call ends between the end of the first one and the look at its report."""
    looks, ended = threading.Event(), threading.Event()

    def short() -> int:
        pipe.generate(PROMPTS[0], max_new_tokens=3)
        ended.set()
        assert looks.wait(SECONDS)
        return own_report.get().tokens

    with Pipeline(model, schedule="plain") as pipe, ThreadPoolExecutor(1) as threads:
        call = threads.submit(short)
        assert ended.wait(SECONDS)
        pipe.generate(PROMPTS[1], max_new_tokens=NEW)
        looks.set()
        assert call.result(SECONDS) == 3
        assert pipe.report.tokens == own_report.get().tokens == NEW


def test_a_further_slot_asks_the_idle_first_one_for_its_caches(model, texts) -> None:
    held, inner = Held(1), Held(2)
    with Pipeline(model, schedule="plain") as pipe, ThreadPoolExecutor(2) as threads:
        first = threads.submit(pipe.generate, PROMPTS[0], max_new_tokens=NEW, streamer=held)
        assert held.inside.wait(SECONDS)
        second = threads.submit(pipe.generate, PROMPTS[1], max_new_tokens=NEW, streamer=inner)
        assert inner.inside.wait(SECONDS)
        held.go_on.set()
        assert torch.equal(first.result(SECONDS), texts[0])
        inner.go_on.set()
        assert torch.equal(second.result(SECONDS), texts[1])
        (other,) = pipe._others
        with pipe._lock:
            other._release()
        assert driver_of(pipe).target.cache is not None  # it was not idle
        other._release()
        assert driver_of(pipe).target.cache is driver_of(other).target.cache is None


def test_slots_share_the_budget_of_kept_texts(model) -> None:
    with Pipeline(model, schedule="plain", prefix_cache=1000) as pipe:
        nested = Recorder(1, lambda: pipe.generate(PROMPTS[1], max_new_tokens=NEW))
        pipe.generate(PROMPTS[0], max_new_tokens=NEW, streamer=nested)
        slots = [pipe, *pipe._others]
        assert [driver_of(slot).target._store.budget for slot in slots] == [500, 500]
        pipe.close()
        assert driver_of(pipe).target._store.budget == 1000


def test_close_inside_of_a_call_closes_nothing(model, texts) -> None:
    """It does not wait for the calls of other threads first, which may wait for this one."""
    held = Held(1)
    with Pipeline(model, schedule="plain") as pipe, ThreadPoolExecutor(1) as threads:
        calls = []

        def close() -> None:
            calls.append(threads.submit(pipe.generate, PROMPTS[1], max_new_tokens=NEW, streamer=held))
            assert held.inside.wait(SECONDS)
            pipe.close()

        with pytest.raises(RuntimeError, match="inside a call of the same pipeline"):
            pipe.generate(PROMPTS[0], max_new_tokens=NEW, streamer=Recorder(1, close))
        assert len(pipe._others) == 1
        held.go_on.set()
        assert torch.equal(calls[0].result(SECONDS), texts[1])


# ---- calls that only a pipeline can run


ONLY_HERE: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "grammar": ({}, lambda: {"grammar": Classes(4, 320)}),
    "logprobs": ({}, lambda: {"logprobs": 1, "return_dict_in_generate": True}),
    "exact": ({"exact": True}, dict),
}


@pytest.mark.parametrize("what", ONLY_HERE)
def test_calls_that_only_a_pipeline_can_run_wait(model, what) -> None:
    options, given = ONLY_HERE[what]
    held, prompt = Held(1), one_prompt(3)
    with Pipeline(model, Proposes(), schedule="lockstep", **options) as pipe, ThreadPoolExecutor(2) as threads:
        first = threads.submit(pipe.generate, prompt, max_new_tokens=NEW, streamer=held)
        assert held.inside.wait(SECONDS)
        second = threads.submit(pipe.generate, prompt, max_new_tokens=NEW, **given())
        assert not second.done()
        held.go_on.set()
        first.result(SECONDS)
        second.result(SECONDS)
        assert pipe.report.schedule == "lockstep"
        nested = Recorder(1, lambda: pipe.generate(prompt, max_new_tokens=NEW, **given()))
        with pytest.raises(RuntimeError, match="inside a call of the same pipeline"):
            pipe.generate(prompt, max_new_tokens=NEW, streamer=nested)


def test_a_conversation_goes_to_the_slot_that_has_read_it(model) -> None:
    """Not to the first free one, which would read it again."""
    first, second = (prompt[None] for prompt in random_prompts(2, seed=81, shortest=40, longest=48))
    with Pipeline(model, schedule="plain") as pipe, ThreadPoolExecutor(1) as threads:
        held, given = held_in("streamer")
        running = threads.submit(pipe.generate, first, max_new_tokens=NEW, **given)
        assert held.inside.wait(SECONDS)
        pipe.generate(second, max_new_tokens=NEW)
        held.go_on.set()
        running.result(SECONDS)
        for prompt in (second, first, second):
            pipe.generate(prompt, max_new_tokens=NEW)
            assert pipe.report.prompt_tokens_reused == prompt.shape[1] - 1
