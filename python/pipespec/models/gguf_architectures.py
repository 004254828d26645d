"""Architectures of GGUF files whose matrices stay in blocks: how their files differ from those of LLaMA, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NORM_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"

TENSORS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp", "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj",
    "nextn.eh_proj": "nextn.eh_proj", "nextn.enorm": "nextn.enorm", "nextn.hnorm": "nextn.hnorm", "nextn.norm": "nextn.shared_head_norm",
}  # fmt: skip
"""The modules of a layer in transformers, and their names in files after ``blk.N.``."""

LEAVES = {
    "sinks": "attn_sinks.weight", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "e_score_correction_bias": "exp_probs_b.bias",
    "expert_bias": "exp_probs_b.bias", "layer_scalar": "layer_output_scale.weight",
}  # fmt: skip
"""Weights that are not ``weight`` or ``bias`` of a module, and their names in files after ``blk.N.``."""

_AROUND = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
"""Of layers with norms after each part."""

_PER_LAYER = {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
"""What makes inputs of each layer."""

_BIASES = {"attn_q.bias": "attention_bias", "ffn_down.bias": "mlp_bias"}

EXPERTS = {name: f"ffn_{name}_exps" for name in ("gate", "up", "down")}
"""The matrices of all experts of a layer, after ``blk.N.``."""

_COUNTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_LOCAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SHARED_SIZE = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_ROUTED = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
_SCALED = {"expert_weights_scale": "routed_scaling_factor"}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
"""As llama.cpp chooses where a file names none."""
_WINDOW = {"attention.sliding_window": "sliding_window"}
"""Of models whose layers with a window always have it."""
_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
_OF_LFM2 = {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp",
}  # fmt: skip
_AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}

_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture are read.

    Attributes:
        name: in the files.
        model_type: in transformers.
        with_key: only files with this key, under the name of the architecture, and not 0, are of this row.
        with_value: the key has this value; None: any other than 0.
        tensors: names of modules that are not as in :data:`TENSORS`.
        pairs: the rows of queries and keys lie pair by pair of a rotation.
        norm_offset: what files add to the weights of norms.
        eps: name of the norms' epsilon in the configuration.
        eps_key: its key.
        flags: names of truth values in the configuration, by the tensor of the first layer that makes them true.
        numbers: names of numbers in the configuration by their keys, which must be there. ``rope.NAME`` is one of ``rope_parameters``.
        options: the same, of keys that may lack: transformers' default counts then.
        partial: a part of each head may be rotated.
        rope_base: where the metadata name none.
        local_base: of layers with a window, which have a rotation of their own: where the metadata name none; 0: that of the others. None: one rotation for all.
        every: period of the layers without a window, used if the metadata have no pattern; None: all layers are alike.
        window: of the layers that have one, where the metadata name none; 0: there is none. None: the key is among ``numbers``, or the model has no windows and it is of no effect, as in llama.cpp.
        constants: of the configuration, which llama.cpp's code has and files have not. ``rope.NAME`` is one of ``rope_parameters``.
        only: keys whose other values describe a model that transformers lacks, with the value that is read.
        recurrent: type of the layers that have no queries; None: all have attention.
        has_latents: the attention has latents in place of keys and values.
        tiled: the heads of values of a gated delta net lie in the order of a repetition of the heads of keys, not by their head of keys.
        per_layer: layers with a window have another size of heads, and maybe another number of keys; the last layers may read the keys of others; layers may have inputs of their own.
        published: layers of the model whose queries are scaled by its hidden size per head, as its publisher's code does, not by the size of a head.
    """

    name: str
    model_type: str
    with_key: str | None = None
    with_value: Any = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    norm_offset: float = 0.0
    eps: str = "rms_norm_eps"
    eps_key: str = NORM_EPS
    flags: Mapping[str, str] = field(default_factory=_BIASES.copy)
    numbers: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    rope_base: float = 10000.0
    local_base: float | None = None
    every: int | None = None
    window: int | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    recurrent: str | None = None
    has_latents: bool = False
    tiled: bool = False
    per_layer: bool = False
    published: int | None = None

    def matches(self, name: str, keys: Mapping[str, Any]) -> bool:
        """Whether files of the architecture ``name`` with the metadata ``keys`` are of this row."""
        if self.name != name or self.with_key is None:
            return self.name == name
        found = keys.get(f"{name}.{self.with_key}")
        return bool(found) if self.with_value is None else found == self.with_value


ARCHITECTURES = (
    Architecture("llama", "llama", pairs=True),
    Architecture("llama", "mixtral", with_key="expert_count", pairs=True, numbers=_LOCAL, flags={}),
    Architecture("qwen2", "qwen2"),
    Architecture(
        "qwen2moe", "qwen2_moe", numbers=_COUNTS | _SHARED_SIZE, flags={},
        constants={"norm_topk_prob": False},
    ),
    Architecture("qwen3", "qwen3"),
    Architecture("qwen3moe", "qwen3_moe", numbers=_COUNTS, constants={"norm_topk_prob": True}),
    Architecture(
        "qwen3next", "qwen3_next", numbers=_COUNTS | _SHARED_SIZE | _DELTA, flags={}, constants={"norm_topk_prob": True},
        tensors=_AFTER_ATTENTION, norm_offset=1.0, partial=True, recurrent="linear_attention",
    ),
    Architecture(
        "qwen35", "qwen3_5_text", numbers=_DELTA, flags={}, tensors=_AFTER_ATTENTION, norm_offset=1.0, partial=True,
        recurrent="linear_attention", tiled=True,
    ),
    Architecture(
        "qwen35moe", "qwen3_5_moe_text", numbers=_COUNTS | _SHARED_SIZE | _DELTA, flags={}, tensors=_AFTER_ATTENTION,
        norm_offset=1.0, partial=True, recurrent="linear_attention", tiled=True,
    ),
    Architecture("phi3", "phi3", partial=True, window=0),
    Architecture("gemma", "gemma", norm_offset=1.0),
    Architecture("gemma2", "gemma2", tensors=_AROUND, norm_offset=1.0, options=_CAPS, every=2, window=4096, published=46),
    Architecture(
        "gemma3", "gemma3_text", tensors=_AROUND, norm_offset=1.0, options=_CAPS, rope_base=1e6, local_base=10000.0, every=6, window=0, published=62
    ),
    Architecture(
        "gemma4", "gemma4_text", tensors=_AROUND | _PER_LAYER, flags={}, numbers=_WINDOW, rope_base=1e6, local_base=10000.0, every=6, per_layer=True,
        options={"final_logit_softcapping": "final_logit_softcapping"},
    ),
    Architecture("arcee", "arcee", pairs=True),
    Architecture(
        "command-r", "cohere", eps="layer_norm_eps", eps_key=LAYER_NORM_EPS, numbers={"logit_scale": "logit_scale"},
        flags={"attn_q.bias": "attention_bias", "attn_q_norm.weight": "use_qk_norm"},
    ),
    Architecture(
        "cohere2", "cohere2", eps="layer_norm_eps", eps_key=LAYER_NORM_EPS, numbers={"logit_scale": "logit_scale"} | _WINDOW, every=4
    ),
    Architecture(
        "deepseek2", "deepseek_v2", numbers=_ROUTED, options=_SCALED | _GROUPS, flags={}, has_latents=True,
        constants=_ONE_GROUP, only={"expert_gating_func": 1},
    ),
    Architecture(
        "deepseek2", "deepseek_v3", with_key="expert_gating_func", with_value=2, numbers=_ROUTED, flags={}, has_latents=True,
        options=_SCALED | _GROUPS | {"expert_weights_norm": "norm_topk_prob"}, only={"expert_gating_func": 2},
        constants=_ONE_GROUP | {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    Architecture(
        "dots1", "dots1", numbers=_ROUTED, flags={}, options=_SCALED | _GROUPS | {"expert_weights_norm": "norm_topk_prob"},
        only={"expert_gating_func": 2},
    ),
    Architecture("ernie4_5", "ernie4_5", flags={"attn_output.bias": "use_bias"}),
    Architecture("exaone4", "exaone4", tensors=_AROUND, every=4, window=0),
    Architecture(
        "glm4", "glm4", partial=True,
        tensors={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    ),
    Architecture(
        "glm4moe", "glm4_moe", numbers=_ROUTED, options=_SCALED | _GROUPS | {"expert_weights_norm": "norm_topk_prob"}, partial=True,
        tensors=_AFTER_ATTENTION, flags={"attn_q.bias": "attention_bias", "attn_q_norm.weight": "use_qk_norm"},
        only={"expert_gating_func": 2}, constants=_ONE_GROUP | {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    Architecture(
        "granite", "granite", pairs=True,
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    Architecture(
        "granitemoe", "granitemoe", pairs=True, flags={},
        numbers=_LOCAL | {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    Architecture(
        "gpt-oss", "gpt_oss", numbers=_LOCAL | _WINDOW | {"expert_feed_forward_length": "intermediate_size"}, flags={}, every=2,
        tensors=_AFTER_ATTENTION, constants={"rope.truncate": False},
    ),
    Architecture(
        "hunyuan-dense", "hunyuan_v1_dense",
        tensors={"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    ),
    Architecture(
        "lfm2", "lfm2", eps="norm_eps", flags={"shortconv.in_proj.bias": "conv_bias"}, rope_base=1e6, recurrent="conv",
        numbers={"shortconv.l_cache": "conv_L_cache"}, constants={"block_auto_adjust_ff_dim": False}, tensors=_OF_LFM2,
    ),
    Architecture(
        "lfm2moe", "lfm2_moe", eps="norm_eps", flags={"shortconv.in_proj.bias": "conv_bias"}, rope_base=1e6, recurrent="conv",
        numbers=_COUNTS | {"shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers"}, tensors=_OF_LFM2,
        constants={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True}, only={"expert_gating_func": 2},
    ),
    Architecture(
        "minicpm3", "minicpm3", flags={}, has_latents=True, constants={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    Architecture("mistral3", "mistral", pairs=True, window=0),
    Architecture(
        "mistral3", "ministral3", with_key="attention.temperature_scale", pairs=True, window=0,
        numbers={
            "attention.temperature_scale": "rope.llama_4_scaling_beta",
            "rope.scaling.original_context_length": "rope.original_max_position_embeddings",
        },
    ),
    Architecture(
        "nemotron", "nemotron", norm_offset=1.0, partial=True, eps="norm_eps", eps_key=LAYER_NORM_EPS
    ),
    Architecture("olmo2", "olmo2", tensors=_AROUND),
    Architecture(
        "olmo2", "olmo3", with_key="attention.sliding_window", tensors=_AROUND, local_base=0.0, every=4, window=0
    ),
    Architecture(
        "seed_oss", "seed_oss", tensors=_AFTER_ATTENTION,
        flags={"attn_q.bias": "attention_bias", "attn_output.bias": "attention_out_bias", "ffn_down.bias": "mlp_bias"},
    ),
    Architecture("smollm3", "smollm3", pairs=True),
    Architecture(
        "stablelm", "stablelm", partial=True, eps="layer_norm_eps", eps_key=LAYER_NORM_EPS, flags={"attn_q.bias": "use_qkv_bias"},
        options={"use_parallel_residual": "use_parallel_residual"},
    ),
    Architecture(
        "starcoder2", "starcoder2", tensors={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}, eps="norm_epsilon",
        eps_key=LAYER_NORM_EPS, flags={"attn_q.bias": "use_bias"}, window=0,
    ),
)  # fmt: skip
"""Of several rows for one file the last counts."""
