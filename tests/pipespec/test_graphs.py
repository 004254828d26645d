"""What happens around captured graphs, without a GPU: torch.cuda's names are replaced by ones that run on the host, at once.

What is captured when, in which order, what it must not touch, and what happens where it fails. That the kernels do in a graph what they do outside of
it, only a GPU can show: the tests marked ``gpu`` here and in ``test_streams.py``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import types
import weakref

import numpy as np
import pytest
import torch

from pipespec import Pipeline
from pipespec.drivers import graphs
from pipespec.drivers.base import Policy, StageFailure
from pipespec.drivers.fixed import FixedDriver
from pipespec.drivers.rounds import RoundsDriver, parts
from pipespec.drivers.step import FixedStage, HostPort
from pipespec.placement import NotCapturable
from pipespec.planning import profile as profiles
from pipespec.planning.auto import Auto
from pipespec.sampling import Selection
from pipespec.stage import Start
from pipespec_kernels import _native
from pipespec_kernels.scheduler import HostLauncher
from pipespec_kernels.state import Action, StateBlock
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.planning.test_planner import captured
from tests.planning.test_planner import chain as made_up

pytest.importorskip("pipespec_kernels._cuda")

GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


class Pretended:
    """What has been asked of the GPU that is not there."""

    def __init__(self):
        self.log = []
        self.captured = 0
        self.capturing = False
        self.fails = lambda stage: None  # called in each body


@pytest.fixture
def gpu(monkeypatch):
    """Host memory is the GPU's; a capture runs the host's code and no forward; a launched step is the host launcher's."""
    seen = Pretended()

    class Stream:
        numbers = itertools.cycle(range(32))

        def __init__(self, device=None):
            self.cuda_stream = next(self.numbers)

        def wait_stream(self, other):
            pass

        def synchronize(self):
            pass

    class Graph:
        numbers = itertools.count(1)

        def __init__(self):
            self.number = next(self.numbers)

        def raw_cuda_graph_exec(self):
            return self.number

    @contextlib.contextmanager
    def capture(graph, pool, stream, capture_error_mode):
        seen.captured += 1
        seen.capturing = True
        seen.log.append("capture")
        try:
            yield
        finally:
            seen.capturing = False

    class Port(HostPort):
        def __init__(self, block, stage, width, device, *, rows, policy):
            port = types.SimpleNamespace(port=lambda s, w: _native.StagePort(block.data_ptr(), s, w))
            super().__init__(port, stage, width, rows)
            self.stage, self.width = stage, width

        def open(self, scratch):
            seen.log.append("open")

        def plan(self):
            seen.log.append(("plan", self.stage, self.width))
            return super().plan()

        def commit(self, selected):
            seen.log.append("commit")
            super().commit(selected)

        def close(self, mirror, scratch, log):
            seen.log.append("close")

    body = FixedStage.body

    def watched(self, tokens, kv, n_hint, n_select):
        seen.fails(self)
        return torch.full_like(tokens, -1) if seen.capturing else body(self, tokens, kv, n_hint, n_select)

    def launcher(self, own):
        steps = [lambda given, stage=stage: run(stage, given) for stage in self._stages]

        def run(stage, given):
            graph = dict(own[stage.index])[given.tokens.shape[1]]
            for turn in graph.turns[:-1]:  # the drafts', which ride in the target's step; planned ahead of them here
                if turn.port.plan() == Action.STEP:
                    port = turn.port
                    port.commit(turn.stage.body(port.tokens, port.kv, port.n_hint, port.n_select))
            arrays = (given.tokens, given.kv, given.n_hint, given.n_select)
            torch.from_numpy(given.selected).copy_(stage.body(*map(torch.from_numpy, arrays)))

        made = HostLauncher(self._mirror, steps, [[width for width, _ in of_stage] for of_stage in own])
        made.graphs = own
        return made

    capture_turns = graphs.Graphs.capture

    def remembered(self, turns):
        graph = capture_turns(self, turns)
        graph.turns = turns
        return graph

    monkeypatch.setattr(FixedDriver, "_are_on_gpus", lambda self, models: True)
    monkeypatch.setattr(FixedStage, "body", watched)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(graphs, "DevicePort", Port)
    monkeypatch.setattr(graphs.Graphs, "launcher", launcher)
    monkeypatch.setattr(graphs.Graphs, "capture", remembered)
    for name, value in {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": capture,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "graph_pool_handle": object,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return seen


@pytest.fixture
def model():
    return random_llama(7)


def chain(model, drafts: int = 1, **options):
    return Pipeline(model, [noisy(model, 0.05, seed=i) for i in range(drafts)], windows=4, **options)


def check(pipe, rows: int = 1, new: int = 20, **asked) -> None:
    ids, mask = left_pad(random_prompts(rows, seed=rows, shortest=4))
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": new}
    if asked:
        options |= {"do_sample": True, "top_k": 0, "seed": list(range(rows))} | asked
        alone = copy.deepcopy(pipe.target)
        alone.set_attn_implementation("sdpa")
        wanted = Pipeline(alone, schedule="plain").generate(ids, **options)
    else:
        wanted = type(pipe.target).generate(pipe.target, ids, **options)
    assert torch.equal(pipe.generate(ids, **options), wanted)


def test_what_is_captured_when(model, gpu):
    """Each width once; again only for other rows, more room, another kind of choice, or wider steps."""
    pipe = chain(model, schedule="streams")
    widths = [1, 2, 4, 5]
    assert gpu.captured == 2 * len(widths)  # the trial

    def captures(what) -> int:
        before = gpu.captured
        what()
        return gpu.captured - before

    every = 2 * len(widths)
    with pipe:
        assert captures(lambda: check(pipe)) == every
        assert captures(lambda: check(pipe)) == 0
        assert captures(lambda: check(pipe, new=30)) == 0  # there is room
        assert captures(lambda: check(pipe, temperature=0.7)) == every
        assert captures(lambda: check(pipe, temperature=1.2)) == 0  # other numbers are no other code
        assert captures(lambda: check(pipe, temperature=0.7, top_k=9, min_p=0.01)) == every
        assert captures(lambda: check(pipe, temperature=0.9, top_k=20, min_p=0.1)) == 0
        assert captures(lambda: check(pipe)) == 0
        assert captures(lambda: check(pipe, rows=3)) == every
        again = captures(lambda: check(pipe))  # the block has moved to make room for three rows
        assert again == every
        assert captures(lambda: check(pipe, rows=3)) == captures(lambda: check(pipe)) == 0
        assert captures(lambda: check(pipe, new=150)) == every
        pipe._driver.steer(Policy((7,)))
        assert captures(lambda: check(pipe)) == 2  # the widest step, of each stage
        pipe._driver.steer(Policy((2,)))
        assert captures(lambda: check(pipe)) == 0
        scheduler = pipe._driver._scheduler
        check(pipe)
        assert pipe._driver._scheduler is scheduler
        pipe._driver.forget()
        assert captures(lambda: check(pipe)) == every


def test_other_weights_are_captured_anew(model, gpu):
    pipe = chain(model, schedule="streams")
    check(pipe)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)  # in place: the graphs read it
    before = gpu.captured
    check(pipe)
    assert gpu.captured == before
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * -1)
    check(pipe)
    assert gpu.captured == before + 4  # the target's


def test_a_round_is_one_graph(model, gpu):
    pipe = chain(model, drafts=2, graphs=True)
    assert gpu.captured == 1
    gpu.log.clear()
    driver = pipe._driver
    start = Start([torch.arange(2, 9, dtype=torch.int32).numpy()], [40], Selection(), 320)
    for stage in driver._stages:
        stage.prepare(start)
    driver._capture()
    assert gpu.captured == 2
    one = ["open", *itertools.chain(*(([("plan", *part), "commit"]) for part in parts(driver.policy))), "close"]
    assert gpu.log == [*one, *one, "capture", *one]
    driver._capture()
    assert gpu.captured == 2
    own = driver._scheduler._launcher.graphs
    assert own[:-1] == [[], []]  # they ride in the target's
    assert [width for width, _ in own[-1]] == [5]
    driver.steer(Policy((2, 3)))
    driver._capture()
    assert gpu.captured == 3
    for rows in (1, 3):
        check(pipe, rows=rows)
        assert pipe.report.schedule == "lockstep"
        assert pipe.report.stages[-1].accepted > 0
        assert pipe.report.stages[0].steps > 0
    check(pipe, rows=2, temperature=0.8)
    pipe.close()
    assert not any(room.graphs for stage in driver._stages for room in stage.rooms())


def test_rounds_over_a_drafts_old_weights_are_dropped(model, gpu):
    """Before the new ones are captured; those for other batch sizes and kinds of choice, too, and no others."""
    with chain(model, drafts=2, graphs=True) as pipe:
        driver = pipe._driver

        def graphs_of(rows: int):
            return next(room.graphs for room in driver.target.rooms() if room.cache.rows == rows)

        check(pipe, rows=3)
        check(pipe)
        check(pipe, temperature=0.8)
        old = [weakref.ref(graph) for graph in graphs_of(1).values()]
        other = [weakref.ref(graph) for graph in graphs_of(3).values()]
        assert (len(old), len(other)) == (2, 1)
        norm = pipe.models[0].model.norm
        norm.weight = torch.nn.Parameter(norm.weight * -1)
        capture, there = driver._make_graph, []

        def watched(*args):
            gc.collect()
            there.append([ref() for ref in old])
            return capture(*args)

        driver._make_graph = watched
        check(pipe)
        assert there == [[None, None]]
        assert len(graphs_of(1)) == 1
        assert other[0]() is not None  # its draft's room is the old one until a call of three rows finds out
        check(pipe, rows=3)
        gc.collect()
        assert other[0]() is None
        assert (len(graphs_of(1)), len(graphs_of(3))) == (1, 1)
        before = gpu.captured
        check(pipe)
        assert gpu.captured == before


def test_a_capture_leaves_what_the_caches_hold(model, gpu):
    """A conversation goes on under another kind of choice: captured in between, over the same cache."""
    ids = random_prompts(1, seed=4, shortest=12)[0][None]
    with chain(model, schedule="streams") as pipe:
        first = pipe.generate(ids, return_dict_in_generate=True, **GREEDY)
        driver = pipe._driver
        before = gpu.captured
        store = driver.target.cache._store
        held = driver.target.cache.lengths[0]
        kept = store[:, :, :, :held].clone()
        start = Start([first.sequences[0].int().numpy()], [50], Selection(seeds=(1,)), 320, reuse=True)
        for stage in driver._stages:
            stage.prepare(start)
        driver._capture()
        assert gpu.captured > before
        assert driver.target.cache._store is store
        assert torch.equal(store[:, :, :, :held], kept)
        assert store[:, :, :, -5:].any()  # where the warm-up wrote


@pytest.mark.parametrize(
    "how", [{"schedule": "streams"}, {"schedule": "lockstep", "graphs": True}], ids=["streams", "rounds"]
)
def test_what_cannot_be_captured_is_named(model, gpu, how):
    """The call runs in lockstep, and says why: once as a warning, and in its report."""

    def fails(stage):
        if gpu.capturing and stage.index == 1:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    pipe = chain(model, **how)
    gpu.fails = fails
    ids = random_prompts(1, seed=4, shortest=12)[0][None]
    wanted = type(model).generate(model, ids, **GREEDY)
    with pytest.warns(
        StageFailure,
        match="target cannot be captured in a CUDA graph: the selection of its tokens: RuntimeError: operation not permitted; this call",
    ) as told:
        assert torch.equal(pipe.generate(ids, **GREEDY), wanted)
    assert len(told) == 1
    assert pipe.report.schedule == "lockstep"
    assert "operation not permitted" in str(pipe.report)
    gpu.fails = lambda stage: None
    if how["schedule"] == "streams":
        check(pipe)
        assert pipe.report.schedule == "streams"
    pipe.close()


def test_the_layer_is_named(model, gpu):
    twin = copy.deepcopy(model)

    def looks(*args, **kwargs):
        raise RuntimeError("it looks at its numbers")

    twin.model.layers[1].mlp.down_proj.forward = looks
    with pytest.raises(
        NotCapturable, match=r"target cannot be captured .* model\.layers\.1\.mlp\.down_proj \(Linear\)"
    ) as caught:
        RoundsDriver([twin], Policy())
    assert (caught.value.stage, caught.value.part) == ("target", "model.layers.1.mlp.down_proj (Linear)")
    assert caught.value.cause == "RuntimeError: it looks at its numbers"
    assert twin.config._attn_implementation == "sdpa"


def test_no_two_stages_share_a_stream(model, gpu):
    """Not even if others take some of torch's in between: work spaces belong to streams."""
    pipe = chain(model, drafts=2, schedule="streams")
    for _ in range(30):  # then the next ones begin anew
        torch.cuda.Stream()
    other = chain(copy.deepcopy(model), drafts=2, schedule="streams")
    check(pipe, rows=2)
    lanes = [lane for p in (pipe, other) for lane in p._driver._graphs._lanes]
    assert len({lane.stream.cuda_stream for lane in lanes}) == len(lanes) == 6


def test_no_garbage_is_collected_during_a_capture(model, gpu):
    """It could be another pipeline, whose end is nothing that a capture allows."""
    on = {True: set(), False: set()}  # by whether it was capturing
    gpu.fails = lambda stage: on[gpu.capturing].add(gc.isenabled())
    chain(model, schedule="streams").close()
    assert on == {True: {False}, False: {True}}
    assert gc.isenabled()


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_does_not_end_is_forgotten(model, gpu, monkeypatch, ends):
    """Else torch's allocator takes it to go on."""
    done = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: done.append(("end", *where)), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *where: done.append(("release", *where)), raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    capture = torch.cuda.graph

    @contextlib.contextmanager
    def ending(*arguments, **options):
        with capture(*arguments, **options):
            yield
        if not ends:
            raise RuntimeError("operation failed due to a previous error during capture")

    def fails(stage):
        if gpu.capturing:
            raise RuntimeError("the first error")

    monkeypatch.setattr(torch.cuda, "graph", ending)
    gpu.fails = fails
    with pytest.raises(NotCapturable, match="the first error"):
        RoundsDriver([model], Policy())
    assert done == ([] if ends else [("end", None, (0, 7)), ("release", None, (0, 7))])


def test_pinned_memory_is_for_every_mode(gpu):
    with torch.inference_mode():
        memory = graphs.PinnedMemory()
        memory.remap(64)
    memory.tensor.copy_(torch.ones(64, dtype=torch.uint8))
    assert memory.array.all()


def test_pinned_memory_grows_with_the_block(gpu):
    block = StateBlock.create(2, 1, 16, graphs.PinnedMemory())
    address = block.memory.address
    block.ensure(1, 16)
    assert block.memory.address == address
    block.ensure(3, 500)
    assert (block.rows, block.capacity) == (3, 512)
    block.reset([2, 3, 4], [9, 9, 9], [5, 6, 7], [])
    assert block.tokens(1, 2, 3, 4) == [7]
    assert block.kv(1, 2) == 3


def test_auto_measures_captures_and_falls_back(model, gpu, monkeypatch, tmp_path):
    """Each width of each model is a graph while it is measured; a model that cannot be captured is named, and auto goes on without."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("pipespec.planning.auto.os.sched_getaffinity", lambda pid: {0})
    models = [noisy(model, 0.05), model]
    found = profiles.measure_captured(models, ["draft 0", "target"], widths=(1, 4))
    assert gpu.captured == 2 * (1 + 2)  # and the trial; the short text has the long one's
    assert all(t.widths == (1, 4) and min(t.seconds) > 0 for times in found for t in times)
    profile = captured(made_up(1e-3, 1e-2), 2e-4, 5e-3)
    options = {
        "profile": profile,
        "tables": {"greedy": np.zeros((64, 1), dtype=np.uint8)},
        "captured": ("plain", "lockstep"),
    }
    monkeypatch.setattr("pipespec.pipeline.Auto", functools.partial(Auto, **options))
    with Pipeline(model, models[:1], schedule="auto") as pipe:
        assert pipe.plan.chosen.way == "lockstep, graphs"
        monkeypatch.setattr(pipe._auto, "learn", lambda *a: None)  # the plan stays
        monkeypatch.setattr(pipe._auto, "correct", lambda *a: None)
        check(pipe)
        assert pipe.report.stages[-1].accepted > 0
        before = gpu.captured
        check(pipe)
        assert gpu.captured == before

    def fails(stage):
        if gpu.capturing:
            raise RuntimeError("it looks at its numbers")

    gpu.fails = fails
    with pytest.warns(
        StageFailure, match=r"draft 0 cannot be captured .*: it looks at its numbers; it goes on without"
    ) as told:
        pipe = Pipeline(model, models[:1], schedule="auto")
    assert len(told) == 1
    with pipe:
        assert pipe.plan.chosen.way == "lockstep"
        check(pipe)
    assert model.config._attn_implementation == "sdpa"
