"""Keys and values in storage of fixed size with a length per row on the device, and attention over them.

Storage is a pair of tensors ``[B, Hkv, S, D]``; row ``r`` holds ``lengths[r]`` tokens, and positions after them are never
read. Tensors on a GPU go to the Triton kernels. These calls do not wait for the device and can be captured in a CUDA graph; a
replay uses the lengths and counts of its own time. Tensors on other devices, float64 and heads of more than 256 dimensions go to torch; on the CPU
the native code computes attention in float32 and bfloat16.
``PIPESPEC_OPS`` works as for :mod:`pipespec_kernels.ops`, which exports these functions, too.

Lengths and counts are on the device. The host reads them only with ``check_counts=True``. Kernels skip a row whose lengths or counts lie outside the
tensors, and :func:`verify_attention` returns NaN for it. On the CPU, and wherever torch computes, the numbers are always checked: such a row raises
ValueError before anything is written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels.library import call, register, traced
from pipespec_kernels.specs import check, check_last, check_out, check_storage, check_tensor, shape_of

# Dtypes that the native code computes with, with its names.
NATIVE_DTYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16"}
MAX_DIM = 256  # of the kernels
_PAIRS, _FEWEST_KEYS, _GROUPED = 16, 16, 16  # of a tile and of a block, at least; spans that are combined first


def kv_append(
    keys: Tensor,
    values: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    n_new: Tensor | None = None,
    *,
    check_counts: bool = False,
) -> None:
    """Write the first ``n_new[r]`` new columns of each row after the ``lengths[r]`` tokens that it holds.

    ``k_cache[r, :, lengths[r] + j] = keys[r, :, j]`` for ``j < n_new[r]``, and the values likewise. Columns from
    ``n_new[r]`` on are padding and write nothing. The lengths do not change: layers share them.

    Args:
        keys: ``[B, Hkv, Q, D]``, the dtype of the storage, or any float where that is float8_e4m3fn: numbers are rounded to it, those beyond 448 to 448.
        values: like ``keys``.
        k_cache: ``[B, Hkv, S, D]``; float32, bfloat16, float16 or float64. Any
            strides but in the last dimension, which must be contiguous; no two elements in one place.
        v_cache: like ``k_cache``.
        lengths: ``[B]``, int32 or int64, contiguous, on the device of the storage.
        n_new: ``[B]``, likewise, ``0 <= n_new <= Q`` and ``lengths + n_new <= S``. None: all columns.
        check_counts: check these values first, which waits for the device. On the CPU always done.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices, or numbers that were looked at, that do not fit. Nothing has been written then.
        RuntimeError: autograd would record: there is no backward pass.
    """
    refuse_gradients("kv_append", keys, values, k_cache, v_cache)
    if traced(k_cache):
        call("kv_append", keys, values, k_cache, v_cache, lengths, n_new, check_counts)
    else:
        _kv_append(keys, values, k_cache, v_cache, lengths, n_new, check_counts)


def _check_append(
    keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, n_new: Any = None, *_: Any
) -> None:
    check("kv_append", k_cache, v_cache, keys, values, lengths, n_new)


@register(
    "(Tensor keys, Tensor values, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? n_new=None, "
    "bool check_counts=False) -> ()",
    _check_append,
    mutates=("k_cache", "v_cache"),
)
def _kv_append(
    keys: Tensor,
    values: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    n_new: Tensor | None = None,
    check_counts: bool = False,
) -> None:
    _check_append(keys, values, k_cache, v_cache, lengths, n_new)
    arguments.check_flag("check_counts", check_counts)
    kernels, width = kernels_for(k_cache), keys.shape[2]
    if check_counts or kernels is None:
        check_fits(lengths, n_new, width, k_cache.shape[2], "n_new")
    (kernels or reference).kv_append(keys, values, k_cache, v_cache, lengths, n_new)


def verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None = None,
    *,
    scale: float | None = None,
    invariant: bool = False,
    out: Tensor | None = None,
    check_counts: bool = False,
    workspace: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of ``Q`` new columns per row over storage that holds their own keys and values already.

    Column ``j`` of row ``r`` sees the keys ``0 .. lengths[r] + j``; ``lengths[r]`` is the row's length *before* the block.
    Query heads ``g * Hq / Hkv ..`` share head ``g`` of the keys, as in HuggingFace models. No mask, no repeated keys or
    values, and nothing after ``lengths[r] + query_lens[r]`` is read. Columns from ``query_lens[r]`` on give zeros.

    It is made for the few columns of a decoding step or a verification. Any ``Q`` works: on a GPU wide blocks take several tiles, each of which reads
    the keys again, as in a prefill. ``invariant`` processes them in parts of 32 columns.

    Args:
        q: ``[B, Hq, Q, D]``, the dtype of the storage, or any float where that is float8_e4m3fn; ``Hq`` a multiple of ``Hkv``. Any strides but in the last dimension,
            which must be contiguous.
        k_cache: as for :func:`kv_append`.
        v_cache: likewise.
        lengths: likewise.
        query_lens: ``[B]``, like ``lengths``: ``0 <= query_lens <= Q``, ``lengths + query_lens <= S``. None: all columns.
        scale: of the scores; default ``D ** -0.5``.
        invariant: add in an order that depends only on the number of keys of a column. The result is then equal to the
            last bit for every ``Q`` and ``B``, so a verification equals decoding token by token. It is slower, but on the CPU in
            float32 and bfloat16, where the native code always adds so.
        out: ``[B, Hq, Q, D]`` to write to, strides as for ``q``; must overlap no other argument.
        check_counts: check the values of lengths and counts first, which waits for the device. On the CPU always done.
        workspace: contiguous int32 ``[N]`` of zeros on the device of ``q``; zero again after the call. Saves a GPU the second launch that combines the parts of
            the keys with ``invariant``, if ``N`` is at least :func:`attention_tickets`; the bits are the same. Calls that may run at the same time need different
            ones. Not used in a traced call and where torch computes.
        window: the number of last keys that a column sees, its own included; at least 1. Keys before the window of every column are not read.
            None: all.
        softcap: a number ``c``, 1e-30 .. 1e30: the score ``s`` becomes ``c * tanh(s / c)``. None: it stays.

    Returns:
        ``[B, Hq, Q, D]`` in the dtype of ``q``; without ``out`` a view of ``[B, Q, Hq, D]``, which is contiguous.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices, or numbers that were looked at, that do not fit. Nothing has been written then.
        RuntimeError: autograd would record: there is no backward pass.

    Example::

        >>> k = v = torch.eye(4).expand(1, 1, 4, 4)
        >>> verify_attention(torch.zeros(1, 1, 2, 4), k, v, torch.tensor([1]))
        tensor([[[[0.5000, 0.5000, 0.0000, 0.0000],
                  [0.3333, 0.3333, 0.3333, 0.0000]]]])
    """
    refuse_gradients("verify_attention", q, k_cache, v_cache)
    if not traced(q):
        return _verify_attention(
            q, k_cache, v_cache, lengths, query_lens, scale, invariant, check_counts, window, softcap, out, workspace
        )
    if out is not None:
        check_out(out, q)
    if workspace is not None:
        check_storage(k_cache, v_cache, written=False)
        _check_workspace(workspace, q)
    result = call(
        "verify_attention", q, k_cache, v_cache, lengths, query_lens, scale, invariant, check_counts, window, softcap
    )
    return result if out is None else out.copy_(result)


def _fake_verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None = None,
    scale: float | None = None,
    invariant: bool = False,
    check_counts: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    _check_attention(q, k_cache, v_cache, lengths, query_lens, scale, window, softcap)
    batch, heads, width, dim = q.shape
    return q.new_empty((batch, width, heads, dim)).transpose(1, 2)


@register(
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? query_lens=None, float? scale=None, "
    "bool invariant=False, bool check_counts=False, int? window=None, float? softcap=None) -> Tensor",
    _fake_verify_attention,
)
def _verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None = None,
    scale: float | None = None,
    invariant: bool = False,
    check_counts: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    _check_attention(q, k_cache, v_cache, lengths, query_lens, scale, window, softcap)
    if out is not None:
        check_out(out, q)
    arguments.check_flag("check_counts", check_counts)
    arguments.check_flag("invariant", invariant)
    _check_workspace(workspace, q)
    batch, heads, width, dim = q.shape
    kernels = kernels_for(q)
    native = None
    # Under autocast torch chooses the dtype of the arithmetic.
    is_native = q.dtype in NATIVE_DTYPES and k_cache.dtype is q.dtype
    if kernels is None and is_native and not torch.is_autocast_enabled("cpu"):
        native = None if dispatch.forced or not q.is_cpu else arguments.native
    if check_counts or (kernels is None and native is None):
        check_fits(lengths, query_lens, width, k_cache.shape[2], "query_lens")
    if out is None:
        out = q.new_empty((batch, width, heads, dim)).transpose(1, 2)
    if kernels is not None:
        options = {"scale": scale, "invariant": invariant, "out": out, "workspace": workspace}
        options |= {"window": window, "softcap": softcap}
        kernels.verify_attention(q, k_cache, v_cache, lengths, query_lens, **options)
        return out
    if native is not None:
        bad = native.verify_attention(
            getattr(native, NATIVE_DTYPES[q.dtype]),
            (batch, heads, k_cache.shape[1], width, dim, k_cache.shape[2]),
            *((t.data_ptr(), *t.stride()[:3]) for t in (q, k_cache, v_cache, out)),
            window or 0,
            numbers(lengths),
            numbers(query_lens),
            dim**-0.5 if scale is None else scale,
            softcap or 0.0,
            torch.get_num_threads(),
        )
        if bad >= 0:
            check_fits(lengths, query_lens, width, k_cache.shape[2], "query_lens")
        return out
    return _by_reference(q, k_cache, v_cache, lengths, query_lens, scale, invariant, window, softcap, out)


def _by_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None,
    scale: float | None,
    invariant: bool,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> Tensor:
    """The reference's attention, which reads only the keys that a column sees. ``invariant``: every column by itself, as in a step of one column."""
    width = q.shape[2]
    befores, fed = lengths.tolist(), [width] * q.shape[0] if query_lens is None else query_lens.tolist()
    if min(fed, default=width) < width:
        out.zero_()
    for row, before in enumerate(befores):
        for begin in range(0, fed[row], 1 if invariant else max(width, 1)):
            end = begin + 1 if invariant else fed[row]
            first = 0 if window is None else max(0, before + begin + 1 - window)
            keys, values = (cache[row : row + 1, :, first : before + end] for cache in (k_cache, v_cache))
            seen = lengths[row : row + 1] + (begin - first)
            queries = q[row : row + 1, :, begin:end]
            out[row : row + 1, :, begin:end] = reference.verify_attention(
                queries, keys, values, seen, None, scale, window, softcap
            )
    return out


def _check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> None:
    check_storage(k_cache, v_cache, written=False)
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise (TypeError if not isinstance(q, Tensor) else ValueError)(
            f"q must be a tensor [B, Hq, Q, D], got {shape_of(q)}"
        )
    sizes = check("verify_attention", k_cache, v_cache, q, lengths, query_lens, written=False)
    if sizes["H"] == 0 or sizes["G"] % sizes["H"]:
        raise ValueError(f"{sizes['G']} query heads cannot share {sizes['H']} heads of keys evenly")
    for name, value in (("scale", scale), ("window", window), ("softcap", softcap)):
        if value is not None:
            arguments.check_number(name, value)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, is {scale}")
    if isinstance(window, float):
        raise TypeError(f"window must be an integer, got {window}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, is {window}")
    if softcap is not None and not 1e-30 <= softcap <= 1e30:
        raise ValueError(f"softcap must be 1e-30 .. 1e30, is {softcap}; leave it out for scores without a cap")


def attention_tickets(rows: int, columns: int, heads_q: int, heads: int, capacity: int) -> int:
    """The size of a ``workspace`` with which :func:`verify_attention` takes one launch where it can, however the keys are divided.

    The arguments are ``B``, ``Q``, ``Hq``, ``Hkv`` and ``S`` of the call; it also serves calls of fewer columns.
    """
    tiles = -(-columns * heads_q // heads // _PAIRS)
    return rows * heads * tiles * (1 + -(-capacity // (_FEWEST_KEYS * _GROUPED)))


def _check_workspace(workspace: Any, q: Tensor) -> None:
    if workspace is None:
        return
    size = workspace.shape[0] if isinstance(workspace, Tensor) and workspace.dim() == 1 else 0
    check_tensor(workspace, "workspace", (torch.int32,), (size,), q.device, "q")
    check_last(workspace, "workspace")


def refuse_gradients(operation: str, *tensors: Any) -> None:
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        raise RuntimeError(f"{operation} has no backward pass: call it under torch.no_grad() or inference_mode()")


def kernels_for(tensor: Tensor) -> Any:
    """The kernels for this storage, or these queries, if there are any; else None."""
    return dispatch.kernels(tensor) if tensor.shape[-1] <= MAX_DIM else None


def numbers(tensor: Tensor | None) -> tuple[int, bool]:
    """Integers, for the native code."""
    return (0, False) if tensor is None else (tensor.data_ptr(), tensor.dtype is torch.int64)


def check_fits(
    lengths: Tensor, counts: Tensor | None, width: int, capacity: int, name: str, first: str = "lengths"
) -> None:
    """Raise ``ValueError`` for a row that points outside the tensors. Waits for the device."""
    all_counts = [width] * len(lengths) if counts is None else counts.tolist()
    for row, (length, count) in enumerate(zip(lengths.tolist(), all_counts, strict=True)):
        if not 0 <= count <= width:
            raise ValueError(f"row {row}: need 0 <= {name} <= {width}, is {count}")
        if length < 0 or length + count > capacity:
            raise ValueError(
                f"row {row}: {first} is {length}, and {count} more tokens must lie within the capacity {capacity}"
            )
