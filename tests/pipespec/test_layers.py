"""The order of the package: imports point down, no circle of files, at most 13 entries at the top.

The sources are parsed, not imported. Imports inside of functions and under ``TYPE_CHECKING`` count.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = [
    ["cli"],
    ["demo"],
    ["bench"],
    ["spd"],
    ["api"],
    ["schedules"],
    ["checks"],
    ["engine"],
    ["models"],
    ["process"],
    ["config"],
    ["registry", "errors"],
]
"""Highest first. An entry imports from lower layers only."""


def imports(source: str, package: str) -> set[str]:
    """Dotted names below ``package`` that a source imports: modules, and what is imported from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == package}


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Per module of ``pipespec`` the modules it imports."""
    return {
        name: {found if found in sources else found.rpartition(".")[0] for found in imports(source, "pipespec")}
        for name, source in sources.items()
    }


def upward(edges: dict[str, set[str]]) -> list[str]:
    """Imports from the same layer or a higher one, except within one entry. The package's own ``__init__`` only forwards names."""
    level = {entry: i for i, layer in enumerate(LAYERS) for entry in layer}
    arrows = ((a.split("."), b.split(".")) for a, targets in edges.items() if a != "pipespec" for b in targets)
    return [
        f"{'.'.join(a)} -> {'.'.join(b)}"
        for a, b in arrows
        if len(b) < 2 or (a[1] != b[1] and level[a[1]] >= level[b[1]])
    ]


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    found = {}
    for file in (ROOT / "python" / "pipespec").rglob("*.py"):
        parts = file.relative_to(ROOT / "python").with_suffix("").parts
        if parts[-1] == "__main__":
            continue  # it only forwards, as the package's own __init__ does
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text(encoding="utf-8")
    return graph(found)


def test_imports_point_down(edges):
    assert upward(edges) == []


def test_no_circle_of_files(edges):
    TopologicalSorter(edges).prepare()


def test_every_entry_has_a_layer_and_there_are_at_most_13(edges):
    entries = {name.split(".")[1] for name in edges if "." in name}
    assert entries == {entry for layer in LAYERS for entry in layer}
    assert len(entries) <= 13


def test_the_kernels_import_nothing_of_pipespec():
    for file in (ROOT / "pipespec_kernels").rglob("*.py"):
        assert imports(file.read_text(encoding="utf-8"), "pipespec") == set(), file


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"engine.cache": "from pipespec.models import compat", "models.compat": ""}, []),
        ({"engine.cache": "", "models.compat": "def f():\n import pipespec.engine.cache"}, ["models.compat -> engine.cache"]),
        ({"registry": "from pipespec.errors import X", "errors": ""}, ["registry -> errors"]),
        ({"cli.main": "from pipespec import Pipeline"}, ["cli.main -> "]),
    ],
    ids=["down", "up", "level", "front door"],
)  # fmt: skip
def test_an_upward_import_is_found(files, expected):
    found = upward(graph({f"pipespec.{name}": source for name, source in files.items()}))
    assert [arrow.replace("pipespec.", "").replace("pipespec", "") for arrow in found] == expected


def test_a_circle_is_found():
    edges = graph({"pipespec.a": "import pipespec.b", "pipespec.b": "from pipespec.a import x"})
    with pytest.raises(CycleError):
        TopologicalSorter(edges).prepare()
