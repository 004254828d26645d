"""`bench.kills` strikes, compares and counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import SECONDS

ROOT = Path(__file__).parents[2]


def test_a_short_run(tmp_path):
    page, record = tmp_path / "page.md", tmp_path / "kills.json"
    page.write_text("<!-- kills:begin -->\n<!-- kills:end -->\n")
    command = [sys.executable, "-m", "bench.kills", "--schedules", "workers", "--strikes", "3", "--seconds", "600"]
    command += ["--json", str(record), "--docs", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    figures = {name.removeprefix("kills.workers."): value for name, value in found["figures"].items()}
    assert figures["strikes"] >= 3
    assert sum(found["details"]["workers"]["strikes"].values()) == figures["strikes"]
    assert figures["calls"] >= 1
    assert (figures["wrong"], figures["errors"]) == (0, 0)
    assert f"| workers | {figures['strikes']} |" in page.read_text()
