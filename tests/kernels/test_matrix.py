"""Every operation, by every implementation, of every dtype, in every layout, gives what the table of ``cases.py`` says."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipespec_kernels import ops
from tests.trials import PROFILE, trials

from .cases import DTYPES, EPS, FLOATS, LAYOUTS, OPS, Arguments, Case, Draw, each, garbage, placed, same, same_strides
from .implementations import INTERPRETED, VARIANTS, implementations, matmul_in_order, running

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered:RuntimeWarning"
)  # numpy's, of the NaNs of the interpreter
ALL = [(name, dtype) for name, op in OPS.items() for dtype in FLOATS if dtype in op.dtypes]
ON_KERNELS = [(name, dtype) for name, dtype in ALL if dtype is not torch.float64]
EVERY_CALL = ON_KERNELS if INTERPRETED else ALL
EVERY = pytest.mark.parametrize(("name", "dtype"), EVERY_CALL, ids=str)
CHOICES = ("argmax", "sample", "verify", "rejection_sample", "cutoff", "logprobs")
ON_HOST = ("sample", "verify", "rejection_sample", "cutoff", "logprobs")
SPLIT = ("rejection_sample", "cutoff", "logprobs")
ROWS = ("add_rms_norm", "silu_mul")
STORED = ("kv_append", "verify_attention", "rope_append")


def seeds(name: str, ci: int, nightly: int) -> range:
    """New ones each night."""
    first = random.randrange(2**31) if PROFILE == "nightly" and not OPS[name].near else 0
    return range(first, first + trials(ci, nightly))


def moved(arguments: Arguments, device: torch.device, on_host: bool = False) -> Arguments:
    """Copies with the same strides. ``on_host``: what has one number per row stays on the host, counts as numpy arrays."""
    stay = ("query_lens", "num_draft_tokens", "seeds", "positions", "inv_temperature") if on_host else ()

    def there(name: str, x: Tensor) -> Any:
        found = same_strides(x, "cpu" if name in stay else device)
        return found.numpy() if on_host and name in stay[:2] else found

    return each(arguments, there)


def call(name: str, arguments: Arguments) -> tuple[Tensor, ...]:
    results = getattr(ops, name)(**arguments)
    return results if isinstance(results, tuple) else () if results is None else (results,)


def memory(x: Tensor) -> Tensor:
    """Of all that lies around the elements, too."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).view(torch.uint8)


def check(case: Case, given: Arguments, results: tuple[Tensor, ...]) -> None:
    """The results, and what was written; and nothing else was, also between the elements."""
    for got, expected in zip(results, case.results, strict=True):
        case.op.close(got.cpu(), expected, case.arguments)
    for name, expected in case.after.items():
        case.op.close(given[name].cpu(), expected, case.arguments)
        given[name].zero_()
    for name, before in case.arguments.items():
        if isinstance(before, Tensor) and isinstance(given[name], Tensor):
            before = before if name not in case.after else same_strides(before, "cpu").zero_()
            assert torch.equal(memory(given[name]).cpu(), memory(before)), name


def draw(seed: int, dtype: torch.dtype, layout: str, device: torch.device, **sizes: int) -> Draw:
    return Draw(seed, dtype, layout, kernels=INTERPRETED or device.type == "cuda", **sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY
def test_results(name: str, dtype: torch.dtype, layout: str, device: torch.device) -> None:
    for seed in seeds(name, ci=1 if INTERPRETED else 4, nightly=15 if INTERPRETED else 60):
        case = Case(name, draw(seed * len(LAYOUTS) + LAYOUTS.index(layout), dtype, layout, device))
        for implementation in implementations(device):
            given = moved(case.arguments, device, on_host=name in ON_HOST and seed % 2 == 0)
            with running(implementation):
                results = call(name, given)
            check(case, given, results)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", DTYPES[1:2] if INTERPRETED else DTYPES, ids=str)
def test_a_real_vocabulary(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Rows long enough to be cut for several threads or blocks."""
    rows = 1 if INTERPRETED else 2
    for seed in range(rows if name != "cutoff" else 2 * rows):
        case = Case(name, draw(seed, dtype, LAYOUTS[seed % 4], device, vocabulary=128256, rows=rows, columns=rows))
        for implementation in implementations(device):
            for threads in (1, 2, 3) if implementation in VARIANTS and name != "logprobs" else (None,):
                given = moved(case.arguments, device)
                with running(implementation):
                    results = call(name, given if threads is None else given | {"threads": threads})
                check(case, given, results)


@pytest.mark.parametrize("layout", ["gaps"] if INTERPRETED else ["contiguous", "gaps"])
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, dtype in EVERY_CALL if OPS[name].out], ids=str)
def test_results_go_where_the_caller_wants_them(
    name: str, dtype: torch.dtype, layout: str, device: torch.device
) -> None:
    case = Case(name, draw(3, dtype, layout, device, rows=3, columns=2))
    if name == "add_rms_norm":
        case.arguments["residual"] = case.arguments["x"]
    for implementation in implementations(device):
        with running(implementation):
            usual = call(name, moved(case.arguments, device))
            wide = [
                placed(garbage(x.cpu().contiguous()), layout if name in STORED + ROWS else "contiguous") for x in usual
            ]
            out = [same_strides(x, device) for x in wide]
            names = OPS[name].out if len(OPS[name].out) == len(out) else ()
            given = moved(case.arguments, device) | (
                dict(zip(names, out, strict=True)) if names else {"out": tuple(out)}
            )
            results = call(name, given)
        for got, place, expected, around in zip(results, out, usual, wide, strict=True):
            assert got is place
            same(got, expected, {})
            place.copy_(around)
            assert torch.equal(memory(place).cpu(), memory(around))


def test_a_norm_in_place(device: torch.device) -> None:
    """Either way around."""
    x, residual, weight = torch.randn(3, 4, 40, device=device)
    for implementation in implementations(device):
        with running(implementation):
            normed, total = ops.add_rms_norm(x, residual, weight[0], EPS)
            for places in ((0, 1), (1, 0)):
                given = x.clone(), residual.clone()
                ops.add_rms_norm(*given, weight[0], EPS, out=given[places[0]], residual_out=given[places[1]])
                assert torch.equal(given[places[0]], normed)
                assert torch.equal(given[places[1]], total)
            alone = x.clone()
            assert ops.add_rms_norm(alone, None, weight[0], EPS, out=alone)[1] is alone


# ---- what a result depends on


def steady(case: Case, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention add in an order that depends on the keys of a column alone. The native code always does."""
    if INTERPRETED:
        monkeypatch.setattr(np, "matmul", matmul_in_order)  # the interpreter's products
    if case.name == "verify_attention":
        is_native = implementation in VARIANTS and case.arguments["q"].dtype in (torch.float32, torch.bfloat16)
        case.arguments["invariant"] = not is_native
    if case.arguments.get("activation") == "gelu":
        case.arguments["activation"] = "gelu_tanh"  # torch's gelu has other bits where its input is contiguous


@EVERY
def test_a_row_depends_on_no_other(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, and alone."""
    if name in SPLIT and (INTERPRETED or device.type == "cuda"):
        pytest.skip("the kernels add in parts that depend on the number of rows")
    case = Case(name, draw(11, dtype, "contiguous", device, rows=4, columns=3))
    for implementation in implementations(device):
        steady(case, implementation, monkeypatch)
        with running(implementation):
            whole = moved(case.arguments, device)
            expected = call(name, whole)
            for rows in ([2, 0, 3, 1], [1]) if INTERPRETED else ([2, 0, 3, 1], [0], [1], [2], [3]):
                index = torch.tensor(rows, device=device)
                part = each(moved(case.arguments, device), lambda key, x, i=index: x if key in case.op.shared else x[i])
                for got, wanted in zip(call(name, part), expected, strict=True):
                    same(got, wanted[index], {})
                for written in case.op.written:
                    same(part[written], whole[written][index], {})


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, dtype in EVERY_CALL if name in STORED], ids=str)
def test_a_block_has_the_bits_of_its_columns(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verification is decoding token by token."""
    count = "query_lens" if name == "verify_attention" else "n_new"
    for seed in range(2 if INTERPRETED else 6):
        case = Case(name, draw(seed, dtype, "transposed", device, rows=3))
        for implementation in implementations(device):
            steady(case, implementation, monkeypatch)
            block, stepped = moved(case.arguments, device), moved(case.arguments, device)
            with running(implementation):
                expected, found = call(name, block), []
                for j in range(stepped["q" if "q" in stepped else "keys"].shape[2]):
                    one = {key: x[:, :, j : j + 1] for key, x in stepped.items() if key in ("q", "keys", "values")}
                    one |= {key: x[:, j : j + 1] for key, x in stepped.items() if key == "positions"}
                    busy = stepped[count] > j
                    one |= {"lengths": stepped["lengths"] + busy * j, count: busy.int()}
                    found.append(call(name, stepped | one))
            for results, wanted in zip(zip(*found, strict=True), expected, strict=bool(found)):
                same(torch.cat(results, 2), wanted, {})
            for written in case.op.written:
                same(stepped[written], block[written], {})


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, dtype in ALL if name not in SPLIT and dtype is not torch.float64], ids=str)  # fmt: skip
def test_a_captured_call_reads_what_is_there_at_the_replay(name: str, dtype: torch.dtype) -> None:
    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    cases = [Case(name, Draw(7, dtype, values=v, kernels=True, rows=3, columns=3)) for v in range(3)]
    given = moved(cases[0].arguments, device)
    call(name, given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(name, given)

    for case in cases[1:]:
        new = moved(case.arguments, device)
        tensors: list[list[Tensor]] = [[], []]
        for found, arguments in zip(tensors, (given, new), strict=True):
            each(arguments, lambda _, x, found=found: found.append(memory(x)))
        for place, values in zip(*tensors, strict=True):
            place.copy_(values)
        graph.replay()
        check(case, given, results)
