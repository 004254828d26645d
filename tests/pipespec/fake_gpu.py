"""torch's state around a capture, without a GPU: streams, memory pools, cuBLAS workspaces and the state after a failure.

Each docstring names the function in torch's sources that the class or method imitates.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from pipespec.schedules.graphs import capture as capturing
from pipespec.schedules.graphs.driver import GraphedDriver
from pipespec.schedules.graphs.ngram import GraphedNgramStage
from pipespec.schedules.graphs.stage import GraphedStage
from pipespec_kernels import _native
from pipespec_kernels.scheduler import HostLauncher
from pipespec_kernels.state import Action


class Stream:
    """``torch.cuda.Stream``. torch assigns 32 streams per device and priority round-robin: ``getStreamFromPool()`` of c10/cuda/CUDAStream.cpp."""

    numbers: ClassVar = {priority: itertools.cycle(range(32)) for priority in (0, -1)}

    def __init__(self, device=None, priority=0):
        self.priority = priority
        self.cuda_stream = priority, next(self.numbers[priority])

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


@dataclass
class Memory:
    """An allocation. ``pool``: where it lies; None: torch's default pool."""

    pool: Any


@dataclass
class Pools:
    """The private pools of one allocator: c10/cuda/CUDACachingAllocator.cpp, and ATen/core/CachingHostAllocator.h for pinned memory."""

    use_counts: dict[Any, int] = field(default_factory=dict)
    recording: dict[Any, Graph] = field(default_factory=dict)
    """By pool, the graph whose capture it records. The allocator refers to the graph: ``create_allocate_filter()`` of CUDAGraph.cpp."""

    def begin(self, pool, graph):
        """``beginAllocateToPool()``, which counts before it looks: ``create_or_incref_pool()``."""
        if self.use_counts.get(pool, 1) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.use_counts[pool] = self.use_counts.get(pool, 0) + 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording[pool] = graph

    def end(self, pool):
        """``endAllocateToPool()``."""
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self.recording[pool]

    def release(self, pool):
        """``releasePool()``."""
        self.use_counts[pool] -= 1
        assert self.use_counts[pool] >= 0

    def empty(self, held):
        """``release_cached_blocks()``: a pool ends when no graph uses it and nothing in it is held."""
        for pool in [pool for pool, count in self.use_counts.items() if count == 0 and pool not in held]:
            del self.use_counts[pool]


class Graph:
    """``torch.cuda.CUDAGraph``.

    Attributes:
        pool: Where its memory lies.
        priority: Of its kernels. ``CUDAGraph::instantiate()`` passes ``cudaGraphInstantiateFlagUseNodePriority``, and a captured kernel has the
            priority of the stream that captured it.
        workspaces: Those whose addresses its kernels have.
        invalid: Whether an operation has made its capture fail, so that it cannot be ended.
    """

    numbers = itertools.count(1)

    def __init__(self, gpu: FakeGpu):
        self.number = next(self.numbers)
        self.pool: Any = None
        self.priority: int | None = None
        self.workspaces: list[Memory] = []
        self.invalid = False
        self._gpu, self._ended = gpu, False
        gpu.graphs.add(self)

    def raw_cuda_graph_exec(self):
        return self.number

    def replay(self):
        self._gpu.replay_whole(self)

    def capture_begin(self, pool):
        self.pool, self.priority = pool or object(), self._gpu.stream.priority
        self._gpu.memory.begin(self.pool, self)
        self._gpu.pinned.begin(self.pool, self)
        self._gpu.generator_captures = True

    def capture_end(self):
        gpu = self._gpu
        failed, self.invalid = self.invalid, False
        error = RuntimeError("operation failed due to a previous error during capture")
        if failed and not gpu.ends_before_it_raises:
            raise error
        gpu.memory.end(self.pool)
        gpu.pinned.end(self.pool)
        gpu.generator_captures = False
        if failed:
            raise error
        self._ended = True

    def reset(self):
        """``CUDAGraph::reset()``: releases its pool only if the capture ended without an error. The destructor calls it."""
        if self._ended:
            self._ended = False
            self._gpu.memory.release(self.pool)
            self._gpu.pinned.release(self.pool)

    def __del__(self):
        self.reset()


class FakeGpu:
    """torch's state, and a record of what was done.

    Attributes:
        log: Calls to ports and captures.
        captured: Captures of steps into a given pool.
        prompts: Captures of forwards over prompts.
        captures: By thread, the graph that captures at present.
        fails: Called in each body.
        ends_before_it_raises: Whether ``capture_end()`` tells the allocators and the generator before it raises: pytorch#180395. False: 2.11.
        memory: Pools of the GPU's memory; likewise ``pinned``.
        generator_captures: Whether torch's generator refuses to draw outside of captures: ``CUDAGeneratorState::increase()`` of 2.11.
        held: Pools with memory that is in use.
        workspaces: cuBLAS workspaces by handle and stream. A thread has a handle of its own.
        graphs: Graphs that live.
        capability: Of the device.
        allocator: Name of torch's allocator.
    """

    capability, allocator = (9, 0), "native"

    def __init__(self):
        self.log: list[Any] = []
        self.captured = self.prompts = 0
        self.captures: dict[int, Graph] = {}
        self.fails = lambda stage: None
        self.ends_before_it_raises = False
        self.memory, self.pinned = Pools(), Pools()
        self.generator_captures = False
        self.held: set[Any] = set()
        self.workspaces: dict[Any, Memory] = {}
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._default, self._of_thread = Stream(), threading.local()

    @property
    def graph(self) -> Graph | None:
        """The graph that the thread captures."""
        return self.captures.get(threading.get_ident())

    @property
    def capturing(self) -> bool:
        return self.graph is not None

    def invalidate(self):
        """An operation that a capture does not allow, if the thread captures."""
        if self.graph is not None:
            self.graph.invalid = True

    @property
    def stream(self) -> Stream:
        """The thread's current stream."""
        return getattr(self._of_thread, "stream", self._default)

    @contextlib.contextmanager
    def on_stream(self, stream):
        before, self._of_thread.stream = self.stream, stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def multiply(self):
        """A matrix product. ``getCurrentCUDABlasHandle()`` of CublasHandlePool.cpp allocates the workspace of a handle and stream once."""
        pool = None if self.graph is None else self.graph.pool
        workspace = self.workspaces.setdefault((threading.get_ident(), self.stream.cuda_stream), Memory(pool))
        if self.graph is not None:
            self.graph.workspaces.append(workspace)

    def clear_workspaces(self):
        """``clearCublasWorkspaces()``."""
        self.workspaces.clear()

    def empty_cache(self):
        held = self.held | {workspace.pool for workspace in self.workspaces.values()}
        self.memory.empty(held)
        self.pinned.empty(set())

    @contextlib.contextmanager
    def capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        """``torch.cuda.graph``. Where the capture does not end, ``__exit__`` does not restore the stream."""
        self.synchronize()
        if pool is not None:
            self.captured += 1
            self.log.append("capture")
        self.empty_cache()
        before, self._of_thread.stream = self.stream, stream
        graph.capture_begin(pool)
        self.captures[threading.get_ident()] = graph
        try:
            yield
        finally:
            del self.captures[threading.get_ident()]
            graph.capture_end()
            self._of_thread.stream = before

    def synchronize(self, device=None):
        """``cudaDeviceSynchronize()``. During a capture on the device, by any thread and in any mode, it is an error, and the capture is invalid."""
        if self.captures:
            for graph in self.captures.values():
                graph.invalid = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def record(self, stage, body, inputs, result):
        """The forward of a stage within a capture. Returns where its result will be: ``result``, of any values."""
        self.graph.recorded = stage, body, inputs, result
        return result

    def replay_whole(self, graph):
        """``CUDAGraph.replay()``: the recorded forward runs again, on the tensors that it had."""
        stage, body, inputs, result = graph.recorded
        result.copy_(body(stage, *inputs))

    def launch(self, captured, given):
        """A launch of a graph: its last step's plan and commit are the scheduler's."""
        for step in captured.steps[:-1]:
            port = step.port
            if port.plan() == Action.STEP:
                given_by = (port.tokens, port.kv, port.query_lens, port.num_draft_tokens, port.n_select)
                port.commit(step.stage.body(*given_by))
        arrays = (given.tokens, given.kv, given.query_lens, given.num_draft_tokens, given.n_select)
        torch.from_numpy(given.selected).copy_(captured.steps[-1].stage.body(*map(torch.from_numpy, arrays)))

    def install(self, monkeypatch):
        """Let the pipelines of a test run on this GPU."""
        from pipespec_kernels import _cuda

        seen = self

        class Port:
            def __init__(self, block, stage, width, device, *, rows, policy):
                self.port = port = _native.StagePort(_native.Block(block.data_ptr()), stage, width)
                arrays = (port.tokens, port.kv, port.query_lens, port.num_draft_tokens, port.n_select)
                self.tokens, self.kv, self.query_lens, self.num_draft_tokens, self.n_select = (
                    torch.from_numpy(a)[:rows] for a in arrays
                )
                self.stage, self.width = stage, width
                self.set_policy(0, 0)

            def set_policy(self, lookahead, max_draft_tokens):
                self.policy = lookahead, max_draft_tokens

            def open(self, scratch):
                seen.log.append("open")

            def plan(self):
                seen.log.append(("plan", self.stage, self.width))
                return self.port.plan(*self.policy, 0)

            def commit(self, selected):
                seen.log.append("commit")
                self.port.commit(selected.data_ptr(), selected.stride(0))

            def close(self, shadow, scratch, log):
                seen.log.append("close")

        body, read, make_launcher = GraphedStage.body, GraphedStage.read, capturing.CaptureContext.launcher
        looked_up = GraphedNgramStage.body

        def watched(stage, *inputs, function=body, result=None):
            seen.multiply()
            seen.fails(stage)
            if not seen.capturing:
                return function(stage, *inputs)
            result = torch.full_like(inputs[0], -1) if result is None else result
            return seen.record(stage, function, inputs, result)

        def watched_read(stage, tokens, held, last):
            seen.captured -= seen.capturing
            seen.prompts += seen.capturing
            config, dtype = stage.model.config, stage.buffers.cache.dtype
            logits = torch.empty((len(tokens), int(last is not None), config.vocab_size), dtype=dtype)
            return watched(stage, tokens, held, last, function=read, result=logits)

        def launcher(context, own):
            make_launcher(context, own)
            steps = [
                lambda given, graphs=dict(of_stage): seen.launch(graphs[given.tokens.shape[1]], given)
                for of_stage in own
            ]
            made = HostLauncher(context.shadow, steps, [[width for width, _ in of_stage] for of_stage in own])
            made.graphs = own
            return made

        monkeypatch.setattr(GraphedDriver, "_runs_on_gpu", lambda driver, models: True)
        monkeypatch.setattr(GraphedStage, "body", watched)
        monkeypatch.setattr(GraphedNgramStage, "body", lambda *given: watched(*given, function=looked_up))
        monkeypatch.setattr(GraphedStage, "read", watched_read)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(capturing, "DevicePort", Port)
        monkeypatch.setattr(capturing.CaptureContext, "launcher", launcher)
        monkeypatch.setattr(_cuda, "driver_version", _cuda.runtime_version)
        monkeypatch.setattr(_cuda, "StageGraphs", types.SimpleNamespace)
        monkeypatch.setattr(_cuda, "CudaLauncher", lambda *arguments: None)
        for name, value in self.replacements().items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name, value in self.private_replacements().items():
            monkeypatch.setattr(torch._C, name, value, raising=False)

    def replacements(self) -> dict[str, Any]:
        """What replaces functions of ``torch.cuda``, by name."""
        return {
            "Stream": Stream,
            "CUDAGraph": lambda: Graph(self),
            "graph": self.capture,
            "current_stream": lambda device=None: self.stream,
            "stream": self.on_stream,
            "device": contextlib.nullcontext,
            "graph_pool_handle": object,
            "synchronize": self.synchronize,
            "get_device_capability": lambda device=None: self.capability,
            "get_allocator_backend": lambda: self.allocator,
        }

    def private_replacements(self) -> dict[str, Any]:
        """What replaces functions of ``torch._C``, by name."""
        return {
            "_cuda_clearCublasWorkspaces": self.clear_workspaces,
            "_cuda_endAllocateToPool": lambda device, pool: self.memory.end(pool),
            "_cuda_releasePool": lambda device, pool: self.memory.release(pool),
        }
