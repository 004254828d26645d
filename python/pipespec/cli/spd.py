"""``pipespec spd``: train a draft module on files, or import a published one."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
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
}
# fmt: on
"""Options by group: name, metavar, type, default, help; ``"+"`` for several values, or the choices."""

_DEFAULTS: dict[str, Any] = {row[0].replace("-", "_"): row[3] for rows in _TABLE.values() for row in rows}
"""Values of the options that neither the command line nor the recipe gives."""

_LIMITS = ("steps", "epochs", "tokens", "minutes")


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    group = commands.add_parser("spd", help="speculative pipeline decoding: train or import a draft module")
    inner = group.add_subparsers(required=True, metavar="command")
    parser = inner.add_parser("train", help="train a draft module for a target", description=run.__doc__)
    parser.set_defaults(command=run)
    add_training_options(parser)
    convert = inner.add_parser("import", help="convert a published draft module", description=run_import.__doc__)
    convert.set_defaults(command=run_import)
    convert.add_argument("file", metavar="FILE", type=Path, help="published file, *.pt")
    option(convert, "target", "PATH", str, "model that the module was trained for", required=True)
    option(convert, "out", "FOLDER", Path, "folder of the converted module", required=True)
    vocabulary = "JSON file of the draft vocabulary, for modules without their own list"
    option(convert, "vocabulary", "FILE", Path, vocabulary)
    option(convert, "dtype", None, str, "dtype of the stored weights (bfloat16)", choices=DTYPES, default="bfloat16")
    return [parser, convert]


def add_training_options(train: argparse.ArgumentParser) -> None:
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


def with_recipe(given: argparse.Namespace) -> argparse.Namespace:
    """All options: given ones, those of the recipe, and defaults.

    Raises:
        ValueError: The recipe has an option that this command has not, or a value that it does not take.
    """
    if "recipe" not in given:
        return argparse.Namespace(**_DEFAULTS | vars(given))
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_training_options(parser)
    try:
        chosen, unknown = parser.parse_known_args(recipes.arguments(recipes.load(given.recipe)))
    except argparse.ArgumentError as error:
        raise ValueError(f"recipe {given.recipe}: {error}") from error
    if unknown or "recipe" in chosen:
        raise ValueError(f"recipe {given.recipe}: not options of this command: {' '.join(unknown) or '--recipe'}")
    values = vars(chosen)
    if any(name in given for name in _LIMITS):  # this start sets the length of the run
        values = {name: value for name, value in values.items() if name not in _LIMITS}
    return argparse.Namespace(**_DEFAULTS | values | vars(given))


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
    args = with_recipe(args)
    check_options(args, ("target", "data", "out", "stages"))
    if args.types is not None and args.anchors is not None:
        raise ValueError("give --types or --anchors, not both")
    return train_on_files(args, ModuleKind(args))


def train_on_files(args: argparse.Namespace, kind: ModuleKind) -> int:
    """Train a draft on files. ``args``: all options of :func:`add_training_options`."""
    with working("importing torch and transformers"):
        import torch.distributed as dist

        from pipespec.spd.training import data
        from pipespec.spd.training.settings import TrainingSettings
        from pipespec.spd.training.trainer import RECORD, train
    given = {field.name: getattr(args, field.name) for field in fields(TrainingSettings)}
    # The number of steps of some epochs is known when the data are. One step stands for it in the checks until then.
    settings = TrainingSettings(
        **given | ({"steps": 1, "warmup": min(args.warmup, 0.5)} if args.epochs is not None else {})
    )
    _check_folder(args, kind.file)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    device = _join_processes(args.device) if processes > 1 else args.device
    first = not dist.is_initialized() or dist.get_rank() == 0
    with quiet_transformers():
        examples, held, lost = _examples(args, kind, settings.seed)
        model, student = _load(args, kind, examples, device)
    if first:
        tokens, learnt = sum(len(e.ids) for e in examples), sum(int(e.wanted.sum()) for e in examples)
        parameters = sum(p.numel() for p in student.module.parameters() if p.requires_grad)
        say(
            f"{len(examples)} examples, {tokens:,} tokens, {learnt:,} of them to learn ({lost}); {len(held)} held out; "
            f"{parameters:,} parameters, anchors {' '.join(map(str, student.anchors))}"
        )
    batches = data.Batches(examples, args.batch, settings.seed)
    if args.epochs is not None:
        settings = TrainingSettings(**given | {"steps": batches.steps(args.epochs, args.accumulate, processes)})
    checks = [data.collate(held[at : at + args.batch]) for at in range(0, len(held), args.batch)][:_VALIDATION_BATCHES]
    more: dict[str, Any] = {"held_out": checks, "resume": args.resume, "data": batches.digest()}
    try:
        record = train(model, student, batches.__getitem__, settings, args.out, **more)
    finally:
        if processes > 1:
            dist.destroy_process_group()
    if first:
        last = record["history"][-1]
        print(
            f"{args.out}: {record['steps']} steps, held-out KL {last['held_out_loss']:.3f}, agreement {last['agreement']:.3f}; "
            f"the record is {RECORD}"
        )
    return 0


def check_options(args: argparse.Namespace, needed: Sequence[str]) -> None:
    """Raise ``ValueError`` for options that are missing or do not fit together, for any kind of draft."""
    for name in needed:
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing" + (f", and {args.recipe} has none" if args.recipe else ""))
    if sum(getattr(args, name) is not None for name in _LIMITS) != 1:
        raise ValueError("give exactly one of --steps, --epochs, --tokens and --minutes")
    for name in ("batch", "accumulate"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")


def _check_folder(args: argparse.Namespace, file: str) -> None:
    """Raise an error for an ``--out`` that holds another draft, or nothing to resume."""
    from pipespec.spd.training.trainer import CHECKPOINT

    check_output_folder(args.out)
    found = next((name for name in (file, CHECKPOINT) if (args.out / name).exists()), None)
    if found is not None and not args.resume:
        raise ValueError(
            f"{args.out} holds a draft module already ({found}): continue with --resume, or give another --out"
        )
    if args.resume and not (args.out / CHECKPOINT).is_file():
        raise FileNotFoundError(f"nothing to resume: {args.out / CHECKPOINT} does not exist")


def _join_processes(device: str | None) -> str | None:
    """Join the group of several processes. Returns the device of this one."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return device
    on_gpu = torch.cuda.is_available() and device != "cpu"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
        torch.cuda.set_device(device)
    return device


def _examples(args: argparse.Namespace, kind: ModuleKind, seed: int) -> tuple[Any, Any, Any]:
    """Training and held-out examples, and what was left out, all before the target's weights are loaded."""
    from transformers import AutoConfig, AutoTokenizer

    from pipespec.models.properties import text_config
    from pipespec.spd.training import data

    try:
        described = text_config(AutoConfig.from_pretrained(args.target))
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{args.target} holds no model with a tokenizer that can be loaded: {error}") from error
    size = described.vocab_size
    kind.check(described)
    if args.vocabulary is not None and not 1 <= args.vocabulary <= size:
        raise ValueError(f"a draft vocabulary of {args.vocabulary} tokens: between 1 and the target's {size}")
    with working("reading the data"):
        examples, lost = data.load_examples(args.data, tokenizer, args.length, truncate=args.truncate)
        if args.held_out:
            held, _ = data.load_examples(args.held_out, tokenizer, args.length, truncate=args.truncate)
        else:
            examples, held = data.split(examples, args.validation, seed)
    if (highest := max(int(e.ids.max()) for e in (*examples, *held))) >= size:
        raise ValueError(f"the tokenizer gives id {highest}, the target has {size} tokens: they do not belong together")
    return examples, held, lost


def _load(args: argparse.Namespace, kind: ModuleKind, examples: Any, device: str | None) -> tuple[Any, Any]:
    """The target, and the draft that is trained: a new one, or that of the run that is resumed."""
    from pipespec.models.loading import load_model
    from pipespec.models.properties import end_tokens
    from pipespec.spd.training import data

    with working("loading the target"):
        model = load_model(args.target, dtype=args.dtype, device=device)
    ids = None
    if args.vocabulary is not None:
        ids = data.frequent_tokens(examples, args.vocabulary, end_tokens(model))
    return model, kind.make(model, ids)


class ModuleKind:
    """Draft modules of SPD, as :func:`train_on_files` trains them. ``file``: in its folder, by which a draft is known to be there."""

    def __init__(self, args: argparse.Namespace) -> None:
        from pipespec.spd.draft_module import CONFIG_FILE

        self.args, self.file = args, CONFIG_FILE

    def check(self, config: Any) -> None:
        """Check the options against the target's config, before weights are loaded."""
        from pipespec.spd.partition import cut

        stages = self.args.stages if len(self.args.stages) > 1 else self.args.stages[0]
        self.ranges = cut(config.num_hidden_layers, stages, list).ranges

    def make(self, model: Any, vocabulary: list[int] | None) -> Any:
        """The new draft, or that of the folder to resume, for :func:`pipespec.spd.training.trainer.train`."""
        from pipespec.spd.draft_module import DraftModule, DraftModuleConfig
        from pipespec.spd.training.students import PipelineStudent

        args, ranges = self.args, self.ranges
        # By default drafting takes no longer than a stage (SPD, section 3.4).
        layers = max(1, min(end - begin for begin, end in ranges) - 1) if args.layers is None else args.layers
        if args.resume:
            config = DraftModuleConfig.load(args.out)
            config.require(model, ranges)
            if config.layers != layers:
                raise ValueError(f"the module in {args.out} has {config.layers} layers, --layers says {layers}")
            if args.anchors is not None and tuple(args.anchors) != config.anchors:
                raise ValueError(
                    f"the module in {args.out} has the anchors {' '.join(map(str, config.anchors))}, not those of --anchors"
                )
        else:
            config = DraftModuleConfig.for_target(
                model, ranges, layers=layers, vocabulary=vocabulary, types=args.types, anchors=args.anchors
            )
        return PipelineStudent(DraftModule.of_target(model, config).to(model.device))
