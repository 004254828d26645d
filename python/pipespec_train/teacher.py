"""What a draft learns from: the target's forward over texts, each time, or once and kept in files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import Features
from pipespec.engine.forward import forward
from pipespec.models.properties import text_config
from pipespec.models.quantized import has_blocks


class TeacherOutput(NamedTuple):
    """The target's forward over a batch.

    Attributes:
        anchors: ``[B, S, k, H]``.
        last: ``[B, S, H]``, the last residual stream after the final norm, which is the input of the head.
        choices: int64 ``[B, S]``, the target's choice after each position; None: not computed.
    """

    anchors: torch.Tensor
    last: torch.Tensor
    choices: torch.Tensor | None = None


@torch.no_grad()
def teacher_forward(target: PreTrainedModel, ids: torch.Tensor, anchors: Sequence[int]) -> TeacherOutput:
    """Run the target over ``ids [B, S]``, padded on the right, and keep the streams ``anchors``, in the target's dtype.

    A target whose matrices are in blocks runs as in decoding, in its native form where it has one. Its streams are in bfloat16 then.
    """
    if has_blocks(target):
        depth = text_config(target.config).num_hidden_layers
        cache = RowCache.for_model(target, *ids.shape)
        cache.features = kept = Features([*anchors, depth], [0] * len(ids), torch.bfloat16)
        with torch.autocast(ids.device.type, enabled=False):  # which would leave it to the modules
            forward(target, ids, cache, keep=0)
        streams = kept.stored[:, : ids.shape[1]].unflatten(-1, (len(anchors) + 1, -1)).clone()
        return TeacherOutput(streams[:, :, :-1], streams[:, :, -1])
    found: dict[int, torch.Tensor] = {}

    def keep(index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        found[index] = args[0] if args else kwargs["hidden_states"]

    # Each stream is the input of the module after it.
    readers = [*target.base_model.layers, target.base_model.norm]
    handles = [readers[k].register_forward_pre_hook(partial(keep, k), with_kwargs=True) for k in anchors]
    try:
        last = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return TeacherOutput(torch.stack([found[k] for k in anchors], dim=2), last)


class KeptStates:
    """Runs the target as :func:`teacher_forward` does, but over each text only once: its states are kept in a file of a folder, with the target's choices.

    A token takes ``2 * (len(anchors) + 1) * H`` bytes of a target in 16 bits. Several targets and choices of anchors may share a folder.
    A target is known by its path and dtype: after a change of its weights, take another folder.

    Args:
        target: whose states are kept.
        anchors: the hidden states that are kept next to the last one.
        folder: is made if there is none.
    """

    def __init__(self, target: PreTrainedModel, anchors: Sequence[int], folder: Path) -> None:
        self._target, self._anchors, self._folder = target, list(anchors), folder
        self._kind = f"{target.config._name_or_path} {target.dtype} {self._anchors}"
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, ids: torch.Tensor) -> TeacherOutput:
        """The target's forward over ``ids [B, S]``, padded on the right with 0. What stands for the padding is 0."""
        # A text that ends with token 0 is kept without that token, which changes no state before it.
        texts = [row[: int(row.nonzero().max()) + 1 if row.any() else 1].tolist() for row in ids.cpu()]
        files = [self.file(text) for text in texts]
        missing = [row for row, file in enumerate(files) if not file.exists()]
        if missing:
            self._read(ids[missing], [len(texts[row]) for row in missing], [files[row] for row in missing])
        kept = [load_file(file, device=str(ids.device)) for file in files]
        whole = {name: value.new_zeros(*ids.shape, *value.shape[1:]) for name, value in kept[0].items()}
        for row, states in enumerate(kept):
            for name, value in states.items():
                whole[name][row, : len(value)] = value
        return TeacherOutput(**whole)

    def file(self, text: Sequence[int]) -> Path:
        """Where the states of a text's token ids are kept."""
        return self._folder / f"{hashlib.sha256(f'{self._kind} {list(text)}'.encode()).hexdigest()}.safetensors"

    @torch.no_grad()
    def _read(self, ids: torch.Tensor, lengths: Sequence[int], files: Sequence[Path]) -> None:
        found = teacher_forward(self._target, ids, self._anchors)
        for row, (length, file) in enumerate(zip(lengths, files, strict=True)):
            last = found.last[row, :length]
            choices = self._target.get_output_embeddings()(last.to(self._target.dtype)).argmax(-1)
            states = {"anchors": found.anchors[row, :length], "last": last, "choices": choices}
            written = file.with_suffix(f".{os.getpid()}")  # a process that is killed leaves no part of a file
            save_file({name: value.cpu().contiguous() for name, value in states.items()}, written)
            os.replace(written, file)
