"""Errors and devices of loading."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipespec.errors import DoesNotFit
from pipespec.models import loading
from tests.conftest import random_llama
from tests.pipespec.checkpoints import save


@pytest.fixture(scope="module")
def model():
    return random_llama(3)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        MemoryError(),
    ],
    ids=["GPU", "CPU", "Python"],
)
@pytest.mark.parametrize("at", ["reading", "converting"])
def test_too_little_memory_for_the_weights(model, tmp_path, monkeypatch, error, at):
    """It is not reported as damage. transformers only logs what fails while it quantises a weight."""
    folder = save(model, tmp_path / "model")

    def fails(*args, **kwargs):
        if at == "converting":
            logging.getLogger("transformers.modeling_utils").warning(f"CONVERSION {type(error).__name__}: {error}")
            raise RuntimeError("We encountered some issues during automatic conversion of the weights.")
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(DoesNotFit, match=rf"{folder}: cpu ran out of memory while its weights were read"):
        loading.load_model(folder)
    assert not any(type(h) is logging.Handler for h in logging.getLogger("transformers").handlers)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", partial(raise_, RuntimeError("size mismatch")))
    with pytest.raises(ValueError, match="damaged"):
        loading.load_model(folder)


def raise_(error, *args, **kwargs):
    raise error


def test_quantised_weights_are_read_on_their_device(model, tmp_path, monkeypatch):
    """They cannot be moved, and transformers needs accelerate to read them there."""
    folder = save(model, tmp_path / "q", quantization_config={"quant_method": "gptq", "bits": 4})
    asked = []

    def from_pretrained(path, **kwargs):
        asked.append(kwargs.get("device_map"))
        raise ImportError("needs accelerate")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    for device in ("cuda:1", None):
        with pytest.raises(ImportError, match="accelerate"):
            loading.load_model(folder, device=device)
    assert asked == [{"": "cuda:1"}, None]
