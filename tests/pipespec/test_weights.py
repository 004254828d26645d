"""weights=: models that are quantised while they are loaded. The text is that of the quantised target, bit for bit."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipespec import Pipeline
from pipespec.checks.devices import weights_of_each
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward, native_unsupported_reason
from pipespec.models import quantizing
from pipespec.models.quantized import Int8Linear, QuantizedEmbedding, QuantizedLinear, has_blocks, with_kv_of
from pipespec.models.quantizing import quantized
from pipespec_kernels.decoder import NativeDecoder
from pipespec_kernels.formats import FORMATS, QUANTIZERS, dequantize
from tests.conftest import random_llama, random_prompts
from tests.pipespec.gguf_files import LARGE, SIZES, tiny, write
from tests.pipespec.test_native import logits_of

TEXT = torch.tensor([[3, 9, 14, 15, 92, 65, 35, 8, 9, 79]])
NEW = 24


@pytest.fixture(scope="module")
def model():
    return tiny("qwen2", LARGE)


def texts(pipe, *, rows=3):
    """Greedy and sampled texts of batches with prompts of different lengths."""
    ids = torch.randint(3, 96, (rows, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    common = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 2}
    return [
        pipe.generate(ids, do_sample=False, **common),
        pipe.generate(ids, do_sample=True, seed=3, **common),
        pipe.generate(ids[1:2], do_sample=False, max_new_tokens=NEW, pad_token_id=2),
    ]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_model_is_quantised_as_a_whole(model, name):
    made = quantized(model, name)
    assert type(model.lm_head) is torch.nn.Linear
    linears = [module for module in made.modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == 2 * 7 + 1
    ends = {made.lm_head.form.format, made.model.embed_tokens.form.format}
    assert (
        ends == {name if FORMATS[name].bytes_per_weight > FORMATS["q6_k"].bytes_per_weight else "q6_k"}
        or name == "q5_1"
    )
    up = made.model.layers[0].mlp.up_proj
    assert up.form.format == name
    original = model.model.layers[0].mlp.up_proj.weight
    assert (dequantize(up.matrix) - original).norm() < {"q2_k": 0.35, "q3_k": 0.2, "mxfp4": 0.15}.get(
        name, 0.1
    ) * original.norm()
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    assert native_unsupported_reason(made) is None
    with pytest.raises(ValueError, match="quantised already"):
        quantized(made, name)


def test_a_model_in_bfloat16_computes_in_float32(model):
    made = quantized(copy.deepcopy(model).bfloat16(), "q8_0")
    assert made.dtype is torch.float32
    assert native_unsupported_reason(made) is None


def test_tied_ends_stay_one_matrix():
    made = quantized(tiny("llama", tie_word_embeddings=True), "q4_0")
    assert made.lm_head.blocks is made.model.embed_tokens.blocks
    assert isinstance(made.model.embed_tokens, QuantizedEmbedding)
    assert native_unsupported_reason(made) is None


def test_rows_that_blocks_do_not_fill():
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    odd = LlamaForCausalLM(
        LlamaConfig(**(sizes | {"hidden_size": 96, "intermediate_size": 104, "num_attention_heads": 4}))
    ).eval()
    made = quantized(odd, "q4_k")
    assert made.model.layers[0].mlp.up_proj.form.format == "q5_0"
    assert made.lm_head.form.format == "q8_0"
    assert type(made.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert native_unsupported_reason(made) is None
    small = {"hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match="blocks of 32 weights fill the rows of no matrix of the LlamaForCausalLM"):
        quantized(LlamaForCausalLM(LlamaConfig(**(sizes | small))).eval(), "q8_0")


@pytest.mark.parametrize("native", [True, False])
def test_keys_and_values_of_blocks_are_bfloat16(model, native):
    """In every form, within their rounding, beside hidden states in float32; not where dtype= says float32."""
    made = quantized(model, "q8_0")
    tokens = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(2))

    def run():
        cache = RowCache.for_model(made, 2, 32)
        first = forward(made, tokens[:, :9], cache, keep=2, native=native)
        cache.truncate([9, 6])
        rest = torch.stack([tokens[0, 9:12], tokens[1, 6:9]])
        return cache, torch.cat([first, forward(made, rest, cache, keep=2, native=native)])

    cache, rounded = run()
    assert (cache.dtype, cache.compute_dtype, rounded.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert cache.matches(made)
    with_kv_of("float32", made)
    assert not cache.matches(made)
    cache, wide = run()
    assert cache.dtype is torch.float32
    assert 0 < (rounded - wide).abs().max() < 0.05 * wide.abs().max()


def test_dtype_says_how_keys_and_values_are_kept(model, tmp_path):
    model.save_pretrained(tmp_path)
    for dtype, kept in (("auto", torch.bfloat16), ("float32", torch.float32)):
        with Pipeline(tmp_path, weights="q8_0", dtype=dtype) as pipe:
            assert RowCache.for_model(pipe.target, 1, 8).dtype is kept
    assert RowCache.for_model(model, 1, 8).dtype is torch.float32


@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_the_text_is_that_of_plain_decoding(model, name, schedule):
    draft = tiny("qwen2", LARGE, num_hidden_layers=1)
    draft.lm_head, draft.model.embed_tokens = model.lm_head, model.model.embed_tokens
    with Pipeline(model, schedule="plain", weights=name, exact=True) as pipe:
        expected = texts(pipe)
        again = texts(pipe)
    with Pipeline(model, draft, schedule=schedule, lookahead=3, weights=[name, name], exact=True) as pipe:
        found = texts(pipe)
        report = pipe.report
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, again, expected))
    assert [stage.forward for stage in report.stages] == ["native"] * 2
    assert schedule == "workers" or report.stages[-1].drafted > 0  # a worker may be late
    assert any("weights" in decision for decision in report.decisions)


def test_threads_and_prompts_in_parts_do_not_change_the_text(model):
    made = quantized(model, "q5_k")
    with Pipeline(made, schedule="plain") as pipe:
        expected, before = texts(pipe), torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert all(map(torch.equal, texts(pipe), expected))
        finally:
            torch.set_num_threads(before)
        whole = pipe.generate(TEXT, max_new_tokens=NEW)
        pipe.generate(TEXT[:, :5], max_new_tokens=3)  # the cache holds another text's beginning
        assert torch.equal(pipe.generate(TEXT, max_new_tokens=NEW), whole)


def test_a_draft_out_of_a_file_runs_in_a_worker(model, tmp_path):
    write(model, tmp_path / "draft.gguf", {"token_embd": "q6_k", "": "q4_k"})
    with Pipeline(model, schedule="plain", weights="q8_0") as pipe:
        expected = texts(pipe)
    with Pipeline(model, tmp_path / "draft.gguf", schedule="workers", weights={"target": "q8_0"}) as pipe:
        assert all(map(torch.equal, texts(pipe), expected))
        assert pipe.report.stages[0].forward == "native"


@pytest.mark.parametrize("name", ["q4_0", "int8"])
def test_a_model_on_a_gpu_is_put_in_tiles_there(model, monkeypatch, name):
    """In its own dtype, see test_tiled.py; the model that was given stays as it is."""
    asked = []
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    monkeypatch.setattr(quantizing, "on_gpu", lambda made, *where: asked.append((made, *where)) or made)
    made = quantized(model, name)
    assert asked == [(made, torch.device("cuda", 0), torch.float32)]
    assert has_blocks(made) == (name == "q4_0")
    assert not has_blocks(model)


def test_weights_by_stage():
    names = ["draft 0", "draft 1", "target"]
    assert weights_of_each("q8_0", names) == ["q8_0"] * 3
    assert weights_of_each(["int8", None, "q4_k"], names) == ["int8", None, "q4_k"]
    assert weights_of_each({"drafts": "int8", "draft 1": None}, names) == ["int8", None, None]
    assert weights_of_each({"target": "q4_0"}, names) == [None, None, "q4_0"]
    assert weights_of_each(None, names) == [None] * 3


@pytest.mark.parametrize("seed", range(3))
def test_embeddings_on_steps_do_not_refuse_the_native_form(seed):
    """Codes times norm weights of 1 and 1/2 lie between two steps: the last bit of a norm rounds them, and one token's keys reach all after it."""
    model = random_llama(seed, hidden=256, layers=1)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[::2] = 0.5
    made = quantized(model, "q8_0")
    assert native_unsupported_reason(made) is None


@pytest.mark.parametrize("fault", [lambda logits: logits * 1.5 + 0.25, lambda logits: logits.roll(1, -1)])
def test_a_call_that_differs_from_its_parts_is_refused(fault, monkeypatch):
    """The parts of a model in blocks are compared with the model's own, and with the one call that runs."""
    own = NativeDecoder.step

    def wrong(*given, **named):
        found = own(*given, **named)
        return found.copy_(fault(found))

    monkeypatch.setattr(NativeDecoder, "step", wrong)
    assert "depend on the columns" in native_unsupported_reason(quantized(random_llama(1), "q8_0"))


def test_the_default_dtype_and_device_do_not_matter():
    made = quantized(random_llama(1), "q8_0")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert native_unsupported_reason(made) is None
    finally:
        torch.set_default_dtype(torch.float32)


# ---- int8


@pytest.fixture(scope="module")
def deep():
    return random_llama(3, layers=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(deep, dtype):
    target = copy.deepcopy(deep).to(dtype)
    draft = quantized(target, "int8")
    linears = [module for module in draft.modules() if isinstance(module, Int8Linear)]
    assert len(linears) == 4 * 7 + 1
    assert all(module.weight.dtype == torch.int8 for module in linears)
    original = target.model.layers[0].mlp.up_proj.weight.float()
    copied = draft.model.layers[0].mlp.up_proj
    error = (copied.weight * copied.scale[:, None] - original).abs()
    assert (error <= 0.51 * original.abs().amax(1, keepdim=True) / 127).all()
    fed = torch.stack(random_prompts(2, seed=1, shortest=9, longest=9))
    own = draft(fed, use_cache=False).logits.float()
    assert torch.allclose(logits_of(draft, fed).float(), own, atol=1e-4 if dtype == torch.float32 else 0.5)
    assert described(draft, RowCache.for_model(draft, 2, 32)) == "native"
    assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
    with pytest.raises(ValueError, match="quantised already"):
        quantized(draft, "int8")


def test_a_derived_draft_that_no_checkpoint_describes_is_not_saved(deep, tmp_path):
    draft = quantized(deep, "int8")
    for one in (draft, copy.deepcopy(draft)):
        with pytest.raises(NotImplementedError, match="save_pretrained: no checkpoint of transformers describes int8"):
            one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    deep.save_pretrained(tmp_path)
