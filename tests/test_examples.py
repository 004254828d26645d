"""The scripts of examples/ run, each in a process of its own, with the bundled models."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: object, given: str = "") -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / script, *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_chat() -> None:
    out = run("chat.py", given="def mean(values):\ndef median(values):\n\n")
    assert "return" in out
    assert "tokens/s" in out


def test_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.pipespec.gguf_files import tiny, write

    write(tiny("qwen2"), tmp_path / "model.gguf")
    assert "tokens/s" in run("gguf.py", tmp_path / "model.gguf")


@pytest.mark.skipif(find_spec("peft") is None, reason="needs the package peft")
def test_peft_model() -> None:
    assert "def mean(values):" in run("peft_model.py")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    assert "def mean(values):" in run("two_gpus.py")


def test_own_draft() -> None:
    assert "def mean(values):" in run("own_draft.py")


def test_every_script_has_a_test_and_a_row() -> None:
    scripts = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert len(scripts) == 5
    assert all(f"test_{script}" in globals() for script in scripts)
    page = (ROOT / "examples" / "README.md").read_text()
    assert all(f"`{script}.py" in page for script in scripts)
