"""The tiles of matrix products, measured once for each shape on each GPU.

The first call of a product of a shape measures every :class:`Tile` that it may have, and the fastest one is kept in a file of the user's cache, ``$XDG_CACHE_HOME/pipespec`` or
``~/.cache/pipespec``. No result depends on the choice: the tiles of a product have the same order of summation. A file belongs to the name of a GPU, a version of triton and the
sources of the kernels. ``PIPESPEC_TUNE=0`` measures nothing and reads no file, and each product has its first tile.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from pipespec_kernels.env import cache_folder
from pipespec_kernels.triton.philox import INTERPRETED

_MEASURED = os.environ.get("PIPESPEC_TUNE", "")
if _MEASURED not in ("", "0", "1"):
    raise ValueError(f"PIPESPEC_TUNE is {_MEASURED!r}: leave it unset, or use '0' or '1'")

REPEATS = 15
"""Measurements of each tile."""

GAIN = 0.98
"""Share of the first tile's time below which another one takes its place: less is noise."""

_AHEAD = 4_000_000
"""Clock cycles that the device waits before each round of measurements: a few milliseconds, in which the host launches the round."""


class Tile(NamedTuple):
    """Of a block of threads.

    Attributes:
        rows: of weights.
        block: summands of each warp in a step.
        norm: summands of a row of ``x`` that are loaded at once for its norm: at least as many as make all threads lie along the row.
        stages: steps whose weights are loaded at a time.
    """

    rows: int
    block: int
    norm: int
    stages: int


Launch = Callable[[Tile], None]
"""Launches a product with a tile, on memory of its own."""


class Tuner:
    """The tiles of one GPU.

    Args:
        folder: where the file is, which is made with the first measurement.
        facts: what the measurements belong to, part of the file's name and content.
        measure: microseconds of each of several launches; infinity for one that the device has no room for.

    Attributes:
        file: its path.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, str],
        measure: Callable[[Launch, Sequence[Tile]], list[float]],
    ) -> None:
        self._facts, self._measure = dict(facts), measure
        digest = hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()[:16]
        self.file = folder / f"products-{digest}.json"
        self._guard = threading.Lock()
        self._stored, damage = self._read()
        if damage is not None:
            warnings.warn(f"{self.file} holds no tiles ({damage}): products are measured again", stacklevel=2)
        self._tiles: dict[str, Tile] = {}

    def known(self, key: str, choices: Sequence[Tile]) -> Tile | None:
        """The tile of a product that has been measured; None: it has not."""
        found = self._tiles.get(key)
        if found is None:
            stored = self._stored.get(key)
            found = next((tile for tile in choices if stored == _shown(tile)), None)
            if found is not None:
                self._tiles[key] = found
        return found

    def tile(self, key: str, choices: Sequence[Tile], launch: Launch) -> Tile:
        """The tile of a product, by measurement where it is not known.

        Args:
            key: of the product.
            choices: the tiles that it may have, that of an unmeasured product first.
            launch: launches it with one.
        """
        with self._guard:
            found = self.known(key, choices)
            if found is None:
                times = self._measure(launch, choices)
                best = min(range(len(choices)), key=times.__getitem__)
                found = self._tiles[key] = choices[best if times[best] < GAIN * times[0] else 0]
                self._write(key, found)
            return found

    def _read(self) -> tuple[dict[str, Any], Exception | None]:
        """Products and tiles of the file, and why it holds none. A file that is not there holds none."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            if not isinstance(content["tiles"], dict) or content["facts"] != self._facts:
                raise ValueError("it is of another GPU, triton or pipespec")
        except OSError:  # there is none, or none can be read
            return {}, None
        except (ValueError, KeyError, TypeError) as error:
            return {}, error
        return content["tiles"], None

    def _write(self, key: str, tile: Tile) -> None:
        """Add a product to the file, beside those that other processes have added. A reader finds the old or the new file."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._stored = self._read()[0] | {key: _shown(tile)}  # in the place of a damaged file, too
            with tempfile.NamedTemporaryFile(
                "w", dir=self.file.parent, prefix=self.file.name, delete=False, encoding="utf-8"
            ) as new:
                json.dump({"facts": self._facts, "tiles": self._stored}, new, indent=1, sort_keys=True)
            os.replace(new.name, self.file)
        except OSError as error:  # read-only, or full
            warnings.warn(
                f"the tiles of products cannot be kept ({error}): every process measures them again; "
                "PIPESPEC_TUNE=0 measures nothing",
                stacklevel=2,
            )


def _shown(tile: Tile) -> dict[str, int]:
    return tile._asdict()


def chosen(device: torch.device, key: str, choices: Sequence[Tile], launch: Launch) -> Tile:
    """The tile of a product on a device.

    Nothing is measured on a CPU, in a capture, which runs nothing, and with ``PIPESPEC_TUNE=0``.

    Args:
        device: of the launch.
        key: names the product among those of the device.
        choices: the tiles that it may have, that of an unmeasured product first.
        launch: launches it with one.
    """
    if device.type != "cuda" or _MEASURED == "0":
        return choices[0]
    tuner = tuner_on(device)
    found = tuner.known(key, choices)
    if found is not None:
        return found
    if torch.cuda.is_current_stream_capturing():
        return choices[0]
    try:
        return tuner.tile(key, choices, launch)
    except torch.OutOfMemoryError as error:
        warnings.warn(
            f"there is no memory to measure the tiles of a product, which has its first one: {error}", stacklevel=2
        )
        return choices[0]


@functools.cache
def tuner_on(device: torch.device) -> Tuner:
    """The tiles of a GPU."""
    return tuner_of(torch.cuda.get_device_name(device))


@functools.cache
def tuner_of(gpu: str) -> Tuner:
    """The tiles of GPUs of this name."""
    facts = {"gpu": gpu, "triton": triton.__version__, "sources": sources()}
    return Tuner(cache_folder(), facts, measured)


@functools.cache
def sources() -> str:
    """A digest of the sources of the kernels."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for file in (*sorted(here.glob("*.py")), here.parent / "tiles.py"):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def measured(launch: Launch, choices: Sequence[Tile]) -> list[float]:
    """Microseconds of a launch with each tile on the current device: medians, with weights that no cache holds. Tiles take turns."""
    assert not INTERPRETED
    index = torch.cuda.current_device()
    cache = torch.empty(4 * torch.cuda.get_device_properties(index).L2_cache_size, dtype=torch.uint8, device=index)
    times: list[list[float]] = [[] for _ in choices]
    fitting = []
    for i, tile in enumerate(choices):
        try:
            launch(tile)  # compiles
            fitting.append(i)
        except OutOfResources:
            times[i].append(float("inf"))
    for _ in range(REPEATS if fitting else 0):
        pairs = []
        torch.cuda._sleep(_AHEAD)
        for i in fitting:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            begin.record()
            launch(choices[i])
            end.record()
            pairs.append((i, begin, end))
        end.synchronize()
        for i, begin, end in pairs:
            times[i].append(1e3 * begin.elapsed_time(end))
    return [median(found) for found in times]
