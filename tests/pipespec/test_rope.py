"""Dynamic RoPE: the text is that of generate(), token by token, at every length.

``generate()`` runs on a copy of the model, since transformers may keep RoPE frequencies after a call.
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.generation import LogitsProcessor

from pipespec import Pipeline
from pipespec.engine.sampling import row_seeds
from pipespec.models.rope import DynamicRope, rope_changes_at
from pipespec.spd import SpeculativePipeline
from pipespec_kernels import reference
from pipespec_kernels.noise import TARGET
from tests.conftest import always_right, always_wrong, left_pad, noisy

LIMIT = 32
NEW = 24
KINDS = ("dynamic", "longrope", "phi3")
pytestmark = pytest.mark.filterwarnings("ignore:beyond 32 tokens.*the drafts rest:UserWarning")


@functools.cache
def model_of(kind: str):
    """An untrained model whose RoPE changes much beyond ``LIMIT``. Phi-3's generate() recomputes the text there."""
    common = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    scaled = {"short_factor": [1.0] * 8, "long_factor": [3.0 + i for i in range(8)]}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT, **scaled}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    torch.manual_seed(0)
    if kind == "phi3":
        model = Phi3ForCausalLM(
            Phi3Config(
                **common,
                max_position_embeddings=4 * LIMIT,
                original_max_position_embeddings=LIMIT,
                rope_parameters=longrope,
            )
        )
    else:
        at = LIMIT if kind == "dynamic" else 4 * LIMIT
        rope = dynamic if kind == "dynamic" else longrope
        model = LlamaForCausalLM(LlamaConfig(**common, max_position_embeddings=at, rope_parameters=rope))
    model.eval().generation_config.eos_token_id = None
    if kind == "phi3" and not DynamicRope.of(model).is_reproducible(in_chunks=False, padded=False):
        pytest.skip("this transformers feeds Phi-3 the newest token alone where its RoPE changes")
    return model


def prompt_of(length, seed=0):
    return torch.randint(8, 320, (1, length), generator=torch.Generator().manual_seed(100 * seed + length))


def wanted_of(model, ids, **options):
    return copy.deepcopy(model).generate(ids, **({"max_new_tokens": NEW, "do_sample": False} | options))


@functools.cache
def text_of(kind, length):
    return wanted_of(model_of(kind), prompt_of(length))


def check(pipe, kind, length):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "beyond", RuntimeWarning)  # no warning of another text
        got = pipe.generate(prompt_of(length), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(got, text_of(kind, length)), length


DRAFTS = {
    "none": lambda target: [],
    "right": lambda target: [always_right(target)],
    "wrong": lambda target: [always_wrong(target)],
    "chain": lambda target: [noisy(target, 0.2), noisy(target, 0.05, seed=1)],
}


@pytest.mark.parametrize("quality", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_from_both_sides_of_the_change(kind, quality):
    target = model_of(kind)
    pipe = Pipeline(target, DRAFTS[quality](target), schedule="lockstep")
    for length in (LIMIT - NEW + 3, LIMIT - 5, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 20):
        check(pipe, kind, length)


def test_the_rope_of_these_models_matters(monkeypatch):
    """The texts differ without the correction, so the tests of this file can fail."""
    for kind in KINDS:
        target = model_of(kind)
        with monkeypatch.context() as patch:
            patch.setattr(DynamicRope, "of", classmethod(lambda cls, model: None))
            pipe = Pipeline(copy.deepcopy(target), always_right(target), schedule="lockstep", lookahead=4)
            with pytest.warns(RuntimeWarning, match=r"beyond 32 tokens.*may differ"):
                texts = [pipe.generate(prompt_of(n), max_new_tokens=NEW, do_sample=False) for n in (LIMIT - 5, LIMIT)]
        wanted = [wanted_of(target, prompt_of(n)) for n in (LIMIT - 5, LIMIT)]
        assert not all(torch.equal(a, b) for a, b in zip(texts, wanted, strict=True)), kind


@pytest.mark.parametrize("kind", ["dynamic", "phi3"])
def test_workers(kind):
    target = model_of(kind)
    with Pipeline(target, always_right(target), schedule="workers", lookahead=4, min_draft_tokens=2) as pipe:
        for length in (LIMIT - 9, LIMIT + 3, 5, LIMIT, LIMIT - 8):
            check(pipe, kind, length)
            check_rest(pipe, max(0, LIMIT - length), 4)


def check_rest(pipe, of_use, lookahead):
    """The draft fed no more than the useful tokens and one lookahead, which was open when the target reached the limit."""
    draft, target = pipe.report.stages
    assert draft.fed <= of_use + 2 * lookahead
    assert target.drafted <= of_use


class Noise(LogitsProcessor):
    """Coupled sampling as a processor: generate() then draws greedily what a seed draws here."""

    def __init__(self, seed):
        self.keys = row_seeds(seed, 1)

    def __call__(self, input_ids, scores):
        draws = reference.philox_draw(self.keys[0], input_ids.shape[1], TARGET, torch.arange(scores.shape[1]))
        return scores + reference.gumbel(draws)[None]


@pytest.mark.parametrize("kind", KINDS)
def test_sampled(kind):
    target = model_of(kind)
    pipe = Pipeline(target, noisy(target, 0.02), schedule="lockstep")
    for length in (LIMIT - 5, LIMIT + 7):
        ids = prompt_of(length)
        got = pipe.generate(ids, max_new_tokens=NEW, do_sample=True, top_k=0, seed=5)
        assert torch.equal(got, wanted_of(target, ids, logits_processor=[Noise(5)]))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_long_text_is_left(kind):
    """A longer text has no effect on the next text of the pipeline or of the model itself."""
    target = copy.deepcopy(model_of(kind))
    new = copy.deepcopy(target)
    target.generate(prompt_of(3 * LIMIT), max_new_tokens=2, do_sample=False)
    pipe = Pipeline(target, always_right(target), schedule="lockstep")
    for length in (LIMIT + 20, LIMIT - 5, LIMIT, 5):
        ids = prompt_of(length)
        wanted = wanted_of(new, ids)
        assert torch.equal(pipe.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)
        assert torch.equal(copy.deepcopy(target).generate(ids, max_new_tokens=NEW, do_sample=False), wanted)
    assert "forward" not in target.model.rotary_emb.__dict__


def test_a_failing_forward_leaves_nothing_either(monkeypatch):
    target = copy.deepcopy(model_of("dynamic"))
    pipe = Pipeline(target)
    wanted = wanted_of(target, prompt_of(LIMIT))

    def fail(hidden):
        raise RuntimeError("no more")

    monkeypatch.setattr(target.model.norm, "forward", fail)
    with pytest.raises(RuntimeError, match="no more"):
        pipe.generate(prompt_of(LIMIT + 20), max_new_tokens=NEW, do_sample=False)
    monkeypatch.undo()
    assert "forward" not in target.model.rotary_emb.__dict__
    assert torch.equal(target.generate(prompt_of(LIMIT), max_new_tokens=NEW, do_sample=False), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(18, 9, 8), (20, 30, 10), (LIMIT - 3, 6, 9), (LIMIT + 3, 6, 4)])
def test_a_conversation(kind, lengths):
    """A continued cache holds keys of several calls, and earlier keys do not change."""
    target = model_of(kind)
    first, new, more = lengths
    pipe = Pipeline(target, noisy(target, 0.02), schedule="lockstep")
    other = copy.deepcopy(target)
    options = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": new}
    ids = prompt_of(first)
    got, wanted = pipe.generate(ids, **options), other.generate(ids, **options)
    for turn in range(2):
        assert torch.equal(got.sequences, wanted.sequences)
        ids = torch.cat([got.sequences, prompt_of(more, seed=turn + 1)], dim=1)
        got = pipe.generate(ids, past_key_values=got.past_key_values, **options)
        wanted = other.generate(ids, past_key_values=wanted.past_key_values, **options)
    assert torch.equal(got.sequences, wanted.sequences)


def test_a_cache_of_transformers_own():
    target = model_of("dynamic")
    ids, caches = prompt_of(LIMIT + 10), []
    for _ in range(2):
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            copy.deepcopy(target)(ids[:, : LIMIT + 4], past_key_values=cache)
        caches.append(cache)
    got = Pipeline(target, always_right(target), schedule="lockstep").generate(
        ids, past_key_values=caches[0], max_new_tokens=NEW, do_sample=False
    )
    assert torch.equal(got, wanted_of(target, ids, past_key_values=caches[1]))


def batch_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, mask = left_pad([torch.randint(8, 320, (n,), generator=generator) for n in lengths])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "lengths",
    [(20, 9, 27), (LIMIT, LIMIT - 1, 3), (LIMIT + 9, 12), (25, 25)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_batches(kind, lengths):
    """Rows that are ahead wait where the RoPE changes. The longest row decides, even after its end."""
    target = model_of(kind)
    inputs = batch_of(lengths)
    pipe = Pipeline(target, noisy(target, 0.05), schedule="lockstep")
    wanted = wanted_of(target, **inputs_of(inputs))
    assert torch.equal(pipe.generate(**inputs, max_new_tokens=NEW, do_sample=False), wanted)
    longest = max(range(len(lengths)), key=lambda row: lengths[row])
    width = inputs["input_ids"].shape[1]
    for at in (2, NEW // 2):  # the longest row ends before or after the change
        options = {"eos_token_id": int(wanted[longest, width + at]), "pad_token_id": 0}
        got = pipe.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)
        assert torch.equal(got, wanted_of(target, **inputs_of(inputs), **options))


def inputs_of(inputs):
    return {"ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_prompt_fed_in_chunks(kind):
    """generate() has another RoPE in each chunk."""
    target = model_of(kind)
    pipe = Pipeline(target, always_right(target), schedule="lockstep")
    inputs = batch_of((LIMIT + 20, LIMIT + 2, 5))
    padded = {name: torch.nn.functional.pad(value, (4, 0)) for name, value in inputs.items()}
    whole = [(batch_of((LIMIT + 20,)), chunk) for chunk in (7, 13, LIMIT)]
    for given, chunk in [*whole, (inputs, 9), (padded, 9)]:
        options = {"prefill_chunk_size": chunk, "max_new_tokens": NEW, "do_sample": False}
        cache = DynamicCache(config=target.config)  # 5.0 requires a cache
        wanted = wanted_of(target, **inputs_of(given), past_key_values=cache, **options)
        assert torch.equal(pipe.generate(**given, **options), wanted)


def test_a_long_prompt_is_fed_piecewise_with_the_rope_of_the_whole(monkeypatch):
    monkeypatch.setattr("pipespec.api.prepare.PREFILL_CHUNK", 11)
    for kind in KINDS:
        check(Pipeline(model_of(kind)), kind, LIMIT + 20)


def test_the_drafts_rest_behind_the_change():
    target = model_of("longrope")
    pipe = Pipeline(target, always_right(target), lookahead=4, schedule="lockstep")
    pipe.generate(prompt_of(LIMIT - 8), max_new_tokens=64, do_sample=False)
    check_rest(pipe, 8, 4)
    assert pipe.report.stages[-1].accepted >= 4


def test_warnings():
    """One warning that drafts rest. A warning that the text may differ comes only if it can."""
    target = model_of("longrope")
    pipe = Pipeline(target, always_right(target), schedule="lockstep", lookahead=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.generate(prompt_of(LIMIT - 8), max_new_tokens=8, do_sample=False)
        Pipeline(target).generate(prompt_of(LIMIT - 8), max_new_tokens=9, do_sample=False)
    with pytest.warns(UserWarning, match=r"beyond 32 tokens.*the drafts rest") as caught:
        pipe.generate(prompt_of(LIMIT - 8), max_new_tokens=9, do_sample=False)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.generate(prompt_of(LIMIT - 8), max_new_tokens=9, do_sample=False)
    with pytest.warns(RuntimeWarning, match=r"beyond 32 tokens.*\(longrope\).*may differ") as caught:
        SpeculativePipeline(target, stages=2).generate(prompt_of(LIMIT - 8), max_new_tokens=9, do_sample=False)
    assert caught[0].filename == __file__


def test_phi3_where_it_cannot_be_followed():
    target = model_of("phi3")
    pipe = Pipeline(target)
    with pytest.warns(RuntimeWarning, match="may differ"):
        pipe.generate(prompt_of(LIMIT + 9), max_new_tokens=4, do_sample=False, prefill_chunk_size=8)
    padded = {name: torch.nn.functional.pad(value, (4, 0)) for name, value in batch_of((20, 9)).items()}
    with pytest.warns(RuntimeWarning, match="may differ"):
        pipe.generate(**padded, max_new_tokens=NEW, do_sample=False)


def test_rope_computed_outside_of_transformers():
    target = copy.deepcopy(model_of("longrope"))
    del target.model.rotary_emb.rope_type
    assert rope_changes_at(target) == LIMIT
    assert DynamicRope.of(target) is None


@pytest.mark.parametrize("length", [4, LIMIT - NEW // 2])
def test_threads_that_share_a_model(length):
    """Below the limit, pipelines and the user share a model without effect on each other. Beyond it pipelines take turns."""
    target = model_of("longrope")
    pipes = [Pipeline(target, noisy(target, 0.05, seed=i), schedule="lockstep") for i in range(2)]
    errors = []

    def repeat(generate, wanted):
        try:
            for _ in range(6):
                assert torch.equal(generate(prompt_of(length), max_new_tokens=NEW, do_sample=False), wanted)
        except BaseException as error:
            errors.append(error)

    calls = [pipe.generate for pipe in pipes]
    if length + NEW <= LIMIT:
        calls.append(target.generate)
    threads = [threading.Thread(target=repeat, args=(call, text_of("longrope", length))) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
