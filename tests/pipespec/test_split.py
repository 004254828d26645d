"""Models over several devices, and models whose weights are elsewhere between calls: the text of the whole model. Two real devices need GPUs."""

import copy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from pipespec import Pipeline, attach, detach
from pipespec.checks.devices import arrange, requested
from pipespec.checks.models import check_streams
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.errors import DoesNotFit, NotCapturable
from pipespec.models import loading
from pipespec.models.properties import LayerDevices, offloaded_modules
from pipespec.schedules.asynchronous import membership
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.pipespec.checkpoints import PROMPT, folder_of, gpus, llama, save, some_gpus
from tests.pipespec.tiny_models import TINY_MODELS, model_of
from tests.support.chains import in_process
from tests.support.texts import own_text
from tests.trials import trials

accelerate = pytest.importorskip("accelerate")

LAYERS = 3


@pytest.fixture(scope="module")
def model():
    return random_llama(3, layers=LAYERS)


def offloaded(model, within=""):
    """A copy of which a module has its weights only while it runs."""
    other = copy.deepcopy(model)
    accelerate.cpu_offload(other.get_submodule(within), execution_device=torch.device("cpu"))
    return other


HOW = {
    "all in memory": lambda model, folder: offloaded(model),
    "the head in memory": lambda model, folder: offloaded(model, "lm_head"),
    "all on disk": lambda model, folder: accelerate.disk_offload(copy.deepcopy(model), folder),
    "some on disk": lambda model, folder: accelerate.dispatch_model(
        copy.deepcopy(model), PLACES, main_device="cpu", offload_dir=folder
    ),
    "from_pretrained": lambda model, folder: AutoModelForCausalLM.from_pretrained(
        save(model, folder / "m"), device_map=PLACES, offload_folder=folder / "o"
    ),
}
PLACES = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm"], "cpu")
PLACES |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu", "lm_head": "disk"}


@pytest.mark.parametrize("how", HOW)
def test_the_text_of_the_whole_model(model, how, tmp_path):
    """As target; greedy, sampled, batches of different lengths, and a cache that goes on."""
    target = HOW[how](model, tmp_path)
    assert offloaded_modules(target)
    assert LayerDevices.of(target) == LayerDevices.of(model)
    reference = Pipeline(model, schedule="plain")
    for schedule in ("plain", "lockstep") if how != "some on disk" else ("lockstep", "workers"):
        with Pipeline(target, noisy(model, 0.02), schedule=schedule) as pipe:
            for seed in range(trials(ci=1, nightly=25)):
                ids, mask = left_pad(random_prompts(4, seed=seed))
                for options in ({"do_sample": False}, {"do_sample": True, "seed": seed, "top_p": 0.9}):
                    call = {"attention_mask": mask, "max_new_tokens": 14, **options}
                    assert torch.equal(pipe.generate(ids, **call), reference.generate(ids, **call))
            assert pipe.report.stages[-1].forward.startswith("transformers: accelerate brings the weights of ")
            first = pipe.generate(PROMPT, max_new_tokens=8, return_dict_in_generate=True)
            again = pipe.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=8)
            assert torch.equal(again, own_text(model, PROMPT, max_new_tokens=16))


def test_drafts_and_other_entries(model):
    """An offloaded draft in lockstep, the default schedule, ``attach()``, and what is refused by name."""
    draft = offloaded(noisy(model, 0.02))
    wanted = model.generate(PROMPT, max_new_tokens=10, do_sample=False)
    pipe = Pipeline(model, draft, schedule="lockstep", lookahead=4)
    assert torch.equal(pipe.generate(PROMPT, max_new_tokens=10), wanted)
    assert pipe.report.stages[1].accepted > 0
    with pytest.raises(
        ValueError, match=r"draft 0: a worker process .* accelerate brings the weights of model.embed_tokens"
    ):
        Pipeline(model, draft, schedule="workers")
    target = offloaded(model, "model.layers.2")
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
    part = offloaded(model, "model.layers.1")
    with pytest.raises(ValueError, match=r"made out of a model that is whole on one device.*accelerate brings"):
        Pipeline(model, part, schedule="lockstep", weights={"drafts": "int8"})


def test_rejection_sampling_and_no_prompt(model):
    """What has a device: the draft's distributions, and the begin token of a call without a prompt."""
    target = offloaded(model)
    texts = []
    for its in (model, target):
        pipe = Pipeline(its, noisy(model, 0.02), acceptance="rejection", native=False)
        options = {"max_new_tokens": 10, "do_sample": True, "seed": 5}
        texts.append([pipe.generate(PROMPT, **options).tolist(), pipe.generate(**options).tolist()])
    assert texts[0] == texts[1]


def test_ranks(model, monkeypatch):
    """An offloaded target and an offloaded draft, each in its rank."""
    target = offloaded(model)
    draft = offloaded(noisy(model, 0.02), "model.layers.1")
    with in_process(monkeypatch, [draft, target]) as (pipe, _):
        wanted = model.generate(PROMPT, max_new_tokens=10, do_sample=False)
        assert torch.equal(pipe.generate(PROMPT, max_new_tokens=10), wanted)


def test_a_rank_takes_several_gpus(monkeypatch):
    gpus(monkeypatch)
    monkeypatch.setenv("RANK", "0")
    names = ["draft 0", "target"]
    split = [["cuda:0", "cuda:1"]]
    for device in ("cuda:0+cuda:1", ["cpu", ["cuda:0", "cuda:1"]], {"target": ["cuda:0", "cuda:1"]}):
        assert membership.device_of_stage(device, names, 1) == split
    assert membership.device_of_stage(["cpu", torch.device("cuda:1")], names, 0) == "cpu"
    assert membership.device_of_stage(torch.device("cuda:1"), names, 0) == "cuda:1"


# ---- caches with several storages


NEAR, FAR = torch.device("cpu"), torch.device("cpu", 0)
"""Two names of one device: with them layers have different storages. What is on which device shows on GPUs only."""


def caches(model, rows):
    """The same cache with one storage, and with one per device. The layers are interleaved."""
    places = [FAR if layer % 2 else NEAR for layer in range(model.config.num_hidden_layers)]
    apart = RowCache(model.config, rows, 24, dtype=torch.float32, device=NEAR, layer_devices=places)
    return RowCache.for_model(model, rows, 24), apart


def same(whole, apart):
    assert (whole.lengths, whole.windows) == (apart.lengths, apart.windows)
    assert whole.nbytes == apart.nbytes == sum(apart.nbytes_on().values())
    for one, other in zip(whole.states(), apart.states(), strict=True):
        assert all(map(torch.equal, one, other))


FAMILIES = ["mistral, window", "gemma3, mixed, two RoPE bases", "deepseek_v2, latents", "gpt_oss, mixed, sinks"]


@pytest.mark.parametrize("name", ["sdpa", "eager", *(name for name in FAMILIES if name in TINY_MODELS)])
def test_storages_apart_hold_what_one_storage_holds(model, name):
    """Every operation of a cache, in lengths that are equal and that differ."""
    if name in TINY_MODELS:
        model = model_of(name)
    else:
        model = copy.deepcopy(model)
        model.set_attn_implementation(name)
    both = caches(model, 3)
    ids = torch.arange(3 * 12).view(3, 12) * 7 % model.config.vocab_size

    def feed(q):
        assert torch.equal(*(forward(model, ids[:, :q], cache, keep=q, native=False) for cache in both))
        same(*both)

    def each(change):
        for cache in both:
            change(cache)
        same(*both)

    feed(6)
    each(lambda cache: cache.truncate([6, 2, 4]))
    feed(3)
    each(lambda cache: cache.reserve(40))
    feed(9)
    feed(1)
    source, whole, both = both[0], both[0], caches(model, 3)
    each(lambda cache: cache.reserve(40))
    each(lambda cache: cache.take_rows([(source, row) for row in range(3)], [3, 1, 2]))
    states = [(k.clone(), v.clone()) for k, v in whole.states()]
    each(lambda cache: cache.load(states))


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
    """A run of layers on each, in the order of the devices: about equal bytes where that fits, else by free memory."""
    draft = folder_of(llama("8B"), tmp_path / "draft", dtype="bfloat16")
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    some_gpus(monkeypatch, 90, 90, 90)
    for devices in (["cuda:1", "cuda:2"], ["cuda:2", "cuda:1"]):
        first, over = arrange([draft, target], device={"draft 0": "cuda:0", "target": devices})
        assert first == "cuda:0"
        counts, others = layers_on(over)
        assert list(counts) == devices
        assert sum(counts.values()) == 80
        assert abs(counts[devices[0]] - 40) <= 2
        assert (others["model.embed_tokens"], others["lm_head"]) == tuple(devices)
    # A head that shares the embedding's weights lies next to it.
    tied = folder_of(llama("1B"), tmp_path / "tied", dtype="bfloat16")
    counts, others = layers_on(arrange([tied], device=[["cuda:0", "cuda:1"]])[0])
    assert sum(counts.values()) == 16
    assert len(counts) == 2
    assert others["model.embed_tokens"] == "cuda:0"
    some_gpus(monkeypatch, 110, 60)
    uneven, _ = layers_on(arrange([target], device=[["cuda:0", "cuda:1"]])[0])
    assert uneven["cuda:0"] > 1.3 * uneven["cuda:1"]
    some_gpus(monkeypatch, 60, 60)
    with pytest.raises(
        DoesNotFit, match=r"target has 131 GiB of weights.*\(cuda:0 54.00, cuda:1 54.00\): use a smaller"
    ):
        arrange([target], device=[["cuda:0", "cuda:1"]])


def test_the_automatic_choice_splits_a_target_that_fits_on_no_gpu(tmp_path, monkeypatch):
    """Over as few GPUs as suffice, those with most free memory first. Drafts then go where there is room."""
    draft = folder_of(llama("1B"), tmp_path / "draft", dtype="bfloat16")
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    some_gpus(monkeypatch, 50, 90, 80, 85)
    first, over = arrange([draft, target], device="auto")
    assert list(layers_on(over)[0]) == ["cuda:1", "cuda:3"]
    assert first == "cuda:2"
    some_gpus(monkeypatch, 60, 60, 60)
    _, over = arrange([draft, target], device="auto")
    assert len(layers_on(over)[0]) == 3
    some_gpus(monkeypatch, 60, 60)
    with pytest.raises(DoesNotFit, match="these GPUs have room for less"):
        arrange([draft, target], device="auto")
    assert arrange([draft], device="auto") == ["cuda:0"]


def test_a_split_model_is_read_by_its_device_map(model, tmp_path, monkeypatch):
    folder = save(model, tmp_path / "model")
    where = {"model": "cuda:1", "lm_head": "cuda:2"}
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "accelerate", None)
        some_gpus(patched, 1, 1)
        for device in ("auto", [["cuda:0", "cuda:1"]]):
            with pytest.raises(ImportError, match="over several devices, need the package accelerate"):
                arrange([folder], device=device)
    asked = []

    def read(path, device_map, **options):
        asked.append(device_map)
        return model, {"missing_keys": []}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    assert loading.load_model(folder, device=where) is model
    assert asked == [where]


# ---- on GPUs


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@TWO
@pytest.mark.parametrize("attention", ["sdpa", "pipespec"])
@pytest.mark.parametrize("schedule", ["plain", "lockstep", "workers"])
def test_layers_on_two_gpus(model, tmp_path, schedule, attention):
    """Each layer's keys and values next to it; rows of different lengths; a DynamicCache of the caller's."""
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
        sampled = [pipe.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=True, seed=1) for _ in range(2)]
        assert torch.equal(*sampled)
        own = DynamicCache()
        pipe.generate(ids, attention_mask=mask, max_new_tokens=4, past_key_values=own)
        assert [layer.keys.device for layer in own.layers] == list(LayerDevices.of(target).layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("schedule", ["plain", "lockstep"])
def test_a_gpu_with_weights_on_the_cpu_and_on_disk(model, tmp_path, schedule):
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": "cpu", "lm_head": 0}
    places |= {f"model.layers.{i}": [0, "cpu", "disk"][i] for i in range(LAYERS)}
    target = accelerate.dispatch_model(copy.deepcopy(model), places, offload_dir=tmp_path)
    assert LayerDevices.of(target).devices == (torch.device("cuda:0"),)
    ids = PROMPT.to("cuda:0")
    wanted = target.generate(ids, max_new_tokens=16, do_sample=False)
    pipe = Pipeline(target, noisy(model, 0.02).to("cuda:0"), schedule=schedule)
    assert torch.equal(pipe.generate(ids, max_new_tokens=16), wanted)
