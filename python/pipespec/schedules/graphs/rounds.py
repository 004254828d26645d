"""Rounds: lockstep as a fixed sequence of steps, so that a round can be one captured graph. Plain decoding is the round of one step.

In lockstep a draft takes as many steps as fill its lookahead, which only the host can count. A round fixes these numbers. Text and protocol are the
same. Each number of draft tokens is a graph of its own, and the choice of the next round's costs no host work (:class:`RoundLengths`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from transformers import PreTrainedModel

from pipespec.config import WIDTH, SpeculationConfig
from pipespec.engine.controller import AcceptanceRates, Machine, StepTimes
from pipespec.process.threads import draft_errors
from pipespec.schedules.base import GenerationRequest
from pipespec.schedules.graphs.buffers import GraphKey, StageStep
from pipespec.schedules.graphs.driver import GraphedDriver
from pipespec_kernels._native import StagePort
from pipespec_kernels.state import Action


def round_steps(config: SpeculationConfig, longest: int = 0, plain: int = 0) -> list[StageStep]:
    """Return the steps of a round, the target's last.

    A draft takes as many steps as fill its lookahead if all draft tokens are accepted: with ``h`` draft tokens a step makes ``h + 1`` tokens. Before
    each of its steps, the stage upstream fills its own lookahead.

    In addition to draft tokens a step feeds:

    * one token after a step of the same stage;
    * two after a step of the stage downstream, whose last token it adopts;
    * in the stage's first step of the round, one for each stage downstream and one of its own, since each of them may be one token ahead of its
      upstream, and one for each plain round since the last step;
    * one for each token that the stage downstream may have appended, where a stage without a model lies between the two, since it drafts text of its own. So it is
      in the first step for what the target has committed, also of a draft that reads the target's hidden states.

    A draft without a model takes one step, which drafts all it can. That may be nothing, so the draft behind it takes as many steps as without it; those that find
    nothing left to do return at once.

    Args:
        config: The lookahead of the round, and its drafts.
        longest: Draft tokens that the target may have verified in the round before; those of this one at least.
        plain: Rounds of the target alone that may lie between that round and this one.
    """
    target = len(config.lookahead)
    longest = max(longest, config.max_draft_tokens(target))
    reads_target = {i for i, draft in enumerate(config.drafts) if draft.reads_target}
    inline = {i for i, draft in enumerate(config.drafts) if draft.inline}
    # Behind each stage the next one with a model, and the stages whose text others may carry on without them.
    downstream = {i: next(j for j in range(i + 1, target + 1) if j not in inline) for i in range(target)}
    outrun = {i for i in range(target) if any(j in inline for j in range(i + 1, target))}
    steps: list[StageStep] = []
    begun: set[int] = set()

    def step(stage: int, own: int) -> None:
        draft_tokens = config.max_draft_tokens(stage)
        if draft_tokens > 0:
            fill(stage - 1)
        if stage not in begun and stage < target:
            own = plain + (1 + longest if stage in reads_target | outrun else 1 + target - stage)
            begun.add(stage)
        steps.append(StageStep(stage, WIDTH if stage in inline else min(own + draft_tokens, WIDTH)))

    def fill(stage: int) -> None:
        wanted, per_step = config.max_draft_tokens(stage + 1), config.max_draft_tokens(stage) + 1
        if stage in inline:
            per_step = wanted
        elif stage - 1 in inline:
            per_step = 1
        appended = 1 + config.max_draft_tokens(downstream[stage]) if stage in outrun else 2
        for i in range(-(-wanted // per_step)):
            step(stage, appended if i == 0 else 1)

    step(target, 1)
    return steps


class RoundsDriver(GraphedDriver):
    """Runs lockstep, or with one model plain decoding, in rounds. On a GPU a round is one graph, or where the host takes part, each step is one.

    Under the controller there is a round of each of :data:`LENGTHS`, and the next one is chosen after each round.

    All stages are on one device, else the constructor raises ``ValueError``.
    """

    schedule = "lockstep"

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        if len({model.device for model in models}) > 1:
            places = ", ".join(str(model.device) for model in models)
            what = "graphs=True runs a round of all models as one graph, so they must be on one device"
            raise ValueError(f"{what}; they are on {places}")
        may_resume = all(draft.inline for draft in config.drafts)
        self.lengths = RoundLengths(may_resume=may_resume) if config.controlled else None
        self._noted = 0
        super().__init__(models, config)

    def rounds(self) -> list[tuple[SpeculationConfig, list[StageStep]]]:
        """The configuration and the steps of each round that there is, the narrowest step of the target first."""
        if self.lengths is None:
            return [(self.config, round_steps(self.config))]
        configs = [replace(self.config, lookahead=self._lookahead_of_round(length)) for length in LENGTHS]
        longest = max(config.max_draft_tokens(self.block.target) for config in configs)
        # A plain round is measured once, between rounds with draft tokens.
        return [(config, round_steps(config, longest, plain=1)) for config in configs]

    def graph_keys(self) -> list[GraphKey]:
        return [self._graph_key(steps, config.lookahead) for config, steps in self.rounds()]

    def _lookahead(self) -> tuple[int, ...]:
        if self.lengths is None or self.failed_drafts:
            return super()._lookahead()
        return self._lookahead_of_round(self.lengths.length)

    def _lookahead_of_round(self, length: int) -> tuple[int, ...]:
        """That of all drafts in a round in which the target verifies ``length`` tokens."""
        return (*(min(n, length) for n in self.config.lookahead[:-1]), length)

    def _run_scheduled(self, request: GenerationRequest) -> None:
        self._noted = 0
        super()._run_scheduled(request)

    def _generate(self, request: GenerationRequest) -> None:
        if self.lengths is not None:
            self.lengths.begin()
        super()._generate(request)

    def _committed(self, request: GenerationRequest) -> None:
        super()._committed(request)
        if self.lengths is None or self._by_host:
            return
        for step in self.scheduled.steps_since(self.block.target, self._noted):
            self._noted = int(step["step"]) + 1
            fed, drafted = int(step["fed"]), int(step["draft_tokens"])
            if fed:
                seconds = 1e-9 * float(step["end_ns"] - step["start_ns"])
                self.lengths.note(int(step["width"]) - 1, drafted, int(step["accepted"]), fed - drafted, seconds)
        self.scheduled.steer(self._lookahead())

    def _run_on_host(self, request: GenerationRequest) -> None:
        rounds = {config.max_draft_tokens(self.block.target): (config, steps) for config, steps in self.rounds()}
        ports = {step: self.block.port(*step) for _, steps in rounds.values() for step in steps}
        for step, port in ports.items():
            port.trace(self._trace_of(step.stage))
        action = Action.IDLE
        while action != Action.FINISHED:
            length = next(iter(rounds)) if self.lengths is None else self.lengths.length
            config, steps = rounds[length]
            began = time.perf_counter()
            for step in steps:
                if step.stage not in self.failed_drafts:
                    action = self._step_on_host(step, ports[step], config, began)
            if action != Action.FINISHED:
                self._committed(request)

    def _step_on_host(self, step: StageStep, port: StagePort, config: SpeculationConfig, began: float) -> Action:
        i, target, action, failed = step.stage, self.block.target, Action.IDLE, True
        with nullcontext() if i == target else draft_errors(functools.partial(self.draft_failed, i)):
            bound = self._stages[i].bound(config.lookahead_of(i))
            action = Action(port.plan(bound, config.max_draft_tokens(i), 0))
            if action != Action.STEP:
                return action
            rows = range(self.target.buffers.rows)
            before = sum(self.block.length(target, row) for row in rows)
            selected = self._stages[i].body_on_host(port)
            port.commit(selected.data_ptr(), selected.stride(0))
            if i == target and self.lengths is not None:
                fed, drafted = (int(counts[: len(rows)].sum()) for counts in (port.query_lens, port.num_draft_tokens))
                new = sum(self.block.length(target, row) for row in rows) - before
                seconds = time.perf_counter() - began
                self.lengths.note(step.width - 1, drafted, max(0, new - fed + drafted), fed - drafted, seconds)
            failed = False
        return Action.IDLE if failed else action


LENGTHS = (0, 2, 4, 6)
"""Draft tokens of the rounds; 0: plain decoding."""

_FIRST = 4
_PRIOR = 0.75
"""Acceptance rate before the first measurement."""
_GAIN = 1.02
"""Drafting must be predicted to be this much faster than plain decoding."""
_REVIEW = 8
"""Rounds between two choices."""
_TRIAL = 64
"""Rounds after which drafts that rest are tried again until the next choice."""


class RoundLengths:
    """Chooses the length of captured rounds from their measured times and the acceptance rates, by the closed form of :mod:`pipespec.engine.controller`.

    It belongs to a pipeline: what it has learned serves the next call. A call measures each length that is not known for one round. Where no length pays, it goes
    on in plain rounds: to its end where a model would have to read their tokens.

    Args:
        may_resume: Whether the drafts can be tried again after plain rounds: no model runs in them.
    """

    def __init__(self, *, may_resume: bool = False) -> None:
        self._may_resume = may_resume
        self._times = StepTimes(Machine())
        self._rates = AcceptanceRates(_PRIOR)
        self._known: set[int] = set()
        self._rounds = 0
        self.length = _FIRST
        self.is_resting = False

    def begin(self) -> None:
        """Begin a call."""
        self._rates.begin()
        self._rounds, self.is_resting = 0, False
        self.length = _FIRST
        if self._known.issuperset(LENGTHS):
            self._choose()

    def note(self, length: int, drafted: int, accepted: int, rows: int, seconds: float) -> None:
        """Learn from a round.

        Args:
            length: Of the round: the draft tokens that a row may have.
            drafted: Draft tokens of all rows that the target has verified.
            accepted: How many of them were accepted.
            rows: Rows that took part.
            seconds: Time of the round.
        """
        self._rounds += 1
        # The first round of a call finds cold caches.
        if self._rounds > 1:
            self._times.note(1 + length, seconds)
            self._known.add(length)
        if drafted:
            self._rates.note(round(drafted / rows), round(accepted / rows))
        elif length and self._may_resume:
            self._rates.note(1, 0)  # nothing was found, and the round took as long
        if self.is_resting and self._may_resume and self._rounds % _TRIAL == 0:
            self.is_resting, self.length = False, _FIRST
            return
        if self.is_resting or self._rounds < 2:
            return
        unknown = [n for n in (_FIRST, *LENGTHS[1:], 0) if n not in self._known]
        if unknown and self._rounds < _REVIEW:
            self.length = unknown[0]
        elif self._rounds % _REVIEW == 0:
            self._choose()
        elif self.length == 0:
            self.length = _FIRST

    def _choose(self) -> None:
        """Take the length with the most tokens per second."""
        expected, plain = self._rates.expected(), self._times.seconds(1)
        best, rate = 0, 0.0 if plain is None else _GAIN / plain
        for length in LENGTHS[1:]:
            seconds = self._times.seconds(1 + length)
            if seconds is not None and expected[length] / seconds > rate:
                best, rate = length, expected[length] / seconds
        self._rates.review(best > 0, self._rounds)
        self.length, self.is_resting = best, best == 0
