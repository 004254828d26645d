"""Support: whether a model can run in this process, in a worker process, and in captured steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.stage import stage_names
from pipespec.errors import NotCapturable
from pipespec.models.adapters import named_tensors
from pipespec.models.derived import Derivation
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import compute_dtype, quantisation, text_config
from pipespec.models.rope import is_dynamic

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class _Layout(NamedTuple):
    """Where the parts of a model are.

    ``offloaded``: modules whose weights accelerate brings from elsewhere; ``devices``: of the parameters, each with the first module there;
    ``sharded``: a module with a DTensor, or empty.
    """

    offloaded: list[str]
    devices: dict[torch.device, str]
    sharded: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> _Layout:
        offloaded: list[str] = []
        devices: dict[torch.device, str] = {}
        sharded = ""
        for at, module in model.named_modules():
            if _offloads(module.__dict__.get("_hf_hook")):
                offloaded.append(at or "all of it")
            for parameter in module._parameters.values():
                if parameter is not None:
                    devices.setdefault(parameter.device, at)
                    if type(parameter).__name__ == "DTensor":
                        sharded = at
        return cls(offloaded, devices, sharded)


def _offloads(hook: Any) -> bool:
    """Whether this hook of accelerate's brings weights from elsewhere when the module is called."""
    if hook is None:
        return False
    if any(_offloads(inner) for inner in getattr(hook, "hooks", ())):
        return True
    return bool(getattr(hook, "offload", False)) or type(hook).__name__ == "CpuOffload"


def check_runnable(models: Sequence[PreTrainedModel]) -> None:
    """Check that each model is whole, on a device and in a dtype that stages run in. Quantised models are.

    Args:
        models: drafts first, target last.

    Raises:
        ValueError: for a model that is offloaded, sharded, split, not loaded, on another kind of device, or in another dtype.
    """
    for name, model in zip(stage_names(len(models)), models, strict=True):
        _check_whole(name, model)
        if model.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} is on {model.device}; stages run on cpu or cuda")
        dtype = compute_dtype(model)
        if dtype.itemsize < 2 or not dtype.is_floating_point:
            raise ValueError(f"{name} computes in {dtype}; use float32, bfloat16 or float16")
        if dtype == torch.float16 and model.device.type == "cpu":
            raise ValueError(
                f"{name} is float16 on the CPU, where many operations are slow or missing; use float32 or bfloat16"
            )


def _check_whole(name: str, model: PreTrainedModel) -> None:
    """Raise ``ValueError`` for a model that is not whole on one device. A cache is one piece of memory, so the model must stay there."""
    offloaded, devices, sharded = _Layout.of(model)
    mapped = getattr(model, "hf_device_map", None) or {}
    if len({str(place) for place in mapped.values()}) > 1:
        places = {at or "all of it": str(place) for at, place in mapped.items()}
        offloaded += [at for at, place in places.items() if place in ("cpu", "disk") and at not in offloaded]
    if offloaded:
        raise ValueError(
            f"{name} is offloaded by accelerate ({_some(offloaded)}): its weights would travel to the GPU in every step; load it whole "
            "onto one device (device_map={'': 'cuda:0'}), in a smaller dtype or quantised where it does not fit"
        )
    if any(d.type == "meta" for d in devices):
        raise ValueError(f"{name} has weights that are not loaded (on the meta device, or offloaded); load it whole")
    if sharded:
        raise ValueError(
            f"{name} is sharded over processes ({sharded} holds a DTensor); each stage must be whole in one process"
        )
    if len(devices) > 1:
        where = sorted(f"{device} from {at or 'the top'}" for device, at in devices.items())
        raise ValueError(
            f"{name} is spread over {', '.join(where)}; the caches of a stage lie on one device, and so must the model (no "
            "device_map='auto'): device_map={'': 'cuda:0'}, in a smaller dtype or quantised where it does not fit"
        )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# ---- in a worker process


def check_quantised_draft(name: str, method: str | None) -> None:
    """Check that a draft can be shared with a worker process.

    Args:
        name: of the stage.
        method: how it is quantised; None: not at all.

    Raises:
        ValueError: if it is quantised.
    """
    if method is not None:
        raise ValueError(
            f"{name} is quantised ({method}): a worker process builds a draft around weights in shared memory, and packed weights "
            "cannot be put there; use schedule='lockstep', or a draft that is not quantised (the target may be)"
        )


def check_shareable(models: Sequence[PreTrainedModel]) -> None:
    """Check that each draft can run in a worker process, which builds its class around weights in shared memory.

    The target stays in the caller's process and is not checked.

    Args:
        models: drafts first, target last.

    Raises:
        ValueError: for a draft that is quantised, whose class cannot be imported, or that holds tensors its class does not create.
    """
    for name, model in zip(stage_names(len(models)), models[:-1], strict=False):
        kind = type(model)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise ValueError(
                f"{name}: a worker process cannot import its class {kind.__qualname__}; define it in a module, or use "
                "schedule='lockstep'"
            )
        check_quantised_draft(name, quantisation(model))
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
    """Check, without a GPU, that the step of each model can become a CUDA graph.

    Some causes show only in the capture itself, which raises the same error.

    Args:
        models: drafts first, target last.

    Raises:
        NotCapturable: for the first model whose step cannot.
    """
    for name, model in zip(stage_names(len(models)), models, strict=True):
        for part, cause in (*_not_static(model), *_not_captured(model)):
            raise NotCapturable(name, part, cause)


def check_streams(models: Sequence[PreTrainedModel]) -> None:
    """Check that models can run with ``schedule="streams"`` or ``graphs=True``.

    On GPUs each step is captured: see :func:`check_capturable`. On the CPU the same steps run uncaptured, so only what static caches and
    attention by lengths cannot do is refused. GPUs need no access to each other's memory: the state block then lies in pinned memory.

    Args:
        models: drafts first, target last.

    Raises:
        ValueError: for stages on GPUs beside stages on the CPU.
        NotCapturable: for the first model that cannot.
    """
    names = stage_names(len(models))
    on_cpu = [name for name, model in zip(names, models, strict=True) if model.device.type == "cpu"]
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
    offloaded, devices, _ = _Layout.of(model)
    if offloaded:
        yield offloaded[0], "accelerate brings its weights from elsewhere in each call (offloading)"
    if len(devices) > 1:
        yield list(devices.values())[1], "the model is split over several devices (device_map), and a graph runs on one"
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
