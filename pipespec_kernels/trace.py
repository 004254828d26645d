"""Trace of a chain's steps (``csrc/runtime/trace.hpp``): one buffer per stage, written by that stage without a lock."""

from __future__ import annotations

import numpy as np

from pipespec_kernels import _native
from pipespec_kernels.state import SharedMemory

MAX_ENTRIES = 1 << 24


class TraceMemory:
    """A buffer of ``entries`` steps for each stage; new entries overwrite the oldest.

    Args:
        stages: number of buffers.
        entries: steps per buffer, at most :data:`MAX_ENTRIES`.
        memory: the memory of another process's object of the same sizes, to share it; default: new memory. Its parts are the stages' buffers.
    """

    def __init__(self, stages: int, entries: int, memory: SharedMemory | None = None) -> None:
        self.entries = entries
        pages = -(-_native.TraceBuffer.bytes(entries) // SharedMemory.alignment)
        each = pages * SharedMemory.alignment
        self.memory = memory or SharedMemory.create([each] * stages)
        self._buffers = [
            _native.TraceBuffer(self.memory.array[stage * each : (stage + 1) * each], entries)
            for stage in range(stages)
        ]

    def buffer(self, stage: int) -> _native.TraceBuffer:
        """Where ``stage`` writes: ``StagePort.trace`` takes it."""
        return self._buffers[stage]

    def read(self, stage: int) -> np.ndarray:
        """Entries of ``stage`` since :meth:`clear`, oldest first; those that were overwritten are left out.

        A structured array; times are those of ``time.perf_counter_ns()``, the same in all processes of the machine: ``step`` (number of the entry;
        the first one's is the number of lost entries), ``launched_ns`` (its plan began), ``start_ns`` (the forward), ``end_ns``, ``width`` (of the
        rectangle), ``fed``, ``draft_tokens``, ``accepted``, ``rolled_back`` (tokens, all rows together), ``rollbacks`` (how often), ``in_flight`` (0)
        and ``prefill``: tokens of the prompts that this entry cached, 0 for a step. An entry that fed nothing is a rollback.
        """
        entries: np.ndarray = self._buffers[stage].read()
        return entries

    def clear(self) -> None:
        """Drop all entries. While no stage runs."""
        for buffer in self._buffers:
            buffer.clear()
