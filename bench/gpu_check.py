"""Does everything hold on this GPU, and how fast is it? ``python -m bench.gpu_check --out DIR``

Runs the tests that need a GPU, then the kernels' benchmarks on a few shapes, prints a short table, and writes
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
from pathlib import Path
from typing import Any

from bench.gpu import gpu_machine, refuse_without_gpu
from bench.kernels import MODULES

ROOT = Path(__file__).parents[1]
ALL_SECONDS, TEST_SECONDS = 460, 240
GRACE_SECONDS = 5  # for a step that is out of time to write what it has


def share(past: float, steps: int) -> int:
    """The time limit of the next step, where so many seconds have passed and so many steps are to come."""
    return int((ALL_SECONDS - past) / steps) - GRACE_SECONDS


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


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU tests and kernel benchmarks in one go.")
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
    written = out / "gpu_check.json"
    written.write_text(json.dumps({"machine": info, "tests": tests, "benchmarks": benchmarks}, indent=1) + "\n")
    print(f"{'all well' if good else 'NOT all well'}; written to {written}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
