"""``/v1/completions``: OpenAI's API of completions of prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pipespec.api.server.chat import DONE, line
from pipespec.api.server.conversations import Model, new_id, now, usage_of
from pipespec.api.server.fields import Fields, RequestError
from pipespec.api.server.generation import Answer, Ask, Delta, Done, Likelihood
from pipespec.api.server.grammars import wanted_format
from pipespec.api.server.sampling import logprobs_of, sampling_of


class CompletionExchange:
    """A request to ``/v1/completions``, see :class:`pipespec.api.server.conversations.Exchange`."""

    def __init__(self, model: Model, body: Fields) -> None:
        model.check_name(body)
        self._model, self._id, self._created = model, new_id("cmpl-"), now()
        self.streams = body.flag("stream", False)
        self._has_usage = body.object("stream_options").flag("include_usage", False)
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

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(index, self._echo(answer.done.prompt) + answer.content, answer.done.reason)
            | {"logprobs": self._logprobs(answer.done)}
            for index, answer in enumerate(answers)
        ]
        usage = usage_of([answer.done for answer in answers], self.ask.sampling.choices)
        return self._body(choices) | {"usage": usage}

    async def events(self, found: AsyncIterator[Any]) -> AsyncIterator[str]:
        dones: list[Done] = []
        begun: set[int] = set()
        async for event in found:
            if event.index not in begun:
                begun.add(event.index)
                if text := self._echo(self.ask.prompts[event.index // self.ask.sampling.choices]):
                    yield line(self._body([self._choice(event.index, text)]))
            if isinstance(event, Delta):
                yield line(self._body([self._choice(event.index, event.piece.text)]))
            else:
                dones.append(event)
                last = self._choice(event.index, "", event.reason) | {"logprobs": self._logprobs(event)}
                yield line(self._body([last]))
        if self._has_usage:
            yield line(self._body([]) | {"usage": usage_of(dones, self.ask.sampling.choices)})
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
            "text_offset": _offsets(tokens),
        }


def _offsets(tokens: list[str]) -> list[int]:
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return offsets
