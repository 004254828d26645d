"""Errors of requests, and their form in OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any


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
