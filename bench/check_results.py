"""Which files of bench/results are older than the code that they measure, or quoted nowhere. ``python -m bench.check_results``

Each file names the commit that it measured (:mod:`bench.machine`). A file is outdated where one of its sources in
:data:`SOURCES` differs from that commit's. Comments, docstrings and imports of Python do not count, nor does another name of a file. README.md and the pages of docs/ quote a file by its path. Exit status: 0, or 1 if a file is not current (but for
:data:`MAY_BE_OLDER`), or not quoted, or quoted and not there."""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path("bench/results")

_GPU = ("csrc/cuda", "pipespec_kernels/triton", "python/pipespec/engine/fused.py", "python/pipespec/schedules/graphs")
_KERNELS = ("csrc", "pipespec_kernels", *(f":(exclude){place}" for place in _GPU))
_OVER_STATES = tuple(f"python/pipespec/engine/{name}.py" for name in ("target_reader", "head", "block", "mtp"))
"""Drafts over the target's hidden states, which only head.json measures."""
_ENGINE = (
    *_KERNELS,
    *(f":(exclude){place}" for place in _OVER_STATES),
    "python/pipespec/engine",
    "python/pipespec/schedules",
    "python/pipespec/models",
)

_RUNNER = ("bench/runner.py", "bench/systems.py")
_GENERATE = (*_ENGINE, *_RUNNER, "bench/published.py", "bench/baselines.py", "bench/run.py")

SOURCES: dict[str, tuple[str, ...]] = {
    "controller.json": ("python/pipespec/engine/controller.py", "bench/controller.py"),
    "exact.json": (*_ENGINE, "bench/exact.py"),
    "exact_long.json": (*_ENGINE, "bench/exact.py"),
    "generate_cpu.json": (*_GENERATE, "python/pipespec/demo"),
    "head.json": ("csrc", "pipespec_kernels", "python/pipespec/engine", "python/pipespec/schedules", "python/pipespec/models", *_RUNNER, "bench/real.py"),
    "head_training.json": ("python/pipespec_train", "bench/recipes"),
    "gpu_h200.json": (*(place for place in _GENERATE if place[0] != ":"), "bench/planted.py"),
    "lengths.json": (*_ENGINE, "bench/lengths.py"),
    "price.json": ("csrc/cpu", "pipespec_kernels/decoder.py", "pipespec_kernels/formats.py", "pipespec_kernels/packed.py", "bench/controller.py"),
    "quality.json": ("csrc/cpu/formats", "python/pipespec/models/quantizing.py", "bench/quality.py"),
    "real.json": (*_ENGINE, *_RUNNER, "bench/real.py"),
    "shapes.json": (*_ENGINE, "bench/shapes.py"),
    "spd.json": (*_ENGINE, "python/pipespec_spd", *_RUNNER, "bench/baselines.py", "bench/spd.py"),
    "spd_real.json": ("python/pipespec_spd", "python/pipespec_train", "bench/spd.py", "bench/recipes"),
}  # fmt: skip
"""By results file: the files and folders whose changes outdate it, as pathspecs of git. Those of GPUs outdate no figure of a CPU."""

MAY_BE_OLDER = {"exact_long.json", "gpu_h200.json", "head.json", "head_training.json", "lengths.json", "quality.json", "spd_real.json"}  # fmt: skip
"""Files of hardware that is not at hand, of hours of training, and of an hour of texts or of reading: an older one is named, and is no failure."""


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)


def commit_of(results: Any) -> str | None:
    """The commit that a results file names: at its top level or one level below; None without one."""
    if not isinstance(results, dict):
        return None
    levels = [results, *(value for value in results.values() if isinstance(value, dict))]
    return next((level["commit"] for level in levels if isinstance(level.get("commit"), str)), None)


def _code(root: Path, revision: str, source: str) -> str:
    """A source at a revision; of Python the code without comments, docstrings and imports, which a move changes. Empty where it is not there."""
    text = _git(root, "show", f"{revision}:{source}").stdout
    if not source.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
            body[:] = [s for s in body if not isinstance(s, (ast.Import, ast.ImportFrom))]
    return ast.dump(tree)


def state(root: Path, file: Path, sources: Sequence[str]) -> tuple[bool, str]:
    """Whether a results file is current by the history of its ``sources`` in the repository ``root``, and the reason in words."""
    named = commit_of(json.loads(file.read_text(encoding="utf-8")))
    if named is None:
        return False, "names no commit"
    commit = named.removesuffix("-dirty")
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return False, f"measured {named}, which is not in the history of HEAD"
    changed = _git(root, "diff", "--name-only", "--no-renames", commit, "HEAD", "--", *sources).stdout.split()
    moves = [
        line.split("\t")[1:]
        for line in _git(root, "diff", "--name-status", "-M", "--diff-filter=R", commit, "HEAD").stdout.splitlines()
    ]
    before = {new: old for old, new in moves}
    # Where a source has moved to another source, the new name stands for both.
    changed = [source for source in changed if not any(old == source and new in changed for old, new in moves)]
    changed = [s for s in changed if _code(root, commit, before.get(s, s)) != _code(root, "HEAD", s)]
    if changed:
        return False, f"measured {named}; {len(changed)} of its sources differ from that commit's: {changed[0]}"
    if named != commit:
        return False, f"measured {commit} with uncommitted changes"
    return True, f"measured {named}"


def quoted(root: Path) -> set[str]:
    """The results files that README.md and the pages of docs/ name."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    texts = (page.read_text(encoding="utf-8") for page in pages if page.exists())
    return {name for text in texts for name in re.findall(r"bench/results/(\w+\.json)", text)}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.check_results", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    if _git(root, "rev-parse", "HEAD").returncode:
        print(f"{root} is no git repository: there is no history to compare with", file=sys.stderr)
        return 2
    names, found = quoted(root), {file.name: file for file in (root / RESULTS).glob("*.json")}
    failed = 0
    for name in sorted(names | found.keys()):
        if name not in found:
            is_current, reason = False, "is quoted, and not there"
        elif name not in SOURCES:
            is_current, reason = False, "has no entry in SOURCES of bench/check_results.py"
        elif name not in names:
            is_current, reason = False, "is quoted nowhere in README.md and docs/: delete it"
        else:
            is_current, reason = state(root, found[name], SOURCES[name])
        is_failure = not (is_current or (name in MAY_BE_OLDER and name in found))
        failed += is_failure
        print(f"{'current' if is_current else 'FAILED ' if is_failure else 'older  '}  {RESULTS / name}: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
