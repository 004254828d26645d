"""streams: all stages in one process, each with a C++ thread and steps that need no Python: captured graphs on a GPU.

On a CPU the stages are threads of this process that call the very same steps uncaptured. That is for tests, and for trying things out: Python's
lock and torch's threads are shared there, and ``workers`` is the faster choice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from pipespec.drivers.base import Request
from pipespec.drivers.fixed import FixedDriver
from pipespec.drivers.step import FixedStage
from pipespec_kernels.scheduler import HostLauncher, Rectangle, widths

if TYPE_CHECKING:
    from pipespec.drivers.graphs import Graph, Graphs


class StreamsDriver(FixedDriver):
    """The asynchronous chain in one process: every stage runs ahead on a thread (and on a GPU a stream) of its own."""

    schedule = "streams"
    _most = 1

    def _widths(self) -> list[int]:
        """For the present policy, and all before it: steering to and fro captures nothing anew."""
        hints = max(self.policy.max_hints(i) for i in range(len(self.models)))
        self._most = max(self._most, 1 + hints, min(2, len(self.models)))  # a draft catches up by two
        return widths(self._most)

    def _run(self, request: Request) -> None:
        if not self.on_gpu:
            key = self.block.memory.address, self.block.rows, self.block.capacity, *self._widths()
            if self._scheduler is None or self._scheduler_for != key:
                self._scheduler = None  # its threads end
                steps = [self._step_of(stage) for stage in self._stages]
                self._keep_scheduler(key, HostLauncher(self.block, steps, self._widths()), ahead=1)
        self._drive(request)

    def _step_of(self, stage: FixedStage) -> Callable[[Rectangle], None]:
        """What the launcher's thread calls. It must not keep us alive: what C++ holds, the garbage collector does not see."""
        own, errors = weakref.ref(stage), self._errors

        def step(given: Rectangle) -> None:
            stage = own()
            assert stage is not None
            try:
                arrays = (given.tokens, given.kv, given.n_hint, given.n_select)
                selected = stage.body(*(torch.from_numpy(array) for array in arrays))
                torch.from_numpy(given.selected).copy_(selected)
            except BaseException as error:
                errors[stage.index] = error
                raise

        return step

    # ---- on a GPU

    def _wanted(self) -> list[tuple[FixedStage, Hashable]]:
        return [(stage, width) for stage in self._stages for width in self._widths()]

    def _make_graph(self, graphs: Graphs, stage: FixedStage, name: Hashable) -> Graph:
        from pipespec.drivers.graphs import Turn

        assert isinstance(name, int)
        port = graphs.port(stage, name, stage.room.cache.rows, shared_policy=True)
        return graphs.capture([Turn(stage, port)])

    def _launched(self, stage: FixedStage) -> list[tuple[int, Graph]]:
        key = self._rooms_key(stage)
        return [(width, stage.room.graphs[key, width]) for width in self._widths()]
