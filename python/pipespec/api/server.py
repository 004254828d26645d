"""An OpenAI-compatible server: the handlers and routes of ``transformers serve``, with a pipeline's ``generate()``.

transformers' handlers read the requests and write the answers. What differs from ``transformers serve``: a request has its own seed, penalties, stop
strings and response format as OpenAI's API defines them; an option without an effect is refused; the queue is bounded; requests whose client has
gone are cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from jinja2 import TemplateError
from openai.types.completion_usage import PromptTokensDetails
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException  # those of unknown routes, too
from transformers.cli.serving import utils
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server

from pipespec.api.pipeline import Pipeline
from pipespec.api.report import own_report
from pipespec.models.properties import end_tokens, head_size
from pipespec.models.tokenizers import backend_of

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
_OWN = ("seed", "presence_penalty", "frequency_penalty", "logit_bias", "response_format")
_HARMLESS = {"user", "metadata", "store", "stream_options", "service_tier", "parallel_tool_calls", "prediction"}
_NEUTRAL = {"n": (1,), "best_of": (1,), "logprobs": (False,), "echo": (False,), "tool_choice": ("auto", "none")}
_RANGES = {"temperature": (0, 2), "top_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
_TEXT = {"type": "text"}
_INPUT_ERRORS = (HTTPException, RequestValidationError, ValueError, TypeError, KeyError, NotImplementedError, TemplateError)  # fmt: skip

# Of the request that a task handles: options of generate() that transformers' handlers do not have, stop strings, its place in the queue, ASGI's receive().
_options: ContextVar[dict[str, Any]] = ContextVar("options")
_stops: ContextVar[tuple[str, ...]] = ContextVar("stops")
_place: ContextVar[ExitStack] = ContextVar("place")
_receive: ContextVar[Callable[[], Any]] = ContextVar("receive")
# What its call did, once that has ended: the tokens of the prompt that were not read again.
_done: ContextVar[list[int]] = ContextVar("done")


def make_app(pipe: Pipeline, tokenizer: Any, name: str, *, queue: int = 16, cors: bool = False) -> FastAPI:
    """Make the ASGI application.

    Args:
        tokenizer: The target's, a fast one.
        name: The model's name in requests and answers.
        queue: Requests that may wait; further ones get status 429.
        cors: Let pages of other origins read the answers.
    """
    manager, state, metrics = _OneModel(pipe.target, tokenizer, name), utils.GenerationState(), ServerMetrics(name)
    requests = _Requests(pipe, metrics, queue)
    state.get_manager = lambda *args, **kwargs: requests
    handlers = {"chat_handler": ChatCompletionHandler, "completion_handler": CompletionHandler}
    formats, vocabulary = ResponseFormats(pipe.target, tokenizer), pipe.target.config.get_text_config().vocab_size
    made = {key: _handler(kind, formats, requests, vocabulary)(manager, state) for key, kind in handlers.items()}
    made |= {key: None for key in inspect.signature(build_server).parameters if key.endswith("_handler") and key not in made}  # fmt: skip
    app = build_server(manager, generation_state=state, enable_cors=cors, **made)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _ROUTES]
    app.get("/metrics")(lambda: PlainTextResponse(metrics.text()))
    for kind in (*_INPUT_ERRORS, utils._GenerationCancelled, Exception):
        app.add_exception_handler(kind, _error)
    app.add_middleware(_Connection)
    return app


def _error(request: Any, error: Exception) -> JSONResponse:
    """An error in OpenAI's form."""
    status = getattr(error, "status_code", 400 if isinstance(error, _INPUT_ERRORS) else 500)
    message = f"the request has no {error}" if isinstance(error, KeyError) else getattr(error, "detail", str(error))
    if isinstance(error, RequestValidationError):
        message = f"the request is no JSON object: {error.errors()[0]['msg']}"
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=getattr(error, "headers", None))


class _Connection:
    """ASGI middleware: a request's handler can ask whether the client is still there."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        _receive.set(receive)
        await self._app(scope, receive, send)


class _OneModel(ModelManager):
    """transformers' manager of models, with the one that the pipeline has loaded."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        super().__init__()
        self.force_model, self._loaded = name, (model, tokenizer)
        self._created = int(Path(name).stat().st_mtime) if Path(name).exists() else 0

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
        return self._loaded

    def process_model_name(self, model_id: str) -> str:
        return model_id

    def get_gen_models(self) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": self._created, "owned_by": "pipespec"}]


class _CachedTokens:
    """The part of a handler that tells in ``usage`` how many tokens of the prompt were not read again."""

    async def _non_streaming(self, *args: Any, **given: Any) -> JSONResponse:
        response = await super()._non_streaming(*args, **given)  # type: ignore[misc]
        body = json.loads(response.body)
        body["usage"]["prompt_tokens_details"] = {"cached_tokens": sum(_done.get())}
        return JSONResponse(body)

    def _build_chunk_sse(self, *args: Any, usage: Any = None, **given: Any) -> str:
        if usage is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=sum(_done.get()))
        chunk: str = super()._build_chunk_sse(*args, usage=usage, **given)  # type: ignore[misc]
        return chunk


def _handler(kind: Any, formats: ResponseFormats, requests: _Requests, vocabulary: int) -> Any:
    class Handler(_CachedTokens, kind):
        _unused_fields = kind._unused_fields - {*_OWN, *_HARMLESS}

        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            with requests.place():
                if (wanted := body.get("response_format")) not in (None, _TEXT):
                    body["response_format"] = await asyncio.to_thread(formats.matcher, wanted)
                return await super().handle_request(body, request_id)

        def _validate_request(self, body: dict[str, Any]) -> None:
            super()._validate_request(body)
            _check_fields(body, self._unused_fields)

        def _streaming(self, *args: Any, **given: Any) -> Any:
            response = super()._streaming(*args, **given)
            response.body_iterator = _with_end(response.body_iterator)
            return response

        def _build_generation_config(self, body: dict[str, Any], config: Any, use_cb: bool = False) -> Any:
            own = {field: body[field] for field in _OWN if body.get(field) not in (None, _TEXT)}
            if "logit_bias" in own:
                own["logit_bias"] = {int(token): float(bias) for token, bias in dict(own["logit_bias"]).items()}
                if unknown := [token for token in own["logit_bias"] if not 0 <= token < vocabulary]:
                    raise ValueError(f"logit_bias: the vocabulary of {vocabulary} tokens has no token {unknown[0]}")
            own["grammar"] = own.pop("response_format", None)
            _options.set(own)
            made = super()._build_generation_config({f: body[f] for f in body if f not in _OWN}, config, use_cb)
            if body.get("temperature"):  # transformers keeps the model's default, which may be greedy
                made.do_sample = True
            # generate() is not told of stop strings, as it finds one that begins in the prompt, too.
            stops, made.stop_strings = made.stop_strings or (), None
            _stops.set(tuple(filter(None, (stops,) if isinstance(stops, str) else stops)))
            return made

        def _build_completion(self, request_id: str, content: str, *rest: Any, **given: Any) -> Any:
            shown = "".join(_before_stop(content, _stops.get())[:2])
            return super()._build_completion(request_id, shown, *rest, **given)

    return Handler


async def _with_end(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events of a stream, and the one that ends it in OpenAI's API."""
    async with aclosing(events):
        async for event in events:
            yield event
    yield "data: [DONE]\n\n"


def _check_fields(body: dict[str, Any], unused: set[str]) -> None:
    """Raise where a field of a request would have no effect, or is out of its range."""
    for field in sorted(body.keys() & unused):
        neutral = [(type(value), value) for value in _NEUTRAL.get(field, ())]
        if body[field] is not None and (type(body[field]), body[field]) not in neutral:
            raise HTTPException(400, f"{field}={body[field]!r} is not supported: leave {field} out")
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    for field in ("max_tokens", "max_completion_tokens"):
        if body.get(field) is not None and body[field] < 1:
            raise ValueError(f"{field}={body[field]!r} must be at least 1")
    for field, (low, high) in _RANGES.items():
        if body.get(field) is not None and not low <= body[field] <= high:
            raise ValueError(f"{field}={body[field]!r} must be from {low} to {high}")


class _Streamer(utils.DirectStreamer):
    """Streams the text up to the first stop string. What may be the beginning of one is held back.

    Attributes:
        note_last: Called with the last token of the text, before its end is known to the reader.
    """

    stops: tuple[str, ...] = ()
    note_last: Callable[[int], None]
    _held, _stopped = "", False
    _pending: tuple[int, ...] = ()  # tokens whose text waits for the rest of a character
    _last = -1

    def put(self, value: Any) -> None:
        if not self._first:
            self._last = int(value[-1])
            self._pending += tuple(value.tolist())
        super().put(value)

    def end(self) -> None:
        self.note_last(self._last)
        if self._pending and self._parser is None:
            self._enqueue(self._tokenizer.decode(self._pending, skip_special_tokens=True))
        super().end()

    def _enqueue(self, item: Any) -> None:
        self._pending = ()
        if self.stops and type(item) is str:
            item, self._held, self._stopped = _before_stop(self._held + item, self.stops, self._stopped)
        elif self._held and item is None:
            super()._enqueue(self._held)
        if item not in ("", None):  # the end comes once the call has returned
            super()._enqueue(item)


def _before_stop(text: str, stops: tuple[str, ...], stopped: bool = False) -> tuple[str, str, bool]:
    """What of ``text`` may be sent, what is held back, and whether a stop string has come."""
    found = min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)
    if stopped or found >= 0:
        return "" if stopped else text[:found], "", True
    longest = min(len(text), max(map(len, stops), default=0))
    held = next((n for n in range(longest, 0, -1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)), 0)
    return text[: len(text) - held], text[len(text) - held :], False


class _Waiting:
    """The streamer of an answer in one piece: ends the call once the client has gone."""

    is_gone = False

    async def watch(self, receive: Callable[[], Any]) -> None:
        while not self.is_gone:
            self.is_gone = (await receive())["type"] == "http.disconnect"

    def put(self, tokens: Any) -> None:
        if self.is_gone:
            raise utils._GenerationCancelled

    def end(self) -> None:
        pass


class _Requests(utils.GenerateManager):
    """transformers' queue of calls, bounded, whose calls are the pipeline's."""

    def __init__(self, pipe: Pipeline, metrics: ServerMetrics, queue: int) -> None:
        super().__init__()
        self._pipe, self._metrics, self._places = pipe, metrics, threading.BoundedSemaphore(queue + 1)

    def place(self) -> ExitStack:
        """A place in the queue, which a call takes over."""
        if not self._places.acquire(blocking=False):
            raise HTTPException(429, "the queue is full: try again later", {"Retry-After": "1"})
        _place.set(place := ExitStack())
        place.callback(self._places.release)
        return place

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None) -> Any:  # fmt: skip
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        streamer = _Streamer(backend_of(processor), loop, queue, response_parser=response_parser)
        call = self._call(inputs, gen_config, processor, streamer)
        streamer.stops, streamer.note_last = _stops.get(), functools.partial(self._note_last, gen_config)

        def run() -> None:
            try:
                with suppress(utils._GenerationCancelled):
                    call()
                loop.call_soon_threadsafe(queue.put_nowait, None)
            except Exception as error:  # transformers writes the message into JSON as it is
                escaped = json.dumps(str(error) or type(error).__name__)[1:-1]
                loop.call_soon_threadsafe(queue.put_nowait, utils._StreamError(escaped))

        self.submit(run)
        return queue, streamer

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str) -> Any:  # fmt: skip
        waiting = _Waiting()
        watch = asyncio.create_task(waiting.watch(_receive.get()))
        try:
            output = await self.async_submit(self._call(inputs, gen_config, processor, waiting))
        finally:
            watch.cancel()
        prompt = inputs["input_ids"].shape[-1]
        text = processor.decode(output[0, prompt:], skip_special_tokens=True)
        return "".join(_before_stop(text, _stops.get())[:2]), prompt, output[0, prompt:]

    def _note_last(self, config: Any, token: int) -> None:
        if token in end_tokens(self._pipe.target):
            config.max_new_tokens = None  # it is not the limit that ends the text

    def _call(self, inputs: Any, config: Any, tokenizer: Any, streamer: Any) -> Callable[[], Any]:
        """A request's call, which takes over the request's place in the queue."""
        prompt = inputs["input_ids"].shape[-1]
        limit = getattr(self._pipe.target.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and prompt >= limit:
            raise HTTPException(400, f"the prompt has {prompt} tokens; the model's limit is {limit} with the answer")
        if limit is not None:
            room = limit - prompt
            config.max_new_tokens = room if config.max_new_tokens is None else min(config.max_new_tokens, room)
        options = {"generation_config": config, "streamer": streamer, **_options.get()}
        if stops := _stops.get():
            tokens = max(len(str.encode(stop)) for stop in stops) + 1

            def has_stopped(ids: torch.Tensor, scores: Any) -> torch.Tensor:
                text = tokenizer.decode(ids[0, max(prompt, ids.shape[1] - tokens) :], skip_special_tokens=True)
                if found := any(stop in text for stop in stops):
                    config.max_new_tokens = None  # it is not the limit that ends the text
                return torch.tensor([found], device=ids.device)

            options["stopping_criteria"] = [has_stopped]
        place, since = _place.get().pop_all(), self._metrics.enter()
        _done.set(done := [])

        def call() -> Any:
            with place, self._metrics.request(since, prompt, config):
                output = self._pipe.generate(**inputs, **options)
                self._note_last(config, int(output[0, -1]))
                if (report := own_report.get()) is not None:
                    done.append(report.prompt_tokens_reused)
                return output

        return call


class ResponseFormats:
    """Makes a matcher for each request, for the vocabulary and end tokens of the target. xgrammar keeps what it has compiled, up to 64 MiB."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._compiler: Any = None

    def matcher(self, wanted: Any) -> Any:
        """The argument ``grammar`` of ``generate()`` for ``{"type": "json_object"}``, or ``{"type": "json_schema", "json_schema": {"schema": SCHEMA}}``.

        Raises:
            HTTPException: Status 400; another form, a schema that xgrammar refuses, or no xgrammar.
        """
        kind = wanted.get("type") if isinstance(wanted, dict) else wanted
        if kind not in ("json_object", "json_schema"):
            raise HTTPException(400, f"response_format {kind!r} is not supported: text, json_object or json_schema")
        try:
            import xgrammar
        except ImportError as error:
            what = "response_format needs xgrammar where the server runs: pip install xgrammar"
            raise HTTPException(400, what) from error
        if self._compiler is None:
            ends, size = end_tokens(self._model) or None, head_size(self._model)
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=size, stop_token_ids=ends)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 << 20)
        try:
            schema = {"type": "object"} if kind == "json_object" else wanted["json_schema"]["schema"]
            # Free spaces would let a small model write nothing else.
            compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except (KeyError, TypeError, RuntimeError, ValueError) as error:
            raise HTTPException(400, f"response_format has no schema that xgrammar takes: {error}") from error
        return xgrammar.GrammarMatcher(compiled)


class ServerMetrics:
    """Counters, gauges and histograms of one server.

    Acceptance is counted as in vLLM: ``spec_decode_num_accepted_tokens_per_pos`` has, for each position, the verifications that accepted a draft token
    there. ``spec_decode_num_drafts`` counts all steps of the target, those without draft tokens too. ``name`` is the label ``model_name``.
    """

    def __init__(self, name: str) -> None:
        self._registry = CollectorRegistry()

        def new(kind: Any, metric: str, text: str, *labels: str) -> Any:
            made = kind(f"vllm:{metric}", text, ["model_name", *labels], registry=self._registry)
            return (lambda value: made.labels(name, value)) if labels else made.labels(name)

        self._running = new(Gauge, "num_requests_running", "Requests that generate.")
        self._waiting = new(Gauge, "num_requests_waiting", "Requests in the queue.")
        self._prompt = new(Counter, "prompt_tokens", "Tokens of prompts.")
        self._tokens = new(Counter, "generation_tokens", "Generated tokens.")
        self._queries = new(
            Counter, "prefix_cache_queries", "Tokens of prompts, looked up in what earlier calls have read."
        )
        self._hits = new(Counter, "prefix_cache_hits", "Tokens of prompts that were not read again.")
        self._ended = new(Counter, "request_success", "Requests by the reason of their end.", "finished_reason")
        self._first = new(Histogram, "time_to_first_token_seconds", "From a request to its first token.")
        self._latency = new(Histogram, "e2e_request_latency_seconds", "From a request to its last token.")
        self._throughput = new(Gauge, "avg_generation_throughput_toks_per_s", "Tokens/s of the last request.")
        self._drafts = new(Counter, "spec_decode_num_drafts", "Steps of the target.")
        self._drafted = new(Counter, "spec_decode_num_draft_tokens", "Draft tokens that the target verified.")
        self._accepted = new(Counter, "spec_decode_num_accepted_tokens", "Draft tokens that it accepted.")
        self._by_position = new(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", "position"
        )

    def text(self) -> str:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def enter(self) -> float:
        """Count a request that begins to wait. Returns the time."""
        self._waiting.inc()
        return time.monotonic()

    @contextmanager
    def request(self, since: float, prompt: int, config: Any) -> Iterator[None]:
        """Around a request's call of ``generate()``: count what it did, by the report of this thread's call.

        Args:
            since: of :meth:`enter`.
            config: Its ``max_new_tokens`` is the limit, or None once something else has ended the text.
        """
        self._waiting.dec()
        start, reason = time.monotonic(), "abort"
        try:
            with self._running.track_inprogress():
                yield
            reason, report = "stop", own_report.get()
            self._prompt.inc(prompt)
            self._queries.inc(prompt)
            if report is None:
                return
            reason, target = "length" if report.tokens == config.max_new_tokens else "stop", report.stages[-1]
            self._hits.inc(report.prompt_tokens_reused)
            self._tokens.inc(report.tokens)
            self._first.observe(start - since + report.seconds_to_first_token)
            self._latency.observe(time.monotonic() - since)
            self._throughput.set(report.tokens_per_second)
            self._drafts.inc(target.steps)
            self._drafted.inc(target.drafted)
            self._accepted.inc(target.accepted)
            for position in range(len(target.histogram) - 1):
                self._by_position(str(position)).inc(sum(target.histogram[position + 1 :]))
        finally:
            self._ended(reason).inc()
