"""Helpers of all benchmarks: results files, tables in documents, and how times and bandwidths are taken."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import last_level_cache_bytes
from pipespec.process.files import replace


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


def table(columns: Mapping[str, str | Callable[[Any], str]], records: Iterable[Any]) -> str:
    """A Markdown table of records. ``columns``: by heading the cell, a format of the record's fields or a function of the record."""
    rows = ([of.format_map(r) if isinstance(of, str) else of(r) for of in columns.values()] for r in records)
    return markdown_table(list(columns), rows)


# ---- times

COPIED_BYTES = 1 << 30
"""Of a copy that measures a GPU's bandwidth. It exceeds every cache."""


def seconds(call: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of one call by the host's clock."""
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def repeated(
    call: Callable[[], object], repeats: int, device: torch.device | str = "cpu", warm_up: int = 1
) -> list[float]:
    """Return the seconds of each of ``repeats`` calls. On a GPU they count between events on the current stream.

    Args:
        call: What is timed.
        repeats: Calls that count.
        device: Where the work of a call runs.
        warm_up: Calls before them that do not count.
    """
    device = torch.device(device)
    for _ in range(warm_up):
        call()
    if device.type != "cuda":
        return [seconds(call) for _ in range(repeats)]
    times = []
    with torch.cuda.device(device):
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return times


def copy_bytes_per_second(device: torch.device | str = "cuda", nbytes: int = COPIED_BYTES, repeats: int = 20) -> float:
    """Rate of a plain copy on ``device``, read and written bytes counted: the median of ``repeats``."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / statistics.median(repeated(lambda: target.copy_(source), repeats, device, warm_up=2))


def read_bytes_per_second(threads: int) -> float:
    """Rate of a plain read of uncached memory on the CPU: the median of nine."""
    size, before = max(256 << 20, 4 * last_level_cache_bytes()), torch.get_num_threads()
    buffer = torch.ones(size // 4)
    torch.set_num_threads(threads)
    try:
        return size / statistics.median(repeated(buffer.sum, 9))
    finally:
        torch.set_num_threads(before)


def refuse_without_gpu(program: str) -> None:
    """End the program with status 2 and a message where torch sees no GPU."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"{program}: no GPU is visible to torch {torch.__version__} ({built}); nothing was run.", file=sys.stderr)
        sys.exit(2)
