"""Python's handle on the state block (``csrc/protocol/state.hpp``): the memory, and each stage's port onto it.

A block that no other process maps lies in private memory. Shared memory is an anonymous file (``memfd``), so it can be handed to other
processes as a file descriptor, needs no name, no space under ``/dev/shm``, and disappears with the last process that maps it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from pipespec_kernels import _native

Action = _native.Action
MAX_EOS: int = _native.MAX_EOS
MAX_STAGES: int = _native.MAX_STAGES


class Memory(Protocol):
    """Memory for a block; see :class:`PrivateMemory` and :class:`SharedMemory`."""

    array: np.ndarray
    address: int

    def remap(self, size: int | None = None) -> None: ...


class PrivateMemory:
    """Memory of this process alone. The child of a fork has a copy, as of all memory."""

    def __init__(self) -> None:
        self.array = np.empty(0, dtype=np.uint8)
        self.remap(1)

    def remap(self, size: int | None = None) -> None:
        """Provide at least ``size`` bytes, zeroed if there were fewer."""
        if size is not None and size > self.array.size:
            self.array = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
            self.address = int(self.array.ctypes.data)


class SharedMemory:
    """Memory shared by processes: ``fd`` is its file descriptor, ``address`` where this process maps it.

    Processes that get the descriptor share it. The child of a fork gets a copy instead, at the same address and with a descriptor of its own, so that
    nothing that the child does reaches its parent.

    Args:
        fd: file descriptor of a memfd; this object owns it from here on.
        copied_by_forks: False: a child of a fork shares the memory. For memory that is written once.
    """

    _copied_by_forks: ClassVar[weakref.WeakSet[SharedMemory]] = weakref.WeakSet()

    def __init__(self, fd: int, *, copied_by_forks: bool = True) -> None:
        self.fd = fd
        self._at_fork = b""
        self._map()
        if copied_by_forks:
            self._copied_by_forks.add(self)

    @classmethod
    def create(cls, size: int, name: str = "pipespec", *, copied_by_forks: bool = True) -> SharedMemory:
        """New zeroed memory of ``size`` bytes."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, copied_by_forks=copied_by_forks)

    def _map(self) -> None:
        size = os.fstat(self.fd).st_size
        # The mapping exists as long as the numpy array or a view of it.
        array = np.frombuffer(mmap.mmap(self.fd, size), dtype=np.uint8)
        # Under the lock, because another thread may fork.
        self.size, self.array, self.address = size, array, int(array.ctypes.data)

    def remap(self, size: int | None = None) -> None:
        """Grow the file to ``size`` bytes (never shrinks) and map it again; without ``size`` follow a growth by another process."""
        if size is not None and size > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, size)
        if os.fstat(self.fd).st_size != self.size:
            self._map()

    def _copy(self) -> None:
        """Replace the mapping by one of a copy, at the same address."""
        size = self.array.nbytes
        content = self._at_fork if len(self._at_fork) == size else self.array.tobytes()
        self._at_fork = b""
        fd = os.memfd_create("pipespec", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        # Python's mmap cannot choose the address, to which ports and arrays refer.
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(self.address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != self.address:
            raise OSError(ctypes.get_errno(), "mmap")
        self.array[:] = np.frombuffer(content, dtype=np.uint8)
        if self.fd >= 0:
            os.dup2(fd, self.fd, inheritable=False)
        os.close(fd)

    @classmethod
    def _keep(cls) -> None:
        """Called in the parent before a fork. The parent may continue to write before the child has made its copy."""
        for memory in list(cls._copied_by_forks):
            memory._at_fork = memory.array.tobytes()

    @classmethod
    def _forget(cls) -> None:
        """Called in the parent after a fork."""
        for memory in list(cls._copied_by_forks):
            memory._at_fork = b""

    @classmethod
    def _leave_parent(cls) -> None:
        """Called in the child of a fork."""
        for memory in cls._copied_by_forks:
            try:
                memory._copy()
            except BaseException:
                # Python would ignore the error, and the child would write into its parent's memory.
                os.write(2, b"pipespec: the memory of a pipeline could not be copied for a forked process\n")
                os._exit(1)

    def close(self) -> None:
        """Close the descriptor. The mapping remains as long as an object of this process refers to it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


_MAP_FIXED = 0x10  # the value on Linux, x86-64 and arm64
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)

os.register_at_fork(
    before=SharedMemory._keep, after_in_parent=SharedMemory._forget, after_in_child=SharedMemory._leave_parent
)


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

        ``memory``: where the block lies, any size; default: private memory. Raises ``ValueError`` for sizes out of range.
        """
        if not 1 <= stages <= MAX_STAGES:
            raise ValueError(f"a pipeline has 1 to {MAX_STAGES} stages, not {stages}")
        if rows < 1 or capacity < 1:
            raise ValueError(f"rows and capacity must be positive, got rows={rows}, capacity={capacity}")
        capacity = _power_of_two(capacity)
        size = _native.Block.bytes(stages, rows, capacity)
        if memory is None:
            memory = PrivateMemory()
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
        value: int = self._native.stages
        return value

    @property
    def rows(self) -> int:
        value: int = self._native.rows
        return value

    @property
    def capacity(self) -> int:
        value: int = self._native.capacity
        return value

    @property
    def target(self) -> int:
        return self.stages - 1

    def port(self, stage: int, width: int) -> _native.StagePort:
        """The access of ``stage`` to the block; at most ``width`` tokens per row and step."""
        port = _native.StagePort(self.memory.address, stage, width)
        port.memory = self.memory.array  # stays mapped as long as the port exists
        return port

    def reset(self, starts: Sequence[int], limits: Sequence[int], last: Sequence[int], eos: Sequence[int]) -> None:
        """Put every stage at the end of the rows' prompts. While no stage runs.

        Args:
            starts: prompt length per row.
            limits: greatest length per row, the prompt included.
            last: last token id of the prompt, per row.
            eos: ids that end a row.

        Raises:
            ValueError: the rows do not fit the block.
        """
        self._native.reset(list(starts), list(limits), list(last), list(eos))

    def start(self, generation: int) -> None:
        """Let the stages run generation number ``generation``; 0 stops them. Wakes the sleeping ones."""
        self._native.start(generation)

    def length(self, stage: int, row: int) -> int:
        """Tokens of ``row`` (prompt included) that ``stage`` has."""
        value: int = self._native.length(stage, row)
        return value

    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]:
        """Token ids at positions ``begin .. end-1``; ``begin`` not before the prompt's last token. Raises ``IndexError``."""
        value: list[int] = self._native.tokens(stage, row, begin, end)
        return value

    def kv(self, stage: int, row: int) -> int:
        """Tokens of ``row`` whose keys and values ``stage`` has; its sequence is at least as long."""
        value: int = self._native.kv(stage, row)
        return value

    def counters(self, stage: int, row: int) -> dict[str, Any]:
        """Counts of one stage and row since ``reset``; names as in ``Counters`` of ``state.hpp``."""
        value: dict[str, Any] = self._native.counters(stage, row)
        return value

    def is_alive(self, stage: int) -> bool:
        value: bool = self._native.is_alive(stage)
        return value

    def set_alive(self, stage: int, alive: bool) -> None:
        """Set whether ``stage`` can be expected to publish. No stage waits for one that cannot."""
        self._native.set_alive(stage, alive)

    def step_ns(self, stage: int) -> int:
        """Running mean of the duration of a step of ``stage`` in nanoseconds; 0 before its first."""
        value: int = self._native.step_ns(stage)
        return value

    def set_lookahead(self, stage: int, lookahead: int) -> None:
        """Set how many tokens the draft ``stage`` may be ahead, from its next step on; at 0 it sleeps."""
        self._native.set_lookahead(stage, lookahead)

    def end_row(self, row: int) -> None:
        """End ``row`` at the target's present length."""
        self._native.end_row(row)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
