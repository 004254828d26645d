"""``exact=True``: texts in bfloat16 depend on target, prompt and seed alone, and other calls are refused."""

import copy
import functools
from contextlib import contextmanager

import pytest
import torch

import pipespec
from pipespec import Pipeline
from pipespec.engine import fused
from pipespec.engine.attention import ATTENTION
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import choose_fused, forward
from pipespec_kernels import ops
from tests.conftest import ByPosition, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.test_native import MODELS, ids, make
from tests.pipespec.test_streams import DEVICES
from tests.trials import trials

NEW = 32
PROMPTS = random_prompts(trials(ci=6, nightly=100), seed=5, longest=24)
SAMPLING = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 0},
}
SETTINGS = [("plain", 0, 5), ("lockstep", 1, 1), ("lockstep", 2, 4), ("workers", 2, 3)]
"""Schedule, drafts, rows of a batch."""
CAPTURED = [("plain", 0, None, 5), ("lockstep", 1, 1, 1), ("lockstep", 2, 4, 3)]
CAPTURED += [("streams", 1, 2, 1), ("streams", 2, [3, 9], 5)]
"""The same, with the lookahead before the rows."""


@pytest.fixture(scope="module")
def target():
    """Weights and logits in bfloat16, so that many tokens are nearly equally likely."""
    return random_llama(7).to(torch.bfloat16)


def texts_of(pipe: Pipeline, batch: int, sampling: dict) -> list[list[int]]:
    found = []
    for begin in range(0, len(PROMPTS), batch):
        ids, mask = left_pad(PROMPTS[begin : begin + batch])
        seeds = {"seed": list(range(begin, begin + len(ids)))} if sampling["do_sample"] else {}
        ids, mask = ids.to(pipe.target.device), mask.to(pipe.target.device)
        out = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, **sampling, **seeds)
        found += out[:, ids.shape[1] :].tolist()
    return found


@pytest.fixture(scope="module")
def expected(target):
    with Pipeline(target, exact=True) as pipe:
        return {name: texts_of(pipe, 1, sampling) for name, sampling in SAMPLING.items()}


def made(target, schedule="plain", drafts=0, lookahead=None, **options) -> Pipeline:
    models = [noisy(target, 0.05 * (n + 1), seed=n) for n in range(drafts)]
    return Pipeline(target, models, schedule=schedule, lookahead=lookahead, **options)


captured = functools.partial(made, graphs=True)


def check_texts(pipe, wanted, batch, form) -> None:
    """They depend on target, prompt and seed alone."""
    for name, sampling in SAMPLING.items():
        assert texts_of(pipe, batch, sampling) == wanted[name], name
        assert pipe.report.stages[-1].forward.startswith(form)
        assert pipe.report.schedule == pipe.schedule


@pytest.mark.parametrize(("schedule", "drafts", "batch"), SETTINGS)
def test_texts(target, expected, schedule, drafts, batch):
    with made(target, schedule, drafts, exact=True) as pipe:
        check_texts(pipe, expected, batch, "native")


def test_an_attached_model_is_exact(target, expected):
    model = copy.deepcopy(target)
    pipespec.attach(model, drafts=[noisy(target, 0.05)], schedule="lockstep", exact=True)
    ids = PROMPTS[0][None]
    got = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert got[0, ids.shape[1] :].tolist() == expected["greedy"][0]


@contextmanager
def hooked(model):
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    yield
    handle.remove()


# ---- captured steps. On the CPU the same code runs without capture.


@pytest.fixture(scope="module", params=DEVICES)
def placed(request, target):
    """The target on a device, and its texts in captured plain decoding of one prompt at a time."""
    model = copy.deepcopy(target).to(request.param)
    with captured(model, exact=True) as pipe:
        return model, {name: texts_of(pipe, 1, sampling) for name, sampling in SAMPLING.items()}


@pytest.mark.parametrize(("schedule", "drafts", "lookahead", "batch"), CAPTURED)
def test_captured_texts(placed, schedule, drafts, lookahead, batch):
    model, wanted = placed
    with captured(model, schedule, drafts, lookahead, exact=True) as pipe:
        check_texts(pipe, wanted, batch, "fused, exact")


@pytest.mark.filterwarnings("ignore:calls like this one run in lockstep")
def test_cached_text_and_calls_that_need_the_host_change_no_bit(placed):
    model, wanted = placed
    prompt, options = PROMPTS[0][None].to(model.device), {"do_sample": False, "eos_token_id": None}
    logits = {"return_dict_in_generate": True, "output_logits": True}
    with captured(model, exact=True) as pipe:
        whole = pipe.generate(prompt, max_new_tokens=NEW, **options, **logits)
    assert whole.sequences[0, prompt.shape[1] :].tolist() == wanted["greedy"][0]
    with captured(model, "lockstep", 1, 3, exact=True) as pipe:
        # The second call continues from keys and values of steps. In the first call above they come from steps of another width.
        text = pipe.generate(prompt, max_new_tokens=NEW // 2, **options)
        on_host = {"logits_processor": [ByPosition()]}
        rest = pipe.generate(text, max_new_tokens=NEW - NEW // 2, **options, **logits, **on_host)
        assert "run in lockstep, step by step" in pipe.report.decisions[0]
        assert torch.equal(rest.sequences, whole.sequences)
        assert torch.equal(torch.stack(rest.logits), torch.stack(whole.logits[NEW // 2 :]))
    with captured(model, exact=True) as pipe:
        # One prefill, and one token.
        last = pipe.generate(whole.sequences[:, :-1], max_new_tokens=1, **options, **logits)
        assert torch.equal(last.logits[0], whole.logits[-1])


def logits_of(model, form, tokens, cuts) -> torch.Tensor:
    """Logits of all columns of ``tokens [rows, S]``, fed in steps of ``cuts`` columns."""
    cache = RowCache.for_model(model, tokens.shape[0], 64, static=True)
    form.add_cache(cache)
    return torch.cat([forward(model, part, cache, keep=part.shape[1]) for part in tokens.split(cuts, 1)], 1)


TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, TYPES[(i + k) % 2]) for i, n in enumerate(MODELS) for k in range(trials(1, 2))]
)
def test_no_logit_depends_on_steps_and_batches(name, dtype):
    model = make(name, dtype, attn_implementation=ATTENTION)
    form, tokens = choose_fused(model, exact=True), ids(3, 40)
    assert form.name == "fused, exact"
    wanted = logits_of(model, form, tokens, [40])
    assert torch.equal(logits_of(model, form, tokens, [1] * 40), wanted)
    assert torch.equal(logits_of(model, form, tokens, [7, 1, 30, 2]), wanted)
    for row in range(3):
        assert torch.equal(logits_of(model, form, tokens[row : row + 1], [33, 7]), wanted[row : row + 1])


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    ("schedule", "drafts", "lookahead", "batch"), [("lockstep", 1, 7, 2), ("streams", 2, [3, 9], 1)]
)
def test_steps_of_few_rows_are_exact_anyway(target, schedule, drafts, lookahead, batch, sampling):
    """Without exact=True, too, captured texts are those of captured plain decoding: up to 16 columns of all rows. Only the prompts' products see other rows."""
    model = copy.deepcopy(target)
    with captured(model) as pipe:
        wanted = texts_of(pipe, batch, SAMPLING[sampling])
    with captured(model, schedule, drafts, lookahead) as pipe:
        assert texts_of(pipe, batch, SAMPLING[sampling]) == wanted
        assert pipe.report.stages[-1].forward == "fused"


@pytest.mark.parametrize("is_obeyed", [True, False])
def test_attention_that_depends_on_the_width(target, monkeypatch, is_obeyed):
    """The exact form asks for the invariant sums. Attention that ignores that is refused."""
    attention = ops.verify_attention

    def wrong(q, *given, invariant=False, **options):
        result = attention(q, *given, invariant=invariant, **options)
        return result if invariant and is_obeyed else result.mul_(1 + q.shape[2] % 5 / 64)

    monkeypatch.setattr(fused.ops, "verify_attention", wrong)
    monkeypatch.setattr(fused, "check_outputs", lambda *_: None)
    model = copy.deepcopy(target)
    if not is_obeyed:
        with pytest.raises(ValueError, match=r"exact=True: .*depend on how a text is cut into steps"):
            captured(model, exact=True)
        return
    with captured(model, exact=True) as pipe:
        wanted = texts_of(pipe, 1, SAMPLING["greedy"])
    with captured(model, "streams", 1, 4, exact=True) as pipe:
        assert texts_of(pipe, 3, SAMPLING["greedy"]) == wanted


def test_two_forms_of_one_model(target):
    """An exact pipeline and another one on the same model keep their forms."""
    model = copy.deepcopy(target)
    ids = PROMPTS[0][None]
    with captured(model) as usual, captured(model, exact=True) as exact:
        for _ in range(2):
            usual.generate(ids, max_new_tokens=4, do_sample=False)
            exact.generate(ids, max_new_tokens=4, do_sample=False)
            assert usual.report.stages[-1].forward == "fused"
            assert exact.report.stages[-1].forward == "fused, exact"


@pytest.mark.parametrize("how", ["native", "plain", "lockstep", "streams"])
def test_targets_without_the_form_are_refused_by_name(target, how):
    """Also if the model changes later: the next call is refused before anything is generated."""
    model = copy.deepcopy(target)
    make = made if how == "native" else functools.partial(captured, schedule=how, drafts=int(how != "plain"))
    with hooked(model), pytest.raises(ValueError, match=r"exact=True: .*lm_head has hooks"):
        make(model, exact=True)
    assert model.config._attn_implementation == target.config._attn_implementation
    ids = PROMPTS[0][None]
    padded = torch.stack([PROMPTS[0][:3], PROMPTS[0][:3]])
    with make(model, exact=True) as pipe:
        wanted = pipe.generate(ids, max_new_tokens=4, do_sample=False)
        for within in (torch.autocast("cpu"), hooked(model)):
            with within, pytest.raises(ValueError, match=r"exact=True: .*(autocast|hooks)"):
                pipe.generate(ids, max_new_tokens=4, do_sample=False)
        with pytest.raises(ValueError, match="pad on the left"):
            pipe.generate(padded, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]), max_new_tokens=4)
        assert torch.equal(pipe.generate(ids, max_new_tokens=4, do_sample=False), wanted)


def test_steps_that_cannot_be_captured_are_refused(target, monkeypatch):
    """Without exact=True, other steps would run instead."""
    model = copy.deepcopy(target)
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *_: None)
    with pytest.raises(ValueError, match=r"exact=True: target cannot be captured .*pass graphs=False"):
        captured(model, exact=True)
