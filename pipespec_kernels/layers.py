"""The operations of a decoder layer between its matrix products and its attention, each in one launch on a GPU.

The numbers are rounded where HuggingFace's modules round them, so a layer made of these operations gives the modules' results, apart from the order
of sums and, on a GPU, from the last bit of an exponential. Arithmetic is float32 (float64 for float64). A row's result depends only on the row, and
not on the batch or on other columns (on a GPU also on whether the tensors are aligned to 16 bytes).

Tensors on a GPU go to the Triton kernels. The rest goes to torch: the CPU, where models run whole in :mod:`pipespec_kernels.decoder`, float64, and heads of
more than 256 dimensions in :func:`rope_append`. (In torch the last bits of a tensor of 32768 elements or more may depend on the batch and the threads.)
``PIPESPEC_OPS`` works as for :mod:`pipespec_kernels.ops`, which exports these functions, too. None has a backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import arguments, dispatch, reference
from pipespec_kernels.kv import check_fits, kernels_for, refuse_gradients
from pipespec_kernels.specs import FLOATS, check, check_distinct, check_last, check_out, check_tensor

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")

# --- add_rms_norm ----------------------------------------------------------------------------------------------------


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    one_plus_weight: bool = False,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum: ``total = x + residual`` and ``total / rms(total) * weight``.

    ``rms(t) = sqrt(mean(t ** 2) + eps)`` over the last dimension (Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019). The sum
    is rounded to the dtype of ``x`` and then normalised in float32. As in transformers' ``LlamaRMSNorm``, the normalised numbers are
    rounded before the product with the weight; with ``one_plus_weight``, as in its ``Gemma2RMSNorm``, the product with ``1 + weight`` is in
    float32 and rounded once.

    Args:
        x: ``[..., H]``, float32, bfloat16, float16 or float64; a view of rows ``[N, H]`` with one distance between rows, each of them contiguous.
        residual: like ``x``. None: nothing is added.
        weight: ``[H]``, contiguous, the dtype of ``x``.
        eps: finite, not negative.
        one_plus_weight: multiply by ``1 + weight``.
        bias: like ``weight``; added to the rounded product. None: nothing is added.
        out: like ``x``, to write the normalised rows to.
        residual_out: like ``x``, to write the sum to; only with ``residual``. ``out`` and ``residual_out`` may be ``x`` and ``residual``
            themselves in either order. Otherwise they must overlap no other argument.

    Returns:
        ``(normed, total)``, like ``x`` and contiguous. Without a residual ``total`` is ``x`` itself.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device or number that does not fit. Nothing has been written then.
        RuntimeError: autograd would record: there is no backward pass.

    Example::

        >>> add_rms_norm(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, -1.0]]), torch.tensor([1.0, 10.0]), 0.0)
        (tensor([[ 0.8485, 11.3137]]), tensor([[3., 4.]]))
    """
    refuse_gradients("add_rms_norm", x, residual, weight, bias, out, residual_out)
    arguments.check_flag("one_plus_weight", one_plus_weight)
    _check_norm(x, residual, weight, eps, one_plus_weight, bias)
    _check_outs(x, residual, out, residual_out)
    kernels = dispatch.kernels(x)
    if kernels is None:
        normed, total = reference.add_rms_norm(x, residual, weight, eps, one_plus_weight, bias)
        if residual is not None and residual_out is not None:
            total = residual_out.copy_(total)
        return normed if out is None else out.copy_(normed), total
    normed = x.new_empty(x.shape) if out is None else out
    total = x
    if residual is not None:
        total = x.new_empty(x.shape) if residual_out is None else residual_out
    rows = [as_rows(t) for t in (x, x if residual is None else residual, normed, total)]
    before, after = (None, None) if residual is None else (rows[1], rows[3])
    kernels.add_rms_norm(rows[0], before, weight, float(eps), one_plus_weight, bias, rows[2], after)
    return normed, total


def _check_norm(
    x: Tensor, residual: Any, weight: Any, eps: float, one_plus_weight: bool = False, bias: Any = None
) -> None:
    check_rows(x, "x")
    if residual is not None:
        check_like(residual, "residual", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None or name == "weight":
            check_tensor(tensor, name, (x.dtype,), x.shape[-1:], x.device, "x")
            check_last(tensor, name)
    check_eps(eps)


def _check_outs(x: Tensor, residual: Tensor | None, out: Tensor | None, residual_out: Tensor | None) -> None:
    if residual_out is not None and (residual is None or residual_out is out):
        raise ValueError("residual_out is for a sum with a residual, and not the same tensor as out")
    for name, tensor in (("out", out), ("residual_out", residual_out)):
        if tensor is not None:
            check_like(tensor, name, x)
            check_distinct(tensor, name)


# --- silu_mul --------------------------------------------------------------------------------------------------------


def silu_mul(gate_up: Tensor, *, activation: str = "silu", out: Tensor | None = None) -> Tensor:
    """``activation(gate) * up`` of rows that hold the gate and, after it, the other half (Shazeer, "GLU Variants Improve Transformer", 2020).

    The activation is computed in float32 and rounded to the dtype of ``gate_up``, as is its product with ``up``: the result of transformers'
    ``act_fn(gate_proj(x)) * up_proj(x)``, for one product with both matrices.

    Args:
        gate_up: ``[..., 2 * I]``, as ``x`` of :func:`add_rms_norm`.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"`` (with the error function); in transformers' configurations ``silu``,
            ``gelu_pytorch_tanh`` and ``gelu``.
        out: ``[..., I]``, strides as for ``gate_up``, to write to; must not overlap it.

    Returns:
        ``[..., I]``, contiguous, in the dtype of ``gate_up``. On a GPU the exponential is the hardware's: its relative error grows with
        the argument, to a few millionths where the gate is -80.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: a shape, stride, device or name that does not fit. Nothing has been written then.
        RuntimeError: autograd would record: there is no backward pass.

    Example::

        >>> silu_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        tensor([[0.0000, 1.4621]])
    """
    refuse_gradients("silu_mul", gate_up, out)
    check_rows(gate_up, "gate_up")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even number of elements per row, got shape {tuple(gate_up.shape)}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, is {activation!r}")
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    if out is not None:
        check_like(out, "out", gate_up, shape, "gate_up")
        check_distinct(out, "out")
    kernels = dispatch.kernels(gate_up)
    if kernels is None:
        result = reference.silu_mul(gate_up, activation)
        return result if out is None else out.copy_(result)
    if out is None:
        out = gate_up.new_empty(shape)
    kernels.silu_mul(as_rows(gate_up), activation, as_rows(out))
    return out


# --- rope_append -----------------------------------------------------------------------------------------------------


def rope_append(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    n_new: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    one_plus_weight: bool = False,
    out: Tensor | None = None,
    check_counts: bool = False,
) -> Tensor:
    """Rotate new queries and keys to their positions (RoPE), and write keys and values after the ``lengths[r]`` tokens of each row.

    With ``p = positions[r, j]``, ``R = cos.shape[1]`` and ``turned(x) = x * cos[p] + rotate_half(x) * sin[p]`` on the first ``R`` dimensions,
    where ``rotate_half(x) = [-x[R / 2 :], x[: R / 2]]`` (Su et al., "RoFormer", 2021; transformers' ``apply_rotary_pos_emb``):
    ``out[r, :, j] = turned(q[r, :, j])``, ``k_cache[r, :, lengths[r] + j] = turned(keys[r, :, j])`` and
    ``v_cache[r, :, lengths[r] + j] = values[r, :, j]`` for ``j < n_new[r]``. The dimensions from ``R`` on stay as they are. Columns from
    ``n_new[r]`` on are padding: they write nothing to storage, and their queries are zeros. The lengths do not change: layers share them.

    Products are rounded in the dtype that torch promotes to: with tables in the dtype of ``q`` after each operation, which are transformers'
    bits, with float32 tables once.

    Args:
        q: ``[B, Hq, Q, D]``, the dtype of the storage. Any strides but in the last dimension, which must be contiguous: a view of
            one product for queries, keys and values works.
        keys: ``[B, Hkv, Q, D]``, likewise.
        values: like ``keys``.
        cos: ``[P, R]``, the cosines of position ``p`` in row ``p``, in the order of transformers' rotary embeddings and with their scaling; the
            dtype of ``q`` or float32, contiguous in the last dimension. ``R`` is even, ``2 <= R <= D``. If angles belong to tokens and not to
            positions, make a table of them and give its rows in ``positions``.
        sin: like ``cos``.
        k_cache: as for :func:`kv_append`.
        v_cache: likewise.
        lengths: likewise.
        n_new: likewise.
        positions: ``[B, Q]``, int32 or int64, any strides, on the device of the storage; below ``P`` where they are no padding. None:
            ``lengths[r] + j``.
        q_norm: ``[D]``, contiguous, the dtype of ``q``: weights of an RMS norm of each head of the queries before the rotation, as in Qwen3,
            rounded as in :func:`add_rms_norm`. Together with ``k_norm``.
        k_norm: likewise, of the keys.
        eps: of these norms.
        one_plus_weight: likewise.
        out: ``[B, Hq, Q, D]`` to write to, strides as for ``q``; must overlap no other argument.
        check_counts: check the values of lengths, counts and positions first, which waits for the device. On the CPU always done.

    Returns:
        The rotated queries, ``[B, Hq, Q, D]`` in the dtype of ``q``; without ``out`` a view of ``[B, Q, Hq, D]``, which is contiguous. On a GPU
        the queries of a row whose lengths or counts lead out of the storage are NaN, and its storage is not written; the same holds for
        a column whose position is not in the tables.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported.
        ValueError: shapes, strides, devices, or numbers that were looked at, that do not fit. Nothing has been written then.
        RuntimeError: autograd would record: there is no backward pass.

    Example::

        >>> k_cache, v_cache = torch.zeros(2, 1, 1, 3, 2)
        >>> x, cos, sin = torch.tensor([[[[1.0, 2.0]]]]), torch.zeros(3, 2), torch.ones(3, 2)  # a quarter of a turn
        >>> rope_append(x, x, x, cos, sin, k_cache, v_cache, torch.tensor([1]))
        tensor([[[[-2.,  1.]]]])
        >>> k_cache[0, 0].tolist(), v_cache[0, 0].tolist()
        ([[0.0, 0.0], [-2.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    """
    refuse_gradients("rope_append", q, keys, values, cos, sin, k_cache, v_cache, q_norm, k_norm, out)
    given = q, keys, values, cos, sin, k_cache, v_cache, lengths, n_new
    _check_rope(*given, positions, q_norm, k_norm, eps)
    arguments.check_flag("check_counts", check_counts)
    if out is not None:
        check_out(out, q)
    kernels = kernels_for(k_cache)
    if check_counts or kernels is None:
        check_fits(lengths, n_new, keys.shape[2], k_cache.shape[2], "n_new")
        in_tables(lengths, n_new, positions, keys.shape[2], cos.shape[0])
    options: dict[str, Any] = {"positions": positions, "q_norm": q_norm, "k_norm": k_norm}
    options |= {"eps": float(eps), "one_plus_weight": one_plus_weight}
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)
    if kernels is None:
        return out.copy_(reference.rope_append(*given, **options))
    kernels.rope_append(*given, **options, out=out)
    return out


def _check_rope(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    n_new: Tensor | None,
    positions: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    given = keys, values, lengths, n_new, q, positions, q_norm, k_norm
    dim = check("rope_append", k_cache, v_cache, *given)["D"]
    check_tables(cos, sin, dim, q)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together")
    check_eps(eps)


def in_tables(lengths: Tensor, n_new: Tensor | None, positions: Tensor | None, width: int, size: int) -> None:
    """Raise ``ValueError`` for a position that is not in the tables. Waits for the device."""
    counts = [width] * len(lengths) if n_new is None else n_new.tolist()
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts, strict=True)):
        if positions is None:
            found = [length, length + count - 1] if count else []
        else:
            found = positions[row, :count].tolist()
        for position in found:
            if not 0 <= position < size:
                raise ValueError(f"row {row}: position {position} is not in cos and sin, which have {size}")


# --- checks ----------------------------------------------------------------------------------------------------------


def check_rows(x: Any, name: str) -> None:
    """Rows of at least one element with one distance between them."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    check_tensor(x, name, FLOATS, tuple(x.shape), x.device)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} must have rows of at least one element, got shape {tuple(x.shape)}")
    _check_row_stride(x, name)


def _check_row_stride(x: Tensor, name: str) -> None:
    """Raise ``ValueError`` unless a view ``[N, H]`` of these rows exists."""
    if x.is_contiguous() or x.numel() == 0:
        return
    check_last(x, name)
    following = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if following is not None and stride != following:
            raise ValueError(f"{name} must have one distance between its rows, got strides {x.stride()}")
        following = stride * size


def as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.view(math.prod(x.shape[:-1]), x.shape[-1])


def check_tables(cos: Any, sin: Any, dim: int, x: Tensor) -> None:
    """Cosines and sines for heads of ``dim`` dimensions, like ``x``."""
    dtypes = (x.dtype,) if x.dtype in (torch.float32, torch.float64) else (x.dtype, torch.float32)
    size, rotary = cos.shape if isinstance(cos, Tensor) and cos.dim() == 2 else (0, 0)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(table, name, dtypes, (size, rotary), x.device, "x")
        check_last(table, name)
    if cos.dtype is not sin.dtype:
        raise TypeError(f"cos and sin must have one dtype, got {cos.dtype} and {sin.dtype}")
    if size == 0 or rotary % 2 or not 2 <= rotary <= dim:
        raise ValueError(
            f"cos and sin must be [P, R] with P > 0 and an even R of at most {dim}, got shape {tuple(cos.shape)}"
        )


def check_like(tensor: Any, name: str, x: Tensor, shape: tuple[int, ...] | None = None, like: str = "x") -> None:
    check_tensor(tensor, name, (x.dtype,), tuple(x.shape) if shape is None else shape, x.device, like)
    _check_row_stride(tensor, name)


def check_eps(eps: float) -> None:
    arguments.check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, is {eps!r}")
