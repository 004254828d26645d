"""Facts that several files state agree: versions, settings of tools, workflows."""

import re
from pathlib import Path

import pytest
import yaml

from pipespec_kernels import __version__

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_pre_commit_uses_the_pinned_versions() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "clang-format", "mypy"}
    required = [entry for hook in hooks for entry in hook.get("additional_dependencies", [])]
    assert required
    for requirement in required:
        name, _, version = requirement.partition("==")
        assert pinned[name] == version, requirement


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more asks for it
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job
        for step in job["steps"]:
            command = step.get("run", "")
            for target in re.findall(r"\bmake ([\w-]+)", command):
                assert target in targets, command
            for module in re.findall(r"-m bench\.(\w+)", command):
                assert (ROOT / "bench" / f"{module}.py").is_file(), command
            for script in re.findall(r"(?:^|\s)(\.ci/\w+)", command):
                assert (ROOT / script).is_file(), command


SOURCES = [
    path
    for folder in ("python", "pipespec_kernels", "csrc")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cpp", ".hpp", ".cu", ".cuh")
]


def test_no_wait_depends_on_the_clock_of_the_day() -> None:
    """It may be set forwards and backwards at any time. Answers of the server say when they were made."""
    words = re.compile(r"\btime\.time(_ns)?\(|system_clock|CLOCK_REALTIME|gettimeofday|datetime\.now|FUTEX_CLOCK")
    assert len(SOURCES) > 100
    found = [path for path in SOURCES if words.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in found] == ["python/pipespec/api/server/conversations.py"]


def test_citation_and_changelog_have_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {entry["url"] for entry in citation["references"]} == {
        "https://arxiv.org/abs/2505.01572",
        "https://arxiv.org/abs/2605.30852",
    }
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[(Unreleased|{re.escape(__version__)})\]", changelog, re.MULTILINE)
