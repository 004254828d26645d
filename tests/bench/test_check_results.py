"""bench.check_results in a repository made for the test, and its table of sources against the tree."""

import json
import subprocess
from pathlib import Path

import pytest

from bench import check_results


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    ran = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def commit(root: Path, **files: str) -> str:
    for name, text in files.items():
        (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "change")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / check_results.RESULTS).mkdir(parents=True)
    monkeypatch.setattr(check_results, "SOURCES", {"a.json": ("source",)})
    return tmp_path


def measured(root: Path, name: str, **content: object) -> None:
    (root / check_results.RESULTS / name).write_text(json.dumps(content))
    with (root / "README.md").open("a") as page:
        print(f"[figures]({check_results.RESULTS}/{name})", file=page)


def run(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = check_results.main([], root)
    return status, capsys.readouterr().out


def test_current_until_a_source_changes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = commit(root, source="1", other="1")
    measured(root, "a.json", machine={"commit": first})
    commit(root, other="2")
    assert run(root, capsys) == (0, f"current  bench/results/a.json: measured {first}\n")
    commit(root, source="2")
    status, out = run(root, capsys)
    assert status == 1
    assert "1 of its sources differ from that commit's: source" in out
    commit(root, source="1")
    assert run(root, capsys)[0] == 0


def test_a_docstring_is_no_change(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_results, "SOURCES", {"a.json": ("source.py",)})
    code = 'def f():\n    """{}"""\n    return {}  # {}\n'
    measured(root, "a.json", commit=commit(root, **{"source.py": code.format("one", 1, "one")}))
    commit(root, **{"source.py": code.format("another", 1, "another")})
    assert run(root, capsys)[0] == 0
    commit(root, **{"source.py": code.format("one", 2, "one")})
    assert run(root, capsys)[0] == 1


def test_another_name_is_no_change(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source moves, with imports of other names; then its code changes."""
    code = "import {}\n\n\ndef f():\n    first = [1, 2, 3]\n    return sum(first) + {}\n"
    (root / "old").mkdir()
    measured(root, "a.json", commit=commit(root, **{"old/source.py": code.format("a.module", 1)}))
    git(root, "mv", "old", "new")
    commit(root, **{"new/source.py": code.format("b.module", 1)})
    for sources in (("new",), ("old", "new")):
        monkeypatch.setattr(check_results, "SOURCES", {"a.json": sources})
        assert run(root, capsys)[0] == 0
    commit(root, **{"new/source.py": code.format("b.module", 2)})
    assert run(root, capsys)[0] == 1


def test_results_of_hardware_elsewhere_may_be_older(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(root, "a.json", machine={"commit": commit(root, source="1")})
    commit(root, source="2")
    monkeypatch.setattr(check_results, "MAY_BE_OLDER", {"a.json"})
    status, out = run(root, capsys)
    assert status == 0
    assert out.startswith("older    bench/results/a.json")


@pytest.mark.parametrize(
    ("content", "reason"), [({"rows": []}, "names no commit"), ({"commit": None}, "names no commit"), ({"commit": "0" * 40}, "not in the history")],
)  # fmt: skip
def test_without_a_known_commit(root: Path, capsys: pytest.CaptureFixture[str], content: dict, reason: str) -> None:
    commit(root, source="1")
    measured(root, "a.json", **content)
    status, out = run(root, capsys)
    assert status == 1
    assert reason in out


def test_uncommitted_changes_and_files_without_an_entry(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = commit(root, source="1")
    measured(root, "a.json", commit=f"{head}-dirty")
    measured(root, "b.json", commit=head)
    status, out = run(root, capsys)
    assert status == 1
    assert "with uncommitted changes" in out
    assert "b.json: has no entry in SOURCES" in out


def test_figures_that_no_page_quotes_and_pages_without_figures(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = commit(root, source="1")
    measured(root, "a.json", commit=head)
    assert run(root, capsys)[0] == 0
    (root / "README.md").write_text("[figures](bench/results/gone.json)")
    status, out = run(root, capsys)
    assert status == 1
    assert "a.json: is quoted nowhere" in out
    assert "gone.json: is quoted, and not there" in out
    (root / "docs").mkdir()
    (root / "docs" / "speed.md").write_text("`bench/results/a.json`")
    assert "current  bench/results/a.json" in run(root, capsys)[1]


def test_no_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_results.main([], tmp_path) == 2
    assert "no git repository" in capsys.readouterr().err


def test_every_file_of_this_tree_has_sources_and_is_quoted() -> None:
    results = check_results.ROOT / check_results.RESULTS
    there = {file.name for file in results.glob("*.json")}
    assert set(check_results.SOURCES) == there == check_results.quoted(check_results.ROOT)
    for sources in check_results.SOURCES.values():
        for source in sources:
            assert (check_results.ROOT / source.removeprefix(":(exclude)")).exists(), source
