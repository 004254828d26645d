"""Products with packed weights, a row per format: ``python -m bench.products [--formats NAME ...] [--rows N] [--columns N] [--threads N]``

Each number is the least time of several calls, in microseconds, for 1 to 256 columns of inputs. Four matrices take turns, which the caches do not hold.
"""

import argparse
import time

import torch

from pipespec_kernels import _native
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, WeightFormat
from pipespec_kernels.packed import PackedMatrix

WIDTHS = (1, 2, 4, 8, 16, 48, 256)


def matrix_of(form: WeightFormat, rows: int, columns: int) -> QuantizedMatrix:
    """Random codes with scales of about 0.01: subnormal numbers would be slow, and not finite ones fast."""
    data = torch.randint(0, 256, (rows * columns // form.block, form.block_bytes), dtype=torch.uint8)
    for at in form.halves:
        data[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if form.name == "mxfp4":
        data[:, 0] = 120
    if form.name == "nvfp4":
        data[:, :8] = torch.full((2,), 0.01).view(torch.uint8)
    return QuantizedMatrix(form, data.view(rows, -1), (rows, columns))


def least_seconds(matrices: list[PackedMatrix], x: torch.Tensor, threads: int, rounds: int) -> float:
    """The least time of a product."""
    found = []
    for _ in range(rounds):
        for matrix in matrices:
            begin = time.perf_counter()
            matrix.matmul(x, threads=threads)
            found.append(time.perf_counter() - begin)
    return min(found)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--rows", type=int, default=8960)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(f"{options.rows} x {options.columns}, {options.threads} threads, {_native.packed_simd()}")
    print(f"{'format':14}{'GB/s':>7}" + "".join(f"{width:9}" for width in WIDTHS))
    for name in options.formats:
        weights = matrix_of(FORMATS[name], options.rows, options.columns)
        matrices = [PackedMatrix(weights) for _ in range(4)]
        times = [
            least_seconds(matrices, torch.randn(width, options.columns), options.threads, options.rounds)
            for width in WIDTHS
        ]
        print(
            f"{name:14}{matrices[0].nbytes / times[0] / 1e9:7.1f}" + "".join(f"{1e6 * t:9.0f}" for t in times),
            flush=True,
        )


if __name__ == "__main__":
    main()
