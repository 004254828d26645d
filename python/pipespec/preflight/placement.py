"""Placement: the device of each stage of a chain, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.stage import INITIAL_CAPACITY, stage_names
from pipespec.errors import DoesNotFit
from pipespec.preflight.devices import AUTO, DeviceFacts, Devices, device_facts, requested
from pipespec.preflight.memory import estimate
from pipespec.preflight.stages import Share, StageFacts
from pipespec.preflight.support import check_quantised_draft, check_whole_draft

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
) -> list[str | dict[str, str] | None]:
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
        Per stage the device to load it to, or for one that is split the devices by the names of its modules (``device_map``); None for a model
        that is loaded.

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
    if all(stage.loaded and not any(s.device.startswith("cuda") for s in stage.on) for stage in stages):
        return [None] * len(stages)
    if any(not hasattr(stage.config, field) for stage in stages for field in _CACHE_SIZES):
        # Not a decoder: check_architecture() refuses it by name once it is loaded.
        first = [d[0] if isinstance(d, tuple) else d for d in ([None] * len(stages) if wanted == AUTO else wanted)]
        return [None if s.loaded else d or "cpu" for s, d in zip(stages, first, strict=True)]
    longest = [getattr(stage.config, "max_position_embeddings", None) or INITIAL_CAPACITY for stage in stages]
    capacity = min(*longest, INITIAL_CAPACITY) + WIDTH
    if isinstance(wanted, str):
        facts = device_facts() if facts is None else facts
        stages = choose(stages, facts, capacity, schedule=schedule)
    else:
        several = list(dict.fromkeys(name for d in wanted if isinstance(d, tuple) for name in d))
        known = facts if facts is not None or not several else device_facts(several)
        stages = [
            _split(stage, d, {f.name: f.free for f in known or ()}, capacity)
            if isinstance(d, tuple)
            else stage
            if stage.loaded
            else replace(stage, device=d or "cpu")
            for stage, d in zip(stages, wanted, strict=True)
        ]
        if schedule == "workers":
            for stage in stages[:-1]:
                check_whole_draft(stage.name, [share.device for share in stage.on])
    needed = estimate(stages, 1, capacity, schedule=schedule)
    used = list(dict.fromkeys(need.device for need in needed.needs))
    needed.check(device_facts(used) if facts is None else [f for f in facts if f.name in used])
    return [None if stage.loaded else _device_map(stage) if stage.shares else stage.device for stage in stages]


def choose(
    stages: Sequence[StageFacts],
    facts: Sequence[DeviceFacts],
    capacity: int = INITIAL_CAPACITY,
    *,
    schedule: str = "lockstep",
) -> list[StageFacts]:
    """The stages on the devices of ``device="auto"``: a function of its arguments alone.

    Without GPUs, the CPU. Otherwise the target goes to the GPU with most free memory. The drafts follow, the last one first, each to a GPU
    where it fits. The order of preference: a GPU without a stage, one that the target's GPU accesses directly, more free memory, the first
    one. Loaded models stay. No stage goes to the CPU unless the user requests it. A target that fits on no GPU is split over as few as suffice, those
    with most free memory.

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
        return [stage if stage.loaded else replace(stage, device="cpu") for stage in stages]
    placed = {stage.name: stage for stage in stages if stage.loaded}

    def left(gpu: DeviceFacts) -> int:
        return gpu.free - estimate(list(placed.values()), 1, capacity, schedule=schedule).on(gpu.name)

    for stage in reversed(stages):
        if stage.loaded:
            continue
        target = placed.get("target")
        used = {share.device for s in placed.values() for share in s.on}
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
            over = None
            if stage.name == "target":
                over = _fewest(stage, ranked, {gpu.name: left(gpu) for gpu in gpus}, capacity)
            if over is not None:
                placed[stage.name] = over
                continue
            tried = [*placed.values(), replace(stage, device=ranked[0].name)]
            raise DoesNotFit(
                f"{stage.name} fits on no GPU{' and not on all of them together' if stage.name == 'target' and len(gpus) > 1 else ''} (GiB):\n{estimate(tried, 1, capacity, schedule=schedule).table(gpus)}\n"
                "What helps: a smaller dtype (dtype='bfloat16'), quantised weights, fewer drafts, or device= with a device for each stage"
            )
    return [placed[stage.name] for stage in stages]


def _fewest(
    stage: StageFacts, ranked: Sequence[DeviceFacts], free: Mapping[str, int], capacity: int
) -> StageFacts | None:
    """The stage over the fewest GPUs that suffice, in their order; None: all of them do not."""
    if not stage.parts:
        return None
    for count in range(2, len(ranked) + 1):
        names = sorted((gpu.name for gpu in ranked[:count]), key=[gpu.name for gpu in ranked].index)
        over = _split(stage, tuple(names), free, capacity)
        found = estimate([over], 1, capacity)
        if all(found.on(name) <= free[name] for name in names):
            return over
    return None


def _split(stage: StageFacts, devices: tuple[str, ...], free: Mapping[str, int], capacity: int) -> StageFacts:
    """Cut a stage into runs of layers, one per device.

    Equal bytes of weights and caches where that fits, else in the proportion of free memory.

    Args:
        stage: one that is not loaded.
        devices: in the order of the layers.
        free: bytes per device; empty: unknown.
        capacity: positions of each cache, for one text.

    Raises:
        ValueError: the stage is loaded, cannot be cut, or has fewer layers than there are devices.
    """
    layers = sum(part.is_layer for part in stage.parts)
    if layers < len(devices):
        why = (
            f"it has {layers} layers"
            if stage.parts
            else "its parts are not known before it is loaded; load it with device_map="
        )
        raise ValueError(f"{stage.name} cannot be split over {', '.join(devices)}: {why}")
    equal = _cut(stage, devices, [1] * len(devices), capacity)
    need = estimate([equal], 1, capacity)
    if not free or all(need.on(name) <= free[name] for name in devices):
        return equal
    fixed = need.needs[0].activations + need.needs[0].headroom
    return _cut(stage, devices, [max(1, free[name] - fixed) for name in devices], capacity)


def _cut(stage: StageFacts, devices: Sequence[str], portions: Sequence[int], capacity: int) -> StageFacts:
    """:func:`_split` in these proportions. Each device gets a layer at least."""
    cache = stage.layout.bytes_for(1, capacity, stage.dtype, 1)
    sizes = [part.weights + (cache if part.is_layer else 0) for part in stage.parts]
    layers = [i for i, part in enumerate(stage.parts) if part.is_layer]
    whole, begin, shares = sum(sizes), 0, []
    for number, device in enumerate(devices):
        until = whole * sum(portions[: number + 1]) / sum(portions)
        # The first layer of the next device: at least one layer for this device, and for each of those behind it.
        least = next(i for i in layers if i >= begin) + 1
        most = layers[len(layers) - (len(devices) - 1 - number)] if number + 1 < len(devices) else len(sizes)
        end = least
        while end < most and (number + 1 == len(devices) or sum(sizes[: end + 1]) - sizes[end] / 2 <= until):
            end += 1
        mine = stage.parts[begin:end]
        shares.append(Share(device, sum(part.weights for part in mine), sum(part.is_layer for part in mine)))
        begin = end
    return replace(stage, device=devices[0], shares=tuple(shares))


def _device_map(stage: StageFacts) -> dict[str, str]:
    """The device of each part of a split stage, as ``from_pretrained`` takes it."""
    layers = iter(share.device for share in stage.shares for _ in range(share.layers))
    placed, device = {}, stage.shares[0].device
    for part in stage.parts:
        device = next(layers) if part.is_layer else device
        placed[part.name] = device
    return placed


def _check_contradictions(stages: Sequence[StageFacts], devices: Sequence[str | tuple[str, ...] | None]) -> None:
    """Raises ``ValueError`` where the user requests another device for a loaded model than the one it is on."""
    for stage, device in zip(stages, devices, strict=True):
        if stage.loaded and device is not None and device not in (stage.device, tuple(s.device for s in stage.on)):
            raise ValueError(
                f"{stage.name} was given as a model on {', '.join(s.device for s in stage.on)}, which contradicts device={device!r}: move it with "
                "model.to(...), leave device out, or give its path"
            )
