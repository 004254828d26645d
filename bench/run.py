"""Measure how fast systems generate the same texts, into a folder of results.

    python -m bench.run --out build/bench/generate                                       # the bundled family
    python -m bench.run --prompts HumanEval.jsonl --samples 20 --lookahead 2 4 8 --out sweep
    python -m bench.run --config bench/configs/pipespec_lookahead.toml --planted --out shapes    # without weights and prompts
    python -m bench.run --planted 160M 1B --full-size --dtype bfloat16 --systems static assisted --out planted

Systems take turns prompt by prompt, and every text is compared with that of generate(). Each text is a JSON line in --out. A second start with the
same options does what is missing. Exit status 1 if texts differ in float32. ``python -m bench.tables DIR/summary.json`` prints the tables again,
and ``python -m bench.plot DIR`` draws the results.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bench.baselines  # adds the kinds of the papers
import bench.real  # noqa: F401  adds those of real models
from bench import datasets, planted, tables
from bench.config import BenchConfig, DatasetRequest, add_options, configured, load_config, with_prompts
from bench.harness import copy_bytes_per_second, read_bytes_per_second, refuse_without_gpu
from bench.machine import provenance
from bench.runner import Dataset, Runner
from bench.samples import ResultsFolder
from bench.systems import KINDS, Family, Workload, draft_names, systems_of
from pipespec.checks.calls import device_facts
from pipespec.checks.devices import arrange
from pipespec.cli.options import check_output_folder
from pipespec.demo import draft_module_path, family_path, prompts
from pipespec.models.loading import load_model
from pipespec.models.tokenizers import load_tokenizer
from pipespec.process.progress import aligned, quiet_transformers, say, working
from pipespec.registry import PLAIN
from pipespec_train.record_files import is_dataset

CALIBRATION = 2
"""Prompts that tune and warm up. They are not measured where a dataset has enough others."""

STEP_S = 0.03
"""Maximum seconds of a planted target's step: its shapes are divided until the weights can be read in this time."""

MEMORY_SHARE = 0.4
"""Share of the free memory that planted weights may take."""

POSITIONS = 1024
"""At least as many positions calibrate the agreement of planted models, and as many measure it."""


def load_models(config: BenchConfig) -> tuple[Family, dict[str, Any]]:
    """Load the models of a configuration; returns them and what the results say of them.

    Raises:
        FileNotFoundError, ValueError, DoesNotFit: Those of ``load_model``.
    """
    assert config.target is not None
    options: dict[str, Any] = {"dtype": config.dtype or "auto", "trust_remote_code": config.trust_remote_code}
    device: Any = config.device[0] if len(config.device) == 1 else list(config.device)
    places = arrange([*config.drafts, config.target], device=device, **options) or [None] * (len(config.drafts) + 1)
    paths = dict(zip(draft_names(config.drafts), config.drafts, strict=True))
    drafts = {n: load_model(path, device=d, **options) for (n, path), d in zip(paths.items(), places, strict=False)}
    target = load_model(config.target, device=places[-1], **options)
    tokenizer = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    return Family(Path(config.target).name, target, drafts, tokenizer), {"target": config.target, "drafts": paths}


def plant_models(config: BenchConfig, rate: float) -> tuple[Family, dict[str, Any]]:
    """Make models of the configuration's shapes, divided until they fit this machine, which reads ``rate`` bytes per second.

    Raises:
        ValueError: The shapes do not fit.
    """
    on_gpu = config.device[0].startswith("cuda")
    dtype = getattr(torch, config.dtype or ("bfloat16" if on_gpu else "float32"))
    shapes, divisors = planted.SHAPES, (1, 1)
    if not config.full_size:
        min_layers = max(config.stages, default=2) if {"spd", "ppsd"} & set(config.systems) else 2
        memory = MEMORY_SHARE * device_facts([config.device[0]])[0].free
        shapes, divisors = planted.fitted(config.planted, memory, STEP_S * rate, dtype.itemsize, min_layers)
    prompt_tokens = min(64, *(d.typical_tokens for d in config.dataset))
    new_tokens = min(config.new_tokens, 128)
    chain = planted.plant(
        config.planted,
        config.agreement[0] if len(config.agreement) == 1 else config.agreement,
        seed=config.seed,
        device=config.device[0],
        dtype=dtype,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        texts=max(8, -(-POSITIONS // new_tokens)) if config.calibrated else 0,
        known=shapes,
        progress=say,
    )
    *drafts, target = chain.models
    names = config.planted[:-1]
    family = Family("planted " + " -> ".join(config.planted), target, dict(zip(names, drafts, strict=True)))
    record = chain.record() | {"divided": {"widths": divisors[0], "layers": divisors[1]}}
    paths = {name: f"planted {name}" for name in names}
    return family, {"target": family.name, "drafts": paths, "planted": record}


def prompts_of(config: BenchConfig, request: DatasetRequest, family: Family) -> Dataset:
    """The prompts of a dataset that fit the target: of a file, function heads for the bundled family, or random tokens for planted models and numbers.

    A file that is no dataset is a text to edit.

    Raises:
        ValueError: No prompt fits, or there is no file, or no chat template for ``chat_template``.
    """
    limit = getattr(family.target.config, "max_position_embeddings", None) or 1 << 30
    if family.tokenizer is None:
        count, tokens = config.samples or 8, min(request.typical_tokens, limit - config.new_tokens)
        if tokens < 1:
            raise ValueError(f"{config.new_tokens} new tokens: planted models take {limit} tokens; lower --new-tokens")
        ids = planted.random_prompts(family.target.config.vocab_size, count + CALIBRATION, tokens, config.seed + 3)
        rows = list(ids[:, None])
        return Dataset(request.name, "planted", {str(i): row for i, row in enumerate(rows[:count])}, rows[count:])
    if request.name.isdecimal() and request.file is None:
        ids = planted.random_prompts(family.tokenizer.vocab_size // 2, 1, int(request.name), config.seed + 3)
        return Dataset(request.name, "random", {"0": ids}, [ids])
    if request.name == HEADS.name and request.file is None:
        count = config.samples or 6
        form, files = "heads", ()
        asked = [datasets.Conversation(str(i), (t,)) for i, t in enumerate(prompts(count + CALIBRATION))]
    elif request.file is None:
        raise ValueError(f"no file for the dataset {request.name!r}: give --prompts {request.name}=FILE")
    else:
        files, file = (request.file,), Path(request.file)
        form, asked = datasets.read(file, request.format) if is_dataset(file) else ("text", [page(file, family)])
        count = config.samples or len(asked)
    if config.chat_template and not family.tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template: leave out --chat-template")
    encoded = {c.name: encode(family.tokenizer, c, config.chat_template) for c in asked}
    fitting = {name: ids for name, ids in encoded.items() if ids.shape[1] + config.new_tokens <= limit}
    if not fitting:
        raise ValueError(f"{request.name}: no prompt fits the {limit} tokens of the target; lower --new-tokens")
    if left_out := len(encoded) - len(fitting):
        what = f"with {config.new_tokens} new tokens they exceed {limit} tokens"
        say(f"{request.name}: {left_out} prompts are left out, as {what}")
    chosen = dict(list(fitting.items())[:count])
    rest = list(fitting.values())[len(chosen) :][:CALIBRATION]
    return Dataset(request.name, form, chosen, rest or [list(chosen.values())[-1]], files)


EDIT_TOKENS = 1400
"""Of a text to edit."""


def page(file: Path, family: Family) -> datasets.Conversation:
    """A request to edit a text."""
    text = file.read_text(encoding="utf-8")
    tokens = family.tokenizer(text, add_special_tokens=False)["input_ids"][:EDIT_TOKENS]
    asked = "Correct the spelling of this text and write it again, unchanged otherwise."
    return datasets.Conversation("0", (f"{asked}\n\n{family.tokenizer.decode(tokens)}",))


def encode(tokenizer: Any, conversation: datasets.Conversation, chat: bool) -> torch.Tensor:
    """The ids of the first turn's prompt, LongTensor ``[1, S]``."""
    if not chat:
        return tokenizer(conversation.turns[0], return_tensors="pt").input_ids
    return tokenizer.apply_chat_template(
        datasets.messages(conversation), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


HEADS = DatasetRequest(name="heads")
"""Function heads of the standard library, which the bundled family was not trained on."""


def completed(config: BenchConfig) -> BenchConfig:
    """A configuration with the bundled family where it names no model, and with prompts where it names none."""
    if config.planted:
        config = replace(config, target=None, dataset=config.dataset or (DatasetRequest(name="planted"),))
        if torch.cuda.is_available() and len(set(config.device)) == 1 and config.device[0].startswith("cuda"):
            return config
        # The file of the configuration may name GPUs that are not here.
        return replace(config, device=("cpu",), dtype=config.dtype if config.device == ("cpu",) else "float32")
    if config.target is None:
        if config.drafts:
            raise ValueError("--drafts needs a --target: the bundled family has its own drafts")
        say("no --target: using the bundled demo family, target + small + medium")
        paths = tuple(str(family_path(name)) for name in ("small", "medium"))
        module = config.module or (str(draft_module_path()),)
        config = replace(
            config, target=str(family_path("target")), drafts=paths, module=module, dtype=config.dtype or "float32"
        )
        config = replace(config, dataset=config.dataset or (HEADS,))
    if not config.dataset:
        raise ValueError("no prompts: give --prompts FILE")
    return config


def prepare(config: BenchConfig, folder: ResultsFolder, source: str | None = None) -> Runner:
    """Load the models and read the prompts. ``source``: name of the configuration file.

    Raises:
        ValueError: The options do not fit together, or no prompt fits the models.
        FileNotFoundError: A model or a file is missing.
        DoesNotFit: The models do not fit the memory.
    """
    began, config = time.monotonic(), completed(config)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    on_gpu = config.device[0].startswith("cuda")
    rate = copy_bytes_per_second(config.device[0]) if on_gpu else read_bytes_per_second(threads)
    family, about = plant_models(config, rate) if config.planted else load_models(config)
    found = [prompts_of(config, request, family) for request in config.dataset]
    longest = max(ids.shape[1] for d in found for ids in (*d.prompts.values(), *d.calibration))
    models = family.models
    run = {
        "title": config.title,
        "config": source,
        "dtype": str(family.target.dtype).removeprefix("torch."),
        "device": str(family.target.device),
        "devices": {name: str(model.device) for name, model in models.items()},
        "sampling": config.sampling,
        "seed": config.seed,
        "threads": threads,
        "new_tokens": config.new_tokens,
        "chat_template": config.chat_template,
        "repeats": config.repeats,
        "systems": list(config.systems),
        "prompts_of_a_file": config.samples,
    }
    about |= {
        "name": family.name,
        "parameters": {name: model.num_parameters() for name, model in models.items()},
        # The matrices of a GGUF file lie there in blocks.
        "bytes_per_step": {
            name: planted.bytes_per_step(model)
            for name, model in models.items()
            if hasattr(model.get_input_embeddings(), "weight") and hasattr(model.get_output_embeddings(), "weight")
        },
    }
    return Runner(
        folder,
        Workload(family, config.new_tokens, longest, threads, config.sampling),
        systems_of(config, list(family.drafts)),
        found,
        {
            "machine": provenance(threads),
            "family": about,
            "run": run,
            "bytes_per_second": rate,
            "reference": config.reference if config.temperature is None else PLAIN.name,
            "ratio_to": config.reference,
        },
        tuning=config.tuning,
        tuning_tokens=config.tuning_tokens,
        limit=config.seconds - (time.monotonic() - began),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, help="folder of results; one that exists is continued")
    add("--config", metavar="FILE", type=Path, help="TOML file with these options; those of the command line are first")
    add(
        "--prompts",
        metavar="[NAME=]FILE",
        nargs="+",
        default=[],
        help="jsonl, json, csv or parquet, also .gz; the format follows from NAME or the fields. Another file is a text to edit, a number so many random tokens",
    )
    add("--list", action="store_true", help="list systems and formats of prompts")
    add_options(parser)
    args = parser.parse_args(arguments)
    if args.list:
        formats = [(name, ", ".join(f.fields) or datasets.FIELDS) for name, f in datasets.FORMATS.items()]
        print(aligned([("system", ""), *((name, kind.about) for name, kind in KINDS.items())], left=2), end="\n\n")
        print(aligned([("format", "fields"), *formats], left=2))
        return 0
    if args.out is None:
        parser.error("no folder for the results: give --out DIR")
    config = with_prompts(
        configured(args, BenchConfig() if args.config is None else load_config(args.config)), args.prompts
    )
    if args.planted is None:
        config = replace(config, planted=())
    elif not config.planted:
        parser.error("--planted: name the shapes, smallest first, or give a --config that names them")
    if config.device[0].startswith("cuda") and not config.planted:
        refuse_without_gpu("bench.run")
    check_output_folder(args.out)
    folder = ResultsFolder(args.out)
    if args.out.is_dir() and any(args.out.iterdir()) and not folder.exists:
        parser.error(f"{args.out} holds other files: give a new folder, or one that bench.run wrote")
    with quiet_transformers():
        with working("loading the models and the prompts"):
            runner = prepare(config, folder, args.config and args.config.name)
        try:
            summary = runner.run()
        except KeyboardInterrupt:
            say(f"interrupted: {folder.path} keeps the complete samples, and the same command continues")
            return 130
    print(tables.text(summary))
    if not summary["complete"]:
        say(
            f"some samples are missing or failed: start the same command again to measure them; {folder.path} keeps the others"
        )
    return tables.status(summary)


if __name__ == "__main__":
    sys.exit(main())
