"""Placement: the device of each stage of a chain, before any weight is read. accelerate plans a stage that is split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.inputs import INITIAL_CAPACITY, stage_names
from pipespec.models.devices import decoder_layers
from pipespec.models.loading import require_accelerate
from pipespec.preflight.devices import AUTO, DeviceFacts, Devices, device_facts, requested
from pipespec.preflight.memory import Share, StageFacts, estimate
from pipespec.preflight.support import check_shared_draft

DeviceMap = dict[str, str]
"""The device of each module by its name, as ``from_pretrained`` takes it."""


def arrange(
    given: Sequence[PreTrainedModel | str | Path],
    *,
    device: Devices = None,
    dtype: torch.dtype | str | Sequence[torch.dtype | str] = "auto",
    shares_weights: bool = False,
    trust_remote_code: bool = False,
    facts: Sequence[DeviceFacts] | None = None,
    names: Sequence[str] | None = None,
) -> list[str | DeviceMap | None]:
    """Choose the device of each stage, and check that weights and the caches of one text fit there.

    A stage with ``device="auto"`` goes to the GPU with the most free memory, the target first; where none has enough, accelerate splits it over all of
    them. Without GPUs it goes to the CPU.

    Args:
        given: models or paths, drafts first, target last.
        device: the user's request.
        dtype: as ``from_pretrained`` takes it: of all stages, or one per stage.
        shares_weights: whether drafts run in processes of their own, see :func:`pipespec.preflight.memory.estimate`.
        trust_remote_code: as ``from_pretrained`` takes it.
        facts: of the devices; None queries them.
        names: of the stages; None: ``given`` is the whole chain.

    Returns:
        Per stage the device to load it to, or for one that is split a device map; None for a model that is loaded.

    Raises:
        DoesNotFit: the weights, or the caches of one text, do not fit.
        ImportError: a stage is to be split, and accelerate is not installed.
        ValueError: a device that cannot be used, or a stage that cannot be split or shared.
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
    for stage, place in zip(stages, wanted, strict=True):
        _check_contradiction(stage, place)
        if shares_weights and stage is not stages[-1]:
            check_shared_draft(stage.name, stage.quantised, ())
    if all(stage.loaded and not any(s.device.startswith("cuda") for s in stage.on) for stage in stages):
        return [None] * len(stages)
    if not all(hasattr(stage.config, "num_attention_heads") for stage in stages):
        # Not a decoder: check_architecture() refuses it by name once it is loaded.
        return [None if stage.loaded else "cpu" for stage in stages]
    longest = [getattr(stage.config, "max_position_embeddings", None) or INITIAL_CAPACITY for stage in stages]
    capacity = min(*longest, INITIAL_CAPACITY) + WIDTH
    facts = _facts_of(stages, wanted) if facts is None else facts
    stages, maps = _place(stages, wanted, {fact.name: fact.free for fact in facts}, capacity)
    for stage in stages[:-1] if shares_weights else ():
        check_shared_draft(stage.name, None, [share.device for share in stage.on])
    needed = estimate(stages, 1, capacity, shares_weights=shares_weights)
    used = {need.device for need in needed.needs}
    needed.check([fact for fact in facts if fact.name in used])
    return [None if stage.loaded else maps.get(stage.name, stage.device) for stage in stages]


def _facts_of(stages: Sequence[StageFacts], wanted: Sequence[str | tuple[str, ...] | None]) -> list[DeviceFacts]:
    """Query the devices that come into question."""
    named = {name for place in wanted for name in ([place] if isinstance(place, str) else place or ())}
    present = {share.device for stage in stages for share in stage.on}
    return device_facts(None if AUTO in named else sorted({"cpu"} | named | present))


def _place(
    stages: Sequence[StageFacts],
    wanted: Sequence[str | tuple[str, ...] | None],
    free: dict[str, int],
    capacity: int,
) -> tuple[list[StageFacts], dict[str, DeviceMap]]:
    """The stages on their devices, and device maps of those that are split. The target chooses first, then the drafts, the last one first."""
    placed, maps = list(stages), dict[str, DeviceMap]()
    for i, place in reversed(list(enumerate(wanted))):
        stage = placed[i]
        if not stage.loaded:
            where = _automatic(stage, free, capacity) if place == AUTO else place
            if isinstance(where, tuple):
                stage, maps[stage.name] = _split(stage, where, free, capacity, is_even=place != AUTO)
            else:
                stage = replace(stage, device=where or "cpu")
        placed[i] = stage
        for need in estimate([stage], 1, capacity).needs:
            free[need.device] = free.get(need.device, 0) - need.sum
    return placed, maps


def _automatic(stage: StageFacts, free: Mapping[str, int], capacity: int) -> str | tuple[str, ...]:
    """The GPU with the most free memory if the stage fits there, else all GPUs, those with the most free memory first; without GPUs, the CPU."""
    gpus = sorted((name for name in free if name != "cpu"), key=lambda name: -free[name])
    if not gpus:
        return "cpu"
    need = estimate([replace(stage, device=gpus[0])], 1, capacity).on(gpus[0])
    return gpus[0] if need <= free[gpus[0]] or len(gpus) == 1 or stage.skeleton is None else tuple(gpus)


def _split(
    stage: StageFacts, devices: tuple[str, ...], free: Mapping[str, int], capacity: int, *, is_even: bool
) -> tuple[StageFacts, DeviceMap]:
    """Split a stage into runs of layers, one per device.

    Args:
        stage: one that is not loaded.
        devices: in the order of the layers.
        free: bytes per device.
        capacity: positions of each cache, for one text.
        is_even: about equal bytes of weights on each device, where that fits. Otherwise each device in turn is filled.

    Raises:
        ValueError: it cannot be split.
    """
    model = stage.skeleton
    if model is None:
        raise ValueError(
            f"{stage.name} cannot be split over {', '.join(devices)}: its parts are not known before it is loaded; load it with device_map="
        )
    require_accelerate(stage.name)
    from accelerate import infer_auto_device_map

    need = estimate([stage], 1, capacity).needs[0]
    beside = need.activations + need.headroom + need.caches // len(devices)
    room = {i: max(0, free.get(name, 0) - beside) for i, name in enumerate(devices)}
    # accelerate leaves room for the largest part on the first device.
    largest = max(
        sum(p.nbytes for p in part.parameters()) for part in (*decoder_layers(model), model.get_input_embeddings())
    )
    even = {i: stage.weights // len(devices) + largest for i in room}
    last = len(devices) - 1
    blocks = list(model._no_split_modules or ())
    for limits in ([even] if is_even and all(even[i] <= room[i] for i in room) else []) + [
        room,
        room | {last: 1 << 60},
    ]:
        # The last attempt puts all the rest on the last device: the check of the memory names what is lacking.
        found = infer_auto_device_map(model, dict(limits), no_split_module_classes=blocks, dtype=stage.dtype)
        if "disk" not in found.values():
            break
    device_map = {name: devices[i] for name, i in found.items()}

    def device_of(name: str) -> str:
        while name and name not in device_map:
            name = name.rpartition(".")[0]
        return device_map.get(name, devices[-1])

    weights, layers, seen = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0), set[int]()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[device_of(name)] += tensor.nbytes
    at = {id(module): name for name, module in model.named_modules()}
    for layer in decoder_layers(model):
        layers[device_of(at[id(layer)])] += 1
    shares = tuple(Share(name, weights[name], layers[name]) for name in devices if weights[name])
    return replace(stage, device=shares[0].device, shares=shares), device_map


def _check_contradiction(stage: StageFacts, place: str | tuple[str, ...] | None) -> None:
    """Raises ``ValueError`` where the user requests another device for a loaded model than the one it is on."""
    if stage.loaded and place not in (None, AUTO, stage.device, tuple(s.device for s in stage.on)):
        raise ValueError(
            f"{stage.name} was given as a model on {', '.join(s.device for s in stage.on)}, which contradicts device={place!r}: move it with "
            "model.to(...), leave device out, or give its path"
        )
