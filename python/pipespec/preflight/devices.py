"""The devices of the machine, and those that ``device=`` requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pipespec.engine.inputs import stage_names
from pipespec_kernels.env import host_memory

Device = torch.device | str
Place = Device | Sequence[Device] | None
Devices = Device | Mapping[str, Place] | Sequence[Place] | None
"""Values of ``device=``: one device or ``"auto"`` for all stages, one per stage (drafts first, target last), or a mapping by stage name. A stage that
has a list of devices is split over them."""

AUTO = "auto"


@dataclass(frozen=True)
class DeviceFacts:
    """A device that stages can run on.

    Attributes:
        name: ``"cpu"``, or ``"cuda:0"`` and so on.
        total: bytes of its memory; 0 where the system does not report it.
        free: bytes that can be allocated there now.
    """

    name: str
    total: int
    free: int


def device_facts(names: Sequence[str] | None = None) -> list[DeviceFacts]:
    """The CPU and the GPUs that torch sees.

    A query of a GPU's free memory creates a CUDA context there, which takes some of it. Memory that torch has reserved and does not use
    counts as free.

    Args:
        names: query these devices only.
    """
    found = []
    if names is None or "cpu" in names:
        found.append(DeviceFacts("cpu", *host_memory()))
    for i in range(torch.cuda.device_count()):
        if names is None or f"cuda:{i}" in names:
            free, total = torch.cuda.mem_get_info(i)
            free += torch.cuda.memory_reserved(i) - torch.cuda.memory_allocated(i)
            found.append(DeviceFacts(f"cuda:{i}", total, free))
    return found


def requested(device: Devices, count: int) -> list[str | tuple[str, ...] | None]:
    """Normalise ``device=``.

    Args:
        device: the user's value.
        count: number of stages.

    Returns:
        Per stage one name (``"cuda"`` becomes the current GPU), :data:`AUTO`, a tuple of names for a stage that is to be split, or None.

    Raises:
        ValueError: a device that does not exist or that no stage can run on; too many or too few devices; an unknown stage.
        TypeError: an element that is not a device.
    """
    names = stage_names(count)
    each: list[Place]
    if isinstance(device, Mapping):
        unknown = [key for key in device if key not in names]
        if unknown:
            raise ValueError(
                f"device: there is no stage {', '.join(map(repr, unknown))}; the stages are {', '.join(names)}"
            )
        each = [device.get(name) for name in names]
    elif isinstance(device, Sequence) and not isinstance(device, str):
        if len(device) != count:
            raise ValueError(f"device: one for all, or one per stage ({count}: {', '.join(names)}), not {len(device)}")
        each = list(device)
    else:
        each = [device] * count
    return [_place(d) for d in each]


def _place(place: Place) -> str | tuple[str, ...] | None:
    """The device of a stage, or its devices."""
    if isinstance(place, str) and "+" in place:
        place = place.split("+")  # as the command line names them
    if place is None or isinstance(place, (str, torch.device)) or not isinstance(place, Sequence):
        return place if place is None or place == AUTO else device_name(place)
    several = tuple(device_name(device) for device in place)
    if len(several) < 2 or len(set(several)) < len(several) or "cpu" in several:
        raise ValueError(
            f"device={list(place)!r} for one stage: name two or more different GPUs to split it over (device_map= of transformers offloads to "
            "the CPU)"
        )
    return several


def device_name(device: Device) -> str:
    """The name of one device: ``"cpu"``, or ``"cuda:0"`` and so on.

    Raises:
        ValueError: it does not exist, or no stage can run on it.
        TypeError: not a device.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be 'cpu', 'cuda:0' or the like, not {device!r}")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={str(device)!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'") from None
    if found.type == "cpu":
        if found.index:
            raise ValueError(f"device={str(device)!r}: all cores are one device; use 'cpu'")
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
