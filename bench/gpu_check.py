"""Tests and benchmarks of one GPU within a time limit: ``python -m bench.gpu_check --out DIR``

First all kernels are compiled in parallel; then come the GPU tests in several processes, the costs of the GPU's mechanisms (``bench.physics``), whole
generations by planted models of LLaMA's sizes (``bench.bench_generate``), a check that captured graphs compute the same bits beside others
(``bench.corruption``), HuggingFace's compiled ``generate()`` in a process of its own, the kernels' benchmarks, and memcheck with the time that is left.

Each part is a process with its own time limit; the results of a failed or stopped part are kept. ``DIR/gpu_check.json`` is written after each
part, ``DIR/gpu_check.log`` has the output of the parts, ``DIR/rounds.json.gz`` a profile of some twenty rounds for Perfetto, and the table the last lines of failed parts.
Before the check ends a part that hangs, it writes the part's state to the log (:mod:`bench.hang`). All parts together end within ``--seconds``. At
the end the figures stand beside those predicted (:mod:`bench.predicted`). The check runs this source tree, with or without git; native modules that
lie in it are used where they import, otherwise those of an installed pipespec, and otherwise they are built, for this GPU's architecture alone. Exit
status: 0, all parts passed; 1, a part failed; 2, there is no GPU.

``--dry-run`` walks through the same parts on a CPU with small sizes in minutes: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from bench import hang, predicted, pytest_notes
from bench.figures import FAULT

ROOT = Path(__file__).parents[1]
TREE = ROOT / "pipespec_kernels"
ALL_SECONDS = 460
AGREEMENT = 0.8
LAST_LINES, MOST_OUTPUT = 12, 1 << 20
"""Lines of a failed part in the table; bytes of a part in the log."""

INTERRUPTED, DESCRIBED, ABORTED = 14.0, 11.0, 3.0
"""Seconds before its limit a part is interrupted, so that it writes its results; what it does is written to the log; and it is aborted at the latest, so
that faulthandler prints its threads."""

STARTING = 9
"""Seconds of a part's time that are for imports and shutdown."""


@dataclass(frozen=True)
class Part:
    """One process of the check.

    Args:
        name: In the table.
        command: Arguments of Python; ``{file}`` stands for the results file, ``{out}`` for the folder of the check, ``{seconds}`` for the time in
            which the part ends by itself.
        most: Time limit in seconds.
        least: Seconds below which the part is left out. Earlier parts leave this time to a required part.
        kind: Of the results: ``"tests"``, ``"figures"``, ``"kernel"`` or ``"generations"``.
        required: The check fails without it.
        gib: GPU memory that it needs.
        fault: ``"hang"`` or ``"crash"``: what it does behind its first section, for tests of the check.
    """

    name: str
    command: tuple[str, ...]
    most: int
    least: int
    kind: str = ""
    required: bool = True
    gib: int = 0
    fault: str = ""


def _tests(
    name: str, marked: str, paths: Sequence[str], workers: int, limit: int, most: int, least: int, required: bool = True
) -> Part:
    shared = ("--notes", "{file}", "--workers", str(workers), "--limit", str(limit), "--seconds", "{seconds}")
    chosen = (*paths, "-m", marked, "-q", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    return Part(name, ("-m", "bench.pytest_workers", *shared, "--", *chosen), most, least, "tests", required)


def _figures(name: str, module: str, most: int, least: int, *options: str, required: bool = True, gib: int = 0) -> Part:
    command = ("-m", f"bench.{module}", "--json", "{file}", "--seconds", "{seconds}", *options)
    return Part(name, command, most, least, "figures", required, gib)


def _generations(name: str, models: Sequence[str], rows: Sequence[str], most: int, least: int, *options: str) -> Part:
    chosen = ("--planted", *models, "--rows", *rows, "--first-token", "--json", "{file}", "--seconds", "{seconds}")
    return Part(name, ("-m", "bench.bench_generate", *chosen, *options), most, least, "generations")


def _sizes(tokens: int, repeats: int) -> tuple[str, ...]:
    numbers = {"prompts": 1, "prompt-tokens": 64 if tokens > 64 else 8, "new-tokens": tokens, "repeats": repeats}
    return tuple(word for name, number in numbers.items() for word in (f"--{name}", str(number)))


GPU_TESTS = ("tests/pipespec", "tests/kernels", "tests/planning", "tests/spd")
"""Folders with tests that need a GPU."""

KERNELS = ("verify greedy", "verify coupled", "attention", "argmax", "kv_append")
KERNELS += ("add_rms_norm", "silu_mul", "rope_append")
ROWS = ("plain-graphs", "lockstep-graphs", "streams", "assisted")
"""Beside ``generate()``. On one device the published asynchronous schedule and workers take turns, so they are left out."""

AGREED = ("--agreement", str(AGREEMENT), "--settings", "3", "--tuning-tokens", "48", "--trace", "{out}/rounds.json.gz")
ON_GPU = ("--device", "cuda", *_sizes(256, 2))

PARTS = (
    _figures("compile kernels", "warm_kernels", 45, 20, required=False),
    _tests("tests", "gpu and not sanitizer", GPU_TESTS, 6, 60, 100, 60),
    _figures("physics", "physics", 60, 45),
    replace(_generations("1B -> 8B", ("1B", "8B"), ROWS, 165, 115, *ON_GPU, *AGREED), gib=40),
    _figures("corruption", "corruption", 60, 40, gib=30),
    replace(_generations("compiled", ("8B",), ("static",), 120, 90, *ON_GPU, "--uncalibrated"), gib=30),
    Part(
        "kernels",
        ("-m", "bench.kernels", "--device", "cuda", "--quick", "--only", *KERNELS, "--json", "{file}"),
        45,
        28,
        "kernel",
        required=False,
    ),
    _figures("variants", "variants", 75, 30, required=False),
    _tests("memcheck", "gpu and sanitizer", GPU_TESTS[:1], 1, 200, 120, 45, required=False),
)

_DRY = ("--threads", "1", "--dtype", "float32", *_sizes(12, 1))
DRY_PARTS = (
    _figures("compile kernels", "warm_kernels", 60, 20, "--dry", required=False),
    _tests("tests", "not gpu", ("tests/kernels/test_noise.py", "tests/kernels/test_argmax.py"), 2, 30, 60, 20),
    _figures("physics", "physics", 60, 20, "--dry"),
    _generations("1B -> 8B", ("tiny-small", "tiny-target"), ROWS, 60, 20, *_DRY, "--uncalibrated", *AGREED),
    _figures("corruption", "corruption", 60, 20, "--dry"),
    _generations("compiled", ("tiny-small",), ("static",), 100, 20, *_DRY, "--uncalibrated"),
    Part(
        "kernels",
        ("-m", "bench.kernels", "--quick", "--threads", "1", "--only", "kv_append", "--json", "{file}"),
        60,
        20,
        "kernel",
        required=False,
    ),
    _figures("variants", "variants", 300, 20, "--dry", required=False),
)


def limit_of(parts: Sequence[Part], left: float) -> int:
    """Seconds for the first of ``parts``: those of ``left`` that the required parts behind it do not need."""
    return min(parts[0].most, int(left) - sum(part.least for part in parts[1:] if part.required))


# ---- running


def run(command: Sequence[str], log: Path, limit: float, **variables: str) -> dict[str, Any]:
    """Run Python with ``command`` and the environment ``variables``, and end it after ``limit`` seconds with all its processes.

    Returns:
        ``status`` (None: it was stopped), ``seconds`` and ``last_lines``.
    """
    begin = time.monotonic()
    # This tree precedes an installed package; faulthandler prints all threads of a process that crashes or hangs.
    paths = [str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    with log.open("ab") as output:
        output.write(f"\n==== {' '.join(command)}\n".encode())
        output.flush()
        before = output.tell()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _wait(process, begin + limit, log)
        finally:
            with suppress(ProcessLookupError):  # the process and its children
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver cannot be ended
                process.wait(2)
    if status is None:
        with log.open("ab") as output:
            output.write(f"\nstopped after {limit:.0f} s\n".encode())
    text = _shorten(log, before)
    lines = [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "last_lines": lines}


def _wait(process: subprocess.Popen[bytes], deadline: float, log: Path) -> int | None:
    """The exit status, or None for a process that had to be ended."""

    def ends_before(seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - seconds - time.monotonic()))
        return process.returncode is not None

    if ends_before(INTERRUPTED):
        return process.returncode
    process.send_signal(signal.SIGINT)
    if ends_before(DESCRIBED):
        return None
    processes = hang.with_descendants(process.pid)
    with log.open("ab", buffering=0) as output:
        output.write(b"\nit hangs; what its processes do:\n")
        hang.describe(processes, output, deadline - ABORTED - time.monotonic())
    if process.poll() is None:
        hang.end(processes, max(0.1, deadline - 0.5 - time.monotonic()))
    return None


def _shorten(log: Path, begin: int) -> str:
    """The output behind ``begin``; the middle of an output that is too long is removed from the file."""
    with log.open("r+b") as file:
        file.seek(begin)
        data = file.read()
        if len(data) > MOST_OUTPUT:
            half = MOST_OUTPUT // 2
            data = data[:half] + b"\n[...]\n" + data[-half:]
            file.seek(begin)
            file.write(data)
            file.truncate()
    return data.decode(errors="replace")


def results(part: Part, file: Path) -> dict[str, Any]:
    """What a part has written, also if it failed."""
    if part.kind == "tests":
        return {"tests": pytest_notes.read(file)}
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


def has_passed(part: Part, found: dict[str, Any]) -> bool:
    """Whether nothing failed and something ran."""
    if part.kind == "tests":
        tests = found["tests"]
        nothing = 5  # pytest's status where it has collected none
        fine = found["status"] == 0 or (found["status"] == nothing and not part.required)
        return fine and not tests["failed"] and (tests["passed"] > 0 or not part.required)
    if part.kind == "figures":
        return found["status"] == 0 and bool(found.get("figures")) and not found.get("errors")
    if part.kind == "kernel":
        measured = found.get("results", [])
        return found["status"] == 0 and bool(measured) and not any("error" in result for result in measured)
    if part.kind == "generations":
        return found["status"] == 0 and any(row.get("tokens_per_second") for row in found.get("rows", []))
    return bool(found["status"] == 0)


# ---- the table


def show(part: Part, found: dict[str, Any]) -> None:
    """Print a part's lines of the table."""
    status = found["status"]
    how = "STOPPED" if status is None else f"FAILED ({f'status {status}' if status else 'nothing to show'})"
    how = "passed" if found["well"] else how
    print(f"{part.name:24}{how}, {found['seconds']:.0f} of {found['limit']} s", end="")
    if part.kind == "tests":
        _show_tests(found["tests"])
    else:
        print()
        with suppress(Exception):  # incomplete results must not end the other parts
            shown = {"kernel": _show_kernel, "generations": _show_generations, "figures": _show_figures}
            shown.get(part.kind, len)(found)
    if not found["well"]:
        for line in found["last_lines"]:
            print(f"    | {line[:200]}")
    sys.stdout.flush()


def _show_tests(tests: dict[str, Any]) -> None:
    print(f": {tests['passed']} passed, {tests['skipped']} skipped, {len(tests['failed'])} failed")
    for test, why in tests["failed"].items():
        print(f"    {test}", *(f"        {line[:200]}" for line in why[:2]), sep="\n")
    for test in tests["unfinished"]:
        print(f"    {test} had not ended")
    for reason, count in tests["reasons"].items():
        print(f"    {count} skipped: {reason[:150]}")


def _show_figures(found: dict[str, Any]) -> None:
    print(f"    {len(found.get('figures', {}))} figures")
    for what, said in (("FAILED", "errors"), ("left out", "left_out")):
        for name, why in found.get(said, {}).items():
            print(f"    {name} {what}: {why[:160]}")


def _show_kernel(found: dict[str, Any]) -> None:
    for r in found.get("results", []):
        batch, width, size = r["shape"]
        line = f"    {r['benchmark']:16}{batch:4}{width:4}{size:8}"
        if "error" in r:
            print(f"{line} FAILED: {r['error'].splitlines()[0][:120]}")
            continue
        rivals = r["rivals"].items()
        others = "".join(f"  {name} {x['times_ours']:.1f}" if "us" in x else f"  {name} failed" for name, x in rivals)
        print(
            f"{line}{r['us']:9.2f} us{r['gb_per_s']:7.0f} GB/s{r['fraction_of_copy']:6.2f} of copy; times ours:{others}"
        )


def _show_generations(found: dict[str, Any]) -> None:
    from bench import bench_generate
    from pipespec.bench.comparison import footnotes
    from pipespec.process.table import aligned

    if "rows" not in found:
        return
    rows = bench_generate.results_of(found)
    measured = [row for row in rows if row.reason is None]
    if measured:
        print(aligned([bench_generate.HEADER, *map(bench_generate.cells, measured)]))
    for line in (*bench_generate.verdict(rows), *footnotes(rows)):
        print(line[:300])


# ---- all together

_FACTS = "import json; from pipespec.bench.machine import provenance; print(json.dumps(provenance()))"
_HAS_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 2)"
_IS_BUILT = "from pipespec_kernels import _native, _cuda"
_DRY_IS_BUILT = "from pipespec_kernels import _native"
_ARCHITECTURE = "import torch; print('%d%d' % torch.cuda.get_device_capability())"


class Check:
    """One run over ``parts``; its results are in ``record``, which is written after each step."""

    def __init__(self, out: Path, seconds: float, parts: Sequence[Part] = PARTS, dry: bool = False) -> None:
        self.out, self.seconds, self.parts, self.dry = out, seconds, parts, dry
        self.log, self.begin = out / "gpu_check.log", time.monotonic()
        self.record: dict[str, Any] = {"dry_run": dry, "machine": {}, "parts": {}, "well": False}

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begin)

    def write(self) -> None:
        self.record["seconds"] = round(time.monotonic() - self.begin, 1)
        half = self.out / "gpu_check.json.new"
        half.write_text(json.dumps(self.record, indent=1) + "\n")
        half.replace(self.out / "gpu_check.json")

    def prepare(self) -> bool:
        """Find or build the native modules and describe the machine; False where nothing can run."""
        kept = sum(part.least for part in self.parts if part.required)
        # Modules that lie in the tree are used, also where it has come here without git or build tools. After `pip install .` they lie beside the
        # installed package, which the source tree hides.
        self._take_installed()
        if not self._is_built():
            variables = {} if self.dry or "PIPESPEC_CUDA_ARCHS" in os.environ else self._one_architecture()
            command = ["setup.py", "-q", "build_ext", "--inplace"]
            built = run(command, self.log, max(60.0, self.left - kept), **variables)
            self.record["build"] = built
            print(f"{'build':24}{'passed' if built['status'] == 0 else 'FAILED'}, {built['seconds']:.0f} s", flush=True)
        facts = run(["-c", _FACTS], self.log, 60)
        try:
            line = next(line for line in reversed(facts["last_lines"]) if line.startswith("{"))
            info = self.record["machine"] = json.loads(line)
        except (StopIteration, ValueError):
            for line in (*self.record.get("build", {}).get("last_lines", ()), *facts["last_lines"]):
                print(f"    | {line[:200]}")
            print("nothing can run: see above")
            return False
        versions = (f"{name} {info.get(name)}" for name in ("torch", "cuda", "triton", "python", "commit"))
        where = "dry run on a CPU" if self.dry else ", ".join(gpu["name"] for gpu in info["gpus"])
        print(f"{where}, {', '.join(versions)}", flush=True)
        return True

    def _is_built(self) -> bool:
        return run(["-c", _DRY_IS_BUILT if self.dry else _IS_BUILT], self.log, 60)["status"] == 0

    def _one_architecture(self) -> dict[str, str]:
        """The build's variable for the architecture of this GPU: each further one would take as long again."""
        found = run(["-c", _ARCHITECTURE], self.log, 60)
        return {"PIPESPEC_CUDA_ARCHS": found["last_lines"][-1]} if found["status"] == 0 and found["last_lines"] else {}

    def _take_installed(self) -> None:
        """Copy installed modules that are newer than the tree's, or that the tree lacks."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        found = [
            module
            for module in Path(sysconfig.get_path("platlib"), "pipespec_kernels").glob(f"_*{suffix}")
            if not (TREE / module.name).exists() or module.stat().st_mtime > (TREE / module.name).stat().st_mtime
        ]
        with suppress(OSError):  # without them the tree's are used or built
            for module in found:
                shutil.copy2(module, TREE)

    def run(self) -> bool:
        """Run all parts; returns whether all passed."""
        self.write()
        if not self.prepare():
            self.write()
            return False
        memory = min((gpu["memory_bytes"] for gpu in self.record["machine"]["gpus"]), default=0) / 2**30
        well = True
        parts = [part for part in self.parts if part.gib <= memory]
        for part in self.parts:
            if part not in parts:
                self._leave_out(part, f"it needs {part.gib} GiB of GPU memory")
        with tempfile.TemporaryDirectory() as folder:
            for i, part in enumerate(parts):
                limit = limit_of(parts[i:], self.left)
                if limit < part.least:
                    well = well and not part.required
                    self._leave_out(part, f"it needs {part.least} s, and {max(limit, 0)} s were left")
                    continue
                file = Path(folder, f"{i}.json")
                words = {
                    "{file}": str(file),
                    "{out}": str(self.out),
                    "{seconds}": str(max(1, int(limit - INTERRUPTED - STARTING))),
                }
                command = [_filled(word, words) for word in part.command]
                found = run(command, self.log, limit, **({FAULT: part.fault} if part.fault else {}))
                found |= {"limit": limit, "command": part.command} | results(part, file)
                found["well"] = has_passed(part, found)
                self.record["parts"][part.name] = found
                self.write()
                well = well and found["well"]
                show(part, found)
        self.record["well"] = well
        self.compare()
        self.write()
        return well

    def compare(self) -> None:
        """Set the figures beside the predicted ones, and print them."""
        with suppress(Exception):  # incomplete results must not affect the others
            rows = predicted.compare(predicted.load(), predicted.measured(self.record["parts"]))
            self.record["predictions"] = [row._asdict() for row in rows]
            print("\npredicted and measured" + (", on a CPU: only the names mean something" if self.dry else ""))
            print(predicted.table(rows), flush=True)

    def _leave_out(self, part: Part, why: str) -> None:
        self.record["parts"][part.name] = {"left_out": why}
        self.write()
        print(f"{part.name:24}left out: {why}", flush=True)


def _filled(word: str, words: dict[str, str]) -> str:
    for name, text in words.items():
        word = word.replace(name, text)
    return word


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # runs the finally block that ends the part


def _has_gpu() -> bool:
    """In a process of its own, so that a hanging driver cannot hang this one."""
    try:
        command = [sys.executable, "-c", _HAS_GPU]
        return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        return True  # the parts will show whether it is slow or hangs


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU tests, kernels' benchmarks and generations in one go.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for all parts together (%(default)s)")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, metavar="PART", help=f"only these of: {', '.join(names)}")
    parser.add_argument("--dry-run", action="store_true", help="the same parts on a CPU with small sizes")
    figures = [part.name for part in PARTS if part.kind == "figures"]
    for fault in ("hang", "crash"):
        text = f"let this part {fault} behind its first section, to see what the check does then"
        parser.add_argument(f"--{fault}", choices=figures, metavar="PART", help=text)
    options = parser.parse_args()
    faults = {options.hang: "hang", options.crash: "crash"}
    parts = [
        replace(part, fault=faults.get(part.name, ""))
        for part in (DRY_PARTS if options.dry_run else PARTS)
        if options.parts is None or part.name in options.parts
    ]
    if not options.dry_run and not _has_gpu():
        print("bench.gpu_check: no GPU is visible to torch; nothing was run.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _terminated)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_check.log").write_bytes(b"")
    check = Check(out, options.seconds, parts, options.dry_run)
    well = check.run()
    print(
        f"{'all passed' if well else 'NOT all passed'}, {check.record['seconds']:.0f} s; written to {out}/gpu_check.json"
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
