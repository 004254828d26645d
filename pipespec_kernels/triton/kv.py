"""Storage of keys and values ``[B, Hkv, S, D]`` with a length per row on the device: append.

The launch reads its lengths and counts on the device, so a graph can capture it. The kernel does not change a row whose numbers point outside the
tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.attention import extent
from pipespec_kernels.triton.kept import as_kept, in_bytes
from pipespec_kernels.triton.launch import begin_dependent, dependent, on

_TILE = 8192  # elements


@triton.jit(do_not_specialize=["width", "capacity"])
def append_kernel(
    new_keys,
    new_keys_stride_b,
    new_keys_stride_h,
    new_keys_stride_q,
    new_values,
    new_values_stride_b,
    new_values_stride_h,
    new_values_stride_q,
    keys,
    keys_stride_b,
    keys_stride_h,
    keys_stride_s,
    values,
    values_stride_b,
    values_stride_h,
    values_stride_s,
    lengths,
    n_new,
    width,
    capacity,
    HAS_NEW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    column = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    length, count, _ = extent(lengths, n_new, row, width, capacity, HAS_NEW)
    mask = (column < count)[:, None] & (d < DIM)[None, :]
    source = column.to(tl.int64)[:, None]
    place = length + source
    k = tl.load(
        new_keys + row * new_keys_stride_b + head * new_keys_stride_h + source * new_keys_stride_q + d[None, :],
        mask=mask,
    )
    tl.store(
        keys + row * keys_stride_b + head * keys_stride_h + place * keys_stride_s + d[None, :],
        as_kept(k, keys.dtype.element_ty),
        mask=mask,
    )
    v = tl.load(
        new_values + row * new_values_stride_b + head * new_values_stride_h + source * new_values_stride_q + d[None, :],
        mask=mask,
    )
    tl.store(
        values + row * values_stride_b + head * values_stride_h + place * values_stride_s + d[None, :],
        as_kept(v, values.dtype.element_ty),
        mask=mask,
    )


def kv_append(
    keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, n_new: Tensor | None = None
) -> None:
    """See :func:`pipespec_kernels.ops.kv_append`, which checks the arguments."""
    launch.check_device(k_cache.device, "k_cache")
    batch, heads, width, dim = keys.shape
    if keys.numel() == 0:
        return
    block_d = max(16, triton.next_power_of_2(dim))
    block_q = max(1, min(triton.next_power_of_2(width), _TILE // 2 // block_d))
    with on(k_cache.device):
        append_kernel[(triton.cdiv(width, block_q), heads, batch)](
            keys,
            *keys.stride()[:3],
            values,
            *values.stride()[:3],
            in_bytes(k_cache),
            *k_cache.stride()[:3],
            in_bytes(v_cache),
            *v_cache.stride()[:3],
            lengths,
            lengths if n_new is None else n_new,
            width,
            k_cache.shape[2],
            HAS_NEW=n_new is not None,
            DIM=dim,
            BLOCK_Q=block_q,
            BLOCK_D=block_d,
            **dependent(k_cache.device),
        )
