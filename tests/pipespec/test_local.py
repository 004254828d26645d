"""Local drafts whose processes are killed, stopped, slow, interrupted or orphaned, or that fail. The text is the same, and no process is left.

What local and remote drafts promise alike is in ``test_asynchronous.py``.
"""

import contextlib
import gc
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipespec import Pipeline
from pipespec.process import threads
from pipespec.process.threads import lowered_threads, target_threads
from pipespec.schedules.asynchronous import local
from pipespec.schedules.asynchronous.messages import Channel
from pipespec.schedules.base import StageFailure
from pipespec_kernels.state import SharedMemory
from tests.conftest import VOCABULARY, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.faulty import CALLS, Faulty, Stopping, Telling
from tests.support.forks import Fork
from tests.support.processes import (
    ENVIRONMENT,
    alive,
    await_drafts,
    await_end_of,
    await_idle,
    cpu_seconds,
    few_descriptors,
    kill_worker,
    peers_of,
    pids_of,
    sleeps,
    strike,
    wake_ups,
)
from tests.support.streamers import Recorder
from tests.support.ways import driver_of
from tests.trials import trials
from tests.waiting import SECONDS, drafts_keep_up, until


class Rig:
    """Two drafts in their own processes and a target, all with switches for failures."""

    def __init__(self):
        plain = random_llama(3)
        self.target = Faulty.like(plain)
        self.drafts = [Faulty.like(noisy(plain, 0.03, seed=i)) for i in range(2)]
        self.pipeline = Pipeline(self.target, self.drafts, schedule="workers", lookahead=[4, 6])
        self.prompts = random_prompts(8, seed=4, shortest=3)
        self.texts = [plain.generate(p[None], max_new_tokens=60, do_sample=False)[0] for p in self.prompts]

    @property
    def pids(self) -> list[int]:
        return pids_of(self.pipeline)

    def lengths(self) -> list[int]:
        return [driver_of(self.pipeline).block.length(stage, 0) for stage in range(3)]

    def await_full_lookahead(self) -> None:
        """Wait until the drafts are as far ahead as their lookahead allows. The target must rest meanwhile."""

        def full() -> bool:
            smallest, middle, target = self.lengths()
            return middle == target + 6 and smallest == middle + 4

        until(full, "both lookahead are full")

    def behave(self):
        for model in (self.target, *self.drafts):
            model.set()

    def drafts_keep_up(self, which: int = 0, new: int = 60):
        """Around ``generate(which, new)``: the target waits for the drafts before each step."""
        return drafts_keep_up(self.pipeline, [len(self.prompts[which]) + new])

    def generate(self, which: int = 0, new: int = 60, do=None, at: int = 0) -> list[str]:
        """Run one call and check its text. Return the messages of its warnings."""
        prompt = self.prompts[which]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = self.pipeline.generate(prompt[None], max_new_tokens=new, streamer=Recorder(at, do) if do else None)
        assert torch.equal(out[0], self.texts[which][: len(prompt) + new])
        for warning in caught:
            assert warning.category is StageFailure
            assert warning.filename == __file__
        return [str(warning.message) for warning in caught]

    def strike(self, stage: int, number=signal.SIGKILL):
        strike(self.pids[stage], number)

    def check_recovered(self):
        """The next call starts lost drafts again, all take part in one after it, and draft tokens are verified."""
        self.behave()
        assert self.generate(1, new=2) == []
        await_drafts(self.pipeline)
        assert len(self.pids) == 2
        with self.drafts_keep_up(1, new=20):
            assert self.generate(1, new=20) == []
        _, middle, target = self.pipeline.report.stages
        assert target.accepted > 0
        assert middle.produced > 0


@pytest.fixture(scope="module")
def healthy():
    rig = Rig()
    yield rig
    rig.pipeline.close()


@pytest.fixture
def rig(healthy):
    """The rig with all drafts ready and idle, after any test. One that still ended a call would take the switches of a test for its present step."""
    healthy.behave()
    for pid in filter(alive, healthy.pids):
        os.kill(pid, signal.SIGCONT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        healthy.pipeline.generate(healthy.prompts[0][None], max_new_tokens=2)
        await_drafts(healthy.pipeline)
    await_idle(healthy.pipeline)
    return healthy


# ---- without failures


def test_workers_are_kept_and_leak_nothing(rig):
    """Two hundred calls of many sizes use the same processes, and as many file descriptors and mappings as the first few calls."""

    def resources():
        gc.collect()
        return {
            pid: (len(os.listdir(f"/proc/{pid}/fd")), sum("memfd" in line for line in open(f"/proc/{pid}/maps")))
            for pid in (os.getpid(), *pids)
        }

    pids = rig.pids
    sizes = [(1, 3, 3), (3, 20, 4), (8, 9, 2), (1, 60, 70)]
    calls = []
    for rows, longest, new in sizes:
        ids, mask = left_pad(random_prompts(rows, seed=rows, longest=longest))
        wanted = rig.target.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        calls.append((ids, mask, new, wanted))
    before = None
    for i in range(trials(ci=48, nightly=208)):
        ids, mask, new, wanted = calls[i % 4 if i < 12 or i % 20 < 4 else i % 3]
        assert torch.equal(rig.pipeline.generate(ids, attention_mask=mask, max_new_tokens=new), wanted)
        if i == 7:
            before = resources()
    assert rig.pids == pids
    after = resources()
    for pid, (files, maps) in after.items():
        assert files <= before[pid][0]
        assert maps <= before[pid][1]


def test_no_busy_wait(rig):
    """A draft that is idle, or held back by a slow target, uses no processor time.

    A process that spins is never asleep and uses the time of a core, and one that polls wakes up hundreds of times a second. A draft
    that waits wakes up twice a second, to check that its parent lives. On a busy machine it may then wait for a core for long.
    """

    def observe():
        until(lambda: all(map(sleeps, rig.pids)), "the drafts are asleep")
        before, began, asleep = {pid: wake_ups(pid) for pid in rig.pids}, time.monotonic(), dict.fromkeys(rig.pids, 0)
        used = {pid: cpu_seconds(pid) for pid in rig.pids}
        for _ in range(40):
            time.sleep(0.01)
            for pid in rig.pids:
                asleep[pid] += sleeps(pid)
        seconds = time.monotonic() - began
        for pid in rig.pids:
            assert asleep[pid] > 0
            assert cpu_seconds(pid) - used[pid] <= 0.1 + 0.1 * seconds
            assert wake_ups(pid) - before[pid] <= 10 + 20 * seconds
        observed.append(seconds)

    def in_a_step():
        rig.await_full_lookahead()
        full = rig.lengths()
        observe()
        assert rig.lengths() == full  # a draft stops at its lookahead

    observed = []
    rig.generate()
    await_idle(rig.pipeline)
    observe()
    rig.generate(do=in_a_step, at=5)
    assert len(observed) == 2


def test_random_delays_do_not_change_the_text(rig):
    random.seed(1)
    ids, mask = left_pad(rig.prompts[:3])
    for call in range(trials(ci=3, nightly=12)):
        for model, longest in zip([rig.target, *rig.drafts], ([0, 0.004, 0.02] * 2)[call % 3 :], strict=False):
            model.set(delay=longest)
        assert rig.generate(call % 8) == []
        out = rig.pipeline.generate(ids, attention_mask=mask, max_new_tokens=20)
        for row in range(3):
            prompt = rig.prompts[row]
            assert torch.equal(out[row, ids.shape[1] :], rig.texts[row][len(prompt) : len(prompt) + 20])


# ---- killed


@pytest.mark.parametrize(("stage", "number"), [(0, signal.SIGKILL), (1, signal.SIGRTMIN + 6)])
def test_a_killed_draft_is_named_once_and_started_again(rig, stage, number):
    rig.target.set(delay=-0.005)
    other, name = rig.pids[1 - stage], "SIGKILL" if number == signal.SIGKILL else f"signal {number:d}"
    (message,) = rig.generate(do=lambda: rig.strike(stage, number), at=4)
    assert f"draft stage {stage} is lost (killed by {name}); calls go on without it until its process" in message
    rig.behave()
    assert rig.generate(1, new=2) == []  # starts it again, and does not wait for it
    await_drafts(rig.pipeline)
    rig.generate(1, new=2)
    assert not any("lost" in decision for decision in rig.pipeline.report.decisions or ())
    rig.check_recovered()
    assert rig.pids[1 - stage] == other


def test_a_draft_that_is_ready_within_a_call_takes_part_in_it(rig):
    rig.strike(0)
    taken = []

    def await_it() -> None:
        await_drafts(rig.pipeline)
        until(lambda: driver_of(rig.pipeline).block.counters(0, 0)["steps"] > 0, "the draft takes steps")
        taken.append(True)

    (message,) = rig.generate(do=await_it, at=5)
    assert "draft stage 0 is lost (killed by SIGKILL)" in message
    assert taken
    assert rig.pipeline.report.stages[0].steps > 0
    lost, back = rig.pipeline.report.decisions
    assert lost == "draft stage 0 was lost: killed by SIGKILL"
    assert back.startswith("draft stage 0 is back after ")
    rig.check_recovered()


def test_killed_during_the_prefill(rig):
    rig.drafts[0].set(delay=-SECONDS)  # its prefill lasts until its process is killed

    def kill():
        until(lambda: rig.drafts[0].switches[CALLS] > 0, "the draft is in its prefill")
        rig.strike(0)

    (message,) = rig.generate(do=kill, at=1)
    assert "draft stage 0 " in message
    assert rig.pipeline.report.stages[0].steps == 0
    rig.check_recovered()


def test_killed_while_it_starts(rig, monkeypatch):
    """A call continues without a draft that cannot be started again. A pipeline that cannot start raises the reason."""
    start, born = local._started, []

    def stillborn(fd):
        process = start(fd)
        process.kill()  # before it gets its setup, without which it is never ready
        process.wait()
        born.append(process)
        return process

    rig.strike(1)
    with monkeypatch.context() as patch:
        patch.setattr(local, "_started", stillborn)
        ended, missing = rig.generate()
        assert "draft stage 1 is lost (killed by SIGKILL)" in ended
        assert "draft stage 1 is lost (could not start: killed by SIGKILL)" in missing
        with pytest.raises(RuntimeError, match=r"draft stage 0 could not start: killed by SIGKILL"):
            Pipeline(rig.target, noisy(random_llama(3), 0.1), schedule="workers")
        assert len(born) == 2
    rig.check_recovered()


def test_kills_at_random_moments(rig):
    """Every call loses one draft or both, at a random moment."""
    random.seed(2)
    rig.target.set(delay=-0.003)
    began = time.monotonic()
    rig.generate()
    duration = time.monotonic() - began
    kills = told = call = 0
    while kills < trials(ci=4, nightly=30):
        pids = [rig.pids[v] for v in random.choice([[0, 1], [0, 1], [0], [1]])]
        call += 1

        def kill(pids=pids):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        rig.target.set(delay=-0.003)
        if call % 2:  # at one of the target's tokens
            told += len(rig.generate(call % 8, do=kill, at=random.randint(0, 59)))
        else:  # at a random time, also at the start or after the end of the call
            timer = threading.Timer(random.uniform(0, 1.1 * duration), kill)
            timer.start()
            told += len(rig.generate(call % 8))
            timer.join()
        await_end_of(pids)
        kills += len(pids)
        told += len(rig.generate())
        await_drafts(rig.pipeline)
    assert told == kills
    rig.check_recovered()


# ---- stopped, failing


@pytest.mark.parametrize("large", [False, True], ids=["", "large message"])
def test_a_stopped_draft_is_given_up_by_the_next_call(rig, monkeypatch, large):
    """Whether it was stopped within a call, or between calls; then it does not read its message, which may be larger than the socket's buffer."""
    stopped = rig.pids[1]
    if large:
        ids = torch.randint(2, VOCABULARY, (200, 256), generator=torch.Generator().manual_seed(0))
        with socket.socket(fileno=os.dup(peers_of(rig.pipeline)[1].channel.fileno())) as sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with Pipeline(rig.target, schedule="plain") as plain:
            wanted = plain.generate(ids, max_new_tokens=2)
        rig.strike(1, signal.SIGSTOP)
        assert torch.equal(rig.pipeline.generate(ids, max_new_tokens=2), wanted)
    else:
        rig.generate(do=lambda: rig.strike(1, signal.SIGSTOP), at=4)
    assert alive(stopped)
    peers_of(rig.pipeline)[0].await_end()  # the other one does not answer
    with monkeypatch.context() as patch:
        patch.setattr(local, "_STOPPED_TIMEOUT_S", 0.1)
        (message,) = rig.generate(1)
    assert "draft stage 1 is lost (a signal has stopped its process)" in message
    assert not alive(stopped)
    rig.check_recovered()


def test_a_draft_stopped_for_a_while_goes_on(rig):
    rig.target.set(delay=-0.002)
    pids = rig.pids
    rig.generate(do=lambda: rig.strike(0, signal.SIGSTOP), at=4)
    threading.Timer(0.3, lambda: os.kill(pids[0], signal.SIGCONT)).start()
    assert rig.generate(1) == []
    assert rig.pids == pids
    rig.check_recovered()


@pytest.mark.parametrize("when", ["starts", "serves"])
def test_a_dead_process_whose_connection_another_one_holds(rig, monkeypatch, when):
    """A fork of another thread, between the making of the socket and its close here."""
    start, held = local._started, []

    def hold(fd):
        held.append(os.dup(fd))
        process = start(fd)
        if when == "starts":
            process.kill()
        return process

    def lost() -> None:
        if when == "serves":
            await_drafts(rig.pipeline)
            rig.strike(0)
        until(lambda: peers_of(rig.pipeline)[0].failure() is not None, "it is lost")

    rig.strike(0)
    with monkeypatch.context() as patch:
        patch.setattr(local, "_started", hold)
        messages = rig.generate(do=lost, at=1)
    try:
        cause = "could not start: killed by SIGKILL" if when == "starts" else "killed by SIGKILL"
        assert [f"lost ({cause})" in message for message in messages] == ([False, True] if when == "starts" else [True])
        rig.generate()
        rig.check_recovered()
    finally:
        for fd in held:
            os.close(fd)


@pytest.mark.fresh_drafts
def test_without_free_descriptors_a_lost_draft_stays_lost_and_the_other_lives_on(rig):
    other = rig.pids[1]
    rig.strike(0)
    with few_descriptors(1):
        ended, missing = rig.generate()
    assert "draft stage 0 is lost (killed by SIGKILL)" in ended
    assert "could not start: [Errno 24] Too many open files" in missing
    assert "(`ulimit -n` allows this process no more)" in missing
    assert alive(other)
    rig.generate()
    rig.check_recovered()
    assert rig.pids[1] == other


@pytest.mark.fresh_drafts
def test_without_free_descriptors_none_leaks():
    """However far a start comes before the process has as many files open as it may."""
    target = random_llama(3)
    draft = noisy(target, 0.1)
    Pipeline(target, draft, schedule="workers").close()  # shares the weights

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for free in (0, 1, 3, 5, 7, 9, 11):
        with few_descriptors(free), pytest.raises((OSError, RuntimeError), match="Too many open files"):
            SharedMemory.create([1 << 12] * 20)
        assert count() == before
        starts = False
        with few_descriptors(free), contextlib.suppress(OSError, RuntimeError):
            Pipeline(target, draft, schedule="workers").close()
            starts = True
        assert count() == before
        if starts:
            return


def test_processes_of_another_user_do_not_disturb_close(rig, monkeypatch):
    """A program may drop its rights. Then the processes of its drafts end with their connections."""
    pids, forbidden = rig.pids, []

    def forbids(*args) -> None:
        forbidden.append(args)
        raise PermissionError

    # Stopped, so that they have not ended before they are killed.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(local, "_EXIT_TIMEOUT_S", 0.1)
        patch.setattr(subprocess.Popen, "kill", forbids)
        rig.pipeline.close()
    assert len(forbidden) == 2
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    await_end_of(pids)


def test_a_process_that_is_never_ready_is_given_up(monkeypatch):
    """A call goes on without it, and the next one starts it again. A pipeline that cannot start raises."""
    target, prompt = random_llama(3), random_prompts(1, seed=4, shortest=3)[0][None]
    draft = Faulty.like(noisy(target, 0.03))
    draft.__class__ = Stopping
    late = r"could not start: its process was not ready within 0 s"
    with Pipeline(target, draft, schedule="workers") as pipe:
        wanted = pipe.generate(prompt, max_new_tokens=20)
        with monkeypatch.context() as patch:
            patch.setenv("STOP_WHILE_STARTING", str(os.getpid()))
            patch.setattr(local, "_READY_TIMEOUT_S", 0.0)
            kill_worker(pipe, 0)
            with pytest.warns(StageFailure, match="killed by SIGKILL"), pytest.warns(StageFailure, match=late):
                assert torch.equal(pipe.generate(prompt, max_new_tokens=20), wanted)
            assert pids_of(pipe) == []
            with pytest.raises(RuntimeError, match=f"draft stage 0 {late}"):
                Pipeline(target, draft, schedule="workers")
        assert torch.equal(pipe.generate(prompt, max_new_tokens=20), wanted)
        await_drafts(pipe)
        assert len(pids_of(pipe)) == 1


def test_a_draft_without_memory(rig):
    """Its cache of many rows does not fit its limit, nor what its process has allocated and freed before."""
    ids = torch.randint(2, VOCABULARY, (320, 256), generator=torch.Generator().manual_seed(0))
    with Pipeline(rig.target, schedule="plain") as plain:
        wanted = plain.generate(ids, max_new_tokens=2)
    resource.prlimit(rig.pids[0], resource.RLIMIT_AS, (1, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with drafts_keep_up(rig.pipeline, [258] * 320):  # it is dead before the text is complete
            assert torch.equal(rig.pipeline.generate(ids, max_new_tokens=2), wanted)
    (message,) = [str(warning.message) for warning in caught]
    assert "draft stage 0 is lost" in message
    assert "alloc" in message.lower() or "memory" in message.lower() or "killed by" in message
    rig.check_recovered()


def test_an_interrupt_while_a_message_is_received(rig, monkeypatch):
    """What it said is lost. The next call does not wait for it."""
    receive, count = Channel.receive, 0

    def interrupted(*args):
        nonlocal count
        found = receive(*args)
        count += 1
        if count == 1:
            raise KeyboardInterrupt
        return found

    def call() -> None:
        rig.generate()
        await_idle(rig.pipeline)

    call()
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
    (message,) = rig.generate(1)
    assert "is lost (a message of it was interrupted)" in message
    rig.check_recovered()


# ---- what a process starts with


def start_telling(deed: str) -> str:
    """The error with which the process of a :class:`Telling` does not start."""
    target = random_llama(3)
    draft = noisy(target, 0.02)
    draft.__class__ = Telling
    draft.config.deed, draft.config.caller = deed, os.getpid()
    with pytest.raises(RuntimeError, match=r"draft stage 0 could not start: ") as caught:
        Pipeline(target, draft, schedule="workers")
    return str(caught.value).partition("could not start: ")[2]


def test_a_process_that_does_not_start_says_why():
    assert start_telling("exit") == "its process ended with status 7"
    error, *details = start_telling("end").splitlines()
    assert error == "EOFError: of its own"
    assert details[0].startswith("Traceback")
    assert "faulty.py" in "".join(details)


@pytest.mark.fresh_drafts
def test_a_process_has_what_the_caller_has_at_present(rig, monkeypatch, tmp_path, capfd):
    cores, own = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setenv("DEED", "environment")
    monkeypatch.chdir(tmp_path)
    one = {min(cores)}
    try:
        os.sched_setaffinity(0, one)
        told = start_telling("tell").splitlines()[0]
    finally:
        os.sched_setaffinity(0, cores)
    wanted = ["environment", str(tmp_path), sorted(one), min(19, own + local.NICE), os.getpid()]
    assert told == f"RuntimeError: {wanted}"
    assert capfd.readouterr() == ("to stdout", "to stderr")
    assert all(os.getpgid(pid) == pid for pid in rig.pids)


@pytest.mark.fresh_drafts
def test_a_callers_directory_that_was_deleted(rig, monkeypatch, tmp_path):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with Pipeline(rig.target, noisy(random_llama(3), 0.1), schedule="workers") as pipe:
        assert torch.equal(pipe.generate(rig.prompts[0][None], max_new_tokens=60)[0], rig.texts[0])


@pytest.mark.fresh_drafts
@pytest.mark.parametrize("value", ["", None])
def test_without_an_interpreter(value, monkeypatch):
    """An embedded Python: ``workers`` says so, and the default schedule runs."""
    target = random_llama(3)
    monkeypatch.setattr(sys, "executable", value)
    with pytest.raises(
        RuntimeError, match=r"draft stage 0 could not start: .*sys\.executable names none .*use schedule='lockstep'"
    ):
        Pipeline(target, noisy(target, 0.02), schedule="workers")
    wanted = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    with Pipeline(target, noisy(target, 0.02)) as pipe:
        assert torch.equal(pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8), wanted)


# ---- the end


def done_by(thread, what):
    return thread.submit(what).result(SECONDS)


def done_by_a_new_thread(what):
    with ThreadPoolExecutor(1) as thread:
        return done_by(thread, what)


@pytest.mark.parametrize("first", [0, 1])
def test_torchs_threads_after_calls_in_two_threads(first):
    """Whichever call ends first, the number is the user's again, here and in new threads."""
    before, own = torch.get_num_threads(), [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
    try:
        torch.set_num_threads(5)
        calls = [lowered_threads(1), lowered_threads(2)]
        for thread, call, number in zip(own, calls, (1, 2), strict=True):
            done_by(thread, call.__enter__)
            assert done_by(thread, torch.get_num_threads) == number
            seen = done_by(thread, lambda: done_by_a_new_thread(lambda: target_threads(0)))
            assert seen == min(5, len(os.sched_getaffinity(0)))
        for i in (first, 1 - first):
            done_by(own[i], lambda i=i: calls[i].__exit__(None, None, None))
            assert done_by(own[i], torch.get_num_threads) == 5
        assert torch.get_num_threads() == done_by_a_new_thread(torch.get_num_threads) == 5
    finally:
        torch.set_num_threads(before)
        for thread in own:
            thread.shutdown()


def test_an_interrupt_while_the_number_of_threads_is_restored(monkeypatch):
    set_once = threads._set_threads
    before = torch.get_num_threads()

    def interrupted(count: int) -> None:
        monkeypatch.setattr(threads, "_set_threads", set_once)
        raise KeyboardInterrupt

    def call() -> None:
        with lowered_threads(1):
            torch.set_num_threads(before + 1)
            monkeypatch.setattr(threads, "_set_threads", interrupted)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert torch.get_num_threads() == before
    assert not threads._lowered


def test_close_and_collection():
    """close() ends the processes and may be called twice. A later call starts them again, and garbage collection ends those."""
    target = random_llama(3)
    pipeline = Pipeline(target, noisy(target, 0.02), schedule="workers")
    prompt = random_prompts(1, seed=2)[0][None]
    wanted = target.generate(prompt, max_new_tokens=9, do_sample=False)
    pids = pids_of(pipeline)
    assert all(map(alive, pids))
    with pipeline:
        assert torch.equal(pipeline.generate(prompt, max_new_tokens=9), wanted)
    await_end_of(pids)
    pipeline.close()
    pipeline.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(pipeline.generate(prompt, max_new_tokens=9), wanted)
    pids = pids_of(pipeline)
    assert len(pids) == 1
    # The models keep working after the pipeline, in the shared memory.
    del pipeline
    gc.collect()
    await_end_of(pids)
    assert torch.equal(target.generate(prompt, max_new_tokens=9, do_sample=False), wanted)


_SCRIPT = """
import os, signal, sys, warnings
import torch
from tests.conftest import random_llama, noisy
from tests.pipespec.faulty import Faulty
from tests.support.forks import fork_drafts_here
from tests.support.processes import pids_of
from tests.support.streamers import Recorder
from pipespec import Pipeline
from pipespec.schedules.asynchronous import local

if "forks" in sys.argv:
    fork_drafts_here()
plain = random_llama(3)
target = Faulty.like(plain)
pipeline = Pipeline(target, [noisy(plain, 0.02), noisy(plain, 0.01)], schedule="workers")
prompt = torch.tensor([[5, 6, 7, 8]])
wanted = plain.generate(prompt, max_new_tokens=40, do_sample=False)
pids = pids_of(pipeline)
print("pids", *pids, flush=True)


def say():
    target.set(delay=-60)  # until the interrupt, however late it comes
    print("generating", flush=True)


warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on
local._FINISH_TIMEOUT_S = 300  # on a busy machine
try:
    pipeline.generate(prompt, max_new_tokens=400, streamer=Recorder(3, say))
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
target.set()
assert torch.equal(pipeline.generate(prompt, max_new_tokens=40), wanted)
assert pids_of(pipeline) == pids
child = os.fork()
if child == 0:
    sys.exit(0)  # runs the exit handlers of a process that did not start the workers
os.waitpid(child, 0)
assert torch.equal(pipeline.generate(prompt, max_new_tokens=40), wanted)
assert pids_of(pipeline) == pids
print("done", flush=True)
"""


@contextlib.contextmanager
def user_script(tmp_path, *arguments):
    """The script above in a session of its own, generating. Yields the process, and those of its drafts."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = Fork([script, *arguments], cwd=tmp_path, env=ENVIRONMENT, start_new_session=True, **out)
    lines, pids = [], []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("generating"):
                break
        assert lines, "no output"
        assert lines[-1] == "generating\n", "".join(lines)
        pids = next([int(p) for p in line.split()[1:]] for line in lines if line.startswith("pids"))
        assert len(pids) == 2
        assert all(map(alive, pids))
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for pid in filter(alive, pids):  # where the test fails
            os.kill(pid, signal.SIGKILL)


def test_an_interrupted_script_goes_on_and_leaves_nothing(tmp_path):
    """Ctrl-C raises KeyboardInterrupt in the caller, the same workers serve the next call, and none is left at exit without close().

    The script has no ``__main__`` guard. It also forks, and the end of the fork does not end the workers.
    """
    with user_script(tmp_path) as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        output = process.stdout.read()
        assert process.wait(SECONDS) == 0, output
        assert output.splitlines() == ["interrupted", "done"]
        await_end_of(pids)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM][: trials(ci=1, nightly=2)])
def test_workers_do_not_outlive_their_parent(tmp_path, sig):
    with user_script(tmp_path, "forks") as (process, pids):
        process.send_signal(sig)
        process.wait()
        await_end_of(pids)
