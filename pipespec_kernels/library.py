"""Registration with torch.library, in the namespace ``pipespec``, of the operations that a compiled forward of a model calls.

Each is an ordinary Python function with its own dispatch by device, because torch's dispatcher costs more than a small call. Only traced calls
(:func:`traced`) go through ``torch.ops.pipespec``. The schema has tensors and numbers only, and the fake implementation checks shapes and dtypes in the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["call", "register", "traced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_modes = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "Tensor": ("a tensor", (Tensor,)),
    "int": ("an integer", (int, torch.SymInt, Integral)),
    "float": ("a number", (int, float, torch.SymInt, torch.SymFloat, Real)),
    "bool": ("True or False", (bool,)),
}
"""By type of a schema, its name in errors and the Python types."""


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


def call(name: str, *values: Any) -> Any:
    """Call ``torch.ops.pipespec.<name>``.

    Raises:
        TypeError: A value is not of the schema's type. torch's own error would print the schema.
        ValueError: An integer does not fit in 64 bits.
    """
    operation = getattr(torch.ops.pipespec, name)
    given = list(values)
    if not torch.compiler.is_compiling():
        for i, (argument, value) in enumerate(zip(operation.default._schema.arguments, values, strict=False)):
            kind, types = _KINDS[str(argument.type).removeprefix("Optional[").removesuffix("]")]
            if str(argument.type).startswith("Optional["):
                kind, types = f"{kind} or None", (*types, type(None))
            fits = isinstance(value, types) and (isinstance(value, bool) <= (bool in types))
            if not fits:
                raise TypeError(f"{argument.name} must be {kind}, got {type(value).__name__}")
            if isinstance(value, Integral) and not -(2**63) <= int(value) < 2**63:
                raise ValueError(f"{argument.name} must fit in 64 bits, got {value}")
            if isinstance(value, np.generic):
                given[i] = value.item()
    return operation(*given)


def traced(tensor: Any) -> bool:
    """Whether a call with this tensor must go through torch: in a compilation, export or trace, under a dispatch mode, for a tensor of a subclass or without
    data."""
    # Export without dynamo uses a tensor class of its own. torch.jit.trace records operations of torch only.
    return torch.compiler.is_dynamo_compiling() or (
        (type(tensor) is not Tensor or _modes() > 0 or tensor.is_meta or _jit_trace() is not None)
        and isinstance(tensor, Tensor)
    )
