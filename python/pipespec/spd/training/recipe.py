"""Recipes: a training run as a TOML file, with what a prediction of its cost needs where model and data are not there."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("recipes")
"""Recipes of the package, by name."""


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    Attributes:
        name: File name without its end.
        options: Options of ``pipespec spd train`` by name, without the dashes.
        target: Entries of the target's config (``model_type``, ``hidden_size``, ...); empty where the target itself has to be there.
        examples: Number of training examples; None: the data say it.
        mean_tokens: Mean tokens of an example.
    """

    name: str
    options: dict[str, Any]
    target: dict[str, Any]
    examples: int | None = None
    mean_tokens: float | None = None

    def arguments(self) -> list[str]:
        """The options as a command line."""
        words: list[str] = []
        for name, value in self.options.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not False:
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return words


def names() -> list[str]:
    """Names of the package's recipes."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(given: str | Path) -> Recipe:
    """Load a recipe by path, or one of the package by name.

    Raises:
        FileNotFoundError: There is no such file and no such name.
        ValueError: The file is not TOML, or has a table or an entry that no recipe has.
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
    if wrong := sorted(name for name, table in record.items() if not isinstance(table, dict)):
        raise ValueError(f"{file}: {', '.join(wrong)} is no table; a recipe has [options], [target] and [data]")
    data = record.get("data", {})
    unknown = sorted({*record} - {"options", "target", "data"}) + sorted({*data} - {"examples", "mean_tokens"})
    if unknown:
        raise ValueError(
            f"{file}: {', '.join(unknown)} unknown; a recipe has [options], [target] and [data] (examples, mean_tokens)"
        )
    for name, kinds in (("examples", int), ("mean_tokens", (int, float))):
        value = data.get(name, 1)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{file}: {name} of [data] must be a positive number, not {value!r}")
    return Recipe(
        file.stem,
        dict(record.get("options", {})),
        dict(record.get("target", {})),
        data.get("examples"),
        data.get("mean_tokens"),
    )
