"""Conversations: what the APIs of chats have in common, from messages and tools to what is generated."""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from pipespec.api.server.dialects import AnswerParser
from pipespec.api.server.fields import Fields, RequestError, wrong
from pipespec.api.server.generation import Answer, Ask, Done
from pipespec.api.server.grammars import Grammars, check_free_end, forced_calls, wanted_format
from pipespec.api.server.prompts import Prompts
from pipespec.api.server.sampling import Sampling

_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "enable_thinking", "reasoning_effort")
_PROMPT_END = 64
"""Characters at the end of a prompt that may open thoughts."""


@dataclass(frozen=True)
class Model:
    """What requests are read for.

    Attributes:
        name: In answers.
        names: By which requests may call it.
        created: When it was made, in seconds since 1970.
        ends: Tokens that end its texts.
        prompts: Makes its token ids.
        grammars: Makes matchers for it.
    """

    name: str
    names: tuple[str, ...]
    created: int
    ends: list[int]
    prompts: Prompts
    grammars: Grammars

    def check_name(self, body: Fields) -> None:
        """Refuse a request for another model."""
        name = body.text("model", None)
        if name and name not in self.names:
            known = " or ".join(map(repr, self.names))
            raise RequestError(
                f"model {name!r} is not served here: ask for {known}", "model", status=404, code="model_not_found"
            )


class Exchange(Protocol):
    """A request that was read, and its answer in one API.

    Attributes:
        ask: What is to be generated.
        streams: Whether the answer is a stream.
    """

    ask: Ask
    streams: bool

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """The answer in one piece."""

    def events(self, found: AsyncIterator[Any]) -> AsyncIterator[str]:
        """The lines of a stream, from the events of a job."""


class Tools:
    """The tools of a request, and what it says of their use.

    Args:
        tools: As chat templates take them.
        choice: ``"none"``, ``"auto"``, ``"required"``, or the name of the one to call.
        several: Whether an answer may have several calls.
    """

    def __init__(self, tools: list[dict[str, Any]], choice: str = "auto", *, several: bool = True) -> None:
        self.tools = [] if choice == "none" else tools
        self.several = several
        if choice in ("none", "auto"):
            self.forced: list[dict[str, Any]] = []
            return
        self.forced = [tool for tool in tools if choice in ("required", tool["function"]["name"])]
        if not self.forced:
            what = "needs tools" if choice == "required" else f"{choice!r} is none of the tools"
            raise RequestError(f"tool_choice: {what}", "tool_choice")
        self.several = several and choice == "required"


def tool_choice_of(body: Fields) -> str:
    """OpenAI's field ``tool_choice``: ``"none"``, ``"auto"``, ``"required"``, or the name of a function."""
    given = body.any("tool_choice")
    if given is None:
        return "auto"
    if given in ("none", "auto", "required"):
        return str(given)
    if isinstance(given, dict):
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return name
    raise wrong("tool_choice", "none, auto, required, or an object that names a function", given)


def ask_of_chat(
    model: Model, body: Fields, messages: list[dict[str, Any]], tools: Tools, sampling: Sampling, logprobs: int | None
) -> Ask:
    """What a conversation asks for."""
    if "suffix" in body:
        raise RequestError("suffix is not supported in chats: /v1/completions has it", "suffix")
    prompts = model.prompts
    text = prompts.of_chat(messages, tools.tools, _template_options(prompts.tokenizer, body))
    ids = prompts.of_text(text, "messages", is_whole=True)

    def parser() -> AnswerParser:
        return AnswerParser(
            prompts.dialect, finds_calls=bool(tools.tools), finds_thoughts=True, prompt=text[-_PROMPT_END:]
        )

    wanted = wanted_format(body)
    if tools.forced:
        if wanted is not None:
            raise RequestError(f"tool_choice and {wanted[0]} both constrain the text: give one of them", wanted[0])
        check_free_end(body, "tool_choice")
        wanted = "tool_choice", forced_calls(prompts.dialect, tools.forced, several=tools.several)
    grammar = None
    if wanted is not None:
        thought = prompts.dialect.thought
        opened = thought is not None and parser().is_thinking
        grammar = model.grammars.compile(*wanted, thought[1] if thought and opened else None)
    return Ask([ids], sampling, parser, grammar, logprobs)


def _template_options(tokenizer: Any, body: Fields) -> dict[str, Any]:
    """The variables of the chat template that a request sets."""
    own = body.mapping("chat_template_kwargs")
    for name in own:
        if name in inspect.signature(tokenizer.apply_chat_template).parameters and name not in _TEMPLATE_FIELDS:
            raise RequestError(f"chat_template_kwargs.{name} is no variable of a template", "chat_template_kwargs")
    given = {name: body.any(name) for name in _TEMPLATE_FIELDS}
    options = {name: value for name, value in given.items() if value is not None} | own
    if options.get("reasoning_effort") == "none":
        options.setdefault("enable_thinking", False)
    return options


def new_id(prefix: str) -> str:
    """A new identifier of something."""
    return prefix + secrets.token_hex(12)


def now() -> int:
    """Seconds since 1970, for answers to show."""
    return int(time.time())


def finish_reason(done: Done, has_calls: bool) -> str:
    """OpenAI's word for why a text has ended."""
    return "tool_calls" if has_calls and done.reason == "stop" else done.reason


def usage_of(dones: list[Done], choices: int = 1) -> dict[str, Any]:
    """OpenAI's ``usage``. A prompt counts once, however many texts it has."""
    prompt = sum(len(done.prompt) for done in dones[::choices])
    new = sum(len(done.tokens) for done in dones)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached for done in dones[::choices])},
    }
