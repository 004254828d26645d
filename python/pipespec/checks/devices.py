"""The devices of the machine, what ``device=`` and ``weights=`` say of each stage, and where each is loaded.

accelerate plans ``"auto"`` and a stage that is split.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.checks.calls import device_facts, gib
from pipespec.config import WEIGHT_FORMATS
from pipespec.engine.chain import stage_names
from pipespec.errors import DoesNotFit
from pipespec.models.loading import file_in_blocks, load_config, readable, stored_bytes
from pipespec.models.properties import LayerDevices, quantisation, text_config

Device = torch.device | str
Place = Device | Sequence[Device] | None
Devices = Device | Mapping[str, Place] | Sequence[Place] | None
"""Values of ``device=``: one device or ``"auto"`` for all stages, one per stage (drafts first, target last), or a mapping by stage name ("drafts": the others). A stage that
has a list of devices is split over them."""

Weights = str | None | Sequence[str | None] | Mapping[str, str | None]
"""Values of ``weights=``: one weight format for all stages, one per stage, or by the names of stages."""

AUTO = "auto"

DeviceMap = dict[str, str]
"""The device of each module by its name, as ``from_pretrained`` takes it."""

SHARE = 0.9
"""Of the free memory, the part for weights. transformers takes as much with ``device_map="auto"``."""


def requested(device: Devices, count: int) -> list[str | tuple[str, ...] | None]:
    """Normalise ``device=``: for each of ``count`` stages one name (``"cuda"`` becomes the current GPU), :data:`AUTO`, a tuple of names for a stage that
    is to be split, or None. Raises the errors of :func:`of_each` and :func:`device_name`."""
    found: list[str | tuple[str, ...] | None] = []
    for place in place_of_each(device, stage_names(count)):
        if place is None or place == AUTO:
            found.append(place)
        elif isinstance(place, Sequence) and not isinstance(place, str):
            several = tuple(map(device_name, place))
            if len(several) < 2 or len(set(several)) < len(several) or "cpu" in several:
                raise ValueError(
                    f"device={list(place)!r} for one stage: name two or more different GPUs to split it over (device_map= of transformers "
                    "offloads to the CPU)"
                )
            found.append(several)
        else:
            found.append(device_name(place))
    return found


def place_of_each(device: Devices, names: Sequence[str]) -> list[Place]:
    """What ``device=`` says of each stage; a list of devices where the command line has them with ``+`` between them."""
    places = of_each("device", device, names)
    return [place.split("+") if isinstance(place, str) and "+" in place else place for place in places]


def weights_of_each(weights: Weights, names: Sequence[str]) -> list[str | None]:
    """The weight format of each stage, None for one that stays as it is. Raises ``TypeError`` for a value that is no name."""
    found = of_each("weights", weights, names)
    for name in found:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"weights: a weight format is a name, not {name!r}")
        if name is not None and name not in WEIGHT_FORMATS:
            raise ValueError(f"weights={name!r}: the weight formats are {', '.join(WEIGHT_FORMATS)}")
    return found


def of_each(argument: str, given: Any, names: Sequence[str]) -> list[Any]:
    """What an argument says of each stage: one value for all, one per stage, or by the names of stages; "drafts" is that of the others.

    Raises ``ValueError`` for too many or too few values, and an unknown stage.
    """
    if isinstance(given, Mapping):
        if unknown := [repr(key) for key in given if key not in (*names, "drafts")]:
            raise ValueError(
                f"{argument}: there is no stage {', '.join(unknown)}; the stages are {', '.join(names)}, or 'drafts' for all drafts"
            )
        return [given.get(name, None if name == names[-1] else given.get("drafts")) for name in names]
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * len(names)
    if len(given) != len(names):
        raise ValueError(
            f"{argument}: one for all, or one per stage ({len(names)}: {', '.join(names)}), not {len(given)}"
        )
    return list(given)


def rank_device(device: Device) -> str:
    """:func:`device_name` for a rank: ``"cuda"`` is the GPU of number LOCAL_RANK, or RANK. Raises its errors."""
    if str(device) != "cuda":
        return device_name(device)
    local = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    try:
        return device_name(f"cuda:{local}")
    except ValueError as error:
        raise ValueError(f"{error}; start fewer ranks here, or let them share a GPU with device='cuda:0'") from None


def device_name(device: Device) -> str:
    """The name of one device: ``"cpu"``, or ``"cuda:0"`` and so on. ``ValueError``: it does not exist, or no stage can run on it; ``TypeError``: no device."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be 'cpu', 'cuda:0' or the like, not {device!r}")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={str(device)!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'") from None
    if found.type == "cpu":
        return "cpu"
    if found.type != "cuda":
        raise ValueError(f"device={str(device)!r}: stages run on cpu or cuda, not on {found.type}")
    count = torch.cuda.device_count()
    if count == 0:
        build = "" if torch.version.cuda else "; this torch is a build for CPUs"
        raise ValueError(f"device={str(device)!r}: torch sees no GPU here{build} (`pipespec doctor` says more)")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise ValueError(f"device={str(device)!r}: torch sees {count} GPUs, cuda:0 to cuda:{count - 1}")
    return f"cuda:{index}"


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
        Exception: those of ``load_config``.
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
