"""Merged weights: matrices of one input as one matrix, of which the model's parameters are views.

Queries, keys and values have one input, and so have gate and up. The parameters stay the same objects with the same values, so state dicts,
optimizers and changes in place work as before, and no weight exists twice. Whatever gives a parameter other memory (``.to()``, another ``.data``)
ends the merge of its matrix: :func:`merged` no longer finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from pipespec.models.families import NotReadable
from pipespec.models.loading import is_out_of_memory


def merged(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose rows are those of all parts, in order: a view of the memory that they share. None where they lie elsewhere."""
    first = parts[0]
    at, rows = first.storage_offset(), 0
    for part in parts:
        # Not by address: tensors on torch's meta device have none.
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata and part.storage_offset() == at
        if not same or not part.is_contiguous():
            return None
        at, rows = at + part.numel(), rows + part.shape[0]
    shape = torch.Size((rows, *first.shape[1:]))
    return first.as_strided(shape, (*shape[1:], 1))


def merge(groups: Iterable[Sequence[torch.Tensor]]) -> None:
    """Give the tensors of each group one memory. The extra memory is that of one group.

    Raises:
        NotReadable: there is no memory for a group. Those before it are merged.
    """
    for group in groups:
        if merged(group) is not None:
            continue
        try:
            # Data of a parameter are an inference tensor if it is one.
            with torch.inference_mode(group[0].is_inference()), torch.no_grad():
                whole = torch.cat([parameter.detach() for parameter in group])
                for parameter, part in zip(group, whole.split([len(parameter) for parameter in group]), strict=True):
                    parameter.data = part
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise NotReadable("there is no memory to merge its matrices") from error


def check_separate(model: nn.Module, groups: Iterable[Sequence[torch.Tensor]]) -> None:
    """Check that no memory of the groups belongs to another parameter, too: a merge would end what they share.

    Raises:
        NotReadable: names two parameters.
    """
    moving = {id(parameter) for parameter in itertools.chain.from_iterable(groups)}
    reached: dict[int, tuple[int, str, int]] = {}  # per storage, the span that reaches furthest
    for storage, begin, end, name, one in sorted(_spans(model)):
        far, other_name, other = reached.get(storage, (0, "", 0))
        if begin < far and not moving.isdisjoint((one, other)):
            raise NotReadable(f"{other_name} and {name} share memory")
        reached[storage] = max((end, name, one), (far, other_name, other))


def _spans(model: nn.Module) -> Iterator[tuple[int, int, int, str, int]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        begin = int(parameter.storage_offset())
        yield parameter.untyped_storage()._cdata, begin, begin + parameter.numel(), name, id(parameter)
