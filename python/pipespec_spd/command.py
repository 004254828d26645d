"""``--system spd`` of ``pipespec generate``: the target in stages, in one process or on torchrun's ranks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from pipespec.cli.options import one_or_all
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
    if trace:
        raise ValueError("--system spd keeps no trace of single steps: use pipespec generate --report")
    if args.timeout is not None and not _ranks():
        raise ValueError("--timeout is for ranks: start this with torchrun")
    if args.timeout is not None and not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout must be a number of seconds above 0, not {args.timeout:g}")
    if _ranks() and args.device is not None and len(args.device) > 1:
        raise ValueError("--device: each rank has one device; give cpu, cuda (a GPU per rank) or cuda:0")
    if _ranks() and args.trust_remote_code:
        raise ValueError("--trust-remote-code: ranks load parts of known models only")


def _stages(text: str) -> Any:
    """The value of ``--stages`` as ``SpeculativePipeline`` takes it."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        return text
    return counts[0] if len(counts) == 1 else counts


def make_pipeline(
    args: argparse.Namespace, target: str | Path, drafts: list[str | Path], dtype: str, trace: int
) -> Any:
    """The pipeline that the options describe, on one process or on torchrun's ranks.

    Raises:
        ValueError: Several drafts of which one is no model; options that do not fit together.
    """
    import torch

    from pipespec.demo import MODULE_STAGES, draft_module_path
    from pipespec_spd import RanksPipeline, SpeculativePipeline
    from pipespec_spd.pipeline import module_config

    if not drafts and args.target is None and args.stages in (None, str(MODULE_STAGES)):
        drafts = [draft_module_path()]
        say(f"no --target: using the bundled target in {MODULE_STAGES} stages and its draft module")
    drafter = one_or_all([str(draft) for draft in drafts]) or "ngram"
    if isinstance(drafter, list) and any(d == "ngram" or module_config(d) is not None for d in drafter):
        raise ValueError(
            "--draft: several drafts of --system spd form a chain of models; ngram and a draft module draft alone"
        )
    trained = module_config(drafter)
    if args.stages is not None:
        stages = _stages(args.stages)
    elif trained is not None:
        stages = [end - begin for begin, end in trained.stages]
    else:
        stages = _ranks() or 2
    options: dict[str, Any] = {"stages": stages}
    if _ranks():
        device = "cpu" if args.device is None else args.device[0]
        given = None if dtype == "auto" else getattr(torch, dtype)
        if args.timeout is not None:
            options["timeout_s"] = args.timeout
        return RanksPipeline(target, drafter, dtype=given, device=device, **options)
    if args.device is not None and len(args.device) > 1:
        options["devices"] = args.device
    else:
        options["device"] = one_or_all(args.device)
    return SpeculativePipeline(target, drafter, dtype=dtype, trust_remote_code=args.trust_remote_code, **options)
