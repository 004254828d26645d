"""The fused form of a forward over a static cache: which models take it, and that its logits and texts are those of the model's modules."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipespec
from pipespec.demo import family_path
from pipespec.engine import form as forms
from pipespec.engine import fused
from pipespec.engine.attention import ATTENTION
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import choose_fused, described, forward
from pipespec.models.families import NotReadable
from pipespec.models.parts import ModelParts
from pipespec_kernels import ops
from tests.pipespec.checkpoints import Adapted, Packed, packed, replaced
from tests.pipespec.test_native import MODELS, ids, make


def static_logits(model, tokens, *, chosen=True):
    """Logits of a prefill, a block and a single token, with equal and with different lengths, over a static cache."""
    cache = RowCache.for_model(model, tokens.shape[0], 64, static=True)
    form = choose_fused(model) if chosen else None
    if form is not None:
        form.add_cache(cache)
    parts = [forward(model, tokens[:, :20], cache, keep=2), forward(model, tokens[:, 20:24], cache, keep=4)]
    cache.truncate([22, 7, 15])
    for q in (5, 1):
        fed = torch.stack([row[n : n + q] for row, n in zip(tokens, cache.lengths, strict=True)])
        parts.append(forward(model, fed, cache, keep=q))
    keys, values = cache.states()[1]
    held = [(keys[row, :, :n], values[row, :, :n]) for row, n in enumerate(cache.lengths)]
    return torch.cat(parts, 1), torch.cat([x.flatten() for both in held for x in both]), described(model, cache)


def check_static_logits(model, dtype):
    tokens = ids(3, 40)
    *wanted, before = static_logits(model, tokens, chosen=False)
    *got, form = static_logits(model, tokens)
    assert before.startswith("transformers: ")
    assert form == "fused"
    tolerance = forms.TOLERANCE if dtype is torch.float32 else 2**-6
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_caches_are_those_of_the_modules(name, dtype):
    check_static_logits(make(name, dtype, attn_implementation=ATTENTION), dtype)


class ByShape(Packed):
    """One that takes rows otherwise than a batch."""

    def forward(self, x):
        return super().forward(x) * (1 if x.dim() == 3 else 1.01)


pipespec.trust(ByShape)

OPAQUE = {
    "all": lambda model: packed(model),
    "all, with the head": lambda model: packed(model, head=True),
    "queries and values": lambda model: replaced(model, Adapted, ("q_proj", "v_proj", "qkv_proj")),
    "down": lambda model: replaced(model, Packed, ("down_proj",)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPAQUE)
@pytest.mark.parametrize("name", [name for name in ("biases", "qwen3", "phi3", "gemma") if name in MODELS])
def test_opaque_modules_in_the_fused_form(name, kind, dtype):
    """Quantised modules, and those with adapters, are called as they are. The merged matrices are those of the others."""
    check_static_logits(OPAQUE[kind](make(name, dtype, attn_implementation=ATTENTION)), dtype)


def refusal_of(model) -> str:
    assert choose_fused(model) is None
    return described(model, RowCache.for_model(model, 1, 16, static=True))


def test_opaque_modules_that_are_refused():
    model = make(attn_implementation=ATTENTION)
    by_shape = replaced(model, ByShape, ("up_proj",))
    assert "layers.0.mlp.up_proj (ByShape) does not take rows as it takes a batch" in refusal_of(by_shape)

    def observes(*_):
        pass

    pipespec.trust(observes)
    hooked = packed(model)
    hooked.model.layers[1].mlp.up_proj.register_forward_hook(observes)
    assert "layers.1.mlp.up_proj has hooks" in refusal_of(hooked)
    nameless = packed(model)
    del nameless.model.layers[0].self_attn.o_proj.in_features
    assert "layers.0.self_attn.o_proj (Packed) does not tell its in_features" in refusal_of(nameless)
    strange = packed(model)
    strange.model.norm = Packed(torch.nn.Linear(4, 4))
    assert refusal_of(strange).startswith("transformers: ")
    plain = packed(model)
    assert choose_fused(plain, exact=True) is None
    assert choose_fused(plain) is not None


def test_a_change_of_an_opaque_module_is_another_form():
    model = replaced(make(attn_implementation=ATTENTION), Adapted)
    form = choose_fused(model)
    assert choose_fused(model) is form
    adapter = model.model.layers[0].mlp.up_proj
    adapter.is_on = False
    other = choose_fused(model)
    assert other is not form
    adapter.up = torch.nn.Parameter(adapter.up * 2)
    assert choose_fused(model) is not other


@pytest.mark.parametrize("name", ["biases", "qwen3"])
@pytest.mark.parametrize("columns", [3, 9])
def test_padding_and_steps_without_work(name, columns):
    """The device says how many columns are new. Others write nothing to the cache; without any, no product is computed. Nine columns of two rows are a wide step."""
    model = make(name, attn_implementation=ATTENTION)
    tokens, cache = ids(2, 6 + columns), RowCache.for_model(model, 2, 32, static=True)
    choose_fused(model).add_cache(cache)
    forward(model, tokens[:, :6], cache, keep=0)
    before = [store.clone() for store in cache._stores]

    def step(counts):
        lengths, new = (torch.tensor(x, dtype=torch.int32) for x in ([6, 6], counts))
        cache.follow(lengths, new)
        logits = forward(model, tokens[:, 6:], cache, keep=columns)
        return logits, [store.clone() for store in cache._stores]

    _, idle = step([0, 0])
    assert all(map(torch.equal, idle, before))
    some, partly = step([1, 0])
    whole, written = step([columns, columns])
    torch.testing.assert_close(some[0, 0], whole[0, 0])
    for ours, old, new in zip(partly, before, written, strict=True):
        old[:, 0, :, 6] = new[:, 0, :, 6]  # [layers, rows, heads, columns, head_dim]
        torch.testing.assert_close(ours, old)
        assert not torch.equal(old, new)


def test_a_form_without_the_cache_is_not_used():
    model = make(attn_implementation=ATTENTION)
    choose_fused(model)
    cache = RowCache.for_model(model, 2, 16, static=True)
    forward(model, ids(2, 3), cache, keep=1)
    assert described(model, cache).startswith("transformers: ")


@pytest.mark.parametrize("of", [lambda model: model, packed], ids=["plain", "opaque"])
@pytest.mark.parametrize("operation", ["add_rms_norm", "rope_append", "silu_mul", "linear_small", "qkv_append"])
def test_a_wrong_operation_is_found(operation, of, monkeypatch):
    """Logits that do not agree keep the model's modules. Steps of few rows and wider ones have operations of their own."""
    if of is packed and operation in ("linear_small", "qkv_append"):
        pytest.skip("opaque modules multiply by themselves")
    model = of(make(attn_implementation=ATTENTION))
    right = getattr(ops, operation)

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        first = result[0] if isinstance(result, tuple) else result
        first.mul_(1.001)
        return result

    monkeypatch.setattr(fused.ops, operation, wrong)
    assert choose_fused(model) is None
    cache = RowCache.for_model(model, 1, 16, static=True)
    assert "differ from the model's own" in described(model, cache)


ROUNDINGS = 200


@pytest.fixture(scope="module")
def bundled():
    """A model in bfloat16 that is deep enough for its roundings to matter; the inputs of its probes, and its logits in float32."""
    model = AutoModelForCausalLM.from_pretrained(family_path("small"), dtype=torch.bfloat16).eval()
    model.set_attn_implementation("sdpa")
    parts = ModelParts.of(model)
    given = forms.probe_inputs(parts)
    with torch.inference_mode():
        return model, given, forms._in_wider(parts, given, torch.float32)


def changed_logits(model, given, changes, ending, kind=torch.nn.Module):
    """Logits on the probes where ``changes`` applies to the outputs of modules with these names."""
    chosen = [module for name, module in model.named_modules() if name.endswith(ending) and isinstance(module, kind)]
    hooks = [module.register_forward_hook(lambda module, inputs, out: changes(out)) for module in chosen]
    with torch.inference_mode():
        logits = model(given).logits
    for hook in hooks:
        hook.remove()
    return logits


def check_bundled(bundled, monkeypatch, own, ours):
    model, given, exact = bundled
    monkeypatch.setattr(forms, "_in_wider", lambda *_: exact)
    forms.check_outputs(ModelParts.of(model), given, forms.probed(own), forms.probed(ours))


def test_a_model_that_is_not_its_parts_is_no_measure(bundled, monkeypatch):
    """Its error would allow any other."""
    exact = bundled[2]
    with pytest.raises(NotReadable, match="differ from those of its layers one after the other"):
        check_bundled(bundled, monkeypatch, (3 * exact).bfloat16(), exact)


def test_equally_good_roundings_are_not_refused(bundled, monkeypatch):
    """A library may choose another kernel for a merged matrix, which changes one last bit in a thousand. No such form is worse than another."""
    model, given, _ = bundled
    noise = torch.Generator().manual_seed(0)

    def another_order(out):
        flips = (torch.rand(out.shape, generator=noise) < 1e-3) & (out != 0)
        steps = torch.where(torch.rand(out.shape, generator=noise) < 0.5, 1, -1).to(torch.int16)
        return (out.view(torch.int16) + steps * flips).view(torch.bfloat16)

    many = changed_logits(model, given.repeat(ROUNDINGS, 1), another_order, "", torch.nn.Linear)
    roundings = many.view(ROUNDINGS, *given.shape, -1)
    for ours, own in zip(roundings, roundings.roll(1, 0), strict=True):
        assert not torch.equal(ours, own)
        check_bundled(bundled, monkeypatch, own, ours)


@pytest.mark.parametrize("ending", ["o_proj", "v_proj", "down_proj", "input_layernorm", "post_attention_layernorm"])
def test_a_form_that_is_wrong_by_two_percent_is_refused(bundled, monkeypatch, ending):
    model, given, _ = bundled
    own, ours = (changed_logits(model, given, lambda out, by=by: out * by, ending) for by in (1.0, 1.02))
    with pytest.raises(NotReadable, match="differ from the model's own"):
        check_bundled(bundled, monkeypatch, own, ours)
