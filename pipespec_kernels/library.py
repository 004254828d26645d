"""Registration of operations with torch.library, in the namespace ``pipespec``, for torch.compile, export and subclasses.

Each operation is an ordinary Python function with its own dispatch by device, because torch's dispatcher costs more than a small
call. Only traced calls (:func:`traced`) go through ``torch.ops.pipespec``. Its schema has tensors and numbers only, and its fake
implementation checks shapes and dtypes in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["register", "traced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_modes = torch._C._len_torch_dispatch_stack


def register(schema: str, fake: Callable[..., Any], mutates: Iterable[str] = ()) -> Callable[[_Function], _Function]:
    """Registers the decorated function, for all devices, as ``torch.ops.pipespec.<its name without leading _>``.

    Args:
        schema: as of ``torch.library``, without the name: ``"(Tensor logits, int? threads=None) -> Tensor"``.
        fake: gets the same arguments and returns empty tensors of the results' shapes, dtypes and devices; raises for bad ones.
        mutates: names of the arguments that the function writes to.
    """

    def decorate(function: _Function) -> _Function:
        name = f"pipespec::{function.__name__.lstrip('_')}"
        torch.library.custom_op(name, function, mutates_args=mutates, schema=schema).register_fake(fake)
        return function

    return decorate


def traced(tensor: Any) -> bool:
    """Whether a call with this tensor must go through torch: in a compilation or export, under a dispatch mode, for a tensor of a subclass or without
    data."""
    # Export without dynamo uses a tensor class of its own.
    return torch.compiler.is_dynamo_compiling() or (
        (type(tensor) is not Tensor or _modes() > 0 or tensor.is_meta) and isinstance(tensor, Tensor)
    )
