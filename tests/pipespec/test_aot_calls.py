"""The kernels that are compiled ahead of time are those that captured generation launches. Nothing is compiled here."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipespec import Pipeline
from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels import triton as kernels
from pipespec_kernels.noise import Noise
from pipespec_kernels.triton import launch
from pipespec_kernels.triton.aot import build, calls
from tests.conftest import noisy

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"), reason="the interpreter compiles nothing"
)
ARCH = 90
CASES: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 20},
    {"do_sample": True, "top_k": 0, "top_p": 0.9},
    {"do_sample": True, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "top_k": 0, "min_p": 0.1},
    {"do_sample": False, "repetition_penalty": 1.2},
    {"do_sample": False, "logit_bias": {5: 1.0}},
    {"do_sample": True, "top_k": 20, "repetition_penalty": 1.2},
)


class Launches:
    """In place of the Triton kernels: each call goes through Triton's launch up to the variant's key, and the reference computes its result."""

    Workspace = kernels.Workspace

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(kernels, name)
        answer = getattr(Answers, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            result = answer(*args, **options)
            real(*args, **options)
            return result

        return call


class Answers:
    """The reference, with the signatures of the kernels."""

    kv_append = staticmethod(reference.kv_append)

    @staticmethod
    def verify(logits, tokens, query_lens, num_draft_tokens, *, noise=None, **_):
        return reference.verify(logits, tokens, query_lens, num_draft_tokens, noise)

    @staticmethod
    def select(logits, *, out, **_):
        return out.copy_(reference.argmax(logits))

    @staticmethod
    def cutoff(logits, *, inv_temperature, top_k, top_p, min_p, query_lens, num_draft_tokens, out):
        rows, numbers = len(logits), (top_k, top_p, min_p)
        filters = [x if isinstance(x, torch.Tensor) else torch.full((rows,), x) for x in numbers]
        out.copy_(reference.cutoff(logits, inv_temperature, *filters, query_lens, num_draft_tokens))

    @staticmethod
    def penalize(logits, tokens, history, lengths, penalties, query_lens, num_draft_tokens, bitmask, workspace):
        reference.penalize(logits, tokens, history, lengths, *penalties, query_lens, num_draft_tokens, bitmask)

    @staticmethod
    def add_rms_norm(x, residual, weight, eps, one_plus, bias, out, residual_out):
        normed, total = reference.add_rms_norm(x, residual, weight, eps, one_plus, bias)
        out.copy_(normed)
        if residual_out is not None:
            residual_out.copy_(total)

    @staticmethod
    def silu_mul(gate_up, activation, out):
        out.copy_(reference.silu_mul(gate_up, activation))

    @staticmethod
    def rope_append(*args, out, **options):
        out.copy_(reference.rope_append(*args, **options))

    @staticmethod
    def verify_attention(q, k_cache, v_cache, lengths, query_lens, *, out, scale, window, softcap, **_):
        out.copy_(reference.verify_attention(q, k_cache, v_cache, lengths, query_lens, scale, window, softcap))


def model(kind: str) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 64, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 256}
    sizes |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.15}
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    return made.to(torch.bfloat16).eval()


@pytest.mark.parametrize(("kind", "captured"), [("llama", True), ("llama", False), ("qwen3", True)])
def test_generation_launches_what_is_compiled(
    kind: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model(kind)
    (tmp_path / "config.json").write_text(json.dumps(target.config.to_dict()))
    workload = calls.Workload((calls.read_config(tmp_path),), torch.bfloat16, (1, 2), (1, 2, 3, 4, 5, 16))
    compiled = {variant[1:] for variant in build.variants(workload, ARCH)}
    launched: set[tuple[str, str]] = set()

    def stop(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launched.add((fn.jit_function.__name__, compile["specialization_data"]))
        return True

    def config(rows: int, vocab: int, device: torch.device, busy: bool) -> launch.Config:
        return launch.choose_config(rows, vocab, build.MULTIPROCESSORS[ARCH], busy)

    def fields(noise: Noise) -> tuple[tuple[Any, ...], int]:
        return (noise.seeds, noise.positions, noise.inv_temperature, noise.cutoff, noise.stream), noise.offset

    # Tensors are in memory, and are treated as those of a GPU.
    launches = Launches()
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", stop)
    monkeypatch.setattr(launch, "check_device", lambda device, what: None)
    monkeypatch.setattr(importlib.import_module("pipespec_kernels.triton.verify"), "default_config", config)
    monkeypatch.setattr(dispatch, "forced", "triton")
    monkeypatch.setattr(dispatch, "kernels", lambda tensor: launches)
    monkeypatch.setattr(arguments, "_CODES", dict.fromkeys(arguments._CODES))
    if captured:
        monkeypatch.setattr(arguments, "fields_for_kernel", fields)
        monkeypatch.setitem(arguments._PER_ROW, "noise.positions", arguments._PER_ROW["noise.positions on a GPU"])
    with build.pretended(ARCH):
        options = {"schedule": "lockstep", "graphs": True} if captured else {"schedule": "lockstep"}
        with Pipeline(target, [noisy(target, 0.02)], lookahead=4, **options) as pipe:
            for rows in (1, 2):
                ids = torch.arange(2, 2 + 9 * rows).view(rows, 9)
                for case in CASES:
                    pipe.generate(ids, max_new_tokens=8, **case)
            assert not captured or {stage.forward for stage in pipe.report.stages} == {"fused"}
    expected = {"verify_kernel", "cutoff_scan_kernel", "cutoff_search_kernel", "penalize_kernel"}
    if captured:
        expected |= {"attention_kernel", "rope_append_kernel", "add_rms_norm_kernel", "silu_mul_kernel"}
    assert expected <= {name for name, _ in launched}
    missing = launched - compiled
    assert not missing, missing
    # The comparison sees a variant that is not compiled.
    sampled = {
        (name, key) for name, key in launched if name == "verify_kernel" and 'constant_vals": [false, true' in key
    }
    assert sampled
    assert launched - (compiled - sampled) == sampled
