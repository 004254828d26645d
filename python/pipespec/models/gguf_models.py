"""Models out of GGUF files.

The architectures are those of :data:`pipespec.models.gguf_architectures.ARCHITECTURES`. Their matrices stay in blocks, where they lie in the file; what is no
block becomes float32. A file without blocks is a model of floats, in bfloat16 where all of its matrices are that.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipespec.errors import user_stacklevel
from pipespec.models.gguf import CONVERTED, FLOATS, GgufFile, GgufTensor
from pipespec.models.gguf_architectures import EXPERTS, LEAVES, TENSORS, Architecture
from pipespec.models.gguf_config import DRAFTING, ROPE_FACTORS, architecture_of, gguf_config, tensor_of
from pipespec.models.gguf_tokenizer import end_ids
from pipespec.models.quantized import (
    JoinedLinear,
    QuantizedExperts,
    QuantizedLinear,
    StackedLinear,
    filled,
    has_blocks,
    in_blocks,
)
from pipespec.process.progress import say_once
from pipespec_kernels import block_layouts as layouts
from pipespec_kernels.block_layouts import LARGEST_POWER
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, dequantize, from_codes, from_e2m1

_LAYER = re.compile(r"(?:blk|model\.layers)\.(\d+)\.")

_NEXTN = "nextn."
"""Before the names of an MTP layer's own modules, behind the number of the layer."""

_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
"""The names of modules in transformers and in GGUF files."""


def model_of(file: GgufFile, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """A model in eval mode around the blocks of a file. Their pages are read when they are used.

    Args:
        file: of an architecture in the table.
        dtype: of a model without blocks; ``"auto"``: as the module says.

    Raises:
        ValueError: it is damaged: the message names the tensor.
    """
    fill = _Filler(file, dtype)
    used = {ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"}
    fill.used |= used | _of_draft_head(file, fill.config.num_hidden_layers)
    model = filled(file.path, fill.config, fill.dtype, fill)
    file.release_pages()  # of the scales
    if has_blocks(model):
        model._pipespec_file = fill.source  # for check_files()
    if converted := sorted({tensor.type_name for tensor in file.tensors.values() if tensor.type in CONVERTED}):
        warnings.warn(
            f"{file.path}: matrices of the types {', '.join(converted)} are held in blocks of 4.5 to 6 bits per weight, for which there are kernels, with the same weights",
            stacklevel=user_stacklevel(),
        )
    other = next((name for name in file.tensors if name not in fill.used), None)
    if other is not None:
        raise ValueError(f"{file.path}: tensor {other} has no place in a {fill.row.model_type} model")
    ends = end_ids(file)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    return model


def fill_draft_layer(file: GgufFile, parts: nn.Module) -> None:
    """Put the weights of the first MTP layer of a file into a module, whose matrices stay in blocks where the file has them so.

    Args:
        file: of an architecture in the table.
        parts: a :class:`pipespec.engine.mtp.MtpHead` on the meta device. Its modules are replaced; buffers are not touched.

    Raises:
        ValueError: the file has no such layer, or a tensor lacks or does not fit: the message names it.
    """
    fill = _Filler(file, "auto")
    if not file.integer(f"{file.architecture}.{DRAFTING}", 0):
        raise ValueError(f"{file.path} has no MTP layer: it names no {file.architecture}.{DRAFTING}")
    at = f"model.layers.{fill.config.num_hidden_layers}."
    for name, module in list(parts.named_modules()):
        if module._parameters or module._buffers.keys() - module._non_persistent_buffers_set:
            inner = name.removeprefix("layers.0.")
            made = fill(f"{at}{inner}" if inner != name else f"{at}{_NEXTN}{name}", module)
            parts.set_submodule(name, made)
    file.release_pages()


class _Filler:
    """Gives modules the parameters that a file has for them, as :func:`pipespec.models.quantized.filled` asks for it.

    Attributes:
        config: of the model.
        row: of its architecture.
        dtype: of what is not in blocks.
        used: names of the tensors that have been read.
        source: the file without its vocabulary, which modules in blocks keep.
    """

    def __init__(self, file: GgufFile, dtype: torch.dtype | str) -> None:
        found = architecture_of(file)
        assert found is not None
        self.file, self.row, self.config, self.dtype = file, found, gguf_config(file), _dtype(file, dtype)
        self.used: set[str] = set()
        self.source = replace(file, metadata={})

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        """The module of this name with its parameters, or the one in blocks that takes its place."""
        file, row, config = self.file, self.row, self.config
        own = _special(file, name, module, config, self.dtype, self.used, self.source)
        if own is not None:
            return own
        # Files of LLaMA have the two rows of a rotation next to each other.
        part, inner = name.rpartition(".")[2], name.split(".", 3)[-1]
        counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if row.pairs else {}
        heads, blocks, columns = counts.get(part, 0), None, columns_of(row, config, inner)
        for leaf, parameter in _weights(module):
            at = _stored_name(file, name, leaf, row)
            self.used.add(at)
            tensor, order = _fitting(file, at, parameter.shape, f"{name}.{leaf}"), rows_of(row, config, inner, leaf)
            if tensor.type in FLOATS:
                is_offset = "norm" in part and leaf == "weight" and not inner.startswith("linear_attn")
                floats = _floats(file, tensor).view(parameter.shape)
                floats = _in_order(floats, heads).sub_(row.norm_offset if is_offset else 0.0)
                floats = floats if order is None else floats[order]
                floats = floats if columns is None else floats[:, columns]
                floats = _logarithms(file, tensor, floats) if leaf == "A_log" else floats
                made = floats.to(self.dtype)
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(made, requires_grad=False)
                else:
                    module._buffers[leaf] = made
            elif len(tensor.shape) == 2:
                blocks = _matrix(file, tensor, self.used)
                blocks = blocks if order is None else blocks.rows(order)
            else:
                raise ValueError(f"{file.path}: tensor {at} is quantised, and {name}.{leaf} is no matrix")
        if blocks is None:
            return module
        made_of = in_blocks(module, blocks, heads, self.source)
        return made_of if columns is None else JoinedLinear([made_of], inputs=columns.argsort())


def _special(
    file: GgufFile, name: str, module: nn.Module, config: Any, dtype: torch.dtype, used: set[str], source: GgufFile
) -> nn.Module | None:
    """A module whose weights are not those of one tensor each; None: it is another one."""
    layer = f"blk.{_layer_of(name)}"
    if "gate_up_proj" in module._parameters:
        return _experts(file, layer, module, dtype, used, source)
    # The first files of Qwen3-Next have one matrix of both.
    if name.endswith("in_proj_qkvz") and f"{layer}.ssm_in.weight" not in file.tensors:
        return _joined(file, layer, module, config, dtype, used, source)
    return _keys_and_values(file, layer, module, config, dtype, used) if name.endswith("kv_b_proj") else None


def _joined(
    file: GgufFile, layer: str, own: Any, config: Any, dtype: torch.dtype, used: set[str], source: GgufFile
) -> nn.Module:
    """The queries, keys and values of a gated delta net and its gates, which are one matrix in transformers and two in files."""
    (rows, columns), order = own.weight.shape, rows_by_head(config)
    gates = config.linear_num_value_heads * config.linear_value_head_dim
    parts: list[Any] = []
    for name, count in (("attn_qkv", rows - gates), ("attn_gate", gates)):
        at = f"{layer}.{name}.weight"
        used.add(at)
        tensor = replace(_fitting(file, at, (count, columns), f"this part of {rows} rows"), shape=(count, columns))
        if tensor.type in FLOATS:
            parts.append(StackedLinear(_floats(file, tensor).to(dtype)))
        else:
            parts.append(QuantizedLinear(_matrix(file, tensor, used)))
            parts[-1].source = source
    if all(isinstance(part, StackedLinear) for part in parts):
        own.weight = nn.Parameter(torch.cat([part.weight for part in parts])[order], requires_grad=False)
        return own
    return JoinedLinear(parts, outputs=order)


def _keys_and_values(
    file: GgufFile, layer: str, own: Any, config: Any, dtype: torch.dtype, used: set[str]
) -> nn.Module:
    """The matrix that makes keys and values of latents. It becomes floats, as the native form applies it to queries and outputs.

    Newer files have it in two parts, that of the keys transposed.
    """
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    plain, size = config.qk_nope_head_dim, config.v_head_dim

    def floats(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        at = f"{layer}.{name}.weight"
        used.add(at)
        tensor = _fitting(file, at, shape, "this matrix")
        flat = replace(tensor, shape=(math.prod(shape[:-1]), shape[-1]))
        found = _floats(file, flat) if tensor.type in FLOATS else dequantize(_matrix(file, flat, used))
        return found.view(shape)

    if f"{layer}.attn_kv_b.weight" in file.tensors:
        whole = floats("attn_kv_b", tuple(own.weight.shape))
    else:
        keys, values = floats("attn_k_b", (heads, rank, plain)), floats("attn_v_b", (heads, size, rank))
        whole = torch.cat([keys.mT, values], 1).reshape(own.weight.shape)
    own.weight = nn.Parameter(whole.to(dtype), requires_grad=False)
    return own


def _of_draft_head(file: GgufFile, layers: int) -> set[str]:
    """The tensors that lie behind the layers of the model."""
    found = {name for name in file.tensors if _layer_of(name) >= layers}
    if found:
        say_once(f"{file.path} has an MTP layer, which is no part of the model: the draft 'mtp' reads it")
    return found


def _experts(file: GgufFile, layer: str, own: Any, dtype: torch.dtype, used: set[str], source: GgufFile) -> nn.Module:
    """The experts of a layer: matrices in blocks are slices of the file's tensors, others are floats."""
    is_transposed = "gate_up_proj_bias" in own._parameters  # gpt-oss
    count = own.num_experts
    inner, hidden = (
        (own.intermediate_size, own.hidden_size) if is_transposed else (own.intermediate_dim, own.hidden_dim)
    )
    tensors, biases = {}, {}
    for part, name in EXPERTS.items():
        shape = (count, hidden, inner) if part == "down" else (count, inner, hidden)
        tensor = _fitting(file, f"{layer}.{name}.weight", shape, f"the {part} of all experts")
        tensors[part] = replace(tensor, shape=(shape[0] * shape[1], shape[2]))
        used.add(tensor.name)
        if is_transposed:
            bias = _fitting(file, f"{layer}.{name}.bias", shape[:2], f"the biases of the {part} of all experts")
            biases[part] = nn.Parameter(_floats(file, bias).to(dtype), requires_grad=False)
            used.add(bias.name)
    if not all(tensor.type in FLOATS for tensor in tensors.values()):
        parts: list[Any] = []
        for part, tensor in tensors.items():
            own_bias = biases[part].flatten() if is_transposed else None
            if tensor.type in FLOATS:
                parts.append(StackedLinear(_floats(file, tensor).to(dtype), own_bias))
            else:
                parts.append(QuantizedLinear(_matrix(file, tensor, used), own_bias))
                parts[-1].source = source
        return QuantizedExperts(own, *parts)
    gate, up, down = (_floats(file, tensor).view(count, -1, tensor.shape[1]) for tensor in tensors.values())
    floats = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
    if is_transposed:
        floats = {"gate_up_proj": torch.stack([gate, up], 2).flatten(1, 2).mT, "down_proj": down.mT}
        floats["gate_up_proj_bias"] = torch.stack([biases["gate"], biases["up"]], 2).flatten(1)
        floats["down_proj_bias"] = biases["down"]
    for leaf, values in floats.items():
        own._parameters[leaf] = nn.Parameter(values.to(dtype).contiguous(), requires_grad=False)
    return own


def _floats(file: GgufFile, tensor: GgufTensor) -> torch.Tensor:
    """A tensor without blocks. Raises ``ValueError`` for a norm of zeros, or other things than numbers."""
    floats = file.floats(tensor)
    is_norm = len(tensor.shape) == 1 and "bias" not in tensor.name
    if not floats.isfinite().all() or (is_norm and not floats.any()):
        raise ValueError(
            f"{file.path} is damaged: tensor {tensor.name} holds zeros only, or numbers that are not finite"
        )
    return floats


def _logarithms(file: GgufFile, tensor: GgufTensor, decays: torch.Tensor) -> torch.Tensor:
    """Those of decays, which files have as negative numbers."""
    if (decays >= 0).any():
        raise ValueError(f"{file.path} is damaged: tensor {tensor.name} has decays that are not negative")
    return (-decays).log()


def _matrix(file: GgufFile, tensor: GgufTensor, used: set[str]) -> QuantizedMatrix:
    """A matrix in blocks. Raises ``ValueError`` for scales that are not finite."""
    if tensor.type in CONVERTED:
        return as_blocks(file, tensor, _factors(file, tensor, used) if tensor.type_name == "NVFP4" else None)
    matrix = file.matrix(tensor)
    blocks = matrix.data.view(-1, matrix.format.block_bytes)
    for at in matrix.format.halves:
        if not blocks[:, at : at + 2].contiguous().view(torch.float16).isfinite().all():
            raise ValueError(f"{file.path} is damaged: tensor {tensor.name} has scales that are not finite")
    if matrix.format.name == "mxfp4" and int(blocks[:, 0].max()) > LARGEST_POWER:
        raise ValueError(f"{file.path} is damaged: tensor {tensor.name} has scales whose weights are not finite")
    return matrix


def _factors(file: GgufFile, tensor: GgufTensor, used: set[str]) -> torch.Tensor | None:
    """The factor of a matrix of NVFP4, or one for each expert; None: there is none. Raises ``ValueError`` for other ones."""
    # Files also have one of inputs that are rounded to 4 bits, which they are not here.
    names = [f"{tensor.name.removesuffix('.weight')}.{end}" for end in ("scale", "input_scale")]
    used.update(names)
    if (factor := file.tensors.get(names[0])) is None:
        return None
    whole = file.tensors[tensor.name].shape
    count = whole[0] if len(whole) > 2 else 1
    if factor.type not in FLOATS or math.prod(factor.shape) != count:
        raise ValueError(
            f"{file.path}: tensor {factor.name} is {list(factor.shape)} of the type {factor.type_name}, and {tensor.name} has {count} factors, which are floats"
        )
    return _floats(file, factor).view(-1)


def warn_of_memory(path: str | Path) -> None:
    """Say what a file costs of which transformers makes floats."""
    file = GgufFile.open(path)
    floats = 4 * sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    warnings.warn(
        f"{path}: transformers dequantises files of the architecture {file.architecture!r}: {file.nbytes / 1e9:.2f} GB become {floats / 1e9:.2f} GB, and "
        "more while they are read",
        stacklevel=user_stacklevel(),
    )


def _dtype(file: GgufFile, dtype: torch.dtype | str) -> torch.dtype:
    types = {FLOATS.get(tensor.type) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    # Products with blocks are in float32, and so is what lies between them.
    if dtype != "auto" and None not in types:
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    return torch.bfloat16 if types == {torch.bfloat16} else torch.float32


def _fitting(file: GgufFile, at: str, shape: tuple[int, ...], what: str) -> GgufTensor:
    """A tensor of a shape, of which files leave out sizes of 1. Raises ``ValueError`` with both shapes."""
    tensor = tensor_of(file, at)
    if [n for n in shape if n != 1] != [n for n in tensor.shape if n != 1]:
        raise ValueError(f"{file.path}: tensor {at} is {list(tensor.shape)}, and {what} of this model {list(shape)}")
    return tensor


def _weights(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What a file holds of a module, by name."""
    found = {**{name: module._buffers.get(name) for name in LEAVES}, **module._parameters}
    return [(leaf, weight) for leaf, weight in found.items() if weight is not None]


def _layer_of(name: str) -> int:
    """The number of the layer of a tensor or of a module; -1: it is in none."""
    found = _LAYER.match(name)
    return -1 if found is None else int(found[1])


def _stored_name(file: GgufFile, module: str, leaf: str, row: Architecture) -> str:
    if module == "lm_head" and f"{_ENDS[module]}.{leaf}" not in file.tensors:
        return f"token_embd.{leaf}"
    if (end := row.tensors.get(module) or _ENDS.get(module)) is not None:
        return f"{end}.{leaf}"
    _, _, number, *rest = module.split(".", 3)
    return f"blk.{number}.{LEAVES.get(leaf) or f'{row.tensors.get(rest[0]) or TENSORS[rest[0]]}.{leaf}'}"


def _in_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in the model's order."""
    if not heads:
        return tensor
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def rows_of(row: Architecture, config: Any, module: str, leaf: str) -> Tensor | None:
    """The numbers of a weight's rows in the file, in the order of the model.

    Args:
        row: of the architecture.
        config: of the model.
        module: name of the module, after that of its layer.
        leaf: of the weight in it.

    Returns:
        int64 ``[rows]``, or None: they lie in the model's order, or pair by pair of a rotation (:class:`pipespec.models.quantized.Blocks`).
    """
    part = module.rpartition(".")[2]
    if not row.tiled or not module.startswith("linear_attn"):
        return None
    size = config.linear_value_head_dim
    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return torch.cat([torch.arange(first), first + _by_group(config, size)])
    if part == "in_proj_z":
        return _by_group(config, size)
    return _by_group(config, 1) if part in ("in_proj_a", "in_proj_b") or leaf in ("A_log", "dt_bias") else None


def columns_of(row: Architecture, config: Any, module: str) -> Tensor | None:
    """:func:`rows_of`, of columns."""
    is_output = row.tiled and module == "linear_attn.out_proj"
    return _by_group(config, config.linear_value_head_dim) if is_output else None


def _by_group(config: Any, size: int) -> Tensor:
    """Of ``size`` numbers per head of values, which lie by their place in a group first. A group has one head of keys."""
    count, keys = config.linear_num_value_heads, config.linear_num_key_heads
    return torch.arange(count * size).view(count // keys, keys, size).transpose(0, 1).reshape(-1)


def rows_by_head(config: Any) -> Tensor:
    """:func:`rows_of` of Qwen3-Next's ``in_proj_qkvz``: queries, keys, values and gates of all heads follow one another in files, and those of each head of keys in
    the model."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = torch.arange(2 * heads * size + 2 * values).split([heads * size, heads * size, values, values])
    return torch.cat([part.view(heads, -1) for part in parts], 1).reshape(-1)


def as_blocks(file: GgufFile, tensor: GgufTensor, factors: Tensor | None = None) -> QuantizedMatrix:
    """A matrix of a type in :data:`pipespec.models.gguf.CONVERTED`, which has no kernels, as blocks that hold the same weights and have kernels.

    The package gguf knows the grids of the IQ types, so it gives the weights; scales are read here. A weight over its scale is then one of at most 16
    integers, whose number takes 4 bits.

    Args:
        file: holds it.
        tensor: ``[rows, columns]``.
        factors: of the weights of NVFP4, float32: each of as many rows as another; None: there are none.

    Raises:
        ValueError: the package gguf is too old, or scales are not finite: the message names the tensor.
    """
    name, _, block_bytes = CONVERTED[tensor.type]
    stored = file.stored(tensor).view(-1, block_bytes)
    if name == "NVFP4":
        # A byte that is no number stands for zero, and a sign for nothing.
        steps = (
            (stored[:, :4] & 127)
            .contiguous()
            .view(torch.float8_e4m3fn)
            .float()
            .nan_to_num(0.0)
            .view(tensor.shape[0], -1)
        )
        if factors is not None:
            steps = steps * factors.repeat_interleave(len(steps) // len(factors))[:, None]
        numbers = layouts.nibbles(stored[:, 4:].reshape(-1, 8), 8)
        return from_e2m1(numbers.view(tensor.shape), steps)
    head, scales = _SCALES[name](stored)
    scale = head.contiguous().view(torch.float16).float()
    if not bool(scale.isfinite().all()):
        raise ValueError(f"{file.path} is damaged: tensor {tensor.name} has scales that are not finite")
    weights = file.floats(tensor).view(-1, 16)
    if scales is None:
        codes = (weights.view(-1, 256) / torch.where(scale == 0, 1.0, scale)).round().to(torch.int8)
        return from_codes(codes.view(tensor.shape), scale.view(tensor.shape[0], -1))
    held, values, step = _TABLES[name[:3] if name != "IQ3_S" else name]
    scales = (2 * scales + 1).to(torch.int8)
    of_group = (scale * step * scales).view(-1, 1)
    codes = (weights / torch.where(of_group == 0, 1.0, of_group)).round().view(-1, 256)
    blocks = layouts.write_table(codes, values, scales, head)
    return QuantizedMatrix(FORMATS[held], blocks.view(tensor.shape[0], -1), (tensor.shape[0], tensor.shape[1]))


Scales = tuple[Tensor, Tensor | None]
"""The bytes of the float16 scales ``[n, 2]``, and the scales of groups, as stored: ``[n, 16]``."""


def _twice(scales: Tensor) -> Tensor:
    """Those of 32 weights as those of 16."""
    return scales.repeat_interleave(2, 1)


def _words(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored.contiguous().view(dtype).int()


def _of_iq1_m(stored: Tensor) -> Scales:
    """Four words: each has four scales of three bits, and a quarter of the float16 above them."""
    words = _words(stored[:, 48:56], torch.int16) & 0xFFFF
    quarters = (words >> 12) << torch.tensor([0, 4, 8, 12])
    head = quarters.sum(1, keepdim=True).to(torch.int32).view(torch.uint8)[:, :2]
    return head, ((words[:, :, None] >> torch.tensor([0, 3, 6, 9])) & 7).view(-1, 16)


_SCALES: dict[str, Callable[[Tensor], Scales]] = {
    "IQ1_S": lambda s: (s[:, :2], _twice(_words(s[:, 34:50], torch.int16) >> 12 & 7)),
    "IQ1_M": _of_iq1_m,
    "IQ2_XXS": lambda s: (s[:, :2], _twice(_words(s[:, 2:66], torch.int32)[:, 1::2] >> 28 & 15)),
    "IQ2_XS": lambda s: (s[:, :2], layouts.fields(s[:, 66:74], 4)),
    "IQ2_S": lambda s: (s[:, :2], layouts.fields(s[:, 74:82], 4)),
    "IQ3_XXS": lambda s: (s[:, :2], _twice(_words(s[:, 66:98], torch.int32) >> 28 & 15)),
    "IQ3_S": lambda s: (s[:, :2], _twice(layouts.fields(s[:, 106:110], 4))),
    "TQ1_0": lambda s: (s[:, 52:54], None),
    "TQ2_0": lambda s: (s[:, 64:66], None),
}

_TABLES = {
    "IQ1": ("table_iq2", layouts.IQ2, 0.125),
    "IQ2": ("table_iq2", layouts.IQ2, 0.125),
    "IQ3": ("table_iq3_xxs", layouts.IQ3_XXS, 0.5),
    "IQ3_S": ("table_iq3_s", layouts.IQ3_S, 1.0),
}
"""By the beginning of a type's name: the blocks, their values, and the factor of both."""
