"""``pipespec trace``: continue a prompt and record every step."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipespec.cli.generate import add_generation, generate
from pipespec.cli.options import Subparsers, check_output

_TRACE_STEPS = 1 << 16


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("trace", help="record every step of a generation", description=run.__doc__)
    parser.set_defaults(command=run)
    add_generation(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="trace for https://ui.perfetto.dev")
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Continue a prompt as `generate` does, and record every step of every stage: its time, its tokens, the draft tokens that were accepted, and
    rollbacks. Open the file with https://ui.perfetto.dev; a summary goes to standard error."""
    check_output(args.out)
    report = generate(args, trace=_TRACE_STEPS)
    if report is None:
        return 0
    from pipespec.api.trace import summary

    report.save_trace(args.out)
    print(report, summary(report.traced()), sep="\n", file=sys.stderr)
    return 0
