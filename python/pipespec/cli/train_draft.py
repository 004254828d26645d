"""``pipespec train-draft``: train a draft that reads the target's hidden states."""

from __future__ import annotations

import argparse
from typing import Any

from pipespec.cli import spd
from pipespec.cli.options import Subparsers, option

_LEAST_LAYERS = 7
"""From here on the third hidden state, the middle and the third from the end are three."""

_OF_SPD = ("stages", "layers", "types", "full")
"""Options that mean something for SPD's draft modules only."""


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser(
        "train-draft", help="train a draft that reads the target's hidden states", description=run.__doc__
    )
    parser.set_defaults(command=run)
    kinds = "eagle3: a draft head; spd: a draft module, as spd train"
    option(parser, "kind", None, str, kinds, choices=("eagle3", "spd"), default="eagle3")
    what = "eagle3: draft tokens in a row that a lesson trains (4)"
    option(parser, "forward-steps", "N", int, what, default=argparse.SUPPRESS)
    spd.add_training_options(parser)
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Train a draft for a target, which is the teacher and does not change: an EAGLE-3 head (folder in the format of the package speculators), or a
    draft module for SPD. The draft learns the assistant's turns of conversations, and all of plain text. An interrupted run continues with --resume."""
    if args.kind == "spd":
        if "forward_steps" in args:
            raise ValueError("--forward-steps is for --kind eagle3: leave it out for a draft module")
        return spd.run(args)
    if given := [name for name in _OF_SPD if name in args]:
        raise ValueError(f"--{given[0].replace('_', '-')} is for --kind spd: leave it out for an EAGLE-3 head")
    args = spd.with_recipe(args)
    spd.check_options(args, ("target", "data", "out"))
    return spd.train_on_files(args, HeadKind(args))


class HeadKind(spd.ModuleKind):
    """EAGLE-3 heads, in the place of SPD's draft modules."""

    def __init__(self, args: argparse.Namespace) -> None:
        from pipespec.drafts.head import CONFIG

        self.args, self.file = args, CONFIG
        self.steps: int = getattr(args, "forward_steps", 4)

    def check(self, config: Any) -> None:
        if self.steps < 1:
            raise ValueError(f"--forward-steps must be at least 1, not {self.steps}")
        if self.args.anchors is None and config.num_hidden_layers < _LEAST_LAYERS:
            raise ValueError(
                f"EAGLE-3's three hidden states are of a target with {_LEAST_LAYERS} layers at least, and this one has {config.num_hidden_layers}: "
                "name them with --anchors"
            )

    def make(self, model: Any, vocabulary: list[int] | None) -> Any:
        from pipespec.spd.training.heads import HeadStudent, head_for

        return HeadStudent(head_for(model, vocabulary, self.args.anchors), model, self.steps)
