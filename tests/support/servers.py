"""A server in a thread, and what tests ask it by hand."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple

import uvicorn

from pipespec.api.server import make_app
from tests.waiting import SECONDS, until

NAME = "demo"


class Answered(NamedTuple):
    """An answer: its status, its headers in lower case, and its body."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return self.json["error"]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of a stream, but for the one that ends it in OpenAI's API."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


class Served(NamedTuple):
    """A server that runs."""

    port: int
    service: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> Answered:
        """Send one request. ``body``: bytes as they are, else JSON; None: a GET."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            method = method or ("GET" if raw is None else "POST")
            connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answered(answer.status, found, answer.read().decode())
        finally:
            connection.close()

    def chat(self, **fields: Any) -> Answered:
        messages = [{"role": "user", "content": "the mean of values"}]
        given = {"messages": messages, "max_tokens": 6, "temperature": 0} | fields
        return self.ask("/v1/chat/completions", {name: value for name, value in given.items() if value is not ABSENT})

    def complete(self, **fields: Any) -> Answered:
        given = {"prompt": "def mean(values):", "max_tokens": 6, "temperature": 0} | fields
        return self.ask("/v1/completions", {name: value for name, value in given.items() if value is not ABSENT})

    def begin(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """Send a request, and return its connection before the answer."""
        raw = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return connection

    def metrics(self) -> dict[str, float]:
        """The figures without the label that all have in common."""
        text = self.ask("/metrics").text
        found = re.findall(
            r"^(vllm:\w+)\{(?:(\w+=\"\w+\"),)?model_name=\"demo\"(?:,(\w+=\"\w+\"))?\} (\S+)$", text, re.M
        )
        return {" ".join(filter(None, row[:3])): float(row[3]) for row in found}


ABSENT = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""Stands for a field that a request does not have."""


@contextmanager
def serving(pipe: Any, tokenizer: Any, **options: Any) -> Iterator[Served]:
    """A server in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = make_app(pipe, tokenizer, NAME, **options)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started, "the server has started")
            yield Served(listener.getsockname()[1], app.state.service)
        finally:
            server.should_exit = True
            thread.join()


class Scripted:
    """A pipeline whose calls return given texts, whatever the model would write.

    Args:
        texts: One per call.
    """

    def __init__(self, pipe: Any, tokenizer: Any, texts: list[str]) -> None:
        self.target, self._tokenizer, self._texts = pipe.target, tokenizer, list(texts)

    def generate(self, ids: Any, *, max_new_tokens: int, streamer: Any, **options: Any) -> Any:
        import torch

        from pipespec.models.properties import end_tokens

        given = self._tokenizer(self._texts.pop(0), add_special_tokens=False).input_ids
        new = [*given, end_tokens(self.target)[0]][:max_new_tokens]
        streamer.put(ids)
        for token in new:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return torch.cat([ids, torch.tensor([new])], 1)
