"""Matrices in tiles have the weights of their blocks, to the bit: whatever their shape, and with scales at the ends of what float16 holds."""

import pytest
import torch

from pipespec_kernels import block_layouts, ops
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, dequantize, quantize
from pipespec_kernels.tiles import LAYOUTS, WIDTH, TiledMatrix, float8_in_tiles, in_tiles

TABLES = {"table_iq3_s": block_layouts.IQ3_S, "table_iq3_xxs": block_layouts.IQ3_XXS, "table_iq2": block_layouts.IQ2}


def matrix_of(name: str, rows: int, columns: int) -> QuantizedMatrix:
    """A random matrix in a format."""
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(rows + columns)
    if form.encode is not None:
        return quantize(torch.randn((rows, columns), generator=generator), name)
    if name == "nvfp4":
        scales = torch.randn((rows * columns // 32, 2), generator=generator).view(torch.uint8)
        codes = torch.randint(0, 256, (len(scales), 16), generator=generator, dtype=torch.uint8)
        return QuantizedMatrix(form, torch.cat((scales, codes), 1).view(rows, -1), (rows, columns))
    table, n = TABLES[name], rows * columns // 256
    codes = torch.tensor(table, dtype=torch.int16)[torch.randint(0, 16, (n, 256), generator=generator)]
    scales = torch.randint(-128, 128, (n, 16), generator=generator).to(torch.int8)
    head = block_layouts.half_bytes(1e-3 * torch.randn((n, 1), generator=generator))
    return QuantizedMatrix(form, block_layouts.write_table(codes, table, scales, head).view(rows, -1), (rows, columns))


def with_heads(matrix: QuantizedMatrix, head: float) -> QuantizedMatrix:
    """The matrix with all its float16 numbers replaced."""
    data = matrix.data.clone().view(-1, matrix.format.block_bytes)
    for at in matrix.format.halves:
        data[:, at : at + 2] = block_layouts.half_bytes(torch.tensor([[head]]))
    return QuantizedMatrix(matrix.format, data.view(matrix.data.shape), matrix.shape)


def test_all_formats_have_tiles() -> None:
    assert FORMATS.keys() | {"e4m3", "e4m3_16"} == LAYOUTS.keys()


def float8_of(rows: int, columns: int, group: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Floats of 8 bits, all finite ones among them, with scales of groups of columns, from subnormal to large; and the products of both."""
    codes = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns) % 256
    codes = torch.where(codes & 127 == 127, 1, codes).to(torch.uint8)
    generator = torch.Generator().manual_seed(rows)
    scale = torch.randn((rows, -(-columns // group)), generator=generator) * 1e-3
    scale[0] = 1e-40
    scale[-1] = -1e30
    weight = codes.view(torch.float8_e4m3fn)
    return weight, scale, weight.float() * scale.repeat_interleave(group, 1)[:, :columns]


@pytest.mark.parametrize("group", [WIDTH, 16])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (21, 300), (1, 20)])
def test_floats_of_8_bits(rows: int, columns: int, group: int) -> None:
    weight, scale, wanted = float8_of(rows, columns, group)
    tiled = float8_in_tiles(weight, scale)
    assert tiled.format == ("e4m3" if group == WIDTH else "e4m3_16")
    assert torch.equal(tiled.decoded(), wanted)
    assert torch.equal(ops.decode_rows(tiled, torch.tensor([rows - 1, 0])), wanted[[rows - 1, 0]])


def test_floats_of_8_bits_that_do_not_fit_are_named() -> None:
    weight, scale, _ = float8_of(8, 256)
    with pytest.raises(
        ValueError, match=r"float32 scales \[8, 2\] or \[8, 16\], got torch.float8_e4m3fn and torch.float32 \[8, 1\]"
    ):
        float8_in_tiles(weight, scale[:, :1])
    with pytest.raises(ValueError, match="weights that are not finite"):
        float8_in_tiles(torch.full((8, 256), float("nan")).to(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_blocks(name: str) -> None:
    for rows, blocks in ((16, 2), (21, 3), (1, 1)):
        matrix = matrix_of(name, rows, blocks * FORMATS[name].block)
        for each in (matrix, *(with_heads(matrix, head) for head in (65504.0, -6e-8, 0.0))):
            wanted, tiled = dequantize(each), in_tiles(each)
            assert torch.equal(tiled.decoded(), wanted)
            index = torch.tensor([rows - 1, 0, rows // 2])
            assert torch.equal(ops.decode_rows(tiled, index), wanted[index])
    # A band and a tile that are not full cost what full ones do; what a format takes beyond its blocks is little.
    layout = LAYOUTS[name]
    assert FORMATS[name].bytes_per_weight <= layout.nbytes / 1024 <= 1.1 * FORMATS[name].bytes_per_weight


def test_large_matrices_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrix_of("q5_k", 67, 512)
    whole = in_tiles(matrix)
    monkeypatch.setattr("pipespec_kernels.tiles._CHUNK", 1)
    assert torch.equal(in_tiles(matrix).data, whole.data)


def test_matrices_of_one_format_are_merged_row_below_row() -> None:
    parts = [in_tiles(matrix_of("q4_k", rows, 256)) for rows in (16, 24, 5)]
    whole = TiledMatrix("q4_k", torch.cat([part.data for part in parts]), (45, 256))
    assert torch.equal(whole.decoded(), torch.cat([part.decoded() for part in parts]))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"format": "int8"}, ValueError, "'int8' has no tiles; the formats that have some are q8_0"),
        ({"data": torch.zeros((2, 608))}, TypeError, "data must be uint8, got torch.float32"),
        ({"shape": (17, 128)}, ValueError, r"data of a q4_k matrix \[17, 128\] must be \[3, 608\]"),
        ({"shape": (16, 129)}, ValueError, r"must be \[2, 1216\] with contiguous rows, got \[2, 608\]"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, error: type[Exception], words: str) -> None:
    given = {"format": "q4_k", "data": torch.zeros((2, 608), dtype=torch.uint8), "shape": (16, 128)} | change
    with pytest.raises(error, match=words):
        TiledMatrix(**given)
