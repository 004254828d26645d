"""Tests in several processes: each runs once, and a crash, a broken context or a hang affects only its own test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import hang, pytest_notes, pytest_workers
from bench.pytest_workers import Workers
from tests.waiting import SECONDS

TESTS = """
import json, os, sys, time, types, pytest

@pytest.fixture(scope="session")
def shared():
    yield 7

@pytest.mark.parametrize("i", range(6))
def test_good(i, shared): assert shared == 7

def test_bad(): assert 1 + 1 == 3

def test_dies(): os.abort()

def test_hangs():
    time.sleep(3600)

def test_takes_hours():
    # The note says that the test began at the epoch, so its limit is over at once.
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(json.dumps({"test": test, "outcome": "begun", "pid": os.getpid(), "at": 0}) + "\\n")
    time.sleep(3600)

class LostGPU:
    @staticmethod
    def is_initialized(): return True
    @staticmethod
    def synchronize(): raise RuntimeError("CUDA error: an illegal memory access")

def test_breaks():
    sys.modules["torch"] = types.SimpleNamespace(cuda=LostGPU)
    assert not "an illegal memory access"

@pytest.mark.parametrize("i", range(6))
def test_behind(i): assert "torch" not in sys.modules
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "test_some.py").write_text(TESTS)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "python")]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins that take seconds to load in each process
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    shared = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", str(tmp_path)]
    return [str(tmp_path / "test_some.py"), *shared]


def outcome(notes: Path) -> dict[str, Any]:
    found = pytest_notes.read(notes)
    return found | {"failed": {test.split("::")[1]: why for test, why in found["failed"].items()}}


def test_every_test_has_an_outcome(arguments: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Even with a single process, a lost process is replaced, and the remaining tests run."""
    chosen = [*arguments, "-k", "not hangs"]
    workers = Workers(chosen, tmp_path / "notes", 1, limit=3600, seconds=500)
    (tmp_path / "notes").write_text("")
    assert workers.run() == 1
    found = outcome(tmp_path / "notes")
    assert found["passed"] == 12
    assert found["unfinished"] == []
    assert set(found["failed"]) == {"test_bad", "test_dies", "test_takes_hours", "test_breaks"}
    assert found["failed"]["test_takes_hours"] == ["not over after 3600 s"]
    assert "status -6" in found["failed"]["test_dies"][0]
    assert workers.replaced == 3  # died, hung, broken
    printed = "".join(capfd.readouterr())
    assert "the GPU's context is broken behind" in printed
    assert 'test_some.py", line' in printed  # the stack of the test that hung, by faulthandler
    assert "thread" in printed


def test_several_processes_divide_the_tests(arguments: list[str], tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("")
    assert Workers([*arguments, "-k", "good or behind"], notes, 3, limit=60, seconds=500).run() == 0
    begun = [note for note in pytest_notes.lines(notes) if note.get("outcome") == "begun"]
    assert len(begun) == len({note["test"] for note in begun}) == 12
    assert Workers([*arguments, "-k", "nothing"], tmp_path / "none", 2, limit=60, seconds=500).run() == 5


def test_the_time_limit(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.write_text("")
    workers = Workers([*arguments, "-k", "hangs"], notes, 1, limit=3600, seconds=500)
    look = workers._look

    def end_within_the_test(claims: str) -> None:
        look(claims)
        if workers._current():
            workers.deadline = time.monotonic()

    monkeypatch.setattr(workers, "_look", end_within_the_test)
    assert workers.run() == 1
    assert pytest_notes.read(notes)["unfinished"] == ["test_some.py::test_hangs"]
    (process,) = workers.running
    assert process.poll() is not None


def test_a_process_that_cannot_be_ended(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run leaves it behind, and another process runs the other tests."""
    notes = tmp_path / "notes"
    notes.write_text("")
    monkeypatch.setattr(pytest_workers, "REAPED_S", 0.2)
    monkeypatch.setattr(hang, "end", lambda pids, wait: None)
    workers = Workers([*arguments, "-k", "hours or behind"], notes, 1, limit=3600, seconds=500)
    try:
        assert workers.run() == 1
        found = outcome(notes)
        assert found["passed"] == 6
        assert set(found["failed"]) == {"test_takes_hours"}
        assert workers.replaced == 1
        assert "cannot be ended" in capfd.readouterr().out
    finally:
        for pid in workers.over_limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_notes_are_read_once(tmp_path: Path) -> None:
    """Each line is read once, and a half-written line when it is complete."""
    notes = tmp_path / "notes"
    workers = Workers([], notes, 1, limit=60, seconds=500)
    assert workers._current() == {}
    notes.write_text('{"test": "a", "outcome": "begun", "pid": 1, "at": 5.0}\n{"test": "b", "outcome": "be')
    assert list(workers._current()) == [1]
    with notes.open("a") as file:
        file.write('gun", "pid": 2, "at": 6.0}\n')
    assert list(workers._current()) == [1, 2]
    size = notes.stat().st_size
    other = '{"test": "c", "outcome": "begun", "pid": 3, "at": 7.0}'.ljust(size - 1)  # where the first two were
    notes.write_text(other + '\n{"test": "a", "over": true}\n')
    assert list(workers._current()) == [2]


def test_a_test_file_that_cannot_be_imported(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import a_package_that_is_not_there\n")
    notes = tmp_path / "notes"
    notes.write_text("")
    assert Workers([*arguments, "--continue-on-collection-errors"], notes, 1, limit=60, seconds=500).run() == 1
    (why,) = pytest_notes.read(notes)["failed"].values()
    assert any("a_package_that_is_not_there" in line for line in why)


def test_processes_are_described_and_ended(tmp_path: Path) -> None:
    program = (
        "import faulthandler, subprocess, sys, time; faulthandler.enable()\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        "print('started', flush=True); time.sleep(3600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    found = hang.with_descendants(process.pid)
    assert found[0] == process.pid
    assert len(found) == 2
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as output:
        hang.describe(found, output, 20.0)
    hang.end(found, 60.0)
    errors = process.communicate(timeout=SECONDS)[1].decode()
    assert process.returncode < 0
    assert "Fatal Python error: Aborted" in errors
    text = log.read_text()
    for pid in found:
        assert f"process {pid}, state" in text
    assert "thread" in text
    assert hang.with_descendants(process.pid) == []


def test_a_process_gets_time_to_print() -> None:
    program = (
        "import os, signal, time\n"
        "def stacks(*_): time.sleep(1.5); print('where it hung', flush=True); os._exit(1)\n"
        "signal.signal(signal.SIGABRT, stacks); print('started', flush=True); time.sleep(3600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    hang.end([process.pid], 60.0)
    assert process.communicate(timeout=SECONDS)[0] == "where it hung\n"
    assert process.returncode == 1
