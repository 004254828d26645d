"""Tests of a GPU in several processes, each test with a time limit: ``python -m bench.pytest_workers --notes FILE [--workers 6] [--limit 60] -- ARGUMENTS``

``ARGUMENTS`` are pytest's. A process that ends during a test (crash, broken context of the GPU), or that is ended because a test takes too long, is
replaced, and the other tests run. The state of a test that takes too long is printed first (:mod:`bench.hang`). Exit status: 0, all tests passed; 1,
some failed or did not run; 5, there were none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import hang, pytest_notes

POLL_S = 0.1
DESCRIBED_S = 8.0
"""Time for the stacks of a test that takes too long."""

ENDED_S, LAST_S, REAPED_S = 10.0, 4.0, 2.0
"""Time limits: for the stacks of one aborted process, for the stacks of all processes at the end, and for killed processes to exit. A wait ends as soon
as the processes have exited."""

NO_TESTS, MOST_REPLACED = 5, 12
"""pytest's exit status where it has collected none; processes that are replaced, at most."""


class Workers:
    """The processes that share the tests.

    Args:
        arguments: For pytest.
        notes: File to which all of them append (:mod:`bench.pytest_notes`).
        count: Processes at once.
        limit: Seconds of one test.
        seconds: After them all processes are ended.
    """

    def __init__(self, arguments: list[str], notes: Path, count: int, limit: float, seconds: float) -> None:
        self.arguments, self.notes, self.count, self.limit = arguments, notes, count, limit
        self.deadline = time.monotonic() + seconds
        self.running: list[subprocess.Popen[bytes]] = []
        self.statuses: list[int] = []
        self.replaced = 0
        self.over_limit: dict[int, str] = {}
        self._offset = 0
        self._begun: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        """Run all tests; returns the exit status."""
        with tempfile.TemporaryDirectory() as claims:
            try:
                for _ in range(self.count):
                    self._start(claims)
                while self.running and time.monotonic() < self.deadline:
                    self._look(claims)
                    time.sleep(POLL_S)
            finally:
                stopped = bool(self.running)
                self._end_all()
        found = pytest_notes.read(self.notes)
        passed, failed, unfinished = found["passed"], found["failed"], found["unfinished"]
        print(f"{passed} passed, {found['skipped']} skipped, {len(failed)} failed, {len(unfinished)} not over")
        if failed or unfinished or stopped:
            return 1
        if passed or found["skipped"]:
            return max((s for s in self.statuses if s not in (0, NO_TESTS)), default=0)
        return NO_TESTS if set(self.statuses) <= {0, NO_TESTS} else 1

    def _start(self, claims: str) -> None:
        plugin = ("-p", "bench.pytest_notes", "--notes", str(self.notes), "--claims", claims)
        # Parameters that come from sets are in the same order in all processes.
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONFAULTHANDLER": "1"}
        command = [sys.executable, "-m", "pytest", *self.arguments, *plugin]
        self.running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment))

    def _look(self, claims: str) -> None:
        # In this order: the notes of a process that has ended are complete.
        statuses = [(process, process.poll()) for process in self.running]
        current = self._current()
        for process, status in statuses:
            test = current.get(process.pid)
            if status is None:
                if test is not None and time.time() - test["at"] > self.limit:
                    self._too_long(process, test["test"], claims)
                continue
            self.running.remove(process)
            was_ended = status < 0 or status == pytest_notes.BROKEN or test is not None
            if not was_ended:
                self.statuses.append(status)
                continue
            if test is not None and process.pid not in self.over_limit:
                self._note(test["test"], f"the process ended with status {status} during this test")
            print(f"process {process.pid} ended with status {status}", flush=True)
            self._replace(claims)

    def _replace(self, claims: str) -> None:
        if self.replaced < MOST_REPLACED:
            self.replaced += 1
            self._start(claims)

    def _current(self) -> dict[int, dict[str, Any]]:
        """The test that each process is in."""
        new, self._offset = pytest_notes.follow(self.notes, self._offset)
        for note in new:
            if note.get("outcome") == "begun":
                self._begun[note["test"]] = note
            elif note.get("over"):
                self._begun.pop(note["test"], None)
        return {note["pid"]: note for note in self._begun.values()}

    def _too_long(self, process: subprocess.Popen[bytes], test: str, claims: str) -> None:
        self.over_limit[process.pid] = test
        self._note(test, f"not over after {self.limit:.0f} s")
        print(f"{test}: not over after {self.limit:.0f} s", flush=True)
        processes = hang.with_descendants(process.pid)
        with os.fdopen(os.dup(1), "wb", buffering=0) as output:
            hang.describe(processes, output, min(DESCRIBED_S, self.deadline - time.monotonic()))
        hang.end(processes, ENDED_S)
        if not _is_gone(process, REAPED_S):
            self.running.remove(process)
            self._replace(claims)

    def _note(self, test: str, why: str) -> None:
        with self.notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": "failed", "seconds": self.limit, "why": [why]}) + "\n")

    def _end_all(self) -> None:
        if not self.running:
            return
        hang.end([pid for process in self.running for pid in hang.with_descendants(process.pid)], LAST_S)
        deadline = time.monotonic() + REAPED_S
        for process in self.running:
            _is_gone(process, max(0.0, deadline - time.monotonic()))


def _is_gone(process: subprocess.Popen[bytes], wait: float) -> bool:
    """Whether a killed process has ended: one that waits in the driver outlives SIGKILL."""
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} cannot be ended", flush=True)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests in several processes, each test with a time limit.")
    parser.add_argument("--notes", type=Path, required=True, help="what bench.pytest_notes reads")
    parser.add_argument("--workers", type=int, default=6, help="processes (%(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one test (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after them all are ended")
    parser.add_argument("arguments", nargs="*", help="of pytest, behind --")
    options = parser.parse_args()
    options.notes.write_text("")
    return Workers(options.arguments, options.notes, options.workers, options.limit, options.seconds).run()


if __name__ == "__main__":
    sys.exit(main())
