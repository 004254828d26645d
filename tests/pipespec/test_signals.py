"""Signal handlers of the caller that raise: their errors end the call, and never count as the failure of a draft."""

import signal
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

from pipespec import Pipeline, trust
from pipespec.process import threads
from pipespec.process.threads import delayed, handlers_watched, is_handlers_error, raise_handlers_error
from pipespec.schedules.base import StageFailure
from pipespec_kernels import _native, env, state
from pipespec_kernels.state import StateBlock
from tests.conftest import noisy, random_llama, random_prompts
from tests.support.processes import peers_of
from tests.support.ways import opened
from tests.trials import trials

PROMPT = random_prompts(1, seed=5, shortest=6)[0][None]


class TooLate(RuntimeError):
    """An error class of the caller."""


class Watchdog:
    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def bark(self, *arguments: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # once
        raise self.kind("time is up")


@contextmanager
def raising(kind: type[Exception]):
    before = signal.signal(signal.SIGUSR1, Watchdog(kind).bark)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Draft(LlamaForCausalLM):
    """A draft that raises the signal in its forward number ``at`` from now."""

    at = 0

    def forward(self, *args, **kwargs):
        self.at -= 1
        if self.at == 0:
            signal.raise_signal(signal.SIGUSR1)
        return super().forward(*args, **kwargs)


@pytest.fixture(scope="module")
def models():
    target = random_llama(3)
    draft = Draft(target.config)
    draft.load_state_dict(noisy(target, 0.02).state_dict())
    return target, draft.eval()


@pytest.mark.parametrize(("number", "kind"), [(1, TimeoutError), (3, TooLate)], ids=["prefill", "step"])
@pytest.mark.parametrize("how", ["lockstep", "lockstep, captured", "spd"])
def test_an_error_of_the_callers_while_a_draft_computes(models, how, number, kind):
    target, draft = models
    with opened(target, draft, how, lookahead=4) as pipe:
        wanted = pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
        draft.at = number
        with raising(kind), pytest.raises(kind, match="time is up"):
            pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20, do_sample=False), wanted)


@pytest.mark.parametrize("kind", [TimeoutError, TooLate])
@pytest.mark.parametrize("waits_in", ["poll", "send"])
def test_an_error_of_the_callers_while_it_talks_to_a_worker(models, waits_in, kind):
    class Interrupted:
        def __init__(self, channel) -> None:
            self.channel = channel

        def __getattr__(self, name: str):
            if name == waits_in:
                signal.raise_signal(signal.SIGUSR1)
            return getattr(self.channel, name)

    target, draft = models
    with Pipeline(target, draft, schedule="workers") as pipe:
        wanted = pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
        peer = peers_of(pipe)[0]
        channel = peer.channel
        peer.channel = Interrupted(channel)
        with raising(kind), pytest.raises(kind, match="time is up"):
            pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
        peer.channel = channel
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20, do_sample=False), wanted)
        if waits_in == "send":  # the worker may not have the call, so the pipeline does not wait for it
            assert len(told) == 1
            assert "is lost (a call to it was interrupted)" in str(told[0].message)


@pytest.mark.parametrize(
    "call",
    [lambda: env._lines("/proc/self/stat"), lambda: env._field("/proc/self/stat", "x"), lambda: env._group_memory()],
    ids=["lines", "field", "group_memory"],
)
def test_an_error_of_the_callers_while_the_system_is_asked(monkeypatch, call):
    def reads(*args, **kwargs):
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Path, "read_bytes", reads)
    monkeypatch.setattr(Path, "read_text", reads)
    with raising(TimeoutError), pytest.raises(TimeoutError, match="time is up"):
        call()


def test_an_error_of_the_callers_while_the_block_grows(monkeypatch):
    """The memory has moved already. The block is laid out there, and a later call can use it."""
    block, lay_out = StateBlock.create(2, 1, 64), state._lay_out
    block.set_alive(1, True)
    before = block.memory.address

    def interrupted(memory, stages, rows, capacity):
        monkeypatch.setattr(state, "_lay_out", lay_out)
        memory.remap(_native.Block.part_bytes(stages, rows, capacity, memory.alignment))
        raise TooLate("time is up")

    monkeypatch.setattr(state, "_lay_out", interrupted)
    with pytest.raises(TooLate):
        block.ensure(8, 1 << 16)
    assert block.memory.address != before
    assert (block.rows, block.capacity, block.is_alive(0), block.is_alive(1)) == (8, 1 << 16, False, True)
    block.reset([4] * 8, [60] * 8, [1] * 8, [])
    assert block.length(1, 7) == 4


def test_delayed_handlers_all_run():
    """If one of them raises an error, or the block does, the others run all the same."""
    ran = []

    def handle(number, frame):
        ran.append(number)
        raise TimeoutError("time is up")

    def block():
        with delayed:
            for number in numbers:
                signal.raise_signal(number)
            assert ran == []
            raise ValueError("the block's")

    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]
    before = [signal.signal(number, handle) for number in numbers]
    try:
        with handlers_watched(delayable=True), pytest.raises(TimeoutError):
            block()
        assert ran == numbers
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_errors_of_the_caller_at_any_moment_of_a_call():
    """Calls of other threads and the end of the program do not wait for a call that has ended."""

    def handle(number, frame):
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for trial in range(trials(200, 5000)):
            with suppress(TimeoutError):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1e-6 * (trial % 100))
                    for _ in range(200):
                        with threads.program_end_awaited():
                            pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            assert not threads._calling
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_error_that_a_draft_makes_out_of_the_callers(models):
    """Whatever the draft's code raises instead, the caller gets the error of its own handler."""
    target, draft = models
    forward = LlamaForCausalLM.forward

    def replaces(self, *args, **kwargs):
        try:
            return forward(self, *args, **kwargs)
        finally:
            if self is draft:
                with suppress(TimeoutError):
                    signal.raise_signal(signal.SIGUSR1)
                raise ArithmeticError("the draft's own")

    trust(replaces)
    pipe = Pipeline(target, draft, schedule="lockstep", lookahead=4)
    with (
        raising(TimeoutError),
        patch.object(LlamaForCausalLM, "forward", replaces),
        pytest.raises(TimeoutError, match="time is up"),
    ):
        pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)


def test_the_handlers_of_a_call_are_those_of_before_and_after():
    """Unless code of the caller has set another one within the call, which stays."""

    def first(number: int, frame: object) -> None:
        pass

    before = [signal.signal(number, first) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        with handlers_watched():
            assert signal.getsignal(signal.SIGINT) is ctrl_c
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is first
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_an_error_within_a_call_inside_of_a_call():
    """It counts as the caller's in both calls, and in no later one."""
    with raising(TooLate):
        with handlers_watched():
            with pytest.raises(TooLate) as inner, handlers_watched():
                signal.raise_signal(signal.SIGUSR1)
            assert is_handlers_error(inner.value)
            with pytest.raises(TooLate):
                raise_handlers_error()
        assert not is_handlers_error(inner.value)


def test_a_draft_that_fails_in_a_second_attempt(models):
    target, draft = models
    pipe = Pipeline(target, draft, schedule="lockstep")
    wanted = pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
    draft.at = 3
    with raising(TimeoutError):
        try:
            pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
        except TimeoutError:
            with (
                patch.object(LlamaForCausalLM, "forward", failing_for(draft)),
                pytest.warns(StageFailure, match="the draft's own"),
            ):
                assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20, do_sample=False), wanted)


def failing_for(model):
    forward = LlamaForCausalLM.forward

    def fail(self, *args, **kwargs):
        if self is model:
            raise ArithmeticError("the draft's own")
        return forward(self, *args, **kwargs)

    return fail
