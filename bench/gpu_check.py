"""Tests and benchmarks of one GPU within a time limit: ``python -m bench.gpu_check --out DIR``

The parts run one after the other, in calls that may be made apart and take a quarter of an hour together. ``--call figures``: the first minute (:data:`FIRST`), one step
node by node (``bench.step_profile``), the kernels' benchmarks with the products (``bench.kernels``), and generations by planted models of LLaMA's sizes (``bench.gpu_more``): rounds of
0 to 6 draft tokens, also with dependent launches, long texts, and the rest. ``--call tests``: the first minute again, the places that no emulator sees (:data:`PLACES`), the other tests marked
``gpu``, and those under compute-sanitizer. ``--call known``, which runs on demand only: tests of any device, the table of schedules next to ``generate()`` (``bench.run``), also
compiled, and the tests with dependent launches. Each part is a process with a time limit that writes its results as it goes. ``DIR/gpu_check.json`` has them and is written after each part; ``DIR/gpu_check.log`` has the output of all parts. ``--resume`` leaves out what
has passed in the same folder at the same commit.

The check runs the source tree that contains it, with or without git. It builds the native modules, for the GPU's architecture alone, where they do not
import, and stops where the CUDA module cannot be had. pytest runs in several processes and with a limit per test where pytest-xdist and pytest-timeout are
installed. A part also fails where graphs run transformers' modules instead of the fused form. Exit status: 0, all parts passed; 1, a part failed; 2, there
is no GPU. ``--dry-run`` runs the same parts on a CPU with small sizes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CALL_SECONDS = {"figures": 560, "tests": 340, "known": 540}
"""By call, for its parts: their limits, which add up to no more, and a build before them."""
LAST_LINES = 12
"""Lines of the output of a failed part that the results keep."""

GPU_TESTS = ("tests/pipespec", "tests/kernels", "tests/spd", "tests/train")
"""Folders with tests that need a GPU."""

FIRST = "tests/pipespec/test_first_minute.py"
"""The CUDA module, and the captured schedules in the fused form."""

BY_RISK = ("tests/kernels/test_cuda_launcher.py", "tests/pipespec/test_streams.py", "tests/spd/test_spd_gpu.py")
"""Tests of what nothing without a GPU has run, which come first."""

PLACES = (
    "tests/pipespec/test_captured_on_a_gpu.py",
    "tests/kernels/triton/test_attention.py::test_tickets_beside_other_work",
    "tests/kernels/triton/test_selection.py::test_words_are_zero_after_launches_beside_other_work",
)
"""Tests of what neither the interpreter nor the emulator sees, while nothing else runs. Each takes less than a minute."""

DEVICE_TESTS = (
    "tests/same_text",
    "tests/spd/test_spd_generate.py",
    "tests/pipespec/test_heads.py",
    "tests/train/test_heads_training.py",
)
"""Tests that CI runs on a CPU, whose models and prompts lie on the GPU here."""

EXACT = ("bfloat16", "q4_k", "q8_0")
"""Formats of the bundled target whose texts are compared, bit for bit, over all captured ways."""

ON_DEVICE = (("PIPESPEC_TEST_DEVICE", "cuda"),)
"""Models of tests for any device lie on the GPU."""

DEPENDENT = (("PIPESPEC_PDL", "1"),)
"""Kernels are dependent launches."""

BY_MODULES = "run transformers' modules"
"""Of the warning that a model is not in the fused form."""

ROWS = ("plain-graphs", "lockstep-graphs", "streams", "assisted")
"""In addition to ``generate()``. On one device the published asynchronous schedule and workers take turns, so they are left out."""


@dataclass(frozen=True)
class Part:
    """One process of the check.

    Args:
        name: In the results.
        command: Arguments of Python; ``{file}`` stands for the results file.
        seconds: Time limit.
        required: Whether the check fails without it.
        call: one of :data:`CALL_SECONDS`; empty: those of tests and of figures begin with it.
        variables: Environment variables of the process.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    required: bool = True
    call: str = "tests"
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def is_tests(self) -> bool:
        return "pytest" in self.command


def _tests(name: str, marked: str, paths: Sequence[str], seconds: int, *, processes: int, **more: Any) -> Part:
    plugins: tuple[str, ...] = ()
    if find_spec("xdist") and processes > 1:
        plugins += ("-n", str(processes))
    if find_spec("pytest_timeout"):
        plugins += ("--timeout", "60")
    results = ("-p", "bench.result_lines", "--results", "{file}")
    options = ("-m", marked, "-q", "--tb=short", "-p", "no:cacheprovider", *results, *plugins)
    return Part(name, ("-m", "pytest", *paths, *options), seconds, **more)


def _generations(models: Sequence[str], rows: Sequence[str], seconds: int, *options: str) -> Part:
    chosen = ("--planted", *models, "--full-size", "--systems", *rows, "--out", "{file}", "--samples", "1")
    # Compilation takes longer than bench.run allows of a time limit.
    command = ("-m", "bench.run", *chosen, "--no-calibrated", "--seconds", "inf", *options)
    return Part("1B -> 8B", command, seconds, required=False, call="known")


def _figures(name: str, program: str, seconds: int, *options: str, **more: Any) -> Part:
    command = ("-m", f"bench.{program}", "--json", "{file}", *options)
    return Part(name, command, seconds, **{"required": False, "call": "figures"} | more)


def parts_of(dry: bool) -> tuple[Part, ...]:
    """The parts, on the GPU or for a dry run."""
    rest = ("first token", "batch of 8", "sampled", "draft head", "formats", "quantised")
    if dry:
        sizes = ("--new-tokens", "12", "--repeats", "1", "--threads", "1", "--dtype", "float32")
        few = ("tests/kernels/test_noise.py", "tests/kernels/test_native.py")
        return (
            _tests("smoke", "not gpu", (FIRST,), 300, processes=1, call=""),
            _figures("step profile", "step_profile", 300, "--dry-run"),
            _figures("kernels", "kernels", 120, "--quick", "--threads", "1", "--only", "kv_append"),
            _figures("rounds", "gpu_more", 240, "--dry-run", "--only", "rounds", required=True),
            _figures("dependent, rounds", "gpu_more", 240, "--dry-run", "--only", "rounds 4", variables=DEPENDENT),
            _figures("long", "gpu_more", 120, "--dry-run", "--only", "long"),
            _figures("more", "gpu_more", 240, "--dry-run", "--only", *rest),
            _tests("places", "not gpu", PLACES[:1], 300, processes=1),
            _tests("tests", "not gpu", few, 300, processes=2),
            _generations(("tiny-small", "tiny-target"), (*ROWS, "static"), 240, *sizes),
        )
    sizes = ("--new-tokens", "256", "--repeats", "2", "--device", "cuda")
    marked = "gpu and not sanitizer"
    # One core each for the launcher's threads and the check itself.
    processes = max(1, min(12, len(os.sched_getaffinity(0)) - 2))
    known: dict[str, Any] = {"processes": processes, "call": "known"}
    others = [f"--deselect={place}" for place in PLACES]
    return (
        _tests("smoke", "gpu", (FIRST,), 40, processes=1, call=""),
        _figures("step profile", "step_profile", 55),
        _figures("kernels", "kernels", 80, "--quick", "--device", "cuda"),
        _figures("rounds", "gpu_more", 130, "--only", "rounds", required=True),
        _figures("dependent, rounds", "gpu_more", 55, "--only", "rounds 0", "rounds 4", variables=DEPENDENT),
        _figures("long", "gpu_more", 80, "--only", "long"),
        _figures("more", "gpu_more", 120, "--only", *rest),
        _tests("places", "gpu and not sanitizer", PLACES, 80, processes=1),
        _tests("tests", marked, (*BY_RISK, *GPU_TESTS, *others), 110, processes=processes),
        _figures("exact", "exact", 45, "--device", "cuda", "--quick", "--formats", *EXACT, call="tests"),
        _tests("memcheck", "gpu and sanitizer", GPU_TESTS[:1], 65, processes=1, required=False),
        _tests("device", "not gpu", DEVICE_TESTS, 200, variables=ON_DEVICE, **known),
        _generations(("1B", "8B"), (*ROWS, "static"), 210, *sizes),
        _tests("dependent", marked, (*GPU_TESTS, *others), 130, required=False, variables=DEPENDENT, **known),
    )


def run(command: Sequence[str], log: Path, seconds: float, **variables: str) -> dict[str, Any]:
    """Run Python with ``command`` and the environment ``variables``, and end it after ``seconds`` with all its processes.

    Returns:
        ``status`` (None: it was stopped), ``seconds``, ``last_lines``, and with ``by_modules`` the warnings that a model is not in the fused form.
    """
    begin = time.monotonic()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Measured tiles take six compilations for each shape. faulthandler prints all threads of a process that crashes, or that SIGABRT ends because it hangs.
    environment = (
        {"PIPESPEC_TUNE": "0"} | os.environ | {"PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    )
    environment |= variables
    # Many images have nvcc in this folder alone.
    toolkit = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    environment["PATH"] = os.pathsep.join(filter(None, [environment.get("PATH"), toolkit]))
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
    found = {"status": status, "seconds": round(time.monotonic() - begin, 1), "last_lines": lines[-LAST_LINES:]}
    by_modules = list(dict.fromkeys(line[:300] for line in lines if BY_MODULES in line and "Warning" in line))
    return found | ({"by_modules": by_modules} if by_modules else {})


def results_of(part: Part, file: Path) -> dict[str, Any]:
    """What a part has written; empty where it has written nothing."""
    with suppress(OSError, ValueError):
        text = (file / "summary.json" if file.is_dir() else file).read_text(encoding="utf-8")
        if not part.is_tests:
            return dict(json.loads(text))
        # A process that was killed may have written half of the last line.
        cases = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        count = Counter(case["outcome"] for case in cases)
        failed = {case["test"]: case["message"] for case in cases if case["outcome"] == "failed"}
        slowest = {c["test"]: round(c["seconds"], 1) for c in sorted(cases, key=lambda c: -c["seconds"])[:3]}
        found = {"passed": count["passed"], "skipped": count["skipped"], "failed": failed, "slowest": slowest}
        return {"tests": found}
    return {}


def has_passed(part: Part, found: dict[str, Any]) -> bool:
    """Whether nothing failed, something ran, and graphs were those of the fused form."""
    if part.call == "figures" and found.get("by_modules"):
        return False
    if part.is_tests:
        is_empty = found["status"] == 5 and not part.required  # pytest's status where it has collected no test
        return (found["status"] == 0 and found.get("tests", {}).get("passed", 0) > 0) or is_empty
    if found.get("benchmark") == "exact":
        return found["status"] == 0
    if "rows" in found:
        return found["status"] == 0 and any(row.get("tokens_per_second") for row in found["rows"])
    measured = found.get("results", []) + list(found.get("figures", {}).values())
    return found["status"] == 0 and bool(measured) and not any("error" in result for result in measured)


def show(part: Part, found: dict[str, Any]) -> None:
    """Print the result of a part."""
    print(f"{part.name:18}{'passed' if found['passed'] else 'FAILED'} in {found['seconds']:.0f} s", flush=True)
    tests = found.get("tests")
    if tests:
        print(f"    {tests['passed']} passed, {tests['skipped']} skipped, {len(tests['failed'])} failed")
        print("".join(f"    {name}\n" for name in tests["failed"]), end="")
    for line in found.get("by_modules", ()):
        print(f"    {line}")
    for row in found.get("rows", ()):
        if "equal" in row:
            print(f"    {row['target']}: {row['way']}: {row['equal']} of {row['texts']} texts are equal")
            continue
        speed = row.get("tokens_per_second")
        print(f"    {row['label']:50}" + (f"{speed:9.1f} tokens/s" if speed else f" ({row.get('reason')})"))
    for result in found.get("results", ()):
        figure = result.get("error") or f"{result['us']:9.2f} us, {result['gb_per_s']:.0f} GB/s"
        print(f"    {result['benchmark']:16}{result['shape']!s:24}{figure}")
    for name, figures in found.get("figures", {}).items():
        print(f"    {name}: {figures}")
    if not found["passed"]:
        print("".join(f"    | {line[:200]}\n" for line in found["last_lines"]), end="", flush=True)


_FACTS = "import json; from bench.machine import provenance; print(json.dumps(provenance()))"
_ARCHITECTURE = "import torch; print('%d%d' % torch.cuda.get_device_capability())"


def prepare(log: Path, dry: bool, seconds: float) -> dict[str, Any]:
    """Build the native modules where they do not import. Returns the machine's facts, and the build's result.

    Raises:
        RuntimeError: The package or its CUDA module does not import, with the reason.
    """
    imports, built = ["-c", f"from pipespec_kernels import {'_native' if dry else '_native, _cuda'}"], {}
    if run(imports, log, 180)["status"] != 0:
        variables = {}
        if not dry:
            variables["PIPESPEC_CUDA"] = "on"  # without nvcc it fails, and says so
            if "PIPESPEC_CUDA_ARCHS" not in os.environ:  # each further architecture would take as long again
                variables["PIPESPEC_CUDA_ARCHS"] = run(["-c", _ARCHITECTURE], log, 60)["last_lines"][-1]
        built = {"build": run(["setup.py", "-q", "build_ext", "--inplace"], log, seconds, **variables)}
        again = run(imports, log, 180)
        if again["status"] != 0:
            raise RuntimeError("\n".join([*built["build"]["last_lines"], *again["last_lines"]]))
    facts = run(["-c", _FACTS], log, 180)
    if facts["status"] != 0:
        raise RuntimeError("\n".join(facts["last_lines"]))
    return {"machine": json.loads(facts["last_lines"][-1]), **built}


def check(out: Path, parts: Sequence[Part], seconds: float, *, dry: bool = False, resume: bool = False) -> bool:
    """Run ``parts`` and write ``out/gpu_check.json`` after each; returns whether all required ones passed. ``resume``: without those that have passed there."""
    log, end, passed = out / "gpu_check.log", time.monotonic() + seconds, True
    before = _record_of(out) if resume else {}
    if not before:
        log.write_bytes(b"")
    record: dict[str, Any] = {"dry_run": dry, "parts": {}}

    def write() -> None:
        half = out / "gpu_check.json.new"
        half.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        half.replace(out / "gpu_check.json")

    try:
        record |= prepare(log, dry, seconds)
    except RuntimeError as error:
        record |= {"error": str(error), "passed": False}
        print(f"not prepared:\n{error}", flush=True)
        return False
    finally:
        write()
    if (before.get("dry_run"), _commit_of(before)) == (dry, _commit_of(record)):
        record["parts"] = before["parts"]
    for i, part in enumerate(parts):
        if record["parts"].get(part.name, {}).get("passed"):
            print(f"{part.name:18}has passed before", flush=True)
            continue
        limit = min(part.seconds, end - time.monotonic())
        if limit < 10:
            found: dict[str, Any] = {"status": None, "seconds": 0.0, "last_lines": ["no time was left"]}
        else:
            file = out / f"part{i}"
            command = [str(file) if word == "{file}" else word for word in part.command]
            found = run(command, log, limit, **dict(part.variables))
            found |= results_of(part, file)
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        found["passed"] = has_passed(part, found)
        passed = passed and (found["passed"] or not part.required)
        record["parts"][part.name] = found
        write()
        show(part, found)
    record["passed"] = passed
    write()
    return passed


def _record_of(out: Path) -> dict[str, Any]:
    """What an earlier call has written; empty where there is none."""
    with suppress(OSError, ValueError):
        return dict(json.loads((out / "gpu_check.json").read_text(encoding="utf-8")))
    return {}


def _commit_of(record: dict[str, Any]) -> Any:
    return record.get("machine", {}).get("commit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    parser.add_argument(
        "--call", choices=list(CALL_SECONDS), help="only the parts of one call; default: figures and tests"
    )
    parser.add_argument("--seconds", type=float, help=f"for all parts together; default, by call: {CALL_SECONDS}")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed in --out at this commit")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only parts of these names")
    parser.add_argument("--dry-run", action="store_true", help="the same parts on a CPU with small sizes")
    options = parser.parse_args()
    parts = parts_of(options.dry_run)
    names = [part.name for part in parts]
    if not set(options.parts or names) <= set(names):
        parser.error(f"--parts must be some of: {', '.join(names)}")
    if not options.dry_run:
        import torch  # and nothing of the tree, which may not be built yet

        if not torch.cuda.is_available():
            print("bench.gpu_check: no GPU is visible to torch; nothing was run.", file=sys.stderr)
            return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    calls = [options.call] if options.call else ["figures", "tests"]
    chosen = [part for part in parts if part.call in (*calls, "" if calls != ["known"] else "known")]
    if options.parts:
        chosen = [part for part in parts if part.name in options.parts]
    seconds = options.seconds or sum(CALL_SECONDS[call] for call in calls)
    passed = check(out, chosen, seconds, dry=options.dry_run, resume=options.resume)
    print(f"{'all passed' if passed else 'NOT all passed'}; written to {out}/gpu_check.json")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
