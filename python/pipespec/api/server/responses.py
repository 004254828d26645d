"""``/v1/responses``: OpenAI's API of responses. Nothing is stored: each request has its whole conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from pipespec.api.server.completions import line
from pipespec.api.server.conversations import Model, Tools, ask_of_chat, new_id, now, tool_choice_of, usage_of
from pipespec.api.server.dialects import Piece, ToolCall
from pipespec.api.server.fields import Fields, RequestError, wrong
from pipespec.api.server.generation import Answer, Delta, Done
from pipespec.api.server.prompts import arguments_of, messages_of, tools_of
from pipespec.api.server.sampling import Sampling, sampling_of

_STORED = ("previous_response_id", "conversation", "prompt")


class ResponseExchange:
    """A request to ``/v1/responses``, see :class:`pipespec.api.server.conversations.Exchange`."""

    def __init__(self, model: Model, body: Fields) -> None:
        model.check_name(body)
        for name in _STORED:
            if name in body:
                raise RequestError(f"{name} is not supported: nothing is stored, so send the whole conversation", name)
        if body.flag("background", False):
            raise RequestError("background is not supported: the answer comes with the request", "background")
        self._model, self._id, self._created = model, new_id("resp_"), now()
        self.streams = body.flag("stream", False)
        tools = Tools(tools_of(body), tool_choice_of(body), several=body.flag("parallel_tool_calls", True))
        messages = messages_of(Fields({"messages": list(_messages(body))}))
        self.ask = ask_of_chat(model, _as_chat(body), messages, tools, self._sampling(body), None)
        if self.ask.sampling.choices > 1:
            raise RequestError("n: a response has one text; /v1/chat/completions has several", "n")
        self._shown = {
            "instructions": body.any("instructions"),
            "metadata": body.mapping("metadata"),
            "parallel_tool_calls": tools.several,
            "temperature": body.any("temperature"),
            "tool_choice": body.any("tool_choice") or "auto",
            "tools": body.items("tools"),
            "top_p": body.any("top_p"),
            "max_output_tokens": body.any("max_output_tokens"),
            "text": body.mapping("text") or {"format": {"type": "text"}},
        }

    def _sampling(self, body: Fields) -> Sampling:
        most = body.integer("max_output_tokens", 1)
        given = body.as_dict() | ({} if most is None else {"max_tokens": most})
        return sampling_of(Fields(given), self._model.ends, self._model.prompts.vocabulary)

    def _response(self, status: str, output: list[dict[str, Any]], done: Done | None = None) -> dict[str, Any]:
        usage = None
        if done is not None:
            found = usage_of([done])
            usage = {
                "input_tokens": found["prompt_tokens"],
                "input_tokens_details": found["prompt_tokens_details"],
                "output_tokens": found["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": found["total_tokens"],
            }
        is_cut = done is not None and done.reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_cut else status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model.name,
            "output": output,
            "usage": usage,
            **self._shown,
        }

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        answer = answers[0]
        pieces = [
            Piece("thought", answer.thoughts),
            Piece("content", answer.content),
            Piece("call", "", tuple(answer.calls)),
        ]
        output = _Output()
        for piece in pieces:
            if piece.text or piece.calls:
                list(output.add(piece))
        list(output.end())
        return self._response("completed", output.items, answer.done)

    async def events(self, found: AsyncIterator[Any]) -> AsyncIterator[str]:
        numbers = _Numbers()
        for kind in ("response.created", "response.in_progress"):
            yield numbers.line({"type": kind, "response": self._response("in_progress", [])})
        output, done = _Output(), None
        async for event in found:
            if isinstance(event, Delta):
                for made in output.add(event.piece):
                    yield numbers.line(made)
            else:
                done = event
        for made in output.end():
            yield numbers.line(made)
        response = self._response("completed", output.items, done)
        yield numbers.line({"type": f"response.{response['status']}", "response": response})


class _Numbers:
    """Numbers the events of a stream."""

    def __init__(self) -> None:
        self._next = 0

    def line(self, event: dict[str, Any]) -> str:
        event = event | {"sequence_number": self._next}
        self._next += 1
        return f"event: {event['type']}\n{line(event)}"


class _Output:
    """The items of a response, and the events that make them.

    Attributes:
        items: Those that are complete.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._kind, self._text, self._item_id = "", "", ""

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events for a further piece."""
        if piece.kind != self._kind or piece.kind == "call":
            yield from self.end()
        if piece.kind == "call":
            for call in piece.calls:
                yield from self._call(call)
            return
        if not self._kind:
            self._kind, self._item_id = piece.kind, new_id("msg_" if piece.kind == "content" else "rs_")
            yield self._event("response.output_item.added", item=self._item("in_progress", []))
            if piece.kind == "content":
                yield self._event("response.content_part.added", True, part=self._part())
        self._text += piece.text
        yield self._event(f"response.{self._prefix}.delta", True, delta=piece.text, **self._no_logprobs())

    def end(self) -> Iterator[dict[str, Any]]:
        """The events that complete the present item."""
        if not self._kind:
            return
        yield self._event(f"response.{self._prefix}.done", True, text=self._text, **self._no_logprobs())
        if self._kind == "content":
            yield self._event("response.content_part.done", True, part=self._part())
        item = self._item("completed", [self._part()])
        yield self._event("response.output_item.done", item=item)
        self.items.append(item)
        self._kind = self._text = ""

    @property
    def _prefix(self) -> str:
        return "output_text" if self._kind == "content" else "reasoning_text"

    def _no_logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._kind == "content" else {}

    def _event(self, kind: str, is_part: bool = False, **more: Any) -> dict[str, Any]:
        place = {"item_id": self._item_id, "content_index": 0} if is_part else {}
        return {"type": kind, "output_index": len(self.items)} | place | more

    def _part(self) -> dict[str, Any]:
        if self._kind == "content":
            return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": self._text}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        if self._kind == "content":
            return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}
        return {"type": "reasoning", "id": self._item_id, "status": status, "summary": [], "content": content}

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        item = {"type": "function_call", "id": new_id("fc_"), "call_id": new_id("call_"), "name": call.name}
        place = {"output_index": len(self.items)}
        named = place | {"item_id": item["id"]}
        yield {"type": "response.output_item.added", **place, "item": item | {"arguments": "", "status": "in_progress"}}
        yield {"type": "response.function_call_arguments.delta", **named, "delta": call.arguments}
        done = {"type": "response.function_call_arguments.done", **named, "name": call.name}
        yield done | {"arguments": call.arguments}
        complete = item | {"arguments": call.arguments, "status": "completed"}
        yield {"type": "response.output_item.done", **place, "item": complete}
        self.items.append(complete)


def _as_chat(body: Fields) -> Fields:
    """The fields of the text's form, as those of a chat."""
    given = body.as_dict()
    if text_format := body.object("text").mapping("format"):
        given["response_format"] = text_format
    effort = body.object("reasoning").text("effort", None)
    return Fields(given | ({} if effort is None else {"reasoning_effort": effort}))


def _messages(body: Fields) -> Iterator[dict[str, Any]]:
    """The conversation as messages of a chat. Calls that follow each other belong to one message."""
    if (instructions := body.text("instructions", None)) is not None:
        yield {"role": "system", "content": instructions}
    given = body.required("input", "a string, or a list of messages")
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not isinstance(given, list):
        raise wrong("input", "a string, or a list of messages", given)
    calls: list[dict[str, Any]] = []
    for item in body.objects("input"):
        kind = item.text("type", "message")
        if kind == "function_call":
            function = {"name": item.required("name", "a string"), "arguments": arguments_of(item.any("arguments"))}
            calls.append({"id": item.text("call_id", ""), "type": "function", "function": function})
            continue
        if calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            calls = []
        if kind == "function_call_output":
            yield {
                "role": "tool",
                "tool_call_id": item.text("call_id", ""),
                "content": item.required("output", "a string"),
            }
        elif kind == "message":
            yield {"role": item.any("role"), "content": item.any("content")}
        elif kind != "reasoning":  # earlier thoughts are not shown again
            raise RequestError(f"{item.name('type')} {kind!r} is not supported", item.name("type"))
    if calls:
        yield {"role": "assistant", "content": "", "tool_calls": calls}
