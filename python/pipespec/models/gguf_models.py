"""Models out of GGUF files.

The architectures are those of :data:`pipespec.models.gguf_architectures.ARCHITECTURES`. Their matrices stay in blocks, where they lie in the file; what is no
block becomes float32. A file without blocks is a model of floats, in bfloat16 where all of its matrices are that.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipespec.errors import user_stacklevel
from pipespec.models.gguf import CONVERTED, FLOATS, GgufFile, GgufTensor
from pipespec.models.gguf_architectures import (
    EXPERTS,
    LEAVES,
    TENSORS,
    Architecture,
)
from pipespec.models.gguf_blocks import as_blocks
from pipespec.models.gguf_config import DRAFTING, ROPE_FACTORS, architecture_of, gguf_config, tensor_of
from pipespec.models.gguf_order import columns_of, rows_by_head, rows_of
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
from pipespec_kernels.block_layouts import LARGEST_POWER
from pipespec_kernels.formats import QuantizedMatrix, dequantize

_LAYER = re.compile(r"(?:blk|model\.layers)\.(\d+)\.")

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
    config, row, stored = gguf_config(file), architecture_of(file), _dtype(file, dtype)
    assert row is not None
    used = {ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"}
    used |= _of_draft_head(file, config.num_hidden_layers)
    source = replace(file, metadata={})  # the modules need no vocabulary

    def fill(name: str, module: nn.Module) -> nn.Module:
        if (own := _special(file, name, module, config, stored, used, source)) is not None:
            return own
        # Files of LLaMA have the two rows of a rotation next to each other.
        part, inner = name.rpartition(".")[2], name.split(".", 3)[-1]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part, 0)
        heads = heads if row.pairs else 0
        blocks, columns = None, columns_of(row, config, inner)
        for leaf, parameter in _weights(module):
            at = _stored_name(file, name, leaf, row)
            used.add(at)
            tensor, order = _fitting(file, at, parameter.shape, f"{name}.{leaf}"), rows_of(row, config, inner, leaf)
            if tensor.type in FLOATS:
                is_offset = "norm" in part and leaf == "weight" and not inner.startswith("linear_attn")
                floats = _floats(file, tensor).view(parameter.shape)
                floats = _in_order(floats, heads).sub_(row.norm_offset if is_offset else 0.0)
                floats = floats if order is None else floats[order]
                floats = floats if columns is None else floats[:, columns]
                floats = _logarithms(file, tensor, floats) if leaf == "A_log" else floats
                made = floats.to(stored)
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(made, requires_grad=False)
                else:
                    module._buffers[leaf] = made
            elif len(tensor.shape) == 2:
                blocks = _matrix(file, tensor, used)
                blocks = blocks if order is None else blocks.rows(order)
            else:
                raise ValueError(f"{file.path}: tensor {at} is quantised, and {name}.{leaf} is no matrix")
        if blocks is None:
            return module
        made_of = in_blocks(module, blocks, heads, source)
        return made_of if columns is None else JoinedLinear([made_of], inputs=columns.argsort())

    model = filled(file.path, config, stored, fill)
    file.release_pages()  # of the scales
    if has_blocks(model):
        model._pipespec_file = source  # for check_files()
    if converted := sorted({tensor.type_name for tensor in file.tensors.values() if tensor.type in CONVERTED}):
        warnings.warn(
            f"{file.path}: matrices of the types {', '.join(converted)} are held in blocks of 4.5 to 6 bits per weight, for which there are kernels, with the same weights",
            stacklevel=user_stacklevel(),
        )
    other = next((name for name in file.tensors if name not in used), None)
    if other is not None:
        raise ValueError(f"{file.path}: tensor {other} has no place in a {row.model_type} model")
    ends = end_ids(file)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    return model


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
        warnings.warn(
            f"{file.path}: the tensors of {file.architecture}.{DRAFTING} are left out, which are those of a draft head",
            stacklevel=user_stacklevel(),
        )
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
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{LEAVES.get(leaf) or f'{row.tensors.get(rest) or TENSORS[rest]}.{leaf}'}"


def _in_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in the model's order."""
    if not heads:
        return tensor
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
