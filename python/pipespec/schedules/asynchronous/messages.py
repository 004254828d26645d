"""What the processes of a chain share: messages, the socket between two of them, and weights.

A call and the status of a draft are JSON over any connection, and nothing of them is unpickled. One copy of the weights in shared memory serves the model
of the caller and that of the worker.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import traceback
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipespec.engine.chain import StageInputs
from pipespec.engine.runtime import runtime_of
from pipespec.engine.sampling import STATELESS, Prompt, SamplingParams
from pipespec.models.properties import named_tensors
from pipespec.models.quantizing import held_modules, skeleton
from pipespec.process.records import build, parse_json
from pipespec_kernels.state import SharedMemory


@dataclass(frozen=True)
class Status:
    """The state of a draft: sent when it is ready, when the backend of its forward is known, at the end of each generation, and when it fails.

    Attributes:
        ended: The last generation that has ended; 0: none.
        form: How its forward runs; empty before the first step.
        translated: Of the generation that has ended, see ``Driver.translated``; None for a draft with the target's tokenizer.
        failure: The error that ended this generation, or the start of the process, in a line; empty if there is none.
        details: The traceback of the failure.
    """

    ended: int = 0
    form: str = ""
    translated: tuple[int, int] | None = None
    failure: str = ""
    details: str = ""

    def failed(self, error: BaseException) -> Status:
        """This status with a failure."""
        details = "".join(traceback.format_exception(error))
        return replace(self, failure=f"{type(error).__name__}: {error}", details=details)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ``TypeError`` or ``ValueError`` for what is no status."""
        found: Self = build(cls, parse_json(text))
        return found


@dataclass(frozen=True)
class Call:
    """One generation to take part in.

    Attributes:
        generation: Its number, at least 1.
        inputs: What a draft starts from, without a grammar: only the target has its matchers.
        eos: The ids that end a row.
    """

    generation: int
    inputs: StageInputs
    eos: Sequence[int]

    def to_json(self) -> str:
        inputs, params = self.inputs, self.inputs.sampling_params
        return json.dumps(
            [
                self.generation,
                list(self.eos),
                [prompt.tolist() for prompt in inputs.prompts],
                {"limits": list(inputs.limits)} | {name: getattr(inputs, name) for name in _OF_INPUTS},
                {name: _plain(getattr(params, name)) for name in _OF_SAMPLING} | {"ends": sorted(params.ends)},
            ]
        )

    @classmethod
    def from_json(cls, text: str, device: torch.device | str) -> Self:
        """The call, with the tensors of its logits processors on ``device``."""
        generation, eos, prompts, sizes, sampling = json.loads(text)
        ends = frozenset(sampling.pop("ends"))
        values = {name: _value(plain, torch.device(device)) for name, plain in sampling.items()}
        values["prompts"] = tuple(Prompt(*prompt) for prompt in values["prompts"])
        params = SamplingParams(ends=ends, **values)
        return cls(
            generation,
            StageInputs([np.array(p, dtype=np.int32) for p in prompts], sampling_params=params, **sizes),
            eos,
        )


_OF_INPUTS = ("vocabulary", "chunk")
_OF_SAMPLING = ("seeds", "temperature", "top_k", "top_p", "min_p", "processors", "prompts")
_PROCESSORS = {kind.__name__: kind for kind in STATELESS}


def _plain(value: Any) -> Any:
    """A value as JSON has it. Objects become lists: the name of their kind, then their parts."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return value.item()
        case torch.Tensor():
            return ["tensor", value.tolist(), str(value.dtype).removeprefix("torch.")]
        case np.ndarray():
            return ["array", value.tolist(), str(value.dtype)]
        case list() | tuple():
            return ["list" if isinstance(value, list) else "tuple", *map(_plain, value)]
        case dict():
            return ["dict", *([_plain(key), _plain(item)] for key, item in value.items())]
    if type(value) not in STATELESS:
        raise TypeError(f"a message has no {type(value).__name__}")
    return [type(value).__name__, _plain(vars(value))]


def _value(plain: Any, device: torch.device) -> Any:
    """The value of :func:`_plain`."""
    if not isinstance(plain, list):
        return plain
    kind, *parts = plain
    match kind:
        case "tensor":
            return torch.tensor(parts[0], dtype=getattr(torch, parts[1]), device=device)
        case "array":
            return np.array(parts[0], dtype=parts[1])
        case "list" | "tuple":
            items = [_value(part, device) for part in parts]
            return items if kind == "list" else tuple(items)
        case "dict":
            return {_value(key, device): _value(item, device) for key, item in parts}
    processor: Any = object.__new__(_PROCESSORS[kind])
    vars(processor).update(_value(parts[0], device))
    return processor


_MAX_FDS = 64
_MAX_PACKET = 1 << 15
_IN_A_FILE = b"\0file"
"""In place of a larger message, which lies in a file in memory: its descriptor comes last. No other message begins like that."""


class ChannelError(Exception):
    """A message cannot be sent or received. No ``OSError``, as a ``TimeoutError`` of a signal handler is one."""


class Closed(ChannelError):
    """One of the two ends is closed."""


class Channel:
    """One end of a socket over which two processes send each other messages and file descriptors.

    A message is one packet, which arrives whole or not at all. So neither process waits for the other one to read or to complete it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """An end for this process, and one for another process."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(own), other

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Wait for a message, or for the end of the channel. Return whether one of them is there.

        Raises:
            Closed: This end is closed.
        """
        fd = self._socket.fileno()
        if fd < 0:
            raise Closed("this end is closed")
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, which is not empty, and copies of at most 63 file descriptors, without waiting.

        Raises:
            Closed: One end is closed.
            ChannelError: The other process has too many unread messages, or there is no room for a large one.
        """
        with _system_errors(), ExitStack() as stack:
            if len(data) > _MAX_PACKET:
                file = stack.enter_context(open(os.memfd_create("pipespec-message"), "wb"))
                file.write(data)
                file.flush()
                data, fds = _IN_A_FILE, [*fds, file.fileno()]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            # A program may have given SIGPIPE its default effect, which ends it.
            self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for the next message. Return it and the file descriptors that came with it.

        Raises:
            Closed: One end is closed.
            ChannelError: This process has no room for the file descriptors. The message is lost, those after it are not.
        """
        fds = array("i")
        try:
            with _system_errors():
                space = socket.CMSG_SPACE(_MAX_FDS * fds.itemsize)
                receive = partial(self._socket.recvmsg, _MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
                try:
                    data, rights, flags, _ = receive()
                except ConnectionResetError:  # once, if the other end left messages unread; its own last ones follow
                    data, rights, flags, _ = receive()
            for _, _, content in rights:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            if not data:
                raise Closed("the other end is closed")
            if flags & socket.MSG_CTRUNC:
                raise ChannelError(os.strerror(errno.EMFILE))
            if data == _IN_A_FILE:
                with open(fds.pop(), "rb") as file:
                    file.seek(0)
                    data = file.read()
            return data, fds.tolist()
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise


@contextmanager
def _system_errors() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed("the other end is closed") from error
    except OSError as error:
        if error.errno is None:  # of a signal handler, not of the system
            raise
        if error.errno == errno.EBADF:
            raise Closed("this end is closed") from error
        raise ChannelError(os.strerror(error.errno)) from error


_ALIGN = 64
"""Alignment of torch's own allocator, in bytes. Vectorised kernels profit from it."""


@dataclass(frozen=True)
class SharedWeights:
    """The layout of a model's tensors in shared memory. Picklable; the memory itself is sent as a file descriptor.

    Attributes:
        model_class: Class of the model.
        config: Configuration of the model.
        held: Its modules in int8 or in blocks, see :func:`pipespec.models.quantizing.held_modules`.
        device: Device of the model.
        tensors: Byte offset, dtype and shape by name of the tensor.
        size: Bytes of all tensors.
    """

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    held: dict[str, nn.Module]
    device: torch.device
    tensors: dict[str, tuple[int, torch.dtype, torch.Size]]
    size: int

    @staticmethod
    def describe(model: PreTrainedModel) -> SharedWeights:
        """Lay out all parameters and buffers of ``model``, non-persistent buffers included. Tied tensors stay tied; adapters are merged."""
        tensors, offsets, end = {}, {}, 0
        for name, tensor in list(named_tensors(model)):
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
            if key not in offsets:
                offsets[key] = end
                end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
            tensors[name] = (offsets[key], tensor.dtype, tensor.shape)
        return SharedWeights(type(model), model.config, held_modules(model), model.device, tensors, max(end, _ALIGN))

    def view(self, memory: SharedMemory, name: str) -> torch.Tensor:
        """The tensor ``name`` as a view of ``memory``."""
        offset, dtype, shape = self.tensors[name]
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.from_numpy(memory.array)[offset : offset + count * dtype.itemsize]
        return raw.view(dtype).view(shape)

    def store(self, model: PreTrainedModel, memory: SharedMemory) -> None:
        """Copy the model's tensors into ``memory``. The tensors of a model on the CPU become views of it, but for those with adapters."""
        for name, tensor in list(named_tensors(model)):
            # Data of a parameter are an inference tensor if it is one, whatever mode the call is in.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                shared = self.view(memory, name)
                shared.copy_(tensor.detach())
                if tensor.device.type == "cpu":
                    tensor.data = shared

    def build(self, memory: SharedMemory) -> PreTrainedModel:
        """The same model in another process. Its tensors are views of ``memory``, or copies on an accelerator."""
        model = skeleton(self.model_class, self.config, self.held)
        for name in self.tensors:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            shared = self.view(memory, name).to(self.device)
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(shared, requires_grad=False)
            else:
                module._buffers[leaf] = shared
        for module in model.modules():
            # transformers keeps a second reference to the rotary frequencies, which is no buffer in some versions.
            original = getattr(module, "original_inv_freq", None)
            if isinstance(original, torch.Tensor) and original.is_meta:
                module.original_inv_freq = module.inv_freq
        return model.eval()


def share(model: PreTrainedModel) -> tuple[SharedWeights, SharedMemory]:
    """Put the weights of ``model`` into shared memory. A model on the CPU that lies there already keeps its memory."""
    runtime = runtime_of(model)
    if runtime.shared is not None:
        weights, memory = runtime.shared
        tensors = dict(named_tensors(model))
        if tensors.keys() == weights.tensors.keys() and all(
            (t.data_ptr(), t.dtype, t.shape) == (memory.address + offset, dtype, shape)
            for t, (offset, dtype, shape) in ((tensors[name], weights.tensors[name]) for name in tensors)
            if t.numel()
        ):
            return weights, memory
    weights = SharedWeights.describe(model)
    # A fork of this process and its own workers only read the shared weights.
    memory = SharedMemory.create([weights.size], copied_by_forks=False)
    weights.store(model, memory)
    runtime.shared = weights, memory
    return weights, memory
