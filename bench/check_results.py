"""Which files of bench/results are older than the code that they measure. ``python -m bench.check_results``

Each file names the commit that it measured (``pipespec.bench.machine``). A file is outdated where a later commit changes one of its sources in
:data:`SOURCES`. Exit status: 0, or 1 under ``--strict`` if a file is not current.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path("bench/results")

_KERNELS = ("csrc", "pipespec_kernels")
_ENGINE = (*_KERNELS, "python/pipespec/engine", "python/pipespec/schedules", "python/pipespec/models")

_GENERATE = (
    *_ENGINE,
    "python/pipespec/bench/comparison.py",
    "python/pipespec/bench/contenders.py",
    "bench/published.py",
    "bench/baselines.py",
    "bench/bench_generate.py",
)

SOURCES: dict[str, tuple[str, ...]] = {
    "controller.json": ("python/pipespec/engine/controller.py", "bench/controller_replay.py"),
    "exact.json": (*_ENGINE, "bench/exact.py"),
    "exact_real.json": (*_ENGINE, "bench/exact.py"),
    "generate_cpu.json": (*_GENERATE, "python/pipespec/demo"),
    "kernels_cpu.json": (*_KERNELS, "bench/kernels.py"),
    "planted_bfloat16.json": (*_GENERATE, "bench/planted.py"),
    "planted_float32.json": (*_GENERATE, "bench/planted.py"),
    "prompt.json": (*_ENGINE, "bench/bench_prompt.py"),
    "real.json": (*_ENGINE, "bench/bench_real.py"),
    "spd.json": (*_KERNELS, "python/pipespec/engine", "python/pipespec/spd", "bench/bench_spd.py"),
    "spd_real.json": ("python/pipespec/spd", "bench/bench_spd_real.py", "bench/recipes"),
}
"""By results file: the files and folders whose changes outdate it."""


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)


def commit_of(results: Any) -> str | None:
    """The commit that a results file names: at its top level or one level below; None without one."""
    if not isinstance(results, dict):
        return None
    levels = [results, *(value for value in results.values() if isinstance(value, dict))]
    return next((level["commit"] for level in levels if isinstance(level.get("commit"), str)), None)


def state(root: Path, file: Path, sources: Sequence[str]) -> tuple[bool, str]:
    """Compare one results file with the history of its sources.

    Args:
        root: Folder of the repository.
        file: A JSON file of results.
        sources: Files and folders relative to ``root``.

    Returns:
        Whether the file is current, and the reason in words.
    """
    named = commit_of(json.loads(file.read_text(encoding="utf-8")))
    if named is None:
        return False, "names no commit"
    commit = named.removesuffix("-dirty")
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode:
        return False, f"measured {named}, which is not in the history of HEAD"
    later = _git(root, "log", "--format=%h", f"{commit}..HEAD", "--", *sources).stdout.split()
    if later:
        return False, f"measured {named}; {len(later)} later commits change its sources, the last one is {later[0]}"
    if named != commit:
        return False, f"measured {commit} with uncommitted changes"
    return True, f"measured {named}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.check_results", description=__doc__.splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a file is not current")
    strict = parser.parse_args(arguments).strict
    if _git(root, "rev-parse", "HEAD").returncode:
        print(f"{root} is no git repository: there is no history to compare with", file=sys.stderr)
        return 2
    outdated = 0
    for file in sorted((root / RESULTS).glob("*.json")):
        if file.name in SOURCES:
            is_current, reason = state(root, file, SOURCES[file.name])
        else:
            is_current, reason = False, "has no entry in SOURCES of bench/check_results.py"
        outdated += not is_current
        print(f"{'current ' if is_current else 'outdated'}  {RESULTS / file.name}: {reason}")
    return 1 if strict and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
