"""What the micro-benchmarks share: cases, timing, and a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from pipespec_kernels import __version__, _native

Call = Callable[[int], object]  # with the number of the copy of the inputs to work on
Shape = tuple[int, int, int]  # rows, columns, and what they are of: logits or tokens


@dataclass
class Case:
    """One shape of a kernel's benchmark: our call, the bytes that it moves, and the same thing done otherwise."""

    bytes_moved: int
    ours: Call
    rivals: dict[str, Call] = field(default_factory=dict)


Maker = Callable[[Shape, torch.dtype, int], Case]  # of a shape, a dtype and a number of copies


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random numbers. On the CPU, where drawing them would take longer than measuring, some millions again and again."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if device != "cpu":
        return out.normal_()
    tile = torch.randn(min(out.numel(), (1 << 22) + 1)).to(dtype)
    for piece in out.view(-1).split(tile.numel()):
        piece.copy_(tile[: piece.numel()])
    return out


def seconds(call: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def median_us(samples: list[float]) -> float:
    return statistics.median(samples) * 1e6


def last_level_cache_bytes() -> int:
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes)


def machine() -> dict[str, Any]:
    """Hardware, versions and the load at this moment; goes into every result."""
    info = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            info[key.strip()] = value.strip()
    try:
        describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        commit = ""
    return {
        "cpu": info.get("model name", platform.processor()),
        "cpu_family_model_stepping": [info.get(k) for k in ("cpu family", "model", "stepping")],
        "cores": os.cpu_count(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "simd": _native.simd(),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "pipespec_kernels": __version__,
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(path: Path | None, info: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The results so far and the machine as JSON, if a file is named."""
    info["load_average_after"] = os.getloadavg()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps({"machine": info, "results": results}, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """The file is what it was or what it becomes, whenever this process is killed."""
    half = path.with_name(path.name + ".half")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
