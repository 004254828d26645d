"""The scheduler from Python: the text is that of plain decoding. After a failure or Ctrl-C no step runs and no thread remains."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pipespec_kernels
from pipespec_kernels import env
from pipespec_kernels.scheduler import HostLauncher, Rectangle, Scheduler
from pipespec_kernels.state import StateBlock
from tests.waiting import until

EOS = 1
CUDA_MODULES = list(Path(pipespec_kernels.__file__).parent.glob("_cuda.*so"))


def truth(text: list[int]) -> int:
    """The target's token after ``text``: a hash of all of it; never EOS."""
    value = 7
    for token in text:
        value = (value * 1_000_003 + token + 1) % 2**61
    return 100 + value % 50


def plain(prompt: list[int], limit: int) -> list[int]:
    text = list(prompt)
    while len(text) < limit:
        text.append(truth(text))
    return text


class Model:
    """Chooses the target's tokens, given those that its cache holds, except at every ``wrong_every``-th position."""

    def __init__(self, prompts: list[list[int]], wrong_every: int = 0, before: Callable[[int], None] | None = None):
        self.cache = [prompt[:-1] for prompt in prompts]
        self.wrong_every, self.before, self.steps = wrong_every, before, 0

    def choose(self, text: list[int]) -> int:
        wrong = self.wrong_every and len(text) % self.wrong_every == 0
        return truth(text) + bool(wrong)

    def __call__(self, step: Rectangle) -> None:
        self.steps += 1
        if self.before is not None:
            self.before(self.steps)
        for row, (kv, query_lens, num_draft_tokens) in enumerate(
            zip(step.kv, step.query_lens, step.num_draft_tokens, strict=True)
        ):
            cache = self.cache[row]
            cache[kv:] = step.tokens[row, :query_lens].tolist()
            if step.n_select[row] == 0:
                continue
            own = len(cache) - num_draft_tokens
            for j in range(num_draft_tokens + 1):
                step.selected[row, j] = self.choose(cache[: own + j])
                if j < num_draft_tokens and step.selected[row, j] != cache[own + j]:
                    break


PROMPTS = [[3, 5, 8], [9]]
LIMITS = [60, 45]


def block_for(prompts: list[list[int]], limits: list[int], stages: int) -> StateBlock:
    block = StateBlock.create(stages, len(prompts), max(limits) + 2)
    block.reset([len(p) for p in prompts], limits, [p[-1] for p in prompts], [EOS])
    return block


def text_of(block: StateBlock, row: int) -> list[int]:
    prompt = PROMPTS[row]
    return prompt + block.tokens(block.target, row, len(prompt), block.length(block.target, row))


def wait_for_the_stop(scheduler: Scheduler) -> None:
    """Called in a step: wait until the scheduler stops. Otherwise the text can be complete before the caller does anything."""
    until(lambda: not scheduler._native.wait(0, 0)[1], "the stages are to stop")


@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize("wrong_every", [(), (0,), (4,), (3, 7), (1, 2, 5)])
def test_plain_text(shadowed: bool, wrong_every: tuple[int, ...], no_thread_is_left: None) -> None:
    models = [Model(PROMPTS, n) for n in (*wrong_every, 0)]
    block = block_for(PROMPTS, LIMITS, len(models))
    launcher = HostLauncher(block, models, [1, 2, 4, 8], shadowed=shadowed)
    scheduler = Scheduler(launcher, lookahead=(4,) * len(wrong_every), ahead=2, trace=1000)
    seen: list[int] = []
    steps: list[int] = []

    def on_commit() -> None:
        seen.append(block.length(block.target, 0))
        steps.append(block.counters(block.target, 0)["steps"])

    scheduler.run(on_commit)
    scheduler.settle()
    assert 0 < steps[-1] <= LIMITS[0]  # the counters are there while the scheduler runs
    assert [text_of(block, row) for row in range(2)] == [plain(*row) for row in zip(PROMPTS, LIMITS, strict=True)]
    assert seen == sorted(seen)
    assert seen[-1] == LIMITS[0]
    assert scheduler.failures == []

    for stage, model in enumerate(models):
        trace = scheduler.trace(stage)
        assert trace["step"].tolist() == list(range(len(trace)))
        assert (trace["launched_ns"] <= trace["start_ns"]).all()
        assert (trace["start_ns"] <= trace["end_ns"]).all()
        assert model.steps == (trace["fed"] > 0).sum()
        counters = [block.counters(stage, row) for row in range(2)]
        for field, counter in {
            "fed": "fed",
            "draft_tokens": "drafted",
            "accepted": "accepted",
            "rolled_back": "truncated",
        }.items():
            assert trace[field].sum() == sum(c[counter] for c in counters), field


def test_no_trace_by_default() -> None:
    block = block_for(PROMPTS, LIMITS, 1)
    scheduler = Scheduler(HostLauncher(block, [Model(PROMPTS)], [1]), lookahead=())
    scheduler.run()
    assert len(scheduler.trace(0)) == 0
    with pytest.raises(ValueError, match="no such stage"):
        scheduler.trace(1)


def test_ctrl_c_stops_the_stages(no_thread_is_left: None) -> None:
    def interrupt(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            wait_for_the_stop(scheduler)

    block = block_for(PROMPTS, [400, 400], 2)
    models = [Model(PROMPTS), Model(PROMPTS, before=interrupt)]
    scheduler = Scheduler(HostLauncher(block, models, [1, 4]), lookahead=(3,))
    with pytest.raises(KeyboardInterrupt):
        scheduler.run()
    steps = [model.steps for model in models]
    text = text_of(block, 0)
    assert text == plain(PROMPTS[0], len(text))
    assert len(text) < 400
    time.sleep(0.02)
    assert [model.steps for model in models] == steps
    # The next generation runs as usual.
    for model in models:
        model.cache, model.before = [prompt[:-1] for prompt in PROMPTS], None
    block.reset([len(p) for p in PROMPTS], LIMITS, [p[-1] for p in PROMPTS], [EOS])
    scheduler.run()
    assert text_of(block, 1) == plain(PROMPTS[1], LIMITS[1])


def test_ctrl_c_as_soon_as_the_stages_run(no_thread_is_left: None) -> None:
    class Interrupted:
        def __init__(self, native) -> None:
            self.native = native

        def __getattr__(self, name: str):
            return getattr(self.native, name)

        def start(self) -> None:
            self.native.start()
            raise KeyboardInterrupt

    block = block_for(PROMPTS, [400, 400], 2)
    scheduler = Scheduler(HostLauncher(block, [Model(PROMPTS), Model(PROMPTS)], [1, 4]), lookahead=(3,))
    native, scheduler._native = scheduler._native, Interrupted(scheduler._native)
    with pytest.raises(KeyboardInterrupt):
        scheduler.run()
    assert not native.started
    text = text_of(block, 0)
    assert text == plain(PROMPTS[0], 400)[: len(text)]


def test_a_second_generation_is_refused_and_leaves_the_first_running() -> None:
    block = block_for(PROMPTS, LIMITS, 1)
    scheduler = Scheduler(HostLauncher(block, [Model(PROMPTS)], [1]), lookahead=())
    refusals = []

    def on_commit() -> None:
        with pytest.raises(RuntimeError, match="runs a generation already"):
            scheduler.run()
        refusals.append(True)

    scheduler.run(on_commit)
    assert refusals
    assert [text_of(block, row) for row in range(2)] == [plain(*row) for row in zip(PROMPTS, LIMITS, strict=True)]


def test_an_exception_of_the_caller_stops_the_stages(no_thread_is_left: None) -> None:
    def on_commit() -> None:
        raise KeyError("mine")

    def wait(step: int) -> None:
        if step == 5:
            wait_for_the_stop(scheduler)

    block = block_for(PROMPTS, [400, 400], 2)
    models = [Model(PROMPTS), Model(PROMPTS, before=wait)]
    scheduler = Scheduler(HostLauncher(block, models, [1, 4]), lookahead=(3,))
    with pytest.raises(KeyError, match="mine"):
        scheduler.run(on_commit)
    assert block.length(1, 0) < 400
    assert models[1].steps <= 5
    models[1].before = None  # a reference to the scheduler would keep its threads alive


def test_bad_settings_are_refused() -> None:
    block = block_for(PROMPTS, LIMITS, 2)
    models = [Model(PROMPTS), Model(PROMPTS)]
    launcher = HostLauncher(block, models, [1, 4])
    with pytest.raises(ValueError, match="needs 1 lookahead values, not 2"):
        Scheduler(launcher, lookahead=(3, 3))
    with pytest.raises(ValueError, match="ahead must be 1 to 8"):
        Scheduler(launcher, lookahead=(3,), ahead=0)
    with pytest.raises(ValueError, match="2 stages, but there are 1 models"):
        HostLauncher(block, models[:1], [1])
    with pytest.raises(ValueError, match="widths"):
        HostLauncher(block, models, [4, 2])
    block.memory.array[:] = np.uint8(0)
    with pytest.raises(ValueError, match="no pipespec state block"):
        HostLauncher(block, models, [1])


@pytest.mark.skipif(not CUDA_MODULES, reason="_cuda was not built")
def test_graphs_without_a_gpu_are_refused() -> None:
    from pipespec_kernels import _cuda

    if env.collect_env()["cuda"]["devices"]:
        pytest.skip("there is a GPU")
    block = block_for(PROMPTS, LIMITS, 2)
    with pytest.raises(RuntimeError, match=r"no usable CUDA device: .*CUDA error \d+"):
        _cuda.CudaLauncher(block.memory.address, [_cuda.StageGraphs(), _cuda.StageGraphs()])
