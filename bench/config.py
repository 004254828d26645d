"""What a run is asked for: options of ``python -m bench.run``, and keys of its TOML files, of which ``[[dataset]]`` is a table per dataset."""

import argparse
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from bench.datasets import FORMATS
from pipespec.process.records import build
from pipespec.registry import LOCKSTEP, PLAIN, WORKERS

CHAINS = ("each", "whole", "both")


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """One dataset.

    Attributes:
        name: Name in the results.
        format: One of :data:`bench.datasets.FORMATS`; None: by the fields of the file.
        file: Where it lies; None: it has no file, as planted prompts, or none was given yet.
        prompt_tokens: Tokens of a planted prompt; None: typical of the format.
    """

    name: str
    format: str | None = None
    file: str | None = None
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise ValueError(f"no format {self.format!r} of prompts: there are {', '.join(FORMATS)}")
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens of {self.name} must be at least 1, not {self.prompt_tokens}")

    @property
    def typical_tokens(self) -> int:
        """Tokens of a planted prompt."""
        return self.prompt_tokens or FORMATS[self.format or "jsonl"].prompt_tokens


def _option(default: Any, about: str, **options: Any) -> Any:
    """A field that is an option of the command line, too."""
    return field(default=default, metadata={"help": about, **options})


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One run. The help of a field says what it means."""

    title: str = ""
    dataset: tuple[DatasetRequest, ...] = ()
    target: str | None = _option(None, "folder or hub name of the target; default: the bundled family")
    drafts: tuple[str, ...] = _option((), "draft models, smallest first")
    module: tuple[str, ...] = _option((), "draft modules of the target, for spd")
    planted: tuple[str, ...] = _option(
        (), "shapes of models without weights, smallest first; none: those of --config", nargs="*"
    )
    agreement: tuple[float, ...] = _option(
        (0.8,), "of planted drafts with the target: one per draft, or that of the smallest (0.8)"
    )
    full_size: bool = _option(False, "planted models of their whole size, not divided until they fit the machine")
    calibrated: bool = _option(True, "without: planted models all agree; for rows without drafts")
    device: tuple[str, ...] = _option(("cpu",), "one device for all models, or one per model, drafts first; auto (cpu)")
    dtype: str | None = _option(
        None, "default: as stored; float32 for the bundled family, and for planted models on a CPU"
    )
    trust_remote_code: bool = _option(False, "allow a model's own Python code to run")
    head: str | None = _option(None, "a draft head of the target, for the rows that begin with head")
    llama: str | None = _option(None, "llama.cpp's llama-server, for llama.cpp; it reads NAME.gguf next to NAME-hf")
    openvino: tuple[str, ...] = _option(
        (), "an interpreter with openvino_genai, and a folder of exports NAME-fp16, -int8, -int4, for OpenVINO", nargs=2
    )
    reference: str = _option(
        "hf", "whose texts the others are compared with: hf, or plain, as in 16 bits", choices=("hf", PLAIN.name)
    )
    systems: tuple[str, ...] = _option(
        ("hf", PLAIN.name, "assisted", "lookup", LOCKSTEP.name, WORKERS.name), "kinds of systems; --list shows all"
    )
    chains: str = _option("both", "drafts alone, all in one chain, or both (default)", choices=CHAINS)
    lookahead: tuple[int, ...] = _option((), "sweep these values")
    stages: tuple[int, ...] = _option(
        (4,), "numbers of layer stages of spd and ppsd (4); a draft module has those that it was trained for"
    )
    drafters: tuple[str, ...] = _option((), "of spd: module, ngram, chain; default: all that are possible")
    tuning: int = _option(4, "settings tried of each tuned system (4); 0: its default")
    tuning_tokens: int | None = _option(None, "new tokens per prompt while tuning (--new-tokens)")
    samples: int | None = _option(None, "maximum number of prompts of each dataset (all)")
    new_tokens: int = _option(128, "maximum number of new tokens per prompt (128)")
    repeats: int = _option(1, "of each prompt (1)")
    chat_template: bool = _option(False, "wrap prompts in the target's chat template")
    ignore_eos: bool = _option(False, "write --new-tokens tokens, past end-of-text tokens")
    temperature: float | None = _option(None, "sample (greedy)")
    top_k: int = _option(0, "with --temperature")
    top_p: float = _option(1.0, "with --temperature")
    seed: int = _option(0, "of sampling and of planted weights (0)")
    threads: int | None = _option(None, "CPU threads of all processes of a system (all cores)")
    seconds: float = _option(float("inf"), "time limit: no new round begins after it")

    def __post_init__(self) -> None:
        for name in ("new_tokens", "samples", "threads", "repeats", "tuning_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.tuning < 0:
            raise ValueError(f"tuning must not be negative, not {self.tuning}")
        if self.chains not in CHAINS:
            raise ValueError(f"chains must be one of {', '.join(CHAINS)}, not {self.chains!r}")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0 (leave it out for greedy decoding), not {self.temperature}")
        if not self.systems:
            raise ValueError("systems is empty: name at least one")
        if not all(0 <= share <= 1 for share in self.agreement):
            raise ValueError(f"agreement must be shares from 0 to 1, not {list(self.agreement)}")
        if "ngram" in self.drafts:
            raise ValueError("an n-gram index is no draft model here: add ngram to the systems")
        if any("+" in place for place in self.device):
            raise ValueError(
                f"device: a model has one device here, not {' '.join(self.device)}; auto splits a target that fits on no GPU"
            )
        names = [d.name for d in self.dataset]
        if len(set(names)) < len(names):
            raise ValueError(f"two datasets have one name: {', '.join(names)}; give NAME=FILE")

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of ``generate()`` that choose tokens."""
        ends = {"eos_token_id": None} if self.ignore_eos else {}
        if self.temperature is None:
            return {"do_sample": False, **ends}
        return ends | {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option per field, without defaults: an option that is not given leaves the field as it is."""
    kinds = get_type_hints(BenchConfig)
    for f in fields(BenchConfig):
        if "help" not in f.metadata:
            continue
        kind, about = kinds[f.name], dict(f.metadata)
        if kind is bool:
            about["action"] = argparse.BooleanOptionalAction
        else:
            about["type"] = next(k for k in (get_args(kind) or (kind,)) if k is not type(None))
        if get_origin(kind) is tuple:
            about.setdefault("nargs", "+")
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=None, **about)


def configured(args: argparse.Namespace, config: BenchConfig) -> BenchConfig:
    """A configuration with the given options in place of its fields."""
    known = {f.name for f in fields(config)}
    given = {name: value for name, value in vars(args).items() if name in known and value not in (None, [])}
    return replace(
        config, **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )


def load_config(file: Path) -> BenchConfig:
    """Read a configuration file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not TOML, or a key or value is unknown.
    """
    if not file.is_file():
        raise FileNotFoundError(f"there is no configuration file {file}")
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers that are too long for Python
        raise ValueError(f"{file} is not TOML: {error}") from error
    # One value of a list needs no brackets.
    lists = {name for name, kind in get_type_hints(BenchConfig).items() if get_origin(kind) is tuple}
    data = {name: [v] if name in lists and not isinstance(v, list) else v for name, v in data.items()}
    try:
        config: BenchConfig = build(BenchConfig, data)
        return config
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def with_prompts(config: BenchConfig, given: list[str]) -> BenchConfig:
    """Add prompts: a number is a prompt of as many random tokens; ``NAME=FILE`` gives the dataset of that name its file, or is a new one; ``FILE`` alone is named after the file.

    Where only one file is given to a configuration with one dataset, it is that dataset's.

    Raises:
        ValueError: Two files have one name.
    """
    datasets = {d.name: d for d in config.dataset}
    found: dict[str, DatasetRequest] = {}
    for text in given:
        if text.isdecimal():
            found[text] = DatasetRequest(name=text, prompt_tokens=int(text))
            continue
        name, has_name, file = text.partition("=")
        if not has_name:
            name, file = Path(text).name.split(".")[0], text
            if len(given) == len(datasets) == 1:
                name = next(iter(datasets))
        if name in found:
            raise ValueError(f"two files of prompts have the name {name!r}: give NAME=FILE")
        before = datasets.get(name, DatasetRequest(name=name, format=name if has_name and name in FORMATS else None))
        found[name] = replace(before, file=file)
    # The other datasets of a configuration were not asked for.
    return replace(config, dataset=tuple(found.values())) if given else config
