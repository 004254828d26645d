"""The operations in torch.library: opcheck, torch.compile, export, fakes; and which implementation runs a call."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests.generate_tests import OpCheckError
from torch.utils._python_dispatch import TorchDispatchMode

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import DRAFT, Noise, Streams
from tests.trials import trials
from tests.waiting import SECONDS

from . import penalties
from .layers import rope_case
from .selection import (
    DTYPES,
    LAYOUTS,
    drafted_tokens,
    make_logits,
    ragged_counts,
    simd,
    simd_variants,
    strided,
)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def case(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    logits = make_logits("normal", (4, 3, 37), dtype, generator)
    return {
        "logits": logits,
        "tokens": drafted_tokens(logits, 0.8, generator, torch.int64),
        "query_lens": int32(3, 0, 2, 3),
        "num_draft_tokens": int32(2, 0, 1, 0),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (4,), generator=generator),
        "positions": torch.arange(4) * 2**33,
        "inv_temperature": torch.rand(4, generator=generator) + 0.5,
        "cutoff": logits.float().amax(-1) - 2,
    }


def penalty_arguments() -> tuple[Any, ...]:
    """The arguments of the schema of ``penalize``, all of them."""
    given = penalties.case(1)
    fed = [given[name] for name in ("logits", "tokens", "history", "lengths")]
    counts = [given[name] for name in ("query_lens", "num_draft_tokens", "bitmask")]
    return *fed, *penalties.flat(given["penalties"]), *counts


def logprob_arguments(c: dict[str, Any]) -> tuple[Any, ...]:
    """What follows the logits in the schema of ``logprobs``."""
    return c["tokens"].int(), c["query_lens"], c["num_draft_tokens"]


NOISE = ("seeds", "positions", "inv_temperature", "cutoff")
FED = ("logits", "tokens", "query_lens", "num_draft_tokens")


def schema_calls(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    """Every operation with the arguments of its schema, with and without the optional ones."""
    c = case(dtype)
    fed, noise = [c[name] for name in FED], [c[name] for name in NOISE]
    draft = c["logits"] * 0.5
    ks, ps, least = torch.tensor([0, 1, 5, 99]), torch.tensor([0.5, 1, 0, 0.9]).double(), torch.zeros(4).double()
    scales = c["inv_temperature"]
    namespace = torch.ops.pipespec
    return [
        (namespace.argmax.default, (c["logits"],)),
        (namespace.argmax.default, (c["logits"].transpose(0, 1), 2)),
        (namespace.sample.default, (c["logits"], *noise, DRAFT, 1)),
        (namespace.sample.default, (c["logits"], *noise[:3])),
        (namespace.verify.default, tuple(fed)),
        (namespace.verify.default, (*fed, *noise, 0, 1)),
        (namespace.rejection_sample.default, (*fed, draft, *noise, scales * 0.5, c["cutoff"] - 1, *Streams())),
        (namespace.rejection_sample.default, (*fed, None, *noise[:3], None, None, None, *Streams(), 1)),
        (namespace.cutoff.default, (c["logits"], scales, ks, ps, least, *fed[2:])),
        (namespace.cutoff.default, (c["logits"], scales, ks.int(), ps.float(), least, None, None, 1)),
        (namespace.logprobs.default, (c["logits"], *logprob_arguments(c), scales, c["cutoff"], 3)),
        (namespace.logprobs.default, (c["logits"], *logprob_arguments(c))),
        (namespace.penalize.default, penalty_arguments()),
        (namespace.penalize.default, (*penalty_arguments()[:8], None, None, None, None, None)),
    ]


def storage_case(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Storage of 4 rows, 2 heads, 9 tokens; 2 new columns, 4 heads of queries."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "keys": normal(4, 2, 2, 16),
        "values": normal(4, 2, 2, 16),
        "k_cache": normal(4, 2, 9, 16),
        "v_cache": normal(4, 9, 2, 16).transpose(1, 2),
        "lengths": int32(3, 0, 7, 2),
        "n_new": int32(2, 0, 1, 2),
        "q": normal(4, 2, 4, 16).transpose(1, 2),
        "positions": torch.tensor([[4, 6], [8, 8], [7, 0], [5, 3]]),
        "n_keep": int32(2, 0, 1, 2),
        "rows": int32(1, 0),
        "to": torch.tensor([2, 5, -1, 3]),
    }


APPEND = ("keys", "values", "k_cache", "v_cache", "lengths", "n_new")
STORAGE = ("k_cache", "v_cache")
ATTENTION = ("q", "k_cache", "v_cache", "lengths", "n_new")


def storage_calls(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    c = storage_case(dtype)
    storage = [c[name] for name in STORAGE]
    seen = [c[name] for name in ATTENTION]
    namespace = torch.ops.pipespec
    return [
        (namespace.kv_append.default, tuple(c[name] for name in APPEND)),
        (
            namespace.kv_append.default,
            (*(c[name] for name in APPEND[:4]), c["lengths"].long().clamp(max=6), None, True),
        ),
        (namespace.kv_truncate.default, (c["lengths"], c["to"])),
        (namespace.kv_gather.default, (*storage, c["lengths"], c["rows"])),
        (namespace.kv_gather.default, (*storage, c["lengths"], c["rows"].long(), True)),
        (namespace.kv_compact.default, (*storage, c["positions"], c["lengths"], c["n_keep"])),
        (namespace.kv_compact.default, (*storage, c["positions"].int(), c["lengths"], c["n_keep"], True)),
        (namespace.verify_attention.default, tuple(seen)),
        (
            namespace.verify_attention.default,
            (*seen[:3], c["lengths"].long().clamp(max=6), None, 0.3, True, True, 3, 2.0),
        ),
    ]


@pytest.mark.parametrize("which", range(9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_opcheck_of_storage(which: int, dtype: torch.dtype) -> None:
    operation, arguments = storage_calls(dtype)[which]
    written = {"kv_append": [2, 3], "kv_truncate": [0], "verify_attention": []}.get(operation._opname, [0, 1])
    schema = operation._schema.arguments
    assert [i for i, a in enumerate(schema) if a.alias_info is not None and a.alias_info.is_write] == written
    assert set(torch.library.opcheck(operation, arguments).values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("which", range(9))
def test_opcheck_of_storage_on_a_gpu(which: int) -> None:
    def there(arguments: tuple[Any, ...]) -> list[Any]:
        return [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]

    operation, arguments = storage_calls(torch.bfloat16)[which]
    assert set(torch.library.opcheck(operation, tuple(there(arguments))).values()) == {"SUCCESS"}
    on_gpu = there(arguments)
    got, expected = [operation(*on_gpu), *on_gpu], [operation(*arguments), *arguments]
    for ours, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            tolerance = 2e-2 if ours is got[0] else 0
            torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("which", range(13))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_opcheck(which: int, dtype: torch.dtype) -> None:
    operation, arguments = schema_calls(dtype)[which]
    # Schema, autograd registration, fake tensors, and AOT dispatch with dynamic shapes.
    assert set(torch.library.opcheck(operation, arguments).values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("which", range(13))
def test_opcheck_on_a_gpu(which: int) -> None:
    operation, arguments = schema_calls(torch.bfloat16)[which]
    there = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
    assert set(torch.library.opcheck(operation, tuple(there)).values()) == {"SUCCESS"}
    on_host = operation(*arguments)
    check_same(
        [t.cpu() for t in torch.utils._pytree.tree_leaves(operation(*there))],
        torch.utils._pytree.tree_leaves(on_host),
    )


def test_opcheck_would_fail() -> None:
    """The checks above can fail: on a fake of another shape, and on an undeclared write to an argument."""
    with torch.library._scoped_library("pipespec_test", "DEF") as library:
        library.define("wrong_fake(Tensor x) -> Tensor")
        library.define("writes(Tensor x) -> Tensor")
        library.impl("wrong_fake", lambda x: x.new_zeros(3), "CompositeExplicitAutograd")
        library.impl("writes", lambda x: x.add_(1).clone(), "CompositeExplicitAutograd")
        torch.library.register_fake("pipespec_test::wrong_fake", lambda x: x.new_zeros(4), lib=library)
        torch.library.register_fake("pipespec_test::writes", lambda x: torch.empty_like(x), lib=library)
        for operation in (torch.ops.pipespec_test.wrong_fake, torch.ops.pipespec_test.writes):
            with pytest.raises(OpCheckError):
                torch.library.opcheck(operation.default, (torch.zeros(2),))


# --- errors ---------------------------------------------------------------------------------------------------------


def _noise(**changes: Any) -> Noise:
    row = torch.zeros(1, dtype=torch.int64)
    return dataclasses.replace(Noise(row, row, torch.ones(1)), **changes)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "sparse": (lambda x, n: ops.argmax(x.to_sparse()), TypeError, "logits must be a dense tensor"),
    "threads": (lambda x, n: ops.argmax(x, threads=2**40), ValueError, "threads must fit in 32 bits"),
    "offset": (lambda x, n: ops.sample(x, _noise(offset=1.5)), TypeError, "noise.offset must be an integer"),
    "no pair": (lambda x, n: ops.verify(x, n[:, None], n, n * 0, out=x), TypeError, "out must be a pair of tensors"),
    "complex": (lambda x, n: ops.cutoff(x, top_p=torch.ones(1) * 1j), TypeError, "top_p must be real numbers"),
    "long": (lambda x, n: ops.cutoff(x, top_k=2**70), ValueError, "top_k must fit in 64 bits"),
    "name": (lambda x, n: ops.silu_mul(x, activation=[1]), ValueError, "activation must be one of silu"),
    "negated": (lambda x, n: ops.silu_mul(torch._neg_view(x)), ValueError, r"gate_up .* pass gate_up.resolve_neg\(\)"),
    "temperature": (
        lambda x, n: ops.logprobs(x, n[:, None], n, n * 0, inv_temperature=-torch.ones(1)),
        ValueError,
        "row 0: inv_temperature must be finite and positive",
    ),
    "eps": (lambda x, n: ops.add_rms_norm(x, None, x[0, 0], "1"), TypeError, "eps must be a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(torch.zeros(1, 1, 8), torch.ones(1, dtype=torch.int32))


def test_wrong_arguments_are_named_under_a_tracer() -> None:
    """torch itself would answer with the operation's schema."""
    with FakeTensorMode():
        logits = torch.zeros(1, 1, 8)
        for threads in ("two", True):
            with pytest.raises(TypeError, match=r"^threads must be an integer or None, got"):
                ops.argmax(logits, threads=threads)
        with pytest.raises(ValueError, match=r"^threads must fit in 64 bits"):
            ops.argmax(logits, threads=2**70)
        with pytest.raises(TypeError, match=r"^activation must be a string, got int"):
            ops.silu_mul(logits, activation=3)


def test_scalars_of_numpy_are_numbers() -> None:
    x = torch.randn(1, 1, 8)
    assert torch.equal(
        ops.add_rms_norm(x, None, x[0, 0], np.float32(1e-6))[0], ops.add_rms_norm(x, None, x[0, 0], 1e-6)[0]
    )
    with FakeTensorMode():
        ops.logprobs(
            torch.zeros(1, 1, 8),
            torch.ones(1, 1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            top_n=np.int64(1),
        )


def test_gradients_are_neither_recorded_nor_passed_by() -> None:
    x = torch.zeros(1, 1, 8, requires_grad=True)
    n = torch.ones(1, dtype=torch.int32)
    assert not any(found.requires_grad for found in ops.logprobs(x, n[:, None], n, n * 0, top_n=1))
    with pytest.raises(RuntimeError, match="silu_mul has no backward pass"):
        ops.silu_mul(torch.ones(1, 1, 16), out=x)


@pytest.mark.filterwarnings("ignore:.*jit.trace.*deprecated")
def test_a_trace_of_jit_records_the_operation() -> None:
    traced = torch.jit.trace(lambda x: ops.silu_mul(x), (torch.ones(1, 8),), check_trace=False)
    torch.testing.assert_close(traced(torch.full((1, 8), 2.0)), ops.silu_mul(torch.full((1, 8), 2.0)))


# --- the public functions under a tracer -----------------------------------------------------------------------------


def calls(c: dict[str, Any]) -> list[torch.Tensor]:
    """The results of every public function."""
    noise = Noise(*(c[name] for name in NOISE))
    fed = [c[name] for name in FED]
    logits = c["logits"]
    bar = ops.cutoff(
        logits, inv_temperature=noise.inv_temperature, top_k=5, top_p=0.9, query_lens=fed[2], num_draft_tokens=fed[3]
    )
    return [
        ops.argmax(logits),
        ops.sample(logits, noise),
        bar,
        *ops.verify(*fed),
        *ops.verify(*fed, noise=Noise(noise.seeds, noise.positions, noise.inv_temperature, bar), threads=1),
        *ops.rejection_sample(*fed, logits * 0.5, noise),
        *ops.rejection_sample(*fed, None, noise, streams=Streams(7, 8, 9)),
    ]


def check_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def storage_step(c: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Every operation on keys and values, in place; returns the results of attention."""
    storage = [c[name] for name in STORAGE]
    ops.kv_append(*(c[name] for name in APPEND))
    out = torch.zeros_like(c["q"])
    said = [ops.verify_attention(*(c[name] for name in ATTENTION), out=out), out]
    ops.kv_compact(*storage, c["positions"], c["lengths"], c["n_keep"])
    ops.kv_gather(*storage, c["lengths"], c["rows"], check_counts=True)
    ops.kv_truncate(c["lengths"], c["to"])
    said.append(ops.verify_attention(c["q"][:, :, :1], *storage, c["lengths"], scale=0.3, invariant=True))
    return said


def check_storage_step(step: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]], rows: int, seed: int = 0) -> None:
    """The compiled step returns the results of the eager one, and changes its arguments in the same way."""
    ours, theirs = ({name: value[:rows].clone() for name, value in storage_case(seed=seed).items()} for _ in range(2))
    before = {name: value.clone() for name, value in ours.items()}
    check_same(step(ours), storage_step(theirs))
    check_same(list(ours.values()), list(theirs.values()))
    assert {name for name in ours if not torch.equal(ours[name], before[name])} == {"k_cache", "v_cache", "lengths"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_storage_compiles_without_a_graph_break(backend: str) -> None:
    torch.compiler.reset()
    seen = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if "pipespec" in str(node.target))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)  # type: ignore[no-any-return]

    compiled = torch.compile(storage_step, fullgraph=True, backend=count)
    check_storage_step(compiled, 4)
    assert len(seen) == 6
    check_storage_step(compiled, 4, seed=1)
    with pytest.raises(Exception, match="no backward pass"):
        compiled(storage_case() | {"q": storage_case()["q"].requires_grad_()})


def test_storage_compiles_for_any_batch() -> None:
    torch.compiler.reset()
    compiled = torch.compile(storage_step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 3, 2):
        check_storage_step(compiled, rows)


@pytest.mark.parametrize("strict", [True, False])
def test_storage_exports(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, c: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            return storage_step(c)

    program = torch.export.export(Model(), (storage_case(),), strict=strict)
    assert sum("pipespec" in str(node.target) for node in program.graph.nodes) == 6
    check_storage_step(program.module(), 4, seed=2)


def test_storage_without_data_and_under_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = storage_step(storage_case())
    with FakeTensorMode() as mode:
        c = {name: mode.from_tensor(value) for name, value in storage_case().items()}
        for got, real in zip(storage_step(c), expected, strict=True):
            assert (got.shape, got.stride(), got.dtype) == (real.shape, real.stride(), real.dtype)
        for error, message, change in (
            (ValueError, "values must have shape", {"values": c["values"][:1]}),
            (ValueError, "lengths must have shape", {"lengths": c["lengths"][:1]}),
            (TypeError, "q must be bfloat16", {"q": c["q"].float()}),
            (TypeError, "positions must be int32", {"positions": c["positions"].float()}),
            (ValueError, r"rows must be a tensor \[N\] with N <= 4", {"rows": c["positions"]}),
            (ValueError, "to must have shape", {"to": c["to"][:1]}),
        ):
            with pytest.raises(error, match=message):
                storage_step(c | change)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        check_same(storage_step(storage_case()), expected)
    assert sum(name.startswith("pipespec.") for name in seen) == 6
    monkeypatch.setattr(torch.ops, "pipespec", None)  # plain calls do not go through the dispatcher
    check_same(storage_step(storage_case()), expected)


# --- a layer ---------------------------------------------------------------------------------------------------------


def layer_case(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    case = rope_case(seed, 4, (4, 2), 2, 9, 16, 8, dtype, norms=True, positions=True)
    del case["eps"]
    case |= {"lengths": torch.tensor([3, 0, 7, 2]), "n_new": int32(2, 0, 1, 2), "positions": torch.full((4, 2), 5)}
    case |= {"x": normal(4, 2, 24), "residual": normal(4, 2, 24), "weight": normal(24), "bias": normal(24)}
    return case | {"gate_up": normal(4, 2, 20)}


ROPE = ("q", "keys", "values", "cos", "sin", "k_cache", "v_cache", "lengths", "n_new")


def layer_calls(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    c = layer_case(dtype)
    rope = [c[name] for name in ROPE]
    namespace = torch.ops.pipespec
    return [
        (namespace.add_rms_norm.default, (c["x"], c["residual"], c["weight"], 1e-5)),
        (namespace.add_rms_norm.default, (c["x"][0], None, c["weight"], 0.5, True, c["bias"])),
        (namespace.silu_mul.default, (c["gate_up"],)),
        (namespace.silu_mul.default, (c["gate_up"][:, 1], "gelu_tanh")),
        (namespace.rope_append.default, tuple(rope)),
        (
            namespace.rope_append.default,
            (
                *rope[:7],
                c["lengths"].int().clamp(max=6),
                None,
                c["positions"],
                c["q_norm"],
                c["k_norm"],
                1e-5,
                True,
                True,
            ),
        ),
    ]


@pytest.mark.parametrize("which", range(6))
def test_opcheck_of_a_layer(which: int) -> None:
    operation, arguments = layer_calls([torch.bfloat16, torch.float64][which % 2])[which]
    schema = operation._schema.arguments
    written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    assert written == (["k_cache", "v_cache"] if operation._opname == "rope_append" else [])
    assert set(torch.library.opcheck(operation, arguments).values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("which", range(6))
def test_opcheck_of_a_layer_on_a_gpu(which: int) -> None:
    operation, arguments = layer_calls(torch.bfloat16)[which]
    there = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments)
    assert set(torch.library.opcheck(operation, there).values()) == {"SUCCESS"}
    got, expected = torch.utils._pytree.tree_leaves([operation(*there), *there]), [operation(*arguments), *arguments]
    for ours, theirs in zip(got, torch.utils._pytree.tree_leaves(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2, atol=2e-2)


def layer_step(c: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    out, total, half = torch.zeros_like(c["x"]), torch.zeros_like(c["x"]), torch.zeros_like(c["gate_up"][..., :10])
    rope = {name: c[name] for name in ROPE}
    q_out = torch.zeros_like(c["q"])
    # What is new and what came in: a program must not return one of its inputs twice.
    normed, same = ops.add_rms_norm(c["x"], None, c["weight"], 1e-5, one_plus_weight=True)
    return [
        normed,
        same + 1,
        *ops.add_rms_norm(c["x"], c["residual"], c["weight"], 1e-5, bias=c["bias"], out=out, residual_out=total),
        ops.silu_mul(c["gate_up"]),
        ops.silu_mul(c["gate_up"], activation="gelu", out=half),
        ops.rope_append(**rope, out=q_out),
        ops.rope_append(**rope, positions=c["positions"], q_norm=c["q_norm"], k_norm=c["k_norm"], check_counts=True),
    ]


def check_layer_step(step: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]], rows: int, seed: int = 0) -> None:
    whole = layer_case(seed=seed)
    parts = {n: x[:rows].contiguous() if x.shape[0] == 4 else x for n, x in whole.items()}
    ours, theirs = ({name: value.clone() for name, value in parts.items()} for _ in range(2))
    check_same(step(ours), layer_step(theirs))
    check_same(list(ours.values()), list(theirs.values()))
    assert {name for name in ours if not torch.equal(ours[name], parts[name])} == {"k_cache", "v_cache"}


def test_a_layer_compiles_for_any_batch_without_a_graph_break() -> None:
    torch.compiler.reset()
    seen = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.append(sum("pipespec" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # type: ignore[no-any-return]

    compiled = torch.compile(layer_step, fullgraph=True, backend=count, dynamic=True)
    for rows in (4, 3, 2):
        check_layer_step(compiled, rows, seed=rows)
    assert set(seen) == {6}
    with pytest.raises(Exception, match="no backward pass"):
        compiled(layer_case() | {"x": layer_case()["x"].requires_grad_()})


@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_exports(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, c: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            return layer_step(c)

    program = torch.export.export(Model(), (layer_case(),), strict=strict)
    assert sum("pipespec" in str(node.target) for node in program.graph.nodes) == 6
    check_layer_step(program.module(), 4, seed=2)


def test_a_layer_without_data_and_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, case = layer_step(layer_case()), layer_case()
    with FakeTensorMode() as mode:
        c = {name: mode.from_tensor(value) for name, value in case.items()}
        for got, real in zip(layer_step(c), expected, strict=True):
            assert (got.shape, got.stride(), got.dtype) == (real.shape, real.stride(), real.dtype)
        for error, message, change in (
            (ValueError, "weight must have shape", {"weight": c["weight"][:3]}),
            (ValueError, "gate_up must have an even number", {"gate_up": c["gate_up"][..., :3]}),
            (ValueError, "sin must have shape", {"sin": c["sin"][:3]}),
            (ValueError, "lengths must have shape", {"lengths": c["lengths"][:1]}),
        ):
            with pytest.raises(error, match=message):
                layer_step(c | change)
    # Parameters are a class of their own; plain calls do not go through the dispatcher.
    with torch.no_grad():
        weights = {
            name: torch.nn.Parameter(layer_case()[name]) for name in ("x", "weight", "gate_up", "q_norm", "k_norm")
        }
        check_same(layer_step(layer_case() | weights), expected)
    monkeypatch.setattr(torch.ops, "pipespec", None)
    check_same(layer_step(layer_case()), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(backend: str) -> None:
    torch.compiler.reset()
    c = case()
    seen = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if "pipespec" in str(node.target))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)  # type: ignore[no-any-return]

    compiled = torch.compile(calls, fullgraph=True, backend=count)
    check_same(compiled(c), calls(c))
    assert len(seen) == 7
    other = case(seed=1)
    check_same(compiled(other), calls(other))


def test_compiles_for_any_batch() -> None:
    torch.compiler.reset()
    compiled = torch.compile(calls, fullgraph=True, backend="aot_eager", dynamic=True)
    c = case()
    for rows in (4, 3, 2):
        part = {name: value[:rows] for name, value in c.items()}
        check_same(compiled(part), calls(part))


def test_numpy_and_out_compile() -> None:
    torch.compiler.reset()
    c = case()
    counts = c["query_lens"].numpy(), c["num_draft_tokens"].numpy()
    out = torch.full((4, 3), -9, dtype=torch.int32), torch.full((4,), -9, dtype=torch.int32)

    def call(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.verify(logits, c["tokens"], *counts, out=out)

    check_same(list(torch.compile(call, fullgraph=True, backend="eager")(c["logits"])), list(call(c["logits"])))
    check_same(list(out), list(call(c["logits"])))


@pytest.mark.parametrize("strict", [True, False])
def test_exports(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, c: dict[str, Any]) -> list[torch.Tensor]:
            return calls(c)

    c = case()
    program = torch.export.export(Model(), (c,), strict=strict)
    assert sum("pipespec" in str(node.target) for node in program.graph.nodes) == 7
    other = case(seed=2)
    check_same(program.module()(other), calls(other))


def test_fake_and_meta_tensors_get_shapes_and_errors() -> None:
    with FakeTensorMode() as mode:
        c = {name: mode.from_tensor(value) for name, value in case().items()}
        for got, expected in zip(calls(c), calls(case()), strict=True):
            assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
        with pytest.raises(ValueError, match="tokens are"):
            ops.verify(c["logits"], c["tokens"][:1], c["query_lens"], c["num_draft_tokens"])
        with pytest.raises(TypeError, match="num_draft_tokens must be int32"):
            ops.verify(c["logits"], c["tokens"], c["query_lens"], c["num_draft_tokens"].long())
        with pytest.raises(ValueError, match="streams"):
            ops.rejection_sample(*(c[n] for n in FED), None, Noise(*(c[n] for n in NOISE)), streams=Streams(0, 1, 1))
    meta = ops.argmax(torch.empty(2, 3, 5, device="meta"))
    assert (meta.shape, meta.dtype, meta.device.type) == ((2, 3), torch.int32, "meta")


def test_modes_see_the_operations_and_subclasses_go_through() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    c = case()
    with Watch():
        watched = calls(c)
    assert sum(name.startswith("pipespec.") for name in seen) == 7
    check_same(watched, calls(c))
    weights = torch.nn.Parameter(c["logits"])  # a class of its own that requires gradients
    check_same(calls(c | {"logits": weights}), calls(c))
    assert not any(result.requires_grad for result in calls(c | {"logits": weights}))


def test_plain_calls_do_not_go_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher is too slow for a call per draft step."""
    monkeypatch.setattr(torch.ops, "pipespec", None)
    calls(case())


# --- where calls go --------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, warnings
{before}
import torch
from pipespec_kernels import ops, reference
x = torch.tensor([[[0.0, 2.0, 2.0]]])
calls = []
original = reference.argmax
reference.argmax = lambda logits: calls.append(1) or original(logits)
print(ops.argmax(x).item(), len(calls))
"""


def run(before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_the_reference_by_environment_and_without_the_native_code() -> None:
    assert run(PIPESPEC_OPS="reference").stdout == "1 1\n"
    without = run("sys.modules['pipespec_kernels._native'] = None")
    assert without.stdout == "1 1\n", without.stderr
    assert "slow reference" in without.stderr
    assert "pip install" in without.stderr
    wrong = run(PIPESPEC_OPS="quick")
    assert "PIPESPEC_OPS is 'quick'" in wrong.stderr
    assert wrong.returncode == 1


# --- rejection_sample; that its reference keeps the distribution is tested with the kernels ----------------------------------------------------------


@settings(max_examples=trials(ci=30, nightly=60), derandomize=True)
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(0, 5), st.sampled_from([1, 2, 7, 33, 300])),
    kinds=st.tuples(*[st.sampled_from(["normal", "few values", "minus inf", "nans"])] * 2),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from([*DTYPES, torch.float64])),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
    certain=st.booleans(),
    filtered=st.booleans(),
    variant=st.sampled_from(simd_variants()),
    seed=st.integers(0, 2**31),
)
def test_rejection_sample_is_the_reference(shape, kinds, dtypes, layouts, certain, filtered, variant, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, width, vocab = shape
    logits = make_logits(kinds[0], shape, dtypes[0], generator)
    draft = None if certain else (make_logits(kinds[1], shape, torch.float32, generator) + logits).to(dtypes[1])
    tokens = drafted_tokens(logits, 0.7, generator, torch.int64)
    tokens[torch.rand((batch, width), generator=generator) < 0.05] = vocab  # no id
    query_lens, num_draft_tokens = ragged_counts(batch, width, generator)
    noise = Noise(
        torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        torch.randint(0, 2**40, (batch,), generator=generator),
        torch.rand(batch, generator=generator) + 0.3,
        torch.randn((batch, width), generator=generator) - 1 if filtered else None,
    )
    options = {"draft_inv_temperature": noise.inv_temperature * 0.5} if filtered else {}
    expected = reference.rejection_sample(logits, tokens, query_lens, num_draft_tokens, draft, noise, **options)
    placed = strided(logits, layouts[0]), None if draft is None else strided(draft, layouts[1])
    with simd(variant):
        got = ops.rejection_sample(placed[0], tokens, query_lens, num_draft_tokens, placed[1], noise, **options)
    check_same(list(got), list(expected))


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("peaked", [False, True], ids=["flat", "peaked"])
def test_rejection_sample_by_any_threads_is_the_reference(certain: bool, peaked: bool) -> None:
    """Rows long enough to be cut for several threads, with draft tokens that the draft has drawn."""
    generator = torch.Generator().manual_seed(11)
    shape, taken = (3, 4, 40011), 0
    n = torch.tensor([4, 3, 4], dtype=torch.int32)
    for dtype, of_draft in zip(DTYPES, [*DTYPES[1:], DTYPES[0]], strict=True):
        logits = torch.randn(shape, generator=generator) * (8 if peaked else 2)
        draft = (logits + 0.3 * torch.randn(shape, generator=generator)).to(of_draft)
        logits = logits.to(dtype)
        noise = Noise(torch.arange(3), torch.arange(3) * 50, torch.tensor([1.0, 0.8, 1.3]))
        tokens = torch.zeros(shape[:2], dtype=torch.int64)
        drawing = Noise(noise.seeds, noise.positions, noise.inv_temperature, stream=DRAFT)
        tokens[:, 1:] = ops.sample(draft, drawing)[:, :-1]
        arguments = (logits, tokens, n, n - 1, None if certain else draft, noise)
        expected = reference.rejection_sample(*arguments)
        taken += int(expected[1].sum())
        for variant in simd_variants():
            with simd(variant):
                for threads in (1, 2, 3):
                    check_same(list(ops.rejection_sample(*arguments, threads=threads)), list(expected))
    assert taken > 0 or (certain and not peaked)  # flat distributions accept hardly any certain draft token


def test_rejection_sample_checks_its_arguments() -> None:
    c = case(torch.float32)
    noise = Noise(*(c[name] for name in NOISE))
    draft = (c["logits"] * 0.5).half()
    good = {name: c[name] for name in FED} | {"draft_logits": draft, "noise": noise}
    out = torch.full((4, 3), -7, dtype=torch.int32), torch.full((4,), -7, dtype=torch.int32)
    flat = torch.zeros(4, 3)
    nan = torch.tensor([1.0, 1.0, math.nan, 1.0])
    for error, message, change in (
        (ValueError, "draft_logits are", {"draft_logits": draft[:, :2]}),
        (ValueError, "draft_logits must be contiguous", {"draft_logits": torch.zeros(4, 37, 3).transpose(1, 2)}),
        (TypeError, "draft_logits must be float32", {"draft_logits": draft.long()}),
        (TypeError, "noise must be a Noise", {"noise": None}),
        (ValueError, "streams must be three different", {"streams": Streams(1, 2, 1)}),
        (ValueError, "streams must be three different", {"streams": Streams(1, 2, 2**32)}),
        (TypeError, "streams must be Streams of three integers", {"streams": (1, 2)}),
        (TypeError, "streams must be Streams of three integers", {"streams": (1.5, 2, 3)}),
        (TypeError, "draft_inv_temperature must be float32", {"draft_inv_temperature": torch.ones(4).double()}),
        (ValueError, "row 2: draft_inv_temperature must be finite", {"draft_inv_temperature": nan}),
        (ValueError, "draft_cutoff must be", {"draft_cutoff": flat[:2]}),
        (
            ValueError,
            "row 0: num_draft_tokens must be smaller than query_lens",
            {"num_draft_tokens": int32(3, 0, 0, 0)},
        ),
        (ValueError, "row 3: counts are negative", {"num_draft_tokens": int32(0, 0, 0, -1)}),
        (ValueError, "threads must be at least 1", {"threads": 0}),
        (ValueError, "tokens are on meta", {"tokens": c["tokens"].to("meta")}),
        (ValueError, r"out\[1\] must be contiguous", {"out": (out[0], out[1][:2])}),
    ):
        with pytest.raises(error, match=message):
            ops.rejection_sample(**(good | {"out": out} | change))
        assert out[0].eq(-7).all()
        assert out[1].eq(-7).all()
    expected = reference.rejection_sample(*(good[name] for name in (*FED, "draft_logits", "noise")))
    got = ops.rejection_sample(**good, out=out)
    assert got[0] is out[0]
    check_same(list(got), list(expected))
    recorded = {name: good[name].clone().float().requires_grad_() for name in ("logits", "draft_logits")}
    plain = {name: x.detach() for name, x in recorded.items()}
    check_same(list(ops.rejection_sample(**(good | recorded))), list(ops.rejection_sample(**(good | plain))))
    idle = ops.rejection_sample(**(good | {"query_lens": int32(0, 0, 0, 0), "num_draft_tokens": int32(9, -1, 0, 0)}))
    assert (idle[0].unique().tolist(), idle[1].tolist()) == ([-1], [0] * 4)
