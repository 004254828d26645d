"""Streams: all stages in one process, each with a C++ thread and steps without Python. Each step is a captured graph.

The tests also run the steps on a CPU, without capture (:func:`pipespec.schedules.base.make_driver`): the stages are then threads that share Python's lock
and torch's threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from pipespec.schedules.base import GenerationRequest
from pipespec.schedules.graphs.buffers import GraphKey, StageStep
from pipespec.schedules.graphs.driver import GraphedDriver
from pipespec.schedules.graphs.stage import GraphedStage
from pipespec_kernels.scheduler import HostLauncher, Rectangle, widths


class StreamsDriver(GraphedDriver):
    """Runs the asynchronous chain in one process: every stage runs ahead on its own thread, and on a GPU on its own stream.

    Each width of each stage is a graph. The scheduler chooses the width of a step when it launches it.
    """

    schedule = "streams"
    _widest = 1

    def step_widths(self) -> list[int]:
        """Widths of the steps, for the present configuration and those before: a change back and forth captures nothing twice."""
        draft_tokens = max(self.config.max_draft_tokens(i) for i in range(len(self.models)))
        # A draft catches up by two tokens.
        self._widest = max(self._widest, 1 + draft_tokens, min(2, len(self.models)))
        return widths(self._widest)

    def graph_keys(self) -> list[GraphKey]:
        step_widths = self.step_widths()
        return [self._graph_key([StageStep(i, width)]) for i in range(len(self._stages)) for width in step_widths]

    def _run_on_host(self, request: GenerationRequest) -> None:
        step_widths = self.step_widths()
        key = self.block.memory.address, self.block.rows, self.block.capacity, *step_widths

        def launcher() -> HostLauncher:
            return HostLauncher(self.block, [self._step_of(stage) for stage in self._stages], step_widths)

        self.scheduled.use(key, launcher, self._lookahead(), ahead=1)
        self._run_scheduled(request)

    def _step_of(self, stage: GraphedStage) -> Callable[[Rectangle], None]:
        """The function that the launcher's thread calls for a step of ``stage``.

        It does not refer to the driver: the launcher, which the garbage collector does not traverse, would keep the driver alive.
        """
        own, errors = weakref.ref(stage), self.scheduled.errors

        def step(given: Rectangle) -> None:
            stage = own()
            assert stage is not None
            try:
                torch.from_numpy(given.selected).copy_(stage.body_on_host(given))
            except BaseException as error:
                errors[stage.index] = error
                raise

        return step
