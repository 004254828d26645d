"""Input that cannot work is refused before any work, with a message that names it and says what to do."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
import transformers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
)

from pipespec import NgramDraft, Pipeline
from pipespec.models.tokenizers import load_tokenizer
from pipespec.schedules.workers import driver as workers
from pipespec_spd import SpeculativePipeline
from tests.conftest import always_right, noisy, random_llama

PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def pipeline(model):
    return Pipeline(model, noisy(model, 0.02), schedule="lockstep")


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Fail if a process starts: every refusal here comes before that."""

    def started(*args, **kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(workers, "_Worker", started)


def refused(error, match, *args, **kwargs) -> str:
    """Check that a pipeline with workers is refused. Returns the message."""
    with pytest.raises(error, match=match) as caught:
        Pipeline(*args, **{"schedule": "workers"} | kwargs)
    return str(caught.value)


# ---- models that form no chain


def test_vocabularies_of_different_sizes(model, tmp_path):
    """Refused if no tokenizer shows that only the padding differs. The message says which one is missing, and what to do."""
    small = random_llama(1, vocabulary=300)
    message = refused(ValueError, "draft 0 .*vocabulary of 300 .*target 320", model, small)
    assert "draft 0 has no tokenizer.json" in message
    assert "put tokenizer.json beside the weights of both" in message
    refused(ValueError, "draft 1", model, [noisy(model, 0.1), small])
    tokens = [f"a{i}" for i in range(250)]
    target, draft = save(model, tmp_path / "target", tokens), save(small, tmp_path / "draft", tokens)
    assert "draft 0 has no tokenizer.json" in refused(ValueError, "vocabulary of 300", target, small)
    assert "the target has no tokenizer.json" in refused(ValueError, "vocabulary of 300", model, draft)
    other = save(small, tmp_path / "other", tokens[:249])
    assert "same one and only" not in refused(ValueError, "draft 0 has another tokenizer", target, other)


def test_a_head_that_does_not_fit_its_own_vocabulary(model):
    other = noisy(model, 0.1)
    other.lm_head = torch.nn.Linear(64, 310, bias=False)
    refused(ValueError, "draft 0 has 310 logits per position for 320 tokens", model, other)
    refused(ValueError, "target has 310 logits per position for 320 tokens", other)


def save(model, folder, tokens=None):
    model.save_pretrained(folder)
    if tokens is not None:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        content = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a0"}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_tokenizers_that_differ(model, tmp_path):
    tokens = [f"a{i}" for i in range(320)]
    target = save(model, tmp_path / "target", tokens)
    same = save(noisy(model, 0.1), tmp_path / "same", tokens)
    other = save(noisy(model, 0.1), tmp_path / "other", tokens[:5] + tokens[6:] + tokens[5:6])
    none = save(noisy(model, 0.1), tmp_path / "none")
    refused(ValueError, "draft 0 has another tokenizer", target, other)
    refused(ValueError, "draft 1 has another tokenizer", str(target), [str(same), str(other)])
    loaded = [transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (target, other)]
    refused(ValueError, "draft 0 has another tokenizer", *loaded)
    for fine in (same, none):
        assert Pipeline(target, fine, schedule="lockstep").generate(PROMPT, max_new_tokens=2).shape == (1, 6)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": 3}',
        b'{"model": {}}',
        b'{"model": {"vocab": {}}, "added_tokens": 5}',
        b'{"model": {"vocab": {}}, "added_tokens": [{}]}',
    ],
)
def test_damaged_tokenizers(model, tmp_path, content):
    target, draft = save(model, tmp_path / "target", ["a", "b"]), save(noisy(model, 0.1), tmp_path / "draft")
    (draft / "tokenizer.json").write_bytes(content)
    message = refused(ValueError, r"draft/tokenizer\.json is damaged", target, draft)
    assert "get the tokenizer of this model again" in message


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 0}, "draft 0 has num_hidden_layers=0 .* at least one layer"),
        ({"num_hidden_layers": -1}, "draft 0 has num_hidden_layers=-1 .* at least one layer"),
        ({"num_hidden_layers": "x"}, "broken holds no model.*num_hidden_layers"),
        ({"num_attention_heads": 0}, "broken holds no model"),
        ({"num_key_value_heads": 0}, "broken holds no model"),
        ({"quantization_config": 3}, "broken holds no model"),
        ({"quantization_config": {}}, "broken holds no model.*quant_method"),
        ({"auto_map": 3}, "broken holds no model"),
        ({"model_type": "unheard_of"}, "(?s)broken holds no model.*unheard_of.*upgrade transformers"),
    ],
)
def test_configurations_that_no_model_has(model, tmp_path, change, match):
    folder = save(noisy(model, 0.1), tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    refused(ValueError, match, model, folder)
    refused(ValueError, match.replace("draft 0", "target"), folder)


@pytest.mark.parametrize("content", ["{}", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_tokenizers_that_lack_parts(model, tmp_path, content):
    """Where the tokenizer itself is needed: for a corpus, and for the program."""
    folder, text = save(model, tmp_path / "target"), tmp_path / "text"
    (folder / "tokenizer.json").write_text(content)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    text.write_text("some text")
    with pytest.raises(
        ValueError, match=r"target: its tokenizer\.json is damaged .*get the tokenizer of this model again"
    ):
        load_tokenizer(folder)
    refused(ValueError, r"target.*tokenizer\.json is damaged", folder, NgramDraft(corpus=text))


def test_models_that_are_not_like_llama(model):
    """Those that are like it, and not in every layer: ``test_families.py``."""
    with torch.random.fork_rng():
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2))
    headless = LlamaModel(model.config)
    for other, match in ((gpt2, "GPT2LMHeadModel.*LLaMA-like"), (headless, "LlamaModel.*(head|AutoModelForCausalLM)")):
        assert "draft 0" in refused(TypeError, match, model, other)
        assert "target" in refused(TypeError, match, other)


def test_things_that_are_no_models(model):
    for thing in (None, 7, torch.nn.Linear(2, 2), {"model": model}):
        refused(TypeError, f"not {type(thing).__name__}", model, [thing])
    refused(TypeError, "underlying transformers model", torch.nn.DataParallel(model))


def test_one_model_in_two_places(model):
    refused(ValueError, "draft 0|target is the same object", model, model)
    draft = noisy(model, 0.1)
    refused(ValueError, "draft 1 is the same object", model, [draft, draft])


def test_too_many_models(model):
    refused(ValueError, "at most", model, [noisy(model, 0.1) for _ in range(40)])


def test_a_single_draft_needs_no_list(model, tmp_path):
    draft = noisy(model, 0.02)
    for given in (draft, [draft], (draft,), save(draft, tmp_path / "draft"), str(tmp_path / "draft")):
        assert len(Pipeline(model, given, schedule="lockstep").models) == 2


# ---- where and how the models lie


def test_dtypes_and_devices_that_cannot_work(model):
    half = random_llama(1, dtype=torch.float16)
    assert "bfloat16" in refused(ValueError, "draft 0 is float16 on the CPU", model, half)
    with torch.device("meta"):
        hollow = transformers.LlamaForCausalLM(model.config)
    refused(ValueError, "draft 0 .*not loaded", model, hollow)
    refused(ValueError, "target .*not loaded", hollow)
    part = noisy(model, 0.1)
    part.model.layers[1].to("meta")
    refused(ValueError, "draft 0 .*not loaded", model, part)


def test_mixed_dtypes_that_do_work(model):
    wanted = model.generate(PROMPT, max_new_tokens=9, do_sample=False)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(
            Pipeline(model, always_right(model).to(dtype), schedule="lockstep").generate(PROMPT, max_new_tokens=9),
            wanted,
        )


# ---- paths


def test_paths_that_hold_no_model(model, tmp_path):
    refused(FileNotFoundError, "no folder .*nowhere", tmp_path / "nowhere")
    refused(FileNotFoundError, "no folder .*nowhere", model, str(tmp_path / "nowhere"))
    refused(FileNotFoundError, "no folder ./nowhere", "./nowhere")
    (tmp_path / "empty").mkdir()
    refused(FileNotFoundError, "empty holds no model.*config.json", tmp_path / "empty")
    file = tmp_path / "file.safetensors"
    file.write_bytes(b"")
    refused((FileNotFoundError, ValueError), r"file\.safetensors", file)
    (tmp_path / "hollow").mkdir()
    model.config.save_pretrained(tmp_path / "hollow")
    refused(ValueError, "hollow holds no safetensors", tmp_path / "hollow")


def test_weights_that_are_pickles(model, tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    model.config.save_pretrained(folder)

    class Bomb:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'exploded')!r}, 'w')",))

    torch.save({"model.norm.weight": Bomb()}, folder / "pytorch_model.bin")
    message = refused(ValueError, "pickled holds no safetensors weights .*pytorch_model.bin", folder)
    assert "convert" in message
    assert not (tmp_path / "exploded").exists()
    # Safetensors under another name beside it change nothing.
    (folder / "other.safetensors").write_bytes(b"")
    refused((FileNotFoundError, ValueError), "pickled", folder)
    assert not (tmp_path / "exploded").exists()


def test_broken_weights(model, tmp_path):
    folder = save(model, tmp_path / "broken")
    whole = (folder / "model.safetensors").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\xff" * 200):
        (folder / "model.safetensors").write_bytes(content)
        refused((FileNotFoundError, ValueError), "broken", folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "config.json").write_text("{ not json")
    refused((FileNotFoundError, ValueError), "broken", folder)


def test_weights_that_are_missing_are_not_made_up(model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(model, tmp_path / "gaps")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(ValueError, "model.layers.1.mlp.up_proj.weight", folder)


@pytest.mark.parametrize("kind", ["llama", "unheard_of"])
def test_remote_code_runs_only_when_asked_for(model, tmp_path, kind, monkeypatch):
    """A folder with code of its own is refused (or loaded as a class of transformers), and its code does not run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", None)  # no terminal for a question
    folder = save(model, tmp_path / "remote")
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n"
        f"    model_type = {kind!r}\n"
        "class Own(LlamaForCausalLM):\n"
        "    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = kind
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "unheard_of":
        refused(ValueError, "trust_remote_code", folder)
        refused(ValueError, "trust_remote_code", model, folder)
    else:
        assert type(Pipeline(folder).target) is transformers.LlamaForCausalLM
    assert not ran.exists()
    assert type(Pipeline(folder, trust_remote_code=True).target).__name__ == "Own"
    assert ran.exists()


@pytest.mark.parametrize("which", ["target", "draft 0", "stages"])
def test_gradient_checkpointing_in_training_mode(which):
    model = random_llama(3)
    draft = noisy(model, 0.02)
    pipe = Pipeline(model, draft, schedule="lockstep") if which != "stages" else SpeculativePipeline(model, stages=2)
    name = "target" if which == "stages" else which
    one = draft if name == "draft 0" else model
    one.train()
    one.gradient_checkpointing_enable()
    with pytest.raises(NotImplementedError, match=f"{name} is in training mode with gradient checkpointing"):
        pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    one.eval()
    pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)


# ---- prompts


@pytest.mark.parametrize("shape", [(0, 5), (1, 0), (0, 0)])
def test_empty_prompts(pipeline, shape):
    with pytest.raises(ValueError, match="prompt is empty"):
        pipeline.generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=3)


def test_no_prompt(pipeline):
    target = copy.deepcopy(pipeline.target)
    target.generation_config.bos_token_id = None
    with pytest.raises(ValueError, match=r"input_ids.*no bos_token_id"):
        Pipeline(target).generate(max_new_tokens=3)
    for nothing in ([], [[]]):
        with pytest.raises(ValueError, match="empty"):
            pipeline.generate(nothing, max_new_tokens=3)
    with pytest.raises(ValueError, match="not both"):
        pipeline.generate(PROMPT, input_ids=PROMPT)


def test_prompts_of_the_wrong_kind(pipeline):
    with pytest.raises(TypeError, match="str"):
        pipeline.generate("def f():")
    with pytest.raises(TypeError, match=r"integers.*float"):
        pipeline.generate(PROMPT.float())
    with pytest.raises(TypeError, match=r"integers.*bool"):
        pipeline.generate(PROMPT.bool())
    with pytest.raises(TypeError, match="input_ids"):
        pipeline.generate([["def", "f"]])
    with pytest.raises((TypeError, ValueError), match="input_ids"):
        pipeline.generate([[1.5, 2.5]])
    for shape in ([4], [1, 1, 4]):
        with pytest.raises(ValueError, match=r"shape .batch, length"):
            pipeline.generate(PROMPT.view(shape))
    for bad in (-1, 320, 2**40):
        with pytest.raises(ValueError, match=f"token id {bad}, outside .*vocabulary of 320"):
            pipeline.generate(torch.tensor([[5, bad]]))


def test_unequal_lengths_without_a_mask(pipeline):
    with pytest.raises(ValueError, match=r"unequal lengths \[3, 2\].*attention_mask"):
        pipeline.generate([[5, 6, 7], [8, 9]], max_new_tokens=2)


def test_masks(pipeline):
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with pytest.raises(ValueError, match="row 0 is all padding"):
        pipeline.generate(ids, attention_mask=torch.tensor([[0, 0, 0], [1, 1, 1]]), max_new_tokens=2)
    for shape in ((2, 4), (1, 3), (3,), (2, 1, 3, 3)):
        with pytest.raises(ValueError, match="attention_mask has shape"):
            pipeline.generate(ids, attention_mask=torch.ones(shape), max_new_tokens=2)
    for mask in ("ones", [[1, 1], [1]]):
        with pytest.raises((TypeError, ValueError), match="attention_mask"):
            pipeline.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"attention_mask.*0 and 1"):
        pipeline.generate(ids, attention_mask=torch.tensor([[0.0, 0.0, -torch.inf]] * 2), max_new_tokens=2)


# ---- lengths and ids


def test_lengths_that_leave_nothing_to_do(pipeline):
    for new in (0, -1):
        with pytest.raises(ValueError, match=f"max_new_tokens. must be greater than 0, but is {new}"):
            pipeline.generate(PROMPT, max_new_tokens=new)
    for length in (4, 3, 0, -5):
        with pytest.raises(ValueError, match=f"input_ids is 4, but .max_length. is set to {length}.*max_new_tokens"):
            pipeline.generate(PROMPT, max_length=length)
    for new in (2.5, "3", [4]):
        with pytest.raises(TypeError, match="max_new_tokens"):
            pipeline.generate(PROMPT, max_new_tokens=new)


def test_invalid_token_ids(pipeline):
    with pytest.raises(TypeError, match="eos_token_id"):
        pipeline.generate(PROMPT, eos_token_id="</s>")
    with pytest.raises(TypeError, match="pad_token_id"):
        pipeline.generate(PROMPT, pad_token_id=1.5)
    with pytest.raises(ValueError, match="max_new_tokens"):
        pipeline.generate(PROMPT, max_new_tokens=2**31)
    with pytest.raises(ValueError, match="lower max_new_tokens"):
        pipeline.generate(PROMPT, max_new_tokens=2**30)
    with pytest.raises(ValueError, match="eos_token_id: at most"):
        pipeline.generate(PROMPT, eos_token_id=list(range(100)))


# ---- options of transformers that are not here: test_conformance.py has all of them, one by one


def test_a_refused_option_is_refused_wherever_it_comes_from(model):
    """As a keyword, in a configuration, and in the model's own configuration. None and False have no effect."""
    target = copy.deepcopy(model)
    pipeline = Pipeline(target, noisy(target, 0.02), schedule="lockstep")
    wanted = target.generate(PROMPT, max_new_tokens=5, do_sample=False)
    for name, value in {"penalty_alpha": 0.5, "dola_layers": "low", "token_healing": True}.items():
        config = GenerationConfig(max_new_tokens=5)
        setattr(config, name, value)
        with pytest.raises(NotImplementedError, match=name):
            pipeline.generate(PROMPT, max_new_tokens=5, **{name: value})
        with pytest.raises(NotImplementedError, match=name):
            pipeline.generate(PROMPT, config)
        assert torch.equal(pipeline.generate(PROMPT, config, **{name: None}), wanted)
        setattr(target.generation_config, name, value)
        with pytest.raises(NotImplementedError, match=name):
            pipeline.generate(PROMPT, max_new_tokens=5)
        setattr(target.generation_config, name, None)
        assert torch.equal(pipeline.generate(PROMPT, max_new_tokens=5), wanted)


@pytest.mark.parametrize("name", ["max_tokens", "token_type_ids", "generator"])
def test_unknown_arguments(pipeline, model, name):
    for generate in (model.generate, pipeline.generate):
        with pytest.raises(ValueError, match=rf"not used by the model: \['{name}'\]"):
            generate(PROMPT, max_new_tokens=2, **{name: 5})


@pytest.mark.parametrize("drafts", [0, 1])
def test_extreme_temperatures_and_counts(model, drafts):
    """Values that transformers accepts. A huge temperature makes all tokens equally likely, and a huge top_k keeps all of them."""
    pipeline = Pipeline(model, [always_right(model)] * drafts, schedule="lockstep")
    sampled = {"max_new_tokens": 8, "do_sample": True, "seed": 3}
    uniform = pipeline.generate(PROMPT, temperature=1e30, top_k=0, **sampled)
    for temperature in (1e300, float("inf")):
        model.generate(PROMPT, temperature=temperature, top_k=0, max_new_tokens=2, do_sample=True)
        assert torch.equal(pipeline.generate(PROMPT, temperature=temperature, top_k=0, **sampled), uniform)
    whole = pipeline.generate(PROMPT, top_k=0, **sampled)
    for k in (2**31, 2**63, 2**70):
        assert torch.equal(pipeline.generate(PROMPT, top_k=k, **sampled), whole)
    for temperature in (1e-300, 1e-40):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(PROMPT, temperature=temperature, top_k=0, max_new_tokens=2, do_sample=True)
        with pytest.raises(ValueError, match=r"no token can be drawn at position 4 .* is the temperature too small"):
            pipeline.generate(PROMPT, temperature=temperature, top_k=0, **sampled)
        with pytest.raises(ValueError, match=r"temperature.* strictly positive"):
            pipeline.generate(PROMPT, temperature=-temperature, **sampled)


def test_configurations_of_the_wrong_kind(pipeline):
    with pytest.raises(TypeError, match="generation_config"):
        pipeline.generate(PROMPT, {"max_new_tokens": 2})


def test_a_refusal_leaves_the_pipeline_usable(pipeline, model):
    for bad in ({"max_new_tokens": 0}, {"num_beams": 2}, {"nonsense": 1}):
        with pytest.raises((ValueError, TypeError, NotImplementedError)):
            pipeline.generate(PROMPT, **bad)
    out = pipeline.generate(PROMPT, max_new_tokens=5)
    assert torch.equal(out, model.generate(PROMPT, max_new_tokens=5, do_sample=False))
