"""What does a verified token cost? ``python -m bench.bench_price MODEL ... [--json FILE]``

MODEL is a folder, a GGUF file, or FOLDER=FORMAT, whose matrices are quantised. Printed are medians of the time of a step by its number of columns, as parts of
that of one column.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.controller_replay import WIDTHS, step_times
from bench.harness import markdown_table, save
from bench.machine import provenance
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described
from pipespec.models.loading import load_model
from pipespec.models.quantizing import quantized

REPEATS = 15


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, forms = {}, {}
    for name in options.models:
        path, _, weights = name.partition("=")
        model = load_model(path)
        model = quantized(model, weights) if weights else model
        found[short := name.rpartition("/")[2]] = step_times(model, REPEATS)
        forms[short] = described(model, RowCache.for_model(model, 1, 64))
    rows = [[name, *(f"{times[width] / times[1]:.2f}" for width in WIDTHS)] for name, times in found.items()]
    print(markdown_table(("columns", *map(str, WIDTHS)), rows))
    ms = {name: {width: 1000 * s for width, s in times.items()} for name, times in found.items()}
    save(options.json, {"benchmark": "price", "machine": provenance(), "forward": forms, "step_ms": ms})


if __name__ == "__main__":
    main()
