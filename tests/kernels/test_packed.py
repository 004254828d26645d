"""Products with quantised matrices against their arithmetic in plain torch, and decoders of such matrices: equal bits in every shape of a call."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipespec_kernels.decoder import DecoderShape, LayerWeights, NativeDecoder
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, dequantize
from pipespec_kernels.packed import PackedMatrix, matmul_reference

from .blocks import matrix_of, random_blocks
from .implementations import simd, simd_variants

VARIANTS = simd_variants()
WIDTHS = [1, 2, 7, 16, 48, 49, 100]


def inputs(columns: int, count: int = 100) -> Tensor:
    """Rows of different sizes, among them zeros, an outlier, and numbers near the least that are no zeros."""
    x = (
        torch.randn(count, columns, generator=torch.Generator().manual_seed(1))
        * torch.linspace(0.01, 9, count)[:, None]
    )
    x[1, :40] = 0
    x[2] *= 1e-31
    x[3, 7] = 500
    x[4] = 0
    return x


def matrix(name: str, rows: int, blocks: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(2)
    return matrix_of(torch.randn(rows, blocks * FORMATS[name].block, generator=generator) * 0.05, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 2), (33, 5), (150, 3)])
def test_products_have_the_bits_of_the_reference(name: str, rows: int, blocks: int) -> None:
    weights = matrix(name, rows, blocks)
    x = inputs(weights.shape[1])
    expected = matmul_reference(x, weights)
    for variant in VARIANTS:
        with simd(variant):
            packed = PackedMatrix(weights)
            for width in WIDTHS:
                for threads in (1, 3):
                    got = packed.matmul(x[-width:], threads=threads)
                    assert torch.equal(got, expected[-width:]), (variant, width, threads)


def check_products(weights: QuantizedMatrix, x: torch.Tensor, *widths: int) -> None:
    """Compare the products of all rows of ``x``, and of its first ones, with those of the reference, which are finite."""
    expected = matmul_reference(x, weights)
    assert expected.isfinite().all()
    for variant in VARIANTS:
        with simd(variant):
            packed = PackedMatrix(weights)
            for width in (*widths, len(x)):
                assert torch.equal(packed.matmul(x[:width]), expected[:width]), (variant, width)


@pytest.mark.parametrize("name", FORMATS)
def test_products_in_each_width(name: str) -> None:
    weights = matrix(name, 17, 3 if FORMATS[name].block == 32 else 1)
    check_products(weights, inputs(weights.shape[1], 512), *range(1, 65))


@pytest.mark.parametrize("name", FORMATS)
def test_products_with_all_codes(name: str) -> None:
    weights = random_blocks(name, 32, 4, seed=3)
    x = inputs(weights.shape[1], 20)
    x[5] = 3.0  # all codes 127
    check_products(weights, x)


@pytest.mark.parametrize("name", FORMATS)
def test_products_with_extreme_scales(name: str) -> None:
    # The largest numbers of float16, the least (subnormal) ones and zero; powers of two from the least to 2^72.
    weights = random_blocks(name, 16, 6)
    blocks = weights.data.view(-1, weights.format.block_bytes)
    for i, number in enumerate((0x7BFF, 0xFBFF, 0x0001, 0x8001, 0x03FF, 0x0000)):
        for at in weights.format.halves:
            blocks[i::6, at : at + 2] = torch.tensor([number], dtype=torch.uint16).view(torch.uint8)
        if name == "mxfp4":
            blocks[i::6, 0] = (0, 1, 2, 3, 127, 200)[i]
        if name == "nvfp4":
            blocks[i::6, :8] = torch.tensor([(1e-45, 3e-39, 0.0, 1e9, -1e9, 448.0)[i]]).view(torch.uint8).repeat(2)
    check_products(weights, inputs(weights.shape[1], 35))


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_near_those_of_the_weights(name: str) -> None:
    weights = matrix(name, 64, 8)
    x = torch.randn(20, weights.shape[1], generator=torch.Generator().manual_seed(4))
    exact = x.double() @ dequantize(weights).double().T
    assert (PackedMatrix(weights).matmul(x) - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_weights(name: str) -> None:
    weights = matrix(name, 20, 3)
    packed = PackedMatrix(weights)
    assert torch.equal(torch.stack([packed.row(i) for i in range(20)]), dequantize(weights))
    # Panels have 16 rows; sub-scales of 6 bits that stand alone are bytes there.
    assert packed.nbytes <= (1.15 if name in ("q2_k", "q3_k") else 1.08) * weights.nbytes * 32 / 20


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
def test_inputs_that_are_not_finite_give_nan(name: str, bad: float) -> None:
    weights = matrix(name, 16, 2)
    x = torch.randn(3, weights.shape[1])
    x[1, 5] = bad
    for variant in VARIANTS:
        with simd(variant):
            got = PackedMatrix(weights).matmul(x)
            assert got[1].isnan().all()
            assert got[[0, 2]].isfinite().all()


def test_refuses_inputs_that_do_not_fit() -> None:
    packed = PackedMatrix(matrix("q4_0", 16, 2))
    with pytest.raises(TypeError, match="float32"):
        packed.matmul(torch.zeros(2, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match="64"):
        packed.matmul(torch.zeros(2, 65))
    with pytest.raises(ValueError, match="row"):
        packed.row(16)
    assert packed.matmul(torch.zeros(0, 64)).shape == (0, 16)


# --- decoders ----------------------------------------------------------------------------------------------------------

SHAPE = DecoderShape(
    hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, vocabulary=300, eps=1e-5, scale=0.125
)
NARROW = dataclasses.replace(SHAPE, hidden=96, intermediate=64, head_dim=24, heads=8, kv_heads=2)
"""Heads that are no whole panels, and sizes that only blocks of 32 fill."""
POSITIONS = 640


def model(
    shape: DecoderShape, choose: Callable[[str, int], str | torch.dtype], tied: bool = False, layers: int = 2
) -> tuple[list[LayerWeights], dict[str, Tensor | QuantizedMatrix]]:
    """Random weights; ``choose(name, layer)`` gives the format or dtype of a matrix."""
    generator = torch.Generator().manual_seed(5)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * (size[-1] ** -0.5 if len(size) == 2 else 0.1)

    def weight(name: str, layer: int, *size: int) -> Tensor | QuantizedMatrix:
        form = choose(name, layer)
        return matrix_of(random(*size), form) if isinstance(form, str) else random(*size).to(form)

    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q), "gate": (i, h), "up": (i, h), "down": (h, i)}
    found = [
        LayerWeights(
            input_norm=1 + random(h),
            post_norm=1 + random(h),
            k_bias=random(kv),
            **{name: weight(name, layer, *size) for name, size in sizes.items()},
        )
        for layer in range(layers)
    ]
    head = weight("head", 0, shape.vocabulary, h)
    embedding = head if tied else weight("embedding", 0, shape.vocabulary, h)
    return found, {"embedding": embedding, "norm": 1 + random(h), "head": head}


def tables(shape: DecoderShape) -> tuple[Tensor, Tensor]:
    x = torch.outer(torch.arange(POSITIONS).float(), 10.0 ** -torch.arange(0, shape.rotated, 2).div(shape.rotated))
    return x.repeat(1, 2).cos(), x.repeat(1, 2).sin()


def feed(decoder: NativeDecoder, tokens: Tensor, widths: Sequence[int], threads: int) -> Tensor:
    s, rows, at, found = decoder.shape, len(tokens), 0, []
    cache = torch.full((2, decoder.num_layers, rows, s.kv_heads, POSITIONS, s.head_dim), math.nan)
    for width in widths:
        found.append(
            decoder.step(tokens[:, at : at + width], *cache, [at] * rows, *tables(s), keep=width, threads=threads)
        )
        at += width
    return torch.cat(found, 1)


CHOICES: dict[str, tuple[DecoderShape, Callable[[str, int], str | torch.dtype]]] = {
    **{
        name: (SHAPE, lambda _name, _layer, form=name: form)
        for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
    },
    # As Q4_K_M files choose: the values and the second matrix of the MLP with more bits, not in each layer.
    "q4_k_m": (SHAPE, lambda name, layer: "q6_k" if name in ("v", "down", "head") and layer == 0 else "q4_k"),
    "q4_0, odd": (NARROW, lambda _name, _layer: "q4_0"),
    "everything": (
        SHAPE,
        lambda name, layer: {
            "q": torch.float32,
            "k": "q8_0",
            "v": "q5_k" if layer else torch.bfloat16,
            "o": torch.bfloat16,
            "gate": "q4_1",
            "up": "q6_k" if layer else torch.float32,
            "down": "q5_1",
            "head": "q5_0",
            "embedding": "q4_k",
        }[name],
    ),
    # As "UD" files mix types.
    "dynamic": (
        SHAPE,
        lambda name, layer: {
            "q": "iq4_xs",
            "k": "q6_k",
            "v": "q8_0",
            "o": "q3_k",
            "gate": "table_iq2",
            "up": "mxfp4" if layer else "table_iq3_s",
        }.get(name, "iq4_nl" if layer else "q2_k"),
    ),
    "bfloat16 head": (SHAPE, lambda name, _: torch.bfloat16 if name in ("head", "embedding") else "q4_k"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("choice", CHOICES)
def test_bits_do_not_depend_on_the_call(choice: str, variant: str) -> None:
    shape, choose = CHOICES[choice]
    with simd(variant):
        layers, ends = model(shape, choose)
        decoder = NativeDecoder(shape, layers, **ends)
        tokens = torch.randint(0, shape.vocabulary, (3, 60), generator=torch.Generator().manual_seed(6))
        alone = torch.cat([feed(decoder, tokens[r : r + 1], [1] * 60, 1) for r in range(3)])
        assert alone.isfinite().all()
        for widths, threads in (([60], 1), ([60], 3), ([1] * 60, 2), ([2, 3, 4, 5, 6, 7, 8, 25], 2), ([16, 17, 27], 3)):
            assert torch.equal(feed(decoder, tokens, widths, threads), alone), (widths, threads)


@pytest.mark.parametrize("choice", CHOICES)
def test_near_the_decoder_of_the_same_weights(choice: str) -> None:
    shape, choose = CHOICES[choice]
    layers, ends = model(shape, choose)

    def whole(weight: Any) -> Any:
        if isinstance(weight, QuantizedMatrix):
            return dequantize(weight)
        return weight.float() if isinstance(weight, Tensor) else weight

    plain = [
        LayerWeights(**{f.name: whole(getattr(layer, f.name)) for f in dataclasses.fields(layer)}) for layer in layers
    ]
    tokens = torch.randint(0, shape.vocabulary, (2, 40), generator=torch.Generator().manual_seed(6))
    expected = feed(
        NativeDecoder(shape, plain, **{name: whole(weight) for name, weight in ends.items()}), tokens, [40], 1
    )
    decoder = NativeDecoder(shape, layers, **ends)
    assert (feed(decoder, tokens, [40], 1).float() - expected).norm() <= 0.03 * expected.norm()
    embedding = whole(ends["embedding"])
    assert embedding is not None
    assert torch.equal(decoder.embed(tokens), embedding[tokens])


@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
def test_a_tied_embedding_is_read_from_the_packed_head(name: str) -> None:
    layers, ends = model(SHAPE, lambda _name, _layer: name, tied=True)
    decoder = NativeDecoder(SHAPE, layers, **ends)
    head = ends["head"]
    assert isinstance(head, QuantizedMatrix)
    wanted, tokens = dequantize(head), torch.arange(SHAPE.vocabulary).view(2, -1)
    head.data.zero_()  # nothing reads it any more
    assert torch.equal(decoder.embed(tokens), wanted[tokens])


def test_a_long_prompt_has_the_bits_of_short_ones() -> None:
    # More columns than go through the layers at once, with few and with all logits.
    layers, ends = model(SHAPE, lambda _name, _layer: "q4_k")
    decoder = NativeDecoder(SHAPE, layers, **ends)
    tokens = torch.randint(0, SHAPE.vocabulary, (2, POSITIONS), generator=torch.Generator().manual_seed(7))
    expected = feed(decoder, tokens, [100] * 6 + [40], 1)
    assert torch.equal(feed(decoder, tokens, [POSITIONS], 2), expected)
    for keep in (0, 1, 3, 300):
        cache = torch.full((2, 2, 2, SHAPE.kv_heads, POSITIONS, SHAPE.head_dim), math.nan)
        got = decoder.step(tokens, *cache, [0, 0], *tables(SHAPE), keep=keep, threads=1)
        assert torch.equal(got, expected[:, POSITIONS - keep :]), keep


def test_refuses_quantised_weights_that_do_not_fit() -> None:
    layers, ends = model(SHAPE, lambda _name, _layer: "q4_0")
    wrong = dataclasses.replace(layers[0], o=matrix("q4_0", 256, 9))
    with pytest.raises(ValueError, match=r"layers\[1\].o must be \(256, 256\)"):
        NativeDecoder(SHAPE, [layers[0], wrong], **ends)
    with pytest.raises(TypeError, match="cannot be quantised"):
        NativeDecoder(SHAPE, [dataclasses.replace(layers[0], input_norm=matrix("q4_0", 1, 8))], **ends)
    with pytest.raises(TypeError, match="has a scale"):
        NativeDecoder(SHAPE, [dataclasses.replace(layers[0], q_scale=torch.ones(256))], **ends)
