"""Fields of a request's body: each is read by name, with its type and its range, and an error names it. Errors have the form of OpenAI's or Anthropic's API."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

_SHOWN = 80
"""Characters of a wrong value in a message."""

# Without writing all of a large value.
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN


def wrong(name: str, wanted: str, value: object) -> RequestError:
    """The error for a field of another type than ``wanted``."""
    shown = _repr.repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return RequestError(f"{name} must be {wanted}, not {shown}", name)


class Fields:
    """The fields of one JSON object. A field that is null counts as absent.

    Args:
        values: The object.
        where: Its name in the request, for messages: ``"messages[0]"``; empty for the body itself.

    Raises:
        RequestError: Of each method: the value has another type, or is out of the range.
    """

    def __init__(self, values: object, where: str = "") -> None:
        if not isinstance(values, Mapping):
            error = wrong(where or "the request's body", "a JSON object", values)
            error.param = where or None
            raise error
        self._values, self._where = {name: value for name, value in values.items() if value is not None}, where
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """A field's name in the request."""
        return f"{self._where}.{field}" if self._where else field

    def __contains__(self, field: str) -> bool:
        return field in self._values

    @property
    def unread(self) -> list[str]:
        """Fields that nothing has asked for."""
        return [field for field in self._values if field not in self._read]

    def any(self, field: str) -> Any:
        """A value of any type, or None."""
        self._read.add(field)
        return self._values.get(field)

    def _typed(self, field: str, wanted: str, fits: Callable[[Any], bool], default: _T) -> Any | _T:
        value = self.any(field)
        if value is None:
            return default
        if not fits(value):
            raise wrong(self.name(field), wanted, value)
        return value

    def required(self, field: str, wanted: str) -> Any:
        """A value of any type; it must be there."""
        value = self.any(field)
        if value is None:
            raise RequestError(f"{self.name(field)} is missing: give {wanted}", self.name(field))
        return value

    def text(self, field: str, default: _T) -> str | _T:
        return self._typed(field, "a string", lambda value: isinstance(value, str), default)

    def flag(self, field: str, default: _T) -> bool | _T:
        return self._typed(field, "true or false", lambda value: isinstance(value, bool), default)

    def items(self, field: str) -> list[Any]:
        """A list; empty where there is none."""
        return self._typed(field, "a list", lambda value: isinstance(value, list), [])

    def mapping(self, field: str) -> dict[str, Any]:
        """A JSON object; empty where there is none."""
        return self._typed(field, "a JSON object", lambda value: isinstance(value, dict), {})

    def integer(self, field: str, low: int, high: int | None = None) -> int | None:
        """An integer from ``low`` to ``high``; None where there is none. ``1.0`` is one, too."""
        value = self._typed(field, "an integer", is_number, None)
        if value is None:
            return None
        if value != int(value):
            raise wrong(self.name(field), "an integer", value)
        return int(self._ranged(field, int(value), low, high))

    def number(self, field: str, low: float, high: float | None = None) -> float | None:
        """A finite number from ``low`` to ``high``; None where there is none."""
        value = self._typed(field, "a number", is_number, None)
        return None if value is None else float(self._ranged(field, value, low, high))

    def _ranged(self, field: str, value: Any, low: float, high: float | None) -> Any:
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise RequestError(f"{self.name(field)}={value!r} must be {wanted}", self.name(field))
        return value

    def strings(self, field: str) -> list[str]:
        """A string, or a list of strings, as a list without empty ones; empty where there is none."""
        value = self.any(field)
        if isinstance(value, str):
            value = [value]
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise wrong(self.name(field), "a string or a list of strings", self.any(field))
        return [text for text in value or () if text]

    def objects(self, field: str) -> list[Fields]:
        """A list of JSON objects; empty where there is none."""
        found = self.items(field)
        return [Fields(item, f"{self.name(field)}[{place}]") for place, item in enumerate(found)]

    def object(self, field: str) -> Fields:
        """A JSON object; an empty one where there is none."""
        return Fields(self.mapping(field), self.name(field))

    def as_dict(self) -> dict[str, Any]:
        """All fields that are there, read."""
        self._read.update(self._values)
        return dict(self._values)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def parsed_body(raw: bytes) -> Fields:
    """The fields of a request's body, which is JSON whatever its content type says.

    Raises:
        RequestError: It is no JSON object in UTF-8, or has characters that UTF-8 does not have.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the request's body is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        values = json.loads(text, parse_constant=refuse_constant)
        if ("\\ud" in text or "\\uD" in text) and isinstance(values, dict):
            for name, value in values.items():
                _check_characters(name, value)
    except RecursionError as error:
        raise RequestError("the request's body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the request's body is no JSON: {error}") from error
    return Fields(values)


def _check_characters(name: str, value: Any) -> None:
    """Refuse a field with half of a surrogate pair, which UTF-8 does not have."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="replace").decode()
        raise RequestError(f"{shown} has half of a surrogate pair, which no text has: send whole characters", shown) from error  # fmt: skip


def refuse_constant(text: str) -> Any:
    """For ``json.loads``: NaN and infinity are an error."""
    raise ValueError(f"{text} is no number in JSON")


class RequestError(Exception):
    """A request that is refused.

    Args:
        message: What is wrong, and what to do.
        param: The field of the request that it is about.
        status: Of the HTTP answer.
        code: OpenAI's word for it, by which programs decide what to do.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    @property
    def headers(self) -> dict[str, str]:
        """What else the answer says."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


class Gone(Exception):
    """The client of a request has gone, so its call ends."""


_OPENAI = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {**_OPENAI, 413: "request_too_large", 503: "overloaded_error"}


def openai_form(error: RequestError) -> dict[str, Any]:
    """The body of an error in OpenAI's API."""
    kind = _OPENAI.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def anthropic_form(error: RequestError) -> dict[str, Any]:
    """The body of an error in Anthropic's API."""
    kind = _ANTHROPIC.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
