"""Placement: the device of each stage of a chain, before any weight is read. accelerate plans ``"auto"`` and a stage that is split."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.checks.devices import AUTO, Devices, device_facts, requested
from pipespec.checks.memory import gib
from pipespec.engine.inputs import stage_names
from pipespec.errors import DoesNotFit
from pipespec.models.devices import LayerDevices
from pipespec.models.loading import file_in_blocks, load_config, readable, stored_bytes
from pipespec.models.properties import quantisation, text_config

DeviceMap = dict[str, str]
"""The device of each module by its name, as ``from_pretrained`` takes it."""

SHARE = 0.9
"""Of the free memory, the part for weights. transformers takes as much with ``device_map="auto"``."""


def arrange(
    given: Sequence[PreTrainedModel | str | Path],
    *,
    device: Devices = None,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
    names: Sequence[str] | None = None,
) -> list[str | DeviceMap | None]:
    """Choose the device of each stage, and read the configurations of those that are to be loaded.

    A stage with ``device="auto"`` goes to the GPU with the most free memory, the target first; where none has enough, accelerate splits it over them,
    in the order of their free memory. Without GPUs it goes to the CPU.

    Args:
        given: models or paths, drafts first, target last.
        dtype: as ``from_pretrained`` takes it, like ``trust_remote_code``.
        names: of the stages; None: ``given`` is the whole chain.

    Returns:
        Per stage the device to load it to, or for one that is split a device map; None for a model that is loaded.

    Raises:
        DoesNotFit: the weights of a stage to be split do not fit its devices.
        ImportError: accelerate is needed, and not installed.
        ValueError: a device that cannot be used, or a stage that cannot be split.
        Exception: those of :func:`pipespec.models.loading.load_config`.
    """
    places, names = requested(device, len(given)), names or stage_names(len(given))
    configs: list[Any] = []
    for name, model, place in zip(names, given, places, strict=True):
        if not isinstance(model, PreTrainedModel):
            configs.append(load_config(model, trust_remote_code=trust_remote_code))
            continue
        on = tuple(map(str, LayerDevices.of(model).devices))
        if place not in (None, AUTO, on[0], on):
            raise ValueError(
                f"{name} was given as a model on {', '.join(on)}, which contradicts device={place!r}: move it with "
                "model.to(...), leave device out, or give its path"
            )
        configs.append(None)
    free: dict[str, int] = {}
    if any(place == AUTO or isinstance(place, tuple) for place in places):
        free = {fact.name: int(SHARE * fact.free) for fact in device_facts() if fact.name != "cpu"}
    found: list[str | DeviceMap | None] = []
    # The target chooses first, then the drafts, the last one first.
    for name, model, config, place in reversed(list(zip(names, given, configs, places, strict=True))):
        if config is None:
            found.insert(0, None)
        elif isinstance(place, tuple) or (place == AUTO and free):
            found.insert(0, _planned(name, model, config, place, free, dtype, trust_remote_code))
        else:
            found.insert(0, "cpu" if place in (None, AUTO) else place)
    return found


def _planned(
    name: str, path: Any, config: Any, place: str | tuple[str, ...], free: dict[str, int], dtype: Any, remote: bool
) -> str | DeviceMap:
    """Plan one stage by accelerate: whole on the GPU with the most free memory (``"auto"``) where it fits, else in runs of layers. Lowers ``free``."""
    gpus = sorted(free, key=lambda gpu: -free[gpu]) if place == AUTO else list(place)
    file = file_in_blocks(path)
    if file is not None or quantisation(config) is not None:
        if place != AUTO:
            raise ValueError(
                f"{name} cannot be split over {', '.join(gpus)}: its parts are not known before it is loaded; load it with device_map="
            )
        free[gpus[0]] -= stored_bytes(path) if file is None else file.nbytes
        return gpus[0]
    if place == AUTO and len(gpus) == 1:
        return gpus[0]
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils import compute_module_sizes, get_balanced_memory
    except ImportError as error:
        raise ImportError(
            f"{name}: device='auto' among several GPUs, and a model over several devices, need the package accelerate, which chooses the device of "
            "each layer: pip install accelerate"
        ) from error
    wanted = getattr(text_config(config), "dtype", None) if dtype == "auto" else dtype
    wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    with readable(path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=wanted, trust_remote_code=remote)
    model.tie_weights()  # transformers 5.0 ties in from_pretrained only
    sizes = compute_module_sizes(model)
    if place == AUTO and sizes[""] <= free[gpus[0]]:
        free[gpus[0]] -= sizes[""]
        return gpus[0]
    blocks, limits = list(model._no_split_modules or ()), {i: max(0, free.get(gpu, 0)) for i, gpu in enumerate(gpus)}
    # About equal shares of named GPUs where that fits, else each in turn is filled.
    tries = [limits] if place == AUTO else [get_balanced_memory(model, limits, no_split_module_classes=blocks), limits]
    plans = (infer_auto_device_map(model, room, no_split_module_classes=blocks) for room in tries)
    planned = next((plan for plan in plans if all(isinstance(at, int) for at in plan.values())), None)
    if planned is None:
        rooms = ", ".join(f"{gpu} {gib(free.get(gpu, 0))}" for gpu in gpus)
        raise DoesNotFit(
            f"{name} has {gib(sizes[''])} GiB of weights, and these GPUs have room for less ({rooms}): use a smaller dtype (dtype='bfloat16'), "
            "quantised weights, or more GPUs"
        )
    for part, at in planned.items():
        free[gpus[at]] = free.get(gpus[at], 0) - sizes.get(part, 0)
    return {part: gpus[at] for part, at in planned.items()}
