"""Documents show the tables of the code."""

from pathlib import Path

from pipespec import registry
from pipespec.api.arguments import table

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- arguments:begin -->\n", "<!-- arguments:end -->"


def test_the_table_of_arguments():
    text = (DOCS / "generate.md").read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), "docs/generate.md differs: it shows pipespec.api.arguments.table()"


def test_the_table_of_schedules():
    text = (DOCS / "how-to" / "schedules.md").read_text()
    shown = text.partition("<!-- schedules:begin -->\n")[2].partition("<!-- schedules:end -->")[0]
    assert shown == registry.table(), "docs/how-to/schedules.md differs: it shows pipespec.registry.table()"
