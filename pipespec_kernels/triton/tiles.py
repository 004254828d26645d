"""Weights in tiles (:mod:`pipespec_kernels.tiles`) within a kernel: loaded as bytes, decoded in the registers of the threads that multiply with them.

Shapes are ``[P, B, 128]``: tiles of a row of tiles, bands of 8 rows, and 4 columns of 32 threads each. What a thread decodes are its operands of ``mma``, so no
number goes to another thread; :mod:`bench.compile_gate` checks that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.tiles import BAND, E4M3, FLOATS, HALF, LINEAR, ONE, PAIRS, POWERS, WIDTH, TiledMatrix
from pipespec_kernels.tiles import WORDS as FLOAT32
from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import begin_dependent, dependent, on
from pipespec_kernels.triton.norm import rounded

# Places in a TileLayout, which kernels have as a constant.
LOW, HIGH, ZERO, SCALES, GROUP, MINIMA, SIGNED, CODES, WORDS, FACTOR = (tl.constexpr(i) for i in range(10))
OF_32, IN_PAIRS, IN_POWERS, IN_WORDS, OF_TILE = (tl.constexpr(kind) for kind in (HALF, PAIRS, POWERS, FLOAT32, ONE))
ARE_LINEAR, ARE_FLOATS, ARE_E4M3 = (tl.constexpr(kind) for kind in (LINEAR, FLOATS, E4M3))
COLUMNS = tl.constexpr(WIDTH)
ROWS = tl.constexpr(BAND)

TILES = 4
"""Of a step of :func:`decode_kernel`."""


@triton.jit
def tile_bytes(LAYOUT: tl.constexpr):
    """Bytes of a tile."""
    KIND: tl.constexpr = LAYOUT[SCALES]
    WIDE: tl.constexpr = 2 if KIND == OF_32 else 4 if KIND == IN_WORDS else 4 if KIND == OF_TILE else 1
    ONE: tl.constexpr = COLUMNS // LAYOUT[GROUP] * WIDE
    HEAD: tl.constexpr = 0 if WIDE > 1 or KIND == IN_POWERS else 4
    COUNT: tl.constexpr = 2 if LAYOUT[MINIMA] and KIND != IN_PAIRS else 1
    return COLUMNS * (LAYOUT[LOW] + LAYOUT[HIGH]) + ROWS * (HEAD + ONE * COUNT)


@triton.jit
def load_plane(tiles, there, BITS: tl.constexpr, EVEN: tl.constexpr):
    """Of each thread's 8 columns of a group, ``BITS`` bits."""
    if BITS == 4:
        words = tiles.to(tl.pointer_type(tl.int32))
    elif BITS == 2:
        words = tiles.to(tl.pointer_type(tl.int16))
    else:
        words = tiles
    words += tl.arange(0, 128)[None, None, :]
    if EVEN:
        return tl.load(words, eviction_policy="evict_first")
    else:
        return tl.load(words, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def load_numbers(numbers, there, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(numbers)
    else:
        return tl.load(numbers, mask=there, other=0)


@triton.jit
def load_halves(numbers, there, EVEN: tl.constexpr):
    """Numbers in float16, of which the low bytes of 8 rows come first."""
    low = load_numbers(numbers, there, EVEN).to(tl.int16)
    high = load_numbers(numbers + ROWS * 4, there, EVEN).to(tl.int16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def tiles_of(weight, weight_stride, band, there, first, LAYOUT: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """Where ``PARTS`` tiles of bands begin, from tile ``first`` on, and which are there: ``[PARTS, bands, 1]``."""
    tile = first + tl.arange(0, PARTS)[:, None, None]
    at = weight + band.to(tl.int64)[None, :, None] * weight_stride + tile * tile_bytes(LAYOUT)
    return at, there[None, :, None] & (tile * COLUMNS < K)


@triton.jit
def load_codes(
    weight, weight_stride, band, there, first,
    LAYOUT: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The planes of codes of tiles, the second one only where the layout has it."""
    at, there = tiles_of(weight, weight_stride, band, there, first, LAYOUT, K, PARTS)
    low = load_plane(at, there, LAYOUT[LOW], EVEN)
    if LAYOUT[HIGH] > 0:
        return low, load_plane(at + COLUMNS * LAYOUT[LOW], there, LAYOUT[HIGH], EVEN)
    else:
        return low, low


@triton.jit
def load_scales(at, there, LAYOUT: tl.constexpr, EVEN: tl.constexpr):
    """The scale and the minimum of each thread's columns of a group."""
    e = tl.arange(0, 128)[None, None, :]
    row, group = e // 16, e % 4
    at += COLUMNS * (LAYOUT[LOW] + LAYOUT[HIGH])
    if LAYOUT[SCALES] == OF_32:
        halves = at + row * 4 + group
        scale = load_halves(halves, there, EVEN)
        minimum = scale
        if LAYOUT[MINIMA]:
            minimum = load_halves(halves + ROWS * 8, there, EVEN)
    elif LAYOUT[SCALES] == IN_POWERS:
        power = load_numbers(at + row * 4 + group, there, EVEN).to(tl.int32)
        # Half of it: below the smallest normal number the bits are shifted.
        bits = tl.where(power < 2, (power + 1) << 21, (power - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        minimum = scale
    elif LAYOUT[SCALES] == IN_WORDS:
        bytes_of = at + row * 8 + e // 8 % 2 * 4 + group
        bits = load_numbers(bytes_of, there, EVEN).to(tl.int32)
        bits |= load_numbers(bytes_of + ROWS * 8, there, EVEN).to(tl.int32) << 8
        bits |= load_numbers(bytes_of + ROWS * 16, there, EVEN).to(tl.int32) << 16
        bits |= load_numbers(bytes_of + ROWS * 24, there, EVEN).to(tl.int32) << 24
        scale = bits.to(tl.float32, bitcast=True)
        minimum = scale
    elif LAYOUT[SCALES] == OF_TILE:
        # One byte for each of a thread's groups: as in the other kinds, such loads give a thread 8 columns in a row.
        part = load_numbers(at + row * 4 + group, there, EVEN).to(tl.int32) << (group * 8)
        low, high = tl.split(tl.reshape(part, (part.shape[0], part.shape[1], 32, 2, 2)))
        low, high = tl.split(low | high)
        bits = tl.join(low | high, low | high)
        bits = tl.reshape(tl.join(bits, bits), part.shape)
        scale = bits.to(tl.float32, bitcast=True)
        minimum = scale
    else:
        NUMBERS: tl.constexpr = COLUMNS // LAYOUT[GROUP]
        heads = load_numbers(at.to(tl.pointer_type(tl.int32)) + row, there, EVEN)
        steps = at + ROWS * 4 + row * NUMBERS + group
        if LAYOUT[GROUP] == 16:
            steps += e // 8 % 2 * 4
        step = load_numbers(steps, there, EVEN)
        above = step
        if LAYOUT[SCALES] == IN_PAIRS:
            step, above = step & 15, step >> 4
        elif LAYOUT[MINIMA]:
            above = load_numbers(steps + ROWS * NUMBERS, there, EVEN)
        if LAYOUT[SIGNED]:
            step = step.to(tl.int8, bitcast=True)
        head = heads.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * LAYOUT[FACTOR]
        scale = head * step.to(tl.float32)
        minimum = scale
        if LAYOUT[MINIMA]:
            minimum = (heads >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * above.to(tl.float32)
    return scale, minimum


@triton.jit
def weight_of(low, high, scale, minimum, n: tl.constexpr, dtype: tl.constexpr, LAYOUT: tl.constexpr):
    """The weight of each thread's column ``n`` of a group, in the dtype of the product."""
    code = (low.to(tl.int32) >> (n * LAYOUT[LOW])) & ((1 << LAYOUT[LOW]) - 1)
    if LAYOUT[HIGH] > 0:
        code |= ((high.to(tl.int32) >> (n * LAYOUT[HIGH])) & ((1 << LAYOUT[HIGH]) - 1)) << LAYOUT[LOW]
    if LAYOUT[CODES] == ARE_FLOATS:
        # One bit of sign, two of exponent, one of mantissa: doubled, those of a smaller float32.
        number = ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 1.7014118346046923e38
    elif LAYOUT[CODES] == ARE_E4M3:
        # Likewise: 2 ** 120 is the difference of the exponents' offsets.
        number = ((code & 127) << 20 | (code & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        ZERO_CODE: tl.constexpr = LAYOUT[ZERO] if LAYOUT[CODES] == ARE_LINEAR else 128
        if LAYOUT[CODES] != ARE_LINEAR:
            WORD: tl.constexpr = LAYOUT[WORDS]
            low_half = tl.where(code < 4, WORD[0], WORD[1])
            word = tl.where(code < 8, low_half, tl.where(code < 12, WORD[2], WORD[3]))
            code = (word >> ((code & 3) * 8)) & 255
        # 2 ** 23 + code, exactly: a conversion takes as long as four sums.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO_CODE)
    if LAYOUT[MINIMA]:
        weight = tl.fma(scale, number, minimum)  # the product is exact
    else:
        weight = scale * number
    return rounded(weight, dtype).to(dtype)


@triton.jit
def decode(
    codes, weight, weight_stride, band, there, first, dtype: tl.constexpr,
    LAYOUT: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, BANDS: tl.constexpr,
):  # fmt: skip
    """The weights ``[PARTS, 8 * BANDS, 128]`` of tiles whose ``codes`` are loaded."""
    at, there = tiles_of(weight, weight_stride, band, there, first, LAYOUT, K, PARTS)
    scale, minimum = load_scales(at, there, LAYOUT, EVEN)
    low, high = codes
    w0 = weight_of(low, high, scale, minimum, 0, dtype, LAYOUT)
    w1 = weight_of(low, high, scale, minimum, 1, dtype, LAYOUT)
    w2 = weight_of(low, high, scale, minimum, 2, dtype, LAYOUT)
    w3 = weight_of(low, high, scale, minimum, 3, dtype, LAYOUT)
    w4 = weight_of(low, high, scale, minimum, 4, dtype, LAYOUT)
    w5 = weight_of(low, high, scale, minimum, 5, dtype, LAYOUT)
    w6 = weight_of(low, high, scale, minimum, 6, dtype, LAYOUT)
    w7 = weight_of(low, high, scale, minimum, 7, dtype, LAYOUT)
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    # The last dimensions: row of the band, thread of the row, group, column.
    w = tl.reshape(tl.join(even, odd), (PARTS, BANDS, 8, 4, 4, 8))
    return tl.reshape(tl.permute(w, (0, 1, 2, 4, 3, 5)), (PARTS, BANDS * 8, 128))


@triton.jit
def decode_kernel(
    weight,
    weight_stride,
    index,
    output,
    output_stride,
    K: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    N: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """All rows, 8 in each block of threads; or those of an index, one in each."""
    begin_dependent(PDL)
    r = tl.arange(0, 8)
    if HAS_INDEX:
        given = tl.load(index + tl.program_id(0)).to(tl.int64)
        good = (given >= 0) & (given < N)
        row = tl.where(good, given, 0)
        place = tl.program_id(0).to(tl.int64) + r * 0
        write = r == row % 8
    else:
        row = tl.program_id(0).to(tl.int64) * 8
        place = row + r
        write = place < N
    band = row // 8 + tl.zeros([1], tl.int64)
    there = band >= 0
    first = tl.program_id(1) * TILES
    codes = load_codes(weight, weight_stride, band, there, first, LAYOUT, K, False, TILES)
    w = decode(codes, weight, weight_stride, band, there, first, tl.float32, LAYOUT, K, False, TILES, 1)
    k = (first + tl.arange(0, TILES))[:, None, None] * COLUMNS + tl.arange(0, 128)[None, None, :]
    if HAS_INDEX:
        w = tl.where(good, w, float("nan"))
    at = output + place[None, :, None] * output_stride + k
    dtype: tl.constexpr = output.dtype.element_ty
    tl.store(at, rounded(w, dtype).to(dtype), mask=write[None, :, None] & (k < K))


def decode_rows(matrix: TiledMatrix, index: Tensor | None, out: Tensor) -> None:
    """See :func:`pipespec_kernels.ops.decode_rows`, which checks the arguments and makes ``out``."""
    launch.check_device(out.device, "matrix")
    rows, columns = matrix.shape
    blocks = -(-rows // BAND) if index is None else len(index)
    with on(out.device):
        decode_kernel[(blocks, triton.cdiv(columns, TILES * WIDTH))](
            matrix.data,
            matrix.data.stride(0),
            out if index is None else index.contiguous(),
            out,
            out.stride(0),
            K=columns,
            HAS_INDEX=index is not None,
            N=rows,
            LAYOUT=matrix.layout,
            TILES=TILES,
            **dependent(out.device),
            num_warps=TILES,
            enable_fp_fusion=False,
        )
