"""``pipespec spd train``: files in, a draft module out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from pipespec.compat import text_config
from pipespec.loading import load_model
from pipespec.progress import quiet_transformers, say, working
from pipespec.spd import data
from pipespec.spd.draft_module import CONFIG_FILE, DraftModule, DraftModuleConfig, Stages, uniform_stages
from pipespec.spd.training import CHECKPOINT, PICTURE, Settings, train


def stages_of(layers: int, given: Sequence[int]) -> Stages:
    """One number: that many stages; several: layers of each. ValueError where they do not make up ``layers``."""
    if len(given) == 1:
        return uniform_stages(layers, given[0])
    if any(count < 1 for count in given) or sum(given) != layers:
        raise ValueError(
            f"the stages {' '.join(map(str, given))} have {sum(given)} layers together, the target has {layers}: "
            "give a number of layers, at least one, for each stage"
        )
    ends = list(accumulate(given))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def run_train(
    target: str | Path,
    paths: Sequence[str | Path],
    folder: Path,
    *,
    stages: Sequence[int],
    settings: Settings,
    layers: int | None = None,
    types: int | None = None,
    vocabulary: int | None = None,
    length: int = 512,
    batch: int = 4,
    truncate: bool = False,
    held_out: Sequence[str | Path] = (),
    validation: float = 0.02,
    validation_batches: int = 16,
    resume: bool = False,
    dtype: str = "float32",
    device: str | None = None,
) -> int:
    """Trains a module for ``target`` on the files and prints where it is. Raises as what it calls, before training where it can."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if (folder / CONFIG_FILE).exists() and not resume:
        raise ValueError(f"{folder} holds a draft module already: go on with --resume, or give another --out")
    if resume and not (folder / CHECKPOINT).is_file():
        raise FileNotFoundError(f"nothing to resume: {folder / CHECKPOINT} does not exist")
    if batch < 1 or validation_batches < 1:
        raise ValueError("a batch needs at least one example, and validation at least one batch")
    if processes > 1 and not dist.is_initialized():
        on_gpu = torch.cuda.is_available() and device != "cpu"
        dist.init_process_group("nccl" if on_gpu else "gloo")
        if on_gpu:
            device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
            torch.cuda.set_device(device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    with quiet_transformers():
        # What can be wrong without the target's weights is found before they are loaded.
        try:
            described = text_config(AutoConfig.from_pretrained(target))
            tokenizer = AutoTokenizer.from_pretrained(target)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"{target} holds no model with a tokenizer that can be loaded: {error}") from error
        depth, size = described.num_hidden_layers, described.vocab_size
        ranges = stages_of(depth, stages)
        if layers is None:  # so that drafting takes no longer than a stage (SPD section 3.4)
            layers = max(1, min(end - begin for begin, end in ranges) - 1)
        if vocabulary is not None and not 1 <= vocabulary <= size:
            raise ValueError(f"a draft vocabulary of {vocabulary} tokens: between 1 and the target's {size}")
        with working("reading the data"):
            examples, lost = data.load_examples(paths, tokenizer, length, truncate=truncate)
            if held_out:
                held, _ = data.load_examples(held_out, tokenizer, length, truncate=truncate)
            else:
                examples, held = data.split(examples, validation, settings.seed)
        highest = max(int(e.ids.max()) for e in (*examples, *held))
        if highest >= size:
            raise ValueError(
                f"the tokenizer gives id {highest}, the target has {size} tokens: they do not belong together"
            )
        with working("loading the target"):
            model = load_model(target, dtype=dtype, device=device)
    if resume:
        config = DraftModuleConfig.load(folder)
        config.require(model, ranges)
        if config.layers != layers:
            raise ValueError(f"the module in {folder} has {config.layers} layers, --layers says {layers}")
    else:
        ids = None
        if vocabulary is not None:
            ids = data.frequent_tokens(examples, vocabulary, _ends(model))
        config = DraftModuleConfig.for_target(model, ranges, layers=layers, vocabulary=ids, types=types)
    module = DraftModule.of_target(model, config).to(model.device)
    if first:
        tokens, learnt = sum(len(e.ids) for e in examples), sum(int(e.wanted.sum()) for e in examples)
        parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
        say(
            f"{len(examples)} examples, {tokens:,} tokens, {learnt:,} of them to learn ({lost}); {len(held)} held out; "
            f"{parameters:,} parameters, anchors {' '.join(map(str, config.anchors))}"
        )
    batches = data.Batches(examples, batch, settings.seed)
    checks = [data.collate(held[at : at + batch]) for at in range(0, len(held), batch)][:validation_batches]
    try:
        record: dict[str, Any] = train(
            model, module, batches.__getitem__, settings, folder, held_out=checks, resume=resume
        )
    finally:
        if processes > 1:
            dist.destroy_process_group()
    if first:
        last = record["history"][-1]
        print(
            f"{folder}: {record['steps']} steps, held-out KL {last['held_out_loss']:.3f}, agreement {last['agreement']:.3f}; "
            f"curves in {PICTURE}"
        )
    return 0


def _ends(model: Any) -> list[int]:
    """Tokens that end a text: a draft vocabulary without them could never propose the end."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
