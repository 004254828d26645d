"""``pipespec demo``: the bundled models, measured against ``generate()``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from pipespec.cli.options import Subparsers, flag, option, positive, read_text
from pipespec.process.progress import working


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser(
        "demo", help="bundled models, real prompts, speed against generate()", description=run.__doc__
    )
    parser.set_defaults(command=run)
    flag(parser, "quick", "seconds instead of half a minute; the figures mean little")
    option(parser, "prompt", "FILE", str, "use this text as the prompt; - for standard input")
    option(parser, "prompts", "N", positive, "number of prompts to measure")
    option(parser, "new-tokens", "N", positive, "maximum number of new tokens per prompt")
    option(parser, "family", "FOLDER", Path, "other models: FOLDER/target, /medium and /small")
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Show an answer of the bundled target as its tokens are drafted and accepted. Then measure plain generate(), HuggingFace's assisted generation and
    pipespec. Exit code 1 if any texts differ."""
    text = None
    if args.prompt is not None:
        text = read_text(None if args.prompt == "-" else Path(args.prompt))
    with working("importing torch and transformers"):
        from pipespec.demo.run import FULL, QUICK, run_demo
    size = QUICK if args.quick else FULL
    size = replace(size, prompts=args.prompts or size.prompts, new_tokens=args.new_tokens or size.new_tokens)
    return 0 if run_demo(size, text, args.family) else 1
