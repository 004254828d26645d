"""What a compiled model calls, in torch.library: opcheck, torch.compile, export, fakes; errors by name; and which implementation runs a call."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipespec_kernels import ops
from tests.waiting import SECONDS

from .selection import int32


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
ATTENTION = ("q", "k_cache", "v_cache", "lengths", "n_new")


def storage_calls(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...]]]:
    """The operations with the arguments of their schema, with and without the optional ones."""
    c = storage_case(dtype)
    appended, seen = [c[name] for name in APPEND], [c[name] for name in ATTENTION]
    lengths = c["lengths"].long().clamp(max=6)
    append, attend = torch.ops.pipespec.kv_append.default, torch.ops.pipespec.verify_attention.default
    return [
        (append, tuple(appended)),
        (append, (*appended[:4], lengths, None, True)),
        (attend, tuple(seen)),
        (attend, (*seen[:3], lengths, None, 0.3, True, True, 3, 2.0)),
    ]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_opcheck(which: int, dtype: torch.dtype) -> None:
    operation, arguments = storage_calls(dtype)[which]
    schema = operation._schema.arguments
    written = [i for i, a in enumerate(schema) if a.alias_info is not None and a.alias_info.is_write]
    assert written == ([2, 3] if operation._opname == "kv_append" else [])
    # Schema, autograd registration, fake tensors, and AOT dispatch with dynamic shapes.
    assert set(torch.library.opcheck(operation, arguments).values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("which", range(4))
def test_opcheck_on_a_gpu(which: int) -> None:
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


# --- errors ---------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named_under_a_tracer() -> None:
    """torch itself would answer with the operation's schema."""
    with FakeTensorMode() as mode:
        c = {name: mode.from_tensor(value) for name, value in storage_case().items()}
        for window in ("two", True):
            with pytest.raises(TypeError, match=r"^window must be an integer or None, got"):
                ops.verify_attention(*(c[name] for name in ATTENTION), window=window)
        with pytest.raises(ValueError, match=r"^window must fit in 64 bits"):
            ops.verify_attention(*(c[name] for name in ATTENTION), window=2**70)
        with pytest.raises(TypeError, match=r"^check_counts must be True or False, got int"):
            ops.kv_append(*(c[name] for name in APPEND), check_counts=3)


# --- the public functions under a tracer -----------------------------------------------------------------------------


def check_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def storage_step(c: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What a compiled forward calls; returns the results of attention."""
    ops.kv_append(*(c[name] for name in APPEND))
    out = torch.zeros_like(c["q"])
    said = [ops.verify_attention(*(c[name] for name in ATTENTION), out=out), out]
    seen = c["k_cache"], c["v_cache"], c["lengths"]
    said.append(ops.verify_attention(c["q"][:, :, :1], *seen, scale=0.3, invariant=True))
    return said


def check_storage_step(step: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]], rows: int, seed: int = 0) -> None:
    """The compiled step returns the results of the eager one, and changes its arguments in the same way."""
    ours, theirs = ({name: value[:rows].clone() for name, value in storage_case(seed=seed).items()} for _ in range(2))
    before = {name: value.clone() for name, value in ours.items()}
    check_same(step(ours), storage_step(theirs))
    check_same(list(ours.values()), list(theirs.values()))
    assert {name for name in ours if not torch.equal(ours[name], before[name])} == {"k_cache", "v_cache"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_storage_compiles_without_a_graph_break(backend: str) -> None:
    torch.compiler.reset()
    seen = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if "pipespec" in str(node.target))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)  # type: ignore[no-any-return]

    compiled = torch.compile(storage_step, fullgraph=True, backend=count)
    check_storage_step(compiled, 4)
    assert len(seen) == 3
    check_storage_step(compiled, 4, seed=1)
    with pytest.raises(Exception, match="no backward pass"):
        compiled(storage_case() | {"q": storage_case()["q"].requires_grad_()})


@pytest.mark.parametrize("strict", [True, False])
def test_storage_exports(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, c: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            return storage_step(c)

    program = torch.export.export(Model(), (storage_case(),), strict=strict)
    assert sum("pipespec" in str(node.target) for node in program.graph.nodes) == 3
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
    assert sum(name.startswith("pipespec.") for name in seen) == 3
    monkeypatch.setattr(torch.ops, "pipespec", None)  # plain calls do not go through the dispatcher
    check_same(storage_step(storage_case()), expected)


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


def test_the_longest_match_of_the_operation_is_that_of_the_compiled_index() -> None:
    from pipespec_kernels import _native, lookup

    assert lookup.MAX_MATCH == _native.MAX_MATCH


def test_the_reference_by_environment_and_without_the_native_code() -> None:
    assert run(PIPESPEC_OPS="reference").stdout == "1 1\n"
    without = run("sys.modules['pipespec_kernels._native'] = None")
    assert without.stdout == "1 1\n", without.stderr
    assert "slow reference" in without.stderr
    assert "pip install" in without.stderr
    wrong = run(PIPESPEC_OPS="quick")
    assert "PIPESPEC_OPS is 'quick'" in wrong.stderr
    assert wrong.returncode == 1
