"""Compiling ahead of time, without a GPU: what Triton would compile at a first call is compiled now, by Triton itself.

Each call of :mod:`.calls` goes through Triton's own launch up to the point where it would compile: the driver only names an architecture. So the
entries have the names that a launch on such a device looks for. Processes then compile the variants side by side, and with them the launchers: small
C extensions that pass the arguments on, which Triton compiles with the C compiler.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pipespec_kernels.triton import aot, launch
from pipespec_kernels.triton.aot import calls
from pipespec_kernels.triton.aot.calls import Workload

MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188}
"""Of the largest device of each architecture. They decide over the division of rows, and so over a few variants only."""
KEPT = (".cubin", ".json", ".so")
"""Files of an entry of Triton's cache that a launch reads. The others are the compiler's intermediate forms."""


class Variant(NamedTuple):
    """A kernel to compile: where it is defined, and what Triton's ``preload`` takes."""

    module: str
    name: str
    specialization: str


class NamesArchitecture:
    """In place of Triton's driver: devices that run nothing. A device's number is its architecture."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def pretended(arch: int) -> Any:
    """Triton compiles for this architecture, and kernels accept tensors on the meta device."""
    before, launch.compiled_for = launch.compiled_for, MULTIPROCESSORS.get(arch, 132)
    driver.set_active(NamesArchitecture(arch))
    try:
        yield
    finally:
        launch.compiled_for = before
        driver._active = None  # reset_active() fails where there is no GPU


def variants(workload: Workload, arch: int) -> list[Variant]:
    """What the calls of a workload compile for an architecture. Compiles nothing."""
    found: dict[Variant, None] = {}

    def stop(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function = fn.jit_function
        found[Variant(function.fn.__module__, function.__name__, compile["specialization_data"])] = None
        return True  # neither compile nor launch

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, stop
    try:
        with pretended(arch):
            calls.serve(workload)
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    return list(found)


def build(workload: Workload, archs: Sequence[int], out: Path, processes: int) -> None:
    """Compile everything for all ``archs`` and replace the folder ``out``.

    Raises:
        RuntimeError: the interpreter is on, there is no C compiler, or a kernel does not compile.
        OSError: the folder cannot be written.
        ValueError: ``out`` has other files than those of an earlier build.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: unset it, the interpreter compiles nothing")
    if out.exists() and any(out.iterdir()) and not (out / aot.MANIFEST).is_file():
        raise ValueError(f"{out} is not empty and has no {aot.MANIFEST}: give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = {arch: variants(workload, arch) for arch in archs}
    # On the same disk, so that the folder appears at once.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        cache, ready = Path(temporary, "cache"), Path(temporary, "ready")
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, spawn, _start, (str(cache), libcuda(Path(temporary)))) as pool:
            jobs = {pool.submit(_compile, *v, arch): v for arch, of_arch in wanted.items() for v in of_arch}
            try:
                for done in as_completed(jobs):
                    done.result()
            except Exception as error:
                pool.shutdown(cancel_futures=True)
                raise RuntimeError(f"{jobs[done].name} does not compile: {error}") from error
        _keep(cache, ready)
        manifest = aot.versions() | {
            "kernels": {f"sm_{arch}": len(of_arch) for arch, of_arch in wanted.items()},
            "dtype": str(workload.dtype).removeprefix("torch."),
            "models": [asdict(model) for model in workload.models],
        }
        (ready / aot.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if out.exists():
            out.rename(Path(temporary, "before"))
        ready.rename(out)


def _keep(cache: Path, ready: Path) -> None:
    """Copy what a launch reads."""
    for file in cache.glob("*/*"):
        if file.suffix in KEPT and not file.name.startswith("__grp__"):
            (ready / file.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, ready / file.parent.name / file.name)


def _start(cache: str, libcuda: str | None) -> None:
    """In each process that compiles."""
    triton.knobs.cache.dir = cache
    triton.knobs.cache.manager_class = None  # a folder that is in use already would hide what it has
    if libcuda is not None:
        triton.knobs.nvidia.libcuda_path = libcuda
        ctypes.CDLL(str(Path(libcuda, "libcuda.so.1")), ctypes.RTLD_GLOBAL)


def _compile(module: str, name: str, specialization: str, arch: int) -> None:
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    with pretended(arch):
        kernel = getattr(importlib.import_module(module), name).preload(specialization)
        CudaUtils()
        CudaLauncher(kernel.src, kernel.metadata)


def libcuda(folder: Path) -> str | None:
    """A folder with a library to link launchers with, where there is no driver; None where there is one.

    Launchers name the library, ``libcuda.so.1``, and not where it was. A device's own is loaded in its place.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
        return None
    except OSError:
        pass
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("there is no C compiler: install gcc or clang, or set CC (Triton needs it for launchers)")
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    texts = [path.read_text() for path in (Path(str(nvidia.__file__)), Path(str(nvidia.__file__)).with_suffix(".c"))]
    functions = sorted({name for text in texts for name in re.findall(r"\b(cu[A-Z]\w+)\b", text)})
    source = folder / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in functions))
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    (folder / "libcuda.so").symlink_to(library.name)  # what Triton 3.5 links with
    return str(folder)


def size(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
