"""Adapters in a model (LoRA and others of the package peft), recognised by their attributes: peft is not imported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


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
