"""What other people's code changes: a pipeline's own forms give way, an attached model says what the bare one says, and never fails where that works."""

import io
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GenerationMixin, LogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

import pipespec
from pipespec import SpeedWarning
from pipespec.engine import known
from pipespec.engine.native import Checksums
from pipespec_kernels._native import Stamp
from tests.conftest import noisy, random_llama, random_prompts
from tests.pipespec import hostile
from tests.pipespec.tiny_models import TINY_MODELS, make
from tests.support.streamers import Recorder, failing
from tests.support.texts import text_of
from tests.trials import trials

NEW = 16
IDS = random_prompts(1, seed=3, shortest=12, longest=12)[0][None] % 90 + 3
TWO = torch.stack(random_prompts(2, seed=4, shortest=9, longest=9))


def bare(model, ids=IDS, **given):
    return GenerationMixin.generate(model, ids, **{"max_new_tokens": NEW, "do_sample": False} | given)


def ours(model, ids=IDS, **given):
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | given)


@pytest.fixture
def model():
    return random_llama(3)


@pytest.fixture
def attached(model):
    pipe = pipespec.attach(model, noisy(model, 0.02), schedule="lockstep")
    yield pipe
    if pipespec.attached(model) is pipe:
        pipespec.detach(model)


# ---- what is known


@pytest.mark.parametrize("name", TINY_MODELS)
def test_models_of_transformers_are_known(name):
    assert known.unknown_reason(make(name)) is None


def test_a_known_model_is_looked_at_once(model, monkeypatch):
    assert known.unknown_reason(model) is None
    monkeypatch.setattr(known, "_foreign_reason", None)  # a second look would fail
    assert known.unknown_reason(model) is None
    pipespec.refresh(model)
    with pytest.raises(TypeError):
        known.unknown_reason(model)


CODE = [name for name in hostile.CHANGES if name.startswith(("class", "forward", "apply", "rotate", "F.", "torch", "attention", "hook", "pre-", "global", "wrapped", "own", "get_interface", "another registry", "another torch", "RoPE", "property"))]  # fmt: skip


if transformers.__version__.startswith("5.0."):
    CODE.remove("get_interface() of the registry")  # 5.0 calls neither
    CODE.remove("class of new caches")


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("when", ["before", "after"])
def test_changed_code_is_seen(name, when):
    """Before and after the model was first looked at; undone, the model is known again."""
    model = make("llama")
    if when == "after":
        assert known.unknown_reason(model) is None
    undo = hostile.CHANGES[name](model)
    assert known.unknown_reason(model) is not None
    if undo is not None:
        undo()
        assert known.unknown_reason(model) is None


def test_jitter_is_seen():
    model = make("phimoe, window")
    assert known.unknown_reason(model) is None
    model.train()
    assert "training mode" in known.unknown_reason(model)


def test_modes_are_seen(model):
    with hostile._Scaling():
        assert known.unknown_reason(model) == "a TorchFunctionMode is active"
    with torch.device("cpu"):
        assert known.unknown_reason(model) is None


class _Base:
    inherited = 1


class _Stamped(_Base):
    def method(self):
        return 1


def _renamed(space):
    space["other"] = space.pop("a")


STAMPED = {
    "value of a dictionary": lambda s: s["space"].update(a=object()),
    "key of a dictionary": lambda s: _renamed(s["space"]),
    "entry of a dictionary": lambda s: s["space"].update(b=3),
    "item of a list": lambda s: s["items"].__setitem__(0, object()),
    "length of a list": lambda s: s["items"].append(None),
    "class of an object": lambda s: setattr(s["object"], "__class__", _Base),
    "code of a function": lambda s: setattr(s["function"], "__code__", (lambda: 2).__code__),
    "attribute of a class": lambda s: setattr(_Stamped, "method", None),
    "attribute of its base": lambda s: setattr(_Base, "inherited", 2),
}


@pytest.mark.parametrize("name", STAMPED)
def test_a_stamp_sees(name, monkeypatch):
    monkeypatch.setattr(_Base, "inherited", 1)
    monkeypatch.setattr(_Stamped, "method", _Stamped.method)
    parts = {"space": {"a": 1000.5}, "items": [1], "object": _Stamped(), "function": lambda: 1}
    stamp = Stamp([parts["space"], parts["items"]], [parts["object"]], [parts["function"]], [_Stamped])
    for _ in range(3):
        assert stamp.is_current()
    # The same object put where it is is no change.
    parts["space"]["a"] = parts["space"]["a"]
    assert stamp.is_current()
    STAMPED[name](parts)
    assert not stamp.is_current()


# ---- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_see_every_value(dtype):
    noise = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=noise).to(dtype) for shape in ((300, 400), (7,), (33, 5))]
    sums = Checksums(tensors)
    for _ in range(trials(ci=20, nightly=500)):
        tensor = tensors[int(torch.randint(0, 3, (), generator=noise))]
        at = int(torch.randint(0, tensor.numel(), (), generator=noise))
        before = tensor.view(-1)[at].clone()
        assert sums.agree()
        tensor.data.view(-1)[at] += 3
        assert not sums.agree()
        tensor.data.view(-1)[at] = before
    assert sums.agree()


def test_a_large_model_is_checked_in_turn():
    """A change of a matrix shows at once, one of a row or of one value after some checks, sooner after long calls."""
    noise = torch.Generator().manual_seed(1)
    large = torch.randn((1500, 1000), generator=noise)
    sums = Checksums([large.t()])  # whatever the strides
    large.data.mul_(1.5)
    assert not sums.agree()
    for change in ((1200, slice(None)), (1200, 17)):
        sums = Checksums([large])
        large.data[change] += 1.0
        # Each check reads some more, without any time for it.
        seen = [sums.agree() for _ in range(large.nbytes >> 14)]
        assert seen[0]
        assert not seen[-1]
    sums = Checksums([large])
    before = large[[3, 4]]
    large.data[[4, 3]] = before  # the same sum
    checks = 0
    while sums.agree():
        sums.spend(1e3)
        checks += 1
    assert checks < large.nbytes >> 14


# ---- caches, attentions, processors of the caller


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cache of a subclass", "Rounded"),
        ("cache with layers", "DynamicCache with methods or layers of its own"),
        ("cache with an update", "DynamicCache with methods or layers of its own"),
    ],
)
@pytest.mark.parametrize("schedule", ["plain", "lockstep"])
def test_a_cache_of_the_caller_is_used(model, name, kind, schedule):
    wanted = bare(model, **hostile.CALLS[name]())
    assert not torch.equal(wanted, bare(model))
    pipe = pipespec.attach(model, noisy(model, 0.02) if schedule == "lockstep" else (), schedule=schedule)
    with pytest.warns(SpeedWarning, match=rf"past_key_values is a {kind}"):
        assert torch.equal(ours(model, **hostile.CALLS[name]()), wanted)
    with pytest.warns(SpeedWarning, match="transformers' own loop"):
        assert torch.equal(pipe.generate(IDS, max_new_tokens=NEW, do_sample=False, **hostile.CALLS[name]()), wanted)
    assert pipe.report.schedule == "transformers"
    assert pipe.report.tokens == NEW


class Steps(LogitsProcessor):
    """Has a state per row of the batch, and counts its calls, as matchers of grammars do."""

    def __init__(self) -> None:
        self.states: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.states = self.states or list(range(len(input_ids)))
        if len(self.states) != len(input_ids):
            raise ValueError("another number of rows than before")
        self.states = [state + 1 for state in self.states]
        out: torch.Tensor = torch.stack([row.roll(state, -1) for row, state in zip(scores, self.states, strict=True)])
        return out


def test_processors_that_know_the_batch(model, attached):
    cfg = UnbatchedClassifierFreeGuidanceLogitsProcessor
    for make_one in (Steps, lambda: cfg(1.5, model, unconditional_ids=TWO[:, -3:].clone())):
        wanted = bare(model, TWO, logits_processor=[make_one()])
        assert torch.equal(ours(model, TWO, logits_processor=[make_one()]), wanted)
        assert torch.equal(
            attached.generate(TWO, max_new_tokens=NEW, do_sample=False, logits_processor=[make_one()]), wanted
        )
    # Several answers to one prompt are a batch, too.
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    wanted = bare(model, logits_processor=[Steps()], **options)
    assert torch.equal(ours(model, logits_processor=[Steps()], **options), wanted)
    assert attached.report.schedule == "transformers"  # of the call of generate() above
    # One row is the whole batch.
    wanted = bare(model, logits_processor=[Steps()])
    assert torch.equal(ours(model, logits_processor=[Steps()]), wanted)
    assert attached.report.schedule == "lockstep"


def test_a_processor_of_transformers_that_is_patched(model, attached):
    """Before and after the first call with it."""
    given = {"suppress_tokens": [5]}
    before = ours(model, TWO, **given)
    for _ in range(2):
        undo = hostile.CHANGES["class of a processor"](model)
        try:
            wanted = bare(model, TWO, **given)
            assert not torch.equal(wanted, before)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SpeedWarning)
                assert torch.equal(ours(model, TWO, **given), wanted)
        finally:
            undo()
        pipespec.refresh()
    assert torch.equal(ours(model, TWO, **given), before)
    assert attached.report.schedule == "lockstep"


def test_sampled_text_of_a_seed_is_the_same_where_transformers_decodes(model, attached):
    sampled = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 40, "seed": 5}
    wanted = attached.generate(TWO, **sampled)
    assert attached.report.schedule == "lockstep"

    def nothing(ids, scores):
        return scores

    found = attached.generate(
        TWO, logits_processor=[nothing], return_dict_in_generate=True, output_scores=True, **sampled
    )
    assert attached.report.schedule == "transformers"
    assert torch.equal(found.sequences, wanted)
    assert len(found.scores) == NEW
    assert bool((torch.isfinite(found.scores[0]).sum(1) == 40).all())


# ---- prompts, structures, life of a model


def test_an_activated_adapter_sees_whole_prompts(model):
    model.peft_config = {"default": types.SimpleNamespace(alora_invocation_tokens=[7, 8])}
    assert "activated LoRA" in known.unknown_reason(model)


def test_a_forward_in_place_of_another_attribute(model, attached):
    """The model has as many attributes as before."""
    model.noted = True
    before = ours(model)
    del model.noted
    hostile.own_forward(model)
    assert not torch.equal(bare(model), before)
    assert torch.equal(ours(model), bare(model))


def test_a_checkpoint_that_asks_for_a_hybrid_cache():
    model = make("gemma2, mixed, caps")
    model.generation_config.cache_implementation = "hybrid"
    wanted = bare(model)
    pipe = pipespec.attach(model, "ngram", schedule="lockstep")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        assert torch.equal(ours(model), wanted)
    assert pipe.report.schedule == "lockstep"
    with pytest.warns(SpeedWarning, match="cache_implementation"):
        ours(model, cache_implementation="static")


def test_float16_on_the_cpu_is_left_to_transformers(model, attached):
    model.half()
    with pytest.warns(SpeedWarning, match="float16 on the CPU"):
        assert torch.equal(ours(model), bare(model))
    half = make("llama").half()
    pipespec.attach(half, "ngram", schedule="lockstep")
    with pytest.warns(SpeedWarning, match="float16 on the CPU"):
        assert torch.equal(ours(half), bare(half))
    model.float()
    ours(model)
    assert attached.report.schedule == "lockstep"


@pytest.mark.parametrize("name", ["hook, last column", "hook, width", "hook, everywhere"])
@pytest.mark.parametrize("schedule", ["plain", "lockstep"])
def test_hooks_see_what_transformers_feeds(model, name, schedule):
    seen: list[Any] = []
    model.model.layers[0].register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    hostile.CHANGES[name](model)
    wanted, widths = bare(model), list(seen)
    pipespec.attach(model, "ngram" if schedule == "lockstep" else (), schedule=schedule)
    seen.clear()
    with pytest.warns(SpeedWarning, match="has hooks"):
        assert torch.equal(ours(model), wanted)
    assert seen == widths


def test_code_that_is_trusted_speculates(model, attached):
    seen: list[int] = []

    def note(module: nn.Module, args: Any) -> None:
        seen.append(args[0].shape[1])

    model.model.norm.register_forward_pre_hook(note)
    pipespec.trust(note)
    assert torch.equal(ours(model), bare(model))
    assert attached.report.schedule == "lockstep"
    with pytest.raises(TypeError, match="functions, classes and names"):
        pipespec.trust(3)


def test_a_function_of_a_file_named_like_one_of_pythons(model):
    space: dict[str, Any] = {"__name__": "profile"}
    exec("def hook(module, args): pass", space)
    model.model.norm.register_forward_pre_hook(space["hook"])
    assert "has hooks" in known.unknown_reason(model)


def test_a_class_that_is_trusted_after_a_call(model):
    class Mlp(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    layer = model.model.layers[0]
    layer.mlp = Mlp(layer.mlp)
    assert "has its own forward()" in known.unknown_reason(model)
    pipespec.trust(Mlp)
    assert known.unknown_reason(model) is None


def test_an_attached_model_is_loaded_without_pipespec(model, attached, tmp_path: Path):
    torch.save(model, tmp_path / "model.pt")
    text = ours(model, max_new_tokens=6)
    program = (
        "import sys, torch\n"
        "sys.modules['pipespec'] = sys.modules['pipespec_kernels'] = None\n"
        f"m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        f"print(m.generate(torch.tensor({IDS.tolist()}), max_new_tokens=6, do_sample=False).tolist())\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == str(text.tolist()), out.stderr
    stored = io.BytesIO()
    torch.save(model, stored)
    assert b"pipespec" not in stored.getvalue()


# ---- errors before the first token


class Injected(RuntimeError):
    """An error of a line."""


def with_error_at(at: int | None, call: Any, function: str = "") -> tuple[Any, int]:
    """What a call returns in which the ``at``-th line of pipespec's files before the result raises (None: no line), and how many lines ran.

    The error names the function of the line. With ``function``, only lines of functions of this name count.
    """
    root, lines, has_begun, is_over = str(Path(pipespec.__file__).parent), 0, False, False

    def on_line(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines, is_over
        is_over |= event == "return" and frame.f_code.co_name == "output_of"  # the result is there
        if event == "line" and not is_over:
            lines += 1
            if lines == at:
                raise Injected(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        return on_line

    def on_call(frame: Any, event: str, arg: Any) -> Any:
        nonlocal has_begun
        code = frame.f_code
        has_begun |= code.co_name == "generate" and code.co_filename.endswith("api/base.py")
        # What decides about the fallback, and the record of errors, are not preparation.
        left_out = code.co_filename.endswith(("attach.py", "errors.py")) or (function and code.co_name != function)
        return on_line if has_begun and code.co_filename.startswith(root) and not left_out else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        return call(), lines
    finally:
        sys.settrace(before)


def _touch(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.add_(0)


FAILING: dict[str, tuple[torch.Tensor, dict[str, Any], Any]] = {
    "greedy": (IDS, {}, None),
    "sampled": (IDS, {"do_sample": True, "top_k": 1}, None),
    "rows with padding": (TWO, {"attention_mask": torch.ones_like(TWO).index_fill(1, torch.tensor([0]), 0)}, None),
    "scores": (IDS, {"return_dict_in_generate": True, "output_scores": True}, None),
    "packed again": (IDS, {}, _touch),
    "compared again": (IDS, {}, pipespec.refresh),
}
"""Calls in which errors are injected: ids, arguments, and what happens to the model before each."""


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("schedule", ["lockstep", "plain"])
def test_an_error_in_any_line_before_the_first_token(model, name, schedule):
    """transformers decodes the call, and the warning has the cause. After the first token, the error comes out."""
    ids, given, before = FAILING[name]
    given = {"max_new_tokens": 3, **given}
    wanted, drafts = bare(model, ids, **given), "ngram" if schedule == "lockstep" else ()

    def call(at: int | None) -> tuple[Any, list[int], int]:
        streamer = Recorder() if len(ids) == 1 else None
        if before is not None:
            before(model)
        out, lines = with_error_at(at, lambda: ours(model, ids, streamer=streamer, **given))
        streamed = [] if streamer is None else [t for value in streamer.values for t in value.flatten().tolist()]
        return out, streamed, lines

    pipespec.attach(model, drafts, schedule=schedule)
    ours(model, ids, **given)  # packs the weights
    *_, lines = call(None)
    assert lines > 300
    count, fell_back = trials(ci=10, nightly=lines), 0
    for i in range(count):
        at, pipe = 1 + i * lines // count, pipespec.attached(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                out, streamed, _ = call(at)
            except Injected as error:
                out, is_of_streamer = None, str(error).endswith("stream_prompt")
            if out is None:  # something was committed, or the error counts as one of the streamer
                assert is_of_streamer or pipe.partial.shape[1] > ids.shape[1], at
            else:
                assert torch.equal(text_of(out), text_of(wanted)), at
                assert not streamed or streamed == text_of(out)[0].tolist(), at
                fell_back += any("Injected" in str(w.message) for w in caught)
        pipespec.detach(model)
        pipespec.attach(model, drafts, schedule=schedule)
        assert torch.equal(text_of(ours(model, ids, **given)), text_of(wanted)), at
    assert fell_back > count // 4


def test_an_error_in_any_line_that_streams_the_prompt(model):
    """The streamer gets the prompt once, or the error counts as its own and comes out."""

    def call(at: int | None, streamer: Recorder) -> int:
        return with_error_at(at, lambda: ours(model, streamer=streamer, max_new_tokens=3), "stream_prompt")[1]

    pipespec.attach(model, (), schedule="plain")
    wanted, lines = bare(model, max_new_tokens=3), call(None, Recorder())
    ends = []
    for at in range(1, lines + 1):
        streamer = Recorder()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SpeedWarning)
                call(at, streamer)
        except Injected:
            assert streamer.values == []
            ends.append("out")
        else:
            assert streamer.record == (IDS.tolist(), wanted[0, IDS.shape[1] :].tolist(), 1)
            ends.append("streamed")
    assert ends[0] == ends[-1] == "streamed"  # before the streamer is called, and after it


def test_errors_of_the_caller_come_out(model, attached):
    def fails(ids, scores):
        raise LookupError("of the processor")

    for given in ({"streamer": failing(0, LookupError, "of the streamer")}, {"logits_processor": [fails]}):
        with pytest.raises(LookupError, match="of the"):
            ours(model, **given)


class Once:
    """Does something when a text has 16 tokens, as a processor, a criterion or a streamer."""

    def __init__(self, action: Any) -> None:
        self.action, self.streamed = action, 0

    def __call__(self, ids, scores):
        if ids.shape[1] == 16:
            self.action(ids)
        return scores if isinstance(scores, torch.Tensor) else torch.zeros(len(ids), dtype=torch.bool)

    def put(self, value):
        self.streamed += value.numel()
        if self.streamed == 16:
            self.action(value)

    def end(self):
        pass


def _write(ids):
    ids[..., -1] = 7


IN_A_CALL = {
    "ids": lambda model: _write,
    "weights": lambda model: lambda ids: hostile.in_place(model),
    "hooks": lambda model: lambda ids: hostile.pre_hook(model),
    "code": lambda model: lambda ids: hostile.instance_forward(model),
    "other memory": lambda model: lambda ids: hostile.CHANGES["other .data"](model),
}


@pytest.mark.parametrize("change", IN_A_CALL)
@pytest.mark.parametrize("place", ["logits_processor", "stopping_criteria", "streamer"])
@pytest.mark.parametrize("schedule", ["lockstep", "plain"])
def test_a_change_within_a_call(change, place, schedule):
    """transformers goes on with it. A pipeline says that it cannot, and does so in the next call."""
    model, other = random_llama(3), random_llama(3)
    pipespec.attach(model, "ngram" if schedule == "lockstep" else (), schedule=schedule)

    def given(model):
        once = Once(IN_A_CALL[change](model))
        return {place: once if place == "streamer" else [once]}

    bare(other, **given(other))
    if (change, place) == ("ids", "streamer"):
        assert torch.equal(ours(model, **given(model)), bare(other))  # it has a copy
        return
    with pytest.raises(NotImplementedError, match="pipeline cannot follow"):
        ours(model, **given(model))
    assert torch.equal(ours(model), bare(other))


def test_what_a_call_may_do(model, attached):
    """A criterion that writes what is there, one that changes the model with the last token, and a processor that calls the model."""

    def writes(ids, scores, **_):
        ids.clamp_(min=0)
        return torch.zeros(len(ids), dtype=torch.bool)

    wanted = bare(model)
    assert torch.equal(ours(model, stopping_criteria=[writes]), wanted)
    processors = [lambda ids, scores: scores + model(ids[:, -4:]).logits[:, -1]]
    assert torch.equal(ours(model, logits_processor=processors), bare(model, logits_processor=processors))

    def changes(ids, scores, **_):
        if ids.shape[1] == 20:
            hostile.in_place(model)
        return torch.full((len(ids),), ids.shape[1] == 20)

    assert torch.equal(ours(model, stopping_criteria=[changes]), wanted[:, :20])
    assert torch.equal(ours(model), bare(model))


def test_a_processor_that_returns_too_many_scores(model, attached):
    def doubled(ids, scores):
        return torch.cat([scores, scores + 1], -1) if ids.shape[1] > 14 else scores

    with pytest.raises(NotImplementedError, match="the vocabulary has"):
        ours(model, logits_processor=[doubled])


def test_a_call_from_inside_of_a_call(model, attached):
    """The bare model can do that, so an attached one can."""
    inner = []
    streamer = Recorder(0, lambda: inner.append(ours(model, TWO[:1])))
    assert torch.equal(ours(model, streamer=streamer), bare(model))
    assert torch.equal(inner[0], bare(model, TWO[:1]))


def test_what_forwards_change_is_no_change_within_a_call(model):
    """Packed products that a first forward makes, and attributes that a criterion notes on the model."""
    target, ids = model, IDS

    def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        target.noted = True
        target.model.layers[0].seen = ids.shape[1]
        return torch.zeros(len(ids), dtype=torch.bool)

    wanted = bare(target, ids, max_new_tokens=6)
    with pipespec.Pipeline(target, "ngram") as pipe:
        assert torch.equal(pipe.generate(ids, max_new_tokens=6, do_sample=False, stopping_criteria=[note]), wanted)
        assert pipe.report.schedule != "transformers"


def test_a_change_that_a_call_inside_has_seen(model):
    """The call inside of a call looks at the model anew. The outer one still sees the change."""
    target = model

    def change(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] == IDS.shape[1] + 2:
            with torch.no_grad():
                target.model.norm.weight.mul_(-1)
            target.generate(IDS, max_new_tokens=1, do_sample=False)
        return torch.zeros(len(ids), dtype=torch.bool)

    pipespec.attach(target, "ngram")
    with pytest.raises(NotImplementedError, match="the model has changed while it generated"):
        target.generate(IDS, max_new_tokens=8, do_sample=False, stopping_criteria=[change])


def test_a_change_by_a_function_that_a_processor_of_transformers_calls(model):
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        if len(ids) == IDS.shape[1] + 2:
            with torch.no_grad():
                model.model.norm.weight.mul_(-1)
        return list(range(60))

    with (
        pipespec.Pipeline(model, "ngram") as pipe,
        pytest.raises(NotImplementedError, match="the model has changed while it generated"),
    ):
        pipe.generate(IDS, max_new_tokens=8, do_sample=False, prefix_allowed_tokens_fn=allowed)


def test_a_merge_of_weights_is_no_change_to_a_call_of_another_thread():
    """It changes where they lie, and neither a parameter nor a version."""
    model = random_llama(3)
    linear = model.model.layers[0].self_attn.q_proj
    before = known.Record(model)
    with known.moving(model):
        linear.weight.data = linear.weight.data.clone()
    held = before.successor(model)
    assert held.successor(model) is held
    linear.weight.data = linear.weight.data.clone()
    assert held.successor(model) is None
    with torch.no_grad():
        linear.weight.mul_(2)
    assert before.successor(model) is None  # the merge hides no change of values
    held = known.Record(model)
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    assert held.successor(model) is None
