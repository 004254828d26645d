"""The Triton kernels, compiled ahead of time for three generations of GPUs, keep to their budgets; no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def gate(*options: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: it needs the compiler, whatever this process has done with TRITON_INTERPRET.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.compile_gate", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_budgets_are_kept_and_would_fail(tmp_path: Path) -> None:
    ran = gate("--json", str(tmp_path / "gate.json"))
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reports = json.loads((tmp_path / "gate.json").read_text())["reports"]
    selection = ("verify, greedy", "verify, coupled", "verify_ratio, test", "verify_ratio, choose", "cutoff")
    storage = ("attention, D=128, M=32", "attention, D=128, M=16, invariant", "attention, combine, D=128", "kv_append")
    for kernel in selection + storage:
        assert {r["arch"] for r in reports if r["name"] == kernel} == {80, 90, 100}
    for r in reports:
        assert r["spilled"] == 0
        assert 0 < r["registers"] <= 255
        assert r["shared"] <= (163 << 10 if r["arch"] == 80 else 227 << 10)
        if r["loop_per_logit"] is None:
            assert r["name"].startswith(("attention", "kv_"))
            continue
        # The counting sees whole loops: one load of 16 bytes or several, and not more instructions than there are.
        assert 4 < r["loop_per_logit"] < r["all_per_logit"] < r["instructions"]

    # A budget that nothing meets is reported for what it is.
    ran = gate("--arch", "90", "--kernel", "verify, coupled", "--tighten", "0.5")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "instructions per logit, budget 17" in ran.stdout
