"""Configuration files of ``bench.run``, in TOML.

The keys of a file are the fields of :class:`pipespec.bench.config.BenchConfig`, and a table ``[[dataset]]`` per dataset. An option of the command line
replaces the field of the same name.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import bench.datasets  # noqa: F401  adds the published formats
from pipespec.bench.config import BenchConfig, DatasetRequest
from pipespec.bench.datasets import FORMATS
from pipespec.process.records import build


def load_config(file: Path) -> BenchConfig:
    """Read a configuration file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not TOML, or a key or value is unknown.
    """
    if not file.is_file():
        raise FileNotFoundError(f"there is no configuration file {file}")
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers that are too long for Python
        raise ValueError(f"{file} is not TOML: {error}") from error
    try:
        return _config(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def _config(data: dict[str, Any]) -> BenchConfig:
    known = {f.name: f for f in fields(BenchConfig)}
    if unknown := sorted(set(data) - set(known)):
        raise ValueError(f"unknown keys: {', '.join(unknown)}; there are {', '.join(known)}")
    kinds, values = get_type_hints(BenchConfig), dict[str, Any]()
    for name, value in data.items():
        if name == "dataset":
            if not isinstance(value, list):
                raise ValueError("datasets are tables [[dataset]]")
            values[name] = tuple(_dataset(d) for d in value)
        else:
            single = get_origin(kinds[name]) is tuple and not isinstance(value, list)
            values[name] = build(kinds[name], [value] if single else value, name)
    return BenchConfig(**values)


def _dataset(data: Any) -> DatasetRequest:
    if not isinstance(data, dict):
        raise ValueError("datasets are tables [[dataset]]")
    known = {f.name for f in fields(DatasetRequest)}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"unknown keys of a dataset: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if "name" not in data:
        raise ValueError("a dataset needs a name")
    if "format" in data and data["format"] not in list(FORMATS):
        raise ValueError(f"no format {data['format']!r} of prompts: there are {', '.join(FORMATS)}")
    kinds = {"name": str, "format": str, "file": str, "prompt_tokens": int}
    values = {name: build(kinds[name], value, f"{name} of a dataset") for name, value in data.items()}
    return DatasetRequest(**values | ({"file": Path(data["file"])} if "file" in data else {}))
