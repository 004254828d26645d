"""Signal handlers of the caller that raise: their errors end the call, and never count as the failure of a draft."""

from __future__ import annotations

import ast
import os
import signal
import sys
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

import pipespec
import pipespec_kernels
from pipespec import Pipeline
from pipespec.drivers.base import StageFailure
from pipespec.models import loading
from pipespec.preflight import tokenizers
from pipespec.process import shutdown
from pipespec.process.signals import DelayedHandlers, from_handler, is_stopped, pass_on, suppressed
from pipespec.spd import SpeculativePipeline
from pipespec_kernels import env
from tests.conftest import noisy, random_llama, random_prompts
from tests.trials import trials
from tests.waiting import until

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


@pytest.mark.parametrize("kind", [TimeoutError, TooLate])
@pytest.mark.parametrize("number", [1, 3], ids=["prefill", "step"])
@pytest.mark.parametrize("how", ["lockstep", "rounds", "spd"])
def test_an_error_of_the_callers_while_a_draft_computes(models, how, number, kind):
    target, draft = models
    if how == "spd":
        pipe = SpeculativePipeline(target, draft, stages=2)
    else:
        pipe = Pipeline(target, draft, schedule="lockstep", lookahead=4, graphs=how == "rounds")
    wanted = pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
    draft.at = number
    with raising(kind), pytest.raises(kind, match="time is up"):
        pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
    assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20, do_sample=False), wanted)
    if how != "spd":
        pipe.close()


@pytest.mark.parametrize("kind", [TimeoutError, TooLate])
@pytest.mark.parametrize("waits_in", ["poll", "send"])
def test_an_error_of_the_callers_while_it_talks_to_a_worker(models, waits_in, kind):
    class Interrupted:
        def __init__(self, conn) -> None:
            self.conn = conn

        def __getattr__(self, name: str):
            if name == waits_in:
                signal.raise_signal(signal.SIGUSR1)
            return getattr(self.conn, name)

    target, draft = models
    with Pipeline(target, draft, schedule="workers") as pipe:
        wanted = pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
        worker = pipe._driver._workers[0]
        worker.conn = Interrupted(worker.conn)
        with raising(kind), pytest.raises(kind, match="time is up"):
            pipe.generate(PROMPT, max_new_tokens=20, do_sample=False)
        worker.conn = worker.conn.conn
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20, do_sample=False), wanted)
        if waits_in == "send":  # the worker may have half of a message, so the pipeline does not wait for it
            assert len(told) == 1
            assert "it has a part of a call that was interrupted); it is started again" in str(told[0].message)


@pytest.mark.parametrize(
    ("within", "interrupted", "call"),
    [
        (tokenizers, "cached_file", lambda: tokenizers.tokenizer_digest("some/name", None)),
        (loading.AutoConfig, "from_pretrained", lambda: loading.load_config("some/name")),
    ],
    ids=["tokenizer", "configuration"],
)
def test_an_error_of_the_callers_while_a_file_is_read(monkeypatch, within, interrupted, call):
    """A ``TimeoutError`` is an ``OSError``, but this one does not come from the file."""

    def reads(*args, **kwargs):
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(within, interrupted, reads)
    with raising(TimeoutError), pytest.raises(TimeoutError, match="time is up"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: is_stopped(os.getpid()),
        lambda: env._lines("/proc/self/stat"),
        lambda: env._field("/proc/self/stat", "x"),
        lambda: env._group_memory(),
    ],
    ids=["is_stopped", "lines", "field", "group_memory"],
)
def test_an_error_of_the_callers_while_the_system_is_asked(monkeypatch, call):
    def reads(*args, **kwargs):
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Path, "read_bytes", reads)
    monkeypatch.setattr(Path, "read_text", reads)
    with raising(TimeoutError), pytest.raises(TimeoutError, match="time is up"):
        call()


EXEMPT = {
    "pipespec/cli": "the program's own handlers end it",
    "pipespec/demo/corpus.py": "makes the bundled corpus",
    "pipespec/drivers/workers/process.py": "a worker has no handlers of the caller",
    "pipespec/bench": "programs",
}
"""Files in which an error of a handler may count as the file's or the system's, and why."""


def test_errors_of_the_caller_pass_where_those_of_the_system_are_caught():
    """A handler's ``TimeoutError`` is an ``OSError``. An ``except`` that keeps it would end the timeout and not the call."""
    silent = []
    for package in (pipespec, pipespec_kernels):
        folder = Path(package.__file__).parent
        for path in folder.rglob("*.py"):
            name = str(path.relative_to(folder.parent))
            if name.startswith(tuple(EXEMPT)):
                continue
            source, _, _ = path.read_text().partition(
                "# ---- in the template"
            )  # it has no handlers of the caller, either
            for node in ast.walk(ast.parse(source)):
                if not isinstance(node, ast.ExceptHandler) or node.type is None:
                    continue
                if {"OSError", "TimeoutError"}.isdisjoint(n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)):
                    continue
                calls = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
                if "pass_on" not in calls and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
                    silent.append(f"{name}:{node.lineno}")
    assert silent == []


def test_a_handler_that_drops_its_arguments():
    def drops(number, frame):
        del frame
        raise TimeoutError("time is up")

    def renames(number, frame):
        number = signal.Signals(number).name
        raise TimeoutError(number)

    for handler in (drops, renames):
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with pytest.raises(TimeoutError) as caught:
                signal.raise_signal(signal.SIGUSR1)
            assert from_handler(caught.value)
        finally:
            signal.signal(signal.SIGUSR1, before)


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
        delayed = DelayedHandlers()
        with delayed.handled(), pytest.raises(TimeoutError):
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
                        with shutdown.call():
                            pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            assert not shutdown._calls.threads
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_errors_that_no_handler_raised():
    def inner(frame: object) -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own") as caught:
        inner(None)
    assert not from_handler(caught.value)
    with suppressed(ValueError):
        inner(1)
    with pytest.raises(ZeroDivisionError), suppressed(ValueError):
        print(1 / 0)


def test_an_error_that_a_handlers_error_led_to():
    def library() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except TimeoutError as error:
            raise RuntimeError("the library's") from error

    with raising(TimeoutError), pytest.raises(RuntimeError, match="library") as caught:
        library()
    assert from_handler(caught.value)


def test_a_second_attempt_within_except():
    """The error of the second attempt has that of the first as its context, and is not caused by it."""

    def attempt(work) -> bool:
        try:
            work()
        except (OSError, ArithmeticError) as error:
            pass_on(error)
        return True

    def fails_twice() -> None:
        try:
            raise OSError("its own")
        except OSError:
            print(1 / 0)

    with raising(TimeoutError):
        try:
            attempt(lambda: signal.raise_signal(signal.SIGUSR1))
        except TimeoutError:
            assert attempt(lambda: print(1 / 0))
            assert attempt(fails_twice)


def test_an_error_that_a_handlers_error_led_to_without_a_cause():
    def library() -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except TimeoutError:
            print(1 / 0)

    with raising(TimeoutError), pytest.raises(ZeroDivisionError) as caught:
        library()
    assert from_handler(caught.value)


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


def test_a_function_that_takes_a_frame_is_no_handler():
    def profile(frame: object, event: str) -> None:
        raise ValueError("its own")

    def log(level: int, frame: object) -> None:
        raise ValueError("its own")

    for call in (lambda: profile(sys._getframe(), "call"), lambda: log(1000, sys._getframe())):
        with suppressed(ValueError):
            call()


@pytest.mark.parametrize("number", [signal.SIGRTMIN + 6, signal.SIGKILL])
def test_a_draft_that_any_signal_ends(models, number):
    target, draft = models
    wanted = Pipeline(target, schedule="plain").generate(PROMPT, max_new_tokens=20, do_sample=False)
    with Pipeline(target, draft, schedule="workers") as pipe:
        worker = pipe._driver._workers[0]
        os.kill(worker.process.pid, number)
        until(worker.is_dead, "the worker has ended")
        name = "SIGKILL" if number == signal.SIGKILL else f"signal {number:d}"
        with pytest.warns(StageFailure, match=f"killed by {name}"):
            assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20, do_sample=False), wanted)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=20, do_sample=False), wanted)
        assert pipe._driver._workers[0] is not worker
        assert pipe._driver.block.is_alive(0)
