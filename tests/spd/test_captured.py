"""SPD's stages in the fused form, and as graphs in the emulator: the text is the target's own."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache
from transformers.activations import ACT2FN
from transformers.generation.streamers import BaseStreamer

from pipespec import Pipeline
from pipespec.api import base
from pipespec.engine.chain import static_capacity
from pipespec.errors import NotCapturable
from pipespec.schedules.base import SpeedWarning
from pipespec.schedules.graphs import capture as capturing
from pipespec_spd import SpeculativePipeline, captured
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.graph_emulator import Emulator
from tests.support.ways import driver_of

pytest.importorskip("pipespec_kernels._cuda")
CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 0, "seed": 5},
    "long": {"do_sample": False, "shortest": 40, "longest": 90},
    "rows": {"do_sample": True, "top_k": 0, "rows": 3, "seed": [1, 2, 3]},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    emulator = Emulator()
    emulator.install(monkeypatch)
    monkeypatch.setattr(captured, "captures", lambda device: True)
    return emulator


@pytest.fixture(scope="module")
def model():
    return random_llama(3, layers=4)


def given(call: str) -> tuple[torch.Tensor, dict]:
    options = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None} | CALLS[call]
    rows, sizes = options.pop("rows", 1), {n: options.pop(n) for n in ("shortest", "longest") if n in options}
    ids, mask = left_pad(random_prompts(rows, **{"seed": 4, "longest": 9} | sizes))
    return ids, options | {"attention_mask": mask}


@pytest.mark.parametrize("stages", [1, 2, [1, 2, 1]], ids=str)
def test_the_text_is_the_targets(gpu: Emulator, model, stages: int | list[int]) -> None:
    """Several calls over the same graphs. No step but the first of each width runs the code of the model."""
    target = copy.deepcopy(model)
    pipe = SpeculativePipeline(target, noisy(model, 0.02), stages=stages)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        for call in (*CALLS, "greedy"):
            ids, options = given(call)
            before = gpu.replays
            text = pipe.generate(ids, **options)
            assert torch.equal(text, Pipeline(copy.deepcopy(model), schedule="plain").generate(ids, **options)), call
            assert gpu.replays - before >= 12
            assert pipe.report.stages[0].forward == "fused"
    assert gpu.faults == []


def test_the_bits_are_those_of_captured_plain_decoding(gpu: Emulator, model) -> None:
    target, (ids, options) = copy.deepcopy(model).bfloat16(), given("long")
    text = SpeculativePipeline(target, "ngram", stages=2).generate(ids, **options)
    with Pipeline(target, schedule="plain", graphs=True) as alone:
        assert torch.equal(text, alone.generate(ids, **options))
    assert gpu.faults == []


def test_a_cache_of_the_caller(gpu: Emulator, model) -> None:
    """It grows by what graphs have written, and a later call continues from it."""
    pipe, cache, (ids, options) = (
        SpeculativePipeline(copy.deepcopy(model), "ngram", stages=2),
        DynamicCache(),
        given("greedy"),
    )
    mask = options.pop("attention_mask")
    wanted = Pipeline(copy.deepcopy(model), schedule="plain").generate(ids, **options | {"max_new_tokens": 24})
    text = pipe.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    text = pipe.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache, **options)
    assert torch.equal(text, wanted)
    assert cache.get_seq_length() == text.shape[1] - 1


def test_rows_of_different_lengths_continue_from_a_cache(gpu: Emulator, model) -> None:
    """A complete row is fed padding while a longer one is read: there is room for it."""
    pipe, (ids, options) = SpeculativePipeline(copy.deepcopy(model), "ngram", stages=2), given("rows")
    cache, plain, wanted_cache = DynamicCache(), Pipeline(copy.deepcopy(model), schedule="plain"), DynamicCache()
    texts = [p.generate(ids, past_key_values=c, **options) for p, c in ((pipe, cache), (plain, wanted_cache))]
    assert torch.equal(*texts)
    more = random_prompts(1, seed=9, shortest=70, longest=70)[0]
    longer = torch.cat([texts[0], more.repeat(len(ids), 1)], 1)
    mask = torch.cat([options.pop("attention_mask"), torch.ones(len(ids), longer.shape[1] - ids.shape[1])], 1)
    texts = [
        p.generate(longer, attention_mask=mask.long(), past_key_values=c, **options)
        for p, c in ((pipe, cache), (plain, wanted_cache))
    ]
    assert torch.equal(*texts)


class Words(BaseStreamer):
    """Code of a user, which sees the model within the call."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def test_a_first_call_with_code_of_the_user(gpu: Emulator, model) -> None:
    """The weights move within it."""
    pipe, (ids, options) = SpeculativePipeline(copy.deepcopy(model), "ngram", stages=2), given("greedy")
    wanted = Pipeline(copy.deepcopy(model), schedule="plain").generate(ids, **options)
    assert torch.equal(pipe.generate(ids, streamer=Words(), **options), wanted)
    assert pipe.report.stages[0].forward == "fused"


def test_the_check_of_the_memory_counts_the_caches(gpu: Emulator, model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, (ids, options) = [], given("rows")
    monkeypatch.setattr(base, "check_memory", lambda models, **facts: asked.append(facts))
    pipe = SpeculativePipeline(copy.deepcopy(model), "ngram", stages=2)
    pipe.generate(ids, **options)
    (facts,) = asked
    assert facts["static"]
    assert {s.cache.capacity for s in driver_of(pipe).stages} == {static_capacity(facts["limit"])}


@pytest.mark.parametrize("part", ["activation", "layout"])
def test_what_an_operation_does_not_take_runs_in_the_modules(gpu: Emulator, part: str) -> None:
    model, (ids, options) = random_llama(3, layers=4), given("greedy")
    if part == "activation":
        for layer in model.model.layers:
            layer.mlp.act_fn = ACT2FN["relu2"]
        model.config.hidden_act = "relu2"
    else:
        down = model.model.layers[3].mlp.down_proj
        down.weight = torch.nn.Parameter(down.weight.detach().t().contiguous().t())
    wanted = Pipeline(copy.deepcopy(model), schedule="plain").generate(ids, **options)
    pipe = SpeculativePipeline(model, "ngram", stages=2)
    assert torch.equal(pipe.generate(ids, **options), wanted)
    assert pipe.report.stages[0].forward.startswith("transformers")


@pytest.mark.parametrize("why", ["a capture fails", "autocast", "native=False"])
def test_what_cannot_be_captured_gives_the_same_text(
    gpu: Emulator, model, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ids, options), warned = given("greedy"), nullcontext()
    pipe = SpeculativePipeline(copy.deepcopy(model), "ngram", stages=2, native=why != "native=False")
    if why == "a capture fails":
        monkeypatch.setattr(capturing.CaptureResources, "capture", refuse)
        warned = pytest.warns(SpeedWarning, match="the host launches each kernel")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "autocast"):
        wanted = Pipeline(copy.deepcopy(model), schedule="plain").generate(ids, **options)
        with warned:
            text = pipe.generate(ids, **options)
    assert torch.equal(text, wanted)
    assert (pipe.report.stages[0].forward == "fused") == (why == "a capture fails")


def refuse(*_: object, **__: object) -> None:
    raise NotCapturable("a stage", "its layers", "no memory")
