"""Blocks of any bytes in the weight formats."""

import torch

from pipespec_kernels.formats import FORMATS, QuantizedMatrix, quantize


def random_blocks(name: str, rows: int, blocks: int, seed: int = 1) -> QuantizedMatrix:
    """A matrix of any bytes, with scales that are finite: every code, sub-scale and sign occurs."""
    form, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows * blocks, form.block_bytes), dtype=torch.uint8, generator=generator)
    for at in form.halves:
        data[:, at + 1] &= 0b10111111
    if name == "mxfp4":
        data[:, 0] = data[:, 0] % 24 + 110
    if name == "nvfp4":
        data[:, :8] = torch.randn(rows * blocks, 2, generator=generator).view(torch.uint8)
    return QuantizedMatrix(form, data.view(rows, -1), (rows, blocks * form.block))


def matrix_of(weights: torch.Tensor, name: str) -> QuantizedMatrix:
    """Weights in a format; where nothing is quantised to it, random blocks of their shape with small scales."""
    form = FORMATS[name]
    if form.encode is not None:
        return quantize(weights, name)
    rows, columns = weights.shape
    matrix = random_blocks(name, rows, columns // form.block)
    blocks = matrix.data.view(-1, form.block_bytes)
    for at in form.halves:
        blocks[:, at + 1] = (blocks[:, at + 1] & 0x83) | 0x08
    if name == "nvfp4":
        blocks[:, :8] = (blocks[:, :8].contiguous().view(torch.float32) * 0.01).view(torch.uint8)
    return matrix
