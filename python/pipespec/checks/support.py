"""Support: whether a model can run in this process, in a worker process, and in captured steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.inputs import stage_names
from pipespec.errors import NotCapturable, Unsupported
from pipespec.models.adapters import named_tensors
from pipespec.models.devices import (
    LayerDevices,
    each_module,
    hooks_of,
    input_device,
    is_dispatched,
    local_kv_heads,
    not_whole_reason,
    offloaded_modules,
    tensor_parallel_size,
)
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import compute_dtype, is_dynamic, quantisation, text_config

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def check_runnable(models: Sequence[PreTrainedModel]) -> None:
    """Check that each model, drafts first, has its weights, and computes on devices, in a dtype and with layers that stages run. Quantised models do.

    Raises ``TypeError`` for a model whose recurrent layers keep no state per column, else ``ValueError``.
    """
    for name, model in zip(stage_names(len(models)), models, strict=True):
        is_target = model is models[-1]
        _check_weights(name, model, is_target)
        at, dtype = LayerDevices.of(model), compute_dtype(model)
        kinds, places = {device.type for device in at.devices}, [str(device) for device in at.devices]
        if not kinds <= {"cpu", "cuda"}:
            raise ValueError(f"{name} is on {', '.join(places)}; stages run on cpu or cuda")
        if at.is_split and not is_dispatched(model):
            raise ValueError(
                f"{name} is spread over {', '.join(places)}, and no hook moves hidden states between them: load it with device_map= (package "
                f"accelerate), give its path with device={{{name!r}: {places}}}, or move it to one device"
            )
        if dtype.itemsize < 2 or not dtype.is_floating_point:
            raise ValueError(f"{name} computes in {dtype}; use float32, bfloat16 or float16")
        # Such a target is decoded by transformers, see pipespec.engine.known.
        if not is_target and dtype == torch.float16 and "cpu" in kinds:
            raise ValueError(
                f"{name} is float16 on the CPU, where many operations are slow or missing; use float32 or bfloat16"
            )
        if CacheLayout.of(model.config).states is not None:
            from pipespec.engine.recurrent import recurrent_unsupported_reason

            if (reason := recurrent_unsupported_reason(model)) is not None:
                raise TypeError(f"{name} is a {type(model).__name__}: {reason}")


def check_checkpointing(models: Sequence[PreTrainedModel]) -> None:
    """Raise ``Unsupported`` for a model whose layers drop their cache, as gradient checkpointing does in training mode."""
    for name, model in zip(stage_names(len(models)), models, strict=True):
        if any(getattr(module, "gradient_checkpointing", False) and module.training for module in each_module(model)):
            raise Unsupported(
                "gradient_checkpointing",
                f"generate(): {name} is in training mode with gradient checkpointing, which drops the cache of each layer; call its eval() or "
                "gradient_checkpointing_disable() before",
            )


def _check_weights(name: str, model: PreTrainedModel, is_target: bool) -> None:
    """Raise ``ValueError`` for weights on the meta device that no hook brings, sharded ones that stages do not run, and a hook that moves all of a module."""
    processes = tensor_parallel_size(model)
    if processes > 1 and not is_target:
        raise ValueError(
            f"{name} is sharded over processes (tp_plan): only the target may be; load the draft whole, it runs in rank 0 alone"
        )
    if processes > 1:
        if CacheLayout.of(model.config).own is not None:
            raise ValueError(
                f"{name} is sharded over processes (tp_plan), and its layers differ in the sizes of their heads, which is not supported"
            )
        heads, here = getattr(text_config(model.config), "num_key_value_heads", None), local_kv_heads(model)
        if here is not None and heads is not None and here not in (heads, heads / processes):
            raise ValueError(
                f"{name} has {heads} key/value heads, which {processes} processes cannot share: use a number of processes that divides it"
            )
    moved, away = None, set[int]()
    for module in each_module(model):
        if "_hf_hook" in module.__dict__ and any(type(hook).__name__ == "CpuOffload" for hook in hooks_of(module)):
            moved = moved or module
        if any(p is not None and p.is_meta for p in module._parameters.values()):
            away.add(id(module))
    if moved is not None:
        at = next(at for at, module in model.named_modules() if module is moved) or "all of it"
        raise ValueError(
            f"{name}: accelerate moves {at} to the GPU when it is called (cpu_offload_with_hook), and its cache cannot follow; use device_map= or "
            "accelerate.cpu_offload, which bring the weights of one module at a time"
        )
    if away:
        away -= {id(part) for found in offloaded_modules(model).values() for part in found.modules()}
    if away:
        at = next(at for at, module in model.named_modules() if id(module) in away)
        raise ValueError(f"{name} has weights that are not loaded ({at}, on the meta device); load it whole")


def check_shareable(models: Sequence[PreTrainedModel]) -> None:
    """Check that each draft can run in a worker process, which builds its class around weights in shared memory. The target stays where it is.

    Raises ``ValueError`` for a draft that is quantised, split or offloaded, whose class cannot be imported, or that holds tensors its class does not create.
    """
    for name, model in zip(stage_names(len(models)), models[:-1], strict=False):
        quantised = quantisation(model)
        if (whole := f"it is quantised ({quantised})" if quantised else not_whole_reason(model)) is not None:
            raise ValueError(
                f"{name}: a worker process builds a draft whole on one device, around plain weights in shared memory, and {whole}; use "
                "schedule='lockstep', or another draft (the target may be)"
            )
        kind, task = type(model), None
        named = (*model.named_parameters(), *model.named_buffers())
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            task = f"import its class {kind.__qualname__}: define it in a module"
        elif odd := next(
            (f"{at}, a {type(tensor).__name__}" for at, tensor in named if type(tensor) not in _PLAIN), None
        ):
            task = f"share {odd}: make it plain"
        else:
            from pipespec.models.quantizing import described, skeleton

            rebuilt = skeleton(kind, model.config, described(model))
            own, created = ({at for at, _ in named_tensors(m, merged=False)} for m in (model, rebuilt))
            if added := sorted(own - created):
                task = (
                    f"build {added[0]}, which its class {kind.__qualname__} does not create (an adapter, replaced layers?): merge what was added "
                    "into the weights"
                )
        if task is not None:
            raise ValueError(f"{name}: a worker process cannot {task}, or use schedule='lockstep'")


def cost_of_width(model: PreTrainedModel) -> str | None:
    """What steps of several tokens move where bitsandbytes turns whole matrices into the compute dtype for them, as a phrase; None: it does not."""
    kinds = ((type(module).__module__, type(module).__name__, module) for module in model.modules())
    packed: list[Any] = [m for place, kind, m in kinds if kind == "Linear4bit" and place.startswith("bitsandbytes.")]
    if not packed:
        return None
    weights, size = sum(m.in_features * m.out_features for m in packed), compute_dtype(model).itemsize
    return (
        f"bitsandbytes' 4-bit products of several tokens write each matrix in {8 * size} bits and read it again: a step with draft tokens moves "
        f"{weights * (0.5 + 2 * size) / 1e9:.1f} GB of weights, a plain one {weights / 2e9:.1f}. Use schedule='plain', or another quantisation"
    )


def check_streams(models: Sequence[PreTrainedModel]) -> None:
    """Check that models can run with ``schedule="streams"`` or ``graphs=True``. On the CPU the same steps run uncaptured.

    Raises:
        ValueError: for some stages on GPUs and others on the CPU.
        NotCapturable: for the first model whose step cannot. Some causes show only in the capture itself.
    """
    named = zip(stage_names(len(models)), models, strict=True)
    on_cpu = [name for name, model in named if input_device(model).type == "cpu"]
    if on_cpu and len(on_cpu) < len(models):
        raise ValueError(
            f"schedule='streams' and graphs=True need all stages on GPUs, and {', '.join(on_cpu)} "
            f"{'is' if len(on_cpu) == 1 else 'are'} on the CPU: move it there (device=...), or use schedule='workers'"
        )
    for name, model in zip(stage_names(len(models)), models, strict=True):
        for part, cause in _not_static(model):
            raise NotCapturable(name, part, cause)
        if not on_cpu and compute_dtype(model) == torch.float64:
            cause = "it computes in float64, for which there are no GPU kernels here; use float32"
            raise NotCapturable(name, "its dtype", cause)


def _not_static(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Parts that cannot work with a static cache and padding columns, captured or not, and why."""
    if (reason := not_whole_reason(model)) is not None:
        yield "its weights", reason
    config, layout = text_config(model.config), CacheLayout.of(model.config)
    first = next((at for at, module in model.named_modules() if "Attention" in type(module).__name__), "its attention")
    if not model._can_set_attn_implementation():
        yield (
            first,
            f"{type(model).__name__} calls its attention directly, not through transformers' AttentionInterface",
        )
    if getattr(config, "attn_logit_softcapping", None):
        yield first, "it caps its scores (attn_logit_softcapping), which attention by lengths does not"
    if layout.states is not None:
        reason = "it is recurrent, and the host chooses the state that a step begins with, which a static cache does not have"
        yield f"layer {layout.states.layers[0]}", reason
    if layout.own is not None:
        yield (
            first,
            "its layers keep keys and values of several sizes, or read those of others, which a static cache does not hold",
        )
    if layout.key_dim != layout.value_dim:
        yield first, "it keeps keys and values of different sizes (latents), which attention by lengths does not read"
    for at, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            yield at, "it has attention sinks, which attention by lengths does not support"
        types = getattr(module, "rope_type", None)
        for kind in filter(is_dynamic, types.values() if isinstance(types, dict) else [types]):
            yield at, f"RoPE of type {kind!r} depends on the longest position of each forward, padding included"
