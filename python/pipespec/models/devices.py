"""LayerDevices: the devices on which the parts of a model compute, one or several, and whether their weights are elsewhere between calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.models.properties import text_config


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers that a forward runs; empty for a model without any in the usual place."""
    base: Any = getattr(model, model.base_model_prefix, None)
    return list(getattr(base, "layers", ()))[: getattr(text_config(model.config), "num_hidden_layers", 0)]


@dataclass(frozen=True)
class LayerDevices:
    """Where a model computes.

    accelerate (``device_map``) lets layers compute on several devices, and brings weights from the CPU or a disk when a module is called. Their
    parameters are then on the meta device between calls, and the module's hook names the device that computes.

    Attributes:
        inputs: where the embedding computes: the device of token ids, positions and masks.
        layers: per decoder layer, where its attention computes, so where its keys and values belong.
    """

    inputs: torch.device
    layers: tuple[torch.device, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerDevices:
        """Of a model. Reads one parameter per layer."""
        try:
            embedding: Any = model.get_input_embeddings()
        except NotImplementedError:
            embedding = None
        layers = [layer._modules.get("self_attn", layer) for layer in decoder_layers(model)]
        inputs, *found = map(_computes_on, (embedding, *layers))
        if len({inputs, *found}) == 1 or not layers:
            # Also a model whose parts are in unusual places.
            whole = model.device if inputs is None or model.device.type != "meta" else inputs
            return cls(whole, (whole,) * (len(layers) or getattr(text_config(model.config), "num_hidden_layers", 0)))
        inputs = inputs or model.device
        return cls(inputs, tuple(device or inputs for device in found))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All of them, that of the inputs first."""
        return tuple(dict.fromkeys((self.inputs, *self.layers)))

    @property
    def is_split(self) -> bool:
        """Whether there are several devices."""
        return len(self.devices) > 1

    def shares(self) -> Counter[torch.device]:
        """Number of layers per device."""
        return Counter(self.layers)


def input_device(model: PreTrainedModel) -> torch.device:
    """The device that a model takes its token ids on."""
    return LayerDevices.of(model).inputs


def _computes_on(module: nn.Module | None) -> torch.device | None:
    """The device on which a module computes, by its first parameter; None for a module without parameters."""
    for part in each_module(module) if module is not None else ():
        for parameter in part._parameters.values():
            if parameter is None:
                continue
            named = None
            if parameter.is_meta:
                # accelerate names GPUs by their index, too.
                named = next(
                    (at for hook in hooks_of(part) if (at := getattr(hook, "execution_device", None)) is not None), None
                )
            if named is None:
                return parameter.device
            found = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
            return torch.device("cuda", 0) if found.type == "cuda" and found.index is None else found
    return None


def each_module(module: nn.Module) -> Iterator[nn.Module]:
    """``module.modules()`` in a fraction of the time, for checks in each call. A shared module comes several times."""
    stack = [module]
    while stack:
        module = stack.pop()
        yield module
        stack += [child for child in reversed(module._modules.values()) if child is not None]


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks of a module."""
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))


def offloaded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules whose weights accelerate brings from the CPU or a disk in each call."""
    if not any("_hf_hook" in module.__dict__ for module in each_module(model)):
        return {}
    return {
        name or "all of it": module
        for name, module in model.named_modules()
        if any(getattr(hook, "offload", False) for hook in hooks_of(module))
    }


def is_dispatched(model: nn.Module) -> bool:
    """Whether hooks of accelerate's or others run before the forwards of its parts, and so can move hidden states between devices."""
    return any(next(hooks_of(module), None) is not None or module._forward_pre_hooks for module in each_module(model))


def local_kv_heads(model: PreTrainedModel) -> int | None:
    """Key/value heads per layer of a model whose projections are sharded over processes (tensor parallel), in this process.

    Returns:
        None for a model that is whole here.
    """
    if tensor_parallel_size(model) == 1:
        return None
    layers: list[Any] = decoder_layers(model)
    attention = getattr(layers[0], "self_attn", None) if layers else None
    weight = getattr(getattr(attention, "k_proj", None), "weight", None)
    if attention is None or weight is None:
        return None
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return int(local.shape[0]) // int(attention.head_dim)


def tensor_parallel_size(model: nn.Module) -> int:
    """Number of processes over which transformers has sharded a model (``tp_plan``); 1 for a model that is whole."""
    return getattr(model, "_tp_size", None) or 1


def not_whole_reason(model: PreTrainedModel) -> str | None:
    """Why a model is not whole on one device; None if it is."""
    if offloaded := next(iter(offloaded_modules(model)), None):
        return f"accelerate brings the weights of {offloaded} from elsewhere in each call (offloading)"
    if (processes := tensor_parallel_size(model)) > 1:
        return f"its weights are sharded over {processes} processes (tensor parallel)"
    devices = LayerDevices.of(model).devices
    return f"it is split over {', '.join(map(str, devices))}" if len(devices) > 1 else None
