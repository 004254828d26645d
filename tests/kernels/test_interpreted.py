"""Runs the tests of the Triton kernels in triton's interpreter, on the CPU.

They run in processes of their own: triton reads TRITON_INTERPRET when it is imported, and the present process compiles kernels. There are two, one
for each core of most machines of CI.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
ROOT = FOLDER.parents[2]
FILES = [*sorted(FOLDER.glob("test_*.py")), FOLDER.parent / "test_matrix.py", FOLDER.parent / "test_edges.py"]
"""Every second one takes as long as the others do."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("part", range(2))
def test_interpreted(part: int) -> None:
    files = FILES[part::2]
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-p", "no:cacheprovider"]
    command += ["--color=no", "-rA", "--show-capture=no", "--durations=10", "--durations-min=1"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    for file in files:  # and not: all of them skipped
        assert re.search(rf"^PASSED \S*/{re.escape(file.name)}::", ran.stdout, re.MULTILINE), ran.stdout
