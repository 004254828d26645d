"""Programs of a Triton launch that take turns at each access to memory, under a weak memory model, in the interpreter.

The interpreter runs one program after the other, which no protocol between programs can fail. Here each program is a thread, one of which runs at a time:
at each access a random one goes on. Its plain stores wait in a buffer, which others do not see, and leave it in any order, at the latest before an atomic
operation with release. Its plain loads may give what memory held at any time since its last atomic operation with acquire, but for one address never
something older than before. Atomic operations act on memory at once: what a relaxed one has written is never late, so a missing release shows for plain stores only.
"""

import ctypes
import inspect
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


class Stopped(BaseException):
    """Ends the other programs after an error in one."""


class _Program:
    """One program.

    Attributes:
        turn: Released when it may go on.
        buffer: By address, the bytes of stores that others do not see yet.
        acquired: When it last acquired.
        read: By address, the time of the value that it has read last.
    """

    def __init__(self, index: tuple[int, int, int]) -> None:
        self.index, self.turn, self.acquired = index, threading.Semaphore(0), 0
        self.buffer: dict[int, bytes] = {}
        self.read: defaultdict[int, int] = defaultdict(int)


class Interleaving:
    """Runs launches in random orders.

    Args:
        seed: Of the order.

    Attributes:
        switches: How often another program went on.
        stale: How many loads gave an older value than memory held.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.switches = self.stale = 0

    def run(self, indices: Sequence[tuple[int, int, int]], body: Callable[[], object]) -> None:
        """Run ``body`` once for each program."""
        self._alive = [_Program(index) for index in indices]
        self._now, self._error = 1, None
        # By address, the times of the writes and what was there before each.
        self._written: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self._random.shuffle(self._alive)
        threads = [threading.Thread(target=self._thread, args=(program, body)) for program in self._alive]
        self._current = self._alive[0]
        for thread in threads:
            thread.start()
        self._go_on()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _thread(self, program: _Program, body: Callable[[], object]) -> None:
        program.turn.acquire()
        try:
            if self._error is None:
                body()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
        self._flush(program, 1.0)
        self._alive.remove(program)
        if self._alive:
            self._go_on()

    def _go_on(self) -> None:
        chosen = self._random.choice(self._alive)
        self.switches += chosen is not self._current
        self._current = chosen
        interpreter.interpreter_builder.set_grid_idx(*self._current.index)
        self._current.turn.release()

    def _switch(self) -> _Program:
        """Let a random program go on. Returns the present one when its turn comes."""
        me = self._current
        self._flush(me, 0.1)
        if self._random.random() < 0.5:
            self._go_on()
            me.turn.acquire()
            if self._error is not None:
                raise Stopped
        return me

    def _flush(self, program: _Program, chance: float) -> None:
        for address in [a for a in program.buffer if chance == 1.0 or self._random.random() < chance]:
            data = program.buffer.pop(address)
            self._overwrite(address, len(data))
            ctypes.memmove(address, data, len(data))
            program.read[address] = self._now

    def _overwrite(self, address: int, size: int) -> None:
        """Note what is overwritten now."""
        self._now += 1
        self._written[address].append((self._now, ctypes.string_at(address, size)))

    def load(self, own: Callable[..., Any], ptrs: Any, mask: Any, *more: Any) -> Any:
        me, found = self._switch(), own(ptrs, mask, *more)
        values = found.data.reshape(-1)
        for i, (address, is_read) in enumerate(zip(ptrs.data.flat, mask.data.flat, strict=True)):
            address = int(address)
            if not is_read or (address not in me.buffer and address not in self._written):
                continue
            data = me.buffer.get(address)
            if data is None:
                since = max(me.acquired, me.read[address])
                older = [write for write in self._written[address] if write[0] > since]
                me.read[address] = self._now
                if not older or self._random.random() < 0.5:
                    continue
                at, data = self._random.choice(older)
                me.read[address] = at - 1
                self.stale += 1
            values[i] = np.frombuffer(data, values.dtype)[0]
        return found

    def store(self, own: Callable[..., Any], ptrs: Any, value: Any, mask: Any, *more: Any) -> None:
        me = self._switch()
        data = np.broadcast_to(value.data, ptrs.data.shape)
        for address, new, is_written in zip(ptrs.data.flat, data.flat, mask.data.flat, strict=True):
            if is_written:
                me.buffer[int(address)] = new.tobytes()

    def atomic(self, own: Callable[..., Any], op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        me = self._switch()
        kind = str(sem).rpartition(".")[2]
        if "RELEASE" in kind:
            self._flush(me, 1.0)
        for address, is_used in zip(ptr.data.flat, mask.data.flat, strict=True):
            if is_used:
                address = int(address)
                if address in me.buffer:
                    ctypes.memmove(address, data := me.buffer.pop(address), len(data))
                self._overwrite(address, val.data.dtype.itemsize)
                me.read[address] = self._now
        if "ACQUIRE" in kind:
            me.acquired = self._now
        found = own(op, ptr, val, mask, sem, scope)
        # What waits in the buffer may come long after this.
        self._switch()
        return found

    def launch(self, executor: Any, *given: Any, **named: Any) -> None:
        """In the place of the interpreter's own loop over a grid."""
        function = executor.fn
        named = {name: value for name, value in named.items() if name in inspect.getfullargspec(function).args}
        patched = interpreter._patch_lang(function)
        try:
            values = inspect.getcallargs(function, *given, **named)
            values = {
                name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
                for name, value in values.items()
            }
            grid = executor.grid(values) if callable(executor.grid) else executor.grid
            sizes = (*grid, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*sizes)
            self.run(list(np.ndindex(*sizes)), lambda: function(**values))
        finally:
            patched.restore()


@contextmanager
def interleaved(seed: int) -> Iterator[Interleaving]:
    """Launches of Triton kernels in the interpreter, over tensors on the CPU, run in a random order."""
    found, builder = Interleaving(seed), interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        for name, by in (
            ("create_masked_load", found.load),
            ("create_masked_store", found.store),
            ("create_atomic_rmw", found.atomic),
        ):
            own = getattr(builder, name)
            patch.setattr(builder, name, lambda *given, own=own, by=by: by(own, *given), raising=False)
        patch.setattr(interpreter.GridExecutor, "__call__", lambda *given, **named: found.launch(*given, **named))
        yield found
