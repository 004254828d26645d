"""The demo's prompts: function heads from held-out modules of the interpreter's own standard library.

Nothing is downloaded. The bundled models are trained on the other modules (the cards of the family say how). Every
result depends only on the interpreter: its version and its files.

This module imports the standard library alone, so that it works without PyTorch.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

#: Top-level modules (a file ``x.py`` or a package ``x/``) that no model of the family is trained on.
#: All of them exist in CPython 3.11 to 3.14.
HELD_OUT = (
    "bisect",
    "calendar",
    "configparser",
    "difflib",
    "fractions",
    "graphlib",
    "heapq",
    "pprint",
    "shlex",
    "statistics",
    "textwrap",
    "zipfile",
)

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"},
)


@dataclass(frozen=True)
class SourceFile:
    """One module of the standard library: its path below the library folder, with ``/``, and its text."""

    name: str
    text: str

    @property
    def module(self) -> str:
        """The top-level module that the file belongs to (``zipfile/_path.py`` -> ``zipfile``)."""
        return self.name.split("/")[0].removesuffix(".py")


@dataclass(frozen=True)
class Head:
    """A prompt: a function's head and some lines that precede it in its file."""

    name: str
    text: str


def stdlib() -> Path:
    """The running interpreter's standard library folder."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> Iterator[SourceFile]:
    """The non-empty UTF-8 Python files below ``root``, without tests and installed packages, sorted by name."""
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield SourceFile(relative.as_posix(), text)


def held_out_files(root: Path | None = None) -> list[SourceFile]:
    """The held-out modules' files in ``root`` (default: the standard library), sorted by name."""
    return [s for s in source_files(root or stdlib()) if s.module in HELD_OUT]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their qualified names; not the functions inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node, prefix)


def heads_of(files: Iterable[SourceFile], *, max_chars: int = 480, context_lines: int = 8) -> list[Head]:
    """Collect the function heads of ``files``, in file order, without duplicates.

    A head is the signature, the docstring where there is one, and preceding lines of the file. It ends
    with a visible character: the tokenizer joins a line's end to the next line's indent, so a final
    newline would be a token that the models never saw there.

    Args:
        files: The sources.
        max_chars: Longest head, in characters. Preceding lines are dropped first, the oldest ones before others.
        context_lines: Most lines before the function.
    """
    heads: list[Head] = []
    seen: set[str] = set()
    for source in files:
        try:
            tree = ast.parse(source.text)
        except SyntaxError:
            continue
        lines = source.text.splitlines()
        for qualified, node in _functions(tree):
            body = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            if len(node.body) < 2 and documented:
                continue  # no body to generate
            if body.lineno == node.lineno:
                continue  # a one-line function has head and body on one line
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            end = body.end_lineno if documented else body.lineno - 1
            head = lines[start:end]
            while head and (not head[-1].strip() or head[-1].lstrip().startswith("#")):
                head.pop()  # comments before the first statement belong to the body
            if not head or len("\n".join(head)) > max_chars:
                continue
            before = lines[max(0, start - context_lines) : start]
            while before and len("\n".join(before + head)) > max_chars:
                before.pop(0)
            text = "\n".join(before + head).strip("\n").rstrip()
            if len(text) < 100 or text in seen:
                continue
            seen.add(text)
            heads.append(Head(f"{source.name}:{qualified}", text))
    return heads


def function_heads(n: int | None = None, seed: int = 0) -> list[Head]:
    """Return ``n`` prompts (all of them with ``None``) from the held-out modules, in an order drawn with ``seed``.

    The result is deterministic for an interpreter, and the first ``k`` of ``n`` are those of ``function_heads(k)``.

    Raises:
        ValueError: The held-out modules of this interpreter have fewer than ``n`` functions.
    """
    heads = heads_of(held_out_files())
    random.Random(seed).shuffle(heads)
    if n is None:
        return heads
    if n > len(heads):
        raise ValueError(f"{n} prompts requested, but the held-out modules have only {len(heads)}")
    return heads[:n]
