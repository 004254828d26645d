"""Families of models: windows, soft caps, sinks, experts, latent attention. Every text is that of ``generate()``; what is refused is refused by name."""

import copy
import functools
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from pipespec import Pipeline, SpeedWarning
from pipespec.checks.models import check_architecture, check_streams
from pipespec.engine import native
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward, native_unsupported_reason
from pipespec.engine.native import native_form
from pipespec.errors import NotCapturable
from pipespec.models import description, families
from pipespec.models.compat import counts_columns
from pipespec.models.layout import STATES, CacheLayout
from pipespec.models.parts import ModelParts
from pipespec_kernels.decoder import NativeDecoder
from pipespec_spd import SpeculativePipeline
from pipespec_spd.partition import check_target
from tests.conftest import left_pad, noisy
from tests.pipespec.tiny_models import LACKING, LAYERS, SIZES, TINY_MODELS, VOCABULARY, WINDOW, make, model_of
from tests.support.caches import copied
from tests.support.reference import Noise
from tests.support.texts import same_text
from tests.trials import PROFILE
from tests.waiting import drafts_keep_up

NEW = 10
SEED = 11
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/models.md"
GEMMA, SINKS = "gemma3, mixed, two RoPE bases", "gpt_oss, mixed, sinks"
SLIDING = [name for name in TINY_MODELS if "window" in name or "mixed" in name]


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt beyond the window, and one that reaches it later, with left padding."""
    generator = torch.Generator().manual_seed(3)
    return left_pad([torch.randint(2, VOCABULARY, (n,), generator=generator) for n in (10, 3)])


@functools.cache
def wanted(name: str, is_sampled: bool) -> torch.Tensor:
    ids, mask = prompts()
    processors = [Noise(SEED, mask)] if is_sampled else []
    return model_of(name).generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, logits_processor=processors
    )


def check(pipe: Any, name: str, is_sampled: bool) -> None:
    ids, mask = prompts()
    options = {"do_sample": True, "top_k": 0, "seed": SEED} if is_sampled else {"do_sample": False}
    got = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)
    assert got.tolist() == wanted(name, is_sampled).tolist()


def pipeline(name: str, how: str) -> Any:
    target = model_of(name)
    draft = noisy(target, 0.02)
    if how == "spd":
        return SpeculativePipeline(target, draft, stages=[1, LAYERS - 1])
    return Pipeline(target, draft, schedule=how, lookahead=3)


def is_static(model: PreTrainedModel) -> bool:
    try:
        check_streams([model])
    except NotCapturable:
        return False
    return True


STAGED = [name for name in TINY_MODELS if TINY_MODELS[name][0] in families.IN_STAGES]
if PROFILE == "nightly":
    CROSS = [(name, how) for name in TINY_MODELS for how in ("plain", "lockstep", "workers")]
    CROSS += [(name, "streams") for name in TINY_MODELS if is_static(model_of(name))]
    CROSS += [(name, "spd") for name in STAGED]
else:
    CROSS = [(name, "lockstep") for name in TINY_MODELS]
    CROSS += [(name, how) for name in ("mistral, window", GEMMA) for how in ("plain", "streams", "spd")]
    CROSS += [(name, "workers") for name in (SINKS, "qwen3_next, recurrent") if name in TINY_MODELS]
    CROSS += [(SINKS, "spd")]


@pytest.mark.parametrize(("name", "how"), CROSS, ids=[f"{name}-{how}" for name, how in CROSS])
def test_text(name, how):
    """Greedy and sampled, a batch with padding, texts beyond the window."""
    with pipeline(name, how) as pipe:
        # Each type of attention is sampled in the few trials, too.
        for is_sampled in (False, True) if PROFILE == "nightly" or [*TINY_MODELS].index(name) % 3 == 2 else (False,):
            # A worker may come too late for so short a text.
            limits = (prompts()[1].sum(1) + NEW).tolist()
            with drafts_keep_up(pipe, limits) if how == "workers" else nullcontext():
                check(pipe, name, is_sampled)
        last = pipe.report.stages[-1]
        assert last.produced > 0
        assert how == "spd" or pipe.report.schedule == how
        assert how not in ("lockstep", "workers") or last.acceptance_rate > 0.1


@pytest.mark.parametrize("name", STAGED)
def test_targets_in_stages(name):
    check_target(model_of(name))


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2, mixed, caps", GEMMA, "granite"])
def test_what_the_first_layer_reads(name):
    """The model's own numbers, whether a module multiplies them or the model."""
    model, ids = copy.deepcopy(model_of(name)), prompts()[0]
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        with torch.inference_mode():
            own = model(ids, output_hidden_states=True).hidden_states[0]
            assert torch.equal(families.embedded(ModelParts.of(model), ids), own)


@pytest.mark.parametrize("name", SLIDING if PROFILE == "nightly" else SLIDING[::3])
def test_windows_matter(name):
    """Without its window, a model says something else: the texts of the other tests are beyond it."""
    layers = CacheLayout.of(model_of(name).config)
    assert WINDOW in layers.windows
    assert layers.restricts(WINDOW + 1)
    assert not layers.restricts(WINDOW)
    ids = prompts()[0][:1]
    wide = make(name, sliding_window=100)
    with torch.inference_mode():
        assert not torch.equal(wide(ids).logits, model_of(name)(ids).logits)


# ---- rollback


ROLLED = [
    (name, native)
    for name in ("mistral, window", "qwen2, mixed", GEMMA, "deepseek_v3, latents")
    for native in (True, False)
]
ROLLED += [(name, True) for name in ("qwen3_next, recurrent", "qwen3_5, recurrent") if name in TINY_MODELS]
ROLLED += [("lfm2, recurrent", native) for native in (True, False) if "lfm2, recurrent" in TINY_MODELS]


@pytest.mark.parametrize(("name", "native"), ROLLED)
def test_rollback_at_every_depth(name, native):
    """After a rollback of any depth, ragged ones too, the logits and states are bit for bit those of a cache that never held more."""
    model = model_of(name)
    recurrent = CacheLayout.of(model.config).states
    length = STATES + 6 if recurrent else 2 * WINDOW + 3
    generator = torch.Generator().manual_seed(0)
    text, other = (torch.randint(2, VOCABULARY, (2, length + 4), generator=generator) for _ in range(2))

    def fed(cache: RowCache, tokens: torch.Tensor) -> torch.Tensor:
        return forward(model, tokens, cache, keep=tokens.shape[1], native=native)

    cache, shorter = RowCache.for_model(model, 2, 64), []
    for at in range(length):
        shorter.append(copied(cache))
        fed(cache, text[:, at : at + 1])
    for depth in range(STATES - 4 if recurrent else length):
        n = length - depth
        for lengths in ([n, n], [n, length]):
            rolled, held, fresh = copied(cache), copied(cache), RowCache.for_model(model, 2, 64)
            rolled.truncate(lengths)
            # What is rolled back was something else.
            fed(rolled, other[:, : 3 if recurrent else length])
            rolled.truncate(lengths)
            held.truncate(lengths)
            for layer in recurrent.layers if recurrent else ():
                singles = [copied(cache if m == length else shorter[m]).states()[layer] for m in lengths]
                for part, mine in enumerate(rolled.states()[layer]):
                    assert all(torch.equal(mine[row], singles[row][part][row]) for row in range(2))
            # The same keys, values and states in a cache that has held nothing else.
            fresh.load(held.states(), lengths)
            for store in fresh._stores:
                for row, m in enumerate(lengths):
                    store[:, row, :, m:] = 0
            for begin, end in ((0, 3), (3, 4)):
                tokens = torch.stack([text[row, m + begin : m + end] for row, m in enumerate(lengths)])
                assert torch.equal(fed(rolled, tokens), fed(fresh, tokens))


@pytest.mark.parametrize("name", [GEMMA, "deepseek_v3, latents", SINKS])
def test_weights_on_disk(name, tmp_path):
    """Hooks of accelerate's move the masks, one per type of layer."""
    accelerate = pytest.importorskip("accelerate")
    model = model_of(name)
    target = accelerate.disk_offload(copy.deepcopy(model), tmp_path)
    with Pipeline(target, noisy(model, 0.02), schedule="lockstep", lookahead=3) as pipe:
        check(pipe, name, False)
        assert "accelerate brings the weights" in pipe.report.stages[-1].forward


def test_windows_that_no_text_reaches():
    """As long as a text fits the window, it is full attention: the same text, and the native form."""
    wide = make("mistral", sliding_window=SIZES["max_position_embeddings"])
    ids, mask = prompts()
    pipe = Pipeline(wide, noisy(wide, 0.02), schedule="lockstep")
    got = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert got.tolist() == wanted("mistral", False).tolist()
    assert pipe.report.stages[-1].forward == "native"


# ---- caches and masks of the caller


def test_caches_of_the_caller():
    target, ids = model_of(GEMMA), prompts()[0][:1]
    pipe = Pipeline(target, schedule="plain")
    first = pipe.generate(ids, max_new_tokens=2, return_dict_in_generate=True, do_sample=False)
    longer = torch.cat([first.sequences, torch.full((1, 3), 5)], 1)
    expected = target.generate(longer, max_new_tokens=NEW, do_sample=False)
    kept = first.past_key_values
    assert torch.equal(pipe.generate(longer, past_key_values=kept, max_new_tokens=NEW, do_sample=False), expected)
    # A DynamicCache without windows keeps all, one with windows only their content.
    everything, windows = DynamicCache(), DynamicCache(config=target.config)
    for cache in (everything, windows):
        got = pipe.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
        assert torch.equal(got, first.sequences)
    text, short = torch.cat([got, ids[:, :2]], 1), {"max_new_tokens": 4, "do_sample": False}
    same = target.generate(text, **short)
    assert torch.equal(target.generate(text, past_key_values=windows, **short), same)
    assert torch.equal(pipe.generate(text, past_key_values=everything, **short), same)
    longer = torch.cat([same, ids], 1)
    assert torch.equal(pipe.generate(longer, past_key_values=windows, **short), target.generate(longer, **short))
    # What goes before the window is not there: a call without the cache reads it again.
    assert torch.equal(pipe.generate(longer[:, :-2], **short), target.generate(longer[:, :-2], **short))


def test_padding_within_a_window_is_left_to_transformers():
    """It counts columns, padding included. Left padding shifts all of them."""
    target = model_of("mistral, window")
    pipe = Pipeline(target, schedule="plain")
    ids, mask = prompts()
    holes = mask.clone()
    holes[0, 9] = 0
    with pytest.raises(NotImplementedError, match=r"row 0 ends with padding.*pad on the left"):
        pipe.generate(ids, attention_mask=holes, max_new_tokens=4)
    holes = mask.clone()
    holes[0, 5] = 0
    with pytest.warns(SpeedWarning, match="padding after a row's first token, which counts in .* windows"):
        got = pipe.generate(ids, attention_mask=holes, max_new_tokens=4)
    assert torch.equal(got, target.generate(ids, attention_mask=holes, max_new_tokens=4, do_sample=False))
    wide = Pipeline(make("mistral", sliding_window=64), schedule="plain")
    same_text(wide, ids, attention_mask=holes, max_new_tokens=4)


# ---- the memory of a native form


WHOLE_PANELS = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
"""Heads whose rows fill whole panels, as those of published models do."""

TAKE_TURNS = [name for name in TINY_MODELS if name.startswith(("qwen3_next", "qwen3_5"))]
"""Models whose queries and gates take turns in one matrix."""


VECTORS = 4
"""The most rows of the weights of norms and of the small projections of a recurrent layer."""


def copied_bytes(model: PreTrainedModel, decoder: NativeDecoder) -> int:
    """Bytes of what a decoder reads elsewhere than in the model, without vectors."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    read = {tensor.data_ptr(): tensor for tensor in decoder._addresses._held if tensor.is_floating_point()}
    return decoder.nbytes + sum(
        tensor.nbytes
        for tensor in read.values()
        if tensor.ndim == 2 and len(tensor) > VECTORS and tensor.untyped_storage().data_ptr() not in own
    )


NATIVE_MODELS = [name for name in TINY_MODELS if native_unsupported_reason(model_of(name)) is None]


@pytest.mark.parametrize("name", NATIVE_MODELS if PROFILE == "nightly" else NATIVE_MODELS[::3])
def test_deep_models_are_compared_by_sections(name, monkeypatch):
    """Layers in the middle and at the end stand alone, whatever they consist of, but for those that read what others keep."""
    config, found, samples_of = model_of(name).config.to_dict(), [], native._samples_of
    lists = {key: value * 4 for key, value in config.items() if key.endswith("layer_types") and value}

    def noted(parts):
        found.append(samples_of(parts))
        return found[-1]

    monkeypatch.setattr(native, "_samples_of", noted)
    monkeypatch.setattr(native, "HEAD_ROWS", 32)
    deep = make(name, num_hidden_layers=4 * LAYERS, **lists)
    assert native_unsupported_reason(deep) is None
    firsts = [sample.first for sample in found[0]]
    assert firsts[0] == 0
    assert firsts[-1] + len(found[0][-1].layers) == 4 * LAYERS
    assert (len(firsts) > 1) == (ModelParts.of(deep).per_layer is None)


@pytest.mark.parametrize("name", NATIVE_MODELS)
def test_matrices_are_read_where_the_model_has_them(name):
    model = make(name, **WHOLE_PANELS) if name in TAKE_TURNS else model_of(name)
    assert copied_bytes(model, native_form(model).decoder) == description.packed_bytes(model)
    # Transposed experts and the parts of latents are copies in another order.
    assert (description.packed_bytes(model) > 0) == (name == SINKS or "latents" in name)


@pytest.mark.parametrize("name", TAKE_TURNS)
def test_matrices_of_several_parts_are_copied_once(name):
    model = make(name, **WHOLE_PANELS).to(torch.bfloat16).float()
    decoder = native_form(model).decoder
    size = sum(
        weight.nbytes
        for key, weight in model.named_parameters()
        if weight.ndim > 1 and "conv" not in key and "embed" not in key
    )
    assert (decoder.weight_bits, decoder.nbytes) == (16, size // 2)


# ---- what is refused, and the page that says so


def other(kind: str, **given: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | given)))


REFUSED = {"LongCat-Flash": lambda: other("longcat_flash")}


def sentence(name: str) -> str:
    with pytest.raises(TypeError) as refusal:
        check_architecture("target", REFUSED[name]())
    return str(refusal.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_those_of_the_page(name):
    rows = dict(
        re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", PAGE.read_text().split("## What is refused")[1], re.MULTILINE)
    )
    assert rows[name] == sentence(name)


@pytest.mark.skipif(not counts_columns("ministral3"), reason="this version of transformers counts positions")
def test_queries_that_depend_on_columns_are_refused():
    with pytest.raises(TypeError, match=r"queries depend on the columns of the batch .* install a newer version"):
        check_architecture("target", other("ministral3", head_dim=8))


def fused(model: PreTrainedModel) -> str:
    """Whether captured steps have a fused form, or the parts that have no fused operation."""
    try:
        lacking = description.read(model, matrices=False).beyond_llama
    except families.NotReadable:
        return "-"
    return lacking or "yes"


def table() -> list[str]:
    """The rows of the page, by what the code says of the tiny models."""
    rows: dict[str, list[str]] = {}
    for name, (kind, _) in TINY_MODELS.items():
        model = model_of(name)
        layout = CacheLayout.of(model.config)
        found = set(layout.windows)
        words = {(True, False): "full", (False, True): "windows", (True, True): "full and windows"}
        what = words[None in found, found != {None}]
        what = "latent" if layout.key_dim != layout.value_dim else what
        what = "full and recurrent" if layout.states is not None else what
        native = native_unsupported_reason(model) is None
        static = is_static(model)
        marks = ["yes" if mark else "-" for mark in (native, static, families.FAMILIES[kind].in_stages)]
        rows.setdefault(kind, [what])[1:] = [*marks, fused(model)]
        rows[kind][0] = max(rows[kind][0], what, key=len)
    return [" | ".join([f"| `{kind}`", *row]) + " |" for kind, row in sorted(rows.items())]


def test_each_family_has_a_tiny_model():
    assert {kind for kind, _ in TINY_MODELS.values()} | set(LACKING.values()) == set(families.FAMILIES)


@pytest.mark.skipif(bool(LACKING), reason="the page describes newer versions of transformers")
def test_the_page_lists_the_tested_families():
    """``python -m tests.pipespec.test_families`` prints the rows."""
    section = PAGE.read_text().split("## Model families")[1].split("## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")][1:] == table()


# ---- numbers that the configuration does not say


CHANGED: dict[str, tuple[str, str, str, Any]] = {
    "embedding": ("granite", "model", "embedding_multiplier", 5.0),
    "embedding, experts": ("granitemoe", "model", "embedding_multiplier", 5.0),
    "logits": ("cohere, norms", "", "logit_scale", 0.5),
    "biases of experts": (SINKS, "model.layers.1.mlp.experts", "has_bias", False),
    "activation of a delta net": ("qwen3_next, recurrent", "model.layers.0.linear_attn", "activation", "relu"),
}


@pytest.mark.parametrize("what", [what for what, (name, *_) in CHANGED.items() if name in TINY_MODELS])
def test_numbers_of_modules_that_change(what):
    """A module's own number counts, though the configuration has another one."""
    name, place, attribute, value = CHANGED[what]
    model, ids = make(name), prompts()[0][:1]
    pipe = Pipeline(model, schedule="plain")
    options = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def logits(generate: Any) -> torch.Tensor:
        return torch.cat(generate(ids, **options).logits)

    before = logits(pipe.generate)
    setattr(model.get_submodule(place), attribute, value)
    expected, got = logits(model.generate), logits(pipe.generate)
    if attribute in ("has_bias", "activation") and torch.equal(expected, before):
        pytest.skip("this version of transformers does not read it")
    assert not torch.allclose(expected, before, rtol=1e-2)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_attention_that_ceases_to_be_causal():
    model, ids = make(GEMMA), prompts()[0][:1]
    pipe = Pipeline(model, schedule="plain")
    same_text(pipe, ids, max_new_tokens=NEW)
    model.config.use_bidirectional_attention = True
    with pytest.warns(SpeedWarning, match="not causal"):
        got = pipe.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, model.generate(ids, max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize(("name", "native"), [("qwen3_next, recurrent", "is gelu"), ("lfm2, recurrent", None)])
def test_recurrent_layers_alone(name, native):
    """A delta net's convolution has the activation of the configuration. A model may lack attention."""
    if name in LACKING:
        pytest.skip(f"{LACKING[name]} is not in this transformers")
    kind = "linear_attention" if native else "conv"
    reason = native_unsupported_reason(make(name, layer_types=[kind] * LAYERS, hidden_act="gelu"))
    assert (reason is None) if native is None else (native in reason)


@pytest.mark.parametrize("output", ["output_router_logits", "output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("name", ["mixtral, window", "llama"])
def test_outputs_that_the_configuration_asks_for(name, output):
    """They change no text, in wide steps either: transformers computes a loss with router logits, from masks of the tokens alone."""
    if transformers.__version__.startswith("5.0.") and (name, output) == ("mixtral, window", "output_router_logits"):
        pytest.skip("transformers' own generate() fails: its loss takes the whole mask for that of one column")
    model = make(name)
    model.set_attn_implementation("eager")  # the only one that has attention weights
    setattr(model.config, output, True)
    for rows in (1, 2):
        ids = torch.arange(3, 3 + 9 * rows).reshape(rows, 9)
        with Pipeline(model, "ngram", schedule="lockstep", lookahead=4) as pipe:
            same_text(pipe, ids, max_new_tokens=16)


if __name__ == "__main__":
    print("\n".join(table()))
    for name in REFUSED:
        print(f"| {name} | {sentence(name)} |")
