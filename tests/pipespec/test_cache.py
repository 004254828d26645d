"""RowCache: equal to DynamicCache, unchanged by rollbacks, and safe against wrong use."""

import errno

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Lfm2MoeConfig, LlamaConfig, LlamaForCausalLM

from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import HUGE_PAGE, zeros
from pipespec.engine.forward import forward

VOCAB = 97
PROMPT = 11


def make_model(kv_heads=4, attention="sdpa", dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention,
        **options,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(params=[(4, "sdpa"), (2, "sdpa"), (4, "eager"), (1, "eager")], ids=lambda p: f"{p[0]}kv-{p[1]}")
def model(request):
    return make_model(*request.param)


@pytest.fixture
def ids():
    return torch.randint(3, VOCAB, (4, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def call(model, tokens, cache):
    """A call of the model with the mask and positions of the cache."""
    q = tokens.shape[1]
    return model(tokens, attention_mask=cache.mask(q), position_ids=cache.positions(q), past_key_values=cache).logits


class NoOps(TorchDispatchMode):
    """Fails on any torch operation, allocation included."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


# ---- the same as DynamicCache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("rows", "chunks"), [(1, [11, 1, 1, 4, 1]), (3, [1, 1, 1]), (3, [7, 4, 8, 2])], ids=str)
@pytest.mark.parametrize("how", ["huggingface's mask", "own mask"])
def test_same_logits_as_dynamic_cache(model, ids, dtype, rows, chunks, how):
    model = model.to(dtype)
    ours, theirs, begin = RowCache.for_model(model, rows, 64), DynamicCache(config=model.config), 0
    for q in chunks:
        tokens = ids[:rows, begin : begin + q]
        begin += q
        expected = model(tokens, past_key_values=theirs).logits
        got = call(model, tokens, ours) if how == "own mask" else model(tokens, past_key_values=ours).logits
        if dtype == torch.float64:
            assert torch.equal(got, expected)
        else:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert ours.lengths == (begin,) * rows
        assert ours.get_seq_length() == theirs.get_seq_length() == begin
    for mine, its in zip(ours.states(), theirs.layers, strict=True):
        torch.testing.assert_close(mine, (its.keys, its.values))


# ---- truncation


@pytest.mark.parametrize("keep", range(PROMPT + 8))
def test_truncation_at_every_index_leaves_no_trace(model, ids, keep):
    """After a truncation to ``keep``, the logits equal bit for bit those of a run that never held more than ``keep``."""
    right, wrong = ids[:1], (ids[:1] + 5) % VOCAB
    fresh, rolled = RowCache.for_model(model, 1, 64), RowCache.for_model(model, 1, 64)
    if keep:
        call(model, right[:, :keep], fresh)
        call(model, right[:, :keep], rolled)
    for begin, q in ((keep, 5), (keep + 5, 1), (keep + 6, 12)):
        call(model, wrong[:, begin : begin + q], rolled)
    rolled.truncate([keep])
    assert rolled.lengths == (keep,)
    for begin, q in ((keep, 4), (keep + 4, 1), (keep + 5, 6)):
        tokens = right[:, begin : begin + q]
        assert torch.equal(call(model, tokens, rolled), call(model, tokens, fresh))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("static", [False, True], ids=["masks", "lengths"])
def test_ragged_rows_equal_rows_run_alone(model, seed, static):
    """Random feeds with padding columns, idle rows and a rollback per row: each row equals the row alone. NaN after the lengths has no effect on attention by lengths."""
    rng = np.random.default_rng(seed)
    rows, total = 4, 60
    text = torch.from_numpy(rng.integers(3, VOCAB, (rows, total)))
    alone = [model(text[r : r + 1]).logits[0] for r in range(rows)]
    if static:
        model.set_attn_implementation("pipespec")
    cache = RowCache.for_model(model, rows, total + 16, static=static)
    pointers, device_lengths = [store.data_ptr() for store in cache._stores], cache.device_lengths if static else None
    for _ in range(12):
        q = int(rng.integers(1, 9))
        have = np.array(cache.lengths)
        real = np.minimum(rng.integers(0, q + 1, rows), total - have)  # 0: the row idles
        tokens = torch.from_numpy(rng.integers(3, VOCAB, (rows, q)))  # padding: anything
        for r in range(rows):
            tokens[r, : real[r]] = text[r, have[r] : have[r] + real[r]]
            for store in cache._stores if static else ():
                store[:, r, :, have[r] :] = torch.nan
        logits = forward(model, tokens, cache, keep=q) if seed % 2 else call(model, tokens, cache)
        if static:
            assert cache.device_lengths is device_lengths
            assert device_lengths.tolist() == have.tolist()
        assert torch.isfinite(logits).all()  # also of padding and idle rows
        assert cache.lengths == tuple(have + q)
        for r in range(rows):
            torch.testing.assert_close(
                logits[r, : real[r]], alone[r][have[r] : have[r] + real[r]], rtol=1e-4, atol=1e-4
            )
        back = np.array([rng.integers(0, min(have[r] + real[r], 6) + 1) for r in range(rows)])
        cache.truncate(have + real - back)
    assert pointers == [store.data_ptr() for store in cache._stores]


def test_truncate_reset_and_lengths_run_no_torch_operation(model, ids):
    cache = RowCache.for_model(model, 3, 32)
    call(model, ids[:3, :9], cache)
    with NoOps():
        cache.truncate([9, 4, 0])
        assert cache.lengths == (9, 4, 0)
        assert cache.ragged
        cache.truncate(np.array([3, 3, 0]))
        cache.reset()
    assert cache.lengths == (0, 0, 0)
    assert not cache.ragged


def test_windows_that_were_not_loaded_are_not_rolled_back_into(ids):
    """Such a row can only be emptied. It then behaves as any other row."""
    model = make_model()
    cache = RowCache.for_model(model, 2, 32)
    call(model, ids[:2, :9], cache)
    cache.set_floors([9, 6])
    cache.truncate([9, 7])
    assert cache.restorable([8, 6]) == [0, 6]
    with pytest.raises(ValueError, match=r"row 0 has .* not all of its windows, at 8 tokens: truncate it to 0"):
        cache.truncate([8, 6])
    twin = RowCache.for_model(model, 2, 40)
    twin.take_rows([(cache, 0), (cache, 1)], [9, 7])
    cache.reserve(50)
    for each in (cache, twin):
        assert each.restorable([9, 5]) == [9, 0]
        each.truncate([0, 6])
        call(model, ids[:2, :9], each)
        assert each.restorable([3, 5]) == [3, 0]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([5, 4], "row 1 holds 3"), ([-1, 3], "row 0 .* cannot be truncated to -1"), ([3], "1 lengths .* 2 rows")],
)
def test_truncate_refuses(lengths, message):
    cache = RowCache(make_model().config, 2, 16, dtype=torch.float32, device="cpu")
    cache._set([5, 3])
    with pytest.raises(ValueError, match=message):
        cache.truncate(lengths)
    assert cache.lengths == (5, 3)


# ---- mask and positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "q"), [([5], 3), ([63], 3), ([7, 7], 65), ([4, 9], 5)], ids=str)
def test_masks_on_a_gpu_begin_at_multiples_of_16_bytes(lengths, q, dtype):
    """The address of a view that begins at an odd key let torch's memory-efficient attention fault. ``meta`` is any device but the CPU."""
    cache = RowCache(make_model().config, len(lengths), 112, dtype=dtype, device="meta")
    cache._set(list(lengths))
    mask = cache.mask(q)
    assert mask.shape == (len(lengths), 1, q, max(lengths) + q)
    assert mask.storage_offset() * mask.element_size() % 16 == 0
    assert all(stride * mask.element_size() % 16 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize("lengths", [[0], [1], [37], [0, 0], [5, 5, 5], [4, 0, 9]], ids=str)
@pytest.mark.parametrize("q", [1, 2, 16, 17, 64, 65, 80])
def test_mask_and_positions_by_definition(lengths, q):
    cache = RowCache(make_model(attention="eager").config, len(lengths), 128, dtype=torch.float32, device="cpu")
    cache._set(list(lengths))
    positions = cache.positions(q)
    assert positions.dtype == torch.int64
    assert positions.tolist() == [[n + i for i in range(q)] for n in lengths]
    keys = max(lengths) + q
    expected = torch.tensor([[[[j <= n + i for j in range(keys)] for i in range(q)]] for n in lengths])
    if q == 1 and len(set(lengths)) == 1:
        assert cache.mask(q) is None
        assert expected.all()
        return
    assert expected.any(-1).all()  # every column sees something: itself
    mask = cache.mask(q)
    assert mask is not None
    assert mask.dtype == torch.float32
    assert torch.equal(mask, torch.zeros(expected.shape).masked_fill(~expected, -torch.inf))


@pytest.mark.parametrize(
    "asked",
    [
        lambda cache: {},
        lambda cache: {"attention_mask": torch.ones(2, 11, dtype=torch.long)},
        lambda cache: {"position_ids": cache.positions(2)},
        lambda cache: {"attention_mask": cache.mask(2)},
        lambda cache: {"attention_mask": torch.zeros(2, 1, 2, 11), "position_ids": cache.positions(2)},
    ],
    ids=["nothing", "2-D mask", "positions only", "mask only", "a mask of another origin"],
)
def test_mask_trap(model, ids, asked):
    """If rows differ in length, a call with transformers' own mask and positions is refused, and nothing is written."""
    cache = RowCache.for_model(model, 2, 32)
    call(model, ids[:2, :9], cache)
    cache.truncate([9, 4])
    options = asked(cache)
    before = cache._stores[0].clone()
    with pytest.raises(RuntimeError, match=r"\[9, 4\].*attention_mask=cache.mask\(q\)"):
        model(ids[:2, 9:11], past_key_values=cache, **options)
    assert torch.equal(cache._stores[0], before)
    assert cache.lengths == (9, 4)
    call(model, ids[:2, 9:11], cache)  # the right call still works


def test_attention_without_4d_masks_is_refused_where_it_matters(ids):
    model = make_model()
    cache = RowCache.for_model(model, 2, 32)
    call(model, ids[:2, :9], cache)
    cache.truncate([9, 4])
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(
        NotImplementedError, match=r"flash_attention_2 attention takes no 4-D mask.*set_attn_implementation"
    ):
        cache.mask(1)


# ---- wrong use


def test_overflow_is_refused_before_anything_is_written(model, ids):
    cache = RowCache.for_model(model, 2, 12)
    call(model, ids[:2, :9], cache)
    cache.truncate([4, 9])
    before = cache._stores[0].clone()
    message = r"capacity is 12, and feeding 4 columns to row 1, which holds 9 tokens, needs 13"
    with pytest.raises(ValueError, match=message):
        cache.mask(4)
    with pytest.raises(ValueError, match=message):
        cache.positions(4)
    with pytest.raises(ValueError, match=message):
        forward(model, ids[:2, :4], cache, keep=1)
    cache.truncate([4, 4])
    with pytest.raises(ValueError, match="capacity is 12"):
        model(ids[:2, :9], past_key_values=cache)
    assert torch.equal(cache._stores[0], before)
    assert cache.lengths == (4, 4)
    call(model, ids[:2, :8], cache)  # exactly full
    assert cache.lengths == (12, 12)


def test_other_rows_dtype_and_autograd_are_refused(ids):
    model = make_model()
    with pytest.raises(ValueError, match="RowCache of 2 rows"):
        model(ids[:1, :3], past_key_values=RowCache.for_model(model, 2, 8))
    with pytest.raises(ValueError, match=r"RowCache is for torch.float32 .* torch.float64"):
        model(ids[:1, :3], past_key_values=RowCache(model.config, 1, 8, dtype=torch.float32, device="cpu"))
    with torch.enable_grad(), pytest.raises(RuntimeError, match="inference_mode"):
        model(ids[:1, :3], past_key_values=RowCache.for_model(model, 1, 8))


def test_layers_out_of_order_are_refused():
    cache = RowCache(make_model().config, 1, 8, dtype=torch.float64, device="cpu")
    states = torch.zeros(1, 4, 2, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"layer 1 is updated.*layer 0"):
        cache.update(states, states, 1)


def test_a_forward_that_fails_half_way_changes_no_length(ids):
    model = make_model()
    cache, fresh = RowCache.for_model(model, 1, 32), RowCache.for_model(model, 1, 32)
    for c in (cache, fresh):
        call(model, ids[:1, :5], c)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(model, ids[:1, 9:12], cache)
    hook.remove()
    assert cache.lengths == (5,)
    assert torch.equal(call(model, ids[:1, 5:9], cache), call(model, ids[:1, 5:9], fresh))


@pytest.mark.parametrize(("rows", "capacity"), [(0, 8), (1, 0), (-1, 8)])
def test_sizes_are_checked(rows, capacity):
    with pytest.raises(ValueError, match="at least one row"):
        RowCache(make_model().config, rows, capacity, dtype=torch.float32, device="cpu")


def test_other_recurrent_layers_are_refused():
    class OtherConfig(Lfm2MoeConfig):
        model_type = "other"

    config = OtherConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(ValueError, match=r"models \(conv\) cannot be rolled back row by row"):
        RowCache(config, 1, 8, dtype=torch.float32, device="cpu")


# ---- the object


def test_storage_and_its_properties():
    config = make_model(kv_heads=2).config
    with torch.inference_mode():
        cache = RowCache(config, 2, 10, dtype=torch.bfloat16, device="cpu")
    assert not cache._stores[0].is_inference()  # which could not be written outside of inference_mode
    assert (cache.rows, cache.capacity, len(cache)) == (2, 10, 3)
    assert cache.nbytes == 2 * 3 * 2 * 2 * 10 * 8 * 2
    assert cache.layers[1].get_max_length() == cache.layers[1].get_max_cache_shape() == 10
    assert cache.is_compileable is False
    assert cache.is_initialized
    assert cache.is_sliding == [False] * 3
    assert cache.fits(2, 10)
    assert cache.fits(2, 3)
    assert not cache.fits(2, 11)
    assert not cache.fits(1, 10)
    assert "lengths=[0, 0]" in repr(cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_storage_on_a_cpu_lies_on_huge_pages_and_is_zero(dtype):
    # A prime number of positions, so that the size is no multiple of a page.
    kept = zeros((2, 1, 2, 16411, 128), dtype, torch.device("cpu"))
    assert kept.shape == (2, 1, 2, 16411, 128)
    assert kept.dtype == dtype
    assert kept.is_contiguous()
    assert kept.data_ptr() % HUGE_PAGE == 0
    assert not kept.any()
    kept[1, 0, 1, 16410] = 3
    assert kept.sum() == 3 * 128


def test_storage_on_huge_pages_grows_with_what_it_holds(ids):
    model = make_model(dtype=torch.float32)
    small, large = RowCache.for_model(model, 1, 16), RowCache.for_model(model, 1, 16)
    forward(model, ids[:1, :8], small, keep=1)
    forward(model, ids[:1, :8], large, keep=1)
    large.reserve(32768)
    assert all(store.nbytes >= 4 * HUGE_PAGE for store in large._stores)
    expected, found = (forward(model, ids[:1, 8:12], cache, keep=4) for cache in (small, large))
    assert torch.equal(expected, found)


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), OverflowError("too large")])
def test_storage_without_memory_for_huge_pages_is_left_to_torch(monkeypatch, error):
    """Callers know torch's errors."""

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr("mmap.mmap", refuse)
    kept = zeros((HUGE_PAGE,), torch.float32, torch.device("cpu"))
    assert kept.shape == (HUGE_PAGE,)
    assert not kept.any()
    with pytest.raises(RuntimeError, match="allocate"):
        zeros((1 << 50,), torch.float32, torch.device("cpu"))


def test_storage_grows_between_forwards_of_rows_of_unequal_lengths(ids):
    model = make_model()
    cache, whole = (RowCache.for_model(model, 2, capacity) for capacity in (8, 64))
    for each in (cache, whole):
        call(model, ids[:2, :6], each)
        each.truncate([3, 6])
        call(model, ids[:2, 6:8], each)
    cache.reserve(64)
    assert torch.equal(call(model, ids[:2, 8:12], cache), call(model, ids[:2, 8:12], whole))
