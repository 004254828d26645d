"""Attention without a mask against an oracle with a mask, and the bits of the invariant form."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pipespec_kernels import ops, reference
from pipespec_kernels import triton as kernels
from pipespec_kernels.kv import attention_tickets
from pipespec_kernels.triton import attention
from tests.trials import PROFILE

from .conftest import some

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# For outputs of about 1. The weights are rounded to 16 bits before their product with the values, and so is the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_storage(
    batch: int, heads: int, capacity: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    k_cache, v_cache = (
        torch.randn(batch, heads, capacity, dim, generator=generator).to(device, dtype) for _ in range(2)
    )
    return k_cache, v_cache


def on_device(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_queries(batch: int, heads: int, width: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As a model has them: ``[B, Q, Hq, D]`` seen from the heads."""
    generator = torch.Generator().manual_seed(batch + 10 * width)
    return torch.randn(batch, width, heads, dim, generator=generator).to(dtype).to(device).transpose(1, 2)


def check(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


BLOCKS = [
    # Windows that begin within a block of keys.
    *((torch.float32, 32, 2, 3, [130, 7], None, {"scale": 1.0, "window": w, "softcap": 3.0}) for w in (20, 1, 64, 139)),
    # Several tiles of columns, of which some end in the middle of a column's heads.
    (torch.bfloat16, 256, 3, 35, [40, 0], [35, 3], {}),
    (torch.float32, 80, 3, 35, [40, 0], [35, 3], {}),
    (torch.bfloat16, 64, 3, 11, [130, 2], None, {}),
]


@pytest.mark.parametrize(("dtype", "dim", "heads", "width", "lengths", "fed", "options"), some(BLOCKS, 0, 3))
def test_any_division_of_the_keys(dtype, dim, heads, width, lengths, fed, options, device) -> None:
    """Only the invariant form takes tickets."""
    k_cache, v_cache = make_storage(2, 1, 150, dim, dtype, device)
    q, n = make_queries(2, heads, width, dim, dtype, device), on_device(lengths, device)
    counts = None if fed is None else on_device(fed, device)
    expected = reference.verify_attention(q, k_cache, v_cache, n, counts, **options)
    for more in ({}, {"splits": 4}, {"invariant": True}):
        taken = "invariant" in more
        tickets = torch.full((64,), 0 if taken else 77, dtype=torch.int32, device=device)
        got = kernels.verify_attention(q, k_cache, v_cache, n, counts, **options, **more, workspace=tickets)
        check(got, expected, dtype)
        assert tickets.tolist() == [0 if taken else 77] * 64


def steps(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, n: Tensor, chosen: Sequence[int] | None = None, **options: object
) -> Tensor:
    """Column by column (all, or the chosen ones) and row by row, each in a launch of its own."""
    rows = []
    for r in range(q.shape[0]):
        one = slice(r, r + 1)
        columns = [
            kernels.verify_attention(q[one, :, j : j + 1], k_cache[one], v_cache[one], n[one] + j, **options)
            for j in (range(q.shape[2]) if chosen is None else chosen)
        ]
        rows.append(torch.cat(columns, 2))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", some(DTYPES[:2], 1, 2), ids=str)
@pytest.mark.usefixtures("sums_in_order")
def test_invariant_to_the_last_bit(dtype: torch.dtype, device: torch.device) -> None:
    """A block of columns in a batch has the bits of each column alone, also across the ends of blocks, spans and tiles."""
    q = make_queries(2, 4, 5, 80, dtype, device)
    k_cache, v_cache = make_storage(2, 1, 290, 80, dtype, device)
    n = on_device([253, 61], device)
    block = kernels.verify_attention(q, k_cache, v_cache, n, invariant=True)
    assert torch.equal(block, steps(q, k_cache, v_cache, n, invariant=True))
    assert torch.equal(block[:, :, :3], kernels.verify_attention(q[:, :, :3], k_cache, v_cache, n, invariant=True))
    # The size of the storage, which sets the number of spans, does not matter either.
    roomy = [torch.cat([c, c], 2).flip(0) for c in (k_cache, v_cache)]
    assert torch.equal(block, kernels.verify_attention(q.flip(0), *roomy, n.flip(0), invariant=True).flip(0))


@pytest.mark.usefixtures("sums_in_order")
def test_groups_of_spans_to_the_last_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of one span, of one group and of several ones; columns on both sides of the end of a group; tiles of 16 columns, in one launch and in two."""
    monkeypatch.setattr(attention, "INVARIANT_SPAN", 64)
    monkeypatch.setattr(attention, "GROUPED", 2)
    q = make_queries(3, 2, 16, 32, torch.bfloat16, device)
    k_cache, v_cache = make_storage(3, 1, 270, 32, torch.bfloat16, device)
    n, wholes = on_device([250, 120, 40], device), []
    for room in (0, attention_tickets(3, 16, 2, 1, 270)):
        workspace = torch.zeros(room, dtype=torch.int32, device=device)
        wholes.append(kernels.verify_attention(q, k_cache, v_cache, n, invariant=True, workspace=workspace))
        assert not workspace.any()
    check(wholes[0], reference.verify_attention(q, k_cache, v_cache, n), torch.bfloat16)
    for row, length in enumerate(n.tolist()):
        one = slice(row, row + 1)
        own = q[one], k_cache[one], v_cache[one], n[one]
        end = -length % 128  # the first column behind a group
        chosen = [j for j in range(16) if PROFILE == "nightly" or j in (0, end - 1, end)]
        alone = steps(*own, chosen, invariant=True, workspace=workspace)
        assert torch.equal(alone, wholes[0][one][:, :, chosen])
    assert torch.equal(wholes[0], wholes[1])


@pytest.mark.parametrize(("dtype", "dim", "width"), some([(torch.float32, 64, 8), (torch.bfloat16, 96, 5)], 1, 2))
def test_one_launch_has_the_bits_of_two(dtype, dim, width, device, monkeypatch) -> None:
    """Tiles whose rows see different numbers of spans, a row that idles, one that leads out, and one that a single block takes."""
    k_cache, v_cache = make_storage(4, 2, 610, dim, dtype, device)
    q = make_queries(4, 8, width, dim, dtype, device)
    n, fed = on_device([600 - width, 254, 2**30, 3], device), on_device([width, width, 1, 0], device)
    options = {"invariant": True}
    two = kernels.verify_attention(q, k_cache, v_cache, n, fed, **options)
    workspace = torch.zeros(attention_tickets(4, width, 8, 2, 610), dtype=torch.int32, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "combine_kernel", None)
        for _ in range(2):
            one = kernels.verify_attention(q, k_cache, v_cache, n, fed, **options, workspace=workspace)
            assert not workspace.any()
            assert one[2].isnan().all()
            assert torch.equal(one[[0, 1, 3]], two[[0, 1, 3]])
        with pytest.raises(TypeError):
            kernels.verify_attention(q, k_cache, v_cache, n, fed, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "dim", "group"),
    [
        (torch.bfloat16, 128, 4),
        (torch.bfloat16, 64, 1),
        (torch.bfloat16, 80, 8),
        (torch.float16, 96, 2),
        (torch.bfloat16, 256, 3),
        (torch.float32, 128, 2),
    ],
)
def test_long_context(dtype: torch.dtype, dim: int, group: int, device: torch.device) -> None:
    """8k keys in the sizes that models have, all tiles of columns, over the ends of spans."""
    n = on_device([8000, 0, 4096, 511], device)
    workspace = torch.zeros(attention_tickets(4, 40, 2 * group, 2, 8192), dtype=torch.int32, device=device)
    k_cache, v_cache = make_storage(4, 2, 8192, dim, dtype, device)
    for width in (1, 5, 40):
        q = make_queries(4, 2 * group, width, dim, dtype, device)
        fed = on_device([width, width // 2, width, 0], device)
        expected = reference.verify_attention(q, k_cache, v_cache, n, fed)
        for options in ({}, {"invariant": True}):
            two = ops.verify_attention(q, k_cache, v_cache, n, fed, **options)
            check(two, expected, dtype)
            one = ops.verify_attention(q, k_cache, v_cache, n, fed, **options, workspace=workspace)
            assert torch.equal(one, two)
            assert not workspace.any()
        check(kernels.verify_attention(q, k_cache, v_cache, n, fed, splits=1), expected, dtype)


@pytest.mark.gpu
def test_invariant_at_8k_keys(device: torch.device) -> None:
    """The interpreter multiplies matrices in its own way; so does a GPU."""
    q = make_queries(4, 32, 9, 128, torch.bfloat16, device)
    k_cache, v_cache = make_storage(4, 8, 8200, 128, torch.bfloat16, device)
    n = on_device([8187, 0, 4090, 253], device)
    block = kernels.verify_attention(q, k_cache, v_cache, n, invariant=True)
    assert torch.equal(block, steps(q, k_cache, v_cache, n, invariant=True))


@pytest.mark.gpu
def test_replay(device: torch.device) -> None:
    """A captured graph acts on the lengths of the replay; storage of more than 2**31 elements is addressed."""
    k_cache = torch.randn(4, 8, 1 << 19, 128, dtype=torch.bfloat16, device=device)
    v_cache = k_cache.flip(-1)
    q = torch.randn(4, 8, 5, 128, dtype=torch.bfloat16, device=device)
    n, fed = on_device([0] * 4, device), on_device([0] * 4, device)
    out = torch.empty_like(q)
    workspace = torch.zeros(attention_tickets(4, 5, 8, 8, 1 << 19), dtype=torch.int32, device=device)
    for options in ({}, {"invariant": True}, {"workspace": workspace}, {"invariant": True, "workspace": workspace}):
        kernels.verify_attention(q, k_cache, v_cache, n, fed, **options, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.verify_attention(q, k_cache, v_cache, n, fed, **options, out=out)
        for lengths, counts in (([8000, 0, 33, 1], [5, 1, 0, 3]), ([1, 7, 700, (1 << 19) - 5], [5, 5, 4, 5])):
            n.copy_(torch.tensor(lengths))
            fed.copy_(torch.tensor(counts))
            q.normal_()
            graph.replay()
            check(out, reference.verify_attention(q, k_cache, v_cache, n, fed), torch.bfloat16)


@pytest.mark.gpu
def test_tickets_beside_other_work(device: torch.device) -> None:
    """One launch has the bits of two at random lengths up to 131,072 keys, while copies keep the memory busy."""
    random, capacity = np.random.default_rng(0), 1 << 17
    k_cache, v_cache = make_storage(1, 8, capacity, 128, torch.bfloat16, device)
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    workspace = torch.zeros(attention_tickets(1, 16, 32, 8, capacity), dtype=torch.int32, device=device)
    side, differ = torch.cuda.Stream(), torch.zeros((), dtype=torch.bool, device=device)
    for trial in range(500):
        if trial % 10 == 0:
            with torch.cuda.stream(side):
                source.clone()
        width = int(random.integers(1, 17))
        length = int(random.integers(0, capacity - width) if trial % 2 else random.integers(0, 9000))
        q, n = make_queries(1, 32, width, 128, torch.bfloat16, device), on_device([length], device)
        two = kernels.verify_attention(q, k_cache, v_cache, n, invariant=True)
        differ |= (two != kernels.verify_attention(q, k_cache, v_cache, n, invariant=True, workspace=workspace)).any()
        differ |= workspace.any()
    assert not differ
