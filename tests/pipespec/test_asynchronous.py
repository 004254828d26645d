"""What drafts promise whose process is another one, over both connections: a child process (``workers``), and another rank (``ranks``)."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers.generation import LogitsProcessor
from transformers.generation import logits_process as hf

from pipespec import Pipeline, StageFailure
from pipespec.engine.chain import StageInputs
from pipespec.engine.sampling import STATELESS, OutputPenaltyLogitsProcessor, Prompt, SamplingParams
from pipespec.schedules.asynchronous.messages import Call, Status
from tests.conftest import always_right, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Faulty
from tests.support.chains import in_process, plain
from tests.support.processes import await_drafts, await_idle
from tests.support.ways import driver_of
from tests.waiting import drafts_keep_up, until

NEW = 24


@pytest.fixture(params=["workers", "ranks"])
def connected(request, monkeypatch):
    """Makes a pipeline with drafts in other processes."""

    @contextmanager
    def pipeline(target, *drafts, **options):
        if request.param == "workers":
            with Pipeline(target, drafts, schedule="workers", **options) as pipe:
                yield pipe
        else:
            with in_process(monkeypatch, [*drafts, target], **options) as (pipe, _):
                yield pipe

    return pipeline


@pytest.mark.parametrize("drafts", [1, 2])
def test_draft_tokens_arrive_and_are_accepted(target, connected, drafts):
    ids = random_prompts(1, seed=2, longest=9)[0][None]
    with connected(target, *(always_right(target) for _ in range(drafts))) as pipe:
        with drafts_keep_up(pipe, [ids.shape[1] + NEW]):
            out = pipe.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(out, plain(target, ids, max_new_tokens=NEW, do_sample=False))
        report = pipe.report
        assert report.draft_acceptance_rate == 1.0
        assert report.stages[-1].accepted >= (NEW - 1) // 2
        assert all(stage.steps > 0 for stage in report.stages)  # also of a draft that is no neighbour of the target
        until(lambda: all(driver_of(pipe).forms), "each draft says how its model runs")


def test_drafts_apply_the_processors_that_have_no_state(target, connected):
    ids = random_prompts(1, seed=2, longest=9)[0][None]
    options = {"do_sample": True, "seed": 7, "repetition_penalty": 1.3, "bad_words_ids": [[7], [8, 9]], "top_k": 50}
    options |= {"max_new_tokens": NEW, "suppress_tokens": [5, 11]}
    with connected(target, always_right(target)) as pipe:
        with drafts_keep_up(pipe, [ids.shape[1] + NEW]):
            out = pipe.generate(ids, **options)
        assert torch.equal(out, plain(target, ids, **options))
        assert pipe.report.draft_acceptance_rate == 1.0


@pytest.mark.parametrize(("stage", "at"), [(0, 4), (1, 1)], ids=["first, step", "second, prefill"])
def test_a_draft_that_fails_sits_out_the_call(connected, stage, at):
    """The other one drafts on. The failure is named once, and the draft takes part again."""
    target, ids = random_llama(3), random_prompts(1, seed=2, shortest=4, longest=9)[0][None]
    drafts = [Faulty.like(noisy(target, 0.03, seed=i)) for i in range(2)]
    wanted = plain(target, ids, max_new_tokens=NEW)
    limits = [ids.shape[1] + NEW]
    with connected(target, *drafts) as pipe:
        drafts[stage].set(fail_at=at)
        cause = "ArithmeticError: made to fail"
        with pytest.warns(StageFailure) as caught, drafts_keep_up(pipe, limits):
            assert torch.equal(pipe.generate(ids, max_new_tokens=NEW), wanted)
        (message,) = [str(warning.message) for warning in caught]
        assert message.startswith(f"draft stage {stage}")
        assert f"{cause}); calls go on without it until it" in message
        assert pipe.report.stages[1 - stage].steps > 0
        (decision,) = pipe.report.decisions
        assert cause in decision
        assert "was lost" in decision
        drafts[stage].set()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.generate(ids, max_new_tokens=2)
            await_drafts(pipe)
            await_idle(pipe)
            with drafts_keep_up(pipe, limits):
                assert torch.equal(pipe.generate(ids, max_new_tokens=NEW), wanted)
        assert all(report.steps > 0 for report in pipe.report.stages)


def test_a_failure_may_be_made_an_error(connected):
    """With warnings as errors the call raises, and the next one works."""
    target, ids = random_llama(3), random_prompts(1, seed=2, longest=9)[0][None]
    draft = Faulty.like(noisy(target, 0.03))
    with connected(target, draft) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        draft.set(fail_at=2)
        with pytest.raises(StageFailure, match="draft stage 0"), drafts_keep_up(pipe, [ids.shape[1] + NEW]):
            pipe.generate(ids, max_new_tokens=NEW)
        draft.set()
        assert torch.equal(pipe.generate(ids, max_new_tokens=NEW), plain(target, ids, max_new_tokens=NEW))


# ---- messages


def test_a_call_survives_its_encoding():
    prompts = [np.array([3, 1, 2], dtype=np.int32), np.array([9], dtype=np.int32)]
    shown = Prompt(np.array([0, 3, 1, 2], dtype=np.int32), 3, 1)
    params = SamplingParams(
        seeds=(2**64 - 1, 5), temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, prompts=(shown,), ends=frozenset({4, 2})
    )
    sent = Call(7, StageInputs(prompts, [9, 30], params, 320, 64), [2, 4])
    call = Call.from_json(sent.to_json(), "cpu")
    assert [prompt.tolist() for prompt in call.inputs.prompts] == [[3, 1, 2], [9]]
    assert [prompt.dtype for prompt in call.inputs.prompts] == [np.int32] * 2
    assert (call.inputs.limits, call.inputs.vocabulary, call.inputs.chunk) == ([9, 30], 320, 64)
    assert (call.generation, call.eos) == (7, [2, 4])
    (found,) = call.inputs.sampling_params.prompts
    assert isinstance(found, Prompt)
    assert found.ids.tolist() == shown.ids.tolist()
    assert found[1:] == shown[1:]
    for name in ("seeds", "temperature", "top_k", "top_p", "min_p", "ends"):
        assert getattr(call.inputs.sampling_params, name) == getattr(params, name)


PROCESSORS = [
    hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[3, 4, 5, 3]])),
    hf.EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.tensor([[3, 4]])),
    hf.EpsilonLogitsWarper(0.01),
    hf.EtaLogitsWarper(0.01),
    hf.ExponentialDecayLengthPenalty((2, 1.1), [2], 3),
    hf.ForcedBOSTokenLogitsProcessor(1),
    hf.ForcedEOSTokenLogitsProcessor(9, [2]),
    hf.InfNanRemoveLogitsProcessor(),
    hf.LogitNormalization(),
    hf.MinLengthLogitsProcessor(9, [2]),
    hf.MinNewTokensLengthLogitsProcessor(3, 9, [2]),
    hf.MinPLogitsWarper(0.1),
    hf.NoBadWordsLogitsProcessor([[3, 4], [5]], [2]),
    hf.NoRepeatNGramLogitsProcessor(2),
    hf.RepetitionPenaltyLogitsProcessor(1.2),
    hf.SequenceBiasLogitsProcessor({(3,): 1.5, (4, 5): -1.0}),
    hf.SuppressTokensAtBeginLogitsProcessor([5], 4),
    hf.SuppressTokensLogitsProcessor([5, 6]),
    hf.TemperatureLogitsWarper(0.7),
    hf.TopHLogitsWarper(0.4),
    hf.TopKLogitsWarper(5),
    hf.TopPLogitsWarper(0.9),
    hf.TypicalLogitsWarper(0.9),
    OutputPenaltyLogitsProcessor(3, 0.5, 0.25),
]


def test_the_processors_of_drafts_survive_their_encoding():
    """Each gives the same scores."""
    assert {type(processor) for processor in PROCESSORS} == STATELESS
    params = SamplingParams(processors=tuple(PROCESSORS))
    inputs = StageInputs([np.array([3, 4], dtype=np.int32)], [9], params, 10)
    found = Call.from_json(Call(1, inputs, []).to_json(), "cpu").inputs.sampling_params.processors
    ids, scores = torch.tensor([[3, 4, 5, 3]]), torch.randn(1, 10, generator=torch.Generator().manual_seed(0))
    for sent, processor in zip(PROCESSORS, found, strict=True):
        assert type(processor) is type(sent)
        assert torch.equal(processor(ids, scores.clone()), sent(ids, scores.clone()))


def test_only_listed_classes_are_sent_and_built():
    class Own(LogitsProcessor):
        pass

    inputs = StageInputs([np.array([3], dtype=np.int32)], [9], SamplingParams(processors=(Own(),)), 10)
    with pytest.raises(TypeError, match="a message has no Own"):
        Call(1, inputs, []).to_json()
    text = Call(1, StageInputs([], [], SamplingParams(processors=(hf.TopKLogitsWarper(5),)), 10), []).to_json()
    with pytest.raises(KeyError):
        Call.from_json(text.replace("TopKLogitsWarper", "OrderedDict"), "cpu")


def test_a_status_survives_its_encoding():
    status = Status(3, "native", (5, 2)).failed(ArithmeticError("made to fail"))
    assert status.failure == "ArithmeticError: made to fail"
    assert Status.from_json(status.to_json()) == status
    for text in ("{}x", '{"ended": "3"}', '{"more": 1}', "[]"):
        with pytest.raises((TypeError, ValueError)):
            Status.from_json(text)
