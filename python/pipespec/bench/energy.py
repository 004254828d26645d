"""Energy and utilisation of the devices during a call: NVML for GPUs, RAPL and /proc/stat for the processor. What cannot be read is left out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

_PERIOD_S = 0.05
"""Between two readings of the GPUs' utilisation, which NVML itself averages over a longer time."""


class Nvml:
    """The counters of GPUs, by NVML; a counter that a GPU does not have is None.

    Args:
        uuids: One per GPU, as ``torch.cuda.get_device_properties(i).uuid``.
        library: The bindings; None imports ``pynvml``.

    Raises:
        ImportError: The package of the bindings, which is optional, is not installed.
        OSError: NVML is not there, or has none of these GPUs.
    """

    def __init__(self, uuids: Sequence[str], library: Any = None) -> None:
        if library is None:
            try:
                import pynvml
            except ImportError as error:
                raise ImportError(
                    "the package nvidia-ml-py is not installed: pip install 'pipespec[energy]'"
                ) from error
            library = pynvml
        self._library = library
        try:
            library.nvmlInit()
            names = [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in uuids]
            self._handles = [library.nvmlDeviceGetHandleByUUID(name) for name in names]
        except library.NVMLError as error:
            raise OSError(str(error)) from error

    def joules(self, gpu: int) -> float | None:
        """Energy since the driver was loaded."""
        found = self._read("nvmlDeviceGetTotalEnergyConsumption", gpu)
        return None if found is None else float(found) / 1e3

    def utilization(self, gpu: int) -> float | None:
        """Share of the last sample period in which a kernel ran, between 0 and 1."""
        found = self._read("nvmlDeviceGetUtilizationRates", gpu)
        return None if found is None else float(found.gpu) / 100

    def _read(self, counter: str, gpu: int) -> Any:
        try:
            return getattr(self._library, counter)(self._handles[gpu])
        except self._library.NVMLError:
            return None


class Meter:
    """Reads counters before and after a call: ``start()``, the call, ``stop()``, then :attr:`energy_joules` and :attr:`utilization`.

    Attributes:
        not_readable: By what is missing, the reason.

    Args:
        devices: Of the models, such as ``["cuda:0", "cpu"]``. The processor is always read.
        nvml: The GPUs' counters; None opens NVML where a device is a GPU.
        powercap: Where Linux shows the energy of the processor's packages.
        stat: Where Linux shows the time of the processor.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        nvml: Nvml | None = None,
        powercap: Path = Path("/sys/class/powercap"),
        stat: Path = Path("/proc/stat"),
    ) -> None:
        self.not_readable: dict[str, str] = {}
        self.energy_joules: dict[str, float] | None = None
        self.utilization: dict[str, float] | None = None
        self._gpus = sorted({torch.device(d).index or 0 for d in devices if torch.device(d).type == "cuda"})
        self._nvml, self._stat = nvml, stat
        if self._gpus and nvml is None:
            try:
                self._nvml = Nvml([str(torch.cuda.get_device_properties(i).uuid) for i in self._gpus])
            except (ImportError, OSError, AttributeError) as error:  # AttributeError: a GPU of another vendor
                self._gpus = []
                self.not_readable["energy and utilisation of the GPUs"] = f"NVML: {error}"
        # A package is intel-rapl:N; its parts are intel-rapl:N:M.
        packages = sorted(p for p in powercap.glob("intel-rapl:*") if p.name.count(":") == 1)
        self._packages = [p for p in packages if _readable(p / "energy_uj") is not None]
        if not packages:
            self.not_readable["energy of the processor"] = (
                f"no RAPL counters in {powercap}, as in most virtual machines"
            )
        elif not self._packages:
            self.not_readable["energy of the processor"] = f"the counters in {powercap} are readable for root only"
        if self._busy() is None:
            self.not_readable["utilisation of the processor"] = f"{stat} cannot be read"

    def start(self) -> None:
        """Read the counters."""
        self._seen: dict[int, list[float]] = {i: [] for i in range(len(self._gpus))}
        self._over = threading.Event()
        self._sampler = None
        if self._gpus:
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        self._before = self._joules(), self._busy()

    def _sample(self) -> None:
        assert self._nvml is not None
        while not self._over.wait(_PERIOD_S):
            for i, seen in self._seen.items():
                if (share := self._nvml.utilization(i)) is not None:
                    seen.append(share)

    def stop(self) -> None:
        """Read the counters again."""
        after, busy = self._joules(), self._busy()
        self._over.set()
        if self._sampler is not None:
            self._sampler.join()
        before, was_busy = self._before
        energy = {name: after[name] - joules for name, joules in before.items() if name in after}
        for package in self._packages:
            name = _package_name(package)
            limit = _readable(package / "max_energy_range_uj")
            if energy.get(name, 0.0) < 0 and limit is not None:  # the counter began again
                energy[name] += limit / 1e6
        self.energy_joules = {name: joules for name, joules in energy.items() if joules >= 0} or None
        shares = {f"gpu {self._gpus[i]}": fmean(seen) for i, seen in self._seen.items() if seen}
        if busy is not None and was_busy is not None and busy[1] > was_busy[1]:
            shares["cpu"] = (busy[0] - was_busy[0]) / (busy[1] - was_busy[1])
        self.utilization = shares or None

    def _joules(self) -> dict[str, float]:
        found = {}
        for i, gpu in enumerate(self._gpus):
            if self._nvml is not None and (joules := self._nvml.joules(i)) is not None:
                found[f"gpu {gpu}"] = joules
        for package in self._packages:
            if (microjoules := _readable(package / "energy_uj")) is not None:
                found[_package_name(package)] = microjoules / 1e6
        return found

    def _busy(self) -> tuple[float, float] | None:
        """Busy and all time of all cores, in ticks."""
        try:
            ticks = [int(n) for n in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        total = sum(ticks)
        return total - sum(ticks[3:5]), total  # idle, and waiting for disks


def _package_name(package: Path) -> str:
    return f"cpu package {package.name.rpartition(':')[2]}"


def _readable(file: Path) -> int | None:
    """The number in ``file``; None where it cannot be read, as energy counters by users other than root."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
