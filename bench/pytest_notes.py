"""A pytest plugin: notes each test when it begins and when it has ended, so that a run that is killed loses nothing.

``pytest -p bench.pytest_notes --notes FILE``; :func:`read` says what there is in such a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_WORST_FIRST = ("failed", "skipped", "passed")  # of a test's setup, call and teardown


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--notes", type=Path, help="one line of JSON per test begun, and per phase that ended")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--notes")
    if file is not None:
        config.pluginmanager.register(_Notes(file))


class _Notes:
    def __init__(self, file: Path) -> None:
        self._file = file.open("w", encoding="utf-8", buffering=1)  # a line is written when it is complete

    def _note(self, **what: object) -> None:
        self._file.write(json.dumps(what) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(test=nodeid, outcome="begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
                why = [report.longrepr[2].removeprefix("Skipped: ")]
            else:
                lines = report.longreprtext.strip().splitlines()
                # pytest marks the lines that say what was wrong.
                why = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:]
            self._note(test=report.nodeid, outcome=report.outcome, seconds=report.duration, why=why[:6])


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the last one, of a process that was killed
            pass


def read(file: Path) -> dict[str, Any]:
    """``passed`` and ``skipped`` (with reasons) as numbers, ``failed`` with reasons, the ``unfinished`` ones, and the ``slowest`` with seconds."""
    outcomes: dict[str, dict[str, Any]] = {}
    for note in _lines(file):
        before = outcomes.get(note["test"])
        worse = before is None or before["outcome"] == "begun"
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
