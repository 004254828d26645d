"""What ``pipespec bench`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipespec.bench.datasets import FORMATS
from pipespec.registry import LOCKSTEP, PLAIN, WORKERS

CHAINS = ("each", "whole", "both")
"""Which chains the drafts form: each draft alone, all drafts in one chain, or both."""


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """One dataset.

    Attributes:
        name: Name in the results.
        format: One of :data:`pipespec.bench.datasets.FORMATS`; None: by the fields of the file.
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


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One run.

    Attributes:
        title: What it reproduces.
        target: Path or hub name; None: the bundled family.
        drafts: Paths or hub names, smallest first.
        module: Folders of draft modules for SPD.
        systems: Kinds of systems, see :data:`pipespec.bench.systems.KINDS`.
        chains: One of :data:`CHAINS`.
        lookahead: Values to sweep; empty: each system's default.
        stages: Numbers of layer stages for SPD and PPSD. A draft module has the stages that it was trained for.
        drafters: Of SPD: ``"module"``, ``"ngram"``, ``"model"``; empty: all that are possible.
        dataset: What is generated.
        samples: Maximum number of prompts per dataset; None: all.
        new_tokens: Maximum number of new tokens per prompt.
        chat_template: Wrap prompts in the target's chat template.
        ignore_eos: Write ``new_tokens`` tokens behind every prompt, past end-of-text tokens.
        temperature: None: greedy.
        top_k: With a temperature, as for ``generate()``, like ``top_p``.
        seed: Of sampling and of planted weights.
        device: One device for all models, or one per model, drafts first.
        dtype: Of the models; None: as stored, float32 for the bundled family and for planted models on a CPU.
        threads: CPU threads; None: all cores.
        tuning: Candidates tried of each system that is tuned; 0: none, the default runs.
        planted: Shapes of models without weights, drafts first; for ``python -m bench.run --planted``.
        agreement: Of planted drafts with the target, one per draft or that of the smallest.
    """

    title: str = ""
    target: str | None = None
    drafts: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    systems: tuple[str, ...] = ("hf", PLAIN.name, "assisted", "lookup", LOCKSTEP.name, WORKERS.name)
    chains: str = "both"
    lookahead: tuple[int, ...] = ()
    stages: tuple[int, ...] = (4,)
    drafters: tuple[str, ...] = ()
    dataset: tuple[DatasetRequest, ...] = ()
    samples: int | None = None
    new_tokens: int = 128
    chat_template: bool = False
    ignore_eos: bool = False
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    device: tuple[str, ...] = ("cpu",)
    dtype: str | None = None
    threads: int | None = None
    tuning: int = 4
    planted: tuple[str, ...] = ()
    agreement: tuple[float, ...] = (0.8,)

    def __post_init__(self) -> None:
        for name in ("new_tokens", "samples", "threads"):
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


def with_prompts(config: BenchConfig, given: list[str]) -> BenchConfig:
    """Add files: ``NAME=FILE`` gives the dataset of that name its file, or is a new one; ``FILE`` alone is named after the file.

    Where only one file is given to a configuration with one dataset, it is that dataset's.

    Raises:
        ValueError: Two files have one name.
    """
    datasets = {d.name: d for d in config.dataset}
    seen: set[str] = set()
    for text in given:
        name, has_name, file = text.partition("=")
        if not has_name:
            name, file = Path(text).name.split(".")[0], text
            if len(given) == len(datasets) == 1:
                name = next(iter(datasets))
        if name in seen:
            raise ValueError(f"two files of prompts have the name {name!r}: give NAME=FILE")
        seen.add(name)
        before = datasets.get(name, DatasetRequest(name=name, format=name if has_name and name in FORMATS else None))
        datasets[name] = replace(before, file=file)
    if given:  # the others of a configuration were not asked for
        datasets = {name: d for name, d in datasets.items() if name in seen}
    return replace(config, dataset=tuple(datasets.values()))
