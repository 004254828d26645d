"""Does everything hold on this GPU, and how fast is it? ``python -m bench.gpu_check --out DIR``

Runs the tests that need a GPU, then the kernels' benchmarks on a few shapes, prints a short table, and writes
``DIR/gpu_check.json`` with all results (and each step's output beside it, as it was printed). Every step has a time
limit; together they stay under eight minutes. Exit status: 0, all well; 1, a step failed; 2, there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from bench.gpu import gpu_machine, refuse_without_gpu

ROOT = Path(__file__).parents[1]
TEST_SECONDS, BENCH_SECONDS = 200, 45
BENCHMARKS = {
    "verify greedy": ["bench.bench_verify", "--device", "cuda", "--mode", "greedy"],
    "verify coupled": ["bench.bench_verify", "--device", "cuda", "--mode", "coupled"],
    "verify_ratio": ["bench.bench_verify_ratio"],
    "cutoff": ["bench.bench_cutoff"],
    "attention": ["bench.bench_attention", "--device", "cuda"],
    "kv": ["bench.bench_kv", "--device", "cuda"],
}


def step(command: list[str], log: Path, limit: int) -> dict[str, Any]:
    """Runs one step in a process of its own: an error on the device is the end of a CUDA context, not of the others."""
    begin = time.monotonic()
    with log.open("w") as output:
        try:
            status: int | None = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
            output.write(f"\nstopped after {limit} s\n")
    return {"command": command, "status": status, "seconds": round(time.monotonic() - begin, 1), "log": log.name}


def run_tests(out: Path) -> dict[str, Any]:
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    command = ["-m", "pytest", "tests", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    result = step(command, out / "tests.log", TEST_SECONDS)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    outcomes = {kind: [c for c in cases if c.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    result["tests"] = {
        "passed": len(cases) - sum(map(len, outcomes.values())),
        "skipped": len(outcomes["skipped"]),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in outcomes["failure"] + outcomes["error"]],
    }
    return result


def run_benchmark(name: str, command: list[str], out: Path) -> dict[str, Any]:
    stem = name.replace(" ", "_")
    written = out / f"{stem}.json"
    written.unlink(missing_ok=True)
    result = step(["-m", *command, "--quick", "--json", str(written)], out / f"{stem}.log", BENCH_SECONDS)
    if written.exists():
        result |= json.loads(written.read_text())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU tests and kernel benchmarks in one go.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    options = parser.parse_args()
    refuse_without_gpu("bench.gpu_check")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

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
    print(f"{'':16}{'B':>4}{'Q':>4}{'V, S':>8}{'us':>9}{'GB/s':>8}{'of copy':>9}{'torch':>8}")
    for name, command in BENCHMARKS.items():
        result = benchmarks[name] = run_benchmark(name, command, out)
        if result["status"] != 0:
            good = False
            print(f"{name:16}FAILED: see {out / result['log']}")
        for r in result.get("results", []):
            batch, width, vocab = r["shape"]
            eager = r["rivals"].get("eager") or r["rivals"].get("sdpa")
            print(
                f"{r.get('op', name):16}{batch:4}{width:4}{vocab:8}{r['us']:9.2f}{r['gb_per_s']:8.0f}{r['fraction_of_copy']:9.2f}"
                + (f"{eager['times_ours']:7.1f}x" if eager else "")
            )
    written = out / "gpu_check.json"
    written.write_text(json.dumps({"machine": info, "tests": tests, "benchmarks": benchmarks}, indent=1) + "\n")
    print(f"{'all well' if good else 'NOT all well'}; written to {written}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
