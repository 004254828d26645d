"""`bench.kills` strikes, compares and counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import kills, strikes
from bench.figures import Figures
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


def test_a_run_in_which_nothing_starts_fails(monkeypatch):
    """Starts that fail at once are not repeated without a pause."""
    tally, pauses = strikes.Tally(), []

    def refuse(number):
        raise RuntimeError("draft 0 could not start")

    monkeypatch.setattr(kills, "_PAUSE_S", 0.01)
    monkeypatch.setattr(kills.time, "sleep", pauses.append)
    with strikes.Amount("workers", tally, 0.05, None) as amount:
        kills.measure_workers(tally, amount, refuse, [], 0)
    assert tally.unstarted == pauses.count(0.01) > 0
    with pytest.raises(AssertionError, match=r"0 starts, .* 0 calls: nothing was tested"):
        tally.note(Figures(None), "workers")
