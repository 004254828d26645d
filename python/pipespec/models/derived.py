"""Drafts in int8, made out of a model.

A draft shares every parameter that it does not change: the same ``nn.Parameter`` objects in modules of its own. So whatever moves a weight (shared
memory, merged matrices, ``.to()``) moves it for both models, and no weight exists twice.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pipespec.models.adapters import base_layer, is_adapted
from pipespec.models.devices import why_not_whole
from pipespec.models.properties import quantisation
from pipespec.models.quantized import untie

INT8 = "int8"
"""As the weight format of a model: its matrices become :class:`Int8Linear`."""


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model's modules and configuration that has the same parameters and buffers.

    Raises:
        ValueError: the model is split, offloaded or sharded, and hooks or processes would have to follow.
    """
    if (why := why_not_whole(model)) is not None:
        raise ValueError(
            f"a draft is made out of a model that is whole on one device, and this {type(model).__name__} is not: {why}"
        )
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    draft = copy.deepcopy(model, memo)
    # attach() sets it on the instance.
    draft.__dict__.pop("generate", None)
    return draft.eval()


class Int8Linear(nn.Module):
    """A linear module with one int8 per weight and one float32 scale per row: ``y = (x W^T) * scale + bias``.

    Args:
        weight: int8 ``[outputs, inputs]``.
        scale: float32 ``[outputs]``.
        bias: ``[outputs]``, or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """Quantise a module: the largest weight of each row becomes 127 or -127."""
        rows = linear.weight.detach().float()
        scale = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return cls((rows / scale[:, None]).round_().to(torch.int8), scale, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``, in the dtype of ``x``."""
        # 16 bits represent every weight, and not every scale.
        out = (F.linear(x, self.weight.to(x.dtype)) * self.scale).to(x.dtype)
        return out if self.bias is None else out + self.bias


def has_int8(model: PreTrainedModel) -> bool:
    """Whether the matrices are :class:`Int8Linear`."""
    return any(type(module) is Int8Linear for module in model.modules())


def in_int8(model: PreTrainedModel) -> PreTrainedModel:
    """A draft whose matrices, the head included, are :class:`Int8Linear`, with adapters merged. All else is shared with ``model``.

    Raises:
        ValueError: the model is quantised already.
    """
    method = INT8 if has_int8(model) else quantisation(model)
    if method is not None:
        raise ValueError(f"weights={INT8!r}: it is quantised already ({method})")
    draft = sharing(model)
    with torch.no_grad():
        _replace_linear(draft)
    untie(draft)
    return draft.eval()


def _replace_linear(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        # The low-rank matrices of an adapter would lose more than the layer's, and peft merges only into floating point.
        if is_adapted(child) and type(child.base_layer) is nn.Linear:
            own: Any = base_layer(child)
            setattr(module, name, Int8Linear.of(own))
        elif is_adapted(child):
            continue
        elif type(child) is nn.Linear:
            setattr(module, name, Int8Linear.of(child))
        else:
            _replace_linear(child)


def skeleton(kind: type[PreTrainedModel], config: Any, *, int8: bool) -> PreTrainedModel:
    """A model on the meta device, whose matrices are :class:`Int8Linear` if ``int8``."""
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
        if int8:
            _replace_linear(model)
    return model
