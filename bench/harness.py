"""What the micro-benchmarks share: timing, cold data, and a description of the machine."""

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


@dataclass
class Case:
    """One shape of a kernel's benchmark: our call, the bytes that it moves, and the same thing done otherwise."""

    bytes_moved: int
    ours: Call
    rivals: dict[str, Call] = field(default_factory=dict)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random logits. On the CPU, where drawing them would take longer than measuring, some millions again and again."""
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
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
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
        "commit": commit.stdout.strip() or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(path: Path | None, info: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The results and the machine as JSON, if a file is named."""
    info["load_average_after"] = machine()["load_average"]
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": info, "results": results}, indent=1) + "\n")
        print(f"written to {path}")


class ColdMemory:
    """A buffer larger than the caches, handed out piece by piece.

    A piece is cold when it comes: either it was never touched since the last :meth:`flush`, or the whole buffer has
    gone by in between. On a shared or virtual machine the last-level cache may be larger than what it says; the size
    of the buffer belongs in the result.
    """

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.next = 0

    def fill(self, tile: torch.Tensor) -> None:
        """Repeats the tile over the buffer."""
        tile = tile.view(torch.uint8).flatten()
        for begin in range(0, self.bytes.numel(), tile.numel()):
            piece = self.bytes[begin : begin + tile.numel()]
            piece.copy_(tile[: piece.numel()])

    def flush(self) -> None:
        _native.read_bandwidth_probe(self.bytes.data_ptr(), self.bytes.numel(), 1)

    def piece(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self.next + nbytes > self.bytes.numel():
            self.next = 0
        piece = self.bytes[self.next : self.next + nbytes].view(dtype).view(shape)
        self.next += (nbytes + 4095) // 4096 * 4096
        return piece
