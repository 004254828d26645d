"""Weights in shared memory: one copy for the caller's model and the worker's, whatever the way the model was made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipespec_kernels.state import SharedMemory

_ALIGN = 64  # what torch's own allocator gives; vectorised kernels profit


@dataclass(frozen=True)
class SharedWeights:
    """How to find a model's tensors in a piece of shared memory. Picklable; the memory travels as a descriptor."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    device: torch.device
    tensors: dict[str, tuple[int, torch.dtype, torch.Size]]  # name -> byte offset, dtype, shape
    size: int

    @staticmethod
    def describe(model: PreTrainedModel) -> SharedWeights:
        """Lay out all parameters and buffers of ``model`` (those that do not go into a checkpoint, too); ties stay ties."""
        tensors, offsets, end = {}, {}, 0
        for name, tensor in _named_tensors(model):
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
            if key not in offsets:
                offsets[key] = end
                end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
            tensors[name] = (offsets[key], tensor.dtype, tensor.shape)
        return SharedWeights(type(model), model.config, model.device, tensors, max(end, _ALIGN))

    def view(self, memory: SharedMemory, name: str) -> torch.Tensor:
        """The tensor called ``name``, without a copy."""
        offset, dtype, shape = self.tensors[name]
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        raw = torch.from_numpy(memory.array)[offset : offset + count * dtype.itemsize]
        return raw.view(dtype).view(shape)

    def store(self, model: PreTrainedModel, memory: SharedMemory) -> None:
        """Copy the model's tensors into ``memory``; a model on the CPU then lives there (one copy for all processes)."""
        for name, tensor in list(_named_tensors(model)):
            shared = self.view(memory, name)
            shared.copy_(tensor.detach())
            if tensor.device.type == "cpu":
                tensor.data = shared

    def build(self, memory: SharedMemory) -> PreTrainedModel:
        """The same model in another process, its tensors views of ``memory`` (copies, where it lives on an accelerator)."""
        with torch.device("meta"):
            model = self.model_class(self.config)
        for name in self.tensors:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            shared = self.view(memory, name).to(self.device)
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(shared, requires_grad=False)
            else:
                module._buffers[leaf] = shared
        for module in model.modules():
            # transformers keeps a second reference to the rotary frequencies; in some versions not as a buffer.
            original = getattr(module, "original_inv_freq", None)
            if isinstance(original, torch.Tensor) and original.is_meta:
                module.original_inv_freq = module.inv_freq
        return model.eval()


_shared: weakref.WeakKeyDictionary[PreTrainedModel, tuple[SharedWeights, SharedMemory]] = weakref.WeakKeyDictionary()


def share(model: PreTrainedModel) -> tuple[SharedWeights, SharedMemory]:
    """The weights of ``model`` in shared memory; the same memory again for a model on the CPU that lives there already."""
    known = _shared.get(model)
    if known is not None:
        weights, memory = known
        tensors = dict(_named_tensors(model))
        if tensors.keys() == weights.tensors.keys() and all(
            (t.data_ptr(), t.dtype, t.shape) == (memory.address + offset, dtype, shape)
            for t, (offset, dtype, shape) in ((tensors[name], weights.tensors[name]) for name in tensors)
            if t.numel()
        ):
            return known
    weights = SharedWeights.describe(model)
    memory = SharedMemory.create(weights.size, "pipespec-weights")
    weights.store(model, memory)
    _shared[model] = weights, memory
    return weights, memory


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
