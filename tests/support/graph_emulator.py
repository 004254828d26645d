"""CUDA graphs on the host: what a capture freezes, and what its replay reads, writes and relies on.

A capture records each operation of torch and of ``pipespec_kernels.ops`` with the storages that it reads and writes (:class:`Recording`). A replay runs the operations on the same storages,
with the arguments that they had: numbers of the host are frozen, and no code of the model runs. Before a replay, the memory that the capture has allocated
is filled with junk, because other graphs of the pool use it. What a replay must not do is noted as a fault:

* read memory that has been freed since the capture: nothing but the emulator holds its storage;
* read memory of the pool that another graph writes;
* read or write what another stream has written, without an order between the two (a vector clock for each stream and for the host);
* use a cuBLAS workspace that has been freed.

A capture refuses reads by the host, and leaves all memory as it was: it runs no kernel. The rules across threads are those of
:class:`tests.pipespec.fake_gpu.FakeGpu`.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import register_dataclass, register_pytree_node, tree_flatten, tree_map

from pipespec.engine import known
from pipespec_kernels import ops
from pipespec_kernels.state import Action
from pipespec_kernels.tiles import TiledMatrix
from tests.pipespec.fake_gpu import FakeGpu, Graph, Stream

register_dataclass(ops.Penalties)


def _matrix_around(leaves: Any, fields: dict[str, Any]) -> TiledMatrix:
    """Without a check: a graph has an address in the place of the memory."""
    made = object.__new__(TiledMatrix)
    made.__dict__.update(fields, data=next(iter(leaves)))
    return made


register_pytree_node(TiledMatrix, lambda m: ([m.data], {"format": m.format, "shape": m.shape}), _matrix_around)

_JUNK = 0x7F
"""Each byte of junk: an id that no vocabulary has, and the largest numbers of bfloat16 and float32."""

_HOST_READS = {
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty_strided.default,
}

Clock = Counter[Any]
"""By stream, how many of its operations have come before."""


class Ref(NamedTuple):
    """A tensor, as a graph refers to it: an address, and how to read it. ``storage``: its key in :attr:`Emulator.storages`."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Node(NamedTuple):
    """An operation of a graph. ``outputs``: where its new results go, in the order of its outputs; None for what is no new memory."""

    function: Any
    args: Any
    kwargs: Any
    outputs: tuple[Ref | None, ...]


def _tensors(*values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
        elif is_dataclass(value):
            found += (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))
    return found


class Part(NamedTuple):
    """Bytes of a storage."""

    storage: int
    begin: int
    end: int


def _parts(*values: Any) -> list[Part]:
    """Where the values of tensors lie."""
    found = []
    for tensor in _tensors(values):
        begin, size = tensor.storage_offset() * tensor.itemsize, tensor.itemsize
        if tensor.numel():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            found.append(Part(tensor.untyped_storage()._cdata, begin, begin + (last + 1) * size))
    return found


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _written(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation of torch changes, or that one of ours may change."""
    if not isinstance(function, torch._ops.OpOverload):
        return _tensors(args, kwargs)
    found: list[torch.Tensor] = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


class Recording(TorchDispatchMode):
    """Records one forward within a capture."""

    def __init__(self, emulator: Emulator, graph: Graph) -> None:
        super().__init__()
        self._emulator, self._graph = emulator, graph
        self.nodes: list[Node] = []
        self.selected: Ref | None = None
        self.constants: set[int] = set()
        self._used: set[int] | None = None
        self.written: dict[int, torch.Tensor] = {}
        """What the storages held that the forward has changed."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        emulator, kwargs = self._emulator, kwargs or {}
        if function in _HOST_READS:
            emulator.invalidate()
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        given = {emulator.key(tensor, self._graph, new=False) for tensor in _tensors(args, kwargs)}
        changes = _written(function, args, kwargs)
        for tensor in changes:
            storage = tensor.untyped_storage()
            if storage._cdata not in emulator.owners and storage._cdata not in self.written:
                self.written[storage._cdata] = _bytes_of(storage).clone()
        out = function(*args, **kwargs)
        if function is torch.ops.aten.lift_fresh.default:
            # A number of the host: part of the launch.
            self.constants.add(emulator.key(out, self._graph, new=False))
        self._note(function, args, kwargs, out, given, bool(changes))
        return out

    def _note(self, function: Any, args: Any, kwargs: Any, out: Any, given: set[int], changes: bool) -> None:
        emulator = self._emulator
        refs: list[Ref | None] = []
        for value in tree_flatten(out)[0]:
            is_new = isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in given
            refs.append(emulator.ref(value, self._graph, new=True) if is_new else None)
        if changes or any(ref is not None for ref in refs):

            def frozen(value: Any) -> Any:
                return emulator.ref(value, self._graph, new=False) if isinstance(value, torch.Tensor) else value

            self.nodes.append(Node(function, tree_map(frozen, args), tree_map(frozen, kwargs), tuple(refs)))

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation that does not pass torch's dispatcher."""
        with _disable_current_modes(), self._emulator.changes(args, kwargs) as changed:
            given = {self._emulator.key(tensor, self._graph, new=False) for tensor in _tensors(args, kwargs)}
            out = function(*args, **kwargs)
        known = {*self._emulator.owners, *self.written}
        self.written |= {key: content for key, content in changed.items() if key not in known}
        # What it writes may be there already.
        self._note(function, args, kwargs, out, given, True)
        return out

    def external(self, emulator: Emulator) -> set[int]:
        """The storages that the forward uses and that no capture has allocated."""
        if self._used is None:
            refs = tree_flatten([(node.args, node.kwargs) for node in self.nodes], is_leaf=_is_ref)[0]
            self._used = {ref.storage for ref in refs if isinstance(ref, Ref)}
        return {key for key in self._used if key not in emulator.owners and key not in self.constants}


class Eager(TorchDispatchMode):
    """Orders the operations outside of captures that a thread launches on its current stream."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__()
        self._emulator = emulator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        emulator, kwargs = self._emulator, kwargs or {}
        is_view = any(
            value.alias_info is not None and not value.alias_info.is_write for value in function._schema.returns
        )
        if not emulator.capturing and not is_view:
            emulator.launched(function, _parts(args, kwargs), _parts(_written(function, args, kwargs)))
        return function(*args, **kwargs)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


class Emulator(FakeGpu):
    """A GPU of the tests whose graphs are recorded and replayed.

    Attributes:
        storages: Everything that a graph refers to. The only reference of a storage that is freed.
        owners: By storage, the graph whose capture has allocated it.
        faults: What replays have done wrong.
        replays: Number of forwards that ran without the model's code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.owners: dict[int, Graph] = {}
        self.faults: list[str] = []
        self.replays = 0
        self._before: dict[Any, Clock] = {}
        # Graphs whose memory is junk: filled, and not replayed since.
        self._junk: set[Graph] = set()
        self._last: dict[int, list[tuple[int, int, Any, int]]] = {}
        self._host = Clock()
        self._guard = threading.RLock()

    def install(self, monkeypatch: Any) -> None:
        super().install(monkeypatch)
        # The emulator's modes watch operations. They are no reason to leave a call to transformers.
        monkeypatch.setattr(known, "_watched_reason", lambda: None)
        for name in filter(str.islower, ops.__all__):
            monkeypatch.setattr(ops, name, self._recorded(getattr(ops, name)))

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            recording = getattr(self._of_thread, "recording", None)
            if recording is not None:
                return recording.operation(function, args, kwargs)
            with _disable_current_modes(), self.changes(args, kwargs) as changed:
                out = function(*args, **kwargs)
            if not self.capturing and getattr(self._of_thread, "is_watched", False):
                self.launched(function, _parts(args, kwargs), self.differing(changed))
            return out

        return call

    @contextmanager
    def changes(self, *arguments: Any) -> Iterator[dict[int, torch.Tensor]]:
        """By storage of the arguments, what it held before, if the operation in the context changes it."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in _tensors(arguments)}
        before = {key: _bytes_of(s).clone() for key, s in storages.items()}
        found: dict[int, torch.Tensor] = {}
        yield found
        found |= {key: content for key, content in before.items() if not torch.equal(content, _bytes_of(storages[key]))}

    def differing(self, before: dict[int, torch.Tensor]) -> list[Part]:
        """The bytes that have changed, from the first to the last one, of storages of :meth:`changes`."""
        found = []
        for key, content in before.items():
            if key not in self.storages:
                continue
            places = torch.nonzero(content != _bytes_of(self.storages[key]))
            found.append(Part(key, int(places[0]), int(places[-1]) + 1))
        return found

    # ---- memory

    def key(self, tensor: torch.Tensor, graph: Graph, *, new: bool) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.storages.setdefault(key, storage)
        if new:
            self.owners[key] = graph
        return key

    def ref(self, tensor: torch.Tensor, graph: Graph, *, new: bool) -> Ref:
        key = self.key(tensor, graph, new=new)
        owner = self.owners.get(key)
        if owner is not None and owner is not graph:
            self.fault("a graph reads memory of the pool that another graph writes")
        return Ref(key, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def tensor(self, ref: Ref) -> torch.Tensor:
        return torch.empty(0, dtype=ref.dtype).set_(self.storages[ref.storage], ref.offset, ref.size, ref.stride)

    def is_freed(self, key: int) -> bool:
        return torch._C._storage_Use_Count(self.storages[key]._cdata) <= 1

    def fault(self, what: str) -> None:
        if what not in self.faults:
            self.faults.append(what)

    # ---- order

    def begin(self, stream: Any) -> None:
        """An operation is launched on ``stream``: after those before it, and after what the host has waited for."""
        with self._guard:
            clock = self._before.setdefault(stream, Clock())
            clock |= self._host
            clock[stream] += 1

    def touch(self, stream: Any, part: Part, writes: bool, what: str) -> None:
        """The operation on ``stream`` reads or writes a part of a storage."""
        with self._guard:
            last = self._last.setdefault(part.storage, [])
            for begin, end, other, number in last:
                if begin < part.end and part.begin < end and self._before[stream][other] < number:
                    self.fault(f"{what} is not ordered after what another stream has written")
            if writes:
                last[:] = [entry for entry in last if not (part.begin <= entry[0] and entry[1] <= part.end)][-255:]
                last.append((part.begin, part.end, stream, self._before[stream][stream]))

    def launched(self, function: Any, used: list[Part], changed: list[Part]) -> None:
        """An operation outside of a graph, on the thread's current stream."""
        if any(part.storage in self.storages for part in used):
            self.begin(self.stream)
            self._touch_all(self.stream, used, changed, f"{_name(function)} outside of a graph")

    def _touch_all(self, stream: Any, used: list[Part], changed: list[Part], what: str) -> None:
        for parts, writes in ((used, False), (changed, True)):
            for part in parts:
                if part.storage in self.storages and part.storage not in self.owners:
                    self.touch(stream, part, writes, what)

    def completed(self, stream: Any) -> None:
        """The host has waited for ``stream``."""
        with self._guard:
            self._host |= self._before.get(stream, Clock())

    def replacements(self) -> dict[str, Any]:
        emulator = self

        class OrderedStream(Stream):
            def wait_stream(self, other: Any) -> None:
                with emulator._guard:
                    mine = emulator._before.setdefault(self, Clock())
                    mine |= emulator._before.get(other, Clock())

            def synchronize(self) -> None:
                emulator.completed(self)

        self._default = OrderedStream()
        return super().replacements() | {"Stream": OrderedStream}

    # ---- captures and replays

    def record(self, stage: Any, body: Callable[..., torch.Tensor], inputs: Any, result: torch.Tensor) -> torch.Tensor:
        graph = self.graph
        assert graph is not None
        with _disable_current_modes(), self._recorded_in(graph) as recording:
            selected = body(stage, *inputs)
        recording.selected = self.ref(selected, graph, new=False)
        graph.__dict__.setdefault("forwards", []).append(recording)
        return selected

    @contextmanager
    def _recorded_in(self, graph: Graph) -> Iterator[Recording]:
        recording, outer = Recording(self, graph), getattr(self._of_thread, "recording", None)
        self._of_thread.recording = recording
        try:
            with recording:
                yield recording
        finally:
            self._of_thread.recording = outer
            # A capture runs nothing.
            for key, content in recording.written.items():
                _bytes_of(self.storages[key]).copy_(content)

    @contextmanager
    def capture(self, graph: Graph, pool: Any = None, **options: Any) -> Iterator[None]:
        with super().capture(graph, pool, **options):
            if pool is None:
                yield
                return
            with self._recorded_in(graph) as whole:
                yield
            graph.__dict__.setdefault("forwards", [whole])

    def replay_whole(self, graph: Graph) -> None:
        """``CUDAGraph.replay()``: on the thread's current stream."""
        with self._guard, torch.inference_mode(), _disable_current_modes():
            self._poison(graph)
            for recording in graph.__dict__["forwards"]:
                self.replay(graph, recording, self.stream)

    def _poison(self, graph: Graph) -> None:
        of_pool = [(key, owner) for key, owner in self.owners.items() if owner.pool is graph.pool]
        for key, owner in of_pool:
            if owner not in self._junk:
                _bytes_of(self.storages[key]).fill_(_JUNK)
        self._junk |= {owner for _, owner in of_pool}
        self._junk.discard(graph)

    def replay(self, graph: Graph, recording: Recording, stream: Any) -> Any:
        """Run a recorded forward again. Returns what it selects, if it is one."""
        kept = {id(workspace) for workspace in self.workspaces.values()}
        if any(workspace.pool is not graph.pool and id(workspace) not in kept for workspace in graph.workspaces):
            self.fault("a product uses a workspace that has been freed")
        for key in recording.external(self):
            if self.is_freed(key):
                self.fault("a graph uses memory that has been freed")
        self.begin(stream)
        for node in recording.nodes:
            if node.function in _UNINITIALISED:
                continue
            args, kwargs = tree_map(self._opened, (node.args, node.kwargs), is_leaf=_is_ref)
            with self.changes(_written(node.function, args, kwargs)) as changed:
                outputs = tree_flatten(node.function(*args, **kwargs))[0]
            self._touch_all(stream, _parts(args, kwargs), self.differing(changed), f"{_name(node.function)} of a graph")
            for ref, value in zip(node.outputs, outputs, strict=True):
                if ref is not None:
                    self.tensor(ref).copy_(value)
        self.replays += 1
        return recording.selected and self.tensor(recording.selected)

    def _opened(self, value: Any) -> Any:
        return self.tensor(value) if isinstance(value, Ref) else value

    def launch(self, captured: Any, given: Any) -> None:
        graph: Graph = captured._graph
        stream = "lane", captured.steps[-1].stage.index, id(captured.steps[-1].stage)
        with self._guard, torch.inference_mode(), _disable_current_modes():
            self._poison(graph)
            forwards = graph.__dict__["forwards"]
            assert len(forwards) == len(captured.steps)
            for step, recording in zip(captured.steps[:-1], forwards[:-1], strict=True):
                if step.port.plan() == Action.STEP:
                    step.port.commit(self.replay(graph, recording, stream))
            port = captured.steps[-1].port
            for name in ("tokens", "kv", "query_lens", "num_draft_tokens", "n_select"):
                own, new = getattr(port, name), torch.from_numpy(getattr(given, name))
                own[: len(new)].copy_(new)
            selected = self.replay(graph, forwards[-1], stream)
            torch.from_numpy(given.selected).copy_(selected[: len(given.selected)])
            # The launcher reports the end of the step.
            self.completed(stream)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Order the operations of this thread, the calls' own ones, too."""
        self._of_thread.is_watched = True
        with Eager(self):
            yield
        self._of_thread.is_watched = False


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)
