"""Drafts that are made out of a model: some of its layers, a head over some of its tokens, weights in int8. The text is the target's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import pipespec
from pipespec import Pipeline, SelfDraft, attach, detach, self_draft
from pipespec.drivers.workers.weights import share
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward
from pipespec.models.derived import Int8Linear, TrimmedHead, in_int8, with_layers, with_vocabulary
from pipespec.models.properties import head_size, weight_bytes
from pipespec.models.vocabulary import common_tokens, draft_vocabulary
from pipespec.planning.drafts import early_exit
from pipespec.preflight.support import check_shareable
from tests.conftest import VOCABULARY, always_right, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.tiny_models import make
from tests.waiting import drafts_keep_up

NEW = 24
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.8, "top_k": 20}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama(3, layers=4)


@pytest.fixture(scope="module")
def exits_early(model) -> LlamaForCausalLM:
    """A target whose layers 2 and 3 add nothing, so that its first two layers always choose its tokens."""
    target = copy.deepcopy(model)
    with torch.no_grad():
        for layer in target.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


def plain(target, ids, mask, **kwargs):
    """The text of the target alone: transformers' for greedy decoding, and the pipeline's of the seed."""
    if kwargs.get("do_sample"):
        return Pipeline(target, schedule="plain").generate(ids, attention_mask=mask, **kwargs)
    return target.generate(ids, attention_mask=mask, **kwargs)


def logits_of(model, ids, **kwargs) -> torch.Tensor:
    with torch.inference_mode():
        cache = RowCache.for_model(model, len(ids), 64)
        return forward(model, ids, cache, keep=ids.shape[1], **kwargs).clone()


# ---- layers


@pytest.mark.parametrize("layers", [1, 3, [0, 3], [1, 2, 3]])
def test_a_self_draft_is_the_target_without_its_other_layers(model, layers):
    draft = with_layers(model, layers)
    kept = list(range(layers)) if isinstance(layers, int) else layers
    cut = copy.deepcopy(model)
    cut.model.layers = torch.nn.ModuleList(cut.model.layers[i] for i in kept)
    cut.config.num_hidden_layers = len(kept)
    ids = torch.stack(random_prompts(2, seed=1, shortest=9, longest=9))
    expected = cut(ids, use_cache=False).logits
    assert torch.equal(draft(ids, use_cache=False).logits, expected)
    for native in (True, False):  # with its own cache, whose layers are counted from 0
        got = logits_of(draft, ids, native=native)
        assert torch.allclose(got, expected, atol=1e-4)
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    assert not torch.allclose(model(ids, use_cache=False).logits, expected, atol=1e-2)


def test_a_self_draft_has_the_targets_parameters(model):
    draft = with_layers(model, [0, 2])
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for parameter in draft.parameters())
    assert draft.lm_head.weight is model.lm_head.weight
    assert draft.model.layers[1].mlp.up_proj.weight is model.model.layers[2].mlp.up_proj.weight
    assert draft.model.layers[1] is not model.model.layers[2]
    assert not draft.training
    # Moved memory is that of both.
    target = copy.deepcopy(model)
    draft = with_layers(target, 2)
    target.to(torch.bfloat16)
    assert draft.dtype == torch.bfloat16
    assert draft.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()


def test_layers_of_different_types_keep_their_types():
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    draft = with_layers(Qwen2ForCausalLM(config), [0, 2])
    assert draft.config.layer_types == ["full_attention"] * 2
    assert draft.model.config.num_hidden_layers == 2


def test_an_attached_target(model):
    target = copy.deepcopy(model)
    prompt = random_prompts(1, seed=4)[0][None]
    wanted = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
    pipe = attach(target, "self:2", schedule="lockstep", lookahead=4)
    try:
        assert torch.equal(target.generate(prompt, max_new_tokens=NEW, do_sample=False), wanted)
        assert pipe.report.stages[-1].drafted > 0
        assert "generate" not in vars(with_layers(target, 1))
    finally:
        detach(target)


@pytest.mark.parametrize("kwargs", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("drafts", "options"),
    [
        ("self:2", {}),
        (["ngram", SelfDraft((0, 3)), "self:3"], {}),
        ("self:3", {"draft_dtype": "int8", "draft_vocabulary": 200}),
        ("noisy", {"draft_dtype": "int8"}),
        ("noisy", {"draft_vocabulary": range(100, 300)}),
    ],
    ids=["self", "chain", "all", "int8", "vocabulary"],
)
def test_the_text_is_the_targets(model, drafts, options, kwargs):
    if drafts == "noisy":
        drafts = noisy(model, 0.02)
    ids, mask = left_pad(random_prompts(3, seed=8))
    wants = {"max_new_tokens": NEW, "pad_token_id": 0, **kwargs}
    wanted = plain(model, ids, mask, **wants)
    with Pipeline(model, drafts, schedule="lockstep", lookahead=4, **options) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.generate(ids, attention_mask=mask, **wants), wanted)
        stages = pipe.report.stages
    assert all(stage.forward == "native" for stage in stages if stage.name != "ngram")
    assert stages[-1].drafted > 0
    assert isinstance(drafts, LlamaForCausalLM) or "of the target's 4" in str(pipe.report)


@pytest.mark.parametrize("options", [{}, {"draft_dtype": "int8", "draft_vocabulary": 310}], ids=["shared", "changed"])
def test_in_worker_processes(exits_early, options):
    target = copy.deepcopy(exits_early)
    ids, mask = left_pad(random_prompts(2, seed=6))
    wanted = plain(target, ids, mask, max_new_tokens=NEW, do_sample=False)
    with Pipeline(target, "self:2", schedule="workers", lookahead=3, **options) as pipe:
        with drafts_keep_up(pipe, [len(p) + NEW for p in random_prompts(2, seed=6)]):
            assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False), wanted)
        report = pipe.report
        if not options:  # the worker reads the target's own weights
            _, memory = share(pipe.models[0])
            for weight in (target.lm_head.weight, target.model.layers[1].mlp.up_proj.weight):
                assert 0 <= weight.data_ptr() - memory.address < weight_bytes(pipe.models[0]) + 64 * 64
    assert report.stages[0].forward == "native"
    assert report.stages[-1].accepted > (0.2 if options else 0.9) * report.stages[-1].drafted > 0


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("self:0", "a self-draft of 0 layers: the target has 4, so use 1 to 3"),
        ("self:4", "use 1 to 3"),
        ("self:2,1", "ascending indices from 0 to 3"),
        ("self:1,9", "ascending indices from 0 to 3"),
        ("self:0,1,2,3", "the target itself"),
        ("self:two", "is no self-draft: use 'self'"),
        (SelfDraft("some"), "must be a number of layers"),
        (SelfDraft(1.5), "must be a number of layers"),
    ],
)
def test_layers_that_are_refused(model, draft, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Pipeline(model, draft, schedule="lockstep")


def test_self_drafts_of_what_is_not_a_decoder():
    with pytest.raises(TypeError, match="not a LLaMA-like decoder"):
        self_draft(
            type(
                "Other",
                (),
                {"config": type("C", (), {})(), "base_model_prefix": "", "get_output_embeddings": None, "lm_head": 1},
            )(),
            1,
        )
    with pytest.raises(ValueError, match="a self-draft of 1 layers: the target has 1"):
        self_draft(random_llama(1, layers=1), 1)


# ---- which layers


def test_an_early_exit_of_the_checkpoint(model):
    target = copy.deepcopy(model)
    assert early_exit(target) is None
    target.generation_config.assistant_early_exit = 3
    assert self_draft(target).config.num_hidden_layers == 3
    prompt = random_prompts(1, seed=2)[0][None]
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    with Pipeline(target, "self", schedule="lockstep") as pipe:
        assert torch.equal(pipe.generate(prompt, max_new_tokens=8, do_sample=False), wanted)
        assert "layers 0-2 of the target's 4 (assistant_early_exit" in str(pipe.report)
    target.generation_config.assistant_early_exit = 4
    assert early_exit(target) is None


def test_a_self_draft_names_its_layers(model):
    with pytest.raises(ValueError, match=r"does not say which layers, .* such as 'self:1'"):
        Pipeline(model, "self")
    assert Pipeline(model, "self", schedule="plain").models == [model]  # which ignores the drafts


# ---- tokens


def test_a_trimmed_head(model):
    ids = [3, 40, 41, 200, VOCABULARY - 1]
    draft = with_vocabulary(model, ids)
    fed = torch.stack(random_prompts(2, seed=1, shortest=9, longest=9))
    whole, trimmed = model(fed, use_cache=False).logits, logits_of(draft, fed)
    rest = [i for i in range(VOCABULARY) if i not in ids]
    assert torch.allclose(trimmed[..., ids], whole[..., ids], atol=1e-4)
    assert trimmed[..., rest].eq(-math.inf).all()
    assert described(draft, RowCache.for_model(draft, 2, 32)) == "native"
    assert head_size(draft) == VOCABULARY
    assert draft.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert isinstance(draft.lm_head, TrimmedHead)
    assert isinstance(model.lm_head, torch.nn.Linear)
    with pytest.raises(ValueError, match="head of a draft is a TrimmedHead"):
        with_vocabulary(draft, [1])


@pytest.mark.parametrize("native", [True, False])
def test_noise_belongs_to_the_targets_tokens(model, native):
    """A draft with the target's weights and all tokens of the text is always right, also when tokens are drawn."""
    prompt = random_prompts(1, seed=3, shortest=6)[0][None]
    wants = {"max_new_tokens": NEW, "do_sample": True, "seed": 9, "temperature": 1.0}
    wanted = plain(model, prompt, torch.ones_like(prompt), **wants)
    ids = sorted(set(wanted[0].tolist()))
    with Pipeline(
        model, always_right(model), schedule="lockstep", lookahead=4, draft_vocabulary=ids, native=native
    ) as pipe:
        assert torch.equal(pipe.generate(prompt, **wants), wanted)
        assert pipe.report.draft_acceptance_rate == 1.0
        assert pipe.report.decisions[0] == f"draft 0: drafts {len(ids)} of {VOCABULARY} tokens"
    without = [i for i in ids if i != int(wanted[0, -3])]
    with Pipeline(
        model, always_right(model), schedule="lockstep", lookahead=4, draft_vocabulary=without, native=native
    ) as pipe:
        assert torch.equal(pipe.generate(prompt, **wants), wanted)
        assert 0 < pipe.report.draft_acceptance_rate < 1.0


def test_a_tied_head_is_trimmed_and_shared_in_a_worker():
    torch.manual_seed(0)
    config = copy.deepcopy(random_llama(0).config)
    config.tie_word_embeddings = True
    target = LlamaForCausalLM(config).eval()
    draft = with_vocabulary(target, range(50))
    assert draft.model.embed_tokens.weight is target.lm_head.weight
    check_shareable([draft, target])
    weights, memory = share(draft)
    other = weights.build(memory)
    fed = torch.arange(12).view(2, 6)
    assert torch.equal(other(fed, use_cache=False).logits, draft(fed, use_cache=False).logits)
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_which_tokens(model, tmp_path):
    target = copy.deepcopy(model)
    assert draft_vocabulary(5, target, target) == [0, 1, 2, 3, 4]
    target.generation_config.eos_token_id = [300, 7]
    assert draft_vocabulary(5, target, target) == [0, 1, 2, 7, 300]
    assert draft_vocabulary([9, 4, 4], target, target) == [4, 7, 9, 300]
    assert draft_vocabulary(torch.tensor([8]), target, target) == [7, 8, 300]
    from tests.pipespec.test_cli import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text").write_text("aaabbc")
    a, b, c = byte_tokenizer()("abc").input_ids
    assert draft_vocabulary(tmp_path / "text", tmp_path, target) == sorted({a, b, c, 7, 300})
    assert draft_vocabulary((4, str(tmp_path / "text")), tmp_path, target) == sorted({a, b, 7, 300})
    assert draft_vocabulary((7, tmp_path / "text"), tmp_path, target) == sorted({0, 1, a, b, c, 7, 300})
    assert common_tokens([[5, 5, 3], [3, 9, 1]], 2) == [3, 5]
    assert pipespec.common_tokens(torch.tensor([5, 3, 5])) == [3, 5]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "vocabulary has 320 tokens, so give a number from 1 to 319"),
        (VOCABULARY, "from 1 to 319"),
        ([], "holds no token"),
        ([VOCABULARY], "ids from 320 to 320"),
        ([-1, 2], "ids from -1 to 2"),
        ([1.5], "must be integers"),
        (1.5, "must be a number of tokens"),
        ((True, "text"), "the number is True"),
        ("nowhere.txt", "nowhere.txt"),
    ],
)
def test_tokens_that_are_refused(model, given, message):
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        Pipeline(model, noisy(model, 0.1), schedule="lockstep", draft_vocabulary=given)


# ---- int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8(model, dtype):
    target = copy.deepcopy(model).to(dtype)
    draft = in_int8(target)
    linears = [module for module in draft.modules() if isinstance(module, Int8Linear)]
    assert len(linears) == 4 * 7 + 1
    assert all(module.weight.dtype == torch.int8 for module in linears)
    original = target.model.layers[0].mlp.up_proj.weight.float()
    copied = draft.model.layers[0].mlp.up_proj
    error = (copied.weight * copied.scale[:, None] - original).abs()
    assert (error <= 0.51 * original.abs().amax(1, keepdim=True) / 127).all()
    fed = torch.stack(random_prompts(2, seed=1, shortest=9, longest=9))
    own = draft(fed, use_cache=False).logits.float()
    assert torch.allclose(logits_of(draft, fed).float(), own, atol=1e-4 if dtype == torch.float32 else 0.5)
    assert described(draft, RowCache.for_model(draft, 2, 32)) == "native"
    assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
    with pytest.raises(ValueError, match="quantised already"):
        in_int8(draft)


def test_a_dtype_of_drafts_given_as_paths(model, tmp_path):
    for name, some in (("target", model), ("draft", noisy(model, 0.01))):
        some.save_pretrained(tmp_path / name)
    with Pipeline(
        tmp_path / "target", tmp_path / "draft", schedule="lockstep", dtype="float32", draft_dtype="bfloat16"
    ) as pipe:
        assert [m.dtype for m in pipe.models] == [torch.bfloat16, torch.float32]
    with pytest.raises(ValueError, match="'eight' is not a dtype"):
        Pipeline(tmp_path / "target", tmp_path / "draft", schedule="lockstep", draft_dtype="eight")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("deepseek_v3, latents", {}),  # dense layers first
        ("smollm3, mixed", {"no_rope_layers": [1, 0, 0, 1]}),
        ("qwen2_moe, mixed", {"mlp_only_layers": [1]}),
    ],
)
@pytest.mark.parametrize("layers", [(1, 3), (0, 1, 3), (2, 3)])
def test_layers_of_different_kinds_keep_their_kinds(tmp_path, family, more, layers):
    """In this process, in another one, and as a checkpoint; as layers of a self-draft, too."""
    target = make(family, **more)
    ids = torch.arange(5, 15)[None]
    draft = with_layers(target, layers)
    cut = copy.deepcopy(target)
    cut.model.layers = torch.nn.ModuleList(cut.model.layers[i] for i in layers)
    for name in ("layer_types", "num_hidden_layers"):
        setattr(cut.config, name, getattr(draft.config, name, None))
    with torch.no_grad():
        expected = cut(ids, use_cache=False).logits
        draft.save_pretrained(tmp_path)
        saved = type(draft).from_pretrained(tmp_path)
        saved.config._experts_implementation = draft.config._experts_implementation
        for found in (draft, worker(draft), saved):
            torch.testing.assert_close(found(ids, use_cache=False).logits, expected)
        again = with_layers(draft, [len(layers) - 1])
        assert torch.equal(worker(again)(ids).logits, again(ids).logits)
        whole = in_int8(with_vocabulary(draft, range(40)))
        assert torch.equal(worker(whole)(ids).logits, whole(ids).logits)


def worker(model):
    """The model as another process builds it."""
    weights, memory = share(model)
    return weights.build(memory)


def test_a_derived_draft_that_no_checkpoint_describes_is_not_saved(model, tmp_path):
    for draft in (in_int8(model), with_vocabulary(model, range(40)), with_layers(in_int8(model), 2)):
        for one in (draft, copy.deepcopy(draft)):
            with pytest.raises(
                NotImplementedError, match="save_pretrained: no checkpoint of transformers describes int8"
            ):
                one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"draft_dtype": "int8"}, "draft_dtype is not for .* as its folder has it: leave it out"),
        ({"draft_vocabulary": 40}, "draft_vocabulary is not for .* as its folder has it: leave it out"),
        ({"draft_dtype": torch.float32}, "draft_dtype is not for .*: save such a draft and give its path"),
    ],
)
def test_ranks_load_their_own_models(model, options, instead):
    with pytest.raises(ValueError, match=instead):
        Pipeline(model, noisy(model, 0.02), schedule="ranks", **options)
