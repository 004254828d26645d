"""Row selection: greedy :func:`argmax` and :func:`verify` over logits ``[B, Q, V]``.

CPU tensors go to the native code (one pass over the logits, vectorised, several threads for large work), tensors on
other devices and float64 logits to :mod:`pipespec_kernels.reference`. Of equal logits the lowest id wins, and a NaN
counts as larger than everything: what ``torch.argmax`` does.

Both check their arguments before they write anything. The checks are written for a call per draft step: they look at
metadata only and cost about two microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import _native, reference

__all__ = ["argmax", "verify"]

_INT32, _INT64, _FLOAT64 = torch.int32, torch.int64, torch.float64
_CPU = torch.device("cpu")
_CODES = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}
_TOKEN_BYTES = {_INT32: 4, _INT64: 8}


def argmax(logits: Tensor, *, threads: int | None = None, out: Tensor | None = None) -> Tensor:
    """Id of the largest logit in every row.

    Args:
        logits: ``[B, Q, V]``, float32, bfloat16 or float16 (float64 and other devices: the slow reference). Any strides
            in the first two dimensions, including 0; the vocabulary must be contiguous.
        threads: upper bound, the calling thread included; default ``torch.get_num_threads()``.
        out: contiguous int32 CPU tensor ``[B, Q]`` to write to; must not overlap ``logits``.

    Returns:
        int32 CPU tensor ``[B, Q]``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride or device that does not fit. Nothing has been written then.

    Example::

        >>> argmax(torch.tensor([[[0.0, 2.0, 2.0], [-1.0, float("nan"), 9.0]]]))
        tensor([[1, 1]], dtype=torch.int32)
    """
    batch, width, vocab, stride, code = _logits(logits)
    if out is None:
        out = torch.empty((batch, width), dtype=_INT32, device=_CPU)
    else:
        _out(out, (batch, width), "out")
    if code is None:
        return out.copy_(reference.argmax(logits))
    _native.argmax(
        logits.data_ptr(),
        code,
        batch,
        width,
        vocab,
        stride[0],
        stride[1],
        out.data_ptr(),
        torch.get_num_threads() if threads is None else threads,
    )
    return out


def verify(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Tensor,
    n_hint: Tensor,
    *,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Greedy verification: each row's own choices up to the first hint that they contradict.

    Row ``r`` was fed ``tokens[r, :n_fed[r]]``, of which the last ``n_hint[r]`` are hints. With
    ``s = n_fed[r] - 1 - n_hint[r]``, ``selected[r, j]`` is the argmax of ``logits[r, s + j]`` for
    ``j = 0 .. accepted[r]``; the walk goes on while ``selected[r, j] == tokens[r, s + 1 + j]`` and hints are left.
    Logits behind the first mismatch are not read.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        tokens: ``[B, Q]``, int64 or int32, any strides, on the device of ``logits``.
        n_fed: ``[B]``, int32 on the CPU (a numpy array will do): tokens fed per row, ``0 <= n_fed <= Q``. A row with 0
            idles: all -1, nothing accepted, its ``n_hint`` is ignored.
        n_hint: ``[B]``, likewise: how many of them are hints, ``0 <= n_hint < n_fed``.
        threads: upper bound, the calling thread included; default ``torch.get_num_threads()``.
        out: contiguous int32 CPU tensors ``[B, Q]`` and ``[B]`` to write to; must overlap no other argument. Saves the
            two allocations, which are a third of the cost of a small call.

    Returns:
        ``(selected[B, Q], accepted[B])``, int32 on the CPU. ``selected`` is -1 past ``accepted[r]``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices or counts that do not fit. Nothing has been written then.

    Example::

        >>> logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 1]]), 6).float()
        >>> fed = torch.tensor([[7, 3, 1, 5]])  # one token of our own, three hints; we would have said 3, 1, 4
        >>> n = torch.tensor([4], dtype=torch.int32)
        >>> verify(logits, fed, n, n - 1)
        (tensor([[ 3,  1,  4, -1]], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    batch, width, vocab, stride, code = _logits(logits)
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}")
    token_bytes = _TOKEN_BYTES.get(tokens.dtype)
    if token_bytes is None:
        raise TypeError(f"tokens must be int64 or int32, got {tokens.dtype}")
    if tokens.shape != (batch, width):
        raise ValueError(f"tokens are {tuple(tokens.shape)}, but logits [B, Q, V] are {tuple(logits.shape)}")
    if not (tokens.is_cpu and logits.is_cpu) and tokens.device != logits.device:
        raise ValueError(f"tokens are on {tokens.device}, logits on {logits.device}")
    n_fed = _counts(n_fed, batch, "n_fed")
    n_hint = _counts(n_hint, batch, "n_hint")
    if out is None:
        # From a tensor that is int32 on the CPU already: half the price of torch.empty with dtype and device.
        selected = n_fed.new_empty((batch, width))
        accepted = torch.empty_like(n_fed)
    else:
        selected, accepted = out
        _out(selected, (batch, width), "out[0]")
        _out(accepted, (batch,), "out[1]")
    if code is None:
        _check_counts(n_fed, n_hint, width)
        chosen, agreed = reference.verify(logits, tokens, n_fed, n_hint)
        return selected.copy_(chosen), accepted.copy_(agreed)
    token_stride = tokens.stride()
    _native.verify(
        logits.data_ptr(),
        code,
        batch,
        width,
        vocab,
        stride[0],
        stride[1],
        tokens.data_ptr(),
        token_bytes,
        token_stride[0],
        token_stride[1],
        n_fed.data_ptr(),
        n_hint.data_ptr(),
        selected.data_ptr(),
        accepted.data_ptr(),
        torch.get_num_threads() if threads is None else threads,
    )
    return selected, accepted


def _logits(logits: Tensor) -> tuple[int, int, int, tuple[int, ...], int | None]:
    """Sizes, strides and the native dtype code of checked logits; no code: not for the native library."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}")
    shape = logits.shape
    if len(shape) != 3:
        raise ValueError(f"logits must be [B, Q, V], got shape {tuple(shape)}")
    batch, width, vocab = shape
    if not 0 < vocab < 2**31:
        raise ValueError(f"the vocabulary must have 1 .. 2**31-1 entries, got shape {tuple(shape)}")
    stride = logits.stride()
    if stride[2] != 1 and vocab > 1:
        raise ValueError(f"logits must be contiguous along the vocabulary, got strides {stride}")
    code = _CODES.get(logits.dtype)
    if code is None and logits.dtype is not _FLOAT64:
        raise TypeError(f"logits must be float32, bfloat16, float16 or float64, got {logits.dtype}")
    return batch, width, vocab, stride, code if logits.is_cpu else None


def _counts(counts: Any, batch: int, name: str) -> Tensor:
    if not isinstance(counts, Tensor):
        if not hasattr(counts, "__array_interface__"):
            raise TypeError(f"{name} must be an int32 tensor or numpy array, got {type(counts).__name__}")
        counts = torch.from_numpy(counts)
    if counts.dtype is not _INT32:
        raise TypeError(f"{name} must be int32, got {counts.dtype}")
    if not counts.is_cpu:
        raise ValueError(f"{name} must be on the CPU, is on {counts.device}")
    if counts.shape != (batch,):
        raise ValueError(f"{name} must be [{batch}], one count per row, got shape {tuple(counts.shape)}")
    return counts if counts.is_contiguous() else counts.contiguous()


def _out(out: Tensor, shape: tuple[int, ...], name: str) -> None:
    if not isinstance(out, Tensor) or out.dtype is not _INT32:
        raise TypeError(f"{name} must be an int32 tensor, got {getattr(out, 'dtype', type(out).__name__)}")
    if out.shape != shape or not out.is_cpu or not out.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous on the CPU with shape {shape}, "
            f"got shape {tuple(out.shape)}, strides {out.stride()} on {out.device}"
        )


def _check_counts(n_fed: Tensor, n_hint: Tensor, width: int) -> None:
    """What the native code checks by itself, for the reference."""
    for row, (fed, hints) in enumerate(zip(n_fed.tolist(), n_hint.tolist(), strict=True)):
        if fed < 0 or hints < 0 or fed > width or (fed > 0 and hints >= fed):
            raise ValueError(f"row {row}: need 0 <= n_hint < n_fed <= Q: n_fed={fed}, n_hint={hints}, Q={width}")
