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
from pathlib import Path
from typing import NamedTuple

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

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled"}

_MAX_CHARS = 480
"""Of a head. Preceding lines are dropped first, the oldest ones before others."""

_CONTEXT_LINES = 8
"""Maximum number of lines before the function."""


class Source(NamedTuple):
    """A held-out module, or a function's head in one: the module's path below the library folder, with ``/``, for a head ``:`` and the function; and the text."""

    name: str
    text: str


def held_out_files(root: Path) -> Iterator[Source]:
    """The held-out modules' non-empty UTF-8 files below ``root``, without tests and installed packages, sorted by name."""
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        *folders, _ = name.split("/")
        if name.split("/")[0].removesuffix(".py") not in HELD_OUT or _SKIPPED_FOLDERS.intersection(folders):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield Source(name, text)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods with their qualified names; not the functions inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions(node, prefix)


def heads_of(files: Iterable[Source]) -> list[Source]:
    """Collect the function heads of ``files``, in file order, without duplicates.

    A head is the signature, the docstring where there is one, and preceding lines of the file. It ends
    with a visible character: the tokenizer joins a line's end to the next line's indent, so a final
    newline would be a token that the models never saw there.
    """
    heads: list[Source] = []
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
            if not head or len("\n".join(head)) > _MAX_CHARS:
                continue
            before = lines[max(0, start - _CONTEXT_LINES) : start]
            while before and len("\n".join(before + head)) > _MAX_CHARS:
                before.pop(0)
            text = "\n".join(before + head).strip("\n").rstrip()
            if len(text) < 100 or text in seen:
                continue
            seen.add(text)
            heads.append(Source(f"{source.name}:{qualified}", text))
    return heads


def function_heads(n: int | None = None, seed: int = 0) -> list[Source]:
    """Return ``n`` prompts (all of them with ``None``) from the held-out modules, in an order drawn with ``seed``: for an interpreter always the same.

    The first ``k`` of ``n`` are those of ``function_heads(k)``. Raises ``ValueError`` if there are fewer than ``n``.
    """
    heads = heads_of(held_out_files(Path(sysconfig.get_paths()["stdlib"])))
    random.Random(seed).shuffle(heads)
    if n is None:
        return heads
    if n > len(heads):
        raise ValueError(f"{n} prompts requested, but the held-out modules have only {len(heads)}")
    return heads[:n]
