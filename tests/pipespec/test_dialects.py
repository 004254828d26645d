"""Thoughts and tool calls in the text of an answer, in any pieces."""

import json
import random

import pytest

for package in ("starlette", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `serve` is not installed")

from pipespec.api.server.dialects import DIALECTS, PLAIN, AnswerParser, dialect_of  # noqa: E402

HERMES, CODER, MISTRAL = DIALECTS["<tool_call>"], DIALECTS["<function="], DIALECTS["[TOOL_CALLS]"]
LLAMA, GEMMA, THOUGHTS = DIALECTS['"parameters":'], DIALECTS["<|tool_call>call:"], DIALECTS["</think>"]
PYTHON_TAG = DIALECTS["<|python_tag|>"]
F = ("f", {"a": 1})


def parsed(dialect, text, draw, **options):
    """Content, thoughts and calls of a text that comes in pieces."""
    parser, at, pieces = AnswerParser(dialect, **{"finds_calls": True, "finds_thoughts": True} | options), 0, []
    while at < len(text):
        n = draw.randint(1, 6)
        pieces += parser.feed(text[at : at + n])
        at += n
    pieces += parser.end()
    content, thoughts = ("".join(p.text for p in pieces if p.kind == kind) for kind in ("content", "thought"))
    return content, thoughts, [(call.name, json.loads(call.arguments)) for piece in pieces for call in piece.calls]


@pytest.mark.parametrize(
    ("dialect", "text", "content", "thoughts", "calls"),
    [
        (PLAIN, "<think>a</think> <tool_call>b  ", "<think>a</think> <tool_call>b  ", "", []),
        (HERMES, "<think>\nhm < a\n</think>\n\nHello  world\n\n", "Hello  world\n\n", "hm < a", []),
        (HERMES, "<think>cut", "", "cut", []),
        (HERMES, "a <think> b", "a <think> b", "", []),
        (HERMES, 'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "I look.", "", [F, ("g", {})]),
        (HERMES, '<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', "", []),
        (HERMES, '<tool_call>{"name": "f"}</tool_call> x', '<tool_call>{"name": "f"}</tool_call> x', "", []),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "", []),
        (CODER, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nOslo\n</parameter>\n</function>\n</tool_call>", "", "", [("f", {"a": 1, "b": "Oslo"})]),
        (CODER, "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", "", []),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", "", [F]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}', "", "", [F]),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', "", "", [F]),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", "", [F]),
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}', "", "", [F, F]),
        (LLAMA, '{"name": "f"} is JSON', '{"name": "f"} is JSON', "", []),
        (LLAMA, 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', "", []),
        (PYTHON_TAG, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", "", [F]),
        (GEMMA, '<|channel>thought\nhm<channel|><|tool_call>call:f{a:1}<tool_call|>', "", "hm", [F]),
        (GEMMA, '<|tool_call>call:f{city:<|"|>Oslo, {x: "y"}<|"|>,in:[<|"|>a<|"|>]}<tool_call|>', "", "", [("f", {"city": 'Oslo, {x: "y"}', "in": ["a"]})]),
        (THOUGHTS, "<think>hm</think>ok", "ok", "hm", []),
    ],
)  # fmt: skip
def test_parts(dialect, text, content, thoughts, calls) -> None:
    draw = random.Random(0)
    for _ in range(30):
        assert parsed(dialect, text, draw) == (content, thoughts, calls)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (HERMES, 'so:  \n<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>\n\n<tool_call>{}</tool_call> '),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
        (HERMES, r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>'),
        (HERMES, r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}</tool_call>"),
        (LLAMA, ' \n{"name": "f"} '),
        (CODER, "<tool_call><function=f><parameter=a>1</function></tool_call>"),
        (CODER, "<tool_call><function=f><parameter=a>1</parameter>more</function></tool_call>"),
        (GEMMA, '<|tool_call>call:f{a:"\\u00019"}<tool_call|>'),
        (GEMMA, "ok <|tool_call>call:f"),
    ],
)
def test_what_cannot_be_sent_as_a_call_is_text_to_the_last_space(dialect, text) -> None:
    draw = random.Random(2)
    for _ in range(5):
        assert parsed(dialect, text, draw) == (text, "", [])


def test_values_of_tagged_parameters() -> None:
    text = "<tool_call><function=f><parameter=a>NaN</parameter><parameter=b>[1]</parameter></function></tool_call>"
    assert parsed(CODER, text, random.Random(3)) == ("", "", [("f", {"a": "NaN", "b": [1]})])


def test_thoughts_that_the_prompt_has_opened() -> None:
    draw = random.Random(1)
    assert parsed(HERMES, "hm</think>\n\nok", draw, prompt="...<think>\n") == ("ok", "hm", [])
    assert parsed(HERMES, "ok", draw, prompt="<think>\n\n</think>\n\n") == ("ok", "", [])


def test_templates_say_which_dialect() -> None:
    assert dialect_of("... <tool_call>\n{...} <function=") is CODER
    assert dialect_of('"parameters": dictionary ... <|python_tag|>') is LLAMA
    assert dialect_of("{{ message.content }}") is dialect_of(None) is PLAIN
