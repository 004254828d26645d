"""What drafts over the target's hidden states have in common: their files, the target that they fit, its embedding and their vocabulary."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import cached_file

from pipespec.config import WIDTH
from pipespec.engine.sampling import float32_copy
from pipespec.models.families import NotReadable
from pipespec.models.loading import read_stored
from pipespec.models.properties import compute_dtype, embedding_size, input_device, text_config, weight_bytes
from pipespec.models.quantized import INT8, has_blocks
from pipespec.models.quantizing import put_in_blocks, rest_in_float32
from pipespec.models.tiled import put_in_tiles
from pipespec.process.records import parse_json
from pipespec_kernels.decoder import DecoderShape, NativeDecoder

CONFIG, WEIGHTS = "config.json", "model.safetensors"

_BLOCKS = ("llama", "qwen3")


def read_record(folder: Any) -> dict[str, Any] | None:
    """The object in the ``config.json`` of a folder, or of a hub name; None where there is none, or none that can be read."""
    file = stored_file(folder, CONFIG) if isinstance(folder, (str, Path)) else None
    try:
        found = None if file is None else parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def stored_file(folder: str | Path, name: str) -> Path | None:
    """A file of a folder, or of a hub name; None: there is none."""
    path = Path(folder)
    if path.is_dir():
        return path / name if (path / name).is_file() else None
    if path.exists() or path.is_absolute() or str(folder).startswith(".") or str(folder).count("/") != 1:
        return None
    try:
        found = cached_file(str(folder), name)
    except OSError:
        return None
    return None if found is None else Path(found)


def read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors. Raises ``FileNotFoundError`` if there are none."""
    file = stored_file(folder, WEIGHTS)
    if file is None:
        inside = sorted(p.name for p in Path(folder).glob("*.bin")) if Path(folder).is_dir() else []
        note = f" (only {', '.join(inside)}, which can run code when loaded); convert the head to safetensors"
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS}{note if inside else ''}")
    return read_stored(file)


def layer_config(described: dict[str, Any], default: str) -> Any:
    """transformers' config of the decoder layers that a ``config.json`` describes. ``default``: their type where it names none."""
    described = {k: v for k, v in described.items() if k != "architectures"}
    model_type = described.pop("model_type", default)
    if model_type not in _BLOCKS:
        raise ValueError(f"its layers are those of {model_type!r}; {' and '.join(map(repr, _BLOCKS))} are read")
    return AutoConfig.for_model(model_type, **described)


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """The architecture of a draft that reads the target's hidden states, and the target that it fits.

    Attributes:
        kind: how messages call it.
        block: transformers' config of its decoder layers. ``vocab_size`` is the target's.
        draft_vocabulary: tokens that it can draft.
        features: the target's hidden states that it reads, as indices in ``hidden_states``; None: :meth:`layers_of` says which.
        target_hidden: size of the target's hidden states.
        where: its folder, for messages.
    """

    kind: ClassVar[str]

    block: Any
    draft_vocabulary: int
    features: tuple[int, ...] | None
    target_hidden: int
    where: str = "the draft head"

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a ``config.json``. Raises ``FileNotFoundError`` if there is none, and ``ValueError`` for one of another draft."""
        record = read_record(folder)
        if record is None:
            raise FileNotFoundError(f"{folder} holds no {cls.kind}: there is no {CONFIG} in it that can be read")
        return cls.from_json(record, str(folder))

    @classmethod
    def from_json(cls, record: dict[str, Any], where: str = "the draft head") -> Self:
        """The configuration that the object of a ``config.json`` describes."""
        raise NotImplementedError

    def get_text_config(self, decoder: bool = False) -> Any:
        """:attr:`block`, by the name that models have for it."""
        return self.block

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The features of a target with ``depth`` layers."""
        assert self.features is not None
        return self.features

    @property
    def count(self) -> int:
        """Number of the hidden states that it reads."""
        return 3 if self.features is None else len(self.features)

    def require(self, target: Any) -> None:
        """Check that it is for a target.

        Args:
            target: its config.

        Raises:
            ValueError: another hidden size, number of layers or vocabulary.
        """
        config = text_config(target)
        advice = (
            f"use the target that the {self.kind} was trained for, or train one for this target (pipespec train-draft)"
        )
        if config.hidden_size != self.target_hidden:
            raise ValueError(
                f"{self.where} reads hidden states of size {self.target_hidden}, the target's have {config.hidden_size}: {advice}"
            )
        if config.vocab_size != self.block.vocab_size:
            raise ValueError(
                f"{self.where} is for a vocabulary of {self.block.vocab_size} tokens, the target has {config.vocab_size}: {advice}"
            )
        layers, depth = self.layers_of(config.num_hidden_layers), config.num_hidden_layers
        if len(set(layers)) != len(layers) or not all(0 <= k < depth for k in layers):
            raise ValueError(
                f"{self.where} reads the hidden states {list(layers)} (0: the embedding, k: the output of layer k - 1); the target's {depth} layers "
                f"give those from 0 to {depth - 1}: {advice}"
            )


class NativeProduct(nn.Module):
    """A linear module on the CPU that multiplies a few columns by packed weights, and more of them as it did.

    Args:
        linear: the module, without bias. Its own weights stay.

    Raises:
        NotReadable: the native product does not take its dtype or shape.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = [linear]  # not a submodule: it may be the target's
        shape = DecoderShape(linear.in_features, 1, 1, 1, 2, linear.out_features, eps=0.0, scale=1.0)
        try:
            self._product = NativeDecoder(shape, (), head=linear.weight.detach())
        except (ValueError, TypeError) as error:
            raise NotReadable(str(error)) from error

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, in the dtype of the columns."""
        linear = self._linear[0]
        if columns.numel() > WIDTH * linear.in_features:
            found: torch.Tensor = linear(columns)
            return found
        return (
            self._product.logits(float32_copy(columns.reshape(1, -1, linear.in_features)))
            .to(columns.dtype)
            .view(*columns.shape[:-1], -1)
        )


class TargetReader(nn.Module):
    """A model that drafts from the target's hidden states.

    Args:
        config: its architecture.

    Attributes:
        block: the config of its layers.
        attention: of its layers, in transformers' registry, as they were made.
        embed_tokens: its own embedding; None: the target's.
        lm_head: its own matrix that gives the logits; None: the target's.
        ids: int64 ``[draft_vocabulary]``, the target's id of each token that it can draft.
    """

    ids: torch.Tensor
    embed_tokens: nn.Embedding | None
    lm_head: Any

    base_model_prefix = ""  # for LayerDevices: no base has the layers

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.config: Any = config
        # The embedding of the base is not used.
        block = copy.copy(config.block)
        block.vocab_size, block.pad_token_id = 1, None
        base = AutoModel.from_config(block, dtype=torch.float32)
        self.block, self.layers, self.norm, self.rotary_emb = base.config, base.layers, base.norm, base.rotary_emb
        self.attention = self.block._attn_implementation
        self.register_buffer("ids", torch.arange(config.draft_vocabulary), persistent=False)
        self._borrowed: list[Any] = []  # not submodules: their weights are the target's

    def choose_tokens(self, d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> None:
        """Take the tokens that it drafts from the tables of its file.

        Args:
            d2t: int ``[draft_vocabulary]``, what is added to each index for the target's id; None: there is none.
            t2d: bool ``[vocabulary]``, whether it drafts a token of the target; None: there is none.

        Raises:
            ValueError: they do not fit the vocabularies.
        """
        where, count, size = self.config.where, self.config.draft_vocabulary, self.config.block.vocab_size
        if d2t is None:
            if count != size:
                raise ValueError(f"{where} drafts {count} of {size} tokens and has no d2t, which says which ones")
            return
        self.ids = ids = torch.arange(len(d2t)) + d2t.long()
        if ids.shape != (count,) or int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) != count:
            raise ValueError(f"{where}: d2t does not give {count} different tokens of {size}")
        if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
            raise ValueError(f"{where}: d2t and t2d name different tokens")

    def place(self, target: PreTrainedModel, dtype: torch.dtype | str, stored: torch.dtype) -> None:
        """Cast and move it next to a target, in eval mode. ``dtype``: ``"auto"``: ``stored``, or the target's where that is smaller."""
        if dtype == "auto":
            dtype = min(stored, compute_dtype(target), key=lambda each: each.itemsize)
        self.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        self.borrow(target)
        self.to(input_device(target)).eval()

    def borrow(self, target: PreTrainedModel) -> None:
        """Use the target's embedding, and its matrix that gives the logits, where it has none. Raises ``ValueError`` where they have another size."""
        size, needed = text_config(target.config).hidden_size, self.config.block.hidden_size
        self._borrowed = [target.get_input_embeddings(), target.get_output_embeddings()]
        if self.lm_head is None and not (self.drafts_all and size == needed):
            raise ValueError(
                f"{self.config.where} has no lm_head of its own, and the target's is for another vocabulary or hidden size"
            )
        if self.embed_tokens is not None:
            return
        if size != needed:
            raise ValueError(
                f"{self.config.where} has no embedding of its own, and its hidden size is {needed}, the target's {size}"
            )
        if embedding_size(target) < self.config.block.vocab_size:
            raise ValueError(f"{self.config.where} has no embedding of its own, and the target's has fewer tokens")

    def quantize(self, name: str) -> str:
        """Put the matrices in blocks, in place. Returns the format: ``"int8"`` stands for ``"q8_0"``."""
        if has_blocks(self):
            raise ValueError(f"{self.config.where} is in blocks already: leave weights= of this draft out")
        name = "q8_0" if name == INT8 else name
        device, dtype = self.device, self.dtype
        with torch.no_grad():
            put_in_blocks(self, name, self.lm_head)
            if device.type in ("cpu", "meta"):
                rest_in_float32(self)
            else:
                put_in_tiles(self, device, dtype, lambda: self)
        return name

    @functools.cached_property
    def drafts_all(self) -> bool:
        """Whether its vocabulary is the target's."""
        return self.config.draft_vocabulary == self.config.block.vocab_size and bool((self.ids.diff() == 1).all())

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that a step reads. Of its own embedding it reads rows."""
        borrowed = weight_bytes(self.head) if self.lm_head is None else 0
        return weight_bytes(self) + borrowed - (0 if self.embed_tokens is None else weight_bytes(self.embed_tokens))

    @property
    def dtype(self) -> torch.dtype:
        """Of its norms, and so of its hidden states."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def get_input_embeddings(self) -> Any:
        """The module that embeds: its own, or the target's."""
        return self._borrowed[0] if self.embed_tokens is None else self.embed_tokens

    @property
    def head(self) -> Any:
        """The module that gives the logits: its own, or the target's."""
        return self._borrowed[1] if self.lm_head is None else self.lm_head

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[rows, q, H]`` of ``tokens [rows, q]``, ids of the target."""
        return self.get_input_embeddings()(tokens).to(self.dtype)
