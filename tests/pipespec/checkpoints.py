"""Models on disk without weights, models that claim to be on a GPU, and models with packed weights."""

import copy
import json

import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig

from pipespec import trust
from pipespec.checks.calls import DeviceFacts

PROMPT = torch.tensor([[5, 6, 7, 8]])


GIB = 1 << 30


def save(model, folder, **config):
    model.save_pretrained(folder)
    if config:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def llama(parameters: str) -> LlamaConfig:
    """The shapes of Meta's LLaMA 3 models."""
    hidden, intermediate, layers, heads, head_dim, tied = {
        "1B": (2048, 8192, 16, 32, 64, True),
        "8B": (4096, 14336, 32, 32, 128, False),
        "70B": (8192, 28672, 80, 64, 128, False),
    }[parameters]
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
    )


def folder_of(config, tmp_path, **more):
    """A folder with a configuration and a safetensors file without tensors."""
    tmp_path.mkdir(exist_ok=True)
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | more
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def on_gpu(model, name: str):
    """A model whose ``device`` is a GPU."""
    kind = type("OnGpu", (type(model),), {"device": property(lambda self: torch.device(name)), "__module__": __name__})
    other = copy.deepcopy(model)
    other.__class__ = kind
    return other


def gpus(monkeypatch, count=2, current=0):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


class Packed(nn.Module):
    """A linear layer like those of bitsandbytes in 8 bits: one byte per weight, one scale per row, computed in the dtype of its input."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter(
            (linear.weight.detach() / scale).round().to(torch.int8).view(torch.uint8), requires_grad=False
        )
        self.register_buffer("SCB", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.view(torch.int8).to(x.dtype) * self.SCB.to(x.dtype))


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter that can be switched off, like those of peft."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.base_layer, self.is_on = linear.in_features, linear, True
        sizes = (4, linear.in_features), (linear.out_features, 4)
        noise = torch.Generator().manual_seed(linear.out_features)
        self.down, self.up = (nn.Parameter(0.2 * torch.randn(s, generator=noise).to(linear.weight)) for s in sizes)

    def forward(self, x):
        own = self.base_layer(x)
        return own + (x @ self.down.T) @ self.up.T if self.is_on else own


trust(Packed, Adapted)


def replaced(model, kind, names=None):
    """A copy with modules of ``kind`` in the place of linear ones; ``names``: only those of these names."""
    other = copy.deepcopy(model)
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (name != "lm_head" if names is None else name in names):
                setattr(module, name, kind(child))
    return other.eval()


def packed(model, *, head=False, **settings):
    other = replaced(model, Packed)
    if head:
        other.lm_head = Packed(other.lm_head).eval()
    other.config.quantization_config = BitsAndBytesConfig(**(settings or {"load_in_8bit": True}))
    other.quantization_method = other.config.quantization_config.quant_method
    other.is_quantized = True
    return other


def some_gpus(monkeypatch, *free):
    """A machine that has GPUs with so many GiB free."""
    gpus(monkeypatch, len(free))
    facts = [DeviceFacts("cpu", 64 * GIB, 60 * GIB)]
    facts += [DeviceFacts(f"cuda:{i}", 80 * GIB, n * GIB) for i, n in enumerate(free)]
    monkeypatch.setattr("pipespec.checks.devices.device_facts", lambda: facts)


class Elsewhere(nn.Parameter):
    """A weight that claims to be on a second device, on a machine without GPUs."""

    device = torch.device("cuda:1")


def split(model, *, has_hook=False):
    """A copy whose layers from the second on claim to be elsewhere. ``has_hook``: one that might move hidden states there."""
    other = copy.deepcopy(model)
    for layer in other.model.layers[1:]:
        for module in layer.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = Elsewhere(weight.data)
    if has_hook:
        other.model.register_forward_pre_hook(lambda *_: None)
    return other
