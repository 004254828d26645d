"""Records of files that come from elsewhere: JSON lines, JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipespec.process.records import parse_json

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def is_dataset(file: Path) -> bool:
    """Whether the name of a file is that of a dataset, which :func:`records` can read."""
    return Path(file.name.removesuffix(".gz")).suffix.lower() in SUFFIXES


def records(file: Path, table: Callable[[str], Iterable[Any]] | None = None) -> Iterator[Any]:
    """The records of JSON lines, JSON, CSV or Parquet, also compressed (``.gz``), in order. ``table`` reads the text of a CSV; None: its first line names the fields.

    Raises:
        ImportError: The file is Parquet, and pyarrow is not installed.
        ValueError: The file is damaged, or its name says something else.
    """
    try:
        yield from _records(file, table or (lambda text: csv.DictReader(io.StringIO(text))))
    except (ValueError, csv.Error, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _records(file: Path, table: Callable[[str], Iterable[Any]]) -> Iterable[Any]:
    kind = Path(file.name.removesuffix(".gz")).suffix.lower()
    if not is_dataset(file):
        raise ValueError(f"{file}: datasets are {', '.join(SUFFIXES)} files, also with .gz")
    if kind == ".parquet":
        return _parquet(file)
    raw = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else file.read_bytes()
    text = raw.decode("utf-8-sig")
    if kind == ".jsonl":
        return _json_lines(text)
    if kind == ".csv":
        csv.field_size_limit(sys.maxsize)  # articles are longer than the default
        return table(text)
    data = parse_json(text)
    if isinstance(data, dict):  # as dataset servers answer
        entries: Any = data.get("data") or data.get("rows") or [data]
        if not isinstance(entries, list):
            raise ValueError("its data or rows is no list of prompts")
        data = [row["row"] if isinstance(row, dict) and set(row) >= {"row_idx", "row"} else row for row in entries]
    return data if isinstance(data, list) else [data]


def _json_lines(text: str) -> Iterator[Any]:
    # A string may hold further characters that str.splitlines() takes for ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield parse_json(line)
        except ValueError as error:
            at = f", column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
            raise ValueError(f"line {number}{at}") from error


def _parquet(file: Path) -> list[Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"{file} is Parquet, which needs pyarrow: pip install pyarrow, or convert the file to JSON lines"
        ) from error
    try:
        rows: list[Any] = pyarrow.parquet.read_table(file).to_pylist()
    except Exception as error:  # OSError of damaged pages, NotImplementedError of unknown codecs
        raise ValueError(str(error)) from error
    return rows
