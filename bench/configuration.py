"""Configuration files of ``bench.run``, in TOML.

The keys of a file are the fields of :class:`pipespec.bench.config.BenchConfig`, and a table ``[[dataset]]`` per dataset. An option of the command line
replaces the field of the same name.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_origin, get_type_hints

import bench.datasets  # noqa: F401  adds the published formats
from pipespec.bench.config import BenchConfig
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
    # One value of a list needs no brackets.
    lists = {name for name, kind in get_type_hints(BenchConfig).items() if get_origin(kind) is tuple}
    data = {name: [v] if name in lists and not isinstance(v, list) else v for name, v in data.items()}
    try:
        config: BenchConfig = build(BenchConfig, data)
        return config
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
