"""The order of the packages, and of the parts of `pipespec`: imports point down, no circle of files, at most 13 entries at the top.

The sources are parsed, not imported. Imports inside of functions and under ``TYPE_CHECKING`` count.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["pipespec_train", "pipespec_spd", "pipespec", "pipespec_kernels"]
"""Highest first. A package imports from lower ones only; from `bench`, `tools` and `tests` none does."""

LAYERS = [["cli"], ["demo"], ["api"], ["schedules"], ["checks"], ["engine"], ["models"], ["process"], ["config"], ["registry", "errors"]]  # fmt: skip
"""Highest first. An entry imports from lower layers only."""


def imports(source: str, packages: Collection[str]) -> set[str]:
    """Dotted names below ``packages`` that a source imports: modules, and what is imported from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in packages}


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Per module the modules of these packages that it imports."""
    packages = {name.split(".")[0] for name in sources}
    return {
        name: {found if found in sources else found.rpartition(".")[0] for found in imports(source, packages)}
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


def sources(*packages: str) -> dict[str, str]:
    """The modules of packages, by name."""
    found = {}
    for package in packages:
        folder = ROOT if package == "pipespec_kernels" else ROOT / "python"
        for file in (folder / package).rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            if parts[-1] != "__main__":  # it only forwards, as the package's own __init__ does
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text(encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return graph(sources("pipespec"))


def test_imports_point_down(edges):
    assert upward(edges) == []


def test_no_circle_of_files():
    TopologicalSorter(graph(sources("pipespec_train", "pipespec_spd", "pipespec"))).prepare()


def test_every_entry_has_a_layer_and_there_are_at_most_13(edges):
    entries = {name.split(".")[1] for name in edges if "." in name}
    assert entries == {entry for layer in LAYERS for entry in layer}
    assert len(entries) <= 13


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_one_above(package):
    """`pipespec` imports SPD and training by name only, at the first use (`pipespec.spd`, and their commands)."""
    above = {"tools", "tests", *PACKAGES[: PACKAGES.index(package)]}
    assert {name: found for name, source in sources(package).items() if (found := imports(source, above))} == {}


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
