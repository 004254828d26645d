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
another text); stages sleep on semaphores instead of polling; every wait ends when the text is complete or a stage fails; every token is
checked for the end of the text.

:class:`Lockstep`: the stages take turns in the caller's process. The smallest draft decodes L - 1 tokens, each middle stage verifies once and then
decodes until it is L - 1 tokens ahead, the target verifies, and all others roll back to the target.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from transformers import DynamicCache, PreTrainedModel

WIDEST = 99
"""Drafts of one verification."""


class BaselineStage:
    """A stage: its model, its tokens behind the prompt, and its KV cache.

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
        """Feed ``tokens`` and return the argmax behind each of the last ``keep``."""
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


def end_of(text: Sequence[int], most: int, eos: Sequence[int]) -> int | None:
    """The length of the complete text, which ends with the first end token or at ``most``; None if it is incomplete."""
    for i, token in enumerate(text[:most]):
        if token in eos:
            return i + 1
    return most if len(text) >= most else None


class Lockstep:
    """Stages that take turns; ``models``: the target last. ``generate`` returns the new tokens."""

    def __init__(self, models: Sequence[PreTrainedModel], lookahead: int) -> None:
        if lookahead < 1:
            raise ValueError(f"lookahead must be at least 1, not {lookahead}")
        self.models, self.lookahead = list(models), lookahead
        self.stages: list[BaselineStage] = []

    def generate(self, prompt: Sequence[int], most: int, eos: Sequence[int] = ()) -> list[int]:
        stages = self.stages = [BaselineStage(model) for model in self.models]
        for stage in stages:
            stage.begin(prompt)
        ahead = self.lookahead - 1
        target = stages[-1]
        while (end := end_of(target.out, most, eos)) is None:
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


class _Board:
    """Shared memory of the stages: texts, requests and answers, under one lock. Every change wakes all sleeping stages.

    ``REQUESTS[i]`` counts requests of stage i + 1 to stage i, ``ANSWERS[i]`` the answers; ``CALL`` counts calls, ``DONE`` complete ones.
    """

    def __init__(self, stages: int, capacity: int, context: Any) -> None:
        self.stages, self.capacity = stages, capacity
        self.lock = context.Lock()
        # One semaphore per stage: a condition would wait without an end for a sleeping process that was killed.
        self.bells = [context.Semaphore(0) for _ in range(stages)]
        self.words = context.RawArray(ctypes.c_int64, 7 + 6 * stages)
        # The prompt lies behind the texts of the stages.
        self.texts = context.RawArray(ctypes.c_int64, capacity * (stages + 1))

    CALL, DONE, CLOSING, FAILED, PROMPT, MOST, LOOKAHEAD = range(7)

    def notify(self) -> None:
        """Wake all sleeping stages."""
        for bell in self.bells:
            bell.release()

    def sleep(self, stage: int, seconds: float) -> bool:
        """Release the lock and sleep until a notification, or one that came before; False after ``seconds``. Called under the lock."""
        self.lock.release()
        rung: bool = self.bells[stage].acquire(timeout=seconds)
        while rung and self.bells[stage].acquire(block=False):
            pass
        self.lock.acquire()
        return rung

    def _word(self, kind: int, stage: int) -> int:
        return 7 + kind * self.stages + stage

    def get(self, kind: int, stage: int) -> int:
        return self.words[self._word(kind, stage)]

    def add(self, kind: int, stage: int) -> None:
        self.words[self._word(kind, stage)] += 1
        self.notify()

    REQUESTS, ANSWERS, LENGTHS, IDLE, STEPS, ACCEPTED = range(6)

    def publish(self, stage: int, text: Sequence[int]) -> None:
        begin = stage * self.capacity
        self.texts[begin : begin + len(text)] = text
        self.words[self._word(self.LENGTHS, stage)] = len(text)
        self.notify()

    def read(self, stage: int) -> list[int]:
        begin = stage * self.capacity
        return self.texts[begin : begin + self.get(self.LENGTHS, stage)]

    def put(self, kind: int, stage: int, value: int) -> None:
        self.words[self._word(kind, stage)] = value


class _Over(Exception):
    """The call has ended."""


class _Player:
    """A stage of the asynchronous chain.

    ``check`` is called from time to time by a sleeping stage; it raises where no other stage can answer any more.
    """

    def __init__(self, board: _Board, index: int, model: PreTrainedModel, check: Callable[[], None]) -> None:
        self.board, self.index, self.text = board, index, BaselineStage(model)
        self.last = index == board.stages - 1
        self.check = check

    @contextmanager
    def _until(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock once ``condition`` is true. Raises ``_Over`` if the call ends before."""
        board = self.board
        with board.lock:
            while not (self._over() or condition()):
                if not board.sleep(self.index, 0.5):
                    self.check()
            if self._over():
                raise _Over
            yield

    def _over(self) -> bool:
        words = self.board.words
        return bool(words[_Board.DONE] >= words[_Board.CALL] or words[_Board.CLOSING] or words[_Board.FAILED])

    def play(self, eos: Sequence[int] = ()) -> list[int]:
        """Run the current call; returns the tokens of the target, and an empty list for drafts."""
        board, i = self.board, self.index
        with board.lock:
            begin = board.stages * board.capacity
            prompt = board.texts[begin : begin + board.words[_Board.PROMPT]]
            most, lookahead = board.words[_Board.MOST], board.words[_Board.LOOKAHEAD]
        # The downstream stages cannot use more tokens.
        limit = most + (board.stages - i) * (lookahead + 2)
        try:
            self.text.begin(prompt)
            self._publish()
            while True:
                if self.last and (end := end_of(self.text.out, most, eos)) is not None:
                    with board.lock:
                        board.words[_Board.DONE] = board.words[_Board.CALL]
                        board.notify()
                    return self.text.out[:end]
                self._turn(lookahead, limit)
        except _Over:
            return []
        finally:
            with board.lock:
                board.put(_Board.STEPS, i, self.text.steps)
                board.put(_Board.ACCEPTED, i, self.text.accepted)

    def _has_request(self) -> bool:
        board, i = self.board, self.index
        return not self.last and board.get(_Board.REQUESTS, i) > board.get(_Board.ANSWERS, i)

    def _turn(self, lookahead: int, limit: int) -> None:
        board, i, out = self.board, self.index, self.text.out
        first = i == 0

        def ready() -> bool:
            return len(out) < limit and (first or board.get(_Board.LENGTHS, i - 1) - len(out) >= lookahead - 1)

        with self._until(lambda: self._has_request() or ready()):
            requested = self._has_request()
            seen = board.read(i + 1) if requested else [] if first else board.read(i - 1)
        if requested:
            self.text.roll_back(seen)
            self._publish(answer=True)
        elif first:
            self.text.step()
            self._publish()
        else:
            self.text.choose(seen, limit - len(out))
            self._publish()
        if not first:
            self._request()

    def _publish(self, answer: bool = False) -> None:
        with self._until(lambda: True):
            self.board.publish(self.index, self.text.out)
            if answer:
                self.board.add(_Board.ANSWERS, self.index)

    def _request(self) -> None:
        """Request a comparison from the upstream stage and wait for the answer."""
        board, upstream = self.board, self.index - 1
        with self._until(lambda: True):
            board.add(_Board.REQUESTS, upstream)
        with self._until(lambda: board.get(_Board.ANSWERS, upstream) == board.get(_Board.REQUESTS, upstream)):
            pass


def _orphaned() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit


def serve(board: _Board, index: int, model: PreTrainedModel, threads: int | None) -> None:
    """Main function of a draft's process (or thread)."""
    if threads is not None:
        torch.set_num_threads(threads)
    player, call = _Player(board, index, model, _orphaned), 0
    try:
        while True:
            with board.lock:
                board.put(_Board.IDLE, index, 1)
                board.notify()
                while not (board.words[_Board.CALL] > call or board.words[_Board.CLOSING]):
                    if not board.sleep(index, 1.0):
                        _orphaned()
                if board.words[_Board.CLOSING]:
                    return
                call = board.words[_Board.CALL]
            player.play()
    except Exception:
        with board.lock:
            board.words[_Board.FAILED] = 1 + index
            board.notify()
        raise


class Asynchronous:
    """The asynchronous chain; it holds processes until ``close``. ``generate`` returns the new tokens, or raises ``StageFailed``.

    Args:
        models: The target last.
        lookahead: Minimum lookahead.
        most_tokens: Capacity for the prompt, and for a text with the tokens drafted beyond it.
        threads: CPU threads of each draft process; None: torch's default.
        start: Makes the process of a draft; tests use threads.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        lookahead: int,
        most_tokens: int = 8192,
        threads: int | None = None,
        start: Callable[..., Any] | None = None,
    ) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead must not be negative, not {lookahead}")
        self.models, self.lookahead = list(models), lookahead
        context = multiprocessing.get_context("spawn")
        self._board = _Board(len(models), most_tokens, context)
        start = start or (lambda *arguments: context.Process(target=serve, args=arguments, daemon=True))
        self._drafts = [start(self._board, i, model, threads) for i, model in enumerate(self.models[:-1])]
        for draft in self._drafts:
            draft.start()
        self._player = _Player(self._board, len(models) - 1, self.models[-1], self._check)
        try:
            self._wait(self._all_idle)
        except BaseException:
            self.close()
            raise

    def _all_idle(self) -> bool:
        return all(self._board.get(_Board.IDLE, i) for i in range(len(self._drafts)))

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Sleep until ``condition`` is true; raises ``StageFailed`` if a draft fails."""
        with self._board.lock:
            while not condition():
                self._check()
                self._board.sleep(self._board.stages - 1, 0.2)

    def _check(self) -> None:
        dead = [i for i, draft in enumerate(self._drafts) if not draft.is_alive()]
        failed = self._board.words[_Board.FAILED]
        if dead or failed:
            raise StageFailed(f"stage {failed - 1 if failed else dead[0]} failed; its own output says why")

    def generate(self, prompt: Sequence[int], most: int, eos: Sequence[int] = ()) -> list[int]:
        board = self._board
        if max(len(prompt), most + len(self.models) * (self.lookahead + 2) + WIDEST) > board.capacity:
            raise ValueError(
                f"{len(prompt)} tokens of prompt and {most} new ones do not fit a capacity of {board.capacity}"
            )
        self._wait(self._all_idle)
        with board.lock:
            self._check()
            begin = board.stages * board.capacity
            board.texts[begin : begin + len(prompt)] = list(prompt)
            board.words[_Board.PROMPT], board.words[_Board.MOST] = len(prompt), most
            board.words[_Board.LOOKAHEAD] = self.lookahead
            for stage in range(board.stages):
                for kind in (_Board.REQUESTS, _Board.ANSWERS, _Board.LENGTHS, _Board.IDLE):
                    board.put(kind, stage, 0)
            board.words[_Board.CALL] += 1
            board.notify()
        out = self._player.play(eos)
        self._wait(self._all_idle)  # otherwise a draft could confuse the next call with this one
        return out

    @property
    def target(self) -> BaselineStage:
        """The last stage, which runs in this process."""
        return self._player.text

    def counts(self) -> list[tuple[int, int, int]]:
        """Per stage: steps, drafted (the target's only), accepted."""
        board = self._board
        drafted = [0] * (board.stages - 1) + [self._player.text.drafted]
        return [(board.get(_Board.STEPS, i), drafted[i], board.get(_Board.ACCEPTED, i)) for i in range(board.stages)]

    def close(self) -> None:
        with self._board.lock:
            self._board.words[_Board.CLOSING] = 1
            self._board.notify()
        deadline = time.monotonic() + 10
        for draft in self._drafts:
            draft.join(max(0.0, deadline - time.monotonic()))
            if draft.is_alive() and hasattr(draft, "kill"):
                draft.kill()
                draft.join()
