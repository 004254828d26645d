"""The operations of a layer on the kernels, against the reference: bit for bit except after a sum or an exponential."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pipespec_kernels import ops, reference
from tests.trials import trials

from ..layers import EPS, STEP, check_rows_are_independent, check_views_of_rows, close, exact_rows, normal, rope_case
from ..storage import CACHE_LAYOUTS
from .conftest import some

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Hypothesis does not shrink a failing example, which would take minutes in the interpreter.
EXAMPLES = settings(max_examples=trials(ci=8, nightly=30), phases=[Phase.explicit, Phase.generate])
norm = importlib.import_module("pipespec_kernels.triton.norm")


def moved(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for name, x in case.items()}


@EXAMPLES
@given(
    st.integers(0, 4),
    st.sampled_from([1, 2, 7, 33, 96, 100, 300]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_add_rms_norm(device, count, hidden, dtype, with_residual, one_plus, with_bias, long, seed) -> None:
    """``long``: rows that do not fit into a tile."""
    exact = seed % 2 == 0
    if exact:
        x, residual = exact_rows(seed, count, hidden, dtype)
    else:
        x, residual = (normal(seed + i, count, hidden, dtype=dtype) for i in range(2))
    residual = residual if with_residual else None
    weight = normal(seed + 2, hidden, dtype=dtype)
    bias = normal(seed + 3, hidden, dtype=dtype) if with_bias else None
    expected = reference.add_rms_norm(x, residual, weight, EPS, one_plus, bias)
    there = [None if t is None else t.to(device, copy=True) for t in (x, residual, weight, bias)]
    options = {"one_plus_weight": one_plus, "bias": there[3]}
    with pytest.MonkeyPatch.context() as patch:
        if long:
            patch.setattr(norm, "MOST_AT_ONCE", 32)
        normed, total = ops.add_rms_norm(there[0], there[1], there[2], EPS, **options)
        if exact:
            assert torch.equal(normed.cpu(), expected[0])
        else:
            # Where weight and bias cancel, the rounding error remains.
            close(normed, expected[0], near_zero=4 * STEP[dtype] if with_bias else 0)
        assert torch.equal(total.cpu(), expected[1])
        assert (total is there[0]) == (residual is None)
        places = {"out": there[1], "residual_out": there[0]} if with_residual else {"out": there[0]}
        again = ops.add_rms_norm(there[0], there[1], there[2], EPS, **options, **places)
    assert torch.equal(again[0], normed)
    assert torch.equal(again[1], again[0] if residual is None else total)


@EXAMPLES
@given(
    st.integers(0, 4),
    st.sampled_from([1, 2, 7, 33, 1500]),
    st.sampled_from(DTYPES),
    st.sampled_from(["silu", "gelu_tanh", "gelu"]),
    st.integers(0, 2**31),
)
def test_silu_mul(device, count, size, dtype, activation, seed) -> None:
    gate_up = normal(seed, count, 2 * size, dtype=dtype) * 4
    if count:
        gate_up[0, 0] = [0.0, -100.0, 100.0][seed % 3]
    got = ops.silu_mul(gate_up.to(device), activation=activation)
    # In float32, 1 + tanh and 1 + erf lose values below a millionth.
    close(got, reference.silu_mul(gate_up, activation), near_zero=1e-5 if dtype is torch.float32 else 2**-12)


def test_nan_and_infinity_stay(device: torch.device) -> None:
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [0.0, 0.0]], device=device)
    for dtype in DTYPES:
        normed, total = ops.add_rms_norm(
            x.to(dtype), torch.zeros_like(x, dtype=dtype), torch.ones(2, dtype=dtype, device=device), EPS
        )
        assert normed.isnan().tolist() == [[True, True], [True, False], [False, False]]
        torch.testing.assert_close(total, x.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert ops.silu_mul(x.to(dtype)).isnan().tolist() == [[True], [False], [False]]


def test_rows_do_not_depend_on_the_batch(device: torch.device) -> None:
    for dtype in DTYPES:
        check_rows_are_independent(dtype, 200, device)


def test_views_of_rows(device: torch.device) -> None:
    check_views_of_rows(device)


@EXAMPLES
@given(
    st.sampled_from([(64, 64), (80, 80), (80, 32), (96, 96), (128, 128), (256, 64), (256, 256), (2, 2), (9, 4)]),
    st.sampled_from(DTYPES),
    st.sampled_from(CACHE_LAYOUTS),
    st.sampled_from([(1, 1), (6, 2), (3, 3)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_rope_append(device, dims, dtype, layout, heads, norms, positions, float32, seed) -> None:
    width, capacity = seed % 4, 4 + seed % 5
    options: dict[str, Any] = {"layout": layout, "norms": norms, "positions": positions}
    case = rope_case(
        seed, 2, heads, width, capacity, *dims, dtype, tables=torch.float32 if float32 else None, **options
    )
    case["one_plus_weight"] = seed % 3 == 0
    there = moved(case, device)
    there["k_cache"], there["v_cache"] = (
        torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(x)
        for x in (case["k_cache"], case["v_cache"])
    )
    before = there["k_cache"].clone()
    got = ops.rope_append(**there)
    expected = reference.rope_append(**case)
    assert got.transpose(1, 2).is_contiguous()
    if norms:
        # The rotation mixes the norm's rounding differences.
        mixed = 8 * STEP[dtype]
        close(got, expected, near_zero=mixed)
        close(there["k_cache"], case["k_cache"], near_zero=mixed)
        for row, (n, count) in enumerate(zip(case["lengths"].tolist(), case["n_new"].tolist(), strict=True)):
            assert torch.equal(there["k_cache"][row, :, :n], before[row, :, :n])
            assert torch.equal(there["k_cache"][row, :, n + count :], before[row, :, n + count :])
            assert not got[row, :, count:].any()
    else:
        assert torch.equal(got.cpu(), expected)
        assert torch.equal(there["k_cache"].cpu(), case["k_cache"])
    assert torch.equal(there["v_cache"].cpu(), case["v_cache"])
    assert there["lengths"].tolist() == case["lengths"].tolist()


@pytest.mark.parametrize("dim", some([64, 80, 96, 128, 256], 1, 2))
def test_columns_and_rows_by_themselves_have_the_same_bits(dim: int, device: torch.device) -> None:
    """A verification equals decoding steps, in any order of the rows, with norms."""
    case = moved(rope_case(dim, 3, (4, 2), 2, 8, dim, dim, torch.bfloat16, norms=True), device)
    case["lengths"] = torch.tensor([4, 0, 5], device=device)
    case["n_new"] = torch.tensor([2, 1, 2], device=device)
    stored = case["k_cache"].clone(), case["v_cache"].clone()
    whole = ops.rope_append(**case)
    order = torch.tensor([2, 0, 1], device=device)
    by_row = ("q", "keys", "values", "lengths", "n_new")
    other = case | {name: case[name][order] for name in by_row}
    other |= {"k_cache": stored[0][order], "v_cache": stored[1][order]}
    assert torch.equal(ops.rope_append(**other), whole[order])
    assert torch.equal(other["k_cache"], case["k_cache"][order])
    for j in range(2):
        columns = case | {name: case[name][:, :, j : j + 1] for name in ("q", "keys", "values")}
        columns |= {"k_cache": stored[0], "v_cache": stored[1], "lengths": case["lengths"] + j}
        columns["n_new"] = (case["n_new"] > j).int()
        assert torch.equal(ops.rope_append(**columns), whole[:, :, j : j + 1])
    assert torch.equal(stored[0], case["k_cache"])
    assert torch.equal(stored[1], case["v_cache"])


def test_numbers_that_lead_out_write_nothing(device: torch.device) -> None:
    """The host does not read such numbers. Queries are NaN, storage does not change, and the other rows are processed."""
    huge = 2**63 - 1
    case = moved(rope_case(0, 6, (2, 1), 3, 8, 16, 8, torch.float32), device)
    for lengths, counts in (
        ([-1, 6, 3, huge, 9, 5], [1, 3, -1, 1, 0, 2]),
        ([2, 2, 2, 2, 2, 5], [4, huge, -huge, 7, 9, 2]),
    ):
        there = moved(case, device) | {
            name: torch.tensor(x, device=device) for name, x in (("lengths", lengths), ("n_new", counts))
        }
        got = ops.rope_append(**there)
        assert got[:5].isnan().all()
        assert not got[5].isnan().any()
        assert not got[5, :, 2:].any()
        assert torch.equal(there["k_cache"][:5], case["k_cache"][:5])
        assert torch.equal(there["v_cache"][:5], case["v_cache"][:5])
        assert torch.equal(there["v_cache"][5, :, 5:7], case["values"][5, :, :2])
        if device.type == "cpu":
            with pytest.raises(ValueError, match="row 0: "):
                ops.rope_append(**there, check_counts=True)
    # Positions outside the tables affect only their own columns.
    there = moved(case, device)
    there |= {"lengths": torch.zeros(6, dtype=torch.int32, device=device), "n_new": None}
    there["positions"] = torch.tensor([[0, 11, 1], [-1, 2, 3], [huge, 10, -huge]] * 2, device=device)
    got = ops.rope_append(**there)
    wrong = torch.tensor([[0, 1, 0], [1, 0, 0], [1, 0, 1]] * 2, device=device).bool()
    assert torch.equal(got.isnan().all(3), wrong[:, None].expand(6, 2, 3))
    assert not got.transpose(1, 2)[~wrong].isnan().any()
    kept = (there["v_cache"] == case["v_cache"]).all(3)[:, 0]
    assert torch.equal(kept[:, :3], wrong)
    assert kept[:, 3:].all()
    # As many positions as the tables have, by default.
    there = moved(case, device) | {"lengths": torch.full((6,), 4, device=device), "n_new": None}
    there |= {"cos": case["cos"][:6], "sin": case["sin"][:6]}
    assert ops.rope_append(**there).isnan().all(3)[0, 0].tolist() == [False, False, True]


def test_nothing_to_do(device: torch.device) -> None:
    for batch, width in ((0, 3), (2, 0)):
        case = moved(rope_case(0, batch, (2, 1), width, 8, 16, 16, torch.float32), device)
        before = case["k_cache"].clone()
        assert ops.rope_append(**case).shape == (batch, 2, width, 16)
        assert torch.equal(case["k_cache"], before)
    weight = torch.ones(4, device=device)
    assert ops.add_rms_norm(torch.ones(0, 4, device=device), None, weight, EPS)[0].shape == (0, 4)
    assert ops.silu_mul(torch.ones(0, 4, device=device)).shape == (0, 2)


@pytest.mark.gpu
def test_replay(device: torch.device) -> None:
    """A captured graph acts on the numbers of the replay."""
    case = moved(rope_case(0, 4, (8, 2), 5, 64, 128, 128, torch.bfloat16), device)
    x, weight = normal(1, 4, 256, device=device), normal(2, 256, device=device)
    residual, half = normal(3, 4, 256, device=device), torch.empty(4, 128, device=device)
    out, normed = torch.empty_like(case["q"]), torch.empty_like(x)

    def step() -> None:
        ops.rope_append(**case, out=out)
        ops.add_rms_norm(x, residual, weight, EPS, out=normed, residual_out=residual)
        ops.silu_mul(normed, out=half)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths, counts in (([0, 3, 59, 64], [5, 0, 5, 0]), ([1, 1, 1, 1], [1, 2, 3, 4])):
        case["lengths"].copy_(torch.tensor(lengths))
        case["n_new"].copy_(torch.tensor(counts))
        expected = {name: t.cpu().clone() if isinstance(t, torch.Tensor) else t for name, t in case.items()}
        q = reference.rope_append(**expected)
        total = x + residual
        graph.replay()
        assert torch.equal(out.cpu(), q)
        assert torch.equal(case["k_cache"].cpu(), expected["k_cache"])
        assert torch.equal(residual, total)
        close(normed, reference.add_rms_norm(total.cpu(), None, weight.cpu(), EPS)[0])
