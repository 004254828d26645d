"""Models out of GGUF files.

The architectures are those that :data:`pipespec.models.families.FAMILIES` names. Their matrices stay in blocks, where they lie in the file; what is no
block becomes float32, or bfloat16 where all matrices of the file are bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from pipespec.models.families import FAMILIES, Family
from pipespec.models.gguf import FLOATS, GgufFile, GgufTensor
from pipespec.models.gguf_tokenizer import end_ids, token_id
from pipespec.models.quantized import filled, in_blocks

_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The names of modules in transformers and in GGUF files; before the latter ``blk.N.``."""

_ROPE_FACTORS = "rope_freqs.weight"
"""Per pair of a rotation, the factor by which LLaMA 3 slows it down."""


def family_of_file(file: GgufFile) -> Family | None:
    """The family whose matrices can stay in blocks; None for other architectures."""
    return next((family for family in FAMILIES.values() if family.gguf == file.architecture), None)


# ---- the configuration


def gguf_config(file: GgufFile) -> Any:
    """The configuration that the metadata describe of a file of a family here.

    Raises:
        ValueError: a key is missing, or no configuration describes its RoPE.
    """
    family, name = family_of_file(file), file.architecture
    assert family is not None

    def value(key: str, default: Any = None) -> Any:
        found = file.metadata.get(f"{name}.{key}", default)
        if found is None:
            raise ValueError(f"{file.path} has no {name}.{key} in its metadata")
        return found

    hidden, heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": token_id(file, "eos"),
        "pad_token_id": token_id(file, "padding"),
        "rope_parameters": _rope(file, name, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "architectures": [f"{family.prefix}ForCausalLM"],
    }
    window = file.metadata.get(f"{name}.attention.sliding_window")
    if window:
        config["sliding_window"] = window
    try:
        return AutoConfig.for_model(family.model_type, **config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file.path} describes no {family.model_type} model: {error}") from error


def _shortest(value: float) -> float:
    """The shortest number that is this one in float32, as configurations write it."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, name: str, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(_shortest(file.metadata.get(f"{name}.rope.freq_base", 10000.0))),
    }
    rotated = file.metadata.get(f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = file.metadata.get(f"{name}.rope.scaling.type", "none")
    odd = next((tensor for tensor in file.tensors if tensor.startswith("rope_factors_")), None)
    if kind not in ("none", "linear", "yarn") or odd is not None:
        raise ValueError(
            f"{file.path} has a RoPE of the type {kind!r}{f' with {odd}' if odd else ''}, which is not supported"
        )
    if kind != "none":
        scaling = f"{name}.rope.scaling"
        rope |= {"rope_type": kind, "factor": _shortest(file.metadata[f"{scaling}.factor"])}
        original = file.metadata.get(f"{scaling}.original_context_length")
        if original is not None:
            rope["original_max_position_embeddings"] = original
    if _ROPE_FACTORS in file.tensors:
        rope |= _llama3(file, rope["rope_theta"], rotated)
    return rope


def _llama3(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """The parameters of the published LLaMA 3 models that give the factors of the file."""
    factors = file.floats(_tensor(file, _ROPE_FACTORS)).double().reshape(-1)
    low, high, original = 1.0, 4.0, 8192
    wavelength = 2 * torch.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    for factor in (_shortest(float(factors.max())), 8.0, 32.0):
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
        f"{file.path}: tensor {_ROPE_FACTORS} holds factors that are not those of a LLaMA 3 model, which is not supported"
    )


# ---- the model


def model_of(file: GgufFile, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """A model in eval mode around the blocks of a file. Their pages are read when they are used.

    Args:
        file: of a model of a family here.
        dtype: of what is not in blocks; ``"auto"``: as the module says.

    Raises:
        ValueError: it is damaged: the message names the tensor.
    """
    config, family, stored = gguf_config(file), family_of_file(file), _dtype(file, dtype)
    assert family is not None
    used = {_ROPE_FACTORS}
    source = replace(file, metadata={})  # the modules need no vocabulary

    def fill(name: str, module: nn.Module) -> nn.Module:
        # Files of LLaMA have the two rows of a rotation next to each other.
        part = name.rpartition(".")[2]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part, 0)
        heads = heads if family.gguf_pairs else 0
        offset, blocks = family.norm_offset if "norm" in part else 0.0, None
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            at = f"{_stored_name(name)}.{leaf}"
            if name == "lm_head" and at not in file.tensors:
                at = f"token_embd.{leaf}"
            used.add(at)
            tensor = _tensor(file, at)
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"{file.path}: tensor {at} is {list(tensor.shape)}, and {name}.{leaf} of this model {list(parameter.shape)}"
                )
            if tensor.type in FLOATS:
                floats = _in_order(file.floats(tensor), heads).sub_(offset).to(stored)
                module._parameters[leaf] = nn.Parameter(floats, requires_grad=False)
            elif len(tensor.shape) == 2:
                blocks = file.matrix(tensor)
            else:
                raise ValueError(f"{file.path}: tensor {at} is quantised, and {name}.{leaf} is no matrix")
        return module if blocks is None else in_blocks(module, blocks, heads, source)

    model = filled(file.path, config, stored, fill)
    other = next((name for name in file.tensors if name not in used), None)
    if other is not None:
        raise ValueError(f"{file.path}: tensor {other} has no place in a {family.model_type} model")
    ends = end_ids(file)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    return model


def _dtype(file: GgufFile, dtype: torch.dtype | str) -> torch.dtype:
    if dtype != "auto":
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    types = {FLOATS.get(tensor.type) for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return torch.bfloat16 if types == {torch.bfloat16} else torch.float32


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {name}")
    return file.tensors[name]


def _stored_name(module: str) -> str:
    if module in _ENDS:
        return _ENDS[module]
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{_OF_LAYER[rest]}"


def _in_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in the model's order."""
    if not heads:
        return tensor
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
