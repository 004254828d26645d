"""Where a measurement comes from: commit, date, machine, versions and threads, for every results file."""

import os
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from pipespec_kernels import __version__, _native, collect_env


def provenance(threads: int | None = None) -> dict[str, Any]:
    """Describe the present measurement, with values for JSON. ``threads``: its CPU threads; None: torch's present number.

    The commit is that of :func:`commit`. The versions of CUDA and Triton are None without them.
    """
    environment = collect_env()
    cpu = environment["cpu"]
    return {
        "commit": commit(),
        "date": utc(),
        "cpu": cpu["model"],
        "cores": cpu["usable_cores"],
        "simd": _native.simd(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "threads": threads or torch.get_num_threads(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": environment["packages"]["triton"],
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "pipespec": __version__,
        "memory_bytes": environment["memory_bytes"],
        "gpus": [
            {
                "name": p.name,
                "memory_bytes": p.total_memory,
                "capability": [p.major, p.minor],
                "multiprocessors": p.multi_processor_count,
                "l2_bytes": p.L2_cache_size,
            }
            for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ],
    }


def utc() -> str:
    """The time now, ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


def describe(machine: dict[str, Any]) -> str:
    """One line about a record of :func:`provenance`."""
    gpus = Counter(gpu["name"] for gpu in machine.get("gpus", ()))
    return (
        f"{machine['cpu']}, cores: {machine['cores']}, threads: {machine['threads']}, "
        f"{''.join(f'{count} x {name}, ' for name, count in gpus.items())}torch {machine['torch']}, "
        f"transformers {machine['transformers']}, Python {machine['python']}, pipespec {machine['pipespec']}"
    )


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit checked out in ``folder``, with ``-dirty`` after it where tracked files differ from it.

    None without git, and where git does not track the folder: an installed package may lie in the repository of another project.
    """
    try:
        tracked = subprocess.run(["git", "-C", str(folder), "ls-files", "."], capture_output=True, text=True)
        if not tracked.stdout.strip():
            return None
        head = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
        # Benchmarks write bench/results, and do not measure it.
        changes = ["git", "-C", str(folder), "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)bench/results"]
        dirty = subprocess.run(changes, capture_output=True, text=True).stdout.strip()
    except OSError:
        return None
    return head.stdout.strip() + ("-dirty" if dirty else "") if head.returncode == 0 else None


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first core; 0 if the system does not report it."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes)
