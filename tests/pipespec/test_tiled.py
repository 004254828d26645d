"""Models with quantised matrices as they are on a GPU: in tiles, here on the CPU. Their logits are those of the dequantised model, and captured texts those of plain decoding."""

import copy
import pickle
import warnings

import pytest
import torch

from pipespec import Pipeline
from pipespec.engine.attention import ATTENTION
from pipespec.engine.forward import described as described_form
from pipespec.models import tiled
from pipespec.models.loading import load_model
from pipespec.models.quantized import (
    HeldMatrix,
    Int8Linear,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    check_files,
)
from pipespec.models.quantizing import held_modules, quantized, skeleton
from pipespec.models.tiled import TiledEmbedding, TiledLinear, on_gpu
from pipespec.schedules.base import SpeedWarning
from pipespec_kernels.formats import dequantize, quantize
from pipespec_kernels.tiles import in_tiles
from tests.conftest import VOCABULARY, left_pad, random_prompts
from tests.pipespec import gguf_files
from tests.pipespec import test_gguf_architectures as gguf_architectures
from tests.pipespec import test_group_checkpoints as group_checkpoints
from tests.pipespec.test_fused import check_static_logits
from tests.pipespec.test_graph_emulator import HOW
from tests.pipespec.test_native import make
from tests.support.graph_emulator import Emulator
from tests.support.ways import driver_of

SIZES = gguf_files.LARGE | {"vocab_size": VOCABULARY}
MIXED = {"blk.0.attn_v": "q6_k", "blk.1.ffn_up": "q5_1", "token_embd": "q6_k", "output": "q8_0", "": "q4_k"}
"""By tensors, the first that fits: as in files of llama.cpp, matrices of one input have several formats."""


def dequantised(model, dtype):
    """The model with modules of torch and transformers, whose weights are those of the blocks."""
    made = type(model)(copy.deepcopy(model.config)).to(dtype)
    for name, module in model.named_modules():
        if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
            made.get_submodule(name).weight.data = dequantize(module.matrix).to(dtype)
            if getattr(module, "bias", None) is not None:
                made.get_submodule(name).bias.data = module.bias.data.to(dtype)
        elif not list(module.children()) and module._parameters:
            made.get_submodule(name).load_state_dict({k: v.to(dtype) for k, v in module.state_dict().items()})
    return made.eval()


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_the_dequantised_model(name, dtype):
    blocks = quantized(make(name, vocab_size=VOCABULARY), "q4_0")
    wanted = dequantised(blocks, dtype)
    made = on_gpu(copy.deepcopy(blocks), "cpu", dtype)
    assert not any(isinstance(m, (QuantizedLinear, QuantizedEmbedding)) for m in made.modules())
    tokens = random_prompts(1, seed=3, shortest=20, longest=21)[0][None]
    with torch.inference_mode():
        ours, theirs = made(tokens).logits, wanted(tokens).logits
    assert ours.dtype == dtype
    # Few rows are summed one by one, in another order than the library's.
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=(1e-5 if dtype is torch.float32 else 0.03) * float(theirs.abs().max())
    )
    made.set_attn_implementation(ATTENTION)
    check_static_logits(made, dtype)


@pytest.fixture
def gpu(monkeypatch):
    emulator = Emulator()
    emulator.install(monkeypatch)
    return emulator


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Models that are loaded for a GPU are made as for one, and stay here. Returns the devices that were asked for."""
    asked = []

    def placed(model, device, dtype):
        asked.append((str(device), dtype))
        return on_gpu(model, "cpu", dtype)

    monkeypatch.setattr(tiled, "on_gpu", placed)
    return asked


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target with :data:`MIXED` matrices, a draft in 4 bits, and a checkpoint of floats of 8 bits."""
    folder = tmp_path_factory.mktemp("files")
    model = gguf_files.tiny("llama", SIZES)
    gguf_files.write(model, folder / "target.gguf", MIXED)
    gguf_files.write(model, folder / "draft.gguf", "q4_0")
    settings, pack = group_checkpoints.FLOATS_8["fp8, blocks"]
    group_checkpoints.write(folder / "float8", pack, settings, vocabulary=VOCABULARY)
    return folder / "target.gguf", folder / "draft.gguf", folder / "float8"


def test_a_file_is_loaded_in_the_dtype_of_gpus(files, on_the_cpu):
    """Each matrix once: a tied head has the memory of the embedding. Nothing is read from the file afterwards."""
    for dtype, wanted in (("auto", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        model = load_model(files[1], dtype=dtype, device="cuda:1")
        assert on_the_cpu.pop() == ("cuda:1", wanted)
        assert {p.dtype for p in model.parameters()} == {wanted}
        assert {m.form.format for m in model.modules() if isinstance(m, (TiledLinear, TiledEmbedding))} == {"q4_0"}
    assert model.lm_head.tiles.data_ptr() != model.model.embed_tokens.tiles.data_ptr()  # the file has both
    files[1].touch()
    check_files([model])
    blocks = quantized(make("gemma", vocab_size=VOCABULARY), "q8_0")
    made = on_gpu(blocks, "cpu", torch.float32)
    assert made.lm_head.tiles.data_ptr() == made.model.embed_tokens.tiles.data_ptr()


def test_a_checkpoint_of_integers_is_in_tiles(tmp_path, on_the_cpu):
    """In the dtype of its scales. One that no block holds is left to transformers, which a line says."""
    values = group_checkpoints.write(tmp_path, group_checkpoints.Matrix.gptq, group_checkpoints.GPTQ)
    model = load_model(tmp_path, device="cuda")
    assert on_the_cpu == [("cuda", torch.bfloat16)]
    for name, wanted in values.items():
        assert model.get_submodule(name).form.format == "q4_0"
        assert torch.equal(model.get_submodule(name).matrix.decoded(), wanted)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"bits": 4', '"bits": 3'))
    with (
        pytest.warns(
            UserWarning, match="weights of 3 bits is not supported.* So on cuda transformers' own modules multiply"
        ),
        pytest.raises(ImportError, match=r"optimum|gptqmodel"),
    ):
        load_model(tmp_path, device="cuda")  # which needs a package


@pytest.mark.parametrize("kind", group_checkpoints.FLOATS_8)
def test_floats_of_8_bits_stay(tmp_path, on_the_cpu, kind):
    """On a GPU they are in tiles, with the values of the checkpoint."""
    settings, pack = group_checkpoints.FLOATS_8[kind]
    values = group_checkpoints.write(tmp_path, pack, settings, vocabulary=VOCABULARY)
    model = load_model(tmp_path, device="cuda")
    assert on_the_cpu == [("cuda", torch.bfloat16)]
    for name, wanted in values.items():
        assert model.get_submodule(name).form.format == ("e4m3_16" if "small" in kind else "e4m3")
        assert torch.equal(model.get_submodule(name).matrix.decoded(), wanted)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.set_attn_implementation(ATTENTION)
    check_static_logits(model, torch.bfloat16)


def test_int8_is_dequantised_once(on_the_cpu):
    """A format without tiles: the products are the library's, and a line says what the weights take."""
    model = make("qwen2", vocab_size=VOCABULARY)
    blocks = quantized(model, "int8")
    wanted = {n: m.weight.float() * m.scale[:, None] for n, m in blocks.named_modules() if isinstance(m, Int8Linear)}
    with pytest.warns(
        UserWarning,
        match=r"no kernel for cpu multiplies with some of its weights .* GB of them become .* GB in bfloat16",
    ):
        made = on_gpu(blocks, "cpu", torch.bfloat16)
    for name, weight in wanted.items():
        assert type(made.get_submodule(name)) is torch.nn.Linear
        assert torch.equal(made.get_submodule(name).weight, weight.bfloat16())
    made.set_attn_implementation(ATTENTION)
    check_static_logits(made, torch.bfloat16)


def test_products_of_many_rows_have_the_same_weights(monkeypatch):
    """A tall matrix is written out in parts."""
    monkeypatch.setattr(tiled, "_ROWS", 16)
    matrix = quantize(torch.randn(53, 256), "q4_k")
    bias, x = torch.randn(53), torch.randn(20, 256)
    wanted = torch.nn.functional.linear(x, dequantize(matrix), bias)
    torch.testing.assert_close(tiled.product(x, in_tiles(matrix), bias), wanted)
    torch.testing.assert_close(tiled.product(x[:3], in_tiles(matrix), bias), wanted[:3])


def test_weights_in_tiles_count():
    """For the columns of a graph over a prompt. A head that is the embedding counts once."""
    model = make("gemma", vocab_size=VOCABULARY)
    made = on_gpu(quantized(model, "q4_0"), "cpu", torch.float32)
    assert tiled.weights_in(made) == tiled.weights_in(model) == sum(p.numel() for p in model.parameters())


def test_blocks_that_were_moved_are_refused():
    linear = QuantizedLinear(quantize(torch.randn(8, 32), "q8_0"))
    with pytest.raises(
        ValueError, match=r"a matrix in blocks on meta, inputs on cpu: .* load the model for its device"
    ):
        linear.to("meta")(torch.randn(1, 32))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
TYPES = {"ffn_up_exps": "q8_0", "blk.1.ffn_down_exps": "f32", "blk.1.ffn_gate_exps": "q8_0", "": "q4_0"}
"""Gates and ups of two formats in one layer, of one in the other, where the downs are floats."""


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    """A file of Qwen3-MoE."""
    path = tmp_path_factory.mktemp("experts") / "m.gguf"
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    model = gguf_files.tiny("qwen3_moe", gguf_files.SIZES | {"vocab_size": VOCABULARY} | EXPERTS)
    gguf_files.write(model, path, TYPES, metadata={f"qwen3moe.{key}": n for key, n in keys.items()})
    return path


def floats_of(part, experts):
    """The matrices of all experts."""
    weight = dequantize(part.matrix) if isinstance(part, QuantizedLinear) else part.weight
    return weight.unflatten(0, (experts, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_are_those_of_the_dequantised_model(with_experts, dtype):
    """Few columns, more than a launch takes, and so many that one expert comes after the other."""
    blocks = load_model(with_experts)
    made = on_gpu(copy.deepcopy(blocks), "cpu", dtype)
    own = {name: module for name, module in blocks.named_modules() if isinstance(module, QuantizedExperts)}
    assert [len(made.get_submodule(name).gate_up) for name in own] == [2, 1]
    for name, module in own.items():
        gate, up, down = (floats_of(part, 4).to(dtype) for part in (module.gate, module.up, module.down))
        for columns in (3, 20, 300):
            x = torch.randn(columns, 64, generator=torch.Generator().manual_seed(columns)).to(dtype)
            chosen = torch.rand(columns, 4, generator=torch.Generator().manual_seed(1)).topk(2).indices
            shares = torch.rand(columns, 2, generator=torch.Generator().manual_seed(2)).to(dtype)
            each = [module.act_fn(x @ gate[e].T) * (x @ up[e].T) @ down[e].T for e in range(4)]
            wanted = torch.stack(each, 1)[torch.arange(columns)[:, None], chosen] * shares[..., None]
            ours = made.get_submodule(name)(x, chosen, shares)
            at_most = (1e-5 if dtype is torch.float32 else 0.03) * float(wanted.abs().max())
            torch.testing.assert_close(ours, wanted.sum(1), rtol=0, atol=at_most)


def test_experts_whose_rows_fill_no_bands_are_refused(tmp_path):
    sizes = gguf_files.SIZES | {"vocab_size": VOCABULARY} | EXPERTS | {"moe_intermediate_size": 36}
    model = gguf_files.tiny("qwen3_moe", sizes)
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 36}
    metadata = {f"qwen3moe.{key}": n for key, n in keys.items()}
    gguf_files.write(model, tmp_path / "m.gguf", {"down_exps": "f32", "": "q8_0"}, metadata=metadata)
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.experts: on a GPU .* a multiple of 8 rows, and these have 36"
    ):
        on_gpu(load_model(tmp_path / "m.gguf"), "cpu", torch.float32)


@pytest.mark.parametrize(
    ("types", "held"), [({"": "q4_0"}, {"q4_0"}), ({"attn_gate": "f32", "": "q8_0"}, {"q8_0", None})]
)
def test_gated_delta_nets_of_a_file(tmp_path, types, held):
    """Their queries and gates are two matrices, and their heads lie in another order than in the model."""
    gguf_architectures.need("qwen3_next")
    more, metadata = gguf_architectures.CASES["qwen3_next"]
    metadata = {f"qwen3next.{key}": value for key, value in metadata.items()}
    path = tmp_path / "m.gguf"
    stored = gguf_files.write(gguf_files.tiny("qwen3_next", gguf_files.SIZES | more), path, types, metadata=metadata)
    made = on_gpu(load_model(path), "cpu", torch.float32)
    found = made.model.layers[0].linear_attn
    formats = {part.form.format if isinstance(part, TiledLinear) else None for part in found.in_proj_qkvz.parts}
    assert formats == held
    for at in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
        weight = stored[f"model.layers.0.linear_attn.{at}.weight"]
        x = torch.randn(7, weight.shape[1])
        torch.testing.assert_close(found.get_submodule(at)(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    built = skeleton(type(made), made.config, pickle.loads(pickle.dumps(held_modules(made))))
    ours, theirs = ({name: (t.shape, t.dtype) for name, t in m.state_dict().items()} for m in (made, built))
    assert ours == theirs


def test_captured_texts_with_experts(gpu, with_experts, on_the_cpu):
    """In transformers' modules, whose experts need nothing from the host."""
    target = load_model(with_experts, dtype="float32", device="cuda")
    ids, mask = left_pad(random_prompts(2, seed=5, shortest=6))
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None}  # fmt: skip
    twin = copy.deepcopy(target)
    with gpu.watching():
        with pytest.warns(SpeedWarning, match="run transformers' modules"):
            pipe = Pipeline(target, [copy.deepcopy(target)], **HOW["rounds"])
        with pipe:
            text = pipe.generate(ids, **options)
            assert pipe.report.schedule == "lockstep"
    twin.set_attn_implementation("sdpa")
    with Pipeline(twin, schedule="plain") as alone:
        assert torch.equal(text, alone.generate(ids, **options))
    assert gpu.faults == []
    assert gpu.replays > 0


def test_a_worker_builds_the_same_modules():
    model = on_gpu(quantized(make("gemma", vocab_size=VOCABULARY), "q4_0"), "cpu", torch.bfloat16)
    built = skeleton(type(model), model.config, pickle.loads(pickle.dumps(held_modules(model))))
    ours, theirs = model.state_dict(), built.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in ours.items() if "tiles" in name} == {
        name: (t.shape, t.dtype) for name, t in theirs.items() if "tiles" in name
    }
    assert built.model.embed_tokens.form == model.model.embed_tokens.form


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_worker_builds_the_same_experts(with_experts, is_on_gpu):
    """In blocks, in tiles, and in floats beside them."""
    model = load_model(with_experts)
    model = on_gpu(model, "cpu", torch.bfloat16) if is_on_gpu else model
    built = skeleton(type(model), model.config, pickle.loads(pickle.dumps(held_modules(model))))
    ours, theirs = (
        {name: t.shape for name, t in one.state_dict().items() if ".experts." in name} for one in (model, built)
    )
    assert ours == theirs
    assert len(ours) == (5 if is_on_gpu else 6)
    forms, theirs = (
        {at: part.form for at, part in one.named_modules() if isinstance(part, HeldMatrix)} for one in (model, built)
    )
    assert forms == theirs
    assert len({form.format for at, form in forms.items() if ".experts." in at}) == 2


def test_hooks_stay_here():
    """They may be anything, such as what no other process can have."""
    model = quantized(make("llama", vocab_size=VOCABULARY), "q4_0")
    linear = model.model.layers[0].mlp.up_proj
    linear.register_forward_hook(lambda *_: None, always_call=True, with_kwargs=True)
    linear.register_forward_pre_hook(lambda *_: None)
    linear.register_state_dict_post_hook(lambda *_: None)
    linear.forward = lambda x: x
    sent = pickle.loads(pickle.dumps(held_modules(model)))["model.layers.0.mlp.up_proj"]
    for name, hooks in vars(linear).items():
        if "_hooks" in name:
            assert vars(sent)[name] == {}, name
            assert type(vars(sent)[name]) is type(hooks)
    assert linear._forward_hooks
    assert "forward" in vars(linear)
    assert "forward" not in vars(sent)


@pytest.mark.parametrize(
    ("how", "kind", "exact"),
    [
        ("plain", "prompt", False),
        ("plain", "prompt", True),
        ("rounds", "greedy", False),
        ("rounds", "sampled", False),
        ("rounds", "floats of 8 bits", False),
        ("streams", "greedy", False),
    ],
)
def test_captured_texts_of_a_file(gpu, files, on_the_cpu, how, kind, exact):
    """With a draft in 4 bits: the text of plain decoding without graphs."""
    target, draft, float8 = (load_model(path, dtype="float32", device="cuda") for path in files)
    target = float8 if kind == "floats of 8 bits" else target
    lengths = {"shortest": 70, "longest": 120} if kind == "prompt" else {"shortest": 6}
    ids, mask = left_pad(random_prompts(2, seed=5, **lengths))
    options = {"max_new_tokens": 12, "do_sample": kind == "sampled", "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None}  # fmt: skip
    options |= {"seed": [3, 4], "temperature": 0.8} if kind == "sampled" else {}
    twin = copy.deepcopy(target)
    with gpu.watching(), warnings.catch_warnings(action="error"):
        with Pipeline(target, [] if how == "plain" else [draft], exact=exact, **HOW[how]) as pipe:
            text = pipe.generate(ids, **options)
            assert pipe.report.schedule == HOW[how]["schedule"]
            for stage in driver_of(pipe).stages:
                assert described_form(stage.model, stage.buffers.cache) == ("fused, exact" if exact else "fused")
    twin.set_attn_implementation("sdpa")
    with Pipeline(twin, schedule="plain") as alone:
        assert torch.equal(text, alone.generate(ids, **options))
    assert gpu.faults == []
    assert gpu.replays > 0
