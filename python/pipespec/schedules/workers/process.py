"""The process of one draft stage.

It builds its model on shared weights, then serves one generation after the other. It ends when the caller closes the socket,
and at most ``_ORPHAN_CHECK_NS`` after its parent.
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

from pipespec.engine.inputs import StageInputs
from pipespec.engine.ngram import NgramDraft, NgramStage
from pipespec.engine.stage import Stage
from pipespec.engine.translation import TranslatedStage, Translation
from pipespec.schedules.asynchronous import drafting
from pipespec.schedules.workers.channel import Channel, ChannelError, Closed
from pipespec.schedules.workers.weights import SharedWeights
from pipespec_kernels.state import SharedMemory, StateBlock
from pipespec_kernels.trace import TraceMemory

_ORPHAN_CHECK_NS = 500_000_000
_REPORT_TIMEOUT_S = 5.0

STARTED = "started"
READY = "ready"

NICE = 5
"""Added to the niceness of a draft, whose priority is lower than the target's.

So a target that wakes up takes its core at once. With equal priorities it would wait for the end of a time slice. If stages outnumber cores, the
drafts share the time that the target leaves.
"""


@dataclass(frozen=True)
class Setup:
    """First message to a worker: what to build.

    Args:
        index: Stage of the draft.
        weights: The model's tensors in the shared memory.
        threads: Number of torch's threads.
        parts: Number of file descriptors of each shared memory: the weights, the state block, the trace if the calls are traced.
        trace: Entries of the trace for each stage; 0: no trace.
        native: Whether the model may run in the native form.
        has_upstream: Whether the draft upstream is an n-gram index, which runs in this process, or the draft has another tokenizer than the target.
            The index or the tokenizers are sent once the worker is ready.
    """

    index: int
    weights: SharedWeights
    threads: int
    parts: Sequence[int]
    trace: int = 0
    native: bool = True
    has_upstream: bool = False


@dataclass(frozen=True)
class WorkerCall:
    """Message to a worker for each call: one generation to take part in."""

    generation: int
    inputs: StageInputs
    sampling_params: bytes  # pickled


@dataclass(frozen=True)
class Failed:
    """Last message of a worker that fails."""

    cause: str
    details: str


def _serve(conn: Channel, fds: Sequence[int], parent: int) -> None:
    conn.send(STARTED)
    setup: Setup = _received(conn)
    torch.set_num_threads(setup.threads)
    left = iter(fds)
    memories = iter([SharedMemory(list(islice(left, count))) for count in setup.parts])
    weights, shared_block = next(memories), next(memories)
    shared_trace = next(memories, None)
    model = setup.weights.build(weights)
    conn.send(READY)
    upstream: NgramDraft | Translation | None = _received(conn) if setup.has_upstream else None
    stage: Stage | None = None
    while True:
        while not conn.poll(_ORPHAN_CHECK_NS / 1e9):
            if os.getppid() != parent:
                return
        call: WorkerCall = _received(conn)
        if stage is None:
            # Not earlier: before the first call of a worker, the caller may still change the layout of the block.
            block = StateBlock(shared_block)
            traces = None if shared_trace is None else TraceMemory(block.stages, setup.trace, shared_trace)
            trace = None if traces is None else traces.buffer(setup.index)
            at: tuple[Any, ...] = (model, block, setup.index, trace)
            if isinstance(upstream, Translation):
                stage = TranslatedStage(*at, native=setup.native, translation=upstream)
            else:
                ngram = None
                if upstream is not None:
                    buffer = None if traces is None else traces.buffer(0)
                    ngram = NgramStage(upstream, block, buffer)
                stage = Stage(*at, native=setup.native, ngram=ngram)
        stage.block.refresh()
        _take_part(stage, call, conn, parent)
        if os.getppid() != parent:
            return
        if isinstance(stage, TranslatedStage):
            # For the caller's report.
            conn.send(stage.translated)
        conn.send(call.generation)


def _received(conn: Channel) -> Any:
    return conn.receive()[0]


def _take_part(stage: Stage, call: WorkerCall, conn: Channel, parent: int) -> None:
    stage.prefill(replace(call.inputs, sampling_params=pickle.loads(call.sampling_params)))
    form = ""
    for _ in drafting(stage, call.generation, _ORPHAN_CHECK_NS):
        if not form and (form := stage.form):
            # For the caller's report.
            conn.send(form)
        # The parent may live on, stopped, without the caller, which sends nothing before the call has ended.
        if conn.poll() or os.getppid() != parent:
            return


def main(conn_fd: int, *memory_fds: int, parent: int | None = None) -> NoReturn:
    """Run the worker until the caller closes the socket or the parent ends.

    Args:
        conn_fd: Socket to the caller, which sends a :class:`Setup` and then a :class:`WorkerCall` for each call.
        memory_fds: Of the shared memories, see :class:`Setup`.
        parent: Process id of the parent, if it may have ended already.
    """
    parent = parent or os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    os.nice(NICE)
    conn = Channel(socket.socket(fileno=conn_fd))
    status = 0
    try:
        _serve(conn, memory_fds, parent)
    except Closed:
        pass  # the caller closed the pipeline, or died
    except BaseException as error:
        report(conn, error)
        status = 1
    # At once: with torch, the interpreter needs a second to shut down, and there is no state to save.
    os._exit(status)


def report(conn: Channel, error: BaseException) -> None:
    """Send the caller the error that ends this worker."""
    with suppress(ChannelError):
        details = "".join(traceback.format_exception(error))
        conn.send(Failed(f"{type(error).__name__}: {error}", details), timeout_s=_REPORT_TIMEOUT_S)
