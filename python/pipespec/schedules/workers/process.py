"""The process of one draft stage.

It builds its model on shared weights, then serves one generation after the other. It ends when the caller closes the socket,
and at most ``_ORPHAN_CHECK_S`` after its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from pipespec.engine.chain import DraftSpec, make_upstream
from pipespec.engine.inputs import StageInputs
from pipespec.engine.stage import Stage
from pipespec.schedules.asynchronous import drafting
from pipespec.schedules.workers.channel import Channel, ChannelError, Closed
from pipespec.schedules.workers.weights import SharedWeights
from pipespec_kernels import _native
from pipespec_kernels.state import SharedMemory, StateBlock
from pipespec_kernels.trace import TraceMemory

_ORPHAN_CHECK_S = 0.5

NICE = 5
"""Added to the niceness of a draft, whose priority is lower than the target's.

So a target that wakes up takes its core at once. With equal priorities it would wait for the end of a time slice. If stages outnumber cores, the
drafts share the time that the target leaves.
"""


@dataclass(frozen=True)
class Setup:
    """First message to a worker: what to build. The file descriptors of its shared memories come with it.

    Args:
        index: Stage of the draft.
        weights: The model's tensors in the shared memory.
        parts: Number of file descriptors of each shared memory: the weights, the state block, the trace if the calls are traced.
        trace: Entries of the trace for each stage.
        native: Whether the model may run in the native form.
        drafts: The specs of the stages in this process: the inline ones upstream, and the draft.
    """

    index: int
    weights: SharedWeights
    parts: Sequence[int]
    trace: int
    native: bool
    drafts: Sequence[DraftSpec]

    def stage(self, model: PreTrainedModel, block: StateBlock, trace: SharedMemory | None) -> Stage:
        """The stage of the draft."""
        traces = None if trace is None else TraceMemory(block.stages, self.trace, trace)

        def trace_of(stage: int) -> _native.TraceBuffer | None:
            return None if traces is None else traces.buffer(stage)

        *inline, draft = self.drafts
        upstream = make_upstream(inline, block, self.index - len(inline), trace_of)
        stage: Stage = draft.make_stage(
            model, block, self.index, trace_of(self.index), native=self.native, upstream=upstream
        )
        return stage


@dataclass(frozen=True)
class WorkerCall:
    """Message to a worker for each call: one generation to take part in."""

    generation: int
    inputs: StageInputs
    sampling_params: bytes  # pickled


@dataclass(frozen=True)
class Status:
    """Message of a worker: when it is ready, after its first step, at the end of each generation, and when it fails.

    Attributes:
        generation: The last one that has ended; 0: none.
        form: How its forward runs; empty before the first step.
        translated: Of the last generation, see ``Driver.translated``.
        failure: The error that ends it, in a line; empty while there is none.
        details: Of the failure.
    """

    generation: int = 0
    form: str = ""
    translated: tuple[int, int] | None = None
    failure: str = ""
    details: str = ""


class _Worker:
    def __init__(self, conn: Channel, parent: int) -> None:
        self._conn, self._parent = conn, parent
        self._status = Status()

    def _tell(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self._conn.send(self._status)

    def _require_parent(self) -> None:
        if os.getppid() != self._parent:
            raise Closed("the parent has ended")

    def _next(self) -> tuple[Any, list[int]]:
        while not self._conn.poll(_ORPHAN_CHECK_S):
            self._require_parent()
        return self._conn.receive()

    def serve(self) -> NoReturn:
        """Take part in one generation after the other. Raises ``Closed`` at the end of the caller or the parent."""
        setup, fds = self._next()
        # Drafts are small: more threads would cost them more in synchronisation than they gain.
        torch.set_num_threads(1)
        left = iter(fds)
        weights, memory, *trace = (SharedMemory(list(islice(left, count))) for count in setup.parts)
        model = setup.weights.build(weights)
        self._tell()
        call, _ = self._next()
        # Not earlier: before the first call, the caller may still change the layout of the block.
        stage = setup.stage(model, StateBlock(memory), next(iter(trace), None))
        while True:
            stage.block.refresh()
            self._take_part(stage, call)
            self._tell(generation=call.generation, translated=stage.translated)
            call, _ = self._next()

    def _take_part(self, stage: Stage, call: WorkerCall) -> None:
        stage.prefill(replace(call.inputs, sampling_params=pickle.loads(call.sampling_params)))
        for _ in drafting(stage, call.generation, int(1e9 * _ORPHAN_CHECK_S)):
            if stage.form not in ("", self._status.form):
                self._tell(form=stage.form)
            self._require_parent()
            # The parent may live on, stopped, without the caller, which sends nothing before the call has ended.
            if self._conn.poll():
                raise Closed("the caller has ended")
        self._require_parent()


def main(conn_fd: int, parent: int | None = None) -> NoReturn:
    """Run the worker until the caller closes the socket or the parent ends.

    Args:
        conn_fd: Socket to the caller, which sends a :class:`Setup` and then a :class:`WorkerCall` for each call.
        parent: Process id of the parent, if it may have ended already.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    os.nice(NICE)
    conn = Channel(socket.socket(fileno=conn_fd))
    status = 0
    try:
        _Worker(conn, parent or os.getppid()).serve()
    except Closed:
        pass  # the caller closed the pipeline, or died
    except BaseException as error:
        with suppress(ChannelError):
            details = "".join(traceback.format_exception(error))
            conn.send(Status(failure=f"{type(error).__name__}: {error}", details=details))
        status = 1
    # At once: with torch, the interpreter needs a second to shut down, and there is no state to save.
    os._exit(status)
