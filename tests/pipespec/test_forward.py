"""Calls of a model without the native form: they give the bits of the model itself. Also properties of transformers that the forms need."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from transformers import DynamicCache

from pipespec.engine import forward as forward_module
from pipespec.engine.cache import RowCache
from pipespec.engine.runtime import runtime_of
from pipespec_spd.sections import open_sections
from tests.pipespec import test_native

forward = functools.partial(forward_module.forward, native=False)

EAGER = {"attn_implementation": "eager"}
MODELS = {name: {"name": name} for name in test_native.MODELS if "window" not in name and "odd" not in name} | {
    "gelu": {"hidden_act": "gelu"},
    "fp64": {"dtype": torch.float64},
    "bf16": {"dtype": torch.bfloat16},
    "dynamic RoPE": test_native.rope("dynamic", factor=2.0),
    "eager": EAGER,
    "eager, each head its own keys": EAGER | {"num_key_value_heads": 4},
}
"""By name: arguments of :func:`make`. A DynamicCache holds no more than a window."""


def make(**options):
    return test_native.make(**{"num_hidden_layers": 3} | options)


@pytest.fixture
def ids():
    return torch.randint(0, 97, (3, 80), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 3])
def test_forward_is_bit_identical_to_the_model(name, rows, ids):
    model = make(**MODELS[name])
    cache, reference, begin = RowCache.for_model(model, rows, 96), RowCache.for_model(model, rows, 96), 0
    dynamic = DynamicCache(config=model.config)
    for q, keep in ((20, 1), (1, 1), (5, 5), (8, 3), (1, 1), (2, 0)):
        tokens = ids[:rows, begin : begin + q]
        begin += q
        got = forward(model, tokens.int(), cache, keep=keep)
        with torch.no_grad():
            wanted = model(tokens, past_key_values=dynamic).logits[:, q - keep :]
            model(tokens, past_key_values=reference)
        assert got.shape == (rows, keep, model.config.vocab_size)
        assert got.dtype == model.dtype
        # The head gets a kept slice in another shape than the whole, which may round differently.
        if keep == q or model.dtype == torch.float32:
            torch.testing.assert_close(got, wanted, rtol=0, atol=0 if keep == q else 1e-5)
        assert cache.lengths == reference.lengths
        assert all(map(torch.equal, cache._stores, reference._stores))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dynamic RoPE"])
def test_forward_of_uneven_rows_is_bit_identical_to_the_model(name, ids):
    model = make(**MODELS[name])
    caches = [RowCache.for_model(model, 3, 64) for _ in range(2)]
    for cache in caches:
        forward(model, ids[:, :12], cache, keep=1)
        cache.truncate([12, 3, 7])
    for q in (1, 4, 1, 9):
        ours, theirs = caches
        tokens = ids[:, 20 : 20 + q]
        with torch.no_grad():
            options = {"attention_mask": theirs.mask(q), "position_ids": theirs.positions(q), "past_key_values": theirs}
            wanted = model(tokens, **options).logits
        assert torch.equal(forward(model, tokens, ours, keep=q), wanted)
        for cache in caches:
            cache.truncate([n - back for n, back in zip(cache.lengths, (q - 1, 0, q // 2), strict=True)])


@pytest.mark.parametrize(
    ("tokens", "keep", "message"),
    [((2, 3), 4, "keep=4 of 3"), ((2, 3), -1, "keep=-1"), ((1, 3), 1, "1 rows of tokens for a RowCache of 2")],
)
def test_forward_checks_its_arguments(tokens, keep, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        forward(model, torch.zeros(tokens, dtype=torch.long), RowCache.for_model(model, 2, 8), keep=keep)


# --- parts of a model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_sections_are_bit_identical_to_the_model(name, ids):
    model = make(**MODELS[name])
    *spans, head = parts = test_native.sections(model, (1, 2))
    open_sections(parts, native=False)
    caches = [RowCache(s.parts.cache_config(), 3, 64, dtype=model.dtype, device=model.device) for s in spans]
    whole = RowCache.for_model(model, 3, 64)
    for q, lengths in ((12, [0, 0, 0]), (1, [12, 3, 7]), (4, [13, 4, 8]), (1, [15, 5, 9])):
        tokens, seen = ids[:, lengths[0] : lengths[0] + q], {}
        for cache in (*caches, whole):
            cache.truncate(lengths)
        with torch.no_grad():
            options = {"attention_mask": whole.mask(q), "position_ids": whole.positions(q), "past_key_values": whole}
            wanted = model(tokens, output_hidden_states=True, **options)
        hidden = entered = spans[0].embed(tokens)
        for span, cache in zip(spans, caches, strict=True):
            before = hidden.clone()
            after, streams = span.run_layers(hidden, cache, range(4))
            assert torch.equal(hidden, before)
            hidden, seen = after, seen | streams
        assert torch.equal(head.logits(hidden), wanted.logits)
        streams = [entered, *(seen[k] for k in (1, 2, 3))]
        # transformers' last hidden state comes after the final norm.
        for ours, theirs in zip(streams[:-1], wanted.hidden_states, strict=False):
            assert torch.equal(ours.to(theirs.dtype), theirs)
        assert streams[-1] is not streams[-2]


def test_the_runtime_of_a_model_is_not_copied_and_keeps_no_model_alive(ids):
    model = make()
    forward_module.forward(model, ids, RowCache.for_model(model, 3, 96), keep=1)
    runtime = runtime_of(model)
    assert runtime.record is not None
    assert runtime.forms
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert runtime_of(other).record is None
        assert not runtime_of(other).forms
    assert runtime_of(model) is runtime
    seen = weakref.ref(model)
    del model, other
    gc.collect()
    assert seen() is None
    assert runtime.forms
