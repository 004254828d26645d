"""What the steps of a chain's stages did (``csrc/runtime/trace.hpp``): per stage a buffer that it alone writes, without a lock."""

from __future__ import annotations

import numpy as np

from pipespec_kernels import _native
from pipespec_kernels.state import SharedMemory

MOST_ENTRIES = 1 << 24


class TraceMemory:
    """A buffer for each of ``stages``, of ``entries`` steps, the oldest of which are overwritten.

    Parameters
    ----------
    memory: that of another process's object of the same sizes, which this one then shares. Default: new memory.
    """

    def __init__(self, stages: int, entries: int, memory: SharedMemory | None = None) -> None:
        self.entries = entries
        each = _native.TraceBuffer.bytes(entries)
        self.memory = memory or SharedMemory.create(stages * each, "pipespec-trace")
        self._buffers = [
            _native.TraceBuffer(self.memory.array[stage * each : (stage + 1) * each], entries)
            for stage in range(stages)
        ]

    def buffer(self, stage: int) -> _native.TraceBuffer:
        """Where ``stage`` writes: ``StagePort.trace`` takes it."""
        return self._buffers[stage]

    def read(self, stage: int) -> np.ndarray:
        """Entries of ``stage`` since :meth:`clear`, oldest first; those that were overwritten are left out.

        A structured array; times are those of ``time.perf_counter_ns()``, the same in all processes of the machine: ``step`` (number of the
        entry, so the first one's tells how many are lost), ``launched_ns`` (its plan began), ``start_ns`` (the forward), ``end_ns``, ``width``
        (of the rectangle), ``fed``, ``hints``, ``accepted``, ``taken_back`` (tokens, all rows together), ``rollbacks`` (how often), ``in_flight``
        (0) and ``prefill``: tokens of the prompts that this entry cached, 0 for a step. An entry that fed nothing took tokens back.
        """
        return self._buffers[stage].read()

    def clear(self) -> None:
        """Forget all entries. While no stage runs."""
        for buffer in self._buffers:
            buffer.clear()
