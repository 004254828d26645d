"""Every architecture of the table of GGUF files: the model that was written comes out, and stays in blocks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, Gemma2PreTrainedModel
from transformers.models.nemotron import modeling_nemotron

from pipespec import Pipeline
from pipespec.engine.known import NATIVE
from pipespec.engine.native import TABLE
from pipespec.engine.runtime import runtime_of
from pipespec.models import families, gguf_config
from pipespec.models.compat import caches_latents, counts_columns, has_stacked_experts
from pipespec.models.gguf import GgufFile
from pipespec.models.gguf_architectures import ARCHITECTURES
from pipespec.models.gguf_models import model_of
from pipespec.models.loading import load_config, load_model
from pipespec.models.parts import ModelParts
from pipespec.models.quantized import JoinedLinear, QuantizedExperts, QuantizedLinear
from tests.pipespec.gguf_files import SIZES, tiny, write
from tests.support.ways import driver_of

pytest.importorskip("gguf")

TEXT = torch.arange(60)[None] + 5
PARTIAL: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}
WINDOWS: dict[str, Any] = {"num_hidden_layers": 5, "sliding_window": 32}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
OLMO_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.2079441541679836,
}  # fmt: skip
GPT_OSS_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
COUNTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
DELTA = PARTIAL | {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
OF_DELTA = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 192, "full_attention_interval": 4,
}  # fmt: skip
ROUTED = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
OF_ROUTED = {
    "expert_count": 8, "expert_used_count": 3, "expert_shared_count": 2, "expert_feed_forward_length": 32, "leading_dense_block_count": 1,
    "expert_weights_scale": 2.5,
}  # fmt: skip
LATENTS = ROUTED | {
    "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
OF_LATENTS = OF_ROUTED | {"attention.kv_lora_rank": 32, "attention.key_length": 40, "attention.value_length": 16, "rope.dimension_count": 8}  # fmt: skip
OF_SPLIT_LATENTS = {
    "attention.q_lora_rank": 32, "attention.head_count_kv": 1, "attention.key_length": 40, "attention.value_length": 32,
    "attention.key_length_mla": 40, "attention.value_length_mla": 16,
}  # fmt: skip
LATENT_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
OF_LATENT_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
OF_TWO_KINDS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 32,
    "global_head_dim": 32,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
SHARED = OF_TWO_KINDS | {
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}
OF_BOTH_KINDS = {
    "attention.sliding_window": 32,
    "attention.sliding_window_pattern": [True, False] * 3,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 10000.0,
    "final_logit_softcapping": 30.0,
}
STOPPED = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32)}
"""What stops three quarters of a rotation, as the conversion of Gemma 4 has it."""
SCALES = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}
OF_SCALES = {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0}
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0]}
CASES = {
    "llama": ({}, {}),
    "llama with biases": ({"mlp_bias": True, "attention_bias": True}, {}),
    "mixtral": ({"num_local_experts": 4}, {"expert_count": 4, "expert_used_count": 2}),
    "qwen2": ({}, {}),
    "qwen2_moe": (EXPERTS | {"shared_expert_intermediate_size": 64}, COUNTS | {"expert_shared_feed_forward_length": 64}),
    "qwen3_moe": (EXPERTS | {"norm_topk_prob": True}, COUNTS),
    "qwen3": ({}, {}),
    "qwen3_next": (DELTA | EXPERTS | {"shared_expert_intermediate_size": 64}, OF_DELTA | COUNTS | {"expert_shared_feed_forward_length": 64}),
    "qwen3_5_text": (DELTA, OF_DELTA | SECTIONS | {"attention.recurrent_layers": [True, True, True, False]}),
    "qwen3_5_text with a head of values each": (DELTA | {"linear_num_key_heads": 6}, OF_DELTA | SECTIONS | {"ssm.group_count": 6}),
    "qwen3_5_moe_text": (
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 64},
        OF_DELTA | SECTIONS | COUNTS | {"expert_shared_feed_forward_length": 64},
    ),
    "deepseek_v2": (LATENTS | {"q_lora_rank": None, "topk_method": "greedy"}, OF_LATENTS),
    "deepseek_v2 with groups and yarn": (
        LATENTS | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": LATENT_YARN},
        OF_LATENTS | OF_LATENT_YARN | {"attention.q_lora_rank": 32, "expert_group_count": 4, "expert_group_used_count": 2, "expert_gating_func": 1},
    ),
    "deepseek_v3": (
        LATENTS | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "rope_parameters": LATENT_YARN},
        OF_LATENTS | OF_LATENT_YARN | OF_SPLIT_LATENTS | {
            "expert_group_count": 2, "expert_group_used_count": 1, "expert_gating_func": 2, "expert_weights_norm": True,
        },
    ),
    "deepseek_v3 of an older conversion": (
        LATENTS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        OF_LATENTS | {"attention.q_lora_rank": 32, "expert_gating_func": 2},
    ),
    "dots1": (ROUTED | {"norm_topk_prob": True, "sliding_window": None}, OF_ROUTED | {"expert_weights_norm": True, "expert_gating_func": 2}),
    "lfm2": (
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
        {"shortconv.l_cache": 3, "vocab_size": 96},
    ),
    "lfm2_moe": (
        EXPERTS | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "norm_eps": 1e-5},
        COUNTS | {"shortconv.l_cache": 3, "vocab_size": 96, "leading_dense_block_count": 1, "expert_gating_func": 2},
    ),
    "minicpm3": (
        {key: value for key, value in LATENTS.items() if key not in ROUTED} | {"tie_word_embeddings": True},
        {key: value for key, value in OF_LATENTS.items() if key not in OF_ROUTED and key != "attention.value_length"} | {"attention.q_lora_rank": 32},
    ),
    "phi3": (PARTIAL, {}),
    "gemma": ({"tie_word_embeddings": True}, {}),
    "gemma2": (
        WINDOWS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
        {"attention.sliding_window": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": (WINDOWS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}, {"attention.sliding_window": 32}),
    "gemma4_text": (
        SHARED,
        OF_BOTH_KINDS | {"attention.shared_kv_layers": 3, "embedding_length_per_layer_input": 32, "feed_forward_length": [96, 96, 96, 192, 192, 192]},
    ),
    "gemma4_text with keys for values": (
        OF_TWO_KINDS | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        OF_BOTH_KINDS | {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0},
    ),
    "arcee": ({}, {}),
    "arcee with biases": ({"mlp_bias": True, "attention_bias": True}, {}),
    "cohere": ({"tie_word_embeddings": True, "logit_scale": 0.3}, {"logit_scale": 0.3}),
    "cohere with norms": ({"tie_word_embeddings": True, "logit_scale": 0.3, "use_qk_norm": True}, {"logit_scale": 0.3}),
    "cohere2": (WINDOWS | {"tie_word_embeddings": True, "logit_scale": 0.3}, {"logit_scale": 0.3, "attention.sliding_window": 32}),
    "ernie4_5": ({}, {}),
    "ernie4_5 with biases": ({"use_bias": True}, {}),
    "exaone4": ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, {}),
    "exaone4 with windows": (
        WINDOWS | {"layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]},
        {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True, True, True, False, True]},
    ),
    "glm4": (PARTIAL, {}),
    "glm4 with biases": (PARTIAL | {"attention_bias": True}, {}),
    "glm4_moe": (
        PARTIAL | ROUTED | {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
        OF_ROUTED | {"expert_weights_norm": True, "expert_gating_func": 2},
    ),
    "granite": (SCALES, OF_SCALES),
    "granitemoe": (SCALES | {"num_local_experts": 4, "num_experts_per_tok": 2}, OF_SCALES | {"expert_count": 4, "expert_used_count": 2}),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "rope_parameters": GPT_OSS_YARN},
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96, "attention.sliding_window": 32, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
        },
    ),
    "hunyuan_v1_dense": ({}, {}),
    "mistral": ({"sliding_window": None}, {}),
    "ministral3": (
        {"rope_parameters": YARN},
        {
            "attention.temperature_scale": 0.1, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "nemotron": (PARTIAL, {}),
    "olmo2": ({}, {}),
    "olmo3": (WINDOWS, {"attention.sliding_window": 32}),
    "olmo3 with yarn": (
        WINDOWS | {"rope_parameters": {"full_attention": OLMO_YARN, "sliding_attention": DEFAULT}},
        {
            "attention.sliding_window": 32,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.attn_factor": OLMO_YARN["attention_factor"],
            "rope.scaling.original_context_length": 32,
        },
    ),
    "olmo3 with yarn of a newer conversion": (
        WINDOWS | {"rope_parameters": {"full_attention": OLMO_YARN | {"attention_factor": 1.3}, "sliding_attention": DEFAULT}},
        {
            "attention.sliding_window": 32, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.yarn_attn_factor": 1.3,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "seed_oss": ({}, {}),
    "smollm3": ({"num_hidden_layers": 5}, {}),
    "stablelm": (PARTIAL, {"use_parallel_residual": False}),
    "stablelm in parallel": (PARTIAL | {"use_parallel_residual": True, "use_qkv_bias": True}, {"use_parallel_residual": True}),
    "starcoder2": ({}, {}),
}  # fmt: skip
"""Of a model of a type: how its configuration differs, and what its file says of that."""

OF_OLDER_VERSIONS = {
    "gemma2": Gemma2PreTrainedModel._supports_sdpa,
    "nemotron": hasattr(modeling_nemotron, "NemotronSdpaAttention"),
    "dots1": transformers.__version__.startswith("5.0."),
    **{case: not caches_latents(case.partition(" ")[0]) for case in CASES if "deepseek" in case},
}
"""Cases that run through modules where transformers is as in 5.0: its attention leaves out the caps, or has classes of its own."""


def need(case):
    """Skip a test of a model that this version of transformers lacks, or whose choice among groups of experts fails there."""
    kind = case.partition(" ")[0]
    if kind not in CONFIG_MAPPING or ("deepseek_v2 with groups" in case and not caches_latents(kind)):
        pytest.skip("this version of transformers has no such models")


def written(case, path, types):
    """A random model of a case, in a file."""
    if case == "granitemoe" and not has_stacked_experts(case):
        pytest.skip("this version of transformers has a module per matrix of all experts, and files of it are refused")
    need(case)
    more, metadata = CASES[case]
    model = tiny(case.partition(" ")[0], SIZES | more)
    name = next(row.name for row in ARCHITECTURES if row.model_type == model.config.model_type)
    values = {f"{name}.{key}": value for key, value in metadata.items()}
    write(model, path, types, metadata=values, tensors=STOPPED if case.startswith("gemma4") else None)
    return model


def logits(model):
    with torch.inference_mode():
        return model(input_ids=TEXT, use_cache=False).logits


def test_every_architecture_is_tested():
    assert {case.partition(" ")[0] for case in CASES} == {row.model_type for row in ARCHITECTURES}


def test_the_page_of_models_lists_them():
    page = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()
    listed = "\n".join(f"| `{row.name}` | `{row.model_type}` |" for row in ARCHITECTURES)
    assert f"| architecture | `model_type` |\n|---|---|\n{listed}\n\n" in page


def test_a_version_of_transformers_without_the_model_is_named(tmp_path, monkeypatch):
    written("olmo2", tmp_path / "m.gguf", "f32")
    monkeypatch.setattr(gguf_config, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    with pytest.raises(
        ValueError, match=r"the architecture 'olmo2' needs a newer version of transformers \(with olmo2\)"
    ):
        load_model(tmp_path / "m.gguf")


def test_a_version_of_transformers_with_other_experts_is_named(tmp_path, monkeypatch):
    written("mixtral", tmp_path / "m.gguf", "f32")
    monkeypatch.setattr(gguf_config, "has_stacked_experts", lambda model_type: False)
    with pytest.raises(ValueError, match=r"'llama' needs a newer version of transformers \(with mixtral\)"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("case", "without", "message"),
    [
        ("granite", "attention.scale", r"has no granite\.attention\.scale in its metadata"),
        ("cohere", "logit_scale", r"has no command-r\.logit_scale in its metadata"),
        ("cohere2", "attention.sliding_window", r"has no cohere2\.attention\.sliding_window in its metadata"),
        ("gpt_oss", "attention.sliding_window", r"has no gpt-oss\.attention\.sliding_window in its metadata"),
    ],
)
def test_numbers_that_a_model_needs_are_missed_by_name(tmp_path, case, without, message, monkeypatch):
    more, metadata = CASES[case]
    monkeypatch.setitem(CASES, case, (more, {key: value for key, value in metadata.items() if key != without}))
    written(case, tmp_path / "m.gguf", "f32")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m.gguf")


def test_first_files_of_gemma_2_name_no_window(tmp_path):
    write(tiny("gemma2", tie_word_embeddings=True), tmp_path / "m.gguf")
    config = load_config(tmp_path / "m.gguf")
    assert (config.sliding_window, config.layer_types) == (4096, ["sliding_attention", "full_attention"])


def test_a_file_of_gemma_3_without_a_window_has_full_attention(tmp_path):
    more = CASES["gemma3_text"][0] | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    written = tiny("gemma3_text", SIZES | more)
    write(written, tmp_path / "m.gguf", "f32")
    torch.testing.assert_close(logits(load_model(tmp_path / "m.gguf")), logits(written))


def test_windows_of_another_number_of_layers_are_damage(tmp_path, monkeypatch):
    more, metadata = CASES["exaone4 with windows"]
    wrong = metadata | {"attention.sliding_window_pattern": [True, False]}
    monkeypatch.setitem(CASES, "exaone4 with windows", (more, wrong))
    written("exaone4 with windows", tmp_path / "m.gguf", "f32")
    with pytest.raises(ValueError, match=r"sliding_window_pattern does not fit 5 layers"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model_that_was_written(tmp_path, case):
    model = written(case, tmp_path / "m.gguf", "f32")
    found = load_model(tmp_path / "m.gguf")
    assert type(found) is type(model)
    torch.testing.assert_close(logits(found), logits(model))


@pytest.mark.parametrize("case", CASES)
def test_its_matrices_stay_in_blocks(tmp_path, case):
    if case in ("lfm2_moe", "glm4_moe") and transformers.__version__.startswith("5.0."):
        pytest.skip("its experts and router are other modules in this version, which are dequantised")
    model = written(case, tmp_path / "m.gguf", "q8_0")
    found = load_model(tmp_path / "m.gguf")
    # The router of shared experts and other routers are floats in files, and what makes keys and values of latents becomes floats.
    floats = ("expert_gate", "mlp.gate", "kv_b_proj")
    linear = {module for name, module in found.named_modules() if not name.endswith(floats)}
    assert not any(type(module) in (torch.nn.Linear, torch.nn.Embedding) for module in linear)
    assert any(isinstance(module, QuantizedLinear) for module in found.modules())
    # Where two experts are nearly equal, what is rounded chooses the other one.
    bound = 0.4 if any(isinstance(module, QuantizedExperts) for module in found.modules()) else 0.1
    # What is rounded stays in a state, and scores of Gemma 4 are not scaled.
    bound = max(bound, 0.25 if case.startswith(("qwen3_5", "gemma4")) else 0.0)
    assert (logits(found) - logits(model)).norm() < bound * logits(model).norm()
    with torch.inference_mode():
        own = found(input_ids=TEXT, output_hidden_states=True).hidden_states[0]
        assert torch.equal(families.embedded(ModelParts.of(found), TEXT), own)
    if counts_columns(case):
        pytest.skip("the pipeline refuses it with this version of transformers")
    texts = []
    for more in ({"schedule": "plain"}, {}):
        with Pipeline(tmp_path / "m.gguf", "ngram", **more) as pipe:
            texts.append(pipe.generate(TEXT, max_new_tokens=24, do_sample=False))
            assert (pipe.report.stages[-1].forward == "native") is not OF_OLDER_VERSIONS.get(case, False)
    assert torch.equal(*texts)


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_experts_may_be_in_blocks_and_in_floats(tmp_path, case):
    types = {"ffn_gate_exps": "f32", "ffn_down_exps": "bf16", "": "q8_0"}
    model = written(case, tmp_path / "m.gguf", types)
    found = load_model(tmp_path / "m.gguf")
    own, like = found.model.layers[1].mlp.experts, model.model.layers[1].mlp.experts
    gate = like.gate_up_proj.mT[:, ::2] if case == "gpt_oss" else like.gate_up_proj.chunk(2, 1)[0]
    assert torch.equal(own.gate.weight, gate.flatten(0, 1))
    assert isinstance(own.up, QuantizedLinear)
    assert (logits(found) - logits(model)).norm() < 0.4 * logits(model).norm()
    with Pipeline(tmp_path / "m.gguf") as pipe:
        pipe.generate(TEXT, max_new_tokens=4, do_sample=False)
        assert pipe.report.stages[-1].forward == "native"


@pytest.mark.parametrize(("mixed", "gates"), [("q8_0", "q4_0"), ("q5_1", "f32"), ("f16", "q8_0")])
def test_queries_and_gates_of_a_delta_net_may_be_of_two_types(tmp_path, mixed, gates):
    """They are one matrix in transformers' Qwen3-Next."""
    types = {"attn_qkv": mixed, "attn_gate": gates, "": "f32"}
    more, metadata = CASES["qwen3_next"]
    model = tiny("qwen3_next", SIZES | more)
    values = {f"qwen3next.{key}": value for key, value in metadata.items()}
    stored = write(model, tmp_path / "m.gguf", types, metadata=values)
    found = load_model(tmp_path / "m.gguf")
    whole, x = found.model.layers[0].linear_attn.in_proj_qkvz, torch.randn(5, SIZES["hidden_size"])
    wanted = x @ stored["model.layers.0.linear_attn.in_proj_qkvz.weight"].T
    assert isinstance(whole, JoinedLinear)
    # Products with blocks round their inputs to 8 bits.
    assert (whole(x) - wanted).norm() < 0.02 * wanted.norm()
    with Pipeline(tmp_path / "m.gguf") as pipe:
        pipe.generate(TEXT, max_new_tokens=4, do_sample=False)
        assert pipe.report.stages[-1].forward == "native"


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_first_files_of_qwen3_next_have_one_matrix(tmp_path, kind):
    more, metadata = CASES["qwen3_next"]
    model = tiny("qwen3_next", SIZES | more)
    values = {f"qwen3next.{key}": value for key, value in metadata.items()}
    stored = write(model, tmp_path / "m.gguf", {"ssm_in": kind, "": "f32"}, metadata=values)
    found = load_model(tmp_path / "m.gguf").model.layers[0].linear_attn.in_proj_qkvz
    weight, x = stored["model.layers.0.linear_attn.in_proj_qkvz.weight"], torch.randn(5, SIZES["hidden_size"])
    assert (found(x) - x @ weight.T).norm() < 0.02 * (x @ weight.T).norm()


@pytest.mark.parametrize("case", ["qwen3_5_text", "qwen3_next"])
def test_outputs_of_a_delta_net_keep_their_order_in_blocks(tmp_path, case):
    """Each module multiplies as the one of the model does, whatever the order of its heads in the file."""
    need(case)
    more, metadata = CASES[case]
    model = tiny(case, SIZES | more)
    name = next(row.name for row in ARCHITECTURES if row.model_type == case)
    stored = write(
        model, tmp_path / "m.gguf", "q8_0", metadata={f"{name}.{key}": value for key, value in metadata.items()}
    )
    found = load_model(tmp_path / "m.gguf")
    for at, module in found.model.layers[0].linear_attn.named_children():
        if at.startswith("in_proj") or at == "out_proj":
            weight = stored[f"model.layers.0.linear_attn.{at}.weight"]
            x = torch.randn(7, weight.shape[1])
            assert (module(x) - x @ weight.T).norm() < 0.02 * (x @ weight.T).norm()


@pytest.mark.parametrize(
    ("case", "types"),
    [("qwen3_5_text", "q8_0"), ("mixtral", {"ffn_down_exps": "f16", "": "q8_0"}), ("gpt_oss", "q8_0")],
)
def test_a_draft_in_blocks_runs_in_a_worker(tmp_path, case, types):
    """Its modules, also those of experts, are made again in the other process."""
    written(case, tmp_path / "m.gguf", types)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    with Pipeline(tmp_path / "m.gguf", schedule="plain") as pipe:
        wanted = pipe.generate(TEXT, **options)
    with Pipeline(tmp_path / "m.gguf", tmp_path / "m.gguf", schedule="workers") as pipe:
        assert torch.equal(pipe.generate(TEXT, **options), wanted)
        assert driver_of(pipe).peers[0].failure() is None  # whether it has drafted in so short a text is a race


def test_of_a_table_in_blocks_the_rows_that_were_read_are_compared(tmp_path, monkeypatch):
    """Gemma 4's inputs of layers come from a table of gigabytes, which stays in its file."""
    more, metadata = CASES["gemma4_text"]
    large = {"vocab_size": 8192, "vocab_size_per_layer_input": 8192}
    monkeypatch.setitem(CASES, "gemma4_text", (more | large, metadata))
    written("gemma4_text", tmp_path / "m.gguf", "q8_0")
    with Pipeline(tmp_path / "m.gguf", schedule="plain") as pipe:
        pipe.generate(TEXT, max_new_tokens=2, do_sample=False)
        form = runtime_of(pipe.target).forms[NATIVE].form
        blocks = pipe.target.model.embed_tokens_per_layer.blocks
        assert blocks.nbytes >= TABLE
        blocks[4000] += 1
        # Each of them compares another part of the rest.
        assert all(form.is_current() for _ in range(300))
        blocks[TEXT[0, 7]] += 1
        assert not form.is_current()


def test_a_draft_with_tiled_heads_runs_in_a_worker(tmp_path):
    """Its modules are made again in the other process."""
    written("qwen3_5_text", tmp_path / "m.gguf", "q8_0")
    texts = []
    for drafts, more in ((None, {"schedule": "plain"}), (tmp_path / "m.gguf", {"schedule": "workers"})):
        with Pipeline(tmp_path / "m.gguf", *([drafts] if drafts else []), **more) as pipe:
            texts.append(pipe.generate(TEXT, max_new_tokens=16, do_sample=False))
    assert torch.equal(*texts)


def test_layers_of_a_draft_head_are_left_out(tmp_path, capsys):
    need("qwen3_5_text")
    model = tiny("qwen3_5_text", SIZES | CASES["qwen3_5_text"][0])
    values = OF_DELTA | SECTIONS | {"nextn_predict_layers": 1, "block_count": 5}
    write(
        model, tmp_path / "m.gguf", "f32", metadata={f"qwen35.{key}": value for key, value in values.items()},
        tensors={"blk.4.nextn.eh_proj.weight": torch.ones(64, 128).numpy()},
    )  # fmt: skip
    found = load_model(tmp_path / "m.gguf")
    assert "m.gguf has an MTP layer, which is no part of the model: the draft 'mtp' reads it" in capsys.readouterr().err
    torch.testing.assert_close(logits(found), logits(model))
    load_model(tmp_path / "m.gguf")
    assert "MTP" not in capsys.readouterr().err  # it is said once


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("qwen3_5_text", "ssm.inner_size", 190, r"ssm\.inner_size is 190, with 6 heads of values and 2 of keys"),
        ("qwen3_5_text", "attention.recurrent_layers", [True, False, True, False], r"damaged: its qwen35\.attention\.recurrent_layers does not fit"),
        ("qwen3_5_text", "attention.recurrent_layers", 4, r"recurrent_layers does not fit"),
        ("qwen3_5_text", "ssm.group_count", 4, r"with 6 heads of values and 4 of keys"),
        ("qwen3_5_text", "ssm.state_size", 8, r"ssm_conv1d\.weight is \[256, 4\], and .* \[224, 1, 4\]"),
        ("qwen3_next", "ssm.conv_kernel", 3, r"ssm_conv1d\.weight is \[256, 4\], and .* \[256, 1, 3\]"),
        ("dots1", "expert_gating_func", 1, r"dots1\.expert_gating_func is 1 \(a mixture of experts\), which is not supported"),
        ("dots1", "leading_dense_block_count", 2, r"has no tensor blk\.1\.ffn_gate\.weight"),
        ("deepseek_v2", "attention.key_length", 8, r"damaged: 8 elements of a key of 8 are rotated"),
        ("deepseek_v2", "expert_weights_norm", True, r"deepseek2\.expert_weights_norm is True .* not supported"),
        ("deepseek_v3", "attention.value_length_mla", 12, r"attn_v_b\.weight is \[4, 16, 32\], and this matrix of this model \[4, 12, 32\]"),
        ("deepseek_v3", "attention.kv_lora_rank", 24, r"attn_kv_a_mqa\.weight is \[40, 64\], and .* \[32, 64\]"),
        ("deepseek_v3", "attention.q_lora_rank", 0, r"has no tensor blk\.0\.attn_q\.weight"),
        ("deepseek_v3", "rope.scaling.attn_factor", 1.5, r"attn_factor is 1\.5, which is not supported with latents"),
        ("deepseek_v3", "rope.scaling.yarn_attn_factor", 1.5, r"yarn_attn_factor is 1\.5, which is not supported"),
        ("ministral3", "rope.scaling.yarn_attn_factor", 0.0, r"damaged: its mistral3\.rope\.scaling\.yarn_attn_factor is 0\.0"),
        ("olmo2", "rope.scaling.yarn_attn_factor", 1.5, r"yarn_attn_factor is 1\.5, which is not supported"),
        ("deepseek_v3", "rope.scaling.original_context_length", 0, r"damaged: its deepseek2\.rope\.scaling\.original_context_length is 0"),
        ("deepseek_v3", "rope.freq_base", 1.0, r"describes no deepseek_v3 model: .*division by zero"),
        ("deepseek_v3", "expert_group_count", 3, r"damaged: it chooses \d of 8 experts, out of \d of 3 groups"),
        ("deepseek_v3", "expert_group_count", 0, r"damaged: its deepseek2\.expert_group_count is 0"),
        ("qwen3_next", "expert_used_count", 7, r"damaged: it chooses 7 of 4 experts, out of 1 of 1 groups"),
        ("deepseek_v2", "attention.head_count", 3, r"\A[^\n]*(not a multiple of|attn_q\.weight is)[^\n]*\Z"),
        # Before memory is taken for tables of rotations.
        ("lfm2", "attention.key_length", 1 << 31, r"attn_q\.weight is \[64, 64\], and .* \[8589934592, 64\]"),
        ("stablelm", "rope.dimension_count", 1 << 31, r"damaged: 2147483648 elements of a head of 16 are rotated"),
        ("lfm2", "shortconv.l_cache", 4, r"shortconv\.conv\.weight is \[64, 3\], and .* \[64, 1, 4\]"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_named(tmp_path, monkeypatch, case, key, value, message):
    more, metadata = CASES[case]
    monkeypatch.setitem(CASES, case, (more, metadata | {key: value}))
    written(case, tmp_path / "m.gguf", "f32")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("case", "tensor", "shape", "message"),
    [
        ("lfm2", "token_embd.weight", (), r"damaged: tensor token_embd\.weight is \[\], and no matrix"),
        ("lfm2", "token_embd.weight", (1, 64), r"describes no lfm2 model: Padding_idx must be within num_embeddings"),
        ("qwen3_next", "blk.0.attn_gate.weight", (), r"tensor blk\.0\.attn_gate\.weight is \[\], and this part of \d+ rows"),
    ],
)  # fmt: skip
def test_tensors_of_other_shapes_are_named(tmp_path, case, tensor, shape, message):
    written(case, tmp_path / "m.gguf", "f32")
    file = GgufFile.open(tmp_path / "m.gguf")
    other = replace(file.tensors[tensor], shape=shape)
    with pytest.raises(ValueError, match=message):
        model_of(replace(file, tensors={**file.tensors, tensor: other}))


def test_sizes_of_one_in_front_change_nothing(tmp_path):
    model = written("qwen3_5_text", tmp_path / "m.gguf", "f32")
    file = GgufFile.open(tmp_path / "m.gguf")
    tensors = {
        name: replace(tensor, shape=(1, *tensor.shape)) for name, tensor in file.tensors.items() if "ssm" in name
    }
    found = model_of(replace(file, tensors={**file.tensors, **tensors}))
    torch.testing.assert_close(logits(found), logits(model))
