"""``--system spd`` of ``pipespec generate``: the target in stages, in one process or on torchrun's ranks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from pipespec.process.progress import say


def _ranks() -> int:
    """The number of torchrun's ranks; 0 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 0


def check_options(args: argparse.Namespace, trace: int) -> None:
    """Raise ``ValueError`` for options that SPD does not have."""
    given = [
        f"--{name.replace('_', '-')}" for name in ("schedule", "lookahead", "exact", "weights") if getattr(args, name)
    ]
    if args.acceptance != "coupled":
        given.append("--acceptance")
    if given:
        raise ValueError(f"{', '.join(given)}: not with --system spd")
    if len(args.draft) > 1:
        raise ValueError(f"--draft: one with --system spd, not {len(args.draft)}")
    if trace:
        raise ValueError("--system spd keeps no trace of single steps: use pipespec generate --report")
    if args.timeout is not None and not _ranks():
        raise ValueError("--timeout is for ranks: start this with torchrun")
    if args.timeout is not None and not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout must be a number of seconds above 0, not {args.timeout:g}")
    if args.device is not None and len(args.device) > 1:
        raise ValueError(
            "--device: one with --system spd; with torchrun, each rank has a GPU of its own by --device cuda"
        )
    if _ranks() and args.trust_remote_code:
        raise ValueError("--trust-remote-code: ranks load parts of known models only")


def _stages(text: str) -> int | list[int]:
    """The value of ``--stages`` as ``SpeculativePipeline`` takes it."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--stages {text}: give a number, or the layers of each stage, such as 4,4,4") from None
    return counts[0] if len(counts) == 1 else counts


def make_pipeline(
    args: argparse.Namespace, target: str | Path, drafts: list[str | Path], dtype: str, trace: int
) -> Any:
    """The pipeline that the options describe, on one process or on torchrun's ranks."""
    import torch

    from pipespec.demo import MODULE_STAGES, draft_module_path
    from pipespec_spd import RanksPipeline, SpeculativePipeline
    from pipespec_spd.pipeline import module_config

    if not drafts and args.target is None and args.stages in (None, str(MODULE_STAGES)):
        drafts = [draft_module_path()]
        say(f"no --target: using the bundled target in {MODULE_STAGES} stages and its draft module")
    drafter = str(drafts[0]) if drafts else "ngram"
    trained = module_config(drafter)
    stages: int | list[int] = _ranks() or 2 if trained is None else [end - begin for begin, end in trained.stages]
    if args.stages is not None:
        stages = _stages(args.stages)
    options: dict[str, Any] = {"stages": stages} | ({} if args.device is None else {"device": args.device[0]})
    if not _ranks():
        return SpeculativePipeline(target, drafter, dtype=dtype, trust_remote_code=args.trust_remote_code, **options)
    if args.timeout is not None:
        options["timeout_s"] = args.timeout
    return RanksPipeline(target, drafter, dtype=None if dtype == "auto" else getattr(torch, dtype), **options)
