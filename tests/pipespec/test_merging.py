"""Merged weights: what is done to the parameters of a model, and everything that must go on to work with them."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import pipespec
from pipespec.engine import fused
from pipespec.engine.attention import ATTENTION
from pipespec.engine.cache import RowCache
from pipespec.engine.form import TOLERANCE
from pipespec.engine.forward import choose_fused, described
from pipespec.engine.fused import merged
from pipespec.models import families
from tests.pipespec.test_fused import static_logits
from tests.pipespec.test_native import MODELS, ids, make


def merged_model(name="llama", **options):
    model = make(name, attn_implementation=ATTENTION, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert choose_fused(model) is not None
    return model, before


def is_merged(model):
    return all(merged(group) is not None for group in families.of_one_input(model))


def places(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_form(model, number=None):
    """The form reads the weights of now: its logits are those of the modules."""
    form = choose_fused(model)
    assert number is None or form.number != number
    assert is_merged(model)
    wanted, got = static_logits(model, ids(3, 40), chosen=False)[0], static_logits(model, ids(3, 40))
    assert got[2] == "fused"
    torch.testing.assert_close(got[0], wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))


# --- the parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parameters_stay(name):
    """The same objects, the same values, the same amount of memory, and the same gradients."""
    model = make(name, attn_implementation=ATTENTION)
    objects = dict(model.named_parameters())
    before = {name: value.detach().clone() for name, value in objects.items()}
    objects["model.norm.weight"].grad = torch.ones_like(before["model.norm.weight"])
    size = bytes_of(objects.values())
    assert choose_fused(model) is not None
    assert is_merged(model)
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in objects.items())
    assert now.keys() == objects.keys()
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in now.values())
    assert bytes_of(now.values()) == size
    assert objects["model.norm.weight"].grad is not None
    for layer in choose_fused(model)._layers:
        for product in (layer.qkv, layer.gate_up):
            (run,) = product.runs
            assert len(run.weight) == 1
            assert len(run.bias) <= 1


def test_matrices_that_are_fused_stay_where_they_are():
    model = make("phi3", attn_implementation=ATTENTION)
    before = places(model)
    assert choose_fused(model) is not None
    assert places(model) == before
    attn = model.model.layers[0].self_attn
    assert choose_fused(model)._layers[0].qkv.runs[0].weight[0].data_ptr() == attn.qkv_proj.weight.data_ptr()


def test_extra_memory_is_that_of_one_group(monkeypatch):
    """The old memory of a group is free before the next one is merged: neither the probes nor a form hold it."""
    model = make("qwen2", attn_implementation=ATTENTION)
    arrays = {}
    for parameter in model.parameters():
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        arrays[parameter.data_ptr()] = weakref.ref(array)
        del array
    cat, done, seen = torch.cat, [], []

    def watched(tensors, *args):
        assert not [place for place in done if arrays[place]() is not None]
        done.extend(tensor.data_ptr() for tensor in tensors)
        seen.append(len(tensors))
        return cat(tensors, *args)

    merge = fused.merge

    def merge_watched(groups):
        with monkeypatch.context() as patch:
            patch.setattr(fused.torch, "cat", watched)
            return merge(groups)

    monkeypatch.setattr(fused, "merge", merge_watched)
    assert choose_fused(model) is not None
    assert seen == [3, 3, 2] * 2


def test_models_that_keep_their_modules_keep_their_memory(monkeypatch):
    model = make()
    prompt, before = ids(1, 5), places(model)
    with pipespec.Pipeline(model, [], schedule="plain", graphs=True, native=False) as pipe:
        pipe.generate(prompt, max_new_tokens=3, do_sample=False)
    assert places(model) == before
    model = make(attn_implementation=ATTENTION)
    before = places(model)
    hook = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert choose_fused(model) is None
    hook.remove()
    monkeypatch.setattr(fused.ops, "silu_mul", lambda x, **_: x[..., ::2])
    assert choose_fused(model) is None
    assert places(model) == before


def test_weights_of_inference_mode():
    with torch.inference_mode():
        model = make("qwen2", attn_implementation=ATTENTION)
    with torch.inference_mode():
        check_form(model)


# --- refused ---------------------------------------------------------------------------------------------------------


def one_object(model):
    first, second = (layer.mlp for layer in model.model.layers)
    second.gate_proj.weight = first.gate_proj.weight


def one_memory(model):
    first, second = (layer.mlp for layer in model.model.layers)
    second.gate_proj.weight.data = first.gate_proj.weight.data


def some_biases(model):
    model.model.layers[1].self_attn.k_proj.bias = None


def in_a_larger_parameter(model):
    """Between the beginnings of the two lies a parameter that overlaps only the larger one, and is not to be merged."""
    flat = nn.Parameter(torch.randn(8 + 64 + 80 * 64) * 0.1)
    model.model.flat = flat
    layer = model.model.layers[0]
    layer.input_layernorm.weight.data = flat.data[8:72]
    layer.mlp.gate_proj.weight.data = flat.data[72:].view(80, 64)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("llama", one_object, "gate_proj.weight share memory"),  # a merge would end the tie
        ("llama", one_memory, "gate_proj.weight share memory"),
        ("llama", in_a_larger_parameter, "model.flat and model.layers.0.mlp.gate_proj.weight share memory"),
        ("qwen2", some_biases, "some have biases and some have none"),
    ],
)
def test_weights_that_are_not_merged(name, change, says):
    model = make(name, attn_implementation=ATTENTION)
    change(model)
    before = places(model)
    assert choose_fused(model) is None
    assert places(model) == before
    assert says in described(model, cache_of(model))


def test_no_memory(monkeypatch):
    model = make(attn_implementation=ATTENTION)
    merge = fused.merge

    def no_memory(groups):
        def cat(*_):
            raise torch.OutOfMemoryError("none")

        with monkeypatch.context() as patch:
            patch.setattr(fused.torch, "cat", cat)
            return merge(groups)

    monkeypatch.setattr(fused, "merge", no_memory)
    assert choose_fused(model) is None
    assert "no memory to merge" in described(model, cache_of(model))


def cache_of(model):
    return RowCache.for_model(model, 1, 16, static=True)


# --- what a user does with the model afterwards ----------------------------------------------------------------------


def check_values(model, wanted):
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_save_pretrained(shard, tmp_path):
    model, before = merged_model("qwen2")
    model.save_pretrained(tmp_path / "merged", max_shard_size=shard)
    make("qwen2").save_pretrained(tmp_path / "plain", max_shard_size="5GB")
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("merged", "plain")]
    assert sizes[0] < 1.1 * sizes[1]
    check_values(type(model).from_pretrained(tmp_path / "merged"), before)
    assert is_merged(model)


def test_torch_save_and_pickle():
    model, before = merged_model("qwen2")
    sizes = []
    for saved in (model, make("qwen2")):
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        sizes.append(file.tell())
    assert sizes[0] < 1.1 * sizes[1]
    check_values(pickle.loads(pickle.dumps(model)), before)


def test_a_copy_has_its_own_memory():
    model, before = merged_model()
    other = copy.deepcopy(model)
    check_values(other, before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    check_values(other, before)
    check_form(other)


def test_load_state_dict():
    model, before = merged_model()
    form = choose_fused(model)
    doubled = {name: 2 * value for name, value in before.items()}
    model.load_state_dict(doubled)
    assert choose_fused(model) is form
    check_form(model)
    check_values(model, doubled)
    model.load_state_dict(before, assign=True)
    check_form(model, form.number)
    check_values(model, before)


def test_training():
    model, before = merged_model("qwen2")
    form = choose_fused(model)
    plain = make("qwen2", attn_implementation=ATTENTION)
    for trained in (model, plain):
        trained.train()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        tokens = ids(2, 12)
        for _ in range(2):
            optimizer.zero_grad()
            trained(tokens, labels=tokens).loss.backward()
            optimizer.step()
        trained.eval()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])
    # In place: the form reads the new values.
    assert choose_fused(model) is form
    check_form(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64).to(torch.float32),
        lambda model: setattr(model.model.layers[1].mlp.up_proj, "weight", nn.Parameter(torch.randn(80, 64) * 0.1)),
        lambda model: setattr(model.model.layers[0].self_attn.k_proj.weight, "data", torch.randn(32, 64) * 0.1),
        lambda model: (model.resize_token_embeddings(120, mean_resizing=False), model.eval()),  # the new head trains
    ],
    ids=["to", "parameter", "data", "resize"],
)
def test_new_memory_is_noticed(change):
    model, _ = merged_model()
    number = choose_fused(model).number
    change(model)
    check_form(model, number)


def test_other_forms_do_not_hold_the_old_weights():
    """The packed form reads the embedding of the model. The merge ends it."""
    from pipespec.engine import forward as forward_module
    from pipespec.engine.runtime import runtime_of

    model = make()
    forward_module.forward(model, ids(1, 4), RowCache.for_model(model, 1, 16), keep=1)
    assert "native" in runtime_of(model).forms
    model.set_attn_implementation(ATTENTION)
    assert choose_fused(model) is not None
    assert "native" not in runtime_of(model).forms
