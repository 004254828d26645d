"""``pipespec spd``: train a draft module on files, or import a published one."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipespec.cli.options import DTYPES, Subparsers, check_output_folder, flag, option
from pipespec.process.progress import quiet_transformers, say, working
from pipespec.spd.training import recipe as recipes

_VALIDATION_BATCHES = 16


# fmt: off
_TABLE: dict[str, list[tuple[Any, ...]]] = {
    "": [
        ("target", "PATH", str, None, "model that the module drafts for"),
        ("data", "PATH", str, None, "text, .jsonl, .json or .parquet files, or folders of them", "+"),
        ("out", "FOLDER", Path, None, "module, checkpoint and record"),
        ("stages", "N", int, None, "number of stages of the target, or the layers of each stage", "+"),
        ("recipe", "FILE", str, None, f"options from a TOML file, or from a recipe of the package ({', '.join(recipes.names())}); options of the command line take "
                                      "precedence"),
        ("layers", "N", int, None, "decoder blocks of the module; default: one less than a stage has"),
        ("types", "N", int, None, "most anchors (default: one per stage, plus one)"),
        ("anchors", "K", int, None, "hidden states that feed the module: 0, the embedding, and outputs of layers (k: layer k - 1)", "+"),
        ("vocabulary", "N", int, None, "draft only the N most frequent tokens (default: all)"),
        ("dtype", None, str, "float32", "dtype of the target", DTYPES),
        ("device", "D", str, None, "cpu or cuda; default: cpu, or one GPU per process with several processes"),
    ],
    "data": [
        ("length", "N", int, 512, "most tokens of an example"),
        ("truncate", None, bool, False, "cut longer conversations instead of dropping them"),
        ("held-out", "PATH", str, [], "validate on these files", "+"),
        ("validation", "P", float, 0.02, "without --held-out: validate on this share of the data"),
    ],
    "length of the run: one of": [
        ("steps", "N", int, None, "optimizer steps"),
        ("epochs", "E", float, None, "passes over the data"),
        ("tokens", "N", int, None, "training tokens, padding not counted"),
        ("minutes", "M", float, None, "wall-clock minutes; a resumed run then differs from an uninterrupted one"),
    ],
    "training": [
        ("batch", "N", int, 4, "examples in a forward"),
        ("accumulate", "N", int, 1, "forwards in a step"),
        ("rate", "R", float, 1e-4, "peak learning rate"),
        ("rate-schedule", None, str, "cosine", "how the rate falls", ("cosine", "linear")),
        ("warmup", "W", float, 0.02, "share of the run in which the rate rises; from 1 on: steps"),
        ("optimizer", None, str, "adamw", "adamw, or muon for all matrices but the head", ("adamw", "muon")),
        ("decay", "W", float, 0.0, "weight decay"),
        ("clip", "C", float, 1.0, "largest norm of the gradient"),
        ("freeze-head", None, bool, False, "the head keeps the target's weights"),
        ("temperature", "T", float, 1.0, "temperature of both distributions"),
        ("argmax-weight", "W", float, 0.0, "weight of the cross entropy with the target's argmax"),
        ("full", "P", float, 0.5, "share of the steps with all stages filled"),
        ("amp", None, bool, False, "bf16 matrix products; weights and optimizer state stay float32"),
        ("validate-every", "N", int, 100, "in steps"),
        ("save-every", "N", int, None, "write a checkpoint after so many steps"),
        ("save-minutes", "M", float, 10.0, "longest time between two checkpoints, in minutes"),
        ("seed", "N", int, 42, "seed of all draws"),
        ("resume", None, bool, False, "continue from the last checkpoint in --out"),
    ],
    "prediction": [
        ("dry-run", None, bool, False, "say what would be trained and what it costs by counted operations; nothing is trained or written"),
        ("gpus", "N", int, [1, 8], "hours on these numbers of GPUs", "+"),
        ("peak", "T", float, 989.0, "peak of a GPU in Tflop/s, dense bf16 products; the default is an H100 SXM's"),
        ("utilisation", "U", float, 0.35, "share of the peak that training reaches, an assumption"),
        ("link", "G", float, 300.0, "GB/s between GPUs"),
    ],
}
# fmt: on
"""Options by group: name, metavar, type, default, help; ``"+"`` for several values, or the choices."""

_DEFAULTS: dict[str, Any] = {row[0].replace("-", "_"): row[3] for rows in _TABLE.values() for row in rows}
"""Values of the options that neither the command line nor the recipe gives."""

_LIMITS = ("steps", "epochs", "tokens", "minutes")


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    """Add the command group and its commands."""
    group = commands.add_parser("spd", help="speculative pipeline decoding: train or import a draft module")
    inner = group.add_subparsers(required=True, metavar="command")
    parser = inner.add_parser("train", help="train a draft module for a target", description=run.__doc__)
    parser.set_defaults(command=run)
    _add_options(parser)
    convert = inner.add_parser("import", help="convert a published draft module", description=run_import.__doc__)
    convert.set_defaults(command=run_import)
    convert.add_argument("file", metavar="FILE", type=Path, help="published file, *.pt")
    convert.add_argument("--target", metavar="PATH", required=True, help="model that the module was trained for")
    convert.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="folder of the converted module")
    convert.add_argument(
        "--vocabulary",
        metavar="FILE",
        type=Path,
        help="JSON file of the draft vocabulary, for modules without their own list",
    )
    convert.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the stored weights (bfloat16)")
    return [parser, convert]


def _add_options(train: argparse.ArgumentParser) -> None:
    """Add the options without their defaults, so that what was given can be told from what was not."""
    for title, rows in _TABLE.items():
        group: Any = train.add_argument_group(title) if title else train
        for name, metavar, kind, default, text, *more in rows:
            if kind is bool:
                flag(group, name, text, default=argparse.SUPPRESS)
                continue
            if default not in (None, []):
                text += f" ({' '.join(map(str, default)) if isinstance(default, list) else default})"
            how = {"nargs": "+"} if more == ["+"] else {"choices": more[0]} if more else {}
            option(group, name, metavar, kind, text, default=argparse.SUPPRESS, **how)


def _with_recipe(given: argparse.Namespace) -> tuple[argparse.Namespace, recipes.Recipe | None]:
    """All options: given ones, those of the recipe, and defaults. And the recipe.

    Raises:
        ValueError: The recipe has an option that this command has not, or a value that it does not take.
    """
    if "recipe" not in given:
        return argparse.Namespace(**_DEFAULTS | vars(given)), None
    recipe = recipes.load(given.recipe)
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    _add_options(parser)
    try:
        chosen, unknown = parser.parse_known_args(recipe.arguments())
    except argparse.ArgumentError as error:
        raise ValueError(f"recipe {given.recipe}: {error}") from error
    if unknown or "recipe" in chosen:
        raise ValueError(f"recipe {given.recipe}: not options of this command: {' '.join(unknown) or '--recipe'}")
    values = vars(chosen)
    if any(name in given for name in _LIMITS):  # this start sets the length of the run
        values = {name: value for name, value in values.items() if name not in _LIMITS}
    return argparse.Namespace(**_DEFAULTS | values | vars(given)), recipe


def run_import(args: argparse.Namespace) -> int:
    """Convert a draft module that the authors of SPD have published into a folder that SpeculativePipeline takes. The target is loaded, and the
    module is checked against it."""
    check_output_folder(args.out)
    with working("importing torch and transformers"):
        import torch

        from pipespec.models.loading import load_model
        from pipespec.spd.draft_module import CONFIG_FILE
        from pipespec.spd.published import import_module
    if (args.out / CONFIG_FILE).exists():
        raise ValueError(f"{args.out} holds a draft module already: give another --out")
    with quiet_transformers():
        module = import_module(args.file, load_model(args.target, dtype="auto"), vocabulary=args.vocabulary)
    module.save(args.out, None if args.dtype == "auto" else getattr(torch, args.dtype))
    config = module.config
    use = ["pipespec", "generate", "--system", "spd", "--target", args.target, "--draft", str(args.out)]
    say(
        f"{args.out}: {config.n} stages, {config.layers} blocks, anchors {list(config.anchors)}, {config.logits} draft tokens; use it with: {shlex.join(use)}"
    )
    return 0


def run(args: argparse.Namespace) -> int:
    """Train a draft module for a target cut into stages (speculative pipeline decoding). The target is the teacher and does not change. The module
    learns the assistant's turns of conversations, and all of plain text. On several GPUs: torchrun or accelerate launch,
    `-m pipespec spd train`."""
    args, recipe = _with_recipe(args)
    for name in ("target", "stages") if args.dry_run else ("target", "data", "out", "stages"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing" + (f", and {args.recipe} has none" if recipe else ""))
    if sum(getattr(args, name) is not None for name in _LIMITS) != 1:
        raise ValueError("give exactly one of --steps, --epochs, --tokens and --minutes")
    if args.types is not None and args.anchors is not None:
        raise ValueError("give --types or --anchors, not both")
    for name in ("batch", "accumulate"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.dry_run:
        return _predict(args, recipe)
    with working("importing torch and transformers"):
        import torch
        import torch.distributed as dist
        from transformers import AutoConfig, AutoTokenizer

        from pipespec.models.loading import load_model
        from pipespec.models.properties import end_tokens, text_config
        from pipespec.spd.draft_module import CONFIG_FILE, DraftModule, DraftModuleConfig
        from pipespec.spd.partition import cut
        from pipespec.spd.training import data
        from pipespec.spd.training.trainer import CHECKPOINT, RECORD, TrainingSettings, train
    given = {field.name: getattr(args, field.name) for field in fields(TrainingSettings)}
    # The number of steps of some epochs is known when the data are. One step stands for it in the checks until then.
    settings = TrainingSettings(
        **given | ({"steps": 1, "warmup": min(args.warmup, 0.5)} if args.epochs is not None else {})
    )
    folder, layers, device = args.out, args.layers, args.device
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_output_folder(folder)
    if (folder / CONFIG_FILE).exists() and not args.resume:
        raise ValueError(f"{folder} holds a draft module already: continue with --resume, or give another --out")
    if args.resume and not (folder / CHECKPOINT).is_file():
        raise FileNotFoundError(f"nothing to resume: {folder / CHECKPOINT} does not exist")
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
        layers = _blocks(layers, ranges)
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
        if args.anchors is not None and tuple(args.anchors) != config.anchors:
            raise ValueError(
                f"the module in {folder} has the anchors {' '.join(map(str, config.anchors))}, not those of --anchors"
            )
    else:
        ids = None
        if args.vocabulary is not None:
            ids = data.frequent_tokens(examples, args.vocabulary, end_tokens(model))
        config = DraftModuleConfig.for_target(
            model, ranges, layers=layers, vocabulary=ids, types=args.types, anchors=args.anchors
        )
    module = DraftModule.of_target(model, config).to(model.device)
    if first:
        tokens, learnt = sum(len(e.ids) for e in examples), sum(int(e.wanted.sum()) for e in examples)
        parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
        say(
            f"{len(examples)} examples, {tokens:,} tokens, {learnt:,} of them to learn ({lost}); {len(held)} held out; "
            f"{parameters:,} parameters, anchors {' '.join(map(str, config.anchors))}"
        )
    batches = data.Batches(examples, args.batch, settings.seed)
    if args.epochs is not None:
        settings = TrainingSettings(**given | {"steps": batches.steps(args.epochs, args.accumulate, processes)})
    checks = [data.collate(held[at : at + args.batch]) for at in range(0, len(held), args.batch)][:_VALIDATION_BATCHES]
    try:
        record: dict[str, Any] = train(
            model,
            module,
            batches.__getitem__,
            settings,
            folder,
            held_out=checks,
            resume=args.resume,
            data=batches.digest(),
        )
    finally:
        if processes > 1:
            dist.destroy_process_group()
    if first:
        last = record["history"][-1]
        print(
            f"{folder}: {record['steps']} steps, held-out KL {last['held_out_loss']:.3f}, agreement {last['agreement']:.3f}; "
            f"the record is {RECORD}"
        )
    return 0


def _blocks(layers: int | None, ranges: Any) -> int:
    """Blocks of the module. The default makes drafting take no longer than a stage (SPD, section 3.4)."""
    return max(1, min(end - begin for begin, end in ranges) - 1) if layers is None else layers


def _predict(args: argparse.Namespace, recipe: recipes.Recipe | None) -> int:
    """Print what the run would train, and its hours."""
    with working("importing transformers"):
        from transformers import AutoConfig, AutoTokenizer

        from pipespec.models.properties import text_config
        from pipespec.spd.draft_module import DraftModuleConfig
        from pipespec.spd.partition import cut
        from pipespec.spd.training import cost, data
    if args.minutes is not None:
        raise ValueError(
            "--minutes limits the time, so there is nothing to predict: give --steps, --epochs or --tokens"
        )
    hardware = cost.Hardware(args.peak, args.utilisation, args.link)
    if min(args.gpus) < 1:
        raise ValueError(f"--gpus must be at least 1, not {min(args.gpus)}")
    if recipe is not None and recipe.target and args.target == recipe.options.get("target"):
        described = dict(recipe.target)
        try:
            config = AutoConfig.for_model(described.pop("model_type"), **described)
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"recipe {args.recipe}: [target] is no config of a model: {error}") from error
    else:
        config = text_config(AutoConfig.from_pretrained(args.target))
    ranges = cut(config.num_hidden_layers, args.stages if len(args.stages) > 1 else args.stages[0], list).ranges
    if args.vocabulary is not None and not 1 <= args.vocabulary <= config.vocab_size:
        raise ValueError(
            f"a draft vocabulary of {args.vocabulary} tokens: between 1 and the target's {config.vocab_size}"
        )
    module = DraftModuleConfig.for_config(
        config,
        ranges,
        layers=_blocks(args.layers, ranges),
        vocabulary=None if args.vocabulary is None else range(args.vocabulary),
        types=args.types,
        anchors=args.anchors,
    )
    if args.data is not None:
        with working("reading the data"):
            found, _ = data.load_examples(
                args.data, AutoTokenizer.from_pretrained(args.target), args.length, truncate=args.truncate
            )
        examples, mean = len(found), sum(len(e.ids) for e in found) / len(found)
        origin = "counted in --data"
    elif recipe is not None and recipe.examples and recipe.mean_tokens:
        examples, mean, origin = recipe.examples, recipe.mean_tokens, "assumed by the recipe"
    else:
        raise ValueError(
            "a prediction needs the number of examples and their length: give --data, or a --recipe with [data]"
        )
    # The step is that of the largest machine, whatever the number of GPUs: fewer GPUs accumulate more.
    per_step = args.batch * args.accumulate * max(args.gpus)
    sequences = examples * (args.epochs or 0.0)
    if args.steps is not None:
        sequences = float(args.steps * per_step)
    if args.tokens is not None:
        sequences = args.tokens / mean
    one = cost.sequence_cost(module, round(mean), full=args.full, freeze_head=args.freeze_head)
    run = cost.run_cost(module, sequences, mean, full=args.full, freeze_head=args.freeze_head)
    lines = [
        f"target {args.target}: {config.num_hidden_layers} layers in stages of {' '.join(str(e - b) for b, e in ranges)}",
        f"module: {module.layers} blocks, anchors {' '.join(map(str, module.anchors))}, {module.logits:,} draft tokens, "
        f"{run.parameters / 1e6:,.0f} million trained parameters; {run.state_bytes() / 2**30:.1f} GiB for them, their gradients and AdamW",
        f"data: {examples:,} examples of {mean:,.0f} tokens in the mean ({origin})",
        f"run: {run.tokens / 1e6:,.1f} million tokens, {sequences / per_step:,.0f} steps of {per_step} sequences",
        f"operations per sequence: target's forward {one.teacher / 1e12:.3g} Tflop, module {one.module / 1e12:.3g} Tflop; "
        f"in all {run.flops / 1e18:.3g} Eflop",
        f"assumed: {hardware.peak:g} Tflop/s per GPU, of which {hardware.utilisation:.0%} are reached; gradients summed over "
        f"{hardware.link:g} GB/s behind each step; no time for reading, validation and checkpoints; attention at the mean length",
        *(
            f"predicted: {run.hours(gpus, per_step, hardware):,.1f} hours on {gpus} GPU{'s' * (gpus > 1)}"
            for gpus in args.gpus
        ),
    ]
    print("\n".join(lines))
    return 0
