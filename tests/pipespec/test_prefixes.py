"""Kept prefixes: a text is the same with and without them, whatever calls came before, and a prompt's beginning is not read again."""

import copy
import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from pipespec import Pipeline
from pipespec.engine import cached_text, native, prefixes
from pipespec.schedules.graphs.stage import GraphedStage
from tests.conftest import left_pad, noisy, random_llama
from tests.pipespec import heads
from tests.pipespec.test_adapters import Lora, adapted
from tests.pipespec.tiny_models import TINY_MODELS, VOCABULARY, make
from tests.support.streamers import Recorder
from tests.support.ways import driver_of

CHUNK = 16
LOCKSTEP = {"schedule": "lockstep", "lookahead": 4}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks and prefixes of the size of these prompts."""
    monkeypatch.setattr("pipespec.engine.chain.PREFILL_CHUNK", CHUNK)
    monkeypatch.setattr("pipespec.engine.prefixes.SHORTEST", 4)


# ---- what is kept, and for how long

PLAIN, GREEDY = {"schedule": "plain"}, {"max_new_tokens": 8, "do_sample": False}


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 100, (1, count), generator=torch.Generator().manual_seed(seed))


def longer(text: torch.Tensor, seed: int, count: int = 9) -> torch.Tensor:
    return torch.cat([text, tokens(count, seed)], 1)


def said(pipe: Pipeline, prompt: torch.Tensor, **how: Any) -> tuple[torch.Tensor, int]:
    """The text, and how many tokens of the prompt were not read."""
    text = pipe.generate(prompt, **{"attention_mask": torch.ones_like(prompt)} | GREEDY | how)
    assert pipe.report is not None
    return text, pipe.report.prompt_tokens_reused


def store_of(pipe: Pipeline) -> Any:
    return driver_of(pipe).target._store


@pytest.fixture(scope="module")
def target():
    return random_llama(7)


def test_conversations_alternate(target):
    """Each reads what is new only, and none costs another one its text."""
    pipe, texts = Pipeline(target, **PLAIN), [tokens(40, seed) for seed in range(3)]
    for turn in range(4):
        for i, text in enumerate(texts):
            texts[i], reused = said(pipe, longer(text, 10 * turn + i))
            # The last token of an answer was never fed.
            assert reused == (text.shape[1] - 1 if turn else 0)
    assert len(store_of(pipe).texts) == 2  # beside that of the last call
    assert all(kept.cache.rows == 1 for kept in store_of(pipe).texts)


def test_a_text_is_kept_once(target):
    pipe = Pipeline(target, **PLAIN)
    assert [said(pipe, tokens(4, 1))[1] for _ in range(4)] == [0] * 4  # too short to go on from
    assert len(store_of(pipe).texts) == 1


def test_an_interrupted_call_gives_no_storage_on_that_a_text_has(monkeypatch):
    def interrupted(store: Any, name: str, value: Any) -> None:
        assert name != "texts"
        vars(store)[name] = value

    texts = [prefixes.KeptText(object(), np.zeros((1, 4)), [4], [0], [4], prefixes.NOT_KEPT) for _ in range(2)]
    store = prefixes.PrefixStore()
    store.add(texts[0])
    monkeypatch.setattr(prefixes.PrefixStore, "__setattr__", interrupted)
    with pytest.raises(AssertionError):
        store.add(texts[1])
    assert store.spare is None


def test_a_branch_does_not_cost_the_conversation_its_text(target):
    pipe, common = Pipeline(target, **PLAIN), tokens(80, 1)
    first, _ = said(pipe, longer(common, 2, 70))
    _, of_branch = said(pipe, longer(common, 3, 70))
    _, of_first = said(pipe, longer(first, 4))
    assert (of_branch, of_first) == (80, first.shape[1] - 1)


def test_rows_of_a_batch_begin_with_any_text(target):
    """Those of earlier calls with other numbers of rows, and those of one text."""
    pipe, one, two = Pipeline(target, **PLAIN), tokens(40, 1), tokens(30, 2)
    one, two = said(pipe, one)[0], said(pipe, two)[0]
    ids, mask = left_pad([longer(two, 5)[0], longer(one, 6)[0], longer(one, 7)[0], tokens(20, 8)[0]])
    batch, reused = said(pipe, ids, attention_mask=mask)
    assert reused == two.shape[1] - 1 + 2 * (one.shape[1] - 1)
    row = batch[1][mask[1].argmax() :]
    assert said(pipe, longer(row[None], 9))[1] == len(row) - 1
    ids, mask = torch.cat([batch, tokens(4, 1).expand(4, -1)], 1), torch.cat([mask, mask.new_ones(4, 12)], 1)
    out, reused = said(pipe, ids, attention_mask=mask)
    # Of each row, the last token of the answer was never fed, but for the one that went on by itself.
    assert reused == int(mask.sum()) - 4 * 5 + 1
    assert torch.equal(out, said(Pipeline(target, **PLAIN), ids, attention_mask=mask)[0])


def test_the_least_recently_used_text_goes_first(target):
    with Pipeline(target, **PLAIN) as pipe:
        said(pipe, tokens(40, 1))
        size = driver_of(pipe).target.cache.nbytes
    pipe = Pipeline(target, **PLAIN, prefix_cache=3 * size)  # a cache that goes on is larger
    texts = [said(pipe, tokens(40, seed))[0] for seed in range(2)]
    texts[0], reused = said(pipe, longer(texts[0], 4))
    assert reused
    said(pipe, tokens(40, 5))
    assert said(pipe, longer(texts[0], 6))[1] == texts[0].shape[1] - 1
    assert said(pipe, longer(texts[1], 7))[1] == 0


@pytest.mark.parametrize("budget", [0, 1])
def test_a_tiny_budget(target, budget):
    """One byte is enough for the last text, whose storage stays in any case; without a budget there is no text."""
    pipe, fresh = Pipeline(target, **PLAIN, prefix_cache=budget), Pipeline(target, **PLAIN, prefix_cache=0)
    text, _ = said(pipe, tokens(40, 1))
    text, reused = said(pipe, longer(text, 2))
    assert bool(reused) == bool(budget)
    said(pipe, tokens(40, 3))
    prompt = longer(text, 4)
    out, reused = said(pipe, prompt)
    assert reused == 0
    assert torch.equal(out, said(fresh, prompt)[0])


def test_drafts_keep_theirs(target):
    pipe = Pipeline(target, noisy(target, 0.02), **LOCKSTEP)
    text, _ = said(pipe, tokens(40, 1))
    said(pipe, longer(text, 2))
    assert [stage.reused for stage in driver_of(pipe).stages] == [text.shape[1] - 1] * 2


def test_workers_keep_theirs(target):
    with Pipeline(target, noisy(target, 0.02), schedule="workers", trace=64) as pipe:
        text, _ = said(pipe, tokens(60, 1))
        _, reused = said(pipe, longer(text, 2))
        assert reused == text.shape[1] - 1
        assert pipe.report is not None
        assert pipe.report.trace is not None
        assert pipe.report.trace["draft 0"]["prefill"].sum() < 30


WINDOWED = ("mistral, window", "gemma2, mixed, caps")
RECURRENT = ("qwen3_5, recurrent", "lfm2, recurrent")


@pytest.mark.parametrize("cut", [21, 33, 45])
@pytest.mark.parametrize("kind", [kind for kind in (*WINDOWED, *RECURRENT) if kind in TINY_MODELS])
def test_a_prefix_ends_within_a_window_or_between_two_states(kind, cut):
    """Keys and values of layers with a window are kept up to any token, states of recurrent layers at chunks only."""
    model = make(kind)
    pipe, fresh = (Pipeline(model, **PLAIN, prefix_cache=size) for size in (None, 0))
    first, _ = said(pipe, tokens(60, 1) % VOCABULARY)
    branch = longer(first[:, :cut], 2) % VOCABULARY
    text, reused = said(pipe, branch)
    assert reused == (cut if kind in WINDOWED else cut // CHUNK * CHUNK)
    assert torch.equal(text, said(fresh, branch)[0])
    # The branch has taken the cache of the first text, which goes on from what is left of it.
    longest = longer(first, 3) % VOCABULARY
    text, reused = said(pipe, longest)
    assert reused >= cut // CHUNK * CHUNK
    assert torch.equal(text, said(fresh, longest)[0])


@pytest.mark.parametrize("count", [40, 44, 48, 52])
def test_a_prefix_ends_at_the_limit_of_a_draft(target, count):
    """A draft that was made for shorter texts than the target's goes on beyond its limit, and the text stays the target's."""
    draft = noisy(target, 0.02)
    draft.config.max_position_embeddings = 48
    pipe, text = Pipeline(target, draft, **LOCKSTEP), tokens(count - 8, 1)
    for turn in range(3):
        wanted = said(Pipeline(target, **PLAIN), text)[0]
        answer, reused = said(pipe, text)
        assert torch.equal(answer, wanted)
        assert reused == (text.shape[1] - 10 if turn else 0)
        text = longer(answer, turn)


def test_a_head_has_the_hidden_states_of_a_kept_prefix(tmp_path):
    pipe = Pipeline(heads.make_target(), heads.write_original(tmp_path, heads.make_weights()), **LOCKSTEP)
    common = tokens(60, 1)
    said(pipe, longer(common, 2, 70))
    said(pipe, longer(common, 3, 70))  # copied
    features = driver_of(pipe).target.cache.features
    assert features.begin == [0]


def test_closing_and_forks_begin_anew(target):
    pipe = Pipeline(target, **PLAIN)
    text, _ = said(pipe, tokens(40, 1))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(said(pipe, longer(text, 2))[1]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"0"
    assert said(pipe, longer(text, 2))[1] > 0
    pipe.close()
    assert said(pipe, longer(text, 2))[1] == 0


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("at", [1, 5])
def test_an_interrupted_call_leaves_what_it_has_read(target, drafted, at):
    class StopHereError(Exception):
        pass

    def stop() -> None:
        raise StopHereError

    drafts, how = ([noisy(target, 0.02)], LOCKSTEP) if drafted else ([], PLAIN)
    pipe, fresh, prompt = Pipeline(target, drafts, **how), Pipeline(target, **PLAIN, prefix_cache=0), tokens(60, 1)
    with pytest.raises(StopHereError):
        said(pipe, prompt, streamer=Recorder(at, stop))
    again = longer(said(fresh, prompt)[0], 2)
    out, reused = said(pipe, again)
    assert reused >= 59
    assert torch.equal(out, said(fresh, again)[0])


@pytest.mark.parametrize("native", [True, False])
def test_an_interrupted_prompt_is_no_prefix(target, native, monkeypatch):
    """The forward that is interrupted does not count, those before it do."""
    pipe, fresh = (Pipeline(target, **PLAIN, native=native, prefix_cache=n) for n in (None, 0))
    prompt, own, forwards = tokens(60, 1), cached_text.forward, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        forwards.append(0)
        if len(forwards) == 3:
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    monkeypatch.setattr(cached_text, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        said(pipe, prompt)
    out, reused = said(pipe, prompt)
    assert reused == 2 * CHUNK
    assert torch.equal(out, said(fresh, prompt)[0])


# ---- what a kept text depends on


def through_data(model: Any) -> None:
    for parameter in model.model.layers[0].parameters():
        parameter.data.mul_(1.5)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0] += 1


def replaced(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(
        model.model.layers[1].self_attn.k_proj.weight * 2
    )


def loaded(model: Any) -> None:
    model.load_state_dict(random_llama(9).to(model.dtype).state_dict())


def cast(model: Any) -> None:
    model.to(torch.bfloat16)


def one_row(model: Any) -> None:
    model.model.embed_tokens.weight.data[tokens(60, 1)[0, 7]] *= 3


def configured(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("change", [through_data, in_place, replaced, loaded, cast])
def test_changed_weights_are_read_again(change, native):
    model, options = random_llama(7), PLAIN | {"native": native}
    pipe = Pipeline(model, **options)
    text, _ = said(pipe, tokens(60, 1))
    change(model)
    prompt = longer(text, 2)
    out, reused = said(pipe, prompt)
    assert reused == 0
    assert torch.equal(out, said(Pipeline(copy.deepcopy(model), **options), prompt)[0])
    assert said(pipe, longer(out, 3))[1] > 0


def test_another_attention_is_another_text():
    model = random_llama(7)
    pipe = Pipeline(model, **PLAIN, native=False)
    text, _ = said(pipe, tokens(60, 1))
    configured(model)
    assert said(pipe, longer(text, 2))[1] == 0


def test_an_adapter_swapped_between_turns():
    """Each turn's text is that of its adapter."""
    model = adapted(random_llama(7)).get_base_model()
    places = [(layer.self_attn, "q_proj") for layer in model.model.layers]
    other = [Lora(getattr(module, name).base_layer, seed=5) for module, name in places]
    pipe, text = Pipeline(model, **PLAIN), tokens(60, 1)
    for turn in range(4):
        text, reused = said(pipe, longer(text, turn))
        assert reused == 0
        assert torch.equal(text, said(Pipeline(model, **PLAIN), text[:, :-8])[0])
        for i, (module, name) in enumerate(places):
            before = getattr(module, name)
            setattr(module, name, other[i])
            other[i] = before


def test_autocast_and_threads_count_where_bits_depend_on_them(target):
    pipe = Pipeline(target, **PLAIN, native=False)
    text, _ = said(pipe, tokens(60, 1))
    with torch.autocast("cpu", torch.bfloat16):
        assert said(pipe, longer(text, 2))[1] == 0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert said(pipe, longer(text, 3))[1] == 0
    finally:
        torch.set_num_threads(threads)
    assert said(pipe, longer(text, 4))[1] > 0


def test_the_callers_keys_and_values_serve_no_other_call(target):
    """They need not be those of the text."""
    pipe, prompt = Pipeline(target, **PLAIN), tokens(60, 1)
    cache = DynamicCache()
    with torch.no_grad():
        target(prompt[:, :50], past_key_values=cache)
    for layer in cache.layers:
        layer.values.mul_(3)
    wanted, _ = said(Pipeline(target, **PLAIN), prompt)
    assert said(pipe, prompt, past_key_values=cache)[1] == 50
    out, reused = said(pipe, prompt)
    assert reused == 0
    assert torch.equal(out, wanted)


FORMS = {"own modules": PLAIN | {"native": False}, "captured": PLAIN | {"graphs": True}, "captured, exact": PLAIN | {"graphs": True, "exact": True}}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", [through_data, one_row])
def test_values_that_leave_no_version(change, form):
    """They are seen at once where no form compares copies, however few they are."""
    model = random_llama(7, vocabulary=2000)
    pipe = Pipeline(model, **FORMS[form])
    said(pipe, tokens(60, 1))
    change(model)
    out, reused = said(pipe, tokens(60, 1))
    assert reused == 0
    assert torch.equal(out, said(Pipeline(copy.deepcopy(model), **FORMS[form]), tokens(60, 1))[0])
    assert said(pipe, tokens(60, 1))[1] > 0


@pytest.mark.parametrize("first", [8, 60])
def test_weights_that_come_back_do_not_vouch_for_a_text_between(first):
    """A short first call keeps no text, and close() keeps none either."""
    model, options = random_llama(7), PLAIN | {"native": False}
    pipe, prompt = Pipeline(model, **options), tokens(60, 1)
    said(pipe, prompt[:, :first], max_new_tokens=1)
    if first == 60:
        pipe.close()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    through_data(model)
    said(pipe, prompt)
    for parameter, values in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(values)
    out, reused = said(pipe, prompt)
    assert reused == 0
    assert torch.equal(out, said(Pipeline(random_llama(7), **options), prompt)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_sums_of_weights_on_other_devices(dtype, monkeypatch):
    """Each word counts, and so does its place."""
    monkeypatch.setattr(prefixes, "COLUMNS", 7)
    other, values = torch.ones(3), torch.arange(1, 251).to(dtype)

    def sums(tensor):
        return prefixes.sums_of([prefixes.words_of(other), prefixes.words_of(tensor)])

    before = sums(values)
    for i in (0, 17, 249):
        changed = values.clone()
        changed[i] += 8
        assert not torch.equal(sums(changed), before)
    swapped = values.clone()
    swapped[[0, 8]] = values[[8, 0]]
    assert not torch.equal(sums(swapped), before)
    assert torch.equal(sums(values.clone()), before)


def test_weights_on_other_devices_are_compared(monkeypatch):
    """By their sums, which are made where they are. The model stands for one on such a device."""
    model, token, watch = random_llama(7), object(), prefixes.WeightWatch()
    monkeypatch.setattr(
        prefixes, "Checksums", lambda tensors: SimpleNamespace(agree=lambda: True, rest_agrees=lambda: True)
    )
    monkeypatch.setattr(prefixes, "HOST", "another")
    first = watch.version(model, token)
    assert watch.version(model, token) is first
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1
    second = watch.version(model, token)
    assert second is not first
    assert watch.version(model, token) is second
    assert watch.version(model, object()) is not second


def test_settings_of_products_count_where_bits_depend_on_them(target):
    pipe, before = Pipeline(target, **PLAIN, native=False), torch.get_float32_matmul_precision()
    said(pipe, tokens(60, 1))
    try:
        torch.set_float32_matmul_precision("medium")
        assert said(pipe, tokens(60, 1))[1] == 0
        torch.backends.cuda.enable_math_sdp(False)
        assert said(pipe, tokens(60, 1))[1] == 0
    finally:
        torch.backends.cuda.enable_math_sdp(True)
        torch.set_float32_matmul_precision(before)
    said(pipe, tokens(60, 1))
    assert said(pipe, tokens(60, 1))[1] > 0


def test_kept_texts_keep_no_packed_weights(monkeypatch):
    """When weights are packed again, the memory of the old copy is free, and replaced weights are, too."""
    model, own = random_llama(7), native.NativeForm.__init__
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    def packed(form: Any, *args: Any, **options: Any) -> None:
        if options.get("watches", True):  # not a copy of a few layers, for a comparison
            gc.collect()
            counts.append(len(alive))
        own(form, *args, **options)
        alive.add(form)

    monkeypatch.setattr(native.NativeForm, "__init__", packed)
    pipe = Pipeline(model, **PLAIN)
    said(pipe, tokens(60, 1))
    old = weakref.ref(model.model.layers[1].self_attn.v_proj.weight)
    in_place(model)
    said(pipe, tokens(60, 1))
    replaced(model)
    said(pipe, tokens(60, 1))
    gc.collect()
    assert counts == [0, 0, 0]
    assert old() is None


# ---- the cache that a caller gets


def ends_early(model: Any, ids: torch.Tensor, new: int) -> int:
    """A token that ends the second row early and not the first one."""
    rows = model.generate(ids, max_new_tokens=new, do_sample=False)[:, ids.shape[1] :].tolist()
    return next(token for token in rows[1] if token not in rows[0])


@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"native": False}])
def test_a_full_cache_is_completed(options):
    """The longest row fills a cache that was taken over, and another one is to be fed."""
    model = random_llama(1)
    ids = torch.cat([torch.randint(3, 300, (1, 60), generator=torch.Generator().manual_seed(i)) for i in (1, 2)])
    pipe = Pipeline(model, **options)
    ids = pipe.generate(ids, max_new_tokens=40, do_sample=False)[:, :90]
    capacity = driver_of(pipe).target.cache.capacity
    new = capacity + 1 - ids.shape[1]
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": ends_early(model, ids, new)}
    out = pipe.generate(ids, **how, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(ids, **how))
    assert out.sequences.shape[1] == capacity + 1
    assert out.past_key_values.get_seq_length() == out.sequences.shape[1] - 1


def test_an_interrupted_completion_leaves_no_other_tokens(target, monkeypatch):
    """Cache and text agree at any place of it."""
    pipe = Pipeline(target, **PLAIN)
    text, _ = said(pipe, tokens(40, 1))
    stage = driver_of(pipe).target
    other = text[0].numpy().copy()
    other[41:] = 5

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(stage), "_roll_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage.complete([other[:-1]], [41])
    prompt = longer(torch.from_numpy(other)[None], 3)
    out, reused = said(pipe, prompt)
    assert reused == 41
    assert torch.equal(out, said(Pipeline(target, **PLAIN), prompt)[0])


def test_a_captured_draft_that_could_not_be_prepared(target, monkeypatch):
    """The next call names the cause, or goes on."""
    pipe = Pipeline(target, noisy(target, 0.02), **LOCKSTEP, graphs=True)
    text, _ = said(pipe, tokens(60, 1))
    own, (draft, _) = GraphedStage.prepare, driver_of(pipe).stages
    calls = []

    def prepare(stage: Any, inputs: Any) -> Any:
        if stage is draft:
            stage._current = None
            calls.append(0)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("no room")
        return own(stage, inputs)

    monkeypatch.setattr(GraphedStage, "prepare", prepare)
    prompt = longer(text, 2)
    out, _ = said(pipe, prompt)
    assert len(calls) == 2
    assert draft.reused == text.shape[1] - 1
    assert torch.equal(out, said(Pipeline(target, **PLAIN), prompt)[0])


def test_captured_stages_keep_the_dtype_of_their_cache():
    """Keys and values of other caches may have another one."""
    model = random_llama(7)
    model.config.kv_dtype = "bfloat16"
    options = PLAIN | {"graphs": True}
    pipe, fresh = Pipeline(model, **options), Pipeline(model, **options, prefix_cache=0)
    text, _ = said(pipe, tokens(60, 1))
    said(pipe, tokens(60, 2))
    assert {kept.cache.dtype for kept in store_of(pipe).texts} == {torch.float32}
    out, reused = said(pipe, longer(text, 3))
    assert reused > 0
    assert torch.equal(out, said(fresh, longer(text, 3))[0])
