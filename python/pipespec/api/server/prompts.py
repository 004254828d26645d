"""Prompts: token ids of texts and of conversations, for one tokenizer and the length of one model."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError

from pipespec.api.server.dialects import Dialect, dialect_of
from pipespec.api.server.fields import Fields, RequestError, wrong
from pipespec.models.tokenizers import ByteTokenizer, FimTokens, backend_of, fim_tokens
from pipespec.process.threads import Lock

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_PROMPTS = 2048
"""Of one request."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

_SLICE = 1 << 16
"""Characters of the parts in which a text is counted that may be too long."""

_TOKEN_BYTES = 48
"""Bytes of JSON for one token of a long text, at most: white space, or characters with escapes."""

_LARGEST_BODY = 8 << 20
"""Bytes that are parsed as JSON in less than 0.2 s, in which nothing else runs."""


class Prompts:
    """Makes token ids. All methods may run in any thread.

    Args:
        tokenizer: The target's, a fast one.
        limit: Tokens of the longest text of the model; None: it has no limit.
        vocabulary: Tokens that the model can read.

    Attributes:
        dialect: How the model writes thoughts and calls.
    """

    def __init__(self, tokenizer: Any, limit: int | None, vocabulary: int) -> None:
        self.tokenizer, self.limit, self.vocabulary = tokenizer, limit, vocabulary
        self._template = _template_of(tokenizer)
        self._one_at_a_time = Lock()
        self.dialect: Dialect = dialect_of(self._template)
        marks = {tokenizer.convert_tokens_to_ids(mark) for mark in self.dialect.marks}
        tagged = {i for i in tokenizer.all_special_ids if any(str(tokenizer.convert_ids_to_tokens(i)) in mark for mark in self.dialect.marks)}  # fmt: skip
        self._unshown = set(tokenizer.all_special_ids) - marks - tagged

    @property
    def largest_body(self) -> int:
        """Bytes of the largest request that could fit the model."""
        if self.limit is None:
            return _LARGEST_BODY
        return min(_LARGEST_BODY, (1 << 20) + _TOKEN_BYTES * self.limit)

    def shown(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens: without special ones, but with the marks of the dialect."""
        return str(self.tokenizer.decode([token for token in tokens if token not in self._unshown]))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; of a special one, its name."""
        piece = self._pieces[token] if token < len(self._pieces) else b""
        return piece or self.token_text(token).encode()

    def token_text(self, token: int) -> str:
        """The text of one token, with U+FFFD for parts of characters."""
        return str(self.tokenizer.decode([token]))

    @functools.cached_property
    def _pieces(self) -> Sequence[bytes]:
        """By token, its bytes; empty where the tokenizer's decoder is of a kind that is not known."""
        try:
            return ByteTokenizer(backend_of(self.tokenizer).to_str()).pieces
        except (TypeError, ValueError):
            return ()

    # ---- texts

    def of_text(self, text: str, name: str = "prompt", *, is_whole: bool = False) -> list[int]:
        """The token ids of a text.

        Args:
            name: Of the field, for messages.
            is_whole: The text has the special tokens that the model expects.

        Raises:
            RequestError: The text is empty, or too long for the model.
        """
        ids = self.encoded(text, name, adds_special=not is_whole)
        if not ids:
            raise RequestError(f"{name} is empty: the model needs at least one token", name)
        self.check_length(len(ids), name)
        return ids

    def encoded(self, text: str, name: str = "content", *, adds_special: bool) -> list[int]:
        """The token ids of any text. Raises ``RequestError`` before all of it is read, where it is much too long."""
        if self.limit is not None and len(text) > max(_SLICE, 8 * self.limit):
            self._refuse_longer(text, name)
        return self._ids(text, adds_special)

    def _ids(self, text: str, adds_special: bool) -> list[int]:
        with self._one_at_a_time:  # several long ones would keep the event loop from running
            # Not verbose: it would warn of lengths, which are checked here.
            return list(self.tokenizer(text, add_special_tokens=adds_special, verbose=False).input_ids)

    def _refuse_longer(self, text: str, name: str) -> None:
        """Refuse a text that is much too long before all of it is read."""
        assert self.limit is not None
        count = 0
        for at in range(0, len(text), _SLICE):
            count += len(self._ids(text[at : at + _SLICE], False))
            if count > 2 * self.limit and at + _SLICE < len(text):  # twice: tokens at the borders of parts are others
                raise self._too_long(f"more than {count // 2}", name)

    def check_length(self, count: int, name: str) -> None:
        """Refuse a prompt that leaves no room for an answer."""
        if self.limit is not None and count >= self.limit:
            raise self._too_long(str(count), name)

    def _too_long(self, count: str, name: str) -> RequestError:
        message = f"the prompt has {count} tokens; the model's limit is {self.limit} with the answer"
        return RequestError(message, name, code="context_length_exceeded")

    @functools.cached_property
    def fim(self) -> FimTokens:
        """The tokens for fill-in-the-middle. Raises ``RequestError`` where the tokenizer has none."""
        if (found := fim_tokens(self.tokenizer)) is None:
            raise RequestError("suffix: this model's tokenizer has no tokens for fill-in-the-middle: leave suffix out", "suffix")  # fmt: skip
        return found

    def around_gap(self, value: Any, suffix: str) -> list[list[int]]:
        """The prompts that ask for the text between ``value``, a string or a list of them, and ``suffix``.

        Raises:
            RequestError: The tokenizer has no tokens for it, or the texts are too long for the model.
        """
        texts = value if isinstance(value, list) else [value]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise wrong("prompt", "a string or a list of strings beside suffix", value)
        _check_count(texts)
        fim, begin = self.fim, self._ids("", True)  # BOS, where the model expects it
        last = self.encoded(suffix, "suffix", adds_special=False)
        made = []
        for text in texts:
            first = self.encoded(text, "prompt", adds_special=False)
            made.append([*begin, fim.before, *first, fim.after, *last, fim.middle])
            self.check_length(len(made[-1]), "prompt" if len(first) > len(last) else "suffix")
        return made

    def of_ids(self, ids: list[Any], name: str) -> list[int]:
        """Token ids as a request gives them."""
        if not ids:
            raise RequestError(f"{name} is empty: the model needs at least one token", name)
        self.check_length(len(ids), name)
        return self.checked(ids, name)

    def checked(self, ids: list[Any], name: str) -> list[int]:
        """The same list, if all are tokens."""
        for place, token in enumerate(ids):
            if not isinstance(token, int) or isinstance(token, bool):
                raise wrong(f"{name}[{place}]", "a token id", token)
            if not 0 <= token < self.vocabulary:
                message = f"the vocabulary of {self.vocabulary} tokens has no token {token}"
                raise RequestError(f"{name}[{place}]: {message}", f"{name}[{place}]")
        return ids

    def of_prompt(self, value: Any) -> list[list[int]]:
        """The prompts of OpenAI's field ``prompt``: a string, token ids, or a list of either."""
        if isinstance(value, str):
            return [self.of_text(value)]
        if isinstance(value, list) and value:
            if isinstance(value[0], (str, list)):
                _check_count(value)
            if all(isinstance(item, str) for item in value):
                return [self.of_text(item, f"prompt[{place}]") for place, item in enumerate(value)]
            if all(isinstance(item, list) for item in value):
                return [self.of_ids(item, f"prompt[{place}]") for place, item in enumerate(value)]
            if not any(isinstance(item, (str, list, dict)) for item in value):
                return [self.of_ids(value, "prompt")]
        raise wrong("prompt", "a string, a list of token ids, or a list of either", value)

    # ---- conversations

    def of_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The text of a conversation, by the chat template.

        Args:
            messages: see :func:`messages_of`.
            tools: see :func:`tools_of`.
            options: Further variables of the template.

        Raises:
            RequestError: There is no template, it has no tools, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions", "messages")
        if tools and "tools" not in self._template:
            raise RequestError(
                "tools: the chat template of this model shows no tools to it, so they would have no effect", "tools"
            )
        if "developer" not in self._template:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        options = {"add_generation_prompt": True, **options}
        if options.get("continue_final_message"):
            options["add_generation_prompt"] = False
        try:
            made = self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:  # fmt: skip
            raise RequestError(
                f"messages: the chat template of this model refuses them: {error}", "messages"
            ) from error
        return str(made)


def _check_count(texts: Sequence[Any]) -> None:
    if len(texts) > MOST_PROMPTS:
        raise RequestError(f"prompt has {len(texts)} texts: give {MOST_PROMPTS} at most", "prompt")


def _template_of(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    if isinstance(tokenizer.chat_template, dict):
        return "\n".join(tokenizer.chat_template.values())
    return str(tokenizer.chat_template)


def messages_of(body: Fields) -> list[dict[str, Any]]:
    """The messages of a request to OpenAI's API, as chat templates take them: contents as text, arguments of calls as objects, no null.

    Raises:
        RequestError: One of them has no role, no content, or parts that are no text.
    """
    if not isinstance(given := body.required("messages", "a list of objects with role and content"), list):
        raise wrong("messages", "a list of objects with role and content", given)
    if not given:
        raise RequestError("messages is empty: give at least one message", "messages")
    return [_message(message) for message in body.objects("messages")]


def _message(given: Fields) -> dict[str, Any]:
    role = given.required("role", f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise wrong(given.name("role"), f"one of {', '.join(ROLES)}", role)
    calls = list(_calls(given))
    content = _content(given)
    if content is None and role != "assistant":
        raise RequestError(f"{given.name('content')} is missing: give a text", given.name("content"))
    message = given.as_dict() | {"content": content or ""}
    return message | {"tool_calls": calls} if calls else {k: v for k, v in message.items() if k != "tool_calls"}


def _content(message: Fields) -> str | None:
    """The text of a message: one string, or parts, which lines separate."""
    content = message.any("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(message.name("content"), "a string or a list of parts", content)
    return "\n".join(part_text(part) for part in message.objects("content"))


def part_text(part: Fields) -> str:
    """The text of a part of a message. Raises ``RequestError`` for an image and anything else that is no text."""
    kind = part.text("type", "text")
    if kind not in _TEXT_PARTS:
        raise RequestError(f"{part.name('type')}: this model reads text only, not {kind}", part.name("type"))
    text = part.text(_TEXT_PARTS[kind], None)
    if text is None:
        raise RequestError(f"{part.name(_TEXT_PARTS[kind])} is missing: give a string", part.name(_TEXT_PARTS[kind]))
    return text


def _calls(message: Fields) -> Iterator[dict[str, Any]]:
    """The tool calls of an assistant's message."""
    for call in message.objects("tool_calls"):
        function = call.object("function")
        name, arguments = function.required("name", "a string"), function.any("arguments")
        yield call.as_dict() | {"type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def arguments_of(given: Any) -> Any:
    """The arguments of a call as an object. Text that is no JSON stays as the model wrote it."""
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        return json.loads(given) if given else {}
    except (ValueError, RecursionError):
        return given


def tools_of(body: Fields) -> list[dict[str, Any]]:
    """The tools of a request to OpenAI's API."""
    tools = []
    for tool in body.objects("tools"):
        if (kind := tool.text("type", "function")) != "function":
            raise RequestError(f"{tool.name('type')}: only functions are supported, not {kind!r}", tool.name("type"))
        tools.append(function_tool(tool.object("function")) if "function" in tool else function_tool(tool))
    return tools


def function_tool(given: Fields, schema: str = "parameters") -> dict[str, Any]:
    """A tool as chat templates take it. ``schema``: the field that has the schema of its arguments."""
    name = given.required("name", "a string")
    if not isinstance(name, str) or not name:
        raise wrong(given.name("name"), "a name", name)
    parameters = given.mapping(schema) or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": given.text("description", ""), "parameters": parameters}}  # fmt: skip
