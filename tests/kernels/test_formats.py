"""Weight formats against the gguf package, whose layouts they share."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipespec_kernels.formats import FORMATS, QUANTIZERS, QuantizedMatrix, dequantize, format_of, quantize

from .blocks import random_blocks

gguf = pytest.importorskip("gguf")

OWN = [name for name, form in FORMATS.items() if form.ggml_type is None]
SIMPLE = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"]
"""Formats to which the package gguf quantises."""


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of several sizes and kinds: noise, outliers, one sign, steps, zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, columns), generator=generator) * 10.0 ** torch.randint(-3, 2, (rows, 1), generator=generator)
    x[1] = x[1].abs()
    x[2] = -x[2].abs()
    x[3] = 0
    x[4, ::37] *= 30
    x[5] = torch.arange(columns) % 7 - 3.0
    x[6, : columns // 2] = 0
    x[7] = 0.25
    x[8, :] = 1e-20
    return x


def of_gguf(name: str) -> "gguf.GGMLQuantizationType":
    return gguf.GGMLQuantizationType(FORMATS[name].ggml_type)


def error(x: torch.Tensor, name: str) -> float:
    return float(((dequantize(quantize(x, name)) - x) ** 2).sum() / (x**2).sum())


def test_the_table_is_that_of_gguf() -> None:
    for name, form in FORMATS.items():
        if name in OWN:
            continue
        kind = of_gguf(name)
        assert (kind.name.lower(), gguf.GGML_QUANT_SIZES[kind]) == (name, (form.block, form.block_bytes))
    sizes = [form.bytes_per_weight for form in FORMATS.values()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in OWN])
def test_dequantising_gives_the_bits_of_gguf(name: str) -> None:
    matrix = random_blocks(name, rows=33, blocks=5)
    if name == "mxfp4":
        matrix.data[:, 0] = torch.arange(33) * 250 // 32  # the least powers, and large ones
    found = dequantize(matrix)
    expected = gguf.dequantize(matrix.data.numpy(), of_gguf(name))
    assert found.dtype is torch.float32
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(found.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_gives_the_bytes_of_gguf(name: str, dtype: torch.dtype) -> None:
    x = weights(64, 7 * FORMATS[name].block).to(dtype)
    found = quantize(x, name)
    np.testing.assert_array_equal(found.data.numpy(), gguf.quantize(x.float().numpy(), of_gguf(name)))
    assert found.nbytes == found.data.numel() == 64 * 7 * FORMATS[name].block_bytes


@pytest.mark.parametrize(
    ("name", "worst"), [("q2_k", 0.11), ("q3_k", 2.5e-2), ("iq4_xs", 6.5e-3), ("iq4_nl", 6e-3), ("q4_k", 6e-3), ("q5_k", 1.6e-3), ("q6_k", 5e-4)],
)  # fmt: skip
def test_quantising_to_a_k_format_is_near(name: str, worst: float) -> None:
    x = torch.randn((64, 1024), generator=torch.Generator().manual_seed(2))
    assert 0 < error(x, name) < worst
    coarser = {"q3_k": "q2_k", "iq4_xs": "q4_0", "iq4_nl": "q4_0", "q4_k": "q4_0", "q5_k": "q5_0", "q6_k": "q5_1"}.get(
        name
    )
    assert coarser is None or error(x, name) < error(x, coarser)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantising_again_changes_little_and_zeros_stay_zeros(name: str) -> None:
    x = weights(16, 512)
    once = dequantize(quantize(x, name))
    assert torch.isfinite(once).all()
    assert not once[3].any()
    per_row = (once - x).norm(dim=1) / x.norm(dim=1).clamp(min=1e-12)
    assert per_row.max() < {"q2_k": 0.6, "q3_k": 0.3, "mxfp4": 0.25}.get(name, 0.15)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_rows_are_quantised_one_by_one(name: str) -> None:
    x = weights(600, 512)  # more than one chunk
    whole = quantize(x, name)
    for row in (0, 4, 255, 256, 599):
        assert torch.equal(quantize(x[row : row + 1], name).data[0], whole.data[row])
    order = torch.tensor([4, 599, 0])
    assert torch.equal(dequantize(whole.rows(order)), dequantize(whole)[order])
    assert whole.rows(slice(256, 300)).data.data_ptr() == whole.data[256].data_ptr()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no weight format 'q8_k'; the formats are q8_0, q6_k"):
        format_of("q8_k")
    with pytest.raises(ValueError, match="nothing is quantised to nvfp4; the formats are q8_0, q6_k"):
        quantize(torch.zeros(2, 32), "nvfp4")
    with pytest.raises(ValueError, match="q4_k has blocks of 256 weights, which do not fill rows of 320"):
        quantize(torch.zeros(2, 320), "q4_k")
    with pytest.raises(ValueError, match="finite weights of at most 65504"):
        quantize(torch.full((2, 32), torch.nan), "q8_0")
    with pytest.raises(ValueError, match="finite weights of at most 65504"):
        quantize(torch.full((2, 32), 1e6), "q8_0")
    with pytest.raises(ValueError, match="two dimensions"):
        quantize(torch.zeros(32), "q8_0")
    with pytest.raises(ValueError, match=r"contiguous \[3, 34\], got \[2, 34\]"):
        QuantizedMatrix(FORMATS["q8_0"], torch.zeros((2, 34), dtype=torch.uint8), (3, 32))
    with pytest.raises(TypeError, match="uint8"):
        QuantizedMatrix(FORMATS["q8_0"], torch.zeros((2, 34), dtype=torch.int8), (2, 32))


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "weight-formats.md").read_text()
    x = torch.randn((512, 4096), generator=torch.Generator().manual_seed(0))
    for name in QUANTIZERS:
        form = FORMATS[name]
        line = f"| `{name}` | {form.block} | {form.bytes_per_weight:.4f} | {100 * error(x, name) ** 0.5:.2f} % |"
        assert line in page
