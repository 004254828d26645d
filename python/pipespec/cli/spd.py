"""``pipespec spd train``: train a draft module on files."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipespec.cli.options import DTYPES, Subparsers, check_output_folder
from pipespec.process.progress import quiet_transformers, say, working

_VALIDATION_BATCHES = 16


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    """Add the command group and its command."""
    group = commands.add_parser("spd", help="speculative pipeline decoding: train a draft module")
    inner = group.add_subparsers(required=True, metavar="command")
    parser = inner.add_parser("train", help="train a draft module for a target", description=run.__doc__)
    parser.set_defaults(command=run)
    _add_options(parser)
    return [parser]


def _add_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("--target", metavar="PATH", required=True, help="model that the module drafts for")
    sources = "text, .jsonl, .json or .parquet files, or folders of them"
    train.add_argument("--data", metavar="PATH", nargs="+", required=True, help=sources)
    out = "module, checkpoint, record and curves"
    train.add_argument("--out", metavar="FOLDER", type=Path, required=True, help=out)
    stages = "number of stages of the target, or the layers of each stage"
    train.add_argument("--stages", metavar="N", type=int, nargs="+", required=True, help=stages)

    def option(group: Any, name: str, metavar: str, default: float | None, text: str) -> None:
        kind = float if isinstance(default, float) else int
        group.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=text)

    option(train, "layers", "N", None, "decoder blocks of the module; default: one less than a stage has")
    option(train, "types", "N", None, "most anchors (default: one per stage, plus one)")
    option(train, "vocabulary", "N", None, "draft only the N most frequent tokens (default: all)")
    data = train.add_argument_group("data")
    option(data, "length", "N", 512, "most tokens of an example (%(default)s)")
    data.add_argument("--truncate", action="store_true", help="cut longer conversations instead of dropping them")
    data.add_argument("--held-out", metavar="PATH", nargs="+", default=[], help="validate on these files")
    option(data, "validation", "P", 0.02, "without --held-out: validate on this share of the data (%(default)s)")
    options = train.add_argument_group("training")
    option(options, "steps", "N", None, "optimizer steps")
    options.add_argument("--minutes", metavar="M", type=float, help="instead of --steps: wall-clock minutes")
    option(options, "batch", "N", 4, "examples in a forward (%(default)s)")
    option(options, "accumulate", "N", 1, "forwards in a step (%(default)s)")
    option(options, "rate", "R", 1e-4, "peak learning rate (%(default)s)")
    options.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="default: %(default)s")
    option(options, "decay", "W", 0.0, "weight decay (%(default)s)")
    option(options, "temperature", "T", 1.0, "temperature of both distributions (%(default)s)")
    option(options, "argmax-weight", "W", 0.0, "weight of the cross entropy with the target's argmax (%(default)s)")
    amp = "bf16 matrix products; weights and optimizer state stay float32"
    options.add_argument("--amp", action="store_true", help=amp)
    option(options, "validate-every", "N", 100, "in steps (%(default)s)")
    option(options, "save-every", "N", 500, "in steps (%(default)s)")
    option(options, "seed", "N", 42, "default: %(default)s")
    options.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    train.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the target (%(default)s)")
    device = "cpu or cuda; default: cpu, or one GPU per process with several processes"
    train.add_argument("--device", metavar="D", help=device)


def run(args: argparse.Namespace) -> int:
    """Train a draft module for a target cut into stages (speculative pipeline decoding). The target is the teacher and does not change. The module
    learns the assistant's turns of conversations, and all of plain text. On several GPUs: torchrun or accelerate launch,
    `-m pipespec.cli.main spd train`."""
    if (args.steps is None) == (args.minutes is None):
        raise ValueError("give either --steps or --minutes")
    with working("importing torch and transformers"):
        import torch
        import torch.distributed as dist
        from transformers import AutoConfig, AutoTokenizer

        from pipespec.models.loading import load_model
        from pipespec.models.properties import text_config
        from pipespec.spd.draft_module import CONFIG_FILE, DraftModule, DraftModuleConfig
        from pipespec.spd.partition import cut
        from pipespec.spd.training import data
        from pipespec.spd.training.trainer import CHECKPOINT, PICTURE, TrainingSettings, train
    names = (field.name for field in fields(TrainingSettings))
    settings = TrainingSettings(**{name: getattr(args, name) for name in names if name in args})
    folder, layers, device = args.out, args.layers, args.device
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_output_folder(folder)
    if (folder / CONFIG_FILE).exists() and not args.resume:
        raise ValueError(f"{folder} holds a draft module already: continue with --resume, or give another --out")
    if args.resume and not (folder / CHECKPOINT).is_file():
        raise FileNotFoundError(f"nothing to resume: {folder / CHECKPOINT} does not exist")
    if args.batch < 1:
        raise ValueError("a batch needs at least one example")
    if processes > 1 and not dist.is_initialized():
        on_gpu = torch.cuda.is_available() and device != "cpu"
        dist.init_process_group("nccl" if on_gpu else "gloo")
        if on_gpu:
            device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
            torch.cuda.set_device(device)
    first = not dist.is_initialized() or dist.get_rank() == 0
    with quiet_transformers():
        # These checks run before the target's weights are loaded.
        try:
            described = text_config(AutoConfig.from_pretrained(args.target))
            tokenizer = AutoTokenizer.from_pretrained(args.target)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"{args.target} holds no model with a tokenizer that can be loaded: {error}"
            ) from error
        depth, size = described.num_hidden_layers, described.vocab_size
        stages = args.stages if len(args.stages) > 1 else args.stages[0]
        ranges = cut(depth, stages, list).ranges
        if layers is None:  # then drafting takes no longer than a stage (SPD section 3.4)
            layers = max(1, min(end - begin for begin, end in ranges) - 1)
        if args.vocabulary is not None and not 1 <= args.vocabulary <= size:
            raise ValueError(f"a draft vocabulary of {args.vocabulary} tokens: between 1 and the target's {size}")
        with working("reading the data"):
            examples, lost = data.load_examples(args.data, tokenizer, args.length, truncate=args.truncate)
            if args.held_out:
                held, _ = data.load_examples(args.held_out, tokenizer, args.length, truncate=args.truncate)
            else:
                examples, held = data.split(examples, args.validation, settings.seed)
        highest = max(int(e.ids.max()) for e in (*examples, *held))
        if highest >= size:
            raise ValueError(
                f"the tokenizer gives id {highest}, the target has {size} tokens: they do not belong together"
            )
        with working("loading the target"):
            model = load_model(args.target, dtype=args.dtype, device=device)
    if args.resume:
        config = DraftModuleConfig.load(folder)
        config.require(model, ranges)
        if config.layers != layers:
            raise ValueError(f"the module in {folder} has {config.layers} layers, --layers says {layers}")
    else:
        ids = None
        if args.vocabulary is not None:
            ids = data.frequent_tokens(examples, args.vocabulary, _ends(model))
        config = DraftModuleConfig.for_target(model, ranges, layers=layers, vocabulary=ids, types=args.types)
    module = DraftModule.of_target(model, config).to(model.device)
    if first:
        tokens, learnt = sum(len(e.ids) for e in examples), sum(int(e.wanted.sum()) for e in examples)
        parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
        say(
            f"{len(examples)} examples, {tokens:,} tokens, {learnt:,} of them to learn ({lost}); {len(held)} held out; "
            f"{parameters:,} parameters, anchors {' '.join(map(str, config.anchors))}"
        )
    batches = data.Batches(examples, args.batch, settings.seed)
    checks = [data.collate(held[at : at + args.batch]) for at in range(0, len(held), args.batch)][:_VALIDATION_BATCHES]
    try:
        record: dict[str, Any] = train(
            model, module, batches.__getitem__, settings, folder, held_out=checks, resume=args.resume
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
    """The end tokens, which every draft vocabulary needs."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
