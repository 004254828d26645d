"""Models with quantised matrices on a GPU.

:func:`on_gpu` moves a model whose matrices are in blocks. They become tiles (:mod:`pipespec_kernels.tiles`), one matrix after the other, so that no weight exists twice on the
device. All else is in 16 bits, hidden states and keys and values included. A matrix that has no tiles is dequantised once, and a warning says what it takes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from pipespec.errors import user_stacklevel
from pipespec.models.properties import text_config
from pipespec.models.quantized import (
    Blocks,
    Float8Linear,
    HeldMatrix,
    Int8Linear,
    OwnExperts,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    StackedLinear,
)
from pipespec_kernels import ops
from pipespec_kernels.formats import QuantizedMatrix, dequantize
from pipespec_kernels.products import MAX_ROWS
from pipespec_kernels.tiles import BAND, LAYOUTS, TiledMatrix, float8_in_tiles, in_tiles

_ROWS = 1 << 15
"""Rows of a matrix that are written out in 16 bits at a time: all of a layer's, and a part of a head's."""


_BY_EXPERT = 256
"""Columns beyond which experts are multiplied one after the other, in products of the library, whose numbers the host waits for."""


class _Tiled(HeldMatrix):
    """A module with a matrix in tiles."""

    tiles: torch.Tensor

    def __init__(self, matrix: TiledMatrix, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.register_buffer("tiles", matrix.data)
        self.form = Blocks(matrix.format, *matrix.shape, scale=scale, tiled=dtype)

    @property
    def matrix(self) -> TiledMatrix:
        """The matrix, which lies in :attr:`tiles`."""
        return TiledMatrix(self.form.format, self.tiles, (self.form.rows, self.form.columns))


class TiledLinear(_Tiled):
    """A linear module whose matrix is in tiles. It multiplies with the weights of the blocks, rounded to its dtype.

    Args:
        matrix: ``[outputs, inputs]``.
        dtype: of the products.
        bias: ``[outputs]``, or None.
    """

    def __init__(self, matrix: TiledMatrix, dtype: torch.dtype, bias: nn.Parameter | None = None) -> None:
        super().__init__(matrix, dtype)
        self.out_features, self.in_features = matrix.shape
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``, in the dtype of ``x``."""
        if x.dtype == self.form.tiled:
            rows = product(x.reshape(-1, self.in_features), self.matrix, self.bias)
            return rows.view(*x.shape[:-1], self.out_features)
        return F.linear(x, ops.decode_rows(self.matrix, dtype=self.form.tiled).to(x.dtype), self.bias)


class TiledEmbedding(_Tiled):
    """Token embeddings in tiles.

    Args:
        matrix: ``[tokens, hidden]``.
        dtype: of the embeddings.
        scale: multiplies them; None: nothing does.
    """

    factor: torch.Tensor | None

    def __init__(self, matrix: TiledMatrix, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__(matrix, dtype, scale)
        self.num_embeddings, self.embedding_dim = matrix.shape
        # Transformers' own module has a number of the dtype, too.
        factor = None if scale is None else torch.tensor(scale, dtype=dtype, device=matrix.data.device)
        self.register_buffer("factor", factor)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]``."""
        rows = ops.decode_rows(self.matrix, tokens.reshape(-1), dtype=self.form.tiled)
        out = rows.view(*tokens.shape, self.embedding_dim)
        return out if self.factor is None else out * self.factor


_Stacked = TiledLinear | StackedLinear
"""A matrix of all experts."""


class TiledExperts(OwnExperts):
    """The experts of a feed-forward whose matrices are in tiles, or in part in floats, in the place of :class:`QuantizedExperts`.

    Args:
        own: that module, or the one of transformers.
        gate_up: gates and ups of each expert, one below the other; or gates, and ups, of all experts.
        down: the downs of all experts.
    """

    def __init__(self, own: Any, gate_up: list[_Stacked], down: _Stacked) -> None:
        super().__init__(own)
        self.gate_up, self.down = nn.ModuleList(gate_up), down

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums ``[columns, hidden]`` of the experts ``chosen [columns, each]`` of ``x [columns, hidden]``: up to 256 columns without a wait for the device."""
        if len(x) > _BY_EXPERT:
            return self._by_expert(x, chosen, weights)
        if weights.dtype != x.dtype:
            weights = weights.float()
        parts = (part.split(MAX_ROWS) for part in (x, chosen.contiguous(), weights.contiguous()))
        return torch.cat([self._few(*part) for part in zip(*parts, strict=True)])

    def _few(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = [self._product(x, part, chosen) for part in self.gate_up]
        y = found[0] if len(found) == 1 else torch.cat(found, -1)
        return self._product(self.activated(*y.chunk(2, -1)), self.down, chosen, shares=weights)

    def _product(self, x: torch.Tensor, part: Any, chosen: torch.Tensor, **options: Any) -> torch.Tensor:
        matrix = part.matrix if isinstance(part, TiledLinear) else part.weight
        return ops.experts_small(x, matrix, chosen, part.bias, experts=self.num_experts, **options)

    def _by_expert(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In products of the library, with one expert's matrices at a time in 16 bits."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            column, place = torch.where(chosen == expert)
            y = torch.cat([F.linear(x[column], *self._of(part, expert, x.dtype)) for part in self.gate_up], -1)
            one = F.linear(self.activated(*y.chunk(2, -1)), *self._of(self.down, expert, x.dtype))
            out.index_add_(0, column, (one * weights[column, place, None]).to(out.dtype))
        return out

    def _of(self, part: Any, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Matrix and bias of one expert."""
        rows = part.out_features // self.num_experts
        own = slice(expert * rows, (expert + 1) * rows)
        bias = None if part.bias is None else part.bias[own]
        if not isinstance(part, TiledLinear):
            return part.weight[own], bias
        matrix = part.matrix
        bands = matrix.data[own.start // BAND : own.stop // BAND]
        return ops.decode_rows(TiledMatrix(matrix.format, bands, (rows, part.in_features)), dtype=dtype), bias


def weights_in(model: nn.Module) -> int:
    """The number of a model's weights, those in tiles included."""
    matrices = {m.tiles.data_ptr(): m.form.rows * m.form.columns for m in model.modules() if isinstance(m, _Tiled)}
    return sum(matrices.values()) + sum(parameter.numel() for parameter in model.parameters())


def product(x: torch.Tensor, weight: torch.Tensor | TiledMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """``[n, N]`` of rows ``x [n, K]``: few rows in one launch that decodes the weights; more of them by the library, with weights that are written out before."""
    if not isinstance(weight, TiledMatrix):
        return F.linear(x, weight, bias)
    if len(x) <= MAX_ROWS:
        return ops.linear_small(x, weight, bias)
    found = []
    for first in range(0, len(weight), _ROWS):
        part = weight.data[first // BAND : (first + _ROWS) // BAND]
        rows = min(_ROWS, len(weight) - first)
        piece = ops.decode_rows(TiledMatrix(weight.format, part, (rows, weight.shape[1])), dtype=x.dtype)
        found.append(F.linear(x, piece, None if bias is None else bias[first : first + rows]))
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def on_gpu(model: PreTrainedModel, device: torch.device | str, dtype: torch.dtype) -> PreTrainedModel:
    """Move a model whose matrices are in blocks, in int8 or in floats of 8 bits, in place.

    Args:
        model: on the CPU, or partly on the device.
        device: where to.
        dtype: of all that is not quantised, and of what the model computes.
    """

    def unquantised() -> nn.Module:
        with torch.device("meta"):
            return type(model)(copy.deepcopy(model.config))

    before, after = put_in_tiles(model, device, dtype, unquantised)
    for config in (model.config, text_config(model.config)):
        config.dtype = dtype
    text_config(model.config).kv_dtype = None
    if after:
        warnings.warn(
            f"{model.config._name_or_path or type(model).__name__}: no kernel for {device} multiplies with some of its weights as they are stored: {before / 1e9:.2f} GB of "
            f"them become {after / 1e9:.2f} GB in {str(dtype).removeprefix('torch.')}",
            stacklevel=user_stacklevel(),
        )
    model._pipespec_file = None  # nothing is read from it any more
    return model


def put_in_tiles(
    parts: nn.Module, device: torch.device | str, dtype: torch.dtype, unquantised: Callable[[], nn.Module]
) -> tuple[int, int]:
    """Move a module and bring its matrices into tiles, one after the other.

    Args:
        parts: a model, or a part of one; its modules are replaced.
        device: where to.
        dtype: of what is not quantised.
        unquantised: makes the same on the meta device, with modules of floats. Those take the place of modules whose format has no tiles.

    Returns:
        Bytes of the matrices that have no tiles, before and after.

    Raises:
        ValueError: it has experts whose rows tiles do not divide.
    """
    made: dict[tuple[int, str], TiledMatrix] = {}  # a head that is the embedding has its memory
    new: Any
    fresh: nn.Module | None = None
    within: tuple[str, ...] = ()  # experts
    before = after = 0
    for name, module in list(parts.named_modules()):
        if isinstance(module, QuantizedExperts):
            parts.set_submodule(name, _experts_in_tiles(name, module, device, dtype).eval())
            within += (f"{name}.",)
        if name.startswith(within) or not isinstance(
            module, (QuantizedLinear, QuantizedEmbedding, Int8Linear, Float8Linear)
        ):
            continue
        if isinstance(module, Float8Linear):
            new = TiledLinear(float8_in_tiles(module.weight, module.scale, device), dtype, module.bias)
        elif isinstance(module, Int8Linear) or module.form.format not in LAYOUTS:
            fresh = fresh or unquantised()
            new = _dequantised(fresh.get_submodule(name), module, device, dtype)
            before += (module.weight if isinstance(module, Int8Linear) else module.blocks).nbytes
            after += new.weight.nbytes
        else:
            key = module.blocks.data_ptr(), module.form.format
            matrix = made[key] = made.get(key) or in_tiles(module.matrix, device)
            if isinstance(module, QuantizedEmbedding):
                new = TiledEmbedding(matrix, dtype, module.form.scale)
            else:
                new = TiledLinear(matrix, dtype, module.bias)
            if module.source is not None:
                module.source.release_pages()
        parts.set_submodule(name, new.eval())
    moved: dict[int, nn.Parameter] = {}  # a head that is the embedding stays it
    for module in parts.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and (parameter.dtype != dtype or parameter.device != torch.device(device)):
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.detach().to(device, dtype), requires_grad=False)
                module._parameters[leaf] = moved[id(parameter)]
    parts.to(device)  # buffers keep their dtype: RoPE is float32 in every model
    return before, after


def _experts_in_tiles(
    name: str, module: QuantizedExperts, device: torch.device | str, dtype: torch.dtype
) -> TiledExperts:
    """Experts on a device, one matrix after the other. Gates and ups of one format are one matrix, expert by expert."""
    found: list[Any] = []
    for part in (module.gate, module.up, module.down):
        rows = part.out_features // module.num_experts
        bias = None if part.bias is None else nn.Parameter(part.bias.detach().to(device, dtype), requires_grad=False)
        if isinstance(part, StackedLinear):
            found.append(StackedLinear(part.weight.detach().to(device, dtype), bias))
        elif rows % BAND:
            raise ValueError(
                f"{name}: on a GPU experts in blocks must have a multiple of {BAND} rows, and these have {rows}: leave out device=, or load the model's own checkpoint there"
            )
        else:
            found.append(TiledLinear(in_tiles(part.matrix, device), dtype, bias))
            if part.source is not None:
                part.source.release_pages()
    gate, up, down = found
    if type(gate) is not type(up) or (isinstance(gate, TiledLinear) and gate.form.format != up.form.format):
        return TiledExperts(module, [gate, up], down)

    def joined(*both: torch.Tensor) -> torch.Tensor:
        return torch.cat([one.unflatten(0, (module.num_experts, -1)) for one in both], 1).flatten(0, 1)

    bias = None if gate.bias is None else nn.Parameter(joined(gate.bias, up.bias), requires_grad=False)
    if isinstance(gate, StackedLinear):
        both: Any = StackedLinear(joined(gate.weight.detach(), up.weight.detach()), bias)
    else:
        shape = 2 * gate.out_features, gate.in_features
        both = TiledLinear(TiledMatrix(gate.form.format, joined(gate.tiles, up.tiles), shape), dtype, bias)
    return TiledExperts(module, [both], down)


def _dequantised(fresh: Any, module: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A module of torch or transformers with the weights of a quantised one. ``fresh``: on the meta device."""
    if isinstance(module, Int8Linear):
        weight = module.weight.to(device).float().mul_(module.scale.to(device)[:, None])
    else:
        matrix = module.matrix
        weight = dequantize(QuantizedMatrix(matrix.format, matrix.data.to(device), matrix.shape))
    fresh.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    if getattr(module, "bias", None) is not None:
        fresh.bias = module.bias
    if (scale := module.form.scale) is not None:
        fresh.embed_scale = torch.tensor(scale, device=device)
    return fresh
