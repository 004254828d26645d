"""``pipespec plan``: predict the speed of a chain of models, and measure it on request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.cli.options import (
    Subparsers,
    add_models,
    at_least_one,
    check_output,
    chosen_models,
    draft_vocabulary,
    one_or_all,
    read_text,
)
from pipespec.process.progress import quiet_transformers, say, working
from pipespec_kernels import collect_env

if TYPE_CHECKING:
    import torch


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    """Add the command."""
    parser = commands.add_parser("plan", help="predict the speed of a chain of models", description=run.__doc__)
    parser.set_defaults(command=run)
    add_models(parser)
    parser.add_argument(
        "--prompt-file", metavar="FILE", type=Path, help="calibrate on this text instead of one that the target writes"
    )
    parser.add_argument(
        "--new-tokens", metavar="N", type=int, default=128, help="new tokens per call to plan for (%(default)s)"
    )
    parser.add_argument(
        "--svg", metavar="FILE", type=Path, help="also measure, and draw throughput over depth and lookahead"
    )
    parser.add_argument("--repeats", metavar="R", type=int, default=3, help="repeats of the measurement (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Measure a chain of models and predict the speed of every schedule, subset of drafts and lookahead, as schedule="auto" does. With
    --svg the settings are measured, too."""
    at_least_one(args, "new_tokens", "repeats")
    if args.svg is not None:
        check_output(args.svg)
    target, drafts, dtype = chosen_models(args, lambda: ["small", "medium"])
    text = None if args.prompt_file is None else read_text(args.prompt_file)
    with working("importing torch and transformers"):
        from pipespec.cli.survey import calibrate, call_of, picture, settings, survey, table
        from pipespec.engine.ngram import NgramDraft, first_of
        from pipespec.engine.stage import stage_names
        from pipespec.pipeline import load_chain
        from pipespec.planning import planner
        from pipespec.planning.auto import AutoDriver
    given, drafts = first_of(drafts)
    ngram = given or NgramDraft()  # it costs no model, so that it is always a candidate
    with quiet_transformers():
        with working("loading the models"):
            models, notes, translation = load_chain(
                target,
                drafts,
                dtype=dtype,
                draft_dtype=args.draft_dtype,
                draft_vocabulary=draft_vocabulary(args),
                device=one_or_all(args.device),
                trust_remote_code=args.trust_remote_code,
            )
        if translation is not None:
            raise ValueError(
                "draft 0 has another tokenizer than the target, which pipespec plan does not support, as yet"
            )
        for note in notes:
            say(note)
        names = [Path(m).name for m in (*drafts, target)]
        if len(set(names)) < len(names):
            names = stage_names(len(models))
        limit = getattr(models[-1].config, "max_position_embeddings", None)
        prompts = _prompts(target, text, models[-1], args.trust_remote_code)
        longest = max(ids.shape[1] for ids in prompts)
        if limit is not None and longest + args.new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {args.new_tokens} new ones pass the target's limit of {limit}"
            )
        auto = AutoDriver(models, names=names, ngram=ngram)
        auto.close()
        with working("measuring the agreement of every model with the target's text"):
            answers = calibrate(models, prompts, args.new_tokens, ngram)
        plan = planner.plan(
            auto.profile, answers, call_of(prompts, args.new_tokens), captured=auto.captured, cores=auto.cores
        )
        record = plan.to_dict() | {"profile": auto.profile.to_json()}
        if not args.json:
            print(plan)
        if args.svg is not None:
            candidates = list(dict.fromkeys([*settings(auto.profile), *plan.candidates]))
            candidates = [c for c in candidates if c.schedule != "workers" or auto.cores > 1]
            with working(f"measuring {len(candidates)} settings, {args.repeats} times"):
                how: dict[str, Any] = {"cores": auto.cores, "ngram": ngram}
                points = survey(
                    models, auto.profile, answers, candidates, prompts, args.new_tokens, args.repeats, **how
                )
            record["points"] = [p.to_dict() for p in points]
            env = collect_env()["cpu"]
            caption = f"{env['model']}, {env['usable_cores']} cores, medians of {args.repeats} repeats."
            args.svg.write_text(picture(points, auto.stage_names, caption), encoding="utf-8")
            if not args.json:
                print(table(points, auto.stage_names))
            say(f"the picture is in {args.svg}")
    if args.json:
        print(json.dumps(record, indent=1))
    return 0


def _prompts(target: str | Path, text: str | None, model: Any, trust_remote_code: bool) -> list[torch.Tensor]:
    """Prompts, LongTensors ``[1, S]``: the user's text; for the bundled family function heads; otherwise the begin token."""
    import torch

    from pipespec.demo import FAMILY, family_path, prompts
    from pipespec.models.tokenizers import load_tokenizer

    texts = [text] if text is not None else None
    if texts is None and Path(target) in [family_path(name) for name in FAMILY]:
        texts = prompts(4)
    if texts is None:
        begin = model.generation_config.bos_token_id
        return [torch.tensor([[begin if isinstance(begin, int) else 1]])]
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    return [tokenizer(t, return_tensors="pt").input_ids.to(model.device) for t in texts]
