"""Size of the sources: lines per folder, lengths of files, classes and functions, and what ``from pipespec import Pipeline`` draws in.

The ceilings of folders may only fall. What is above a limit is named with a length, which may only fall, too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import SECONDS

ROOT = Path(__file__).parents[1]
PYTHON = ("python/pipespec", "python/pipespec_spd", "python/pipespec_train", "pipespec_kernels", "bench", "tools")

FOLDERS = {
    "csrc": 15_720,
    "pipespec_kernels": 11_970,
    "python/pipespec": 32_425,
    "python/pipespec_spd": 3_440,
    "python/pipespec_train": 2_350,
    "bench": 10_515,
    "tools": 250,
    "tests": 55_390,
}
"""Maximum lines of C++, CUDA and Python. The design's goals: 12,000, 8,400, 21,500, 3,200, 2,000, 7,500, 600 and 42,000, before the families and file types
beyond LLaMA's (2,000 lines of C++, 700 of ``python/pipespec``), the server (2,500) tiles and experts in blocks on a GPU (1,400 of ``pipespec_kernels``), and
captured n-gram indices (400) came."""

FILE, CLASS, FUNCTION = 600, 300, 80
"""Maximum lines of a file, of a class, and of a function without its docstring. Triton kernels have no limit."""

LONGER = {
    # Static caches, graphs of steps and of prompts, and what takes their place where one of them fails.
    "python/pipespec/schedules/graphs/driver.py:GraphedDriver": 322,
    # Lengths, storage, states and hidden states, and rows that begin with those of other caches.
    "python/pipespec/engine/cache_storage.py:RowStorage": 330,
    # One launch: checks of shapes, then the choice of sizes, then the call.
    "pipespec_kernels/triton/attention.py:verify_attention": 110,
    "pipespec_kernels/triton/rejection_sample.py:rejection_sample": 110,
}
"""What is longer, and how long at most."""

MODULES, LINES = 49, 14_410
"""Maximum number of modules of ``pipespec`` that its ``Pipeline`` imports, and their lines."""


def lines_of(file: Path) -> int:
    return file.read_text(encoding="utf-8").count("\n")


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders(folder: str) -> None:
    files = [f for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".cpp", ".hpp", ".cu", ".cuh")]
    assert files
    assert sum(map(lines_of, files)) <= FOLDERS[folder]


def too_long(file: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of what passes a limit."""
    name = str(file.relative_to(ROOT))
    if (count := lines_of(file)) > FILE:
        yield name, count
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        count, limit = (node.end_lineno or 0) - node.lineno + 1, CLASS
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None:
                count -= (first.end_lineno or 0) - first.lineno + 1
            limit = sys.maxsize if any("triton.jit" in ast.unparse(d) for d in node.decorator_list) else FUNCTION
        if count > limit:
            yield f"{name}:{node.name}", count


def test_files_classes_and_functions() -> None:
    found = dict(pair for folder in PYTHON for file in (ROOT / folder).rglob("*.py") for pair in too_long(file))
    assert found.keys() <= LONGER.keys(), "split these, or make them shorter"
    assert not [name for name in LONGER if LONGER[name] < found.get(name, 0)], "these have grown"
    assert LONGER.keys() <= found.keys(), "these are short enough: take them off the list"


def test_nothing_that_is_installed_imports_the_measurement() -> None:
    """``bench`` and ``tools`` are no part of the wheel."""
    packages = [*(ROOT / "python").iterdir(), ROOT / "pipespec_kernels"]
    for file in (file for package in packages for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {"bench", "tools", "tests"}, file


def test_what_an_import_draws_in() -> None:
    code = (
        "import sys, pipespec; pipespec.Pipeline\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'pipespec'), sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True)
    files = [Path(line) for line in ran.stdout.split("\n") if line]
    assert len(files) <= MODULES
    assert sum(map(lines_of, files)) <= LINES


def test_the_state_of_a_model_is_in_one_weak_dictionary() -> None:
    found = []
    for file in sorted((ROOT / "python").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and "WeakKeyDictionary[" in (kind := ast.unparse(node.annotation)):
                found.append((kind.partition("[")[2].partition(",")[0], file.name))
            assert not isinstance(node, ast.Assign) or "WeakKeyDictionary()" not in ast.unparse(node), "annotate it"
    assert [file for key, file in found if key not in ("Cache", "RowCache")] == ["runtime.py"]
