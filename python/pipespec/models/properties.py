"""Properties of a model beyond its attributes: dtype, vocabulary, size, quantisation, RoPE that depends on the length of the text, the devices on which its parts
compute, and adapters in it (LoRA and others of the package peft, which is not imported)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the decoder."""
    return config.get_text_config(decoder=True)


def compute_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's hidden states, keys and values.

    ``model.dtype`` is that of the first floating-point parameter, which may be a storage format of 8 bits.
    """
    dtype: torch.dtype = model.dtype
    if dtype.itemsize >= 2:
        return dtype
    wide = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize >= 2)
    return next(wide, dtype)


def kv_dtype(config: Any, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which keys and values of a model with hidden states of ``dtype`` are kept on a device.

    On the CPU a model in float32 may keep them in the dtype that its configuration names as ``kv_dtype``. Models with matrices in blocks do:
    bfloat16 halves what a step reads after a long text, and rounds less than the blocks do.
    """
    name = getattr(text_config(config), "kv_dtype", None)
    is_wide = dtype == torch.float32 and device.type == "cpu"
    return getattr(torch, name) if name is not None and is_wide else dtype


def embedding_size(model: Any) -> int:
    """Number of tokens in a model's embedding, packed weights included."""
    return _rows(model, model.get_input_embeddings(), "num_embeddings")


def head_size(model: Any) -> int:
    """Logits per position of a model's head, packed weights included."""
    return _rows(model, model.get_output_embeddings(), "out_features")


def end_tokens(model: Any) -> list[int]:
    """The tokens that end the model's text, by its generation configuration."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _rows(model: Any, module: Any, declared: str) -> int:
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.shape[0]
    # Packed weights have another shape. An unknown module may have neither.
    found = getattr(module, declared, None)
    return int(text_config(model.config).vocab_size if found is None else found)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers. Tied ones count once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def step_bytes(model: nn.Module, columns: int = 1) -> float:
    """Bytes of the weights that a step over ``columns`` columns reads: all of them, but of routed experts those that columns which choose independently are
    expected to choose together."""
    total = float(weight_bytes(model))
    config = getattr(model, "config", None)
    chosen = 0 if config is None else getattr(text_config(config), "num_experts_per_tok", None) or 0
    for module in model.modules() if chosen else ():
        # Routers have the number, too.
        count = getattr(module, "num_experts", 0) if type(module).__name__.endswith("Experts") else 0
        if count:
            total -= (1 - chosen / count) ** columns * weight_bytes(module)
    return total


def quantisation(model: Any) -> str | None:
    """How a model is quantised.

    Args:
        model: a model, or a configuration.

    Returns:
        The method, with its bits if it names them (``"bitsandbytes 4-bit"``); None if the model is not quantised.
    """
    settings = getattr(getattr(model, "config", model), "quantization_config", None) or {}
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = getattr(model, "quantization_method", None) or settings.get("quant_method") or ""
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else settings.get("bits")
    # Older files do not name it.
    method = str(getattr(method, "value", method)) or ("bitsandbytes" if bits else "")
    if method:
        return f"{method} {bits}-bit" if isinstance(bits, int) else method
    if isinstance(model, nn.Module):
        for parameter in model.parameters():
            # bitsandbytes and torchao pack weights into classes of their own, with and without transformers.
            root = type(parameter).__module__.split(".")[0]
            if root in ("bitsandbytes", "torchao"):
                return f"{root} {type(parameter).__name__}"
    return None


def has_dropout(module: nn.Module) -> bool:
    """Whether a call of the module draws something in training mode. Nothing else of a known module depends on the mode, but for gradient checkpointing."""
    numbers = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name]
    if "Drop" in type(module).__name__:
        numbers.append(getattr(module, "p", 0))
    return any(isinstance(number, (int, float)) and number > 0 for number in numbers)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the instance has a ``forward`` of its own, as accelerate and kernelize give it."""
    own = module.__dict__.get("forward")
    # transformers 5.0 leaves the class's own forward there after it captured hidden states.
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its ``forward``: hooks, or a compiled call."""
    if module._forward_pre_hooks or module._compiled_call_impl is not None:
        return True
    return not all(map(_changes_no_value, module._forward_hooks.values()))


def _changes_no_value(hook: Any) -> bool:
    """Whether a hook is one of transformers' that stay installed: that with which it captures hidden states, which does nothing by itself, and that of
    gradient checkpointing, which lets the embeddings require gradients."""
    package, _, rest = str(getattr(hook, "__module__", "")).partition(".")
    name = getattr(hook, "__qualname__", "")
    return "output_capturing" in rest or (
        package in ("transformers", "peft") and name.endswith(".make_inputs_require_grads")
    )


def _rotaries(model: PreTrainedModel) -> Iterator[Any]:
    """The rotary embeddings of a model, as it was made."""
    decoder = getattr(model, model.base_model_prefix, model)
    yield from (module for module in decoder._modules.values() if any(_ropes(module)))


def _ropes(rotary: Any) -> Iterator[tuple[str, str]]:
    """Of a rotary embedding, the prefix of its attributes for each type of layers (empty: for all), and the ``rope_type``."""
    kinds = {} if rotary is None else vars(rotary).get("rope_type", {})
    for layer_type, kind in (kinds if isinstance(kinds, dict) else {"": kinds}).items():
        yield f"{layer_type}_" if layer_type else "", str(kind)


def rope_type(model: PreTrainedModel) -> str:
    """The ``rope_type`` of a model, as transformers names it: of several the one that depends on the length of a text; empty if it has none."""
    kinds = [kind for rotary in _rotaries(model) for _, kind in _ropes(rotary)]
    return next(filter(is_dynamic, kinds), kinds[0] if kinds else "")


def is_dynamic(rope_type: object) -> bool:
    """Whether RoPE of this type depends on the longest position of a forward."""
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def rope_changes_at(model: PreTrainedModel) -> int | None:
    """Positions beyond which a model's RoPE depends on the longest position of a forward; None: it never does."""
    limits = map(rotary_changes_at, _rotaries(model))
    return min((limit for limit in limits if limit is not None), default=None)


def rotary_changes_at(rotary: Any) -> int | None:
    """:func:`rope_changes_at` of a rotary embedding."""
    limits = []
    for prefix, kind in _ropes(rotary):
        if kind == "longrope":
            # Its forward reads the configuration.
            parameters = rotary.config.rope_parameters
            parameters = parameters[prefix.removesuffix("_")] if prefix else parameters
            limits.append(int(parameters.get("original_max_position_embeddings", 0)))
        elif is_dynamic(kind):
            limits.append(int(rotary.original_max_seq_len))
    return min(limits, default=None)


def reset_rope(model: PreTrainedModel) -> None:
    """Restore the frequencies of a new model, after forwards over longer texts. transformers does so for some texts only, and 5.0 never."""
    for rotary in _rotaries(model):
        reset_rotary(rotary)


def reset_rotary(rotary: Any) -> None:
    """:func:`reset_rope` of a rotary embedding."""
    for prefix, kind in _ropes(rotary):
        if "dynamic" not in kind:
            continue
        # 5.0 notes the longest text of models with one kind of layers under None's name.
        names, first = (
            (f"{prefix}max_seq_len_cached", f"{prefix or 'None_'}max_seq_len_cached"),
            rotary.original_max_seq_len,
        )
        if any(getattr(rotary, name, first) > first for name in names):
            for name in names:
                setattr(rotary, name, first)
            place = getattr(rotary, f"{prefix}inv_freq").device
            original = getattr(rotary, f"{prefix}original_inv_freq").to(place)
            rotary.register_buffer(f"{prefix}inv_freq", original, persistent=False)


def dynamic_frequencies(rotary: Any) -> list[torch.Tensor]:
    """The frequencies of a rotary embedding of type dynamic: after :func:`reset_rotary`, those of texts of the original length."""
    return [getattr(rotary, f"{prefix}inv_freq") for prefix, kind in _ropes(rotary) if "dynamic" in kind]


def changing_buffers(module: Any) -> frozenset[str]:
    """Names of the buffers of a module that its own forwards replace or write: frequencies of dynamic RoPE."""
    return frozenset(f"{prefix}inv_freq" for prefix, kind in _ropes(module) if is_dynamic(kind))


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


def without_wrapper(model: Any) -> Any:
    """The transformers model within a ``PeftModel``, whose layers hold the adapters. Any other object as it is.

    Raises:
        ValueError: The adapter is a learned prompt, which is outside of the layers.
    """
    if isinstance(model, PreTrainedModel) or not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"the {type(model).__name__} has an adapter that is a learned prompt, which only its own generate() adds; use adapters in the "
            "layers (LoRA), or merge what was learned"
        )
    return model.get_base_model()


def named_tensors(model: nn.Module, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, tied ones under each name, as the model's class creates them: adapted layers with their adapters merged.

    Args:
        model: Stays as it is.
        merged: False: for the names alone, without the work of a merge.
    """
    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if is_adapted(module)}
    own = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    yield from ((name, tensor) for name, tensor in own if not any(name.startswith(f"{at}.") for at in adapted))
    for at, module in adapted.items():
        base = base_layer(module) if merged else module.base_layer
        yield from ((f"{at}.{name}", parameter) for name, parameter in base.named_parameters())
        yield from ((f"{at}.{name}", buffer) for name, buffer in base.named_buffers())


def base_layer(module: Any) -> nn.Module:
    """The model's own layer within an adapted one: a copy with the adapters merged, or the layer itself where nothing is to be merged."""
    layer = module
    if not module.merged and not getattr(module, "disable_adapters", False):
        layer = copy.deepcopy(module)
        with torch.no_grad():
            layer.merge()
    found: nn.Module = layer.base_layer
    return found


def is_adapted(module: Any) -> bool:
    """Whether a module is a layer of peft around one of the model's, which can be merged."""
    return (
        isinstance(getattr(module, "base_layer", None), nn.Module)
        and hasattr(module, "merge")
        and hasattr(module, "merged")
    )
