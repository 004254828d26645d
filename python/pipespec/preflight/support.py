"""Support: whether a model can run in this process, in a worker process, and in captured steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.inputs import stage_names
from pipespec.errors import NotCapturable, Unsupported
from pipespec.models.adapters import named_tensors
from pipespec.models.derived import Derivation
from pipespec.models.devices import (
    LayerDevices,
    each_module,
    hooks_of,
    input_device,
    is_dispatched,
    local_kv_heads,
    offloaded_modules,
    tensor_parallel_size,
    why_not_whole,
)
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import compute_dtype, quantisation, text_config
from pipespec.models.rope import is_dynamic

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def check_runnable(models: Sequence[PreTrainedModel], *, target_is_placed: bool = False) -> None:
    """Check that each model has its weights, and computes on devices and in a dtype that stages run in. Quantised models do.

    Args:
        models: drafts first, target last.
        target_is_placed: whether the driver itself moves the target's hidden states between devices.

    Raises:
        ValueError: for a model that is not loaded, sharded in a way that stages do not run, spread over devices without hooks, on another kind of
            device, or in another dtype.
    """
    names = stage_names(len(models))
    for name, model in zip(names, models, strict=True):
        if not _is_ordinary(model):
            _check_sharding(name, model, is_target=model is models[-1])
            _check_loaded(name, model)
        at = LayerDevices.of(model)
        for device in at.devices:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"{name} is on {device}; stages run on cpu or cuda")
        is_placed = target_is_placed and model is models[-1]
        if at.is_split and not is_placed and not is_dispatched(model):
            places = ", ".join(map(str, at.devices))
            raise ValueError(
                f"{name} is spread over {places}, and no hook moves hidden states between them: load it with device_map= (package "
                f"accelerate), give its path with device={{{name!r}: {[str(d) for d in at.devices]}}}, or move it to one device"
            )
        dtype = compute_dtype(model)
        if dtype.itemsize < 2 or not dtype.is_floating_point:
            raise ValueError(f"{name} computes in {dtype}; use float32, bfloat16 or float16")
        if dtype == torch.float16 and any(device.type == "cpu" for device in at.devices):
            raise ValueError(
                f"{name} is float16 on the CPU, where many operations are slow or missing; use float32 or bfloat16"
            )


def check_checkpointing(models: Sequence[PreTrainedModel]) -> None:
    """Raise ``Unsupported`` for a model whose layers drop their cache, as gradient checkpointing does in training mode."""
    for name, model in zip(stage_names(len(models)), models, strict=True):
        if any(getattr(module, "gradient_checkpointing", False) and module.training for module in each_module(model)):
            raise Unsupported(
                "gradient_checkpointing",
                f"generate(): {name} is in training mode with gradient checkpointing, which drops the cache of each layer; call its eval() or "
                "gradient_checkpointing_disable() before",
            )


def _is_ordinary(model: PreTrainedModel) -> bool:
    """Whether a model has no hooks of accelerate's, no weights on the meta device, and none that are sharded."""
    if tensor_parallel_size(model) > 1:
        return False
    return not any(
        "_hf_hook" in module.__dict__
        or any(p is not None and (p.is_meta or type(p).__name__ == "DTensor") for p in module._parameters.values())
        for module in each_module(model)
    )


def _check_sharding(name: str, model: PreTrainedModel, is_target: bool) -> None:
    sharded = next((at for at, parameter in model.named_parameters() if type(parameter).__name__ == "DTensor"), None)
    if (processes := tensor_parallel_size(model)) > 1:
        if not is_target:
            raise ValueError(
                f"{name} is sharded over processes (tp_plan): only the target may be; load the draft whole, it runs in rank 0 alone"
            )
        heads = getattr(text_config(model.config), "num_key_value_heads", None)
        here = local_kv_heads(model)
        if here is not None and heads is not None and here not in (heads, heads / processes):
            raise ValueError(
                f"{name} has {heads} key/value heads, which {processes} processes cannot share: use a number of processes that divides it"
            )
    elif sharded is not None:
        raise ValueError(
            f"{name} is sharded over processes ({sharded} is a DTensor) without a tensor-parallel plan: load it whole, or the target with "
            "tp_plan='auto'"
        )


def _check_loaded(name: str, model: PreTrainedModel) -> None:
    """Raise ``ValueError`` for weights on the meta device that no hook brings, and for a hook that moves the whole model."""
    offloaded = offloaded_modules(model)
    brought = {id(module) for found in offloaded.values() for module in found.modules()}
    for at, module in model.named_modules():
        if any(type(hook).__name__ == "CpuOffload" for hook in hooks_of(module)):
            raise ValueError(
                f"{name}: accelerate moves {at or 'all of it'} to the GPU when it is called (cpu_offload_with_hook), and its cache cannot "
                "follow; use device_map= or accelerate.cpu_offload, which bring the weights of one module at a time"
            )
        if id(module) not in brought and any(p is not None and p.is_meta for p in module._parameters.values()):
            raise ValueError(
                f"{name} has weights that are not loaded ({at or 'at the top'}, on the meta device); load it whole"
            )


def check_whole(models: Sequence[PreTrainedModel], where: str) -> None:
    """Raise ``ValueError`` for a model that is split, offloaded or sharded. ``where``: what needs whole models, for the message."""
    for name, model in zip(stage_names(len(models)), models, strict=True):
        if (why := why_not_whole(model)) is not None:
            raise ValueError(
                f"{where} needs each model whole on one device, and {name} is not: {why}; use schedule='plain', 'lockstep' or 'workers'"
            )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# ---- in a worker process


def check_shared_draft(name: str, method: str | None, devices: Sequence[str], offloaded: Sequence[str] = ()) -> None:
    """Check that a draft can be built in a worker process, around weights in shared memory.

    Args:
        name: of the stage.
        method: how it is quantised; None: not at all.
        devices: those that it computes on.
        offloaded: names of modules whose weights are elsewhere between calls.

    Raises:
        ValueError: if it cannot.
    """
    how = (
        f"quantised ({method})"
        if method is not None
        else f"split over {', '.join(devices)}"
        if len(devices) > 1
        else ""
    )
    how = how or (f"offloaded ({_some(offloaded)})" if offloaded else "")
    if how:
        raise ValueError(
            f"{name} is {how}: a worker process builds a draft whole on one device, around plain weights in shared memory; use "
            "schedule='lockstep', or another draft (the target may be)"
        )


def check_shareable(models: Sequence[PreTrainedModel]) -> None:
    """Check that each draft can run in a worker process, which builds its class around weights in shared memory. The target stays where it is.

    Raises:
        ValueError: for a draft that is quantised, split or offloaded, whose class cannot be imported, or that holds tensors its class does not create.
    """
    for name, model in zip(stage_names(len(models)), models[:-1], strict=False):
        kind = type(model)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise ValueError(
                f"{name}: a worker process cannot import its class {kind.__qualname__}; define it in a module, or use "
                "schedule='lockstep'"
            )
        devices = [str(device) for device in LayerDevices.of(model).devices]
        check_shared_draft(name, quantisation(model), devices, list(offloaded_modules(model)))
        for at, tensor in (*model.named_parameters(), *model.named_buffers()):
            if type(tensor) not in _PLAIN:
                raise ValueError(
                    f"{name}: {at} is a {type(tensor).__name__}, which cannot lie in shared memory; use schedule='lockstep'"
                )
        rebuilt = Derivation.of(model).skeleton(kind, model.config)
        own, created = ({name for name, _ in named_tensors(m, merged=False)} for m in (model, rebuilt))
        added = sorted(own - created)
        if added:
            raise ValueError(
                f"{name} has {_some(added)}, which its class {kind.__qualname__} does not create (an adapter, replaced layers?): a worker "
                "process could not build it; merge what was added into the weights, or use schedule='lockstep'"
            )


# ---- in captured steps


def check_capturable(models: Sequence[PreTrainedModel]) -> None:
    """Check, without a GPU, that the step of each model can become a CUDA graph. Some causes show only in the capture itself.

    Raises:
        NotCapturable: for the first model whose step cannot.
    """
    for name, model in zip(stage_names(len(models)), models, strict=True):
        for part, cause in (*_not_static(model), *_not_captured(model)):
            raise NotCapturable(name, part, cause)


def check_streams(models: Sequence[PreTrainedModel]) -> None:
    """Check that models can run with ``schedule="streams"`` or ``graphs=True``.

    On GPUs each step is captured: see :func:`check_capturable`. On the CPU the same steps run uncaptured, so only what static caches and
    attention by lengths cannot do is refused.

    Raises:
        ValueError: for stages on GPUs beside stages on the CPU.
        NotCapturable: for the first model that cannot.
    """
    names = stage_names(len(models))
    on_cpu = [name for name, model in zip(names, models, strict=True) if input_device(model).type == "cpu"]
    if on_cpu and len(on_cpu) < len(models):
        raise ValueError(
            f"schedule='streams' and graphs=True need all stages on GPUs, and {', '.join(on_cpu)} "
            f"{'is' if len(on_cpu) == 1 else 'are'} on the CPU: move it there (device=...), or use schedule='workers'"
        )
    if not on_cpu:
        check_capturable(models)
    for name, model in zip(names, models, strict=True):
        for part, cause in _not_static(model):
            raise NotCapturable(name, part, cause)


def _not_static(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Parts that cannot work with a static cache and padding columns, captured or not, and why."""
    offloaded, lies = offloaded_modules(model), LayerDevices.of(model)
    if offloaded:
        yield next(iter(offloaded)), "accelerate brings its weights from elsewhere in each call (offloading)"
    if lies.is_split:
        at, device = next((i, device) for i, device in enumerate(lies.layers) if device != lies.inputs)
        yield (
            f"layer {at}",
            f"the model is split over several devices ({device} from here), and a captured step runs on one",
        )
    if (processes := tensor_parallel_size(model)) > 1:
        yield "the target", f"its weights are sharded over {processes} processes, whose exchanges are not captured"
    config = text_config(model.config)
    first = next((at for at, module in model.named_modules() if "Attention" in type(module).__name__), "its attention")
    if not model._can_set_attn_implementation():
        yield (
            first,
            f"{type(model).__name__} calls its attention directly, not through transformers' AttentionInterface",
        )
    elif getattr(config, "attn_logit_softcapping", None):
        yield first, "it caps its scores (attn_logit_softcapping), which attention by lengths does not"
    layout = CacheLayout.of(config)
    if layout.states is not None:
        yield (
            f"layer {layout.states.layers[0]}",
            "it is recurrent, and the host chooses the state that a step begins with, which a static cache does not know",
        )
    if layout.key_dim != layout.value_dim:
        yield first, "it keeps keys and values of different sizes (latents), which attention by lengths does not read"
    for at, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            yield at, "it has attention sinks, which attention by lengths does not support"
        types = getattr(module, "rope_type", None)
        for rope_type in types.values() if isinstance(types, dict) else [types]:
            if is_dynamic(rope_type):
                yield (
                    at,
                    f"RoPE of type {rope_type!r} depends on the longest position of each forward, padding included",
                )


def _not_captured(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Parts that cannot be captured, and why."""
    if compute_dtype(model) == torch.float64:
        yield "its dtype", "it computes in float64, for which there are no GPU kernels here; use float32"
    method = quantisation(model)
    if method is None:
        return
    part = next((at for at, module in model.named_modules() if at and _is_packed(module)), "its linear layers")
    if method.startswith("bitsandbytes"):
        if "8-bit" in method or "Int8" in method:
            yield (
                part,
                f"quantised with {method}: its product selects outlier columns, and the host waits for their number",
            )
    elif not getattr(getattr(model, "hf_quantizer", None), "is_compileable", False):
        yield (
            part,
            f"quantised with {method}, which transformers does not run under CUDA graphs either: a kernel outside of the captured stream "
            "would be lost without an error",
        )


def _is_packed(module: nn.Module) -> bool:
    """Whether a module holds a weight in another form than torch's own layers."""
    if {"qweight", "weight_packed", "weight_scale", "SCB"} & {*module._parameters, *module._buffers}:
        return True
    own = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and (type(t) not in _PLAIN or t.dtype in (torch.uint8, torch.int8)) for t in own)
