"""Capture of steps as CUDA graphs through torch. A GPU is required."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipespec.config import SpeculationConfig
from pipespec.errors import NotCapturable
from pipespec.models.compat import discard_capture, graph_handle, own_workspaces
from pipespec.models.families import is_opaque_linear
from pipespec.models.properties import compute_dtype
from pipespec.process.threads import raise_handlers_error
from pipespec.schedules.graphs.buffers import GraphKey, StageStep
from pipespec.schedules.graphs.scheduling import PinnedMemory
from pipespec.schedules.graphs.stage import GraphedStage, StaticStage
from pipespec_kernels.device_state import DevicePort, PolicyRing
from pipespec_kernels.env import MIN_CAPABILITY
from pipespec_kernels.scheduler import Launcher
from pipespec_kernels.state import StateBlock

_DRAFT_PRIORITY = -1
"""Priority of the drafts' streams: their small grids should not queue after the target's."""

_TORCH_STREAMS = 32
"""Number of streams per device and priority. torch assigns them round-robin."""

_INVALIDATED = "previous error during capture"
"""Of the message of ``cudaErrorStreamCaptureInvalidated``: something outside of the capture has ended it."""

_capturing: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)
"""Held during a capture on a device. ``torch.cuda.graph`` synchronises the device as it begins, which invalidates a capture of any other thread."""


def _refused(part: str, cause: object, error: Exception | None = None) -> NotCapturable:
    found = NotCapturable("the chain", part, str(cause).strip())
    found.__cause__ = error
    return found


def check_device(device: torch.device) -> None:
    """Check that steps on ``device`` can be captured.

    Raises:
        NotCapturable: The device, or torch's allocator, cannot.
    """
    if torch.version.hip is not None:
        raise _refused("ROCm", "captured steps need a GPU of NVIDIA")
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < MIN_CAPABILITY:
        needed = f"the kernels need compute capability {MIN_CAPABILITY / 10}"
        raise _refused(str(device), f"{needed}, and this GPU has {major}.{minor}")
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        cause = "it has no memory pools for captures: unset PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"
        raise _refused("torch's allocator", cause)


def cuda_module() -> Any:
    """``pipespec_kernels._cuda``, with the kernels over the block and the launcher.

    Raises:
        NotCapturable: It is not there or does not load, or the driver does not run it.
    """
    try:
        from pipespec_kernels import _cuda
    except ImportError as error:
        raise _refused("the CUDA module", error, error) from error
    try:
        supports, runtime = _cuda.driver_version(), _cuda.runtime_version()
    except RuntimeError as error:
        raise _refused("the driver", error, error) from error
    # Within one major version any driver runs any runtime.
    if supports // 1000 < runtime // 1000:
        driver, module = (f"{version // 1000}.{version % 1000 // 10}" for version in (supports, runtime))
        what = f"it supports CUDA {driver}, and the CUDA module has the runtime of {module}"
        raise _refused("the driver", f"{what}: update the driver, or build pipespec from source with an older nvcc")
    return _cuda


class RecordedStep:
    """One stage's step within a graph: plan, forward and selection, commit."""

    def __init__(self, stage: StaticStage, port: DevicePort) -> None:
        self.stage, self.port = stage, port

    def __call__(self, warm_up: bool) -> None:
        """Run the step's kernels on the current stream. ``warm_up``: outside of the capture, over a block without active rows."""
        port = self.port
        port.plan()
        if warm_up:
            # The plan of an inactive row is position 0, where the cache may hold a text. Its end holds none.
            port.kv.fill_(self.stage.buffers.capacity - port.width)
        selected = self.stage.body(port.tokens, port.kv, port.query_lens, port.num_draft_tokens, port.n_select)
        port.commit(selected)


class CapturedGraph:
    """One captured graph. Keeps alive what its kernels refer to.

    Attributes:
        steps: The steps that it contains; none for the graph of something else.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, steps: Sequence[RecordedStep], keep_alive: object) -> None:
        self.steps = steps
        self._graph, self._keep_alive = graph, keep_alive

    @property
    def handle(self) -> int:
        """Its ``cudaGraphExec_t``."""
        return graph_handle(self._graph)

    def replay(self) -> None:
        """Launch it on torch's current stream."""
        self._graph.replay()


_all_resources: weakref.WeakSet[CaptureResources] = weakref.WeakSet()

Part = tuple[StaticStage, Callable[[bool], None]]
"""A stage, and what it launches on the current stream. The argument says whether that is a warm-up."""


class CaptureResources:
    """The stream that captures the graphs of one stage, and their memory.

    No other stage uses the stream: torch has one cuBLAS workspace per stream, whose address becomes part of the graph, and stages run
    at the same time.

    Attributes:
        priority: Of its kernels, lower first. torch instantiates graphs so that each kernel keeps the priority of the stream that captured it,
            whatever stream the graph is launched on.
        stream: The stream that captures, of that priority.

    Raises:
        NotCapturable: See :func:`check_device`.
    """

    def __init__(self, stage: StaticStage) -> None:
        self.device, self.priority = stage.device, 0 if stage.is_target else _DRAFT_PRIORITY
        check_device(self.device)
        self._pool: Any = None
        self._graphs: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self._compared: set[tuple[int, int]] = set()
        taken = {resources.stream.cuda_stream for resources in _all_resources}
        self.stream: torch.cuda.Stream
        for _ in range(_TORCH_STREAMS):
            self.stream = torch.cuda.Stream(self.device, priority=self.priority)
            if self.stream.cuda_stream not in taken:
                break
        _all_resources.add(self)

    def leave_pool(self) -> None:
        """Use another pool from here on, after a capture into this one has failed. torch may still record to it."""
        self._graphs = weakref.WeakSet()

    def capture(
        self,
        parts: Sequence[Part],
        steps: Sequence[RecordedStep] = (),
        keep_alive: object = None,
        *,
        inside: str | None = None,
    ) -> CapturedGraph:
        """Capture what the parts launch, one after the other, as one graph; once more if something else has ended the capture: a thread that has
        synchronised the whole device.

        ``inside``: what that is, if no module of the model is called; None: hooks find the module that an error comes from.

        Raises:
            NotCapturable: Names the stage and the module that the error comes from.
        """
        try:
            return self._capture(parts, steps, keep_alive, inside)
        except NotCapturable as error:
            if _INVALIDATED not in error.cause:
                raise
        return self._capture(parts, steps, keep_alive, inside)

    def _capture(
        self, parts: Sequence[Part], steps: Sequence[RecordedStep], keep_alive: object, named: str | None
    ) -> CapturedGraph:
        # All graphs share a memory pool. torch refuses one that no graph uses while memory in it is held.
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        pool, graph, stream = self._pool, torch.cuda.CUDAGraph(), self.stream
        current, inside = parts[-1][0], named or "the step as a whole"
        error: Exception | None = None

        def run(warm_up: bool) -> None:
            nonlocal current, inside
            for stage, launch in parts:
                try:
                    launch(warm_up)
                except Exception:
                    current, inside = stage, named or (running.get(stage) or ["the selection of its tokens"])[-1]
                    raise

        with ExitStack() as trackers:
            running: dict[StaticStage, list[str]] = {
                stage: trackers.enter_context(_running_modules(stage.model))
                for stage in dict.fromkeys(stage for stage, _ in parts)
                if named is None and isinstance(stage, GraphedStage)
            }
            # The outer context restores the stream: torch does not where a capture fails to end.
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
                stream.wait_stream(torch.cuda.current_stream(self.device))
                try:
                    # The warm-up compiles kernels and makes the libraries' handles.
                    with torch.cuda.stream(stream):
                        run(warm_up=True)
                        run(warm_up=True)
                    stream.synchronize()
                    with (
                        _capturing[self.device],
                        _garbage_collection_off(),
                        own_workspaces(),
                        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                    ):
                        try:
                            run(warm_up=False)
                        except Exception as first:
                            error = first
                # Ending a capture that has failed raises once more.
                except Exception as later:
                    error = error or later
                if error is not None:
                    self.leave_pool()
                    with _capturing[self.device]:
                        discard_capture(graph, self.device.index, pool)
            if error is not None:
                raise_handlers_error()
                cause = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
                raise NotCapturable(current.name, inside, cause) from error
        captured = CapturedGraph(graph, steps, (self, keep_alive))
        self._graphs.add(captured)
        return captured

    def compare_opaque(self, stage: GraphedStage, rows: int) -> None:
        """Compare the opaque modules of a stage's model, captured once and replayed on two other inputs of ``rows``, with their eager calls, bit by bit.

        One graph has all of them, so that each uses memory in which others have written since the capture. It finds kernels that a library has launched
        outside of the capture, and products that differ from call to call. Raises ``NotCapturable`` for the first module whose bits differ, or that
        cannot be captured.
        """
        if (stage.buffers.weights, rows) in self._compared:
            return
        model, outputs = stage.model, list[torch.Tensor]()
        modules = {name: module for name, module in model.named_modules() if is_opaque_linear(module)}
        sizes, dtype = {module.in_features for module in modules.values()}, compute_dtype(model)
        noise = torch.Generator().manual_seed(0)
        with torch.inference_mode(False), torch.no_grad():
            inputs = {size: torch.zeros((rows, size), dtype=dtype, device=self.device) for size in sizes}

            def multiply(warm_up: bool) -> None:
                outputs[:] = [module(inputs[module.in_features]) for module in modules.values()]

            captured = self.capture([(stage, multiply)]) if modules else None
            replayed = list(outputs)
            for _ in range(2 * (captured is not None)):
                for size, x in inputs.items():
                    x.copy_(torch.randn((rows, size), generator=noise, dtype=torch.float32, device="cpu"))
                captured.replay()  # type: ignore[union-attr]
                multiply(True)
                for (name, module), own, ours in zip(modules.items(), outputs, replayed, strict=True):
                    # The router of a mixture of experts may return more.
                    if isinstance(own, torch.Tensor) and not torch.equal(own, ours):
                        cause = "replayed on other inputs, its product has other bits than in an eager call"
                        raise NotCapturable(stage.name, f"{name} ({type(module).__name__})", cause)
        self._compared.add((stage.buffers.weights, rows))


class CapturedBody:
    """Forward and selection of a stage as a graph of its own, of which the host takes the plan and the commit.

    ``width``: columns of the step. The stage is prepared. Raises as :meth:`CaptureResources.capture`.
    """

    def __init__(self, resources: CaptureResources, stage: GraphedStage, width: int) -> None:
        cache, self._stream = stage.buffers.cache, resources.stream
        resources.compare_opaque(stage, cache.rows * width)
        host = torch.zeros(cache.rows * (width + 4), dtype=torch.int32, device="cpu").pin_memory()
        self._host, self._device = host, host.to(resources.device, copy=True)
        self._selected = torch.empty((cache.rows, width), dtype=torch.int32, device="cpu").pin_memory()
        tokens, kv, *counts = self._device.split([cache.rows * width, *[cache.rows] * 4])
        given = tokens.view(cache.rows, width), kv, *counts

        def run(warm_up: bool) -> None:
            if warm_up:
                # Without a selection. The cache's end holds no text.
                self._device.zero_()
                kv.fill_(cache.capacity - width)
            self._output = stage.body(*given)

        self._captured = resources.capture([(stage, run)])

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        """:meth:`GraphedStage.body` of tensors of the host. Waits for the step."""
        torch.cat([tensor.reshape(-1) for tensor in given], out=self._host)
        with torch.cuda.stream(self._stream):
            self._device.copy_(self._host, non_blocking=True)
            self._captured.replay()
            self._selected.copy_(self._output, non_blocking=True)
        self._stream.synchronize()
        return self._selected


class CapturedPrompt:
    """The forward of a stage over a part of its prompt, as a graph. Its model has a fused form without opaque modules.

    ``width``: columns. ``held``: tokens of each row that the cache holds; the warm-up writes after them, where the first replay does. ``selects``: whether it
    ends with the logits of one column. Raises as :meth:`CaptureResources.capture`.
    """

    def __init__(
        self, resources: CaptureResources, stage: GraphedStage, width: int, held: Sequence[int], selects: bool
    ) -> None:
        rows = len(held)
        self._tokens = torch.zeros((rows, width), dtype=torch.int32, device=resources.device)
        self._held = torch.tensor(held, dtype=torch.int32, device=resources.device)
        self._last = torch.zeros(1, dtype=torch.int64, device=resources.device) if selects else None

        def run(warm_up: bool) -> None:
            self._logits = stage.read(self._tokens, self._held, self._last)

        self._captured = resources.capture([(stage, run)], inside="the forward over its prompt")

    def __call__(self, tokens: torch.Tensor, held: Sequence[int]) -> torch.Tensor:
        """Feed tokens ``[rows, up to width]`` after the first ``held[r]`` ones of each row, on the current stream. Returns the logits of the last one,
        ``[rows, 1, vocabulary]``, if the graph selects, else those of no column. The next replay of any graph of the stage overwrites them."""
        self._tokens[:, : tokens.shape[1]] = tokens
        self._tokens[:, tokens.shape[1] :] = 0
        self._held.copy_(torch.tensor(held, dtype=torch.int32))
        if self._last is not None:
            self._last.fill_(tokens.shape[1] - 1)
        self._captured.replay()
        return self._logits


def capture_bodies(
    resources: Sequence[CaptureResources],
    stages: Sequence[StaticStage],
    steps: Sequence[StageStep],
    refused: dict[int, NotCapturable],
) -> None:
    """Capture the steps that a call lacks, each as a graph of its own. A stage that cannot be captured joins ``refused``. One without a model has one launch."""
    for i, width in steps:
        stage = stages[i]
        if not isinstance(stage, GraphedStage):
            continue
        graphs, key = stage.buffers.graphs, stage.key(width)
        try:
            if i not in refused:
                graphs[key] = graphs.pop(key, None) or CapturedBody(resources[i], stage, width)
        except NotCapturable as error:
            # Without its traceback, which holds the memory of the capture.
            refused[i] = NotCapturable(error.stage, error.part, error.cause)
            graphs.clear()


class CaptureContext:
    """Captures the graphs of a chain over one state block, and builds the scheduler's launcher for them.

    The kernels use a copy of the block in the memory of the GPU where all stages are on one. On several GPUs they use ``shadow`` itself, the host's block,
    with loads and stores only, so that no peer access is needed. ``layout``: address and size of the block, for the owner to compare.
    """

    def __init__(self, shadow: StateBlock, stages: Sequence[StaticStage], layout: Hashable) -> None:
        assert isinstance(shadow.memory, PinnedMemory)
        self.layout = layout
        self.shadow, self.stages = shadow, stages
        self.resources = [CaptureResources(stage) for stage in stages]
        _cuda = cuda_module()
        self._policies, self._logs = [], []
        for resources in self.resources:
            policies = torch.zeros((_cuda.STEPS_IN_FLIGHT, 4), dtype=torch.int32, device="cpu").pin_memory()
            scratch = torch.zeros(_cuda.STEP_SCRATCH_BYTES, dtype=torch.uint8, device=resources.device)
            self._policies.append(PolicyRing(policies, scratch))
            self._logs.append(torch.zeros(_cuda.STEP_LOG_BYTES, dtype=torch.uint8, device="cpu").pin_memory())
        self._pinned = shadow.memory.tensor
        devices = {stage.device for stage in stages}
        self._block = self._pinned.to(devices.pop()) if len(devices) == 1 else self._pinned

    def deactivate_rows(self) -> None:
        """Empty the block of active rows, so that kernels change nothing in it. While no stage runs."""
        self.shadow.reset([], [], [], [])
        self._block.copy_(self._pinned)

    def capture(self, key: GraphKey) -> CapturedGraph:
        """Capture the steps of ``key`` as one graph, over the static buffers that the stages use at present. Raises as :meth:`CaptureResources.capture`."""
        config = SpeculationConfig(lookahead=key.lookahead)
        recorded: dict[StageStep, RecordedStep] = {}
        for planned in dict.fromkeys(key.steps):
            stage, resources = self.stages[planned.stage], self.resources[planned.stage]
            # The launcher writes the policies of the stage that it launches. The others' policy is part of the graph.
            is_launched = planned.stage == key.launched.stage
            policy = self._policies[planned.stage] if is_launched else None
            rows = stage.buffers.rows
            port = DevicePort(self._block, planned.stage, planned.width, resources.device, rows=rows, policy=policy)
            if not is_launched:
                bound = stage.bound(config.lookahead_of(planned.stage))
                port.set_policy(bound, config.max_draft_tokens(planned.stage))
            recorded[planned] = RecordedStep(stage, port)
        steps = [recorded[planned] for planned in key.steps]
        for stage, port in ((step.stage, step.port) for step in steps):
            if isinstance(stage, GraphedStage):
                self.resources[stage.index].compare_opaque(stage, stage.buffers.rows * port.width)
        last, policy, log = steps[-1], self._policies[key.launched.stage], self._logs[key.launched.stage]
        parts: list[Part] = [
            (last.stage, lambda _: last.port.open(policy.scratch)),
            *((step.stage, step) for step in steps),
            (last.stage, lambda _: last.port.close(self._pinned, policy.scratch, log)),
        ]
        captured = self.resources[key.launched.stage].capture(parts, steps, (policy, log, self._block, self._pinned))
        try:
            _ = captured.handle
        except RuntimeError as error:
            raise _refused("torch", error, error) from error
        return captured

    def launcher(self, graphs: Sequence[Sequence[tuple[int, CapturedGraph]]]) -> Launcher:
        """Build the scheduler's launcher. Raises ``NotCapturable`` where the CUDA module refuses the device or the driver.

        ``graphs``: per stage the width and graph of each step that it is launched with, ascending. Empty: its steps are in another stage's graph.
        """
        _cuda = cuda_module()
        entries = []
        for resources, policy, log, own in zip(self.resources, self._policies, self._logs, graphs, strict=True):
            entry = _cuda.StageGraphs()
            entry.device = resources.device.index
            entry.priority = resources.priority
            entry.widths, entry.graphs = [width for width, _ in own], [graph.handle for _, graph in own]
            entry.block, entry.policies = self._block.data_ptr(), policy.policies.data_ptr()
            entry.scratch, entry.log = policy.scratch.data_ptr(), log.data_ptr()
            entries.append(entry)
        try:
            native = _cuda.CudaLauncher(self.shadow.memory.address, entries)
        except (RuntimeError, ValueError) as error:
            raise NotCapturable("the chain", "the launcher of its graphs", str(error)) from error
        launcher: Any = SimpleNamespace(native=native, keep_alive=(self, graphs))
        return launcher

    def read_back(self) -> None:
        """Copy the block to the host shadow, with all counters; a step copies only three of them. While no stage runs."""
        if self._block is self._pinned:
            return
        stages = range(len(self.stages))
        # The host writes these flags, so its own are the newer ones.
        alive = [self.shadow.is_alive(i) for i in stages]
        self._pinned.copy_(self._block)
        for i in stages:
            self.shadow.set_alive(i, alive[i])


@contextmanager
def _running_modules(model: nn.Module) -> Iterator[list[str]]:
    """The modules of a model that have begun and not returned in this thread, outermost first: path and class. After an error the last one has raised it.

    The model has hooks while the context is open. Other threads may use it.
    """
    inside, thread, hooks = list[str](), threading.get_ident(), list[Any]()

    def end(*_: Any) -> None:
        if threading.get_ident() == thread:
            inside.pop()

    try:
        for path, module in model.named_modules():
            name = f"{path} ({type(module).__name__})" if path else type(module).__name__

            def begin(*_: Any, name: str = name) -> None:
                if threading.get_ident() == thread:
                    inside.append(name)

            hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Streams and pinned memory of another pipeline that this thread frees during its capture would end the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
