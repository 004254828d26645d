"""Weights in shared memory: one copy serves the model of the caller and that of the worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipespec.engine.runtime import runtime_of
from pipespec.models.adapters import named_tensors
from pipespec.models.quantized import Blocks, Joined
from pipespec.models.quantizing import described, skeleton
from pipespec_kernels.state import SharedMemory

_ALIGN = 64
"""Alignment of torch's own allocator, in bytes. Vectorised kernels profit from it."""


@dataclass(frozen=True)
class SharedWeights:
    """The layout of a model's tensors in shared memory. Picklable; the memory itself is sent as a file descriptor.

    Attributes:
        model_class: Class of the model.
        config: Configuration of the model.
        blocks: Its modules in int8 or in blocks, see :func:`pipespec.models.quantizing.described`.
        device: Device of the model.
        tensors: Byte offset, dtype and shape by name of the tensor.
        size: Bytes of all tensors.
    """

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    blocks: dict[str, tuple[Blocks | Joined, bool]]
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
        return SharedWeights(type(model), model.config, described(model), model.device, tensors, max(end, _ALIGN))

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
        model = skeleton(self.model_class, self.config, self.blocks)
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
