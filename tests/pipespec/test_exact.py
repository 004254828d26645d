"""``exact=True``: texts in bfloat16 depend on target, prompt and seed alone, and other calls are refused."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch

import pipespec
from pipespec import Pipeline
from pipespec.config import SpeculationConfig
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.trials import trials

NEW = 32
PROMPTS = random_prompts(trials(ci=12, nightly=100), seed=5, longest=24)
SAMPLING = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 0},
}
SETTINGS = [
    ("plain", 0, 5),
    ("lockstep", 1, 1),
    ("lockstep", 2, 4),
    ("workers", 1, 1),
    ("workers", 2, 3),
]


@pytest.fixture(scope="module")
def target():
    """Weights and logits in bfloat16, so that many tokens are nearly equally likely."""
    return random_llama(7).to(torch.bfloat16)


def texts_of(pipe: Pipeline, batch: int, sampling: dict) -> list[list[int]]:
    found = []
    for begin in range(0, len(PROMPTS), batch):
        ids, mask = left_pad(PROMPTS[begin : begin + batch])
        seeds = {"seed": list(range(begin, begin + len(ids)))} if sampling["do_sample"] else {}
        out = pipe.generate(ids, attention_mask=mask, max_new_tokens=NEW, **sampling, **seeds)
        found += out[:, ids.shape[1] :].tolist()
    return found


@pytest.fixture(scope="module")
def expected(target):
    with Pipeline(target, exact=True) as pipe:
        return {name: texts_of(pipe, 1, sampling) for name, sampling in SAMPLING.items()}


@pytest.mark.parametrize(("schedule", "drafts", "batch"), SETTINGS)
def test_texts_depend_on_target_prompt_and_seed_alone(target, expected, schedule, drafts, batch):
    models = [noisy(target, 0.05 * (n + 1), seed=n) for n in range(drafts)]
    with Pipeline(target, models, schedule=schedule, exact=True) as pipe:
        for name, sampling in SAMPLING.items():
            assert texts_of(pipe, batch, sampling) == expected[name], name
            assert pipe.report.stages[-1].forward == "native"


def test_an_attached_model_is_exact(target, expected):
    model = copy.deepcopy(target)
    pipespec.attach(model, drafts=[noisy(target, 0.05)], schedule="lockstep", exact=True)
    ids = PROMPTS[0][None]
    got = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert got[0, ids.shape[1] :].tolist() == expected["greedy"][0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"graphs": True, "schedule": "lockstep"}, "steps that are not captured"),
        ({"schedule": "streams"}, "steps that are not captured"),
        ({"native": False}, "leave native=False out"),
    ],
)
def test_options_that_exclude_it(target, options, says):
    with pytest.raises(ValueError, match=says):
        Pipeline(target, [noisy(target, 0.05)], exact=True, **options)
    with pytest.raises(ValueError, match=says):
        SpeculationConfig(exact=True, **options)


def test_targets_without_a_native_form_are_refused_by_name(target):
    model = copy.deepcopy(target)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"exact=True: .*model\.layers\.0 has hooks"):
        Pipeline(model, exact=True)
    handle.remove()
    # If the model changes later, the next call is refused before anything is generated.
    ids = PROMPTS[0][None]
    with Pipeline(model, exact=True) as pipe:
        wanted = pipe.generate(ids, max_new_tokens=4, do_sample=False)
        for within in (torch.autocast("cpu"), hooked(model)):
            with within, pytest.raises(ValueError, match=r"exact=True: .*(autocast|hooks)"):
                pipe.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(pipe.generate(ids, max_new_tokens=4, do_sample=False), wanted)


@contextmanager
def hooked(model):
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    yield
    handle.remove()


def test_a_prompt_that_ends_with_padding_is_refused(target):
    ids = torch.stack([PROMPTS[0][:3], PROMPTS[0][:3]])
    with Pipeline(target, exact=True) as pipe, pytest.raises(ValueError, match="pad on the left"):
        pipe.generate(ids, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]), max_new_tokens=4, do_sample=False)
