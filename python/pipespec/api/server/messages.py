"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API, which coding agents speak."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pipespec.api.server.conversations import Model, Tools, ask_of_chat, new_id
from pipespec.api.server.dialects import Piece, ToolCall
from pipespec.api.server.fields import Fields, RequestError, wrong
from pipespec.api.server.generation import Answer, Ask, Delta, Done
from pipespec.api.server.prompts import function_tool, messages_of, part_text
from pipespec.api.server.sampling import Sampling, sampling_of

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_PASSED_ON = ("temperature", "top_p", "top_k", "seed", "max_tokens")


def _line(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


class MessageExchange:
    """A request to ``/v1/messages``, see :class:`pipespec.api.server.conversations.Exchange`."""

    def __init__(self, model: Model, body: Fields) -> None:
        model.check_name(body)
        self._model, self._id = model, new_id("msg_")
        self.streams = body.flag("stream", False)
        body.required("max_tokens", "the longest answer's number of tokens")
        self._stops = body.strings("stop_sequences")
        self.ask = _ask(model, body)

    def _message(self, content: list[dict[str, Any]], done: Done, ending: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
            **ending,
            "usage": _usage(done),
        }

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        answer = answers[0]
        content: list[dict[str, Any]] = []
        if answer.thoughts:
            content.append({"type": "thinking", "thinking": answer.thoughts, "signature": ""})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        content += [_tool_use(call) | {"input": json.loads(call.arguments)} for call in answer.calls]
        return self._message(content, answer.done, _ending(answer.done, bool(answer.calls)))

    async def events(self, found: AsyncIterator[Any]) -> AsyncIterator[str]:
        blocks, done = _Blocks(), Done(0, "stop", self.ask.prompts[0], [], 0)
        begun = self._message([], done, {"stop_reason": None, "stop_sequence": None})
        yield _line({"type": "message_start", "message": begun})
        async for event in found:
            if isinstance(event, Delta):
                for made in blocks.add(event.piece):
                    yield _line(made)
            else:
                done = event
        for made in blocks.end():
            yield _line(made)
        yield _line({"type": "message_delta", "delta": _ending(done, blocks.has_calls), "usage": _usage(done)})
        yield _line({"type": "message_stop"})


def counted(model: Model, body: Fields) -> dict[str, Any]:
    """The answer of ``/v1/messages/count_tokens``."""
    model.check_name(body)
    return {"input_tokens": len(_ask(model, body).prompts[0])}


class _Blocks:
    """The events that make the blocks of a message."""

    def __init__(self) -> None:
        self._kind, self._index = "", -1
        self.has_calls = False

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events for a further piece."""
        if piece.kind != self._kind or piece.kind == "call":
            yield from self.end()
        if piece.kind == "call":
            self.has_calls = True
            for call in piece.calls:
                yield from self._begin("call", _tool_use(call))
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
                yield from self.end()
            return
        is_text = piece.kind == "content"
        if not self._kind:
            begun = {"type": "text", "text": ""} if is_text else {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._begin(piece.kind, begun)
        name = "text" if is_text else "thinking"
        yield self._delta({"type": f"{name}_delta", name: piece.text})

    def end(self) -> Iterator[dict[str, Any]]:
        """The events that complete the present block."""
        if self._kind:
            self._kind = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._kind, self._index = kind, self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": {}}


def _ending(done: Done, has_calls: bool) -> dict[str, Any]:
    if done.reason == "length":
        reason = "max_tokens"
    else:
        reason = "tool_use" if has_calls else "stop_sequence" if done.stop_string else "end_turn"
    return {"stop_reason": reason, "stop_sequence": done.stop_string}


def _usage(done: Done) -> dict[str, Any]:
    return {
        "input_tokens": len(done.prompt) - done.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached,
        "output_tokens": len(done.tokens),
    }


def _ask(model: Model, body: Fields) -> Ask:
    """What a request, or one that only counts, asks for."""
    tools = [function_tool(tool, "input_schema") for tool in body.objects("tools") if _is_own(tool)]
    choice = body.object("tool_choice")
    kind = choice.text("type", "auto")
    if kind == "tool":
        chosen = str(choice.required("name", "a tool's name"))
    elif kind in _CHOICES:
        chosen = _CHOICES[kind]
    else:
        raise wrong("tool_choice.type", "auto, any, tool or none", kind)
    messages = messages_of(Fields({"messages": list(_messages(body))}))
    given = {name: value for name in _PASSED_ON if (value := body.any(name)) is not None}
    given["stop"] = body.strings("stop_sequences")
    thinking = body.object("thinking").text("type", None)
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking != "disabled"}
    # The second is the name that the first had before.
    if text_format := body.object("output_config").mapping("format") or body.mapping("output_format"):
        options["response_format"] = text_format
    sampling: Sampling = sampling_of(Fields(given), model.ends, model.prompts.vocabulary)
    several = not choice.flag("disable_parallel_tool_use", False)
    return ask_of_chat(model, Fields(options), messages, Tools(tools, chosen, several=several), sampling, None)


def _is_own(tool: Fields) -> bool:
    """Whether a tool is one of the program's. Those of Anthropic's own servers run nowhere else."""
    kind = tool.text("type", "custom")
    if kind != "custom":
        raise RequestError(
            f"{tool.name('type')}: only tools of your own are supported, not {kind!r}", tool.name("type")
        )
    return True


def _messages(body: Fields) -> Iterator[dict[str, Any]]:
    """The conversation as messages of OpenAI's API."""
    system = body.any("system")
    if isinstance(system, list):
        system = "\n".join(part_text(part) for part in body.objects("system"))
    if system is not None:
        if not isinstance(system, str):
            raise wrong("system", "a string or a list of parts", system)
        yield {"role": "system", "content": system}
    if not isinstance(given := body.required("messages", "a list of objects with role and content"), list):
        raise wrong("messages", "a list of objects with role and content", given)
    for message in body.objects("messages"):
        content = message.any("content")
        if not isinstance(content, list):
            yield {"role": message.any("role"), "content": content}
        else:
            yield from _of_blocks(message)


def _of_blocks(message: Fields) -> Iterator[dict[str, Any]]:
    """A message whose content is a list: results of tools become messages of their own, before the rest."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.objects("content"):
        kind = block.text("type", "text")
        if kind == "tool_result":
            yield {"role": "tool", "tool_call_id": block.text("tool_use_id", ""), "content": _result(block)}
        elif kind == "tool_use":
            function = {"name": block.required("name", "a string"), "arguments": block.mapping("input")}
            calls.append({"id": block.text("id", ""), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # earlier thoughts are not shown again
            texts.append(part_text(block))
    if texts or calls:
        made = {"role": message.any("role"), "content": "\n".join(texts)}
        yield made | {"tool_calls": calls} if calls else made


def _result(block: Fields) -> str:
    """The text of a tool's result."""
    content = block.any("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part_text(part) for part in block.objects("content"))
