"""Which stage where, whether it fits, and what is refused before anything is loaded. GPUs are facts that are made up."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from pipespec import Pipeline, attach, loading, pipeline
from pipespec.cache import RowCache
from pipespec.cli import main
from pipespec.drivers import WorkersDriver, workers
from pipespec.drivers.base import Policy
from pipespec.placement import (
    GRAPH_ALLOWANCE,
    PROCESS_ALLOWANCE,
    DeviceFacts,
    DoesNotFit,
    NotCapturable,
    StageFacts,
    arrange,
    check_capturable,
    check_memory,
    check_placement,
    check_shareable,
    check_streams,
    choose,
    device_facts,
    estimate,
    quantisation,
    requested,
    stage_names,
    weight_bytes,
)
from pipespec.spd import SpeculativePipeline
from pipespec.stage import WIDTH
from tests.conftest import always_right, noisy, random_llama

PROMPT = torch.tensor([[5, 6, 7, 8]])
GIB = 1 << 30


@pytest.fixture(scope="module")
def model():
    return random_llama(3)


def save(model, folder, **config):
    model.save_pretrained(folder)
    if config:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def tensor_bytes(model) -> int:
    """By storage, not by object: whatever shares memory counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    own = [b for b in model.buffers() if b.untyped_storage().data_ptr() not in storages]
    return sum(storages.values()) + sum(b.untyped_storage().nbytes() for b in own)


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
    """A folder with a configuration and no weight in it but a name."""
    tmp_path.mkdir(exist_ok=True)
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | more
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


# ---- the estimate against the truth


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_counted_to_the_byte(tmp_path, tied, dtype):
    config = copy.deepcopy(random_llama(0).config)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    folder = save(LlamaForCausalLM(config), tmp_path / "model")
    loaded = loading.load_model(folder, dtype=dtype)
    facts = StageFacts.of_path("target", folder, dtype)
    assert facts.weights == weight_bytes(loaded) == tensor_bytes(loaded)
    assert facts.dtype == loaded.dtype
    assert not facts.loaded
    assert sum(p.nbytes for p in loaded.parameters()) < facts.weights  # the rotary embedding's frequencies


def test_counting_leaves_the_random_numbers_alone(model, tmp_path):
    folder = save(model, tmp_path / "model")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    StageFacts.of_path("target", folder)
    check_shareable([model, model])
    assert torch.equal(torch.rand(3), wanted)


def test_tied_weights_count_once(tmp_path):
    sizes = []
    for tied in (False, True):
        config = copy.deepcopy(random_llama(0).config)
        config.tie_word_embeddings = tied
        sizes.append(StageFacts.of_path("target", folder_of(config, tmp_path / str(tied)), "bfloat16").weights)
    assert sizes[0] - sizes[1] == 2 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize(("size", "parameters"), [("1B", 1235814400), ("8B", 8030261248), ("70B", 70553706496)])
def test_published_models_have_their_published_size(tmp_path, size, parameters):
    """Parameters as the model cards' safetensors list them, two bytes each, and the frequencies of the rotary embedding."""
    config = llama(size)
    facts = StageFacts.of_path("target", folder_of(config, tmp_path / "m", dtype="bfloat16"))
    assert facts.dtype == torch.bfloat16
    assert facts.weights - 2 * parameters in (config.head_dim // 2 * 4, config.head_dim // 2 * 8)  # with its original
    per_token = {"1B": 32 << 10, "8B": 128 << 10, "70B": 320 << 10}[size]  # bytes of keys and values, bf16
    assert estimate([facts], 3, 1000).needs[0].caches == 3 * 1000 * per_token


@pytest.mark.parametrize(("rows", "capacity"), [(1, 7), (3, 100)])
def test_caches_are_counted_to_the_byte(model, rows, capacity):
    for dtype in (torch.float32, torch.bfloat16):
        stage = copy.deepcopy(model).to(dtype)
        cache = RowCache.for_model(stage, rows, capacity)
        tensors = {id(t): t for layer in cache.layers for t in (layer.keys, layer.values)}
        need = estimate([StageFacts.of_model("target", stage)], rows, capacity).needs[0]
        assert need.caches == cache.nbytes == sum(t.nbytes for t in tensors.values())
        assert need.weights == 0  # they are there
        assert need.loaded == tensor_bytes(stage)


def test_what_a_forward_holds_is_not_underestimated():
    """The largest allocations of a prefill's chunk and of a step, by torch's own account, stay below the estimate's rest."""
    model = random_llama(1, hidden=256, layers=2, vocabulary=2000)
    model.config.max_position_embeddings = 2048
    rows, length = 2, 600
    stage = StageFacts.of_model("target", model)
    ids = torch.full((rows, length), 7)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        cache = RowCache.for_model(model, rows, length + 100)
        model(ids[:, :512], past_key_values=cache, logits_to_keep=1)
        model(ids[:, 512:576], past_key_values=cache, attention_mask=cache.mask(64), position_ids=cache.positions(64))
    held = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    need = estimate([stage], rows, length + 100).needs[0]
    assert highest > cache.nbytes  # it saw something
    assert highest - cache.nbytes <= need.rest
    assert need.rest < 20 * (highest - cache.nbytes)  # and is of use


def test_the_dtype_is_what_loading_makes_of_it(model, tmp_path):
    """Asked for, else the configuration's, else that of the first weight."""
    half = save(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "half")
    content = json.loads((half / "config.json").read_text())
    for change in ({}, {"dtype": None, "torch_dtype": None}, {"dtype": "float32"}):
        (half / "config.json").write_text(json.dumps(content | change))
        for dtype in ("auto", "float32", torch.float64):
            assert StageFacts.of_path("target", half, dtype).dtype == loading.load_model(half, dtype=dtype).dtype
    with pytest.raises(ValueError, match=r"dtype='float31'.*'bfloat16'"):
        Pipeline(half, dtype="float31")


def test_graphs_and_processes_are_allowed_for(model):
    stages = [StageFacts.of_model(name, model) for name in stage_names(2)]
    stages = [StageFacts(s.name, s.config, s.dtype, s.weights, "cuda:0") for s in stages]
    plain = estimate(stages, 1, 100)
    graphs = estimate(stages, 1, 100, graphs=True)
    assert graphs.on("cuda:0") - plain.on("cuda:0") == 2 * GRAPH_ALLOWANCE
    both = estimate(stages, 1, 100, schedule="workers")
    # The draft's process has a copy of its own, made from shared memory.
    assert both.on("cuda:0") - plain.on("cuda:0") == stages[0].weights + PROCESS_ALLOWANCE
    assert both.on("cpu") == stages[0].weights
    assert plain.on("cpu") == 0


# ---- refusals


def test_what_does_not_fit_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    """The numbers are in the message: stage, weights, caches, sum, free; and what helps."""
    draft = folder_of(llama("8B"), tmp_path / "draft", dtype="bfloat16")
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    facts = [DeviceFacts("cpu", 64 * GIB, 60 * GIB)]
    monkeypatch.setattr("pipespec.placement.device_facts", lambda names=None: facts)
    monkeypatch.setattr(pipeline, "load_model", None)
    with pytest.raises(DoesNotFit) as caught:
        Pipeline(target, draft)
    lines = str(caught.value).splitlines()
    assert "146" in lines[0] or "147" in lines[0]
    assert lines[1].split() == ["on", "weights", "caches", "rest", "sum"]
    name, _, where, weights, caches, *_ = lines[2].split()
    assert (name, where, weights) == ("draft", "cpu", f"{2 * 8030261248 / GIB:.2f}")
    assert caches == f"{1088 * (128 << 10) / GIB:.2f}"
    assert lines[3].split()[:3] == ["target", "cpu", f"{2 * 70553706496 / GIB:.0f}"]
    assert "60.00 free of 64.00" in lines[4]
    assert "quantised weights" in lines[-1]
    assert "smaller dtype" not in lines[-1]  # it is bfloat16
    assert "another device for a draft" in lines[-1]
    assert issubclass(DoesNotFit, ValueError)
    facts[:] = [DeviceFacts("cpu", 200 * GIB, 180 * GIB)]
    with pytest.raises(TypeError, match="NoneType"):  # on to loading
        Pipeline(target, draft)
    with pytest.raises(DoesNotFit, match=r"294 GiB(.|\n)*smaller dtype"):
        Pipeline(target, draft, dtype="float32")


def test_the_command_line_shows_the_table(tmp_path, monkeypatch, capsys):
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    monkeypatch.setattr("pipespec.placement.host_memory", lambda: (64 * GIB, 60 * GIB))
    assert main(["generate", "--target", str(target), "--prompt", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    begin = next(i for i, line in enumerate(lines) if "error: the stages need" in line)
    assert lines[begin + 1].split() == ["on", "weights", "caches", "rest", "sum"]
    assert lines[begin + 2].startswith("target")
    assert lines[-1].startswith("What helps")


def test_memory_that_others_hold_is_a_warning_on_a_cpu(tmp_path, model):
    folder = save(model, tmp_path / "model")
    tight = [DeviceFacts("cpu", 64 * GIB, 1 << 10)]
    with pytest.warns(RuntimeWarning, match="unless others give some back") as caught:
        assert arrange([folder], facts=tight) == ["cpu"]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrange([folder], facts=[DeviceFacts("cpu", 64 * GIB, GIB)])
        arrange([folder], facts=[DeviceFacts("cpu", 0, 0)])  # a system that does not tell
    with pytest.raises(DoesNotFit):
        arrange([folder], facts=[DeviceFacts("cpu", 1 << 10, 1 << 10)])


def on_gpu(model, name: str):
    """A model that says it lies on a GPU."""
    kind = type("OnGpu", (type(model),), {"device": property(lambda self: torch.device(name)), "__module__": __name__})
    other = copy.deepcopy(model)
    other.__class__ = kind
    return other


def test_a_call_must_fit_beside_what_is_there(model, monkeypatch):
    models = {"draft 0": on_gpu(noisy(model, 0.1), "cuda:1"), "target": on_gpu(model, "cuda:0")}
    free = 0

    def check(available, rows=2, longest=10, most=100_000, total=GIB, **kwargs):
        nonlocal free
        free = available
        monkeypatch.setattr(
            "pipespec.placement.device_facts",
            lambda names: [DeviceFacts("cuda:0", total, free), DeviceFacts("cuda:1", total, total)],
        )
        check_memory(models, rows, longest, most, **kwargs)

    first = estimate([StageFacts.of_model("target", model)], 2, 10 + 1024 + 64).needs[0]
    check(first.sum)  # caches grow: what they begin with must be free
    with pytest.raises(DoesNotFit, match=r"2 x 1098 positions(.|\n)*lower max_new_tokens or the batch"):
        check(first.sum - 1)
    check(first.sum - 1, kept=lambda: {"cuda:0": 1})
    with pytest.raises(DoesNotFit):
        check(first.sum - 1, kept=lambda: {"cuda:1": 1})
    with pytest.raises(DoesNotFit, match="1000000 positions"):  # all that there is would not do
        check(first.sum, most=1_000_000)
    with pytest.raises(DoesNotFit, match="131072 positions"):  # graphs need it all at once, rounded up
        check(first.sum, graphs=True)
    check(2 * GIB, graphs=True, total=2 * GIB)

    def spare():
        nonlocal free
        free += 7

    check(first.sum - 7, spare=spare)
    assert free == first.sum
    check(first.sum, spare=spare)  # not asked for where there is room
    assert free == first.sum
    with pytest.raises(DoesNotFit):
        check(first.sum - 8, spare=spare)


class Live:
    """The caches that there are, and a machine that has ``total`` bytes for them and for forwards."""

    def __init__(self, monkeypatch, total: int):
        self.caches: weakref.WeakSet[RowCache] = weakref.WeakSet()
        self.total = total
        allocate = RowCache._allocate

        def watched(cache, capacity, dtype, device):
            self.caches.add(cache)
            return allocate(cache, capacity, dtype, device)

        monkeypatch.setattr(RowCache, "_allocate", watched)
        monkeypatch.setattr("pipespec.placement.host_memory", lambda: (GIB, self.total - self.bytes()))

    def bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def shape(cache: RowCache) -> tuple[int, int]:
    return cache.rows, cache.capacity


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"schedule": "streams"}, 128),
        ({"graphs": True}, 128),
        ({}, 4 + 20 + WIDTH),
    ],
    ids=str,
)
def test_caches_that_a_call_does_not_use_give_way(model, monkeypatch, options, last):
    """Only where there is no room beside them; then they are gone before anything is allocated, and no room is promised twice."""
    wanted = model.generate(PROMPT.repeat(4, 1), max_new_tokens=20, do_sample=False)
    live = Live(monkeypatch, GIB)
    with warnings.catch_warnings(), Pipeline(model, noisy(model, 0.1), **options) as pipe:
        warnings.simplefilter("error")  # a call for which there is too little memory
        here = len(pipe._driver.stages)
        for rows, new in ((1, 300), (2, 300), (3, 20)):
            pipe.generate(PROMPT.repeat(rows, 1), max_new_tokens=new, max_time=0.0)
        assert len(live.caches) == (3 if last == 128 else 1) * here
        stages = [StageFacts.of_model("target", m) for m in pipe.models]
        live.total = estimate(stages, 4, last).on("cpu")  # for the next call, and nothing else
        assert torch.equal(pipe.generate(PROMPT.repeat(4, 1), max_new_tokens=20), wanted)
        assert [shape(cache) for cache in live.caches] == [(4, last)] * here
        kept = set(map(id, live.caches))
        assert torch.equal(pipe.generate(PROMPT.repeat(4, 1), max_new_tokens=20), wanted)
        assert set(map(id, live.caches)) == kept  # taken over
        with pytest.raises(RuntimeWarning, match="unless others give some back"):
            pipe.generate(PROMPT.repeat(5, 1), max_new_tokens=20)


def test_what_an_earlier_call_might_have_grown_to_is_not_counted(model, monkeypatch):
    """A limit of 100 000 tokens, one of which came, makes no room for a batch that needs as much."""
    long = copy.deepcopy(model)
    long.config.max_position_embeddings = 200_000
    live = Live(monkeypatch, GIB)
    pipe = Pipeline(long)
    pipe.generate(PROMPT, max_new_tokens=100_000, max_time=0.0)
    live.total = live.bytes() + (1 << 20)
    with pytest.warns(RuntimeWarning, match="unless others give some back"):
        pipe.generate(PROMPT.repeat(16, 1), max_new_tokens=1500, max_time=0.0)


@pytest.mark.parametrize("options", [{"schedule": "streams"}, {}], ids=str)
def test_a_conversation_goes_on_in_tight_memory(model, monkeypatch, options):
    """What the target and the drafts go on with is not given back, nor asked for a second time."""
    plain_text = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
    live = Live(monkeypatch, GIB)
    with warnings.catch_warnings(), Pipeline(model, noisy(model, 0.1), **options) as pipe:
        warnings.simplefilter("error")
        given = {"return_dict_in_generate": True, "use_cache": True}
        said = pipe.generate(PROMPT, max_new_tokens=80, max_time=0.0, **given)
        draft = pipe._driver.stages[0]._cache
        stages = [StageFacts.of_model("target", m) for m in pipe.models]
        live.total = live.bytes() + sum(need.rest for need in estimate(stages, 1, 128).needs)
        for new in (10, 20):
            length = said.sequences.shape[1]
            said = pipe.generate(said.sequences, past_key_values=said.past_key_values, max_new_tokens=new, **given)
            assert torch.equal(said.sequences, plain_text[:, : length + new])
            assert pipe._driver.stages[0]._cache is draft


@pytest.mark.parametrize("how", ["streams", "lockstep", "stages"])
def test_the_copy_that_is_returned_is_counted(model, monkeypatch, how):
    """Whoever keeps its cache returns a copy, and a DynamicCache is written anew; then as much again must be free."""
    asked = []
    monkeypatch.setattr(pipeline, "check_memory", lambda *args, copied, **kwargs: asked.append(copied))
    keeps_its_own = how != "lockstep"
    pipe = SpeculativePipeline(model, stages=2) if how == "stages" else Pipeline(model, noisy(model, 0.1), schedule=how)

    def text_and_copy(ids, cache=None, new=20, **options):
        out = pipe.generate(ids, past_key_values=cache, max_new_tokens=new, **options)
        return (out.sequences if options else out), asked.pop()

    with contextlib.closing(pipe) if how == "streams" else contextlib.nullcontext():
        given = {"return_dict_in_generate": True}
        assert not text_and_copy(PROMPT)[1]
        assert text_and_copy(PROMPT, **given)[1] == keeps_its_own
        assert not text_and_copy(PROMPT, use_cache=False, **given)[1]
        assert text_and_copy(PROMPT, DynamicCache(config=model.config))[1]
        cache = RowCache.for_model(model, 1, 40)
        text, copied = text_and_copy(PROMPT, cache)  # there is room in it
        assert not copied
        assert text_and_copy(text, cache)[1] == keeps_its_own


def test_a_copy_takes_memory_on_the_targets_device(model, monkeypatch):
    models = {"draft 0": on_gpu(noisy(model, 0.1), "cuda:1"), "target": on_gpu(model, "cuda:0")}
    need = estimate([StageFacts.of_model("target", model)], 2, 128, graphs=True).needs[0]
    copy_of_it = 2 * 100 * RowCache.bytes_for(model.config, 1, 1, torch.float32)
    for free, fits in (
        (need.sum + GRAPH_ALLOWANCE + copy_of_it, True),
        (need.sum + GRAPH_ALLOWANCE + copy_of_it - 1, False),
    ):
        facts = [DeviceFacts("cuda:0", GIB, free), DeviceFacts("cuda:1", GIB, need.sum + GRAPH_ALLOWANCE)]
        monkeypatch.setattr("pipespec.placement.device_facts", lambda names, facts=facts: facts)
        with contextlib.nullcontext() if fits else pytest.raises(DoesNotFit, match="its copy  cuda:0"):
            check_memory(models, 2, 4, 100, graphs=True, copied=True)


def test_stages_of_a_partition_give_way(model, monkeypatch):
    wanted = model.generate(PROMPT.repeat(4, 1), max_new_tokens=20, do_sample=False)
    live = Live(monkeypatch, GIB)
    pipe = SpeculativePipeline(model, noisy(model, 0.1), stages=2)
    pipe.generate(PROMPT.repeat(3, 1), max_new_tokens=200)
    stages = [StageFacts.of_model("target", m) for m in pipe.models]
    live.total = estimate(stages, 4, 24 + WIDTH).on("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(pipe.generate(PROMPT.repeat(4, 1), max_new_tokens=20), wanted)
    assert {cache.rows for cache in live.caches} == {4}


def test_each_call_is_checked(model, monkeypatch):
    pipe = Pipeline(model, noisy(model, 0.02))
    wanted = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    total = 8 << 20
    monkeypatch.setattr("pipespec.placement.host_memory", lambda: (total, total))
    with pytest.raises(ValueError, match="lower max_new_tokens or the batch"):
        pipe.generate(PROMPT.repeat(64, 1), max_new_tokens=400)
    assert torch.equal(pipe.generate(PROMPT, max_new_tokens=5), wanted)


def test_what_is_no_decoder_is_refused_for_what_it_is(model, tmp_path, monkeypatch):
    """Not for a size that cannot be told."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        other = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2))
    for device in (None, "auto"):
        with pytest.raises(TypeError, match="draft 0 is a GPT2LMHeadModel"):
            Pipeline(model, save(other, tmp_path / "other"), device=device)
    monkeypatch.setattr(
        StageFacts, "of_path", lambda name, *args, **kwargs: StageFacts(name, SizeLess(), torch.float32, 5)
    )
    gpus(monkeypatch)
    for device, expected in ((None, "cpu"), ("auto", "cpu"), ("cuda:1", "cuda:1"), ([None, "cpu"], "cpu")):
        assert arrange(["somewhere", "elsewhere"], device=device)[0] == expected


class SizeLess:
    """A configuration that says nothing."""


# ---- which stage where


_FREE = [(40, ("cuda:3",)), (79, ("cuda:2",)), (70, ("cuda:1",)), (75, ("cuda:0",))]
GPUS = [
    DeviceFacts("cpu", 64 * GIB, 60 * GIB),
    *(DeviceFacts(f"cuda:{i}", 80 * GIB, free * GIB, peers) for i, (free, peers) in enumerate(_FREE)),
]


def stage(name, gib, device=None):
    config = llama("1B")
    where = {"device": device, "loaded": True} if device else {}
    return StageFacts(name, config, torch.bfloat16, int(gib * GIB), **where)


def test_the_automatic_choice():
    """The target where most is free; drafts on GPUs of their own, rather on one that the target's reaches directly, the last one first."""
    chain = [stage("draft 0", 2), stage("draft 1", 16), stage("target", 60)]
    assert choose(chain, GPUS) == ["cuda:3", "cuda:2", "cuda:1"]
    assert choose(chain, GPUS[::-1]) == ["cuda:3", "cuda:2", "cuda:1"]
    assert choose(chain, GPUS[:3]) == ["cuda:0", "cuda:0", "cuda:1"]  # no third GPU: where most is left
    assert choose(chain[::2], GPUS[2:3]) == ["cuda:1", "cuda:1"]
    assert choose(chain, GPUS[:1]) == ["cpu"] * 3
    # What a draft needs must be free beside the target.
    assert choose([stage("draft 0", 15), stage("target", 60)], GPUS[2:3]) == ["cuda:1"] * 2
    with pytest.raises(DoesNotFit, match=r"draft 0 fits on no GPU(.|\n)*target(.|\n)*draft 0") as caught:
        choose([stage("draft 0", 30), stage("target", 60)], GPUS[2:3])
    assert "79.00 free of 80.00" in str(caught.value)
    with pytest.raises(DoesNotFit, match="target fits on no GPU"):
        choose([stage("target", 79)], GPUS)
    # Equal GPUs: the first one; what is loaded stays and takes none of the free memory again.
    equal = [DeviceFacts(f"cuda:{i}", 80 * GIB, 50 * GIB) for i in range(3)]
    assert choose([stage("draft 0", 1), stage("target", 1)], equal) == ["cuda:1", "cuda:0"]
    assert choose([stage("draft 0", 1), stage("target", 60, "cuda:2")], equal) == ["cuda:0", "cuda:2"]
    assert choose([stage("draft 0", 60, "cuda:0"), stage("target", 40)], equal) == ["cuda:0", "cuda:1"]
    assert choose([stage("draft 0", 1, "cuda:1"), stage("target", 1)], GPUS) == ["cuda:1", "cuda:1"]


def gpus(monkeypatch, count=2, current=0):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


def test_what_device_may_be(monkeypatch):
    gpus(monkeypatch, current=1)
    assert requested(None, 2) == [None, None]
    assert requested("cuda", 2) == ["cuda:1", "cuda:1"]
    assert requested(torch.device("cuda:0"), 1) == ["cuda:0"]
    assert requested(["cuda:1", None], 2) == ["cuda:1", None]
    assert requested(("cpu", "cuda"), 2) == ["cpu", "cuda:1"]
    assert requested({"draft 1": "cpu", "target": "cuda:0"}, 3) == [None, "cpu", "cuda:0"]
    assert requested("auto", 3) == "auto"


def test_what_device_may_not_be(model, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "load_model", None)  # nothing is loaded
    folder = save(model, tmp_path / "model")
    for device, match in {
        "cuda": "torch sees no GPU here",
        "mps": "stages run on cpu or cuda, not on mps",
        "xpu:0": "not on xpu",
        "meta": "not on meta",
        "gpu": "device='gpu' is none; use 'cpu', 'cuda'",
        "cpu,cpu": "is none",
    }.items():
        for given in (device, [None, device], {"draft 0": device}):
            with pytest.raises(ValueError, match=match):
                Pipeline(folder, folder, device=given)
    for given in (["auto", "cpu"], {"draft 0": "auto"}):
        with pytest.raises(ValueError, match="'auto' places all stages, not one"):
            Pipeline(folder, folder, device=given)
    gpus(monkeypatch)
    with pytest.raises(ValueError, match="torch sees 2 GPUs, cuda:0 to cuda:1"):
        Pipeline(folder, device="cuda:2")
    with pytest.raises(ValueError, match=r"one per stage \(2: draft 0, target\), not 3"):
        Pipeline(folder, folder, device=["cpu"] * 3)
    with pytest.raises(ValueError, match="there is no stage 'draft 1'; the stages are draft 0, target"):
        Pipeline(folder, folder, device={"draft 1": "cpu"})
    with pytest.raises(TypeError, match="device must be"):
        Pipeline(folder, device=1.5)


def test_where_a_model_lies_is_not_contradicted(model, monkeypatch, tmp_path):
    gpus(monkeypatch)
    folder = save(model, tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"target was given as a model on cpu, and device='cuda:0' says otherwise.*model\.to"
    ):
        Pipeline(model, device="cuda")
    with pytest.raises(ValueError, match="draft 0 was given as a model on cpu"):
        attach(copy.deepcopy(model), noisy(model, 0.1), device=["cuda:1", None])
    for device in ("cpu", None, ["cpu", None], {"draft 0": "cpu"}):
        pipe = Pipeline(model, folder, device=device)
        assert [str(m.device) for m in pipe.models] == ["cpu", "cpu"]
    # As the sequence says, and in its order.
    loads = []
    monkeypatch.setattr(pipeline, "load_model", lambda m, device, **kwargs: loads.append(device))
    facts = [DeviceFacts("cuda:0", GIB, GIB), DeviceFacts("cuda:1", GIB, GIB)]
    monkeypatch.setattr("pipespec.placement.device_facts", lambda names=None: facts)
    for device, expected in (
        ({"draft 1": "cuda:1", "target": "cuda:0"}, ["cpu", "cuda:1", "cuda:0"]),
        (["cuda:1", "cpu", "cuda:0"], ["cuda:1", "cpu", "cuda:0"]),
        ("auto", ["cuda:0", "cuda:1", "cuda:0"]),
    ):
        loads.clear()
        with pytest.raises(ValueError, match="same object"):  # what was loaded here is None
            Pipeline(folder, [folder, folder], device=device)
        assert loads == expected


def test_the_command_line_takes_one_device_or_one_per_stage(tmp_path, model, capsys):
    folder = str(save(model, tmp_path / "model"))
    for given, message in (
        (["mps"], "not on mps"),
        (["cpu", "mps"], "device='mps'"),
        (["cpu", "cpu", "cpu"], "one per stage (2: draft 0, target), not 3"),
        (["cuda"], "torch sees no GPU here"),
    ):
        for command in (["generate", "--prompt", "x"], ["plan"]):
            assert main([*command, "--target", folder, "--draft", folder, "--device", *given]) == 2
            assert message in capsys.readouterr().err


def test_the_cpu_is_a_place_with_memory():
    (cpu,) = device_facts(["cpu"])
    assert cpu.name == "cpu"
    assert cpu.total >= cpu.free > 0
    assert [f.name for f in device_facts()] == ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


# ---- split, offloaded, sharded


class Offloading:
    """As accelerate's AlignDevicesHook."""

    offload = True


class CpuOffload:
    """As accelerate's hook of that name: moves the whole model when it is called."""


class Sequential:
    """As accelerate's SequentialHook."""

    def __init__(self, *hooks):
        self.hooks = hooks


def refused(match, models, **kwargs):
    with pytest.raises(ValueError, match=match):
        Pipeline(models[-1], models[:-1], **kwargs)


@pytest.mark.parametrize("schedule", ["lockstep", "workers", "plain", "auto"])
def test_offloaded_models(model, schedule, monkeypatch):
    monkeypatch.setattr(workers, "_Worker", None)
    for hook in (Offloading(), Sequential(SimpleNamespace(), Offloading()), CpuOffload()):
        draft = noisy(model, 0.1)
        for layer in draft.model.layers:
            layer._hf_hook = hook
        refused(
            r"draft 0 is offloaded by accelerate \(model.layers.0 and 1 more\).*device_map=",
            [draft, model],
            schedule=schedule,
        )
    target = copy.deepcopy(model)
    target.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "disk", "lm_head": 0}
    refused(r"target is offloaded by accelerate \(model.layers.1\)", [target], schedule=schedule)
    target.hf_device_map["model.layers.1"] = "cpu"
    refused(r"target is offloaded by accelerate \(model.layers.1\)", [target], schedule=schedule)


def test_a_device_map_with_one_place_and_hooks_that_move_nothing(model):
    other = copy.deepcopy(model)
    other.hf_device_map = {"": "cpu"}
    other.model._hf_hook = SimpleNamespace(offload=False)
    wanted = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    assert torch.equal(Pipeline(other, noisy(model, 0.02)).generate(PROMPT, max_new_tokens=5), wanted)


def test_offloading_after_the_pipeline_was_made(model):
    target = copy.deepcopy(model)
    pipe = Pipeline(target, noisy(model, 0.02))
    target.model.layers[1]._hf_hook = Offloading()
    with pytest.raises(ValueError, match="target is offloaded"):
        pipe.generate(PROMPT, max_new_tokens=2)


def test_split_models(model):
    """Two devices of a machine without GPUs: the other one has no memory, and is named all the same."""
    draft = noisy(model, 0.1)
    draft.model.layers[1].mlp.to("meta")
    refused("draft 0 has weights that are not loaded", [draft, model])
    split = noisy(model, 0.1)
    weight = split.model.layers[1].mlp.up_proj.weight

    class Elsewhere(nn.Parameter):
        device = torch.device("cuda:1")

    split.model.layers[1].mlp.up_proj._parameters["weight"] = Elsewhere(weight.data)
    refused(
        r"target is spread over cpu from model.embed_tokens, cuda:1 from model.layers.1.mlp.up_proj.*device_map='auto'",
        [model, split],
    )
    with pytest.raises(NotCapturable, match=r"model.layers.1.mlp.up_proj: the model is split over several devices"):
        check_capturable([split])


def test_sharded_models(model):
    class DTensor(nn.Parameter):
        pass

    other = noisy(model, 0.1)
    other.lm_head._parameters["weight"] = DTensor(other.lm_head.weight.data)
    refused(r"draft 0 is sharded over processes \(lm_head", [other, model])


# ---- quantised


class Packed(nn.Module):
    """A linear layer as bitsandbytes' 8-bit ones: the weight a byte each, with a scale per row; computes in what it is fed."""

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


def packed(model, *, head=False, **settings):
    other = copy.deepcopy(model)
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and (head or name != "lm_head"):
                setattr(module, name, Packed(child))
    other.config.quantization_config = BitsAndBytesConfig(**(settings or {"load_in_8bit": True}))
    other.quantization_method = other.config.quantization_config.quant_method
    other.is_quantized = True
    return other


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_models_run_in_this_process(model, head, dtype):
    """As target and as draft, with their own text; what is stored in bytes is no dtype to compute in."""
    target = packed(copy.deepcopy(model).to(dtype), head=head)
    wanted = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    for schedule in ("plain", "lockstep"):
        for draft in (noisy(model, 0.02), packed(noisy(model, 0.02))):
            pipe = Pipeline(target, draft, schedule=schedule)
            found = pipe.generate(PROMPT, max_new_tokens=12)
            if dtype is torch.float32:
                assert torch.equal(found, wanted)
            else:  # how many tokens are fed at once decides near-ties
                assert lag(target, found) < 0.02
            assert pipe._driver.target._cache.dtype == dtype
    original = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(Pipeline(model, packed(noisy(model, 0.02))).generate(PROMPT, max_new_tokens=12), original)


def lag(model, text):
    """By how much, as a part of all logits' range, a token of the text was less than the best; greedy choices: 0, but for rounding."""
    with torch.no_grad():
        logits = model(text).logits[0, PROMPT.shape[1] - 1 : -1].float()
    chosen = logits.gather(1, text[0, PROMPT.shape[1] :, None])[:, 0]
    return float(((logits.amax(1) - chosen) / (logits.amax(1) - logits.amin(1))).max())


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
def test_no_memory_for_the_weights_is_told_as_that(model, tmp_path, monkeypatch, error, at):
    """Not as damaged ones. What fails while transformers quantises a weight it only logs."""
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


def test_a_quantised_target_beside_workers(model):
    """It stays in the caller's process, so it may be packed."""
    target = packed(model)
    with Pipeline(target, always_right(model), schedule="workers") as pipe:
        wanted = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=12), wanted)


def test_the_first_weight_need_not_say_what_a_model_computes_in(model):
    other = copy.deepcopy(model)
    other.model.embed_tokens = StoredIn8Bits(other.model.embed_tokens)
    assert other.dtype == torch.float8_e4m3fn
    check_placement([other])
    wanted = other.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(Pipeline(other, noisy(model, 0.02)).generate(PROMPT, max_new_tokens=6), wanted)


class StoredIn8Bits(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight.float())


def test_a_quantised_draft_has_no_process_of_its_own(model, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_Worker", None)
    drafts = [noisy(model, 0.1), packed(model)]
    refused(r"draft 1 is quantised \(bitsandbytes 8-bit\).*schedule='lockstep'", [*drafts, model], schedule="workers")
    with pytest.raises(ValueError, match="draft 1 is quantised"):
        check_shareable([*drafts, model])
    # Of a path, before it is loaded.
    folder = save(noisy(model, 0.1), tmp_path / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    monkeypatch.setattr(pipeline, "load_model", None)
    refused(r"draft 0 is quantised \(gptq 4-bit\)", [folder, model], schedule="workers")


def test_what_a_worker_could_not_build(model):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.lora_A = base, nn.Linear(base.in_features, 2)

    draft = noisy(model, 0.1)
    draft.model.layers[0].mlp.up_proj = Adapter(draft.model.layers[0].mlp.up_proj)
    with pytest.raises(
        ValueError, match=r"draft 0 has model.layers.0.mlp.up_proj.base.weight and 2 more.*LlamaForCausalLM"
    ):
        WorkersDriver([draft, model], Policy((4,)))

    class Fancy(nn.Parameter):
        pass

    draft = noisy(model, 0.1)
    draft.model.norm._parameters["weight"] = Fancy(draft.model.norm.weight.data)
    with pytest.raises(ValueError, match=r"draft 0: model.norm.weight is a Fancy, which cannot lie in shared memory"):
        WorkersDriver([draft, model], Policy((4,)))
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


def test_quantised_weights_are_counted_as_they_are_stored(model, tmp_path):
    from safetensors.torch import save_file

    folder = save(model, tmp_path / "q", quantization_config={"quant_method": "gptq", "bits": 4})
    tensors = {"a": torch.zeros(100, 7, dtype=torch.int32), "b": torch.zeros(33, dtype=torch.float16)}
    save_file(tensors, folder / "model.safetensors")
    assert StageFacts.of_path("target", folder).weights == 100 * 7 * 4 + 33 * 2
    # In several files, as the index says; what else lies there does not count.
    save_file({"c": torch.zeros(5, dtype=torch.uint8)}, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors", "c": "other.safetensors"}})
    )
    assert StageFacts.of_path("target", folder).weights == 100 * 7 * 4 + 33 * 2 + 5
    (folder / "other.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="headers of its safetensors cannot be read"):
        StageFacts.of_path("target", folder)


def test_quantised_weights_are_read_where_they_will_lie(model, tmp_path, monkeypatch):
    """They cannot be moved; transformers needs accelerate for that."""
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


# ---- what can be captured


def not_capturable(model) -> NotCapturable:
    """As a draft; as a target, it is the same."""
    found = []
    for place, models in enumerate(([model, random_llama(3)], [random_llama(3), model])):
        with pytest.raises(NotCapturable) as caught:
            check_capturable(models)
        assert caught.value.stage == ["draft 0", "target"][place]
        assert (
            str(caught.value)
            == f"{caught.value.stage} cannot be captured in a CUDA graph: {caught.value.part}: {caught.value.cause}"
        )
        found.append(caught.value)
    assert (found[0].part, found[0].cause) == (found[1].part, found[1].cause)
    return found[0]


def test_plain_models_are_captured(model):
    check_capturable([model, copy.deepcopy(model).to(torch.bfloat16)])
    check_streams([model, model])
    check_streams([on_gpu(model, "cuda:0"), on_gpu(model, "cuda:1")])  # with or without peer access


def test_offloading_is_not_captured(model):
    other = copy.deepcopy(model)
    other.model.layers[1].mlp._hf_hook = Offloading()
    error = not_capturable(other)
    assert error.part == "model.layers.1.mlp"
    assert "offloading" in error.cause


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
def test_rotary_angles_that_depend_on_the_length_are_not_captured(kind):
    other = with_rope(kind)
    error = not_capturable(other)
    assert error.part == "model.rotary_emb"
    assert f"{kind!r}" in error.cause
    with pytest.raises(NotCapturable):  # padding shows in its angles: on a CPU, too
        check_streams([other])


def test_attention_that_nobody_can_exchange_is_not_captured(model, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(NotCapturable) as caught:
        check_capturable([model])
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


def test_which_quantised_models_are_captured(model):
    error = not_capturable(packed(model))
    assert error.part == "model.layers.0.self_attn.q_proj"
    assert "bitsandbytes 8-bit" in error.cause
    check_capturable([packed(model, load_in_4bit=True)])
    for method, compileable in (("gptq", False), ("awq", False), ("torchao", True), ("compressed-tensors", True)):
        other = packed(model)
        other.config.quantization_config = {"quant_method": method}
        other.quantization_method = method
        other.hf_quantizer = SimpleNamespace(is_compileable=compileable)
        if compileable:
            check_capturable([other])
        else:
            assert method in not_capturable(other).cause
    # On a CPU nothing is captured.
    check_streams([packed(model)])
    with pytest.raises(NotCapturable):
        check_streams([on_gpu(packed(model), "cuda:0")])


def test_float64_has_no_kernels_on_a_gpu(model):
    assert "float64" in not_capturable(copy.deepcopy(model).to(torch.float64)).cause


def test_streams_want_all_stages_on_gpus_or_none(model):
    mixed = [model, on_gpu(model, "cuda:0")]
    with pytest.raises(ValueError, match=r"draft 0 lies on the CPU.*device=.*schedule='workers'"):
        check_streams(mixed)
    with pytest.raises(ValueError, match=r"draft 0, target lie on the CPU"):
        check_streams([model, on_gpu(model, "cuda:1"), model])


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_loaded_to_gpus(model, tmp_path, device):
    folder, draft = save(model, tmp_path / "target"), save(noisy(model, 0.02), tmp_path / "draft")
    pipe = Pipeline(folder, draft, device=device)
    assert [m.device.type for m in pipe.models] == ["cuda", "cuda"]
    wanted = pipe.target.generate(PROMPT.to(pipe.target.device), max_new_tokens=20, do_sample=False)
    assert torch.equal(pipe.generate(PROMPT.to(pipe.target.device), max_new_tokens=20), wanted)
    with pytest.raises(DoesNotFit, match="lower max_new_tokens or the batch"):
        pipe.generate(PROMPT.to(pipe.target.device).repeat(512, 1), max_new_tokens=2**22)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_estimate_on_a_gpu():
    """What torch allocates for weights, cache and the forwards of a call lies between the exact part of the estimate and all of it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_llama(1, hidden=512, layers=4, vocabulary=8000).to("cuda")
    stage = StageFacts.of_model("target", model)
    ids = torch.full((2, 300), 7, device="cuda")
    Pipeline(model).generate(ids, max_new_tokens=100)
    need = estimate([stage], 2, 400 + 64).needs[0]
    peak = torch.cuda.max_memory_allocated() - before
    assert (
        stage.weights + need.caches <= peak <= stage.weights + need.sum + (32 << 20)
    )  # cuBLAS has a work space of its own


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_stages_on_two_gpus_and_the_cpu(model, tmp_path, schedule):
    folders = [save(noisy(model, 0.02, seed=i), tmp_path / str(i)) for i in range(3)]
    with Pipeline(folders[2], folders[:2], device=["cpu", "cuda:1", "cuda:0"], schedule=schedule) as pipe:
        assert [str(m.device) for m in pipe.models] == ["cpu", "cuda:1", "cuda:0"]
        prompt = PROMPT.to("cuda:0")
        wanted = pipe.target.generate(prompt, max_new_tokens=20, do_sample=False)
        assert torch.equal(pipe.generate(prompt, max_new_tokens=20), wanted)
