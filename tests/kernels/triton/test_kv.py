"""Moves of keys and values, element by element against independent loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipespec_kernels import triton as kernels
from tests.trials import trials

from ..storage import CACHE_LAYOUTS, appended, compacted, gathered, make_storage, on_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
shapes = st.tuples(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.sampled_from([1, 3, 16, 20]), st.sampled_from(DTYPES)
)


EXAMPLES = settings(max_examples=trials(ci=6, nightly=15))


@EXAMPLES
@given(shapes, st.sampled_from(CACHE_LAYOUTS), st.data())
def test_append(device, shape, layout, data) -> None:
    batch, heads, capacity, dim, dtype = shape
    width = data.draw(st.integers(0, 9))
    lengths = [data.draw(st.integers(0, capacity)) for _ in range(batch)]
    counts = [data.draw(st.integers(0, min(width, capacity - n))) for n in lengths]
    k_cache, v_cache = make_storage(batch, heads, capacity, dim, dtype, layout, device)
    new = torch.randn(2, batch, width, heads, dim).to(dtype).to(device).transpose(2, 3)
    expected = [appended(c, x, lengths, counts) for c, x in zip((k_cache, v_cache), new, strict=True)]
    n, count = on_device(lengths, device), on_device(counts, device, torch.int64)
    kernels.kv_append(new[0], new[1], k_cache, v_cache, n, count)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    assert n.tolist() == lengths


@EXAMPLES
@given(shapes, st.sampled_from(CACHE_LAYOUTS), st.data())
def test_gather_in_place(device, shape, layout, data) -> None:
    """Any selection: permutations, repeated rows, fewer rows."""
    batch, heads, capacity, dim, dtype = shape
    lengths = [data.draw(st.integers(0, capacity)) for _ in range(batch)]
    rows = data.draw(st.lists(st.integers(0, batch - 1), max_size=batch))
    k_cache, v_cache = make_storage(batch, heads, capacity, dim, dtype, layout, device)
    expected = [gathered(c, lengths, rows) for c in (k_cache, v_cache)]
    kernels.kv_gather(k_cache, v_cache, on_device(lengths, device), on_device(rows, device))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@EXAMPLES
@given(shapes, st.sampled_from(CACHE_LAYOUTS), st.data())
def test_compact_in_place(device, shape, layout, data) -> None:
    batch, heads, capacity, dim, dtype = shape
    begin = [data.draw(st.integers(0, capacity)) for _ in range(batch)]
    keep = [data.draw(st.integers(0, capacity - b)) for b in begin]
    width = max(keep)
    positions = [
        [data.draw(st.integers(b + j, capacity - 1)) for j in range(n)] for b, n in zip(begin, keep, strict=True)
    ]
    k_cache, v_cache = make_storage(batch, heads, capacity, dim, dtype, layout, device)
    expected = [compacted(c, positions, begin) for c in (k_cache, v_cache)]
    table = torch.full((width, batch), -1, device=device).t()  # dropped positions are not read
    for row, kept in enumerate(positions):
        table[row, : len(kept)] = torch.tensor(kept, dtype=table.dtype)
    kernels.kv_compact(k_cache, v_cache, table, on_device(begin, device), on_device(keep, device))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_moves_over_several_tiles(device: torch.device) -> None:
    """More positions than a tile holds; more elements than a block of threads owns; many rows."""
    k_cache, v_cache = make_storage(1, 1, 150, 128, torch.float16, "plain", device)
    positions = [sorted(torch.randperm(145, generator=torch.Generator().manual_seed(0))[:120].tolist())]
    positions[0] = [p + 5 for p in positions[0]]
    expected = [compacted(c, positions, [5]) for c in (k_cache, v_cache)]
    table, first, kept = (on_device(x, device) for x in (positions, [5], [120]))
    kernels.kv_compact(k_cache, v_cache, table, first, kept)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])

    batch = 70
    generator = torch.Generator().manual_seed(1)
    k_cache, v_cache = make_storage(batch, 1, 9, 20, torch.float32, "plain", device)
    lengths = torch.randint(0, 10, (batch,), generator=generator).tolist()
    rows = torch.randperm(batch, generator=generator).tolist()
    expected = [gathered(c, lengths, rows) for c in (k_cache, v_cache)]
    kernels.kv_gather(k_cache, v_cache, on_device(lengths, device), on_device(rows, device))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int32), (torch.int64, torch.int32), (torch.int32, torch.int64)])
def test_truncate(dtypes: tuple[torch.dtype, torch.dtype], device: torch.device) -> None:
    lengths = torch.tensor([5, 5, 5, 5, 0], dtype=dtypes[0], device=device)
    to = torch.tensor([3, 9, -4, 5, 2], dtype=dtypes[1], device=device)
    kernels.kv_truncate(lengths, to)
    assert lengths.tolist() == [3, 5, 0, 5, 0]
    many = torch.arange(1500, device=device)
    kernels.kv_truncate(many, torch.full_like(many, 700))
    assert many.tolist() == [min(n, 700) for n in range(1500)]


def test_numbers_that_lead_out_move_nothing(device: torch.device) -> None:
    """The host does not read such numbers. The row stays as it is, and the other rows are processed."""

    def storage() -> tuple[Tensor, Tensor]:
        return make_storage(6, 2, 8, 16, torch.float32, "plain", device)

    huge = 2**63 - 1
    for lengths, counts in (
        ([-1, 8, 5, 2, huge, 3], [1, 1, 4, -1, 1, 2]),
        ([9, 3, 3, 3, 3, 3], [0, 5, 6, -9, huge, 2]),
    ):
        k_cache, v_cache = storage()
        before = k_cache.clone()
        new = torch.randn(6, 2, 4, 16, device=device)
        kernels.kv_append(
            new, new, k_cache, v_cache, on_device(lengths, device, torch.int64), on_device(counts, device, torch.int64)
        )
        assert torch.equal(k_cache[:5], before[:5])
        assert torch.equal(k_cache[5, :, 3:5], new[5, :, :2])
        kernels.kv_compact(
            k_cache,
            v_cache,
            on_device([[7, 7, 7, 7]] * 6, device),
            *(on_device(x, device, torch.int64) for x in (lengths, counts)),
        )
        assert torch.equal(k_cache[:5], before[:5])

    k_cache, v_cache = storage()
    before = k_cache.clone()
    table = on_device([[3, 2], [1, 8], [0, 3], [1, -1], [huge, 2], [1, 2]], device, torch.int64)
    kernels.kv_compact(k_cache, v_cache, table, on_device([1] * 6, device), on_device([2] * 6, device))
    assert torch.equal(k_cache[1:], before[1:])  # too high, moving up, negative, far out, nothing to move
    assert torch.equal(k_cache[0, :, 1:3], before[0, :, [3, 2]])

    k_cache, v_cache = storage()
    before = k_cache.clone()
    kernels.kv_gather(k_cache, v_cache, on_device([8] * 6, device), on_device([-1, 6, 3, 99, 4, 0], device))
    assert torch.equal(k_cache, before[[0, 1, 3, 3, 4, 0]])


@pytest.mark.gpu
def test_replay(device: torch.device) -> None:
    """A captured graph acts on the lengths, counts and states of the replay."""
    k_cache, v_cache = make_storage(4, 8, 1024, 128, torch.bfloat16, "plain", device)
    lengths, counts, to = (on_device([0] * 4, device) for _ in range(3))
    new = torch.randn(4, 8, 5, 128, device=device).bfloat16()
    kernels.kv_append(new, new, k_cache, v_cache, lengths, counts)
    kernels.kv_truncate(lengths, to)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.kv_append(new, new, k_cache, v_cache, lengths, counts)
        kernels.kv_truncate(lengths, to)
    for n, m in (([0, 10, 1000, 3], [5, 0, 3, 1]), ([1019, 1, 2, 3], [5, 5, 5, 5])):
        lengths.copy_(torch.tensor(n))
        counts.copy_(torch.tensor(m))
        to.fill_(2)
        new.normal_()
        expected = [appended(c, new, n, m) for c in (k_cache, v_cache)]
        graph.replay()
        assert torch.equal(k_cache, expected[0])
        assert torch.equal(v_cache, expected[1])
        assert lengths.tolist() == [min(x, 2) for x in n]
