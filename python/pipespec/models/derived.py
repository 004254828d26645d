"""Drafts made out of a model: a head over some of its tokens, weights in int8.

A draft shares every parameter that it does not change: the same ``nn.Parameter`` objects in modules of its own. So whatever moves a weight (shared
memory, merged matrices, ``.to()``) moves it for both models, and no weight exists twice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pipespec.models.adapters import base_layer, is_adapted
from pipespec.models.devices import why_not_whole
from pipespec.models.properties import quantisation, text_config

INT8 = "int8"
"""As the dtype of drafts: their matrices become :class:`Int8Linear`."""


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


# ---- a head over some of the tokens


class TrimmedHead(nn.Module):
    """A language-model head for some of the tokens. The logits of all others are -inf.

    The logits keep their places, so selection, noise and processors see token ids as in every other model.

    Args:
        ids: int64 ``[n]``, ascending: the tokens.
        rows: a linear module with ``n`` outputs.
        vocabulary: number of logits, ``V``.
    """

    ids: torch.Tensor

    def __init__(self, ids: torch.Tensor, rows: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.rows, self.out_features = rows, vocabulary
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., V]`` of ``hidden [..., H]``."""
        return self.spread(self.rows(hidden))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., V]`` from those of the tokens, ``[..., n]``."""
        whole = logits.new_full((*logits.shape[:-1], self.out_features), -torch.inf)
        return whole.index_copy_(-1, self.ids, logits)


def head_rows(head: Any) -> Any:
    """The linear module of a head, trimmed or not."""
    return head.rows if isinstance(head, TrimmedHead) else head


def with_vocabulary(model: PreTrainedModel, ids: Sequence[int]) -> PreTrainedModel:
    """A draft that proposes only the tokens ``ids``. Its head has their rows; all else is shared with ``model``.

    Args:
        model: a draft with a head in floating point.
        ids: token ids, ascending.

    Raises:
        ValueError: the head is quantised, or trimmed already.
    """
    head: Any = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if type(head) is not nn.Linear or type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise ValueError(
            f"draft_vocabulary: the head of a draft is a {type(head).__name__} with a {type(weight).__name__} (trimmed, quantised, or with "
            "an adapter?), so its rows cannot be selected"
        )
    draft = sharing(model)
    kept = torch.tensor(list(ids), dtype=torch.int64, device=head.weight.device)
    draft.set_output_embeddings(TrimmedHead(kept, _rows_of(head, kept), head.weight.shape[0]))
    _untie(draft)
    return draft.eval()


def _rows_of(head: nn.Linear, kept: torch.Tensor) -> nn.Linear:
    rows = nn.Linear(head.in_features, len(kept), bias=head.bias is not None, device="meta")
    rows.weight = nn.Parameter(head.weight.detach()[kept], requires_grad=False)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias.detach()[kept], requires_grad=False)
    return rows


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        "save_pretrained: no checkpoint of transformers describes int8 matrices or a head over some of the tokens; save the model that the "
        "draft was made of, and give draft_dtype or draft_vocabulary where it is used"
    )


def _untie(draft: PreTrainedModel) -> None:
    """Head and embedding are two tensors from now on. As a checkpoint the draft would be another model without a word."""
    draft.save_pretrained = _refuse_saving
    for config in (draft.config, text_config(draft.config)):
        config.tie_word_embeddings = False


# ---- quantised weights


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
    return Derivation.of(model).int8


def in_int8(model: PreTrainedModel) -> PreTrainedModel:
    """A draft whose matrices, the head included, are :class:`Int8Linear`, with adapters merged. All else is shared with ``model``.

    Raises:
        ValueError: the model is quantised already.
    """
    method = INT8 if Derivation.of(model).int8 else quantisation(model)
    if method is not None:
        raise ValueError(f"draft_dtype={INT8!r}: a draft is quantised already ({method})")
    draft = sharing(model)
    with torch.no_grad():
        _replace_linear(draft)
    _untie(draft)
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


# ---- in another process


@dataclass(frozen=True)
class Derivation:
    """How a derived draft differs from a model that its class makes of its configuration.

    Attributes:
        kept: rows of a trimmed head, or None.
        int8: whether its matrices are :class:`Int8Linear`.
    """

    kept: int | None = None
    int8: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Derivation:
        """That of a model."""
        head = model.get_output_embeddings()
        kept = len(head.ids) if isinstance(head, TrimmedHead) else None
        int8 = any(type(module) is Int8Linear for module in model.modules())
        return cls(kept, int8)

    def skeleton(self, kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
        """A model of this kind on the meta device."""
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
            head: Any = model.get_output_embeddings()
            if self.kept is not None:
                rows = nn.Linear(head.in_features, self.kept, bias=head.bias is not None)
                ids = torch.empty(self.kept, dtype=torch.int64)
                model.set_output_embeddings(TrimmedHead(ids, rows, head.out_features))
            if self.int8:
                _replace_linear(model)
        return model
