"""What a compiled model calls, in torch.library: opcheck, torch.compile, export, fakes; errors by name; and which implementation runs a call."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import DRAFT, Noise, Streams
from tests.trials import trials
from tests.waiting import SECONDS

from .selection import DTYPES, LAYOUTS, drafted_tokens, int32, make_logits, ragged_counts, simd, simd_variants, strided


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


NOISE = ("seeds", "positions", "inv_temperature", "cutoff")
FED = ("logits", "tokens", "query_lens", "num_draft_tokens")


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


def test_gradients_are_neither_recorded_nor_passed_by() -> None:
    x = torch.zeros(1, 1, 8, requires_grad=True)
    n = torch.ones(1, dtype=torch.int32)
    assert not any(found.requires_grad for found in ops.logprobs(x, n[:, None], n, n * 0, top_n=1))
    with pytest.raises(RuntimeError, match="silu_mul has no backward pass"):
        ops.silu_mul(torch.ones(1, 1, 16), out=x)


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
        (ValueError, "streams must be three different", {"streams": Streams(1, 2, 1)}),
        (TypeError, "streams must be Streams of three integers", {"streams": (1.5, 2, 3)}),
        (ValueError, "row 2: draft_inv_temperature must be finite", {"draft_inv_temperature": nan}),
        (ValueError, "draft_cutoff must be", {"draft_cutoff": flat[:2]}),
        (
            ValueError,
            "row 0: num_draft_tokens must be smaller than query_lens",
            {"num_draft_tokens": int32(3, 0, 0, 0)},
        ),
        (ValueError, "threads must be at least 1", {"threads": 0}),
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
