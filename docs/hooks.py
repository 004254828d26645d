"""Content of the site beyond the Markdown files: figures of bench/results, files of the repository's root, and the help of the commands.

Links in docs/*.md are valid in the repository. On the site a link to a file outside of docs/ leads to the page that shows the file, or becomes plain text.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "bench/results"
SHOWN_AT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "python/pipespec/demo/family/README.md": "reference/models.md",
    "python/pipespec/demo/family/module/README.md": "reference/models.md",
}
"""Pages that show a file from outside of docs/."""

_LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_INCLUDE = re.compile(r"^<!-- include: (\S+)(?: (\d+))? -->$", re.MULTILINE)
_FENCE = re.compile(r"^(```|~~~).*?^\1[`~]*$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted((ROOT / RESULTS).glob("*.svg")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    markdown = _links_of(markdown, f"docs/{posixpath.dirname(source)}", source)
    markdown = _INCLUDE.sub(lambda match: _included(match[1], int(match[2] or 0), source), markdown)
    return markdown.replace("<!-- commands -->", "\n".join(_commands())) if source == "reference/cli.md" else markdown


def _included(name: str, deeper: int, page: str) -> str:
    """A file of the repository as a part of ``page``, its headings ``deeper`` levels lower."""
    text = (ROOT / name).read_text()
    if deeper:
        text = _outside_of_code(text, lambda part: re.sub(r"^(#+ )", "#" * deeper + r"\1", part, flags=re.MULTILINE))
    return _links_of(text, posixpath.dirname(name), page)


def _links_of(text: str, folder: str, page: str) -> str:
    """Links of a text that stands in ``folder`` of the repository, for the site's page ``page``."""

    def link(match: re.Match[str]) -> str:
        image, label, address, anchor = match[1], match[2], match[3], match[4] or ""
        if not address or re.match(r"[a-z]+:", address):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, address))
        if path.startswith(("../../actions/", "../../issues")):  # pages of the hosting service beside the files
            return "" if image else label
        if path.startswith("docs/"):
            at = path.removeprefix("docs/")
        elif path.startswith(f"{RESULTS}/") and path.endswith(".svg"):
            at = f"results/{posixpath.basename(path)}"
        elif path in SHOWN_AT:
            at = SHOWN_AT[path]
        elif (ROOT / path).exists():
            return label
        else:
            return match[0]  # mkdocs reports it
        return f"{image}[{label}]({os.path.relpath(at, posixpath.dirname(page) or '.')}{anchor})"

    return _outside_of_code(text, lambda part: _LINK.sub(link, part))


def _outside_of_code(text: str, change: Any) -> str:
    out, end = [], 0
    for fence in _FENCE.finditer(text):
        out += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*out, change(text[end:])])


class _Parser(Exception):
    pass


def _commands() -> Iterator[str]:
    """``--help`` of each command, as Markdown."""
    sys.path[:0] = [str(ROOT), str(ROOT / "python")]
    from pipespec.cli.main import main

    def found(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Parser(parser)

    with patch.dict(os.environ, COLUMNS="100"), patch.object(argparse.ArgumentParser, "parse_known_args", found):
        try:
            main(["--help"])
        except _Parser as caught:
            yield from _help(caught.args[0])


def _help(parser: argparse.ArgumentParser) -> Iterator[str]:
    if parser.prog != "pipespec":
        yield f"## {parser.prog}\n"
    yield f"```text\n{parser.format_help().rstrip()}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from _help(command)
