"""Compile in parallel the kernels that tests and benchmarks would compile one by one: ``python -m bench.warm_kernels [--json FILE] [--seconds S]
[--dry]``

Each job runs a real call once, so Triton's cache on disk has the variants with exactly the arguments that come later: the kernels' benchmarks with
their quick shapes, and captured pipelines with the layers of the 1B and 8B models, one of each.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

from bench.figures import Figures, parser

Job = tuple[str, ...]
MODULES = ("bench_verify", "bench_attention", "bench_select", "bench_rejection_sample", "bench_layers")
MOST_PROCESSES = 10
"""Each has a context on the GPU."""


def jobs(dry: bool) -> Iterator[Job]:
    """All jobs, the longest first."""
    for small, large in (("tiny-small", "tiny-target"),) if dry else (("1B", "8B"),):
        for schedule in ("lockstep", "streams", "plain"):
            yield "pipeline", schedule, small, large
    for module in MODULES:
        found = importlib.import_module(f"bench.{module}").BENCHMARKS
        device = "cpu" if dry else "cuda"
        for benchmark in found[:1] if dry else found:
            shapes = range(len(benchmark.shapes(device, True)))
            for shape in itertools.islice(shapes, 1) if dry else shapes:
                yield "kernel", module, benchmark.name, str(shape)


def work(job: Job, dry: bool) -> float:
    """Run a job in this process; returns its seconds."""
    import torch

    begin = time.monotonic()
    torch.set_num_threads(1)
    with torch.no_grad():
        {"kernel": _kernel, "pipeline": _pipeline}[job[0]](dry, *job[1:])
        if not dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return time.monotonic() - begin


def _kernel(dry: bool, module: str, name: str, number: str) -> None:
    device = "cpu" if dry else "cuda"
    benchmark = next(b for b in importlib.import_module(f"bench.{module}").BENCHMARKS if b.name == name)
    shape = benchmark.shapes(device, True)[int(number)]
    case = benchmark.make(device, True)(shape, benchmark.dtypes(device, True)[0], 2)
    case.ours(0)


def _pipeline(dry: bool, schedule: str, small: str, large: str) -> None:
    """A chain of models with one layer each: the kernels depend on the sizes of a layer, not on how many there are."""
    import torch

    from pipespec import Pipeline
    from pipespec.bench import planted

    shapes = {f"one-layer-{name}": replace(planted.SHAPES[name], num_hidden_layers=1) for name in (small, large)}
    planted.SHAPES.update(shapes)
    device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    draft, target = planted.plant(list(shapes), texts=0, device=device, dtype=dtype).models
    ids = torch.arange(2, 66, device=device)[None]
    graphs = {} if schedule == "streams" else {"graphs": True}
    drafts = [] if schedule == "plain" else [draft]
    with Pipeline(target, drafts, schedule=schedule, **graphs) as pipe:
        new = 8 if dry else 256  # a cache as large as in the measurement
        pipe.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)


def main() -> int:
    options = parser("Compiles kernels in parallel.").parse_args()
    figures = Figures(options.json, options.seconds)
    cores = len(os.sched_getaffinity(0))
    processes = 2 if options.dry else max(1, min(MOST_PROCESSES, cores - 2))
    begin = time.monotonic()

    def run(figures: Figures) -> None:
        seconds: dict[str, float] = {}
        figures.detail("job_seconds", seconds)
        pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        running = {pool.submit(work, job, options.dry): job for job in jobs(options.dry)}
        try:
            for done in as_completed(running, timeout=None if figures.left == float("inf") else max(figures.left, 0)):
                name = " ".join(running[done])
                error = done.exception()
                if error is None:
                    seconds[name] = round(done.result(), 2)
                    print(f"{seconds[name]:6.1f} s  {name}", flush=True)
                else:
                    # A kernel that does not compile here fails again in its measurement, with its own message.
                    figures.leave_out(name, f"{type(error).__name__}: {error}")
        except TimeoutError:
            figures.leave_out("the rest", "the time was over")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
        figures.add("warm.jobs", len(seconds))

    figures.section("compiling", run)
    figures.add("warm.seconds", time.monotonic() - begin)
    return figures.finish()


if __name__ == "__main__":
    sys.exit(main())
