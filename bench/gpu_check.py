"""Does everything hold on this GPU, and how fast is it? ``python -m bench.gpu_check --out DIR``

In parts, those that tell most first: the protocol between host and device, the texts of captured stages, the other tests that need a GPU, each
kernel's benchmark on a few shapes, and whole generations by planted models of LLaMA's sizes against everybody else's (``bench.bench_generate``).

Each part is a process of its own with a time limit of its own; what it had found when it failed or was stopped is kept. ``DIR/gpu_check.json`` is written
after each part, ``DIR/gpu_check.log`` has what they printed, and the table the last lines of those that failed. All together end
within ``--seconds``. What is checked is this source tree; native modules that are not in it are taken from an installed pipespec, or built. Exit status: 0, all well;
1, a part failed; 2, there is no GPU.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench import pytest_notes

ROOT = Path(__file__).parents[1]
TREE = ROOT / "pipespec_kernels"
ALL_SECONDS = 460
AGREEMENT = 0.8
LAST_LINES, MOST_OUTPUT = 12, 1 << 20  # of a part that failed, in the table; bytes of a part in the log

INTERRUPTED, ABORTED = 8.0, 3.0
"""So many seconds before its end a part is interrupted, to write what it has, and then made to say where it hangs (faulthandler)."""


@dataclass(frozen=True)
class Part:
    """``command``: of Python; ``{file}`` is where its results go, ``{seconds}`` what it has to finish by itself. ``kind``: of the results.

    ``most``: its time limit; ``least``: the seconds below which it is left out, which earlier parts leave it if it is ``required``. ``gib``: of GPU
    memory.
    """

    name: str
    command: tuple[str, ...]
    most: int
    least: int
    kind: str = ""
    required: bool = True
    gib: int = 0


def _tests(name: str, paths: Sequence[str], most: int, least: int, slow: bool = False) -> Part:
    marked = "gpu and slow" if slow else "gpu and not slow"
    notes = ("-p", "bench.pytest_notes", "--notes", "{file}", "-o", "faulthandler_timeout=40")
    command = (
        "-m",
        "pytest",
        *paths,
        "-m",
        marked,
        "-q",
        "--tb=short",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        *notes,
    )
    return Part(name, command, most, least, "tests", required=not slow)


def _kernel(module: str) -> Part:
    command = ("-m", f"bench.{module}", "--device", "cuda", "--quick", "--json", "{file}")
    return Part(module, command, 40, 18, "kernel")


def _chain(names: Sequence[str], most: int, least: int, required: bool, gib: int, rows: Sequence[str] = ()) -> Part:
    options = ("--device", "cuda", "--planted", *names, "--agreement", str(AGREEMENT), "--quick", "--json", "{file}")
    command = ("-m", "bench.bench_generate", *options, "--seconds", "{seconds}", *(("--only", *rows) if rows else ()))
    return Part(" -> ".join(names), command, most, least, "generations", required, gib)


PROTOCOL = ("tests/kernels/test_cuda_launcher.py", "tests/kernels/test_state_histories.py")
TEXTS = ("tests/pipespec/test_streams.py", "tests/pipespec/test_attention.py")
KERNELS = ("bench_verify", "bench_attention", "bench_select", "bench_verify_ratio", "bench_cutoff", "bench_kv")

PARTS = (
    _tests("tests: protocol", PROTOCOL, 60, 40),
    _tests("tests: texts", TEXTS, 110, 60),
    _tests("tests: others", ("tests", *(f"--ignore={path}" for path in (*PROTOCOL, *TEXTS))), 100, 55),
    *map(_kernel, KERNELS),
    _chain(("1B", "8B"), 170, 125, True, 40),
    _chain(("1B", "3B", "8B"), 120, 75, False, 60, ("1B+3B", "assisted-3B", "ours-plain")),
    _tests("tests: slow", ("tests",), 120, 45, slow=True),
)


def limit_of(parts: Sequence[Part], left: float) -> int:
    """Seconds for the first of ``parts`` where so many are left: what the required ones behind it do not need."""
    return min(parts[0].most, int(left) - sum(part.least for part in parts[1:] if part.required))


# ---- running


def run(command: Sequence[str], log: Path, limit: float) -> dict[str, Any]:
    """Python with ``command``, ended after ``limit`` seconds with all its processes; its ``status`` (None: it was stopped), ``seconds``, ``last_lines``."""
    begin = time.monotonic()
    # This tree and nothing that is installed; a traceback of all threads from one that crashes or hangs.
    paths = [str(ROOT), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
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
            status = _wait(process, begin + limit)
        finally:
            with suppress(ProcessLookupError):  # what it has started, and itself
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot be ended: the others go on
                process.wait(2)
    if status is None:
        with log.open("ab") as output:
            output.write(f"\nstopped after {limit:.0f} s\n".encode())
    text = _shorten(log, before)
    lines = [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "last_lines": lines}


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Its exit status, or None after the gentler ways to end it."""
    for before_end, message in ((INTERRUPTED, signal.SIGINT), (ABORTED, signal.SIGABRT), (0.5, signal.SIGKILL)):
        try:
            status = process.wait(max(0.0, deadline - before_end - time.monotonic()))
            return status if message is signal.SIGINT else None
        except subprocess.TimeoutExpired:
            process.send_signal(message)
    return None


def _shorten(log: Path, begin: int) -> str:
    """What was printed behind ``begin``; of what is too long, the middle is taken out of the file."""
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
    """What a part has written, however it ended."""
    if part.kind == "tests":
        return {"tests": pytest_notes.read(file)}
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


def is_well(part: Part, found: dict[str, Any]) -> bool:
    """Nothing failed, and there was something to run."""
    if part.kind == "tests":
        tests = found["tests"]
        nothing = 5  # pytest's status where it has collected none
        fine = found["status"] == 0 or (found["status"] == nothing and not part.required)
        return fine and not tests["failed"] and (tests["passed"] > 0 or not part.required)
    if part.kind == "kernel":
        measured = found.get("results", [])
        return found["status"] == 0 and bool(measured) and not any("error" in result for result in measured)
    if part.kind == "generations":
        return found["status"] == 0 and any(row.get("tokens_per_second") for row in found.get("rows", []))
    return bool(found["status"] == 0)


# ---- the table


def show(part: Part, found: dict[str, Any]) -> None:
    """Prints a part's lines of the table."""
    status = found["status"]
    how = "STOPPED" if status is None else f"FAILED ({f'status {status}' if status else 'nothing to show'})"
    how = "passed" if found["well"] else how
    print(f"{part.name:24}{how}, {found['seconds']:.0f} of {found['limit']} s", end="")
    if part.kind == "tests":
        _show_tests(found["tests"])
    else:
        print()
        with suppress(Exception):  # what is half written, or does not import, must not end the others
            {"kernel": _show_kernel, "generations": _show_generations}.get(part.kind, len)(found)
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
    from pipespec.demo.comparison import aligned

    if "rows" not in found:
        return
    rows = [bench_generate.Result(**row) for row in found["rows"]]
    measured = [row for row in rows if row.reason is None]
    if measured:
        print(aligned([bench_generate.HEADER, *map(bench_generate.cells, measured)]))
    for line in (*bench_generate.verdict(rows), *bench_generate.footnotes(rows)):
        print(line[:300])


# ---- all together

_FACTS = "import json; from bench.gpu import gpu_machine; print(json.dumps(gpu_machine()))"
_HAS_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 2)"
_IS_BUILT = "from pipespec_kernels import _native, _cuda"


class Check:
    """One run over ``parts``; everything it finds is in ``record``, which is on the disk after each step."""

    def __init__(self, out: Path, seconds: float, parts: Sequence[Part] = PARTS) -> None:
        self.out, self.seconds, self.parts = out, seconds, parts
        self.log, self.begin = out / "gpu_check.log", time.monotonic()
        self.record: dict[str, Any] = {"machine": {}, "parts": {}, "well": False}

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begin)

    def write(self) -> None:
        self.record["seconds"] = round(time.monotonic() - self.begin, 1)
        half = self.out / "gpu_check.json.new"
        half.write_text(json.dumps(self.record, indent=1) + "\n")
        half.replace(self.out / "gpu_check.json")

    def prepare(self) -> bool:
        """The native modules, and what the machine is; False where nothing can be run."""
        kept = sum(part.least for part in self.parts if part.required)
        # As `pip install .` leaves it: the modules are beside the installed package, which the source tree hides.
        self._take_installed()
        if not self._is_built():
            built = run(["setup.py", "-q", "build_ext", "--inplace"], self.log, max(60.0, self.left - kept))
            self.record["build"] = built
            print(f"{'build':24}{'passed' if built['status'] == 0 else 'FAILED'}, {built['seconds']:.0f} s", flush=True)
        facts = run(["-c", _FACTS], self.log, 60)
        try:
            line = next(line for line in reversed(facts["last_lines"]) if line.startswith("{"))
            info = self.record["machine"] = json.loads(line)
        except (StopIteration, ValueError):
            for line in (*self.record.get("build", {}).get("last_lines", ()), *facts["last_lines"]):
                print(f"    | {line[:200]}")
            print("nothing can be run: see above")
            return False
        versions = (f"{name} {info.get(name)}" for name in ("torch", "cuda", "triton", "python", "commit"))
        print(f"{info.get('gpu')}, {', '.join(versions)}", flush=True)
        return True

    def _is_built(self) -> bool:
        return run(["-c", _IS_BUILT], self.log, 60)["status"] == 0

    def _take_installed(self) -> None:
        """Those that are newer than the tree's, or that it lacks."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        found = [
            module
            for module in Path(sysconfig.get_path("platlib"), "pipespec_kernels").glob(f"_*{suffix}")
            if not (TREE / module.name).exists() or module.stat().st_mtime > (TREE / module.name).stat().st_mtime
        ]
        with suppress(OSError):  # then the tree's are used, or built
            for module in found:
                shutil.copy2(module, TREE)

    def run(self) -> bool:
        """All parts; whether all is well."""
        self.write()
        if not self.prepare():
            self.write()
            return False
        memory = self.record["machine"].get("gpu_memory_bytes", 0) / 2**30
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
                finish = str(int(limit - INTERRUPTED - 12))  # of which the imports take some
                command = [w.replace("{file}", str(file)).replace("{seconds}", finish) for w in part.command]
                found = run(command, self.log, limit) | {"limit": limit, "command": part.command}
                found |= results(part, file)
                found["well"] = is_well(part, found)
                self.record["parts"][part.name] = found
                self.write()
                well = well and found["well"]
                show(part, found)
        self.record["well"] = well
        self.write()
        return well

    def _leave_out(self, part: Part, why: str) -> None:
        self.record["parts"][part.name] = {"left_out": why}
        self.write()
        print(f"{part.name:24}left out: {why}", flush=True)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # through the finally that ends the part


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU tests, kernels' benchmarks and generations in one go.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results; made if it is not there")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for all parts together (%(default)s)")
    options = parser.parse_args()
    # In a process of its own: this one never touches torch before the parts have run, so nothing can hang it.
    try:
        status = subprocess.run([sys.executable, "-c", _HAS_GPU], stdin=subprocess.DEVNULL, timeout=120).returncode
    except subprocess.TimeoutExpired:
        status = 0  # slow, or stuck: the parts will say
    if status != 0:
        print("bench.gpu_check: no GPU is visible to torch; nothing was run.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _terminated)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_check.log").write_bytes(b"")
    check = Check(out, options.seconds)
    well = check.run()
    print(f"{'all well' if well else 'NOT all well'}, {check.record['seconds']:.0f} s; written to {out}/gpu_check.json")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
