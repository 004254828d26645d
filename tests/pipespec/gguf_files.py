"""GGUF files that tests write with the package gguf, as llama.cpp's conversion does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pipespec_kernels.formats import FORMATS, quantize

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
NAMES = {
    "gemma3_text": "gemma3", "gemma4_text": "gemma4", "cohere": "command-r", "glm4_moe": "glm4moe", "lfm2_moe": "lfm2moe", "mixtral": "llama",
    "gpt_oss": "gpt-oss", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "hunyuan_v1_dense": "hunyuan-dense", "ministral3": "mistral3",
    "mistral": "mistral3", "olmo3": "olmo2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
}  # fmt: skip
"""Architectures that are called otherwise in files."""

_IN_PAIRS = ("llama", "arcee", "granite", "granitemoe", "mistral3", "smollm3")
"""Architectures for which the conversion changes the order of the rows of queries and keys."""

LARGE = SIZES | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes for the formats with blocks of 256."""


def tiny(model_type: str, sizes: dict[str, Any] = SIZES, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A random model in float32 whose norms and biases are not all alike."""
    torch.manual_seed(seed)
    more = {"sliding_window": None, "partial_rotary_factor": 1.0} | more if model_type == "phi3" else more
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | more)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in (*model.parameters(), *stored_buffers(model).values()):
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval()


def stored_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What is stored and is no parameter: the biases of the choice of experts, and factors of layers."""
    ends = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(ends)}


def write(
    model: PreTrainedModel,
    path: Path,
    types: str | dict[str, str] = "q8_0",
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    vocabulary: list[str] | None = None,
    merges: Sequence[str] = ("a b", "c d"),
    pre: str = "qwen2",
) -> dict[str, torch.Tensor]:
    """Write a model.

    Args:
        model: of a family whose files are read here.
        path: of the file.
        types: the format of all matrices, or by part of a tensor's name; "f32", "f16" and "bf16" are no blocks. The first that fits counts.
        metadata: further numbers, by key.
        tensors: further tensors.
        vocabulary: the texts of the tokens.
        merges: of the tokenizer.
        pre: how it splits text.

    Returns:
        The weights as they are stored, by their names in transformers: float32.
    """
    config = model.config
    name = NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if f"{name}.feed_forward_length" not in (metadata or {}):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    # In Gemma 4 the last layer has the larger heads.
    own = config.per_layer_config[-1] if name == "gemma4" else config
    kv_heads = own.num_key_value_heads
    of_layers = [0 if kind == "conv" else kv_heads for kind in getattr(config, "layer_types", None) or []]
    of_layers = [each.num_key_value_heads for each in config.per_layer_config] if name == "gemma4" else of_layers
    writer.add_head_count_kv(of_layers if name in ("lfm2", "lfm2moe", "gemma4") else kv_heads)
    writer.add_key_length(head_dim := getattr(own, "head_dim", config.hidden_size // config.num_attention_heads))
    eps = [getattr(config, key, None) for key in ("layer_norm_eps", "norm_epsilon", "norm_eps")]
    if (found := next(filter(None, eps), None)) is not None and not name.startswith("lfm2"):
        writer.add_layer_norm_eps(found)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", found))
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0 and name != "gemma4":
        writer.add_rope_dimension_count(int(part * head_dim))
    add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}
    for key, value in (metadata or {}).items():
        add.get(type(value), writer.add_uint32)(key, value)
    _write_tokenizer(writer, vocabulary or tokens(config.vocab_size), merges, pre)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[name], config.num_hidden_layers)
    stored = {}
    for full, parameter in (*model.named_parameters(), *stored_buffers(model).items()):
        module, _, leaf = full.rpartition(".")
        weights = parameter.detach().clone()
        heads = {"q_proj": config.num_attention_heads, "k_proj": own.num_key_value_heads}.get(
            module.rpartition(".")[2], 0
        )
        if name in _IN_PAIRS and heads:
            weights = weights.view(heads, 2, -1, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)
        has_offset = (
            name != "gemma4"
            and name.startswith(("gemma", "nemotron", "qwen35", "qwen3next"))
            and "linear_attn" not in module
        )
        offset = 1 if has_offset and "norm" in module and leaf == "weight" else 0
        weights += offset
        if module.endswith("kv_b_proj") and f"{name}.attention.key_length_mla" in (metadata or {}):
            stored[full] = _add_latents(writer, config, full, weights, types)
            continue
        if (
            "linear_attn" in module
            or leaf in ("e_score_correction_bias", "expert_bias")
            or module.endswith(".conv.conv")
        ):
            stored[full] = _add_recurrent(writer, config, full, weights, types, is_tiled=name.startswith("qwen35"))
            continue
        if module.endswith(".experts"):
            stored[full] = _add_experts(writer, full, weights, types, name == "gpt-oss")
            continue
        if leaf == "layer_scalar":
            stored[full] = _add(writer, f"blk.{module.split('.')[2]}.layer_output_scale.weight", weights, types)
            continue
        if module.endswith("shared_expert_gate"):
            weights = weights[0]
        # The package knows an older name of Granite's.
        is_router = module.endswith("block_sparse_moe.router")
        found = f"blk.{module.split('.')[2]}.ffn_gate_inp" if is_router else names.get_name(module)
        target = f"blk.{module.split('.')[2]}.attn_sinks.weight" if leaf == "sinks" else f"{found}.{leaf}"
        stored[full] = _add(writer, target, weights, types)
        if name in _IN_PAIRS and heads:
            stored[full] = stored[full].view(heads, -1, 2, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)
        stored[full] = stored[full] - offset
    for extra, array in (tensors or {}).items():
        writer.add_tensor(extra, array)
    close(writer)
    return stored


def close(writer: Any) -> None:
    """Write what a ``GGUFWriter`` has been given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_again(file: Any, path: Path, names: Sequence[str], changed: dict[str, Any], **more: int) -> None:
    """Write tensors of a file with its metadata.

    Args:
        file: an open ``GgufFile``.
        path: of the new one.
        names: of the tensors.
        changed: blocks and their type, by the names of tensors that take the place of the file's.
        **more: further numbers of 16 bits, with ``_`` for the dots of their keys. With ``split_no`` above 0 the metadata stay out.
    """
    writer = gguf.GGUFWriter(path, file.architecture)
    for key, value in file.metadata.items() if not more.get("split_no") else ():
        kind = gguf.GGUFValueType.get_type(value)
        if key != "general.architecture":
            kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
            writer.add_key_value(key, value, kind)
    for key, value in more.items():
        writer.add_uint16(key.replace("_", "."), value)
    for name in names:
        if name in changed:
            writer.add_tensor(name, changed[name][0], raw_dtype=changed[name][1])
            continue
        tensor = file.tensors[name]
        if tensor.type == 0:
            writer.add_tensor(name, file.floats(tensor).numpy())
        else:
            data = file.stored(tensor).numpy().reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(tensor.type))
    close(writer)


def with_weights(model: PreTrainedModel, stored: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The model with the weights that a file holds."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored[name])
    return model


def tokens(count: int) -> list[str]:
    """Three special tokens, letters, pairs of them, and padding."""
    letters = [chr(ord("a") + i) for i in range(26)]
    found = ["<begin>", "<end>", "<pad>", *letters, "ab", "cd", "Ġ", "Ċ"]
    return [*found, *(f"[PAD{i}]" for i in range(len(found), count))][:count]


def _write_tokenizer(writer: Any, texts: list[str], merges: Sequence[str], pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(texts)
    writer.add_token_types([3 if text.startswith("<") else 5 if text.startswith("[") else 1 for text in texts])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


_RECURRENT = {
    "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight", "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight", "in_proj_ba.weight": "ssm_ba.weight", "conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias",
    "e_score_correction_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias", "conv.conv.weight": "shortconv.conv.weight",
}  # fmt: skip
"""Weights whose names, shapes or order differ in files, by the ends of their names."""


def _add_recurrent(
    writer: Any, config: Any, full: str, weights: torch.Tensor, types: str | dict[str, str], *, is_tiled: bool
) -> torch.Tensor:
    """Those of :data:`_RECURRENT`. Heads of values are tiled: they go by their place in a group first."""
    layer = full.split(".")[2]
    if full.endswith("in_proj_qkvz.weight") and isinstance(types, dict) and "ssm_in" in types:
        return _add(writer, f"blk.{layer}.ssm_in.weight", weights, types)
    if full.endswith("in_proj_qkvz.weight"):
        return _add_qkvz(writer, config, layer, weights, types)
    target = next(to for end, to in _RECURRENT.items() if full.endswith(end))
    shape = weights.shape
    weights = weights.squeeze(1) if weights.dim() == 3 else weights
    weights = -weights.exp() if full.endswith("A_log") else weights
    at_columns = full.endswith("linear_attn.out_proj.weight")
    order = torch.arange(weights.shape[at_columns])
    if is_tiled and not full.endswith("norm.weight"):
        heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
        is_mixed = "in_proj_qkv." in full or "conv1d" in full
        first = 2 * keys * config.linear_key_head_dim if is_mixed else 0
        tail = order[first:].view(keys, heads // keys, -1).transpose(0, 1).reshape(-1)
        order = torch.cat([order[:first], tail])
    kind = "f32" if target.startswith(("ssm_conv1d", "shortconv.conv")) else types
    ordered = weights[:, order] if at_columns else weights[order]
    stored = _add(writer, f"blk.{layer}.{target}", ordered.contiguous(), kind)
    back = stored[:, order.argsort()] if at_columns else stored[order.argsort()]
    return ((-back).log() if full.endswith("A_log") else back).view(shape)


def _add_latents(
    writer: Any, config: Any, full: str, weights: torch.Tensor, types: str | dict[str, str]
) -> torch.Tensor:
    """What makes keys of latents, transposed, and what makes values, of all heads."""
    layer, heads = full.split(".")[2], config.num_attention_heads
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = weights.view(heads, sum(sizes), config.kv_lora_rank).split(sizes, 1)
    stored_keys = _add(writer, f"blk.{layer}.attn_k_b.weight", keys.mT.contiguous(), types)
    stored_values = _add(writer, f"blk.{layer}.attn_v_b.weight", values.contiguous(), types)
    return torch.cat([stored_keys.mT, stored_values], 1).view_as(weights)


def _add_qkvz(writer: Any, config: Any, layer: str, weights: torch.Tensor, types: str | dict[str, str]) -> torch.Tensor:
    """Queries, keys, values and gates of each head of keys: those of all heads follow one another, the gates in a matrix of their own."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = weights.view(keys, -1, weights.shape[1]).split([size, size, values, values], 1)
    mixed = torch.cat([part.flatten(0, 1) for part in parts[:3]])
    stored = _add(writer, f"blk.{layer}.attn_qkv.weight", mixed, types)
    back = [part.view(keys, -1, weights.shape[1]) for part in stored.split([keys * n for n in (size, size, values)])]
    back.append(_add(writer, f"blk.{layer}.attn_gate.weight", parts[3].flatten(0, 1), types).view_as(parts[3]))
    return torch.cat(back, 1).view_as(weights)


def _add_experts(
    writer: Any, full: str, weights: torch.Tensor, types: str | dict[str, str], is_interleaved: bool
) -> torch.Tensor:
    """Gate and up are two tensors in a file. In gpt-oss they take turns, and all are transposed."""
    layer, is_down = full.split(".")[2], "down_proj" in full
    leaf = "bias" if full.endswith("bias") else "weight"
    parts = {"down": weights} if is_down else dict(zip(("gate", "up"), weights.chunk(2, 1), strict=True))
    if is_interleaved:
        weights = weights if leaf == "bias" else weights.mT
        parts = {"down": weights} if is_down else {"gate": weights[:, ::2], "up": weights[:, 1::2]}
    stored = [
        _add(writer, f"blk.{layer}.ffn_{name}_exps.{leaf}", part.contiguous(), "f32" if leaf == "bias" else types)
        for name, part in parts.items()
    ]
    whole = torch.stack(stored, 2).flatten(1, 2) if is_interleaved else torch.cat(stored, 1)
    return whole.mT if is_interleaved and leaf == "weight" else whole


def _add(writer: Any, name: str, weights: torch.Tensor, types: str | dict[str, str]) -> torch.Tensor:
    kind = types if isinstance(types, str) else next(v for part, v in types.items() if part in name)
    if weights.dim() == 1 or "norm" in name or "ffn_gate_inp" in name:
        kind = "f32"
    if kind in FORMATS:
        form = gguf.GGMLQuantizationType(FORMATS[kind].ggml_type)
        data = quantize(weights.flatten(0, -2), kind).data.view(*weights.shape[:-1], -1).numpy()
        writer.add_tensor(name, data, raw_dtype=form)
        return torch.from_numpy(gguf.dequantize(data, form))
    if kind == "bf16":
        data = gguf.quantize(weights.numpy(), gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        return weights.bfloat16().float()
    stored = weights.numpy().astype(np.float16 if kind == "f16" else np.float32)
    writer.add_tensor(name, stored)
    return torch.from_numpy(stored.astype(np.float32))
