"""Steps that need no host: on threads (streams), in rounds (lockstep), and on a GPU as captured graphs. The text is that of plain decoding.

Attention by row lengths rounds differently from sdpa with a mask, and a wide step differently from a narrow one. In float32 logits differ by a few units
in the last place; no text here comes that close to a tie. So the texts are compared with ``generate()`` under sdpa.
"""

import contextlib
import copy
import gc
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipespec import NgramDraft, Pipeline
from pipespec.config import WIDTH, SpeculationConfig
from pipespec.engine.cache import RowCache
from pipespec.engine.cached_text import CachedText
from pipespec.engine.forward import forward
from pipespec.engine.stage import ModelDraft
from pipespec.errors import NotCapturable
from pipespec.schedules.base import SpeedWarning, StageFailure
from pipespec.schedules.graphs.capture import _running_modules
from pipespec.schedules.graphs.driver import GraphedDriver
from pipespec.schedules.graphs.rounds import round_steps
from pipespec.schedules.lockstep import LockstepDriver
from tests.conftest import always_right, always_wrong, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Faulty
from tests.support.ways import driver_of
from tests.waiting import drafts_keep_up

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
NEW = 24
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": 0, "top_k": 0}


@pytest.fixture(scope="module")
def model():
    return random_llama(7)


def drafts_of(model, kinds: str):
    make = {"r": always_right, "g": lambda m: noisy(m, 0.03, seed=1), "b": lambda m: noisy(m, 0.2, seed=2), "w": always_wrong}  # fmt: skip
    return [make[kind](model) for kind in kinds]


def batch(rows: int, seed: int = 2):
    return left_pad(random_prompts(rows, seed=seed, shortest=3))


@pytest.fixture(scope="module")
def expected(model):
    """The text of the target alone, under sdpa, by ``generate()``. Each is computed once."""
    target, texts = copy.deepcopy(model), {}
    assert target.config._attn_implementation == "sdpa"

    def text(ids, options, mask=None):
        key = repr((ids.tolist(), options, None if mask is None else mask.tolist()))
        if key not in texts:
            texts[key] = target.generate(ids, attention_mask=mask, **options)
        return texts[key]

    return text


def make(model, drafts, how: str, device: str = "cpu", **options):
    """A pipeline with steps that need no host, or with ``how="steps"`` lockstep on the host. ``how``: its schedule. On another device than the CPU it runs copies."""
    if device != "cpu":
        model, drafts = copy.deepcopy(model).to(device), [draft.to(device) for draft in drafts]
    if how == "streams":
        return Pipeline(model, drafts, schedule="streams", **options)
    if how == "steps":
        return Pipeline(model, drafts, schedule="lockstep", graphs=False, **options)
    return Pipeline(model, drafts, schedule=how, graphs=True, **options)


def paced(pipe, how: str, ids, mask=None):
    """Around a call with ``GREEDY``: in an asynchronous schedule, the target waits for the drafts before each step."""
    starts = torch.full((len(ids),), ids.shape[1]) if mask is None else mask.sum(1)
    return drafts_keep_up(pipe, (starts + NEW).tolist()) if how == "streams" else contextlib.nullcontext()


def margin_where_they_part(target, wanted: torch.Tensor, got: torch.Tensor) -> float:
    """The difference of the logits of the first two tokens that differ, of the largest logit; 0 for equal texts ``[S]``."""
    if torch.equal(wanted, got):
        return 0.0
    at = int((got != wanted).nonzero()[0])
    with torch.no_grad():
        logits = target(wanted[None, :at].to(target.device)).logits[0, -1].float()
    return float((logits[wanted[at]] - logits[got[at]]).abs() / logits.abs().max())


# ---- caches and calls after calls


def test_buffers_and_scheduler_are_reused(model, expected):
    """Scheduler and static buffers stay from call to call, with other batches in between. Only a larger limit needs new ones."""
    with make(model, drafts_of(model, "g"), "streams") as pipe:
        driver = driver_of(pipe)
        seen = []
        for rows, new in ((1, 9), (3, 9), (1, 12), (3, 5), (1, 70), (1, 10)):
            ids, mask = batch(rows)
            options = GREEDY | {"max_new_tokens": new}
            assert torch.equal(pipe.generate(ids, attention_mask=mask, **options), expected(ids, options, mask))
            seen.append((driver.scheduled.scheduler, driver.target.buffers.version))
        numbers = [number for _, number in seen]
        assert numbers[0] == numbers[2] != numbers[1] == numbers[3]
        assert numbers[4] not in numbers[:4]
        assert numbers[4] == numbers[5]
        assert seen[1][0] is seen[2][0] is seen[3][0]  # the block holds three rows from the second call on
        assert seen[4][0] is seen[5][0]
        # Powers of two, and room for a step: few sizes, and so few captures.
        sizes = [buffers.cache.capacity - 64 for buffers in driver.target.all_buffers()]
        assert all(size & (size - 1) == 0 for size in sizes)
        for rows in range(1, 9):
            ids, mask = batch(rows)
            pipe.generate(ids, attention_mask=mask, **GREEDY | {"max_new_tokens": 2})
        assert len(driver.target.all_buffers()) == 4


def test_lengths_by_the_device():
    """``follow``, ``set_lengths`` and ``take_rows`` of the cache, on which the step body rests."""
    twin = random_llama(3)
    twin.set_attn_implementation("pipespec")
    a, b = (RowCache.for_model(twin, 2, 32, static=True) for _ in range(2))
    ids = torch.stack(random_prompts(2, seed=1, shortest=9, longest=9))
    for cache in (a, b):
        forward(twin, ids[:, :6], cache, keep=0)
    lengths = torch.tensor([6, 6], dtype=torch.int32)
    a.follow(lengths)
    lengths.copy_(torch.tensor([3, 5]))  # as a kernel would, later
    b.truncate([3, 5])
    assert torch.equal(forward(twin, ids[:, 6:9], a, keep=3), forward(twin, ids[:, 6:9], b, keep=3))
    assert a.device_lengths is lengths
    assert lengths.tolist() == [3, 5]  # only the device changes them
    a.set_lengths(lengths.tolist())
    assert a.lengths == (3, 5)
    a.set_lengths([6, 7])
    b.truncate([6, 7])
    assert a.lengths == b.lengths
    assert torch.equal(forward(twin, ids[:, :1], a, keep=1), forward(twin, ids[:, :1], b, keep=1))
    with pytest.raises(ValueError, match="capacity of 32"):
        a.set_lengths([33, 0])
    c = RowCache.for_model(twin, 2, 16)
    c.take_rows([(b, 0), (b, 1)], [4, 7])
    b.truncate([4, 7])
    assert c.lengths == (4, 7)
    torch.testing.assert_close(forward(twin, ids[:, :2], c, keep=2), forward(twin, ids[:, :2], b, keep=2))
    with pytest.raises(ValueError, match="of a cache that holds"):
        c.take_rows([(b, 0), (b, 1)], [9, 9])
    with pytest.raises(ValueError, match="of another shape"):
        c.take_rows([None, (RowCache.for_model(random_llama(1, layers=1), 1, 16), 0)], [0, 0])


# ---- failures


@pytest.mark.parametrize("how", ["streams", "lockstep", "steps"])
@pytest.mark.parametrize(("stage", "call"), [(0, 1), (0, 5), (1, 1), (1, 4)])
def test_a_draft_that_fails(model, expected, how, stage, call):
    """In the prefill or in a step: one warning names it, the text is the same, and the next call runs it again."""
    drafts = [Faulty.like(draft) for draft in drafts_of(model, "gg")]
    ids, mask = batch(2)
    options = GREEDY | {"attention_mask": mask}
    with make(model, drafts, how, lookahead=3) as pipe:
        wanted = expected(ids, GREEDY, mask)
        drafts[stage].set(fail_at=call)
        with (
            paced(pipe, how, ids, mask),  # each draft takes at least one step per step of the target
            pytest.warns(StageFailure, match=rf"draft stage {stage} failed \(ArithmeticError: made to fail\)") as told,
        ):
            assert torch.equal(pipe.generate(ids, **options), wanted)
        assert [warning.filename for warning in told] == [__file__]
        drafts[stage].set()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(pipe.generate(ids, **options), wanted)
        assert pipe.report.schedule == pipe.schedule


@pytest.mark.parametrize("how", ["streams", "lockstep"])
def test_a_draft_without_memory(model, expected, how, monkeypatch):
    """The call runs without it, the next call with it."""
    ids, _ = batch(1)
    drafts = drafts_of(model, "gb")
    real = RowCache.for_model

    def full(of, *sizes, **options):
        if of is drafts[0]:
            raise torch.OutOfMemoryError("no memory is left")
        return real(of, *sizes, **options)

    with make(model, drafts, how) as pipe:
        wanted = expected(ids, GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(RowCache, "for_model", full)
            with (
                pytest.warns(SpeedWarning, match=r"draft 0 cannot be prepared \(OutOfMemoryError: no memory is left\)"),
                pytest.warns(StageFailure, match=r"draft stage 0 failed \(OutOfMemoryError: no memory is left\)"),
            ):
                assert torch.equal(pipe.generate(ids, **GREEDY), wanted)
            assert pipe.report.schedule == "lockstep"
            assert "draft 0 cannot be prepared (OutOfMemoryError: no memory is left)" in str(pipe.report)
            assert pipe.report.stages[1].steps > 0
        with paced(pipe, how, ids):
            assert torch.equal(pipe.generate(ids, **GREEDY), wanted)
        assert pipe.report.schedule == how
        assert pipe.report.decisions is None
        assert pipe.report.stages[0].steps > 0


def test_a_target_that_fails(model, expected):
    target = Faulty.like(model)
    ids, _ = batch(1)
    with make(target, drafts_of(model, "g"), "streams", lookahead=2) as pipe:  # at least eight steps
        wanted = expected(ids, GREEDY)
        target.set(fail_at=8)
        with pytest.raises(
            RuntimeError, match=r"^the target \(stage 1\) failed: ArithmeticError: made to fail"
        ) as caught:
            pipe.generate(ids, **GREEDY)
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert pipe.partial.shape[1] >= ids.shape[1]
        assert torch.equal(pipe.partial, wanted[:, : pipe.partial.shape[1]])
        target.set()
        assert torch.equal(pipe.generate(ids, **GREEDY), wanted)


# ---- calls that need the host


@pytest.mark.parametrize("how", ["streams", "lockstep"])
def test_calls_that_need_the_host_run_in_lockstep(model, expected, how):
    """One warning for each pipeline and reason names the processors. Kinds of processors: ``tests/same_text``."""
    ids, mask = batch(2)
    arguments = GREEDY | {"repetition_penalty": 1.3, "suppress_tokens": [9]}
    reason = "position by position: RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor; leave them out"
    with make(model, drafts_of(model, "g"), how) as pipe:
        with pytest.warns(SpeedWarning, match=reason) as told:
            texts = [pipe.generate(ids, attention_mask=mask, **arguments) for _ in range(2)]
        assert all(torch.equal(text, expected(ids, arguments, mask)) for text in texts)
        assert len(told) == 1
        assert pipe.report.schedule == "lockstep"
        assert re.search(reason, str(pipe.report))
        assert pipe.report.stages[-1].accepted > 0
        assert torch.equal(pipe.generate(ids, attention_mask=mask, **GREEDY), expected(ids, GREEDY, mask))
        assert pipe.report.schedule == how
        assert pipe.report.decisions is None


@pytest.mark.parametrize("how", ["streams", "lockstep"])
def test_autocast(model, how):
    """Autocast holds for one thread and for a time: other threads do not have it, and a graph would keep it."""
    ids, _ = batch(1)
    with make(model, drafts_of(model, "g"), how) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # Under the attention of the pipeline.
            wanted = type(pipe.target).generate(pipe.target, ids, **GREEDY)
            with pytest.warns(SpeedWarning, match="autocast"):
                got = pipe.generate(ids, **GREEDY)
            # Steps of different widths round differently in 16 bits, on some processors.
            assert margin_where_they_part(pipe.target, wanted[0], got[0]) < 0.02
            assert "autocast" in str(pipe.report)
        pipe.generate(ids, **GREEDY)
        assert pipe.report.schedule == how
        assert pipe.report.decisions is None


@pytest.mark.parametrize("how", ["streams", "lockstep"])
def test_inference_mode_of_some_calls(model, how):
    """Buffers of a first call serve later calls, in any inference mode."""
    ids, _ = batch(1)
    with make(model, drafts_of(model, "g"), how) as pipe:
        texts = []
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                texts.append(pipe.generate(ids, seed=2, **SAMPLED | {"top_k": 9}).clone())
        assert all(torch.equal(text, texts[0]) for text in texts)


# ---- rounds


@pytest.mark.parametrize(
    ("lookahead", "steps"),
    [
        ((), [(0, 1)]),
        ((3,), [(0, 2), (0, 1), (0, 1), (1, 4)]),
        # The middle stage takes 4 tokens in steps of 3 at most: two steps, each after a full lookahead of the first stage.
        ((2, 4), [(0, 3), (0, 1), (1, 4), (0, 2), (0, 1), (1, 3), (2, 5)]),
        ((0, 2), [(1, 2), (1, 1), (2, 3)]),
        ((2, 0), [(2, 1)]),
    ],
)
def test_the_steps_of_a_round(lookahead, steps):
    assert round_steps(SpeculationConfig(lookahead=lookahead)) == steps


@pytest.mark.parametrize(
    ("kinds", "lookahead", "steps"),
    [
        ("i", (3,), [(0, WIDTH), (1, 4)]),
        # Before each step of the model, which may have to draft without it.
        ("im", (3, 2), [(0, WIDTH), (1, 5), (0, WIDTH), (1, 4), (2, 3)]),
        # It passes on what the model has drafted. Its own tokens, up to three and one of the target, are new to the model.
        ("mi", (2, 3), [(0, 4), (0, 1), (1, WIDTH), (2, 4)]),
        # The model in the middle may accept both tokens of the index, the target all three of the model.
        ("mim", (2, 2, 3), [(0, 4), (0, 1), (1, WIDTH), (2, 4), *[(0, 3), (0, 1), (1, WIDTH), (2, 3)] * 2, (3, 4)]),
        ("ii", (2, 3), [(0, WIDTH), (1, WIDTH), (2, 4)]),
        ("mi", (0, 0), [(2, 1)]),
    ],
)
def test_the_steps_of_a_round_with_an_index(kinds, lookahead, steps):
    drafts = tuple({"i": NgramDraft(), "m": ModelDraft()}[kind] for kind in kinds)
    assert round_steps(SpeculationConfig(drafts=drafts, lookahead=lookahead, graphs=True)) == steps


def test_the_first_steps_of_a_round_behind_others():
    """A model has a column for each plain round, and before an index for each token of the longest round."""
    config = SpeculationConfig(lookahead=(2,))
    assert round_steps(config, longest=6, plain=1) == [(0, 3), (0, 1), (1, 3)]
    with_index = SpeculationConfig(drafts=(ModelDraft(), NgramDraft()), lookahead=(2, 2), graphs=True)
    assert round_steps(with_index, longest=6, plain=1) == [(0, 8), (0, 1), (1, WIDTH), (2, 3)]


@pytest.mark.parametrize(("kind", "rows"), [("r", 1), ("g", 3), ("b", 1), ("w", 3)])
def test_a_round_does_what_lockstep_does(model, kind, rows, monkeypatch):
    """With one draft, all counts are the same, not only the text."""
    monkeypatch.setattr(
        CachedText, "reads_last", False
    )  # else the drafts begin after the first token in the one, before it in the other
    ids, mask = batch(rows, seed=8)
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": 50}
    drafts = drafts_of(model, kind)
    reports = []
    for graphs in (False, True):
        with Pipeline(model, drafts, lookahead=5, graphs=graphs, schedule="lockstep") as pipe:
            text = pipe.generate(ids, **options)
            # Captured steps have another form of the forward.
            reports.append(([replace(stage, forward="") for stage in pipe.report.stages], text.tolist()))
    assert reports[0] == reports[1]


# ---- pipelines


def test_the_attention_is_borrowed(model):
    """Two pipelines may share a model. The last one that closes restores its attention, and so does garbage collection."""
    twin = copy.deepcopy(model)
    ids, _ = batch(1)
    first = make(twin, drafts_of(model, "g"), "streams")
    second = make(twin, [], "plain")
    assert twin.config._attn_implementation == "pipespec"
    first.close()
    assert twin.config._attn_implementation == "pipespec"
    wanted = second.generate(ids, **GREEDY)
    second.close()
    second.close()
    assert twin.config._attn_implementation == "sdpa"
    assert torch.equal(second.generate(ids, **GREEDY), wanted)  # opened again
    assert twin.config._attn_implementation == "pipespec"
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None
    assert twin.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_copies_have_the_models_own_attention(model, own, tmp_path):
    """A copy made while the attention is borrowed has the model's own, as nothing restores it there."""
    target = copy.deepcopy(model)
    target.set_attn_implementation(own)
    ids, mask = batch(2)
    wanted = target.generate(ids, attention_mask=mask, **GREEDY)
    with make(target, drafts_of(model, "g"), "streams") as pipe:
        made = [copy.deepcopy(target), pickle.loads(pickle.dumps(target))]
        assert target.config._attn_implementation == "pipespec"
        assert torch.equal(pipe.generate(ids, attention_mask=mask, **GREEDY), wanted)
        target.save_pretrained(tmp_path)
    for other in made:
        assert type(other.config._attn_implementation) is str
        assert {m.config._attn_implementation for m in other.modules() if hasattr(m, "config")} == {own}
        assert torch.equal(other.generate(ids, attention_mask=mask, **GREEDY), wanted)
    assert "pipespec" not in (tmp_path / "config.json").read_text()
    target.set_attn_implementation("pipespec")
    with make(target, drafts_of(model, "g"), "streams"):
        assert copy.deepcopy(target).config._attn_implementation == "pipespec"  # its own


def test_a_driver_is_collected_with_its_threads(model, no_thread_is_left):
    ids, _ = batch(1)
    pipe = make(model, drafts_of(model, "g"), "streams")
    pipe.generate(ids, **GREEDY)
    held = weakref.ref(driver_of(pipe).target)
    del pipe
    gc.collect()
    assert held() is None
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_cannot_be_captured_runs_without_graphs(model, monkeypatch):
    """Streams become workers, or lockstep without worker processes. One warning names the module."""

    def refuse(self, *args, **kwargs):
        raise NotCapturable("target", "model.layers.0.mlp (Strange)", "RuntimeError: it reads its numbers")

    class InThisProcess(LockstepDriver):
        schedule = "workers"

    def no_processes(*args):
        raise RuntimeError("no processes")

    monkeypatch.setattr(GraphedDriver, "__init__", refuse)
    monkeypatch.setattr("pipespec.schedules.asynchronous.local.LocalDriver", InThisProcess)
    draft, ids = drafts_of(model, "g"), batch(1)[0]
    with pytest.warns(
        SpeedWarning, match=r"target .* graph: model\.layers\.0\.mlp \(Strange\): .*'workers' is used"
    ) as told:
        pipe = Pipeline(model, draft, schedule="streams")
    assert len(told) == 1
    with pipe:
        assert isinstance(driver_of(pipe), InThisProcess)
        pipe.generate(ids, **GREEDY)
        assert pipe.report.schedule == pipe.schedule == pipe.config.schedule == "workers"
    monkeypatch.setattr("pipespec.schedules.asynchronous.local.LocalDriver", no_processes)
    for how in ({"schedule": "streams"}, {"schedule": "lockstep", "graphs": True}):
        with pytest.warns(SpeedWarning, match="in lockstep, without graphs") as told:
            pipe = Pipeline(model, draft, **how)
        assert len(told) == 1
        assert pipe.schedule == "lockstep"
        assert not isinstance(driver_of(pipe), GraphedDriver)


@pytest.mark.parametrize("ignores", [False, True])
def test_a_model_with_an_attention_of_its_own(model, expected, monkeypatch, ignores):
    """The warning comes before any work, and the other models have their attention back."""

    def refuse(name):
        if not ignores:
            raise ValueError("no such attention here")

    twin, draft = copy.deepcopy(model), drafts_of(model, "g")
    monkeypatch.setattr(twin, "set_attn_implementation", refuse)
    cause = "it stays as it is" if ignores else "no such attention here"
    with pytest.warns(
        SpeedWarning, match=f"target .* graph: LlamaForCausalLM's sdpa attention, .*: {cause}; the steps run one by one"
    ):
        pipe = Pipeline(twin, draft, graphs=True, schedule="lockstep")
    assert draft[0].config._attn_implementation == "sdpa"
    ids, _ = batch(1)
    assert torch.equal(pipe.generate(ids, **GREEDY), expected(ids, GREEDY))


def test_the_module_that_was_running_is_named(model):
    twin = copy.deepcopy(model)
    ids, _ = batch(1)
    with _running_modules(twin) as running:
        twin(ids)
        assert running == []
        seen = []

        def reached(*args):
            """Runs in another thread, inside of the model."""
            seen.append(list(running))

        hook = twin.model.layers[0].register_forward_pre_hook(reached)
        other = threading.Thread(target=twin, args=(ids,))
        other.start()
        other.join()
        hook.remove()
        assert seen == [[]]

        def fails(*args, **kwargs):
            raise RuntimeError("no")

        twin.model.layers[1].mlp.act_fn.forward = fails
        with pytest.raises(RuntimeError, match="no"):
            twin(ids)
        assert running[-1].startswith("model.layers.1.mlp.act_fn (")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())


# ---- on a GPU


def same_text(selected: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    """Run some cells of the matrix of texts on the GPU, in another process."""
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/same_text"]
    return subprocess.run(
        [*command, "-k", selected],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PIPESPEC_TEST_DEVICE": "cuda"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.gpu
@GPU[1]
def test_captured_one_launch_at_a_time() -> None:
    """No kernel waits for another one: with one queue, and launches that block, every call ends."""
    ran = same_text("captured-two-greedy", CUDA_LAUNCH_BLOCKING="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["plain", "lockstep", "streams"])
def test_prompts_of_many_lengths(model, how, device) -> None:
    """On a GPU short ones are read by graphs, with padding, some of them in several pieces."""
    target = copy.deepcopy(model).to(device)
    drafts = [] if how == "plain" else [draft.to(device) for draft in drafts_of(model, "g")]
    used: set[int] = set()
    with Pipeline(target, drafts, schedule=how, graphs=True) as pipe:
        for rows, (shortest, longest) in itertools.product((1, 2), ((2, 9), (60, 66), (250, 460), (600, 900))):
            ids, mask = left_pad(random_prompts(rows, seed=rows, shortest=shortest, longest=longest))
            wanted = model.generate(ids, attention_mask=mask, **GREEDY)
            for _ in range(2):
                found = pipe.generate(ids.to(device), attention_mask=mask.to(device), **GREEDY).cpu()
                assert torch.equal(found, wanted), (rows, ids.shape)
            used |= {width for buffers in driver_of(pipe).target.all_buffers() for width, _ in buffers.prompt_graphs}
    assert used >= {64, 512} or device == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_stages_on_two_gpus(model, expected):
    """The block lies in pinned memory. A round needs one GPU; the error says so."""
    ids, mask = batch(2)
    wanted = expected(ids, GREEDY, mask)
    draft, target = drafts_of(model, "g")[0].to("cuda:0"), copy.deepcopy(model).to("cuda:1")
    with Pipeline(target, [draft], schedule="streams") as pipe:
        got = pipe.generate(ids.to("cuda:1"), attention_mask=mask.to("cuda:1"), **GREEDY)
    assert torch.equal(got.cpu(), wanted)
    with pytest.raises(ValueError, match="they must be on one device"):
        Pipeline(target, [draft], graphs=True, schedule="lockstep")


def sanitizer() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


@pytest.mark.gpu
@pytest.mark.sanitizer
@GPU[1]
@pytest.mark.skipif(sanitizer() is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("what", ["memcheck", "initcheck", "racecheck"])
def test_captured_under_a_sanitizer(what: str) -> None:
    tool = sanitizer()
    assert tool is not None
    ran = same_text(
        "streams and captured-two-sampled and not rows and not without",
        (tool, "--tool", what, "--target-processes", "all", "--error-exitcode", "9"),
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


# A profiler records the calls of all threads. The launcher's waiter has one cudaEventSynchronize() per step, for which no step waits.
SYNCHRONISES = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize"}  # fmt: skip


def synchronisations(events) -> int:
    """How many of a profile's calls let a launching thread wait."""
    return sum(event.name in SYNCHRONISES for event in events)


@pytest.mark.gpu
@GPU[1]
@pytest.mark.parametrize("how", ["plain", "lockstep", "streams"])
def test_no_step_waits_for_the_device(model, how) -> None:
    """A text that is four times as long has as many synchronisations: those of the prefill, and of the call's begin and end. Only the end of a call
    that leaves a step behind has one less, and the next call one more."""
    from torch.profiler import ProfilerActivity, profile

    ids, _ = batch(1)
    ids = ids.cuda()
    counts, launches = [], []
    with make(model, drafts_of(model, "" if how == "plain" else "g"), how, "cuda") as pipe:
        for new in (40, 160, 40, 160):
            options = GREEDY | {"max_new_tokens": new}
            pipe.generate(ids, **options)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                pipe.generate(ids, **options)
            events = profiled.events()
            counts.append(synchronisations(events))
            launches.append(sum(event.name == "cudaGraphLaunch" for event in events))
    assert launches[1] > launches[0] > 0
    assert abs(counts[2] - counts[3]) <= 2, f"synchronisations for 40 and 160 tokens: {counts[2:]}"


@pytest.mark.gpu
@GPU[1]
@pytest.mark.parametrize("how", ["plain", "lockstep", "streams"])
def test_cleared_workspaces(model, how) -> None:
    """As a compiled model's captures clear them: the graphs have their own, and no other allocation gets that memory."""
    ids, _ = batch(1)
    ids = ids.cuda()
    with make(model, drafts_of(model, "" if how == "plain" else "g"), how, "cuda") as pipe:
        wanted = pipe.generate(ids, **GREEDY)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((1 << 20,), 7, dtype=torch.int64, device="cuda") for _ in range(64)]
        assert torch.equal(pipe.generate(ids, **GREEDY), wanted)
        assert all(bool((memory == 7).all()) for memory in others)
