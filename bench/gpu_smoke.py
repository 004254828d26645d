"""The first minute on a GPU: ``python -m bench.gpu_smoke --json FILE``

One check for each thing that no test without a GPU can show: that the CUDA module loads and finds the device, that its runtime launches a graph that torch
has captured, and that the captured schedules give the text of ``generate()`` in the fused form. The file has the result of each check as soon as it ends.
Exit status 1: a check failed. ``--dry-run`` runs the schedules on a CPU, uncaptured.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from bench.harness import save
from pipespec import Pipeline
from pipespec.demo import family_path
from pipespec.schedules import factory
from pipespec.schedules.base import SpeedWarning

PROMPT = torch.arange(5, 29)[None]
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {"schedule": "plain", "graphs": True},
    "rounds": {"schedule": "lockstep", "graphs": True, "lookahead": 4},
    "streams": {"schedule": "streams", "lookahead": 4},
}


class Smoke:
    """The models of the checks, in float32 on ``device``, and the text that all of them must give."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.small, self.target = (
            AutoModelForCausalLM.from_pretrained(family_path(name), dtype=torch.float32).eval()
            for name in ("small", "target")
        )
        self.text = self.target.generate(PROMPT, **self.options)

    options: ClassVar[dict[str, Any]] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}

    def module(self) -> dict[str, Any]:
        """The CUDA module loads, and its own runtime sees the device."""
        from pipespec_kernels import _cuda

        found = {"runtime": _cuda.runtime_version(), "driver": _cuda.driver_version(), "devices": _cuda.devices()}
        assert found["devices"], "the module's runtime sees no device"
        return found

    def run(self, name: str) -> dict[str, Any]:
        """A schedule gives the text of ``generate()`` on the CPU, as asked for, in the fused form."""
        small, target = self.small.to(self.device), self.target.to(self.device)
        drafts = [] if name == "plain" else [small]
        with warnings.catch_warnings():
            warnings.simplefilter("error", SpeedWarning)
            with Pipeline(target, drafts, **SCHEDULES[name]) as pipe:
                text = pipe.generate(PROMPT.to(self.device), **self.options).cpu()
        report = pipe.report
        assert report is not None
        found = {"schedule": report.schedule, "forward": [stage.forward for stage in report.stages]}
        assert torch.equal(text, self.text), f"another text than generate()'s: {text.tolist()}, {self.text.tolist()}"
        assert report.schedule == SCHEDULES[name]["schedule"], found
        assert set(found["forward"]) == {"fused"}, found
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="write the results here")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU")
    options = parser.parse_args()
    checks: dict[str, Callable[[], dict[str, Any]]] = {}
    smoke = Smoke("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        factory._runs_uncaptured = True
    else:
        checks["CUDA module"] = smoke.module
    checks |= {name: lambda name=name: smoke.run(name) for name in SCHEDULES}  # type: ignore[misc]
    results: dict[str, Any] = {}
    for name, check in checks.items():
        began = time.perf_counter()
        try:
            results[name] = {"passed": True, **check()}
        except Exception as error:
            traceback.print_exc()
            results[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.perf_counter() - began, 1)
        save(options.json, {"checks": results})
        print(f"{name}: {results[name]}", flush=True)
    return 0 if all(found["passed"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
