"""What models can run as: whole, in a worker process, quantised, captured."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from pipespec import Pipeline, SpeedWarning
from pipespec.api import pipeline
from pipespec.config import SpeculationConfig
from pipespec.errors import NotCapturable
from pipespec.models.properties import quantisation
from pipespec.preflight.support import check_runnable, check_shareable, check_streams
from pipespec.schedules.workers import driver as workers
from pipespec.schedules.workers.driver import WorkersDriver
from pipespec_spd import SpeculativePipeline
from tests.conftest import always_right, noisy, random_llama
from tests.pipespec.checkpoints import PROMPT, Packed, on_gpu, packed, replaced

# ---- split, offloaded, sharded


def refused(match, models, **kwargs):
    with pytest.raises(ValueError, match=match):
        Pipeline(models[-1], models[:-1], **kwargs)


def test_a_device_map_with_one_place_and_hooks_that_move_nothing(model):
    other = copy.deepcopy(model)
    other.hf_device_map = {"": "cpu"}
    other.model._hf_hook = SimpleNamespace(offload=False)
    wanted = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    assert torch.equal(
        Pipeline(other, noisy(model, 0.02), schedule="lockstep").generate(PROMPT, max_new_tokens=5), wanted
    )


class CpuOffload:
    """Like accelerate's hook of that name, which moves the whole model when it is called."""

    execution_device = "cuda:0"


class Sequential:
    """Like accelerate's hook of several hooks."""

    def __init__(self, *hooks):
        self.hooks = hooks


def test_a_model_that_moves_as_a_whole(model):
    for hook in (CpuOffload(), Sequential(SimpleNamespace(), CpuOffload())):
        target = copy.deepcopy(model)
        target._hf_hook = hook
        refused(r"target: accelerate moves all of it to the GPU.*use device_map=", [target], schedule="plain")


def test_weights_that_no_hook_brings(model):
    draft = noisy(model, 0.1)
    draft.model.layers[1].mlp.to("meta")
    refused(
        r"draft 0 has weights that are not loaded \(model.layers.1.mlp.gate_proj, on the meta device", [draft, model]
    )
    pipe = Pipeline(target := copy.deepcopy(model), schedule="plain")
    target.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="target has weights that are not loaded"):
        pipe.generate(PROMPT, max_new_tokens=2)


class Elsewhere(nn.Parameter):
    """A weight that claims to be on a second device, on a machine without GPUs."""

    device = torch.device("cuda:1")


def split(model):
    """The layers from the second on claim to be elsewhere."""
    other = noisy(model, 0.1)
    for layer in other.model.layers[1:]:
        for module in layer.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = Elsewhere(weight.data)
    return other


def test_split_models_without_hooks(model):
    refused(r"target is spread over cpu, cuda:1, and no hook moves hidden states between them", [model, split(model)])


def test_what_needs_whole_models(model, monkeypatch):
    other = split(model)
    other.model.register_forward_pre_hook(lambda *_: None)
    check_runnable([model, other])
    check_runnable([other, model])
    with pytest.raises(NotCapturable, match="its weights: it is split over cpu, cuda:1"):
        check_streams([other])
    monkeypatch.setattr(workers, "_Worker", None)
    refused(
        r"draft 0: a worker process builds a draft whole .* it is split over cpu, cuda:1",
        [other, model],
        schedule="workers",
    )
    with pytest.raises(ValueError, match=r"a SpeculativePipeline needs.* target is not: it is split"):
        SpeculativePipeline(other, "ngram", stages=2)


def test_sharded_models(model):
    other = noisy(model, 0.1)
    other._tp_size = 2
    refused(r"draft 0 is sharded over processes \(tp_plan\): only the target may be", [other, model])


def test_heads_that_processes_cannot_share(model):
    """transformers cuts within a head then, and its forward fails."""
    for processes, rows in ((4, 8), (2, 24)):
        other = noisy(model, 0.1)
        other._tp_size = processes
        other.config.num_key_value_heads = 2 if processes == 4 else 3
        for layer in other.model.layers:
            layer.self_attn.k_proj.weight = nn.Parameter(torch.zeros(rows, 64))
        with pytest.raises(ValueError, match=f"target has . key/value heads, which {processes} processes cannot share"):
            check_runnable([other])


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
            assert pipe._driver.target._cache.dtype == dtype
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


def test_a_quantised_draft_has_no_process_of_its_own(model, monkeypatch):
    monkeypatch.setattr(workers, "_Worker", None)
    drafts = [noisy(model, 0.1), packed(model)]
    refused(
        r"draft 1: a worker .* is quantised \(bitsandbytes 8-bit\); use schedule='lockstep'",
        [*drafts, model],
        schedule="workers",
    )
    with pytest.raises(ValueError, match=r"draft 1: .* it is quantised"):
        check_shareable([*drafts, model])


def test_what_a_worker_could_not_build(model):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.lora_A = base, nn.Linear(base.in_features, 2)

    draft = noisy(model, 0.1)
    draft.model.layers[0].mlp.up_proj = Adapter(draft.model.layers[0].mlp.up_proj)
    with pytest.raises(
        ValueError,
        match=r"draft 0: .* build model.layers.0.mlp.up_proj.base.weight, which its class LlamaForCausalLM does not create",
    ):
        WorkersDriver([draft, model], SpeculationConfig(lookahead=(4,)))

    class Fancy(nn.Parameter):
        pass

    draft = noisy(model, 0.1)
    draft.model.norm._parameters["weight"] = Fancy(draft.model.norm.weight.data)
    with pytest.raises(ValueError, match=r"draft 0: a worker process cannot share model.norm.weight, a Fancy"):
        WorkersDriver([draft, model], SpeculationConfig(lookahead=(4,)))
    check_shareable([model, draft])  # the target stays here


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


def not_capturable(model) -> NotCapturable:
    """The error as a draft, which is the same as a target."""
    found = []
    for place, models in enumerate(([model, random_llama(3)], [random_llama(3), model])):
        with pytest.raises(NotCapturable) as caught:
            check_streams(models)
        assert caught.value.stage == ["draft 0", "target"][place]
        assert (
            str(caught.value)
            == f"{caught.value.stage} cannot be captured in a CUDA graph: {caught.value.part}: {caught.value.cause}"
        )
        found.append(caught.value)
    assert (found[0].part, found[0].cause) == (found[1].part, found[1].cause)
    return found[0]


def test_plain_models_are_captured(model):
    check_streams([model, copy.deepcopy(model).to(torch.bfloat16)])
    check_streams([model, model])
    check_streams([on_gpu(model, "cuda:0"), on_gpu(model, "cuda:1")])  # peer access is not needed


def test_offloading_is_not_captured(model):
    other = copy.deepcopy(model)
    other.model.layers[1].mlp._hf_hook = SimpleNamespace(offload=True)
    error = not_capturable(other)
    assert "accelerate brings the weights of model.layers.1.mlp" in error.cause


def with_rope(kind):
    config = copy.deepcopy(random_llama(0).config)
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
    else:
        config.max_position_embeddings = 128
    config.rope_parameters = rope
    torch.manual_seed(0)
    other = LlamaForCausalLM(config).eval()
    other.generation_config.eos_token_id = None
    return other


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_not_captured(kind):
    other = with_rope(kind)
    error = not_capturable(other)
    assert error.part == "model.rotary_emb"
    assert f"{kind!r}" in error.cause
    with pytest.raises(NotCapturable):  # padding changes its RoPE on a CPU, too
        check_streams([other])


def test_attention_that_cannot_be_exchanged_is_not_captured(model, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(NotCapturable) as caught:
        check_streams([model])
    error = caught.value
    assert (error.stage, error.part) == ("target", "model.layers.0.self_attn")
    assert "AttentionInterface" in error.cause


def test_attention_with_more_than_lengths(model):
    capped = copy.deepcopy(model)
    capped.config.attn_logit_softcapping = 30.0
    assert "softcapping" in not_capturable(capped).cause
    sunk = copy.deepcopy(model)
    sunk.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    error = not_capturable(sunk)
    assert error.part == "model.layers.1.self_attn"
    assert "sinks" in error.cause


def test_quantised_models_are_not_refused_by_name(model):
    """Whether their products can be captured is tried, see test_graph_emulator.py."""
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


def test_float64_has_no_kernels_on_a_gpu(model):
    with pytest.raises(NotCapturable, match=r"target .* float64"):
        check_streams([on_gpu(copy.deepcopy(model).to(torch.float64), "cuda:0")])


def test_streams_want_all_stages_on_gpus_or_none(model):
    mixed = [model, on_gpu(model, "cuda:0")]
    with pytest.raises(ValueError, match=r"draft 0 is on the CPU.*device=.*schedule='workers'"):
        check_streams(mixed)
    with pytest.raises(ValueError, match=r"draft 0, target are on the CPU"):
        check_streams([model, on_gpu(model, "cuda:1"), model])
