"""The memory of a call: its caches are counted to the byte, and refused before they are allocated."""

import copy
import warnings
import weakref

import pytest
import torch

from pipespec import Pipeline
from pipespec.checks.calls import HEADROOM, DeviceFacts, cache_bytes, check_memory
from pipespec.checks.models import check_shareable
from pipespec.config import WIDTH
from pipespec.engine.cache import RowCache
from pipespec.engine.chain import first_capacity, prefill_chunk, static_capacity
from pipespec.errors import DoesNotFit
from pipespec.models.layout import CacheLayout
from pipespec_spd import SpeculativePipeline
from tests.conftest import noisy, random_llama
from tests.pipespec.checkpoints import GIB, PROMPT, llama, on_gpu


def test_a_check_leaves_the_random_numbers_alone(model):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    check_shareable([model, model])
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(("size", "per_token"), [("1B", 32 << 10), ("8B", 128 << 10), ("70B", 320 << 10)])
def test_published_models_have_their_published_caches(size, per_token):
    assert CacheLayout.of(llama(size)).bytes_for(3, 1000, torch.bfloat16) == 3 * 1000 * per_token


@pytest.mark.parametrize(("rows", "capacity"), [(1, 7), (3, 100)])
def test_caches_are_counted_to_the_byte(model, rows, capacity):
    for dtype in (torch.float32, torch.bfloat16):
        stage = copy.deepcopy(model).to(dtype)
        assert cache_bytes(stage, rows, capacity) == RowCache.for_model(stage, rows, capacity).nbytes_on()


@pytest.mark.parametrize("static", [False, True, torch.float8_e4m3fn], ids=str)
def test_static_caches_are_counted_in_their_dtype(static):
    """As those of a model in blocks, which keeps bfloat16 on a CPU where a cache is not static."""
    model = random_llama(1)
    model.config.kv_dtype = "bfloat16"
    if static:
        model.set_attn_implementation("pipespec")
    cache = RowCache.for_model(model, 2, 96, static=static)
    assert cache.dtype == {False: torch.bfloat16, True: torch.float32}.get(static, static)
    assert cache_bytes(model, 2, 96, static) == cache.nbytes_on()


@pytest.mark.parametrize(("rows", "tokens"), [(1, 2048), (2, 1024), (3, 682), (4, 512), (64, 512)])
def test_a_gpu_reads_prompts_in_wider_parts(rows, tokens):
    assert (prefill_chunk(rows, "cpu"), prefill_chunk(rows, "cuda:0")) == (512, tokens)


@pytest.mark.parametrize("limit", [1 << n for n in range(11, 18)])
def test_static_caches_of_round_limits_are_hardly_larger(limit):
    assert limit + WIDTH <= static_capacity(limit + WIDTH) <= 1.05 * limit + WIDTH
    # Calls of similar lengths share a cache.
    assert static_capacity(limit + WIDTH) == static_capacity(limit // 2 + 1 + WIDTH)
    assert all(n <= static_capacity(n) for n in (1, WIDTH, WIDTH + 1, limit - 1, limit + 1, limit + WIDTH + 1))


# ---- refusals


def test_the_caches_of_a_call_must_fit_beside_what_is_there(model, monkeypatch):
    models = {"draft 0": on_gpu(noisy(model, 0.1), "cuda:1"), "target": on_gpu(model, "cuda:0")}
    free = 0

    def check(available, limit=100_000, total=GIB, **options):
        nonlocal free
        free = available
        facts = {
            "cuda:0": lambda: DeviceFacts("cuda:0", total, free),
            "cuda:1": lambda: DeviceFacts("cuda:1", total, total),
        }
        monkeypatch.setattr("pipespec.checks.calls.device_facts", lambda names: [facts[name]() for name in names])
        check_memory(models, rows=2, longest=10, limit=limit, **options)

    per_token = 2 * CacheLayout.of(model.config).bytes_for(1, 1, torch.float32)
    first = first_capacity(10, 100_000) * per_token + HEADROOM
    check(first)  # caches grow: only the first capacity must be free
    with pytest.raises(
        DoesNotFit, match=r"on cuda:0 for 2 x 1098 positions \(target 0\.\d+\).*lower max_new_tokens or the batch"
    ):
        check(first - 1)
    with pytest.raises(DoesNotFit, match="2 x 1000000 positions"):  # more than the device has
        check(first, limit=1_000_000)
    with pytest.raises(DoesNotFit, match="131136 positions"):  # static caches need the last capacity, rounded up
        check(first, static=True)
    check(2 * GIB, total=4 * GIB, static=True)

    def release():
        nonlocal free
        free += 7

    check(first - 7, release=release)
    assert free == first
    check(first, release=release)  # not called where there is room
    assert free == first
    with pytest.raises(DoesNotFit):
        check(first - 8, release=release)
    assert issubclass(DoesNotFit, ValueError)


def test_memory_that_others_hold_is_a_warning_on_a_cpu(model, monkeypatch):
    def check(total, free):
        monkeypatch.setattr("pipespec.checks.calls.host_memory", lambda: (total, free))
        check_memory({"target": model}, rows=1, longest=4, limit=100)

    with pytest.warns(RuntimeWarning, match="unless other programs give some back") as caught:
        check(64 * GIB, 1 << 10)
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        check(64 * GIB, GIB)
        check(0, 0)  # unknown
    with pytest.raises(DoesNotFit):
        check(1 << 10, 1 << 10)


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
        monkeypatch.setattr("pipespec.checks.calls.host_memory", lambda: (4 * GIB, self.total - self.bytes()))

    def bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def room_for(self, models, rows: int, capacity: int) -> None:
        """Just so much."""
        self.total = sum(HEADROOM + sum(cache_bytes(model, rows, capacity).values()) for model in models)


@pytest.mark.parametrize(
    ("options", "capacity"),
    [
        ({"schedule": "streams", "prefix_cache": 0}, 96),
        ({"graphs": True, "prefix_cache": 0}, 96),
        ({"schedule": "lockstep", "prefix_cache": 0}, 4 + 20 + WIDTH),
        ({"stages": 2}, 4 + 20 + WIDTH),
    ],
    ids=str,
)
def test_caches_of_earlier_calls_make_room(model, monkeypatch, options, capacity):
    """They are released only if there is no room next to them, and kept for calls of their size."""
    ids = PROMPT.repeat(4, 1)
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)
    live = Live(monkeypatch, 4 * GIB)
    kind = SpeculativePipeline if "stages" in options else Pipeline
    with warnings.catch_warnings(action="error"), kind(model, noisy(model, 0.1), **options) as pipe:
        for rows, new in ((1, 300), (2, 300), (3, 20)):
            pipe.generate(PROMPT.repeat(rows, 1), max_new_tokens=new, max_time=0.0)
        live.room_for(pipe.models, 4, capacity)
        assert torch.equal(pipe.generate(ids, max_new_tokens=20), wanted)
        assert {cache.rows for cache in live.caches} == {4}
        if "stages" not in options:
            assert {cache.capacity for cache in live.caches} == {capacity}
            kept = set(map(id, live.caches))
            assert torch.equal(pipe.generate(ids, max_new_tokens=20), wanted)
            assert set(map(id, live.caches)) == kept
        with pytest.raises(RuntimeWarning, match="unless other programs give some back"):
            pipe.generate(PROMPT.repeat(5, 1), max_new_tokens=20)


def test_a_conversation_goes_on_in_tight_memory(model, monkeypatch):
    """A cache that a call continues is not counted again."""
    plain_text = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
    live = Live(monkeypatch, 4 * GIB)
    pipe, given = Pipeline(model, schedule="plain"), {"return_dict_in_generate": True, "use_cache": True}
    said = pipe.generate(PROMPT, max_new_tokens=80, max_time=0.0, **given)
    live.total = live.bytes()
    with warnings.catch_warnings(action="error"):
        for new in (10, 20):
            length = said.sequences.shape[1]
            said = pipe.generate(said.sequences, past_key_values=said.past_key_values, max_new_tokens=new, **given)
            assert torch.equal(said.sequences, plain_text[:, : length + new])


def test_each_call_is_checked(model, monkeypatch):
    pipe = Pipeline(model, noisy(model, 0.02), schedule="lockstep")
    wanted = model.generate(PROMPT, max_new_tokens=5, do_sample=False)
    total = 2 * HEADROOM + (8 << 20)
    monkeypatch.setattr("pipespec.checks.calls.host_memory", lambda: (total, total))
    with pytest.raises(ValueError, match="lower max_new_tokens or the batch"):
        pipe.generate(PROMPT.repeat(64, 1), max_new_tokens=400)
    assert torch.equal(pipe.generate(PROMPT, max_new_tokens=5), wanted)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_caches_on_a_gpu():
    """What torch allocates in addition to the weights is at least the caches, and at most all that is asked for."""
    model = random_llama(1, hidden=512, layers=4, vocabulary=8000).to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Pipeline(model).generate(torch.full((2, 300), 7, device="cuda"), max_new_tokens=100)
    (caches,) = cache_bytes(model, 2, 400 + WIDTH).values()
    peak = torch.cuda.max_memory_allocated() - before
    assert caches <= peak <= caches + HEADROOM
