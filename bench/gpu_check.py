"""Does everything hold on this GPU, and how fast is it? ``python -m bench.gpu_check --out DIR``

Runs the tests that need a GPU, then the kernels' benchmarks on a few shapes, then whole generations by planted models of LLaMA's
sizes against everybody else's (``bench.bench_generate``); prints short tables, and writes
``DIR/gpu_check.json`` with all results (and each step's output beside it, as it was printed). Every step has a time
limit; together they stay under eight minutes: the benchmarks share what the tests leave them. Exit status: 0, all well;
1, a step failed; 2, there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import bench_generate
from bench.gpu import gpu_machine, refuse_without_gpu
from bench.kernels import MODULES
from pipespec.demo.comparison import aligned

ROOT = Path(__file__).parents[1]
ALL_SECONDS, TEST_SECONDS = 460, 180
GENERATE_SECONDS = 120  # kept free for the generations
GRACE_SECONDS = 5  # for a step that is out of time to write what it has
AGREEMENT = 0.8

CHAINS = (
    (("1B", "8B"), 24, 60, ()),
    (("1B", "3B", "8B"), 40, 75, ("1B+3B", "assisted-3B", "ours-plain")),
)
"""Planted chains: their shapes, the memory in GiB and the seconds below which they are left out, and the rows (none named: all)."""


def share(past: float, steps: int) -> int:
    """The time limit of the next kernel's benchmark, where so many seconds have passed and so many such steps are to come."""
    return int((ALL_SECONDS - GENERATE_SECONDS - past) / steps) - GRACE_SECONDS


def step(command: list[str], log: Path, limit: int) -> dict[str, Any]:
    """Runs one step in a process of its own: an error on the device is the end of a CUDA context, not of the others."""
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        status: int | None = None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then writes its report
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            output.write(f"\nstopped after {limit} s\n")
    return {"command": command, "status": status, "seconds": round(time.monotonic() - begin, 1), "log": log.name}


def run_tests(out: Path) -> dict[str, Any]:
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    command = ["-m", "pytest", "tests", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    result = step(command, out / "tests.log", TEST_SECONDS)
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):  # a crash leaves none, or half of one
        cases = []
    outcomes = {kind: [c for c in cases if c.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    result["tests"] = {
        "passed": len(cases) - sum(map(len, outcomes.values())),
        "skipped": len(outcomes["skipped"]),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in outcomes["failure"] + outcomes["error"]],
    }
    return result


def run_benchmark(module: str, out: Path, limit: int) -> dict[str, Any]:
    written = out / f"{module}.json"
    written.unlink(missing_ok=True)
    command = ["-m", f"bench.{module}", "--device", "cuda", "--quick", "--json", str(written)]
    result = step(command, out / f"{module}.log", limit)
    try:
        result |= json.loads(written.read_text())
    except (OSError, ValueError):
        pass
    return result


def run_chain(names: Sequence[str], rows: Sequence[str], out: Path, limit: int) -> dict[str, Any]:
    """A benchmark of whole generations: its record, with the step's status."""
    name = "generate_" + "_".join(names)
    written = out / f"{name}.json"
    written.unlink(missing_ok=True)
    command = ["-m", "bench.bench_generate", "--device", "cuda", "--planted", *names, "--agreement", str(AGREEMENT)]
    command += ["--quick", "--seconds", str(limit - 15), *(["--only", *rows] if rows else []), "--json", str(written)]
    result = step(command, out / f"{name}.log", limit)
    try:
        result |= json.loads(written.read_text())
    except (OSError, ValueError):
        pass
    return result


def generate(out: Path, begin: float, memory_gib: float) -> tuple[dict[str, Any], bool]:
    """The chains for which there is memory and time, and whether all is well; prints their tables."""
    found: dict[str, Any] = {}
    good = True
    for done, (names, gib, least, rows) in enumerate(CHAINS):
        name = " -> ".join(names)
        left = int(ALL_SECONDS - (time.monotonic() - begin)) - GRACE_SECONDS
        # The first leaves the next one its least, where that leaves the first enough.
        after = sum(least_of_next for _, need, least_of_next, _ in CHAINS[done + 1 :] if need <= memory_gib)
        limit = left - after if left - after >= least else left
        if memory_gib < gib or limit < least:
            missing = f"{gib} GiB of memory" if memory_gib < gib else f"{least} s"
            found[name] = {"left_out": f"it needs {missing}"}
            print(f"{name}: left out, it needs {missing}")
            continue
        result = found[name] = run_chain(names, rows, out, limit)
        print(f"\n{name}, agreement {AGREEMENT} asked for")
        if result["status"] != 0:
            good = False
            print(f"FAILED: see {out / result['log']}")
        results = [bench_generate.Result(**row) for row in result.get("rows", [])]
        measured = [r for r in results if r.reason is None]
        if measured:
            print(aligned([bench_generate.HEADER, *map(bench_generate.cells, measured)]))
            for line in (*bench_generate.verdict(results), *bench_generate.footnotes(results)):
                print(line[:300])
        elif result["status"] == 0:
            good = False
            print("FAILED: nobody generated anything")
    return found, good


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU tests, kernels' benchmarks and generations in one go.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    options = parser.parse_args()
    refuse_without_gpu("bench.gpu_check")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    begin = time.monotonic()
    info = gpu_machine()
    print(
        f"{info['gpu']}, torch {info['torch']}, CUDA {info['cuda']}, triton {info['triton']}, commit {info['commit']}"
    )
    tests = run_tests(out)
    counts = tests["tests"]
    # Nothing passed is a failure, too: on a GPU there is something to run.
    good = tests["status"] == 0 and counts["passed"] > 0
    print(
        f"tests           {'passed' if good else 'FAILED'}: {counts['passed']} passed, {counts['skipped']} skipped, "
        f"{len(counts['failed'])} failed, {tests['seconds']:.0f} s"
    )
    for failed in counts["failed"]:
        print(f"    {failed}")

    benchmarks = {}
    print(f"{'':16}{'B':>4}{'Q':>4}{'V or S':>8}{'us':>9}{'GB/s':>8}{'of copy':>9}   times ours")
    for done, module in enumerate(MODULES):
        limit = share(time.monotonic() - begin, len(MODULES) - done)
        result = benchmarks[module] = run_benchmark(module, out, limit)
        if result["status"] != 0:
            good = False
            print(f"{module:16}FAILED: see {out / result['log']}")
        for r in result.get("results", []):
            batch, width, size = r["shape"]
            line = f"{r['benchmark']:16}{batch:4}{width:4}{size:8}"
            if "error" in r:
                print(f"{line} FAILED: {r['error'].splitlines()[0][:80]}")
                continue
            others = "".join(f"  {name} {x['times_ours']:.1f}" for name, x in r["rivals"].items() if "us" in x)
            print(f"{line}{r['us']:9.2f}{r['gb_per_s']:8.0f}{r['fraction_of_copy']:9.2f} {others}", flush=True)
    chains, well = generate(out, begin, info["gpu_memory_bytes"] / 2**30)
    good &= well
    written = out / "gpu_check.json"
    record = {"machine": info, "tests": tests, "benchmarks": benchmarks, "generate": chains}
    written.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'all well' if good else 'NOT all well'}; written to {written}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
