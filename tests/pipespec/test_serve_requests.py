"""Requests to the server by hand: what each field does, what is refused, and the form of answers and errors."""

import json
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")

from pipespec import Pipeline  # noqa: E402
from pipespec.api.server import app  # noqa: E402
from pipespec.api.server.jobs import Turns  # noqa: E402
from pipespec.demo import family_path  # noqa: E402
from pipespec.models.tokenizers import load_tokenizer  # noqa: E402
from tests.support.servers import ABSENT, Answered, Scripted, Served, serving  # noqa: E402
from tests.waiting import SECONDS, until  # noqa: E402

TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}def "
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}# assistant: "
)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "mean"}}\n</tool_call>'
USER = {"role": "user", "content": "the mean of values"}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline(family_path("target"), dtype="float32", schedule="plain") as pipe:
        yield pipe


def tokenizer_with(template: str) -> Any:
    tokenizer = load_tokenizer(family_path("target"))
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def served(pipe: Pipeline) -> Iterator[Served]:
    with serving(pipe, tokenizer_with(TEMPLATE), parallel=2) as served:
        yield served


@pytest.fixture(scope="module")
def with_tools(pipe: Pipeline) -> Iterator[Served]:
    with serving(pipe, tokenizer_with(TOOLS_TEMPLATE)) as served:
        yield served


def content(answer: Answered) -> str:
    assert answer.status == 200, answer.text
    return answer.json["choices"][0]["message"]["content"]


# ---- fields


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "demo"},
        {"model": ""},
        {"model": None},
        {"n": 1},
        {"logprobs": False, "top_logprobs": None},
        {"max_tokens": ABSENT, "max_completion_tokens": 6},
        {"max_tokens": 6.0},
        {"max_tokens": 9, "max_completion_tokens": 6},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "the mean of values"}]}]},
        {"messages": [{"role": "user", "content": "the mean of values", "name": "bob", "tool_calls": None}]},
        {"tools": []},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"top_k": 40, "min_p": 0.05, "top_p": 0.9},
        {"temperature": 1e-320},
        {"repetition_penalty": 1.0},
        {"ignore_eos": False, "min_tokens": 3},
        {"temperature": 0, "repetition_penalty": 1},
        {"stop_token_ids": []},
        {"cache_prompt": True, "keep_alive": "5m", "user": "u", "metadata": {"a": "b"}, "store": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
        {"modalities": ["text"]},
        {"best_of": 1, "echo": False},
        {"a_field_of_a_client": 1},
        {"stop": None},
        {"stop": ""},
        {"stop": [""]},
        {"stream": False},
        {"seed": -1},
        {"logit_bias": {}},
        {"generation_config": '{"top_k": 20}'},
    ],
    ids=str,
)
def test_fields_that_leave_a_greedy_text_as_it_is(served: Served, fields: dict[str, Any]) -> None:
    assert content(served.chat(**fields)) == content(served.chat())


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": 5}, "model", "must be a string, not 5"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": ABSENT}, "messages", "is missing"),
        ({"messages": "hi"}, "messages", "must be a list of objects with role and content, not 'hi'"),
        ({"messages": ["hi"]}, "messages[0]", "must be a JSON object"),
        ({"messages": [USER, {"role": "wizard", "content": "a"}]}, "messages[1].role", "must be one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0].type",
            "this model reads text only, not image_url",
        ),
        ({"tools": "x"}, "tools", "must be a list"),
        ({"tools": [TOOL]}, "tools", "shows no tools"),
        ({"tools": [{"type": "function", "function": {}}], "tool_choice": "none"}, "tools[0].function.name", "is missing"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": 7}, "tool_choice", "must be none, auto, required"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"modalities": ["audio"]}, "modalities", "text only"),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml' is not supported"),
        ({"logit_bias": {"hello": 1}}, "logit_bias", "must be a token id"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "has no token 99999999"),
        ({"logit_bias": 3}, "logit_bias", "must be an object"),
        ({"presence_penalty": 9}, "presence_penalty", "must be from -2 to 2"),
        ({"temperature": -1}, "temperature", "must be from 0 to 2"),
        ({"temperature": "0.5"}, "temperature", "must be a number, not '0.5'"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"top_p": 1.5}, "top_p", "must be from 0 to 1"),
        ({"seed": 2**70}, "seed", "must be from"),
        ({"seed": 1.5}, "seed", "must be an integer"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"max_tokens": -1}, "max_tokens", "must be at least 1"),
        ({"max_tokens": "5"}, "max_tokens", "must be an integer, not '5'"),
        ({"max_tokens": 2.7}, "max_tokens", "must be an integer, not 2.7"),
        ({"top_k": 10**400}, "top_k", "must be an integer"),
        ({"repetition_penalty": 10**400}, "repetition_penalty", "must be a number"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias", "must be numbers up to 1e+30"),
        ({"logit_bias": {"5": math.inf}}, None, "no JSON"),
        ({"logit_bias": {"5": 2e30}}, "logit_bias", "must be numbers up to 1e+30"),
        ({"generation_config": {"temperature": 1e-320}}, "generation_config.temperature", "must be at least 1e-05"),
        ({"user": "a\ud800"}, "user", "has half of a surrogate pair"),
        ({"a\ud800": 1}, "a?", "has half of a surrogate pair"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos", "contradict each other"),
        ({"min_tokens": 5, "structured_outputs": {"choice": ["a"]}}, "min_tokens", "contradict each other"),
        ({"stop": ["x"] * 129}, "stop", "give 128 at most"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "must be none, auto"),
        ({"generation_config": {"eos_token_id": 5}}, "generation_config.eos_token_id", "is no option"),
        ({"stop": 5}, "stop", "a string or a list of strings"),
        ({"stop": [5]}, "stop", "a string or a list of strings"),
        ({"stream": "yes"}, "stream", "must be true or false"),
        ({"n": 0}, "n", "must be from 1"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": 3}, "logprobs", "must be true or false"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "must be a token id"),
        ({"generation_config": "{"}, "generation_config", "is no JSON"),
        ({"generation_config": {"custom_generate": "x/y"}}, "generation_config.custom_generate", "is no option"),
        ({"generation_config": {"num_beams": 2}}, "generation_config", "num_beams=2 is not supported"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids", "a text ends at 64 tokens at most"),
        ({"min_tokens": 7}, "min_tokens", "must be at most 6, the limit of the text"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "no variable of a template"),
    ],
    ids=lambda value: str(value)[:80],
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str | None, message: str) -> None:
    for stream in ({}, {"stream": True}):
        answer = served.chat(**stream | fields)
        assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
        assert message in answer.error["message"]
        assert answer.error["message"].startswith((param or "").partition("[")[0]) or param is None


def test_whole_numbers_are_numbers(served: Served) -> None:
    assert served.chat(temperature=2, repetition_penalty=2, top_p=1, min_p=0, presence_penalty=1).status == 200


def test_arguments_that_are_nested_too_deeply_stay_text(with_tools: Served) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 3000}}
    answer = with_tools.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ABSENT}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 10**9]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_completions_that_are_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = served.complete(**fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_prompts_in_all_forms(served: Served) -> None:
    plain = served.complete().json["choices"][0]["text"]
    ids = served.ask("/tokenize", {"prompt": "def mean(values):"}).json["tokens"]
    for prompt in (["def mean(values):"], ids, [ids]):
        assert [choice["text"] for choice in served.complete(prompt=prompt).json["choices"]] == [plain]
    two = served.complete(prompt=["def mean(values):", "def median(values):"], n=2).json
    texts = [choice["text"] for choice in two["choices"]]
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert texts[:2] == [plain, plain]
    assert texts[2] == served.complete(prompt="def median(values):").json["choices"][0]["text"]
    assert (two["usage"]["completion_tokens"], two["usage"]["prompt_tokens"] > len(ids)) == (24, True)
    streamed = served.complete(prompt=["def mean(values):", "def median(values):"], stream=True).events
    for index, text in ((0, plain), (1, texts[2])):
        choices = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]


def test_the_text_between_two_others(served: Served, pipe: Pipeline) -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    tokenizer.init_kwargs["fim_tokens"] = tokenizer.convert_ids_to_tokens([65, 66, 67])
    bos = served.ask("/tokenize", {"prompt": ""}).json["tokens"]
    first, last = (served.ask("/tokenize", {"content": text}).json["tokens"] for text in ("def mean(", "return x"))
    wanted = served.complete(prompt=[*bos, 65, *first, 66, *last, 67]).json
    with serving(pipe, tokenizer) as filling:
        answer = filling.complete(prompt="def mean(", suffix="return x").json
        assert [answer[name] for name in ("choices", "usage")] == [wanted[name] for name in ("choices", "usage")]
        two = filling.complete(prompt=["def mean(", "def mean("], suffix="return x").json["choices"]
        assert [choice["text"] for choice in two] == [wanted["choices"][0]["text"]] * 2
        plain = served.complete(prompt="def mean(").json["choices"]
        assert filling.complete(prompt="def mean(", suffix="").json["choices"] == plain
        for fields, param in (
            ({"prompt": [1, 2]}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": ["a"] * 2049}, "prompt"),
            ({"echo": True}, "echo"),
            ({"suffix": "value " * 9999}, "suffix"),
            ({"suffix": 5}, "suffix"),
        ):
            refused = filling.complete(**{"suffix": "return x"} | fields)
            assert (refused.status, refused.error["param"]) == (400, param)
        assert filling.chat(suffix="return x").error["param"] == "suffix"


def test_a_text_ends_at_given_tokens(served: Served) -> None:
    ids = served.ask("/tokenize", {"content": served.complete(max_tokens=12).json["choices"][0]["text"]}).json["tokens"]
    answer = served.complete(max_tokens=12, stop_token_ids=[ids[4]]).json["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert served.ask("/detokenize", {"tokens": ids}).json["content"].startswith(answer["text"])
    assert len(answer["text"]) < len(served.ask("/detokenize", {"tokens": ids[:6]}).json["content"])


def test_log_probabilities(served: Served) -> None:
    plain = served.complete(logprobs=2).json["choices"][0]
    found = plain["logprobs"]
    assert "".join(found["tokens"]) == plain["text"]
    assert len(found["token_logprobs"]) == 6
    assert all(value <= 0 for value in found["token_logprobs"])
    assert [max(top, key=top.get) for top in found["top_logprobs"]] == found["tokens"]  # greedy
    echoed = served.complete(logprobs=2, echo=True).json["choices"][0]
    prompt = served.complete(logprobs=2, echo=True, max_tokens=0).json
    assert echoed["text"] == "def mean(values):" + plain["text"]
    assert prompt["choices"][0]["text"] == "def mean(values):"
    count = prompt["usage"]["prompt_tokens"]
    assert echoed["logprobs"]["token_logprobs"][count:] == found["token_logprobs"]
    assert echoed["logprobs"]["token_logprobs"][:count] == prompt["choices"][0]["logprobs"]["token_logprobs"]
    assert prompt["choices"][0]["logprobs"]["token_logprobs"][0] is None
    # A prompt's figures are those that the same text has when it is generated.
    longer = served.ask("/tokenize", {"prompt": "def mean(values):"}).json["tokens"]
    longer += served.ask("/tokenize", {"content": plain["text"]}).json["tokens"]
    again = served.complete(prompt=longer, logprobs=0, echo=True, max_tokens=0).json["choices"][0]["logprobs"]
    if again["tokens"][count:] == found["tokens"]:
        assert again["token_logprobs"][count:] == pytest.approx(found["token_logprobs"], abs=1e-3)
    chat = served.chat(logprobs=True, top_logprobs=1).json["choices"][0]
    entries = chat["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == chat["message"]["content"]
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries)
    events = served.chat(logprobs=True, top_logprobs=1, stream=True).events
    assert [e for event in events for e in (event["choices"][0]["logprobs"] or {}).get("content", ())] == entries


# ---- conversations


def test_messages_as_programs_store_them(served: Served) -> None:
    """Null fields count as absent, a developer is the system, parts are lines."""
    dumped = {"role": "assistant", "content": "b", "tool_calls": None, "function_call": None, "refusal": None}
    plain = {"role": "assistant", "content": "b"}
    assert content(served.chat(messages=[USER, dumped, USER])) == content(served.chat(messages=[USER, plain, USER]))

    def prompt(*messages: dict[str, Any]) -> str:
        return served.ask("/apply-template", {"messages": list(messages)}).json["prompt"]

    assert prompt({"role": "developer", "content": "Be brief."}, USER).startswith("# system: Be brief.\n")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt({"role": "user", "content": parts}).startswith("# user: one\ntwo\n")


def test_earlier_calls_are_shown_with_their_text(with_tools: Served) -> None:
    function = {"name": "look_up", "arguments": '{"word": "mean"}'}
    call = {"id": "1", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "I look it up.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "average"}
    answer = with_tools.ask("/apply-template", {"messages": [USER, turn, result], "tools": [TOOL]}).json["prompt"]
    assert 'I look it up.<tool_call>look_up {"word": "mean"}</tool_call>\n# tool: average' in answer
    broken = turn | {"content": None, "tool_calls": [{**call, "function": {"name": "x", "arguments": "{oops"}}]}
    answer = with_tools.ask("/apply-template", {"messages": [USER, broken, result], "tools": [TOOL]}).json["prompt"]
    assert '<tool_call>x "{oops"</tool_call>' in answer


def scripted(pipe: Pipeline, texts: list[str], **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of a whole answer, and the events of a stream, of a model that writes this."""
    tokenizer = tokenizer_with(TOOLS_TEMPLATE)
    with serving(Scripted(pipe, tokenizer, texts * 2), tokenizer) as served:
        given = {"tools": [TOOL], "max_tokens": 200} | fields
        return served.chat(**given).json["choices"][0], served.chat(**given, stream=True).events


def joined(events: list[dict[str, Any]], field: str = "content") -> str:
    return "".join(event["choices"][0]["delta"].get(field) or "" for event in events)


@pytest.mark.parametrize("before", ["", "I look it up.\n"])
def test_a_tool_call(pipe: Pipeline, before: str) -> None:
    whole, events = scripted(pipe, [before + CALL])
    assert whole["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert (whole["message"]["content"] or "") == joined(events) == before.strip()
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    for call in (whole["message"]["tool_calls"][0], calls[0]):
        assert call["function"]["name"] == "look_up"
        assert json.loads(call["function"]["arguments"]) == {"word": "mean"}
    assert calls[0]["index"] == 0


@pytest.mark.parametrize(
    ("text", "most", "reason"),
    [
        (CALL[:-20], 200, "stop"),
        (CALL, 12, "length"),
        ('<tool_call>\n{"name": "look_up", "arguments": {oops}}\n</tool_call>', 200, "stop"),
        ('<tool_call>\n{"name": "look_up"}\n</tool_call> and more', 200, "stop"),
        ("<tool_call>\n[]\n</tool_call>", 200, "stop"),
        ("<tool_call>\n[1]\n</tool_call>", 200, "stop"),
        ("no call at all  ", 200, "stop"),
    ],
)
def test_what_is_no_call_is_text(pipe: Pipeline, text: str, most: int, reason: str) -> None:
    whole, events = scripted(pipe, [text], max_tokens=most)
    assert whole["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == reason
    assert whole["message"]["content"] == joined(events)
    assert text.startswith(whole["message"]["content"])
    assert reason == "length" or whole["message"]["content"] == text
    assert "tool_calls" not in whole["message"]


def test_calls_are_text_where_a_request_has_no_tools(pipe: Pipeline) -> None:
    whole, events = scripted(pipe, [CALL], tools=ABSENT)
    assert whole["message"]["content"] == joined(events) == CALL


def test_thoughts_are_told_apart(pipe: Pipeline) -> None:
    whole, events = scripted(pipe, ["<think>\nmean: average\n</think>\n\nIt is the average. "])
    assert whole["message"]["reasoning_content"] == joined(events, "reasoning_content") == "mean: average"
    assert whole["message"]["content"] == joined(events) == "It is the average. "


WRITTEN = "<think>\nmean: average\n</think>\n\nI look it up.\n" + CALL


def test_anthropics_messages(pipe: Pipeline) -> None:
    tokenizer = tokenizer_with(TOOLS_TEMPLATE)
    tool = {"name": "look_up", "input_schema": TOOL["function"]["parameters"]}
    asked = {"messages": [USER], "system": "Be brief.", "tools": [tool], "max_tokens": 200}
    with serving(Scripted(pipe, tokenizer, [WRITTEN, WRITTEN, "a <think> b"]), tokenizer) as served:
        whole = served.ask("/v1/messages", asked).json
        events = served.ask("/v1/messages", asked | {"stream": True}).events
        cut = served.ask("/v1/messages", asked | {"max_tokens": 1}).json
        counted = served.ask("/v1/messages/count_tokens", asked).json["input_tokens"]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert (whole["content"][0]["thinking"], whole["content"][1]["text"]) == ("mean: average", "I look it up.")
    assert whole["content"][2]["input"] == {"word": "mean"}
    assert (whole["stop_reason"], cut["stop_reason"]) == ("tool_use", "max_tokens")
    assert whole["usage"]["input_tokens"] == events[0]["message"]["usage"]["input_tokens"] == counted
    kinds = [event["type"] for event in events]
    assert (kinds[0], *kinds[-2:]) == ("message_start", "message_delta", "message_stop")
    assert events[-2]["usage"] == whole["usage"]
    for index, block in enumerate(whole["content"]):
        own = [event for event in events if event.get("index") == index]
        assert (own[0]["type"], own[-1]["type"]) == ("content_block_start", "content_block_stop")
        deltas = [event["delta"] for event in own[1:-1]]
        text = "".join(delta.get("thinking") or delta.get("text") or delta.get("partial_json") for delta in deltas)
        assert text == block.get("thinking", block.get("text")) or json.loads(text) == block["input"]


def test_openais_responses(pipe: Pipeline) -> None:
    tokenizer = tokenizer_with(TOOLS_TEMPLATE)
    asked = {"input": "the mean of values", "tools": [{"type": "function", **TOOL["function"]}], "max_output_tokens": 200}  # fmt: skip
    with serving(Scripted(pipe, tokenizer, [WRITTEN, WRITTEN, "cut"]), tokenizer) as served:
        whole = served.ask("/v1/responses", asked).json
        events = served.ask("/v1/responses", asked | {"stream": True}).events
        cut = served.ask("/v1/responses", asked | {"max_output_tokens": 1}).json
        several = served.ask("/v1/responses", asked | {"n": 2})
    assert (whole["status"], cut["status"]) == ("completed", "incomplete")
    assert (several.status, several.error["param"]) == (400, "n")
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert (last["type"], last["response"]["usage"]) == ("response.completed", whole["usage"])
    for index, item in enumerate(last["response"]["output"]):
        # But for their ids, the items are those of the whole answer.
        assert [item.get(name) for name in ("type", "content", "arguments")] == [whole["output"][index].get(name) for name in ("type", "content", "arguments")]  # fmt: skip
        own = [event for event in events if event.get("output_index") == index]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


def test_a_call_can_be_forced(with_tools: Served) -> None:
    pytest.importorskip("xgrammar", reason="needs the package xgrammar (pip install xgrammar)")
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}}}  # fmt: skip
    named = {"type": "function", "function": {"name": "other"}}
    for choice, tools in (("required", [other]), (named, [TOOL, other])):
        for stream in (False, True):
            answer = with_tools.chat(tools=tools, tool_choice=choice, max_tokens=100, stream=stream, parallel_tool_calls=False)  # fmt: skip
            if stream:
                calls = [call for event in answer.events for call in event["choices"][0]["delta"].get("tool_calls", ())]
            else:
                calls = answer.json["choices"][0]["message"]["tool_calls"]
            assert [call["function"]["name"] for call in calls] == ["other"]
            assert json.loads(calls[0]["function"]["arguments"])["n"] in (True, False)
    missing = with_tools.chat(tools=[TOOL], tool_choice=named)
    assert (missing.status, missing.error["param"]) == (400, "tool_choice")


# ---- the form of answers


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_anthropics_messages_with_a_format(with_tools: Served, field: str) -> None:
    pytest.importorskip("xgrammar", reason="needs the package xgrammar (pip install xgrammar)")
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "schema": schema}
    body = {"messages": [USER], "max_tokens": 40, field: {"format": wanted} if field == "output_config" else wanted}
    answer = with_tools.ask("/v1/messages", body).json
    assert json.loads(answer["content"][0]["text"])["n"] in (True, False)
    assert answer["stop_reason"] == "end_turn"


def test_streams_have_openais_form(served: Served) -> None:
    answer = served.chat(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    first, *middle, last = [event["choices"][0] for event in answer.events]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["finish_reason"] is None for choice in (first, *middle))
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert not any("usage" in event for event in answer.events)
    *events, usage = served.chat(stream=True, stream_options={"include_usage": True}).events
    assert all(event["usage"] is None for event in events)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)


def test_bodies_that_are_no_requests(served: Served) -> None:
    bodies = [b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff"}', b'{"max_tokens": NaN}', b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"]  # fmt: skip
    for raw in bodies:
        answer = served.ask("/v1/completions", raw)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), raw[:40]
        assert answer.error["message"].startswith("the request's body")
    plain = {"Content-Type": "application/x-www-form-urlencoded"}
    assert served.ask("/v1/completions", b'{"prompt": "a", "max_tokens": 1}', **plain).status == 200


def test_prompts_beyond_the_model(served: Served) -> None:
    limit = served.ask("/v1/models").json["data"][0]["max_model_len"]
    for count in (limit + 1, 40 * limit):
        answer = served.complete(prompt="value " * count)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert served.complete(prompt=[5] * limit).error["code"] == "context_length_exceeded"
    largest = served.service.model.prompts.largest_body
    answer = served.ask("/v1/completions", b"x", **{"Content-Length": str(largest + 1)})
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    answer = served.complete(prompt=[5] * (limit - 2), max_tokens=100, min_tokens=50)
    assert answer.json["usage"]["completion_tokens"] == 2


def test_other_routes(served: Served) -> None:
    for path in ("/health", "/v1/health", "/ping"):
        assert served.ask(path).status == 200
    entry = served.ask("/v1/models").json["data"][0]
    assert (entry["id"], served.ask("/v1/models/demo").json) == ("demo", entry)
    missing = served.ask("/v1/models/other")
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "model_not_found", "model")
    assert served.chat(model="gpt-4o-mini").error["code"] == "model_not_found"
    assert served.ask("/v1/embeddings", {"input": "a"}).status == 501
    assert served.ask("/load_model", {}).error["code"] == "not_found"
    assert served.ask("/v1/chat/completions").status == 405
    assert served.ask("/v1/chat/completions", method="OPTIONS").status == 405
    text = "def mean(values): # \u00e9\U0001f642"
    ids = served.ask("/tokenize", {"content": text}).json
    assert (ids["count"], served.ask("/detokenize", {"tokens": ids["tokens"]}).json["content"]) == (len(ids["tokens"]), text)  # fmt: skip
    assert served.ask("/detokenize", {"tokens": [-1]}).error["param"] == "tokens[0]"


def test_keys(pipe: Pipeline) -> None:
    with serving(pipe, tokenizer_with(TEMPLATE), keys=("secret", "other"), cors=True) as served:
        assert served.ask("/health").status == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"x-api-key": "\u00e9"}):
            answer = served.ask("/v1/models", **headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert served.ask("/v1/chat/completions", {}).status == 401
        for headers in ({"Authorization": "Bearer secret"}, {"Authorization": "bearer other"}, {"x-api-key": "secret"}):
            assert served.ask("/v1/models", **headers).status == 200
        asks = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        assert served.ask("/v1/chat/completions", method="OPTIONS", **asks).status == 200


# ---- several clients


def test_texts_of_several_clients(pipe: Pipeline) -> None:
    """Each is that of its request alone, and the queue holds what waits."""
    tokenizer = tokenizer_with(TEMPLATE)
    prompts = [f"def mean_{n}(values):\n    return" + " sum(values)" * (n % 4) for n in range(24)]
    with serving(pipe, tokenizer, parallel=4, queue=24) as served:
        ask = lambda prompt: served.complete(prompt=prompt, max_tokens=12).json["choices"][0]["text"]  # noqa: E731
        alone = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(24) as pool:
            assert list(pool.map(ask, prompts)) == alone


def test_a_short_request_ends_beside_a_long_one(pipe: Pipeline) -> None:
    """The long one goes on until the short one has ended."""
    ended, tokenizer = threading.Event(), tokenizer_with(TEMPLATE)

    class Endless(Scripted):
        def generate(self, ids: Any, *, max_new_tokens: int, **options: Any) -> Any:
            if max_new_tokens == 1:
                return super().generate(ids, max_new_tokens=1, **options)
            options["streamer"].put(ids)
            until(lambda: options["streamer"].put(ids[0, -1:]) or ended.is_set(), "the short request has ended")
            options["streamer"].end()
            return ids

    with serving(Endless(pipe, tokenizer, ["x"]), tokenizer, parallel=2) as served:
        with served.begin({"prompt": "def mean(", "max_tokens": 100, "stream": True}) as long:
            long.recv(1)
            assert served.complete(max_tokens=1).status == 200
            ended.set()


def test_turns_go_to_who_has_computed_least() -> None:
    turns, order, may_end = Turns(), [], threading.Event()

    def work(name: str, count: int) -> None:
        with turns.taken() as turn:
            for _ in range(count):
                order.append(name)
                turn.used += {"long": 10.0, "short": 1.0}[name]
                turn.step()
            may_end.wait(SECONDS)

    with turns.taken() as turn, ThreadPoolExecutor(2) as pool:
        pool.submit(work, "long", 3)
        until(lambda: len(turns._waiting) == 1, "it waits")
        pool.submit(work, "short", 5)
        until(lambda: len(turns._waiting) == 2, "both wait")
        turn.used += 100.0
        may_end.set()
        turn.step()
    assert order == ["long", *["short"] * 5, "long", "long"]


def test_half_requests_keep_nobody_out(pipe: Pipeline) -> None:
    """A body that does not come has no place in the queue."""
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with serving(pipe, tokenizer_with(TEMPLATE), parallel=1, queue=1) as served:
        connections = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(8)]
        for connection in connections:
            connection.sendall(half)
        until(lambda: served.service._unread == 8, "all bodies have begun")
        assert served.complete().status == 200
        for connection in connections:
            connection.close()
        until(lambda: served.service._unread == 0, "they have ended")


def test_a_large_body_gives_its_memory_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(app, "_give_back_memory", lambda: given.append(threading.get_ident()))
    assert served.complete().status == 200
    assert given == []
    for path, fields in (
        ("/v1/completions", {"prompt": "value " * 60_000}),
        ("/tokenize", {"content": "value " * 60_000}),
    ):
        assert served.ask(path, fields).status == 400
    assert len(given) == 2


def test_health_while_large_bodies_are_read(served: Served) -> None:
    """They are tokenized in other threads."""
    answers: list[Answered] = []
    size = served.service.model.prompts.largest_body - 1000
    threads = [threading.Thread(target=lambda: answers.append(served.complete(prompt="word " * (size // 5)))) for _ in range(3)]  # fmt: skip
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert served.ask("/health").status == 200
    assert {answer.error["code"] for answer in answers} == {"context_length_exceeded"}
