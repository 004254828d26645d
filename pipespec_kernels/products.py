"""Matrix products of a decoding step: few rows, each product in one launch on a GPU with what comes before and behind it in a layer.

:func:`linear_small` and :func:`qkv_append`, with :func:`pipespec_kernels.ops.verify_attention` between them, are the five launches of a decoder layer: norm, queries,
keys and values; attention; output and residual sum; norm, gate and up; down and residual sum. Numbers are rounded where HuggingFace's modules round them. The order of a
sum depends on the shape and the dtype of the weights alone, so a row has the same bits alone and among others: a verification of several columns gives what decoding
token by token gives.

Weights may be quantised, in tiles: :class:`pipespec_kernels.tiles.TiledMatrix`. A product then has the weights of :func:`decode_rows`, rounded to the dtype of ``x``, so
a matrix in 4 bits gives what its copy in 16 bits gives, up to the order of the sums. For products of more rows :func:`decode_rows` writes that copy out.

Tensors on a GPU go to the Triton kernels; the rest goes to torch, a row at a time. ``PIPESPEC_OPS`` works as for :mod:`pipespec_kernels.ops`, which exports
these functions, too. None has a backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels.kept import KEPT
from pipespec_kernels.kv import check_fits, refuse_gradients
from pipespec_kernels.layers import ACTIVATIONS, as_rows, check_eps, check_like, check_rows, check_tables, in_tables
from pipespec_kernels.specs import INTEGERS, check, check_contiguous, check_distinct, check_last, check_tensor
from pipespec_kernels.tiles import BAND, TiledMatrix

MAX_ROWS = 16
"""Rows of a product. More of them are the library's: its products read the weights once for all of them."""


def linear_small(
    x: Tensor,
    weight: Tensor | TiledMatrix,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
    activation: str | None = None,
    residual: Tensor | None = None,
    query_lens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``linear(x, weight, bias)`` of at most 16 rows, with an RMS norm before it, and an activation or a residual sum behind it.

    The result is that of ``h = rms_norm(x) or x``, ``y = h @ weight.T + bias`` in float32, rounded to the dtype; then ``activation(y[:, :I]) * y[:, I:]`` or
    ``residual + y``. Norm and activation round as in :func:`add_rms_norm` and :func:`silu_mul`. A row's bits depend on that row alone.

    Args:
        x: ``[M, K]`` with ``M <= 16``, float32, bfloat16, float16 or float64; rows contiguous.
        weight: ``[N, K]``, likewise, or in tiles; with an activation ``[2 * I, K]``, the gate's rows first, in tiles with ``I`` a multiple of 8. A dependent launch (``PIPESPEC_PDL=1``) reads it before the launch
            ahead of it has ended: no kernel that lets the next launch begin early may write it.
        bias: ``[N]``, contiguous, the dtype of ``x``. None: nothing is added.
        norm: ``[K]``, likewise: weights of an RMS norm of the rows of ``x``. None: they are multiplied as they are.
        eps: of the norm: finite, not negative.
        one_plus_weight: of the norm, see :func:`add_rms_norm`.
        activation: one of those of :func:`silu_mul`, or None. Not together with ``residual``.
        residual: ``[M, N]``, rows contiguous. None: nothing is added.
        query_lens: ``[B]`` with ``B <= 16``, int32 or int64, contiguous, on the device of ``x``. If all are 0 or less, nothing is computed or written: the step has
            no work. None: it has.
        out: ``[M, N]`` or ``[M, I]``, rows contiguous, to write to. It may be ``residual`` itself, and must overlap no other argument.

    Returns:
        ``[M, N]``, or with an activation ``[M, I]``, contiguous; of any values if nothing was computed.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device, number or name that does not fit. Nothing has been written then.
        RuntimeError: autograd would record: there is no backward pass.

    Example::

        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> linear_small(x, weight, residual=torch.tensor([[10.0, 20.0]]))
        tensor([[13., 27.]])
        >>> linear_small(x, weight, norm=torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.9799]])
    """
    refuse_gradients("linear_small", x, weight, bias, norm, residual, out)
    _check_product(x, weight, bias, norm, eps, one_plus_weight)
    columns = len(weight)
    if activation is not None:
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)} or None, is {activation!r}")
        if residual is not None:
            raise ValueError("activation and residual do not go together")
        if not can_halve(weight):
            raise ValueError(
                f"with an activation weight must have an even number of rows, in tiles of whole bands of {BAND}, got {columns}"
            )
        columns //= 2
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            check_like(tensor, name, x, (len(x), columns))
    if out is not None:
        check_distinct(out, "out")
    if query_lens is not None:
        _check_counts(query_lens, len(query_lens), x)
    kernels = dispatch.kernels(x)
    given = x, _taken(weight, kernels, x), bias, norm, float(eps), one_plus_weight, activation, residual, query_lens
    if out is None:
        out = x.new_empty((len(x), columns))
    if kernels is None:
        reference.linear_small(*given, out)
    elif out.numel():
        kernels.linear_small(*given, out)
    return out


def qkv_append(
    x: Tensor,
    weight: Tensor | TiledMatrix,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
    out: Tensor | None = None,
    check_counts: bool = False,
) -> Tensor:
    """:func:`linear_small` of queries, keys and values, then :func:`rope_append` of all columns, whose positions are ``lengths[r] + j``.

    Args:
        x: ``[B, Q, K]`` with ``B * Q <= 16``, as for :func:`linear_small`, and one distance between all rows.
        weight: ``[(Hq + 2 * Hkv) * D, K]``, as for :func:`linear_small`: the heads of queries, then of keys, then of values. In tiles ``D`` and the half of the
            rotated dimensions are multiples of 8.
        bias: likewise.
        cos: as for :func:`rope_append`.
        sin: likewise.
        k_cache: ``[B, Hkv, S, D]``, as for :func:`kv_append`, the dtype of ``x`` or float8_e4m3fn.
        v_cache: likewise.
        lengths: likewise.
        query_lens: ``[B]``, likewise, ``0 <= query_lens <= Q`` and ``lengths + query_lens <= S``: columns from ``query_lens[r]`` on are padding, which writes nothing to
            storage and has queries of any values. If all are 0, nothing is computed. None: all columns are new.
        norm: as for :func:`linear_small`.
        eps: likewise.
        one_plus_weight: likewise.
        out: ``[B, Hq, Q, D]`` to write to, any strides but in the last dimension; must overlap no other argument.
        check_counts: as for :func:`rope_append`.

    Returns:
        The rotated queries, ``[B, Hq, Q, D]``; without ``out`` a view of ``[B, Q, Hq, D]``, which is contiguous. On a GPU the queries of a row whose length leads
        out of the storage are NaN, and its storage is not written; the same holds for a column whose position is not in the tables.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices, or numbers that were looked at, that do not fit. Nothing has been written then.
        RuntimeError: autograd would record: there is no backward pass.

    Example::

        >>> k_cache, v_cache = torch.zeros(2, 1, 1, 3, 2)
        >>> cos, sin = torch.zeros(3, 2), torch.ones(3, 2)  # a quarter of a turn
        >>> weight = torch.eye(2).repeat(3, 1)
        >>> qkv_append(torch.tensor([[[1.0, 2.0]]]), weight, None, cos, sin, k_cache, v_cache, torch.tensor([1]))
        tensor([[[[-2.,  1.]]]])
        >>> k_cache[0, 0].tolist(), v_cache[0, 0].tolist()
        ([[0.0, 0.0], [-2.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    """
    refuse_gradients("qkv_append", x, weight, bias, norm, cos, sin, k_cache, v_cache, out)
    sizes = check("qkv_append", k_cache, v_cache, lengths, query_lens)
    batch, heads, capacity, dim = (sizes[letter] for letter in "BHSD")
    check_rows(x, "x")
    if x.dim() != 3 or len(x) != batch:
        raise ValueError(f"x must be [{batch}, Q, K] for {batch} rows of storage, got shape {tuple(x.shape)}")
    check_tensor(k_cache, "k_cache", (x.dtype, KEPT), tuple(k_cache.shape), x.device, "x")
    width, rows = x.shape[1], as_rows(x)
    _check_product(rows, weight, bias, norm, eps, one_plus_weight)
    check_tables(cos, sin, dim, x)
    heads_q, part = divmod(len(weight) - 2 * heads * dim, dim)
    if part or heads_q <= 0:
        raise ValueError(
            f"weight must have rows for {heads} heads of keys, as many of values, and some of queries, each of {dim}, got shape {tuple(weight.shape)}"
        )
    if not can_append(weight, dim, cos.shape[1]):
        raise ValueError(
            f"weight in tiles of {BAND} rows needs heads and halves of rotations in multiples of {BAND} rows, got {dim} and {cos.shape[1] / 2:g}"
        )
    arguments.check_flag("check_counts", check_counts)
    if out is None:
        out = x.new_empty((batch, width, heads_q, dim)).transpose(1, 2)
    else:
        check_tensor(out, "out", (x.dtype,), (batch, heads_q, width, dim), x.device, "x")
        check_last(out, "out")
        check_distinct(out, "out")
    kernels = dispatch.kernels(x)
    if check_counts or kernels is None:
        check_fits(lengths, query_lens, width, capacity, "query_lens")
        in_tables(lengths, query_lens, None, width, cos.shape[0])
    given = (
        _taken(weight, kernels, x),
        bias,
        norm,
        float(eps),
        one_plus_weight,
        cos,
        sin,
        k_cache,
        v_cache,
        lengths,
        query_lens,
    )
    if kernels is None:
        reference.qkv_append(x, *given, out)
    elif out.numel():
        kernels.qkv_append(rows, *given, out)
    return out


def experts_small(
    x: Tensor,
    weight: Tensor | TiledMatrix,
    chosen: Tensor,
    bias: Tensor | None = None,
    *,
    experts: int,
    shares: Tensor | None = None,
) -> Tensor:
    """Products of at most 16 rows with the matrices of the experts that each row has chosen. A row's bits depend on that row alone.

    Args:
        x: ``[M, K]`` with ``M <= 16``, as for :func:`linear_small`: all experts of a row multiply it. Or ``[M, E, K]``, contiguous: one row for each of them.
        weight: ``[experts * N, K]``, as for :func:`linear_small`, expert after expert; in tiles with ``N`` a multiple of 8.
        chosen: int32 or int64 ``[M, E]``, contiguous, on the device of ``x``: numbers of experts, in a row all different. Not checked on a GPU, where the results of an
            expert that is not there have any values.
        bias: ``[experts * N]``, contiguous, the dtype of ``x``. None: nothing is added.
        experts: how many there are.
        shares: ``[M, E]``, contiguous, the dtype of ``x`` or float32: what the results of a row are multiplied by before they are added, in the order of its choices. On a
            GPU an expert that is not there makes the sum NaN. None: they are not added.

    Returns:
        ``[M, E, N]``: each product in float32, with its bias, rounded to the dtype. With shares their sums ``[M, N]``, in float32, rounded once.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride or device that does not fit, or on a CPU an expert that is not there.
        RuntimeError: autograd would record: there is no backward pass.

    Example::

        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [10.0, 10.0]])
        >>> experts_small(x, weight, torch.tensor([[2, 1]]), experts=3, shares=torch.tensor([[0.5, 0.25]]))
        tensor([[15.5000]])
    """
    refuse_gradients("experts_small", x, weight, bias, shares)
    check_rows(x, "x")
    if x.dim() not in (2, 3) or len(x) > MAX_ROWS:
        raise ValueError(f"x must have at most {MAX_ROWS} rows [M, K] or [M, E, K], got shape {tuple(x.shape)}")
    _check_product(x.reshape(-1, x.shape[-1])[:MAX_ROWS], weight, bias, None, 0.0, False)
    each = chosen.shape[1] if isinstance(chosen, Tensor) and chosen.dim() == 2 else 0
    wanted = len(x), x.shape[1] if x.dim() == 3 else each
    check_tensor(chosen, "chosen", INTEGERS, wanted, x.device, "x")
    check_contiguous(chosen, "chosen")
    if x.dim() == 3:
        check_contiguous(x, "x")
    if not isinstance(experts, int) or experts < 1 or len(weight) % experts:
        raise ValueError(f"experts must be a number that divides the {len(weight)} rows of weight, is {experts!r}")
    rows = len(weight) // experts
    if isinstance(weight, TiledMatrix) and rows % BAND:
        raise ValueError(f"in tiles each expert must have a multiple of {BAND} rows, has {rows}")
    if shares is not None:
        check_tensor(shares, "shares", (x.dtype, torch.float32), wanted, x.device, "x")
        check_contiguous(shares, "shares")
    kernels = dispatch.kernels(x)
    if chosen.is_cpu and chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < experts:
        raise ValueError(f"chosen must be 0 .. {experts - 1}")
    found = x.new_empty((*wanted, rows))
    if kernels is None:
        reference.experts_small(x, _taken(weight, kernels, x), chosen, bias, found)
        return found if shares is None else reference.mix_experts(found, shares)
    if found.numel():
        kernels.experts_small(x, weight, chosen, bias, experts, found)
    if shares is None:
        return found
    mixed = x.new_zeros((len(x), rows)) if not wanted[1] else x.new_empty((len(x), rows))
    if found.numel():
        kernels.mix_experts(found, shares, chosen, experts, mixed)
    return mixed


def can_halve(weight: Tensor | TiledMatrix) -> bool:
    """Whether :func:`linear_small` takes weights together with an activation: each half of the rows is whole, and in tiles they come 8 by 8."""
    return len(weight) % (2 * BAND if isinstance(weight, TiledMatrix) else 2) == 0


def can_append(weight: Tensor | TiledMatrix, dim: int, rotary: int) -> bool:
    """Whether :func:`qkv_append` takes weights for heads of these dimensions: a rotation has two rows of weights, and in tiles they come 8 by 8."""
    return not isinstance(weight, TiledMatrix) or (dim % BAND == 0 and rotary % (2 * BAND) == 0)


def decode_rows(
    matrix: TiledMatrix, index: Tensor | None = None, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """The weights of a quantised matrix, or of some of its rows: embeddings of tokens, or all rows for a product of more rows than :func:`linear_small` takes.

    Args:
        matrix: ``[N, K]``.
        index: int32 or int64 ``[n]``, on the device of the matrix: its rows. Not checked on a GPU, where a row that is not there is NaN. None: all.
        dtype: of the result: float32, bfloat16, float16 or float64. None: float32, or that of ``out``.
        out: ``[n, K]`` or ``[N, K]``, rows contiguous, to write to; must overlap no other argument.

    Returns:
        ``[n, K]`` or ``[N, K]``: the weights of :func:`pipespec_kernels.formats.dequantize`, rounded to the dtype.

    Raises:
        TypeError: not a matrix in tiles, or a dtype that is not supported.
        ValueError: a shape or device that does not fit, or an index beyond the rows. Nothing has been written then.
    """
    if not isinstance(matrix, TiledMatrix):
        raise TypeError(f"matrix must be a TiledMatrix, got {type(matrix).__name__}")
    rows, columns = matrix.shape
    if index is not None:
        if not isinstance(index, Tensor) or index.dim() != 1:
            raise TypeError("index must be a tensor of one dimension, or None")
        check_tensor(index, "index", INTEGERS, tuple(index.shape), matrix.data.device, "matrix")
        rows = len(index)
    if out is None:
        out = torch.empty((rows, columns), dtype=dtype or torch.float32, device=matrix.data.device)
    elif dtype not in (None, out.dtype):
        raise ValueError(f"dtype={dtype} and out of {out.dtype} do not go together")
    check_rows(out, "out")
    check_tensor(out, "out", (out.dtype,), (rows, columns), matrix.data.device, "matrix")
    kernels = dispatch.kernels(out)
    if kernels is not None:
        if out.numel():
            kernels.decode_rows(matrix, index, out)
        return out
    if index is not None and out.is_cpu and rows and not 0 <= int(index.min()) <= int(index.max()) < matrix.shape[0]:
        raise ValueError(f"index must be 0 .. {matrix.shape[0] - 1}")
    return out.copy_(matrix.decoded() if index is None else matrix.rows(index.long()))


def _taken(weight: Tensor | TiledMatrix, kernels: Any, x: Tensor) -> Any:
    """The weights as an implementation takes them: the reference has no tiles."""
    return decode_rows(weight, dtype=x.dtype) if kernels is None and isinstance(weight, TiledMatrix) else weight


def _check_counts(query_lens: Any, rows: int, x: Tensor) -> None:
    check_tensor(query_lens, "query_lens", INTEGERS, (rows,), x.device, "x")
    check_contiguous(query_lens, "query_lens")
    if rows > MAX_ROWS:
        raise ValueError(f"query_lens must have at most {MAX_ROWS} rows, has {rows}")


def _check_product(x: Any, weight: Any, bias: Any, norm: Any, eps: float, one_plus_weight: bool) -> None:
    check_rows(x, "x")
    if x.dim() != 2 or len(x) > MAX_ROWS:
        raise ValueError(f"x must have at most {MAX_ROWS} rows [M, K], got shape {tuple(x.shape)}")
    if isinstance(weight, TiledMatrix):
        if weight.shape[1] != x.shape[1] or not len(weight):
            raise ValueError(f"weight must be [N, {x.shape[1]}] with N > 0, got shape {weight.shape}")
        check_tensor(weight.data, "weight", (torch.uint8,), tuple(weight.data.shape), x.device, "x")
    else:
        _check_weight(x, weight)
    for name, tensor, size in (("bias", bias, len(weight)), ("norm", norm, x.shape[1])):
        if tensor is not None:
            check_tensor(tensor, name, (x.dtype,), (size,), x.device, "x")
            check_last(tensor, name)
    check_eps(eps)
    arguments.check_flag("one_plus_weight", one_plus_weight)


def _check_weight(x: Tensor, weight: Any) -> None:
    check_rows(weight, "weight")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not len(weight):
        raise ValueError(f"weight must be [N, {x.shape[1]}] with N > 0, got shape {tuple(weight.shape)}")
    check_tensor(weight, "weight", (x.dtype,), tuple(weight.shape), x.device, "x")
