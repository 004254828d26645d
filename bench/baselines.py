"""The published system's two schedules (PipeSpec, arXiv 2505.01572), written anew as baselines; greedy, one text.

Both hold to its rules, faults of the engineering left out. A stage's text is published as a whole; a stage compares it with its own:

* **decode**: feed what the cache lacks, append the argmax;
* **verify**: feed as many as 99 tokens of the upstream's text beyond one's own, keep those that agree and one of one's own. Only where
  one's own text is the beginning of the upstream's; otherwise decode;
* **roll back** to the downstream's text where the two differ: take it over as it is. Where they agree, keep one's own.

``lookahead`` L is the least window: a stage looks at drafts when a step could append L tokens (the upstream is L - 1 ahead).

:class:`Asynchronous`: a process per stage (the caller's is the target's). After *every* step a stage asks its upstream to compare, and sleeps until the
answer comes, which is behind the upstream's running forward; corrections go hop by hop; stage 0 drafts without bound. Different from the
original: a rolled-back cache is fed all the tokens that it lacks (there only the last, or one twice, so its drafts were of another text); stages sleep on
semaphores instead of polling; every wait ends when the text is complete or a stage fails; the end is looked for in every token.

:class:`Lockstep`: stages in turn, in the caller's process: the smallest drafts L - 1, each middle one verifies once and then decodes until it is L - 1
ahead, the target verifies, all others roll back to it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from transformers import DynamicCache, PreTrainedModel

WIDEST = 99
"""Drafts of one verification."""


class Text:
    """A stage's own tokens behind the prompt, its model and its keys and values.

    ``steps`` counts forwards behind the prompt's, ``drafted`` and ``accepted`` drafts, ``fed`` tokens.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt and say the first token."""
        self.prompt, self.out = list(prompt), list[int]()
        self.steps = self.drafted = self.accepted = self.fed = 0
        self._cache, self._held = DynamicCache(config=self.model.config), 0
        self.out.append(self._feed(self.prompt)[-1])

    def _feed(self, tokens: list[int], keep: int = 1) -> list[int]:
        """Argmaxes behind the last ``keep`` of ``tokens``, which the cache then holds."""
        ids = torch.tensor([tokens], device=self.model.device)
        logits = self.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep).logits
        self._held += len(tokens)
        self.fed += len(tokens)
        return logits[0].argmax(-1).tolist()

    @torch.inference_mode()
    def step(self, drafts: Sequence[int] = ()) -> None:
        """Verify ``drafts``; with none, decode."""
        missing = self.out[self._held - len(self.prompt) :]
        own = self._feed([*missing, *drafts], len(drafts) + 1)
        agreeing = 0
        while agreeing < len(drafts) and own[agreeing] == drafts[agreeing]:
            agreeing += 1
        self.out += own[: agreeing + 1]
        self.steps += 1
        self.drafted += len(drafts)
        self.accepted += agreeing
        self._crop(len(self.prompt) + len(self.out) - 1)

    def choose(self, upstream: Sequence[int], room: int) -> None:
        """One step: verify what the upstream's text has beyond this one, where this one is its beginning; otherwise decode."""
        own = len(self.out)
        follows = list(upstream[:own]) == self.out
        self.step(upstream[own : own + min(WIDEST, room - 1)] if follows else ())

    def roll_back(self, downstream: Sequence[int]) -> None:
        """Take over the downstream's text if it differs; the cache keeps what both begin with."""
        for i, (mine, right) in enumerate(zip(self.out, downstream, strict=False)):
            if mine != right:
                self.out = list(downstream)
                self._crop(len(self.prompt) + i)
                return

    def _crop(self, length: int) -> None:
        if length < self._held:
            self._cache.crop(length - self._held)  # negative: so many less
            self._held = length


def end_of(text: Sequence[int], most: int, eos: Sequence[int]) -> int | None:
    """The length at which ``text`` is complete: behind its first end token, or ``most``; None if it is not."""
    for i, token in enumerate(text[:most]):
        if token in eos:
            return i + 1
    return most if len(text) >= most else None


class Lockstep:
    """All stages in turn; ``models``: the target last. ``generate`` returns the new tokens."""

    def __init__(self, models: Sequence[PreTrainedModel], lookahead: int) -> None:
        if lookahead < 1:
            raise ValueError(f"lookahead must be at least 1, not {lookahead}")
        self.models, self.lookahead = list(models), lookahead
        self.stages: list[Text] = []

    def generate(self, prompt: Sequence[int], most: int, eos: Sequence[int] = ()) -> list[int]:
        stages = self.stages = [Text(model) for model in self.models]
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

    def counts(self) -> list[tuple[int, int, int]]:
        """Per stage: steps, drafted, accepted."""
        return [(s.steps, s.drafted, s.accepted) for s in self.stages]

    def close(self) -> None:
        pass


class StageFailed(RuntimeError):
    """A stage of :class:`Asynchronous` failed or died."""


class _Board:
    """What the stages share: texts, requests and answers, under one lock; whoever changes something wakes all who sleep.

    ``requests[i]``: of stage i + 1 to stage i, ``answers[i]`` the answers. ``call`` counts calls, ``done`` those that are complete.
    """

    def __init__(self, stages: int, room: int, context: Any) -> None:
        self.stages, self.room = stages, room
        self.lock = context.Lock()
        # One semaphore per stage instead of a condition, whose notify would wait for ever for a sleeper that was killed.
        self.bells = [context.Semaphore(0) for _ in range(stages)]
        self.words = context.RawArray(ctypes.c_int64, 7 + 6 * stages)
        self.texts = context.RawArray(ctypes.c_int64, room * (stages + 1))  # the prompt behind the stages'

    CALL, DONE, CLOSING, FAILED, PROMPT, MOST, LOOKAHEAD = range(7)

    def notify(self) -> None:
        """Wake all that sleep."""
        for bell in self.bells:
            bell.release()

    def sleep(self, stage: int, seconds: float) -> bool:
        """Under the lock, which is open meanwhile: until somebody notifies (before this call counts, too), or False when time is out."""
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
        begin = stage * self.room
        self.texts[begin : begin + len(text)] = text
        self.words[self._word(self.LENGTHS, stage)] = len(text)
        self.notify()

    def read(self, stage: int) -> list[int]:
        begin = stage * self.room
        return self.texts[begin : begin + self.get(self.LENGTHS, stage)]

    def put(self, kind: int, stage: int, value: int) -> None:
        self.words[self._word(kind, stage)] = value


class _Over(Exception):
    """The text is complete, or nobody wants it any more."""


class _Player:
    """A stage of the asynchronous chain, in whichever process."""

    def __init__(self, board: _Board, index: int, model: PreTrainedModel, check: Callable[[], None]) -> None:
        self.board, self.index, self.text = board, index, Text(model)
        self.last = index == board.stages - 1
        self.check = check  # called now and then by a stage that sleeps; raises where there is nobody left to wait for

    @contextmanager
    def _until(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Under the lock, as soon as ``condition`` holds. Raises ``_Over`` if the call ends before."""
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
        """Take part in the current call; the target's tokens where this is the target."""
        board, i = self.board, self.index
        with board.lock:
            begin = board.stages * board.room
            prompt = board.texts[begin : begin + board.words[_Board.PROMPT]]
            most, lookahead = board.words[_Board.MOST], board.words[_Board.LOOKAHEAD]
        # Nothing is wanted beyond: the furthest that the stages downstream can ask for, and a little.
        room = most + (board.stages - i) * (lookahead + 2)
        try:
            self.text.begin(prompt)
            self._publish()
            while True:
                if self.last and (end := end_of(self.text.out, most, eos)) is not None:
                    with board.lock:
                        board.words[_Board.DONE] = board.words[_Board.CALL]
                        board.notify()
                    return self.text.out[:end]
                self._turn(lookahead, room)
        except _Over:
            return []
        finally:
            with board.lock:
                board.put(_Board.STEPS, i, self.text.steps)
                board.put(_Board.ACCEPTED, i, self.text.accepted)

    def _asked(self) -> bool:
        board, i = self.board, self.index
        return not self.last and board.get(_Board.REQUESTS, i) > board.get(_Board.ANSWERS, i)

    def _turn(self, lookahead: int, room: int) -> None:
        board, i, out = self.board, self.index, self.text.out
        first = i == 0

        def ready() -> bool:
            return len(out) < room and (first or board.get(_Board.LENGTHS, i - 1) - len(out) >= lookahead - 1)

        with self._until(lambda: self._asked() or ready()):
            asked = self._asked()
            seen = board.read(i + 1) if asked else [] if first else board.read(i - 1)
        if asked:
            self.text.roll_back(seen)
            self._publish(answer=True)
        elif first:
            self.text.step()
            self._publish()
        else:
            self.text.choose(seen, room - len(out))
            self._publish()
        if not first:
            self._ask()

    def _publish(self, answer: bool = False) -> None:
        with self._until(lambda: True):
            self.board.publish(self.index, self.text.out)
            if answer:
                self.board.add(_Board.ANSWERS, self.index)

    def _ask(self) -> None:
        """Ask the upstream to compare itself with this stage, and wait until it has."""
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
    """A draft's process (or thread): one call after the other."""
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
    """The asynchronous chain; ``models``: the target last. ``generate`` returns the new tokens. Close it: it holds processes.

    ``most_room``: longest prompt, and longest text with some room, in tokens. ``threads``: of the drafts' processes (the cores are dealt out if None
    on a CPU). ``start``: runs a draft (tests: in a thread). ``StageFailed`` from ``generate`` if one fails or dies.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        lookahead: int,
        most_room: int = 8192,
        threads: int | None = None,
        start: Callable[..., Any] | None = None,
    ) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead must not be negative, not {lookahead}")
        self.models, self.lookahead = list(models), lookahead
        context = multiprocessing.get_context("spawn")
        self._board = _Board(len(models), most_room, context)
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
        """Sleep until ``condition`` holds, looking after the drafts meanwhile."""
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
        if max(len(prompt), most + len(self.models) * (self.lookahead + 2) + WIDEST) > board.room:
            raise ValueError(f"{len(prompt)} tokens of prompt and {most} new ones do not fit a room of {board.room}")
        self._wait(self._all_idle)
        with board.lock:
            self._check()
            begin = board.stages * board.room
            board.texts[begin : begin + len(prompt)] = list(prompt)
            board.words[_Board.PROMPT], board.words[_Board.MOST] = len(prompt), most
            board.words[_Board.LOOKAHEAD] = self.lookahead
            for stage in range(board.stages):
                for kind in (_Board.REQUESTS, _Board.ANSWERS, _Board.LENGTHS, _Board.IDLE):
                    board.put(kind, stage, 0)
            board.words[_Board.CALL] += 1
            board.notify()
        out = self._player.play(eos)
        self._wait(self._all_idle)  # else a draft could take the next call for this one
        return out

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
