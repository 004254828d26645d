"""Configurations out of the metadata of GGUF files, for the architectures of :data:`pipespec.models.gguf_architectures.ARCHITECTURES`."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipespec.errors import user_stacklevel
from pipespec.models.compat import has_stacked_experts
from pipespec.models.gguf import GgufFile, GgufTensor
from pipespec.models.gguf_architectures import ARCHITECTURES, EXPERTS, LAYER_NORM_EPS, NORM_EPS, Architecture
from pipespec.models.gguf_tokenizer import token_id

DRAFTING = "nextn_predict_layers"
"""The key of the number of layers of a draft head."""

ROPE_FACTORS = "rope_freqs.weight"
"""Per pair of a rotation, the factor by which LLaMA 3 slows it down."""


def architecture_of(file: GgufFile) -> Architecture | None:
    """How a file is read whose matrices can stay in blocks; None for other architectures."""
    return next((row for row in reversed(ARCHITECTURES) if row.matches(file.architecture, file.metadata)), None)


def tensor_of(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {name}")
    return file.tensors[name]


_HARMLESS = frozenset([
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", NORM_EPS, LAYER_NORM_EPS, "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier", "tensor_data_layout",
    "pooling_type",
])  # fmt: skip
"""Keys under the name of the architecture that are read here, or change nothing."""

_LATENT_KEYS = (
    "attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
)  # fmt: skip
"""Those of latents."""

_PER_LAYER_KEYS = (
    "attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers", "embedding_length_per_layer_input", "rope.dimension_count_swa",
)  # fmt: skip
"""Those of layers with sizes of their own."""

_NEUTRAL = {
    "attention.causal": True, "use_parallel_residual": False, "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0,
}  # fmt: skip
"""Keys that are read nowhere, and the values at which they change nothing. Of others it is 0."""


def gguf_config(file: GgufFile) -> Any:
    """The configuration that the metadata describe of a file whose architecture is in the table.

    Raises:
        ValueError: a key is missing, of another type or out of range, or is known to change the model and not read here: the message names it.
    """
    row, name = architecture_of(file), file.architecture
    assert row is not None
    is_there = row.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    has_experts = any(tensor.endswith(f"{EXPERTS['gate']}.weight") for tensor in file.tensors)
    if not is_there or (has_experts and not has_stacked_experts(row.model_type)):
        raise ValueError(
            f"{file.path}: the architecture {name!r} needs a newer version of transformers (with {row.model_type})"
        )
    _check_keys(file, row)
    _check_routing(file, row)
    embedding = tensor_of(file, "token_embd.weight").shape
    if len(embedding) != 2:
        raise ValueError(f"{file.path} is damaged: tensor token_embd.weight is {list(embedding)}, and no matrix")
    hidden = _size(file, f"{name}.embedding_length")
    heads = _size(file, f"{name}.attention.head_count")
    latents, of_layers = _latents(file, row, heads), _of_layers(file, row)
    head_dim = latents.get("qk_rope_head_dim") or _size(file, f"{name}.attention.key_length", hidden // heads)
    if not latents and (other := _size(file, f"{name}.attention.value_length", head_dim)) != head_dim:
        raise ValueError(
            f"{file.path}: {name}.attention.value_length is {other}, and its keys have {head_dim}, which is not supported"
        )
    layers = _layers(file)
    config: dict[str, Any] = {
        "hidden_size": hidden,
        # Where all layers have experts, files may have only the size of those.
        "intermediate_size": of_layers.get("intermediate_size")
        or _size(file, f"{name}.feed_forward_length", file.integer(f"{name}.expert_feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": of_layers.get("num_key_value_heads")
        or _size(file, f"{name}.attention.head_count_kv", heads, zeros=row.recurrent is not None),
        "head_dim": head_dim,
        "max_position_embeddings": _size(file, f"{name}.context_length"),
        row.eps: _number(file, f"{name}.{row.eps_key}"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": token_id(file, "eos"),
        "pad_token_id": token_id(file, "padding"),
        "rope_parameters": _rope(file, row, head_dim),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.model_type]],
    }
    config |= latents | of_layers
    for to, value in row.constants.items():
        (config["rope_parameters"] if to.startswith("rope.") else config)[to.removeprefix("rope.")] = value
    config |= {flag: f"blk.0.{tensor}" in file.tensors for tensor, flag in row.flags.items()}
    if row.published is not None:
        # Published sizes tell the scale of the queries, which the metadata lack.
        config["query_pre_attn_scalar"] = hidden // heads if layers == row.published else head_dim
    for key, to in {**row.numbers, **row.options}.items():
        if key in row.numbers or f"{name}.{key}" in file.metadata:
            of_rope = to.startswith("rope.")
            value = _number(file, f"{name}.{key}")
            if value < 0:
                raise ValueError(f"{file.path} is damaged: its {name}.{key} is {value}")
            (config["rope_parameters"] if of_rope else config)[to.removeprefix("rope.")] = value
    if config[row.eps] <= 0:
        raise ValueError(f"{file.path} is damaged: its {name}.{row.eps_key} is {config[row.eps]}")
    config |= _windows(file, row, config) | _recurrent(file, row, config)
    try:
        return AutoConfig.for_model(row.model_type, **config)
    except (ArithmeticError, TypeError, ValueError, StrictDataclassError) as error:
        # Those of transformers have several lines.
        raise ValueError(f"{file.path} describes no {row.model_type} model: {' '.join(str(error).split())}") from error


def _windows(file: GgufFile, row: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """The windows of the layers, and the rotation of those that have one."""
    name, count = row.name, config["num_hidden_layers"]
    key, is_needed = f"{name}.attention.sliding_window", "attention.sliding_window" in row.numbers
    has_none = row.window is None and not is_needed
    window = None if has_none else _size(file, key, row.window or None, least=int(is_needed))
    if has_none and file.metadata.get(key):
        warnings.warn(
            f"{file.path}: {key} has no effect, as models of this architecture have no windows",
            stacklevel=user_stacklevel(),
        )
    found: dict[str, Any] = {"sliding_window": window or None}
    if row.every is None:
        return found
    pattern = _pattern(file, row, count)
    found["layer_types"] = ["sliding_attention" if window and local else "full_attention" for local in pattern]
    if row.local_base and not window:
        # Transformers makes masks with windows for layers that are not there, too.
        found["sliding_window"] = config["max_position_embeddings"]
    if row.local_base is not None:
        local = file.number(f"{name}.rope.freq_base_swa") or row.local_base or config["rope_parameters"]["rope_theta"]
        found["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": _shortest(local)},
        }
    return found


def _pattern(file: GgufFile, row: Architecture, count: int) -> list[Any]:
    """Per layer, whether it has a window where there is one."""
    key = f"{row.name}.attention.sliding_window_pattern"
    pattern = file.metadata.get(key, row.every)
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(count)]
    if not isinstance(pattern, list) or len(pattern) != count:
        raise ValueError(f"{file.path} is damaged: its {key} does not fit {count} layers")
    return pattern


def _of_layers(file: GgufFile, row: Architecture) -> dict[str, Any]:
    """What the layers of Gemma 4 have of their own: sizes of heads and their number by their windows, keys that others read, wide feed-forwards, inputs.

    Raises:
        ValueError: the numbers are those of no such model.
    """
    if not row.per_layer:
        return {}
    name, count = row.name, _layers(file)
    local = _pattern(file, row, count)
    kinds = {is_local: [i for i in range(count) if bool(local[i]) == is_local] for is_local in (True, False)}
    shared = _size(file, f"{name}.attention.shared_kv_layers", least=0)
    if not all(kinds.values()) or local[-1] or shared >= count:
        raise ValueError(
            f"{file.path}: its {name}.attention.sliding_window_pattern has layers of one kind alone, or ends with a window, or {shared} of {count} layers read "
            "the keys of others, which is not supported"
        )

    def of_kind(key: str, layers: list[int]) -> int:
        found = file.metadata.get(f"{name}.{key}")
        if isinstance(found, list) and len(found) == count:
            values = {found[i] for i in layers}
            if len(values) == 1 and type(found[layers[0]]) is int and found[layers[0]] > 0:
                return int(found[layers[0]])
        return _size(file, f"{name}.{key}")

    keys = "attention.head_count_kv"
    size, whole = _size(file, f"{name}.attention.key_length_swa"), _size(file, f"{name}.attention.key_length")
    for key, wanted in (("attention.value_length_swa", size), ("rope.dimension_count_swa", size)):
        if (other := _size(file, f"{name}.{key}", wanted)) != wanted:
            raise ValueError(
                f"{file.path}: its {name}.{key} is {other}, and its heads have {wanted}, which is not supported"
            )
    inner, wide = (
        of_kind("feed_forward_length", layers) if layers else 0
        for layers in ([*range(count - shared)], [*range(count - shared, count)])
    )
    if wide not in (0, inner, 2 * inner):
        raise ValueError(f"{file.path}: its {name}.feed_forward_length is {inner} and {wide}, which is not supported")
    has_values = {i: f"blk.{i}.attn_v.weight" in file.tensors for i in kinds[False] if i < count - shared}
    inputs = _size(file, f"{name}.embedding_length_per_layer_input", least=0)
    return {
        "head_dim": size,
        "global_head_dim": whole,
        "intermediate_size": inner,
        "use_double_wide_mlp": wide == 2 * inner,
        "num_key_value_heads": of_kind(keys, kinds[True]),
        "num_global_key_value_heads": of_kind(keys, kinds[False]),
        "attention_k_eq_v": not any(has_values.values()),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": tensor_of(file, "per_layer_token_embd.weight").shape[0] if inputs else 1,
    }


def _layers(file: GgufFile) -> int:
    """The number of layers, without those of a draft head, which lie behind them."""
    key = f"{file.architecture}.block_count"
    layers, drafting = _size(file, key), _size(file, f"{file.architecture}.{DRAFTING}", least=0)
    found = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(found) != layers or drafting >= layers:
        raise ValueError(f"{file.path}: {key} is {layers}, and there are tensors of {len(found)} layers")
    return layers - drafting


def _latents(file: GgufFile, row: Architecture, heads: int) -> dict[str, Any]:
    """The sizes of latents, if the model has them. Newer files name those of keys and values as the latents are read, and their own ones by other keys."""
    if not row.has_latents:
        return {}
    at = f"{row.name}.attention"
    rotated = _size(file, f"{row.name}.rope.dimension_count")
    # As llama.cpp chooses where a file names none.
    usual = {"key": None, "value": _size(file, f"{row.name}.embedding_length") // heads}
    key, value = (
        _size(file, f"{at}.{name}_length_mla", file.integer(f"{at}.{name}_length", default))
        for name, default in usual.items()
    )
    if key <= rotated:
        raise ValueError(f"{file.path} is damaged: {rotated} elements of a key of {key} are rotated")
    groups = file.integer(f"{row.name}.expert_group_count", 0) or 0
    return {
        # Of DeepSeek-V2 alone.
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "kv_lora_rank": _size(file, f"{at}.kv_lora_rank"),
        "q_lora_rank": _size(file, f"{at}.q_lora_rank", least=0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "num_key_value_heads": heads,
    }


def _recurrent(file: GgufFile, row: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """The types of the layers, of which those without queries are recurrent, and the size of a head of values."""
    if row.recurrent is None:
        return {}
    layers, key = range(config["num_hidden_layers"]), f"{row.name}.attention.recurrent_layers"
    has_queries = [f"blk.{i}.attn_q.weight" in file.tensors for i in layers]
    # Those of a draft head follow.
    said = file.metadata.get(key, is_recurrent := [not own for own in has_queries])
    if not isinstance(said, list) or [*map(bool, said[: len(layers)])] != is_recurrent:
        raise ValueError(f"{file.path} is damaged: its {key} does not fit the layers that have queries")
    found: dict[str, Any] = {"layer_types": ["full_attention" if own else row.recurrent for own in has_queries]}
    if "linear_num_value_heads" in config:
        inner, heads = _size(file, f"{row.name}.ssm.inner_size"), config["linear_num_value_heads"]
        keys = config["linear_num_key_heads"]
        if heads < 1 or keys < 1 or inner % heads or heads % keys:
            raise ValueError(
                f"{file.path} is damaged: its {row.name}.ssm.inner_size is {inner}, with {heads} heads of values and {keys} of keys"
            )
        found["linear_value_head_dim"] = inner // heads
    return found


def _check_keys(file: GgufFile, row: Architecture) -> None:
    """Refuse what would change the model and is not read."""
    name = row.name
    read = {*row.numbers, *row.options, *(("attention.sliding_window_pattern",) if row.every else ())}
    read |= set() if row.local_base is None else {"rope.freq_base_swa"}
    # Which layers are recurrent, their tensors say. Positions of a text are alike in all sections.
    read |= {DRAFTING} | (
        set() if row.recurrent is None else {"ssm.inner_size", "full_attention_interval", "attention.recurrent_layers"}
    )
    read |= {"rope.dimension_sections"} if row.tiled else set()
    has_yarn = file.metadata.get(f"{name}.rope.scaling.type") == "yarn" and not row.has_latents
    read |= {"rope.scaling.yarn_attn_factor"} if has_yarn else set()
    read |= set(_PER_LAYER_KEYS) if row.per_layer else set()
    read |= set(_LATENT_KEYS) if row.has_latents else set()
    for key, value in file.metadata.items():
        rest = key.removeprefix(f"{name}.")
        if rest == key or rest in _HARMLESS or rest in read or value == row.only.get(rest, _NEUTRAL.get(rest, 0)):
            continue
        what = " (a mixture of experts)" if rest.startswith("expert") else ""
        shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]
        raise ValueError(
            f"{file.path}: {key} is {shown}{what}, which is not supported for models of the architecture {name!r}"
        )


def _check_routing(file: GgufFile, row: Architecture) -> None:
    """Refuse a choice of more experts than there are, or among groups that they do not fill."""
    if "expert_count" not in row.numbers:
        return
    at = f"{row.name}.expert"
    count, used = _size(file, f"{at}_count"), _size(file, f"{at}_used_count")
    groups, chosen = 1, 1
    if "expert_group_count" in row.options:
        groups, chosen = _size(file, f"{at}_group_count", 1), _size(file, f"{at}_group_used_count", 1)
    if used > count or chosen > groups or count % groups:
        raise ValueError(
            f"{file.path} is damaged: it chooses {used} of {count} experts, out of {chosen} of {groups} groups"
        )


def _size(file: GgufFile, key: str, default: int | None = None, least: int = 1, *, zeros: bool = False) -> int:
    """An integer, or a list of one value. ``zeros``: some entries may be 0, those of recurrent layers."""
    found = file.metadata.get(key)
    if zeros and isinstance(found, list) and any(found):
        found = [n for n in found if n != 0]
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
    rotated = _rotated(file, row, head_dim)
    if row.partial:
        rope["partial_rotary_factor"] = rotated / head_dim
    # The name of the first files of 2023 is rope.scale_linear; a factor without a type is linear.
    factor = file.number(f"{scaling}.factor", file.number(f"{name}.rope.scale_linear")) or 1.0
    if factor < 0:
        raise ValueError(f"{file.path} is damaged: its {scaling}.factor is {factor}")
    kind = file.text(f"{scaling}.type", "linear")
    longrope = _long_factors(file)
    if kind not in ("none", "linear", "yarn") and not longrope:
        raise ValueError(f"{file.path} has a RoPE of the type {kind!r}, which is not supported")
    original = file.integer(f"{scaling}.original_context_length")
    if original is not None and original < 1:
        raise ValueError(f"{file.path} is damaged: its {scaling}.original_context_length is {original}")
    attention = file.number(f"{scaling}.attn_factor") or 1.0
    if longrope:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original, **longrope}
        rope |= {} if attention == 1.0 else {"attention_factor": _shortest(attention)}
    elif kind == "yarn" and (factor != 1.0 or f"{scaling}.yarn_attn_factor" in file.metadata):
        rope |= (_yarn_of_latents if row.has_latents else _yarn)(file, scaling, factor, attention)
    elif attention != 1.0:
        raise ValueError(
            f"{file.path}: {scaling}.attn_factor is {attention}, which is not supported without yarn or longrope"
        )
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": _shortest(factor)}
    if ROPE_FACTORS in file.tensors and row.per_layer:
        rope |= _proportional(file, head_dim)
    elif ROPE_FACTORS in file.tensors:
        rope |= _llama3(file, rope["rope_theta"], rotated)
    return rope


def _rotated(file: GgufFile, row: Architecture, head_dim: int) -> int:
    """How many elements of a head are rotated."""
    key = f"{row.name}.rope.dimension_count"
    rotated = _size(file, key, head_dim)
    if rotated > head_dim:
        raise ValueError(f"{file.path} is damaged: {rotated} elements of a head of {head_dim} are rotated")
    if rotated != head_dim and not row.partial:
        raise ValueError(f"{file.path}: {key} is {rotated}, and a head has {head_dim}, which is not supported")
    return rotated


def _yarn(file: GgufFile, scaling: str, factor: float, attention: float) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071). llama.cpp multiplies its default factor of attention by ``attn_factor``, and divides it by one with the multiplier."""
    rope = _yarn_range(file, scaling, factor)
    # The conversion writes a factor that the configuration has itself by this name.
    if (whole := file.number(f"{scaling}.yarn_attn_factor")) is not None:
        if not whole > 0:
            raise ValueError(f"{file.path} is damaged: its {scaling}.yarn_attn_factor is {whole}")
        return rope | {"attention_factor": _shortest(whole * attention)}
    multiplier, grown = file.number(f"{scaling}.yarn_log_multiplier", 0.0) or 0.0, 0.1 * math.log(factor)
    own = (grown + 1.0) / (multiplier * grown + 1.0)
    # The first conversions of Olmo 3 wrote that whole factor, and not a second one, as attn_factor.
    if not math.isclose(attention, own, rel_tol=1e-3):
        own *= attention
    if attention != 1.0 or multiplier:
        rope["attention_factor"] = _shortest(own)
    return rope


def _yarn_of_latents(file: GgufFile, scaling: str, factor: float, attention: float) -> dict[str, Any]:
    """YaRN of DeepSeek's: nothing but the scores has a factor, and the multiplier is a tenth of the configuration's."""
    if attention != 1.0:
        raise ValueError(f"{file.path}: {scaling}.attn_factor is {attention}, which is not supported with latents")
    rope = _yarn_range(file, scaling, factor) | {"attention_factor": 1.0}
    if multiplier := file.number(f"{scaling}.yarn_log_multiplier", 0.0):
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), _shortest(10 * multiplier))
    return rope


def _yarn_range(file: GgufFile, scaling: str, factor: float) -> dict[str, Any]:
    """What YaRN makes frequencies of."""
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": _shortest(factor)}
    if (original := file.integer(f"{scaling}.original_context_length")) is not None:
        rope["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow"):
        if (found := file.number(f"{scaling}.yarn_{key}")) is not None:
            rope[key] = _shortest(found)
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


def _proportional(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Of frequencies over the whole of a head the first ones turn; a factor that nothing outlives stops the others."""
    factors = file.floats(tensor_of(file, ROPE_FACTORS)).reshape(-1)
    turning = int((factors == 1).sum())
    if len(factors) != head_dim // 2 or not (factors[:turning] == 1).all() or not (factors[turning:] >= 1e20).all():
        raise ValueError(
            f"{file.path}: tensor {ROPE_FACTORS} holds other factors than 1 and those that stop a rotation, which is not supported"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / head_dim}


def _llama3(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """The parameters with which LLaMA 3's rule gives the factors of the file. The published models have an original length of 8,192."""
    factors = file.floats(tensor_of(file, ROPE_FACTORS)).double().reshape(-1)
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
        f"{file.path}: tensor {ROPE_FACTORS} holds factors that are not those of LLaMA 3's rule, which is not supported"
    )
