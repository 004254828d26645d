"""New keys and values in storage, element by element against independent loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipespec_kernels import triton as kernels
from tests.trials import trials

from ..storage import CACHE_LAYOUTS, appended, make_storage, on_device

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


@pytest.mark.gpu
def test_replay(device: torch.device) -> None:
    """A captured graph acts on the lengths, counts and states of the replay."""
    k_cache, v_cache = make_storage(4, 8, 1024, 128, torch.bfloat16, "plain", device)
    lengths, counts = (on_device([0] * 4, device) for _ in range(2))
    new = torch.randn(4, 8, 5, 128, device=device).bfloat16()
    kernels.kv_append(new, new, k_cache, v_cache, lengths, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.kv_append(new, new, k_cache, v_cache, lengths, counts)
    for n, m in (([0, 10, 1000, 3], [5, 0, 3, 1]), ([1019, 1, 2, 3], [5, 5, 5, 5])):
        lengths.copy_(torch.tensor(n))
        counts.copy_(torch.tensor(m))
        new.normal_()
        expected = [appended(c, new, n, m) for c in (k_cache, v_cache)]
        graph.replay()
        assert torch.equal(k_cache, expected[0])
        assert torch.equal(v_cache, expected[1])
        assert lengths.tolist() == n
