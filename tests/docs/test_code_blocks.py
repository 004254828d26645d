"""The Python blocks of README.md and of every page of docs/ run, page by page, with the bundled models.

A block is left out with ``<!-- not run: reason -->`` on the line above it.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from pipespec.demo import draft_module_path, family_path
from tests.support.forks import ran

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
_PROGRAM = """
import json, os, signal, sys
from tests.support.forks import fork_drafts_here

fork_drafts_here()
signal.alarm(600)  # a page that hangs ends with a status
names = {"__name__": "__main__"}
for file, line, source in json.loads(sys.argv[1]):
    exec(compile("\\n" * (line - 1) + source, file, "exec"), names)
names.clear()
sys.stdout.flush()
os._exit(0)  # torch needs a second to end
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


def run(found: list[Block], folder: Path) -> tuple[int, str]:
    """The exit status of a page's blocks, and what they printed."""
    path = [str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
    program = [[block.file, block.line, block.source] for block in found if block.not_run is None]
    done = ran("-c", _PROGRAM, json.dumps(program), cwd=folder, env=environment, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(path)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    found = blocks(path)
    if all(block.not_run is not None for block in found):
        pytest.skip("; ".join(str(block.not_run) for block in found))
    status, output = run(found, tmp_path)
    assert status == 0, output[-3000:]


def test_most_blocks_are_run() -> None:
    found = [block for path in PAGES for block in blocks(path)]
    left_out = [block for block in found if block.not_run is not None]
    assert len(found) >= 20
    assert len(left_out) <= len(found) // 4, left_out


def test_a_block_that_fails_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    status, output = run(blocks(page), tmp_path)
    assert status == 1
    assert 'File "page.md", line 10' in output
    page.write_text("<!-- not run: needs a reason -->\n```python\n1 / 0\n```\n")
    assert [block.not_run for block in blocks(page)] == ["needs a reason"]
