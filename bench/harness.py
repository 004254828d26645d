"""Helpers of all benchmarks: cases, results files and tables in documents. Times and the machine: ``pipespec.bench``."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipespec.process.files import replace

Call = Callable[[int], object]  # with the number of the copy of the inputs to work on
Shape = tuple[int, int, int]  # rows, columns, and what they are of: logits or tokens


@dataclass
class KernelCase:
    """One shape of a kernel's benchmark: our call, the bytes that it moves, and other implementations of the operation."""

    bytes_moved: int
    ours: Call
    rivals: dict[str, Call] = field(default_factory=dict)


Maker = Callable[[Shape, torch.dtype, int], KernelCase]  # of a shape, a dtype and a number of copies


BATCHES, WIDTHS, VOCABS = (1, 4, 16, 64), (1, 5, 9, 17), (32000, 128256, 151936)
QUICK = [(1, 1, 128256), (1, 5, 128256), (4, 5, 128256), (8, 5, 128256), (16, 5, 128256), (64, 5, 32000)]


def logits_shapes(device: str, quick: bool) -> list[Shape]:
    return QUICK if quick else list(itertools.product(BATCHES, WIDTHS, VOCABS))


def logits_dtypes(device: str, quick: bool) -> list[torch.dtype]:
    # On the CPU one dtype, since the others differ only by their bytes.
    return [torch.bfloat16] if quick or device == "cpu" else [torch.bfloat16, torch.float32]


def logits_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


@dataclass(frozen=True)
class Benchmark:
    """An operation.

    Attributes:
        name: In the results.
        make: Of a device, ``quick``, a shape, a dtype and a number of copies: a case.
        axes: Headings of a shape.
        shapes: Of a device and ``quick``: the shapes to measure.
        dtypes: Of a device and ``quick``: the dtypes to measure.
        input_bytes: Bytes of one copy of the inputs that a call touches.
    """

    name: str
    make: Callable[[str, bool, Shape, torch.dtype, int], KernelCase]
    axes: tuple[str, str, str] = ("B", "Q", "V")
    shapes: Callable[[str, bool], list[Shape]] = logits_shapes
    dtypes: Callable[[str, bool], list[torch.dtype]] = logits_dtypes
    input_bytes: Callable[[Shape, torch.dtype], int] = logits_bytes


def rivals(
    device: str, quick: bool, eager: Callable[..., object], arguments: Callable[[int], tuple[Any, ...]]
) -> dict[str, Call]:
    """Eager torch, and its compiled form where that is measured, on the arguments of a copy."""
    found = {"eager": eager}
    if device == "cuda" and not quick:
        from bench.gpu import compiled

        found["compile"] = compiled(eager)
    return {name: lambda i, rival=rival: rival(*arguments(i)) for name, rival in found.items()}  # type: ignore[misc]


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal random numbers. On the CPU a tile of some millions repeats, since drawing all would take longer than measuring."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if device != "cpu":
        return out.normal_()
    tile = torch.randn(min(out.numel(), (1 << 22) + 1)).to(dtype)
    for piece in out.view(-1).split(tile.numel()):
        piece.copy_(tile[: piece.numel()])
    return out


def save(path: Path | None, record: dict[str, Any]) -> None:
    """Write a record as JSON, if a file is named. The machine in it gets the load at this time, as ``load_average_after``."""
    if path:
        if "machine" in record:
            record["machine"]["load_average_after"] = os.getloadavg()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps(record, indent=1) + "\n")


def choose_sizes(options: argparse.Namespace, **sizes: tuple[int, int]) -> None:
    """Set the options that were not given: to the first size, or with ``--quick`` to the second."""
    for name, both in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, both[options.quick])


def replace_table(document: Path, table: str, name: str = "table") -> None:
    """Put ``table`` between the comments ``<!-- name:begin -->`` and ``<!-- name:end -->`` of a document.

    Raises:
        ValueError: The document does not have both comments once.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = document.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{document} must have {begin} and {end} once each")
    before, rest = text.split(begin)
    replace(document, f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    lines.insert(1, "|---" + "|---:" * (len(header) - 1) + "|")
    return "\n".join(lines)
