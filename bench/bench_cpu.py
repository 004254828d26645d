"""The demo's table as a benchmark: who generates the target's text on this CPU, and how fast.

Measure, and put the result where it belongs::

    python -m bench.bench_cpu --json bench/results/cpu.json --readme README.md

With ``--json`` a picture of the bars is written beside it (``.svg``). ``--from FILE`` shows an earlier measurement instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.plot import OTHERS, OURS, Bar, bars
from pipespec.demo import prompts
from pipespec.demo.comparison import (
    HEADER,
    ROWS,
    Comparison,
    Family,
    Result,
    cells,
    describe,
    footnotes,
    format_table,
)
from pipespec.progress import quiet_transformers, say, working

_CALIBRATION = 4


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    record = json.loads(args.earlier.read_text(encoding="utf-8")) if args.earlier else measure(args)
    results = [Result(**row) for row in record["rows"]]
    print(format_table(results))
    for line in (*footnotes(results), summary(record)):
        print(line)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        args.json.with_suffix(".svg").write_text(picture(results, describe(record["machine"])), encoding="utf-8")
    if args.readme:
        source = args.json or args.earlier
        write_table(args.readme, results, summary(record), source.with_suffix(".svg") if source else None)
    return 0 if all(result.is_identical for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench_cpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="held-out function heads (%(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="R", help="medians are taken over these (%(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="T", help="most per prompt (%(default)s)")
    keys = [row.key for row in ROWS]
    parser.add_argument(
        "--rows", nargs="+", default=keys, choices=keys, metavar="ROW", help=f"any of: {', '.join(keys)}"
    )
    parser.add_argument("--family", type=Path, metavar="FOLDER", help="models other than the bundled ones")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the measurement there, and a picture beside it"
    )
    parser.add_argument("--readme", type=Path, metavar="FILE", help="rewrite the table between its comments there")
    parser.add_argument(
        "--from", dest="earlier", type=Path, metavar="FILE", help="do not measure: show this measurement"
    )
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A new measurement: :meth:`Comparison.record` and when it was made."""
    last = 0.0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            say(f"{what} ({done + 1} of {total})")
            last = time.monotonic()

    texts = prompts(args.prompts + _CALIBRATION)
    with quiet_transformers():
        with working("loading the models"):
            family = Family.load(args.family)
        with Comparison(family, texts[: args.prompts], args.new_tokens, args.rows, progress) as comparison:
            comparison.start()
            comparison.tune(texts[args.prompts :])
            comparison.warm_up()
            for _ in comparison.measure(args.repeats):
                pass
            when = datetime.now(UTC).isoformat(timespec="seconds")
            return {"when": when, "repeats": args.repeats} | comparison.record()


def summary(record: dict[str, Any]) -> str:
    """What was measured, and on what."""
    return (
        f"Medians of {record['repeats']} repeats over {record['prompts']} held-out prompts, up to "
        f"{record['new_tokens']} tokens each, greedy. {describe(record['machine'])}. Measured {record['when'][:10]}."
    )


def write_table(readme: Path, results: list[Result], below: str, image: Path | None = None) -> None:
    """Rewrite what stands between the two comments, as ``replace_table``: the table and, if it exists, the picture."""
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, *map(cells, results))]
    lines.insert(1, "|---" + "|---:" * (len(HEADER) - 1) + "|")
    if image and image.exists():
        lines += ["", f"![the table as bars]({os.path.relpath(image, readme.parent)})"]
    table = "\n".join([*lines, "", *footnotes(results), below])
    replace_table(readme, table)


def replace_table(document: Path, table: str, name: str = "table") -> None:
    """Put ``table`` between the two comments ``name:begin`` and ``name:end``. ``ValueError`` if they are not there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = document.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{document} must have {begin} and {end} once each")
    before, rest = text.split(begin)
    document.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def picture(results: list[Result], caption: str) -> str:
    """Bars of tokens/s with the ratio to ``generate()`` beside them, as SVG."""
    rows = []
    for result in results:
        colour = {"plain": "#888888"}.get(result.key, OURS if result.acceptance_rate else OTHERS)
        ratio = f"  ({result.ratio_to_plain:.2f}x)" if result.ratio_to_plain else ""
        rows.append(Bar(result.label, result.tokens_per_second, f"{result.tokens_per_second:.0f}{ratio}", colour))
    return bars("tokens/s, the same text in every row", rows, caption)


if __name__ == "__main__":
    sys.exit(main())
