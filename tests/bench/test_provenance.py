"""The record of origin in every results file."""

import json
from pathlib import Path

from bench.machine import commit, provenance
from tests.bench.test_check_results import git


def test_the_commit_is_dirty_with_changes_outside_of_the_results(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    code, file = tmp_path / "code.py", results / "figures.json"
    for path in (code, file):
        path.write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(results) == head
    file.write_text("2\n")
    assert commit(results) == head
    code.write_text("2\n")
    assert commit(results) == f"{head}-dirty"


def test_a_record_is_json_and_complete() -> None:
    record = json.loads(json.dumps(provenance(3)))
    assert {"commit", "date", "cpu", "cores", "torch", "transformers", "python", "pipespec"} <= set(record)
    assert record["threads"] == 3
