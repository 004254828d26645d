"""The kernels of a layer: numbers on the device that lead out of the storage, which the host does not read, and rows longer than a tile."""

from typing import Any

import pytest
import torch

from pipespec_kernels import ops, reference
from pipespec_kernels import triton as kernels

from ..cases import Arguments

HUGE, ROWS, CAPACITY = 2**63 - 1, 6, 8
LEADING_OUT = [([-1, 6, 5, 3, HUGE, 3], [1, 3, 4, -1, 1, 2]), ([9, 3, 3, 3, 3, 3], [1, 9, 6, -9, HUGE, 2])]
"""Lengths and counts of storage of 8 places; the last row is right."""


@pytest.fixture
def given(device: torch.device) -> Arguments:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    q, keys, values = normal(ROWS, 4, 3, 16).split([2, 1, 1], 1)
    tables = {name: normal(CAPACITY + 3, 8) for name in ("cos", "sin")}
    return {
        "q": q,
        "keys": keys,
        "values": values,
        **{name: normal(ROWS, 1, CAPACITY, 16) for name in ("k_cache", "v_cache")},
    } | tables


def call(name: str, given: Arguments, **numbers: Any) -> Any:
    own = {"kv_append": ("keys", "values"), "verify_attention": ("q",)}.get(name, ("q", "keys", "values", "cos", "sin"))
    return getattr(ops, name)(**{key: given[key] for key in (*own, "k_cache", "v_cache")}, **numbers)


@pytest.mark.parametrize("name", ["kv_append", "verify_attention", "rope_append"])
@pytest.mark.parametrize(("lengths", "counts"), LEADING_OUT)
def test_rows_that_lead_out(
    name: str, lengths: list[int], counts: list[int], given: Arguments, device: torch.device
) -> None:
    count = "query_lens" if name == "verify_attention" else "n_new"
    numbers = {key: torch.tensor(x, device=device) for key, x in (("lengths", lengths), (count, counts))}
    before = {key: given[key].clone() for key in ("k_cache", "v_cache")}
    got = call(name, given, **numbers)
    if got is not None:
        assert got[:5].isnan().all()
        assert not got[5].isnan().any()
        assert not got[5, :, 2:].any()
    for key, cache in before.items():
        assert torch.equal(given[key][:5], cache[:5])
    if name != "verify_attention":
        assert torch.equal(given["v_cache"][5, :, 3:5], given["values"][5, :, :2])
    else:
        alone = (given[key][5:].cpu() for key in ("q", "k_cache", "v_cache"))
        expected = reference.verify_attention(*alone, torch.tensor([3]), torch.tensor([2]))
        torch.testing.assert_close(got[5:].cpu().double(), expected, rtol=1e-5, atol=1e-5)
        for options in ({"splits": 2}, {"invariant": True}):
            own = (given["q"], given["k_cache"], given["v_cache"], numbers["lengths"], numbers[count])
            assert kernels.verify_attention(*own, **options)[:5].isnan().all()
    if device.type == "cpu":
        with pytest.raises(ValueError, match="row 0: "):
            call(name, given, **numbers, check_counts=True)


def test_positions_outside_of_the_tables(given: Arguments, device: torch.device) -> None:
    """They affect only their own columns."""
    before, lengths = given["v_cache"].clone(), torch.zeros(ROWS, dtype=torch.int32, device=device)
    positions = torch.tensor([[0, 11, 1], [-1, 2, 3], [HUGE, 10, -HUGE]] * 2, device=device)
    wrong = torch.tensor([[0, 1, 0], [1, 0, 0], [1, 0, 1]] * 2, device=device).bool()
    got = call("rope_append", given, lengths=lengths, positions=positions)
    assert torch.equal(got.isnan().all(3), wrong[:, None].expand(ROWS, 2, 3))
    assert not got.transpose(1, 2)[~wrong].isnan().any()
    kept = (given["v_cache"] == before).all(3)[:, 0]
    assert torch.equal(kept[:, :3], wrong)
    assert kept[:, 3:].all()
    # By default there are as many positions as the tables have.
    short = given | {name: given[name][:6] for name in ("cos", "sin")}
    assert call("rope_append", short, lengths=lengths + 4).isnan().all(3)[0, 0].tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_of_rows_longer_than_a_tile(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read twice."""
    monkeypatch.setattr("pipespec_kernels.triton.norm.MAX_AT_ONCE", 32)
    x, residual = torch.randint(-8, 9, (2, 3, 100), generator=torch.Generator().manual_seed(1)).to(dtype)
    for size in (32, 33, 100):
        weight = torch.arange(size).to(dtype)
        expected = reference.add_rms_norm(x[:, :size], residual[:, :size], weight, 1e-5)
        got = ops.add_rms_norm(x[:, :size].to(device), residual[:, :size].to(device), weight.to(device), 1e-5)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
