"""Published draft modules: a tiny one in their format is made here, converted, compared with its own arithmetic, and run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, rotate_half

import pipespec_spd as spd
from pipespec.cli.main import main
from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import DraftModuleConfig, target_digest
from pipespec_train.published import FORMAT, import_module
from tests.pipespec.tiny_models import LACKING, SIZES, VOCABULARY, model_of

BLOCKS = 2
ANCHORS = [0, 1, 2, 3]
IDS = sorted({*range(2, VOCABULARY, 2), 1})

RECURRENT = "qwen3_5, recurrent"
TARGETS = ["llama", pytest.param(RECURRENT, marks=pytest.mark.skipif(RECURRENT in LACKING, reason="this transformers has no qwen3_5_text models"))]  # fmt: skip


def qwen3_layers(target: PreTrainedModel) -> list[Qwen3DecoderLayer]:
    """The published blocks: Qwen3 layers of the target's sizes."""
    own = target.config
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    config = Qwen3Config(**(SIZES | {"num_hidden_layers": BLOCKS, "head_dim": head_dim}))
    config._attn_implementation = "sdpa"
    torch.manual_seed(5)
    layers = [Qwen3DecoderLayer(config, i).eval() for i in range(BLOCKS)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return layers


def contents(name: str) -> dict[str, Any]:
    """The dictionary of a published file."""
    target = model_of(name)
    width = target.config.hidden_size
    state = {
        f"spec_layers.{i}.{k}": v for i, layer in enumerate(qwen3_layers(target)) for k, v in layer.state_dict().items()
    }
    generator = torch.Generator().manual_seed(6)
    for i in range(len(ANCHORS)):
        state[f"aggr_projs.{i}.weight"] = torch.randn((width, (i + 1) * width), generator=generator) * 0.1
    state["lm_head.weight"] = torch.randn((len(IDS), width), generator=generator)
    state["rotary_emb.inv_freq"] = torch.ones(3)
    config = {
        "version": FORMAT,
        "hidden_size": width,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": len(IDS),
        "draft_token_ids": IDS,
        "num_stages": 4,
        "num_spec_layers": BLOCKS,
        "aggr_feature_bound": ANCHORS,
        "trained_with_use_deepest": True,
        "base_model_path": "/somewhere/else",
        "model_type": target.config.model_type,
        "spec_intermediate_size_fallback": 9216,
    }
    return {"config": config, "state_dict": {k: v.to(torch.bfloat16) for k, v in state.items()}}


def written(folder: Path, record: Any) -> Path:
    file = folder / "Tiny_s4_l2.pt"
    torch.save(record, file)
    return file


@torch.inference_mode()
def own_arithmetic(target: PreTrainedModel, state: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Rows ``[1, q, H]`` through the published blocks, and norm and head: Qwen3 layers with the target's RoPE on its part of each head."""
    rotary: Any = target.base_model.rotary_emb
    cos, sin = (x[:, None] for x in rotary(rows, torch.arange(rows.shape[1])[None]))
    n = cos.shape[-1]

    def turned(x: torch.Tensor) -> torch.Tensor:
        turning, rest = x[..., :n], x[..., n:]
        return torch.cat([turning * cos + rotate_half(turning) * sin, rest], -1)

    for i, layer in enumerate(qwen3_layers(target)):
        layer.load_state_dict({k.split(".", 2)[2]: v for k, v in state.items() if k.startswith(f"spec_layers.{i}.")})
        attn = layer.self_attn
        x = layer.input_layernorm(rows)
        shape = (1, rows.shape[1], -1, attn.head_dim)
        query = turned(attn.q_norm(attn.q_proj(x).view(shape)).transpose(1, 2))
        key = turned(attn.k_norm(attn.k_proj(x).view(shape)).transpose(1, 2))
        value = attn.v_proj(x).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        rows = rows + attn.o_proj(out.transpose(1, 2).reshape(1, rows.shape[1], -1))
        rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
    return F.linear(target.base_model.norm(rows), state["lm_head.weight"].float())


@pytest.mark.parametrize("name", TARGETS)
def test_the_converted_module_computes_the_same(name, tmp_path):
    record, target = contents(name), model_of(name)
    module = import_module(written(tmp_path, record), target)
    assert module.config.types == (0, 1, 2, 3, 3)
    assert module.config.vocabulary == tuple(IDS)
    assert module.config.digest == target_digest(target)
    rows = torch.randn((1, 9, target.config.hidden_size), generator=torch.Generator().manual_seed(7))
    wanted = own_arithmetic(target, record["state_dict"], rows)
    with torch.inference_mode():
        hidden, positions = rows, torch.arange(9)[None]
        rope = module.rotary_emb(rows, positions)
        mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
        for layer in module.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        torch.testing.assert_close(module.logits(hidden), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TARGETS[1:])
def test_command_and_pipeline(name, tmp_path, capsys, monkeypatch):
    """Converted by the command, checked against the target in a folder, and run: the text is the target's."""
    target, folder, out = model_of(name), tmp_path / "target", tmp_path / "module"
    target.save_pretrained(folder)
    assert target_digest(folder) == target_digest(target)
    file = written(tmp_path, contents(name))
    assert main(["spd", "import", str(file), "--target", str(folder), "--out", str(out), "--dtype", "auto"]) == 0
    said, _, use = capsys.readouterr().err.strip().rpartition("; use it with: pipespec ")
    assert said.endswith(f"{len(IDS)} draft tokens")
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(spd, "SpeculativePipeline", lambda *models, stages, **_: made.append((*models, stages)) or 1 / 0)
        assert main([*shlex.split(use), "--prompt", "x"]) == 2
    assert made == [(str(folder), str(out), [1, 1, 1, 1])]
    config = DraftModuleConfig.load(out)
    assert config == DraftModuleConfig.from_json(config.to_json())
    assert config.blocks is not None
    ids = torch.randint(2, VOCABULARY, (1, 5), generator=torch.Generator().manual_seed(8))
    pipe = SpeculativePipeline(target, out, stages=4)
    got = pipe.generate(ids, max_new_tokens=12, do_sample=False)
    assert got.tolist() == target.generate(ids, max_new_tokens=12, do_sample=False).tolist()
    assert pipe.report.checked > 0
    assert main(["spd", "import", str(file), "--target", str(folder), "--out", str(out)]) == 2
    assert "holds a draft module already" in capsys.readouterr().err


def change(**entries: Any) -> Any:
    return lambda record: record["config"].update(entries)


def without(name: str) -> Any:
    return lambda record: record["state_dict"].pop(name)


def with_tensor(name: str, *shape: int) -> Any:
    return lambda record: record["state_dict"].update({name: torch.zeros(shape)})


REFUSED = {
    "version": (change(version=10), "format version 10; version 11 is read"),
    "entry": (lambda r: r["config"].pop("num_stages"), "KeyError: 'num_stages'"),
    "width": (change(hidden_size=64), "a target with 64 hidden units; this one has 32"),
    "tokens": (change(vocab_size=98), "a target with 98 tokens; this one has 97"),
    "rows": (change(trained_with_use_deepest=False), "trained without use_deepest"),
    "stages": (change(num_stages=3), "have 3 layers together, the model has 4"),
    "uneven stages": (change(stage_layers="1;1;1;2"), "have 5 layers together, the model has 4"),
    "fewer stages": (change(stage_layers=[2, 2]), "its config has 4 stages, and layers of 2"),
    "anchors": (change(aggr_feature_bound=[0, 1, 2, 9]), "anchor 9 does not exist: the target has 4 layers"),
    "vocabulary": (change(draft_token_ids=None), "drafts 49 of 97 tokens and does not say which"),
    "other vocabulary": (change(draft_token_ids=[1, 2]), "has 2 different tokens, the module 49"),
    "missing": (without("spec_layers.1.self_attn.q_norm.weight"), r"Missing key.*layers\.1\.self_attn\.q_norm"),
    "projection": (without("aggr_projs.2.weight"), r"Missing key.*projections\.2\.weight"),
    "unknown": (with_tensor("stage_gate.weight", 2), r"Unexpected key.*stage_gate\.weight"),
    "more": (with_tensor("spec_layers.0.self_attn.q_proj.bias", 32), r"Unexpected key.*0\.self_attn\.q_proj\.bias"),
    "shape": (with_tensor("lm_head.weight", 49, 31), r"head\.weight: copying a param with shape .*\[49, 31\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit(case, tmp_path):
    damage, message = REFUSED[case]
    record = contents("llama")
    damage(record)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        import_module(written(tmp_path, record), model_of("llama"))


def test_files(tmp_path):
    target = model_of("llama")
    with pytest.raises(FileNotFoundError, match=r"none\.pt does not exist"):
        import_module(tmp_path / "none.pt", target)
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"PK not a checkpoint")
    with pytest.raises(ValueError, match=r"is no file of torch\.save"):
        import_module(damaged, target)
    with pytest.raises(ValueError, match="is no published draft module"):
        import_module(written(tmp_path, {"model": {}}), target)
    record = contents("llama")
    del record["config"]["draft_token_ids"]
    ids = tmp_path / "vocabulary.json"
    ids.write_text(json.dumps({"tokenizer_name": "t", "vocab_size": VOCABULARY, "token_ids": IDS}))
    module = import_module(written(tmp_path, record), target, vocabulary=ids)
    assert module.config.vocabulary == tuple(IDS)
    ids.write_text("[]")
    with pytest.raises(ValueError, match="is no draft vocabulary"):
        import_module(written(tmp_path, record), target, vocabulary=ids)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(TypeError):
        import_module(written(tmp_path, contents("llama")), other)
