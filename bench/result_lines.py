"""A pytest plugin that writes the result of each test as it ends: ``-p bench.result_lines --results FILE``, one JSON object per line."""

import json
from pathlib import Path

import pytest


class Results:
    """Writes the reports of the process that collects them.

    Args:
        file: Where.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(b"")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        message = report.longreprtext.splitlines()[-4:] if report.failed else []
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "message": message}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FILE", help="write the result of each test here as it ends")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--results")
    # The processes of pytest-xdist report to the one that started them.
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(file))
