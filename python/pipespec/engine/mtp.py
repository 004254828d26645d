"""MTP: the layer for multi-token prediction that checkpoints have behind the target's own layers, as a draft.

With the target's hidden state ``h_p`` after its last norm (DeepSeek-V3, arXiv 2412.19437), slot ``p`` reads ``eh_proj([enorm(e), hnorm(h_p)])``, where ``e`` embeds token
``p + 1``. One decoder layer of the target's class and a norm follow. Embedding and head are the target's, and the logits are those of token ``p + 2``. For a slot whose
position the target has not computed, the output of the slot before takes the place of ``h``, after the norm. transformers leaves these weights out when it loads a model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipespec.engine.head import HeadDraft
from pipespec.engine.target_reader import ReaderConfig, TargetReader
from pipespec.models.families import NotReadable
from pipespec.models.gguf_models import fill_draft_layer
from pipespec.models.loading import file_in_blocks, fill, is_gguf, read_stored, weight_files
from pipespec.models.parts import ModelParts
from pipespec.models.properties import compute_dtype, input_device, text_config
from pipespec.models.quantized import has_blocks
from pipespec.models.quantizing import rest_in_float32
from pipespec.models.tiled import put_in_tiles

MTP = "mtp"
"""In place of a draft: :class:`MtpDraft` with its defaults."""

_QWEN = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm."}
"""Names below ``mtp.`` in files of Qwen3-Next and Qwen3.5, and those of DeepSeek-V3 and GLM."""
_OWN = ("eh_proj.", "enorm.", "hnorm.", "norm.", "layers.")
_SHARED = ("embed_tokens.", "shared_head.head.", "lm_head.")
"""The target's own weights, which a file may have once more."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, kw_only=True)
class MtpConfig(ReaderConfig):
    """The architecture of an MTP layer, which is that of a target's layers."""

    kind = "MTP layer"

    @classmethod
    def of(cls, target: PretrainedConfig, where: str) -> MtpConfig:
        """Of the layer for a target of this configuration. ``where``: its files, for messages."""
        block = copy.deepcopy(text_config(target))
        depth, hidden = block.num_hidden_layers, block.hidden_size
        # A layer of its own, with attention; where the family has experts, with those.
        changes: dict[str, Any] = {
            "layer_types": ["full_attention"],
            "mlp_layer_types": ["sparse"],
            "mlp_only_layers": [],
        }
        changes |= {"decoder_sparse_step": 1, "first_k_dense_replace": 0}
        for name, value in changes.items():
            if getattr(block, name, None) is not None:
                setattr(block, name, value)
        block.num_hidden_layers = 1
        return cls(block=block, draft_vocabulary=block.vocab_size, features=(depth,), target_hidden=hidden, where=where)


class MtpHead(TargetReader):
    """An MTP layer with its norms.

    Args:
        config: its architecture. Weights are random until they are loaded.
    """

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        hidden, norm, eps = self.block.hidden_size, type(self.norm), self.block.rms_norm_eps
        self.enorm, self.hnorm = norm(hidden, eps=eps), norm(hidden, eps=eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.embed_tokens = self.lm_head = None

    @classmethod
    def load(cls, folder: str | Path, target: PreTrainedModel, dtype: torch.dtype | str = "auto") -> MtpHead:
        """Load the first MTP layer of a checkpoint next to its target, in eval mode.

        Args:
            folder: of the checkpoint, or a hub name.
            target: the model.
            dtype: as for :meth:`pipespec.engine.head.DraftHead.load`.

        Raises:
            ValueError: there is no such layer in its safetensors or its GGUF file, or it does not fit the target.
        """
        config = MtpConfig.of(target.config, f"the MTP layer of {folder}")
        if is_gguf(folder):
            return cls._of_gguf(config, folder, target, dtype)
        made = cls(config)
        weights = _stored(folder, text_config(target.config).num_hidden_layers)
        expected = made.state_dict()
        weights = _with_experts_together(weights, {name for name in expected if name.endswith("gate_up_proj")})
        fill(made, weights, f"{config.where} is not one for the target's class")
        made.place(target, dtype, weights["eh_proj.weight"].dtype)
        return made

    @classmethod
    def _of_gguf(
        cls, config: MtpConfig, path: str | Path, target: PreTrainedModel, dtype: torch.dtype | str
    ) -> MtpHead:
        """:meth:`load` from a GGUF file. Matrices in blocks stay in them; on a GPU they become tiles."""
        if (file := file_in_blocks(path)) is None:
            raise ValueError(f"{path} is of an architecture whose MTP layer is not read")

        def empty() -> MtpHead:
            with torch.device("meta"):
                return cls(config)

        made = empty()
        fill_draft_layer(file, made)
        made.ids = torch.arange(config.draft_vocabulary)
        for module in list(made.modules()):
            for name in {"rotary_emb", "pos_emb"} & module._modules.keys():
                setattr(module, name, type(getattr(module, name))(config=made.block))
        if not has_blocks(made):
            made.place(target, dtype, made.dtype)
            return made
        made.borrow(target)
        if (device := input_device(target)).type == "cpu":
            rest_in_float32(made)
        else:
            put_in_tiles(made, device, compute_dtype(target), empty)
        return made.eval()

    def parts(self) -> ModelParts:
        """Nothing: it has no native form. Raises :class:`NotReadable`."""
        raise NotReadable("an MTP layer shares the target's head and reads embeddings and hidden states in one product")

    def fuse(self, features: torch.Tensor, product: None = None) -> torch.Tensor:
        """The target's ``features [..., H]`` as states."""
        return features.to(self.dtype)

    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, masks: Sequence[Any], cache: Any
    ) -> torch.Tensor:
        """Run slots. Arguments are those of :meth:`pipespec.engine.head.DraftHead.forward`. Returns ``[rows, q, H]``, which the next slot and :meth:`logits` read."""
        hidden = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(states)], dim=-1))
        outputs = self.layers[0](
            hidden,
            attention_mask=masks[0],
            position_ids=positions,
            position_embeddings=self.rotary_emb(hidden, position_ids=positions),
            past_key_values=cache,
            use_cache=True,
        )
        found: torch.Tensor = self.norm(outputs[0] if isinstance(outputs, tuple) else outputs)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocabulary]`` of outputs ``[..., H]``."""
        found: torch.Tensor = self.head(hidden).to(self.dtype)
        return found


def _stored(folder: str | Path, depth: int) -> dict[str, torch.Tensor]:
    """The weights of the first MTP layer in the safetensors of a checkpoint whose target has ``depth`` layers, by their names in :class:`MtpHead`."""
    behind = f"model.layers.{depth}."
    found: dict[str, torch.Tensor] = {}
    try:
        if not str(folder):
            raise FileNotFoundError("the target was not loaded from files")
        for file in weight_files(folder, ("mtp.", behind)):
            found |= read_stored(file, ("mtp.", behind))
    except OSError as error:
        raise ValueError(
            f"the draft 'mtp' is a layer in the target's safetensors or its GGUF file, and {str(folder)!r} is no such file, and no folder or hub name with safetensors "
            f"({error}): load the target from them"
        ) from error
    named = {}
    for name, tensor in found.items():
        if name.startswith("mtp."):
            name = name.removeprefix("mtp.")
            name = next((new + name.removeprefix(old) for old, new in _QWEN.items() if name.startswith(old)), name)
        else:
            name = name.removeprefix(behind).replace("shared_head.norm.", "norm.")
            name = name if name.startswith((*_OWN, *_SHARED)) else f"layers.0.{name}"
        is_further = name.startswith("layers.") and not name.startswith("layers.0.")
        if not is_further and not name.startswith(_SHARED) and not name.endswith("inv_freq"):
            named[name] = tensor
    if "eh_proj.weight" not in named:
        raise ValueError(
            f"{folder} has no MTP layer: its safetensors name neither mtp.fc nor {behind}eh_proj. Its own draft is another one, or none"
        )
    return named


def _with_experts_together(weights: dict[str, torch.Tensor], merged: set[str]) -> dict[str, torch.Tensor]:
    """The weights with the matrices of all experts in one, as modules of transformers have them. ``merged``: names of such matrices of gates and ups."""
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    others = {}
    for name, tensor in weights.items():
        match = _EXPERT.fullmatch(name)
        if match and f"{match[1]}.gate_up_proj" in merged:
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
        else:
            others[name] = tensor
    for at, found in experts.items():
        gates, ups, downs = (
            [found[key] for key in sorted(key for key in found if key[0] == part)] for part in ("gate", "up", "down")
        )
        others[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        others[f"{at}.down_proj"] = torch.stack(downs)
    return others


@dataclass(frozen=True, eq=False)
class MtpDraft(HeadDraft):
    """The MTP layer in a checkpoint of the target. The string ``"mtp"`` stands for it.

    Args:
        folder: The checkpoint, or its name on the hub. Empty: where the target was loaded from.
    """

    label = "an MTP layer"
    model_class = MtpHead
    beside_blocks = None  # its experts would become float32

    folder: str | Path = ""

    @classmethod
    def recognise(cls, given: Any) -> None:
        return None

    def check(self, target: PretrainedConfig) -> None:
        """Nothing: its files tell."""

    def load(self, target: PreTrainedModel, dtype: torch.dtype | str) -> Any:
        return HeadDraft.load(self if self.folder else MtpDraft(target.config._name_or_path), target, dtype)
