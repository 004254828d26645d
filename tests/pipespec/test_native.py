"""The native form of a forward: the models that take it, equal logits and texts, and independence of the batch."""

import copy
import dataclasses
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import pipespec
import pipespec_spd.sections as sections_module
from pipespec.engine import native
from pipespec.engine.cache import RowCache
from pipespec.engine.form import TOLERANCE
from pipespec.engine.forward import described, forward
from pipespec.engine.runtime import runtime_of
from pipespec.models import description
from pipespec.models.parts import ModelParts
from pipespec.models.quantizing import quantized
from pipespec_spd.sections import ModelSection, open_sections
from tests.conftest import noisy, random_llama
from tests.pipespec import hostile
from tests.waiting import SECONDS, drafts_keep_up

VOCABULARY = 103


def rope(kind, **options):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **options}}


LLAMA, MISTRAL = (LlamaForCausalLM, LlamaConfig), (MistralForCausalLM, MistralConfig)
QWEN2, QWEN3 = (Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)
PHI3, GEMMA = (Phi3ForCausalLM, Phi3Config), (GemmaForCausalLM, GemmaConfig)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

MODELS = {
    "llama": (LLAMA, {}),
    "llama, each head its own keys": (LLAMA, {"num_key_value_heads": 4}),
    "llama 3 RoPE, tied": (LLAMA, {"tie_word_embeddings": True, **rope("llama3", **LLAMA3)}),
    "yarn RoPE, one kv head": (
        LLAMA,
        {"num_key_value_heads": 1, **rope("yarn", factor=4.0, original_max_position_embeddings=32)},
    ),
    "linear RoPE, head_dim": (LLAMA, {"head_dim": 24, **rope("linear", factor=2.0)}),
    "biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "odd sizes, gelu": (LLAMA, {"vocab_size": 97, "hidden_size": 44, "intermediate_size": 77, "head_dim": 10, "hidden_act": "gelu"}),
    "mistral": (MISTRAL, {"sliding_window": None}),
    "mistral, window": (MISTRAL, {"sliding_window": 6}),
    "qwen2": (QWEN2, {}),
    "qwen2, window from layer 1 on": (QWEN2, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": (QWEN3, {"head_dim": 32}),
    "phi3": (PHI3, {"sliding_window": None, **rope("default", partial_rotary_factor=0.5)}),
    "gemma": (GEMMA, {"head_dim": 32}),
}  # fmt: skip


def make(name="llama", dtype=torch.float32, seed=0, **more):
    (kind, config), options = MODELS[name]
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = kind(config(**settings | options | more))
    with torch.no_grad():
        for parameter in model.parameters():
            # The initial biases and norm weights are constants, so draw random ones.
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def ids(*shape, seed=3, vocabulary=97):
    return torch.randint(2, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def chosen(model, name="native"):
    choices = runtime_of(model).forms
    return choices[name].form or choices["own"].form


def way(model, name="native"):
    return type(chosen(model, name)).__name__


def logits_of(model, tokens, **options):
    cache = RowCache.for_model(model, tokens.shape[0], 64)
    return forward(model, tokens, cache, keep=tokens.shape[1], **options)


def form_of(model, **options):
    cache = RowCache.for_model(model, 1, 16)
    forward(model, ids(1, 3), cache, keep=1, **options)
    return described(model, cache, **options)


# --- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager", "pipespec"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_models(name, attention):
    model = make(name, attn_implementation=attention)
    cache, tokens = RowCache.for_model(model, 3, 64), ids(3, 40)
    with torch.no_grad():
        wanted = model(tokens).logits
    bound = TOLERANCE * float(wanted.abs().max())
    begin = 0
    for q, keep in ((20, 2), (1, 1), (4, 4), (3, 0)):
        got = forward(model, tokens[:, begin : begin + q], cache, keep=keep)
        begin += q
        assert got.shape == (3, keep, model.config.vocab_size)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted[:, begin - keep : begin], rtol=0, atol=bound)
    held = [28, 7, 15]
    cache.truncate(held)
    got = forward(model, torch.stack([row[n : n + 5] for row, n in zip(tokens, held, strict=True)]), cache, keep=5)
    for row, n in enumerate(held):
        torch.testing.assert_close(got[row], wanted[row, n : n + 5], rtol=0, atol=bound)
    assert described(model, cache) == "native"


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bfloat16_are_nearer_to_float32_than_the_models(name):
    model = make(name, torch.bfloat16)
    tokens = ids(3, 40)
    with torch.no_grad():
        own, exact = model(tokens).logits, copy.deepcopy(model).float()(tokens).logits
    got = logits_of(model, tokens)
    assert way(model) == "NativeForm"
    assert got.dtype == torch.bfloat16
    ours, theirs = ((logits.float() - exact).square().mean() for logits in (got, own))
    assert ours <= theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_bits_depend_neither_on_batch_nor_on_width(name, dtype):
    model = make(name, dtype)
    tokens = ids(3, 24)
    together = logits_of(model, tokens)
    for row in range(3):
        cache = RowCache.for_model(model, 1, 64)
        pieces, begin = [], 0
        for q in (1, 7, 1, 2, 13):
            pieces.append(forward(model, tokens[row : row + 1, begin : begin + q], cache, keep=q))
            begin += q
        assert torch.equal(torch.cat(pieces, 1)[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_where_they_lie(dtype):
    model = make(dtype=dtype)
    logits_of(model, ids(1, 3))
    assert (chosen(model).decoder.nbytes, description.packed_bytes(model)) == (0, 0)


def test_float32_weights_that_are_all_bfloat16s_are_copied_as_such_where_there_is_room(monkeypatch):
    model, tokens = make().to(torch.bfloat16).float(), ids(1, 9)
    logits = logits_of(model, tokens)
    half = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear)) // 2
    assert (chosen(model).decoder.weight_bits, chosen(model).nbytes) == (16, half)
    pipespec.refresh(model)
    monkeypatch.setattr(native, "host_memory", lambda: (1 << 30, half))
    assert torch.equal(logits_of(model, tokens), logits)
    assert (chosen(model).decoder.weight_bits, chosen(model).nbytes) == (32, 0)


# --- texts -----------------------------------------------------------------------------------------------------------


def test_workers_take_the_native_form_and_say_so():
    model = make()
    draft = noisy(model, 0.05)
    prompt = ids(1, 8)
    wanted = model.generate(prompt, max_new_tokens=24, do_sample=False)
    for use in (True, False):
        with pipespec.Pipeline(model, [draft], schedule="workers", native=use) as pipe:
            # A hook makes the target wait for the worker, which reports its form before its first step.
            with drafts_keep_up(pipe, [32]):
                assert torch.equal(pipe.generate(prompt, max_new_tokens=24, do_sample=False), wanted)
            assert pipe.report.stages[0].forward == ("native" if use else "transformers: native=False")
            assert pipe.report.stages[1].forward.startswith("transformers: ")


def test_a_first_call_that_takes_long_says_why(monkeypatch, capsys):
    monkeypatch.setattr("pipespec.process.progress._ANNOUNCE_AFTER_S", 0.0)
    take, ready = native.probe_inputs, threading.Event()
    monkeypatch.setattr("pipespec.process.progress.say", lambda line: (print(line), ready.set()))
    # The line comes from a thread of its own.
    monkeypatch.setattr(native, "probe_inputs", lambda parts: take(parts) if ready.wait(SECONDS) else None)
    pipe = pipespec.Pipeline(random_llama(5))
    for _ in range(2):
        pipe.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    assert capsys.readouterr().out == "reading the weights ...\n"


# --- models that keep transformers' forward ----------------------------------------------------------------------------


class Quantised(nn.Linear):
    """As a quantised layer: a class of its own."""


class Packed(nn.Parameter):
    pass


def quantise(model):
    model.model.layers[1].mlp.up_proj.__class__ = Quantised


def trains_with_dropout(model):
    model.model.layers[1].self_attn.attention_dropout = 1e-30  # never drops anything
    model.train()


def own_parameters(model):
    model.lm_head.weight = Packed(model.lm_head.weight.detach())


CHANGES = {
    "hook, width": "layers.1.mlp has hooks",
    "forward of an MLP": "layers.1.mlp has a forward of its own",
    "wrapped MLP, last column": "layers.1.mlp is of class Wrapped",
    trains_with_dropout: "is in training mode with dropout",
    "float64": "its weights are float64",
    quantise: "up_proj is of class Quantised",
    own_parameters: "of class Packed",
}
"""Functions, or names of :data:`hostile.CHANGES`, with words of the reason."""


def apply(change, model):
    (hostile.CHANGES[change] if isinstance(change, str) else change)(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: HeliumForCausalLM(HeliumConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, intermediate_size=32, vocab_size=101)).eval(), "HeliumForCausalLM has no native form"),
        (lambda: make(hidden_act="relu"), "is of class"),
        (lambda: make(dtype=torch.float16), "its weights are float16"),
    ],
)  # fmt: skip
def test_models_outside_of_the_table(model, reason):
    assert reason in form_of(model())


def test_a_subclass_is_not_its_family():
    class Mine(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = -out.logits
            return out

    model = make()
    before = logits_of(model, ids(1, 4))
    model.__class__ = Mine
    assert torch.allclose(logits_of(model, ids(1, 4)), -before, atol=1e-4)


def test_autocast_is_honoured():
    model = make()
    logits_of(model, ids(1, 4))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = RowCache.for_model(model, 1, 16)
        assert forward(model, ids(1, 4), cache, keep=4).dtype == torch.bfloat16
        assert described(model, cache) == "transformers: autocast"


# --- changes of the weights --------------------------------------------------------------------------------------------


def load(model):
    model.load_state_dict(make(seed=1).state_dict())


WEIGHTS = ["weight in place", "weight by .data", "other .data", "other parameter", "scaling of all layers", "a step of training"]  # fmt: skip
WEIGHTS += [load]


def test_changed_weights_are_noticed_by_a_call_that_goes_on_with_a_cache():
    model = make()
    prompt = ids(1, 8)
    with pipespec.Pipeline(model) as pipe:
        first = pipe.generate(prompt, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        before = chosen(model)
        load(model)
        pipe.generate(first.sequences, max_new_tokens=4, do_sample=False, past_key_values=first.past_key_values)
        assert chosen(model) is not before


def test_inference_tensors_have_no_version_and_are_noticed_by_their_values():
    with torch.inference_mode():
        model = make()
        first = logits_of(model, ids(1, 9))
        assert way(model) == "NativeForm"
        for parameter in model.model.layers[0].mlp.up_proj.parameters():
            parameter.mul_(2)
        assert not torch.allclose(logits_of(model, ids(1, 9)), first)


# --- the check, and the memory -----------------------------------------------------------------------------------------


def with_wrong_rope(monkeypatch):
    right = native.NativeForm._rope

    def wrong(self, capacity, length):
        cos, sin, factors = right(self, capacity, length)
        return cos, -sin, factors

    monkeypatch.setattr(native.NativeForm, "_rope", wrong)


def with_wrong_shape(monkeypatch, **wrong):
    right = description._read

    def read(*given):
        found = right(*given)
        return dataclasses.replace(found, shape=dataclasses.replace(found.shape, **wrong))

    monkeypatch.setattr(description, "_read", read)


FAULTS = {
    "rope": with_wrong_rope,
    "scale": lambda monkeypatch: with_wrong_shape(monkeypatch, scale=0.26),
    "eps": lambda monkeypatch: with_wrong_shape(monkeypatch, eps=1e-3),
    "activation": lambda monkeypatch: with_wrong_shape(monkeypatch, activation="gelu"),
}


def test_weights_that_are_not_finite_keep_the_models_forward():
    model = make()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    assert form_of(model).startswith("transformers: its logits differ")


def in_q8():
    return quantized(make(intermediate_size=96), "q8_0")


def test_a_copy_of_blocks_is_made_only_where_there_is_room(monkeypatch):
    monkeypatch.setattr(native, "host_memory", lambda: (1 << 30, 10_000))
    model = in_q8()
    assert "no room for a packed copy" in form_of(model)
    assert way(model) == "WholeModel"
    with pytest.warns(pipespec.SpeedWarning, match="target: there is no room"):
        pipespec.Pipeline(model, []).generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)


def test_copies_are_freed_with_the_model_and_on_request():
    model = make()
    logits_of(model, ids(1, 4))
    packed = weakref.ref(chosen(model))
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(pickle.loads(pickle.dumps(twin)), ids(1, 4)), logits_of(twin, ids(1, 4)))
    runtime_of(model).forms.clear()
    gc.collect()
    assert packed() is None
    logits_of(model, ids(1, 4))
    packed = weakref.ref(chosen(model))
    del model
    gc.collect()
    assert packed() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_users_defaults_of_torch_are_not_the_forms(dtype):
    """The default device and dtype of new tensors, while a model is packed, checked and called. (A check makes tensors of transformers' own on the default device.)"""
    models, tokens = [make(name, dtype) for name in ("llama", "gemma")], ids(2, 9)
    wanted = [logits_of(copy.deepcopy(model), tokens) for model in models]
    caches = [RowCache.for_model(model, 2, 16) for model in models]
    torch.set_default_dtype(torch.float64)
    try:
        got = [forward(model, tokens, cache, keep=9) for model, cache in zip(models, caches, strict=True)]
        with torch.device("meta"):
            for cache in caches:
                cache.reset()
            again = [forward(model, tokens, cache, keep=9) for model, cache in zip(models, caches, strict=True)]
    finally:
        torch.set_default_dtype(torch.float32)
    for logits in (got, again):
        assert all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))


def test_pipelines_share_one_copy():
    model = make()
    forms = set()
    for _ in range(2):
        with pipespec.Pipeline(model) as pipe:
            pipe.generate(ids(1, 5), max_new_tokens=2)
            forms.add(chosen(model))
    assert len(forms) == 1


# --- parts of a model --------------------------------------------------------------------------------------------------


def sections(model, cuts=(1,)):
    """Embedding and first layers, the layers after each of ``cuts``, norm and head."""
    whole, empty = ModelParts.of(model), ModelParts(model.config)
    parts = [
        whole._replace(layers=whole.layers[a:b], first=a, embed=None if a else whole.embed, norm=None, head=None)
        for a, b in itertools.pairwise([0, *cuts, len(whole.layers)])
    ]
    return [ModelSection(part) for part in (*parts, empty._replace(norm=whole.norm, head=whole.head))]


def through(model_sections, tokens, columns):
    """Logits of all columns, and the hidden states after each layer, the columns of each call from ``columns``."""
    *spans, head = model_sections
    caches = [RowCache(s.parts.cache_config(), len(tokens), 64, dtype=s.parts.dtype, device="cpu") for s in spans]
    logits, streams, begin = [], {1: [], 2: []}, 0
    for q in columns:
        hidden = spans[0].embed(tokens[:, begin : begin + q])
        for span, cache in zip(spans, caches, strict=True):
            hidden, seen = span.run_layers(hidden, cache, (1, 2))
            for k, stream in seen.items():
                streams[k].append(stream)
        logits.append(head.logits(hidden))
        begin += q
    return torch.cat(logits, 1), {k: torch.cat(parts, 1) for k, parts in streams.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_sections_have_the_bits_of_the_whole(name, dtype):
    model = make(name, dtype)
    tokens, parts = ids(3, 24), sections(model)
    assert open_sections(parts) == "native"
    logits, streams = through(parts, tokens, (1, 7, 1, 2, 13))
    assert torch.equal(logits, logits_of(model, tokens))
    # Features for draft modules. transformers' last hidden state comes after the final norm.
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        wanted, own = (m(tokens, output_hidden_states=True).hidden_states[1] for m in (exact, model))
    bound = TOLERANCE * float(wanted.abs().max()) if dtype == torch.float32 else (own - wanted).abs().max()
    assert streams[1].dtype == torch.float32
    assert (streams[1] - wanted).abs().max() <= bound


def test_features_between_the_layers_of_a_section():
    model = make(num_hidden_layers=5)
    whole = ModelParts.of(model)
    tokens, section = ids(2, 9), ModelSection(whole._replace(layers=whole.layers[1:], first=1, embed=None))
    assert open_sections([section]) == "native"
    with torch.no_grad():
        wanted = model(tokens, output_hidden_states=True).hidden_states
    for features in ((), (3,), (2, 4), (0, 1, 2, 3, 4, 5), (5,)):
        cache = RowCache(section.parts.cache_config(), 2, 16, dtype=torch.float32, device="cpu")
        out, streams = section.run_layers(wanted[1], cache, features)
        assert sorted(streams) == [k for k in features if k > 1]
        assert cache.lengths == (9, 9)
        for k, stream in streams.items():
            if k < 5:
                bound = TOLERANCE * float(wanted[k].abs().max())
                torch.testing.assert_close(stream, wanted[k], rtol=0, atol=bound)
            else:
                assert torch.equal(stream, out)


# --- the whole, and in sections ------------------------------------------------------------------------------------------


def whole(model):
    """A function that gives the form and the logits of a sequence, with the form chosen when it begins."""

    def run(tokens):
        cache = RowCache.for_model(model, len(tokens), 64)
        logits = forward(model, tokens, cache, keep=tokens.shape[1])
        return described(model, cache), logits

    return run


def in_sections(model):
    """As :func:`whole`."""
    parts = sections(model)
    return lambda tokens: (open_sections(parts), through(parts, tokens, (tokens.shape[1],))[0])


def named(change):
    return getattr(change, "__name__", change)


@pytest.mark.parametrize("change", CHANGES, ids=named)
@pytest.mark.parametrize(("name", "of"), [("llama", whole), ("qwen2", whole), ("llama", in_sections)])
def test_a_changed_model_keeps_its_own_forward_and_the_report_says_why(change, name, of):
    model = make(name)
    run, tokens = of(model), ids(1, 9)
    assert run(tokens)[0] == "native"
    apply(change, model)
    form, logits = run(tokens)
    assert form.startswith("transformers: ")
    assert CHANGES[change].split(" ", 1)[1] in form
    with torch.no_grad():
        assert torch.equal(logits, model(tokens).logits)


@pytest.mark.parametrize("change", WEIGHTS, ids=named)
@pytest.mark.parametrize("of", [whole, in_sections])
def test_changed_weights_are_noticed_when_the_next_sequence_begins(change, of):
    model = make()
    run, tokens = of(model), ids(1, 9)
    first = run(tokens)[1]
    assert torch.equal(run(tokens)[1], first)
    apply(change, model)
    form, got = run(tokens)
    assert form == "native"
    with torch.no_grad():
        wanted = model(tokens).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))
    assert not torch.allclose(got, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("of", [whole, in_sections])
def test_a_form_that_computes_something_else_is_not_used(monkeypatch, fault, dtype, of):
    FAULTS[fault](monkeypatch)
    model = make(dtype=dtype)
    form, logits = of(model)(ids(1, 9))
    what = "logits" if of is whole else "hidden states"
    assert form.startswith(f"transformers: its {what} differ from the model's own by ")
    with torch.no_grad():
        assert torch.equal(logits, model(ids(1, 9)).logits)


@pytest.mark.parametrize(
    ("count", "limit", "compared"), [(1, 0.5, [(0, 1)]), (3, 0.5, [(0, 1)]), (3, 0.0, [(0, 1), (1, 1), (2, 1)]), (8, 0.0, [(0, 1), (3, 1), (7, 1)])],
)  # fmt: skip
def test_layers_at_the_begin_in_the_middle_and_at_the_end_are_compared(monkeypatch, count, limit, compared):
    """The first ones closely, with the first rows of the head, and the others where they differ roughly."""
    found, check = [], native._check

    def noted(model, form, given):
        found.append((form.parts.first, form.decoder.num_layers))
        check(model, form, given)

    monkeypatch.setattr(native, "_check", noted)
    monkeypatch.setattr(native, "ROUGHLY", {torch.bfloat16: limit})
    monkeypatch.setattr(native, "HEAD_ROWS", 16)
    assert form_of(make(num_hidden_layers=count, dtype=torch.bfloat16)) == "native"
    assert found == compared


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_layer_of_its_own_is_found(monkeypatch, layer):
    """One that computes something else than its settings show."""
    read = description.read

    def without_factor(model):
        found = read(model)
        layers, first = list(found.layers), model.first if isinstance(model, ModelParts) else 0
        if 0 <= (at := layer - first) < len(layers):
            layers[at] = dataclasses.replace(layers[at], post_norm=layers[at].post_norm * 1.5)
        return dataclasses.replace(found, layers=tuple(layers))

    monkeypatch.setattr(description, "read", without_factor)
    assert form_of(make(num_hidden_layers=8)).startswith("transformers: its ")


def test_sections_are_packed_only_where_there_is_room_for_all(monkeypatch):
    model = in_q8()
    size = description.packed_bytes(model)
    for free, form in ((2 * size, "native"), (2 * size - 2, "transformers: there is no room for a packed copy")):
        monkeypatch.setattr(native, "host_memory", lambda free=free: (1 << 30, free))
        parts = sections(model)
        assert open_sections(parts).startswith(form)
        assert {type(part._call).__name__ == "NativeForm" for part in parts} == {form == "native"}


def not_finite(model):
    """Only the comparison of the last section finds it, after the others are packed."""
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan


@pytest.mark.parametrize("refuse", [hostile.CHANGES["hook, width"], not_finite], ids=["hook", "not finite"])
def test_sections_that_are_not_native_keep_no_copy(monkeypatch, refuse):
    """Neither of this call nor of an earlier one. The next call does not pack again to find the same reason."""
    packed, real = [], sections_module.native_form

    def counted(*arguments):
        packed.append(weakref.ref(form := real(*arguments)))
        return form

    monkeypatch.setattr(sections_module, "native_form", counted)
    model = make()
    parts = sections(model)
    assert open_sections(parts) == "native"
    refuse(model)
    for opened in (parts, sections(model)):
        reason = open_sections(opened)
        count = len(packed)
        assert open_sections(opened) == reason != "native"
        assert len(packed) == count
        gc.collect()
        assert not any(form() for form in packed)


def test_sections_without_native_forms():
    parts = sections(make())
    assert open_sections(parts, native=False) == "transformers: native=False"
    assert {type(part._call).__name__ for part in parts} == {"LayerLoop"}


@pytest.mark.parametrize("share", [native.MOVING, 1e6])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_file_keep_their_values_ties_and_watch(tmp_path, monkeypatch, tied, share):
    """Whether few of them or all have moved into huge pages."""
    monkeypatch.setattr(native, "MOVING", share)
    kept = random_llama(3, hidden=256, vocabulary=8192, dtype=torch.bfloat16)
    kept.config.tie_word_embeddings = tied
    kept.tie_weights()
    kept.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    own, head = kept.state_dict(), model.lm_head.weight
    address, prompt = head.data_ptr(), torch.tensor([[5, 6, 7]])
    with pipespec.Pipeline(kept) as expected, pipespec.Pipeline(model) as pipeline:
        assert torch.equal(pipeline.generate(prompt, max_new_tokens=8), expected.generate(prompt, max_new_tokens=8))
        assert head.data_ptr() == address
        assert (model.model.embed_tokens.weight.data_ptr() == address) == tied
        for name, value in model.state_dict().items():
            assert torch.equal(value, own[name])
        # A change through .data has no version.
        for each in (kept, model):
            each.lm_head.weight.data.copy_(each.lm_head.weight.data.flip(0))
        assert torch.equal(pipeline.generate(prompt, max_new_tokens=8), expected.generate(prompt, max_new_tokens=8))
