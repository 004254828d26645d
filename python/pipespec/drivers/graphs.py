"""Steps as CUDA graphs: capturing them through torch, naming what cannot be captured, and handing them to the scheduler. Only on a GPU."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from pipespec.compat import forget_capture, graph_handle
from pipespec.drivers.step import FixedStage
from pipespec.placement import NotCapturable
from pipespec_kernels.device_state import DevicePort
from pipespec_kernels.state import StateBlock

_DRAFTS_FIRST = -1
"""Priority of the drafts' streams: their small grids should not queue behind the target's."""


_TORCHS_STREAMS = 32


class Running:
    """Which module of a model is running: while this is entered, :attr:`part` is the innermost one that began and has not come back.

    In this thread: others may use the model, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._thread = threading.get_ident()
        self._inside: list[str] = []
        self._hooks: list[Any] = []

    @property
    def part(self) -> str:
        return self._inside[-1] if self._inside else "the selection of its tokens"

    def __enter__(self) -> Running:
        for path, module in self._model.named_modules():
            name = f"{path} ({type(module).__name__})" if path else type(module).__name__

            def begin(*_: Any, name: str = name) -> None:
                if threading.get_ident() == self._thread:
                    self._inside.append(name)

            def end(*_: Any) -> None:
                if threading.get_ident() == self._thread:
                    self._inside.pop()

            self._hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class PinnedMemory:
    """Memory of the host that every GPU reads and writes at its own address, for a :class:`StateBlock`."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.remap(1)

    def remap(self, size: int | None = None) -> None:
        """At least ``size`` bytes, of any content; at the same address if there is room already."""
        if size is None or size <= self.tensor.numel():
            return
        with torch.inference_mode(False):  # it is written outside of it, too
            self.tensor = torch.zeros(size, dtype=torch.uint8, device="cpu").pin_memory()
        self.array: np.ndarray = self.tensor.numpy()
        self.address = self.tensor.data_ptr()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: another pipeline's streams and pinned memory, freed by this thread while it captures, would end the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


class Lane:
    """What the graphs of one stage read and write beside its cache, and the stream on which they are captured.

    That is nobody else's: torch has one work space of cuBLAS per stream, whose address becomes a part of the graph, and stages run at the same
    time. (torch's streams are 32 per device, dealt out in turn.)
    """

    def __init__(self, device: torch.device) -> None:
        from pipespec_kernels import _cuda

        self.device = device
        self.policy = torch.zeros(4, dtype=torch.int32, device=device)
        self.scratch = torch.zeros(_cuda.STEP_SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self.log = torch.zeros(_cuda.STEP_LOG_BYTES, dtype=torch.uint8, device="cpu").pin_memory()
        self.pool = torch.cuda.graph_pool_handle()
        taken = {lane.stream.cuda_stream for lane in _lanes}
        self.stream: torch.cuda.Stream
        for _ in range(_TORCHS_STREAMS):
            self.stream = torch.cuda.Stream(device)
            if self.stream.cuda_stream not in taken:
                break
        _lanes.add(self)


class Graph:
    """One captured step: ``handle`` is its ``cudaGraphExec_t``. Keeps alive what its kernels refer to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, keeps: object) -> None:
        self.handle = graph_handle(graph)
        self._graph, self._keeps = graph, keeps


class Turn:
    """One stage's step within a graph: plan, forward and selection, commit."""

    def __init__(self, stage: FixedStage, port: DevicePort) -> None:
        self.stage, self.port = stage, port

    def __call__(self, warm: bool) -> None:
        port = self.port
        port.plan()
        if warm:
            # No row is active: plan() has left all idle, at position 0. What the cache holds there must stay; its end holds nothing.
            port.kv.fill_(self.stage.room.cache.capacity - port.width)
        selected = self.stage.body(port.tokens, port.kv, port.n_hint, port.n_select)
        port.commit(selected)


class Graphs:
    """The graphs of a chain over one block, and what they share.

    ``mirror``: the host's block, in :class:`PinnedMemory`; ``sizes``: where it lies and how large it is, for the owner to compare. The kernels
    use a copy of it in the memory of the GPU where all stages are on one, and the mirror itself where they are on several: loads and
    stores only, so no peer access is needed.
    """

    def __init__(self, mirror: StateBlock, stages: Sequence[FixedStage], sizes: Hashable) -> None:
        assert isinstance(mirror.memory, PinnedMemory)
        self._mirror, self._stages = mirror, stages
        self.pinned = mirror.memory.tensor
        devices = {stage.model.device for stage in stages}
        self.block = self.pinned.to(devices.pop()) if len(devices) == 1 else self.pinned
        self._lanes = [Lane(stage.model.device) for stage in stages]
        self.sizes = sizes

    def neutral(self) -> None:
        """No row is active, so whatever runs over the block changes nothing. While no stage runs."""
        self._mirror.reset([], [], [], [])
        self.block.copy_(self.pinned)

    def port(self, stage: FixedStage, width: int, rows: int, *, shared_policy: bool) -> DevicePort:
        """Of ``stage``; ``shared_policy``: the one that the launcher writes before each step."""
        lane = self._lanes[stage.index]
        policy = lane.policy if shared_policy else None
        return DevicePort(self.block, stage.index, width, lane.device, rows=rows, policy=policy)

    def capture(self, turns: Sequence[Turn]) -> Graph:
        """The turns one after the other as one graph; the last one's stage is the one that is launched.

        Raises :class:`NotCapturable`.
        """
        last = turns[-1]
        lane = self._lanes[last.stage.index]
        now = last

        def run(warm: bool) -> None:
            nonlocal now
            last.port.open(lane.scratch)
            for turn in turns:
                now = turn
                turn(warm)
            now = last
            last.port.close(self.pinned, lane.scratch, lane.log)

        running = {turn.stage.index: Running(turn.stage.model) for turn in turns}
        for names in running.values():
            names.__enter__()
        try:
            graph = torch.cuda.CUDAGraph()
            stream = lane.stream
            error: Exception | None = None
            # The outer one restores the stream: torch does not, where a capture cannot be ended.
            with torch.cuda.device(lane.device), torch.cuda.stream(torch.cuda.current_stream(lane.device)):
                stream.wait_stream(torch.cuda.current_stream(lane.device))
                try:
                    with torch.cuda.stream(stream):  # compiles kernels, makes the libraries' work space
                        run(warm=True)
                        run(warm=True)
                    stream.synchronize()
                    with (
                        _no_collection(),
                        torch.cuda.graph(graph, pool=lane.pool, stream=stream, capture_error_mode="thread_local"),
                    ):
                        try:
                            run(warm=False)
                        except Exception as first:
                            error = first
                except Exception as later:  # a capture that has failed does not end well either
                    error = error or later
                    forget_capture(lane.device.index, lane.pool)
            if error is not None:
                first_line = next(iter(str(error).strip().splitlines()), "")
                cause = f"{type(error).__name__}: {first_line}"
                raise NotCapturable(now.stage.name, running[now.stage.index].part, cause) from error
        finally:
            for names in running.values():
                names.__exit__(None, None, None)
        return Graph(graph, ([turn.port for turn in turns], lane, self.block, self.pinned))

    def launcher(self, graphs: Sequence[Sequence[tuple[int, Graph]]]) -> GraphLauncher:
        """``graphs[s]``: width and graph, ascending; none: the stage rides in another's."""
        from pipespec_kernels import _cuda

        stages = []
        for stage, lane, own in zip(self._stages, self._lanes, graphs, strict=True):
            entry = _cuda.StageGraphs()
            entry.device = lane.device.index
            entry.priority = 0 if stage.judges else _DRAFTS_FIRST
            entry.widths, entry.graphs = [width for width, _ in own], [graph.handle for _, graph in own]
            entry.block, entry.policy = self.block.data_ptr(), lane.policy.data_ptr()
            entry.scratch, entry.log = lane.scratch.data_ptr(), lane.log.data_ptr()
            stages.append(entry)
        return GraphLauncher(_cuda.CudaLauncher(self._mirror.memory.address, stages), (self, graphs))

    def read_back(self) -> None:
        """Bring the mirror to the block, all counters included, of which a step copies three. When no stage runs."""
        if self.block is self.pinned:
            return
        stages = range(len(self._stages))
        alive = [self._mirror.is_alive(i) for i in stages]  # the host's word
        self.pinned.copy_(self.block)
        for i in stages:
            self._mirror.set_alive(i, alive[i])


class GraphLauncher:
    """The scheduler's launcher of graphs, and what must outlive it."""

    def __init__(self, native: Any, keeps: object) -> None:
        self.native = native
        self._keeps = keeps
