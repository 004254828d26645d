"""Tiny random models of many families, made from transformers' configurations. Windows are shorter than the texts of the tests."""

import copy
import functools
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pipespec.models.compat import counts_columns

VOCABULARY = 97
WINDOW = 7
LAYERS = 4

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.25, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
SLIDES = {"sliding_window": WINDOW}
MIXED = SLIDES | {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
HEADS = {"head_dim": 8}
FACTORS_OF_GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}  # fmt: skip
FACTORS_OF_QUERIES = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.5}  # fmt: skip
SWITCHED = SLIDES | {"use_sliding_window": True, "max_window_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}  # fmt: skip
DEEPSEEK = LATENT | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip

RECURRENT = HEADS | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
PER_LAYER = {
    "global_head_dim": 12,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCABULARY,
}
SHORT_CONVOLUTION = {"conv_L_cache": 3, "block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv", "conv"]}  # fmt: skip
SHARED_EXPERT = {"shared_expert_intermediate_size": 24}

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", SLIDES | HEADS),
    "ministral, mixed": ("ministral", MIXED | HEADS),
    "ministral3": ("ministral3", HEADS | {"rope_parameters": FACTORS_OF_QUERIES}),
    "arcee": ("arcee", {}),
    "seed_oss": ("seed_oss", HEADS),
    "ernie4_5": ("ernie4_5", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", HEADS),
    "nemotron": ("nemotron", {}),
    "cohere, norms": ("cohere", {"use_qk_norm": True}),
    "mixtral, window": ("mixtral", SLIDES | {"num_local_experts": 4}),
    "phi3, window": ("phi3", SLIDES),
    "phimoe, window": ("phimoe", SLIDES | {"num_local_experts": 4}),
    "starcoder2, window": ("starcoder2", SLIDES),
    "qwen2": ("qwen2", {}),
    "qwen2, mixed": ("qwen2", SWITCHED),
    "qwen2_moe, mixed": ("qwen2_moe", SWITCHED | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3, mixed": ("qwen3", SWITCHED | HEADS),
    "qwen3_moe, window": ("qwen3_moe", SWITCHED | EXPERTS | HEADS),
    "gemma": ("gemma", HEADS),
    "gemma2, mixed, caps": ("gemma2", MIXED | HEADS | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "gemma3, mixed, two RoPE bases": ("gemma3_text", MIXED | HEADS | {"query_pre_attn_scalar": 8}),
    "gemma4, mixed, shared keys": ("gemma4_text", MIXED | HEADS | PER_LAYER),
    "olmo2": ("olmo2", {}),
    "olmo3, mixed": ("olmo3", MIXED),
    "cohere2, mixed": ("cohere2", MIXED),
    "exaone4, mixed": ("exaone4", MIXED),
    "smollm3, mixed": ("smollm3", MIXED | {"use_sliding_window": True}),
    "gpt_oss, mixed, sinks": ("gpt_oss", MIXED | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2, latents": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3, latents": ("deepseek_v3", DEEPSEEK),
    "minicpm3, latents": ("minicpm3", LATENT),
    "granite": ("granite", FACTORS_OF_GRANITE),
    "granitemoe": ("granitemoe", FACTORS_OF_GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("glm4", HEADS),
    "stablelm": ("stablelm", {}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "glm4_moe": (
        "glm4_moe",
        HEADS | {"use_qk_norm": True, "attention_bias": True} | {k: v for k, v in DEEPSEEK.items() if k not in LATENT},
    ),
    "dots1, mixed": ("dots1", MIXED | HEADS | {k: v for k, v in DEEPSEEK.items() if k not in LATENT}),
    "lfm2, recurrent": ("lfm2", SHORT_CONVOLUTION),
    "lfm2_moe, recurrent": ("lfm2_moe", SHORT_CONVOLUTION | EXPERTS | {"num_dense_layers": 1}),
    "qwen3_next, recurrent": ("qwen3_next", RECURRENT | EXPERTS | SHARED_EXPERT),
    "qwen3_5, recurrent": ("qwen3_5_text", RECURRENT),
    "qwen3_5_moe, recurrent": ("qwen3_5_moe_text", RECURRENT | EXPERTS | SHARED_EXPERT),
}
"""By name: type of the model and what its configuration has in addition to SIZES."""

HAS_LAYERS_OF_SEVERAL_SIZES = hasattr(PreTrainedConfig, "per_layer_config")
LACKING = {
    name: kind
    for name, (kind, _) in TINY_MODELS.items()
    if kind not in CONFIG_MAPPING or counts_columns(kind) or (kind == "gemma4_text" and not HAS_LAYERS_OF_SEVERAL_SIZES)
}
"""Families that the installed transformers does not have, or not in a form that can run here, with their types."""

for name in LACKING:
    del TINY_MODELS[name]


def make(name: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A model of a family, float32, with a text that varies."""
    kind, given = TINY_MODELS[name]
    config = AutoConfig.for_model(
        kind, **copy.deepcopy(SIZES | given | more)
    )  # tests change lists of configurations in place
    if kind == "gpt_oss":
        config._attn_implementation = "eager"
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not torch.isfinite(parameter).all() or not parameter.any():
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    torch.random.set_rng_state(state)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


model_of = functools.cache(make)
