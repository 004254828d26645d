"""OpenAI's APIs of completions: ``/v1/chat/completions`` of chats, ``/v1/completions`` of prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from pipespec.api.server.conversations import (
    Model,
    Tools,
    ask_of_chat,
    finish_reason,
    new_id,
    now,
    tool_choice_of,
    usage_of,
)
from pipespec.api.server.dialects import Piece, ToolCall
from pipespec.api.server.fields import Fields, RequestError
from pipespec.api.server.generation import Answer, Ask, Delta, Done, Likelihood, Likelihoods
from pipespec.api.server.grammars import wanted_format
from pipespec.api.server.prompts import messages_of, tools_of
from pipespec.api.server.sampling import logprobs_of, sampling_of

_TEXTS = "text_completion"

DONE = "data: [DONE]\n\n"
"""The end of a stream in OpenAI's API."""


def line(event: dict[str, Any]) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


class _Exchange:
    """What both APIs have in common. ``prefix``: of the answer's identifier."""

    ask: Ask

    def __init__(self, model: Model, body: Fields, prefix: str) -> None:
        model.check_name(body)
        self._model, self._id, self._created = model, new_id(prefix), now()
        self.streams = body.flag("stream", False)
        self._has_usage = body.object("stream_options").flag("include_usage", False)

    def _body(self, kind: str, choices: list[dict[str, Any]], dones: list[Done] | None = None) -> dict[str, Any]:
        """An answer. ``dones``: the ends of its texts, where it tells what was used."""
        usage = {} if dones is None else {"usage": usage_of(dones, self.ask.sampling.choices)}
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model.name}
        return head | {"choices": choices} | usage


class ChatExchange(_Exchange):
    """A request to ``/v1/chat/completions``, see :class:`pipespec.api.server.conversations.Exchange`."""

    def __init__(self, model: Model, body: Fields) -> None:
        super().__init__(model, body, "chatcmpl-")
        if set(body.strings("modalities")) - {"text"}:
            raise RequestError("modalities: this model writes text only", "modalities")
        sampling = sampling_of(body, model.ends, model.prompts.vocabulary)
        several = body.flag("parallel_tool_calls", True)
        tools = Tools(tools_of(body), tool_choice_of(body), several=several)
        self.ask = ask_of_chat(model, body, messages_of(body), tools, sampling, logprobs_of(body, is_chat=True))

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": self._logprobs(answer.done.likelihoods),
                "finish_reason": finish_reason(answer.done, bool(answer.calls)),
            }
            for index, answer in enumerate(answers)
        ]
        return self._body("chat.completion", choices, [answer.done for answer in answers])

    async def events(self, found: AsyncIterator[Any]) -> AsyncIterator[str]:
        begun: dict[int, int] = {}  # by text, how many calls it has had
        dones: list[Done] = []
        async for event in found:
            if event.index not in begun:
                begun[event.index] = 0
                yield self._chunk(event.index, {"role": "assistant", "content": ""})
            if isinstance(event, Delta):
                yield self._chunk(event.index, _delta(event.piece, begun[event.index]))
                begun[event.index] += len(event.piece.calls)
                continue
            dones.append(event)
            if event.likelihoods is not None:
                yield self._chunk(event.index, {"content": ""}, logprobs=self._logprobs(event.likelihoods))
            yield self._chunk(event.index, {}, finish_reason(event, begun[event.index] > 0))
        if self._has_usage:
            yield line(self._body("chat.completion.chunk", [], dones))
        yield DONE

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._has_usage else {}
        return line(self._body("chat.completion.chunk", [choice]) | usage)

    def _logprobs(self, found: Likelihoods | None) -> dict[str, Any] | None:
        if found is None:
            return None
        text_of, bytes_of = self._model.prompts.token_text, self._model.prompts.token_bytes

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": text_of(token), "logprob": logprob, "bytes": list(bytes_of(token))}

        content = [
            entry(one.token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]} for one in found
        ]
        return {"content": content, "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _message(answer: Answer) -> dict[str, Any]:
    content = answer.content if answer.content or not answer.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _delta(piece: Piece, calls: int) -> dict[str, Any]:
    """``calls``: how many the text has had before."""
    if piece.kind == "call":
        return {"tool_calls": [{"index": calls + n} | _call(call) for n, call in enumerate(piece.calls)]}
    return {"reasoning_content" if piece.kind == "thought" else "content": piece.text}


class CompletionExchange(_Exchange):
    """A request to ``/v1/completions``, see :class:`pipespec.api.server.conversations.Exchange`."""

    def __init__(self, model: Model, body: Fields) -> None:
        super().__init__(model, body, "cmpl-")
        echoes = body.flag("echo", False)
        given, suffix = body.required("prompt", "a string or token ids"), body.text("suffix", "")
        ends = model.ends
        if suffix and echoes:
            raise RequestError("echo and suffix: the answer is the text between both; leave echo out", "echo")
        if suffix:
            prompts, ends = model.prompts.around_gap(given, suffix), [*ends, *model.prompts.fim.ends]
        else:
            prompts = model.prompts.of_prompt(given)
        sampling = sampling_of(body, ends, model.prompts.vocabulary, 0 if echoes else 1)
        wanted = wanted_format(body)
        grammar = None if wanted is None else model.grammars.compile(*wanted)
        logprobs = logprobs_of(body, is_chat=False)
        self.ask = Ask(prompts, sampling, grammar=grammar, logprobs=logprobs, echoes=echoes)

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(index, self._echo(answer.done.prompt) + answer.content, answer.done.reason)
            | {"logprobs": self._logprobs(answer.done)}
            for index, answer in enumerate(answers)
        ]
        return self._body(_TEXTS, choices, [answer.done for answer in answers])

    async def events(self, found: AsyncIterator[Any]) -> AsyncIterator[str]:
        dones: list[Done] = []
        begun: set[int] = set()
        async for event in found:
            if event.index not in begun:
                begun.add(event.index)
                if text := self._echo(self.ask.prompts[event.index // self.ask.sampling.choices]):
                    yield line(self._body(_TEXTS, [self._choice(event.index, text)]))
            if isinstance(event, Delta):
                yield line(self._body(_TEXTS, [self._choice(event.index, event.piece.text)]))
            else:
                dones.append(event)
                last = self._choice(event.index, "", event.reason) | {"logprobs": self._logprobs(event)}
                yield line(self._body(_TEXTS, [last]))
        if self._has_usage:
            yield line(self._body(_TEXTS, [], dones))
        yield DONE

    def _choice(self, index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _echo(self, prompt: list[int]) -> str:
        return self._model.prompts.shown(prompt) if self.ask.echoes else ""

    def _logprobs(self, done: Done) -> dict[str, Any] | None:
        if self.ask.logprobs is None:
            return None
        found: list[Likelihood] = [*(done.prompt_likelihoods or ()), *(done.likelihoods or ())]
        text_of = self._model.prompts.token_text
        tokens = [text_of(one.token) for one in found]
        tops = []
        for one in found:
            pairs = [*one.top, (one.token, one.logprob)] if one.logprob is not None else []
            # The likeliest token of several with one text counts.
            tops.append({text_of(token): value for token, value in reversed(pairs)} if pairs else None)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": tops,
            "text_offset": [*itertools.accumulate(map(len, tokens), initial=0)][:-1],
        }
