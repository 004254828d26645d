"""Files, modules and names that the documents mention exist."""

import importlib
import re
from pathlib import Path

import pytest

from pipespec_kernels import ops

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "python", ROOT / "pipespec_kernels", ROOT / "csrc")
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_SPAN = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"^[\w.-]+\.(py|hpp|cpp|cu|cuh)$")
_PATH = re.compile(r"^(csrc|bench|tests|docs|examples|python|pipespec_kernels|tools|\.ci|\.github)/[\w./*<>-]*$")
_DOTTED = re.compile(r"^(?:pipespec|pipespec_kernels|pipespec_spd|pipespec_train|bench|tools)(?:\.\w+)+$")
_OPERATION = re.compile(r"^ops\.(?!py\b)\w+")
_PART = re.compile(r"`([\w/]+?)(?:/|\.py)?`")
_MODULE = re.compile(r"-m ((?:pipespec|pipespec_kernels|pipespec_spd|pipespec_train|bench|tools)(?:\.\w+)*)")


def _exists(path: str) -> bool:
    return any(True for _ in ROOT.glob(path.rstrip("/")))


def _resolves(name: str) -> bool:
    """Whether ``name`` is a module, or an attribute of one (of an attribute of one)."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name):
                continue
            raise
        for part in parts[length:]:
            fields = getattr(thing, "__dataclass_fields__", {})
            if part in fields:
                return True
            if not hasattr(thing, part):
                return False
            thing = getattr(thing, part)
        return True
    return False


def _missing(text: str) -> list[str]:
    spans = _SPAN.findall(text)
    missing = [f"file {s}" for s in spans if _PATH.match(s) and not _exists(s)]
    # A file without a folder, or with a folder of its package: `pipeline.py`, `engine/stage.py`, `protocol/plan.hpp`.
    files = [s for s in spans if " " not in s and _FILE.match(s.rpartition("/")[2]) and not _PATH.match(s)]
    missing += [f"file {s}" for s in files if not any(any(folder.rglob(s)) for folder in PACKAGES)]
    missing += [f"name {s}" for s in spans if _DOTTED.match(s) and not _resolves(s)]
    operations = [m[0] for m in map(_OPERATION.match, spans) if m is not None]
    missing += [f"name {name}" for name in operations if not _resolves(f"pipespec_kernels.{name}")]
    missing += [f"module {m}" for m in _MODULE.findall(text) if not _resolves(m)]
    return missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_names_exists(path: Path) -> None:
    assert _missing(path.read_text()) == []


_OLD_WORDS = re.compile(
    r"\b(n_fed|n_hint|hints?|verify_ratio|Selector|obituary|judges?|anew|mended|nobody|whoever|everybody|somebody|hand-shakes?)\b"
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_use_the_words_of_the_glossary(path: Path) -> None:
    assert _OLD_WORDS.findall(path.read_text()) == []


def test_the_architecture_lists_every_part_of_the_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("Imports point down this table")[2]
    listed = [
        name for line in page.splitlines() if line.startswith("| `") for name in _PART.findall(line.split("|")[1])
    ]
    package = ROOT / "python" / "pipespec"
    parts = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {name for name in listed if name in parts} == parts - {"__init__", "__main__"}
    assert len(listed) == len(set(listed))


def test_the_page_of_kernels_lists_every_operation() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert [name for name in ops.__all__ if not re.search(rf"`{name}[`(]|ops\.{name}\(", page)] == []
