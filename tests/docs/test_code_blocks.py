"""The Python blocks of README.md and of every page of docs/ run, page by page, with the bundled models.

A block is left out with ``<!-- not run: reason -->`` on the line above it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipespec.demo import draft_module_path, family_path
from tests.waiting import SECONDS

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "path/to/target": family_path("target"),
    "path/to/medium": family_path("medium"),
    "path/to/small": family_path("small"),
    "path/to/draft": family_path("small"),
    "path/to/module": draft_module_path(),
}
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n$")
_SERVER = """
# Imports once, then runs the blocks of each page in a process of its own.
import json, os, signal, sys, traceback
import torch, transformers, pipespec.api.pipeline, pipespec_spd.pipeline

def run(blocks, folder):
    signal.alarm(600)  # a page that hangs ends with a status
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    names = {"__name__": "__main__"}
    try:
        for file, line, source in blocks:
            exec(compile("\\n" * (line - 1) + source, file, "exec"), names)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        names.clear()
        sys.stdout.flush()
        sys.stderr.flush()

print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(run(*json.loads(line)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Block(NamedTuple):
    file: str
    line: int
    source: str
    not_run: str | None


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        source = match[1]
        for name, place in PLACES.items():
            source = source.replace(f'"{name}"', repr(str(place)))
        mark = _NOT_RUN.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(str(path.name), line, source, mark[1] if mark else None))
    return found


class Server:
    """Runs pages; see ``_SERVER``."""

    def __init__(self) -> None:
        path = [str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env=os.environ | own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, found: list[Block], folder: Path) -> tuple[int, str]:
        """The exit status of the page's blocks, and what they printed."""
        assert self.process.stdin is not None
        program = [[block.file, block.line, block.source] for block in found if block.not_run is None]
        print(json.dumps([program, str(folder)]), file=self.process.stdin, flush=True)
        return int(self._answer()), (folder / "output.txt").read_text()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(SECONDS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(path)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_run(path: Path, server: Server, tmp_path: Path) -> None:
    found = blocks(path)
    if all(block.not_run is not None for block in found):
        pytest.skip("; ".join(str(block.not_run) for block in found))
    status, output = server.run(found, tmp_path)
    assert status == 0, output[-3000:]


def test_most_blocks_are_run() -> None:
    found = [block for path in PAGES for block in blocks(path)]
    left_out = [block for block in found if block.not_run is not None]
    assert len(found) >= 20
    assert len(left_out) <= len(found) // 4, left_out


def test_a_block_that_fails_is_found(server: Server, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    status, output = server.run(blocks(page), tmp_path)
    assert status == 1
    assert 'File "page.md", line 10' in output
    page.write_text("<!-- not run: needs a reason -->\n```python\n1 / 0\n```\n")
    assert [block.not_run for block in blocks(page)] == ["needs a reason"]
