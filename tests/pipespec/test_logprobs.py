"""What a call records next to its text: which fields there are, room at fixed addresses, wrong values. Numbers: ``tests/same_text``."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers.generation import GenerateDecoderOnlyOutput

from pipespec import Pipeline, SpeedWarning
from pipespec.engine.sampling import SamplerOutput, ScoreRecord, Step
from pipespec.schedules.graphs.buffers import StaticRecord
from tests.conftest import left_pad, noisy, random_llama

VOCABULARY, NEW, TOP = 40, 20, 5
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
GREEDY = {"do_sample": False, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def target():
    return random_llama(21, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def call(target):
    """Padded prompts, of which one ends early."""
    generator = torch.Generator().manual_seed(2)
    ids, mask = left_pad([torch.randint(4, VOCABULARY, (n,), generator=generator) for n in (3, 9, 5)])
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    text = target.generate(ids, **options, **GREEDY, eos_token_id=None)
    return ids, options | {"eos_token_id": int(text[1, ids.shape[1] + 6])}


@pytest.mark.parametrize("graphs", [False, True])
def test_fields_that_were_not_asked_for_are_none(target, call, graphs) -> None:
    ids, options = call
    with Pipeline(target, [noisy(target, 0.02)], schedule="lockstep", lookahead=4, graphs=graphs) as pipe:
        alone = pipe.generate(ids, **options, **GREEDY, return_dict_in_generate=True, logprobs=0)
        steps = alone.sequences.shape[1] - ids.shape[1]
        assert alone.scores is alone.logits is None
        assert alone.logprobs.chosen.shape == (3, steps)
        assert alone.logprobs.top.shape == (3, steps, 0)
        assert list(alone)[-1] == "logprobs"
        plain = pipe.generate(ids, **options, **GREEDY, return_dict_in_generate=True)
        assert type(plain) is GenerateDecoderOnlyOutput


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
    ids=["GPU", "CPU"],
)
def test_no_room_at_fixed_addresses(target, call, monkeypatch, error) -> None:
    """Then the call runs step by step, where the room grows with the text."""
    ids, options = call

    def full(*args):
        raise error

    monkeypatch.setattr(StaticRecord, "__init__", full)
    with Pipeline(target, [noisy(target, 0.02)], schedule="lockstep", graphs=True) as pipe:
        with pytest.warns(SpeedWarning, match="no memory to record the logits of all tokens at fixed addresses"):
            out = pipe.generate(ids, **options, **GREEDY, **OUTPUTS)
        assert torch.equal(out.sequences, target.generate(ids, **options, **GREEDY))
        assert "no memory to record" in str(pipe.report)


def test_captured_steps_wait_for_nothing(monkeypatch) -> None:
    """Without data, an operation whose host reads values raises."""

    def without_data(found, _):
        return logits.new_empty(rows, width, 1 + TOP), found.selected.new_empty(rows, width, TOP)

    monkeypatch.setattr(SamplerOutput, "logprobs", without_data)
    rows, width = 3, 4
    record = ScoreRecord(rows, scores=True, logits=True, top_logprobs=TOP)
    with FakeTensorMode():
        device = torch.device("cpu")
        static = StaticRecord(record, rows, NEW, VOCABULARY, device)
        logits = torch.empty(rows, width, VOCABULARY, dtype=torch.bfloat16)
        selected = torch.empty(rows, width, dtype=torch.int32)
        counts = [torch.empty(rows, dtype=torch.int32) for _ in range(3)]
        step, whole = Step(selected, *counts), torch.empty(rows)
        static.write(SamplerOutput(logits, logits.float(), selected, step, whole, torch.empty(rows, width)))
        with pytest.raises(DataDependentOutputException):
            int(selected[0, 0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"logprobs": 3}, ValueError, "needs return_dict_in_generate=True"),
        ({"logprobs": -1, "return_dict_in_generate": True}, ValueError, r"0 \.\. 40, the size of the vocabulary"),
        ({"logprobs": 41, "return_dict_in_generate": True}, ValueError, "not 41"),
        ({"logprobs": True, "return_dict_in_generate": True}, TypeError, "must be an integer"),
        ({"logprobs": 1.5, "return_dict_in_generate": True}, TypeError, "must be an integer"),
    ],
)
def test_wrong_values(target, given, error, message) -> None:
    with pytest.raises(error, match=message):
        Pipeline(target).generate(torch.tensor([[5, 6]]), max_new_tokens=2, **given)
