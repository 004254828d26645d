"""Placement: the device of each stage of a chain, before any weight is read. accelerate plans a stage that is split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pipespec.checks.devices import AUTO, DeviceFacts, Devices, device_facts, requested
from pipespec.checks.memory import Share, StageFacts, estimate
from pipespec.config import WIDTH
from pipespec.engine.inputs import INITIAL_CAPACITY, stage_names
from pipespec.models.devices import decoder_layers
from pipespec.models.properties import quantisation, text_config

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
        dtype: as ``from_pretrained`` takes it, like ``trust_remote_code``: of all stages, or one per stage.
        shares_weights: whether drafts run in processes of their own, see :func:`pipespec.checks.memory.estimate`.
        facts: of the devices; None queries them.
        names: of the stages; None: ``given`` is the whole chain.

    Returns:
        Per stage the device to load it to, or for one that is split a device map; None for a model that is loaded.

    Raises:
        DoesNotFit: the weights, or the caches of one text, do not fit.
        ImportError: a stage is to be split, and accelerate is not installed.
        ValueError: a device that cannot be used, or a stage that cannot be split.
        Exception: those of :func:`pipespec.models.loading.load_config`.
    """
    places = requested(device, len(given))
    dtypes = [dtype] * len(given) if isinstance(dtype, (str, torch.dtype)) else dtype
    stages = [
        StageFacts.of_model(name, model)
        if isinstance(model, PreTrainedModel)
        else StageFacts.of_path(name, model, of_stage, trust_remote_code=trust_remote_code)
        for name, model, of_stage in zip(names or stage_names(len(given)), given, dtypes, strict=True)
    ]
    loaded = [isinstance(model, PreTrainedModel) for model in given]
    for stage, place, is_loaded in zip(stages, places, loaded, strict=True):
        on = tuple(share.device for share in stage.shares)
        if is_loaded and place not in (None, AUTO, on[0], on):
            raise ValueError(
                f"{stage.name} was given as a model on {', '.join(on)}, which contradicts device={place!r}: move it with "
                "model.to(...), leave device out, or give its path"
            )
    configs = [text_config(stage.model.config) for stage in stages]
    used = {share.device for stage in stages for share in stage.shares}
    if (all(loaded) and used == {"cpu"}) or not all(hasattr(config, "num_attention_heads") for config in configs):
        # check_architecture() refuses a model that is not a decoder by its name once it is loaded.
        return [None if is_loaded else "cpu" for is_loaded in loaded]
    longest = [getattr(config, "max_position_embeddings", None) or INITIAL_CAPACITY for config in configs]
    capacity = min(*longest, INITIAL_CAPACITY) + WIDTH
    if facts is None:
        used |= {name for place in places for name in ([place] if isinstance(place, str) else place or ())}
        facts = device_facts(None if AUTO in used else sorted({"cpu"} | used))
    free, found = {fact.name: fact.free for fact in facts}, list[str | DeviceMap | None]()
    # The target chooses first, then the drafts, the last one first.
    for i in reversed(range(len(stages))):
        where = None
        if not loaded[i]:
            stages[i], where = _place(stages[i], places[i], free, capacity)
        found.insert(0, where)
        for need in estimate([stages[i]], 1, capacity).needs:
            free[need.device] = free.get(need.device, 0) - need.sum
    needed = estimate(stages, 1, capacity, shares_weights=shares_weights)
    needed.check([fact for fact in facts if needed.on(fact.name)])
    return found


def _place(
    stage: StageFacts, place: str | tuple[str, ...] | None, free: dict[str, int], capacity: int
) -> tuple[StageFacts, str | DeviceMap]:
    """A stage on the device or the devices that were requested. ``"auto"``: the GPU with the most free memory if it fits there, else all GPUs."""
    if is_auto := place == AUTO:
        gpus = sorted((name for name in free if name != "cpu"), key=lambda name: -free[name])
        is_whole = not gpus or len(gpus) == 1 or quantisation(stage.model) is not None
        is_whole = is_whole or estimate([stage], 1, capacity).needs[0].sum <= free[gpus[0]]
        place = (gpus or ["cpu"])[0] if is_whole else tuple(gpus)
    if isinstance(place, tuple):
        return _split(stage, place, free, capacity, is_even=not is_auto)
    return stage._replace(shares=(stage.shares[0]._replace(device=place or "cpu"),)), place or "cpu"


def _split(
    stage: StageFacts, devices: tuple[str, ...], free: dict[str, int], capacity: int, *, is_even: bool
) -> tuple[StageFacts, DeviceMap]:
    """Split a stage into runs of layers: about equal bytes on each device (``is_even``) where that fits, otherwise each device in turn is filled."""
    model = stage.model
    if quantisation(model) is not None:
        raise ValueError(
            f"{stage.name} cannot be split over {', '.join(devices)}: its parts are not known before it is loaded; load it with device_map="
        )
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils import compute_module_sizes
    except ImportError as error:
        raise ImportError(
            f"{stage.name}: a model over several devices needs the package accelerate, which moves its hidden states between them: pip install "
            "accelerate"
        ) from error

    (need,) = estimate([stage], 1, capacity).needs
    beside = need.activations + need.headroom + need.caches // len(devices)
    limits = {i: max(0, free.get(name, 0) - beside) for i, name in enumerate(devices)}
    # accelerate leaves room for the largest part on the first device.
    parts = (*decoder_layers(model), model.get_input_embeddings())
    even = stage.weights // len(devices) + max(sum(p.nbytes for p in part.parameters()) for part in parts)
    if is_even and even <= min(limits.values()):
        limits = dict.fromkeys(limits, even)
    # What fits nowhere goes to the last device: the check of the memory names what is lacking.
    limits[len(devices) - 1] = 1 << 60
    blocks, layers = list(model._no_split_modules or ()), {id(layer) for layer in decoder_layers(model)}
    planned = infer_auto_device_map(model, limits, no_split_module_classes=blocks, dtype=model.dtype)
    sizes, shares = compute_module_sizes(model), dict.fromkeys(devices, (0, 0))
    for name, at in planned.items():
        weights, count = shares[devices[at]]
        inside = sum(id(module) in layers for module in model.get_submodule(name).modules())
        shares[devices[at]] = (weights + sizes.get(name, 0), count + inside)
    on = tuple(Share(device, *share) for device, share in shares.items() if any(share))
    return stage._replace(shares=on), {name: devices[at] for name, at in planned.items()}
