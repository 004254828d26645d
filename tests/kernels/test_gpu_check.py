"""bench.gpu_check without a GPU, with scripts as its parts: no part uses another's time, and no result is lost. No time is asserted."""

import ast
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_check
from bench.gpu_check import Part, check
from pipespec.schedules.graphs.stage import GraphedStage
from tests.waiting import until

ROOT = Path(__file__).parents[2]

KERNEL = {"benchmark": "b", "shape": [1, 2, 3], "us": 1.0, "gb_per_s": 2.0}
ROWS = [{"label": "streams, 1B", "tokens_per_second": 5.0}, {"label": "workers, 1B", "reason": "no memory"}]


def dumps(what: object) -> str:
    return f"import json, sys; json.dump(json.loads({json.dumps(json.dumps(what))}), open(sys.argv[1], 'w'))\n"


def script(name: str, text: str, seconds: int = 600, required: bool = True) -> Part:
    return Part(name, ("-c", text, "{file}"), seconds, required)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs parts; returns whether all required ones passed, and the results file."""

    def run(*parts: Part) -> tuple[bool, dict[str, Any]]:
        monkeypatch.setattr(gpu_check, "prepare", lambda *_: {"machine": {}})
        passed = check(tmp_path, parts, 3000)
        return passed, json.loads((tmp_path / "gpu_check.json").read_text())

    return run


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


def test_results_and_failures(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that pass, that crash before or after they have written results. The last part still runs."""
    passed, written = run(
        script("good", dumps({"results": [KERNEL]})),
        script("one shape fails", dumps({"results": [KERNEL, KERNEL | {"error": "OOM"}]})),
        script("crashes", "print('what was wrong'); raise SystemExit(3)"),
        script("half a file", "import sys; open(sys.argv[1], 'w').write('{')"),
        script("killed", dumps({"results": [KERNEL]}) + "import os; os.abort()"),
        script("last", dumps({"rows": ROWS})),
    )
    assert not passed
    parts = written["parts"]
    assert [name for name, part in parts.items() if part["passed"]] == ["good", "last"]
    assert parts["crashes"]["status"] == 3
    assert parts["killed"]["status"] == -signal.SIGABRT
    assert parts["killed"]["results"] == [KERNEL]
    assert any("Fatal Python error: Aborted" in line for line in parts["killed"]["last_lines"])
    out = capsys.readouterr().out
    for line in ("OOM", "    | what was wrong", "5.0 tokens/s", "(no memory)"):
        assert line in out, out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.json", "gpu_check.log"]


def test_only_required_parts_decide(run) -> None:
    passed, _ = run(script("a", "raise SystemExit(1)", required=False), script("b", dumps({"rows": ROWS})))
    assert passed


def test_a_part_that_hangs(run, tmp_path: Path) -> None:
    """The check ends the part and its child processes, logs where it hung, and keeps its results."""
    hangs = (
        "import signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(f'child {child.pid}', flush=True)\n"
        "time.sleep(600)\n"
    )
    passed, written = run(
        script("hangs", dumps({"results": [KERNEL]}) + hangs, seconds=6), script("last", dumps({"rows": ROWS}))
    )
    assert not passed
    assert written["parts"]["hangs"]["status"] is None
    assert written["parts"]["last"]["passed"]
    log = (tmp_path / "gpu_check.log").read_text()
    child = re.search(r"^child (\d+)$", log, re.MULTILINE)
    if child is not None:  # a machine so slow that the part has not begun shows nothing
        assert written["parts"]["hangs"]["results"] == [KERNEL]
        assert "Fatal Python error: Aborted" in log

        def is_gone() -> bool:
            stat = Path(f"/proc/{child[1]}/stat")
            return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"

        until(is_gone, "the child has ended")


TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert 1 + 1 == 3
@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass
"""


@pytest.mark.parametrize("plugins", [True, False])
def test_results_of_tests(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugins: bool) -> None:
    """With pytest's plugins and without them."""
    if not plugins:
        monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    part = gpu_check._tests("tests", "not gpu", [str(file)], 600, processes=2)
    assert ("-n" in part.command) == ("--timeout" in part.command) == plugins
    alone = ("--noconftest", "-c", os.devnull, "--rootdir", str(tmp_path))
    passed, written = run(Part("tests", (*part.command, *alone), 600))
    tests = written["parts"]["tests"]["tests"]
    assert not passed
    assert (tests["passed"], tests["skipped"]) == (1, 1)
    assert list(tests["failed"]) == ["test_some.py::test_bad"]
    assert any("1 + 1" in line for line in tests["failed"]["test_some.py::test_bad"])


def test_graphs_of_modules_fail_a_figure(run, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning of the driver is looked for in the output: the fused form is what was predicted."""
    warns = f"print({f'SpeedWarning: the graphs of target {gpu_check.BY_MODULES}, with some 40 launches'!r})\n"
    figures = replace(script("figures", dumps({"rows": ROWS}) + warns), call="figures")
    passed, written = run(figures, script("tests", dumps({"rows": ROWS}) + warns))
    assert not passed
    assert [name for name, part in written["parts"].items() if part["passed"]] == ["tests"]
    assert gpu_check.BY_MODULES in capsys.readouterr().out
    assert gpu_check.BY_MODULES in inspect.getsource(GraphedStage.by_modules_reason)


def test_calls_fit_their_time() -> None:
    """The limits of all parts, and what is required with a build."""
    assert sum(gpu_check.CALL_SECONDS[call] for call in ("figures", "tests")) <= 900
    for call, seconds in gpu_check.CALL_SECONDS.items():
        parts = [part for part in gpu_check.parts_of(False) if part.call in (call, *[""] * (call != "known"))]
        assert (parts[0].name == "smoke") == (call != "known")
        assert sum(part.seconds for part in parts) <= seconds
        assert sum(part.seconds for part in parts if part.required) + 90 <= seconds
    assert all((ROOT / path).exists() for path in (gpu_check.FIRST, *gpu_check.BY_RISK))


def test_a_check_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What has passed is kept and does not run again, at the same commit."""
    commits = iter(["a", "a", "b"])
    monkeypatch.setattr(gpu_check, "prepare", lambda *_: {"machine": {"commit": next(commits)}})
    ran = tmp_path / "ran"
    counts = f"open({str(ran)!r}, 'a').write('x');"
    parts = [script("good", counts + dumps({"rows": ROWS})), script("bad", "raise SystemExit(1)")]
    assert not check(tmp_path, parts, 3000, resume=True)
    for seen in ("x", "xx"):
        assert not check(tmp_path, parts, 3000, resume=True)
        assert ran.read_text() == seen
        written = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
        assert [part["passed"] for part in written.values()] == [True, False]


def test_one_architecture_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules that do not import are built, for the GPU's own architecture unless the environment says otherwise."""
    built: list[dict[str, str]] = []
    imports = iter([1, 0, 1, 0, 1, 1])  # the last build does not help

    def run(command: Any, log: Path, limit: float, **variables: str) -> dict[str, Any]:
        if command[0] == "setup.py":
            built.append(variables)
        is_import = command[-1].startswith("from pipespec_kernels")
        lines = ["90"] if command[-1] == gpu_check._ARCHITECTURE else ["{}"]
        return {"status": next(imports) if is_import else 0, "seconds": 1.0, "last_lines": lines}

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.delenv("PIPESPEC_CUDA_ARCHS", raising=False)
    gpu_check.prepare(tmp_path / "log", False, 300)
    monkeypatch.setenv("PIPESPEC_CUDA_ARCHS", "80;90")
    gpu_check.prepare(tmp_path / "log", False, 300)
    with pytest.raises(RuntimeError):
        gpu_check.prepare(tmp_path / "log", False, 300)
    on = {"PIPESPEC_CUDA": "on"}
    assert built == [on | {"PIPESPEC_CUDA_ARCHS": "90"}, on, on]


def test_a_tree_without_git(tmp_path: Path) -> None:
    """The check needs only the sources and the modules next to them. It runs the tree that contains the program."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    for folder in ("bench", "python", "pipespec_kernels"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "bench.gpu_check", "--dry-run", "--out", str(out), "--parts", "kernels"]
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + (out / "gpu_check.log").read_text()
    written = json.loads((out / "gpu_check.json").read_text())
    assert written["machine"]["commit"] is None
    assert written["dry_run"]
    assert "build" not in written
    assert written["parts"]["kernels"]["results"]
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.json", "gpu_check.log"]


def test_the_check_itself_imports_nothing_of_the_tree() -> None:
    """It builds the modules first, and sets the path of what it runs."""
    tree = ast.parse((ROOT / "bench" / "gpu_check.py").read_text(encoding="utf-8"))
    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = froms | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not {name.partition(".")[0] for name in names} & {"bench", "pipespec", "pipespec_kernels"}


AVAILABLE = {"torch", "triton", "transformers", "numpy", "pytest", "hypothesis", "psutil", "safetensors", "tokenizers"}
"""Packages that a machine needs for the check. The documentation names them."""

AVAILABLE.add("huggingface_hub")  # comes with transformers


OPTIONAL = {("demo", "run.py"), ("server", "app.py"), ("server", "metrics.py"), ("server", "prompts.py"), ("pipespec", "test_serve.py")}  # fmt: skip
"""The demo and the server, which no part runs. The server's tests skip themselves without its packages."""


def test_the_check_imports_nothing_else() -> None:
    """Checks imports at module level. Imports in functions are optional, or belong to other programs."""
    own = {"bench", "tests", "pipespec", "pipespec_kernels", "pipespec_spd", "pipespec_train"}
    files = [
        file
        for folder in ("bench", "python", "pipespec_kernels", *gpu_check.GPU_TESTS)
        for file in (ROOT / folder).rglob("*.py")
    ]
    files += [ROOT / "tests" / name for name in ("conftest.py", "trials.py", "waiting.py")]
    assert len(files) > 100
    for file in files:
        if (file.parent.name, file.name) in OPTIONAL:
            continue
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                assert root in own | AVAILABLE or root in sys.stdlib_module_names, f"{file} imports {name}"
