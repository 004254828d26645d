"""Products with weights in tiles: those of the dequantised weights, rounded to the dtype; a row's bits depend on that row alone."""

import pytest
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.formats import FORMATS, dequantize
from pipespec_kernels.tiles import TiledMatrix, float8_in_tiles, in_tiles
from pipespec_kernels.triton import linear

from ..cases import close_product
from ..test_tiles import float8_of, matrix_of, with_heads
from .conftest import some
from .test_linear import HOW

pytestmark = pytest.mark.usefixtures("sums_in_order")


def given_by(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    # Products of weights of about 1, as the tolerance expects.
    shapes = {"x": (16, columns), "bias": (rows,), "norm": (columns,), "residual": (16, rows)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["x"] *= columns**-0.5
    return {name: numbers.to(device, dtype) for name, numbers in found.items()}


def check_products(
    tiled: TiledMatrix, weights: torch.Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Decoded rows, and products of up to 16 rows, of tiles that hold ``weights``."""
    rows, columns = weights.shape
    assert torch.equal(ops.decode_rows(tiled, dtype=torch.bfloat16).cpu(), weights.bfloat16())
    index = torch.tensor([rows - 1, 1], device=device)
    assert torch.equal(ops.decode_rows(tiled, index).cpu(), weights[index.cpu()])
    for dtype in dtypes:
        given = given_by(rows, columns, dtype, device)
        wanted = reference.linear_small(given["x"].cpu(), weights.to(dtype), given["bias"].cpu())
        whole = ops.linear_small(given["x"], tiled, given["bias"])
        close_product(whole.cpu(), wanted, {})
        for n in some((1, 5, 8, 9), rows % 2, 2):
            assert torch.equal(ops.linear_small(given["x"][16 - n :], tiled, given["bias"]), whole[16 - n :])


@pytest.mark.parametrize("group", [128, 16])
def test_products_of_floats_of_8_bits(group: int, device: torch.device) -> None:
    """All codes, with scales that differ by row and by tile, or by 16 columns."""
    for rows, columns in ((20, 300), (32, 512)):
        weight, scale, weights = float8_of(rows, columns, group)
        assert torch.equal(ops.decode_rows(float8_in_tiles(weight, scale, device)).cpu(), weights)
        # Weights of about 1, as the tolerance expects.
        scale = scale.sign() * 2.0 ** (torch.arange(scale.numel()).view(scale.shape) % 3 - 7)
        weights = weight.float() * scale.repeat_interleave(group, 1)[:, :columns]
        check_products(float8_in_tiles(weight, scale, device), weights, device, (torch.bfloat16, torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_all_formats(name: str, device: torch.device) -> None:
    """Rows that bands do not divide, columns that steps do not divide; up to 16 columns; scales at the ends of float16."""
    block = FORMATS[name].block
    for rows, columns in some([(20, 3 * block), (32, 512), (40, 1024 + block)], len(name) % 3, 3):
        blocks = matrix_of(name, rows, columns)
        tiled = in_tiles(blocks, device)
        check_products(tiled, dequantize(blocks), device, (torch.bfloat16, torch.float32))
    for head in (-6e-8, 65504.0):
        extreme = with_heads(blocks, head)
        assert torch.equal(ops.decode_rows(in_tiles(extreme, device)).cpu(), dequantize(extreme))


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
@pytest.mark.parametrize("how", HOW[1:], ids=lambda how: "-".join(how))
def test_what_comes_before_and_behind(
    name: str, how: dict, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm, residual and activation, with tiles of a block of threads of 16 and of 32 rows."""
    blocks = matrix_of(name, 48, 768)
    tiled, weights = in_tiles(blocks, device), dequantize(blocks).bfloat16()
    given = given_by(48, 768, torch.bfloat16, device)
    options = {key: given[key] if key in ("norm", "residual") else value for key, value in how.items()}
    on_cpu = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    wanted = reference.linear_small(given["x"].cpu(), weights, **on_cpu)
    found = []
    for many in (linear.MANY, 1):
        monkeypatch.setattr(linear, "MANY", many)
        found.append(ops.linear_small(given["x"], tiled, **options))
        close_product(found[-1].cpu(), wanted, {})
    assert torch.equal(*found)


def test_queries_keys_and_values(device: torch.device) -> None:
    """With rotations of a part of a head; and where a rotation has its rows in one band, it is refused."""
    blocks = matrix_of("q5_0", 3 * 40, 256)
    tiled, weights = in_tiles(blocks, device), dequantize(blocks).bfloat16().to(device)
    given = given_by(120, 256, torch.bfloat16, device)
    tables = [torch.randn(12, 32, device=device).bfloat16() for _ in range(2)]
    lengths = torch.tensor([3, 0], device=device)
    stored = [torch.zeros(2, 1, 9, 40, device=device).bfloat16() for _ in range(4)]
    x = given["x"][:8].view(2, 4, 256)
    ours = ops.qkv_append(x, tiled, given["bias"], *tables, *stored[:2], lengths, norm=given["norm"])
    theirs = ops.qkv_append(x, weights, given["bias"], *tables, *stored[2:], lengths, norm=given["norm"])
    for got, wanted in zip((ours, *stored[:2]), (theirs, *stored[2:]), strict=True):
        close_product(got.cpu(), wanted.cpu(), {})
    tables = [table[:, :20].contiguous() for table in tables]
    with pytest.raises(ValueError, match="heads and halves of rotations in multiples of 8 rows, got 40 and 10"):
        ops.qkv_append(x, tiled, None, *tables, *stored[:2], lengths)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "mxfp4", "q8_0"])
def test_experts_of_all_kinds_of_scales(name: str, device: torch.device) -> None:
    """Against the dequantised weights of each expert; a row has the bits that it has alone, and experts that no row has chosen do not matter."""
    experts, rows, columns = 4, 24, 512 if name != "mxfp4" else 160
    blocks = matrix_of(name, experts * rows, columns)
    tiled, weights = in_tiles(blocks, device), dequantize(blocks).bfloat16()
    given = given_by(experts * rows, columns, torch.bfloat16, device)
    chosen = torch.tensor([[2, 0], [0, 2], [3, 2], [2, 3], [0, 3], [3, 0], [2, 0], [0, 2], [3, 2]], device=device)
    x, bias, shares = given["x"][:9], given["bias"], torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    on_cpu = x.cpu(), weights, chosen.cpu(), bias.cpu()
    options = {"experts": experts, "shares": shares.to(device)}
    first = ops.experts_small(x, tiled, chosen, bias, experts=experts)
    close_product(first.cpu(), reference.experts_small(*on_cpu, torch.empty(9, 2, rows).bfloat16()), {})
    mixed = ops.experts_small(x, tiled, chosen, bias, **options)
    close_product(mixed.cpu(), reference.mix_experts(first.cpu(), shares), {})
    each = x[:, None].expand(-1, 2, -1).contiguous()
    assert torch.equal(ops.experts_small(each, tiled, chosen, bias, **options), mixed)
    tiled.data[rows // 8 : 2 * rows // 8] = 255  # expert 1
    for n in (1, 5):
        options["shares"] = shares[n : n + 3].to(device)
        assert torch.equal(ops.experts_small(x[n : n + 3], tiled, chosen[n : n + 3], bias, **options), mixed[n : n + 3])


def test_experts_that_are_not_there(device: torch.device) -> None:
    """The sums of their rows are NaN, others are as without."""
    tiled = in_tiles(matrix_of("q8_0", 3 * 16, 64), device)
    x, shares = torch.ones(3, 64, device=device), torch.ones(3, 2, device=device)
    there, beyond = (torch.tensor([[0, 1], [2, n], [1, 0]], device=device) for n in (0, 3))
    wanted = ops.experts_small(x, tiled, there, experts=3, shares=shares)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"chosen must be 0 \.\. 2"):
            ops.experts_small(x, tiled, beyond, experts=3, shares=shares)
        return
    found = ops.experts_small(x, tiled, beyond, experts=3, shares=shares)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], wanted[::2])


def test_rows_that_are_not_there_are_nan(device: torch.device) -> None:
    tiled = in_tiles(matrix_of("q8_0", 20, 64), device)
    rows = ops.decode_rows(tiled, torch.tensor([-1, 3, 20, 1 << 40], device=device))
    assert rows.isnan().all(1).tolist() == [True, False, True, True]
