"""bench.gpu_check without a GPU, with parts that are scripts: none takes another's time, and no result is lost. No time is asserted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_check, kernels, pytest_notes
from bench.gpu_check import Check, Part

ROOT = Path(__file__).parents[2]
MACHINE = {"gpu": "a GPU", "gpu_memory_bytes": 80 << 30}


def test_refuses_politely(tmp_path: Path) -> None:
    out = tmp_path / "results"
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
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
    """Whether all is well, and what was written."""
    monkeypatch.setattr(gpu_check, "_IS_BUILT", "")
    monkeypatch.setattr(gpu_check, "_FACTS", f"print({json.dumps(json.dumps(MACHINE))})")
    monkeypatch.setattr(gpu_check, "INTERRUPTED", 2.0)
    monkeypatch.setattr(gpu_check, "ABORTED", 1.0)
    well = Check(out, seconds, parts).run()
    return well, json.loads((out / "gpu_check.json").read_text())


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
    """Parts that are fine, that crash before and after they have written, that print nothing useful; and what comes last still runs."""
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
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print('child', child.pid, flush=True)
time.sleep(600)
"""


def test_a_part_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is ended with what it has started, says where it hung, and its results stay."""
    well, written = check(
        monkeypatch,
        tmp_path,
        script("hangs", dumps({"results": [KERNEL]}) + HANGS, "kernel", most=9),
        script("interrupted", "import time\ntry: time.sleep(600)\nfinally: print('came down')", most=9),
        script("last", "print('ran')"),
    )
    assert not well
    parts = written["parts"]
    assert parts["hangs"]["status"] is parts["interrupted"]["status"] is None
    assert parts["hangs"]["results"] == [KERNEL]
    assert parts["last"]["well"]
    log = (tmp_path / "gpu_check.log").read_text()
    assert "Fatal Python error: Aborted" in log
    assert "came down" in log
    assert "stopped after 9 s" in log
    child = int(re.findall(r"^child (\d+)$", log, re.MULTILINE)[0])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:  # its adopter may take a moment
        if "Z" in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_written_after_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part finds those before it on the disk: whoever is killed then has lost nothing."""
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
    """What `pip install .` has built is used where the tree has none or an older one; what is newer in the tree stays."""
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
    monkeypatch.setattr(gpu_check, "_FACTS", "print('{}')")
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
    """Whatever the parts take of their limits, all required ones get their least, and the whole ends in time."""
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
    assert {part.name for part in parts if part.kind == "kernel"} == set(kernels.MODULES)


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
    """SIGTERM: the part under way ends, and what was found before is there."""
    program = (
        "import signal, sys; from pathlib import Path; from bench import gpu_check\n"
        "gpu_check._IS_BUILT = ''; gpu_check._FACTS = \"print('{}')\"\n"
        "signal.signal(signal.SIGTERM, gpu_check._terminated)\n"
        "parts = [gpu_check.Part('a', ('-c', 'print(1)'), 60, 1),"
        " gpu_check.Part('b', ('-c', 'import os, time; print(\"pid\", os.getpid(), flush=True); time.sleep(600)'), 600, 1)]\n"
        "gpu_check.Check(Path(sys.argv[1]), 600, parts).run()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    log, deadline = tmp_path / "gpu_check.log", time.monotonic() + 60
    while not (log.exists() and "pid " in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    part = int(log.read_text().split("pid ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(part, 0)
    assert json.loads((tmp_path / "gpu_check.json").read_text())["parts"]["a"]["well"]
