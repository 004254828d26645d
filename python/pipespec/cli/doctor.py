"""``pipespec doctor``: what is installed, what works, and what to do about the rest; or what a model's files hold, and how it will run."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipespec.cli.options import Subparsers, require_models
from pipespec.demo import FAMILY, draft_module_path, family_path
from pipespec.process.progress import working
from pipespec.registry import SCHEDULES, Schedule, default_schedule
from pipespec_kernels import collect_env, problems
from pipespec_kernels.env import misfits


def add_parser(commands: Subparsers) -> list[argparse.ArgumentParser]:
    parser = commands.add_parser("doctor", help="check the installation", description=run.__doc__)
    parser.set_defaults(command=run)
    parser.add_argument(
        "model", nargs="?", help="a model's folder or GGUF file: describe it instead of the installation"
    )
    parser.add_argument("--json", action="store_true", help="all facts as JSON")
    return [parser]


def run(args: argparse.Namespace) -> int:
    """Print what is installed and built, what pipespec will use, and what is wrong with it; or what a model is, with the digests of its files. Exit code 1 if pipespec cannot work, a package is of a version that it does not support, or weights are not finite."""
    if args.model is not None:
        require_models(args.model)
        facts, is_whole = _facts_of(args.model)
        _print(facts, args.json)
        return 0 if is_whole else 1
    with working("checking (imports torch and transformers)"):
        env = collect_env()
        env["pipeline_error"] = None
        try:
            import pipespec.api.pipeline  # noqa: F401  # needs every dependency
        except Exception as error:  # broken packages raise errors of many types
            env["pipeline_error"] = f"{type(error).__name__}: {error}"
    env["family"] = _megabytes(lambda: {name: family_path(name) / "model.safetensors" for name in FAMILY})
    module = _megabytes(lambda: {"module": draft_module_path() / "draft_module.safetensors"})
    env["draft_module"] = module if isinstance(module, str) else module["module"]
    env["schedules"] = {row.name: _availability(row, env) for row in SCHEDULES.values()}
    env["default_schedules"] = {n: default_schedule(["cpu"] * (n + 1))[0] for n in (1, 2)}
    env["problems"] = problems(env)
    is_whole = env["pipeline_error"] is None and env["native"]["version"] == env["version"]
    usable = env["usable"] = is_whole and not misfits(env)
    if env["pipeline_error"] and not env["problems"]:
        env["problems"].append(f"pipespec does not import: {env['pipeline_error']}")
    if isinstance(env["family"], str):
        env["problems"].append(f"The demo's models are missing: {env['family']}")
    elif isinstance(env["draft_module"], str):
        env["problems"].append(f"The demo's draft module is missing: {env['draft_module']}")
    if args.json:
        print(json.dumps(env, indent=1))
        return 0 if usable else 1
    _print(dict(_doctor_rows(env)), False)
    print()
    for problem in env["problems"]:
        print(f"! {problem}")
    verdict = "pipespec works here, with these restrictions." if env["problems"] else "No problems found."
    print(verdict if usable else "pipespec CANNOT work here until these problems are fixed.")
    return 0 if usable else 1


def _print(facts: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _facts_of(model: str) -> tuple[dict[str, str], bool]:
    """What a model's files hold, and whether all weights are finite: they are read for that, and for their digests."""
    with working("reading the model's files (imports torch and transformers)"):
        import torch
        from transformers import GenerationConfig

        from pipespec.models.families import FAMILIES
        from pipespec.models.gguf import GgufFile
        from pipespec.models.gguf_config import architecture_of
        from pipespec.models.gguf_tokenizer import end_ids
        from pipespec.models.integrity import digests, not_finite, not_read
        from pipespec.models.layout import CacheLayout, UnsupportedLayers
        from pipespec.models.loading import is_gguf, load_config, load_model, model_path, stored_bytes
        from pipespec.models.tokenizers import load_tokenizer

        path = model_path(model)
        config, tokenizer = load_config(path), load_tokenizer(path)
        family = FAMILIES.get(config.model_type)
        native = family is not None and family.prefix is not None
        facts = {"model": f"{path}: {config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}"}
    broken, in_blocks = [], False
    if Path(path).exists():  # of a name of the hub no weights are downloaded
        with working("reading the weights"):
            broken = not_finite(path)
            facts["SHA-256"] = ", ".join(f"{name} {digest}" for name, digest in digests(path).items())
        left = ", ".join(f"{count} {kind}" for kind, count in not_read(path).items())
        facts["values"] = "all weights are finite" + (f"; of these tensors no values were read: {left}" if left else "")
    with working("reading what the files say"):
        if is_gguf(path):
            file = GgufFile.open(path)
            in_blocks = architecture_of(file) is not None
            if in_blocks and not broken:
                load_model(path)  # all tensors have their places
            counts = Counter(tensor.type_name for tensor in file.tensors.values())
            types = ", ".join(f"{count} {name}" for name, count in counts.most_common())
            facts["weights"] = f"{file.nbytes / 1e9:.2f} GB: {types}"
            kind, split = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre")
            ends = [tokenizer.convert_ids_to_tokens(i) for i in end_ids(file)]
            how = "stay in blocks" if in_blocks else "are dequantised by transformers"
        else:
            facts["weights"] = f"{stored_bytes(path) / 1e9:.2f} GB"
            kind, split = type(tokenizer).__name__, None
            found = GenerationConfig.from_model_config(config).eos_token_id
            with suppress(OSError):
                found = GenerationConfig.from_pretrained(path).eos_token_id
            ends = tokenizer.convert_ids_to_tokens(
                found if isinstance(found, list) else [found] if found is not None else []
            )
            how = "are read as they are stored"
        bos = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    if broken:
        facts["values"] = (
            f"NOT FINITE in {len(broken)} tensors ({', '.join(broken[:3])}): the file is damaged, get it again"
        )
    facts["tokenizer"] = (
        f"{kind}{f', split as {split}' if split else ''}: {len(tokenizer)} tokens; {'begins a text with ' + tokenizer.bos_token if bos else 'no token before a text'}"
    )
    facts["a turn ends with"] = ", ".join(ends) or "nothing that the files name"
    facts["chat template"] = "there" if tokenizer.chat_template else "none: --chat needs one"
    facts["runs on a CPU"] = (
        f"matrices {how}, multiplied by {'the native form' if native else 'modules of transformers'}"
    )
    try:
        kept = torch.bfloat16 if in_blocks else config.dtype or torch.float32
        nbytes = CacheLayout.of(config).bytes_for(1, 1024, kept)
        facts["memory"] = (
            f"the weights, and {nbytes / 2**20:.0f} MiB for 1,024 tokens in {str(kept).removeprefix('torch.')}; at most {config.max_position_embeddings} tokens"
        )
    except UnsupportedLayers as error:
        facts["memory"] = f"the weights; {error}"
    return facts, not broken


def _megabytes(files: Callable[[], dict[str, Path]]) -> dict[str, float] | str:
    """Megabytes of each file, or which one is missing."""
    try:
        return {name: round(file.stat().st_size / 1e6, 1) for name, file in files().items()}
    except OSError as error:
        return str(error)


def _availability(row: Schedule, env: dict[str, Any]) -> str:
    """``"yes"`` or ``"no"``, with a restriction or a reason."""
    if env["pipeline_error"]:
        return "no: pipespec does not import"
    if row.is_captured and not env["cuda"]["devices"]:
        return f"no: it needs {row.needs}"
    if row.has_processes and env["cpu"]["usable_cores"] < 2:
        return "yes, but with one core the stages take turns"
    return f"yes, in {row.needs}" if row.needs_ranks else "yes"


def _doctor_rows(env: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cpu, cuda, native, torch = env["cpu"], env["cuda"], env["native"], env["torch"]
    yield "pipespec", f"{env['version']}, {env['location']}"
    yield "Python", f"{env['python']}, {env['platform']}"
    for name, version in env["packages"].items():
        detail = version or "not installed"
        if name == "torch" and version and torch["error"]:
            detail += ", does not import"
        elif name == "torch" and torch["version"]:
            detail = f"{torch['version']}, {torch['threads']} threads, CUDA {torch['cuda_version'] or 'no'}"
        yield name, detail
    parts = {
        k: (" ".join(map(str, v)) or "none") if isinstance(v, (list, tuple)) else v for k, v in (native or {}).items()
    }
    yield "native module", ", ".join(f"{name} {part}" for name, part in parts.items()) or "does not import"
    quota = f", {cpu['quota_cores']:g} allowed by the container" if cpu["quota_cores"] else ""
    yield "CPU", f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable{quota}"
    yield "row selection", f"native, {cpu['simd']}" if native else "-"
    if env["memory_bytes"]:
        total, available = env["memory_bytes"] / 2**30, (env["memory_available_bytes"] or 0) / 2**30
        allowed = f", {limit / 2**30:.1f} allowed by the container" if (limit := env["memory_limit_bytes"]) else ""
        yield "memory", f"{total:.1f} GiB, {available:.1f} available{allowed}"
    yield "huge pages", cpu["huge_pages"] or "unknown"
    yield "CUDA module", "not built" if not cuda["file"] else "broken" if cuda["error"] else cuda["file"]
    yield "GPUs", ", ".join(device["name"] for device in cuda["devices"]) or "none"
    for schedule, state in env["schedules"].items():
        yield f"schedule {schedule}", state
    by_drafts = ", ".join(f"{schedule} with {n} drafts" for n, schedule in env["default_schedules"].items())
    yield "default schedule", f"on the CPU {by_drafts.replace('1 drafts', '1 draft')}"
    family = env["family"]
    sizes = family if isinstance(family, str) else ", ".join(f"{name} {size} MB" for name, size in family.items())
    yield "bundled family", f"incomplete: {sizes}" if isinstance(family, str) else f"complete: {sizes}"
    module = env["draft_module"]
    missing = isinstance(module, str)
    yield "draft module", f"missing: {module}" if missing else f"there: {module} MB (pipespec generate --system spd)"
