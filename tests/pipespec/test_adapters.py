"""Models with adapters, as the package peft makes them. The classes here have its attributes; peft itself is not needed."""

import types
from typing import Any

import pytest
import torch
from torch import nn

import pipespec
from pipespec import Pipeline
from pipespec.models.properties import named_tensors
from pipespec.models.quantizing import quantized
from pipespec.schedules.asynchronous.messages import share
from tests.conftest import noisy, random_llama
from tests.support.texts import own_text
from tests.waiting import drafts_keep_up

NEW = 16
IDS = torch.arange(5, 15)[None]


class Lora(nn.Module):
    """A linear layer with a low-rank addition, as ``peft.tuners.lora.Linear``."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base_layer, self.merged = base, False
        generator = torch.Generator().manual_seed(seed)
        self.lora_A = nn.Parameter(torch.randn(4, base.in_features, generator=generator) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, 4, generator=generator) * 0.1)

    def merge(self) -> None:
        self.base_layer.weight.add_(self.lora_B @ self.lora_A)
        self.merged = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.lora_A.t() @ self.lora_B.t()


pipespec.trust(Lora)


class Wrapper(nn.Module):
    """As ``peft.PeftModel``: not a transformers model, with one within."""

    def __init__(self, model: Any, is_prompt: bool = False) -> None:
        super().__init__()
        self.base_model = model
        self.peft_config = {"default": types.SimpleNamespace(is_prompt_learning=is_prompt)}
        self.active_peft_config = self.peft_config["default"]

    def get_base_model(self) -> Any:
        return self.base_model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


def adapted(model: Any, seed: int = 1) -> Wrapper:
    for layer in model.model.layers:
        for module, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            setattr(module, name, Lora(getattr(module, name), seed))
    return Wrapper(model.eval())


@pytest.fixture(scope="module")
def chain():
    """Target and draft with adapters, and the target's text."""
    target = adapted(random_llama(0))
    wanted = own_text(target, IDS, max_new_tokens=NEW)
    assert not torch.equal(own_text(random_llama(0), IDS, max_new_tokens=NEW), wanted)
    return target, adapted(noisy(random_llama(0), 0.02)), wanted


def test_in_this_process(chain):
    target, draft, wanted = chain
    pipe = Pipeline(target, draft, schedule="lockstep", lookahead=4)
    assert torch.equal(pipe.generate(IDS, max_new_tokens=NEW, do_sample=False), wanted)
    assert pipe.report.stages[-1].acceptance_rate > 0.5
    assert "q_proj is of class Lora" in pipe.report.stages[-1].forward
    with pipespec.attach(target, [draft], schedule="lockstep", lookahead=4) as attached:
        assert pipespec.attached(target) is attached
        assert torch.equal(own_text(target, IDS, max_new_tokens=NEW), wanted)
        assert attached.report.tokens == NEW


def test_in_a_worker(chain):
    """The worker's draft has its adapter merged, and runs natively. The caller's draft stays as it is."""
    target, draft, wanted = chain
    before = {name: tensor.clone() for name, tensor in draft.named_parameters()}
    with Pipeline(target, [draft], schedule="workers", lookahead=4) as pipe:
        with drafts_keep_up(pipe, [IDS.shape[1] + NEW]):
            assert torch.equal(pipe.generate(IDS, max_new_tokens=NEW, do_sample=False), wanted)
        assert pipe.report.stages[-1].acceptance_rate > 0.5
        assert pipe.report.stages[0].forward == "native"
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.named_parameters())


def test_what_a_worker_gets():
    model = adapted(random_llama(0)).base_model
    plain = random_llama(0)
    layer = model.model.layers[0].self_attn.q_proj
    tensors = dict(named_tensors(model))
    assert tensors.keys() == dict(named_tensors(plain)).keys() == dict(named_tensors(model, merged=False)).keys()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(tensors[name], layer.base_layer.weight + layer.lora_B @ layer.lora_A)
    weights, memory = share(model)
    assert torch.equal(weights.view(memory, name), tensors[name])
    with torch.no_grad():
        layer.lora_B.zero_()
    weights, memory = share(model)  # the adapter has changed
    assert torch.equal(weights.view(memory, name), layer.base_layer.weight)
    layer.disable_adapters = True
    assert torch.equal(dict(named_tensors(model))[name], layer.base_layer.weight)


def test_learned_prompts_are_refused():
    with pytest.raises(ValueError, match="Wrapper has an adapter that is a learned prompt"):
        Pipeline(Wrapper(random_llama(0), is_prompt=True))


@pytest.mark.parametrize("disabled", [False, True])
def test_in_int8(disabled):
    """The merged matrices are quantised, so that a worker has the same draft. The model keeps its adapters."""
    model = adapted(noisy(random_llama(0), 0.02)).base_model
    model.lm_head = Lora(model.lm_head, 3)
    merged = noisy(random_llama(0), 0.02)
    for module in model.modules():
        if isinstance(module, Lora):
            module.disable_adapters = disabled
    merged.load_state_dict(dict(named_tensors(model)), strict=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draft = quantized(model, "int8")
    assert not any(isinstance(module, Lora) for module in draft.modules())
    with torch.no_grad():
        expected = quantized(merged, "int8")(IDS).logits
        assert torch.equal(draft(IDS).logits, expected)
        weights, memory = share(draft)
        assert torch.equal(weights.build(memory)(IDS).logits, expected)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_in_blocks():
    """The low-rank matrices of an adapter are modules within its layer, as peft has them. They go with the layer."""
    model, merged = random_llama(0), random_llama(0)
    layer = Lora(model.model.layers[0].mlp.up_proj, 3)
    layer.adapters = nn.ModuleDict({"default": nn.Linear(layer.base_layer.in_features, 32)})
    model.model.layers[0].mlp.up_proj = layer
    merged.load_state_dict(dict(named_tensors(model)), strict=False)
    with torch.no_grad():
        assert torch.equal(quantized(model, "q8_0")(IDS).logits, quantized(merged, "q8_0")(IDS).logits)
