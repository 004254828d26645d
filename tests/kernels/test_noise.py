"""The noise of coupled sampling: Philox against its published vectors, native noise against the oracle bit for bit,
and both against float64."""

import math

import pytest
import torch
from torch import Tensor

from pipespec_kernels import _native, reference
from pipespec_kernels.noise import ACCEPT, DRAFT, RESIDUAL, TARGET

from .implementations import simd, simd_variants
from .selection import PHILOX_VECTORS

VARIANTS = simd_variants()


def native_noise(seed: int, position: int, stream: int, begin: int, count: int) -> Tensor:
    out = torch.full((count,), math.nan)
    _native.gumbel(seed % 2**64, position, stream, begin, count, out.data_ptr())
    return out


def reference_noise(seed: int, position: int, stream: int, begin: int, count: int) -> Tensor:
    return reference.gumbel(reference.philox_draw(seed, position, stream, torch.arange(begin, begin + count)))


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_vectors(counter, key, expected) -> None:
    words = reference.philox([torch.tensor([c]) for c in counter], key)
    assert tuple(int(w) for w in words) == expected


def test_what_a_draw_depends_on() -> None:
    """Key: the seed. Counter: id >> 2, the two halves of the position, stream. Word: id & 3."""
    seed, position, stream, token = 0x299F31D0A4093822, 0x13198A2E85A308D3, 0x03707344, (0x243F6A88 << 2) + 2
    assert reference.philox_draw(seed, position, stream, torch.tensor([token])).item() == 0x5001E420
    assert len({TARGET, DRAFT, ACCEPT, RESIDUAL}) == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_noise_is_the_oracles_to_the_last_bit(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    with simd(variant):
        for case in range(60):
            seed, position = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator).tolist()
            position = (position & (2**63 - 1)) >> (case % 60)
            begin, count = (int(torch.randint(0, n, (), generator=generator)) for n in (2**28, 3000))
            arguments = (seed, position, case % 4, begin >> (case % 29), count)
            assert torch.equal(native_noise(*arguments), reference_noise(*arguments)), arguments
    for seed, position, begin in [(0, 0, 0), (-1, 2**63 - 1, 2**31 - 5), (1 << 32, 1 << 32, 3)]:
        with simd(variant):
            assert torch.equal(native_noise(seed, position, 0, begin, 4), reference_noise(seed, position, 0, begin, 4))


def test_streams_positions_and_seeds_are_independent() -> None:
    base = native_noise(5, 7, TARGET, 0, 20000)
    others = [(5, 8, TARGET), (6, 7, TARGET), (5, 7, DRAFT), (5 + 2**32, 7, TARGET), (5, 7 + 2**32, TARGET)]
    for other in [native_noise(*key, 0, 20000) for key in others] + [base.roll(1)]:
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1].item()) < 5 / math.sqrt(20000)


# --- from bits to noise ----------------------------------------------------------------------------------------------


def true_noise(r: Tensor) -> Tensor:
    u = (r.double() + 0.5) / 2**32
    return -torch.log(-torch.log1p(-u))


def test_tail() -> None:
    """The upper tail is as long and as fine as 32 bits allow."""
    tail = reference.gumbel(torch.arange(3000))  # the largest noise there is: above 14
    assert tail.max() > 22
    assert len(tail.unique()) > 2900
    torch.testing.assert_close(tail.double(), true_noise(torch.arange(3000)), rtol=0, atol=3e-6)


def test_accuracy() -> None:
    generator = torch.Generator().manual_seed(1)
    uniform = torch.randint(0, 2**32, (1 << 20,), generator=generator)
    shifted = uniform >> torch.randint(0, 32, (1 << 20,), generator=generator)
    seam = torch.arange(2**22 - 50000, 2**22 + 50000)  # where the formula for small u ends
    r = torch.cat([uniform, shifted, seam, torch.tensor([0, 1, 2**32 - 1, 2**32 - 2])])
    true, error = true_noise(r), (reference.gumbel(r).double() - true_noise(r)).abs()
    assert error[true > 7].max() < 2e-6
    assert error[true > -1].max() < 3.2e-5
    assert error[(true > -1) & (true < 6)].max() < 1.5e-5
    assert error.max() < 0.3  # draws that lose: u next to 1
    assert reference.gumbel(r).isfinite().all()
