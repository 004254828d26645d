"""How fast is verification? ``python -m bench.bench_verify [--quick] [--json FILE]``

For every shape ``[B, Q, V]`` and dtype, cold and hot: ``ops.verify`` with all hints right (so that every row is read),
the native call inside it, a plain vectorised read of as many bytes with the same threads, and ``torch.argmax``. The four
are timed in turn, call by call, so that other load on the machine meets them alike; medians. Reported:

* ``us``: one call of ``ops.verify``, the checks and allocations in Python included (cold, they miss the caches too);
* ``native``: the native call alone; ``GB/s``: bytes of logits over that time;
* ``of read``: time of the plain read over the native time, 1.00 being memory bandwidth;
* ``torch``: time of ``torch.argmax`` over that of ``ops.verify``.

Cold: every call gets bytes that were not touched since a sweep over a buffer of ``--cold-mib``. Hot: the same bytes
again and again.

``--mode coupled``: sampling, for one batch of logits of a verification step (8 x 5 x 128256, bfloat16). ``ops.verify``
with noise and all hints right, against what sampling costs in plain torch (softmax in float32 and ``multinomial``), and
``ops.cutoff`` against the warpers of transformers for the same filters; called in turn, medians, same threads.

``--device cuda``: the Triton kernel, greedy or coupled, with all rows read, inside a CUDA graph; against eager torch and
``torch.compile`` (coupled: softmax in float32 and an exponential race). How times are taken: ``bench/gpu.py``.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

from bench import gpu
from bench.harness import ColdMemory, last_level_cache_bytes, machine, median_us, seconds, write
from pipespec_kernels import _native, ops
from pipespec_kernels.noise import Noise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Case:
    """Logits, and the tokens that agree with them."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        batch, width, _ = logits.shape
        self.tokens = torch.zeros((batch, width), dtype=torch.int64)
        self.tokens[:, 1:] = ops.argmax(logits)[:, :-1]

    def verify(self, n_fed: torch.Tensor, n_hint: torch.Tensor, threads: int) -> None:
        ops.verify(self.logits, self.tokens, n_fed, n_hint, threads=threads)

    def native_arguments(self, n_fed: torch.Tensor, n_hint: torch.Tensor, out: torch.Tensor, threads: int) -> list[int]:
        x, t = self.logits, self.tokens
        code = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16, torch.float16: _native.FLOAT16}[
            x.dtype
        ]
        counts = [n_fed.data_ptr(), n_hint.data_ptr()]
        results = [out.data_ptr(), out.data_ptr() + 4 * t.numel()]
        return [x.data_ptr(), code, *x.shape, *x.stride()[:2], t.data_ptr(), 8, *t.stride(), *counts, *results, threads]


def measure(
    memory: ColdMemory, shape: tuple[int, int, int], name: str, threads: int, repeats: int
) -> list[dict[str, Any]]:
    batch, width, _ = shape
    dtype = DTYPES[name]
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    n_fed = torch.full((batch,), width, dtype=torch.int32)
    n_hint = n_fed - 1
    # At most this many torch calls: it is far slower than the rest, and less noisy for it.
    torch_repeats = min(repeats, max(5, repeats // 5))

    # Neighbours in memory, so that the sweep has left them equally cold.
    whole, inner, reads, others = [], [], [], []
    for i in range(repeats):
        whole.append(Case(memory.piece(shape, dtype)))
        inner.append(Case(memory.piece(shape, dtype)))
        reads.append(memory.piece(shape, dtype))
        if i < torch_repeats:
            others.append(memory.piece(shape, dtype))
    hot = Case(whole[0].logits.clone())
    out = torch.empty(batch * width + batch, dtype=torch.int32)
    assert ops.verify(hot.logits, hot.tokens, n_fed, n_hint)[1].tolist() == [width - 1] * batch

    results = []
    for state in ("cold", "hot"):
        if state == "hot":
            whole, inner, reads = [hot] * repeats, [hot] * repeats, [hot.logits] * repeats
            others = reads[:torch_repeats]
        else:
            memory.flush()
        verify, native, read, other = [], [], [], []
        for i in range(repeats):
            if state == "hot":
                hot.verify(n_fed, n_hint, threads)  # torch may have evicted it
            arguments = inner[i].native_arguments(n_fed, n_hint, out, threads)
            native.append(seconds(_native.verify, *arguments))
            verify.append(seconds(whole[i].verify, n_fed, n_hint, threads))
            read.append(seconds(_native.read_bandwidth_probe, reads[i].data_ptr(), nbytes, threads))
            if i < torch_repeats:
                other.append(seconds(torch.argmax, others[i], -1))
        us, native_us, read_us, torch_us = (median_us(samples) for samples in (verify, native, read, other))
        results.append(
            {
                "shape": shape,
                "dtype": name,
                "state": state,
                "threads": threads,
                "repeats": repeats,
                "bytes": nbytes,
                "us": us,
                "native_us": native_us,
                "read_us": read_us,
                "torch_us": torch_us,
                "gb_per_s": nbytes / native_us / 1e3,
                "read_gb_per_s": nbytes / read_us / 1e3,
                "fraction_of_read": read_us / native_us,
                "times_torch": torch_us / us,
                "best_us": min(verify) * 1e6,
                "best_native_us": min(native) * 1e6,
                "best_read_us": min(read) * 1e6,
            }
        )
    return results


FILTERS: list[dict[str, Any]] = [
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.9},
    {"min_p": 0.05},
]
TEMPERATURE = 0.6


def warped(logits: torch.Tensor, filters: dict[str, Any]) -> torch.Tensor:
    """What ``generate()`` does to the logits of every step."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    makers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    scores = TemperatureLogitsWarper(TEMPERATURE)(None, logits.flatten(0, 1).float())
    for name, value in filters.items():
        scores = makers[name](value)(None, scores)
    return scores


def measure_coupled(threads: int, repeats: int) -> list[dict[str, Any]]:
    shape, dtype = (8, 5, 128256), torch.bfloat16
    batch, width, _ = shape
    n_fed = torch.full((batch,), width, dtype=torch.int32)
    n_hint = n_fed - 1
    scale = torch.full((batch,), 1 / TEMPERATURE)
    results: list[dict[str, Any]] = []

    def report(name: str, ours: list[float], theirs: list[float]) -> None:
        row = {"name": name, "shape": shape, "dtype": "bfloat16", "threads": threads, "repeats": len(ours)}
        results.append(row | {"us": median_us(ours), "torch_us": median_us(theirs)})
        print(f"{name:40}{median_us(ours):12.1f}{median_us(theirs):14.1f}{median_us(theirs) / median_us(ours):9.1f}")

    print(f"{'B=8 Q=5 V=128256 bfloat16':40}{'us':>12}{'torch us':>14}{'ratio':>9}")
    # Logits that leave little to the noise let it be skipped; flat ones do not.
    for spread in (1.0, 4.0):
        logits = (torch.randn(shape) * spread).to(dtype)
        noise = Noise(torch.arange(batch), torch.arange(batch) * 100, scale)
        tokens = torch.zeros((batch, width), dtype=torch.int64)
        tokens[:, 1:] = ops.sample(logits, noise)[:, :-1]
        assert ops.verify(logits, tokens, n_fed, n_hint, noise=noise)[1].tolist() == [width - 1] * batch

        def plain_torch(logits: torch.Tensor) -> torch.Tensor:
            scores = logits.flatten(0, 1).float() / TEMPERATURE
            return torch.multinomial(torch.softmax(scores, -1), 1)

        ours, theirs, greedy = [], [], []
        for _ in range(repeats):
            ours.append(seconds(lambda: ops.verify(logits, tokens, n_fed, n_hint, noise=noise, threads=threads)))  # noqa: B023
            theirs.append(seconds(plain_torch, logits))
            greedy.append(seconds(lambda: ops.argmax(logits, threads=threads)))  # noqa: B023
        report(f"verify(noise), logits of spread {spread:g}", ours, theirs)
    report("argmax, against the same", greedy, theirs)
    for filters in FILTERS:
        ours, theirs, both = [], [], []
        for _ in range(max(3, repeats // 3)):
            ours.append(seconds(lambda: ops.cutoff(logits, inv_temperature=scale, threads=threads, **filters)))  # noqa: B023
            theirs.append(seconds(warped, logits, filters))
            noise.cutoff = ops.cutoff(logits, inv_temperature=scale, **filters)
            both.append(seconds(lambda: ops.sample(logits, noise, threads=threads)))
        name = ", ".join(f"{k}={v:g}" for k, v in filters.items())
        report(f"cutoff {name}", ours, theirs)
        report(f"sample behind cutoff {name}", both, theirs)
    return results


def eager_greedy(logits: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Verification in torch for rows that are fed full width, all but the first token hints."""
    return walk(logits.argmax(-1), tokens)


def eager_coupled(logits: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a draw from the softmax in every column, as samplers in torch do it: an exponential race."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    return walk((p / torch.empty_like(p).exponential_()).argmax(-1), tokens)


def walk(choice: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    accepted = (choice[:, :-1] == tokens[:, 1:]).int().cumprod(1).sum(1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(columns <= accepted[:, None], choice, -1), accepted


def cuda_case(mode: str, quick: bool) -> Any:
    """Makes the case of a shape on the GPU."""
    from pipespec_kernels.triton import Workspace
    from pipespec_kernels.triton import verify as triton_verify

    eager = eager_greedy if mode == "greedy" else eager_coupled
    rivals = {"eager": eager} if quick else {"eager": eager, "compile": gpu.compiled(eager)}

    def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> gpu.Case:
        batch, width, _ = shape
        logits = torch.empty((copies, *shape), dtype=dtype, device="cuda").normal_()
        tokens = torch.zeros((copies, batch, width), dtype=torch.int64, device="cuda")
        for i in range(copies):
            tokens[i, :, 1:] = logits[i].argmax(-1)[:, :-1]
        n_fed = torch.full((batch,), width, dtype=torch.int32, device="cuda")
        n_hint = n_fed - 1
        seeds = torch.arange(batch, device="cuda")
        scale = torch.ones(batch, device="cuda")
        noise = None if mode == "greedy" else Noise(seeds, seeds * 0, scale)
        workspace = Workspace(batch, width, "cuda")
        if mode == "greedy":
            got = triton_verify(logits[0], tokens[0], n_fed, n_hint, workspace=workspace)
            for ours, theirs in zip(got, eager(logits[0], tokens[0], scale), strict=True):
                assert torch.equal(ours, theirs.int())
        return gpu.Case(
            logits[0].numel() * dtype.itemsize,
            lambda i: triton_verify(logits[i], tokens[i], n_fed, n_hint, noise=noise, workspace=workspace),
            {name: lambda i, rival=rival: rival(logits[i], tokens[i], scale) for name, rival in rivals.items()},
        )

    return case


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of ops.verify against a plain read and torch.argmax.")
    parser.add_argument("--mode", choices=["greedy", "coupled"], default="greedy")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats: under a minute")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--simd", choices=["portable", "avx2", "avx512"], help="default: the best")
    parser.add_argument(
        "--cold-mib", type=int, help="size of the cold buffer (default: 1.5 x last-level cache, <= 1024)"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()

    if options.device == "cuda":
        gpu.run_benchmark(options, "bench_verify", 1, lambda quick: cuda_case(options.mode, quick))
        return
    torch.set_num_threads(options.threads)
    if options.simd:
        _native.set_simd(options.simd)
    torch.manual_seed(0)
    if options.mode == "coupled":
        info = machine() | {"simd": _native.simd(), "threads": options.threads}
        print(f"{info['cpu']}, {info['simd']}, {options.threads} threads, load {info['load_average'][0]:.1f}")
        write(options.json, info, measure_coupled(options.threads, 7 if options.quick else 21))
        return
    cold_mib = options.cold_mib or max(256, min(1024, last_level_cache_bytes() * 3 // 2 >> 20))
    memory = ColdMemory(cold_mib << 20)
    batches, widths, vocabs = (
        ([1, 4], [1, 5], [2048, 128256]) if options.quick else ([1, 4, 16], [1, 5, 9], [2048, 32000, 128256])
    )
    dtypes = ["bfloat16"] if options.quick else list(DTYPES)

    info = machine() | {"cold_mib": cold_mib, "simd": _native.simd(), "threads": options.threads}
    print(
        f"{info['cpu']}, {info['cores']} cores, {info['simd']}, {options.threads} threads, torch {info['torch']}; ",
        end="",
    )
    print(
        f"cold buffer {cold_mib} MiB, last-level cache {info['last_level_cache_bytes'] >> 20} MiB, load {info['load_average'][0]:.1f}"
    )
    print(
        f"{'B':>3}{'Q':>3}{'V':>8}  {'dtype':10}{'':6}{'us':>10}{'native':>10}{'GB/s':>8}{'read GB/s':>11}{'of read':>9}{'torch':>8}"
    )
    results = []
    for name in dtypes:
        memory.fill(torch.randn(4 << 20).to(DTYPES[name]))
        for vocab, batch, width in itertools.product(vocabs, batches, widths):
            nbytes = batch * width * vocab * DTYPES[name].itemsize
            # The cold pieces (three and a bit per repeat) should fit the buffer, and a case take a second or so.
            most = 60 if options.quick else 300
            repeats = max(7, min(most, memory.bytes.numel() * 3 // 10 // (nbytes + 4096)))
            for r in measure(memory, (batch, width, vocab), name, options.threads, repeats):
                results.append(r)
                print(
                    f"{batch:3}{width:3}{vocab:8}  {name:10}{r['state']:6}{r['us']:10.1f}{r['native_us']:10.1f}{r['gb_per_s']:8.1f}"
                    f"{r['read_gb_per_s']:11.1f}{r['fraction_of_read']:9.2f}{r['times_torch']:8.1f}",
                    flush=True,
                )
    write(options.json, info, results)


if __name__ == "__main__":
    main()
