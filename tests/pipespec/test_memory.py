"""The memory estimate against real allocations, and refusals before anything is loaded or allocated."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
import weakref

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from pipespec import Pipeline
from pipespec.api import base, chain
from pipespec.cli.main import main
from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.inputs import prefill_chunk, stage_names, static_capacity
from pipespec.errors import DoesNotFit
from pipespec.models import loading
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import weight_bytes
from pipespec.preflight.devices import DeviceFacts
from pipespec.preflight.memory import HEADROOM, StageFacts, check_memory, estimate
from pipespec.preflight.placement import arrange
from pipespec.preflight.support import check_shareable
from pipespec_spd import SpeculativePipeline
from tests.conftest import noisy, random_llama
from tests.pipespec.checkpoints import GIB, PROMPT, folder_of, llama, on_gpu, save


def tensor_bytes(model) -> int:
    """Bytes of all storages; tensors that share one count once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    own = [b for b in model.buffers() if b.untyped_storage().data_ptr() not in storages]
    return sum(storages.values()) + sum(b.untyped_storage().nbytes() for b in own)


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
    assert facts.model.dtype == loaded.dtype
    assert sum(p.nbytes for p in loaded.parameters()) < facts.weights  # the rotary embedding's frequencies


def test_counting_leaves_the_random_numbers_alone(model, tmp_path):
    folder = save(model, tmp_path / "model")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    StageFacts.of_path("target", folder)
    check_shareable([model, model])
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(("size", "parameters"), [("1B", 1235814400), ("8B", 8030261248), ("70B", 70553706496)])
def test_published_models_have_their_published_size(tmp_path, size, parameters):
    """Parameters as the model cards' safetensors list them, two bytes each, and the frequencies of the rotary embedding."""
    config = llama(size)
    facts = StageFacts.of_path("target", folder_of(config, tmp_path / "m", dtype="bfloat16"))
    assert facts.model.dtype == torch.bfloat16
    assert facts.weights - 2 * parameters in (config.head_dim // 2 * 4, config.head_dim // 2 * 8)  # with its original
    per_token = {"1B": 32 << 10, "8B": 128 << 10, "70B": 320 << 10}[size]  # bytes of keys and values, bf16
    assert estimate([facts], 3, 1000).needs[0].caches == 3 * 1000 * per_token


def test_quantised_weights_are_counted_as_they_are_stored(model, tmp_path):
    from safetensors.torch import save_file

    folder = save(model, tmp_path / "q", quantization_config={"quant_method": "gptq", "bits": 4})
    tensors = {"a": torch.zeros(100, 7, dtype=torch.int32), "b": torch.zeros(33, dtype=torch.float16)}
    save_file(tensors, folder / "model.safetensors")
    assert StageFacts.of_path("target", folder).weights == 100 * 7 * 4 + 33 * 2
    # In several files, those of the index. Other files do not count.
    save_file({"c": torch.zeros(5, dtype=torch.uint8)}, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors", "c": "other.safetensors"}})
    )
    assert StageFacts.of_path("target", folder).weights == 100 * 7 * 4 + 33 * 2 + 5


@pytest.mark.parametrize(("rows", "capacity"), [(1, 7), (3, 100)])
def test_caches_are_counted_to_the_byte(model, rows, capacity):
    for dtype in (torch.float32, torch.bfloat16):
        stage = copy.deepcopy(model).to(dtype)
        cache = RowCache.for_model(stage, rows, capacity)
        need = estimate([StageFacts.of_model("target", stage)], rows, capacity).needs[0]
        cache.set_lengths([capacity] * rows)
        assert need.caches == cache.nbytes == sum(t.nbytes for keys, values, _ in cache for t in (keys, values))
        assert need.weights == 0  # the weights are loaded already


def test_the_dtype_is_what_loading_makes_of_it(model, tmp_path):
    """The requested one, else the configuration's, else that of the first weight."""
    half = save(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "half")
    content = json.loads((half / "config.json").read_text())
    for change in ({}, {"dtype": None, "torch_dtype": None}, {"dtype": "float32"}):
        (half / "config.json").write_text(json.dumps(content | change))
        for dtype in ("auto", "float32", torch.float64):
            assert StageFacts.of_path("target", half, dtype).model.dtype == loading.load_model(half, dtype=dtype).dtype
    with pytest.raises(ValueError, match=r"dtype='float31'.*'bfloat16'"):
        Pipeline(half, dtype="float31")


def test_what_a_forward_holds_is_not_underestimated():
    """The largest allocations of a prefill's chunk and of a step, by torch's own account, stay below the estimate."""
    model = random_llama(1, hidden=256, layers=2, vocabulary=2000)
    model.config.max_position_embeddings = 2048
    rows, length = 2, 600
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
    need = estimate([StageFacts.of_model("target", model)], rows, length + 100).needs[0]
    assert highest > cache.nbytes  # allocations were recorded
    assert highest - cache.nbytes <= need.activations < 20 * (highest - cache.nbytes)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 2048), (2, 1024), (3, 682), (4, 512), (64, 512)])
def test_a_gpu_reads_prompts_in_wider_parts(model, rows, tokens):
    assert (prefill_chunk(rows, "cpu"), prefill_chunk(rows, "cuda:0")) == (512, tokens)
    facts = StageFacts.of_model("target", model)
    there = facts._replace(shares=tuple(share._replace(device="cuda:0") for share in facts.shares))
    here, wider = (estimate([stage], rows, 4096).needs[0].activations for stage in (facts, there))
    assert (wider > here) == (tokens > 512)
    short, draft = (
        estimate([facts, there], rows, 4096, longest=100).needs,
        estimate([there, facts], rows, 4096).needs[0],
    )
    assert short[0].activations == short[1].activations < here
    assert draft.activations == here  # the target's parts


def test_what_each_stage_needs_adds_up(model):
    """A draft in a worker process on a GPU has its weights three times and the headroom twice."""
    stages = [StageFacts.of_model(name, model) for name in stage_names(2)]
    found = estimate(stages, 3, 100)
    each = CacheLayout.of(model.config).bytes_for(3, 100, torch.float32) + found.needs[0].activations + HEADROOM
    assert found.on("cpu") == 2 * each
    stages = [
        StageFacts(s.name, s.model, (s.shares[0]._replace(device="cuda:0", weights=weight_bytes(model)),))
        for s in stages
    ]
    together = estimate(stages, 3, 100)
    assert together.on("cuda:0") == 2 * (stages[0].weights + each)
    assert together.on("cpu") == 0
    apart = estimate(stages, 3, 100, shares_weights=True)
    assert apart.on("cuda:0") - together.on("cuda:0") == stages[0].weights + HEADROOM
    assert apart.on("cpu") == stages[0].weights


# ---- refusals


def test_what_does_not_fit_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    """The numbers are in the message: stage, weights, caches, sum, free; and what helps."""
    draft = folder_of(llama("8B"), tmp_path / "draft", dtype="bfloat16")
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    facts = [DeviceFacts("cpu", 64 * GIB, 60 * GIB)]
    monkeypatch.setattr("pipespec.preflight.placement.device_facts", lambda names=None: facts)
    monkeypatch.setattr(chain, "load_model", None)
    with pytest.raises(DoesNotFit) as caught:
        Pipeline(target, draft, schedule="lockstep")
    lines = str(caught.value).splitlines()
    assert "148 GiB" in lines[0]
    assert lines[1].split() == ["on", "weights", "caches", "activations", "headroom", "sum"]
    name, _, where, weights, caches, *_ = lines[2].split()
    assert (name, where, weights) == ("draft", "cpu", f"{2 * 8030261248 / GIB:.2f}")
    assert caches == f"{1088 * (128 << 10) / GIB:.2f}"
    assert lines[3].split()[:3] == ["target", "cpu", f"{2 * 70553706496 / GIB:.0f}"]
    assert "148 GiB needed" in lines[4]
    assert "60.00 free of 64.00" in lines[4]
    assert "quantised weights" in lines[-1]
    assert "another device for a draft" in lines[-1]
    assert issubclass(DoesNotFit, ValueError)
    facts[:] = [DeviceFacts("cpu", 200 * GIB, 180 * GIB)]
    with pytest.raises(TypeError, match="NoneType"):  # on to loading
        Pipeline(target, draft, schedule="lockstep")
    with pytest.raises(DoesNotFit, match=r"295 GiB(.|\n)*smaller dtype"):
        Pipeline(target, draft, dtype="float32", schedule="lockstep")


def test_the_command_line_shows_the_table(tmp_path, monkeypatch, capsys):
    target = folder_of(llama("70B"), tmp_path / "target", dtype="bfloat16")
    monkeypatch.setattr("pipespec.preflight.devices.host_memory", lambda: (64 * GIB, 60 * GIB))
    assert main(["generate", "--target", str(target), "--prompt", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    begin = next(i for i, line in enumerate(lines) if "error: the stages need" in line)
    assert lines[begin + 1].split() == ["on", "weights", "caches", "activations", "headroom", "sum"]
    assert lines[begin + 2].startswith("target")
    assert lines[-1].startswith("What helps")


def test_memory_that_others_hold_is_a_warning_on_a_cpu(tmp_path, model):
    folder = save(model, tmp_path / "model")
    tight = [DeviceFacts("cpu", 64 * GIB, 1 << 10)]
    with pytest.warns(RuntimeWarning, match="unless other programs give some back") as caught:
        assert arrange([folder], facts=tight) == ["cpu"]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrange([folder], facts=[DeviceFacts("cpu", 64 * GIB, GIB)])
        arrange([folder], facts=[DeviceFacts("cpu", 0, 0)])  # unknown
    with pytest.raises(DoesNotFit):
        arrange([folder], facts=[DeviceFacts("cpu", 1 << 10, 1 << 10)])


def test_a_call_must_fit_beside_what_is_there(model, monkeypatch):
    models = {"draft 0": on_gpu(noisy(model, 0.1), "cuda:1"), "target": on_gpu(model, "cuda:0")}
    free = 0

    def check(available, limit=100_000, total=GIB, graphs=False, **kwargs):
        nonlocal free
        free = available
        monkeypatch.setattr(
            "pipespec.preflight.memory.device_facts",
            lambda names: [DeviceFacts("cuda:0", total, free), DeviceFacts("cuda:1", total, total)],
        )
        check_memory(models, rows=2, longest=10, limit=limit, graphs=graphs, **kwargs)

    first = estimate([StageFacts.of_model("target", models["target"])], 2, 10 + 1024 + 64, longest=10).needs[0]
    check(first.sum)  # caches grow: only the first capacity must be free
    with pytest.raises(DoesNotFit, match=r"2 x 1098 positions(.|\n)*lower max_new_tokens or the batch"):
        check(first.sum - 1)
    check(first.sum - 1, reusable_bytes=lambda: {"cuda:0": 1})
    with pytest.raises(DoesNotFit):
        check(first.sum - 1, reusable_bytes=lambda: {"cuda:1": 1})
    with pytest.raises(DoesNotFit, match="2 x 1000000 positions"):  # more than the device has
        check(first.sum, limit=1_000_000)
    with pytest.raises(DoesNotFit, match="131136 positions"):  # static caches need the last capacity, rounded up
        check(first.sum, graphs=True)
    check(2 * GIB, graphs=True)

    def release_unused():
        nonlocal free
        free += 7

    check(first.sum - 7, release_unused=release_unused)
    assert free == first.sum
    check(first.sum, release_unused=release_unused)  # not called where there is room
    assert free == first.sum
    with pytest.raises(DoesNotFit):
        check(first.sum - 8, release_unused=release_unused)


class Live:
    """The live caches, and a machine of ``total`` bytes for them and for forwards."""

    def __init__(self, monkeypatch, total: int):
        self.caches: weakref.WeakSet[RowCache] = weakref.WeakSet()
        self.total = total
        use = RowCache._use

        def watched(cache, *stores):
            self.caches.add(cache)
            use(cache, *stores)

        monkeypatch.setattr(RowCache, "_use", watched)
        monkeypatch.setattr("pipespec.preflight.devices.host_memory", lambda: (GIB, self.total - self.bytes()))

    def bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def shape(cache: RowCache) -> tuple[int, int]:
    return cache.rows, cache.capacity


@pytest.mark.parametrize(
    ("options", "last"),
    [({"schedule": "streams"}, 96), ({"graphs": True}, 96), ({"schedule": "lockstep"}, 4 + 20 + WIDTH)],
    ids=str,
)
def test_unused_caches_are_released(model, monkeypatch, options, last):
    """They are freed only if there is no room beside them, and before anything is allocated."""
    wanted = model.generate(PROMPT.repeat(4, 1), max_new_tokens=20, do_sample=False)
    live = Live(monkeypatch, GIB)
    with warnings.catch_warnings(), Pipeline(model, noisy(model, 0.1), **options) as pipe:
        warnings.simplefilter("error")  # the warning of too little memory
        here = len(pipe._driver.stages)
        for rows, new in ((1, 300), (2, 300), (3, 20)):
            pipe.generate(PROMPT.repeat(rows, 1), max_new_tokens=new, max_time=0.0)
        assert len(live.caches) == (3 if last == 96 else 1) * here
        stages = [StageFacts.of_model("target", m) for m in pipe.models]
        live.total = estimate(stages, 4, last, longest=PROMPT.shape[1]).on(
            "cpu"
        )  # room for the next call and nothing else
        assert torch.equal(pipe.generate(PROMPT.repeat(4, 1), max_new_tokens=20), wanted)
        assert [shape(cache) for cache in live.caches] == [(4, last)] * here
        kept = set(map(id, live.caches))
        assert torch.equal(pipe.generate(PROMPT.repeat(4, 1), max_new_tokens=20), wanted)
        assert set(map(id, live.caches)) == kept  # the caches are reused
        with pytest.raises(RuntimeWarning, match="unless other programs give some back"):
            pipe.generate(PROMPT.repeat(5, 1), max_new_tokens=20)


@pytest.mark.parametrize("limit", [1 << n for n in range(11, 18)])
def test_static_caches_of_round_limits_are_hardly_larger(limit):
    assert limit + WIDTH <= static_capacity(limit + WIDTH) <= 1.05 * limit + WIDTH
    # Calls of similar lengths share a cache.
    assert static_capacity(limit + WIDTH) == static_capacity(limit // 2 + 1 + WIDTH)
    assert all(n <= static_capacity(n) for n in (1, WIDTH, WIDTH + 1, limit - 1, limit + 1, limit + WIDTH + 1))


def test_capacity_that_an_earlier_call_did_not_reach_is_not_counted(model, monkeypatch):
    """A call with a limit of 100 000 tokens that generated one leaves no memory for a batch of that size."""
    long = copy.deepcopy(model)
    long.config.max_position_embeddings = 200_000
    live = Live(monkeypatch, GIB)
    pipe = Pipeline(long)
    pipe.generate(PROMPT, max_new_tokens=100_000, max_time=0.0)
    live.total = live.bytes() + (1 << 20)
    with pytest.warns(RuntimeWarning, match="unless other programs give some back"):
        pipe.generate(PROMPT.repeat(16, 1), max_new_tokens=1500, max_time=0.0)


@pytest.mark.parametrize("options", [{"schedule": "streams"}, {"schedule": "lockstep"}], ids=str)
def test_a_conversation_goes_on_in_tight_memory(model, monkeypatch, options):
    """Caches that a call continues from are neither released nor counted twice."""
    plain_text = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
    live = Live(monkeypatch, GIB)
    with warnings.catch_warnings(), Pipeline(model, noisy(model, 0.1), **options) as pipe:
        warnings.simplefilter("error")
        given = {"return_dict_in_generate": True, "use_cache": True}
        said = pipe.generate(PROMPT, max_new_tokens=80, max_time=0.0, **given)
        draft = pipe._driver.stages[0]._cache
        stages = [StageFacts.of_model("target", m) for m in pipe.models]
        live.total = live.bytes() + sum(need.activations + need.headroom for need in estimate(stages, 1, 128).needs)
        for new in (10, 20):
            length = said.sequences.shape[1]
            said = pipe.generate(said.sequences, past_key_values=said.past_key_values, max_new_tokens=new, **given)
            assert torch.equal(said.sequences, plain_text[:, : length + new])
            assert pipe._driver.stages[0]._cache is draft


@pytest.mark.parametrize("how", ["streams", "lockstep", "stages"])
def test_the_copy_that_is_returned_is_counted(model, monkeypatch, how):
    """Static caches and those of a partition are returned as copies, and a DynamicCache always is one. The copy must fit, too."""
    asked = []
    monkeypatch.setattr(base, "check_memory", lambda models, *, copied, **_: asked.append(copied))
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
        text, copied = text_and_copy(PROMPT, cache)  # the cache has room for it
        assert not copied
        assert text_and_copy(text, cache)[1] == keeps_its_own


def test_a_copy_takes_memory_on_the_targets_device(model, monkeypatch):
    models = {"draft 0": on_gpu(noisy(model, 0.1), "cuda:1"), "target": on_gpu(model, "cuda:0")}
    need = estimate([StageFacts.of_model("target", model)], 2, 128, longest=4).needs[0]
    copy_of_it = 2 * 100 * CacheLayout.of(model.config).bytes_for(1, 1, torch.float32)
    for free, fits in ((need.sum + copy_of_it, True), (need.sum + copy_of_it - 1, False)):
        facts = [DeviceFacts("cuda:0", GIB, free), DeviceFacts("cuda:1", GIB, need.sum)]
        monkeypatch.setattr("pipespec.preflight.memory.device_facts", lambda names, facts=facts: facts)
        with contextlib.nullcontext() if fits else pytest.raises(DoesNotFit, match="its copy  cuda:0"):
            check_memory(models, rows=2, longest=4, limit=100, graphs=True, copied=True)


def test_caches_of_a_partition_are_released(model, monkeypatch):
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
    pipe = Pipeline(model, noisy(model, 0.02), schedule="lockstep")
    wanted = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    total = 2 * HEADROOM + (8 << 20)
    monkeypatch.setattr("pipespec.preflight.devices.host_memory", lambda: (total, total))
    with pytest.raises(ValueError, match="lower max_new_tokens or the batch"):
        pipe.generate(PROMPT.repeat(64, 1), max_new_tokens=400)
    assert torch.equal(pipe.generate(PROMPT, max_new_tokens=5), wanted)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_estimate_on_a_gpu():
    """What torch allocates for weights, cache and forwards is at least the exact part of the estimate, and at most all of it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_llama(1, hidden=512, layers=4, vocabulary=8000).to("cuda")
    stage, weights = StageFacts.of_model("target", model), weight_bytes(model)
    ids = torch.full((2, 300), 7, device="cuda")
    Pipeline(model).generate(ids, max_new_tokens=100)
    need = estimate([stage], 2, 400 + 64).needs[0]
    peak = torch.cuda.max_memory_allocated() - before
    assert weights + need.caches <= peak <= weights + need.sum + (32 << 20)  # cuBLAS has a work space of its own
