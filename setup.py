"""Builds the native modules with CMake and ninja. Metadata is in pyproject.toml.

Environment: PIPESPEC_CUDA=on|off|auto, PIPESPEC_CUDA_ARCHS="80;90", PIPESPEC_WERROR=on|off, MAX_JOBS=n,
PIPESPEC_BUILD_DIR=folder of CMake's files (default: one per Python environment, under build/).
Nothing here imports torch: the core takes pointers and integers, so one build works with every torch.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str, folder_attribute: str) -> str:
    """A build tool from its Python package (found even where the environment is not activated), else from PATH."""
    try:
        found = shutil.which(name, path=getattr(__import__(name), folder_attribute))
    except (ImportError, AttributeError):
        found = None
    found = found or shutil.which(name)
    if not found:
        sys.exit(f"pipespec: {name} is missing; install it (pip install {name}), or build with build isolation")
    return found


def run(command: list[str]) -> None:
    if status := subprocess.run(command).returncode:
        # No traceback: what went wrong is in CMake's or the compiler's own words above.
        sys.exit(f"pipespec: building the native modules failed (status {status}): {' '.join(command)}")


def place(built: Path, wanted: Path) -> None:
    """Copies a module in one step (another process may be importing it just now); one that this build does not make
    must not survive from an earlier build."""
    if not built.exists():
        wanted.unlink(missing_ok=True)
    elif not wanted.exists() or wanted.read_bytes() != built.read_bytes():
        wanted.parent.mkdir(parents=True, exist_ok=True)
        temporary = wanted.with_suffix(".new")
        shutil.copy2(built, temporary)
        os.replace(temporary, wanted)


class CMakeBuild(build_ext):
    """Runs CMake once for all modules, then puts them where setuptools wants them."""

    def build_extensions(self) -> None:
        # Not setuptools' build_temp: for editable installs that is thrown away, and each one would compile everything.
        # One folder per Python environment, so that two of them do not undo each other's work.
        default = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-{crc32(sys.prefix.encode()):08x}"
        build_dir = Path(os.environ.get("PIPESPEC_BUILD_DIR") or default)
        build_dir.mkdir(parents=True, exist_ok=True)
        with open(build_dir / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds at once in one folder would corrupt ninja's log
            self.run_cmake(build_dir)
            for extension in self.extensions:
                self.install_module(extension, build_dir / "modules")

    def run_cmake(self, build_dir: Path) -> None:
        cmake = tool("cmake", "CMAKE_BIN_DIR")
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'BIN_DIR')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPIPESPEC_CUDA={os.environ.get('PIPESPEC_CUDA', 'auto').lower()}",
            f"-DPIPESPEC_CUDA_ARCHS={os.environ.get('PIPESPEC_CUDA_ARCHS', '')}",
            f"-DPIPESPEC_WERROR={os.environ.get('PIPESPEC_WERROR', 'off')}",
        ]
        # Configure from scratch when anything outside the sources changed (build isolation moves every tool each time,
        # an nvcc may have come or gone); changes inside the sources ninja sees by itself.
        compilers = [shutil.which(name) for name in ("c++", "g++", "nvcc")]
        flags = [os.environ.get(name) for name in ("CXX", "CUDACXX", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS")]
        key = json.dumps([configure, compilers, flags])
        key_file = build_dir / "configured"
        if not key_file.exists() or key_file.read_text() != key:
            key_file.unlink(missing_ok=True)
            run([*configure, "--fresh"])
            key_file.write_text(key)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        run([cmake, "--build", str(build_dir), "--parallel", jobs])

    def install_module(self, extension: Extension, modules: Path) -> None:
        name = self.get_ext_filename(extension.name)
        place(modules / Path(name).name, Path(self.build_lib) / name)

    def copy_extensions_to_source(self) -> None:
        """For editable installs and `build_ext --inplace`."""
        for extension in self.extensions:
            name = self.get_ext_filename(extension.name)
            place(Path(self.build_lib) / name, ROOT / name)


setup(
    packages=[*find_packages("python"), *find_packages(".", include=["pipespec_kernels*"])],
    package_dir={"": "python", "pipespec_kernels": "pipespec_kernels"},
    ext_modules=[
        Extension("pipespec_kernels._native", sources=[]),
        Extension("pipespec_kernels._cuda", sources=[], optional=True),  # only where CMake found nvcc
    ],
    cmdclass={"build_ext": CMakeBuild},
)
