"""The public operations of a layer, on the CPU: equality with transformers' modules, independence of rows, arguments that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import ops, reference
from tests.trials import trials

from .layers import EPS, check_rows_are_independent, check_views_of_rows, close, normal, rope_case
from .storage import CACHE_LAYOUTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EXAMPLES = settings(max_examples=trials(ci=25, nightly=150))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_the_oracle_is_transformers(dtype: torch.dtype) -> None:
    """Bit for bit, with the roundings of its modules."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    phi = pytest.importorskip("transformers.models.phi3.modeling_phi3")
    activations = pytest.importorskip("transformers.activations").ACT2FN

    x, residual, weight = (normal(i, *shape, dtype=dtype) for i, shape in enumerate([(2, 3, 48), (2, 3, 48), (48,)]))
    for module, one_plus in ((llama.LlamaRMSNorm(48, EPS), False), (gemma.Gemma2RMSNorm(48, EPS), True)):
        module.weight = torch.nn.Parameter(weight)
        with torch.no_grad():
            normed, total = reference.add_rms_norm(x, residual, weight, EPS, one_plus)
            assert torch.equal(total, residual + x)
            assert torch.equal(normed, module(total))
    for name, theirs in (("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")):
        assert torch.equal(reference.silu_mul(x, name), activations[theirs](x[..., :24]) * x[..., 24:])

    for rotary in (16, 12):
        case = rope_case(0, 3, (4, 2), 5, 9, 16, rotary, dtype)
        case["n_new"], case["lengths"] = torch.full((3,), 5), torch.tensor([4, 0, 2])
        at = case["lengths"][:, None] + torch.arange(5)
        q, keys = phi.apply_rotary_pos_emb(case["q"], case["keys"], case["cos"][at], case["sin"][at])
        assert torch.equal(reference.rope_append(**case), q)
        for row, n in enumerate(case["lengths"].tolist()):
            assert torch.equal(case["k_cache"][row, :, n : n + 5], keys[row])
            assert torch.equal(case["v_cache"][row, :, n : n + 5], case["values"][row])


@EXAMPLES
@given(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 2, 7, 33, 100])),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_add_rms_norm(shape, dtype, with_residual, one_plus, with_bias, seed) -> None:
    x, weight = normal(seed, *shape, dtype=dtype), normal(seed + 1, shape[-1], dtype=dtype)
    residual = normal(seed + 2, *shape, dtype=dtype) if with_residual else None
    bias = normal(seed + 3, shape[-1], dtype=dtype) if with_bias else None
    options = {"one_plus_weight": one_plus, "bias": bias}
    expected = reference.add_rms_norm(x, residual, weight, EPS, one_plus, bias)
    normed, total = ops.add_rms_norm(x, residual, weight, EPS, **options)
    close(normed, expected[0])
    assert torch.equal(total, expected[1])
    assert (total is x) == (residual is None)
    if residual is None:
        assert ops.add_rms_norm(x, None, weight, EPS, out=x, **options)[0] is x
        assert torch.equal(x, normed)
        return
    # In place, either way around.
    for places in ((0, 1), (1, 0)):
        given_ = x.clone(), residual.clone()
        out, residual_out = given_[places[0]], given_[places[1]]
        got = ops.add_rms_norm(*given_, weight, EPS, out=out, residual_out=residual_out, **options)
        assert got[0] is out
        assert got[1] is residual_out
        assert torch.equal(out, normed)
        assert torch.equal(residual_out, total)


@EXAMPLES
@given(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 2, 7, 33, 100])),
    st.sampled_from(DTYPES),
    st.sampled_from(["silu", "gelu_tanh", "gelu"]),
    st.integers(0, 2**31),
)
def test_silu_mul(shape, dtype, activation, seed) -> None:
    gate_up = normal(seed, *shape[:2], 2 * shape[2], dtype=dtype) * 4
    expected = reference.silu_mul(gate_up, activation)
    got = ops.silu_mul(gate_up, activation=activation)
    close(got, expected, 1e-6)
    out = torch.empty(shape, dtype=dtype)
    assert ops.silu_mul(gate_up, activation=activation, out=out) is out
    assert torch.equal(out, got)


@EXAMPLES
@given(
    st.sampled_from([(64, 64), (80, 80), (80, 32), (96, 96), (128, 128), (256, 64), (264, 264), (2, 2), (9, 4)]),
    st.sampled_from(DTYPES),
    st.sampled_from(CACHE_LAYOUTS),
    st.sampled_from([(1, 1), (6, 2), (3, 3)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_rope_append(dims, dtype, layout, heads, norms, positions, float32, seed) -> None:
    """Row by row and column by column: no result depends on other rows or columns, and nothing else is written."""
    width, capacity = seed % 5, 4 + seed % 7
    tables = torch.float32 if float32 and dtype is not torch.float64 else None
    options = {"layout": layout, "tables": tables, "norms": norms, "positions": positions}
    case = rope_case(seed, 3, heads, width, capacity, *dims, dtype, **options)
    before = case["k_cache"].clone(), case["v_cache"].clone()
    got = ops.rope_append(**case)
    assert (got.shape, got.dtype) == (case["q"].shape, dtype)
    assert got.transpose(1, 2).is_contiguous()
    rows = list(zip(case["lengths"].tolist(), case["n_new"].tolist(), strict=True))
    for row, (n, count) in enumerate(rows):
        for j in range(count):
            alone = {
                name: x[row : row + 1, :, j : j + 1] for name, x in case.items() if name in ("q", "keys", "values")
            }
            alone |= {name: torch.zeros_like(before[0][:1]) for name in ("k_cache", "v_cache")}
            alone |= {"lengths": case["lengths"][row : row + 1] + j, "n_new": None}
            if positions:
                alone["positions"] = case["positions"][row : row + 1, j : j + 1]
            assert torch.equal(ops.rope_append(**(case | alone))[0, :, 0], got[row, :, j])
            before[0][row, :, n + j] = alone["k_cache"][0, :, n + j]
            before[1][row, :, n + j] = case["values"][row, :, j]
        assert not got[row, :, count:].any()
    assert torch.equal(case["k_cache"], before[0])
    assert torch.equal(case["v_cache"], before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    check_rows_are_independent(dtype, 1000, torch.device("cpu"))


def test_views_of_rows() -> None:
    """Rows without a common stride are refused."""
    check_views_of_rows(torch.device("cpu"))
    wide, weight = normal(1, 4, 5, 60), normal(2, 20)
    for refused in (wide.transpose(0, 1)[..., :20], wide[:, ::2, :20].flip(0)[:, :2]):
        with pytest.raises(ValueError, match="x must have one distance between its rows"):
            ops.add_rms_norm(refused, None, weight, EPS)


X = torch.ones(2, 8)
W = torch.ones(8)
GATE = torch.ones(2, 16)
BAD_ROWS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("norm", TypeError, "x must be a tensor, got list", {"x": [1.0]}),
    ("norm", ValueError, "x must be contiguous in its last", {"x": torch.ones(8, 2).t()}),
    ("norm", ValueError, "residual must have shape", {"residual": X[:1]}),
    ("norm", ValueError, "residual must be on cpu like x", {"residual": X.to("meta")}),
    ("norm", ValueError, "eps must be finite and not negative, is -1", {"eps": -1}),
    ("norm", ValueError, "out must have shape", {"out": X[:1]}),
    ("norm", ValueError, "out is written to", {"out": torch.zeros(1, 8).expand(2, 8)}),
    ("norm", ValueError, "residual_out is for a sum", {"residual": None}),
    ("silu", ValueError, "gate_up must have an even number", {"gate_up": torch.ones(2, 15)}),
    ("silu", ValueError, "activation must be one of silu, gelu_tanh, gelu, is 'relu'", {"activation": "relu"}),
    ("silu", TypeError, "out must be float32", {"out": X.double()}),
]


@pytest.mark.parametrize("which", range(len(BAD_ROWS)))
def test_bad_rows_touch_nothing(which: int) -> None:
    of, error, message, change = BAD_ROWS[which]
    out, total = torch.full((2, 8), -7.0), torch.full((2, 8), -7.0)
    if of == "norm":
        good: dict[str, Any] = {"x": X, "residual": X, "weight": W, "eps": EPS, "out": out, "residual_out": total}
        operation: Any = ops.add_rms_norm
    else:
        good, operation = {"gate_up": GATE, "out": out}, ops.silu_mul
    with pytest.raises(error, match=message):
        operation(**(good | change))
    assert (out == -7).all()
    assert (total == -7).all()
    operation(**good)
    assert not (out == -7).any()


TABLE = torch.ones(9, 16)
BAD_ROPE: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "q must be a tensor", {"q": 3}),
    (ValueError, "v_cache is written to", {"v_cache": torch.zeros(1, 2, 8, 16).expand(2, 2, 8, 16)}),
    (ValueError, r"an even R of at most 16, got shape \(9, 18\)", dict.fromkeys(("cos", "sin"), torch.ones(9, 18))),
    (TypeError, "positions must be int32 or int64", {"positions": torch.ones(2, 3)}),
    (ValueError, "go together", {"q_norm": torch.ones(16)}),
    (ValueError, "eps must be finite", {"eps": math.inf}),
    (ValueError, "row 1: need 0 <= n_new <= 3, is 4", {"n_new": torch.tensor([3, 4])}),
    (ValueError, "row 1: lengths is 6, and 3 more", {"lengths": torch.tensor([1, 6]), "n_new": None}),
    (ValueError, "row 0: position 4 is not in cos and sin, which have 4", {"cos": TABLE[:4], "sin": TABLE[:4]}),
    (ValueError, "row 0: position -1 is not in", {"positions": torch.tensor([[0, -1, 2], [0, 0, 0]])}),
]


def good_rope() -> dict[str, Any]:
    case = {"q": torch.ones(2, 4, 3, 16), "keys": torch.ones(2, 2, 3, 16), "values": torch.ones(2, 2, 3, 16)}
    case |= {name: torch.full((2, 2, 8, 16), -7.0) for name in ("k_cache", "v_cache")}
    case |= {"out": torch.full((2, 4, 3, 16), -7.0), "lengths": torch.tensor([2, 5]), "n_new": torch.tensor([3, 2])}
    return case | {"cos": TABLE, "sin": TABLE}


@pytest.mark.parametrize("which", range(len(BAD_ROPE)))
def test_bad_columns_touch_nothing(which: int) -> None:
    error, message, change = BAD_ROPE[which]
    good = good_rope()
    with pytest.raises(error, match=message):
        ops.rope_append(**(good | change))
    for name in ("k_cache", "v_cache", "out"):
        assert (good[name] == -7).all()
    assert ops.rope_append(**good) is good["out"]
    assert (good["k_cache"] != -7).sum() == 5 * 2 * 16


def test_there_is_no_backward_pass() -> None:
    wants = torch.ones(8).requires_grad_()
    for name, call in (
        ("add_rms_norm", lambda: ops.add_rms_norm(X, None, wants, EPS)),
        ("silu_mul", lambda: ops.silu_mul(wants)),
        ("rope_append", lambda: ops.rope_append(**(good_rope() | {"q": torch.ones(2, 4, 3, 16).requires_grad_()}))),
    ):
        with pytest.raises(RuntimeError, match=f"{name} has no backward pass"):
            call()
        with torch.no_grad():
            call()


def test_rounding_keeps_nans() -> None:
    """NaNs of all kinds stay NaNs in 16 bits, in each number that is rounded."""
    bits = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FFFFFFF, 0x7F800000, 0x3F808000, 0x3F818000], dtype=torch.int32)
    gate = torch.full((6,), 80.0)  # silu(80) = 80
    got = ops.silu_mul(torch.cat([gate, bits.view(torch.float32)]).bfloat16()[None])[0]
    wanted = (80.0 * bits.view(torch.float32).bfloat16().float()).bfloat16()
    assert torch.equal(got.isnan(), torch.tensor([True, True, True, False, False, False]))
    assert torch.equal(got[3:], wanted[3:])
    normed, total = ops.add_rms_norm(got[None, :3], got[None, :3], torch.ones(3, dtype=torch.bfloat16), EPS)
    assert normed.isnan().all()
    assert total.isnan().all()
