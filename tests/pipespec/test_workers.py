"""Worker processes that are killed, stopped, slow, interrupted or orphaned, or that fail. The text is the same, and no process is left."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from pipespec import Pipeline
from pipespec.process import threads
from pipespec.process.threads import lowered_threads, target_threads
from pipespec.schedules.base import StageFailure
from pipespec.schedules.workers import driver as workers
from pipespec.schedules.workers import template
from pipespec.schedules.workers.channel import Channel, ChannelError
from pipespec.schedules.workers.process import NICE
from pipespec_kernels.state import SharedMemory
from tests.conftest import VOCABULARY, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.faulty import CALLS, Faulty, Stopping, Telling
from tests.support.processes import kill_worker, pids_of, workers_of
from tests.support.streamers import Recorder
from tests.trials import trials
from tests.waiting import SECONDS, drafts_keep_up, until

ROOT = Path(__file__).resolve().parents[2]


def states(pid: int) -> Iterator[str]:
    """The state of each thread of a process, as one letter. Threads that end meanwhile, and an ended process, have none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    """Whether a thread of the process is alive. The first thread may be a zombie while others still run."""
    return any(state not in "ZX" for state in states(pid))


def await_end_of(pids) -> None:
    until(lambda: not any(map(alive, pids)), f"the processes {pids} have ended")


def sleeps(pid: int) -> bool:
    """Whether none of its threads runs or is ready to run."""
    return all(state == "S" for state in states(pid))


def wake_ups(pid: int) -> int:
    """How often its threads have gone to sleep so far."""
    statuses = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(line.split()[1]) for s in statuses for line in s.splitlines() if line.startswith("voluntary_ctxt"))


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


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
        return [self.pipeline._driver.block.length(stage, 0) for stage in range(3)]

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

    def await_ends_of_call(self) -> None:
        """Wait until all workers are idle. They end a call later than the target does."""
        assert all(worker.await_idle() for worker in workers_of(self.pipeline).values())

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

    def kill(self, stage: int, sig=signal.SIGKILL):
        process = workers_of(self.pipeline)[stage].process
        os.kill(process.pid, sig)
        if sig == signal.SIGKILL:
            process.wait(SECONDS)
        elif sig == signal.SIGSTOP:  # the signal takes effect when the process gets a core
            until(lambda: set(states(process.pid)) == {"T"}, f"process {process.pid} is stopped")

    def check_recovered(self):
        """The next call works with all stages and verifies draft tokens."""
        self.behave()
        assert self.generate(1, new=2) == []
        assert len(self.pids) == 2
        assert all(map(alive, self.pids))
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
    """The rig with all workers running and idle, after any test. A worker that still ended a call would take the switches of a test for its present step."""
    healthy.behave()
    for pid in filter(alive, healthy.pids):
        os.kill(pid, signal.SIGCONT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        healthy.pipeline.generate(healthy.prompts[0][None], max_new_tokens=2)
    healthy.await_ends_of_call()
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


def test_drafts_give_way_to_the_target(rig):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, pid) - own for pid in rig.pids] == [min(NICE, 19 - own)] * 2


def test_no_busy_wait(rig):
    """A worker that is idle, or held back by a slow target, uses no processor time.

    A process that spins is never asleep and uses the time of a core, and one that polls wakes up hundreds of times a second. A worker
    that waits wakes up twice a second, to check that its parent lives. On a busy machine it may then wait for a core for long.
    """

    def observe():
        until(lambda: all(map(sleeps, rig.pids)), "the workers are asleep")
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
    rig.await_ends_of_call()
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


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_worker_is_named_once_and_restarted(rig, stage):
    rig.target.set(delay=-0.005)
    other = rig.pids[1 - stage]
    messages = rig.generate(do=lambda: rig.kill(stage), at=4)
    assert len(messages) == 1
    assert f"draft stage {stage} " in messages[0]
    assert "SIGKILL" in messages[0]
    rig.check_recovered()
    assert rig.pids[1 - stage] == other


def test_killed_during_the_prefill(rig):
    rig.drafts[0].set(delay=-SECONDS)  # its prefill lasts until its process is killed

    def strike():
        until(lambda: rig.drafts[0].switches[CALLS] > 0, "the draft is in its prefill")
        rig.kill(0)

    messages = rig.generate(do=strike, at=1)
    assert len(messages) == 1
    assert "draft stage 0 " in messages[0]
    assert rig.pipeline.report.stages[0].steps == 0
    rig.check_recovered()


def test_killed_while_it_starts(rig, monkeypatch):
    """A call continues without a worker that cannot be started again. A pipeline that cannot start raises the reason."""
    start, born = template.start, []

    def stillborn(*args, **kwargs):
        process = start(*args, **kwargs)
        process.kill()  # before it gets its setup, without which it is never ready
        born.append(process)
        return process

    rig.kill(1)
    with monkeypatch.context() as patch:
        patch.setattr(template, "start", stillborn)
        messages = rig.generate()
        assert len(messages) == 2
        assert "draft stage 1 has ended" in messages[0]
        assert "draft stage 1 is missing" in messages[1]
        assert "SIGKILL" in messages[1]
        with pytest.raises(RuntimeError, match=r"draft stage 0 could not start: killed by SIGKILL"):
            Pipeline(rig.target, noisy(random_llama(3), 0.1), schedule="workers")
        assert len(born) == 2
        assert all(process.returncode is not None for process in born)  # dead and reaped
    rig.check_recovered()


def test_kills_at_random_moments(rig):
    """Every call loses one worker or both, at a random moment."""
    random.seed(2)
    rig.target.set(delay=-0.003)
    began = time.monotonic()
    rig.generate()
    duration = time.monotonic() - began
    kills = told = call = 0
    while kills < trials(ci=6, nightly=30):
        if not all(map(alive, rig.pids)):  # the last kill came after the end of the call
            told += len(rig.generate())
        victims = random.choice([[0, 1], [0, 1], [0], [1]])
        pids = [rig.pids[v] for v in victims]
        call += 1

        def strike(pids=pids):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        rig.target.set(delay=-0.003)
        if call % 2:  # at one of the target's tokens
            told += len(rig.generate(call % 8, do=strike, at=random.randint(0, 59)))
        else:  # at a random time, also at the start or after the end of the call
            timer = threading.Timer(random.uniform(0, 1.1 * duration), strike)
            timer.start()
            told += len(rig.generate(call % 8))
            timer.join()
        await_end_of(pids)
        kills += len(pids)
    told += len(rig.generate())
    assert told == kills
    rig.check_recovered()


# ---- stopped, failing


def test_a_stopped_worker(rig, monkeypatch):
    stopped = rig.pids[1]
    rig.generate(do=lambda: rig.kill(1, signal.SIGSTOP), at=4)
    assert alive(stopped)
    assert workers_of(rig.pipeline)[0].await_idle()  # the other one does not answer
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_FINISH_TIMEOUT_S", 0.1)
        messages = rig.generate(1)
    assert len(messages) == 1
    assert "draft stage 1 does not answer for 0 s" in messages[0]
    assert not alive(stopped)
    rig.check_recovered()


def test_a_worker_stopped_between_calls_does_not_block_the_caller(rig, monkeypatch):
    """The call's message is larger than the socket's buffer."""
    ids = torch.randint(2, VOCABULARY, (200, 256), generator=torch.Generator().manual_seed(0))
    with socket.socket(fileno=os.dup(workers_of(rig.pipeline)[0].conn.fileno())) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        assert sender.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 200 * 256 * 4
    with Pipeline(rig.target, schedule="plain") as plain:
        wanted = plain.generate(ids, max_new_tokens=2)
    rig.kill(0, signal.SIGSTOP)
    assert torch.equal(rig.pipeline.generate(ids, max_new_tokens=2), wanted)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_FINISH_TIMEOUT_S", 0.1)
        assert "draft stage 0 does not answer for 0 s" in rig.generate()[0]
    rig.check_recovered()


def test_a_worker_whose_caller_ends_within_a_call(rig):
    """Also where its template lives on, stopped, and still is its parent."""
    pids = rig.pids

    def leave() -> None:
        for worker in workers_of(rig.pipeline).values():
            worker.conn.close()
        await_end_of(pids)

    assert len(rig.generate(do=leave, at=5)) == 2
    rig.check_recovered()


@pytest.mark.parametrize("when", ["starts", "serves"])
def test_a_dead_worker_whose_connection_another_process_holds(rig, monkeypatch, when):
    """A fork of another thread, between the making of the socket and its close here."""
    start, held = template.start, []

    def hold(fd, **kwargs):
        held.append(os.dup(fd))
        process = start(fd, **kwargs)
        if when == "starts":
            process.kill()
        return process

    rig.kill(0)
    with monkeypatch.context() as patch:
        patch.setattr(template, "start", hold)
        messages = rig.generate()
    try:
        if when == "starts":
            assert "could not start: killed by SIGKILL" in messages[-1]
        else:
            rig.generate(do=lambda: rig.kill(0), at=3)
        rig.generate()
        rig.check_recovered()
    finally:
        for fd in held:
            os.close(fd)


def test_without_free_descriptors_a_lost_draft_stays_lost_and_the_other_lives_on(rig):
    other = rig.pids[1]
    rig.kill(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
    try:
        ended, missing = rig.generate()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "draft stage 0 has ended" in ended
    assert "could not start: [Errno 24] Too many open files (`ulimit -n` allows this process no more)" in missing
    assert alive(other)
    rig.generate()
    rig.check_recovered()
    assert rig.pids[1] == other


def test_processes_of_another_user_do_not_disturb_close(rig, monkeypatch):
    """A program may drop its rights. Then its workers end with their connections."""
    pids, forbidden = rig.pids, []

    def forbids(*args) -> None:
        forbidden.append(args)
        raise PermissionError

    # Stopped, so that they have not ended before they are killed.
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(workers, "_EXIT_TIMEOUT_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", forbids)
        rig.pipeline.close()
    assert len(forbidden) == 2
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    await_end_of(pids)
    before = template._current_template()
    monkeypatch.setattr(os, "getresuid", lambda: (1, 1, 1))
    assert template._origin() != before.origin


def test_a_worker_stopped_for_a_while_goes_on(rig):
    rig.target.set(delay=-0.002)
    pids = rig.pids
    rig.generate(do=lambda: rig.kill(0, signal.SIGSTOP), at=4)
    threading.Timer(0.3, lambda: os.kill(pids[0], signal.SIGCONT)).start()
    assert rig.generate(1) == []
    assert rig.pids == pids
    rig.check_recovered()


def test_a_worker_that_is_never_ready_is_given_up(monkeypatch):
    """A call goes on without it, and the next one starts it again. A pipeline that cannot start raises."""
    target, prompt = random_llama(3), random_prompts(1, seed=4, shortest=3)[0][None]
    draft = Faulty.like(noisy(target, 0.03))
    draft.__class__ = Stopping
    with Pipeline(target, draft, schedule="workers") as pipe:
        wanted = pipe.generate(prompt, max_new_tokens=20)
        with monkeypatch.context() as patch:
            patch.setenv("STOP_WHILE_STARTING", str(os.getpid()))
            patch.setattr(workers, "_READY_TIMEOUT_S", 0.1)
            kill_worker(pipe, 0)
            with (
                pytest.warns(StageFailure, match="has ended since the last call"),
                pytest.warns(StageFailure, match="could not start: its process was not ready within 0 s"),
            ):
                assert torch.equal(pipe.generate(prompt, max_new_tokens=20), wanted)
            assert workers_of(pipe) == {}
            with pytest.raises(
                RuntimeError, match="draft stage 0 could not start: its process was not ready within 0 s"
            ):
                Pipeline(target, draft, schedule="workers")
        assert torch.equal(pipe.generate(prompt, max_new_tokens=20), wanted)
        assert len(workers_of(pipe)) == 1


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("call", [1, 4], ids=["prefill", "step"])
def test_a_worker_whose_model_fails(rig, stage, call):
    for worker in workers_of(rig.pipeline).values():
        assert worker.await_idle()  # otherwise its present step would fail
    rig.drafts[stage].set(fail_at=call)
    with rig.drafts_keep_up():  # it is dead before the text is complete
        (message,) = rig.generate()
    assert re.search(f"draft stage {stage} .*ArithmeticError: made to fail", message, re.DOTALL)
    rig.check_recovered()


def test_a_worker_without_memory(rig):
    """Its cache of long prompts does not fit its limit."""
    ids = torch.randint(2, VOCABULARY, (20, 256), generator=torch.Generator().manual_seed(0))
    with Pipeline(rig.target, schedule="plain") as plain:
        wanted = plain.generate(ids, max_new_tokens=2)
    rig.await_ends_of_call()
    resource.prlimit(rig.pids[0], resource.RLIMIT_AS, (1, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with drafts_keep_up(rig.pipeline, [258] * 20):  # it is dead before the text is complete
            assert torch.equal(rig.pipeline.generate(ids, max_new_tokens=2), wanted)
    (message,) = [str(warning.message) for warning in caught]
    assert "draft stage 0 has ended" in message
    assert "alloc" in message.lower() or "memory" in message.lower() or "killed by" in message
    rig.check_recovered()


def test_a_failure_may_be_made_an_error(rig):
    """With warnings as errors the call raises, and the next one works."""
    rig.target.set(delay=-0.005)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StageFailure, match=r"draft stage 0"):
            rig.pipeline.generate(rig.prompts[0][None], max_new_tokens=60, streamer=Recorder(3, lambda: rig.kill(0)))
    rig.check_recovered()


# ---- the template


def start_telling(deed: str) -> str:
    """The error with which the worker of a :class:`Telling` does not start."""
    target = random_llama(3)
    draft = noisy(target, 0.02)
    draft.__class__ = Telling
    draft.config.deed, draft.config.caller = deed, os.getpid()
    with pytest.raises(RuntimeError, match=r"draft stage 0 could not start: ") as caught:
        Pipeline(target, draft, schedule="workers")
    return str(caught.value).partition("could not start: ")[2].splitlines()[0]


def template_pid() -> int:
    return template._templates[-1].process.pid


def test_a_worker_is_a_fork_of_the_template(rig):
    assert all(psutil.Process(pid).ppid() == template_pid() for pid in rig.pids)
    assert all(os.getpgid(pid) == pid for pid in (template_pid(), *rig.pids))
    assert start_telling("exit") == "its process ended with status 7"
    assert start_telling("end") == "EOFError: of its own"


def test_a_fork_has_what_the_caller_has_at_present(rig, monkeypatch, tmp_path, capfd):
    before, cores = template_pid(), os.sched_getaffinity(0)
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + 3
    monkeypatch.setattr(os, "getpriority", lambda *which: niceness)
    monkeypatch.setenv("DEED", "environment")
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))  # read at each use
    monkeypatch.chdir(tmp_path)
    one = {min(cores)}
    try:
        os.sched_setaffinity(0, one)
        told = start_telling("tell")
    finally:
        os.sched_setaffinity(0, cores)
    assert told == f"RuntimeError: {['environment', str(tmp_path), sorted(one), min(19, niceness + NICE), before]}"
    assert capfd.readouterr() == ("to stdout", "to stderr")
    assert template_pid() == before


@pytest.fixture
def deleted_directory(tmp_path, monkeypatch):
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.fixture
def new_template(monkeypatch):
    monkeypatch.setattr(template, "_templates", [])
    yield
    template._end_templates()


def forked(held: contextlib.ExitStack) -> template.ForkedProcess:
    """A worker that waits for its setup, while ``held`` is open."""
    ours, theirs = Channel.pair()
    held.callback(ours.close)
    with theirs:
        return template._current_template().fork(theirs.fileno())


def test_a_fork_whose_core_was_taken_away_runs_on_another_one(new_template, monkeypatch):
    own = template._current_template()
    assert own.await_ready()
    with contextlib.ExitStack() as held, monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {1000})
        worker = forked(held)
    assert worker.wait(SECONDS) == 0  # it has seen the end of the connection


def test_a_template_reports_its_workers_although_its_caller_ignores_sigchld(new_template):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        own = template._current_template()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert own.await_ready()
    with contextlib.ExitStack() as held:
        first, second = forked(held), forked(held)
        for process, others in ((first, [second]), (second, [])):
            process.kill()
            assert process.wait(SECONDS) == -signal.SIGKILL
            assert all(other.poll() is None for other in others)
    assert template._current_template() is own


@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_a_template_that_does_not_do_its_imports_is_awaited_once(new_template, monkeypatch, how):
    """It ends where imports start a thread. Workers are commands then."""
    monkeypatch.setattr(template, "_IMPORT_TIMEOUT_S", 0.1 if how == "hangs" else SECONDS)
    command, started = template._command, []

    def start(module: str, *args, **kwargs):
        if not module.endswith("template"):
            return command(module, *args, **kwargs)
        if how == "hangs":
            sleeps = [sys.executable, "-c", "import time; time.sleep(1e4)"]
            process = subprocess.Popen(sleeps, pass_fds=[args[0]], process_group=0)
        else:
            process = command("sys", *args, **kwargs)
        started.append(process)
        return process

    monkeypatch.setattr(template, "_command", start)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):
            worker = template.start(theirs.fileno(), fork=True)
            assert isinstance(worker, subprocess.Popen)
            worker.kill()
            worker.wait()
    assert len(started) == 1
    assert started[0].poll() is not None


def test_a_template_that_was_closed_before_it_was_ready_is_replaced(new_template):
    """Its environment was not that of the caller meanwhile. It has ended with status 0, and not for want of its imports."""
    own = template._current_template()
    own.close()
    own.process.wait(SECONDS)
    assert template._current_template() not in (own, None)


def test_an_interrupt_while_a_message_of_a_worker_is_received(rig, monkeypatch):
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
        rig.await_ends_of_call()

    call()
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
    said = rig.generate(1)
    assert len(said) == 1
    assert "a message of it was interrupted); it is started again" in said[0]
    rig.check_recovered()


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


def test_an_interrupt_between_a_request_and_its_answer(new_template, monkeypatch):
    """A later request would get the answer to this one."""
    own = template._current_template()
    assert own.await_ready()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    ours, theirs = socket.socketpair()
    with ours, theirs:
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                own.fork(theirs.fileno())
    assert not own.is_usable()
    own.process.wait(SECONDS)  # so has its last fork, whose connection is closed


@pytest.mark.parametrize("forks", [True, False], ids=["template", "command"])
def test_a_callers_directory_that_was_deleted(rig, deleted_directory, new_template, monkeypatch, forks):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(template, "_has_pidfd", lambda: forks)
    with Pipeline(rig.target, noisy(random_llama(3), 0.1), schedule="workers") as pipe:
        assert isinstance(workers_of(pipe)[0].process, template.ForkedProcess) == forks
        assert torch.equal(pipe.generate(rig.prompts[0][None], max_new_tokens=60)[0], rig.texts[0])


def test_without_free_descriptors_none_leaks(monkeypatch):
    """However far a start comes before the process has as many files open as it may."""

    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def fail(free: int, what) -> None:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
        try:
            with pytest.raises((OSError, ChannelError), match="Too many open files"):
                what()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(template, "_templates", [])
    try:
        own = template._current_template()
        assert own.await_ready()
        before = count()
        free = 0
        while own.is_usable():  # until a request reaches the template, whose answer does not come through
            fail(free, lambda: SharedMemory.create([1 << 12] * 20))
            assert count() == before
            fail(free, lambda: own.fork(0))
            assert count() == before - (not own.is_usable())
            free += 1
    finally:
        template._end_templates()


@pytest.mark.parametrize("what", ["path", "environment"])
def test_a_template_that_imported_under_other_settings_is_not_used(rig, what, monkeypatch, tmp_path):
    before = template_pid()
    if what == "path":
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    told = start_telling("tell")
    assert template_pid() != before
    assert told.endswith(f", {template_pid()}]")
    assert all(map(alive, [before, *rig.pids]))
    assert rig.generate() == []
    rig.pipeline.close()
    await_end_of([before])


def test_a_killed_template_is_started_again(rig):
    before, pids = template_pid(), rig.pids
    os.kill(before, signal.SIGKILL)
    await_end_of([before, *pids])
    messages = rig.generate()
    assert len(messages) == 2
    assert all("its process ended together with the template" in message for message in messages)
    assert template_pid() != before
    rig.check_recovered()


def test_workers_of_a_killed_template_end_although_call_follows_call(rig):
    """Else they would take part in each call, see that they are orphans, and draft nothing."""
    pids, told = rig.pids, []
    os.kill(template_pid(), signal.SIGKILL)
    until(lambda: told.extend(rig.generate(new=10)) or not any(map(alive, pids)), "the orphans have ended")
    told += rig.generate()
    assert any("its process ended together with the template" in message for message in told)
    rig.check_recovered()


@pytest.mark.parametrize("killed", [True, False], ids=["with its workers", "idle"])
def test_a_stopped_template_is_given_up(rig, monkeypatch, killed):
    """It neither reports the end of a worker nor starts one. The call has its workers from elsewhere, and the next one a new template."""
    monkeypatch.setattr(template, "_ANSWER_TIMEOUT_S", 0.5)
    before = template_pid()
    os.kill(before, signal.SIGSTOP)
    try:
        rig.kill(1)
        messages = rig.generate()
        assert len(messages) == 1
        assert "its process ended together with the template" in messages[0]
        rig.check_recovered()
        assert template_pid() != before
    finally:
        os.kill(before, signal.SIGKILL if killed else signal.SIGCONT)
    if killed:
        await_end_of([rig.pids[0]])
    else:
        rig.kill(0)
    rig.generate()
    rig.check_recovered()


def test_a_fork_whose_caller_has_given_up_ends(new_template, monkeypatch):
    """The caller starts a command in its place, on another connection: two processes would write one block."""
    before = template._current_template()
    assert before.await_ready()
    os.kill(before.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(template, "_ANSWER_TIMEOUT_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ChannelError):
        before.fork(theirs.fileno())
    os.kill(before.process.pid, signal.SIGCONT)
    before.process.wait(SECONDS)  # it accepts no further requests, and its last fork has ended


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


def test_a_failure_that_does_not_end_its_process_does_not_hold_up_a_call(rig, monkeypatch):
    monkeypatch.setattr(workers, "_EXIT_TIMEOUT_S", 0.2)
    worker = workers_of(rig.pipeline)[0]
    rig.generate()
    rig.await_ends_of_call()
    worker.cause = "as if it had said so"  # within the call
    messages = rig.generate(1)
    assert len(messages) == 1
    assert "draft stage 0 has ended since the last call (as if it had said so)" in messages[0]
    rig.check_recovered()


@pytest.mark.parametrize("lacking", ["pidfd", "template"])
def test_without_a_template_a_worker_is_a_command(rig, monkeypatch, lacking):
    with monkeypatch.context() as patch:
        if lacking == "pidfd":
            patch.setattr(template, "_has_pidfd", lambda: False)
        else:
            patch.setattr(template._Template, "fork", lambda *args: (_ for _ in ()).throw(ChannelError))
        rig.kill(1)
        assert len(rig.generate()) == 1
        assert isinstance(workers_of(rig.pipeline)[1].process, subprocess.Popen)
        rig.check_recovered()
        if lacking == "pidfd":
            assert start_telling("exit") == "its process ended with status 7"
    rig.kill(1)
    assert len(rig.generate()) == 1
    rig.check_recovered()
    assert psutil.Process(rig.pids[1]).ppid() == template_pid()


def test_an_idle_template_ends(monkeypatch):
    """The loop of a template without workers ends when no request comes."""
    monkeypatch.setattr(template, "_IDLE_S", 0.0)
    monkeypatch.setattr(template, "_CHECK_S", 0.01)
    requests, caller = socket.socketpair()
    with requests, caller:
        template._serve(Channel(requests), os.getppid())


# ---- the end


class Own(threading.Thread):
    """A thread that runs functions one after the other."""

    def __init__(self):
        super().__init__(daemon=True)
        self.todo, self.done = queue.SimpleQueue(), queue.SimpleQueue()
        self.start()

    def run(self):
        while (what := self.todo.get()) is not None:
            self.done.put(what())

    def do(self, what):
        self.todo.put(what)
        return self.done.get(timeout=SECONDS)


def interrupted():
    with lowered_threads(2):
        raise KeyboardInterrupt


@pytest.mark.parametrize("first", [0, 1])
def test_torchs_threads_after_calls_in_two_threads(first):
    """Whichever call ends first, the number is the user's again, here and in new threads."""
    before, own = torch.get_num_threads(), [Own(), Own()]
    try:
        torch.set_num_threads(5)
        calls = [lowered_threads(1), lowered_threads(2)]
        for thread, call, number in zip(own, calls, (1, 2), strict=True):
            thread.do(call.__enter__)
            assert thread.do(torch.get_num_threads) == number
            assert thread.do(lambda: Own().do(lambda: target_threads(0))) == min(5, len(os.sched_getaffinity(0)))
        for i in (first, 1 - first):
            own[i].do(lambda i=i: calls[i].__exit__(None, None, None))
            assert own[i].do(torch.get_num_threads) == 5
        assert torch.get_num_threads() == Own().do(torch.get_num_threads) == 5
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
        for thread in own:
            thread.todo.put(None)


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
from tests.conftest import VOCABULARY, random_llama, noisy
from tests.pipespec.faulty import Faulty
from tests.support.processes import pids_of
from pipespec import Pipeline
from pipespec.schedules.workers import driver as workers, template

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell ignores it
plain = random_llama(3)
target = Faulty.like(plain)
pipeline = Pipeline(target, [noisy(plain, 0.02), noisy(plain, 0.01)], schedule="workers")
prompt = torch.tensor([[5, 6, 7, 8]])
wanted = plain.generate(prompt, max_new_tokens=40, do_sample=False)
pids = pids_of(pipeline)
print("pids", *pids, template._templates[0].process.pid, flush=True)


class Say:
    count = 0
    def put(self, value):
        self.count += 1
        if self.count == 4:
            target.set(delay=-60)  # until the interrupt, however late it comes
            print("generating", flush=True)
    def end(self):
        pass


warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # from Python 3.12 on
workers._FINISH_TIMEOUT_S = 300  # on a busy machine
try:
    pipeline.generate(prompt, max_new_tokens=400, streamer=Say())
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
def user_script(tmp_path):
    """The script above in a session of its own, generating. Yields the process, and its workers with their template."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    lines, pids = [], []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("generating"):
                break
        assert lines, "no output"
        assert lines[-1] == "generating\n", "".join(lines)
        pids = next([int(p) for p in line.split()[1:]] for line in lines if line.startswith("pids"))
        assert len(pids) == 3
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
    with user_script(tmp_path) as (process, pids):
        process.send_signal(sig)
        process.wait()
        await_end_of(pids)
