"""The state of a process that hangs: thread states, stacks and, if the tools exist, the kernels on the GPU.

Every wait has a limit, and nothing raises: the output reports each tool that is missing or fails.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

MOST = 4
"""Processes that a debugger attaches to."""

_DEBUGGER = ("-iex", "set auto-solib-add off", "-iex", "set pagination off", "-iex", "set confirm off")
"""Symbols of torch's libraries would take longer than there is time; those of a few others are loaded behind the attachment."""

_LIBRARIES = ("libc\\.", "libcuda", "_cuda", "_native", "libpython")
_MEMORY_FIELDS = "--query-compute-apps=pid,used_memory"
_GPU_FIELDS = "--query-gpu=utilization.gpu,utilization.memory,memory.used,clocks.sm,pstate"


def _fields(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the name: state, parent, group, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def with_descendants(pid: int) -> list[int]:
    """``pid`` and all of its living descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _fields(int(entry.name))) and fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = [pid], [pid]
    while new:
        new = [child for parent in new for child in parents.get(parent, [])]
        found += new
    return [process for process in found if _fields(process)]


def describe(pids: Sequence[int], output: IO[bytes], limit: float) -> None:
    """Write the state of ``pids`` to ``output``, a file opened for appending, within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    for pid in pids:
        fields = _fields(pid)
        if not fields:
            continue
        command = _read(f"/proc/{pid}/cmdline").replace("\0", " ")[:150]
        threads = sorted(Path(f"/proc/{pid}/task").glob("*"))
        _say(output, f"process {pid}, state {fields[0]}, {int(fields[11]) + int(fields[12])} ticks of CPU: {command}")
        for thread in threads[:40]:
            name, place = _read(f"{thread}/comm").strip(), _read(f"{thread}/wchan").strip()
            _say(output, f"  thread {thread.name} {name}: waits in {place or '?'}")
    commands: list[tuple[str, ...]] = []
    if shutil.which("nvidia-smi"):
        commands += [("nvidia-smi", fields, "--format=csv") for fields in (_GPU_FIELDS, _MEMORY_FIELDS)]
    python = [pid for pid in pids if "python" in _read(f"/proc/{pid}/cmdline")][:MOST]
    debugging = [command for command in map(_debug, python) if command]
    if not debugging and shutil.which("py-spy"):  # two debuggers cannot attach at once
        debugging = [("py-spy", "dump", "--native", "--pid", str(pid)) for pid in python]
    commands += debugging
    running: list[tuple[tuple[str, ...], subprocess.Popen[bytes]]] = []
    for command in commands:
        with suppress(OSError):
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            running.append((command, process))
    for command, process in running:
        try:
            text = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + b"\n(not over in time)"
        _say(output, f"$ {' '.join(command[:3])} ... {command[-1]}")
        output.write(text[-40_000:] + b"\n")
        output.flush()
    if not any("gdb" in Path(command[0]).name for command, _ in running):
        _say(output, "neither cuda-gdb nor gdb is installed: no native stacks, and which kernels run is not known")


def _debug(pid: int) -> tuple[str, ...]:
    """A debugger's command that prints kernels and native stacks, and detaches."""
    for name, extra in (("cuda-gdb", ("-ex", "info cuda kernels")), ("gdb", ())):
        found = shutil.which(name) or shutil.which(name, path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
        if found:
            stacks = ("-ex", "thread apply all backtrace 14")
            symbols = [word for name in _LIBRARIES for word in ("-ex", f"sharedlibrary {name}")]
            return (found, "-batch", "-nx", *_DEBUGGER, "-p", str(pid), *extra, *symbols, *stacks, "-ex", "detach")
    return ()


def end(pids: Sequence[int], wait: float) -> None:
    """Abort processes, so that faulthandler prints their Python stacks, and kill those that live after ``wait`` seconds. Children first.

    It returns as soon as all have ended, so ``wait`` may be generous: a process that is killed too early prints nothing.
    """
    for pid in reversed(pids):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline and any(_fields(pid)[:1] not in ([], ["Z"]) for pid in pids):
        time.sleep(0.05)
    for pid in reversed(pids):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _say(output: IO[bytes], line: str) -> None:
    output.write(f"{line}\n".encode())
    output.flush()
