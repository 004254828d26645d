"""The output of a part of ``bench.gpu_check``: named figures, section by section, so that a failed section affects only itself.

The file has ``figures`` (name to number, see ``bench/predictions``), ``details``, ``errors`` by section, and ``left_out`` with reasons. It is written after each section.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import replace

FAULT = "PIPESPEC_BENCH_FAULT"
"""Environment variable: ``hang`` or ``crash`` happens behind the first section. For tests of the check."""


class Figures:
    """The results of one part.

    Args:
        path: The file; None: none.
        seconds: No section begins after them.
    """

    def __init__(self, path: Path | None, seconds: float = float("inf")) -> None:
        self.path, self.seconds, self._begin = path, seconds, time.monotonic()
        self.record: dict[str, Any] = {
            "figures": {},
            "details": {},
            "errors": {},
            "left_out": {},
            "section_seconds": {},
        }

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.seconds - (time.monotonic() - self._begin)

    def add(self, name: str, value: float) -> None:
        """Note a figure and print it."""
        self.record["figures"][name] = value
        print(f"{name:44}{value:12.3f}", flush=True)

    def detail(self, name: str, value: Any) -> None:
        """Note something for JSON that is no single number."""
        self.record["details"][name] = value

    def leave_out(self, name: str, why: str) -> None:
        """Note why something was not measured."""
        self.record["left_out"][name] = why
        print(f"{name}: left out: {why}", flush=True)

    def fail(self, name: str, error: BaseException) -> None:
        """Note an error."""
        text = (str(error).strip() or "no reason given").splitlines()[0]
        self.record["errors"][name] = f"{type(error).__name__}: {text}"
        traceback.print_exception(error)
        print(f"{name}: FAILED: {self.record['errors'][name]}", flush=True)

    def section(self, name: str, measure: Callable[[Figures], None]) -> None:
        """Run one section; its error is noted, and the file is written."""
        if self.left <= 0:
            self.leave_out(name, "the time was over")
            self.write()
            return
        begin = time.monotonic()
        print(f"-- {name}", flush=True)
        try:
            measure(self)
        except KeyboardInterrupt:
            self.leave_out(name, "interrupted")
            self.write()
            raise
        except Exception as error:
            self.fail(name, error)
        self.record["section_seconds"][name] = round(time.monotonic() - begin, 2)
        self.write()
        _fault()

    def write(self) -> None:
        if self.path is not None:
            replace(self.path, json.dumps(self.record, indent=1) + "\n")

    def finish(self) -> int:
        """Write the file; returns the exit status."""
        self.write()
        return 1 if self.record["errors"] else 0


def _fault() -> None:
    """Cause the fault that :data:`FAULT` names."""
    fault = os.environ.get(FAULT)
    if fault == "hang":
        # Like a driver that never returns: Ctrl-C has no effect.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        print("hanging, as asked", flush=True)
        time.sleep(3600)
    if fault == "crash":
        print("crashing, as asked", flush=True)
        sys.stdout.flush()
        ctypes.string_at(0)


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that the parts share."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--json", type=Path, help="write the figures here, after each section")
    found.add_argument("--seconds", type=float, default=float("inf"), help="no section begins after them")
    found.add_argument("--dry", action="store_true", help="on the CPU with small sizes: the figures mean nothing")
    return found
