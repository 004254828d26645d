"""The harness of processes: those of local drafts, ranks as forks of one process that has imported everything, and the states of any process."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.forks import ran
from tests.support.ways import driver_of
from tests.waiting import SECONDS, own_lines, until

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # gloo must not look up the machine's name
}
"""Of programs that tests start."""

# ---- any process


def states(pid: int) -> Iterator[str]:
    """The state of each thread of a process, as one letter. Threads that end meanwhile, and an ended process, have none."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    """Whether a thread of the process is alive. The first thread may be a zombie while others still run."""
    return any(state not in "ZX" for state in states(pid))


def await_end_of(pids: list[int]) -> None:
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
    return float(times.user + times.system)


def strike(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a child, and wait until it has taken effect."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:  # the signal takes effect when the process gets a core
        until(lambda: set(states(pid)) == {"T"}, f"process {pid} is stopped")
    else:
        await_end_of([pid])


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """This process can open so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- the drafts of a pipeline with schedule ``workers``. Tests reach them here only


def peers_of(pipe: Any) -> Mapping[int, Any]:
    """By stage."""
    peers: Mapping[int, Any] = driver_of(pipe).peers
    return peers


def pids_of(pipe: Any) -> list[int]:
    """Ids of the present processes, by stage."""
    return [peer.process.pid for _, peer in sorted(peers_of(pipe).items()) if peer.process is not None]


def kill_worker(pipe: Any, stage: int) -> None:
    """Kill the process of a draft, and wait for its end."""
    strike(peers_of(pipe)[stage].process.pid)


def await_idle(pipe: Any) -> None:
    """Wait until all drafts have ended the last call. They end it later than the target does."""
    for peer in peers_of(pipe).values():
        peer.await_end()


def await_drafts(pipe: Any) -> None:
    """Wait until every draft takes part again. Those that are lost have been started again by a call."""

    def all_take_part() -> bool:
        driver_of(pipe).tend()
        return all(driver_of(pipe).block.is_alive(i) and peer.failure() is None for i, peer in peers_of(pipe).items())

    until(all_take_part, "all drafts take part")


# ---- ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork_ranks(world: int, work: Callable[[int], None], logs: str) -> list[int]:
    """Processes, by rank. Each runs ``work(rank)`` with torchrun's environment and its stderr in a file."""
    port, pids = free_port(), []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        status = 1
        try:
            # Only standard error, to which a rank reports its end.
            os.dup2(os.open(f"{logs}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            work(rank)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pids


def wait_all(pids: list[int]) -> dict[int, int]:
    """Per rank its exit status (negative: the signal, also of one that is stopped). Ranks that do not end are killed and left out."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + SECONDS
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if rank not in ended:
                done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                if done:
                    ended[rank] = -signal.SIGSTOP if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for rank, pid in enumerate(pids):
        if ended.get(rank, -signal.SIGSTOP) == -signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return ended


def last_error(logs: str, rank: int) -> str:
    """The last error of a rank."""
    lines = Path(logs, str(rank)).read_text().splitlines()
    return next((line for line in reversed(lines) if "RankError: " in line or line.startswith("pipespec: ")), "")


def everywhere(work: Callable[[int], object], world: int = 3) -> None:
    """One line of JSON: per rank its exit status, and the result of ``work`` or the last error. The output of ranks that fail goes to stderr."""
    with tempfile.TemporaryDirectory() as logs:

        def run(rank: int) -> None:
            Path(logs, f"{rank}.json").write_text(json.dumps(work(rank)))

        ended = wait_all(fork_ranks(world, run, logs))
        out = []
        for rank in range(world):
            said = Path(logs, f"{rank}.json")
            words = json.loads(said.read_text()) if said.is_file() else last_error(logs, rank)
            out.append([ended.get(rank), words])
            if ended.get(rank) != 0:
                print(f"rank {rank}: {ended.get(rank)}\n{Path(logs, str(rank)).read_text()}", file=sys.stderr)
        print(json.dumps(out), flush=True)


def program(module: str, *arguments: object, timeout: float = 3 * SECONDS, **environment: str) -> list[Any]:
    """Run a module of the tests as a program. Return what it printed: lines of JSON. With an ``environment`` it is a fresh process."""
    command: list[object] = ["-m", module, *arguments]
    options: dict[str, Any] = {"timeout": timeout, "cwd": ROOT, "env": ENVIRONMENT | environment}
    if environment:
        fresh = [sys.executable, *map(str, command)]
        done = subprocess.run(fresh, capture_output=True, text=True, check=False, **options)
    else:
        done = ran(*command, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in own_lines(done.stdout)]
