"""Errors and devices of loading."""

import itertools
import logging
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipespec
from pipespec import Pipeline
from pipespec.errors import DoesNotFit
from pipespec.models import loading
from tests.conftest import noisy, random_llama
from tests.pipespec.checkpoints import save
from tests.support.ways import driver_of

ERRORS = {
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    "Python": MemoryError(),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("at", ["reading", "converting"])
def test_too_little_memory_for_the_weights(model, tmp_path, monkeypatch, error, at):
    """It is not reported as damage. transformers only logs what fails while it quantises a weight."""
    folder = save(model, tmp_path / "model")

    def fails(*args, **kwargs):
        if at == "converting":
            logging.getLogger("transformers.modeling_utils").warning(f"CONVERSION {type(error).__name__}: {error}")
            raise RuntimeError("We encountered some issues during automatic conversion of the weights.")
        raise error

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(DoesNotFit, match=rf"{folder}: cpu ran out of memory while its weights were read"):
        loading.load_model(folder)
    assert not any(type(h) is logging.Handler for h in logging.getLogger("transformers").handlers)
    mismatch = Mock(side_effect=RuntimeError("size mismatch"))
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", mismatch)
    with pytest.raises(ValueError, match="holds no model that can be loaded: size mismatch"):
        loading.load_model(folder)


def test_quantised_weights_are_read_on_their_device(model, tmp_path, monkeypatch):
    """They cannot be moved, and transformers needs accelerate to read them there."""
    folder = save(model, tmp_path / "q", quantization_config={"quant_method": "torchao"})
    asked = Mock(side_effect=ImportError("needs accelerate"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", asked)
    for device in ("cuda:1", None):
        with pytest.raises(ImportError, match="accelerate"):
            loading.load_model(folder, device=device)
    assert [call.kwargs.get("device_map") for call in asked.call_args_list] == [{"": "cuda:1"}, None]


# ---- the mode of loaded models

PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10]])
GREEDY = {"max_new_tokens": 16, "do_sample": False}


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("schedule", ["lockstep", "workers", "streams"])
def test_loaded_models_keep_their_mode(schedule):
    """Also those of parts of a model. In training mode without dropout the text is the same, and so are the forms."""
    target = random_llama(3)
    draft, wanted = noisy(target, 0.02), target.generate(PROMPT, **GREEDY)
    target.train()
    draft.model.layers[1].train()
    before = modes(target), modes(draft)
    with Pipeline(target, draft, schedule=schedule) as pipe:
        assert torch.equal(pipe.generate(PROMPT, **GREEDY), wanted)
        assert (modes(target), modes(draft)) == before
        form = pipe.report.stages[-1].forward
        assert form == ("fused" if schedule == "streams" else "native")
        target.eval()
        assert torch.equal(pipe.generate(PROMPT, **GREEDY), wanted)
        assert pipe.report.stages[-1].forward == form
    assert modes(draft) == before[1]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("schedule", ["lockstep", "workers", "streams"])
def test_a_model_that_is_trained_while_attached(schedule, training):
    """The next text is that of the new weights."""
    target = random_llama(3).train(training)
    pipespec.attach(target, noisy(target, 0.02), schedule=schedule)
    steps, texts = torch.optim.AdamW(target.parameters(), lr=0.02), []
    try:
        for seed in range(3):
            texts.append(target.generate(PROMPT, **GREEDY))
            assert torch.equal(texts[-1], type(target).generate(target, PROMPT, **GREEDY))
            lesson = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(seed))
            target(input_ids=lesson, labels=lesson).loss.backward()
            steps.step()
            steps.zero_grad()
    finally:
        pipespec.detach(target)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(texts))
    assert set(modes(target)) == {training}


def test_a_trainer_generates_between_its_steps_with_gradient_checkpointing():
    """As trainers of reinforcement learning do: with checkpointing off for a while, which leaves a hook of transformers on the embedding."""
    target = random_llama(3).train()
    wanted = target.generate(PROMPT, **GREEDY)
    pipespec.attach(target, "ngram", schedule="lockstep")
    target.gradient_checkpointing_enable()
    with pytest.warns(pipespec.SpeedWarning, match="training mode with gradient checkpointing"):
        target.generate(PROMPT, **GREEDY)  # without a cache, transformers' own text is another one
    target.gradient_checkpointing_disable()
    with torch.no_grad():
        assert torch.equal(target.generate(PROMPT, **GREEDY), wanted)
    assert pipespec.attached(target).report.stages[-1].forward == "native"
    target.gradient_checkpointing_enable()
    lesson = torch.arange(3, 19)[None]
    target(input_ids=lesson, labels=lesson).loss.backward()
    assert target.model.embed_tokens.weight.grad is not None
    pipespec.detach(target)


def test_dropout_is_the_models_own():
    """In training mode texts differ from call to call, as those of transformers do."""
    target = random_llama(3)
    wanted = target.generate(PROMPT, **GREEDY)
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.9
    with Pipeline(target, noisy(target, 0.02), schedule="lockstep") as pipe:
        assert torch.equal(pipe.generate(PROMPT, **GREEDY), wanted)
        target.train()
        texts = {tuple(pipe.generate(PROMPT, **GREEDY)[0].tolist()) for _ in range(4)}
        assert len(texts) > 1
        target.eval()
        assert torch.equal(pipe.generate(PROMPT, **GREEDY), wanted)


def test_captured_steps_belong_to_one_mode():
    """They would repeat the dropout of the mode in which they were captured."""
    target = random_llama(3)
    with Pipeline(target, noisy(target, 0.02), schedule="streams", native=False) as pipe:
        versions = []
        for training in (False, False, True, True, False):
            target.train(training)
            pipe.generate(PROMPT, **GREEDY)
            versions.append(driver_of(pipe).target.buffers.version)
    assert [a == b for a, b in itertools.pairwise(versions)] == [True, False, True, False]
