"""What models can run as: whole, in a worker process, quantised, captured."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from pipespec import Pipeline, SpeedWarning
from pipespec.api import pipeline
from pipespec.checks.models import check_runnable, check_shareable, check_streams
from pipespec.errors import NotCapturable
from pipespec.models.properties import quantisation
from tests.conftest import always_right, noisy
from tests.pipespec.checkpoints import PROMPT, Packed, on_gpu, packed, replaced, split
from tests.support.ways import driver_of

# ---- split, offloaded, sharded


def test_models_that_hooks_hold_together_run(model):
    other = split(model, has_hook=True)
    check_runnable([model, other])
    check_runnable([other, model])
    check_shareable([model, other])  # the target stays in this process


# ---- quantised


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_models_run_in_this_process(model, head, dtype):
    """As target and as draft, each with its own text. The storage dtype is not the compute dtype."""
    target = packed(copy.deepcopy(model).to(dtype), head=head)
    wanted = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    for schedule in ("plain", "lockstep"):
        for draft in (noisy(model, 0.02), packed(noisy(model, 0.02))):
            pipe = Pipeline(target, draft, schedule=schedule)
            found = pipe.generate(PROMPT, max_new_tokens=12)
            if dtype is torch.float32:
                assert torch.equal(found, wanted)
            else:  # the width of a forward decides near-ties
                assert lag(target, found) < 0.02
            assert driver_of(pipe).target._cache.dtype == dtype
    original = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(
        Pipeline(model, packed(noisy(model, 0.02)), schedule="lockstep").generate(PROMPT, max_new_tokens=12), original
    )


def lag(model, text):
    """Largest gap between a token's logit and the best one, relative to the range of the logits. 0, up to rounding, for greedy choices."""
    with torch.no_grad():
        logits = model(text).logits[0, PROMPT.shape[1] - 1 : -1].float()
    chosen = logits.gather(1, text[0, PROMPT.shape[1] :, None])[:, 0]
    return float(((logits.amax(1) - chosen) / (logits.amax(1) - logits.amin(1))).max())


def test_a_quantised_target_beside_workers(model):
    """It stays in the caller's process, so it may be packed."""
    target = packed(model)
    with Pipeline(target, always_right(model), schedule="workers") as pipe:
        wanted = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=12), wanted)


def test_the_first_weight_may_have_a_storage_dtype(model):
    other = copy.deepcopy(model)
    other.model.embed_tokens = StoredIn8Bits(other.model.embed_tokens)
    assert other.dtype == torch.float8_e4m3fn
    check_runnable([other])
    wanted = other.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(
        Pipeline(other, noisy(model, 0.02), schedule="lockstep").generate(PROMPT, max_new_tokens=6), wanted
    )


class StoredIn8Bits(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight.float())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "bitsandbytes 8-bit"),
        (BitsAndBytesConfig(load_in_4bit=True), "bitsandbytes 4-bit"),
        ({"load_in_4bit": True}, "bitsandbytes 4-bit"),
        ({"quant_method": "gptq", "bits": 4}, "gptq 4-bit"),
        ({"quant_method": "awq", "bits": 4}, "awq 4-bit"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "torchao"}, "torchao"),
    ],
)
def test_the_names_of_quantisations(model, settings, name):
    config = copy.deepcopy(model.config)
    config.quantization_config = settings
    assert quantisation(config) == name
    assert quantisation(model.config) is None
    assert quantisation(model) is None


def test_quantised_by_hand(model):
    class Int8Params(nn.Parameter):
        pass

    Int8Params.__module__ = "bitsandbytes.nn.modules"
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.up_proj._parameters["weight"] = Int8Params(other.model.layers[0].mlp.up_proj.weight.data)
    assert quantisation(other) == "bitsandbytes Int8Params"


# ---- what can be captured


def changed(path, value):
    """A copy of the model, of which an attribute has another value."""

    def make(model):
        other = copy.deepcopy(model)
        owner, _, name = path.rpartition(".")
        setattr(other.config if owner == "config" else other.get_submodule(owner), name, value)
        return other

    return make


def with_rope(kind):
    def make(model):
        config = copy.deepcopy(model.config)
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        if kind == "longrope":
            rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
        else:
            config.max_position_embeddings = 128
        config.rope_parameters = rope
        return LlamaForCausalLM(config).eval()

    return make


NOT_CAPTURED = {
    "split": (lambda model: split(model, has_hook=True), "its weights", "it is split over cpu, cuda:1"),
    "offloaded": (
        changed("model.layers.1.mlp._hf_hook", SimpleNamespace(offload=True)),
        "its weights",
        "accelerate brings the weights of model.layers.1.mlp",
    ),
    "dynamic RoPE": (with_rope("dynamic"), "model.rotary_emb", "'dynamic'"),
    "RoPE of two lengths": (with_rope("longrope"), "model.rotary_emb", "'longrope'"),
    "soft caps": (changed("config.attn_logit_softcapping", 30.0), "model.layers.0.self_attn", "softcapping"),
    "sinks": (changed("model.layers.1.self_attn.sinks", nn.Parameter(torch.zeros(4))), "model.layers.1.self_attn", "sinks"),
    "float64": (lambda model: on_gpu(copy.deepcopy(model).to(torch.float64), "cuda:0"), "its dtype", "float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_what_is_not_captured(model, name):
    """As a draft and as a target."""
    make, part, cause = NOT_CAPTURED[name]
    other = make(model)
    near = on_gpu(model, "cuda:0") if name == "float64" else model
    for stage, models in (("draft 0", [other, near]), ("target", [near, other])):
        with pytest.raises(NotCapturable) as caught:
            check_streams(models)
        error = caught.value
        assert (error.stage, error.part) == (stage, part)
        assert cause in error.cause
        assert str(error) == f"{stage} cannot be captured in a CUDA graph: {part}: {error.cause}"


def test_attention_that_cannot_be_exchanged_is_not_captured(model, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(NotCapturable, match=r"model.layers.0.self_attn: .*AttentionInterface"):
        check_streams([model])


def test_what_is_captured(model):
    """Peer access between GPUs is not needed. Whether quantised products can be captured is tried, see test_graph_emulator.py."""
    check_streams([model, copy.deepcopy(model).to(torch.bfloat16)])
    check_streams([model, model])
    check_streams([on_gpu(model, "cuda:0"), on_gpu(model, "cuda:1")])
    check_streams([packed(model), packed(model, load_in_4bit=True)])
    check_streams([on_gpu(packed(model), "cuda:0")])


def test_the_cost_of_width_in_4_bits(model, monkeypatch):
    """A step of several tokens writes and reads each matrix in 16 bits: 4.5 bytes per weight instead of 0.5."""
    kind = type("Linear4bit", (Packed,), {"__module__": "bitsandbytes.nn.modules"})
    target = replaced(copy.deepcopy(model).to(torch.bfloat16), kind)
    for module in target.modules():
        if isinstance(module, kind):
            module.in_features *= 1 << 16
    gigabytes = sum(m.in_features * m.out_features for m in target.modules() if isinstance(m, kind)) / 1e9
    found = f"draft tokens moves {4.5 * gigabytes:.1f} GB of weights, a plain one {gigabytes / 2:.1f}"
    assert gigabytes > 1
    monkeypatch.setattr(pipeline, "input_device", lambda model: torch.device("cuda"))
    with pytest.warns(SpeedWarning, match=found):
        Pipeline(target, noisy(model, 0.02), schedule="lockstep")
    with warnings.catch_warnings(action="error"):
        Pipeline(target, schedule="plain")
        Pipeline(packed(model), noisy(model, 0.02), schedule="lockstep")


def test_streams_want_all_stages_on_gpus_or_none(model):
    mixed = [model, on_gpu(model, "cuda:0")]
    with pytest.raises(ValueError, match=r"draft 0 is on the CPU.*device=.*schedule='workers'"):
        check_streams(mixed)
    with pytest.raises(ValueError, match=r"draft 0, target are on the CPU"):
        check_streams([model, on_gpu(model, "cuda:1"), model])
