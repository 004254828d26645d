"""Linear modules and embeddings that hold a matrix in blocks, and models made of them.

The modules take the place of ``nn.Linear`` and ``nn.Embedding``. The blocks are buffers, uint8, so what moves or shares buffers does so with them.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipespec.errors import mark_final, user_stacklevel
from pipespec.models.properties import text_config
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, WeightFormat, dequantize
from pipespec_kernels.packed import PackedMatrix

if TYPE_CHECKING:
    from pipespec.models.gguf import GgufFile

INT8 = "int8"
"""As the weight format of a model: its matrices become :class:`Int8Linear`."""

_drops: contextvars.ContextVar[bool] = contextvars.ContextVar("drops", default=False)


@dataclass(frozen=True)
class Blocks:
    """How a module holds its matrix.

    Attributes:
        format: name of the weight format, or :data:`INT8`.
        rows: of the matrix.
        columns: of the matrix.
        heads: the rows of each head lie as GGUF files of LLaMA have them, pair by pair of a rotation; 0: in the model's order.
        scale: of an embedding.
        tiled: the matrix is in tiles, for a GPU, see :mod:`pipespec.models.tiled`, and is multiplied in this dtype; None: it is in blocks.
    """

    format: str
    rows: int
    columns: int
    heads: int = 0
    scale: float | None = None
    tiled: torch.dtype | None = None


class HeldMatrix(nn.Module):
    """A module with a matrix ``[rows, columns]`` in blocks, or in tiles. ``form``: how it holds it."""

    form: Blocks

    @property
    def matrix(self) -> Any:
        """The matrix, with its rows in the model's order."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        form = self.form
        return f"{form.rows}, {form.columns}, {form.format}{' in tiles' if form.tiled else ''}"


def is_tiled(module: Any) -> bool:
    """Whether a module has a matrix in tiles, see :mod:`pipespec.models.tiled`."""
    return isinstance(module, HeldMatrix) and module.form.tiled is not None


class _Blocks(HeldMatrix):
    """A module with a matrix in blocks."""

    blocks: torch.Tensor

    def __init__(self, matrix: QuantizedMatrix, heads: int = 0, scale: float | None = None) -> None:
        super().__init__()
        self.source: GgufFile | None = None  # whose pages hold the blocks
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


class QuantizedLinear(_Blocks):
    """A linear module whose weights are in blocks.

    On the CPU it multiplies with the bits of the native decoder, see :class:`pipespec_kernels.packed.PackedMatrix`: inputs are rounded to 8 bits. It
    makes a packed copy of the matrix for the first call and keeps it, but within :func:`packed_copies_dropped`. On other devices
    :class:`pipespec.models.tiled.TiledLinear` takes its place.

    Args:
        matrix: ``[outputs, inputs]``.
        bias: ``[outputs]``, in the model's order, or None.
        heads: see :class:`Blocks`.
    """

    bias: nn.Parameter | None

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None = None, heads: int = 0) -> None:
        super().__init__(matrix, heads)
        self.out_features, self.in_features = matrix.shape
        # A parameter, which moves with the module and is compared as the others are.
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.bias = bias
        self._packed: PackedMatrix | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``, in the dtype of ``x``. Raises ``ValueError`` where they are not on the CPU."""
        if not self.blocks.is_cpu or not x.is_cpu:
            raise ValueError(
                f"a matrix in blocks on {self.blocks.device}, inputs on {x.device}: blocks are multiplied on the CPU; load the model for its device "
                "(device=, or --device), which brings them into tiles"
            )
        packed = self._packed or PackedMatrix(self.matrix)
        self._packed = None if _drops.get() else packed
        out = packed.matmul(x.detach().float()).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def rows(self, rows: slice) -> QuantizedLinear:
        """Some of the outputs."""
        return QuantizedLinear(self.matrix.rows(rows), None if self.bias is None else self.bias[rows])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # copies of the module make their own


class StackedLinear(nn.Module):
    """The matrices of all experts as floats, where others of the same experts are in blocks.

    Args:
        weight: ``[experts * outputs, inputs]``.
        bias: ``[experts * outputs]``, or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, rows: slice) -> StackedLinear:
        """Some of the outputs."""
        return StackedLinear(self.weight.detach()[rows], None if self.bias is None else self.bias.detach()[rows])


class JoinedLinear(nn.Module):
    """A linear module without a bias whose matrix lies in parts, or in another order.

    Args:
        parts: linear modules of the same inputs, whose outputs follow one another.
        outputs: int64: the numbers of these outputs, in the order of the module's; None: the same order.
        inputs: int64: the numbers of the module's inputs, in the order of the parts'; None: the same order.
    """

    outputs: torch.Tensor | None
    inputs: torch.Tensor | None

    def __init__(
        self, parts: Sequence[nn.Module], outputs: torch.Tensor | None = None, inputs: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("outputs", outputs)
        self.register_buffer("inputs", inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``, in the dtype of ``x``."""
        x = x if self.inputs is None else x[..., self.inputs]
        out = torch.cat([part(x) for part in self.parts], -1)
        return out if self.outputs is None else out[..., self.outputs]


class OwnExperts(nn.Module):
    """What experts whose matrices pipespec holds have of the module whose place they take.

    Args:
        own: that module. With a ``limit`` it is gpt-oss's.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.num_experts: int = own.num_experts
        self.act_fn: Any = getattr(own, "act_fn", None)
        self.limit, self.alpha = getattr(own, "limit", 0.0), getattr(own, "alpha", 0.0)

    def activated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What the downs multiply."""
        if not self.limit:
            return self.act_fn(gate) * up
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up.clamp(-self.limit, self.limit) + 1)


class QuantizedExperts(OwnExperts):
    """The experts of a feed-forward, some or all of whose matrices are in blocks, in the place of a module of transformers.

    Args:
        own: that module.
        gate: ``[experts * intermediate, hidden]``, with the biases of all experts, or without.
        up: as ``gate``.
        down: ``[experts * hidden, intermediate]``.
    """

    def __init__(self, own: Any, gate: Stacked, up: Stacked, down: Stacked) -> None:
        super().__init__(own)
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums ``[columns, hidden]`` of the experts ``chosen [columns, each]`` of ``x [columns, hidden]``."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            column, place = torch.where(chosen == expert)
            gate, up = (self._part(part, expert)(x[column]) for part in (self.gate, self.up))
            one = self._part(self.down, expert)(self.activated(gate, up)) * weights[column, place, None]
            out.index_add_(0, column, one.to(out.dtype))
        return out

    def _part(self, stacked: Stacked, expert: int) -> Stacked:
        """The matrix of one expert. Its packed copy goes with it: those of all would take the file's size again."""
        size = stacked.out_features // self.num_experts
        return stacked.rows(slice(expert * size, (expert + 1) * size))


Stacked = QuantizedLinear | StackedLinear
"""A matrix of all experts."""


class _ScaledLinear(nn.Module):
    """A linear module whose weights have factors."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias
        self.out_features, self.in_features = weight.shape


class Int8Linear(_ScaledLinear):
    """A linear module with one int8 per weight and one float32 scale per row: ``y = (x W^T) * scale + bias``.

    Args:
        weight: int8 ``[outputs, inputs]``.
        scale: float32 ``[outputs]``.
        bias: ``[outputs]``, or None.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: nn.Parameter | None) -> None:
        super().__init__(weight, scale, bias)
        self.form = Blocks(INT8, *weight.shape)

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


class Float8Linear(_ScaledLinear):
    """A linear module with floats of 8 bits, as a checkpoint has them, on its way to a GPU, which multiplies with their tiles.

    Args:
        weight: float8_e4m3fn ``[outputs, inputs]``.
        scale: float32 ``[outputs, groups]``, each for 128 inputs, or for 16.
        bias: ``[outputs]``, or None.
    """

    def decoded(self) -> torch.Tensor:
        """The weights: float32 ``[outputs, inputs]``."""
        group = 128 if self.scale.shape[1] == -(-self.in_features // 128) else 16
        return self.weight.float() * self.scale.repeat_interleave(group, 1)[:, : self.in_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``, in the dtype of ``x``."""
        return F.linear(x, self.decoded().to(x.dtype), self.bias)


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
        out = dequantize(self.matrix.rows(tokens.reshape(-1))).view(*tokens.shape, self.embedding_dim)
        return out if self.form.scale is None else out * self.form.scale


@contextlib.contextmanager
def packed_copies_dropped() -> Iterator[None]:
    """Within it, a :class:`QuantizedLinear` drops its packed copy after each call: a pass over a model needs memory for one of them."""
    token = _drops.set(True)
    try:
        yield
    finally:
        _drops.reset(token)


@contextlib.contextmanager
def pages_released(parts: Any) -> Iterator[None]:
    """Within it, and at its end, the pages of GGUF files that are read for the blocks of ``parts`` are given back to the system.

    Args:
        parts: a model, or parts of one; its modules keep the blocks, which come from the file again where they are used.
    """
    sources = {
        id(m.source): m.source for _, m in parts.named_modules() if isinstance(m, _Blocks) and m.source is not None
    }
    if not sources:
        yield
        return
    ended = threading.Event()

    def release() -> None:
        is_over = False
        while not is_over:
            is_over = ended.wait(0.05)  # a fraction of a gigabyte lies in memory twice
            for source in sources.values():
                source.release_pages()

    thread = threading.Thread(target=release, name="pipespec-pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def check_files(models: Sequence[PreTrainedModel]) -> None:
    """Raise ``ValueError`` if a GGUF file that holds blocks of a model was written to or truncated since it was opened. Reading a page beyond its end would end the process."""
    for model in models:
        source: GgufFile | None = getattr(model, "_pipespec_file", None)
        if source is not None and (changed := source.changed()) is not None:
            error = ValueError(
                f"{changed} has changed since the model was loaded from it, and the model reads its weights there: load it again"
            )
            mark_final(error)  # transformers would read them, too
            raise error


def in_blocks(module: Any, matrix: QuantizedMatrix, heads: int = 0, source: GgufFile | None = None) -> nn.Module:
    """The module in the place of a linear one, whose bias it takes, or of an embedding. ``heads``: see :class:`Blocks`."""
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "scalar_embed_scale", None)
        made: QuantizedEmbedding | QuantizedLinear = QuantizedEmbedding(matrix, scale)
    else:
        made = QuantizedLinear(matrix, module.bias, heads)
    made.source = source
    return made


def filled(
    source: str | Path, config: Any, dtype: torch.dtype, fill: Callable[[str, nn.Module], nn.Module]
) -> PreTrainedModel:
    """A model in eval mode out of a file or a folder.

    Args:
        source: for messages.
        config: of the model.
        dtype: of what is not in blocks.
        fill: gives a module, by its name, the parameters that are stored, and returns it, or the module that takes its place.

    Raises:
        ValueError: a parameter is not stored: the message names it. Or the configuration has sizes of which transformers makes no model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (
        ArithmeticError,
        AssertionError,
        LookupError,
        RuntimeError,
        TypeError,
    ) as error:  # of sizes that fit nothing
        text = " ".join(str(error).split())
        raise ValueError(f"{source} describes no {config.model_type} model: {text}") from error
    for name, module in list(model.named_modules()):
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:
            module.embed_scale = torch.tensor(scale)
        is_stored = module._parameters or module._buffers.keys() - module._non_persistent_buffers_set
        if is_stored and (made := fill(name, module)) is not module:
            model.set_submodule(name, made)
    # Buffers are computed, not loaded: now that the sizes are known to be those of the weights. In transformers 5.0 some attentions have a rotary embedding of their own.
    for module in list(model.modules()):
        for name in {"rotary_emb", "pos_emb"} & module._modules.keys():
            setattr(module, name, type(module._modules[name])(config=config))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings and not has_blocks(head) and not has_blocks(embedding):
        head.weight = embedding.weight
    missing = next((name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta), None)
    if missing is not None:
        raise ValueError(f"{source} does not hold {missing} of a {config.model_type} model")
    if has_blocks(model):
        untie(model)
    config._name_or_path = str(source)
    return model.eval()


def formats_of(module: nn.Module) -> tuple[str, ...]:
    """The formats of a module's matrices in blocks, in order."""
    return tuple(part.form.format for part in module.modules() if isinstance(part, _Blocks))


def has_blocks(parts: Any) -> bool:
    """Whether a model, or parts of one, have modules in blocks."""
    return any(isinstance(module, _Blocks) for _, module in parts.named_modules())


def untie(model: PreTrainedModel) -> None:
    """Head and embedding are modules of their own from now on, keys and values of blocks are bfloat16, and no checkpoint of transformers describes the model: it refuses to be saved."""
    model.save_pretrained = _refuse_saving
    for config in (model.config, text_config(model.config)):
        config.tie_word_embeddings = False
    text_config(model.config).kv_dtype = "bfloat16" if has_blocks(model) else None


def with_kv_of(dtype: torch.dtype | str, model: PreTrainedModel, weights: str | None = None) -> PreTrainedModel:
    """A model for the CPU, which keeps keys and values of its blocks in the dtype of the hidden states if ``dtype``, as a user gives it, is float32.

    Warns of another one where there are blocks: such a model computes in float32. ``weights``: the format in which its matrices were put when it was loaded.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "float32":
        text_config(model.config).kv_dtype = None
    elif name != "auto" and has_blocks(model):
        effect = (
            "has no effect"
            if weights is None
            else f"is that of the weights before weights={weights!r}, and of nothing after it"
        )
        warnings.warn(
            f"{getattr(model.config, '_name_or_path', '') or type(model).__name__}: its matrices are in blocks, and on a CPU such a model computes in float32, with keys and values in bfloat16: "
            f"dtype={name!r} {effect}",
            stacklevel=user_stacklevel(),
        )
    return model


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        "save_pretrained: no checkpoint of transformers describes int8 matrices, nor those in blocks; save the model that they were made of, and give "
        "weights= where it is used"
    )
