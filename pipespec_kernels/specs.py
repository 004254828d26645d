"""One specification per operation on keys and values: its tensors, their shapes, dtypes and strides. The checks, and so the fakes of traced calls, follow it.

The letters of a shape are sizes: ``B`` rows, ``H`` heads of keys, ``S`` the capacity, ``D`` the dimension of a head, all of the storage; other letters are
whatever the first tensor that has them says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipespec_kernels.arguments import check_dense
from pipespec_kernels.kept import KEPT

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


class Argument(NamedTuple):
    """A tensor that an operation reads.

    Attributes:
        name: in errors.
        shape: a letter for each dimension.
        dtypes: None: that of the storage, or where that is :data:`pipespec_kernels.kept.KEPT`, any float, the same for all of them.
        strides: ``"any"``, ``"dense"`` (the last dimension is contiguous) or ``"contiguous"``.
        optional: may be None.
    """

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...] | None = None
    strides: str = "any"
    optional: bool = False


def _per_row(name: str, optional: bool = False) -> Argument:
    return Argument(name, "B", INTEGERS, "contiguous", optional)


_NEW = (Argument("keys", "BHQD", strides="dense"), Argument("values", "BHQD", strides="dense"))
_QUERIES = Argument("q", "BGQD", strides="dense")
SPECS: dict[str, tuple[Argument, ...]] = {
    "kv_append": (*_NEW, _per_row("lengths"), _per_row("n_new", optional=True)),
    "verify_attention": (_QUERIES, _per_row("lengths"), _per_row("query_lens", optional=True)),
    "qkv_append": (_per_row("lengths"), _per_row("query_lens", optional=True)),
    "rope_append": (
        *_NEW,
        _per_row("lengths"),
        _per_row("n_new", optional=True),
        _QUERIES,
        Argument("positions", "BQ", INTEGERS, optional=True),
        Argument("q_norm", "D", strides="dense", optional=True),
        Argument("k_norm", "D", strides="dense", optional=True),
    ),
}
"""By operation, what it has in addition to the storage, in the order of :func:`check`."""


def check(operation: str, k_cache: Tensor, v_cache: Tensor, *values: Any, written: bool = True) -> dict[str, int]:
    """Check the arguments of an operation by its specification.

    Args:
        operation: one of :data:`SPECS`.
        k_cache: the storage ``[B, H, S, D]``.
        v_cache: likewise.
        values: one per argument of the specification.
        written: the operation writes to the storage.

    Returns:
        The size of each letter.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride or device that does not fit.
    """
    sizes = dict(zip("BHSD", check_storage(k_cache, v_cache, written), strict=True))
    floats: tuple[torch.dtype, ...] = FLOATS if k_cache.dtype is KEPT else (k_cache.dtype,)
    for argument, value in zip(SPECS[operation], values, strict=True):
        if value is None and argument.optional:
            continue
        has_shape = isinstance(value, Tensor) and value.dim() == len(argument.shape)
        shape = [sizes.setdefault(s, value.shape[i] if has_shape else 0) for i, s in enumerate(argument.shape)]
        check_tensor(value, argument.name, argument.dtypes or floats, tuple(shape), k_cache.device)
        floats = floats if argument.dtypes else (value.dtype,)
        if argument.strides == "dense":
            check_last(value, argument.name)
        elif argument.strides == "contiguous":
            check_contiguous(value, argument.name)
    return sizes


def check_storage(k_cache: Any, v_cache: Any, written: bool = True) -> tuple[int, int, int, int]:
    """The sizes ``[B, H, S, D]`` of checked storage."""
    if not isinstance(k_cache, Tensor):
        raise TypeError(f"k_cache must be a tensor, got {type(k_cache).__name__}")
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache must be [B, Hkv, S, D], got {shape_of(k_cache)}")
    check_tensor(k_cache, "k_cache", (*FLOATS, KEPT), tuple(k_cache.shape), k_cache.device)
    check_tensor(v_cache, "v_cache", (k_cache.dtype,), tuple(k_cache.shape), k_cache.device)
    batch, heads, capacity, dim = k_cache.shape
    if dim == 0:
        raise ValueError(f"heads must have a dimension, got {shape_of(k_cache)}")
    if capacity >= 2**31:
        raise ValueError(f"a capacity must be below 2**31, got {shape_of(k_cache)}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_last(cache, name)
        if written:
            check_distinct(cache, name)
    return batch, heads, capacity, dim


def check_tensor(
    tensor: Any,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
    like: str = "the storage",
) -> None:
    """Check that a tensor is one of these dtypes, with this shape and device, and has its values in memory."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {names}, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like {like}, is on {tensor.device}")
    check_dense(tensor, name)
    if not torch.compiler.is_dynamo_compiling() and tensor.is_neg():
        raise ValueError(f"{name} must have its values in memory, and is a negated view: pass {name}.resolve_neg()")


def check_last(tensor: Tensor, name: str) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def check_contiguous(tensor: Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_distinct(tensor: Tensor, name: str) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{name} is written to and must not be expanded, got strides {tensor.stride()}")


def check_out(out: Any, q: Tensor) -> None:
    """Check a tensor that takes a result like ``q``."""
    check_tensor(out, "out", (q.dtype,), tuple(q.shape), q.device)
    check_last(out, "out")
    check_distinct(out, "out")


def shape_of(tensor: Any) -> str:
    return f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
