"""Generation: runs the texts of one request on the pipeline, and turns their tokens and log-probabilities into pieces of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pipespec.api.output import own_report
from pipespec.api.server.dialects import PLAIN, AnswerParser, Piece, StopStrings, ToolCall
from pipespec.api.server.fields import RequestError
from pipespec.api.server.grammars import Grammars
from pipespec.api.server.jobs import Job, Turn, Turns
from pipespec.api.server.metrics import ServerMetrics
from pipespec.api.server.prompts import Prompts
from pipespec.api.server.sampling import Sampling, shortened
from pipespec.api.text import TextStream
from pipespec.errors import DoesNotFit
from pipespec.models.compat import new_cache
from pipespec.process.progress import reading_noted

CHUNK = 128
"""Tokens of a prompt that are read on a CPU before another request has a turn. More of them are not read faster there."""

_INPUT_ERRORS = (ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Ask:
    """What a request asks for.

    Attributes:
        prompts: Token ids. Each has ``sampling.choices`` texts.
        parser: Makes what tells thoughts and calls apart in one text.
        grammar: What constrains each text, compiled; None: nothing.
        logprobs: How many of the likeliest tokens are wanted at each position; None: no log-probabilities.
        echoes: Whether those of the prompts are wanted, too.
    """

    prompts: list[list[int]]
    sampling: Sampling
    parser: Callable[[], AnswerParser] = lambda: AnswerParser(PLAIN, finds_calls=False, finds_thoughts=False)
    grammar: Any = None
    logprobs: int | None = None
    echoes: bool = False


@dataclass(frozen=True)
class Delta:
    """Further pieces of the text of this number."""

    index: int
    piece: Piece


@dataclass(frozen=True)
class Done:
    """The end of a text.

    Attributes:
        index: Its number: those of the first prompt come first.
        reason: ``"stop"`` or ``"length"``.
        prompt: Token ids.
        tokens: Those that were generated.
        cached: Tokens of the prompt that were not read again.
        likelihoods: Of the generated tokens; None where they were not asked for.
        prompt_likelihoods: Likewise, of the prompt.
        stop_string: The one that has ended the text; None: none has.
    """

    index: int
    reason: str
    prompt: list[int]
    tokens: list[int]
    cached: int
    likelihoods: Likelihoods | None = None
    prompt_likelihoods: Likelihoods | None = None
    stop_string: str | None = None


@dataclass
class Answer:
    """One complete text, told apart."""

    content: str = ""
    thoughts: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    done: Done = field(default_factory=lambda: Done(0, "stop", [], [], 0))

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        if piece.kind == "call":
            self.calls += piece.calls
        elif piece.kind == "thought":
            self.thoughts += piece.text
        else:
            self.content += piece.text


async def collected(events: AsyncIterator[Any], count: int) -> list[Answer]:
    """The complete texts of a job that has ``count`` of them."""
    answers = [Answer() for _ in range(count)]
    async for event in events:
        if isinstance(event, Delta):
            answers[event.index].add(event.piece)
        else:
            answers[event.index].done = event
    return answers


class Generation:
    """Runs requests. Each method runs in a job's thread."""

    def __init__(self, pipe: Any, prompts: Prompts, metrics: ServerMetrics, turns: Turns) -> None:
        self._pipe, self._prompts, self._metrics, self._turns = pipe, prompts, metrics, turns

    def run(self, job: Job, ask: Ask) -> None:
        """Generate all texts of a request, one after the other, and post their events."""
        with self._metrics.request() as ending, self._turns.taken() as turn:
            reasons = [
                self._text(job, turn, ask, place * ask.sampling.choices + choice, choice)
                for place in range(len(ask.prompts))
                for choice in range(ask.sampling.choices)
            ]
            ending.reason = reasons[-1]

    def _text(self, job: Job, turn: Turn, ask: Ask, index: int, choice: int) -> str:
        prompt = ask.prompts[index // ask.sampling.choices]
        limit = self._prompts.limit
        sampling = shortened(ask.sampling, None if limit is None else limit - len(prompt))
        writer = _Writer(job, turn, index, ask.parser(), self._prompts.shown, sampling)

        def pause(done: int, total: int, is_target: bool) -> None:
            if is_target:
                job.check()
            turn.step()

        scored = None
        if ask.echoes and ask.logprobs is not None:
            scored = prompt_likelihoods(self._pipe.target, prompt, ask.logprobs, CHUNK, lambda: pause(0, 0, True))
        if sampling.most < 1:
            job.post(done := Done(index, "length", prompt, [], 0, None, scored))
            return done.reason
        options = sampling.of_choice(choice)
        if self._pipe.target.device.type == "cpu":
            options = options | {"prefill_chunk_size": CHUNK}
        if ask.grammar is not None:
            options = options | {"grammar": Grammars.matcher(ask.grammar)}
        if ask.logprobs is not None:
            options = options | {"logprobs": ask.logprobs, "return_dict_in_generate": True, "use_cache": True}
        if sampling.stops:
            options = options | {"stopping_criteria": [writer.has_stopped]}
        ids = torch.tensor([prompt], dtype=torch.long, device=self._pipe.target.device)
        with reading_noted(pause), _errors_told(writer, sampling.source):
            output = self._pipe.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.most,
                streamer=writer,
                **options,
            )
        report = own_report.get()
        if report is not None:
            self._metrics.note_call(report, len(prompt), job.since)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        tokens = sequences[0, len(prompt) :].tolist()
        likelihoods = None if ask.logprobs is None else likelihoods_of(output.logprobs, tokens)
        reason = writer.reason(tokens)
        cached = report.prompt_tokens_reused if report else 0
        job.post(Done(index, reason, prompt, tokens, cached, likelihoods, scored, writer.stop_string))
        return reason


@contextmanager
def _errors_told(writer: _Writer, source: str | None) -> Iterator[None]:
    """What a call raises, as the error of a request: the request's own fault, in the field ``source``, only before the prompt is read."""
    try:
        yield
    except (DoesNotFit, MemoryError) as error:
        raise RequestError(f"the memory does not suffice now: {error}", status=503, code="out_of_memory") from error
    except _INPUT_ERRORS as error:
        if writer.has_begun:
            raise
        raise RequestError(f"{source}: {error}" if source else str(error), source) from error


class _Writer:
    """The streamer of one text: decodes its tokens, cuts it before a stop string, and posts its pieces."""

    takes_blocks = True

    def __init__(
        self,
        job: Job,
        turn: Turn,
        index: int,
        parser: AnswerParser,
        shown: Callable[[Sequence[int]], str],
        sampling: Sampling,
    ) -> None:
        self._job, self._turn, self._index, self._parser, self._shown = job, turn, index, parser, shown
        self._stops, self._ends = StopStrings(sampling.stops), set(sampling.ends)
        self._stop_strings = sampling.stops
        # As many tokens as a stop string can have, and the one before.
        self._tail = max((len(stop.encode()) for stop in sampling.stops), default=0) + 1
        self._text = TextStream(shown, lambda text, drafted: self._write(text))
        self._prompt_length = 0
        self.has_begun = False
        """Whether the call has taken its arguments."""
        self.stop_string: str | None = None
        """The one that has ended the text."""

    def has_stopped(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """A stopping criterion: whether a stop string is complete. It may be anywhere in the last token."""
        begin = max(self._prompt_length, ids.shape[1] - self._tail)
        text = self._shown(ids[0, begin:].tolist())
        self.stop_string = next((stop for stop in self._stop_strings if stop in text), None)
        return torch.tensor([self.stop_string is not None], device=ids.device)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then the tokens of each step. Raises what has stopped the job."""
        if not self.has_begun:
            self.has_begun, self._prompt_length = True, value.shape[-1]
            self._text.put(value)
        else:
            tokens = value.flatten()
            if int(tokens[-1]) in self._ends:
                tokens = tokens[:-1]
            if len(tokens):
                self._text.put(tokens)
        self._job.check()
        self._turn.step()

    def end(self) -> None:
        """Post what was held back."""
        self._text.end()
        self._post(self._parser.feed(self._stops.end()))
        self._post(self._parser.end())

    def reason(self, tokens: list[int]) -> str:
        """Why the text has ended."""
        has_ended = bool(tokens) and tokens[-1] in self._ends
        return "stop" if has_ended or self.stop_string is not None else "length"

    def _write(self, text: str) -> None:
        self._post(self._parser.feed(self._stops.feed(text)))

    def _post(self, pieces: Iterator[Piece]) -> None:
        for piece in pieces:
            self._job.post(Delta(self._index, piece))


LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Likelihood(NamedTuple):
    """Of one token: its log-probability (None: nothing comes before it), and the likeliest tokens at its place with theirs."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


Likelihoods = list[Likelihood]


def likelihoods_of(found: Any, tokens: list[int]) -> Likelihoods:
    """Of generated ``tokens``, by the :class:`pipespec.api.output.Logprobs` of their call."""
    chosen, ids, values = found.chosen[0].tolist(), found.top_ids[0].tolist(), found.top[0].tolist()
    return [
        Likelihood(
            token, _finite(chosen[n]), [(i, _finite(v)) for i, v in zip(ids[n], values[n], strict=True) if i >= 0]
        )
        for n, token in enumerate(tokens)
    ]


def _finite(value: float) -> float:
    return max(value, LOWEST)


@torch.no_grad()
def prompt_likelihoods(model: Any, prompt: list[int], top: int, chunk: int, pause: Callable[[], None]) -> Likelihoods:
    """Of the tokens of a prompt, by forwards of the target's own modules.

    Args:
        top: How many of the likeliest tokens are wanted at each place.
        chunk: Tokens per forward.
        pause: Called before each one.
    """
    ids = torch.tensor([prompt], dtype=torch.long, device=model.device)
    found, cache = [Likelihood(prompt[0], None, [])], new_cache(model)
    for begin in range(0, len(prompt) - 1, chunk):
        pause()
        end = min(begin + chunk, len(prompt) - 1)
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
        scores = output.logits[0].float().log_softmax(-1)
        chosen = scores.gather(1, ids[0, begin + 1 : end + 1, None])[:, 0].tolist()
        values, places = (x.tolist() for x in scores.topk(max(top, 1)))
        for n, token in enumerate(prompt[begin + 1 : end + 1]):
            pairs = [(i, _finite(v)) for i, v in zip(places[n], values[n], strict=True)][:top]
            found.append(Likelihood(token, _finite(chosen[n]), pairs))
    return found
