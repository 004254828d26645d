"""What is installed, what was built, what this machine has, and what is wrong with it: for ``pipespec doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "rich")


def collect_env() -> dict[str, Any]:
    """Facts about this installation and machine, as plain values that go into JSON. Never raises.

    Imports torch, if there is one (seconds when it is not imported yet).
    """
    import pipespec_kernels

    native, native_error = _import("_native")
    return {
        "version": pipespec_kernels.__version__,
        "location": str(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "torch": _torch(),
        "native": native.build_info() if native else None,
        "native_error": native_error,
        "cuda": _cuda(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),  # as taskset, a batch system or a container allows
            "quota_cores": _cpu_quota(),
            "simd": native.simd() if native else None,
            "huge_pages": _huge_pages(),
        },
        "memory_bytes": _memory("MemTotal"),
        "memory_available_bytes": _memory("MemAvailable"),
        "memory_limit_bytes": _group_memory()[0],
    }


def cache_folder() -> Path:
    """The user's folder of files that can be made again: ``$XDG_CACHE_HOME/pipespec`` or ``~/.cache/pipespec``. It may not exist yet, or be no folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pipespec"


MIN_CAPABILITY = 80
"""Ten times the compute capability that the CUDA module needs: its sums over a warp, and products of bfloat16."""


def host_memory() -> tuple[int, int]:
    """Return the memory limit of this process and the free part of it, in bytes.

    The limit is the machine's memory, or that of a control group (v1 or v2: a container, a batch system) if it is lower. Both are 0 where
    ``/proc/meminfo`` cannot be read.
    """
    lines = (line.split() for line in _lines("/proc/meminfo"))
    machine = {words[0]: int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
    total, free = machine.get("MemTotal:", 0), machine.get("MemAvailable:", 0)
    limit, left = _group_memory()
    return (total, free) if limit is None or left is None else (min(total, limit), min(free, left))


def _huge_pages() -> str | None:
    """When memory lies on huge pages: "always", "madvise" or "never"; None: the system does not say so."""
    modes = " ".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled"))
    return modes.partition("[")[2].partition("]")[0] or None


def misfits(env: dict[str, Any]) -> list[str]:
    """Which packages are missing, too old or too new, and what to do."""
    found = []
    for name, bounds in _bounds().items():
        have, wanted, excluded = env["packages"].get(name), bounds.get(">=", "0"), bounds.get("<")
        if have is None:
            found.append(f"{name} is not installed: pip install '{name}>={wanted}'.")
        elif _numbers(have) < _numbers(wanted):
            found.append(f"{name} {have} is too old: pip install --upgrade '{name}>={wanted}'.")
        elif excluded and _numbers(have) >= _numbers(excluded):
            found.append(f"{name} {have} is too new, models may be refused: pip install '{name}<{excluded}'.")
    return found


def problems(env: dict[str, Any]) -> list[str]:
    """What is wrong in an environment from :func:`collect_env` and what to do, worst first; empty if all is well."""
    found = []
    if env["native_error"]:
        found.append(env["native_error"])
    elif env["native"]["version"] != env["version"]:
        found.append(
            f"The native module is of version {env['native']['version']}, the Python code of {env['version']}: "
            f"build again (pip install -e . or make native in the source tree)."
        )
    found += misfits(env)
    if env["torch"]["error"] and env["packages"]["torch"]:
        found.append(f"torch is installed but does not import: {env['torch']['error']}. Install it again.")

    cuda = env["cuda"]
    has_gpu = bool(cuda["devices"]) or env["torch"]["cuda_available"]
    if cuda["error"] and cuda["file"]:
        found.append(cuda["error"])
    elif cuda["error"] and has_gpu:
        found.append(
            "There is a GPU, but pipespec was built without its CUDA module: "
            "install the CUDA toolkit (nvcc) and install pipespec again with PIPESPEC_CUDA=on. Until then the host takes part in each captured step."
        )
    if cuda["driver"] and not cuda["error"] and cuda["device_error"]:
        found.append(f"An NVIDIA driver is loaded, but {cuda['device_error']}: the driver may be too old for CUDA 13.")
    if cuda["devices"] and env["torch"]["version"] and not env["torch"]["cuda_version"]:
        found.append("There is a GPU, but this torch is a build for CPUs: install a torch that was built with CUDA.")
    built = [int(arch.split("-")[0]) for arch in (env["native"] or {}).get("cuda_archs", [])]
    for device in cuda["devices"]:
        capability = device["capability"][0] * 10 + device["capability"][1]
        if capability < MIN_CAPABILITY:
            found.append(
                f"{device['name']} has compute capability {capability / 10}, and the CUDA module needs {MIN_CAPABILITY / 10}: "
                f"on this GPU the steps run one by one, without graphs."
            )
        elif built and capability < min(built):
            found.append(
                f"{device['name']} has compute capability {capability / 10}, older than what the CUDA module was built "
                f"for: install pipespec again with PIPESPEC_CUDA_ARCHS={capability}."
            )

    cores = min(env["cpu"]["usable_cores"], env["cpu"]["quota_cores"] or env["cpu"]["usable_cores"])
    if cores < 2 and not has_gpu:
        found.append(
            "Only one CPU core may be used: nothing runs at the same time as the target, so expect no gain on this CPU."
        )
    if env["cpu"]["huge_pages"] == "never":
        found.append(
            "This system gives no huge pages, so decoding on this CPU reaches about 0.82 of its speed: allow them "
            "(echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled), or set transparent_hugepage=madvise at boot."
        )
    return found


def _import(name: str) -> tuple[Any, str | None]:
    import pipespec_kernels

    try:
        return getattr(pipespec_kernels, name), None
    except ImportError as error:
        return None, str(error)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bounds() -> dict[str, dict[str, str]]:
    """``{"torch": {">=": "2.9"}}`` and so on, from the package's metadata, so that pyproject.toml is the only source."""
    try:
        requirements = importlib.metadata.requires("pipespec") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = [requirement for requirement in requirements if ";" not in requirement]
    return {re.split("[^a-z0-9_.-]", one)[0]: dict(re.findall(r"(>=|<)\s*([\d.]+)", one)) for one in plain}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _torch() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "version": None,
        "error": None,
        "cuda_version": None,
        "cuda_available": False,
        "threads": None,
    }
    try:
        torch = importlib.import_module("torch")
        facts.update(
            version=torch.__version__,
            cuda_version=torch.version.cuda,
            cuda_available=torch.cuda.is_available(),
            threads=torch.get_num_threads(),
        )
    except Exception as error:  # a broken torch raises errors of many types; none may stop the report
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def _cuda() -> dict[str, Any]:
    module, error = _import("_cuda")
    files = sorted(path.name for path in Path(__file__).parent.glob("_cuda.*so"))
    facts: dict[str, Any] = {
        "file": files[0] if files else None,
        "error": error,
        "runtime": None,
        "driver": _first_line("/proc/driver/nvidia/version"),
        "driver_supports": None,
        "devices": [],
        "device_error": None,
    }
    if module:
        try:
            facts["runtime"] = module.runtime_version()
            facts["driver_supports"] = module.driver_version()
            facts["devices"] = [{**device, "capability": list(device["capability"])} for device in module.devices()]
        except RuntimeError as refusal:
            facts["device_error"] = str(refusal)
    return facts


def _first_line(path: str) -> str | None:
    return next(iter(_lines(path)), None)


def _lines(path: str) -> list[str]:
    """Of a file; none where it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except (FileNotFoundError, PermissionError):  # not OSError: a signal handler's TimeoutError is one
        return []


def _field(path: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except (FileNotFoundError, PermissionError):  # not OSError: a signal handler's TimeoutError is one
        return None
    return match[1].strip() if match else None


def _cpu_model() -> str:
    return _field("/proc/cpuinfo", r"^model name\s*:(.*)$") or platform.processor() or platform.machine()


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container allows (cgroup v2), None without a limit."""
    quota = _field("/sys/fs/cgroup/cpu.max", r"^(\d+ \d+)$")
    if quota is None:
        return None
    allowed, period = map(int, quota.split())
    return allowed / period


def _group_memory(
    membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup"
) -> tuple[int, int] | tuple[None, None]:
    """The tightest limit of this process's control groups in bytes, and the free part of it; None without a limit.

    Memory that the system can reclaim at once (the page cache) counts as free.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except (FileNotFoundError, PermissionError):  # not OSError: a signal handler's TimeoutError is one
        return None, None
    groups = {
        controllers: name for _, controllers, name in (line.split(":", 2) for line in lines if line.count(":") >= 2)
    }
    v1 = next((name for controllers, name in groups.items() if "memory" in controllers.split(",")), None)
    if v1 is not None:
        base, name = Path(root, "memory"), v1
        limit_file, usage_file, reclaimable = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    elif "" in groups:
        base, name = Path(root), groups[""]
        limit_file, usage_file, reclaimable = "memory.max", "memory.current", "inactive_file"
    else:
        return None, None
    found: list[tuple[int, int]] = []
    own = base.joinpath(*(part for part in name.split("/") if part not in ("", "..")))
    # The limits of the outer groups hold, too. In a container the outermost visible group is its own, under any name.
    for group in (own, *own.parents):
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            kept = _field(str(group / "memory.stat"), rf"^{reclaimable} (\d+)$")
            found.append((limit, max(0, limit - usage + int(kept or 0))))
        if group == base:
            break
    if not found:
        return None, None
    return min(limit for limit, _ in found), min(left for _, left in found)


_NO_LIMIT = 1 << 60
"""What version 1 writes for "no limit" is a number near 2^63."""


def _number(file: Path) -> int | None:
    text = _first_line(str(file))
    return int(text) if text is not None and text.isdigit() else None


def _memory(name: str) -> int | None:
    kilobytes = _field("/proc/meminfo", rf"^{name}:\s*(\d+) kB$")
    return int(kilobytes) * 1024 if kilobytes else None
