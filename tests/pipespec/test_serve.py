"""``pipespec serve``: a pipeline behind OpenAI's API, called by the package openai."""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")
openai = pytest.importorskip("openai", reason="the package openai is not installed")

import uvicorn  # noqa: E402

from pipespec import Pipeline  # noqa: E402
from pipespec.api.server.dialects import StopStrings  # noqa: E402
from pipespec.api.server.grammars import Grammars  # noqa: E402
from pipespec.cli import main as command_line  # noqa: E402
from pipespec.cli import serve  # noqa: E402
from pipespec.demo import family_path  # noqa: E402
from pipespec.models.tokenizers import load_tokenizer  # noqa: E402
from tests.support.forks import Fork  # noqa: E402
from tests.support.servers import Served, serving  # noqa: E402
from tests.waiting import SECONDS, until  # noqa: E402

PROMPT = "def mean(values):"
TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}def "


@contextmanager
def client_of(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        yield client


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
def served(pipe: Pipeline, tokenizer: Any) -> Iterator[Served]:
    with serving(pipe, tokenizer, parallel=4) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with client_of(served) as client:
        yield client


def text_of(pipe: Pipeline, tokenizer: Any, prompt: str, has_template: bool = False, **options: Any) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not has_template)
    output = pipe.generate(**inputs, **options)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def streamed(client: Any, **options: Any) -> tuple[str, Any, Any]:
    """The text of a streamed completion, its last choice, and the usage."""
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(client.completions.create(model="demo", **asked, **options))
    assert not last.choices
    return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0], last.usage


def test_completions_are_the_targets_text(client: Any, pipe: Pipeline, tokenizer: Any) -> None:
    text = text_of(pipe, tokenizer, PROMPT, max_new_tokens=24, do_sample=False)
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == text
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens, answer.model) == ("length", 24, "demo")
    pieces, last, usage = streamed(client, prompt=PROMPT, max_tokens=24, temperature=0)
    assert (pieces, last.finish_reason, usage.completion_tokens) == (text, "length", 24)


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
    pieces, last, _ = streamed(client, **options)
    assert (pieces, last.finish_reason) == (answer.text, "stop")
    options |= {"max_tokens": 8, "stop": PROMPT[-1] + text[0]}  # begins in the prompt
    short = client.completions.create(model="demo", **options).choices[0]
    assert (text.startswith(short.text), short.text != "", short.finish_reason) == (True, True, "length")
    options["stop"] = short.text[-3:]  # ends with the last token
    whole = client.completions.create(model="demo", **options)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("stop", 8)
    _, last, usage = streamed(client, **options)
    assert (last.finish_reason, usage.completion_tokens) == ("stop", 8)


def test_a_text_that_ends_inside_of_a_character(client: Any, tokenizer: Any) -> None:
    """A stream has it as the whole answer has: with U+FFFD."""
    first = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "\ufffd")
    options = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logit_bias": {str(first): 100}}
    assert client.completions.create(model="demo", **options).choices[0].text == "\ufffd"
    assert streamed(client, **options)[0] == "\ufffd"
    assert streamed(client, **options, stop=["no such text"])[0] == "\ufffd"


def test_an_end_of_text_as_the_last_permitted_token(client: Any, served: Served, pipe: Pipeline) -> None:
    """It ends the text, and not the limit."""
    end = pipe.target.generation_config.eos_token_id
    before = served.metrics()
    options = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logit_bias": {str(end): 100}}
    whole = client.completions.create(model="demo", **options)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("stop", 1)
    _, last, usage = streamed(client, **options)
    assert (last.finish_reason, usage.completion_tokens) == ("stop", 1)
    name = 'vllm:request_success_total finished_reason="stop"'
    until(lambda: served.metrics()[name] == before.get(name, 0) + 2, "both are counted")


def test_stop_strings_in_any_pieces() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=draw.randint(0, 12)))
        stops = tuple("".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3)))
        cut, sent, at = StopStrings(stops), "", 0
        while at < len(text):
            n = draw.randint(1, 3)
            sent, at = sent + cut.feed(text[at : at + n]), at + n
        sent += cut.end()
        first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
        # Of two stop strings that end in different pieces, the one that ends first counts.
        ends = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))
        assert text.startswith(sent), (text, stops)
        assert cut.has_stopped == any(stop in text for stop in stops)
        assert first <= len(sent) <= ends, (text, stops)


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
    # Further texts of one request have the following seeds.
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=12, seed=0, n=3, **options)
    assert [choice.text for choice in found.choices] == [expected[seed] for seed in range(3)]


def test_penalties_are_openais(client: Any, pipe: Pipeline, tokenizer: Any) -> None:
    own = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    text = text_of(pipe, tokenizer, PROMPT, max_new_tokens=24, do_sample=False, **own)
    assert text != text_of(pipe, tokenizer, PROMPT, max_new_tokens=24, do_sample=False)
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, **own)
    assert found.choices[0].text == text


def asked(**options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Describe a colour."}
    return {"model": "demo", "messages": [message], "max_tokens": 64, "temperature": 0} | options


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_is_obeyed(client: Any, pipe: Pipeline, tokenizer: Any, stream: bool) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="needs the package xgrammar (pip install xgrammar)")
    named = {"enum": ["red", "green"]}
    schema = {"type": "object", "properties": {"name": named, "is_dark": {"type": "boolean"}}, "additionalProperties": False}  # fmt: skip
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
    with pytest.raises(openai.BadRequestError, match=re.escape("pip install 'pipespec[serve]'")):
        client.chat.completions.create(**asked(response_format={"type": "json_object"}))
    with pytest.raises(openai.BadRequestError, match="'xml' is not supported"):
        client.chat.completions.create(**asked(response_format={"type": "xml"}))
    free = client.chat.completions.create(**asked(response_format={"type": "text"}))
    assert free.choices[0].message.content == client.chat.completions.create(**asked()).choices[0].message.content


def test_a_grammar_is_compiled_beside_other_requests(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it(*_: Any) -> None:
        client.with_options(timeout=SECONDS / 10).models.list()

    monkeypatch.setattr(Grammars, "compile", compile_it)
    assert client.chat.completions.create(**asked(response_format={"type": "json_object"})).choices


def test_metrics_have_the_reports_figures(pipe: Pipeline, tokenizer: Any) -> None:
    with serving(pipe, tokenizer) as served:
        served.complete(max_tokens=24)
        found, report = served.metrics(), pipe.report
    assert report is not None
    assert found["vllm:generation_tokens_total"] == 24
    assert found["vllm:spec_decode_num_drafts_total"] == report.stages[-1].steps
    assert found["vllm:spec_decode_num_draft_tokens_total"] == report.stages[-1].drafted
    by_position = [
        n for name, n in found.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(by_position) == found["vllm:spec_decode_num_accepted_tokens_total"] == report.stages[-1].accepted
    assert found["vllm:avg_generation_throughput_toks_per_s"] == pytest.approx(report.tokens_per_second)
    each = (report.seconds - report.seconds_to_first_token) / 23
    assert found["vllm:time_per_output_token_seconds_sum"] == pytest.approx(each)
    assert found['vllm:request_success_total finished_reason="length"'] == 1
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_conversation_is_not_read_again(pipe: Pipeline, tokenizer: Any, route: str, stream: bool) -> None:
    text, cached, prompts = "def mean(values):\n    return sum(values) / len(values)\n" * 3, [], 0
    pipe.close()  # no other request has asked for this
    with serving(pipe, tokenizer) as served:
        for turn in range(3):
            given = {"max_tokens": 8, "stream": stream, "stream_options": {"include_usage": True}}
            if route == "chat":
                answer = served.chat(messages=[{"role": "user", "content": text}], **given)
            else:
                answer = served.complete(prompt=text, **given)
            usage = answer.events[-1]["usage"] if stream else answer.json["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            prompts += usage["prompt_tokens"]
            text += f"\n\ndef median_{turn}(values):\n"
        found = served.metrics()
    assert cached[0] == 0
    assert 32 < cached[1] < cached[2]
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (prompts, sum(cached))


class Held:
    """A pipeline whose calls begin when ``may_begin(streamer)`` holds. It has no ``report``, which could be that of a call of another thread."""

    def __init__(self, pipe: Pipeline, may_begin: Any) -> None:
        self._pipe, self._may_begin, self.target = pipe, may_begin, pipe.target

    def generate(self, *args: Any, **options: Any) -> Any:
        until(lambda: self._may_begin(options["streamer"]), "the call may begin")
        return self._pipe.generate(*args, **options)


def test_a_full_queue_refuses(pipe: Pipeline, tokenizer: Any) -> None:
    release = threading.Event()
    with serving(Held(pipe, lambda _: release.is_set()), tokenizer, queue=1) as served, ThreadPoolExecutor(2) as pool:

        def ask() -> str:
            return served.complete(max_tokens=4).json["choices"][0]["text"]

        try:
            sent = [pool.submit(ask) for _ in range(2)]
            until(lambda: served.metrics()["vllm:num_requests_running"] == 1, "the first request runs")
            until(lambda: served.metrics()["vllm:num_requests_waiting"] == 1, "the second request waits")
            refused = served.complete()
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert refused.headers["retry-after"] == "1"
            assert served.chat(response_format={"type": "xml"}).status == 429  # before any work for a grammar
        finally:
            release.set()
        assert len({found.result() for found in sent}) == 1
        assert ask() == sent[0].result()


def test_a_client_that_goes_while_it_waits_gives_back_its_place(pipe: Pipeline, tokenizer: Any) -> None:
    release = threading.Event()
    with serving(Held(pipe, lambda _: release.is_set()), tokenizer, queue=1) as served, ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(served.complete)
            until(lambda: served.metrics()["vllm:num_requests_running"] == 1, "the first request runs")
            with served.begin({"prompt": PROMPT, "stream": True}):
                until(lambda: served.metrics()["vllm:num_requests_waiting"] == 1, "the second request waits")
            until(lambda: served.metrics()["vllm:num_requests_waiting"] == 0, "its client has gone")
            third = pool.submit(served.complete)
            until(lambda: served.metrics()["vllm:num_requests_waiting"] == 1, "the third request waits")
        finally:
            release.set()
        assert first.result().text
        assert third.result().status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_reading", [False, True])
def test_a_client_that_goes_ends_its_request(pipe: Pipeline, tokenizer: Any, stream: bool, is_reading: bool) -> None:
    """While its prompt is read, too: the call ends between two chunks."""
    chunks = []

    def has_gone(streamer: Any) -> bool:
        return streamer._job._stopped_by is not None

    class Reading(Held):
        def generate(self, *args: Any, **options: Any) -> Any:
            begun = options["streamer"].put

            def put(value: Any) -> None:
                begun(value)
                chunks.append(value.numel())
                connection.close()
                until(lambda: has_gone(options["streamer"]), "the client has gone")

            options["streamer"].put = put
            return self._pipe.generate(*args, **options)

    held = Reading(pipe, None) if is_reading else Held(pipe, has_gone)
    with serving(held, tokenizer) as served:
        prompt = "value " * (300 if is_reading else 3)
        connection = served.begin({"prompt": prompt, "max_tokens": 400, "stream": stream})
        if not is_reading:
            until(lambda: served.metrics()["vllm:num_requests_running"] == 1, "the request runs")
            connection.close()
        aborted = 'vllm:request_success_total finished_reason="abort"'
        until(lambda: served.metrics().get(aborted) == 1, "the request has ended")
        assert served.metrics()["vllm:generation_tokens_total"] == 0
        assert len(chunks) == is_reading  # it got the prompt, and no token


def test_a_failure_is_an_error_with_its_message(pipe: Pipeline, tokenizer: Any) -> None:
    """Of the server, not of the request; in a stream an event."""

    class Failing(Held):
        def generate(self, ids: Any, *, streamer: Any, **options: Any) -> Any:
            streamer.put(ids)
            for token in tokenizer("some words", return_tensors="pt").input_ids[0]:
                streamer.put(token[None])
            raise ValueError('the "device"\nis lost')

    with serving(Failing(pipe, None), tokenizer) as served, client_of(served) as client:
        with pytest.raises(openai.APIError) as failed:
            streamed(client, prompt=PROMPT, max_tokens=4)
        assert failed.value.body["message"] == 'ValueError: the "device"\nis lost'
        with pytest.raises(openai.InternalServerError, match="is lost"):
            client.completions.create(model="demo", prompt=PROMPT, max_tokens=4)


def test_command_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert command_line.main(["serve"]) == 2
    assert "needs uvicorn: pip install 'pipespec[serve]'" in capsys.readouterr().err


def test_command_line_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    served: list[Any] = []

    def run(server: Any, sockets: list[socket.socket]) -> None:
        served.append((str(sockets[0].getsockname()[0]), server.config.app.state.service.model.names))

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert command_line.main(["serve", "--port", "0"]) == 0
    assert served == [("127.0.0.1", ("target",))]
    assert re.search(r"serving target on http://127.0.0.1:\d+/v1", capsys.readouterr().err)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert command_line.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


def test_other_machines_need_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("PIPESPEC_API_KEY", raising=False)
    assert command_line.main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--no-api-key" in capsys.readouterr().err
    args = SimpleNamespace(api_key=None, no_api_key=False, host="192.0.2.1")
    monkeypatch.setenv("PIPESPEC_API_KEY", "a secret")
    assert serve._keys(args) == ("a secret",)
    args.api_key = ["another one"]
    assert serve._keys(args) == ("another one",)
    args.api_key = [""]
    with pytest.raises(ValueError, match="is empty"):
        serve._keys(args)


def test_a_failed_call_before_the_first_request_is_a_warning(capsys):
    class Failing:
        target = SimpleNamespace(device="cpu")

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("it does")

    serve._pack(Failing())
    assert "a call before the first request failed (ValueError: it does)" in capsys.readouterr().err


@pytest.mark.process
def test_a_server_that_is_told_to_end() -> None:
    """A stream ends with an error, and the status is 0."""
    with Fork(["-m", "pipespec.cli.main", "serve", "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        port = next(int(m[1]) for line in server.stderr if (m := re.search(r":(\d+)/v1", line)))
        served = Served(port, None)
        body = {"prompt": PROMPT, "max_tokens": 2000, "stream": True, "temperature": 0, "ignore_eos": True}
        with served.begin(body) as connection, connection.makefile() as lines:
            next(line for line in lines if line.startswith("data: "))
            server.send_signal(signal.SIGTERM)
            *_, last = [line for line in lines if line.startswith("data: ")]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.wait(SECONDS) == 0
