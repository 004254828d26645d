"""bench.gpu_check where there is no GPU: it says so and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
