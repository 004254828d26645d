"""``pipespec plan`` for a chain of models: the table of predictions, and the picture of depth and window."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from pipespec.checks import check_chain
from pipespec.loading import load_model
from pipespec.placement import Devices, arrange
from pipespec.planning import planner
from pipespec.planning.auto import Auto
from pipespec.planning.survey import calibrate, call_of, picture, settings, survey, table
from pipespec.progress import quiet_transformers, say, working
from pipespec.stage import stage_names
from pipespec_kernels import collect_env


def run_plan(
    target: str | Path,
    drafts: Sequence[str | Path],
    *,
    text: str | None = None,
    new_tokens: int = 128,
    svg: Path | None = None,
    repeats: int = 3,
    as_json: bool = False,
    device: Devices = None,
    **loading: Any,
) -> int:
    """Print the plan; with ``svg`` also measure every setting and draw both. Raises as ``Pipeline``."""
    given = [*drafts, target]
    with quiet_transformers():
        with working("loading the models"):
            devices = arrange(given, device=device, **loading)
            models = [load_model(m, device=d, **loading) for m, d in zip(given, devices, strict=True)]
            check_chain(models, given)
        names = [Path(m).name for m in given]
        if len(set(names)) < len(names):
            names = stage_names(len(given))
        auto = Auto(models, names=names)
        auto.close()
        limit = getattr(models[-1].config, "max_position_embeddings", None)
        prompts = _prompts(target, text, models[-1], loading.get("trust_remote_code", False))
        longest = max(ids.shape[1] for ids in prompts)
        if limit is not None and longest + new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {new_tokens} new ones pass the target's limit of {limit}"
            )
        with working("asking every model about the target's text"):
            answers = calibrate(models, prompts, new_tokens) if drafts else planner.Answers()
        plan = planner.plan(
            auto.profile, answers, call_of(prompts, new_tokens), captured=auto.captured, cores=auto.cores
        )
        record = plan.to_dict() | {"profile": auto.profile.to_json()}
        if not as_json:
            print(plan)
        if svg is not None:
            if not drafts:
                raise ValueError("--svg: there is nothing to draw without a draft")
            candidates = list(dict.fromkeys([*settings(auto.profile), *plan.candidates]))
            candidates = [c for c in candidates if c.schedule != "workers" or auto.cores > 1]
            with working(f"measuring {len(candidates)} settings, {repeats} times"):
                points = survey(
                    models, auto.profile, answers, candidates, prompts, new_tokens, repeats, cores=auto.cores
                )
            record["points"] = [p.to_dict() for p in points]
            env = collect_env()["cpu"]
            caption = f"{env['model']}, {env['usable_cores']} cores, medians of {repeats} repeats."
            svg.write_text(picture(points, names, caption), encoding="utf-8")
            if not as_json:
                print(table(points, names))
            say(f"the picture is in {svg}")
    if as_json:
        print(json.dumps(record, indent=1))
    return 0


def _prompts(target: str | Path, text: str | None, model: Any, trust_remote_code: bool) -> list[torch.Tensor]:
    """LongTensors ``[1, S]``: the user's text; of the bundled family function heads; else only the token that begins a text."""
    from pipespec.demo import FAMILY, family_path, prompts

    texts = [text] if text is not None else None
    if texts is None and Path(target) in [family_path(name) for name in FAMILY]:
        texts = prompts(4)
    if texts is None:
        begin = model.generation_config.bos_token_id
        return [torch.tensor([[begin if isinstance(begin, int) else 1]])]
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    return [tokenizer(t, return_tensors="pt").input_ids.to(model.device) for t in texts]
