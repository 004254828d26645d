"""What :func:`pipespec_train.trainer.train` trains: drafts that read the target's hidden states, and their loss."""

from __future__ import annotations

import abc
import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from pipespec.models.compat import hidden_of
from pipespec_spd.draft_module import DraftModule
from pipespec_train.settings import TrainingSettings
from pipespec_train.start import StudentBatch, fit_projections

_LIKE_LLAMA: tuple[type, ...] = (LlamaDecoderLayer, Qwen2DecoderLayer)
"""Layers that :func:`_newest_only` computes."""


class Student(abc.ABC):
    """A draft that reads the target's hidden states, as what :func:`pipespec_train.trainer.train` trains.

    Attributes:
        module: its weights.
        head: the part of it that gives the logits.
        anchors: the target's hidden states that it reads.
        columns: int64 ``[Vd]``, the target's ids of the draft vocabulary.
    """

    module: Any
    head: Any
    anchors: Sequence[int]
    columns: torch.Tensor

    @abc.abstractmethod
    def loss(self, batch: StudentBatch, settings: TrainingSettings, step: int) -> torch.Tensor:
        """The loss of a batch in a step, in nats per position."""

    @abc.abstractmethod
    def cases(self, batch: StudentBatch) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """What is validated: the name of a figure, logits, and the target's logits there. One case has the name ``agreement``."""

    def start(self, batches: Iterable[StudentBatch]) -> None:
        """Give the draft its initial state, from as many batches as that takes. By default it has it already."""

    @abc.abstractmethod
    def identity(self) -> str:
        """What a checkpoint must agree with."""

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Write the draft for use."""

    @torch.no_grad()
    def figures(self, batches: Iterable[StudentBatch], settings: TrainingSettings) -> dict[str, float]:
        """The agreement with the teacher's argmax in each of :meth:`cases`, and the KL in the one called ``agreement``."""
        loss, same, counts = 0.0, dict[str, int](), dict[str, int]()
        for batch in batches:
            with autocast(batch.anchors.device, settings.amp):
                for name, logits, teacher_logits in self.cases(batch):
                    found = len(teacher_logits)
                    counts[name] = counts.get(name, 0) + found
                    same[name] = same.get(name, 0) + int((logits.argmax(-1) == teacher_logits.argmax(-1)).sum())
                    if name == "agreement":
                        loss += loss_of(logits, teacher_logits, settings.temperature).item() * found
        if not counts["agreement"]:
            raise ValueError("nothing to validate on: no held-out token is the assistant's and in the draft vocabulary")
        return {"held_out_loss": loss / counts["agreement"]} | {k: same[k] / max(1, n) for k, n in counts.items()}


class PipelineStudent(Student):
    """A draft module. A draft head is :class:`pipespec_train.heads.HeadStudent`. ``is_new``: training begins with :func:`pipespec_train.start.fit_projections`."""

    def __init__(self, module: DraftModule, is_new: bool = False) -> None:
        self.module, self.head, self.anchors = module, module.head, module.config.anchors
        self.columns, self._is_new = full_ids(module), is_new

    def start(self, batches: Iterable[StudentBatch]) -> None:
        if self._is_new:
            fit_projections(self.module, batches)

    def save(self, folder: Path) -> None:
        self.module.save(folder)

    def loss(self, batch: StudentBatch, settings: TrainingSettings, step: int) -> torch.Tensor:
        fill = fill_of(step, self.module.config.n, settings)
        logits = simulate(self.module, batch.anchors, fill, batch.valid)
        return loss_of(logits, batch.teacher_logits, settings.temperature, settings.argmax_weight)

    def cases(self, batch: StudentBatch) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """All stages filled, and each smaller fill."""
        n = self.module.config.n
        for fill in (n, *range(1, n)):
            logits = simulate(self.module, batch.anchors, fill, batch.valid)
            yield "agreement" if fill == n else f"agreement_{fill}", logits, batch.teacher_logits

    def identity(self) -> str:
        return json.dumps(self.module.config.to_json() | {"target": None})


# ---- draft modules


def depths(fill: int, n: int) -> tuple[int, ...]:
    """The depths that exist with ``fill`` tokens in flight in ``n`` stages, deepest first: n (complete), then fill - 1 to 0.

    Training has one block of rows per depth and not per type: two depths of one type fuse the same anchors but see different rows.

    Raises:
        ValueError: Not 1 <= fill <= n.
    """
    if not 1 <= fill <= n:
        raise ValueError(f"{fill} tokens cannot be in flight in {n} stages")
    return (n, *range(fill - 1, -1, -1))


@functools.lru_cache(maxsize=2)  # masks of long texts in many stages are large
def visible(length: int, fill: int, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask of one pass over all depths of all positions, in which each row sees what it sees in decoding. It has blocks of rows in the order of :func:`depths`.

    A query of depth d at position t existed when the newest position was t + d, or at any later time if it is complete. The token at
    position u <= t then has the lag d + t - u. With a lag below ``fill`` it is in flight, and its depth is its lag. Otherwise it is
    complete. So each query sees one row per earlier position, and itself (SPD, section 4.2; the lag counts from the newest token).

    Returns:
        For S = ``length`` positions bool ``[(fill + 1) S, (fill + 1) S]``, true where the row of the first index sees the row of the second.
    """
    kinds = torch.tensor(depths(fill, n), device=device)
    time = torch.arange(length, device=device)
    since = time[:, None] - time  # [query time, key time]
    lag = kinds[:, None, None] + since  # [query depth, query time, key time]
    wanted = torch.where(lag < fill, lag, n)
    seen = (wanted[:, :, None, :] == kinds[None, None, :, None]) & (since >= 0)[None, :, None, :]
    rows = len(kinds) * length
    return seen.reshape(rows, rows)


def simulate(module: DraftModule, anchors: torch.Tensor, fill: int, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the draft logits that decoding with ``fill`` tokens in flight gives, for the token after each position.

    For the logits of position t, t is the newest position. The ``fill - 1`` positions before it are in flight at depths 1, 2, ..., and the
    older ones are complete.

    Args:
        anchors: ``[B, S, k, H]``, the target's anchors of all positions.
        wanted: Bool ``[B, S]``, the positions whose logits are computed. None: all.

    Returns:
        ``[B, S, Vd]``, or ``[number of wanted positions, Vd]``.
    """
    config = module.config
    length = anchors.shape[1]
    kinds = depths(fill, config.n)
    fused = {kind: module.fuse(anchors, kind) for kind in {config.types[d] for d in kinds}}
    rows = torch.cat([fused[config.types[d]] for d in kinds], dim=1)
    positions = torch.arange(length, device=rows.device).repeat(len(kinds))[None]
    rope = module.rotary_emb(rows, position_ids=positions)
    mask = visible(length, fill, config.n, rows.device)[None, None]
    for layer in module.layers:
        if layer is module.layers[-1] and type(layer) in _LIKE_LLAMA:
            rows = _newest_only(layer, rows, length, rope, mask)
        else:
            outputs = layer(
                rows, attention_mask=mask, position_embeddings=rope, position_ids=positions, past_key_values=None
            )
            rows = hidden_of(outputs)
    rows = rows[:, -length:]
    return module.logits(rows if wanted is None else rows[wanted])


def _newest_only(
    layer: Any, rows: torch.Tensor, count: int, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
) -> torch.Tensor:
    """The last ``count`` rows of the output of a layer of LLaMA or Qwen2. In the last block the other rows contribute keys and values only."""
    attention = layer.self_attn
    batch = rows.shape[0]
    normed = layer.input_layernorm(rows)

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, x.shape[1], -1, attention.head_dim).transpose(1, 2)

    queries, keys = split(attention.q_proj(normed[:, -count:])), split(attention.k_proj(normed))
    cos, sin = rope
    queries = apply_rotary_pos_emb(queries, queries, cos[:, -count:], sin[:, -count:])[0]
    keys = apply_rotary_pos_emb(keys, keys, cos, sin)[0]
    values = split(attention.v_proj(normed))
    seen = mask[..., -count:, :]
    mixed = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, scale=attention.scaling, enable_gqa=keys.shape[1] != queries.shape[1]
    )
    hidden = rows[:, -count:] + attention.o_proj(mixed.transpose(1, 2).reshape(batch, count, -1))
    out: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return out


def loss_of(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0, argmax_weight: float = 0.0
) -> torch.Tensor:
    """KL(teacher || student) in nats per position, times ``temperature`` squared; 0 without a position.

    Both logits are ``[N, Vd]`` over the draft vocabulary, the teacher's renormalised by the restriction to it (SPD, section 4.3). ``argmax_weight``: weight of
    the cross entropy with the teacher's argmax, which is added.
    """
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    total = F.kl_div(log_q, log_p, log_target=True, reduction="sum") * temperature**2
    if argmax_weight:
        total = total + argmax_weight * F.nll_loss(log_q, log_p.argmax(-1), reduction="sum")
    return total / max(1, len(log_q))


def full_ids(module: DraftModule) -> torch.Tensor:
    """Target ids of the draft vocabulary."""
    ids = module.config.vocabulary
    return torch.arange(module.config.logits) if ids is None else torch.tensor(ids)


def fill_of(step: int, n: int, settings: TrainingSettings) -> int:
    """Tokens in flight of a step. They depend on seed and step only, so all processes and resumed runs agree."""
    draw = np.random.default_rng([settings.seed, step])
    return n if n == 1 or draw.random() < settings.full else int(draw.integers(1, n))


def autocast(device: torch.device, on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if on else contextlib.nullcontext()
