"""``pipespec bench`` with the papers' baselines, and with planted models: ``python -m bench.run --help``

    python -m bench.run --config bench/configs/pipespec_lookahead.toml --prompts HumanEval.jsonl --out sweep
    python -m bench.run --config bench/configs/pipespec_lookahead.toml --planted --out shapes    # without weights and prompts

``bench/baselines.py`` has the baselines, ``bench/planted.py`` the planted models, and ``python -m bench.plot DIR`` draws the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import bench.datasets  # noqa: F401  adds the published formats
from bench import baselines, planted
from bench.configuration import load_config
from bench.timing import read_bytes_per_second
from pipespec.bench import runner
from pipespec.bench.config import BenchConfig, DatasetRequest
from pipespec.bench.contenders import Family
from pipespec.bench.results import DatasetSettings
from pipespec.bench.runner import CALIBRATION, PreparedDataset, PreparedRun, prepared, threads
from pipespec.checks.devices import device_facts
from pipespec.cli import bench as command
from pipespec.demo import draft_module_path
from pipespec.process.progress import say

STEP_S = 0.03
"""Most seconds of a planted target's step: its shapes are divided until the weights can be read in this time."""

MEMORY_SHARE = 0.4
"""Share of the free memory that planted weights may take."""


def prepare(config: BenchConfig) -> PreparedRun:
    """Make models of the configuration's shapes, divided until they fit this machine, and random prompts.

    Raises:
        ValueError: The shapes do not fit, or the new tokens exceed the models' positions.
    """
    count = threads(config)
    is_on_gpu = torch.cuda.is_available() and len(set(config.device)) == 1 and config.device[0].startswith("cuda")
    device = config.device[0] if is_on_gpu else "cpu"
    dtype = getattr(torch, config.dtype or ("bfloat16" if is_on_gpu else "float32"))
    if not is_on_gpu and "cpu" not in config.device:
        dtype = torch.float32  # the file names the dtype of GPUs that are not here
    rate = 1e12 if is_on_gpu else read_bytes_per_second(count)
    least = max(config.stages, default=2) if {"spd", "ppsd"} & set(config.systems) else 2
    memory = MEMORY_SHARE * device_facts([device])[0].free
    shapes, divisors = planted.fitted(config.planted, memory, STEP_S * rate, dtype.itemsize, least)
    datasets = config.dataset or (DatasetRequest(name="planted"),)
    chain = planted.plant(
        config.planted,
        config.agreement[0] if len(config.agreement) == 1 else config.agreement,
        seed=config.seed,
        device=device,
        dtype=dtype,
        prompt_tokens=min(64, *(d.typical_tokens for d in datasets)),
        new_tokens=min(config.new_tokens, 128),
        known=shapes,
        progress=say,
    )
    *drafts, target = chain.models
    names = config.planted[:-1]
    family = Family("planted " + " -> ".join(config.planted), target, dict(zip(names, drafts, strict=True)), None)
    record = chain.record() | {"divided": {"widths": divisors[0], "layers": divisors[1]}}
    paths = {name: f"planted {name}" for name in names}
    return prepared(config, family, paths, [_prompts(config, d, family) for d in datasets], planted=record)


def _prompts(config: BenchConfig, request: DatasetRequest, family: Family) -> PreparedDataset:
    limit = family.target.config.max_position_embeddings
    if config.new_tokens >= limit:
        raise ValueError(f"{config.new_tokens} new tokens: planted models take {limit} tokens; lower --new-tokens")
    count, tokens = config.samples or 8, min(request.typical_tokens, limit - config.new_tokens)
    ids = planted.random_prompts(family.target.config.vocab_size, count + CALIBRATION, tokens, config.seed + 3)
    names = [str(i) for i in range(count)]
    settings = DatasetSettings(name=request.name, format="planted", samples=names, new_tokens=config.new_tokens)
    return PreparedDataset(settings, dict(zip(names, ids[:, None], strict=False)), [row[None] for row in ids[count:]])


def main(arguments: Sequence[str] | None = None) -> int:
    baselines.register()
    parser = argparse.ArgumentParser("bench.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    command.add_options(parser)
    add = parser.add_argument
    add("--config", metavar="FILE", type=Path, help="TOML file with these options; those of the command line are first")
    shapes = ", ".join(planted.SHAPES)
    add("--planted", nargs="*", metavar="SHAPE", help=f"smallest first, or those of --config: {shapes}")
    add("--agreement", type=float, nargs="+", metavar="A", help="of planted drafts with the target (0.8)")
    add("--module", metavar="FOLDER", nargs="+", help="draft modules of the target, for spd")
    add("--stages", type=int, nargs="+", metavar="N", help="layer stages of spd and ppsd (4)")
    args = parser.parse_args(arguments)
    if args.list:
        return command.run(args)
    config = command.configured(args, BenchConfig() if args.config is None else load_config(args.config))
    if args.planted is None:
        if config.target is None and not config.module:
            config = replace(config, module=(str(draft_module_path()),))
        source = None if args.config is None else args.config.name
        load = partial(runner.prepare, trust_remote_code=args.trust_remote_code, source=source)
        return command.measure(args, command.with_bundled(config), load)
    config = replace(config, target=None)
    if not config.planted:
        parser.error("--planted: name the shapes, smallest first, or give a --config that names them")
    return command.measure(args, config, prepare)


if __name__ == "__main__":
    sys.exit(main())
