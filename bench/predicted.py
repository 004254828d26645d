"""Predictions for a GPU, made before its measurement, and the comparison: ``python -m bench.predicted gpu_check.json``

``bench/predictions/*.json`` has ``device`` (what it is for), ``parameters`` (numbers that several predictions rest on, each with its reason in ``why``) and
``figures``: name, ``value``, ``unit``, and ``formula`` over the parameters or ``why``, or both. A prediction is written before the measurement and
    does not change after it. Names are those of :mod:`bench.figures`; of whole generations ``generate.ROW.FIELD``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent / "predictions" / "h200.json"

_FIELDS = ("tokens_per_second", "decode_tokens_per_second", "launches_per_token", "syncs_per_token")
_ROWS = (
    ("plain", "plain"),
    ("ours-plain-graphs", "plain_graphs"),
    ("lockstep-graphs-", "rounds"),
    ("streams-", "streams"),
    ("assisted-", "assisted"),
    ("static", "compiled"),
)
"""Keys of contenders, or their beginnings, and the names of their figures: those do not depend on the names of the models."""


class Compared(NamedTuple):
    """A prediction beside the measurement. ``measured``, ``ratio``: None where it was not measured, or where the prediction is 0."""

    figure: str
    unit: str
    predicted: float
    measured: float | None
    ratio: float | None


def load(file: Path = FILE) -> dict[str, Any]:
    """The predictions of a device."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def evaluate(formula: str, parameters: Mapping[str, float]) -> float:
    """The value of a formula of a predictions file."""
    return float(eval(formula, {"__builtins__": {}}, dict(parameters)))


def measured(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """All figures of the parts of a check, by name."""
    found: dict[str, float] = {}
    for part in parts.values():
        found |= part.get("figures", {})
    # A row that was measured in a process of its own counts rather than one beside others.
    for part in sorted(parts.values(), key=lambda part: -len(part.get("rows", ()))):
        rows = part.get("rows", ())
        for row in rows:
            found |= dict(_of_row(row, alone=len(rows) <= 2))
    return found


def _of_row(row: Mapping[str, Any], alone: bool) -> Iterator[tuple[str, float]]:
    name = next(
        (name for key, name in _ROWS if row["key"] == key or (key[-1] == "-" and row["key"].startswith(key))), None
    )
    if name is None or (alone and name == "plain"):
        return
    for field in _FIELDS:
        if row.get(field) is not None:
            yield f"generate.{name}.{field}", row[field]
    if row.get("seconds_to_first_token"):
        yield f"generate.{name}.first_token_ms", 1e3 * row["seconds_to_first_token"]
    length = row.get("accepted_length", {}).get("target")
    if length:
        yield f"generate.{name}.accepted_length", length


def compare(predictions: Mapping[str, Any], figures: Mapping[str, float]) -> list[Compared]:
    """Every prediction beside its measurement, in the order of the file."""
    rows = []
    for name, entry in predictions["figures"].items():
        value, found = entry["value"], figures.get(name)
        ratio = found / value if found is not None and value else None
        rows.append(Compared(name, entry["unit"], value, found, ratio))
    return rows


def table(rows: list[Compared]) -> str:
    """The comparison as text: ``ratio`` is measured over predicted."""
    lines = [f"{'':48}{'':10}{'predicted':>12}{'measured':>12}{'ratio':>8}"]
    for row in rows:
        found = "-" if row.measured is None else f"{row.measured:.4g}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"{row.figure:48}{row.unit:10}{row.predicted:12.4g}{found:>12}{ratio:>8}")
    return "\n".join(lines)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    record = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(table(compare(load(), measured(record["parts"]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
