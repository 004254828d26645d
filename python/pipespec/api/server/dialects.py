"""Dialects: how a family of models writes thoughts and tool calls, and a parser that finds them in a text that arrives in pieces.

A model's chat template shows the model its dialect, so the template says which one it is. A text that is no valid call is content, as the model wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipespec.api.server.fields import refuse_constant


class ToolCall(NamedTuple):
    """A call that a model has written. ``arguments``: a JSON object as text."""

    name: str
    arguments: str


class Piece(NamedTuple):
    """A part of an answer: ``kind`` is ``"content"``, ``"thought"`` or ``"call"``; ``calls`` are those of a ``"call"``, whose text is then empty."""

    kind: str
    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Dialect:
    """How models write what is not content.

    Attributes:
        name: For messages.
        thought: What opens and closes thoughts; None: the model writes none.
        call: What opens and closes a tool call. An empty end: the call goes on to the end of the answer. None: the model calls no tools.
        parse: The calls between both, as pairs of a name and arguments. Any error says that there are none.
        render: A call for a grammar: what comes before the arguments of a function, and after them, both within the marks.
        style: How arguments are written, in xgrammar's words.
    """

    name: str
    thought: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    parse: Callable[[str], list[tuple[str, Any]]] = lambda text: []
    render: tuple[str, str] = ("", "")
    style: str = "json"

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that open or close something."""
        return tuple(mark for pair in (self.thought, self.call) if pair for mark in pair if mark)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """The calls that a text between the marks holds; empty if it is no valid call."""
        try:
            pairs = self.parse(text)
            if not all(isinstance(name, str) and name and isinstance(given, dict) for name, given in pairs):
                return ()
            calls = tuple(ToolCall(name, json.dumps(given, ensure_ascii=False, allow_nan=False)) for name, given in pairs)  # fmt: skip
            # Half of a surrogate pair cannot be sent.
            "".join(part for call in calls for part in call).encode()
        except (ValueError, LookupError, TypeError, RecursionError):
            return ()
        return calls


def _json_calls(text: str, key: str = "arguments") -> list[tuple[str, Any]]:
    found = json.loads(text)
    calls = found if isinstance(found, list) else [found]
    return [(call["name"], _object(call[key])) for call in calls]


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _llama_calls(text: str) -> list[tuple[str, Any]]:
    """One call or several, with semicolons between them, as Llama 3 writes them."""
    decoder, calls, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        calls.append((found["name"], _object(found["parameters"] if "parameters" in found else found["arguments"])))
        at += len(text[at:]) - len(text[at:].lstrip("; \n"))
    return calls


def _mistral_calls(text: str) -> list[tuple[str, Any]]:
    """A list of objects, or a name and its arguments."""
    if text.lstrip().startswith(("[{", "[ {", "{")):
        return _json_calls(text)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, _, arguments = part.partition("[ARGS]" if "[ARGS]" in part else "{")
        arguments = arguments if "[ARGS]" in part else "{" + arguments
        calls.append((name.strip(), json.loads(arguments)))
    return calls


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _tagged_calls(text: str) -> list[tuple[str, Any]]:
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""
    calls, at = [], 0
    while (match := _FUNCTION.match(text, at)) is not None:
        if _PARAMETER.sub("", match[2]).strip():
            raise ValueError("text between the parameters")
        values = {key.strip(): _value(value) for key, value in _PARAMETER.findall(match[2])}
        calls.append((match[1].strip(), values))
        at = match.end()
    if at < len(text) or not calls:
        raise ValueError("no function")
    return calls


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return text


def _gemma_calls(text: str) -> list[tuple[str, Any]]:
    """``NAME{key:<|"|>text<|"|>,other:5}``."""
    name, brace, rest = text.partition("{")
    strings: list[str] = []

    def keep(match: re.Match[str]) -> str:
        strings.append(match[1])
        return f'"\u0001{len(strings) - 1}"'

    bare = re.sub(r'<\|"\|>(.*?)<\|"\|>', keep, brace + rest, flags=re.DOTALL)
    bare = re.sub(r"([{,]\s*)([A-Za-z_]\w*)\s*:", r'\1"\2":', bare)

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restore(item) for key, item in value.items()}
        if isinstance(value, list):
            return [restore(item) for item in value]
        if isinstance(value, str) and value.startswith("\u0001"):
            return strings[int(value[1:])]
        return value

    return [(name.strip(), restore(json.loads(bare, strict=False)))]


_THINK = ("<think>", "</think>")
_NAMED = ('{"name": "NAME", "arguments": ', "}")

DIALECTS = {
    "<|tool_call>call:": Dialect("gemma4", ("<|channel>thought\n", "<channel|>"), ("<|tool_call>call:", "<tool_call|>"), _gemma_calls),
    "<function=": Dialect("qwen3-coder", _THINK, ("<tool_call>", "</tool_call>"), _tagged_calls, ("\n<function=NAME>\n", "\n</function>\n"), "qwen_xml"),
    "<tool_call>": Dialect("hermes", _THINK, ("<tool_call>", "</tool_call>"), _json_calls, (f"\n{_NAMED[0]}", "}\n")),
    "[TOOL_CALLS]": Dialect("mistral", ("[THINK]", "[/THINK]"), ("[TOOL_CALLS]", ""), _mistral_calls, (f"[{_NAMED[0]}", "}]")),
    '"parameters":': Dialect("llama3", _THINK, ("{", ""), lambda text: _llama_calls("{" + text), ('"name": "NAME", "parameters": ', "}")),
    "<|python_tag|>": Dialect("llama3", _THINK, ("<|python_tag|>", ""), _llama_calls, ('{"name": "NAME", "parameters": ', "}")),
    "</think>": Dialect("thoughts", _THINK),
}  # fmt: skip
"""By what a chat template holds; the first one counts."""

PLAIN = Dialect("plain")


def dialect_of(template: str | None) -> Dialect:
    """The dialect that a chat template shows; :data:`PLAIN` where it shows none."""
    return next((dialect for mark, dialect in DIALECTS.items() if mark in (template or "")), PLAIN)


class AnswerParser:
    """Finds thoughts and tool calls in the text of an answer.

    Args:
        dialect: Of the model.
        finds_calls: Whether the request has tools. A mark of a call is content without them.
        finds_thoughts: Whether thoughts are told apart.
        prompt: The end of the prompt, which may have opened thoughts already.
    """

    def __init__(self, dialect: Dialect, *, finds_calls: bool, finds_thoughts: bool, prompt: str = "") -> None:
        self._dialect = dialect
        self._call = dialect.call if finds_calls else None
        self._thought = dialect.thought if finds_thoughts else None
        self._held = ""  # not told apart yet
        self._inside = "content"
        self._space = ""  # before a mark: it belongs to the mark
        self._trims = False  # white space at the beginning of what follows is no part of the text
        self._has_content = False
        if self._thought is not None and prompt.rstrip().endswith(self._thought[0].rstrip()):
            self._inside, self._trims = "thought", True

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far has opened thoughts and not closed them."""
        return self._inside == "thought"

    def feed(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain after further text."""
        self._held += text
        while (pieces := self._next()) is not None:
            yield from pieces

    def end(self) -> Iterator[Piece]:
        """The rest, once the answer is complete. A call that is not closed is content."""
        yield from self.feed("")
        held, self._held = self._held, ""
        if self._inside == "call" and self._call is not None:
            opened, closed = self._call
            self._inside = "content"
            calls = self._dialect.calls(held) if not closed else ()
            yield from self._called(calls, opened + held)
        elif held:
            yield from self._text(held)

    def _called(self, calls: tuple[ToolCall, ...], text: str) -> Iterator[Piece]:
        if calls:
            yield Piece("call", "", calls)
        else:
            yield from self._text(self._space + text)

    def _text(self, text: str) -> Iterator[Piece]:
        if self._trims:
            text = text.lstrip()
        if text:
            self._trims = False
            self._has_content |= self._inside == "content"
            yield Piece(self._inside, text)

    def _next(self) -> list[Piece] | None:
        """The pieces up to the next mark; None where more text is needed."""
        if self._inside == "call":
            return self._close_call()
        marks = self._marks()
        places = {mark: at for mark in marks if (at := self._held.find(mark)) >= 0}
        if not places:
            return self._certain(marks)
        mark = min(places, key=lambda mark: (places[mark], -len(mark)))
        before, self._held = self._held[: places[mark]], self._held[places[mark] + len(mark) :]
        bare = before.rstrip()
        self._space = before[len(bare) :]
        pieces = list(self._text(bare))
        if self._call is not None and mark == self._call[0]:
            self._inside = "call"
        else:
            self._inside, self._trims = ("thought" if self._inside == "content" else "content"), True
        return pieces

    def _marks(self) -> Sequence[str]:
        """What may end the present part."""
        if self._inside == "thought":
            assert self._thought is not None
            return [self._thought[1]]
        marks = []
        # Thoughts come first, and so does a call that no mark opens.
        if self._thought is not None and not self._has_content:
            marks.append(self._thought[0])
        if self._call is not None and (len(self._call[0]) > 1 or not (self._has_content or self._held.strip()[:1] != self._call[0])):  # fmt: skip
            marks.append(self._call[0])
        return marks

    def _certain(self, marks: Sequence[str]) -> list[Piece] | None:
        """What cannot belong to a mark any more."""
        keep = begun(self._held, marks)
        sure = self._held[: len(self._held) - keep]
        if marks:
            sure = sure.rstrip()
        if not sure:
            return None
        self._held = self._held[len(sure) :]
        return list(self._text(sure)) or None

    def _close_call(self) -> list[Piece] | None:
        assert self._call is not None
        opened, closed = self._call
        at = self._held.find(closed) if closed else -1
        if at < 0:
            return None
        inside, self._held = self._held[:at], self._held[at + len(closed) :]
        self._inside = "content"
        calls = self._dialect.calls(inside)
        self._trims = bool(calls)
        return list(self._called(calls, opened + inside + closed))


def begun(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[len(text) - n :]) for mark in marks)), 0)


class StopStrings:
    """Cuts a text that arrives in pieces before the first stop string. What may be the beginning of one is held back.

    Attributes:
        has_stopped: Whether a stop string has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.has_stopped = stops, "", False

    def feed(self, text: str) -> str:
        """What of the text so far is certain, and was not returned before."""
        if self.has_stopped:
            return ""
        text = self._held + text
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.has_stopped, self._held = True, ""
            return text[:found]
        kept = begun(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """What was held back, once the text is complete."""
        held, self._held = self._held, ""
        return held
