"""Runs the tests of the Triton kernels in triton's interpreter, on the CPU.

In a process of their own: TRITON_INTERPRET is read when triton is imported, and in this one kernels are compiled.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
ROOT = FOLDER.parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider", "--color=no"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = ran.stdout.splitlines()[-1]
    print(summary)
    assert re.search(r"\b[1-9]\d* passed", summary), ran.stdout  # and not: all skipped
