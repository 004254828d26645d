"""``python -m pipespec_kernels.triton.aot build [--arch sm_90 ...] [--config FILE ...]`` compiles kernels ahead of time; ``state`` prints what is there."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch

from pipespec_kernels.triton import aot
from pipespec_kernels.triton.aot import build, calls


def _arch(text: str) -> int:
    found = re.fullmatch(r"sm_(\d{2,3})", text)
    if found is None or int(found[1]) < 80:
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture from sm_80 on, as in sm_90")
    return int(found[1])


def _archs() -> list[int]:
    """Of the GPUs of this machine."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return sorted({major * 10 + minor for major, minor in map(torch.cuda.get_device_capability, devices)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipespec_kernels.triton.aot", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile the kernels; needs a C compiler and no GPU")
    building.add_argument("--arch", type=_arch, nargs="+", metavar="sm_90", help="default: those of the GPUs here")
    building.add_argument(
        "--config",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="config.json of each model of the chain, or its folder; default: Llama 3's 1B and 8B",
    )
    building.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the models"
    )
    building.add_argument("--out", type=Path, default=aot.folder(), help="default: %(default)s")
    building.add_argument("--processes", type=int, default=build.usable_cores(), help="default: %(default)s")
    commands.add_parser("state", help="what there is, and whether it fits")
    options = parser.parse_args(arguments)
    if options.command == "state":
        print(f"{aot.folder()}: {aot.state()}")
        return 0
    archs = options.arch or _archs()
    if not archs:
        parser.error("there is no GPU here: name the architecture, as in --arch sm_90")
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    begin = time.monotonic()
    try:
        models = tuple(map(calls.read_config, options.config)) if options.config else calls.DEFAULT
        workload = calls.Workload(models, getattr(torch, options.dtype))
        build.build(workload, sorted(set(archs)), options.out, options.processes)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found, megabytes = aot.state(options.out), build.size(options.out) / 1e6
    print(f"{options.out}: {found}; {megabytes:.1f} MB, {time.monotonic() - begin:.0f} s")
    if options.out.absolute() != aot.folder().absolute():
        print(f"To use it, set {aot.VARIABLE}={options.out.absolute()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
