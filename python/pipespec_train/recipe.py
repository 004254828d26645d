"""Recipes: the options of a training run as a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recipes")
"""Recipes of the package, by name."""


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(given: str | Path) -> dict[str, Any]:
    """Options of ``pipespec spd train`` by name, without the dashes, from a recipe by path, or one of the package by name.

    Raises:
        FileNotFoundError: There is no such file and no such name.
        ValueError: The file is not TOML, or is no table ``[options]``.
    """
    file = Path(given)
    if not file.is_file():
        file = FOLDER / f"{given}.toml"
        if str(given) not in names():
            raise FileNotFoundError(f"no recipe {given}: neither a file nor one of {', '.join(names())}")
    try:
        record = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also numbers that are too long for Python
        raise ValueError(f"{file} is not TOML: {error}") from error
    if set(record) != {"options"} or not isinstance(record["options"], dict):
        raise ValueError(f"{file}: a recipe is one table [options], not {', '.join(record) or 'empty'}")
    return record["options"]


def arguments(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
