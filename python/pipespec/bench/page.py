"""One self-contained HTML page of figures and tables. Every number in a table carries its full value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from pipespec.observe.plot import png
from pipespec.process.files import replace

Cell = str | float | int | bool | None
"""A cell of a table. None: not measured."""

PAGE, FIGURES = "report.html", "figures"
"""Names in the folder of a run."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: Its heading, with the unit.
        form: How its numbers are shown: a format specification.
        field: Field of the JSON that it shows.
    """

    name: str
    form: str = ""
    field: str = ""


@dataclass(frozen=True)
class Table:
    """A table; ``name`` finds it in the page."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Section:
    """One question and its answer.

    Attributes:
        name: File name of its figures.
        title: Heading.
        text: What is shown, and how to read it.
        figures: SVG, with the title of each.
        tables: The numbers.
        missing: Why there is nothing to draw, and what would produce the data. Empty: nothing is missing.
    """

    name: str
    title: str
    text: str
    figures: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    missing: str = ""


@dataclass
class Page:
    """A page. ``lead``: lines below the heading."""

    title: str
    lead: Sequence[str] = ()
    sections: list[Section] = field(default_factory=list)

    def html(self) -> str:
        """The page as one file."""
        entries = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in self.sections)
        lead = "".join(f"<p>{escape(line)}</p>" for line in self.lead)
        body = "\n".join(map(_section, self.sections))
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(self.title)}</h1>\n{lead}\n"
            f"<nav><ol>{entries}</ol></nav>\n{body}\n</body>\n</html>\n"
        )

    def write(self, folder: Path) -> tuple[list[Path], str | None]:
        """Write the page and each figure as SVG, and as PNG where the rasteriser is installed.

        Args:
            folder: Folder of the page; the figures go to ``figures`` in it.

        Returns:
            The files, the page first, and why there is no PNG.
        """
        (folder / FIGURES).mkdir(parents=True, exist_ok=True)
        files, why = [folder / PAGE], None
        replace(files[0], self.html())
        for section in self.sections:
            for number, (_, svg) in enumerate(section.figures, 1):
                stem = section.name if len(section.figures) == 1 else f"{section.name}-{number}"
                files.append(folder / FIGURES / f"{stem}.svg")
                replace(files[-1], svg)
                if why is not None:
                    continue
                try:
                    pixels = png(svg)
                except (ImportError, RuntimeError) as error:
                    why = str(error)
                    continue
                files.append(files[-1].with_suffix(".png"))
                files[-1].write_bytes(pixels)
        return files, why


def shown(value: Cell, form: str) -> str:
    """A cell as text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else format(value, form)


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}">', f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.text)}</p>"]
    if section.missing:
        parts.append(f'<p class="missing">{escape(section.missing)}</p>')
    parts += [f"<figure>{svg}</figure>" for _, svg in section.figures]
    parts += [_table(table) for table in section.tables]
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col" data-field="{escape(c.field)}">{escape(c.name)}</th>' for c in table.columns)
    rows = []
    for row in table.rows:
        cells = []
        for column, value in zip(table.columns, row, strict=True):
            text = escape(shown(value, column.form))
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                cells.append(f'<td class="number" data-value="{value!r}">{text}</td>')
            else:
                kind = ' class="number"' if value is None and column.form else ' class="long"' if len(text) > 40 else ""
                cells.append(f"<td{kind}>{text}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    shown_at_once = len(rows) <= _MOST_ROWS
    before, after = (
        ("", "") if shown_at_once else (f"<details><summary>The numbers: {len(rows)} rows</summary>", "</details>")
    )
    return (
        before
        + (
            f'<div class="table"><table id="table-{table.name}"><thead><tr>{head}</tr></thead>'
            f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
        )
        + after
    )


_MOST_ROWS = 40
"""Longer tables are folded."""

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: white; max-width: 1160px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0.3em; }
h2 { font-size: 1.2em; margin-top: 2.2em; border-bottom: 1px solid #ccc; padding-bottom: 0.2em; }
nav ol { columns: 2; padding-left: 1.5em; }
p { max-width: 75ch; }
p.missing { border-left: 4px solid #d55e00; padding-left: 0.8em; }
figure { margin: 1em 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
.table { overflow-x: auto; margin: 1em 0; }
table { border-collapse: collapse; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 9px; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #888; }
td { white-space: nowrap; }
td.long { white-space: normal; min-width: 16em; }
summary { cursor: pointer; color: #0645ad; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
@media print { section { break-inside: avoid-page; } nav { display: none; } }
"""
