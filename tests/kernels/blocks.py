"""Blocks of any bytes in the weight formats."""

import torch

from pipespec_kernels import block_layouts as layouts
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
    """Weights in a format. Where nothing is quantised to it, the nearest values with scales of the largest weight of 16."""
    form, (rows, columns) = FORMATS[name], weights.shape
    if form.encode is not None:
        return quantize(weights, name)
    values, factor = _TABLES[name]
    table, groups = torch.tensor(values), weights.reshape(-1, form.block // 16, 16)
    scale = groups.abs().amax(2) / table.max()
    head = scale.amax(1, keepdim=True) / factor / 31
    if form.block == 256:
        stored = (scale / factor / head).round().to(torch.int8)
        scale = head.half().float() * factor * stored
    numbers = (groups / scale.clamp(min=1e-30)[:, :, None])[..., None].sub(table).abs().argmin(3).to(torch.uint8)
    if form.block == 256:
        blocks = layouts.write_table(table[numbers.int()].view(-1, 256), values, stored, layouts.half_bytes(head))
    else:
        blocks = torch.cat((scale.view(torch.uint8), layouts.pack_nibbles(numbers.view(-1, 32), 16)), 1)
    return QuantizedMatrix(form, blocks.view(rows, -1), (rows, columns))


_TABLES = {
    "nvfp4": (layouts.E2M1, 1.0),
    "table_iq3_s": (layouts.IQ3_S, 1.0),
    "table_iq3_xxs": (layouts.IQ3_XXS, 0.5),
    "table_iq2": (layouts.IQ2, 0.125),
}
