"""Models out of GGUF files."""

import hashlib
import json
import math
import shutil
import struct
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pipespec import Pipeline, attach
from pipespec.checks.tokenizers import tokenizer_digest
from pipespec.cli.main import main
from pipespec.demo import family_path
from pipespec.engine.forward import native_unsupported_reason
from pipespec.models import description
from pipespec.models.gguf import GgufFile
from pipespec.models.gguf_tokenizer import gguf_tokenizer
from pipespec.models.integrity import not_finite
from pipespec.models.loading import load_config, load_model
from pipespec.models.quantized import QuantizedEmbedding, QuantizedLinear, pages_released
from pipespec.models.tokenizers import load_tokenizer
from pipespec_kernels.formats import QUANTIZERS, dequantize
from pipespec_spd.partition import Partition, load_ends, load_stage
from pipespec_spd.pipeline import SpeculativePipeline
from tests.pipespec.gguf_files import LARGE, SIZES, close, tiny, tokens, with_weights, write, write_again

gguf = pytest.importorskip("gguf")

TEXT = torch.tensor([[3, 9, 14, 15, 92, 65, 35, 8, 9, 79]])
NATIVE = ["llama", "qwen2", "qwen3", "phi3", "gemma", "mistral"]
"""Families whose files say nothing that is their own. The others are in ``test_gguf_architectures.py``."""


def logits(model, text=TEXT):
    with torch.inference_mode():
        return model(input_ids=text, use_cache=False).logits


# ---- the weights


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [(name, tied) for name in NATIVE for tied in (False, True) if tied or name != "gemma"],  # always tied
)
def test_a_file_is_read_as_the_model_that_was_written(tmp_path, model_type, tied):
    written = tiny(model_type, tie_word_embeddings=tied)
    stored = write(
        written, tmp_path / "m.gguf", {"token_embd": "q8_0", "ffn_down": "q5_1", "attn_v": "q8_0", "": "q4_0"}
    )
    model = load_model(tmp_path / "m.gguf")
    assert type(model) is type(written)
    assert isinstance(model.get_input_embeddings(), QuantizedEmbedding)
    assert isinstance(model.model.layers[1].mlp.down_proj, QuantizedLinear)
    expected = with_weights(written, stored)
    weights = model.model.layers[0].self_attn.o_proj.matrix
    assert weights.format.name == "q4_0"
    # Inputs are rounded to 8 bits.
    assert (logits(model) - logits(expected)).norm() < 0.1 * logits(expected).norm()
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (0, 1, 2)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_format_is_read(tmp_path, name):
    written = tiny("llama", LARGE)
    stored = write(written, tmp_path / "m.gguf", name)
    model = load_model(tmp_path / "m.gguf")
    for layer in range(2):
        for part in ("q_proj", "k_proj", "v_proj"):
            module = getattr(model.model.layers[layer].self_attn, part)
            assert torch.equal(dequantize(module.matrix), stored[f"model.layers.{layer}.self_attn.{part}.weight"])
    assert torch.equal(model.get_input_embeddings()(TEXT[0]), stored["model.embed_tokens.weight"][TEXT[0]])


@pytest.mark.parametrize(("kind", "dtype"), [("f32", torch.float32), ("f16", torch.float32), ("bf16", torch.bfloat16)])
def test_a_file_without_blocks_is_an_ordinary_model(tmp_path, kind, dtype):
    written = tiny("qwen2")
    stored = write(written, tmp_path / "m.gguf", kind)
    model = load_model(tmp_path / "m.gguf")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert model.dtype is dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_a_model_in_blocks_computes_in_float32_whatever_is_asked(tmp_path, dtype):
    write(tiny("qwen3"), tmp_path / "m.gguf")
    texts = []
    with pytest.warns(UserWarning, match=r"m\.gguf: .* in blocks.* float32.*: dtype='b?float16' has no effect"):
        asked = Pipeline(tmp_path / "m.gguf", "ngram", dtype=dtype)
    with asked, Pipeline(tmp_path / "m.gguf", "ngram") as own:
        for pipe in (asked, own):
            texts.append(pipe.generate(TEXT, max_new_tokens=12, do_sample=False))
            assert (pipe.report.stages[-1].forward, pipe.target.dtype) == ("native", torch.float32)
    assert torch.equal(*texts)


def test_a_file_without_blocks_has_the_dtype_that_is_asked(tmp_path):
    write(tiny("qwen3"), tmp_path / "m.gguf", "f16")
    with Pipeline(tmp_path / "m.gguf", dtype=torch.bfloat16) as pipe:
        pipe.generate(TEXT, max_new_tokens=4, do_sample=False)
        assert pipe.target.dtype is torch.bfloat16


def test_blocks_stay_in_the_file(tmp_path):
    write(tiny("qwen2", vocab_size=4096), tmp_path / "m.gguf", "q8_0")
    model = load_model(tmp_path / "m.gguf")
    places = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        for begin, end in [[int(x, 16) for x in line.split()[0].split("-")]]
        if begin <= model.lm_head.blocks.data_ptr() < end
    }
    assert places == {str(tmp_path / "m.gguf")}
    before = logits(model)
    model.lm_head.source.release_pages()
    assert torch.equal(logits(model), before)


def test_pages_are_released_while_blocks_are_packed(tmp_path, monkeypatch):
    write(tiny("llama"), tmp_path / "m.gguf")
    model, released = load_model(tmp_path / "m.gguf"), threading.Event()
    monkeypatch.setattr(GgufFile, "release_pages", lambda file: released.set())
    with pages_released(model):
        assert released.wait(60)
        released.clear()
    assert released.is_set()  # and at the end


def test_a_model_does_not_keep_the_vocabulary(tmp_path):
    write(tiny("llama"), tmp_path / "m.gguf")
    sources = {id(m.source): m.source for m in load_model(tmp_path / "m.gguf").modules() if hasattr(m, "source")}
    assert [source.metadata for source in sources.values()] == [{}]


def test_a_model_in_blocks_is_not_saved(tmp_path):
    write(tiny("llama"), tmp_path / "m.gguf")
    with pytest.raises(NotImplementedError, match="weights="):
        load_model(tmp_path / "m.gguf").save_pretrained(tmp_path / "saved")


# ---- rotary embeddings


def test_the_factors_of_llama_3_become_its_configuration(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    written = tiny("llama", rope_parameters=rope)
    plain = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    factors = (plain.model.rotary_emb.inv_freq / written.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 30
    write(written, tmp_path / "m.gguf", "f32", tensors={"rope_freqs.weight": factors})
    model = load_model(tmp_path / "m.gguf")
    assert torch.equal(model.model.rotary_emb.inv_freq, written.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(model), logits(written))

    write(written, tmp_path / "odd.gguf", "f32", tensors={"rope_freqs.weight": factors * 0 + 3})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight holds factors that are not those of LLaMA 3"):
        load_model(tmp_path / "odd.gguf")


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotary_embeddings(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    written = tiny("qwen2", rope_parameters=rope)
    scaling = "qwen2.rope.scaling"
    more = {f"{scaling}.type": kind, f"{scaling}.factor": 4.0, f"{scaling}.original_context_length": 64}
    write(written, tmp_path / "m.gguf", "f32", metadata=more)
    torch.testing.assert_close(logits(load_model(tmp_path / "m.gguf")), logits(written))
    write(written, tmp_path / "odd.gguf", metadata=more | {f"{scaling}.type": "longrope"})
    with pytest.raises(ValueError, match="RoPE of the type 'longrope'"):
        load_model(tmp_path / "odd.gguf")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # files of 2023
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, {"rope_type": "default"}),
        ({"scaling.type": "yarn"}, {"rope_type": "default"}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0, "scaling.attn_factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "attention_factor": 2 * (0.1 * math.log(4) + 1)},
        ),
    ],
)
def test_scales_of_rotary_embeddings(tmp_path, keys, expected):
    write(tiny("qwen2"), tmp_path / "m.gguf", metadata={f"qwen2.rope.{key}": value for key, value in keys.items()})
    found = load_config(tmp_path / "m.gguf").rope_parameters
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert "factor" in expected or "factor" not in found


GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SCALING = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0, "gemma3.attention.sliding_window": 32}  # fmt: skip
CAPS = {"gemma2.attn_logit_softcapping": 50.0, "gemma2.final_logit_softcapping": 30.0, "gemma2.attention.sliding_window": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "layers", "more", "metadata"),
    [
        ("gemma3_text", 7, {"rope_parameters": GEMMA_ROPE, "query_pre_attn_scalar": 64}, SCALING),
        ("gemma3_text", 62, {"query_pre_attn_scalar": 16}, SCALING | {"gemma3.rope.scaling.factor": 1.0}),  # 27B
        ("gemma2", 3, {"query_pre_attn_scalar": 64}, CAPS),
    ],
)
def test_gemma_2_and_3_have_their_scales_windows_and_factors(tmp_path, kind, layers, more, metadata):
    sizes = LARGE | {"num_hidden_layers": layers} | ({"hidden_size": 64} if layers > 9 else {})
    written = tiny(kind, sizes, tie_word_embeddings=True, sliding_window=32, **more)
    write(written, tmp_path / "m.gguf", "f32", metadata=metadata)
    text = torch.arange(60)[None] + 5
    with torch.inference_mode():
        torch.testing.assert_close(load_model(tmp_path / "m.gguf")(text).logits, written(text).logits)
        stored = write(written, tmp_path / "m.gguf", "q8_0", metadata=metadata)
        model = load_model(tmp_path / "m.gguf")
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert torch.equal(
        dequantize(model.model.layers[0].mlp.up_proj.matrix), stored["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"llama.expert_group_count": 2},
            r"llama\.expert_group_count is 2 \(a mixture of experts\), which is not supp",
        ),
        ({"llama.expert_count": 8}, r"has no llama\.expert_used_count in its metadata"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale is 0\.5, which is not supported"),
        ({"llama.attention.value_length": 8}, r"value_length is 8, and its keys have 16"),
        ({"llama.rope.dimension_count": 8}, r"dimension_count is 8, and a head has 16"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"attn_factor is 2\.0, which is not supported without yarn"),
        ({"llama.rope.scaling.type": 3}, r"llama\.rope\.scaling\.type is 3, not text"),
        ({"llama.rope.freq_base": float("nan")}, r"llama\.rope\.freq_base is nan"),
        ({"llama.rope.freq_base": 0.0}, r"llama\.rope\.freq_base is 0\.0"),
        ({"llama.block_count": 4_000_000_000}, r"block_count is 4000000000, and there are tensors of 2 layers"),
        ({"llama.attention.head_count": 0}, r"head_count is 0"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, r"layer_norm_rms_epsilon is -1\.0"),
        ({"llama.rope.scaling.factor": -4.0}, r"rope\.scaling\.factor is -4\.0"),
        ({"llama.attention.head_count": "four"}, r"head_count is 'four', not an integer"),
    ],
)
def test_what_the_metadata_say_is_read_or_refused(tmp_path, metadata, message):
    write(tiny("llama"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value)


# ---- files by other names, in parts, and with types without kernels


def test_a_file_is_known_by_its_first_bytes_and_a_folder_by_its_only_file(tmp_path):
    written = tiny("llama")
    write(written, tmp_path / "sha256-0123")  # as ollama calls them
    expected = logits(load_model(tmp_path / "sha256-0123"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "MODEL.GGUF").write_bytes((tmp_path / "sha256-0123").read_bytes())
    with Pipeline(tmp_path / "folder", schedule="plain") as pipe:
        assert torch.equal(logits(pipe.target), expected)
    assert load_tokenizer(tmp_path / "folder").eos_token == "<end>"
    (tmp_path / "folder" / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds several GGUF files: name one of MODEL\.GGUF, other\.gguf"):
        Pipeline(tmp_path / "folder")


def split(path, count):
    """The file as ``count`` parts, as llama.cpp splits it: the metadata in the first one. Returns the path of the first part."""
    file = GgufFile.open(path)
    parts = [path.with_name(f"part-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for i, part in enumerate(parts):
        write_again(file, part, [*file.tensors][i::count], {}, split_count=count, split_no=i)
    return parts[0]


def test_a_part_of_a_split_file_stands_for_all(tmp_path):
    write(tiny("llama"), tmp_path / "m.gguf")
    first = split(tmp_path / "m.gguf", 3)
    assert torch.equal(logits(load_model(first)), logits(load_model(tmp_path / "m.gguf")))
    assert load_tokenizer(first).eos_token == "<end>"
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    assert torch.equal(logits(load_model(second)), logits(load_model(first)))
    assert load_tokenizer(second).eos_token == "<end>"
    shutil.copy(second, tmp_path / "other.gguf")
    with pytest.raises(
        ValueError, match=r"other\.gguf is part 2 of 3 of a split GGUF file, and its name does not say so"
    ):
        load_model(tmp_path / "other.gguf")
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*part-00002-of-00003\.gguf"):
        load_model(first)


HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Where the float16 scales of a block lie; at the beginning of others."""


def random_blocks(kind, rows, columns):
    """Blocks of a type that the package gguf reads and does not write. Scales are small float16 numbers, where the type has them."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(3).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)
    for at in HALVES.get(kind.name, (0,)):
        data[:, :, at : at + 2] = scale
    if kind.name == "MXFP4":
        data[:, :, 0] = 115 + data[:, :, 0] % 8
    if kind.name == "NVFP4":  # scales have no sign
        data[:, :, :4] &= 127
    if kind.name == "IQ1_M":  # in the upper quarters of four words
        for i in range(4):
            data[:, :, 49 + 2 * i] = data[:, :, 49 + 2 * i] & 15 | (int(scale.view(np.uint16)[0]) >> 4 * i & 15) << 4
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_types_with_kernels_stay_as_they_are(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    write(tiny("llama", LARGE), tmp_path / "m.gguf")
    file = GgufFile.open(tmp_path / "m.gguf")
    data = random_blocks(kind, 512, 256)
    write_again(file, tmp_path / "odd.gguf", [*file.tensors], {"blk.1.ffn_up.weight": (data, kind)})
    matrix = load_model(tmp_path / "odd.gguf").model.layers[1].mlp.up_proj.matrix
    assert matrix.format.name == name.lower()
    assert np.array_equal(matrix.data, data)


@pytest.mark.parametrize(
    ("name", "form"),
    [("IQ1_S", "table_iq2"), ("IQ1_M", "table_iq2"), ("IQ2_XXS", "table_iq2"), ("IQ2_XS", "table_iq2"), ("IQ2_S", "table_iq2"),
     ("IQ3_XXS", "table_iq3_xxs"), ("IQ3_S", "table_iq3_s"), ("TQ1_0", "q4_0"), ("TQ2_0", "q4_0"), ("NVFP4", "nvfp4")],
)  # fmt: skip
def test_other_types_become_blocks_with_the_same_weights(tmp_path, name, form):
    kind = gguf.GGMLQuantizationType[name]
    write(tiny("llama", LARGE), tmp_path / "m.gguf")
    file = GgufFile.open(tmp_path / "m.gguf")
    data = random_blocks(kind, 512, 256)
    new = {"blk.1.ffn_up.weight": (data, kind)}
    write_again(file, tmp_path / "odd.gguf", [*{**file.tensors, **new}], new)
    with pytest.warns(
        UserWarning, match=rf"odd\.gguf: matrices of the types {name} are held in blocks of 4\.5 to 6 bits"
    ):
        model = load_model(tmp_path / "odd.gguf")
    matrix = model.model.layers[1].mlp.up_proj.matrix
    assert matrix.format.name == form
    assert torch.equal(dequantize(matrix), torch.from_numpy(gguf.dequantize(data, kind)).float())


def test_nvfp4_has_a_factor_of_the_matrix(tmp_path):
    write(tiny("llama", LARGE), tmp_path / "m.gguf")
    file = GgufFile.open(tmp_path / "m.gguf")
    data = random_blocks(gguf.GGMLQuantizationType.NVFP4, 512, 256)
    new = {
        "blk.1.ffn_up.weight": (data, gguf.GGMLQuantizationType.NVFP4),
        "blk.1.ffn_up.scale": (np.array([0.37], np.float32), None),
        "blk.1.ffn_up.input_scale": (np.array([2.0], np.float32), None),
    }
    write_again(file, tmp_path / "odd.gguf", [*{**file.tensors, **new}], new)
    matrix = load_model(tmp_path / "odd.gguf").model.layers[1].mlp.up_proj.matrix
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.NVFP4)).float()
    torch.testing.assert_close(dequantize(matrix), expected * np.float32(0.37))


@pytest.mark.parametrize(
    ("kind", "factor", "says"),
    [
        ("NVFP4", [math.nan], r"tensor blk\.1\.ffn_up\.scale holds .* not finite"),
        ("NVFP4", [1.0, 2.0], r"tensor blk\.1\.ffn_up\.scale is \[2\] of the type F32, and blk\.1\.ffn_up\.weight has 1 factors"),
        ("IQ2_XS", [3.0], r"tensor blk\.1\.ffn_up\.scale has no place in a llama model"),
    ],
)  # fmt: skip
def test_other_factors_of_matrices_are_refused(tmp_path, kind, factor, says):
    write(tiny("llama", LARGE), tmp_path / "m.gguf")
    file, kind = GgufFile.open(tmp_path / "m.gguf"), gguf.GGMLQuantizationType[kind]
    new = {
        "blk.1.ffn_up.weight": (random_blocks(kind, 512, 256), kind),
        "blk.1.ffn_up.scale": (np.array(factor, np.float32), None),
    }
    write_again(file, tmp_path / "odd.gguf", [*{**file.tensors, **new}], new)
    with pytest.raises(ValueError, match=says):
        load_model(tmp_path / "odd.gguf")


def test_experts_of_nvfp4_have_a_factor_each(tmp_path):
    sizes = LARGE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
    write(tiny("qwen3_moe", sizes), tmp_path / "m.gguf", metadata={f"qwen3moe.{key}": n for key, n in keys.items()})
    file, kind = GgufFile.open(tmp_path / "m.gguf"), gguf.GGMLQuantizationType.NVFP4
    data, factors = random_blocks(kind, 4 * 64, 256), np.array([0.5, 1.0, 2.0, 0.25], np.float32)
    new = {
        "blk.1.ffn_up_exps.weight": (data.reshape(4, 64, -1), kind),
        "blk.1.ffn_up_exps.scale": (factors, None),
        "blk.1.ffn_up_exps.input_scale": (np.ones(4, np.float32), None),
    }
    write_again(file, tmp_path / "odd.gguf", [*{**file.tensors, **new}], new)
    matrix = load_model(tmp_path / "odd.gguf").model.layers[1].mlp.experts.up.matrix
    expected = gguf.dequantize(data, kind).astype(np.float32).reshape(4, 64, 256) * factors[:, None, None]
    assert torch.equal(dequantize(matrix), torch.from_numpy(expected).view(256, 256))


def test_scales_of_mxfp4_whose_weights_are_not_finite_are_named(tmp_path):
    write(tiny("llama"), tmp_path / "m.gguf", "mxfp4")
    content, tensor = (
        bytearray((tmp_path / "m.gguf").read_bytes()),
        GgufFile.open(tmp_path / "m.gguf").tensors["blk.0.ffn_up.weight"],
    )
    content[tensor.begin] = 252
    (tmp_path / "m.gguf").write_bytes(content)
    assert dequantize(load_model(tmp_path / "m.gguf").model.layers[0].mlp.up_proj.matrix).isfinite().all()
    content[tensor.begin] = 253
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ffn_up\.weight has scales whose weights are not finite"):
        load_model(tmp_path / "m.gguf")


# ---- damage


def at(content: bytes, name: bytes, offset: int, new: bytes) -> bytes:
    """The content with other bytes at a distance from the end of a name."""
    begin = content.index(name) + len(name) + offset
    return content[:begin] + new + content[begin + len(new) :]


NAME, HEADS = b"blk.1.attn_v.weight", b"llama.attention.head_count_kv"
DAMAGED = [
    (lambda c: c[:-64], "(?s)is truncated: tensor .*the file in byte"),
    *((lambda c, length=length: c[:length], "no GGUF file|truncated or damaged") for length in (0, 3, 8, 20, 24, 31, 100, 333, 999, 1501)),
    (lambda c: c[:4] + struct.pack(">I", 3) + c[8:], "big-endian"),
    (lambda c: c[:4] + struct.pack("<I", 1) + c[8:], "GGUF version 1"),
    (lambda c: b"PK" + c[2:], "is no GGUF file"),
    (lambda c: at(c, NAME, 20, struct.pack("<I", 9)), r"tensor blk\.1\.attn_v\.weight is of the type Q8_1, which is not supported"),
    (lambda c: at(c, NAME, 20, struct.pack("<I", 31)), r"is of the type Q4_0_4_4, which is not supported: .* take the file in Q4_0"),
    (lambda c: at(c, NAME, 24, struct.pack("<Q", 64)), r"tensor blk\.1\.attn_v\.weight begins at 64 of the weights"),
    (lambda c: at(c, NAME, 20, struct.pack("<I", 255)), r"tensor blk\.1\.attn_v\.weight is of an unknown type \(255\), which is not supported"),
    (lambda c: at(c, HEADS, 4, struct.pack("<I", 1)),
     r"tensor blk\.0\.attn_k\.weight is \[32, 64\], and .*k_proj\.weight of this model \[16, 64\]"),
    (lambda c: c.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_un.weight"), r"has no tensor blk\.1\.ffn_up\.weight"),
    (lambda c: c.replace(b"llama.block_count", b"lllma.block_count"), r"has no llama\.block_count in its metadata"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), DAMAGED, ids=[f"{i}: {says}" for i, (_, says) in enumerate(DAMAGED)])
def test_damaged_files_are_refused(tmp_path, change, says):
    write(tiny("llama"), tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(change((tmp_path / "m.gguf").read_bytes()))
    with pytest.raises(ValueError, match=says):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"metadata": {"split.count": 3, "split.no": 1}}, "is part 2 of 3 of a split GGUF file"),
        (
            {"tensors": {"blk.0.extra.weight": np.zeros(4, "f4")}},
            r"tensor blk\.0\.extra\.weight has no place in a llama",
        ),
    ],
)
def test_files_with_more_are_refused(tmp_path, more, says):
    write(tiny("llama"), tmp_path / "m.gguf", **more)
    with pytest.raises(ValueError, match=says):
        load_model(tmp_path / "m.gguf")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.gguf"):
        load_model(tmp_path / "absent.gguf")


@pytest.mark.parametrize("kind", ["q8_0", "q4_1", "f32"])
def test_weights_and_scales_that_are_not_finite_are_named(tmp_path, kind):
    write(tiny("llama"), tmp_path / "m.gguf", kind)
    tensor = GgufFile.open(tmp_path / "m.gguf").tensors["blk.0.ffn_up.weight"]
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    at = tensor.begin + (2 if kind == "q4_1" else 0)  # its second number is the least weight
    content[at : at + 4] = struct.pack("<f", math.nan) if kind == "f32" else b"\x00\x7e\x00\x00"
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"tensor blk\.0\.ffn_up\.weight (has scales|holds .*numbers) that are not finite"
    ):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("alignment", [1, 3, 4, 8, 16, 128])
def test_an_alignment_that_is_not_the_files_is_refused_or_harmless(tmp_path, alignment):
    write(tiny("llama"), tmp_path / "m.gguf", metadata={"general.alignment": 32})
    expected = logits(load_model(tmp_path / "m.gguf"))
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(at(content, b"general.alignment", 4, struct.pack("<I", alignment)))
    try:
        found = logits(load_model(tmp_path / "m.gguf"))
    except ValueError as error:
        assert str(tmp_path / "m.gguf") in str(error)  # noqa: PT017
    else:
        assert torch.equal(found, expected)


def test_a_window_of_an_architecture_without_windows_has_no_effect(tmp_path):
    write(tiny("llama"), tmp_path / "m.gguf")
    with Pipeline(tmp_path / "m.gguf") as pipe:
        text = pipe.generate(TEXT, max_new_tokens=40, do_sample=False)
    write(tiny("llama"), tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 8})
    with pytest.warns(UserWarning, match="sliding_window has no effect"), Pipeline(tmp_path / "m.gguf") as pipe:
        assert torch.equal(pipe.generate(TEXT, max_new_tokens=40, do_sample=False), text)


def test_norms_of_zeros_or_without_numbers_are_named(tmp_path):
    """As the rest of a download that was given its size before it came."""
    for value in (0.0, float("nan")):
        model = tiny("llama")
        with torch.no_grad():
            model.model.layers[1].input_layernorm.weight.fill_(value)
        write(model, tmp_path / "m.gguf")
        with pytest.raises(
            ValueError, match=r"tensor blk\.1\.attn_norm\.weight holds zeros only, or numbers that are not finite"
        ):
            load_model(tmp_path / "m.gguf")


# ---- the tokenizer


def test_the_tokenizer_and_its_template_come_out_of_the_file(tmp_path):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert tokenizer("abcd<end>z").input_ids == [29, 30, 1, 28]
    assert tokenizer.decode([29, 30, 1, 28]) == "abcd<end>z"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<begin>", "<end>", "<pad>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"


def test_smollm_splits_digits_before_the_rest(tmp_path):
    """As the published tokenizer: each digit, then the words of GPT-2. Two ends of a line before a digit are one token then."""
    texts = [*tokens(33), "1", "2", "12", "ĊĊ", "Ġ1", *tokens(96)[38:]]
    write(tiny("llama"), tmp_path / "m.gguf", vocabulary=texts, merges=["a b", "Ċ Ċ", "1 2", "Ġ 1"], pre="smollm")
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    for text, pieces in (
        ("\n\n1", ["ĊĊ", "1"]),
        ("ab 12\n\n\n2", ["ab", "Ġ", "1", "2", "ĊĊ", "Ċ", "2"]),
        ("c\n\nd", ["c", "Ċ", "Ċ", "d"]),
        ("a1b<end>2", ["a", "1", "b", "<end>", "2"]),
    ):
        assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == pieces
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizers_of_files_and_folders_are_compared(tmp_path):
    model = tiny("qwen2")
    write(model, tmp_path / "m.gguf")
    write(model, tmp_path / "other.gguf", vocabulary=[*tokens(96)[:-60], "zz", *tokens(96)[-59:]])
    (tmp_path / "folder").mkdir()
    gguf_tokenizer(tmp_path / "m.gguf").save_pretrained(tmp_path / "folder")
    file = tmp_path / "folder" / "tokenizer.json"
    content = json.loads(file.read_text())  # a folder's tokenizer does not have what pads the embedding
    content["model"]["vocab"] = {
        text: i for text, i in content["model"]["vocab"].items() if not text.startswith("[PAD9")
    }
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["id"] < 96
    ]  # transformers adds GPT-2's
    file.write_text(json.dumps(content))
    digests = [tokenizer_digest(tmp_path / name, model) for name in ("m.gguf", "other.gguf", "folder")]
    assert None not in digests
    assert digests[0] == digests[2] != digests[1]
    assert tokenizer_digest(load_model(tmp_path / "m.gguf"), load_model(tmp_path / "m.gguf")) == digests[0]


# ---- other ways in


@pytest.mark.parametrize(
    ("architecture", "columns", "message"),
    [
        ("mamba", None, r"m\.gguf: .* lack .*get the complete weights"),
        ("gemma3n", None, r"m\.gguf is of the architecture 'gemma3n', which transformers \S+ does not read"),
        ("bloom", 8, r"m\.gguf is of the architecture 'bloom', .*: its tensors have other shapes than its config"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*transformers dequantises")
def test_files_that_transformers_does_not_read_are_named(tmp_path, architecture, columns, message):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_block_count(1)
    if columns:
        writer.add_tensor("token_embd.weight", np.zeros((4, columns), np.float32))
    close(writer)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m.gguf")


def test_what_transformers_dequantises_is_said_to_cost_memory(tmp_path):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes().replace(b"qwen2", b"falcn")
    (tmp_path / "m.gguf").write_bytes(content)
    with (
        pytest.raises(ValueError, match="'falcn'"),
        pytest.warns(
            UserWarning, match=r"m\.gguf: transformers dequantises files of the architecture 'falcn': 0\.00 GB"
        ),
    ):
        load_model(tmp_path / "m.gguf")


def test_folders_of_mlx_are_named(tmp_path):
    written = tiny("qwen2")
    written.config.quantization = {"group_size": 64, "bits": 4}
    written.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds weights in MLX's format of 4 bits, which is not supported"):
        load_model(tmp_path)


def test_a_model_that_transformers_has_dequantised_is_an_ordinary_one(tmp_path):
    written = tiny("llama")
    stored = write(written, tmp_path / "m.gguf", metadata={"llama.vocab_size": SIZES["vocab_size"]})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert isinstance(model.config, LlamaConfig)
    torch.testing.assert_close(logits(model), logits(with_weights(written, stored)))


def test_a_pipeline_runs_files_as_target_and_draft(tmp_path):
    for seed, name in enumerate(("target", "draft")):
        write(tiny("qwen2", seed=seed, num_hidden_layers=2 - seed), tmp_path / f"{name}.gguf")
    with Pipeline(tmp_path, [tmp_path / "draft.gguf"], gguf_file="target.gguf", schedule="lockstep") as pipe:
        assert pipe.target.lm_head.source.path == tmp_path / "target.gguf"
        text = pipe.generate(TEXT, max_new_tokens=12)
    with Pipeline(str(tmp_path / "target.gguf")) as pipe:
        assert torch.equal(pipe.generate(TEXT, max_new_tokens=12), text)
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        Pipeline(tmp_path, gguf_file="absent.gguf")


@pytest.mark.parametrize("way", ["overwritten", "truncated", "a draft's"])
def test_a_file_that_changes_while_it_is_in_use_is_named_at_the_next_call(tmp_path, way):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    write(tiny("qwen2", seed=1, num_hidden_layers=1), tmp_path / "draft.gguf")
    changed = tmp_path / ("draft.gguf" if way == "a draft's" else "m.gguf")
    content = changed.read_bytes()
    model = load_model(tmp_path / "m.gguf")
    attach(model, tmp_path / "draft.gguf")
    with Pipeline(tmp_path / "m.gguf", tmp_path / "draft.gguf") as pipe:
        unused = load_model(changed)
        pipe.generate(TEXT, max_new_tokens=4)
        changed.write_bytes(b"" if way == "truncated" else content)
        for call in (pipe.generate, model.generate, lambda *_, **__: Pipeline(unused)):
            with pytest.raises(ValueError, match=rf"{changed} has changed since .*: load it again"):
                call(TEXT, max_new_tokens=4)


@pytest.mark.parametrize("way", ["renamed over", "deleted"])
def test_a_file_may_be_renamed_over_or_deleted_while_it_is_in_use(tmp_path, way):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    with Pipeline(tmp_path / "m.gguf") as pipe:
        expected = pipe.generate(TEXT, max_new_tokens=8)
        if way == "deleted":
            (tmp_path / "m.gguf").unlink()
        else:
            write(tiny("qwen2", seed=1), tmp_path / "new.gguf")
            (tmp_path / "new.gguf").rename(tmp_path / "m.gguf")
        assert torch.equal(pipe.generate(TEXT, max_new_tokens=8), expected)


def test_the_command_line_takes_a_file(tmp_path, capsys):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    assert main(["generate", "--target", str(tmp_path / "m.gguf"), "--prompt", "abcd", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()


# ---- the native form


@pytest.mark.parametrize("model_type", NATIVE)
def test_every_family_runs_natively_in_blocks(tmp_path, model_type):
    tied = model_type == "gemma"
    types = {"token_embd": "q6_k", "ffn_down": "q5_k", "attn_v": "q8_0", "attn_qkv": "q5_0", "": "q4_k"}
    write(tiny(model_type, LARGE, tie_word_embeddings=tied), tmp_path / "m.gguf", types)
    model = load_model(tmp_path / "m.gguf")
    assert native_unsupported_reason(model) is None


@pytest.mark.parametrize("change", ["eps", "bias", "rope", "scale", "rows"])
def test_a_decoder_that_computes_something_else_is_noticed(tmp_path, change, monkeypatch):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    model = load_model(tmp_path / "m.gguf")
    read = description.read

    def wrong(given):
        found = read(given)
        if change == "eps":
            return replace(found, shape=replace(found.shape, eps=2 * found.shape.eps + 1e-5))
        if change == "scale":
            return replace(found, shape=replace(found.shape, scale=1.001 * found.shape.scale))
        if change == "rope":
            return replace(
                found, rotary=lambda x, position_ids: model.model.rotary_emb(x, position_ids + (position_ids > 4))
            )
        first, *rest = found.layers
        if change == "bias":
            first = replace(first, v_bias=first.v_bias + 0.01)
        else:
            first = replace(first, up=first.up.rows(torch.arange(96).roll(1)))
        return replace(found, layers=(first, *rest))

    monkeypatch.setattr(description, "read", wrong)
    assert "differs from the model's own" in (native_unsupported_reason(model) or "")


def test_stages_of_one_target_have_its_text(tmp_path):
    write(tiny("llama", LARGE), tmp_path / "m.gguf", {"token_embd": "q6_k", "": "q4_k"})
    with Pipeline(tmp_path / "m.gguf", schedule="plain") as pipe:
        expected = pipe.generate(TEXT, max_new_tokens=20)
    with SpeculativePipeline(tmp_path / "m.gguf", "ngram", stages=2) as pipe:
        assert torch.equal(pipe.generate(TEXT, max_new_tokens=20), expected)
    model, partition = load_model(tmp_path / "m.gguf"), Partition((1, 1))
    second = load_stage(tmp_path / "m.gguf", partition, 1)
    own = model.model.layers[1].mlp.down_proj.matrix.data
    assert torch.equal(second.section.parts.layers[0].mlp.down_proj.matrix.data, own)
    ends = load_ends(tmp_path / "m.gguf")
    assert len(ends.model.layers) == 0
    assert torch.equal(ends.lm_head.matrix.data, model.lm_head.matrix.data)


def test_doctor_describes_a_file_and_a_folder(tmp_path, capsys):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    assert main(["doctor", str(tmp_path / "m.gguf"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == f"{tmp_path / 'm.gguf'}: qwen2, 2 layers of 64"
    assert "16 Q8_0" in facts["weights"]
    assert facts["tokenizer"] == "gpt2, split as qwen2: 96 tokens; no token before a text"
    assert (facts["a turn ends with"], facts["chat template"]) == ("<end>", "there")
    assert facts["runs on a CPU"] == "matrices stay in blocks, multiplied by the native form"
    assert "for 1,024 tokens in bfloat16;" in facts["memory"]
    assert main(["doctor", str(family_path("target"))]) == 0
    said = capsys.readouterr().out
    assert "multiplied by the native form" in said
    digest = hashlib.sha256((family_path("target") / "model.safetensors").read_bytes()).hexdigest()
    assert f"SHA-256           model.safetensors {digest}\n" in said
    assert "all weights are finite" in said
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert main(["doctor", str(tmp_path / "m.gguf")]) == 2


def test_doctor_names_tensors_that_are_not_finite(tmp_path, capsys):
    write(tiny("qwen2"), tmp_path / "m.gguf")
    tensors = GgufFile.open(tmp_path / "m.gguf").tensors

    def spoil(name: str, nan: bytes) -> None:
        with (tmp_path / "m.gguf").open("r+b") as file:
            file.seek(tensors[name].begin)
            file.write(nan)

    spoil("output_norm.weight", b"\x00\x00\xc0\x7f")
    assert not_finite(tmp_path / "m.gguf") == ["output_norm.weight"]
    assert main(["doctor", str(tmp_path / "m.gguf")]) == 1
    assert "NOT FINITE in 1 tensors (output_norm.weight)" in capsys.readouterr().out
    spoil("blk.1.ffn_down.weight", b"\x00\x7e")  # of the first block's scale
    assert sorted(not_finite(tmp_path / "m.gguf")) == ["blk.1.ffn_down.weight", "output_norm.weight"]

    tiny("qwen2").save_pretrained(tmp_path / "whole")
    assert not_finite(tmp_path / "whole") == []
    broken = tiny("qwen2")
    broken.model.norm.weight.data[3] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    assert not_finite(tmp_path / "broken") == ["model.norm.weight"]


def test_the_command_line_takes_another_tokenizer(tmp_path, capsys):
    write(tiny("qwen2"), tmp_path / "odd.gguf", pre="mystery")
    write(tiny("qwen2"), tmp_path / "m.gguf")
    command = ["generate", "--target", str(tmp_path / "odd.gguf"), "--prompt", "abcd", "--max-new-tokens", "4"]
    assert main(command) == 2
    assert "splits a text as 'mystery'" in capsys.readouterr().err
    assert main([*command, "--tokenizer", str(tmp_path / "m.gguf")]) == 0
