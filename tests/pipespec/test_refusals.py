"""What cannot work is refused before any work, with a message that names it and says what to do.

Each row is an error, parts of its message, and a call. Rows that need files or models of a special kind are in the test files of these.
"""

import copy
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaModel

from pipespec import NgramDraft, Pipeline
from pipespec.checks.devices import weights_of_each
from pipespec.checks.models import check_runnable
from pipespec.models.tokenizers import load_tokenizer
from pipespec.schedules.asynchronous import local
from pipespec_spd import SpeculativePipeline
from tests.conftest import VOCABULARY, always_right, noisy, random_llama
from tests.pipespec.checkpoints import packed, save, split
from tests.support.texts import own_text, same_text

PROMPT = torch.tensor([[5, 6, 7, 8]])
WORDS = [f"a{i}" for i in range(VOCABULARY)]

Row = tuple[type[Exception] | tuple[type[Exception], ...], str | tuple[str, ...], Callable[[Any], object]]


@pytest.fixture(scope="module")
def pipe(model):
    return Pipeline(model, noisy(model, 0.02), schedule="lockstep")


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Every refusal here comes before a worker is started."""

    def started(*args, **kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(local, "_started", started)


def check(row: Row, given: Any) -> None:
    error, says, call = row
    with pytest.raises(error) as caught:
        call(given)
    for part in (says,) if isinstance(says, str) else says:
        assert re.search(part, str(caught.value), re.DOTALL), str(caught.value)


def rows(table: list[Row]) -> Any:
    return pytest.mark.parametrize("row", table, ids=[f"{i}: {row[1]}" for i, row in enumerate(table)])


# ---- chains


class Models(SimpleNamespace):
    """``model``, and what makes drafts, folders and pipelines of it."""

    def draft(self, change: Callable[[Any], object] = lambda _: None) -> Any:
        other = noisy(self.model, 0.1)
        change(other)
        return other

    def saved(self, name: str, model: Any = None, tokens: list[str] | None = None, **config: Any) -> Path:
        folder = save(self.model if model is None else model, self.path / name, **config)
        if tokens is not None:
            vocabulary = {token: i for i, token in enumerate(tokens)}
            content = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a0"}, "added_tokens": []}
            (folder / "tokenizer.json").write_text(json.dumps(content))
        return folder

    def with_file(self, folder: Path, file: str, content: bytes) -> Path:
        (folder / file).write_bytes(content)
        return folder


@pytest.fixture
def models(model, tmp_path):
    return Models(model=model, path=tmp_path)


chain = functools.partial(Pipeline, schedule="workers")


def with_parameter(kind: type) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.norm._parameters["weight"] = kind(model.model.norm.weight.data)

    return change


class Fancy(nn.Parameter):
    pass


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.lora_A = base, nn.Linear(base.in_features, 2)


class CpuOffload:
    """Like accelerate's hook of that name, which moves the whole model when it is called."""

    execution_device = "cuda:0"


def hollow(config):
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def set_to(path: str, value: Any) -> Callable[[Any], None]:
    """A change of an attribute. A function makes its value from the one before."""

    def change(model: Any) -> None:
        owner, _, name = path.rpartition(".")
        place = model.get_submodule(owner) if owner != "config" else model.config
        setattr(
            place, name, value(getattr(place, name)) if callable(value) and not isinstance(value, nn.Module) else value
        )

    return change


def sharded(processes: int, heads: int, keys: int) -> Callable[[Any], None]:
    """A target whose key/value heads transformers would cut: its forward fails then."""

    def change(model: Any) -> None:
        model._tp_size, model.config.num_key_value_heads = processes, heads
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight = nn.Parameter(torch.zeros(keys, 64))

    return change


SMALL = functools.cache(lambda: random_llama(1, vocabulary=300))
SHARE = r"draft 0: a worker process "
CHAINS: list[Row] = [
    # vocabularies and tokenizers
    (ValueError, ("draft 0 .*vocabulary of 300 .*target 320", "draft 0 has no tokenizer.json", "put tokenizer.json next to the weights of both"),
     lambda g: chain(g.model, SMALL())),
    (ValueError, "draft 1", lambda g: chain(g.model, [g.draft(), SMALL()])),
    (ValueError, ("vocabulary of 300", "draft 0 has no tokenizer.json"), lambda g: chain(g.saved("t", tokens=WORDS[:250]), SMALL())),
    (ValueError, ("vocabulary of 300", "the target has no tokenizer.json"), lambda g: chain(g.model, g.saved("d", SMALL(), WORDS[:250]))),
    (ValueError, "draft 0 has another tokenizer",
     lambda g: chain(g.saved("t", tokens=WORDS[:250]), g.saved("d", SMALL(), WORDS[:249]))),
    (ValueError, "draft 1 has another tokenizer",
     lambda g: chain(str(g.saved("t", tokens=WORDS)), [str(g.saved("same", tokens=WORDS)), str(g.saved("d", tokens=WORDS[::-1]))])),
    (ValueError, "draft 0 has another tokenizer", lambda g: chain(
        *(transformers.AutoModelForCausalLM.from_pretrained(g.saved(n, tokens=w)) for n, w in (("t", WORDS), ("d", WORDS[::-1]))))),
    *((ValueError, (r"draft/tokenizer\.json is damaged", "get the tokenizer of this model again"),
       lambda g, content=content: chain(g.saved("t", tokens=["a", "b"]), g.with_file(g.saved("draft"), "tokenizer.json", content)))
      for content in (b"{", b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"model": 3}', b'{"model": {}}',
                      b'{"model": {"vocab": {}}, "added_tokens": 5}', b'{"model": {"vocab": {}}, "added_tokens": [{}]}')),
    # things that are no models, or no models like LLaMA's
    *((TypeError, f"not {type(thing).__name__}", lambda g, thing=thing: chain(g.model, [thing]))
      for thing in (None, 7, nn.Linear(2, 2), {"model": 1})),
    (TypeError, "underlying transformers model", lambda g: chain(nn.DataParallel(g.model))),
    *((TypeError, (place, match), lambda g, make=make, place=place: chain(*[g.model, make(g.model.config)][place == "target":]))
      for place in ("draft 0", "target")
      for make, match in ((lambda _: GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2)), "GPT2LMHeadModel.*LLaMA-like"),
                          (LlamaModel, "LlamaModel.*(head|AutoModelForCausalLM)"))),
    (ValueError, "draft 0|target is the same object", lambda g: chain(g.model, g.model)),
    (ValueError, "draft 1 is the same object", lambda g: chain(g.model, [g.draft()] * 2)),
    (ValueError, "at most", lambda g: chain(g.model, [g.draft() for _ in range(40)])),
    # dtypes, devices and weights that are elsewhere
    (ValueError, ("draft 0 is float16 on the CPU", "bfloat16"), lambda g: chain(g.model, random_llama(1, dtype=torch.float16))),
    (ValueError, "draft 0 .*not loaded", lambda g: chain(g.model, hollow(g.model.config))),
    (ValueError, "target .*not loaded", lambda g: chain(hollow(g.model.config))),
    (ValueError, r"draft 0 has weights that are not loaded \(model.layers.1.mlp.gate_proj, on the meta device",
     lambda g: Pipeline(g.model, g.draft(lambda m: m.model.layers[1].mlp.to("meta")))),
    *((ValueError, r"target: accelerate moves all of it to the GPU.*use device_map=",
       lambda g, hook=hook: Pipeline(g.draft(set_to("_hf_hook", hook)), schedule="plain"))
      for hook in (CpuOffload(), SimpleNamespace(hooks=[SimpleNamespace(), CpuOffload()]))),
    (ValueError, "target is spread over cpu, cuda:1, and no hook moves hidden states between them", lambda g: Pipeline(split(g.model), g.model)),
    (ValueError, SHARE + "builds a draft whole .* it is split over cpu, cuda:1", lambda g: chain(g.model, split(g.model, has_hook=True))),
    (ValueError, r"a SpeculativePipeline needs.* target is not: it is split",
     lambda g: SpeculativePipeline(split(g.model, has_hook=True), "ngram", stages=2)),
    (ValueError, r"draft 0 is sharded over processes \(tp_plan\): only the target may be", lambda g: Pipeline(g.model, g.draft(set_to("_tp_size", 2)))),
    (ValueError, "target has 2 key/value heads, which 4 processes cannot share", lambda g: check_runnable([g.draft(sharded(4, 2, 8))])),
    (ValueError, "target has 3 key/value heads, which 2 processes cannot share", lambda g: check_runnable([g.draft(sharded(2, 3, 24))])),
    # drafts that a worker cannot have
    (ValueError, r"draft 1: a worker .* is quantised \(bitsandbytes 8-bit\); use schedule='lockstep'",
     lambda g: chain(g.model, [g.draft(), packed(g.model)])),
    (ValueError, "draft 0: .* build model.layers.0.mlp.up_proj.base.weight, which its class LlamaForCausalLM does not create",
     lambda g: chain(g.model, g.draft(set_to("model.layers.0.mlp.up_proj", Adapter)))),
    (ValueError, SHARE + "cannot share model.norm.weight, a Fancy", lambda g: chain(g.model, g.draft(with_parameter(Fancy)))),
    # n-gram drafts
    (ValueError, "one per draft, 1, not 2", lambda g: Pipeline(g.model, ["ngram"], schedule="lockstep", lookahead=[4, 4])),
    (ValueError, f"ids from 5 to {VOCABULARY}", lambda g: Pipeline(g.model, NgramDraft(corpus=[5, VOCABULARY]))),
    (ValueError, "ids from -1 to 5", lambda g: Pipeline(g.model, NgramDraft(corpus=[-1, 5]))),
    (FileNotFoundError, "no such file", lambda g: Pipeline(g.model, NgramDraft(corpus="no such file"))),
    (FileNotFoundError, "no tokenizer in the target's folder .*give its token ids instead",
     lambda g: Pipeline(g.model, NgramDraft(corpus=g.with_file(g.path, "text", b"some text") / "text"))),
    (ValueError, "is not UTF-8 text", lambda g: Pipeline(g.model, NgramDraft(corpus=g.with_file(g.path, "text", b"\xff\xfe") / "text"))),
    *((ValueError, says, lambda g, given=given: NgramDraft(**given)) for says, given in (
        ("1 <= min_match", {"min_match": 0}), ("not 5 and 4", {"min_match": 5, "max_match": 4}), ("max_match <= 32", {"max_match": 33}))),
    *((TypeError, f"{name} must be a number of tokens", lambda g, given={name: value}: NgramDraft(**given))
      for name, value in (("min_match", 2.0), ("max_match", True))),
    *((ValueError, "a path, or a sequence of token ids", lambda g, corpus=corpus: NgramDraft(corpus=corpus)) for corpus in ([], [[1, 2]], np.zeros(3))),
    # options
    *((error, says, lambda g, options=options: Pipeline(g.model, [g.draft(), g.draft()], **options)) for error, says, options in (
        (ValueError, "schedule='parallel' is not one of 'lockstep'", {"schedule": "parallel"}),
        (ValueError, "schedule='auto' is not one of", {"schedule": "auto"}),
        (TypeError, "lookahead must be an integer", {"lookahead": "many"}),
        (TypeError, "lookahead must be an integer", {"lookahead": [1.5, 2]}),
        (ValueError, "lookahead must be at least 1", {"lookahead": [2, 0]}),
        (ValueError, "one per draft, 2, not 3", {"lookahead": [2, 2, 2]}),
        (TypeError, "trace must be an integer", {"trace": 2.0}),
        (ValueError, "trace must be 0 to", {"trace": 2**40}),
        (ValueError, "not for 'workers'", {"schedule": "workers", "graphs": True}),
        (ValueError, "acceptance='ratio' is not one of 'coupled', 'rejection'", {"acceptance": "ratio"}),
        (ValueError, "is for one draft model", {"acceptance": "rejection"}),
        (ValueError, "leave native=False out", {"exact": True, "native": False}),
        (ValueError, "leave native=False out", {"exact": True, "native": False, "schedule": "streams"}),
        (ValueError, "weights is not for .* as its folder or GGUF file has it: leave it out", {"schedule": "ranks", "weights": {"drafts": "int8"}}))),
    (ValueError, "does not go with exact=True", lambda g: Pipeline(g.model, g.draft(), acceptance="rejection", exact=True)),
    (ValueError, "does not go with an n-gram draft", lambda g: Pipeline(g.model, ["ngram", g.draft()], acceptance="rejection")),
    *((error, says, lambda g, given=given: weights_of_each(given, ["draft 0", "draft 1", "target"])) for error, says, given in (
        (ValueError, "there is no stage 'draft 2'", {"draft 2": "q8_0"}), (ValueError, "one for all, or one per stage", ["q8_0"]),
        (ValueError, "weights='q3_x': the weight formats are q8_0, ", "q3_x"), (TypeError, "weights: ", 5), (TypeError, "weights: ", [5] * 3))),
]  # fmt: skip


@rows(CHAINS)
def test_chains(models, row):
    check(row, models)


def test_chains_that_do_work(model, models):
    """The same tokenizer, none, one draft without a list, and other dtypes."""
    target, same = models.saved("t", tokens=WORDS), models.saved("same", models.draft(), WORDS)
    for draft in (same, str(same), [same], (models.draft(),), models.saved("none", models.draft())):
        pipe = Pipeline(target, draft, schedule="lockstep")
        assert len(pipe.models) == 2
        assert pipe.generate(PROMPT, max_new_tokens=2).shape == (1, 6)
    for dtype in (torch.bfloat16, torch.float64):
        same_text(Pipeline(model, always_right(model).to(dtype), schedule="lockstep"), PROMPT, max_new_tokens=9)
    # A device map with one place, and hooks that move nothing.
    other = models.draft(set_to("hf_device_map", {"": "cpu"}))
    other.model._hf_hook = SimpleNamespace(offload=False)
    same_text(Pipeline(other, noisy(model, 0.02), schedule="lockstep"), PROMPT, max_new_tokens=5)


# ---- folders


def pickled(g: Models) -> Path:
    """Weights that run code when they are loaded."""

    class Bomb:
        def __reduce__(self):
            return (exec, (f"open({str(g.path / 'exploded')!r}, 'w')",))

    g.model.config.save_pretrained(g.path / "pickled")
    torch.save({"model.norm.weight": Bomb()}, g.path / "pickled" / "pytorch_model.bin")
    return g.path / "pickled"


def with_gaps(g: Models) -> Path:
    folder = g.saved("gaps")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def only_a_configuration(g: Models) -> Path:
    g.model.config.save_pretrained(g.path / "hollow")
    return g.path / "hollow"


def lacking_parts(content: str) -> Callable[[Models], Path]:
    """Of a tokenizer that is needed itself."""

    def make(g: Models) -> Path:
        folder = g.with_file(g.saved("target"), "tokenizer.json", content.encode())
        return g.with_file(folder, "tokenizer_config.json", b'{"tokenizer_class": "PreTrainedTokenizerFast"}')

    return make


EITHER = (FileNotFoundError, ValueError)
BROKEN = "broken holds no model"
FOLDERS: list[tuple[Any, Any, Callable[[Models], Any]]] = [
    (FileNotFoundError, "no folder .*nowhere", lambda g: g.path / "nowhere"),
    (FileNotFoundError, "no folder ./nowhere", lambda g: "./nowhere"),
    (FileNotFoundError, "holds no model.*config.json", lambda g: g.path),
    (EITHER, r"file\.safetensors", lambda g: g.with_file(g.path, "file.safetensors", b"") / "file.safetensors"),
    (ValueError, "hollow holds no safetensors", only_a_configuration),
    (ValueError, ("pickled holds no safetensors weights .*pytorch_model.bin", "convert"), pickled),
    (EITHER, "pickled", lambda g: g.with_file(pickled(g), "other.safetensors", b"")),
    (ValueError, "model.layers.1.mlp.up_proj.weight", with_gaps),
    *((EITHER, "broken", lambda g, content=content: g.with_file(g.saved("broken"), "model.safetensors", content))
      for content in (b"", b"\xff" * 200, b"\x08" + bytes(7) + b'{"a": 1}')),
    (EITHER, "broken", lambda g: g.with_file(g.saved("broken"), "model.safetensors", (g.saved("broken") / "model.safetensors").read_bytes()[:9000])),
    (EITHER, "broken", lambda g: g.with_file(g.saved("broken"), "config.json", b"{ not json")),
    *((ValueError, says, lambda g, change=change: g.saved("broken", **change)) for change, says in (
        ({"num_hidden_layers": 0}, "(draft 0|target) has num_hidden_layers=0 .* at least one layer"),
        ({"num_hidden_layers": -1}, "(draft 0|target) has num_hidden_layers=-1 .* at least one layer"),
        ({"num_hidden_layers": "x"}, BROKEN + ".*num_hidden_layers"),
        ({"num_attention_heads": 0}, BROKEN), ({"num_key_value_heads": 0}, BROKEN), ({"auto_map": 3}, BROKEN),
        ({"quantization_config": 3}, BROKEN), ({"quantization_config": {}}, BROKEN + ".*quant_method"),
        ({"model_type": "unheard_of"}, BROKEN + ".*unheard_of.*upgrade transformers"))),
]  # fmt: skip


@rows(FOLDERS)
def test_folders(models, row):
    error, says, make = row
    for place in ("target", "draft 0"):
        check((error, says, lambda g, place=place: chain(*([g.model] if place == "draft 0" else []), make(g))), models)
    assert not (models.path / "exploded").exists()


@pytest.mark.parametrize("content", ["{}", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_tokenizers_that_lack_parts(models, content):
    """Where the tokenizer itself is needed: for a corpus, and for the program."""
    folder, text = lacking_parts(content)(models), models.with_file(models.path, "text", b"some text") / "text"
    says = (r"target.*tokenizer\.json is damaged", "get the tokenizer of this model again")
    check((ValueError, says, lambda _: load_tokenizer(folder)), models)
    check((ValueError, says[0], lambda _: chain(folder, NgramDraft(corpus=text))), models)


@pytest.mark.parametrize("kind", ["llama", "unheard_of"])
def test_remote_code_runs_only_when_asked_for(models, kind, monkeypatch):
    """A folder with code of its own is refused (or loaded as a class of transformers), and its code does not run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(models.path / "modules"))
    monkeypatch.setattr(sys, "stdin", None)  # no terminal for a question
    ran, own = models.path / "ran", {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    folder = models.saved("remote", model_type=kind, auto_map=own)
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"class OwnConfig(LlamaConfig):\n    model_type = {kind!r}\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    if kind == "unheard_of":
        check((ValueError, "trust_remote_code", lambda _: chain(folder)), models)
        check((ValueError, "trust_remote_code", lambda g: chain(g.model, folder)), models)
    else:
        assert type(Pipeline(folder).target) is transformers.LlamaForCausalLM
    assert not ran.exists()
    assert type(Pipeline(folder, trust_remote_code=True).target).__name__ == "Own"
    assert ran.exists()


# ---- calls. Options of transformers that are not supported: test_conformance.py has all of them, one by one


IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


def call(prompt: Any = PROMPT, *args: Any, **kwargs: Any) -> Callable[[Any], object]:
    return lambda pipe: pipe.generate(prompt, *args, **kwargs)


def masked(mask: Any) -> Callable[[Any], object]:
    return call(IDS, attention_mask=mask, max_new_tokens=2)


CALLS: list[Row] = [
    *((ValueError, "prompt is empty", call(torch.zeros(shape, dtype=torch.long), max_new_tokens=3)) for shape in ((0, 5), (1, 0), (0, 0))),
    *((ValueError, "empty", call(nothing, max_new_tokens=3)) for nothing in ([], [[]])),
    (ValueError, "not both", call(input_ids=PROMPT)),
    (TypeError, "str", call("def f():")),
    (TypeError, "integers.*float", call(PROMPT.float())),
    (TypeError, "integers.*bool", call(PROMPT.bool())),
    (TypeError, "input_ids", call([["def", "f"]])),
    ((TypeError, ValueError), "input_ids", call([[1.5, 2.5]])),
    *((ValueError, "shape .batch, length", call(PROMPT.view(shape))) for shape in ([4], [1, 1, 4])),
    *((ValueError, f"token id {bad}, outside .*vocabulary of 320", call(torch.tensor([[5, bad]]))) for bad in (-1, 320, 2**40)),
    (ValueError, r"unequal lengths \[3, 2\].*attention_mask", call([[5, 6, 7], [8, 9]], max_new_tokens=2)),
    (ValueError, "row 0 is all padding", masked(torch.tensor([[0, 0, 0], [1, 1, 1]]))),
    *((ValueError, "attention_mask has shape", masked(torch.ones(shape))) for shape in ((2, 4), (1, 3), (3,), (2, 1, 3, 3))),
    *(((TypeError, ValueError), "attention_mask", masked(mask)) for mask in ("ones", [[1, 1], [1]])),
    (ValueError, "attention_mask.*0 and 1", masked(torch.tensor([[0.0, 0.0, -torch.inf]] * 2))),
    *((ValueError, f"max_new_tokens. must be greater than 0, but is {new}", call(max_new_tokens=new)) for new in (0, -1)),
    *((ValueError, f"input_ids is 4, but .max_length. is set to {length}.*max_new_tokens", call(max_length=length)) for length in (4, 3, 0, -5)),
    *((TypeError, "max_new_tokens", call(max_new_tokens=new)) for new in (2.5, "3", [4])),
    (TypeError, "eos_token_id", call(eos_token_id="</s>")),
    (TypeError, "pad_token_id", call(pad_token_id=1.5)),
    (ValueError, "max_new_tokens", call(max_new_tokens=2**31)),
    (ValueError, "lower max_new_tokens", call(max_new_tokens=2**30)),
    (ValueError, "eos_token_id: at most", call(eos_token_id=list(range(100)))),
    (TypeError, "generation_config", call(PROMPT, {"max_new_tokens": 2})),
]  # fmt: skip


@rows(CALLS)
def test_calls(pipe, row):
    check(row, pipe)


def test_a_refusal_leaves_the_pipeline_usable(pipe):
    for bad in ({"max_new_tokens": 0}, {"num_beams": 2}, {"nonsense": 1}):
        with pytest.raises((ValueError, TypeError, NotImplementedError)):
            pipe.generate(PROMPT, **bad)
    same_text(pipe, PROMPT, max_new_tokens=5)


def test_no_prompt(model):
    target = copy.deepcopy(model)
    target.generation_config.bos_token_id = None
    with pytest.raises(ValueError, match=r"input_ids.*no bos_token_id"):
        Pipeline(target).generate(max_new_tokens=3)


def test_a_refused_option_of_the_models_own_configuration(model):
    """None as a keyword, or there, has no effect. Keywords and configurations of calls: test_conformance.py."""
    target = copy.deepcopy(model)
    pipe, wanted = Pipeline(target, noisy(target, 0.02), schedule="lockstep"), own_text(model, PROMPT, max_new_tokens=5)
    for name, value in {"penalty_alpha": 0.5, "dola_layers": "low", "token_healing": True}.items():
        setattr(target.generation_config, name, value)
        with pytest.raises(NotImplementedError, match=name):
            pipe.generate(PROMPT, max_new_tokens=5)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=5, **{name: None}), wanted)
        setattr(target.generation_config, name, None)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=5), wanted)


@pytest.mark.parametrize("drafts", [0, 1])
def test_extreme_temperatures_and_counts(model, drafts):
    """Values that transformers accepts. A huge temperature makes all tokens equally likely, and a huge top_k keeps all of them."""
    pipe = Pipeline(model, [always_right(model)] * drafts, schedule="lockstep")
    sampled = {"max_new_tokens": 8, "do_sample": True, "seed": 3}
    uniform = pipe.generate(PROMPT, temperature=1e30, top_k=0, **sampled)
    for temperature in (1e300, float("inf")):
        model.generate(PROMPT, temperature=temperature, top_k=0, max_new_tokens=2, do_sample=True)
        assert torch.equal(pipe.generate(PROMPT, temperature=temperature, top_k=0, **sampled), uniform)
    whole = pipe.generate(PROMPT, top_k=0, **sampled)
    for k in (2**31, 2**63, 2**70):
        assert torch.equal(pipe.generate(PROMPT, top_k=k, **sampled), whole)
    for temperature in (1e-300, 1e-40):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(PROMPT, temperature=temperature, top_k=0, max_new_tokens=2, do_sample=True)
        with pytest.raises(ValueError, match=r"no token can be drawn at position 4 .* is the temperature too small"):
            pipe.generate(PROMPT, temperature=temperature, top_k=0, **sampled)
        with pytest.raises(ValueError, match=r"temperature.* strictly positive"):
            pipe.generate(PROMPT, temperature=-temperature, **sampled)


@pytest.mark.parametrize("which", ["target", "draft 0", "stages"])
def test_gradient_checkpointing_in_training_mode(which):
    model = random_llama(3)
    draft = noisy(model, 0.02)
    pipe = SpeculativePipeline(model, stages=2) if which == "stages" else Pipeline(model, draft, schedule="lockstep")
    one = draft if which == "draft 0" else model
    one.train()
    one.gradient_checkpointing_enable()
    name = "draft 0" if which == "draft 0" else "target"
    with pytest.raises(NotImplementedError, match=f"{name} is in training mode with gradient checkpointing"):
        pipe.generate(PROMPT, max_new_tokens=3)
    one.eval()
    pipe.generate(PROMPT, max_new_tokens=3)


def test_weights_that_have_left_since(model):
    pipe = Pipeline(target := copy.deepcopy(model), schedule="plain")
    target.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="target has weights that are not loaded"):
        pipe.generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "streams"}, "schedule='streams' runs captured CUDA graphs, and all models are on the CPU"),
        ({"schedule": "lockstep", "graphs": True}, "graphs=True runs captured CUDA graphs.*without graphs"),
        ({"schedule": "plain", "graphs": True}, "graphs=True runs captured CUDA graphs"),
    ],
)
def test_captured_steps_are_for_gpus(model, monkeypatch, options, says):
    monkeypatch.setattr("pipespec.schedules.base._runs_uncaptured", False)
    with pytest.raises(ValueError, match=says):
        Pipeline(model, noisy(model, 0.02), **options)
