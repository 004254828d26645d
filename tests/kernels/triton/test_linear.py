"""Products of few rows: a row's bits depend on that row alone, whatever the number of rows, at shapes that no tile divides; and lengths that lead out of the storage."""

from typing import Any

import pytest
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels.triton import linear

from ..cases import close_product
from .conftest import some

SHAPES = [(20, 40), (33, 600), (24, 1100), (32, 512)]
"""Rows of weights, and their summands: parts of a step, steps and a part of one, whole steps."""
ROWS = (1, 5, 8, 9, 16)
HOW = [{}, {"norm": True, "residual": True}, {"norm": True, "one_plus_weight": True, "activation": "gelu_tanh"}]
HUGE = 2**63 - 1


pytestmark = pytest.mark.usefixtures("sums_in_order")


class Given:
    """Tensors of a product. ``shape``: of the weights."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._random = torch.Generator().manual_seed(sum(shape))
        self._to = device, dtype
        self.x = self.normal(16, shape[1])
        self.weight = self.normal(*shape) * shape[1] ** -0.5
        self.bias, self.norm, self.residual = self.normal(shape[0]), self.normal(shape[1]), self.normal(16, shape[0])

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(*self._to)

    def __call__(self, product: Any, rows: slice, how: dict[str, Any]) -> torch.Tensor:
        options = dict(how)
        for name, values in (("norm", self.norm), ("residual", self.residual[rows])):
            if options.get(name):
                options[name] = values
        n = len(self.weight) - len(self.weight) % 2 if "activation" in how else len(self.weight)
        return product(self.x[rows], self.weight[:n], self.bias[:n], **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_its_own_bits(shape: tuple[int, int], dtype: torch.dtype, how: dict, device: torch.device) -> None:
    given = Given(shape, dtype, device)
    whole = given(ops.linear_small, slice(16), how)
    close_product(whole.cpu(), given(reference.linear_small, slice(16), how).cpu(), {})
    for rows in some(ROWS, shape[0] % 3, 3):
        for begin in (0, 16 - rows):
            part = slice(begin, begin + rows)
            assert torch.equal(given(ops.linear_small, part, how), whole[part]), (rows, begin)


def test_blocks_of_more_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrices have larger tiles: other code, and sums of its own order."""
    monkeypatch.setattr(linear, "MANY", 32)
    given = Given((100, 600), torch.bfloat16, device)
    assert linear.tiles_for(100, 2)[0].rows == 32
    for how in HOW:
        whole = given(ops.linear_small, slice(16), how)
        close_product(whole.cpu(), given(reference.linear_small, slice(16), how).cpu(), {})
        assert torch.equal(given(ops.linear_small, slice(3, 7), how), whole[3:7])


def test_other_rows_do_not_matter(device: torch.device) -> None:
    """Not even NaNs and infinities."""
    given = Given((20, 600), torch.bfloat16, device)
    how = HOW[1]
    before = given(ops.linear_small, slice(6), how)
    given.x[2], given.x[4] = torch.nan, torch.inf
    after = given(ops.linear_small, slice(6), how)
    assert torch.equal(after[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    assert after[[2, 4]].isnan().all()


def test_columns_of_a_step_have_the_bits_of_single_ones(device: torch.device) -> None:
    """Queries, keys and values of four columns, and column by column."""
    given = Given((3 * 24, 600), torch.bfloat16, device)
    tables = [given.normal(12, 10) for _ in range(2)]
    lengths = torch.tensor([3, 0], device=device)
    stored = [given.normal(2, 1, 9, 24) for _ in range(2)]
    apart = [cache.clone() for cache in stored]
    x, options = given.x[:8].view(2, 4, 600), {"norm": given.norm}
    whole = ops.qkv_append(x, given.weight, given.bias, *tables, *stored, lengths, **options)
    for j in range(4):
        one = ops.qkv_append(
            x[:, j : j + 1].contiguous(), given.weight, given.bias, *tables, *apart, lengths + j, **options
        )
        assert torch.equal(one, whole[:, :, j : j + 1])
    for ours, wanted in zip(apart, stored, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 1, 0], [2, 0, 1]])
def test_steps_without_work_and_padding(counts: list[int], device: torch.device) -> None:
    """Where no row has a new token nothing is written. Else all is as without counts, but padding does not go to storage."""
    given = Given((4 * 16, 40), torch.float32, device)
    query_lens, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in (counts, [1, 5, 0]))
    tables, stored = ([given.normal(*shape) for _ in range(2)] for shape in ((9, 16), (3, 1, 8, 16)))
    before, whole = ([cache.clone() for cache in stored] for _ in range(2))
    x, junk = given.x[:6].view(3, 2, 40), torch.full((6, 64), 7.0, device=device)
    wanted = ops.linear_small(given.x[:6], given.weight)
    found = ops.linear_small(given.x[:6], given.weight, query_lens=query_lens, out=junk.clone())
    assert torch.equal(found, wanted if any(counts) else junk)
    queries = ops.qkv_append(x, given.weight, None, *tables, *whole, lengths)
    out = junk[:, :32].reshape(3, 2, 2, 16)
    ops.qkv_append(x, given.weight, None, *tables, *stored, lengths, query_lens, out=out)
    for row, (n, fed) in enumerate(zip(lengths.tolist(), counts, strict=True)):
        assert torch.equal(out[row, :, :fed], queries[row, :, :fed])
        for own, old, all_new in zip(stored, before, whole, strict=True):
            old[row, :, n : n + fed] = all_new[row, :, n : n + fed]
            assert torch.equal(own[row], old[row])
    assert any(counts) or (out == 7).all()


@pytest.mark.parametrize("lengths", [[-1, 3, 7], [HUGE, 3, 9], [2, 3, -HUGE]])
def test_rows_that_lead_out(lengths: list[int], device: torch.device) -> None:
    """Their queries are NaN, and nothing of theirs is written. Positions must be in the tables, too."""
    given = Given((4 * 16, 40), torch.float32, device)
    tables = [given.normal(5, 16) for _ in range(2)]
    stored = [given.normal(3, 1, 8, 16) for _ in range(2)]
    before = [cache.clone() for cache in stored]
    x, numbers = given.x[:6].view(3, 2, 40), torch.tensor(lengths, device=device)
    out = ops.qkv_append(x, given.weight, None, *tables, *stored, numbers)
    good = [0 <= n <= 6 for n in lengths]
    assert [bool(row.isnan().all()) for row in out] == [not fits for fits in good]
    for row, n in enumerate(lengths):
        if good[row]:
            assert not out[row].isnan().any()
            before[1][row, 0, n : n + 2] = x[row] @ given.weight[-16:].T
    torch.testing.assert_close(stored[1], before[1])
    changed = (stored[0] != before[0]).any(-1)[:, 0]
    assert changed.sum() == 2 * sum(good)
    beyond = ops.qkv_append(x, given.weight, None, *tables, *stored, torch.tensor([4, 5, 0], device=device))
    assert [bool(column.isnan().all()) for column in beyond.transpose(1, 2).flatten(0, 1)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
