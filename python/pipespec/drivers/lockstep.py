"""lockstep: all stages in one process, one loop, in turn. One device; the synchronous baseline; debugging."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from pipespec.drivers.base import Driver, Policy, Request
from pipespec.stage import Stage
from pipespec_kernels.state import Action


class LockstepDriver(Driver):
    """Each round fills the windows from the smallest draft upwards, then lets the target verify once."""

    schedule = "lockstep"

    def __init__(self, models: Sequence[PreTrainedModel], policy: Policy, trace: int = 0) -> None:
        super().__init__(models, policy, trace)
        self._stages = self._make_stages()
        for i in range(len(models)):
            self.block.set_alive(i, True)

    def _make_stages(self) -> Sequence[Stage]:
        return [Stage(model, self.block, i, self._trace_of(i)) for i, model in enumerate(self.models)]

    @property
    def target(self) -> Stage:
        return self._stages[-1]

    def run(self, request: Request) -> None:
        self.begin(request)
        while self.advance() != Action.FINISHED:
            if request.on_commit is not None:
                request.on_commit()

    def begin(self, request: Request) -> None:
        """Lay out the rows and fill the stages' caches; :meth:`advance` goes on from there."""
        self._prepare(request)
        start = request.start
        drafts_start = replace(start, selection=pickle.loads(request.draft_selection))
        for i, stage in enumerate(self._stages[:-1]):
            self.block.set_alive(i, True)
            try:
                stage.prefill(drafts_start)
            except Exception as error:
                self._failed(i, error)
        self.target.prefill(start, request.record)

    def advance(self) -> Action:
        """One step of the target's, behind the drafts that its windows ask for."""
        return self._advance(len(self._stages) - 1)

    @property
    def stages(self) -> Sequence[Stage]:
        return self._stages

    def _advance(self, i: int) -> Action:
        """Give stage ``i`` its drafts, then let it take one step."""
        policy = self.in_force
        if policy.max_hints(i) > 0:  # else upstream rests
            while self._advance(i - 1) == Action.STEP:
                pass
        stage, window, max_hints = self._stages[i], policy.window(i), policy.max_hints(i)
        if stage is self.target:
            return stage.step(window, max_hints)
        if not self.block.is_alive(i):
            return Action.IDLE
        try:
            return stage.step(window, max_hints)
        except Exception as error:  # a draft's failure costs speed, not the text
            self._failed(i, error)
            return Action.IDLE

    def _failed(self, i: int, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        self._lost(i, f"failed ({cause}); this call goes on without it, the next one tries it again")
