"""Storage in floats of 8 bits: what each operation writes is what it would write in its own dtype, rounded; attention over it is that over the same numbers in the dtype of the queries."""

import pytest
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.kept import KEPT
from pipespec_kernels.kept import kept as rounded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def kept(x: torch.Tensor) -> torch.Tensor:
    """The bytes of numbers in storage."""
    return rounded(x.cpu(), KEPT).view(torch.uint8)


def bytes_of(storage: torch.Tensor) -> torch.Tensor:
    return storage.cpu().view(torch.uint8)


def test_rounding(device: torch.device) -> None:
    """All codes, the middle between each two of them and its neighbours, and numbers beyond them, of both signs."""
    codes = torch.arange(127, dtype=torch.uint8).view(KEPT).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(middles, torch.full_like(middles, limit)) for limit in (0.0, 1e9)]
    beyond = torch.tensor([449.0, 464.0, 480.0, 1e9, torch.inf, 1e-9, 1e-40, torch.nan])
    numbers = torch.cat([codes, middles, *near, beyond])
    numbers = torch.cat([numbers, -numbers[:-1]])[None, None, :, None].to(device)
    stored = [torch.zeros(numbers.shape, dtype=KEPT, device=device) for _ in range(2)]
    ops.kv_append(numbers, -numbers, *stored, torch.zeros(1, dtype=torch.int32, device=device))
    for storage, given in zip(stored, (numbers, -numbers), strict=True):
        ours, wanted = (x.cpu().view(KEPT).float() for x in (bytes_of(storage), kept(given)))
        assert torch.equal(ours.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(ours.isnan(), wanted.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("invariant", [False, True])
def test_attention(dtype: torch.dtype, invariant: bool, device: torch.device) -> None:
    """With the smallest and the largest codes among the keys and values."""
    stored = [normal(2, 2, 40, 16, dtype=torch.float32, device=device, seed=i).to(KEPT) for i in range(2)]
    for storage, first in zip(stored, (1, 8), strict=True):
        bytes_of(storage)  # checks that a view is possible
        storage.view(torch.uint8)[0, 0, 3, :8] = torch.arange(first, first + 8, dtype=torch.uint8, device=device)
    q = normal(2, 4, 3, 16, dtype=dtype, device=device, seed=5)
    lengths, fed = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([36, 9], [3, 2]))
    options = {"invariant": invariant, "window": None if invariant else 20}
    ours = ops.verify_attention(q, *stored, lengths, fed, **options)
    theirs = ops.verify_attention(q, *(storage.to(dtype) for storage in stored), lengths, fed, **options)
    assert torch.equal(ours, theirs)
    wanted = reference.verify_attention(q, *stored, lengths, fed, window=options["window"])
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=1e-4 if dtype is torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("rotary", [16, 24])
def test_rotated_keys(dtype: torch.dtype, rotary: int, device: torch.device) -> None:
    """After norms, of columns with padding; queries stay as they are."""
    q, keys, values = (normal(2, n, 3, 24, dtype=dtype, device=device, seed=n) for n in (4, 2, 2))
    tables = [normal(20, rotary, dtype=dtype, device=device, seed=i) for i in range(2)]
    lengths, new = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, 0], [2, 3]))
    norms = {f"{name}_norm": normal(24, dtype=dtype, device=device) for name in ("q", "k")}
    small, whole = ([torch.zeros(2, 2, 12, 24, dtype=of, device=device) for _ in range(2)] for of in (KEPT, dtype))
    turned = [ops.rope_append(q, keys, values, *tables, *storage, lengths, new, **norms) for storage in (small, whole)]
    assert torch.equal(*turned)
    for ours, wanted in zip(small, whole, strict=True):
        assert wanted.any()
        assert torch.equal(bytes_of(ours), kept(wanted))


@pytest.mark.parametrize("rotary", [16, 24])
def test_keys_of_a_product(rotary: int, device: torch.device) -> None:
    dtype = torch.bfloat16
    x, weight = normal(2, 3, 40, dtype=dtype, device=device), normal(8 * 24, 40, dtype=dtype, device=device, seed=1)
    tables = [normal(20, rotary, dtype=dtype, device=device, seed=i) for i in range(2)]
    lengths, new = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, 0], [2, 3]))
    small, whole = ([torch.zeros(2, 2, 12, 24, dtype=of, device=device) for _ in range(2)] for of in (KEPT, dtype))
    first, second = (ops.qkv_append(x, weight, None, *tables, *storage, lengths, new) for storage in (small, whole))
    assert torch.equal(first[0, :, :2], second[0, :, :2])
    assert torch.equal(first[1], second[1])
    for ours, wanted in zip(small, whole, strict=True):
        assert wanted.any()
        assert torch.equal(bytes_of(ours), kept(wanted))
