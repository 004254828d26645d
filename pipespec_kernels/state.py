"""Python's handle on the state block (``csrc/protocol/state.hpp``): the memory, and each stage's port onto it.

The memory is an anonymous file (``memfd``), so it can be handed to other processes as a file descriptor, needs no name, no
space under ``/dev/shm``, and disappears with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from pipespec_kernels import _native

Action = _native.Action
MAX_EOS: int = _native.MAX_EOS
MAX_STAGES: int = _native.MAX_STAGES


class Memory(Protocol):
    """What a block can lie in; see :class:`SharedMemory`."""

    array: np.ndarray
    address: int

    def remap(self, size: int | None = None) -> None: ...


class SharedMemory:
    """Memory of this and other processes: ``fd`` names it, ``address`` is where it is mapped here.

    Parameters
    ----------
    fd: file descriptor of a memfd; owned by this object from here on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map()

    @classmethod
    def create(cls, size: int, name: str = "pipespec") -> SharedMemory:
        """New zeroed memory of ``size`` bytes."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd)

    def _map(self) -> None:
        self.size = os.fstat(self.fd).st_size
        # A numpy array keeps the mapping alive for as long as anything still points into it.
        self.array = np.frombuffer(mmap.mmap(self.fd, self.size), dtype=np.uint8)
        self.address = int(self.array.ctypes.data)

    def remap(self, size: int | None = None) -> None:
        """Grow the file to ``size`` bytes (never shrinks) and map it anew; without ``size`` follow what another process did."""
        if size is not None and size > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, size)
        if os.fstat(self.fd).st_size != self.size:
            self._map()

    def close(self) -> None:
        """Close the descriptor. The mapping lives on until nothing here points into it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class StateBlock:
    """The state of one pipeline: token sequences, lengths, epochs and counters of all stages and rows.

    Positions are absolute token positions of a row, padding left out. Stage ``stages - 1`` is the target.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._native = _native.Block(memory.address)

    @classmethod
    def create(cls, stages: int, rows: int, capacity: int, memory: Memory | None = None) -> Self:
        """A block for ``stages`` models, ``rows`` rows and at least ``capacity`` generated tokens per row.

        ``memory``: to lie in, any size; default: an anonymous file. Raises ``ValueError`` for sizes that make no sense.
        """
        if not 1 <= stages <= MAX_STAGES:
            raise ValueError(f"a pipeline has 1 to {MAX_STAGES} stages, not {stages}")
        if rows < 1 or capacity < 1:
            raise ValueError(f"rows and capacity must be positive, got rows={rows}, capacity={capacity}")
        capacity = _power_of_two(capacity)
        size = _native.Block.bytes(stages, rows, capacity)
        if memory is None:
            memory = SharedMemory.create(size)
        memory.remap(size)
        memory.array[:] = 0
        _native.Block.create(memory.address, stages, rows, capacity)
        return cls(memory)

    def ensure(self, rows: int, capacity: int) -> None:
        """Grow the block in place (same descriptor) so that it holds at least ``rows`` x ``capacity``. While no stage runs.

        Ports made before are stale afterwards if :attr:`address` changed or the sizes did.
        """
        rows, capacity = max(rows, self.rows), max(_power_of_two(capacity), self.capacity)
        if (rows, capacity) == (self.rows, self.capacity):
            return
        alive = [self.is_alive(stage) for stage in range(self.stages)]
        stages = self.stages
        self.memory.remap(_native.Block.bytes(stages, rows, capacity))
        self.memory.array[:] = 0
        self._native = _native.Block.create(self.memory.address, stages, rows, capacity)
        for stage, value in enumerate(alive):
            self.set_alive(stage, value)

    def refresh(self) -> None:
        """Follow a growth that another process made."""
        self.memory.remap()
        self._native = _native.Block(self.memory.address)

    @property
    def stages(self) -> int:
        return self._native.stages

    @property
    def rows(self) -> int:
        return self._native.rows

    @property
    def capacity(self) -> int:
        return self._native.capacity

    @property
    def target(self) -> int:
        return self.stages - 1

    def port(self, stage: int, width: int) -> _native.StagePort:
        """The end of the block that ``stage`` works on; at most ``width`` tokens per row and step."""
        return _native.StagePort(self.memory.address, stage, width)

    def reset(self, starts: Sequence[int], limits: Sequence[int], last: Sequence[int], eos: Sequence[int]) -> None:
        """Put every stage at the end of the rows' prompts. While no stage runs.

        ``starts[r]``: prompt length; ``limits[r]``: length at which row r ends at the latest; ``last[r]``: the prompt's
        last token id; ``eos``: ids that end a row. Raises ``ValueError`` when they do not fit the block.
        """
        self._native.reset(list(starts), list(limits), list(last), list(eos))

    def start(self, generation: int) -> None:
        """Let the stages run generation number ``generation``; 0 stops them. Wakes the sleeping ones."""
        self._native.start(generation)

    def length(self, stage: int, row: int) -> int:
        """Tokens of ``row`` (prompt included) that ``stage`` has."""
        return self._native.length(stage, row)

    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]:
        """Token ids at positions ``begin .. end-1``; ``begin`` not before the prompt's last token. Raises ``IndexError``."""
        return self._native.tokens(stage, row, begin, end)

    def kv(self, stage: int, row: int) -> int:
        """Tokens of ``row`` whose keys and values ``stage`` has; its sequence is at least as long."""
        return self._native.kv(stage, row)

    def counters(self, stage: int, row: int) -> dict:
        """Counts of one stage and row since ``reset``; names as in ``Counters`` of ``state.hpp``."""
        return self._native.counters(stage, row)

    def is_alive(self, stage: int) -> bool:
        return self._native.is_alive(stage)

    def set_alive(self, stage: int, alive: bool) -> None:
        """Say whether ``stage`` can be expected to publish: nobody waits for one that cannot."""
        self._native.set_alive(stage, alive)

    def step_ns(self, stage: int) -> int:
        """Running mean of the duration of a step of ``stage`` in nanoseconds; 0 before its first."""
        return self._native.step_ns(stage)

    def set_window(self, stage: int, window: int) -> None:
        """How far the draft ``stage`` may run ahead from its next step on; 0 sends it to sleep until it is opened again."""
        self._native.set_window(stage, window)

    def end_row(self, row: int) -> None:
        """End ``row`` where the target stands."""
        self._native.end_row(row)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
