"""attach(): existing programs run unchanged on an attached model, and detach() restores the model."""

import copy
import io
import pickle
import warnings

import psutil
import pytest
import torch
import transformers
from transformers import GenerationMixin

import pipespec
from pipespec import Pipeline
from pipespec.api.attach import attached
from pipespec.demo import family_path
from pipespec.schedules.base import SpeedWarning
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.forks import forks
from tests.support.streamers import Recorder, failing
from tests.support.ways import driver_of
from tests.waiting import until

NEW = 16


@pytest.fixture
def model():
    return random_llama(3)


@pytest.fixture
def pipe(model):
    """The pipeline that ``model`` is attached to."""
    return pipespec.attach(model, noisy(model, 0.02), schedule="lockstep")


@pytest.fixture(scope="module")
def family():
    """The bundled family: target and small draft, and the tokenizer. In float32: in a batch near-ties may fall otherwise."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(family_path("target"))
    return *(load(family_path(name), dtype=torch.float32) for name in ("target", "small")), tokenizer


@pytest.fixture
def attached_family(family):
    target, draft, _ = family
    pipeline = pipespec.attach(target, draft, schedule="lockstep", lookahead=4)
    yield pipeline
    pipespec.detach(target)


def plain(model, *args, **kwargs):
    """The model's text by transformers alone, also while it is attached."""
    return GenerationMixin.generate(model, *args, **{"do_sample": False} | kwargs)


def children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


# ---- attach, detach


def test_attach_and_detach(model):
    draft, (ids,) = noisy(model, 0.02), random_prompts(1, seed=1)
    ids = ids[None]
    wanted = plain(model, ids, max_new_tokens=NEW)
    pipe = pipespec.attach(model, draft, schedule="lockstep")
    assert isinstance(pipe, Pipeline)
    assert attached(model) is pipe
    assert pipe.target is model
    assert torch.equal(model.generate(ids, max_new_tokens=NEW), wanted)
    assert pipe.report.tokens == NEW
    assert attached(draft) is None  # other models of the class are unchanged
    pipe.report = None
    assert torch.equal(random_llama(3).generate(ids, max_new_tokens=NEW), wanted)
    assert pipe.report is None
    pipespec.detach(model)
    assert attached(model) is None
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW), wanted)
    assert pipe.report is None


def test_other_weights_are_another_model(model):
    with pytest.raises(ValueError, match="makes another model, whose text differs"):
        pipespec.attach(model, weights="q8_0")
    assert attached(model) is None
    assert "generate" not in vars(model)


def test_attach_twice_and_detach_twice(model, pipe):
    with pytest.raises(ValueError, match="attached already; detach"):
        pipespec.attach(model, noisy(model, 0.1), schedule="lockstep")
    assert attached(model) is pipe
    pipespec.detach(model)
    with pytest.raises(ValueError, match="not attached"):
        pipespec.detach(model)
    again = pipespec.attach(model, noisy(model, 0.1), lookahead=2, schedule="lockstep")
    assert attached(model) is again


class _Base(transformers.LlamaForCausalLM):
    """A class of the user's: without methods of its own it is attached as any other."""


class _OwnGenerate(_Base):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs) + 1


class _OwnSample(_Base):
    def _sample(self, *args, **kwargs):
        return super()._sample(*args, **kwargs) + 1


class _OwnInputs(_Base):
    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs)


@pytest.mark.parametrize("kind", [transformers.LlamaModel, transformers.LlamaForSequenceClassification])
def test_a_model_without_a_language_head(model, kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} without a language-model head"):
        pipespec.attach(kind(model.config), noisy(model, 0.02), schedule="lockstep")


def test_a_forward_that_torch_compiles_as_one_graph(model):
    (ids,) = random_prompts(1, seed=7)
    inputs = {"inputs": ids[None], "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(**inputs)
    compiled = copy.deepcopy(model)
    compiled.forward = torch.compile(compiled.forward, backend="eager", fullgraph=True, dynamic=True)
    pipespec.attach(compiled, noisy(model, 0.02), schedule="lockstep")
    assert torch.equal(compiled.generate(**inputs), wanted)


def test_a_class_with_a_loop_of_its_own(model):
    draft, ids = noisy(model, 0.02), torch.tensor([[5, 6, 7]])
    names = {_OwnGenerate: "generate", _OwnSample: "_sample", _OwnInputs: "prepare_inputs_for_generation"}
    for kind, name in names.items():
        own = kind(model.config)
        wanted = own.generate(ids, max_new_tokens=5, do_sample=False)
        pipe = pipespec.attach(own, draft, schedule="lockstep")
        with pytest.warns(SpeedWarning, match=rf"{kind.__name__} has its own {name}\(\)"):
            assert torch.equal(own.generate(ids, max_new_tokens=5, do_sample=False), wanted)
        assert pipe.report is None
        pipespec.detach(own)
        assert "generate" not in vars(own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipespec.attach(_Base(model.config), draft, schedule="lockstep")


def test_an_instance_with_its_own_generate(model):
    ids = torch.tensor([[5, 6, 7]])

    def own(*args, **kwargs):
        return "own"

    model.generate = own
    pipespec.attach(model, noisy(model, 0.02), schedule="lockstep")
    with pytest.warns(SpeedWarning, match=r"a generate\(\) of its own when it was attached"):
        assert model.generate(ids, max_new_tokens=5, do_sample=False) == "own"
    pipespec.detach(model)
    assert model.generate is own
    assert attached(model) is None


def test_what_cannot_be_attached_is_left_alone(model):
    with pytest.raises(ValueError, match="draft 0 has a vocabulary of 300"):
        pipespec.attach(model, random_llama(4, vocabulary=300), schedule="lockstep")
    assert attached(model) is None
    assert "generate" not in vars(model)


def test_detach_ends_the_workers(model):
    forks()  # a child, too
    before = children()
    pipe = pipespec.attach(model, noisy(model, 0.02), schedule="workers")
    (ids,) = random_prompts(1, seed=2)
    started = children() - before
    assert len(started) == 1
    assert torch.equal(model.generate(ids[None], max_new_tokens=NEW), plain(model, ids[None], max_new_tokens=NEW))
    assert pipe.report.schedule == "workers"
    pipespec.detach(model)
    until(lambda: not children() & started, "the worker has ended")
    assert torch.equal(model.generate(ids[None], max_new_tokens=4), plain(model, ids[None], max_new_tokens=4))


def test_it_looks_like_generate(model, pipe):
    import inspect

    ours, theirs = inspect.signature(model.generate), inspect.signature(random_llama(4).generate)
    assert list(ours.parameters) == list(theirs.parameters)
    assert model.generate.__name__ == "generate"
    assert model.generate.__doc__ == GenerationMixin.generate.__doc__
    (ids,) = random_prompts(1, seed=3)
    # Positional, too: inputs, generation_config.
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(ids[None], config), plain(model, ids[None], config))
    assert pipe.report.tokens == 5
    # A method, whose copy is that of a copied model.
    assert inspect.ismethod(model.generate)
    copied, loaded = copy.deepcopy([model.generate])[0], pickle.loads(pickle.dumps(model.generate))
    for method in (model.generate, copied, loaded):
        assert torch.equal(method(ids[None], config), plain(model, ids[None], config))
    assert copied.__self__ is not model
    assert pipespec.attached(copied.__self__) is None


def unsupported(model) -> dict[str, dict]:
    """Calls that a pipeline refuses, by the argument that it names."""
    half = torch.tensor([[5, 6, 7, 0, 0]])
    return {
        "num_beams": {"num_beams": 3},
        "assistant_model": {"assistant_model": noisy(model, 0.1)},
        "position_ids": {"inputs": half, "position_ids": torch.arange(2, 7)[None]},
        "inputs_embeds": {"inputs": None, "inputs_embeds": model.get_input_embeddings()(half).detach()},
        "cache_implementation": {"cache_implementation": "static"},
    }


def test_own_arguments_of_unsupported_calls_are_refused(model):
    """transformers would leave them out. Calls without them: ``test_transformers_behaviours.py``."""
    with pipespec.attach(model, noisy(model, 0.1), schedule="lockstep"):
        recorded = [{"return_dict_in_generate": True, "logprobs": count} for count in (0, 1)]
        for own in ({"seed": 1}, {"presence_penalty": 0.5}, *recorded):
            with pytest.raises(NotImplementedError, match="num_beams"):
                model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, num_beams=3, **own)
    pipespec.detach(model)


@pytest.mark.parametrize(
    "own", [{"presence_penalty": 0.0}, {"frequency_penalty": 0}, {"logit_bias": {}}, {"seed": None}], ids=str
)
def test_own_arguments_without_effect_are_left_out(model, own):
    prompt = torch.tensor([[5, 6, 7]])
    wanted = model.generate(prompt, max_new_tokens=6, num_beams=2)
    pipespec.attach(model, noisy(model, 0.1), schedule="lockstep")
    with pytest.warns(SpeedWarning, match="num_beams"):
        assert torch.equal(model.generate(prompt, max_new_tokens=6, num_beams=2, **own), wanted)
    pipespec.detach(model)


def test_unsupported_calls_are_refused_on_request(model):
    pipespec.attach(model, noisy(model, 0.1), schedule="lockstep", unsupported="raise")
    for name, given in unsupported(model).items():
        with pytest.raises(NotImplementedError, match=name):
            model.generate(**{"inputs": torch.tensor([[5, 6, 7]]), "max_new_tokens": 6, **given})
    pipespec.detach(model)
    with pytest.raises(ValueError, match="unsupported must be 'plain' or 'raise', not 'ignore'"):
        pipespec.attach(model, noisy(model, 0.1), schedule="lockstep", unsupported="ignore")


def test_a_streamer_of_a_call_that_transformers_decodes(model, pipe):
    """It gets the text once, and no failure."""
    streamer = Recorder()
    ids, positions = torch.tensor([[5, 6, 7]]), torch.tensor([[3, 4, 5]])
    with pytest.warns(SpeedWarning, match="position_ids"):
        out = model.generate(ids, position_ids=positions, max_new_tokens=4, do_sample=False, streamer=streamer)
    assert torch.equal(torch.cat([v.flatten() for v in streamer.values]), out[0])
    assert streamer.ends == 1


def test_a_streamer_of_a_call_that_fails_before_its_first_token(model, pipe, monkeypatch):
    """It gets the prompt once. Its own error ends the call."""

    def fails(request):
        raise OSError("made to fail")

    monkeypatch.setattr(driver_of(pipe), "run", fails)
    ids, recorder = torch.tensor([[5, 6, 7]]), Recorder()
    with pytest.warns(SpeedWarning, match="could not begin the call"):
        out = model.generate(ids, max_new_tokens=4, do_sample=False, streamer=recorder)
    assert torch.equal(out, plain(model, ids, max_new_tokens=4))
    assert recorder.record == (ids.tolist(), out[0, 3:].tolist(), 1)
    recorder = failing(0)
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, max_new_tokens=4, do_sample=False, streamer=recorder)
    assert len(recorder.values) == 1


def test_another_decoding_loop(model, pipe):
    """custom_generate on an attached model: theirs, or the pipeline by its other name."""
    ids = torch.tensor([[5, 6, 7]])

    def loop(model, input_ids, **kwargs):
        return input_ids + 1

    assert torch.equal(model.generate(ids, custom_generate=loop), ids + 1)
    assert pipe.report is None
    wanted = plain(model, ids, max_new_tokens=5)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, custom_generate=pipe), wanted)
    assert pipe.report.tokens == 5


def test_a_returned_cache_of_rows_with_padding_in_transformers_hands(model, pipe):
    """In a call that transformers decodes, and in a loop of the user's."""
    ids, mask = left_pad(random_prompts(3, seed=6, shortest=3, longest=9))
    first = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, return_dict_in_generate=True)
    text = torch.cat([first.sequences, ids[:, -1:]], 1)
    whole = torch.cat([mask, torch.ones(3, NEW + 1, dtype=mask.dtype)], 1)
    features = {"max_new_tokens": 5, "output_hidden_states": True, "return_dict_in_generate": True}
    held = copy.deepcopy(first.past_key_values)
    with pytest.warns(SpeedWarning, match="output_hidden_states"):
        out = model.generate(text, attention_mask=whole, past_key_values=first.past_key_values, **features)
    assert torch.equal(out.sequences, plain(model, text, attention_mask=whole, max_new_tokens=5))
    feed = {"attention_mask": whole, "position_ids": whole.cumsum(1)[:, -2:] - 1}
    with torch.no_grad():
        logits = model(text[:, -2:], past_key_values=held, **feed).logits
        torch.testing.assert_close(logits, model(text, attention_mask=whole).logits[:, -2:], rtol=1e-4, atol=1e-4)


def test_embeddings_are_refused_for_one_reason(model, pipe):
    given = {"inputs_embeds": model.get_input_embeddings()(torch.tensor([[5, 6, 7]])).detach(), "max_new_tokens": 3}
    for call in (pipe.generate, lambda **kwargs: GenerationMixin.generate(model, custom_generate=pipe, **kwargs)):
        with pytest.raises(NotImplementedError, match="inputs_embeds=Tensor is not supported: drafts cannot read"):
            call(**given)


# ---- copies


def test_copies_are_plain(model, pipe):
    (ids,) = random_prompts(1, seed=4)
    wanted = plain(model, ids[None], max_new_tokens=NEW)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    copies.append(copy.deepcopy(copies[0]))
    # This one shares the modules, and has a configuration of its own.
    shallow = copy.copy(model)
    shallow.generation_config = copy.deepcopy(shallow.generation_config)
    shallow.generation_config.max_new_tokens = 3
    assert attached(shallow) is None
    assert shallow.generate(ids[None]).shape[1] == len(ids) + 3
    for other in copies:
        assert other is not model
        assert attached(other) is None
        assert torch.equal(other.generate(ids[None], max_new_tokens=NEW, do_sample=False), wanted)
        assert pipe.report is None
        with torch.no_grad():
            other.lm_head.weight.neg_()  # its generate() is its own, not the original's
        assert not torch.equal(other.generate(ids[None], max_new_tokens=NEW, do_sample=False), wanted)
    assert attached(model) is pipe
    assert torch.equal(model.generate(ids[None], max_new_tokens=NEW), wanted)
    assert pipe.report.tokens == NEW
    # A copy can be attached, too.
    assert torch.equal(pipespec.attach(copies[0], model, schedule="lockstep").generate(ids[None], max_new_tokens=3), plain(copies[0], ids[None], max_new_tokens=3))  # fmt: skip


# ---- programs that call generate()


def test_transformers_pipeline(family, attached_family):
    target, _, tokenizer = family
    prompts = ["def mean(values):\n", "def is_even(number):\n"]
    kwargs = {"max_new_tokens": 24, "do_sample": False}
    texts = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    out = [texts(p, **kwargs)[0]["generated_text"] for p in prompts]
    assert attached_family.report.stages[-1].accepted > 0
    attached_family.report = None
    # From a list, in batches: the pipeline pads them on the left.
    tokenizer.padding_side = "left"
    batched = [o[0]["generated_text"] for o in texts(prompts, batch_size=2, **kwargs)]
    assert attached_family.report.rows == 2
    only_new = texts(prompts[0], return_full_text=False, **kwargs)[0]["generated_text"]
    for prompt, text in zip(prompts, out, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        wanted = plain(target, **inputs, **kwargs)
        assert text == tokenizer.decode(wanted[0], skip_special_tokens=True)
        assert len(text) > len(prompt)
    assert batched == out
    assert out[0] == prompts[0] + only_new


def test_a_chat_template(family, attached_family):
    target, _, tokenizer = family
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
    messages = [{"role": "user", "content": "a function for the mean"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(out, plain(target, **inputs, max_new_tokens=24))
    assert attached_family.report.tokens <= 24
    # transformers' pipeline takes and returns a chat.
    texts = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    answer = texts(messages, max_new_tokens=24, do_sample=False)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    new = out[0, inputs["input_ids"].shape[1] :]
    assert answer["content"] == tokenizer.decode(new, skip_special_tokens=True)
