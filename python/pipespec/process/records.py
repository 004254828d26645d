"""Parse untrusted JSON and TOML into dataclasses whose fields are checked against their types."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: It is none, or it is too deep or has a number too long for Python.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its lists and objects are too deep") from error


def build(kind: Any, data: Any, where: str = "it") -> Any:
    """Build ``data``, as JSON and TOML have it, as ``kind``: a dataclass, a plain type, a list, tuple or dict of them, or one of these or None.

    ``where`` names the value in messages.

    Raises:
        TypeError: A value has another type, or an object lacks a field.
        ValueError: A number is not finite or beyond 64 bits, an object has an unknown field, or its class refuses a value.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return build(inner, data, where)
    if kind is Any:
        return data
    wanted: Any = (
        (list, tuple) if origin in (list, tuple) else dict if origin is dict or dataclasses.is_dataclass(kind) else kind
    )
    wanted = (int, float) if kind is float else wanted
    if not isinstance(data, wanted) or (isinstance(data, bool) and kind is not bool):
        raise TypeError(
            f"{where} must be of type {getattr(kind, '__name__', kind) if origin is None else kind}, not {data!r:.80}"
        )
    if dataclasses.is_dataclass(kind):
        types_of_fields = typing.get_type_hints(kind)
        if unknown := sorted(set(map(str, data)) - {f.name for f in dataclasses.fields(kind)}):
            raise ValueError(f"{where} has unknown fields: {', '.join(unknown)}")
        needed = (f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING)
        if missing := [name for name in needed if name not in data]:
            raise TypeError(f"{where} lacks the fields {', '.join(missing)}")
        values = {name: build(types_of_fields[name], value, name) for name, value in data.items()}
        return typing.cast(Any, kind)(**values)
    if origin is list:
        return [build(arguments[0], item, where) for item in data]
    if origin is tuple:
        if arguments[-1] is not Ellipsis and len(data) != len(arguments):
            raise ValueError(f"{where} must have {len(arguments)} entries, not {len(data)}")
        inner_types = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(build(t, item, where) for t, item in zip(inner_types, data, strict=True))
    if origin is dict:
        return {key: build(arguments[1], item, f"{where}[{key!r:.40}]") for key, item in data.items()}
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"{where} must be finite, not {data}")
    if isinstance(data, int) and not -(2**63) <= data < 2**63:
        raise ValueError(f"{where} is beyond 64 bits")
    return data
