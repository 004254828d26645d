"""The devices of the machine, and what ``device=`` and ``weights=`` say of each stage."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pipespec.engine.inputs import stage_names
from pipespec.models.quantizing import NAMES, Weights
from pipespec_kernels.env import host_memory

Device = torch.device | str
Place = Device | Sequence[Device] | None
Devices = Device | Mapping[str, Place] | Sequence[Place] | None
"""Values of ``device=``: one device or ``"auto"`` for all stages, one per stage (drafts first, target last), or a mapping by stage name ("drafts": the others). A stage that
has a list of devices is split over them."""

AUTO = "auto"


class DeviceFacts(NamedTuple):
    """A device: ``"cpu"`` or ``"cuda:0"``, the bytes of its memory (0: the system does not report it), and those that can be allocated now."""

    name: str
    total: int
    free: int


def device_facts(names: Sequence[str] | None = None) -> list[DeviceFacts]:
    """The CPU and the GPUs that torch sees; ``names``: these only, as a query creates a CUDA context. What torch has reserved and does not use is free."""
    found = []
    if names is None or "cpu" in names:
        found.append(DeviceFacts("cpu", *host_memory()))
    for i in range(torch.cuda.device_count()):
        if names is None or f"cuda:{i}" in names:
            free, total = torch.cuda.mem_get_info(i)
            unused = torch.cuda.memory_reserved(i) - torch.cuda.memory_allocated(i)
            found.append(DeviceFacts(f"cuda:{i}", total, free + unused))
    return found


def requested(device: Devices, count: int) -> list[str | tuple[str, ...] | None]:
    """Normalise ``device=`` for ``count`` stages.

    Returns:
        Per stage one name (``"cuda"`` becomes the current GPU), :data:`AUTO`, a tuple of names for a stage that is to be split, or None.

    Raises:
        ValueError: a device that does not exist or that no stage can run on; too many or too few devices; an unknown stage.
        TypeError: an element that is not a device.
    """
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
        if name is not None and name not in NAMES:
            raise ValueError(f"weights={name!r}: the weight formats are {', '.join(NAMES)}")
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
