"""Speed-up against the delay of the links, simulated: ``schedule="ranks"`` and SPD over ranks.

    python -m bench.latency                       print the speed-ups
    python -m bench.latency --docs docs           draw docs/how-to/latency.svg

Time is virtual, and the protocol is the engine's own. For ``schedule="ranks"`` each rank has a state block, on which the engine's ``plan()`` and
``commit()`` run, and the engine's outboxes and inboxes copy between the blocks; a message takes the delay. For SPD the engine's decode machine gives
columns, exits and flushes; a column takes the delay from rank to rank. Only the durations of forwards and the tokens are modelled: a draft token is
right with the acceptance rate, independently, and a text with a wrong token continues wrongly.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from bench.harness import markdown_table
from pipespec.config import WIDTH
from pipespec.drivers.ranks.wire import BODY
from pipespec.observe.plot import Panel, Series, chart
from pipespec.spd.machine import Machine
from pipespec_kernels.state import Action, StateBlock

DELAYS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
"""One-way delays, in steps of the target."""

ACCEPTANCE = 0.8
_IDS = 1000
_SEEDS = 4


class _Choices:
    """The target's text, and at which positions a draft chooses another token."""

    def __init__(self, tokens: int, acceptance: float, seed: int) -> None:
        draw = random.Random(seed)
        self.truth = [draw.randrange(_IDS) for _ in range(tokens)]
        self.right = [draw.random() < acceptance for _ in range(tokens)]

    def of_draft(self, position: int, is_true: bool) -> int:
        """The draft's token at ``position``. ``is_true``: the text before it is the target's."""
        return (self.truth[position] + (0 if is_true and self.right[position] else 1)) % _IDS


class _Rank:
    """A rank of a chain: its stage, its block, and what it sends to the others."""

    def __init__(self, stage: int, stages: int, step_s: float, lookahead: Sequence[int], choices: _Choices) -> None:
        self.stage, self.step_s, self._choices = stage, step_s, choices
        self.is_target, self.parked = stage == stages - 1, True
        limit = len(choices.truth)
        self.block = StateBlock.create(stages, 1, limit + 2)
        self.block.reset([1], [limit], choices.truth[:1], [])
        for i in range(stages):
            self.block.set_alive(i, True)
        self.block.start(1)
        upstream = lookahead[stage - 1] if stage else 0
        self._policy = (0 if self.is_target else lookahead[stage], min(upstream, WIDTH // 2))
        self._port = self.block.port(stage, WIDTH)
        self._text = [-1] * (limit + WIDTH)
        self._text[0] = choices.truth[0]
        self.steps = 0

    def connect(self, others: Sequence[_Rank]) -> None:
        self._boxes = {
            other.stage: (
                self.block.outbox([self.stage], tokens=True, counters=False, controls=self.is_target),
                other.block.inbox([self.stage], controls=self.is_target),
            )
            for other in others
        }

    def messages(self) -> dict[int, np.ndarray]:
        """What this rank has to send now, by the stage of the receiver."""
        out = {}
        for to, (outbox, _) in self._boxes.items():
            words = np.zeros(BODY, dtype=np.int32)
            count = outbox.fill(words.ctypes.data, BODY)
            if count:
                out[to] = words[:count]
        return out

    def deliver(self, to: int, words: np.ndarray) -> None:
        assert self._boxes[to][1].apply(words.ctypes.data, len(words))

    def plan(self) -> Action:
        return Action(self._port.plan(*self._policy, 0))

    def commit(self) -> None:
        port, self.steps = self._port, self.steps + 1
        kv, fed = int(port.kv[0]), int(port.query_lens[0])
        self._text[kv : kv + fed] = port.tokens[0, :fed].tolist()
        selecting = int(port.n_select[0])
        selected = torch.zeros((1, max(1, selecting)), dtype=torch.int32)
        truth = self._choices.truth
        for j in range(selecting):
            position = kv + fed - selecting + j + 1
            if position >= len(truth):
                break
            if self.is_target:
                selected[0, j] = truth[position]
            else:
                selected[0, j] = self._choices.of_draft(position, self._text[:position] == truth[:position])
        port.commit(selected.data_ptr() if selecting else 0, selected.shape[1])


def ranks_seconds(
    steps_s: Sequence[float], lookahead: Sequence[int], delay_s: float, choices: _Choices
) -> tuple[float, int]:
    """Simulate ``schedule="ranks"``.

    Args:
        steps_s: Seconds of a step of each stage, the target last.
        lookahead: One per draft.
        delay_s: One-way delay between any two ranks.
        choices: The text.

    Returns:
        Seconds until the target has the whole text, and its steps.
    """
    ranks = [_Rank(i, len(steps_s), step, lookahead, choices) for i, step in enumerate(steps_s)]
    for rank in ranks:
        rank.connect([other for other in ranks if other is not rank])
    count, events = itertools.count(), []  # type: ignore[var-annotated]

    def send(rank: _Rank, now: float) -> None:
        for to, words in rank.messages().items():
            heapq.heappush(events, (now + delay_s, next(count), rank, to, words))

    def go_on(rank: _Rank, now: float) -> bool:
        action = rank.plan()
        send(rank, now)  # a plan may publish a rollback
        rank.parked = action not in (Action.STEP, Action.CATCH_UP)
        if not rank.parked:
            heapq.heappush(events, (now + rank.step_s, next(count), rank, None, None))
        return rank.is_target and action == Action.FINISHED

    for rank in ranks:
        go_on(rank, 0.0)
    while True:
        now, _, rank, to, words = heapq.heappop(events)
        if words is None:
            rank.commit()
            send(rank, now)
            if go_on(rank, now):
                return now, rank.steps
        else:
            rank.deliver(to, words)
            if ranks[to].parked:
                go_on(ranks[to], now)


def spd_seconds(
    stages_s: Sequence[float], draft_s: float, delay_s: float, choices: _Choices, reads: bool = True
) -> tuple[float, int]:
    """Simulate SPD over n + 1 ranks.

    Args:
        stages_s: Seconds of each stage.
        draft_s: Seconds of the drafter, beside the stages.
        delay_s: One-way delay between any two ranks.
        choices: The text.
        reads: Whether the drafter reads the residual streams of all stages, as a draft module does.

    Returns:
        Seconds until the whole text is verified, and the cycles.
    """
    n, truth = len(stages_s), choices.truth
    machine = Machine(n)
    machine.reset([truth[:1]], [len(truth)], ())
    machine.begin(truth[1:2])
    free, now, cycles = [0.0] * n, 0.0, 0
    done: deque[list[float]] = deque(maxlen=n)  # for the columns that entered last: the end of each stage
    while machine.running:
        cycles += 1
        work, requests = machine.entries(), machine.requests()
        ends = []
        if work[0]:
            at = now + delay_s
            for s, seconds in enumerate(stages_s):
                free[s] = max(at, free[s]) + seconds
                ends.append(free[s])
                at = free[s] + delay_s
        done.appendleft(ends)
        drafts = {}
        for request in requests:
            text = list(request.tokens)
            drafts[0] = choices.of_draft(len(text), text == truth[: len(text)])
        drafted = now + (draft_s if requests else 0.0)
        arrivals = [done[s][s] + delay_s for s in range(n) if work[s] and (reads or s == n - 1)]
        now = max([drafted, *arrivals])
        machine.commit(drafts, {entry.row: truth[entry.position + 1] for entry in machine.exits()})
    return now, cycles


def curves(tokens: int, delays: Sequence[float] = DELAYS) -> dict[str, list[float]]:
    """Mean speed-up over plain decoding on one machine, by delay in steps of the target."""
    every = [_Choices(tokens, ACCEPTANCE, seed) for seed in range(_SEEDS)]
    plain = tokens - 1  # the first token is the prompt

    def mean(seconds: list[float]) -> float:
        return fmean(plain / s for s in seconds)

    out: dict[str, list[float]] = {}
    for lookahead in (8, 32):
        name = f"ranks, a draft ten times as fast, lookahead {lookahead}"
        out[name] = [mean([ranks_seconds((0.1, 1.0), (lookahead,), d, c)[0] for c in every]) for d in delays]
    for n in (2, 4, 8):
        out[f"SPD, {n} stages and a draft module"] = [
            mean([spd_seconds([1 / n] * n, 0.5 / n, d, c)[0] for c in every]) for d in delays
        ]
    return out


def picture(found: dict[str, list[float]], delays: Sequence[float] = DELAYS) -> str:
    drawn = [
        Series(name, [max(d, delays[1] / 2) for d in delays], values, i, dashed=name.startswith("SPD"))
        for i, (name, values) in enumerate(found.items())
    ]
    panel = Panel(
        drawn, x_label="one-way delay of a link / time of a target's step", y_label="speed-up over plain", x_log=True
    )
    return chart(
        "What delay each schedule tolerates (simulated)",
        [panel],
        f"Acceptance rate {ACCEPTANCE:g}, independent. At the left edge: no delay. 1: plain decoding on one machine.",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("latency", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400, metavar="T", help="of each text (400)")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write FOLDER/how-to/latency.svg")
    args = parser.parse_args(arguments)
    found = curves(args.tokens)
    header = ("delay / step", *found)
    rows = [(f"{d:g}", *(f"{found[name][i]:.2f}" for name in found)) for i, d in enumerate(DELAYS)]
    print(markdown_table(header, rows))
    if args.docs is not None:
        (args.docs / "how-to" / "latency.svg").write_text(picture(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
