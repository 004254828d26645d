"""Models out of GGUF files.

The architectures are those of :data:`pipespec.models.gguf_architectures.ARCHITECTURES`. Their matrices stay in blocks, where they lie in the file; what is no
block becomes float32, or bfloat16 where all matrices of the file are bfloat16.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipespec.errors import user_stacklevel
from pipespec.models.compat import has_stacked_experts
from pipespec.models.gguf import CONVERTED, FLOATS, GgufFile, GgufTensor
from pipespec.models.gguf_architectures import ARCHITECTURES, EXPERTS, LAYER_NORM_EPS, NORM_EPS, TENSORS, Architecture
from pipespec.models.gguf_blocks import as_blocks
from pipespec.models.gguf_tokenizer import end_ids, token_id
from pipespec.models.quantized import QuantizedExperts, QuantizedLinear, StackedLinear, filled, has_blocks, in_blocks
from pipespec_kernels.block_layouts import LARGEST_POWER
from pipespec_kernels.formats import QuantizedMatrix

_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
"""The names of modules in transformers and in GGUF files."""

_ROPE_FACTORS = "rope_freqs.weight"
"""Per pair of a rotation, the factor by which LLaMA 3 slows it down."""


def architecture_of(file: GgufFile) -> Architecture | None:
    """How a file is read whose matrices can stay in blocks; None for other architectures."""
    return next((row for row in reversed(ARCHITECTURES) if row.matches(file.architecture, file.metadata)), None)


# ---- the configuration


_HARMLESS = frozenset(
    [
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        NORM_EPS,
        LAYER_NORM_EPS,
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
        "tensor_data_layout",
        "pooling_type",
    ]
)
"""Keys under the name of the architecture that are read here, or change nothing."""

_NEUTRAL = {
    "attention.causal": True,
    "use_parallel_residual": False,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}
"""Keys that are read nowhere, and the values at which they change nothing. Of others it is 0."""


def gguf_config(file: GgufFile) -> Any:
    """The configuration that the metadata describe of a file whose architecture is in the table.

    Raises:
        ValueError: a key is missing, of another type or out of range, or is known to change the model and not read here: the message names it.
    """
    row, name = architecture_of(file), file.architecture
    assert row is not None
    is_there = row.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_there or (f"blk.0.{EXPERTS['gate']}.weight" in file.tensors and not has_stacked_experts(row.model_type)):
        raise ValueError(
            f"{file.path}: the architecture {name!r} needs a newer version of transformers (with {row.model_type})"
        )
    _check_keys(file, row)
    hidden = _size(file, f"{name}.embedding_length")
    heads = _size(file, f"{name}.attention.head_count")
    head_dim = _size(file, f"{name}.attention.key_length", hidden // heads)
    if (other := _size(file, f"{name}.attention.value_length", head_dim)) != head_dim:
        raise ValueError(
            f"{file.path}: {name}.attention.value_length is {other}, and its keys have {head_dim}, which is not supported"
        )
    layers = _size(file, f"{name}.block_count")
    found = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(found) != layers:
        raise ValueError(f"{file.path}: {name}.block_count is {layers}, and there are tensors of {len(found)} layers")
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": _size(file, f"{name}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _size(file, f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _size(file, f"{name}.context_length"),
        row.eps: _number(file, f"{name}.{row.eps_key}"),
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": token_id(file, "eos"),
        "pad_token_id": token_id(file, "padding"),
        "rope_parameters": _rope(file, row, head_dim),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.model_type]],
    }
    for to, value in row.constants.items():
        (config["rope_parameters"] if to.startswith("rope.") else config)[to.removeprefix("rope.")] = value
    config |= {flag: f"blk.0.{tensor}" in file.tensors for tensor, flag in row.flags.items()}
    if row.published is not None:
        # Published sizes tell the scale of the queries, which the metadata lack.
        config["query_pre_attn_scalar"] = hidden // heads if layers == row.published else head_dim
    for key, to in {**row.numbers, **row.options}.items():
        if key in row.numbers or f"{name}.{key}" in file.metadata:
            of_rope = to.startswith("rope.")
            (config["rope_parameters"] if of_rope else config)[to.removeprefix("rope.")] = _number(
                file, f"{name}.{key}"
            )
    if config[row.eps] <= 0:
        raise ValueError(f"{file.path} is damaged: its {name}.{row.eps_key} is {config[row.eps]}")
    config |= _windows(file, row, config)
    try:
        return AutoConfig.for_model(row.model_type, **config)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"{file.path} describes no {row.model_type} model: {error}") from error


def _windows(file: GgufFile, row: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """The windows of the layers, and the rotation of those that have one."""
    name, count = row.name, config["num_hidden_layers"]
    window = (
        row.window
        if row.window is None
        else _size(file, f"{name}.attention.sliding_window", row.window or None, least=0)
    )
    if row.window is None and file.metadata.get(f"{name}.attention.sliding_window"):
        warnings.warn(
            f"{file.path}: {name}.attention.sliding_window has no effect, as models of this architecture have no windows",
            stacklevel=user_stacklevel(),
        )
    found: dict[str, Any] = {"sliding_window": window or None}
    if row.every is None:
        return found
    pattern = file.metadata.get(f"{name}.attention.sliding_window_pattern", row.every)
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(count)]
    if not isinstance(pattern, list) or len(pattern) != count:
        raise ValueError(
            f"{file.path} is damaged: its {name}.attention.sliding_window_pattern does not fit {count} layers"
        )
    found["layer_types"] = ["sliding_attention" if window and local else "full_attention" for local in pattern]
    if row.local_base is not None:
        local = file.number(f"{name}.rope.freq_base_swa") or row.local_base or config["rope_parameters"]["rope_theta"]
        found["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": _shortest(local)},
        }
    return found


def _check_keys(file: GgufFile, row: Architecture) -> None:
    """Refuse what would change the model and is not read."""
    name = row.name
    read = {*row.numbers, *row.options, *(("attention.sliding_window_pattern",) if row.every else ())}
    read |= set() if row.local_base is None else {"rope.freq_base_swa"}
    for key, value in file.metadata.items():
        rest = key.removeprefix(f"{name}.")
        if rest == key or rest in _HARMLESS or rest in read or value == _NEUTRAL.get(rest, 0):
            continue
        what = " (a mixture of experts)" if rest.startswith("expert") else ""
        shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]
        raise ValueError(
            f"{file.path}: {key} is {shown}{what}, which is not supported for models of the architecture {name!r}"
        )


def _size(file: GgufFile, key: str, default: int | None = None, least: int = 1) -> int:
    """An integer, or a list of one value."""
    found = file.metadata.get(key)
    if isinstance(found, list) and found and all(type(n) is int and n == found[0] for n in found):
        found = found[0]
    elif isinstance(found, list):
        raise ValueError(f"{file.path}: {key} differs from layer to layer, which is not supported")
    else:
        found = file.integer(key, default)
    if found is None and least == 0:
        return 0
    if found is None:
        raise ValueError(f"{file.path} has no {key} in its metadata")
    if found < least:
        raise ValueError(f"{file.path} is damaged: its {key} is {found}")
    return found


def _number(file: GgufFile, key: str) -> bool | float:
    """A number or a truth value that must be there."""
    if isinstance(found := file.metadata.get(key), int):
        return found
    if (number := file.number(key)) is None:
        raise ValueError(f"{file.path} has no {key} in its metadata")
    return _shortest(number)


def _shortest(value: float) -> float:
    """The shortest number that is this one in float32, as configurations write it."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, row: Architecture, head_dim: int) -> dict[str, Any]:
    """The rotary embedding, as configurations describe it."""
    name, scaling = row.name, f"{row.name}.rope.scaling"
    base = file.number(f"{name}.rope.freq_base", row.rope_base)
    assert base is not None
    if base <= 0:
        raise ValueError(f"{file.path} is damaged: its {name}.rope.freq_base is {base}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _shortest(base)}
    rotated = _size(file, f"{name}.rope.dimension_count", head_dim)
    if row.partial:
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ValueError(
            f"{file.path}: {name}.rope.dimension_count is {rotated}, and a head has {head_dim}, which is not supported"
        )
    # The name of the first files of 2023 is rope.scale_linear; a factor without a type is linear.
    factor = file.number(f"{scaling}.factor", file.number(f"{name}.rope.scale_linear")) or 1.0
    if factor < 0:
        raise ValueError(f"{file.path} is damaged: its {scaling}.factor is {factor}")
    kind = file.text(f"{scaling}.type", "linear")
    longrope = _long_factors(file)
    if kind not in ("none", "linear", "yarn") and not longrope:
        raise ValueError(f"{file.path} has a RoPE of the type {kind!r}, which is not supported")
    original = file.integer(f"{scaling}.original_context_length")
    attention = file.number(f"{scaling}.attn_factor") or 1.0
    if longrope:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original, **longrope}
        rope |= {} if attention == 1.0 else {"attention_factor": _shortest(attention)}
    elif kind == "yarn" and factor != 1.0:
        rope |= _yarn(file, scaling, factor, attention)
    elif attention != 1.0:
        raise ValueError(
            f"{file.path}: {scaling}.attn_factor is {attention}, which is not supported without yarn or longrope"
        )
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": _shortest(factor)}
    if _ROPE_FACTORS in file.tensors:
        rope |= _llama3(file, rope["rope_theta"], rotated)
    return rope


def _yarn(file: GgufFile, scaling: str, factor: float, attention: float) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071). llama.cpp multiplies its default factor of attention by ``attn_factor``, and divides it by one with the multiplier."""
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": _shortest(factor)}
    if (original := file.integer(f"{scaling}.original_context_length")) is not None:
        rope["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow"):
        if (found := file.number(f"{scaling}.yarn_{key}")) is not None:
            rope[key] = _shortest(found)
    multiplier, grown = file.number(f"{scaling}.yarn_log_multiplier", 0.0) or 0.0, 0.1 * math.log(factor)
    own = (grown + 1.0) / (multiplier * grown + 1.0)
    # The conversion of Olmo 3 writes the whole factor, which is its own, and not a second one.
    if not math.isclose(attention, own, rel_tol=1e-3):
        own *= attention
    if attention != 1.0 or multiplier:
        rope["attention_factor"] = _shortest(own)
    return rope


def _long_factors(file: GgufFile) -> dict[str, list[float]]:
    """Those of Phi-3's longrope, which depends on the length of the text."""
    tensors = [file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short")]
    names = ("long_factor", "short_factor")
    return {
        name: file.floats(tensor).reshape(-1).tolist()
        for name, tensor in zip(names, tensors, strict=True)
        if tensor is not None
    }


def _llama3(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """The parameters with which LLaMA 3's rule gives the factors of the file. The published models have an original length of 8,192."""
    factors = file.floats(_tensor(file, _ROPE_FACTORS)).double().reshape(-1)
    low, high = 1.0, 4.0
    wavelength = 2 * torch.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    named = file.integer(f"{file.architecture}.rope.scaling.original_context_length")
    originals = [n for n in dict.fromkeys((named, 8192, *(1 << bits for bits in range(10, 18)))) if n]
    for factor, original in itertools.product((_shortest(float(factors.max())), 8.0, 32.0), originals):
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        made = torch.where(wavelength < original / high, 1.0, torch.where(wavelength > original / low, factor, between))
        if len(made) == len(factors) and torch.allclose(made, factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        f"{file.path}: tensor {_ROPE_FACTORS} holds factors that are not those of LLaMA 3's rule, which is not supported"
    )


# ---- the model


def model_of(file: GgufFile, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """A model in eval mode around the blocks of a file. Their pages are read when they are used.

    Args:
        file: of an architecture in the table.
        dtype: of what is not in blocks; ``"auto"``: as the module says.

    Raises:
        ValueError: it is damaged: the message names the tensor.
    """
    config, row, stored = gguf_config(file), architecture_of(file), _dtype(file, dtype)
    assert row is not None
    used = {_ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"}
    source = replace(file, metadata={})  # the modules need no vocabulary

    def fill(name: str, module: nn.Module) -> nn.Module:
        if "gate_up_proj" in module._parameters:
            return _experts(file, f"blk.{name.split('.')[2]}", module, stored, used, source)
        # Files of LLaMA have the two rows of a rotation next to each other.
        part = name.rpartition(".")[2]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part, 0)
        heads = heads if row.pairs else 0
        blocks = None
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            at = f"{_stored_name(name, row)}.{leaf.replace('sinks', 'weight')}"
            if name == "lm_head" and at not in file.tensors:
                at = f"token_embd.{leaf}"
            used.add(at)
            tensor = _fitting(file, at, parameter.shape, f"{name}.{leaf}")
            if tensor.type in FLOATS:
                offset = row.norm_offset if "norm" in part and leaf == "weight" else 0.0
                floats = _in_order(_floats(file, tensor), heads).sub_(offset).to(stored).view(parameter.shape)
                module._parameters[leaf] = nn.Parameter(floats, requires_grad=False)
            elif len(tensor.shape) == 2:
                blocks = _matrix(file, tensor, used)
            else:
                raise ValueError(f"{file.path}: tensor {at} is quantised, and {name}.{leaf} is no matrix")
        return module if blocks is None else in_blocks(module, blocks, heads, source)

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
    if dtype != "auto":
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    types = {FLOATS.get(tensor.type) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return torch.bfloat16 if types == {torch.bfloat16} else torch.float32


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {name}")
    return file.tensors[name]


def _fitting(file: GgufFile, at: str, shape: tuple[int, ...], what: str) -> GgufTensor:
    """A tensor of a shape; a row may be a vector. Raises ``ValueError`` with both shapes."""
    tensor = _tensor(file, at)
    if shape not in (tensor.shape, (1, *tensor.shape)):
        raise ValueError(f"{file.path}: tensor {at} is {list(tensor.shape)}, and {what} of this model {list(shape)}")
    return tensor


def _stored_name(module: str, row: Architecture) -> str:
    if module in _ENDS:
        return _ENDS[module]
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{row.tensors.get(rest) or TENSORS[rest]}"


def _in_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in the model's order."""
    if not heads:
        return tensor
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
