"""The benchmarks: their cases compute the right results, and their tables survive failures. No time is asserted."""

import csv
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import kernel_timing, kernels, layer_cases, rivals, selection_cases
from bench.kernel_timing import Benchmark, KernelCase
from pipespec_kernels import ops

SHAPE = (2, 3, 200)


def test_cases_run_and_rivals_do_the_same() -> None:
    torch.manual_seed(0)
    for benchmark in selection_cases.BENCHMARKS:
        case = benchmark.make("cpu", SHAPE, torch.bfloat16, 2)
        assert set(case.rivals) == {"eager"}
        assert case.bytes_moved >= torch.Size(SHAPE).numel() * 2
        ours, theirs = case.ours(1), case.rivals["eager"](1)
        if benchmark.name == "argmax":
            ours, theirs = (ours,), (theirs,)
        if benchmark.name != "verify coupled":  # which draws
            for a, b in zip(ours, theirs, strict=True):  # type: ignore[call-overload]
                assert torch.equal(a, b.to(a.dtype))


def test_attention_cases_run_and_rivals_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make = functools.partial(layer_cases.BENCHMARKS[0].make, "cpu")
    for width, others in ((1, {"sdpa", "gqa", "other sums", "unmasked"}), (3, {"sdpa", "gqa", "other sums"})):
        case = make((2, width, 40), torch.float32, 2)
        assert set(case.rivals) == others
        keys_and_values, queries_and_results = 2 * 2 * 8 * 40 * 128 * 4, 2 * 2 * 32 * width * 128 * 4
        assert case.bytes_moved == keys_and_values + queries_and_results
        expected = case.ours(1).clone()  # type: ignore[attr-defined]
        for rival in case.rivals.values():
            torch.testing.assert_close(rival(1), expected, rtol=1e-4, atol=1e-5)
    honest = ops.verify_attention
    monkeypatch.setattr(ops, "verify_attention", lambda q, k, v, n, **options: honest(q, k, v, n - 1, **options))
    with pytest.raises(AssertionError):
        make((2, 3, 40), torch.float32, 2)


def test_rivals_of_other_libraries_get_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with their signatures compute from what they are given what our case computes."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, *SHAPE), torch.zeros(2, *SHAPE[:2], dtype=torch.int64)
    best = logits.argmax(-1)
    tokens[:, :, 1:] = best[:, :, :-1]
    tokens[1, 0, 1] += 1  # one is wrong

    def rejection_sample(ids, counts, most, ends, of_drafts, target_probs, bonus, settings):  # type: ignore[no-untyped-def]
        assert (counts, most, ends.tolist(), of_drafts, settings.all_greedy) == ([2, 2], 2, [2, 4], None, True)
        right = (target_probs.argmax(-1) == ids).view(2, 2)
        return torch.cat([target_probs.argmax(-1).view(2, 2), bonus], 1), right.int().cumprod(1).sum(1)

    def chain(of_drafts, ids, target):  # type: ignore[no-untyped-def]
        assert torch.equal(of_drafts.argmax(-1), ids.long())
        torch.testing.assert_close(target.sum(-1), torch.ones(SHAPE[:2]))
        return ids

    def flash(q, k, v, *_, cache_seqlens, causal):  # type: ignore[no-untyped-def]
        assert causal
        assert set(cache_seqlens.tolist()) == {k.shape[1]}
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return layer_cases.masked(*(x.transpose(1, 2) for x in (q, k, v)), seen).transpose(1, 2)

    made = {"vllm.v1.sample.rejection_sampler": rejection_sample, "flashinfer.sampling": chain, "flash_attn": flash}
    names = "rejection_sample", "chain_speculative_sampling", "flash_attn_with_kvcache"
    for (module, function), name in zip(made.items(), names, strict=True):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: function}))
    monkeypatch.setattr(rivals, "find_spec", lambda name: True)
    assert set(rivals.samplers(logits, tokens, True)) == {"vLLM", "FlashInfer"}
    rivals.samplers(logits, tokens, True)["FlashInfer"](1)
    chosen, accepted = rivals.samplers(logits, tokens, False)["vLLM"](1)
    assert torch.equal(chosen.long(), best[1])
    counts = torch.tensor([[3, 3], [2, 2]], dtype=torch.int32)
    assert accepted.tolist() == ops.verify(logits[1], tokens[1], *counts)[1].tolist()
    q, k, v = torch.randn(2, 2, 4, 3, 8), *torch.randn(2, 2, 2, 2, 40, 8)
    assert rivals.attentions(q, k, v) == {}  # it takes 16 bits alone
    q, k, v = (x.bfloat16() for x in (q, k, v))
    ours = ops.verify_attention(q[1], k[1], v[1], torch.tensor([37, 37]).int())
    torch.testing.assert_close(rivals.attentions(q, k, v)["flash-attn"](1).transpose(1, 2), ours)


def test_products_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = layer_cases.PRODUCTS
    for shape in benchmark.shapes("cpu", True):
        case = benchmark.make("cpu", shape, torch.float32, 2)
        m, n, k = shape
        assert case.bytes_moved == benchmark.input_bytes(shape, torch.float32) == 4 * (n * k + m * (n + k))
        torch.testing.assert_close(case.ours(1), case.rivals["eager"](1), rtol=1e-4, atol=1e-3)
    found = {shape[1:] for shape in benchmark.shapes("cuda", False)}
    assert found >= {(6144, 4096), (28672, 4096), (4096, 14336), (128256, 2048)}
    assert {shape[0] for shape in benchmark.shapes("cuda", False)} == {1, 2, 4, 5, 8, 16}
    right = ops.linear_small
    monkeypatch.setattr(ops, "linear_small", lambda *given, **options: right(*given, **options) * 2)
    with pytest.raises(AssertionError):
        benchmark.make("cpu", shape, torch.float32, 2)


@pytest.mark.parametrize("benchmark", layer_cases.BENCHMARKS[1:-1], ids=lambda b: b.name)
def test_layers_are_checked_before_they_are_timed(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    make = functools.partial(benchmark.make, "cpu")
    numbers = {"kv_append": 4 * 8 * 128, "add_rms_norm": 4 * 4096, "silu_mul": 3 * 14336, "rope_append": (2 * 32 + 4 * 8) * 128}  # fmt: skip
    for shape in benchmark.shapes("cpu", True):
        case = make(shape, torch.bfloat16, 2)  # compares the results of both
        expected = shape[0] * shape[1] * numbers[benchmark.name] * 2
        assert case.bytes_moved == benchmark.input_bytes(shape, torch.bfloat16) == expected
        case.ours(1)
        case.rivals["eager"](1)
    right = getattr(ops, benchmark.name)

    def wrong(*given: object, **options: object) -> object:
        if benchmark.name == "kv_append":
            return None
        result = right(*given, **options)
        (result[0] if isinstance(result, tuple) else result).mul_(2)
        return result

    monkeypatch.setattr(ops, benchmark.name, wrong)
    with pytest.raises(AssertionError):
        make(shape, torch.float32, 2)


def test_a_table_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_timing, "QUICK", [SHAPE, (1, 1, 50)])
    monkeypatch.setattr(layer_cases, "CPU_SHAPES", [(2, 3, 40)])
    monkeypatch.setattr(kernel_timing, "cold_bytes", lambda: 1 << 20)
    monkeypatch.setattr(kernel_timing, "SECONDS_PER_CASE", 0.0)
    files = ["--json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")]
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--threads", "1", *files])
    with pytest.raises(SystemExit) as end:
        kernels.main()
    assert end.value.code == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["machine"]["threads"] == 1
    assert {"cpu", "torch", "simd", "load_average", "load_average_after"} <= set(written["machine"])
    measured = [b.name for b in selection_cases.BENCHMARKS for _ in range(2)] + ["attention"]
    measured += [b.name for b in layer_cases.BENCHMARKS[1:] for _ in range(2)]
    assert [r["benchmark"] for r in written["results"]] == measured
    for r in written["results"]:
        assert r["us"] > 0
        assert r["repeats"] == 3
        assert r["gb_per_s"] == pytest.approx(r["bytes"] / r["us"] / 1e3)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(1 + len(r["rivals"]) for r in written["results"])
    assert rows[0]["command"] == f'python -m bench.kernels --device cpu --only "{rows[0]["kernel"]}"'
    assert all(float(row["median_us"]) > 0 and float(row["deviation_us"]) >= 0 for row in rows)
    assert "eager" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["x", "--only", "nothing"])
    with pytest.raises(SystemExit) as end:
        kernels.main()
    assert end.value.code == 2


@pytest.mark.parametrize("size", [100, 5000])
def test_no_contender_finds_its_inputs_in_a_cache(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Ours and the rivals take the copies in turn, so that each call gets the copy that was used longest ago."""
    used: list[int] = []
    rivals = {name: lambda i: used.append(i) for name in ("eager", "other")}
    make = lambda shape, dtype, copies: KernelCase(size, lambda i: used.append(i), rivals)  # noqa: E731
    monkeypatch.setattr(kernel_timing, "cold_bytes", lambda: 10_000)
    copies = kernel_timing.cpu_copies(size)
    assert copies == {100: 64, 5000: 2}[size]
    result = kernel_timing.measure_on_cpu(make, (1, 1, 10), torch.float32, copies, 50)
    assert len(used) == 1 + 3 * result["repeats"]
    assert all(len(set(used[i : i + copies])) == copies for i in range(1, len(used) - copies))
