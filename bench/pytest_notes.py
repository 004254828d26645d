"""A pytest plugin: notes each test when it begins and when it has ended, so that a run that is killed loses nothing.

``pytest -p bench.pytest_notes --notes FILE``; :func:`read` reads such a file. Several processes may append to one file.

With ``--claims FOLDER`` several such processes share the tests: each runs those that no other has claimed (see :mod:`bench.pytest_workers`). Behind
a test that failed it waits for the GPU; where that raises, the context is broken, and the process ends with status :data:`BROKEN`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

BROKEN = 77

_WORST_FIRST = ("failed", "skipped", "passed")  # of a test's setup, call and teardown


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--notes", type=Path, help="one line of JSON per test begun, and per phase that ended")
    parser.addoption(
        "--claims", type=Path, help="a folder that processes share which divide the tests among themselves"
    )


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--notes")
    if file is not None:
        notes = _Notes(file)
        config.pluginmanager.register(notes)
        claims = config.getoption("--claims")
        if claims is not None:
            config.pluginmanager.register(_SharedTests(claims, notes))


class _Notes:
    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8", buffering=1)  # a line is written when it is complete

    def note(self, **what: object) -> None:
        self._file.write(json.dumps(what) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(test=report.nodeid, outcome="failed", seconds=0.0, why=_why(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(test=nodeid, outcome="begun", pid=os.getpid(), at=time.time())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.note(test=nodeid, over=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
                why = [report.longrepr[2].removeprefix("Skipped: ")]
            else:
                why = _why(report)
            self.note(test=report.nodeid, outcome=report.outcome, seconds=report.duration, why=why)


def _why(report: pytest.TestReport | pytest.CollectReport) -> list[str]:
    lines = report.longreprtext.strip().splitlines()
    # pytest marks the lines of the error.
    return ([line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:])[:6]


class _SharedTests:
    """Runs the tests that no other process has claimed. A claim is a file, which only one process can create."""

    def __init__(self, claims: Path, notes: _Notes) -> None:
        self._claims, self._notes = claims, notes
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly:
            return None
        for item in session.items:
            if not self._claim(item.nodeid):
                continue
            self._failed = False
            # The next item is unknown, so all fixtures end with the test.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self._failed and not _gpu_is_well():
                print(
                    f"the GPU's context is broken behind {item.nodeid}: this process ends", file=sys.stderr, flush=True
                )
                self._notes.note(test=item.nodeid, outcome="failed", seconds=0.0, why=["it broke the GPU's context"])
                os._exit(BROKEN)
        return True

    def _claim(self, test: str) -> bool:
        try:
            os.close(os.open(self._claims / hashlib.sha1(test.encode()).hexdigest(), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _gpu_is_well() -> bool:
    """Whether work on the GPU can still end. True where this process has not used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def follow(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The notes in ``file`` from byte ``offset`` on, in order, and the offset of the next call; a line that is not complete yet is left to that one."""
    try:
        with file.open("rb") as notes:
            notes.seek(offset)
            data = notes.read()
    except OSError:
        return [], offset
    data = data[: data.rfind(b"\n") + 1]
    found = []
    for line in data.decode(errors="replace").splitlines():
        with suppress(ValueError):  # half a line, of a process that was killed
            found.append(json.loads(line))
    return found, offset + len(data)


def lines(file: Path) -> list[dict[str, Any]]:
    """All notes in ``file``, in order."""
    return follow(file, 0)[0]


def read(file: Path) -> dict[str, Any]:
    """``passed`` and ``skipped`` (with reasons) as numbers, ``failed`` with reasons, the ``unfinished`` ones, and the ``slowest`` with seconds."""
    outcomes: dict[str, dict[str, Any]] = {}
    for note in lines(file):
        if "outcome" not in note:
            continue
        before = outcomes.get(note["test"])
        worse = before is None or before["outcome"] == "begun"
        if note["outcome"] == "begun" and before is not None:
            continue
        if worse or _WORST_FIRST.index(note["outcome"]) < _WORST_FIRST.index(before["outcome"]):  # type: ignore[index]
            outcomes[note["test"]] = note
    by_outcome = Counter(note["outcome"] for note in outcomes.values())
    slowest = sorted(outcomes.items(), key=lambda item: item[1].get("seconds", 0.0), reverse=True)[:8]
    return {
        "passed": by_outcome["passed"],
        "skipped": by_outcome["skipped"],
        "reasons": dict(Counter(" ".join(n["why"]) for n in outcomes.values() if n["outcome"] == "skipped")),
        "failed": {test: note["why"] for test, note in outcomes.items() if note["outcome"] == "failed"},
        "unfinished": [test for test, note in outcomes.items() if note["outcome"] == "begun"],
        "slowest": {test: round(note["seconds"], 1) for test, note in slowest if "seconds" in note},
    }
