"""The application: routes, keys and limits of a server over one pipeline."""

from __future__ import annotations

import asyncio
import ctypes
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pipespec.api.server import messages
from pipespec.api.server.completions import ChatExchange, CompletionExchange, line
from pipespec.api.server.conversations import Exchange, Model, now
from pipespec.api.server.fields import Fields, Gone, RequestError, anthropic_form, openai_form, parsed_body
from pipespec.api.server.generation import Generation, collected
from pipespec.api.server.grammars import Grammars
from pipespec.api.server.jobs import Job, Jobs
from pipespec.api.server.metrics import ServerMetrics
from pipespec.api.server.prompts import Prompts, messages_of, tools_of
from pipespec.api.server.responses import ResponseExchange
from pipespec.models.properties import embedding_size, end_tokens
from pipespec.process.progress import say
from pipespec.process.threads import Lock
from pipespec_kernels import __version__

Handler = Callable[[Request], Awaitable[Response]]
_T = TypeVar("_T")

_EXCHANGES: dict[str, Callable[[Model, Fields], Exchange]] = {
    "/v1/chat/completions": ChatExchange,
    "/v1/completions": CompletionExchange,
    "/v1/responses": ResponseExchange,
    "/v1/messages": messages.MessageExchange,
}
_ABSENT = {
    "/v1/embeddings": "embeddings: this server's model generates text; serve a model for embeddings with another program",
    "/v1/rerank": "rerank: this server's model generates text; serve a model for ranking with another program",
}
_HEALTH = ("/health", "/v1/health", "/ping")
_CLIENT_GONE = 499

_BODY_S = 60
"""Seconds in which a request's body must come."""

_LARGE = 1 << 18
"""Bytes of a body after which freed memory goes back to the system."""

_BODIES = 256 << 20
"""Bytes of all bodies that are incomplete."""


class Service:
    """A server's state.

    Args:
        pipe: Runs the calls.
        names: Of the model in requests; answers have the first one.
        parallel: Requests that run at the same time.
        queue: Further ones that may wait.
        keys: Any of them opens the server; without one it is open.
    """

    def __init__(
        self, pipe: Any, tokenizer: Any, names: tuple[str, ...], *, parallel: int, queue: int, keys: tuple[str, ...]
    ) -> None:
        limit = getattr(pipe.target.config.get_text_config(), "max_position_embeddings", None)
        prompts = Prompts(tokenizer, limit, embedding_size(pipe.target))
        grammars = Grammars(pipe.target, tokenizer)
        self.model = Model(names[0], names, now(), end_tokens(pipe.target), prompts, grammars)
        self.metrics = ServerMetrics(names[0])
        self.jobs = Jobs(self.metrics, parallel, queue)
        self._generation = Generation(pipe, prompts, self.metrics, self.jobs.turns)
        self._keys = [key.encode() for key in keys]
        self._unread = 0  # bytes of bodies that are incomplete
        self._told: set[str] = set()
        # Several large bodies that are parsed at the same time would keep the event loop from running.
        self._parsing = Lock()

    def close(self) -> None:
        """End all requests with an error, and take no further ones. From any thread, also in a signal handler."""
        self.jobs.close()

    def check_key(self, request: Request) -> None:
        """Refuse a request without one of the keys."""
        if not self._keys or request.url.path in _HEALTH or request.method == "OPTIONS":
            return
        given = request.headers.get("authorization", "")
        given = given[7:] if given[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        # All are compared, in a time that does not tell which.
        if sum(hmac.compare_digest(key, given.strip().encode("latin-1")) for key in self._keys) == 0:
            raise RequestError("the API key is missing or wrong: send Authorization: Bearer KEY", status=401, code="invalid_api_key")  # fmt: skip

    # ---- what is generated

    def exchange(self, kind: Callable[[Model, Fields], Exchange]) -> Handler:
        """The handler of one API."""

        def make(body: Fields) -> Exchange:
            made = kind(self.model, body)
            for name in body.unread:
                self._tell(name)
            return made

        async def handle(request: Request) -> Response:
            raw = await self._read(request)
            job = self.jobs.enter()
            try:
                exchange = await asyncio.to_thread(self._made, make, raw)
                job.check()
            except BaseException:
                self.jobs.leave(job)
                raise
            self.jobs.start(job, lambda job: self._generation.run(job, exchange.ask))
            watch = asyncio.create_task(_stop_when_gone(request, job))
            if exchange.streams:
                return await _stream(exchange, job, watch)
            try:
                count = len(exchange.ask.prompts) * exchange.ask.sampling.choices
                answers = await collected(job.events(), count)
                return JSONResponse(await asyncio.to_thread(exchange.whole, answers))
            finally:
                watch.cancel()
                job.stop()

        return handle

    def _made(self, make: Callable[[Fields], _T], raw: bytes) -> _T:
        """What ``make`` makes of a request's body."""
        try:
            with self._parsing:
                body = parsed_body(raw)
            return make(body)
        finally:
            if len(raw) > _LARGE:
                _give_back_memory()

    def _tell(self, name: str) -> None:
        """Say once of a field that it has no effect."""
        if name not in self._told and name not in _HARMLESS and len(self._told) < _MOST_TOLD:
            self._told.add(name)
            say(f"requests have the field {name[:80]!r}, which has no effect")

    async def _read(self, request: Request) -> bytes:
        """The body of a request. Raises ``RequestError`` as soon as it is too large, and where it does not come."""
        try:
            async with asyncio.timeout(_BODY_S):
                return await self._read_all(request)
        except TimeoutError as error:
            message = f"the request's body has not come within {_BODY_S} s"
            raise RequestError(message, status=408, code="request_timeout") from error

    async def _read_all(self, request: Request) -> bytes:
        most = self.model.prompts.largest_body
        too_large = RequestError(f"the request's body has more than {most} bytes, more than the model can read", status=413, code="request_too_large")  # fmt: skip
        given = request.headers.get("content-length", "")
        if given.isdigit() and int(given) > most:
            raise too_large
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                self._unread += len(part)
                if size > most:
                    raise too_large
                if self._unread > _BODIES:
                    raise RequestError("too many large requests come at the same time: try again later", status=429, code="queue_full")  # fmt: skip
                parts.append(part)
        finally:
            self._unread -= size
        return b"".join(parts)

    def reader(self, make: Callable[[Fields], dict[str, Any]]) -> Handler:
        """The handler of a route that generates nothing."""

        async def handle(request: Request) -> Response:
            raw = await self._read(request)
            job = self.jobs.enter()
            try:
                return JSONResponse(await asyncio.to_thread(self._made, make, raw))
            finally:
                self.jobs.leave(job)

        return handle

    # ---- what only reads

    def _entry(self) -> dict[str, Any]:
        limit = self.model.prompts.limit
        entry = {"id": self.model.name, "object": "model", "created": self.model.created, "owned_by": "pipespec"}
        return entry | {"max_model_len": limit, "root": self.model.name, "parent": None, "display_name": self.model.name, "type": "model"}  # fmt: skip

    async def models(self, request: Request) -> Response:
        """The list of models, in OpenAI's and Anthropic's form."""
        more = {"has_more": False, "first_id": self.model.name, "last_id": self.model.name}
        return JSONResponse({"object": "list", "data": [self._entry()], **more})

    async def one_model(self, request: Request) -> Response:
        """The model of this name."""
        self.model.check_name(Fields({"model": request.path_params["name"]}))
        return JSONResponse(self._entry())

    def tokenize(self, body: Fields) -> dict[str, Any]:
        """Token ids of a text (``content``: without special tokens, as in llama.cpp; ``prompt``: with them, as in vLLM) or of ``messages``."""
        prompts = self.model.prompts
        if "messages" in body:
            text, adds = prompts.of_chat(messages_of(body), tools_of(body), {}), False
        elif "prompt" in body:
            text, adds = body.text("prompt", ""), body.flag("add_special_tokens", True)
        else:
            body.required("content", "a string, or prompt, or messages")
            text, adds = body.text("content", ""), body.flag("add_special", False)
        ids = prompts.encoded(text, adds_special=adds)
        return {"tokens": ids, "count": len(ids), "max_model_len": prompts.limit}

    def detokenize(self, body: Fields) -> dict[str, Any]:
        """The text of token ids."""
        prompts = self.model.prompts
        body.required("tokens", "a list of token ids")
        text = prompts.tokenizer.decode(prompts.checked(body.items("tokens"), "tokens"))
        return {"content": text, "prompt": text}

    def apply_template(self, body: Fields) -> dict[str, Any]:
        """The text of a conversation."""
        return {"prompt": self.model.prompts.of_chat(messages_of(body), tools_of(body), {})}


_HARMLESS = {
    "user", "metadata", "store", "service_tier", "prediction", "cache_prompt", "keep_alive", "timings_per_token", "prompt_cache_key", "safety_identifier",
    "verbosity", "include", "truncation", "reasoning", "text", "input", "return_token_ids", "betas", "logprobs", "top_logprobs", "stream_options", "echo",
}  # fmt: skip
"""Fields that say nothing about the text."""

_MOST_TOLD = 64


def _give_back_memory() -> None:
    """Give freed memory back to the system. The GNU C library would keep it, and each thread has an area of its own."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def _stop_when_gone(request: Request, job: Job) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.stop()


async def _stream(exchange: Exchange, job: Job, watch: asyncio.Task[None]) -> Response:
    """The response of a stream. Its first event comes before the status: what fails before it is an error with a status of its own."""

    async def with_first() -> AsyncIterator[Any]:
        if first is not None:
            yield first
        async for event in found:
            yield event

    found = job.events()
    try:
        first = await anext(found, None)
    except BaseException:
        watch.cancel()
        job.stop()
        raise
    return _EventStream(exchange.events(with_first()), job, watch, isinstance(exchange, messages.MessageExchange))


class _EventStream(Response):
    """Server-sent events. An error that ends them is one of them."""

    def __init__(self, events: AsyncIterator[str], job: Job, watch: asyncio.Task[None], is_anthropic: bool) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._job, self._watch, self._is_anthropic = events, job, watch, is_anthropic

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def write(text: str, goes_on: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": goes_on})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(Gone):
                try:
                    async with aclosing(self._events) as events:  # type: ignore[type-var]
                        async for event in events:
                            await write(event)
                except RequestError as error:
                    if self._is_anthropic:
                        await write(f"event: error\n{line(anthropic_form(error))}")
                    else:
                        await write(line(openai_form(error)))
            await write("", False)
        except OSError:  # the client has gone
            pass
        finally:
            self._watch.cancel()
            self._job.stop()


def make_app(
    pipe: Any,
    tokenizer: Any,
    name: str | tuple[str, ...],
    *,
    parallel: int = 1,
    queue: int = 16,
    cors: bool = False,
    keys: tuple[str, ...] = (),
) -> Starlette:
    """Make the ASGI application; ``app.state.service`` is its :class:`Service`.

    Args:
        tokenizer: The target's, a fast one.
        name: The model's name in requests and answers; several: answers have the first one.
        parallel: Requests that run at the same time.
        queue: Requests that may wait; further ones get status 429.
        cors: Let pages of other origins read the answers.
        keys: API keys, any of which opens the server; without one it is open.
    """
    names = (name,) if isinstance(name, str) else name
    service = Service(pipe, tokenizer, names, parallel=parallel, queue=queue, keys=keys)

    def post(path: str, handler: Handler) -> list[Route]:
        # llama.cpp has its routes without /v1, too.
        paths = {path, path.removeprefix("/v1") if path != "/v1/messages" else path}
        return [Route(each, _guarded(service, handler), methods=["POST"]) for each in paths]

    def get(path: str, handler: Handler) -> Route:
        return Route(path, _guarded(service, handler), methods=["GET"])

    routes = [route for path, kind in _EXCHANGES.items() for route in post(path, service.exchange(kind))]
    routes += [route for path, message in _ABSENT.items() for route in post(path, _refusal(message))]
    routes += post("/v1/messages/count_tokens", service.reader(lambda body: messages.counted(service.model, body)))
    for path, make in (("/tokenize", service.tokenize), ("/detokenize", service.detokenize), ("/apply-template", service.apply_template)):  # fmt: skip
        routes += post(path, service.reader(make))
    routes += [get(path, _health) for path in _HEALTH]
    routes += [get(path, service.models) for path in ("/v1/models", "/models")]
    routes += [get("/v1/models/{name:path}", service.one_model), get("/version", _version)]

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics.text())

    routes.append(get("/metrics", metrics))
    middleware = []
    if cors:
        middleware.append(Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]))
    handlers = {RequestError: _answer_error, HTTPException: _answer_http_error, ClientDisconnect: _answer_gone, Gone: _answer_gone, Exception: _answer_failure}  # fmt: skip
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)  # type: ignore[arg-type]
    app.state.service = service
    return app


def _guarded(service: Service, handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        service.check_key(request)
        return await handler(request)

    return handle


def _refusal(message: str) -> Handler:
    async def handle(request: Request) -> Response:
        raise RequestError(message, status=501, code="not_implemented")

    return handle


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _answer_error(request: Request, error: RequestError) -> Response:
    form = anthropic_form if "/messages" in request.url.path else openai_form
    return JSONResponse(form(error), error.status, error.headers)


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    where = f"{request.method} {request.url.path}"
    message = f"there is no route {where}" if error.status_code == 404 else f"{where}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    answer = await _answer_error(request, RequestError(message, status=error.status_code, code=code))
    answer.headers.update(error.headers or {})
    return answer


async def _answer_failure(request: Request, error: Exception) -> Response:
    return await _answer_error(request, RequestError(f"{type(error).__name__}: {error}", status=500))


async def _answer_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
