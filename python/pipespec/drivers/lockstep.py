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

    def __init__(self, models: Sequence[PreTrainedModel], policy: Policy) -> None:
        super().__init__(models, policy)
        self._stages = [Stage(model, self.block, i) for i, model in enumerate(models)]
        for i in range(len(models)):
            self.block.set_alive(i, True)

    @property
    def target(self) -> Stage:
        return self._stages[-1]

    def run(self, request: Request) -> None:
        self._prepare(request)
        start = request.start
        drafts_start = replace(start, selection=pickle.loads(request.draft_selection))
        for stage in self._stages[:-1]:
            stage.prefill(drafts_start)
        self.target.prefill(start, request.record)
        target = len(self._stages) - 1
        while self._advance(target) != Action.FINISHED:
            if request.on_commit is not None:
                request.on_commit()

    def forget(self) -> None:
        for stage in self._stages:
            stage.forget()

    def _advance(self, i: int) -> Action:
        """Give stage ``i`` its drafts, then let it take one step."""
        if self.policy.max_hints(i) > 0:  # else upstream rests
            while self._advance(i - 1) == Action.STEP:
                pass
        return self._stages[i].step(self.policy.window(i), self.policy.max_hints(i))
