"""Checkpoints of GPTQ, AWQ and compressed-tensors: each matrix holds the values of the checkpoint, exactly."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from pipespec import Pipeline
from pipespec.engine.forward import native_unsupported_reason
from pipespec.models import group_checkpoints
from pipespec.models.loading import load_model
from pipespec.models.quantized import QuantizedLinear
from pipespec_kernels.formats import dequantize
from tests.pipespec.checkpoints import save
from tests.pipespec.gguf_files import LARGE, tiny

TEXT = torch.tensor([[3, 9, 14, 15, 92, 65, 35, 8, 9, 79]])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in a word of AWQ


def words(numbers, bits, order=None):
    """Numbers ``[rows, columns]`` packed along the columns, lowest bits first."""
    count = 32 // bits
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // count, dtype=torch.int64)
    for i, column in enumerate(order or range(count)):
        packed |= numbers[:, column::count].long() << bits * i
    return torch.where(packed < 1 << 31, packed, packed - (1 << 32)).to(torch.int32)


class Matrix:
    """Random integer weights in groups, and the values that they stand for."""

    def __init__(self, outputs, inputs, *, bits=4, group=32, symmetric=True, dtype=torch.float16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        groups, top, self.bits = inputs // group, 1 << bits, bits
        self.numbers = torch.randint(top, (outputs, inputs), generator=generator)
        self.zeros = torch.full((outputs, groups), top // 2)
        if not symmetric:
            self.zeros = torch.randint(1, top if bits == 4 else top // 2, (outputs, groups), generator=generator)
        self.scales = (torch.rand(outputs, groups, generator=generator) * 0.02 + 0.001).to(dtype)
        code = self.numbers - self.zeros.repeat_interleave(group, 1)
        self.values = code * self.scales.float().repeat_interleave(group, 1)
        self.order = torch.arange(inputs) // group

    def gptq(self, less=1):
        return {
            "qweight": words(self.numbers, self.bits).T.contiguous(),
            "qzeros": words((self.zeros.T - less) % (1 << self.bits), self.bits),
            "scales": self.scales.T.contiguous(),
            "g_idx": self.order.to(torch.int32),
        }

    def awq(self):
        return {
            "qweight": words(self.numbers.T, 4, AWQ_ORDER),
            "qzeros": words(self.zeros.T, 4, AWQ_ORDER),
            "scales": self.scales.T.contiguous(),
        }

    def compressed(self, symmetric):
        found = {"weight_packed": words(self.numbers, self.bits), "weight_scale": self.scales, "weight_shape": torch.tensor(self.numbers.shape)}  # fmt: skip
        if not symmetric:
            found["weight_zero_point"] = words(self.zeros.T, self.bits).T.contiguous()
        return found

    def floats(self, kind):
        """The numbers as floats of 4 bits, with other scales than the integers have."""
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[self.numbers]
        packed = (self.numbers[:, ::2] | self.numbers[:, 1::2] << 4).to(torch.uint8)
        if kind == "mxfp4":
            scales = (120 + self.numbers[:, ::32] // 4).to(torch.uint8)
            self.values = e2m1 * (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
            return {"weight_packed": packed, "weight_scale": scales}
        scales = (self.numbers[:, ::16] * 20.0 + 0.25).to(torch.float8_e4m3fn)
        if kind == "modelopt":
            factor, names = torch.tensor(0.0007), ("weight", "weight_scale_2", "input_scale")
            of_group = scales.float() * factor
        else:
            factor, names = torch.tensor([1300.0]), ("weight_packed", "weight_global_scale", "input_global_scale")
            of_group = scales.float() / factor
        self.values = e2m1 * of_group.repeat_interleave(16, 1)
        return {names[0]: packed, "weight_scale": scales, names[1]: factor, names[2]: torch.ones(1)}

    def floats_of_8_bits(self, name, blocks):
        """The numbers as floats of 8 bits. ``blocks``: rows and inputs of a scale, 0: all inputs; None: of the matrix."""
        weight = (self.numbers - 8.0).to(torch.float8_e4m3fn)
        rows, inputs = weight.shape
        of_rows, of_inputs = blocks or (rows, 0)
        shape = -(-rows // of_rows), -(-inputs // of_inputs) if of_inputs else 1
        scales = 0.001 * (1 + torch.arange(shape[0] * shape[1]).float().view(shape) % 5)
        each = scales.repeat_interleave(of_rows, 0)[:rows].repeat_interleave(of_inputs or inputs, 1)[:, :inputs]
        self.values = weight.float() * each
        return {"weight": weight, name: scales if blocks else scales.view(())}

    def int8(self):
        return {"weight": (self.numbers - 128).to(torch.int8), "weight_scale": self.scales}


def write(folder, pack, settings, *, model_type="qwen2", tied=True, vocabulary=LARGE["vocab_size"], **matrix):
    """A checkpoint of a tiny model, its linear modules packed but for the head. Returns the values of the matrices."""
    model = tiny(model_type, LARGE, tie_word_embeddings=tied, vocab_size=vocabulary)
    save(model, folder, quantization_config=settings)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for seed, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            made = Matrix(*module.weight.shape, seed=seed, **matrix)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{leaf}": tensor.contiguous() for leaf, tensor in pack(made).items()}
            values[name] = made.values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return values


def compressed(kind="pack-quantized", bits=4, **more):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | more
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


GPTQ, GPTQ8 = {"quant_method": "gptq", "bits": 4}, {"quant_method": "gptq", "bits": 8}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
ODD, BF16 = {"symmetric": False}, {"dtype": torch.bfloat16}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOATS_8 = {
    "fp8, blocks": (FP8, lambda m: m.floats_of_8_bits("weight_scale_inv", (128, 128))),
    "fp8, matrices": (FP8 | {"weight_block_size": None}, lambda m: m.floats_of_8_bits("weight_scale_inv", None)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda m: m.floats_of_8_bits("weight_scale", (1, 0))),
    "compressed-tensors, rows": (compressed("float-quantized", 8), lambda m: m.floats_of_8_bits("weight_scale", (1, 0))),
    "compressed-tensors, blocks": (
        compressed("float-quantized", 8, block_structure=[64, 128]),
        lambda m: m.floats_of_8_bits("weight_scale", (64, 128)),
    ),
    "compressed-tensors, small blocks": (
        compressed("float-quantized", 8, block_structure=[32, 32]),
        lambda m: m.floats_of_8_bits("weight_scale", (32, 32)),
    ),
    "modelopt, floats of 8 bits": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda m: m.floats_of_8_bits("weight_scale", None)),
}  # fmt: skip
KINDS = {
    "gptq": (GPTQ, Matrix.gptq, {}, "q4_0"),
    "gptq, whole rows": (GPTQ, Matrix.gptq, {"group": 256}, "q4_0"),
    "gptq, zero points": (GPTQ, Matrix.gptq, ODD, "q5_0"),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda m: m.gptq(less=0), ODD, "q5_0"),
    "gptq, 8 bits": (GPTQ8, Matrix.gptq, {"bits": 8, "group": 64}, "q8_0"),
    "awq": (AWQ, Matrix.awq, ODD | {"group": 128}, "q5_0"),
    "compressed-tensors": (compressed(), lambda m: m.compressed(True), BF16, "q4_0"),
    "compressed-tensors, zero points": (compressed(), lambda m: m.compressed(False), ODD | BF16, "q5_0"),
    "compressed-tensors, 8 bits": (compressed("int-quantized", 8), Matrix.int8, BF16 | {"bits": 8, "group": 256}, "q8_0"),
    "compressed-tensors, nvfp4": (compressed("nvfp4-pack-quantized"), lambda m: m.floats("nvfp4"), {}, "nvfp4"),
    "compressed-tensors, mxfp4": (compressed("mxfp4-pack-quantized"), lambda m: m.floats("mxfp4"), {}, "mxfp4"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda m: m.floats("modelopt"), {}, "nvfp4"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_have_the_values_of_the_checkpoint(tmp_path, kind):
    settings, pack, matrix, form = KINDS[kind]
    values = write(tmp_path, pack, settings, **matrix)
    model = load_model(tmp_path)
    for name, expected in values.items():
        module = model.get_submodule(name)
        assert isinstance(module, QuantizedLinear)
        assert module.form.format == form
        assert torch.equal(dequantize(module.matrix), expected), name
    assert native_unsupported_reason(model) is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NAME = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("kind", FLOATS_8)
def test_floats_of_8_bits_become_16_on_a_cpu(tmp_path, kind):
    """A line says so. The model is one of 16 bits."""
    settings, pack = FLOATS_8[kind]
    values = write(tmp_path, pack, settings)
    with pytest.warns(UserWarning, match=r"no kernel for a CPU multiplies with floats of 8 bits: .* GB in bfloat16"):
        model = load_model(tmp_path)
    for name, expected in values.items():
        assert torch.equal(model.get_submodule(name).weight, expected.bfloat16()), name
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert native_unsupported_reason(model) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[f"{NAME}.weight"].view(torch.uint8)[3, 5].fill_(127), "up_proj: it is damaged: it has numbers that are not finite"),
        (lambda t: t[f"{NAME}.weight_scale_inv"].fill_(float("nan")), "not finite"),
        (lambda t: t.update({f"{NAME}.weight_scale_inv": torch.ones(3, 2)}), r"scales \[3, 2\] of \[512, 256\] floats of 8 bits are not supported"),
    ],
)  # fmt: skip
def test_floats_of_8_bits_that_do_not_fit_are_named(tmp_path, change, words):
    write(tmp_path, FLOATS_8["fp8, blocks"][1], FP8)
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("rows", "inputs", "scales", "sizes"),
    [
        (256, 16384, (2, 128), [(128, 128)]),  # as many blocks as rows
        (8, 384, (8, 3), []),
        (8, 384, (8,), [(128, 128)]),
        (8, 384, (8, 1), [None]),
        (256, 384, (2, 2), [(64, 128), (128, 256)]),
        (8, 384, (8, 12), []),  # groups of 32 inputs
        (64, 400, (2, 9), [(32, 48)]),
    ],
)
def test_scales_belong_to_what_their_shape_says(rows, inputs, scales, sizes):
    noise = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, inputs, generator=noise).to(torch.float8_e4m3fn)
    factors = torch.rand(scales, generator=noise) + 0.5
    found = group_checkpoints._floats8(weight, factors, *sizes)
    of_rows, of_inputs = (
        -(-rows // scales[0]),
        inputs if len(scales) == 1 or scales[1] == 1 else sizes[-1][1] if sizes else inputs // scales[1],
    )
    spread = (
        factors.reshape(scales[0], -1).repeat_interleave(of_rows, 0)[:rows].repeat_interleave(of_inputs, 1)[:, :inputs]
    )
    group = 16 if of_inputs % 128 else 128
    assert torch.equal(found.scale.repeat_interleave(group, 1)[:, :inputs], spread)


def test_floats_of_8_bits_beside_other_formats_are_refused(tmp_path):
    groups = {
        "a": {"format": "float-quantized", "weights": {"num_bits": 8}},
        "b": {"format": "int-quantized", "weights": {"num_bits": 8}},
    }
    write(tmp_path, FLOATS_8["fp8, blocks"][1], {"quant_method": "compressed-tensors", "config_groups": groups})
    with pytest.raises(ValueError, match="floats of 8 bits beside other formats"):
        load_model(tmp_path)


def test_tensors_that_transformers_passes_over_are_passed_over(tmp_path, monkeypatch):
    """As the layers for multi-token prediction in a checkpoint."""
    values = write(tmp_path, Matrix.gptq, GPTQ)
    changed(tmp_path, lambda t: t.update({"mtp.fc.weight": torch.ones(4, 4)}))
    with pytest.raises(ValueError, match=r"no module of a qwen2 model takes the tensor mtp\.fc\.weight"):
        load_model(tmp_path)
    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    assert torch.equal(dequantize(load_model(tmp_path).get_submodule(NAME).matrix), values[NAME])


def test_text_is_that_of_plain_decoding(tmp_path):
    write(tmp_path, Matrix.gptq, GPTQ)
    common = {"do_sample": False, "max_new_tokens": 24}
    with Pipeline(tmp_path, [], schedule="plain") as pipe:
        expected = pipe.generate(TEXT, **common)
    with Pipeline(tmp_path, ["ngram", tmp_path]) as pipe:
        assert torch.equal(pipe.generate(TEXT, **common), expected)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gemma"])
def test_other_families_and_files_in_parts(tmp_path, model_type):
    values = write(tmp_path, Matrix.gptq, GPTQ, model_type=model_type, tied=model_type == "gemma")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = load_model(tmp_path)
    for name, expected in values.items():
        assert torch.equal(dequantize(model.get_submodule(name).matrix), expected)
    with torch.inference_mode():
        assert model(input_ids=TEXT).logits.isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({f"{NAME}.g_idx": t[f"{NAME}.g_idx"].flip(0)}), "not neighbours"),
        (lambda t: t[f"{NAME}.scales"].fill_(float("inf")), "scales that are not finite"),
        (lambda t: t.update({f"{NAME}.bias": torch.ones(512)}), r"takes the tensor model.layers.1.mlp.up_proj.bias"),
        (lambda t: t.update({f"{NAME}.lora_A.weight": torch.ones(2, 2)}), r"takes the tensor model.layers.1.mlp.up_proj.lora_A.weight"),
        (lambda t: t.pop(f"{NAME}.scales"), r"there is no .*up_proj.scales"),
        (lambda t: t.update({f"{NAME}.qweight": t[f"{NAME}.qweight"][:, 8:].contiguous()}), r"numbers \[504, 256\] and zero points \[512, 8\]"),
        (lambda t: t.pop("model.norm.weight"), r"does not hold model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(8)}), r"model.norm.weight is \[8\]"),
    ],
)  # fmt: skip
def test_what_is_damaged_or_does_not_fit_is_named(tmp_path, change, words):
    write(tmp_path, Matrix.gptq, GPTQ)
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=words) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (GPTQ | {"bits": 3}, "checkpoint of gptq .* with weights of 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "in the format 'marlin'"),
        (AWQ | {"version": "gemv"}, "checkpoint of awq in the format 'gemv' with weights of 4 bits"),
        (compressed("naive-quantized", 8), "format 'naive-quantized' with weights of 8 bits"),
        (compressed(bits=3), "weights of 3 bits"),
        (compressed() | {"transform_config": {"config_groups": {"R1": {}}}}, r"inputs are rotated .*transform_config"),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path, settings, words):
    save(tiny("llama", LARGE), tmp_path, quantization_config=settings)
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [(GPTQ | {"bits": 3}, "weights of 3 bits"), (FP8 | {"fmt": "e5m2"}, "checkpoint of fp8 in the format 'e5m2'")],
)
def test_what_no_block_holds_is_left_to_packages_of_transformers(tmp_path, monkeypatch, settings, words):
    """Where they are installed."""
    model = tiny("llama", LARGE)
    save(model, tmp_path, quantization_config=settings)
    loaded = model, {"missing_keys": set()}
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *given, **options: loaded)
    with pytest.warns(UserWarning, match=f"{words}.* is not supported.* So transformers' own modules multiply"):
        assert load_model(tmp_path) is model


def tiny_scales(m):
    return m.gptq() | {"scales": m.scales.T.contiguous().bfloat16() * 2e-6}


@pytest.mark.parametrize(
    ("settings", "pack", "matrix", "factor"),
    [
        (GPTQ8, Matrix.gptq, {"bits": 8, "symmetric": False}, 1),
        (GPTQ, Matrix.gptq, {"group": 16}, 1),
        (GPTQ, tiny_scales, {"dtype": torch.bfloat16}, 2e-6),
    ],
    ids=["8 bits around another zero point", "groups of 16", "scales below float16"],
)
def test_a_matrix_that_no_block_holds_is_in_floats(tmp_path, settings, pack, matrix, factor):
    values = write(tmp_path, pack, settings, **matrix)
    with pytest.warns(
        UserWarning, match=r"no block holds the weights of 14 of its matrices \(model\.layers\.0\.self_attn\.q_proj"
    ):
        model = load_model(tmp_path)
    for name, expected in values.items():
        torch.testing.assert_close(
            model.get_submodule(name).weight.detach(), expected * factor, rtol=1e-2 if factor != 1 else 0, atol=0
        )


@pytest.mark.parametrize(
    ("settings", "pack", "matrix"),
    [
        (GPTQ | {"format": "gptq_v2"}, lambda m: m.gptq(less=0), {"symmetric": False}),
        (GPTQ | {"bits": "4", "checkpoint_format": "GPTQ_V2"}, lambda m: m.gptq(less=0), {"symmetric": False}),
        (GPTQ | {"checkpoint_format": "gptq", "sym": True}, lambda m: m.gptq(less=0), {}),
        (GPTQ | {"checkpoint_format": "gptq", "sym": True}, Matrix.gptq, {}),
        (GPTQ, lambda m: m.gptq(less=0), {}),
        (GPTQ | {"format": "gptq_v2", "sym": True}, Matrix.gptq, {}),
        (GPTQ | {"sym": False}, lambda m: m.gptq(less=1), {"symmetric": False}),
        ({"quant_method": "awq", "bits": 4, "format": "GEMM", "zero_point": False}, lambda m: {k: v for k, v in m.awq().items() if k != "qzeros"}, {}),
        (GPTQ, lambda m: m.gptq() | {"bias": torch.zeros(len(m.scales))}, {}),
    ],
    ids=["format", "capitals", "the second version under the name of the first", "sym", "no sym", "the first version under the name of the second", "not sym", "awq without zero points", "biases of zeros"],
)  # fmt: skip
def test_spellings_of_settings(tmp_path, settings, pack, matrix):
    values = write(tmp_path, pack, settings, model_type="llama", **matrix)
    model = load_model(tmp_path)
    for name, expected in values.items():
        assert torch.equal(dequantize(model.get_submodule(name).matrix), expected), name


def test_activation_order_without_the_order_is_refused(tmp_path):
    write(tmp_path, lambda m: {k: v for k, v in m.gptq().items() if k != "g_idx"}, GPTQ | {"desc_act": True})
    with pytest.raises(ValueError, match="there is no g_idx"):
        load_model(tmp_path)


def test_head_and_embedding_are_put_in_blocks_on_request(tmp_path):
    values = write(tmp_path, Matrix.gptq, GPTQ)
    with Pipeline(tmp_path, [], schedule="plain", weights="q8_0") as pipe:
        target = pipe.target
    assert target.lm_head.form.format == target.model.embed_tokens.form.format == "q8_0"
    for name, expected in values.items():
        assert torch.equal(dequantize(target.get_submodule(name).matrix), expected)


def packed_experts(model, tensors):
    """Pack the experts of gpt-oss in place. Returns the values of the matrices ``[experts, inputs, outputs]``."""
    values = {}
    for seed, (name, module) in enumerate(model.named_modules()):
        for part in ("gate_up_proj", "down_proj") if name.endswith("experts") else ():
            count, inputs, outputs = getattr(module, part).shape
            made = Matrix(count * outputs, inputs, seed=seed)
            stored = made.floats("mxfp4")
            del tensors[f"{name}.{part}"]
            tensors[f"{name}.{part}_blocks"] = stored["weight_packed"].view(count, outputs, -1, 16)
            tensors[f"{name}.{part}_scales"] = stored["weight_scale"].view(count, outputs, -1)
            values[f"{name}.{part}"] = made.values.view(count, outputs, inputs).mT
    return values


def gpt_oss(folder):
    model = tiny("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=32)
    save(model, folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, values in packed_experts(model, tensors).items():
            model.get_parameter(name).copy_(values)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model, tensors


def test_experts_of_gpt_oss_stay_in_blocks(tmp_path):
    model, _ = gpt_oss(tmp_path)
    found = load_model(tmp_path)
    for own, like in zip(found.model.layers, model.model.layers, strict=True):
        count = own.mlp.experts.num_experts
        gate, up, down = (
            dequantize(getattr(own.mlp.experts, part).matrix).unflatten(0, (count, -1))
            for part in ("gate", "up", "down")
        )
        both = like.mlp.experts.gate_up_proj.mT
        assert torch.equal(gate, both[:, ::2])
        assert torch.equal(up, both[:, 1::2])
        assert torch.equal(down, like.mlp.experts.down_proj.mT)
    with torch.inference_mode():
        logits = [each(input_ids=TEXT).logits for each in (found, model)]
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[1].norm()
    with Pipeline(tmp_path) as pipe:
        pipe.generate(TEXT, max_new_tokens=4, do_sample=False)
        assert pipe.report.stages[-1].forward == "native"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"), r"experts: there is no down_proj_scales"),
        (lambda t: t["model.layers.0.mlp.experts.down_proj_scales"].fill_(255), "down_proj_scales is damaged"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj_bias": torch.zeros(4, 3)}),
            r"gate_up_proj_bias is \[4, 3\], and this model's \[4, 192\]",
        ),
    ],
)
def test_damaged_experts_of_gpt_oss_are_named(tmp_path, change, says):
    _, tensors = gpt_oss(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=says):
        load_model(tmp_path)
