"""The initial state of a draft head or module, from least squares over the target's hidden states instead of from noise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.head import DraftHead
from pipespec_spd.draft_module import DraftModule

POSITIONS = 20_000
"""Positions that the fit reads at most."""

_RIDGE = 0.03
"""Regularisation, in units of the mean square of the inputs, which is 1."""

_SHARPNESS = 25.0
"""Attention logit of a slot for itself. Those of other slots are at least some units smaller."""

_FREQUENCIES = 6
"""Rotary frequencies, from the highest one on, which tell a slot from its neighbours."""


class StudentBatch(NamedTuple):
    """What the target says about a batch.

    Attributes:
        ids: ``[B, S]`` token ids.
        anchors: ``[B, S, k, H]``, of the target.
        valid: bool ``[B, S]``, the positions to learn.
        teacher_logits: ``[N, Vd]``, the target's logits there, over the draft vocabulary.
        last: ``[B, S, H]``, the target's last hidden states after its norm.
    """

    ids: torch.Tensor
    anchors: torch.Tensor
    valid: torch.Tensor
    teacher_logits: torch.Tensor
    last: torch.Tensor


class _Positions(NamedTuple):
    """What the fit reads, ``[N, ...]`` float32, each part with the root mean square 1: a slot's features, its token's embedding, and the target's last hidden
    states at the slot's position and at the next one."""

    features: torch.Tensor
    embeds: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


@torch.no_grad()
def fit_start(head: DraftHead, target: PreTrainedModel, batches: Iterable[StudentBatch]) -> int:
    """Let ``head`` start as the best linear guess of the target's next last hidden state from its features and the token, in place.

    States are the target's last hidden states with the root mean square 1, the head's norm is the target's, and its vocabulary head the target's rows. ``fc`` predicts
    the state of the slot's position, and attention adds what leads from there to the state of the next one. For that most of the heads attend to their own
    slot only; the others start with an output of 0, and so does the MLP.

    Args:
        head: of :func:`pipespec_train.heads.head_for`.
        target: whose hidden states it reads.
        batches: of which it reads :data:`POSITIONS` at most.

    Returns:
        The positions read.

    Raises:
        ValueError: there is no position to learn.
    """
    found = _read(head, target, batches)
    head.fc.weight.copy_(_least_squares(found.features, found.before).T)
    states = head.fc(found.features)
    inputs = torch.cat([found.embeds, _unit(states)], dim=-1)
    _attend_to_itself(head, inputs, _least_squares(inputs, found.after - states))
    head.layers[0].mlp.down_proj.weight.zero_()
    return len(inputs)


@torch.no_grad()
def fit_projections(module: DraftModule, batches: Iterable[StudentBatch]) -> int:
    """Let each projection of ``module`` start as the best linear guess of the deepest anchor from those that its type has, in place.

    The blocks start as the target's last layers, which expect that stream. A type that has the deepest anchor passes it on.

    Args:
        module: of :meth:`pipespec_spd.draft_module.DraftModule.of_target`.
        batches: of which it reads :data:`POSITIONS` at most.

    Returns:
        The positions read.

    Raises:
        ValueError: there is no position to learn.
    """
    size = module.config.hidden
    width = size * len(module.config.anchors)
    products, count = torch.zeros(width, width, device=module.head.weight.device), 0
    for batch in batches:
        streams = batch.anchors[batch.valid][: POSITIONS - count].float()
        # A position counts as much as another one, whatever the size of its stream.
        streams = (streams * streams[:, -1:].square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()).flatten(1)
        products += streams.T @ streams
        count += len(streams)
        if count == POSITIONS:
            break
    if not count:
        raise ValueError("nothing to start from: no token is the assistant's and in the draft vocabulary")
    products.diagonal().mul_(1 + _RIDGE).add_(1e-6 * count)
    for kind, projection in enumerate(module.projections):
        known = size * (kind + 1)
        weight = next(projection.parameters())
        if known == width:
            weight.zero_()
            weight[:, -size:] = torch.eye(size)
        else:
            weight.copy_(torch.linalg.solve(products[:known, :known], products[:known, -size:]).T)
    return count


def _read(head: DraftHead, target: PreTrainedModel, batches: Iterable[StudentBatch]) -> _Positions:
    gain = head.norm.weight
    gain = gain.where(gain.abs() > 1e-4, 1.0)  # a dimension with the gain 0 has no part in the logits
    parts, count = list[_Positions](), 0
    for batch in batches:
        # A slot's choice is the token after the next one.
        slots = batch.valid.clone()
        slots[:, 0] = False
        after, slots = slots, slots.roll(-1, 1)
        tokens = batch.ids[after]
        features = _unit(batch.anchors[slots].float())
        last = (_unit(batch.last[which].float() / gain) for which in (slots, after))
        embeds = _unit(target.get_input_embeddings()(tokens).float())
        parts.append(_Positions(features.flatten(1), embeds, *last))
        count += len(tokens)
        if count >= POSITIONS:
            break
    if not count:
        raise ValueError("nothing to start from: no token is the assistant's and in the draft vocabulary")
    return _Positions(*(torch.cat(same)[:POSITIONS] for same in zip(*parts, strict=True)))


def _attend_to_itself(head: DraftHead, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
    """Let attention add ``inputs @ wanted``, or the part of lower rank that its heads can.

    Args:
        inputs: ``[N, 2 H]``, of the positions.
        wanted: ``[2 H, H]``.
    """
    attention: Any = head.layers[0].self_attn
    size, count = attention.head_dim, attention.k_proj.out_features // attention.head_dim
    own = max(1, count - max(1, count // 4)) if count > 1 else 1
    rank = min(own * size, wanted.shape[1])
    outputs = inputs @ wanted
    directions = torch.linalg.eigh(outputs.T @ outputs)[1][:, -rank:]
    attention.v_proj.weight[:rank] = (wanted @ directions).T
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:, :rank] = directions
    # The same direction for queries and keys of all slots: then the logits depend on the distance alone.
    constant = _least_squares(inputs, torch.ones(len(inputs), 1))[:, 0]
    frequencies = min(_FREQUENCIES, size // 2)
    constant *= math.sqrt(_SHARPNESS * math.sqrt(size) / frequencies)
    for matrix in (attention.q_proj.weight, attention.k_proj.weight):
        of_head = matrix.view(count, size, -1)[:own]
        of_head.zero_()
        of_head[:, :frequencies] = constant


def _unit(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the root mean square 1 along the last dimension."""
    return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)


def _least_squares(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """The matrix ``[i, o]`` with which ``inputs [N, i]`` give ``outputs [N, o]`` best, with :data:`_RIDGE`."""
    products = inputs.T @ inputs
    products.diagonal().add_(_RIDGE * len(inputs))
    return torch.linalg.solve(products, inputs.T @ outputs)
