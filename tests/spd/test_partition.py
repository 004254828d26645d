"""Cuts of a model, the computation of all stages together, and loading one stage."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config

from pipespec.engine.cache import RowCache
from pipespec.engine.form import TOLERANCE
from pipespec.engine.forward import forward
from pipespec.models import loading
from pipespec_spd import partition
from pipespec_spd.partition import (
    LayerStage,
    Partition,
    Verifier,
    check_target,
    cut,
    load_ends,
    load_skeleton,
    load_stage,
)
from pipespec_spd.sections import open_sections
from tests.conftest import random_llama

LAYERS = 5


@pytest.fixture(scope="module")
def model():
    return random_llama(3, layers=LAYERS)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


# ---- cuts


def test_uniform():
    assert Partition.uniform(12, 4).counts == (3, 3, 3, 3)
    assert Partition.uniform(10, 4).counts == (3, 3, 2, 2)
    assert Partition.uniform(5, 5).counts == (1,) * 5
    assert Partition.uniform(5, 1).counts == (5,)
    assert Partition.uniform(12, 8).ranges[3:5] == ((6, 8), (8, 9))


def test_spans_and_owners():
    cut = Partition((2, 1, 3))
    assert [list(cut.span(s)) for s in range(3)] == [[0, 1], [2], [3, 4, 5]]
    # Stream k >= 1 is the output of layer k - 1; stream 0 is that of the embedding.
    assert [cut.owner(k) for k in range(7)] == [0, 0, 0, 1, 2, 2, 2]
    for k in (-1, 7):
        with pytest.raises(ValueError, match=f"no residual stream {k}"):
            cut.owner(k)


def test_what_stages_may_be():
    assert cut(LAYERS, 2).counts == (3, 2)
    assert cut(LAYERS, [1, 4]).counts == (1, 4)
    assert cut(LAYERS, Partition((4, 1))).counts == (4, 1)


@pytest.mark.parametrize(
    ("stages", "error", "match"),
    [
        (6, ValueError, "5 layers can be cut into 1 to 5 stages, not 6"),
        (0, ValueError, "1 to 5 stages, not 0"),
        (True, TypeError, "must be an integer"),
        (2.0, TypeError, "must be an integer"),
        ([2, 2], ValueError, r"\[2, 2\] have 4 layers together, the model has 5"),
        ([5, 0], ValueError, "at least one"),
        ([2.5, 2.5], ValueError, "whole number"),
        ([], ValueError, "at least one"),
        ("2", TypeError, "an integer, or a list with the layers of each stage, not '2'"),
    ],
)
def test_cuts_that_do_not_fit(stages, error, match):
    with pytest.raises(error, match=match):
        cut(LAYERS, stages)


# ---- what stages compute


def run(stages: list[LayerStage], verifier: Verifier, feeds: list[torch.Tensor], lengths=None, native=True):
    """Logits of every feed, the second one at ``lengths``, and the residual streams of the last one by index."""
    rows = feeds[0].shape[0]
    for stage in stages:
        stage.open(rows, 9, 32)
    form = open_sections([*(stage.section for stage in stages), verifier.section], native=native)
    assert (form == "native") == native
    out = []
    for i, feed in enumerate(feeds):
        seen, hidden = {}, feed
        for stage in stages:
            held = lengths if i else [0] * rows
            hidden, streams = stage.step(hidden, held, range(LAYERS + 1))
            seen |= streams
        out.append(verifier.logits(hidden))
    return out, seen


def same_logits(stages: list[LayerStage], verifier: Verifier, ids: torch.Tensor, model) -> None:
    """In the native form and without it."""
    (got,), _ = run(stages, verifier, [ids])
    assert torch.equal(got, forward(model, ids, RowCache.for_model(model, *ids.shape), keep=ids.shape[1]))
    (got,), _ = run(stages, verifier, [ids], native=False)
    assert torch.equal(got, model(ids).logits)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("counts", [(5,), (2, 3), (1, 1, 1, 1, 1), (3, 1, 1)])
@torch.inference_mode()
def test_stages_are_the_model(model, counts, native):
    """Bit for bit: prefill, then single tokens of rows of different lengths."""
    ids = torch.randint(2, 300, (3, 9), generator=torch.Generator().manual_seed(1))
    cut = Partition(counts)
    stages = [LayerStage.of(model, cut, s) for s in range(cut.stages)]
    feeds, lengths = [ids[:, :7], ids[:, 7:8]], [6, 7, 3]
    got, seen = run(stages, Verifier.of(model), feeds, lengths, native)
    cache = RowCache.for_model(model, 3, 32)
    wanted = forward(model, feeds[0], cache, keep=7, native=native)
    assert torch.equal(got[0], wanted)
    cache.truncate(lengths)
    assert torch.equal(got[1], forward(model, feeds[1], cache, keep=1, native=native))
    assert all(stage.cache.lengths == (7, 8, 4) for stage in stages)
    streams = model(ids[:1], output_hidden_states=True).hidden_states
    _, seen = run(stages, Verifier.of(model), [ids[:1]], native=native)
    assert sorted(seen) == list(range(LAYERS + 1))
    for k in range(LAYERS):  # transformers' last hidden state comes after the final norm
        rounding = TOLERANCE * float(streams[k].abs().max()) if native else 0
        torch.testing.assert_close(seen[k], streams[k], rtol=0, atol=rounding)


def test_no_weights_are_copied(model):
    cut = Partition((2, 3))
    stages = [LayerStage.of(model, cut, s) for s in range(2)]
    assert [layer for stage in stages for layer in stage.layers] == list(model.model.layers)
    assert stages[0].embed is model.model.embed_tokens
    assert stages[1].embed is None
    stages[1].open(2, 3, 10)
    assert len(stages[1].cache.layers) == 3


SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def test_models_outside_of_the_family():
    other = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50))
    with pytest.raises(TypeError, match="target is a GPT2LMHeadModel"):
        check_target(other)


def test_a_model_with_other_layers_than_it_says():
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES))
    del model.model.layers[3]
    with pytest.raises(TypeError, match=r"has 3 layers, and its config\.num_hidden_layers is 4: set that"):
        check_target(model)


# ---- loading


def shard(folder) -> dict[str, str]:
    """Save again, one file per layer; returns the index's map."""
    model = LlamaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="120KB")
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("sharded", [False, True])
@torch.inference_mode()
def test_a_stage_loads_its_own_layers_only(model, folder, sharded, monkeypatch):
    if sharded:
        assert len(set(shard(folder).values())) > 3
    read, real = [], partition.read_stored

    def recorded(*args):
        found = real(*args)
        read.extend(found)
        return found

    monkeypatch.setattr(partition, "read_stored", recorded)
    cut = Partition((2, 2, 1))
    stages = []
    for s in range(3):
        read.clear()
        stages.append(load_stage(folder, cut, s))
        prefixes = {".".join(name.split(".")[:3]) for name in read}
        assert prefixes == {f"model.layers.{i}" for i in cut.span(s)} | (
            {"model.embed_tokens.weight"} if s == 0 else set()
        )
    read.clear()
    ends = load_ends(folder)
    assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert {p.device.type for p in ends.parameters()} == {"cpu"}
    verifier = Verifier.of(ends)
    ids = torch.randint(2, 300, (2, 6), generator=torch.Generator().manual_seed(1))
    same_logits(stages, verifier, ids, model)


@torch.inference_mode()
def test_loading_a_tied_head(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    ids = torch.randint(0, 60, (1, 5))
    same_logits([load_stage(tmp_path, Partition((4,)), 0)], Verifier.of(load_ends(tmp_path)), ids, model)


def test_another_dtype(folder):
    stage = load_stage(folder, Partition((5,)), 0, dtype=torch.bfloat16)
    assert stage.dtype == torch.bfloat16
    assert {p.dtype for layer in stage.layers for p in layer.parameters()} == {torch.bfloat16}


@pytest.fixture
def nothing_read(monkeypatch):
    def opened(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "safe_open", opened)


def test_a_wrong_partition_is_refused_before_weights_are_read(folder, nothing_read):
    with pytest.raises(ValueError, match="4 layers together, the model has 5"):
        load_stage(folder, Partition((2, 2)), 0)


def test_other_models_are_refused_before_weights_are_read(tmp_path, nothing_read):
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50)).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="holds a gpt2 model"):
        load_skeleton(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_skeleton(tmp_path / "nothing")


def test_weights_that_are_missing_or_damaged(folder):
    cut = Partition((2, 3))
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.4.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != name}, file)
    load_stage(folder, cut, 0)  # a weight of another stage
    with pytest.raises(ValueError, match=f"lack {name}"):
        load_stage(folder, cut, 1)
    save_file(weights | {name: weights[name][:5].clone()}, file)
    with pytest.raises(ValueError, match=r"(?s)size mismatch for model\.layers\.4\.mlp\.up_proj\.weight.*\[5, 64\]"):
        load_stage(folder, cut, 1)
    file.write_bytes(b"no safetensors at all")
    with pytest.raises(ValueError, match="is damaged"):
        load_stage(folder, cut, 1)
    file.unlink()
    with pytest.raises(ValueError, match="no safetensors weights"):
        load_stage(folder, cut, 1)


def test_a_shard_that_is_not_there(folder):
    where = shard(folder)
    (folder / where["model.layers.4.mlp.up_proj.weight"]).unlink()
    with pytest.raises(ValueError, match=r"model-0000\d-of-\d+\.safetensors.*get the complete weights"):
        load_stage(folder, Partition((2, 3)), 1)
