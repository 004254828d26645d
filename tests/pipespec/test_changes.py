"""What a call reads beside the code: the configuration, the attention's name, the values of weights, the sizes of layers. The text is transformers'."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import pipespec
from pipespec import Pipeline, SpeedWarning, StaleText
from pipespec.engine import known
from pipespec.engine.known import CAPTURED, NATIVE, identify
from pipespec.engine.native import TABLE, Checksums, NativeForm
from pipespec.engine.runtime import runtime_of
from pipespec.models.layout import layout_unsupported_reason, mask_windows
from pipespec.models.properties import reset_rope, rope_changes_at, rope_type
from pipespec_spd import SpeculativePipeline
from tests.conftest import always_right, noisy, random_llama, random_prompts
from tests.pipespec.hostile import CACHES_BY_TYPE
from tests.pipespec.tiny_models import LAYERS, TINY_MODELS, make
from tests.support.streamers import Held
from tests.waiting import SECONDS

IDS = random_prompts(1, seed=3, shortest=18, longest=18)[0][None] % 90 + 3
NEW = 14
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}


def bare(model, ids=IDS, **given):
    return GenerationMixin.generate(model, ids, **GREEDY | given)


def ours(model, ids=IDS, **given):
    return model.generate(ids, **GREEDY | given)


# ---- the configuration


def _set(**entries: Any) -> Any:
    def change(model: Any) -> None:
        for name, value in entries.items():
            setattr(model.config, name, value)

    return change


def _set_in_place(model: Any) -> None:
    model.config.layer_types[0] = "full_attention"


SLIDING = ["sliding_attention"] * LAYERS
FULL = ["full_attention"] * LAYERS
MIXED = ["full_attention", "sliding_attention"] * (LAYERS // 2)

CONFIGURATIONS: dict[str, tuple[str, Any, str | None]] = {
    "a window that no class knows": ("llama", _set(sliding_window=6), "keeps 6"),
    "the same, shared norms": ("olmo2", _set(sliding_window=9), "keeps 9"),
    "the same, scaled": ("granite", _set(sliding_window=8), "keeps 8"),
    "types that no class knows": ("llama", _set(layer_types=MIXED, sliding_window=5), "masks layer 1 with a window of None"),
    "types beside the window of all layers": ("mistral, window", _set(layer_types=FULL), "masks layer 0 with a window of 7"),
    "another window": ("mistral, window", _set(sliding_window=5), None),
    "no window any more": ("mistral, window", _set(sliding_window=None), None),
    "a window where there was none": ("mistral", _set(sliding_window=6), None),
    "another window of some layers": ("gemma2, mixed, caps", _set(sliding_window=4), None),
    "other types": ("gemma2, mixed, caps", _set(layer_types=MIXED), None),
    "one other type, in place": ("cohere2, mixed", _set_in_place, None),
    "windows for all layers": ("olmo3, mixed", _set(layer_types=SLIDING), None),
    "chunks": ("llama", _set(attention_chunk_size=8), "cannot be rolled back"),
    "not causal": ("llama", _set(is_causal=False), "not causal"),
    "another cap of scores": ("gemma2, mixed, caps", _set(final_logit_softcapping=1.5), None),
    "another scale of scores": ("cohere2, mixed", _set(logit_scale=0.02), None),
    "outputs of routers": ("mixtral, window", _set(output_router_logits=True), None),
    "hidden states": ("llama", _set(output_hidden_states=True), None),
    "a factor that no embedding reads": ("llama", lambda model: setattr(model.model.embed_tokens, "embed_scale", torch.tensor(0.2)), None),
    "heads of keys": ("llama", _set(num_key_value_heads=4), "rows, and its configuration says 4 heads"),
}  # fmt: skip
"""By name: a model, what changes in its configuration, and words of the reason to leave its calls to transformers; None: they speculate."""

ONLY_NEWER = ("other types", "one other type, in place", "windows for all layers", "outputs of routers")
"""Those with which older versions fail, or decode by other rules."""


@pytest.mark.parametrize(
    ("name", "when", "native"),
    [(name, when, (i + k) % 2 == 0) for i, name in enumerate(CONFIGURATIONS) for k, when in enumerate(("before", "between"))],
)  # fmt: skip
def test_a_changed_configuration(name, when, native):
    kind, change, reason = CONFIGURATIONS[name]
    model, other = make(kind, 1), make(kind, 1)
    if CACHES_BY_TYPE is None and name in ONLY_NEWER:
        pytest.skip(
            "this version of transformers reads the types of layers when the model is made, and counts losses of routers in each forward"
        )
    refused = when == "before" and reason == "cannot be rolled back"
    if when == "before":
        change(model)
    if refused:
        with pytest.raises(TypeError, match=reason):
            pipespec.attach(model, "ngram", schedule="lockstep")
        return
    pipe = pipespec.attach(model, "ngram", schedule="lockstep", native=native)
    if when == "between":
        assert torch.equal(ours(model), bare(other))
        change(model)
    change(other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ids in (IDS, IDS[:, :9].repeat(2, 1)):
            assert torch.equal(ours(model, ids), bare(other, ids))
    said = [str(w.message) for w in caught if issubclass(w.category, SpeedWarning)]
    if reason is None:
        assert not said
        assert pipe.report.schedule == "lockstep"
    else:
        assert any(reason in line for line in said)


def test_a_window_by_the_class_of_the_configuration(monkeypatch):
    model = make("llama", 1)
    assert known.unknown_reason(model) is None
    monkeypatch.setattr(type(model.config), "sliding_window", 6, raising=False)
    assert "keeps 6" in known.unknown_reason(model)
    monkeypatch.undo()
    assert known.unknown_reason(model) is None


@pytest.mark.skipif(CACHES_BY_TYPE is None, reason="this version of transformers has no such table")
def test_another_cache_for_a_type_of_layers(monkeypatch):
    model = make("llama", 1)
    assert known.unknown_reason(model) is None

    class Layer(DynamicSlidingWindowLayer):
        def __init__(self) -> None:
            super().__init__(sliding_window=4)

    monkeypatch.setitem(CACHES_BY_TYPE, "full_attention", Layer)
    assert "has a cache of class Layer" in known.unknown_reason(model)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_windows_are_those_of_the_models_masks(name):
    """What a layer reads: with a change of the first token, the last one of a text is the same where the windows of all layers hide it."""
    model = make(name, 2)
    windows = mask_windows(model)
    assert layout_unsupported_reason(model) is None
    assert len(windows) == LAYERS
    seen: list[Any] = []
    attention = model.model.layers[0]

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["attention_mask"])

    hook = attention.register_forward_pre_hook(note, with_kwargs=True)
    model.set_attn_implementation("eager")  # whose masks are whole
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    hook.remove()
    if seen[0] is None:  # of a recurrent layer
        return
    visible = int((seen[0][0, 0, -1] == 0).sum()) if seen[0].ndim == 4 else IDS.shape[1]
    assert visible == (windows[0] or IDS.shape[1])


def test_forms_depend_on_what_their_code_reads():
    model = make("gemma2, mixed, caps", 1)
    before = identify(model, CAPTURED)
    model.config.final_logit_softcapping = 2.0
    assert identify(model, CAPTURED) != before
    llama = make("llama", 1)
    before = identify(llama, NATIVE)
    llama.config.pad_token_id = 5  # which no forward reads
    assert identify(llama, NATIVE) == before


# ---- the attention


def _registered(name: str, *, has_mask: bool) -> str:
    AttentionInterface.register(name, lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    if has_mask:
        AttentionMaskInterface.register(name, sdpa_mask)
    return name


@pytest.mark.parametrize("cached", ["returned", "given"])
@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("kind", ["mistral, window", "llama", "qwen2, mixed"])
def test_another_attention_for_some_turns(kind, has_mask, cached):
    """A cache is continued in each turn, whether the pipeline or transformers decodes."""
    mine = _registered(f"mine_{has_mask}", has_mask=has_mask)

    def turns(model: Any) -> list[torch.Tensor]:
        ids, cache, texts = IDS, DynamicCache() if cached == "given" else None, []
        for i, name in enumerate(("sdpa", mine, "sdpa", "eager", mine)):
            model.set_attn_implementation(name)
            mask = torch.ones_like(ids)
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True, **GREEDY
            )
            texts.append(out.sequences)
            cache = out.past_key_values if cached == "returned" else cache
            ids = torch.cat([out.sequences, IDS[:, i : i + 4]], 1)
        return texts

    wanted, model = turns(make(kind, 1)), make(kind, 1)
    pipespec.attach(model, "ngram", schedule="lockstep")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeedWarning)
        found = turns(model)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_draft_with_an_attention_of_this_process_takes_no_part_in_workers():
    target = random_llama(3)
    draft = noisy(target, 0.02)
    draft.set_attn_implementation(_registered("mine_alone", has_mask=True))
    wanted = bare(target)
    with Pipeline(target, draft, schedule="workers") as pipe:
        with pytest.warns(SpeedWarning, match="attention 'mine_alone' is registered in this process alone") as caught:
            assert torch.equal(pipe.generate(IDS, **GREEDY), wanted)
        (line,) = [str(w.message) for w in caught]
        assert len(line) < 300
        assert "\n" not in line
        with warnings.catch_warnings():
            warnings.simplefilter("error", SpeedWarning)
            assert torch.equal(pipe.generate(IDS, **GREEDY), wanted)


# ---- values of weights


def large(seed: int = 3) -> Any:
    """With more weights than each call compares from the beginning."""
    return random_llama(seed, layers=3, hidden=128, vocabulary=1500)


def _row_of_the_embedding(model: Any) -> None:
    model.get_input_embeddings().weight.data[int(IDS[0, 3])] = 0


def _rows_of_the_head(model: Any) -> None:
    model.lm_head.weight.data[::2].neg_()


def _one_value(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[5, 30] = 300.0


def _a_column(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[:, 101] = 9.0


def _all_matrices_of_the_layers(model: Any) -> None:
    # The embedding is not copied.
    for weight in (weight for weight in model.model.layers.parameters() if weight.ndim == 2):
        weight.data.mul_(-3)


def stale(told: list[Any]) -> list[Any]:
    """Of the warnings of calls, those about a text of old weights."""
    return [warning for warning in told if warning.category is StaleText]


EDITS = [_row_of_the_embedding, _rows_of_the_head, _one_value, _a_column]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("make_pipe", [Pipeline, SpeculativePipeline])
def test_at_most_one_call_is_stale_and_says_so(edit, make_pipe):
    model, other = large(), large()
    options = {"schedule": "plain"} if make_pipe is Pipeline else {"stages": 2}
    pipe = make_pipe(model, **options)
    for _ in range(2):
        assert torch.equal(pipe.generate(IDS, **GREEDY), bare(other))
    edit(model)
    edit(other)
    wanted = bare(other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = pipe.generate(IDS, **GREEDY)
    is_stale = any(w.category is StaleText and "repeat this call" in str(w.message) for w in caught)
    assert is_stale or torch.equal(first, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.equal(pipe.generate(IDS, **GREEDY), wanted)


@pytest.mark.parametrize("where", ["at its beginning", "at its end"])
def test_a_change_that_another_call_finds(where):
    """A call that was under way goes on with weights of both, as in transformers, and says so. All later texts are those of the new ones."""
    model, held, other_held = large(), Held(2), Held(2)
    old = bare(model)
    pipe = Pipeline(model, schedule="plain")

    def call(streamer: Held) -> Any:
        return pipe.generate(IDS, streamer=streamer, **GREEDY)

    with warnings.catch_warnings(record=True) as told, ThreadPoolExecutor(2) as threads:
        warnings.simplefilter("always")
        first = threads.submit(call, held)
        assert held.inside.wait(SECONDS)
        form = runtime_of(model).forms[NATIVE].form
        if where == "at its end":
            other = threads.submit(call, other_held)
            assert other_held.inside.wait(SECONDS)
        _all_matrices_of_the_layers(model)
        new = bare(model)
        if where == "at its beginning":
            other = threads.submit(call, other_held)
        other_held.go_on.set()
        assert where == "at its end" or torch.equal(other.result(SECONDS), new)
        other.result(SECONDS)
        assert len(stale(told)) == (where == "at its end")
        assert torch.equal(pipe.generate(IDS, **GREEDY), new)
        assert runtime_of(model).forms[NATIVE].form is not form
        told.clear()
        held.go_on.set()
        first.result(SECONDS)
        assert pipe.report.stages[-1].forward == NATIVE
        assert len(stale(told)) == 1
        assert torch.equal(pipe.generate(IDS, **GREEDY), new)
        assert len(stale(told)) == 1
    assert not torch.equal(old, new)


def test_two_calls_that_find_the_same_change_at_their_ends(monkeypatch):
    model, held = large(), [Held(2), Held(2)]
    pipe, meet = Pipeline(model, schedule="plain"), threading.Barrier(2, timeout=SECONDS)
    pipe.generate(IDS, **GREEDY)
    compare = NativeForm.was_current

    def was_current(form: NativeForm) -> bool:
        found = compare(form)
        meet.wait()
        return found

    monkeypatch.setattr(NativeForm, "was_current", was_current)
    # Threads that catch warnings at the same time lose some.
    told: list[int] = []
    monkeypatch.setattr("pipespec.api.base.warn_of_stale_text", lambda: told.append(threading.get_ident()))
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(pipe.generate, IDS, streamer=streamer, **GREEDY) for streamer in held]
        assert all(streamer.inside.wait(SECONDS) for streamer in held)
        _all_matrices_of_the_layers(model)
        for streamer in held:
            streamer.go_on.set()
        for call in calls:
            call.result(SECONDS)
    assert len(set(told)) == len(told) == 2


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_of_inference_tensors_shows_at_once(edit):
    """They have no versions. Changed, then changed back."""
    with torch.inference_mode():
        model, other = large(), large()
    wanted = bare(other)
    pipespec.attach(model, (), schedule="plain")
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        assert torch.equal(ours(model), wanted)
        with torch.inference_mode():
            edit(model)
            edit(other)
        assert torch.equal(ours(model), bare(other))
        with torch.inference_mode():
            for changed in (model, other):
                for name, parameter in changed.named_parameters():
                    parameter.copy_(weights[name])


def test_the_end_of_a_call_compares_every_value():
    noise = torch.Generator().manual_seed(1)
    large = torch.randn((3000, 1000), generator=noise)
    sums = Checksums([large])
    for row, column in torch.randint(0, 1000, (20, 2), generator=noise).tolist():
        assert sums.agree()
        assert sums.rest_agrees()
        kept = float(large[3 * row, column])
        large.data[3 * row, column] = kept + 1
        assert not (sums.agree() and sums.rest_agrees())
        large.data[3 * row, column] = kept
    assert sums.agree()
    # What changes behind the place that the round has reached, too: the next round sees it.
    assert sums.rest_agrees()
    assert sums.rest_agrees()  # nothing is left


def test_of_an_embedding_the_rows_that_were_read_are_compared():
    noise = torch.Generator().manual_seed(1)
    table, rows = torch.randn((5000, 100), generator=noise), torch.randperm(5000, generator=noise)
    sums = Checksums([table], [table])
    sums.read(torch.tensor([[-1, 5000]]))
    for first in range(0, 400, 100):
        assert sums.agree()  # more are read within a round
        sums.read(rows[first : first + 100].view(10, 10))
        assert sums.rest_agrees()
    for at in (*rows[:3].tolist(), *rows[300:303].tolist(), *rows[397:400].tolist()):
        kept = float(table[at, 17])
        table.data[at, 17] = kept + 1
        assert not (sums.agree() and sums.rest_agrees())
        table.data[at, 17] = kept
    table.data[rows[400:]] += 1
    assert sums.agree()
    assert sums.rest_agrees()


def assert_renewed(model, prompt, before, found):
    """``found`` is the text of the present weights, and ``before`` is not."""
    with Pipeline(model, schedule="plain") as fresh:
        wanted = fresh.generate(prompt, **GREEDY)
    assert torch.equal(found, wanted)
    assert not torch.equal(before, wanted)


@pytest.mark.filterwarnings("ignore::pipespec.StaleText")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_large_embedding_changes_between_calls(dtype):
    """One call may be stale and says so. The next one reads the prompt again, though the prompt of the first one was kept."""
    model, prompt = random_llama(3, hidden=256, vocabulary=8192, dtype=dtype), torch.arange(3000, 3060)[None]
    with Pipeline(model, schedule="plain") as pipe:
        before = pipe.generate(prompt, **GREEDY)
        model.model.embed_tokens.weight.data[3050] *= -3
        for _ in range(2):
            found = pipe.generate(prompt, **GREEDY)
    assert_renewed(model, prompt, before, found)


@pytest.mark.filterwarnings("ignore::pipespec.StaleText")
@pytest.mark.parametrize("table", ["embed_tokens", "embed_tokens_per_layer"])
def test_of_each_table_of_tokens_the_rows_that_were_read_are_compared(table):
    """Gemma 4's inputs of layers come from a table of gigabytes."""
    name = "gemma4, mixed, shared keys"
    if name not in TINY_MODELS:
        pytest.skip("this version of transformers lacks the model, or has it in another form")
    sizes = {"hidden_size": 32, "hidden_size_per_layer_input": 16}
    model = make(
        name, 1, vocab_size=8192, vocab_size_per_layer_input=8192, tie_word_embeddings=False, head_dim=8, **sizes
    )
    weight, prompt = getattr(model.model, table).weight, torch.arange(3000, 3040)[None]
    assert weight.nbytes >= TABLE
    with Pipeline(model, schedule="plain") as pipe:
        pipe.generate(prompt, **GREEDY)
        assert pipe.report.stages[-1].forward == "native"
        with warnings.catch_warnings():
            warnings.simplefilter("error", StaleText)
            weight.data[3500] = torch.linspace(-9, 9, weight.shape[1])  # no text has read it
            before = pipe.generate(prompt, **GREEDY)
        weight.data[3039] = weight.data[3500]
        for _ in range(2):
            found = pipe.generate(prompt, **GREEDY)
    assert_renewed(model, prompt, before, found)


@pytest.mark.filterwarnings("ignore::pipespec.StaleText")
def test_a_row_of_an_embedding_that_is_not_contiguous():
    """The native code has a copy of it, so that rows which no text has read count, too."""
    model, prompt = random_llama(3, hidden=256, vocabulary=8192), torch.arange(3000, 3060)[None]
    wide = torch.zeros((8192, 512))
    wide[:, :256] = model.model.embed_tokens.weight.detach()
    model.model.embed_tokens.weight = nn.Parameter(wide[:, :256], requires_grad=False)
    with Pipeline(model, schedule="plain") as pipe:
        pipe.generate(prompt + 100, **GREEDY)
        assert pipe.report.stages[-1].forward == "native"
        model.model.embed_tokens.weight.data[3050] *= -3
        for _ in range(2):
            found = pipe.generate(prompt, **GREEDY)
    assert torch.equal(found, bare(model, prompt))


@pytest.mark.parametrize("schedule", ["lockstep", "workers"])
def test_a_draft_is_trained_after_calls_in_inference_mode(schedule):
    target = random_llama(3)
    draft = noisy(target, 0.02)
    wanted = bare(target)
    with torch.inference_mode():
        pipe = Pipeline(target, draft, schedule=schedule)
        assert torch.equal(pipe.generate(IDS, **GREEDY), wanted)
    pipe.close()
    for model in (draft, target):
        assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_models_that_are_loaded_in_inference_mode_can_be_trained(tmp_path):
    random_llama(4).save_pretrained(tmp_path)
    with torch.inference_mode():
        pipe = Pipeline(random_llama(3), str(tmp_path), schedule="lockstep", dtype="float32")
    assert not any(parameter.is_inference() for parameter in pipe.models[0].parameters())


# ---- sizes


def _without_heads(model: Any, layers: tuple[int, ...]) -> None:
    """Take the second head of keys, and its queries, out of some layers."""
    for i in layers:
        at = model.model.layers[i].self_attn
        size, groups = at.head_dim, at.num_key_value_groups
        for name, heads, axis in (("q_proj", groups, 0), ("k_proj", 1, 0), ("v_proj", 1, 0), ("o_proj", groups, 1)):
            old = getattr(at, name)
            count = old.weight.shape[axis] // size
            kept = [h for h in range(count) if h // heads != 1]
            places = torch.tensor([h * size + d for h in kept for d in range(size)])
            weight = old.weight.detach().index_select(axis, places)
            new = nn.Linear(weight.shape[1], weight.shape[0], bias=old.bias is not None)
            new.weight = nn.Parameter(weight)
            if old.bias is not None:
                new.bias = nn.Parameter(old.bias.detach() if axis else old.bias.detach()[places])
            setattr(at, name, new)


EVERY, TWO = (0, 1, 2, 3), (0, 2)
PRUNED = [("llama", (1,), "plain"), ("llama", TWO, "lockstep"), ("mistral, window", TWO, "plain")]
PRUNED += [("mistral, window", EVERY, "lockstep"), ("qwen2", EVERY, "plain"), ("qwen2", (1,), "lockstep")]


@pytest.mark.parametrize(("kind", "layers", "schedule"), PRUNED)
def test_pruned_heads(kind, layers, schedule):
    model, other = make(kind, 1), make(kind, 1)
    pipe = pipespec.attach(model, "ngram" if schedule == "lockstep" else (), schedule=schedule)
    assert torch.equal(ours(model), bare(other))
    for changed in (model, other):
        _without_heads(changed, layers)
    with pytest.warns(SpeedWarning, match=f"layer {layers[0]} has a k_proj of 8 rows, and its configuration says 2"):
        assert torch.equal(ours(model), bare(other))
    two = IDS[:, :9].repeat(2, 1)
    assert torch.equal(ours(model, two), bare(other, two))
    assert pipe.report.tokens == NEW  # of the call before


# ---- RoPE


def _with_rope(rope: dict[str, Any], kind: str = "llama", limit: int = 96) -> Any:
    config = copy.deepcopy(make(kind, 1).config)
    config.max_position_embeddings, config.rope_parameters = limit, rope
    torch.manual_seed(2)
    model = type(make(kind, 1))(config).eval()
    model.generation_config.eos_token_id = None
    return model


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 96}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0]}


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("cached", ["returned", "given"])
def test_turns_across_a_change_of_rope(rope, cached):
    """The first turns are below the length at which it changes, the last ones beyond, with one cache. Then a short text."""
    if transformers.__version__.startswith("5.0.") and rope is DYNAMIC:
        pytest.skip("frequencies of a longer text remain in later calls of transformers 5.0")

    def texts(model: Any) -> list[torch.Tensor]:
        ids, found = IDS, []
        cache = DynamicCache(config=model.config) if cached == "given" else None
        for i in range(4):
            mask = torch.ones_like(ids)
            out = model.generate(
                ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True, **GREEDY
            )
            found.append(out.sequences)
            cache = out.past_key_values if cached == "returned" else cache
            ids = torch.cat([out.sequences, IDS[:, : 8 + i]], 1)
        assert ids.shape[1] > 96
        return [*found, model.generate(IDS[:, :6], **GREEDY)]

    wanted, model = texts(_with_rope(dict(rope))), _with_rope(dict(rope))
    pipe = pipespec.attach(model, always_right(model), schedule="lockstep")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeedWarning)
        found = texts(model)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert pipe.report.schedule == "lockstep"


def test_rope_is_that_of_the_modules():
    """They keep what the configuration said when they were made."""
    model = _with_rope(dict(DYNAMIC))
    assert (rope_type(model), rope_changes_at(model)) == ("dynamic", 96)
    model.config.rope_parameters["rope_type"] = "default"
    model.config.max_position_embeddings = 4000
    assert (rope_type(model), rope_changes_at(model)) == ("dynamic", 96)
    longer = _with_rope(copy.deepcopy(LONG))
    longer.config.rope_parameters["original_max_position_embeddings"] = 50  # which each forward reads
    assert rope_changes_at(longer) == 50


def test_rope_of_some_layers():
    types = {"full_attention": dict(DYNAMIC), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    model = _with_rope(types, "gemma3, mixed, two RoPE bases")
    assert (rope_type(model), rope_changes_at(model)) == ("dynamic", 96)
    rotary = model.model.rotary_emb
    first = rotary.full_attention_inv_freq.clone()
    with torch.no_grad():
        model(input_ids=IDS.repeat(1, 7))
    assert not torch.equal(rotary.full_attention_inv_freq, first)
    reset_rope(model)
    assert torch.equal(rotary.full_attention_inv_freq, first)


def test_frequencies_of_the_users_own_stay():
    model = _with_rope(dict(DYNAMIC))
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.25
    wanted = bare(model)
    pipespec.attach(model, "ngram", schedule="lockstep")
    assert torch.equal(ours(model), wanted)
