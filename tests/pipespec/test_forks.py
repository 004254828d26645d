"""Parent and children use a pipeline that was made before a fork, at the same time."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from pipespec import Pipeline, attach, detach, trust
from pipespec.models.loading import load_model
from pipespec.process.threads import lowered_threads, renew_pool, target_threads
from pipespec.schedules.asynchronous import local
from pipespec.schedules.asynchronous.messages import Channel
from pipespec.schedules.base import StageFailure
from pipespec_kernels.state import SharedMemory, StateBlock
from tests.conftest import noisy, random_llama, random_prompts
from tests.support.forks import FRESH
from tests.support.processes import peers_of, pids_of
from tests.support.streamers import Held, Recorder
from tests.support.ways import IN_THIS_PROCESS, driver_of, opened
from tests.trials import trials
from tests.waiting import SECONDS, drafts_keep_up

PROMPTS = random_prompts(3, seed=21, shortest=4)
NEW = 12


class Child:
    """A fork of this process that runs ``body``. It fails the test unless ``body`` returns."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._errors, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(int(3 * SECONDS))  # also if the parent is killed
            try:
                body()
            except BaseException:
                os.write(theirs, traceback.format_exc().encode())
                os._exit(1)
            os._exit(0)
        os.close(theirs)

    def check(self) -> None:
        errors = b""
        while part := os.read(self._errors, 1 << 16):
            errors += part
        os.close(self._errors)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert status == 0, f"the child ended with {status}: {errors.decode()}"


@pytest.fixture(scope="module")
def models():
    target = random_llama(13)
    texts = [target.generate(p[None], max_new_tokens=NEW, do_sample=False) for p in PROMPTS]
    return target, noisy(target, 0.02), texts


def generates(pipe: Pipeline, texts, times: int) -> None:
    for i in range(times):
        k = i % len(PROMPTS)
        got = pipe.generate(PROMPTS[k][None], max_new_tokens=NEW, do_sample=False)
        assert torch.equal(got, texts[k]), f"call {i} of process {os.getpid()} has another text"


@pytest.mark.parametrize("schedule", ["lockstep", "streams", "workers", "spd"])
def test_a_fork_while_another_thread_generates(models, schedule):
    """The child has neither the other thread nor the locks that it holds."""
    target, draft, texts = models

    found, reader = [], Held(0)
    with opened(target, draft, schedule) as pipe:
        thread = threading.Thread(
            target=lambda: found.append(
                pipe.generate(PROMPTS[0][None], max_new_tokens=NEW, do_sample=False, streamer=reader)
            )
        )
        thread.start()
        assert reader.inside.wait(SECONDS)
        child = Child(lambda: generates(pipe, texts, 2))
        try:
            child.check()
        finally:
            reader.go_on.set()
            thread.join(SECONDS)
        assert torch.equal(found[0], texts[0])
        generates(pipe, texts, 1)


@pytest.mark.parametrize("at", [0, 3], ids=["prompt", "token"])
@pytest.mark.parametrize("schedule", ["lockstep", "streams", "workers", "spd"])
def test_a_fork_inside_of_a_call(models, schedule, at):
    """The child continues the call of its parent, or raises an error. The parent's text is right."""
    target, draft, texts = models
    read, write = os.pipe()
    forked = threading.Event()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(int(SECONDS))
            warnings.simplefilter("ignore", StageFailure)  # for the child the workers have ended
        else:
            os.waitpid(child, 0)
            forked.set()

    def wait_for_the_fork(*_: object) -> None:
        """A thread of the target may else complete the text before the caller has seen its third token, and then a child has the whole text."""
        if driver_of(pipe).block.length(1, 0) >= len(PROMPTS[0]) + at:
            assert forked.wait(SECONDS)

    caller = os.getpid()
    waits = schedule == "streams" and at > 0
    with opened(target, draft, schedule) as pipe:
        trust(wait_for_the_fork)
        hook = target.register_forward_pre_hook(wait_for_the_fork) if waits else nullcontext()
        try:
            with hook:
                got = pipe.generate(PROMPTS[0][None], max_new_tokens=NEW, do_sample=False, streamer=Recorder(at, fork))
            verdict = b"same" if torch.equal(got, texts[0]) else b"another text"
        except BaseException as error:
            if os.getpid() == caller:
                raise
            verdict = f"{type(error).__name__}: {error}".encode()
        if os.getpid() != caller:
            os.write(write, verdict)
            os._exit(0)
        os.close(write)
        said = os.read(read, 1000).decode()
        os.close(read)
        assert said == ("RuntimeError: a forked process cannot go on with the call of its parent" if waits else "same")
        assert verdict == b"same"
        generates(pipe, texts, 1)


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_a_server_that_forks(models, schedule):
    """As a web server that loads before it forks: the parent attaches and generates, and its children accept requests from one socket."""
    target, draft, texts = models
    answers = [text.numpy().tobytes() for text in texts]
    end = len(answers)

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                which = connection.recv(1)[0]
                if which == end:
                    return
                got = target.generate(PROMPTS[which][None], max_new_tokens=NEW, do_sample=False)
                connection.sendall(got.numpy().tobytes())

    def ask(which: int) -> bytes:
        with socket.create_connection(listener.getsockname(), timeout=SECONDS) as connection:
            connection.sendall(bytes([which]))
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    attach(target, drafts=[draft], schedule=schedule)
    try:
        assert target.generate(PROMPTS[0][None], max_new_tokens=NEW, do_sample=False).numpy().tobytes() == answers[0]
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            children = [Child(serve) for _ in range(trials(ci=2, nightly=4))]
            asked = [i % end for i in range(trials(ci=16, nightly=1000))]
            with ThreadPoolExecutor(8) as clients:
                wrong = sum(
                    answer != answers[which] for which, answer in zip(asked, clients.map(ask, asked), strict=True)
                )
            for _ in children:
                ask(end)
        for child in children:
            child.check()
        assert wrong == 0
        assert target.generate(PROMPTS[1][None], max_new_tokens=NEW, do_sample=False).numpy().tobytes() == answers[1]
    finally:
        detach(target)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


THREADED = [("lockstep", False), ("lockstep", True), ("workers", False), ("spd", True), ("workers", True), ("spd", False)]  # fmt: skip


@pytest.mark.parametrize(("schedule", "inside"), THREADED[: trials(ci=4, nightly=6)])
def test_a_fork_of_a_process_that_computes_with_threads(two_threads, schedule, inside):
    """Products and elementwise operations are large enough for torch to share them between threads."""
    target = random_llama(17, hidden=512)
    draft = noisy(target, 0.02)
    prompt = random_prompts(1, seed=2, shortest=100, longest=100)[0][None]
    caller, children = os.getpid(), []

    def fork() -> None:
        children.append(os.fork())
        if os.getpid() != caller:
            signal.alarm(int(SECONDS))
            warnings.simplefilter("ignore", StageFailure)
            local._started = FRESH  # a draft that were a fork would lack torch's threads

    with opened(target, draft, schedule) as pipe:
        wanted = pipe.generate(prompt, max_new_tokens=8, do_sample=False)
        verdict = 1
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                # Python 3.12 and later.
                warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                if not inside:
                    fork()
                for streamer in (Recorder(2, fork) if inside else Recorder(), Recorder()):
                    got = pipe.generate(prompt, max_new_tokens=8, do_sample=False, streamer=streamer)
                    assert torch.equal(got, wanted)
            if os.getpid() != caller:
                assert torch.get_num_threads() == 1
                assert sum("one thread" in str(w.message) for w in told) == 1
                verdict = 0
        finally:
            if os.getpid() != caller:
                if verdict:
                    traceback.print_exc()
                os._exit(verdict)
        assert torch.get_num_threads() == 2
        assert not told
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


def test_a_fork_while_another_thread_has_lowered_torchs_threads(two_threads):
    entered, go_on = threading.Event(), threading.Event()

    def lower() -> None:
        with lowered_threads(1):
            entered.set()
            go_on.wait(SECONDS)

    def look() -> None:
        assert target_threads(0) == min(2, len(os.sched_getaffinity(0)))
        torch.set_num_threads(3)
        with lowered_threads(1):
            pass
        assert torch.get_num_threads() == 3, "the child restores what its parent had"

    thread = threading.Thread(target=lower)
    thread.start()
    try:
        assert entered.wait(SECONDS)
        Child(look).check()
    finally:
        go_on.set()
        thread.join(SECONDS)


def test_a_fork_renews_torchs_pool_once_before_it_loads(monkeypatch, tmp_path):
    """torch does that unlocked in whatever threads come first, and transformers loads with several."""
    random_llama(3).save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    renew_pool()
    assert not asked

    def load() -> None:
        for _ in range(2):
            load_model(tmp_path)
        assert asked == [torch.get_num_threads()]

    Child(load).check()


def test_a_child_that_closes_keeps_no_descriptors_and_does_not_close_its_parents(models):
    target, draft, texts = models
    with Pipeline(target, draft, schedule="workers") as pipe:
        pids, (peer,) = pids_of(pipe), peers_of(pipe).values()
        fd = peer.channel.fileno()

        def close() -> None:
            pipe.close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

        Child(close).check()
        os.fstat(fd)
        generates(pipe, texts, 1)
        assert pids_of(pipe) == pids


def test_a_fork_while_a_process_starts(models, monkeypatch):
    """The child closes its copy of the socket to the process that its parent starts."""
    target, draft, _ = models
    channels, start, pair = [], local._started, Channel.pair

    def made():
        ends = pair()
        channels.append(ends[0])
        return ends

    def look() -> None:
        assert channels[-1].closed

    def forks(fd):
        Child(look).check()
        return start(fd)

    monkeypatch.setattr(Channel, "pair", made)
    monkeypatch.setattr(local, "_started", forks)
    with Pipeline(target, draft, schedule="workers"):
        assert len(channels) == 1


def test_shared_memory_is_copied_for_a_child():
    block = StateBlock.create(2, 1, 64, SharedMemory.create([1]))
    block.reset([3], [60], [5], [])
    kept = SharedMemory.create([64], copied_by_forks=False)
    address, fds = block.memory.address, list(block.memory.fds)
    assert len(fds) == 4

    def write() -> None:
        assert block.length(1, 0) == 3
        assert (block.memory.address, block.memory.fds) == (address, fds)
        assert [os.fstat(fd).st_size for fd in fds] == block.memory.sizes
        block.memory.array[:] = 255
        kept.array[:] = 255
        other = SharedMemory([os.dup(fd) for fd in fds])  # the view of a process that gets the descriptors
        assert (other.array == 255).all()

    Child(write).check()
    assert block.length(1, 0) == 3
    assert (kept.array == 255).all()


def test_a_child_has_the_memory_as_it_was_at_the_fork(tmp_path):
    """The parent continues at once, and may write before the child has made its copy."""
    script = """
import os

written, writing = os.pipe()
os.register_at_fork(after_in_child=lambda: os.read(written, 1))  # before pipespec's own: the child is late

from pipespec_kernels.state import SharedMemory

memory = SharedMemory.create([64])
memory.array[:] = 1
child = os.fork()
if child == 0:
    os._exit(int(memory.array[0]))
memory.array[:] = 2
os.write(writing, b"x")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=SECONDS)


@pytest.mark.parametrize("schedule", [*IN_THIS_PROCESS, "workers", "spd"])
def test_forks_at_random_moments_while_threads_generate(models, schedule):
    """Two threads take turns with the pipeline while a third one forks. Each child generates with it, too, and the parent's worker drafts on."""
    target, draft, texts = models
    over, errors, numbers = threading.Event(), [], random.Random(5)
    children: list[Child] = []

    def generate() -> None:
        try:
            while not over.is_set():
                generates(pipe, texts, 3)
        except BaseException as error:
            errors.append(error)

    def fork() -> None:
        try:
            for _ in range(trials(ci=3, nightly=60)):
                over.wait(numbers.uniform(0, 0.05))
                children.append(Child(lambda: generates(pipe, texts, 3)))
                if len(children) % 3 == 0:
                    while children:
                        children.pop().check()
        except BaseException as error:
            errors.append(error)

    with opened(target, draft, schedule) as pipe:
        generates(pipe, texts, 1)
        threads = [threading.Thread(target=what) for what in (generate, generate, fork)]
        for thread in threads:
            thread.start()
        threads[-1].join()
        over.set()
        for thread in threads:
            thread.join()
        for child in children:
            child.check()
        assert errors == []
        # The target waits for the worker, which may be slower.
        with drafts_keep_up(pipe, [len(PROMPTS[0]) + NEW]) if schedule == "workers" else nullcontext():
            generates(pipe, texts, 1)
        if schedule == "workers":
            assert pipe.report.stages[0].steps > 0, "the parent's worker is not what it was"
