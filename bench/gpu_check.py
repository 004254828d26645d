"""Tests and benchmarks of one GPU within a time limit: ``python -m bench.gpu_check --out DIR``

The parts run one after the other: the tests marked ``gpu``, the kernels' benchmarks (``bench.kernels``), whole generations by planted models of LLaMA's
sizes (``bench.bench_generate``), transformers' compiled ``generate()``, and the tests under compute-sanitizer. Each part is a process with a time limit.
``DIR/gpu_check.json`` has the results and is written after each part; ``DIR/gpu_check.log`` has the output of all parts.

The check runs the source tree that contains it, with or without git. It builds the native modules, for the GPU's architecture alone, where they do not
import. pytest runs in several processes and with a limit per test where pytest-xdist and pytest-timeout are installed. Exit status: 0, all parts passed;
1, a part failed; 2, there is no GPU. ``--dry-run`` runs the same parts on a CPU with small sizes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ALL_SECONDS = 460
LAST_LINES = 12
"""Lines of the output of a failed part that the results keep."""

GPU_TESTS = ("tests/pipespec", "tests/kernels", "tests/spd")
"""Folders with tests that need a GPU."""

KERNELS = (
    "verify greedy",
    "verify coupled",
    "attention",
    "argmax",
    "kv_append",
    "add_rms_norm",
    "silu_mul",
    "rope_append",
)
ROWS = ("plain-graphs", "lockstep-graphs", "streams", "assisted")
"""Beside ``generate()``. On one device the published asynchronous schedule and workers take turns, so they are left out."""


@dataclass(frozen=True)
class Part:
    """One process of the check.

    Args:
        name: In the results.
        command: Arguments of Python; ``{file}`` stands for the results file.
        seconds: Time limit.
        required: Whether the check fails without it.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    required: bool = True

    @property
    def is_tests(self) -> bool:
        return "pytest" in self.command


def _tests(
    name: str, marked: str, paths: Sequence[str], seconds: int, *, processes: int, required: bool = True
) -> Part:
    plugins: tuple[str, ...] = ()
    if find_spec("xdist") and processes > 1:
        plugins += ("-n", str(processes))
    if find_spec("pytest_timeout"):
        plugins += ("--timeout", "60")
    options = ("-m", marked, "-q", "--tb=short", "-p", "no:cacheprovider", "--junitxml", "{file}", *plugins)
    return Part(name, ("-m", "pytest", *paths, *options), seconds, required)


def _generations(name: str, models: Sequence[str], rows: Sequence[str], seconds: int, *options: str) -> Part:
    chosen = ("--planted", *models, "--rows", *rows, "--first-token", "--json", "{file}", "--prompts", "1")
    return Part(name, ("-m", "bench.bench_generate", *chosen, "--seconds", str(seconds - 20), *options), seconds)


def _kernels(seconds: int, *options: str) -> Part:
    return Part("kernels", ("-m", "bench.kernels", "--quick", "--json", "{file}", *options), seconds, required=False)


def parts_of(dry: bool) -> tuple[Part, ...]:
    """The parts, on the GPU or for a dry run."""
    if dry:
        sizes = ("--prompt-tokens", "8", "--new-tokens", "12", "--repeats", "1", "--threads", "1", "--dtype", "float32")
        return (
            _tests(
                "tests", "not gpu", ("tests/kernels/test_noise.py", "tests/kernels/test_argmax.py"), 300, processes=2
            ),
            _kernels(120, "--threads", "1", "--only", "kv_append"),
            _generations("1B -> 8B", ("tiny-small", "tiny-target"), ROWS, 120, *sizes, "--uncalibrated"),
            _generations("compiled", ("tiny-small",), ("static",), 120, *sizes, "--uncalibrated", "--seconds", "inf"),
        )
    sizes = ("--prompt-tokens", "64", "--new-tokens", "256", "--repeats", "2", "--device", "cuda")
    tuning = ("--agreement", "0.8", "--settings", "3", "--tuning-tokens", "48")
    return (
        _tests("tests", "gpu and not sanitizer", GPU_TESTS, 160, processes=6),
        _kernels(45, "--device", "cuda", "--only", *KERNELS),
        _generations("1B -> 8B", ("1B", "8B"), ROWS, 165, *sizes, *tuning),
        # Compilation takes longer than bench_generate allows of a time limit.
        _generations("compiled", ("8B",), ("static",), 120, *sizes, "--uncalibrated", "--seconds", "inf"),
        _tests("memcheck", "gpu and sanitizer", GPU_TESTS[:1], 120, processes=1, required=False),
    )


def run(command: Sequence[str], log: Path, seconds: float, **variables: str) -> dict[str, Any]:
    """Run Python with ``command`` and the environment ``variables``, and end it after ``seconds`` with all its processes.

    Returns:
        ``status`` (None: it was stopped), ``seconds`` and ``last_lines``.
    """
    begin = time.monotonic()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # faulthandler prints all threads of a process that crashes, or that SIGABRT ends because it hangs.
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"} | variables
    with log.open("ab") as output:
        output.write(f"\n==== {' '.join(command)}\n".encode())
        output.flush()
        before = output.tell()
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True, **streams
        )
        status: int | None = None
        try:
            status = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(3)
        finally:
            with suppress(ProcessLookupError):  # the process and its children
                os.killpg(process.pid, signal.SIGKILL)
    with log.open("rb") as file:
        file.seek(before)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "last_lines": lines[-LAST_LINES:]}


def results_of(part: Part, file: Path) -> dict[str, Any]:
    """What a part has written; empty where it has written nothing."""
    with suppress(OSError, ValueError, ElementTree.ParseError):
        if not part.is_tests:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found
        cases = list(ElementTree.parse(file).iter("testcase"))
        failed = {
            f"{case.get('classname')}::{case.get('name')}": (found.get("message") or "").splitlines()[:3]
            for case in cases
            for found in (*case.findall("failure"), *case.findall("error"))
        }
        skipped = sum(case.find("skipped") is not None for case in cases)
        return {"tests": {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}}
    return {}


def has_passed(part: Part, found: dict[str, Any]) -> bool:
    """Whether nothing failed and something ran."""
    if part.is_tests:
        is_empty = found["status"] == 5 and not part.required  # pytest's status where it has collected no test
        return (found["status"] == 0 and found.get("tests", {}).get("passed", 0) > 0) or is_empty
    if "rows" in found:
        return found["status"] == 0 and any(row.get("tokens_per_second") for row in found["rows"])
    measured = found.get("results", [])
    return found["status"] == 0 and bool(measured) and not any("error" in result for result in measured)


def show(part: Part, found: dict[str, Any]) -> None:
    """Print the result of a part."""
    print(f"{part.name:12}{'passed' if found['passed'] else 'FAILED'} in {found['seconds']:.0f} s", flush=True)
    tests = found.get("tests")
    if tests:
        print(f"    {tests['passed']} passed, {tests['skipped']} skipped, {len(tests['failed'])} failed")
        print("".join(f"    {name}\n" for name in tests["failed"]), end="")
    for row in found.get("rows", ()):
        speed = row.get("tokens_per_second")
        print(f"    {row['label']:50}" + (f"{speed:9.1f} tokens/s" if speed else f" ({row.get('reason')})"))
    for result in found.get("results", ()):
        figure = result.get("error") or f"{result['us']:9.2f} us, {result['gb_per_s']:.0f} GB/s"
        print(f"    {result['benchmark']:16}{result['shape']!s:24}{figure}")
    if not found["passed"]:
        print("".join(f"    | {line[:200]}\n" for line in found["last_lines"]), end="", flush=True)


_FACTS = "import json; from pipespec.bench.machine import provenance; print(json.dumps(provenance()))"
_ARCHITECTURE = "import torch; print('%d%d' % torch.cuda.get_device_capability())"


def prepare(log: Path, dry: bool, seconds: float) -> dict[str, Any]:
    """Build the native modules where they do not import. Returns the machine's facts, and the build's result.

    Raises:
        RuntimeError: The package does not import.
    """
    modules, built = "_native" if dry else "_native, _cuda", {}
    if run(["-c", f"from pipespec_kernels import {modules}"], log, 60)["status"] != 0:
        variables = {}
        if not dry and "PIPESPEC_CUDA_ARCHS" not in os.environ:  # each further architecture would take as long again
            variables["PIPESPEC_CUDA_ARCHS"] = run(["-c", _ARCHITECTURE], log, 60)["last_lines"][-1]
        built = {"build": run(["setup.py", "-q", "build_ext", "--inplace"], log, seconds, **variables)}
    facts = run(["-c", _FACTS], log, 60)
    if facts["status"] != 0:
        raise RuntimeError("\n".join(facts["last_lines"]))
    return {"machine": json.loads(facts["last_lines"][-1]), **built}


def check(out: Path, parts: Sequence[Part], seconds: float = ALL_SECONDS, dry: bool = False) -> bool:
    """Run ``parts`` and write ``out/gpu_check.json`` after each; returns whether all required ones passed."""
    log, end, passed = out / "gpu_check.log", time.monotonic() + seconds, True
    log.write_bytes(b"")
    record: dict[str, Any] = {"dry_run": dry, "parts": {}}

    def write() -> None:
        half = out / "gpu_check.json.new"
        half.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        half.replace(out / "gpu_check.json")

    record |= prepare(log, dry, seconds)
    write()
    for i, part in enumerate(parts):
        limit = min(part.seconds, end - time.monotonic())
        if limit < 10:
            found: dict[str, Any] = {"status": None, "seconds": 0.0, "last_lines": ["no time was left"]}
        else:
            file = out / f"part{i}"
            found = run([str(file) if word == "{file}" else word for word in part.command], log, limit)
            found |= results_of(part, file)
            file.unlink(missing_ok=True)
        found["passed"] = has_passed(part, found)
        passed = passed and (found["passed"] or not part.required)
        record["parts"][part.name] = found
        write()
        show(part, found)
    record["passed"] = passed
    write()
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for all parts together (%(default)s)")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only parts of these names")
    parser.add_argument("--dry-run", action="store_true", help="the same parts on a CPU with small sizes")
    options = parser.parse_args()
    parts = parts_of(options.dry_run)
    names = [part.name for part in parts]
    if not set(options.parts or names) <= set(names):
        parser.error(f"--parts must be some of: {', '.join(names)}")
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("bench.gpu_check: no GPU is visible to torch; nothing was run.", file=sys.stderr)
            return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts if part.name in (options.parts or names)]
    passed = check(out, chosen, options.seconds, options.dry_run)
    print(f"{'all passed' if passed else 'NOT all passed'}; written to {out}/gpu_check.json")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
