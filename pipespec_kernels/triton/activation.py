"""``silu_mul``: the activation of the gate times the other half of the same row, in one launch. Element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import begin_dependent, dependent, on
from pipespec_kernels.triton.norm import rounded

BLOCK = 1024
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        if KIND == 1:
            # (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
            z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        else:
            z = x
        return tl.div_rn(x, 1.0 + tl.exp(-z))


@triton.jit
def silu_mul_kernel(
    gate_up,
    gate_up_stride,
    output,
    output_stride,
    KIND: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < INTERMEDIATE
    dtype: tl.constexpr = output.dtype.element_ty
    source = gate_up + row * gate_up_stride + at
    gate = tl.load(source, mask=there, other=0.0).to(tl.float32)
    up = tl.load(source + INTERMEDIATE, mask=there, other=0.0).to(tl.float32)
    y = rounded(rounded(activated(gate, KIND), dtype) * up, dtype)
    tl.store(output + row * output_stride + at, y.to(dtype), mask=there)


def silu_mul(gate_up: Tensor, activation: str, out: Tensor) -> None:
    """See :func:`pipespec_kernels.ops.silu_mul`, which checks the arguments. Both tensors are ``[rows, ...]``."""
    launch.check_device(gate_up.device, "gate_up")
    rows, intermediate = out.shape
    if rows == 0:
        return
    block = min(triton.next_power_of_2(intermediate), BLOCK)
    with on(gate_up.device):
        silu_mul_kernel[(rows, triton.cdiv(intermediate, block))](
            gate_up,
            gate_up.stride(0),
            out,
            out.stride(0),
            KIND=ACTIVATIONS.index(activation),
            INTERMEDIATE=intermediate,
            BLOCK=block,
            **dependent(gate_up.device),
            enable_fp_fusion=False,
        )
