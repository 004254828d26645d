"""lockstep: all stages in one process and one loop, one after the other. The default on a CPU and on one GPU.

Without a fixed lookahead, the controller chooses the draft of each round and its number of draft tokens. In the ranks of a tensor-parallel group that do
not lead, :class:`FollowerDriver` runs the target's forwards.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.acceptance import RejectionAcceptance
from pipespec.engine.controller import MAX_DRAFT_TOKENS, Choice, Controller
from pipespec.engine.stage import Stage
from pipespec.models.properties import step_bytes
from pipespec.process.threads import draft_errors
from pipespec.schedules.base import Driver, GenerationRequest
from pipespec_kernels.state import Action


class LockstepDriver(Driver):
    """Runs rounds: each draft fills its lookahead, smallest draft first, then the target verifies once."""

    schedule = "lockstep"

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        super().__init__(models, config)
        by_rejection = config.acceptance != "coupled" and len(self.models) > 1
        self._acceptance = RejectionAcceptance(max(config.lookahead)) if by_rejection else None
        self._stages = [self._make_stage(i, self._acceptance) for i in config.model_stages]
        for stage in self._stages:
            self.block.set_alive(stage.index, True)
            stage.read_from(self.target)

    def another(self) -> Driver | None:
        if not all(draft.runs_at_once for draft in self.config.drafts):
            return None
        return type(self)(self.models, self.config)

    @property
    def target(self) -> Stage:
        return self._stages[-1]

    @property
    def stages(self) -> Sequence[Stage]:
        return self._stages

    def _generate(self, request: GenerationRequest) -> None:
        self.remarks = ()
        if self._acceptance is not None and request.inputs.sampling_params.seeds is not None:
            rule = f"acceptance={self.config.acceptance!r}"
            self.remarks = (
                f"{rule}: the text is a draw from the target's distribution that depends on the draft, too",
            )
        self.begin(request)
        while self.advance() != Action.FINISHED:
            request.committed(self.block)

    def begin(self, request: GenerationRequest) -> None:
        """Lay out the rows and fill the caches of the stages. :meth:`advance` continues from there."""
        self._prepare(request)
        prefill(self, request)

    def advance(self) -> Action:
        """Let the drafts fill their lookahead, then take one step of the target."""
        return advance(self, self.block.target)


def prefill(driver: Driver, request: GenerationRequest) -> None:
    """Fill the caches of the driver's stages, which are all in this process. A draft that fails takes no part in the call."""
    # First: a draft head reads its hidden states.
    driver.target.prefill(request.inputs, request.record)
    prefill_drafts(driver, request)


def prefill_drafts(driver: Driver, request: GenerationRequest) -> None:
    """Fill the caches of the drafts, behind the target's."""
    *drafts, _ = driver.stages
    if not drafts:
        return
    draft_inputs = replace(request.inputs, sampling_params=pickle.loads(request.draft_sampling_params))
    for stage in drafts:
        driver.block.set_alive(stage.index, True)
        with draft_errors(functools.partial(driver.draft_failed, stage.index)):
            stage.prefill(draft_inputs)


def advance(driver: Driver, i: int, lookahead: int | None = None) -> Action:
    """Let the drafts of stage ``i`` fill their lookahead, then take one step of the stage. Returns the action of the step.

    ``lookahead``: of the stage; None: as configured.
    """
    config = driver.config
    stage = next((stage for stage in driver.stages if stage.index == i), None)
    if stage is None:  # an inline one, which drafts before each step of the stage downstream
        return advance(driver, i - 1) if i > 0 else Action.IDLE
    max_draft_tokens = config.max_draft_tokens(i)
    if lookahead is None:
        lookahead = config.lookahead_of(i)
    if max_draft_tokens > 0:
        while advance(driver, i - 1) == Action.STEP:
            pass
    if stage is driver.target:
        return stage.step(lookahead, max_draft_tokens)
    action = Action.IDLE
    if driver.block.is_alive(i):
        with draft_errors(functools.partial(driver.draft_failed, i)):
            action = stage.step(lookahead, max_draft_tokens)
    return action


class ControlledDriver(LockstepDriver):
    """Runs rounds: the draft that the controller chooses proposes tokens, then the target verifies once.

    An inline stage is the last draft. It offers the target its own tokens, or passes on those of the draft models. A draft model that rests reads neither
    the prompt nor the text, and its next step catches up.
    """

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        super().__init__(models, config)
        for stage in self._stages[:-1]:
            stage.defers = stage.may_defer
        self._packed = False
        # The controller runs the inline stage, not the target.
        self._inline, self.target.upstream = self.target.upstream, None
        drafts = [draft for draft in config.drafts if not draft.inline]
        sizes = sum(draft.step_bytes(model) for draft, model in zip(drafts, models, strict=False))
        read = [step_bytes(models[-1], columns) for columns in range(1, MAX_DRAFT_TOKENS + 2)]
        relative_cost = sizes / read[0] if drafts else None
        self._at_once = len(drafts) == 1 and drafts[0].drafts_at_once
        self.controller = Controller(
            relative_cost,
            lambda n: read[min(n, len(read)) - 1] / read[0] - 1,
            at_once=self._at_once,
            compares=not any(draft.reads_target for draft in drafts),
        )

    def begin(self, request: GenerationRequest) -> None:
        super().begin(request)
        if not self._packed and self.controller.may_draft:
            # Not within a text: it takes longer than many steps.
            for stage in self._stages[:-1]:
                with draft_errors(functools.partial(self.draft_failed, stage.index)):
                    stage.pack()
            self._packed = True
        self._limits = request.inputs.limits
        if self._inline is not None:
            self._inline.start(request.inputs.prompts)
        self.controller.begin()

    def _generate(self, request: GenerationRequest) -> None:
        super()._generate(request)
        self.remarks += tuple(self.controller.summary())

    @property
    def plain_step_seconds(self) -> float | None:
        return self.controller.target.seconds(1)

    def advance(self) -> Action:
        """Let the chosen draft propose its tokens, then take one step of the target."""
        target, block, control = self.target, self.block, self.controller
        before = [block.length(block.target, row) for row in range(len(self._limits))]
        choice, matches = Choice(), []
        reads = not target.has_prompt_logits
        if reads:
            if self._inline is not None:
                matches = self._inline.foresee(MAX_DRAFT_TOKENS)
            remaining = max(limit - length for limit, length in zip(self._limits, before, strict=True))
            lag = -1  # no draft model works
            if len(self.models) > 1 and block.is_alive(len(self.models) - 2):
                stage = self._stages[-2]
                lag = stage.lag if stage.defers else 0
            choice = control.choose(matches, lag, remaining)
            self._draft(choice)
        began = time.perf_counter()
        action = target.step(0, choice.tokens)
        if action == Action.STEP:
            if reads:
                control.note_target(target.port.columns, time.perf_counter() - began)
            if choice.tokens:
                after = (block.length(block.target, row) for row in range(len(self._limits)))
                drafted = target.num_draft_tokens
                outcome = [(n, min(n, b - a - 1)) for n, a, b in zip(drafted, before, after, strict=True)]
                control.note_round(choice, matches, outcome)
        return action

    def _draft(self, choice: Choice) -> None:
        if choice.source == "model":
            reads_prompt, began = self._stages[-2].is_deferred, time.perf_counter()
            while self._draft_step(choice.tokens) == Action.STEP:
                pass
            if self._at_once and not reads_prompt:
                self.controller.note_draft(1, time.perf_counter() - began)
            if self._inline is not None:
                self._inline.relay(choice.tokens)
        elif choice.source:
            assert self._inline is not None
            self._inline.fill(choice.tokens)

    def _draft_step(self, lookahead: int) -> Action:
        """One step of the last draft model, in front of which those before it fill their lookahead."""
        stage = self._stages[-2]
        reads_prompt, began = stage.is_deferred, time.perf_counter()
        action = advance(self, stage.index, lookahead)
        if action == Action.STEP:
            seconds = time.perf_counter() - began
            if reads_prompt:
                self.controller.note_reading(seconds)
            elif not self._at_once:
                self.controller.note_draft(stage.port.columns, seconds)
            if stage.agreement[1]:
                self.controller.rates["model"].note_agreement(*stage.agreement)
                stage.agreement = (0, 0)
        return action


@dataclass(frozen=True)
class _Received:
    """The text that the leader has generated, see :class:`pipespec.schedules.base.TextSource`."""

    starts: Sequence[int]
    rows: Sequence[np.ndarray]
    target: int = 0

    def length(self, stage: int, row: int) -> int:
        return self.starts[row] + len(self.rows[row])

    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]:
        start = self.starts[row]
        found: list[int] = self.rows[row][begin - start : end - start].tolist()
        return found

    def end_row(self, row: int) -> None:
        """Nothing to do: the text is complete."""

    def counters(self, stage: int, row: int) -> dict[str, Any]:
        return {}


class FollowerDriver(Driver):
    """Runs the forwards of the target that the leader announces. The text is the leader's."""

    schedule = "follower"

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        super().__init__(models, config)
        self.ran_as = self.schedule
        self._stage = Stage(self.models[-1], self.block, self.block.target, native=config.native)

    @property
    def target(self) -> Stage:
        return self._stage

    def _generate(self, request: GenerationRequest) -> None:
        self._prepare(request)
        rows = self._stage.follow(request.inputs)
        request.committed(_Received([len(prompt) for prompt in request.inputs.prompts], rows))
