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
from html import escape
from pathlib import Path
from typing import Any

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
_BEGIN, _END = "<!-- table:begin -->", "<!-- table:end -->"


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
    parser.add_argument("--readme", type=Path, metavar="FILE", help=f"rewrite the table between {_BEGIN} and {_END}")
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


def replace_table(document: Path, table: str) -> None:
    """Put ``table`` between the two comments. ``ValueError`` if they are not there."""
    text = document.read_text(encoding="utf-8")
    if text.count(_BEGIN) != 1 or text.count(_END) != 1:
        raise ValueError(f"{document} must have {_BEGIN} and {_END} once each")
    before, rest = text.split(_BEGIN)
    document.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{rest.split(_END)[1]}", encoding="utf-8")


def picture(results: list[Result], caption: str) -> str:
    """Bars of tokens/s with the ratio to ``generate()`` beside them, as SVG (by hand: no plotting library needed)."""
    bar, left, scale = 24, 250, 330 / max(result.tokens_per_second for result in results)
    height = bar * len(results) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="760" height="{height}" fill="white"/>',
        '<text x="10" y="22" font-weight="bold">tokens/s, the same text in every row</text>',
    ]
    for i, result in enumerate(results):
        y = 36 + i * bar
        colour = {"plain": "#888888"}.get(result.key, "#2a78b8" if result.acceptance_rate else "#c9c9c9")
        width = result.tokens_per_second * scale
        label = f"{result.tokens_per_second:.0f}" + (
            f"  ({result.ratio_to_plain:.2f}x)" if result.ratio_to_plain else ""
        )
        parts += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(result.label)}</text>',
            f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="{bar - 6}" fill="{colour}"/>',
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{label}</text>',
        ]
    parts.append(f'<text x="10" y="{height - 8}" font-size="10" fill="#555555">{escape(caption)}</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
