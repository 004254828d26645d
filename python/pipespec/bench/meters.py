"""Energy and utilisation of the devices while a text is generated: NVML for GPUs, RAPL and /proc/stat for processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

POWERCAP, STAT = Path("/sys/class/powercap"), Path("/proc/stat")


class Reading(NamedTuple):
    """What the meters counted between start and stop.

    Attributes:
        energy_joules: By device: ``"gpu 0"``, ``"cpu package 0"``, ``"dram 0"``. None: no device has a meter that can be read.
        utilization: By device: ``"gpu 0"``, ``"cpu"`` (all processes, all cores). The busy share, 0 to 1. None as above.
    """

    energy_joules: dict[str, float] | None
    utilization: dict[str, float] | None


class Meters:
    """Meters of this machine. They count what all processes use.

    Args:
        powercap: Folder of the kernel's RAPL counters.
        stat: The kernel's file of processor times.

    Attributes:
        not_readable: Why a figure is missing, by what it is.
    """

    def __init__(self, powercap: Path = POWERCAP, stat: Path = STAT) -> None:
        self.not_readable: dict[str, str] = {}
        self._stat = stat
        self._nvml, self._gpus = self._open_gpus()
        self._packages = self._open_packages(powercap)
        self._begun: Callable[[], Reading] | None = None

    def start(self) -> None:
        """Begin to count."""
        joules, spent, since = self._joules(), self._processor(), self._gpu_samples({})
        newest = {i: max((stamp for stamp, _ in samples), default=0) for i, samples in since.items()}

        def until_now() -> Reading:
            energy = {
                name: self._passed(name, joules[name], now) for name, now in self._joules().items() if name in joules
            }
            busy: dict[str, float] = {}
            if spent is not None and (now := self._processor()) is not None and now[1] > spent[1]:
                busy["cpu"] = (now[0] - spent[0]) / (now[1] - spent[1])
            for i, samples in self._gpu_samples(newest).items():
                if values := [value for stamp, value in samples if stamp > newest.get(i, 0)]:
                    busy[f"gpu {i}"] = sum(values) / len(values) / 100
            return Reading(energy or None, busy or None)

        self._begun = until_now

    def stop(self) -> Reading:
        """What was counted since :meth:`start`. Raises ``RuntimeError`` without a start."""
        if self._begun is None:
            raise RuntimeError("the meters were not started")
        found, self._begun = self._begun(), None
        return found

    # ---- GPUs

    def _open_gpus(self) -> tuple[Any, list[Any]]:
        what = "energy and utilisation of GPUs"
        try:
            import pynvml
        except ImportError:
            self.not_readable[what] = "the package nvidia-ml-py is not installed (pip install 'pipespec[meters]')"
            return None, []
        try:
            pynvml.nvmlInit()
            return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.not_readable[what] = f"NVML: {error}"
            return None, []

    def _gpu_samples(self, since: dict[int, int]) -> dict[int, list[tuple[int, int]]]:
        """By GPU the driver's own samples, which it takes several times per second: time stamp, and utilisation in percent."""
        found = {}
        for i, gpu in enumerate(self._gpus):
            try:
                kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
                _, samples = self._nvml.nvmlDeviceGetSamples(gpu, kind, since.get(i, 0))
                found[i] = [(s.timeStamp, s.sampleValue.uiVal) for s in samples]
            except self._nvml.NVMLError as error:
                self.not_readable[f"utilisation of gpu {i}"] = f"NVML: {error}"
        return found

    # ---- processors

    def _open_packages(self, folder: Path) -> dict[str, tuple[Path, float]]:
        """Counter and its range in joules, by device."""
        found: dict[str, tuple[Path, float]] = {}
        what = "energy of processors"
        zones = sorted(folder.glob("*rapl:*")) if folder.is_dir() else []
        if not zones:
            self.not_readable[what] = f"the kernel has no RAPL counters ({folder}), as in most virtual machines"
        for zone in zones:
            try:
                name = (zone / "name").read_text().strip()
                number = zone.name.split(":")[1]
                device = {"package": f"cpu package {number}", "dram": f"dram {number}"}.get(name.split("-")[0])
                if device is not None and device not in found:
                    int((zone / "energy_uj").read_text())
                    found[device] = (zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()) / 1e6)
            except (OSError, ValueError) as error:
                self.not_readable[what] = (
                    f"{error} (the counters are readable for root only, unless the administrator allows more)"
                )
        return found

    def _joules(self) -> dict[str, float]:
        found = {}
        for device, (file, _) in self._packages.items():
            found[device] = int(file.read_text()) / 1e6
        for i, gpu in enumerate(self._gpus):
            try:
                found[f"gpu {i}"] = self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
            except self._nvml.NVMLError as error:
                self.not_readable[f"energy of gpu {i}"] = f"NVML: {error}"
        return found

    def _passed(self, device: str, before: float, now: float) -> float:
        """Joules between two readings of a counter that starts again from 0 at the end of its range."""
        if now >= before or device not in self._packages:
            return now - before
        return now - before + self._packages[device][1]

    def _processor(self) -> tuple[int, int] | None:
        """Busy and all ticks of all cores."""
        try:
            words = self._stat.read_text().splitlines()[0].split()[1:9]
            ticks = [int(word) for word in words]
        except (OSError, ValueError, IndexError) as error:
            self.not_readable["utilisation of processors"] = str(error)
            return None
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # without idle and iowait
