"""lockstep: all stages in one process and one loop, one after the other. The default on a CPU and on one GPU."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.acceptance import RejectionAcceptance
from pipespec.engine.stage import Stage
from pipespec.process.signals import draft_errors
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
