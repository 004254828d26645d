"""``pipespec bench report``: the page of a benchmark run."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipespec.cli.options import Subparsers, check_output_folder
from pipespec.process.progress import say, working


def add_parser(inner: Subparsers) -> argparse.ArgumentParser:
    """Add the command to those of ``pipespec bench``."""
    parser: argparse.ArgumentParser = inner.add_parser("report", help="make the page of a run", description=run.__doc__)
    parser.set_defaults(command=run)
    parser.add_argument("folder", metavar="DIR", type=Path, help="what a run of pipespec bench wrote (its --out)")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where the page goes (default: DIR)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Make one self-contained HTML page with the figures and tables of a run, and each figure as SVG, and as PNG where the package
    resvg_py is installed. An unfinished run gives a page of what there is."""
    out = args.out or args.folder
    check_output_folder(out)
    with working("reading the results"):
        from pipespec.bench.report import Run, page
        from pipespec.bench.results import ResultsFolder

        loaded = Run.load(ResultsFolder(args.folder))
    with working("drawing"):
        files, why = page(loaded).write(out)
    print(
        f"{files[0]}: {len(loaded.samples)} texts, {sum(f.suffix == '.svg' for f in files)} figures in {files[1].parent if files[1:] else out}"
    )
    if why is not None:
        say(why)
    return 0
