"""Linear modules and embeddings that hold a matrix in blocks, and models made of them.

The modules take the place of ``nn.Linear`` and ``nn.Embedding``. The blocks are buffers, uint8, so what moves or shares buffers does so with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pipespec.models.properties import text_config
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, WeightFormat, dequantize

_ROWS = 4096
"""Rows of a matrix that are floats at a time."""


@dataclass(frozen=True)
class Blocks:
    """How a module holds its matrix: what a module without weights needs to be built like it.

    Attributes:
        format: name of the weight format.
        rows: of the matrix.
        columns: of the matrix.
        heads: the rows of each head lie as GGUF files of LLaMA have them, pair by pair of a rotation; 0: in the model's order.
        scale: of an embedding.
    """

    format: str
    rows: int
    columns: int
    heads: int = 0
    scale: float | None = None


class _Blocks(nn.Module):
    """A module with a matrix ``[rows, columns]`` in blocks."""

    blocks: torch.Tensor

    def __init__(self, matrix: QuantizedMatrix, heads: int = 0, scale: float | None = None) -> None:
        super().__init__()
        self.register_buffer("blocks", matrix.data)
        self.form = Blocks(matrix.format.name, *matrix.shape, heads, scale)

    @property
    def format(self) -> WeightFormat:
        """Of the blocks."""
        return FORMATS[self.form.format]

    @property
    def matrix(self) -> QuantizedMatrix:
        """The matrix with its rows in the model's order: a copy where they lie in another one."""
        form = self.form
        matrix = QuantizedMatrix(self.format, self.blocks, (form.rows, form.columns))
        if not form.heads:
            return matrix
        order = torch.arange(form.rows).view(form.heads, -1, 2).transpose(1, 2).reshape(-1)
        return matrix.rows(order)

    def extra_repr(self) -> str:
        return f"{self.form.rows}, {self.form.columns}, {self.form.format}"


class QuantizedLinear(_Blocks):
    """A linear module whose weights are in blocks. It multiplies with the weights as floats, some rows at a time.

    Args:
        matrix: ``[outputs, inputs]``.
        bias: ``[outputs]``, in the model's order, or None.
        heads: see :class:`Blocks`.
    """

    def __init__(self, matrix: QuantizedMatrix, bias: nn.Parameter | None = None, heads: int = 0) -> None:
        super().__init__(matrix, heads)
        self.out_features, self.in_features = matrix.shape
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``, in the dtype of ``x``."""
        matrix, wide = self.matrix, x.float()
        starts = range(0, self.out_features, _ROWS)
        parts = [F.linear(wide, dequantize(matrix.rows(slice(start, start + _ROWS)))) for start in starts]
        out = torch.cat(parts, -1).to(x.dtype)
        return out if self.bias is None else out + self.bias


class QuantizedEmbedding(_Blocks):
    """Token embeddings in blocks: the rows of the tokens become floats.

    Args:
        matrix: ``[tokens, hidden]``.
        scale: multiplies the embeddings; None: nothing does.
    """

    def __init__(self, matrix: QuantizedMatrix, scale: float | None = None) -> None:
        super().__init__(matrix, scale=scale)
        self.num_embeddings, self.embedding_dim = matrix.shape

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 ``[..., hidden]``."""
        rows = dequantize(self.matrix.rows(tokens.reshape(-1)))
        out = rows.view(*tokens.shape, self.embedding_dim)
        return out if self.form.scale is None else out * self.form.scale


def quantized_modules(model: nn.Module) -> dict[str, QuantizedLinear | QuantizedEmbedding]:
    """The modules in blocks by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, (QuantizedLinear, QuantizedEmbedding))}


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has modules in blocks."""
    return any(isinstance(module, _Blocks) for module in model.modules())


def untie(model: PreTrainedModel) -> None:
    """Head and embedding are modules of their own from now on, and no checkpoint of transformers describes the model: it refuses to be saved."""
    model.save_pretrained = _refuse_saving
    for config in (model.config, text_config(model.config)):
        config.tie_word_embeddings = False


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        "save_pretrained: no checkpoint of transformers describes matrices in these blocks; save the model that they were made of, and give "
        "weights= where it is used"
    )


def hollow(module_form: Blocks, bias: nn.Parameter | None, *, linear: bool) -> QuantizedLinear | QuantizedEmbedding:
    """A module on the meta device, to be filled with blocks."""
    form = FORMATS[module_form.format]
    with torch.device("meta"):
        data = torch.empty((module_form.rows, form.row_bytes(module_form.columns)), dtype=torch.uint8)
    matrix = QuantizedMatrix(form, data, (module_form.rows, module_form.columns))
    return QuantizedLinear(matrix, bias, module_form.heads) if linear else QuantizedEmbedding(matrix, module_form.scale)
