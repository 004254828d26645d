"""First calls of two kernels on a device that is named but not there, and what they compile: ``python -m tests.kernels.first_call FOLDER``

Only the driver is false: it names an architecture, and neither loads nor launches. Everything before a launch is Triton's own, with tensors in memory.
Prints, as JSON by case, the kernels that Triton compiled, the programs that it started to compile, and the launches.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from pipespec_kernels import triton as kernels
from pipespec_kernels.triton import aot, launch
from pipespec_kernels.triton.activation import silu_mul_kernel
from pipespec_kernels.triton.aot.build import NamesArchitecture, libcuda
from pipespec_kernels.triton.kv import truncate_kernel

ARCH = 90


def calls(device: str) -> None:
    gate_up, out = torch.empty((3, 512), dtype=torch.bfloat16, device=device), torch.empty(3, 256, device=device)
    kernels.silu_mul(gate_up, "silu", out.bfloat16())
    lengths = torch.empty(4, dtype=torch.int32, device=device)
    kernels.kv_truncate(lengths, lengths)


class Utils:
    """Triton's ``CudaUtils``, which is compiled and loaded as on a device, for a device that has none."""

    def __init__(self) -> None:
        CudaUtils()

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class Driver(NamesArchitecture):
    def __init__(self) -> None:
        super().__init__(ARCH)
        self.launches = 0
        self.utils = Utils()

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        CudaLauncher(src, metadata)

        def run(*arguments: Any) -> None:
            self.launches += 1

        return run


def first_calls() -> dict[str, Any]:
    """With a cache of the user's that is empty."""
    compiled: list[str] = []
    started: list[str] = []
    recording = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if recording and event == "subprocess.Popen" and "--version" not in arguments[1]:
            started.append(Path(str(arguments[0])).name)

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    sys.addaudithook(audit)
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        triton.knobs.compilation.listener = listen
        for kernel in (silu_mul_kernel, truncate_kernel):
            kernel.device_caches.clear()
        if hasattr(CudaUtils, "instance"):
            del CudaUtils.instance
        false = Driver()
        driver.set_active(false)
        calls("cpu")
        recording = False
        written = sorted({file.name for file in Path(cache).glob("*/*")})
    return {"compiled": compiled, "started": started, "launches": false.launches, "written": written}


def main() -> None:
    launch.check_device = lambda device, what: None
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        library = libcuda(Path(temporary))
        if library is not None:
            triton.knobs.nvidia.libcuda_path = library
            ctypes.CDLL(str(Path(library, "libcuda.so.1")), ctypes.RTLD_GLOBAL)
        found: dict[str, Any] = {"state": str(aot.state()), "with": first_calls()}
        # The folder is in use, but a kernel is another one.
        source = truncate_kernel.src
        truncate_kernel._unsafe_update_src(source + "\n    tl.debug_barrier()\n")
        found["changed kernel"] = first_calls()
        truncate_kernel._unsafe_update_src(source)
        triton.knobs.cache.manager_class = None
        manifest = json.loads((folder / aot.MANIFEST).read_text())
        for name in ("triton", "sources"):
            (folder / aot.MANIFEST).write_text(json.dumps(manifest | {name: "another"}))
            found[f"state, other {name}"] = str(aot.use())
            assert triton.knobs.cache.manager_class is None
        found["without"] = first_calls()
        found["in the environment"] = "TRITON_CACHE_MANAGER" in os.environ
    print(json.dumps(found))


if __name__ == "__main__":
    main()
