"""Row selection over logits ``[B, Q, V]``: :func:`argmax`, :func:`sample`, and :func:`verify` with either;
:func:`cutoff` says which tokens a sample may be.

CPU tensors go to the native code (one pass over the logits, vectorised, several threads for large work), tensors on
other devices and float64 logits to :mod:`pipespec_kernels.reference`. Of equal logits the lowest id wins, and a NaN
counts as larger than everything: what ``torch.argmax`` does.

All check their arguments before they write anything. The checks are written for a call per draft step: they look at
metadata only and cost about two microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import _native, reference
from pipespec_kernels.kv import kv_append, kv_compact, kv_gather, kv_truncate, verify_attention
from pipespec_kernels.noise import Noise

__all__ = [
    "Noise",
    "argmax",
    "cutoff",
    "kv_append",
    "kv_compact",
    "kv_gather",
    "kv_truncate",
    "sample",
    "verify",
    "verify_attention",
]

_INT32, _INT64, _FLOAT32, _FLOAT64 = torch.int32, torch.int64, torch.float32, torch.float64
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


def sample(logits: Tensor, noise: Noise, *, threads: int | None = None, out: Tensor | None = None) -> Tensor:
    """A token drawn from the softmax of every row: the id of the largest logit once it is scaled and has noise added.

    The choice in column ``q`` of row ``b`` is the id ``v`` with the largest
    ``logits[b, q, v] * noise.inv_temperature[b] + G(noise.seeds[b], noise.positions[b] + q, v)``, computed in float32
    (float64 logits: in float64, with the same float32 noise). It depends on these values alone: neither on the batch
    around them nor on threads, instructions or device. Logits below the cutoff are left out; -inf is never chosen, a
    NaN always (the first of them); where nothing can be chosen, id 0.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        noise: seeds, positions and temperatures, see :class:`Noise`.
        threads: upper bound, the calling thread included; default ``torch.get_num_threads()``.
        out: contiguous int32 CPU tensor ``[B, Q]`` to write to; must not overlap ``logits``.

    Returns:
        int32 CPU tensor ``[B, Q]``.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device or number that does not fit. Nothing has been written then.

    Example::

        >>> one = Noise(torch.tensor([7]), torch.tensor([0]), torch.tensor([1.0]))
        >>> sample(torch.tensor([[[0.0, -float("inf"), -float("inf")]]]), one)
        tensor([[0]], dtype=torch.int32)
    """
    batch, width, vocab, stride, code = _logits(logits)
    arguments = _noise(noise, batch, width)
    if out is None:
        out = torch.empty((batch, width), dtype=_INT32, device=_CPU)
    else:
        _out(out, (batch, width), "out")
    if code is None:
        if width > 0:
            _check_noise(arguments, range(batch), width)
        return out.copy_(reference.sample(logits, Noise(*arguments)))
    _native.sample(
        logits.data_ptr(),
        code,
        batch,
        width,
        vocab,
        stride[0],
        stride[1],
        out.data_ptr(),
        torch.get_num_threads() if threads is None else threads,
        *_addresses(arguments),
    )
    return out


def cutoff(
    logits: Tensor,
    *,
    inv_temperature: float | Tensor | Any = 1.0,
    top_k: int | Tensor | Any = 0,
    top_p: float | Tensor | Any = 1.0,
    min_p: float | Tensor | Any = 0.0,
    n_fed: Tensor | Any | None = None,
    n_hint: Tensor | Any | None = None,
    threads: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Temperature, top-k, top-p and min-p as one number per row: the smallest logit that passes, for ``Noise.cutoff``.

    The filters are those of HuggingFace's warpers, in their order, each applied to what the one before left:

    * top-k keeps the logits that are at least the k-th largest;
    * top-p keeps the smallest set of largest probabilities whose sum reaches ``top_p``, at least the largest;
    * min-p keeps probabilities of at least ``min_p`` times the largest.

    Logits equal to a kept one are all kept. Top-p in HuggingFace drops some of those that tie with the last one, in an
    order that depends on its sort. Probabilities are of ``float32(logits * inv_temperature)``, summed in float64; where
    a sum lies within float32's rounding of ``top_p``, HuggingFace may decide the other way.

    A row with a NaN or without a number above -inf gets -inf, and so does every row if all filters are off.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        inv_temperature: 1 / temperature, finite and positive. This and the next three: one number, or a tensor or numpy
            array ``[B]`` on the CPU, one per row of the batch.
        top_k: integers ``>= 0``; 0 or at least V: off.
        top_p: ``0 .. 1``; 1: off.
        min_p: ``0 .. 1``; 0: off.
        n_fed: as for :func:`verify`, together with ``n_hint``: only the columns that verification may read,
            ``n_fed - 1 - n_hint .. n_fed - 1``, are computed, the others get -inf. None: all columns.
        n_hint: likewise.
        threads: upper bound, the calling thread included; default ``torch.get_num_threads()``.
        out: contiguous float32 CPU tensor ``[B, Q]`` to write to; must not overlap ``logits``.

    Returns:
        float32 CPU tensor ``[B, Q]``. For float64 logits rounded down, so that the smallest kept one stays.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device or number that does not fit. Nothing has been written then.

    Example::

        >>> cutoff(torch.tensor([[[1.0, 5.0, 3.0, 4.0]]]), top_k=2)
        tensor([[4.]])
    """
    batch, width, vocab, stride, code = _logits(logits)
    scales = _filter(inv_temperature, batch, _FLOAT32, "inv_temperature")
    ks = _filter(top_k, batch, _INT64, "top_k")
    ps = _filter(top_p, batch, _FLOAT64, "top_p")
    min_ps = _filter(min_p, batch, _FLOAT64, "min_p")
    if (n_fed is None) != (n_hint is None):
        raise ValueError("n_fed and n_hint go together")
    if n_fed is not None:
        n_fed, n_hint = _counts(n_fed, batch, "n_fed"), _counts(n_hint, batch, "n_hint")
    if out is None:
        out = torch.empty((batch, width), dtype=_FLOAT32, device=_CPU)
    else:
        _out(out, (batch, width), "out", _FLOAT32)
    if code is None:
        if n_fed is not None and n_hint is not None:
            _check_counts(n_fed, n_hint, width)
        for row, (scale, k, p, least) in enumerate(zip(scales, ks, ps, min_ps, strict=True)):
            if not (0 < scale < math.inf and k >= 0 and 0 <= p <= 1 and 0 <= least <= 1):
                raise ValueError(
                    f"row {row}: inv_temperature {scale}, top_k {k}, top_p {p} or min_p {least} is not valid"
                )
        return out.copy_(reference.cutoff(logits, scales, ks, ps, min_ps, n_fed, n_hint))
    _native.cutoff(
        logits.data_ptr(),
        code,
        batch,
        width,
        vocab,
        stride[0],
        stride[1],
        scales.data_ptr(),
        ks.data_ptr(),
        ps.data_ptr(),
        min_ps.data_ptr(),
        0 if n_fed is None else n_fed.data_ptr(),
        0 if n_hint is None else n_hint.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads() if threads is None else threads,
    )
    return out


def verify(
    logits: Tensor,
    tokens: Tensor,
    n_fed: Tensor | Any,
    n_hint: Tensor | Any,
    *,
    noise: Noise | None = None,
    threads: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Verification: each row's own choices up to the first hint that they contradict.

    Row ``r`` was fed ``tokens[r, :n_fed[r]]``, of which the last ``n_hint[r]`` are hints. With
    ``s = n_fed[r] - 1 - n_hint[r]``, ``selected[r, j]`` is the argmax of ``logits[r, s + j]`` for
    ``j = 0 .. accepted[r]``; the walk goes on while ``selected[r, j] == tokens[r, s + 1 + j]`` and hints are left.
    Logits behind the first mismatch are not read. With ``noise``, ``selected[r, j]`` is what :func:`sample` draws in
    column ``s + j`` instead.

    Args:
        logits: ``[B, Q, V]``, as for :func:`argmax`.
        tokens: ``[B, Q]``, int64 or int32, any strides, on the device of ``logits``.
        n_fed: ``[B]``, int32 on the CPU (a numpy array will do): tokens fed per row, ``0 <= n_fed <= Q``. A row with 0
            idles: all -1, nothing accepted, its ``n_hint`` is ignored.
        n_hint: ``[B]``, likewise: how many of them are hints, ``0 <= n_hint < n_fed``.
        noise: see :class:`Noise`; None: greedy. An idle row's numbers are ignored.
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
    arguments = None if noise is None else _noise(noise, batch, width)
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
        if arguments is not None:
            _check_noise(arguments, [row for row, fed in enumerate(n_fed.tolist()) if fed > 0], width)
        noise = None if arguments is None else Noise(*arguments)
        chosen, agreed = reference.verify(logits, tokens, n_fed, n_hint, noise)
        return selected.copy_(chosen), accepted.copy_(agreed)
    token_stride = tokens.stride()
    if arguments is None:
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
    else:
        _native.verify_coupled(
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
            *_addresses(arguments),
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
    return _per_row(counts, (batch,), _INT32, name, "count")


def _per_row(values: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, what: str = "value") -> Tensor:
    if not isinstance(values, Tensor):
        if not hasattr(values, "__array_interface__"):
            kind = str(dtype).removeprefix("torch.")
            raise TypeError(f"{name} must be a tensor or numpy array of {kind}, got {type(values).__name__}")
        values = torch.from_numpy(values)
    if values.dtype is not dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {values.dtype}")
    if not values.is_cpu:
        raise ValueError(f"{name} must be on the CPU, is on {values.device}")
    if values.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, one {what} per row, got shape {tuple(values.shape)}")
    return values if values.is_contiguous() else values.contiguous()


def _filter(values: Any, batch: int, dtype: torch.dtype, name: str) -> Tensor:
    """A number, or one per row, as a contiguous CPU tensor ``[B]``."""
    if isinstance(values, (int, float)):
        if dtype is _INT64 and not isinstance(values, int):
            raise TypeError(f"{name} must be an integer, got {values!r}")
        return torch.full((batch,), values, dtype=dtype, device=_CPU)
    if not isinstance(values, Tensor):
        if not hasattr(values, "__array_interface__"):
            raise TypeError(f"{name} must be a number, a tensor or a numpy array, got {type(values).__name__}")
        values = torch.as_tensor(values)
    if dtype is _INT64 and values.dtype not in (_INT32, _INT64):
        raise TypeError(f"{name} must be integers, got {values.dtype}")
    if not values.is_cpu:
        raise ValueError(f"{name} must be on the CPU, is on {values.device}")
    if values.shape != (batch,):
        raise ValueError(f"{name} must be a number or [{batch}], got shape {tuple(values.shape)}")
    return values.to(dtype).contiguous()


def _noise(noise: Noise, batch: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    """The fields of a checked Noise, contiguous: they must outlive the call that gets their addresses."""
    if not isinstance(noise, Noise):
        raise TypeError(f"noise must be a Noise, got {type(noise).__name__}")
    cutoff = noise.cutoff
    if not 0 <= noise.stream < 2**32:
        raise ValueError(f"noise.stream must be a number of 32 bits, got {noise.stream}")
    return (
        _per_row(noise.seeds, (batch,), _INT64, "noise.seeds"),
        _per_row(noise.positions, (batch,), _INT64, "noise.positions"),
        _per_row(noise.inv_temperature, (batch,), _FLOAT32, "noise.inv_temperature"),
        None if cutoff is None else _per_row(cutoff, (batch, width), _FLOAT32, "noise.cutoff"),
        noise.stream,
    )


def _addresses(noise: tuple[Tensor, Tensor, Tensor, Tensor | None, int]) -> tuple[int, int, int, int, int]:
    seeds, positions, inv_temperature, cutoff, stream = noise
    return (
        seeds.data_ptr(),
        positions.data_ptr(),
        inv_temperature.data_ptr(),
        0 if cutoff is None else cutoff.data_ptr(),
        stream,
    )


def _check_noise(noise: tuple[Tensor, Tensor, Tensor, Tensor | None, int], rows: Iterable[int], width: int) -> None:
    """What the native code checks by itself, for the reference."""
    positions, scales = noise[1].tolist(), noise[2].tolist()
    for row in rows:
        if not 0 < scales[row] < math.inf:
            raise ValueError(f"row {row}: inv_temperature must be finite and positive, is {scales[row]}")
        if not 0 <= positions[row] <= 2**63 - 1 - width:
            raise ValueError(f"row {row}: positions must not be negative, is {positions[row]}")


def _out(out: Tensor, shape: tuple[int, ...], name: str, dtype: torch.dtype = _INT32) -> None:
    if not isinstance(out, Tensor) or out.dtype is not dtype:
        kind = str(dtype).removeprefix("torch.")
        raise TypeError(
            f"{name} must be {'an' if dtype is _INT32 else 'a'} {kind} tensor, got {getattr(out, 'dtype', type(out).__name__)}"
        )
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
