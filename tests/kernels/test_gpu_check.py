"""bench.gpu_check without a GPU, with scripts as its parts: no part uses another's time, and no result is lost. No time is asserted."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_check, kernels, predicted, pytest_notes
from bench.gpu_check import Check, Part
from tests.waiting import SECONDS

ROOT = Path(__file__).parents[2]
MACHINE = {"gpus": [{"name": "a GPU", "memory_bytes": 80 << 30}]}


def test_refuses_politely(tmp_path: Path) -> None:
    out = tmp_path / "results"
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 2
    assert "no GPU is visible" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not out.exists()


def script(name: str, text: str, kind: str = "", least: int = 1, most: int = 60, **options: Any) -> Part:
    return Part(name, ("-c", text, "{file}", "{seconds}"), most, least, kind, **options)


def check(
    monkeypatch: pytest.MonkeyPatch, out: Path, *parts: Part, seconds: float = 300
) -> tuple[bool, dict[str, Any]]:
    """Run the check. Returns whether all parts passed, and the results file."""
    monkeypatch.setattr(gpu_check, "_IS_BUILT", "")
    monkeypatch.setattr(gpu_check, "_FACTS", f"print({json.dumps(json.dumps(MACHINE))})")
    well = Check(out, seconds, parts).run()
    return well, json.loads((out / "gpu_check.json").read_text())


WINDOWS = {"deaf": (60.5, 60.0, 40.0), "waiting": (90.0, 60.0, 40.0)}
"""Longest times until a part is interrupted, described and aborted, by the word that it prints before it hangs. A part that reacts to a signal ends
sooner. The first time of a part that ignores the interrupt is short."""


def at_once(monkeypatch: pytest.MonkeyPatch, windows: dict[str, tuple[float, float, float]]) -> None:
    """Shorten the deadlines when the part prints that it hangs, so that the test does not wait for the time limit."""
    wait = gpu_check._wait

    def sooner(process: subprocess.Popen[bytes], deadline: float, log: Path) -> int | None:
        while process.poll() is None and time.monotonic() < deadline:
            said = log.read_text(errors="replace").rpartition("\n==== ")[2].splitlines()
            for mark in windows.keys() & said:
                for name, seconds in zip(("INTERRUPTED", "DESCRIBED", "ABORTED"), windows[mark], strict=True):
                    monkeypatch.setattr(gpu_check, name, seconds)
                return wait(process, time.monotonic() + windows[mark][0], log)
            time.sleep(0.05)
        return wait(process, deadline, log)

    monkeypatch.setattr(gpu_check, "_wait", sooner)


KERNEL = {"benchmark": "b", "shape": [1, 2, 3], "us": 1.0, "gb_per_s": 2.0, "fraction_of_copy": 0.5}
KERNEL |= {"rivals": {"eager": {"us": 3.0, "times_ours": 3.0}, "x": {"error": "no"}}}
ROWS = [
    {"key": "plain", "label": "HF generate()", "group": "hf", "tokens_per_second": 10.0},
    {"key": "x", "label": "streams, 1B", "group": "ours", "tokens_per_second": 5.0},
    {"key": "y", "label": "workers, 1B", "group": "ours", "reason": "no memory"},
]


def dumps(what: object) -> str:
    return f"import json, sys, time; json.dump(json.loads({json.dumps(json.dumps(what))}), open(sys.argv[1], 'w'))\n"


def test_results_and_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts that pass, that crash before or after they have written results, that print nothing useful. The last part still runs."""
    broken = KERNEL | {"shape": [4, 5, 6], "error": "OOM\nmore"}
    well, written = check(
        monkeypatch,
        tmp_path,
        script("good", dumps({"results": [KERNEL]}), "kernel"),
        script("one shape fails", dumps({"results": [KERNEL, broken]}), "kernel"),
        script("crashes", "print('what was wrong'); raise SystemExit(3)", "kernel"),
        script("half a file", "import sys; open(sys.argv[1], 'w').write('{')", "kernel"),
        script("killed", dumps({"results": [KERNEL]}) + "import os; os.abort()", "kernel"),
        script("large", "", gib=90),
        script("long", "", least=900, required=False),
        script("last", dumps({"rows": ROWS}), "generations"),
    )
    assert not well
    parts = written["parts"]
    assert [(name, part["well"]) for name, part in parts.items() if "well" in part] == [
        ("good", True),
        ("one shape fails", False),
        ("crashes", False),
        ("half a file", False),
        ("killed", False),
        ("last", True),
    ]
    assert parts["crashes"]["status"] == 3
    assert parts["killed"]["status"] == -signal.SIGABRT
    assert parts["killed"]["results"] == [KERNEL]
    assert any("Fatal Python error: Aborted" in line for line in parts["killed"]["last_lines"])
    assert parts["large"] == {"left_out": "it needs 90 GiB of GPU memory"}
    assert "900 s" in parts["long"]["left_out"]
    out = capsys.readouterr().out
    for line in (
        "a GPU",
        "eager 3.0  x failed",
        "FAILED: OOM",
        "crashes                 FAILED (status 3)",
        "    | what was wrong",
        "WE LOSE, even at our best: streams, 1B, 0.50 times the best of the others",
        "workers, 1B (no memory)",
    ):
        assert line in out, out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.json", "gpu_check.log"]


HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', "import time; print('child', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()  # on a busy machine it takes long to start
print(f'child {child.pid}\\ndeaf', flush=True)
time.sleep(600)
"""


def test_a_part_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check ends the part and its child processes, logs where it hung, and keeps its results."""
    at_once(monkeypatch, WINDOWS)
    waits = "import time\ntry: print('waiting', flush=True); time.sleep(600)\nfinally: print('came down')"
    well, written = check(
        monkeypatch,
        tmp_path,
        script("hangs", dumps({"results": [KERNEL]}) + HANGS, "kernel", most=290),
        script("interrupted", waits, most=290),
        script("last", "print('ran')"),
        seconds=900,
    )
    assert not well
    parts = written["parts"]
    assert parts["hangs"]["status"] is parts["interrupted"]["status"] is None
    assert parts["hangs"]["results"] == [KERNEL]
    assert parts["last"]["well"]
    log = (tmp_path / "gpu_check.log").read_text()
    assert "Fatal Python error: Aborted" in log
    assert "came down" in log
    assert len(re.findall(r"^stopped after \d+ s$", log, re.MULTILINE)) == 2
    assert "it hangs; what its processes do:" in log
    child = int(re.findall(r"^child (\d+)$", log, re.MULTILINE)[0])
    assert re.search(rf"^process {child}, state [SR]", log, re.MULTILINE)
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:  # init may take a moment to reap it
        if "Z" in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_written_after_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part writes its results to disk, so a run that is killed later loses nothing."""
    look = f"import json; print(sorted(json.load(open({str(tmp_path / 'gpu_check.json')!r}))['parts']))"
    _, written = check(monkeypatch, tmp_path, script("a", "raise SystemExit(1)"), script("b", ""), script("c", look))
    assert written["parts"]["c"]["last_lines"] == ["['a', 'b']"]


def test_what_is_too_long_is_shortened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "MOST_OUTPUT", 1000)
    _, written = check(monkeypatch, tmp_path, script("a", "print('x\\n' * 100000, 'end')"), script("b", "print('B')"))
    log = (tmp_path / "gpu_check.log").read_text()
    assert len(log) < 3000
    assert log.index(" end") < log.index("B")
    assert written["parts"]["a"]["last_lines"][-1] == " end"


def test_nothing_runs_where_nothing_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_IS_BUILT", "")
    monkeypatch.setattr(gpu_check, "_FACTS", "raise ImportError('no triton')")
    assert not Check(tmp_path, 300, [script("a", "")]).run()
    assert "ImportError: no triton" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu_check.json").read_text())["parts"] == {}


def test_modules_of_an_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Installed modules are used if the tree has none or an older one. Newer modules of the tree stay."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    installed, tree = tmp_path / "site" / "pipespec_kernels", tmp_path / "tree"
    for folder in (installed, tree, out := tmp_path / "out"):
        folder.mkdir(parents=True)
    for name in ("_native", "_cuda"):
        (installed / f"{name}{suffix}").write_text("installed")
    (installed / "_native.other-python.so").write_text("of another Python")
    (tree / f"_native{suffix}").write_text("own")
    for module, age in ((installed / f"_native{suffix}", 60), (tree / f"_native{suffix}", 0)):
        os.utime(module, (time.time() - age,) * 2)
    monkeypatch.setattr(gpu_check, "TREE", tree)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "site"))
    monkeypatch.setattr(gpu_check, "_IS_BUILT", f"open({str(tree / f'_cuda{suffix}')!r})")
    monkeypatch.setattr(gpu_check, "_FACTS", f"print({json.dumps(json.dumps(MACHINE))})")
    check = Check(out, 300, ())
    assert check.prepare()
    assert "build" not in check.record
    assert {path.name: path.read_text() for path in tree.iterdir()} == {
        f"_native{suffix}": "own",
        f"_cuda{suffix}": "installed",
    }
    os.utime(tree / f"_native{suffix}", (time.time() - 120,) * 2)
    assert check.prepare()
    assert (tree / f"_native{suffix}").read_text() == "installed"


def test_limits_leave_the_others_theirs() -> None:
    """However much of their limits the parts use, all required parts get their least time, and the check ends in time."""
    parts = gpu_check.PARTS
    assert sum(part.least for part in parts if part.required) <= gpu_check.ALL_SECONDS - 30  # to begin with
    assert gpu_check.ALL_SECONDS <= 8 * 60
    for share in (0.1, 0.5, 1.0):
        left = float(gpu_check.ALL_SECONDS - 30)
        for i, part in enumerate(parts):
            limit = gpu_check.limit_of(parts[i:], left)
            assert limit >= part.least or not part.required, part.name
            assert limit <= part.most
            if limit >= part.least:
                left -= share * limit
        assert left >= 0
    least = [part.least for part in parts if part.kind != "tests"]
    assert min(least) > gpu_check.INTERRUPTED
    names = [b.name for module in kernels.MODULES for b in importlib.import_module(f"bench.{module}").BENCHMARKS]
    assert set(gpu_check.KERNELS) <= set(names)
    assert [p.name for p in gpu_check.DRY_PARTS] == [p.name for p in parts if p.name != "memcheck"]


def test_a_tree_without_git(tmp_path: Path) -> None:
    """The check needs only the sources and the modules beside them. It runs the tree that contains the program."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    for folder in ("bench", "python", "pipespec_kernels"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "bench.gpu_check", "--dry-run", "--out", str(out), "--parts", "variants"]
    command += ["--seconds", "1000"]
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + (out / "gpu_check.log").read_text()
    written = json.loads((out / "gpu_check.json").read_text())
    assert written["machine"]["commit"] is None
    assert written["dry_run"]
    assert "build" not in written
    assert written["parts"]["variants"]["figures"]["spd.same_tokens"] == 48
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.json", "gpu_check.log"]


def test_one_architecture_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules that do not import are built, for the GPU's own architecture unless the environment says otherwise."""
    built: list[dict[str, str]] = []

    def run(command: Any, log: Path, limit: float, **variables: str) -> dict[str, Any]:
        if command[0] == "setup.py":
            built.append(variables)
        lines = ["90"] if command[-1] == gpu_check._ARCHITECTURE else [json.dumps(MACHINE)]
        return {"status": 1 if command[-1] == gpu_check._IS_BUILT else 0, "seconds": 1.0, "last_lines": lines}

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(Check, "_take_installed", lambda self: None)
    monkeypatch.delenv("PIPESPEC_CUDA_ARCHS", raising=False)
    assert Check(tmp_path, 300, ()).prepare()
    monkeypatch.setenv("PIPESPEC_CUDA_ARCHS", "80;90")
    assert Check(tmp_path, 300, ()).prepare()
    assert built == [{"PIPESPEC_CUDA_ARCHS": "90"}, {}]


def test_a_dry_run_survives_a_hang_and_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Real parts on the CPU: one hangs, one crashes, and the log says where. The last one gives all of its predicted figures."""
    at_once(monkeypatch, {"hanging, as asked": WINDOWS["deaf"]})
    faults = {"variants": "hang", "corruption": "crash", "physics": ""}
    dry = {part.name: part for part in gpu_check.DRY_PARTS}
    parts = [replace(dry[name], most=500, least=1, fault=fault) for name, fault in faults.items()]
    assert not Check(tmp_path, 1600, parts, dry=True).run()
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    log = (tmp_path / "gpu_check.log").read_text()
    hung, crashed, whole = (written["parts"][name] for name in faults)
    assert hung["status"] is None
    assert "host.verify_ops_us" in hung["figures"]  # of the section before
    assert "it hangs; what its processes do:" in log
    assert re.search(r'File ".*figures.py", line \d+ in _fault', log)
    assert crashed["status"] == -signal.SIGSEGV
    assert crashed["figures"]["corruption.alone"] == 0
    assert any("figures.py" in line for line in crashed["last_lines"])
    assert whole["well"]
    assert whole["status"] == 0
    of_physics = ("copy.", "node.", "launch.", "protocol.", "turn.", "pair.", "product.")
    expected = {name for name in predicted.load()["figures"] if name.startswith(of_physics)}
    assert expected <= set(whole["figures"])
    compared = {row["figure"]: row for row in written["predictions"]}
    assert list(compared) == list(predicted.load()["figures"])
    assert compared["copy.gb_per_s"]["measured"] == whole["figures"]["copy.gb_per_s"]
    assert compared["generate.rounds.accepted_length"]["measured"] is None


TESTS = """
import os, time, pytest
def test_good(): pass
def test_bad(): assert 1 + 1 == 3
@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass
@pytest.fixture
def breaks():
    yield
    raise ValueError("at the end")
def test_teardown(breaks): pass
def test_dies(): os.abort()
def test_never_reached(): pass
"""


def test_notes_of_tests_that_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    command = ("-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path))
    part = Part(
        "tests", (*command, "-p", "bench.pytest_notes", "--notes", "{file}", "--noconftest"), 60, 1, kind="tests"
    )
    well, written = check(monkeypatch, tmp_path, part)
    tests = written["parts"]["tests"]["tests"]
    assert not well
    assert (tests["passed"], tests["skipped"]) == (1, 1)
    assert [name.split("::")[1] for name in tests["failed"]] == ["test_bad", "test_teardown"]
    assert any("1 + 1" in line for line in tests["failed"]["test_some.py::test_bad"])
    assert "ValueError: at the end" in tests["failed"]["test_some.py::test_teardown"]
    assert tests["unfinished"] == ["test_some.py::test_dies"]
    assert tests["reasons"] == {"needs two GPUs": 1}
    assert pytest_notes.read(tmp_path / "none") == {
        "passed": 0,
        "skipped": 0,
        "reasons": {},
        "failed": {},
        "unfinished": [],
        "slowest": {},
    }


def test_ended_from_outside(tmp_path: Path) -> None:
    """After SIGTERM the running part ends, and the earlier results are kept."""
    program = (
        "import signal, sys; from pathlib import Path; from bench import gpu_check\n"
        "gpu_check._IS_BUILT = ''; gpu_check._FACTS = 'print(\\'{\"gpus\": []}\\')'\n"
        "signal.signal(signal.SIGTERM, gpu_check._terminated)\n"
        "parts = [gpu_check.Part('a', ('-c', 'print(1)'), 60, 1),"
        " gpu_check.Part('b', ('-c', 'import os, time; print(\"pid\", os.getpid(), flush=True); time.sleep(600)'), 600, 1)]\n"
        "gpu_check.Check(Path(sys.argv[1]), 600, parts).run()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    log, deadline = tmp_path / "gpu_check.log", time.monotonic() + SECONDS
    while not (log.exists() and "pid " in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    part = int(log.read_text().split("pid ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(part, 0)
    assert json.loads((tmp_path / "gpu_check.json").read_text())["parts"]["a"]["well"]
