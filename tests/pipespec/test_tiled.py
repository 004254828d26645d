"""Models with quantised matrices as they are on a GPU: in tiles, here on the CPU. Their logits are those of the dequantised model, and captured texts those of plain decoding."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipespec
from pipespec import Pipeline
from pipespec.engine.forward import choose_fused
from pipespec.models.gguf import GgufFile
from pipespec.models.gguf_models import model_of
from pipespec.models.loading import load_model
from pipespec.models.quantized import Int8Linear, QuantizedEmbedding, QuantizedLinear
from pipespec.models.quantizing import described, quantized, skeleton
from pipespec.models.tiled import TiledEmbedding, TiledLinear, on_gpu, product
from pipespec_kernels import ops
from pipespec_kernels.formats import FORMATS, dequantize, quantize
from pipespec_kernels.tiles import in_tiles
from tests.conftest import VOCABULARY, left_pad, random_prompts
from tests.pipespec import gguf_files
from tests.pipespec.test_fused import check_static_logits
from tests.pipespec.test_native import make
from tests.support.graph_emulator import Emulator

MIXED = {"blk.0.attn_v.weight": "Q6_K", "blk.1.ffn_up.weight": "Q5_1", "token_embd.weight": "Q6_K"}


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
    tiled = on_gpu(copy.deepcopy(blocks), "cpu", dtype)
    assert not any(isinstance(m, (QuantizedLinear, QuantizedEmbedding)) for m in tiled.modules())
    tokens = random_prompts(1, seed=3, shortest=20, longest=21)[0][None]
    with torch.inference_mode():
        ours, theirs = tiled(tokens).logits, wanted(tokens).logits
    assert ours.dtype == dtype
    # Few rows are summed one by one, in another order than the library's.
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=(1e-5 if dtype is torch.float32 else 0.03) * float(theirs.abs().max())
    )
    tiled.set_attn_implementation(pipespec.engine.attention.ATTENTION)
    check_static_logits(tiled, dtype)
