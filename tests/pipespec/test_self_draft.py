"""A draft out of the target's first layers in the target's cache: the text, keys and values are those of plain decoding at every rollback."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from pipespec import Pipeline
from pipespec.api.base import check_memory
from pipespec.config import SpeculationConfig
from pipespec.drivers import lockstep
from pipespec.drivers.base import GenerationRequest
from pipespec.drivers.lockstep import LockstepDriver
from pipespec.engine import inputs as inputs_module
from pipespec.engine.cache import RowCache
from pipespec.engine.first_layers import FirstLayers
from pipespec.engine.forward import _choices, forward, native_form_of
from pipespec.engine.inputs import StageInputs
from pipespec.engine.native import NativeForm
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.self_draft import SharedLayers, shared_layers
from pipespec.models.derived import first_layers_of, in_int8, with_layers, with_vocabulary
from pipespec.preflight.memory import StageFacts, estimate
from pipespec_kernels.decoder import NativeDecoder
from pipespec_kernels.state import Action
from tests.conftest import left_pad, random_llama, random_prompts
from tests.pipespec.tiny_models import make
from tests.trials import trials

NEW = 24
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.9, "top_k": 0}
SHARED = "draft 0 shares the target's packed weights, keys, values and hidden states"
SHARED_CACHE = "draft 0 shares the target's keys and values"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A target whose last two layers add little, so that its first two often choose its tokens."""
    target = random_llama(3, layers=4)
    with torch.no_grad():
        for layer in target.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    return target


@pytest.fixture
def own_cache(monkeypatch):
    """Makes a pipeline whose draft has a cache of its own."""

    def make_pipeline(*args, **options) -> Pipeline:
        with monkeypatch.context() as patch:
            patch.setattr(lockstep, "shared_layers", lambda *_: None)
            return Pipeline(*args, **options)

    return make_pipeline


def generate(pipe: Pipeline, rows: int, prompts: int = 8, **kwargs):
    ids, mask = left_pad(random_prompts(rows, seed=prompts, shortest=2))
    kwargs = {"max_new_tokens": NEW, "pad_token_id": 0, "return_dict_in_generate": True} | kwargs
    return pipe.generate(ids, attention_mask=mask, **kwargs)


def same_cache(one: RowCache, other: RowCache, *, exact: bool) -> None:
    """What the rows hold, up to the length of each."""
    assert one.lengths == other.lengths
    for pair, expected in zip(one.states(), other.states(), strict=True):
        for got, wanted in zip(pair, expected, strict=True):
            for row, length in enumerate(one.lengths):
                a, b = got[row, :, :length], wanted[row, :, :length]
                assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("kwargs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("native", [True, False])
def test_text_keys_and_values_are_those_of_plain_decoding(model, own_cache, native, rows, kwargs):
    depths: Counter[int] = Counter()
    with (
        Pipeline(model, schedule="plain", native=native) as plain,
        Pipeline(model, "self:2", schedule="lockstep", lookahead=4, native=native) as pipe,
        own_cache(model, "self:2", schedule="lockstep", lookahead=4, native=native) as other,
    ):
        for seed in range(trials(ci=4, nightly=40)):
            wanted = generate(plain, rows, seed, **kwargs)
            got = generate(pipe, rows, seed, **kwargs)
            assert torch.equal(got.sequences, wanted.sequences)
            same_cache(got.past_key_values, wanted.past_key_values, exact=native)
            draft, target = pipe.report.stages
            depths += Counter({depth: count for depth, count in enumerate(target.histogram) if count})
            assert (SHARED if native else SHARED_CACHE) in pipe.report.decisions
            # The drafts are those of a cache of its own, without the tokens that the target has fed already.
            generate(other, rows, seed, **kwargs)
            before, after = other.report.stages
            assert (target.drafted, target.histogram) == (after.drafted, after.histogram)
            assert draft.produced == before.produced
            assert draft.fed < before.fed if 4 in depths else draft.fed <= before.fed
    assert set(depths) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kwargs", [{}, {"frequency_penalty": -0.5}])
def test_the_draft_feeds_each_token_once_and_no_prompt(model, kwargs):
    target = copy.deepcopy(model)
    with torch.no_grad():
        for layer in target.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    with Pipeline(target, "self:2", schedule="lockstep", lookahead=3, trace=64) as pipe:
        generate(pipe, 1, prompts=1, **GREEDY, **kwargs)
        draft, last = pipe.report.stages
        assert last.acceptance_rate == 1.0
        assert draft.fed == draft.produced == 3 * NEW // 4
        traced = pipe.report.trace
        assert traced["target"]["prefill"].any()
        assert not traced["draft 0"]["prefill"].any()
        # No second packed copy, no view of the cache between calls.
        assert pipe.models[0] not in _choices
        assert pipe._driver.stages[0]._cache is None


def test_a_verification_continues_behind_the_shared_layers(model, monkeypatch):
    ran: list[tuple[int, int, int]] = []
    own = NativeDecoder.run_layers

    def run_layers(self, hidden, *args, begin=0, end=None, **kwargs):
        ran.append((begin, self.num_layers if end is None else end, hidden.shape[1]))
        return own(self, hidden, *args, begin=begin, end=end, **kwargs)

    with Pipeline(model, "self:2", schedule="lockstep", lookahead=4) as pipe:
        generate(pipe, 1)
        monkeypatch.setattr(NativeDecoder, "run_layers", run_layers)
        generate(pipe, 1)
    # A round: four drafts of one column, one column that the draft has not fed, and five through the rest.
    assert ran[:6] == [*[(0, 2, 1)] * 5, (2, 4, 5)]
    assert {run for run in ran if run[0] == 2} <= {(2, 4, n) for n in range(1, 6)}


@pytest.mark.parametrize(
    ("native", "options"),
    [
        *((native, {"drafts": ["ngram", "self:2"]}) for native in (True, False)),
        *((native, {"drafts": ["self:1", "self:3"], "lookahead": (2, 4)}) for native in (True, False)),
        *((native, {"drafts": "self:2", "draft_vocabulary": 200}) for native in (True, False)),
        *((native, {"drafts": "self:2", "confidence": True}) for native in (True, False)),
        (True, {"drafts": ["self:1", "self:3"], "confidence": True}),
        (True, {"drafts": "self:2", "exact": True}),
        (True, {"drafts": "self:2", "lookahead": 70}),
    ],
)
def test_chains_and_options(model, own_cache, native, options):
    chain = {"schedule": "lockstep", "lookahead": 4, "native": native, **options}
    with Pipeline(model, **chain) as pipe, own_cache(model, **chain) as other:
        wants = {"max_new_tokens": 90 if options.get("lookahead") == 70 else NEW}
        for kwargs in (GREEDY, SAMPLED | {"repetition_penalty": 1.3}):
            wanted = generate(other, 3, **kwargs, **wants)
            got = generate(pipe, 3, **kwargs, **wants)
            assert torch.equal(got.sequences, wanted.sequences)
            same_cache(got.past_key_values, wanted.past_key_values, exact=native)
            assert "shares the target's" in str(pipe.report)
            assert "shares the target's" not in str(other.report)
            if not options.get("confidence"):  # which goes by measured times
                assert pipe.report.acceptance_histogram == other.report.acceptance_histogram


def test_rejection_sampling(model, own_cache):
    with (
        Pipeline(model, "self:2", acceptance="rejection") as pipe,
        own_cache(model, "self:2", acceptance="rejection") as other,
    ):
        for seed in range(3):
            got, wanted = (generate(p, 3, **SAMPLED | {"seed": seed}) for p in (pipe, other))
            assert torch.equal(got.sequences, wanted.sequences)
        assert SHARED in pipe.report.decisions


class EndsWith(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs) -> torch.Tensor:
        return ids[:, -1] % 7 == 0


def test_nothing_is_held_between_calls(model):
    """Neither the target's packed weights nor hidden states; and no cycle keeps the target's cache after the pipeline."""
    pipe = Pipeline(model, with_layers(model, 2), schedule="lockstep")
    pipe.generate(random_prompts(1, seed=8)[0][None], max_new_tokens=NEW)
    assert SHARED in pipe.report.decisions
    stage = next(s for s in pipe._driver._stages if hasattr(s, "shares"))
    assert (stage._shared.form, stage._shared._states.numel()) == (None, 0)
    cache = weakref.ref(pipe._driver.target._cache)
    assert cache() is not None
    gc.disable()
    try:
        pipe.close()
        del pipe, stage
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("native", [True, False])
def test_rows_that_end_and_calls_that_continue(model, native):
    """A row that has ended takes part in the drafts' forwards, and its cache is continued afterwards."""
    stops = {"eos_token_id": list(range(2, 40)), "stopping_criteria": StoppingCriteriaList([EndsWith()])}
    with (
        Pipeline(model, schedule="plain", native=native) as plain,
        Pipeline(model, "self:2", schedule="lockstep", lookahead=5, native=native) as pipe,
    ):
        for seed in range(trials(ci=6, nightly=60)):
            wanted, got = (generate(p, 3, seed, **SAMPLED | stops) for p in (plain, pipe))
            assert torch.equal(got.sequences, wanted.sequences)
            same_cache(got.past_key_values, wanted.past_key_values, exact=native)
        for kwargs in (GREEDY, SAMPLED):
            prompt = random_prompts(1, seed=4, shortest=6)[0][None]
            text, cache = prompt, None
            for turn in range(3):
                out = pipe.generate(
                    text, max_new_tokens=7 + turn, past_key_values=cache, return_dict_in_generate=True, **kwargs
                )
                cache = out.past_key_values
                expected = plain.generate(text, max_new_tokens=7 + turn, **kwargs)
                assert torch.equal(out.sequences, expected)
                text = torch.cat((out.sequences, prompt[:, : 2 + turn]), 1)


def test_an_interrupted_call_leaves_nothing_behind(model):
    """What the draft wrote before an error is neither kept nor continued."""

    class Stops(StoppingCriteria):
        left = 3

        def __call__(self, ids, scores, **kwargs) -> torch.Tensor:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return torch.zeros(len(ids), dtype=torch.bool)

    with (
        Pipeline(model, schedule="plain") as plain,
        Pipeline(model, "self:2", schedule="lockstep", lookahead=6) as pipe,
    ):
        prompt = random_prompts(1, seed=9, shortest=8)[0][None]
        begun = plain.generate(prompt, max_new_tokens=2, return_dict_in_generate=True)
        for at in range(1, 5):
            stops = Stops()
            stops.left = at
            cache = copy.deepcopy(begun.past_key_values)
            with pytest.raises(KeyboardInterrupt):
                pipe.generate(
                    begun.sequences, max_new_tokens=NEW, past_key_values=cache, stopping_criteria=[stops], **SAMPLED
                )
            same_cache(cache, begun.past_key_values, exact=True)
            wanted = generate(plain, 2, at, **SAMPLED)
            got = generate(pipe, 2, at, **SAMPLED)
            assert torch.equal(got.sequences, wanted.sequences)
            same_cache(got.past_key_values, wanted.past_key_values, exact=True)


def test_a_text_is_not_continued_from_what_the_draft_has_overwritten(model):
    """Behind the target's last step, its first layers have keys of the draft's tokens and the others those of the rejected ones."""
    driver = LockstepDriver([with_layers(model, 2), model], SpeculationConfig(lookahead=(4,)))
    target, first = driver.target, random_prompts(1, seed=3, shortest=9)[0].numpy().astype(np.int32)

    def begin(text: np.ndarray) -> None:
        inputs = StageInputs([text], [len(text) + NEW], SamplingParams(), model.config.vocab_size, reuse=True)
        driver.begin(GenerationRequest(inputs, ()))

    rejected = 0
    begin(first)
    for _ in range(6):
        driver.advance()
        held = target._held[0]
        rejected += held - driver.block.kv(driver.block.target, 0)
        while lockstep.advance(driver, 0) == Action.STEP:
            pass
        begin(np.append(target._text[0, :held], np.int32(7)))
        expected = RowCache.for_model(model, 1, 64)
        with torch.inference_mode():
            forward(model, torch.from_numpy(target._text[:1, :held]), expected, keep=0)
        same_cache(target._cache, expected, exact=True)
    assert rejected > 0


def test_a_draft_that_fails_in_a_round(model, monkeypatch):
    """The target continues behind what a failed draft has left in its cache."""
    own, calls = NativeForm.run_first, iter(range(1000))

    def run_first(self, tokens, cache):
        hidden = own(self, tokens, cache)
        if next(calls) == 6:
            raise RuntimeError("planted")
        return hidden

    monkeypatch.setattr(NativeForm, "run_first", run_first)
    with (
        Pipeline(model, schedule="plain") as plain,
        Pipeline(model, "self:2", schedule="lockstep", lookahead=4) as pipe,
    ):
        wanted = generate(plain, 2)
        with pytest.warns(RuntimeWarning, match="planted"):
            got = generate(pipe, 2)
        assert torch.equal(got.sequences, wanted.sequences)
        same_cache(got.past_key_values, wanted.past_key_values, exact=True)
        assert torch.equal(generate(pipe, 2).sequences, wanted.sequences)


@pytest.mark.parametrize("native", [True, False])
def test_a_cache_that_grows_within_a_round(model, monkeypatch, native):
    """The draft or the target makes it grow: what the draft has written moves, too."""
    monkeypatch.setattr(inputs_module, "INITIAL_CAPACITY", 1 - inputs_module.WIDTH)
    with (
        Pipeline(model, schedule="plain", native=native) as plain,
        Pipeline(model, "self:2", schedule="lockstep", lookahead=7, native=native) as pipe,
    ):
        for rows in (1, 2):
            wanted, got = (generate(p, rows, max_new_tokens=70) for p in (plain, pipe))
            assert torch.equal(got.sequences, wanted.sequences)
            same_cache(got.past_key_values, wanted.past_key_values, exact=native)


def test_changed_weights_are_noticed(model):
    """Also where a prompt of one token has no prefill."""
    target = copy.deepcopy(model)
    prompt = torch.tensor([[17]])
    with Pipeline(target, "self:2", schedule="lockstep") as pipe:
        for scale in (1.0, 0.5, 1.5):
            with torch.no_grad():
                target.model.layers[0].mlp.down_proj.weight.mul_(scale)
            wanted = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
            assert torch.equal(pipe.generate(prompt, max_new_tokens=NEW, do_sample=False), wanted)
            assert SHARED in pipe.report.decisions


# ---- which drafts


def test_drafts_that_share(model):
    draft = with_layers(model, 3)
    assert first_layers_of(draft, model) == shared_layers(draft, model) == 3
    assert first_layers_of(with_layers(draft, 1), model) == 1
    assert first_layers_of(with_vocabulary(draft, range(9)), model) == 3
    for other in (
        with_layers(model, [0, 2]), in_int8(draft), with_layers(copy.deepcopy(model), 3), model, random_llama(3, layers=3),
    ):  # fmt: skip
        assert first_layers_of(other, model) is None
    head_of_its_own = with_layers(model, 2)
    head_of_its_own.lm_head = copy.deepcopy(model.lm_head)
    assert first_layers_of(head_of_its_own, model) == 2
    recurrent = make("qwen3_next, recurrent")
    assert first_layers_of(with_layers(recurrent, 2), recurrent) == 2
    assert shared_layers(with_layers(recurrent, 2), recurrent) is None


@pytest.mark.parametrize(
    "family",
    ["gemma", "gemma2, mixed, caps", "mistral, window", "phi3, window", "deepseek_v3, latents", "smollm3, mixed"],
)
def test_families(family):
    target = make(family)
    with Pipeline(target, "self:2", schedule="lockstep") as pipe:
        ids, mask = left_pad([torch.arange(2, 30), torch.arange(3, 12)])
        wants = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(pipe.generate(ids, **wants), target.generate(ids, **wants))
        assert "draft 0 shares the target's" in str(pipe.report)


def test_one_draft_of_a_chain_shares(model):
    with Pipeline(model, ["self:1", "self:3", "self:0,3"], schedule="lockstep") as pipe:
        assert pipe._driver.in_targets_cache == [pipe.models[1]]
    with Pipeline(model, "self:2", schedule="streams") as pipe:
        generate(pipe, 2)
        assert not pipe._driver.in_targets_cache
        assert "shares the target's" not in str(pipe.report)


# ---- memory


def test_memory_of_a_shared_cache_counts_once(model, monkeypatch):
    draft = with_layers(model, 2)
    for has_cache, layers in ((True, 2), (False, 0)):
        facts = StageFacts.of_model("draft 0", draft, has_cache=has_cache)
        (need,) = estimate([facts], 3, 100).needs
        assert need.caches == layers * RowCache.bytes_for(model.config, 3, 100, torch.float32) // 4
    given = []
    monkeypatch.setattr(
        "pipespec.api.base.check_memory",
        lambda models, call, *more: given.append(call) or check_memory(models, call, *more),
    )
    with Pipeline(model, ["ngram", "self:2"], schedule="lockstep") as pipe:
        generate(pipe, 2)
        assert given[0].in_targets_cache == ["draft 0"]


# ---- what is kept


def test_states_are_kept_for_the_very_tokens_at_their_positions(model):
    shared = SharedLayers(2)
    shared.begin(2, native_form_of(model, RowCache.for_model(model, 2, 32)))
    states = torch.arange(2 * 4 * 64, dtype=torch.float32).view(2, 4, 64)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]], dtype=torch.int32)

    def kept(fed, counts, lengths) -> torch.Tensor | None:
        return shared.kept(torch.tensor(fed, dtype=torch.int32), np.array(counts), lengths)

    def feed() -> None:
        shared.drop()
        shared.overwrite([20, 30])
        shared.keep(tokens, np.array([4, 2]), states)

    feed()
    assert torch.equal(kept([[5, 6, 7, 8], [9, 10, 11, 12]], [4, 4], [20, 30]), states[:, :2])
    assert torch.equal(kept([[5, 6, 7, 8], [0, 0, 0, 0]], [4, 0], [20, 30])[:1], states[:1])
    assert torch.equal(kept([[5, 6, 1, 8], [0, 0, 0, 0]], [4, 0], [20, 30])[:1], states[:1, :2])
    assert torch.equal(kept([[5, 6, 7, 8], [9, 1, 0, 0]], [4, 2], [20, 30]), states[:, :1])
    for fed, counts, lengths in (
        ([[1, 6], [9, 10]], [2, 2], [20, 30]),
        ([[5, 6], [9, 10]], [2, 2], [21, 30]),
        ([[5, 6], [9, 10]], [2, 2], [20, 29]),
    ):
        assert kept(fed, counts, lengths) is None
    # The draft's next forward writes from these positions on, in rows that feed nothing, too.
    shared.overwrite([23, 31])
    shared.keep(tokens, np.array([1, 0]), states)
    assert torch.equal(
        kept([[5, 6, 7, 5], [0, 0, 0, 0]], [4, 0], [20, 30])[0], torch.cat((states[0, :3], states[0, :1]))
    )
    assert kept([[5, 6, 7, 8], [9, 10, 0, 0]], [4, 2], [20, 30]).shape[1] == 1
    feed()
    shared.overwrite([19, 33])
    shared.keep(tokens, np.array([2, 2]), states)
    assert kept([[5, 6], [9, 10]], [2, 2], [20, 30]) is None
    assert kept([[5, 6], [9, 10]], [2, 2], [19, 33]).shape[1] == 2
    feed()
    shared.drop()
    assert kept([[5, 6], [9, 10]], [2, 2], [20, 30]) is None


# ---- the view


def test_a_view_of_first_layers(model):
    whole = RowCache.for_model(model, 2, 8)
    draft = with_layers(model, 2)
    tokens = torch.arange(12).view(2, 6) + 5
    with torch.inference_mode():
        forward(model, tokens, whole, keep=0)
        view = FirstLayers(whole, draft.config)
        assert (view.nbytes, view.capacity, view.lengths) == (0, 8, (0, 0))
        view.set_lengths([4, 2])
        before = [x.clone() for pair in whole.states() for x in pair]
        logits = forward(draft, tokens[:, :2], view, keep=2)
        own = RowCache.for_model(draft, 2, 8)
        forward(draft, tokens, own, keep=0)
        own.truncate([4, 2])
        assert torch.equal(logits, forward(draft, tokens[:, :2], own, keep=2))
        assert view.lengths == (6, 4)
        assert whole.lengths == (6, 6)
        after = [x for pair in whole.states() for x in pair]
        for i, (a, b) in enumerate(zip(after, before, strict=True)):
            is_shared = i < 4  # keys and values of two layers
            assert torch.equal(a, b) != is_shared
            for row, (begin, end) in enumerate(((4, 6), (2, 4))):
                assert torch.equal(a[row, :, :begin], b[row, :, :begin])
                assert torch.equal(a[row, :, end:], b[row, :, end:])
        # Growth moves what each of them holds.
        whole.truncate([1, 1])
        held = [x.clone() for pair in view.states() for x in pair]
        whole.reserve(32)
        assert view.capacity == whole.capacity == 32
        assert all(torch.equal(a, b) for a, b in zip((x for pair in view.states() for x in pair), held, strict=True))
        view.reserve(64)
        assert whole.capacity == 64
        assert view.states()[0][0].data_ptr() == whole.states()[0][0].data_ptr()
