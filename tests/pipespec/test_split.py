"""Models over several devices, and models whose weights are elsewhere between calls: the text of the whole model.

Without accelerate, hooks of this file bring the weights. With it, its own do. Two real devices need GPUs.
"""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from pipespec import Pipeline, attach, detach, trust
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.errors import DoesNotFit, NotCapturable
from pipespec.models import loading
from pipespec.models.devices import LayerDevices, offloaded_modules
from pipespec.preflight.devices import requested
from pipespec.preflight.memory import StageFacts, estimate
from pipespec.preflight.placement import arrange
from pipespec.preflight.support import check_streams
from pipespec.schedules.asynchronous import membership
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.pipespec.checkpoints import GIB, PROMPT, folder_of, gpus, llama, save, some_gpus
from tests.support.chains import in_process
from tests.trials import trials

LAYERS = 3


class PlacementHook(SimpleNamespace):
    """What accelerate leaves on a module."""

    __module__ = "accelerate.hooks"


@pytest.fixture(scope="module")
def model():
    return random_llama(3, layers=LAYERS)


def offloaded(model, within=""):
    """A copy of which modules with names that begin with ``within`` have their weights only while they run."""
    other = copy.deepcopy(model)
    brought = []
    for name, module in other.named_modules():
        weights = dict(module._parameters)
        if not name.startswith(within) or not weights:
            continue

        def bring(module, _, weights=weights):
            brought.append(module)
            module._parameters.update(weights)

        def drop(module, *_):
            for at, weight in module._parameters.items():
                module._parameters[at] = None if weight is None else nn.Parameter(weight.to("meta"))

        drop(module)
        trust(bring, drop)
        module.register_forward_pre_hook(bring)
        module.register_forward_hook(drop)
        module._hf_hook = PlacementHook(offload=True, execution_device="cpu")
    return other, brought


@pytest.mark.parametrize(
    ("schedule", "within"), [("plain", ""), ("lockstep", "model.layers.1"), ("lockstep", "lm_head"), ("workers", "")]
)
def test_weights_that_hooks_bring(model, schedule, within):
    """As target; greedy, sampled, batches of different lengths, and a cache that goes on."""
    target, brought = offloaded(model, within)
    ids, mask = left_pad(random_prompts(3, seed=1))
    reference = Pipeline(model, schedule="plain")
    with Pipeline(target, noisy(model, 0.02), schedule=schedule) as pipe:
        for options in ({"do_sample": False}, {"do_sample": True, "seed": 5, "top_p": 0.9}):
            wanted = reference.generate(ids, attention_mask=mask, max_new_tokens=12, **options)
            assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=12, **options), wanted)
        assert pipe.report.stages[-1].forward.startswith("transformers: accelerate brings the weights of ")
        assert brought
        first = pipe.generate(PROMPT, max_new_tokens=8, return_dict_in_generate=True)
        again = pipe.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=8)
        assert torch.equal(again, model.generate(PROMPT, max_new_tokens=16, do_sample=False))


def test_drafts_and_other_entries(model):
    """An offloaded draft in lockstep, the default schedule, ``attach()``, and what is refused by name."""
    draft, brought = offloaded(noisy(model, 0.02))
    wanted = model.generate(PROMPT, max_new_tokens=10, do_sample=False)
    pipe = Pipeline(model, draft, schedule="lockstep", lookahead=4)
    assert torch.equal(pipe.generate(PROMPT, max_new_tokens=10), wanted)
    assert pipe.report.stages[1].accepted > 0
    assert brought
    with pytest.raises(
        ValueError, match=r"draft 0: a worker process .* accelerate brings the weights of model.embed_tokens"
    ):
        Pipeline(model, draft, schedule="workers")
    target, _ = offloaded(model, "model.layers.2")
    plain = Pipeline(target)
    assert plain.schedule == "lockstep"  # an n-gram index joins it
    attach(target, noisy(model, 0.02), schedule="lockstep", lookahead=4)
    assert torch.equal(target.generate(PROMPT, max_new_tokens=10, do_sample=False), wanted)
    detach(target)
    with pytest.raises(
        NotCapturable, match=r"its weights: accelerate brings the weights of model.layers.2.self_attn.q_proj"
    ):
        check_streams([target])
    with pytest.raises(ValueError, match=r"exact=True.*accelerate brings the weights of model.layers.2"):
        Pipeline(target, schedule="plain", exact=True)


def test_drafts_are_made_out_of_whole_models(model):
    """A derived draft shares modules' weights. It has no hooks that bring them."""
    part, _ = offloaded(model, "model.layers.1")
    with pytest.raises(ValueError, match=r"made out of a model that is whole on one device.*accelerate brings"):
        Pipeline(model, part, schedule="lockstep", weights={"drafts": "int8"})


def test_rejection_sampling_and_no_prompt(model):
    """What has a device: the draft's distributions, and the begin token of a call without a prompt."""
    target, _ = offloaded(model)
    texts = []
    for its in (model, target):
        pipe = Pipeline(its, noisy(model, 0.02), acceptance="rejection", native=False)
        options = {"max_new_tokens": 10, "do_sample": True, "seed": 5}
        texts.append([pipe.generate(PROMPT, **options).tolist(), pipe.generate(**options).tolist()])
    assert texts[0] == texts[1]


def test_ranks(model, monkeypatch):
    """An offloaded target and an offloaded draft, each in its rank."""
    target, brought = offloaded(model)
    draft, _ = offloaded(noisy(model, 0.02), "model.layers.1")
    with in_process(monkeypatch, [draft, target]) as (pipe, _):
        wanted = model.generate(PROMPT, max_new_tokens=10, do_sample=False)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=10), wanted)
        assert brought


def test_a_rank_takes_several_gpus(monkeypatch):
    gpus(monkeypatch)
    monkeypatch.setenv("RANK", "0")
    names = ["draft 0", "target"]
    split = [["cuda:0", "cuda:1"]]
    for device in ("cuda:0+cuda:1", ["cpu", ["cuda:0", "cuda:1"]], {"target": ["cuda:0", "cuda:1"]}):
        assert membership.device_of_stage(device, names, 1) == split
    assert membership.device_of_stage(["cpu", torch.device("cuda:1")], names, 0) == "cpu"
    assert membership.device_of_stage(torch.device("cuda:1"), names, 0) == "cuda:1"


def test_what_offloaded_weights_take(model):
    target, _ = offloaded(model)
    some, whole = (estimate([StageFacts.of_model("target", m)], 2, 100).needs[0] for m in (target, model))
    assert some.device == "cpu"
    assert some.activations - whole.activations == model.lm_head.weight.nbytes  # the largest


# ---- caches with several storages


NEAR, FAR = torch.device("cpu"), torch.device("cpu", 0)
"""Two names of one device: with them layers have different storages. What is on which device shows on GPUs only."""


def caches(model, rows):
    whole = RowCache.for_model(model, rows, 24)
    apart = RowCache(
        model.config,
        rows,
        24,
        dtype=torch.float32,
        device=NEAR,
        layer_devices=[NEAR, FAR, NEAR][: model.config.num_hidden_layers],
    )
    return whole, apart


def same(whole, apart):
    assert whole.lengths == apart.lengths
    for one, other in zip(whole.states(), apart.states(), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    for one, other in zip(whole.layers, apart.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_storages_apart_hold_what_one_storage_holds(model, attention):
    """Every operation of a cache, in lengths that are equal and that differ. The layers are interleaved."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    whole, apart = caches(model, 3)
    ids = torch.arange(3 * 12).view(3, 12) * 7 % model.config.vocab_size
    assert apart.nbytes == whole.nbytes

    def feed(q):
        logits = [forward(model, ids[:, :q], cache, keep=q, native=False) for cache in (whole, apart)]
        assert torch.equal(*logits)
        same(whole, apart)

    def both(change):
        change(whole)
        change(apart)
        same(whole, apart)

    feed(6)
    both(lambda cache: cache.truncate([6, 2, 4]))
    feed(3)
    both(lambda cache: cache.reserve(40))
    feed(5)
    both(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    feed(1)
    for cache in (copy.deepcopy(whole), copy.deepcopy(apart)):
        same(whole, cache)
    both(lambda cache: cache.batch_select_indices(torch.tensor([1, 2, 2])))
    feed(2)
    other_whole, other_apart = caches(model, 3)
    other_whole.reserve(40)
    other_apart.reserve(40)
    other_whole.copy_from(whole, [3, 1, 2])
    other_apart.copy_from(apart, [3, 1, 2])
    same(other_whole, other_apart)
    states = [(k.clone(), v.clone()) for k, v in whole.states()]
    other_whole.load(states)
    other_apart.load(states)
    same(other_whole, other_apart)
    other_apart.copy_from(whole, [3, 1, 2])
    other_whole.truncate([3, 1, 2])
    same(other_whole, other_apart)


# ---- which layer where


def test_devices_of_one_stage(monkeypatch):
    gpus(monkeypatch, 3)
    assert requested({"target": ["cuda:1", "cuda:2"]}, 2) == [None, ("cuda:1", "cuda:2")]
    assert requested(["cuda:0", ("cuda:1", "cuda:2")], 2) == ["cuda:0", ("cuda:1", "cuda:2")]
    assert requested("cuda:1+cuda:2", 1) == [("cuda:1", "cuda:2")]  # on the command line
    for wrong in (["cuda:1"], ["cuda:1", "cuda:1"], ["cuda:1", "cpu"]):
        with pytest.raises(ValueError, match="name two or more different GPUs to split it over"):
            requested({"target": wrong}, 1)
    with pytest.raises(ValueError, match="'auto' is not a device"):
        requested({"target": ["auto", "cuda:1"]}, 1)


def layers_on(device_map):
    """Number of layers by device, in their order, and the devices of the other parts."""
    places = [device for name, device in device_map.items() if ".layers." in name]
    others = {name: device for name, device in device_map.items() if ".layers." not in name}
    return {device: places.count(device) for device in dict.fromkeys(places)}, others


def test_a_target_over_several_gpus(tmp_path, monkeypatch):
    """A run of layers on each, in the order of the devices. About equal bytes where that fits, else by free memory."""
    gpus(monkeypatch, 4)
    draft = folder_of(llama("8B"), tmp_path / "draft", dtype="bfloat16")
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    facts = some_gpus(79, 79, 79)
    for devices in (["cuda:1", "cuda:2"], ["cuda:2", "cuda:1"]):
        first, over = arrange([draft, target], device={"draft 0": "cuda:0", "target": devices}, facts=facts)
        assert first == "cuda:0"
        counts, others = layers_on(over)
        assert list(counts) == devices
        assert sum(counts.values()) == 80
        assert abs(counts[devices[0]] - 40) <= 2
        assert (others["model.embed_tokens"], others["lm_head"]) == tuple(devices)
    uneven, _ = layers_on(arrange([target], device=[["cuda:0", "cuda:1"]], facts=some_gpus(100, 50))[0])
    assert uneven["cuda:0"] > 1.5 * uneven["cuda:1"]
    # The numbers by device.
    with pytest.raises(DoesNotFit) as caught:
        arrange([target], device=[["cuda:0", "cuda:1"]], facts=some_gpus(60, 60))
    lines = [line.split() for line in str(caught.value).splitlines() if line.startswith("target")]
    assert [line[1] for line in lines] == ["cuda:0", "cuda:1"]
    assert sum(float(line[2]) for line in lines) == pytest.approx(2 * 70553706496 / GIB, abs=0.1)
    # A head that shares the embedding's weights lies beside it.
    tied = folder_of(llama("1B"), tmp_path / "tied", dtype="bfloat16")
    counts, others = layers_on(arrange([tied], device=[["cuda:0", "cuda:1"]], facts=facts)[0])
    assert sum(counts.values()) == 16
    assert len(counts) == 2
    assert others["model.embed_tokens"] == others["lm_head"] == "cuda:0"


def test_the_automatic_choice_splits_a_target_that_fits_on_no_gpu(tmp_path):
    """Over as few GPUs as suffice, those with most free memory first. Drafts then go where there is room."""
    draft = folder_of(llama("1B"), tmp_path / "draft", dtype="bfloat16")
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    first, over = arrange([draft, target], device="auto", facts=some_gpus(40, 79, 70, 75))
    assert list(layers_on(over)[0]) == ["cuda:1", "cuda:3"]
    assert first == "cuda:2"
    _, over = arrange([draft, target], device="auto", facts=some_gpus(60, 60, 60))
    assert len(layers_on(over)[0]) == 3
    with pytest.raises(DoesNotFit, match="the stages need"):
        arrange([draft, target], device="auto", facts=some_gpus(60, 60))
    assert arrange([draft], device="auto", facts=some_gpus(60, 60)) == ["cuda:0"]


def test_a_split_model_is_read_by_its_device_map(model, tmp_path, monkeypatch):
    folder = save(model, tmp_path / "model")
    where = {"model": "cuda:1", "lm_head": "cuda:2"}
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "accelerate", None)
        gpus(patched, 2)
        with pytest.raises(ImportError, match="over several devices needs the package accelerate"):
            arrange([folder], device=[["cuda:0", "cuda:1"]], facts=some_gpus(1, 1))
    asked = []

    def read(path, device_map, **options):
        asked.append(device_map)
        return model, {"missing_keys": []}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    assert loading.load_model(folder, device=where) is model
    assert asked == [where]


# ---- accelerate's own hooks


@pytest.fixture(scope="module")
def accelerate():
    return pytest.importorskip("accelerate")


def dispatched(model, accelerate, how, folder):
    other = copy.deepcopy(model)
    if how == "all on disk":
        return accelerate.disk_offload(other, folder)
    if how == "in memory":
        return accelerate.cpu_offload(other, execution_device=torch.device("cpu"))
    names = [
        "model.embed_tokens",
        "model.rotary_emb",
        *(f"model.layers.{i}" for i in range(LAYERS)),
        "model.norm",
        "lm_head",
    ]
    places = {name: "disk" if name in ("model.layers.1", "lm_head") else "cpu" for name in names}
    if how == "some on disk":
        return accelerate.dispatch_model(other, places, main_device="cpu", offload_dir=folder)
    return AutoModelForCausalLM.from_pretrained(
        save(model, folder / "m"), device_map=places, offload_folder=folder / "o"
    )


@pytest.mark.parametrize("how", ["all on disk", "in memory", "some on disk", "from_pretrained"])
def test_the_text_of_the_whole_model(model, accelerate, how, tmp_path):
    target = dispatched(model, accelerate, how, tmp_path)
    assert offloaded_modules(target)
    assert LayerDevices.of(target) == LayerDevices.of(model)
    reference = Pipeline(model, schedule="plain")
    for schedule in ("plain", "lockstep") if how != "some on disk" else ("lockstep", "workers"):
        with Pipeline(target, noisy(model, 0.02), schedule=schedule) as pipe:
            for seed in range(trials(ci=1, nightly=25)):
                ids, mask = left_pad(random_prompts(4, seed=seed))
                for options in ({"do_sample": False}, {"do_sample": True, "seed": seed}):
                    wanted = reference.generate(ids, attention_mask=mask, max_new_tokens=16, **options)
                    assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=16, **options), wanted)
            assert "accelerate brings the weights" in pipe.report.stages[-1].forward


# ---- on GPUs


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("attention", ["sdpa", "pipespec"])
@pytest.mark.parametrize("schedule", ["plain", "lockstep", "workers"])
def test_layers_on_two_gpus(model, accelerate, tmp_path, schedule, attention):
    """Each layer's keys and values beside it; rows of different lengths; a DynamicCache of the caller's."""
    folder = save(model, tmp_path / "model")
    with Pipeline(
        folder, noisy(model, 0.02).to("cuda:0"), device={"target": ["cuda:0", "cuda:1"]}, schedule=schedule
    ) as pipe:
        target = pipe.target
        target.set_attn_implementation(attention)
        assert LayerDevices.of(target).devices == (torch.device("cuda:0"), torch.device("cuda:1"))
        ids, mask = (x.to("cuda:0") for x in left_pad(random_prompts(3, seed=1)))
        wanted = target.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
        out = pipe.generate(ids, attention_mask=mask, max_new_tokens=16, return_dict_in_generate=True)
        assert torch.equal(out.sequences, wanted)
        cache = out.past_key_values
        assert [layer.keys.device for layer in cache.layers] == list(LayerDevices.of(target).layers)
        assert {str(d) for d in cache.nbytes_on()} == {"cuda:0", "cuda:1"}
        sampled = [pipe.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=True, seed=1) for _ in range(2)]
        assert torch.equal(*sampled)
        own = DynamicCache()
        pipe.generate(ids, attention_mask=mask, max_new_tokens=4, past_key_values=own)
        assert [layer.keys.device for layer in own.layers] == list(LayerDevices.of(target).layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("schedule", ["plain", "lockstep"])
def test_a_gpu_with_weights_on_the_cpu_and_on_disk(model, accelerate, tmp_path, schedule):
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": "cpu", "lm_head": 0}
    places |= {f"model.layers.{i}": [0, "cpu", "disk"][i] for i in range(LAYERS)}
    target = accelerate.dispatch_model(copy.deepcopy(model), places, offload_dir=tmp_path)
    assert LayerDevices.of(target).devices == (torch.device("cuda:0"),)
    ids = PROMPT.to("cuda:0")
    wanted = target.generate(ids, max_new_tokens=16, do_sample=False)
    pipe = Pipeline(target, noisy(model, 0.02).to("cuda:0"), schedule=schedule)
    assert torch.equal(pipe.generate(ids, max_new_tokens=16), wanted)
