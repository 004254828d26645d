"""The process of one draft stage, started by ``workers.py`` with an inherited socket.

It builds its model on shared weights, then serves one generation after the other. It ends when the caller closes the socket
or dies; it never outlives its parent by more than ``_ORPHAN_CHECK_NS``.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from pipespec.drivers.weights import SharedWeights
from pipespec.stage import WIDTH, Stage, Start
from pipespec_kernels.state import Action, SharedMemory, StateBlock
from pipespec_kernels.trace import TraceMemory

_ORPHAN_CHECK_NS = 500_000_000

NICE = 5
"""A draft's priority is lower than the target's, which everybody waits for: a target that wakes up takes its core at once, where
between equals it waits for the end of a slice; and where stages outnumber cores, the drafts share what the target leaves."""


@dataclass(frozen=True)
class Setup:
    """First message: what to build. The descriptors were inherited under these numbers."""

    index: int
    weights: SharedWeights
    weights_fd: int
    block_fd: int
    threads: int
    trace_fd: int = -1
    """Memory of ``trace`` entries for each stage; -1: nothing is traced."""
    trace: int = 0


@dataclass(frozen=True)
class Run:
    """One generation to take part in."""

    generation: int
    start: Start
    selection: bytes  # pickled


@dataclass(frozen=True)
class Failed:
    """Last message of a worker that cannot go on."""

    cause: str
    details: str


def _serve(conn: Connection, setup: Setup, parent: int) -> None:
    torch.set_num_threads(setup.threads)
    model = setup.weights.build(SharedMemory(setup.weights_fd))
    block = StateBlock(SharedMemory(setup.block_fd))
    trace = None
    if setup.trace_fd >= 0:
        shared = TraceMemory(block.stages, setup.trace, SharedMemory(setup.trace_fd))
        trace = shared.buffer(setup.index)
    stage = Stage(model, block, setup.index, trace)
    conn.send("ready")
    while True:
        while not conn.poll(_ORPHAN_CHECK_NS / 1e9):
            if os.getppid() != parent:
                return
        run: Run = conn.recv()
        block.refresh()
        _take_part(stage, run, parent)
        conn.send(run.generation)


def _take_part(stage: Stage, run: Run, parent: int) -> None:
    stage.prefill(replace(run.start, selection=pickle.loads(run.selection)))
    port = stage.port
    while port.generation == run.generation:
        window = port.window  # the caller may change it at any time
        if window == 0:
            port.pause(_ORPHAN_CHECK_NS)
        elif stage.step(window, min(port.upstream_window, WIDTH // 2)) != Action.STEP:
            port.park(_ORPHAN_CHECK_NS)
        if os.getppid() != parent:
            return


def main() -> None:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's business
    os.nice(NICE)
    conn = Connection(int(sys.argv[1]))
    status = 0
    try:
        _serve(conn, conn.recv(), parent)
    except (EOFError, ConnectionError):
        pass  # the caller closed the pipeline, or died
    except BaseException as error:
        with suppress(ConnectionError):
            conn.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        status = 1
    # At once: to tear down the interpreter with torch in it takes a second, and there is nothing here to be saved.
    os._exit(status)
