"""Kernels compiled ahead of time: a first call compiles nothing where they fit, and as without them where they do not. No GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from pipespec_kernels import collect_env
from pipespec_kernels.triton import aot
from pipespec_kernels.triton.aot import build, calls
from pipespec_kernels.triton.aot.__main__ import main
from tests.kernels import first_call

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"), reason="the interpreter compiles nothing"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("clang") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two kernels of :mod:`.first_call`."""
    folder = tmp_path_factory.mktemp("aot") / "built"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "serve", lambda workload: first_call.calls("meta"))
        build.build(calls.Workload(()), [first_call.ARCH], folder, 1)
    return folder


def test_a_first_call_compiles_nothing(built: Path, tmp_path: Path) -> None:
    """With tensors in memory, through Triton's own launch on a device that only its driver pretends to have."""
    folder = tmp_path / "moved"  # no path is in it
    shutil.copytree(built, folder)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.first_call", str(folder)],
        cwd=ROOT,
        env=environment | {aot.VARIABLE: str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    kernels = ["silu_mul_kernel", "truncate_kernel"]
    assert found["state"] == "2 for sm_90"
    # Python's platform module may ask the program "file" for the machine's word size.
    assert found["with"] | {"started": []} == {"compiled": [], "started": [], "launches": 2, "written": []}
    assert not {"ptxas", "gcc", "clang"} & set(found["with"]["started"])
    # Only what has changed is compiled; its launcher is the same.
    assert found["changed kernel"]["compiled"] == ["truncate_kernel"]
    assert found["changed kernel"]["started"] == ["ptxas"]
    for name, why in (("triton", f"triton {triton.__version__} here, built by another"), ("sources", "have changed")):
        assert found[f"state, other {name}"].startswith("stale: ")
        assert why in found[f"state, other {name}"]
    assert found["without"]["compiled"] == kernels
    assert found["without"]["launches"] == 2
    assert found["without"]["started"].count("ptxas") == 2
    assert "truncate_kernel.cubin" in found["without"]["written"]
    assert found["in the environment"] is False
    after = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert {f: t for f, t in after.items() if f.is_file() and f.name != aot.MANIFEST} == {
        f: t for f, t in before.items() if f.is_file() and f.name != aot.MANIFEST
    }


def test_states(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(aot.state(tmp_path)) == "none"
    assert str(aot.state(built)) == "2 for sm_90"
    monkeypatch.setattr(triton.knobs.cache, "manager_class", triton.runtime.cache.FileCacheManager)
    assert aot.use(built).kernels == {}
    assert "another cache manager is set" in str(aot.state(built))
    assert triton.knobs.cache.manager_class is triton.runtime.cache.FileCacheManager
    for text in ("no JSON", "[]", "{}"):
        (tmp_path / aot.MANIFEST).write_text(text)
        assert str(aot.state(tmp_path)).startswith("unreadable (")


def test_doctor_has_the_state(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(aot.VARIABLE, str(built))
    assert collect_env()["ahead_of_time"] == "2 for sm_90"
    monkeypatch.setitem(sys.modules, "pipespec_kernels.triton.aot", None)
    assert collect_env()["ahead_of_time"].startswith("none, Triton does not import: ")


def test_refusals(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arch in ("90", "sm_9x", "sm_70"):
        with pytest.raises(SystemExit):
            main(["build", "--arch", arch])
        assert f"{arch!r} is no architecture from sm_80 on" in capsys.readouterr().err
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2"}))
    assert main(["build", "--arch", "sm_90", "--config", str(config), "--out", str(tmp_path / "out")]) == 1
    assert "model_type is 'gpt2'; models of these types are compiled: llama" in capsys.readouterr().err
    assert main(["build", "--arch", "sm_90", "--out", str(tmp_path)]) == 1
    assert "is not empty and has no manifest.json: give a new folder" in capsys.readouterr().err
    assert config.exists()


def test_models_of_configurations(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    model = calls.read_config(tmp_path)
    assert (model.kv_heads, model.dim, model.norms, model.windowed) == (4, 16, False, False)
    more = {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 2, "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes | more | {"use_sliding_window": True}))
    model = calls.read_config(tmp_path / "config.json")
    assert (model.kv_heads, model.dim, model.norms, model.windowed) == (2, 32, True, True)
