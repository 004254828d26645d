"""``pipespec train-draft`` and ``pipespec spd``: train a draft that reads the target's hidden states, or import a published draft module."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from pipespec.cli.options import DTYPES, Subparsers, check_output_folder, flag, option
from pipespec.process.progress import quiet_transformers, say, working
from pipespec_train import recipe as recipes
from pipespec_train.settings import TrainingSettings

_VALIDATION_BATCHES = 16


_LIMITS = ("steps", "epochs", "tokens", "minutes")


def _of_settings(limits: bool) -> list[tuple[Any, ...]]:
    """Rows of the options that are fields of the settings: those that limit the run, or the others."""
    rows: list[tuple[Any, ...]] = []
    for each in fields(TrainingSettings):
        if (each.name in _LIMITS) == limits:
            kind = next(kind for kind in (int, float, str, bool) if str(each.type).startswith(kind.__name__))
            how, name = each.metadata, each.name.replace("_", "-")
            rows.append((name, how["metavar"], kind, each.default, how["text"], *filter(None, [how["choices"]])))
    return rows


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
        ("types", "N", int, None, "maximum number of anchors (default: one per stage, plus one)"),
        ("anchors", "K", int, None, "hidden states that feed the module: 0, the embedding, and outputs of layers (k: layer k - 1)", "+"),
        ("vocabulary", "N", int, None, "draft only the N most frequent tokens (default: all)"),
        ("dtype", None, str, "float32", "dtype of the target", DTYPES),
        ("device", "D", str, None, "cpu or cuda; default: cpu, or one GPU per process with several processes"),
    ],
    "data": [
        ("length", "N", int, 512, "maximum number of tokens of an example"),
        ("truncate", None, bool, False, "cut longer conversations instead of dropping them"),
        ("held-out", "PATH", str, [], "validate on these files", "+"),
        ("states-of", "PATH", str, None, "read the hidden states from another form of the target, e.g. its GGUF file, which a CPU reads faster"),
        ("keep-states", "FOLDER", Path, None, "keep the target's hidden states in files there, so that each text is read once"),
        ("validation", "P", float, 0.02, "without --held-out: validate on this share of the data"),
    ],
    "length of the run: one of": [
        ("epochs", "E", float, None, "passes over the data"),
        *_of_settings(limits=True),
    ],
    "training": [
        ("batch", "N", int, 4, "examples in a forward"),
        *_of_settings(limits=False),
        ("resume", None, bool, False, "continue from the last checkpoint in --out"),
    ],
}
# fmt: on
"""Options by group: name, metavar, type, default, help; ``"+"`` for several values, or the choices."""

_TRAINING = (
    "The target is the teacher and does not change. The draft learns the assistant's turns of conversations, and all of plain text. An interrupted "
    "run continues with --resume. On several GPUs: torchrun or accelerate launch, `-m pipespec spd train`."
)

_DEFAULTS: dict[str, Any] = {row[0].replace("-", "_"): row[3] for rows in _TABLE.values() for row in rows}
_DEFAULTS["forward_steps"] = 4
"""Values of the options that neither the command line nor the recipe gives."""


_MIN_LAYERS = 7
"""From here on the third hidden state, the middle and the third from the end are three."""

_OF_SPD = ("stages", "layers", "types", "full")
"""Options that mean something for SPD's draft modules only."""


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    group = commands.add_parser("spd", help="speculative pipeline decoding: train or import a draft module")
    inner = group.add_subparsers(required=True, metavar="command")
    what = "train a draft module for a target"
    module = inner.add_parser("train", help=what, description=f"{what.capitalize()} cut into stages. {_TRAINING}")
    module.set_defaults(command=run, kind="spd")
    add_training_options(module)
    convert = inner.add_parser("import", help="convert a published draft module", description=run_import.__doc__)
    convert.set_defaults(command=run_import)
    convert.add_argument("file", metavar="FILE", type=Path, help="published file, *.pt")
    option(convert, "target", "PATH", str, "model that the module was trained for", required=True)
    option(convert, "out", "FOLDER", Path, "folder of the converted module", required=True)
    vocabulary = "JSON file of the draft vocabulary, for modules without their own list"
    option(convert, "vocabulary", "FILE", Path, vocabulary)
    option(convert, "dtype", None, str, "dtype of the stored weights (bfloat16)", choices=DTYPES, default="bfloat16")
    what = "train a draft that reads the target's hidden states"
    kinds = "eagle3: a draft head (folder in the format of the package speculators); spd: a draft module, as spd train"
    draft = commands.add_parser("train-draft", help=what, description=f"{what.capitalize()}. {_TRAINING}")
    draft.set_defaults(command=run)
    option(draft, "kind", None, str, kinds, choices=("eagle3", "spd"), default="eagle3")
    what = "eagle3: draft tokens in a row that a batch trains (4)"
    option(draft, "forward-steps", "N", int, what, default=argparse.SUPPRESS)
    add_training_options(draft)
    return [module, convert, draft]


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
        from pipespec_spd.draft_module import CONFIG_FILE
        from pipespec_train.published import import_module
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
    """Train a draft on files, with the options of :func:`add_training_options`."""
    is_module = args.kind == "spd"
    if wrong := [name for name in (("forward_steps",) if is_module else _OF_SPD) if name in args]:
        other, what = ("eagle3", "a draft module") if is_module else ("spd", "an EAGLE-3 head")
        raise ValueError(f"--{wrong[0].replace('_', '-')} is for --kind {other}: leave it out for {what}")
    args = with_recipe(args)
    _check_options(args)
    with working("importing torch and transformers"):
        import torch.distributed as dist

        from pipespec.engine.target_reader import CONFIG
        from pipespec_spd.draft_module import CONFIG_FILE
        from pipespec_train import data
        from pipespec_train.trainer import RECORD, train
    given = {field.name: getattr(args, field.name) for field in fields(TrainingSettings)}
    # The number of steps of some epochs is known when the data are. One step stands for it in the checks until then.
    settings = TrainingSettings(
        **given | ({"steps": 1, "warmup": min(args.warmup, 0.5)} if args.epochs is not None else {})
    )
    _check_folder(args, CONFIG_FILE if is_module else CONFIG)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    device = _join_processes(args.device) if processes > 1 else args.device
    first = not dist.is_initialized() or dist.get_rank() == 0
    with quiet_transformers():
        examples, held, lost = _examples(args, settings.seed)
        model, student, reader = _load(args, examples, device)
    if first:
        tokens, trained = sum(len(e.ids) for e in examples), sum(int(e.wanted.sum()) for e in examples)
        parameters = sum(p.numel() for p in student.module.parameters() if p.requires_grad)
        say(
            f"{len(examples)} examples, {tokens:,} tokens, {trained:,} of them to learn ({lost}); {len(held)} held out; "
            f"{parameters:,} parameters, anchors {' '.join(map(str, student.anchors))}"
        )
    batches = data.Batches(examples, args.batch, settings.seed)
    if args.epochs is not None:
        settings = TrainingSettings(**given | {"steps": batches.steps(args.epochs, args.accumulate, processes)})
    checks = [data.collate(held[at : at + args.batch]) for at in range(0, len(held), args.batch)][:_VALIDATION_BATCHES]
    more: dict[str, Any] = {
        "held_out": checks,
        "resume": args.resume,
        "data": batches.digest(),
        "states": args.keep_states,
        "reader": reader,
    }
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


def _check_options(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that are missing or do not fit together."""
    for name in ("target", "data", "out", *(("stages",) if args.kind == "spd" else ())):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing" + (f", and {args.recipe} has none" if args.recipe else ""))
    if sum(getattr(args, name) is not None for name in _LIMITS) != 1:
        raise ValueError("give exactly one of --steps, --epochs, --tokens and --minutes")
    if args.kind == "spd" and args.types is not None and args.anchors is not None:
        raise ValueError("give --types or --anchors, not both")
    for name in ("batch", "accumulate", "forward_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")


def _check_folder(args: argparse.Namespace, file: str) -> None:
    """Raise an error for an ``--out`` that holds another draft, or nothing to resume."""
    from pipespec_train.trainer import CHECKPOINT

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


def _examples(args: argparse.Namespace, seed: int) -> tuple[Any, Any, Any]:
    """Training and held-out examples, and what was left out, all before the target's weights are loaded."""
    from transformers import AutoConfig, AutoTokenizer

    from pipespec.models.properties import text_config
    from pipespec_train import data

    try:
        described = text_config(AutoConfig.from_pretrained(args.target))
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{args.target} holds no model with a tokenizer that can be loaded: {error}") from error
    size = described.vocab_size
    if args.kind == "spd":
        _ranges(args, described)
    elif args.anchors is None and described.num_hidden_layers < _MIN_LAYERS:
        raise ValueError(
            f"EAGLE-3's three hidden states are of a target with {_MIN_LAYERS} layers at least, and this one has {described.num_hidden_layers}: "
            "name them with --anchors"
        )
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


def _load(args: argparse.Namespace, examples: Any, device: str | None) -> tuple[Any, Any, Any]:
    """The target, the draft that is trained (a new one, or that of the run that is resumed), and the form of the target whose states it reads."""
    from pipespec.models.loading import load_model
    from pipespec.models.properties import end_tokens, text_config
    from pipespec_train import data

    with working("loading the target"):
        model = load_model(args.target, dtype=args.dtype, device=device)
        reader = model if args.states_of is None else load_model(args.states_of, device=device)
    shape = attrgetter("num_hidden_layers", "hidden_size", "vocab_size")
    if (found := shape(text_config(reader.config))) != (wanted := shape(text_config(model.config))):
        raise ValueError(
            f"--states-of {args.states_of} is another model than --target: layers, hidden size and vocabulary are {found}, not {wanted}"
        )
    ids = None
    if args.vocabulary is not None:
        ids = data.frequent_tokens(examples, args.vocabulary, end_tokens(model))
    return model, _student(args, model, ids), reader


def _ranges(args: argparse.Namespace, config: Any) -> Any:
    """The layers of each of ``--stages``."""
    from pipespec_spd.partition import cut

    return cut(config.num_hidden_layers, args.stages if len(args.stages) > 1 else args.stages[0]).ranges


def _student(args: argparse.Namespace, model: Any, vocabulary: list[int] | None) -> Any:
    """The new draft, or that of the folder to resume, as what :func:`pipespec_train.trainer.train` trains."""
    from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
    from pipespec_train.heads import HeadStudent, head_for
    from pipespec_train.students import PipelineStudent

    if args.kind == "eagle3":
        return HeadStudent(head_for(model, vocabulary, args.anchors), model, args.forward_steps, is_new=True)
    ranges = _ranges(args, model.config)
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
    return PipelineStudent(DraftModule.of_target(model, config).to(model.device), is_new=True)
