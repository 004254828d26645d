"""Python's handle on the state block (``csrc/protocol/state.hpp``): the memory, and each stage's port onto it.

A block that no other process maps lies in private memory. Shared memory is anonymous files (``memfd``), so it can be handed to other
processes as file descriptors, needs no name, no space under ``/dev/shm``, and disappears with the last process that maps it. It is one file per part
of the block, so that a process can get the right to write only some of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import operator
import os
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
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
    alignment: int
    """Of the block's parts, in bytes."""

    def remap(self, sizes: Sequence[int]) -> None:
        """Provide parts of these sizes, one after the other. They are multiples of :attr:`alignment` and never shrink."""


class PrivateMemory:
    """Memory of this process alone. The child of a fork has a copy, as of all memory."""

    alignment = _native.LINE

    def __init__(self) -> None:
        self.array = np.empty(0, dtype=np.uint8)
        self.remap([1])

    def remap(self, sizes: Sequence[int]) -> None:
        """Provide at least as many bytes, zeroed if there were fewer."""
        if sum(sizes) > self.array.size:
            self.array = np.frombuffer(_anonymous(sum(sizes)), dtype=np.uint8)
            self.address = int(self.array.ctypes.data)


class SharedMemory:
    """Memory shared by processes, in one or several parts. Each part is a file, and the files are mapped one after the other.

    Processes that get the descriptors share it. Parts whose descriptor is read-only are mapped read-only: a process that writes there dies by
    SIGSEGV and cannot change the mapping. The child of a fork gets a copy instead, at the same address and with descriptors of its own, so that
    nothing that the child does reaches its parent.

    Args:
        fds: file descriptors of memfds; this object owns them from here on.
        copied_by_forks: False: a child of a fork shares the memory. For memory that is written once.

    Attributes:
        fds: one file descriptor per part.
        sizes: bytes per part. All but the last are whole pages.
        array: all parts, uint8.
        address: where this process maps the first part.
    """

    alignment = mmap.PAGESIZE
    _copied_by_forks: ClassVar[weakref.WeakSet[SharedMemory]] = weakref.WeakSet()

    def __init__(self, fds: Sequence[int], *, copied_by_forks: bool = True) -> None:
        self.fds = list(fds)
        self._at_fork = b""
        self._map([os.fstat(fd).st_size for fd in fds])
        if copied_by_forks:
            self._copied_by_forks.add(self)

    @classmethod
    def create(cls, sizes: Sequence[int], *, copied_by_forks: bool = True) -> SharedMemory:
        """New zeroed memory, a part for each of the ``sizes`` in bytes."""
        return cls(_memory_files(sizes), copied_by_forks=copied_by_forks)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def _map(self, sizes: Sequence[int]) -> None:
        # The mapping exists as long as the numpy array or a view of it: the files replace pages of Python's object.
        array = np.frombuffer(_anonymous(sum(sizes)), dtype=np.uint8)
        address = int(array.ctypes.data)
        for fd, begin, size in zip(self.fds, _offsets(sizes), sizes, strict=True):
            _map_file(address + begin, size, fd)
        # Under the lock, because another thread may fork.
        self.sizes, self.array, self.address = list(sizes), array, address

    def remap(self, sizes: Sequence[int]) -> None:
        """Map parts of these sizes. Files that are smaller or missing grow.

        Raises:
            OSError: a file cannot grow, for example as its descriptor is read-only.
        """
        if list(sizes) == self.sizes:
            return
        self.fds += _memory_files(sizes[len(self.fds) :])
        for fd, size in zip(self.fds, sizes, strict=True):
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
        self._map(sizes)

    @contextmanager
    def lent(self, writable: Container[int]) -> Iterator[list[int]]:
        """Descriptors for another process, read-only but for the parts whose numbers are in ``writable``. They are valid within the block."""
        opened: list[int] = []
        try:
            for part, fd in enumerate(self.fds):
                # A copy of the descriptor would be as writable as the first one.
                opened.append(
                    os.dup(fd) if part in writable else os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                )
            yield opened
        finally:
            for fd in opened:
                os.close(fd)

    def _copy(self) -> None:
        """Replace the mapping by one of a copy, at the same address."""
        content = self._at_fork if len(self._at_fork) == self.array.nbytes else self.array.tobytes()
        self._at_fork = b""
        for part, (begin, size) in enumerate(zip(_offsets(self.sizes), self.sizes, strict=True)):
            (fd,) = _memory_files([size])
            # Ports and arrays refer to the address.
            _map_file(self.address + begin, size, fd)
            if self.fds:
                os.dup2(fd, self.fds[part], inheritable=False)
            os.close(fd)
        self.array[:] = np.frombuffer(content, dtype=np.uint8)

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
        """Close the descriptors. The mapping remains as long as an object of this process refers to it."""
        while self.fds:
            os.close(self.fds.pop())

    def __del__(self) -> None:
        self.close()


def _anonymous(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _memory_files(sizes: Sequence[int]) -> list[int]:
    """New files in memory. They can grow and never shrink: a process that maps a truncated file receives SIGBUS."""
    fds: list[int] = []
    try:
        for size in sizes:
            fds.append(os.memfd_create("pipespec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[-1], size)
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _map_file(address: int, size: int, fd: int) -> None:
    """Map a file in place of other pages of this process, which Python's mmap cannot. Read-only if the descriptor is."""
    read_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "mmap")


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each part begins, after the whole pages of those before it."""
    return [0, *accumulate(sizes)][: len(sizes)]


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
        self.refresh()

    @classmethod
    def create(cls, stages: int, rows: int, capacity: int, memory: Memory | None = None) -> Self:
        """A block for ``stages`` models, ``rows`` rows and at least ``capacity`` generated tokens per row.

        ``memory``: where the block lies, any size; default: private memory. Raises ``ValueError`` for sizes out of range.
        """
        if not 1 <= stages <= MAX_STAGES:
            raise ValueError(f"a pipeline has 1 to {MAX_STAGES} stages, not {stages}")
        if rows < 1 or capacity < 1:
            raise ValueError(f"rows and capacity must be positive, got rows={rows}, capacity={capacity}")
        memory = memory or PrivateMemory()
        _lay_out(memory, stages, rows, _power_of_two(capacity))
        return cls(memory)

    def ensure(self, rows: int, capacity: int) -> None:
        """Grow the block in place (same descriptors) so that it holds at least ``rows`` x ``capacity``. While no stage runs.

        Ports made before are stale afterwards if :attr:`address` changed or the sizes did.
        """
        rows, capacity = max(rows, self.rows), max(_power_of_two(capacity), self.capacity)
        if (rows, capacity) == (self.rows, self.capacity):
            return
        stages = self.stages
        alive = [self.is_alive(stage) for stage in range(stages)]
        try:
            self._native = _lay_out(self.memory, stages, rows, capacity)
        except BaseException:
            # The error of a signal handler: the memory may have moved, and the block must not refer to where it was.
            self._native = _lay_out(self.memory, stages, rows, capacity)
            raise
        finally:
            for stage, value in enumerate(alive):
                self.set_alive(stage, value)

    def refresh(self) -> None:
        """Follow a growth that another process made.

        Raises:
            ValueError: the memory holds no block, or one of another version.
            OSError: the memory is smaller than the block.
        """
        block = _native.Block(self.memory.address)
        parts = _native.Block.part_bytes(block.stages, block.rows, block.capacity, self.memory.alignment)
        if sum(parts) != block.size:  # other processes find the parts where the header says
            raise ValueError(
                "this memory holds no pipespec state block: its parts have another alignment than this memory"
            )
        try:
            self.memory.remap(parts)
        except OverflowError as error:
            raise ValueError(
                f"this memory holds no pipespec state block: {block.rows} rows of {block.capacity} tokens pass every memory"
            ) from error
        self._native = _native.Block(self.memory.address)

    @property
    def is_intact(self) -> bool:
        """Whether the block's header still holds its sizes. False: something has overwritten it."""
        return bool(self._native.is_intact)

    @property
    def stages(self) -> int:
        return int(self._native.stages)

    @property
    def rows(self) -> int:
        return int(self._native.rows)

    @property
    def capacity(self) -> int:
        return int(self._native.capacity)

    @property
    def target(self) -> int:
        return self.stages - 1

    def parts_of(self, stages: Iterable[int]) -> set[int]:
        """Numbers of the parts of the memory that a process of these drafts writes."""
        return {_native.PARKED_PART, *(_native.FIRST_STAGES_PART + stage for stage in stages)}

    def port(self, stage: int, width: int) -> _native.StagePort:
        """The access of ``stage`` to the block; at most ``width`` tokens per row and step."""
        port = _native.StagePort(self._native, stage, width)
        port.memory = self.memory.array  # stays mapped as long as the port exists
        return port

    def ngram_stage(
        self, stage: int, width: int, empty: _native.NgramIndex, corpus: _native.NgramIndex | None
    ) -> _native.NgramStage:
        """``stage`` as an index of n-grams; at most ``width`` tokens per row and step. ``empty``: an index without tokens, for each row."""
        ngram = _native.NgramStage(self._native, stage, width, empty, corpus)
        ngram.memory = self.memory.array
        return ngram

    def outbox(self, stages: Sequence[int], *, tokens: bool, counters: bool, controls: bool) -> _native.Outbox:
        """The writer of messages to another rank about ``stages`` of this one. For one generation.

        Args:
            stages: whose publications are sent.
            tokens: whether the receiver reads their sequences.
            counters: whether it reads their counters.
            controls: whether lookaheads and limits are sent, too.
        """
        outbox = _native.Outbox(self._native, list(stages), tokens=tokens, counters=counters, controls=controls)
        outbox.memory = self.memory.array
        return outbox

    def inbox(self, stages: Sequence[int], *, controls: bool) -> _native.Inbox:
        """The reader of another rank's messages about its ``stages``, which writes them into this block. For one generation.

        Args:
            stages: of the sender.
            controls: whether the sender may set lookaheads and limits.
        """
        inbox = _native.Inbox(self._native, list(stages), controls=controls)
        inbox.memory = self.memory.array
        return inbox

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
        return bool(self._native.is_alive(stage))

    def set_alive(self, stage: int, alive: bool) -> None:
        """Set whether ``stage`` can be expected to publish. No stage waits for one that cannot."""
        self._native.set_alive(stage, alive)

    def set_lookahead(self, stage: int, lookahead: int) -> None:
        """Set how many tokens the draft ``stage`` may be ahead, from its next step on; at 0 it sleeps."""
        self._native.set_lookahead(stage, lookahead)

    def end_row(self, row: int) -> None:
        """End ``row`` at the target's present length."""
        self._native.end_row(row)


def _lay_out(memory: Memory, stages: int, rows: int, capacity: int) -> _native.Block:
    memory.remap(_native.Block.part_bytes(stages, rows, capacity, memory.alignment))
    memory.array[:] = 0
    return _native.Block.create(memory.address, stages, rows, capacity, memory.alignment)


def _power_of_two(n: int) -> int:
    return 1 << max(0, operator.index(n) - 1).bit_length()
