"""Parts of SPD that run at the same time in one machine: stages in threads of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipespec import trust
from pipespec.models import devices
from pipespec_spd import SpeculativePipeline, local, pipeline
from pipespec_spd.chain import ChainDrafter
from pipespec_spd.draft_module import DraftModule, DraftModuleConfig
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.pipespec.tiny_models import model_of
from tests.spd.drafters import Blind, Failing
from tests.waiting import SECONDS

LAYERS = 4
NEW = 16


@pytest.fixture(scope="module")
def model():
    return random_llama(3, layers=LAYERS)


def calls():
    ids, mask = left_pad(random_prompts(3, seed=4, longest=9))
    one = random_prompts(1, seed=6, shortest=1, longest=1)[0][None]
    yield ids, {"attention_mask": mask, "do_sample": False}
    yield ids, {"attention_mask": mask, "do_sample": True, "seed": 5}
    yield one, {"do_sample": False, "eos_token_id": list(range(2, 300, 9)), "pad_token_id": 0}
    yield one, {"do_sample": True, "seed": 1, "repetition_penalty": 1.2}


def test_a_fork_has_a_chain_of_its_own(model):
    for drafter in (ChainDrafter([model]), Blind(320)):
        assert type(drafter.for_fork()) is type(drafter)
        assert (drafter.for_fork() is drafter) == isinstance(drafter, Blind)


# ---- stages on devices of their own


@pytest.fixture(scope="module")
def spread(model):
    return SpeculativePipeline(model, [noisy(model, 0.02)], stages=[2, 1, 1], devices=["cpu"] * 3)


def test_the_text_of_stages_at_once(model, spread):
    """Text, cycles and acceptance are those of stages in turn."""
    turn = SpeculativePipeline(model, [noisy(model, 0.02)], stages=[2, 1, 1])
    for ids, options in calls():
        out = spread.generate(ids, max_new_tokens=NEW, **options)
        assert out.tolist() == turn.generate(ids, max_new_tokens=NEW, **options).tolist()
        assert (spread.report.cycles, spread.report.accepted) == (turn.report.cycles, turn.report.accepted)
        assert spread.report.cycles == 0 or min(spread.report.stage_seconds) > 0


def test_stages_run_at_the_same_time(model):
    """In a cycle with work for both stages, each waits within its step for the other one."""
    pipe = SpeculativePipeline(model, Blind(320), stages=2, devices=["cpu", "cpu"])
    driver = pipe._driver
    meeting, full, met = threading.Barrier(2, timeout=SECONDS), [False], []
    for stage in driver.stages:

        def step(*arguments, real=stage.step):
            if full[0]:
                met.append(meeting.wait())
            return real(*arguments)

        stage.step = step
    launch = driver._launch

    def launched(work):
        full[0] = all(work)
        launch(work)

    driver._launch = launched
    ids = torch.tensor([[5, 6]])
    out = pipe.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=6, do_sample=False))
    assert len(met) >= 2


def test_a_stage_that_fails_and_an_interrupted_call(model, spread):
    ids = torch.tensor([[5, 6, 7]])
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    stage = spread._driver.stages[1]
    real, seen = stage.step, []

    def fails(*arguments):
        seen.append(0)
        if len(seen) == 6:
            raise ArithmeticError("made to fail")
        return real(*arguments)

    stage.step = fails
    try:
        with pytest.raises(ArithmeticError, match="made to fail"):
            spread.generate(ids, max_new_tokens=NEW, do_sample=False)
    finally:
        stage.step = real
    assert torch.equal(spread.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)

    class Interrupts(Failing):
        def draft(self, requests):
            raise KeyboardInterrupt

    spread._driver.drafter, drafter = Interrupts("none"), spread._driver.drafter
    try:
        with pytest.raises(KeyboardInterrupt):
            spread.generate(ids, max_new_tokens=NEW, do_sample=False)
    finally:
        spread._driver.drafter = drafter
    assert torch.equal(spread.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)


@pytest.mark.parametrize("continues", [False, True], ids=["", "with a cache"])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_thread_that_cannot_start_leaves_no_step_to_the_next_call(model, monkeypatch, fails_at, continues):
    """A step that stays would write the old token into the next call's cache."""
    prompts = [torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 5, 6, 7, 8, 7]])]
    wanted = [model.generate(ids, max_new_tokens=NEW, do_sample=False) for ids in prompts]
    pipe = SpeculativePipeline(model, "ngram", stages=[2, 1, 1], devices=["cpu"] * 3)
    first, lent = prompts[0], {}
    if continues:  # it is returned at once, while the steps may be under way
        before = SpeculativePipeline(model, "ngram", stages=[2, 1, 1]).generate(
            first, max_new_tokens=4, return_dict_in_generate=True
        )
        first, lent = torch.cat([before.sequences, first], 1), {"past_key_values": before.past_key_values}
    start, count = threading.Thread.start, []

    def fails(thread) -> None:
        if thread.name.startswith("pipespec-stage"):
            count.append(thread)
            if len(count) == fails_at:
                raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pipe.generate(first, max_new_tokens=NEW, do_sample=False, **lent)
    for ids, text in zip(prompts[1:] + prompts, wanted[1:] + wanted, strict=True):
        assert torch.equal(pipe.generate(ids, max_new_tokens=NEW, do_sample=False), text)


def test_no_lock_in_python_is_held_where_the_call_waits(model, spread):
    """The error of a signal handler may come between any two instructions. A lock of the standard library would stay locked, and the program would hang."""
    ids = torch.tensor([[5, 6, 7]])
    spread.generate(ids, max_new_tokens=NEW, do_sample=False)  # the threads have started
    driver, seen = spread._driver, set()

    def profiled(real):
        def run(*arguments):
            sys.setprofile(lambda frame, event, argument: seen.add(Path(frame.f_code.co_filename)))
            try:
                return real(*arguments)
            finally:
                sys.setprofile(None)

        return run

    launch, collect = driver._launch, driver._collect
    driver._launch, driver._collect = profiled(launch), profiled(collect)
    try:
        spread.generate(ids, max_new_tokens=NEW, do_sample=False)
    finally:
        driver._launch, driver._collect = launch, collect
    assert Path(local.__file__) in seen
    assert not {
        path for path in seen if path == Path(threading.__file__) or Path(futures.__file__).parent in path.parents
    }


def test_a_thread_generates_when_the_main_thread_has_ended(tmp_path):
    """``concurrent.futures`` refuses work then."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import threading, time, torch
from concurrent.futures import ThreadPoolExecutor
from pipespec_spd import SpeculativePipeline
from tests.conftest import random_llama

pipe = SpeculativePipeline(random_llama(3), "ngram", stages=2, devices=["cpu", "cpu"])
pool = ThreadPoolExecutor(1)

def run():
    try:
        while True:
            pool.submit(int)
            time.sleep(0.01)
    except RuntimeError:
        print("refused", pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4).shape[1])

threading.Thread(target=run).start()
"""
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=3 * SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "refused 7\n"), done.stderr


def test_stages_at_once_under_autocast(model):
    """Autocast is a setting of the caller's thread, and holds in the stages' threads, too."""
    draft, seen = noisy(model, 0.02), set()
    turn = SpeculativePipeline(model, [draft], stages=2)
    once = SpeculativePipeline(model, [draft], stages=2, devices=["cpu", "cpu"])

    def observe(module, args, output):
        seen.add(output.dtype)

    trust(observe)
    hooks = [stage.layers[0].mlp.down_proj.register_forward_hook(observe) for stage in once._driver.stages]
    for ids, options in calls():
        with torch.autocast("cpu", torch.bfloat16):
            outs = [
                pipe.generate(
                    ids,
                    max_new_tokens=NEW,
                    output_logits=True,
                    return_dict_in_generate=True,
                    use_cache=False,
                    **options,
                )
                for pipe in (turn, once)
            ]
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        for one, other in zip(outs[0].logits, outs[1].logits, strict=True):
            assert torch.equal(one, other)
    assert seen == {torch.bfloat16}
    for hook in hooks:
        hook.remove()


def looks_split(monkeypatch, model, layer: int) -> None:
    """The layers of a model from ``layer`` on are on another device, as far as it is asked. Their weights stay."""
    real = devices.LayerDevices.of

    def of(asked):
        found = real(asked)
        if asked is not model:
            return found
        other = torch.device("cpu", 0)
        return replace(found, layers=(*found.layers[:layer], *[other] * (len(found.layers) - layer)))

    monkeypatch.setattr(devices.LayerDevices, "of", of)
    assert devices.LayerDevices.of(model).is_split


def test_stages_on_several_devices(monkeypatch):
    """What only a split of its own could make of the model, a pipeline that places the stages does itself; or it refuses by name."""
    model = random_llama(3, layers=LAYERS)
    pipe = SpeculativePipeline(model, stages=2, devices=["cpu", "cpu"])
    turn = SpeculativePipeline(model, stages=2)
    ids = torch.tensor([[5, 6, 7]])
    wanted = turn.generate(ids, max_new_tokens=NEW, do_sample=False)
    looks_split(monkeypatch, model, 2)
    assert torch.equal(pipe.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)
    out = pipe.generate(ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert out.past_key_values.get_seq_length() == wanted.shape[1] - 1
    with pytest.raises(ValueError, match="spread over cpu, cpu:0, and no hook"):
        turn.generate(ids, max_new_tokens=NEW, do_sample=False)


def test_recurrent_stages_on_several_devices_return_no_cache(monkeypatch):
    model = model_of("qwen3_next, recurrent")
    pipe = SpeculativePipeline(model, stages=2, devices=["cpu", "cpu"])
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    wanted = pipe.generate(ids, **options).sequences
    looks_split(monkeypatch, model, 2)
    with pytest.raises(ValueError, match=r"recurrent layers.*devices=.*use_cache=False"):
        pipe.generate(ids, **options)
    assert torch.equal(pipe.generate(ids, use_cache=False, **options).sequences, wanted)


def test_drafts_are_loaded_where_tokens_enter(model, tmp_path, monkeypatch):
    """Draft models and modules given as paths, on the device of the first stage."""
    other = torch.device("cpu", 0)
    monkeypatch.setattr(pipeline, "stage_devices", lambda devices, partition: [other] * partition.stages)
    config = DraftModuleConfig.for_target(model, ((0, 2), (2, 4)))
    DraftModule.of_target(model, config).save(tmp_path / "module")
    noisy(model, 0.02).save_pretrained(tmp_path / "draft")
    loaded = []
    for owner, name in ((pipeline, "load_model"), (DraftModule, "load")):
        real = getattr(owner, name)

        def watched(*args, real=real, **options):
            loaded.append(options.get("device"))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, watched)
    for drafter in ("module", "draft"):
        loaded.clear()
        pipe = SpeculativePipeline(model, tmp_path / drafter, stages=2, devices=["cpu", "cpu"])
        assert loaded == [None, other]
        pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=NEW, do_sample=False)
        assert pipe.report.checked > 0


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (["cpu"], ValueError, "1 devices for 2 stages"),
        ("cpu", TypeError, r"devices must be a list .* not 'cpu'; device= is one for all"),
        (torch.device("cpu"), TypeError, "devices must be a list"),
        (["cpu", 1], TypeError, "device must be 'cpu', 'cuda:0' or the like, not 1"),
        (["cpu", "cuda:99"], ValueError, "device='cuda:99': torch sees"),
        (["cpu", "meta"], ValueError, "not on meta"),
    ],
)
def test_devices_that_cannot_be(model, tmp_path, monkeypatch, given, error, match):
    """Refused before any weight is loaded."""
    model.save_pretrained(tmp_path)

    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded")

    with pytest.raises(error, match=match):
        SpeculativePipeline(model, tmp_path, stages=2, devices=given)
    monkeypatch.setattr(pipeline, "load_model", loaded)
    with pytest.raises(error, match=match):
        SpeculativePipeline(tmp_path, stages=2, devices=given)


def test_devices_that_do_not_fit(model):
    with pytest.raises(ValueError, match="2 devices for 3 stages"):
        SpeculativePipeline(model, stages=3, devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match="either device=, for all stages, or devices=, one per stage"):
        SpeculativePipeline(model, stages=2, devices=["cpu", "cpu"], device="cpu")
