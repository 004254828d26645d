"""Training of a draft head over several forward steps of its own outputs, as what :func:`pipespec_train.trainer.train` trains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from pipespec.engine.head import DraftHead, HeadConfig
from pipespec.models.properties import text_config
from pipespec_train.settings import TrainingSettings
from pipespec_train.start import StudentBatch, fit_start
from pipespec_train.students import Student, loss_of

STEPS = 4
"""Forward steps of a batch."""

_DECAY = 0.8
"""Weight of a forward step in the loss, relative to the one before: a later draft token counts only where those before it are accepted."""

_SHARED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings",
    "vocab_size",
)  # fmt: skip


def head_for(
    target: PreTrainedModel, vocabulary: Sequence[int] | None = None, features: Sequence[int] | None = None
) -> DraftHead:
    """A new float32 head for a target with LLaMA's parts, with one layer of the target's sizes.

    Each of its attention heads has its own keys and values: what it knows of the token passes through the values. Each hidden state is normed in front of ``fc``. The
    norm in front of the logits and the logits are the target's, the MLP is that of the target's last layer, and the other matrices are noise until
    :func:`pipespec_train.start.fit_start` or training changes them.

    Args:
        vocabulary: ids that the head drafts, ascending; None: all.
        features: hidden states that it reads; None: EAGLE-3's rule.

    Raises:
        ValueError: the target does not have these hidden states.
    """
    given = text_config(target.config)
    block = AutoConfig.for_model(
        "qwen3" if given.model_type.startswith("qwen3") else "llama",
        **{name: value for name in _SHARED if (value := getattr(given, name, None)) is not None},
        num_key_value_heads=given.num_attention_heads,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        attention_bias=False,
    )
    count = given.vocab_size if vocabulary is None else len(vocabulary)
    sizes: dict[str, Any] = {"draft_vocabulary": count, "target_hidden": given.hidden_size, "fc_norm": True}
    own = None if features is None else tuple(features)
    config = HeadConfig(block=block, features=own, where="the new draft head", **sizes)
    config = replace(config, features=config.layers_of(given.num_hidden_layers))
    config.require(target.config)
    head = DraftHead(config)
    head.borrow(target)
    if vocabulary is not None:
        head.ids = torch.tensor(vocabulary)
    base: Any = target.base_model
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        attention: Any = head.layers[0].self_attn
        for matrix in (head.fc.weight, *(getattr(attention, f"{n}_proj").weight for n in "qkvo")):
            matrix.normal_(std=0.01, generator=generator)
        head.norm.load_state_dict(base.norm.state_dict())
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.ids.to(target.device)])
        theirs, own = base.layers[-1].state_dict(), head.layers[0].state_dict()
        for name, value in theirs.items():
            if name.startswith("mlp.") and name in own:
                own[name].copy_(value)
    return head.to(target.device)


class HeadStudent(Student):
    """A float32 draft head and the target that it reads.

    A batch has ``steps`` forward steps. Step ``j`` reads the outputs of step ``j - 1``, as the ``j``-th draft token of a round does. ``is_new``: the head is of
    :func:`head_for`, and training begins with :func:`pipespec_train.start.fit_start`.
    """

    def __init__(self, head: DraftHead, target: PreTrainedModel, steps: int = STEPS, is_new: bool = False) -> None:
        if steps < 1:
            raise ValueError(f"a batch has at least one forward step, not {steps}")
        self.module, self.head, self.columns = head, head.lm_head, head.ids
        self.anchors = head.config.layers_of(text_config(target.config).num_hidden_layers)
        self._target, self._steps, self._is_new = target, steps, is_new

    def simulate(self, batch: StudentBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per forward step the head's logits at the positions to learn, and the target's, both ``[N_j, Vd]``.

        In step ``j`` each slot stands for the ``j``-th of a chain that begins there. It sees the slots with features up to the chain's first one, and those of its
        own chain.
        """
        head, length = self.module, batch.ids.shape[1] - 1
        device = batch.ids.device
        row_of = torch.full(batch.valid.shape, -1, device=device)
        row_of[batch.valid] = torch.arange(len(batch.teacher_logits), device=device)
        hidden = head.fuse(batch.anchors.flatten(-2)[:, :-1])
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        own = torch.eye(length, dtype=torch.bool, device=device)
        cache, positions = DynamicCache(), torch.arange(length, device=device)[None]
        for step in range(min(self._steps, length)):
            # After the end of the text there is nothing to learn.
            tokens = batch.ids[:, 1:].roll(-step, 1)
            mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=device).masked_fill_(~seen, -torch.inf)
            hidden = head(head.embed(tokens), hidden, positions + step, [mask[None, None]] * len(head.layers), cache)
            at = row_of[:, 1 + step :]
            yield head.logits(hidden[:, : length - step][at >= 0]), batch.teacher_logits[at[at >= 0]]
            seen = torch.cat([seen, own], 1)

    def loss(self, batch: StudentBatch, settings: TrainingSettings, step: int) -> torch.Tensor:
        total, weights = torch.zeros((), device=batch.ids.device), 0.0
        for i, (logits, teacher_logits) in enumerate(self.simulate(batch)):
            total = total + _DECAY**i * loss_of(logits, teacher_logits, settings.temperature, settings.argmax_weight)
            weights += _DECAY**i
        return total / weights

    def cases(self, batch: StudentBatch) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each forward step; a further one stands after the target's own tokens."""
        for i, (logits, teacher_logits) in enumerate(self.simulate(batch)):
            yield f"agreement_{i + 1}" if i else "agreement", logits, teacher_logits

    def start(self, batches: Iterable[StudentBatch]) -> None:
        if self._is_new:
            fit_start(self.module, self._target, batches)

    def identity(self) -> str:
        record = self.module.config.to_json("", [], self._steps)
        record["transformer_layer_config"].pop("transformers_version", None)  # which does not change the head
        ids = hashlib.sha256(self.columns.cpu().numpy().tobytes()).hexdigest()
        return json.dumps(record | {"vocabulary": ids}, default=str)

    def save(self, folder: Path) -> None:
        self.module.save(folder, self._target, self._steps)
