"""Capture of graphs without a GPU: functions of torch.cuda are replaced by ones that run on the host.

The tests check what is captured when and in which order, what a capture leaves unchanged, and what happens when it fails. That kernels do the same inside
and outside of a graph needs a GPU: see the tests marked ``gpu`` in ``test_streams.py``.
"""

import copy
import functools
import gc
import itertools
import signal
import sys
import warnings
import weakref

import pytest
import torch

import pipespec_kernels
from pipespec import Pipeline
from pipespec.api import base
from pipespec.config import SpeculationConfig
from pipespec.engine.chain import StageInputs
from pipespec.engine.sampling import SamplingParams
from pipespec.errors import DoesNotFit, NotCapturable
from pipespec.schedules.base import SpeedWarning
from pipespec.schedules.graphs import capture as capturing
from pipespec.schedules.graphs.rounds import RoundsDriver, round_steps
from pipespec.schedules.graphs.scheduling import PinnedMemory
from pipespec_kernels.state import StateBlock
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.pipespec.fake_gpu import FakeGpu
from tests.pipespec.fake_gpu import Graph as FakeGraph
from tests.support.ways import driver_of

_cuda = pytest.importorskip("pipespec_kernels._cuda")

GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
HOW = [{"schedule": "streams"}, {"schedule": "lockstep", "graphs": True}]
IDS = ["streams", "rounds"]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose memory is the host's. A capture runs no forward; a launch runs the step on a host launcher."""
    seen = FakeGpu()
    seen.install(monkeypatch)
    return seen


@pytest.fixture
def model():
    return random_llama(7)


def chain(model, drafts: int = 1, **options):
    return Pipeline(model, [noisy(model, 0.05, seed=i) for i in range(drafts)], lookahead=4, **options)


@functools.cache
def alone(target, rows: int, new: int, **sampling):
    """Arguments of a call, and the text of the target alone. ``sampling``: parameters of a sampled call."""
    ids, mask = left_pad(random_prompts(rows, seed=rows, shortest=4))
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": new}
    if not sampling:
        return ids, options, type(target).generate(target, ids, **options)
    options |= {"do_sample": True, "top_k": 0, "seed": list(range(rows))} | sampling
    with_sdpa = copy.deepcopy(target)
    with_sdpa.set_attn_implementation("sdpa")
    return ids, options, Pipeline(with_sdpa, schedule="plain").generate(ids, **options)


@pytest.fixture(autouse=True)
def _targets_of_one_test():
    yield
    alone.cache_clear()


def check(pipe, rows: int = 1, new: int = 20, **sampling) -> None:
    """Compare a call with the target alone."""
    ids, options, wanted = alone(pipe.target, rows, new, **sampling)
    assert torch.equal(pipe.generate(ids, **options), wanted)


def test_what_is_captured_when(model, gpu):
    """Each width once; again only for other rows, a larger capacity, another kind of sampling, or wider steps."""
    pipe = chain(model, schedule="streams")
    widths = [1, 2, 4, 5]
    assert gpu.captured == 2 * len(widths)  # of the constructor

    def captures(what) -> int:
        before = gpu.captured
        what()
        return gpu.captured - before

    every = 2 * len(widths)
    with pipe:
        assert captures(lambda: check(pipe)) == every
        assert captures(lambda: check(pipe)) == 0
        assert captures(lambda: check(pipe, new=21)) == 0  # the capacity suffices
        assert captures(lambda: check(pipe, temperature=0.7)) == every
        assert captures(lambda: check(pipe, temperature=1.2)) == 0  # other numbers, the same kernels
        assert captures(lambda: check(pipe, temperature=0.7, top_k=9, min_p=0.01)) == every
        assert captures(lambda: check(pipe, temperature=0.9, top_k=20, min_p=0.1)) == 0
        assert captures(lambda: check(pipe)) == 0
        # What is recorded is the target's.
        ids, options, _ = alone(model, 1, 20)
        options = options | {"return_dict_in_generate": True}
        assert captures(lambda: pipe.generate(ids, **options, logprobs=2)) == len(widths)
        assert captures(lambda: pipe.generate(ids, **options | {"max_new_tokens": 9}, logprobs=2)) == 0
        assert captures(lambda: check(pipe)) == 0
        assert captures(lambda: pipe.generate(ids, **options, output_logits=True)) == len(widths)
        assert captures(lambda: check(pipe, rows=3)) == every
        again = captures(lambda: check(pipe))  # the block has moved, as it holds three rows now
        assert again == every
        assert captures(lambda: check(pipe, rows=3)) == captures(lambda: check(pipe)) == 0
        assert captures(lambda: check(pipe, new=150)) == every
        scheduler = driver_of(pipe).scheduled.scheduler
        check(pipe)
        assert driver_of(pipe).scheduled.scheduler is scheduler
        driver_of(pipe).release()
        assert captures(lambda: check(pipe)) == every


def test_other_weights_are_captured_again(model, gpu):
    pipe = chain(model, schedule="streams")
    check(pipe)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)  # in place, where the graphs read it
    alone.cache_clear()
    before = gpu.captured
    check(pipe)
    assert gpu.captured == before
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * -1)
    alone.cache_clear()
    check(pipe)
    assert gpu.captured == before + 4  # the target's


def test_a_round_is_one_graph(model, gpu):
    pipe = chain(model, drafts=2, graphs=True)
    assert gpu.captured == 1
    gpu.log.clear()
    driver = driver_of(pipe)
    start = StageInputs([torch.arange(2, 9, dtype=torch.int32).numpy()], [40], SamplingParams(), 320)
    for stage in driver.stages:
        stage.prepare(start)
    driver.capture()
    assert gpu.captured == 2
    one = ["open", *itertools.chain(*(([("plan", *part), "commit"]) for part in round_steps(driver.config))), "close"]
    assert gpu.log == [*one, *one, "capture", *one]
    driver.capture()
    assert gpu.captured == 2
    own = driver.scheduled.scheduler._launcher.graphs
    assert own[:-1] == [[], []]  # their steps are in the target's graph
    assert [width for width, _ in own[-1]] == [5]
    for rows in (1, 3):
        check(pipe, rows=rows)
        assert pipe.report.schedule == "lockstep"
        assert pipe.report.stages[-1].accepted > 0
        assert pipe.report.stages[0].steps > 0
    check(pipe, rows=2, temperature=0.8)
    pipe.close()
    assert not any(buffers.graphs for stage in driver.stages for buffers in stage.all_buffers())


def test_rounds_over_a_drafts_old_weights_are_dropped(model, gpu, monkeypatch):
    """Before the capture of new ones, for all numbers of rows and kinds of sampling, and no other graphs."""
    with chain(model, drafts=2, graphs=True) as pipe:
        driver = driver_of(pipe)

        def graphs_of(rows: int):
            return next(buffers.graphs for buffers in driver.target.all_buffers() if buffers.cache.rows == rows)

        check(pipe, rows=3)
        check(pipe)
        check(pipe, temperature=0.8)
        old = [weakref.ref(graph) for graph in graphs_of(1).values()]
        other = [weakref.ref(graph) for graph in graphs_of(3).values()]
        assert (len(old), len(other)) == (2, 1)
        norm = pipe.models[0].model.norm
        norm.weight = torch.nn.Parameter(norm.weight * -1)
        capture, there = capturing.CaptureContext.capture, []

        def watched(*args):
            gc.collect()
            there.append([ref() for ref in old])
            return capture(*args)

        monkeypatch.setattr(capturing.CaptureContext, "capture", watched)
        check(pipe)
        assert there == [[None, None]]
        assert len(graphs_of(1)) == 1
        assert other[0]() is not None  # a call of three rows replaces its draft's buffers
        check(pipe, rows=3)
        gc.collect()
        assert other[0]() is None
        assert (len(graphs_of(1)), len(graphs_of(3))) == (1, 1)
        before = gpu.captured
        check(pipe)
        assert gpu.captured == before


def test_a_capture_leaves_the_text_in_the_caches(model, gpu):
    """A conversation continues with another kind of sampling: its graph is captured over the cache that holds the text."""
    ids = random_prompts(1, seed=4, shortest=12)[0][None]
    with chain(model, schedule="streams") as pipe:
        first = pipe.generate(ids, return_dict_in_generate=True, **GREEDY)
        driver = driver_of(pipe)
        before = gpu.captured
        store = driver.target.cache._stores[0]
        held = driver.target.cache.lengths[0]
        kept = store[:, :, :, :held].clone()
        start = StageInputs([first.sequences[0].int().numpy()], [50], SamplingParams(seeds=(1,)), 320)
        for stage in driver.stages:
            stage.prepare(start)
        driver.capture()
        assert gpu.captured > before
        assert driver.target.cache._stores[0] is store
        assert torch.equal(store[:, :, :, :held], kept)


@pytest.mark.parametrize("how", HOW, ids=IDS)
def test_prompts_that_cannot_be_captured(model, gpu, how, monkeypatch):
    """The host launches their forwards, and says so once. The steps are captured."""

    def read(stage, *inputs):
        raise RuntimeError("no prompt")

    monkeypatch.setattr("pipespec.schedules.graphs.stage.GraphedStage.read", read)
    with chain(model, **how) as pipe:
        with pytest.warns(SpeedWarning, match=r"RuntimeError: no prompt; the host launches.*only its speed") as told:
            check(pipe)
        assert len(told) == len(driver_of(pipe).stages)
        assert pipe.report.schedule == how["schedule"]
        check(pipe, new=9)
        assert gpu.prompts == 0


@pytest.mark.parametrize("capturing", [False, True], ids=["warm-up", "capture"])
def test_what_a_signal_handler_raises_ends_the_capture(model, gpu, capturing):
    """Nothing runs instead, because the error is the caller's."""

    def bark(number, frame):
        raise TimeoutError("time is up")

    def interrupted(stage):
        if gpu.capturing == capturing:
            gpu.invalidate()
            signal.raise_signal(signal.SIGUSR1)

    gpu.fails = interrupted
    before = signal.signal(signal.SIGUSR1, bark)
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            check(Pipeline(model, schedule="plain", graphs=True))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_two_stages_share_a_stream(model, gpu):
    """Not even if others take some of torch's streams in between: each stream has one workspace."""
    pipe = chain(model, drafts=2, schedule="streams")
    for _ in range(30):  # torch reuses its first stream
        torch.cuda.Stream()
    other = chain(copy.deepcopy(model), drafts=2, schedule="streams")
    check(pipe, rows=2)
    streams = [resources.stream.cuda_stream for p in (pipe, other) for resources in driver_of(p).context.resources]
    assert len(set(streams)) == len(streams) == 6


def test_no_garbage_is_collected_during_a_capture(model, gpu):
    """It could end another pipeline, which a capture does not allow."""
    on = {True: set(), False: set()}  # keys: whether a capture was running
    gpu.fails = lambda stage: on[gpu.capturing].add(gc.isenabled())
    chain(model, schedule="streams").close()
    assert on == {True: {False}, False: {True}}
    assert gc.isenabled()


def graphs_of(pipe):
    """The fake graphs that a pipeline's stages hold."""
    held = [buffers.graphs.values() for stage in driver_of(pipe).stages for buffers in stage.all_buffers()]
    return [captured._graph for captured in itertools.chain(*held)]


@pytest.mark.parametrize("how", HOW, ids=IDS)
def test_a_graph_owns_the_workspaces_of_its_products(model, gpu, how):
    """They lie in its pool, so that later clearing of torch's map has no effect on them. The map does not keep the pool alive."""
    pipe = chain(model, **how)
    check(pipe)
    graphs = graphs_of(pipe)
    assert all(graph.workspaces for graph in graphs)
    assert all(workspace.pool is graph.pool for graph in graphs for workspace in graph.workspaces)
    pools = {graph.pool for graph in graphs}
    assert pools.isdisjoint(workspace.pool for workspace in gpu.workspaces.values())
    pipe.close()
    del graphs
    gc.collect()
    gpu.empty_cache()
    assert pools.isdisjoint(gpu.memory.use_counts)


def test_kernels_have_the_priority_of_their_stage(model, gpu):
    """Drafts before the target; in a round, whose steps follow one another, the target's."""
    with chain(model, drafts=2, schedule="streams") as pipe:
        check(pipe)
        priorities = [
            {captured._graph.priority for buffers in stage.all_buffers() for captured in buffers.graphs.values()}
            for stage in driver_of(pipe).stages
        ]
        assert priorities == [{-1}, {-1}, {0}]
    with chain(model, graphs=True) as pipe:
        check(pipe)
        assert {graph.priority for graph in graphs_of(pipe)} == {0}


@pytest.mark.parametrize("newer", [False, True], ids=["torch 2.11", "newer"])
@pytest.mark.parametrize("how", HOW, ids=IDS)
def test_after_a_capture_that_cannot_be_ended(model, gpu, how, newer):
    """The cause is the first error. torch's allocator and generator leave the capture, and the next call is captured."""
    gpu.ends_before_it_raises = newer
    pipe = chain(model, **how)
    before = len(gpu.memory.use_counts)

    def fails(stage):
        if gpu.capturing:
            gpu.invalidate()
            raise RuntimeError("the first error")

    gpu.fails = fails
    with pytest.warns(SpeedWarning, match="step by step: .*RuntimeError: the first error") as told:
        check(pipe, new=30)
    assert len(told) == 1
    assert pipe.report.schedule == "lockstep"
    assert "the first error" in str(pipe.report)
    assert not gpu.memory.recording
    assert not gpu.generator_captures
    gc.collect()
    gpu.empty_cache()
    # The memory that torch itself does not release, before and after that version.
    assert len(gpu.memory.use_counts) <= before + newer
    for graph in gpu.pinned.recording.values():
        assert graph in gpu.graphs  # the allocator of pinned memory calls it
    gpu.fails = lambda stage: None
    with warnings.catch_warnings(action="error"):
        check(pipe, new=30)
    assert driver_of(pipe).remarks == ()
    pipe.close()


def test_the_stream_is_restored_where_a_capture_does_not_end(model, gpu):
    current = gpu.stream

    gpu.fails = lambda stage: gpu.invalidate()
    with pytest.raises(NotCapturable, match="the step as a whole: RuntimeError: operation failed due to a previous"):
        RoundsDriver([model], SpeculationConfig())
    assert gpu.stream is current


def test_no_pool_is_used_after_its_last_graph(model, gpu):
    """torch refuses it while memory in it is held, by a captured tensor for example."""
    with chain(model, schedule="streams") as pipe:
        check(pipe)
        pools = {graph.pool for graph in graphs_of(pipe)}
        assert len(pools) == 2  # the graphs of a stage share one
        gpu.held |= pools
        driver_of(pipe).release()
        with warnings.catch_warnings(action="error"):
            check(pipe)
        assert pipe.report.schedule == "streams"
        assert pools.isdisjoint(graph.pool for graph in graphs_of(pipe))


def test_pinned_memory_is_for_every_mode(gpu):
    with torch.inference_mode():
        memory = PinnedMemory()
        memory.remap([64])
    memory.tensor.copy_(torch.ones(64, dtype=torch.uint8))
    assert memory.array.all()


def test_pinned_memory_grows_with_the_block(gpu):
    block = StateBlock.create(2, 1, 16, PinnedMemory())
    address = block.memory.address
    block.ensure(1, 16)
    assert block.memory.address == address
    block.ensure(3, 500)
    assert (block.rows, block.capacity) == (3, 512)
    block.reset([2, 3, 4], [9, 9, 9], [5, 6, 7], [])
    assert block.tokens(1, 2, 3, 4) == [7]
    assert block.kv(1, 2) == 3


PLAIN = {"schedule": "plain", "graphs": True}
EVERY, WITHOUT_WORKERS = [*HOW, PLAIN], [HOW[1], PLAIN]


@pytest.fixture
def no_cuda_module(gpu, monkeypatch):
    """As in an installation that was built without nvcc."""
    monkeypatch.setitem(sys.modules, "pipespec_kernels._cuda", None)
    monkeypatch.delattr(pipespec_kernels, "_cuda", raising=False)


def runs_without_graphs(model, how, reason: str) -> None:
    """The pipeline is made with one warning that has the reason, and generates the same text, in other steps."""
    with pytest.warns(SpeedWarning, match=reason) as told:
        pipe = chain(model, **how)
    assert len(told) == 1
    with pipe:
        assert not pipe.config.graphs
        with warnings.catch_warnings(action="error"):
            check(pipe)
            check(pipe, rows=2)


def runs_with_graphs(model, how, reason: str) -> None:
    """The pipeline is made with one warning that has the reason. The host launches a graph per step of a model."""
    with pytest.warns(SpeedWarning, match=reason) as told:
        pipe = chain(model, **how)
    assert len(told) == 1
    with pipe:
        assert pipe.config.graphs or pipe.schedule == "streams"
        with warnings.catch_warnings(action="error"):
            for rows, sampling in ((1, {}), (2, {}), (2, {"temperature": 0.8}), (1, {})):
                check(pipe, rows=rows, **sampling)
                assert pipe.report.schedule == how["schedule"]
                assert pipe.report.decisions is None
        assert all(buffers.graphs for stage in driver_of(pipe).stages for buffers in stage.all_buffers())


@pytest.mark.parametrize("how", [*EVERY, PLAIN | {"exact": True}], ids=[*IDS, "plain", "exact"])
def test_without_the_cuda_module(model, no_cuda_module, how):
    runs_with_graphs(model, how, "the CUDA module: .*PIPESPEC_CUDA=on.*the host plans and commits")


REFUSALS = {
    "ROCm: captured steps need a GPU of NVIDIA": lambda m, gpu: m.setattr(torch.version, "hip", "7.0"),
    "compute capability 8.0, and this GPU has 7.5": lambda m, gpu: m.setattr(gpu, "capability", (7, 5)),
    "unset PYTORCH_CUDA_ALLOC_CONF": lambda m, gpu: m.setattr(gpu, "allocator", "cudaMallocAsync"),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_cannot_run_captured_steps(model, gpu, monkeypatch, reason):
    REFUSALS[reason](monkeypatch, gpu)
    runs_without_graphs(model, {"graphs": True}, reason)


def test_an_older_driver(model, gpu, monkeypatch):
    monkeypatch.setattr(_cuda, "driver_version", lambda: 12080)
    monkeypatch.setattr(_cuda, "runtime_version", lambda: 13000)
    runs_with_graphs(model, HOW[1], "it supports CUDA 12.8, and")


@pytest.mark.parametrize("error", [RuntimeError("CUDA driver version is insufficient"), ValueError("no CUDA device 0")])
@pytest.mark.parametrize("how", WITHOUT_WORKERS, ids=["rounds", "plain"])
def test_a_launcher_that_cannot_be_made(model, gpu, monkeypatch, how, error):
    def refuses(*arguments):
        raise error

    monkeypatch.setattr(_cuda, "CudaLauncher", refuses)
    runs_with_graphs(model, how, f"the launcher of its graphs: {error}")


@pytest.mark.parametrize("refused", [(0,), (1,), (2,), (0, 1)], ids=str)
@pytest.mark.parametrize("how", HOW, ids=IDS)
def test_a_model_that_cannot_be_captured_leaves_the_others_captured(model, gpu, how, refused):
    """Its steps run between the graphs of the others. One warning per model names it and the cause."""

    def fails(stage):
        if gpu.capturing and stage.index in refused:
            raise RuntimeError("it waits for the device")

    gpu.fails = fails
    names = ["draft 0", "draft 1", "target"]
    with pytest.warns(SpeedWarning) as told:
        pipe = chain(model, drafts=2, **how)
    assert [str(warning.message).split(" cannot")[0] for warning in told] == [names[i] for i in refused]
    assert all("it waits for the device; its steps run without a graph" in str(warning.message) for warning in told)
    with pipe, warnings.catch_warnings(action="error"):
        for rows, sampling in ((1, {}), (2, {}), (1, {"temperature": 0.8})):
            check(pipe, rows=rows, **sampling)
            assert pipe.report.schedule == how["schedule"]
            held = [any(buffers.graphs for buffers in stage.all_buffers()) for stage in driver_of(pipe).stages]
            assert held == [i not in refused for i in range(3)]
        if how["schedule"] == "lockstep":
            assert pipe.report.stages[-1].accepted > 0


@pytest.mark.parametrize("how", EVERY, ids=[*IDS, "plain"])
def test_no_call_waits_for_the_whole_device(model, gpu, how):
    """During a capture of another thread that is an error, and it ends that capture."""
    with chain(model, **how) as pipe:
        check(pipe)
        gpu.captures[0] = FakeGraph(gpu)  # another thread's
        check(pipe)
        assert not gpu.captures.pop(0).invalid
        assert pipe.report.schedule == how["schedule"]


@pytest.mark.parametrize("how", HOW, ids=IDS)
def test_a_capture_that_another_thread_has_ended(model, gpu, how):
    """It is repeated once: nothing is wrong with the model."""
    times = iter([True])

    def synchronises(stage):
        if gpu.capturing and next(times, False):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                gpu.synchronize()

    gpu.fails = synchronises
    with warnings.catch_warnings(action="error"), chain(model, **how) as pipe:
        check(pipe)
        assert pipe.report.schedule == how["schedule"]
    assert next(times, None) is None


@pytest.mark.parametrize("how", HOW, ids=IDS)
def test_graphs_of_a_server_are_bounded(model, gpu, how):
    """Each record has graphs of its own. Those that were launched last stay."""
    ids, options, _ = alone(model, 1, 20)
    options = options | {"return_dict_in_generate": True, "max_new_tokens": 1}
    with chain(model, **how) as pipe:
        check(pipe)
        for n in range(1, 9):
            for more in ({"output_logits": True}, {"output_scores": True}, {"logprobs": n}):
                pipe.generate(ids, **options, **more)
        held = [len(buffers.graphs) for stage in driver_of(pipe).stages for buffers in stage.all_buffers()]
        assert max(held) <= 16
        before = gpu.captured
        pipe.generate(ids, **options, logprobs=8)
        assert gpu.captured == before
        check(pipe)


@pytest.mark.parametrize("how", EVERY, ids=[*IDS, "plain"])
def test_static_caches_that_do_not_fit(model, gpu, monkeypatch, how):
    """The call runs over caches that grow, with a warning, and the next one that fits is captured again."""
    check_memory = base.check_memory

    def little(models, *, static, limit, **rest):
        if static and limit > 100:
            raise DoesNotFit("the stages need 9 GiB on cuda:0")
        check_memory(models, static=static, limit=limit, **rest)

    monkeypatch.setattr(base, "check_memory", little)
    with chain(model, **how) as pipe:
        captured = pipe.config.schedule
        check(pipe)
        with pytest.warns(SpeedWarning, match="static caches do not fit.* 9 GiB") as told:
            check(pipe, new=80)
        assert len(told) == 1
        with warnings.catch_warnings(action="error"):
            check(pipe, new=80)
        gc.collect()
        assert not gpu.graphs
        check(pipe)
        assert pipe.report.schedule == captured
        assert graphs_of(pipe)


def test_memory_that_is_not_there(model, gpu, monkeypatch):
    """The constructor runs out of memory, or a call, beyond what the estimate allowed."""
    context = capturing.CaptureContext.__init__

    def none_left(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capturing.CaptureContext, "__init__", none_left)
    runs_without_graphs(model, {"graphs": True}, "its static buffers and graphs: CUDA out of memory")
    monkeypatch.setattr(capturing.CaptureContext, "__init__", context)
    with chain(model, graphs=True) as pipe:
        monkeypatch.setattr(capturing.CaptureContext, "__init__", none_left)
        with pytest.warns(SpeedWarning, match="no memory for the graphs"):
            check(pipe, rows=3)
