"""The draft's side of a chain whose stages run at once: it takes part in one call after the other, over any connection.

:func:`main` is the process of a draft that the target's process has started. It builds its model on shared weights. It ends when the caller
closes the socket, and at most ``_ORPHAN_CHECK_S`` after its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, NoReturn

import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.chain import DraftSpec, make_upstream
from pipespec.engine.stage import Stage
from pipespec.process.threads import raise_handlers_error
from pipespec.schedules.asynchronous.messages import Call, Channel, ChannelError, Closed, SharedWeights, Status
from pipespec_kernels import _native
from pipespec_kernels.state import Action, SharedMemory, StateBlock
from pipespec_kernels.trace import TraceMemory

_ORPHAN_CHECK_S = 0.5


class Caller(ABC):
    """The target's process, as a draft's process sees it.

    Attributes:
        fatal: Errors that end the draft's process. After others it sits out the call.
        max_sleep_s: Longest sleep of a draft that has nothing to do.
    """

    fatal: ClassVar[tuple[type[Exception], ...]]
    max_sleep_s: ClassVar[float]

    @abstractmethod
    def next_call(self) -> Call | None:
        """Wait for the next call; None if there are no more."""

    @abstractmethod
    def enter(self, call: Call) -> Stage | None:
        """The draft's stage, over the block as the caller has laid it out for ``call``; None if the call has ended already."""

    @abstractmethod
    def stepped(self) -> None:
        """The stage took a step, or slept. Raises an error of ``fatal`` if the target's process has ended."""

    @abstractmethod
    def send(self, status: Status) -> None:
        """Send the state of the draft."""


def serve(caller: Caller) -> None:
    """Take part in one call after the other, until there are no more."""
    status = Status()
    caller.send(status)
    while (call := caller.next_call()) is not None:
        ended = replace(status, ended=call.generation, translated=None, failure="", details="")
        try:
            if (stage := caller.enter(call)) is not None:
                stage.prefill(call.inputs)
                caller.stepped()
                _draft(stage, call.generation, caller, status)
                ended = replace(ended, form=stage.form, translated=stage.translated)
        except caller.fatal:
            raise
        except Exception as error:
            raise_handlers_error()
            ended = ended.failed(error)
        status = ended
        caller.send(status)


def _draft(stage: Stage, generation: int, caller: Caller, status: Status) -> None:
    """Take steps until the generation ends."""
    port, max_sleep_ns = stage.port, int(1e9 * caller.max_sleep_s)
    while port.generation == generation:
        lookahead = port.lookahead  # the caller may change it at any time
        if lookahead == 0:
            port.pause(max_sleep_ns)
        elif stage.step(lookahead, min(port.upstream_lookahead, WIDTH // 2)) != Action.STEP:
            caller.stepped()  # the plan may have published a rollback or an adoption
            port.park(max_sleep_ns)
        if stage.form not in ("", status.form):
            status = replace(status, form=stage.form)
            caller.send(status)
        caller.stepped()


def make_draft(
    drafts: Sequence[DraftSpec],
    model: PreTrainedModel,
    block: StateBlock,
    index: int,
    trace_of: Callable[[int], _native.TraceBuffer | None] = lambda stage: None,
    *,
    native: bool,
    prefix_cache: int | None,
) -> Stage:
    """The stage of a draft, and the inline stages that run with it. ``drafts``: their specs, that of the draft last."""
    *inline, draft = drafts
    upstream = make_upstream(inline, block, index - len(inline), trace_of)
    stage: Stage = draft.make_stage(model, block, index, trace_of(index), native=native, upstream=upstream)
    stage.needs_same_bits = False
    stage.keep_prefixes(prefix_cache)
    return stage


# ---- a process of this machine


@dataclass(frozen=True)
class Setup:
    """First message to a local draft: what to build. The file descriptors of its shared memories come with it.

    Args:
        index: Stage of the draft.
        weights: Layout of the model's tensors in the shared memory.
        parts: Number of file descriptors of each shared memory: the weights, the state block, the trace if the calls are traced.
        trace: Entries of the trace for each stage.
        native: Whether the model may run in the native form.
        drafts: The specs of the stages in this process: the inline ones upstream, and the draft.
        prefix_cache: Bytes of the texts that the draft keeps, see :class:`pipespec.engine.prefixes.PrefixStore`.
    """

    index: int
    weights: SharedWeights
    parts: Sequence[int]
    trace: int
    native: bool
    drafts: Sequence[DraftSpec]
    prefix_cache: int | None


class LocalCaller(Caller):
    """The parent of this process, over a socket and shared memory.

    Every error ends the process, and the caller starts another one: a device may not recover from an error.
    """

    fatal = (Exception,)
    max_sleep_s = _ORPHAN_CHECK_S

    def __init__(self, channel: Channel) -> None:
        self._channel, self._parent = channel, os.getppid()
        data, fds = self._receive()
        self._setup: Setup = pickle.loads(data)
        # Drafts are small: more threads would cost them more in synchronisation than they gain.
        torch.set_num_threads(1)
        left = iter(fds)
        weights, self._memory, *self._trace = (SharedMemory(list(islice(left, n))) for n in self._setup.parts)
        self._model = self._setup.weights.build(weights)
        self._stage: Stage | None = None

    def _require_parent(self) -> None:
        if os.getppid() != self._parent:
            raise Closed("the parent has ended")

    def _receive(self) -> tuple[bytes, list[int]]:
        while not self._channel.poll(_ORPHAN_CHECK_S):
            self._require_parent()
        return self._channel.receive()

    def next_call(self) -> Call:
        text, _ = self._receive()
        return Call.from_json(text.decode(), self._model.device)

    def enter(self, call: Call) -> Stage:
        if self._stage is None:  # before the first call, the caller may still change the layout of the block
            setup, block = self._setup, StateBlock(self._memory)
            traces = [TraceMemory(block.stages, setup.trace, memory) for memory in self._trace]

            def trace_of(stage: int) -> _native.TraceBuffer | None:
                return traces[0].buffer(stage) if traces else None

            self._stage = make_draft(
                setup.drafts,
                self._model,
                block,
                setup.index,
                trace_of,
                native=setup.native,
                prefix_cache=setup.prefix_cache,
            )
        self._stage.block.refresh()
        return self._stage

    def stepped(self) -> None:
        self._require_parent()
        # The parent may have closed without ending. It sends nothing before the call has ended.
        if self._channel.poll():
            raise Closed("the caller has ended")

    def send(self, status: Status) -> None:
        self._channel.send(status.to_json().encode())


def main(fd: int) -> NoReturn:
    """Run the process of a draft until the caller closes the socket ``fd`` or the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
    channel = Channel(socket.socket(fileno=fd))
    exit_status = 0
    try:
        serve(LocalCaller(channel))
    except Closed:
        pass  # the caller closed the pipeline, or died
    except BaseException as error:
        with suppress(ChannelError):
            channel.send(Status().failed(error).to_json().encode())
        exit_status = 1
    # At once: with torch, the interpreter needs a second to shut down, and there is no state to save.
    os._exit(exit_status)
