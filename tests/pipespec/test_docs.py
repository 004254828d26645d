"""docs/generate.md shows the table of the code."""

from __future__ import annotations

from pathlib import Path

from pipespec.api.arguments import table

BEGIN, END = "<!-- arguments:begin -->\n", "<!-- arguments:end -->"


def test_the_table_of_arguments():
    text = (Path(__file__).resolve().parents[2] / "docs" / "generate.md").read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), (
        "docs/generate.md is behind the code: run python -m pipespec.api.arguments docs/generate.md"
    )
