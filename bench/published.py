"""The two published schedules (PipeSpec, arXiv 2505.01572), implemented again as baselines: greedy, one text at a time.

Both follow the published rules without the faults of the published code. A stage publishes its text as a whole; its neighbours compare it with
their own:

* **decode**: feed the tokens that the cache lacks, append the argmax;
* **verify**: feed at most 99 tokens of the upstream text beyond the own text, keep those that agree and append one own token. A stage
  verifies only where its text is a prefix of the upstream text; otherwise it decodes;
* **roll back**: where the own text differs from the downstream text, replace it by that text.

``lookahead`` L is the minimum: a stage verifies when a step could append L tokens (the upstream stage is L - 1 ahead).

:class:`Asynchronous`: one process per stage; the caller's runs the target. After *every* step a stage requests a comparison from its upstream stage
and sleeps until the answer, which comes after the upstream stage's running forward. Corrections move stage by stage, and stage 0 drafts without
bound. Differences from the original: a rolled-back cache is fed all the tokens that it lacks (the original feeds only the last one, so it drafts for
another text); stages sleep on pipes instead of polling; every wait ends when the text is complete or a stage fails; every token is
checked for the end of the text.

:class:`Lockstep`: the stages take turns in the caller's process. The smallest draft decodes L - 1 tokens, each middle stage verifies once and then
decodes until it is L - 1 tokens ahead, the target verifies, and all others roll back to the target.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from transformers import DynamicCache, PreTrainedModel

WIDEST = 99
"""Drafts of one verification."""


class BaselineStage:
    """A stage: its model, its tokens after the prompt, and its KV cache.

    ``steps`` counts forwards after the prompt's, ``drafted`` and ``accepted`` draft tokens, ``fed`` tokens, ``histogram`` steps by accepted draft
    tokens. ``commits``: ``(time.perf_counter(), new tokens until then)`` of the prompt's forward and of each step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int]) -> None:
        """Feed the prompt and append the first token."""
        self.prompt, self.out = list(prompt), list[int]()
        self.steps = self.drafted = self.accepted = self.fed = 0
        self._cache, self._held = DynamicCache(config=self.model.config), 0
        self.histogram = Counter[int]()
        self.out.append(self._feed(self.prompt)[-1])
        self.commits = [(time.perf_counter(), 1)]

    def _feed(self, tokens: list[int], keep: int = 1) -> list[int]:
        """Feed ``tokens`` and return the argmax after each of the last ``keep``."""
        ids = torch.tensor([tokens], device=self.model.device)
        logits = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep).logits
        self._held += len(tokens)
        self.fed += len(tokens)
        return logits[0].argmax(-1).tolist()

    @torch.inference_mode()
    def step(self, drafts: Sequence[int] = ()) -> None:
        """Verify ``drafts``; without any, decode."""
        missing = self.out[self._held - len(self.prompt) :]
        own = self._feed([*missing, *drafts], len(drafts) + 1)
        agreeing = 0
        while agreeing < len(drafts) and own[agreeing] == drafts[agreeing]:
            agreeing += 1
        self.out += own[: agreeing + 1]
        self.commits.append((time.perf_counter(), len(self.out)))
        self.steps += 1
        self.histogram[agreeing] += 1
        self.drafted += len(drafts)
        self.accepted += agreeing
        self._crop(len(self.prompt) + len(self.out) - 1)

    def choose(self, upstream: Sequence[int], limit: int) -> None:
        """Verify the upstream tokens beyond the own text where that text is a prefix of ``upstream``; otherwise decode."""
        own = len(self.out)
        follows = list(upstream[:own]) == self.out
        self.step(upstream[own : own + min(WIDEST, limit - 1)] if follows else ())

    def roll_back(self, downstream: Sequence[int]) -> None:
        """Replace the own text by the downstream one if they differ; the cache keeps the common prefix."""
        for i, (mine, right) in enumerate(zip(self.out, downstream, strict=False)):
            if mine != right:
                self.out = list(downstream)
                self._crop(len(self.prompt) + i)
                return

    def _crop(self, length: int) -> None:
        if length < self._held:
            self._cache.crop(length - self._held)  # a negative value removes tokens
            self._held = length


def end_of(text: Sequence[int], new_tokens: int, eos: Sequence[int]) -> int | None:
    """The length of the complete text, which ends with the first end token or at ``new_tokens``; None if it is incomplete."""
    for i, token in enumerate(text[:new_tokens]):
        if token in eos:
            return i + 1
    return new_tokens if len(text) >= new_tokens else None


class Lockstep:
    """Stages that take turns; ``models``: the target last. ``generate`` returns the new tokens."""

    def __init__(self, models: Sequence[PreTrainedModel], lookahead: int) -> None:
        if lookahead < 1:
            raise ValueError(f"lookahead must be at least 1, not {lookahead}")
        self.models, self.lookahead = list(models), lookahead
        self.stages: list[BaselineStage] = []

    def generate(self, prompt: Sequence[int], new_tokens: int, eos: Sequence[int] = ()) -> list[int]:
        stages = self.stages = [BaselineStage(model) for model in self.models]
        for stage in stages:
            stage.begin(prompt)
        ahead = self.lookahead - 1
        target = stages[-1]
        while (end := end_of(target.out, new_tokens, eos)) is None:
            while len(stages) > 1 and len(stages[0].out) - len(stages[1].out) < ahead:
                stages[0].step()
            for i in range(1, len(stages) - 1):
                stages[i].choose(stages[i - 1].out, WIDEST + 1)
                while len(stages[i].out) - len(stages[i + 1].out) < ahead:
                    stages[i].step()
            target.choose(stages[-2].out if len(stages) > 1 else (), WIDEST + 1)
            for stage in stages[:-1]:
                stage.roll_back(target.out)
        return target.out[:end]

    @property
    def target(self) -> BaselineStage:
        """The last stage of the last call."""
        return self.stages[-1]

    def counts(self) -> list[tuple[int, int, int]]:
        """Per stage: steps, drafted, accepted."""
        return [(s.steps, s.drafted, s.accepted) for s in self.stages]

    def close(self) -> None:
        pass


class StageFailed(RuntimeError):
    """A stage of :class:`Asynchronous` failed or died."""


class _Over(Exception):
    """The call has ended."""


OVER, CLOSE = "over", "close"
"""Messages to the upstream stage: the call has ended; the process shall end."""


class _Player:
    """A stage of the asynchronous chain, with pipes to its neighbours (None where there is none).

    Upstream go a call (:meth:`play`'s arguments), requests (the own text), ``OVER`` and ``CLOSE``. Downstream go pieces of the own text (whether they answer
    a request, their position, their tokens), and at the end of a call the counts. A neighbour that dies closes its pipe, so no wait is without end.
    """

    def __init__(self, model: PreTrainedModel, up: Connection | None, down: Connection | None) -> None:
        self.text, self.up, self.down = BaselineStage(model), up, down

    def play(
        self,
        prompt: list[int],
        limit: int,
        lookahead: int,
        is_complete: Callable[[list[int]], bool] = lambda text: False,
    ) -> list[tuple[int, int, int]]:
        """Run a call until the text ``is_complete``, or until the downstream stage ends it.

        Returns:
            Steps, drafted and accepted of each stage up to this one.
        """
        if self.up is not None:
            # The downstream stages cannot use more tokens.
            self.up.send((prompt, limit + lookahead + 2, lookahead))
        self._upstream: list[int] = []
        self._request: list[int] | None = None
        self._counts: list[tuple[int, int, int]] | None = None
        self._is_answered = False
        text = self.text
        try:
            text.begin(prompt)
            self._publish(0)
            while not is_complete(text.out):
                self._turn(limit, lookahead)
        except _Over:
            pass
        counts = []
        if self.up is not None:
            self.up.send(OVER)
            self._receive_until(lambda: self._counts is not None)
            counts += self._counts or ()
        counts.append((text.steps, text.drafted, text.accepted))
        if self.down is not None:
            self.down.send(counts)
        return counts

    def _turn(self, limit: int, lookahead: int) -> None:
        """Answer a request, or take a step; then request a comparison from the upstream stage and wait for the answer."""
        own = len(self.text.out)

        def can_step() -> bool:
            return own < limit and (self.up is None or len(self._upstream) - own >= lookahead - 1)

        self._receive_until(lambda: self._request is not None or can_step())
        if self._request is not None:
            self.text.roll_back(self._request)
            self._request = None
            self._publish(0, answers=True)
        else:
            self.text.choose(self._upstream, limit - own)
            self._publish(own)
        if self.up is not None:
            self._is_answered = False
            self.up.send(self.text.out)
            self._receive_until(lambda: self._is_answered)

    def _publish(self, begin: int, answers: bool = False) -> None:
        """Send the own text from ``begin`` on."""
        if self.down is not None:
            self.down.send((answers, begin, self.text.out[begin:]))

    def _receive_until(self, condition: Callable[[], bool]) -> None:
        """Take the messages that are there, and further ones until ``condition`` is true. Raises ``_Over`` if the call ends before."""
        sides = [side for side in (self.up, self.down) if side is not None]
        while (found := wait(sides, 0)) or not condition():
            for side in found or wait(sides):
                assert isinstance(side, Connection)
                self._take(side.recv(), side is self.up)

    def _take(self, message: Any, is_from_upstream: bool) -> None:
        if message == CLOSE:
            raise EOFError
        if message == OVER:
            raise _Over
        if not is_from_upstream:
            self._request = message
        elif isinstance(message, list):
            self._counts = message
        else:
            answers, begin, tokens = message
            self._upstream[begin:] = tokens
            self._is_answered = self._is_answered or answers


def serve(model: PreTrainedModel, up: Connection | None, down: Connection, threads: int | None) -> None:
    """Main function of a draft's process (or thread)."""
    if threads is not None:
        torch.set_num_threads(threads)
    player = _Player(model, up, down)
    with suppress(EOFError, ConnectionError):  # also where a neighbour has died
        while (call := down.recv()) != CLOSE:
            player.play(*call)
    if up is not None:
        with suppress(ConnectionError):
            up.send(CLOSE)


class Asynchronous:
    """The asynchronous chain; it holds processes until ``close``. ``generate`` returns the new tokens, or raises ``StageFailed``.

    Args:
        models: The target last.
        lookahead: Minimum lookahead.
        threads: CPU threads of each draft process; None: torch's default.
        start: Makes the process of a draft; tests use threads.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        lookahead: int,
        threads: int | None = None,
        start: Callable[..., Any] | None = None,
    ) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead must not be negative, not {lookahead}")
        self.lookahead = lookahead
        context = multiprocessing.get_context("spawn")
        start = start or (lambda *arguments: context.Process(target=serve, args=arguments, daemon=True))
        self._drafts, up = list[Any](), None
        for model in models[:-1]:
            next_up, down = context.Pipe()
            self._drafts.append(start(model, up, down, threads))
            self._drafts[-1].start()  # a process that has started keeps no copy of its pipes here
            up = next_up
        self._player = _Player(models[-1], up, None)
        self._counts: list[tuple[int, int, int]] = []

    def generate(self, prompt: Sequence[int], new_tokens: int, eos: Sequence[int] = ()) -> list[int]:
        def is_complete(text: list[int]) -> bool:
            return end_of(text, new_tokens, eos) is not None

        limit = new_tokens + self.lookahead + 2
        try:
            self._counts = self._player.play(list(prompt), limit, self.lookahead, is_complete)
        except (EOFError, ConnectionError) as error:
            self.close()
            failed = next((i for i, draft in enumerate(self._drafts) if draft.exitcode), 0)
            raise StageFailed(f"stage {failed} failed; its own output says why") from error
        text = self._player.text.out
        return text[: end_of(text, new_tokens, eos)]

    @property
    def target(self) -> BaselineStage:
        """The last stage, which runs in this process."""
        return self._player.text

    def counts(self) -> list[tuple[int, int, int]]:
        """Per stage: steps, drafted, accepted."""
        return self._counts

    def close(self) -> None:
        if self._player.up is not None:
            with suppress(ConnectionError):
                self._player.up.send(CLOSE)
        deadline = time.monotonic() + 10
        for draft in reversed(self._drafts):
            draft.join(max(0.0, deadline - time.monotonic()))
            if draft.is_alive() and hasattr(draft, "kill"):
                draft.kill()
                draft.join()
