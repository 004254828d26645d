"""Every architecture of the table of GGUF files: the model that was written comes out, and stays in blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2PreTrainedModel
from transformers.models.nemotron import modeling_nemotron

from pipespec import Pipeline
from pipespec.models import families, gguf_models
from pipespec.models.compat import counts_columns, has_stacked_experts
from pipespec.models.gguf_architectures import ARCHITECTURES
from pipespec.models.loading import load_config, load_model
from pipespec.models.parts import ModelParts
from pipespec.models.quantized import QuantizedExperts, QuantizedLinear
from tests.pipespec.gguf_files import SIZES, tiny, write

pytest.importorskip("gguf")

TEXT = torch.arange(60)[None] + 5
PARTIAL: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}
WINDOWS: dict[str, Any] = {"num_hidden_layers": 5, "sliding_window": 32}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
OLMO_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.2079441541679836,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
COUNTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
CASES = {
    "llama": ({}, {}),
    "llama with biases": ({"mlp_bias": True, "attention_bias": True}, {}),
    "mixtral": ({"num_local_experts": 4}, {"expert_count": 4, "expert_used_count": 2}),
    "qwen2": ({}, {}),
    "qwen2_moe": (
        EXPERTS | {"shared_expert_intermediate_size": 64},
        COUNTS | {"expert_shared_feed_forward_length": 64},
    ),
    "qwen3_moe": (EXPERTS | {"norm_topk_prob": True}, COUNTS),
    "qwen3": ({}, {}),
    "phi3": (PARTIAL, {}),
    "gemma": ({"tie_word_embeddings": True}, {}),
    "gemma2": (
        WINDOWS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
        {"attention.sliding_window": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": (
        WINDOWS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
        {"attention.sliding_window": 32},
    ),
    "arcee": ({}, {}),
    "arcee with biases": ({"mlp_bias": True, "attention_bias": True}, {}),
    "cohere": ({"tie_word_embeddings": True, "logit_scale": 0.3}, {"logit_scale": 0.3}),
    "cohere with norms": (
        {"tie_word_embeddings": True, "logit_scale": 0.3, "use_qk_norm": True},
        {"logit_scale": 0.3},
    ),
    "cohere2": (
        WINDOWS | {"tie_word_embeddings": True, "logit_scale": 0.3},
        {"logit_scale": 0.3, "attention.sliding_window": 32},
    ),
    "ernie4_5": ({}, {}),
    "ernie4_5 with biases": ({"use_bias": True}, {}),
    "exaone4": ({"sliding_window": None, "layer_types": ["full_attention"] * 2}, {}),
    "exaone4 with windows": (
        WINDOWS | {"layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]},
        {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True, True, True, False, True]},
    ),
    "glm4": (PARTIAL, {}),
    "glm4 with biases": (PARTIAL | {"attention_bias": True}, {}),
    "granite": (
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
        {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.0},
    ),
    "granitemoe": (
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {
            "attention.scale": 0.3,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "logit_scale": 2.0,
            "expert_count": 4,
            "expert_used_count": 2,
        },
    ),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "rope_parameters": GPT_OSS_YARN},
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 32,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "hunyuan_v1_dense": ({}, {}),
    "mistral": ({"sliding_window": None}, {}),
    "ministral3": (
        {"rope_parameters": YARN},
        {
            "attention.temperature_scale": 0.1,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
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
    "seed_oss": ({}, {}),
    "smollm3": ({"num_hidden_layers": 5}, {}),
    "stablelm": (PARTIAL, {"use_parallel_residual": False}),
    "stablelm in parallel": (
        PARTIAL | {"use_parallel_residual": True, "use_qkv_bias": True},
        {"use_parallel_residual": True},
    ),
    "starcoder2": ({}, {}),
}
"""Of a model of a type: how its configuration differs, and what its file says of that."""

OF_OLDER_VERSIONS = {
    "gemma2": Gemma2PreTrainedModel._supports_sdpa,
    "nemotron": hasattr(modeling_nemotron, "NemotronSdpaAttention"),
}
"""Cases that run through modules where transformers is as in 5.0: its attention leaves out the caps, or has classes of its own."""


def written(case, path, types):
    """A random model of a case, in a file."""
    if case == "granitemoe" and not has_stacked_experts(case):
        pytest.skip("this version of transformers has a module per matrix of all experts, and files of it are refused")
    more, metadata = CASES[case]
    model = tiny(case.partition(" ")[0], SIZES | more)
    name = next(row.name for row in ARCHITECTURES if row.model_type == model.config.model_type)
    write(model, path, types, metadata={f"{name}.{key}": value for key, value in metadata.items()})
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
    monkeypatch.setattr(gguf_models, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    with pytest.raises(
        ValueError, match=r"the architecture 'olmo2' needs a newer version of transformers \(with olmo2\)"
    ):
        load_model(tmp_path / "m.gguf")


def test_a_version_of_transformers_with_other_experts_is_named(tmp_path, monkeypatch):
    written("mixtral", tmp_path / "m.gguf", "f32")
    monkeypatch.setattr(gguf_models, "has_stacked_experts", lambda model_type: False)
    with pytest.raises(ValueError, match=r"'llama' needs a newer version of transformers \(with mixtral\)"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("case", "without", "message"),
    [
        ("granite", "attention.scale", r"has no granite\.attention\.scale in its metadata"),
        ("cohere", "logit_scale", r"has no command-r\.logit_scale in its metadata"),
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
    model = written(case, tmp_path / "m.gguf", "q8_0")
    found = load_model(tmp_path / "m.gguf")
    # The router of shared experts and other routers are floats in files.
    linear = {module for name, module in found.named_modules() if not name.endswith("expert_gate")}
    assert not any(type(module) in (torch.nn.Linear, torch.nn.Embedding) for module in linear)
    assert any(isinstance(module, QuantizedLinear) for module in found.modules())
    # Where two experts are nearly equal, what is rounded chooses the other one.
    bound = 0.4 if any(isinstance(module, QuantizedExperts) for module in found.modules()) else 0.1
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
