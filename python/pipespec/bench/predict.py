"""Predictions for ``pipespec bench --dry-run``: from sizes of models and the memory bandwidth of the devices to step times, and by simulation to tokens per second.

A step of a batch of one reads all weights, so its time is at least their bytes over the bandwidth. :data:`OVERHEAD_S` per layer is added for a forward
that is launched kernel by kernel. The acceptance is assumed (``agreement`` of the configuration). So these are orders of magnitude: they tell an
evening from a week.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pipespec.bench.config import BenchConfig
from pipespec.bench.planted import SHAPES, Shape, nested, weights_of
from pipespec.bench.results import SystemSettings
from pipespec.bench.timing import copy_bytes_per_second, read_bytes_per_second
from pipespec.planning.steps import Chain, StepTimes
from pipespec.spd.law import spd_tokens_per_cycle

HARDWARE = {
    "A100-40GB": (1.555e12, 40 << 30),
    "A100-80GB": (2.039e12, 80 << 30),
    "H100-80GB": (3.35e12, 80 << 30),
    "H200-141GB": (4.8e12, 141 << 30),
}
"""Memory bandwidth in bytes per second and memory in bytes of one device, from the maker's data sheets."""

OVERHEAD_S = {"cpu": 1.5e-4, "eager": 7e-4, "captured": 3e-5}
"""Seconds per layer beside the reading of weights: on a CPU; forwards launched kernel by kernel on a GPU; captured steps."""

PREFILL_SPEEDUP = 8.0
"""Tokens of a prompt that take as long as one decoded token, on a CPU. A GPU reads a whole prompt in a few steps' time."""

_NAMES = {
    "Llama-3.2-1B": "1B",
    "Llama-3.2-3B": "3B",
    "Llama-3.1-8B": "8B",
    "Llama-3-8B": "8B",
    "Llama-3.1-70B": "70B",
    "Llama-3-70B": "70B",
    "Llama-2-7b": "llama2-7B",
    "Llama-2-13b": "llama2-13B",
    "Llama-2-70b": "llama2-70B",
    "TinyLlama": "tinyllama-1.1B",
}
"""Shapes of published models, by a part of their names. Those of Llama 3.2 use their embedding as the head."""


@dataclass(frozen=True)
class ModelSize:
    """What the prediction knows of a model. ``bytes_per_step``: weights that a step reads; ``bytes``: of all weights."""

    name: str
    layers: int
    bytes: int
    bytes_per_step: int
    known_from: str


@dataclass(frozen=True)
class Bandwidth:
    """Of one device: bytes per second, and where the number comes from."""

    bytes_per_second: float
    kind: str
    source: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class SystemPrediction:
    """One system on one dataset: predicted tokens per second, and seconds for all samples; None: there is no prediction."""

    dataset: str
    system: str
    samples: int
    tokens_per_second: float | None
    seconds: float | None
    why: str = ""


def size_of(name: str, path: str, bytes_per_weight: float) -> ModelSize | None:
    """The size of a model: from the ``config.json`` in its folder, or from the shape of a published model of this name; None: unknown."""
    if "4bit" in path.lower():
        bytes_per_weight = 0.5625  # and a scale of 32 bits for 64 weights
    file = Path(path) / "config.json"
    if file.is_file():
        data = json.loads(file.read_text(encoding="utf-8"))
        data = data.get("text_config", data)
        try:
            shape = Shape(
                data["hidden_size"],
                data["intermediate_size"],
                data["num_hidden_layers"],
                data["num_attention_heads"],
                data.get("num_key_value_heads") or data["num_attention_heads"],
                data["vocab_size"],
            )
        except KeyError:
            return None
        return of_shape(name, shape, bytes_per_weight, "its config.json", tied=bool(data.get("tie_word_embeddings")))
    for part, key in _NAMES.items():
        if part.lower() in path.lower():
            return of_shape(name, SHAPES[key], bytes_per_weight, f"the shape {key}", tied="3.2" in part)
    return None


def of_shape(name: str, shape: Shape, bytes_per_weight: float, source: str, tied: bool = False) -> ModelSize:
    """The size of a LLaMA-like model of this shape."""
    layers, embedding = weights_of(shape)
    total = layers + embedding * (1 if tied else 2)
    step = round((layers + embedding) * bytes_per_weight)
    return ModelSize(name, shape.num_hidden_layers, round(total * bytes_per_weight), step, source)


def bandwidth_of(device: str, hardware: str | None, threads: int) -> Bandwidth:
    """Memory bandwidth of a device: of the hardware named, or measured here.

    Raises:
        ValueError: The hardware is unknown, or the device is a GPU, is not here, and no hardware is named.
    """
    kind = torch.device(device).type if device != "auto" else "cuda"
    if hardware is not None and kind == "cuda":
        if hardware not in HARDWARE:
            raise ValueError(f"no hardware {hardware!r}: there are {', '.join(HARDWARE)}")
        rate, memory = HARDWARE[hardware]
        return Bandwidth(0.8 * rate, "gpu", f"{hardware}, 80 % of its data sheet", memory)
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"{device} is not in this machine, and no hardware is named to predict for: --hardware {'|'.join(HARDWARE)}"
            )
        where = device if device != "auto" else "cuda:0"
        properties = torch.cuda.get_device_properties(where)
        rate = copy_bytes_per_second(where)
        torch.cuda.empty_cache()
        return Bandwidth(rate, "gpu", f"{properties.name}, measured by copies", properties.total_memory)
    return Bandwidth(read_bytes_per_second(threads), "cpu", f"this machine's memory, read by {threads} threads")


def times_of(
    models: Sequence[ModelSize], devices: Sequence[Bandwidth], numbers: Sequence[int], threads: int, *, captured: bool
) -> list[StepTimes]:
    """Predicted step times. ``numbers``: models of one number share a device. ``captured``: on GPUs, steps are captured."""
    found = []
    for model, device, number in zip(models, devices, numbers, strict=True):
        on_cpu = device.kind == "cpu"
        overhead = OVERHEAD_S["cpu" if on_cpu else "captured" if captured else "eager"]
        step = model.bytes_per_step / device.bytes_per_second + model.layers * overhead
        # A CPU computes a wide step in proportion to its width; on a GPU 16 columns cost about as much as one.
        wide = step * (16 / PREFILL_SPEEDUP if on_cpu else 1.1)
        prefill = step / (PREFILL_SPEEDUP if on_cpu else 256)
        found.append(StepTimes(model.name, threads, (1, 16), (step, wide), prefill, number))
    return found


def predict_system(
    system: SystemSettings, times: dict[bool, list[StepTimes]], config: BenchConfig, prompt_tokens: int
) -> tuple[float | None, str]:
    """Predicted tokens per second of a system, and what the prediction leaves out. ``times``: of eager and of captured steps."""
    if system.not_measured:
        return None, system.not_measured
    names = [t.name for t in times[False][:-1]]
    rates = nested(config.agreement[0] if len(config.agreement) == 1 else config.agreement, len(names))
    drafts = tuple(names.index(name) for name in system.drafts if name in names)
    # The published schedules count from 0, which never waits.
    lookahead = tuple(max(1, n) for n in system.lookahead or [5] * len(drafts))

    def rate(schedule: str, own: tuple[int, ...], captured: bool = False) -> float:
        target = times[captured][-1]
        if not own:
            return config.new_tokens / (target.prefill_s * prompt_tokens + config.new_tokens * target.at(1))
        # Agreement with the target, not between neighbours: a draft's neighbour agrees at least as often.
        agreed = [*(rates[i] for i in own), 1.0]
        pairs = [min(1.0, a / b) for a, b in pairwise(agreed)]
        minimum = 0 if schedule == "lockstep" else system.min_draft_tokens or 0
        stages = [*(times[captured][i] for i in own), target]
        return Chain(
            schedule, stages, pairs, lookahead[-len(own) :], minimum, prompt_tokens, config.new_tokens
        ).simulated()

    plain, kind = rate("plain", ()), system.kind
    if kind in ("hf", "plain"):
        return plain, ""
    if kind in ("static", "plain-graphs"):
        return rate("plain", (), True), ""
    if kind in ("lookup", "ngram", "draft-verify", "layerskip", "ppsd"):
        return plain, "as plain decoding: how often its drafts are accepted depends on the text"
    if kind == "spd":
        stages = int(system.axes["stages"])
        per_cycle = spd_tokens_per_cycle(config.agreement[-1], stages)
        return plain * per_cycle, "all stages in one process: each cycle reads all weights"
    if kind in ("assisted", "lockstep", "published-lockstep"):
        return rate("lockstep", drafts), ""
    if kind == "lockstep-graphs":
        return rate("lockstep", drafts, True), ""
    schedule = "streams" if kind == "streams" else "workers"
    return rate(schedule, drafts, schedule == "streams"), ""


def predict_run(
    config: BenchConfig,
    systems: Sequence[SystemSettings],
    models: Sequence[ModelSize],
    devices: Sequence[str],
    samples: dict[str, int],
    prompt_tokens: dict[str, int],
    threads: int,
) -> tuple[list[SystemPrediction], dict[str, Bandwidth]]:
    """Predict a run.

    Args:
        config: What is asked for.
        systems: Its rows.
        models: Drafts first, the target last.
        devices: One per model.
        samples: Number of samples by dataset.
        prompt_tokens: Tokens of a prompt by dataset.
        threads: CPU threads.

    Returns:
        One prediction per dataset and system, and the bandwidth of each device.
    """
    bandwidth = {device: bandwidth_of(device, config.hardware, threads) for device in dict.fromkeys(devices)}
    order = list(bandwidth)
    places = [bandwidth[d] for d in devices], [order.index(d) for d in devices]
    times = {captured: times_of(models, *places, threads, captured=captured) for captured in (False, True)}
    found = []
    for dataset, count in samples.items():
        for system in systems:
            rate, why = predict_system(system, times, config, prompt_tokens[dataset])
            seconds = None if rate is None else count * config.new_tokens / rate
            found.append(SystemPrediction(dataset, system.key, count, rate, seconds, why))
    return found, bandwidth


def to_dict(predictions: Sequence[SystemPrediction]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(p) for p in predictions]
