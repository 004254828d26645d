"""CUDA graphs on the host: what a capture freezes, and what its replay reads, writes and relies on.

A capture records each operation of torch with the storages that it reads and writes (:class:`Recording`). A replay runs the operations on the same storages,
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

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from pipespec_kernels.state import Action
from tests.pipespec.fake_gpu import FakeGpu, Graph, Stream

_JUNK = 0x7F
"""Each byte of junk: an id that no vocabulary has, and the largest numbers of bfloat16 and float32."""

_HOST_READS = {
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
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _written(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    found = []
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
        refs: list[Ref | None] = []
        for value in tree_flatten(out)[0]:
            is_new = isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in given
            refs.append(emulator.ref(value, self._graph, new=True) if is_new else None)
        if changes or any(ref is not None for ref in refs):

            def frozen(value: Any) -> Any:
                return emulator.ref(value, self._graph, new=False) if isinstance(value, torch.Tensor) else value

            self.nodes.append(Node(function, tree_map(frozen, args), tree_map(frozen, kwargs), tuple(refs)))
        return out

    def external(self, emulator: Emulator) -> set[int]:
        """The storages that the forward uses and that no capture has allocated."""
        refs = tree_flatten([(node.args, node.kwargs) for node in self.nodes], is_leaf=_is_ref)[0]
        return {ref.storage for ref in refs if isinstance(ref, Ref)} - emulator.owners.keys() - self.constants


class Eager(TorchDispatchMode):
    """Orders the operations outside of captures that a thread launches on its current stream."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__()
        self._emulator = emulator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        emulator, kwargs = self._emulator, kwargs or {}
        if not emulator.capturing:
            known = [t.untyped_storage()._cdata for t in _tensors(args, kwargs)]
            known = [key for key in known if key in emulator.storages]
            if known:
                changes = {tensor.untyped_storage()._cdata for tensor in _written(function, args, kwargs)}
                stream = emulator.stream
                emulator.begin(stream)
                for key in known:
                    emulator.touch(stream, key, key in changes, f"{function} outside of a graph")
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
        self._last: dict[int, tuple[Any, int]] = {}
        self._host = Clock()
        self._guard = threading.RLock()

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

    def touch(self, stream: Any, key: int, writes: bool, what: str) -> None:
        """The operation on ``stream`` reads or writes a storage."""
        with self._guard:
            other, number = self._last.get(key, (stream, 0))
            if self._before[stream][other] < number:
                self.fault(f"{what} is not ordered behind what another stream has written")
            if writes:
                self._last[key] = stream, self._before[stream][stream]

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

    def record(self, stage: Any, body: Callable[..., torch.Tensor], inputs: Any) -> torch.Tensor:
        graph = self.graph
        assert graph is not None
        recording = Recording(self, graph)
        try:
            with recording:
                selected = body(stage, *inputs)
            recording.selected = self.ref(selected, graph, new=False)
        finally:
            # A capture runs nothing.
            for key, content in recording.written.items():
                _bytes_of(self.storages[key]).copy_(content)
        graph.__dict__.setdefault("forwards", []).append(recording)
        return selected

    def replay(self, graph: Graph, recording: Recording, stream: Any) -> torch.Tensor:
        """Run a recorded forward again. Returns what it selects."""
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
            changes = {tensor.untyped_storage()._cdata for tensor in _written(node.function, args, kwargs)}
            for tensor in _tensors(args, kwargs):
                key = tensor.untyped_storage()._cdata
                if key not in self.owners:
                    self.touch(stream, key, key in changes, f"{node.function} of a graph")
            outputs = tree_flatten(node.function(*args, **kwargs))[0]
            for ref, value in zip(node.outputs, outputs, strict=True):
                if ref is not None:
                    self.tensor(ref).copy_(value)
        self.replays += 1
        assert recording.selected is not None
        return self.tensor(recording.selected)

    def _opened(self, value: Any) -> Any:
        return self.tensor(value) if isinstance(value, Ref) else value

    def launch(self, captured: Any, given: Any) -> None:
        graph: Graph = captured._graph
        stream = "lane", captured.steps[-1].stage.index, id(captured.steps[-1].stage)
        with self._guard, torch.inference_mode():
            for key, owner in self.owners.items():
                if owner.pool is graph.pool:
                    _bytes_of(self.storages[key]).fill_(_JUNK)
            forwards = graph.__dict__["forwards"]
            assert len(forwards) == len(captured.steps)
            for step, recording in zip(captured.steps[:-1], forwards[:-1], strict=True):
                if step.port.plan() == Action.STEP:
                    step.port.commit(self.replay(graph, recording, stream))
            port = captured.steps[-1].port
            for name in ("tokens", "kv", "num_draft_tokens", "n_select"):
                own, new = getattr(port, name), torch.from_numpy(getattr(given, name))
                own[: len(new)].copy_(new)
            selected = self.replay(graph, forwards[-1], stream)
            torch.from_numpy(given.selected).copy_(selected[: len(given.selected)])
            # The launcher reports the end of the step.
            self.completed(stream)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Order the operations of this thread, the calls' own ones, too."""
        with Eager(self):
            yield


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)
