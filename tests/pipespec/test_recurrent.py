"""Recurrent layers: a state per column, so that a rollback of any depth chooses one. Texts of whole pipelines are in ``test_families.py``."""

from typing import Any

import pytest
import torch

from pipespec import Pipeline, SpeedWarning
from pipespec.checks.models import check_runnable, check_streams
from pipespec.engine import recurrent
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import forward
from pipespec.errors import NotCapturable
from pipespec.models.compat import recurrent_layer
from pipespec.models.layout import STATES, CacheLayout
from pipespec_spd import SpeculativePipeline
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
from tests.conftest import left_pad, noisy
from tests.pipespec.tiny_models import TINY_MODELS, VOCABULARY, make, model_of
from tests.support.caches import copied, same_content
from tests.support.texts import own_text, same_text
from tests.trials import PROFILE

NAMES = [name for name in TINY_MODELS if name in ("qwen3_next, recurrent", "qwen3_5, recurrent")]
EVERY = [*NAMES, *(["lfm2, recurrent"] if "lfm2, recurrent" in TINY_MODELS else [])]
ONE = "qwen3_next, recurrent"
FILLED = pytest.mark.skipif(
    recurrent_layer is None,
    reason="this version of transformers has a cache of its own for recurrent layers, which no pipeline fills",
)


def text(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def fed(name: str, tokens: torch.Tensor, cache: RowCache, native: bool = True) -> torch.Tensor:
    return forward(model_of(name), tokens, cache, keep=tokens.shape[1], native=native)


# ---- a forward


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_logits_are_the_models(name, native):
    """Prefill, blocks and single tokens, rows of different lengths: as each row in one piece by the model itself."""
    tokens = text(2, 40)
    with torch.inference_mode():
        whole = model_of(name)(tokens).logits
    cache = RowCache.for_model(model_of(name), 2, 64)
    cache.aim([30, 9])
    fed(name, tokens[:, :30], cache, native)
    cache.truncate([30, 9])
    assert cache.nbytes == CacheLayout.of(model_of(name).config).bytes_for(2, 64, torch.float32)
    for columns in (1, 5, 3):
        at = cache.lengths
        got = fed(name, torch.stack([tokens[row, n : n + columns] for row, n in enumerate(at)]), cache, native)
        wanted = torch.stack([whole[row, n : n + columns] for row, n in enumerate(at)])
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_steps_have_the_bits_of_plain_decoding(name):
    """The state after a column is that of transformers' decoding step, bit for bit."""
    own = model_of(name).model.layers[0].linear_attn
    source = __import__(type(own).__module__, fromlist=["x"])
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn((2, 5, 4, 8), generator=generator) for _ in range(3))
    decay, beta = -torch.rand((2, 5, 4), generator=generator), torch.rand((2, 5, 4), generator=generator)
    state = torch.randn((2, 4, 8, 8), generator=generator)
    steps, ours = recurrent._Steps(query, key, value, decay, beta), state
    for i in range(5):
        column = slice(i, i + 1)
        out, state = source.torch_recurrent_gated_delta_rule(
            query[:, column], key[:, column], value[:, column], g=decay[:, column], beta=beta[:, column],
            initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        ours, mine = steps(ours, i)
        assert torch.equal(ours, state)
        # Versions scale the queries by a product or by a quotient.
        torch.testing.assert_close(mine, out[:, 0], rtol=1e-6, atol=1e-6)


# ---- rollback


def test_rollbacks_beyond_the_states():
    """Overwritten states are named, and the cache has room for more after that. A prefill keeps those at the end of each row."""
    name = ONE
    cache = RowCache.for_model(model_of(name), 2, 96)
    cache.aim([20, 4])
    fed(name, text(2, 20), cache)
    cache.truncate([20, 4])
    assert cache.restorable([20, 4]) == [20, 4]
    assert cache.restorable([19, 3]) == [0, 0]
    with pytest.raises(
        ValueError, match="row 0 has no recurrent states, or not all of its windows, at 19 tokens: truncate it to 0"
    ):
        cache.truncate([19, 4])
    assert cache.lengths == (20, 4)
    for at in range(STATES):
        fed(name, text(2, 1, seed=at), cache)
    assert cache.restorable([20, 4]) == [0, 0]
    assert cache.restorable([21, 5]) == [21, 5]
    before = cache.nbytes
    cache.reserve_states()
    assert cache.nbytes > before
    assert cache.restorable([21, 5]) == [21, 5]
    cache.truncate([21, 5])
    # A step wider than the states makes room for all of its columns.
    fed(name, text(2, 3 * STATES), cache)
    assert cache.restorable([22, 6]) == [22, 6]


def test_recomputation_gives_the_same_text(monkeypatch):
    """Drafts that run further ahead than there are states recompute, and then have more."""
    grown = []
    reserve = recurrent.StateRing.reserve

    def watched(ring: Any, slots: int) -> None:
        grown.append(slots > ring.slots)
        reserve(ring, slots)

    monkeypatch.setattr(recurrent, "STATES", 2)
    monkeypatch.setattr(recurrent.StateRing, "reserve", watched)
    target = make(ONE)
    ids, mask = left_pad([text(1, 10)[0], text(1, 3, seed=1)[0]])
    pipe = Pipeline(target, noisy(target, 0.05), schedule="lockstep", lookahead=7)
    same_text(pipe, ids, attention_mask=mask, max_new_tokens=16)
    assert any(grown)
    assert pipe.report.stages[0].rollbacks > 0


def test_an_interrupted_forward_leaves_the_states(monkeypatch):
    """Its slots count for nothing, and what was there before is still right."""
    name = ONE
    cache = RowCache.for_model(model_of(name), 1, 64)
    fed(name, text(1, 6), cache, native=False)
    wanted = fed(name, text(1, 2, seed=1), copied(cache), native=False)

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    head = model_of(name).model.layers[-1].mlp
    with monkeypatch.context() as patched:
        patched.setattr(head, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            fed(name, text(1, 2, seed=2), cache, native=False)
    cache.truncate([6])
    assert torch.equal(fed(name, text(1, 2, seed=1), cache, native=False), wanted)


# ---- pipelines


@pytest.mark.parametrize("stages", [[1, 3], [1, 1, 1, 1]] if PROFILE == "nightly" else [[2, 1, 1]])
def test_stages_of_one_target(stages):
    """Stages of recurrent layers alone, too."""
    target = model_of(ONE)
    ids, mask = left_pad([text(1, 40)[0], text(1, 3, seed=1)[0]])
    for draft in (noisy(target, 0.02), "ngram"):
        pipe = SpeculativePipeline(target, draft, stages=stages)
        same_text(pipe, ids, attention_mask=mask, max_new_tokens=8)


@FILLED
def test_stages_continue_the_cache_of_a_call():
    target = model_of(ONE)
    pipe, ids = SpeculativePipeline(target, "ngram", stages=[2, 1, 1]), text(1, 40)
    first = pipe.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, text(1, 2, seed=4)], 1)
    again = pipe.generate(longer, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, own_text(target, longer, max_new_tokens=4))


def test_a_draft_module_has_attention():
    """Its blocks start from the target's layers with attention, though the default of such a configuration is recurrent."""
    target = model_of(ONE)
    config = DraftModuleConfig.for_target(target, ((0, 2), (2, 4)), layers=2)
    module = DraftModule.of_target(target, config)
    own = target.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(module.layers[1].self_attn.q_proj.weight, own)
    assert not torch.equal(module.layers[0].self_attn.q_proj.weight, own)


@FILLED
@pytest.mark.parametrize("schedule", ["plain", "lockstep"])
def test_caches_of_a_call(schedule):
    """They are transformers', with one state per row, which the next call continues from."""
    target = model_of(ONE)
    pipe = Pipeline(target, noisy(target, 0.02), schedule=schedule, trace=64)
    ids, mask = left_pad([text(1, 8)[0], text(1, 2, seed=1)[0]])
    words = own_text(target, ids, attention_mask=mask, max_new_tokens=5)[:, -5:]
    ends = {"eos_token_id": int(words[0, 2]), "pad_token_id": 0}
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, **ends}
    ours, theirs = (call(ids, attention_mask=mask, **options) for call in (pipe.generate, target.generate))
    for turn in range(2):
        same_content(ours.past_key_values, theirs.past_key_values)
        longer = torch.cat([theirs.sequences, text(2, 3, seed=turn)], 1)
        mask = torch.cat([mask, torch.ones(2, longer.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        ours, theirs = (
            call(longer, attention_mask=mask, past_key_values=result.past_key_values, **options)
            for call, result in ((pipe.generate, ours), (target.generate, theirs))
        )
        assert torch.equal(ours.sequences, theirs.sequences)
        assert pipe.report.trace["target"]["prefill"].sum() == 2 * 3
    with pytest.raises(NotImplementedError, match="recurrent layers of this model keep a state per column here"):
        target(ids, past_key_values=RowCache.for_model(target, 2, 32), use_cache=True)


# ---- what is refused


def test_padding_behind_tokens():
    """transformers runs padding through a recurrent layer as tokens, unless it is on the left, and decodes such calls."""
    pipe = Pipeline(model_of(ONE), schedule="plain")
    ids, mask = text(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, 3] = 0
    with pytest.warns(SpeedWarning, match="padding after a row's first token, which the target's recurrent layers"):
        got = pipe.generate(ids, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(got, own_text(model_of(ONE), ids, attention_mask=mask, max_new_tokens=4))


def test_captured_steps():
    target = model_of(ONE)
    with pytest.raises(NotCapturable, match=r"layer 0.*recurrent.*static cache"):
        check_streams([target])
    with pytest.raises(ValueError, match="recurrent layers are kept on one device"):
        RowCache.for_model(target, 1, 32, static=True)


def test_modules_that_compute_something_else(monkeypatch):
    target = make(ONE, seed=3)
    layer = target.model.layers[0]
    handle = layer.linear_attn.register_forward_pre_hook(lambda *args: None)
    with pytest.raises(TypeError, match=r"a recurrent layer \(model.layers.0\) has hooks"):
        check_runnable([target])
    handle.remove()
    check_runnable([target])
    own = recurrent._convolved
    monkeypatch.setattr(recurrent, "_convolved", lambda *given: 1.1 * own(*given))
    with pytest.raises(ValueError, match="compute something else than a gated delta net"):
        forward(target, text(1, 4), RowCache.for_model(target, 1, 8), keep=1, native=False)


@pytest.mark.parametrize("where", ["the model", "the base", "a layer", "the module"])
def test_hooks_that_come_later(where):
    """transformers' own loop decodes a model that has got hooks or a forward since the pipeline was made."""
    target = make(ONE, seed=3)
    layer = target.model.layers[0]
    module = {"the model": target, "the base": target.model, "a layer": layer, "the module": layer.linear_attn}[where]
    pipes = [Pipeline(target, schedule="plain"), SpeculativePipeline(target, stages=2)]
    wanted = [pipe.generate(text(1, 4), max_new_tokens=3, do_sample=False) for pipe in pipes]

    def check_left(pipe, cause):
        expected = target.generate(text(1, 4), max_new_tokens=3, do_sample=False)
        with pytest.warns(SpeedWarning, match=cause):
            assert torch.equal(pipe.generate(text(1, 4), max_new_tokens=3, do_sample=False), expected)
        assert pipe.report.schedule == "transformers"

    seen = []
    handle = module.register_forward_hook(lambda module, args, output: seen.append(module))
    for pipe in pipes:
        check_left(pipe, "has hooks")
    assert len(seen) == 3 * 2 * 2
    handle.remove()
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)
    check_left(pipes[0], r"a forward\(\) of its own")
    del module.forward
    for pipe, before in zip(pipes, wanted, strict=True):
        assert torch.equal(pipe.generate(text(1, 4), max_new_tokens=3, do_sample=False), before)
