"""``pipespec serve``: transformers' server with a pipeline, called over HTTP by the package openai and by hand."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
openai = pytest.importorskip("openai", reason="the extra `serve` is not installed")
pytest.importorskip("transformers.cli.serving.completion", reason="transformers has no such server yet")

import uvicorn  # noqa: E402

from pipespec import Pipeline  # noqa: E402
from pipespec.api.server import (  # noqa: E402
    ResponseFormats,
    _before_stop,
    make_app,
)
from pipespec.cli import main as command_line  # noqa: E402
from pipespec.cli import serve  # noqa: E402
from pipespec.demo import family_path  # noqa: E402
from pipespec.models.tokenizers import load_tokenizer  # noqa: E402
from tests.waiting import SECONDS, until  # noqa: E402

PROMPT = "def mean(values):"
TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}def "


@contextmanager
def serving(pipe: Any, tokenizer: Any, **options: Any) -> Iterator[Any]:
    """A server in a thread, and a client of it; its ``base_url`` has the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(make_app(pipe, tokenizer, "demo", **options), log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started, "the server has started")
            with openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=SECONDS
            ) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline(family_path("target"), [family_path("small")], dtype="float32", schedule="lockstep") as pipe:
        yield pipe


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load_tokenizer(family_path("target"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def client(pipe: Pipeline, tokenizer: Any) -> Iterator[Any]:
    with serving(pipe, tokenizer) as client:
        yield client


def text_of(pipe: Pipeline, tokenizer: Any, prompt: str, has_template: bool = False, **options: Any) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not has_template)
    output = pipe.generate(**inputs, **options)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def streamed(client: Any, **options: Any) -> tuple[str, Any]:
    """The text of a streamed completion, and its last chunk."""
    chunks = list(client.completions.create(model="demo", stream=True, **options))
    return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1]


def metrics(client: Any) -> dict[str, float]:
    """The figures without the label that all have in common."""
    text = client._client.get(str(client.base_url).replace("/v1/", "/metrics")).text
    found = re.findall(r"^(vllm:\w+)\{(?:(\w+=\"\w+\"),)?model_name=\"demo\"(?:,(\w+=\"\w+\"))?\} (\S+)$", text, re.M)
    return {" ".join(filter(None, found[:3])): float(found[3]) for found in found}


def test_completions_are_the_targets_text(client: Any, pipe: Pipeline, tokenizer: Any) -> None:
    text = text_of(pipe, tokenizer, PROMPT, max_new_tokens=24, do_sample=False)
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == text
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens, answer.model) == ("length", 24, "demo")
    pieces, last = streamed(client, prompt=PROMPT, max_tokens=24, temperature=0)
    assert (pieces, last.choices[0].finish_reason, last.usage.completion_tokens) == (text, "length", 24)


def test_chat_applies_the_template(client: Any, pipe: Pipeline, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "the mean of values"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False)
    text = text_of(pipe, tokenizer, prompt, has_template=True, max_new_tokens=16, do_sample=False)
    options = {"model": "demo", "messages": messages, "max_completion_tokens": 16, "temperature": 0}
    assert client.chat.completions.create(**options).choices[0].message.content == text
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_stop_strings_are_not_part_of_the_text(client: Any, pipe: Pipeline, tokenizer: Any) -> None:
    text = text_of(pipe, tokenizer, PROMPT, max_new_tokens=24, do_sample=False)
    stop = text[11:17]  # over the borders of tokens
    options = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": ["not in the text", stop]}
    answer = client.completions.create(model="demo", **options).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    pieces, last = streamed(client, **options)
    assert (pieces, last.choices[0].finish_reason) == (answer.text, "stop")
    options |= {"max_tokens": 8, "stop": PROMPT[-1] + text[0]}  # begins in the prompt
    short = client.completions.create(model="demo", **options).choices[0]
    assert (text.startswith(short.text), short.text != "", short.finish_reason) == (True, True, "length")
    options["stop"] = short.text[-3:]  # ends with the last token
    for last in (client.completions.create(model="demo", **options), streamed(client, **options)[1]):
        assert (last.choices[0].finish_reason, last.usage.completion_tokens) == ("stop", 8)


def test_a_text_that_ends_inside_of_a_character(client: Any, tokenizer: Any) -> None:
    """A stream has it as the whole answer has: with U+FFFD."""
    first = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "\ufffd")
    options = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logit_bias": {str(first): 100}}
    assert client.completions.create(model="demo", **options).choices[0].text == "\ufffd"
    assert streamed(client, **options)[0] == "\ufffd"
    assert streamed(client, **options, stop=["no such text"])[0] == "\ufffd"


def test_an_end_of_text_as_the_last_permitted_token(client: Any, pipe: Pipeline) -> None:
    """It ends the text, and not the limit."""
    end = pipe.target.generation_config.eos_token_id
    before = metrics(client)
    options = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logit_bias": {str(end): 100}}
    for answer in (client.completions.create(model="demo", **options), streamed(client, **options)[1]):
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)
    name = 'vllm:request_success_total finished_reason="stop"'
    assert metrics(client)[name] == before.get(name, 0) + 2


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_end_with_done(client: Any, path: str) -> None:
    asks = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": "mean"}]}
    answer = client._client.post(
        f"{client.base_url}{path}", json={"model": "demo", "max_tokens": 2, "stream": True} | asks
    )
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: ")) for event in events)


def test_a_request_that_wants_no_tool(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    plain = client.chat.completions.create(**asked())
    answer = client.chat.completions.create(**asked(), tools=[tool], tool_choice="none")
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_stop_strings_where_an_answer_is_parsed(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = client.chat.completions.create(**asked()).choices[0].message.content
    parse = "transformers.cli.serving.chat_completion.parse_assistant_message"
    monkeypatch.setattr(parse, lambda tokenizer, model, ids, **_: (tokenizer.decode(ids), None, None))
    answer = client.chat.completions.create(**asked(stop=text[11:17])).choices[0].message.content
    assert answer == text[: text.index(text[11:17])]


def test_before_stop_in_any_pieces() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=draw.randint(0, 12)))
        stops = tuple("".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3)))
        sent, held, stopped, at = "", "", False, 0
        while at < len(text):
            n = draw.randint(1, 3)
            piece, held, stopped = _before_stop(held + text[at : at + n], stops, stopped)
            sent, at = sent + piece, at + n
        first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
        # Of two stop strings that end in different pieces, the one that ends first counts.
        ends = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))
        assert text.startswith(sent + held), (text, stops)
        assert stopped == any(stop in text for stop in stops)
        assert first <= len(sent + held) <= ends, (text, stops)


def test_each_request_has_its_own_seed(client: Any, pipe: Pipeline, tokenizer: Any) -> None:
    options = {"temperature": 0.9, "top_p": 0.95}
    expected = {
        seed: text_of(pipe, tokenizer, PROMPT, max_new_tokens=12, do_sample=True, seed=seed, **options) for seed in range(4)
    }  # fmt: skip
    assert len(set(expected.values())) > 1

    def ask(seed: int) -> str:
        found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, seed=seed, **options)
        return found.choices[0].text

    seeds = [0, 1, 2, 3] * 3
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, seeds)) == [expected[seed] for seed in seeds]


def test_penalties_are_openais(client: Any, pipe: Pipeline, tokenizer: Any) -> None:
    own = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    text = text_of(pipe, tokenizer, PROMPT, max_new_tokens=24, do_sample=False, **own)
    assert text != text_of(pipe, tokenizer, PROMPT, max_new_tokens=24, do_sample=False)
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, **own)
    assert found.choices[0].text == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=2 is not supported"),
        ({"logprobs": 3}, "logprobs=3 is not supported"),
        ({"model": "another"}, "another"),
        ({"prompt": [1, 2]}, "prompt must be a string"),
        ({"prompt": "value " * 3000}, "the model's limit is"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"logit_bias": 3}, "not iterable"),
        ({"logit_bias": {"100000": 1}}, "has no token 100000"),
        ({"top_p": 7}, "top_p=7 must be from 0 to 1"),
        ({"presence_penalty": -3.0}, "presence_penalty=-3.0 must be from -2 to 2"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: Any, options: dict[str, Any], message: str) -> None:
    given = {"model": "demo", "prompt": PROMPT, "max_tokens": 4} | options
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            client.completions.create(**given, stream=stream)


def test_other_bodies_are_errors_too(client: Any) -> None:
    url = str(client.base_url)
    assert client._client.post(f"{url}completions", content=b"{").json()["error"]["code"] == 400
    assert "messages" in client._client.post(f"{url}chat/completions", json={}).json()["error"]["message"]
    for path in ("reset", "load_model", "v1/responses"):  # transformers' routes that load or drop models, and others
        assert client._client.post(url.replace("v1/", path), json={}).json()["error"]["code"] == 404
    assert [model.id for model in client.models.list()] == ["demo"]


def asked(**options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Describe a colour."}
    return {"model": "demo", "messages": [message], "max_tokens": 64, "temperature": 0} | options


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_is_obeyed(client: Any, pipe: Pipeline, tokenizer: Any, stream: bool) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="needs the package xgrammar (pip install xgrammar)")
    named = {"enum": ["red", "green"]}
    schema = {
        "type": "object",
        "properties": {"name": named, "is_dark": {"type": "boolean"}},
        "additionalProperties": False,
    }
    schema["required"] = list(schema["properties"])
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    answer = client.chat.completions.create(**asked(response_format=form, stream=stream))
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    found = json.loads(text)
    assert found.keys() == {"name", "is_dark"}
    assert found["name"] in named["enum"]
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=pipe.target.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
    prompt = tokenizer.apply_chat_template(asked()["messages"], tokenize=False, add_generation_prompt=True)
    own = {"max_new_tokens": 64, "do_sample": False, "grammar": xgrammar.GrammarMatcher(compiled)}
    assert text == text_of(pipe, tokenizer, prompt, True, **own)
    for wrong in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}):
        with pytest.raises(openai.BadRequestError, match="schema"):
            client.chat.completions.create(**asked(response_format=wrong, stream=stream))


def test_a_response_format_that_cannot_be_had_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(openai.BadRequestError, match="pip install xgrammar"):
        client.chat.completions.create(**asked(response_format={"type": "json_object"}))
    with pytest.raises(openai.BadRequestError, match="'xml' is not supported"):
        client.chat.completions.create(**asked(response_format={"type": "xml"}))
    free = client.chat.completions.create(**asked(response_format={"type": "text"}))
    assert free.choices[0].message.content == client.chat.completions.create(**asked()).choices[0].message.content


def test_a_grammar_is_compiled_beside_other_requests(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it(*_: Any) -> None:
        client.with_options(timeout=SECONDS / 10).models.list()

    monkeypatch.setattr(ResponseFormats, "matcher", compile_it)
    assert client.chat.completions.create(**asked(response_format={"type": "json_object"})).choices


def test_metrics_have_the_reports_figures(pipe: Pipeline, tokenizer: Any) -> None:
    with serving(pipe, tokenizer) as client:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
        found, report = metrics(client), pipe.report
    assert report is not None
    assert found["vllm:generation_tokens_total"] == 24
    assert found["vllm:spec_decode_num_drafts_total"] == report.stages[-1].steps
    assert found["vllm:spec_decode_num_draft_tokens_total"] == report.stages[-1].drafted
    by_position = [
        n for name, n in found.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(by_position) == found["vllm:spec_decode_num_accepted_tokens_total"] == report.stages[-1].accepted
    assert found["vllm:avg_generation_throughput_toks_per_s"] == pytest.approx(report.tokens_per_second)
    assert found['vllm:request_success_total finished_reason="length"'] == 1
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_conversation_is_not_read_again(pipe: Pipeline, tokenizer: Any, route: str, stream: bool) -> None:
    text, cached, prompts = "def mean(values):\n    return sum(values) / len(values)\n" * 3, [], 0
    pipe.close()  # no other request has asked for this
    with serving(pipe, tokenizer) as client:
        for turn in range(3):
            given: dict[str, Any] = {"model": "demo", "max_tokens": 8, "temperature": 0, "stream": stream}
            if route == "chat":
                answer = client.chat.completions.create(messages=[{"role": "user", "content": text}], **given)
            else:
                answer = client.completions.create(prompt=text, **given)
            usage = list(answer)[-1].usage if stream else answer.usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
            prompts += usage.prompt_tokens
            text += f"\n\ndef median_{turn}(values):\n"
        found = metrics(client)
    assert cached[0] == 0
    assert 32 < cached[1] < cached[2]
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (prompts, sum(cached))


class Held:
    """A pipeline whose calls begin when ``may_begin(streamer)`` holds. It has no ``report``, which could be that of a call of another thread."""

    def __init__(self, pipe: Pipeline, may_begin: Any) -> None:
        self._pipe, self._may_begin, self.target = pipe, may_begin, pipe.target

    def generate(self, **options: Any) -> Any:
        until(lambda: self._may_begin(options["streamer"]), "the call may begin")
        return self._pipe.generate(**options)


def test_a_full_queue_refuses(pipe: Pipeline, tokenizer: Any) -> None:
    release = threading.Event()
    with serving(Held(pipe, lambda _: release.is_set()), tokenizer, queue=1) as client, ThreadPoolExecutor(2) as pool:

        def ask() -> str:
            return client.completions.create(model="demo", prompt=PROMPT, max_tokens=4).choices[0].text

        try:
            sent = [pool.submit(ask) for _ in range(2)]
            until(lambda: metrics(client)["vllm:num_requests_running"] == 1, "the first request runs")
            until(lambda: metrics(client)["vllm:num_requests_waiting"] == 1, "the second request waits")
            with pytest.raises(openai.RateLimitError, match="queue is full") as refused:
                ask()
            assert refused.value.response.headers["retry-after"] == "1"
            with pytest.raises(openai.RateLimitError):  # before any work for a grammar
                client.chat.completions.create(**asked(response_format={"type": "xml"}))
        finally:
            release.set()
        assert len({found.result() for found in sent}) == 1
        assert ask() == sent[0].result()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request(pipe: Pipeline, tokenizer: Any, stream: bool) -> None:
    def has_gone(streamer: Any) -> bool:
        return bool(streamer._cancelled.is_set() if stream else streamer.is_gone)

    with serving(Held(pipe, has_gone), tokenizer) as client:
        body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": 400, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(head.encode() + body)
            until(lambda: metrics(client)["vllm:num_requests_running"] == 1, "the request runs")
        aborted = 'vllm:request_success_total finished_reason="abort"'
        until(lambda: metrics(client).get(aborted) == 1, "the request has ended")
        assert metrics(client)["vllm:generation_tokens_total"] == 0


def test_a_failure_while_streaming_is_an_error_with_its_message(pipe: Pipeline, tokenizer: Any) -> None:
    def fail(streamer: Any) -> bool:
        raise RuntimeError('the "device"\nis lost')

    with serving(Held(pipe, fail), tokenizer) as client:
        with pytest.raises(openai.APIError) as failed:
            streamed(client, prompt=PROMPT, max_tokens=4)
        assert failed.value.body == 'the "device"\nis lost'
        with pytest.raises(openai.InternalServerError, match="is lost"):
            client.completions.create(model="demo", prompt=PROMPT, max_tokens=4)


def test_command_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert command_line.main(["serve"]) == 2
    assert "needs uvicorn: pip install 'pipespec[serve]'" in capsys.readouterr().err


def test_command_line_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    asked: list[str] = []

    def run(server: Any, sockets: list[socket.socket]) -> None:
        asked.append(str(sockets[0].getsockname()[0]))
        assert server.config.app.title == "FastAPI"

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert command_line.main(["serve", "--port", "0"]) == 0
    assert asked == ["127.0.0.1"]
    assert re.search(r"serving \S+target on http://127.0.0.1:\d+/v1", capsys.readouterr().err)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert command_line.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


def test_a_failed_call_before_the_first_request_is_a_warning(capsys):
    class Failing:
        target = SimpleNamespace(device="cpu")

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("it does")

    serve._pack(Failing())
    assert "a call before the first request failed (ValueError: it does)" in capsys.readouterr().err
