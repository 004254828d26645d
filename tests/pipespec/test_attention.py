"""attn_implementation="pipespec" gives the text of the other attentions; RowCaches with lengths instead of masks."""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function, sdpa_mask

from pipespec import Pipeline
from pipespec.engine import attention
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.caches import copied
from tests.waiting import SECONDS

OPTIONS = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def models():
    """The same model three times, 4 query heads to 2 of keys."""
    first = random_llama(3)
    others = {name: copy.deepcopy(first) for name in ("eager", "sdpa", "pipespec")}
    for name, model in others.items():
        model.set_attn_implementation(name)
    return others


@pytest.fixture
def model(models):
    return models["pipespec"]


@pytest.fixture
def by_rows(monkeypatch):
    """As on a GPU: every RowCache of a model with this attention uses its lengths."""
    ours = property(lambda self: self._config._attn_implementation == attention.ATTENTION)
    monkeypatch.setattr(RowCache, "uses_device_lengths", ours)


@pytest.fixture
def calls(monkeypatch):
    """Widths of the calls of the attention by lengths."""
    from pipespec_kernels import ops

    widths = []

    def counted(q, *args, **options):
        widths.append(q.shape[2])
        return verify_attention(q, *args, **options)

    verify_attention = ops.verify_attention
    monkeypatch.setattr(ops, "verify_attention", counted)
    return widths


def test_registered_whichever_is_imported_first() -> None:
    """``import pipespec`` loads neither torch nor transformers. The import of transformers registers the name."""
    code = (
        "import sys, pipespec; assert not {'torch', 'transformers'} & sys.modules.keys(); "
        "from transformers import AutoModelForCausalLM, LlamaConfig; "
        "config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9); "
        "model = AutoModelForCausalLM.from_config(config, attn_implementation='pipespec'); "
        "assert not any(type(f).__module__ == 'pipespec.engine.attention' for f in sys.meta_path); "
        "print(model.config._attn_implementation)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert ran.stdout.strip() == "pipespec", ran.stderr


LOOKUP = {"prompt_lookup_num_tokens": 3, "eos_token_id": 1}  # 5.0's fails without such an id
HOW = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_generate_as_with_the_others(models, how, padded) -> None:
    ids, mask = left_pad(random_prompts(3, seed=2, shortest=4))
    if not padded:
        ids, mask = ids.clamp(min=2), torch.ones_like(mask)
    texts = {}
    for name, model in models.items():
        torch.manual_seed(5)
        texts[name] = model.generate(ids, attention_mask=mask, **OPTIONS | HOW[how])
    assert all(torch.equal(text, texts["sdpa"]) for text in texts.values())
    if padded:  # unmasked padding would change the text
        seen = models["pipespec"].generate(ids, attention_mask=torch.ones_like(mask), **OPTIONS)
        assert how != "greedy" or not torch.equal(seen, texts["pipespec"])


def test_several_columns_over_a_filled_cache(models, calls) -> None:
    """Prompt lookup, and a prompt in parts: several columns, a filled cache, the last column sees all."""
    ids = random_prompts(1, seed=4, shortest=12, longest=12)[0].repeat(3)[None]
    texts = [models[n].generate(ids, **LOOKUP, **OPTIONS) for n in ("sdpa", "pipespec")]
    assert all(torch.equal(text, texts[0]) for text in texts)
    logits = []
    with torch.no_grad():
        for name in ("sdpa", "pipespec"):
            cache = DynamicCache(config=models[name].config)
            for begin, end in ((0, 20), (20, 33), (33, 34), (34, 36)):
                out = models[name](ids[:, begin:end], past_key_values=cache).logits
            logits.append(out)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    # Whether transformers asks for a mask there depends on its version. Without one:
    calls.clear()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, n, 16, generator=generator) for h, n in ((4, 3), (2, 9), (2, 9)))
    module = models["pipespec"].model.layers[0].self_attn
    got, _ = attention.attention_forward(module, query, key, value, None)
    visible = (torch.arange(9) <= torch.arange(6, 9)[:, None]).expand(2, 1, 3, 9)
    expected, _ = attention.attention_forward(module, query, key, value, visible)
    assert calls == [3]
    torch.testing.assert_close(got, expected)


def test_training_is_left_to_torch(models) -> None:
    ids = random_prompts(1, seed=6, shortest=9, longest=9)[0][None]
    losses = [models[name](ids, labels=ids).loss for name in ("sdpa", "pipespec")]
    assert losses[1].requires_grad
    torch.testing.assert_close(*losses)


def mask_arguments(**changed):
    arguments = {"batch_size": 1, "kv_length": 9, "kv_offset": 0, "mask_function": causal_mask_function}
    arguments |= {"attention_mask": None, "allow_is_causal_skip": True}
    if "q_length" in inspect.signature(sdpa_mask).parameters:
        arguments |= {"q_length": 4, "q_offset": 5}
    else:
        arguments |= {"cache_position": torch.arange(5, 9)}
    return arguments | changed


def test_a_mask_is_left_out_only_where_lengths_say_the_same() -> None:
    full = torch.arange(9) <= torch.arange(5, 9)[:, None]
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]).bool()
    mask = attention.attention_mask(**mask_arguments())
    assert mask is None or torch.equal(mask[0, 0], full)  # 5.0 has the position in a tensor
    assert torch.equal(attention.attention_mask(**mask_arguments(attention_mask=padding))[0, 0], full & padding)
    # The storage is longer than the text: the first keys count, not the last ones.
    mask = attention.attention_mask(**mask_arguments(kv_length=12))
    assert torch.equal(mask[0, 0], torch.arange(12) <= torch.arange(5, 9)[:, None])
    begin = {"q_offset": 0} if "q_length" in mask_arguments() else {"cache_position": torch.arange(4)}
    mask = attention.attention_mask(**mask_arguments(kv_length=12, **begin))
    assert torch.equal(mask[0, 0], torch.arange(12) <= torch.arange(4)[:, None])
    near = attention.attention_mask(**mask_arguments(mask_function=lambda b, h, q, k: (k <= q) & (k > q - 3)))
    assert torch.equal(near[0, 0], full & (torch.arange(9) > torch.arange(2, 6)[:, None]))
    assert attention.attention_mask(**mask_arguments(allow_is_causal_skip=False)) is not None


# ---- the pipeline


@pytest.mark.parametrize("rows", [False, True], ids=["masks", "lengths"])
@pytest.mark.parametrize("schedule", ["plain", "lockstep"])
def test_pipeline(models, schedule, rows, request, calls) -> None:
    if rows:
        request.getfixturevalue("by_rows")
    ids, mask = left_pad(random_prompts(4, seed=7))
    expected = models["sdpa"].generate(ids, attention_mask=mask, **OPTIONS)
    pipe = Pipeline(models["pipespec"], noisy(models["pipespec"], 0.1), schedule=schedule)
    assert torch.equal(pipe.generate(ids, attention_mask=mask, **OPTIONS), expected)
    assert bool(calls) == rows


# ---- RowCaches at fixed addresses, with lengths on the device


def test_inside_of_a_capture(model, monkeypatch) -> None:
    """A capture copies nothing from the host to the device, and its forwards do not count."""
    ids = torch.stack(random_prompts(2, seed=11, shortest=9, longest=9))
    cache = RowCache.for_model(model, 2, 20, static=True)
    forward(model, ids[:, :4], cache, keep=0)
    monkeypatch.setattr(RowCache, "_capturing", lambda self: True)
    with pytest.raises(RuntimeError, match=r"sync\(\) before the capture"):
        forward(model, ids[:, 4:6], cache, keep=1)
    cache.sync()
    forward(model, ids[:, 4:6], cache, keep=1)
    assert cache.lengths == (4, 4)
    assert cache.device_lengths.tolist() == [4, 4]


def test_what_a_fixed_cache_refuses(models, model) -> None:
    with pytest.raises(ValueError, match=r"this model has sdpa: call model.set_attn_implementation\('pipespec'\)"):
        RowCache.for_model(models["sdpa"], 1, 8, static=True)
    cache = RowCache.for_model(model, 2, 8, static=True)
    ids = torch.ones(2, 3, dtype=torch.long)
    model.set_attn_implementation("sdpa")
    try:
        with pytest.raises(ValueError, match="attention by lengths only"), torch.no_grad():
            model(ids, past_key_values=cache)
    finally:
        model.set_attn_implementation("pipespec")
    with pytest.raises(ValueError, match="keeps its capacity of 8"):
        cache.reserve(9)
    cache.reserve(8)
    with pytest.raises(ValueError, match="is full"):
        forward(model, ids.repeat(1, 3), cache, keep=1)
    forward(model, ids, cache, keep=1)
    cache.truncate([3, 1])
    with pytest.raises(RuntimeError, match=r"attention_mask=cache.mask\(q\)"), torch.no_grad():
        model(ids, past_key_values=cache)
    marker = cache.mask(3)
    with pytest.raises(RuntimeError, match="without that cache"), torch.no_grad():
        model(ids, attention_mask=marker)
    keys = torch.zeros(1, 2, 8, 16)
    attention.attach_lengths(keys, torch.tensor([2]))
    for options, message in (
        ({"dropout": 0.5}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"softcap": 3.0}, "softcap"),
    ):
        with pytest.raises(RuntimeError, match=f"does not work with .*{message}"):
            attention.attention_forward(model, torch.zeros(1, 4, 3, 16), keys, keys, None, **options)


def test_copies_and_ordinary_caches(model) -> None:
    cache = RowCache.for_model(model, 1, 16, static=True)
    ids = torch.arange(2, 8)[None]
    forward(model, ids, cache, keep=0)
    twin = copied(cache)
    assert twin.uses_device_lengths
    assert twin.device_lengths is not cache.device_lengths
    assert torch.equal(forward(model, ids[:, :2], twin, keep=2), forward(model, ids[:, :2], cache, keep=2))
    # On the CPU, a cache that is not static has masks, and the model runs in its fastest form.
    ordinary = RowCache.for_model(model, 1, 16)
    assert not ordinary.uses_device_lengths
    forward(model, ids, ordinary, keep=0)
    assert described(model, ordinary) == "native"
