"""The built modules: their build information is true, they have no forbidden dependencies, and their import errors say what to do."""

import importlib
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pipespec_kernels
from pipespec_kernels import _native, env
from tests.waiting import SECONDS

PACKAGE = Path(pipespec_kernels.__file__).parent
CUDA_MODULES = list(PACKAGE.glob("_cuda.*so"))


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds only the pipespec_kernels in ``cwd``."""
    # -S: no site-packages, so no installed pipespec and no torch.
    return subprocess.run([sys.executable, "-S", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package's Python files, without native modules, in a folder of its own."""
    shutil.copytree(PACKAGE, tmp_path / "pipespec_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_build_info_says_what_was_built() -> None:
    info = _native.build_info()
    assert info["version"] == pipespec_kernels.__version__
    assert info["cxx_standard"] >= 202002
    assert info["build_type"] == "Release"
    assert info["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    of_machine = {"x86_64": {"avx2", "avx512"}, "aarch64": {"neon", "dotprod"}}
    assert set(info["simd"]) == of_machine.get(platform.machine(), set())
    assert info["cuda"] == bool(CUDA_MODULES) == bool(info["cuda_archs"])
    if info["cuda"]:
        assert not info["cuda_archs"][-1].endswith("-real"), "no PTX for GPUs that are newer than this build"


@pytest.mark.parametrize("module", ["_native", "_cuda"])
def test_module_links_neither_torch_nor_cuda(module: str) -> None:
    files = list(PACKAGE.glob(f"{module}.*so"))
    if not files:
        pytest.skip(f"{module} was not built")
    listed = subprocess.run(["ldd", files[0]], capture_output=True, text=True, check=True).stdout
    # The names alone: "c10" may be a part of an address.
    linked = [line.split()[0] for line in listed.splitlines()]
    assert linked
    for library in ("torch", "c10", "libcuda", "libcudart", "libpython"):
        assert not any(library in name for name in linked)


@pytest.mark.skipif(not CUDA_MODULES, reason="_cuda was not built")
def test_cuda_kernels_spill_nothing() -> None:
    triton = importlib.util.find_spec("triton")
    own = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton and triton.origin else None
    tool = str(own) if own and own.exists() else shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("needs cuobjdump, which comes with triton and with the CUDA toolkit")
    command = [tool, "--dump-resource-usage", CUDA_MODULES[0]]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listed)
    archs = len(_native.build_info()["cuda_archs"])
    # One variant for each scope; closing a step always has the system's.
    scopes = {"PlanKernel": 2, "CommitKernel": 2, "CloseStepKernel": 1, "LitmusWriteKernel": 2, "LitmusReadKernel": 2}
    for name, variants in scopes.items():
        found = [kernel[1:] for kernel in kernels if name in kernel[0]]
        assert len(found) == archs * variants
        for registers, stack, local in found:
            assert (int(stack), int(local)) == (0, 0)
            assert 0 < int(registers) <= 128


def test_native_imports_without_torch_and_numpy(copy: Path) -> None:
    shutil.copy(_native.__file__, copy / "pipespec_kernels")
    ran = python("from pipespec_kernels import _native; print(_native.build_info()['version'])", copy)
    assert ran.stdout.strip() == pipespec_kernels.__version__, ran.stderr


def test_unbuilt_module_says_how_to_build(copy: Path) -> None:
    ran = python("from pipespec_kernels import _native", copy)
    assert ran.returncode != 0
    assert "pipespec_kernels._native is not built" in ran.stderr
    assert "pip install" in ran.stderr


def test_source_tree_that_hides_an_installed_package_says_so(copy: Path) -> None:
    (copy / "setup.py").touch()
    ran = python("from pipespec_kernels import _native", copy)
    assert "make native" in ran.stderr
    assert "the source tree hides it" in ran.stderr


def test_module_for_another_python_names_both(copy: Path) -> None:
    other = "_native.cpython-39-x86_64-linux-gnu.so"
    (copy / "pipespec_kernels" / other).touch()
    ran = python("from pipespec_kernels import _native", copy)
    assert "another Python" in ran.stderr
    assert other in ran.stderr
    assert "_native" + sysconfig.get_config_var("EXT_SUFFIX") in ran.stderr


def test_module_that_does_not_load_says_why(copy: Path) -> None:
    (copy / "pipespec_kernels" / Path(_native.__file__).name).write_text("not a shared object")
    ran = python("from pipespec_kernels import _native", copy)
    assert "does not load" in ran.stderr
    assert "file too short" in ran.stderr or "invalid ELF header" in ran.stderr


@pytest.mark.parametrize("package", ["pipespec", "pipespec_kernels", "pipespec_spd", "pipespec_train"])
def test_every_folder_with_code_is_a_package(package: str) -> None:
    """A folder without ``__init__.py`` works in the source tree and is missing from the wheel."""
    root = Path(importlib.import_module(package).__file__).parent
    folders = {path.parent for path in root.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = pipespec_kernels.nonsense


def test_import_loads_no_torch() -> None:
    code = "import sys, pipespec_kernels; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


@pytest.mark.skipif(not CUDA_MODULES, reason="_cuda was not built")
def test_cuda_module_imports_and_answers_or_refuses_in_words() -> None:
    from pipespec_kernels import _cuda

    assert _cuda.runtime_version() >= 12000
    assert _cuda.driver_version() >= 0
    if env.collect_env()["cuda"]["devices"]:
        assert _cuda.device_count() == len(_cuda.devices())
    else:
        with pytest.raises(RuntimeError, match=r"no usable CUDA device: .*CUDA error \d+"):
            _cuda.device_count()


def test_environment_of_this_installation() -> None:
    found = env.collect_env()
    json.dumps(found)  # plain values only
    assert found["native"] == _native.build_info()
    assert found["native_error"] is None
    assert found["packages"]["torch"] == found["torch"]["version"]
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["cores"]
    assert found["cpu"]["simd"] in ("portable", "avx2", "avx512", "amx", "neon", "dotprod")
    assert found["memory_bytes"] >= found["memory_available_bytes"] > 0
    assert found["memory_limit_bytes"] is None or found["memory_limit_bytes"] > 0
    assert all(isinstance(problem, str) for problem in env.problems(found))


GIB = 1 << 30


def groups(folder: Path, membership: str, files: dict[str, str]) -> tuple[str, str]:
    """A made-up ``/proc/self/cgroup`` and ``/sys/fs/cgroup``."""
    root = folder / "cgroup"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    (folder / "membership").write_text(membership + "\n")
    return str(folder / "membership"), str(root)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"memory.max": f"{8 * GIB}", "memory.current": f"{3 * GIB}"}, (8 * GIB, 5 * GIB)),
        # The page cache counts as free.
        (
            "0::/",
            {"memory.max": f"{8 * GIB}", "memory.current": f"{3 * GIB}", "memory.stat": f"anon 5\ninactive_file {GIB}"},
            (8 * GIB, 6 * GIB),
        ),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, (None, None)),
        ("0::/", {}, (None, None)),
        ("", {}, (None, None)),
        # The limits of outer groups hold, too. The tightest limit and the least free memory may belong to different groups.
        (
            "0::/batch/job",
            {
                "batch/memory.max": f"{16 * GIB}",
                "batch/memory.current": f"{15 * GIB}",
                "batch/job/memory.max": f"{8 * GIB}",
                "batch/job/memory.current": f"{2 * GIB}",
            },
            (8 * GIB, GIB),
        ),
        # A container sees its own group as the root, whatever it is called outside.
        ("0::/docker/4711", {"memory.max": f"{2 * GIB}", "memory.current": "0"}, (2 * GIB, 2 * GIB)),
        ("0::/../other", {"memory.max": f"{2 * GIB}", "memory.current": "0"}, (2 * GIB, 2 * GIB)),
        (
            "4:memory:/job\n3:cpuset,cpu:/\n0::/",
            {
                "memory/memory.limit_in_bytes": f"{2**63 - 4096}",
                "memory/memory.usage_in_bytes": f"{9 * GIB}",
                "memory/job/memory.limit_in_bytes": f"{4 * GIB}",
                "memory/job/memory.usage_in_bytes": f"{3 * GIB}",
                "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
            },
            (4 * GIB, 2 * GIB),
        ),
        ("4:memory:/", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}", "memory/memory.usage_in_bytes": "5"}, (None, None)),
    ],
)
def test_what_the_container_allows(tmp_path: Path, membership: str, files: dict[str, str], expected: tuple) -> None:
    assert env._group_memory(*groups(tmp_path, membership, files)) == expected


def test_the_memory_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_group_memory", lambda: (None, None))
    total, free = env.host_memory()
    assert total == env.collect_env()["memory_bytes"] >= free > 0
    monkeypatch.setattr(env, "_group_memory", lambda: (GIB // 4, 5))
    assert env.host_memory() == (GIB // 4, 5)
    monkeypatch.setattr(env, "_group_memory", lambda: (total + 1, 6))
    assert env.host_memory() == (total, 6)


def test_environment_with_nothing_installed(copy: Path) -> None:
    code = "import json; from pipespec_kernels import *; e = collect_env(); print(json.dumps([e, problems(e)]))"
    ran = python(code, copy)
    found, said = json.loads(ran.stdout)
    assert found["native"] is None
    assert "is not built" in said[0]
    assert found["packages"]["torch"] is None
    assert found["torch"]["error"].startswith("ModuleNotFoundError")


def healthy() -> dict:
    """An environment without problems on a machine with a GPU."""
    return {
        "version": "1.0",
        "packages": {"torch": "2.13.0", "transformers": "5.23.0", "numpy": "2.4", "safetensors": "0.8", "rich": "15.0"},
        "torch": {"version": "2.13.0", "error": None, "cuda_version": "13.0", "cuda_available": True, "threads": 2},
        "native": {"version": "1.0", "cuda_archs": ["80-real", "90"]},
        "native_error": None,
        "cuda": {
            "file": "_cuda.so",
            "error": None,
            "driver": "NVRM version: 580",
            "devices": [{"name": "H200", "capability": [9, 0]}],
            "device_error": None,
        },
        "cpu": {"usable_cores": 4, "quota_cores": None, "huge_pages": "madvise"},
    }


def test_no_problems() -> None:
    assert env.problems(healthy()) == []


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("native", {"version": "0.9"}, "native module is of version 0.9"),
        ("packages", {"torch": "2.8.1"}, "torch 2.8.1 is too old"),
        ("packages", {"transformers": None}, "transformers is not installed"),
        ("packages", {"transformers": "5.24.0"}, "transformers 5.24.0 is too new"),
        ("torch", {"error": "OSError: libc10"}, "does not import: OSError: libc10"),
        ("torch", {"cuda_version": None}, "this torch is a build for CPUs"),
        ("cuda", {"error": "not built", "file": None, "devices": []}, "built without its CUDA module"),
        ("cuda", {"error": "_cuda does not load: x"}, "_cuda does not load: x"),
        ("cuda", {"devices": [], "device_error": "no usable CUDA device: old"}, "driver may be too old"),
        ("cuda", {"devices": [{"name": "T4", "capability": [7, 5]}]}, "needs 8.0: on this GPU the steps run one by one"),
        ("native", {"cuda_archs": ["100"]}, "PIPESPEC_CUDA_ARCHS=90"),
    ],
)
def test_problem_is_named(part: str, change: dict, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.importlib.metadata, "requires", lambda _: ["torch>=2.9.1", "transformers<5.24,>=5.0"])
    broken = healthy()
    broken[part].update(change)
    assert [sentence in one for one in env.problems(broken)] == [True]


def test_one_core_is_named() -> None:
    broken = healthy()
    broken["cuda"].update(devices=[], driver=None)
    broken["torch"].update(cuda_available=False)
    broken["cpu"]["quota_cores"] = 0.5
    assert "Only one CPU core" in env.problems(broken)[0]


@pytest.mark.parametrize(
    ("modes", "mode", "count"),
    [("always [madvise] never", "madvise", 0), ("always madvise [never]", "never", 1), (None, None, 0)],
)
def test_a_system_without_huge_pages_is_named(
    modes: str | None, mode: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not say so, as where it is not Linux, nothing is said."""
    monkeypatch.setattr(env, "_lines", lambda _: [] if modes is None else [modes])
    found = healthy()
    found["cpu"]["huge_pages"] = env._huge_pages()
    assert found["cpu"]["huge_pages"] == mode
    assert ["transparent_hugepage=madvise" in one for one in env.problems(found)] == [True] * count
