"""Placement: the device of each stage of a chain, before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.stage import INITIAL_CAPACITY, stage_names
from pipespec.errors import DoesNotFit
from pipespec.preflight.devices import AUTO, DeviceFacts, Devices, device_facts, requested
from pipespec.preflight.memory import estimate
from pipespec.preflight.stages import StageFacts
from pipespec.preflight.support import check_quantised_draft

_CACHE_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
"""Fields of a configuration without which its caches cannot be counted."""


def arrange(
    given: Sequence[PreTrainedModel | str | Path],
    *,
    device: Devices = None,
    dtype: torch.dtype | str | Sequence[torch.dtype | str] = "auto",
    schedule: str = "lockstep",
    trust_remote_code: bool = False,
    facts: Sequence[DeviceFacts] | None = None,
    names: Sequence[str] | None = None,
) -> list[str | None]:
    """Choose the device of each stage, and check that weights and the caches of one text fit there.

    Args:
        given: models or paths, drafts first, target last.
        device: the user's request.
        dtype: as ``from_pretrained`` takes it: of all stages, or one per stage.
        schedule: how the stages are to run.
        trust_remote_code: as ``from_pretrained`` takes it.
        facts: of the devices; None queries them.
        names: of the stages; None: ``given`` is the whole chain.

    Returns:
        Per stage the device to load it to; None for a model that is loaded.

    Raises:
        DoesNotFit: the weights, or the caches of one text, do not fit.
        ValueError: a device that cannot be used, or a stage that cannot run in ``schedule``.
        Exception: those of :func:`pipespec.models.loading.load_config`.
    """
    wanted = requested(device, len(given))
    dtypes = [dtype] * len(given) if isinstance(dtype, (str, torch.dtype)) else dtype
    stages = [
        StageFacts.of_model(name, model)
        if isinstance(model, PreTrainedModel)
        else StageFacts.of_path(name, model, of_stage, trust_remote_code=trust_remote_code)
        for name, model, of_stage in zip(names or stage_names(len(given)), given, dtypes, strict=True)
    ]
    if schedule == "workers":
        for stage in stages[:-1]:
            check_quantised_draft(stage.name, stage.quantised)
    if isinstance(wanted, list):
        _check_contradictions(stages, wanted)
    if all(stage.loaded and not stage.device.startswith("cuda") for stage in stages):
        return [None] * len(stages)
    if any(not hasattr(stage.config, field) for stage in stages for field in _CACHE_SIZES):
        # Not a decoder: check_architecture() refuses it by name once it is loaded.
        wanted = [AUTO] * len(stages) if isinstance(wanted, str) else wanted
        return [None if s.loaded else "cpu" if d in (None, AUTO) else d for s, d in zip(stages, wanted, strict=True)]
    longest = [getattr(stage.config, "max_position_embeddings", None) or INITIAL_CAPACITY for stage in stages]
    capacity = min(*longest, INITIAL_CAPACITY) + WIDTH
    if isinstance(wanted, str):
        facts = device_facts() if facts is None else facts
        devices = choose(stages, facts, capacity, schedule=schedule)
    else:
        devices = [d or (s.device if s.loaded else "cpu") for d, s in zip(wanted, stages, strict=True)]
    stages = [replace(stage, device=d) for stage, d in zip(stages, devices, strict=True)]
    needed = estimate(stages, 1, capacity, schedule=schedule)
    used = list(dict.fromkeys(need.device for need in needed.needs))
    needed.check(device_facts(used) if facts is None else [f for f in facts if f.name in used])
    return [None if stage.loaded else stage.device for stage in stages]


def choose(
    stages: Sequence[StageFacts],
    facts: Sequence[DeviceFacts],
    capacity: int = INITIAL_CAPACITY,
    *,
    schedule: str = "lockstep",
) -> list[str]:
    """The devices for ``device="auto"``: a function of its arguments alone.

    Without GPUs, the CPU. Otherwise the target goes to the GPU with most free memory. The drafts follow, the last one first, each to a GPU
    where it fits. The order of preference: a GPU without a stage, one that the target's GPU accesses directly, more free memory, the first
    one. Loaded models stay. No stage goes to the CPU unless the user requests it.

    Args:
        stages: drafts first, target last.
        facts: of the devices.
        capacity: positions of each cache, for one text.
        schedule: how the stages are to run.

    Raises:
        DoesNotFit: a stage that fits on no GPU.
    """
    gpus = [f for f in facts if f.name != "cpu"]
    if not gpus:
        return ["cpu"] * len(stages)
    placed = {stage.name: stage for stage in stages if stage.loaded}

    def left(gpu: DeviceFacts) -> int:
        return gpu.free - estimate(list(placed.values()), 1, capacity, schedule=schedule).on(gpu.name)

    for stage in reversed(stages):
        if stage.loaded:
            continue
        target = placed.get("target")
        used = {s.device for s in placed.values()}
        reached = {f.name for f in gpus if target is not None and target.device in f.peers}
        if target is None:
            ranked = sorted(gpus, key=lambda gpu: -left(gpu))
        else:
            ranked = sorted(gpus, key=lambda gpu: (gpu.name in used, gpu.name not in reached, -left(gpu)))
        for gpu in ranked:
            here = replace(stage, device=gpu.name)
            if estimate([here], 1, capacity, schedule=schedule).on(gpu.name) <= left(gpu):
                placed[stage.name] = here
                break
        else:
            tried = [*placed.values(), replace(stage, device=ranked[0].name)]
            raise DoesNotFit(
                f"{stage.name} fits on no GPU (GiB):\n{estimate(tried, 1, capacity, schedule=schedule).table(gpus)}\n"
                "What helps: a smaller dtype (dtype='bfloat16'), quantised weights, fewer drafts, or device= with a device for each stage"
            )
    return [placed[stage.name].device for stage in stages]


def _check_contradictions(stages: Sequence[StageFacts], devices: Sequence[str | None]) -> None:
    """Raises ``ValueError`` where the user requests another device for a loaded model than the one it is on."""
    for stage, device in zip(stages, devices, strict=True):
        if stage.loaded and device is not None and device != stage.device:
            raise ValueError(
                f"{stage.name} was given as a model on {stage.device}, which contradicts device={device!r}: move it with "
                "model.to(...), leave device out, or give its path"
            )
