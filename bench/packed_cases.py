"""Kernel cases of products with quantised matrices: ``Q`` columns of ``in`` inputs, times a matrix of a layer of Qwen2.5-1.5B (8960 outputs), on the CPU.

Bytes: the blocks as a file has them. The rival is torch's product with the same matrix in bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.kernel_timing import Benchmark, Call, KernelCase, Shape, normal
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, quantize
from pipespec_kernels.packed import PackedMatrix, matmul_reference

OUTPUTS, INPUTS = 8960, 1536
COLUMNS = (1, 2, 4, 8, 16, 64)
RIVALS = 8  # copies of the matrix in bfloat16: more than the caches hold


def shapes(device: str, quick: bool) -> list[Shape]:
    if device != "cpu":
        return []
    return [(columns, INPUTS, OUTPUTS) for columns in (COLUMNS[::3] if quick else COLUMNS)]


def dtypes(device: str, quick: bool) -> list[torch.dtype]:
    return [torch.float32]


def product(name: str) -> Benchmark:
    form = FORMATS[name]

    def bytes_moved(shape: Shape, dtype: torch.dtype) -> int:
        return shape[2] * form.row_bytes(shape[1])

    def make(device: str, quick: bool, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
        columns, inputs, outputs = shape
        x = normal((columns, inputs), dtype, "cpu")
        few = quantize(normal((64, inputs), torch.float32, "cpu") * 0.05, name)
        assert torch.equal(PackedMatrix(few).matmul(x), matmul_reference(x, few))
        matrix = QuantizedMatrix(form, few.data.repeat(outputs // 64, 1), (outputs, inputs))
        packed = [PackedMatrix(matrix) for _ in range(copies)]
        low, bfloat16 = x.bfloat16(), [normal((outputs, inputs), torch.bfloat16, "cpu") for _ in range(RIVALS)]
        others: dict[str, Call] = {"bfloat16": lambda i: F.linear(low, bfloat16[i % RIVALS])}
        return KernelCase(bytes_moved(shape, dtype), lambda i: packed[i].matmul(x), others)

    return Benchmark(f"product_{name}", make, ("Q", "in", "out"), shapes, dtypes, bytes_moved)


BENCHMARKS = [product(name) for name in FORMATS]
